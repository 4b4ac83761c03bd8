"The report: read as text, compared with the files by other code, and opened in a browser"

import json
import re
import shutil
from dataclasses import replace
from html import unescape

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser
from published import RESULTS

from reinit_nb.claims import scorecard as claims_scorecard
from reinit_nb.claims.scorecard import effect_text, get_claim, hours_text, paper_text, sample_text, verdict_counts
from reinit_nb.claims.verdict import VERDICT_WORDS
from reinit_nb.cli import reinit_report, reinit_repro
from reinit_nb.core import ReinitError
from reinit_nb.ensemble import MLPRun
from reinit_nb.report.page import (
    completeness,
    distinct_values,
    exhibit_html,
    exhibit_sections,
    judge_results,
    main_scale,
    make_report,
    present_studies,
    read_records,
    runs_page,
    runs_table,
    write_report,
)
from reinit_nb.store import Store
from reinit_nb.studies.common import Table, all_studies, flatten_recipes, get_study
from reinit_nb.studies.freezing import FREEZING_DATASETS, default_reservoir
from reinit_nb.studies.synthetic import table1_recipes, table5_recipes
from reinit_nb.studies.transfer import annealed_warm_runs, transfer_lists
from reinit_nb.sweep import run_sweep

DATA = RESULTS.parent / 'reinit_nb/data'
N_CLAIMS = 54


@pytest.fixture(scope='module')
def html(report_file):
    return report_file.read_text(encoding='utf-8')


def shown_verdicts(html):
    "Claim → verdict in the scorecard of a page"
    return dict(re.findall(r'<tr id="(\w+)">.*?<span class="v \w+">([^<]*)</span>', html, re.DOTALL))


# ---------------------------------------------------------------- the text


def test_every_exhibit_is_shown(html, report_messages):
    assert 'class="dim missing"' not in html
    text = unescape(html)
    for study in all_studies().values():
        assert f'<h3>{study.title}</h3>' in text
        for exhibit in study.exhibits.values():
            if exhibit.section and exhibit.section != study.title:
                assert f'<h4>{exhibit.section}</h4>' in text
        for table in study.tables.values():
            assert table.caption in text
    assert html.count('<img ') == 1 + sum(len(study.figures) for study in all_studies().values())
    assert '<tbody>' in html and not re.search(r'<tbody>\s*</tbody>', html), 'a table without rows'
    assert any('judging' in message for message in report_messages)
    assert len(report_messages) >= len(all_studies())


def test_one_file_that_loads_nothing(report_file, html):
    assert report_file.stat().st_size < 3e6
    loads = r'(?:src|href)="(?!data:|#)|url\(|@import|fetch\(|XMLHttpRequest|WebSocket'
    assert not re.search(loads, html)


def test_ids_and_links(html):
    ids = [unescape(name) for name in re.findall(r' id="([^"]*)"', html)]
    assert len(ids) == len(set(ids))
    assert {unescape(name) for name in re.findall(r'href="#([^"]*)"', html)} <= set(ids)


def test_links_lead_to_the_section_of_the_study(html):
    for study in all_studies().values():
        section = re.search(rf'<section id="([^"]*)">\s*<h3>{re.escape(study.title)}</h3>', unescape(html))
        assert section, study.title
        for claim in study.claims:
            row = re.search(rf'<tr id="{claim}">.*?</tr>', html, re.DOTALL)[0]
            assert f'href="#{section[1]}"' in row, claim


def test_every_image_has_a_text(html):
    alts = [unescape(text) for text in re.findall(r'<img alt="([^"]*)"', html)]
    assert len(alts) == len(set(alts)) == html.count('<img ') > 25
    for text in alts:
        assert len(text) > 60 and re.search(r'\d', text) and text.endswith('.'), text
        assert 'nan' not in text, text


def test_every_claim_has_an_anchor_and_its_evidence(html):
    ids = pd.read_csv(DATA / 'claims.csv').id
    assert len(ids) == N_CLAIMS
    for claim in ids:
        assert f'<tr id="{claim}">' in html, claim
        assert f'id="{claim}-evidence"' in html, claim


# ---------------------------------------------------------------- small parts


def test_small_parts():
    assert distinct_values([None, None]) == '–'
    counts = verdict_counts(pd.DataFrame(dict(paper='reinit', verdict=['✅', '', '✅'])))
    assert counts.sum().to_dict() == {'✅': 2, '❌': 0, '≈': 0, '?': 0}


def test_wrong_folders(tmp_path):
    with pytest.raises(ReinitError, match='is not there'):
        make_report(tmp_path / 'nowhere')
    (tmp_path / 'file').touch()
    with pytest.raises(ReinitError, match='is a file'):
        make_report(tmp_path / 'file')
    with pytest.raises(ReinitError, match='there are no results'):
        make_report(tmp_path)


def test_damaged_file_is_named(tmp_path):
    path = tmp_path / 'synthetic_laptop.csv'
    text = (RESULTS / path.name).read_text()
    path.write_text(text[: len(text) // 2])
    out = tmp_path / 'out.html'
    with pytest.raises(ReinitError, match='synthetic_laptop.csv is cut short'):
        write_report(tmp_path, out)
    assert not out.exists()


def test_only_our_own_errors_are_told_on_the_page(monkeypatch):
    "A fault in an exhibit or a measurement is a fault, and no missing result"

    def broken(*results):
        raise KeyError('x')

    def missing(*results):
        raise ReinitError('not here')

    exhibits = dict(broken=Table(broken, ('table2',), 'Broken'), missing=Table(missing, ('table2',), 'Missing'))
    tables = replace(get_study('reinit_tables'), exhibits=exhibits).load(RESULTS)
    with pytest.raises(KeyError):
        exhibit_html('broken', tables)
    assert 'Not shown: not here' in exhibit_html('missing', tables)

    claim = get_claim('R4')
    opened = dict(reinit_tables=tables)
    monkeypatch.setattr(claims_scorecard, 'get_claim', lambda id: replace(claim, measure=broken))
    with pytest.raises(KeyError):
        judge_results(opened)
    monkeypatch.setattr(claims_scorecard, 'get_claim', lambda id: replace(claim, measure=missing))
    judged = judge_results(opened).set_index('id')
    assert judged.measured['R4'] == 'not judged: not here' and judged.verdict['R4'] == ''


def test_exhibits_without_a_section_come_first():
    study = get_study('reinit_tables')
    exhibits = {name: replace(exhibit, section='') for name, exhibit in study.tables.items()}
    parts = exhibit_sections(replace(study, exhibits=exhibits).load(RESULTS))
    assert parts and all(isinstance(part, str) for part in parts)


def test_part_of_the_results(tmp_path):
    "What is missing is named; other scales are left alone"
    for name in ('synthetic', 'spectra_laws'):
        shutil.copy(RESULTS / f'{name}_laptop.csv', tmp_path)
    shutil.copy(RESULTS / 'spectra_laws_laptop.csv', tmp_path / 'spectra_laws_paper.csv')
    assert main_scale(tmp_path) == 'laptop'
    html = make_report(tmp_path).html
    assert 'Not shown:' in html and 'spectra_laptop.csv is missing' in html
    assert str(tmp_path) not in html
    assert get_study('synthetic').title in unescape(html)
    assert f'<h3>{get_study("freezing").title}</h3>' not in html
    verdicts = shown_verdicts(html)
    judged = {'R1', 'R2', 'R3', 'R4', 'R5', 'F4'}
    assert {verdicts[claim] for claim in judged} <= {'holds', 'fails', 'equivalent', 'undecided'}
    assert {verdict for claim, verdict in verdicts.items() if claim not in judged} == {'not judged'}


def test_studies_without_results_are_left_out(tmp_path):
    shutil.copy(RESULTS / 'spectra_laws_laptop.csv', tmp_path)
    assert set(present_studies(tmp_path, 'laptop')) == {'reinit_tables', 'spectra'}
    assert set(present_studies(tmp_path, 'laptop', names=['spectra'])) == {'spectra'}


# ---------------------------------------------------------------- a store


def more_runs():
    return [MLPRun('FC', seed=seed, steps=3, hidden=(8,)) for seed in range(3)]


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp('runs'))
    run_sweep(table1_recipes('smoke') + more_runs(), store, show=False)
    return store


def test_runs_are_grouped(store):
    records, damaged = read_records(store.root)
    assert damaged == [] and len(records) == len(table1_recipes('smoke')) + 3
    table, same = runs_table(records)
    assert table.runs.sum() == len(records)
    assert 'method' in table and 'seed' not in table
    mine = table[table.steps == 3]
    wanted = store.frame(more_runs())
    assert len(mine) == 1 and mine.runs.item() == 3
    assert mine.test_acc.item() == pytest.approx(wanted.groupby('seed').test_acc.last().mean())
    assert same.set_index('field')['value']['task'] == 'SyntheticTask'


def test_completeness_of_a_store(store):
    table = completeness(read_records(store.root)[0]).set_index(['file', 'scale'])
    here = len(table1_recipes('smoke'))
    assert table.here['synthetic', 'smoke'] == here
    assert table.of['synthetic', 'smoke'] > here


def test_learning_paths_and_their_lists(tmp_path):
    "Images that are not available are not waited for"
    store = Store(tmp_path / 'runs')
    recipes = flatten_recipes(transfer_lists('laptop'))
    for recipe in recipes:
        if not get_study('transfer').unavailable(recipe):
            store.put(recipe, [dict(stage=1, test_acc=0.5)])
    records, damaged = read_records(store.root)
    assert damaged == []
    table = completeness(records).set_index(['file', 'scale'])
    assert table.here['transfer', 'laptop'] == table.of['transfer', 'laptop'] < len(recipes)
    paths = [record for record in records if record['recipe']['class'] == 'PathRun']
    rows, _ = runs_table(paths)
    assert rows.runs.sum() == len(paths)
    assert any(column.startswith('path.0.') for column in rows)


def test_damaged_records_are_named_and_left(tmp_path):
    store = Store(tmp_path / 'runs')
    recipes = [MLPRun(seed=seed, steps=2) for seed in range(3)]
    run_sweep(recipes, store, show=False)
    files = [store.path(recipe) / 'record.json' for recipe in recipes]
    files[0].write_text(files[0].read_text()[:100])
    record = json.loads(files[1].read_text())
    record['rows'][0]['test_acc'] = 1.0
    files[1].write_text(json.dumps(record))
    html, _ = runs_page(store.root)
    assert 'it cannot be parsed' in html and 'its checksum is wrong' in html
    assert all(file.exists() for file in files)
    for file in files:
        file.write_text('')
    with pytest.raises(ReinitError, match='none of the 3 records'):
        make_report(store.root)


def test_complete_study_in_a_store_is_judged(tmp_path, store):
    root = tmp_path / 'runs'
    shutil.copytree(store.root, root)
    run_sweep(table5_recipes('smoke'), Store(root), show=False)
    report = make_report(root)
    assert (report.kind, report.scale) == ('runs', 'smoke')
    verdicts = shown_verdicts(report.html)
    assert set(verdicts) == {'R1', 'R2', 'R3'}
    assert 'smoke runs' in report.html and 'No claim is judged' not in report.html
    text = unescape(report.html)
    assert get_study('synthetic').title in text and get_study('spectra').title not in text


# ---------------------------------------------------------------- the command


def test_command_on_a_store(tmp_path, store, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [str(store.root), '--out', 'new/mine.html']
    assert reinit_report(argv) == 0
    printed = capsys.readouterr()
    assert printed.out == 'The page: new/mine.html\n' and 'reading runs' in printed.err
    assert reinit_report([*argv, '--json']) == 0  # ours: may be replaced
    about = json.loads(capsys.readouterr().out)
    assert (about['kind'], about['source'], about['scale']) == ('runs', str(store.root), None)
    page = tmp_path / about['page']
    assert about['bytes'] == page.stat().st_size > 5000
    assert reinit_report([*argv, '--scale', 'paper']) == 2
    assert 'no results file of a study is complete at paper scale' in capsys.readouterr().err
    assert [path.name for path in page.parent.iterdir()] == ['mine.html']  # nothing is left behind


@pytest.mark.parametrize(
    'argv, message',
    [
        ('nowhere', 'nowhere is not there'),
        ('mine.txt', 'mine.txt is a file'),
        ('.', 'there are no results in .'),
        ('. --out mine.txt', 'no page of ours'),
        ('. --out .', 'is a folder'),
        ('. --out mine.txt/x.html', 'is a file'),
        ('--scale huge', 'huge'),
        ('--wrong', 'see reinit_report --help'),
    ],
)
def test_command_reports_wrong_input(tmp_path, capsys, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / 'mine.txt'
    mine.write_text('mine')
    assert reinit_report(argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == '' and message in printed.err
    assert printed.err.startswith('reinit_report: ') and printed.err.count('\n') == 1
    assert list(tmp_path.iterdir()) == [mine] and mine.read_text() == 'mine'


def test_command_names_a_damaged_file(tmp_path, capsys):
    text = (RESULTS / 'spectra_laws_laptop.csv').read_text()
    (tmp_path / 'spectra_laws_laptop.csv').write_text(text[:-40])
    out = tmp_path / 'x.html'
    assert reinit_report([str(tmp_path), '--out', str(out)]) == 2
    assert 'spectra_laws_laptop.csv is cut short or damaged' in capsys.readouterr().err
    assert not out.exists()


def test_command_reports_what_was_used(tmp_path, capsys):
    shutil.copy(RESULTS / 'spectra_laws_laptop.csv', tmp_path)
    argv = [str(tmp_path), '--out', str(tmp_path / 'x.html')]
    assert reinit_report([*argv, '--json']) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about['kind'], about['source'], about['scale']) == ('results', str(tmp_path), 'laptop')
    assert reinit_report([*argv, '--scale', 'paper']) == 2


def test_report_on_a_folder_of_repro(tmp_path, capsys, monkeypatch, store):
    "What one command has written the other takes, also with another number of seeds"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store.root, 'runs')
    argv = ['synthetic', '--scale', 'smoke', '--out', 'o', '--runs', 'runs', '--seeds', '1']
    assert reinit_repro(argv) == 0
    capsys.readouterr()
    assert reinit_report(['o', '--out', 'o.html', '--json']) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about['source'], about['scale']) == ('o', 'smoke')
    html = (tmp_path / 'o.html').read_text(encoding='utf-8')
    assert get_study('synthetic').title in unescape(html) and 'smoke runs' in html
    assert 'class="dim missing"' not in html
    verdicts = shown_verdicts(html)
    assert 'not judged' not in {verdicts[claim] for claim in ('R1', 'R2', 'R3')}
    assert reinit_report(['o', '--out', 'o.html', '--scale', 'laptop']) == 2
    assert 'there are no results in o' in capsys.readouterr().err


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope='module')
def opened(browser, report_file):
    "The report in a browser, for tests that only read it"
    with browser.open(report_file) as page:
        yield page


def cells(page, caption):
    "The table whose caption begins so, as a DataFrame of texts; folded ones, too"
    rows = page.js(
        f"""(() => {{
          const starts = t => t.caption?.textContent.startsWith({json.dumps(caption)});
          const table = [...document.querySelectorAll('table')].find(starts);
          return [...table.rows].map(r => [...r.cells].map(c => c.textContent.trim()));
        }})()"""
    )
    return pd.DataFrame(rows[1:], columns=rows[0])


def published(name):
    return pd.read_csv(RESULTS / f'{name}_laptop.csv', low_memory=False)


def last_rounds(name):
    "The last round of every run of a table of the synthetic study"
    rows = published('synthetic')
    rows = rows[rows.table == name] if 'table' in rows else rows
    recipes = {'table1': table1_recipes, 'table5': table5_recipes}[name]('laptop')
    rows = rows[rows.recipe.isin([recipe.hash for recipe in recipes])]
    return rows[rows['round'] == rows.groupby('recipe')['round'].transform('max')]


def leading_number(text):
    return float(text.split()[0].replace('−', '-'))


@needs_browser
def test_opens_without_complaints(report_file, browser):
    with browser.open(report_file) as page:
        assert page.problems() == []
        assert [url for _, url in page.requests if not url.startswith('data:')] == [report_file.as_uri()]
        assert page.js('[...document.images].every(o => o.complete && o.naturalWidth > 100)')
        assert page.js("document.querySelectorAll('h1').length") == 1


@needs_browser
def test_claims_are_those_of_the_scorecard(opened, scorecard):
    "Every row: outcome, value with interval, what was measured, the paper's number, n and scale"
    table = cells(opened, 'All claims').set_index('claim')
    assert list(table.index) == list(scorecard.id)
    for _, claim in scorecard.iterrows():
        row = table.loc[claim.id]
        if not claim.n:
            assert (row.outcome, row['ours [95%]'], row.n) == ('not judged', '–', '–'), claim.id
            continue
        assert row.outcome == VERDICT_WORDS[claim.verdict], claim.id
        delta = '' if pd.isna(claim.delta) else f'; δ = {claim.delta:g}'
        shown = '–' if pd.isna(claim.value) else f'{effect_text(claim)} {claim.measure}{delta}'
        assert row['ours [95%]'] == shown, claim.id
        spent = '' if pd.isna(claim.spent) else f'; {hours_text(claim.spent)} spent'
        assert row.n == f'{sample_text(claim)}{spent}'.replace('; ', ' ', 1), claim.id
        assert row['what it says'] == claim.claim, claim.id
        runs = 'before the rule †' if claim.old_runs else 'after the rule'
        assert row.runs == (runs if claim.newest else '–'), claim.id
        assert row["paper's"] == (paper_text(claim) or '–'), claim.id
        assert row['scale'] == claim['scale'], claim.id


@needs_browser
def test_headline_counts_the_rows(opened):
    table = cells(opened, 'All claims')
    counts = table.outcome.value_counts()
    tiles = dict(zip(opened.texts('.tiles span'), map(int, opened.texts('.tiles b'))))
    assert tiles['claims'] == len(table) == N_CLAIMS
    for text, outcome in zip(('hold', 'fail', 'equivalent', 'undecided'), VERDICT_WORDS.values()):
        assert tiles[text] == counts.get(outcome, 0)
    papers = cells(opened, 'By paper')
    assert papers.claims.astype(int).sum() == N_CLAIMS
    assert papers['holds'].astype(int).sum() == counts['holds']
    subtitle = opened.texts('header p')[0]
    assert f'{counts["holds"]} hold' in subtitle
    other = table[table['scale'] != 'laptop']
    assert set(other.claim) == {'R4', 'R5', 'Z10'}
    assert all(claim in subtitle for claim in other.claim)
    assert f'{len(table) - len(other)} are measured at laptop scale' in subtitle


@needs_browser
def test_table1_is_that_of_the_file(opened):
    "By plain pandas from the CSV, without a function of the library"
    ours = 100 * last_rounds('table1').groupby(['task.alpha', 'method']).test_acc.mean()
    theirs = pd.read_csv(DATA / 'reinit_table1.csv').set_index(['alpha', 'method']).accuracy
    shown = cells(opened, 'Table 1, test').set_index('α')
    assert shown.shape == (3, 6)
    for alpha, row in shown.iterrows():
        for method, text in row.items():
            found = re.fullmatch(r'([\d.]+) ± [\d.]+ \(([\d.]+)\)', text)
            assert abs(float(found[1]) - ours[float(alpha), method]) <= 0.0501, (alpha, method, text)
            assert float(found[2]) == theirs[float(alpha), method], (alpha, method, text)


@needs_browser
def test_table5_is_that_of_the_file(opened):
    rows = last_rounds('table5')
    reinitialized = np.where(rows.redraw.astype(str) == 'True', 'LW', 'Rescaling')
    method = np.where(rows.method == 'BL', 'Baseline', reinitialized)
    ours = rows.groupby([(rows.l2 / 10).round(6), method]).test_acc.mean()
    theirs = pd.read_csv(DATA / 'reinit_table5.csv').set_index(['l2_penalty', 'method']).accuracy
    shown = cells(opened, 'Table 5, test').set_index('L2 penalty')
    assert shown.shape == (6, 3)
    for penalty, row in shown.iterrows():
        for name, text in row.items():
            assert abs(leading_number(text) - ours[float(penalty), name]) <= 0.00501, (penalty, name, text)
            assert float(re.search(r'\(([\d.]+)\)', text)[1]) == theirs[float(penalty), name], (penalty, name, text)


@needs_browser
def test_cnns_are_those_of_the_file(opened):
    rows = get_study('reinit_cnn').load(RESULTS).part('converged_table')
    means = 100 * rows.groupby(['dataset', 'model', 'method']).test_acc.mean()
    shown = cells(opened, get_study('reinit_cnn').tables['table2'].caption)
    shown = shown.set_index(['dataset', 'model'])
    assert len(shown) == means.groupby(['dataset', 'model']).ngroups
    for (*setting, method), value in means.items():
        assert float(shown.loc[tuple(setting), method]) == pytest.approx(value, abs=0.051), (setting, method)


@needs_browser
def test_freezing_is_that_of_the_file(opened):
    rows = published('freezing')
    default = (rows.repeats == 2) & (rows['scale'] == 2) & (rows.position == 'alternating')
    default &= ~rows.skip.astype(bool) & (rows.regularizer == 'none') & (rows.epoch == rows.epochs)
    rows = rows[default]
    widths = {name: default_reservoir(name, 'laptop').base for name in FREEZING_DATASETS}
    rows = rows[rows.base == rows['task.dataset'].map(widths)]
    shown = cells(opened, 'Test accuracy in percent ± 1.96').set_index('dataset')
    assert set(shown.index) == set(FREEZING_DATASETS)
    for (dataset, frozen), value in rows.groupby(['task.dataset', 'frozen']).test_acc.mean().items():
        if frozen not in (0, 1):
            continue
        text = shown.loc[dataset, 'frozen' if frozen else 'trained']
        assert leading_number(text) == pytest.approx(100 * value, abs=0.051), (dataset, frozen)


@needs_browser
def test_sparse_networks_are_those_of_the_file(opened):
    shown = cells(opened, get_study('frozen_weights').tables['sparsity'].caption)
    for (kind, share), rows in published('frozen_weights_sparse').groupby(['kind', 'q']):
        row = shown[(shown.kind == kind) & (shown.q.astype(float) == share)]
        assert len(row) == 1
        assert float(row['test'].item()) == pytest.approx(100 * rows.test_acc.mean(), abs=0.051)


@needs_browser
def test_warm_starts_are_those_of_the_file(opened):
    rows = published('transfer_warm_annealed')
    last = rows[rows.stage == rows.groupby('recipe').stage.transform('max')].set_index('recipe').test_acc
    shown = cells(opened, get_study('transfer').tables['warm'].caption).set_index(['learning rate', 'start'])
    lists = annealed_warm_runs('laptop')
    assert len(shown) == len(lists)
    for (start, rate), recipes in lists.items():
        mean = last[[recipe.hash for recipe in recipes]].mean()
        assert float(shown.test_acc[rate, start]) == pytest.approx(mean, abs=0.0051), (start, rate)


@needs_browser
def test_labels_are_those_of_the_file(opened):
    rows = published('spectra_images')
    tables = get_study('spectra').tables
    shown = cells(opened, tables['labels'].caption).set_index('model')
    other = cells(opened, tables['other_labels'].caption).set_index(['task.dataset', 'model'])
    means = 100 * rows[rows.reached].groupby(['task.dataset', 'model', 'labels']).test_accuracy.mean()
    for (dataset, model, labels), value in means.items():
        text = shown.loc[model, labels] if dataset == 'cifar10' else other.loc[(dataset, model), labels]
        assert float(text) == pytest.approx(value, abs=0.051), (dataset, model, labels)
    assert float(shown.loc['vgg11', 'paper: none']) == 84.33


@needs_browser
def test_scorecard_sorts_and_filters(browser, report_file):
    table = '#scorecard table'
    with browser.open(report_file) as page:
        head = page.table(table)[0]

        def column(name):
            return [row[head.index(name)] for row in page.table(table)[1:]]

        def order(name):
            header = f"document.querySelectorAll('#scorecard thead th')[{head.index(name)}]"
            return page.js(f"{header}.getAttribute('aria-sort')")

        def counts():
            return [float(text.split()[0].replace(',', '')) for text in column('n') if text != '–']

        assert column('claim') == pd.read_csv(DATA / 'claims.csv').id.tolist()
        page.click('#scorecard th button', head.index('outcome'))
        outcomes = column('outcome')
        assert outcomes == sorted(outcomes, key=['holds', 'equivalent', 'undecided', 'fails'].index)
        assert order('outcome') == 'ascending'
        page.focus('#scorecard th button', head.index('n')).press('Enter')
        assert counts() == sorted(counts()) and order('n') == 'ascending' and order('outcome') is None
        page.press('Space')
        assert counts() == sorted(counts(), reverse=True) and order('n') == 'descending'
        page.click('#scorecard th button', head.index('claim'))
        assert column('claim')[:3] == ['C1', 'C2', 'C3'] and column('claim')[9] == 'C10'

        page.focus('input[type=search]').type('LW margin')
        found = [' '.join(row).lower() for row in page.table(table)[1:]]
        assert 0 < len(found) < N_CLAIMS
        assert all('lw' in row and 'margin' in row for row in found)

        page.goto(f'{report_file}#F3')
        assert len(page.table(table)) - 1 == N_CLAIMS
        assert page.js("document.querySelector('tr:target').id") == 'F3'
        page.click('#F3 a')  # to the evidence, which has the same verdict
        assert page.js('location.hash') == '#F3-evidence'
        assert page.texts('#F3-evidence .v')[0] == page.texts('#F3 td')[1]
        assert page.problems() == []


@needs_browser
@pytest.mark.parametrize('dark', [False, True])
def test_readable_in_light_and_dark(browser, report_file, dark):
    with browser.open(report_file, dark=dark) as page:
        page.js("document.querySelectorAll('details').forEach(o => o.open = true)")
        assert page.settle().contrasts() == []
        page.click('#theme')
        assert page.contrasts() == []


@needs_browser
@pytest.mark.parametrize('width', [320, 390, 768, 1400])
def test_fits_the_screen(browser, report_file, width):
    with browser.open(report_file, size=(width, 844), mobile=width < 500) as page:
        page.js("document.querySelectorAll('details').forEach(o => o.open = true)")
        assert page.settle().overflow() <= 0 and page.js('innerWidth') == width
        narrow = "[...document.querySelectorAll('table')].every(t => t.closest('.scroll').clientWidth <= innerWidth)"
        assert page.js(narrow)
        if width in (390, 1400):  # nothing of the claims is cut off
            scroll = "document.querySelector('#scorecard .scroll')"
            assert page.js(f'{scroll}.scrollWidth - {scroll}.clientWidth') <= 0


@needs_browser
def test_page_about_runs(browser, store, tmp_path):
    path = write_report(store.root, tmp_path / 'runs.html')
    caption = 'MLPRun: fields that differ'
    with browser.open(path, size=(390, 844)) as page:
        table = cells(page, caption)
        assert table.runs.astype(int).sum() == len(table1_recipes('smoke')) + 3
        page.click('table th button', table.columns.get_loc('test_acc'))
        values = [float(text) for text in cells(page, caption).test_acc]
        assert values == sorted(values)
        assert page.problems() == [] and page.overflow() <= 0 and page.contrasts() == []
        assert 'No claim is judged' in page.js('document.body.textContent')

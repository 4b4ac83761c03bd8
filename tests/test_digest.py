"The page about all results: opened in a browser, and compared with the files by other code"
import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser

from reinit_nb import cnn, reservoir, scorecard, study, transfer
from reinit_nb import digest as pages
from reinit_nb.cli import reinit_report, reinit_repro
from reinit_nb.core import ReinitError, Store
from reinit_nb.digest import (
    BLOCKS,
    STUDIES,
    complete_lists,
    count,
    digest,
    distinct,
    ends,
    main_scale,
    ranking,
    read_runs,
    runs_table,
    store_digest,
    write_digest,
)
from reinit_nb.ensemble import MLPRun
from reinit_nb.scorecard import each, left_out
from reinit_nb.sweep import run

RESULTS = Path(__file__).parents[1] / 'results'

@pytest.fixture(scope='module')
def said(): return []
@pytest.fixture(scope='module')
def file(tmp_path_factory, said): return write_digest(RESULTS, tmp_path_factory.mktemp('digest') / 'report.html', say=said.append)
@pytest.fixture(scope='module')
def html(file): return file.read_text(encoding='utf-8')

# ---------------------------------------------------------------- the text

def test_all_blocks_have_something_to_show(html, said):
    assert 'class="dim missing"' not in html
    for k, s in STUDIES.items(): assert f'<h3>{s.title}</h3>' in unescape(html) and BLOCKS[k]
    assert html.count('<h4>') == sum(map(len, BLOCKS.values()))
    assert any('judging' in o for o in said) and len(said) >= len(STUDIES)

def test_one_file_that_asks_for_nothing(file, html):
    assert file.stat().st_size < 3e6
    assert not re.search(r'(?:src|href)="(?!data:|#)|url\(|@import|fetch\(|XMLHttpRequest|WebSocket', html)
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(map(unescape, re.findall(r'href="#([^"]*)"', html))) <= set(map(unescape, ids))       # no link leads nowhere

def test_every_image_says_what_one_sees(html):
    alts = [unescape(o) for o in re.findall(r'<img alt="([^"]*)"', html)]
    assert len(alts) == html.count('<img ') > 25
    for o in alts: assert len(o) > 60 and re.search(r'\d', o) and 'nan' not in o.split(), o          # numbers, and none of them missing
    assert len(set(alts)) == len(alts)

def test_every_claim_has_an_anchor_and_its_evidence(html):
    ids = pd.read_csv(RESULTS.parent / 'reinit_nb/data/claims.csv').id
    assert len(ids) == 42
    for o in ids: assert f'<tr id="{o}">' in html and f'id="{o}-evidence"' in html, o

# ---------------------------------------------------------------- small parts

def test_words():
    assert ranking({'a': 1., 'b': 2.}) == 'b 2.0, a 1.0' and distinct([None, None]) == '–'
    assert count(pd.DataFrame(dict(verdict=['✅', '', '✅']))) == {'✅': 2, '❌': 0, '➖': 0}
    d = pd.DataFrame(dict(m=['a', 'a', 'a'], x=[2, 1, 3], y=[5., 1., np.nan]))
    assert ends(d, 'm', 'x', 'y') == 'a goes from 1.0 to 5.0'

@pytest.mark.parametrize('make, message', [(lambda d: d / 'nowhere', 'is not there'), (lambda d: (d / 'x').write_text('') and d / 'x' or d / 'x', 'is a file'), (lambda d: d, 'neither results')])
def test_wrong_folders(tmp_path, make, message):
    with pytest.raises(ReinitError, match=message): digest(make(tmp_path))

def test_damaged_file_is_named(tmp_path):
    f = tmp_path / 'synthetic_laptop.csv'
    text = (RESULTS / f.name).read_text()
    f.write_text(text[:len(text) // 2])
    out = tmp_path / 'out.html'
    with pytest.raises(ReinitError, match='synthetic_laptop.csv is cut short'): write_digest(tmp_path, out)
    assert not out.exists()

def test_only_our_own_errors_are_told_on_the_page(tmp_path, monkeypatch):
    "A fault in a block or a judge is a fault, and no missing result"
    shutil.copy(RESULTS / 'waves_laws_laptop.csv', tmp_path)
    res = pages.Source(tmp_path)
    def broken(res): raise KeyError('x')
    monkeypatch.setitem(pages.BLOCKS, 'tables', [('Broken', broken)])
    with pytest.raises(KeyError): pages.blocks('tables', res)
    monkeypatch.setitem(scorecard.CLAIMS, 'F4', broken)
    with pytest.raises(KeyError): pages.judge(res)
    def missing(res): raise ReinitError('not here')
    monkeypatch.setitem(pages.BLOCKS, 'tables', [('Missing', missing)])
    monkeypatch.setitem(scorecard.CLAIMS, 'F4', missing)
    assert 'Not shown: not here' in pages.blocks('tables', res)[0][1] and pages.judge(res).set_index('id').measured['F4'] == 'not judged: not here'

def test_part_of_the_results(tmp_path):
    "What is missing is said, not guessed; other scales are left alone"
    for k in ('synthetic', 'waves_laws'): shutil.copy(RESULTS / f'{k}_laptop.csv', tmp_path)
    shutil.copy(RESULTS / 'waves_laws_laptop.csv', tmp_path / 'waves_laws_paper.csv')
    assert main_scale(tmp_path) == 'laptop'
    h = digest(tmp_path)
    assert 'Not shown:' in h and 'waves_laptop.csv is missing' in h and STUDIES['synthetic'].title in unescape(h) and f'<h3>{STUDIES["freezing"].title}</h3>' not in h
    t = pd.DataFrame(re.findall(r'<tr id="(\w+)">.*?<span class="v \w+">([^<]*)</span>', h), columns=['id', 'verdict']).set_index('id').verdict
    assert set(t[['R1', 'R2', 'R3', 'R4', 'R5', 'F4']]) <= {'holds', 'fails', 'open'} and set(t.drop(['R1', 'R2', 'R3', 'R4', 'R5', 'F4'])) == {'not judged'}

# ---------------------------------------------------------------- a store

@pytest.fixture(scope='module')
def store(tmp_path_factory):
    s = Store(tmp_path_factory.mktemp('runs'))
    run(study.table1_recipes('smoke'), s, show=False)
    run([MLPRun('FC', seed=i, steps=3, hidden=(8,)) for i in range(3)], s, show=False)
    return s

def test_runs_are_grouped(store):
    good, bad = read_runs(store.root)
    assert bad == [] and len(good) == len(study.table1_recipes('smoke')) + 3
    t, same = runs_table(good)
    assert t.runs.sum() == len(good) and 'method' in t and 'seed' not in t
    mine = t[t.steps == 3]
    want = store.frame([MLPRun('FC', seed=i, steps=3, hidden=(8,)) for i in range(3)])
    assert len(mine) == 1 and mine.runs.item() == 3
    assert mine.test_acc.item() == pytest.approx(want.groupby('seed').test_acc.last().mean())
    assert same.set_index('field')['value']['task'] == 'SyntheticTask'

def test_lists_in_a_store(store):
    t = complete_lists(read_runs(store.root)[0]).set_index(['file', 'scale'])
    n = len(study.table1_recipes('smoke'))
    assert t.here['synthetic', 'smoke'] == n and t.of['synthetic', 'smoke'] > n

def test_learning_paths_and_their_lists(tmp_path):
    s = Store(tmp_path / 'runs')
    lists = transfer.study('laptop')
    for r in each(lists):
        if not left_out(r): s.put(r, [dict(stage=1, test_acc=.5)])
    good, bad = read_runs(s.root)
    t = complete_lists(good).set_index(['file', 'scale'])
    assert bad == [] and t.here['transfer', 'laptop'] == t.of['transfer', 'laptop'] < len(each(lists))    # images that could not be had are not waited for
    kind = [r for r in good if r['recipe']['class'] == 'PathRun']
    rows, same = runs_table(kind)
    assert rows.runs.sum() == len(kind) and any(c.startswith('path.0.') for c in rows)

def test_damaged_record_is_named_and_left(tmp_path, store):
    s = Store(tmp_path / 'runs')
    recipes = [MLPRun(seed=i, steps=2) for i in range(3)]
    run(recipes, s, show=False)
    files = [s.path(r) / 'record.json' for r in recipes]
    files[0].write_text(files[0].read_text()[:100])
    d = json.loads(files[1].read_text())
    d['rows'][0]['test_acc'] = 1.
    files[1].write_text(json.dumps(d))
    h = store_digest(s.root)
    assert 'it cannot be parsed' in h and 'its checksum is wrong' in h and all(f.exists() for f in files)
    for f in files: f.write_text('')
    with pytest.raises(ReinitError, match='none of the 3 records'): digest(s.root)

def test_complete_list_is_judged(tmp_path, store):
    s = Store(tmp_path / 'runs')
    shutil.copytree(store.root, s.root)
    run(study.table5_recipes('smoke'), s, show=False)
    h = digest(s.root)
    assert all(f'<tr id="{o}">' in h for o in ('R1', 'R2', 'R3')) and '<tr id="R4">' not in h and 'smoke runs' in h and 'No claim is judged' not in h
    assert STUDIES['synthetic'].title in unescape(h) and STUDIES['spectra'].title not in unescape(h)

# ---------------------------------------------------------------- the command

def test_command(tmp_path, store, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reinit_report([str(store.root), '--out', 'new/mine.html']) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f'The page: {Path("new/mine.html")}'] and 'reading runs' in err
    assert reinit_report([str(store.root), '--out', 'new/mine.html', '--json']) == 0                   # ours: may be replaced
    d = json.loads(capsys.readouterr().out)
    assert (d['kind'], d['source'], d['scale']) == ('runs', str(store.root), None)                      # nothing was judged, at no scale
    assert reinit_report([str(store.root), '--out', 'new/mine.html', '--scale', 'paper']) == 2
    assert 'no list of recipes of a study is complete at paper scale' in capsys.readouterr().err
    assert d['page'] == str(Path('new/mine.html')) and d['bytes'] == Path('new/mine.html').stat().st_size > 5000
    assert [o.name for o in Path('new').iterdir()] == ['mine.html']                                    # nothing is left behind

@pytest.mark.parametrize('argv, said', [(['nowhere'], 'nowhere is not there'), (['mine.txt'], 'mine.txt is a file'), (['.'], 'neither results'), (['.', '--out', 'mine.txt'], 'no page of ours'),
                                        (['.', '--out', '.'], 'is a folder'), (['.', '--out', 'mine.txt/x.html'], 'is a file'), (['--scale', 'huge'], 'huge'), (['--wrong'], 'see reinit_report --help')])
def test_command_says_what_is_wrong(tmp_path, capsys, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    Path('mine.txt').write_text('mine')
    assert reinit_report(argv) == 2
    out, err = capsys.readouterr()
    assert out == '' and said in err and err.startswith('reinit_report: ') and err.count('\n') == 1
    assert [o.name for o in tmp_path.iterdir()] == ['mine.txt'] and Path('mine.txt').read_text() == 'mine'

def test_command_names_a_damaged_file(tmp_path, capsys):
    (tmp_path / 'waves_laws_laptop.csv').write_text((RESULTS / 'waves_laws_laptop.csv').read_text()[:-40])
    assert reinit_report([str(tmp_path), '--out', str(tmp_path / 'x.html')]) == 2
    assert 'waves_laws_laptop.csv is cut short or damaged' in capsys.readouterr().err and not (tmp_path / 'x.html').exists()

def test_command_says_what_was_used(tmp_path, capsys):
    shutil.copy(RESULTS / 'waves_laws_laptop.csv', tmp_path)
    for more in ([], ['--scale', 'laptop']):
        assert reinit_report([str(tmp_path), '--out', str(tmp_path / 'x.html'), '--json', *more]) == 0
        d = json.loads(capsys.readouterr().out)
        assert (d['kind'], d['source'], d['scale']) == ('results', str(tmp_path), 'laptop')
    assert reinit_report([str(tmp_path), '--out', str(tmp_path / 'x.html'), '--scale', 'paper']) == 2

def test_folder_of_repro(tmp_path, capsys, monkeypatch, store):
    "What one command has written the other takes; a folder that is not complete says so"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store.root, 'runs')
    assert reinit_repro(['synthetic', '--scale', 'smoke', '--out', 'o', '--runs', 'runs']) == 0
    capsys.readouterr()
    assert reinit_report(['o', '--out', 'o.html', '--json']) == 0
    d = json.loads(capsys.readouterr().out)
    h = Path('o.html').read_text(encoding='utf-8')
    assert (d['source'], d['scale']) == ('o', 'smoke') and STUDIES['synthetic'].title in unescape(h) and 'smoke runs' in h
    t = dict(re.findall(r'<tr id="(\w+)">.*?<span class="v \w+">([^<]*)</span>', h))
    assert all(t[o] != 'not judged' for o in ('R1', 'R2', 'R3')) and t['R6'] == 'not judged'
    assert reinit_report(['o', '--out', 'o.html', '--scale', 'laptop']) == 2 and 'o was written at smoke scale' in capsys.readouterr().err
    Path('o/runs.csv').unlink()
    assert reinit_report(['o', '--out', 'o.html']) == 2 and 'o has no runs.csv' in capsys.readouterr().err

def test_command_help(capsys):
    assert reinit_report(['--help']) == 0
    out = capsys.readouterr().out
    assert all(o in out for o in ('DIR', '--out', '--scale', '--open', '--json', 'exit code'))

# ---------------------------------------------------------------- in a browser

def cells(p, caption):
    "The table whose caption begins so, as a DataFrame of texts; folded ones, too"
    rows = p.js(f"(() => {{ const t = [...document.querySelectorAll('table')].find(t => t.caption?.textContent.startsWith({json.dumps(caption)})); return [...t.rows].map(r => [...r.cells].map(c => c.textContent.trim())); }})()")
    return pd.DataFrame(rows[1:], columns=rows[0])

def last_rounds(name):
    "The last round of every run of a table of the synthetic study"
    d = pd.read_csv(RESULTS / 'synthetic_laptop.csv', low_memory=False)
    d = d[d.table == name]
    return d[d['round'] == d.groupby('recipe')['round'].transform('max')]

@needs_browser
def test_opens_without_a_word(browser, file):
    with browser.open(file) as p:
        assert p.problems() == [] and [u for _, u in p.requests if not u.startswith('data:')] == [file.as_uri()]
        assert p.js("[...document.images].every(o => o.complete && o.naturalWidth > 100)")
        assert p.js("document.querySelectorAll('h1').length") == 1

@needs_browser
def test_numbers_are_those_of_the_files(browser, file):
    "By plain pandas from the CSV, without a function of the library"
    with browser.open(file) as p:
        ours = 100 * last_rounds('table1').groupby(['task.alpha', 'method']).test_acc.mean()
        theirs = pd.read_csv(RESULTS.parent / 'reinit_nb/data/reinit_table1.csv').set_index(['alpha', 'method']).accuracy
        shown = cells(p, 'Table 1, ours').set_index('α')
        assert shown.shape == (3, 6)
        for a, row in shown.iterrows():
            for m, text in row.items():
                o = re.fullmatch(r'([\d.]+) ± [\d.]+ \(([\d.]+)\)', text)
                assert abs(float(o[1]) - ours[float(a), m]) <= .0501 and float(o[2]) == theirs[float(a), m], (a, m, text)
        f = pd.read_csv(RESULTS / 'frozen_sparse_laptop.csv')
        shown = cells(p, 'Sparsity, frozen filters')
        for k, g in f.groupby(['kind', 'q']):
            r = shown[(shown.kind == k[0]) & (shown.q.astype(float) == k[1])]
            assert len(r) == 1 and float(r['test'].item()) == pytest.approx(100 * g.test_acc.mean(), abs=.051)
        w = pd.read_csv(RESULTS / 'waves_pictures_laptop.csv')
        shown = cells(p, 'Test accuracy in percent by the labels').set_index('model')
        other = cells(p, 'The same on other images').set_index(['task.dataset', 'model'])
        want = 100 * w[w.reached].groupby(['task.dataset', 'model', 'labels']).test_accuracy.mean()
        for (d, m, k), v in want.items(): assert float(shown.loc[m, k] if d == 'cifar10' else other.loc[(d, m), k]) == pytest.approx(v, abs=.051)
        assert float(shown.loc['vgg11', 'paper: none']) == 84.33

@needs_browser
def test_claims_are_those_of_the_scorecard(browser, file):
    "Every row: verdict, value with interval, what was measured, the paper's number, n and scale"
    df = scorecard.table(RESULTS)
    with browser.open(file) as p: t = cells(p, 'All claims').set_index('claim')
    words = {'✅': 'holds', '❌': 'fails', '➖': 'open'}
    assert list(t.index) == list(df.id)
    for _, r in df.iterrows():
        o = t.loc[r.id]
        if not r.n: assert (o.verdict, o['ours [95%]'], o.n) == ('not judged', '–', '–'), r.id; continue
        assert o.verdict == words[r.verdict] and o['ours [95%]'] == f'{scorecard.amount(r)} {r.measure}'.strip() and o.n == scorecard.counted(r).replace(', ', ' '), r.id
        assert (o['what it says'], o["paper's"], o['scale']) == (r.claim, scorecard.theirs(r) or '–', r['scale']), r.id

def lead(text): return float(text.split()[0].replace('−', '-'))

@needs_browser
def test_more_numbers_are_those_of_the_files(browser, file):
    "Table 5, CNNs, freezing and transfer: means by plain pandas"
    with browser.open(file) as p:
        d = last_rounds('table5')
        name = np.where(d.method == 'BL', 'Baseline', np.where(d.redraw.astype(str) == 'True', 'LW', 'Rescaling'))
        ours = d.groupby([(d.l2 / 10).round(6), name]).test_acc.mean()
        theirs = pd.read_csv(RESULTS.parent / 'reinit_nb/data/reinit_table5.csv').set_index(['l2_penalty', 'method']).accuracy
        shown = cells(p, 'Table 5, ours')
        shown = shown.set_index(shown.columns[0])
        assert shown.shape == (6, 3)
        for l, row in shown.iterrows():
            for m, text in row.items():
                assert abs(lead(text) - ours[float(l), m]) <= .00501 and float(re.search(r'\(([\d.]+)\)', text)[1]) == theirs[float(l), m], (l, m, text)
        d = cnn.label(pd.read_csv(RESULTS / 'reinit_cnn_laptop.csv', low_memory=False), cnn.grid('laptop'))
        mean = 100 * d.groupby([np.where(d.augment, 'augmented', 'plain'), 'dataset', 'model', 'method']).test_acc.mean()
        shown = cells(p, 'Test accuracy in percent, means over seeds').set_index(['augment', 'dataset', 'model'])
        assert len(shown) * len(shown.columns) == len(mean)
        for k, v in mean.items(): assert float(shown.loc[k[:3], k[3]]) == pytest.approx(v, abs=.051), k
        f = pd.read_csv(RESULTS / 'freezing_laptop.csv', low_memory=False)
        f = f[(f.epoch == f.epochs) & (f.repeats == 2) & (f['scale'] == 2) & (f.position == 'alternating') & ~f.skip.astype(bool) & (f.regularizer == 'none')]
        f = f[f.base == f['task.dataset'].map({o: reservoir.default(o, 'laptop').base for o in reservoir.DATASETS})]
        shown = cells(p, 'Test accuracy in percent ± 1.96').set_index('dataset')
        assert set(shown.index) == set(reservoir.DATASETS)
        for (o, z), v in f.groupby(['task.dataset', 'frozen']).test_acc.mean().items():
            if z in (0, 1): assert lead(shown.loc[o, 'frozen' if z else 'trained']) == pytest.approx(100 * v, abs=.051), (o, z)
        t = pd.read_csv(RESULTS / 'transfer_laptop.csv', low_memory=False)
        last = t[t.stage == t.groupby('recipe').stage.transform('max')].set_index('recipe').test_acc
        shown = cells(p, 'Means over seeds; a warm start').set_index(['learning rate', 'start'])
        lists = transfer.warm('laptop')
        assert len(shown) == len(lists)
        for (start, rate), runs in lists.items(): assert float(shown.test_acc[rate, start]) == pytest.approx(last[[r.hash for r in runs]].mean(), abs=.00051), (start, rate)

@needs_browser
def test_headline_counts_the_rows(browser, file):
    with browser.open(file) as p:
        t = cells(p, 'All claims')
        signs = t.verdict.value_counts()
        tiles = dict(zip(p.texts('.tiles span'), map(int, p.texts('.tiles b'))))
        assert tiles['claims'] == len(t) == 42
        for k, s in (('hold', 'holds'), ('fail', 'fails'), ('stay open', 'open')): assert tiles[k] == signs.get(s, 0)
        by = cells(p, 'By paper')
        assert by.claims.astype(int).sum() == 42 and by['holds'].astype(int).sum() == signs['holds']
        said = p.texts('header p')[0]
        assert f'{signs["holds"]} hold' in said
        other = t[t['scale'] != 'laptop']                                          # not all of them are at laptop scale
        assert set(other.claim) == {'R4', 'R5', 'Z10'} and all(o in said for o in other.claim) and f'{len(t)-len(other)-(t.verdict=="not judged").sum()} are measured at laptop scale' in said

@needs_browser
def test_scorecard_sorts_and_filters(browser, file):
    with browser.open(file) as p:
        scorecard = '#scorecard table'
        head = p.table(scorecard)[0]
        def col(name): return [r[head.index(name)] for r in p.table(scorecard)[1:]]
        def state(name): return p.js(f"document.querySelectorAll('#scorecard thead th')[{head.index(name)}].getAttribute('aria-sort')")
        assert col('claim') == pd.read_csv(RESULTS.parent / 'reinit_nb/data/claims.csv').id.tolist()
        p.click('#scorecard th button', head.index('verdict'))
        signs = col('verdict')
        assert signs == sorted(signs, key=['holds', 'open', 'fails'].index) and state('verdict') == 'ascending'
        p.focus('#scorecard th button', head.index('n')).press('Enter')
        def n_of(): return [float(o.split()[0].replace(',', '')) for o in col('n') if o != '–']
        n = n_of()
        assert n == sorted(n) and state('n') == 'ascending' and state('verdict') is None
        p.press('Space')
        assert n_of() == sorted(n, reverse=True) and state('n') == 'descending'
        p.click('#scorecard th button', head.index('claim'))
        assert col('claim')[:3] == ['C1', 'C2', 'C3'] and col('claim')[9] == 'C10'
        p.focus('input[type=search]').type('LW margin')
        assert all('lw' in ' '.join(r).lower() and 'margin' in ' '.join(r).lower() for r in p.table(scorecard)[1:]) and 0 < len(p.table(scorecard)) - 1 < 42
        p.goto(f'{file}#F3')
        assert len(p.table(scorecard)) - 1 == 42 and p.js("document.querySelector('tr:target').id") == 'F3'
        p.click('#F3 a')                                                   # to the evidence, which says the same
        assert p.js('location.hash') == '#F3-evidence' and p.texts('#F3-evidence .v')[0] == p.texts('#F3 td')[1] and p.problems() == []

@needs_browser
@pytest.mark.parametrize('dark', [False, True])
def test_readable_in_light_and_dark(browser, file, dark):
    with browser.open(file, dark=dark) as p:
        p.js("document.querySelectorAll('details').forEach(o => o.open = true)")
        assert p.settle().contrasts() == []
        p.click('#theme')
        assert p.contrasts() == []

@needs_browser
@pytest.mark.parametrize('width', [320, 390, 768, 1400])
def test_fits_the_screen(browser, file, width):
    with browser.open(file, size=(width, 844), mobile=width < 500) as p:
        p.js("document.querySelectorAll('details').forEach(o => o.open = true)")
        assert p.settle().overflow() <= 0 and p.js('innerWidth') == width
        assert p.js("[...document.querySelectorAll('table')].every(t => t.closest('.scroll').clientWidth <= innerWidth)")
        if width in (390, 1400): assert p.js("(() => { const s = document.querySelector('#scorecard .scroll'); return s.scrollWidth - s.clientWidth; })()") <= 0      # nothing of the claims is cut off

@needs_browser
def test_store_page(browser, store, tmp_path):
    with browser.open(write_digest(store.root, tmp_path / 'runs.html'), size=(390, 844)) as p:
        t = cells(p, 'MLPRun: fields that differ')
        assert t.runs.astype(int).sum() == len(study.table1_recipes('smoke')) + 3
        p.click('table th button', t.columns.get_loc('test_acc'))
        v = [float(o) for o in cells(p, 'MLPRun: fields that differ').test_acc]
        assert v == sorted(v) and p.problems() == [] and p.overflow() <= 0 and p.contrasts() == []
        assert 'No claim is judged' in p.js('document.body.textContent')

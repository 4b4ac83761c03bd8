"All claims on one table: complete, in step with the pages, and not older than the recipes"
import io
import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from reinit_nb.claims.scorecard import (
    PAPER_NAMES,
    PAPER_TITLES,
    SCORECARD_COLUMNS,
    all_claims,
    distance_from_null,
    effect_text,
    get_claim,
    judge_by_results,
    judge_claims,
    judge_parts,
    outcome_text,
    pages_that_differ,
    parts_markdown,
    plot_scorecard,
    revision_markdown,
    run_seconds,
    sample_text,
    scorecard_headline,
    scorecard_markdown,
    shipped_scorecard,
    stale_results,
    verdict_counts,
    verdicts_on_pages,
)
from reinit_nb.claims.verdict import OLD_RUNS, VERDICT_WORDS, VERDICTS, claim_rules, number_text
from reinit_nb.core import ReinitError
from reinit_nb.store import load_results, paper_table, save_results
from reinit_nb.studies.common import Look, all_studies, find_results, flatten_recipes, get_study

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / 'results', ROOT / 'nbs'
FILES = [k for s in all_studies().values() for k, source in s.files.items()   # a partial one may not be there yet
         if not source.partial or (RESULTS / f'{k}_laptop.csv').exists()]
LAWS = next(k for k in get_study('spectra').files if k.endswith('_laws'))
PAGE = 'nbs/scorecard.ipynb'
AGAIN = 'python -c "from reinit_nb.claims.scorecard import write_scorecard; write_scorecard()"'
IDS = [f'{k}{i}' for k, n in (('R', 13), ('Z', 11), ('C', 11), ('F', 7), ('P', 12)) for i in range(1, n + 1)]

@pytest.fixture(scope='module')
def df(scorecard): return scorecard

@pytest.fixture(scope='module')
def parts(published_results): return judge_parts(published_results)

@pytest.fixture(scope='module')
def pages(): return verdicts_on_pages(PAGES)

# ---------------------------------------------------------------- complete

def test_every_claim_has_a_row_a_record_and_a_study():
    t = all_claims()
    assert list(t.id) == IDS
    assert set(t.paper) == set(PAPER_NAMES) == set(PAPER_TITLES)
    assert t[['short', 'claim', 'where', 'counts', 'setting', 'notebook']].notna().all(axis=None)
    assert (t.short.str.len() <= 44).all() and t.claim.is_unique and t.short.is_unique
    for o in t.itertuples():
        study = get_study(get_claim(o.id).study)
        assert o.id in study.claims and study.paper == o.paper and study.page == o.notebook
    assert sorted(i for s in all_studies().values() for i in s.claims) == sorted(IDS)

def test_no_record_of_a_claim_is_forgotten():
    names = 'reinit', 'frozen', 'freezing', 'spectra', 'plasticity'
    modules = [import_module(f'reinit_nb.claims.{k}') for k in names]
    assert sorted(c.id for m in modules for c in m.CLAIMS) == sorted(IDS)

def outputs(f):
    "All markdown that the cells of a notebook have shown"
    cells = json.loads(Path(f).read_text(encoding='utf-8'))['cells']
    shown = [o['data'] for c in cells for o in c.get('outputs', []) if 'data' in o]
    return '\n'.join(''.join(o.get('text/markdown', '')) for o in shown)

def test_the_scorecard_page_shows_the_scorecard(df, parts):
    "Its outputs are committed: a sign, a number or the headline that was changed by hand, or is old, is found"
    said = outputs(ROOT / PAGE)
    assert scorecard_markdown(df) in said, f'run {PAGE} again'
    assert scorecard_headline(df) in said, f'run {PAGE} again'
    assert parts_markdown(parts) in said and revision_markdown() in said, f'run {PAGE} again'
    for old in re.findall(r'\d+ claims: [^*\n]*', said):
        assert old == scorecard_headline(df), f'the page also says {old!r}'

def test_the_scorecard_page_begins_with_the_outcome():
    src = [''.join(c['source']) for c in json.loads((ROOT / PAGE).read_text(encoding='utf-8'))['cells']]
    shown = ('card.scorecard_headline(', 'card.plot_scorecard(', 'card.scorecard_markdown(')
    first = {k: next(i for i, s in enumerate(src) if k in s) for k in shown}
    assert list(first) == sorted(first, key=first.get)
    assert not any('#| export' in s for s in src)   # functions have a page of their own
    for k in shown: assert src[first[k]].startswith('#| echo: false')

def test_other_pages_say_the_same(df, pages):
    "Explanations and the landing page are computed, too, and go stale"
    told = pages[pages.notebook.str.startswith('explanations/')]
    assert set(told.id) == set(IDS) and (told.shown != '').all()   # all claims, with their numbers
    want = {PAPER_TITLES[k]: tuple(int(o[v]) for v in VERDICTS) for k, o in verdict_counts(df).iterrows()}
    for text in (outputs(ROOT / 'nbs/index.ipynb'), (ROOT / 'README.md').read_text(encoding='utf-8')):
        rows = re.findall(r'^\| \[([^]]+)\]\([^)]*\) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$', text, re.M)
        said = {k: tuple(map(int, n)) for k, *n in rows}
        assert said == want and f'{len(df)} claims' in text, 'run nbs/index.ipynb again, then make readme'

def test_every_claim_is_on_the_page_that_it_names(pages):
    for c in all_claims().itertuples():
        assert (ROOT / 'nbs' / c.notebook).exists()
        assert c.id in set(pages.id[pages.notebook == c.notebook]), f'{c.notebook} shows no verdict on {c.id}'

def theirs_again():
    "The papers' numbers of claims that rest on a table of theirs, from that table: id → part → number"
    t1 = paper_table('reinit_table1').pivot(index='alpha', columns='method', values='accuracy')
    best = paper_table('reinit_table5').groupby('method').accuracy.max() * 100
    t2 = paper_table('reinit_table2')
    t2 = t2[~t2.setting.str.contains('dropout')]
    t2 = t2.pivot(index=['setting', 'dataset', 'arch'], columns='method', values='accuracy')
    f = paper_table('freezing_table').assign(gap=lambda o: o.frozen - o.unfrozen)
    gap = f[f.measure == 'test accuracy'].set_index(['sweep', 'value', 'dataset']).gap
    def layers(part, value): return f[(f.measure == f'{part} separability') & (f.value == value)].sort_values('layer')
    start = layers('test', 'epoch 0').frozen
    acc, hess = paper_table('fourier_accuracy'), paper_table('fourier_hessian')
    hess = hess[(hess.data == '1-D signals') & (hess.network == 'Gaussian')].set_index('bandwidth')
    cifar = ('cifar100', 'cifar10')
    best_of = 'LW − best other method at α='
    main = gap['default', 'default', 'cifar10']
    return dict(R1={f'{m} − BL at α=1': t1[m][1] - t1.BL[1] for m in ('WELSR', 'WELS', 'FC', 'LW')},
                R2={f'{best_of}{a:g}': r.LW - r.drop('LW').max() for a, r in t1.iterrows()},
                R3={f'{m} − Baseline, best penalties': best[m] - best.Baseline for m in ('Rescaling', 'LW')},
                R6={'LW − BL': (t2.LW - t2.BL).mean()},
                C1={f'frozen − trained, {d}': gap['default', 'default', d] for d in (*cifar, 'mnist')},
                C3={'last hidden layer − first, cifar10': start.iloc[-1] - start.iloc[0]},
                C4={'frozen − trained, training images, cifar10': layers('train', 'epoch 100').gap.iloc[-1],
                    'frozen − trained, test images, cifar10': layers('test', 'epoch 100').gap.iloc[-1]},
                C7={f'gap per doubling, {d}': (gap['width', '1024', d] - gap['width', '32', d]) / 5 for d in cifar},
                C8={f'front: frozen − trained, {d}': gap['position', 'front', d] for d in (*cifar, 'mnist')},
                C9={f'gap without − gap with {k}': main - gap['regularizer', k, 'cifar10']
                    for k in ('BatchNorm', 'dropout .1')},
                F5={'none − random': acc[acc.dataset == 'CIFAR-10'].eval('random_start-high_bandwidth').mean()},
                F7={'trace, high over low': np.log10(hess.trace['high'] / hess.trace['low']),
                    'largest eigenvalue, high over low':
                    np.log10(hess.spectral_norm['high'] / hess.spectral_norm['low'])})

def test_the_papers_numbers_are_those_of_its_tables():
    listed = {i: {r.part: r.theirs for r in claim_rules(i) if r.theirs == r.theirs} for i in IDS}
    listed = {i: numbers for i, numbers in listed.items() if numbers}
    again = theirs_again()
    assert set(again) == set(listed) - {'R9'}                                            # R9 is read off a figure
    for i, numbers in again.items():
        assert set(numbers) == set(listed[i]), i
        near = .0051 if i == 'F7' else .051
        for k, v in numbers.items(): assert round(abs(v - listed[i][k]), 6) <= near, (i, k, v, listed[i][k])

def test_the_papers_words_have_the_same_numbers():
    "`theirs` of a claim is for people, that of a part for axes: the latter stands in the words, unless it is computed"
    for c in all_claims().itertuples():
        numbers = {abs(r.theirs) for r in claim_rules(c.id) if r.theirs == r.theirs}
        if c.id in ('R3', 'C7', 'F7', 'R9') or not numbers: continue
        assert numbers <= {abs(float(o.replace('−', '-'))) for o in re.findall(r'[−-]?\d+(?:\.\d+)?', c.theirs)}, c.id

# ---------------------------------------------------------------- rules and dates

def test_rules_are_older_than_their_runs_or_marked_as_revised(df):
    times = [r.fixed for i in IDS for r in claim_rules(i)]
    pattern = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00'   # they are compared with the dates of runs
    assert all(re.fullmatch(pattern, o) for o in times)
    early = df[(df.oldest != '') & (df.oldest < df.fixed)]
    assert early.old_runs.all() and not df.old_runs.drop(early.index).any()
    days = early[early.oldest.str[:10] < early.fixed.str[:10]]
    assert days.revised.all(), f'runs from days before an unrevised rule: {days.id[~days.revised].tolist()}'

DECIDING = ['direction', 'null', 'delta', 'tie', 'over', 'seeds', 'judged']

def rules_in_history():
    "Yield the time of each commit that touched the rules, and the rules then; the oldest first"
    def git(*args): return subprocess.run(['git', *args], cwd=ROOT, capture_output=True, encoding='utf-8').stdout
    path = 'reinit_nb/data/claim_parts.csv'
    for line in git('log', '--reverse', '--format=%H %ct', '--', path).splitlines():
        commit, seconds = line.split()
        then = git('show', f'{commit}:{path}')
        if then: yield pd.Timestamp(int(seconds), unit='s', tz='UTC'), pd.read_csv(io.StringIO(then))

@pytest.mark.skipif(not (ROOT / '.git').exists() or not shutil.which('git'), reason='needs the history')
def test_what_decides_has_not_changed_since_its_rule_was_fixed():
    "A rule that is changed needs a new time, so that older runs are marked"
    now = paper_table('claim_parts').set_index(['id', 'part'])
    fixed = pd.to_datetime(now.fixed)
    checked = set()
    for time, then in rules_in_history():
        for key, old in then.set_index(['id', 'part']).iterrows():
            if key not in now.index or key in checked or time < fixed[key]: continue
            checked.add(key)
            for k in DECIDING:
                today = now.loc[key, k]
                assert old[k] == today or pd.isna(old[k]) and pd.isna(today), (key, k)

def test_verdicts_of_claims_are_marked_as_on_the_scorecard(df):
    results = {k: s.load(RESULTS) for k, s in all_studies().items()}
    for _, r in df.iterrows():
        verdict = judge_by_results(r.id, results)
        assert verdict.old_runs == r.old_runs, r.id
        assert (f'†, {OLD_RUNS}:' in verdict.markdown) == r.old_runs

def test_runs_from_before_and_after_a_revised_rule_are_not_mixed(df):
    assert not df.mixed.any(), f'{df.id[df.mixed].tolist()}: judge them on new seeds only'

def test_old_runs_are_marked_wherever_an_outcome_is_shown(df):
    assert df.old_runs.any() and f'{OLD_RUNS} (†)' in scorecard_headline(df)
    table = scorecard_markdown(df)
    for _, r in df.iterrows():
        assert outcome_text(r).endswith('†') == r.old_runs
        assert f'| {outcome_text(r)} |' in next(x for x in table.splitlines() if x.startswith(f'| [{r.id}]'))

def test_dates_decide_what_is_old(tmp_path):
    f = copied(tmp_path, LAWS) / f'{LAWS}_laptop.csv'
    runs = load_results(f)
    def row(dates):
        save_results(runs.assign(date=dates), f)
        return judge_claims(tmp_path, ['F4']).iloc[0]
    before, after = '2026-11-17T12:00:00+00:00', '2026-11-18T14:17:31+00:00'
    assert row(before).old_runs and not row(before).mixed
    assert not row(after).old_runs and not row(after).mixed
    same_day = row('2026-11-18T14:17:29+00:00')
    assert same_day.old_runs and not same_day.mixed   # the time of day counts
    half = row([before] * 4 + [after] * (len(runs) - 4))
    assert half.old_runs and half.mixed
    with pytest.raises(ReinitError, match='F4: some runs are older than its revised rule'):
        judge_claims(tmp_path, ['F4'], strict=True)

def test_old_outcomes_are_those_of_the_same_runs(df):
    "Outcomes of 0.0.1 and, as long as there are no new runs, those of today"
    t = paper_table('revised_outcomes')
    df = df[df.paper != 'plasticity']   # came later
    assert list(t.id) == list(df.id) and t.why.notna().all() and set(t.after) <= set(VERDICTS)
    assert t.before.value_counts().to_dict() == dict(undecided=20, holds=15, fails=7)
    same = df.newest < '2026-11-18'   # by the day
    assert t.after[same].tolist() == df.verdict[same].tolist()
    assert t.after[~same].notna().all()

# ---------------------------------------------------------------- what it takes

def test_undecided_claims_state_what_would_decide_them(df):
    for _, r in df[df.verdict == '?'].iterrows():
        text = sample_text(r)
        if pd.isna(r.value):
            assert 'planned' in text or r.counts == 'networks', r.id
            assert not r.n or r.cost > 0, r.id
        else: assert 'would decide' in text and r.needed > 0 and r.cost > 0, r.id
    assert df.needed[df.verdict != '?'].isna().all()

def test_seeds_that_would_decide_all_parts(df, parts):
    "Not those of the part that is shown, but the most that any undecided part needs"
    judged = parts[parts.verdict != '']
    most = judged[judged.verdict == '?'].groupby('id').needed.max()
    measured = df[(df.verdict == '?') & df.value.notna()].set_index('id')
    assert (measured.needed == most[measured.index]).all()
    assert (measured.needed > 0).all()
    shown = judged.merge(df[['id', 'measure']], left_on=['id', 'part'], right_on=['id', 'measure']).set_index('id')
    assert (measured.needed > shown.needed[measured.index]).any()   # else nothing is tested here
    several = parts[parts.needed > 0].set_index('id')
    hours = (df.set_index('id').spent / df.set_index('id').n)[several.index] * several.needed
    assert np.allclose(several.cost.dropna(), hours[several.cost.notna()])
    assert 'would decide' in parts_markdown(parts)

def test_interquartile_mean_and_share_of_pairs_stand_next_to_the_mean(df, parts):
    several = df[df.middle.notna()]
    assert len(several) and several.better.between(0, 1).all() and parts.middle.notna().any()
    lines = {i: x for x in scorecard_markdown(df).splitlines() for i in IDS if x.startswith(f'| [{i}]')}
    for _, r in several.iterrows():
        assert f'| {number_text(r.middle, True)} | {100 * r.better:.0f}% |' in lines[r.id]

def test_seconds_of_runs():
    dates = pd.Timestamp('2026-01-01', tz='UTC') + pd.to_timedelta([0, 10, 20, 30, 90_000, 90_010], unit='s')
    d = pd.DataFrame(dict(recipe=list('abcdef'), date=[o.isoformat() for o in dates]))
    assert run_seconds(d) == 40 / 5                                     # without the night in between
    assert run_seconds(d.assign(seconds=[1., 2, 3, 4, 5, 9])) == 4
    assert np.isnan(run_seconds(d[:1]))

def test_compute_is_that_of_the_claims_own_runs(df):
    d = df.set_index('id')
    r = get_study('reinit_cnn').load(RESULTS)
    runs = r.part('converged_parts').recipe.nunique()
    assert np.isclose(d.spent['R11'], run_seconds(r.file('reinit_cnn_converged')) * runs / 3600)
    open_claims = d[(d.verdict == '?') & d.cost.notna()]
    assert len(open_claims) and np.allclose(open_claims.cost, open_claims.spent / open_claims.n * open_claims.needed)

def test_what_n_counts(df):
    t = all_claims()
    assert set(t.counts) == {'seeds', 'experiments', 'draws', 'simulated problems', 'networks', 'dichotomies', 'runs'}
    said = df.set_index('id').apply(sample_text, axis=1)
    assert (df.n > 0).all() and said.str.fullmatch(r'[\d,]+ [a-z ]+(; .+)?').all()
    assert said['R1'] == f'{df.n[0]} seeds' and said['Z10'] == '1 network'

def test_one_sentence_for_each_claim(df):
    for i in ('R4', 'F4'): assert judge_by_results(i, RESULTS).claim == all_claims().set_index('id').claim[i]

def test_the_table_in_the_package_is_the_table(df):
    k = shipped_scorecard()
    assert list(k.columns) == [*SCORECARD_COLUMNS, 'date'] and k.date.nunique() == 1
    newest = max(str(load_results(f)['date'].max())[:10] for f in RESULTS.glob('*_laptop.csv'))
    assert k.date[0] == newest, AGAIN
    for c in SCORECARD_COLUMNS:
        if pd.api.types.is_numeric_dtype(df[c]):
            np.testing.assert_allclose(k[c].astype(float), df[c].astype(float), rtol=1e-5, err_msg=f'{c}: {AGAIN}')
        else: assert k[c].tolist() == df[c].fillna('').tolist(), f'{c}: {AGAIN}'

# ---------------------------------------------------------------- in step

def test_pages_say_what_the_results_say(df, pages):
    bad = pages_that_differ(df, pages)
    assert not len(bad), f'pages and results disagree; run the experiments again:\n{bad.to_string()}'

def test_results_are_not_older_than_their_recipes():
    t = stale_results(RESULTS)
    assert not t.stale.any(), f'recipes have changed since these were recorded:\n{t[t.stale].to_string()}'
    assert list(t.file) == FILES

def test_every_file_of_results_has_its_lists():
    assert {f.name for f in RESULTS.glob('*.csv')} == {f'{k}_laptop.csv' for k in FILES}, 'name a new file in its Study'

def test_claims_of_today_are_judged_at_laptop_scale(df):
    assert (df.n > 0).all(), f'not judged: {", ".join(df.id[df.n==0])}; run their experiments again'
    assert set(df.scale) == {'laptop', 'paper'} and set(df.id[df.scale == 'paper']) == {'R4', 'R5', 'Z10'}

def copied(tmp_path, *names):
    for n in names: shutil.copy(RESULTS / f'{n}_laptop.csv', tmp_path)
    return tmp_path

def test_a_page_that_says_something_else_is_found(df, tmp_path):
    shutil.copytree(PAGES, tmp_path / 'nbs', ignore=shutil.ignore_patterns('.*', '_*', 'images'))
    before = {(o.id, o.notebook) for o in pages_that_differ(df, verdicts_on_pages(PAGES)).itertuples()}
    def change(name, f):
        text = (tmp_path / 'nbs' / name).read_text(encoding='utf-8')
        new = f(text)
        assert new != text, name
        (tmp_path / 'nbs' / name).write_text(new, encoding='utf-8')
    def other(v): return '❌' if v != '❌' else '✅'
    d = df.set_index('id')
    r1 = d.verdict['R1']
    change('experiments/synthetic.ipynb', lambda s: s.replace(f'**R1 {r1}**', f'**R1 {other(r1)}**', 1))
    change('experiments/freezing.ipynb', lambda s: re.sub(r'C2\b', 'C99', s))
    f4 = d.verdict['F4']
    change('scorecard.ipynb',
           lambda s: re.sub(rf'(\| \[F4\][^\n]*\| ){f4}', rf'\g<1>{other(f4)}', s, count=1))
    change('explanations/reinit.ipynb',   # the sign is right, the number is not
           lambda s: re.sub(r'(\| \[R3\][^\n]*: )\+\d+\.\d', r'\g<1>+99.9', s, count=1))
    got = pages_that_differ(df, verdicts_on_pages(tmp_path / 'nbs'))
    new = {(o.id, o.notebook) for o in got.itertuples()} - before
    assert new == {('R1', 'experiments/synthetic.ipynb'), ('C2', 'experiments/freezing.ipynb'),
                   ('F4', 'scorecard.ipynb'), ('R3', 'explanations/reinit.ipynb')}
    assert got[got.id == 'C2'].page.tolist()[:1] == ['nothing']
    r3 = got[(got.id == 'R3') & (got.notebook == 'explanations/reinit.ipynb')]
    assert r3.page.item() == f'not {effect_text(d.loc["R3"])}'

def test_old_results_are_found(tmp_path):
    for n in FILES: copied(tmp_path, n)
    f = tmp_path / f'{LAWS}_laptop.csv'
    d = load_results(f)
    old = d.recipe.iloc[0]
    save_results(d.assign(recipe=d.recipe.replace(old, '0123456789abcdef')), f)
    t = stale_results(tmp_path).set_index('file')
    assert t.stale[t.stale].index.tolist() == [LAWS]
    assert t.missing[LAWS] == t.unknown[LAWS] == 1

# ---------------------------------------------------------------- numbers

def test_numbers_and_verdicts_agree(df):
    "Where an interval lies on one side, the verdict is not on the other; where it does not, the verdict has a reason"
    s = distance_from_null(df).set_index('id')
    tie = pd.Series({r.id: any(o.part == r.measure and o.tie for o in claim_rules(r.id)) for r in df.itertuples()})
    holds, within = (s.left > 0) | tie & (s.left >= -1), (s.left >= -1) & (s.right <= 1)
    expected = np.select([s.left.isna(), holds, s.right < 0, within], [s.verdict, '✅', '❌', '≈'], '?')
    assert (s.verdict == expected).all()

def test_effects_lie_in_their_intervals(df):
    d = df.dropna(subset=['lo', 'hi'])
    assert len(d) >= 35
    assert ((d.lo <= d.value + 1e-9) & (d.value <= d.hi + 1e-9)).all()
    assert (d.measure != '').all()
    assert ((d.unit != '') | d.measure.str.contains('ρ|τ|rank correlation|amplitude')).all()   # the name says it
    assert set(df.id[df.lo.isna() & df.value.notna()]) <= {'R5', 'Z1', 'Z10', 'C11'}   # facts

def test_some_numbers_computed_another_way(df, parts):
    d, t = df.set_index('id'), load_results(RESULTS / 'synthetic_laptop.csv')
    t = t[(t.table == 'table1') & (t['task.alpha'] == 1)]
    end = t[t['round'] == t['round'].max()].pivot(index='seed', columns='method', values='test_acc') * 100
    gain = end.drop(columns=['BL', 'DSD']).sub(end.BL, axis=0)
    low = gain.mean().idxmin()
    assert d.measure['R1'] == f'{low} − BL at α=1' and np.isclose(d.value['R1'], gain[low].mean(), atol=1e-3)
    parts = parts[parts.id.isin(['Z5', 'Z10'])].set_index('part')
    s = get_study('frozen_weights').load(RESULTS).part('sparse')
    m = s[s.kind != 'none'].groupby('kind').test_acc.mean() * 100
    assert np.isclose(parts.value['double − mutual'], m['double'] - m['mutual'], atol=1e-3)
    c = get_study('frozen_weights').load(RESULTS).part('imagenet')
    counted = c[(c.cutoff == .01) & (c.rule == 'pairs of consecutive layers')].set_index('network').frozen
    for network, n in counted.items(): assert parts.value[f'frozen filters, {network}'] == n

def test_verdicts_are_those_of_single_claims(df):
    for i in ('R4', 'Z2', 'F4'):
        v, r = judge_by_results(i, RESULTS), df.set_index('id').loc[i]
        assert (v.verdict, v.n, v.measured) == (r.verdict, r.n, r.measured) and v.id == i

def test_eigenvalues_measured_again_are_those_recorded():
    study = get_study('frozen_weights')
    source = next(f for f in study.files.values() if 'eigenvalues' in f.lists('laptop'))
    recipe, = source.lists('laptop')['eigenvalues']
    again, recorded = source.measure(recipe), study.load(RESULTS).part('eigenvalues')
    assert set(recorded.recipe) == {recipe.hash}
    assert list(again.eigenvalues.astype(str)) == list(recorded.eigenvalues.astype(str))
    assert (again.equal == recorded.equal).all()

# ---------------------------------------------------------------- tables and figure

def test_headline_counts(df):
    text = scorecard_headline(df)
    n = df.verdict.value_counts()
    words = dict(zip(VERDICTS, ('hold', 'fail', 'equivalent', 'undecided')))
    assert text.startswith('54 claims: ' + ', '.join(f'{n.get(k, 0)} {words[k]}' for k in VERDICTS))
    assert verdict_counts(df).to_numpy().sum() == 54

def test_markdown_names_every_claim(df, parts):
    text = scorecard_markdown(df, '../')
    for r in df.itertuples():
        claim = r.claim.replace('|', r'\|')
        assert f'[{r.id}](../{r.notebook}) | {claim} | {r.verdict} {VERDICT_WORDS[r.verdict]}' in text
    assert 'nan' not in text and len(re.findall(r'\| (?:laptop|paper): [^|]+ \|', text)) == 54
    text = parts_markdown(parts)
    assert 'nan' not in text and text.count('<details>') == 54

def test_effects_as_text():
    def text(**kw):
        row = dict(value=1.234, lo=-.5, hi=3., unit='points', null=0., n=3) | kw
        return effect_text(pd.Series(row))
    assert text() == '+1.23 [−0.50, +3.00] points'
    assert text(value=94.12, lo=71.3, hi=99.9, unit='%', null=50.) == '94.1 [71.3, 99.9]%'
    assert text(lo=np.nan, hi=np.nan, unit='filters', value=0., null=np.nan) == '0 filters'
    assert text(value=np.nan) == 'not run yet'
    assert text(value=np.nan, n=0) == 'not judged'

def test_figure_shows_every_claim(df):
    import matplotlib.pyplot as plt
    axs = plot_scorecard(df)
    labels = [t.get_text() for ax in axs for t in ax.get_yticklabels()]
    assert len(axs) == 5 and [t.split()[-1].rstrip('†') for t in labels] == IDS
    assert [t.endswith('†') for t in labels] == df.old_runs.tolist()
    legend = {t.get_text() for t in axs[0].figure.legends[0].get_texts()}
    assert set(VERDICT_WORDS.values()) | {'within ±δ'} <= legend
    texts = {t.get_text() for ax in axs for t in ax.texts}
    for _, r in df.iterrows(): assert effect_text(r) in texts
    plt.close(axs[0].figure)
    one = plot_scorecard(df[df.paper == 'fourier'])
    assert len(one) == 1
    plt.close(one[0].figure)

# ---------------------------------------------------------------- some claims, other folders, wrong input

def test_some_claims_need_their_files_only(tmp_path):
    t = judge_claims(copied(tmp_path, 'synthetic'), ['R3', 'R1'])
    assert list(t.id) == ['R1', 'R3']
    with pytest.raises(ReinitError, match='reinit_cnn_converged_laptop.csv is missing'):
        judge_claims(tmp_path, ['R6'], strict=True)
    t = judge_claims(tmp_path, ['R1', 'R6'])                                            # the others are still told
    assert t.verdict[1] == '?' and t.n[1] == 0 and 'not judged' in t.measured[1]
    assert t.verdict[0] in VERDICTS and t.n[0] > 0
    assert '1 of them not judged' in scorecard_headline(t)

@pytest.mark.parametrize('call, says', [
    (lambda d: judge_claims(RESULTS, ['R99']), 'is not known'),
    (lambda d: find_results(d), 'there are no results'),
    (lambda d: find_results(d / 'none'), 'there are no results'),
    (lambda d: get_study('synthetic').load(RESULTS, 'big'), 'is not known'),
    (lambda d: judge_by_results('x', RESULTS), 'is not known'),
    (lambda d: get_study('x'), 'is not known'),
    (lambda d: get_study('synthetic').load(RESULTS).part('x'), 'is not known')])
def test_wrong_input(call, says, tmp_path):
    with pytest.raises(ReinitError, match=says): call(tmp_path)

def test_results_of_another_time_are_refused(tmp_path):
    f = copied(tmp_path, LAWS) / f'{LAWS}_laptop.csv'
    save_results(load_results(f).assign(recipe='0123456789abcdef'), f)
    with pytest.raises(ReinitError, match='lacks 9 of 9 runs of the recipes of today'): judge_by_results('F4', tmp_path)

def test_a_part_of_a_list_is_not_judged(tmp_path):
    f = copied(tmp_path, LAWS) / f'{LAWS}_laptop.csv'
    save_results(load_results(f)[:2], f)
    t = judge_claims(tmp_path, ['F4'])
    assert t.verdict[0] == '?' and t.n[0] == 0 and 'lacks 7 of 9 runs' in t.measured[0]

def test_results_are_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_results() == RESULTS

def test_every_recipe_once():
    a, b = Look('cover', 400), Look('frozen_flow', 400)
    assert flatten_recipes([a, b, a]) == [a, b] and flatten_recipes(dict(x=[a], y=dict(z=[b, a]))) == [a, b]

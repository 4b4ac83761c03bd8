"Exact tests, intervals and trees: against values by hand, scipy and scikit-learn"
from itertools import permutations
from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps
from sklearn.tree import DecisionTreeClassifier

from reinit_nb.claims.scorecard import judge
from reinit_nb.claims.verdict import VERDICT_WORDS, outcome_table, verdict_table
from reinit_nb.core import ReinitError
from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.stats import (
    bootstrap,
    decision_tree,
    format_interval,
    holm,
    improvement_probability,
    interquartile_mean,
    leave_group_out,
    mean_interval,
    paired_differences,
    pairwise,
    power_of,
    seeds_for_width,
    seeds_needed,
    sign_test,
    stars,
)
from reinit_nb.store import paper_table
from reinit_nb.studies.reinit_tables import TREE_FEATURES, experiment_designs

quick = settings(max_examples=15, deadline=None)

def column(n): return st.lists(st.integers(0, 6), min_size=n, max_size=n)
columns = st.integers(5, 14).flatmap(lambda n: st.lists(column(n), min_size=2, max_size=4))

def tidy(cols, **kw):
    "Method A, B, … over settings 0, 1, …"
    rows = [dict(method=m, setting=j, acc=float(v)) | kw for m, c in zip('ABCD', cols) for j, v in enumerate(c)]
    return pd.DataFrame(rows)

def table(df, **kw): return pairwise(df, 'acc', on='setting', **kw).set_index(['a', 'b'])

# ---------------------------------------------------------------- sign test and Holm

@pytest.mark.parametrize('wins, n', [(16, 17), (17, 18), (18, 18), (14, 18), (10, 17), (0, 6)])
def test_sign_test_by_hand(wins, n):
    d = [1] * wins + [-1] * (n - wins)
    above = sum(comb(n, k) for k in range(wins, n + 1)) / 2**n
    below = sum(comb(n, k) for k in range(wins + 1)) / 2**n
    assert sign_test(d, 'greater') == pytest.approx(above)
    assert sign_test(d) == pytest.approx(min(1, 2 * min(above, below)))

@quick
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
def test_sign_test_properties(d):
    d = np.array(d)
    assert sign_test(d) == pytest.approx(sign_test(-d))
    assert sign_test(d, 'greater') <= sign_test(d) + 1e-12 or (d > 0).sum() <= (d < 0).sum()
    n, k = (d != 0).sum(), (d > 0).sum()
    both = sign_test(d, 'greater') + sign_test(-d, 'greater')
    if n: assert both == pytest.approx(1 + comb(int(n), int(k)) / 2**int(n))
    if n == 2 * k: assert sign_test(d) == 1

@quick
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.randoms())
def test_holm_is_monotone_and_blind_to_order(p, rnd):
    h, order = holm(p), list(range(len(p)))
    rnd.shuffle(order)
    assert holm([p[i] for i in order]) == pytest.approx(h[order])
    assert (h >= np.array(p) - 1e-12).all() and (h <= 1).all()
    assert (np.diff(h[np.argsort(p, kind='stable')]) >= -1e-12).all()
    assert h.min() == pytest.approx(min(1, len(p) * min(p)))

def test_holm_by_hand():
    "Smallest times their number, next times one less, and so on, none below the one before, none above 1"
    p = [.01, .04, .03, .005, np.nan, .9, .8]
    assert holm(p) == pytest.approx([.05, .12, .12, .03, np.nan, 1., 1.], nan_ok=True)

# ---------------------------------------------------------------- paired differences

def test_pairs_match_one_to_one():
    df = pd.DataFrame(dict(method=['LW', 'LW', 'BL', 'BL'], seed=[0, 1, 1, 0], acc=[3., 5., 2., 1.]))
    assert paired_differences(df, 'acc', 'LW', 'BL').difference.tolist() == [2., 3.]
    for bad in (df[:3], pd.concat([df, df])):
        with pytest.raises(ReinitError, match='cannot be paired by seed'): paired_differences(bad, 'acc', 'LW', 'BL')
    assert paired_differences(df[:3], 'acc', 'LW', 'BL', complete=False).seed.tolist() == [1]
    with pytest.raises(ReinitError, match='cannot be paired'):
        paired_differences(pd.concat([df, df]), 'acc', 'LW', 'BL', complete=False)

def test_intervals_as_text():
    o = mean_interval([1., 2., 3.])
    assert format_interval(o['mean'], o['lo'], o['hi']) == '+2.0 [-0.5, +4.5]'
    assert format_interval(o['mean'], o['lo'], o['hi'], 2, signed=False) == '2.00 [-0.48, 4.48]'
    assert format_interval(1., np.nan, np.nan) == '+1.0 (one seed, no interval)'

# ---------------------------------------------------------------- pairwise

@quick
@given(columns)
def test_two_sided_pairs_are_symmetric(cols):
    t = table(tidy(cols))
    for a, b in permutations('ABCD'[:len(cols)], 2):
        x, y = t.loc[(a, b)], t.loc[(b, a)]
        assert (x.wins, x.ties, x.losses) == (y.losses, y.ties, y.wins) and x.wins + x.ties + x.losses == x.n
        assert x.note == y.note and bool(x.note) == np.isnan(x.p) == (x.wins + x.losses < 5)
        if x.note: continue
        assert x.p == y.p == pytest.approx(sps.binomtest(int(x.wins), int(x.wins + x.losses)).pvalue)
        assert x.holm == y.holm >= x.p

@quick
@given(columns)
def test_one_sided_pairs_add_up(cols):
    t = table(tidy(cols), alternative='greater')
    for a, b in permutations('ABCD'[:len(cols)], 2):
        x, y, n = t.loc[(a, b)], t.loc[(b, a)], int(t.loc[(a, b)].wins + t.loc[(a, b)].losses)
        if not x.note: assert x.p + y.p == pytest.approx(1 + comb(n, int(x.wins)) / 2**n)

@quick
@given(columns, st.randoms())
def test_pairs_do_not_depend_on_the_order_of_rows(cols, rnd):
    df, keys = tidy(cols), list(range(len(tidy(cols))))
    rnd.shuffle(keys)
    ms = list('ABCD'[:len(cols)])
    sorted_rows, shuffled = (pairwise(d, 'acc', on='setting', methods=ms) for d in (df, df.iloc[keys]))
    pd.testing.assert_frame_equal(sorted_rows, shuffled)

def test_the_family_is_every_pair_once_or_in_both_orders():
    df = tidy([range(1, 9), range(8), range(-1, 7)])
    assert table(df).holm['A', 'B'] == pytest.approx(3 * 2 / 2**8)
    assert table(df, alternative='greater').holm['A', 'B'] == pytest.approx(6 / 2**8)
    two = pd.concat([df.assign(arch='x'), df.assign(arch='y')])
    by = pairwise(two, 'acc', on='setting', by='arch')
    assert len(by) == 12 and (by[by.arch == 'y'].holm.values == table(df).holm.values).all()   # a family each
    with pytest.raises(ReinitError, match='one table'): stars(by)

def test_too_few_pairs_and_ties_are_said():
    t = table(tidy([range(8), range(8), [9] * 4 + [4, 5, 6, 7]]))
    assert t.note['A', 'B'] == 'all 8 pairs are ties' and np.isnan(t.p['A', 'B']) and np.isnan(t.holm['A', 'B'])
    assert t.note['A', 'C'] == '4 of 8 pairs without a tie: too few to test' and np.isnan(t.p['A', 'C'])
    assert table(tidy([range(1, 5), range(4)])).note['A', 'B'].startswith('4 of 4')
    assert stars(t.reset_index()).loc['A', 'B'] == '?'
    same = [.8, .7] * 5, np.subtract([.9, .8], [.1, .1]).tolist() * 5   # equal but for the last bit
    assert table(tidy([[.9, .8] * 5, *same])).ties['B', 'C'] == 10

def test_wrong_input_is_named():
    df = tidy([range(6)] * 3)
    with pytest.raises(ReinitError, match=r'lack a partner: 1 \(no A\); 5 \(no C\)'): table(df.drop(index=[1, 17]))
    hole = df.assign(acc=df.acc.where(df.index != 8))
    with pytest.raises(ReinitError, match=r'lack a partner: 2 \(no B\)'): table(hole)
    two = df.assign(d='x').drop(index=0)
    with pytest.raises(ReinitError, match='lack a partner: x 0'): pairwise(two, 'acc', on=['d', 'setting'])
    with pytest.raises(ReinitError, match="did you mean 'LW'"): table(df.replace('C', 'LW'), methods=['A', 'lw'])
    with pytest.raises(ReinitError, match='several values for 0 A'): table(pd.concat([df, df]))
    with pytest.raises(ReinitError, match="did you mean 'setting'"): pairwise(df, 'acc', on='settings')
    with pytest.raises(ReinitError, match='two-sided, greater'): table(df, alternative='less')
    with pytest.raises(ReinitError, match='needs two'): table(df, methods=['A'])
    with pytest.raises(ReinitError, match='needs two'): table(df, methods=['A', 'A'])
    with pytest.raises(ReinitError, match='empty'): table(df.iloc[:0])
    with pytest.raises(ReinitError, match="did you mean 'setting'"): table(df, by='setings')

# ---------------------------------------------------------------- bootstrap

def test_bootstrap_is_scipys():
    v = np.random.default_rng(0).exponential(size=25)
    for method in ('percentile', 'BCa'):
        found = sps.bootstrap((v,), np.median, n_resamples=800, confidence_level=.9, method=method,
                              random_state=np.random.default_rng(4))
        want = found.confidence_interval
        got = bootstrap(v, np.median, n=800, level=.9, seed=4, method=method)
        assert (got['lo'], got['hi']) == tuple(want) and got['value'] == np.median(v)

@quick
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.floats(-9, 9))
def test_bootstrap_moves_with_the_data(v, shift):
    a, b = bootstrap(v, n=200), bootstrap(np.array(v) + shift, n=200)
    assert min(v) - 1e-9 <= a['lo'] <= a['hi'] <= max(v) + 1e-9
    for k in ('value', 'lo', 'hi'): assert b[k] == pytest.approx(a[k] + shift, abs=1e-6)
    zero = bootstrap(v, minus=v, n=50)
    assert (zero['value'], zero['lo'], zero['hi']) == (0, 0, 0)

def test_bootstrap_covers_and_refuses():
    draws = np.random.default_rng(1).normal(size=(300, 30))
    covered = [o['lo'] < 0 < o['hi'] for o in (bootstrap(d, n=300) for d in draws)]
    assert np.mean(covered) == pytest.approx(.94, abs=.035)
    assert bootstrap(draws[0], n=20_000)['hi'] == pytest.approx(mean_interval(draws[0])['hi'], abs=.05)
    for bad in ([], [1, np.nan], [[1, 2], [3, 4]]):
        with pytest.raises(ReinitError, match='finite'): bootstrap(bad)
    with pytest.raises(ReinitError, match="did you mean 'BCa'"): bootstrap([1, 2], method='bca')

# ---------------------------------------------------------------- trees

@pytest.fixture(scope='module')
def known(): return experiment_designs().dropna(subset='best')

def test_tree_is_scikit_learns(known):
    tree = decision_tree(known, TREE_FEATURES, 'best')
    archs = [known.arch == a for a in dict.fromkeys(known.arch)]
    X = np.column_stack([known.train, known.classes, *archs, known.dropout, known.augmentation]).astype(float)
    want = DecisionTreeClassifier(max_depth=4, min_samples_leaf=7, random_state=0)
    want.fit(X, known.best.to_numpy(dtype=object))
    assert (tree.predict(known) == want.predict(X)).all()
    assert tree.accuracy(known) == pytest.approx(want.score(X, known.best.to_numpy(dtype=object)))

def test_rules_are_the_tree(known):
    tree = decision_tree(known, TREE_FEATURES, 'best')
    r = tree.rules
    assert r.n.sum() == len(known) and r.n.min() >= 7 and (r.rule.str.count(' and ') + 1).max() <= 4
    assert (r.n * r.right).sum() == pytest.approx(tree.accuracy(known) * len(known))
    hand = r[r.rule == 'arch is vgg16 and train ≤ 4668'].iloc[0]
    small = known[(known.arch == 'vgg16') & (known.train <= 4668)]
    assert (hand.predicts, hand.n, hand.right) == ('FC', len(small), (small.best == 'FC').mean())

def test_tree_with_one_leaf_and_unseen_names():
    df = pd.DataFrame(dict(x=['a', 'b'] * 5, flag=[True] * 10, y=['u'] * 6 + ['v'] * 4))
    assert decision_tree(df, ['x'], 'y').rules.rule.tolist() == ['always']
    tree = decision_tree(df, ['x', 'flag'], 'y', min_leaf=1)
    assert len(tree.predict(pd.DataFrame(dict(x=['never seen'], flag=[False])))) == 1
    assert tree.plot().get_figure() is not None

def test_tree_refuses():
    df = pd.DataFrame(dict(x=[1., np.nan], y=['u', 'v']))
    with pytest.raises(ReinitError, match='value in each cell'): decision_tree(df, ['x'], 'y')
    with pytest.raises(ReinitError, match='target'): decision_tree(df, ['x'], 'z')
    with pytest.raises(ReinitError, match='min_leaf'): decision_tree(df.fillna(0), ['x'], 'y', min_leaf=0)

def test_leave_group_out_sees_nothing_of_the_group(known):
    held = leave_group_out(known, TREE_FEATURES, 'best', 'dataset')
    assert held.n.sum() == len(known)
    for o in held.itertuples():
        seen, new = known[known.dataset != o.dataset], known[known.dataset == o.dataset]
        assert o.tree == (decision_tree(seen, TREE_FEATURES, 'best').predict(new) == new.best).sum()
        assert o.majority == (new.best == seen.best.value_counts().idxmax()).sum()

# ---------------------------------------------------------------- power, improvement, interquartile mean

@pytest.mark.parametrize('effect, power, n', [   # G*Power 3.1: paired t test, two-sided, level .05
    (.2, .8, 199), (.5, .8, 34), (.8, .8, 15), (1., .8, 10), (.5, .95, 54), (.3, .9, 119)])
def test_seeds_needed_as_in_tables(effect, power, n):
    assert seeds_needed(1, effect, power) == n
    assert seeds_needed(3, 3 * effect, power) == n
    assert power_of(n, 1, effect) >= power > power_of(n - 1, 1, effect)

def test_power_of_a_simulation():
    rng = np.random.default_rng(0)
    for n, delta in ((4, 1.5), (8, 1.), (12, .5)):
        d = rng.normal(delta, 1, size=(4000, n))
        t = d.mean(1) / d.std(1, ddof=1) * n**.5
        found = (abs(t) > sps.t.ppf(.975, n - 1)).mean()
        assert power_of(n, 1, delta) == pytest.approx(found, abs=.025)

@pytest.mark.parametrize('sd, width', [(1, 1), (1.2, .5), (.3, 2), (10, 1)])
def test_seeds_for_width(sd, width):
    "The smallest n whose Student interval is no wider"
    n = seeds_for_width(sd, width)
    def wide(n): return 2 * sps.t.ppf(.975, n - 1) * sd / n**.5
    assert wide(n) <= width and (n == 2 or wide(n - 1) > width)

def test_power_at_its_limits():
    assert power_of(5, 0, 1) == 1 and power_of(5, 0, 0) == 0
    assert power_of(5, 1e-6, 1) == 1
    assert power_of(200, 1, 30) == 1
    assert power_of(6, 1, 0, level=.9) == pytest.approx(.1)
    assert seeds_needed(1e-9, 1) == 2
    assert seeds_needed(1, 1, level=.99) > seeds_needed(1, 1)
    powers = [power_of(n, 1, .4) for n in range(2, 200)]
    assert np.isfinite(powers).all() and (np.diff(powers) > 0).all()

@pytest.mark.parametrize('wrong, said', [
    (lambda: power_of(1, 1, 1), 'n=1'), (lambda: power_of(3, -1, 1), 'sd=-1'), (lambda: seeds_needed(1, 0), 'delta=0'),
    (lambda: seeds_needed(1, 1, power=1), 'power=1'), (lambda: seeds_needed(1, 1e-9), 'more than'),
    (lambda: power_of(3, float('nan'), 1), 'sd=nan'), (lambda: improvement_probability([]), 'at least one'),
    (lambda: improvement_probability([np.nan]), 'finite'), (lambda: interquartile_mean([]), 'at least one'),
    (lambda: interquartile_mean([1, 2], by=[0]), 'one setting for each')])
def test_wrong_input_of_power(wrong, said):
    with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)

@quick
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
def test_improvement_probability_properties(d):
    d = np.array(d)
    p, mirrored = improvement_probability(d), improvement_probability(-d)
    assert p['value'] == pytest.approx(((d > 0) + (d == 0) / 2).mean())
    assert 0 <= p['lo'] <= p['value'] <= p['hi'] <= 1
    assert (p['lo'], p['hi']) == pytest.approx((1 - mirrored['hi'], 1 - mirrored['lo']))
    if (d != 0).all():
        exact = sps.binomtest(int((d > 0).sum()), len(d)).proportion_ci(method='exact')
        assert (p['lo'], p['hi']) == pytest.approx(tuple(exact))

def test_interquartile_mean_resamples_within_settings():
    rng = np.random.default_rng(1)
    values, settings_ = rng.normal(size=(10, 12)) + 50 * np.arange(10)[:, None], np.repeat(np.arange(10), 12)
    inside = interquartile_mean(values.ravel(), settings_)
    anywhere = interquartile_mean(values.ravel())
    middle = np.sort(values.ravel())[30:90]
    assert inside['value'] == anywhere['value'] == pytest.approx(middle.mean())
    assert inside['hi'] - inside['lo'] < (anywhere['hi'] - anywhere['lo']) / 20
    assert inside == interquartile_mean(values.ravel(), settings_)
    order = rng.permutation(120)   # settings need not stand together
    shuffled = interquartile_mean(values.ravel()[order], settings_[order])
    assert (shuffled['lo'], shuffled['hi']) == pytest.approx((inside['lo'], inside['hi']), abs=.5)

def test_interquartile_mean_covers():
    rng = np.random.default_rng(2)
    found = [interquartile_mean(rng.normal(size=40), np.repeat(range(4), 10), n=400, seed=i) for i in range(300)]
    assert np.mean([o['lo'] < 0 < o['hi'] for o in found]) > .88

# ---------------------------------------------------------------- the paper's tables

def test_table4_fits_table2():
    t4 = paper_table('reinit_table4')
    assert set(t4.dataset) == set(paper_table('reinit_table2').dataset)
    assert (t4.train.sum(), t4.test.sum(), t4.classes.sum()) == (35540, 31292, 658)

def test_table3_by_hand():
    t2 = paper_table('reinit_table2')
    w = t2.pivot(index=['arch', 'setting', 'dataset'], columns='method', values='accuracy')
    t = pairwise(t2, 'accuracy', on=['setting', 'dataset'], by='arch', methods=list(PAPER_METHODS))
    t = t.set_index(['arch', 'a', 'b'])
    for arch, wins, losses in (('scnn', 16, 1), ('vgg16', 17, 1), ('mobilenet', 18, 0), ('resnet50', 17, 1)):
        o, d = t.loc[(arch, 'LW', 'BL')], w.loc[arch].LW - w.loc[arch].BL
        assert (o.wins, o.losses) == (wins, losses) == ((d > 0).sum(), (d < 0).sum())
        assert o.p == pytest.approx(sps.binomtest(wins, wins + losses).pvalue) and o.holm < .05

@pytest.mark.parametrize('id, want, n', [('R4', '✅', 17), ('R5', '❌', 53)])
def test_verdicts_on_the_tables(id, want, n, request):
    v = judge(id)
    assert (v.verdict, v.n, v.scale) == (want, n, 'paper')
    page = (request.config.rootpath / 'nbs/experiments/reinit_tables.ipynb').read_text(encoding='utf-8')
    assert f'**{id} {v.verdict}**' in page, f'{id} is {v.verdict}; run its experiment again'
    assert verdict_table([v]).id.tolist() == [id]
    shown = outcome_table([v]).to_html()
    assert 'class="outcomes"' in shown and f'{v.verdict} {VERDICT_WORDS[v.verdict]}' in shown

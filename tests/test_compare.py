"Comparisons: paired, compute-matched, refused where they would be unfair"
import numpy as np
import pandas as pd
import pytest
from scipy import stats as sps
from statsmodels.stats.multitest import multipletests

import reinit_nb.path
from reinit_nb.compare import Comparison, compare, comparison_runs
from reinit_nb.core import ReinitError
from reinit_nb.path import Learn, Method, Run, run_recipe
from reinit_nb.stats import holm, sign_test, wilcoxon
from reinit_nb.store import Store
from reinit_nb.vision import Task

BASE = Run('scnn', Task('digits', n_train=60), Learn(lr=.02, epochs=4, batch=20), width=.125)
ARMS = ['BL', 'LW', 'restart', 'rescale', 'shrink']

@pytest.fixture(scope='module')
def store(tmp_path_factory): return Store(tmp_path_factory.mktemp('runs'))

@pytest.fixture(scope='module')
def result(store): return compare(BASE, seeds=2, store=store, show=False, workers=1)

@pytest.fixture
def nothing_is_run(monkeypatch):
    monkeypatch.setattr(reinit_nb.path, 'run_recipe', lambda *a, **kw: pytest.fail('was run'))

def toy(**methods):
    rows = [dict(method=m, seed=s, test_acc=v, test_loss=1 - v, steps=100)
            for m, values in methods.items() for s, v in enumerate(values)]
    return Comparison(rows)

def test_every_method_comes_with_baseline_and_controls(result):
    assert list(result.method) == ARMS * 2
    assert list(result.seed) == [0] * 5 + [1] * 5
    assert result.steps.nunique() == result.epochs.nunique() == 1
    assert set(result.rounds) == {1, 4}
    assert isinstance(result, Comparison)
    assert isinstance(result[result.seed == 0], Comparison)

def test_rows_are_those_of_the_runs(result):
    run = BASE.replace(method=Method('LW'), seed=1)
    row = result[result.recipe == run.hash].iloc[0]
    measured = run_recipe(run)[0]
    for k in ('test_acc', 'test_loss', 'steps'): assert row[k] == measured[k]

def test_what_is_stored_is_not_trained_again(result, store, nothing_is_run):
    again = compare(BASE, seeds=2, store=store, show=False, workers=1)
    pd.testing.assert_frame_equal(again, result)
    other = BASE.replace(seed=7, method=Method('FC'))   # method and seed of the recipe do not matter
    fewer = compare(other, 'LW', seeds=(1,), controls=False, store=store, show=False)
    assert list(fewer.method) == ['BL', 'LW']
    assert set(fewer.seed) == {1}

def test_results_file(result, tmp_path, monkeypatch, nothing_is_run):
    from reinit_nb.store import save_results
    monkeypatch.setenv('REINIT_SCALE', 'laptop')
    again = compare(BASE, seeds=2, results=save_results(result, tmp_path / 'r.csv'), show=False)
    assert list(again.method) == list(result.method)
    assert np.allclose(again.test_acc, result.test_acc, atol=1e-5)

def test_too_few_epochs_are_refused_before_any_training(nothing_is_run):
    short = BASE.replace(learn=Learn(epochs=3))
    with pytest.raises(ReinitError, match='LW: 3 epochs cannot be shared among 4 rounds'): compare(short)
    with pytest.raises(ReinitError, match='8 rounds'): compare(BASE, ('BL', Method('LW', n_iter=2)))

def test_controls_have_the_rounds_of_the_method():
    longer = BASE.replace(learn=Learn(epochs=8))
    methods = {r.method.name: r.method for r in comparison_runs(longer, Method('LW', n_iter=2), 1)}
    assert all(methods[c].n_iter == 2 for c in ('restart', 'rescale', 'shrink'))
    assert methods['BL'] == Method('BL')

@pytest.mark.parametrize('wrong, said', [
    (lambda: compare(BASE, 'LWS'), 'did you mean'),
    (lambda: compare(BASE, seeds=0), 'seeds=0'),
    (lambda: compare(BASE, seeds=()), 'at least one'),
    (lambda: compare(BASE, seeds=(1, 1)), 'different'),
    (lambda: compare('LW'), 'path.Run'),
    (lambda: toy(BL=[.1]).summary(against='B'), "against='B'"),
    (lambda: toy(BL=[.1, .2], LW=[.3]).summary(), 'LW and BL cannot be paired by seed'),
    (lambda: Comparison(pd.concat([toy(BL=[.1], LW=[.3])] * 2)).summary(), 'LW and BL cannot be paired by seed'),
    (lambda: toy(BL=[.1]).summary('valid_acc'), "'valid_acc'")])
def test_wrong_input(wrong, said):
    with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)

def test_unequal_steps_are_refused(result):
    cheat = result.assign(steps=result.steps.where(result.method != 'BL', 4))
    for f in (cheat.summary, cheat.plot):
        with pytest.raises(ReinitError, match='BL 4; LW 8'): f()

def test_summary_by_hand():
    rng = np.random.default_rng(0)
    bl, a, b = rng.normal(size=(3, 9))
    b[0] = bl[0]
    t = toy(BL=bl, A=a, B=b).summary()
    assert t.loc['A', ['wins', 'ties', 'losses']].tolist() == [(a > bl).sum(), 0, (a < bl).sum()]
    assert t.loc['B', 'ties'] == 1
    assert t.loc['A', 'diff'] == pytest.approx((a - bl).mean())
    assert (t.diff_lo.dropna() < t.diff_hi.dropna()).all()
    assert t.p_wilcoxon['A'] == pytest.approx(sps.wilcoxon(a - bl, method='exact').pvalue)
    ps = [sps.binomtest(int((d > 0).sum()), int((d != 0).sum())).pvalue for d in (a - bl, b - bl)]
    assert t.p_sign[1:].tolist() == pytest.approx(ps)
    assert t.p_holm[1:].tolist() == pytest.approx(multipletests(ps, method='holm')[1])
    lo, hi = sps.t.interval(.95, 8, (a - bl).mean(), sps.sem(a - bl))
    assert (t.diff_lo['A'], t.diff_hi['A']) == pytest.approx((lo, hi))

def test_a_comparison_of_the_baseline_alone():
    t = toy(BL=[.5, .6]).summary()
    assert list(t.index) == ['BL']
    assert np.isnan(t['diff']['BL'])

def test_less_loss_is_a_win():
    t = toy(BL=[.5] * 5, A=[.6] * 5).summary('test_loss')
    assert t.wins['A'] == 5
    assert t.losses['A'] == 0
    assert t['diff']['A'] == pytest.approx(-.1)

def test_few_pairs_have_no_p_value(result):
    t = result.summary()
    assert t[['p_sign', 'p_wilcoxon', 'p_holm']].isna().all(axis=None)
    assert t.note['LW'] == '2 pairs are too few for a test'
    one = toy(BL=[.5], A=[.6]).summary()
    assert np.isnan(one.diff_lo['A'])
    assert one.n['A'] == 1

def test_plot_shows_every_seed(result):
    ax = result.plot()
    dots = [line for line in ax.lines if line.get_marker() == 'o']
    assert [o.get_text() for o in ax.get_yticklabels()] == ARMS[1:]
    assert all(len(line.get_xdata()) == 2 for line in dots)

def test_exact_tests():
    assert sign_test([1] * 5) == pytest.approx(.0625)
    assert sign_test([]) == wilcoxon([]) == 1
    assert wilcoxon([1] * 6) == pytest.approx(2 / 2**6)          # all ties: as the sign test
    assert holm([.01, np.nan, .04])[[0, 2]].tolist() == pytest.approx([.02, .04])
    with pytest.raises(ReinitError): wilcoxon([np.inf])

"The CNN study: lists of recipes, what is measured at the end of a run, tables, and what is published"
import math
import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hyp
from hypothesis import strategies as st

from reinit_nb.claims.scorecard import judge
from reinit_nb.core import ReinitError
from reinit_nb.path import Method, n_rounds, run_recipe, train_run
from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.store import Store, load_results, save_results
from reinit_nb.studies import reinit_cnn as cnn
from reinit_nb.studies.common import flatten_recipes
from reinit_nb.sweep import PATH, ask, run_sweep

RESULTS = Path(__file__).parent.parent / 'results/reinit_cnn_laptop.csv'
TINY = dict(ranks=(1, 2, 4), sigmas=(.05,), repeats=1)

def tiny(method='LW', seed=0, **kw):
    "The smallest recipe of the study"
    base = cnn.thin_cnn('scnn', 'digits', scale='smoke')
    return cnn.with_method(base, 'scnn', method, seed, 'smoke').replace(width=.1, **TINY, **kw)

@pytest.fixture(scope='module')
def trained(): return tiny(), train_run(tiny())

# ---------------------------------------------------------------- lists

@pytest.mark.parametrize('make, n', [(cnn.grid_runs, 4 * 4 * 2 * 6 * 3), (cnn.budget_runs, 4 * (3 * 6 + 2) * 3),
                                     (cnn.hyperparameter_runs, 2 * 8 * 2 * 3)])
def test_lists_are_complete_and_without_repeats(make, n):
    runs = make('laptop')
    assert len(runs) == len(set(runs)) == n and {r.seed for r in runs} == {0, 1, 2}

def test_within_a_setting_only_the_method_differs():
    groups = {}
    for r in cnn.grid_runs('laptop'): groups.setdefault(r.replace(method=Method()), []).append(r.method.name)
    assert all(sorted(v) == sorted(PAPER_METHODS) for v in groups.values())

@pytest.mark.parametrize('arch', cnn.CNN_ARCHS)
def test_all_methods_have_the_same_rounds(arch):
    runs = [cnn.with_method(cnn.thin_cnn(arch, 'digits', scale='laptop'), arch, m, 0, 'laptop') for m in PAPER_METHODS]
    assert [n_rounds(r) for r in runs] == [1] + [4] * 5

def test_paper_scale_is_the_papers():
    runs = cnn.grid_runs('paper')
    assert len(runs) == 6 * 4 * 3 * 6 * 3
    assert {r.task.size for r in runs} == {224}
    assert {r.learn.batch for r in runs} == {256}
    assert {r.width for r in runs} == {1.}
    assert {(r.learn.opt, r.learn.lr, r.learn.momentum, r.learn.wd) for r in runs} == {('sgd', .003, .9, 1e-5)}
    assert {r.dropout for r in runs} == {0., .25} and {r.norm for r in runs} == {'layer'}

def test_ablations_differ_in_what_their_names_say():
    a = cnn.ablation_runs('laptop')
    assert not a['no rescaling'][0].method.rescale and a['no rescaling'][0].method.normalize
    assert not a['no reinitialization'][0].method.reinit and a['kept blocks frozen'][0].method.freeze
    assert a['BL, one round'][0].learn.epochs * 4 == a['BL'][0].learn.epochs
    assert len({len(v) for v in a.values()}) == 1

def test_the_settings_are_balanced():
    runs = [r for r in cnn.hyperparameter_runs('laptop', 1) if r.method.name == 'LW' and r.task.dataset == 'cifar10']
    what = [(r.learn.lr, r.learn.wd, r.dropout, r.task.crop, r.init) for r in runs]
    for i in range(5):
        for j in range(i):
            assert set(pd.Series([(w[i], w[j]) for w in what]).value_counts()) == {2}

@pytest.mark.parametrize('call, says', [
    (lambda: cnn.thin_cnn('lenet'), 'arch'),
    (lambda: cnn.paper_cnn('scnn', 'birds'), 'dataset'),
    (lambda: cnn.grid_runs('laptop', 0), 'seeds'),
    (lambda: cnn.reinit_cnn_cost(cnn.grid_runs('laptop', 1)[:1], tflops=0), 'tflops'),
    (lambda: cnn.CNNRun(sigmas=(-1.,)), 'sigmas'),
    (lambda: cnn.CNNRun(repeats=0), 'repeats')])
def test_wrong_input_is_named(call, says):
    with pytest.raises(ReinitError, match=says): call()

def test_cost_counts_every_step():
    r = cnn.paper_cnn('scnn', 'oxford_pet', steps=1000)
    t = cnn.reinit_cnn_cost([r, r.replace(seed=1)])
    batches = int(3680 * .9) // 256
    assert t.runs.item() == 2
    assert t.steps.item() == r.learn.epochs * batches
    assert abs(t.steps.item() / 4 - 1000) < batches
    slow, fast = (cnn.reinit_cnn_cost([r], tflops=k).hours.item() for k in (10, 60))
    assert slow == pytest.approx(6 * fast)

# ---------------------------------------------------------------- measurements

def test_margins_and_size_by_hand(trained):
    run, learn = trained
    found = cnn.measure_cnn(learn, run)
    learn.model.eval()
    x, y = (torch.cat(o) for o in zip(*cnn.training_batches(learn)))
    with torch.no_grad(): p = learn.model(x).double().softmax(1).numpy()
    m = np.sort([p[i, c] - max(np.delete(p[i], c)) for i, c in enumerate(y.tolist())])
    assert found['margin_1'] == pytest.approx(m[0], abs=1e-5)
    assert found['margin_4'] == pytest.approx(m[3], abs=1e-5)
    assert found['margin'] == pytest.approx(m[:round(.1 * len(m))].mean(), abs=1e-5)
    assert found['size'] > 0 and {'noise_0.05', 'noise_loss_0.05'} <= set(found)

def test_measuring_leaves_the_learner_alone(trained):
    run, learn = trained
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    assert cnn.measure_cnn(learn, run) == cnn.measure_cnn(learn, run)
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())

def test_training_images_come_without_augmentation():
    learn = train_run(tiny('BL').replace(task=cnn.thin_cnn('scnn', 'digits', True, scale='smoke').task))
    a, b = cnn.training_batches(learn), cnn.training_batches(learn)
    assert all(torch.equal(x, y) for p, q in zip(a, b) for x, y in zip(p, q))
    assert sum(len(y) for _, y in a) == len(learn.dls.train.dataset)

@hyp(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=1, max_size=30), st.integers(1, 8), st.floats(.1, 4))
def test_steps_to_fit_is_the_first_low_mean(losses, window, below):
    w = min(window, len(losses))
    slow = next((i for i in range(w, len(losses) + 1) if sum(losses[i - w:i]) / w < below - 1e-9), len(losses))
    fast = cnn.steps_to_fit(losses, below, window)
    assert fast <= slow and (fast == slow or abs(sum(losses[fast - w:fast]) / w - below) < 1e-6)

def test_a_run_is_repeatable_and_has_a_pace_for_each_round():
    (a,), (b,) = run_recipe(tiny()), run_recipe(tiny())
    assert a == b and [k for k in a if k.startswith('fit_')] == [f'fit_{r}' for r in range(1, 5)]
    assert all(math.isfinite(v) for v in a.values())

def test_divergence_is_an_error():
    r = tiny('BL')
    with pytest.raises(ReinitError, match='diverged'): run_recipe(r.replace(learn=r.learn.replace(opt='sgd', lr=1e12)))

# ---------------------------------------------------------------- data that is not there

def lost(r): return r.replace(task=r.task.replace(dataset='birds2010'))

def test_missing_data_is_named_and_the_others_are_run(tmp_path):
    runs = [tiny('BL'), lost(tiny('BL'))]
    with pytest.warns(UserWarning, match='birds2010.*REINIT_DATA'):
        df = run_sweep(runs, Store(tmp_path), PATH, show=False, workers=1)
    assert list(df.recipe) == [tiny('BL').hash]

def test_nothing_but_missing_data_is_an_error(tmp_path):
    with pytest.raises(ReinitError, match='nothing can be run here.*birds2010'):
        run_sweep([lost(tiny('BL'))], Store(tmp_path), PATH, show=False)

def test_published_results_need_no_data(tmp_path, monkeypatch):
    monkeypatch.setenv('REINIT_SCALE', 'laptop')
    there, absent = lost(tiny('BL')), lost(tiny('BL', seed=1))
    save_results(pd.DataFrame([dict(recipe=there.hash, seed=0, test_acc=.5)]), tmp_path / 'r.csv')
    with pytest.warns(UserWarning, match='1 runs: no data found'):
        df = ask([there, absent], tmp_path / 'r.csv', Store(tmp_path / 's'), engine=PATH, show=False)
    assert list(df.recipe) == [there.hash]

# ---------------------------------------------------------------- tables

def made_up():
    rows = []
    for m, d, s, k in product('ab', 'xy', range(3), ('BL', 'LW')):
        gain = .02 if m == 'a' else -.01
        rows.append(dict(model=m, dataset=d, augment=False, seed=s, method=k, test_acc=.1 * s + (k == 'LW') * gain))
    return pd.DataFrame(rows)

def test_gains_are_means_of_paired_differences():
    t = cnn.setting_gains(made_up())
    assert len(t) == 4 and set(t.n) == {3}
    assert t[t.model == 'a'].gain.tolist() == pytest.approx([.02] * 2)
    assert t[t.model == 'b'].gain.tolist() == pytest.approx([-.01] * 2)
    assert t.base.tolist() == pytest.approx([.1] * 4)

@pytest.mark.filterwarnings('error')
def test_gains_by_seed():
    t = cnn.setting_gains(made_up(), on=('dataset', 'seed', 'model'))
    assert len(t) == 12 and set(t.n) == {1}

def test_gains_refuse_runs_without_a_partner():
    d = made_up()
    with pytest.raises(ReinitError, match='cannot be paired'): cnn.setting_gains(d.drop(d.index[0]))

# ---------------------------------------------------------------- what is published

@pytest.fixture(scope='module')
def published(): return load_results(RESULTS)

@pytest.fixture(scope='module')
def lists(): return cnn.STUDY.lists('laptop')

def test_results_are_those_of_todays_recipes(published, lists):
    assert set(published.recipe) == {r.hash for r in flatten_recipes(lists)} and not published.recipe.duplicated().any()

def test_published_comparisons_are_compute_matched(published, lists):
    grid, settings = (cnn.label_cnn(published, lists[k]) for k in ('grid', 'settings'))
    assert (grid.groupby(list(cnn.SETTING_COLUMNS)).steps.nunique() == 1).all()
    assert (settings.groupby(['dataset', 'augment']).steps.nunique() == 1).all()

def test_verdicts_of_the_page_follow_from_the_results(published, lists):
    labelled = {k: cnn.label_cnn(published, v) for k, v in lists.items()}
    page = (RESULTS.parent.parent / 'nbs/experiments/reinit_cnn.ipynb').read_text(encoding='utf-8')
    parts = dict(R6='grid', R7='budgets', R8='grid', R9='grid', R10='grid', R11='ablations', R12='settings', R13='grid')
    for i, k in parts.items():
        v = judge(i, labelled[k], scale='laptop')
        assert re.search(rf'\*\*{i} {v.verdict}\*\*', page), f'{i} is {v.verdict} by results/; run the experiment again'

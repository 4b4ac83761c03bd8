"The CNN study: lists of recipes, what is measured at the end of a run, tables, and what is published"
import math
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hyp
from hypothesis import strategies as st

from reinit_nb.claims.scorecard import judge
from reinit_nb.core import ReinitError
from reinit_nb.path import Learn, Method, batches_per_epoch, n_rounds, run_recipe, train_run
from reinit_nb.rounds import find_blocks
from reinit_nb.store import Store, load_results, save_results
from reinit_nb.studies import reinit_cnn as cnn
from reinit_nb.studies.common import adopt_results
from reinit_nb.sweep import PATH, ask, run_sweep
from reinit_nb.vision import Task

RESULTS = Path(__file__).parent.parent / 'results'
TINY = dict(ranks=(1, 2, 4), sigmas=(.05,), repeats=1)

def tiny(method='LW', seed=0, **kw):
    "The smallest recipe of the study"
    task = Task('digits', n_train=80, size=16)
    return cnn.CNNRun('scnn', task, Learn('adam', lr=.0015, batch=16, epochs=4), Method(method), seed, .1, **TINY, **kw)

@pytest.fixture(scope='module')
def trained(): return tiny(), train_run(tiny())

# ---------------------------------------------------------------- lists

@pytest.mark.parametrize('call, says', [
    (lambda: cnn.paper_cnn('lenet'), 'arch'),
    (lambda: cnn.paper_cnn('scnn', 'birds'), 'dataset'),
    (lambda: cnn.converged_runs('laptop', 0), 'seeds'),
    (lambda: cnn.reinit_cnn_cost([cnn.paper_cnn()], tflops=0), 'tflops'),
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
    x, y = (torch.cat(o) for o in zip(*cnn.TrainingBatches(learn)))
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
    learn = train_run(tiny('BL').replace(task=tiny().task.replace(crop=True)))
    a, b = cnn.TrainingBatches(learn), cnn.TrainingBatches(learn)
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

# ---------------------------------------------------------------- rounds that end at convergence

def settings_of(comparisons): return {c.run.replace(seed=0) for c in comparisons}

@pytest.mark.parametrize('name, settings, seeds, arms', [
    ('table', 16, 12, {'BL', 'restart'}),
    ('parts', 4, 12, {'BL', 'no reinitialization', 'kept blocks frozen'}),
    ('methods', 4, 8, {'FC', 'WELS', 'WELSR', 'DSD'}),
    ('early', 2, 12, {'BL', 'LW, ¼', 'BL, ¼', 'LW, ½', 'BL, ½'}),
    ('settings', 16, 6, {'BL'})])
def test_converged_lists_have_the_planned_seeds(name, settings, seeds, arms):
    found = cnn.converged_lists('laptop')[name]
    assert len(settings_of(found)) == settings and len(found) == settings * seeds == len({c.run for c in found})
    assert {c.run.seed for c in found} == set(range(100, 100 + seeds))
    assert {a.name for c in found for a in c.arms} == arms

def test_converged_runs_have_the_papers_schedule():
    for c in cnn.converged_runs('laptop'):
        how = c.run.learn
        assert (how.opt, how.momentum, how.schedule, how.factor) == ('sgd', .9, 'plateau', .5)
        assert (how.stop, how.keep, how.monitor, c.run.task.valid) == ('converged', 'best', 'error', .1)
        assert how.min_lr == pytest.approx(how.lr / 8) and c.run.method.name == 'LW' and c.run.task.classes is None
        assert how.epochs % cnn.CONVERGED_NETWORKS[c.run.model].rounds == 0

def test_the_networks_are_those_of_the_plan():
    runs = {c.run.model: c.run for c in cnn.converged_runs('laptop')}
    assert {k: (r.width, r.norm, r.task.size) for k, r in runs.items()} == {
        'scnn': (1., 'layer', 32), 'mobilenet': (.5, 'layer', 32), 'vgg16': (.25, 'batch', 32),
        'resnet18': (.25, 'batch', 32)}

@pytest.mark.parametrize('arch, dataset, seed, hash', [
    ('scnn', 'cifar10', 100, '0df569af1745f222'), ('resnet18', 'cifar10', 100, '00ff5093435bd34d')])
def test_hashes_of_converged_runs_stay(arch, dataset, seed, hash):
    found = [c.run for c in cnn.converged_runs('laptop', archs=[arch], datasets=[dataset]) if c.run.seed == seed]
    assert [r.hash for r in found] == [hash]

@pytest.mark.parametrize('arch', cnn.CONVERGED_NETWORKS)
def test_rounds_of_converged_runs(arch):
    run = cnn.converged_cnn(arch, 'digits', 'smoke')
    assert n_rounds(run) == cnn.CONVERGED_NETWORKS[arch].rounds
    for r in cnn.matched_recipes(cnn.MatchedRuns(run, (cnn.ARMS['restart'], cnn.ARMS['FC'])), 16).values():
        assert n_rounds(r) == n_rounds(run)

@pytest.mark.parametrize('arch, width', [('vgg16', .25), ('resnet18', .25)])
def test_the_head_of_grouped_networks_is_their_classifier(arch, width):
    net = cnn.model(arch, width=width, norm='batch')
    found = find_blocks(net, cnn.CONVERGED_NETWORKS[arch].blocks)
    assert all(name.startswith('head') for name in found.parts[-1].modules)
    assert len(found) == cnn.CONVERGED_NETWORKS[arch].rounds

def test_arms_differ_in_method_and_length_only():
    c = cnn.converged_runs('smoke', 1, arms=[k for k in cnn.ARMS if ',' not in k])[0]
    batches = batches_per_epoch(c.run)
    for name, r in cnn.matched_recipes(c, 6 * batches).items():
        assert r.learn.epochs == 6 and r.learn.stop == 'epochs'
        assert r.replace(method=c.run.method, learn=c.run.learn) == c.run
        assert r.learn.replace(epochs=c.run.learn.epochs, stop='converged') == c.run.learn
        if name != 'BL': assert r.method.blocks == c.run.method.blocks

def test_early_arms_have_their_share_and_are_matched():
    c = cnn.converged_early('smoke', 1)[0]
    found = cnn.matched_recipes(c, 40 * batches_per_epoch(c.run))
    epochs = {k: r.learn.epochs for k, r in found.items()}
    assert epochs == {'BL': 40, 'LW, ¼': 10, 'BL, ¼': 10, 'LW, ½': 20, 'BL, ½': 20}

def test_steps_that_are_no_epochs_are_refused():
    c = cnn.converged_runs('smoke', 1)[0]
    with pytest.raises(ReinitError, match='no multiple'): cnn.matched_recipes(c, 2 * batches_per_epoch(c.run) + 1)

def test_paper_scale_to_convergence_is_the_papers():
    runs = [c.run for c in cnn.converged_runs('paper', 1)]
    assert len(runs) == 24 and {r.task.size for r in runs} == {224} and {r.width for r in runs} == {1.}
    assert {(r.learn.patience, r.learn.stop, r.learn.keep) for r in runs} == {(20, 'converged', 'best')}
    assert {r.method.blocks for r in runs} == {None}
    some = cnn.converged_runs('paper', 2, ['scnn'], ['oxford_pet'])
    assert [c.run.seed for c in some] == [100, 101]

def test_the_settings_of_half_width_are_balanced():
    runs = [c.run for c in cnn.converged_settings('laptop', 1) if c.run.task.dataset == 'cifar10']
    what = [(r.learn.lr, r.learn.wd, r.dropout, r.task.crop, r.init) for r in runs]
    assert len(what) == 8 and {r.width for r in runs} == {.5} and {r.task.size for r in runs} == {16}
    for i in range(5):
        for j in range(i): assert set(pd.Series([(w[i], w[j]) for w in what]).value_counts()) == {2}

@pytest.fixture(scope='module')
def smoke(tmp_path_factory):
    store, found = Store(tmp_path_factory.mktemp('converged')), cnn.converged_lists('smoke', 2)
    chosen = found['table'] + found['parts'] + found['early']
    cnn.run_comparisons(chosen, store, workers=1)
    return store, chosen

def test_smoke_runs_end_to_end(smoke, tmp_path):
    store, chosen = smoke
    df = cnn.comparison_results(chosen, store)
    arms = {'LW', 'BL', 'restart', 'no reinitialization', 'kept blocks frozen', 'LW, ¼', 'BL, ¼', 'LW, ½', 'BL, ½'}
    assert set(df.arm) == arms and len(df) == 2 * len(arms) and set(df.seed) == {100, 101}
    whole = df[~df.arm.str.contains('¼|½')]
    assert (whole.groupby('seed').steps.nunique() == 1).all()
    assert {'train_acc_1', 'train_acc_4', 'steps_4', 'relative_noise_0.25', 'noise_0.1', 'margin'} <= set(df)
    save_results(df, tmp_path / 'reinit_cnn_converged_smoke.csv')
    read = cnn.check_equal_steps(cnn.STUDY.load(tmp_path, 'smoke').file('reinit_cnn_converged'))
    assert list(read.recipe) == list(df.recipe)
    assert read.test_acc.tolist() == pytest.approx(df.test_acc.tolist(), abs=1e-5)
    results = cnn.STUDY.load(tmp_path, 'smoke')
    assert set(results.part('converged_early').arm) == {'LW', 'BL', 'LW, ¼', 'BL, ¼', 'LW, ½', 'BL, ½'}
    assert not results.part('converged_table').fits.any()
    settings = results.part('converged_settings')
    assert (len(settings), settings.planned_runs.max()) == (4, 16)
    assert judge('R12', settings, scale='smoke').part.effect is None   # judged as a whole or not at all

def test_recorded_comparisons_are_taken_over(smoke, tmp_path, monkeypatch):
    "Runs of LW and their arms, which follow from LW's recorded steps: nothing is left to run"
    store, chosen = smoke
    file = tmp_path / 'reinit_cnn_converged_smoke.csv'
    df = cnn.comparison_results(chosen, store)
    save_results(df, file)
    here = Store(tmp_path / 'runs')
    assert adopt_results(cnn.STUDY, here, tmp_path, 'smoke') == dict(reinit_cnn_converged=df.recipe.nunique())
    def refuse(*args, **kwargs): raise AssertionError('something was run again')
    monkeypatch.setattr(Store, 'put', refuse)
    cnn.run_comparisons(chosen, here, workers=1)
    again = save_results(cnn.comparison_results(chosen, here), tmp_path / 'again.csv')
    assert load_results(again)[list(load_results(file))].equals(load_results(file))
    assert all(here.record(c.run)['adopted']['source'] == 'reinit_cnn_converged' for c in chosen)

def fitted(df): return df.assign(**{c: 1. for c in df if c.startswith('train_acc')})

def test_only_complete_cells_that_fit_count(smoke):
    store, chosen = smoke
    df = cnn.comparison_results(chosen, store)
    assert cnn.converged_progress(df, chosen).complete.all() and not cnn.converged_progress(df, chosen).fits.any()
    assert cnn.complete_cells(df, chosen).empty   # networks of a few steps fit nothing
    good = fitted(df)
    assert len(cnn.complete_cells(good, chosen)) == len(df)
    lost = good[~((good.arm == 'restart') & (good.seed == 101))]
    progress = cnn.converged_progress(lost, chosen).set_index('arm')
    assert progress.recorded['restart'] == 1 and not progress.complete['restart'] and progress.complete['BL']
    assert set(cnn.complete_cells(lost, chosen).arm) == set(df.arm) - {'restart'}
    assert cnn.complete_cells(good[~((good.arm == 'LW') & (good.seed == 100))], chosen).empty   # no LW, no comparison
    worse = good.assign(train_acc_1=good.train_acc_1.where(good.arm != 'BL', .98))
    assert 'BL' not in set(cnn.complete_cells(worse, chosen).arm)

def test_unequal_steps_are_refused(smoke):
    df = cnn.comparison_results(smoke[1], smoke[0])
    wrong = df.assign(steps=df.steps + (df.arm == 'BL'))
    with pytest.raises(ReinitError, match='BL has .* steps'): cnn.check_equal_steps(wrong)

def test_gains_of_cells_by_hand(smoke):
    df = cnn.complete_cells(fitted(cnn.comparison_results(smoke[1], smoke[0])), smoke[1])
    t = cnn.converged_gains(df).set_index('arm')
    wide = df.pivot(index='seed', columns='arm', values='test_acc')
    assert t.gain['LW'] == pytest.approx(100 * (wide.LW - wide.BL).mean())
    assert t.base['LW'] == pytest.approx(100 * wide.BL.mean()) and t.n['restart'] == 2 and 'BL' not in t.index
    assert t.wins['LW'] + t.losses['LW'] <= 2
    ax = cnn.plot_converged_gains(cnn.converged_gains(df))
    assert len(ax.get_yticklabels()) == len(t)
    plt.close('all')

def test_an_empty_store_says_so(tmp_path):
    with pytest.raises(ReinitError, match='none of these'):
        cnn.comparison_results(cnn.converged_runs('smoke', 1), Store(tmp_path))

def test_conditions_and_their_rates(tmp_path):
    tuning = cnn.tuning_runs('laptop')
    assert {len(v) for v in tuning.values()} == {3 * 4}
    assert {c.run.seed for v in tuning.values() for c in v} == set(range(60, 64))
    df = pd.DataFrame([{'arm': a, 'learn.lr': lr, 'valid_acc': acc} for a, best in (('LW', .01), ('BL', .03))
                       for lr in (.003, .01, .03) for acc in (.5 - abs(lr - best), .4)])
    assert cnn.tuned_rates(df) == {'LW': .01, 'BL': .03}
    rates = {k: dict(LW=.003, BL=.01, FC=.03, shrink=.01) for k in cnn.CONDITIONS}
    found = cnn.condition_runs(rates, 'laptop')
    assert {len(v) for v in found.values()} == {12}
    for k, v in found.items():
        run = v[0].run
        assert (run.learn.lr, run.task.random_labels > 0, run.task.crop) == (.003, 'noisy' in k, 'augmented' in k)
        assert run.learn.wd == (.005 if 'augmented' in k else 1e-5)
    small = cnn.condition_runs(rates, 'smoke', 1)['augmented, noisy'][0]
    arms = cnn.matched_recipes(small, 4 * batches_per_epoch(small.run))
    assert {k: (r.learn.lr, r.learn.min_lr) for k, r in arms.items()} == {
        'BL': (.01, .00125), 'FC': (.03, .00375), 'shrink': (.01, .00125)}

def test_shortest_round_is_that_of_the_schedule():
    run = cnn.converged_cnn('scnn', 'cifar10', 'laptop')
    assert cnn.shortest_round(run.learn) == 4 * run.learn.patience
    assert cnn.shortest_round(cnn.converged_cnn('scnn', 'oxford_pet', 'paper').learn) == 5 * 20

def test_cost_of_cells_adds_up():
    t = cnn.converged_cost(cnn.converged_runs('paper', 2, ['scnn', 'mobilenet'], ['oxford_pet', 'cifar10']), stretch=1.)
    assert len(t) == 4 and set(t.runs) == {6} and t.hours.is_monotonic_increasing
    assert t.total.iloc[-1] == pytest.approx(t.hours.sum())
    one = t[(t.model == 'scnn') & (t.dataset == 'oxford_pet')].iloc[0]
    steps = 4 * 100 * (int(3680 * .9) // 256)
    run = cnn.paper_cnn('scnn', 'oxford_pet')
    ops = cnn.reinit_cnn_cost([run]).iloc[0]
    assert one.hours == pytest.approx(6 * ops.hours * steps / ops.steps)

def test_noise_relative_to_the_weights(trained):
    run, learn = trained
    found = cnn.measure_cnn(learn, run.replace(shares=(.5,)))
    w = torch.cat([p.detach().flatten() for p in learn.model.parameters() if p.ndim > 1])
    same = cnn.measure_cnn(learn, run.replace(sigmas=(.5 * w.norm().item() / len(w)**.5,)))
    lost = next(v for k, v in same.items() if k.startswith('noise_0'))
    assert found['relative_noise_0.5'] == pytest.approx(lost, abs=.03)
    assert run.replace(shares=()).hash == run.hash != run.replace(shares=(.5,)).hash

def test_gains_in_two_precisions():
    rows = []
    for s, m, p in product(range(3), ('LW', 'BL'), ('fp32', 'bf16')):
        acc = .5 + .02 * (m == 'LW') + .01 * s + (p == 'bf16') * (.003 if m == 'LW' else .001)
        rows.append({'seed': s, 'method': m, 'learn.precision': p, 'test_acc': acc})
    t = cnn.precision_gains(pd.DataFrame(rows)).set_index('what')
    assert t['mean']['LW − BL in fp32'] == pytest.approx(2) and t['mean']['bf16 − fp32'] == pytest.approx(.2)
    assert len(cnn.precision_runs('laptop')) == 16 * 4 and len({r.seed for r in cnn.precision_runs('laptop')}) == 16

# ---------------------------------------------------------------- what is published

def test_published_converged_runs_are_planned_and_have_equal_steps():
    df = cnn.check_equal_steps(cnn.STUDY.load(RESULTS).file('reinit_cnn_converged'))
    planned = {(c.run.hash, a) for cs in cnn.converged_lists('laptop').values() for c in cs
               for a in ('LW', *(arm.name for arm in c.arms))}
    assert set(zip(df.lead, df.arm)) <= planned and not df.duplicated(['lead', 'arm']).any()
    assert (df[df.arm == 'LW'].recipe == df[df.arm == 'LW'].lead).all()
    assert df.seed.between(100, 111).all() and df['learn.keep'].eq('best').all()

def test_the_recorded_pilot_has_other_seeds_and_no_test_accuracy():
    df = load_results(RESULTS / 'reinit_cnn_pilot_laptop.csv')
    assert set(df.seed) <= {50, 51} and not [c for c in df if c.startswith(('test_', 'valid_'))]
    assert df[[c for c in df if c.startswith('train_acc_')]].min().min() > .99
    assert set(df.recipe) == {r.hash for r in cnn.pilot_runs('laptop')}
    assert set(df.model) == set(cnn.CONVERGED_NETWORKS)


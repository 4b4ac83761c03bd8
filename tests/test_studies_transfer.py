"Task changes of Zilly et al. as learning paths: recipes of the appendix, equal compute, tables, published results"
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from reinit_nb.between import paper_resets
from reinit_nb.core import ReinitError
from reinit_nb.path import Before, Learn, lr_at, missing_inputs, run_recipe
from reinit_nb.store import load_results
from reinit_nb.studies.common import flatten_recipes, get_study
from reinit_nb.studies.frozen_weights import exposure
from reinit_nb.studies.transfer import (
    ANNEALED_LISTS,
    DECAY_FACTOR,
    DECAY_SETTINGS,
    FIRST_DECAYS,
    LONG_STAGE_DECAY,
    RATE_SETTINGS,
    RESTORING,
    SAMPLE_IMAGES,
    TASK_CHANGES,
    TRANSFER_INTERVENTIONS,
    SpeedRun,
    annealed_change_runs,
    annealed_decay_runs,
    annealed_fine_tuning_runs,
    annealed_intervention_runs,
    annealed_rate_runs,
    annealed_sample_runs,
    annealed_warm_runs,
    change_paths,
    decay_runs,
    exposure_decay,
    label_transfer,
    long_stage_runs,
    matching_decay_factor,
    plot_gain_correlations,
    plot_gains,
    plot_samples,
    plot_tradeoff,
    plot_transfer_settings,
    rate_runs,
    sample_runs,
    short_stage,
    task_change_runs,
    task_change_table,
    tradeoff_runs,
    transfer_cost,
    transfer_intervention_runs,
    transfer_lists,
    variant_gains,
    variant_table,
    warm_start_runs,
)
from reinit_nb.vision import Task

RESULTS = Path(__file__).parent.parent / 'results/transfer_laptop.csv'
published = pytest.mark.skipif(not RESULTS.exists(), reason='nothing is published yet')

# ---------------------------------------------------------------- recipes

# read from Tables 6-8 by hand: model, stages, (lr, decay, wd) of the second task without and with reset,
# s, one_d, patience, epochs
TABLE6 = (.05, .95, .001)
TABLE7 = (.003, .97, .001)
ROWS = {
    'CIFAR-10: blurred to sharp (ResNet18)': ('resnet18', 2, TABLE6, TABLE6, .2, 'add', 40, 200),
    'CIFAR-10: blurred to sharp (All-CNN)': ('allcnn', 2, (.05, .97, .001), (.05, .97, .001), .1, 'add', 40, 200),
    'CIFAR-10: regular to random shift': ('resnet18', 2, TABLE6, TABLE6, .4, 'one', 60, 200),
    'CIFAR-10 to CIFAR-100': ('resnet18', 2, TABLE6, TABLE6, .5, 'add', 40, 200),
    'CIFAR-10 to FashionMNIST': ('resnet18', 2, TABLE6, TABLE6, .2, 'add', 40, 200),
    'MNIST to FashionMNIST': ('resnet18', 2, TABLE6, TABLE6, .4, 'one', 40, 200),
    'SVHN to CIFAR-10': ('resnet18', 2, TABLE6, TABLE6, .4, 'one', 40, 200),
    'ImageNet to FashionMNIST': ('resnet50', 1, TABLE7, (.05, .93, .001), .05, 'one', 20, 150),
    'ImageNet to KMNIST': ('resnet50', 1, TABLE7, (.003, .98, .001), .01, 'add', 25, 150),
    'ImageNet to EMNIST (letters)': ('resnet50', 1, TABLE7, TABLE7, .05, 'add', 10, 150),
    'ImageNet to CIFAR-100': ('resnet50', 1, TABLE7, (.01, .95, .001), .05, 'add', 20, 150),
    'ImageNet to RESISC45': ('resnet50', 1, TABLE7, (.003, .98, .001), .01, 'add', 20, 150),
    'ImageNet to Patch Camelyon': ('resnet50', 1, TABLE7, (.05, .93, .001), .01, 'add', 20, 150),
}

def rates(how): return how.lr, how.decay, how.wd
def last(run): return run.path[-1][1]

@pytest.mark.parametrize('change', ROWS)
def test_every_row_of_tables_6_to_8(change):
    model, n, standard_rates, reset_rates, s, one_d, patience, epochs = ROWS[change]
    runs = change_paths(change, 'paper')
    standard, reset = runs['standard'], runs['reset']
    assert rates(last(standard)) == standard_rates
    assert rates(last(reset)) == reset_rates
    assert last(standard).before is None
    assert last(reset).before == Before('dirac', s=s, one_d=one_d)
    for run in (standard, reset):
        assert run.model == model
        assert len(run.path) == n
        assert (run.pretrained == 'imagenet') == (run.head == 'zero') == (n == 1)
        assert run.width == 1 and run.n_test is None
        assert (last(run).patience, last(run).epochs, last(run).momentum) == (patience, epochs, .9)
    assert standard.path[-1][0] == reset.path[-1][0]
    assert standard.path[:-1] == reset.path[:-1]
    if n == 2:
        first = standard.path[0][1]
        assert first.lr == .05
        assert (first.patience, first.epochs) == ((20, 100) if 'SVHN' in change else (patience, 200))

def test_all_rows_are_there():
    assert set(ROWS) == set(TASK_CHANGES) == set(paper_resets().change)
    assert len(task_change_table('paper')) == 13

def test_images_of_the_rows():
    tasks = {c: [t for t, _ in change_paths(c, 'paper')['standard'].path] for c in TASK_CHANGES}
    assert tasks['CIFAR-10: blurred to sharp (ResNet18)'] == [Task('cifar10', blur=.25), Task('cifar10')]
    assert tasks['CIFAR-10: regular to random shift'][1].shift == 1
    assert [t.shift for t in tasks['CIFAR-10 to CIFAR-100']] == [.5, .5]
    k = tasks['ImageNet to KMNIST'][0]
    assert (k.size, k.channels, k.normalize) == (224, 3, 'imagenet')
    assert (k.shift, k.affine, k.random_blur, k.jitter) == (.4, (10, 40, .4), .3, (0, .4, 0, 0))
    p = tasks['ImageNet to Patch Camelyon'][0]
    assert (p.size, p.flip, p.vflip) == (96, True, True)
    assert (p.jitter, p.shift, p.affine) == ((.5, .5, .25, .1), .05, (0, 10, 0))
    assert tasks['ImageNet to RESISC45'][0].size == 224

def test_figure_5_at_the_papers_scale():
    runs = decay_runs('paper')
    assert set(runs) == {(m, k) for m in ('resnet18', 'allcnn') for k in DECAY_SETTINGS}
    for (_, setting), rs in runs.items():
        assert [r.seed for r in rs] == [0, 1, 2]
        assert [rates(h) for _, h in rs[0].path] == [(.05, .95, wd) for wd in DECAY_SETTINGS[setting]]
        assert [t.blur for t, _ in rs[0].path] == [.25, 1]
    for (_, setting), rs in rate_runs('paper').items():
        assert [rates(h) for _, h in rs[0].path] == [(*o, .001) for o in RATE_SETTINGS[setting]]

def test_figures_6_and_7_at_the_papers_scale():
    runs = sample_runs('paper')
    assert {f for f, _ in runs} == {.125, .25, .5, 1.}
    assert {rs[0].path[0][0].n_train for rs in runs.values()} == {.125, .25, .5, 1.}
    warm = warm_start_runs('paper')
    for (start, _), rs in warm.items():
        assert [t.n_train for t, _ in rs[0].path] == ([None] if start == 'cold, as long' else [.1, None])
    assert last(warm['cold', '0.05'][0]).before == Before('fresh')
    long = last(warm['cold, as long', '0.05'][0])
    assert long.epochs == 220
    assert long.decay**220 == pytest.approx(.95**200)    # steps of both stages, the same fall of the learning rate

@pytest.mark.parametrize('at', ['smoke', 'laptop'])
def test_laptop_versions_are_compute_matched_and_share_first_stages(at):
    lists = transfer_lists(at)
    for name in ('decays', 'rates', 'warm', 'interventions', 'longer'):
        hows = [last(r) for (k, _), rs in lists[name].items() for r in rs if k != 'cold, as long']
        assert len({(h.epochs, h.batch, h.patience) for h in hows}) == 1
    for name in ('changes', 'samples', 'interventions'):
        compared = {}
        for (change, _), rs in lists[name].items():
            for r in rs:
                first = r.path[:-1] if name == 'interventions' else None
                compute = r.path[-1][0], last(r).epochs, last(r).batch, first
                compared.setdefault((change, r.seed), set()).add(compute)
        assert all(len(v) == 1 for v in compared.values())
    runs = flatten_recipes(lists)
    assert len({r.hash for r in runs}) == len(runs)
    assert len({r.upto(1).hash for r in runs}) < .7 * len(runs)
    assert min(len(rs) for v in lists.values() for rs in v.values()) == (2 if at == 'smoke' else 3)

def test_nothing_but_digits_at_smoke_scale():
    runs = flatten_recipes(transfer_lists('smoke'))
    assert {t.dataset for r in runs for t, _ in r.path} == {'digits'}
    assert not any(missing_inputs(r) for r in runs)

def test_recipes_without_data_are_there_and_say_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv('REINIT_DATA', str(tmp_path))
    monkeypatch.setenv('REINIT_CACHE', str(tmp_path / 'cache'))
    changes = ('SVHN to CIFAR-10', 'ImageNet to EMNIST (letters)', 'ImageNet to RESISC45', 'ImageNet to Patch Camelyon')
    for change in changes:
        for at in ('laptop', 'paper'): assert 'no data found' in missing_inputs(change_paths(change, at)['reset'])

# ---------------------------------------------------------------- exposure

@pytest.mark.parametrize('how, steps', [
    (Learn(lr=.05, decay=.95, wd=.02, epochs=10), 14), (Learn(lr=.01, wd=.1, epochs=20), 5),
    (Learn(lr=.1, momentum=0., decay=.9, wd=.01, epochs=30), 3)])
def test_exposure_is_how_far_a_weight_shrinks(how, steps):
    w, v = 1., 0.
    for t in range(how.epochs * steps):
        v = how.momentum * v + how.wd * w
        w -= how.lr * how.decay**(t / steps) * v
    assert -np.log(w) == pytest.approx(exposure(how, steps)[-1], rel=.12)

def test_the_decay_factor_is_below_what_would_match_the_paper():
    assert DECAY_FACTOR < matching_decay_factor()
    short = short_stage(Learn(wd=.001, epochs=200, patience=40), 'laptop')
    assert short.wd == pytest.approx(.001 * DECAY_FACTOR)

def test_task_changes_act_for_long_enough_to_freeze():
    first, second = (h for _, h in change_paths('CIFAR-10 to FashionMNIST', 'laptop')['standard'].path)
    short = short_stage(Learn(lr=.05, decay=.95, wd=.001, epochs=200), 'laptop')
    assert first.wd == second.wd == LONG_STAGE_DECAY
    assert exposure(first, 14)[-1] > np.log(100) > exposure(short, 14)[-1]
    allcnn = change_paths('CIFAR-10: blurred to sharp (All-CNN)', 'laptop')['reset']
    assert last(allcnn).decay == .97      # second stages are short, and keep the paper's

def test_the_same_runs_are_in_two_lists():
    interventions, longer = transfer_intervention_runs('laptop'), long_stage_runs('laptop')
    for wd in FIRST_DECAYS: assert interventions[f'blurred to sharp, {wd:g}', 'none'] == longer['resnet18', f'{wd:g}']
    assert long_stage_runs('paper') == {}

def test_pretrained_rows_keep_the_papers_proportions():
    for change in ('ImageNet to FashionMNIST', 'ImageNet to KMNIST', 'ImageNet to CIFAR-100'):
        laptop, paper = change_paths(change, 'laptop'), change_paths(change, 'paper')
        for variant in ('standard', 'reset'):
            a, b = last(laptop[variant]), last(paper[variant])
            assert a.lr / a.batch == pytest.approx(b.lr / b.batch)
            assert (a.decay, a.wd, a.before) == (b.decay, b.wd, b.before)
    assert 'standard, same rate' in change_paths('ImageNet to CIFAR-100', 'paper')
    assert 'standard, same rate' not in change_paths('ImageNet to KMNIST', 'paper')

# ---------------------------------------------------------------- tables

@pytest.fixture
def frame():
    rows = []
    for i, runs in enumerate(transfer_intervention_runs('smoke').values()):
        same = dict(steps=4, test_loss=1., train_acc=.5, frozen=i, near=i, fisher=1.,
                    frozen_before=i, frozen_after=0, near_before=i, near_after=0)
        for r in runs:
            run = dict(recipe=r.hash, seed=r.seed, model=r.model) | same
            rows += [run | dict(stage=1, test_acc=0.), run | dict(stage=2, test_acc=.1 * i + .01 * r.seed)]
    return pd.DataFrame(rows)

@pytest.fixture
def labelled(frame): return label_transfer(frame, transfer_intervention_runs('smoke'))

def test_labels_are_of_the_last_stage(frame, labelled):
    assert len(labelled) == 14
    assert (labelled.stage == 2).all()
    assert (labelled.total_steps == 8).all()
    assert list(dict.fromkeys(labelled.variant)) == list(TRANSFER_INTERVENTIONS)
    assert labelled.first_frozen.tolist() == labelled.frozen.tolist()
    runs = transfer_intervention_runs('smoke')
    with pytest.raises(ReinitError, match='none of these runs'): label_transfer(frame[:0], runs)
    assert len(label_transfer(frame[:2], runs)) == 1      # runs without results are left out

def test_gains_are_paired(labelled):
    gains = variant_gains(labelled, 'dirac', 'none')
    assert gains.gain.round(9).tolist() == [.1, .1]
    assert gains.seed.tolist() == [0, 1]
    t = variant_table(labelled, 'none').set_index('variant')
    assert t.difference['none'] == ''
    assert t.difference['dirac'] == '+10.0 [+10.0, +10.0]'
    assert t.accuracy['fresh'] == pytest.approx(60.5)

def test_plots(labelled):
    assert plot_gains(labelled, 'none').get_xlabel().startswith('test accuracy minus that of no intervention')
    assert [ax.get_title() for ax in plot_gain_correlations(labelled)] == list(TRANSFER_INTERVENTIONS[1:])
    same = dict(setting='resnet18', model='resnet18', test_acc=.5, test_loss=2., first_frozen=1, near=2, fisher=3.)
    d = pd.DataFrame([same | dict(variant=k, seed=s, recipe=f'{k}{s}') for k in ('0', '1e-3') for s in range(2)])
    assert len(plot_transfer_settings(d)) == 1
    runs = tradeoff_runs(dict(decays=d, rates=d, warm=d.assign(setting='cold', recipe='x')))
    assert len(runs) == 4
    assert len(plot_tradeoff(runs)) == 3
    samples = pd.DataFrame([dict(setting=f, variant=v, test_acc=.5) for f in (.5, 1.) for v in ('standard', 'reset')])
    assert plot_samples(samples).get_xscale() == 'log'

def test_cost_counts_first_stages_once():
    runs = flatten_recipes(transfer_intervention_runs('paper'))
    t = transfer_cost(runs)
    assert t.stages['resnet18'] == len({r.upto(i + 1).hash for r in runs for i in range(2)})
    assert t.hours['resnet18'] > 1
    with pytest.raises(ReinitError, match='tflops=0'): transfer_cost(runs, 0)

def test_wrong_names():
    with pytest.raises(ReinitError, match='did you mean'): change_paths('CIFAR-10 to CIFAR100')
    with pytest.raises(ReinitError, match='seeds=0'): task_change_runs('smoke', 0)

# ---------------------------------------------------------------- published results

@published
def test_published_runs_are_those_of_the_lists():
    recorded = set(load_results(RESULTS).recipe)
    runs = flatten_recipes(transfer_lists('laptop'))
    lacking = [r for r in runs if r.hash not in recorded]
    unavailable = {'svhn', 'emnist_letters', 'resisc45', 'patch_camelyon'}
    assert recorded <= {r.hash for r in runs}
    assert {t.dataset for r in lacking for t, _ in r.path} - {'cifar10'} <= unavailable
    assert all(get_study('transfer').unavailable(r) for r in lacking)

@published
@pytest.mark.parametrize('name', transfer_lists('laptop'))
def test_published_comparisons_are_compute_matched_and_have_three_seeds(name):
    df = load_results(RESULTS)
    t = label_transfer(df, transfer_lists('laptop')[name])
    assert t.groupby(['setting', 'variant']).seed.nunique().min() >= 3
    assert not t.stopped.astype(bool).any()
    assert np.isfinite(df[['train_loss', 'valid_loss', 'test_loss', 'fisher']]).all(axis=None)
    steps = t.groupby('setting').steps
    if name == 'warm':
        assert t.total_steps.nunique() == 1
        assert steps.first().to_dict() == {'warm': 140, 'cold': 140, 'cold, as long': 280}
    elif name in ('changes', 'samples', 'interventions'): assert steps.nunique().max() == 1
    else: assert t.steps.nunique() == 1

@published
def test_a_dirac_reset_leaves_nothing_frozen():
    t = label_transfer(load_results(RESULTS), transfer_intervention_runs('laptop'))
    reset = t[t.variant == 'dirac']
    assert (reset.frozen_before > 0).sum() > 3
    assert (reset.frozen_after == 0).all()

def standard_runs(of_change):
    runs = task_change_runs('laptop')
    chosen = {k: v for k, v in runs.items() if k[1] == 'standard' and of_change(k[0])}
    return label_transfer(load_results(RESULTS), chosen)

@published
@pytest.mark.parametrize('change', [c for c in TASK_CHANGES if 'ImageNet' not in c and 'SVHN' not in c])
def test_filters_are_frozen_when_the_second_task_begins(change):
    t = standard_runs(lambda c: c == change)
    assert (t.frozen_before > 0).all()
    # the first task was learned; with shifts by half an image it was not, as the page says
    if 'CIFAR-100' not in change: assert (t.first_train_acc > .3).all()

@published
def test_a_pretrained_network_does_better_than_chance():
    by = standard_runs(lambda c: c.startswith('ImageNet')).groupby('setting')
    assert (by.test_acc.mean() > 1.5 / by.classes.first()).all()

# ---------------------------------------------------------------- annealed lists

def laptop_stages(make):
    return [(run, task, how) for runs in make('laptop').values() for run in runs for task, how in run.path]

@pytest.mark.parametrize('name', ANNEALED_LISTS)
def test_annealed_lists_follow_the_rules(name):
    "New seeds, a schedule that ends where the paper's ends, whole test sets, and no one_d='one'"
    runs = ANNEALED_LISTS[name]('laptop')
    n = {'decays': 12, 'rates': 12, 'samples': 5}.get(name, 8)
    assert {tuple(r.seed for r in o) for o in runs.values()} == {tuple(range(100, 100 + n))}
    every = flatten_recipes(runs)
    assert len(every) == len(set(every)) == n * len(runs)
    assert all(isinstance(r, SpeedRun) and r.n_test is None for r in every)
    for _, _, how in laptop_stages(ANNEALED_LISTS[name]):
        paper_decay, epochs = {True: (.97, 150), False: (.95, 200)}[name in ('samples', 'fine_tuning')]
        ends = [how.lr * d**epochs for d in (paper_decay, .97, .99)]         # All-CNN .97, the lowest rate .99
        assert np.isclose(min(ends, key=lambda e: abs(e - lr_at(how, 1.))), lr_at(how, 1.), rtol=1e-6)
        assert how.batch in (32, 64, 128) and how.patience is None and how.precision == 'fp32'
        assert how.before is None or how.before.one_d in (None, 'add', 'gamma')

def compute(run): return [(task.n_train, how.epochs, how.batch) for task, how in run.path]

@pytest.mark.parametrize('make', [annealed_decay_runs, annealed_rate_runs, annealed_intervention_runs])
def test_annealed_arms_have_equal_compute(make):
    assert len({str(compute(runs[0])) for runs in make('laptop').values()}) == 1

def test_annealed_task_changes():
    runs = annealed_change_runs('laptop')
    assert {k[0] for k in runs} == {c for c in TASK_CHANGES if not c.startswith(('ImageNet', 'SVHN'))}
    for change in {k[0] for k in runs}:
        standard, reset = runs[change, 'standard'][0], runs[change, 'reset'][0]
        assert standard.path[0] == reset.path[0]                              # the first stage is trained once
        assert last(reset).replace(before=None) == last(standard)
        row = ROWS[change]
        assert last(reset).before == Before('dirac', s=row[4], one_d='gamma' if row[5] == 'one' else row[5])
    images = {(t.dataset, t.n_train) for _, t, _ in laptop_stages(annealed_change_runs)}
    assert images == {('cifar10', 10_000), ('cifar100', 2000), ('mnist', 20_000), ('fashion_mnist', 20_000)}
    for (_change, variant), (run, *_) in annealed_fine_tuning_runs('laptop').items():
        assert last(run).lr == .003 * 32 / 128 and (last(run).before is None) == (variant == 'standard')

def test_annealed_samples_have_equal_epochs():
    runs = annealed_sample_runs('laptop')
    assert list(dict.fromkeys(k[0] for k in runs)) == list(SAMPLE_IMAGES)
    assert len({last(o[0]).epochs for o in runs.values()}) == 1
    assert {k: o[0].path[0][0].n_train for k, o in runs.items()} == {k: k[0] for k in runs}

def test_warm_starts_see_a_part_of_the_images():
    runs = {k[0]: o[0] for k, o in annealed_warm_runs('laptop').items()}
    (task, long), = runs['cold, as long'].path
    for name, n in (('warm', 1000), ('warm on half', 5000)):
        (first, how), (second, again) = runs[name].path
        assert first.n_train == n and second == task and how == again
        assert first.replace(n_train=10_000) == second
    steps = [sum(how.epochs * (t.n_train // how.batch) for t, how in runs[k].path) for k in ('warm', 'cold, as long')]
    assert steps == [60 * (7 + 78), 65 * 78] and .99 < steps[1] / steps[0] < 1      # the cold start has not more steps
    assert long.lr == again.lr and long.wd == again.wd

def test_interventions_share_their_first_stage():
    runs = annealed_intervention_runs('laptop')
    for setting in {k[0] for k in runs}:
        group = {k[1]: o[0] for k, o in runs.items() if k[0] == setting}
        assert set(group) == set(RESTORING) and len({r.upto(1) for r in group.values()}) == 1
        assert {k: r.path[1][1].before and r.path[1][1].before.name for k, r in group.items()} == (
            {k: k for k in RESTORING} | dict(none=None))

def test_exposure_decay_is_the_inverse_of_exposure():
    how = Learn(lr=.05, decay=.9, epochs=20)
    for target in (0., 1., 9.):
        found = exposure(how.replace(wd=exposure_decay(how, 50, target)), 50)[-1]
        assert np.isclose(found, target, rtol=.05, atol=0)

def test_a_run_with_its_speed():
    run = annealed_warm_runs('smoke', 1)['warm on half', '0.05'][0]
    first, second = run_recipe(run)
    for row in (first, second): assert row['mean_loss'] > 0 and (row['half_epoch'] >= 1 or np.isnan(row['half_epoch']))
    assert (first['images'], second['images']) == (40, 80)

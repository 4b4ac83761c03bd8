"The study of initialization and spectra: recipes, the engine against networks trained alone, tables, published results"
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional as F

from reinit_nb.claims.scorecard import judge
from reinit_nb.coordinate_nets import SIGNALS, START_SIGNALS, Signal, coordinate_net, named_coordinate_net
from reinit_nb.core import ReinitError
from reinit_nb.flatness import hessian
from reinit_nb.spectrum import bandwidth, grid_probe, model_spectrum
from reinit_nb.store import Store, load_results, save_results
from reinit_nb.studies import spectra as study
from reinit_nb.sweep import run_sweep as sweep
from reinit_nb.vision import Task
from reinit_nb.zoo import ZOOS

ROOT = Path(__file__).parent.parent
LISTS = study.WAVE_LISTS | study.SIGNAL_LISTS | dict(pictures=study.image_runs)
SMALL = dict(width=12, depth=2)

def wave(name='gaussian', **fields):
    fields = dict(steps=20, settle=4, start_steps=15, start_n=32, lr=2e-3) | fields
    return study.WaveRun(named_coordinate_net(name, **SMALL), **fields)

def run_stored(runs, folder): return sweep(runs, Store(folder), study.WAVE_ENGINE, show=False, workers=1)

# ---------------------------------------------------------------- recipes

@pytest.mark.parametrize('scale', ['smoke', 'laptop', 'paper'])
def test_lists_have_no_repeats_and_all_starts(scale):
    every = [r for f in LISTS.values() for r in f(scale)]
    assert len(every) == len(set(every))
    for name in ('depths', 'arms', 'sequences', 'laws', 'pictures'):
        assert len({r.seed for r in LISTS[name](scale)}) > 1
    assert {r.start for r in study.start_runs(scale)} == {'random', 'high', 'dc'}
    assert {'none', 'random', 'swapped'} <= {r.labels for r in study.image_runs(scale)}

def test_the_papers_settings_of_experiments_1_and_2():
    for r in study.depth_runs('paper'):
        assert (r.net.width, r.n, r.lo, r.hi, r.start) == (256, 8, 0, 10, 'random')
        assert r.signal == Signal((.2, .1), (3., 5.))
    stated = ('sgd', 1e-4, 0)
    for r in (*study.depth_runs('paper'), *study.width_runs('paper'), *study.optimizer_runs('laptop')):
        assert (r.opt, r.lr, r.settle) == stated
    assert all(r.opt == 'adam' for r in study.optimizer_runs('paper'))
    nets = {(r.net.act, r.net.init) for r in study.depth_runs('paper')}
    assert nets == {('relu', 'xavier'), ('gaussian', 'xavier'), ('sine', 'xavier'), ('gaussian', 'normal')}
    for r in study.sequence_runs('paper'):
        assert r.net.dims == (1, 256, 256, 256, 256, 1)
        assert r.signal.freqs == (5., 10., 15., 20., 25., 30.)

def test_the_papers_settings_of_experiments_3_and_4():
    runs = study.start_runs('paper')
    for r in runs:
        assert r.net.depth == 4 and (r.hi - r.lo) / (r.n - 1) == 1 and r.signal == Signal((.5,), (1.,))
        assert r.net.init == 'xavier' or (r.net.act, r.net.sigma) == ('gaussian', .03)
    starts = {('relu', 'random'), ('relu', 'high'), ('relu', 'dc'), ('gaussian', 'random')}
    assert {(r.net.act, r.start) for r in runs} == starts
    names = {r.model.split(':')[1] for r in study.image_runs('paper')}
    assert {'vgg11', 'vgg16', 'resnet18', 'resnet50', 'densenet121', 'efficientnet_b0', 'alexnet'} <= names
    assert 'seresnet50' in names
    assert any('convmixer' in o for o in names)

def test_the_papers_settings_of_experiment_5():
    runs = study.minimum_runs('paper')
    assert len({r.signal for r in runs}) == 20
    for r in runs: assert r.n == 8 and (r.lo, r.hi) == (r.start_lo, r.start_hi) == (0, 10)
    assert {(r.net.act, r.net.init, r.start) for r in runs} == {
        ('relu', 'xavier', 'random'), ('relu', 'xavier', 'high 3'), ('gaussian', 'xavier', 'random'),
        ('gaussian', 'normal', 'random')}
    assert START_SIGNALS['high 3'] == Signal((3.,), (1.,))
    assert all(.01 <= f <= 1 for r in runs for f in r.signal.freqs)
    assert all(1 <= h <= 10 for r in runs for h in r.signal.heights)
    for scale in ('paper', 'laptop'):      # all networks are trained equally long
        assert len({r.steps + r.settle for r in study.minimum_runs(scale)}) == 1

@pytest.mark.parametrize('scale', ['laptop', 'paper'])
def test_slower_signals_are_resolved_by_eight_points(scale):
    for r in study.resolved_runs(scale): assert max(r.signal.freqs) * (r.hi - r.lo) <= 3.5

def test_signals_of_experiment_5_have_as_many_cycles_as_the_papers():
    freqs = np.array([f for r in study.minimum_runs('laptop') for f in r.signal.freqs]) * 3 / 10
    assert freqs.min() > .01 and freqs.max() < 1

@pytest.mark.parametrize('name', [k for k in study.PAPER_IMAGE_NETS if k.startswith('torchvision')])
def test_the_papers_networks_can_be_made_and_run(name):
    with torch.device('meta'):
        net = ZOOS['torchvision'][0](name.split(':')[1])(num_classes=100).eval()
        assert net(torch.empty(2, 3, 64, 64)).shape == (2, 100)

def test_networks_of_timm_can_be_made_and_run():
    timm = pytest.importorskip('timm')
    for name in [k.split(':')[1] for k in study.PAPER_IMAGE_NETS if k.startswith('timm')]:
        with torch.device('meta'):
            net = timm.create_model(name, num_classes=10).eval()
            assert net(torch.empty(2, 3, 64, 64)).shape == (2, 10)

WRONG_WAVES = [
    (dict(start='low'), "start='low'"), (dict(lr=0.), 'lr=0'), (dict(steps=0), 'steps=0'), (dict(probes=1), 'probes=1'),
    (dict(hi=-1.), 'hi=-1.0 should be larger'), (dict(opt='lion'), "opt='lion'"), (dict(watch=math.nan), 'watch'),
    (dict(every=-1), 'every=-1'), (dict(watch=1000.), 'watch=1000 is too high'),
    (dict(start='high', start_n=20), 'start_n=20'), (dict(every=5, signal=SIGNALS['dc']), 'the target is constant'),
    (dict(signal=Signal((), ())), 'zero everywhere'), (dict(signal=Signal((1.,), (0.,))), 'zero everywhere'),
    (dict(every=5, signal=Signal((30.,), (1.,))), 'frequency=30 is too high')]

@pytest.mark.parametrize('fields, message', WRONG_WAVES)
def test_wrong_recipes_are_refused(fields, message):
    with pytest.raises(ReinitError, match=message): wave(**fields)

WRONG_IMAGES = [(dict(labels='wrong'), "labels='wrong'"), (dict(epochs=0), 'epochs=0'), (dict(width=0.), 'width=0'),
                (dict(init='zero'), "init='zero'"), (dict(probes=1), 'probes=1')]

@pytest.mark.parametrize('fields, message', WRONG_IMAGES)
def test_wrong_image_runs_are_refused(fields, message):
    with pytest.raises(ReinitError, match=message): study.ImageRun(**fields)

@pytest.mark.parametrize('run', [wave(), study.ImageRun()], ids=['wave', 'image'])
def test_fields_that_came_later_do_not_change_hashes(run):
    assert 'density' not in run.to_dict()['fields']
    assert run.replace(density=8).hash != run.hash
    assert run.replace(density=8).replace(density=0).hash == run.hash

@pytest.mark.parametrize('name, convs', [('vgg11', 8), ('vgg16', 13)])
@pytest.mark.parametrize('size', [8, 16, 32])
def test_vggs_take_small_images(name, convs, size):
    net = study.image_net(name, 7, size=size, width=1 / 16)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in net.modules()) == convs
    assert net(torch.zeros(2, 3, size, size)).shape == (2, 7)

def test_laptop_scale_has_four_networks_and_two_datasets():
    seeds = {}
    for r in study.image_runs('laptop'): seeds.setdefault((r.model, r.task.dataset), set()).add(r.seed)
    names = ('vgg11', 'vgg16', 'resnet18', 'convmixer')
    assert set(seeds) == {(k, d) for k in names for d in ('cifar10', 'cifar100')}
    assert {k for k, v in seeds.items() if len(v) < 3} <= {('convmixer', 'cifar100')}

def test_wrong_names_of_networks():
    with pytest.raises(ReinitError, match="did you mean 'convmixer'"): study.image_net('convmixr')
    with pytest.raises(ReinitError, match="zoo='keras'"): study.image_net('keras:vgg11')
    with pytest.raises(ReinitError, match="no network 'vgg12'"): study.image_net('torchvision:vgg12')

# ---------------------------------------------------------------- engine

def train(net, x, signal, lr, steps, opt):
    opt = dict(adam=torch.optim.Adam, sgd=torch.optim.SGD)[opt](net.parameters(), lr)
    for _ in range(steps):
        opt.zero_grad()
        F.mse_loss(net(x), signal(x)).backward()
        opt.step()

def train_alone(run):
    "One network with autograd and torch's optimizers: its state before it sees its points, and the trained network"
    net, x = coordinate_net(run.net, run.seed), study.sample_points(run).float()
    if run.start != 'random':
        start = grid_probe(run.start_lo, run.start_hi, run.start_n).points().float()
        train(net, start, SIGNALS[run.start], run.start_lr, run.start_steps, 'adam')
    weights = [(m.dense.weight.detach().clone(), m.dense.bias.detach().clone()) for m in net]
    before = coordinate_net(run.net, weights=weights)
    train(net, x, run.signal, run.lr, run.steps, run.opt)
    train(net, x, run.signal, .1 * run.lr, run.settle, run.opt)
    return before, net

@pytest.mark.parametrize('start, opt', [('random', 'adam'), ('high', 'adam'), ('dc', 'sgd')])
def test_a_portion_is_what_networks_trained_alone_are(start, opt):
    def run(name, seed):
        signal = Signal((.1 * (1 + seed),), (2.,))
        return wave(name, start=start, opt=opt, watch=3., seed=seed, lr=1e-3 * (1 + seed), signal=signal)
    runs = [run(name, seed) for name in ('gaussian', 'gaussian low') for seed in (0, 1)]
    for r, (row,) in zip(runs, study.run_waves(runs)):
        before, net = train_alone(r)
        probe, x = grid_probe(r.lo, r.hi, 512), study.sample_points(r)
        y, g = r.signal(probe.points()), net(probe.points().float()).detach().double()
        assert row['loss'] == pytest.approx(F.mse_loss(net(x.float()).double(), r.signal(x)).item(), rel=1e-3)
        assert row['error'] == pytest.approx(float(((g - y)**2).mean().sqrt() / (y**2).mean().sqrt()), rel=1e-3)
        for when, m in ((0, before), (1, net)):
            assert row[f'centroid{when}'] == pytest.approx(bandwidth(model_spectrum(m, probe)).centroid[0], rel=.02)

def test_runs_that_diverge_are_refused():
    runs = [wave('relu', opt='sgd', lr=1e3, seed=s) for s in range(2)]
    with pytest.raises(ReinitError, match='2 of 2 runs diverged, the first with lr=1000'): study.run_waves(runs)

def dense_hessian(run):
    net, x = study.train_waves([run])[0].member(0).double(), study.sample_points(run)
    H = hessian(net, (x, run.signal(x)), F.mse_loss)
    H = (H @ torch.eye(H.shape[0], dtype=torch.float64)).numpy()
    return (H + H.T) / 2

def test_sharpness_is_that_of_the_hessian():
    run = wave('relu', probes=400)
    row, H = study.run_waves([run])[0][0], dense_hessian(run)
    assert row['top'] == pytest.approx(np.linalg.eigvalsh(H)[-1], rel=1e-2)
    assert row['trace'] == pytest.approx(np.trace(H), rel=1e-6)

def test_runs_with_one_start_learn_it_once(monkeypatch):
    signals = [Signal((.1 * k,), (1.,)) for k in (1, 2, 3)]
    runs = [wave('relu', start='high', seed=s, signal=signal) for signal in signals for s in (0, 1)]
    sizes, real = [], study.pretrain_signal
    def counting(stack, *args):
        sizes.append(len(stack))
        return real(stack, *args)
    monkeypatch.setattr(study, 'pretrain_signal', counting)
    portions = study.plan_waves(runs)
    together = [o[0] for p in portions for o in study.run_waves(p)]
    assert sizes == [2]
    alone = [study.run_waves([r])[0][0] for p in portions for r in p]
    for a, b in zip(together, alone):
        for k in ('error', 'start_loss'): assert a[k] == pytest.approx(b[k], rel=1e-3)

specs = st.tuples(st.sampled_from(['relu', 'gaussian', 'sine']), st.integers(1, 3), st.integers(0, 3),
                  st.sampled_from([10, 20]))

@given(st.lists(specs, min_size=1, max_size=30, unique=True), st.integers(1, 8))
@hypothesis_settings(max_examples=30, deadline=None)
def test_plans_lose_nothing_and_mix_nothing(specs, size):
    runs = [study.WaveRun(named_coordinate_net(k, width=8, depth=d), seed=s, steps=n) for k, d, s, n in specs]
    portions = study.plan_waves(runs, size)
    assert sorted(r.hash for p in portions for r in p) == sorted(r.hash for r in runs)
    assert max(map(len, portions)) <= size
    for p in portions: assert len({(r.net.act, r.net.dims, r.steps) for r in p}) == 1

def test_what_is_stored_is_not_run_again(tmp_path):
    runs = [wave(seed=s) for s in range(3)]
    first = run_stored(runs[:2], tmp_path)
    sizes = []
    def counting(recipes):
        sizes.append(len(recipes))
        return study.run_waves(recipes)
    again = sweep(runs, Store(tmp_path), study.WAVE_ENGINE._replace(run=counting), show=False, workers=1)
    assert sizes == [1] and len(again) == 3
    pd.testing.assert_series_equal(again.error[:2], first.error)

@pytest.mark.parametrize('kind', ['image', 'wave'])
def test_runs_live_on_the_default_device(monkeypatch, kind):
    calls = []
    def device():
        calls.append(1)
        return torch.device('cpu')
    monkeypatch.setattr(study, 'default_device', device)
    if kind == 'image':
        run = study.image_runs('smoke')[0].replace(epochs=1, probes=0)
        assert study.run_image(run) == study.run_image(run)
    else: study.run_waves([wave()] * 1 + [wave(seed=1)])
    assert len(calls) == (2 if kind == 'image' else 1)

def test_image_runs_without_data_are_left_out(tmp_path):
    run = study.image_runs('smoke')[0].replace(task=Task('no_such_set', valid=0.))
    with pytest.raises(ReinitError, match='nothing can be run here'):
        sweep([run], Store(tmp_path), study.IMAGE_ENGINE, show=False, workers=1)

# ---------------------------------------------------------------- images

def test_an_image_run_is_repeatable_and_says_whether_it_got_there():
    run = study.image_runs('smoke')[0].replace(epochs=4, probes=0)
    a, b = (study.run_image(run)[0] for _ in range(2))
    assert a.pop('start_acc') != 0 and math.isnan(b.pop('start_acc'))
    assert a == b
    assert a['reached'] == (a['train_accuracy'] == 1)
    assert a['start_epochs'] == 0
    assert a['width0'] == a['width0_init']      # nothing was learned before the right labels

def test_starts_share_images_and_weights():
    runs = study.image_runs('smoke')[:3]
    assert len({r.seed for r in runs}) == 1 and len({r.labels for r in runs}) == 3
    rows = [study.run_image(r.replace(epochs=1, probes=0))[0] for r in runs]
    assert len({o['width0_init'] for o in rows}) == 1
    assert len({o['width0'] for o in rows}) == 3

def test_quantiles_become_a_density():
    q = stats.norm.ppf(study.QUANTILE_LEVELS)
    row = dict(model='m', labels='none', seed=0, quantiles0=' '.join(map(str, q)))
    d = study.gradient_densities(pd.DataFrame([row]))
    assert np.allclose(d.density, stats.norm.pdf(d.gradient), rtol=.1, atol=5e-3)

# ---------------------------------------------------------------- spectra of the Hessian

def test_recorded_spectra_are_those_of_the_hessian(tmp_path):
    run = wave('relu', probes=2, density=12)
    df = run_stored([run], tmp_path)
    t = study.recorded_eigenvalues(df)
    assert t.eigenvalue.is_monotonic_decreasing
    assert t.weight.sum() == pytest.approx(1, abs=1e-2)
    assert t.larger.iloc[-1] == pytest.approx(1, abs=1e-2)
    v = np.linalg.eigvalsh(dense_hessian(run))
    assert t.eigenvalue[0] == pytest.approx(v[-1], rel=1e-2)
    assert t.eigenvalue.min() >= v[0] - 1e-2 * abs(v[-1])
    ax = study.plot_hessian_spectra(study.label_waves(df), 'n', 'kind')[0]
    assert sum(len(o.get_xdata()) > 0 for o in ax.lines) == 1
    assert [o.get_text() for o in ax.figure.legends[0].get_texts()] == ['relu']
    with pytest.raises(ReinitError, match='no recorded spectra'): study.recorded_eigenvalues(df.drop(columns='nodes'))

# ---------------------------------------------------------------- new seeds

def test_signals_are_split_by_what_points_resolve():
    split = study.split_signals(10)
    assert {k: len(v) for k, v in split.items()} == dict(resolved=10, aliased=10)
    x = torch.linspace(0, 10, 8)
    spacing = float(x[1] - x[0])
    assert all(max(s.freqs) < 1 / 2 / spacing for s in split['resolved'])
    assert all(max(s.freqs) >= 1 / 2 / spacing for s in split['aliased'])
    assert study.split_signals(10) == split
    with pytest.raises(ReinitError, match='k=399'): study.split_signals(399)

def test_flatness_compares_both_networks_on_the_same_signals():
    runs = study.flatness_runs('laptop')
    assert len(runs) == 10 * 4 * 2 * 2 * 2
    assert {(r.lo, r.hi, r.n) for r in runs} == {(0., 10., 8)}
    low, high = ({r.replace(net=r.net.replace(init='xavier')) for r in runs if r.net.init == k}
                 for k in ('normal', 'xavier'))
    assert low == high and {r.seed for r in runs} == set(range(100, 110))
    assert len({r.signal for r in runs}) == 20

def test_the_spike_of_a_known_signal():
    "The amplitude of a sine at the watched frequency, whatever slower waves there are"
    run = wave(lo=-1.5, hi=1.5, n=4, watch=5.)
    x = grid_probe(-1.5, 1.5, 512).points()
    for height in (0., .4, 1.):
        g = (Signal((.5, 5.), (1., height))(x))[None]
        assert study._bands(g, run, 1)[0]['spike1'] == pytest.approx(height, abs=2e-2)

def test_flatness_pairs_by_hand(tmp_path):
    runs = [r for r in study.flatness_runs('smoke') if r.net.a == .1 and r.lr == 1e-4]
    df = run_stored(runs, tmp_path)
    pairs = study.flatness_pairs(df, most=math.inf)
    assert len(pairs) == len(runs) / 2 and pairs.signals.value_counts().to_dict() == dict(resolved=2, aliased=2)
    seed, kind = pairs.seed[0], pairs.signals[0]
    some = study.split_signals(2)[kind][seed - 100]
    high, low = (df[(df.seed == seed) & (df['net.init'] == k) & (df['signal.freqs'].map(tuple) == some.freqs)].iloc[0]
                 for k in ('xavier', 'normal'))
    assert pairs.error[0] == pytest.approx(100 * (high.error - low.error))
    assert pairs.top[0] == pytest.approx(math.log10(high.top / low.top))
    none = study.flatness_pairs(df, most=1e-12)
    assert not len(none)
    with pytest.raises(ReinitError, match='no pair'): study.flatness_map(none)
    assert set(study.flatness_map(pairs).value) == {'error', 'trace', 'top'}

def test_a_few_seeds_of_lists_that_begin_at_a_hundred():
    lists = study.STUDY.lists('laptop', seeds=2)
    assert {r.seed for r in lists['spikes']} == {100, 101} and {r.seed for r in lists['arms']} == {0, 1}

def test_the_screen_pairs_random_with_swapped_labels():
    runs = study.screen_runs('laptop')
    assert {r.task.n_train for r in runs} == {5000} and {r.seed for r in runs} == {50}
    swapped, random = ({r.replace(labels='none') for r in runs if r.labels == k} for k in ('swapped', 'random'))
    assert swapped == random and {(r.opt, r.norm) for r in random} == {
        ('momentum', 'batch'), ('momentum', 'none'), ('adam', 'batch'), ('adam', 'none')}
    row = study.run_image(study.screen_runs('smoke')[2])[0]
    assert row['start_epochs'] == 2

# ---------------------------------------------------------------- tables

def test_order_counts_what_was_not_reached_as_last():
    steps = (1, 2, 3), (1, 2, math.nan), (math.nan,) * 3, (3, 2, 1)
    tables = [pd.DataFrame(dict(act='relu', seed=s, frequency=(0., 1., 2.), step=v)) for s, v in enumerate(steps)]
    found = study.frequency_order(pd.concat(tables))
    assert found.tau.tolist() == pytest.approx([1, 1, 0, -1])
    assert found.reached.tolist() == [3, 2, 0, 3]

@given(st.integers(0, 100))
@hypothesis_settings(max_examples=10, deadline=None)
def test_predictors_are_spearmans(seed):
    rng = np.random.default_rng(seed)
    d = pd.DataFrame(rng.random((30, 3)), columns=['error', 'centroid0', 'top']).assign(seed=np.repeat(range(6), 5))
    t = study.rank_predictors(d, xs=('centroid0', 'top'), n=30).set_index('predictor')
    for k in t.index: assert t.rho[k] == pytest.approx(stats.spearmanr(d.error, d[k]).statistic)
    assert (t.lo <= t.hi).all()
    assert t.ahead['centroid0'] == 0
    assert t.ahead['top'] == pytest.approx(abs(t.rho['centroid0']) - abs(t.rho['top']))

def test_ranks_within_groups_ignore_what_groups_differ_in():
    rng = np.random.default_rng(0)
    columns = ['error', 'centroid0', 'top']
    d = pd.DataFrame(rng.random((40, 3)), columns=columns)
    d = d.assign(seed=np.repeat(range(8), 5), what=np.tile(range(2), 20))
    far = d.assign(**{k: d[k] + 100 * d.what for k in columns})
    a, b = (study.rank_predictors(o, xs=('centroid0', 'top'), n=20, within='what') for o in (d, far))
    pd.testing.assert_frame_equal(a, b)
    each = [stats.spearmanr(g.error, g.top).statistic for _, g in d.groupby('what')]
    assert a.rho[1] == pytest.approx(np.mean(each), abs=1e-6)      # groups of the same size: the mean of theirs
    assert a.groups[0] == 8

def test_labels_tell_small_weights_apart_and_what_was_not_learned(tmp_path):
    short = dict(steps=2, settle=0)
    other = named_coordinate_net('gaussian low', **SMALL, sigma=.03**.5)
    runs = [wave('gaussian low', seed=s, **short) for s in range(2)]
    runs.append(runs[0].replace(net=other))
    d = study.label_waves(run_stored(runs, tmp_path))
    assert sorted(d.kind) == ['gaussian 0.17', 'gaussian low', 'gaussian low']
    assert np.allclose(d.left, d.loss / 17)

def test_curves_hold_the_signal_and_survive_the_file(tmp_path):
    run = wave(curve=True)
    df = run_stored([run], tmp_path / 's')
    save_results(df, tmp_path / 'a.csv')
    for d in (df, load_results(tmp_path / 'a.csv')):
        t = study.recorded_curves(d)
        assert np.allclose(t.target, run.signal(torch.tensor(t.x.to_numpy()))) and len(t) == 256
    with pytest.raises(ReinitError, match='no recorded curves'):
        study.recorded_curves(df.drop(columns=['before', 'after']))

def test_rank_correlations_are_drawn():
    common = dict(networks='all', rho=.5, lo=.1, hi=.8)
    rows = [dict(experiment=e, predictor=x, **common) for e in '123' for x in ('centroid0', 'top')]
    ax = study.plot_rank_correlations(pd.DataFrame(rows), ['experiment', 'networks'])
    assert [o.get_text() for o in ax.get_yticklabels()] == ['1, all', '2, all', '3, all']
    assert [o.get_text() for o in ax.get_legend().get_texts()] == ['centroid before', 'largest eigenvalue']

# ---------------------------------------------------------------- claims

def test_networks_that_learned_nothing_do_not_count():
    rows = []
    for kind in ('relu', 'gaussian', 'sine'):
        for depth in (2, 6):
            effect = depth * (kind != 'relu')
            rows += [dict(kind=kind, depth=depth, seed=s, centroid0=1 + effect + .01 * s,
                          error=.2 + .1 * effect + .001 * s * depth, left=0.) for s in range(4)]
    d = pd.DataFrame(rows)
    assert judge('F1', d, scale='laptop').verdict == '✅'
    v = judge('F1', d.assign(left=np.where((d.kind == 'sine') & (d.depth == 6), .5, 0.)), scale='laptop')
    assert v.verdict == '?'
    assert 'sine, deep − shallow, error: not run yet' in v.measured

def pictured(effect=-.05, models=('m',), noise=.03):
    luck = noise * np.random.default_rng(1).normal(size=6)
    rows = []
    for model in models:
        for seed in range(6):
            for labels in ('none', 'random', 'swapped'):
                acc = .5 + (effect + luck[seed] if labels == 'random' else 0.)
                rows.append(dict(model=model, seed=seed, labels=labels, reached=True, test_accuracy=acc))
    return pd.DataFrame(rows).assign(width0=1., width1=1., **{'task.dataset': 'd', 'task.n_train': 9})

def test_networks_that_share_seeds_do_not_count_twice():
    one, four = (judge('F5', pictured(models=m), scale='laptop') for m in ('m', 'abcd'))
    assert one.n == four.n == 6
    assert (one.part.effect.lo, one.part.effect.hi) == pytest.approx((four.part.effect.lo, four.part.effect.hi))

def test_networks_that_contradict_each_other_are_averaged_and_told():
    a, b = pictured(-.2, ('a',), .001), pictured(.05, ('b',), .001)
    assert judge('F5', a, scale='laptop').verdict == '✅'
    both = judge('F5', pd.concat([a, b]), scale='laptop')
    harm = both.parts[0]
    assert both.verdict == '✅' and harm.effect.value == pytest.approx(7.5, abs=.2)
    assert harm.effect.better == .5 and '50% of single pairs above 0' in harm.text

# ---------------------------------------------------------------- published

def test_numbers_on_the_map_of_flatness_are_readable():
    rows = [dict(a=.1, lr=1e-4, signals=s, value=v, n=3, mean=m, lo=m - 1, hi=m + 1)
            for v in ('error', 'trace', 'top') for s, m in (('aliased', -50.), ('resolved', 50.))]
    for ax in study.plot_flatness_map(pd.DataFrame(rows)):
        image = ax.images[0]
        colors = image.cmap(image.norm(image.get_array().data))[..., :3]
        linear = np.where(colors <= .04045, colors / 12.92, ((colors + .055) / 1.055)**2.4)
        contrast = (linear @ [.2126, .7152, .0722] + .05) / .05   # of black text
        assert len(ax.texts) == 2 and {t.get_color() for t in ax.texts} == {'black'}
        assert contrast.min() > 4.5
    plt.close('all')

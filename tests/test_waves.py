"The study of initialization and spectra: recipes, the engine against networks trained alone, what is skipped, tables, and what is published"
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hyp
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional as F

from reinit_nb import bridge, claims, waves
from reinit_nb.bandwidth import SIGNALS, Signal, coordinate_net, net_named
from reinit_nb.core import ReinitError, Store, load_results
from reinit_nb.flatness import hessian
from reinit_nb.reset import dirac_reset
from reinit_nb.spectrum import bandwidth, grid, spectrum
from reinit_nb.sweep import run as sweep

ROOT = Path(__file__).parent.parent
SMALL = dict(width=12, depth=2)
def wave(name='gaussian', **kw): return waves.WaveRun(net_named(name, **SMALL), **(dict(steps=20, settle=4, start_steps=15, start_n=32, lr=2e-3) | kw))

# ---------------------------------------------------------------- recipes

@pytest.mark.parametrize('scale', ['smoke', 'laptop', 'paper'])
def test_lists_have_no_repeats_and_all_starts(scale):
    every = [r for f in (*waves.LISTS.values(), waves.pictures) for r in f(scale)]
    assert len(every) == len(set(every))
    for f in (waves.depths, waves.arms, waves.sequences, waves.laws, waves.pictures): assert len({r.seed for r in f(scale)}) > 1
    assert {r.start for r in waves.arms(scale)} == {'random', 'high', 'dc'}
    assert {'none', 'random', 'swapped'} <= {r.labels for r in waves.pictures(scale)}

def test_the_papers_settings():
    for r in waves.depths('paper'): assert r.net.width == 256 and r.n == 8 and (r.lo, r.hi) == (0, 10) and r.signal == Signal((.2, .1), (3., 5.)) and r.start == 'random'
    for r in (*waves.depths('paper'), *waves.widths('paper')): assert (r.opt, r.lr, r.settle) == ('sgd', 1e-4, 0)
    assert {(r.net.act, r.net.init) for r in waves.depths('paper')} == {('relu', 'xavier'), ('gaussian', 'xavier'), ('sine', 'xavier'), ('gaussian', 'normal')}
    assert all(r.opt == 'adam' for r in waves.optimizers('paper')) and all((r.opt, r.lr, r.settle) == ('sgd', 1e-4, 0) for r in waves.optimizers('laptop'))
    for r in waves.sequences('paper'): assert r.net.dims == (1, 256, 256, 256, 256, 1) and r.signal.freqs == (5., 10., 15., 20., 25., 30.)
    for r in waves.arms('paper'):
        assert r.net.depth == 4 and (r.hi - r.lo) / (r.n - 1) == 1 and r.signal == Signal((.5,), (1.,)) and (r.net.init == 'xavier' or (r.net.act, r.net.sigma) == ('gaussian', .03))
    assert {(r.net.act, r.start) for r in waves.arms('paper')} == {('relu', 'random'), ('relu', 'high'), ('relu', 'dc'), ('gaussian', 'random')}
    names = {r.model.split(':')[1] for r in waves.pictures('paper')}
    assert {'vgg11', 'vgg16', 'resnet18', 'resnet50', 'densenet121', 'efficientnet_b0', 'alexnet', 'seresnet50'} <= names and any('convmixer' in o for o in names)

def test_the_papers_settings_of_experiment_5():
    rs = waves.minima('paper')
    assert len({r.signal for r in rs}) == 20 and all(r.n == 8 and (r.lo, r.hi) == (r.start_lo, r.start_hi) == (0, 10) for r in rs)
    assert {(r.net.act, r.net.init, r.start) for r in rs} == {('relu', 'xavier', 'random'), ('relu', 'xavier', 'high 3'), ('gaussian', 'xavier', 'random'), ('gaussian', 'normal', 'random')}
    assert waves.STARTS['high 3'] == Signal((3.,), (1.,)) and all(.01 <= f <= 1 for r in rs for f in r.signal.freqs) and all(1 <= h <= 10 for r in rs for h in r.signal.heights)
    assert len({r.steps + r.settle for r in rs}) == 1 == len({r.steps + r.settle for r in waves.minima('laptop')})      # all arms are trained equally long

@pytest.mark.parametrize('scale', ['laptop', 'paper'])
def test_slower_signals_are_resolved_by_eight_points(scale):
    for r in waves.resolved(scale): assert max(r.signal.freqs) * (r.hi - r.lo) <= 3.5

def test_signals_of_experiment_5_have_as_many_cycles_as_the_papers():
    fs = np.array([f for r in waves.minima('laptop') for f in r.signal.freqs]) * 3 / 10
    assert fs.min() > .01 and fs.max() < 1

@pytest.mark.parametrize('name', [k for k in waves.PAPER_NETS if k.startswith('torchvision')])
def test_the_papers_networks_can_be_made_and_run(name):
    with torch.device('meta'):
        net = waves.ZOOS['torchvision'][0](name.split(':')[1])(num_classes=100).eval()
        assert net(torch.empty(2, 3, 64, 64)).shape == (2, 100)

def test_networks_of_timm_can_be_made_and_run():
    timm = pytest.importorskip('timm')
    for name in [k.split(':')[1] for k in waves.PAPER_NETS if k.startswith('timm')]:
        with torch.device('meta'): assert timm.create_model(name, num_classes=10).eval()(torch.empty(2, 3, 64, 64)).shape == (2, 10)

@pytest.mark.parametrize('kw, words', [(dict(start='low'), "start='low'"), (dict(lr=0.), 'lr=0'), (dict(steps=0), 'steps=0'), (dict(probes=1), 'probes=1'), (dict(hi=-1.), 'hi=-1.0 should be larger'),
                                       (dict(opt='lion'), "opt='lion'"), (dict(watch=math.nan), 'watch'), (dict(every=-1), 'every=-1'), (dict(watch=1000.), 'watch=1000 is too high'),
                                       (dict(start='high', start_n=20), 'start_n=20'), (dict(every=5, signal=SIGNALS['dc']), 'the target is constant'), (dict(signal=Signal((), ())), 'zero everywhere'), (dict(signal=Signal((1.,), (0.,))), 'zero everywhere'),
                                       (dict(every=5, signal=Signal((30.,), (1.,))), 'frequency=30 is too high')])
def test_wrong_recipes_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): wave(**kw)

@pytest.mark.parametrize('kw, words', [(dict(labels='wrong'), "labels='wrong'"), (dict(epochs=0), 'epochs=0'), (dict(width=0.), 'width=0'), (dict(init='zero'), "init='zero'"), (dict(probes=1), 'probes=1')])
def test_wrong_image_runs_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): waves.ImageRun(**kw)

def test_fields_that_came_later_do_not_change_fingerprints():
    for r, n in ((wave(), 8), (waves.ImageRun(), 8)):
        assert 'density' not in r.to_dict()['fields'] and r.replace(density=n).hash != r.hash and r.replace(density=n).replace(density=0).hash == r.hash

@pytest.mark.parametrize('name, convs', [('vgg11', 8), ('vgg16', 13)])
@pytest.mark.parametrize('size', [8, 16, 32])
def test_vggs_take_small_images(name, convs, size):
    net = waves.image_net(name, 7, size=size, width=1 / 16)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in net.modules()) == convs and net(torch.zeros(2, 3, size, size)).shape == (2, 7)

def test_laptop_scale_has_four_networks_and_two_data_sets():
    rs = waves.pictures('laptop')
    assert {(r.model, r.task.dataset) for r in rs} == {(k, d) for k in ('vgg11', 'vgg16', 'resnet18', 'convmixer') for d in ('cifar10', 'cifar100')}
    few = {k for k in {(r.model, r.task.dataset) for r in rs} if len({r.seed for r in rs if (r.model, r.task.dataset) == k}) < 3}
    assert few <= {('convmixer', 'cifar100')}

def test_wrong_names_of_networks():
    with pytest.raises(ReinitError, match="did you mean 'convmixer'"): waves.image_net('convmixr')
    with pytest.raises(ReinitError, match="zoo='keras'"): waves.image_net('keras:vgg11')
    with pytest.raises(ReinitError, match="no network 'vgg12'"): waves.image_net('torchvision:vgg12')

# ---------------------------------------------------------------- engine

def alone(r):
    "The obvious way: one network, autograd, torch's optimizers"
    net, x = coordinate_net(r.net, r.seed), waves.points(r).float()
    before = None
    phases = [(x, r.signal, r.lr, r.steps, r.opt), (x, r.signal, .1 * r.lr, r.settle, r.opt)]
    if r.start != 'random': phases.insert(0, (grid(r.start_lo, r.start_hi, r.start_n).points().float(), SIGNALS[r.start], r.start_lr, r.start_steps, 'adam'))
    for i, (xs, f, lr, n, opt) in enumerate(phases):
        if i == len(phases) - 2: before = coordinate_net(r.net, weights=[(m.dense.weight.detach().clone(), m.dense.bias.detach().clone()) for m in net])
        o = dict(adam=torch.optim.Adam, sgd=torch.optim.SGD)[opt](net.parameters(), lr)
        for _ in range(n): o.zero_grad(); F.mse_loss(net(xs), f(xs)).backward(); o.step()
    return before, net

@pytest.mark.parametrize('start, opt', [('random', 'adam'), ('high', 'adam'), ('dc', 'sgd')])
def test_a_portion_is_what_networks_trained_alone_are(start, opt):
    runs = [wave(k, start=start, opt=opt, watch=3., seed=s, lr=1e-3 * (1 + s), signal=Signal((.1 * (1 + s),), (2.,))) for k in ('gaussian', 'gaussian low') for s in (0, 1)]
    rows = [o[0] for o in waves.run(runs)]
    for r, row in zip(runs, rows):
        before, net = alone(r)
        p = grid(r.lo, r.hi, 512)
        x = p.points().float()
        y, g = r.signal(p.points()), net(x).detach().double()
        assert row['loss'] == pytest.approx(F.mse_loss(net(waves.points(r).float()).double(), r.signal(waves.points(r))).item(), rel=1e-3)
        assert row['error'] == pytest.approx(float(((g - y)**2).mean().sqrt() / (y**2).mean().sqrt()), rel=1e-3)
        for when, m in ((0, before), (1, net)): assert row[f'centroid{when}'] == pytest.approx(bandwidth(spectrum(m, p)).centroid[0], rel=.02)

def test_runs_that_diverge_are_refused():
    with pytest.raises(ReinitError, match='2 of 2 runs diverged, the first with lr=1000'): waves.run([wave('relu', opt='sgd', lr=1e3, seed=s) for s in range(2)])

def test_sharpness_is_that_of_the_hessian():
    r = wave('relu', probes=400)
    row = waves.run([r])[0][0]
    net = waves.train([r])[0].member(0).double()
    H = hessian(net, (waves.points(r), r.signal(waves.points(r))), F.mse_loss)
    H = (H @ torch.eye(H.shape[0], dtype=torch.float64)).numpy()
    assert row['top'] == pytest.approx(np.linalg.eigvalsh((H + H.T) / 2)[-1], rel=1e-2) and row['trace'] == pytest.approx(np.trace(H), rel=1e-6)

def test_runs_with_one_start_learn_it_once(monkeypatch):
    runs = [wave('relu', start='high', seed=s, signal=Signal((.1 * k,), (1.,))) for k in (1, 2, 3) for s in (0, 1)]
    seen, real = [], waves.pretrain
    monkeypatch.setattr(waves, 'pretrain', lambda s, *a: (seen.append(len(s)), real(s, *a))[1])
    together = [o[0] for p in waves.plan(runs) for o in waves.run(p)]
    assert seen == [2]
    one = [waves.run([r])[0][0] for p in waves.plan(runs) for r in p]
    for a, b in zip(together, one): assert a['error'] == pytest.approx(b['error'], rel=1e-3) and a['start_loss'] == pytest.approx(b['start_loss'], rel=1e-3)

@given(st.lists(st.tuples(st.sampled_from(['relu', 'gaussian', 'sine']), st.integers(1, 3), st.integers(0, 3), st.sampled_from([10, 20])), min_size=1, max_size=30, unique=True), st.integers(1, 8))
@hyp(max_examples=30, deadline=None)
def test_plans_lose_nothing_and_mix_nothing(what, size):
    runs = [waves.WaveRun(net_named(k, width=8, depth=d), seed=s, steps=n) for k, d, s, n in what]
    portions = waves.plan(runs, size)
    assert sorted(r.hash for p in portions for r in p) == sorted(r.hash for r in runs) and max(map(len, portions)) <= size
    for p in portions: assert len({(r.net.act, r.net.dims, r.steps) for r in p}) == 1

def test_what_is_stored_is_not_run_again(tmp_path, monkeypatch):
    runs = [wave(seed=s) for s in range(3)]
    first = sweep(runs[:2], Store(tmp_path), waves.WAVES, show=False, workers=1)
    seen = []
    engine = waves.WAVES._replace(run=lambda rs: (seen.append(len(rs)), waves.run(rs))[1])
    again = sweep(runs, Store(tmp_path), engine, show=False, workers=1)
    assert seen == [1] and len(again) == 3
    pd.testing.assert_series_equal(again.error[:2], first.error)

def test_image_runs_live_on_the_device_that_is_asked_for(monkeypatch):
    r, seen = waves.pictures('smoke')[0].replace(epochs=1, probes=0), []
    for m in (waves, bridge): monkeypatch.setattr(m, 'default_device', lambda: (seen.append(1), torch.device('cpu'))[1])
    here = waves.run_image(r)[0]
    assert len(seen) == 1 and here == waves.run_image(r)[0]
    bridge.run_bridge([bridged('nothing')])
    assert len(seen) >= 5      # the network, and each of two stretches

def test_image_runs_without_data_are_left_out(monkeypatch, tmp_path):
    r = waves.pictures('smoke')[0].replace(task=waves.Task('no_such_set', valid=0.))
    with pytest.raises(ReinitError, match='nothing can be run here'): sweep([r], Store(tmp_path), waves.IMAGES, show=False, workers=1)

# ---------------------------------------------------------------- images

def test_an_image_run_is_repeatable_and_says_whether_it_got_there():
    r = waves.pictures('smoke')[0].replace(epochs=4, probes=0)
    a, b = (waves.run_image(r)[0] for _ in range(2))
    assert a == b and a['reached'] == (a['train_accuracy'] == 1) and a['start_epochs'] == 0 and math.isnan(a['start_acc'])
    assert a['width0'] == a['width0_init']      # nothing was learned before the right labels

def test_starts_share_images_and_weights():
    rs = waves.pictures('smoke')[:3]
    assert len({r.seed for r in rs}) == 1 and len({r.labels for r in rs}) == 3
    rows = [waves.run_image(r.replace(epochs=1, probes=0))[0] for r in rs]
    assert len({o['width0_init'] for o in rows}) == 1 and len({o['width0'] for o in rows}) == 3

def test_quantiles_become_a_density():
    q = stats.norm.ppf(waves.LEVELS)
    d = waves.densities(pd.DataFrame([dict(model='m', labels='none', seed=0, quantiles0=' '.join(map(str, q)))]))
    assert np.allclose(d.density, stats.norm.pdf(d.gradient), rtol=.1, atol=5e-3)

# ---------------------------------------------------------------- spectra of the Hessian

def test_recorded_spectra_are_those_of_the_hessian(tmp_path):
    r = wave('relu', probes=2, density=12)
    df = sweep([r], Store(tmp_path), waves.WAVES, show=False, workers=1)
    t = waves.eigenvalues(df)
    assert t.eigenvalue.is_monotonic_decreasing and t.weight.sum() == pytest.approx(1, abs=1e-2) and t.larger.iloc[-1] == pytest.approx(1, abs=1e-2)
    net = waves.train([r])[0].member(0).double()
    H = hessian(net, (waves.points(r), r.signal(waves.points(r))), F.mse_loss)
    v = np.linalg.eigvalsh((H @ torch.eye(H.shape[0], dtype=torch.float64)).numpy())
    assert t.eigenvalue[0] == pytest.approx(v[-1], rel=1e-2) and t.eigenvalue.min() >= v[0] - 1e-2 * abs(v[-1])
    ax = waves.plot_hessians(waves.label(df), 'n', 'kind')[0]
    assert sum(len(o.get_xdata()) > 0 for o in ax.lines) == 1 and [o.get_text() for o in ax.get_legend().get_texts()] == ['relu']
    with pytest.raises(ReinitError, match='no recorded spectra'): waves.eigenvalues(df.drop(columns='nodes'))

# ---------------------------------------------------------------- bridge

def bridged(how, **kw): return next(r for r in bridge.bridges('smoke') if r.how == how).replace(**(dict(epochs=2, looked=8) | kw))

def test_frozen_fronts_stay_where_they_were():
    runs = [bridged(h) for h in bridge.HOWS]
    r = runs[0]
    train, _, c = waves.images(waves.ImageRun(r.model, r.task, n_test=10, seed=r.seed))
    fresh = waves.image_net(r.model, c, r.seed, size=train[0].shape[2], c_in=train[0].shape[1], width=r.width)
    first = bridge._fit(bridge.copy.deepcopy(fresh), train, r, seed=r.seed)
    for o in runs:
        now, net = bridge._begun(o, first, fresh, train)
        begun = {k: v.clone() for k, v in net.state_dict().items()}
        bridge._fit(net, train, o, bridge._method(o), o.seed + 1)
        same = [torch.equal(v, begun[k]) for k, v in net.named_parameters() if k.startswith(tuple(f'block{i}.' for i in range(1, o.front + 1)))]
        assert all(same) == (o.how in ('frozen', 'reservoir'))
        source = fresh if o.how == 'reservoir' else first
        if o.how in ('nothing', 'frozen', 'reservoir'): assert all(torch.equal(v, begun[k]) for k, v in source.named_parameters())
        if o.how == 'Dirac':
            other = bridge.copy.deepcopy(first)
            dirac_reset(other, o.reset)
            assert all(torch.equal(v, begun[k]) for k, v in other.named_parameters())
        if o.how == 'LW': assert all(torch.equal(v, begun[k]) for k, v in first.named_parameters()) and not torch.equal(next(now.block8.parameters()), next(first.block8.parameters()))

def test_runs_of_a_network_share_what_comes_before():
    rows = [o[0] for o in bridge.run_bridge([bridged(h) for h in ('nothing', 'Dirac')])]
    alone = bridge.run_bridge([bridged('Dirac')])[0][0]
    assert rows[1] == alone and all(rows[0][k] == rows[1][k] for k in rows[0] if k.endswith('0')) and rows[0]['width1'] != rows[1]['width1']
    assert bridge.BRIDGES.processes is False      # recipe by recipe, the first stretch would be trained again for each

@pytest.mark.parametrize('kw, words', [(dict(how='frozzen'), "did you mean 'frozen'"), (dict(rounds=0), 'rounds=0'), (dict(probes=1), 'probes=1'), (dict(reset=0.), 'reset=0'), (dict(how='LW', rounds=9, epochs=8), 'epochs=8 should be 9 or more')])
def test_wrong_bridges_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): bridge.BridgeRun(**kw)

def test_ratios_are_taken_seed_by_seed():
    rng = np.random.default_rng(0)
    df = pd.DataFrame([dict(model=m, seed=s, how=h, width1=(10.**s) * (2. if h == 'LW' else 1.) * (1 + .01 * rng.random())) for m in 'ab' for s in range(4) for h in bridge.HOWS])
    t = bridge.against(df, ['width'])
    lw = t[t.how == 'LW']
    assert len(t) == 8 and np.allclose(lw.ratio, 2, rtol=.02) and (lw.lo > 1.9).all() and (lw.hi < 2.1).all()
    assert len(bridge.plot_against(t)) == 1
    assert len(bridge.against(df[df.seed == 0], ['width'])) == 0    # one seed has no interval

# ---------------------------------------------------------------- tables

def test_order_counts_what_was_not_reached_as_last():
    t = pd.DataFrame([dict(act='relu', seed=s, frequency=float(f), step=v) for s, vs in enumerate([(1, 2, 3), (1, 2, math.nan), (math.nan,) * 3, (3, 2, 1)]) for f, v in enumerate(vs)])
    assert waves.order(t).tau.tolist() == pytest.approx([1, 1, 0, -1]) and waves.order(t).reached.tolist() == [3, 2, 0, 3]

@given(st.integers(0, 100))
@hyp(max_examples=10, deadline=None)
def test_predictors_are_spearmans(seed):
    rng = np.random.default_rng(seed)
    d = pd.DataFrame(rng.random((30, 3)), columns=['error', 'centroid0', 'top']).assign(seed=np.repeat(range(6), 5))
    t = waves.predictors(d, xs=('centroid0', 'top'), n=30).set_index('predictor')
    for k in t.index: assert t.rho[k] == pytest.approx(stats.spearmanr(d.error, d[k]).statistic)
    assert (t.lo <= t.hi).all() and t.ahead['centroid0'] == 0 and t.ahead['top'] == pytest.approx(abs(t.rho['centroid0']) - abs(t.rho['top']))

def test_ranks_within_groups_ignore_what_groups_differ_in():
    rng = np.random.default_rng(0)
    d = pd.DataFrame(rng.random((40, 3)), columns=['error', 'centroid0', 'top']).assign(seed=np.repeat(range(8), 5), what=np.tile(range(2), 20))
    far = d.assign(**{k: d[k] + 100 * d.what for k in ('error', 'centroid0', 'top')})
    a, b = (waves.predictors(o, xs=('centroid0', 'top'), n=20, within='what') for o in (d, far))
    pd.testing.assert_frame_equal(a, b)
    each = [stats.spearmanr(g.error, g.top).statistic for _, g in d.groupby('what')]
    assert a.rho[1] == pytest.approx(np.mean(each), abs=1e-6) and a.groups[0] == 8      # groups of the same size: the mean of theirs

def test_labels_tell_small_weights_apart_and_what_was_not_learned(tmp_path):
    runs = [wave('gaussian low', steps=2, settle=0, seed=s) for s in range(2)] + [wave('gaussian low', steps=2, settle=0).replace(net=net_named('gaussian low', **SMALL, sigma=.03**.5))]
    d = waves.label(sweep(runs, Store(tmp_path), waves.WAVES, show=False, workers=1))
    assert sorted(d.kind) == ['gaussian 0.17', 'gaussian low', 'gaussian low'] and np.allclose(d.left, d.loss / 17)

def test_networks_that_learned_nothing_do_not_count():
    d = pd.DataFrame([dict(kind=k, depth=n, seed=s, centroid0=1 + n * (k != 'relu') + .01 * s, error=.2 + .1 * n * (k != 'relu') + .01 * s * n, left=0.) for k in ('relu', 'gaussian', 'sine') for n in (2, 6) for s in range(4)])
    assert claims.f1(d, 'laptop').verdict == '✅'
    lost = d.assign(left=np.where((d.kind == 'sine') & (d.depth == 6), .5, 0.))
    v = claims.f1(lost, 'laptop')
    assert v.verdict == '➖' and 'sine error unknown' in v.measured and '4 of 24 runs' in v.measured

def test_curves_hold_the_signal_and_survive_the_file(tmp_path):
    from reinit_nb.core import save_results
    r = wave(curve=True)
    df = sweep([r], Store(tmp_path / 's'), waves.WAVES, show=False, workers=1)
    save_results(df, tmp_path / 'a.csv')
    for d in (df, load_results(tmp_path / 'a.csv')):
        t = waves.curves(d)
        assert np.allclose(t.target, r.signal(torch.tensor(t.x.to_numpy()))) and len(t) == 256
    with pytest.raises(ReinitError, match='no recorded curves'): waves.curves(df.drop(columns=['before', 'after']))

def test_rank_correlations_are_drawn():
    t = pd.DataFrame([dict(experiment=e, networks='all', predictor=x, rho=.5, lo=.1, hi=.8) for e in '123' for x in ('centroid0', 'top')])
    ax = waves.plot_rhos(t, ['experiment', 'networks'])
    assert [o.get_text() for o in ax.get_yticklabels()] == ['1, all', '2, all', '3, all'] and [o.get_text() for o in ax.get_legend().get_texts()] == ['centroid before', 'largest eigenvalue']

def pictured(effect=-.05, models=('m',), noise=.03):
    rng = np.random.default_rng(1)
    luck = noise * rng.normal(size=6)
    return pd.DataFrame([{'model': m, 'task.dataset': 'd', 'task.n_train': 9, 'seed': s, 'labels': k, 'reached': True, 'test_accuracy': .5 + (k == 'random') * (effect + luck[s]), 'width0': 1., 'width1': 1.} for m in models for s in range(6) for k in ('none', 'random', 'swapped')])

def test_networks_that_share_seeds_do_not_count_twice():
    one, four = (claims._contrast(claims._both(pictured(models=m), 'random', 'none', 'test_accuracy'))[0] for m in (('m',), tuple('abcd')))
    assert one['n'] == four['n'] == 6 and one['lo'] == pytest.approx(four['lo']) and one['hi'] == pytest.approx(four['hi'])

def test_networks_that_contradict_each_other_leave_f5_open():
    a, b = pictured(-.2, ('a',), .001), pictured(.05, ('b',), .001)
    assert claims.f5(a, 'laptop').verdict == '✅' and claims.f5(pd.concat([a, b]), 'laptop').verdict == '➖'

# ---------------------------------------------------------------- published

def published(name): return load_results(ROOT / f'results/waves{name}_laptop.csv')

def test_results_are_those_of_todays_recipes():
    want = {k: {r.hash for r in f('laptop')} for k, f in (waves.LISTS | dict(pictures=waves.pictures)).items()}
    assert set(published('_laws').recipe) == want.pop('laws') and set(published('_pictures').recipe) == want.pop('pictures')
    assert set(published('').recipe) == set.union(*want.values())
    assert set(published('_bridge').recipe) == {r.hash for r in bridge.bridges('laptop')}

def test_verdicts_follow_from_the_files():
    page = (ROOT / 'nbs/experiments/spectra.ipynb').read_text(encoding='utf-8')
    got, pics = published(''), published('_pictures')
    def part(f): return got[got.recipe.isin({r.hash for r in f('laptop')})]
    verdicts = [claims.f1(waves.label(part(waves.depths)), 'laptop'), claims.f2(waves.order(waves.step_table(part(waves.sequences))), 'laptop'), claims.f3(waves.label(part(waves.arms)), scale='laptop'),
                claims.f4(published('_laws'), 'laptop'), claims.f5(pics, 'laptop'), claims.f6(pics, 'laptop'), claims.f7(waves.label(part(waves.minima)), 'laptop')]
    for v in verdicts: assert f'**{v.id} {v.verdict}**' in page, f'{v.id} is {v.verdict} by results/, and the experiment shows something else: run it again'

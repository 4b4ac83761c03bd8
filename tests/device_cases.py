"""Engines and measurements that `test_devices` runs on the CPU and on the pretend device.

As a script it runs them all in one process and writes JSON: `python device_cases.py FILE [cases…]`.
Every case gets a device and returns tables or numbers; its inputs are on the CPU unless the case is about that.
"""
import inspect
import json
import os
import pkgutil
import sys
import time
import traceback
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

CASES = {}

def case(f):
    CASES[f.__name__] = f
    return f

# ---- networks and data -------------------------------------------------------------------------------------------
def small_cnn(device):
    from reinit_nb.models import model
    return model('scnn', n_out=4, c_in=1, size=8, width=.125, seed=3).to(device)

def small_mlp(device, width=6):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)

def images(n=24, classes=4):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 8, 8, generator=g), torch.arange(n) % classes

def rows_of(n=20, classes=3):
    g = torch.Generator().manual_seed(2)
    return torch.randn(n, 5, generator=g), torch.arange(n) % classes

@case
def reset_default(device):
    "The layers' own initial values: the same draw on every device, and the network stays where it was"
    from reinit_nb.init import reset
    drawn_on = []
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
        def reset_parameters(self):
            drawn_on.append(self.weight.device.type)
            self.weight.copy_(torch.rand(4, device=self.weight.device))
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), Scale(), nn.Linear(4, 6)]
    net = nn.Sequential(*layers, nn.Linear(6, 6), nn.Linear(6, 6), nn.MultiheadAttention(6, 2))
    net[5].weight = net[4].weight   # shared
    net.to(device)
    parameters = list(net.parameters())
    state = torch.get_rng_state()
    reset(net, streams=3)
    assert drawn_on == ['cpu']
    assert torch.equal(state, torch.get_rng_state())
    assert all(a is b for a, b in zip(parameters, net.parameters()))
    assert net[5].weight is net[4].weight
    return {k: v.cpu() for k, v in net.state_dict().items()}

# ---- engines -----------------------------------------------------------------------------------------------------
def _run(method='BL', epochs=4, task=None, **kw):
    from reinit_nb.path import Learn, Method, Run
    from reinit_nb.vision import Task
    learn = Learn(lr=.02, batch=16, epochs=epochs, **kw.pop('learn', {}))
    return Run('scnn', Task('digits', n_train=60, **task or {}), learn, Method(method, **kw.pop('options', {})),
               width=.125, **kw)

def _trained(run, device):
    from reinit_nb.path import train_path
    done = train_path(run, device=device)
    assert all(p.device.type == torch.device(device).type for p in done.learn.model.parameters())
    return dict(rows=done.rows, curves=done.curves)

def _path_case(method):
    def run(device): return _trained(_run(method, 4), device)
    run.__name__ = f'path_{method}'
    case(run)

for _method in ('BL', 'LW', 'WELSR', 'WELS', 'DSD', 'FC', 'KELS', 'LLF', 'RIFLE', 'restart', 'rescale', 'shrink',
                'DenseSparseDense'): _path_case(_method)

@case
def path_adam(device): return _trained(_run('LW', 4, learn=dict(opt='adamw', schedule='one_cycle')), device)

@case
def path_augmented(device):
    task = dict(crop=True, flip=True, vflip=True, shift=.2, affine=(10, 10, .1), random_blur=.5, channels=3, size=10,
                jitter=(.2, .2, .2, .1))
    return _trained(_run('BL', 2, task), device)

@case
def path_plateau(device):
    how = dict(schedule='plateau', patience=1, min_lr=.005, stop='converged', keep='best')
    return _trained(_run('LW', 8, learn=how), device)

@case
def path_bf16(device): return _trained(_run('LW', 4, learn=dict(precision='bf16', channels_last=True)), device)

@case
def path_fp16(device): return _trained(_run('LW', 4, learn=dict(precision='fp16')), device)

@case
def path_cnn_study(device):
    from reinit_nb.studies.reinit_cnn import CNNRun
    run = _run('LW')
    fields = {k: getattr(run, k) for k in ('model', 'task', 'learn', 'method', 'width')}
    return _trained(CNNRun(**fields, sigmas=(.05,), repeats=2), device)

@case
def path_transfer(device):
    from reinit_nb.path import Before, Learn, PathRun
    from reinit_nb.vision import Task
    how = Learn(lr=.02, wd=.01, batch=16, epochs=2, patience=1)
    stages = tuple((Task('digits', n_train=60, classes=c), how.replace(before=b))
                   for c, b in ((10, None), (4, Before('dirac')), (4, Before('LW')), (10, Before('shrink'))))
    return _trained(PathRun('resnet18', stages, width=.0625, keep='best', n_test=50), device)

@case
def path_resumed(device):
    "A run that is interrupted and resumed ends as one that was not"
    from tempfile import TemporaryDirectory

    from fastai.callback.core import Callback

    from reinit_nb.path import train_path
    class Interrupt(Callback):
        def after_epoch(self):
            if self.epoch == 1: raise KeyboardInterrupt
    run = _run('LW')
    with TemporaryDirectory() as folder:
        try: train_path(run, folder, cbs=[Interrupt()], device=device)
        except KeyboardInterrupt: pass
        assert list(Path(folder).glob('*.pth'))
        done = train_path(run, folder, device=device)
    plain = train_path(run, device=device)
    pd.testing.assert_frame_equal(done.rows, plain.rows)
    return dict(rows=done.rows)

@case
def path_stuck(device):
    from reinit_nb.studies.frozen_weights import CountRun, PairRun, SparseRun
    run = _run()
    fields = {k: getattr(run, k) for k in ('task', 'width')} | dict(model='allcnn', learn=run.learn.replace(epochs=2))
    fields['task'] = run.task.replace(size=12)
    found = {}
    for kind, options in ((CountRun, {}), (PairRun, dict(images=4, sigmas=())), (SparseRun, dict(kind='mutual', q=.3))):
        found |= {kind.__name__ + k: v for k, v in _trained(kind(**fields, **options), device).items()}
    return found

@case
def freezing_callbacks(device):
    from reinit_nb.freezing import FrozenLayersCallback, gradual_unfreezing
    from reinit_nb.path import learner
    from reinit_nb.prefix_cache import CachedPrefixCallback
    found = {}
    run = _run(epochs=2)
    for name, cbs in dict(front=[FrozenLayersCallback(position='front', n=2)],
                          masks=[FrozenLayersCallback(position='alternating', share=.5, seed=1)],
                          thaw=[FrozenLayersCallback(schedule=gradual_unfreezing(learner(run, device='cpu').model))],
                          cached=[FrozenLayersCallback(position='front', n=2), CachedPrefixCallback()]).items():
        learn = learner(run, cbs=cbs, device=device)
        with learn.no_logging(), learn.no_bar(): learn.fit(2)
        found[name] = [float(v) for v in learn.recorder.values[-1]]
    return found

@case
def mlps(device):
    from reinit_nb.ensemble import MLPRun, plan_mlps, run_mlps
    from reinit_nb.reinit import PAPER_METHODS
    from reinit_nb.synthetic import SyntheticTask
    task = SyntheticTask(n_train=60, n_test=40)
    found = {}
    for opt, act, batch in (('sgd', 'relu', None), ('adam', 'gelu', 16)):
        recipes = [MLPRun(m, task, s, (8, 8), act, opt=opt, momentum=.5 * (opt == 'sgd'), steps=20, batch=batch,
                          n_iter=1, l2=.001) for s in range(2) for m in PAPER_METHODS]
        for i, portion in enumerate(plan_mlps(recipes)):
            found[f'{opt}{i}'] = pd.DataFrame([row for rows in run_mlps(portion, device) for row in rows])
    return found

@case
def reservoirs(device):
    from reinit_nb.studies.freezing import ReservoirRun, plan_reservoirs, train_reservoirs
    from reinit_nb.vision import Task
    task = Task('digits', n_train=60, valid=0., normalize='none')
    found = {}
    for regularizer in ('none', 'BatchNorm', 'L1 .001', 'dropout .25'):
        base = ReservoirRun(task, n_test=50, base=8, epochs=2, looks=(1,), separate=(0, 2), regularizer=regularizer)
        recipes = [base.replace(seed=s, frozen=f) for s in range(2) for f in (0., .5, 1.)]
        for i, portion in enumerate(plan_reservoirs(recipes)):
            rows = train_reservoirs(portion, device)[1]
            found[f'{regularizer}{i}'] = pd.DataFrame([row for o in rows for row in o])
    return found

@case
def landscapes(device):
    from reinit_nb.studies.freezing import LandscapeRun, run_landscapes
    from reinit_nb.vision import Task
    os.environ['REINIT_DEVICE'] = str(device)
    run = LandscapeRun(Task('digits', n_train=60, valid=0., normalize='none'), n_test=50, base=6, epochs=1, images=20,
                       looks=(), probes=2)
    return dict(rows=pd.DataFrame([rows[0] for rows in run_landscapes([run.replace(frozen=f) for f in (0., 1.)])]))

@case
def waves(device):
    from reinit_nb.studies.spectra import plan_waves, run_waves, sequence_runs, start_runs
    os.environ['REINIT_DEVICE'] = str(device)
    found = {}
    for name, make in dict(sequence=sequence_runs, start=start_runs).items():
        portion = plan_waves(make('smoke'))[0][:4]
        found[name] = pd.DataFrame([rows[0] for rows in run_waves(portion)])
    return found

@case
def image_labels(device):
    from reinit_nb.studies.spectra import image_runs, run_image
    os.environ['REINIT_DEVICE'] = str(device)
    run = next(r for r in image_runs('smoke') if r.labels == 'random')
    return dict(row=pd.DataFrame(run_image(run.replace(epochs=1, looked=4, density=2))))

@case
def interventions(device):
    from reinit_nb.studies.interventions import intervention_runs, plan_interventions, run_interventions
    os.environ['REINIT_DEVICE'] = str(device)
    portion = [r for r in plan_interventions(intervention_runs('smoke'))[0] if r.how == 'LW']
    portion = [r.replace(epochs=2, looked=4, probes=2) for r in portion]
    return dict(rows=pd.DataFrame([rows[0] for rows in run_interventions(portion)]))

@case
def task_streams(device):
    from reinit_nb.studies.plasticity import ENTRY_ARMS, STAGE_ARMS, STREAM_ARMS, StreamRun, run_streams
    strengths = {'L2': .01, 'L2 Init': .01, 'S&P': .6, 'CBP': .02, 'ReDo': .3}
    strengths |= {arm: strengths[like] for arm, like in ENTRY_ARMS.items()}
    found = {}
    for problem, arms in dict(permuted_mnist=[*STREAM_ARMS, *ENTRY_ARMS], warm_start=STAGE_ARMS).items():
        base = StreamRun(problem, dataset='digits', tasks=2, images=60, steps=10, batch=8, hidden=(12, 8), every=5,
                         maturity=3, probe=40)
        runs = [base.replace(arm=arm, strength=strengths.get(arm, 0.), seed=s) for s in range(2) for arm in arms]
        found[problem] = pd.DataFrame([row for rows in run_streams(runs, device) for row in rows])
    return found

@case
def cnn_streams(device):
    from reinit_nb.studies.plasticity import StreamRun, run_streams
    strengths = {'plain': 0., 'L2 Init': .01, 'S&P': .6, 'CBP': .02, 'ReDo': .3, 'DASH': 0.}
    base = StreamRun('warm_start', dataset='digits', tasks=2, images=60, steps=10, batch=8, hidden=(12,), every=5,
                     maturity=3, probe=40, network='cnn')
    runs = [base.replace(arm=arm, strength=strength) for arm, strength in strengths.items()]
    return dict(rows=pd.DataFrame([row for rows in run_streams(runs, device) for row in rows]))

@case
def coordinate_stacks(device):
    from reinit_nb.coordinate_nets import SIGNALS, CoordinateNet, CoordinateStack, fit_signals
    from reinit_nb.spectrum import grid_probe
    found = {}
    for act in ('relu', 'gaussian', 'sine'):
        stack = CoordinateStack(CoordinateNet(act, .3, depth=2, width=8), [0, 1], device=device)
        probe = grid_probe(-1, 1, 32)
        record = fit_signals(stack, torch.linspace(-1, 1, 8)[:, None], SIGNALS['sine'], 20, every=10, probe=probe)
        found |= {f'{act}_loss': record.losses, f'{act}_spectra': stack.spectra(probe).query('frequency > 0'),
                  f'{act}_amplitudes': record.amplitudes([.5], SIGNALS['sine'])}
    return found

def _epochs(device, epochs=3):
    from reinit_nb.vision import Task, image_dls
    task = Task('digits', n_train=60, crop=True, flip=True, vflip=True, shift=.2, affine=(10, 10, .1), random_blur=.5,
                channels=3, size=10, jitter=(.2, .2, .2, .1))
    dls = image_dls(task, bs=4, device=device)
    return {f'{k} {e} {i} {part}': o for e in range(epochs) for k, dl in (('train', dls.train), ('valid', dls.valid))
            for i, batch in enumerate(dl) for part, o in zip('xy', batch)}

@case
def loaders(device): return _epochs(device)

@case
def loaders_of_many_images(device):
    "Images that do not fit on the device come in batches"
    from reinit_nb import vision
    fits, vision.fits_on_device = vision.fits_on_device, lambda nbytes, device: False
    try: return _epochs(device)
    finally: vision.fits_on_device = fits

# ---- measurements ------------------------------------------------------------------------------------------------
@case
def separability(device):
    from reinit_nb.separability import separability
    measures = ('least squares', 'ridge', 'softmax', 'svm', 'fisher', 'gdv')
    return dict(table=separability(small_mlp(device), rows_of(40), rows_of(30), measures=measures))

@case
def separability_images(device):
    from reinit_nb.separability import separability
    return dict(table=separability(small_cnn(device), [images(), images(12)]))

@case
def fits_on_features(device):
    from reinit_nb.path import fisher_score
    from reinit_nb.separability import Moments, fisher, fit_probe, fit_ridge, gdv
    h, y = (o.to(device) for o in rows_of(40))
    moments = Moments(5).add(h, y)
    probe = fit_probe(h, y)
    return dict(ridge=fit_ridge(moments, .1).W, fisher=fisher(moments), gdv=gdv(h, y), hits=probe.hits(h, y),
                score=fisher_score(h, y))

@case
def flatness(device):
    from reinit_nb import flatness as f
    net, data = small_mlp(device), [rows_of(20), rows_of(12)]
    return dict(loss=f.evaluate_loss(net, data), margins=f.margins(net, data), size=f.weight_size(net, data, n=10),
                noise=f.noise_curve(net, data, [.05], 2), top=f.top_eigenvalues(net, data, 2),
                trace=f.hessian_trace(net, data, 4), density=f.spectral_density(net, data, 4, 1),
                line=f.slice_1d(net, data, at=(-1, 0, 1)), plane=f.slice_2d(net, data, at=(0, 1)))

@case
def flatness_between(device):
    from reinit_nb import flatness as f
    nets = [small_mlp(d) for d in (device, 'cpu')]
    with torch.no_grad():
        for p in nets[1].parameters(): p.mul_(1.5)
    along = f.direction_between(*nets)
    return dict(line=f.slice_1d(nets[0], [rows_of(20)], along, at=(0, .5, 1)))

@case
def spectrum(device):
    from reinit_nb import spectrum as s
    net, (x, _) = small_cnn(device), images()
    line = s.line_probe(x, 3, 16)
    return dict(lines=s.model_spectrum(net, line).query('frequency > 0'),
                planes=s.model_spectrum(net, s.plane_probe(x, 2, 8)).query('fx > 0'),
                device_line=s.model_spectrum(net, s.line_probe(x.to(device), 3, 16)).query('frequency > 0'),
                gradients=s.input_gradients(net, x), width=s.gradient_width(net, x),
                amplitudes=s.model_amplitudes(net, line, [1., 2.]),
                energies=s.fourier_energies(torch.linspace(0, 1, 16, device=device).sin()),
                coefficients=s.fourier_coefficients(torch.linspace(0, 1, 16, device=device).sin(), [1.]).abs())

@case
def frozen_counts(device):
    from reinit_nb.between import set_zero, sparse_masks, sparsify, sparsity
    from reinit_nb.frozen import dead_units, frozen_pairs, frozen_totals, mutually_frozen, row_col_norms
    from reinit_nb.stability import set_pairs
    from reinit_nb.wiring import layer_readers
    net, (x, _) = small_mlp(device), rows_of()
    set_pairs(net, '0', '2', [1, 2])
    found = dict(table=mutually_frozen(net, x), totals=frozen_totals(mutually_frozen(net, x)),
                 dead=dead_units(net, x), readers=layer_readers(net, x)[['layer']].assign(n=1))
    found['norms'] = torch.cat([o.cpu() for o in row_col_norms(net[0].weight)])
    found['pairs'] = pd.DataFrame(frozen_pairs(net, x)).select_dtypes('number')
    sparsify(net, 'mutual', .5, 0, x=x)
    set_zero(net, sparse_masks(net, 'double', .3, 1))
    return found | dict(sparsity=sparsity(net))

@case
def dynamics(device):
    from reinit_nb import stability as s
    theta = torch.tensor([[.1, .2], [.5, -.1]], device=device)
    t, path = s.simulate(theta, A=torch.ones(2, device=device), time=2.)
    escapes = s.simulate_escapes(theta, lam=.1)
    return dict(t=t, path=path, escapes=escapes)

@case
def groups(device):
    from reinit_nb import stability as s
    net, (x, y) = small_mlp(device), rows_of()
    which = [[('0.weight', (0, 0)), ('2.weight', (0, 0))], [('0.weight', (1, 2)), ('2.weight', (3, 1))]]
    A, B = s.product_coefficients(net, x, which)
    H, G = s.group_hessians(net, (x, y), which)
    return dict(A=A, B=B, H=H, G=G, table=s.predict_groups(net, (x, y), which, lam=.01))

@case
def pairs(device):
    from reinit_nb import stability as s
    net, data = small_mlp(device), rows_of()
    found = dict(predicted=s.predict_pairs(net, data, '0', '2', lam=.01), norms=s.pair_norms(net, '0', '2'),
                 no_bias=s.predict_pairs(net, data, '0', '2', lam=.01, decay_all=False),
                 matrix=s.pair_matrix(net, data, '0', '2', 1))
    s.align_pairs(net, data, '0', '2', [0], rounds=2)
    return found | dict(aligned=s.pair_norms(net, '0', '2'))

@case
def tangent_kernels(device):
    from reinit_nb import coordinate_nets as c
    net, (x, y) = small_mlp(device), rows_of(8)
    targets = nn.functional.one_hot(y, 3).float()
    return dict(kernel=c.tangent_kernel(net, x, x[:3]), velocity=c.function_velocity(net, x, targets, x[:3]),
                step=c.largest_stable_step(net, x))

@case
def law(device):
    from reinit_nb import coordinate_nets as c
    from reinit_nb.spectrum import grid_probe
    net = c.coordinate_net(c.CoordinateNet('sine', .3, depth=2, width=8)).to(device)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:-1, None]
    df = c.spectral_law(net, (x, c.SIGNALS['sine'](x)), grid_probe(-1, 1, 32))
    return dict(law=df[['predicted', 'measured']][:5])

@case
def labels(device):
    from reinit_nb.coordinate_nets import fit_labels, relabel
    x, y = rows_of(20)
    found = {how: relabel(y.to(device), how) for how in ('random', 'swapped', 'constant')}
    return found | dict(fit=fit_labels(small_mlp(device), (x, y), 'random', epochs=2, bs=8))

@case
def work_and_cuts(device):
    from reinit_nb.freezing import freeze_layers, training_multiply_adds
    from reinit_nb.prefix_cache import clean_cuts, frozen_prefix
    net, (x, _) = small_mlp(device).eval(), rows_of(8)
    found = dict(work=training_multiply_adds(net, x), cuts=clean_cuts(net, x)[['parameters']])
    freeze_layers(net, ['0'])
    return found | dict(prefix=float(frozen_prefix(net, x).parameters))

@case
def penultimate(device):
    from reinit_nb.path import penultimate_features
    from reinit_nb.wiring import wiring
    net, (x, y) = small_cnn(device), images()
    features, labels_ = penultimate_features(net, [(x, y)])
    return dict(features=features, labels=labels_, channels=float(wiring(net, x[:2]).n))

# ---- recycling, interventions, health ----------------------------------------------------------------------------
def _learner(device, cbs=(), opt_func=None, net=None, n=36):
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.optimizer import Adam
    x, y = rows_of(n)
    dls = DataLoaders(*(DataLoader(list(zip(x, y)), bs=6, shuffle=False, num_workers=0) for _ in range(2)),
                      device=device)
    return Learner(dls, net or small_relu(device), CrossEntropyLossFlat(), opt_func=opt_func or Adam, cbs=cbs)

def small_relu(device):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad(): net[3].bias[[1, 4]] = -100.
    return net.to(device)

def _fitted(device, cb, epochs=2, **kw):
    learn = _learner(device, cb, **kw)
    with learn.no_logging(), learn.no_bar(): learn.fit(epochs, .01)
    assert all(p.device.type == torch.device(device).type for p in learn.model.parameters())
    return torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()])

@case
def recycled(device):
    "Every preset, with Adam of fastai and of torch"
    from functools import partial

    from fastai.optimizer import OptimWrapper

    from reinit_nb.recycle import (
        CBPCallback,
        RecycleCallback,
        ReDoCallback,
        ReGraMaCallback,
        SNRCallback,
        SWRCallback,
        least_share,
    )
    makers = dict(redo=partial(ReDoCallback, .1, 3), regrama=partial(ReGraMaCallback, .05, 3),
                  cbp=partial(CBPCallback, .1, 2), snr=partial(SNRCallback, .3, enough=2, first=3),
                  swr=partial(SWRCallback, .1, 3), swr_mean=partial(SWRCallback, .1, 3, 'saliency', fill='mean'),
                  own=partial(RecycleCallback, lambda seen, memory: seen.incoming + seen.outgoing, 2, least_share(.2)))
    found = {}
    for name, make in makers.items():
        for opt, opt_func in dict(fastai=None, torch=partial(OptimWrapper, opt=torch.optim.Adam)).items():
            cb = make()
            found[f'{name} {opt}'] = _fitted(device, cb, opt_func=opt_func)
            assert cb.log.recycled.sum() > 0, name
            found[f'{name} {opt} log'] = cb.log
    return found

@case
def recycled_and_resumed(device):
    from tempfile import TemporaryDirectory

    from fastai.callback.core import Callback

    from reinit_nb.checkpoint import CheckpointCallback
    from reinit_nb.recycle import CBPCallback
    class Interrupt(Callback):
        order = 2000
        def after_batch(self):
            if self.training and self.train_iter == 8: raise KeyboardInterrupt
    with TemporaryDirectory() as folder:
        file = Path(folder) / 'fit.pth'
        try: _fitted(device, [CBPCallback(.1, 2), CheckpointCallback(file, 2), Interrupt()])
        except KeyboardInterrupt: pass
        resumed = _fitted(device, [CBPCallback(.1, 2), CheckpointCallback(file, 2)])
    assert torch.equal(resumed, _fitted(device, CBPCallback(.1, 2)))
    return dict(resumed=resumed)

@case
def interventions_by_name(device):
    from reinit_nb.between import INTERVENTIONS, intervene
    return {name: intervene(small_cnn(device), name, 2, data=[images(12)]) for name in INTERVENTIONS}

@case
def interventions_in_fits(device):
    from reinit_nb.between import (
        DASHCallback,
        HareTortoiseCallback,
        HoldZerosCallback,
        L2InitCallback,
        remedy,
        sparse_masks,
    )
    masks = sparse_masks(small_relu(device), 'double', .3)
    cbs = dict(l2=L2InitCallback(.1), hare=HareTortoiseCallback(.8, 3), dash=DASHCallback(epochs=[2]),
               shrink=remedy('shrink', epochs=[2]), zeros=HoldZerosCallback(masks))
    return {name: _fitted(device, cb) for name, cb in cbs.items()}

@case
def health_of_a_network(device):
    from reinit_nb.health import health, trainability
    return dict(mlp=health(small_relu(device), [rows_of(20), rows_of(12)]), cnn=health(small_cnn(device), images()),
                fitted=trainability(small_relu(device), rows_of(20)[0], steps=8, seeds=2))

@case
def small_functions(device):
    "Functions of tensors, and those that look at a network's blocks"
    from reinit_nb.blocks import trace_outputs
    from reinit_nb.core import Streams
    from reinit_nb.recycle import adam_update
    from reinit_nb.reinit import rescale
    from reinit_nb.synthetic import SyntheticTask, bayes_accuracy, bayes_predict, make_synthetic
    x, y = rows_of()
    w = x.to(device)
    task = SyntheticTask(n_train=60, n_test=40)
    points = make_synthetic(task, Streams(0))[0]
    steps = torch.arange(1, 6, device=device)
    return dict(rescaled=rescale(w, 2.), adam=adam_update(w, w.square(), steps, .1, .9, .999, 1e-8),
                predicted=bayes_predict(task, points.to(device)), best=bayes_accuracy(task),
                **trace_outputs(small_mlp(device), ['0', '2'], x))

@case
def estimated_memory(device):
    "Dry runs estimate what training takes on a device: a little more than the peak"
    import pretend_device

    from reinit_nb.cli import training_memory
    from reinit_nb.models import model
    from reinit_nb.path import Learn, Run
    from reinit_nb.vision import Task
    for name, width, norm in (('scnn', .5, 'layer'), ('resnet18', .25, 'batch'), ('mobilenet', .5, 'layer')):
        run = Run(name, Task('cifar10'), Learn(batch=8, epochs=10), width=width, norm=norm)
        net = model(name, size=32, width=width, norm=norm, seed=0)
        with pretend_device.watch() as record:
            net.to(device)
            opt = torch.optim.SGD(net.parameters(), lr=.01, momentum=.9)
            for _ in range(2):
                net(torch.zeros(8, 3, 32, 32, device=device)).square().mean().backward()
                opt.step()
                opt.zero_grad()
        if torch.device(device).type != 'cpu': assert .5 < record.peak / 2**20 / training_memory([run]) < .95, name
    return dict(estimate=training_memory([run]))

@case
def watching_callbacks(device):
    "Callbacks that measure while a network trains"
    from reinit_nb.frozen import MutuallyFrozenCallback
    from reinit_nb.health import HealthCallback
    from reinit_nb.separability import SeparabilityCallback
    from reinit_nb.spectrum import SpectrumCallback, line_probe
    watch = HealthCallback(4, ranks='all', sharpness=True)
    frozen, separable = MutuallyFrozenCallback(), SeparabilityCallback()
    spectra = SpectrumCallback(line_probe(rows_of(8)[0], 2, 8), [1.])
    weights = _fitted(device, [watch, frozen, separable, spectra])
    return dict(weights=weights, health=watch.df, frozen=frozen.df, separable=separable.df, spectra=spectra.df)

@case
def compared(device):
    from reinit_nb.compare import compare
    from reinit_nb.recycle import ReDoCallback
    def make_learner(seed): return _learner(device)
    df = compare(make_learner, ReDoCallback, epochs=1, seeds=2, controls=False)
    return dict(table=df[['train_loss', 'valid_loss']])

@case
def other_measurements(device):
    from reinit_nb import flatness as f
    from reinit_nb.frozen import frozen_filters
    from reinit_nb.models import layer_table
    from reinit_nb.separability import Moments, cross_validate_ridge, merge_moments
    from reinit_nb.stability import set_pairs, track_pairs
    net, data = small_mlp(device), [rows_of(20)]
    set_pairs(net, '0', '2', [1, 2])
    h, y = (o.to(device) for o in rows_of(40))
    folds = [Moments(5).add(h[i::2], y[i::2]) for i in range(2)]
    pairs = track_pairs('0', '2')
    weights = _fitted(device, pairs, net=small_mlp(device))
    hessian = f.hessian(net, data)
    return dict(hessian=hessian @ torch.eye(hessian.shape[0], 2, device=device),
                models=f.measure_models({'a': net}, f.margins, data), layers=layer_table(small_cnn(device), 8),
                filters=frozen_filters(net, rows_of()[0]), merged=float(merge_moments(folds).n),
                ridge=cross_validate_ridge(folds), weights=weights, pairs=pairs.table())

@case
def norms_of_methods(device):
    "LW once, without training: its norm is folded into the layers, or removed"
    import copy

    from reinit_nb.fixed_norm import add_norms, fold_norms, remove_norms
    from reinit_nb.lw import LayerwiseCallback
    from reinit_nb.rounds import apply_once, block_norms, find_blocks
    net, (x, _) = small_mlp(device), rows_of()
    x = x.to(device)
    apply_once(LayerwiseCallback(n_iter=1), net, 2)
    found = dict(norms=list(block_norms(find_blocks(net)).values()), out=net(x))
    for norm in add_norms(find_blocks(net)).values(): norm.sigma.fill_(2.)
    normalized = net(x)
    folded = fold_norms(copy.deepcopy(net))
    assert torch.allclose(folded(x), normalized, atol=1e-5)
    return found | dict(folded=folded(x), removed=remove_norms(net)(x))

@case
def networks(device):
    from reinit_nb import models as m
    from reinit_nb.studies.spectra import image_net
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    found = {}
    for name in ('vgg16', 'mobilenet', 'resnet50', 'convmixer'):
        net = getattr(m, name)(n_out=3, width=.125, seed=1).to(device).eval()
        found[name] = net(x.to(device))
        found[f'{name} work'] = float(m.multiply_adds(net, 32))
        found[f'{name} blocks'] = m.block_table(net, 32)[['parameters']]
    for name in ('torchvision:resnet18', 'timm:resnet18'):
        found[name] = image_net(name, 3, 1).to(device).eval()(x.to(device))
    return found

@case
def rounds_to_a_plateau(device):
    from reinit_nb.lw import LayerwiseCallback
    learn = _learner(device)
    with learn.no_logging(), learn.no_bar(): learn.fit_rounds(2, LayerwiseCallback(n_iter=1), patience=1, lr=.01)
    return dict(weights=torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()]))

@case
def resets_in_fits(device):
    from reinit_nb.between import DiracResetCallback, SoftRescaleCallback
    found = {name: _fitted(device, cb) for name, cb in dict(rescale=SoftRescaleCallback(.1)).items()}
    learn = _learner(device, DiracResetCallback(.2), net=small_cnn(device))
    x, y = images(12)
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    learn.dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=6, num_workers=0)] * 2, device=device)
    with learn.no_logging(), learn.no_bar():
        for _ in range(2): learn.fit(1, .01)
    return found | dict(dirac=torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()]))

@case
def frozen_for_a_while(device):
    from reinit_nb.freezing import FrozenLayersCallback, freeze_out, temporarily_frozen
    from reinit_nb.path import learner
    from reinit_nb.prefix_cache import cached_prefix
    learn = learner(_run(epochs=2), device=device)
    net = learn.model
    schedule = freeze_out(net)
    with learn.no_logging(), learn.no_bar():
        learn.fit(2, cbs=FrozenLayersCallback(schedule=schedule))
        with temporarily_frozen(learn, position='front', n=2), cached_prefix(learn): learn.fit(1)
    return dict(weights=torch.cat([p.detach().cpu().flatten() for p in net.parameters()]))

@case
def speeds(device):
    "Times differ, so only what was measured is compared"
    from reinit_nb.path import fastest_precision, precision_speeds
    run = _run()
    options = dict(steps=1, repeats=1, device=device)
    best = fastest_precision(run, **options)
    assert (precision_speeds(run, **options).steps_per_second > 0).all()
    return dict(known=float(best['precision'] in ('fp32', 'bf16', 'fp16')))

@case
def other_spectra(device):
    from reinit_nb import spectrum as s
    net, (x, _) = small_cnn(device), images()
    planes = s.model_spectrum(net, s.plane_probe(x, 2, 8))
    return dict(radial=s.radial_spectrum(planes)[1:], histogram=s.gradient_histogram(net, x, bins=5, span=1.))

@case
def steps_of_recipes(device):
    from reinit_nb.path import match_steps, train_run
    from reinit_nb.recycle import recyclable
    net = small_relu(device)
    learn = train_run(match_steps(_run('LW'), 6), device=device)
    return dict(weights=torch.cat([p.detach().cpu().flatten() for p in learn.model.parameters()]),
                units=recyclable(net, rows_of()[0]).select_dtypes('number'))

@case
def engines_note_their_device(device):
    "Every kind of recipe of every study: provenance names what computed, and engines without a GPU say so"
    from reinit_nb.core import note_device, noted_device
    from reinit_nb.studies.common import all_studies, flatten_recipes
    os.environ['REINIT_DEVICE'] = str(device)
    kinds = {}
    for study in all_studies().values():
        for source in study.files.values():
            if not source.engine: continue
            missing = source.engine.missing or (lambda recipe: None)
            for recipe in flatten_recipes(source.lists('smoke', None)):
                kind = type(recipe).__name__, source.engine.run
                if kind not in kinds and not missing(recipe): kinds[kind] = source.engine, recipe
    assert len(kinds) > 10
    for (name, _), (engine, recipe) in kinds.items():
        note_device('meta')
        engine.run(engine.plan([recipe])[0])
        want = torch.device(device).type if engine.gpus else 'cpu'
        assert noted_device().type == want, f'{name}: {noted_device()} instead of {want}'
    return dict(engines=float(len(kinds)))

@case
def learners_note_their_device(device):
    "A comparison on a user's own model: the device of its DataLoaders"
    from reinit_nb.compare import Arm, run_arm
    from reinit_nb.core import note_device, noted_device
    note_device('meta')
    row = run_arm(lambda seed: _learner(device), Arm('BL'), 1, 0)
    assert noted_device().type == torch.device(device).type
    return dict(loss=row['valid_loss'])

# ---- running them ------------------------------------------------------------------------------------------------
def as_numbers(found) -> dict:
    "Return tables and tensors as lists of numbers"
    numbers = {}
    for k, v in found.items():
        if isinstance(v, pd.DataFrame):
            v = v.select_dtypes(['number', 'bool']).drop(columns=[c for c in v if 'second' in str(c)], errors='ignore')
            numbers |= {f'{k}.{c}': np.asarray(v[c], float).tolist() for c in v}
        elif isinstance(v, torch.Tensor): numbers[k] = v.detach().cpu().double().flatten().tolist()
        else: numbers[k] = np.ravel(np.asarray(v, float)).tolist()
    return numbers

def run_case(name, device, watch=None, **kw):
    os.environ.pop('REINIT_DEVICE', None)
    start = time.perf_counter()
    out = {}
    try:
        if watch is None: out['numbers'] = as_numbers(CASES[name](device))
        else:
            with watch(**kw) as record: out['numbers'] = as_numbers(CASES[name](device))
            out |= {k: dict(getattr(record, k)) for k in ('waits', 'to_device', 'to_cpu', 'float64')}
            out |= dict(peak=record.peak, largest=record.largest)
    except Exception: out['error'] = traceback.format_exc()
    return out | dict(seconds=round(time.perf_counter() - start, 2))

# Modules whose public functions see no tensor of a device; studies, claims and reports work with tables
NO_TENSORS = ('cli', 'core', 'cover', 'datasets', 'stats', 'store', 'sweep', 'timing', 'workers', 'zoo')

def measuring_modules() -> list:
    "Return the names of all modules of the library but those of `NO_TENSORS`; a new one is among them"
    import reinit_nb
    names = [o.name for o in pkgutil.iter_modules(reinit_nb.__path__) if not o.ispkg and o.name[0] != '_']
    return [name for name in names if name not in NO_TENSORS]

@contextmanager
def watch_calls(called: set):
    "Add the code of all functions of the package that are called"
    def watch(frame, event, argument):
        if event == 'call': called.add(frame.f_code)
    before = sys.getprofile()
    sys.setprofile(watch)
    try: yield
    finally: sys.setprofile(before)

def _codes(value):
    "Code of a function, or of all methods of a class"
    value = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(value): return {value.__code__}
    if not inspect.isclass(value): return set()
    members = [getattr(o, '__func__', getattr(o, 'fget', o)) for o in vars(value).values()]
    return {o.__code__ for o in members if inspect.isfunction(o)}

def not_called(called) -> list:
    "Return the public functions and classes of the measurements that no case has called, as `module.name`"
    names = []
    for short in measuring_modules():
        module = import_module(f'reinit_nb.{short}')
        public = {name: _codes(getattr(module, name)) for name in module.__all__}
        names += [f'{short}.{name}' for name, codes in public.items() if codes and not codes & called]
    return names

NEEDS_FLOAT64 = {'path_fp16'}   # torch's GradScaler takes another way only for a device that is called mps

def main(file, names):
    import warnings
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    import pretend_device
    device, found, called = str(pretend_device.register()), {}, set()
    for name in names or CASES:
        found[name] = dict(cpu=run_case(name, 'cpu'))
        with watch_calls(called):
            found[name]['device'] = run_case(name, device, pretend_device.watch,
                                             refuse_float64=name not in NEEDS_FLOAT64)
        Path(file).write_text(json.dumps(found | dict(not_called=not_called(called))))

if __name__ == '__main__': main(sys.argv[1], sys.argv[2:])

"The callbacks and the ensemble do the same: one recipe, run by fastai and by plain torch"
from functools import partial

import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from reference_loops import linears, mlp_loop
from torch import nn
from torch.utils.data import TensorDataset

from reinit_nb.baselines import METHODS
from reinit_nb.core import Streams
from reinit_nb.ensemble import MLPRun
from reinit_nb.init import draw_weights
from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.synthetic import SyntheticTask, make_synthetic


class SameDraws:
    "Draw whole layers as the ensemble does: all layers above k in one go, from below, out of one generator"
    def __init__(self, run, starts):
        self.run = run
        self.starts = iter(starts)   # the first layer that is redrawn, in each round
        self.gen = Streams(run.seed).reinit
        self.shapes = [(b, a) for a, b in zip(run.dims, run.dims[1:])]
        self.ready = {}
    def __call__(self, shape, _):
        if shape not in self.ready:   # a new round
            self.ready = {s: draw_weights(s, self.run.init, self.gen) for s in self.shapes[next(self.starts):]}
        return self.ready.pop(shape)

def callback(run):
    "The callback that does what `run` describes"
    cls = METHODS[run.method]
    if run.method == 'BL': return cls(rounds=run.rounds)
    kw = dict(seed=run.seed, opt_state=run.opt_state)
    if run.method in ('WELS', 'WELSR', 'DSD'):
        return cls(run.frac, run.scope, rounds=run.rounds, init=run.init, **kw)
    if run.method == 'FC':
        return cls(rounds=run.rounds, init=SameDraws(run, [len(run.dims) - 2] * run.rounds), **kw)
    return cls(n_iter=run.n_iter, rescale=run.rescale, normalize=run.normalize, reinit=run.redraw,
               init=SameDraws(run, run.ks), **kw)

def make_network(run, streams):
    "The network of `run`, with its initial weights"
    layers = []
    for i, (a, b) in enumerate(zip(run.dims, run.dims[1:])):
        lin = nn.Linear(a, b)
        with torch.no_grad():
            lin.weight.copy_(draw_weights((b, a), run.init, streams.init))
            lin.bias.zero_()
        layers.append(nn.Sequential(lin, nn.ReLU()) if i < len(run.dims) - 2 else lin)
    return nn.Sequential(*layers)

def by_fastai(run):
    "The trained layers of `run`, by a Learner with a callback"
    streams = Streams(run.seed)
    x, y, *_ = make_synthetic(run.task, streams)
    net = make_network(run, streams)
    dls = DataLoaders(*(DataLoader(TensorDataset(x, y), bs=len(x)) for _ in range(2)), device='cpu')
    if run.opt == 'sgd': opt = partial(OptimWrapper, opt=torch.optim.SGD, momentum=run.momentum, weight_decay=run.l2)
    else: opt = partial(OptimWrapper, opt=torch.optim.Adam)
    learn = Learner(dls, net, loss_func=CrossEntropyLossFlat(), opt_func=opt)
    with learn.no_logging():
        learn.fit(run.rounds * run.steps, run.lr, cbs=callback(run))    # one full batch is an epoch, and a step
    return [m for m in net.modules() if isinstance(m, nn.Linear)]

def by_torch(run): return linears(mlp_loop(run)[0])

def assert_same_layers(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(a.bias, b.bias, rtol=1e-4, atol=1e-6)

TASK = SyntheticTask(n_train=64, n_test=10)
OPTIMIZERS = [dict(), dict(momentum=.9), dict(momentum=.9, opt_state='keep'), dict(opt='adam', lr=.01)]
ABLATIONS = [dict(redraw=False), dict(normalize=False), dict(rescale=False), dict(redraw=False, normalize=False)]

@pytest.mark.parametrize('kw', OPTIMIZERS, ids=str)
@pytest.mark.parametrize('method', PAPER_METHODS)
def test_callback_is_the_ensemble(method, kw):
    run = MLPRun(method, TASK, seed=3, steps=4, blocks=2, n_iter=2, **kw)
    assert_same_layers(by_fastai(run), by_torch(run))

@pytest.mark.parametrize('kw', ABLATIONS, ids=str)
def test_ablations_are_the_ensembles(kw):
    run = MLPRun('LW', TASK, seed=4, steps=4, blocks=2, n_iter=1, **kw)
    assert_same_layers(by_fastai(run), by_torch(run))

def test_the_comparison_can_fail():
    run = MLPRun('WELSR', TASK, seed=3, steps=4, blocks=2, n_iter=2)
    with pytest.raises(AssertionError): assert_same_layers(by_fastai(run.replace(frac=.3)), by_torch(run))

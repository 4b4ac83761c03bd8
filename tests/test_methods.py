"The callbacks and the ensemble do the same: one recipe, run by fastai and by plain torch"
import math
from functools import partial
from itertools import combinations

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from matplotlib.colors import to_rgb
from reference_loops import linears, mlp_loop
from torch import nn
from torch.utils.data import TensorDataset

from reinit_nb.baselines import METHOD_COLORS, METHODS, label_colors
from reinit_nb.core import Streams
from reinit_nb.ensemble import MLPRun
from reinit_nb.flatness import plot_slice
from reinit_nb.init import draw_weights
from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.studies.common import ARM_COLORS, color_of
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


def lab(color):
    "CIELAB coordinates of a color, and its contrast with white"
    linear = [c / 12.92 if c <= .04045 else ((c + .055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = sum(weight * c for weight, c in zip((.2126, .7152, .0722), linear, strict=True))
    mix = ((.4124, .3576, .1805), (.2126, .7152, .0722), (.0193, .1192, .9505))
    xyz = [sum(m * c for m, c in zip(row, linear, strict=True)) for row in mix]
    x, y, z = (v / white for v, white in zip(xyz, (.9505, 1., 1.089), strict=True))
    x, y, z = (v ** (1 / 3) if v > .008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return (116 * y - 16, 500 * (x - y), 200 * (y - z)), 1.05 / (luminance + .05)


def test_every_method_and_remedy_has_a_color_of_its_own():
    remedies = ('L2', 'L2 Init', 'S&P', 'CBP', 'ReDo', 'ReGraMa', 'SNR', 'SWR', 'FIRE', 'DASH', 'dirac', 'fresh',
                'head', 'Hare & Tortoise')
    assert set(METHOD_COLORS) == {*METHODS, *remedies}
    table = {name: lab(color) for name, color in (METHOD_COLORS | ARM_COLORS).items()}
    for (a, (one, _)), (b, (two, _)) in combinations(table.items(), 2):
        assert math.dist(one, two) > 19, (a, b)
    assert min(contrast for _, contrast in table.values()) > 2.2   # readable on white


def test_arms_have_the_colors_of_their_methods():
    assert color_of('plain') == color_of('Baseline') == METHOD_COLORS['BL']
    assert color_of('full reset') == color_of('reset') == METHOD_COLORS['fresh']
    assert color_of('head reset') == METHOD_COLORS['head'] != METHOD_COLORS['FC']
    assert color_of('S&P') == METHOD_COLORS['S&P'] != METHOD_COLORS['shrink']
    assert label_colors(['LW', 'BL']) == [METHOD_COLORS['LW'], METHOD_COLORS['BL']]
    assert label_colors(['LW', 'my own']) == ['C0', 'C1']


def test_curves_of_flatness_have_the_colors_of_methods():
    df = pd.DataFrame(dict(method=['LW', 'LW', 'BL', 'BL'], t=[0, 1, 0, 1], loss=[1, 2, 1, 3]))
    colors = {line.get_label(): line.get_color() for line in plot_slice(df).lines}
    assert colors == {'LW': METHOD_COLORS['LW'], 'BL': METHOD_COLORS['BL']}
    plt.close('all')

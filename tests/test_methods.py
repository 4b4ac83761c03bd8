"The callbacks and the ensemble do the same: one recipe, run by fastai and by plain torch"
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

from reinit_nb.blocks import draw
from reinit_nb.controls import BLCallback
from reinit_nb.core import Streams
from reinit_nb.dsd import DSDCallback
from reinit_nb.ensemble import MLPRun, torch_run
from reinit_nb.fc import FCHeadCallback
from reinit_nb.lw import LayerwiseCallback
from reinit_nb.synthetic import SyntheticTask, make
from reinit_nb.wels import WELSCallback, WELSRCallback


class SameDraws:
    "An initializer for whole layers that draws as the ensemble does: all layers above k in one go, from below, out of one generator"
    def __init__(self, run): self.run, self.gen, self.ready, self.shapes = run, Streams(run.seed).reinit, {}, [(b, a) for a, b in zip(run.dims, run.dims[1:])]
    def __call__(self, shape, _):
        if shape not in self.ready: self.ready = {s: draw(s, self.run.init, self.gen) for s in self.shapes[next(self.starts):]}   # a new round
        return self.ready.pop(shape)

def callback(run):
    if run.method == 'BL': return BLCallback(rounds=run.rounds)
    kw = dict(seed=run.seed, opt_state=run.opt_state)
    if run.method in ('WELS', 'WELSR', 'DSD'):
        make = dict(WELS=WELSCallback, WELSR=WELSRCallback, DSD=DSDCallback)[run.method]
        return make(run.frac, run.scope, rounds=run.rounds, init=run.init, **kw)
    same = SameDraws(run)
    if run.method == 'FC':
        same.starts = iter([len(run.dims) - 2] * run.rounds)
        return FCHeadCallback(rounds=run.rounds, init=same, **kw)
    same.starts = iter(run.ks)
    return LayerwiseCallback(n_iter=run.n_iter, rescale=run.rescale, normalize=run.normalize, reinit=run.redraw, init=same, **kw)

def by_fastai(run):
    "The trained network of `run`, by a Learner with a callback"
    s = Streams(run.seed)
    x, y, *_ = make(run.task, s)
    net = []
    for i, (a, b) in enumerate(zip(run.dims, run.dims[1:])):
        lin = nn.Linear(a, b)
        with torch.no_grad(): lin.weight.copy_(draw((b, a), run.init, s.init)); lin.bias.zero_()
        net.append(nn.Sequential(lin, nn.ReLU()) if i < len(run.dims) - 2 else lin)
    net = nn.Sequential(*net)
    dls = DataLoaders(*(DataLoader(TensorDataset(x, y), bs=len(x)) for _ in range(2)), device='cpu')
    opt = lambda ps, lr: OptimWrapper(ps, torch.optim.SGD, lr=lr, momentum=run.momentum, weight_decay=run.l2) if run.opt == 'sgd' else OptimWrapper(ps, torch.optim.Adam, lr=lr)
    learn = Learner(dls, net, loss_func=CrossEntropyLossFlat(), opt_func=opt)
    with learn.no_logging():
        learn.fit(run.rounds * run.steps, run.lr, cbs=callback(run))    # one full batch is an epoch, and a step
    return [m for m in net.modules() if isinstance(m, nn.Linear)]

@pytest.mark.parametrize('kw', [dict(), dict(momentum=.9), dict(momentum=.9, opt_state='keep'), dict(opt='adam', lr=.01)], ids=str)
@pytest.mark.parametrize('method', ['BL', 'WELSR', 'WELS', 'DSD', 'FC', 'LW'])
def test_callback_is_the_ensemble(method, kw):
    run = MLPRun(method, SyntheticTask(n_train=64, n_test=10), seed=3, steps=4, blocks=2, n_iter=2, **kw)
    want = [m for m in torch_run(run)[0] if isinstance(m, nn.Linear)]
    for a, b in zip(by_fastai(run), want, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(a.bias, b.bias, rtol=1e-4, atol=1e-6)

@pytest.mark.parametrize('kw', [dict(redraw=False), dict(normalize=False), dict(rescale=False), dict(redraw=False, normalize=False)], ids=str)
def test_ablations_are_the_ensembles(kw):
    run = MLPRun('LW', SyntheticTask(n_train=64, n_test=10), seed=4, steps=4, blocks=2, n_iter=1, **kw)
    want = [m for m in torch_run(run)[0] if isinstance(m, nn.Linear)]
    for a, b in zip(by_fastai(run), want, strict=True): torch.testing.assert_close(a.weight, b.weight, rtol=1e-4, atol=1e-6)

def test_the_comparison_can_fail():
    run = MLPRun('WELSR', SyntheticTask(n_train=64, n_test=10), seed=3, steps=4, blocks=2, n_iter=2)
    want = [m for m in torch_run(run)[0] if isinstance(m, nn.Linear)]
    with pytest.raises(AssertionError):
        for a, b in zip(by_fastai(run.replace(frac=.3)), want): torch.testing.assert_close(a.weight, b.weight, rtol=1e-4, atol=1e-6)

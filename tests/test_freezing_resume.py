"Frozen layers, killed and resumed, equal those that were never killed, to the last bit"

import random
from functools import partial

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.optimizer import SGD, Adam, OptimWrapper, ranger
from freezing_helpers import data, err, exact, learner
from torch import nn

from reinit_nb.checkpoint import CheckpointCallback
from reinit_nb.freezing import FrozenLayersCallback, freeze_out, gradual_unfreezing
from reinit_nb.prefix_cache import CachedPrefixCallback

EPOCHS, BATCHES = 4, 6  # 24 batches in all


class Killed(BaseException):
    "No handler of fastai's catches this, so that nothing is cleaned up in the fit"


class KillAfter(Callback):
    order = 2000

    def __init__(self, batch):
        self.batch = batch

    def after_batch(self):
        if self.training and self.epoch * BATCHES + self.iter + 1 == self.batch:
            raise Killed


def make(opt, seed):
    "A small network; all that is random begins with `seed`, which must not matter after a resume"
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)]
    net = exact(nn.Sequential(*blocks, nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 3))))
    learn = learner(net, opt, data(n=96))
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)
    return learn


def fit(learn, cbs):
    with learn.no_logging():
        learn.fit(EPOCHS, 0.05, wd=0.1, cbs=cbs)


def result(learn, cb):
    "All that must be equal"
    flat = [learn.model.state_dict(), learn.opt.state_dict(), learn.recorder.values, torch.get_rng_state()]
    return flat, cb.log


def differs(a, b):
    if isinstance(a, torch.Tensor):
        return not torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(differs(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) or type(a).__name__ == 'L':
        return len(a) != len(b) or any(map(differs, a, b))
    return not (a == b or (a != a and b != b))


def schedule(name):
    net = make(SGD, 0).model
    if name == 'unfreezing':
        return gradual_unfreezing(net, 'layers')
    if name == 'freezeout':
        return freeze_out(net, 'layers', t0=0.25)
    return [(0, dict(layers='0', share=0.6)), (1, dict(layers=['0', '1'], share=0.3)), (3, None)]


OPTS = {
    'sgd': partial(SGD, mom=0.9),
    'adam': Adam,
    'torch adamw': partial(OptimWrapper, opt=torch.optim.AdamW),
    'lookahead': ranger,
}


def check(tmp_path, opt, make_cbs, kills, every):
    whole = make(opt, 0)
    cbs = make_cbs()
    fit(whole, cbs)
    want, log = result(whole, cbs[0])
    for kill in kills:
        path = tmp_path / f'{kill}'
        with pytest.raises(Killed):
            fit(make(opt, 0), [*make_cbs(), CheckpointCallback(path, every=every), KillAfter(kill)])
        resumed = make(opt, 7)
        cbs = make_cbs()
        fit(resumed, [*cbs, CheckpointCallback(path, every=every)])
        got, again = result(resumed, cbs[0])
        assert not differs(want, got), f'killed after batch {kill}'
        assert log.equals(again)
        assert all(p.requires_grad for p in resumed.model.parameters())


@pytest.mark.parametrize('name', ['unfreezing', 'freezeout', 'in parts'])
@pytest.mark.parametrize('opt', OPTS)
def test_schedules(name, opt, tmp_path):
    steps = schedule(name)
    check(tmp_path, OPTS[opt], lambda: [FrozenLayersCallback(schedule=steps)], (13, 16, 20), every=3)


@pytest.mark.parametrize('name', ['unfreezing', 'in parts'])
def test_kept_optimizer_state(name, tmp_path):
    cbs = partial(FrozenLayersCallback, schedule=schedule(name), opt_state='keep')
    check(tmp_path, Adam, lambda: [cbs()], (13, 20), every=3)


@pytest.mark.slow
def test_every_other_batch(tmp_path):
    steps = schedule('in parts')
    check(tmp_path, Adam, lambda: [FrozenLayersCallback(schedule=steps)], range(1, 24, 2), every=1)


@pytest.mark.parametrize('kw', [dict(layers='0'), dict(schedule=schedule('unfreezing'))], ids=['whole', 'unfreezing'])
def test_with_the_cache(kw, tmp_path):
    "A resumed fit begins with other weights, so that the cache must be filled again"
    check(tmp_path, Adam, lambda: [FrozenLayersCallback(**kw), CachedPrefixCallback()], (5, 14, 21), every=2)


def test_another_schedule_is_refused(tmp_path):
    first = FrozenLayersCallback(schedule=[(0, '0'), (2, None)])
    other = FrozenLayersCallback(schedule=[(0, '0'), (3, None)])
    with pytest.raises(Killed):
        fit(make(SGD, 0), [first, CheckpointCallback(tmp_path / 'run', every=1), KillAfter(9)])
    err(
        lambda: fit(make(SGD, 0), [other, CheckpointCallback(tmp_path / 'run', every=1)]),
        'schedule',
        '[0, 12]',
        '[0, 18]',
    )


def test_a_finished_fit_is_loaded(tmp_path):
    steps = schedule('unfreezing')
    learn = make(Adam, 0)
    fit(learn, [FrozenLayersCallback(schedule=steps), CheckpointCallback(tmp_path / 'run')])
    again = make(Adam, 7)
    with pytest.warns(UserWarning, match='this fit is finished'):
        fit(again, [cb := FrozenLayersCallback(schedule=steps), CheckpointCallback(tmp_path / 'run')])
    assert not differs(learn.model.state_dict(), again.model.state_dict())
    assert len(cb.log) == len(steps)
    assert all(p.requires_grad for p in again.model.parameters())

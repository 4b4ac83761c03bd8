"Small networks and data for the tests of freezing and of the prefix cache"

import copy
import random

import pytest
import torch
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from torch import nn

from reinit_nb.core import ReinitError


def err(f, *said):
    with pytest.raises(ReinitError) as e:
        f()
    for s in said:
        assert s in str(e.value), str(e.value)


def sixteenths(t):
    return (t * 16).round() / 16  # sums of their products have no rounding, so that no kernel can change a bit


def data(n=70, shape=(6,), classes=3, bs=16, shuffle=True, kind='fastai', seed=0, workers=0):
    g = torch.Generator().manual_seed(seed)
    sets = [
        list(zip(sixteenths(torch.randn(k, *shape, generator=g)), torch.randint(classes, (k,), generator=g)))
        for k in (n, n // 2)
    ]
    if kind == 'torch':
        L = torch.utils.data.DataLoader
        return DataLoaders(L(sets[0], bs, shuffle=shuffle), L(sets[1], bs))
    state = random.getstate()
    random.seed(seed)
    out = DataLoaders(DataLoader(sets[0], bs=bs, shuffle=shuffle, num_workers=workers), DataLoader(sets[1], bs=bs))
    random.setstate(state)
    return out


def small(bn=True, drop=0.0):
    torch.manual_seed(0)
    return exact(
        nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8) if bn else nn.Identity(),
            nn.ReLU(),
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.Dropout(drop),
            nn.Linear(8, 3),
        )
    )


def exact(net):
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, nn.Linear):
                m.weight.copy_(sixteenths(m.weight))
                m.bias.copy_(sixteenths(m.bias))
    return net


def learner(net, opt=SGD, d=None, **kw):
    return Learner(d or data(), net, loss_func=CrossEntropyLossFlat(), opt_func=opt, **kw).remove_cb(ProgressCallback)


def quiet_fit(learn, n=2, lr=0.1, **kw):
    with learn.no_logging():
        learn.fit(n, lr, **kw)
    return learn


def snap(net):
    return copy.deepcopy(net.state_dict())


def same(a, b):
    return {k for k in a if torch.equal(a[k], b[k])}


def under(sd, *starts):
    return {k for k in sd if k.startswith(starts)}

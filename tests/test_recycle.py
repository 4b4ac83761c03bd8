"Recycling units and weights: against plain loops written from the papers, and in cases where the answer is known"
import copy
import math
import os
import socket
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD, Adam, Lamb, OptimWrapper, QHAdam, RAdam, RMSProp, ranger
from fastcore.basics import noop
from torch import nn
from torch.nn import functional as F

from reinit_nb.between import InterveneCallback
from reinit_nb.checkpoint import CheckpointCallback
from reinit_nb.core import ReinitError, Streams
from reinit_nb.freezing import FrozenLayersCallback, freeze_layers
from reinit_nb.models import model
from reinit_nb.recycle import (
    SCORES,
    CBPCallback,
    EntrySteps,
    RecycleCallback,
    ReDoCallback,
    ReGraMaCallback,
    SNRCallback,
    SWRCallback,
    UnitActivations,
    UnitSignals,
    _adam_state,
    at_most,
    draw_module,
    find_units,
    least_share,
    over_mean,
    recyclable,
    recycle_units,
    recycle_weights,
    silence_score,
    unit_masks,
)

STEPS, BATCH, LR = 24, 16, .02
torch_adam = partial(OptimWrapper, opt=torch.optim.Adam)
torch_adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
torch_sgd = partial(OptimWrapper, opt=torch.optim.SGD)

def mlp(seed=0, hidden=(12, 10), act=nn.ReLU):
    torch.manual_seed(seed)
    widths = (6, *hidden)
    layers = [o for a, b in zip(widths, widths[1:]) for o in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 3))

def batches(n=STEPS, shape=(6,), seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(BATCH, *shape, generator=g), torch.randint(3, (BATCH,), generator=g)) for _ in range(n)]

def learner(net, data, opt_func=Adam, cbs=()):
    items = [(x, y) for xb, yb in data for x, y in zip(xb, yb)]
    dls = DataLoaders(*(DataLoader(items, bs=BATCH, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')
    learn = Learner(dls, net, CrossEntropyLossFlat(), opt_func=opt_func, cbs=cbs).remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def fit(net, cb, data=None, opt_func=Adam, epochs=1, lr=LR):
    learn = learner(net, data or batches(), opt_func)
    learn.fit(epochs, lr, wd=0., cbs=cb)
    return learn

def state_of(net): return {k: v.clone() for k, v in net.state_dict().items()}

def kill_units(net, layer, units):
    "Units that are never positive"
    with torch.no_grad(): net[layer].bias[units] = -100.

# ---------------------------------------------------------------- a plain loop

class PlainAdam:
    "Adam in which each entry counts its own steps"
    def __init__(self, params, beta1, beta2, eps):
        self.params, self.settings = params, (beta1, beta2, eps)
        self.m, self.v, self.t = ([torch.zeros_like(p) for p in params] for _ in range(3))

    def step(self, lr):
        beta1, beta2, eps = self.settings
        for p, m, v, t in zip(self.params, self.m, self.v, self.t):
            t += 1
            m.mul_(beta1).add_((1 - beta1) * p.grad)
            v.mul_(beta2).add_((1 - beta2) * p.grad**2)
            p.data -= lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)

    def forget(self, p, mask):
        i = next(i for i, q in enumerate(self.params) if q is p)
        for o in (self.m[i], self.v[i], self.t[i]): o[mask] = 0

def plain_forward(net, x):
    "Outputs, and what each hidden layer passes on"
    hidden = []
    linear = [m for m in net if isinstance(m, nn.Linear)]
    for layer in linear[:-1]:
        x = layer(x).relu()
        hidden.append(x)
    return linear, linear[-1](x), hidden

def plain_replace(net, linear, k, units, seed, step, opt):
    "Reinitialize units of hidden layer `k`: incoming fresh, outgoing zero, and the optimizer forgets both"
    units = list(units)
    name = str(list(net).index(linear[k]))
    fresh = draw_module(linear[k], 'default', Streams(seed).fork(step).fork(name))
    following = linear[k + 1]
    rows, columns = torch.zeros_like(linear[k].weight, dtype=bool), torch.zeros_like(following.weight, dtype=bool)
    rows[units], columns[:, units] = True, True
    with torch.no_grad():
        linear[k].weight[units] = fresh['weight'][units]
        linear[k].bias[units] = fresh['bias'][units]
        following.weight[:, units] = 0
    ones = torch.zeros_like(linear[k].bias, dtype=bool)
    ones[units] = True
    for p, mask in ((linear[k].weight, rows), (linear[k].bias, ones), (following.weight, columns)): opt.forget(p, mask)

def plain_loop(net, data, choose, adam, lr=LR, seed=0):
    "Train, and after every step reinitialize what `choose(step, k, h, layer, next)` returns, first layer first"
    opt = PlainAdam(list(net.parameters()), *adam)
    log = []
    for step, (x, y) in enumerate(data, 1):
        linear, out, hidden = plain_forward(net, x)
        for p in net.parameters(): p.grad = None
        F.cross_entropy(out, y).backward()
        opt.step(lr)
        chosen = [choose(step, k, h.detach(), linear[k], linear[k + 1]) for k, h in enumerate(hidden)]
        for k, units in enumerate(chosen):
            if len(units): plain_replace(net, linear, k, units, seed, step, opt)
            log += [(step, k, u) for u in units]
    return log

FASTAI_ADAM, TORCH_ADAM = (.9, .99, 1e-5), (.9, .999, 1e-8)
OPTIMIZERS = [(Adam, FASTAI_ADAM), (torch_adam, TORCH_ADAM), (torch_adamw, TORCH_ADAM)]

def assert_same(a, b, tol=2e-5):
    for (n, p), q in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(p, q, atol=tol, rtol=1e-4, msg=n)

@pytest.mark.parametrize('opt_func,adam', OPTIMIZERS)
def test_redo_is_the_plain_loop(opt_func, adam):
    tau, every = .3, 5
    def choose(step, k, h, layer, following):
        if step % every: return []
        score = h.abs().mean(0)
        return [i for i in range(len(score)) if score[i] / score.mean() <= tau]
    a, b = mlp(), mlp()
    log = plain_loop(a, batches(), choose, adam)
    cb = ReDoCallback(tau, every)
    fit(b, cb, opt_func=opt_func)
    assert len(log) > 5 and cb.log.recycled.sum() == len(log)
    assert_same(a, b)

@pytest.mark.parametrize('opt_func,adam', OPTIMIZERS)
def test_regrama_is_the_plain_loop(opt_func, adam):
    tau, every = .4, 4
    def choose(step, k, h, layer, following):
        if step % every: return []
        score = layer.weight.grad.abs().mean(1)
        return [i for i in range(len(score)) if score[i] / score.mean() <= tau]
    a, b = mlp(act=nn.ReLU), mlp(act=nn.ReLU)
    log = plain_loop(a, batches(), choose, adam)
    cb = ReGraMaCallback(tau, every)
    fit(b, cb, opt_func=opt_func)
    assert len(log) > 5 and cb.log.recycled.sum() == len(log)
    assert_same(a, b)

@pytest.mark.parametrize('opt_func,adam', OPTIMIZERS)
@pytest.mark.parametrize('rho', [.02, .11])
def test_cbp_is_the_plain_loop(opt_func, adam, rho):
    maturity, eta = 6, .9
    utility, age, due = [[0.] * 12, [0.] * 10], [[0] * 12, [0] * 10], [0., 0.]
    def choose(step, k, h, layer, following):
        contribution = h.abs().mean(0) * following.weight.detach().abs().sum(0)
        for i in range(len(contribution)):
            age[k][i] += 1
            utility[k][i] = eta * utility[k][i] + (1 - eta) * float(contribution[i])
        eligible = [i for i in range(len(contribution)) if age[k][i] > maturity]
        due[k] += rho * len(eligible)
        chosen = []
        while due[k] >= 1 - 1e-9:
            worst = min((i for i in eligible if i not in chosen), key=lambda i: utility[k][i])
            chosen.append(worst)
            due[k] -= 1
        for i in chosen: utility[k][i], age[k][i] = 0., 0
        return sorted(chosen)
    a, b = mlp(), mlp()
    log = plain_loop(a, batches(40), choose, adam)
    cb = CBPCallback(rho, maturity, eta)
    fit(b, cb, batches(40), opt_func)
    assert len(log) > 8
    assert cb.log[['step', 'recycled']].groupby('step').recycled.sum().to_dict() == {
        s: sum(t == s for t, *_ in log) for s in {t for t, *_ in log}}
    assert_same(a, b)

def test_snr_is_the_plain_loop():
    eta, enough, first = .2, 4, 6
    state = {}
    def choose(step, k, h, layer, following):
        chosen = []
        for i in range(h.shape[1]):
            intervals, silence = state.get((k, i), ([], 0))
            if (h[:, i] != 0).any(): intervals, silence = [*intervals, silence + 1], 0
            else:
                silence += 1
                if len(intervals) >= enough:
                    silent_longer = sum(a >= silence for a in intervals) / len(intervals) <= eta
                else: silent_longer = silence >= first
                if silent_longer: chosen.append(i)
            state[k, i] = ([], 0) if i in chosen else (intervals, silence)
        return chosen
    def data():   # few images, so that units are often silent
        return [(x[:2], y[:2]) for x, y in batches(80)]
    a, b = mlp(), mlp()
    for net in (a, b):
        with torch.no_grad(): net[0].bias -= .8
    log = plain_loop(a, data(), choose, FASTAI_ADAM)
    items = [(x, y) for xb, yb in data() for x, y in zip(xb, yb)]
    dls = DataLoaders(*(DataLoader(items, bs=2, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')
    learn = Learner(dls, b, CrossEntropyLossFlat(), opt_func=Adam).remove_cb(ProgressCallback)
    learn.logger = noop
    cb = SNRCallback(eta, enough=enough, first=first)
    learn.fit(1, LR, wd=0., cbs=cb)
    assert len(log) > 5 and cb.log.recycled.sum() == len(log)
    assert_same(a, b)

def test_swr_is_the_plain_loop():
    a, b = mlp(), mlp()
    share, every, seed = .07, 6, 3
    opt = PlainAdam(list(a.parameters()), *FASTAI_ADAM)
    due = {}
    for step, (x, y) in enumerate(batches(), 1):
        for p in a.parameters(): p.grad = None
        F.cross_entropy(a(x), y).backward()
        opt.step(LR)
        if step % every: continue
        for i in (0, 2, 4):
            w = a[i].weight
            due[i] = due.get(i, 0.) + share * w.numel()
            n = int(due[i] + 1e-9)
            due[i] -= n
            worst = (w.detach() * w.grad).abs().flatten().argsort(stable=True)[:n]
            mask = torch.zeros(w.numel(), dtype=bool)
            mask[worst] = True
            mask = mask.view_as(w)
            fresh = draw_module(a[i], 'default', Streams(seed).fork(step).fork(str(i)))['weight']
            w.data[mask] = fresh[mask]
            opt.forget(w, mask)
    cb = SWRCallback(share, every, 'saliency', seed=seed)
    fit(b, cb)
    assert cb.log.recycled.sum() > 20
    assert_same(a, b)

@pytest.mark.parametrize('opt_func,adam', OPTIMIZERS[:2])
@pytest.mark.parametrize('rule', [dict(share=.05), dict(tau=.1), dict(share=.05, fill='mean')])
def test_swr_by_magnitude_is_the_plain_loop(opt_func, adam, rule):
    a, b = mlp(), mlp()
    every, seed = 6, 3
    opt = PlainAdam(list(a.parameters()), *adam)
    due = {}
    recycled = 0
    for step, (x, y) in enumerate(batches(), 1):
        for p in a.parameters(): p.grad = None
        F.cross_entropy(a(x), y).backward()
        opt.step(LR)
        if step % every: continue
        for i in (0, 2, 4):
            w = a[i].weight
            size = w.detach().abs()
            if 'tau' in rule: mask = size <= rule['tau'] * size.mean()
            else:
                due[i] = due.get(i, 0.) + rule['share'] * w.numel()
                n = int(due[i] + 1e-9)
                due[i] -= n
                mask = torch.zeros(w.numel(), dtype=bool)
                mask[size.flatten().argsort(stable=True)[:n]] = True
                mask = mask.view_as(w)
            fresh = draw_module(a[i], 'default', Streams(seed).fork(step).fork(str(i)))['weight']
            if rule.get('fill') == 'mean': fresh = torch.full_like(fresh, fresh.mean())
            w.data[mask] = fresh[mask]
            opt.forget(w, mask)
            recycled += int(mask.sum())
    cb = SWRCallback(every=every, seed=seed, **rule)
    fit(b, cb, opt_func=opt_func)
    assert cb.log.recycled.sum() == recycled > 20
    assert_same(a, b)

class PlainConvNet(nn.Module):
    "Two convolutions with BatchNorm, and two dense layers"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.fc1, self.fc2 = nn.Linear(5 * 4, 9), nn.Linear(9, 3)
        with torch.no_grad(): self.bn1.bias.sub_(.7), self.bn2.bias.sub_(.7)   # so that channels are often silent

    def hidden(self, x):
        "What each hidden layer passes on to the next one"
        a = self.bn1(self.conv1(x)).relu()
        b = F.max_pool2d(self.bn2(self.conv2(a)).relu(), 2)
        c = self.fc1(b.flatten(1)).relu()
        return a, b, c
    def forward(self, x): return self.fc2(self.hidden(x)[-1])

CONV_LAYERS = [('conv1', 'bn1', 'conv2'), ('conv2', 'bn2', 'fc1'), ('fc1', None, 'fc2')]

def replace_conv_units(net, opt, step, chosen):
    "Reinitialize units of three layers, first layer first; a fully connected layer reads 4 positions of a channel"
    fresh = {n: draw_module(getattr(net, n), 'default', Streams(0).fork(step).fork(n)) for n, *_ in CONV_LAYERS}
    for (name, norm, reader), units in zip(CONV_LAYERS, chosen):
        module = getattr(net, name)
        following = getattr(net, reader).weight
        for u in units:
            columns = slice(4 * u, 4 * u + 4) if name == 'conv2' else slice(u, u + 1)
            with torch.no_grad():
                module.weight[u] = fresh[name]['weight'][u]
                if not norm: module.bias[u] = fresh[name]['bias'][u]
                following[:, columns] = 0
                if norm:
                    bn = getattr(net, norm)
                    bn.weight[u], bn.bias[u], bn.running_mean[u], bn.running_var[u] = 1, 0, 0, 1
            row = torch.zeros_like(module.weight, dtype=bool)
            row[u] = True
            read = torch.zeros_like(following, dtype=bool)
            read[:, columns] = True
            vectors = [getattr(net, norm).weight, getattr(net, norm).bias] if norm else [module.bias]
            own = [(p, row.flatten(1)[:, 0]) for p in vectors]
            for p, mask in [(module.weight, row), (following, read), *own]: opt.forget(p, mask)

@pytest.mark.parametrize('opt_func,adam', OPTIMIZERS[:2])
def test_redo_in_a_convolutional_network_is_the_plain_loop(opt_func, adam):
    tau, every = .9, 5
    a, b = PlainConvNet(), PlainConvNet()
    data = batches(shape=(2, 4, 4))
    opt = PlainAdam(list(a.parameters()), *adam)
    counts = torch.zeros(3, dtype=int)
    for step, (x, y) in enumerate(data, 1):
        hidden = a.hidden(x)
        for p in a.parameters(): p.grad = None
        F.cross_entropy(a.fc2(hidden[-1]), y).backward()
        opt.step(LR)
        if step % every: continue
        seen = [h.detach().abs().mean([d for d in range(h.ndim) if d != 1]) for h in hidden]
        chosen = [(s <= tau * s.mean()).nonzero().flatten().tolist() for s in seen]
        replace_conv_units(a, opt, step, chosen)
        counts += torch.tensor([len(c) for c in chosen])
    cb = ReDoCallback(tau, every)
    fit(b, cb, data, opt_func)
    assert (counts > 0).all() and cb.log.groupby('layer', sort=False).recycled.sum().tolist() == counts.tolist()
    assert_same(a, b)
    for n, t in a.named_buffers(): torch.testing.assert_close(b.get_buffer(n), t, atol=2e-5, rtol=1e-4, msg=n)

def test_parameter_groups_with_learning_rates_of_their_own():
    "Entries count their steps in each group with its own learning rate"
    def split(net): return [list(net[0].parameters()), list(net[2:].parameters())]
    a, b = mlp(), mlp()
    lrs = [.002, .02]
    def choose(step, k, h, layer, following): return [1, 3] if step == 9 else []
    class Grouped(PlainAdam):
        def step(self, _):
            whole = self.params, self.m, self.v, self.t
            for lr, part in zip(lrs, (slice(0, 2), slice(2, None))):
                self.params, self.m, self.v, self.t = (o[part] for o in whole)
                super().step(lr)
            self.params, self.m, self.v, self.t = whole
    opt = Grouped(list(a.parameters()), *FASTAI_ADAM)
    for step, (x, y) in enumerate(batches(), 1):
        linear, out, hidden = plain_forward(a, x)
        for p in a.parameters(): p.grad = None
        F.cross_entropy(out, y).backward()
        opt.step(None)
        for k in (0, 1):
            units = choose(step, k, hidden[k], linear[k], linear[k + 1])
            if units: plain_replace(a, linear, k, units, 0, step, opt)
    cb = RecycleCallback('gradient', 9, lambda s, age, m: ((torch.arange(len(s)) == 1) | (torch.arange(len(s)) == 3))
                         & (not m.setdefault('done', []) and not m['done'].append(1)))
    items = [(x, y) for xb, yb in batches() for x, y in zip(xb, yb)]
    dls = DataLoaders(*(DataLoader(items, bs=BATCH, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')
    learn = Learner(dls, b, CrossEntropyLossFlat(), opt_func=Adam, splitter=split).remove_cb(ProgressCallback)
    learn.logger = noop
    learn.fit(1, slice(*lrs), wd=0., cbs=cb)
    assert cb.log.recycled.sum() == 4
    assert_same(a, b)

# ---------------------------------------------------------------- limits, and the presets against each other

@pytest.mark.parametrize('make', [
    partial(CBPCallback, 0.), partial(SWRCallback, 0., 1), partial(ReDoCallback, 0., 1000),
    partial(ReGraMaCallback, 0., 1000), partial(RecycleCallback, every=1, rule=lambda s, a, m: s < 0)])
def test_nothing_to_recycle_changes_nothing(make):
    a, b = mlp(act=nn.Tanh), mlp(act=nn.Tanh)
    fit(a, None)
    fit(b, make())
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))

def test_an_infinite_threshold_redraws_all_hidden_units():
    a = mlp()
    cb = ReDoCallback(math.inf, STEPS, seed=5)
    fit(a, cb)
    streams = Streams(5).fork(STEPS)
    for i in (0, 2):
        fresh = draw_module(a[i], 'default', streams.fork(str(i)))
        assert torch.equal(a[i].weight, fresh['weight']) and torch.equal(a[i].bias, fresh['bias'])
    assert (a[4].weight == 0).all() and (a[4].bias != 0).all()
    assert cb.log.recycled.tolist() == [12, 10]

def test_redo_and_regrama_agree_on_dead_units_and_only_there():
    logs = []
    for make in (ReDoCallback, ReGraMaCallback):
        net = mlp(hidden=(12,))
        kill_units(net, 0, [1, 4])
        cb = make(0., STEPS)
        fit(net, cb, opt_func=SGD)
        logs.append(cb.log)
    assert logs[0].equals(logs[1]) and logs[0].recycled.tolist() == [2]

def test_cbp_with_everything_due_is_redo_without_a_threshold():
    a, b = mlp(), mlp()
    fit(a, CBPCallback(1., 0), batches(1))
    fit(b, ReDoCallback(math.inf, 1), batches(1))
    assert_same(a, b, 0)

def test_snr_leaves_units_alone_that_always_fire():
    net = mlp(act=nn.Tanh)
    cb = SNRCallback(.99, enough=1, first=1)
    fit(net, cb)
    assert cb.log.recycled.sum() == 0

def test_silence_of_a_unit_is_compared_with_its_own():
    score, memory = silence_score(window=8, enough=3, first=100), {}
    fires = [(1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 0), (0, 0), (0, 0)]
    class Seen: pass
    found = []
    for f in fires:
        seen = Seen()
        seen.activation = torch.tensor(f, dtype=torch.float32)
        found.append(score(seen, memory).tolist())
    # the first fires every second step (intervals 1, 2, 2, 2), the second always
    assert found[7] == [1., 1.] and found[8] == [.75, 0.] and found[9] == [0., 0.]

# ---------------------------------------------------------------- the function of the network

def conv_net(norm):
    torch.manual_seed(0)
    def norm_of(c):
        return dict(batch=nn.BatchNorm2d, group=lambda c: nn.GroupNorm(c, c), none=lambda c: nn.Identity())[norm](c)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), norm_of(8), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2, padding=1),
                         norm_of(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 5), nn.LayerNorm(5),
                         nn.ReLU(), nn.Linear(5, 3))

@pytest.mark.parametrize('norm', ['batch', 'group', 'none'])
def test_recycling_dead_units_keeps_the_function(norm):
    net = conv_net(norm)
    x = torch.randn(4, 2, 4, 4)
    with torch.no_grad():
        if norm == 'none': net[0].bias[[1, 5]] = net[3].bias[[2]] = -100.
        else: net[1].bias[[1, 5]] = net[4].bias[[2]] = -100.
    net.eval()
    before, old = net(x), state_of(net)
    units = find_units(net, x)
    layers = {o.layer: o for o in units.layer_units()}
    chosen = np.zeros(units.n, bool)
    chosen[layers['0'].units[[1, 5]]] = True
    chosen[layers['3'].units[[2]]] = True
    recycle_units(net, units, chosen)
    assert torch.equal(net(x), before)
    new = state_of(net)
    assert (new['0.weight'] != old['0.weight']).flatten(1).any(1).tolist() == [i in (1, 5) for i in range(8)]
    # 6 rows in two groups: rows 0–2 read channels 0–3, rows 3–5 read 4–7
    zero = (new['3.weight'] == 0).flatten(2).all(2)
    assert zero.tolist() == [[False, True, False, False]] * 2 + [[False] * 4] + [[False, True, False, False]] * 3
    assert (new['8.weight'] == 0).all(0).nonzero().flatten().tolist() == [8, 9, 10, 11]   # 2×2 positions of channel 2
    if norm == 'batch':
        assert new['1.weight'][1] == 1 and new['1.bias'][1] == 0
        assert new['1.running_mean'][5] == 0 and new['1.running_var'][5] == 1
        assert torch.equal(new['1.num_batches_tracked'], old['1.num_batches_tracked'])
    kept = [0, 2, 3, 4, 6, 7]
    for k in ('0.weight', '0.bias', *(('1.weight', '1.bias') if norm != 'none' else ())):
        assert torch.equal(new[k][kept], old[k][kept])

def test_redo_at_zero_keeps_the_function():
    net = mlp()
    kill_units(net, 0, [2, 7])
    kill_units(net, 2, [3])
    x = batches()[-1][0]
    seen = []
    class Around(Callback):
        order = 56.5
        def after_step(self): seen.append(net(x).detach())
    class Before(Around): order = 55.5
    cb = ReDoCallback(0., STEPS)
    fit(net, [cb, Around(), Before()], opt_func=SGD, lr=.01)
    assert (cb.log.recycled >= [2, 1]).all()
    assert torch.equal(seen[-1], seen[-2])

def test_an_entry_between_two_recycled_units_is_redrawn():
    net = mlp()
    x = torch.randn(2, 6)
    units = find_units(net, x)
    first, second = units.layer_units()
    chosen = np.zeros(units.n, bool)
    chosen[[first.units[3], second.units[4]]] = True
    redrawn, zeroed = unit_masks(net, units, chosen)['2.weight']
    assert redrawn[4].all() and redrawn.sum() == 12
    assert zeroed[:, 3].sum() == 9 and not zeroed[4, 3]

def test_transposed_convolutions():
    torch.manual_seed(0)
    net = nn.Sequential(nn.ConvTranspose2d(2, 4, 2, groups=2), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, groups=2))
    x = torch.randn(2, 2, 3, 3)
    units = find_units(net, x)
    layer = units.layer_units()[0]
    chosen = np.zeros(units.n, bool)
    chosen[layer.units[2]] = True
    masks = unit_masks(net, units, chosen)
    assert masks['0.weight'][0].flatten(2).all(2).tolist() == [[False, False], [True, False]]
    assert masks['2.weight'][1].flatten(1).all(1).tolist() == [False, False, True, False]
    net(x).square().mean().backward()
    seen = UnitSignals(layer, dict(net.named_parameters()))
    w, grad = net[2].weight.detach(), net[0].weight.grad
    torch.testing.assert_close(seen.outgoing, w.abs().sum((1, 2, 3)))
    torch.testing.assert_close(seen.gradient, torch.stack([grad[i // 2, i % 2].abs().mean() for i in range(4)]))

def test_the_score_is_what_the_next_layer_reads():
    net = conv_net('batch')
    cb = RecycleCallback(lambda seen, memory: found.setdefault(seen.layer.layer, seen.activation), 1,
                         lambda s, a, m: s < 0)
    found, expected = {}, {}
    data = batches(1, (2, 4, 4))
    def keep(name): return lambda m, args, out: expected.__setitem__(name, out.detach()) if m.training else None
    for i in (2, 6, 10): net[i].register_forward_hook(keep(i))
    fit(net, cb, data)
    torch.testing.assert_close(found['0'], expected[2].abs().mean((0, 2, 3)))
    torch.testing.assert_close(found['3'], expected[6].abs().mean((0, 2, 3)))
    torch.testing.assert_close(found['8'], expected[10].abs().mean(0))

# ---------------------------------------------------------------- optimizers

def run_with(net, cb, opt_func):
    learn = fit(net, cb, opt_func=opt_func)
    opt = learn.opt
    return getattr(opt, 'opt', opt).state

@pytest.mark.parametrize('opt_func,keys', [
    (partial(SGD, mom=.9), ['grad_avg']), (Adam, ['grad_avg', 'sqr_avg']), (torch_adam, ['exp_avg', 'exp_avg_sq']),
    (partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9)), ['momentum_buffer']),
    (partial(OptimWrapper, opt=torch.optim.RMSprop), ['square_avg'])])
def test_exactly_the_entries_of_the_units_are_forgotten(opt_func, keys):
    def first(score, age, memory): return torch.arange(len(score)) == 1
    net = mlp()
    state = run_with(net, RecycleCallback('gradient', STEPS, first), opt_func)
    plain_net = mlp()
    plain = run_with(plain_net, None, opt_func)
    masks = {0: (1, None), 2: (1, 1), 4: (None, 1)}
    for p, q in zip(net.parameters(), plain_net.parameters()):
        i = next(i for i in (0, 2, 4) if p is net[i].weight or p is net[i].bias)
        row, column = masks[i]
        forgotten = torch.zeros_like(p, dtype=bool)
        if row is not None: forgotten[row] = True
        if column is not None and p.ndim == 2: forgotten[:, column] = True
        for k in keys: assert torch.equal(state[p][k], plain[q][k].masked_fill(forgotten, 0)), (i, k)

class KeepWeights(Callback):
    "Note the weights of layer 2 after each step, before and after units are recycled"
    def __init__(self, seen, order): self.seen, self.order = seen, order
    def after_step(self): self.seen.append(self.model[2].weight.detach().clone())

@pytest.mark.parametrize('opt_func,beta2', [(Adam, .99), (torch_adam, .999)])
def test_the_count_of_adam(opt_func, beta2):
    "The first step of a new entry has the size of the learning rate, as in a new network"
    steps, others = {}, {}
    for how in ('entry', 'keep', 'zero'):
        def second(score, age, memory): return torch.arange(len(score)) == 1
        cb = RecycleCallback('gradient', 100, second, layers=['0'], adam_steps=how)
        before, after = [], []
        fit(mlp(), [cb, KeepWeights(before, 50), KeepWeights(after, 70)], batches(101), opt_func, lr=1e-3)
        assert (after[-2][:, 1] == 0).all()
        steps[how] = float(after[-1][:, 1].abs().max()) / 1e-3
        others[how] = (after[-1] - after[-2])[:, [0, *range(2, 12)]]
    kept = .1 * ((1 - beta2**101) / (1 - beta2))**.5   # with β₂ = 0.999, this grows to 3.2
    assert steps == pytest.approx(dict(entry=1., keep=kept, zero=1.), rel=.02)
    assert torch.equal(others['entry'], others['keep'])
    assert not torch.equal(others['zero'], others['keep'])   # a count from zero changes the steps of all entries

def test_old_entries_need_no_correction():
    p = nn.Parameter(torch.randn(4))
    opt = torch.optim.Adam([p], lr=.1, betas=(.9, .9))
    steps = EntrySteps()
    def step():
        p.grad = torch.ones(4)
        opt.step()
        steps.correct({p: 'p'}, opt)
    step()
    steps.begin({p: 'p'}, opt, {'p': torch.tensor([True, False, False, True])})
    assert [len(t) for t in steps.entries['p']] == [2, 2]
    for _ in range(100): step()
    assert [len(t) for t in steps.entries['p']] == [0, 0]

def test_the_correction_ends_when_it_changes_a_step_by_half_a_percent():
    "460 steps after the entry began, for β₂ = 0.99: until then its steps are its own"
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    mine = torch.optim.Adam([p], lr=.1, betas=(.9, .99))
    new = torch.optim.Adam([q], lr=.1, betas=(.9, .99))
    steps = EntrySteps()
    g = torch.Generator().manual_seed(0)
    def step(opt, param, grad):
        param.grad = grad.clone()
        opt.step()
    for _ in range(1000): step(mine, p, torch.randn(2, generator=g))
    steps.begin({p: 'p'}, mine, {'p': torch.tensor([True, False])})
    for state in mine.state[p].values():
        if state.ndim: state[0] = 0
    ended = None
    for k in range(1, 600):
        before, fresh_before = p.detach().clone(), q.detach().clone()
        grad = torch.randn(2, generator=g)
        step(mine, p, grad)
        step(new, q, grad)
        steps.correct({p: 'p'}, mine)
        moved, wanted = (p.detach() - before)[0], (q.detach() - fresh_before)[0]
        torch.testing.assert_close(moved, wanted, rtol=1e-3 if ended is None else 6e-3, atol=1e-6)
        if ended is None and not steps.active: ended = k
    assert ended == math.ceil(math.log(.01) / math.log(.99))

def test_weights_of_any_memory_format():
    def trained(layout):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 3))
        return fit(net.to(memory_format=layout), SWRCallback(.1, 5), batches(shape=(2, 6, 6)), torch_adamw)
    plain, last = trained(torch.contiguous_format), trained(torch.channels_last)
    assert plain.swr.log.equals(last.swr.log) and last.swr.log.recycled.sum() > 0
    for a, b in zip(plain.model.parameters(), last.model.parameters()): torch.testing.assert_close(a, b)

@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_entries_of_any_memory_format(layout):
    p = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=layout))
    q = nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
    mask = torch.rand(4, 3, 2, 2) < .4
    for param in (p, q):
        opt, steps = torch.optim.Adam([param], lr=.1), EntrySteps()
        g = torch.Generator().manual_seed(0)
        for k in range(30):
            param.grad = torch.randn(4, 3, 2, 2, generator=g).to(
                memory_format=layout if param is p else torch.contiguous_format)
            opt.step()
            steps.correct({param: 'p'}, opt)
            if k == 10: steps.begin({param: 'p'}, opt, {'p': mask})
    torch.testing.assert_close(p, q)

def biggest_steps(make_opt, adam_steps='entry'):
    "Largest change of an entry of the first layer over the learning rate: before units are recycled, and after"
    sizes = []
    class Before(Callback):
        order = 10
        def before_step(self): self.weight = self.model[0].weight.detach().clone()
    class Corrected(Callback):
        order = 57
        def after_step(self):
            sizes.append(float((self.model[0].weight.detach() - self.learn.before.weight).abs().max()) / 1e-3)
    def second(score, age, memory): return torch.arange(len(score)) < 6
    cb = RecycleCallback('gradient', 300, second, layers=['0'], adam_steps=adam_steps)
    learn = learner(mlp(act=nn.Tanh), batches(309), make_opt)
    learn.fit(1, 1e-3, wd=0., cbs=[Before(), cb, Corrected()])
    return max(sizes[200:299]), max(sizes[300:])

@pytest.mark.parametrize('opt_func', [Adam, torch_adam])
@pytest.mark.parametrize('how', ['reset_opt', 'clear_state', 'another Learner'])
def test_an_optimizer_that_begins_again_leaves_nothing_to_correct(opt_func, how):
    cb = ReDoCallback(math.inf, 20)
    learn = fit(mlp(), cb, opt_func=opt_func)
    assert cb.entry_steps.active
    data = batches(12, seed=2)
    alone = fit(copy.deepcopy(learn.model), None, data, opt_func)
    if how == 'another Learner': fit(learn.model, cb, data, opt_func)
    else:
        learn.dls = learner(mlp(), data).dls
        if how == 'clear_state': learn.opt.clear_state()
        learn.fit(1, LR, wd=0., cbs=cb, reset_opt=how == 'reset_opt')
    assert len(cb.log) == 2 and not cb.entry_steps.active
    for k, v in alone.model.state_dict().items(): assert torch.equal(learn.model.state_dict()[k], v), k

@pytest.mark.parametrize('opt_func', [Adam, torch_adam])
def test_recycling_and_an_intervention_together(opt_func):
    cb = CBPCallback(.1, 3)
    learn = learner(mlp(), batches(), opt_func, cbs=[cb, InterveneCallback('shrink', epochs=[2])])
    learn.fit(2, LR)
    counts = {n: t for p, n in cb.names.items() for q, _, _, t, *_ in _adam_state(learn.opt, {p})}
    assert all((born <= counts[n]).all() for n, (_, born) in cb.entry_steps.entries.items())
    assert all(torch.isfinite(p).all() for p in learn.model.parameters())

def test_amsgrad_counts_by_entry():
    amsgrad = partial(OptimWrapper, opt=partial(torch.optim.Adam, amsgrad=True))
    before, after = biggest_steps(amsgrad)
    assert after < 1.1
    assert biggest_steps(amsgrad, 'keep')[1] > 2

def torch_opt(opt): return partial(OptimWrapper, opt=opt)

@pytest.mark.parametrize('opt_func,most', [
    (torch_opt(torch.optim.NAdam), 2.), (torch_opt(torch.optim.RAdam), 20.), (torch_opt(torch.optim.Adamax), 1.1),
    (torch_opt(torch.optim.Adafactor), 10.), (Lamb, 20.), (RAdam, 20.), (QHAdam, 3.), (ranger, 20.)])
def test_optimizers_that_count_steps_in_another_way_begin_again(opt_func, most):
    "The whole parameter forgets moments and count, with a warning; the others do not"
    net = mlp()
    cb = RecycleCallback('gradient', STEPS, lambda s, a, m: torch.arange(len(s)) == 1, layers=['2'])
    with pytest.warns(UserWarning, match="adam_steps='entry' is for Adam and AdamW"):
        learn = fit(net, cb, opt_func=opt_func, lr=1e-3)
    state = getattr(learn.opt, 'opt', learn.opt).state
    for p in net.parameters():
        dropped = any(p is q for q in (net[2].weight, net[2].bias, net[4].weight))
        assert dropped != any(k in state[p] for k in ('step', 'exp_avg', 'grad_avg'))
    with pytest.warns(UserWarning, match='adam_steps'): assert biggest_steps(opt_func)[1] < most

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('opt_func', [SGD, RMSProp, torch_sgd, torch_opt(torch.optim.RMSprop),
                                      torch_opt(torch.optim.Adagrad), torch_opt(torch.optim.Adadelta)])
def test_optimizers_without_bias_correction_need_none(opt_func):
    cb = RecycleCallback('gradient', 7, lambda s, a, m: torch.arange(len(s)) == 1)
    fit(mlp(), cb, opt_func=opt_func)
    assert not cb.entry_steps.active and cb.log.recycled.sum() > 0

def test_lookahead_does_not_pull_back():
    net = mlp()
    cb = RecycleCallback('gradient', 7, lambda s, a, m: torch.ones_like(s, dtype=bool))
    fit(net, cb, opt_func=ranger)
    assert torch.isfinite(torch.cat([p.flatten() for p in net.parameters()])).all() and cb.log.recycled.sum() > 0

def test_steps_are_those_of_the_optimizer():
    net = mlp()
    cb = ReDoCallback(0., 3)
    fit(net, [cb, GradientAccumulation(2 * BATCH)])
    assert cb.step == STEPS // 2

class SkipSteps(Callback):
    "Cancel some steps, as mixed precision does after an overflow"
    order = 10
    def __init__(self, when): self.when = when
    def before_step(self):
        if self.when(self.train_iter): raise CancelStepException()

@pytest.mark.parametrize('opt_func', [Adam, torch_adam])
@pytest.mark.parametrize('make', [
    lambda: RecycleCallback('gradient', 3, lambda s, a, m: torch.arange(len(s)) == 1),
    lambda: CBPCallback(.1, 2), lambda: SNRCallback(.3, enough=2, first=3), lambda: SWRCallback(.1, 4)])
def test_a_step_that_was_skipped_is_no_step(make, opt_func):
    "Training without the batches whose step is skipped ends with the same weights"
    data = batches(20)
    used = [b for i, b in enumerate(data) if i % 3 != 2]
    a, b = mlp(), mlp()
    whole, skipping = make(), make()
    fit(a, whole, used, opt_func)
    fit(b, [skipping, SkipSteps(lambda i: i % 3 == 2)], data, opt_func)
    assert whole.step == skipping.step == len(used) and whole.log.equals(skipping.log) and whole.log.recycled.sum() > 1
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))

# ---------------------------------------------------------------- what is frozen does not move

def test_frozen_parameters_do_not_move():
    for frozen, moved in (('0', ['2']), ('2', []), ('4', ['0'])):
        net = mlp()
        freeze_layers(net, [frozen])
        before = state_of(net)
        cb = ReDoCallback(math.inf, 5)
        fit(net, cb)
        assert all(torch.equal(before[k], v) for k, v in net.state_dict().items() if k.startswith(frozen + '.'))
        assert sorted(cb.log[cb.log.recycled > 0].layer.unique()) == moved

def test_a_schedule_of_freezing():
    net = mlp()
    before = state_of(net)
    cb = ReDoCallback(math.inf, 5)
    fit(net, [cb, FrozenLayersCallback(['0'])])
    assert torch.equal(before['0.weight'], net[0].weight)
    assert sorted(cb.log[cb.log.recycled > 0].layer.unique()) == ['2']

# ---------------------------------------------------------------- refusals, and a model that stays as it is

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.fc1, self.norm, self.fc2, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 3)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        return self.head((x + self.fc2(self.norm(F.gelu(self.fc1(x))))).mean(1))

def test_attention_is_refused_by_name_and_its_mlp_works():
    torch.manual_seed(0)
    net = Attention()
    before = state_of(net)
    data = batches(6, (5, 8))
    with pytest.raises(ReinitError, match='qkv cannot be recycled.*scaled_dot_product_attention'):
        fit(net, ReDoCallback(layers=['qkv']), data)
    with pytest.raises(ReinitError, match="layers='fc9' is not known; did you mean 'fc"):
        fit(net, ReDoCallback(layers=['fc9']), data)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_pre_hooks for m in net.modules())
    cb = ReDoCallback(math.inf, 6)
    fit(net, cb, data)
    assert cb.log.layer.tolist() == ['fc1'] and (net.fc2.weight == 0).all()
    table = recyclable(net, data[0][0]).set_index('layer')
    assert table.recyclable['fc1'] == 16 and table.recyclable[['qkv', 'proj']].sum() == 0
    assert 'scaled_dot_product_attention' in table.why['qkv']

class Encoder(nn.Module):
    "torch's own transformer"
    def __init__(self, act='relu', norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0., act, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
    def forward(self, x): return self.head(self.encoder(x).mean(1))

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc1, self.fc2 = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 9), nn.Linear(9, 3)
    def forward(self, x): return self.fc2(F.relu(self.fc1(self.lstm(x)[0][:, -1])))

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 10), nn.Linear(8, 10), nn.Linear(10, 3)
    def forward(self, x): return self.down(F.silu(self.gate(x)) * self.up(x)).mean(1)

def with_spectral_norm():
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3), nn.Flatten(), nn.Linear(15, 3))

@pytest.mark.parametrize('make,possible', [
    (Encoder, ['encoder.layers.0.linear1', 'encoder.layers.1.linear1']),
    (partial(Encoder, 'gelu', True), ['encoder.layers.0.linear1', 'encoder.layers.1.linear1']),
    (Recurrent, ['fc1']), (with_spectral_norm, ['2', '4']), (Gated, [])])
@pytest.mark.parametrize('preset', [partial(ReDoCallback, math.inf, 6), partial(CBPCallback, 1., 0),
                                    partial(ReGraMaCallback, math.inf, 6)])
def test_transformers_recurrent_and_computed_weights(make, possible, preset):
    "What can be followed is recycled, and nothing else; a network without such units is refused by name"
    torch.manual_seed(0)
    net, cb, data = make(), preset(), batches(6, (5, 8))
    if not possible:
        with pytest.raises(ReinitError, match='Gated has no units that can be recycled: multiplied with other'):
            fit(net, cb, data)
        return
    fit(net, cb, data)
    assert cb.log[cb.log.recycled > 0].layer.drop_duplicates().tolist() == possible
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert SWRCallback(.1, 2).plan(make() if make is not with_spectral_norm else mlp()).weights.sum() > 0

class LanguageModel(nn.Module):
    "An embedding with a residual stream, or with a head that shares its weight"
    def __init__(self, residual=True):
        super().__init__()
        self.residual = residual
        self.embed, self.fc1, self.fc2 = nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 10, bias=False)
        if not residual: self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.fc2(F.relu(self.fc1(x)))
        return self.head(input=x + y if self.residual else F.relu(y)).mean(1)

def test_what_an_embedding_writes_is_left_alone():
    tokens = torch.arange(10).view(2, 5)
    reasons = {True: 'a tensor that no layer writes is added', False: 'embed.weight is also head.weight'}
    for residual, why in reasons.items():
        for shared in (False, True):
            table = recyclable(LanguageModel(residual), tokens, shared=shared).set_index('layer')
            assert table.recyclable['fc1'] == 16 and table.recyclable['fc2'] == 0
            assert why in table.why['fc2']

class NamedArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, x): return self.fc2(input=F.relu(self.fc1(input=x)))

def test_layers_that_are_called_with_named_arguments():
    torch.manual_seed(0)
    cb = ReDoCallback(math.inf, STEPS)
    net = NamedArguments()
    fit(net, cb)
    assert cb.log.recycled.tolist() == [8] and (net.fc2.weight == 0).all()

def test_batches_count_by_their_size():
    net, x = mlp(), torch.randn(20, 6)
    watch = UnitActivations(net, find_units(net, x).layer_units())
    watch.attach()
    net(x[:4])
    net(x[4:])
    watch.detach()
    torch.testing.assert_close(watch.means()['0'], net[:2](x).abs().mean(0))

def test_a_score_that_is_not_a_number_recycles_nothing():
    assert not at_most(.1)(over_mean(torch.tensor([0., 1., math.nan])), None, {}).any()
    assert over_mean(torch.zeros(3)).tolist() == [0., 0., 0.]

def test_memory_may_hold_anything():
    def score(seen, memory):
        memory['calls'] = memory.get('calls', 0) + 1
        memory['one'] = torch.ones(())
        return seen.incoming
    cb = RecycleCallback(score, 3, least_share(.3))
    fit(mlp(), cb)
    assert cb.log.recycled.sum() > 0 and cb.memory['0']['calls'] == STEPS // 3

def test_seeds_of_a_comparison_draw_other_weights():
    from reinit_nb.compare import compare
    class Noted(ReDoCallback):
        seeds = []
        def before_fit(self):
            super().before_fit()
            Noted.seeds.append(self.seed)
    compare(lambda seed: learner(mlp(seed), batches(2)), Noted, epochs=1, seeds=2, controls=False)
    assert sorted(Noted.seeds) == [0, 1]

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
    def forward(self, x): return F.linear(x, self.weight)

def test_refusals_leave_the_model_alone():
    cases = [(nn.Sequential(Own(), nn.ReLU(), nn.Linear(6, 3)), ReGraMaCallback(every=1), 'no rule sets'),
             (nn.Sequential(nn.Linear(6, 3)), ReDoCallback(), 'no units that can be recycled'),
             (nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)), ReDoCallback(), 'does not keep zero')]
    for net, cb, says in cases:
        before = state_of(net)
        with pytest.raises(ReinitError, match=says): fit(net, cb)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert not any(m._forward_pre_hooks for m in net.modules())

@pytest.mark.parametrize('how', ['around the model', 'around a part', 'in place'])
def test_compiled_parts_are_refused(how):
    "Their activations are not seen, and units would be left out without a word"
    net = mlp()
    if how == 'around the model': net = torch.compile(net, backend='eager')
    elif how == 'around a part': net[2] = torch.compile(net[2], backend='eager')
    else: net[2].compile(backend='eager')
    with pytest.raises(ReinitError, match='a part of it is compiled'): fit(net, ReDoCallback())
    torch._dynamo.reset()

@pytest.mark.parametrize('make,says', [
    (lambda: RecycleCallback('activity'), "score='activity' is not known; did you mean 'activation'"),
    (lambda: RecycleCallback('magnitude'), "score='magnitude' is not known"),
    (lambda: RecycleCallback(what='filters'), "what='filters' is not known"),
    (lambda: RecycleCallback(rule=.1), 'rule=0.1 should be a function'),
    (lambda: RecycleCallback(every=0), 'every=0 should be a whole number >= 1'),
    (lambda: ReDoCallback(-1), 'tau=-1'), (lambda: CBPCallback(2.), 'rho=2.0'), (lambda: SNRCallback(eta=2), 'eta=2'),
    (lambda: ReDoCallback(adam_steps='no'), "adam_steps='no'"), (lambda: SWRCallback(fill='no'), "fill='no'"),
    (lambda: CBPCallback(maturity=-1), 'maturity=-1'), (lambda: CBPCallback(decay=2), 'decay=2'),
    (lambda: SWRCallback(2.), 'share=2.0'), (lambda: SWRCallback(tau=-1), 'tau=-1'),
    (lambda: SWRCallback(.5, tau=.1), 'give share or tau'), (lambda: ReDoCallback(layers=3), 'layers=3'),
    (lambda: SWRCallback(shared=True), 'shared and pairs are for'),
    (lambda: ReDoCallback(fill='mean'), "fill='mean' is for what='weights'"),
    (lambda: SNRCallback(window=8), 'window=8 should be at least enough=32'),
    (lambda: fit(mlp(), RecycleCallback('gradient', 1, lambda s, a, m: s)), 'the choice of rule for 0 is a tensor of'),
    (lambda: fit(mlp(), RecycleCallback('gradient', 1, lambda s, a, m: None)), 'the choice of rule for 0 is NoneType'),
    (lambda: fit(mlp(), RecycleCallback('gradient', 1, lambda s, a, m: s[0] > 0)), 'be a tensor of shape (12,)'),
    (lambda: fit(mlp(), RecycleCallback('magnitude', 1, lambda s, a, m: s[0] > 0, 'weights')), 'of rule for 0.weight'),
    (lambda: ReDoCallback(layers='nope').plan(mlp(), (1, 6)), "layers='nope' is not known"),
    (lambda: ReDoCallback(layers='4').plan(mlp(), (1, 6)), "the units of 4 cannot be recycled: the model's output"),
    (lambda: fit(mlp(), RecycleCallback(lambda s, m: 1., 1)), 'score returns float for 0')])
def test_wrong_arguments(make, says):
    with pytest.raises(ReinitError) as e: make()
    assert says in str(e.value)

def second_draw_fails():
    "An initializer that raises an error when it is called for the second weight of a training"
    shapes = set()
    def init(shape, generator):
        shapes.add(tuple(shape))
        if len(shapes) > 1: raise ValueError('no draw')
        return torch.randn(shape, generator=generator)
    return init

def test_pure_functions_change_nothing_when_they_fail():
    x = torch.randn(2, 6)
    units = find_units(mlp(), x)
    everything = np.ones(units.n, bool)
    calls = [(lambda net: recycle_units(net, units, everything, second_draw_fails()), 'no draw'),
             (lambda net: recycle_units(net, units, everything[:3]), 'chosen should have'),
             (lambda net: recycle_units(net, units, np.arange(units.n)), 'chosen should have'),
             (lambda net: recycle_weights(net, {n: torch.ones_like(net.get_parameter(n), dtype=bool)
                                                for n in ('0.weight', '2.weight')}, second_draw_fails()), 'no draw'),
             (lambda net: recycle_weights(net, {'0.weight': torch.ones(12, 6, dtype=bool),
                                                '2.weight': torch.ones(3, dtype=bool)}), "'2.weight'. is a tensor"),
             (lambda net: recycle_weights(net, {'9.weight': torch.ones(3, dtype=bool)}), "'9.weight' is not known")]
    for call, says in calls:
        net = mlp()
        before = state_of(net)
        with pytest.raises((ReinitError, ValueError), match=says): call(net)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()), says

def test_attention_of_torch_is_refused_with_the_reason():
    data = batches(2, (5, 8))
    for name in ('encoder.layers.0.self_attn', 'encoder.layers.1.self_attn.out_proj'):
        with pytest.raises(ReinitError, match=f'units of {name} cannot be recycled: attention cannot be followed'):
            fit(Encoder(), ReDoCallback(layers=name), data)
    with pytest.raises(ReinitError, match='Dropout is not a layer with units'):
        fit(Encoder(), ReDoCallback(layers='encoder.layers.0.dropout'), data)
    table = recyclable(Encoder(), data[0][0]).set_index('layer')
    assert table.why['encoder.layers.0.self_attn'].startswith('attention cannot be followed')

def test_a_fit_without_a_decision_warns_once():
    cb = ReDoCallback(every=1000)
    net = mlp()
    with pytest.warns(UserWarning, match=f'decided yet: {STEPS} steps of the optimizer, and every=1000') as w:
        for _ in range(2): fit(net, cb)
    assert len([o for o in w if 'decided' in str(o.message)]) == 1

def test_an_exception_in_the_model_leaves_no_hooks():
    net = mlp()
    class Stop(nn.Module):
        def forward(self, x):
            if self.training and net.count > 2: raise RuntimeError('stop')
            net.count = getattr(net, 'count', 0) + 1
            return x
    net.count = 0
    net.insert(2, Stop())
    with pytest.raises(RuntimeError, match='stop'): fit(net, CBPCallback())
    assert not any(m._forward_pre_hooks for m in net.modules())

def test_global_generators_are_not_touched():
    def after(cb):
        net = mlp()
        torch.manual_seed(1)
        np.random.seed(1)
        fit(net, cb)
        return torch.get_rng_state(), np.random.get_state()[1]
    plain = after(None)
    for make in RESUMED:
        changed = after(make())
        assert torch.equal(plain[0], changed[0]) and (plain[1] == changed[1]).all()

# ---------------------------------------------------------------- shared channels

def test_residual_streams_only_when_asked():
    net = model('resnet18', c_in=2, size=8, width=.0625, n_out=3)
    x = torch.randn(2, 2, 8, 8)
    plain, shared = recyclable(net, x), recyclable(net, x, shared=True)
    assert 0 < plain.recyclable.sum() < shared.recyclable.sum()
    assert plain[plain.recyclable == 0].why.str.contains('shared=True').any()
    assert not shared.why.str.contains('shared=True').any() and shared.why.str.contains('recycled with ').any()
    units = find_units(net, x)
    group = max(units.layer_units(True), key=lambda o: units.writers[o.units[0]])
    chosen = np.zeros(units.n, bool)
    chosen[group.units] = True
    recycle_units(net, units, chosen)
    for part, columns, _ in group.outgoing:
        w = net.get_parameter(part.weight)
        redrawn = np.append(chosen, False)[units.rows[part.weight]]
        assert (w[~torch.as_tensor(redrawn)][:, columns] == 0).all()

# ---------------------------------------------------------------- resuming

class Die(Callback):
    order = 2000
    def __init__(self, step): self.at = step
    def after_batch(self):
        if self.learn.training and self.learn.train_iter == self.at: raise KeyboardInterrupt

RESUMED = [partial(ReDoCallback, .5, 5), partial(CBPCallback, .05, 3), partial(ReGraMaCallback, .5, 5),
           partial(SNRCallback, .3, enough=2, first=3), partial(SWRCallback, .1, 4),
           partial(ReDoCallback, .5, 5, adam_steps='zero')]

@pytest.mark.parametrize('make', RESUMED)
@pytest.mark.parametrize('opt_func', [Adam, torch_adam, SGD])
def test_resumed_is_never_stopped(make, opt_func, tmp_path):
    def run(net, path, stop=None):
        cb = make()
        learn = learner(net, batches(12), opt_func)
        cbs = [cb, CheckpointCallback(path, every=5)] + ([Die(stop)] if stop else [])
        learn.fit(2, LR, cbs=cbs)
        return cb, learn
    a, b = mlp(), mlp()
    whole, learn_a = run(a, tmp_path / 'a.pth')
    with pytest.raises(KeyboardInterrupt): run(b, tmp_path / 'b.pth', 17)
    c = mlp(seed=9)   # all must come from the file
    resumed, learn_c = run(c, tmp_path / 'b.pth')
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters()))
    assert whole.log.equals(resumed.log) and whole.step == resumed.step == 24 and whole.log.recycled.sum() > 0
    for n, t in whole.ages.items(): assert torch.equal(t, resumed.ages[n])

def test_another_fit_continues():
    net = mlp()
    learn = learner(net, batches(10))
    cb = CBPCallback(.01, 3)
    learn.add_cb(cb)
    learn.fit(1, LR)
    learn.fit(1, LR)
    assert cb.step == 20 and max(int(t.max()) for t in cb.ages.values()) == 20
    assert learn.cbp is cb
    learn.remove_cb(cb)
    fit(mlp(), cb)
    assert cb.step == STEPS

def test_the_log_can_be_read_after_the_fit():
    learn = fit(mlp(), ReDoCallback(.5, 6))
    assert list(learn.redo.log.columns) == ['step', 'epoch', 'layer', 'units', 'recycled', 'redrawn', 'zeroed']
    log = learn.redo.log
    first = log[log.layer == '0']
    assert (first.redrawn == first.recycled * 7).all() and log.step.unique().tolist() == [6, 12, 18, 24]
    ax = learn.redo.plot()
    assert len(ax.lines) == 2
    assert learn.redo.plan(mlp(), (1, 6)).recyclable.tolist() == [12, 10, 0]
    assert SWRCallback().plan(mlp()).weights.tolist() == [72, 120, 30]

def test_learning_rate_finder_and_validation_do_not_count():
    import fastai.callback.schedule  # noqa: F401  adds lr_find
    net = mlp()
    cb = CBPCallback(.5, 0)
    learn = learner(net, batches(10), cbs=cb)
    before = state_of(net)
    learn.lr_find(show_plot=False, num_it=5)
    learn.validate()
    assert cb.step == 0 and all(torch.equal(v, before[k]) for k, v in net.state_dict().items())

def test_a_validation_within_a_fit_does_not_stop_it():
    class ValidateAgain(Callback):
        order, done = 90, False
        def after_epoch(self):
            if self.done: return   # `validate` has an `after_epoch` of its own
            self.done = True
            self.learn.validate()
    net = mlp()
    cb = ReDoCallback(math.inf, 5)
    learner(net, batches(10)).fit(2, LR, cbs=[cb, ValidateAgain()])
    assert cb.step == 20 and cb.log.step.unique().tolist() == [5, 10, 15, 20]

def test_scores_by_name():
    assert set(SCORES) == {'activation', 'gradient', 'contribution', 'silence', 'magnitude', 'saliency'}
    rule, memory = least_share(.3), {}
    score = torch.tensor([3., 1., 2., 0., 5.])
    assert rule(score, None, memory).tolist() == [False, False, False, True, False]   # 1.5 are due
    assert rule(score, None, memory).tolist() == [False, True, False, True, False]   # 2 are due
    assert at_most(1.)(score, None, {}).tolist() == [False, True, False, True, False]
    old = torch.tensor([9, 9, 1, 1, 9])
    assert least_share(.4, 5)(score, old, {}).tolist() == [False, True, False, False, False]

def test_deep_copies_and_pickles():
    cb = copy.deepcopy(ReDoCallback())
    assert cb.tau == .1

# ---------------------------------------------------------------- two processes

def work(rank, port, out):
    "Train one network on batches of its own"
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    found = []
    for make in RESUMED:
        cb = make()
        learn = learner(mlp(), batches(12, seed=rank))
        learn.model = nn.parallel.DistributedDataParallel(learn.model)
        learn.fit(1, LR, cbs=cb)
        found.append((learn.model.module.state_dict(), cb.log.to_dict('list'), cb.ages, cb.memory))
    net, x = mlp(), batches(1)[0][0]
    watch = UnitActivations(net, find_units(net, x).layer_units())
    watch.attach()
    if rank == 0: net(x[:4])
    else: net[:3](x[4:])   # the head, which reads the second layer, is not run here; batches differ in size
    watch.detach()
    means = watch.means(True)
    torch.testing.assert_close(means['0'], net[:2](x).abs().mean(0))
    torch.testing.assert_close(means['2'], net[:4](x[:4]).abs().mean(0))
    torch.save(found, f'{out}/rank{rank}.pt')
    dist.destroy_process_group()

@pytest.mark.slow
def test_processes_agree(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('torch was built without gloo')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    a, b = (torch.load(tmp_path / f'rank{r}.pt', weights_only=False) for r in range(2))
    for (net, log, ages, memory), (net2, log2, ages2, memory2) in zip(a, b, strict=True):
        assert log == log2 and sum(log['recycled']) > 0
        assert all(torch.equal(v, net2[k]) for k, v in net.items())
        assert all(torch.equal(v, ages2[k]) for k, v in ages.items())
        assert all(torch.equal(t, memory2[k][n]) for k, v in memory.items() for n, t in v.items())

# ---------------------------------------------------------------- other people's networks

TORCHVISION = ['resnet18', 'resnet50', 'densenet121', 'googlenet', 'squeezenet1_1',
               'mobilenet_v2', 'mobilenet_v3_small', 'shufflenet_v2_x0_5', 'mnasnet0_5', 'efficientnet_b0',
               'regnet_y_400mf', 'convnext_tiny', 'vit_b_32', 'swin_t', 'maxvit_t']
TIMM = ['resnet10t', 'resnetv2_50', 'regnetx_002', 'vit_tiny_patch16_224', 'deit_tiny_patch16_224', 'mixer_s32_224',
        'convmixer_768_32', 'cait_xxs24_224', 'poolformer_s12', 'edgenext_xx_small', 'mobilevitv2_050',
        'nf_regnet_b0', 'ghostnet_050', 'repvgg_a0', 'levit_128s', 'pvt_v2_b0', 'xcit_nano_12_p16_224',
        'hrnet_w18_small', 'dla34', 'gmlp_s16_224']

def make_network(name):
    zoo, _, name = name.partition(':')
    if zoo == 'timm': return pytest.importorskip('timm').create_model(name, num_classes=3)
    return pytest.importorskip('torchvision').models.get_model(name, weights=None, num_classes=3)

@pytest.mark.slow
@pytest.mark.parametrize('name', [f'torchvision:{n}' for n in TORCHVISION] + [f'timm:{n}' for n in TIMM])
def test_networks_of_others(name):
    "Half of the units that can be recycled, then all: only their entries change; else a refusal with a reason"
    torch.manual_seed(0)
    net = make_network(name).eval()
    before = state_of(net)
    units = find_units(net, (1, 3, 224, 224))
    layers = units.layer_units()
    table = recyclable(net, units.wiring)
    assert table.recyclable.sum() == sum(map(len, layers))
    blocked = table[(table.recyclable == 0)]
    assert (blocked.why != '').all(), blocked
    if not layers: return
    chosen = np.zeros(units.n, bool)
    for o in layers: chosen[o.units[::2]] = True
    masks = recycle_units(net, units, chosen)
    after = net.state_dict()
    for k, v in before.items():
        if k not in masks:
            assert torch.equal(v, after[k]), k
            continue
        redrawn, zeroed = masks[k]
        assert not (redrawn & zeroed).any() and (after[k][zeroed] == 0).all()
        assert torch.equal(after[k][~(redrawn | zeroed)], v[~(redrawn | zeroed)]), k
    assert all(torch.isfinite(v).all() for v in after.values() if v.is_floating_point())

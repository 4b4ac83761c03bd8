"FIRE, DASH, L2 Init, Hare and Tortoise: against independent computations"
import copy
import math
import os
import socket
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD, Adam
from fastcore.basics import noop
from torch import nn
from torch.nn import functional as F

from reinit_nb.between import (
    DASHCallback,
    DiracResetCallback,
    HareTortoiseCallback,
    InterveneCallback,
    L2InitCallback,
    SoftRescaleCallback,
    check_intervention,
    dash_reset,
    dash_shrink,
    fire_weight,
    intervene,
    nearest_orthogonal,
    pull_gradients,
    soft_rescale,
)
from reinit_nb.checkpoint import CheckpointCallback
from reinit_nb.compare import compare
from reinit_nb.core import ReinitError
from reinit_nb.freezing import freeze_layers
from reinit_nb.models import model
from reinit_nb.recycle import CBPCallback, ReDoCallback, ReGraMaCallback, SNRCallback, SWRCallback


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def batches(n=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 6, generator=g), torch.randint(3, (16,), generator=g)) for _ in range(n)]

def learner(net, opt_func=SGD, cbs=(), data=None):
    items = [(x, y) for xb, yb in data or batches() for x, y in zip(xb, yb)]
    dls = DataLoaders(*(DataLoader(items, bs=16, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')
    learn = Learner(dls, net, CrossEntropyLossFlat(), opt_func=opt_func, cbs=cbs).remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def assert_same(a, b):
    for p, q in zip(a.parameters(), b.parameters()): torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)

# ---------------------------------------------------------------- FIRE

@pytest.mark.parametrize('shape', [(7, 7), (9, 4), (4, 9), (3, 5, 6), (1, 6)])
def test_nearest_orthogonal_is_that_of_the_singular_value_decomposition(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(w, full_matrices=False)
    torch.testing.assert_close(nearest_orthogonal(w, 40), u @ v, atol=1e-9, rtol=0)
    assert (nearest_orthogonal(w, 10) - u @ v).norm() <= (nearest_orthogonal(w, 5) - u @ v).norm()

def test_fire_of_convolutions():
    w = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    new = fire_weight(w, steps=40)
    for i in range(3):
        for j in range(3):
            u, _, v = torch.linalg.svd(w[:, :, i, j], full_matrices=False)
            torch.testing.assert_close(new[:, :, i, j], u @ v * math.sqrt(6 / 4) / 9)
    grouped = fire_weight(w, groups=2, steps=40)
    u, _, v = torch.linalg.svd(w[3:, :, 1, 2], full_matrices=False)
    torch.testing.assert_close(grouped[3:, :, 1, 2], u @ v * math.sqrt(3 / 4) / 9)
    other = fire_weight(w.transpose(0, 1), steps=40, transposed=True)
    torch.testing.assert_close(other.transpose(0, 1), new)

def test_fire_leaves_biases_and_norms_alone():
    net = model('scnn', c_in=1, size=8, width=.25)
    with torch.no_grad():
        for p in net.parameters(): p.add_(.1)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    check_intervention(net, 'FIRE')
    log = intervene(net, 'FIRE').set_index('parameter')
    for n, p in net.named_parameters():
        assert torch.equal(p, before[n]) == (p.ndim == 1) == (log.changed[n] == 0), n
    again = {n: p.detach().clone() for n, p in net.named_parameters()}
    intervene(net, 'FIRE')
    net2 = mlp()
    with torch.no_grad(): net2[2].weight.zero_()
    old = net2[0].weight.detach().clone()
    with pytest.raises(ReinitError, match='2.weight is zero'): intervene(net2, 'FIRE')
    assert torch.equal(net2[0].weight, old) and again

def test_fire_before_the_second_task():
    net = mlp()
    learn = learner(net, cbs=InterveneCallback('FIRE'))
    learn.fit(1, .01)
    assert learn.intervene.log.empty
    learn.fit(1, 0.)
    s = torch.linalg.svdvals(net[0].weight.detach())
    assert s.max() / s.min() < 1.2 and learn.intervene.log.task.unique().tolist() == [2]

# ---------------------------------------------------------------- DASH

def test_dash_is_the_plain_loop():
    a, b, floor, decay = mlp(), mlp(), .1, .3
    mean = {n: torch.zeros_like(p) for n, p in a.named_parameters()}
    for x, y in batches(4):
        a.zero_grad()
        F.cross_entropy(a(x), y).backward()
        for n, p in a.named_parameters(): mean[n] = (1 - decay) * mean[n] + decay * -p.grad
    with torch.no_grad():
        for n, p in a.named_parameters():
            rows = p if p.ndim == 2 else p[None]
            directions = mean[n] if p.ndim == 2 else mean[n][None]
            for row, direction in zip(rows, directions):
                cosine = float(row @ direction / row.norm() / direction.norm())
                row *= min(1., max(floor, cosine))
    log = dash_reset(b, batches(4), floor=floor, decay=decay)
    assert_same(a, b)
    assert (log.norm_after <= log.norm_before).all() and all(p.grad is None for p in b.parameters())

def test_dash_of_a_convolution_is_by_kernel():
    w = torch.randn(3, 2, 3, 3)
    direction = torch.randn(3, 2, 3, 3)
    new = dash_shrink(w, direction, .2)
    for i in range(3):
        for j in range(2):
            cosine = F.cosine_similarity(w[i, j].flatten(), direction[i, j].flatten(), dim=0)
            torch.testing.assert_close(new[i, j], w[i, j] * cosine.clamp(.2, 1))

def test_dash_callback():
    net = mlp()
    learn = learner(net, cbs=DASHCallback(.3))
    learn.fit(1, .05)
    reference = mlp()
    reference.load_state_dict(net.state_dict())
    learn.fit(1, 0.)
    dash_reset(reference, batches(), floor=.3)
    assert_same(reference, net)
    assert learn.dash.log.task.unique().tolist() == [2]
    with pytest.raises(ReinitError, match='floor=2'): DASHCallback(2)

def test_dash_does_not_depend_on_the_size_of_the_gradient():
    "As after convergence, where gradients are tiny"
    w, direction = torch.randn(5, 7), torch.randn(5, 7)
    torch.testing.assert_close(dash_shrink(w, direction * 1e-12, .05), dash_shrink(w, direction, .05))

def test_dash_reads_a_loader_batch_by_batch_and_leaves_its_order_alone():
    class Batches:
        held = 0
        def __iter__(self):
            for x, y in batches(6):
                x = x.clone()
                refs.append(weakref.ref(x))
                Batches.held = max(Batches.held, sum(r() is not None for r in refs))
                yield x, y
    refs = []
    dash_reset(mlp(), Batches())
    assert Batches.held <= 3
    def order(cb):
        seen = []
        class Note(Callback):
            def before_batch(self):
                if self.training: seen.append(self.xb[0].clone())
        items = [(x, y) for xb, yb in batches() for x, y in zip(xb, yb)]
        dls = DataLoaders(*(DataLoader(items, bs=16, shuffle=True, num_workers=0) for _ in range(2)), device='cpu')
        dls.train.rng.seed(3)
        learn = Learner(dls, mlp(), CrossEntropyLossFlat(), opt_func=SGD, cbs=[Note(), cb]).remove_cb(ProgressCallback)
        learn.logger = noop
        learn.fit(2, .01)
        return torch.cat(seen)
    assert torch.equal(order(Callback()), order(DASHCallback(tasks=[1])))

@pytest.mark.parametrize('make', [
    partial(InterveneCallback, name, epochs=[2]) for name in ('dirac', 'shrink', 'fresh', 'FIRE', 'DASH')]
    + [partial(InterveneCallback, 'FC', epochs=[2]), partial(DASHCallback, epochs=[2]),
       partial(DiracResetCallback, .2, epochs=[2]), partial(L2InitCallback, .1), partial(HareTortoiseCallback, .5, 5),
       partial(SoftRescaleCallback, .2), partial(ReDoCallback, .5, 5), partial(ReGraMaCallback, .5, 5),
       partial(CBPCallback, .05, 3), partial(SNRCallback, .9, enough=1, first=1), partial(SWRCallback, .1, 5)])
def test_every_remedy_can_be_compared(make):
    "Each is paired with a baseline that sees the same batches, whatever it draws and looks at"
    def shuffled(seed):
        net = mlp(seed)
        with torch.no_grad(): net[0].bias -= 1.   # so that units are silent at times, which SNR needs
        learn = learner(net)
        learn.dls.train.shuffle = True
        return learn
    df = compare(shuffled, make, epochs=3, seeds=2, controls=False, fit=partial(Learner.fit, lr=.1))
    by = df.pivot(index='seed', columns='method', values='train_loss')
    assert df.steps.nunique() == 1 and (by.nunique(axis=1) == 2).all()

def test_before_epochs():
    learn = learner(mlp(), cbs=InterveneCallback('fresh', epochs=[2, 3]))
    learn.fit(3, .1)
    log = learn.intervene.log
    assert log[['task', 'epoch']].drop_duplicates().values.tolist() == [[1, 2], [1, 3]]
    with pytest.raises(ReinitError, match='tasks and epochs exclude'): InterveneCallback('FIRE', [1], epochs=[1])
    with pytest.raises(ReinitError, match='epochs=0'): InterveneCallback('FIRE', epochs=[0])

# ---------------------------------------------------------------- L2 Init

def test_l2_init_is_the_penalty():
    a, b, lam, lr = mlp(), mlp(), .05, .1
    first = [p.detach().clone() for p in a.parameters()]
    for x, y in batches():
        for p in a.parameters(): p.grad = None
        penalty = sum((p - q).square().sum() for p, q in zip(a.parameters(), first))
        (F.cross_entropy(a(x), y) + lam * penalty).backward()
        with torch.no_grad():
            for p in a.parameters(): p -= lr * p.grad
    cb = L2InitCallback(lam)
    learner(b).fit(1, lr, wd=0., cbs=cb)
    assert_same(a, b)
    assert cb.distance == pytest.approx(sum(float((p - q).square().sum()) for p, q in zip(b.parameters(), first)))

def test_the_penalty_is_clipped_with_the_loss():
    net = mlp()
    first = copy.deepcopy(net)
    learner(net, SGD, [L2InitCallback(3.), GradientClip(.1)], batches(4)).fit(1, .05, wd=0.)
    plain = copy.deepcopy(first)
    for x, y in batches(4):
        loss = F.cross_entropy(plain(x), y)
        loss = loss + 3 * sum((p - q.detach()).square().sum() for p, q in zip(plain.parameters(), first.parameters()))
        plain.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), .1)
        with torch.no_grad():
            for p in plain.parameters(): p -= .05 * p.grad
    assert_same(net, plain)

def test_l2_init_without_a_penalty_and_frozen():
    a, b = mlp(), mlp()
    learner(a, Adam).fit(1, .01)
    learner(b, Adam).fit(1, .01, cbs=L2InitCallback(0.))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    c = mlp()
    freeze_layers(c, ['0'])
    old = c[0].weight.detach().clone()
    learner(c).fit(1, .1, cbs=[L2InitCallback(1.)])
    assert torch.equal(c[0].weight, old)

def test_one_step_of_l2_init_without_fastai():
    net = mlp()
    first = {n: torch.randn_like(p) for n, p in net.named_parameters()}
    x, y = batches(1)[0]
    penalty = sum((p - first[n]).square().sum() for n, p in net.named_parameters())
    expected = torch.autograd.grad(F.cross_entropy(net(x), y) + .3 * penalty, list(net.parameters()))
    F.cross_entropy(net(x), y).backward()
    pull_gradients(net, first, .3)
    for p, g in zip(net.parameters(), expected): torch.testing.assert_close(p.grad, g)

# ---------------------------------------------------------------- soft rescaling

def test_soft_rescaling_is_the_plain_loop():
    a, b, lam, lr = mlp(), mlp(), .2, .1
    norms = [float(a[i].weight.norm()) for i in (0, 2)]
    for x, y in batches():
        for p in a.parameters(): p.grad = None
        F.cross_entropy(a(x), y).backward()
        with torch.no_grad():
            for p in a.parameters(): p -= lr * p.grad
            for i, first in zip((0, 2), norms):
                now = float(a[i].weight.norm())
                a[i].weight *= (lam * first + (1 - lam) * now) / now
    learner(b).fit(1, lr, wd=0., cbs=SoftRescaleCallback(lam))
    assert_same(a, b)

def test_limits_of_soft_rescaling():
    a, b, c = mlp(), mlp(), mlp()
    first = [c[i].weight.norm().item() for i in (0, 2)]
    learner(a).fit(1, .1)
    learner(b).fit(1, .1, cbs=SoftRescaleCallback(0.))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    learner(c).fit(1, .1, cbs=SoftRescaleCallback(1.))   # the norms stay as they are, as in LW's rescaling
    assert [c[i].weight.norm().item() for i in (0, 2)] == pytest.approx(first, rel=1e-5)
    d = mlp()
    freeze_layers(d, ['0'])
    with torch.no_grad(): d[2].weight.zero_()   # no direction: it is left alone
    old = d[0].weight.detach().clone()
    soft_rescale(d, {'2.weight': torch.tensor(1.)}, .5)
    assert (d[2].weight == 0).all()
    learner(d).fit(1, .1, cbs=SoftRescaleCallback(.5))
    assert torch.equal(d[0].weight, old) and torch.isfinite(d[2].weight).all()
    with pytest.raises(ReinitError, match='lam=2'): SoftRescaleCallback(2)

# ---------------------------------------------------------------- Hare and Tortoise

def test_hare_and_tortoise_is_the_plain_loop():
    a, b, mu, every, lr = mlp(), mlp(), .8, 5, .1
    tortoise = [p.detach().clone() for p in a.parameters()]
    for step, (x, y) in enumerate(batches(), 1):
        for p in a.parameters(): p.grad = None
        F.cross_entropy(a(x), y).backward()
        with torch.no_grad():
            for p, q in zip(a.parameters(), tortoise):
                p -= lr * p.grad
                q.copy_(mu * q + (1 - mu) * p)
                if step % every == 0: p.copy_(q)
    cb = HareTortoiseCallback(mu, every)
    learner(b).fit(1, lr, wd=0., cbs=cb)
    assert_same(a, b)
    assert cb.log.step.tolist() == [5, 10] and (cb.log.distance > 0).all()

def test_a_tortoise_that_keeps_nothing_is_the_hare():
    a, b = mlp(), mlp()
    learner(a).fit(1, .1)
    learner(b).fit(1, .1, cbs=HareTortoiseCallback(0., 1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))

def test_a_step_that_was_skipped_does_not_count():
    class Skip(Callback):
        order = 10
        def before_step(self):
            if self.train_iter % 2: raise CancelStepException()
    cb = HareTortoiseCallback(.5, 3)
    learner(mlp(), cbs=[cb, Skip()]).fit(1, .1)
    assert cb.step == 6 and cb.log.step.tolist() == [3, 6]

# ---------------------------------------------------------------- resuming

@pytest.mark.parametrize('make', [partial(L2InitCallback, .1), partial(HareTortoiseCallback, .8, 5),
                                  partial(SoftRescaleCallback, .2), partial(InterveneCallback, 'shrink', epochs=[1, 2]),
                                  partial(DASHCallback, epochs=[1, 2])])
def test_resumed_is_never_stopped(make, tmp_path):
    class Die(Callback):
        order = 2000
        def after_batch(self):
            if self.learn.training and self.learn.train_iter == 17: raise KeyboardInterrupt
    def run(net, path, *cbs):
        learner(net).fit(2, .05, cbs=[make(), CheckpointCallback(path, 5), *cbs])
        return net
    whole = run(mlp(), tmp_path / 'a.pth')
    with pytest.raises(KeyboardInterrupt): run(mlp(), tmp_path / 'b.pth', Die())
    resumed = run(mlp(9), tmp_path / 'b.pth')
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters()))

# ---------------------------------------------------------------- two processes

SHARED = [partial(InterveneCallback, 'shrink', epochs=[2]), partial(DASHCallback, epochs=[2]),
          partial(L2InitCallback, .1), partial(SoftRescaleCallback, .2), partial(HareTortoiseCallback, .8, 5)]

def work(rank, port, out):
    "Train one network on batches of its own"
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    found = []
    for make in SHARED:
        learn = learner(mlp(), data=batches(seed=rank))
        learn.model = nn.parallel.DistributedDataParallel(learn.model)
        learn.fit(2, .05, cbs=make())
        found.append(learn.model.module.state_dict())
    torch.save(found, f'{out}/rank{rank}.pt')
    dist.destroy_process_group()

@pytest.mark.slow
def test_processes_agree(tmp_path):
    "Also where each process has seen data of its own, as DASH has"
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('torch was built without gloo')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    a, b = (torch.load(tmp_path / f'rank{r}.pt') for r in range(2))
    for one, other in zip(a, b, strict=True): assert all(torch.equal(v, other[k]) for k, v in one.items())

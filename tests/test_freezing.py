"Freezing: what is frozen keeps its bits, and what is cached changes nothing"
import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD, Adam, Lookahead, OptimWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reinit_nb.core import ReinitError
from reinit_nb.freezing import (
    OPT_STATES,
    CachedPrefixCallback,
    FrozenLayersCallback,
    batch_bits,
    cached_prefix,
    cuts,
    freeze_layers,
    freeze_out,
    frozen,
    frozen_layers,
    frozen_masks,
    frozen_prefix,
    frozen_table,
    gradual_unfreezing,
    plot_plan,
    positions,
    training_work,
)
from reinit_nb.models import POSITIONS, mlp, model, reservoir_layout, reservoirs
from reinit_nb.vision import Task, dls


def err(f, *said):
    with pytest.raises(ReinitError) as e: f()
    for s in said: assert s in str(e.value), str(e.value)

def sixteenths(t): return (t * 16).round() / 16   # sums of their products have no rounding, so that no kernel can change a bit

def data(n=70, shape=(6,), classes=3, bs=16, shuffle=True, kind='fastai', seed=0, workers=0):
    g = torch.Generator().manual_seed(seed)
    sets = [list(zip(sixteenths(torch.randn(k, *shape, generator=g)), torch.randint(classes, (k,), generator=g))) for k in (n, n // 2)]
    if kind == 'torch':
        L = torch.utils.data.DataLoader
        return DataLoaders(L(sets[0], bs, shuffle=shuffle), L(sets[1], bs))
    state = random.getstate()
    random.seed(seed)
    out = DataLoaders(DataLoader(sets[0], bs=bs, shuffle=shuffle, num_workers=workers), DataLoader(sets[1], bs=bs))
    random.setstate(state)
    return out

def small(bn=True, drop=0.):
    torch.manual_seed(0)
    return exact(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if bn else nn.Identity(), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 3)))

def exact(net):
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, nn.Linear): m.weight.copy_(sixteenths(m.weight)); m.bias.copy_(sixteenths(m.bias))
    return net

def learner(net, opt=SGD, d=None, **kw):
    return Learner(d or data(), net, loss_func=CrossEntropyLossFlat(), opt_func=opt, **kw).remove_cb(ProgressCallback)

def quiet_fit(learn, n=2, lr=.1, **kw):
    with learn.no_logging(): learn.fit(n, lr, **kw)
    return learn

def snap(net): return copy.deepcopy(net.state_dict())
def same(a, b): return {k for k in a if torch.equal(a[k], b[k])}
def under(sd, *starts): return {k for k in sd if k.startswith(starts)}

opts = {'sgd': partial(SGD, mom=.9), 'adam': Adam, 'adam l2': partial(Adam, decouple_wd=False), 'torch adamw': partial(OptimWrapper, opt=torch.optim.AdamW),
        'torch sgd': partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9)), 'lookahead': lambda p, lr: Lookahead(SGD(p, lr, mom=.9), k=2)}
each_opt = pytest.mark.parametrize('opt', opts.values(), ids=opts)

# ---------------------------------------------------------------- which

@given(st.integers(1, 60), st.data())
def test_positions(K, d):
    n, p = d.draw(st.integers(1, K)), d.draw(st.sampled_from(POSITIONS))
    at = positions(K, p, n)
    assert len(set(at)) == n and at == sorted(at) and 0 <= at[0] and at[-1] < K
    if p == 'alternating': assert max(np.diff(at), default=0) - min(np.diff(at), default=0) <= 1

@pytest.mark.parametrize('R', range(1, 9))
@pytest.mark.parametrize('p', POSITIONS)
def test_positions_of_the_study(R, p):
    lay = reservoir_layout(repeats=R, position=p)
    assert tuple(positions(3 * R, p, R)) == tuple(lay['reservoir'])
    net = mlp(n_in=4, **lay)
    assert list(frozen_layers(net, position=p)) == reservoirs(net)

@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.integers(0, 1000), st.sampled_from([None, True, False]))
def test_masks_have_their_share(share, seed, bias):
    net = small()
    masks = frozen_masks(net, '0', share=share, bias=bias, seed=seed)
    w = masks.get('0.weight')
    n = 0 if w is None else 48 if w is True else int(w.sum())
    assert n == int(share * 48 + .5)
    assert ('0.bias' in masks) == (share == 1 if bias is None else bias)
    again = frozen_masks(net, ['0', '3'], share=share, bias=bias, seed=seed).get('0.weight')
    assert w is again if not isinstance(w, torch.Tensor) else torch.equal(w, again)   # a mask depends on seed and name only
    assert frozen_table(net, masks).frozen.sum() == sum(48 if k.endswith('weight') and m is True else 8 if m is True else int(m.sum()) for k, m in masks.items())

def test_masks_leave_generators_alone():
    t, p, n = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    frozen_masks(small(), '0', share=.5)
    assert torch.equal(t, torch.get_rng_state()) and p == random.getstate() and (n == np.random.get_state()[1]).all()

def test_tied_weights_have_one_name():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    assert frozen_masks(net, '2') == {'0.weight': True, '2.bias': True}

@pytest.mark.parametrize('name', ['resnet18', 'vgg11', 'mobilenet_v2', 'vit_b_16'])
def test_any_torchvision_model(name):
    kw = dict(image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16) if name == 'vit_b_16' else {}
    net = torchvision.models.VisionTransformer(**kw) if kw else getattr(torchvision.models, name)(num_classes=5)
    for of in ('layers', 'blocks'):
        for p in POSITIONS:
            t = FrozenLayersCallback(position=p, of=of).plan(net)
            assert 0 < t.frozen.sum() < t.weights.sum() and t.weights.sum() == sum(q.numel() for q in net.parameters())

def test_wrong_choice():
    net = mlp(n_in=4, **reservoir_layout(), n_out=3)
    err(lambda: frozen_layers(net, 'blok1'), "did you mean 'block1'?")
    err(lambda: frozen_layers(net, 'block1.relu'), 'block1.relu', 'nothing to freeze')
    err(lambda: frozen_layers(net, position='frnt'), 'position', "'front'")
    err(lambda: frozen_layers(net), 'nothing is said')
    err(lambda: frozen_layers(net, []), 'names nothing')
    err(lambda: frozen_layers(net, of='layer', position='front'), 'of=')
    err(lambda: frozen_layers(net, 'block1', of='blocks'), 'one of the two')
    err(lambda: frozen_layers(net, position='front', n=7), 'n=7', '<= 6')
    err(lambda: frozen_layers(net, 'block1', n=2), 'give a position')
    err(lambda: frozen_layers(small(), of='reservoirs'), 'has no reservoirs')
    err(lambda: frozen_masks(net, '*'), 'nothing is left to train')
    for s in (-.1, 1.1, float('nan'), 'half'): err(lambda: frozen_masks(net, 'block1', share=s), 'share=')
    err(lambda: frozen_masks(net, 'block1', bias='no'), 'bias=')
    err(lambda: freeze_layers(net, 'block1', share=.5), 'in part')
    err(lambda: frozen_table(small(), frozen_masks(net, 'block1')), 'another model')
    for kw, said in ((dict(share=2), 'share=2'), (dict(bn='on'), 'bn='), (dict(opt_state='x'), 'opt_state='), (dict(positon='front'), 'positon'), (dict(position='x'), 'position'),
                    (dict(schedule=[(0, 'a')], layers='b'), 'schedule says')): err(lambda: FrozenLayersCallback(**kw), said)

def test_wrong_schedule():
    for s, said in (([(3, '0'), (1, None)], 'forward'), ([(0, '0'), (0, None)], 'forward'), ([(.2, '0'), (1.2, None)], '<= 1'), ([(-1, '0')], '>= 0'), ([(1, '0'), (.5, None)], 'mixes'), ([], 'nothing'), ('0', 'pairs'), (3, 'pairs')):
        err(lambda: FrozenLayersCallback(schedule=s), said)
    net = small()
    before = snap(net)
    err(lambda: quiet_fit(learner(net), 2, cbs=FrozenLayersCallback(schedule=[(0, '0'), (2, None)])), 'beyond the training of 2 epochs')
    assert same(before, snap(net)) == set(before) and all(p.requires_grad for p in net.parameters())

# ---------------------------------------------------------------- frozen means frozen

@each_opt
@pytest.mark.parametrize('bn', ['eval', 'train'])
def test_whole_layers_keep_their_bits(opt, bn):
    net = small()
    learn = quiet_fit(learner(net, opt), 1, wd=.1)     # momentum is there already
    before, state = snap(net), None
    inner = getattr(learn.opt, 'opt', learn.opt)
    p0 = net[0].weight
    state = copy.deepcopy({k: v for k, v in inner.state[p0].items()})
    quiet_fit(learn, 2, wd=.1, cbs=FrozenLayersCallback(['0', '1'], bn=bn))
    want = under(before, '0.', '1.') if bn == 'eval' else {k for k in under(before, '0.', '1.') if 'running' not in k and 'num' not in k}
    assert same(before, snap(net)) == want
    now = inner.state[p0]
    assert state.keys() == now.keys() and all(torch.equal(torch.as_tensor(v), torch.as_tensor(now[k])) for k, v in state.items())
    assert all(p.requires_grad for p in net.parameters())

@each_opt
@pytest.mark.parametrize('bias', [None, True])
def test_partly_frozen_layers_keep_their_bits(opt, bias):
    net = small(bn=False)
    learn = quiet_fit(learner(net, opt), 1, wd=.1)
    masks, before = frozen_masks(net, ['0', '3'], share=.4, bias=bias, seed=3), snap(net)
    inner = getattr(learn.opt, 'opt', learn.opt)
    state = {k: v.clone() for k, v in inner.state[net[0].weight].items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    quiet_fit(learn, 3, wd=.1, cbs=[FrozenLayersCallback(['0', '3'], share=.4, bias=bias, seed=3), GradientClip(.1)])
    after = snap(net)
    for k, m in masks.items(): assert torch.equal(after[k], before[k]) if m is True else torch.equal(after[k][m], before[k][m]) and (after[k] != before[k])[~m].float().mean() > .5
    assert torch.equal(after['0.bias'], before['0.bias']) == (bias is True)
    m = masks['0.weight']
    for k, v in state.items(): assert torch.equal(inner.state[net[0].weight][k][m], v[m])

def test_clipping_sees_the_trained_part_only():
    "Plain SGD with clipping, written out"
    net, ref = small(bn=False), small(bn=False)
    mask = frozen_masks(net, '3', share=.5)['3.weight']
    d = data(shuffle=False)
    quiet_fit(learner(net, partial(SGD, mom=0.), d), 1, .1, wd=0., cbs=[FrozenLayersCallback('3', share=.5), GradientClip(.05)])
    for x, y in d.train:
        ref.zero_grad()
        nn.functional.cross_entropy(ref(x), y).backward()
        ref[3].weight.grad[mask] = 0
        nn.utils.clip_grad_norm_(ref.parameters(), .05)
        with torch.no_grad():
            for p in ref.parameters(): p -= .1 * p.grad
    for a, b in zip(net.parameters(), ref.parameters()): torch.testing.assert_close(a, b, rtol=0, atol=1e-7)

def test_gradient_accumulation():
    net = small()
    before = snap(net)
    quiet_fit(learner(net, Adam), 2, wd=.1, cbs=[FrozenLayersCallback(['0', '1'], share=1.), FrozenHalf('3', share=.5), GradientAccumulation(40), GradientClip()])
    assert under(before, '0.', '1.') == same(before, snap(net))
    m = frozen_masks(net, '3', share=.5)['3.weight']
    assert torch.equal(net[3].weight[m], before['3.weight'][m])

class FrozenHalf(FrozenLayersCallback): "A second one beside the first, under its own name"

def test_freeze_and_unfreeze_of_fastai():
    split = lambda m: [list(m[:2].parameters()), list(m[2:6].parameters()), list(m[6:].parameters())]
    net = small()
    learn, before = learner(net, Adam, splitter=split), snap(net)
    learn.freeze()                                    # leaves BatchNorm trainable
    assert net[1].weight.requires_grad and not net[0].weight.requires_grad
    quiet_fit(learn, 1, cbs=FrozenLayersCallback('1'))
    assert same(before, snap(net)) == under(before, '0.', '1.', '3.') and net[1].weight.requires_grad and not net[0].weight.requires_grad
    learn.freeze_to(1)
    before = snap(net)
    quiet_fit(learn, 1, cbs=FrozenLayersCallback('3'))
    assert {'0.weight', '3.weight', '3.bias'} <= same(before, snap(net)) and net[3].weight.requires_grad
    learn.unfreeze()
    before = snap(net)
    class Rude(Callback):
        def before_epoch(self): self.learn.unfreeze()
    quiet_fit(learn, 2, wd=.1, cbs=[FrozenLayersCallback(['0', '1']), Rude()])
    assert same(before, snap(net)) == under(before, '0.', '1.')
    learn.freeze()
    err(lambda: quiet_fit(learn, 1, cbs=FrozenLayersCallback(['1', '6'])), 'nothing is left to train')
    err(lambda: quiet_fit(learn, 2, cbs=FrozenLayersCallback(schedule=[(0, '0'), (1, None)])), 'frozen otherwise', 'learn.unfreeze()')

def test_layers_that_the_optimizer_never_saw():
    net = mlp(n_in=6, **reservoir_layout(8), n_out=3, frozen=True)
    err(lambda: quiet_fit(learner(net), 2, cbs=FrozenLayersCallback(schedule=[(0, tuple(reservoirs(net))), (1, None)])), 'create_opt')

def test_lr_find_and_validation_change_nothing(tmp_path):
    net = small()
    learn = learner(net, Adam, path=tmp_path)
    learn.add_cb(cb := FrozenLayersCallback(schedule=[(0, ('0', '1')), (3, None)]))
    before = snap(net)
    class Seen(Callback):
        order = 60
        def after_batch(self): assert same(before, snap(net)) >= under(before, '0.', '1.') and self.learn.frozen_layers.active
    with learn.no_logging(), learn.no_bar():
        learn.add_cb(seen := Seen())
        learn.lr_find(num_it=12, show_plot=False)
        learn.remove_cb(seen)
        assert same(before, snap(net)) == set(before) and all(p.requires_grad for p in net.parameters())
        learn.validate()
        learn.get_preds()
        assert not cb.active and not cb.still
        class Inside(Callback):
            def after_epoch(self):
                if self.learn.lock.locked(): return
                epoch = self.epoch   # a validation sets it to 0
                with self.learn.no_bar(): self.learn.validate()
                if epoch < 2: assert self.learn.frozen_layers.active and not net[0].weight.requires_grad
        learn.fit(4, .1, cbs=Inside())
    assert same(before, snap(net)) == set() or same(before, snap(net)) <= under(before, '1.')
    assert cb.log.frozen.tolist() == [72, 0] and cb.log.step.tolist() == [0, 15]

def test_save_and_load(tmp_path):
    net = small()
    learn = learner(net, Adam, path=tmp_path)
    quiet_fit(learn, 1, wd=.1, cbs=FrozenLayersCallback(['0', '1']))
    learn.save('a')
    at = snap(net)
    quiet_fit(learn, 1, wd=.1)
    assert not torch.equal(net[0].weight, at['0.weight'])
    learn.load('a')
    quiet_fit(learn, 1, wd=.1, cbs=FrozenLayersCallback(['0', '1'], share=1.))
    assert same(at, snap(net)) == under(at, '0.', '1.')
    class Loads(Callback):
        def before_epoch(self):
            if self.epoch == 1: self.learn.load('a')
    quiet_fit(learn, 2, wd=.1, cbs=[FrozenLayersCallback('3', share=.5), Loads()])

@pytest.mark.parametrize('how', ['error', 'cancel', 'interrupt'])
def test_an_end_on_the_way_leaves_nothing_behind(how):
    net = small()
    class Ends(Callback):
        def after_batch(self):
            if self.iter == 1: raise dict(error=RuntimeError, cancel=CancelFitException, interrupt=KeyboardInterrupt)[how]('on the way')
    learn = learner(net)
    try: quiet_fit(learn, 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), Ends()])
    except (RuntimeError, KeyboardInterrupt): pass
    assert all(p.requires_grad for p in net.parameters()) and not any('forward' in m.__dict__ for m in net.modules())
    assert 'create_batches' not in learn.dls.train.__dict__ and not net._forward_pre_hooks
    x, _ = learn.dls.train.one_batch()
    assert x.shape == (16, 6)
    net.train()
    assert net[1].training

# ---------------------------------------------------------------- schedules

@each_opt
@pytest.mark.parametrize('opt_state', OPT_STATES)
def test_thawing(opt, opt_state):
    net = small()
    learn = quiet_fit(learner(net, opt), 1, wd=.1)
    inner, seen = getattr(learn.opt, 'opt', learn.opt), {}
    first = {k: copy.deepcopy(v) for k, v in inner.state[net[0].weight].items()}
    class Watch(Callback):
        order = FrozenLayersCallback.order + .01
        def before_batch(self):
            if self.training and self.iter == 0: seen[self.epoch] = snap(net), net[0].weight.requires_grad, dict(inner.state[net[0].weight]), net[1].training
    quiet_fit(learn, 4, wd=.1, cbs=[FrozenLayersCallback(schedule=[(1, ('0', '1')), (3, None)], opt_state=opt_state), Watch()])
    assert [seen[e][1] for e in range(4)] == [True, False, False, True] and [seen[e][3] for e in range(4)] == [True, False, False, True]
    assert under(seen[1][0], '0.', '1.') == same(seen[1][0], seen[3][0])
    assert not torch.equal(seen[0][0]['0.weight'], seen[1][0]['0.weight']) and not torch.equal(snap(net)['0.weight'], seen[3][0]['0.weight'])
    tensors = {k for k, v in first.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    assert bool(tensors & set(seen[3][2])) == (opt_state == 'keep')

def test_schedule_in_parts():
    "Entries that were frozen and are thawed begin with no momentum; the others keep theirs"
    net = small(bn=False)
    learn = quiet_fit(learner(net, partial(SGD, mom=.9)), 1)
    a, b = (frozen_masks(net, '0', share=s)['0.weight'] for s in (.6, .2))
    assert (a | b).equal(a)                             # one draw, cut at two places
    got = {}
    class Watch(Callback):
        order = FrozenLayersCallback.order + .01
        def before_batch(self):
            if self.training and self.iter == 0: got[self.epoch] = self.opt.state[net[0].weight]['grad_avg'].clone(), net[0].weight.detach().clone()
    quiet_fit(learn, 3, cbs=[FrozenLayersCallback(schedule=[(0, dict(layers='0', share=.6)), (1, dict(layers='0', share=.2)), (2, None)]), Watch()])
    assert torch.equal(got[0][1][a], got[1][1][a]) and torch.equal(got[1][1][b], got[2][1][b]) and (got[1][1] != got[2][1])[a & ~b].all()
    assert (got[1][0][a & ~b] == 0).all() and (got[1][0][~a] != 0).all() and torch.equal(got[0][0][b], got[1][0][b]) and (got[2][0][b] == 0).all()

def test_gradual_unfreezing_and_freeze_out():
    net = mlp(n_in=6, hidden=(8, 8, 8), n_out=3)
    names = [f'block{i}' for i in (1, 2, 3)]
    assert gradual_unfreezing(net) == [(0., tuple(names)), (.25, tuple(names[:2])), (.5, ('block1',)), (.75, None)]
    out = freeze_out(net, t0=.4)
    assert [w for w in out] == [(pytest.approx(.4 + .2 * i), tuple(names[:i + 1])) for i in range(3)]
    assert [w for w, _ in freeze_out(net, t0=.4, cubed=True)] == [pytest.approx(w**3) for w, _ in out]
    err(lambda: freeze_out(net, t0=1), 't0=1')
    err(lambda: gradual_unfreezing(net, end=0), 'end=0')
    for s, frozen in ((gradual_unfreezing(net), [3, 2, 1, 0]), (freeze_out(net, t0=.25), [0, 1, 2, 3])):
        learn, snaps = learner(net), []
        class Watch(Callback):
            def after_train(self): snaps.append(snap(net))
        snaps.append(snap(net))
        quiet_fit(learn, 4, wd=.1, cbs=[FrozenLayersCallback(schedule=s), Watch()])
        for a, b, k in zip(snaps, snaps[1:], frozen): assert same(a, b) == under(a, *(f'{n}.' for n in names[:k]) or ['none'])

# ---------------------------------------------------------------- in a loop of one's own

@pytest.mark.parametrize('opt', [partial(torch.optim.SGD, lr=.1, momentum=.9, weight_decay=.1), partial(torch.optim.Adam, lr=.1), partial(torch.optim.AdamW, lr=.1, weight_decay=.5)])
def test_context(opt):
    net = small()
    o, x = opt(net.parameters()), torch.randn(9, 6)
    def go(n=3):
        for _ in range(n): net.train(); net(x).square().sum().backward(); o.step(); o.zero_grad()
    go(1)
    before = snap(net)
    with frozen(net, ['0', '1']), frozen(net, '3', share=.5) as masks: go()
    after, m = snap(net), masks['3.weight']
    assert same(before, after) == under(before, '0.', '1.') and torch.equal(after['3.weight'][m], before['3.weight'][m]) and (after['3.weight'] != before['3.weight'])[~m].any()
    assert all(p.requires_grad for p in net.parameters()) and net[1].training and not net[1]._forward_pre_hooks
    go(1)
    assert not same(after, snap(net))

def test_context_with_a_learner():
    net = small()
    learn, before = learner(net), snap(net)
    with frozen(learn, ['0', '1'], share=1.) as cb: quiet_fit(learn, 1)
    assert same(before, snap(net)) == under(before, '0.', '1.') and cb not in learn.cbs
    quiet_fit(learn, 1)
    assert not same(before, snap(net)) & {'0.weight'}
    err(lambda: frozen(learn, 'nope').__enter__(), 'nope')

def test_frozen_attributes_of_a_learner_are_not_hidden():
    learn = learner(small(), cbs=[FrozenLayersCallback('0'), CachedPrefixCallback()])
    assert callable(learn.freeze) and callable(learn.unfreeze) and callable(learn.freeze_to) and isinstance(learn.frozen_layers, FrozenLayersCallback)

# ---------------------------------------------------------------- work

@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=2, max_size=5), st.data())
def test_backward_work(widths, d):
    frozen = d.draw(st.lists(st.booleans(), min_size=len(widths) - 1, max_size=len(widths) - 1).filter(lambda f: not all(f)))
    net = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(widths, widths[1:])])
    w, n = [a * b for a, b in zip(widths, widths[1:])], 4
    low = frozen.index(False)
    t = training_work(net, torch.randn(n, widths[0]), {f'{i}.{k}': True for i, f in enumerate(frozen) if f for k in ('weight', 'bias')})
    assert t.forward[0] == n * sum(w)
    assert t.backward[0] == n * (sum(k for k, f in zip(w, frozen) if not f) + sum(w[low + 1:]))
    assert all(p.requires_grad and p.grad is None for p in net.parameters())

def test_no_gradient_below():
    net = torchvision.models.resnet18(num_classes=4)
    masks = frozen_masks(net, ['conv1', 'bn1', 'layer1', 'layer2', 'layer3'])
    x = torch.randn(2, 3, 32, 32)
    assert training_work(net, x, masks).backward[0] < .5 * training_work(net, x).backward[0]
    err(lambda: training_work(net.requires_grad_(False), x), 'nothing is trained')

# ---------------------------------------------------------------- cuts

class Branches(nn.Module):
    "A functional addition, a skip over the cut, a module used twice"
    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b, self.act, self.c = kind, nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
    def forward(self, x):
        a = self.a(x)
        if self.kind == 'shared': return self.c(self.act(self.b(self.act(a))))
        if self.kind == 'skip': return self.c(self.b(a) + a)
        if self.kind == 'input': return self.c(self.b(a) + x)
        if self.kind == 'functional': return self.c(self.b(torch.tanh(a)))

def test_cuts():
    x = torch.randn(2, 6)
    assert cuts(Branches('shared'), x).module.tolist() == ['a', 'act', 'b', 'act']
    assert cuts(Branches('skip'), x).module.tolist() == ['a']
    assert cuts(Branches('input'), x).module.tolist() == []
    assert cuts(Branches('functional'), x).module.tolist() == ['a']
    net = Branches('input')
    freeze_layers(net, ['a', 'b'])
    err(lambda: frozen_prefix(net, x), 'no clean cut')
    err(lambda: frozen_prefix(small(), x), '0.weight is trained')
    net = Branches('shared')
    freeze_layers(net, 'a')
    net.b.requires_grad_(False)
    assert frozen_prefix(net, x).chain == ('a', 'act', 'b', 'act')
    err(lambda: frozen_prefix(net, x, upto='d'), "upto='d'")

def test_watching_leaves_everything_alone():
    net = torchvision.models.resnet18(num_classes=4).train()
    before, state = snap(net), torch.get_rng_state()
    cuts(net, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert same(before, snap(net)) == set(before) and torch.equal(state, torch.get_rng_state()) and all(m.training for m in net.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

@pytest.mark.parametrize('name,front,cut', [('resnet18', ['conv1', 'bn1', 'layer1', 'layer2', 'layer3'], 'layer3'), ('vgg11', 'features', 'avgpool'), ('mobilenet_v2', 'features', 'features'),
                                            ('densenet121', 'features', 'features'), ('squeezenet1_1', 'features', 'classifier.0')])
def test_cuts_of_torchvision(name, front, cut):
    net = getattr(torchvision.models, name)(num_classes=4)
    freeze_layers(net, front)
    net.eval()
    got = frozen_prefix(net, torch.randn(2, 3, 64, 64))
    assert got.module == cut

def test_timm():
    timm = pytest.importorskip('timm')
    net = timm.create_model('resnet18', num_classes=4).eval()
    freeze_layers(net, ['conv1', 'bn1', 'layer1'])
    assert frozen_prefix(net, torch.randn(2, 3, 64, 64)).module == 'layer1'
    vit = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=3, num_classes=4).eval()
    freeze_layers(vit, 'patch_embed')
    frozen_prefix(vit, torch.randn(2, 3, 32, 32))

# ---------------------------------------------------------------- the cache

def both(make, front, d, n=3, opt=Adam, **kw):
    "Train the same twice, without and with the cache; learners and report"
    out = []
    for cached in (False, True):
        net = make()
        learn = learner(net, opt, d())
        torch.manual_seed(5)
        cbs = [FrozenLayersCallback(**front) if isinstance(front, dict) else FrozenLayersCallback(front)] + ([cb := CachedPrefixCallback(**kw)] if cached else [])
        learn.add_cbs(cbs)
        try: quiet_fit(learn, n, .01, wd=.1)
        except ReinitError as e:
            if 'on this machine' in str(e): pytest.skip('kernels of this machine round by place in the batch, and the cache says so')
            raise
        out.append(learn)
    return *out, cb

def assert_same(a, b):
    assert a.recorder.values == b.recorder.values or np.allclose(a.recorder.values, b.recorder.values, rtol=0, atol=0)
    x, y = snap(a.model), snap(b.model)
    assert same(x, y) == set(x)
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        s, t = a.opt.state[p], b.opt.state[q]
        assert s.keys() == t.keys() and all(torch.equal(torch.as_tensor(v), torch.as_tensor(t[k])) for k, v in s.items())

@pytest.mark.parametrize('kind', ['fastai', 'torch'])
@pytest.mark.parametrize('n,bs', [(70, 16), (64, 16), (65, 16), (10, 16)])
@pytest.mark.parametrize('memory', [2**30, 0])
def test_cache_changes_no_bit(kind, n, bs, memory, tmp_path):
    plain, fast, cb = both(partial(small, drop=.3), ['0', '1'], partial(data, n=n, bs=bs, kind=kind), memory=memory, folder=tmp_path)
    assert_same(plain, fast)
    assert len(list(tmp_path.iterdir())) == (4 if memory == 0 else 0)
    fast.remove_cb(cb)
    assert not list(tmp_path.iterdir())

def test_cache_goes_as_far_as_it_can():
    _, _, cb = both(partial(small, drop=.3), ['0', '1'], data)
    assert cb.cut.module == '2' and cb.report.output.tolist() == [(8,)] * 2
    _, _, cb = both(partial(small, drop=.3), ['0', '1', '3'], data)
    assert cb.cut.module == '4'                          # dropout comes next, and belongs to the trained part

@pytest.mark.parametrize('name', ['resnet18', 'squeezenet1_1', 'mobilenet_v2'])
def test_cache_of_real_models(name):
    def make():
        torch.manual_seed(0)
        return getattr(torchvision.models, name)(num_classes=3)
    front = ['conv1', 'bn1', 'layer1', 'layer2', 'layer3'] if name == 'resnet18' else 'features'
    plain, fast, cb = both(make, front, partial(data, n=21, bs=8, shape=(3, 32, 32)), n=2)
    assert_same(plain, fast)

def test_cache_of_image_tasks():
    def make():
        torch.manual_seed(0)
        return model('scnn', c_in=1, size=8, width=.25, norm='batch', dropout=.2)
    plain, fast, cb = both(make, 'block[12]', lambda: dls(Task('digits', n_train=100), bs=32, device='cpu', drop_last=False), n=3)
    assert_same(plain, fast)
    assert cb.cut.module == 'block2'

def test_vision_learner():
    from fastai.vision.learner import vision_learner
    learn = vision_learner(dls(Task('digits', n_train=40, size=32, channels=3), bs=16, device='cpu'), torchvision.models.resnet18, pretrained=False, normalize=False).remove_cb(ProgressCallback)
    learn.freeze()                                     # fastai goes on training BatchNorm: only the first convolution is a frozen front
    with cached_prefix(learn) as cb: quiet_fit(learn, 1, .01); assert cb.cut.module == '0.0'
    before = snap(learn.model)
    with cached_prefix(learn) as cb: quiet_fit(learn, 1, .01, cbs=FrozenLayersCallback('0')); assert cb.cut.module == '1.1'
    assert under(before, '0.') <= same(before, snap(learn.model))

@pytest.mark.parametrize('schedule', ['unfreezing', 'freezeout', 'middle of an epoch'])
def test_cache_with_a_schedule(schedule):
    net = mlp_plain()
    s = {'unfreezing': gradual_unfreezing(net, 'layers'), 'freezeout': freeze_out(net, 'layers', t0=.25), 'middle of an epoch': [(.1, ('0', '1')), (.6, '0')]}[schedule]
    plain, fast, cb = both(mlp_plain, dict(schedule=s), partial(data, n=64, shape=(32,)), n=4)
    assert_same(plain, fast)

def mlp_plain():
    torch.manual_seed(0)
    return exact(nn.Sequential(*(nn.Sequential(nn.Linear(i, 32), nn.ReLU()) for i in (32, 32, 32)), nn.Sequential(nn.Dropout(.2), nn.Linear(32, 3))))

def test_several_fits_share_a_cache():
    net, calls = small(), []
    learn = learner(net)
    net[0].register_forward_hook(lambda *a: calls.append(1))
    with cached_prefix(learn) as cb:
        quiet_fit(learn, 1, cbs=FrozenLayersCallback(['0', '1']))
        store = cb.stores['train']
        quiet_fit(learn, 2, cbs=FrozenLayersCallback(['0', '1']))
        assert cb.stores['train'] is store
        with torch.no_grad(): net[0].weight.add_(1)
        quiet_fit(learn, 1, cbs=FrozenLayersCallback(['0', '1']))
        assert cb.stores['train'] is not store
    assert not cb.stores

def test_other_inputs_run_through_all_of_it():
    net, seen = small(), []
    learn = learner(net)
    class Asks(Callback):
        def after_batch(self):
            if self.training and self.iter == 1:
                x, _ = self.dls.valid.one_batch()
                a = net(x)
                b = copy.deepcopy(net[6])(net[4](net[3](net[2](net[1](net[0](x))))))
                seen.append(torch.equal(a, b))
        def after_epoch(self):
            if self.learn.lock.locked(): return
            with self.learn.no_bar(): seen.append(len(self.learn.get_preds(ds_idx=0)[0]) == 70)
    quiet_fit(learn, 2, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), Asks()])
    assert seen == [True] * 4

def test_prefix_is_computed_once():
    net, n = small(bn=False), [0]
    class Counts(nn.Linear):
        def forward(self, x): n[0] += len(x); return super().forward(x)
    net[0] = Counts(6, 8)
    exact(net)
    quiet_fit(learner(net), 10, cbs=[FrozenLayersCallback('0'), CachedPrefixCallback()])
    assert n[0] < 3 * (70 + 35)                              # instead of ten times

def test_images_of_other_batches_matter():
    class Center(nn.Module):
        def forward(self, x): return x - x.mean(0)
    net = nn.Sequential(nn.Linear(6, 8), Center(), nn.Linear(8, 3))
    err(lambda: quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback('0'), CachedPrefixCallback()]), 'depends on the other images')

def test_cache_refuses():
    net = exact(nn.Sequential(nn.Linear(6, 8), nn.Dropout(.5), nn.Linear(8, 8), nn.Linear(8, 3)))
    err(lambda: quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback('[02]'), CachedPrefixCallback()]), 'not deterministic', 'dropout', "upto='0'")
    quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback('[02]'), CachedPrefixCallback(upto='0')])
    err(lambda: quiet_fit(learner(small()), 1, cbs=[FrozenLayersCallback(['0', '1'], bn='train'), CachedPrefixCallback()]), 'BatchNorm in training mode')
    err(lambda: quiet_fit(learner(small()), 1, cbs=CachedPrefixCallback()), 'nothing at the front is frozen')
    err(lambda: quiet_fit(learner(small()), 1, cbs=[FrozenLayersCallback('0', share=.9, bias=True), CachedPrefixCallback()]), '0.weight is trained')
    class Noisy(list):
        def __getitem__(self, i): x, y = super().__getitem__(i); return x + torch.randn(6) * 1e-3, y
    for L, kw in ((DataLoader, {}), (torch.utils.data.DataLoader, {})):
        d = DataLoaders(L(Noisy(zip(torch.randn(40, 6), torch.randint(3, (40,)))), batch_size=8, shuffle=True), data().valid)
        err(lambda: quiet_fit(learner(small(), d=d), 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback()]), 'augmented')
    from fastai.callback.mixup import MixUp
    err(lambda: quiet_fit(learner(small()), 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), MixUp()]), 'MixUp')
    for task in (dict(shift=.1), dict(flip=True), dict(jitter=(.1, 0, 0, 0))):
        learn = Learner(dls(Task('digits', n_train=60, **task), bs=16, device='cpu'), model('scnn', c_in=1, size=8, width=.25)).remove_cb(ProgressCallback)
        err(lambda: quiet_fit(learn, 1, cbs=[FrozenLayersCallback('block1'), CachedPrefixCallback()]), 'augmented')
    err(lambda: CachedPrefixCallback(folder='no/such/folder'), 'folder=')
    err(lambda: CachedPrefixCallback(memory=-1), 'memory=')

def test_rare_augmentation_is_known_by_its_class():
    from fastai.vision.all import CategoryBlock, DataBlock, FlipItem, ImageBlock, PILImageBW
    x = np.random.RandomState(0).randint(0, 255, (40, 8, 8)).astype(np.uint8)
    block = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_x=lambda i: PILImageBW.create(x[i]), get_y=lambda i: i % 3, splitter=lambda o: (list(range(30)), list(range(30, 40))), item_tfms=[FlipItem(p=1e-9)])
    d = block.dataloaders(range(40), bs=8, num_workers=0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))
    err(lambda: quiet_fit(learner(net, d=d), 1, cbs=[FrozenLayersCallback('1'), CachedPrefixCallback()]), 'FlipItem')

def test_a_changed_prefix_is_noticed():
    net = small()
    class Changes(Callback):
        def after_epoch(self): net[0].weight.data.add_(1)
    err(lambda: quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), Changes()]), 'was changed')

def test_lr_find_with_the_cache(tmp_path):
    outs = []
    for cached in (False, True):
        learn = learner(small(), Adam, path=tmp_path)
        learn.add_cbs([FrozenLayersCallback(['0', '1'])] + [CachedPrefixCallback()] * cached)
        with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=10, show_plot=False)
        outs.append([float(l) for l in learn.recorder.losses])
    assert outs[0] == outs[1]

def test_batch_bits():
    t = batch_bits(nn.Sequential(nn.Linear(6, 8)).double(), torch.randn(40, 6).double(), 8, (8, 4))
    assert t['size'].tolist() == [8, 4] and t.images.tolist() == [24, 12] and (t.largest < 1e-12).all()
    class Center(nn.Module):
        def forward(self, x): return x - x.mean(0)
    assert batch_bits(Center(), torch.randn(40, 6), 8, (8,)).differ[0] == 24

def test_bits_that_depend_on_the_place():
    "As in some kernels: the last bit of a row depends on where in the batch it is"
    class ByPlace(nn.Linear):
        def forward(self, x): return super().forward(x) * (1 + torch.arange(len(x))[:, None] % 2 * 1e-6)
    def fit(**kw): return quiet_fit(learner(exact(nn.Sequential(ByPlace(6, 8), nn.Linear(8, 3)))), 1, cbs=[FrozenLayersCallback('0'), CachedPrefixCallback(**kw)])
    err(fit, 'on this machine', 'exact=False')
    fit(exact=False)

def test_odd_sizes_are_computed_each_time():
    "A model whose bits depend on the size of the batch, as kernels do, but not on what is in it"
    class BySize(nn.Linear):
        def forward(self, x): return super().forward(x) * (1 + (len(x) != 16) * 1e-6)
    def make(): torch.manual_seed(0); return exact(nn.Sequential(BySize(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    plain, fast, cb = both(make, '0', data)
    assert_same(plain, fast)
    assert cb.report.computed_each_time.tolist() == [[6], []]

def test_plots():
    net = small()
    for cb in (FrozenLayersCallback('0'), FrozenLayersCallback(schedule=[(0, '0'), (3, None)]), FrozenLayersCallback(schedule=[(.1, '0')])):
        ax = plot_plan(cb.plan(net))
        assert len(ax.get_yticklabels()) == 4 and 'frozen' in ax.get_title()

"Freezing: what is frozen keeps its bits, and what is cached changes nothing"

import copy
import random
from functools import partial

import fastai.callback.schedule  # noqa: F401  adds lr_find
import numpy as np
import pytest
import torch
import torchvision
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, Lookahead, OptimWrapper
from freezing_helpers import data, err, learner, quiet_fit, same, small, snap, under
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from reinit_nb.freezing import (
    THAWED_STATES,
    FrozenLayersCallback,
    freeze_layers,
    freeze_out,
    frozen_layers,
    frozen_masks,
    frozen_table,
    gradual_unfreezing,
    layer_positions,
    plot_freezing_plan,
    temporarily_frozen,
    training_multiply_adds,
)
from reinit_nb.models import POSITIONS, mlp, reservoir_layout, reservoir_names
from reinit_nb.prefix_cache import CachedPrefixCallback

opts = {
    'sgd': partial(SGD, mom=0.9),
    'adam': Adam,
    'adam l2': partial(Adam, decouple_wd=False),
    'torch adamw': partial(OptimWrapper, opt=torch.optim.AdamW),
    'torch sgd': partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9)),
    'lookahead': lambda p, lr: Lookahead(SGD(p, lr, mom=0.9), k=2),
}
each_opt = pytest.mark.parametrize('opt', opts.values(), ids=opts)

# ---------------------------------------------------------------- which


@given(st.integers(1, 60), st.data())
def test_positions(K, d):
    n, p = d.draw(st.integers(1, K)), d.draw(st.sampled_from(POSITIONS))
    at = layer_positions(K, p, n)
    assert len(set(at)) == n and at == sorted(at) and 0 <= at[0] and at[-1] < K
    if p == 'alternating':
        assert max(np.diff(at), default=0) - min(np.diff(at), default=0) <= 1


@pytest.mark.parametrize('R', range(1, 9))
@pytest.mark.parametrize('p', POSITIONS)
def test_positions_of_the_study(R, p):
    lay = reservoir_layout(repeats=R, position=p)
    assert tuple(layer_positions(3 * R, p, R)) == tuple(lay['reservoir'])
    net = mlp(n_in=4, **lay)
    assert list(frozen_layers(net, position=p)) == reservoir_names(net)


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.integers(0, 1000), st.sampled_from([None, True, False]))
def test_masks_have_their_share(share, seed, bias):
    net = small()
    masks = frozen_masks(net, '0', share=share, bias=bias, seed=seed)
    w = masks.get('0.weight')
    n = 0 if w is None else 48 if w is True else int(w.sum())
    assert n == int(share * 48 + 0.5)
    assert ('0.bias' in masks) == (share == 1 if bias is None else bias)
    again = frozen_masks(net, ['0', '3'], share=share, bias=bias, seed=seed).get('0.weight')
    assert (
        w is again if not isinstance(w, torch.Tensor) else torch.equal(w, again)
    )  # a mask depends on seed and name only
    assert frozen_table(net, masks).frozen.sum() == sum(
        48 if k.endswith('weight') and m is True else 8 if m is True else int(m.sum()) for k, m in masks.items()
    )


def test_masks_leave_generators_alone():
    t, p, n = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    frozen_masks(small(), '0', share=0.5)
    assert torch.equal(t, torch.get_rng_state())
    assert p == random.getstate()
    assert (n == np.random.get_state()[1]).all()


def test_tied_weights_have_one_name():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    assert frozen_masks(net, '2') == {'0.weight': True, '2.bias': True}


@pytest.mark.parametrize('name', ['resnet18', 'vgg11', 'mobilenet_v2', 'vit_b_16'])
def test_any_torchvision_model(name):
    kw = (
        dict(image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)
        if name == 'vit_b_16'
        else {}
    )
    net = torchvision.models.VisionTransformer(**kw) if kw else getattr(torchvision.models, name)(num_classes=5)
    for of in ('layers', 'blocks'):
        for p in POSITIONS:
            t = FrozenLayersCallback(position=p, of=of).plan(net)
            assert 0 < t.frozen.sum() < t.weights.sum()
            assert t.weights.sum() == sum(q.numel() for q in net.parameters())


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
    for share in (-0.1, 1.1, float('nan'), 'half'):
        err(partial(frozen_masks, net, 'block1', share=share), 'share=')
    err(lambda: frozen_masks(net, 'block1', bias='no'), 'bias=')
    err(lambda: freeze_layers(net, 'block1', share=0.5), 'in part')
    err(lambda: frozen_table(small(), frozen_masks(net, 'block1')), 'another model')
    for kw, said in (
        (dict(share=2), 'share=2'),
        (dict(bn='on'), 'bn='),
        (dict(opt_state='x'), 'opt_state='),
        (dict(positon='front'), 'positon'),
        (dict(position='x'), 'position'),
        (dict(schedule=[(0, 'a')], layers='b'), 'schedule says'),
    ):
        err(partial(FrozenLayersCallback, **kw), said)


def test_wrong_schedule():
    for s, said in (
        ([(3, '0'), (1, None)], 'forward'),
        ([(0, '0'), (0, None)], 'forward'),
        ([(0.2, '0'), (1.2, None)], '<= 1'),
        ([(-1, '0')], '>= 0'),
        ([(1, '0'), (0.5, None)], 'mixes'),
        ([], 'nothing'),
        ('0', 'pairs'),
        (3, 'pairs'),
    ):
        err(partial(FrozenLayersCallback, schedule=s), said)
    net = small()
    before = snap(net)
    err(
        lambda: quiet_fit(learner(net), 2, cbs=FrozenLayersCallback(schedule=[(0, '0'), (2, None)])),
        'beyond the training of 2 epochs',
    )
    err(lambda: quiet_fit(learner(net), 0, cbs=FrozenLayersCallback('0')), 'epochs=0 should be')
    assert same(before, snap(net)) == set(before) and all(p.requires_grad for p in net.parameters())


# ---------------------------------------------------------------- frozen means frozen


@each_opt
@pytest.mark.parametrize('bn', ['eval', 'train'])
def test_whole_layers_keep_their_bits(opt, bn):
    net = small()
    learn = quiet_fit(learner(net, opt), 1, wd=0.1)  # momentum is there already
    before, state = snap(net), None
    inner = getattr(learn.opt, 'opt', learn.opt)
    p0 = net[0].weight
    state = copy.deepcopy({k: v for k, v in inner.state[p0].items()})
    quiet_fit(learn, 2, wd=0.1, cbs=FrozenLayersCallback(['0', '1'], bn=bn))
    want = (
        under(before, '0.', '1.')
        if bn == 'eval'
        else {k for k in under(before, '0.', '1.') if 'running' not in k and 'num' not in k}
    )
    assert same(before, snap(net)) == want
    now = inner.state[p0]
    assert state.keys() == now.keys()
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(now[k])) for k, v in state.items())
    assert all(p.requires_grad for p in net.parameters())


@each_opt
@pytest.mark.parametrize('bias', [None, True])
def test_partly_frozen_layers_keep_their_bits(opt, bias):
    net = small(bn=False)
    learn = quiet_fit(learner(net, opt), 1, wd=0.1)
    masks, before = frozen_masks(net, ['0', '3'], share=0.4, bias=bias, seed=3), snap(net)
    inner = getattr(learn.opt, 'opt', learn.opt)
    state = {k: v.clone() for k, v in inner.state[net[0].weight].items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    quiet_fit(learn, 3, wd=0.1, cbs=[FrozenLayersCallback(['0', '3'], share=0.4, bias=bias, seed=3), GradientClip(0.1)])
    after = snap(net)
    for k, m in masks.items():
        assert (
            torch.equal(after[k], before[k])
            if m is True
            else torch.equal(after[k][m], before[k][m]) and (after[k] != before[k])[~m].float().mean() > 0.5
        )
    assert torch.equal(after['0.bias'], before['0.bias']) == (bias is True)
    m = masks['0.weight']
    for k, v in state.items():
        assert torch.equal(inner.state[net[0].weight][k][m], v[m])


def test_clipping_sees_the_trained_part_only():
    "Plain SGD with clipping, written out"
    net, ref = small(bn=False), small(bn=False)
    mask = frozen_masks(net, '3', share=0.5)['3.weight']
    d = data(shuffle=False)
    quiet_fit(
        learner(net, partial(SGD, mom=0.0), d),
        1,
        0.1,
        wd=0.0,
        cbs=[FrozenLayersCallback('3', share=0.5), GradientClip(0.05)],
    )
    for x, y in d.train:
        ref.zero_grad()
        nn.functional.cross_entropy(ref(x), y).backward()
        ref[3].weight.grad[mask] = 0
        nn.utils.clip_grad_norm_(ref.parameters(), 0.05)
        with torch.no_grad():
            for p in ref.parameters():
                p -= 0.1 * p.grad
    for a, b in zip(net.parameters(), ref.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_gradient_accumulation():
    net = small()
    before = snap(net)
    quiet_fit(
        learner(net, Adam),
        2,
        wd=0.1,
        cbs=[
            FrozenLayersCallback(['0', '1'], share=1.0),
            FrozenHalf('3', share=0.5),
            GradientAccumulation(40),
            GradientClip(),
        ],
    )
    assert under(before, '0.', '1.') == same(before, snap(net))
    m = frozen_masks(net, '3', share=0.5)['3.weight']
    assert torch.equal(net[3].weight[m], before['3.weight'][m])


class FrozenHalf(FrozenLayersCallback):
    "A second one beside the first, under its own name"


def test_freeze_and_unfreeze_of_fastai():
    def split(m):
        return [list(part.parameters()) for part in (m[:2], m[2:6], m[6:])]

    net = small()
    learn, before = learner(net, Adam, splitter=split), snap(net)
    learn.freeze()  # leaves BatchNorm trainable
    assert net[1].weight.requires_grad and not net[0].weight.requires_grad
    quiet_fit(learn, 1, cbs=FrozenLayersCallback('1'))
    assert same(before, snap(net)) == under(before, '0.', '1.', '3.')
    assert net[1].weight.requires_grad
    assert not net[0].weight.requires_grad
    learn.freeze_to(1)
    before = snap(net)
    quiet_fit(learn, 1, cbs=FrozenLayersCallback('3'))
    assert {'0.weight', '3.weight', '3.bias'} <= same(before, snap(net))
    assert net[3].weight.requires_grad
    learn.unfreeze()
    before = snap(net)

    class Rude(Callback):
        def before_epoch(self):
            self.learn.unfreeze()

    quiet_fit(learn, 2, wd=0.1, cbs=[FrozenLayersCallback(['0', '1']), Rude()])
    assert same(before, snap(net)) == under(before, '0.', '1.')
    learn.freeze()
    err(lambda: quiet_fit(learn, 1, cbs=FrozenLayersCallback(['1', '6'])), 'nothing is left to train')
    err(
        lambda: quiet_fit(learn, 2, cbs=FrozenLayersCallback(schedule=[(0, '0'), (1, None)])),
        'frozen otherwise',
        'learn.unfreeze()',
    )


def test_layers_that_the_optimizer_never_saw():
    net = mlp(n_in=6, **reservoir_layout(8), n_out=3, frozen=True)
    schedule = [(0, tuple(reservoir_names(net))), (1, None)]
    err(lambda: quiet_fit(learner(net), 2, cbs=FrozenLayersCallback(schedule=schedule)), 'create_opt')


def test_lr_find_and_validation_change_nothing(tmp_path):
    net = small()
    learn = learner(net, Adam, path=tmp_path)
    learn.add_cb(cb := FrozenLayersCallback(schedule=[(0, ('0', '1')), (3, None)]))
    before = snap(net)

    class Seen(Callback):
        order = 60

        def after_batch(self):
            assert same(before, snap(net)) >= under(before, '0.', '1.')
            assert self.learn.frozen_layers.active

    with learn.no_logging(), learn.no_bar():
        learn.add_cb(seen := Seen())
        learn.lr_find(num_it=12, show_plot=False)
        learn.remove_cb(seen)
        assert same(before, snap(net)) == set(before)
        assert all(p.requires_grad for p in net.parameters())
        learn.validate()
        learn.get_preds()
        assert not cb.active and not cb.frozen_params

        class Inside(Callback):
            def after_epoch(self):
                if self.learn.lock.locked():
                    return
                epoch = self.epoch  # a validation sets it to 0
                with self.learn.no_bar():
                    self.learn.validate()
                if epoch < 2:
                    assert self.learn.frozen_layers.active and not net[0].weight.requires_grad

        learn.fit(4, 0.1, cbs=Inside())
    assert same(before, snap(net)) == set() or same(before, snap(net)) <= under(before, '1.')
    assert cb.log.frozen.tolist() == [72, 0] and cb.log.step.tolist() == [0, 15]


def test_save_and_load(tmp_path):
    net = small()
    learn = learner(net, Adam, path=tmp_path)
    quiet_fit(learn, 1, wd=0.1, cbs=FrozenLayersCallback(['0', '1']))
    learn.save('a')
    at = snap(net)
    quiet_fit(learn, 1, wd=0.1)
    assert not torch.equal(net[0].weight, at['0.weight'])
    learn.load('a')
    quiet_fit(learn, 1, wd=0.1, cbs=FrozenLayersCallback(['0', '1'], share=1.0))
    assert same(at, snap(net)) == under(at, '0.', '1.')

    class Loads(Callback):
        def before_epoch(self):
            if self.epoch == 1:
                self.learn.load('a')

    quiet_fit(learn, 2, wd=0.1, cbs=[FrozenLayersCallback('3', share=0.5), Loads()])


@pytest.mark.parametrize('how', ['error', 'cancel', 'interrupt'])
def test_an_end_on_the_way_leaves_nothing_behind(how):
    net = small()

    class Ends(Callback):
        def after_batch(self):
            if self.iter == 1:
                raise dict(error=RuntimeError, cancel=CancelFitException, interrupt=KeyboardInterrupt)[how](
                    'on the way'
                )

    learn = learner(net)
    try:
        quiet_fit(learn, 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), Ends()])
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert all(p.requires_grad for p in net.parameters())
    assert not any('forward' in m.__dict__ for m in net.modules())
    assert 'create_batches' not in learn.dls.train.__dict__ and not net._forward_pre_hooks
    x, _ = learn.dls.train.one_batch()
    assert x.shape == (16, 6)
    net.train()
    assert net[1].training


# ---------------------------------------------------------------- schedules


@each_opt
@pytest.mark.parametrize('opt_state', THAWED_STATES)
def test_thawing(opt, opt_state):
    net = small()
    learn = quiet_fit(learner(net, opt), 1, wd=0.1)
    inner, seen = getattr(learn.opt, 'opt', learn.opt), {}
    first = {k: copy.deepcopy(v) for k, v in inner.state[net[0].weight].items()}

    class Watch(Callback):
        order = FrozenLayersCallback.order + 0.01

        def before_batch(self):
            if self.training and self.iter == 0:
                seen[self.epoch] = (
                    snap(net),
                    net[0].weight.requires_grad,
                    dict(inner.state[net[0].weight]),
                    net[1].training,
                )

    quiet_fit(
        learn,
        4,
        wd=0.1,
        cbs=[FrozenLayersCallback(schedule=[(1, ('0', '1')), (3, None)], opt_state=opt_state), Watch()],
    )
    assert [seen[e][1] for e in range(4)] == [True, False, False, True]
    assert [seen[e][3] for e in range(4)] == [
        True,
        False,
        False,
        True,
    ]
    assert under(seen[1][0], '0.', '1.') == same(seen[1][0], seen[3][0])
    assert not torch.equal(seen[0][0]['0.weight'], seen[1][0]['0.weight'])
    assert not torch.equal(snap(net)['0.weight'], seen[3][0]['0.weight'])
    tensors = {k for k, v in first.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    assert bool(tensors & set(seen[3][2])) == (opt_state == 'keep')


def test_schedule_in_parts():
    "Entries that were frozen and are thawed begin with no momentum; the others keep theirs"
    net = small(bn=False)
    learn = quiet_fit(learner(net, partial(SGD, mom=0.9)), 1)
    a, b = (frozen_masks(net, '0', share=s)['0.weight'] for s in (0.6, 0.2))
    assert (a | b).equal(a)  # one draw, cut at two places
    got = {}

    class Watch(Callback):
        order = FrozenLayersCallback.order + 0.01

        def before_batch(self):
            if self.training and self.iter == 0:
                got[self.epoch] = self.opt.state[net[0].weight]['grad_avg'].clone(), net[0].weight.detach().clone()

    quiet_fit(
        learn,
        3,
        cbs=[
            FrozenLayersCallback(
                schedule=[(0, dict(layers='0', share=0.6)), (1, dict(layers='0', share=0.2)), (2, None)]
            ),
            Watch(),
        ],
    )
    assert torch.equal(got[0][1][a], got[1][1][a])
    assert torch.equal(got[1][1][b], got[2][1][b])
    assert (got[1][1] != got[2][1])[a & ~b].all()
    assert (got[1][0][a & ~b] == 0).all()
    assert (got[1][0][~a] != 0).all()
    assert torch.equal(got[0][0][b], got[1][0][b])
    assert (got[2][0][b] == 0).all()


class AfterEachEpoch(Callback):
    "Keeps the weights after each epoch"

    def __init__(self):
        self.snaps = []

    def after_train(self):
        self.snaps.append(snap(self.model))


def test_gradual_unfreezing_and_freeze_out():
    net = mlp(n_in=6, hidden=(8, 8, 8), n_out=3)
    names = [f'block{i}' for i in (1, 2, 3)]
    assert gradual_unfreezing(net) == [(0.0, tuple(names)), (0.25, tuple(names[:2])), (0.5, ('block1',)), (0.75, None)]
    out = freeze_out(net, t0=0.4)
    assert [w for w in out] == [(pytest.approx(0.4 + 0.2 * i), tuple(names[: i + 1])) for i in range(3)]
    assert [w for w, _ in freeze_out(net, t0=0.4, cubed=True)] == [pytest.approx(w**3) for w, _ in out]
    err(lambda: freeze_out(net, t0=1), 't0=1')
    err(lambda: gradual_unfreezing(net, end=0), 'end=0')
    for s, frozen in ((gradual_unfreezing(net), [3, 2, 1, 0]), (freeze_out(net, t0=0.25), [0, 1, 2, 3])):
        learn, watch = learner(net), AfterEachEpoch()
        watch.snaps.append(snap(net))
        quiet_fit(learn, 4, wd=0.1, cbs=[FrozenLayersCallback(schedule=s), watch])
        snaps = watch.snaps
        for a, b, k in zip(snaps, snaps[1:], frozen):
            assert same(a, b) == under(a, *(f'{n}.' for n in names[:k]) or ['none'])


# ---------------------------------------------------------------- in a loop of one's own


@pytest.mark.parametrize(
    'opt',
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    ],
)
def test_context(opt):
    net = small()
    o, x = opt(net.parameters()), torch.randn(9, 6)

    def go(n=3):
        for _ in range(n):
            net.train()
            net(x).square().sum().backward()
            o.step()
            o.zero_grad()

    go(1)
    before = snap(net)
    with temporarily_frozen(net, ['0', '1']), temporarily_frozen(net, '3', share=0.5) as masks:
        go()
    after, m = snap(net), masks['3.weight']
    assert same(before, after) == under(before, '0.', '1.')
    assert torch.equal(after['3.weight'][m], before['3.weight'][m])
    assert (after['3.weight'] != before['3.weight'])[~m].any()
    assert all(p.requires_grad for p in net.parameters())
    assert net[1].training
    assert not net[1]._forward_pre_hooks
    go(1)
    assert not same(after, snap(net))


def test_context_with_a_compiled_model():
    "BatchNorm keeps its statistics, although compiled code does not look for new hooks"
    net = small()
    net[:2].requires_grad_(False)   # a change of this would have it compiled again
    run, x = torch.compile(net, backend='eager'), torch.randn(9, 6)
    run(x)
    with temporarily_frozen(net, ['0', '1']):
        kept = snap(net)
        net.train()
        run(x)
        assert same(kept, snap(net)) >= under(kept, '1.')
    net.train()
    run(x)
    assert not same(kept, snap(net)) & {'1.running_mean'}
    torch._dynamo.reset()


def test_context_with_a_learner():
    net = small()
    learn, before = learner(net), snap(net)
    with temporarily_frozen(learn, ['0', '1'], share=1.0) as cb:
        quiet_fit(learn, 1)
    assert same(before, snap(net)) == under(before, '0.', '1.') and cb not in learn.cbs
    quiet_fit(learn, 1)
    assert not same(before, snap(net)) & {'0.weight'}
    err(lambda: temporarily_frozen(learn, 'nope').__enter__(), 'nope')


def test_frozen_attributes_of_a_learner_are_not_hidden():
    learn = learner(small(), cbs=[FrozenLayersCallback('0'), CachedPrefixCallback()])
    assert callable(learn.freeze)
    assert callable(learn.unfreeze)
    assert callable(learn.freeze_to)
    assert isinstance(learn.frozen_layers, FrozenLayersCallback)


# ---------------------------------------------------------------- work


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=2, max_size=5), st.data())
def test_backward_work(widths, d):
    frozen = d.draw(
        st.lists(st.booleans(), min_size=len(widths) - 1, max_size=len(widths) - 1).filter(lambda f: not all(f))
    )
    net = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(widths, widths[1:])])
    w, n = [a * b for a, b in zip(widths, widths[1:])], 4
    low = frozen.index(False)
    t = training_multiply_adds(
        net,
        torch.randn(n, widths[0]),
        {f'{i}.{k}': True for i, f in enumerate(frozen) if f for k in ('weight', 'bias')},
    )
    assert t.forward[0] == n * sum(w)
    assert t.backward[0] == n * (sum(k for k, f in zip(w, frozen) if not f) + sum(w[low + 1 :]))
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_no_gradient_below():
    net = torchvision.models.resnet18(num_classes=4)
    masks = frozen_masks(net, ['conv1', 'bn1', 'layer1', 'layer2', 'layer3'])
    x = torch.randn(2, 3, 32, 32)
    assert training_multiply_adds(net, x, masks).backward[0] < 0.5 * training_multiply_adds(net, x).backward[0]
    err(lambda: training_multiply_adds(net.requires_grad_(False), x), 'nothing is trained')


def test_counting_leaves_a_model_as_it_is():
    "Also one that cannot be copied, or that steps during its backward pass"
    net, x = small(), torch.randn(9, 6)
    prune.random_unstructured(net[3], 'weight', 0.3)
    net(x)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.data.fill_(7.0))
    before, generator = snap(net), torch.get_rng_state()
    assert training_multiply_adds(net, x).forward[0] > 0
    assert same(before, snap(net)) == set(before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.filterwarnings('ignore:.*torch.jit:DeprecationWarning', 'ignore:.*torch.jit:FutureWarning')
def test_scripted_models_are_refused():
    net = torch.jit.script(small())
    err(lambda: frozen_masks(net, position='front', n=1), 'is a ScriptModule')
    err(lambda: quiet_fit(learner(net, cbs=[FrozenLayersCallback('0')]), 1), 'is a ScriptModule')


def test_plots():
    net = small()
    for cb in (
        FrozenLayersCallback('0'),
        FrozenLayersCallback(schedule=[(0, '0'), (3, None)]),
        FrozenLayersCallback(schedule=[(0.1, '0')]),
    ):
        ax = plot_freezing_plan(cb.plan(net))
        assert len(ax.get_yticklabels()) == 4 and 'frozen' in ax.get_title()


def test_lazy_layers_are_refused():
    m = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    err(lambda: frozen_masks(m, position='front', n=1), 'has no shape yet')

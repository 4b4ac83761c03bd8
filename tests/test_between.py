"The Dirac reset and other interventions between two stages, and three kinds of sparsity"
import copy
import math

import fastai.callback.schedule  # noqa: F401  adds lr_find
import pytest
import torch
import torch.nn.functional as F
import torchvision
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD, Adam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from reinit_nb.between import (
    INTERVENTIONS,
    REGULARIZERS,
    REMEDIES,
    DiracResetCallback,
    HoldZerosCallback,
    InterveneCallback,
    check_intervention,
    dirac,
    dirac_reset,
    intervene,
    intervention_options,
    paper_reset,
    paper_resets,
    remedy,
    set_zero,
    sparse_masks,
    sparsify,
    sparsity,
    sparsity_totals,
)
from reinit_nb.core import ReinitError, Streams
from reinit_nb.frozen import frozen_totals, mutually_frozen
from reinit_nb.models import model
from reinit_nb.path import Before


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))

def state_of(net): return {k: v.clone() for k, v in net.state_dict().items()}
def changed(net, before): return {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}

# ---------------------------------------------------------------- Dirac

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_as_in_torch(g, o, i, kernel):
    assert torch.equal(dirac((g * o, i, *kernel), g), nn.init.dirac_(torch.empty(g * o, i, *kernel), g))

@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 3, 5]), st.booleans())
def test_passes_its_input_on(g, o, i, k, transposed):
    "Of each group, as many channels as there are on both sides; the others are zero"
    x = torch.randn(2, g * i, 6, 6)
    if transposed: y = F.conv_transpose2d(x, dirac((g * i, o, k, k), g), padding=k // 2, groups=g)
    else: y = F.conv2d(x, dirac((g * o, i, k, k), g), padding=k // 2, groups=g)
    both = min(o, i)
    x, y = x.view(2, g, i, 6, 6), y.view(2, g, o, 6, 6)
    assert torch.equal(y[:, :, :both], x[:, :, :both]) and not y[:, :, both:].any()

def test_dense():
    x = torch.randn(3, 4)
    assert torch.equal(x @ dirac((4, 4)).T, x)
    assert torch.equal(x @ dirac((6, 4)).T, F.pad(x, (0, 2)))
    assert torch.equal(x @ dirac((2, 4)).T, x[:, :2])

# ---------------------------------------------------------------- the Dirac reset

@pytest.mark.parametrize('one_d', ['add', 'one', 'keep'])
def test_reset_by_hand(one_d):
    torch.manual_seed(0)
    net = torchvision.models.mobilenet_v2(num_classes=3)
    before = state_of(net)
    log = dirac_reset(net, .4, one_d).set_index('parameter')
    for n, m in net.named_modules():
        if isinstance(m, nn.Conv2d): identity = nn.init.dirac_(torch.empty(m.weight.shape), m.groups)
        elif isinstance(m, nn.Linear): identity = torch.eye(*m.weight.shape)
        else: continue
        torch.testing.assert_close(m.weight.detach(), before[f'{n}.weight'] + .4 * identity)
    for n, p in net.named_parameters():
        want = dict(add=before[n] + .4, one=torch.ones_like(p), keep=before[n])[one_d]
        if p.ndim == 1: torch.testing.assert_close(p.detach(), want)
        assert log.norm_before[n] == pytest.approx(before[n].norm().item(), rel=1e-5)
        assert log.norm_after[n] == pytest.approx(p.norm().item(), rel=1e-5)
    for n, b in net.named_buffers(): assert torch.equal(b, before[n])                  # statistics are no weights
    assert list(log.index) == [n for n, _ in net.named_parameters()]
    assert set(log.kind) <= {'dirac', one_d, 'kept'}

def test_embeddings_are_kept():
    net = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    old = net[0].weight.detach().clone()
    log = dirac_reset(net, 1.).set_index('parameter')
    assert torch.equal(net[0].weight, old)
    assert log.kind.tolist() == ['kept', 'add', 'add', 'dirac', 'add'] and log.changed['0.weight'] == 0

def test_reset_frees_frozen_filters():
    net = model('allcnn', width=.25)
    sparsify(net, 'mutual', .5)
    assert frozen_totals(mutually_frozen(net, (1, 3, 32, 32))).frozen_share[0] > .3
    dirac_reset(net, .1)
    assert frozen_totals(mutually_frozen(net, (1, 3, 32, 32))).frozen[0] == 0

def test_wrong_reset():
    net = nn.Linear(2, 2)
    old = net.weight.detach().clone()
    for s in (math.nan, math.inf, -math.inf, None, '1', True):
        with pytest.raises(ReinitError, match=r's=.* should be a finite number'): dirac_reset(net, s)
    with pytest.raises(ReinitError, match="one_d='on' is not known; did you mean 'one'?"): dirac_reset(net, 1, 'on')
    with pytest.raises(ReinitError, match='model is a str'): dirac_reset('net', 1)
    assert torch.equal(net.weight, old)

def test_tables():
    "Against the text of Tables 6 to 8, typed a second time"
    t = paper_resets()
    assert t.table.value_counts().to_dict() == {'Table 6': 7, 'Table 7': 4, 'Table 8': 2}
    assert list(t.s) == [.2, .1, .4, .5, .2, .4, .4, .05, .01, .05, .05, .01, .01]
    assert list(t.one_d) == ['add', 'add', 'one', 'add', 'add', 'one', 'one', 'one'] + ['add'] * 5
    assert list(t.lr) == [.05] * 7 + [.05, .003, .003, .01, .003, .05]
    assert list(t.decay) == [.95, .97] + [.95] * 5 + [.93, .98, .97, .95, .98, .93]
    assert set(t.wd) == {.001}
    assert list(t.patience) == [40, 40, 60, 40, 40, 40, 40, 20, 25, 10, 20, 20, 20]
    assert list(t.max_epochs) == [200] * 7 + [150] * 6
    assert paper_reset('ImageNet to KMNIST') == dict(s=.01, one_d='add')
    with pytest.raises(ReinitError, match='change='): paper_reset('MNIST')

# ---------------------------------------------------------------- interventions by name

def trained():
    net = model('scnn', c_in=1, size=8, width=.25)
    with torch.no_grad():
        for i, p in enumerate(net.parameters()): p.add_(.01 * (i + 1))
    return net

WHAT_CHANGES = {'none': set(), 'dirac': {1, 2, 3, 4, 'head'}, 'LW': {1, 2, 3, 4, 'head'}, 'FC': {'head'},
                'LLF': {3, 4, 'head'},
                'shrink': {1, 2, 3, 4, 'head'}, 'rescale': {1, 2, 3, 4, 'head'}, 'fresh': {1, 2, 3, 4, 'head'},
                'FIRE': {1, 2, 3, 4, 'head'}, 'DASH': {1, 2, 3, 4, 'head'}}
IMAGES = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 10

@pytest.mark.parametrize('name', INTERVENTIONS)
def test_what_changes(name):
    net = trained()
    before, rng = state_of(net), torch.get_rng_state()
    log = intervene(net, name, 3, data=IMAGES).set_index('parameter')
    touched = {k for k in changed(net, before) if k.endswith('weight') and before[k].ndim > 1}
    parts = {int(k[5]) if k.startswith('block') else 'head' for k in touched}
    assert parts == {p for p in WHAT_CHANGES[name] if p == 'head' or f'block{p}.conv.weight' in before}
    assert {n for n in log.index if log.changed[n]} == changed(net, before) & set(log.index)
    assert torch.equal(torch.get_rng_state(), rng)
    again = trained()
    intervene(again, name, Streams(3), data=IMAGES)
    assert not changed(again, net.state_dict())                       # a number is the seed of streams

@pytest.mark.parametrize('name', INTERVENTIONS)
def test_frozen_parameters_stay(name):
    "With the statistics of their normalizations; the others change as they do without"
    net = model('scnn', c_in=1, size=8, width=.25, norm='batch').train()
    net(IMAGES[0])   # running statistics of its own
    free = copy.deepcopy(net)
    net.block2.requires_grad_(False)
    before = state_of(net)
    log = intervene(net, name, 3, data=IMAGES).set_index('parameter')
    intervene(free, name, 3, data=IMAGES)
    assert not [k for k in changed(net, before) if k.startswith('block2')]
    assert not log.changed[log.index.str.startswith('block2')].any()
    if name == 'DASH': return   # its gradients are those of the trained parameters
    assert {k for k in changed(net, free.state_dict()) if not k.startswith('block2')} == set()

def test_the_dirac_callback_keeps_frozen_parameters():
    net = mlp()
    net[0].requires_grad_(False)
    before = state_of(net)
    log = DiracResetCallback(.2).apply(net).set_index('parameter')
    assert changed(net, before) == {'2.weight', '2.bias'}
    assert log.kind.to_dict() == {'0.weight': 'kept', '0.bias': 'kept', '2.weight': 'dirac', '2.bias': 'add'}
    assert log.changed.tolist()[:2] == [0, 0] and (log.norm_after == log.norm_before).tolist()[:2] == [True, True]

def test_interventions_by_hand():
    before = state_of(trained())
    net = trained()
    intervene(net, 'shrink', shrink=.5, perturb=0.)
    for n, v in net.state_dict().items(): torch.testing.assert_close(v, before[n] * (.5 if v.ndim > 1 else 1))
    net = trained()
    intervene(net, 'rescale', 5)
    fresh = model('scnn', c_in=1, size=8, width=.25)
    intervene(fresh, 'fresh', 5)
    w, old, new = net.block2.conv.weight.detach(), before['block2.conv.weight'], fresh.block2.conv.weight.detach()
    torch.testing.assert_close(w / w.norm(), old / old.norm())
    # the norm of a draw of the same distribution
    assert w.norm() == pytest.approx(new.norm().item(), rel=.1)
    net = trained()
    intervene(net, 'LW', k=2)
    w = net.block1.conv.weight.detach()
    torch.testing.assert_close(w / w.norm(), before['block1.conv.weight'] / before['block1.conv.weight'].norm())

def test_intervention_options():
    assert intervention_options('dirac') == dict(s=.2, one_d='add') and intervention_options('LW') == dict(k=None)
    assert intervention_options('shrink') == dict(shrink=.6, perturb=.1) and intervention_options('fresh') == {}
    net = trained()
    before = state_of(net)
    for name, options, says in (('shrnk', {}, "did you mean 'shrink'"),
                                ('shrink', dict(s=1), 's=1: shrink has no s; it has shrink, perturb'),
                                ('FC', dict(k=1), 'k=1: FC has no k; it has no options'),
                                ('LW', dict(k=99), 'LW: k=99, and the network has blocks 1 to'),
                                ('LW', dict(k=0), 'LW: k=0'),
                                ('LLF', dict(layer='block99'), 'block99'),
                                ('DASH', {}, 'DASH needs data: give some, as in data=dls.train'),
                                ('DASH', dict(data=IMAGES, floor=2), 'floor=2'),
                                ('shrink', dict(shrink=2), 'shrink=2')):
        with pytest.raises(ReinitError, match=says): intervene(net, name, **options)
        if name not in ('shrink', 'DASH') or 's' in options:
            with pytest.raises(ReinitError, match=says): check_intervention(net, name, **options)
    with torch.no_grad(): net.block1.conv.weight.zero_()
    before = state_of(net)
    with pytest.raises(ReinitError, match='block1.conv.weight cannot be rescaled: it has become zero'):
        intervene(net, 'LW')
    assert not changed(net, before)
    with torch.device('meta'): check_intervention(model('scnn', c_in=1, size=8), 'LW', k=1)
    intervene(net, 'dirac', s=None, one_d=None)                       # None: the default

# ---------------------------------------------------------------- callbacks

def learner(net, *cbs, opt=SGD):
    g = torch.Generator().manual_seed(0)
    ds = TensorDataset(torch.randn(20, 5, generator=g), torch.randint(3, (20,), generator=g))
    dls = DataLoaders(DataLoader(ds, 10), DataLoader(ds, 10))
    return Learner(dls, net, loss_func=nn.CrossEntropyLoss(), opt_func=opt, cbs=cbs).remove_cb(ProgressCallback)

def test_before_the_second_task():
    learn = learner(mlp(), DiracResetCallback(.3))
    with learn.no_logging(): learn.fit(2, 0.)
    old = copy.deepcopy(learn.model.state_dict())
    learn.validate()
    learn.get_preds()
    with learn.no_logging(): learn.lr_find(show_plot=False, num_it=20)
    learn.model.load_state_dict(old)
    assert len(learn.dirac_reset.log) == 0
    with learn.no_logging(): learn.fit(2, 0.)
    log = learn.dirac_reset.log
    assert list(log.columns) == ['task', 'parameter', 'kind', 's', 'entries', 'changed', 'norm_before', 'norm_after']
    assert log.task.tolist() == [2] * 4
    # once, not every epoch
    torch.testing.assert_close(learn.model[0].weight.detach(), old['0.weight'] + .3 * torch.eye(6, 5))
    with learn.no_logging(): learn.fit(1, 0.)
    assert learn.dirac_reset.log.task.unique().tolist() == [2, 3]

@pytest.mark.parametrize('opt_state', ['zero', 'keep'])
def test_named_tasks_and_optimizer(opt_state):
    learn = learner(mlp(), DiracResetCallback(.3, 'one', tasks=[1, 3], opt_state=opt_state), opt=Adam)
    seen = []
    with learn.no_logging():
        for _ in range(3):
            learn.fit(1, .01)
            seen.append(max(s['step'] for s in learn.opt.state.values()))
    assert learn.dirac_reset.log.task.unique().tolist() == [1, 3]
    assert seen == ([2, 4, 2] if opt_state == 'zero' else [2, 4, 6])
    for kw, says in ((dict(s=math.nan), 's=nan'), (dict(s=1, tasks=[0]), 'tasks=0'),
                     (dict(s=1, opt_state='slice'), 'opt_state'), (dict(s=1, one_d='x'), 'one_d')):
        with pytest.raises(ReinitError, match=says): DiracResetCallback(**kw)

def test_other_interventions_before_a_task():
    learn = learner(mlp(), InterveneCallback('shrink', seed=4, shrink=.5, perturb=0.))
    before = state_of(learn.model)
    with learn.no_logging():
        learn.fit(1, 0.)
        assert not changed(learn.model, before) and learn.intervene.log.empty
        learn.fit(1, 0.)
    torch.testing.assert_close(learn.model[0].weight.detach(), .5 * before['0.weight'])
    assert learn.intervene.log.changed.tolist() == [30, 0, 18, 0]
    with pytest.raises(ReinitError, match='shrink has no s'): InterveneCallback('shrink', s=1)
    with pytest.raises(ReinitError, match="did you mean 'fresh'"): InterveneCallback('frehs')

@pytest.mark.parametrize('name,options,says', [
    ('fresh', dict(init='foo'), "init='foo' is not known"), ('fresh', dict(seed='a'), "seed='a'"),
    ('dirac', dict(one_d='x'), "one_d='x' is not known"), ('dirac', dict(s='x'), "s='x' should be a finite number"),
    ('shrink', dict(shrink='x'), "shrink='x'"), ('shrink', dict(shrink=3.), 'shrink=3.0'),
    ('shrink', dict(perturb=-1), 'perturb=-1'), ('DASH', dict(floor=3.), 'floor=3.0'),
    ('DASH', dict(decay=0), 'decay=0'),
    ('LW', dict(k='a'), "k='a' should be a whole number"), ('LLF', dict(layer=3), 'layer=3 should be the name'),
    ('fresh', dict(epochs=3), r'epochs=3 should be a list .* such as \[3\]'), ('fresh', dict(tasks=3), 'tasks=3')])
def test_wrong_values_are_refused_at_once(name, options, says):
    with pytest.raises(ReinitError, match=says): InterveneCallback(name, **options)

@pytest.mark.parametrize('name,options,says', [('LW', dict(k=99), 'LW: k=99, and the network has blocks 1 to'),
                                               ('LLF', dict(layer='nope'), 'nope')])
def test_what_the_model_does_not_allow_is_refused_before_it_is_trained(name, options, says):
    net = trained()
    before = state_of(net)
    learn = learner(net, InterveneCallback(name, **options))
    with pytest.raises(ReinitError, match=says), learn.no_logging(): learn.fit(1, .1)
    assert not changed(net, before)

def test_epochs_that_a_fit_does_not_have():
    learn = learner(mlp(), InterveneCallback('fresh', epochs=[1, 4]))
    with pytest.warns(UserWarning, match='nothing happens before epoch 4, as this fit has 2'), learn.no_logging():
        learn.fit(2, .1)
    assert learn.intervene.log.epoch.unique().tolist() == [1]

@pytest.mark.parametrize('name', REMEDIES)
def test_every_remedy_has_a_callback_by_name(name):
    cb = remedy(name)
    if REMEDIES[name] == 'intervention': assert type(cb) is InterveneCallback and cb.intervention == name
    else: assert type(cb) is REGULARIZERS[name]
    with pytest.raises(ReinitError, match='no_such=1'): remedy(name, no_such=1)

@pytest.mark.parametrize('opt', [SGD, Adam])
def test_zeros_are_held(opt):
    net = mlp()
    df, masks = sparsify(net, 'double', .5)
    learn = learner(net, HoldZerosCallback(masks), opt=opt)
    with learn.no_logging(): learn.fit(3, .1, wd=.1)
    for n, m in masks.items(): assert not net.get_parameter(n)[m].any() and net.get_parameter(n)[~m].all()
    for bad, says in (({'0.wait': masks['0.weight']}, "did you mean '0.weight'"),
                      ({'0.weight': torch.ones(2, 2, dtype=bool)}, r'masks: 0.weight has shape \(2, 2\)')):
        with pytest.raises(ReinitError, match=says), learn.no_logging(): learner(mlp(), HoldZerosCallback(bad)).fit(1)

# ---------------------------------------------------------------- sparsity

NETS = dict(mlp=(mlp, (1, 5)),
            allcnn=(lambda: model('allcnn', width=.25), (1, 3, 32, 32)),
            resnet=(lambda: model('resnet18', width=.25), (1, 3, 32, 32)),
            mobilenet=(lambda: model('mobilenet', width=.25), (1, 3, 32, 32)),
            densenet=(lambda: torchvision.models.densenet121(num_classes=3), (1, 3, 64, 64)))

@pytest.mark.parametrize('name', NETS)
def test_mutual_sparsity_is_what_is_counted(name):
    make, shape = NETS[name]
    net = make()
    df, masks = sparsify(net, 'mutual', .4, x=shape)
    t = frozen_totals(mutually_frozen(net, shape))
    assert t.frozen[0] > 0
    if name not in ('mlp', 'densenet'): assert abs(t.frozen_share[0] - .4) < .1
    for n, m in masks.items(): assert not net.get_parameter(n)[m].any()
    zeros = dict(zip(df.parameter, df.zeros))
    for n, m in masks.items():
        if m.ndim > 1: assert zeros[n] == int(m.sum())                            # nothing else was touched
    if name != 'densenet': assert t.distinct[0] == sum(int(m.sum()) for m in masks.values())

def test_levels():
    net = model('allcnn', width=.125)
    before = state_of(net)
    sparsify(net, 'mutual', 0.)
    assert not changed(net, before)
    sparsify(net, 'mutual', 1.)
    assert frozen_totals(mutually_frozen(net, (1, 3, 32, 32))).frozen_share[0] == 1 and not net.block3.conv.weight.any()
    net = model('allcnn', width=.5)
    t = sparsity_totals(sparsify(net, 'mutual', .4)[0]).set_index('of')
    assert abs(t.sparsity['weights'] - (1 - .6**2)) < .06                          # and not the .8 that is stated
    t = sparsity_totals(sparsify(model('allcnn', width=.5), 'double', .8)[0]).set_index('of')
    assert abs(t.sparsity['weights'] - .8) < .01 and t.entries.sum() == sum(p.numel() for p in net.parameters())

def test_mono_is_double_plus_dirac():
    a, b = model('allcnn', width=.25), model('allcnn', width=.25)
    _, double = sparsify(a, 'double', .9, 3)
    _, mono = sparsify(b, 'mono', .9, 3)
    dirac_reset(a, 1.)
    assert not changed(a, b.state_dict())
    for n, m in mono.items():
        d = nn.init.dirac_(torch.empty(m.shape))
        assert torch.equal(m, double[n] & (d == 0)) and not b.get_parameter(n)[m].any()
    assert mutually_frozen(b, (1, 3, 32, 32)).frozen.sum() == 0

def test_grouped_masks():
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.ReLU(),
                        nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    for seed in range(4):
        n = copy.deepcopy(net)
        _, masks = sparsify(n, 'mutual', .5, seed, x=(1, 4, 9, 9))
        assert frozen_totals(mutually_frozen(n, (1, 4, 9, 9))).distinct[0] == sum(int(m.sum()) for m in masks.values())

def test_streams_and_seeds():
    net, rng = mlp(), torch.get_rng_state()
    a, b, c = (sparse_masks(net, 'double', .5, s) for s in (1, Streams(1), 2))
    assert all(torch.equal(a[n], b[n]) for n in a) and any(not torch.equal(a[n], c[n]) for n in a)
    assert torch.equal(torch.get_rng_state(), rng)
    m = sparse_masks(net, 'double', .5, one_d=True)
    assert set(m) == set(dict(net.named_parameters())) and set(a) == {'0.weight', '2.weight'}

def test_small_counts():
    net = nn.Linear(3, 2)
    with torch.no_grad(): net.weight.copy_(torch.tensor([[0, 5e-5, 1], [2, -5e-5, 1e-3]]))
    r = sparsity(net).iloc[0]
    assert (r.zeros, r.small, r.sparsity) == (1, 3, 1 / 6)
    set_zero(net, {'weight': torch.ones(2, 3, dtype=bool)})
    assert sparsity(net).zeros[0] == 6

def test_wrong_sparsity():
    net = mlp()
    before = state_of(net)
    for q in (-.1, 1.1, math.nan, 'half'):
        with pytest.raises(ReinitError, match='q='): sparsify(net, 'double', q)
    with pytest.raises(ReinitError, match="did you mean 'mutual'?"): sparsify(net, 'mutually', .5)
    with pytest.raises(ReinitError, match='no pair of layers'): sparsify(nn.Linear(3, 2), 'mutual', .5)
    assert not changed(net, before)


def test_lazy_layers_are_refused():
    m = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ReinitError, match='has no shape yet'): dirac_reset(m)

def test_dirac_reset_of_normalization_weights():
    "gamma: weights of normalization layers become 1, and biases, also those of normalizations, stay"
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.weird, self.gamma = nn.Linear(4, 4), nn.LayerNorm(4)   # names do not decide
            self.norm = nn.Linear(4, 4)
            self.batch, self.plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
        def forward(self, x): return self.plain(self.batch(self.norm(self.gamma(self.weird(x)))))
    net = Named()
    with torch.no_grad():
        for p in net.parameters(): p.normal_()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    log = dirac_reset(net, .3, 'gamma').set_index('parameter')
    after = dict(net.named_parameters())
    for n in ('gamma.weight', 'batch.weight'): assert torch.equal(after[n], torch.ones(4))
    for n in ('gamma.bias', 'batch.bias', 'weird.bias', 'norm.bias'): assert torch.equal(after[n], before[n])
    for n in ('weird.weight', 'norm.weight'): assert torch.allclose(after[n], before[n] + .3 * torch.eye(4))
    assert log.kind.to_dict() == {n: 'gamma' if n in ('gamma.weight', 'batch.weight') else 'dirac' if 'weight' in n
                                  else 'kept' for n in before}
    bare = nn.LayerNorm(3)
    nn.init.zeros_(bare.weight)
    dirac_reset(nn.Sequential(nn.Linear(3, 3), bare), .1, 'gamma')
    assert torch.equal(bare.weight, torch.ones(3)) and Before('dirac', one_d='gamma').one_d == 'gamma'

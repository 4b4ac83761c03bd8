"`reinit_nb.init`: reset gives every layer its initial values again"
import copy
import math
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torchvision.models as tv
from example_models import mlp, seeded, small_vit
from torch import nn
from torch.nn.utils import prune

from reinit_nb.blocks import blocks
from reinit_nb.core import ReinitError, Streams
from reinit_nb.fixed_norm import FixedNorm, add_norms
from reinit_nb.init import RESET_RULES, check_reset, drawn_weights, reset, reset_rule


def reset_changes_everything(m):
    "After a reset nothing of what was there is left, and the parameters are the same objects"
    with torch.no_grad():
        for t in m.state_dict().values():
            if t.is_floating_point(): t.add_(7.25)
    old = {k: v.clone() for k, v in m.state_dict().items()}
    ids, state = [id(p) for p in m.parameters()], torch.get_rng_state()
    reset(m, streams=3)
    kept = [k for k, v in m.state_dict().items() if v.is_floating_point() and (v == old[k]).any()]
    assert not kept and [id(p) for p in m.parameters()] == ids
    assert all(v.isfinite().all() for v in m.state_dict().values())
    assert torch.equal(torch.get_rng_state(), state)

@pytest.mark.parametrize('name', ['resnet18', 'mobilenet_v3_small', 'densenet121', 'efficientnet_b0', 'convnext_tiny',
                                  'swin_t', 'vit'])
def test_reset_torchvision(name):
    m = small_vit() if name == 'vit' else tv.get_model(name, num_classes=5)
    reset_changes_everything(m)

LAYERS = dict(
    conv1=lambda: nn.Conv1d(20, 30, 5), conv2=lambda: nn.Conv2d(20, 30, 3), conv3=lambda: nn.Conv3d(8, 9, 3),
    up=lambda: nn.ConvTranspose2d(20, 30, 3), linear=lambda: nn.Linear(50, 60),
    embedding=lambda: nn.Embedding(90, 50, padding_idx=0), bag=lambda: nn.EmbeddingBag(90, 50),
    bilinear=lambda: nn.Bilinear(12, 13, 14), bn=lambda: nn.BatchNorm2d(30),
    plain_bn=lambda: nn.BatchNorm1d(30, affine=False), ln=lambda: nn.LayerNorm((3, 4)), gn=lambda: nn.GroupNorm(2, 8),
    rms=lambda: nn.RMSNorm(9), inorm=lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True),
    rnn=lambda: nn.RNN(20, 30), lstm=lambda: nn.LSTM(20, 30, 2, bidirectional=True), gru=lambda: nn.GRU(20, 30),
    cell=lambda: nn.LSTMCell(20, 30), prelu=lambda: nn.PReLU(4), attention=lambda: nn.MultiheadAttention(40, 4),
    attention2=lambda: nn.MultiheadAttention(40, 4, kdim=20, vdim=30, add_bias_kv=True),
    encoder=lambda: nn.TransformerEncoderLayer(32, 4, 64), fixed=lambda: FixedNorm(2., 3.))

@pytest.mark.parametrize('name', LAYERS)
def test_reset_is_like_new(name):
    "What a reset gives has the distribution of a new layer"
    new, m = seeded(LAYERS[name]), seeded(LAYERS[name], 1)
    if name == 'fixed': new = FixedNorm()
    with torch.no_grad():
        for t in m.state_dict().values(): t.mul_(5).add_(3) if t.is_floating_point() else t.add_(4)
    reset(m, streams=1)
    for (k, a), b in zip(new.state_dict().items(), m.state_dict().values(), strict=True):
        if a.numel() < 2 or a.float().std() == 0: assert torch.equal(a, b) or name == 'attention2', k
        else:
            assert not torch.equal(a, b) and abs(b.std() / a.std() - 1) < 4 / math.sqrt(a.numel()), k
            assert abs(b.mean() - a.mean()) < 6 * a.std() / math.sqrt(a.numel()), k

def test_seed_decides_and_streams_move_on():
    m, s = nn.Linear(9, 9), Streams(5)
    a, b = (reset(m, streams=s).weight.clone() for _ in range(2))
    assert not torch.equal(a, b)
    assert torch.equal(reset(m, streams=Streams(5)).weight, a)
    assert torch.equal(reset(m, streams=5).weight, a)
    # only the reinit stream is used
    assert torch.equal(torch.rand(3, generator=s.init), torch.rand(3, generator=Streams(5).init))


# computed with version 0.0.1
RESET_11 = [-0.024578, -0.256195, -0.564189, 0.567927, -0.34814, 0.127532]
RESET_11_HE = [-0.155844, -1.09909, -1.552912, 0.076783]


def test_draws_never_change():
    m = reset(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), streams=11)
    values = [round(v, 6) for v in m[0].weight.flatten().tolist()]
    assert values == RESET_11, values
    values = [round(v, 6) for v in reset(m, 'he', 11)[2].weight.flatten().tolist()]
    assert values == RESET_11_HE, values

def test_same_layers_get_different_weights():
    m = reset(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    assert not torch.equal(m[0].weight, m[1].weight) and not torch.equal(m[1].weight, m[2].weight)

def test_initializer():
    seen = []
    def init(shape, g):
        seen.append(shape)
        return torch.full(shape, 7.)
    m = nn.ModuleDict(dict(a=nn.Conv2d(2, 3, 3), b=nn.LSTM(2, 3), c=nn.Embedding(4, 5), d=nn.LayerNorm((2, 2)),
                           e=nn.MultiheadAttention(4, 2), f=nn.BatchNorm1d(3)))
    reset(m, init)
    assert all((p == 7).all() == (p.ndim > 1 and n.split('.')[0] not in 'cd') for n, p in m.named_parameters())
    assert len(seen) == 5
    with pytest.raises(ReinitError, match='init returns'): reset(nn.Linear(2, 3), lambda s, g: torch.ones(1))
    with pytest.raises(ReinitError, match="init='hee' is not known"): reset(nn.Linear(2, 3), 'hee')

def test_reset_by_block():
    m = small_vit()
    b = blocks(m)
    def changed(f):
        with torch.no_grad():
            for t in m.state_dict().values(): t.add_(1)
        old = copy.deepcopy(m.state_dict())
        assert f() is b
        return {k for k, v in m.state_dict().items() if not torch.equal(v, old[k])}
    for k in (1, 3, 'head'): assert changed(partial(b.reset, k)) == set(b.params(k))
    for k in range(4): assert changed(partial(b.reset_above, k)) == set(b.above(k))
    with pytest.raises(ReinitError, match='k=4 should be'): b.reset_above(4)
    add_norms(b)
    norm = next(o for o in m.modules() if isinstance(o, FixedNorm))
    norm.mu.fill_(3.)
    b.reset(2)
    assert norm.mu == 3
    b.reset(1)
    assert norm.mu == 0

def test_frozen_parameters_stay_frozen():
    m = mlp()
    m[0].weight.requires_grad_(False)
    reset(m)
    assert [p.requires_grad for p in m.parameters()] == [False] + [True] * 5
    assert all(p.grad_fn is None for p in m.parameters())

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

def test_no_rule_is_an_error_and_nothing_changes():
    m = nn.Sequential(OrderedDict(fc=nn.Linear(3, 3), odd=Odd()))
    old = copy.deepcopy(m.state_dict())
    with pytest.raises(ReinitError, match=r'net.odd \(Odd\) owns scale, .* @reset_rule\(Odd\)'): reset(m, name='net')
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('b', torch.ones(2))
    with pytest.raises(ReinitError, match='Buffered.* owns b'): reset(Buffered())
    class Bad(Odd): pass
    @reset_rule(Bad)
    def forgets(m): pass
    m2 = nn.Sequential(Bad(), nn.Linear(3, 3))
    old2, state = copy.deepcopy(m2.state_dict()), torch.get_rng_state()
    with pytest.raises(ReinitError, match='does not set scale'): reset(m2)
    for a, o in ((m, old), (m2, old2)): assert all(torch.equal(v, o[k]) for k, v in a.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)

def test_rule_of_a_parent_class():
    class Base(Odd): pass
    @reset_rule(Base)
    def rule(m): m.scale.fill_(4.)
    class Child(Base): pass
    assert (reset(Child()).scale == 4).all()
    class Own(Base):
        def reset_parameters(self): nn.init.constant_(self.scale, 5.)   # nearer than the rule of its parent
    assert (reset(Own()).scale == 5).all()

def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # deprecated, and still in use
        return nn.utils.weight_norm(layer)


def old_spectral_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return nn.utils.spectral_norm(layer)


class Forgetful(nn.Module):
    "Its own rule does not set all of its parameters"
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))
    def reset_parameters(self): nn.init.ones_(self.a)


def test_incomplete_rules_are_found_before_anything_changes():
    reset_rule(Forgetful)(lambda m: m.reset_parameters())
    try:
        m = nn.Sequential(nn.Linear(3, 3), Forgetful())
        old = copy.deepcopy(m.state_dict())
        with pytest.raises(ReinitError, match=r'the rule for 1 \(Forgetful\) does not set b'): check_reset(m)
        assert all(torch.equal(v, old[k]) for k, v in m.state_dict().items())
    finally: RESET_RULES.pop(Forgetful)


@pytest.mark.parametrize('wrap', [old_weight_norm, old_spectral_norm, nn.utils.parametrizations.weight_norm,
                                  nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal])
def test_computed_weights_are_refused_by_name(wrap):
    m = nn.Sequential(nn.Linear(3, 3), wrap(nn.Linear(3, 3)))
    old = copy.deepcopy(m.state_dict())
    for refused in (reset, check_reset, drawn_weights, lambda m: reset(m, 'he')):
        with pytest.raises(ReinitError, match=r'^1 \(.*Linear\) computes a weight from other parameters.*remove'):
            refused(m)
    assert all(torch.equal(v, old[k]) for k, v in m.state_dict().items())
    reset(m, only=lambda name: name == '0')


@pytest.mark.parametrize('amount', [.3, 2])
def test_pruned_weights_are_refused_by_name(amount):
    m = nn.Sequential(nn.Linear(3, 3), prune.l1_unstructured(nn.Linear(3, 3), 'weight', amount))
    old = copy.deepcopy(m.state_dict())
    for refused in (reset, check_reset, lambda m: reset(m, 'he')):
        with pytest.raises(ReinitError, match=r"^1 \(Linear\) is pruned.*prune\.remove\(module, 'weight'\)"): refused(m)
    assert all(torch.equal(v, old[k]) for k, v in m.state_dict().items())
    reset(m, only=lambda name: name == '0')
    prune.remove(m[1], 'weight')
    reset(m)


@pytest.mark.filterwarnings('ignore:.*torch.jit:DeprecationWarning', 'ignore:.*torch.jit:FutureWarning')
def test_scripted_layers_are_refused_by_name():
    with pytest.raises(ReinitError, match=r'^1 \(.*ScriptModule\) has no initial values'):
        reset(nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))))


def test_layers_without_a_shape():
    with pytest.raises(ReinitError, match='no shape yet'): reset(nn.LazyLinear(3))


def test_complex_weights_stay_complex():
    m = nn.Linear(200, 100, dtype=torch.complex64)
    reset(m, 'he')
    assert m.weight.is_complex()
    assert abs(m.weight.real.std() / m.weight.imag.std() - 1) < .05
    assert abs(m.weight.abs().square().mean() / (2 / 200) - 1) < .05
    reset(m, lambda shape, g: torch.ones(shape, dtype=torch.complex64))
    assert (m.weight == 1).all()


# ---------------------------------------------------------------- rules that are learned

class Learned(nn.Module):
    "A layer with an init method of its own, which also reaches into its child"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.child = nn.Linear(3, 3)
    def init_weights(self, gain=2.):
        nn.init.constant_(self.scale, gain)
        nn.init.zeros_(self.child.weight)


def test_init_methods_of_modules_are_used():
    m = Learned()
    with torch.no_grad(): m.scale.add_(1)
    reset(m)
    assert (m.scale == 2).all()
    assert m.child.weight.any()   # reset by its own rule, not by the method of its parent


class Whole(nn.Module):
    "A model that initializes its modules, as those of transformers do"
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), Odd())
        self.token = nn.Parameter(torch.ones(3))
    def init_weights(self): self.apply(self._init_weights)
    def _init_weights(self, module):
        if isinstance(module, Odd): module.scale.data = torch.full((3,), 4.)
        if isinstance(module, nn.Linear): module.weight.data.zero_()
        if isinstance(module, Whole): module.token.data.fill_(5.)


def test_init_methods_of_models_are_used():
    m = Whole()
    check_reset(m)
    assert (m.token == 1).all() and (m.inner[1].scale == 1).all()   # only tried out
    reset(m)
    assert (m.token == 5).all() and (m.inner[1].scale == 4).all()
    assert m.inner[0].weight.any()   # PyTorch's own rule comes first


class Careless(Whole):
    def _init_weights(self, module): pass


def test_init_methods_that_forget_something_do_not_count():
    m = Careless()
    old = copy.deepcopy(m.state_dict())
    for refused in (reset, check_reset):
        with pytest.raises(ReinitError, match=r'inner.1 \(Odd\) owns scale, and no rule'): refused(m)
    assert all(torch.equal(v, old[k]) for k, v in m.state_dict().items())


TIMM = ['resnet18', 'vit_tiny_patch16_224', 'convnext_atto', 'mobilenetv3_small_050', 'mixer_s32_224', 'regnety_002',
        'resmlp_12_224', 'ghostnet_100', 'convnextv2_atto', 'poolformer_s12', 'xcit_nano_12_p16_224',
        'edgenext_xx_small', 'coat_tiny']


@pytest.mark.parametrize('name', TIMM)
def test_reset_timm(name):
    timm = pytest.importorskip('timm', reason='timm is not installed: its models are not checked')
    m = seeded(lambda: timm.create_model(name, pretrained=False, num_classes=7))
    reset_changes_everything(m)


def test_learned_values_are_those_of_a_new_model():
    timm = pytest.importorskip('timm')
    new, m = (seeded(lambda: timm.create_model('convnextv2_atto', num_classes=7)) for _ in range(2))
    with torch.no_grad():
        for p in m.parameters(): p.add_(1)
    reset(m)
    for name, p in new.named_parameters():
        if 'grn' in name: assert torch.equal(dict(m.named_parameters())[name], p)


def test_lazy_layers_have_no_weights_to_draw():
    "A method that would leave them out without a word refuses instead"
    m = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ReinitError, match=r'0 \(LazyLinear\) has no shape yet'): drawn_weights(m)
    m(torch.ones(1, 3))
    assert list(drawn_weights(m)) == ['0.weight', '2.weight']

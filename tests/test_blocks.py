"Blocks, reset and fixed norms, on models that other people wrote"
import copy
import math
import pickle
import re
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
import torchvision.models as tv
from torch import nn

from reinit_nb.blocks import (
    NORM,
    FixedNorm,
    add_norms,
    blocks,
    fold_norms,
    insert_after,
    norms,
    norms_table,
    remove_norms,
    reset,
    reset_rule,
    trace,
)
from reinit_nb.core import ReinitError, Streams


def seeded(f, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return f()

def image(n=2, size=64, c=3): return torch.randn(n, c, size, size, generator=Streams(0).noise)
def small_vit(): return tv.VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)
def small_mobilenet(): return tv.MobileNetV2(num_classes=5, width_mult=.25)
def named(): return nn.Sequential(OrderedDict(
    block1=nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()),
    block2=nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU()), head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))))
def mlp(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

def check_partition(model, b):
    "Every parameter is in exactly one part, and every module name is one of the model's"
    got = [n for part in b.parts for n in part.params]
    assert len(set(got)) == len(got) and set(got) == set(dict(model.named_parameters()))
    mods = dict(model.named_modules(remove_duplicate=False))
    assert all(m in mods for part in b.parts for m in part.modules)
    assert len(set(b.names)) == len(b) > 0 and b.head.params
    for k in range(len(b) + 1):
        low, high = b.upto(k), b.above(k)
        assert not set(low) & set(high) and len(low) + len(high) == len(got)

# ---------------------------------------------------------------- which blocks

ZOO = dict(alexnet=5, vgg11=8, vgg16=13, vgg16_bn=13, resnet18=8, resnet50=16, wide_resnet50_2=16, mobilenet_v2=17, mobilenet_v3_small=11, mobilenet_v3_large=15,
           densenet121=4, efficientnet_b0=16, efficientnet_v2_s=40, convnext_tiny=18, vit_b_16=12, swin_t=12, squeezenet1_0=8,
           shufflenet_v2_x0_5=16, mnasnet0_5=16)

@pytest.mark.parametrize('name', ZOO)
def test_torchvision(name):
    with torch.device('meta'): m = tv.get_model(name)
    b = blocks(m)
    assert len(b) == ZOO[name], b.names
    check_partition(m, b)

HEADS = dict(alexnet='classifier.1.weight classifier.4.weight classifier.6.weight', resnet18='fc.weight', densenet121='classifier.weight',
             vit_b_16='encoder.ln.weight heads.head.weight', convnext_tiny='classifier.0.weight classifier.2.weight',
             mobilenet_v3_small='classifier.0.weight classifier.3.weight')

@pytest.mark.parametrize('name', HEADS)
def test_heads(name):
    with torch.device('meta'): m = tv.get_model(name)
    assert [n for n in blocks(m).head.params if n.endswith('weight')] == HEADS[name].split()

def test_stem_and_tokens_are_in_the_first_block():
    assert {'class_token', 'encoder.pos_embedding', 'conv_proj.weight'} <= set(blocks(small_vit()).params(1))
    with torch.device('meta'): m = tv.resnet50()
    assert blocks(m)[1].params[:2] == ['conv1.weight', 'bn1.weight'] and blocks(m)[16].modules == ['layer4.2']

TIMM = dict(resnet18=8, vit_tiny_patch16_224=12, convnext_atto=12, mobilenetv3_small_050=11, mixer_s32_224=8, regnety_002=13, resmlp_12_224=12, ghostnet_100=16)

@pytest.mark.parametrize('name', TIMM)
def test_timm(name):
    timm = pytest.importorskip('timm', reason='timm is not installed: its models are not checked')
    m = seeded(lambda: timm.create_model(name, pretrained=False, num_classes=7))
    b = blocks(m)
    assert len(b) == TIMM[name], b.names
    check_partition(m, b)
    reset_changes_everything(m)

@pytest.mark.parametrize('arch,K', [(tv.resnet18, 8), (tv.alexnet, 5), (tv.mobilenet_v3_small, 11)])
def test_fastai_bodies(arch, K):
    from fastai.vision.learner import create_vision_model
    m = seeded(lambda: create_vision_model(arch, 5, pretrained=False))
    b = blocks(m)
    assert len(b) == K and all(o.startswith('1.') for o in b.head.modules) and all(o.startswith('0.') for part in b for o in part.modules)
    check_partition(m, b)

@pytest.mark.parametrize('make,K', [(mlp, 2), (named, 2), (small_vit, 3), (small_mobilenet, 17),
    (lambda: nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 5), nn.Linear(5, 2)), 2),
    (lambda: nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4), nn.Linear(8, 2)), 4),
    (lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)], nn.Linear(4, 2)), 3)])
def test_own_models(make, K):
    m = make()
    assert len(blocks(m)) == K
    check_partition(m, blocks(m))
    w = nn.DataParallel(m)
    assert blocks(w).names == ['module.' + n for n in blocks(m).names]
    check_partition(w, blocks(w))

def test_functional_forward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3)
            self.fc1, self.fc2 = nn.Linear(5 * 36, 8), nn.Linear(8, 3)
        def forward(self, x):
            x = self.pool(self.conv2(self.pool(self.conv1(x).relu())).relu())
            return self.fc2(self.fc1(x.flatten(1)).relu())
    m = Net()
    b = blocks(m, x=(1, 3, 30, 30))
    assert b.names == ['conv1', 'conv2'] and b.head.modules == ['fc1', 'fc2']
    assert [part.last for part in b] == ['conv1', 'conv2']   # not the pool, which is called twice
    assert b.table()['output'].tolist() == ['4×28×28', '5×12×12', '3']

class Tuned(nn.Module):
    "A backbone and a new head"
    def __init__(self, backbone, n):
        super().__init__()
        self.backbone, self.drop, self.out = backbone, nn.Dropout(), nn.Linear(n, 2)
    def forward(self, x): return self.out(self.drop(self.backbone(x)))

@pytest.mark.parametrize('make,K', [(tv.resnet18, 8), (tv.vgg11, 8), (tv.vit_b_16, 12), (tv.convnext_tiny, 18)])
def test_model_inside_a_model(make, K):
    with torch.device('meta'): m = Tuned(make(), 1000)
    b = blocks(m)
    assert len(b) == K and b.names == ['backbone.' + n for n in blocks(m.backbone).names] and b.head.modules[-1] == 'out'
    check_partition(m, b)
    assert blocks(m, ['backbone']).names == ['backbone']

def test_a_single_block_stays_whole():
    m = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2))
    assert blocks(m).names == ['0']
    assert blocks(nn.Sequential(nn.Conv2d(3, 64, 1), tv.resnet.BasicBlock(64, 64), nn.Flatten(), nn.Linear(64, 2))).names == ['1']

class Reversed(nn.Module):
    "Registered in another order than called, with a part that is never called"
    def __init__(self):
        super().__init__()
        self.fc, self.c, self.b, self.a, self.aux = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 9)
    def forward(self, x): return self.fc(self.c(self.b(self.a(x))))

def test_order_of_execution():
    m = Reversed()
    assert blocks(m).names != ['a', 'b', 'c']
    b = blocks(m, x=(1, 4))
    assert b.names == ['a', 'b', 'c'] and b.head.modules == ['fc', 'aux']
    check_partition(m, b)

def test_auxiliary_heads():
    with torch.device('meta'): m = tv.googlenet(weights=None, init_weights=False)
    m = m.to_empty(device='cpu')
    b = blocks(m, x=(1, 3, 64, 64))
    assert len(b) == 9 and b.head.modules == ['fc', 'aux1', 'aux2']

def test_looking_leaves_no_trace():
    m = named().train()
    m.block1[1].eval()
    before, state, modes = copy.deepcopy(m.state_dict()), torch.get_rng_state(), [o.training for o in m.modules()]
    blocks(m, x=image(2, 16)).table((1, 3, 20, 20))
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items()) and torch.equal(torch.get_rng_state(), state)
    assert [o.training for o in m.modules()] == modes and not any(o._forward_hooks for o in m.modules())
    with pytest.raises(ReinitError, match=r'does not run on an input of shape \(1, 5, 8, 8\)'): blocks(m, x=(1, 5, 8, 8))
    assert not any(o._forward_hooks for o in m.modules()) and [o.training for o in m.modules()] == modes

# ---------------------------------------------------------------- named by the user

def test_names_patterns_functions():
    with torch.device('meta'): m = tv.resnet18()
    stages = ['layer1', 'layer2', 'layer3', 'layer4']
    for spec in (stages, 'layer?', r'layer\d', re.compile(r'layer\d'), lambda n, m: n in stages, ['layer[12]', 'layer3', 'layer4']):
        b = blocks(m, spec)
        assert b.names == stages and b.head.modules == ['fc'] and b[1].modules == ['conv1', 'bn1', 'layer1']
        check_partition(m, b)
    b = blocks(m, ['layer1.1', 'layer2'])
    assert b['layer1.1'].modules == ['conv1', 'bn1', 'layer1.0', 'layer1.1'] and b.head.modules == ['layer3.0', 'layer3.1', 'layer4.0', 'layer4.1', 'fc']
    check_partition(m, b)

def test_deep_names():
    with torch.device('meta'): m = tv.resnet18()
    b = blocks(m, lambda n, m: isinstance(m, nn.Conv2d) and 'downsample' not in n)
    assert len(b) == 17
    check_partition(m, b)

@pytest.mark.parametrize('make', [lambda: tv.vgg11(), lambda: tv.alexnet()])
def test_named_layers_keep_their_activations(make):
    with torch.device('meta'): m = make()
    a, b = blocks(m), blocks(m, lambda n, m: isinstance(m, nn.Conv2d))
    assert [p.modules for p in a.parts] == [p.modules for p in b.parts]

def test_wrong_names():
    m = named()
    for spec, msg in ((['blok1'], "did you mean 'block1'"), ('nothing*', 'Its modules: block1, block2, head'), ('(', 'named or matched'), (['block1', 'head'], 'nothing comes after'),
                     (lambda n, m: False, 'no block')):
        with pytest.raises(ReinitError, match=msg.replace('(', r'\(')): blocks(m, spec)
    for k in (0, 3, 1.5, 'blck1'):
        with pytest.raises(ReinitError): blocks(m)[k]
    for bad in (nn.ReLU(), nn.Linear(2, 2), nn.Sequential(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())):
        with pytest.raises(ReinitError, match='no two layers'): blocks(bad)
    with pytest.raises(ReinitError, match='not a model'): blocks('resnet18')

def test_tied():
    m = mlp()
    m[2].weight = m[0].weight
    with pytest.raises(ReinitError, match="'0.weight' in block '0' and '2.weight' in block '2'"): blocks(m)
    assert len(blocks(nn.Sequential(nn.Sequential(*m[:3]), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)), ['0', '2'])) == 2   # tied within a block is fine

def test_table():
    m = named()
    b = blocks(m)
    t = b.table(x=(1, 3, 16, 16))
    assert list(t.columns) == ['block', 'modules', 'parameters', 'share', 'output'] and list(t['block']) == ['block1', 'block2', 'head']
    assert t['parameters'].sum() == sum(p.numel() for p in m.parameters()) and abs(t['share'].sum() - 1) < 1e-9
    assert t['output'].tolist() == ['4×14×14', '6×6×6', '5'] and 'block2' in repr(b) and '<table' in b._repr_html_()

# ---------------------------------------------------------------- reset

def reset_changes_everything(m):
    "After a reset nothing of what was there is left, and the parameters are the same objects"
    with torch.no_grad():
        for t in m.state_dict().values(): t.add_(7.25) if t.is_floating_point() else None
    old, ids, state = {k: v.clone() for k, v in m.state_dict().items()}, [id(p) for p in m.parameters()], torch.get_rng_state()
    reset(m, streams=3)
    kept = [k for k, v in m.state_dict().items() if v.is_floating_point() and (v == old[k]).any()]
    assert not kept and [id(p) for p in m.parameters()] == ids
    assert all(v.isfinite().all() for v in m.state_dict().values()) and torch.equal(torch.get_rng_state(), state)

@pytest.mark.parametrize('name', ['resnet18', 'mobilenet_v3_small', 'densenet121', 'efficientnet_b0', 'convnext_tiny', 'swin_t', 'vit'])
def test_reset_torchvision(name):
    m = small_vit() if name == 'vit' else tv.get_model(name, num_classes=5)
    reset_changes_everything(m)

LAYERS = dict(conv1=lambda: nn.Conv1d(20, 30, 5), conv2=lambda: nn.Conv2d(20, 30, 3), conv3=lambda: nn.Conv3d(8, 9, 3), up=lambda: nn.ConvTranspose2d(20, 30, 3), linear=lambda: nn.Linear(50, 60),
              embedding=lambda: nn.Embedding(90, 50, padding_idx=0), bag=lambda: nn.EmbeddingBag(90, 50), bilinear=lambda: nn.Bilinear(12, 13, 14), bn=lambda: nn.BatchNorm2d(30),
              plain_bn=lambda: nn.BatchNorm1d(30, affine=False), ln=lambda: nn.LayerNorm((3, 4)), gn=lambda: nn.GroupNorm(2, 8), rms=lambda: nn.RMSNorm(9),
              inorm=lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True), rnn=lambda: nn.RNN(20, 30), lstm=lambda: nn.LSTM(20, 30, 2, bidirectional=True),
              gru=lambda: nn.GRU(20, 30), cell=lambda: nn.LSTMCell(20, 30), prelu=lambda: nn.PReLU(4), attention=lambda: nn.MultiheadAttention(40, 4),
              attention2=lambda: nn.MultiheadAttention(40, 4, kdim=20, vdim=30, add_bias_kv=True), encoder=lambda: nn.TransformerEncoderLayer(32, 4, 64), fixed=lambda: FixedNorm(2., 3.))

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
    assert not torch.equal(a, b) and torch.equal(reset(m, streams=Streams(5)).weight, a) and torch.equal(reset(m, streams=5).weight, a)
    assert torch.equal(torch.rand(3, generator=s.init), torch.rand(3, generator=Streams(5).init))   # only the reinit stream is used

def test_same_layers_get_different_weights():
    m = reset(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    assert not torch.equal(m[0].weight, m[1].weight) and not torch.equal(m[1].weight, m[2].weight)

def test_initializer():
    seen = []
    def init(shape, g): seen.append(shape); return torch.full(shape, 7.)
    m = reset(nn.ModuleDict(dict(a=nn.Conv2d(2, 3, 3), b=nn.LSTM(2, 3), c=nn.Embedding(4, 5), d=nn.LayerNorm((2, 2)), e=nn.MultiheadAttention(4, 2), f=nn.BatchNorm1d(3))), init)
    assert all((p == 7).all() == (p.ndim > 1 and n.split('.')[0] not in 'cd') for n, p in m.named_parameters())
    assert len(seen) == 5
    with pytest.raises(ReinitError, match='gives'): reset(nn.Linear(2, 3), lambda s, g: torch.ones(1))
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
    for k in (1, 3, 'head'): assert changed(lambda: b.reset(k)) == set(b.params(k))
    for k in range(4): assert changed(lambda: b.reset_above(k)) == set(b.above(k))
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
    assert [p.requires_grad for p in m.parameters()] == [False] + [True] * 5 and all(p.grad_fn is None for p in m.parameters())

class Odd(nn.Module):
    def __init__(self): super().__init__(); self.scale = nn.Parameter(torch.ones(3))

def test_no_rule_is_an_error_and_nothing_changes():
    m = nn.Sequential(OrderedDict(fc=nn.Linear(3, 3), odd=Odd()))
    old = copy.deepcopy(m.state_dict())
    with pytest.raises(ReinitError, match=r'net.odd \(Odd\) owns scale .* @reset_rule\(Odd\)'): reset(m, name='net')
    class Buffered(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('b', torch.ones(2))
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

def test_weight_norm_is_not_skipped():
    with pytest.raises(ReinitError, match='ParametrizationList'): reset(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ReinitError, match='no shape yet'): reset(nn.LazyLinear(3))

# ---------------------------------------------------------------- norms

def test_norms():
    m = named()
    b = blocks(m)
    first = norms(b)
    assert set(first) == {n for n, p in m.named_parameters() if p.ndim > 1}
    with torch.no_grad(): m.block2[0].weight.mul_(2)
    t = norms_table(b, first)
    assert list(t['block']) == ['block1', 'block1', 'block2', 'head'] and t['ratio'].round(5).tolist() == [1, 1, 2, 1]

MODELS = dict(named=(named, 16), vit=(lambda: reset(small_vit()), 32), resnet=(lambda: tv.resnet18(num_classes=5), 64), mobile=(small_mobilenet, 64), dense=(lambda: tv.DenseNet(8, (2, 2, 2), 16, num_classes=5), 64))

@pytest.fixture(params=MODELS)
def model(request):
    make, size = MODELS[request.param]
    return seeded(make).eval(), image(2, size)

def set_norms(fixed):
    for i, f in enumerate(fixed.values()): f.mu.fill_(.1 * (i + 1)); f.sigma.fill_(1.5)

@torch.no_grad()
def test_insert_remove(model):
    m, x = model
    y, keys, names, text = m(x), list(m.state_dict()), [n for n, _ in m.named_parameters()], repr(m)
    b = blocks(m)
    fixed = add_norms(b)
    assert len(fixed) == len(b) and torch.equal(m(x), y) and [n for n, _ in m.named_parameters()] == names
    assert [k for k in m.state_dict() if NORM not in k] == keys and blocks(m).names == b.names
    assert [p.params for p in blocks(m).parts] == [p.params for p in b.parts]
    set_norms(fixed)
    assert not torch.equal(m(x), y)
    remove_norms(m)
    assert torch.equal(m(x), y) and list(m.state_dict()) == keys and repr(m) == text and not any(o._forward_hooks for o in m.modules())

@torch.no_grad()
def test_norms_act_once_at_the_output(model):
    m, x = model
    b = blocks(m)
    z = trace(m, [b[1].last], x)[b[1].last]
    add_norms(b)[b[1].name].sigma.fill_(2.)
    assert torch.equal(trace(m, [b[1].last], x)[b[1].last], z / 2)

@torch.no_grad()
def test_norms_survive(model):
    m, x = model
    plain = copy.deepcopy(m)
    set_norms(add_norms(blocks(m)))
    y = m(x)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x), y)
        for o in other.modules():
            if isinstance(o, FixedNorm): o.sigma.fill_(9.)
        assert torch.equal(m(x), y) and not torch.equal(other(x), y)   # a copy of its own
        assert torch.equal(remove_norms(other)(x), plain(x))
    again = copy.deepcopy(plain)
    add_norms(blocks(again))
    again.load_state_dict(m.state_dict())
    assert torch.equal(again(x), y)

@pytest.mark.parametrize('name', ['named', 'vit', 'mobile'])
def test_torch_export(name):
    make, size = MODELS[name]
    m, x = seeded(make).eval(), image(2, size)
    set_norms(add_norms(blocks(m)))
    ep = torch.export.export(m, (x,))
    assert torch.allclose(ep.module()(x), m(x), atol=1e-5) and any(NORM in k for k in ep.state_dict)

def test_pickle_in_a_new_process(tmp_path):
    "There, hooks of other libraries get ids from the start again: they must not replace ours"
    m = tv.resnet18(num_classes=5).eval()
    x = image(1, 32)
    set_norms(add_norms(blocks(m)))
    torch.save((m, x, m(x)), tmp_path / 'm.pt')
    code = '''import sys, torch
m,x,y = torch.load(sys.argv[1], weights_only=False)
hooks = [o.register_forward_hook(lambda m,i,o: None) for _ in range(4) for o in m.modules()]
assert torch.equal(m(x), y)
for h in hooks: h.remove()
assert torch.equal(m(x), y); print('same')'''
    r = subprocess.run([sys.executable, '-c', code, str(tmp_path / 'm.pt')], capture_output=True, text=True)
    assert r.stdout.strip() == 'same', r.stderr

class Pairs(list):
    def new_empty(self): return Pairs()

def test_learner_export(tmp_path):
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner, load_learner
    pairs = Pairs((torch.tensor([i / 16 - 1]),) * 2 for i in range(32))
    dls = DataLoaders(*[DataLoader(pairs, bs=8, num_workers=0) for _ in range(2)])
    m = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    learn = Learner(dls, m, nn.MSELoss(), path=tmp_path)
    set_norms(add_norms(blocks(m)))
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    x = torch.linspace(-1, 1, 5)[:, None]
    y = m.eval()(x)
    learn.export('m.pkl')
    assert torch.equal(load_learner(tmp_path / 'm.pkl').model.eval()(x), y)

def test_ddp(tmp_path):
    import torch.distributed as dist
    if not dist.is_available() or dist.is_initialized(): pytest.skip('no process group')
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/init', rank=0, world_size=1)
    try:
        m = seeded(named).eval()
        x = image(2, 16)
        set_norms(add_norms(blocks(m)))
        y = m(x)
        d = nn.parallel.DistributedDataParallel(m)
        assert torch.equal(d(x), y)
        d(x).sum().backward()
        assert all(p.grad is not None for p in m.parameters()) and blocks(d).names == ['module.block1', 'module.block2']
        assert any(k.startswith('module.') and NORM in k for k in d.state_dict())
    finally: dist.destroy_process_group()

def test_half_precision_and_training():
    m = named().to(torch.bfloat16)
    set_norms(add_norms(blocks(m)))
    y = m(image(2, 16).to(torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad is not None for p in m.parameters())
    reset(m)
    assert all(f.mu == 0 and f.sigma == 1 for f in m.modules() if isinstance(f, FixedNorm))

def test_insertion_errors():
    m = mlp()
    with pytest.raises(ReinitError, match='no module'): insert_after(m, '9', FixedNorm())
    add_norms(blocks(m))
    with pytest.raises(ReinitError, match='already'): add_norms(blocks(m))
    relu = nn.ReLU()
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), relu, nn.Linear(3, 3), relu, nn.Linear(3, 2))
    with pytest.raises(ReinitError, match='one and the same module'): add_norms(blocks(m))
    assert not any(isinstance(o, FixedNorm) for o in m.modules())
    m = nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 5), nn.Linear(5, 2))
    insert_after(m, '1', FixedNorm())
    with pytest.raises(ReinitError, match='returns a tuple'): m[:2](torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ReinitError, match='its own way'): insert_after(nn.ModuleDict(dict(a=nn.ModuleList([nn.Linear(2, 2)]))), 'a', FixedNorm())

# ---------------------------------------------------------------- folding

FOLD = dict(mlp=lambda: mlp(), before=lambda: nn.Sequential(OrderedDict(a=nn.Linear(6, 8), b=nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8)), head=nn.Linear(8, 3))),
            nobias=lambda: nn.Sequential(OrderedDict(a=nn.Sequential(nn.Linear(6, 8), nn.ReLU()), b=nn.Sequential(nn.Dropout(.1), nn.Linear(8, 8, bias=False)), head=nn.Linear(8, 3))))

@pytest.mark.parametrize('name', FOLD)
@torch.no_grad()
def test_fold(name):
    m = seeded(FOLD[name]).eval()
    x = torch.randn(5, 6, generator=Streams(0).noise)
    set_norms(add_norms(blocks(m)))
    y = m(x)
    assert torch.allclose(fold_norms(m)(x), y, atol=1e-5) and not any(isinstance(o, FixedNorm) for o in m.modules())

@torch.no_grad()
def test_fold_conv():
    m = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(),
                                     nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))).eval()
    x = image(2, 16)
    fixed = add_norms(blocks(m))
    set_norms(fixed)
    y = m(x)
    state = copy.deepcopy(m.state_dict())
    with pytest.raises(ReinitError, match="after '4' cannot be folded into the Conv2d that comes next: it pads"): fold_norms(m)
    assert torch.equal(m(x), y) and all(torch.equal(v, state[k]) for k, v in m.state_dict().items())   # all or nothing
    fixed['3'].mu.zero_()
    y = m(x)
    assert torch.allclose(fold_norms(m)(x), y, atol=1e-5)

def test_fold_refused_in_residual_networks():
    m = tv.resnet18(num_classes=5)
    set_norms(add_norms(blocks(m)))
    with pytest.raises(ReinitError, match='BasicBlock has no weights to take it, and a BasicBlock comes next'): fold_norms(m)
    for f in m.modules():
        if isinstance(f, FixedNorm): f.mu.zero_(); f.sigma.fill_(1.)
    assert not any(isinstance(o, FixedNorm) for o in fold_norms(m).modules())   # an identity needs no folding

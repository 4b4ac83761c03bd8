"`reinit_nb.blocks`: the blocks of models that other people wrote"
import copy
import re

import pytest
import torch
import torchvision.models as tv
from example_models import image, mlp, named, seeded, small_mobilenet, small_vit
from torch import nn

from reinit_nb.blocks import blocks, select_modules, trace_outputs
from reinit_nb.core import ReinitError


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

ZOO = dict(alexnet=5, vgg11=8, vgg16=13, vgg16_bn=13, resnet18=8, resnet50=16, wide_resnet50_2=16, mobilenet_v2=17,
           mobilenet_v3_small=11, mobilenet_v3_large=15, densenet121=4, efficientnet_b0=16, efficientnet_v2_s=40,
           convnext_tiny=18, vit_b_16=12, swin_t=12, squeezenet1_0=8, shufflenet_v2_x0_5=16, mnasnet0_5=16)

@pytest.mark.parametrize('name', ZOO)
def test_torchvision(name):
    with torch.device('meta'): m = tv.get_model(name)
    b = blocks(m)
    assert len(b) == ZOO[name], b.names
    check_partition(m, b)

HEADS = dict(alexnet='classifier.1.weight classifier.4.weight classifier.6.weight', resnet18='fc.weight',
             densenet121='classifier.weight', vit_b_16='encoder.ln.weight heads.head.weight',
             convnext_tiny='classifier.0.weight classifier.2.weight',
             mobilenet_v3_small='classifier.0.weight classifier.3.weight')

@pytest.mark.parametrize('name', HEADS)
def test_heads(name):
    with torch.device('meta'): m = tv.get_model(name)
    assert [n for n in blocks(m).head.params if n.endswith('weight')] == HEADS[name].split()

def test_stem_and_tokens_are_in_the_first_block():
    assert {'class_token', 'encoder.pos_embedding', 'conv_proj.weight'} <= set(blocks(small_vit()).params(1))
    with torch.device('meta'): m = tv.resnet50()
    assert blocks(m)[1].params[:2] == ['conv1.weight', 'bn1.weight'] and blocks(m)[16].modules == ['layer4.2']

TIMM = dict(resnet18=8, vit_tiny_patch16_224=12, convnext_atto=12, mobilenetv3_small_050=11, mixer_s32_224=8,
            regnety_002=13, resmlp_12_224=12, ghostnet_100=16)

@pytest.mark.parametrize('name', TIMM)
def test_timm(name):
    timm = pytest.importorskip('timm', reason='timm is not installed: its models are not checked')
    m = seeded(lambda: timm.create_model(name, pretrained=False, num_classes=7))
    b = blocks(m)
    assert len(b) == TIMM[name], b.names
    check_partition(m, b)

@pytest.mark.parametrize('arch,K', [(tv.resnet18, 8), (tv.alexnet, 5), (tv.mobilenet_v3_small, 11)])
def test_fastai_bodies(arch, K):
    from fastai.vision.learner import create_vision_model
    m = seeded(lambda: create_vision_model(arch, 5, pretrained=False))
    b = blocks(m)
    assert len(b) == K
    assert all(o.startswith('1.') for o in b.head.modules)
    assert all(o.startswith('0.') for part in b for o in part.modules)
    check_partition(m, b)

def recurrent(): return nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 5), nn.Linear(5, 2))


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(8, 2))


def row_of_groups():
    def group(): return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4))
    return nn.Sequential(group(), group(), group(), nn.Linear(4, 2))


@pytest.mark.parametrize('make,K', [(mlp, 2), (named, 2), (small_vit, 3), (small_mobilenet, 17), (recurrent, 2),
                                    (transformer, 4), (row_of_groups, 3)])
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
    assert len(b) == K
    assert b.names == ['backbone.' + n for n in blocks(m.backbone).names]
    assert b.head.modules[-1] == 'out'
    check_partition(m, b)
    assert blocks(m, ['backbone']).names == ['backbone']

def test_a_single_block_stays_whole():
    m = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2))
    assert blocks(m).names == ['0']
    m = nn.Sequential(nn.Conv2d(3, 64, 1), tv.resnet.BasicBlock(64, 64), nn.Flatten(), nn.Linear(64, 2))
    assert blocks(m).names == ['1']

class Reversed(nn.Module):
    "Registered in another order than called, with a part that is never called"
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.c = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4)
        self.aux = nn.Linear(4, 9)
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
    before, state = copy.deepcopy(m.state_dict()), torch.get_rng_state()
    modes = [o.training for o in m.modules()]
    def check():
        assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert [o.training for o in m.modules()] == modes
        assert not any(o._forward_hooks for o in m.modules())
    blocks(m, x=image(2, 16)).table((1, 3, 20, 20))
    check()
    with pytest.raises(ReinitError, match=r'does not run on data of shape \(1, 5, 8, 8\)'): blocks(m, x=(1, 5, 8, 8))
    check()


def test_lazy_layers_are_watched_once():
    m = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    assert trace_outputs(m, ['0'], (3, 5))['0'].shape == (3, 4)
    assert not m[0]._forward_hooks

# ---------------------------------------------------------------- named by the user

def test_names_patterns_functions():
    with torch.device('meta'): m = tv.resnet18()
    stages = ['layer1', 'layer2', 'layer3', 'layer4']
    def is_stage(name, module): return name in stages
    for spec in (stages, 'layer?', r'layer\d', re.compile(r'layer\d'), is_stage, ['layer[12]', 'layer3', 'layer4']):
        b = blocks(m, spec)
        assert b.names == stages and b.head.modules == ['fc']
        assert b[1].modules == ['conv1', 'bn1', 'layer1']
        check_partition(m, b)
    b = blocks(m, ['layer1.1', 'layer2'])
    assert b['layer1.1'].modules == ['conv1', 'bn1', 'layer1.0', 'layer1.1']
    assert b.head.modules == ['layer3.0', 'layer3.1', 'layer4.0', 'layer4.1', 'fc']
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

@pytest.mark.parametrize('spec, said', [
    (['blok1'], "did you mean 'block1'"), ('nothing*', 'Its modules: block1, block2, head'), ('(', 'named or matched'),
    (['block1', 'head'], 'nothing comes after'), (lambda n, m: False, 'no block'),
    (nn.Linear(3, 3), 'names no modules'), (True, 'True names no modules'),
    (3.5, '3.5 names no modules'), ([], 'names no modules'), ((), 'names no modules'),
    ([1, 2], 'names no modules'), ([None], 'names no modules'), (['block1', 'block1'], "'block1' is named twice")])
def test_names_that_cannot_be_used(spec, said):
    with pytest.raises(ReinitError, match=said): blocks(named(), spec)
    with pytest.raises(ReinitError, match='names no modules|named|nothing|no block'):
        blocks(named(), spec, x=(1, 3, 16, 16))


def test_numbers_that_cannot_be_used():
    m = named()
    for k in (0, 3, 1.5, 'blck1'):
        with pytest.raises(ReinitError): blocks(m)[k]
    for bad in (nn.ReLU(), nn.Linear(2, 2), nn.Sequential(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())):
        with pytest.raises(ReinitError, match='no two layers'): blocks(bad)
    with pytest.raises(ReinitError, match='should be a torch module'): blocks('resnet18')
    with pytest.raises(ReinitError, match='should be a torch module'): blocks('resnet18', ['layer1'])
    assert select_modules(m, 'block?') == ['block1', 'block2']

def test_tied():
    m = mlp()
    m[2].weight = m[0].weight
    with pytest.raises(ReinitError, match="'0.weight' in block '0' and '2.weight' in block '2'"): blocks(m)
    whole = nn.Sequential(nn.Sequential(*m[:3]), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    assert len(blocks(whole, ['0', '2'])) == 2   # tied within a block is fine

def test_table():
    m = named()
    b = blocks(m)
    t = b.table(x=(1, 3, 16, 16))
    assert list(t.columns) == ['block', 'modules', 'parameters', 'share', 'output']
    assert list(t['block']) == ['block1', 'block2', 'head']
    assert t['parameters'].sum() == sum(p.numel() for p in m.parameters())
    assert abs(t['share'].sum() - 1) < 1e-9
    assert t['output'].tolist() == ['4×14×14', '6×6×6', '5']
    assert 'block2' in repr(b) and '<table' in b._repr_html_()

# ---------------------------------------------------------------- modules in several blocks

class Layer(nn.Module):
    def __init__(self, position):
        super().__init__()
        self.position, self.linear = position, nn.Linear(4, 4)

    def forward(self, x): return self.linear(self.position(x)).relu()

class Shared(nn.Module):
    "A module by itself and inside the blocks that use it, as in CoaT"
    def __init__(self):
        super().__init__()
        self.position1, self.position2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stage1 = nn.ModuleList([Layer(self.position1), Layer(self.position1)])
        self.stage2 = nn.ModuleList([Layer(self.position2), Layer(self.position2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in (*self.stage1, *self.stage2): x = layer(x)
        return self.head(x)

def test_shared_module():
    for x in (None, (2, 4)):
        b = blocks(Shared(), x=x)
        assert b.names == ['stage1.0', 'stage2.0'] and [block.last for block in b] == ['stage1.1', 'stage2.1']
        assert b.part_of('position1') is b[1] and b.part_of('position2') is b[2]
        every = [n for part in b.parts for n in part.params]
        assert sorted(every) == sorted(n for n, _ in b.model.named_parameters())
    with pytest.raises(ReinitError, match='one and the same parameter'): blocks(Shared(), ['stage1.0', 'stage1.1'])

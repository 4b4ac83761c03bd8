"Mutually frozen weights: networks with a known number of them, independent counts, real networks, wrong input"
import copy
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from reinit_nb.blocks import FixedNorm, add_norms, blocks
from reinit_nb.core import ReinitError
from reinit_nb.frozen import (
    MutuallyFrozenCallback,
    effective_rank,
    frozen_totals,
    load_arch,
    mutually_frozen,
    plot_frozen,
    read_state,
    readers,
    row_col_norms,
    units,
)
from reinit_nb.models import model


def seq(*ms): torch.manual_seed(0); return nn.Sequential(*ms)

@torch.no_grad()
def zero(t, *at): t[at] = 0

# ---------------------------------------------------------------- one network for each layer type

@torch.no_grad()
def quiet(m, i):
    "Row `i` of a layer, or entry `i` of a normalization, with its bias"
    if isinstance(m, nn.modules.conv._ConvTransposeNd): m.weight.view(m.groups, -1, *m.weight.shape[1:])[i // (m.out_channels // m.groups), :, i % (m.out_channels // m.groups)] = 0
    else: m.weight[i] = 0
    if getattr(m, 'bias', None) is not None: m.bias[i] = 0

@torch.no_grad()
def deaf(m, i, k=1):
    "Column `i` of a layer: `k` positions of a flattened channel"
    if isinstance(m, nn.Linear): m.weight[:, i * k:(i + 1) * k] = 0
    elif isinstance(m, nn.modules.conv._ConvTransposeNd): m.weight[i] = 0
    else:
        per = m.in_channels // m.groups
        m.weight.view(m.groups, -1, *m.weight.shape[1:])[i // per, :, i % per] = 0

C, L = nn.Conv2d, nn.Linear
CASES = {   # network, input, who writes, who reads, channels, positions, double-frozen weights of each channel
    'dense': (lambda: seq(L(5, 6), nn.ReLU(), L(6, 4)), (1, 5), '0', '2', [1, 4], 1, (5 + 1) + 4),
    'no bias': (lambda: seq(L(5, 6, bias=False), nn.GELU(), L(6, 4)), (1, 5), '0', '2', [0], 1, 5 + 4),
    'conv': (lambda: seq(C(3, 4, 3), nn.ReLU(), C(4, 5, 3)), (1, 3, 9, 9), '0', '2', [2, 3], 1, (27 + 1) + 45),
    'conv1d': (lambda: seq(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 5, 3)), (1, 3, 9), '0', '2', [2], 1, (9 + 1) + 15),
    'conv3d': (lambda: seq(nn.Conv3d(1, 4, 2), nn.ReLU(), nn.Conv3d(4, 2, 2)), (1, 1, 5, 5, 5), '0', '2', [2], 1, (8 + 1) + 16),
    'pools': (lambda: seq(C(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Upsample(scale_factor=2), C(4, 5, 1)), (1, 3, 19, 19), '0', '5', [1], 1, 28 + 5),
    'flatten': (lambda: seq(C(3, 4, 3), nn.ReLU(), nn.Flatten(), L(4 * 49, 5)), (1, 3, 9, 9), '0', '3', [3], 49, 28 + 49 * 5),
    'pool+flat': (lambda: seq(C(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), L(4, 5)), (1, 3, 9, 9), '0', '5', [0], 1, 28 + 5),
    'groups in': (lambda: seq(C(3, 4, 3), nn.ReLU(), C(4, 6, 3, groups=2)), (1, 3, 9, 9), '0', '2', [3], 1, 28 + 3 * 9),
    'groups out': (lambda: seq(C(4, 6, 3, groups=2), nn.ReLU(), C(6, 5, 3)), (1, 4, 9, 9), '0', '2', [5], 1, (2 * 9 + 1) + 45),
    'depthwise': (lambda: seq(C(3, 4, 1), nn.ReLU(), C(4, 4, 3, groups=4)), (1, 3, 9, 9), '0', '2', [1, 2], 1, 4 + 9),
    'transposed': (lambda: seq(nn.ConvTranspose2d(3, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 5, 2)), (1, 3, 9, 9), '0', '2', [1], 1, (12 + 1) + 20),
    'grouped transposed': (lambda: seq(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), C(6, 5, 1)), (1, 4, 9, 9), '0', '2', [4], 1, (2 * 4 + 1) + 5),
    'batch norm': (lambda: seq(C(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), C(4, 5, 3)), (1, 3, 9, 9), '1', '3', [1, 2], 1, 2 + 45),
    'group norm': (lambda: seq(C(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), C(4, 5, 3)), (1, 3, 9, 9), '1', '3', [1], 1, 2 + 45),
    'instance norm': (lambda: seq(C(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), C(4, 5, 3)), (1, 3, 9, 9), '1', '3', [1], 1, 2 + 45),
    'layer norm': (lambda: seq(L(5, 6), nn.LayerNorm(6), nn.GELU(), L(6, 4)), (1, 5), '1', '3', [1], 1, 2 + 4),
    'rms norm': (lambda: seq(L(5, 6), nn.RMSNorm(6), nn.GELU(), L(6, 4)), (1, 5), '1', '3', [1], 1, 1 + 4),
    'no affine': (lambda: seq(L(5, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), L(6, 4)), (1, 5), '0', '3', [1], 1, 6 + 4),
    'fixed norm': (lambda: seq(L(5, 6), FixedNorm(.3, 2.), nn.ReLU(), L(6, 4)), (1, 5), '0', '3', [1], 1, 6 + 4),
    'norm, flatten': (lambda: seq(C(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), L(4 * 49, 5)), (1, 3, 9, 9), '1', '4', [1], 49, 2 + 49 * 5),
    'tokens': (lambda: seq(nn.Unflatten(1, (3, 5)), L(5, 6), nn.ReLU(), L(6, 4)), (1, 15), '1', '3', [1], 1, 6 + 4)}

@pytest.mark.parametrize('case', CASES)
def test_known_number(case):
    make, shape, writer, reader, chans, k, size = CASES[case]
    net = make()
    assert mutually_frozen(net, shape).double.sum() == 0
    for i in chans: quiet(net.get_submodule(writer), i)
    assert mutually_frozen(net, shape).double.sum() == 0                     # a row alone is not enough
    for i in chans: deaf(net.get_submodule(reader), i, k)
    df = mutually_frozen(net, shape)
    by = df.set_index('layer')
    assert df.double.sum() == size * len(chans) and by.double[writer] + by.double[reader] == size * len(chans)
    assert by.frozen[writer] == len(chans) and frozen_totals(df).frozen[0] == len(chans)
    assert by.small_rows[writer] == len(chans)
    with torch.no_grad(): net.get_submodule(writer).weight.add_(.1)
    assert mutually_frozen(net, shape).double.sum() == 0

def test_triple_with_norm():
    net = CASES['batch norm'][0]()
    for i in (1, 2): quiet(net[1], i); deaf(net[3], i)
    quiet(net[0], 2)
    by = mutually_frozen(net, (1, 3, 9, 9)).set_index('layer')
    assert by.triple.tolist() == [28, 2, 45] and by.double.tolist() == [0, 4, 90] and by.distinct.tolist() == [28, 4, 90]
    assert by.frozen.tolist() == [2, 2, 0]

def test_triple_by_the_text():
    net = seq(L(5, 6), nn.ReLU(), L(6, 4), nn.ReLU(), L(4, 3), nn.ReLU(), L(3, 2))
    for i in (1, 5): quiet(net[0], i); deaf(net[2], i)
    deaf(net[4], 1)                                  # column 1 of the layer after; there is no column 5
    df = mutually_frozen(net, (1, 5))
    assert df.double.tolist() == [12, 8, 0, 0] and df.triple.tolist() == [6, 4, 3, 0]

def test_rows_and_columns_overlap():
    net = seq(L(5, 6), nn.ReLU(), L(6, 4), nn.ReLU(), L(4, 3))
    with torch.no_grad():
        for p in net.parameters(): p.zero_()
    t = frozen_totals(mutually_frozen(net, (1, 5)))
    assert t.double[0] == (36 + 24) + (28 + 12) and t.distinct[0] == 36 + 28 + 12       # the weights in the middle once
    assert t.frozen[0] == 10 and t.weights[0] == 36 + 28 + 15

@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=3, max_size=5), st.integers(0, 10**6), st.booleans())
def test_mlp_against_loops(widths, seed, bias):
    g = torch.Generator().manual_seed(seed)
    net = nn.Sequential(*(m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.ReLU())))
    lin = [m for m in net if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for m in lin:
            m.weight.copy_(torch.randn(m.weight.shape, generator=g))
            m.bias.copy_(torch.randn(m.bias.shape, generator=g))
            m.weight[torch.rand(len(m.weight), generator=g) < .6] = 0
            m.weight[:, torch.rand(m.weight.shape[1], generator=g) < .6] = 0
            m.bias[torch.rand(len(m.bias), generator=g) < .8] = 0
    double = triple = 0
    third = set()                                    # a third column that two triples share is counted once
    for l, (a, b) in enumerate(zip(lin, lin[1:])):
        for i in range(a.out_features):
            row = torch.cat([a.weight[i], a.bias[i:i + 1] * bias])
            if row.norm() < 1e-2 and b.weight[:, i].norm() < 1e-2: double += a.in_features + 1 + b.out_features
    assert mutually_frozen(net, (1, widths[0]), bias=bias).double.sum() == double

# ---------------------------------------------------------------- nothing is lost, nothing learns

def frozen_resnet():
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=5)
    for b in (net.layer1[0], net.layer3[1]):
        for i in (0, 7): quiet(b.bn1, i); quiet(b.conv1, i); deaf(b.conv2, i)
    for o in (net.layer4[0].bn2, net.layer4[0].downsample[1], net.layer4[1].bn2): quiet(o, 3)
    deaf(net.layer4[1].conv1, 3)
    deaf(net.fc, 3)
    return net

def test_stream_needs_all_writers_and_readers():
    net = frozen_resnet()
    by = mutually_frozen(net).set_index('layer')
    assert by.frozen[['layer1.0.conv1', 'layer3.1.conv1', 'layer4.0.conv2', 'layer4.0.downsample.0', 'layer4.1.conv2']].tolist() == [2, 2, 1, 1, 1]
    assert by[by.role == 'layer'].frozen.sum() == 7
    for loud in (net.layer4[0].bn2.weight, net.layer4[0].downsample[1].bias, net.layer4[1].conv1.weight, net.fc.weight):
        old = loud.detach().clone()
        with torch.no_grad(): loud[(slice(None), 3) if loud.ndim > 1 else 3] = .5
        assert mutually_frozen(net).set_index('layer').frozen['layer4.1.conv2'] == 0
        with torch.no_grad(): loud.copy_(old)
    assert mutually_frozen(net).set_index('layer').frozen['layer4.1.conv2'] == 1

def test_frozen_weights_get_no_gradient():
    "What the count says is true: at exactly zero, rows, entries and columns of a frozen channel have no gradient"
    net = frozen_resnet().train()
    F.cross_entropy(net(torch.randn(4, 3, 64, 64)), torch.tensor([0, 1, 2, 3])).backward()
    for b in (net.layer1[0], net.layer3[1]):
        for i in (0, 7):
            assert not b.bn1.weight.grad[i] and not b.bn1.bias.grad[i] and not b.conv1.weight.grad[i].any() and not b.conv2.weight.grad[:, i].any()
        assert b.bn1.weight.grad.any() and b.conv2.weight.grad.any()
    assert not net.fc.weight.grad[:, 3].any() and not net.layer4[1].bn2.weight.grad[3] and not net.layer4[1].conv1.weight.grad[:, 3].any()

def test_removing_changes_nothing():
    net = frozen_resnet().eval()
    x = torch.randn(2, 3, 64, 64)
    small, b = copy.deepcopy(net), None
    b = small.layer1[0]
    keep = [i for i in range(64) if i not in (0, 7)]
    conv1, bn1, conv2 = nn.Conv2d(64, 62, 3, padding=1, bias=False), nn.BatchNorm2d(62), nn.Conv2d(62, 64, 3, padding=1, bias=False)
    with torch.no_grad():
        conv1.weight.copy_(b.conv1.weight[keep])
        conv2.weight.copy_(b.conv2.weight[:, keep])
        for k in ('weight', 'bias', 'running_mean', 'running_var'): getattr(bn1, k).copy_(getattr(b.bn1, k)[keep])
    b.conv1, b.bn1, b.conv2 = conv1, bn1, conv2
    torch.testing.assert_close(small.eval()(x), net(x), rtol=1e-4, atol=1e-5)
    assert mutually_frozen(small).set_index('layer').frozen['layer1.0.conv1'] == 0

class Cat(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b, self.c, self.d = C(3, 4, 3, padding=1), C(4, 5, 3, padding=1), C(9, 6, 1), C(4, 2, 1)
    def forward(self, x):
        a = self.a(x).relu()
        return self.c(torch.cat([a, self.b(a).relu()], 1)).mean((2, 3)), self.d(a)

def test_concatenation():
    torch.manual_seed(0)
    net = Cat()
    t = readers(net, (1, 3, 8, 8)).set_index('layer')
    assert t.next['a'] == 'b, c, d' and t.next['b'] == 'c' and t.countable.tolist() == [4, 5, 0, 0]
    quiet(net.a, 1)
    deaf(net.b, 1)
    deaf(net.c, 1)
    assert mutually_frozen(net, (1, 3, 8, 8)).frozen.sum() == 0           # d still reads it
    deaf(net.d, 1)
    assert mutually_frozen(net, (1, 3, 8, 8)).double.tolist() == [28, 45, 6, 2]
    quiet(net.b, 2)
    deaf(net.c, 4 + 2)                               # the third of the second part
    assert mutually_frozen(net, (1, 3, 8, 8)).frozen.tolist() == [1, 1, 0, 0]

class Net(nn.Module):
    def __init__(self, f, **mods):
        super().__init__()
        self.f = f
        for k, m in mods.items(): self.add_module(k, m)
    def forward(self, x): return self.f(self, x)

def why(f, shape=(1, 4), **mods):
    return readers(Net(f, **mods), shape).set_index('layer')

def test_what_cannot_be_counted_says_why():
    a, b = L(4, 4), L(4, 3)
    assert 'sigmoid does not keep zero (in Net)' in why(lambda s, x: s.b(s.a(x).sigmoid()), a=a, b=b).why['a']
    assert 'softmax' in why(lambda s, x: s.b(s.a(x).softmax(1)), a=a, b=b).why['a']
    assert 'cumsum cannot be followed' in why(lambda s, x: s.b(s.a(x).cumsum(1)), a=a, b=b).why['a']
    assert 'multiplied with other channels' in why(lambda s, x: s.b(s.a(x) * s.c(x)), a=a, b=b, c=L(4, 4)).why['c']
    assert 'used more than once' in why(lambda s, x: s.b(s.a(s.a(x).relu())), a=a, b=b).why['a']
    assert 'no layer reads it' in why(lambda s, x: (s.a(x), s.b(x))[1], a=a, b=b).why['a']
    assert "the model's output" in why(lambda s, x: (lambda h: dict(out=s.b(h), h=h))(s.a(x)), a=a, b=b).why['a']
    assert 'sum over channels' in why(lambda s, x: s.b(s.a(x).sum(1, keepdim=True).expand(-1, 4)), a=a, b=b).why['a']
    t = why(lambda s, x: s.b(s.a(x) + 1), a=a, b=b)
    assert t.countable['a'] == 4 and '1 is added' in t.remark['a']
    net = Net(lambda s, x: s.b(s.a(x) + s.p), a=a, b=b)
    net.p = nn.Parameter(torch.zeros(4))
    assert readers(net, (1, 4)).why[0] == 'the parameter p is added'

def test_in_place_and_moves():
    t = why(lambda s, x: s.b((lambda h: h.relu_().add_(s.c(x)).mul_(2).view(1, 2, 2).transpose(1, 2).reshape(1, 4)[:, [3, 2, 1, 0]])(s.a(x))), a=L(4, 4), b=L(4, 3), c=L(4, 4))
    assert t.countable.tolist() == [4, 4, 0] or t.countable.to_dict() == {'a': 4, 'c': 4, 'b': 0}
    assert t.joins['a'] == 'c' and t.next['a'] == 'b'
    net = Net(lambda s, x: s.b(F.pixel_shuffle(s.a(x), 2)), a=C(1, 8, 1), b=C(2, 3, 1))
    assert readers(net, (1, 1, 4, 4)).countable[0] == 0 and 'b mixes positions' in readers(net, (1, 1, 4, 4)).why[0]

def test_pad_of_channels():
    net = Net(lambda s, x: s.b(F.pad(s.a(x), (0, 0, 0, 0, 0, 2)).relu()), a=C(1, 3, 1), b=C(5, 2, 1))
    torch.manual_seed(0)
    quiet(net.a, 1)
    deaf(net.b, 1)
    assert mutually_frozen(net, (1, 1, 4, 4)).double.sum() == 2 + 2

def test_fixed_norms_of_lw():
    net = model('scnn', c_in=1, size=8, width=.25)
    add_norms(blocks(net))
    assert mutually_frozen(net, (1, 1, 8, 8)).countable.sum() and not readers(net, (1, 1, 8, 8)).remark.any()      # the identity
    for m in net.modules():
        if isinstance(m, FixedNorm): m.mu.fill_(.3)
    t = readers(net, (1, 1, 8, 8)).set_index('layer')
    assert 'is added' in t.remark['block1.conv'] and t.countable['block1.conv'] == 8

def test_weight_norm_and_pruning():
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(L(5, 6)), nn.ReLU(), L(6, 4))
    t = readers(net, (1, 5))
    assert t.countable[0] == 6 and 'computed from others' in t.remark[0]
    prune.custom_from_mask(net[2], 'weight', torch.ones(4, 6).index_fill(1, torch.tensor([2]), 0))
    with torch.no_grad(): net[0].parametrizations.weight.original0[2] = 0; net[0].bias[2] = 0
    assert mutually_frozen(net, (1, 5)).frozen[0] == 1

# ---------------------------------------------------------------- real networks

@pytest.mark.parametrize('name', ['mobilenet_v2', 'densenet121', 'shufflenet_v2_x0_5', 'squeezenet1_0', 'regnet_y_400mf', 'convnext_tiny'])
def test_torchvision(name):
    with torch.random.fork_rng(): net = torchvision.models.get_model(name)
    t = readers(net)
    assert len(t) == sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in net.modules())
    assert t.countable.sum() > .5 * t.rows.sum() and ((t.countable == t.rows) | (t.why != '')).all()
    assert t['next'].iloc[-1] == ''

@pytest.mark.parametrize('name', ['resnet26d', 'efficientnet_b0', 'resnetv2_50', 'mixer_s32_224', 'vit_tiny_patch16_224', 'nf_resnet26'])
def test_timm(name):
    timm = pytest.importorskip('timm')
    with torch.random.fork_rng(): net = timm.create_model(name)
    t = readers(net)
    assert t.countable.sum() > .2 * t.rows.sum() and ((t.countable == t.rows) | (t.why != '')).all()
    assert frozen_totals(mutually_frozen(net)).filters[0] == t.countable.sum()

def test_ours():
    for name in ('mlp', 'scnn', 'mobilenet', 'resnet50', 'resnet18', 'allcnn', 'vgg16'):
        net = model(name, width=.25)
        t = frozen_totals(mutually_frozen(net, (1, 3 * 32 * 32) if name == 'mlp' else (1, 3, 32, 32)))
        assert t.frozen[0] == 0 and t.filters[0] > 0 and t.weights[0] == sum(p.numel() for p in net.parameters())

def test_residual_table():
    t = readers(torchvision.models.resnet18()).set_index('layer')
    assert t.next['layer1.0.conv1'] == 'layer1.0.conv2' and t.norm['layer1.0.conv1'] == 'layer1.0.bn1'
    assert t.next['conv1'] == 'layer1.0.conv1, layer1.1.conv1, layer2.0.conv1, layer2.0.downsample.0'
    assert t.joins['layer4.0.downsample.0'] == 'layer4.0.conv2, layer4.1.conv2' and t.next['layer4.1.conv2'] == 'layer4.1.conv1, fc'

def test_preactivation():
    "A normalization behind a sum belongs to each of its readers"
    class Pre(nn.Module):
        def __init__(self): super().__init__(); self.stem, self.n1, self.c1, self.n2, self.fc = C(3, 4, 1), nn.BatchNorm2d(4), C(4, 4, 1), nn.BatchNorm2d(4), L(4, 2)
        def forward(self, x):
            x = self.stem(x)
            x = x + self.c1(self.n1(x).relu())
            return self.fc(self.n2(x).relu().mean((2, 3)))
    torch.manual_seed(0)
    net = Pre()
    t = readers(net, (1, 3, 8, 8)).set_index('layer')
    assert t.norm['stem'] == 'n1, n2' and t.next['stem'] == 'c1, fc' and t.joins['stem'] == 'c1' and t.countable['stem'] == 4
    quiet(net.n1, 1)
    deaf(net.c1, 1)
    by = mutually_frozen(net, (1, 3, 8, 8)).set_index('layer')
    assert by.double.to_dict() == {'stem': 0, 'n1': 2, 'c1': 4, 'n2': 0, 'fc': 0} and by.frozen[['stem', 'n1']].tolist() == [0, 1]
    quiet(net.n2, 1)
    deaf(net.fc, 1)
    quiet(net.stem, 1)
    assert mutually_frozen(net, (1, 3, 8, 8)).triple.sum() == 0                         # c1 still writes the stream
    quiet(net.c1, 1)
    by = mutually_frozen(net, (1, 3, 8, 8)).set_index('layer')
    assert by.frozen[['stem', 'c1']].tolist() == [1, 1] and by.triple.to_dict() == {'stem': 4, 'n1': 2, 'c1': 5 + 4, 'n2': 2, 'fc': 2}
    assert by.distinct['c1'] == 5 + 4 - 1

def test_model_is_left_alone():
    net = torchvision.models.resnet18().train()
    net.layer1.eval()
    net.fc.weight.requires_grad_(False)
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    rng, np_rng = torch.get_rng_state(), np.random.get_state()[1].copy()
    mutually_frozen(net, data=torch.zeros(2, 3, 64, 64))
    readers(net)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()) and [m.training for m in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng) and (np.random.get_state()[1] == np_rng).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules()) and all(p.grad is None for p in net.parameters())
    assert not net.fc.weight.requires_grad

def test_looks_at_values():
    "A network that looks at its data cannot run on the meta device, and is run as it is"
    net = Net(lambda s, x: s.b(s.a(x).relu()) if x.sum() < 1e9 else x, a=L(4, 5), b=L(5, 2))
    assert readers(net, torch.zeros(3, 4)).countable.tolist() == [5, 0]

def test_half_precision_and_nan():
    torch.manual_seed(0)
    net = seq(L(5, 6), nn.ReLU(), L(6, 4)).bfloat16()
    quiet(net[0], 1)
    deaf(net[2], 1)
    assert mutually_frozen(net, (1, 5)).frozen[0] == 1
    with torch.no_grad(): net[0].weight[1] = float('nan')
    assert mutually_frozen(net, (1, 5)).frozen[0] == 0

@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_norms(g, o, i, k, transposed):
    w, b = torch.randn(g * o, i, k, k), torch.randn(g * (i if transposed else o))
    r, c = row_col_norms(w, b, g, transposed)
    for n in range(g):
        part = w[n * o:(n + 1) * o]
        part = part.transpose(0, 1) if transposed else part
        for j in range(part.shape[0]): assert abs(r[n * part.shape[0] + j] - torch.cat([part[j].flatten(), b[n * part.shape[0] + j, None]]).norm()) < 1e-5
        for j in range(part.shape[1]): assert abs(c[n * part.shape[1] + j] - part[:, j].norm()) < 1e-5

# ---------------------------------------------------------------- units

def test_units_against_numpy():
    torch.manual_seed(0)
    net, x = seq(C(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), C(5, 6, 3), nn.ReLU(), nn.Flatten(), L(6 * 16, 4)), torch.randn(30, 1, 8, 8)
    with torch.no_grad(): net[1].bias[2] = -50; net[3].bias[1] = -50
    df = units(net, [(x[:20], 0), (x[20:], 0)]).set_index('layer')
    assert df.dead.tolist() == [1, 1] and df.dead_share.tolist() == [.2, 1 / 6]
    z = net.eval()[:3](x).detach().movedim(1, -1).reshape(-1, 5).double().numpy()
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum()
    p = p[p > 1e-9]
    assert abs(df['rank'].iloc[0] - np.exp(-(p * np.log(p)).sum())) < 1e-6
    assert df.srank.iloc[0] == int((np.cumsum(p) < .99).sum()) + 1
    assert effective_rank(torch.diag(torch.tensor([1., 1, 0]))) == pytest.approx((2, 2))
    for data, says in ((3, 'data is a int'), ([], 'data is empty'), (torch.zeros(2, 7, 8, 8), 'cannot be traced')):
        with pytest.raises(ReinitError, match=says): units(net, data)

# ---------------------------------------------------------------- training

def learner(net, *cbs, n=20, **kw):
    g = torch.Generator().manual_seed(0)
    ds = TensorDataset(torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g))
    return Learner(DataLoaders(DataLoader(ds, 10), DataLoader(ds, 10)), net, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, cbs=cbs, **kw).remove_cb(ProgressCallback)

def test_callback():
    net = seq(L(5, 6), nn.ReLU(), L(6, 3))
    quiet(net[0], 1)
    deaf(net[2], 1)
    learn = learner(net, MutuallyFrozenCallback())
    with learn.no_logging(): learn.fit(3, .1)
    cb = learn.mutually_frozen
    assert cb.df.epoch.unique().tolist() == [0, 1, 2, 3] and (cb.totals.frozen == 1).all()      # it stays, by itself
    learn.validate()
    learn.get_preds()
    assert len(cb.counts) == 4
    with learn.no_logging(): learn.lr_find(show_plot=False, num_it=20)
    assert len(cb.counts) == 4
    with learn.no_logging(): learn.fit(2, .1)
    assert cb.df.epoch.unique().tolist() == [0, 1, 2]
    assert len(cb.plot().lines) == 1

def test_callback_every_and_checks():
    learn = learner(seq(L(5, 6), nn.ReLU(), L(6, 3)), MutuallyFrozenCallback(every=2))
    with learn.no_logging(): learn.fit(5, .1)
    assert learn.mutually_frozen.df.epoch.unique().tolist() == [0, 2, 4, 5]
    with pytest.raises(ReinitError, match='cutoff=-1'): MutuallyFrozenCallback(-1)
    with pytest.raises(ReinitError, match='nothing was counted'): MutuallyFrozenCallback().plot()
    learn = learner(seq(L(5, 3)), MutuallyFrozenCallback())
    with learn.no_logging(), pytest.raises(ReinitError, match='no pair of layers'): learn.fit(1)

def test_weight_decay_freezes():
    "Units that start small fall to zero with weight decay, and do not without"
    for wd, n in ((.5, 1), (0., 0)):
        net = seq(L(5, 6), nn.ReLU(), L(6, 3))
        with torch.no_grad(): net[0].weight[1] = .02; net[0].bias[1] = 0; net[2].weight[:, 1] = .02
        learn = learner(net, MutuallyFrozenCallback(), wd_bn_bias=True)
        with learn.no_logging(): learn.fit(30, .1, wd=wd)
        assert learn.mutually_frozen.totals.frozen.iloc[0] == 0 and learn.mutually_frozen.df.query('layer=="0"').frozen.iloc[-1] >= n and (wd or not learn.mutually_frozen.totals.frozen.any())

def test_plot():
    assert len(plot_frozen(mutually_frozen(frozen_resnet())).patches) == 20

# ---------------------------------------------------------------- wrong input

def test_wrong_input():
    net = seq(L(5, 6), nn.ReLU(), L(6, 4))
    for f, says in ((lambda: mutually_frozen(net, cutoff=-1), 'cutoff=-1 should be a finite number > 0'), (lambda: mutually_frozen(net, cutoff=float('nan')), 'cutoff=nan'),
                   (lambda: mutually_frozen(seq(L(5, 4)), (1, 5)), "Sequential has no pair of layers that can be counted: the model's output"),
                   (lambda: mutually_frozen(nn.ReLU()), 'ReLU has no weights'), (lambda: mutually_frozen('net'), 'model is a str'),
                   (lambda: mutually_frozen(net, 'x'), "x='x' should be a batch, its shape"), (lambda: mutually_frozen(net, (1, 7)), r"cannot be traced with an input of shape \(1, 7\)"),
                   (lambda: mutually_frozen(net, pairs=[('0', '3')]), "module='3' is not known"), (lambda: mutually_frozen(net, pairs=[('0', '1')]), r"'1' \(ReLU\) has no weight"),
                   (lambda: mutually_frozen(net, pairs=['0']), r'should be \(layer, next\) or \(layer, normalization, next\)')):
        with pytest.raises(ReinitError, match=says): f()

def test_untraceable_names_the_module_and_the_way_out():
    def broken(s, x): raise RuntimeError('no camera')
    net = nn.Sequential(L(4, 5), Net(broken), L(5, 2))
    with pytest.raises(ReinitError, match=r"It stops in '1': no camera. Or name the layers by hand, as in pairs="): mutually_frozen(net, (1, 4))
    torch.manual_seed(0)
    quiet(net[0], 1)
    deaf(net[2], 1)
    assert mutually_frozen(net, pairs=[('0', '2')]).double.sum() == 5 + 2

def test_scripted():
    with pytest.raises(ReinitError, match='cannot be traced|no pair'): mutually_frozen(torch.jit.script(seq(L(5, 6), nn.ReLU(), L(6, 4))), (1, 5))

def test_pairs_by_hand_agree_with_the_trace():
    for case in ('batch norm', 'norm, flatten', 'groups in', 'depthwise', 'grouped transposed'):
        make, shape, writer, reader, chans, k, size = CASES[case]
        net = make()
        for i in chans: quiet(net.get_submodule(writer), i); deaf(net.get_submodule(reader), i, k)
        quiet(net[0], chans[0])
        a, b = mutually_frozen(net, shape), mutually_frozen(net, pairs=[('0', '1', reader) if writer == '1' else ('0', reader)])
        assert a[['layer', 'frozen', 'double', 'triple', 'distinct']].equals(b[['layer', 'frozen', 'double', 'triple', 'distinct']])

# ---------------------------------------------------------------- files

def test_read_state(tmp_path):
    net = seq(L(5, 6), nn.ReLU(), L(6, 4))
    sd = net.state_dict()
    for i, o in enumerate((sd, dict(model=sd, opt=dict(lr=.1)), dict(state_dict={f'module.{k}': v for k, v in sd.items()}), {f'module._orig_mod.{k}': v for k, v in sd.items()}, dict(epoch=1, model=dict(state_dict=sd)))):
        torch.save(o, tmp_path / f'{i}.pth')
        got = read_state(tmp_path / f'{i}.pth')
        assert list(got) == list(sd) and all(torch.equal(got[k], sd[k]) for k in sd)
    learn = learner(net)
    learn.path = tmp_path
    learn.save('fastai')
    assert list(read_state(tmp_path / 'models/fastai.pth')) == list(sd)

class Evil:
    def __reduce__(self): return os.mkdir, ('evil',)

def test_never_unpickled_unsafely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), 'a.pth')
    torch.save(dict(model=Evil()), 'b.pth')
    with open('c.pth', 'wb') as f: pickle.dump(Evil(), f)
    torch.save(seq(L(2, 2)), 'd.pth')
    for o in 'abd':
        with pytest.raises(ReinitError, match=r"holds more than tensors, and is not opened.*save model.state_dict\(\)"): read_state(f'{o}.pth')
    with pytest.raises(ReinitError, match="'c.pth'"): read_state('c.pth')
    assert not os.path.exists('evil')

def test_not_a_state_dict(tmp_path):
    torch.save([1, 2], tmp_path / 'a.pth')
    torch.save(dict(epoch=3, loss=.1), tmp_path / 'b.pth')
    (tmp_path / 'c.pth').write_bytes(b'hello')
    torch.save({}, tmp_path / 'd.pth')
    for n, says in (('a', 'holds a list, and no state dict'), ('b', 'holds a dict with keys epoch, loss, and no state dict'), ('c', 'damaged, or not written by torch.save'), ('d', 'no state dict'), ('none', 'there is no file')):
        with pytest.raises(ReinitError, match=says): read_state(tmp_path / f'{n}.pth')
    with pytest.raises(ReinitError, match='cannot be read'): read_state(tmp_path)

def test_load_arch():
    net = frozen_resnet()
    got = load_arch('resnet18', net.state_dict())
    assert got.fc.out_features == 5 and type(got).__module__.startswith('torchvision')
    assert mutually_frozen(got).equals(mutually_frozen(net))
    ours = model('resnet18', width=.25, c_in=1, n_out=4)
    assert load_arch('resnet18', ours.state_dict(), width=.25, c_in=1).head.classifier.out_features == 4
    assert load_arch('reinit_nb:resnet18', ours.state_dict(), width=.25, c_in=1)
    sd = net.state_dict()
    for arch, state, says in (('resnet18', {k: v for k, v in sd.items() if 'layer4' not in k}, r'does not fit torchvision:resnet18: \d+ missing: layer4.0.conv1.weight, .* and \d+ more'),
                            ('torchvision:resnet18', sd | {'extra.weight': torch.zeros(2)}, '1 not in it: extra.weight'),
                            ('torchvision:resnet18', sd | {'conv1.weight': torch.zeros(64, 1, 7, 7)}, r'of another shape: conv1.weight is \(64, 1, 7, 7\) and should be \(64, 3, 7, 7\)'),
                            ('resnet81', sd, "did you mean 'resnet18'?"), ('torch:resnet18', sd, "arch='torch' is not known"), ('reinit_nb:nope', sd, 'is not a network of reinit_nb')):
        with pytest.raises(ReinitError, match=says): load_arch(arch, state)
    with pytest.raises(ReinitError, match='cannot be made with'): load_arch('torchvision:resnet18', sd, depth=3)

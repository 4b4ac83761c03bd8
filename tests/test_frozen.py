"Mutually frozen weights: networks with a known number of them, independent counts, training, wrong input"
import copy

import fastai.callback.schedule  # noqa: F401  adds lr_find
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
from wiring_cases import (
    CASES,
    Concatenated,
    Conv,
    Dense,
    Net,
    Preactivation,
    check_left_alone,
    frozen_resnet,
    sequential,
    zero_column,
    zero_row,
)

from reinit_nb.core import ReinitError
from reinit_nb.frozen import (
    MutuallyFrozenCallback,
    dead_units,
    effective_rank,
    frozen_filters,
    frozen_pairs,
    frozen_totals,
    mutually_frozen,
    plot_frozen,
    row_col_norms,
)
from reinit_nb.models import model
from reinit_nb.wiring import layer_readers
from reinit_nb.zoo import resnet18_imagenet_part, resnet50_imagenet


def small_mlp(): return sequential(Dense(5, 6), nn.ReLU(), Dense(6, 4))

# ---------------------------------------------------------------- known numbers

@pytest.mark.parametrize('case', CASES)
def test_known_number(case):
    make, shape, writer, reader, channels, positions, size = CASES[case]
    net = make()
    assert mutually_frozen(net, shape).double.sum() == 0
    for i in channels: zero_row(net.get_submodule(writer), i)
    assert mutually_frozen(net, shape).double.sum() == 0                     # a row alone is not enough
    for i in channels: zero_column(net.get_submodule(reader), i, positions)
    df = mutually_frozen(net, shape)
    by = df.set_index('layer')
    assert df.double.sum() == size * len(channels)
    assert by.double[writer] + by.double[reader] == size * len(channels)
    assert by.frozen[writer] == len(channels) and frozen_totals(df).frozen[0] == len(channels)
    assert by.small_rows[writer] == len(channels)
    with torch.no_grad(): net.get_submodule(writer).weight.add_(.1)
    assert mutually_frozen(net, shape).double.sum() == 0

def test_triple_with_norm():
    net = CASES['batch norm'][0]()
    for i in (1, 2):
        zero_row(net[1], i)
        zero_column(net[3], i)
    zero_row(net[0], 2)
    by = mutually_frozen(net, (1, 3, 9, 9)).set_index('layer')
    assert by.triple.tolist() == [28, 2, 45]
    assert by.double.tolist() == [0, 4, 90]
    assert by.distinct.tolist() == [28, 4, 90]
    assert by.frozen.tolist() == [2, 2, 0]

def test_triple_by_the_text():
    net = sequential(Dense(5, 6), nn.ReLU(), Dense(6, 4), nn.ReLU(), Dense(4, 3), nn.ReLU(), Dense(3, 2))
    for i in (1, 5):
        zero_row(net[0], i)
        zero_column(net[2], i)
    zero_column(net[4], 1)                           # column 1 of the layer after; there is no column 5
    df = mutually_frozen(net, (1, 5))
    assert df.double.tolist() == [12, 8, 0, 0]
    assert df.triple.tolist() == [6, 4, 3, 0]

def test_rows_and_columns_overlap():
    net = sequential(Dense(5, 6), nn.ReLU(), Dense(6, 4), nn.ReLU(), Dense(4, 3))
    with torch.no_grad():
        for p in net.parameters(): p.zero_()
    t = frozen_totals(mutually_frozen(net, (1, 5)))
    assert t.double[0] == (36 + 24) + (28 + 12)
    assert t.distinct[0] == 36 + 28 + 12             # the weights in the middle once
    assert t.frozen[0] == 10 and t.weights[0] == 36 + 28 + 15

@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=3, max_size=5), st.integers(0, 10**6), st.booleans())
def test_mlp_against_loops(widths, seed, bias):
    g = torch.Generator().manual_seed(seed)
    net = nn.Sequential(*(m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.ReLU())))
    layers = [m for m in net if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for m in layers:
            m.weight.copy_(torch.randn(m.weight.shape, generator=g))
            m.bias.copy_(torch.randn(m.bias.shape, generator=g))
            m.weight[torch.rand(len(m.weight), generator=g) < .6] = 0
            m.weight[:, torch.rand(m.weight.shape[1], generator=g) < .6] = 0
            m.bias[torch.rand(len(m.bias), generator=g) < .8] = 0
    double = 0
    for a, b in zip(layers, layers[1:]):
        for i in range(a.out_features):
            row = torch.cat([a.weight[i], a.bias[i:i + 1] * bias])
            if row.norm() < 1e-2 and b.weight[:, i].norm() < 1e-2: double += a.in_features + 1 + b.out_features
    assert mutually_frozen(net, (1, widths[0]), bias=bias).double.sum() == double

@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_norms(groups, o, i, k, transposed):
    w, b = torch.randn(groups * o, i, k, k), torch.randn(groups * (i if transposed else o))
    rows, cols = row_col_norms(w, b, groups, transposed)
    for g in range(groups):
        part = w[g * o:(g + 1) * o]
        if transposed: part = part.transpose(0, 1)
        for j in range(part.shape[0]):
            at = g * part.shape[0] + j
            assert abs(rows[at] - torch.cat([part[j].flatten(), b[at, None]]).norm()) < 1e-5
        for j in range(part.shape[1]): assert abs(cols[g * part.shape[1] + j] - part[:, j].norm()) < 1e-5

# ---------------------------------------------------------------- nothing is lost, nothing learns

def test_stream_needs_all_writers_and_readers():
    net = frozen_resnet()
    by = mutually_frozen(net).set_index('layer')
    frozen = by.frozen[['layer1.0.conv1', 'layer3.1.conv1', 'layer4.0.conv2', 'layer4.0.downsample.0',
                        'layer4.1.conv2']]
    assert frozen.tolist() == [2, 2, 1, 1, 1]
    assert by[by.role == 'layer'].frozen.sum() == 7
    for loud in (net.layer4[0].bn2.weight, net.layer4[0].downsample[1].bias, net.layer4[1].conv1.weight, net.fc.weight):
        old = loud.detach().clone()
        with torch.no_grad(): loud[(slice(None), 3) if loud.ndim > 1 else 3] = .5
        assert mutually_frozen(net).set_index('layer').frozen['layer4.1.conv2'] == 0
        with torch.no_grad(): loud.copy_(old)
    assert mutually_frozen(net).set_index('layer').frozen['layer4.1.conv2'] == 1

def test_frozen_weights_get_no_gradient():
    "What the count reports is true: at exactly zero, rows, entries and columns of a frozen channel have no gradient"
    net = frozen_resnet().train()
    F.cross_entropy(net(torch.randn(4, 3, 64, 64)), torch.tensor([0, 1, 2, 3])).backward()
    for b in (net.layer1[0], net.layer3[1]):
        for i in (0, 7):
            assert not b.bn1.weight.grad[i] and not b.bn1.bias.grad[i]
            assert not b.conv1.weight.grad[i].any() and not b.conv2.weight.grad[:, i].any()
        assert b.bn1.weight.grad.any() and b.conv2.weight.grad.any()
    last = net.layer4[1]
    assert not net.fc.weight.grad[:, 3].any() and not last.bn2.weight.grad[3] and not last.conv1.weight.grad[:, 3].any()

def test_removing_changes_nothing():
    net = frozen_resnet().eval()
    x = torch.randn(2, 3, 64, 64)
    small = copy.deepcopy(net)
    b = small.layer1[0]
    keep = [i for i in range(64) if i not in (0, 7)]
    conv1, bn1, conv2 = Conv(64, 62, 3, padding=1, bias=False), nn.BatchNorm2d(62), Conv(62, 64, 3, padding=1,
                                                                                         bias=False)
    with torch.no_grad():
        conv1.weight.copy_(b.conv1.weight[keep])
        conv2.weight.copy_(b.conv2.weight[:, keep])
        for k in ('weight', 'bias', 'running_mean', 'running_var'): getattr(bn1, k).copy_(getattr(b.bn1, k)[keep])
    b.conv1, b.bn1, b.conv2 = conv1, bn1, conv2
    torch.testing.assert_close(small.eval()(x), net(x), rtol=1e-4, atol=1e-5)
    assert mutually_frozen(small).set_index('layer').frozen['layer1.0.conv1'] == 0

def test_concatenation():
    torch.manual_seed(0)
    net = Concatenated()
    zero_row(net.a, 1)
    zero_column(net.b, 1)
    zero_column(net.c, 1)
    assert mutually_frozen(net, (1, 3, 8, 8)).frozen.sum() == 0           # d still reads it
    zero_column(net.d, 1)
    assert mutually_frozen(net, (1, 3, 8, 8)).double.tolist() == [28, 45, 6, 2]
    zero_row(net.b, 2)
    zero_column(net.c, 4 + 2)                        # the third of the second part
    assert mutually_frozen(net, (1, 3, 8, 8)).frozen.tolist() == [1, 1, 0, 0]

def test_preactivation():
    torch.manual_seed(0)
    net = Preactivation()
    def counts(): return mutually_frozen(net, (1, 3, 8, 8)).set_index('layer')
    zero_row(net.n1, 1)
    zero_column(net.c1, 1)
    assert counts().double.to_dict() == {'stem': 0, 'n1': 2, 'c1': 4, 'n2': 0, 'fc': 0}
    assert counts().frozen[['stem', 'n1']].tolist() == [0, 1]
    zero_row(net.n2, 1)
    zero_column(net.fc, 1)
    zero_row(net.stem, 1)
    assert counts().triple.sum() == 0                                     # c1 still writes the stream
    zero_row(net.c1, 1)
    by = counts()
    assert by.frozen[['stem', 'c1']].tolist() == [1, 1]
    assert by.triple.to_dict() == {'stem': 4, 'n1': 2, 'c1': 5 + 4, 'n2': 2, 'fc': 2}
    assert by.distinct['c1'] == 5 + 4 - 1

def test_pad_of_channels():
    torch.manual_seed(0)
    net = Net(lambda s, x: s.b(F.pad(s.a(x), (0, 0, 0, 0, 0, 2)).relu()), a=Conv(1, 3, 1), b=Conv(5, 2, 1))
    zero_row(net.a, 1)
    zero_column(net.b, 1)
    assert mutually_frozen(net, (1, 1, 4, 4)).double.sum() == 2 + 2

def test_weight_norm_and_pruning():
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(Dense(5, 6)), nn.ReLU(), Dense(6, 4))
    prune.custom_from_mask(net[2], 'weight', torch.ones(4, 6).index_fill(1, torch.tensor([2]), 0))
    with torch.no_grad():
        net[0].parametrizations.weight.original0[2] = 0
        net[0].bias[2] = 0
    assert mutually_frozen(net, (1, 5)).frozen[0] == 1

def test_half_precision():
    net = small_mlp().bfloat16()
    zero_row(net[0], 1)
    zero_column(net[2], 1)
    assert mutually_frozen(net, (1, 5)).frozen[0] == 1

@pytest.mark.parametrize('value', ['nan', 'inf', '-inf'])
@pytest.mark.parametrize('name', ['0.weight', '0.bias', '2.weight'])
def test_nan_and_infinity_are_refused(name, value):
    net = small_mlp()
    with torch.no_grad(): net.get_parameter(name).view(-1)[1] = float(value)
    said = f'{name} holds NaN or infinity, so nothing can be counted'
    with pytest.raises(ReinitError, match=said): mutually_frozen(net, (1, 5))
    if name == '0.bias': assert mutually_frozen(net, (1, 5), bias=False).frozen.sum() == 0      # biases are left out
    learn = learner(net, MutuallyFrozenCallback())
    with learn.no_logging(), pytest.raises(ReinitError, match='holds NaN'): learn.fit(1)

def test_consecutive_layers():
    "Without normalizations: rows of a layer and columns of the next, whatever is in between"
    net = CASES['batch norm'][0]()
    for i in (1, 2): zero_column(net[3], i)
    zero_row(net[0], 2)
    zero_row(net[1], 1)
    shape = (1, 3, 9, 9)
    assert mutually_frozen(net, shape).set_index('layer').frozen.to_dict() == {'0': 1, '1': 1, '3': 0}
    df = mutually_frozen(net, shape, rule='layers')
    assert df.layer.tolist() == ['0', '3'] and df.frozen.tolist() == [1, 0]
    assert df.double.tolist() == [28, 45] and frozen_totals(df).weights[0] == 4 * 28 + 5 * 37
    plain = CASES['conv'][0]()
    zero_row(plain[0], 2)
    zero_column(plain[2], 2)
    assert mutually_frozen(plain, shape, rule='layers').equals(mutually_frozen(plain, shape))   # nothing to leave out

def test_consecutive_layers_of_a_stream():
    net = frozen_resnet()
    df = mutually_frozen(net, rule='layers').set_index('layer')
    assert df.frozen[['layer1.0.conv1', 'layer3.1.conv1', 'layer4.1.conv2']].tolist() == [2, 2, 0]
    for conv in (net.layer4[0].conv2, net.layer4[0].downsample[0], net.layer4[1].conv2): zero_row(conv, 3)
    df = mutually_frozen(net, rule='layers').set_index('layer')
    assert df.frozen[['layer4.0.conv2', 'layer4.0.downsample.0', 'layer4.1.conv2']].tolist() == [1, 1, 1]
    torch.manual_seed(0)
    preactivation = Preactivation()
    zero_row(preactivation.stem, 1)
    zero_row(preactivation.c1, 1)
    zero_column(preactivation.c1, 1)
    shape = (1, 3, 8, 8)
    assert mutually_frozen(preactivation, shape, rule='layers').frozen.sum() == 0                   # fc still reads it
    zero_column(preactivation.fc, 1)
    assert mutually_frozen(preactivation, shape, rule='layers').frozen.tolist() == [1, 1, 0]

def test_pair_by_pair():
    "Each layer with each of its readers, against loops over rows and columns"
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=5)
    streams = {'conv1': ['layer1.0.conv1', 'layer1.1.conv1', 'layer2.0.conv1', 'layer2.0.downsample.0'],
               'layer1.0.conv1': ['layer1.0.conv2'], 'layer4.1.conv2': ['layer4.1.conv1', 'fc']}
    for writer, readers in streams.items():
        for i in (1, 5): zero_row(net.get_submodule(writer), i)
        for reader in readers[:2]: zero_column(net.get_submodule(reader), 5)
    df = frozen_pairs(net).set_index(['writer', 'reader'])
    for writer, readers in streams.items():
        row = net.get_submodule(writer).weight.flatten(1).norm(dim=1) < 1e-2
        for reader in readers:
            m = net.get_submodule(reader)
            column = m.weight.transpose(0, 1).flatten(1).norm(dim=1) < 1e-2
            found = df.loc[(writer, reader)]
            assert found.filters == len(row) and found.small_rows == row.sum() and found.small_cols == column.sum()
            assert found.frozen == (row & column).sum()
            assert found.double == found.frozen * (net.get_submodule(writer).weight[0].numel() + m.weight[:, 0].numel())
    assert df.frozen.sum() == 2 + 1 + 2                                # not all readers of the streams are small
    assert mutually_frozen(net, rule='layers').frozen.sum() == 1
    for case, (make, shape, writer, reader, channels, positions, size) in CASES.items():
        if 'norm' in case and case not in ('fixed norm',): continue
        small = make()
        for i in channels:
            zero_row(small.get_submodule(writer), i)
            zero_column(small.get_submodule(reader), i, positions)
        df = frozen_pairs(small, shape)
        assert df.frozen.sum() == len(channels) and df.double.sum() == size * len(channels), case

def naive_pairs(layers, cutoff=1e-2):
    "Section 6.2 in loops: filters and double-frozen weights of (layer, next layer) pairs, without biases"
    filters = weights = 0
    for a, b in layers:
        for i in range(len(a.weight)):
            row, column = a.weight[i].detach(), b.weight[:, i].detach()
            if row.norm() < cutoff and column.norm() < cutoff:
                filters += 1
                weights += row.numel() + column.numel()
    return filters, weights

def residual_sequence(net):
    "The convolutions of a torchvision ResNet and its classifier as (layer, next layer), without the shortcuts"
    convs = [m for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and 'downsample' not in n]
    layers = [*convs, net.fc]
    return list(zip(layers, layers[1:]))

@pytest.mark.parametrize('arch', ['resnet18', 'resnet50'])
@pytest.mark.parametrize('seed', [0, 1])
def test_pairs_of_consecutive_layers_against_loops(arch, seed):
    torch.manual_seed(seed)
    net = torchvision.models.get_model(arch, num_classes=7)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in net.modules():
            if not isinstance(m, (nn.Conv2d, nn.Linear)): continue
            m.weight[torch.rand(len(m.weight), generator=g) < .3] *= 1e-5
            m.weight[:, torch.rand(m.weight.shape[1], generator=g) < .3] *= 1e-5
            if m.bias is not None: m.bias.zero_()
    expected = naive_pairs(residual_sequence(net))
    df = mutually_frozen(net, (1, 3, 64, 64), rule='pairs')
    assert expected[0] > 100 and (df.frozen.sum(), df.double.sum()) == expected
    assert frozen_totals(df).filters[0] == sum(len(a.weight) for a, _ in residual_sequence(net))
    assert not df[df.layer.str.contains('downsample')].countable.any()      # a shortcut is not in the sequence
    listed = frozen_filters(net, (1, 3, 64, 64))
    assert len(listed) == expected[0] and (listed.row < 1e-2).all() and (listed.column < 1e-2).all()
    modules = dict(net.named_modules())
    for o in listed.iloc[::37].itertuples():
        assert np.isclose(o.row, modules[o.layer].weight[o.filter].detach().norm(), rtol=1e-4)
        assert np.isclose(o.column, modules[o.next].weight[:, o.filter].detach().norm(), rtol=1e-4)
        norm = modules[o.layer.replace('conv', 'bn')]
        assert (o.gamma, o.beta) == (float(norm.weight[o.filter]), float(norm.bias[o.filter]))
    assert mutually_frozen(net, (1, 3, 64, 64), cutoff=1e-9, rule='pairs').double.sum() == 0

@pytest.mark.parametrize('case', [k for k in CASES if 'norm' not in k])
def test_one_writer_and_one_reader_each_way_the_same(case):
    "Without normalizations and streams all rules agree"
    make, shape, writer, reader, channels, positions, size = CASES[case]
    net = make()
    for i in channels:
        zero_row(net.get_submodule(writer), i)
        zero_column(net.get_submodule(reader), i, positions)
    df = mutually_frozen(net, shape, rule='pairs')
    assert df.frozen.sum() == len(channels) and df.double.sum() == size * len(channels)

def test_triple_by_pairs():
    "Column i of the layer after the next"
    net = sequential(Dense(5, 6), nn.ReLU(), Dense(6, 7), nn.ReLU(), Dense(7, 3))
    zero_row(net[0], 1)
    zero_column(net[2], 1)
    assert mutually_frozen(net, (1, 5), rule='pairs').triple.sum() == 0
    zero_column(net[4], 1)
    df = mutually_frozen(net, (1, 5), rule='pairs')
    assert df.triple.tolist() == [6, 7, 3] == mutually_frozen(net, (1, 5)).triple.tolist()
    assert df.equals(mutually_frozen(net, (1, 5)))

def test_concatenated_branches_all_count():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b, self.mix = Conv(3, 4, 1), Conv(4, 5, 1), Conv(4, 6, 1), Conv(11, 2, 1)
        def forward(self, x):
            h = self.stem(x).relu()
            return self.mix(torch.cat([self.a(h), self.b(h)], 1).relu())
    net = Branches()
    zero_row(net.b, 2)
    zero_column(net.mix, 5 + 2)
    df = mutually_frozen(net, (1, 3, 4, 4), rule='pairs').set_index('layer')
    assert df.countable.to_dict() == dict(stem=4, a=5, b=6, mix=0)
    assert df.frozen.to_dict() == dict(stem=0, a=0, b=1, mix=0)

def test_unknown_rule():
    with pytest.raises(ReinitError, match='rule'): mutually_frozen(small_mlp(), (1, 5), rule='rows')
    with pytest.raises(ReinitError, match='rule'): MutuallyFrozenCallback(rule='rows')

def test_callback_counts_pairs():
    net = small_mlp()
    zero_row(net[0], 1)
    zero_column(net[2], 1)
    cb = MutuallyFrozenCallback(rule='pairs')
    learn = learner(net, cb)
    with learn.no_logging(): learn.fit(1)
    assert cb.totals.frozen.tolist()[0] == 1

@pytest.mark.data
def test_frozen_filters_of_the_keras_resnet50():
    "Section 6.2 on the network that the paper counts: 7 filters, 3,136 weights"
    net = resnet50_imagenet()
    df = mutually_frozen(net, (1, 3, 64, 64), rule='pairs')
    assert (df.frozen.sum(), df.double.sum()) == naive_pairs(residual_sequence(net)) == (7, 3136)
    assert mutually_frozen(net, (1, 3, 64, 64)).frozen.sum() == 0           # by channels, with normalizations

@pytest.mark.data
def test_dead_filters_of_torchvisions_resnet18():
    "Eight of 64 stem filters, 5,784 weights"
    net = resnet18_imagenet_part()
    listed = frozen_filters(net, (1, 3, 64, 64))
    assert listed.layer.unique().tolist() == ['conv1'] and listed.next.unique().tolist() == ['layer1.0.conv1']
    assert listed['filter'].tolist() == [2, 4, 7, 9, 13, 36, 38, 48]
    assert listed.row.max() < 1e-4 and listed.column.max() < 1e-4
    df = mutually_frozen(net, (1, 3, 64, 64), rule='pairs')
    assert (df.frozen.sum(), df.double.sum()) == (8, 5784)
    assert mutually_frozen(net, (1, 3, 64, 64)).frozen.sum() == 0           # the stream is written and read again

def test_pairs_by_hand_agree_with_the_trace():
    columns = ['layer', 'frozen', 'double', 'triple', 'distinct']
    for case in ('batch norm', 'norm, flatten', 'groups in', 'depthwise', 'grouped transposed'):
        make, shape, writer, reader, channels, positions, _ = CASES[case]
        net = make()
        for i in channels:
            zero_row(net.get_submodule(writer), i)
            zero_column(net.get_submodule(reader), i, positions)
        zero_row(net[0], channels[0])
        pair = ('0', '1', reader) if writer == '1' else ('0', reader)
        assert mutually_frozen(net, shape)[columns].equals(mutually_frozen(net, pairs=[pair])[columns])

# ---------------------------------------------------------------- real networks

@pytest.mark.parametrize('name', ['resnet26d', 'vit_tiny_patch16_224', 'coat_lite_tiny'])
def test_timm(name):
    timm = pytest.importorskip('timm')
    with torch.random.fork_rng(): net = timm.create_model(name)
    assert frozen_totals(mutually_frozen(net)).filters[0] == layer_readers(net).countable.sum()

def test_ours():
    for name in ('mlp', 'scnn', 'mobilenet', 'resnet50', 'resnet18', 'allcnn', 'vgg16'):
        net = model(name, width=.25)
        t = frozen_totals(mutually_frozen(net, (1, 3 * 32 * 32) if name == 'mlp' else (1, 3, 32, 32)))
        assert t.frozen[0] == 0 and t.filters[0] > 0
        assert t.weights[0] == sum(p.numel() for p in net.parameters())

def test_model_is_left_alone():
    check_left_alone(lambda net: mutually_frozen(net, data=torch.zeros(2, 3, 64, 64)))

# ---------------------------------------------------------------- dead units

def test_dead_units_against_numpy():
    torch.manual_seed(0)
    net = sequential(Conv(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), Conv(5, 6, 3), nn.ReLU(), nn.Flatten(),
                     Dense(6 * 16, 4))
    x = torch.randn(30, 1, 8, 8)
    with torch.no_grad():
        net[1].bias[2] = -50
        net[3].bias[1] = -50
    df = dead_units(net, [(x[:20], 0), (x[20:], 0)]).set_index('layer')
    assert df.dead.tolist() == [1, 1] and df.dead_share.tolist() == [.2, 1 / 6]
    z = net.eval()[:3](x).detach().movedim(1, -1).reshape(-1, 5).double().numpy()
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum()
    p = p[p > 1e-9]
    assert abs(df['rank'].iloc[0] - np.exp(-(p * np.log(p)).sum())) < 1e-6
    assert df.srank.iloc[0] == int((np.cumsum(p) < .99).sum()) + 1
    assert effective_rank(torch.diag(torch.tensor([1., 1, 0]))) == pytest.approx((2, 2))
    for data, says in ((3, 'data is a int'), ([], 'data is empty'), (torch.zeros(2, 7, 8, 8), 'cannot be traced')):
        with pytest.raises(ReinitError, match=says): dead_units(net, data)

# ---------------------------------------------------------------- training

def learner(net, *cbs, n=20, **kw):
    g = torch.Generator().manual_seed(0)
    ds = TensorDataset(torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g))
    dls = DataLoaders(DataLoader(ds, 10), DataLoader(ds, 10))
    return Learner(dls, net, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, cbs=cbs, **kw).remove_cb(ProgressCallback)

def test_callback():
    net = sequential(Dense(5, 6), nn.ReLU(), Dense(6, 3))
    zero_row(net[0], 1)
    zero_column(net[2], 1)
    learn = learner(net, MutuallyFrozenCallback())
    with learn.no_logging(): learn.fit(3, .1)
    cb = learn.mutually_frozen
    assert cb.df.epoch.unique().tolist() == [0, 1, 2, 3]
    assert (cb.totals.frozen == 1).all()             # it stays, by itself
    learn.validate()
    learn.get_preds()
    assert len(cb.counts) == 4
    with learn.no_logging(): learn.lr_find(show_plot=False, num_it=20)
    assert len(cb.counts) == 4
    with learn.no_logging(): learn.fit(2, .1)
    assert cb.df.epoch.unique().tolist() == [0, 1, 2]
    assert len(cb.plot().lines) == 1

def test_callback_every_and_checks():
    learn = learner(sequential(Dense(5, 6), nn.ReLU(), Dense(6, 3)), MutuallyFrozenCallback(every=2))
    with learn.no_logging(): learn.fit(5, .1)
    assert learn.mutually_frozen.df.epoch.unique().tolist() == [0, 2, 4, 5]
    with pytest.raises(ReinitError, match='cutoff=-1'): MutuallyFrozenCallback(-1)
    with pytest.raises(ReinitError, match='nothing was counted'): MutuallyFrozenCallback().plot()
    learn = learner(sequential(Dense(5, 3)), MutuallyFrozenCallback())
    with learn.no_logging(), pytest.raises(ReinitError, match='no pair of layers'): learn.fit(1)

@pytest.mark.parametrize('wd', [0., .5])
def test_weight_decay_freezes(wd):
    "Units that start small fall to zero with weight decay, and do not without"
    net = sequential(Dense(5, 6), nn.ReLU(), Dense(6, 3))
    with torch.no_grad():
        net[0].weight[1] = .02
        net[0].bias[1] = 0
        net[2].weight[:, 1] = .02
    learn = learner(net, MutuallyFrozenCallback(), wd_bn_bias=True)
    with learn.no_logging(): learn.fit(30, .1, wd=wd)
    cb = learn.mutually_frozen
    assert cb.totals.frozen.iloc[0] == 0
    if wd: assert cb.df.query('layer == "0"').frozen.iloc[-1] >= 1
    else: assert not cb.totals.frozen.any()

def test_plot():
    assert len(plot_frozen(mutually_frozen(frozen_resnet())).patches) == 20

# ---------------------------------------------------------------- wrong input

def test_wrong_input():
    net = small_mlp()
    for f, says in ((lambda: mutually_frozen(net, cutoff=-1), 'cutoff=-1 should be a finite number > 0'),
                    (lambda: mutually_frozen(net, cutoff=float('nan')), 'cutoff=nan'),
                    (lambda: mutually_frozen(sequential(Dense(5, 4)), (1, 5)),
                     "Sequential has no pair of layers that can be counted: the model's output"),
                    (lambda: mutually_frozen(nn.ReLU()), 'ReLU has no weights'),
                    (lambda: mutually_frozen('net'), 'model is a str')):
        with pytest.raises(ReinitError, match=says): f()

def test_named_pairs_where_tracing_fails():
    def broken(s, x): raise RuntimeError('no camera')
    net = nn.Sequential(Dense(4, 5), Net(broken), Dense(5, 2))
    with pytest.raises(ReinitError, match='no camera'): mutually_frozen(net, (1, 4))
    zero_row(net[0], 1)
    zero_column(net[2], 1)
    assert mutually_frozen(net, pairs=[('0', '2')]).double.sum() == 5 + 2

def test_scripted():
    with pytest.raises(ReinitError, match='cannot be traced|no pair'): mutually_frozen(torch.jit.script(small_mlp()),
                                                                                       (1, 5))


def test_spectral_norm_is_left_alone():
    "A weight that is computed is read in evaluation mode: in training mode each look changes a spectral norm"
    spectral_norm = nn.utils.parametrizations.spectral_norm
    m = sequential(spectral_norm(Conv(3, 4, 3)), nn.ReLU(), spectral_norm(Conv(4, 4, 3)))
    before = {k: v.clone() for k, v in m.state_dict().items()}
    mutually_frozen(m, (1, 3, 8, 8))
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
    assert m.training and all(module.training for module in m.modules())

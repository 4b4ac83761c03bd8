"Which layer reads which: known networks, real networks, what cannot be counted, and a model that stays as it was"
import time

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import prune
from wiring_cases import CASES, Concatenated, Conv, Dense, Net, Preactivation, check_left_alone, sequential

from reinit_nb.blocks import blocks
from reinit_nb.core import ReinitError
from reinit_nb.fixed_norm import FixedNorm, add_norms
from reinit_nb.models import model
from reinit_nb.wiring import layer_readers, plot_wiring, wiring


def readers_of(f, shape=(1, 4), **modules): return layer_readers(Net(f, **modules), shape).set_index('layer')

# ---------------------------------------------------------------- small networks

@pytest.mark.parametrize('case', CASES)
def test_one_layer_reads_the_other(case):
    make, shape, writer, reader, *_ = CASES[case]
    t = layer_readers(make(), shape).set_index('layer')
    first = '0' if '0' in t.index else '1'
    assert t.next[first] == reader and t.next[reader] == ''
    assert t.countable[first] == t.rows[first] and t.countable[reader] == 0
    assert t.norm[first] == (writer if writer != first else '')

def test_concatenation():
    t = layer_readers(Concatenated(), (1, 3, 8, 8)).set_index('layer')
    assert t.next['a'] == 'b, c, d' and t.next['b'] == 'c'
    assert t.countable.tolist() == [4, 5, 0, 0]

def test_preactivation():
    "A normalization behind a sum belongs to each of its readers"
    t = layer_readers(Preactivation(), (1, 3, 8, 8)).set_index('layer')
    assert t.norm['stem'] == 'n1, n2' and t.next['stem'] == 'c1, fc'
    assert t.joins['stem'] == 'c1' and t.countable['stem'] == 4

def test_residual_table():
    t = layer_readers(torchvision.models.resnet18()).set_index('layer')
    assert t.next['layer1.0.conv1'] == 'layer1.0.conv2' and t.norm['layer1.0.conv1'] == 'layer1.0.bn1'
    assert t.next['conv1'] == 'layer1.0.conv1, layer1.1.conv1, layer2.0.conv1, layer2.0.downsample.0'
    assert t.joins['layer4.0.downsample.0'] == 'layer4.0.conv2, layer4.1.conv2'
    assert t.next['layer4.1.conv2'] == 'layer4.1.conv1, fc'

def test_in_place_and_moves():
    def forward(s, x):
        h = s.a(x).relu_().add_(s.c(x)).mul_(2)
        return s.b(h.view(1, 2, 2).transpose(1, 2).reshape(1, 4)[:, [3, 2, 1, 0]])
    t = readers_of(forward, a=Dense(4, 4), b=Dense(4, 3), c=Dense(4, 4))
    assert t.countable.to_dict() == {'a': 4, 'c': 4, 'b': 0}
    assert t.joins['a'] == 'c' and t.next['a'] == 'b'
    t = readers_of(lambda s, x: s.b(F.pixel_shuffle(s.a(x), 2)), (1, 1, 4, 4), a=Conv(1, 8, 1), b=Conv(2, 3, 1))
    assert t.countable['a'] == 0 and 'b mixes positions' in t.why['a']

def test_index_from_a_buffer():
    "An index that is a buffer has no values on the meta device: those of the model are used"
    net = Net(lambda s, x: s.b(s.a(x)[:, s.index]), a=Dense(4, 4), b=Dense(3, 2))
    net.register_buffer('index', torch.tensor([3, 0, 1]))
    w = wiring(net, (1, 4))
    assert w.parts[1].cols.tolist() == w.parts[0].rows[[3, 0, 1]].tolist()
    assert layer_readers(net, (1, 4)).countable.tolist() == [3, 0]      # nobody reads unit 2
    net = Net(lambda s, x: s.b(s.a(x)[:, s.index + 1]), a=Dense(4, 4), b=Dense(2, 2))
    net.register_buffer('index', torch.tensor([2, 0]))
    assert 'getitem cannot be followed' in layer_readers(net, (1, 4)).why[0]

def test_model_without_values():
    "A model on the meta device is traced as well, but for indices that only its buffers know"
    with torch.device('meta'): net = torchvision.models.resnet18()
    assert layer_readers(net).equals(layer_readers(torchvision.models.resnet18()))
    net = Net(lambda s, x: s.b(s.a(x)[:, s.index]), a=Dense(4, 4), b=Dense(3, 2))
    net.register_buffer('index', torch.tensor([3, 0, 1]))
    t = layer_readers(net.to('meta'), (1, 4))
    assert t.countable[0] == 0 and 'getitem cannot be followed' in t.why[0]

def test_what_cannot_be_counted_says_why():
    a, b = Dense(4, 4), Dense(4, 3)
    def why(f, layer='a', **more): return readers_of(f, a=a, b=b, **more).why[layer]
    assert 'sigmoid does not keep zero (in Net)' in why(lambda s, x: s.b(s.a(x).sigmoid()))
    assert 'softmax' in why(lambda s, x: s.b(s.a(x).softmax(1)))
    assert 'cumsum cannot be followed' in why(lambda s, x: s.b(s.a(x).cumsum(1)))
    assert 'multiplied with other channels' in why(lambda s, x: s.b(s.a(x) * s.c(x)), 'c', c=Dense(4, 4))
    assert 'used more than once' in why(lambda s, x: s.b(s.a(s.a(x).relu())))
    assert 'no layer reads it' in why(lambda s, x: (s.a(x), s.b(x))[1])
    assert "the model's output" in why(lambda s, x: (lambda h: dict(out=s.b(h), h=h))(s.a(x)))
    assert 'sum over channels' in why(lambda s, x: s.b(s.a(x).sum(1, keepdim=True).expand(-1, 4)))
    t = readers_of(lambda s, x: s.b(s.a(x) + 1), a=a, b=b)
    assert t.countable['a'] == 4 and '1 is added' in t.remark['a']
    net = Net(lambda s, x: s.b(s.a(x) + s.p), a=a, b=b)
    net.p = nn.Parameter(torch.zeros(4))
    assert layer_readers(net, (1, 4)).why[0] == 'the parameter p is added'

def test_norm_without_weights_over_mixed_channels():
    "A normalization without weights over more than channels has no remark, and is no error"
    t = readers_of(lambda s, x: s.b(F.layer_norm(s.a(x).view(1, 2, 2), (2,)).view(1, 4)), a=Dense(4, 4), b=Dense(4, 3))
    assert t.countable['a'] == 4

def test_fixed_norms_of_lw():
    net = model('scnn', c_in=1, size=8, width=.25)
    add_norms(blocks(net))
    t = layer_readers(net, (1, 1, 8, 8))
    assert t.countable.sum() and not t.remark.any()      # the identity
    for m in net.modules():
        if isinstance(m, FixedNorm): m.mu.fill_(.3)
    t = layer_readers(net, (1, 1, 8, 8)).set_index('layer')
    assert 'is added' in t.remark['block1.conv'] and t.countable['block1.conv'] == 8

def test_computed_weights():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(Dense(5, 6)), nn.ReLU(), Dense(6, 4))
    prune.random_unstructured(net[2], 'weight', .5)
    t = layer_readers(net, (1, 5))
    assert t.countable[0] == 6 and 'computed from others' in t.remark[0]

def test_looks_at_values():
    "A network that looks at its data cannot run on the meta device, and is run as it is"
    net = Net(lambda s, x: s.b(s.a(x).relu()) if x.sum() < 1e9 else x, a=Dense(4, 5), b=Dense(5, 2))
    assert layer_readers(net, torch.zeros(3, 4)).countable.tolist() == [5, 0]

# ---------------------------------------------------------------- real networks

@pytest.mark.parametrize('name', ['mobilenet_v2', 'densenet121', 'shufflenet_v2_x0_5', 'squeezenet1_0',
                                  'regnet_y_400mf', 'convnext_tiny', 'swin_v2_t'])
def test_torchvision(name):
    with torch.random.fork_rng(): net = torchvision.models.get_model(name)
    t = layer_readers(net)
    assert len(t) == sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in net.modules())
    assert t.countable.sum() > (.4 if name.startswith('swin') else .5) * t.rows.sum()
    assert ((t.countable == t.rows) | (t.why != '')).all()
    assert t['next'].iloc[-1] == ''

@pytest.mark.parametrize('name', ['resnet26d', 'efficientnet_b0', 'resnetv2_50', 'mixer_s32_224',
                                  'vit_tiny_patch16_224', 'nf_resnet26', 'poolformer_s12'])
def test_timm(name):
    timm = pytest.importorskip('timm')
    with torch.random.fork_rng(): net = timm.create_model(name)
    began = time.process_time()
    t = layer_readers(net)
    assert time.process_time() - began < 30   # seconds; poolformer took minutes when joins were quadratic
    assert t.countable.sum() > .2 * t.rows.sum()
    assert ((t.countable == t.rows) | (t.why != '')).all()

# ---------------------------------------------------------------- the model is left alone

def test_model_is_left_alone():
    check_left_alone(lambda net: layer_readers(net))

class TwoNames(nn.Module):
    "One module under two names, one activation with weights in two places"
    def __init__(self, fails=False):
        super().__init__()
        self.p, self.act = Dense(4, 4), nn.PReLU()
        self.q = nn.Sequential(self.p, nn.ReLU(), self.act)
        self.out = nn.Sequential(Dense(4, 4), self.act, Dense(4, 2))
        self.fails = fails
    def forward(self, x):
        x = self.q(x)
        self.seen = x                  # some modules keep tensors as attributes
        if self.fails: raise RuntimeError('no camera')
        return self.out(x)

@pytest.mark.parametrize('fails', [False, True])
def test_module_under_two_names(fails):
    net = TwoNames(fails)
    net.register_buffer('unused', torch.ones(2))
    def tensors(): return {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}
    before = tensors()
    if fails:
        with pytest.raises(ReinitError, match='no camera'): wiring(net, (1, 4))
    else: wiring(net, (1, 4))
    assert list(tensors()) == list(before) and all(tensors()[n] is t for n, t in before.items())
    assert not any(t.is_meta for t in tensors().values()) and not hasattr(net, 'seen')

def test_timm_module_under_two_names():
    timm = pytest.importorskip('timm')
    with torch.random.fork_rng(): net = timm.create_model('coat_lite_tiny')
    wiring(net)
    assert not any(p.is_meta for p in net.parameters())

# ---------------------------------------------------------------- by hand, and wrong input

def test_pairs_by_hand():
    t = layer_readers(sequential(Conv(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Conv(4, 5, 3)),
                      pairs=[('0', '1', '3')]).set_index('layer')
    assert t.next['0'] == '3' and t.norm['0'] == '1' and t.countable.tolist() == [4, 0]
    t = layer_readers(sequential(Conv(3, 4, 3), nn.BatchNorm2d(4)), pairs=[('0', '1')])
    assert t.countable.tolist() == [0] and t.why.tolist() == ['no layer reads it']

WRONG = {
    'no weights': (lambda net: wiring(nn.ReLU()), 'ReLU has no weights'),
    'no model': (lambda net: wiring('net'), 'model is a str'),
    'text': (lambda net: wiring(net, 'x'), "x='x' should be a batch, its shape"),
    'shape': (lambda net: wiring(net, (1, 7)), r'cannot be traced with an input of shape \(1, 7\)'),
    'module': (lambda net: wiring(net, pairs=[('0', '3')]), "module='3' is not known"),
    'no weight': (lambda net: wiring(net, pairs=[('0', '1')]), r"'1' \(ReLU\) has no weight"),
    'no pair': (lambda net: wiring(net, pairs=['0']), r'should be \(layer, next\) or \(layer, normalization, next\)'),
    'no fit': (lambda net: wiring(net, pairs=[('2', '0')]), "'2' has 4 rows, and '0' 5 columns")}

@pytest.mark.parametrize('case', WRONG)
def test_wrong_input(case):
    f, says = WRONG[case]
    with pytest.raises(ReinitError, match=says): f(sequential(Dense(5, 6), nn.ReLU(), Dense(6, 4)))

def test_untraceable_names_the_module_and_the_way_out():
    def broken(s, x): raise RuntimeError('no camera')
    net = nn.Sequential(Dense(4, 5), Net(broken), Dense(5, 2))
    with pytest.raises(ReinitError, match=r"It stops in '1': no camera. Or name the layers by hand, as in pairs="):
        wiring(net, (1, 4))

def test_plot():
    import matplotlib.pyplot as plt
    ax = plot_wiring(wiring(Concatenated(), (1, 3, 8, 8)))
    assert [t.get_text() for t in ax.get_yticklabels()] == ['a', 'b', 'c', 'd']
    plt.close('all')


def test_lazy_layers_are_refused():
    m = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ReinitError, match='has no shape yet'): wiring(m, (1, 3))

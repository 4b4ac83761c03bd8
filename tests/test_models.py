"`reinit_nb.models`: what the networks are made of, what they cost, what they refuse"
import copy
import inspect
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from reinit_nb.core import ReinitError, Streams
from reinit_nb.init import draw_weights
from reinit_nb.models import (
    MODELS,
    NET_INITS,
    NORMS,
    PAPER_OPTIONS,
    block_table,
    convmixer,
    count_params,
    layer_table,
    mlp,
    mobilenet,
    model,
    multiply_adds,
    reservoir_layout,
    reservoir_names,
    resnet18,
    resnet50,
    scnn,
    vgg,
    vgg16,
)

K = dict(mlp=6, scnn=4, vgg16=13, mobilenet=7, resnet50=16, resnet18=8, allcnn=8)
each_model = pytest.mark.parametrize('name', K)
thin = dict(width=1 / 16)

def noise(*shape, seed=0): return torch.randn(*shape, generator=Streams(seed).noise)

def on_meta(f, **kw):
    with torch.device('meta'): return f(**kw)

# ---------------------------------------------------------------- what they are made of

def test_catalogue_is_complete():
    assert set(MODELS) == set(PAPER_OPTIONS) == set(K)
    assert {name: len(on_meta(make)) - 1 for name, make in MODELS.items()} == K

@each_model
@pytest.mark.parametrize('norm', NORMS)
def test_blocks_and_norms(name, norm):
    net = model(name, norm=norm, **thin)
    assert type(net) is nn.Sequential
    assert [n for n, _ in net.named_children()] == [*(f'block{i+1}' for i in range(K[name])), 'head']
    kinds = {type(m) for m in net.modules()} & {nn.GroupNorm, nn.BatchNorm2d, nn.BatchNorm1d}
    if norm == 'none': assert not kinds
    elif norm == 'layer':
        assert kinds == {nn.GroupNorm}
        assert all(m.num_groups == 1 for m in net.modules() if isinstance(m, nn.GroupNorm))
    else: assert kinds and nn.GroupNorm not in kinds
    if norm == 'none': assert all(m.bias is not None for m in net.modules() if isinstance(m, nn.Conv2d))

@each_model
@pytest.mark.parametrize('size,norm', [(32, 'batch'), (64, 'layer'), (224, 'layer'), (32, 'none')])
def test_forward_and_backward(name, size, norm):
    net = model(name, size=size, n_out=7, norm=norm, width=1 / 4 if name == 'mlp' else 1 / 16)
    out = net(noise(2, 3, size, size))
    assert out.shape == (2, 7) and out.isfinite().all()
    nn.functional.cross_entropy(out, torch.tensor([0, 1])).backward()
    bad = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not bad
    # every block takes part (not every parameter: a convolution's bias before a batch norm has no effect)
    assert all(any(p.grad.abs().sum() > 0 for p in b.parameters()) for b in net)

@each_model
@pytest.mark.parametrize('c_in', (1, 2))
def test_channels(name, c_in):
    assert model(name, c_in=c_in, **thin).eval()(noise(1, c_in, 32, 32)).shape == (1, 10)

@each_model
def test_smallest_image(name):
    s = PAPER_OPTIONS[name]['smallest']
    assert model(name, size=s, **thin).eval()(noise(2, 3, s, s)).shape == (2, 10)
    if s > 1:
        with pytest.raises(ReinitError, match=f'size={s-1} is too small .* {s} pixels'): model(name, size=s - 1)

@pytest.mark.parametrize('name', ('mobilenet', 'resnet18', 'resnet50'))
def test_small_stem(name):
    first = {size: block_table(model(name, size=size, **thin), size).output[0][1] for size in (64, 65, 224)}
    assert first[64] == 64 and first[65] < 40 and first[224] == (112 if name == 'mobilenet' else 56)

@each_model
def test_dropout(name):
    drops = [m.p for m in model(name, dropout=.25, **thin).modules() if isinstance(m, nn.Dropout)]
    assert drops == [.25] * dict(mlp=6, scnn=1, vgg16=2, mobilenet=1, resnet50=1, resnet18=1, allcnn=2)[name]
    assert not any(isinstance(m, nn.Dropout) for m in model(name, **thin).modules())

@each_model
def test_is_a_plain_module(name):
    net = model(name, **thin).eval()
    x = noise(2, 3, 32, 32)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))): assert torch.equal(other(x), net(x))
    fresh = model(name, seed=1, **thin).eval()
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(x), net(x))

def test_signatures_and_comments():
    from fastcore.docments import docments
    for name, f in MODELS.items():
        p = inspect.signature(f).parameters
        assert p['norm'].default == PAPER_OPTIONS[name]['norm']
        assert p['init'].default == PAPER_OPTIONS[name]['init']
        assert 'kwargs' not in p
        assert docments(f)['width'] == 'Channels are multiplied by this'

# ---------------------------------------------------------------- initial weights

@each_model
@pytest.mark.parametrize('init', NET_INITS)
def test_initial_weights(name, init):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a = model(name, init=init, norm='batch', seed=5, **thin)
    b = model(name, init=init, norm='batch', streams=Streams(5), **thin)
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    for n, m in a.named_modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):     # the very initializers of the reinitialization page
            assert torch.equal(m.weight, draw_weights(m.weight.shape, init, Streams(5).fork(n).init))
            assert m.bias is None or not m.bias.any()
        elif isinstance(m, nn.modules.batchnorm._BatchNorm):
            assert (m.weight == 1).all() and not m.bias.any()
            assert not m.running_mean.any() and (m.running_var == 1).all() and m.num_batches_tracked == 0
        else: assert not [*m.parameters(recurse=False)]

def test_a_layer_depends_on_its_name_and_shape_alone():
    a, b = resnet18(**thin), resnet18(norm='none', n_out=3, size=224, **thin)
    for n, m in a.named_modules():
        if isinstance(m, nn.Conv2d) and 'stem' not in n: assert torch.equal(m.weight, b.get_submodule(n).weight)
    assert not torch.equal(a.block2.body.conv1.conv.weight, a.block2.body.conv2.conv.weight)
    assert not torch.equal(a.block2.body.conv1.conv.weight, resnet18(seed=1, **thin).block2.body.conv1.conv.weight)

def test_default_device_and_dtype_are_respected():
    assert all(p.is_meta for p in on_meta(scnn).parameters())
    torch.set_default_dtype(torch.float64)
    try: net = scnn(**thin)
    finally: torch.set_default_dtype(torch.float32)
    assert net.block1.conv.weight.dtype == torch.float64
    assert torch.equal(net.block1.conv.weight.float(), scnn(**thin).block1.conv.weight)

@pytest.mark.parametrize('name', ('scnn', 'vgg16', 'resnet18', 'allcnn', 'mobilenet'))
def test_initial_outputs_are_of_sane_size(name):
    out = model(name, width=1 / 4)(noise(8, 3, 32, 32))
    assert .05 < out.std() < 20

# ---------------------------------------------------------------- what they cost

@pytest.mark.parametrize('ours,theirs', [(vgg16, 'vgg16_bn'), (resnet18, 'resnet18'), (resnet50, 'resnet50')])
@pytest.mark.parametrize('classes', (1000, 37))
def test_counts_as_in_torchvision(ours, theirs, classes):
    a = on_meta(ours, n_out=classes, size=224, norm='batch')
    b = on_meta(getattr(torchvision.models, theirs), num_classes=classes)
    assert count_params(a) == count_params(b) and multiply_adds(a, 224) == multiply_adds(b, 224)
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (a, b)]
    assert shapes[0] == shapes[1]

@pytest.mark.parametrize('name', ('alexnet', 'vgg16', 'resnet18', 'resnet50', 'mobilenet_v2', 'densenet121',
                                  'squeezenet1_0'))
def test_multiply_adds_as_published(name):
    meta = torchvision.models.get_model_weights(name).IMAGENET1K_V1.meta
    net = on_meta(lambda: torchvision.models.get_model(name))
    assert count_params(net) == meta['num_params']
    assert multiply_adds(net, 224) / 1e9 == pytest.approx(meta['_ops'], abs=.0051)

def test_mobilenet_counts():
    full, shallow = (on_meta(mobilenet, n_out=1000, size=224, norm='batch', shallow=s) for s in (False, True))
    layers = [(32, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512)]
    layers += 5 * [(512, 512)] + [(512, 1024), (1024, 1024)]
    def count(layers):
        stem, head = 3 * 32 * 9 + 2 * 32, 1024 * 1000 + 1000
        return stem + sum(9 * i + 2 * i + i * o + 2 * o for i, o in layers) + head
    assert count_params(full) == count(layers) == 4_231_976        # 4.2 million in the paper's tables
    assert count_params(shallow) == count(layers[:6] + layers[11:]) == 2_887_976   # 2.9 million
    assert [round(multiply_adds(m, 224) / 1e6) for m in (full, shallow)] == [569, 307]

def test_allcnn_count(): assert count_params(on_meta(MODELS['allcnn'], norm='none')) == 1_369_738

@each_model
@pytest.mark.parametrize('size', (32, 64))
def test_a_quarter_of_the_width_is_a_sixteenth(name, size):
    a, b = (layer_table(on_meta(MODELS[name], width=w, size=size), size) for w in (1., 1 / 4))
    a['times'] = a.multiply_adds / b.multiply_adds
    a = a[a.multiply_adds > 0]
    one_sided = a.layer.str.contains('depthwise|classifier') | (a.index == a.index[0])
    assert set(a.times[~one_sided]) == {16} and set(a.times[one_sided]) == {4}
    if name not in ('mobilenet', 'mlp'): assert a.multiply_adds[one_sided].sum() < .05 * a.multiply_adds.sum()

@each_model
@pytest.mark.parametrize('width', (1e-6, .3, 1.7))
def test_odd_widths(name, width):
    net = on_meta(MODELS[name], width=width)
    assert net(torch.zeros(2, 3, 32, 32, device='meta')).shape == (2, 10)
    if width < 1e-3: assert {m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)} <= {1, 4, 10}

def test_tables_agree():
    for name in MODELS:
        net = on_meta(MODELS[name])
        blocks, layers = block_table(net), layer_table(net)
        assert blocks.parameters.sum() == layers.parameters.sum() == count_params(net)
        assert blocks.multiply_adds.sum() == multiply_adds(net)
        assert blocks.share.sum() == pytest.approx(1) and blocks.output.iloc[-1] == (10,)

# ---------------------------------------------------------------- the same functions as others'

@pytest.mark.parametrize('ours,theirs', [(resnet18, 'resnet18'), (resnet50, 'resnet50')])
def test_computes_what_torchvision_does(ours, theirs):
    with torch.random.fork_rng(): ref = getattr(torchvision.models, theirs)(num_classes=3).eval()
    net = ours(n_out=3, size=224, norm='batch').eval()
    def tensors(m): return [(k, v) for k, v in m.state_dict().items() if v.dim()]
    # torchvision's order of use is ours, too
    net.load_state_dict({k: v for (k, _), (_, v) in zip(tensors(net), tensors(ref), strict=True)}, strict=False)
    x = noise(1, 3, 224, 224)
    with torch.no_grad(): torch.testing.assert_close(net(x), ref(x), rtol=1e-3, atol=1e-4)

def test_vgg_features_as_in_torchvision():
    layers = [o if o == 'M' else max(1, o // 16) for o in torchvision.models.vgg.cfgs['D']]
    ref = torchvision.models.vgg.make_layers(layers, batch_norm=True).eval()
    net = vgg16(norm='batch', **thin).eval()
    convs = [[m for m in o.modules() if isinstance(m, nn.Conv2d)] for o in (net, ref)]
    for a, b in zip(*convs, strict=True): b.load_state_dict(a.state_dict())
    torch.testing.assert_close(net[:-1](noise(2, 3, 32, 32)), ref(noise(2, 3, 32, 32)))

# ---------------------------------------------------------------- perceptrons

@pytest.mark.parametrize('position,where', [
    ('alternating', (1, 4, 7)), ('front', (0, 1, 2)), ('middle', (3, 4, 5)), ('back', (6, 7, 8))])
def test_reservoirs(position, where):
    layout = reservoir_layout(8, 3, 2, position)
    assert layout['reservoir'] == where and [i for i, w in enumerate(layout['hidden']) if w == 16] == list(where)
    net = mlp(20, **layout, frozen=True)
    assert reservoir_names(net) == [f'block{i+1}.reservoir' for i in where]
    assert {n.rpartition('.')[0] for n, p in net.named_parameters() if not p.requires_grad} == set(reservoir_names(net))
    assert all(p.requires_grad for p in mlp(20, **layout).parameters())
    # frozen or not, the same weights at the start
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), mlp(20, **layout).parameters()))

def test_reservoir_scale():
    assert reservoir_layout(64, 1, .25)['hidden'] == (64, 16, 64)
    assert reservoir_layout(64, 1, 32)['hidden'] == (64, 2048, 64)

@pytest.mark.parametrize('R', (1, 2, 4))
def test_skips(R):
    layout = reservoir_layout(6, R)
    net = mlp(10, **layout, skip=3, n_out=3, norm='batch', frozen=True).eval()
    assert len(reservoir_names(net)) == R and net(noise(2, 10)).shape == (2, 3)
    layers = [m for m in net.modules() if hasattr(m, 'relu')]
    h, last = noise(5, 10), None
    for i, layer in enumerate(layers):
        h = layer(h)
        if i % 3 == 0: h = last = h if last is None else h + last
    assert len(layers) == 3 * R and torch.allclose(net(noise(5, 10)), net.head(h))

def test_mlp_takes_images_and_vectors():
    net = mlp(c_in=1, size=8, hidden=(5,))
    assert net(noise(2, 1, 8, 8)).shape == net(noise(2, 64)).shape == (2, 10)
    assert [m.out_features for m in mlp(4, (8, 6), 3, width=.5).modules() if isinstance(m, nn.Linear)] == [4, 3, 3]

# ---------------------------------------------------------------- wrong input

@pytest.mark.parametrize('call,says', [
    (lambda: model('resnet51'), "did you mean 'resnet50'"), (lambda: model('mobilnet'), "did you mean 'mobilenet'"),
    (lambda: model(None), 'Known: mlp, scnn'), (lambda: scnn(nrom='batch'), "did you mean 'norm'"),
    (lambda: scnn(norm='lyer'), "did you mean 'layer'"), (lambda: scnn(norm=None), 'norm=None'),
    (lambda: vgg16(init='hee'), "did you mean 'he'"), (lambda: scnn(width=-1), 'width'),
    (lambda: scnn(width='1/4'), 'width'), (lambda: scnn(n_out=0), 'n_out=0'), (lambda: scnn(c_in=1.5), 'c_in'),
    (lambda: scnn(dropout=1.), 'less than 1'), (lambda: scnn(dropout=-.1), 'dropout'), (lambda: scnn(seed=-1), 'seed'),
    (lambda: scnn(size=3), 'too small'), (lambda: mlp(8, ()), 'at least one hidden'),
    (lambda: mlp(8, (0,)), 'hidden=0'),
    (lambda: mlp(0, (4,)), 'n_in=0'), (lambda: mlp(8, (4, 4), reservoir=(2,)), 'reservoir=2'),
    (lambda: mlp(8, (4, 5, 4), skip=1), 'widths are 4 and 5'),
    (lambda: reservoir_layout(position='bak'), "did you mean 'back'"),
    (lambda: reservoir_layout(repeats=0), 'repeats=0'), (lambda: reservoir_layout(scale=0), 'scale=0'),
    (lambda: vgg('vgg12'), "did you mean 'vgg1"), (lambda: convmixer(nrom='none'), "did you mean 'norm'")])
def test_refused_when_built(call, says):
    with pytest.raises(ReinitError) as e: call()
    assert says in str(e.value)

@pytest.mark.parametrize('training', (True, False))
def test_looking_leaves_no_trace(training):
    net = scnn(norm='batch', **thin).train(training)
    net.block2.eval()
    modes, state = [m.training for m in net.modules()], copy.deepcopy(net.state_dict())
    block_table(net)
    multiply_adds(net)
    assert modes == [m.training for m in net.modules()]
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

# ---------------------------------------------------------------- the networks of the study of spectra

@pytest.mark.parametrize('make, K', [
    (vgg, 8), (partial(vgg, 'vgg16'), 13), (convmixer, 5), (partial(convmixer, 2), 3)])
@pytest.mark.parametrize('size', (8, 32))
def test_vgg_and_convmixer(make, K, size):
    net = make(size=size, n_out=7, **thin)
    assert [n for n, _ in net.named_children()] == [*(f'block{i+1}' for i in range(K)), 'head']
    assert net.eval()(noise(2, 3, size, size)).shape == (2, 7)
    same = make(size=size, n_out=7, **thin)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters()))

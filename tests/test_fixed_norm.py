"`reinit_nb.fixed_norm`: norms are inserted, survive, are removed and folded"
import copy
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
import torchvision.models as tv
from example_models import image, mlp, named, seeded, small_mobilenet, small_vit
from torch import nn

from reinit_nb.blocks import NORM_NAME, blocks, trace_outputs
from reinit_nb.core import ReinitError, Streams
from reinit_nb.fixed_norm import FixedNorm, add_norms, fold_norms, insert_after, remove_norms
from reinit_nb.init import reset

MODELS = dict(named=(named, 16), vit=(lambda: reset(small_vit()), 32), resnet=(lambda: tv.resnet18(num_classes=5), 64),
              mobile=(small_mobilenet, 64), dense=(lambda: tv.DenseNet(8, (2, 2, 2), 16, num_classes=5), 64))

@pytest.fixture(params=MODELS)
def model(request):
    make, size = MODELS[request.param]
    return seeded(make).eval(), image(2, size)

def set_norms(fixed):
    for i, norm in enumerate(fixed.values()):
        norm.mu.fill_(.1 * (i + 1))
        norm.sigma.fill_(1.5)

@torch.no_grad()
def test_insert_remove(model):
    m, x = model
    y, keys, names, text = m(x), list(m.state_dict()), [n for n, _ in m.named_parameters()], repr(m)
    b = blocks(m)
    fixed = add_norms(b)
    assert len(fixed) == len(b)
    assert torch.equal(m(x), y)
    assert [n for n, _ in m.named_parameters()] == names
    assert [k for k in m.state_dict() if NORM_NAME not in k] == keys
    assert blocks(m).names == b.names
    assert [p.params for p in blocks(m).parts] == [p.params for p in b.parts]
    set_norms(fixed)
    assert not torch.equal(m(x), y)
    remove_norms(m)
    assert torch.equal(m(x), y)
    assert list(m.state_dict()) == keys and repr(m) == text
    assert not any(o._forward_hooks for o in m.modules())

@torch.no_grad()
def test_a_model_that_was_compiled_before():
    "It gets and loses a norm, although compiled code does not look for new hooks"
    class Block(nn.Linear):
        def forward(self, x): return super().forward(x).relu()
    m = nn.Sequential(Block(6, 6), Block(6, 6), nn.Linear(6, 3))
    x = torch.randn(4, 6, generator=Streams(0).noise)
    b = blocks(m)
    run = torch.compile(m, backend='eager')
    y = run(x)
    add_norms(b)['0'].sigma.fill_(2.)
    z = run(x)
    assert torch.equal(z, m[2](m[1](m[0].forward(x) / 2))) and not torch.equal(z, y)
    remove_norms(m)
    assert torch.equal(run(x), y)
    torch._dynamo.reset()

@torch.no_grad()
def test_norms_act_once_at_the_output(model):
    m, x = model
    b = blocks(m)
    z = trace_outputs(m, [b[1].last], x)[b[1].last]
    add_norms(b)[b[1].name].sigma.fill_(2.)
    assert torch.equal(trace_outputs(m, [b[1].last], x)[b[1].last], z / 2)

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
    assert torch.allclose(ep.module()(x), m(x), atol=1e-5) and any(NORM_NAME in k for k in ep.state_dict)

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
    with learn.no_logging(): learn.fit(1)
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
        assert all(p.grad is not None for p in m.parameters())
        assert blocks(d).names == ['module.block1', 'module.block2']
        assert any(k.startswith('module.') and NORM_NAME in k for k in d.state_dict())
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
    m = nn.ModuleDict(dict(a=nn.ModuleList([nn.Linear(2, 2)])))
    with pytest.raises(ReinitError, match='its own way'): insert_after(m, 'a', FixedNorm())

# ---------------------------------------------------------------- folding

def norm_before():
    b = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    return nn.Sequential(OrderedDict(a=nn.Linear(6, 8), b=b, head=nn.Linear(8, 3)))


def without_bias():
    a = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    b = nn.Sequential(nn.Dropout(.1), nn.Linear(8, 8, bias=False))
    return nn.Sequential(OrderedDict(a=a, b=b, head=nn.Linear(8, 3)))


FOLD = dict(mlp=mlp, before=norm_before, nobias=without_bias)

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
    m = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                     nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(),
                                     nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))).eval()
    x = image(2, 16)
    fixed = add_norms(blocks(m))
    set_norms(fixed)
    y = m(x)
    state = copy.deepcopy(m.state_dict())
    with pytest.raises(ReinitError, match="after '4' cannot be folded into the Conv2d that comes next: it pads"):
        fold_norms(m)
    assert torch.equal(m(x), y)
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())   # all or nothing
    fixed['3'].mu.zero_()
    y = m(x)
    assert torch.allclose(fold_norms(m)(x), y, atol=1e-5)

def test_fold_refused_in_residual_networks():
    m = tv.resnet18(num_classes=5)
    set_norms(add_norms(blocks(m)))
    with pytest.raises(ReinitError, match='BasicBlock has no weights to take it, and a BasicBlock comes next'):
        fold_norms(m)
    for norm in m.modules():
        if not isinstance(norm, FixedNorm): continue
        norm.mu.zero_()
        norm.sigma.fill_(1.)
    assert not any(isinstance(o, FixedNorm) for o in fold_norms(m).modules())   # an identity needs no folding

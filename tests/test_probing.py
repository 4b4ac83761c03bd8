"`reinit_nb.probing`: models are run, and neither they nor the global generators notice"
import random

import numpy as np
import pytest
import torch
from torch import nn

from reinit_nb.core import ReinitError
from reinit_nb.probing import (
    call_model,
    check_not_scripted,
    explain_failure,
    iter_batches,
    list_batches,
    list_inputs,
    model_device,
    model_inputs,
    preserve_model,
    preserve_rng,
    probe_model,
    run_model,
    to_device,
    unwrap_model,
)


def net(): return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(.5), nn.Linear(6, 3))


def snapshot(model):
    "All that must come back"
    modules = [(id(m), m.training, getattr(m, 'momentum', None), len(m._forward_hooks)) for m in model.modules()]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [(n, id(t), t.data_ptr(), t.requires_grad, t.dtype, t.clone(), t.grad) for n, t in named]
    return modules, tensors


def same(a, b):
    if a[0] != b[0] or len(a[1]) != len(b[1]): return False
    return all(s[:5] == t[:5] and torch.equal(s[5], t[5]) and s[6] is t[6] for s, t in zip(a[1], b[1]))


def damage(model):
    "Change whatever can be changed"
    model.eval()
    for m in model.modules():
        m.register_forward_hook(lambda m, a, o: o)
        if isinstance(m, nn.BatchNorm1d):
            m.momentum = 0.
            m.track_running_stats = False
            m.running_mean.fill_(7.)
            m.register_buffer('extra', torch.ones(1))
    for p in model.parameters():
        p.data.fill_(3.)
        p.requires_grad_(False)
        p.grad = torch.ones_like(p)
    model.double()
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    first.weight = nn.Parameter(torch.zeros(1))
    first.bias = None
    first.add_module('extra', nn.Linear(1, 1))


# ---------------------------------------------------------------- preserve_model

@pytest.mark.parametrize('error', [False, True])
def test_everything_comes_back(error):
    model = net()
    model[1].eval()
    model[4].bias.requires_grad_(False)
    model(torch.randn(8, 4)).sum().backward()
    hook = model[0].register_forward_hook(lambda m, a, o: o)
    before = snapshot(model)
    try:
        with preserve_model(model):
            damage(model)
            if error: raise KeyError('in the middle')
    except KeyError: assert error
    assert same(before, snapshot(model))
    hook.remove()
    assert not model[0]._forward_hooks


def test_gradients_of_a_waiting_step_are_not_added_to():
    model = net()
    model(torch.randn(8, 4)).sum().backward()
    old = [p.grad.clone() for p in model.parameters()]
    with preserve_model(model):
        assert all(p.grad is None for p in model.parameters())
        model(torch.randn(8, 4)).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), old))


def test_a_graph_that_waits_for_its_backward_pass_is_not_disturbed():
    model = net()
    loss = model(torch.randn(8, 4)).sum()
    with preserve_model(model): model[4].weight.data.fill_(1.)
    loss.backward()
    assert model[0].weight.grad is not None


def test_one_module_under_two_names():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    before = snapshot(model)
    with preserve_model(model):
        model[2] = nn.Linear(4, 4)
        model[0].weight.data.zero_()
    assert model[0] is model[2] is layer
    assert same(before, snapshot(model))


def test_one_parameter_under_two_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with preserve_model(model):
        model[1].weight = nn.Parameter(torch.zeros(4, 4))
        model[0].weight.data.zero_()
    assert model[1].weight is model[0].weight
    assert model[0].weight.any()


def test_without_a_copy_of_the_weights_their_identity_still_comes_back():
    model = net()
    weight = model[0].weight
    with preserve_model(model, weights=False):
        model[0].weight = nn.Parameter(torch.zeros(6, 4))
        model[1].running_mean.fill_(1.)
    assert model[0].weight is weight
    assert not model[1].running_mean.any()


def test_hooks_that_were_there_can_still_be_removed():
    model = net()
    handle = model[0].register_forward_pre_hook(lambda m, a: None)
    with preserve_model(model): model[0].register_forward_pre_hook(lambda m, a: None)
    assert len(model[0]._forward_pre_hooks) == 1
    handle.remove()
    assert not model[0]._forward_pre_hooks


def test_buffers_that_cannot_be_written_or_have_no_values():
    model = net()
    model.register_buffer('expanded', torch.ones(1).expand(5))
    model.register_buffer('sparse', torch.eye(3).to_sparse())
    model.register_buffer('computed', model[0].weight * 2, persistent=False)
    with preserve_model(model): damage(model)
    assert model.expanded.stride() == (0,)
    with preserve_model(nn.Linear(2, 2, device='meta')): pass


def test_lazy_layers_take_their_shape():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    assert run_model(model, torch.ones(2, 5)).shape == (2, 3)
    assert run_model(model, torch.ones(2, 5)).shape == (2, 3)
    assert model[0].weight.shape == (3, 5)


def test_what_is_not_a_model():
    with pytest.raises(ReinitError, match='should be a torch module'):
        with preserve_model('net'): pass


# ---------------------------------------------------------------- random numbers

@pytest.mark.parametrize('error', [False, True])
def test_global_generators_come_back(error):
    def draws(): return random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    try:
        with preserve_rng():
            draws()
            if error: raise KeyError
    except KeyError: assert error
    assert draws() == expected


# ---------------------------------------------------------------- running

def test_running_leaves_no_trace():
    model = net()
    before, state = snapshot(model), torch.get_rng_state()
    out = run_model(model, torch.randn(8, 4))
    assert not out.requires_grad
    assert torch.equal(torch.get_rng_state(), state) is False   # the line above drew the batch itself
    state = torch.get_rng_state()
    with probe_model(model) as m:
        assert m is model and not any(o.training for o in m.modules()) and not torch.is_grad_enabled()
        m.train()
        m(torch.randn(8, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(before, snapshot(model))


def test_failures_are_explained():
    model = net()
    before = snapshot(model)
    with pytest.raises(ReinitError, match=r'Sequential does not run on data of shape \(2, 7\): .*mat1') as e:
        run_model(model, (2, 7))
    assert isinstance(e.value.__cause__, RuntimeError)
    assert same(before, snapshot(model))
    with pytest.raises(ReinitError, match='^mine$'):
        with explain_failure('other'): raise ReinitError('mine')
    with pytest.raises(ReinitError, match=r"it failed: KeyError\(\)"):
        with explain_failure('it failed'): raise KeyError


def test_outputs_that_are_no_tensor():
    class Two(nn.Module):
        def forward(self, x): return x, x
    assert len(call_model(Two(), torch.ones(1))) == 2
    with pytest.raises(ReinitError, match='its output is a tuple'): call_model(Two(), torch.ones(1), tensor=True)


# ---------------------------------------------------------------- inputs

def test_inputs_of_a_model():
    model = net().double()
    assert model_inputs(model, (2, 4))[0].dtype is torch.double
    assert model_inputs(model, torch.Size((2, 4)))[0].shape == (2, 4)
    a, b = model_inputs(model, [torch.ones(1), torch.zeros(2)])
    assert len(a) == 1 and len(b) == 2
    for bad in ('abc', (), (2, -1), (2.5, 1), None):
        with pytest.raises(ReinitError, match='the shape of a batch'): model_inputs(model, bad)


def test_devices():
    assert model_device(nn.ReLU()).type == 'cpu'
    assert model_device(nn.BatchNorm1d(2, affine=False, device='meta')).type == 'meta'
    moved = to_device([torch.ones(1), (torch.ones(2), None)], 'meta')
    assert moved[0].is_meta and moved[1][0].is_meta and moved[1][1] is None


def test_subclasses_of_tensors_become_plain():
    class Image(torch.Tensor): pass
    x = torch.ones(2, 3).as_subclass(Image)
    assert type(to_device(x, 'cpu')) is torch.Tensor
    assert type(list_batches((x, torch.ones(2)))[0][0]) is torch.Tensor


def test_wrappers():
    model = net()
    assert unwrap_model(model) is model
    assert unwrap_model(nn.DataParallel(torch.compile(model))) is model


def test_hooks_are_called_in_compiled_parts():
    "Code that was compiled before would not call them"
    model = nn.Sequential(nn.Linear(4, 6), torch.compile(nn.Linear(6, 3), backend='eager'))
    x, seen = torch.ones(2, 4), []
    with torch.no_grad(): model.eval()(x)
    model.train()
    with probe_model(model):
        model[1]._orig_mod.register_forward_hook(lambda m, args, out: seen.append(m))
        model(x)
    assert len(seen) == 1 and model.training and not model[1]._orig_mod._forward_hooks
    torch._dynamo.reset()


def test_compiled_code_is_used_again_after_an_error():
    calls = []
    def count(graph, inputs):
        calls.append(graph)
        return graph.forward
    for model in ('no model', net()):
        with pytest.raises((ReinitError, KeyError)), probe_model(model): raise KeyError
    torch.compile(torch.sin, backend=count)(torch.ones(2))
    assert calls
    torch._dynamo.reset()


@pytest.mark.filterwarnings('ignore:.*torch.jit:DeprecationWarning', 'ignore:.*torch.jit:FutureWarning')
def test_scripted_parts_keep_their_mode():
    model = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.Dropout(.5)))
    run_model(model, torch.ones(2, 4))
    assert model.training and model[1].training
    with pytest.raises(ReinitError, match='^1 is a ScriptModule'): check_not_scripted(model)
    assert check_not_scripted(model[0]) is model[0]


@pytest.mark.parametrize('make', [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_a_largest_norm_keep_their_rows(make):
    "A forward pass rescales the rows that it looks up, in place"
    model = make(10, 4, max_norm=.1)
    old = model.weight.detach().clone()
    run_model(model, (torch.zeros(2, 3, dtype=torch.long),))
    assert torch.equal(model.weight, old)


x, y = torch.randn(6, 4), torch.arange(6)


@pytest.mark.parametrize('data', [(x, y), [x, y], [(x, y)], [[x, y]], iter([(x, y)])])
def test_forms_of_data(data):
    (xb, yb), = list_batches(data)
    assert torch.equal(xb, x) and torch.equal(yb, y)


def test_loaders_are_shuffled_without_touching_the_generators():
    loader = torch.utils.data.DataLoader(list(zip(x, y)), batch_size=4, shuffle=True)
    state = torch.get_rng_state()
    assert sum(len(xb) for xb, _ in list_batches(loader)) == 6
    assert sum(len(xb) for xb in list_inputs(loader)) == 6
    assert torch.equal(torch.get_rng_state(), state)


def test_empty_batches_are_left_out():
    assert len(list(iter_batches([(x, y), (x[:0], y[:0])]))) == 1


class Loaders: train = valid = ()


@pytest.mark.parametrize('data, said', [
    (Loaders(), 'dls.train'), (x, 'data is a Tensor'), (net(), 'data is a Sequential'), ('data', 'data is a str'),
    (3, 'data is a int'), ([(x, y, y)], 'batch 0 is a tuple of 3'), ([x], 'batch 0 is a Tensor'),
    ((x, y[:5]), 'size of the batch'),
    ((x, torch.tensor(1)), 'size of the batch'), ([], 'data is empty'), ([(x[:0], y[:0])], 'data is empty')])
def test_data_that_cannot_be_used(data, said):
    with pytest.raises(ReinitError, match=said): list_batches(data)


@pytest.mark.parametrize('data, n', [(x, 1), ((x, y), 1), ([x, x, x], 3), ([(x, y), (x, y)], 2), ([(x,)], 1)])
def test_inputs_alone(data, n):
    assert len(list_inputs(data)) == n


@pytest.mark.parametrize('data, said', [
    (Loaders(), 'dls.valid'), (3, 'data is a int'), ([], 'data is empty'), ([dict(x=x)], 'batch 0 are a dict')])
def test_inputs_that_cannot_be_used(data, said):
    with pytest.raises(ReinitError, match=said): list_inputs(data)

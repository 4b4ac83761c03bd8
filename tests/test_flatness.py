"Margins, size of the weights, noise, Hessian and slices: closed forms, all kinds of models, wrong input"
import copy
import math
import random

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reinit_nb import flatness as fl
from reinit_nb.blocks import blocks
from reinit_nb.core import ReinitError, Streams
from reinit_nb.fixed_norm import add_norms
from reinit_nb.models import model as make

pytestmark = pytest.mark.filterwarnings('ignore:.*torch.jit.script')   # raised when fastai is imported


def sample(n=40, d=4, classes=3, dtype=torch.float32, shape=None):
    g = torch.Generator().manual_seed(5)
    return torch.randn(n, *(shape or (d,)), generator=g).to(dtype), torch.randint(classes, (n,), generator=g)

def mlp(dtype=torch.float32, act=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), act(), nn.Linear(6, 3)).to(dtype)

def batch_norm():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(.5),
                        nn.Flatten(), nn.Linear(36, 3))
    for _ in range(3): net(torch.randn(16, 1, 8, 8))   # statistics that are not 0 and 1
    net[0].weight.requires_grad_(False)
    return net

class Tied(nn.Module):
    "Two layers with the same weights, and a parameter that nothing depends on"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.idle = nn.Parameter(torch.ones(2))
        self.b.weight = self.a.weight
    def forward(self, x): return self.out(self.b(self.a(x).tanh()).tanh())

def tied():
    torch.manual_seed(0)
    return Tied().double()

def with_norms():
    torch.manual_seed(0)
    net = make('scnn', c_in=1, size=8, width=.125)
    for i, m in enumerate(add_norms(blocks(net)).values()):
        m.mu.fill_(.1 * i)
        m.sigma.fill_(1 + .2 * i)
    return net

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.out = nn.Linear(4, 3)
    def forward(self, x): return self.out(self.enc(x).mean(1))

MODELS = {
    'mlp': (mlp, dict(d=4)),
    'BatchNorm, frozen, dropout': (batch_norm, dict(shape=(1, 8, 8))),
    'tied': (tied, dict(d=4, dtype=torch.float64)),
    'FixedNorm': (with_norms, dict(shape=(1, 8, 8), classes=10)),
    'attention': (Attention, dict(shape=(5, 4)))}

MEASURES = {
    'evaluate_loss': fl.evaluate_loss,
    'margins': fl.margins,
    'weight_size': fl.weight_size,
    'noise_curve': lambda m, d: fl.noise_curve(m, d, [.1], repeats=2),
    'top_eigenvalues': lambda m, d: fl.top_eigenvalues(m, d, k=2, tol=1e-2),
    'hessian_trace': lambda m, d: fl.hessian_trace(m, d, n=2),
    'spectral_density': lambda m, d: fl.spectral_density(m, d, steps=3, repeats=1),
    'slice_1d': lambda m, d: fl.slice_1d(m, d, at=[0, .5]),
    'slice_2d': lambda m, d: fl.slice_2d(m, d, at=[0, .5])}

def full_hessian(net, x, y, loss=F.cross_entropy):
    "The whole matrix, column by column, from torch.func, in the trainable parameters"
    net = copy.deepcopy(net).eval()
    ps = {n: p.detach() for n, p in net.named_parameters() if p.requires_grad}
    def f(w):
        parts = w.split([p.numel() for p in ps.values()])
        shaped = {n: part.view(p.shape) for (n, p), part in zip(ps.items(), parts)}
        return loss(torch.func.functional_call(net, shaped, (x,)), y)
    return torch.func.jacrev(torch.func.jacrev(f))(torch.cat([p.flatten() for p in ps.values()])).numpy()

# ---------------------------------------------------------------- nothing changes

def everything(net):
    "All that a measurement might change"
    values = [v.clone() for v in (*net.parameters(), *net.buffers())]
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    modes = [m.training for m in net.modules()]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()]
    generators = torch.get_rng_state(), random.getstate(), [str(o) for o in np.random.get_state()]
    return values, gradients, modes, hooks, generators

def same(a, b):
    if isinstance(a, torch.Tensor):   # bit by bit
        return a.dtype == b.dtype and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b

def prepared(name):
    build, kw = MODELS[name]
    net, (x, y) = build().train(), sample(**kw)
    F.cross_entropy(net(x), y).backward()   # leave gradients behind
    next(p for p in net.parameters() if p.ndim > 1).data.view(-1)[0] = -0.   # a bit that == does not see
    net.eval()
    list(net.modules())[1].train()   # and modes that differ
    return net, x, y

@pytest.mark.parametrize('name', MODELS)
def test_all_measurements_leave_the_model_alone(name):
    net, x, y = prepared(name)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=15, shuffle=True)
    for measure in MEASURES.values():
        before = everything(net)
        df = measure(net, loader)
        assert isinstance(df, pd.DataFrame) and len(df) and np.isfinite(df.select_dtypes('number').to_numpy()).all()
        assert same(before, everything(net))

@pytest.mark.parametrize('measure', MEASURES)
def test_also_after_an_error(measure):
    net, x, y = prepared('mlp')
    calls = []
    def fail(m, args):
        calls.append(1)
        if len(calls) > 3: raise RuntimeError('in the middle')
    net[2].register_forward_pre_hook(fail)
    before = everything(net)
    with pytest.raises((ReinitError, RuntimeError), match='in the middle'): MEASURES[measure](net, [(x, y)] * 5)
    assert same(before, everything(net))

def test_buffers_that_are_replaced_come_back():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer('n', torch.zeros(()))
        def forward(self, x):
            self.n = self.n + 1
            return super().forward(x)
    net = Counts()
    n = net.n
    fl.noise_curve(net, sample(), [.1])
    assert net.n is n and n == 0

def test_a_waiting_graph_is_not_disturbed():
    net, (x, y) = mlp(), sample()
    loss = F.cross_entropy(net(x), y)
    fl.noise_curve(net, (x, y), [.5])
    loss.backward()

# ---------------------------------------------------------------- data

def test_kinds_of_data_agree():
    net, (x, y) = mlp(), sample()
    want = fl.evaluate_loss(net, (x, y)).loss[0]
    ds = torch.utils.data.TensorDataset(x, y)
    in_parts = [[x[:7], y[:7]], (x[7:], y[7:])]
    loader = torch.utils.data.DataLoader(ds, batch_size=11, shuffle=True)
    with_an_empty_batch = [(x, y), (x[:0], y[:0])]
    for data in ([x, y], [(x, y)], in_parts, zip(x.split(9), y.split(9)), loader, with_an_empty_batch):
        assert fl.evaluate_loss(net, data).loss[0] == pytest.approx(want, abs=1e-6)

def test_fastai_loaders():
    from reinit_nb.vision import Task, image_dls
    loaders, net = image_dls(Task('digits', n_train=64), bs=16, device='cpu'), with_norms()
    assert len(fl.margins(net, loaders.train, n=10)) == 10
    with pytest.raises(ReinitError, match='dls.train'): fl.margins(net, loaders)

@pytest.mark.parametrize('data,said', [
    ([], 'data is empty'), (iter(()), 'data is empty'), (torch.ones(3, 4), 'data is a Tensor'),
    (None, 'data is a NoneType'), ([(1, 2)], 'batch 0 is a tuple of 2'), ([(torch.ones(3, 4),)], 'two tensors'),
    ((torch.ones(3, 4), torch.ones(2).long()), 'first dimensions')])
@pytest.mark.parametrize('measure', MEASURES)
def test_wrong_data(measure, data, said):
    with pytest.raises(ReinitError, match=said): MEASURES[measure](mlp(), data)

# ---------------------------------------------------------------- margins and size

def test_margins_by_hand():
    net, (x, y) = mlp(), sample(n=30)
    p = net(x).double().softmax(1).detach().numpy()
    want = [p[i, c] - max(p[i, k] for k in range(3) if k != c) for i, c in enumerate(y)]
    df = fl.margins(net, list(zip(x.split(7), y.split(7))), n=400)
    assert df.margin.tolist() == pytest.approx(sorted(want)) and df['rank'].tolist() == list(range(1, 31))
    assert [want[i] for i in df.example] == pytest.approx(df.margin.tolist())
    assert y[df.example.tolist()].tolist() == df.label.tolist()
    assert fl.margins(net, (x, y), n=5).equals(fl.margins(net, (x, y)).head(5))

def test_margins_close_to_one_and_in_half_precision():
    df = fl.margins(nn.Identity(), (torch.tensor([[40., 0.], [200., -200.]]), torch.tensor([0, 1])))
    assert df.margin.tolist() == pytest.approx([-1, 1])
    x, y = sample()
    assert fl.margins(mlp().bfloat16(), (x.bfloat16(), y)).margin.between(-1, 1).all()

def test_size_by_hand():
    net, (x, y) = with_norms(), sample(shape=(1, 8, 8), classes=10)
    df = fl.weight_size(net, list(zip(x.split(7), y.split(7)))).loc[0]
    z = net.head[:-1](nn.Sequential(*list(net.children())[:-1])(x)).detach()   # through the fixed norms
    assert df['head'] == 'head.classifier' and df.examples == 40
    want = z.norm(dim=1).square().mean().sqrt() * net.head.classifier.weight.norm()
    assert df['size'] == pytest.approx(want.item(), rel=1e-5)
    assert df['size'] == pytest.approx(df.activation_norm * df.weight_norm)
    assert fl.weight_size(net, (x, y), head='head.dense')['head'][0] == 'head.dense'
    with pytest.raises(ReinitError, match='head='): fl.weight_size(net, (x, y), head='head.relu')

def test_size_samples():
    x, y = sample(n=50)
    net = nn.Linear(4, 3)
    one = fl.weight_size(net, list(zip(x.split(8), y.split(8))), n=20, seed=1)
    i = torch.randperm(50, generator=Streams(1).data)[:20]
    assert one.activation_norm[0] == pytest.approx((x[i].norm() / 20**.5).item(), rel=1e-5)
    assert one.equals(fl.weight_size(net, list(zip(x.split(8), y.split(8))), n=20, seed=1))

def test_ratios_and_their_plot():
    df = pd.DataFrame(dict(method=['BL', 'LW', 'DSD'] * 3, seed=[0, 0, 0, 1, 1, 1, 2, 2, 2],
                           size=[1, 1.1, 2, 2, 2.1, 4, 4, 3.9, 8.]))
    r = fl.size_ratios(df, ['seed'])
    assert r[r.method == 'DSD'].ratio.tolist() == [2, 2, 2]
    ax = fl.plot_size_ratios(r)
    assert {t.get_text() for t in ax.get_legend().get_texts()} == {'LW', 'DSD'}
    with pytest.raises(ReinitError, match="on='sed'.*did you mean 'seed'"): fl.size_ratios(df, 'sed')

# ---------------------------------------------------------------- noise

def quadratic():
    g = torch.Generator().manual_seed(1)
    X, t = torch.randn(50, 6, generator=g, dtype=torch.float64), torch.randn(50, 1, generator=g, dtype=torch.float64)
    torch.manual_seed(0)
    return nn.Linear(6, 1, bias=False).double(), X, t, 2 / 50 * X.T @ X

def test_expected_loss_under_noise():
    net, X, t, H = quadratic()
    df = fl.noise_curve(net, (X, t), [.3, 1], repeats=300, loss=nn.MSELoss())
    for s, g in df.groupby('sigma'): assert abs(g.d_loss.mean() - s**2 / 2 * H.trace().item()) < 4 * g.d_loss.sem()
    assert df.accuracy.isna().all()

def test_noise_does_not_depend_on_what_else_is_asked():
    net, data = mlp(), sample()
    a = fl.noise_curve(net, data, [.1, .2], repeats=3, seed=4).set_index(['sigma', 'repeat'])
    b = fl.noise_curve(net, data, .2, repeats=1, seed=4).set_index(['sigma', 'repeat'])
    assert a.loc[(.2, 0)].equals(b.loc[(.2, 0)])
    assert not np.allclose(a.loss, fl.noise_curve(net, data, [.1, .2], repeats=3, seed=5).loss)

def test_noise_reaches_the_chosen_parameters_only():
    net, (x, y) = batch_norm(), sample(shape=(1, 8, 8))
    everything = {n for n, _ in net.named_parameters()}
    old = {n: p.clone() for n, p in net.named_parameters()}
    seen = set()
    def note(module, args): seen.update(n for n, p in module.named_parameters() if not torch.equal(p, old[n]))
    net.register_forward_pre_hook(note)
    groups = dict(all=everything, trainable=everything - {'0.weight'}, weights={'0.weight', '6.weight'})
    for kind, names in groups.items():
        assert set(fl.select_parameters(net, kind)) == names
        seen.clear()
        fl.noise_curve(net, (x, y), [.1], repeats=1, parameters=kind)
        assert seen == names

@pytest.mark.parametrize('sigmas', [-1, math.nan, math.inf, [.1, -.1], 'x', [], [None]])
def test_wrong_noise(sigmas):
    with pytest.raises(ReinitError, match='sigmas'): fl.noise_curve(mlp(), sample(), sigmas)

# ---------------------------------------------------------------- Hessian

@pytest.mark.parametrize('name', ['mlp', 'BatchNorm, frozen, dropout', 'tied'])
def test_hessian_is_that_of_torch(name):
    build, kw = MODELS[name]
    net = build().double()
    x, y = sample(**{**kw, 'dtype': torch.float64})
    H = full_hessian(net, x, y)
    op = fl.hessian(net.train(), list(zip(x.split(9), y.split(9))))
    assert op.shape == H.shape
    assert np.allclose(op @ torch.eye(len(H), dtype=torch.float64), H, atol=1e-10)
    vals = np.linalg.eigvalsh(H)[::-1]
    top = fl.top_eigenvalues(net, (x, y), k=3, tol=1e-10).eigenvalue.tolist()
    assert top == pytest.approx(vals[:3].tolist(), rel=1e-6)
    assert fl.hessian_trace(net, (x, y), n=10**6).trace[0] == pytest.approx(vals.sum())
    est = fl.hessian_trace(net, (x, y), n=40).loc[0]
    assert abs(est.trace - vals.sum()) < 5 * est.error and est.parameters == len(H)

def test_group_norm_has_a_hessian():
    net, (x, y) = with_norms(), sample(shape=(1, 8, 8), classes=10)
    op = fl.hessian(net.double(), (x.double(), y))
    v = torch.randn(op.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ps = list(net.parameters())
    directions = [d.view(p.shape) for p, d in zip(ps, v.split([p.numel() for p in ps]))]
    def grad(h):   # for a central difference of gradients
        with torch.no_grad():
            for p, d in zip(ps, directions): p += h * d
        g = torch.cat([o.flatten() for o in torch.autograd.grad(F.cross_entropy(net(x.double()), y), ps)])
        with torch.no_grad():
            for p, d in zip(ps, directions): p -= h * d
        return g
    want = (grad(1e-7) - grad(-1e-7)) / 2e-7
    assert torch.linalg.vector_norm(op @ v - want) < 1e-4 * torch.linalg.vector_norm(want)

def test_logistic_regression():
    g = torch.Generator().manual_seed(2)
    X, c = torch.randn(60, 5, generator=g, dtype=torch.float64), torch.randint(2, (60,), generator=g)
    class Logistic(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        def forward(self, x): return torch.stack([torch.zeros(len(x), dtype=x.dtype), x @ self.w], 1)
    net = Logistic()
    p = (X @ net.w.detach()).sigmoid()
    assert torch.allclose(fl.hessian(net, (X, c)) @ torch.eye(5).double(), X.T @ torch.diag(p * (1 - p)) @ X / 60)

def test_quadratic_spectrum():
    net, X, t, H = quadratic()
    vals = np.linalg.eigvalsh(H)
    df = fl.spectral_density(net, (X, t), steps=50, repeats=3, loss=nn.MSELoss())
    for _, g in df.groupby('repeat'): assert np.allclose(g.eigenvalue, vals) and g.weight.sum() == pytest.approx(1)
    top = fl.top_eigenvalues(net, (X, t), k=6, loss=nn.MSELoss())
    assert top.eigenvalue.tolist() == pytest.approx(vals[::-1].tolist())
    flat = copy.deepcopy(net)   # rank 1: Lanczos ends early, without a division by zero
    df = fl.spectral_density(flat, (torch.ones(4, 6).double(), torch.ones(4, 1).double()), loss=nn.MSELoss())
    assert np.isfinite(df.to_numpy()).all() and df.eigenvalue.max() == pytest.approx(12)

def test_a_linear_loss_has_no_curvature():
    net, X, t, _ = quadratic()
    assert (fl.hessian(net, (X, t), lambda out, y: out.mean()) @ torch.ones(6).double() == 0).all()

def test_operator_is_a_snapshot():
    net, (x, y) = mlp(torch.float64), sample(dtype=torch.float64)
    op = fl.hessian(net, (x, y))
    before = op @ torch.ones(op.shape[0]).double()
    with torch.no_grad(): net[0].weight.mul_(2)
    assert torch.equal(op @ torch.ones(op.shape[0]).double(), before)

@pytest.mark.parametrize('measure', ['top_eigenvalues', 'hessian_trace', 'spectral_density'])
def test_hessian_is_refused(measure):
    x, y = sample()
    with pytest.raises(ReinitError, match='Unfreeze'): MEASURES[measure](mlp().requires_grad_(False), (x, y))
    with pytest.raises(ReinitError, match='float32'): MEASURES[measure](mlp().half(), (x.half(), y))
    summed = nn.CrossEntropyLoss(reduction='sum')
    with pytest.raises(ReinitError, match='reduction'): getattr(fl, measure)(mlp(), (x, y), loss=summed)
    with pytest.raises(ReinitError, match='one number'): getattr(fl, measure)(mlp(), (x, y), loss=lambda out, y: out)

def test_fastai_losses():
    from fastai.losses import CrossEntropyLossFlat
    net, data = mlp(), sample()
    flat = fl.top_eigenvalues(net, data, loss=CrossEntropyLossFlat()).eigenvalue.tolist()
    assert flat == pytest.approx(fl.top_eigenvalues(net, data).eigenvalue.tolist(), rel=1e-3)

# ---------------------------------------------------------------- slices

@pytest.mark.parametrize('name', MODELS)
def test_slices_begin_at_the_model(name):
    build, kw = MODELS[name]
    net, data = build(), sample(**kw)
    want = fl.evaluate_loss(net, data).loss[0]
    assert fl.slice_1d(net, data, at=0).loss[0] == want == fl.slice_2d(net, data, at=0).loss[0]

def test_filters_have_the_norm_of_the_model():
    net = batch_norm()
    net[0].weight.data[1] = 0   # a dead filter gets no direction
    d = fl.filter_direction(net, parameters='all')
    for n, p in net.named_parameters():
        got, want = (t.flatten(1 if t.ndim > 1 else 0).norm(dim=-1) for t in (d[n], p))
        assert torch.allclose(got, want, rtol=1e-4), n
    assert set(fl.filter_direction(net)) == {'0.weight', '6.weight'} and (d['0.weight'][1] == 0).all()

def test_between_models_with_statistics():
    a, b, data = batch_norm(), batch_norm(), sample(shape=(1, 8, 8))
    with torch.no_grad():
        for p in b.parameters(): p.add_(.3)
    b(torch.randn(20, 1, 8, 8))   # other running means
    df = fl.slice_1d(a, data, fl.direction_between(a, b), at=[0, 1])
    assert df.loss.tolist() == pytest.approx([fl.evaluate_loss(m, data).loss[0] for m in (a, b)], rel=1e-5)
    with pytest.raises(ReinitError, match='not in both models'): fl.direction_between(a, mlp())

def test_plane_is_made_of_lines():
    net, data = mlp(), sample()
    a, b = fl.filter_direction(net, 1), {'2.bias': torch.ones(3)}
    plane = fl.slice_2d(net, data, (a, b), at=[0, .5], at_y=[0, 2])
    assert plane[plane.x == 0].loss.tolist() == pytest.approx(fl.slice_1d(net, data, b, at=[0, 2]).loss.tolist())
    assert plane[plane.y == 0].loss.tolist() == pytest.approx(fl.slice_1d(net, data, a, at=[0, .5]).loss.tolist())

def test_wrong_directions():
    net, data = mlp(), sample()
    wrong = [({'0.wait': torch.ones(6, 4)}, '0.weight'), ({'0.weight': torch.ones(4, 6)}, 'shape'), ({}, 'dict'),
             ({'2.bias': torch.full((3,), math.nan)}, 'not finite')]
    for d, said in wrong:
        with pytest.raises(ReinitError, match=said): fl.slice_1d(net, data, d)
    with pytest.raises(ReinitError, match='should be two'): fl.slice_2d(net, data, [fl.filter_direction(net)])
    with pytest.raises(ReinitError, match='at=nan'): fl.slice_1d(net, data, at=[0, math.nan])

# ---------------------------------------------------------------- wrong models

class Pair(nn.Linear):
    def forward(self, x): return super().forward(x), x

@pytest.mark.parametrize('measure', MEASURES)
@pytest.mark.parametrize('net,y,said', [
    (lambda: nn.Sequential(mlp(), nn.Softmax(1)), None, 'probabilities already'),
    (lambda: nn.Linear(4, 1), None, 'two or more'),
    (lambda: mlp(), 3, 'labels should be 0 to 2'),
    (lambda: mlp(), -1, 'labels should be 0 to 2'),
    (lambda: Pair(4, 3), None, 'tuple'),
    (lambda: nn.Linear(5, 3), None, 'does not run on data of shape')])
def test_wrong_models(measure, net, y, said):
    x, labels = sample()
    if y is not None: labels[3] = y
    with pytest.raises(ReinitError, match=said): MEASURES[measure](net(), (x, labels))

@pytest.mark.parametrize('measure', MEASURES)
def test_diverged_models(measure):
    net = mlp()
    net[0].weight.data[0] = math.nan
    with pytest.raises(ReinitError, match='not finite'): MEASURES[measure](net, sample())
    with pytest.raises(ReinitError, match='should be a torch module'): MEASURES[measure]('net', sample())

def test_loss_that_is_not_a_number():
    def broken(out, y): return out.mean() * math.nan
    with pytest.raises(ReinitError, match='loss is nan'): fl.evaluate_loss(mlp(), sample(), broken)

@pytest.mark.parametrize('f,kw', [
    (fl.margins, dict(n=0)), (fl.weight_size, dict(n=1.5)), (fl.noise_curve, dict(repeats=0)),
    (fl.noise_curve, dict(parameters='wieghts')), (fl.noise_curve, dict(seed=-1)), (fl.top_eigenvalues, dict(k=0)),
    (fl.top_eigenvalues, dict(k=99)), (fl.hessian_trace, dict(n=1)), (fl.spectral_density, dict(steps=0))])
def test_wrong_arguments_are_named(f, kw):
    with pytest.raises(ReinitError, match=next(iter(kw))): f(mlp(), sample(), **kw)

# ---------------------------------------------------------------- plots

def test_plots():
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    nets, data = {'BL': mlp(), 'LW': mlp(act=nn.ReLU)}, sample()
    pairs = [(fl.margins, fl.plot_margins, {}), (fl.noise_curve, fl.plot_noise, dict(y='d_accuracy')),
             (fl.spectral_density, fl.plot_spectral_density, {}), (fl.slice_1d, fl.plot_slice, {})]
    for f, plot, kw in pairs:
        df = fl.measure_models(nets, f, data)
        ax = plot(df, **kw)
        assert isinstance(ax, Axes) and [t.get_text() for t in ax.get_legend().get_texts()] == ['BL', 'LW']
        assert plot(df.drop(columns='method'), **kw).get_legend() is None
        with pytest.raises(ReinitError, match='by='): plot(df, by='methods', **kw)
    assert isinstance(fl.plot_surface(fl.slice_2d(nets['BL'], data, at=[-1, 0, 1])), Axes)
    with pytest.raises(ReinitError, match='two steps'): fl.plot_surface(fl.slice_2d(nets['BL'], data, at=0))
    assert fl.plot_margins(pd.DataFrame(dict(rank=[1, 2], margin=[.1, .2]))).get_yscale() == 'log'
    plt.close('all')

# ---------------------------------------------------------------- devices

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('measure', MEASURES)
def test_data_are_brought_to_the_model(measure):
    net, data = mlp(), sample()
    want = MEASURES[measure](net, data)
    got = MEASURES[measure](copy.deepcopy(net).cuda(), data)
    for c in want.select_dtypes('number'): assert np.allclose(got[c], want[c], rtol=1e-2, atol=1e-3), c

"Weights at zero: sympy against numbers, simulation against closed forms, networks against autograd and training"
import copy
import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from reinit_nb import stability as sb
from reinit_nb.core import ReinitError

sp = pytest.importorskip('sympy')
real, pos = st.floats(-2, 2).filter(lambda v: abs(v) > .05), st.floats(.05, 2)

def data(n=30, d=4, classes=3, shape=None, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return torch.randn(n, *(shape or (d,)), generator=g, dtype=dtype), torch.randint(classes, (n,), generator=g)

def mlp(act=nn.Tanh, bias=True, sizes=(4, 6, 5, 3), dtype=torch.float64):
    torch.manual_seed(0)
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b, bias=bias), act())]
    return nn.Sequential(*layers[:-1]).to(dtype)

def full_hessian(net, x, y, loss=F.cross_entropy):
    "Hessian in all parameters, and the place of each"
    names, ps = zip(*[(n, p.detach()) for n, p in net.named_parameters()])
    sizes = [p.numel() for p in ps]
    start = dict(zip(names, np.cumsum([0] + sizes)))
    def f(v): return loss(torch.func.functional_call(net, {n: o.view(p.shape) for n, p,
                                                           o in zip(names, ps, v.split(sizes))}, (x,)), y)
    v = torch.cat([p.flatten() for p in ps])
    return torch.autograd.functional.hessian(f, v), torch.func.grad(f)(v), start

# ---------------------------------------------------------------- symbols

@pytest.mark.parametrize('n', [2, 3, 4, 5])
@pytest.mark.parametrize('points', [1, 2])
def test_linearization_is_the_jacobian_of_autograd(n, points):
    m, J = sb.product_model(n, points), sb.linearization(n, points)
    v = torch.linspace(-1.3, 1.7, 3 * points, dtype=torch.float64).view(3, points)
    def potential(t): return ((v[0] * t.prod() + v[1] - v[2])**2).mean() / 2 + .3 * (t**2).sum() / 2
    H = torch.autograd.functional.hessian(potential, torch.zeros(n, dtype=torch.float64))
    at = dict(zip([*m.A, *m.B, *m.y, m.lam, m.eta], [*v.flatten().tolist(), .3, .7]))
    assert np.allclose(np.array(J.subs(at), float), -.7 * H.numpy(), atol=1e-12)

@settings(max_examples=10, deadline=None)
@given(real, real, real, pos, pos)
def test_eigenvalues(A, B, y, lam, eta):
    m = sb.product_model(2)
    at = dict(zip([m.A[0], m.B[0], m.y[0], m.lam, m.eta], (A, B, y, lam, eta)))
    got = [float(e.subs(at)) for e in sb.symbolic_eigenvalues(2)]
    assert np.allclose(got, [eta * (-lam + abs(B - y) * abs(A)), eta * (-lam - abs(B - y) * abs(A))])
    if abs(max(got)) > 1e-9: assert bool(sb.stability_condition(2).subs(at)) == (max(got) < 0)

def test_residuals_of_opposite_sign_cancel():
    m = sb.product_model(2, 2)
    at = {m.A[0]: 1, m.A[1]: 1, m.B[0]: 2, m.B[1]: -2, m.y[0]: 0, m.y[1]: 0}
    assert sb.coupling(2, 2).subs(at) == 0

def test_other_equilibria_are_at_rest_and_stable():
    v, m, rests = sb.symbolic_flow(2), sb.product_model(2), sb.double_equilibria()
    for A, B, y in ((1.5, .2, 1.4), (1.5, 1.4, .2), (-2, 0, 1)):
        r = A * (B - y)
        k = -1 if r > 0 else 1
        at = {m.A[0]: A, m.B[0]: B, m.y[0]: y, m.lam: .3, m.eta: .7}
        o = rests[k]
        t = math.sqrt(float(o.square.subs(at)))
        rest = {m.theta[0]: t, m.theta[1]: k * t}
        assert np.allclose(np.array(v.subs(at).subs(rest), float), 0, atol=1e-12)
        J = np.array(v.jacobian(m.theta).subs(at).subs(rest), float)
        want = sorted(float(e.subs(at)) for e in o.eigenvalues)
        assert np.allclose(np.linalg.eigvalsh(J), want) and max(want) < 0
        assert abs(abs(float(o.residual.subs(at)) * A) - .3) < 1e-12
        assert float(rests[-k].square.subs(at)) < 0   # the other sign has none

@settings(max_examples=6, deadline=None)
@given(pos, pos, st.floats(.02, .98))
def test_triple_threshold_solves_the_quartic(A, d, share):
    a, r = A**2, A * d
    lam = share * 3 / 8 * 2**(1 / 3) * r**(4 / 3) / a**(1 / 3)   # below the critical decay
    sa, sr = sp.symbols('a r', positive=True)
    o, at = sb.triple_threshold(), {sa: a, sr: r, sb.product_model(3).lam: lam}
    got = [complex(e.subs(at).evalf(30)).real for e in (o.t_minus, o.t_plus)]
    roots = sorted(z.real for z in np.roots([a, 0, 0, -r, lam]) if abs(z.imag) < 1e-6)
    assert np.allclose(got, roots, rtol=1e-6)
    assert np.allclose([float(t) for t in sb.escape_thresholds(A, 0, d, lam, 3)], roots, rtol=1e-6)

@pytest.mark.parametrize('n', [2, 3, 4, 6])
def test_critical_decay_is_where_roots_vanish(n):
    a, r = sp.symbols('a r', positive=True)
    c = float(sb.critical_decay(n).subs({a: 1.44, r: 1.8}))
    assert sb.escape_thresholds(1.2, 0, 1.5, .999 * c, n)[1] > 0 and sb.escape_thresholds(1.2, 0, 1.5, 1.001 * c,
                                                                                          n)[1].isnan()

# ---------------------------------------------------------------- simulation

def test_flow_against_scipy():
    from scipy.integrate import solve_ivp
    g = torch.Generator().manual_seed(0)
    for n in (2, 3):
        x = torch.randn(2, n, generator=g, dtype=torch.float64)
        A, B, y = torch.randn(3, 2, generator=g, dtype=torch.float64)
        path = sb.simulate(x, A, B, y, .2, .5, time=3)[1]
        for i, (a, d) in enumerate(zip(A.tolist(), (B - y).tolist())):
            def velocity(_, t, a=a, d=d):
                others = np.array([np.delete(t, j).prod() for j in range(len(t))])
                return -.5 * ((a * t.prod() + d) * a * others + .2 * t)
            want = solve_ivp(velocity, (0, 3), x[i].numpy(), rtol=1e-7, atol=1e-9).y[:, -1]
            assert np.allclose(path[-1, i], want, atol=2e-4)

def test_descent_is_sgd():
    w = torch.tensor([.4, -.3, .8], dtype=torch.float64, requires_grad=True)
    opt = torch.optim.SGD([w], lr=.1, weight_decay=.2)
    _, path = sb.simulate(w.detach(), 1.5, .3, 1., .2, .1, time=10, how='descent')
    for k in range(10):
        opt.zero_grad()
        ((1.5 * w.prod() + .3 - 1.)**2 / 2).backward()
        opt.step()
        assert torch.allclose(path[k + 1], w.detach(), atol=1e-12)
    assert len(path) == 11

def test_several_points_move_as_one():
    A, B, y = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w = torch.tensor([.4, -.7], dtype=torch.float64, requires_grad=True)
    (((A * w.prod() + B - y)**2).mean() / 2).backward()
    a, d = sb.equivalent_point(A, B, y)
    z = torch.zeros((), dtype=torch.float64)
    assert torch.allclose(sb.product_velocity(w.detach(), a, d, z, z + 1), -w.grad)
    assert sb.equivalent_point([0., 0.], [1., 2.], [0., 0.]) == (0, 0)

@pytest.mark.parametrize('how', list(sb.DYNAMICS))
def test_escape_iff(how):
    df = sb.simulate_escapes(**sb.random_problems(150, 2, seed=7), how=how)
    assert (df.escaped == (df.rho > df.lam)).all() and df.escaped.nunique() == 2
    assert np.allclose(df.rate, df.predicted_rate, rtol=1e-3, atol=1e-6)
    assert (np.isfinite(df.time) == df.escaped).all()

@pytest.mark.parametrize('n', [3, 4, 5])
def test_more_than_two_never_escape(n):
    df = sb.simulate_escapes(**sb.random_problems(100, n, size=1e-4, seed=2))
    assert not df.escaped.any() and (df.end < df.start).all() and np.allclose(df.rate, -df.eta * df.lam, rtol=1e-2)

def test_too_long_steps_escape():
    eta = np.array([1.9, 2.1]) / (1 + .5)
    df = sb.simulate_escapes([[1e-5, 1e-5]], A=1, B=.5, y=0, lam=1., eta=eta, how='descent')
    assert df.escaped.tolist() == df.predicted.tolist() == [False, True]

@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 4]))
def test_safe_size(seed, n):
    g = torch.Generator().manual_seed(seed)
    safe = sb.safe_size(1.3, .2, 1., .3, n)
    x = safe * .999 * (2 * torch.rand(50, n, generator=g, dtype=torch.float64) - 1)
    sizes = sb.simulate(x, 1.3, .2, 1., .3, time=3)[1].abs().amax(-1)
    assert (sizes.diff(dim=0) <= 0).all()

def test_global_generator_is_left_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    net = mlp()
    torch.manual_seed(0)
    sb.random_problems(5)
    sb.predict_pairs(net, data(), '0', '2')
    sb.set_pairs(net, '0', '2', [0], std=.1)
    sb.align_pairs(net, data(), '0', '2', [0], rounds=1)
    assert torch.equal(torch.rand(3), want)

# ---------------------------------------------------------------- groups of weights

def some_groups(n): return [[('0.weight', (i, 1)), ('2.weight', (j, i)), ('4.weight', (2, j))][:n] for i,
                            j in itertools.product(range(3), range(2))]

@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('act', [nn.Tanh, nn.ReLU])
def test_group_hessians_against_the_whole_hessian(n, act):
    net, (x, y), groups = mlp(act), data(), some_groups(n)
    H, G = sb.group_hessians(net, [(x[:11], y[:11]), (x[11:], y[11:])], groups, chunk=4)
    for k, g in enumerate(groups):
        off = copy.deepcopy(net)
        for name, at in g: off.get_parameter(name).data[at] = 0
        full, first, start = full_hessian(off, x, y)
        idx = [start[name] + np.ravel_multi_index(at, off.get_parameter(name).shape) for name, at in g]
        assert torch.allclose(H[k], full[idx][:, idx], atol=1e-10) and torch.allclose(G[k], first[idx], atol=1e-10)

def test_coefficients_by_finite_differences():
    net, (x, _), groups = mlp(nn.ReLU, bias=False), data(), some_groups(2)
    A, B = sb.product_coefficients(net, x, groups, strict=False)
    for k, (u, v) in enumerate(groups):
        def f(a, b, u=u, v=v):
            off = copy.deepcopy(net)
            off.get_parameter(u[0]).data[u[1]] = a
            off.get_parameter(v[0]).data[v[1]] = b
            return off(x).detach()
        h = 1e-5
        assert torch.allclose(B[k], f(0, 0))
        assert torch.allclose(A[k], (f(h, h) - f(h, -h) - f(-h, h) + f(-h, -h)) / (4 * h * h), atol=1e-4)

def test_scalar_mse_is_the_formula():
    net = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1)).double()
    x, y = data()
    y = y.double()[:, None]
    g = [(('0.weight', (0, 2)), ('1.weight', (0, 0)))]
    net[0].weight.data[0, [0, 1, 3]] = 0   # the second weight has no other partner
    A, B = sb.product_coefficients(net, x, g)
    rho = ((B - y) * A).mean().abs().item()
    row = sb.predict_groups(net, (x, y), g, lam=.2, eta=.3, loss=sb.half_mse).iloc[0]
    assert np.allclose([row.alpha_min, row.alpha_max],
                       [.3 * (-.2 - rho), .3 * (-.2 + rho)]) and row.equilibrium and row.escapes == (rho > .2)

# ---------------------------------------------------------------- rows and columns

@pytest.mark.parametrize('act', [nn.Tanh, nn.ReLU, nn.GELU])
def test_pairs_against_the_whole_hessian(act):
    net, (x, y), units = mlp(act), data(), [1, 4]
    pred = sb.predict_pairs(net, (x, y), '0', '2', units, lam=.01, eta=.5, tiny=1e-6)
    off = copy.deepcopy(net)
    with torch.no_grad():
        for u in units:
            s = 1e-6 / torch.cat([off[0].weight[u], off[0].bias[u, None]]).norm()
            off[0].weight[u] *= s
            off[0].bias[u] *= s
            off[2].weight[:, u] = 0
    full, _, start = full_hessian(off, x, y)
    for u, row in zip(units, pred.itertuples()):
        r = [*(start['0.weight'] + u * 4 + np.arange(4)), start['0.bias'] + u]
        c = list(start['2.weight'] + np.arange(5) * 6 + u)
        M = full[c][:, r]
        assert np.isclose(row.sigma, torch.linalg.svdvals(M)[0].item(), rtol=1e-4)
        assert np.isclose(row.rate, .5 * (row.sigma - .01)) and row.equilibrium
    alone = sb.pair_matrix(net, (x, y), '0', '2', 1, tiny=1e-6)
    assert np.isclose(sb.predict_pairs(net, (x, y), '0', '2', 1, tiny=1e-6).sigma[0],
                      torch.linalg.svdvals(alone)[0].item(), rtol=1e-4)

@pytest.mark.parametrize('act', [nn.Tanh, nn.ReLU])
def test_first_step_of_training(act):
    net, (x, y) = mlp(act), data()
    sb.set_pairs(net, '2', '4', [0, 3], std=1e-5)
    pred = sb.predict_pairs(net, (x, y), '2', '4', [0, 3], lam=.3, eta=1e-3)
    before = sb.pair_norms(net, '2', '4', [0, 3]).norm
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, weight_decay=.3)
    F.cross_entropy(net(x), y).backward()
    opt.step()
    assert np.allclose(np.log(sb.pair_norms(net, '2', '4', [0, 3]).norm / before), pred.rate_now, rtol=2e-2, atol=1e-7)

def test_zero_pairs_stay_zero():
    net, (x, y) = mlp(), data()
    for name in ('2.bias', '0.bias'): net.get_parameter(name).data.zero_()
    sb.set_pairs(net, '0', '2', [0, 5])
    opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    for _ in range(5):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    assert (sb.pair_norms(net, '0', '2', [0, 5]).norm_sum == 0).all()
    assert (sb.pair_norms(net, '0', '2', [1]).norm_sum > 0).all()

def test_columns_after_flatten_and_in_groups():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Flatten(),
                        nn.Linear(4 * 9, 3)).double()
    x, y = data(shape=(1, 7, 7))
    for rows, cols in (('0', '2'), ('2', '5')):
        for u in range(4):
            off = copy.deepcopy(net)
            sb.set_pairs(off, rows, cols, u)
            assert sb.pair_norms(off, rows, cols, u).norm_sum[0] == 0
            other = copy.deepcopy(off)
            def disturb(m, args, out, u=u): return torch.cat([out[:, :u], out[:, u:u + 1] + 9., out[:, u + 1:]], 1)
            other.get_submodule(str(int(rows) + 1)).register_forward_hook(disturb)
            assert torch.allclose(other(x), off(x))   # nothing after the columns sees the unit
    assert sb.predict_pairs(net, (x, y), '0', '2').equilibrium.all()

def test_resnet_is_left_as_it_was():
    tv = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    net = tv.models.resnet18(num_classes=5)
    net.layer1[0].bn1.running_mean.normal_()
    net.train()
    net.conv1.weight.requires_grad_(False)
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    df = sb.predict_pairs(net, (x, y), 'layer1.0.bn1', 'layer1.0.conv2', [0, 7], lam=1e-3, steps=6)
    assert df.equilibrium.all() and (df.sigma > 0).any()
    g = sb.predict_groups(net, (x, y), [(('layer4.1.bn2.weight', 3), ('fc.weight', (2, 3)))], strict=False)
    assert np.isfinite(g.alpha_max).all()
    assert all(torch.equal(v, before[k]) for k,
               v in net.state_dict().items()) and modes == [m.training for m in net.modules()]
    assert not net.conv1.weight.requires_grad and all(p.grad is None for p in net.parameters())

def test_undecayed_bias_frees_a_pair():
    net, (x, y) = mlp(), data()
    assert not sb.predict_pairs(net, (x, y), '0', '2', [0], lam=5.).escapes[0]
    assert sb.predict_pairs(net, (x, y), '0', '2', [0], lam=5., decay_all=False).escapes[0]

def test_multiplier_is_heavy_ball():
    for alpha, mu in itertools.product((-.5, -.01, .02, .3), (0., .5, .9)):
        x, v = 1., 0.
        for _ in range(3000):
            v = mu * v + alpha * x
            x += v
        if abs(x) > 1e-300 and (1 + mu + alpha)**2 > 4 * mu and math.isfinite(x):
            old = x
            v = mu * v + alpha * x
            x += v
            assert np.isclose(x / old, sb.step_multiplier(alpha, mu), rtol=1e-6)
        assert (sb.step_multiplier(alpha, mu) > 1) == (alpha > 0)

def test_tracking_a_learner():
    import fastai.callback.progress  # noqa: F401  adds no_bar
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD
    x, y = data(64, dtype=torch.float32)
    dl = torch.utils.data.DataLoader(list(zip(x, y)), batch_size=16)
    cb = sb.track_pairs('0', '2', [0, 2])
    with pytest.raises(ReinitError, match='no training yet'): cb.table()
    learn = Learner(DataLoaders(dl, dl), mlp(dtype=torch.float32), loss_func=F.cross_entropy, opt_func=SGD, cbs=cb)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, .1)
        learn.validate()
        df = cb.table()
        learn.fit(1, .1)
    assert df.step.max() == 8 and len(df) == 18 and len(cb.table()) == 10
    assert np.isfinite(sb.growth_rates(df).rate).all()
    with pytest.raises(ReinitError, match='fewer than two steps'): sb.growth_rates(df, 8)

# ---------------------------------------------------------------- evidence

def test_evidence():
    z1, z2 = sb.eigenvalue_evidence((2, 3), draws=5), sb.escape_evidence(40, seed=3)
    assert z1.equal.all() and z1.max_error.max() < 1e-10 and z2.agree.min() == 1 and (z2.n == 40).all()
    assert ((z2.low <= z2.agree) & (z2.agree <= z2.high)).all()

def test_evidence_can_come_out_false(monkeypatch):
    monkeypatch.setattr(sb, 'linearization', lambda n, points=1, old=sb.linearization: 2 * old(n, points))
    z1 = sb.eigenvalue_evidence((2, 3), draws=5)
    assert not z1.equal.any() and (z1.max_error > 1e-3).all()
    monkeypatch.setattr(sb, 'product_velocity', lambda *a, old=sb.product_velocity: -old(*a))
    assert (sb.simulate_escapes(**sb.random_problems(20, 3)).escaped).any()

# ---------------------------------------------------------------- wrong input

w0 = ('0.weight', (0, 0))
WRONG = {
    'n': (lambda: sb.linearization(1), 'n=1 should be a whole number >= 2'),
    'n of thresholds': (lambda: sb.escape_thresholds(n=1), 'n=1 should be'),
    'points': (lambda: sb.symbolic_flow(2, 0), 'points=0 should be'),
    'lam': (lambda: sb.simulate([1., 1.], lam=-1), 'lam=-1 should be finite and >= 0'),
    'A': (lambda: sb.simulate_escapes([1., 1.], A=[1., math.nan]), 'A=nan should be finite'),
    'B': (lambda: sb.escape_thresholds(B=math.inf), 'B=inf should be finite'),
    'A of words': (lambda: sb.simulate([1., 1.], A='x'), "A='x' should be a number"),
    'eta': (lambda: sb.simulate([1., 1.], eta=0.), 'eta=0 should be finite and > 0'),
    'eta of a network': (lambda: sb.predict_groups(mlp(), data(), some_groups(2), eta=0), 'eta=0 should be'),
    'shapes': (lambda: sb.simulate(torch.zeros(3, 2), A=[1., 2.]), 'should broadcast'),
    'one weight': (lambda: sb.simulate([1.]), 'n >= 2'),
    'too long': (lambda: sb.simulate([1., 1.], time=1e9, max_steps=10), 'more than max_steps=10'),
    'how': (lambda: sb.simulate([1., 1.], how='flo'), "did you mean 'flow'"),
    'name': (lambda: sb.product_coefficients(mlp(), data()[0], [(w0, ('2.weigth', (0, 0)))]),
             "did you mean '2.weight'"),
    'index': (lambda: sb.product_coefficients(mlp(), data()[0], [(w0, ('2.weight', (0, 6)))]), 'at most (4, 5)'),
    'negative index': (lambda: sb.product_coefficients(mlp(), data()[0], [(w0, ('2.weight', (0, -1)))]),
                       'out of range'),
    'index of one number': (lambda: sb.product_coefficients(mlp(), data()[0], [(w0, ('2.weight', 3))]),
                            'give 2 whole numbers'),
    'no place': (lambda: sb.product_coefficients(mlp(), data()[0], [(w0, '2.weight')]),
                 "a parameter's name and a place"),
    'twice': (lambda: sb.product_coefficients(mlp(), data()[0], [(w0, w0)]), 'names a weight twice'),
    'mixed': (lambda: sb.product_coefficients(mlp(), data()[0], some_groups(2) + some_groups(3)), 'all the same n'),
    'none': (lambda: sb.group_hessians(mlp(), data(), []), 'groups is empty'),
    'same layer': (lambda: sb.predict_groups(mlp(bias=False), data(), [(('4.weight', (0, 0)), ('4.weight', (1, 1)))]),
                   'not on a common path'),
    'no parameters': (lambda: sb.predict_pairs(nn.ReLU(), data(), '0', '2'), 'ReLU has no parameters'),
    'half': (lambda: sb.predict_pairs(mlp().half(), data(), '0', '2'), 'half precision'),
    'no model': (lambda: sb.predict_pairs('resnet18', data(), '0', '2'), 'should be a torch module'),
    'rows': (lambda: sb.predict_pairs(mlp(), data(), '1', '2'), "rows='1' is not known"),
    'same': (lambda: sb.predict_pairs(mlp(), data(), '2', '2'), 'both'),
    'not next': (lambda: sb.predict_pairs(mlp(), data(), '0', '4'), 'is it the next layer?'),
    'units': (lambda: sb.predict_pairs(mlp(), data(), '0', '2', [9]), 'units=9 should be'),
    'units twice': (lambda: sb.set_pairs(mlp(), '0', '2', [1, 1]), 'each once'),
    'std': (lambda: sb.set_pairs(mlp(), '0', '2', std=-1), 'std=-1 should be'),
    'momentum': (lambda: sb.step_multiplier(.1, 2), 'momentum=2 should be'),
    'by': (lambda: sb.plot_rates(pd.DataFrame(dict(rate=[0.], predicted_rate=[0.])), by='lam'),
           "by='lam' is not known"),
}

@pytest.mark.parametrize('case', list(WRONG))
def test_wrong_input(case):
    f, says = WRONG[case]
    with pytest.raises(ReinitError) as e: f()
    assert says in str(e.value), str(e.value)

def test_layers_that_are_not_on_one_path():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
        def forward(self, x): return self.a(x) + self.c(self.b(x))
    torch.manual_seed(0)
    # columns that see another layer do not rest at zero
    assert not sb.predict_pairs(Two().double(), data(), 'a', 'c').equilibrium.any()
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c, self.out = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(4, 3)
        def forward(self, x):
            self.c(self.a(x))
            return self.out(x)
    with pytest.raises(ReinitError, match='not on a common path'): sb.predict_pairs(Idle().double(), data(), 'a', 'c')

def test_plots():
    import matplotlib.pyplot as plt
    sb.plot_portrait(n=3)
    sb.plot_basins(sb.basins(lam=.3, k=3, time=2.))
    sb.plot_escape_times(sb.escape_times(3))
    sb.plot_rates(sb.simulate_escapes(**sb.random_problems(5)))
    plt.close('all')

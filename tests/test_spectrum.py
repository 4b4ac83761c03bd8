"Spectra against closed forms and numpy, shortcuts against the model, the callback against plain training, wrong input"
import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reinit_nb import spectrum as sp
from reinit_nb.core import ReinitError
from reinit_nb.models import model

pi = math.pi

class Formula(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)

def small(seed=0, shape=(3, 4, 4), out=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True),
                         nn.Dropout(.5), nn.Linear(8, out))

def images(n=12, shape=(3, 4, 4), seed=0): return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))

# ---------------------------------------------------------------- probes

@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(4, 7), st.integers(1, 2), st.integers(1, 9))
def test_points_in_parts_are_all_points(m, n, dim, bs):
    g = torch.Generator().manual_seed(m * n)
    origin = torch.randn(m, 2, 3, generator=g, dtype=torch.float64)
    p = sp.Probe(origin, torch.randn(dim, m, 2, 3, generator=g, dtype=torch.float64), n)
    parts = torch.cat([p.points(i, i + bs) for i in range(0, p.size, bs)])
    assert parts.shape == (m * n**dim, 2, 3)
    t = torch.arange(n, dtype=torch.float64) / n
    if dim == 1: want = origin[:, None] + t[:, None, None] * p.axes[0][:, None]
    else:
        along_x = t[:, None, None, None] * p.axes[0][:, None, None]
        along_y = t[:, None, None] * p.axes[1][:, None, None]
        want = origin[:, None, None] + along_x + along_y
    assert torch.allclose(parts, want.reshape(-1, 2, 3), atol=1e-12)

def test_lines_and_planes_go_through_the_data():
    x = images()
    for make, k in ((sp.line_probe, 1), (sp.plane_probe, 2)):
        p = make(x, 6, 8, seed=3)
        flat = {tuple(o.flatten().tolist()) for o in x}
        assert p.dim == k and all(tuple(o.flatten().tolist()) in flat for o in p.origin)
        for a in p.axes:
            ends = p.origin + a
            assert all(any(torch.allclose(e, o, atol=1e-5) for o in x) for e in ends)
    a, b = sp.line_probe(x, 5, 8), sp.line_probe([(x[:7], torch.zeros(7)), (x[7:], torch.zeros(5))], 5, 8)
    assert torch.equal(a.origin, b.origin) and torch.equal(a.axes, b.axes)
    assert not torch.equal(a.origin, sp.line_probe(x, 5, 8, seed=1).origin)

# ---------------------------------------------------------------- transform

@settings(max_examples=30, deadline=None)
@given(st.integers(4, 40), st.sampled_from(['hann', 'none']), st.sampled_from([1, 2]), st.integers(0, 1000),
       st.floats(-5, 5))
def test_parseval(n, window, dim, seed, shift):
    g = torch.randn(2, *[n] * dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    w = np.ones(n) if window == 'none' else np.sin(pi * np.arange(n) / n)**2
    w = w if dim == 1 else np.outer(w, w)
    for o, E in zip(g.numpy(), sp.fourier_energies(g, window, dim).flatten(1).sum(1)):
        want = o.mean()**2 + ((w * (o - o.mean()))**2).sum() / (w**2).sum()
        assert np.isclose(E.item(), want, rtol=1e-10)
        if window == 'none': assert np.isclose(E.item(), (o**2).mean(), rtol=1e-10)

def test_batches_are_parts_of_lines():
    for shape in ((3, 32, 32), (3, 224, 224), (784,), (1,)):
        bs = sp._default_batch_size(shape)
        assert bs & (bs - 1) == 0 and 16 <= bs <= 4096
        assert bs == 16 or bs * math.prod(shape) <= 2**19

def test_memory_formats_agree():
    p = sp.line_probe(images(6), 3, 16)
    q = sp._channels_last(p)
    assert torch.equal(p.points(), q.points())
    for start, stop in ((5, 9), (5, 40)): assert torch.equal(p.points(start, stop), q.points(start, stop))
    assert q.points(16, 24).is_contiguous(memory_format=torch.channels_last)
    assert q.points(3, 3).shape[0] == 0
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    by_hand = torch.cat([net(x[None]).mean(1) for x in p.points()]).detach().double()
    for bs in (None, 5): assert torch.allclose(sp.probe_values(net, p, bs=bs).flatten(), by_hand, atol=1e-6)

@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.floats(.1, 9), st.floats(0, 6), st.floats(-3, 3), st.sampled_from(['hann', 'none']),
       st.floats(.5, 20))
def test_a_sine_has_its_height_at_its_frequency(k, height, phase, offset, window, length):
    net = Formula(lambda x: offset + height * torch.sin(2 * pi * k / length * x + phase))
    p = sp.grid_probe(-1, length - 1, 64)
    df = sp.model_spectrum(net, p, window)
    at = df[np.isclose(df.frequency, k / length)]
    assert len(at) == 1 and np.isclose(at.amplitude.item(), height, rtol=1e-8)
    assert np.isclose(sp.model_amplitudes(net, p, [k / length], window=window).amplitude.item(), height, rtol=1e-8)
    assert np.isclose(df.amplitude[0], abs(offset), atol=1e-8)
    if window == 'none':
        assert np.isclose(at.energy.item(), height**2 / 2, rtol=1e-8)
        b = sp.bandwidth(df)
        assert np.isclose(b.centroid.item(), k / length, rtol=1e-6) and np.isclose(b.edge.item(), k / length)

def test_against_numpy_at_odd_and_even():
    for n in (9, 10):
        g = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        ref = np.abs(np.fft.fft(g.numpy()))**2 / n**2
        E = sp.fourier_energies(g, 'none').numpy()
        for k in range(1, n // 2 + 1): assert np.isclose(E[k], ref[k] + (ref[n - k] if k != n - k else 0))
        assert np.isclose(E[0], ref[0])

def test_frequencies_may_come_as_anything():
    net, p = nn.Linear(1, 1), sp.grid_probe(n=32)
    for f in (2, [2], (2.,), np.array([2]), torch.tensor([2.]), (o for o in [2]), range(2, 3)):
        assert sp.model_amplitudes(net, p, f).frequency.tolist() == [2.]
    assert sp.SpectrumCallback(p, 2).freqs.tolist() == [2.]
    assert not len(sp.SpectrumCallback(p).freqs)

def test_off_grid_frequencies_and_their_sum():
    p, f = sp.grid_probe(0, 2, 256), [.3, 2.71]
    g = sp.probe_values(Formula(lambda x: torch.sin(2 * pi * 2.71 * x)), p)
    x = p.points().flatten().numpy()
    h = g.flatten().numpy() - g.mean().item()
    want = [abs(2 * np.mean(h * np.exp(-2j * pi * o * x))) for o in f]
    assert np.allclose(sp.fourier_coefficients(g[..., 0], f, 2., 'none').abs()[0], want, atol=1e-12)

def test_radial_keeps_energy_and_bandwidth_groups():
    net = Formula(lambda x: torch.sin(2 * pi * (3 * x[:, :1] + 4 * x[:, 1:])) + torch.cos(2 * pi * 6 * x[:, :1]))
    df = sp.model_spectrum(net, sp.grid_probe(0, 1, 24, dim=2), 'none')
    r = sp.radial_spectrum(df)
    assert np.isclose(r.energy.sum(), df.energy.sum())
    assert np.isclose(r[r.frequency == 5].energy.item(), .5) and np.isclose(r[r.frequency == 6].energy.item(), .5)
    both = pd.concat([df.assign(net='a'), df.assign(net='b', energy=2 * df.energy)])
    b = sp.bandwidth(both)
    assert b.net.tolist() == ['a', 'b'] and np.allclose(b.centroid, 5.5) and np.isclose(b.energy[1], 2 * b.energy[0])

def test_average_is_of_energies():
    p = sp.line_probe(images(), 4, 16)
    df = sp.model_spectrum(small().eval(), p, outputs='each')
    m = sp.average_spectra(df)
    assert len(m) == 5 * 9 and 'line' not in m
    one = df[(df.output == 2) & (df.frequency == 3)]
    got = m[(m.output == 2) & (m.frequency == 3)]
    assert np.isclose(got.energy.item(), one.energy.mean())
    assert np.isclose(got.amplitude.item(), (one.amplitude**2).mean()**.5)

# ---------------------------------------------------------------- any model, left as found

def real_models():
    from torchvision.models import mobilenet_v3_small, resnet18
    timm = pytest.importorskip('timm')
    torch.manual_seed(0)
    yield resnet18(num_classes=4), (3, 32, 32)
    yield mobilenet_v3_small(num_classes=4), (3, 32, 32)
    yield timm.create_model('vit_tiny_patch16_224', num_classes=4, img_size=32, depth=2), (3, 32, 32)
    yield small(), (3, 4, 4)
    yield model('mlp', n_in=6, n_out=3), (6,)

def test_real_models_are_left_as_found():
    for net, shape in real_models():
        net.train()
        first = next(net.parameters())
        first.grad = torch.ones_like(first)
        x = images(5, shape)
        state, rng = copy.deepcopy(net.state_dict()), torch.get_rng_state()
        modes = [m.training for m in net.modules()]
        p = sp.line_probe(x, 2, 8)
        df = sp.model_spectrum(net, p)
        G = sp.input_gradients(net, x)
        sp.gradient_histogram(net, x)
        sp.gradient_width(net, x)
        assert len(df) == 10 and G.shape == x.shape and np.isfinite(df.energy).all()
        assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
        assert torch.equal(rng, torch.get_rng_state())
        assert modes == [m.training for m in net.modules()]
        assert all(o.requires_grad for o in net.parameters() if o.is_floating_point())
        assert torch.equal(first.grad, torch.ones_like(first))
        ref = copy.deepcopy(net).eval()
        with torch.no_grad(): want = torch.stack([ref(o[None])[0].mean() for o in p.points()]).view(2, 8)
        for bs in (1, 3, None): assert torch.allclose(sp.probe_values(net, p, bs=bs)[..., 0], want.double(), atol=1e-4)

# ---------------------------------------------------------------- less work, the same numbers

class Untraceable(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x): return self.net(x) if x.sum() == x.sum() else x

class Shared(nn.Module):
    "One convolution under two norms, and its output used twice: nothing may be folded"
    def __init__(self):
        super().__init__()
        self.c, self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    def forward(self, x):
        u = self.c(x)
        return (self.a(u) * u + self.b(self.c(torch.tanh(u)))).mean((2, 3))

def scattered(net, seed=0):
    "BatchNorm with statistics and weights that matter"
    g = torch.Generator().manual_seed(seed)
    for m in net.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            with torch.no_grad():
                for t, lo in ((m.running_mean, -.5), (m.running_var, .5), (m.weight, .5), (m.bias, -.5)):
                    if t is not None: t.copy_(lo + torch.rand(t.shape, generator=g))
    return net.eval()

def convs(seed=0, **kw):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, **kw), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(.5),
                         nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))

def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.Flatten())

def batch_statistics():
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))

@pytest.mark.parametrize('make', [convs, lambda: convs(stride=1, bias=False), lambda: convs(padding_mode='reflect'),
                                  Shared, wide, batch_statistics])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_shortcut_gives_what_the_model_gives(make, dtype):
    net, tol = scattered(make()).to(dtype), 1e-4 if dtype == torch.float32 else 1e-12
    before = copy.deepcopy(net.state_dict())
    for p in (sp.line_probe(images(), 3, 9), sp.plane_probe(images(), 2, 5)):
        with torch.no_grad(): want = net(p.to(dtype=dtype).points()).flatten(1).double()
        got = sp.probe_values(net, p, 'each').flatten(0, -2)
        assert torch.allclose(got, want, rtol=0, atol=tol * want.abs().max().item())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())

def test_shortcut_is_taken_where_it_can_be_and_only_there():
    p = sp.line_probe(images(), 3, 8)
    with torch.no_grad():
        net, q = sp._simplify(scattered(convs()), p)
        used = [type(net.get_submodule(o.target)) for o in net.graph.nodes if o.op == 'call_module']
        assert nn.BatchNorm2d not in used and used.count(nn.Conv2d) == 1
        assert q.origin.shape == (3, 6, 4, 4)
        many = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Flatten()).eval()       # 21 times as many numbers as its input
        assert sp._simplify(many, p)[1] is p
        dead = scattered(convs())
        dead[0].weight.data.zero_()                                          # behind this one lines have no length
        hooked, seen = scattered(convs()), []
        hooked[0].register_forward_hook(lambda m, i, o: seen.append(len(o)))
        for m in (Untraceable(scattered(convs())), dead, hooked, small().eval(), nn.Linear(3, 3)):
            assert sp._simplify(m, p) == (m, p)
    assert sp.probe_values(dead, p).std() == 0
    sp.probe_values(hooked, p, bs=6)
    assert sum(seen) >= 24 and max(seen) == 6

def test_random_and_counting_models_are_asked_as_they_are():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(3, 3, 1)
        def forward(self, x): return self.c(x).mean((2, 3)) + torch.rand(3)     # a graph would hold one draw for ever
    g = sp.probe_values(Noisy(), sp.line_probe(images(), 1, 64), bs=1)
    assert g.diff(dim=1).std() > .1

@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_precision_of_the_model_is_kept(dtype):
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    g = sp.probe_values(net, sp.grid_probe(n=8))
    assert g.dtype == torch.float64 and next(net.parameters()).dtype == dtype

def test_gradients_are_those_of_finite_differences():
    net, x = small(1).double().eval(), images(4).double()
    G, e = sp.input_gradients(net, x, 2), 1e-6
    for i in (0, 7, 31):
        d = torch.zeros(48, dtype=torch.float64)
        d[i] = e
        d = d.view(3, 4, 4)
        with torch.no_grad(): fd = (net(x + d) - net(x - d))[:, 2] / (2 * e)
        assert torch.allclose(G.flatten(1)[:, i], fd, atol=1e-6)
    mean = sum(sp.input_gradients(net, x, k) for k in range(5)) / 5
    assert torch.allclose(sp.input_gradients(net, x, bs=3), mean, atol=1e-12)

def test_histogram_counts_everything_and_constants_have_no_gradient():
    x = images(30)
    h = sp.gradient_histogram(small(), x, bins=20, span=1e3)
    assert h['count'].sum() == x.numel() and np.isclose((h.density * 100).sum(), 1)
    w = sp.gradient_width(Formula(lambda x: torch.ones(len(x), 2)), x)
    assert w.rms.item() == 0

# ---------------------------------------------------------------- rounding is not a spectrum

def deep_and_still(layers=32):
    torch.manual_seed(0)
    net = nn.Sequential()
    for i in range(layers): net.extend([nn.Linear(32 if i else 3, 32), nn.Tanh()])
    net.append(nn.Linear(32, 3))
    with torch.no_grad():
        for m in net[::2]: m.weight *= .1
    return net

def test_rounding_has_no_bandwidth():
    net, p = deep_and_still(), sp.line_probe(images(6, (3,)), 4, 64)
    g = sp.probe_values(net, p)
    assert (g - g.mean(1, keepdim=True)).abs().max() <= 2e-6 * g.abs().max()
    b = sp.bandwidth(sp.model_spectrum(net, p))
    assert b.centroid.isna().all() and b.edge.isna().all() and (b.energy == 0).all()
    net = nn.Sequential(net, Formula(lambda x: x + 1e-3)).double()
    q = sp.plane_probe(images(6, (3,)), 2, 8)
    assert sp.bandwidth(sp.model_spectrum(net.float(), q)).centroid.isna().all()
    torch.manual_seed(0)
    real = nn.Linear(3, 2).double()                                    # in double precision a change of 1e-9 is one
    with torch.no_grad(): real.weight *= 1e-9
    assert sp.bandwidth(sp.model_spectrum(real, p)).centroid.between(.5, 1.5).all()
    assert sp.bandwidth(sp.model_spectrum(real.float(), p)).centroid.isna().all()

@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.floats(-100, 100))
def test_spectra_above_the_floor_are_untouched(seed, shift):
    h = torch.randn(2, 32, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    for window in sp.WINDOWS:
        df = sp.spectra_of_values(h, window=window, dtype=torch.float32)
        assert np.array_equal(df.energy, sp.fourier_energies(h[..., 0], window).flatten())
        assert np.array_equal(df.amplitude, sp.fourier_amplitudes(h[..., 0], window).flatten())

# ---------------------------------------------------------------- the callback

def learner(cbs=None, n=32, bs=16, lr=1e-2):
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import MSELossFlat
    from fastai.optimizer import SGD
    x = sp.grid_probe(n=n).points().float()
    dl = DataLoader(list(zip(x, torch.sin(2 * pi * x))), bs=bs)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(.1), nn.Linear(16, 1))
    learn = Learner(DataLoaders(dl, dl), net, loss_func=MSELossFlat(), opt_func=SGD, lr=lr, cbs=cbs)
    return learn.remove_cb(ProgressCallback)

def sine(x): return torch.sin(2 * pi * x)

def test_callback_steps_and_training_only(tmp_path):
    import fastai.callback.schedule  # noqa: F401 (adds lr_find)
    p = sp.grid_probe(n=32)
    cb = sp.SpectrumCallback(p, [1, 2], every=3, target=sine, window='none')
    watched, plain = learner(cb), learner()
    watched.path = tmp_path
    with watched.no_logging(), plain.no_logging():
        for learn in (watched, plain):
            torch.manual_seed(5)
            learn.fit(4)
        assert cb.df.step.unique().tolist() == [0, 3, 6]
        watched.validate()
        watched.get_preds()
        watched.lr_find(num_it=12, show_plot=False)
        assert cb.df.step.unique().tolist() == [0, 3, 6] and watched.spectrum is cb
    for a, b in zip(watched.model.state_dict().values(), plain.model.state_dict().values()): assert torch.equal(a, b)
    want = sp.model_amplitudes(watched.model, p, [1, 2], target=sine, window='none')
    with watched.no_logging(): watched.fit(3)   # a new fit starts a new record, with the present model
    assert cb.df.step.unique().tolist() == [0, 3, 6]
    first = cb.df[cb.df.step == 0][want.columns]
    assert np.allclose(first.to_numpy(), want.to_numpy(), equal_nan=True)
    s = cb.spectrogram
    assert len(s) == 3 * 17 and set(s) == {'step', 'frequency', 'amplitude', 'energy'}
    for ax in (sp.plot_amplitudes(cb.df), sp.plot_spectrogram(s), sp.plot_spectra(s),
               sp.plot_convergence(sp.convergence_steps(cb.df, 2.))): assert ax.get_xlabel()

def test_callback_given_to_fit_stays_readable():
    learn = learner()
    cb = sp.SpectrumCallback(sp.grid_probe(n=16), [1])
    with learn.no_logging(): learn.fit(1, cbs=cb)
    assert len(cb.df) == 3 and learn.spectrum is cb

def test_callback_on_lines_of_images():
    cb = sp.SpectrumCallback(sp.line_probe(torch.randn(6, 1, generator=torch.Generator().manual_seed(0)), 3, 16), [2])
    with (learn := learner(cb)).no_logging(): learn.fit(1)
    g = sp.probe_values(learn.model, cb.probe)
    assert np.isclose(cb.df.amplitude.iloc[-1], sp.fourier_amplitudes(g[..., 0])[:, 2].square().mean().sqrt().item())

@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=12), st.floats(.1, 1.5))
def test_convergence_by_brute_force(errors, tol):
    df = pd.DataFrame(dict(step=np.arange(len(errors)) * 5, frequency=1., amplitude=1., error=errors))
    got = sp.convergence_steps(df, tol).step.item()
    ok = [i * 5 for i in range(len(errors)) if all(e <= tol for e in errors[i:])]
    assert got == min(ok) if ok else math.isnan(got)

# ---------------------------------------------------------------- wrong input

net1 = nn.Linear(1, 1)

def raises(e):
    def f(x): raise e
    return f

class Picky(nn.Module):
    "Has a convolution, and raises its own error"
    def __init__(self, e):
        super().__init__()
        self.c, self.e = nn.Conv2d(3, 3, 1), e
    def forward(self, x): raise self.e

flat_plane = torch.stack([torch.eye(3)[:2], torch.tensor([[-2., 0, 0], [1, 0, 0]])])
wrong = [
    (lambda: sp.grid_probe(2, 1), r'hi=1 should be larger than lo=2'),
    (lambda: sp.grid_probe(n=1), 'n=1'),
    (lambda: sp.grid_probe(dim=3), 'dim=3'),
    (lambda: sp.grid_probe(math.nan), 'lo=nan'),
    (lambda: sp.Probe(torch.zeros(2, 3), flat_plane, 4),
     r'axes: 1 of 2 planes are no planes \(the first is number 0\)'),
    (lambda: sp.line_probe(torch.zeros(4, 2)), 'axes: 64 of 64 lines have no length'),
    (lambda: sp.line_probe(images(), m=0), 'm=0'),
    (lambda: sp.line_probe(torch.full((4, 2), math.nan)), 'finite'),
    (lambda: sp.line_probe('x'), 'data'),
    (lambda: sp.plane_probe(images(2)), 'data: 2 examples'),
    (lambda: sp.probe_values(net1, sp.grid_probe(), bs=0), 'bs=0'),
    (lambda: sp.probe_values(nn.Linear(3, 1), sp.grid_probe()),
     r'probe: Linear does not run on points of shape \(1,\)'),
    (lambda: sp.probe_values(model('scnn'), sp.line_probe(images(), 2, 8)),
     'probe: Sequential does not run on points of shape'),
    (lambda: sp.probe_values(Picky(AssertionError('32 px')), sp.line_probe(images(), 2, 8)),
     r'probe: Picky does not run on points of shape \(3, 4, 4\): 32 px'),
    (lambda: sp.probe_values(Picky(ValueError('no')), sp.line_probe(images(), 2, 8)),
     r'probe: Picky does not run on points of shape \(3, 4, 4\): no'),
    (lambda: sp.probe_values(Formula(raises(KeyError('a'))), sp.grid_probe()),
     'probe: Formula does not run on points'),
    (lambda: sp.probe_values(Formula(lambda x: x.sum()), sp.grid_probe()), 'model: its output'),
    (lambda: sp.probe_values(Formula(lambda x: (x, x)), sp.grid_probe()), 'tuple'),
    (lambda: sp.model_spectrum(net1, sp.grid_probe(), window='box'), 'window'),
    (lambda: sp.model_spectrum(Formula(lambda x: x / 0), sp.grid_probe()),
     r'model: \d+ of 512 outputs are not finite'),
    (lambda: sp.spectra_of_values(torch.full((2, 8, 1), math.nan)), r'g: values of lines \[0, 1\] are not finite'),
    (lambda: sp.spectra_of_values(torch.zeros(8)), 'g has shape'),
    (lambda: sp.input_gradients(Formula(torch.sqrt), torch.zeros(3, 1)), 'model: gradients of 3 of 3'),
    (lambda: sp.input_gradients(nn.Linear(3, 1), images(4, (2,))),
     r'^data: Linear does not run on inputs of shape \(2,\)'),
    (lambda: sp.gradient_histogram(Formula(lambda x: x + math.nan), images(4, (2,))),
     'model: outputs of 4 of 4 examples are not finite'),
    (lambda: sp.gradient_histogram(net1, images(3, (1,)), span=0), 'span=0'),
    (lambda: sp.plot_spectra(sp.model_spectrum(net1, sp.grid_probe()), by='nte'), 'by'),
    (lambda: sp.fourier_coefficients(torch.zeros(64), [40.]), r'freqs: 40 is too high for n=64.*give n >= 81'),
    (lambda: sp.model_amplitudes(net1, sp.grid_probe(n=32), [8]),
     r'freqs: 8 is too high for n=32 points over a length of 2.*give n >= 33'),
    (lambda: sp.model_amplitudes(net1, sp.grid_probe(), [-1]), 'freqs'),
    (lambda: sp.model_amplitudes(net1, sp.grid_probe(), []), 'freqs'),
    (lambda: sp.model_amplitudes(net1, sp.grid_probe(), 'ab'), 'freqs'),
    (lambda: sp.model_amplitudes(nn.Linear(2, 1), sp.grid_probe(n=8, dim=2), [1]), 'planes'),
    (lambda: sp.model_amplitudes(nn.Linear(1, 2), sp.grid_probe(), [1], target=lambda x: torch.cat([x, x**2], 1)),
     'target has 2 values at each point, and the model is asked for 1'),
    (lambda: sp.model_amplitudes(nn.Linear(1, 3), sp.grid_probe(), [1], target=lambda x: x, outputs='each'),
     'target has 1 values at each point, and the model is asked for 3'),
    (lambda: sp.model_amplitudes(net1, sp.grid_probe(), [1], target=lambda x: x * 0 + 3), 'target is constant'),
    (lambda: sp.model_amplitudes(net1, sp.grid_probe(), [1], target=lambda x: x / 0),
     'target has values that are not finite')]

@pytest.mark.parametrize('f,said', wrong, ids=[o[1][:30] for o in wrong])
def test_wrong_input(f, said):
    with pytest.raises(ReinitError, match=said): f()

def test_an_error_of_the_model_is_explained():
    timm = pytest.importorskip('timm')
    vit = timm.create_model('vit_tiny_patch16_224', num_classes=4, depth=1)   # raises an AssertionError
    x = images(4, (3, 32, 32))
    what = r'VisionTransformer does not run on {} of shape \(3, 32, 32\)'
    p = sp.line_probe(x, 2, 8)
    with pytest.raises(ReinitError, match='probe: ' + what.format('points')): sp.probe_values(vit, p)
    with pytest.raises(ReinitError, match='data: ' + what.format('inputs')): sp.input_gradients(vit, x)

def test_plots_return_axes():
    two = sp.model_spectrum(nn.Linear(2, 1), sp.grid_probe(n=8, dim=2))
    histogram = sp.gradient_histogram(small(), images())
    for ax in (sp.plot_plane_spectrum(two), sp.plot_spectra(two), sp.plot_gradient_histogram(histogram)):
        assert ax.get_xlabel()

# ---------------------------------------------------------------- devices

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_probes_and_inputs_are_brought_to_the_model():
    net, x = scattered(convs()), images()
    p = sp.line_probe(x, 3, 16)
    there = copy.deepcopy(net).cuda()
    assert torch.allclose(sp.probe_values(there, p), sp.probe_values(net, p), atol=1e-4)
    assert torch.allclose(sp.input_gradients(there, x), sp.input_gradients(net, x), atol=1e-4)

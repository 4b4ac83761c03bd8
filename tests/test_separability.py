"Separability against numpy, scipy and scikit-learn; hooks on real models; a callback that does not affect training"

import copy
import random
import warnings

import fastai.callback.schedule  # noqa: F401  adds lr_find
import numpy as np
import pandas as pd
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import nn

from reinit_nb.core import ReinitError, Streams
from reinit_nb.models import mlp, model, reservoir_layout
from reinit_nb.separability import (
    SEPARABILITY_MEASURES,
    FeatureSample,
    Moments,
    RidgeSolver,
    SeparabilityCallback,
    cross_validate_ridge,
    default_layers,
    feature_rows,
    fisher,
    fit_probe,
    fit_ridge,
    gdv,
    is_measured,
    merge_moments,
    plot_separability,
    plot_separability_training,
    separability,
)
from reinit_nb.vision import Task, image_dls


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def moments(h, y, size=17):
    m = Moments(h.shape[1])
    for a, b in zip(h.split(size), y.split(size)):
        m.add(a, b)
    return m.update()


def clusters(n=240, d=6, C=3, seed=0, spread=1.0):
    "Gaussian classes"
    g = gen(seed)
    y = torch.randint(C, (n,), generator=g)
    return 2 * torch.randn(C, d, generator=g).double()[y] + spread * torch.randn(n, d, generator=g).double(), y


def spoiled(kind, n=200, d=12, seed=0):
    "Features of deficient rank"
    h, y = clusters(n, d, 4, seed)
    h = h.relu()
    if kind == 'dead':
        h[:, [1, 5]] = 0
    if kind == 'constant':
        h[:, 2] = 3
        h[:, 7] = 3
    if kind == 'dependent':
        h[:, 4] = h[:, 0] - 2 * h[:, 1]
        h[:, 9] = h[:, 3]
    if kind == 'all':
        h[:, 1] = 0
        h[:, 2] = 5
        h[:, 9] = h[:, 3]
        h[:, 10] = 7
    if kind == 'few':
        h, y = h[:8], y[:8]
    return h, y


# ---------------------------------------------------------------- moments, least squares, ridge


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_moments_hold_all_products(n, d, C, size, seed):
    g = gen(seed)
    h, y = torch.randn(n, d, generator=g).double(), torch.randint(C, (n,), generator=g)
    m = moments(h, y, size)
    full = torch.cat([torch.ones(n, 1), h, F.one_hot(y, m.n_classes)], 1).double()
    assert torch.allclose(m.R.T @ m.R, full.T @ full, atol=1e-9)
    assert m.n == n
    assert m.counts.tolist() == torch.bincount(y).tolist()
    k = n // 2
    if k:
        both = merge_moments([moments(h[:k], y[:k]), moments(h[k:], y[k:])])
        assert torch.allclose(both.R.T @ both.R, full.T @ full, atol=1e-9) and both.n == n


def test_memory_does_not_grow_with_rows():
    m = Moments(10)
    for i in range(50):
        m.add(*clusters(100, 10, seed=i))
    assert len(m.R) <= 14 and sum(len(y) for _, y in m.waiting) < 40


@pytest.mark.parametrize('kind', ['full', 'dead', 'constant', 'dependent', 'all', 'few'])
@pytest.mark.parametrize('seed', range(3))
def test_least_squares_is_numpys(kind, seed):
    h, y = spoiled(kind, seed=seed)
    test, _ = spoiled('full', seed=seed + 100)
    Y = np.eye(int(y.max()) + 1)[y]
    W, _, rank, _ = np.linalg.lstsq(h.numpy(), Y, rcond=None)
    m = moments(h, y)
    r = fit_ridge(m)
    assert RidgeSolver(m).rank == rank
    here = Y.any(0)
    assert np.allclose(r.W[:, here], W[:, here], atol=1e-9)
    assert r.hits(h, y) == (np.where(here, h.numpy() @ W, -np.inf).argmax(1) == y.numpy()).sum()
    assert ((test @ r.W + r.b).argmax(1).numpy() == np.where(here, test.numpy() @ W, -np.inf).argmax(1)).all()


def test_least_squares_of_single_precision_is_numpys():
    "Nearly dependent features: products in place of a decomposition would lose them"
    h, y = clusters(300, 8)
    h = h.float()
    h[:, 5] = h[:, 0] + h[:, 1]  # up to rounding: a singular value of 1e-7
    W = np.linalg.lstsq(h.double().numpy(), np.eye(3)[y], rcond=None)[0]
    r = fit_ridge(moments(h, y))
    assert np.allclose(h.double() @ r.W, h.double().numpy() @ W, atol=1e-6)
    assert r.hits(h, y) == ((h.double().numpy() @ W).argmax(1) == y.numpy()).sum()


@pytest.mark.parametrize('intercept', [False, True])
@pytest.mark.parametrize('penalty', [1e-3, 1.0, 1e3])
@pytest.mark.parametrize('kind', ['full', 'all', 'few'])
def test_ridge_is_scikit_learns(kind, penalty, intercept):
    h, y = spoiled(kind)
    y = y.unique(return_inverse=True)[1]
    ref = Ridge(penalty, fit_intercept=intercept, solver='svd').fit(h.numpy(), np.eye(int(y.max()) + 1)[y])
    r = fit_ridge(moments(h, y), penalty, intercept)
    assert np.allclose(r.W, ref.coef_.T, atol=1e-8) and np.allclose(r.b, ref.intercept_, atol=1e-8)


@pytest.mark.parametrize('intercept', [False, True])
def test_cross_validation_is_scikit_learns(intercept):
    h, y = spoiled('all')
    fold = torch.arange(len(y)) % 4
    cv = cross_validate_ridge(
        [moments(h[fold == k], y[fold == k]) for k in range(4)], [0.01, 1.0, 30.0, 1e4], intercept
    )
    ref = GridSearchCV(
        Ridge(fit_intercept=intercept, solver='svd'),
        dict(alpha=cv.penalty.tolist()),
        scoring='neg_mean_squared_error',
        cv=PredefinedSplit(fold),
    ).fit(h.numpy(), np.eye(4)[y])
    assert np.allclose(cv.error / 4, -ref.cv_results_['mean_test_score'], rtol=1e-9)


def test_cross_validation_with_a_class_in_one_fold_only():
    h, y = clusters(60, 4)
    y[:-5] = y[:-5].clamp(max=1)
    y[-5:] = 2
    cv = cross_validate_ridge([moments(h[:40], y[:40]), moments(h[40:], y[40:])], [1.0])
    parts = [(h[:40], y[:40]), (h[40:], y[40:])]
    err = sum(
        (
            (
                b[0].numpy() @ Ridge(1.0, fit_intercept=False).fit(a[0].numpy(), np.eye(3)[a[1]]).coef_.T
                - np.eye(3)[b[1]]
            )
            ** 2
        ).sum()
        for a, b in (parts, parts[::-1])
    )
    assert cv.error[0] == pytest.approx(err / 60)


def test_linear_refuses():
    m = moments(*clusters())
    with pytest.raises(ReinitError, match='penalty=-0.1 should be'):
        fit_ridge(m, -0.1)
    with pytest.raises(ReinitError, match='penalty=-1.0 should be'):
        cross_validate_ridge([m, m], [-1])
    with pytest.raises(ReinitError, match='2 or more'):
        cross_validate_ridge([m])
    with pytest.raises(ReinitError, match='d=0'):
        Moments(0)


# ---------------------------------------------------------------- Fisher, GDV, probes


@pytest.mark.parametrize('seed', range(4))
def test_fisher(seed):
    h, y = clusters(seed=seed)
    mu = torch.stack([h[y == c].mean(0) for c in range(3)])
    Sw, Sb = (h - mu[y]).T @ (h - mu[y]), (mu[y] - h.mean(0)).T @ (mu[y] - h.mean(0))
    J = scipy.linalg.eigh(Sb.numpy(), Sw.numpy(), eigvals_only=True).sum()
    assert fisher(moments(h, y)) == pytest.approx(J, rel=1e-9)
    A = torch.randn(6, 6, generator=gen(seed)).double()
    assert fisher(moments(h @ A + 7, y)) == pytest.approx(J, rel=1e-7)  # any linear map leaves it
    assert fisher(moments(torch.cat([h, h[:, :2], 0 * h, 0 * h + 1], 1), y)) == pytest.approx(
        J, rel=1e-7
    )  # and copies, dead units, constants


def test_fisher_extremes():
    y = torch.arange(30) % 3
    assert fisher(moments(F.one_hot(y).double(), y)) == float('inf')
    assert fisher(moments(torch.ones(30, 2).double(), y)) == 0
    x = torch.arange(30).double()[:, None] // 3
    assert fisher(moments(x, y)) == pytest.approx(0, abs=1e-12)


def pairwise_gdv(h, y):
    "The definition"
    h = h.numpy()
    z = 0.5 * (h - h.mean(0)) / h.std(0)

    def mean(a, b, same):
        return np.mean(
            [np.linalg.norm(p - q) for i, p in enumerate(a) for j, q in enumerate(b) if not (same and i == j)]
        )

    parts = [z[y.numpy() == c] for c in np.unique(y)]
    within = np.mean([mean(p, p, True) for p in parts])
    between = np.mean([mean(p, q, False) for i, p in enumerate(parts) for q in parts[:i]])
    return (within - between) / np.sqrt(h.shape[1])


@pytest.mark.parametrize('seed', range(3))
def test_gdv(seed):
    h, y = clusters(50, 4, seed=seed)
    assert gdv(h, y) == pytest.approx(pairwise_gdv(h, y), rel=1e-10)
    same = torch.cat([h[:, [2, 0, 1, 3]] * torch.tensor([1.0, 5, 0.1, -3]) + 2, h, 0 * h, 0 * h + 4], 1)
    assert gdv(same, y) == pytest.approx(gdv(h, y), rel=1e-10)
    assert gdv(clusters(400, 4, spread=0.05, seed=seed)[0], clusters(400, 4, seed=seed)[1]) < gdv(
        *clusters(400, 4, spread=2, seed=seed)
    )
    assert np.isnan(gdv(0 * h, y)) and np.isnan(gdv(h, 0 * y))


@pytest.mark.parametrize('l2', [1e-1, 1e-3])
def test_probes_are_scikit_learns(l2):
    h, y = clusters(200, 5, spread=3.0)
    h = torch.cat([h * torch.tensor([1, 10, 0.1, 1, 1]), torch.full((200, 1), 4.0)], 1)
    C, x = 1 / (200 * l2), h.numpy()
    soft = make_pipeline(StandardScaler(), LogisticRegression(C=C, tol=1e-10, max_iter=5000)).fit(x, y)
    r = fit_probe(h, y, 'softmax', l2)
    assert np.allclose((h @ r.W + r.b).softmax(1), soft.predict_proba(x), atol=1e-4)
    assert r.hits(h, y) == (soft.predict(x) == y.numpy()).sum()
    svc = make_pipeline(StandardScaler(), LinearSVC(C=C, tol=1e-10, intercept_scaling=1000, max_iter=10**6)).fit(x, y)
    r = fit_probe(h, y, 'svm', l2)
    assert np.allclose(h @ r.W + r.b, svc.decision_function(x), atol=2e-3)


def test_probe_leaves_absent_classes_out():
    h, y = clusters()
    r = fit_probe(h, 2 * y, 'softmax')
    assert r.b[1] == r.b[3] == -torch.inf and set((h @ r.W + r.b).argmax(1).tolist()) <= {0, 2, 4}
    with pytest.raises(ReinitError, match="did you mean 'softmax'"):
        fit_probe(h, y, 'softmx')


# ---------------------------------------------------------------- layers of models


def test_default_layers_follow_tensors():
    class Net(nn.Module):
        "Layers in no particular order, one ReLU for all, an addition in place"

        def __init__(self):
            super().__init__()
            self.last, self.relu, self.b, self.a, self.norm = (
                nn.Linear(5, 3),
                nn.ReLU(inplace=True),
                nn.Linear(5, 5),
                nn.Linear(4, 5),
                nn.BatchNorm1d(5),
            )
            self.idle = nn.Linear(9, 9)

        def forward(self, x):
            x = self.relu(self.norm(self.a(x)))
            out = self.b(x)
            out += x
            return self.last(self.relu(out))

    net, x = Net(), torch.randn(6, 4, generator=gen())
    assert default_layers(net, x) == ['relu', 'b', 'last']
    df = separability(net, (x, torch.arange(6) % 2), layers=['a', 'norm', 'relu', 'b', 'relu#2', 'last'])
    assert df.features.tolist() == [5] * 5 + [3]


def test_features_are_copied_before_what_works_in_place():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    h, y = clusters(100, 4, 2)
    h = h.float()
    with torch.no_grad():
        want = np.linalg.lstsq(net[0](h).double().numpy(), np.eye(2)[y], rcond=None)[0]
    got = separability(net, (h, y), layers=['0']).value[0]
    with torch.no_grad():
        assert got == ((net[0](h).double().numpy() @ want).argmax(1) == y.numpy()).mean()


def test_dropout_is_not_an_activation():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2))
    assert default_layers(net, torch.randn(3, 4, generator=gen())) == ['1', '3']


def test_layers_without_a_row_for_each_example():
    "Attention in windows, and tables of positions: left out by default, refused by name"
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.window, self.table, self.last = nn.Linear(2, 2), nn.Linear(3, 1), nn.Linear(4, 2)

        def forward(self, x):
            windows = self.window(x.reshape(-1, 2)) + self.table(torch.ones(1, 3))
            return self.last(windows.reshape(len(x), 4))

    net, x = Windows(), torch.randn(6, 4, generator=gen())
    assert default_layers(net, x) == ['last']
    y = torch.arange(6) % 2
    assert separability(net, (x, y)).layer.tolist() == ['last']
    with pytest.raises(ReinitError, match="layer='window' returns 12 rows for 6 examples"):
        separability(net, (x, y), layers=['window'])
    assert not net.window._forward_hooks


def images(n=24, size=32, seed=0):
    return torch.rand(n, 3, size, size, generator=gen(seed)), torch.arange(n) % 3


def test_torchvision_resnet():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    net = resnet18(num_classes=3)
    df = quiet(net, images())
    assert len(df) == 21
    assert df.layer.iloc[0] == 'relu'
    assert df.layer.iloc[-1] == 'fc'
    assert 'layer1.0.relu' in set(df.layer)
    assert 'layer2.0.downsample.1' in set(df.layer)
    with pytest.raises(ReinitError, match="layer='relu' has 16,384 features.*pool='mean'"):
        separability(net, images(), pool='flatten')
    assert quiet(net, images(), layers=['layer4'], pool='flatten').features[0] == 512
    assert quiet(net, images(), layers='layer3', pool=lambda o: o.amax((2, 3))).features[0] == 256


def test_torchvision_vit_and_timm():
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    net = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3
    )
    df = quiet(net, images())
    assert df.features.iloc[0] == 16 and 'encoder.layers.encoder_layer_1.mlp.1' in set(df.layer)
    timm = pytest.importorskip('timm')
    df = quiet(timm.create_model('mobilenetv3_small_050', num_classes=3), images(size=64))
    assert df.layer.iloc[0] == 'bn1' and len(df) > 30


def quiet(*args, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return separability(*args, **kw)


def test_features():
    x = torch.rand(2, 3, 4, 5)
    assert torch.allclose(feature_rows(x), x.mean((2, 3)))
    assert feature_rows(x, 'flatten').shape == (2, 60)
    assert feature_rows(x, lambda o: o[:, 0, 0]).shape == (2, 5)
    t = torch.rand(2, 7, 3)
    assert torch.allclose(feature_rows(t, channels_last=True), t.mean(1))
    assert torch.allclose(feature_rows(t), t.mean(2))
    assert feature_rows(torch.rand(4)).shape == (4, 1)


# ---------------------------------------------------------------- the whole measurement


def small(seed=0, **kw):
    return mlp(n_in=8, hidden=(12, 20, 12), n_out=3, reservoir=(1,), seed=seed, **kw)


def data(n=300, seed=0):
    h, y = clusters(n, 8, seed=1, spread=2.5)
    return h.float(), y


def batches(x, y, size=64):
    return list(zip(x.split(size), y.split(size)))


def test_all_measures_against_all_activations():
    net, (x, y) = small(), data(500)
    (a, t), (b, u) = (x[:300], y[:300]), (x[300:], y[300:])
    df = separability(net, batches(a, t), batches(b, u, 31), measures=SEPARABILITY_MEASURES, penalty=2.0, l2=1e-2)
    assert len(df) == 4 * 6 * 2
    assert df.layer.unique().tolist() == [
        'block1.relu',
        'block2.relu',
        'block3.relu',
        'head.classifier',
    ]
    v = df.set_index(['layer', 'measure', 'part']).value
    ha = hb = None
    for name, depth in zip(df.layer.unique(), range(4)):
        with torch.no_grad():
            ha, hb = (net[: depth + 1](o) for o in (a, b))
        m = moments(ha, t)
        for k, r in {
            'least squares': fit_ridge(m),
            'ridge': fit_ridge(m, 2.0),
            'softmax': fit_probe(ha, t, l2=1e-2),
            'svm': fit_probe(ha, t, 'svm', 1e-2),
        }.items():
            assert v[name, k, 'train'] == pytest.approx(r.hits(ha, t) / 300, abs=0.004)
            assert v[name, k, 'test'] == pytest.approx(r.hits(hb, u) / 200, abs=0.006)
        assert v[name, 'fisher', 'train'] == pytest.approx(fisher(m), rel=1e-4)
        assert v[name, 'fisher', 'test'] == pytest.approx(fisher(moments(hb, u)), rel=1e-4)
        assert v[name, 'gdv', 'train'] == pytest.approx(gdv(ha, t), rel=1e-4)
        assert v[name, 'gdv', 'test'] == pytest.approx(gdv(hb, u), rel=1e-4)


def test_batches_do_not_matter():
    net, (x, y) = small(), data()
    a, b = (separability(net, batches(x, y, s), measures=('least squares', 'fisher')) for s in (300, 7))
    assert np.allclose(a.value, b.value, atol=0.004) and (a['rank'] == b['rank']).all()


class Once:
    "Counts how often it is gone through"

    def __init__(self, bs):
        self.bs, self.n = bs, 0

    def __iter__(self):
        self.n += 1
        return iter(self.bs)


def test_one_pass_or_two():
    net, (x, y) = small(), data(3000)
    once = Once(batches(x, y))
    a = separability(net, once, measures=('least squares', 'ridge', 'softmax', 'gdv'))
    assert once.n == 1
    assert a.equals(separability(net, iter(batches(x, y)), measures=('least squares', 'ridge', 'softmax', 'gdv')))
    twice = Once(batches(x, y))
    b = separability(net, twice, cache=2**16, measures=('least squares', 'ridge', 'softmax', 'gdv'))
    assert twice.n == 2
    for m in ('least squares', 'ridge'):
        assert np.allclose(a[a.measure == m].value, b[b.measure == m].value)
        assert (b[b.measure == m].n == 3000).all()
    part = b[b.measure == 'softmax'].n
    assert (part < 3000 / 3).all()
    assert np.allclose(a[a.measure == 'softmax'].value, b[b.measure == 'softmax'].value, atol=0.08)
    with pytest.raises(ReinitError, match='second time'):
        separability(net, iter(batches(x, y)), cache=2**16)


def test_a_thinned_sample_is_uniform():
    k = FeatureSample(2**16, Streams(0).data)
    for i in range(100):
        k.add({'a': torch.full((100, 8), float(i))}, torch.full((100,), i))
    h, y = k.rows("a")
    assert k.bytes <= 2**16
    assert len(y) == pytest.approx(10_000 * k.share, rel=0.1)
    assert y.float().mean() == pytest.approx(49.5, abs=4)
    assert len(k.rows("a", 50)[1]) == 50 and (h[:, 0] == y).all()


def test_rows_that_wait_are_bounded_in_deep_networks(monkeypatch):
    from reinit_nb import separability as module

    net = mlp(n_in=8, hidden=(12,) * 30, n_out=3)
    x, y = data(2000)
    want = separability(net, batches(x, y), measures=('least squares', 'fisher'))
    monkeypatch.setattr(module, 'WAITING_NUMBERS', 60_000)
    most = 0

    class Watched(module._Pass):
        def _add_moments(self, *args):
            nonlocal most
            super()._add_moments(*args)
            most = max(most, sum(m.n_waiting * m.d for parts in self.moments.values() for m in parts))

    monkeypatch.setattr(module, '_Pass', Watched)
    got = separability(net, batches(x, y), measures=('least squares', 'fisher'))
    assert 0 < most <= 60_000
    assert np.allclose(want.value, got.value, atol=1e-3)


def test_chosen_penalty_helps_where_rows_are_few():
    g = gen(3)
    x, y = torch.randn(2000, 60, generator=g), torch.randint(2, (2000,), generator=g)
    x[:, 0] += 3 * y - 1.5
    df = separability(
        nn.Sequential(nn.Linear(60, 60)), (x[:70], y[:70]), (x[70:], y[70:]), measures=('least squares', 'ridge')
    )
    v = df[df.part == 'test'].set_index('measure').value
    assert v['ridge'] > v['least squares'] + 0.05 and (df[df.measure == 'ridge'].penalty > 0).all()


def test_model_is_left_as_found():
    net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    net[1].eval()
    net[4].weight.requires_grad_(False)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    old, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def same():
        assert all(torch.equal(v, old[k]) for k, v in net.state_dict().items())
        assert modes == [m.training for m in net.modules()]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        assert (net[0].weight.grad == 1).all()
        assert not net[4].weight.requires_grad
        assert torch.equal(rng[0], torch.get_rng_state())
        assert rng[1] == random.getstate()
        assert (rng[2] == np.random.get_state()[1]).all()

    separability(net, data(), data(), measures=SEPARABILITY_MEASURES)
    same()
    with pytest.raises(ReinitError):
        separability(net, [data(), (torch.ones(3, 9), torch.zeros(3).long())])
    same()


def test_half_and_double_precision():
    net, (x, y) = small(), data()
    a, b, c = (
        separability(copy.deepcopy(net).to(t), (x.to(t), y)).value
        for t in (torch.float32, torch.float64, torch.bfloat16)
    )
    assert np.allclose(a, b, atol=0.01) and np.allclose(a, c, atol=0.08)


def test_wrong_input():
    net, (x, y) = small(), data()

    def fails(said, **kw):
        with pytest.raises(ReinitError, match=said):
            separability(**(dict(model=net, train=(x, y)) | kw))

    fails("layer='block1.rel' is not known; did you mean 'block1.relu'", layers=['block1.rel'])
    fails('from 1', layers=['block1.relu#x'])
    fails('was not called', layers=['block1.relu#2'])
    fails('layers is empty', layers=[])
    fails("measure='fishr' is not known; did you mean 'fisher'", measures=('fishr',))
    fails('measures is empty', measures=())
    fails('penalty=-1', penalty=-1)
    fails('l2=-1', l2=-1)
    fails('folds=1', folds=1)
    fails('cache=3', cache=3)
    fails("pool='men'.*'mean'", pool='men')
    fails('all 300 examples are of class 1', train=(x, 0 * y + 1))
    fails('300 whole numbers', train=(x, y.float()))
    fails('300 whole numbers', train=(x, F.one_hot(y)))
    fails('first dimensions should be the size of the batch', train=(x, y[:7]))
    fails('there is a -1', train=(x, y - 1))
    fails('the test set has 5, and the training set has 0 to 2', test=(x, y + 3))
    fails("layer='block1.relu': some features are NaN", train=(x * torch.nan, y))
    fails('NaN or infinite', train=(x * torch.inf, y))
    fails('does not run on data of shape', train=(x[:, :3], y))
    fails('data is empty', train=[])
    fails('data is a Tensor', train=x)
    fails('two tensors', train=[(x, y, y)])
    fails('should be a torch module', model=3)
    fails('dls.train', train=image_dls(Task('digits'), device='cpu'))


def test_warnings():
    net, (x, y) = small(), data()
    with pytest.warns(UserWarning, match='15 examples are fewer than 20 features.*ridge'):
        df = separability(net, (x[:15], y[:15]), layers=['block2.relu'])
    assert df.value[0] == 1 and df['rank'][0] == 15
    dead = copy.deepcopy(net)
    with torch.no_grad():
        dead.block1.dense.bias.fill_(-1e3)
    with pytest.warns(UserWarning, match="layer 'block1.relu': all 12 features are constant"):
        df = separability(dead, (x, y), layers=['block1.relu'], measures=('least squares', 'fisher', 'gdv'))
    assert df.value[1] == 0 and np.isnan(df.value[2])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        separability(net, (x, y), measures=SEPARABILITY_MEASURES)
        separability(net, (x[:15], y[:15]), layers=['block2.relu'], measures='ridge')


# ---------------------------------------------------------------- loaders and the callback


def learner(seed=0, bs=32, n=200, net=None, cbs=None):
    net = net or model('scnn', c_in=1, size=8, width=0.25, norm='batch', dropout=0.3, seed=seed)
    dls = image_dls(Task('digits', n_train=n, shift=0.1), bs=bs, device='cpu', seed=seed)
    return Learner(dls, net, cbs=cbs).remove_cb(ProgressCallback)


def plain_learner(seed=0):
    "fastai's own loaders, with their own generator, and torch's"
    torch.manual_seed(seed)
    random.seed(seed)
    x, y = data(130)
    items = list(zip(x, y))
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return Learner(
        DataLoaders(
            DataLoader(items[:100], bs=16, shuffle=True, drop_channels_last=True), DataLoader(items[100:], bs=16)
        ),
        net,
        loss_func=CrossEntropyLossFlat(),
    ).remove_cb(ProgressCallback)


def torch_learner(seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
    ds = torch.utils.data.TensorDataset(*data(130))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    train = torch.utils.data.DataLoader(ds, 16, shuffle=True, generator=gen(seed))
    return Learner(
        DataLoaders(train, torch.utils.data.DataLoader(ds, 16)), net, loss_func=CrossEntropyLossFlat()
    ).remove_cb(ProgressCallback)


@pytest.mark.parametrize('make', [learner, plain_learner, torch_learner])
def test_training_does_not_notice(make):
    res = []
    for cbs in ([], SeparabilityCallback(measures=('least squares', 'ridge', 'gdv', 'fisher'), n_train=80)):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        learn = make()
        with learn.no_logging():
            quiet_fit(learn, 3, cbs)
        res.append(
            (
                learn.model.state_dict(),
                torch.get_rng_state(),
                random.getstate(),
                [list(v) for v in learn.recorder.values],
            )
        )
    (a, *x), (b, *y) = res
    assert all(torch.equal(a[k], b[k]) for k in a) and torch.equal(x[0], y[0]) and x[1:] == y[1:]


def quiet_fit(learn, n, cbs=None, seed=None, **kw):
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
    with warnings.catch_warnings(), learn.no_logging():
        warnings.simplefilter('ignore')
        learn.fit(n, 1e-2, cbs=cbs, **kw)


def test_loaders_are_left_alone():
    learn = learner()
    a = [b[1].tolist() for b in learn.dls.train]
    learn = learner()
    quiet(learn.model, learn.dls.train, learn.dls.valid)
    assert [b[1].tolist() for b in learn.dls.train] == a


def test_all_examples_of_a_loader_are_seen():
    learn = learner(n=200, bs=64)  # 180 for training, 128 in full batches
    df = quiet(learn.model, learn.dls.train, learn.dls.valid)
    assert df[df.part == 'train'].n.unique() == [180] and df[df.part == 'test'].n.unique() == [20]


def test_the_same_examples_each_time():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            if not self.training:
                seen.append(x.sum().item())
            return x

    learn = learner(net=nn.Sequential(Spy(), model('scnn', c_in=1, size=8, width=0.25)))

    class NoValid(Callback):
        def before_validate(self):
            seen.append(None)

    quiet_fit(learn, 2, [SeparabilityCallback(n_train=64, n_valid=10, layers=['1.block1']), NoValid()])
    cb = learn.separability
    assert set(cb.df[cb.df.part == 'train'].n) == {64}
    assert set(cb.df[cb.df.part == 'valid'].n) == {10}
    cut = seen.index(None)
    first, second = seen[: cut // 2], seen[cut // 2 : cut]  # at the beginning, and after the first epoch
    assert first == second and len(first) == 3


def test_epochs():
    learn = learner()
    quiet_fit(learn, 5, SeparabilityCallback(every=2, layers=['block1']))
    assert learn.separability.df.epoch.unique().tolist() == [0, 2, 4, 5]
    assert set(learn.separability.df.part) == {'train', 'valid'}
    learn = learner(cbs=SeparabilityCallback(every=[1], layers=['block1'], ds_idx=2))
    quiet_fit(learn, 3)
    quiet_fit(learn, 2)
    assert learn.separability.df.epoch.unique().tolist() == [0, 1, 3, 4, 5]
    assert set(learn.separability.df.part) == {
        'train',
        'test',
    }
    assert [is_measured(e, 4, 3) for e in range(5)] == [True, False, False, True, True]


def test_first_row_is_the_initial_model():
    learn = learner()
    want = quiet(learn.model, learn.dls.valid, layers=['block1'])
    quiet_fit(learn, 1, SeparabilityCallback(layers=['block1'], n_train=None))
    got = learn.separability.df
    assert (
        got[(got.epoch == 0)].value.tolist()
        == quiet(learner().model, learn.dls.train, learn.dls.valid, layers=['block1']).value.tolist()
    )
    assert len(want) == 1


def test_nothing_outside_training():
    learn = learner(cbs=SeparabilityCallback(layers=['block1']))
    with learn.no_logging():
        learn.validate()
        learn.get_preds()
        learn.lr_find(num_it=5, show_plot=False)
    assert learn.separability.df.empty
    quiet_fit(learn, 1)
    n = len(learn.separability.df)
    with learn.no_logging():
        learn.validate()
        learn.get_preds()
        learn.lr_find(num_it=5, show_plot=False)
    assert len(learn.separability.df) == n and learn.separability.epochs_done == 1


def test_a_fit_that_ends_early():
    class Stop(Callback):
        def __init__(self, at):
            self.at = at

        def after_epoch(self):
            if self.training is not None and self.epoch == self.at:
                raise CancelFitException

    learn = learner()
    quiet_fit(learn, 9, [SeparabilityCallback(every=9, layers=['block1']), Stop(3)])
    assert learn.separability.df.epoch.unique().tolist() == [0, 4]

    class Break(Callback):
        def after_batch(self):
            if self.training and self.epoch == 1:
                raise CancelFitException

    learn = learner()
    quiet_fit(learn, 9, [SeparabilityCallback(every=9, layers=['block1']), Break()])
    assert learn.separability.df.epoch.unique().tolist() == [0]  # within an epoch there is nothing to measure


def test_start_epoch_goes_on():
    learn, cb = learner(), SeparabilityCallback(layers=['block1'])

    class Stop(Callback):
        def after_epoch(self):
            if self.epoch == 1:
                raise CancelFitException

    quiet_fit(learn, 4, [cb, Stop()])
    assert cb.df.epoch.unique().tolist() == [0, 1, 2]
    quiet_fit(learn, 4, cb, start_epoch=2)
    assert cb.df.epoch.unique().tolist() == [0, 1, 2, 3, 4]
    assert not cb.df.duplicated(['epoch', 'layer', 'part']).any()
    quiet_fit(new := learner(), 4, SeparabilityCallback(layers=['block1']), start_epoch=2)
    assert new.separability.df.epoch.unique().tolist() == [2, 3, 4]


def test_checkpoints_keep_the_table(tmp_path):
    from reinit_nb.checkpoint import CheckpointCallback

    def cbs():
        return [SeparabilityCallback(layers=['block1'], n_train=50), CheckpointCallback(tmp_path / 'c', every=1)]

    class Kill(Callback):
        order = 90

        def after_batch(self):
            if self.training and self.epoch == 2 and self.iter == 2:
                raise KeyboardInterrupt

    whole = learner()
    quiet_fit(whole, 4, SeparabilityCallback(layers=['block1'], n_train=50), seed=7)
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(learner(), 4, [*cbs(), Kill()], seed=7)
    quiet_fit(again := learner(), 4, cbs())
    pd.testing.assert_frame_equal(again.separability.df, whole.separability.df)


def test_state_is_small_and_plain():
    import pickle

    learn = learner()
    quiet_fit(learn, 2, cb := SeparabilityCallback(layers=['block1']))
    assert len(pickle.dumps(cb)) < 20_000 and pickle.loads(pickle.dumps(cb)).df.equals(cb.df)


def test_callback_refuses():
    for kw, said in (
        (dict(every=0), 'every=0'),
        (dict(every=[-1]), 'every=-1'),
        (dict(n_train=0), 'n_train=0'),
        (dict(measures='fishr'), 'fisher'),
        (dict(penalty=-2), 'penalty=-2'),
        (dict(measure='ridge'), "did you mean 'measures'"),
        (dict(pool='x'), 'pool'),
        (dict(ds_idx=0), 'ds_idx=0'),
        (dict(max_features=0), 'max_features=0'),
    ):
        with pytest.raises(ReinitError, match=said):
            SeparabilityCallback(**kw)
    learn = learner()
    with pytest.raises(ReinitError, match="did you mean 'block1'"):
        quiet_fit(learn, 1, SeparabilityCallback(layers=['blok1']))


def test_plots():
    learn = learner()
    quiet_fit(learn, 2, SeparabilityCallback(measures=('gdv', 'least squares', 'softmax')))
    df = learn.separability.df
    ax = learn.separability.plot()
    assert len(ax.lines) == df.layer.nunique()
    assert ax.get_title() == 'valid'
    assert ax.get_ylabel() == 'accuracy of a linear readout'
    assert learn.separability.plot('gdv', 'train').get_title() == 'train'
    last = df[df.epoch == 2]

    def drawn(ax):
        return sum(len(line.get_xdata()) > 0 for line in ax.lines)

    assert drawn(plot_separability(last)) == 4 and drawn(plot_separability(last, 'gdv')) == 2
    with pytest.raises(ReinitError, match='known'):
        plot_separability(last, 'svm')
    with pytest.raises(ReinitError, match='nothing has been measured'):
        plot_separability_training(SeparabilityCallback().df)


@pytest.mark.data
def test_mnist_against_numpy():
    d = image_dls(Task('mnist', n_train=3000, valid=0.0, normalize='none'), bs=500, device='cpu')
    net = mlp(n_in=784, frozen=True, **reservoir_layout(64))
    df = separability(net, d.train, d[2])
    (x, y), (u, v) = (
        tuple(torch.cat([b[i].as_subclass(torch.Tensor) for b in dl]) for i in (0, 1))
        for dl in (d.train.new(shuffle=False, drop_last=False), d[2])
    )
    for i, n in enumerate(df.layer.unique()):
        with torch.no_grad():
            a, b = (net[: i + 1](o).double().numpy() for o in (x, u))
        W = np.linalg.lstsq(a, np.eye(10)[y], rcond=None)[0]
        got = df[df.layer == n].set_index('part').value
        assert got['train'] == pytest.approx(((a @ W).argmax(1) == y.numpy()).mean(), abs=2e-3)
        assert got['test'] == pytest.approx(((b @ W).argmax(1) == v.numpy()).mean(), abs=2e-3)

"Cover's count against integers, enumeration and binomial law; answers about separability against exact proofs"

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from reinit_nb.core import ReinitError, Streams
from reinit_nb.cover import (
    CERTIFICATE_SOLVERS,
    _certify,
    are_separable,
    certify_separable,
    cover_agreement,
    cover_capacity,
    cover_count,
    cover_probability,
    is_proof,
    log_cover_count,
    log_cover_probability,
    measure_cover,
    plot_cover,
    random_relu_features,
)

# ---------------------------------------------------------------- the count


def by_comb(N, d):
    return 2 * sum(math.comb(N - 1, k) for k in range(d))


@given(st.integers(1, 300), st.integers(1, 320))
def test_count_is_the_sum(N, d):
    assert cover_count(N, d) == by_comb(N, d)
    assert cover_count(N, d, bias=True) == by_comb(N, d + 1)
    if N <= d:
        assert cover_count(N, d) == 2**N


@pytest.mark.parametrize('d', [1, 2, 3])
@pytest.mark.parametrize('N', [1, 2, 4, 6])
def test_count_by_enumeration(N, d):
    "All 2^N labellings of random points, each decided with a proof"
    X = np.random.default_rng(N + 10 * d).normal(size=(N, d))
    ys = np.array(list(itertools.product((-1, 1), repeat=N)))
    assert are_separable(ys[..., None] * X).sum() == cover_count(N, d)
    assert sum(certify_separable(X, y, bias=True).separable for y in ys) == cover_count(N, d, bias=True)


@given(st.integers(1, 3000), st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_logarithms_against_integers(N, d):
    exact = cover_count(N, d)
    assert math.isclose(log_cover_count(N, d), math.log(exact), rel_tol=1e-13)
    p = Fraction(exact, 2**N)
    want = (
        math.log(p.numerator) - math.log(p.denominator)
        if p < Fraction(1, 2)
        else math.log1p(-float(1 - p))
        if p < 1
        else 0.0
    )
    assert math.isclose(log_cover_probability(N, d), want, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize('d', [2, 300, 1500])
def test_a_million_points(d):
    assert math.isclose(log_cover_count(10**6, d), math.log(cover_count(10**6, d)), rel_tol=1e-12)


@pytest.mark.parametrize(
    'N,d', [(10**6, 500_000), (10**6, 500_700), (10**6, 499_000), (999_999, 498_000), (10**6, 502_000)]
)
def test_large_probabilities_against_scipy(N, d):
    assert math.isclose(cover_probability(N, d), binom.cdf(d - 1, N - 1, 0.5), rel_tol=1e-8)
    assert 0 < cover_probability(N, d) < 1


def test_tails_do_not_underflow():
    assert log_cover_probability(10**6, 10) < -690_000
    assert math.isfinite(log_cover_probability(10**6, 1))
    few = sum(math.comb(59, k) for k in range(55, 60)) / 2**59  # by hand: the other tail
    assert math.isclose(-math.expm1(log_cover_probability(60, 55)), few, rel_tol=1e-12)


def test_capacity():
    for d in (1, 2, 31, 10**5):
        assert math.isclose(cover_probability(cover_capacity(d), d), 0.5, rel_tol=1e-11)
    assert cover_capacity(7) == 14 and cover_capacity(7, bias=True) == 16
    assert math.isclose(cover_probability(16, 7, bias=True), 0.5, rel_tol=1e-12)
    assert cover_probability(7, 7) == cover_probability(8, 7, bias=True) == 1 > cover_probability(8, 7)


@pytest.mark.parametrize('f', [cover_count, log_cover_count, log_cover_probability, cover_probability])
def test_counts_refuse(f):
    for N, d, said in ((0, 1, 'N=0'), (-3, 1, 'N=-3'), (2.5, 1, 'N=2.5'), (4, 0, 'd=0'), (4, True, 'd=True')):
        with pytest.raises(ReinitError, match=said.replace('.', r'\.')):
            f(N, d)


# ---------------------------------------------------------------- answers and proofs


@pytest.mark.parametrize('method', CERTIFICATE_SOLVERS)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 14), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_answer_is_proven(method, seed, d, N, bias):
    g = np.random.default_rng(seed)
    X, y = g.normal(size=(N, d)), g.choice((-1, 1), N)
    c = certify_separable(X, y, bias, method)
    assert is_proof(X, y, c, bias)
    Z = y[:, None] * (np.c_[X, np.ones(N)] if bias else X)
    if c.separable:
        assert (Z @ c.w > 0).all() and c.alpha is None
    else:
        a = c.alpha / np.linalg.norm(Z, axis=1)
        assert c.w is None
        assert (a >= 0).all()
        assert math.isclose(c.alpha.sum(), 1)
        assert np.abs(a @ Z).max() < 1e-8 * a.sum()


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_methods_agree_on_a_grid(seed, d, N):
    "Whole numbers: repeated points, points on hyperplanes, the origin"
    g = np.random.default_rng(seed)
    X, y = g.integers(-2, 3, (N, d)), g.choice((-1, 1), N)
    a, b = (certify_separable(X, y, method=m).separable for m in CERTIFICATE_SOLVERS)
    assert a == b
    assert (
        certify_separable(3e8 * X, y).separable == a == certify_separable(1e-8 * X, -y).separable
    )  # units and signs do not matter


def test_wrong_certificates_are_not_proven():
    X, y = np.array([[0.0, 0], [1, 1], [0, 1], [1, 0]]), np.array([1, 1, -1, -1])
    c = certify_separable(X, y, bias=True)
    assert not c.separable and is_proof(X, y, c, bias=True)
    assert not is_proof(X, y, c._replace(separable=True, w=np.array([1.0, 2, 3])), bias=True)
    assert not is_proof(X, y, c._replace(alpha=np.array([0.5, 0.5, 0, 0])), bias=True)
    assert not is_proof(X[:3], y[:3], c._replace(alpha=np.ones(3) / 3), bias=True)


def test_the_origin_is_never_separated():
    c = certify_separable(np.array([[1.0, 2], [0, 0]]), [1, 1])
    assert not c.separable and c.alpha.tolist() == [0, 1]
    assert certify_separable(np.array([[1.0, 2], [0, 0]]), [1, 1], bias=True).separable


def test_too_close_to_tell():
    "Two points that are nearly opposite: a vector that separates by 1e-13 is no proof in double precision"
    with pytest.raises(ReinitError, match='neither answer is certain'):
        _certify(np.array([[1.0, 0], [-1, 1e-13]]), np.array([0.0, 1]), np.array([0.9, 0.1]), 1e-9)


@pytest.mark.parametrize(
    'X,y,said',
    [
        (np.zeros((0, 2)), [], 'N and d at least 1'),
        (np.zeros((2, 0)), [1, 1], 'N and d at least 1'),
        (np.ones(3), [1] * 3, 'a row per point'),
        (np.ones((2, 2)), [0, 1], '-1 or 1'),
        (np.ones((2, 2)), [1], '2 labels'),
        (np.full((2, 2), np.inf), [1, 1], 'not finite'),
    ],
)
def test_separable_refuses(X, y, said):
    with pytest.raises(ReinitError, match=said):
        certify_separable(X, y)


def test_unknown_method():
    with pytest.raises(ReinitError, match="did you mean 'nnls'"):
        certify_separable(np.ones((2, 2)), [1, 1], method='nnl')


# ---------------------------------------------------------------- measurements


def test_lift():
    X = np.random.default_rng(0).normal(size=(3, 7, 4))
    h = random_relu_features(X, (5, 6), Streams(0).init)
    assert h.shape == (3, 7, 6) and (h >= 0).all() and (h > 0).any()
    assert np.array_equal(random_relu_features(X, (), Streams(0).init), X)
    gen = Streams(1).init
    V = torch.randn(3, 4, 5, generator=Streams(1).init, dtype=torch.float64).numpy() * math.sqrt(2 / 4)
    assert np.allclose(random_relu_features(X, (5,), gen), np.maximum(0, X @ V))


def test_measurements_follow_the_curve():
    df = measure_cover(4, N=[3, 4, 6, 8, 11], trials=600, seed=3)
    assert (df.share[:2] == 1).all() and cover_agreement(df).p[0] > 1e-3
    assert np.allclose(df.P, [cover_probability(N, 4) for N in df.N])
    df = measure_cover(3, N=8, trials=600, bias=True, seed=4)
    assert df['rank'][0] == 4 and abs(df.share[0] - 0.5) < 0.1 and df.P[0] == pytest.approx(0.5)


def test_intervals_are_exact():
    df = measure_cover(4, N=[3, 6, 30], trials=50)
    for k, lo, hi in zip(df.separable, df.lo, df.hi):
        assert lo == pytest.approx(beta.ppf(0.025, k, 51 - k) if k else 0, abs=1e-9)
        assert hi == pytest.approx(beta.ppf(0.975, k + 1, 50 - k) if k < 50 else 1, abs=1e-9)


def test_a_wrong_curve_is_noticed():
    df = measure_cover(4, N=[6, 8, 11], trials=600, seed=3)
    wrong = df.assign(P=[cover_probability(N, 5) for N in df.N])
    assert cover_agreement(wrong).p[0] < 1e-6 and cover_agreement(wrong).inside[0] < 0.5


def test_a_wide_layer_raises_the_rank():
    df = measure_cover(4, N=[4, 16], widths=(16,), trials=200)
    assert df['rank'][1] > 12 and df.share[1] > 0.5 > cover_probability(16, 4)
    assert df.layers.unique() == ['4→16']
    flat = measure_cover(1, N=[3, 6], widths=(16,), trials=200)  # a line has two directions, whatever the width
    assert (flat['rank'] <= 2).all() and (flat.share <= flat.P + 0.1).all()


def test_measurements_repeat_and_touch_nothing():
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b = (measure_cover(3, N=[5, 6], trials=20, widths=(4,)) for _ in range(2))
    assert a.equals(b)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert measure_cover(3, N=[6], trials=20, widths=(4,)).equals(a[1:].reset_index(drop=True))  # each number by itself


def test_plot():
    df = measure_cover(3, trials=10)
    for relative in (True, False):
        ax = plot_cover(df, relative=relative)
        assert len(ax.containers) == 1 and ax.get_ylim()[1] > 1


@pytest.mark.parametrize(
    'kw,said',
    [
        (dict(d=0), 'd=0'),
        (dict(N=0), 'N=0'),
        (dict(N=[2, -1]), 'N=-1'),
        (dict(widths=(0,)), 'widths=0'),
        (dict(trials=0), 'trials=0'),
        (dict(level=1.5), 'level=1.5'),
        (dict(seed=-1), 'seed=-1'),
    ],
)
def test_measure_refuses(kw, said):
    with pytest.raises(ReinitError, match=said):
        measure_cover(**(dict(d=2, N=3, trials=2) | kw))

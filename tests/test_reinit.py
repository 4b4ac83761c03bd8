"Eq. 1, masks, rescaling and normalization: properties that hold for every input"
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reinit_nb.core import ReinitError, Streams
from reinit_nb.fixed_norm import FixedNorm
from reinit_nb.init import INITS, draw_weights, fans
from reinit_nb.reinit import (
    PAPER_METHODS,
    SCOPES,
    layerwise_weights,
    lw_schedule,
    mask_channels,
    mask_lowest,
    masks_lowest,
    method_masks,
    n_redrawn,
    norm_of,
    output_stats,
    redraw,
    reinit,
    rescale,
)

settings.register_profile('here', deadline=None, max_examples=60)
settings.load_profile('here')
seeds, fracs = st.integers(0, 2**32), st.floats(0, 1)
shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)
fraction_methods = st.sampled_from(['WELSR', 'DSD', 'WELS'])

def weights(shapes, seed, lead=()):
    return [torch.randn(*lead, *s, generator=Streams(seed).fork(i).noise) for i, s in enumerate(shapes)]

@given(shapes, seeds, fracs)
def test_eq1_moves_exactly_the_mask(shape, seed, frac):
    w, eta = (torch.randn(shape, generator=Streams(seed)[k]) for k in ('noise', 'reinit'))
    s = torch.rand(shape, generator=Streams(seed).mask) < frac
    new = reinit(w, s, eta)
    assert torch.equal(new[~s], w[~s]) and torch.equal(new[s], eta[s])

def test_eq1_keeps_what_is_off_the_mask_next_to_infinity():
    w = torch.tensor([1., -0., float('nan')])
    new = reinit(w, torch.tensor([False, False, True]), torch.tensor([float('inf'), float('nan'), 2.]))
    assert new.tolist() == [1., 0., 2.] and math.copysign(1, new[1]) == -1

some_shapes = st.lists(shapes, min_size=1, max_size=3)

@given(fraction_methods, some_shapes, seeds, fracs, st.sampled_from(SCOPES), st.integers(0, 3))
def test_exact_count_and_everything_else_bit_identical(method, shapes, seed, frac, scope, models):
    "models=0: a single network; otherwise a stack of so many"
    streams = [Streams(seed + i) for i in range(models)] or Streams(seed)
    ws = weights(shapes, seed, (models,) if models else ())
    masks = method_masks(method, ws, streams, frac, scope)
    new = redraw(ws, masks, streams)
    sizes = [math.prod(s) for s in shapes]
    for m in range(models or 1):
        member = [(w[m], s[m], n[m]) if models else (w, s, n) for w, s, n in zip(ws, masks, new)]
        counts = [s.sum().item() for _, s, _ in member]
        if scope == 'tensor': assert counts == [n_redrawn(frac, n) for n in sizes]
        else: assert sum(counts) == n_redrawn(frac, sum(sizes))
        for w, s, n in member: assert torch.equal(n[~s], w[~s])

@given(fraction_methods, seeds, st.floats(1e-3, 1e3), fracs)
def test_masks_do_not_depend_on_the_scale_of_the_weights(method, seed, c, frac):
    ws = weights([(6, 7), (3, 6)], seed)
    for scope in ('tensor', 'global'):
        factor = 2.**round(math.log2(c))   # a power of two changes no order
        a, b = (method_masks(method, [w * f for w in ws], Streams(seed), frac, scope) for f in (1., factor))
        assert all(map(torch.equal, a, b))

@given(seeds, st.integers(1, 5))
def test_dsd_takes_the_smallest(seed, models):
    w, = weights([(8, 9)], seed, (models,))
    s, = method_masks('DSD', [w], [Streams(i) for i in range(models)], .3)
    for wi, si in zip(w.abs(), s): assert wi[si].max() <= wi[~si].min()

@given(seeds)
def test_wels_is_fixed_and_welsr_is_fresh(seed):
    ws, s = weights([(20, 20)], seed), Streams(seed)
    fixed = [method_masks('WELS', ws, s)[0] for _ in range(3)]
    fresh = [method_masks('WELSR', ws, s)[0] for _ in range(3)]
    assert torch.equal(fixed[0], fixed[1]) and torch.equal(fixed[0], fixed[2])
    assert not torch.equal(fresh[0], fresh[1]) and not torch.equal(fresh[1], fresh[2])

@pytest.mark.parametrize('init', INITS)
def test_redrawn_entries_follow_the_initializer(init):
    "Kolmogorov–Smirnov, on what the mask covers: the old weights are far away from it"
    w = torch.full((200, 300), 9.)
    s = Streams(7)
    masks = method_masks('WELSR', [w], s, .5)
    new = redraw([w], masks, s, init)[0][masks[0]].double().numpy()
    fan_in, fan_out = fans(w.shape)
    var = 2 / (fan_in + fan_out) if 'glorot' in init else 2 / fan_in
    dist = stats.uniform(-(3 * var)**.5, 2 * (3 * var)**.5) if 'uniform' in init else stats.norm(0, var**.5)
    assert stats.kstest(new, dist.cdf).pvalue > .001
    assert stats.kstest(new * 1.1, dist.cdf).pvalue < .001   # the test would notice ten percent

@given(shapes, seeds, st.floats(.01, 100), st.integers(1, 4))
def test_rescaled_norms_and_directions(shape, seed, norm, models):
    w, = weights([shape], seed, (models,))
    want = norm * torch.arange(1, models + 1)
    new = rescale(w, want, lead=1)
    assert torch.allclose(norm_of(new, 1), want, rtol=1e-4)
    assert torch.allclose(torch.cosine_similarity(new.flatten(1), w.flatten(1)), torch.ones(models), atol=1e-4)
    assert torch.equal(rescale(w, norm_of(w, 1), lead=1), w)

@given(seeds, st.floats(-5, 5), st.floats(.1, 10))
def test_normalized_output_has_mean_zero_and_deviation_one(seed, mu, sigma):
    z = mu + sigma * torch.randn(4, 64, 16, generator=Streams(seed).noise, dtype=torch.float64)
    m, s = output_stats(z, lead=1)
    for zi, mi, si in zip(z, m, s):
        out = FixedNorm(mi, si)(zi)
        assert abs(out.mean()) < 1e-8 and abs(out.std(correction=0) - 1) < 1e-8

@pytest.mark.parametrize('method', PAPER_METHODS)
def test_global_generators_are_untouched(method):
    ws = weights([(6, 7), (3, 6)], 0)
    before = torch.get_rng_state()
    redraw(ws, method_masks(method, ws, Streams(0)), Streams(0))
    assert torch.equal(before, torch.get_rng_state())

@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1))
def test_kels_keeps_a_corner(out, inp, keep):
    s = mask_channels(torch.zeros(out, inp, 3, 3), keep)
    assert (~s).sum() == math.ceil(keep * out) * math.ceil(keep * inp) * 9
    assert not s[:math.ceil(keep * out), :math.ceil(keep * inp)].any()

@given(st.integers(1, 6), st.integers(1, 6))
def test_schedule(K, N):
    ks = lw_schedule(K, N)
    assert len(ks) == K * N and list(ks) == sorted(ks) and all(ks.count(k) == N for k in range(1, K + 1))

@given(seeds, st.integers(0, 3), st.integers(1, 4))
def test_layerwise_weights_of_a_stack_are_those_of_its_members(seed, k, models):
    ws = weights([(5, 4), (6, 5), (3, 6)], seed, (models,))
    norms = [norm_of(w, 1) * 2 for w in ws]
    fresh = weights([(5, 4), (6, 5), (3, 6)][k:], seed + 1, (models,))
    new = layerwise_weights(ws, k, norms, fresh, lead=1)
    for m in range(models):
        one = layerwise_weights([w[m] for w in ws], k, [s[m] for s in norms], [w[m] for w in fresh])
        for a, b in zip(new, one, strict=True): assert torch.allclose(a[m], b, rtol=1e-6)
    for a, s in zip(new[:k], norms): assert torch.allclose(norm_of(a, 1), s, rtol=1e-4)
    for a, b in zip(new[k:], fresh, strict=True): assert torch.equal(a, b)

def test_layerwise_weights_leave_alone_what_has_no_norm():
    zero, w = torch.zeros(2, 3), torch.ones(2, 3)
    assert torch.equal(layerwise_weights([zero], 1, [1.])[0], zero)   # has become zero
    assert torch.equal(layerwise_weights([w], 1, [0.])[0], w)   # was zero at first
    assert layerwise_weights([w], 1)[0] is w and layerwise_weights([w], 0)[0] is w

NAN = float('nan')

@pytest.mark.parametrize('call, word', [
    (lambda: mask_lowest(torch.zeros(4), -.1), 'frac'),
    (lambda: mask_lowest(torch.zeros(4), NAN), 'frac'),
    (lambda: masks_lowest([torch.zeros(4)], .2, scope='layer'), 'scope'),
    (lambda: draw_weights((3,), gen=Streams(0).init), 'two dimensions'),
    (lambda: draw_weights((3, 3), 'hee', Streams(0).init), 'he'),
    (lambda: method_masks('XY', [], Streams(0)), 'Known: BL'),
    (lambda: method_masks('LW', [torch.zeros(2, 2)], Streams(0), k=2), 'k=2'),
    (lambda: layerwise_weights([torch.zeros(2, 2)], 2), 'k=2'),
    (lambda: lw_schedule(0), 'K=0'),
    (lambda: rescale(torch.full((2, 2), NAN), 1.), 'nan'),
    (lambda: output_stats(torch.full((2, 2), 3.)), 'dead')])
def test_wrong_input_is_named(call, word):
    with pytest.raises(ReinitError, match=word): call()

"The study of mutually frozen weights: recipes, preparation, what is measured, tables, and published results"
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hyp
from hypothesis import strategies as st
from torch import nn

from reinit_nb.core import ReinitError, flatten_recipe
from reinit_nb.frozen import MutuallyFrozenCallback, frozen_totals, mutually_frozen
from reinit_nb.models import model
from reinit_nb.path import Learn, lr_at, run_recipe, train_path
from reinit_nb.stability import batch_statistics
from reinit_nb.studies.frozen_weights import (
    FREEZING_DECAYS,
    PairRun,
    PairsCallback,
    SparseRun,
    count_by_rule,
    exposure,
    freezing_epoch,
    freezing_points,
    freezing_runs,
    layer_chains,
    match_sparsity,
    pair_couplings,
    pair_fates,
    pair_runs,
    pair_table,
    sparse_runs,
    treat_filters,
)

ROOT = Path(__file__).parent.parent
X = (2, 3, 16, 16)
def net(width=1 / 8, **kw): return model('allcnn', n_out=10, width=width, size=16, **kw)

# ---------------------------------------------------------------- recipes

@pytest.mark.parametrize('make, settings, seeds', [
    (freezing_runs, 2 * 7, range(3)), (pair_runs, 7, range(3)), (sparse_runs, 13, range(100, 112))])
def test_lists_are_complete_and_without_repeats(make, settings, seeds):
    runs = make('laptop')
    assert len(runs) == len(set(runs)) == settings * len(seeds)
    assert {r.seed for r in runs} == set(seeds)
    compute = {(r.learn.epochs, r.learn.batch, r.learn.lr, r.learn.decay, r.task) for r in runs}
    assert len(compute) == 1   # compute-matched

def test_paper_scale_is_section_6_5():
    for r in (*freezing_runs('paper'), *pair_runs('paper')):
        assert (r.learn.lr, r.learn.decay, r.learn.momentum, r.learn.opt) == (.05, .97, .9, 'sgd')
        assert (r.width, r.task.dataset, r.task.valid) == (1., 'cifar10', .1)
        assert r.learn.wd in FREEZING_DECAYS == (0, 1e-4, 5e-4, 1e-3, 5e-3)
        assert not r.task.flip and r.task.shift == 0
        assert r.task.size is None and r.task.n_train is None
    assert {r.model for r in freezing_runs('paper')} == {'resnet18', 'allcnn'}
    for r in sparse_runs('paper'):
        assert (r.model, r.learn.lr, r.learn.decay, r.learn.wd) == ('allcnn', .05, .97, 1e-3)
        assert (r.task.shift, r.task.flip) == (.5, True)
    assert {r.q for r in sparse_runs('paper') if r.kind != 'none'} == {.2, .4, .6, .8}

@pytest.mark.parametrize('kw, words', [
    (dict(cutoff=0.), 'cutoff=0'), (dict(cutoff=math.nan), 'cutoff'), (dict(every=0), 'every=0'),
    (dict(q=-.1), 'q=-0.1'), (dict(q=2.), 'q=2'), (dict(kind='twice'), "'twice'"),
    (dict(kind='mutual', q=.2, prob=.5), 'prob=0.5 is for double and mono, not for mutual'),
    (dict(kind='double', q=.2, prob=2.), 'prob=2')])
def test_wrong_sparse_runs_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): SparseRun('allcnn', **kw)

@pytest.mark.parametrize('kw, words', [
    (dict(std=0.), 'std=0'), (dict(std=math.inf), 'std'), (dict(images=1), 'images=1')])
def test_wrong_pair_runs_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): PairRun('allcnn', **kw)

# ---------------------------------------------------------------- exposure

@given(st.floats(1e-4, .1), st.floats(.9, 1.), st.floats(0, .02), st.integers(1, 30), st.integers(1, 12))
@hyp(max_examples=40, deadline=None)
def test_exposure_is_the_sum_over_steps(lr, decay, wd, steps, epochs):
    exposures = exposure(Learn(lr=lr, decay=decay, wd=wd, epochs=epochs), steps)
    by_hand = sum(lr * decay**((i + .5) / steps) * wd / .1 for i in range(steps * epochs))
    assert len(exposures) == epochs + 1
    assert exposures[0] == 0
    assert np.all(np.diff(exposures) >= 0)
    assert exposures[-1] == pytest.approx(by_hand, rel=1e-9)

def test_exposure_is_what_torchs_sgd_does_to_a_weight_without_gradient():
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = torch.optim.SGD([p], lr=.05, momentum=.9, weight_decay=.002)
    for _ in range(5000):
        p.grad = torch.zeros_like(p)
        opt.step()
    expected = exposure(Learn(lr=.05, wd=.002, epochs=1), 5000)[-1]
    assert -math.log(p[0].item()) == pytest.approx(expected, rel=.02)

# ---------------------------------------------------------------- pairs

def test_chains_of_networks():
    chains = layer_chains(net(), X)
    assert len(chains) == 8
    assert chains[0] == ('block1.conv', 'block1.norm', 'block2.conv')
    assert chains[-1][2] == 'head.classifier'
    inner = layer_chains(model('resnet18', n_out=10, width=1 / 16, size=16), X)
    assert inner
    assert all('conv1' in a and 'conv2' in b for a, _, b in inner)   # what is added to the stream has several readers

def test_treatments_touch_what_they_should():
    before, after = net(seed=0), net(seed=0)
    chains = layer_chains(after, X)
    treat_filters(after, chains, 1e-4, seed=3)
    for layer, norm, reader in chains:
        rows, columns, gamma = (after.get_submodule(k).weight.detach() for k in (layer, reader, norm))
        assert (rows[1] == 0).all() and (columns[:, 1] == 0).all()
        assert 0 < rows[2].norm() < .01 and 0 < columns[:, 2].norm() < .01
        assert gamma[2] == 1 and gamma[3] == pytest.approx(1e-4)
    assert torch.equal(before.block1.conv.weight[4:], after.block1.conv.weight[4:])
    assert torch.equal(before.block2.conv.weight[4:, 4:], after.block2.conv.weight[4:, 4:])

def test_the_coupling_grows_with_what_normalization_divides_by():
    "σ ∝ 1/√ε: the normalization of a tiny row multiplies its signal by 1/√ε"
    m = net(1 / 16, seed=1)
    chains = layer_chains(m, X)[:1]
    treat_filters(m, chains, 1e-6, seed=0)
    g = torch.Generator().manual_seed(0)
    data = torch.randn(24, 3, 16, 16, generator=g), torch.randint(10, (24,), generator=g)
    sigma = {}
    for eps in (1e-5, 1e-3):
        m.block1.norm.eps = eps
        sigma[eps] = pair_couplings(m, chains, data, steps=10)['sigma_1']
    assert sigma[1e-5] / sigma[1e-3] == pytest.approx(10, rel=.05)

def test_batch_statistics_are_those_of_training_and_leave_nothing_behind():
    m = net(1 / 16)
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    state = {k: v.clone() for k, v in m.state_dict().items()}
    with batch_statistics(m.eval()): y = m(x)
    assert list(m.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
    assert torch.allclose(y, m.train()(x), atol=1e-5)
    with pytest.raises(ZeroDivisionError):
        with batch_statistics(m): raise ZeroDivisionError
    assert all(b.running_mean is not None for b in m.modules() if isinstance(b, nn.BatchNorm2d))

def test_zeroed_pairs_stay_exactly_zero_in_training():
    run = pair_runs('smoke', 1)[0]
    t = pair_table(pd.DataFrame([flatten_recipe(run) | row for row in run_recipe(run)]))
    assert t[t.treatment == 'zero'].norm.max() == 0
    assert t[t.treatment == 'alone'].norm.min() > .1
    fates = pair_fates(t)
    assert set(fates.treatment) == {'tiny', 'tiny3'}
    assert (fates.norm < .01).all()
    assert len(fates) == 16
    two = fates[fates.treatment == 'tiny']
    assert two.predicted.all() and two.grew.all()     # σ is far above λ

def test_fates_by_hand():
    nan = np.nan
    treated = dict(tiny=((.001, .5, .6), (.2, .2, nan)), tiny3=((.001, .0005, .0001), (.01, .3, nan)),
                   zero=((0., 0., 0.), (nan, nan, nan)))
    t = pd.DataFrame([dict(wd=.1, seed=0, epoch=e, layer=1, treatment=k, norm=n, sigma=s)
                      for k, (norms, sigmas) in treated.items() for e, n, s in zip((0, 2, 4), norms, sigmas)])
    fates = pair_fates(t).set_index(['treatment', 'start'])
    assert list(fates.index) == [('tiny', 0), ('tiny3', 0), ('tiny3', 2)]    # at epoch 2 the first is not near zero
    assert fates.predicted.tolist() == [True, False, True]
    assert fates.grew.tolist() == [True, False, False]
    slow = t.assign(norm=.001 + 1e-5 * t.epoch)
    assert not pair_fates(slow).grew.any()     # less than a tenth is no growth

# ---------------------------------------------------------------- sparsity

@pytest.mark.parametrize('q', [.2, .6])
@pytest.mark.parametrize('seed', [0, 1])
def test_three_kinds_are_equally_sparse(q, seed):
    found = {k: match_sparsity(net(seed=seed), k, q, seed, X) for k in ('mutual', 'double', 'mono')}
    assert max(found.values()) - min(found.values()) < .02
    assert abs(found['mutual'] - (1 - (1 - q)**2)) < .2

def test_only_mutual_sparsity_freezes_filters():
    found = {}
    for kind in ('mutual', 'double', 'mono'):
        m = net(seed=2)
        match_sparsity(m, kind, .4, 2, X)
        found[kind] = int(frozen_totals(mutually_frozen(m, X)).frozen[0])
    assert found['mutual'] > 20
    assert found['double'] == found['mono'] == 0

# ---------------------------------------------------------------- runs

def test_counts_are_those_of_the_network_at_the_end():
    run = freezing_runs('smoke', 1)[-1]
    run = run.replace(learn=run.learn.replace(wd=.5, epochs=3), every=1)    # enough to freeze some
    rows = run_recipe(run)
    assert [row['epoch'] for row in rows] == [0, 1, 2, 3]
    assert rows[0]['frozen'] == 0
    assert 'test_acc' in rows[-1] and 'test_acc' not in rows[0]
    exposures = exposure(run.learn, rows[-1]['steps'] // 3)
    assert [row['exposure'] for row in rows] == pytest.approx(list(exposures))

@pytest.mark.parametrize('make, callback, name', [
    (freezing_runs, MutuallyFrozenCallback, 'count'), (pair_runs, PairsCallback, 'measure')])
def test_an_interrupted_run_ends_as_if_nothing_had_happened(make, callback, name, tmp_path, monkeypatch):
    run = make('smoke', 1)[-1]
    run = run.replace(learn=run.learn.replace(epochs=3), every=1)
    whole = train_path(run).records
    plain = getattr(callback, name)
    def breaks(self, epoch):
        if epoch == 2: raise KeyboardInterrupt
        return plain(self, epoch)
    monkeypatch.setattr(callback, name, breaks)
    with pytest.raises(KeyboardInterrupt): train_path(run, tmp_path)
    assert (tmp_path / f'{run.hash}.pth').exists()
    monkeypatch.undo()
    again = train_path(run, tmp_path).records
    pd.testing.assert_frame_equal(pd.DataFrame(again), pd.DataFrame(whole), check_exact=True)

def test_divergence_is_reported():
    run = sparse_runs('smoke', 1)[0]
    wild = run.learn.replace(lr=1e12, batch=64)
    with pytest.raises(ReinitError, match='diverged'): run_recipe(run.replace(learn=wild))

def test_counts_of_a_network_with_a_known_pair():
    m = net(1 / 16)
    with torch.no_grad():
        m.block4.conv.weight[2] = 0
        m.block4.conv.bias[2] = 0
        m.block5.conv.weight[:, 2] = 0
    t = count_by_rule(m, (1e-2,), X).set_index('rule')
    assert t.frozen.to_dict() == {'normalization and columns': 0, 'rows and columns': 1,
                                  'pairs of consecutive layers': 1}
    weights = m.block4.conv.weight[2].numel() + m.block5.conv.weight[:, 2].numel()
    assert t.double['rows and columns'] == t.double['pairs of consecutive layers'] == weights + 1     # and a bias

def test_freezing_epoch_against_a_simulated_decay():
    "The predicted epoch is that at which SGD with nothing but weight decay crosses the cutoff"
    how = Learn(lr=.05, decay=.97, wd=0., momentum=.9, epochs=30)
    steps, decays = 900, (.001, .002)   # small steps, as the prediction assumes
    for wd, predicted in zip(decays, freezing_epoch(how, steps, decays)):
        w, v = torch.ones(()), torch.zeros(())
        for t in range(steps * how.epochs):
            v = how.momentum * v + wd * w
            w = w - lr_at(how, (t + .5) / steps / how.epochs) * v
            if w < .01: break
        assert abs((t + 1) / steps - predicted) < .1                # epochs; momentum takes some steps to build up
    assert freezing_epoch(how, steps, [0., 1e-4]).tolist() == [np.inf] * 2
    assert freezing_epoch(how, steps, [.01], cutoff=1.)[0] == 0

def test_first_frozen_filters_by_hand():
    df = pd.DataFrame(dict(model='allcnn', wd=.02, seed=0, epoch=[0, 2, 4, 6], frozen=[0, 0, 3, 5],
                           exposure=[0., 2., 4., 6.]))
    found = freezing_points(pd.concat([df, df.assign(wd=.001, frozen=0)]))
    assert len(found) == 1 and found.iloc[0][['before', 'epoch']].tolist() == [2, 4]
    assert np.isclose(found.predicted[0], np.log(100))

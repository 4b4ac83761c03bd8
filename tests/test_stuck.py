"The study of mutually frozen weights: recipes, preparation, what is watched, tables, and what is published"
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

from reinit_nb import claims, stuck
from reinit_nb.core import ReinitError, flat, load_results
from reinit_nb.frozen import MutuallyFrozenCallback
from reinit_nb.models import model
from reinit_nb.path import Learn
from reinit_nb.stability import batch_statistics

ROOT = Path(__file__).parent.parent
def net(width=1 / 8, **kw): return model('allcnn', n_out=10, width=width, size=16, **kw)
X = (2, 3, 16, 16)

# ---------------------------------------------------------------- recipes

@pytest.mark.parametrize('make, n', [(stuck.decays, 2 * 7 * 3), (stuck.pairs, 7 * 3), (stuck.sparse, 13 * 3)])
def test_lists_are_complete_and_without_repeats(make, n):
    runs = make('laptop')
    assert len(runs) == len(set(runs)) == n and {r.seed for r in runs} == {0, 1, 2}
    assert len({(r.learn.epochs, r.learn.batch, r.learn.lr, r.learn.decay, r.task) for r in runs}) == 1   # compute-matched

def test_paper_scale_is_section_6_5():
    for r in (*stuck.decays('paper'), *stuck.pairs('paper')):
        assert (r.learn.lr, r.learn.decay, r.learn.momentum, r.learn.opt, r.width, r.task.dataset, r.task.valid) == (.05, .97, .9, 'sgd', 1., 'cifar10', .1)
        assert r.learn.wd in (0, 1e-4, 5e-4, 1e-3, 5e-3) and not r.task.flip and r.task.shift == 0 and r.task.size is None and r.task.n_train is None
    assert {r.model for r in stuck.decays('paper')} == {'resnet18', 'allcnn'}
    for r in stuck.sparse('paper'): assert (r.model, r.learn.lr, r.learn.decay, r.learn.wd, r.task.shift, r.task.flip) == ('allcnn', .05, .97, 1e-3, .5, True)
    assert {r.q for r in stuck.sparse('paper') if r.kind != 'none'} == {.2, .4, .6, .8}

@pytest.mark.parametrize('kw, words', [(dict(cutoff=0.), 'cutoff=0'), (dict(cutoff=math.nan), 'cutoff'), (dict(every=0), 'every=0'), (dict(q=-.1), 'q=-0.1'), (dict(q=2.), 'q=2'), (dict(kind='twice'), "'twice'")])
def test_wrong_recipes_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): stuck.SparseRun('allcnn', **kw)

@pytest.mark.parametrize('kw, words', [(dict(std=0.), 'std=0'), (dict(std=math.inf), 'std'), (dict(images=1), 'images=1')])
def test_wrong_pair_runs_are_refused(kw, words):
    with pytest.raises(ReinitError, match=words): stuck.PairRun('allcnn', **kw)

# ---------------------------------------------------------------- exposure

@given(st.floats(1e-4, .1), st.floats(.9, 1.), st.floats(0, .02), st.integers(1, 30), st.integers(1, 12))
@hyp(max_examples=40, deadline=None)
def test_exposure_is_the_sum_over_steps(lr, decay, wd, steps, epochs):
    how = Learn(lr=lr, decay=decay, wd=wd, epochs=epochs)
    E = stuck.exposure(how, steps)
    by_hand = sum(lr * decay**((i + .5) / steps) * wd / .1 for i in range(steps * epochs))
    assert len(E) == epochs + 1 and E[0] == 0 and np.all(np.diff(E) >= 0) and E[-1] == pytest.approx(by_hand, rel=1e-9)

def test_exposure_is_what_torchs_sgd_does_to_a_weight_without_gradient():
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = torch.optim.SGD([p], lr=.05, momentum=.9, weight_decay=.002)
    for _ in range(5000): p.grad = torch.zeros_like(p); opt.step()
    E = stuck.exposure(Learn(lr=.05, wd=.002, epochs=1), 5000)[-1]
    assert -math.log(p[0].item()) == pytest.approx(E, rel=.02)

# ---------------------------------------------------------------- pairs

def test_chains_of_networks():
    links = stuck.chains(net(), X)
    assert len(links) == 8 and links[0] == ('block1.conv', 'block1.norm', 'block2.conv') and links[-1][2] == 'head.classifier'
    inner = stuck.chains(model('resnet18', n_out=10, width=1 / 16, size=16), X)
    assert inner and all('conv1' in a and 'conv2' in b for a, _, b in inner)   # what is added to the stream has several readers

def test_treatments_touch_what_they_should():
    a, b = net(seed=0), net(seed=0)
    links = stuck.chains(b, X)
    stuck.treat(b, links, 1e-4, seed=3)
    for x, n, y in links:
        w0, w1, c0, c1, g = (m.get_submodule(k).weight.detach() for m, k in ((a, x), (b, x), (a, y), (b, y), (b, n)))
        assert (w1[1] == 0).all() and (c1[:, 1] == 0).all()
        assert 0 < w1[2].norm() < .01 and 0 < c1[:, 2].norm() < .01 and g[2] == 1 and g[3] == pytest.approx(1e-4)
    assert torch.equal(a.block1.conv.weight[4:], b.block1.conv.weight[4:])
    assert torch.equal(a.block2.conv.weight[4:, 4:], b.block2.conv.weight[4:, 4:])

def test_the_coupling_grows_with_what_normalization_divides_by():
    "σ ∝ 1/√ε: the normalization of a tiny row multiplies its signal by 1/√ε"
    m = net(1 / 16, seed=1)
    links = stuck.chains(m, X)[:1]
    stuck.treat(m, links, 1e-6, seed=0)
    g = torch.Generator().manual_seed(0)
    data = torch.randn(24, 3, 16, 16, generator=g), torch.randint(10, (24,), generator=g)
    got = {}
    for eps in (1e-5, 1e-3):
        m.block1.norm.eps = eps
        got[eps] = stuck.couplings(m, links, data, steps=10)['sigma_1']
    assert got[1e-5] / got[1e-3] == pytest.approx(10, rel=.05)

def test_batch_statistics_are_those_of_training_and_leave_nothing_behind():
    m = net(1 / 16)
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    state = {k: v.clone() for k, v in m.state_dict().items()}
    with batch_statistics(m.eval()): y = m(x)
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items()) and list(m.state_dict()) == list(state)
    assert torch.allclose(y, m.train()(x), atol=1e-5)
    with pytest.raises(ZeroDivisionError):
        with batch_statistics(m): 1 / 0
    assert all(b.running_mean is not None for b in m.modules() if isinstance(b, nn.BatchNorm2d))

def test_zeroed_pairs_stay_exactly_zero_in_training():
    r = stuck.pairs('smoke', 1)[0]
    t = stuck.pair_table(pd.DataFrame([flat(r) | o for o in stuck.run_one(r)]))
    assert t[t.treatment == 'zero'].norm.max() == 0 and t[t.treatment == 'alone'].norm.min() > .1
    f = stuck.fates(t)
    assert set(f.treatment) == {'tiny', 'tiny3'} and (f.norm < .01).all() and len(f) == 16
    two = f[f.treatment == 'tiny']
    assert two.predicted.all() and two.grew.all()     # σ is far above λ

def test_fates_by_hand():
    rows = [dict(wd=.1, seed=0, epoch=e, layer=1, treatment=k, norm=n, sigma=s) for k, ns, ss in (('tiny', (.001, .5, .6), (.2, .2, np.nan)), ('tiny3', (.001, .0005, .0001), (.01, .3, np.nan)), ('zero', (0., 0., 0.), (np.nan,) * 3)) for e, n, s in zip((0, 2, 4), ns, ss)]
    f = stuck.fates(pd.DataFrame(rows)).set_index(['treatment', 'start'])
    assert list(f.index) == [('tiny', 0), ('tiny3', 0), ('tiny3', 2)]                # at epoch 2 the first is no longer near zero
    assert f.predicted.tolist() == [True, False, True] and f.grew.tolist() == [True, False, False]
    assert not stuck.fates(pd.DataFrame(rows).assign(norm=lambda o: .001 + 1e-5 * o.epoch)).grew.any()     # less than a tenth is no growth

# ---------------------------------------------------------------- sparsity

@pytest.mark.parametrize('q', [.2, .6])
@pytest.mark.parametrize('seed', [0, 1])
def test_three_kinds_are_equally_sparse(q, seed):
    got = {k: stuck.match_sparsity(net(seed=seed), k, q, seed, X) for k in ('mutual', 'double', 'mono')}
    assert max(got.values()) - min(got.values()) < .02 and abs(got['mutual'] - (1 - (1 - q)**2)) < .2

def test_only_mutual_sparsity_freezes_filters():
    from reinit_nb.frozen import frozen_totals, mutually_frozen
    found = {}
    for k in ('mutual', 'double', 'mono'):
        m = net(seed=2)
        stuck.match_sparsity(m, k, .4, 2, X)
        found[k] = int(frozen_totals(mutually_frozen(m, X)).frozen[0])
    assert found['mutual'] > 20 and found['double'] == found['mono'] == 0

# ---------------------------------------------------------------- runs

def test_counts_are_those_of_the_network_at_the_end():
    r = stuck.decays('smoke', 1)[-1]
    r = r.replace(learn=r.learn.replace(wd=.5, epochs=3), every=1)    # enough to freeze some
    rows = stuck.run_one(r)
    assert [o['epoch'] for o in rows] == [0, 1, 2, 3] and rows[0]['frozen'] == 0 and 'test_acc' in rows[-1] and 'test_acc' not in rows[0]
    E = stuck.exposure(r.learn, rows[-1]['steps'] // 3)
    assert [o['exposure'] for o in rows] == pytest.approx(list(E))

@pytest.mark.parametrize('make', [stuck.decays, stuck.pairs])
def test_an_interrupted_run_ends_as_if_nothing_had_happened(make, tmp_path, monkeypatch):
    r = make('smoke', 1)[-1]
    r = r.replace(learn=r.learn.replace(epochs=3), every=1)
    whole, cls = stuck.run_one(r), MutuallyFrozenCallback if make is stuck.decays else stuck.PairsCallback
    note = cls.note
    def breaks(self, epoch):
        if epoch == 2: raise KeyboardInterrupt
        return note(self, epoch)
    monkeypatch.setattr(cls, 'note', breaks)
    with pytest.raises(KeyboardInterrupt): stuck.run_one(r, tmp_path / 'a.pth')
    assert (tmp_path / 'a.pth').exists()
    monkeypatch.setattr(cls, 'note', note)
    again = stuck.run_one(r, tmp_path / 'a.pth')
    pd.testing.assert_frame_equal(pd.DataFrame(again), pd.DataFrame(whole), check_exact=True)

def test_divergence_is_said():
    r = stuck.sparse('smoke', 1)[0]
    with pytest.raises(ReinitError, match='diverged'): stuck.run_one(r.replace(learn=r.learn.replace(lr=1e12, batch=64)))

def test_two_counts_of_a_network_with_a_known_pair():
    m = net(1 / 16)
    with torch.no_grad(): m.block4.conv.weight[2] = 0; m.block4.conv.bias[2] = 0; m.block5.conv.weight[:, 2] = 0
    t = stuck.count_both(m, (1e-2,), X).set_index('rule')
    assert t.frozen['rows and columns'] == 1 and t.frozen['normalization and columns'] == 0
    assert t.double['rows and columns'] == m.block4.conv.weight[2].numel() + 1 + m.block5.conv.weight[:, 2].numel()     # and a bias

# ---------------------------------------------------------------- published

PUBLISHED = dict(decays=stuck.decays, pairs=stuck.pairs, sparse=stuck.sparse)

@pytest.fixture(scope='module')
def published(): return {k: load_results(ROOT / f'results/frozen_{k}_laptop.csv') for k in PUBLISHED}

@pytest.mark.parametrize('name', PUBLISHED)
def test_results_are_those_of_todays_recipes(published, name):
    assert set(published[name].recipe) == {r.hash for r in PUBLISHED[name]('laptop')}

def test_verdicts_follow_from_the_files(published):
    page = (ROOT / 'nbs/experiments/frozen_weights.ipynb').read_text(encoding='utf-8')
    for v in (claims.z3(stuck.label(published['decays']), 'laptop'), claims.z4(stuck.pair_table(published['pairs']), 'laptop'), claims.z5(published['sparse'], 'laptop')):
        assert f'**{v.id} {v.verdict}**' in page, f'{v.id} is {v.verdict} by results/, and the experiment shows something else: run it again'

def test_stated_probabilities_are_for_single_weights():
    from reinit_nb.stuck import SparseRun
    with pytest.raises(ReinitError, match='prob=0.5 is for double and mono, not for mutual'): SparseRun('allcnn', kind='mutual', q=.2, prob=.5)
    with pytest.raises(ReinitError, match='prob=2'): SparseRun('allcnn', kind='double', q=.2, prob=2.)

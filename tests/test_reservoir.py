"The study of frozen reservoirs: the stack against a plain loop, what is frozen, plans, comparisons, and what is published"
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hsettings
from hypothesis import strategies as st
from scipy import stats

from reinit_nb.claims import along, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10
from reinit_nb.core import ReinitError, load_results, paper_table
from reinit_nb.models import reservoirs
from reinit_nb.reservoir import (
    REGULARIZERS,
    LandscapeRun,
    ReservoirRun,
    beside,
    cost,
    default,
    landscape,
    landscapes,
    layers,
    masks,
    member,
    network,
    paper,
    pick,
    plan,
    settings,
    study,
    tensors,
    torch_run,
    train,
    versus,
    welch,
)
from reinit_nb.vision import Task

SMALL = ReservoirRun(Task('digits', n_train=80, valid=0., normalize='none'), n_test=60, base=6, epochs=2, batch=32, looks=(1,), separate=())
ROOT = Path(__file__).parent.parent

def weights(net): return {n: t.clone() for n, t in net.state_dict().items() if t.is_floating_point()}

# ---------------------------------------------------------------- the stack

@pytest.mark.parametrize('kw', [dict(regularizer=k) for k in REGULARIZERS] + [dict(repeats=3, skip=True), dict(position='front'), dict(scale=.5, position='back')], ids=str)
def test_stack_is_the_plain_loop(kw):
    run = SMALL.replace(**kw)
    rs = [run.replace(seed=k, frozen=f) for k in (3, 4) for f in (0., .3, 1.)]
    s, rows = train(rs)
    for m, r in enumerate(rs):
        slow, want = torch_run(r)
        fast = weights(member(s, m))
        for n, t in weights(slow).items():
            # a bias before BatchNorm has no gradient but rounding, which Adam makes large; the running mean follows it
            if r.regularizer == 'BatchNorm' and n.endswith(('dense.bias', 'reservoir.bias', 'running_mean')): continue
            assert (fast[n] - t).abs().max() <= 1e-4 * max(1e-2, t.abs().max()), (r, n)
        if r.regularizer != 'BatchNorm':
            for a, b in zip(rows[m], want): assert abs(a['test_acc'] - b['test_acc']) < .02 and abs(a['train_acc'] - b['train_acc']) < .02

@pytest.mark.parametrize('share', [.1, .5, 1.])
@pytest.mark.parametrize('regularizer', ['none', 'L1 .01', 'BatchNorm'])
def test_frozen_entries_do_not_move_and_others_do(share, regularizer):
    r = SMALL.replace(frozen=share, regularizer=regularizer)
    s, _ = train([r])
    old, new = network(r, 64, 10), member(s, 0)
    held = masks(r, old)
    for n, p in old.named_parameters():
        q, m = new.get_parameter(n), held.get(n)
        if m is True: assert torch.equal(p, q)
        elif m is None: assert not torch.equal(p, q)
        else:
            assert torch.equal(p[m], q[m]) and int(m.sum()) == int(share * m.numel() + .5)
            assert (p[~m] != q[~m]).float().mean() > .3   # behind dead units nothing moves
    assert set(held) == {f'{n}.{k}' for n in reservoirs(old) for k in (('weight', 'bias') if share == 1 else ('weight',))}

def test_members_do_not_depend_on_each_other():
    rs = [SMALL.replace(seed=k, frozen=f, regularizer='dropout .25') for k in range(2) for f in (0., 1.)]
    s, rows = train(rs)
    for m, r in enumerate(rs):
        alone, _ = train([r])
        for (n, a), b in zip(weights(member(s, m)).items(), weights(member(alone, 0)).values()): assert torch.allclose(a, b, atol=1e-5), n

def test_frozen_and_control_start_alike_and_see_the_same_batches():
    a, b = (network(SMALL.replace(frozen=f), 64, 10) for f in (0., 1.))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    _, rows = train([SMALL.replace(frozen=f, lr=1e-12, separate=(0, 2)) for f in (0., 1.)])   # nothing is learned: all must be equal
    assert rows[0][-1] == pytest.approx(rows[1][-1])

def test_a_short_run_is_the_beginning_of_a_long_one():
    long, short = (train([SMALL.replace(epochs=e, looks=(1, 2))])[1][0] for e in (4, 2))
    assert [o['test_acc'] for o in short] == [o['test_acc'] for o in long][:2]

def test_rows_at_the_epochs_that_were_asked_for():
    r = SMALL.replace(epochs=3, looks=(1,), separate=(0, 3))
    rows = train([r])[1][0]
    assert [o['epoch'] for o in rows] == [0, 1, 3] and math.isnan(rows[0]['fit_loss'])
    assert [o['epoch'] for o in rows if 'sep_test_5' in o] == [0, 3] and 'sep_test_6' not in rows[0]

def test_global_generators_are_left_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    a = torch.get_rng_state(), np.random.get_state()[1].copy()
    train([SMALL.replace(regularizer='dropout .5', separate=(0,))])
    assert torch.equal(a[0], torch.get_rng_state()) and (a[1] == np.random.get_state()[1]).all()

def test_separability_of_wide_features_is_perfect_on_training_data():
    "More independent features than images: least squares fits any labels"
    r = ReservoirRun(Task('digits', n_train=30, valid=0., normalize='none'), n_test=50, base=300, repeats=1, scale=1., epochs=1, separate=(0,), looks=())
    row = train([r])[1][0][0]
    assert row['sep_train_0'] == 1 and row['sep_test_0'] < 1

# ---------------------------------------------------------------- recipes and plans

@hsettings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from((0., .3, 1.)), st.sampled_from((4, 8)), st.booleans()), max_size=30), st.integers(1, 6))
def test_plan_keeps_every_recipe_once(specs, members):
    rs = list(dict.fromkeys(SMALL.replace(seed=k, frozen=f, base=b, skip=s) for k, f, b, s in specs))
    parts = plan(rs, members)
    assert sorted(r.hash for p in parts for r in p) == sorted(r.hash for r in rs)
    for p in parts:
        assert len({r.replace(seed=0, frozen=0.) for r in p}) == 1
        per = [[r.frozen for r in p if r.seed == k] for k in dict.fromkeys(r.seed for r in p)]
        assert all(o == per[0] for o in per) and (len(per) == 1 or len(p) <= members)

@pytest.mark.parametrize('kw, said', [(dict(position='top'), 'position'), (dict(regularizer='L2'), 'regularizer'), (dict(frozen=-.1), 'frozen=-0.1'), (dict(skip=True, position='back'), 'skip=True'),
                                      (dict(base=0), 'base=0'), (dict(looks=(99,)), 'looks=99'), (dict(n_test=0), 'n_test=0'), (dict(lr=0.), 'lr=0')])
def test_wrong_recipes_are_refused(kw, said):
    with pytest.raises(ReinitError, match=said): SMALL.replace(**kw)

def test_recipes_that_do_not_fit_are_refused():
    with pytest.raises(ReinitError, match='do not fit'): train([SMALL, SMALL.replace(base=8)])
    with pytest.raises(ReinitError, match='do not fit'): train([SMALL, SMALL.replace(frozen=0.), SMALL.replace(seed=1)])

def test_the_papers_protocol():
    d, m = default('cifar10', 'paper'), default('mnist', 'paper')
    assert (d.base, d.epochs, d.batch, d.lr, d.repeats, d.scale, d.position) == (256, 100, 64, .001, 2, 2., 'alternating') and (m.base, m.epochs) == (64, 50)
    assert d.task.n_train is None and d.n_test is None and d.task.normalize == 'none' and d.task.valid == 0
    s = settings('cifar10', 'paper')
    assert [r.base for r in s['width']] == [32, 64, 128, 256, 512, 1024] and [r.base for r in settings('mnist', 'paper')['width']] == [16, 32, 64, 128, 256, 512]
    assert [r.repeats for r in s['depth']] == list(range(1, 9)) and [r.repeats for r in s['depth, skips']] == list(range(2, 9))
    assert [r.scale for r in s['scale']] == [.25, .5, 1, 2, 4, 8, 16, 32] and [r.frozen for r in s['share']] == [.1, .2, .3, .4, .5] and {r.seed for r in study('paper')} == set(range(25))
    assert cost([d]).ops.iloc[0] == 6 * (3072 * 256 + 4 * 256 * 512 + 256 * 256 + 256 * 10) * 50_000 * 100

def test_the_papers_own_numbers_pass_c5():
    t = paper_table('freezing_table').query("measure=='test accuracy' and sweep=='depth'")
    rows = [dict(recipe=f'{o.dataset}{o.value}{f}{s}', seed=s + 1, frozen=f, epochs=1, epoch=1, base=default(o.dataset, 'paper').base, repeats=int(o.value), scale=2., position='alternating', skip=False,
                 regularizer='none', test_acc=(a + .1 * s) / 100, **{'task.dataset': o.dataset, 'task.classes': None}) for o in t.itertuples() for f, a in ((1., o.frozen), (0., o.unfrozen)) for s in (-1, 0, 1)]
    assert c5(pd.DataFrame(rows), 'paper').verdict == '✅' and c5(pd.DataFrame(rows).query("`task.dataset`!='cifar100'"), 'paper').verdict == '➖'

def test_every_frozen_run_has_its_control():
    for at in ('smoke', 'laptop', 'paper'):
        rs = set(study(at, n=2))
        plain = {r.replace(separate=()) for r in rs if r.frozen == 0}
        for r in rs:
            if r.frozen == 1: assert r.replace(frozen=0.) in rs
            else: assert r.replace(frozen=0., separate=()) in plain

def test_images_of_a_seed():
    x, y, xt, yt, c = tensors(SMALL)
    assert x.shape == (80, 64) and xt.shape == (60, 64) and c == 10 and 0 <= x.min() and x.max() <= 1
    x2, _, xt2, *_ = tensors(SMALL.replace(seed=1))
    assert not torch.equal(x, x2) and torch.equal(xt, xt2)

# ---------------------------------------------------------------- comparisons

def test_welch_by_hand():
    a, b = np.random.default_rng(0).normal(size=8) + 1, np.random.default_rng(1).normal(size=5) * 2
    va, vb = a.var(ddof=1) / 8, b.var(ddof=1) / 5
    dof = (va + vb)**2 / (va**2 / 7 + vb**2 / 4)
    half = stats.t.ppf(.975, dof) * math.sqrt(va + vb)
    w = welch(a, b)
    assert w['gap'] == pytest.approx(a.mean() - b.mean()) and (w['lo'], w['hi']) == pytest.approx((w['gap'] - half, w['gap'] + half))
    assert w['p'] == pytest.approx(2 * stats.t.sf(abs(w['gap']) / math.sqrt(va + vb), dof))
    assert math.isnan(welch([1.], b)['p']) and welch([1., 1.], [1., 1.]) == {'gap': 0., 'lo': 0., 'hi': 0., 'p': 1.}

def fake(n=4, **kw):
    rows = [dict(recipe=f'{r}{s}{f}', seed=s, frozen=f, epochs=2, epoch=e, base=64, repeats=r, scale=2., position='alternating', skip=False, regularizer='none', test_acc=.3 + .1 * f + .01 * s + .001 * e,
                 **{'task.dataset': 'cifar10', 'task.classes': None}) for r in (1, 2) for s in range(n) for f in (0., .5, 1.) for e in (1, 2)]
    return pd.DataFrame(rows).assign(**kw)

def test_along_and_versus():
    d = along(fake(), scale='laptop')
    assert set(d.repeats) == {2} and set(d.frozen) == {0., 1.} and set(d.epoch) == {2} and len(d) == 8
    t = versus(along(fake(), 'repeats', scale='laptop'), ['dataset', 'repeats'])
    assert list(t.repeats) == [1, 2] and t.gap.tolist() == pytest.approx([10, 10]) and list(t.n) == [4, 4]
    assert t.frozen_se.iloc[0] == pytest.approx(1.96 * np.std([0, 1, 2, 3], ddof=1) / 2)
    b = beside(t, 'depth', 'repeats')
    assert b.paper.tolist() == ['47.6 / 45.1', ''] and b['its gap'].iloc[0] == '+2.5'
    assert len(along(fake(base=32), scale='laptop')) == 0 and len(along(fake(base=32), 'base', scale='laptop')) == 8

def test_what_is_missing_is_said():
    with pytest.raises(ReinitError, match='have no result'): pick(fake(), [SMALL])
    with pytest.raises(ReinitError, match='both are needed'): versus(pick(fake().query('frozen==0')))
    with pytest.raises(ReinitError, match='no separability'): layers(pick(fake()))
    with pytest.raises(ReinitError, match='sweep'): paper('height')

def test_numbers_of_the_paper():
    t = paper_table('freezing_table')
    assert t.source.notna().all() and not t.duplicated(['sweep', 'value', 'dataset', 'measure', 'layer']).any()
    one = t[(t.measure == 'test accuracy')].set_index(['sweep', 'value', 'dataset'])
    assert len(one) == 29 and (one.loc[('depth', '5', 'cifar100'), 'frozen'], one.loc[('depth', '5', 'cifar100'), 'unfrozen']) == (14.0, 1.4)
    assert paper('default', 'cifar10', 'test separability').query('value=="epoch 0"').frozen.tolist() == [38.9, 40.4, 37.1, 36.0, 36.9, 34.3]

# ---------------------------------------------------------------- landscape

def test_landscape_leaves_the_weights_and_nests():
    r = LandscapeRun(**{k: getattr(SMALL, k) for k in ('task', 'n_test', 'base', 'batch')}, epochs=1, looks=(), images=40, probes=3, sigmas=(.05,), at=(-1., 0., 1.))
    net = network(r, 64, 10)
    old = weights(net)
    x, y = (o[:40] for o in tensors(r)[:2])
    got = landscape(net, (x, y), r)
    assert all(torch.equal(a, b) for a, b in zip(old.values(), weights(net).values()))
    assert got['top_base'] <= got['top_all'] * 1.02 and got['dims_base'] < got['dims_all'] == sum(p.numel() for p in net.parameters())
    assert got['slice_0'] == pytest.approx(torch.nn.functional.cross_entropy(net(x), y).item(), rel=1e-4)

# ---------------------------------------------------------------- what is published

@pytest.fixture(scope='module')
def published(): return load_results(ROOT / 'results/freezing_laptop.csv')

def test_published_runs_are_recipes_of_today(published):
    known = {r.hash: r for r in study('laptop')}
    assert set(published.recipe) <= set(known)
    for h, g in published.groupby('recipe'):
        r = known[h]
        assert r.frozen not in (1.,) or r.replace(frozen=0.).hash in set(published.recipe)   # no frozen run without its control
        assert set(g.epoch) == {*r.looks, *r.separate, r.epochs}
    assert set(load_results(ROOT / 'results/freezing_landscape_laptop.csv').recipe) <= {r.hash for r in landscapes('laptop')}

def test_verdicts_on_the_page_follow_from_the_files(published):
    page = (ROOT / 'nbs/experiments/freezing.ipynb').read_text(encoding='utf-8')
    vs = [f(published, 'laptop') for f in (c1, c2, c3, c4, c5, c6, c7, c8, c9)] + [c10(load_results(ROOT / 'results/freezing_landscape_laptop.csv'), 'laptop')]
    for v in vs: assert f'{v.verdict} {v.id} ' in page, f'{v.id} is {v.verdict} by results/, and the experiment shows something else: run it again'

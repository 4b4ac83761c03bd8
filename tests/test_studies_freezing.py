"The study of frozen layers: the stack against a plain loop, what is frozen, plans, comparisons, and what is published"
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reference_loops import reservoir_loop
from scipy import stats

from reinit_nb.claims.scorecard import judge
from reinit_nb.core import ReinitError
from reinit_nb.models import reservoir_names
from reinit_nb.store import load_results, paper_table, save_results
from reinit_nb.studies.freezing import (
    LARGE_LAYER,
    RESERVOIR_REGULARIZERS,
    LandscapeRun,
    LargeLinear,
    ReservoirRun,
    compare_frozen,
    deciding_lists,
    deciding_progress,
    default_reservoir,
    freezing_cost,
    freezing_paper_table,
    freezing_table,
    landscape_runs,
    measure_landscape,
    one_factor_runs,
    plan_reservoirs,
    plot_layer_separability,
    reservoir_data,
    reservoir_dims,
    reservoir_masks,
    reservoir_network,
    reservoir_runs,
    reservoir_sweeps,
    run_reservoirs,
    select_results,
    separability_by_layer,
    train_reservoirs,
    welch,
    wide_reservoir,
)
from reinit_nb.vision import Task

DIGITS = Task('digits', n_train=80, valid=0., normalize='none')
SMALL = ReservoirRun(DIGITS, n_test=60, base=6, epochs=2, batch=32, looks=(1,), separate=())
ROOT = Path(__file__).parent.parent

def weights(net): return {n: t.clone() for n, t in net.state_dict().items() if t.is_floating_point()}

# ---------------------------------------------------------------- the stack

VARIANTS = [dict(regularizer=k) for k in RESERVOIR_REGULARIZERS]
VARIANTS += [dict(repeats=3, skip=True), dict(position='front'), dict(scale=.5, position='back')]

@pytest.mark.parametrize('variant', VARIANTS, ids=str)
def test_stack_is_the_plain_loop(variant):
    runs = [SMALL.replace(seed=k, frozen=f, **variant) for k in (3, 4) for f in (0., .3, 1.)]
    stack, rows = train_reservoirs(runs, 'cpu')
    for m, run in enumerate(runs):
        slow, want = reservoir_loop(run)
        fast = weights(stack.member(m))
        norm = run.regularizer == 'BatchNorm'
        for n, t in weights(slow).items():
            # a bias before BatchNorm has no gradient but rounding, which Adam makes large; the running mean follows it
            if norm and n.endswith(('dense.bias', 'reservoir.bias', 'running_mean')): continue
            assert (fast[n] - t).abs().max() <= 1e-4 * max(1e-2, t.abs().max()), (run, n)
        if norm: continue
        for a, b in zip(rows[m], want):
            assert abs(a['test_acc'] - b['test_acc']) < .02
            assert abs(a['train_acc'] - b['train_acc']) < .02

@pytest.mark.parametrize('share', [.1, .5, 1.])
@pytest.mark.parametrize('regularizer', ['none', 'L1 .01', 'BatchNorm'])
def test_frozen_entries_do_not_move_and_others_do(share, regularizer):
    run = SMALL.replace(frozen=share, regularizer=regularizer)
    old, new = reservoir_network(run, 64, 10), train_reservoirs([run])[0].member(0)
    masks = reservoir_masks(run, old)
    for n, p in old.named_parameters():
        q, mask = new.get_parameter(n), masks.get(n)
        if mask is True: assert torch.equal(p, q)
        elif mask is None: assert not torch.equal(p, q)
        else:
            assert torch.equal(p[mask], q[mask])
            assert int(mask.sum()) == int(share * mask.numel() + .5)
            assert (p[~mask] != q[~mask]).float().mean() > .3   # behind dead units nothing moves
    kinds = ('weight', 'bias') if share == 1 else ('weight',)
    assert set(masks) == {f'{n}.{k}' for n in reservoir_names(old) for k in kinds}

@pytest.mark.parametrize('share', [1, 2])
def test_large_layers_are_the_batched_product(share):
    "By oneDNN as by torch, output and gradients"
    members, n_in, n_out, n = 4, 70, 50, 9
    torch.manual_seed(0)
    W, b, u = torch.randn(members, n_out, n_in), torch.randn(members, n_out, 1), torch.randn(members // share, n_in, n)
    results = []
    for multiply in (LargeLinear.apply, lambda W, b, u: torch.baddbmm(b, W, u.repeat_interleave(share, 0))):
        args = [t.clone().requires_grad_() for t in (W, b, u)]
        out = multiply(*args)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in args)])
    for fast, slow in zip(*results): torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-3)

def test_a_large_network_is_the_plain_loop():
    "Layers of which some are large enough for oneDNN"
    run = SMALL.replace(base=160, epochs=1, seed=3)
    dims = reservoir_dims(run)
    assert max(a * b for a, b in zip(dims, dims[1:])) >= LARGE_LAYER
    stack, _ = train_reservoirs([run])
    slow, _ = reservoir_loop(run)
    fast = weights(stack.member(0))
    for n, t in weights(slow).items(): assert (fast[n] - t).abs().max() <= 1e-3 * t.abs().max(), n

def test_orthogonal_reservoirs():
    run = SMALL.replace(seed=3, frozen=1.)
    random, orthogonal = (reservoir_network(run.replace(reservoir=k), 64, 10) for k in ('random', 'orthogonal'))
    reservoirs = tuple(reservoir_names(random))
    for (n, a), b in zip(random.named_parameters(), orthogonal.parameters()):
        if not n.startswith(reservoirs) or a.ndim < 2:
            assert torch.equal(a, b)
            continue
        assert b.norm().item() == pytest.approx(a.norm().item(), rel=1e-5)
        gram = b.T @ b   # wider than their input: orthogonal columns
        torch.testing.assert_close(gram, gram[0, 0] * torch.eye(len(gram)), rtol=1e-4, atol=1e-5)

def test_freezing_after_an_epoch():
    "Before it everything is trained, after it the reservoirs do not move by a bit, momentum or not"
    run = SMALL.replace(epochs=3, looks=(1, 2), seed=3)
    trained = train_reservoirs([run.replace(frozen=0.)])[1][0]
    runs = [run.replace(frozen=0.), run.replace(frozen=1., freeze_after=1)]
    late = train_reservoirs(runs)[1]
    assert late[0] == trained
    assert late[1][0] == trained[0] and late[1][1] != trained[1]
    nets = [weights(train_reservoirs([run.replace(frozen=1., freeze_after=1, epochs=e, looks=())])[0].member(0))
            for e in (1, 3)]
    net = reservoir_network(run, 64, 10)
    for n in nets[0]: assert torch.equal(nets[0][n], nets[1][n]) == n.startswith(tuple(reservoir_names(net)))

def test_results_have_their_cost():
    found = run_reservoirs([SMALL, SMALL.replace(seed=1)])
    costs = [[row.get('cpu_seconds') for row in rows] for rows in found]
    assert costs[0] == costs[1] and costs[0][-1] > 0 and not any(costs[0][:-1])

def test_members_do_not_depend_on_each_other():
    runs = [SMALL.replace(seed=k, frozen=f, regularizer='dropout .25') for k in range(2) for f in (0., 1.)]
    stack, _ = train_reservoirs(runs)
    for m, run in enumerate(runs):
        together, alone = weights(stack.member(m)), weights(train_reservoirs([run])[0].member(0))
        for n, w in together.items(): assert torch.allclose(w, alone[n], atol=1e-5), n

def test_frozen_and_control_start_alike_and_see_the_same_batches():
    a, b = (reservoir_network(SMALL.replace(frozen=f), 64, 10) for f in (0., 1.))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    # nothing is learned: all must be equal
    _, rows = train_reservoirs([SMALL.replace(frozen=f, lr=1e-12, separate=(0, 2)) for f in (0., 1.)])
    assert rows[0][-1] == pytest.approx(rows[1][-1])

def test_a_short_run_is_the_beginning_of_a_long_one():
    long, short = (train_reservoirs([SMALL.replace(epochs=e, looks=(1, 2))])[1][0] for e in (4, 2))
    assert [o['test_acc'] for o in short] == [o['test_acc'] for o in long][:2]

def test_rows_at_the_epochs_that_were_asked_for():
    rows = train_reservoirs([SMALL.replace(epochs=3, looks=(1,), separate=(0, 3))])[1][0]
    assert [o['epoch'] for o in rows] == [0, 1, 3]
    assert math.isnan(rows[0]['fit_loss'])
    assert [o['epoch'] for o in rows if 'sep_test_5' in o] == [0, 3]
    assert 'sep_test_6' not in rows[0]

def test_global_generators_are_left_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    train_reservoirs([SMALL.replace(regularizer='dropout .5', separate=(0,))])
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()

def test_separability_of_wide_features_is_perfect_on_training_data():
    "More independent features than images: least squares fits any labels"
    task = Task('digits', n_train=30, valid=0., normalize='none')
    run = ReservoirRun(task, n_test=50, base=300, repeats=1, scale=1., epochs=1, separate=(0,), looks=())
    row = train_reservoirs([run])[1][0][0]
    assert row['sep_train_0'] == 1
    assert row['sep_test_0'] < 1

# ---------------------------------------------------------------- recipes and plans

specs = st.tuples(st.integers(0, 4), st.sampled_from((0., .3, 1.)), st.sampled_from((4, 8)), st.booleans())

@hypothesis_settings(max_examples=40, deadline=None)
@given(st.lists(specs, max_size=30), st.integers(1, 6))
def test_plan_keeps_every_recipe_once(specs, members):
    runs = list(dict.fromkeys(SMALL.replace(seed=k, frozen=f, base=b, skip=s) for k, f, b, s in specs))
    parts = plan_reservoirs(runs, members)
    assert sorted(r.hash for p in parts for r in p) == sorted(r.hash for r in runs)
    for part in parts:
        assert len({r.replace(seed=0, frozen=0.) for r in part}) == 1
        shares = [[r.frozen for r in part if r.seed == k] for k in dict.fromkeys(r.seed for r in part)]
        assert all(o == shares[0] for o in shares)
        assert len(shares) == 1 or len(part) <= members

def test_large_networks_make_small_stacks_of_equal_size():
    runs = [wide_reservoir('cifar10', 'laptop').replace(seed=k, frozen=f) for k in range(12) for f in (0., 1.)]
    sizes = [len(p) for p in plan_reservoirs(runs)]
    weights = sum(a * b for a, b in zip(reservoir_dims(runs[0]), reservoir_dims(runs[0])[1:]))
    assert weights == 3072 * 256 + 4 * 256 * 512 + 256 * 256 + 2560
    assert sum(sizes) == 24 and max(sizes) * weights <= 2**24 and max(sizes) - min(sizes) <= 2

# ---------------------------------------------------------------- lists that decide

@pytest.mark.parametrize('scale', ['smoke', 'laptop', 'paper'])
def test_deciding_lists(scale):
    lists = deciding_lists(scale)
    every = [r for runs in lists.values() for r in runs]
    assert min(r.seed for r in every) == 100
    for name, runs in lists.items():
        assert len(runs) == len(set(runs))
        frozen, trained = ({r.replace(frozen=0.) for r in runs if r.frozen == f} for f in (1., 0.))
        assert trained == (set() if name == 'random' else frozen)
    assert {r.repeats for r in lists['depth']} == {5} and {r.skip for r in lists['depth']} == {False, True}
    assert not set(lists['random']) & set(lists['width256'])

def test_recorded_portions_belong_to_the_lists():
    lists = {r.hash for runs in deciding_lists('laptop').values() for r in runs}
    files = [*(ROOT / 'results/portions').glob('freezing*.csv')]
    for path in files: assert set(load_results(path).recipe) <= lists
    seeds = {r.seed for r in deciding_lists('laptop')['width256']}
    assert seeds == set(range(100, 112))

def test_progress_counts_what_is_recorded(tmp_path):
    runs = deciding_lists('smoke')['width256']
    rows = [dict(recipe=r.hash, epoch=e, cpu_seconds=30. if e else math.nan) for r in runs[:3] for e in (0, 1)]
    (tmp_path / 'portions').mkdir()
    save_results(pd.DataFrame(rows), tmp_path / 'portions/freezing_width256_smoke.csv')
    save_results(pd.DataFrame(rows), tmp_path / 'freezing_smoke.csv')
    t = deciding_progress(tmp_path, 'smoke')
    assert t.loc['width256'].to_dict() == {'runs': 4, 'recorded': 3, 'timed': 3, 'CPU minutes': 1.5}
    assert t.recorded.sum() == 3

WRONG = [(dict(position='top'), 'position'), (dict(regularizer='L2'), 'regularizer'), (dict(frozen=-.1), 'frozen=-0.1'),
         (dict(skip=True, position='back'), 'skip=True'), (dict(base=0), 'base=0'), (dict(looks=(99,)), 'looks=99'),
         (dict(n_test=0), 'n_test=0'), (dict(lr=0.), 'lr=0'), (dict(reservoir='sparse'), 'reservoir'),
         (dict(freeze_after=3), 'freeze_after=3')]

@pytest.mark.parametrize('fields, message', WRONG)
def test_wrong_recipes_are_refused(fields, message):
    with pytest.raises(ReinitError, match=message): SMALL.replace(**fields)

def test_recipes_that_do_not_fit_are_refused():
    with pytest.raises(ReinitError, match='do not fit'): train_reservoirs([SMALL, SMALL.replace(base=8)])
    uneven = [SMALL, SMALL.replace(frozen=0.), SMALL.replace(seed=1)]
    with pytest.raises(ReinitError, match='do not fit'): train_reservoirs(uneven)

def test_the_papers_protocol():
    run, mnist = default_reservoir('cifar10', 'paper'), default_reservoir('mnist', 'paper')
    assert (run.base, run.epochs, run.batch, run.lr) == (256, 100, 64, .001)
    assert (run.repeats, run.scale, run.position) == (2, 2., 'alternating')
    assert (mnist.base, mnist.epochs) == (64, 50)
    assert run.task.n_train is None and run.n_test is None
    assert run.task.normalize == 'none' and run.task.valid == 0
    sweeps = reservoir_sweeps('cifar10', 'paper')
    assert [r.base for r in sweeps['width']] == [32, 64, 128, 256, 512, 1024]
    assert [r.base for r in reservoir_sweeps('mnist', 'paper')['width']] == [16, 32, 64, 128, 256, 512]
    assert [r.repeats for r in sweeps['depth']] == list(range(1, 9))
    assert [r.repeats for r in sweeps['depth, skips']] == list(range(2, 9))
    assert [r.scale for r in sweeps['scale']] == [.25, .5, 1, 2, 4, 8, 16, 32]
    assert [r.frozen for r in sweeps['share']] == [.1, .2, .3, .4, .5]
    assert {r.seed for r in reservoir_runs('paper')} == set(range(25))
    weights = 3072 * 256 + 4 * 256 * 512 + 256 * 256 + 256 * 10
    assert freezing_cost([run]).ops.iloc[0] == 6 * weights * 50_000 * 100

def test_the_papers_own_numbers_pass_c5():
    t = paper_table('freezing_table').query("measure=='test accuracy' and sweep=='depth'")
    rows = []
    for o in t.itertuples():
        base = default_reservoir(o.dataset, 'paper').base
        common = dict(epochs=1, epoch=1, base=base, repeats=int(o.value), scale=2., position='alternating', skip=False,
                      regularizer='none')
        common |= {'task.dataset': o.dataset, 'task.classes': None}
        for f, acc in ((1., o.frozen), (0., o.unfrozen)):
            for s in (-1, 0, 1):
                recipe = f'{o.dataset}{o.value}{f}{s}'
                rows.append(common | dict(recipe=recipe, seed=s + 1, frozen=f, test_acc=(acc + .1 * s) / 100))
    df = pd.DataFrame(rows)
    assert judge('C5', df, scale='paper').verdict == '✅'
    assert judge('C5', df[df['task.dataset'] != 'cifar100'], scale='paper').verdict == '?'

def test_every_frozen_run_has_its_control():
    for at in ('smoke', 'laptop', 'paper'):
        runs = set(reservoir_runs(at, n=2))
        plain = {r.replace(separate=()) for r in runs if r.frozen == 0}
        for r in runs:
            if r.frozen == 1: assert r.replace(frozen=0.) in runs
            else: assert r.replace(frozen=0., separate=()) in plain

def test_images_of_a_seed():
    x, y, x_test, y_test, classes = reservoir_data(SMALL)
    assert x.shape == (80, 64) and x_test.shape == (60, 64) and classes == 10
    assert 0 <= x.min() and x.max() <= 1
    other, _, other_test, *_ = reservoir_data(SMALL.replace(seed=1))
    assert not torch.equal(x, other)
    assert torch.equal(x_test, other_test)

# ---------------------------------------------------------------- comparisons

def test_welch_by_hand():
    a, b = np.random.default_rng(0).normal(size=8) + 1, np.random.default_rng(1).normal(size=5) * 2
    va, vb = a.var(ddof=1) / 8, b.var(ddof=1) / 5
    dof = (va + vb)**2 / (va**2 / 7 + vb**2 / 4)
    half = stats.t.ppf(.975, dof) * math.sqrt(va + vb)
    found = welch(a, b)
    gap = a.mean() - b.mean()
    assert found['gap'] == pytest.approx(gap)
    assert (found['lo'], found['hi']) == pytest.approx((gap - half, gap + half))
    assert found['p'] == pytest.approx(2 * stats.t.sf(abs(gap) / math.sqrt(va + vb), dof))
    assert math.isnan(welch([1.], b)['p'])
    assert welch([1., 1.], [1., 1.]) == {'gap': 0., 'lo': 0., 'hi': 0., 'p': 1.}

def fake(n=4, **fields):
    rows = []
    for repeats in (1, 2):
        for seed in range(n):
            for f in (0., .5, 1.):
                for epoch in (1, 2):
                    acc = .3 + .1 * f + .01 * seed + .001 * epoch
                    rows.append(dict(recipe=f'{repeats}{seed}{f}', seed=seed, frozen=f, epochs=2, epoch=epoch, base=64,
                                     repeats=repeats, scale=2., position='alternating', skip=False, regularizer='none',
                                     test_acc=acc))
    return pd.DataFrame(rows).assign(**{'task.dataset': 'cifar10', 'task.classes': None}, **fields)

def test_one_factor_runs_and_their_comparison():
    d = one_factor_runs(fake(), scale='laptop')
    assert len(d) == 8 and set(d.repeats) == {2} and set(d.frozen) == {0., 1.} and set(d.epoch) == {2}
    t = compare_frozen(one_factor_runs(fake(), 'repeats', scale='laptop'), ['dataset', 'repeats'])
    assert list(t.repeats) == [1, 2] and list(t.n) == [4, 4]
    assert t.gap.tolist() == pytest.approx([10, 10])
    assert t.frozen_se.iloc[0] == pytest.approx(1.96 * np.std([0, 1, 2, 3], ddof=1) / 2)
    text = freezing_table(t, 'depth', 'repeats')
    assert text.paper.tolist() == ['47.6 / 45.1', '']
    assert text['its gap'].iloc[0] == '+2.5'
    two_widths = pd.concat([fake(base=32), fake()])
    assert set(one_factor_runs(two_widths, scale='laptop').base) == {64}   # the default one
    assert len(one_factor_runs(fake(base=32), scale='laptop')) == 8   # all networks are of this width
    assert len(one_factor_runs(fake(base=32), 'base', scale='laptop')) == 8

def test_missing_results_raise_an_error():
    with pytest.raises(ReinitError, match='have no result'): select_results(fake(), [SMALL])
    with pytest.raises(ReinitError, match='both are needed'): compare_frozen(select_results(fake().query('frozen==0')))
    with pytest.raises(ReinitError, match='no separability'): separability_by_layer(select_results(fake()))
    with pytest.raises(ReinitError, match='sweep'): freezing_paper_table('height')

def test_numbers_of_the_paper():
    t = paper_table('freezing_table')
    assert t.source.notna().all()
    assert not t.duplicated(['sweep', 'value', 'dataset', 'measure', 'layer']).any()
    accuracy = t[(t.measure == 'test accuracy')].set_index(['sweep', 'value', 'dataset'])
    assert len(accuracy) == 29
    deep = accuracy.loc[('depth', '5', 'cifar100')]
    assert (deep.frozen, deep.unfrozen) == (14.0, 1.4)
    before = freezing_paper_table('default', 'cifar10', 'test separability').query('value=="epoch 0"')
    assert before.frozen.tolist() == [38.9, 40.4, 37.1, 36.0, 36.9, 34.3]

# ---------------------------------------------------------------- landscape

def test_landscape_leaves_the_weights_and_nests():
    fields = {k: getattr(SMALL, k) for k in ('task', 'n_test', 'base', 'batch')}
    run = LandscapeRun(**fields, epochs=1, looks=(), images=40, probes=3, sigmas=(.05,), at=(-1., 0., 1.))
    net = reservoir_network(run, 64, 10)
    old = weights(net)
    x, y = (o[:40] for o in reservoir_data(run)[:2])
    row = measure_landscape(net, (x, y), run)
    assert all(torch.equal(a, b) for a, b in zip(old.values(), weights(net).values()))
    assert row['top_base'] <= row['top_all'] * 1.02
    assert row['dims_base'] < row['dims_all'] == sum(p.numel() for p in net.parameters())
    assert row['slice_0'] == pytest.approx(torch.nn.functional.cross_entropy(net(x), y).item(), rel=1e-4)

# ---------------------------------------------------------------- what is published

@pytest.fixture(scope='module')
def published(): return load_results(ROOT / 'results/freezing_laptop.csv')

@pytest.fixture(scope='module')
def landscapes(): return load_results(ROOT / 'results/freezing_landscape_laptop.csv')

def test_published_runs_are_recipes_of_today(published, landscapes):
    known = {r.hash: r for r in reservoir_runs('laptop')}
    recorded = set(published.recipe)
    assert recorded <= set(known)
    for h, g in published.groupby('recipe'):
        run = known[h]
        if run.frozen == 1: assert run.replace(frozen=0.).hash in recorded   # no frozen run without its control
        assert set(g.epoch) == {*run.looks, *run.separate, run.epochs}
    assert set(landscapes.recipe) <= {r.hash for r in landscape_runs('laptop')}

def test_figures_count_hidden_layers_from_one():
    rows = [dict(frozen=f, part=part, layer=layer, mean=50., lo=49., hi=51.)
            for f in (0., 1.) for part in ('train', 'test') for layer in range(3)]
    import matplotlib.pyplot as plt
    ax = plot_layer_separability(pd.DataFrame(rows))
    assert ax.get_xticks().tolist() == [1, 2, 3]
    assert all(line.get_xdata().tolist() == [1, 2, 3] for line in ax.lines if len(line.get_xdata()) == 3)
    plt.close('all')

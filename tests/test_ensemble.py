"The ensemble against ordinary torch, over whole runs; its independence of neighbors; its memory"
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from reference_loops import linears, mlp_loop
from torch import nn

from reinit_nb.core import ReinitError, Streams
from reinit_nb.ensemble import (
    MLPRun,
    StackAdam,
    member_module,
    mlp_stack,
    one_hot_targets,
    run_mlps,
    stack_batches,
    stack_optimizer,
    train_stack,
)
from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.synthetic import SyntheticTask, make_synthetic

TASK = SyntheticTask(n_test=300)

def assert_same(a, b, tol):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert list(x) == list(y)
        for k in x: assert x[k] == pytest.approx(y[k], rel=tol, abs=tol), (k, x['round'])

@pytest.mark.parametrize('method', PAPER_METHODS)
def test_whole_runs_of_table1_in_double_precision(method):
    "All 1,800 steps and nine rounds: accuracies, norms, signal and noise agree after every round"
    run = MLPRun(method, TASK, seed=5)
    assert run.rounds * run.steps == 1800
    assert_same(run_mlps([run], 'cpu', torch.float64)[0], mlp_loop(run, torch.float64)[1], 1e-7)

@pytest.mark.parametrize('method', PAPER_METHODS)
def test_single_precision_stays_close(method):
    "As far as rounding lets it: the norms of the layers to a tenth of a percent, over 450 steps"
    run = MLPRun(method, TASK, seed=6, steps=50)
    for x, y in zip(run_mlps([run], 'cpu')[0], mlp_loop(run)[1]):
        for k in ('norm1', 'norm2', 'norm3', 'signal', 'noise'): assert x[k] == pytest.approx(y[k], rel=1e-3)

OPTIONS = [dict(momentum=.9), dict(opt='adam', lr=.01), dict(batch=48), dict(l2=.02),
           dict(act='tanh', n_iter=1, l2=30.),
           dict(l2=.02, l2_head=False, opt='adam', lr=.003), dict(opt='adam', lr=.01, l2=.02, batch=64),
           dict(momentum=.9, l2=.01, opt_state='keep'), dict(hidden=(), steps=5),
           dict(hidden=(9, 8, 7), act='gelu', init='he_normal'), dict(scope='global'),
           dict(opt='adam', opt_state='keep', batch=100), dict(redraw=False), dict(rescale=False),
           dict(normalize=False), dict(normalize_head=False), dict(schedule=(2, 1, 2)), dict(blocks=1, n_iter=3)]

@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_every_option_against_torch(options):
    options = dict(steps=15, n_iter=2) | options
    runs = [MLPRun(m, TASK, seed=s, **options) for s in (1, 2) for m in PAPER_METHODS]
    for run, rows in zip(runs, run_mlps(runs, 'cpu', torch.float64)):
        assert_same(rows, mlp_loop(run, torch.float64)[1], 1e-7)

def test_every_step_of_gradient_descent():
    "Weights and biases after each of 60 steps, with a learning rate and a penalty of each member's own"
    streams = [Streams(i) for i in range(4)]
    x, y = (torch.stack(t) for t in list(zip(*(make_synthetic(TASK, s) for s in streams)))[:2])
    x = x.double()
    lr = torch.tensor([.01, .05, .1, .3], dtype=torch.float64)
    l2 = torch.tensor([0., .01, .1, .5], dtype=torch.float64)
    stack = mlp_stack((128, 16, 8), streams, dtype=torch.float64)
    nets = [member_module(stack, i) for i in range(4)]
    opts = []
    for i, net in enumerate(nets):
        weights = dict(params=[m.weight for m in linears(net)], weight_decay=l2[i].item())
        opts.append(torch.optim.SGD([weights, dict(params=[m.bias for m in linears(net)])], lr=lr[i].item()))
    feed = stack_batches(x, one_hot_targets(y, 8, 4, torch.float64))
    opt = stack_optimizer(stack, lr=lr, l2=l2)
    for _ in range(60):
        train_stack(stack, feed, opt, 1)
        for i, (net, alone) in enumerate(zip(nets, opts)):
            alone.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            alone.step()
            for layer, m in enumerate(linears(net)):
                assert torch.allclose(stack.W[layer][i], m.weight, rtol=1e-9, atol=1e-12)
                assert torch.allclose(stack.b[layer][i].flatten(), m.bias, rtol=1e-9, atol=1e-12)

def test_adam_counts_the_steps_of_each_member():
    "Members that are reset start again, the others continue, whatever their neighbors do"
    streams = [Streams(i) for i in range(4)]
    x, y = (torch.stack(t) for t in list(zip(*(make_synthetic(TASK, s) for s in streams)))[:2])
    feed = stack_batches(x.double(), one_hot_targets(y, 8, 4, torch.float64))
    def trained(resets, lr):
        stack = mlp_stack((128, 16, 8), [Streams(i) for i in range(4)], dtype=torch.float64)
        opt = stack_optimizer(stack, 'adam', lr=lr)
        for idx in resets:
            train_stack(stack, feed, opt, 7)
            opt.reset(torch.tensor(idx, dtype=torch.long))
        train_stack(stack, feed, opt, 7)
        return stack, opt
    never, plain = trained([[]], .01)
    some, opt = trained([[1, 3]], .01)
    assert isinstance(opt, StackAdam) and len(plain.parts) == 1 and len(opt.parts) == 4
    rates = trained([[1, 3]], torch.tensor([.01, .01, .02, .01], dtype=torch.float64))[0]
    for layer in range(2):
        for m in (0, 2): assert torch.allclose(some.W[layer][m], never.W[layer][m], rtol=1e-12)
        for m in (1, 3): assert not torch.allclose(some.W[layer][m], never.W[layer][m], rtol=1e-3)
        for m in (0, 1, 3): assert torch.allclose(some.W[layer][m], rates.W[layer][m], rtol=1e-12)

def test_a_member_does_not_depend_on_its_neighbors():
    run = MLPRun('LW', TASK, seed=3, steps=10)
    alone = run_mlps([run], dtype=torch.float64)[0]
    crowd = [MLPRun(m, TASK, seed=s, steps=10) for s in (9, 3, 4) for m in ('WELS', 'LW', 'BL')]
    assert_same(run_mlps(crowd, dtype=torch.float64)[crowd.index(run)], alone, 1e-9)

def test_neighbors_that_diverge_or_collapse_do_no_harm():
    "A learning rate that ends in NaN and a penalty that ends at zero, next to a run like any other"
    run = MLPRun('LW', TASK, seed=3, steps=30)
    alone = run_mlps([run], dtype=torch.float64)[0]
    crowd = [run, run.replace(lr=1e200), run.replace(lr=.1, l2=9.9, rescale=False, redraw=False)]
    rows = run_mlps(crowd, dtype=torch.float64)
    assert_same(rows[0], alone, 1e-9)
    assert not rows[1][-1]['norm1'] < 1e100
    assert rows[2][-1]['norm1'] < 1e-6

def test_global_generators_are_untouched():
    before = torch.get_rng_state()
    run_mlps([MLPRun(m, TASK, steps=2, batch=64) for m in PAPER_METHODS])
    assert torch.equal(before, torch.get_rng_state())

MANY_MEMBERS = '''
import os, resource
from reinit_nb.ensemble import MLPRun, plan_mlps, run_mlps
from reinit_nb.synthetic import SyntheticTask
methods = ('BL', 'WELSR', 'DSD', 'WELS', 'FC', 'LW')
settings = [(s, a, m) for s in range(556) for a in (.5, 1., 2.) for m in methods][:10_000]
recipes = [MLPRun(m, SyntheticTask(alpha=a), seed=s, steps=1, schedule=(1,)) for s, a, m in settings]
assert sum(len(run_mlps(p)) for p in plan_mlps(recipes)) == 10_000
status = open('/proc/self/status').readlines() if os.path.exists('/proc/self/status') else []
own = [int(line.split()[1]) for line in status if line.startswith('VmHWM')]
# ru_maxrss is at least that of the process it was forked from
print(own[0] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
'''

def test_ten_thousand_members_stay_below_two_gigabytes():
    run = subprocess.run([sys.executable, '-c', MANY_MEMBERS], check=True, capture_output=True, text=True)
    kib = int(run.stdout) / (1024 if sys.platform == 'darwin' else 1)
    assert kib < 2 * 2**20

@pytest.mark.parametrize('wrong, word', [
    (lambda: MLPRun('LWW'), "did you mean 'LW'"),
    (lambda: MLPRun(n_iter=0), 'n_iter'),
    (lambda: MLPRun(steps=0), 'steps'),
    (lambda: MLPRun(seed=-1), 'seed'),
    (lambda: MLPRun(blocks=4), '3 layers'),
    (lambda: MLPRun(blocks=0), '3 layers'),
    (lambda: MLPRun(schedule=(1, 5)), '3 layers'),
    (lambda: MLPRun(schedule=()), 'at least one round'),
    (lambda: MLPRun(frac=1.5), 'frac'),
    (lambda: MLPRun(frac=-.1), 'frac'),
    (lambda: MLPRun(task=SyntheticTask(alpha=-1.)), 'alpha'),
    (lambda: SyntheticTask(alpha=float('inf')), 'alpha'),
    (lambda: MLPRun(aplha=1.), 'aplha'),
    (lambda: MLPRun(lr='fast'), 'lr'),
    (lambda: MLPRun(hidden=(0,)), 'hidden'),
    (lambda: MLPRun(batch=0), 'batch')])
def test_wrong_input_is_refused_before_training(wrong, word):
    with pytest.raises(ReinitError, match=word): wrong()

def test_members_are_ordinary_modules():
    stack = mlp_stack((128, 16, 8), [Streams(0), Streams(1)])
    net = member_module(stack, 1)
    assert isinstance(net, nn.Sequential) and torch.equal(net[0].weight, stack.W[0][1])
    with torch.no_grad(): net[0].weight.zero_()
    assert stack.W[0][1].abs().max() > 0   # its own copy

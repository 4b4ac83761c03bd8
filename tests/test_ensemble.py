"The ensemble against ordinary torch, over whole runs; its independence of neighbours; its memory"
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reinit_nb.core import ReinitError, Streams
from reinit_nb.ensemble import MLPRun, Stack, batches, module, one_hot, optimizer, run, torch_run, train
from reinit_nb.reinit import METHODS
from reinit_nb.synthetic import SyntheticTask, make

TASK = SyntheticTask(n_test=300)

def same(a, b, rtol):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert list(x) == list(y)
        for k in x: assert x[k] == pytest.approx(y[k], rel=rtol, abs=rtol), (k, x['round'])

@pytest.mark.parametrize('method', METHODS)
def test_whole_runs_of_table1_in_double_precision(method):
    "All 1,800 steps and nine rounds: accuracies, norms, signal and noise agree after every round"
    q = MLPRun(method, TASK, seed=5)
    assert q.rounds * q.steps == 1800
    same(run([q], dtype=torch.float64)[0], torch_run(q, torch.float64)[1], 1e-7)

@pytest.mark.parametrize('method', METHODS)
def test_single_precision_stays_close(method):
    "As far as rounding lets it: the norms of the layers to a tenth of a percent, over 450 steps"
    q = MLPRun(method, TASK, seed=6, steps=50)
    for x, y in zip(run([q])[0], torch_run(q)[1]):
        for k in ('norm1', 'norm2', 'norm3', 'signal', 'noise'): assert x[k] == pytest.approx(y[k], rel=1e-3)

@pytest.mark.parametrize('kw', [dict(momentum=.9), dict(opt='adam', lr=.01), dict(batch=48), dict(l2=.02), dict(l2=.02, l2_head=False, opt='adam', lr=.003),
                                dict(hidden=(), steps=5), dict(hidden=(9, 8, 7), act='gelu', init='he_normal'), dict(scope='global'), dict(opt='adam', opt_state='keep', batch=100),
                                dict(redraw=False), dict(rescale=False), dict(normalize=False), dict(normalize_head=False), dict(schedule=(2, 1, 2)), dict(blocks=1, n_iter=3)], ids=str)
def test_every_option_against_torch(kw):
    kw = dict(steps=15, n_iter=2) | kw
    qs = [MLPRun(m, TASK, seed=s, **kw) for s in (1, 2) for m in METHODS]
    for q, rows in zip(qs, run(qs, dtype=torch.float64)): same(rows, torch_run(q, torch.float64)[1], 1e-7)

def test_every_step_of_gradient_descent():
    "Weights and biases after each of 60 steps, with a learning rate and a penalty of each member's own"
    streams = [Streams(i) for i in range(4)]
    x, y = (torch.stack(t) for t in list(zip(*(make(TASK, s) for s in streams)))[:2])
    x, lr, l2 = x.double(), torch.tensor([.01, .05, .1, .3], dtype=torch.float64), torch.tensor([0., .01, .1, .5], dtype=torch.float64)
    stack = Stack((128, 16, 8), streams, dtype=torch.float64)
    nets = [module(stack, i) for i in range(4)]
    opts = [torch.optim.SGD([dict(params=[m.weight for m in net if isinstance(m, nn.Linear)], weight_decay=l2[i].item()),
                             dict(params=[m.bias for m in net if isinstance(m, nn.Linear)])], lr=lr[i].item()) for i, net in enumerate(nets)]
    feed, opt = batches(x, one_hot(y, 8, 4, torch.float64)), optimizer(stack, lr=lr, l2=l2)
    for _ in range(60):
        train(stack, feed, opt, 1)
        for i, (net, o) in enumerate(zip(nets, opts)):
            o.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            o.step()
            for l, m in enumerate(m for m in net if isinstance(m, nn.Linear)):
                assert torch.allclose(stack.W[l][i], m.weight, rtol=1e-9, atol=1e-12) and torch.allclose(stack.b[l][i].flatten(), m.bias, rtol=1e-9, atol=1e-12)

def test_a_member_does_not_depend_on_its_neighbours():
    q = MLPRun('LW', TASK, seed=3, steps=10)
    alone = run([q], dtype=torch.float64)[0]
    crowd = [MLPRun(m, TASK, seed=s, steps=10) for s in (9, 3, 4) for m in ('WELS', 'LW', 'BL')]
    same(run(crowd, dtype=torch.float64)[crowd.index(q)], alone, 1e-9)

def test_neighbours_that_diverge_or_collapse_do_no_harm():
    "A learning rate that ends in NaN and a penalty that ends at zero, beside a run like any other"
    q = MLPRun('LW', TASK, seed=3, steps=30)
    alone = run([q], dtype=torch.float64)[0]
    crowd = [q, q.replace(lr=1e200), q.replace(lr=.1, l2=9.9, rescale=False, redraw=False)]
    rows = run(crowd, dtype=torch.float64)
    same(rows[0], alone, 1e-9)
    assert not rows[1][-1]['norm1'] < 1e100 and rows[2][-1]['norm1'] < 1e-6

def test_global_generators_are_untouched():
    before = torch.get_rng_state()
    run([MLPRun(m, TASK, steps=2, batch=64) for m in METHODS])
    assert torch.equal(before, torch.get_rng_state())

def test_ten_thousand_members_stay_below_two_gigabytes():
    code = '''
import os, resource
from reinit_nb.ensemble import MLPRun, plan, run
from reinit_nb.synthetic import SyntheticTask
from reinit_nb.reinit import METHODS
recipes = [MLPRun(m, SyntheticTask(alpha=a), seed=s, steps=1, schedule=(1,)) for s in range(556) for a in (.5,1.,2.) for m in METHODS][:10_000]
assert sum(len(run(p)) for p in plan(recipes))==10_000
own = [int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')] if os.path.exists('/proc/self/status') else []
print(own[0] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)   # the latter is at least that of the process it was forked from
'''
    kib = int(subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True).stdout)
    assert kib * (1 if sys.platform != 'darwin' else 1 / 1024) < 2 * 2**20

@pytest.mark.parametrize('make_it, word', [
    (lambda: MLPRun('LWW'), "did you mean 'LW'"), (lambda: MLPRun(n_iter=0), 'n_iter'), (lambda: MLPRun(steps=0), 'steps'), (lambda: MLPRun(seed=-1), 'seed'),
    (lambda: MLPRun(blocks=4), '3 layers'), (lambda: MLPRun(blocks=0), '3 layers'), (lambda: MLPRun(schedule=(1, 5)), '3 layers'), (lambda: MLPRun(schedule=()), 'at least one round'),
    (lambda: MLPRun(frac=1.5), 'frac'), (lambda: MLPRun(frac=-.1), 'frac'), (lambda: MLPRun(task=SyntheticTask(alpha=-1.)), 'alpha'), (lambda: SyntheticTask(alpha=float('inf')), 'alpha'),
    (lambda: MLPRun(aplha=1.), 'aplha'), (lambda: MLPRun(lr='fast'), 'lr'), (lambda: MLPRun(hidden=(0,)), 'hidden'), (lambda: MLPRun(batch=0), 'batch')])
def test_wrong_input_is_refused_before_training(make_it, word):
    with pytest.raises(ReinitError, match=word): make_it()

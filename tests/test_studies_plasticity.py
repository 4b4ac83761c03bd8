"Streams of tasks: the stack against plain loops, the tasks themselves, and claims on tables with known outcomes"

import copy

import pandas as pd
import pytest
import torch
from torch import nn

from reinit_nb.between import dash_reset, intervene, shrink_perturb
from reinit_nb.claims.plasticity import CLAIMS
from reinit_nb.claims.scorecard import judge
from reinit_nb.core import ReinitError, Streams
from reinit_nb.init import draw_weights, reset
from reinit_nb.recycle import draw_module
from reinit_nb.report.page import judge_results
from reinit_nb.store import Store, paper_table
from reinit_nb.studies.common import StudyResults, find_results, flatten_recipes, write_results
from reinit_nb.studies.plasticity import (
    ENTRY_ARMS,
    STAGE_ARMS,
    STAGE_PROBLEMS,
    STREAM_ARMS,
    STREAM_PROBLEMS,
    STUDY,
    StreamRun,
    arm_settings,
    batch_order,
    best_settings,
    entry_streams,
    entry_table,
    intervene_network,
    judged_streams,
    longer_streams,
    plan_streams,
    run_streams,
    stream_images,
    stream_network,
    stream_part,
    stream_recipe,
    stream_task,
    tuned_settings,
    tuning_recipes,
)

TINY = StreamRun(
    'permuted_mnist', dataset='digits', tasks=3, images=96, steps=20, batch=8, hidden=(16, 12), lr=3e-3, probe=64
)
STRENGTHS = {'L2': 1e-2, 'L2 Init': 1e-2, 'S&P': 0.6, 'CBP': 0.02, 'ReDo': 0.3}
STRENGTHS |= {arm: STRENGTHS[other] for arm, other in ENTRY_ARMS.items()}


def tiny(arm, **kw):
    more = dict(every=7, maturity=5, strength=STRENGTHS.get(arm, 0.0))
    return TINY.replace(arm=arm, **(more | kw))


# ---------------------------------------------------------------- a plain loop


class EntryAdam:
    "Adam in which each entry counts its own steps"

    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.state = {
            p: {k: torch.zeros_like(p) for k in ('exp_avg', 'exp_avg_sq', 'own_steps')} for p in self.params
        }

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, state in self.state.items():
            m, v, t = state['exp_avg'], state['exp_avg_sq'], state['own_steps']
            t += 1
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            p -= self.lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


class PlainLoop:
    "One network with nn.Linear, autograd and torch's Adam; every arm written out by hand"

    def __init__(self, run):
        self.run = run
        self.streams = Streams(run.seed)
        self.images = stream_images(run.dataset, run.size)
        outputs = 2 if run.problem == 'pairs_cifar' else self.images.classes
        widths = [self.images.x.shape[1], *run.hidden, outputs]
        self.layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
        for layer in self.layers:
            layer.weight.data = self.draw(layer, self.streams.init)
            nn.init.zeros_(layer.bias)
        self.initial = copy.deepcopy(self.layers)
        self.new_optimizer()
        units = run.hidden
        self.utility = [torch.zeros(n) for n in units]
        self.age = [torch.zeros(n) for n in units]
        self.due = [0.0 for _ in units]
        self.total = [torch.zeros(n) for n in units]
        self.step = 0

    def draw(self, layer, generator):
        return draw_weights(layer.weight.shape, 'he_uniform', generator)

    def new_optimizer(self):
        make = EntryAdam if self.run.arm in ENTRY_ARMS else torch.optim.Adam
        self.opt = make([p for layer in self.layers for p in (layer.weight, layer.bias)], lr=self.run.lr)

    def forward(self, x):
        self.hidden = []
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
            self.hidden.append(x)
        return self.layers[-1](x)

    def penalty(self):
        if self.run.arm == 'L2':
            return self.run.strength * sum((p**2).sum() for layer in self.layers for p in layer.parameters())
        if self.run.arm == 'L2 Init':
            pairs = zip(self.layers, self.initial)
            return self.run.strength * sum(
                ((p - q.detach()) ** 2).sum() for a, b in pairs for p, q in zip(a.parameters(), b.parameters())
            )
        return 0.0

    def train(self, t):
        run = self.run
        task = stream_task(run, t, self.images)
        order = batch_order(
            len(task.index), run.batch, task.steps, Streams(run.seed).fork(run.problem).fork(f'order {t}').data
        )
        right = 0.0
        for chosen in order:
            x = self.images.x[task.index[chosen]]
            if task.pixels is not None:
                x = x[:, task.pixels]
            y = task.y[chosen]
            logits = self.forward(x)
            right += float((logits.argmax(1) == y).double().mean())
            loss = nn.functional.cross_entropy(logits, y) + self.penalty()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            with torch.no_grad():
                self.after_step()
        return right / task.steps

    def after_step(self):
        self.step += 1
        for i, h in enumerate(self.hidden):
            seen = h.abs().mean(0)
            arm = ENTRY_ARMS.get(self.run.arm, self.run.arm)
            if arm == 'CBP':
                self.continual(i, seen)
            if arm == 'ReDo':
                self.total[i] += seen
                if self.step % self.run.every == 0:
                    score = self.total[i] / self.total[i].mean()
                    self.recycle(i, [u for u in range(len(score)) if score[u] <= self.run.strength])
                    self.total[i] = torch.zeros_like(self.total[i])

    def continual(self, i, seen):
        self.age[i] += 1
        outgoing = self.layers[i + 1].weight.abs().sum(0)
        self.utility[i] = 0.99 * self.utility[i] + 0.01 * seen * outgoing
        mature = [u for u in range(len(seen)) if self.age[i][u] > self.run.maturity]
        self.due[i] += self.run.strength * len(mature)
        n = min(int(self.due[i] + 1e-9), len(mature))
        self.due[i] -= n
        self.recycle(i, sorted(mature, key=lambda u: float(self.utility[i][u]))[:n])

    def recycle(self, i, units):
        if not units:
            return
        layer, above = self.layers[i], self.layers[i + 1]
        fresh = self.draw(layer, self.streams.reinit)
        for u in units:
            layer.weight[u] = fresh[u]
            layer.bias[u] = 0
            above.weight[:, u] = 0
            counted = ('own_steps',) if self.run.arm in ENTRY_ARMS else ()
            for moment in ('exp_avg', 'exp_avg_sq', *counted):
                self.opt.state[layer.weight][moment][u] = 0
                self.opt.state[layer.bias][moment][u] = 0
                self.opt.state[above.weight][moment][:, u] = 0
            self.utility[i][u] = self.age[i][u] = 0

    @torch.no_grad()
    def between(self):
        arm = self.run.arm
        if arm == 'S&P':
            for layer in self.layers:
                layer.weight.copy_(
                    self.run.strength * layer.weight + self.run.perturb * self.draw(layer, self.streams.reinit)
                )
        first = dict(reset=0, head=len(self.layers) - 1, LW=1).get(arm, len(self.layers))
        if arm == 'LW':
            norm = self.initial[0].weight.norm() / self.layers[0].weight.norm()
            self.layers[0].weight.mul_(norm)
        for layer in self.layers[first:]:
            layer.weight.copy_(self.draw(layer, self.streams.reinit))
            layer.bias.zero_()
        if arm in ('S&P', 'reset', 'LW') or self.run.problem in STAGE_PROBLEMS:
            self.new_optimizer()
        elif arm == 'head':
            for p in self.layers[-1].parameters():
                for moment in ('exp_avg', 'exp_avg_sq'):
                    self.opt.state[p][moment].zero_()

    def online(self):
        accuracies = []
        for t in range(self.run.tasks):
            if t:
                self.between()
            accuracies.append(self.train(t))
        return accuracies

    def norm(self):
        return float(sum(layer.weight.norm() ** 2 for layer in self.layers) ** 0.5)


@pytest.mark.parametrize('arm', (*STREAM_ARMS, *ENTRY_ARMS))
def test_every_arm_is_its_plain_loop(arm):
    run = tiny(arm)
    (rows,) = run_streams([run])
    loop = PlainLoop(run)
    assert [o['online_acc'] for o in rows] == pytest.approx(loop.online(), abs=1e-6)
    assert rows[-1]['norm'] == pytest.approx(loop.norm(), rel=1e-4)
    assert (sum(o['recycled'] for o in rows) > 0) == (arm in ('CBP', 'ReDo', *ENTRY_ARMS))


@pytest.mark.parametrize('problem', [*STREAM_PROBLEMS, *STAGE_PROBLEMS])
def test_every_problem_is_its_plain_loop(problem):
    run = tiny('LW' if problem in STAGE_PROBLEMS else 'plain', problem=problem)
    (rows,) = run_streams([run])
    assert [o['online_acc'] for o in rows] == pytest.approx(PlainLoop(run).online(), abs=1e-6)


class NetworkLoop(PlainLoop):
    "The same with the CNN, by functions of torch"

    def __init__(self, run):
        self.run = run
        self.images = stream_images(run.dataset, run.size)
        outputs = 2 if run.problem == 'pairs_cifar' else self.images.classes
        self.net = stream_network(run, self.images.shape, outputs)
        self.names = [n for n, m in self.net.named_children() if hasattr(m, 'weight')]
        self.layers = [self.net.get_submodule(n) for n in self.names]
        self.initial = copy.deepcopy(self.layers)
        self.new_optimizer()
        units = 16, 16, *run.hidden
        self.utility, self.age, self.total = ([torch.zeros(n) for n in units] for _ in range(3))
        self.due = [0.0 for _ in units]
        self.step = 0

    def forward(self, x):
        x = x.view(-1, *self.images.shape)
        self.hidden = []
        for layer in self.layers[:-1]:
            if isinstance(layer, nn.Conv2d):
                x = torch.relu(nn.functional.conv2d(x, layer.weight, layer.bias, padding=2))
                x = nn.functional.max_pool2d(x, 2)
            else:
                x = torch.relu(layer(x.flatten(1)))
            self.hidden.append(x.transpose(0, 1).flatten(1).T)   # one column for each unit
        return self.layers[-1](x.flatten(1))

    def outgoing(self, i):
        "The weights that read each unit: above × units × positions"
        above = self.layers[i + 1].weight
        return above.view(len(above), len(self.utility[i]), -1)

    def continual(self, i, seen):
        self.age[i] += 1
        self.utility[i] = 0.99 * self.utility[i] + 0.01 * seen * self.outgoing(i).abs().sum((0, 2))
        mature = [u for u in range(len(seen)) if self.age[i][u] > self.run.maturity]
        self.due[i] += self.run.strength * len(mature)
        n = min(int(self.due[i] + 1e-9), len(mature))
        self.due[i] -= n
        self.recycle(i, sorted(mature, key=lambda u: float(self.utility[i][u]))[:n])

    def after_step(self):
        self.chosen = {}
        super().after_step()
        for i, units in self.chosen.items():
            for u in units: self.outgoing(i)[:, u] = 0
        for i, units in self.chosen.items():   # what goes into a unit is drawn last
            layer, above = self.layers[i], self.layers[i + 1]
            streams = Streams(self.run.seed).fork(self.step).fork(self.names[i])
            fresh = draw_module(layer, 'he_uniform', streams, self.names[i])['weight']
            for u in units:
                layer.weight[u] = fresh[u]
                layer.bias[u] = 0
                for moment in self.moments():
                    self.opt.state[layer.weight][moment][u] = 0
                    self.opt.state[layer.bias][moment][u] = 0
                    t = self.opt.state[above.weight][moment]
                    t.view(len(t), len(self.utility[i]), -1)[:, u] = 0

    def moments(self):
        return ('exp_avg', 'exp_avg_sq') + (('own_steps',) if self.run.arm in ENTRY_ARMS else ())

    def recycle(self, i, units):
        if not units: return
        self.chosen[i] = units
        for u in units: self.utility[i][u] = self.age[i][u] = 0

    @torch.no_grad()
    def between(self, t):
        streams = Streams(self.run.seed).fork(f'before {t}')
        fresh = copy.deepcopy(self.net)
        if self.run.arm == 'S&P': shrink_perturb(fresh, 0., 1., 'he_uniform', streams)   # nothing but the draw
        else: reset(fresh, 'he_uniform', streams)
        fresh = [fresh.get_submodule(n) for n in self.names]
        arm = self.run.arm
        if arm == 'S&P':
            for layer, new in zip(self.layers, fresh):
                layer.weight.copy_(self.run.strength * layer.weight + self.run.perturb * new.weight)
        for layer, new in zip(self.layers, fresh):
            if arm != 'reset': continue
            layer.weight.copy_(new.weight)
            layer.bias.zero_()
        if arm in ('S&P', 'reset'): self.new_optimizer()

    def online(self):
        accuracies = []
        for t in range(self.run.tasks):
            if t: self.between(t)
            accuracies.append(self.train(t))
        return accuracies

@pytest.mark.parametrize('arm', ('plain', 'L2', 'L2 Init', 'S&P', 'CBP', 'ReDo', 'reset', *ENTRY_ARMS))
def test_a_cnn_on_a_stream_is_its_plain_loop(arm):
    run = tiny(arm, network='cnn', hidden=(16,))
    (rows,) = run_streams([run])
    loop = NetworkLoop(run)
    assert [o['online_acc'] for o in rows] == pytest.approx(loop.online(), abs=1e-6)
    assert rows[-1]['norm'] == pytest.approx(loop.norm(), rel=1e-4)
    assert (sum(o['recycled'] for o in rows) > 0) == (arm in ('CBP', 'ReDo', *ENTRY_ARMS))

@pytest.mark.parametrize('arm', ('head', 'LW', 'DASH', 'FIRE'))
def test_a_cnn_between_two_tasks(arm):
    run = tiny(arm, network='cnn', hidden=(16,), problem='warm_start', tasks=2)
    images = stream_images(run.dataset)
    net = stream_network(run, images.shape, images.classes)
    with torch.no_grad(): net[0].weight.mul_(2)
    old = copy.deepcopy(net)
    batches = [(images.x[:32].view(-1, 1, 8, 8), images.y[:32])]
    assert intervene_network(net, run, Streams(0), float(old[0].weight.norm()) / 2, batches)
    changed = {n for n, p in net.named_parameters() if p.ndim > 1 and not torch.equal(p, old.get_parameter(n))}
    weights = {n for n, p in net.named_parameters() if p.ndim > 1}
    assert changed == ({'9.weight'} if arm == 'head' else weights)
    if arm == 'LW': torch.testing.assert_close(net[0].weight, old[0].weight / 2)
    if arm in ('FIRE', 'DASH'):
        if arm == 'FIRE': intervene(old, 'FIRE')
        else: dash_reset(old, batches)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), old.parameters()))
    rows = run_streams([run])[0]
    assert 0 <= rows[-1]['test_acc'] <= 1 and rows[0]['task_steps'] < rows[1]['task_steps']

def test_a_cnn_has_the_tasks_of_the_mlp_and_another_hash():
    run = tiny('plain')
    cnn = run.replace(network='cnn')
    assert run.hash != cnn.hash and 'network' not in run.to_dict()['fields']
    assert StreamRun.from_dict(cnn.to_dict()) == cnn
    assert len(plan_streams([run, cnn])) == 2
    before = torch.get_rng_state()
    net = stream_network(cnn, (3, 16, 16), 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert [tuple(m.weight.shape) for m in net if hasattr(m, 'weight')] == [(16, 3, 5, 5), (16, 16, 5, 5), (16, 256),
                                                                            (12, 16), (10, 12)]
    with pytest.raises(ReinitError, match='network='): tiny('plain', network='rnn')


def test_arms_differ_and_members_do_not_disturb_each_other():
    runs = [tiny(arm, seed=s) for s in (0, 1) for arm in STREAM_ARMS]
    together = run_streams(runs)
    for run, rows in zip(runs[::3], together[::3]):
        (alone,) = run_streams([run])
        for a, b in zip(alone, rows):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-6)
    ends = [round(rows[-1]['norm'], 4) for rows in together]
    assert len(set(ends)) == len(ends)


@pytest.mark.parametrize('arm', ['DASH', 'FIRE'])
def test_dash_and_fire_are_those_of_between(arm):
    from reinit_nb.between import dash_reset, fire_reset
    from reinit_nb.ensemble import member_module, mlp_stack
    from reinit_nb.studies.plasticity import StreamAdam, intervene_member

    stack = mlp_stack((64, 16, 12, 10), [Streams(0), Streams(1)], init='he_uniform')
    for b in stack.b:
        b.normal_(generator=torch.Generator().manual_seed(0))
    net, other = member_module(stack, 1), [w[0].clone() for w in stack.W]
    run = tiny(arm, problem='warm_start')
    x, y = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 10
    intervene_member(stack, run, 1, StreamAdam(stack, [1e-3, 1e-3]), Streams(1), x, y)
    if arm == 'FIRE':
        fire_reset(net)
    else:
        dash_reset(net, list(zip(x.split(run.batch), y.split(run.batch))))
    changed = member_module(stack, 1)
    for p, q in zip(net.parameters(), changed.parameters()):
        assert torch.allclose(p, q, atol=1e-6)
    assert all(torch.equal(w[0], o) for w, o in zip(stack.W, other))


# ---------------------------------------------------------------- units


def test_units_that_are_dormant_inactive_or_frozen_are_counted():
    from reinit_nb.ensemble import mlp_stack
    from reinit_nb.health import health
    from reinit_nb.studies.plasticity import unit_shares

    stack = mlp_stack((64, 10, 10, 10), [Streams(0), Streams(1)], init='he_uniform')
    stack.W[0][1, :3] = 0
    stack.b[0][1, :3] = -1  # three units of the second member never fire
    stack.W[1][1][:, :2] = 0  # two of them are read by nobody
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(40) % 10)[None]
    found = unit_shares(stack, x, y, 10)
    assert found['frozen'].tolist() == [0, 0.1]
    from reinit_nb.ensemble import member_module

    for m in (0, 1):
        t = health(member_module(stack, m), (x[0], y[0]), sharpness=False).set_index(['layer', 'measure']).value
        assert float(found['dormant'][m]) == pytest.approx(t['all', 'dormant'])
        assert float(found['inactive'][m]) == pytest.approx(t['all', 'inactive'])
    assert found['dormant'][1] - found['dormant'][0] >= 0.1


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize('problem', [*STREAM_PROBLEMS, *STAGE_PROBLEMS])
def test_tasks_are_reproducible_and_differ_by_seed_and_task(problem):
    images = stream_images('digits')
    run = TINY.replace(problem=problem, tasks=4)
    first, again = stream_task(run, 1, images), stream_task(run, 1, images)
    other_seed, other_task = stream_task(run.replace(seed=1), 1, images), stream_task(run, 2, images)
    assert torch.equal(first.index, again.index) and torch.equal(first.y, again.y)
    assert not torch.equal(first.index, other_seed.index)
    assert first.index.tolist() != other_task.index.tolist()
    for arm in ('reset', 'CBP'):  # all arms see the same tasks
        assert torch.equal(stream_task(run.replace(arm=arm, lr=1.0), 1, images).index, first.index)
    assert len(set(first.index.tolist())) == len(first.index)


def test_tasks_are_what_they_are_called():
    images = stream_images('digits')
    permuted = [stream_task(TINY, t, images) for t in range(2)]
    for task in permuted:
        assert sorted(task.pixels.tolist()) == list(range(64)) and torch.equal(task.y, images.y[task.index])
    assert not torch.equal(permuted[0].pixels, permuted[1].pixels)
    random = stream_task(TINY.replace(problem='random_mnist', images=900), 0, images)
    share_right = (random.y == images.y[random.index]).float().mean()
    assert 0.05 < share_right < 0.15 and random.pixels is None
    hard, easy = (stream_task(TINY.replace(problem='five_one_cifar'), t, images) for t in range(2))
    assert hard.scored and not easy.scored
    assert len(set(hard.y.tolist())) == 5 and len(set(easy.y.tolist())) == 1
    assert not set(hard.y.tolist()) & set(easy.y.tolist())
    stages = [stream_task(TINY.replace(problem='growing', tasks=4), t, images) for t in range(4)]
    assert [len(o.index) for o in stages] == [24, 48, 72, 96] and [o.steps for o in stages] == [5, 10, 15, 20]
    for a, b in zip(stages, stages[1:]):
        assert torch.equal(a.index, b.index[: len(a.index)])


# ---------------------------------------------------------------- lists, tuning


def test_grids_are_of_equal_size_and_seeds_are_apart():
    assert {arm: len(arm_settings(arm)) for arm in STREAM_ARMS} == dict.fromkeys(STREAM_ARMS, 6)
    tuned = {r.seed for r in flatten_recipes(tuning_recipes('laptop'))}
    judged = {r.seed for r in flatten_recipes(judged_streams('laptop'))}
    assert len(tuned) == 3 and len(judged) == 10 and not tuned & judged


def test_streams_by_entry_differ_from_the_judged_ones_in_the_arm_only():
    judged = [r for r in flatten_recipes(judged_streams('laptop')) if r.arm in ('CBP', 'ReDo')]
    by_entry = entry_streams('laptop')
    assert {r.replace(arm=ENTRY_ARMS[r.arm]) for r in by_entry} == set(judged) and len(by_entry) == len(judged) == 100
    assert 'entry' not in {part for claim in CLAIMS for part in claim.needs}
    assert set(STUDY.load(find_results()).part('entry').recipe) == {r.hash for r in by_entry}


def test_gains_of_counts_by_entry():
    def streams(**accuracies):
        rows = [dict(recipe=f'{arm}{seed}', problem='random_cifar', arm=arm, seed=seed, task=task, scored=True,
                     online_acc=acc + .01 * seed * (arm != 'plain'))
                for arm, acc in accuracies.items() for seed in range(3) for task in range(4)]
        return pd.DataFrame(rows)
    judged = streams(plain=.5, CBP=.6, ReDo=.7)
    by_entry = streams(**{'CBP, entry steps': .62, 'ReDo, entry steps': .7})
    t = entry_table(judged, by_entry)['mean']
    assert t['CBP, entry steps', 'CBP'] == '+2.00 [+2.00, +2.00]' and t['ReDo, entry steps', 'ReDo'].startswith('+0.00')
    assert t['ReDo, entry steps', 'plain'].startswith('+21.00')


def test_longer_streams_differ_from_the_judged_ones_in_length_and_seeds_only():
    longer = longer_streams('laptop')
    judged = {(r.problem, r.arm): r for r in flatten_recipes(judged_streams('laptop'))}
    others = {r.seed for r in flatten_recipes(judged_streams('laptop')) + flatten_recipes(tuning_recipes('laptop'))}
    assert not {r.seed for r in longer} & others
    for r in longer:
        short = judged[r.problem, r.arm]
        assert r.replace(tasks=short.tasks, seed=short.seed) == short and r.tasks == 5 * short.tasks
    assert 'longer' not in {part for claim in CLAIMS for part in claim.needs}
    assert set(STUDY.load(find_results()).part('longer').recipe) == {r.hash for r in longer}


def test_judged_settings_are_those_that_tuning_found():
    tuning = STUDY.load(find_results()).part('tuning')
    best = best_settings(tuning)
    table = paper_table('plasticity_settings')
    assert (best.settings == 6).all() and (best.seeds == 3).all() and len(best) == 40
    pd.testing.assert_frame_equal(best, table, check_dtype=False, rtol=1e-4)
    one = best.iloc[7]
    assert tuned_settings(one.problem, one.arm, 'laptop') == dict(lr=one.lr, strength=one.strength)


def test_best_settings_take_the_mean_over_seeds_and_scored_tasks():
    tried = ((0.1, 0.5), (0.2, 0.6))
    rows = [('L2', 1e-3, s, seed, task, acc) for s, acc in tried for seed in (0, 1) for task in (1, 2)]
    df = pd.DataFrame(rows, columns=['arm', 'lr', 'strength', 'seed', 'task', 'online_acc'])
    df = df.assign(problem='pairs_cifar', scored=df.task == 1)
    df.loc[~df.scored, 'online_acc'] = 1 - df.online_acc  # would turn the order around if it counted
    best = best_settings(df)
    assert best.strength.tolist() == [0.2] and best.online_acc.tolist() == pytest.approx([0.6])


def test_unknown_settings_and_stacks_are_refused():
    with pytest.raises(ReinitError, match='problem'):
        stream_recipe('permuted')
    with pytest.raises(ReinitError, match='DASH'):
        arm_settings('DASH')
    with pytest.raises(ReinitError, match='plan_streams'):
        run_streams([tiny('plain'), tiny('plain', batch=9)])
    with pytest.raises(ReinitError, match='equally many'):
        run_streams([tiny('plain'), tiny('plain', seed=1), tiny('L2', seed=1)])


def test_plan_keeps_arms_of_a_seed_together():
    runs = [tiny(arm, seed=s) for arm in STREAM_ARMS for s in range(3)]
    stacks = plan_streams(runs, members=16)
    assert sorted(map(len, stacks)) == [8, 16] and sorted(sum(stacks, []), key=repr) == sorted(runs, key=repr)
    for stack in stacks:
        assert [r.seed for r in stack] == sorted(r.seed for r in stack)


# ---------------------------------------------------------------- end to end, claims


def test_study_from_recipes_to_claims_at_smoke_scale(tmp_path):
    store = Store(tmp_path / 'runs')
    options = dict(store=store, show=False, workers=1)
    paths = write_results(STUDY, tmp_path / 'results', 'smoke', **options)
    names = ('plasticity', 'plasticity_tuning', 'plasticity_longer', 'plasticity_entry')
    assert [p.name for p in paths] == [f'{name}_smoke.csv' for name in names]
    results = StudyResults(STUDY, tmp_path / 'results', 'smoke')
    judged = judge_results({STUDY.name: results}).set_index('id')
    assert list(judged.index) == list(STUDY.claims) and (judged.n == 2).all()
    assert set(results.part('streams').arm) == set(STREAM_ARMS)
    assert set(results.part('warm_start').arm) == set(STAGE_ARMS)
    assert set(results.part('longer').arm) == set(STREAM_ARMS)
    for name, table in STUDY.tables.items():
        assert len(table.make(*map(results.part, table.parts))), name


def made_up_streams(**accuracies):
    "Eight tasks, five seeds and two kinds of numbers: arm → accuracy and dormant share by quarter of the stream"
    rows = []
    for problem in STREAM_PROBLEMS:
        for arm in STREAM_ARMS:
            first, last, dormant = accuracies.get(arm.replace(' ', '_').replace('&', 'n'), (0.8, 0.8, 0.1))
            for seed in range(5):
                for t in range(8):
                    acc = first + (last - first) * (t // 2) / 3 + 0.001 * seed
                    row = dict(recipe=f'{problem} {arm} {seed}', problem=problem, arm=arm, seed=seed, task=t + 1)
                    share = dormant * (1 + t // 2) / 4 + 0.0001 * seed
                    rows.append(row | dict(scored=True, online_acc=acc, dormant=share, inactive=share, frozen=0.0))
    return pd.DataFrame(rows)


AS_CLAIMED = dict(plain=(0.8, 0.5, 0.6), L2_Init=(0.8, 0.85, 0.05), ReDo=(0.8, 0.79, 0.01), CBP=(0.8, 0.8, 0.03))
OPPOSITE = dict(plain=(0.5, 0.9, 0.0), L2_Init=(0.5, 0.3, 0.5), ReDo=(0.8, 0.4, 0.4), CBP=(0.8, 0.4, 0.3))


@pytest.mark.parametrize('id', ['P1', 'P2', 'P3', 'P4', 'P6', 'P9'])
def test_stream_claims_can_hold_and_fail(id):
    assert judge(id, made_up_streams(**AS_CLAIMED), scale='laptop').verdict == '✅'
    assert judge(id, made_up_streams(**OPPOSITE), scale='laptop').verdict == '❌'


@pytest.mark.parametrize('id, share', [('P10', 'dormant'), ('P11', 'inactive')])
def test_claims_on_what_predicts_the_loss_can_hold_and_fail(id, share):
    df = made_up_streams(**AS_CLAIMED)
    assert judge(id, df.assign(**{share: 1 - df.online_acc}), scale='laptop').verdict == '✅'
    assert judge(id, df.assign(**{share: df.online_acc}), scale='laptop').verdict == '❌'
    assert judge(id, df.assign(**{share: 0.1}), scale='laptop').verdict == '≈'


def test_dormant_units_that_grow_or_shrink_decide_p5():
    grows = made_up_streams(**AS_CLAIMED)
    assert judge('P5', grows, scale='laptop').verdict == '✅'
    shrinks = grows.assign(dormant=1 - grows.dormant)
    assert judge('P5', shrinks, scale='laptop').verdict == '❌'
    constant = grows.assign(dormant=0.1)
    assert judge('P5', constant, scale='laptop').verdict == '≈'


def made_up_stages(train=1.0, **test):
    rows = [
        dict(recipe=f'{p}{arm}{seed}', problem=p, arm=arm, seed=seed, task=task, train_acc=train)
        | dict(test_acc=test.get(arm.replace('&', 'n'), 0.4) + 0.001 * (seed % 2) * (arm == 'plain') - (task == 1))
        for p in STAGE_PROBLEMS
        for arm in STAGE_ARMS
        for seed in range(4)
        for task in (1, 2)
    ]
    df = pd.DataFrame(rows)
    return [df[df.problem == p] for p in STAGE_PROBLEMS]


def test_warm_start_claims_can_hold_and_fail():
    held = made_up_stages(plain=0.37, reset=0.4, SnP=0.401, LW=0.39)
    failed = made_up_stages(plain=0.42, reset=0.4, SnP=0.38, LW=0.39)
    for id in ('P7', 'P8', 'P12'):
        assert judge(id, *held, scale='laptop').verdict == '✅'
        assert judge(id, *failed, scale='laptop').verdict == '❌'
    verdict = judge('P7', *made_up_stages(plain=0.37, reset=0.4, train=0.9), scale='laptop')
    assert verdict.verdict == '❌' and verdict.part.rule.part == 'training accuracy'


def test_quarters_count_scored_tasks_only():
    df = made_up_streams(plain=(0.2, 0.8, 0.0))
    df = df[(df.arm == 'plain') & (df.problem == 'five_one_cifar') & (df.seed == 0)]
    df = df.assign(scored=df.task % 2 == 1)
    df.loc[~df.scored, 'online_acc'] = 0.0
    assert stream_part(df, 'first').online_acc.item() == pytest.approx(20)
    assert stream_part(df, 'last').online_acc.item() == pytest.approx(80)


def test_every_judged_part_is_measured():
    streams, stages = made_up_streams(), made_up_stages()
    for claim in CLAIMS:
        evidence = [streams] if claim.needs == ('streams',) else stages
        verdict = judge(claim.id, *evidence, scale='laptop')
        assert all(p.effect is not None for p in verdict.parts if p.rule.judged), claim.id

"The health of a network: each measure against an independent computation, and a model that stays as it was"
import copy
import json
import math
import os
import socket

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD, Adam
from fastcore.basics import noop
from torch import nn
from torch.nn import functional as F

from reinit_nb.checkpoint import CheckpointCallback
from reinit_nb.cli import reinit_health
from reinit_nb.core import ReinitError
from reinit_nb.frozen import effective_rank, frozen_totals, mutually_frozen
from reinit_nb.health import (
    HEALTH_MEASURES,
    HealthCallback,
    feature_gram,
    health,
    plot_health,
    plot_trainability,
    stable_rank,
    trainability,
    trainability_summary,
)
from reinit_nb.models import model


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(.5), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))

def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 3))

def batch(shape=(6,), n=32, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=g), torch.randint(3, (n,), generator=g)

def value(df, layer, measure): return df[(df.layer == layer) & (df.measure == measure)].value.item()

def learner(net, cbs=(), n=20, opt_func=SGD):
    x, y = batch(n=16 * n)
    dls = DataLoaders(*(DataLoader(list(zip(x, y)), bs=16, shuffle=False, num_workers=0) for _ in range(2)),
                      device='cpu')
    learn = Learner(dls, net, CrossEntropyLossFlat(), opt_func=opt_func, cbs=cbs).remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def test_units():
    net = mlp().eval()
    with torch.no_grad():
        net[0].bias[[2, 5, 7]] = -100.
        net[3].bias[1] = -100.
    x, y = batch()
    df = health(net, (x, y), sharpness=False)
    h1 = net[:2](x)
    h2 = net[:5](x)
    for layer, h in (('0', h1), ('3', h2)):
        activity = h.abs().mean(0)
        assert value(df, layer, 'dormant') == pytest.approx(float((activity <= .025 * activity.mean()).float().mean()))
    assert value(df, '0', 'dormant') >= .25 and value(df, '3', 'dormant') >= .1
    F.cross_entropy(net(x), y).backward()
    total = 0
    for layer in (0, 3):
        activity = net[layer].weight.grad.abs().mean(1)
        inactive = activity <= .01 * activity.mean()
        total += int(inactive.sum())
        assert value(df, str(layer), 'inactive') == pytest.approx(float(inactive.float().mean()))
    assert value(df, 'all', 'inactive') == pytest.approx(total / 22)

def test_ranks():
    net, (x, y) = conv_net().eval(), batch((2, 4, 4))
    df = health(net, (x, y), sharpness=False)
    for layer, z in (('5', net[:5](x)), ('7', net[:7](x))):
        s = torch.linalg.svdvals(z.detach().double())
        p = s / s.sum()
        entropy = -(p[p > 0] * p[p > 0].log()).sum()
        assert value(df, layer, 'effective_rank') == pytest.approx(float(entropy.exp()), rel=1e-4)
        assert value(df, layer, 'stable_rank') == pytest.approx(float(s.square().sum() / s[0]**2), rel=1e-6)
    assert value(df, 'all', 'stable_rank') == value(df, '7', 'stable_rank')
    assert stable_rank(torch.zeros(3, 3)) == 0 and stable_rank(torch.eye(3)) == pytest.approx(3)

def test_norms_frozen_filters_and_sharpness():
    net, (x, y) = mlp().eval(), batch()
    with torch.no_grad():
        for p in (net[0].weight, net[0].bias): p[3] = 0
        net[3].weight[:, 3] = 0
    df = health(net, (x, y))
    assert value(df, 'all', 'frozen') == frozen_totals(mutually_frozen(net, x)).frozen_share[0] == pytest.approx(1 / 22)
    F.cross_entropy(net(x), y).backward()
    weights = [net[i].weight for i in (0, 3, 5)]
    for measure, tensors in (('weight_norm', weights), ('gradient_norm', [w.grad for w in weights])):
        assert value(df, 'all', measure) == pytest.approx(math.sqrt(sum(float(t.norm())**2 for t in tensors)), rel=1e-5)
    params = [p.detach().clone() for p in net.parameters()]
    sizes = [p.numel() for p in params]
    def loss(flat):
        parts = [t.view_as(p) for t, p in zip(flat.split(sizes), params)]
        names = [n for n, _ in net.named_parameters()]
        return F.cross_entropy(torch.func.functional_call(net, dict(zip(names, parts)), (x,)), y)
    dense = torch.autograd.functional.hessian(loss, torch.cat([p.flatten() for p in params]))
    assert value(df, 'all', 'sharpness') == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=.02)
    assert set(df.measure) == set(HEALTH_MEASURES) - {'update_norm', 'trainability'}

def test_weights_that_a_layer_computes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))
    df = health(net, batch())
    own = net[0].parametrizations.weight
    norm = math.sqrt(sum(float(p.norm())**2 for p in (own.original0, own.original1, net[2].weight)))
    assert value(df, 'all', 'weight_norm') == pytest.approx(norm, rel=1e-5)
    assert set(df.measure) == {'frozen', 'weight_norm', 'gradient_norm', 'sharpness'}   # units are not followed

@pytest.mark.parametrize('sharpness', [False, True])
def test_a_training_that_diverges_goes_on(sharpness):
    net = mlp()
    with torch.no_grad(): net[0].weight[0, 0] = math.nan
    learn = learner(net)
    learn.fit(1, .1, cbs=HealthCallback(5, sharpness=sharpness))
    df = learn.health.df
    assert df.step.max() == 19 and df[(df.layer == 'all') & (df.measure != 'frozen')].value.isna().all()
    whole = health(net, batch(), sharpness=sharpness).query('layer == "all"')
    assert whole.value.isna().all() and ('sharpness' in set(whole.measure)) == sharpness

def test_batches_are_averaged():
    net, (x, y) = mlp(), batch()
    one = health(net, (x, y), sharpness=False)
    several = health(net, [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])], sharpness=False)
    pd.testing.assert_frame_equal(one, several, rtol=1e-4)

def test_ranks_do_not_depend_on_the_last_batch():
    net, (x, y) = mlp(), batch(n=64)
    one = health(net, (x, y), sharpness=False)
    several = health(net, [(x[:60], y[:60]), (x[60:], y[60:])], sharpness=False)
    assert value(one, 'all', 'effective_rank') > 4
    assert value(several, 'all', 'effective_rank') == pytest.approx(value(one, 'all', 'effective_rank'), rel=1e-4)

def test_ranks_of_wide_features_take_the_smaller_gram_matrix():
    z = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    gram = feature_gram(z, True)
    s = torch.linalg.svdvals(z.double())
    p = s / s.sum()
    assert gram.shape == (20, 20) and stable_rank(gram) == pytest.approx(float(s.square().sum() / s[0]**2))
    assert effective_rank(gram)[0] == pytest.approx(float((-p * p.log()).sum().exp()), rel=1e-5)
    images = torch.randn(3, 4, 5, 5)
    assert feature_gram(images, False).shape == (4, 4) and feature_gram(images, False, 3).shape == (3, 3)

def test_a_step_that_was_skipped_is_not_measured():
    class Skip(Callback):
        order = 10
        def before_step(self):
            if self.train_iter < 3: raise CancelStepException()
    cb = HealthCallback(5)
    learner(mlp(), [cb, Skip()]).fit(1, .1)
    assert cb.df.step.unique().tolist() == [0, 5, 10, 15] and cb.step == 17
    assert (cb.df[cb.df.measure == 'update_norm'].value > 0).all()

@pytest.mark.parametrize('make,shape', [(mlp, (6,)), (conv_net, (2, 4, 4))])
def test_the_model_stays_as_it_was(make, shape):
    net, (x, y) = make().train(), batch(shape)
    F.cross_entropy(net(x), y).backward()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    grads = [p.grad.clone() for p in net.parameters()]
    rng = torch.get_rng_state()
    health(net, (x, y))
    trainability(net, x, 3, seeds=1)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads))
    assert all(m.training and not m._forward_pre_hooks for m in net.modules())
    assert torch.equal(rng, torch.get_rng_state())

class Watch(Callback):
    order = 80
    def __init__(self): self.weights = []
    def before_step(self): self.old = [p.detach().clone() for p in self.model.parameters() if p.ndim > 1]
    def after_step(self):
        new = [p.detach() for p in self.model.parameters() if p.ndim > 1]
        self.weights.append(math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(self.old, new))))

def test_callback():
    net, cb, watch = mlp(), HealthCallback(6, ranks='all'), Watch()
    learn = learner(net)
    learn.fit(1, .05, cbs=[cb, watch])
    df = learn.health.df
    assert df.step.unique().tolist() == [0, 6, 12, 18, 19]
    whole = df[df.layer == 'all']
    for measure in ('dormant', 'inactive', 'frozen', 'effective_rank', 'stable_rank', 'weight_norm', 'gradient_norm',
                    'update_norm', 'loss'):
        assert len(whole[whole.measure == measure]) == 5, measure
    updates = whole[whole.measure == 'update_norm'].set_index('step').value
    assert updates.tolist() == pytest.approx([watch.weights[i] for i in updates.index])
    assert len(learn.health.plot()) == 8
    assert not any(m._forward_pre_hooks for m in net.modules())

def test_the_callback_changes_nothing():
    a, b = mlp(), mlp()
    torch.manual_seed(1)
    learner(a, opt_func=Adam).fit(1, .01)
    torch.manual_seed(1)
    learner(b, opt_func=Adam).fit(1, .01, cbs=HealthCallback(3, sharpness=True))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))

def test_resumed_is_never_stopped(tmp_path):
    class Die(Callback):
        order = 2000
        def after_batch(self):
            if self.learn.training and self.learn.train_iter == 27: raise KeyboardInterrupt
    def run(net, path, *cbs):
        cb = HealthCallback(4)
        torch.manual_seed(3)
        learner(net).fit(2, .05, cbs=[cb, CheckpointCallback(path, 5), *cbs])
        return cb.df
    whole = run(mlp(), tmp_path / 'a.pth')
    with pytest.raises(KeyboardInterrupt): run(mlp(), tmp_path / 'b.pth', Die())
    resumed = run(mlp(9), tmp_path / 'b.pth')
    pd.testing.assert_frame_equal(whole, resumed)

def test_trainability_tells_a_dead_network_from_a_live_one():
    x, _ = batch(n=64)
    dead = mlp()
    with torch.no_grad(): dead[3].bias -= 100
    table = trainability_summary(trainability(dead, x, 150, lr=.01, seeds=2)).set_index('start')
    assert table.loss['this'] > 1 and table.loss['fresh'] < table.loss['this'] - .1
    live = trainability(mlp(), x, 5, seeds=1)
    assert live.groupby('start').size().to_dict() == dict(fresh=5, this=5)
    assert live[live.step == 0].loss.nunique() == 2
    assert len(plot_trainability(live).lines) == 2

def test_figures():
    net, data = conv_net(), batch((2, 4, 4))
    df = health(net, data)
    axs = plot_health(df)
    assert [ax.get_title() for ax in axs] == [m.replace('_', ' ') for m in HEALTH_MEASURES
                                                if m not in ('update_norm', 'trainability')]
    df = health(net, data, sharpness=False, steps=8)
    axs = plot_health(df)
    assert axs[-1].get_title() == 'trainability' and len(axs[-1].patches) == 1
    fitted = trainability_summary(trainability(net, data, 8)).set_index('start').loss
    assert value(df, 'all', 'trainability') == pytest.approx(fitted['this'] / fitted['fresh'])

class PerToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x): return self.out(self.embedding(x))

def test_networks_that_cannot_be_measured_are_refused():
    with pytest.raises(ReinitError, match='all parameters are frozen'): health(mlp().requires_grad_(False), batch())
    with pytest.raises(ReinitError, match=r'shape \(1, 5, 11\) for one example: random labels need a classifier'):
        trainability(PerToken(), torch.randint(11, (16, 5)), steps=2)

def test_errors():
    with pytest.raises(ReinitError, match='nothing was measured yet'): HealthCallback().plot()
    with pytest.raises(ReinitError, match='every=0'): HealthCallback(0)
    with pytest.raises(ReinitError, match='tau=-1'): health(mlp(), batch(), tau=-1)
    with pytest.raises(ReinitError, match='steps=-1'): health(mlp(), batch(), steps=-1)
    x, _ = batch()
    for kw, says in ((dict(bs=0), 'bs=0'), (dict(lr=-1), 'lr=-1'), (dict(seeds=0), 'seeds=0'),
                     (dict(steps=0), 'steps=0'), (dict(init='foo'), "init='foo'")):
        with pytest.raises(ReinitError, match=says): trainability(mlp(), x, **dict(steps=2) | kw)
    with pytest.raises(ReinitError, match='x has no inputs'): trainability(mlp(), x[:0], 2)
    with pytest.raises(ReinitError, match='Linear has one output'): trainability(nn.Linear(6, 1), x, 2)
    fitted = trainability(mlp(), x, 2, seeds=1)
    for last in (0, 5):
        with pytest.raises(ReinitError, match=f'last={last}'): trainability_summary(fitted, last)

# ---------------------------------------------------------------- several processes

def work(rank, port, out):
    "Train one network on batches of its own"
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    torch.manual_seed(0)
    for p in net.parameters(): nn.init.normal_(p, std=.3)
    start = copy.deepcopy(net.state_dict())
    x, y = batch(n=48, seed=rank)
    data = list(zip(x, y))
    dls = DataLoaders(*(DataLoader(data, bs=16, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')
    learn = Learner(dls, net, CrossEntropyLossFlat(), opt_func=SGD).remove_cb(ProgressCallback)
    learn.logger = noop
    learn.model = nn.parallel.DistributedDataParallel(net)
    cb = HealthCallback(2, sharpness=True)
    learn.fit(1, .05, cbs=cb)
    torch.save(dict(rows=cb.rows, start=start, batch=(x[:16], y[:16])), f'{out}/rank{rank}.pt')
    dist.destroy_process_group()

@pytest.mark.slow
def test_processes_measure_the_batches_of_all(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('torch was built without gloo')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    a, b = (torch.load(tmp_path / f'rank{r}.pt', weights_only=False) for r in range(2))
    assert a['rows'] == b['rows'] and len({row[0] for row in a['rows']}) == 2
    # the first measurement is that of one process with both batches
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    net.load_state_dict(a['start'])
    x, y = (torch.cat(parts) for parts in zip(a['batch'], b['batch']))
    whole = health(net, (x, y), sharpness=False)
    found = {row[2:4]: row[4] for row in a['rows'] if row[0] == 0}
    for measure in ('dormant', 'inactive', 'effective_rank', 'stable_rank', 'gradient_norm'):
        assert found['all', measure] == pytest.approx(value(whole, 'all', measure), rel=1e-4), measure
    assert found['all', 'loss'] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-5)

# ---------------------------------------------------------------- the command

ARCH = '--arch reinit_nb:scnn --option width=0.125 --option c_in=1 --option size=8 --size 8'.split()

@pytest.fixture
def checkpoint(tmp_path):
    net = model('scnn', c_in=1, size=8, width=.125)
    file = tmp_path / 'net.pth'
    torch.save(net.state_dict(), file)
    return file

def test_command(checkpoint, capsys):
    assert reinit_health([str(checkpoint), *ARCH, '--data', 'digits', '--examples', '64', '--steps', '10']) == 0
    out = capsys.readouterr().out
    assert 'dormant' in out and 'random labels' in out and 'fresh network' in out
    assert reinit_health([str(checkpoint), *ARCH, '--examples', '32', '--steps', '0', '--no-sharpness', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row['measure'] for row in found['layers']} == set(HEALTH_MEASURES) - {
        'update_norm', 'sharpness', 'trainability'}
    assert found['data'] == 'noise' and found['trainability'] is None

def test_the_command_has_one_table(checkpoint, capsys):
    argv = [str(checkpoint), *ARCH, '--examples', '32', '--steps', '6', '--no-sharpness', '--json']
    assert reinit_health(argv) == 0
    found = json.loads(capsys.readouterr().out)
    loss = {row['start']: row['loss'] for row in found['trainability']}
    row, = [row for row in found['layers'] if row['measure'] == 'trainability']
    assert row['value'] == pytest.approx(loss['this'] / loss['fresh'], rel=1e-4)

def test_data_with_more_classes_than_outputs_are_refused(tmp_path, capsys):
    file = tmp_path / 'net.pth'
    torch.save(model('scnn', c_in=1, size=8, width=.125, n_out=3).state_dict(), file)
    argv = [str(file), *ARCH, '--option', 'n_out=3', '--data', 'digits', '--examples', '64', '--steps', '0']
    assert reinit_health(argv) == 2
    assert '--data digits has labels up to 9, and the network 3 outputs' in capsys.readouterr().err

def test_command_with_a_figure(checkpoint, tmp_path):
    figure = tmp_path / 'health.png'
    argv = [str(checkpoint), *ARCH, '--examples', '32', '--steps', '0', '--no-sharpness', '--figure', str(figure)]
    assert reinit_health(argv) == 0 and figure.stat().st_size > 1000

@pytest.mark.parametrize('argv,says', [
    ('net.pth', 'which network? Give --arch'), ('--arch resnet18', 'which file?'),
    ('net.pth --arch resnet18 --examples 0', '--examples=0'), ('net.pth --arch resnet18 --steps -1', '--steps=-1')])
def test_wrong_commands(argv, says, capsys):
    assert reinit_health(argv.split()) == 2
    assert says in capsys.readouterr().err

"The runs of the stacks as ordinary loops: one network, a torch optimizer, one step at a time. Slow, and easy to check"
import itertools
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from reinit_nb.core import Streams
from reinit_nb.ensemble import STACK_ACTIVATIONS
from reinit_nb.fixed_norm import FixedNorm
from reinit_nb.freezing import temporarily_frozen
from reinit_nb.init import draw_weights
from reinit_nb.reinit import layerwise_weights, method_masks, norm_of, output_stats, redraw
from reinit_nb.studies.freezing import RESERVOIR_REGULARIZERS, reservoir_data, reservoir_network
from reinit_nb.synthetic import make_synthetic

# ---------------------------------------------------------------- MLPs on the synthetic task

class Activation(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn
    def forward(self, z): return self.fn(z)

def mlp(run, streams, dtype):
    "Linear layers, activations, and a fixed norm after each layer"
    layers = []
    for n_in, n_out in itertools.pairwise(run.dims):
        linear = nn.Linear(n_in, n_out, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(draw_weights((n_out, n_in), run.init, streams.init, dtype))
            linear.bias.zero_()
        layers += [linear, Activation(STACK_ACTIVATIONS[run.act].fn), FixedNorm().to(dtype)]
    del layers[-2]   # no activation after the head
    return nn.Sequential(*layers)

def linears(net): return [m for m in net if isinstance(m, nn.Linear)]

def mlp_optimizer(run, net):
    *hidden, head = linears(net)
    groups = [dict(params=[m.weight for m in hidden], weight_decay=run.l2)] if hidden else []
    groups.append(dict(params=[head.weight], weight_decay=run.l2 * run.l2_head))
    groups.append(dict(params=[m.bias for m in (*hidden, head)]))
    if run.opt == 'adam': return torch.optim.Adam(groups, lr=run.lr)
    return torch.optim.SGD(groups, lr=run.lr, momentum=run.momentum)

def begin_layerwise_round(run, k, net, norms, streams, x):
    "LW, Algorithm 1"
    layers = linears(net)
    weights = [m.weight for m in layers]
    fresh = None
    if run.redraw: fresh = [draw_weights(w.shape, run.init, streams.reinit, w.dtype) for w in weights[k:]]
    for layer, w in zip(layers, layerwise_weights(weights, k, norms if run.rescale else None, fresh)):
        layer.weight.copy_(w)
    if run.redraw:
        for layer in layers[k:]: layer.bias.zero_()
    if not run.normalize or (k == len(layers) and not run.normalize_head): return
    norm = [m for m in net if isinstance(m, FixedNorm)][k - 1]
    z = net[:list(net).index(norm)](x)   # before this norm
    if z.std() == 0: return
    mu, sigma = output_stats(z)
    norm.mu.copy_(mu)
    norm.sigma.copy_(sigma)

@torch.no_grad()
def begin_round(run, r, net, norms, streams, x):
    "Do what a method does before round `r`; did anything happen?"
    if run.method == 'BL' or (r == 0 and run.method != 'LW'): return False
    if run.method == 'LW':
        begin_layerwise_round(run, run.ks[r], net, norms, streams, x)
        return True
    layers = linears(net)
    weights = [m.weight for m in layers]
    masks = method_masks(run.method, weights, streams, run.frac, run.scope, run.ks[r])
    for layer, w, mask in zip(layers, redraw(weights, masks, streams, run.init), masks):
        if mask is None: continue
        layer.weight.copy_(w)
        if mask.all(): layer.bias.zero_()
    return True

@torch.no_grad()
def measure_mlp(run, r, net, data):
    "One row, as `run_mlps` has it"
    x, y, x_test, y_test = data
    weights = [m.weight for m in linears(net)]
    def accuracy(x, y): return (net(x).argmax(1) == y).double().mean()
    row = dict(train_acc=accuracy(x, y), test_acc=accuracy(x_test, y_test))
    row |= {f'norm{i}': norm_of(w) for i, w in enumerate(weights, 1)}
    row['signal'] = weights[0][:, :run.task.bits].square().mean().sqrt()
    row['noise'] = weights[0][:, run.task.bits:].square().mean().sqrt()
    return dict(round=r + 1, step=(r + 1) * run.steps, **{k: v.item() for k, v in row.items()})

def minibatches(run, streams):
    "Endless minibatches of positions"
    n = run.task.n_train
    if run.batch is None or run.batch >= n: return itertools.repeat(slice(None))
    return (i for _ in itertools.count() for i in torch.randperm(n, generator=streams.data).split(run.batch))

def mlp_loop(run, dtype=torch.float32):
    "The trained network of an `MLPRun`, and one row per round"
    streams = Streams(run.seed)
    data = [t.to(dtype) if t.is_floating_point() else t for t in make_synthetic(run.task, streams)]
    x, y = data[:2]
    net = mlp(run, streams, dtype)
    norms = [norm_of(m.weight.detach()) for m in linears(net)]
    opt, order, rows = mlp_optimizer(run, net), minibatches(run, streams), []
    for r in range(run.rounds):
        acted = begin_round(run, r, net, norms, streams, x)
        if acted and run.opt_state == 'zero': opt = mlp_optimizer(run, net)
        for i in itertools.islice(order, run.steps):
            opt.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            opt.step()
        rows.append(measure_mlp(run, r, net, data))
    return net, rows

# ---------------------------------------------------------------- reservoirs

class SeededDropout(nn.Module):
    "Dropout with noise from a generator"
    def __init__(self, p, generator):
        super().__init__()
        self.p, self.generator = p, generator
    def forward(self, h):
        if not self.training: return h
        return h * (torch.rand(h.shape, generator=self.generator) >= self.p) / (1 - self.p)

def seed_dropout(net, generator):
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout): setattr(module, name, SeededDropout(child.p, generator))
    return net

def reservoir_epochs(run, net, x, y, streams):
    "Train an ordinary network, a pass at a time"
    opt = torch.optim.Adam(net.parameters(), lr=run.lr)
    l1 = RESERVOIR_REGULARIZERS[run.regularizer].get('l1', 0.)
    for epoch in range(1, run.epochs + 1):
        for i in torch.randperm(len(x), generator=streams.data).split(run.batch):
            opt.zero_grad()
            loss = F.cross_entropy(net.train()(x[i]), y[i])
            if l1: loss = loss + l1 * sum(p.abs().sum() for p in net.parameters() if p.ndim > 1)
            loss.backward()
            opt.step()
        yield epoch

def reservoir_loop(run):
    "The trained network of a `ReservoirRun`, and rows epoch, train_acc, test_acc"
    x, y, x_test, y_test, classes = reservoir_data(run)
    streams, rows = Streams(run.seed), []
    net = seed_dropout(reservoir_network(run, x.shape[1], classes), streams.noise)
    @torch.no_grad()
    def accuracy(x, y): return float((net.eval()(x).argmax(1) == y).double().mean())
    hold = temporarily_frozen(net, of='reservoirs', share=run.frozen, seed=run.seed) if run.frozen else nullcontext()
    with hold:
        for epoch in reservoir_epochs(run, net, x, y, streams):
            if epoch not in (*run.looks, run.epochs): continue
            rows.append(dict(epoch=epoch, train_acc=accuracy(x, y), test_acc=accuracy(x_test, y_test)))
    return net, rows

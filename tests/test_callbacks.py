"Methods as callbacks: with models that other people wrote, with fastai's other callbacks, and with wrong input"
import copy
import io
import math
import pickle
import warnings
from functools import partial

import fastai.callback.schedule  # noqa: F401  adds lr_find and fit_one_cycle
import numpy as np
import pytest
import torch
import torchvision.models as tv
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import BnFreeze, GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, OptimWrapper, ranger
from fastcore.basics import noop
from torch import nn
from torch.nn.utils import prune

from reinit_nb import baselines
from reinit_nb.between import InterveneCallback
from reinit_nb.checkpoint import CheckpointCallback, read_checkpoint
from reinit_nb.core import ReinitError
from reinit_nb.fixed_norm import FixedNorm
from reinit_nb.freezing import FrozenLayersCallback
from reinit_nb.frozen import MutuallyFrozenCallback
from reinit_nb.init import drawn_weights
from reinit_nb.lw import LayerwiseCallback
from reinit_nb.models import model
from reinit_nb.prefix_cache import CachedPrefixCallback
from reinit_nb.rounds import RoundCallback, RoundPlan, apply_once, find_blocks, modules_of, plan_table
from reinit_nb.separability import SeparabilityCallback
from reinit_nb.spectrum import SpectrumCallback, grid_probe
from reinit_nb.vision import Task, image_dls

OWN = dict(LayerwiseCallback=dict(blocks=2), DenseSparseDenseCallback={}, LLFCallback=dict(layer='block3', rounds=2))
# each method of this package: class name → constructor, for two rounds (three phases, where they are fixed)
METHODS = {cls.__name__: partial(cls, **OWN.get(cls.__name__, dict(rounds=2))) for cls in baselines.METHODS.values()}

def R(make): return 3 if 'Sparse' in make.func.__name__ else 2
def rounds_seen(cb): return set(cb.log['round']) == set(range(cb.first_round, cb.round + 1))
each_method = pytest.mark.parametrize('make', METHODS.values(), ids=METHODS)

def net(norm='batch', **kw): return model('scnn', c_in=1, size=8, width=.25, norm=norm, **kw)

def digits(m=None, n=110, opt_func=SGD, splitter=None, path=None, **kw):
    "A small network on 99 digits, three batches an epoch"
    kw |= dict(splitter=splitter) if splitter else {}
    data = image_dls(Task('digits', n_train=n), bs=32, device='cpu')
    learn = Learner(data, m or net(), metrics=accuracy, opt_func=opt_func, path=path, **kw)
    learn.logger = noop
    return learn.remove_cb(ProgressCallback)

def state(m): return {k: v.detach().clone() for k, v in m.state_dict().items()}
def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

class Snap(Callback):
    "Parameters and gradients right before a round may begin"
    order, run_valid = RoundCallback.order - .1, False
    def before_batch(self):
        self.old = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.grads = any(p.grad is not None and p.grad.any() for p in self.model.parameters())

class At(Callback):
    "Call `f(cb, r, snap)` right after round `r` of `cb` has begun"
    order, run_valid = RoundCallback.order + .1, False
    def __init__(self, cb, f): self.cb, self.f, self.seen = cb, f, []
    def before_batch(self):
        if self.cb.round in self.seen: return
        self.seen.append(self.cb.round)
        self.f(self.cb, self.cb.round, self.learn.snap)

def at_rounds(cb, f): return [cb, Snap(), At(cb, f)]

class Record(Callback):
    "Learning rates of all groups by batch, and the state of the network by epoch"
    order = 100
    def __init__(self): self.lrs, self.states, self.values = [], [], []
    def after_batch(self): self.lrs += [[h['lr'] for h in self.opt.hypers]] * self.training
    def after_epoch(self):
        self.states.append(state(self.model))
        self.values.append(self.recorder.log[2])

class Stop(Callback):
    "Ctrl-C after some batches"
    order, run_valid = 100, False
    def __init__(self, n): self.n = n
    def after_batch(self):
        self.n -= 1
        if self.n == 0: raise KeyboardInterrupt

# ---------------------------------------------------------------- what is planned is what happens

def check_plan(plan, model):
    "Every parameter is there once in each round"
    names = [n for n, _ in model.named_parameters()]
    for _, g in plan.groupby('round'): assert sorted(g.parameter) == sorted(names)
    assert (plan.entries == plan.parameter.map({n: p.numel() for n, p in model.named_parameters()})).all()

def compare(plan, norm0, model, r, old):
    "The network after the intervention of round `r` against the plan and the network before"
    now, ws = dict(model.named_parameters()), drawn_weights(model)
    for n, a in plan[plan['round'] == r].set_index('parameter').action.items():
        p, q = now[n].detach(), old[n]
        if a == 'kept': assert torch.equal(p, q), (r, n)
        elif a == 'redrawn': assert n not in ws or (p != q).float().mean() > .99, (r, n)   # two draws may meet
        elif a == 'rescaled':
            assert abs(p.norm() / norm0[n] - 1) < 1e-4, (r, n)
            assert torch.allclose(p / p.norm(), q / q.norm(), atol=1e-5), (r, n)
        elif a == 'pruned': assert ((p == q) | (p == 0)).all() and ((p == 0) & (q != 0)).any(), (r, n)
        elif a == 'masked': assert (p != q).any() and (p == q).any(), (r, n)
        else: assert not torch.equal(p, q), (r, n, a)

def plan_holds(learn, cb, n_epoch, lr=.01):
    "Fit, and see that everything happens as planned; gives the rounds seen"
    m = learn.model
    plan = cb.plan(m)
    norm0 = {n: p.detach().norm() for n, p in m.named_parameters()}
    names = list(norm0)
    check_plan(plan, m)
    cbs = at_rounds(cb, lambda cb, r, snap: compare(plan, norm0, m, r, snap.old))
    learn.fit(n_epoch, lr, cbs=cbs)
    log = cb.log
    assert cbs[2].seen == sorted(plan['round'].unique()) and [n for n, _ in m.named_parameters()] == names
    sure = plan[plan['round'] >= cb.first_round].groupby(['round', 'block']).redrawn.sum(min_count=1).dropna()
    got = log.set_index(['round', 'block']).redrawn
    for (r, block), n in sure.items():
        rows = plan[(plan['round'] == r) & (plan.block == block)]
        assert rows.redrawn.isna().any() or got[r, block] == n
    return plan

def stands_alone(m, x):
    "The trained model without its callback: copies and pickles give the same outputs"
    m.eval()
    with torch.no_grad():
        y = m(x)
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            assert torch.equal(other(x), y) and same(state(other), state(m)) and y.isfinite().all()

@each_method
def test_plan_is_what_happens(make):
    learn = digits()
    plan_holds(learn, make(), 2 * R(make), .05)
    stands_alone(learn.model, learn.dls.one_batch()[0])

def random_images(size, n=4, bs=2, c=5):
    "Data for a Learner: two batches of random images"
    g = torch.Generator().manual_seed(0)
    ds = [(torch.randn(3, size, size, generator=g), i % c) for i in range(n)]
    return DataLoaders(DataLoader(ds, bs=bs, num_workers=0), DataLoader(ds, bs=bs, num_workers=0), device='cpu')

def any_learner(m, size, **kw):
    learn = Learner(random_images(size), m, loss_func=CrossEntropyLossFlat(), opt_func=SGD, **kw)
    learn.logger = noop
    return learn.remove_cb(ProgressCallback)

def fastai_model(arch):
    from fastai.vision.learner import create_vision_model
    return create_vision_model(arch, 5, pretrained=False)
def small_vit():
    return tv.VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32,
                                num_classes=5)
def small_swin(): return tv.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=5)
def small_convnext():
    from torchvision.models.convnext import CNBlockConfig
    return tv.ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, 48, 2), CNBlockConfig(48, None, 1)], num_classes=5)

def classes(f, **kw): return partial(f, num_classes=5, **kw)
ZOO = dict(
    alexnet=(partial(fastai_model, tv.alexnet), 64), vgg11_bn=(partial(fastai_model, tv.vgg11_bn), 32),
    resnet18=(classes(tv.resnet18), 32), vit=(small_vit, 32), swin=(small_swin, 32), convnext=(small_convnext, 32),
    mobilenet_v3_small=(classes(tv.mobilenet_v3_small), 32), densenet121=(classes(tv.densenet121), 32),
    squeezenet1_1=(classes(tv.squeezenet1_1), 64), shufflenet=(classes(tv.shufflenet_v2_x0_5), 32),
    googlenet=(classes(tv.googlenet, aux_logits=False, init_weights=False), 64))

def trained_by_lw(m, size, K=2):
    "LW on any model, in K rounds of two batches"
    learn = any_learner(m, size)
    plan_holds(learn, LayerwiseCallback(blocks=K), K, 1e-4)
    log = learn.layerwise.log
    assert log[log.sigma > 0].block.tolist() == find_blocks(m).names[:K]
    norms = [o for o in m.modules() if isinstance(o, FixedNorm)]
    assert [o.sigma.item() for o in norms] == log[log.sigma > 0].sigma.tolist()
    stands_alone(m, learn.dls.one_batch()[0])

@pytest.mark.parametrize('name', ZOO)
def test_torchvision(name):
    make, size = ZOO[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained_by_lw(make(), size)

TIMM = dict(vit_tiny_patch16_224=dict(img_size=32, depth=3), convnext_atto=dict(), efficientnet_lite0=dict(),
            mobilenetv3_small_050=dict(), mixer_s32_224=dict(img_size=32))

@pytest.mark.parametrize('name', TIMM)
def test_timm(name):
    timm = pytest.importorskip('timm', reason='timm is not installed: its models are not trained')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained_by_lw(timm.create_model(name, pretrained=False, num_classes=5, **TIMM[name]), 32)

LARGE = ['resnet50', 'convnext_tiny', 'swin_t', 'vit_b_16', 'efficientnet_b0', 'mnasnet0_5', 'wide_resnet50_2',
         'maxvit_t']

@pytest.mark.parametrize('name', LARGE)
def test_large_models_are_planned(name):
    with torch.device('meta'): m = tv.get_model(name)
    plan = LayerwiseCallback(rescale=False).plan(m)
    check_plan(plan, m)
    first = plan[plan['round'] == 1]
    assert (plan.action == 'redrawn').any() and first[first.action == 'kept'].block.nunique() == 1

# ---------------------------------------------------------------- fastai's other callbacks

class Drop(nn.Module):
    "A network with dropout after its blocks"
    def __init__(self, m):
        super().__init__()
        self.body = nn.Sequential(*list(m)[:-1])
        self.drop = nn.Dropout(.3)
        self.head = m[-1]
    def forward(self, x): return self.head(self.drop(self.body(x)))

@pytest.mark.parametrize('norm', ['none', 'batch', 'layer'])
def test_norms_and_dropout(norm):
    learn = digits(Drop(net(norm)))
    plan_holds(learn, LayerwiseCallback(), 4)
    stands_alone(learn.model, learn.dls.one_batch()[0])

two_blocks = partial(LayerwiseCallback, blocks=2)

def fitted(make=two_blocks, n=None, lr=.05, learn=None, cbs=(), **kw):
    "A Learner after a fit"
    learn = learn or digits(**kw)
    learn.fit(n or 2 * R(make), lr, cbs=[make(), *cbs])
    return learn

def rounds_of(learn): return next(v for v in vars(learn).values() if isinstance(v, RoundCallback))

HALF = [(make, 'to_fp16') for make in METHODS.values()] + [(METHODS['LayerwiseCallback'], 'to_bf16')]

@pytest.mark.parametrize('make,half', HALF, ids=[*METHODS, 'bf16'])
def test_mixed_precision_without_a_gpu(make, half):
    "There fastai's mixed precision is off: every bit is as without it"
    learn = digits()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # that there is no GPU
        fitted(make, learn=getattr(learn, half)())
    plain = fitted(make)
    assert same(state(learn.model), state(plain.model)) and rounds_of(learn).log.equals(rounds_of(plain).log)

class HalfOnCPU(MixedPrecision):
    "fastai's mixed precision with the autocast of a CPU"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)
    def after_pred(self):
        self.seen = self.pred.dtype
        super().after_pred()

@each_method
@pytest.mark.filterwarnings('ignore:.*CUDA is not available')
def test_mixed_precision(make):
    learn, half = digits(), HalfOnCPU('bf16')
    learn.add_cb(half)
    cb = make()
    plan_holds(learn, cb, 2 * R(make), .05)
    assert half.seen == torch.bfloat16
    if cb.first_round == 1:
        plain = fitted(make).layerwise.log.query('round==1')   # measured in single precision
        assert cb.log.query('round==1').equals(plain.assign(steps_back=cb.log.steps_back))
    assert {t.dtype for t in state(learn.model).values()} <= {torch.float32, torch.int64}
    assert all(t.isfinite().all() for t in state(learn.model).values())

@each_method
def test_gradient_accumulation(make):
    "Gradients of the old weights are dropped when something is done to them, and the count begins anew"
    cb, learn = make(), digits()
    def look(cb, r, snap):
        if r < max(cb.first_round, 2) or r % 2: return   # at the third there is nothing left over
        assert snap.grads and not any(p.grad is not None and p.grad.any() for p in learn.model.parameters())
        assert learn.gradient_accumulation.count == 0
    cbs = at_rounds(cb, look)
    learn.fit(R(make), .05, cbs=[*cbs, GradientAccumulation(64)])   # three batches of 32: one is left over
    assert cbs[2].seen == [1, 2, 3][:R(make)] and cb.starts == (0, 3, 6)[:R(make)]

def test_gradient_clip():
    class Steps(Callback):
        order, run_valid = 99, False
        def before_step(self):
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            assert nn.utils.get_total_norm(grads) < 1e-3 + 1e-6
    learn = digits()
    learn.fit(4, .05, cbs=[LayerwiseCallback(), GradientClip(1e-3), Steps()])
    assert learn.layerwise.log['round'].max() == 4

@each_method
def test_save_model(make, tmp_path):
    "What was best is back at the end, norms included, and the log is whole"
    learn, rec = digits(path=tmp_path), Record()
    cb = make()
    worst = SaveModelCallback(comp=np.greater)   # the largest loss is rarely the last
    learn.fit(2 * R(make), .05, cbs=[cb, rec, worst])
    best = int(np.argmax(rec.values))
    assert same(state(learn.model), rec.states[best])
    assert best == 2 * R(make) - 1 or not same(rec.states[best], rec.states[-1])
    assert cb.round == R(make) and rounds_seen(cb) and not cb.losses.isnan().any()

def test_early_stopping():
    learn = digits()
    learn.fit(8, 0., cbs=[LayerwiseCallback(), EarlyStoppingCallback(patience=2, min_delta=100)])
    assert learn.epoch < 7 and learn.layerwise.log['round'].max() == bisect(learn.layerwise.starts, 3 * learn.epoch)
    learn.fit(4, .05, cbs=LayerwiseCallback())
    assert learn.layerwise.log['round'].max() == 4

def bisect(starts, at): return sum(s <= at for s in starts)

@each_method
def test_looking_changes_nothing(make):
    "lr_find, validate, get_preds and tta before, between and after fits"
    learn, cb = digits(), make()
    learn.add_cb(cb)
    def look():
        before, log, r = state(learn.model), cb.log, cb.round
        learn.validate()
        learn.get_preds()
        learn.tta(n=1)
        learn.lr_find(num_it=6, show_plot=False)
        learn.get_preds(ds_idx=0)
        assert same(state(learn.model), before) and cb.log.equals(log) and cb.round == r
    look()
    assert cb.round == 0 and not any(isinstance(m, FixedNorm) for m in learn.model.modules())
    for _ in range(2):
        learn.fit(R(make), .05)
        assert cb.round == R(make)
        look()
    once = digits()
    once.fit(R(make), .05, cbs=make())
    again = digits()
    again.add_cb(make())
    again.validate()
    again.fit(R(make), .05)
    assert same(state(once.model), state(again.model))

class Look(Callback):
    "Look at validation images after each epoch"
    order = 100
    def after_epoch(self):
        if self.learn.lock.locked(): return   # this is the end of a look
        self.learn.validate()
        self.learn.get_preds()

@each_method
def test_looking_within_a_fit(make):
    a, b = fitted(make), fitted(make, cbs=[Look()])
    assert same(state(a.model), state(b.model))
    assert rounds_of(a).log.equals(rounds_of(b).log)
    assert rounds_of(b).round == R(make)

def test_interrupted_lr_find():
    "The fit after it has its rounds"
    learn = digits()
    learn.add_cb(LayerwiseCallback(blocks=2))
    learn.add_cb(Stop(3))
    with pytest.raises(KeyboardInterrupt): learn.lr_find(num_it=20, show_plot=False)
    learn.fit(2, .05)
    assert learn.layerwise.round == 2

@each_method
@pytest.mark.parametrize('attached', [True, False])
def test_export(make, attached, tmp_path):
    learn = digits(path=tmp_path)
    if attached: learn.add_cb(make())
    learn.fit(R(make), .05, cbs=[] if attached else make())
    x, y = learn.dls.valid.one_batch()
    learn.export('model.pkl')
    other = load_learner(tmp_path / 'model.pkl', cpu=True)
    assert same(state(other.model), state(learn.model))
    dl = DataLoader(list(zip(x, y)), bs=8, num_workers=0)
    assert torch.equal(other.get_preds(dl=dl)[0], learn.get_preds(dl=dl)[0]) and rounds_of(learn).round == R(make)
    if attached:   # and it can be trained on
        other.dls, other.logger = learn.dls, noop
        other.fit(R(make), .05)
        assert rounds_of(other).round == R(make) and not same(state(other.model), state(learn.model))

@pytest.mark.parametrize('strict', [True, False])
def test_load(strict, tmp_path):
    "Weights with norms and without, for a Learner whose callback has not begun"
    plain, normed = digits(path=tmp_path), fitted(path=tmp_path)
    for name, learn in (('plain', plain), ('normed', normed)):
        learn.save(name, with_opt=False)   # fastai's own: the weights are enough
        other = digits(path=tmp_path, cbs=LayerwiseCallback(blocks=2))
        other.load_rounds(name, with_opt=False, strict=strict)
        now = state(other.model)
        assert all(torch.equal(now[k], v) for k, v in state(learn.model).items())
        assert torch.equal(other.get_preds()[0], learn.get_preds()[0])
        other.fit(2, .05)
        assert other.layerwise.round == 2
    wrong = digits(net('none'), path=tmp_path, cbs=LayerwiseCallback(blocks=2))
    if strict:
        with pytest.raises(RuntimeError, match='Unexpected key'): wrong.load_rounds('plain', with_opt=False)

def test_csv_logger(tmp_path):
    learn = digits(path=tmp_path)
    learn.fit(4, .05, cbs=[LayerwiseCallback(), CSVLogger(fname='log.csv')])
    rows = (tmp_path / 'log.csv').read_text().splitlines()
    assert len(rows) == 5 and [r.split(',')[0] for r in rows] == ['epoch', '0', '1', '2', '3']

@pytest.mark.parametrize('trace', [False, True])
def test_tensorboard(trace, tmp_path):
    pytest.importorskip('tensorboard', reason='tensorboard is not installed')
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn, plain = digits(), fitted()
    for _ in range(2):
        board = TensorBoardCallback(tmp_path, trace_model=trace, log_preds=False)
        learn.fit(4, .05, cbs=[LayerwiseCallback(blocks=2), board])   # the second time with norms
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars('train_loss')) == 2 * 4 * sum(map(len, list(learn.dls)[:2]))
    assert bool(events.Tags()['graph']) == trace
    assert learn.layerwise.round == 2
    if not trace:
        plain.fit(4, .05, cbs=LayerwiseCallback(blocks=2))
        assert same(state(learn.model), state(plain.model))

@each_method
def test_wandb(make, tmp_path, monkeypatch):
    wandb = pytest.importorskip('wandb', reason='wandb is not installed')
    from fastai.callback.wandb import WandbCallback
    run = wandb.init(mode='disabled', dir=tmp_path)
    learn, cb = digits(), make()
    try:
        learn.fit(R(make), .05, cbs=[cb, WandbCallback(log_preds=False)])
        assert f'{type(cb).__name__}' in ' '.join(dict(run.config)) and cb.round == R(make)
    finally: run.finish()
    assert learn.gather_args()

@pytest.mark.parametrize('mix', [MixUp, CutMix])
def test_mixed_images(mix):
    learn = digits()
    plan_holds(learn.add_cb(mix(.5)), LayerwiseCallback(blocks=2), 4, .05)
    assert learn.layerwise.losses.isfinite().all()

def test_frozen_batchnorm_stays_frozen():
    "BnFreeze holds the statistics of layers that are not trained, whichever rounds there are"
    learn = digits(cbs=BnFreeze)
    for n, p in learn.model.named_parameters():
        if n.startswith('block1.'): p.requires_grad_(False)
    before = state(learn.model)
    class Top(RoundCallback):
        "Redraw the head"
        def plan_round(self, blocks, r): return RoundPlan(reset=modules_of(blocks, [blocks.head]))
    learn.fit(2, .05, cbs=Top(rounds=2))
    now = state(learn.model)
    assert all(torch.equal(now[k], v) for k, v in before.items() if k.startswith('block1.')) and learn.top.round == 2
    assert any('running_mean' in k for k in before if k.startswith('block1.'))
    assert not torch.equal(list(now.values())[-1], list(before.values())[-1])

# ---------------------------------------------------------------- schedules and optimizers

SCHEDULES = dict(
    one_cycle=lambda learn, n, cbs: learn.fit_one_cycle(2 * n, .1, cbs=cbs),
    flat_cos=lambda learn, n, cbs: learn.fit_flat_cos(4 * n, .1, cbs=cbs),
    sgdr=lambda learn, n, cbs: learn.fit_sgdr(2, n, .1, cycle_mult=3, cbs=cbs))
WITH_SCHEDULE = [(make, 'one_cycle') for make in METHODS.values()]
WITH_SCHEDULE += [(METHODS['LayerwiseCallback'], k) for k in ('flat_cos', 'sgdr')]

@pytest.mark.parametrize('make,name', WITH_SCHEDULE, ids=[*METHODS, 'flat_cos', 'sgdr'])
def test_schedules_restart(make, name):
    "The rates of each round are those of the first one; with restart=False they are those of a fit without rounds"
    def lrs(*cbs):
        rec = Record()
        SCHEDULES[name](digits(), R(make), [rec, *cbs])
        return np.array(rec.lrs)
    new, plain = lrs(make()), lrs()
    if make.func.__name__ != 'BLCallback':
        first, *others = np.split(new, R(make))
        assert len(np.unique(first)) > 2
        assert all(np.array_equal(first, o) for o in others)
        assert not np.allclose(new, plain)
        new = lrs(make(restart=False))
    assert np.array_equal(new, plain) and len(new) == R(make) * (6 if name == 'one_cycle' else 12)

def test_schedules_count_batches_of_a_round():
    rec, learn = Record(), digits()
    learn.fit_one_cycle(4, .1, cbs=[LayerwiseCallback(blocks=2, steps_per_round=6), rec])
    assert rec.lrs[:6] == rec.lrs[6:] and learn.layerwise.starts == (0, 6)
    rec, learn = Record(), digits()
    with pytest.warns(UserWarning, match='unequally: 4, 8 batches'):
        learn.fit_one_cycle(4, .1, cbs=[LayerwiseCallback(blocks=2, steps_per_round=4), rec])
    assert learn.layerwise.log.step.unique().tolist() == [0, 4]
    assert rec.lrs[0] == rec.lrs[4]
    assert np.allclose(rec.lrs[1], rec.lrs[6])

@each_method
def test_warning_for_unequal_rounds_only(make):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fitted(make)
    said = f'share {R(make)+1} epochs of 3 batches unequally: {"3, "*(R(make)-1)}6 batches'
    with pytest.warns(UserWarning, match=said): fitted(make, n=R(make) + 1)

def halves(m): return [[p for o in part for p in o.parameters()] for part in (list(m)[:2], list(m)[2:])]

def test_discriminative_learning_rates():
    rec, learn = Record(), digits(splitter=halves)
    learn.fit_one_cycle(4, slice(.01, .1), cbs=[LayerwiseCallback(blocks=2), rec])
    lrs = np.array(rec.lrs)
    assert lrs.shape == (12, 2) and np.allclose(lrs[:, 1] / lrs[:, 0], 10) and np.array_equal(lrs[:6], lrs[6:])
    learn = digits(splitter=halves)
    plan_holds(learn, LayerwiseCallback(), 4)

OPTS = dict(sgd=partial(SGD, mom=.9), adam=Adam, ranger=ranger,
            torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9),
            torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW))

def moments(learn):
    "For each parameter, by name: does the optimizer remember anything about it?"
    s = getattr(learn.opt, 'opt', learn.opt).state
    def known(p):
        values = s[p].values() if p in s else ()
        return any(isinstance(v, torch.Tensor) and v.shape == p.shape for v in values)
    return {n: known(p) for n, p in learn.model.named_parameters()}

@pytest.mark.parametrize('policy', ['zero', 'keep', 'slice'])
@pytest.mark.parametrize('opt', OPTS)
def test_optimizer_state(opt, policy):
    "What the optimizer remembers when round 2 begins: of all, of nothing, of what was not redrawn"
    learn, cb = digits(opt_func=OPTS[opt]), LayerwiseCallback(blocks=2, opt_state=policy)
    redrawn = cb.plan(learn.model).query("round==2 and action=='redrawn'").parameter.tolist()
    def look(cb, r, snap):
        if r == 1: return
        for n, known in moments(learn).items():
            assert known == (policy == 'keep' or policy == 'slice' and n not in redrawn), n
        if hasattr(learn.opt, 'slow_weights'):
            slow_weights = [w for g in learn.opt.slow_weights or () for w in g]
            slow = dict(zip([p for pg in learn.opt.param_lists for p in pg], slow_weights))
            assert all(torch.equal(w, p) for p, w in slow.items())   # nothing pulls back to the old weights
    cbs = at_rounds(cb, look)
    learn.fit(4, .01, cbs=cbs)
    assert cbs[2].seen == [1, 2]
    assert all(moments(learn).values())
    assert 0 < len(redrawn) < len(list(learn.model.parameters()))
    assert all(p.isfinite().all() for p in learn.model.parameters())

def test_compiled():
    "A compiled model has its rounds and its norms, although it was compiled before they were put in"
    def go(wrap):
        learn = digits(wrap(net()))
        learn.validate()
        learn.fit(2, .05, cbs=LayerwiseCallback(blocks=2))
        return learn, learn.get_preds()[0]
    (a, pa), (b, pb) = go(lambda m: torch.compile(m, backend='eager')), go(noop)
    assert same(state(a.model._orig_mod), state(b.model))
    assert torch.equal(pa, pb)
    assert a.layerwise.log.equals(b.layerwise.log)
    assert a.model._orig_mod.block2.fixed_norm.sigma != 1
    torch._dynamo.reset()

def test_compiled_and_trained_before():
    "Norms act in a model whose training steps were compiled without them"
    class Block(nn.Module):   # a `Sequential` has its norm as a child, which compiled code notices
        def __init__(self, n_in):
            super().__init__()
            self.linear = nn.Linear(n_in, 16)
        def forward(self, x): return self.linear(x).relu()
    def go(wrap):
        torch.manual_seed(0)
        learn = digits(wrap(nn.Sequential(nn.Flatten(), Block(64), Block(16), Block(16), nn.Linear(16, 10))))
        learn.fit(1, .05)
        learn.fit(2, .05, cbs=LayerwiseCallback(blocks=2))
        return learn
    a, b = go(lambda m: torch.compile(m, backend='eager')), go(noop)
    assert same(state(a.model._orig_mod), state(b.model))
    assert a.recorder.losses == b.recorder.losses
    torch._dynamo.reset()

def test_an_interrupted_fit_leaves_one_mode():
    "BatchNorm of frozen blocks does not stay in evaluation mode in a model that is trained"
    learn = digits()
    with pytest.raises(KeyboardInterrupt): learn.fit(2, .05, cbs=[LayerwiseCallback(blocks=2, freeze=True), Stop(5)])
    assert {m.training for m in learn.model.modules()} == {True}

@pytest.mark.filterwarnings('ignore:.*torch.jit:DeprecationWarning', 'ignore:.*torch.jit:FutureWarning')
@pytest.mark.parametrize('make', [partial(LayerwiseCallback, blocks=2), METHODS['FCHeadCallback'],
                                  partial(FrozenLayersCallback, position='front', n=1)], ids=['LW', 'FC', 'frozen'])
def test_scripted_models_are_refused(make):
    m = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    refuses(digits(torch.jit.script(m)), make(), 'ScriptModule')

@pytest.mark.parametrize('make', [LayerwiseCallback, METHODS['WELSRCallback'], METHODS['DSDCallback']],
                         ids=['LW', 'WELSR', 'DSD'])
def test_pruned_layers_are_refused(make):
    m = net()
    prune.random_unstructured(m.block2.conv, 'weight', .3)
    keys = m.state_dict().keys()
    refuses(digits(m), make(), r'^block2\.conv \(Conv2d\) is pruned')
    assert m.state_dict().keys() == keys

# ---------------------------------------------------------------- together with freezing

HELD = [dict(layers='block2', share=.5), dict(schedule=[(2, 'block2')]), dict(schedule=[(0, None), (1, 'block2')])]

@pytest.mark.parametrize('kw', HELD, ids=str)
def test_what_another_callback_freezes_is_not_redrawn(kw):
    "Known before training: also entries, and what is frozen later, when a round begins"
    for cb in (LayerwiseCallback(blocks=3), METHODS['WELSRCallback'](rounds=2)):
        refuses(digits(), cb, r'block2\.conv\.weight would be .* another callback freezes it', n=6,
                cbs=[FrozenLayersCallback(**kw)])

def test_what_is_frozen_between_rounds_can_be_redrawn():
    "And so can what is frozen elsewhere"
    for cb, kw in ((METHODS['WELSRCallback'](rounds=2), dict(schedule=[(1, 'block2'), (2, None), (3, 'block2')])),
                   (METHODS['FCHeadCallback'](rounds=2), dict(layers='block2', share=.5))):
        learn = digits()
        learn.fit(4, .05, cbs=[cb, FrozenLayersCallback(**kw)])
        assert rounds_seen(cb)

def test_the_head_is_redrawn_above_a_cached_front():
    def go(*cbs):
        learn = digits(net('none'))
        learn.fit(4, .05, cbs=[METHODS['FCHeadCallback'](rounds=2), FrozenLayersCallback(['block1', 'block2']), *cbs])
        return state(learn.model)
    assert same(go(), go(CachedPrefixCallback()))

# ---------------------------------------------------------------- wrong input

def refuses(learn, cb, match, n=4, lr=.05, cbs=(), untouched=True):
    "A fit is refused with a message, and the network is as it was"
    before = state(learn.model)
    with pytest.raises(ReinitError, match=match): learn.fit(n, lr, cbs=[cb, *cbs] if cb else list(cbs))
    now = state(learn.model)
    if untouched: assert all(torch.equal(now[k], v) for k, v in before.items())

def test_frozen_body(tmp_path):
    from fastai.vision.learner import vision_learner
    data = image_dls(Task('digits', n_train=40, size=32, channels=3), bs=16, device='cpu')
    learn = vision_learner(data, tv.resnet18, pretrained=False, n_out=10, metrics=accuracy, opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    learn.freeze()
    refuses(learn, LayerwiseCallback(blocks=2), r'0\.0\.weight would be rescaled in round 1, and it is frozen')
    learn.unfreeze()
    plan_holds(learn, LayerwiseCallback(blocks=2), 2)

def test_shared_parameters():
    m = net()
    m.block4.conv.weight = m.block3.conv.weight = nn.Parameter(torch.randn(16, 16, 3, 3) * .1)
    refuses(digits(m), LayerwiseCallback(), 'one and the same parameter')

@each_method
def test_nan_weights(make):
    cb, learn = make(), digits()
    if cb.first_round > 2: pytest.skip('nothing is done to weights')
    class Diverge(Callback):
        def after_train(self): nn.init.constant_(self.model.block2.conv.weight, math.nan)
    with pytest.raises(ReinitError, match='block2.conv.weight holds NaN or infinity before round 2'):
        learn.fit(R(make), .05, cbs=[cb, Diverge()])
    assert cb.round == 1
    learn = digits()
    nn.init.constant_(learn.model.block1.conv.weight, math.nan)
    if cb.first_round == 1:
        refuses(learn, make(), 'block1.conv.weight holds NaN or infinity before round 1', untouched=False)

def test_dead_block():
    learn = digits(net('none'))
    nn.init.constant_(learn.model.block1.conv.bias, -1e6)
    refuses(learn, LayerwiseCallback(blocks=2), "round 1, block 'block1'")

def test_blocks_of_a_wrapped_model():
    from reinit_nb.blocks import blocks
    learn = digits(nn.DataParallel(net()))
    refuses(learn, LayerwiseCallback(blocks=find_blocks(net())), 'blocks are those of another model')
    refuses(learn, LayerwiseCallback(blocks=blocks(learn.model)), r'make them from the model inside, unwrap_model')
    learn.fit(2, .05, cbs=LayerwiseCallback(blocks=blocks(learn.model.module, ['block1', 'block2'])))

@each_method
def test_wrong_blocks_and_too_few_epochs(make):
    wrong = ((9, 'blocks=9: this Sequential has 4 blocks'), (0, 'blocks=0'),
             (['block1', 'blok2'], "did you mean 'block2'"))
    for blocks, said in wrong:
        refuses(digits(), make(blocks=blocks), said, n=6)
    refuses(digits(), make(), f'1 epochs cannot be shared among {R(make)} rounds', n=1)

@each_method
def test_one_callback_twice(make):
    cb = make()
    refuses(digits(), cb, f'{type(cb).__name__}.* twice', cbs=[make()])
    refuses(digits(), cb, f'{type(cb).__name__}.* twice', cbs=[cb])
    learn = digits()
    learn.add_cb(cb)
    refuses(learn, make(), f'{type(cb).__name__}.* twice')

INTERRUPTED = [(make, 8) for make in METHODS.values()] + [(METHODS['LayerwiseCallback'], 2)]

@pytest.mark.parametrize('make,n', INTERRUPTED, ids=[*METHODS, 'first_round'])
def test_fit_after_an_interrupted_fit(make, n):
    "Ctrl-C in the middle of a round: the next fit is a new run of rounds"
    learn, cb = digits(), make()
    learn.add_cb(cb)
    with pytest.raises(KeyboardInterrupt): learn.fit(2 * R(make), .05, cbs=Stop(n))
    assert cb.round == 1 + (n > 6) and cb.step == n - 1
    learn.fit(2 * R(make), .05)
    assert cb.round == R(make)
    assert rounds_seen(cb)
    assert not cb.log.duplicated(['round', 'block']).any()
    assert not cb.losses.isnan().any()
    learn.remove_cb(cb)
    with pytest.raises(KeyboardInterrupt): learn.fit(2 * R(make), .05, cbs=[make(), Stop(n)])
    assert not learn._grab_cbs(RoundCallback)
    learn.fit(2 * R(make), .05, cbs=make())
    assert rounds_of(learn).round == R(make)
    stands_alone(learn.model, learn.dls.one_batch()[0])

# ---------------------------------------------------------------- what was wrong once

def loaders(train, valid, bs=4):
    "Random pictures, so many batches of each"
    g = torch.Generator().manual_seed(0)
    def pictures(n): return list(zip(torch.randn(n, 1, 8, 8, generator=g), torch.randint(10, (n,), generator=g)))
    sets = [pictures(n * bs) for n in (train, valid)]
    return DataLoaders(*(DataLoader(o, bs=bs) for o in sets), device='cpu')

def tiny(data, m=None, **kw):
    learn = Learner(data, m or net('layer'), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD, **kw)
    learn.logger = noop
    return learn.remove_cb(ProgressCallback)

@pytest.mark.parametrize('sizes', [(2, 8), (4, 2)], ids=str)
def test_rounds_are_counted_in_training_batches(sizes):
    learn = tiny(loaders(*sizes))
    learn.fit_rounds(3, METHODS['WELSRCallback'](rounds=3), patience=50)
    cb = learn.welsr
    assert cb.round == 3
    assert cb.starts == (0, 3 * sizes[0], 6 * sizes[0])
    assert tuple(cb.log.step.unique()) == cb.starts[1:]

def test_fit_rounds_says_what_is_missing():
    class NaN(Callback):
        def after_validate(self): nn.init.constant_(self.model.head.classifier.weight, math.nan)
        def after_loss(self): self.learn.loss = self.learn.loss * math.nan
    for kw, words in ((dict(monitor='acc'), 'monitor'), (dict(cbs=NaN()), 'never a number')):
        with pytest.raises(ReinitError, match=words):
            tiny(loaders(2, 2)).fit_rounds(1, METHODS['WarmRestartCallback'](), lr=0., **kw)

def test_weights_of_lw_load_anywhere(tmp_path):
    a, b, c = (tiny(loaders(2, 2), path=tmp_path) for _ in range(3))
    a.fit(2, .1, cbs=LayerwiseCallback(blocks=2))
    a.save('a')
    b.load_rounds('a', 'cpu')
    c.load_rounds('a', strict=False)
    x = torch.randn(3, 1, 8, 8)
    assert all(torch.equal(o.model.eval()(x), a.model.eval()(x)) for o in (b, c))

@pytest.mark.filterwarnings("ignore:Saved file doesn't contain an optimizer state")   # `b` was not trained
def test_a_state_belongs_to_its_weights(tmp_path):
    a, b, c = (tiny(loaders(2, 2), path=tmp_path) for _ in range(3))
    a.add_cb(METHODS['WELSCallback']())
    a.fit(2, .1)
    a.save_rounds('m')
    b.save_rounds('m')                                       # the same name, from a Learner without rounds
    c.add_cb(METHODS['WELSCallback']())
    c.load_rounds('m')
    assert c.wels.round == 0 and not c.wels.starts

def test_a_loaded_state_goes_on_where_it_was(tmp_path):
    a, b = (tiny(loaders(2, 2), path=tmp_path) for _ in range(2))
    class Stop(Callback):
        order = 100
        def after_epoch(self):
            self.learn.save_rounds('m')
            raise KeyboardInterrupt
    a.add_cb(METHODS['WELSCallback']())
    with pytest.raises(KeyboardInterrupt): a.fit(4, .1, cbs=Stop())
    b.add_cb(METHODS['WELSCallback']())
    b.load_rounds('m')
    with pytest.raises(ReinitError, match='start_epoch=1'): b.fit(4, .1)
    b.load_rounds('m')
    b.fit(4, .1, start_epoch=1)
    assert b.wels.round == 2

class Backwards(nn.Module):
    "Holds its layers in another order than it calls them"
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 10)
        self.b = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.a = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
    def forward(self, x): return self.fc(self.b(self.a(x)))

def test_order_of_calls():
    from reinit_nb.blocks import blocks
    m = Backwards()
    before = state(m)
    with pytest.raises(ReinitError, match='another order'):
        tiny(loaders(2, 2), m).fit(2, .1, cbs=METHODS['FCHeadCallback']())
    assert same(state(m), before)
    learn = tiny(loaders(2, 2), m)
    learn.fit(2, .1, cbs=METHODS['FCHeadCallback'](blocks=blocks(m, x=(2, 1, 8, 8))))
    log = learn.fc_head.log
    assert log[log.redrawn > 0].redrawn.unique().tolist() == [170]      # fc, and nothing else

def test_weights_by_other_names_are_named():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.eye(10))
        def forward(self, x): return x @ self.W
        def reset_parameters(self): nn.init.eye_(self.W)
    m = net('layer')
    m.head.add_module('other', Other())
    with pytest.warns(UserWarning, match='head.other.W will be left alone'):
        tiny(loaders(2, 2), m).fit(2, .1, cbs=METHODS['WELSCallback']())

NORMS = [partial(nn.BatchNorm2d, affine=False), partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)]

@pytest.mark.parametrize('norm', NORMS, ids=['batch', 'instance'])
def test_frozen_statistics_rest(norm):
    m = net('layer')
    m.block1.norm = norm(8)
    seen = []
    class See(Callback):
        def after_batch(self):
            if self.training: seen.append((self.epoch, self.model.block1.norm.running_mean.clone()))
    learn = tiny(loaders(3, 2), m)
    learn.fit(2, .1, cbs=[LayerwiseCallback(blocks=2, freeze=True), See()])
    first, second = ([v for e, v in seen if e == k] for k in (0, 1))
    assert not torch.equal(first[0], first[1]) and all(torch.equal(v, first[-1]) for v in second)

def test_frozen_block_is_normalized_as_it_will_be():
    class Check(Callback):
        def __init__(self): self.zs = []
        def before_fit(self):
            self.h = self.model.block2.register_forward_hook(self.keep)
        def keep(self, m, args, out):
            if self.learn.training: self.zs.append(out.detach())
        def after_fit(self): self.h.remove()
    learn, check = tiny(loaders(1, 1, bs=16), net('batch')), Check()
    learn.fit(2, 0., cbs=[LayerwiseCallback(blocks=2, freeze=True), check])
    z = check.zs[-1]                                   # of round 2, on the very batch that was measured
    assert abs(z.mean()) < 1e-4 and abs(z.std(correction=0) - 1) < 1e-4

def test_a_cancelled_step_keeps_the_rate():
    from fastai.callback.core import CancelBatchException
    class Cancel(Callback):
        order = 50
        def before_step(self): raise CancelBatchException
    learn = tiny(loaders(4, 2))
    learn.fit(2, .1, cbs=[METHODS['RIFLECallback'](), Cancel()])
    assert learn.opt.hypers[-1]['lr'] == .1

def test_a_callback_used_twice_draws_the_same():
    cb, ends = METHODS['WELSRCallback'](), []
    for _ in range(2):
        learn = tiny(loaders(2, 2))
        learn.fit(2, .1, cbs=cb)
        ends.append(state(learn.model))
    assert same(*ends)

# ---------------------------------------------------------------- one plan, and nothing changed in fastai

@each_method
def test_a_method_is_planned_once(make):
    "Each round is planned once, before the first batch, and the plan that is shown is the one that is executed"
    calls, cb = [], make()
    class Counted(type(cb)):
        def plan_round(self, blocks, r):
            calls.append(r)
            return super().plan_round(blocks, r)
    cb.__class__ = Counted
    learn = digits()
    shown = cb.plan(learn.model)
    calls.clear()
    learn.fit(R(make), .05, cbs=cb)
    assert calls == list(range(1, R(make) + 1))
    assert plan_table(cb.plans, cb.model_blocks).equals(shown)

def test_fastai_is_not_changed():
    for name in ('save', 'load', 'fit', 'validate'):
        assert getattr(Learner, name).__module__ == 'fastai.learner', name

def test_a_learner_saves_to_a_file_object():
    learn, file = fitted(), io.BytesIO()
    learn.save(file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert same(saved['model'], state(learn.model))

def test_once_without_training():
    "`apply_once` changes what the plan says"
    m = net('layer')
    before, norms = state(m), {n: p.detach().norm() for n, p in m.named_parameters()}
    with torch.no_grad():
        for p in m.parameters(): p.mul_(2)
    doubled = state(m)
    plan = apply_once(LayerwiseCallback(), m, r=2, initial_norms=norms)
    actions = plan.actions([n for n, _ in m.named_parameters()])
    assert set(actions.values()) == {'rescaled', 'redrawn'} and list(state(m)) == list(before)
    for n, p in m.named_parameters():
        if actions.get(n) == 'rescaled': assert torch.allclose(p, before[n], rtol=1e-5)
        elif n not in actions: assert torch.equal(p, doubled[n])

# ---------------------------------------------------------------- any model, and none is damaged

class TwoNames(nn.Module):
    "A block that holds one layer under two names"
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.middle = nn.Module()
        self.middle.layer = self.middle.alias = nn.Linear(16, 16)
        self.middle.forward = lambda x: self.middle.layer(x).relu()
        self.head = nn.Linear(16, 10)
    def forward(self, x): return self.head(self.middle(self.first(x)))

def test_a_layer_with_two_names_stays_a_parameter():
    m = TwoNames()
    weight = m.middle.layer.weight
    learn = tiny(loaders(2, 2), m)
    learn.fit(2, .1, cbs=LayerwiseCallback(blocks=['first', 'middle']))
    assert m.middle.layer.weight is m.middle.alias.weight is weight and isinstance(weight, nn.Parameter)
    assert any(p is weight for p in learn.opt.all_params().itemgot(0))
    assert weight.grad is not None

class Reader(nn.Module):
    "Reads images row by row with a layer that returns a tuple"
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(8, 10)
    def forward(self, x):
        x = x.squeeze(1)
        args = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.head(self.layer(*args)[0][:, -1])

@pytest.mark.parametrize('layer', [nn.GRU(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True),
                                   nn.MultiheadAttention(8, 2, batch_first=True)], ids=lambda m: type(m).__name__)
def test_a_refused_model_is_as_it_was(layer):
    m = Reader(layer)
    learn = tiny(loaders(2, 2), m)
    x = torch.randn(3, 1, 8, 8)
    before, hooks, out = state(m), len(layer._forward_hooks), m(x)
    with pytest.raises(ReinitError, match="block 'layer' cannot be normalized: it returns a tuple"):
        learn.fit(2, .1, cbs=LayerwiseCallback())
    assert same(state(m), before) and len(layer._forward_hooks) == hooks and torch.equal(m(x), out)
    learn.fit(2, .1, cbs=LayerwiseCallback(normalize=False))
    assert learn.layerwise.round == 1

def test_norms_of_a_refused_first_round_are_removed():
    learn = digits(net('none'))
    nn.init.constant_(learn.model.block1.conv.bias, -1e6)
    before = state(learn.model)
    refuses(learn, LayerwiseCallback(), "round 1, block 'block1'")
    assert state(learn.model).keys() == before.keys()
    assert not any(isinstance(m, FixedNorm) for m in learn.model.modules())

def test_a_shared_activation_is_refused():
    "Two blocks end with one and the same module: no place for two norms"
    act = nn.ReLU()
    m = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), act, nn.Linear(16, 16), act, nn.Linear(16, 10))
    before = state(m)
    refuses(tiny(loaders(2, 2), m), LayerwiseCallback(),
            "block '1' cannot be normalized: its last module, '2', is called 2 times")
    assert state(m).keys() == before.keys()

class Repeated(nn.Module):
    "Calls its second block two times"
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 10)
    def forward(self, x): return self.head(self.b(self.b(self.a(x))))

def test_a_block_that_is_called_twice_is_refused():
    learn = tiny(loaders(2, 2), Repeated())
    refuses(learn, LayerwiseCallback(), "block 'b' cannot be normalized: it is called 2 times")

class RepeatedInTraining(Repeated):
    def forward(self, x):
        z = self.b(self.a(x))
        return self.head(self.b(z) if self.training else z)

def test_a_block_that_is_called_twice_in_training_is_refused():
    learn = tiny(loaders(2, 2), RepeatedInTraining())
    refuses(learn, LayerwiseCallback(), "block 'b' cannot be normalized: it is called 2 times")

def test_an_interrupted_first_round_leaves_no_norms(monkeypatch):
    learn = tiny(loaders(2, 2))
    names = list(learn.model.state_dict())
    def interrupt(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(LayerwiseCallback, '_intervene', interrupt)
    with pytest.raises(KeyboardInterrupt): learn.fit(4, .05, cbs=LayerwiseCallback())
    assert list(learn.model.state_dict()) == names

@pytest.mark.parametrize('flag', ['rescale', 'normalize', 'reinit', 'freeze', 'restart'])
def test_flags_are_true_or_false(flag):
    with pytest.raises(ReinitError, match=f"^{flag}='no' should be True or False"): LayerwiseCallback(**{flag: 'no'})

class Unused(nn.Module):
    "Holds a block that it never calls"
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 10)
    def forward(self, x): return self.head(self.a(x))

def test_a_block_that_is_never_called_is_refused_before_training():
    learn, cb = tiny(loaders(2, 2), Unused()), LayerwiseCallback()
    before = state(learn.model)
    refuses(learn, cb, "block 'b' cannot be normalized: it is not called in a forward pass")
    assert same(state(learn.model), before) and cb.round == 0

def test_auxiliary_heads_are_refused_before_training():
    m = tv.googlenet(num_classes=5, aux_logits=True, init_weights=False)
    learn = any_learner(m, 64)
    before, cb = state(m), LayerwiseCallback()
    with pytest.raises(ReinitError, match='cannot be normalized: it is not called'):
        learn.fit(len(find_blocks(m)), 1e-4, cbs=cb)
    assert same(state(m), before) and cb.round == 0

@each_method
@pytest.mark.parametrize('n', [0, -1])
def test_no_epochs(make, n): refuses(digits(), make(), f'epochs={n} should be a whole number >= 1', n=n)

@each_method
def test_no_batches(make):
    learn = tiny(loaders(0, 1))
    refuses(learn, make(), 'has no batches')

REFUSED = {
    r'^1 epochs cannot be shared among 4 rounds': LayerwiseCallback,
    r'^all parameters of Sequential would be frozen': partial(FrozenLayersCallback, '*'),
    r'^nothing at the front is frozen': CachedPrefixCallback,
    r"^pairs: module='a' is not known": partial(MutuallyFrozenCallback, pairs=[('a', 'b')]),
    r'^probe: Sequential does not run on points': partial(SpectrumCallback, grid_probe(0, 1, 16)),
    r"^layer='blok1' is not known": partial(SeparabilityCallback, layers=['blok1']),
    r"^no module of Sequential .* 'blok2'": partial(InterveneCallback, 'LLF', epochs=[1], layer='blok2')}

@pytest.mark.parametrize('said', REFUSED)
def test_messages_are_ours(said):
    "Nothing of fastai's before the message"
    with pytest.raises(ReinitError, match=said): digits().fit(1, .05, cbs=REFUSED[said]())

def test_messages_of_rounds_until_convergence_are_ours():
    with pytest.raises(ReinitError, match=r"^monitor='valid_los' is not known"):
        digits().fit_rounds(2, LayerwiseCallback(), monitor='valid_los')

WRONG_INITS = {'shape': lambda shape, gen: torch.zeros(3), 'a float': lambda shape, gen: 1.,
               'a ndarray': lambda shape, gen: np.zeros(shape),
               'NaN or infinity': lambda shape, gen: torch.full(shape, math.nan),
               'complex values': lambda shape, gen: torch.zeros(shape, dtype=torch.complex64)}

def two_rounds(method, **kw):
    "A callback of any method, with few rounds"
    lengths = {'LW': {}, 'DenseSparseDense': {}, 'LLF': dict(layer='1', rounds=2)}
    return baselines.METHODS[method](**lengths.get(method, dict(rounds=2)), **kw)

@pytest.mark.parametrize('got', WRONG_INITS)
@pytest.mark.parametrize('name', ['WELS', 'WELSR', 'KELS', 'DSD', 'shrink', 'LW', 'FC'])
def test_wrong_initializers_are_named(name, got):
    learn = digits()
    cb = two_rounds(name, init=WRONG_INITS[got])
    said = rf'^init returns {got}.* for \S+.weight, and should return a finite tensor of shape'
    with pytest.raises(ReinitError, match=said): learn.fit(8, .05, cbs=cb)
    assert learn._grab_cbs(RoundCallback) == []
    assert learn.recorder.losses == []   # before the first batch

@pytest.mark.parametrize('name', ['WELS', 'DSD', 'shrink', 'LW', 'FC'])
def test_initializers_that_fail_are_named(name):
    learn = digits()
    said = r'^init, called as init\(shape, generator\) for \S+.weight, fails: .* argument'
    cb = baselines.METHODS[name](init=lambda shape: shape)
    with pytest.raises(ReinitError, match=said): learn.fit(8, .05, cbs=cb)
    assert learn.recorder.losses == []

class CountedInit:
    "An initializer with a state"
    def __init__(self): self.calls = 0
    def __call__(self, shape, generator):
        self.calls += 1
        return torch.zeros(shape)

def test_an_initializer_is_tried_on_a_copy():
    learn = digits()
    init = CountedInit()
    learn.fit(2, .05, cbs=baselines.WELSCallback(init=init, rounds=2))
    assert init.calls == len(drawn_weights(learn.model))   # one round begins with draws

class ComplexLinear(nn.Linear):
    "Complex weights, and an output that is real or complex"
    def __init__(self, n_in, n_out, real=True):
        super().__init__(n_in, n_out, dtype=torch.complex64)
        self.real = real

    def forward(self, x):
        z = super().forward(x.to(torch.complex64))
        return z.abs() if self.real else z

class Real(nn.Module):
    def forward(self, z): return z.abs()

@pytest.mark.parametrize('method', baselines.METHODS)
def test_complex_weights_stay_complex_with_every_method(method):
    "Both parts of a fresh weight are drawn, or the weights are zero; norms are real"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Flatten(), ComplexLinear(64, 40)), nn.Sequential(ComplexLinear(40, 40)),
                          nn.Linear(40, 10))
    learn = tiny(loaders(4, 1), model)
    learn.fit(6, .01, cbs=two_rounds(method))
    for name, p in model.named_parameters():
        if p.is_complex() and p.ndim == 2:
            assert p.isfinite().all(), name
            assert ((p.real == 0) == (p.imag == 0)).all(), name

def test_blocks_with_a_complex_output_are_refused():
    first = nn.Sequential(nn.Flatten(), ComplexLinear(64, 8, real=False))
    learn = tiny(loaders(4, 1), nn.Sequential(first, nn.Sequential(Real(), nn.Linear(8, 8)), nn.Linear(8, 10)))
    with pytest.raises(ReinitError, match="^block '0' cannot be normalized: its output is complex"):
        learn.fit(4, .01, cbs=LayerwiseCallback(blocks=['0', '1']))
    assert learn.recorder.losses == []

# ---------------------------------------------------------------- files

@pytest.fixture
def saved(tmp_path):
    "A Learner, and the state of its rounds in a file"
    learn = tiny(loaders(2, 2), path=tmp_path, cbs=METHODS['WELSCallback']())
    learn.fit(2, .1)
    learn.save_rounds('m')
    return learn, tmp_path / 'models/m.rounds.pth'

@pytest.mark.parametrize('where', [.2, .5, .8, .999])
def test_two_flipped_bytes_are_refused(saved, where):
    learn, file = saved
    data = bytearray(file.read_bytes())
    at = int(where * (len(data) - 2))
    data[at] ^= 255
    data[at + 1] ^= 255
    file.write_bytes(data)
    with pytest.raises(ReinitError, match='m.rounds.pth'): learn.load_rounds('m')

@pytest.mark.parametrize('content', [b'', b'something else', {}, dict(format='checkpoint of a fit'), [1, 2]], ids=str)
def test_foreign_files_are_refused(saved, content):
    learn, file = saved
    if isinstance(content, bytes): file.write_bytes(content)
    else: torch.save(content, file)
    with pytest.raises(ReinitError, match='m.rounds.pth is .*state of rounds.*delete it to load the weights alone'):
        learn.load_rounds('m')

def test_flipped_bytes_of_weights(saved):
    learn, file = saved
    weights = file.with_name('m.pth')
    data = weights.read_bytes()
    before = learn.model.state_dict()
    for at in range(10, len(data) - 2, len(data) // 40):
        flipped = bytearray(data)
        flipped[at] ^= 1
        flipped[at + 1] ^= 1
        weights.write_bytes(flipped)
        with pytest.raises(ReinitError, match='m.pth'): learn.load_rounds('m')
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())

@pytest.mark.parametrize('content', [b'', b'something else', None, [1, 2]], ids=str)
def test_files_without_weights_are_refused(saved, content):
    learn, file = saved
    weights = file.with_name('m.pth')
    file.unlink()
    if content is None: weights.unlink()
    elif isinstance(content, bytes): weights.write_bytes(content)
    else: torch.save(content, weights)
    with pytest.raises(ReinitError, match='m.pth'): learn.load_rounds('m')

def test_weights_that_were_replaced_are_refused(saved):
    learn, file = saved
    learn.fit(2, .1)
    learn.save('m')
    with pytest.raises(ReinitError, match='replaced after save_rounds.*delete m.rounds.pth'): learn.load_rounds('m')
    file.unlink()
    learn.load_rounds('m')

def test_saving_that_fails_leaves_the_old_files(saved):
    learn, file = saved
    learn.model.register_buffer('hook', torch.zeros(1))
    class Stop(KeyboardInterrupt): pass
    def fail(*args): raise Stop
    learn.model.state_dict = fail
    with pytest.raises(Stop): learn.save_rounds('m')
    del learn.model.state_dict, learn.model.hook
    learn.load_rounds('m')
    assert sorted(f.name for f in file.parent.iterdir()) == ['m.pth', 'm.rounds.pth']

def test_flipped_bytes_of_a_checkpoint(tmp_path):
    learn = tiny(loaders(2, 2))
    learn.fit(1, .1, cbs=CheckpointCallback(tmp_path / 'run.pth'))
    data = (tmp_path / 'run.pth').read_bytes()
    for at in range(10, len(data) - 2, len(data) // 40):
        flipped = bytearray(data)
        flipped[at] ^= 1
        flipped[at + 1] ^= 1
        (tmp_path / 'bad.pth').write_bytes(flipped)
        with pytest.raises(ReinitError, match='bad.pth'): read_checkpoint(tmp_path / 'bad.pth')

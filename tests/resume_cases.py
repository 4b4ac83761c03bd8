"""Killed and resumed equals never killed, to the last bit.

Processes are forked and really killed (SIGKILL), by a probe at a given batch or event: no test looks at a clock.
A resumed process begins with another seed of the network and of the global generators, so that nothing can be right
by chance: all must come from the file."""
import gc
import io
import os
import random
import signal
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from functools import partial

import fastai.callback.schedule  # noqa: F401  adds lr_find and fit_one_cycle
import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, OptimWrapper, ranger
from fastcore.foundation import L

from reinit_nb import baselines
from reinit_nb.checkpoint import CheckpointCallback, read_checkpoint
from reinit_nb.freezing import FrozenLayersCallback, freeze_out, gradual_unfreezing
from reinit_nb.models import model
from reinit_nb.rounds import RoundCallback
from reinit_nb.vision import Task, image_dls

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
EPOCHS, EVERY = 4, 3   # of 5 batches: 90 images in batches of 18

# ---------------------------------------------------------------- methods

METHODS = dict(baselines.METHODS)
METHODS['LLF'] = partial(METHODS['LLF'], layer='block3')
METHODS['LW, frozen, slice'] = partial(METHODS['LW'], freeze=True, opt_state='slice')
LW = METHODS['LW']

# ---------------------------------------------------------------- processes

def in_child(f):
    "Run `f` in a forked process; its signal, or 0"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            gc.disable()                             # it would touch, and so copy, all that was inherited
            os.fsync = lambda f: None  # against a loss of power; a kill loses nothing written
            warnings.simplefilter('ignore')
            with redirect_stdout(io.StringIO()): f()
            code = 0
        except BaseException: traceback.print_exc()
        finally: os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, 'the child ended with an error'
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)

class At(Callback):
    "Die at an event of a given epoch and, in training, batch"
    order = 2000
    def __init__(self, event, epoch, batch=None): setattr(self, event, partial(self.check, epoch, batch))
    def check(self, epoch, batch):
        if self.learn.epoch == epoch and (batch is None or self.learn.training and self.learn.iter == batch): die()

def intervening(r):
    "Die in `intervene` before round `r`, when weights have been overwritten"
    plain = RoundCallback._log_events
    def log_events(self, at, *args):
        if at == r: die()
        plain(self, at, *args)
    RoundCallback._log_events = log_events

def writing(n):
    "Die between the temporary file and its name, when the `n`-th checkpoint is written"
    plain, seen = os.replace, []
    def replace(a, b):
        seen.append(a)
        if len(seen) == n:
            assert os.path.getsize(a)
            die()
        plain(a, b)
    os.replace = replace

MIDDLE, END, EPOCH_END = At('before_backward', 2, 4), At('after_validate', 2), At('after_epoch', 2)
KILLS = [partial(intervening, 2), MIDDLE, END, partial(writing, 2), EPOCH_END]

# ---------------------------------------------------------------- runs

DIGITS = Task('digits', n_train=100)
SGD_MOMENTUM = partial(SGD, mom=.9)

def set_seeds(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

def net_learner(task=DIGITS, opt_func=SGD_MOMENTUM, again=0, cbs=(), **kw):
    "A small network; `again` gives it another start, which must not matter"
    set_seeds(again)
    net = model('scnn', c_in=1, size=8, width=.125, seed=again, **kw)
    learn = Learner(image_dls(task, bs=18, device='cpu'), net, metrics=accuracy, opt_func=opt_func, cbs=cbs)
    return learn.remove_cb(ProgressCallback)

def plain_learner(again=0, opt_func=Adam):
    "fastai's own loaders, shuffled by Python's generator, and images changed by NumPy's and torch's"
    rng = np.random.RandomState(0)
    x = torch.tensor(rng.randn(100, 1, 8, 8), dtype=torch.float32)
    items = list(zip(x, (x.sum((1, 2, 3)) > 0).long()))
    random.seed(0)   # of the order: these loaders are made with a seed that is drawn
    def augment(b): return b[0] * np.random.uniform(.9, 1.1) + .01 * torch.randn(()), b[1]
    train = DataLoader(items[:90], bs=18, shuffle=True, drop_last=True, after_batch=augment)
    data = DataLoaders(train, DataLoader(items[90:], bs=5), device='cpu')
    set_seeds(again)
    net = model('scnn', c_in=1, size=8, n_out=2, width=.125, seed=again, dropout=.3)
    learn = Learner(data, net, CrossEntropyLossFlat(), opt_func=opt_func, metrics=accuracy)
    return learn.remove_cb(ProgressCallback)

def final(learn):
    "All that must be equal"
    cbs = learn._grab_cbs(RoundCallback) or [v for v in vars(learn).values() if isinstance(v, RoundCallback)]
    cbs += vars(learn).get('frozen_here', [])   # fastai forgets the callbacks of a fit
    rec, loader = learn.recorder, learn.dls.train
    return dict(
        model=learn.model.state_dict(), opt=learn.opt.state_dict(), hypers=learn.opt.hypers,
        values=rec.values, losses=rec.losses, lrs=rec.lrs, iters=rec.iters, hps=getattr(rec, 'hps', None),
        rng=(torch.get_rng_state(), random.getstate(), np.random.get_state()),
        loader=getattr(loader, 'epoch', loader.rng.getstate()),
        log=[cb.log.to_dict('list') for cb in cbs], round_losses=[getattr(cb, 'losses', None) for cb in cbs])

def without_nan(t): return t.nan_to_num(nan=-9.) if t.is_floating_point() else t

def differences(a, b, at=''):
    "Where two results differ, to the last bit"
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(without_nan(a), without_nan(b)) else [at]
    if isinstance(a, np.ndarray): return [] if np.array_equal(a, b) else [at]
    if isinstance(a, dict):
        if a.keys() != b.keys(): return [at + ' keys']
        return [o for k in a for o in differences(a[k], b[k], f'{at}.{k}')]
    if isinstance(a, (list, tuple, L)):
        if len(a) != len(b): return [at + ' length']
        return [o for i, (x, y) in enumerate(zip(a, b)) for o in differences(x, y, f'{at}[{i}]')]
    return [] if a is b or a == b or a != a and b != b else [at]

def fit(learn, cbs, method=LW, n=EPOCHS): learn.fit(n, .05, cbs=[method(), *cbs])

def child(path, make, fit, kill=None, ckpt=True, again=0, every=EVERY):
    "A whole process: make a Learner, fit it, and leave its final state"
    def go():
        cbs = [CheckpointCallback(path / 'run.pth', every=every)] if ckpt else []
        if isinstance(kill, Callback): cbs.append(kill)
        elif kill: kill()
        learn = make(again=again)
        learn.path = path
        with learn.no_logging(): fit(learn, cbs)
        torch.save(final(learn), path / 'final.pth')
    return in_child(go)

def result(path): return torch.load(path / 'final.pth', weights_only=False)

def whole_and_killed(tmp_path, make, fit, kills, **kw):
    "Never killed, without a checkpoint, and killed in each of the places `kills`, one after the other"
    for d in ('whole', 'killed'): (tmp_path / d).mkdir()
    assert child(tmp_path / 'whole', make, fit, ckpt=False) == 0
    for i, k in enumerate(kills):
        killed = child(tmp_path / 'killed', make, fit, k, again=i, **kw)
        assert killed == signal.SIGKILL, f'was not killed by number {i}'
    assert not (tmp_path / 'killed/final.pth').exists()
    assert child(tmp_path / 'killed', make, fit, again=len(kills), **kw) == 0
    assert not list((tmp_path / 'killed').glob('.tmp-*'))
    return result(tmp_path / 'whole'), result(tmp_path / 'killed')

@pytest.fixture(scope='module', autouse=True)
def warm():
    "All that is imported or kept on first use, once, before the forks"
    learn = net_learner()
    with learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, .01)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()

# ---------------------------------------------------------------- every method

@pytest.mark.parametrize('method', METHODS)
def test_methods(method, tmp_path):
    kills = KILLS[method == 'BL':3]   # BL never intervenes
    a, b = whole_and_killed(tmp_path, net_learner, partial(fit, method=METHODS[method]), kills)
    assert not differences(a, b)
    assert a['log'][0]['round'] or method == 'BL'

# ---------------------------------------------------------------- each place alone, and every batch

def test_killed_once(tmp_path):
    (tmp_path / 'whole').mkdir()
    assert child(tmp_path / 'whole', net_learner, fit, ckpt=False) == 0
    for i, k in enumerate([*KILLS, At('after_fit', EPOCHS - 1)]):
        (tmp_path / str(i)).mkdir()
        assert child(tmp_path / str(i), net_learner, fit, k) == signal.SIGKILL
        assert child(tmp_path / str(i), net_learner, fit, again=1) == 0
        assert not differences(result(tmp_path / 'whole'), result(tmp_path / str(i)))

def test_killed_in_every_batch(tmp_path):
    # before the first checkpoint there is nothing to resume
    kills = [At('before_backward', e, i) for e in range(2) for i in range(3)][1:]
    make = partial(net_learner, task=Task('digits', n_train=80), dropout=.2)
    two_rounds = partial(fit, method=partial(LW, blocks=2), n=2)
    assert not differences(*whole_and_killed(tmp_path, make, two_rounds, kills, every=1))

# ---------------------------------------------------------------- optimizers, schedules, callbacks, data

def one_cycle(learn, cbs): learn.fit_one_cycle(EPOCHS, .05, cbs=[LW(), *cbs])
def rounds(learn, cbs): learn.fit_rounds(2, LW(), patience=1, halvings=1, lr=.05, cbs=cbs)
def with_cbs(*make): return lambda learn, cbs: fit(learn, [*(m() for m in make), *cbs])

torch_adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
augmented = Task('digits', n_train=100, crop=True, flip=True)
trackers = with_cbs(SaveModelCallback, partial(ReduceLROnPlateau, patience=1, min_delta=1.),
                    partial(EarlyStoppingCallback, patience=3, min_delta=.5))
VARIANTS = {
    'Adam, BatchNorm, dropout, augmented':
        (partial(net_learner, task=augmented, opt_func=Adam, norm='batch', dropout=.3), fit),
    'AdamW of torch, one cycle': (partial(net_learner, opt_func=torch_adamw), one_cycle),
    'Lookahead, one cycle': (partial(net_learner, opt_func=ranger), one_cycle),
    'until it stops improving': (net_learner, rounds),
    'loaders of fastai': (plain_learner, fit),
    'accumulated': (net_learner, with_cbs(partial(GradientAccumulation, 50))),
    'trackers': (net_learner, trackers)}

@pytest.mark.parametrize('variant', VARIANTS)
def test_variants(variant, tmp_path):
    assert not differences(*whole_and_killed(tmp_path, *VARIANTS[variant], KILLS[:3]))

# ---------------------------------------------------------------- schedules of freezing

SCHEDULES = {
    'gradual unfreezing': (lambda net: gradual_unfreezing(net, 'layers'), SGD_MOMENTUM),
    'FreezeOut': (lambda net: freeze_out(net, 'layers', t0=.25), Adam),
    'entries of layers frozen, then free': (lambda net: [(0, dict(layers='block1', share=.6)),
        (1, dict(layers=['block1', 'block2'], share=.3)), (3, None)], torch_adamw)}

@pytest.mark.parametrize('name', SCHEDULES)
def test_schedules_of_freezing(name, tmp_path):
    schedule, opt_func = SCHEDULES[name]

    def fit_frozen(learn, cbs):
        learn.frozen_here = [FrozenLayersCallback(schedule=schedule(learn.model))]
        learn.fit(EPOCHS, .05, cbs=[*learn.frozen_here, *cbs])

    kills = [At('before_backward', 1, 0), partial(writing, 2), MIDDLE, END, EPOCH_END]
    make = partial(net_learner, opt_func=opt_func, norm='batch', dropout=.2)
    a, b = whole_and_killed(tmp_path, make, fit_frozen, kills)
    assert not differences(a, b)
    assert len(a['log'][0]['step']) >= 3

# ---------------------------------------------------------------- what is finished, and what the file is

def test_finished_is_loaded_not_trained(tmp_path):
    assert child(tmp_path, net_learner, fit) == 0
    first = result(tmp_path)
    file = (tmp_path / 'run.pth').read_bytes()
    (tmp_path / 'final.pth').unlink()
    assert child(tmp_path, net_learner, fit, At('before_batch', 0, 0), again=5) == 0   # it would die if it trained
    assert not differences(first, result(tmp_path))
    assert (tmp_path / 'run.pth').read_bytes() == file

def test_file_is_whole_after_a_kill(tmp_path):   # the second is that of batch 5, the end of an epoch
    assert child(tmp_path, net_learner, fit, partial(writing, 3)) == signal.SIGKILL
    assert len(list(tmp_path.glob('.tmp-*-run.pth'))) == 1
    state = read_checkpoint(tmp_path / 'run.pth')
    assert not state['done'] and state['learner']['counters']['train_iter'] == 5

def test_differences_are_found(tmp_path):
    "The comparison can fail: other data, other weights"
    (tmp_path / 'a').mkdir()
    (tmp_path / 'b').mkdir()
    child(tmp_path / 'a', net_learner, fit, ckpt=False)
    child(tmp_path / 'b', net_learner, fit, ckpt=False, again=1)
    found = differences(result(tmp_path / 'a'), result(tmp_path / 'b'))
    for part in ('model', 'opt', 'values', 'losses', 'log', 'rng'):
        assert any(o.startswith('.' + part) for o in found), part

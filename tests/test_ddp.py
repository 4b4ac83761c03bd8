"Two processes that train one network: after each round they agree to the last bit, although each has batches of its own"
import datetime
import importlib
import os
import socket
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastcore.basics import noop
from torch.nn.parallel import DistributedDataParallel

import reinit_nb
from reinit_nb.models import model
from reinit_nb.rounds import RoundCallback, root

METHODS = dict(LW=('lw', 'LayerwiseCallback', dict(blocks=2)), LWfreeze=('lw', 'LayerwiseCallback', dict(blocks=2, freeze=True)), WELSR=('wels', 'WELSRCallback', dict(rounds=2)),
               KELS=('wels', 'KELSCallback', dict(rounds=2, opt_state='slice')), DSD=('dsd', 'DSDCallback', dict(rounds=2)), FC=('fc', 'FCHeadCallback', dict(rounds=2)),
               sparse=('dsd', 'DenseSparseDenseCallback', {}), perturb=('controls', 'ShrinkPerturbCallback', dict(rounds=2)))
METHODS = {k: v for k, v in METHODS.items() if (Path(reinit_nb.__file__).parent / f'{v[0]}.py').exists()}
WAYS = ('torch', 'fastai')
CASES = [f'{way}-{name}' for way in WAYS for name in METHODS]
BLANK = ['blank1-LW', 'blank0-LW']   # one process has images that block 1 maps to a constant

def make(name):
    mod, cls, kw = METHODS[name]
    return getattr(importlib.import_module(f'reinit_nb.{mod}'), cls)(**kw)

class Watch(Callback):
    "What this process has: its first batch of each round, and its network when a round has begun and when an epoch has ended"
    order, run_valid = RoundCallback.order + .1, False
    def __init__(self, cb): self.cb, self.batches, self.begun, self.ended, self.masks, self.wrapped = cb, [], [], [], [], []
    def keep(self): return {k: v.detach().clone() for k, v in root(self.model).state_dict().items() if 'running' not in k and 'num_batches' not in k}
    def before_batch(self):
        if len(self.begun) == self.cb.round: return
        self.wrapped.append(isinstance(self.model, DistributedDataParallel))
        self.batches.append(self.xb[0].clone())
        self.begun.append(self.keep())
        self.masks.append({k: v.clone() for k, v in self.cb.held().items()})
    def after_train(self): self.ended.append(self.keep())

def data(rank=None, blank=None):
    "Random images of two classes, those of one process or all; the images of process `blank` are all the same"
    g = torch.Generator().manual_seed(7 if rank is None else rank)
    ds = [(torch.randn(1, 8, 8, generator=g) * (rank is None or rank != blank) + i % 2 * (blank is None), i % 2) for i in range(32 if rank is None else 16)]
    return DataLoaders(*(DataLoader(ds, bs=8 if rank is None else 4, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')

def learner(dls, path, norm='batch'):
    learn = Learner(dls, model('scnn', c_in=1, size=8, width=.25, n_out=2, norm=norm), loss_func=CrossEntropyLossFlat(), opt_func=SGD, path=path).remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def by_hand(rank, cb, watch, path, blank=None):
    learn = learner(data(rank, blank), path, 'none' if blank is not None else 'batch')
    learn.model = DistributedDataParallel(learn.model)
    learn.fit(6, .05, cbs=[cb, watch])

def by_fastai(rank, cb, watch, path):
    import fastai.distributed as fd
    def on_cpu(self, t, rank):
        t = torch.LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    fd.DistributedDL._broadcast = on_cpu   # fastai's own sends the indices through a GPU
    learn = learner(data(), path)
    with learn.distrib_ctx(sync_bn=False, cpu=True): learn.fit(6, .05, cbs=[cb, watch, SaveModelCallback(fname=type(cb).__name__)])

def work(rank, port, out):
    "All cases in one process"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), ACCELERATE_USE_CPU='true',
                      DISTRIB_BACKEND='gloo')
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
    found = {}
    for case in CASES + BLANK:
        way, name = case.split('-')
        cb = make(name)
        watch = Watch(cb)
        try:
            if way.startswith('blank'): by_hand(rank, cb, watch, out, int(way[-1]))
            else: (by_hand if way == 'torch' else by_fastai)(rank, cb, watch, out)
            found[case] = dict(round=cb.round, losses=cb.losses, log=cb.log[['round', 'block', 'redrawn', 'norm_after', 'mu', 'sigma']].to_dict('list'),
                               **{k: getattr(watch, k) for k in ('batches', 'begun', 'ended', 'masks', 'wrapped')})
        except Exception: found[case] = traceback.format_exc()
        torch.save(found, f'{out}/rank{rank}.pt')
        if isinstance(found[case], str) and way != 'blank0': break   # the other process may wait for ever: leave
    dist.destroy_process_group()

@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    "What both processes have seen, by case"
    pytest.importorskip('accelerate', reason='accelerate is not installed: fastai needs it for several processes')
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('torch was built without gloo')
    out = tmp_path_factory.mktemp('ranks')
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    try: mp.spawn(work, (port, str(out)), nprocs=2)
    except Exception: traceback.print_exc()
    return [torch.load(out / f'rank{r}.pt', weights_only=False) | dict(out=out) for r in range(2)]

def equal(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

@pytest.mark.parametrize('case', CASES)
def test_processes_agree(ranks, case):
    a, b = (r.get(case, 'not reached, because of an error before') for r in ranks)
    assert isinstance(a, dict) and isinstance(b, dict), f'{a}\n{b}'
    rounds = 3 if 'sparse' in case else 2
    assert a['round'] == b['round'] == len(a['begun']) == rounds and all(a['wrapped']) and all(b['wrapped'])
    assert all(not torch.equal(p, q) for p, q in zip(a['batches'], b['batches'], strict=True))
    for k in ('begun', 'ended', 'masks'):
        for i, (p, q) in enumerate(zip(a[k], b[k], strict=True)): assert equal(p, q), f'{k} {i}: {[n for n in p if not torch.equal(p[n], q[n])]}'
    assert a['log'].keys() == b['log'].keys() and str(a['log']) == str(b['log'])
    assert not equal(a['ended'][0], a['ended'][-1]) and all(v.isfinite().all() for v in a['ended'][-1].values())
    if 'fastai' in case and case != 'fastai-LW':   # LW's file was written over by the next case
        saved = torch.load(ranks[0]['out'] / 'models' / f'{METHODS[case.split("-")[1]][1]}.rounds.pth', weights_only=True)['losses']
        assert torch.equal(saved, a['losses'][:len(saved)]) and not torch.equal(saved, b['losses'][:len(saved)])   # process 0 has written it, like the weights
    if 'LW' in case:
        assert any('fixed_norm' in k for k in a['ended'][-1]) and sum(o['block1.fixed_norm.sigma'] != 1 for o in a['begun']) == 2
    if 'sparse' in case: assert a['masks'][1] and all((a['ended'][3][n][m] == 0).all() for n, m in a['masks'][1].items())

def test_one_process_cannot_measure(ranks):
    "The batch of process 0 counts: if that of another one is constant, nobody cares; if that one is, all stop before anything has changed"
    a, b = (r['blank1-LW'] for r in ranks)
    assert isinstance(a, dict) and isinstance(b, dict), f'{a}\n{b}'
    assert a['round'] == 2 and all(equal(p, q) for k in ('begun', 'ended') for p, q in zip(a[k], b[k], strict=True))
    a, b = (r['blank0-LW'] for r in ranks)
    assert "round 1, block 'block1': the block's output cannot be normalised" in a and "round 1, block 'block1': process 0 could not measure it" in b

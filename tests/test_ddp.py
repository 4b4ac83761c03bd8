"Two processes train one network with batches of their own: after each round they agree to the last bit"
import datetime
import os
import socket
import traceback
from functools import partial

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

from reinit_nb.baselines import METHODS
from reinit_nb.checkpoint import load_checked  # the module adds save_rounds, too
from reinit_nb.models import model
from reinit_nb.probing import unwrap_model
from reinit_nb.rounds import RoundCallback

pytestmark = pytest.mark.slow

MAKE = dict(
    LW=partial(METHODS['LW'], blocks=2), LWfreeze=partial(METHODS['LW'], blocks=2, freeze=True),
    WELSR=partial(METHODS['WELSR'], rounds=2), KELS=partial(METHODS['KELS'], rounds=2, opt_state='slice'),
    DSD=partial(METHODS['DSD'], rounds=2), FC=partial(METHODS['FC'], rounds=2),
    sparse=METHODS['DenseSparseDense'], perturb=partial(METHODS['shrink'], rounds=2))
WAYS = ('torch', 'fastai')
CASES = [f'{way}-{name}' for way in WAYS for name in MAKE]
BLANK = ['blank1-LW', 'blank0-LW']   # one process has images that block 1 maps to a constant

class Watch(Callback):
    "Note the first batch of each round, and the network when a round has begun and when an epoch has ended"
    order = RoundCallback.order + .1
    run_valid = False
    def __init__(self, cb):
        self.cb = cb
        self.batches, self.begun, self.ended, self.masks, self.wrapped = [], [], [], [], []
    def keep(self):
        state = unwrap_model(self.model).state_dict()
        return {k: v.detach().clone() for k, v in state.items() if 'running' not in k and 'num_batches' not in k}
    def before_batch(self):
        if len(self.begun) == self.cb.round: return
        self.wrapped.append(isinstance(self.model, DistributedDataParallel))
        self.batches.append(self.xb[0].clone())
        self.begun.append(self.keep())
        self.masks.append({k: v.clone() for k, v in self.cb.memory.items()})
    def after_train(self): self.ended.append(self.keep())

class EachEpoch(Callback):
    "Save the state of the rounds after each epoch"
    order = 100
    def __init__(self, file): self.file = file
    def after_epoch(self): self.learn.save_rounds(self.file)

def data(rank=None, blank=None):
    "Random images of two classes, those of one process or all; the images of process `blank` are all the same"
    g = torch.Generator().manual_seed(7 if rank is None else rank)
    scale = 0. if rank is not None and rank == blank else 1.
    shift = 0. if blank is not None else 1.
    n, bs = (32, 8) if rank is None else (16, 4)
    ds = [(torch.randn(1, 8, 8, generator=g) * scale + i % 2 * shift, i % 2) for i in range(n)]
    return DataLoaders(*(DataLoader(ds, bs=bs, shuffle=False, num_workers=0) for _ in range(2)), device='cpu')

def learner(dls, path, norm='batch'):
    net = model('scnn', c_in=1, size=8, width=.25, n_out=2, norm=norm)
    learn = Learner(dls, net, loss_func=CrossEntropyLossFlat(), opt_func=SGD, path=path).remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def by_hand(rank, cb, watch, path, blank=None):
    learn = learner(data(rank, blank), path, 'none' if blank is not None else 'batch')
    learn.model = DistributedDataParallel(learn.model)
    learn.fit(6, .05, cbs=[cb, watch])

def by_fastai(rank, cb, watch, path, name):
    import fastai.distributed as fd
    def on_cpu(self, t, rank):
        t = torch.LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    fd.DistributedDL._broadcast = on_cpu   # fastai's own sends the indices through a GPU
    learn = learner(data(), path)
    cbs = [cb, watch, SaveModelCallback(fname=f'{name}-best'), EachEpoch(name)]
    with learn.distrib_ctx(sync_bn=False, cpu=True): learn.fit(6, .05, cbs=cbs)

def work(rank, port, out):
    "All cases in one process"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2',
                      MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), ACCELERATE_USE_CPU='true', DISTRIB_BACKEND='gloo')
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
    found = {}
    for case in CASES + BLANK:
        way, name = case.split('-')
        cb = MAKE[name]()
        watch = Watch(cb)
        try:
            if way.startswith('blank'): by_hand(rank, cb, watch, out, int(way[-1]))
            elif way == 'torch': by_hand(rank, cb, watch, out)
            else: by_fastai(rank, cb, watch, out, name)
            log = cb.log[['round', 'block', 'redrawn', 'norm_after', 'mu', 'sigma']].to_dict('list')
            seen = {k: getattr(watch, k) for k in ('batches', 'begun', 'ended', 'masks', 'wrapped')}
            found[case] = dict(round=cb.round, losses=cb.losses, log=log, **seen)
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
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    try: mp.spawn(work, (port, str(out)), nprocs=2)
    except Exception: traceback.print_exc()
    return [torch.load(out / f'rank{r}.pt', weights_only=False) | dict(out=out) for r in range(2)]

def equal(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

@pytest.mark.parametrize('case', CASES)
def test_processes_agree(ranks, case):
    a, b = (r.get(case, 'not reached, because of an error before') for r in ranks)
    assert isinstance(a, dict) and isinstance(b, dict), f'{a}\n{b}'
    rounds = 3 if 'sparse' in case else 2
    assert a['round'] == b['round'] == len(a['begun']) == rounds
    assert all(a['wrapped']) and all(b['wrapped'])
    assert all(not torch.equal(p, q) for p, q in zip(a['batches'], b['batches'], strict=True))
    for k in ('begun', 'ended', 'masks'):
        for i, (p, q) in enumerate(zip(a[k], b[k], strict=True)):
            assert equal(p, q), f'{k} {i}: {[n for n in p if not torch.equal(p[n], q[n])]}'
    assert a['log'].keys() == b['log'].keys() and str(a['log']) == str(b['log'])
    assert not equal(a['ended'][0], a['ended'][-1])
    assert all(v.isfinite().all() for v in a['ended'][-1].values())
    if 'fastai' in case:   # process 0 has written it, like the weights
        file = ranks[0]['out'] / 'models' / f'{case.split("-")[1]}.rounds.pth'
        saved = load_checked(file, 'state of rounds')['rounds'][0]['losses']
        assert torch.equal(saved, a['losses'][:len(saved)]) and not torch.equal(saved, b['losses'][:len(saved)])
    if 'LW' in case:
        assert any('fixed_norm' in k for k in a['ended'][-1])
        assert sum(o['block1.fixed_norm.sigma'] != 1 for o in a['begun']) == 2
    if 'sparse' in case:
        assert a['masks'][1]
        assert all((a['ended'][3][n][m] == 0).all() for n, m in a['masks'][1].items())

def test_one_process_cannot_measure(ranks):
    "The batch of process 0 counts. If that of another process is constant, training continues; if its own is, all stop"
    a, b = (r['blank1-LW'] for r in ranks)
    assert isinstance(a, dict) and isinstance(b, dict), f'{a}\n{b}'
    assert a['round'] == 2
    assert all(equal(p, q) for k in ('begun', 'ended') for p, q in zip(a[k], b[k], strict=True))
    a, b = (r['blank0-LW'] for r in ranks)
    assert "round 1, block 'block1': the block's output cannot be normalized" in a
    assert "round 1, block 'block1': process 0 could not measure it" in b

"Two processes that train one network with frozen layers agree to the last bit, although each has batches of its own"

import datetime
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastcore.basics import noop
from torch.nn.parallel import DistributedDataParallel

from reinit_nb.freezing import FrozenLayersCallback, frozen_masks
from reinit_nb.models import model
from reinit_nb.prefix_cache import CachedPrefixCallback

pytestmark = pytest.mark.slow

ARGUMENTS = {
    'whole': dict(layers='block[12]'),
    'part': dict(layers='block1', share=0.5),
    'thaw': dict(schedule=[(0, 'block[12]'), (2, 'block1'), (3, None)]),
    'freeze': dict(schedule=[(2, 'block1'), (3, 'block[12]')]),
}
CASES = [f'{way}-{name}' for way in ('torch', 'fastai') for name in ARGUMENTS]
CACHED = 'torch-cached'
EPOCHS = 4


class AfterEachEpoch(Callback):
    "Keeps the weights of this process before the first and after each epoch, and its first batch"

    order, run_valid = 60, False

    def __init__(self):
        self.weights, self.batches = [], []

    def keep(self):
        self.weights.append({n.removeprefix('module.'): p.detach().clone() for n, p in self.model.named_parameters()})

    def before_train(self):
        if not self.weights:
            self.keep()

    def before_batch(self):
        if not self.batches:
            self.batches.append(self.xb[0].clone())

    def after_train(self):
        self.keep()


def data(rank=None):
    "Random images of two classes, those of one process or all"
    g = torch.Generator().manual_seed(7 if rank is None else rank)
    items = [(torch.randn(1, 8, 8, generator=g) + i % 2, i % 2) for i in range(32 if rank is None else 16)]
    loaders = [DataLoader(items, bs=8 if rank is None else 4, shuffle=False, num_workers=0) for _ in range(2)]
    return DataLoaders(*loaders, device='cpu')


def learner(dls):
    net = model('scnn', c_in=1, size=8, width=0.25, n_out=2, norm='batch')
    learn = Learner(dls, net, loss_func=CrossEntropyLossFlat(), opt_func=SGD).remove_cb(ProgressCallback)
    learn.logger = noop
    return learn


def by_hand(rank, cbs):
    learn = learner(data(rank))
    learn.model = DistributedDataParallel(learn.model)
    learn.fit(EPOCHS, 0.05, wd=0.1, cbs=cbs)
    return learn.model.module


def by_fastai(rank, cbs):
    import fastai.distributed as fd

    def on_cpu(self, t, rank):
        t = torch.LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()

    fd.DistributedDL._broadcast = on_cpu  # fastai's own sends the indices through a GPU
    learn = learner(data())
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        learn.fit(EPOCHS, 0.05, wd=0.1, cbs=cbs)
    return learn.model


def work(rank, port, out):
    "Run all cases in one process"
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE='2',
        LOCAL_WORLD_SIZE='2',
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU='true',
        DISTRIB_BACKEND='gloo',
    )
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
    found = {}
    for case in [*CASES, CACHED]:
        way, name = case.split('-')
        cb, watch = FrozenLayersCallback(**ARGUMENTS.get(name, ARGUMENTS['whole'])), AfterEachEpoch()
        cbs = [cb, watch] + [CachedPrefixCallback()] * (case == CACHED)
        try:
            net = (by_hand if way == 'torch' else by_fastai)(rank, cbs)
            flags = [p.requires_grad for p in net.parameters()]
            found[case] = dict(weights=watch.weights, batches=watch.batches, log=cb.log, trainable=all(flags))
        except Exception:
            found[case] = traceback.format_exc()
        torch.save(found, f'{out}/rank{rank}.pt')
        if isinstance(found[case], str):
            break  # the other process may wait for ever: leave
    dist.destroy_process_group()


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    "What both processes have seen, by case"
    pytest.importorskip('accelerate', reason='accelerate is not installed: fastai needs it for several processes')
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip('torch was built without gloo')
    out = tmp_path_factory.mktemp('ranks')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    try:
        mp.spawn(work, (port, str(out)), nprocs=2)
    except Exception:
        traceback.print_exc()
    return [torch.load(out / f'rank{r}.pt', weights_only=False) for r in range(2)]


def moved(a, b):
    return {n for n in a if not torch.equal(a[n], b[n])}


@pytest.mark.parametrize('case', CASES)
def test_processes_agree(ranks, case):
    a, b = (r.get(case, 'not reached, because of an error before') for r in ranks)
    assert isinstance(a, dict) and isinstance(b, dict), f'{a}\n{b}'
    assert not torch.equal(a['batches'][0], b['batches'][0])
    assert len(a['weights']) == len(b['weights']) == EPOCHS + 1
    for p, q in zip(a['weights'], b['weights']):
        assert not moved(p, q)
    assert a['log'].equals(b['log'])
    assert a['trainable'] and b['trainable']


@pytest.mark.parametrize('case', CASES)
def test_frozen_layers_keep_their_bits(ranks, case):
    weights, name = ranks[0][case]['weights'], case.split('-')[1]
    per_epoch = {
        'whole': [{'block1', 'block2'}] * 4,
        'part': [set()] * 4,
        'thaw': [{'block1', 'block2'}] * 2 + [{'block1'}, set()],
        'freeze': [set(), set(), {'block1'}, {'block1', 'block2'}],
    }[name]
    for old, new, frozen in zip(weights, weights[1:], per_epoch):
        assert moved(old, new) == {n for n in old if n.split('.')[0] not in frozen}
    if name == 'part':
        masks = frozen_masks(learner(data()).model, **ARGUMENTS['part'])
        for n, mask in masks.items():
            assert torch.equal(weights[0][n][mask], weights[-1][n][mask])
            assert (weights[0][n] != weights[-1][n])[~mask].all()


def test_the_cache_refuses(ranks):
    for r in ranks:
        assert 'CachedPrefixCallback works in one process' in r[CACHED]

"""What depends on the device but can be tested on the CPU: facts, budgets of memory and time, precision."""
import threading

import numpy as np
import pytest
import torch
from torch import nn

from reinit_nb import checkpoint, core, ensemble, flatness, path, vision
from reinit_nb.core import ReinitError, Streams, default_device, device_facts, note_device, noted_device
from reinit_nb.ensemble import MLPRun, plan_mlps, stack_budget
from reinit_nb.path import Learn, Method, PrecisionCallback, Run, TimedCheckpoint, TrainingBatches, train_run
from reinit_nb.store import provenance
from reinit_nb.studies.freezing import ReservoirRun, layer_separability, reservoir_data, train_reservoirs
from reinit_nb.synthetic import SyntheticTask
from reinit_nb.vision import Task, image_dls


def tiny(method='BL', task=None, **how):
    options = dict(lr=.02, batch=16, epochs=4) | how
    return Run('scnn', task or Task('digits', n_train=60), Learn(**options), Method(method), width=.125)

# ---------------------------------------------------------------- facts

def test_facts_of_the_cpu_leave_provenance_as_it_was():
    assert device_facts('cpu') == dict(device='CPU')
    note_device('cpu')
    assert provenance()['machine'].endswith(' cores, CPU')

def test_facts_of_a_gpu(monkeypatch):
    monkeypatch.setattr(core, '_is_available', lambda device: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Some GPU')
    monkeypatch.setattr(torch.version, 'cuda', '12.8')
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91002)
    facts = device_facts('cuda:1')
    assert facts['device'] == 'Some GPU' and facts['cuda'] == '12.8' and facts['cudnn'] == '91002'
    assert facts['tf32'] in ('off', 'matmul', 'convolution', 'matmul and convolution')
    note_device('cuda:1')
    try: assert 'Some GPU, cuda 12.8, cudnn 91002, tf32 ' in provenance()['machine']
    finally: note_device('cpu')

def test_every_thread_notes_its_own_device():
    note_device('cpu')
    seen = []
    def other():
        note_device('meta')
        seen.append(noted_device())
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [torch.device('meta')] and noted_device() == torch.device('cpu')

def test_a_run_notes_where_it_is_trained():
    note_device('meta')
    path.learner(tiny(), device='cpu')
    assert noted_device() == torch.device('cpu')

def test_a_device_that_is_not_there():
    with pytest.raises(ReinitError, match='is not available'): default_device('xpu:7')
    with pytest.raises(ReinitError, match='is not available'): default_device('meta')

# ---------------------------------------------------------------- memory

def test_stacks_are_sized_by_the_memory_of_the_device(monkeypatch):
    recipes = [MLPRun(task=SyntheticTask(n_train=200), seed=s, lr=lr) for s in range(20) for lr in (.01, .1)]
    small = plan_mlps(recipes)
    assert stack_budget('cpu') == ensemble.CACHE_BYTES and len(small) > 1
    monkeypatch.setattr(ensemble, 'default_device', lambda device=None: torch.device('cuda'))
    monkeypatch.setattr(ensemble, 'device_memory', lambda device: 8 * 2**30)
    assert stack_budget() == 2**30 and [len(stack) for stack in plan_mlps(recipes)] == [40]
    monkeypatch.setattr(ensemble, 'device_memory', lambda device: None)
    assert stack_budget() == 2**27

@pytest.mark.parametrize('free, fits', [(None, True), (4000, True), (3999, False)])
def test_images_stay_on_the_device_if_they_fit(monkeypatch, free, fits):
    monkeypatch.setattr(vision, 'device_memory', lambda device: free)
    assert vision.fits_on_device(1000, 'cuda') == fits
    images = image_dls(Task('digits', n_train=20), device='cpu').train.dataset
    monkeypatch.setattr(vision, 'fits_on_device', lambda nbytes, device: fits)
    x, y = images.on_device('meta')
    assert (x is not None) == fits and len(y) == len(images)
    assert images.on_device('meta')[1] is y   # copied once
    assert images.unaugmented().on_device('meta')[1] is y

class Repeating(list):
    repeats = True
    passes = 0
    def __iter__(self):
        self.passes += 1
        return super().__iter__()

def test_large_data_is_read_again_instead_of_kept():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(3)]
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    data = Repeating(batches)
    assert isinstance(flatness.keep_batches(data, 'cpu'), list) and data.passes == 1
    again = flatness.keep_batches(data, 'cpu', memory=200)
    assert not isinstance(again, list)
    for _ in range(2): assert all(torch.equal(a[0], b[0]) for a, b in zip(again, batches, strict=True))
    want = flatness.noise_curve(net, batches, [.1], 2)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(flatness.keep_batches, '__defaults__', (200,))
        assert flatness.noise_curve(net, data, [.1], 2).equals(want)

def test_training_batches_are_the_same_in_every_pass():
    learn = path.learner(tiny(task=Task('digits', n_train=60, flip=True, shift=.2)), device='cpu')
    data = TrainingBatches(learn, 16)
    first = [x for x, _ in data]
    assert len(data) == len(first) == 4 and data.examples == sum(map(len, first))
    for a, (b, _), (c, _) in zip(first, data, data): assert torch.equal(a, b) and torch.equal(a, c)
    assert learn.dls.train.dataset.split_idx == 0   # training is still augmented

def test_separability_of_layers_in_parts():
    task = Task('digits', n_train=60, valid=0., normalize='none')
    runs = [ReservoirRun(task, n_test=50, base=8, epochs=1, looks=(), frozen=f) for f in (0., 1.)]
    stack, _ = train_reservoirs(runs, 'cpu')
    data = [o[None] for o in reservoir_data(runs[0])[:4]]
    whole, parts = layer_separability(stack, *data), layer_separability(stack, *data, memory=20_000)
    assert [list(row) for row in whole] == [list(row) for row in parts]
    for a, b in zip(whole, parts): assert np.allclose(list(a.values()), list(b.values()), atol=1e-9)

# ---------------------------------------------------------------- time

def test_checkpoints_take_a_share_of_the_time(monkeypatch, tmp_path):
    "A checkpoint that takes 4 seconds is written every 80 seconds, one that takes none every 10"
    now, written = [0.], []
    monkeypatch.setattr(path.time, 'monotonic', lambda: now[0])
    for seconds, took, want in ((10, 4., [10, 94, 178, 262]), (10, 0., list(range(10, 290, 10))), (0, 4., None)):
        def write(self, epoch_start, done=False, took=took):
            written.append(now[0])
            now[0] += took
        monkeypatch.setattr(path.CheckpointCallback, '_write', write)
        now[0] = 0.
        written.clear()
        cb = TimedCheckpoint(tmp_path / 'a.pth', seconds)
        while now[0] < 290:
            cb._write(None)
            now[0] += 1
        assert written == (want if want is not None else [5. * i for i in range(58)])
    with pytest.raises(ReinitError, match='share'): TimedCheckpoint(tmp_path / 'a.pth', share=0)

def test_generators_of_other_gpus_are_not_dropped_in_silence(monkeypatch):
    state = checkpoint.rng_state()
    checkpoint.set_rng_state(state)
    state['cuda'] = [torch.get_rng_state()] * 2
    with pytest.warns(UserWarning, match='generators of 2 GPUs, and here are 0'): checkpoint.set_rng_state(state)

# ---------------------------------------------------------------- precision

@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
def test_precisions_learn(precision):
    learn = train_run(tiny('LW', epochs=8, precision=precision), device='cpu')
    plain = train_run(tiny('LW', epochs=8), device='cpu')
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    assert learn.recorder.values[-1][0] == pytest.approx(plain.recorder.values[-1][0], rel=.05)

def test_infinite_gradients_are_skipped_and_the_scale_is_lowered():
    learn = path.learner(tiny(precision='fp16'), device='cpu')
    cb = learn.precision
    assert isinstance(cb, PrecisionCallback)
    seen = []
    class Overflow(path.Callback):
        order = 5
        def before_step(self):
            if self.train_iter == 1: next(self.model.parameters()).grad.fill_(float('inf'))
            self.weights = [p.detach().clone() for p in self.model.parameters()]
        def after_batch(self):
            if not self.training: return
            moved = any(not torch.equal(p, w) for p, w in zip(self.model.parameters(), self.weights))
            seen.append((moved, self.learn.scaler.get_scale()))
    with learn.no_logging(), learn.no_bar(): learn.fit(1, cbs=Overflow())
    assert [moved for moved, _ in seen] == [True, False, True]
    assert seen[1][1] == seen[0][1] / 2

def test_streams_are_on_the_cpu_whatever_the_device():
    assert Streams(0).device == torch.device('cpu')

"Sweeps: where portions run, what is refused before anything starts, waiting for others, and SIGTERM in the middle"
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from reinit_nb import sweep, workers
from reinit_nb.checkpoint import read_checkpoint
from reinit_nb.core import Recipe, ReinitError, note_device, noted_device
from reinit_nb.path import Learn, Run
from reinit_nb.store import Store
from reinit_nb.studies.common import all_studies, flatten_recipes
from reinit_nb.sweep import PATH, Engine, engine_from, one_by_one, run_sweep
from reinit_nb.vision import Task
from reinit_nb.workers import device_environment, device_list, in_processes, on_devices

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(os.name != 'posix', reason='needs signals')


@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1


def where(recipe): return [dict(device_there=os.environ.get('REINIT_DEVICE', ''), pid=os.getpid())]


# ---------------------------------------------------------------- arguments

@pytest.mark.parametrize('wrong, message', [
    (dict(workers=0), 'workers=0 should be a whole number >= 1'),
    (dict(gpus=0), 'gpus=0 should be a whole number >= 1'),
    (dict(gpus=2.5), 'gpus=2.5 should be a whole number'),
    (dict(gpus=[]), r'gpus=\[\] should name at least one device'),
    (dict(gpus=99), "gpus=99: there is no 'cuda:"),
    (dict(gpus=['gpu:1']), "there is no 'gpu:1'; this machine has"),
    (dict(cluster='slurm'), "cluster='slurm' should be 'ray'"),
    (dict(cluster=dict(gpu=1)), "cluster option='gpu' is not known; did you mean 'gpus'"),
    (dict(cluster=dict(cpus=0)), 'cluster: cpus=0 should be a finite number > 0'),
    (dict(cluster=dict(gpus=-1)), 'cluster: gpus=-1 should be a finite number >= 0'),
    (dict(cluster=dict(address='')), "cluster: address='' should be text"),
    (dict(cluster='ray', workers=2), 'workers and cluster exclude each other'),
    (dict(gpus=1, workers=2), 'workers and gpus exclude each other'),
])
def test_wrong_places_are_refused_before_anything_starts(tmp_path, wrong, message):
    with pytest.raises(ReinitError, match=message):
        run_sweep([Job()], Store(tmp_path / 'new'), engine_from(where), show=False, **wrong)
    assert not (tmp_path / 'new').exists()


def test_workers_by_default(monkeypatch):
    "With a GPU, engines that use it run one portion at a time, and the others as many as there are cores"
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 6)
    def count(device, **needs):
        monkeypatch.setattr(sweep, 'default_device', lambda: torch.device(device))
        return sweep._default_workers(engine_from(where, **needs))
    assert [count('cpu'), count('cpu', cpus=2), count('cpu', cpus=9)] == [6, 3, 1]
    assert [count('cuda'), count('cuda', gpus=.25), count('cuda', gpus=0), count('mps')] == [1, 4, 6, 1]
    assert count('cuda', gpus=0, cpus=3) == 2


# ---------------------------------------------------------------- one process per GPU

def test_environment_of_a_process_on_a_gpu():
    assert device_environment('cuda:2') == dict(REINIT_DEVICE='cuda:0', CUDA_VISIBLE_DEVICES='2')
    assert device_environment('cuda:1', '5, 7')['CUDA_VISIBLE_DEVICES'] == '7'
    assert device_environment('cuda:0', 'GPU-8f2a,GPU-77b0')['CUDA_VISIBLE_DEVICES'] == 'GPU-8f2a'
    assert device_environment('mps') == dict(REINIT_DEVICE='mps')


def test_devices_by_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    assert device_list(3) == ['cuda:0', 'cuda:1', 'cuda:2'] and device_list([3, 'cuda:1']) == ['cuda:3', 'cuda:1']
    with pytest.raises(ReinitError, match="gpus=5: there is no 'cuda:4'; this machine has 4 CUDA GPUs"): device_list(5)
    with pytest.raises(ReinitError, match="'cuda' should have a number"): device_list(['cuda'])


@pytest.mark.slow
def test_one_process_per_device(tmp_path, monkeypatch):
    "Each device has one process, which sees its device and the settings of the caller"
    monkeypatch.setenv('REINIT_DEVICE', 'cpu')
    jobs = [Job(n) for n in range(6)]
    df = run_sweep(jobs, Store(tmp_path / 'a'), engine_from(where), show=False, gpus=['cpu:0', 'cpu:1'])
    assert set(df.device_there) == {'cpu:0', 'cpu:1'} and os.getpid() not in set(df.pid)
    assert df.groupby('device_there').pid.nunique().tolist() == [1, 1]
    # an engine that never uses a GPU gets none
    df = run_sweep(jobs, Store(tmp_path / 'b'), engine_from(where, gpus=0), show=False, gpus=['cpu:0', 'cpu:1'])
    assert set(df.device_there) == {'cpu'} and set(df.pid) == {os.getpid()}
    # portions that need half a GPU share one
    df = run_sweep(jobs, Store(tmp_path / 'c'), engine_from(where, gpus=.5), show=False, gpus=['cpu:0'])
    assert set(df.device_there) == {'cpu:0'} and 1 <= df.pid.nunique() <= 2


def setting(name): return os.environ.get(name), torch.get_num_threads()


@pytest.mark.slow
def test_processes_follow_the_settings_of_the_caller(monkeypatch):
    "Also those that were started for an earlier call"
    for value in ('one', 'two', None):
        if value: monkeypatch.setenv('REINIT_TRY', value)
        else: monkeypatch.delenv('REINIT_TRY')
        assert set(in_processes(setting, ['REINIT_TRY'] * 3, threads=2)) == {(value, 2)}
        assert list(on_devices(setting, ['REINIT_TRY'], ['cpu:0'])) == [(value, 1)]


# ---------------------------------------------------------------- waiting

def test_waiting_backs_off(tmp_path, monkeypatch):
    "A recipe that another process holds: pauses double, and its result is taken when it is there"
    store, job, pauses = Store(tmp_path), Job(), []
    claim = store.claim(job)
    assert claim.__enter__()
    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) < 9: return
        store.put(job, [dict(x=1)])
        claim.__exit__(None, None, None)
    monkeypatch.setattr(sweep.time, 'sleep', sleep)
    df = run_sweep([job], store, engine_from(where), show=False, workers=1)
    assert df.x.tolist() == [1] and len(pauses) == 9
    for i, pause in enumerate(pauses): assert min(.5 * 2**i, 30) / 2 <= pause <= min(.5 * 2**i, 30)


def test_an_abandoned_recipe_is_run(tmp_path, monkeypatch):
    "Its owner gave up: we run it"
    store, job = Store(tmp_path), Job()
    claim = store.claim(job)
    claim.__enter__()
    monkeypatch.setattr(sweep.time, 'sleep', lambda seconds: claim.__exit__(None, None, None))
    df = run_sweep([job], store, engine_from(where), show=False, workers=1)
    assert df.pid.tolist() == [os.getpid()]


def together(portion): return [[dict(size=len(portion))] for _ in portion]


@pytest.mark.slow
def test_portions_stay_together_in_processes(tmp_path):
    "An engine that trains many networks as one: its portions are not divided"
    engine = Engine(lambda recipes: [recipes[:3], recipes[3:]], together)
    df = run_sweep([Job(n) for n in range(5)], Store(tmp_path), engine, show=False, gpus=['cpu:0', 'cpu:1'])
    assert sorted(df['size']) == [2, 2, 3, 3, 3]


# ---------------------------------------------------------------- SIGTERM

RUNS = [Run('scnn', Task('digits', n_train=80), Learn(lr=.05, batch=8, epochs=3), seed=s, width=.125) for s in (0, 1)]
CHILD = '''
import sys, time
from pathlib import Path
from reinit_nb.path import Learn, Run, plan_paths, run_paths
from reinit_nb.store import Store
from reinit_nb.studies.common import all_studies, flatten_recipes
from reinit_nb.sweep import Engine, run_sweep
from reinit_nb.vision import Task
root, workers = Path(sys.argv[1]), int(sys.argv[2])
runs = [Run('scnn', Task('digits', n_train=80), Learn(lr=.05, batch=8, epochs=3), seed=s, width=.125) for s in (0, 1)]
def run(portion, checkpoints=None):
    "Train; at the thirteenth batch, tell and wait for the signal"
    from reinit_nb.checkpoint import CheckpointCallback
    from reinit_nb.workers import stop_requested
    real = CheckpointCallback.after_batch
    def after_batch(self):
        if self.train_iter == 13:
            (root / f'ready-{portion[0].seed}').touch()
            while not stop_requested(): time.sleep(.01)
        real(self)
    CheckpointCallback.after_batch = after_batch
    return run_paths(portion, checkpoints)
if __name__ == '__main__':
    engine = Engine(plan_paths, run, processes=True, resumes=True)
    run_sweep(runs, Store(root), engine, show=False, workers=workers)
'''


@posix
@pytest.mark.slow
@pytest.mark.parametrize('n, method', [(1, 'flock'), (1, 'lease'), (2, 'lease')])
def test_sigterm_writes_a_checkpoint_and_releases_claims(tmp_path, n, method):
    script = tmp_path / 'child.py'
    script.write_text(CHILD)
    env = dict(os.environ, PYTHONPATH=str(ROOT), REINIT_LOCK=method)
    root = tmp_path / 'runs'
    root.mkdir()
    p = subprocess.Popen([sys.executable, str(script), str(root), str(n)], env=env)
    while len(list(root.glob('ready-*'))) < n:
        assert p.poll() is None
        time.sleep(.05)
    p.send_signal(signal.SIGTERM)
    assert p.wait(120) == 143
    files = sorted((root / '.checkpoints').glob('*.pth'))
    assert {f.stem for f in files} == {r.hash for r in RUNS[:n]}
    for f in files:
        counters = read_checkpoint(f)['learner']['counters']
        assert counters['train_iter'] == 13
    assert list((root / '.locks').iterdir()) == [] and not list(root.glob('??/*/record.json'))
    resumed = run_sweep(RUNS[:n], Store(root), PATH, show=False, workers=1)
    whole = run_sweep(RUNS[:n], Store(tmp_path / 'whole'), PATH, show=False, workers=1)
    same = [c for c in whole if c not in ('date', 'seconds')]
    assert json.dumps(resumed[same].to_dict('list')) == json.dumps(whole[same].to_dict('list'))   # to the last bit
    assert not list((root / '.checkpoints').glob('*.pth'))


SLEEPER = '''
import sys, time
from dataclasses import dataclass
from pathlib import Path
from reinit_nb.core import Recipe
from reinit_nb.store import Store
from reinit_nb.studies.common import all_studies, flatten_recipes
from reinit_nb.sweep import engine_from, run_sweep
@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1
root, workers = Path(sys.argv[1]), int(sys.argv[2])
def run(job):
    (root / f'ready-{job.n}').touch()
    for _ in range(6000): time.sleep(.01)
    return [dict(x=1)]
run_sweep([Job(n) for n in range(4)], Store(root), engine_from(run), show=False, workers=workers)
'''


@posix
@pytest.mark.slow
@pytest.mark.parametrize('n, method', [(1, 'lease'), (2, 'flock'), (2, 'lease')])
def test_sigterm_ends_runs_without_checkpoints(tmp_path, n, method):
    "Also in threads, which Python would wait for; claims are released"
    script = tmp_path / 'child.py'
    script.write_text(SLEEPER)
    root = tmp_path / 'runs'
    root.mkdir()
    env = dict(os.environ, PYTHONPATH=str(ROOT), REINIT_LOCK=method)
    p = subprocess.Popen([sys.executable, str(script), str(root), str(n)], env=env)
    while len(list(root.glob('ready-*'))) < n:
        assert p.poll() is None
        time.sleep(.05)
    p.send_signal(signal.SIGTERM)
    assert p.wait(workers.STOP_SECONDS) == 143
    assert list((root / '.locks').iterdir()) == [] and not list(root.glob('??/*/record.json'))


@posix
@pytest.mark.slow
def test_sigterm_ends_a_call_that_does_not_stop(tmp_path):
    "One call of C that takes a minute: the process ends after `STOP_SECONDS`"
    script = tmp_path / 'child.py'
    script.write_text(SLEEPER.replace('for _ in range(6000): time.sleep(.01)', 'time.sleep(60)')
                      .replace('root, workers', 'import reinit_nb.workers as w\nw.STOP_SECONDS = 1\nroot, workers'))
    root = tmp_path / 'runs'
    root.mkdir()
    p = subprocess.Popen([sys.executable, str(script), str(root), '2'], env=dict(os.environ, PYTHONPATH=str(ROOT)))
    while len(list(root.glob('ready-*'))) < 2:
        assert p.poll() is None
        time.sleep(.05)
    p.send_signal(signal.SIGTERM)
    assert p.wait(30) == 143


@posix
def test_signal_outside_of_a_fit_stops_at_once():
    with pytest.raises(workers.Stopped) as e:
        with workers.stop_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    assert e.value.code == 143 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@posix
def test_a_second_signal_does_not_wait():
    with pytest.raises(workers.Stopped):
        with workers.stop_on_sigterm():
            workers.save_before_stop(lambda: True)
            os.kill(os.getpid(), signal.SIGTERM)
            assert workers.stop_requested()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    assert not workers.stop_requested()


@posix
def test_the_handler_of_others_stays():
    mine = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with workers.stop_on_sigterm(): assert signal.getsignal(signal.SIGTERM) is mine
    finally: signal.signal(signal.SIGTERM, before)


def test_runs_in_processes_stay_together_if_they_share_work(tmp_path):
    sizes = []
    def run(portion):
        sizes.append(len(portion))
        return together(portion)
    jobs = [Job(n) for n in range(4)]
    for share in (False, True):
        engine = Engine(lambda recipes: [recipes[i:i + 2] for i in range(0, len(recipes), 2)], run, processes=True,
                        together=share)
        run_sweep(jobs, Store(tmp_path / str(share)), engine, show=False, workers=1)
    assert sizes == [1, 1, 1, 1, 2, 2]


def test_a_device_is_noted_for_one_portion_only(tmp_path):
    "An engine that notes none does not get that of the portion before"
    def run(job):
        if job.n == 0: note_device('cpu:0')
        return [dict(x=str(noted_device()))]
    df = run_sweep([Job(0), Job(1)], Store(tmp_path), engine_from(run), show=False, workers=1)
    assert df.x.tolist() == ['cpu:0', 'cpu']


def thread_engines():
    "Engines of studies whose portions run in threads, each with two portions"
    found = {}
    for study in all_studies().values():
        for file, source in study.files.items():
            if source.engine is None or source.engine.processes: continue
            missing = source.engine.missing or (lambda recipe: None)
            recipes = [r for r in flatten_recipes(source.lists('smoke', None)) if not missing(r)]
            portions = source.engine.plan(recipes)
            if len(portions) > 1: found.setdefault(source.engine.run, (file, source.engine, portions[:2]))
    return {file: (engine, [r for p in portions for r in p[:2]]) for file, engine, portions in found.values()}


THREADED = thread_engines()


@pytest.mark.slow
@pytest.mark.parametrize('file', THREADED)
def test_portions_in_threads_do_not_disturb_each_other(file, tmp_path):
    "One worker and two compute the same, to the last bit"
    engine, recipes = THREADED[file]
    one, two = (run_sweep(recipes, Store(tmp_path / str(n)), engine, show=False, workers=n) for n in (1, 2))
    same = [c for c in one if c not in ('date', 'seconds', 'cpu_seconds')]
    assert json.dumps(one[same].to_dict('list')) == json.dumps(two[same].to_dict('list'))


def test_engines_declare_what_they_need():
    engine = engine_from(where, processes=True, cpus=3, gpus=.5)
    assert (engine.processes, engine.cpus, engine.gpus) == (True, 3, .5) and engine.plan is one_by_one
    assert (PATH.cpus, PATH.gpus) == (1, 1)

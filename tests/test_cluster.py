"""Ray on two nodes of which one is killed, Ray that starts by itself, and the SLURM script with four processes.

Ray listens on 127.0.0.1 only, without dashboard and usage statistics.
"""
import os

os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'   # read when Ray is imported: nodes on 127.0.0.1
os.environ['RAY_USAGE_STATS_ENABLED'] = '0'

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from reinit_nb import workers
from reinit_nb.core import Recipe, ReinitError
from reinit_nb.ensemble import MLPRun, run_mlps
from reinit_nb.store import Store
from reinit_nb.sweep import Engine, engine_from, one_by_one, run_sweep
from reinit_nb.synthetic import SyntheticTask

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sys.executable).parent
slow = pytest.mark.slow
posix = pytest.mark.skipif(os.name != 'posix', reason='needs signals')
RUNS = [MLPRun(m, SyntheticTask(n_test=100), seed=s, steps=5, n_iter=1) for m in ('BL', 'LW') for s in range(4)]


@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1


def same(a, b):
    "Equal to the last bit, but for the date"
    a, b = (o.drop(columns=['date', 'seconds']).sort_values(['recipe', 'round']).reset_index(drop=True) for o in (a, b))
    pd.testing.assert_frame_equal(a, b, check_exact=True)


# ---------------------------------------------------------------- without a cluster

def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ReinitError, match=r"pip install 'reinit_nb\[cluster\]'"):
        run_sweep([Job()], Store(tmp_path / 'new'), engine_from(print), cluster='ray')
    assert not (tmp_path / 'new').exists()


def test_folders_are_absolute_for_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('REINIT_DATA', 'images')
    monkeypatch.setenv('REINIT_DEVICE', 'cuda:3')
    monkeypatch.setenv('REINIT_SCALE', 'laptop')
    there = workers._worker_environment(gpus=1)
    assert there['REINIT_DATA'] == str(tmp_path / 'images') and there['REINIT_SCALE'] == 'laptop'
    assert there['REINIT_DEVICE'] == 'cuda' and workers._worker_environment(0)['REINIT_DEVICE'] == 'cpu'


# ---------------------------------------------------------------- two nodes

@pytest.fixture(scope='module')
def cluster():
    "Two nodes with one CPU each"
    ray = pytest.importorskip('ray')
    from ray.cluster_utils import Cluster
    before = os.environ.get('PYTHONPATH')
    os.environ['PYTHONPATH'] = f'{ROOT}:{ROOT / "tests"}'   # workers find the functions of this file
    node = dict(num_cpus=1, include_dashboard=False, node_ip_address='127.0.0.1')
    nodes = Cluster(initialize_head=True, head_node_args=node)
    second = nodes.add_node(**node)
    workers.connect_ray(nodes.address)
    yield nodes, second
    ray.shutdown()
    nodes.shutdown()
    if before is None: del os.environ['PYTHONPATH']
    else: os.environ['PYTHONPATH'] = before


class Watched:
    "An engine that writes down where it runs; on the node `doomed`, runs begin and never end"
    def __init__(self, folder, doomed): self.folder, self.doomed = Path(folder), doomed

    def __call__(self, portion):
        import ray
        node, run = ray.get_runtime_context().get_node_id(), portion[0]
        (self.folder / f'began-{run.hash}-{node}-{os.getpid()}').touch()
        if node == self.doomed: time.sleep(600)
        rows = run_mlps(portion)
        with open(self.folder / f'ended-{run.hash}', 'a') as f: f.write(f'{node}\n')
        return rows


@slow
@posix
def test_a_node_is_killed_in_the_middle(cluster, tmp_path, monkeypatch):
    "Everything comes back, nothing is finished twice, and the numbers are those of a local sweep"
    nodes, second = cluster
    doomed = second.node_id
    log = tmp_path / 'log'
    log.mkdir()

    def kill():
        "As soon as the second node has begun a run, end its processes"
        while not (began := list(log.glob(f'began-*-{doomed}-*'))): time.sleep(.02)
        nodes.remove_node(second, allow_graceful=False)
        for file in began: os.kill(int(file.name.rpartition('-')[2]), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    engine = Engine(one_by_one, Watched(log, doomed), processes=True)
    monkeypatch.chdir(tmp_path)
    df = run_sweep(RUNS, Store('far'), engine, show=False, cluster='ray')   # a relative folder
    killer.join(60)
    assert not killer.is_alive()
    began = [f.name.split('-') for f in log.glob('began-*')]
    lost = {run for _, run, node, _ in began if node == doomed}
    assert lost and len({node for _, _, node, _ in began}) == 2
    for run in RUNS: assert len((log / f'ended-{run.hash}').read_text().split()) == 1
    assert list((tmp_path / 'far' / '.locks').iterdir()) == []
    same(df, run_sweep(RUNS, Store('near'), Engine(one_by_one, run_mlps), show=False, workers=1))


def settings(_):
    import torch
    return torch.get_num_threads(), os.environ.get('REINIT_TRY'), os.environ.get('REINIT_DEVICE')


def die(_): os._exit(1)
def fail(_): raise KeyError('key')


@slow
@posix
def test_ray_workers(cluster, tmp_path, monkeypatch):
    "Settings of the caller, errors that name the recipe, and a limit for processes that are killed"
    monkeypatch.setenv('REINIT_TRY', 'yes')
    assert list(workers.on_ray(settings, [1], cpus=.5)) == [(1, 'yes', 'cpu')]
    monkeypatch.delenv('REINIT_TRY')
    assert list(workers.on_ray(settings, [1])) == [(1, None, 'cpu')]
    with pytest.raises(ReinitError, match='was killed 4 times with the same item.*Item: 7'):
        list(workers.on_ray(die, [7]))
    with pytest.raises(ReinitError, match='a worker of Ray failed .*KeyError'): list(workers.on_ray(fail, [7]))
    with pytest.warns(UserWarning, match='a task wants 1 CPUs and 5 GPUs, and no node of the cluster has them'):
        assert list(workers.on_ray(settings, [], gpus=5)) == []

    def run_one(job):
        if job.n == 3: raise RuntimeError('out of luck')
        return [dict(x=job.n)]
    with pytest.raises(ReinitError, match=r'RuntimeError: out of luck \(in the run of Job\(n=3\)\)'):
        run_sweep([Job(n) for n in range(1, 5)], Store(tmp_path), engine_from(run_one, processes=True), show=False,
                  cluster=dict(cpus=1))
    assert Job(1) in Store(tmp_path) and Job(3) not in Store(tmp_path)


# ---------------------------------------------------------------- Ray that starts by itself

ALONE = '''
import os, signal, sys, time
from pathlib import Path
from reinit_nb.core import Recipe
from reinit_nb.store import Store
from reinit_nb.sweep import Engine, engine_from, run_sweep
from dataclasses import dataclass
@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1
root = Path(sys.argv[1])
def run_one(job):
    (root / f'began-{job.n}').touch()
    for _ in range(6000 * (job.n > 1)): time.sleep(.1)   # Ray interrupts between two of them
    return [dict(x=job.n)]
if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.default_int_handler)   # shells ignore it in what they start in the background
    run_sweep([Job(n) for n in range(1, 40)], Store(root / 'runs'), engine_from(run_one, processes=True), show=False,
              cluster='ray')
'''


@slow
@posix
def test_ray_starts_by_itself_and_ctrl_c_cancels(tmp_path):
    "It listens on this machine only; what waits is cancelled, what runs gives its claim back"
    pytest.importorskip('ray')
    script = tmp_path / 'alone.py'
    script.write_text(ALONE)
    env = {k: v for k, v in os.environ.items() if k != 'RAY_ADDRESS'} | dict(PYTHONPATH=str(ROOT), REINIT_LOCK='lease')
    p = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=env, start_new_session=True,
                         stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 600   # so that it ends at all
        while not ((tmp_path / 'began-1').exists() and len(list(tmp_path.glob('began-*'))) > 1):
            assert p.poll() is None and time.monotonic() < deadline
            time.sleep(.05)
        if Path('/proc/net/tcp').exists(): assert not _open_ports(p.pid), 'a port that others can reach'
        p.send_signal(signal.SIGINT)
        err = p.communicate(timeout=300)[1]
    finally:
        _stop_session(p)
    assert p.returncode != 0 and 'KeyboardInterrupt' in err
    assert len(list(tmp_path.glob('began-*'))) < 10   # most of them only waited
    assert list((tmp_path / 'runs' / '.locks').iterdir()) == []
    assert len(list((tmp_path / 'runs').glob('??/*/record.json'))) == 1


def _session(leader):
    "Folders in /proc of the processes of a session"
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try: fields = stat.read_text().rpartition(')')[2].split()
        except OSError: continue
        if fields[3] == str(leader): yield stat.parent


def _stop_session(process):
    "End a process and what it has started; does nothing to those that have ended"
    for member in list(_session(process.pid)):
        try: os.kill(int(member.name), signal.SIGKILL)
        except ProcessLookupError: pass
    process.wait(60)


def _open_ports(leader):
    "TCP ports, open to other machines, of the processes of a session"
    inodes = set()
    for process in _session(leader):
        for fd in (process / 'fd').glob('*'):
            try: target = os.readlink(fd)
            except OSError: continue
            if target.startswith('socket:['): inodes.add(target[8:-1])
    found = []
    for table in ('tcp', 'tcp6'):
        for line in Path(f'/proc/net/{table}').read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1].split(':')[0], fields[3], fields[9]
            loopback = address in ('0100007F', '00000000000000000000000001000000', '0000000000000000FFFF00000100007F')
            if state == '0A' and inode in inodes and not loopback: found.append(line)
    return found


# ---------------------------------------------------------------- SLURM

@slow
@posix
@pytest.mark.skipif(not (SCRIPTS / 'reinit_repro').exists(), reason='the package is not installed here')
@pytest.mark.parametrize('method', ['flock', 'lease'])
def test_four_copies_of_the_slurm_script_share_the_work(tmp_path, method):
    "Each run is done once, and all copies write the same results"
    script = ROOT / 'nbs' / 'tutorials' / 'slurm_array.sh'
    runs, out = tmp_path / 'runs', tmp_path / 'out'
    env = os.environ | dict(PATH=f'{SCRIPTS}:{os.environ["PATH"]}', REINIT_RUNS=str(runs), OUT=str(out),
                            REINIT_LOCK=method, PYTHONPATH=str(ROOT), SLURM_CPUS_PER_TASK='1')
    argv = ['bash', str(script), 'synthetic', '--scale', 'smoke', '--json']
    copies = [subprocess.Popen(argv, env=env | dict(SLURM_ARRAY_TASK_ID=str(i)), stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.PIPE) for i in range(4)]
    printed = [p.communicate(timeout=550) for p in copies]
    assert [p.returncode for p in copies] == [0] * 4, printed
    told = [json.loads(out[out.index('{'):]) for out, _ in printed]
    n = told[0]['runs']
    assert all(o['runs'] == n and not o['left_out'] for o in told)
    assert len(list(runs.glob('??/*/record.json'))) == n and list((runs / '.locks').iterdir()) == []
    assert all(o['tables'] == told[0]['tables'] for o in told)


@posix
@pytest.mark.parametrize('name', ['slurm_array.sh', 'slurm_ray.sh'])
def test_scripts_call_the_command(name, tmp_path):
    "With one process per GPU where there are any, and a report for each command"
    bin = tmp_path / 'bin'
    bin.mkdir()
    stubs = dict(reinit_repro='echo "$@"', srun='while [ "$1" != reinit_repro ]; do shift; done; "$@"',
                 scontrol='echo first')
    for stub, text in stubs.items():
        (bin / stub).write_text(f'#!/bin/bash\n{text}\n')
        (bin / stub).chmod(0o755)
    known = {k: v for k, v in os.environ.items() if not k.startswith(('SLURM', 'OUT'))}
    env = known | dict(PATH=f'{bin}:{os.environ["PATH"]}', REINIT_RUNS=str(tmp_path / 'runs'), SLURM_NNODES='2',
                       SLURM_JOB_NODELIST='n[1-2]')
    def called(*args, **more):
        argv = ['bash', str(ROOT / 'nbs' / 'tutorials' / name), *args]
        return subprocess.run(argv, env=env | more, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    out = f'--out {tmp_path}/runs-report/reinit_cnn_--scale_paper'
    plain = called('reinit_cnn', '--scale', 'paper')
    if name == 'slurm_ray.sh':
        assert plain == f'reinit_cnn --scale paper --cluster auto {out}'
        return
    assert plain == f'reinit_cnn --scale paper --workers 1 {out}'
    assert called('all', SLURM_CPUS_PER_TASK='4', OUT='o') == 'all --workers 4 --out o'
    assert called('all', SLURM_GPUS_ON_NODE='2', OUT='o') == 'all --gpus 2 --out o'


def test_scripts_hold_together():
    "The options that the job scripts use exist; the signal reaches Python"
    from reinit_nb.cli import repro_parser
    array, ray = (ROOT / 'nbs' / 'tutorials' / name for name in ('slurm_array.sh', 'slurm_ray.sh'))
    parser = repro_parser()
    args = parser.parse_args(['reinit_cnn', '--scale', 'paper', '--workers', '2', '--out', 'o'])
    assert (args.workers, args.gpus, args.cluster) == (2, None, None)
    args = parser.parse_args(['reinit_cnn', '--cluster', 'auto', '--out', 'o'])
    assert args.cluster == 'auto'
    text = array.read_text()
    assert 'exec reinit_repro "$@" "${places[@]}" --out' in text and '--signal=B:TERM' in text
    assert 'ray symmetric-run --address' in ray.read_text() and '--cluster auto' in ray.read_text()
    for file in (array, ray): assert subprocess.run(['bash', '-n', str(file)]).returncode == 0

"The store under fire: killed writers, processes that race, damaged files, folders that cannot be written"
import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from reinit_nb.core import Recipe, ReinitError, Store

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(os.name != 'posix', reason='needs signals and flock')


@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1


HEAD = '''
import os, sys, time
from dataclasses import dataclass
from reinit_nb.core import Recipe, Store
@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1
store = Store(sys.argv[1])
def say(x): print(x, flush=True)
def wait(): say('ready'); sys.stdin.readline()
'''


def start(code, root):
    "Another Python process that works on the store `root`"
    return subprocess.Popen([sys.executable, '-c', HEAD + code, str(root)], env=dict(os.environ, PYTHONPATH=str(ROOT)), text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def until(p, word): assert p.stdout.readline().strip() == word
def go(p): p.stdin.write('\n'); p.stdin.flush()
def temporary(root): return list(root.glob('.tmp-*'))
def records(root): return [p for p in root.glob('*/*/record.json') if not p.parts[-3].startswith('.')]


# A process that hangs at one point of a write: in the middle of the bytes, before they are on disk, and before the rename
MOMENTS = dict(
    half='''
import reinit_nb.core as core
def half(path, data):
    with open(path, 'wb') as f: f.write(data[:len(data)//2]); f.flush(); os.fsync(f.fileno()); hang()
core._write_synced = half''',
    fsync='os.fsync = lambda fd: hang()',
    rename='os.rename = lambda a, b: hang()')


@posix
@pytest.mark.parametrize('moment', MOMENTS)
def test_kill_in_the_middle_of_a_write(tmp_path, moment):
    code = f'def hang(): say("ready"); time.sleep(60)\n{MOMENTS[moment]}\nstore.put(Job(), [dict(x=i) for i in range(1000)])'
    p = start(code, tmp_path)
    until(p, 'ready')
    assert len(temporary(tmp_path)) == 1
    store = Store(tmp_path)
    assert store.clean() == 0 and len(temporary(tmp_path)) == 1      # its writer lives: hands off
    p.send_signal(signal.SIGKILL)
    assert p.wait(30) == -signal.SIGKILL

    with warnings.catch_warnings():
        warnings.simplefilter('error')                               # not even a damaged record: there is none
        assert store.get(Job()) is None
    assert records(tmp_path) == [] and len(temporary(tmp_path)) == 1
    assert store.clean() == 1 and temporary(tmp_path) == []
    store.put(Job(), [dict(x=1)])
    assert store.get(Job()) == [dict(x=1)]


@posix
def test_a_claim_ends_with_its_process(tmp_path):
    p = start('with store.claim(Job()) as mine: say(mine); time.sleep(60)', tmp_path)
    until(p, 'True')
    store = Store(tmp_path)
    with store.claim(Job()) as mine: assert not mine
    with store.claim(Job(2)) as mine: assert mine                    # another recipe is free
    p.send_signal(signal.SIGKILL)
    p.wait(30)
    with store.claim(Job()) as mine: assert mine


@posix
def test_a_lock_file_removed_by_its_last_owner_is_no_claim(tmp_path, monkeypatch):
    "Between our opening of the lock file and our locking it, its owner finishes and removes it"
    import fcntl
    store, real, calls = Store(tmp_path), fcntl.flock, []
    def flock(f, how):
        if not calls: os.unlink(f.name)
        calls.append(f)
        return real(f, how)
    monkeypatch.setattr(fcntl, 'flock', flock)
    with store.claim(Job()) as mine, store.claim(Job()) as again: assert (mine, again) == (True, False)


@posix
def test_with_claims_exactly_one_process_runs_it(tmp_path):
    code = '''
wait()
for n in range(20):
    with store.claim(Job(n)) as mine:
        if mine and Job(n) not in store:
            time.sleep(.01)
            open(f'{sys.argv[1]}/ran-{n}', 'a').write(f'{os.getpid()}\\n')
            store.put(Job(n), [dict(pid=os.getpid())])
'''
    ps = [start(code, tmp_path) for _ in range(2)]
    for p in ps: until(p, 'ready')
    for p in ps: go(p)
    assert [p.wait(60) for p in ps] == [0, 0]
    store = Store(tmp_path)
    for n in range(20):
        runs = (tmp_path / f'ran-{n}').read_text().split()
        assert len(runs) == 1 and store.get(Job(n)) == [dict(pid=int(runs[0]))]
    assert list((tmp_path / '.locks').iterdir()) == []


@posix
def test_without_claims_the_first_record_stays(tmp_path):
    "Both processes are about to rename when we let them go"
    code = '''
rename = os.rename
def late(a, b): wait(); rename(a, b)
os.rename = late
store.put(Job(), [dict(pid=os.getpid(), x=i) for i in range(100)])
say('done')
'''
    ps = [start(code, tmp_path) for _ in range(2)]
    for p in ps: until(p, 'ready')
    assert len(temporary(tmp_path)) == 2
    for p in ps: go(p)
    for p in ps: until(p, 'done')
    assert [p.wait(30) for p in ps] == [0, 0]
    rows = Store(tmp_path).get(Job())
    assert len(rows) == 100 and len({r['pid'] for r in rows}) == 1 and rows[0]['pid'] in [p.pid for p in ps]
    assert len(records(tmp_path)) == 1 and temporary(tmp_path) == []


@posix
def test_many_writers_and_readers(tmp_path):
    code = '''
import warnings; warnings.simplefilter('error')
wait()
for n in list(range(10))*2:
    store.put(Job(n), [dict(n_squared=n*n)])
    assert store.get(Job(n)) == [dict(n_squared=n*n)]
'''
    ps = [start(code, tmp_path) for _ in range(3)]
    for p in ps: until(p, 'ready')
    for p in ps: go(p)
    assert [p.wait(120) for p in ps] == [0, 0, 0]
    assert len(records(tmp_path)) == 10 and temporary(tmp_path) == [] and not (tmp_path / '.corrupt').exists()


def damaged_is_reported_and_rerun(store, reason):
    with pytest.warns(UserWarning, match=f'is damaged, {reason}'): assert store.get(Job()) is None
    aside = list((store.root / '.corrupt').iterdir())
    assert len(aside) == 1 and aside[0].name.startswith(Job().hash)
    with warnings.catch_warnings():
        warnings.simplefilter('error')                               # reported once, then simply absent
        assert Job() not in store
    store.put(Job(), [dict(x=2)])
    assert store.get(Job()) == [dict(x=2)]


@pytest.mark.parametrize('keep', [0, 1, .5, -1])
def test_a_truncated_record(tmp_path, keep):
    store = Store(tmp_path)
    f = store.put(Job(), [dict(x=1)]) / 'record.json'
    data = f.read_bytes()
    f.write_bytes(data[:int(keep * len(data)) if keep == .5 else keep])
    damaged_is_reported_and_rerun(store, 'it cannot be parsed')


def test_every_flipped_byte_is_noticed(tmp_path):
    store = Store(tmp_path)
    f = store.put(Job(), [dict(x=1234)]) / 'record.json'
    data = f.read_bytes()
    for i in range(len(data)):
        f.parent.mkdir(exist_ok=True)
        f.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1:])
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            rows = store.get(Job())
        # white space between the tokens may turn into other white space; nothing else may pass
        assert rows is None or (rows == [dict(x=1234)] and chr(data[i]).isspace()), (i, data[i])
        if rows is None: assert not f.exists()


def test_a_changed_number(tmp_path):
    store = Store(tmp_path)
    f = store.put(Job(), [dict(x=1234)]) / 'record.json'
    f.write_text(f.read_text().replace('1234', '1235'))
    damaged_is_reported_and_rerun(store, 'its checksum is wrong')


def test_the_record_of_another_recipe(tmp_path):
    store = Store(tmp_path)
    store.put(Job(2), [dict(x=1)])
    store.path(Job()).parent.mkdir(exist_ok=True)
    store.path(Job(2)).rename(store.path(Job()))
    damaged_is_reported_and_rerun(store, 'it belongs to another recipe')


def test_a_put_over_a_damaged_record(tmp_path):
    store = Store(tmp_path)
    (store.put(Job(), [dict(x=1)]) / 'record.json').write_text('{')
    with pytest.warns(UserWarning, match='is damaged'): store.put(Job(), [dict(x=2)])
    assert store.get(Job()) == [dict(x=2)]


def test_another_format_is_an_error_not_damage(tmp_path):
    class Newer(Store): format = 99
    Newer(tmp_path).put(Job(), [dict(x=1)])
    for ask in (Store(tmp_path).get, Store(tmp_path).__contains__, lambda r: Store(tmp_path).frame([r])):
        with pytest.raises(ReinitError, match='has format 99, written by reinit_nb .*this is format 1: use another root'): ask(Job())
    assert Newer(tmp_path).get(Job()) == [dict(x=1)]


def test_unwritable_root(tmp_path):
    "A folder below a regular file: impossible for everyone, root included"
    (tmp_path / 'file').write_text('')
    store = Store(tmp_path / 'file' / 'runs')
    assert store.get(Job()) is None
    for ask in (store.check_writable, lambda: store.put(Job(), [dict(x=1)]), lambda: store.claim(Job()).__enter__()):
        with pytest.raises(ReinitError, match='file/runs cannot be written'): ask()


@pytest.mark.skipif(os.name != 'posix' or os.geteuid() == 0, reason='the superuser may write to read-only folders')
def test_read_only_root(tmp_path):
    store = Store(tmp_path / 'runs')
    store.put(Job(), [dict(x=1)])
    store.root.chmod(0o555)
    try:
        assert store.get(Job()) == [dict(x=1)]
        with pytest.raises(ReinitError, match='cannot be written'): store.check_writable()
    finally: store.root.chmod(0o755)


def test_reading_makes_no_folders(tmp_path):
    store = Store(tmp_path / 'runs')
    assert store.get(Job()) is None and Job() not in store and store.clean() == 0
    assert not store.root.exists()


def test_record_has_provenance_and_is_json(tmp_path):
    store = Store(tmp_path)
    d = json.loads((store.put(Job(), [dict(x=1)], seconds=2) / 'record.json').read_text())
    assert set(d) == {'format', 'recipe', 'rows', 'provenance', 'seconds', 'sha256'} and d['seconds'] == 2.
    assert d['provenance']['torch'] and d['recipe'] == Job().to_dict()


def test_frame_counts_what_is_missing(tmp_path):
    store = Store(tmp_path)
    store.put(Job(1), [dict(x=1), dict(x=2)])
    df = store.frame([Job(1)])
    assert df.columns.tolist() == ['recipe', 'n', 'x'] and len(df) == 2
    with pytest.raises(ReinitError, match='2 of 3 recipes are not in'): store.frame([Job(1), Job(2), Job(3)])

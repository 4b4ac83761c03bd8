"The store under fire: killed writers, processes that race, damaged files, folders that cannot be written"
import json
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from reinit_nb import store as store_module
from reinit_nb.core import Recipe, ReinitError
from reinit_nb.store import (
    ROW_COUNT,
    Store,
    backoff_times,
    file_system,
    load_results,
    lock_method,
    paper_table,
    record_checksum,
    results_rows,
    save_results,
    try_lock,
    wait_lock,
)

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(os.name != 'posix', reason='needs signals and flock')


@pytest.fixture(params=['flock', 'lease'])
def method(request, monkeypatch):
    "The test once with each kind of lock, here and in the processes that it starts"
    if request.param == 'flock' and os.name != 'posix': pytest.skip('no flock here')
    monkeypatch.setenv('REINIT_LOCK', request.param)
    return request.param


@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1


HEAD = '''
import os, sys, time
from dataclasses import dataclass
from reinit_nb.core import Recipe
from reinit_nb.store import Store
@dataclass(frozen=True)
class Job(Recipe):
    n: int = 1
store = Store(sys.argv[1])
def say(x): print(x, flush=True)
def wait(): say('ready'); sys.stdin.readline()
'''


def start(code, root):
    "Another Python process that works on the store `unwrap_model`"
    command = [sys.executable, '-c', HEAD + code, str(root)]
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def until(p, word): assert p.stdout.readline().strip() == word
def go(p): print(file=p.stdin, flush=True)
def temporary(root): return list(root.glob('.tmp-*'))
def records(root): return [p for p in root.glob('*/*/record.json') if not p.parts[-3].startswith('.')]


# A process that hangs at one point of a write: amid the bytes, before they are on disk, and before the rename
MOMENTS = dict(
    half='''
import reinit_nb.store as store_module
def half(path, data):
    with open(path, 'wb') as f: f.write(data[:len(data)//2]); f.flush(); os.fsync(f.fileno()); hang()
store_module.write_synced = half''',
    fsync='os.fsync = lambda fd: hang()',
    rename='os.rename = lambda a, b: hang()')


@posix
@pytest.mark.parametrize('moment', MOMENTS)
def test_kill_in_the_middle_of_a_write(tmp_path, moment):
    hang = 'def hang(): say("ready"); time.sleep(60)'
    put = 'store.put(Job(), [dict(x=i) for i in range(1000)])'
    p = start(f'{hang}\n{MOMENTS[moment]}\n{put}', tmp_path)
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
def test_a_claim_ends_with_its_process(tmp_path, method):
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
    (tmp_path / '.locks').mkdir()
    assert lock_method(tmp_path / '.locks') == 'flock'               # tested once, before the owner is
    def flock(f, how):
        if not calls: os.unlink(f.name)
        calls.append(f)
        return real(f, how)
    monkeypatch.setattr(fcntl, 'flock', flock)
    with store.claim(Job()) as mine, store.claim(Job()) as again: assert (mine, again) == (True, False)


@posix
def test_with_claims_exactly_one_process_runs_it(tmp_path, method):
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


def lease(path, age=0, **owner):
    "Write the lease of another machine"
    theirs = dict(host='node7', machine='node7', pid=1, started='', token='theirs') | owner
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(theirs))
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))


def test_leases_of_other_machines(tmp_path, monkeypatch):
    "Held while there are signs of life, void after a long silence"
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path = tmp_path / 'a' / 'lock'
    lease(path)
    with try_lock(path) as mine: assert not mine
    assert json.loads(path.read_text())['token'] == 'theirs'         # untouched
    lease(path, age=store_module.LEASE_SECONDS + 5)
    with try_lock(path) as mine:
        assert mine and json.loads(path.read_text())['pid'] == os.getpid()
    assert list(path.parent.iterdir()) == []
    path.write_text('')                                              # its owner is about to write it
    with try_lock(path) as mine: assert not mine


@posix
def test_lease_of_a_dead_or_a_later_process(tmp_path, monkeypatch):
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path, here = tmp_path / 'lock', store_module._machine_id()
    lease(path, machine=here, pid=os.getpid(), started=store_module._process_start(os.getpid()))
    with try_lock(path) as mine: assert not mine                     # a live process of this machine
    lease(path, machine=here, pid=os.getpid(), started='1')
    with try_lock(path) as mine: assert mine                         # the number was given to another process since
    zombie = subprocess.Popen([sys.executable, '-c', ''])
    started = store_module._process_start(zombie.pid)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)         # it has ended, and nobody asked how
    lease(path, machine=here, pid=zombie.pid, started=started)
    with try_lock(path) as mine: assert mine
    zombie.wait()


def test_an_abandoned_lease_is_taken_over_once(tmp_path, monkeypatch):
    "Between our judgment and our replacing it, another process was faster"
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path = tmp_path / 'lock'
    lease(path, age=1000)
    judge = store_module._is_abandoned
    def slowly(path, found):
        abandoned = judge(path, found)
        lease(path, token='faster')
        return abandoned
    monkeypatch.setattr(store_module, '_is_abandoned', slowly)
    with try_lock(path) as mine: assert not mine
    assert json.loads(path.read_text())['token'] == 'faster'
    assert [p.name for p in tmp_path.iterdir()] == ['lock']


def test_a_takeover_that_was_killed(tmp_path, monkeypatch):
    "What it left stops the others for a while, not forever"
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path, guard = tmp_path / 'lock', tmp_path / 'lock.takeover'
    lease(path, age=1000)
    guard.touch()
    with try_lock(path) as mine: assert not mine
    now = guard.stat().st_mtime
    os.utime(guard, (now - 1000, now - 1000))
    with try_lock(path) as mine: assert not mine                     # removes it
    with try_lock(path) as mine: assert mine


def test_an_owner_that_gives_a_sign_of_life_after_all(tmp_path, monkeypatch):
    "As a process that was stopped for minutes and continues while its lease is taken over"
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path = tmp_path / 'lock'
    lease(path, age=1000)
    create = store_module._create
    def continued(file, text):
        if file.name.endswith('.takeover'): os.utime(path)
        return create(file, text)
    monkeypatch.setattr(store_module, '_create', continued)
    with try_lock(path) as mine: assert not mine
    assert json.loads(path.read_text())['token'] == 'theirs' and [p.name for p in tmp_path.iterdir()] == ['lock']


def test_a_takeover_that_was_thought_to_be_killed(tmp_path, monkeypatch):
    "It took so long that another process has removed its guard, and takes over itself"
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path, guard = tmp_path / 'lock', tmp_path / 'lock.takeover'
    lease(path, age=1000)
    create = store_module._create
    def slowly(file, text):
        if file == guard: return create(file, text)
        if file != path: guard.write_text('{"token": "another"}')
        return create(file, text)
    monkeypatch.setattr(store_module, '_create', slowly)
    with try_lock(path) as mine: assert not mine
    assert json.loads(path.read_text())['token'] == 'theirs'           # left to the other one
    assert sorted(p.name for p in tmp_path.iterdir()) == ['lock', 'lock.takeover']


@posix
def test_a_process_that_cannot_be_seen(tmp_path, monkeypatch):
    "Of another user, on a system that hides the processes of others; or on a system without /proc"
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path, here = tmp_path / 'lock', store_module._machine_id()
    def denied(pid, number): raise PermissionError
    for kill, started in ((denied, '123'), (lambda pid, number: None, '')):
        monkeypatch.setattr(store_module.os, 'kill', kill)
        monkeypatch.setattr(store_module, '_process_start', lambda pid: '')
        lease(path, machine=here, started=started)
        with try_lock(path) as mine: assert not mine                   # it may be running
        lease(path, 1000, machine=here, started=started)
        with try_lock(path) as mine: assert mine                       # but has been silent for long


def test_a_lease_that_was_taken_over_is_not_renewed(tmp_path, monkeypatch):
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    path, rounds = tmp_path / 'lock', []
    def wait(seconds):
        if len(rounds) == 2: raise KeyboardInterrupt
        rounds.append(seconds)
    with try_lock(path) as mine:
        assert mine
        lease(path, age=1000)
        before = path.stat().st_mtime
        monkeypatch.setattr(store_module.time, 'sleep', wait)
        with pytest.raises(KeyboardInterrupt): store_module._renew_leases()
        assert len(rounds) == 2 and path.stat().st_mtime == before
    assert json.loads(path.read_text())['token'] == 'theirs'


def test_leases_give_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    renewed = threading.Event()
    monkeypatch.setattr(store_module, '_SIGN_OF_LIFE', .01)
    monkeypatch.setattr(store_module, '_heart', [])
    real = os.utime
    def utime(path, *args):
        real(path, *args)
        if not args: renewed.set()
    monkeypatch.setattr(store_module.os, 'utime', utime)
    with try_lock(tmp_path / 'lock') as mine: assert mine and renewed.wait(30)


def test_kind_of_lock(tmp_path, monkeypatch):
    "A lease on network file systems and where flock does not exclude a second owner; the variable decides"
    def chosen(kind, works):
        store_module._best_lock.cache_clear()
        monkeypatch.setattr(store_module, 'file_system', lambda path: kind)
        monkeypatch.setattr(store_module, '_flock_works', lambda path: works)
        return lock_method(tmp_path)
    monkeypatch.delenv('REINIT_LOCK', raising=False)
    assert chosen('ext4', True) == 'flock' and chosen('', True) == 'flock'
    for kind in ('nfs4', 'lustre', 'gpfs', 'fuse.sshfs', 'cifs'): assert chosen(kind, True) == 'lease'
    assert chosen('ext4', False) == 'lease'
    monkeypatch.setenv('REINIT_LOCK', 'lease')
    assert chosen('ext4', True) == 'lease'
    monkeypatch.setenv('REINIT_LOCK', 'flock')
    assert chosen('nfs4', True) == 'flock'
    with pytest.raises(ReinitError, match='REINIT_LOCK=flock does not work in'): chosen('ext4', False)
    monkeypatch.setenv('REINIT_LOCK', 'file')
    with pytest.raises(ReinitError, match="REINIT_LOCK='file' is not known"): chosen('ext4', True)
    store_module._best_lock.cache_clear()


def test_without_fcntl_there_are_leases(tmp_path, monkeypatch):
    "As on Windows"
    monkeypatch.setitem(sys.modules, 'fcntl', None)
    monkeypatch.delenv('REINIT_LOCK', raising=False)
    store = Store(tmp_path)
    with store.claim(Job()) as mine, store.claim(Job()) as again: assert (mine, again) == (True, False)


@pytest.mark.skipif(not Path('/proc/self/mountinfo').exists(), reason='needs /proc')
def test_file_system():
    assert file_system('/proc/self') == 'proc' and file_system(ROOT)


def test_waiting_for_a_lock(tmp_path, method):
    p = start('from reinit_nb.store import try_lock\n'
              'with try_lock(sys.argv[1] + "/lock") as mine: say(mine); sys.stdin.readline()', tmp_path)
    until(p, 'True')
    order = []
    thread = threading.Thread(target=lambda: (p.stdout.read(), order.append('over')))   # ends with the process
    thread.start()
    go(p)
    with wait_lock(tmp_path / 'lock'): pass
    p.wait(30)
    thread.join(30)
    assert order == ['over'] and not (tmp_path / 'lock').exists()


def test_pauses_double_up_to_a_limit():
    pauses = [pause for _, pause in zip(range(20), backoff_times(.5, 8))]
    for i, pause in enumerate(pauses): assert min(.5 * 2**i, 8) / 2 <= pause <= min(.5 * 2**i, 8)
    assert len(set(pauses)) == 20                                    # at random, so that nobody acts in step


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
        with pytest.raises(ReinitError, match='has format 99, written by reinit_nb .*this is format 1: use another'):
            ask(Job())
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
    keys = {'format', 'recipe', 'rows', 'provenance', 'seconds', 'memory_mb', 'gpu_mb', 'sha256'}
    assert set(d) == keys and d['seconds'] == 2.
    assert d['provenance']['torch'] and d['recipe'] == Job().to_dict()


def test_frame_counts_what_is_missing(tmp_path):
    store = Store(tmp_path)
    store.put(Job(1), [dict(x=1), dict(x=2)])
    df = store.frame([Job(1)])
    assert df.columns.tolist() == ['recipe', 'n', 'x'] and len(df) == 2
    with pytest.raises(ReinitError, match='2 of 3 recipes are not in'): store.frame([Job(1), Job(2), Job(3)])


# ---------------------------------------------------------------- results files

@dataclass(frozen=True)
class Part(Recipe):
    rate: float = .5


@dataclass(frozen=True)
class Nested(Recipe):
    d: 'str|None' = None
    inner: Part = Part()


def test_results_keep_hashes_and_names_as_text(tmp_path):
    r = Nested(d='NA')
    s = Store(tmp_path / 'runs')
    s.put(r, [dict(name='nan', x=1 / 3, n=3), dict(name='None', x=math.nan, n=4)])
    df = s.frame([r], provenance=True)
    digits = df.assign(recipe='1234567890123456')            # a hash may consist of digits, or look like 12e34
    back = load_results(save_results(digits, tmp_path / 'r.csv'))
    assert back['recipe'].tolist() == ['1234567890123456'] * 2 and back['d'].tolist() == ['NA'] * 2
    back = load_results(save_results(df, tmp_path / 'r.csv'))
    assert back['name'].tolist() == ['nan', 'None'] and back['x'][0] == .333333 and math.isnan(back['x'][1])
    assert [o['n'] for o in results_rows(back, r)] == [3, 4] and set(results_rows(back, r)[0]) == {'name', 'x', 'n'}
    assert results_rows(back, Nested()) is None
    assert back['date'].tolist() == df['date'].tolist()


def test_recorded_runs_are_taken_over(tmp_path):
    "Rows and provenance are those of the file, bit by bit; what other runs of the file measured is left out"
    first, second, third = Nested(d='a'), Nested(d='b'), Nested(d='c')
    there = Store(tmp_path / 'there')
    there.put(first, [dict(name='nan', x=1 / 3, n=3, ok=True), dict(name='b', x=math.nan, n=4, ok=False)], seconds=2.)
    there.put(second, [dict(y=7, z=.1 + .2)], seconds=.5)
    df = there.frame([first, second], provenance=True).assign(machine='elsewhere', date='2020-01-01T00:00:00+00:00')
    file = save_results(df, tmp_path / 'r.csv')
    here = Store(tmp_path / 'here')
    assert here.adopt([third, first, second, first], load_results(file), file.name) == 2
    assert third not in here
    again = here.frame([first, second], provenance=True)
    assert save_results(again, tmp_path / 'again.csv').read_bytes() == file.read_bytes()
    assert here.get(second) == [dict(y=7, z=.3)]
    assert here.get(first)[1] == dict(name='b', x=None, n=4, ok=False)
    record = here.record(first)
    assert record['provenance']['machine'] == 'elsewhere' and record['seconds'] == 2
    assert record['adopted']['source'] == 'r.csv' and record['adopted']['date'] > record['provenance']['date']
    assert 'adopted' not in there.record(first)
    other = load_results(file).assign(x=9.)
    assert here.adopt([first, second], other) == 0 and here.get(first)[0]['x'] == .333333   # what is there stays
    with pytest.raises(ReinitError, match='df has no column date: it should be as from `load_results`'):
        here.adopt([first], load_results(file).drop(columns='date'))


def test_results_cut_anywhere_are_refused(tmp_path):
    p, s = tmp_path / 'r.csv', Store(tmp_path / 'runs')
    s.put(Nested(), [dict(x=i / 7) for i in range(3)])
    text = save_results(s.frame([Nested()]), p).read_text()
    for cut in range(len(text)):
        p.write_text(text[:cut])
        with pytest.raises(ReinitError, match='r.csv is cut short'): load_results(p)


def test_paper_tables():
    assert set(paper_table('reinit_table1')['method']) == {'BL', 'WELSR', 'DSD', 'WELS', 'FC', 'LW'}
    with pytest.raises(ReinitError, match="did you mean 'reinit_table"): paper_table('reinit_tabel1')


def test_results_with_a_line_missing_in_the_middle_are_refused(tmp_path):
    p, s = tmp_path / 'r.csv', Store(tmp_path / 'runs')
    s.put(Nested(), [dict(x=i) for i in range(4)])
    lines = save_results(s.frame([Nested()]), p).read_text().splitlines(keepends=True)
    p.write_text(''.join(lines[:2] + lines[3:]))
    with pytest.raises(ReinitError, match='r.csv is cut short'): load_results(p)


def test_results_without_a_row_count_are_refused(tmp_path):
    p, s = tmp_path / 'r.csv', Store(tmp_path / 'runs')
    s.put(Nested(), [dict(x=i) for i in range(4)])
    df = load_results(save_results(s.frame([Nested()]), p))
    df.to_csv(p, index=False)
    assert ROW_COUNT not in p.read_text()
    with pytest.raises(ReinitError, match='r.csv is cut short or damaged'): load_results(p)
    save_results(df.iloc[:2], p)        # saved again: with its own count
    assert len(load_results(p)) == 2


@pytest.mark.parametrize('path', sorted((ROOT / 'results').glob('*.csv')), ids=lambda p: p.stem)
def test_published_results_load(path):
    df = load_results(path)
    assert len(df) and ROW_COUNT not in df


# ---------------------------------------------------------------- wrong input

@pytest.mark.parametrize('wrong, said', [
    (lambda: Store(3), 'root=3 should be the name of a folder'),
    (lambda: Store('.').frame(None), 'recipes is a NoneType, and should be a list of recipes'),
    (lambda: Store('.').frame([3]), 'recipe is a int'),
    (lambda: save_results(None, 'r.csv'), 'df is a NoneType, and should be a DataFrame'),
    (lambda: save_results([dict(a=1)], 'r.csv'), 'df is a list'),
    (lambda: load_results(None), 'path=None should be the name of a CSV file'),
    (lambda: Store('.').put(Job(), [dict(x=1)], seconds=-1), 'seconds=-1 should be')])
def test_wrong_types_are_named(wrong, said):
    with pytest.raises(ReinitError, match=said): wrong()

@pytest.mark.parametrize('change', [dict(rows=[1]), dict(rows=3), dict(provenance=None)], ids=str)
def test_records_of_another_shape_are_damaged(tmp_path, change):
    store = Store(tmp_path)
    store.put(Job(), [dict(x=1)])
    file = store.path(Job()) / 'record.json'
    record = json.loads(file.read_text()) | change
    record['sha256'] = record_checksum(record)
    file.write_text(json.dumps(record))
    with pytest.warns(UserWarning, match='is damaged'): assert store.get(Job()) is None


@pytest.mark.parametrize('rows, said', [
    (dict(x=1), 'rows is a dict'), ('x', 'rows is a str'), (None, 'rows is a NoneType'), (3, 'rows is a int'),
    ([1], 'row 0 is a int'), ([dict(x=1), ('x', 2)], 'row 1 is a tuple'), ([dict(x=[1])], "column 'x' has a list"),
    ([{1: 2}], 'column 1 has a int'), ([dict(n=2)], "'n' is taken"),
    ([dict(rows_in_file=2)], "'rows_in_file' is taken")])
def test_rows_that_cannot_be_kept(tmp_path, rows, said):
    store = Store(tmp_path)
    with pytest.raises(ReinitError, match=said): store.put(Job(), rows)
    assert Job() not in store


@pytest.mark.parametrize('seconds', ['fast', True, float('nan')])
def test_seconds_are_a_number(tmp_path, seconds):
    with pytest.raises(ReinitError, match='seconds='): Store(tmp_path).put(Job(), [dict(x=1)], seconds)


@pytest.mark.parametrize('method', ['path', 'get', 'record', '__contains__'])
def test_what_is_not_a_recipe(tmp_path, method):
    store = Store(tmp_path)
    with pytest.raises(ReinitError, match='recipe is a dict, and should be a Recipe'): getattr(store, method)({})
    with pytest.raises(ReinitError, match='recipe is a str'): store.put('job', [])


def test_a_record_that_cannot_be_read_is_an_error(tmp_path):
    store = Store(tmp_path)
    file = store.put(Job(), [dict(x=1)]) / 'record.json'
    file.unlink()
    file.mkdir()
    with pytest.raises(ReinitError, match='cannot be read: Is a directory'): store.get(Job())


def test_a_file_in_the_place_of_a_record_is_moved_aside(tmp_path):
    store = Store(tmp_path)
    folder = store.path(Job())
    folder.parent.mkdir(parents=True)
    folder.write_text('')
    with pytest.warns(UserWarning, match='it has no record.json'): assert store.get(Job()) is None
    assert not folder.exists()


def test_a_record_without_rows_is_damaged(tmp_path):
    store = Store(tmp_path)
    file = store.put(Job(), [dict(x=1)]) / 'record.json'
    record = json.loads(file.read_text())
    del record['rows']
    file.write_text(json.dumps(record | dict(sha256=record_checksum(record))))
    with pytest.warns(UserWarning, match='it is incomplete'): assert store.get(Job()) is None

"The store under fire: killed writers, processes that race, damaged files, folders that cannot be written"
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from reinit_nb.core import Recipe, ReinitError
from reinit_nb.store import ROW_COUNT, Store, load_results, paper_table, record_checksum, results_rows, save_results

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(os.name != 'posix', reason='needs signals and flock')


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
    assert set(d) == {'format', 'recipe', 'rows', 'provenance', 'seconds', 'sha256'} and d['seconds'] == 2.
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


def test_results_written_before_files_had_a_count_are_read(tmp_path):
    p, s = tmp_path / 'r.csv', Store(tmp_path / 'runs')
    s.put(Nested(), [dict(x=i) for i in range(4)])
    df = load_results(save_results(s.frame([Nested()]), p))
    df.to_csv(p, index=False)
    assert ROW_COUNT not in p.read_text()
    assert load_results(p).equals(df)
    save_results(df.iloc[:2], p)        # saved again: with its own count
    assert len(load_results(p)) == 2


@pytest.mark.parametrize('path', sorted((ROOT / 'results').glob('*.csv')), ids=lambda p: p.stem)
def test_published_results_load(path):
    df = load_results(path)
    assert len(df) and ROW_COUNT not in df


# ---------------------------------------------------------------- wrong input

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

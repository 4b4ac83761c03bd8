"The commands: `reinit_repro` at smoke scale, `reinit_claims`, `reinit_report`, `reinit_frozen`, `reinit_bench`"
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch

from reinit_nb import __version__, cli, sweep
from reinit_nb.claims import scorecard
from reinit_nb.cli import (
    MARKER,
    STUDIES,
    Parser,
    bench_parser,
    claim_lines,
    claims_parser,
    command,
    frozen_parser,
    marker,
    parser,
    reinit_bench,
    reinit_claims,
    reinit_frozen,
    reinit_report,
    reinit_repro,
    report_parser,
)
from reinit_nb.core import ReinitError
from reinit_nb.models import scnn
from reinit_nb.store import Store, load_results


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    "Every test in an empty folder, with nothing set"
    monkeypatch.chdir(tmp_path)
    for o in ('REINIT_RUNS', 'REINIT_SCALE'): monkeypatch.delenv(o, raising=False)

@pytest.fixture(autouse=True, scope='module')
def one_thread():
    "Smoke networks are small, and two threads wait long for each other where the cores are busy"
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

env = {**{k: v for k, v in os.environ.items() if k not in ('REINIT_RUNS', 'REINIT_SCALE')}, 'OMP_NUM_THREADS': '1', 'PYTHONIOENCODING': 'utf-8'}

def records(root): return {f.parent.name: f.stat().st_mtime_ns for f in Path(root).glob('??/*/record.json')}

@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "A finished smoke run: folder, and what was printed"
    d = tmp_path_factory.mktemp('done')
    r = subprocess.run([sys.executable, '-c', 'import sys; from reinit_nb.cli import reinit_repro; sys.exit(reinit_repro())', 'synthetic', '--scale', 'smoke', '--out', 'new/out', '--runs', 'kept'],
                       cwd=d, capture_output=True, encoding='utf-8', env=env)
    assert r.returncode == 0, r.stderr
    return d, r.stdout

# ---------------------------------------------------------------- a whole run

def test_writes_everything(done):
    d, printed = done
    out = d / 'new/out'
    assert sorted(o.name for o in out.iterdir()) == ['index.html', 'rounds.png', 'runs.csv', MARKER, 'table1.csv', 'table1.png', 'table5.csv', 'table5.png']
    for o in out.glob('*.png'): assert o.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    found = json.loads((out / MARKER).read_text())
    assert (found['study'], found['format'], found['reinit_nb'], found['scale']) == ('synthetic', 1, __version__, 'smoke')
    assert 'new/out/index.html' in printed and str(d) not in printed
    assert not list(d.rglob('.tmp-*'))

def test_tables_hold_the_papers_numbers(done):
    t1, t5 = (pd.read_csv(done[0] / 'new/out' / f'table{i}.csv') for i in (1, 5))
    assert len(t1) == 18 and len(t5) == 18 and t1.paper.notna().all() and t5.paper.notna().all()
    assert t1['mean'].between(0, 100).all() and t5['mean'].between(0, 1).all()
    for t in (t1, t5): assert (t.lo <= t['mean']).all() and (t['mean'] <= t.hi).all()
    runs = load_results(done[0] / 'new/out/runs.csv')
    assert set(runs.table) == {'table1', 'table5'} and runs.recipe.nunique() == len(records(done[0] / 'kept'))

def test_prints_tables_and_verdicts(done):
    printed = done[1]
    t1 = pd.read_csv(done[0] / 'new/out/table1.csv')
    for m in t1.method.unique(): assert re.search(rf'\b{m}\b', printed)
    for v in (*t1.paper, .82): assert f'({v}' in printed
    for v in t1['mean']: assert f'{v:.1f}' in printed
    assert all(re.search(rf'[✅❌➖] {o} ', printed) for o in ('R1', 'R2', 'R3'))

class Tables(HTMLParser):
    "Exact numbers of every table, by caption"
    def __init__(self, text):
        super().__init__()
        self.tables, self.caption, self.inside = {}, None, False
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        if tag == 'table': self.caption = None
        if tag == 'caption': self.inside = True
        if tag == 'tr' and self.caption: self.tables[self.caption].append([])
        if tag == 'td' and self.caption and 'data-v' in dict(attrs): self.tables[self.caption][-1].append(float(dict(attrs)['data-v']))
    def handle_data(self, data):
        if self.inside: self.caption, self.inside = data, False; self.tables[self.caption] = []

def test_page_agrees_with_csv(done):
    out = done[0] / 'new/out'
    found = {k[:7]: [r for r in v if r] for k, v in Tables((out / 'index.html').read_text(encoding='utf-8')).tables.items()}
    for i in (1, 5):
        t = pd.read_csv(out / f'table{i}.csv').drop(columns='method')
        page = pd.DataFrame(found[f'Table {i}'], columns=t.columns).astype(float)
        assert page.round(9).map('{:.6g}'.format).equals(t.astype(float).map('{:.6g}'.format))

def test_page_tells_everything(done):
    text = (done[0] / 'new/out/index.html').read_text(encoding='utf-8')
    for o in ('Verdicts', 'Table 1', 'Table 5', 'Round by round', 'How it was run'): assert f'<h2>{o}</h2>' in text
    assert text.count('>smoke</td>') == 4 and '>laptop</td>' not in text                 # three verdicts, and how it was run
    assert text.count('<img alt="') == 3 and 'smoke run' in text and __version__ in text
    assert not re.findall(r'(?:src|href)="(?!data:|#)|url\(|https?://', text)
    assert str(done[0]) not in text                                                         # no path of this machine

def test_second_run_trains_nothing(done, monkeypatch, capsys):
    d, _ = done
    monkeypatch.chdir(d)
    before, runs = records('kept'), Path('new/out/runs.csv').read_bytes()
    def no(*a, **k): raise AssertionError('something was run again')
    monkeypatch.setattr(Store, 'put', no)
    start = time.perf_counter()
    assert reinit_repro(['synthetic', '--scale', 'smoke', '--out', 'new/out', '--runs', 'kept']) == 0
    assert time.perf_counter() - start < 30
    assert ' 0 of them new' in capsys.readouterr().out and records('kept') == before
    new = Path('new/out/runs.csv').read_bytes()
    assert new == runs                                                                         # values, versions and dates are those of the runs

def test_runs_from_environment_and_more_seeds(done, monkeypatch, capsys):
    monkeypatch.setenv('REINIT_RUNS', str(done[0] / 'kept'))
    monkeypatch.setenv('REINIT_SCALE', 'smoke')
    n = len(records(done[0] / 'kept'))
    monkeypatch.setattr(sweep, 'run', lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert reinit_repro(['synthetic', '--out', 'o']) == 130
    assert f'Interrupted: {n} of {n} runs are finished and kept in' in capsys.readouterr().err
    assert reinit_repro(['synthetic', '--out', 'o', '--seeds', '1']) == 130
    assert re.search(r'Interrupted: (\d+) of \1 runs', capsys.readouterr().err)                # a first seed is the same seed

# ---------------------------------------------------------------- help

def test_help(capsys):
    assert reinit_repro([]) == 0
    text = capsys.readouterr().out
    assert reinit_repro(['--help']) == 0 and capsys.readouterr().out == text
    options = [o for a in parser()._actions for o in a.option_strings]
    for o in (*options, *STUDIES, 'smoke', 'laptop', 'paper', 'index.html', 'table1.csv', 'runs.csv', 'REINIT_SCALE', 'REINIT_RUNS', 'examples', 'Ctrl-C'): assert o in text
    assert {'--scale', '--seeds', '--out', '--runs'} <= set(options)
    assert reinit_repro(['--version']) == 0 and __version__ in capsys.readouterr().out

# ---------------------------------------------------------------- wrong input

@pytest.fixture
def refused(capsys, monkeypatch):
    "Call with wrong arguments; gives the message. Nothing may be run"
    def no(*a, **k): raise AssertionError('training was started')
    monkeypatch.setattr(sweep, 'run', no)
    def go(*argv):
        assert reinit_repro(argv) == 2
        got = capsys.readouterr()
        assert got.out == '' and got.err.startswith('reinit_repro: ') and got.err.count('\n') == 1
        return got.err
    return go

@pytest.mark.parametrize('argv,says', [
    ('syntetic', "did you mean 'synthetic'? Known: synthetic"), ('xyz', "study='xyz' is not known. Known: synthetic"), ('--scale smoke', 'which study? Known: synthetic'),
    ('synthetic --seeds 0', '--seeds=0 should be a whole number'), ('synthetic --seeds 99999999', '--seeds=99999999 should be a whole number'), ('synthetic --seeds -3', '--seeds=-3'), ('synthetic --seeds 2.5', "--seeds: invalid int value: '2.5'"),
    ('synthetic --seeds many', "--seeds: invalid int value: 'many'"), ('synthetic --seeds', '--seeds: expected one argument'),
    ('synthetic --scale labtop', "did you mean 'laptop'? Known: smoke, laptop, paper"), ('synthetic --sede 3', 'unrecognized arguments: --sede 3'),
    ('synthetic extra', 'unrecognized arguments: extra'), ('synthetic --out same --runs same', '--out and --runs are both same')])
def test_wrong_arguments(argv, says, refused):
    assert says in refused(*argv.split())
    assert os.listdir() == []                                                                  # not even a folder is left

def test_wrong_scale_in_environment(refused, monkeypatch):
    monkeypatch.setenv('REINIT_SCALE', 'big')
    assert "REINIT_SCALE='big' is not known" in refused('synthetic')

def test_out_is_a_file(refused):
    Path('o').write_text('mine')
    assert '--out o is a file; name a folder' in refused('synthetic', '--scale', 'smoke', '--out', 'o')
    assert '--out o/sub' in refused('synthetic', '--scale', 'smoke', '--out', 'o/sub')
    assert Path('o').read_text() == 'mine'

def test_out_is_occupied(refused):
    Path('o').mkdir()
    Path('o/.hidden').touch()
    for n in ('a.txt', 'b.txt', 'c.txt', 'd.txt'): (Path('o') / n).touch()
    before = sorted(os.listdir('o'))
    assert '--out o is occupied by a.txt, b.txt, c.txt and 1 more, and has no study.json of ours; name a new or an empty folder' in refused('synthetic', '--scale', 'smoke', '--out', 'o')
    assert sorted(os.listdir('o')) == before

@pytest.mark.parametrize('text,says', [
    (marker('synthetic', 'smoke').replace('"format": 1', '"format": 7'), 'another version (reinit_nb ' + __version__ + ', format 7;'),
    (marker('synthetic', 'smoke').replace(__version__, '99.0'), 'another version (reinit_nb 99.0, format 1;'),
    (marker('vision', 'smoke'), "holds the study 'vision'"), ('{', 'damaged or not ours'), ('[1]', 'damaged or not ours'), ('{"a":1}', 'damaged or not ours')])
def test_out_has_another_marker(text, says, refused):
    Path('o').mkdir()
    Path('o', MARKER).write_text(text)
    msg = refused('synthetic', '--scale', 'smoke', '--out', 'o')
    assert says in msg and 'choose another --out, or remove o' in msg and Path('o', MARKER).read_text() == text

def test_out_is_not_writable(refused, monkeypatch):
    Path('o').mkdir()
    if os.getuid(): Path('o').chmod(0o500)
    else: monkeypatch.setattr(cli.Path, 'expanduser', lambda p: Path('/proc/self/o') if p == Path('o') else p)    # nothing is forbidden to root, but this
    msg = refused('synthetic', '--scale', 'smoke', '--out', 'o')
    assert '--out' in msg and 'cannot be written' in msg and 'name another folder' in msg

def test_runs_is_not_a_folder(refused):
    Path('kept').touch()
    assert 'the store kept cannot be written' in refused('synthetic', '--scale', 'smoke', '--runs', 'kept')
    assert os.listdir() == ['kept']

# ---------------------------------------------------------------- Ctrl-C

# Each record takes a moment longer to write, so that the signal arrives between two of them
_slow = '''
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background jobs ignore it
from reinit_nb.core import Store
put,done = Store.put,[]
def slow(*a, **k):
    put(*a, **k); done.append(a); time.sleep(.1)
    if len(done)==3: open('waiting', 'w').close()
    while len(done)>=3 and not os.path.exists('signalled'): time.sleep(.02)   # however slow the test is in sending its signal
Store.put = slow
from reinit_nb.cli import reinit_repro
sys.exit(reinit_repro())
'''

@pytest.mark.skipif(os.name != 'posix', reason='signals are sent as on posix')
def test_interrupted_and_resumed(capsys):
    argv = ['synthetic', '--scale', 'smoke', '--out', 'o', '--runs', 'kept']
    p = subprocess.Popen([sys.executable, '-c', _slow, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', env=env)
    while not Path('waiting').exists() and p.poll() is None: time.sleep(.05)   # until it is between two runs, and nowhere else
    p.send_signal(signal.SIGINT)
    time.sleep(.1)                                                             # it wakes up to the signal, not to the file
    Path('signalled').touch()
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and out == '' and 'Traceback' not in err
    found = re.search(r'Interrupted: (\d+) of (\d+) runs are finished and kept in kept; the same command goes on from there', err)
    assert found, err
    kept, total, before = int(found[1]), int(found[2]), records('kept')
    assert 3 <= kept < total and len(before) == kept
    assert os.listdir('o') == [MARKER]                                                         # ours, so that the next call may write there

    assert reinit_repro(argv) == 0
    after = records('kept')
    assert len(after) == total and {k: after[k] for k in before} == before                       # what was finished was not run again
    assert f'{total} runs, {total-kept} of them new' in capsys.readouterr().out

# ---------------------------------------------------------------- reinit_frozen

def partly_frozen(n_out=10, **kw):
    "Two filters of the first convolution are frozen: 2·2 entries of the normalization, 2·32·9 of the next convolution"
    net = scnn(c_in=1, size=8, n_out=n_out, **kw)
    with torch.no_grad():
        for p in (net.block1.norm.weight, net.block1.norm.bias): p[:2] = 0
        net.block2.conv.weight[:, :2] = 0
    return net

SCNN = ['--arch', 'reinit_nb:scnn', '--option', 'c_in=1', '--option', 'size=8']

@pytest.fixture
def counted(capsys):
    "Call; gives what was printed"
    def go(*argv, code=0):
        assert reinit_frozen(argv) == code
        return capsys.readouterr()
    return go

def test_frozen_counts(counted):
    torch.save(dict(model=partly_frozen(7).state_dict(), epoch=3), 'net.pth')
    got = counted('net.pth', *SCNN)
    assert '2 of 704 filters are mutually frozen (0.28%); double-frozen weights 580, triple-frozen 0;' in got.out
    assert 'reading net.pth' in got.err and 'counting' in got.err and 'counting' not in got.out
    js = json.loads(counted('net.pth', *SCNN, '--json').out)
    assert js['totals']['frozen'] == 2 and js['totals']['double'] == 4 + 2 * 32 * 9 and js['cutoff'] == .01
    assert {o['layer']: o['frozen'] for o in js['layers'] if o['frozen']} == {'block1.conv': 2, 'block1.norm': 2}
    assert json.loads(counted('net.pth', *SCNN, '--json', '--cutoff', '1e9').out)['totals']['frozen'] == 704
    assert 'block2.conv' in counted('net.pth', *SCNN, '--readers').out
    assert json.loads(counted('net.pth', *SCNN, '--readers', '--json').out)[0]['next'] == 'block2.conv'

def test_frozen_exit_codes(counted):
    torch.save(partly_frozen().state_dict(), 'net.pth')
    counted('net.pth', *SCNN, '--max-share', '0.5')
    counted('net.pth', *SCNN, '--max-share', '0.00001', code=1)
    assert reinit_frozen([]) == 0 and reinit_frozen(['--help']) == 0 and reinit_frozen(['--version']) == 0

def test_frozen_help(capsys):
    assert reinit_frozen([]) == 0
    text = capsys.readouterr().out
    for o in (*(o for a in frozen_parser()._actions for o in a.option_strings), 'resnet50_imagenet', 'examples', 'exit code'): assert o in text

def test_frozen_as_a_command(tmp_path):
    "In a process of its own; only the table is on the standard output"
    torch.save(partly_frozen().state_dict(), 'net.pth')
    r = subprocess.run([sys.executable, '-c', 'import sys; from reinit_nb.cli import reinit_frozen; sys.exit(reinit_frozen())', 'net.pth', *SCNN, '--json'], cwd=tmp_path, capture_output=True, encoding='utf-8', env=env)
    assert r.returncode == 0 and json.loads(r.stdout)['totals']['frozen'] == 2, r.stderr

class Evil:
    def __reduce__(self): return os.mkdir, ('evil',)

@pytest.mark.parametrize('argv,says', [
    ('net.pth', 'which network? Give --arch'), ('--arch resnet18', 'which file?'), ('none.pth --arch resnet18', "there is no file 'none.pth'"),
    ('net.pth --arch resnet18', 'does not fit torchvision:resnet18: '), ('net.pth --arch resnet81', "did you mean 'resnet18'?"), ('net.pth --arch torch:x', "arch='torch' is not known"),
    ('net.pth --arch scnn --cutoff -1', '--cutoff=-1.0 should be a finite number > 0'), ('net.pth --arch scnn --cutoff nan', '--cutoff=nan'), ('net.pth --arch scnn --size 0', '--size=0'),
    ('net.pth --arch scnn --max-share 2', '--max-share=2.0'), ('net.pth --arch scnn --option width', "--option 'width' should be KEY=VALUE"), ('net.pth --arch scnn --option wdth=1', "did you mean 'width'?"),
    ('net.pth --arch resnet18 --option num_classes=-1', 'resnet18 cannot be built with --option num_classes=-1: '),
    ('evil.pth --arch scnn', 'holds more than tensors, and is not opened'), ('list.pth --arch scnn', 'holds a list, and no state dict'), ('net.pth --speed', 'unrecognized arguments: --speed'),
    ('none.npz --arch resnet50_imagenet', "there is no file 'none.npz'")])
def test_frozen_wrong_input(argv, says, capsys):
    torch.save(partly_frozen().state_dict(), 'net.pth')
    torch.save(Evil(), 'evil.pth')
    torch.save([1], 'list.pth')
    assert reinit_frozen(argv.split()) == 2
    got = capsys.readouterr()
    last = got.err.splitlines()[-1]
    assert got.out == '' and last.startswith('reinit_frozen: ') and says in last and not Path('evil').exists()

# ---------------------------------------------------------------- what all commands share

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = dict(reinit_repro=(reinit_repro, parser), reinit_frozen=(reinit_frozen, frozen_parser), reinit_claims=(reinit_claims, claims_parser), reinit_report=(reinit_report, report_parser),
                reinit_bench=(reinit_bench, bench_parser))

def call(name, *argv, **kw):
    "A command in a process of its own, as a user calls it"
    return subprocess.run([sys.executable, '-c', f'import sys; from reinit_nb.cli import {name}; sys.exit({name}())', *argv], capture_output=True, encoding='utf-8', env=env | kw.pop('env', {}), **kw)

@pytest.mark.parametrize('name', COMMANDS)
def test_commands_are_alike(name, capsys):
    f, p = COMMANDS[name]
    assert f(['--help']) == 0
    got = capsys.readouterr()
    for o in (f'usage: {name}', 'examples:', f'  {name} ', '--json', '--version', 'exit code: 0 done, 1 ', '2 wrong input, 130 Ctrl-C', *(o for a in p()._actions for o in a.option_strings)): assert o in got.out
    assert got.err == '' and max(map(len, got.out.splitlines())) <= 120
    assert f(['--version']) == 0 and capsys.readouterr().out == f'reinit_nb {__version__}\n'
    assert f(['--nonsense']) == 2
    got = capsys.readouterr()
    assert got.out == '' and got.err.startswith(f'{name}: ') and f'(see {name} --help)' in got.err and got.err.count('\n') == 1

def test_every_command_is_installed():
    text = (ROOT / 'settings.ini').read_text(encoding='utf-8')
    found = dict(re.findall(r'(reinit_\w+)=reinit_nb\.([\w.:]+)', text))
    assert found == {k: f'cli:{k}' for k in COMMANDS}
    for k, v in found.items(): assert hasattr(cli, v.split(':')[1]), f'{k} is not in cli'

SCRIPTS = Path(sys.executable).parent

def script(name, *argv, **kw):
    "The command that pip has installed"
    return subprocess.run([str(SCRIPTS / name), *argv], capture_output=True, encoding='utf-8', env=env | {k: v for k, v in os.environ.items() if k == 'PYTHONPATH'}, timeout=300, **kw)

@pytest.mark.skipif(not (SCRIPTS / 'reinit_repro').exists(), reason='the package is not installed here, only on the path: there are no commands to call')
@pytest.mark.parametrize('name', COMMANDS)
def test_installed_commands(name):
    "Help, version and wrong usage, without a word on the standard error that is not ours"
    r = script(name, '--help')
    assert (r.returncode, r.stderr) == (0, '') and r.stdout.startswith(f'usage: {name}')
    r = script(name, '--version')
    assert (r.returncode, r.stdout, r.stderr) == (0, f'reinit_nb {__version__}\n', '')
    r = script(name, '--nonsense')
    assert (r.returncode, r.stdout) == (2, '') and r.stderr.startswith(f'{name}: ') and r.stderr.count('\n') == 1

@pytest.mark.parametrize('name,argv', [('reinit_claims', ['R4']), ('reinit_claims', ['R99']), ('reinit_frozen', ['none.pth', '--arch', 'scnn']), ('reinit_repro', ['syntetic']), ('reinit_report', ['nowhere']), ('reinit_bench', ['ensembel'])])
def test_no_warnings_of_others(name, argv):
    r = call(name, *argv)
    assert r.returncode == (0 if argv == ['R4'] else 2) and 'Warning' not in r.stderr and all(l.startswith((f'{name}: ', 'reading ')) for l in r.stderr.splitlines()), r.stderr

def test_help_needs_no_torch():
    "Nor does wrong usage, which is said at once"
    code = 'import sys; from reinit_nb.cli import {0}; c = [{0}(o) for o in (["--help"],["--version"],["--nonsense"])]; print("loaded:", c, [o for o in ("torch","fastai","pandas","numpy","matplotlib") if o in sys.modules])'
    for name in COMMANDS:
        r = subprocess.run([sys.executable, '-c', code.format(name)], capture_output=True, encoding='utf-8', env=env)
        assert r.stdout.splitlines()[-1] == 'loaded: [0, 0, 2] []', r.stdout[-200:] + r.stderr

@pytest.mark.parametrize('error,code,says', [
    (ReinitError('no\n  such thing'), 2, 'demo: no such thing\n'), (KeyboardInterrupt(), 130, 'Interrupted\n'), (KeyboardInterrupt('3 of 5'), 130, 'Interrupted: 3 of 5\n'),
    (OSError(28, 'No space left on device'), 1, 'demo: failed: OSError: [Errno 28] No space left on device (REINIT_DEBUG=1 shows where)\n'), (MemoryError(), 1, 'demo: failed: MemoryError: no message (REINIT_DEBUG=1 shows where)\n'),
    (BrokenPipeError(), 0, ''), (SystemExit(3), 3, '')])
def test_errors_become_exit_codes(error, code, says, capsys, monkeypatch):
    monkeypatch.setattr(cli, '_close_pipe', lambda: 0)   # pytest needs its output
    def run(a): raise error
    assert command(Parser('demo', 'about', 'after'), run, ['--version'][:0], bare=True) == code
    got = capsys.readouterr()
    assert got.err == says and got.out == ''

def test_debugging_shows_where(monkeypatch):
    def run(a): raise ZeroDivisionError('deep inside')
    monkeypatch.setenv('REINIT_DEBUG', '1')
    with pytest.raises(ZeroDivisionError, match='deep inside'): command(Parser('demo', 'about', 'after'), run, [], bare=True)

def test_help_without_arguments(capsys):
    assert command(Parser('demo', 'about', 'after'), lambda a: 1 / 0, []) == 0 and 'usage: demo' in capsys.readouterr().out

# ---------------------------------------------------------------- reinit_claims

@pytest.fixture
def asked(capsys):
    def go(*argv, code=0):
        assert reinit_claims(argv) == code
        return capsys.readouterr()
    return go

def test_claims_as_a_user(tmp_path):
    "From elsewhere, as JSON, in a process of its own"
    r = call('reinit_claims', 'r4', 'F4', '--json', cwd=tmp_path)
    assert r.returncode == 0 and 'Traceback' not in r.stderr, r.stderr
    js = json.loads(r.stdout)
    assert [o['id'] for o in js['claims']] == ['R4', 'F4'] and sum(js['counts'].values()) == 2 and js['reinit_nb'] == __version__
    for o in js['claims']: assert o['verdict'] in ('✅', '❌', '➖') and o['lo'] <= o['value'] <= o['hi'] and o['notebook'].startswith('experiments/')

def test_claims_in_120_columns(asked):
    got = asked('--paper', 'fourier')
    lines = got.out.splitlines()
    at = [i for i, w in enumerate(lines) if re.match(r'  [✅❌➖]', w)]
    assert [re.match(r'  [✅❌➖] (?:holds|does not hold|undecided) +(F\d)', lines[i])[1] for i in at] == [f'F{i}' for i in range(1, 8)]
    df = scorecard.judge_claims(ROOT / 'results', [f'F{i}' for i in range(1, 8)])
    for i, (_, r) in zip(at, df.iterrows()):
        assert scorecard.effect_text(r) in lines[i] and scorecard.VERDICT_WORDS[r.verdict] in lines[i]
        assert lines[i + 1].split('; ') == [r.measure, scorecard.sample_text(r), f'{r["scale"]} scale'] or r.measure in lines[i + 1] and scorecard.sample_text(r) in lines[i + 1] and lines[i + 1].endswith(f'{r["scale"]} scale')
    assert '7 claims: ' in lines[-1] and 'judging' in got.err
    text = asked('F7').out
    assert max(map(len, text.splitlines())) <= 100 and 'nbs/experiments/spectra.ipynb' in text and 'Experiment 5' in text and 'spectral norm' in text and ' seeds; laptop scale' in ' '.join(text.split())

def test_all_lines_fit():
    lines = claim_lines(scorecard.shipped_scorecard()).splitlines()
    assert max(len(l) + len(re.findall('[✅❌➖]', l)) for l in lines) <= 120 and sum(bool(re.match('  [✅❌➖]', l)) for l in lines) == 42 and ' '.join(' '.join(lines).split()).count(' scale') >= 42
    wide = pd.DataFrame([dict(id=f'C{i}', paper='freezing', short='x' * 44, verdict='❌', value=-218.4, lo=-1e3, hi=1e3, unit='powers of 10', null=0., theirs_value=-100., measure='y' * 50, n=3, counts='seeds', over='settings', scale='laptop') for i in (1, 11)])
    assert max(len(l) + l.count('❌') for l in claim_lines(wide).splitlines()) <= 120

@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    "The package without the repository around it, as pip installs it"
    d = tmp_path_factory.mktemp('site')
    shutil.copytree(ROOT / 'reinit_nb', d / 'reinit_nb', ignore=shutil.ignore_patterns('__pycache__'))
    return dict(PYTHONPATH=str(d))

def test_claims_without_results(installed, tmp_path):
    r = call('reinit_claims', '--json', env=installed, cwd=tmp_path)
    js, k = json.loads(r.stdout), scorecard.shipped_scorecard()
    assert r.returncode == 0 and [(o['id'], o['verdict'], o['n']) for o in js['claims']] == list(zip(k.id, k.verdict, k.n)) and js['date'] == k.date[0]
    assert 'there is no folder results/' in r.stderr and k.date[0] in r.stderr and r.stderr.count('\n') == 1
    r = call('reinit_claims', 'R4', '--results', '.', env=installed, cwd=tmp_path)
    assert r.returncode == 2 and 'there are no results in .' in r.stderr                    # asked for by name: nothing else will do

def test_report_without_results(installed, tmp_path):
    r = call('reinit_report', env=installed, cwd=tmp_path)
    assert r.returncode == 2 and r.stdout == '' and all(o in r.stderr for o in ('give a folder', 'checkout', 'reinit_repro', 'reinit_claims')) and os.listdir(tmp_path) == []

def test_claims_filtered(asked):
    every = {o['id']: o['verdict'] for o in json.loads(asked('--paper', 'fourier', '--json').out)['claims']}
    for word, sign in (('holds', '✅'), ('fails', '❌'), ('open', '➖')):
        want = [k for k, v in every.items() if v == sign]
        for o in (word, sign): assert [c['id'] for c in json.loads(asked('--paper', 'fourier', '--verdict', o, '--json').out)['claims']] == want
        if not want: assert 'no such claims' in asked('--paper', 'fourier', '--verdict', word).out

def test_claims_of_other_results(asked, tmp_path):
    Path('mine').mkdir()
    Path('mine/waves_laws_laptop.csv').write_bytes((ROOT / 'results/waves_laws_laptop.csv').read_bytes())
    assert 'F4' in asked('F4', '--results', 'mine').out
    assert 'waves_laptop.csv is missing' in asked('F1', '--results', 'mine', code=2).err

@pytest.mark.parametrize('argv,says', [('R99', "did you mean 'R9'"), ('--paper frosen', "did you mean 'frozen'"), ('--verdict maybe', "--verdict='maybe' is not known"), ('--results nowhere', 'there are no results in nowhere'),
    ('F1 --paper reinit', 'none of F1 is a claim of --paper reinit'), ('R1 --scale big', "scale='big' is not known"), ('--verdict', 'expected one argument')])
def test_claims_wrong_input(argv, says, asked):
    got = asked(*argv.split(), code=2)
    assert says in got.err and got.out == '' and got.err.startswith('reinit_claims: ') and got.err.count('\n') == 1

def test_signs_become_words_where_they_cannot_be_written():
    r = call('reinit_claims', 'R4', env=dict(PYTHONIOENCODING='ascii'))
    assert r.returncode == 0 and re.match(r'(holds|does not hold|undecided)\s+R4', r.stdout) and 'Traceback' not in r.stderr

@pytest.mark.skipif(os.name != 'posix', reason='pipes as on posix')
def test_closed_pipe():
    "`reinit_claims --help | true`: no complaint, no failure"
    p = subprocess.Popen([sys.executable, '-c', 'import sys; from reinit_nb.cli import reinit_claims; sys.exit(reinit_claims())', '--help'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', env=env)
    p.stdout.close()
    err = p.stderr.read()
    assert p.wait(timeout=120) == 0 and 'Broken' not in err and 'Traceback' not in err, err

# ---------------------------------------------------------------- reinit_bench, and JSON of reinit_repro

def test_bench(capsys):
    assert reinit_bench(['--seeds', '2', '--steps', '1', '--repeats', '1', '--json']) == 0
    got = capsys.readouterr()
    js = json.loads(got.out)
    assert set(js['ways']) == {'loop', 'vmap', 'bmm', 'ensemble'} and js['seeds'] == 2 and js['repeats'] == 1 and js['torch'] and 'timing' in got.err
    assert reinit_bench(['--seeds', '2', '--steps', '1', '--repeats', '1']) == 0 and 'ensemble' in capsys.readouterr().out

@pytest.mark.parametrize('argv,says', [('--seeds 0', '--seeds=0 should be'), ('callbacks --repeats 0', '--repeats=0 should be'), ('ensembel', "did you mean 'ensemble'"), ('callbacks --seeds 3', '--seeds is not for callbacks, which takes --batches, --repeats'),
    ('ensemble --batches 3', '--batches is not for ensemble'), ('--seeds 99999999', '--seeds=99999999 should be'), ('--steps x', 'invalid int value')])
def test_bench_wrong_input(argv, says, capsys):
    assert reinit_bench(argv.split()) == 2
    got = capsys.readouterr()
    assert got.out == '' and says in got.err and got.err.count('\n') == 1

def test_repro_summary_as_json(done, monkeypatch, capsys):
    monkeypatch.chdir(done[0])
    assert reinit_repro(['synthetic', '--scale', 'smoke', '--out', 'new/out', '--runs', 'kept', '--json']) == 0
    js = json.loads(capsys.readouterr().out)
    assert js['study'] == 'synthetic' and js['new'] == 0 and js['page'] == 'new/out/index.html' and [v['id'] for v in js['verdicts']] == ['R1', 'R2', 'R3'] and len(js['table1']) == len(js['table5']) == 18
    assert pd.DataFrame(js['table1'])['mean'].between(0, 100).all()

"The commands: `reinit_repro` at smoke scale, `reinit_claims`, `reinit_report`, `reinit_frozen`, `reinit_data`"

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision

from reinit_nb import __version__, cli
from reinit_nb.claims import scorecard as claims_scorecard
from reinit_nb.claims.scorecard import PAPER_NAMES, effect_text, sample_text, shipped_scorecard
from reinit_nb.claims.verdict import VERDICT_WORDS
from reinit_nb.cli import (
    MARKER,
    SCALE_NAMES,
    VERDICT_CHOICES,
    Parser,
    claim_files,
    claim_lines,
    claims_parser,
    data_parser,
    frozen_parser,
    health_parser,
    help_texts,
    marker_text,
    reinit_claims,
    reinit_data,
    reinit_frozen,
    reinit_health,
    reinit_report,
    reinit_repro,
    report_parser,
    repro_jobs,
    repro_parser,
    run_command,
)
from reinit_nb.core import SCALES, ReinitError
from reinit_nb.models import scnn
from reinit_nb.store import Store, load_results
from reinit_nb.studies import common
from reinit_nb.studies.common import STUDY_NAMES, all_studies, get_study

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = dict(
    reinit_repro=(reinit_repro, repro_parser),
    reinit_frozen=(reinit_frozen, frozen_parser),
    reinit_claims=(reinit_claims, claims_parser),
    reinit_report=(reinit_report, report_parser),
    reinit_data=(reinit_data, data_parser),
    reinit_health=(reinit_health, health_parser),
)
ENV = {key: value for key, value in os.environ.items() if key not in ('REINIT_RUNS', 'REINIT_SCALE')}
ENV |= dict(OMP_NUM_THREADS='1', PYTHONIOENCODING='utf-8')


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    "Every test in an empty folder, with nothing set"
    monkeypatch.chdir(tmp_path)
    for name in ('REINIT_RUNS', 'REINIT_SCALE'):
        monkeypatch.delenv(name, raising=False)


def call(name, *argv, env=None, **kw):
    "Run a command in a process of its own, as a user does"
    code = f'import sys; from reinit_nb.cli import {name}; sys.exit({name}())'
    env = ENV | (env or {})
    return subprocess.run([sys.executable, '-c', code, *argv], capture_output=True, encoding='utf-8', env=env, **kw)


def records(root):
    "Hash → time of every record of a store"
    return {path.parent.name: path.stat().st_mtime_ns for path in Path(root).glob('??/*/record.json')}


def option_names(parser):
    return [name for action in parser._actions for name in action.option_strings]


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    "A finished smoke run: folder, and what was printed"
    folder = tmp_path_factory.mktemp('done')
    out, err = StringIO(), StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = reinit_repro(['synthetic', '--scale', 'smoke', '--out', 'new/out', '--runs', 'kept'])
    finally:
        os.chdir(before)
    assert code == 0, err.getvalue()
    return folder, out.getvalue()


# ---------------------------------------------------------------- a whole run


def test_run_writes_everything(done):
    folder, printed = done
    out = folder / 'new/out'
    study = get_study('synthetic')
    files = {f'{name}_smoke.csv' for name in study.files}
    assert {path.name for path in out.iterdir()} == files | {'index.html', MARKER, 'tables', 'figures'}
    assert {path.stem for path in (out / 'tables').iterdir()} == {f'synthetic_{name}' for name in study.tables}
    figures = list((out / 'figures').iterdir())
    assert {path.stem for path in figures} == {f'synthetic_{name}' for name in study.figures}
    for path in figures:
        assert path.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    marker = json.loads((out / MARKER).read_text())
    assert marker['studies'] == ['synthetic'] and marker['scale'] == 'smoke'
    assert (marker['format'], marker['reinit_nb']) == (cli.MARKER_FORMAT, __version__)
    assert 'new/out/index.html' in printed and str(folder) not in printed
    assert not list(folder.rglob('.tmp-*'))


def test_tables_hold_the_papers_numbers(done):
    tables = done[0] / 'new/out/tables'
    table1 = pd.read_csv(tables / 'synthetic_table1_numbers.csv')
    table5 = pd.read_csv(tables / 'synthetic_table5_numbers.csv')
    assert table1['mean'].between(0, 100).all() and table5['mean'].between(0, 1).all()
    for table in (table1, table5):
        assert len(table) == 18 and table.paper.notna().all()
        assert (table.lo <= table['mean']).all() and (table['mean'] <= table.hi).all()
    results = done[0] / 'new/out'
    hashes = set().union(*(load_results(path).recipe for path in results.glob('*_smoke.csv')))
    assert hashes == set(records(done[0] / 'kept'))


def test_run_prints_tables_and_verdicts(done):
    folder, printed = done
    table1 = pd.read_csv(folder / 'new/out/tables/synthetic_table1_numbers.csv')
    for method in table1.method.unique():
        assert re.search(rf'\b{method}\b', printed)
    for value in (*table1.paper, 0.82):
        assert f'({value}' in printed
    for value in table1['mean']:
        assert f'{value:.1f} ±' in printed
    for claim in ('R1', 'R2', 'R3'):
        assert re.search(rf'[✅❌≈?] {claim} ', printed)
    assert 'smoke run' in printed


def test_page_agrees_with_the_tables(done):
    out = done[0] / 'new/out'
    page = (out / 'index.html').read_text(encoding='utf-8')
    for name in ('table1', 'table5'):
        table = pd.read_csv(out / f'tables/synthetic_{name}.csv', index_col=0)
        for text in table.to_numpy().ravel():
            assert f'>{text}</td>' in page, (name, text)


def test_page_of_a_run(done):
    page = (done[0] / 'new/out/index.html').read_text(encoding='utf-8')
    study = get_study('synthetic')
    assert f'<h3>{study.title}</h3>' in page
    assert page.count('<img alt="') == len(study.figures) + 1
    assert 'smoke runs' in page and __version__ in page and 'class="dim missing"' not in page
    assert set(re.findall(r'<tr id="(\w+)">', page)) == {'R1', 'R2', 'R3'}
    assert not re.findall(r'(?:src|href)="(?!data:|#)|url\(', page)
    assert str(done[0]) not in page


def test_second_run_trains_nothing(done, monkeypatch, capsys):
    folder, _ = done
    monkeypatch.chdir(folder)
    before = records('kept')
    results = Path('new/out/synthetic_smoke.csv').read_bytes()

    def refuse(*args, **kw):
        raise AssertionError('something was run again')

    monkeypatch.setattr(Store, 'put', refuse)
    assert reinit_repro(['synthetic', '--scale', 'smoke', '--out', 'new/out', '--runs', 'kept', '--json']) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary['new'] == 0 and summary['runs'] == len(before) and records('kept') == before
    assert Path('new/out/synthetic_smoke.csv').read_bytes() == results  # values, versions and dates of the runs
    assert summary['studies'] == ['synthetic'] and summary['page'] == 'new/out/index.html'
    assert [claim['id'] for claim in summary['verdicts']] == ['R1', 'R2', 'R3']
    numbers = pd.DataFrame(summary['tables']['synthetic']['table1_numbers'])
    assert len(numbers) == 18 and numbers['mean'].between(0, 100).all()
    assert summary['left_out'] == {}


def test_recorded_runs_are_not_run_again(done, monkeypatch, capsys):
    results = done[0] / 'new/out'

    def refuse(*args, **kw):
        raise AssertionError('something was run again')

    monkeypatch.setattr(Store, 'put', refuse)
    argv = ['synthetic', '--scale', 'smoke', '--out', 'out', '--runs', 'runs', '--from', str(results), '--json']
    assert reinit_repro(argv) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary['new'] == 0 and f'recorded runs of {results} were taken over into runs' in printed.err
    recorded, again = (load_results(folder / 'synthetic_smoke.csv') for folder in (results, Path('out')))
    assert again.equals(recorded[list(again)])
    assert reinit_repro([*argv, '--dry-run']) == 2
    assert '--from and --dry-run exclude each other' in capsys.readouterr().err


def test_runs_from_environment_and_other_seeds(done, monkeypatch, capsys):
    monkeypatch.setenv('REINIT_RUNS', str(done[0] / 'kept'))
    monkeypatch.setenv('REINIT_SCALE', 'smoke')
    count = len(records(done[0] / 'kept'))

    def interrupt(*args, **kw):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, 'run_sweep', interrupt)
    assert reinit_repro(['synthetic', '--out', 'o']) == 130
    assert f'Interrupted: {count} of {count} runs are finished and kept in' in capsys.readouterr().err
    assert reinit_repro(['synthetic', '--out', 'one', '--seeds', '1']) == 130
    finished = re.search(r'Interrupted: (\d+) of (\d+) runs', capsys.readouterr().err)
    assert finished[1] == finished[2] != str(count)  # a first seed is the same seed


def test_one_seed_is_enough_for_a_report(capsys):
    "Tables and figures that need several seeds are left out"
    assert reinit_repro(['interventions', '--scale', 'smoke', '--seeds', '1', '--out', 'o', '--runs', 'kept']) == 0
    assert 'Empty DataFrame' not in capsys.readouterr().out
    assert Path('o/index.html').exists() and not list(Path('o').glob('*/interventions_ratios*'))


def test_run_without_training(capsys):
    "The tables of the paper need no results files"
    assert reinit_repro(['reinit_tables', '--scale', 'smoke', '--out', 'o', '--runs', 'kept']) == 0
    printed = capsys.readouterr().out
    assert 'R4' in printed and '0 runs' in printed
    assert not list(Path('o').glob('*.csv')) and Path('o/index.html').exists()


def test_claim_runs_only_its_files(monkeypatch, capsys):
    assert claim_files('R6') == ('reinit_cnn', ['reinit_cnn_converged'])
    assert claim_files('F4') == ('spectra', ['spectra_laws'])
    assert repro_jobs([], ['f4']) == dict(spectra=['spectra_laws'])
    assert repro_jobs(['synthetic'], ['R1'])['synthetic'] == list(get_study('synthetic').files)
    assert set(repro_jobs(['all'], [])) == set(STUDY_NAMES)

    assert reinit_repro(['--claim', 'Z1', '--scale', 'smoke', '--out', 'o', '--runs', 'kept']) == 0
    assert [path.name for path in Path('o').glob('*.csv')] == ['frozen_weights_eigenvalues_smoke.csv']
    printed = capsys.readouterr().out
    assert re.search('[✅❌≈?] Z1 ', printed) and ' Z2 ' not in printed
    assert 'frozen_weights_decays_smoke.csv is missing' in Path('o/index.html').read_text(encoding='utf-8')


def test_missing_data_is_reported_and_left_out(monkeypatch, capsys):
    monkeypatch.delenv('REINIT_DATA', raising=False)
    argv = ['--scale', 'smoke', '--runs', 'kept', '--json']
    assert reinit_repro(['--claim', 'Z1', '--claim', 'Z10', '--out', 'o', *argv]) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)['left_out']) == {'frozen_weights_imagenet'}
    assert 'left out: frozen_weights_imagenet: No pre-trained weights' in printed.err
    assert reinit_repro(['--claim', 'Z10', '--out', 'other', *argv]) == 2  # there is nothing else to show
    assert 'No pre-trained weights' in capsys.readouterr().err


# ---------------------------------------------------------------- help


def test_help_of_repro(capsys):
    assert reinit_repro([]) == 0
    text = capsys.readouterr().out
    assert reinit_repro(['--help']) == 0 and capsys.readouterr().out == text
    options = option_names(repro_parser())
    assert {'--scale', '--seeds', '--out', '--runs', '--claim', '--workers'} <= set(options)
    words = ('smoke', 'laptop', 'paper', 'index.html', 'study.json', 'examples', 'Ctrl-C')
    for word in (*options, *STUDY_NAMES, *words, 'REINIT_SCALE', 'REINIT_RUNS'):
        assert word in text, word


def test_help_knows_studies_and_papers():
    "The help is a table, so that it needs no import; the claims it names must be those of the records"
    help_of = help_texts('studies', 'name', 'help')
    assert tuple(help_of) == STUDY_NAMES
    assert help_texts('papers', 'paper', 'citation') == PAPER_NAMES
    assert SCALE_NAMES == SCALES
    assert VERDICT_CHOICES == {word: sign for sign, word in VERDICT_WORDS.items()}
    for name, study in all_studies().items():
        expected = list(study.claims)
        for first, last in re.findall(r'([RZCFP]\d+) to ([RZCFP]\d+)', help_of[name]):
            assert {first, last} <= set(expected), name
        assert not expected or expected[0] in help_of[name] and expected[-1] in help_of[name], name


# ---------------------------------------------------------------- wrong input


@pytest.fixture
def refused(capsys, monkeypatch):
    "Call with wrong arguments, and return the message. Nothing may be run"

    def refuse(*args, **kw):
        raise AssertionError('training was started')

    monkeypatch.setattr(common, 'run_sweep', refuse)

    def run(*argv):
        assert reinit_repro(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == '' and printed.err.count('\n') == 1
        assert printed.err.startswith('reinit_repro: ')
        return printed.err

    return run


SMOKE = ('synthetic', '--scale', 'smoke')


@pytest.mark.parametrize(
    'argv, message',
    [
        ('syntetic', "did you mean 'synthetic'? Known: synthetic"),
        ('xyz', "study='xyz' is not known. Known: synthetic"),
        ('--scale smoke', 'which study? Known: synthetic'),
        ('--claim R99', "did you mean 'R9'"),
        ('synthetic --seeds 0', '--seeds=0 should be a whole number'),
        ('synthetic --seeds 99999999', '--seeds=99999999 should be a whole number'),
        ('synthetic --seeds -3', '--seeds=-3'),
        ('synthetic --seeds 2.5', "--seeds: invalid int value: '2.5'"),
        ('synthetic --seeds many', "--seeds: invalid int value: 'many'"),
        ('synthetic --seeds', '--seeds: expected one argument'),
        ('synthetic --workers 0', '--workers=0 should be a whole number'),
        ('synthetic --scale labtop', "did you mean 'laptop'? Known: smoke, laptop, paper"),
        ('synthetic --sede 3', 'unrecognized arguments: --sede 3'),
        ('synthetic extra', "study='extra' is not known"),
        ('synthetic --out same --runs same', '--out and --runs are both same'),
    ],
)
def test_wrong_arguments(argv, message, refused):
    assert message in refused(*argv.split())
    assert os.listdir() == []  # not even a folder is left


def test_wrong_scale_in_environment(refused, monkeypatch):
    monkeypatch.setenv('REINIT_SCALE', 'big')
    assert "REINIT_SCALE='big' is not known" in refused('synthetic')


def test_out_is_a_file(refused):
    Path('o').write_text('mine')
    assert '--out o is a file; name a folder' in refused(*SMOKE, '--out', 'o')
    assert '--out o/sub' in refused(*SMOKE, '--out', 'o/sub')
    assert Path('o').read_text() == 'mine'


def test_out_is_occupied(refused):
    Path('o').mkdir()
    for name in ('.hidden', 'a.txt', 'b.txt', 'c.txt', 'd.txt'):
        Path('o', name).touch()
    before = sorted(os.listdir('o'))
    message = refused(*SMOKE, '--out', 'o')
    assert '--out o is occupied by a.txt, b.txt, c.txt and 1 more, and has no study.json of ours' in message
    assert 'name a new or an empty folder' in message
    assert sorted(os.listdir('o')) == before


MINE = marker_text(['synthetic'], 'smoke')


@pytest.mark.parametrize(
    'text, message',
    [
        (MINE.replace('"format": 2', '"format": 7'), f'another version (reinit_nb {__version__}, format 7;'),
        (MINE.replace(__version__, '99.0'), 'another version (reinit_nb 99.0, format 2;'),
        (marker_text(['spectra'], 'smoke'), "holds studies ['spectra'], and ['synthetic'] was asked for"),
        (marker_text(['synthetic'], 'laptop'), "holds scale 'laptop', and 'smoke' was asked for"),
        (marker_text(['synthetic'], 'smoke', 3), 'holds seeds 3, and None was asked for'),
        ('{', 'damaged or not ours'),
        ('[1]', 'damaged or not ours'),
        ('{"a":1}', 'damaged or not ours'),
    ],
)
def test_out_has_another_marker(text, message, refused):
    Path('o').mkdir()
    Path('o', MARKER).write_text(text)
    said = refused(*SMOKE, '--out', 'o')
    assert message in said and 'choose another --out, or remove o' in said
    assert Path('o', MARKER).read_text() == text


def test_out_is_not_writable(refused, monkeypatch):
    Path('o').mkdir()
    if os.getuid():
        Path('o').chmod(0o500)
    else:  # nothing is forbidden to root, but this
        forbidden = Path('/proc/self/o')
        monkeypatch.setattr(cli.Path, 'expanduser', lambda path: forbidden if path == Path('o') else path)
    message = refused(*SMOKE, '--out', 'o')
    assert '--out' in message and 'cannot be written' in message and 'name another folder' in message


def test_runs_is_not_a_folder(refused):
    Path('kept').touch()
    assert 'the store kept cannot be written' in refused(*SMOKE, '--runs', 'kept')
    assert os.listdir() == ['kept']


# ---------------------------------------------------------------- Ctrl-C

# Each record takes a moment longer to write, so that the signal arrives between two of them
SLOW = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background jobs ignore it
from reinit_nb.store import Store
put, done = Store.put, []
def slow(*args, **kw):
    put(*args, **kw)
    done.append(args)
    time.sleep(.1)
    if len(done) == 3: open('waiting', 'w').close()
    while len(done) >= 3 and not os.path.exists('signalled'): time.sleep(.02)
Store.put = slow
from reinit_nb.cli import reinit_repro
sys.exit(reinit_repro())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != 'posix', reason='signals are sent as on posix')
def test_interrupted_and_resumed(capsys):
    argv = [*SMOKE, '--out', 'o', '--runs', 'kept']
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', env=ENV)
    process = subprocess.Popen([sys.executable, '-c', SLOW, *argv], **pipes)
    while not Path('waiting').exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)  # it wakes up to the signal, not to the file
    Path('signalled').touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == '' and 'Traceback' not in err
    pattern = r'Interrupted: (\d+) of (\d+) runs are finished and kept in kept; the same command resumes from there'
    found = re.search(pattern, err)
    assert found, err
    kept, total = int(found[1]), int(found[2])
    before = records('kept')
    assert 3 <= kept < total and len(before) == kept
    assert os.listdir('o') == [MARKER]  # ours, so that the next call may write there

    assert reinit_repro([*argv, '--json']) == 0
    after = records('kept')
    assert len(after) == total
    assert {name: after[name] for name in before} == before  # what was finished was not run again
    assert json.loads(capsys.readouterr().out)['new'] == total - kept


# ---------------------------------------------------------------- reinit_frozen

SCNN = ['--arch', 'reinit_nb:scnn', '--option', 'c_in=1', '--option', 'size=8']


def partly_frozen(n_out=10):
    "A network with two frozen filters: 2·2 entries of the normalization, 2·32·9 of the next convolution"
    network = scnn(c_in=1, size=8, n_out=n_out)
    with torch.no_grad():
        network.block1.norm.weight[:2] = 0
        network.block1.norm.bias[:2] = 0
        network.block2.conv.weight[:, :2] = 0
    return network


@pytest.fixture
def counted(capsys):
    "Call, and return what was printed"

    def run(*argv, code=0):
        assert reinit_frozen(argv) == code
        return capsys.readouterr()

    return run


def test_frozen_counts(counted):
    torch.save(dict(model=partly_frozen(7).state_dict(), epoch=3), 'net.pth')
    printed = counted('net.pth', *SCNN)
    assert '2 of 704 filters are mutually frozen (0.28%); double-frozen weights 580, triple-frozen 0;' in printed.out
    assert 'reading net.pth' in printed.err and 'counting' in printed.err and 'counting' not in printed.out
    found = json.loads(counted('net.pth', *SCNN, '--json').out)
    assert found['cutoff'] == 0.01
    assert found['totals']['frozen'] == 2 and found['totals']['double'] == 4 + 2 * 32 * 9
    frozen = {layer['layer']: layer['frozen'] for layer in found['layers'] if layer['frozen']}
    assert frozen == {'block1.conv': 2, 'block1.norm': 2}
    all_frozen = json.loads(counted('net.pth', *SCNN, '--json', '--cutoff', '1e9').out)
    assert all_frozen['totals']['frozen'] == 704
    assert 'block2.conv' in counted('net.pth', *SCNN, '--readers').out
    readers = json.loads(counted('net.pth', *SCNN, '--readers', '--json').out)
    assert readers[0]['next'] == 'block2.conv'


def test_frozen_lists_filters_of_consecutive_layers(counted):
    network = torchvision.models.resnet18(num_classes=4)
    with torch.no_grad():
        network.conv1.weight[[2, 7]] *= 1e-6
        network.layer1[0].conv1.weight[:, [2, 7]] *= 1e-6
    torch.save(network.state_dict(), 'net.pth')
    printed = counted('--arch', 'resnet18', '--weights', 'net.pth', '--size', '64').out
    size = 2 * (3 * 49 + 64 * 9)
    assert f'Pairs of consecutive layers: 2 of 3904 filters are frozen (0.05%), {size} weights' in printed
    lines = [line.split() for line in printed.splitlines() if line.startswith('conv1')]
    assert [line[1] for line in lines] == ['2', '7'] and all(line[5] == 'layer1.0.conv1' for line in lines)
    assert 'Channels: 0 of 4800 filters are mutually frozen' in printed          # the stream is read again
    found = json.loads(counted('net.pth', '--arch', 'resnet18', '--size', '64', '--json').out)
    assert found['pairs']['frozen'] == 2 and [o['filter'] for o in found['filters']] == [2, 7]
    assert found['filters'][0]['gamma'] == 1 and found['filters'][0]['column'] < 1e-3


def test_frozen_counts_what_a_part_has(counted):
    "An .npz with some layers, and normalizations folded into the convolutions"
    network = torchvision.models.resnet18().eval()
    modules = dict(network.named_modules())
    arrays = {}
    for name, conv in modules.items():
        if not isinstance(conv, torch.nn.Conv2d) or name.startswith(('layer3', 'layer4')): continue
        norm = modules[name[:-1] + '1' if 'downsample' in name else name.replace('conv', 'bn')]
        fused = torch.nn.utils.fuse_conv_bn_eval(conv, norm)
        arrays |= {f'folded.{name}.weight': fused.weight.detach(), f'folded.{name}.bias': fused.bias.detach()}
    arrays['folded.conv1.weight'][5] = 0
    arrays['folded.layer1.0.conv1.weight'][:, 5] = 0
    np.savez('part.npz', **arrays)
    printed = counted('--weights', 'part.npz', '--arch', 'resnet18', '--size', '64').out
    filters = 5 * 64 + 3 * 128                                     # nothing reads the last convolution
    assert f'1 of {filters} filters are frozen (0.14%), {3 * 49 + 64 * 9} weights' in printed
    assert 'conv1      5' in printed
    whole = {k: v for k, v in network.state_dict().items() if 'layer4' not in k}
    torch.save(whole, 'cut.pth')
    assert reinit_frozen(['cut.pth', '--arch', 'resnet18']) == 2                 # a checkpoint should be complete
    assert reinit_frozen(['cut.pth', '--weights', 'part.npz', '--arch', 'resnet18']) == 2


def test_frozen_exit_codes(counted):
    torch.save(partly_frozen().state_dict(), 'net.pth')
    counted('net.pth', *SCNN, '--max-share', '0.5')
    counted('net.pth', *SCNN, '--max-share', '0.00001', code=1)


def test_frozen_help(capsys):
    assert reinit_frozen([]) == 0
    text = capsys.readouterr().out
    for word in (*option_names(frozen_parser()), 'resnet50_imagenet', 'examples', 'exit code'):
        assert word in text, word


class Evil:
    def __reduce__(self):
        return os.mkdir, ('evil',)


@pytest.mark.parametrize(
    'argv, message',
    [
        ('net.pth', 'which network? Give --arch'),
        ('--arch resnet18', 'which file?'),
        ('none.pth --arch resnet18', "there is no file 'none.pth'"),
        ('net.pth --arch resnet18', 'does not fit torchvision:resnet18: '),
        ('net.pth --arch resnet81', "did you mean 'resnet18'?"),
        ('net.pth --arch torch:x', "arch='torch' is not known"),
        ('net.pth --arch scnn --cutoff -1', '--cutoff=-1.0 should be a finite number > 0'),
        ('net.pth --arch scnn --cutoff nan', '--cutoff=nan'),
        ('net.pth --arch scnn --size 0', '--size=0'),
        ('net.pth --arch scnn --max-share 2', '--max-share=2.0'),
        ('net.pth --arch scnn --option width', "--option 'width' should be KEY=VALUE"),
        ('net.pth --arch scnn --option wdth=1', "did you mean 'width'?"),
        ('net.pth --arch resnet18 --option num_classes=-1', 'resnet18 cannot be built with --option num_classes=-1: '),
        ('evil.pth --arch scnn', 'holds more than tensors, and is not opened'),
        ('list.pth --arch scnn', 'holds a list, and no state dict'),
        ('net.pth --speed', 'unrecognized arguments: --speed'),
        ('none.npz --arch resnet50_imagenet', "there is no file 'none.npz'"),
    ],
)
def test_frozen_wrong_input(argv, message, capsys):
    torch.save(partly_frozen().state_dict(), 'net.pth')
    torch.save(Evil(), 'evil.pth')
    torch.save([1], 'list.pth')
    assert reinit_frozen(argv.split()) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert printed.out == '' and last.startswith('reinit_frozen: ') and message in last
    assert not Path('evil').exists()


# ---------------------------------------------------------------- before a run


def test_dry_run_runs_nothing(done, monkeypatch, capsys):
    "What is stored, what is left and how long it takes; nothing is written"
    folder, _ = done
    argv = ['synthetic', 'reinit_tables', '--scale', 'smoke', '--dry-run', '--json']
    assert reinit_repro([*argv, '--runs', 'new']) == 0
    fresh = json.loads(capsys.readouterr().out)
    assert [row['file'] for row in fresh['files']] == list(get_study('synthetic').files)   # the tables train nothing
    assert all(row['stored'] == 0 and row['hours'] is None for row in fresh['files'])   # nothing to go by
    assert list(Path.cwd().iterdir()) == []
    assert reinit_repro([*argv, '--runs', str(folder / 'kept')]) == 0
    stored = json.loads(capsys.readouterr().out)
    for row in stored['files']:
        assert row['stored'] == row['runs'] > 0 and row['hours'] == 0
        assert row['memory_mb'] > 50 and row['unit'] == 'core'
    assert reinit_repro([*argv[:-1], '--seeds', '9', '--runs', str(folder / 'kept')]) == 0
    printed = capsys.readouterr().out
    assert 'Nothing was run' in printed and 'core-h' in printed and max(map(len, printed.splitlines())) <= 120


def test_dry_run_at_other_scales(monkeypatch, capsys):
    "Published results tell how long runs take at laptop scale, operations at paper scale; missing data is named"
    monkeypatch.delenv('REINIT_DATA', raising=False)
    monkeypatch.setenv('REINIT_CACHE', str(Path.cwd() / 'cache'))
    assert reinit_repro(['synthetic', 'reinit_cnn', '--dry-run', '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row['file']: row for row in told['files']}
    assert told['scale'] == 'laptop' and rows['synthetic']['unit'] == 'core' and rows['synthetic']['hours'] > 0
    assert sum(r['missing'] for r in told['files']) == sum(told['missing'].values()) > 0
    photos = rows['reinit_cnn_converged']
    assert photos['missing'] == photos['runs'] > 0 == rows['synthetic']['missing']
    assert reinit_repro(['reinit_cnn', '--dry-run', '--scale', 'paper']) == 0
    printed = capsys.readouterr().out
    assert 'GPU-h' in printed and "no data found for 'cars196'" in printed and 'reinit_data list' in printed


def test_lists_without_records_are_estimated():
    "By the same runs with other seeds, by operations on a GPU, or in proportion to recorded lists of the study"
    recorded = cli._recorded_costs()
    def cost(study, file, scale):
        study = get_study(study)
        recipes = common.flatten_recipes(study.files[file].lists(scale, None))
        return cli._estimated_cost(study, recipes, scale, recorded)
    seconds = recorded['synthetic', 'laptop']['seconds']
    assert cost('synthetic', 'synthetic', 'paper') == (seconds, 'core', False)   # more seeds
    for study, file, scale, unit in (('freezing', 'freezing_front', 'laptop', 'core'),
                                     ('transfer', 'transfer_rates_annealed', 'laptop', 'core'),
                                     ('spectra', 'spectra', 'paper', 'core'),
                                     ('plasticity', 'plasticity', 'paper', 'core'),
                                     ('frozen_weights', 'frozen_weights_pairs', 'paper', 'GPU'),
                                     ('interventions', 'interventions', 'paper', 'GPU')):
        seconds, *more = cost(study, file, scale)
        assert more == [unit, True] and 1 < seconds < 10**5, file
    some = {('freezing_front', 'laptop'): dict(memory_mb=3000.)}
    study = get_study('freezing')
    for file, known in (('freezing_depth', 3000.), ('freezing_landscape', 3000.)):
        recipes = common.flatten_recipes(study.files[file].lists('laptop', None))
        assert cli._estimated_memory(study, recipes, some) == known
    waves = common.flatten_recipes(get_study('spectra').files['spectra'].lists('laptop', None))
    assert cli._estimated_memory(get_study('spectra'), waves, some) is None and cli.training_memory(waves) is None


def test_dry_run_marks_estimates(monkeypatch, capsys):
    monkeypatch.setattr(cli, '_estimated_cost', lambda *args: (3600., 'core', True))
    monkeypatch.setattr(cli, '_recorded_costs', dict)
    assert reinit_repro(['synthetic', '--scale', 'laptop', '--dry-run']) == 0
    printed = capsys.readouterr().out
    assert '~ 720.0 core-h' in printed and '~ marks estimates' in printed


@pytest.mark.parametrize('argv, message', [
    (['--gpus', '0'], '--gpus=0 should be a whole number >= 1'),
    (['--gpus', '99'], "gpus=99: there is no 'cuda:"),
    (['--gpus', '1', '--workers', '2'], '--workers and --gpus exclude each other'),
    (['--cluster', 'ray', '--workers', '2'], '--workers and --cluster exclude each other'),
])
def test_wrong_places(argv, message, capsys):
    assert reinit_repro(['synthetic', '--scale', 'smoke', *argv]) == 2
    assert message in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == []


def test_places_reach_the_sweep(monkeypatch, capsys):
    given = []
    def write_results(study, out, scale, seeds, files, **options):
        given.append(options)
        raise ReinitError('enough')
    monkeypatch.setattr(common, 'write_results', write_results)
    monkeypatch.setattr('reinit_nb.workers.device_list', lambda gpus: ['cuda:0'] * gpus)
    argv = ['synthetic', '--scale', 'smoke']
    for more in (['--gpus', '2'], ['--cluster', 'ray'], ['--cluster', '10.0.0.1:6379'], ['--workers', '3'], []):
        assert reinit_repro([*argv, *more]) == 2
    first = given[::len(get_study('synthetic').files)]   # of each call
    places = [{k: v for k, v in o.items() if k not in ('store', 'show')} for o in first]
    assert places == [dict(gpus=2), dict(cluster='ray'), dict(cluster=dict(address='10.0.0.1:6379')),
                      dict(workers=3), {}]


# ---------------------------------------------------------------- datasets


@pytest.fixture
def no_data(monkeypatch):
    "A machine without images, and without a network"
    monkeypatch.delenv('REINIT_DATA', raising=False)
    monkeypatch.setenv('REINIT_CACHE', str(Path.cwd() / 'cache'))


def test_list_of_datasets(no_data, capsys):
    assert reinit_data(['list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert 'scikit-learn' in rows['digits'] and 'reinit_data get' in rows['cifar10'] and 'by hand' in rows['cars196']
    assert reinit_data(['list', '--json']) == 0
    found = {row['name']: row for row in json.loads(capsys.readouterr().out)}
    assert found['imagenet']['obtain'] == 'by hand' and found['mnist']['train'] == 60_000
    assert not Path('cache').exists()   # looking changes nothing


def test_get_what_is_here_and_what_cannot_be_had(no_data, capsys):
    assert reinit_data(['get', 'digits']) == 0
    assert capsys.readouterr().out == 'digits: is here already (scikit-learn)\n'
    assert reinit_data(['get', 'digits', 'stanford_dogs']) == 1
    printed = capsys.readouterr()
    assert printed.out == 'digits: is here already (scikit-learn)\n' and 'train_list.mat' in printed.err
    assert reinit_data(['get', 'digits', 'stanford_dogs', '--json']) == 1
    told = json.loads(capsys.readouterr().out)
    assert told['found'] == dict(digits='scikit-learn') and 'By hand' in told['failed']['stanford_dogs']


@pytest.mark.parametrize('argv, message', [
    (['get'], 'which datasets?'), (['get', 'cifar'], "did you mean 'cifar10'"), (['lst'], "did you mean 'list'"),
    (['list', 'mnist'], 'did you mean get?'), ([], None)])
def test_data_wrong_input(argv, message, no_data, capsys):
    assert reinit_data(argv) == (0 if message is None else 2)
    printed = capsys.readouterr()
    if message is None: assert 'usage: reinit_data' in printed.out
    else: assert message in printed.err and printed.err.count('\n') == 1


# ---------------------------------------------------------------- what all commands share


@pytest.mark.parametrize('name', COMMANDS)
def test_commands_are_alike(name, capsys):
    command, parser = COMMANDS[name]
    assert command(['--help']) == 0
    printed = capsys.readouterr()
    words = [f'usage: {name}', 'examples:', f'  {name} ', '--json', '--version']
    words += ['exit code: 0 done, 1 ', '2 wrong input, 130 Ctrl-C', *option_names(parser())]
    for word in words:
        assert word in printed.out, word
    assert printed.err == '' and max(map(len, printed.out.splitlines())) <= 120
    assert command(['--version']) == 0 and capsys.readouterr().out == f'reinit_nb {__version__}\n'
    assert command(['--nonsense']) == 2
    printed = capsys.readouterr()
    assert printed.out == '' and printed.err.count('\n') == 1
    assert printed.err.startswith(f'{name}: ') and f'(see {name} --help)' in printed.err


def test_every_command_is_installed():
    text = (ROOT / 'settings.ini').read_text(encoding='utf-8')
    found = dict(re.findall(r'(reinit_\w+)=reinit_nb\.([\w.:]+)', text))
    assert found == {name: f'cli:{name}' for name in COMMANDS}


def test_commands_as_a_user(tmp_path):
    "One call of each command in a process of its own: only the result is on the standard output"
    torch.save(partly_frozen().state_dict(), 'net.pth')
    run = call('reinit_frozen', 'net.pth', *SCNN, '--json', cwd=tmp_path)
    assert run.returncode == 0 and json.loads(run.stdout)['totals']['frozen'] == 2, run.stderr

    run = call('reinit_claims', 'r4', 'F4', '--json', cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [claim['id'] for claim in found['claims']] == ['R4', 'F4']
    assert sum(found['counts'].values()) == 2 and found['reinit_nb'] == __version__
    for claim in found['claims']:
        assert claim['verdict'] in VERDICT_WORDS and claim['lo'] <= claim['value'] <= claim['hi']
        assert claim['notebook'].startswith('experiments/')

    argv = ['reinit_tables', '--scale', 'smoke', '--out', 'o', '--runs', 'kept', '--json']
    run = call('reinit_repro', *argv, cwd=tmp_path)
    assert run.returncode == 0 and json.loads(run.stdout)['runs'] == 0, run.stderr

    shutil.copytree(ROOT / 'results', 'results', ignore=lambda folder, names: {n for n in names if 'laws' not in n})
    run = call('reinit_report', 'results', '--json', cwd=tmp_path)
    assert run.returncode == 0 and json.loads(run.stdout)['kind'] == 'results', run.stderr
    assert 'Traceback' not in run.stderr and 'Warning' not in run.stderr, run.stderr


SCRIPTS = Path(sys.executable).parent


@pytest.mark.skipif(not (SCRIPTS / 'reinit_repro').exists(), reason='the package is not installed here')
@pytest.mark.parametrize('name', COMMANDS)
def test_installed_commands(name):
    "Help and wrong usage, without anything on the standard error that is not ours"
    env = ENV | dict(PYTHONPATH=str(ROOT))

    def script(*argv):
        run = subprocess.run([SCRIPTS / name, *argv], capture_output=True, encoding='utf-8', env=env, timeout=300)
        return run.returncode, run.stdout, run.stderr

    code, out, err = script('--help')
    assert (code, err) == (0, '') and out.startswith(f'usage: {name}')
    assert script('--version') == (0, f'reinit_nb {__version__}\n', '')
    code, out, err = script('--nonsense')
    assert (code, out) == (2, '') and err.startswith(f'{name}: ') and err.count('\n') == 1


def test_help_needs_no_torch():
    "Nor does wrong usage, which is reported at once"
    heavy = ('torch', 'fastai', 'pandas', 'numpy', 'matplotlib')
    for name in COMMANDS:
        code = (
            f'import sys; from reinit_nb.cli import {name} as command; '
            'codes = [command([o]) for o in ("--help", "--version", "--nonsense")]; '
            f'print("loaded:", codes, [o for o in {heavy} if o in sys.modules])'
        )
        run = subprocess.run([sys.executable, '-c', code], capture_output=True, encoding='utf-8', env=ENV)
        assert run.stdout.splitlines()[-1] == 'loaded: [0, 0, 2] []', run.stdout[-200:] + run.stderr


FULL_DISK = OSError(28, 'No space left on device')


@pytest.mark.parametrize(
    'error, code, message',
    [
        (ReinitError('no\n  such thing'), 2, 'demo: no such thing\n'),
        (KeyboardInterrupt(), 130, 'Interrupted\n'),
        (KeyboardInterrupt('3 of 5'), 130, 'Interrupted: 3 of 5\n'),
        (FULL_DISK, 1, f'demo: failed: OSError: {FULL_DISK} (REINIT_DEBUG=1 shows where)\n'),
        (MemoryError(), 1, 'demo: failed: MemoryError: no message (REINIT_DEBUG=1 shows where)\n'),
        (BrokenPipeError(), 0, ''),
        (SystemExit(3), 3, ''),
    ],
)
def test_errors_become_exit_codes(error, code, message, capsys, monkeypatch):
    monkeypatch.setattr(cli, '_ignore_closed_pipe', lambda: 0)  # pytest needs its output

    def run(args):
        raise error

    assert run_command(Parser('demo', 'about', 'after'), run, [], bare=True) == code
    printed = capsys.readouterr()
    assert printed.err == message and printed.out == ''


def test_debugging_shows_where(monkeypatch):
    def run(args):
        raise ZeroDivisionError('deep inside')

    monkeypatch.setenv('REINIT_DEBUG', '1')
    with pytest.raises(ZeroDivisionError, match='deep inside'):
        run_command(Parser('demo', 'about', 'after'), run, [], bare=True)


def test_help_without_arguments(capsys):
    assert run_command(Parser('demo', 'about', 'after'), lambda args: 1 / 0, []) == 0
    assert 'usage: demo' in capsys.readouterr().out


# ---------------------------------------------------------------- reinit_claims


@pytest.fixture
def asked(capsys):
    "Call, and return what was printed"

    def run(*argv, code=0):
        assert reinit_claims(argv) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def judged_before(monkeypatch):
    "The command shows the table that comes with the package, which the tests of the scorecard hold against results/"
    judged = shipped_scorecard().drop(columns='date')

    def judge_claims(path, ids, *args, **kwargs):
        return judged[judged.id.isin(ids)]

    monkeypatch.setattr(claims_scorecard, 'judge_claims', judge_claims)
    return judged


def test_claims_in_120_columns(asked, judged_before):
    printed = asked('--paper', 'fourier')
    lines = printed.out.splitlines()
    at = [i for i, line in enumerate(lines) if re.match('  [✅❌≈?]', line)]
    ids = [f'F{i}' for i in range(1, 8)]
    words = '|'.join(VERDICT_WORDS.values())
    assert [re.match(rf'  [✅❌≈?] (?:{words})(?: †)? +(F\d)', lines[i])[1] for i in at] == ids
    judged = judged_before[judged_before.id.isin(ids)]
    for i, (_, claim) in zip(at, judged.iterrows()):
        assert effect_text(claim) in lines[i] and VERDICT_WORDS[claim.verdict] in lines[i]
        assert claim.measure in lines[i + 1] and sample_text(claim) in lines[i + 1]
        assert lines[i + 1].endswith(f'{claim["scale"]} scale')
    assert '7 claims: ' in lines[-1] and 'judging' in printed.err


def test_one_claim_in_full(asked):
    text = asked('F7').out
    assert max(map(len, text.splitlines())) <= 100
    for words in ('nbs/experiments/spectra.ipynb', 'Experiment 5', 'spectral norm', ' seeds; laptop scale'):
        assert words in ' '.join(text.split()), words


def test_all_lines_fit():
    lines = claim_lines(shipped_scorecard()).splitlines()

    def width(line):
        return len(line) + len(re.findall('[✅❌≈?]', line))  # a sign takes two columns

    assert max(map(width, lines)) <= 120
    assert sum(bool(re.match('  [✅❌≈?]', line)) for line in lines) == 54
    claim = dict(paper='freezing', short='x' * 44, verdict='❌', value=-218.4, lo=-1e3, hi=1e3, unit='powers of 10')
    claim |= dict(null=0.0, theirs_value=-100.0, measure='y' * 50, n=3, counts='seeds', scale='laptop')
    claim |= dict(old_runs=True, planned=12, needed=1234, cost=99.9)
    wide = pd.DataFrame([dict(id=f'C{i}') | claim for i in (1, 11)])
    assert max(map(width, claim_lines(wide).splitlines())) <= 120


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    "The package without the repository around it, as pip installs it"
    folder = tmp_path_factory.mktemp('site')
    shutil.copytree(ROOT / 'reinit_nb', folder / 'reinit_nb', ignore=shutil.ignore_patterns('__pycache__'))
    return dict(PYTHONPATH=str(folder))


def test_claims_without_results(installed, tmp_path):
    run = call('reinit_claims', '--json', env=installed, cwd=tmp_path)
    found, shipped = json.loads(run.stdout), shipped_scorecard()
    claims = [(claim['id'], claim['verdict'], claim['n']) for claim in found['claims']]
    assert run.returncode == 0 and claims == list(zip(shipped.id, shipped.verdict, shipped.n))
    assert found['date'] == shipped.date[0]
    assert 'there is no folder results/' in run.stderr and shipped.date[0] in run.stderr
    assert run.stderr.count('\n') == 1
    run = call('reinit_claims', 'R4', '--results', '.', env=installed, cwd=tmp_path)
    assert run.returncode == 2 and 'there are no results in .' in run.stderr  # asked for by name


def test_report_without_results(installed, tmp_path):
    run = call('reinit_report', env=installed, cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ''
    for words in ('there is no folder results/', 'checkout', 'name one'):
        assert words in run.stderr, words
    assert os.listdir(tmp_path) == []


def test_claims_filtered(asked, judged_before):
    def found(*argv):
        return json.loads(asked('--paper', 'fourier', *argv, '--json').out)['claims']

    verdicts = {claim['id']: claim['verdict'] for claim in found()}
    for word, sign in (('holds', '✅'), ('fails', '❌'), ('equivalent', '≈'), ('undecided', '?')):
        wanted = [claim for claim, verdict in verdicts.items() if verdict == sign]
        for name in (word, sign):
            assert [claim['id'] for claim in found('--verdict', name)] == wanted
        if not wanted:
            assert 'no such claims' in asked('--paper', 'fourier', '--verdict', word).out


def test_claims_of_other_results(asked):
    Path('mine').mkdir()
    shutil.copy(ROOT / 'results/spectra_laws_laptop.csv', 'mine')
    assert 'F4' in asked('F4', '--results', 'mine').out
    assert 'spectra_laptop.csv is missing' in asked('F1', '--results', 'mine', code=2).err


@pytest.mark.parametrize(
    'argv, message',
    [
        ('R99', "did you mean 'R9'"),
        ('--paper frosen', "did you mean 'frozen'"),
        ('--verdict maybe', "--verdict='maybe' is not known"),
        ('--results nowhere', 'there are no results in nowhere'),
        ('F1 --paper reinit', 'none of F1 is a claim of --paper reinit'),
        ('R1 --scale big', "scale='big' is not known"),
        ('--verdict', 'expected one argument'),
    ],
)
def test_claims_wrong_input(argv, message, asked):
    printed = asked(*argv.split(), code=2)
    assert message in printed.err and printed.out == ''
    assert printed.err.startswith('reinit_claims: ') and printed.err.count('\n') == 1


def test_signs_become_words_where_they_cannot_be_written():
    run = call('reinit_claims', 'R4', env=dict(PYTHONIOENCODING='ascii'))
    words = '|'.join(VERDICT_WORDS.values())
    assert run.returncode == 0 and re.match(rf'({words})\s+R4', run.stdout)
    assert 'Traceback' not in run.stderr and 'Warning' not in run.stderr


@pytest.mark.skipif(os.name != 'posix', reason='pipes as on posix')
def test_closed_pipe():
    "`reinit_claims --help | true` is no failure"
    code = 'import sys; from reinit_nb.cli import reinit_claims; sys.exit(reinit_claims())'
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8', env=ENV)
    process = subprocess.Popen([sys.executable, '-c', code, '--help'], **pipes)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert 'Broken' not in err and 'Traceback' not in err, err

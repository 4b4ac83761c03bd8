"Every command and every block of code in README.md is tested; a new one without a test makes these tests fail"

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from configparser import ConfigParser
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[1]
readme = (root / 'README.md').read_text(encoding='utf-8')


def blocks(md):
    "All fenced blocks, as (language, text)"
    return [(m[1], m[2]) for m in re.finditer(r'^```([\w-]*)\n(.*?)^```$', md, re.M | re.S)]


def commands(md):
    "All commands of shell blocks, without comments"
    shells = ('sh', 'bash', 'shell', 'console')
    lines = [line for lang, text in blocks(md) if lang in shells for line in text.splitlines()]
    return [o.strip() for line in lines for o in re.sub(r'(^|\s)#.*', '', line).split('&&') if o.strip()]


def settings():
    parser = ConfigParser(delimiters=['='])
    parser.read(root / 'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


# ---------------------------------------------------------------- blocks


def test_blocks_are_found():
    md = '```python\nx = 1\n```\ntext\n```sh\na && b  # c\n\n# d\n```\n\n```\nout\n```\n'
    assert blocks(md) == [('python', 'x = 1\n'), ('sh', 'a && b  # c\n\n# d\n'), ('', 'out\n')]
    assert commands(md) == ['a', 'b']


def test_languages_are_known():
    "Blocks without a language are outputs, as .ci/readme.py writes them"
    unknown = {lang for lang, _ in blocks(readme)} - {'python', 'sh', 'bibtex', ''}
    assert not unknown, f'README.md has blocks in {unknown}, which no test runs: add one to tests/test_readme.py'
    for lang in ('python', 'sh', 'bibtex'):
        assert any(found == lang for found, _ in blocks(readme)), f'README.md has no {lang} block any more'


def test_inline_commands_are_targets():
    "`make x` in a sentence names a target of the Makefile"
    targets = set(re.findall(r'^([a-z-]+):.*##', (root / 'Makefile').read_text(encoding='utf-8'), re.M))
    for t in re.findall(r'`make ([a-z-]+)`', readme):
        assert t in targets, f'README.md names `make {t}`, and the Makefile has {sorted(targets)}'


def python_blocks():
    return [text for lang, text in blocks(readme) if lang == 'python']


@pytest.mark.slow
def test_python_blocks_run(tmp_path):
    "All of them, in order, in one namespace and one new process, as a reader would paste them"
    file = tmp_path / 'readme.py'
    parts = [f'print("block {i}", flush=True)\n{t}' for i, t in enumerate(python_blocks())]
    file.write_text(
        'import matplotlib; matplotlib.use("agg")\n' + '\n'.join(parts) + '\nprint("all done")\n', encoding='utf-8'
    )
    env = os.environ | dict(
        REINIT_SCALE='smoke',
        OMP_NUM_THREADS='1',
        PYTHONPATH=os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')]),
    )
    env.pop('REINIT_DATA', None)  # no images but those that are always there
    r = subprocess.run([sys.executable, file], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert r.returncode == 0 and r.stdout.rstrip().endswith('all done'), f'{r.stdout[-500:]}\n{r.stderr[-3000:]}'


def test_python_blocks_are_those_of_the_notebook():
    "Visible cells of nbs/index.ipynb and blocks in its text: none is lost on the way"
    nb = json.loads((root / 'nbs/index.ipynb').read_text(encoding='utf-8'))
    cells = [''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']
    shown = [s for s in cells if not re.search(r'^#\s*\|\s*(hide|echo:\s*false|include:\s*false|default_exp)', s, re.M)]
    fenced = [
        t
        for c in nb['cells']
        if c['cell_type'] == 'markdown'
        for line, t in blocks(''.join(c['source']) + '\n')
        if line == 'python'
    ]
    assert sorted(o.strip() for o in python_blocks()) == sorted(o.strip() for o in shown + fenced)


# ---------------------------------------------------------------- commands


def git(*args, cwd=None):
    return subprocess.run(['git', *args], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope='module')
def fetched(tmp_path_factory):
    "A clone of this checkout with files as they are now, so that nothing is written here"
    if not shutil.which('git') or git('rev-parse', '--git-dir', cwd=root).returncode:
        pytest.skip('no git, or no repository here: nothing can be cloned')
    made = tmp_path_factory.mktemp('clone') / 'reinit_nb'
    r = git('-c', 'protocol.file.allow=always', 'clone', '--depth=1', root.as_uri(), made)
    assert r.returncode == 0, r.stderr
    for name in git('diff', '--name-only', 'HEAD', cwd=root).stdout.splitlines():  # changes that are not committed yet
        if (root / name).exists():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, made / name)
    return made


def install(cmd, tmp, request):
    "Really run, in a clone of this checkout; then the package is imported, and a command is called"
    if subprocess.run([sys.executable, '-c', 'import setuptools, pip'], capture_output=True).returncode:
        pytest.skip('pip or setuptools is missing here')
    options = ['--no-deps', '--no-build-isolation', '--no-index', '--disable-pip-version-check']
    command = [sys.executable, '-m', *shlex.split(cmd), *options, '--target', tmp / 'site']
    r = subprocess.run(command, cwd=request.getfixturevalue('fetched'), capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-1000:] + r.stderr[-2000:]
    env = os.environ | dict(PYTHONPATH=str(tmp / 'site'), OMP_NUM_THREADS='1')
    show = 'import reinit_nb; print(reinit_nb.__file__, reinit_nb.__version__)'
    r = subprocess.run([sys.executable, '-c', show], cwd=tmp, env=env, capture_output=True, text=True)
    assert r.stdout.split() == [str(tmp / 'site/reinit_nb/__init__.py'), settings()['version']], r.stdout + r.stderr
    r = subprocess.run([tmp / 'site/bin/reinit_claims', '--help'], cwd=tmp, env=env, capture_output=True, text=True)
    assert r.returncode == 0 and 'reinit_claims' in r.stdout, r.stdout + r.stderr


def with_this_python(cmd, tmp, *options):
    "A make command, with this environment in the place of .venv"
    if not shutil.which('make'):
        pytest.skip('make is not installed')
    bin, stamp = Path(sys.executable).parent, tmp / '.installed'
    stamp.touch()
    os.utime(stamp, (time.time() + 3600,) * 2)  # newer than settings.ini: nothing is installed
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')]))
    return subprocess.run(
        [*shlex.split(cmd), f'STAMP={stamp}', 'BROKEN=', f'BIN={bin}', *options],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
    )


def reproduce(cmd, tmp, request):
    "Really run, at smoke scale: a page, figures and tables come out"
    if not (Path(sys.executable).parent / 'reinit_repro').exists():
        pytest.skip('the commands are not installed beside this python')
    r = with_this_python(cmd, tmp, 'SCALE=smoke', f'OUT={tmp / "out"}')
    assert r.returncode == 0, r.stdout[-1000:] + r.stderr[-2000:]
    kinds = {f.suffix for f in (tmp / 'out').rglob('*') if f.is_file()}
    assert kinds >= {'.html', '.csv'}, kinds


def whole_test(cmd, tmp, request):
    "Read from a dry run: it would run this very test; .ci/run does it for every change"
    r = with_this_python(cmd, tmp, '-n')
    assert r.returncode == 0 and 'nbdev_test' in r.stdout and 'pytest' in r.stdout, r.stdout + r.stderr
    assert 'pip' not in r.stdout, 'nothing should be installed where the environment is there'
    ci = (root / '.ci/run').read_text(encoding='utf-8')
    assert 'make test' in ci or ('nbdev_test' in ci and 'pytest' in ci), '.ci/run should run what `make test` runs'


HANDLERS = {
    r'pip install \.': install,
    r'make reproduce': reproduce,
    r'make test': whole_test,
}


def handler(cmd):
    return next((f for k, f in HANDLERS.items() if re.fullmatch(k, cmd)), None)


@pytest.mark.slow
@pytest.mark.parametrize('cmd', dict.fromkeys(commands(readme)))
def test_commands(cmd, tmp_path, request):
    f = handler(cmd)
    assert f, f'README.md has the command {cmd!r}, and nothing tests it: add a handler to tests/test_readme.py'
    f(cmd, tmp_path, request)


def test_make_help():
    "Really run: the README says that it lists the rest"
    assert '`make help`' in readme
    if not shutil.which('make'):
        pytest.skip('make is not installed')
    r = subprocess.run(['make', 'help'], cwd=root, capture_output=True, text=True)
    assert r.returncode == 0 and {'reproduce', 'test', 'docs', 'readme'} <= set(
        re.findall(r'^  ([a-z-]+)', r.stdout, re.M)
    ), r.stdout + r.stderr


def test_every_handler_is_used():
    for k in HANDLERS:
        assert any(re.fullmatch(k, c) for c in commands(readme)), (
            f'no command of README.md is like {k!r} any more: remove its handler'
        )


def test_new_command_is_noticed():
    assert handler('make coffee') is None and handler('rm -rf x') is None and handler('make reproduce') is reproduce


# ---------------------------------------------------------------- the rest


def test_three_short_lines():
    "What, for whom and how, before the first heading"
    lines = re.findall(r'^- (.+)$', readme.partition('\n## ')[0], re.M)
    assert len(lines) == 3
    for line in lines:
        assert len(line.split()) < 25, f'{len(line.split())} words: {line}'


def test_one_example_of_ten_lines():
    lines = [line for t in python_blocks() for line in t.splitlines() if line.strip()]
    assert len(lines) <= 10, f'{len(lines)} lines of Python: other examples belong to the tutorials'


def test_sections():
    heads = re.findall(r'^## (.+)$', readme, re.M)
    assert heads == [
        'What is done to a network',
        'What came out',
        'Try it on your model',
        'Two commands',
        'Where to start',
        'Related packages',
        'How to cite',
        'License',
    ]
    assert re.search(r'^## License\n\nApache-2\.0, see \[LICENSE\]\(LICENSE\)', readme, re.M)


def test_bibtex():
    "Balanced braces; every entry has what a bibliography needs"
    text = next(t for lang, t in blocks(readme) if lang == 'bibtex')
    assert text.count('{') == text.count('}')
    entries = re.findall(r'^@(\w+)\{([\w-]+),\n(.*?)^\}', text, re.M | re.S)
    assert len(entries) == 4 and len({k for _, k, _ in entries}) == 4
    for kind, key, body in entries:
        fields = dict(re.findall(r'^\s*(\w+)\s*=\s*\{(.+)\},?$', body, re.M))
        need = {'title', 'author', 'year'} | ({'booktitle'} if kind == 'inproceedings' else {'note'})
        assert need <= set(fields), f'{key} lacks {need - set(fields)}'
        assert re.fullmatch(r'20\d\d', fields['year'])


def test_no_address_of_the_repository():
    "The README stands in a checkout, and names no address from which to get one"
    assert settings()['git_url'] not in readme


def test_links_lead_somewhere():
    "Files of the repository that are named by a link exist"
    links = re.findall(r'\]\(([^)#\s]+)', readme)
    lost = [o for o in links if not re.match(r'[a-z]+:', o) and not (root / o).exists()]
    assert not lost, f'README.md links to {lost}, which do not exist'


def test_ten_lines():
    "The tutorial promises ten lines for one's own checkpoint"
    nb = json.loads((root / 'nbs/tutorials/stuck.ipynb').read_text(encoding='utf-8'))
    cells = [''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']
    (cell,) = [s for s in cells if s.startswith('def pretrained()')]
    assert len([line for line in cell.splitlines() if line.strip() and not line.startswith('#')]) <= 10


def test_twenty_lines():
    "The tutorial promises twenty lines for one's own method"
    nb = json.loads((root / 'nbs/tutorials/method.ipynb').read_text(encoding='utf-8'))
    cells = [''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']
    cell = next(s for s in cells if s.startswith('class '))
    assert len([line for line in cell.splitlines() if line.strip()]) <= 20

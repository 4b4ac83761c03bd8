"Settings, setup.py, constraints, Makefile and the check script agree with each other"

import os
import re
import runpy
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

root = Path(__file__).resolve().parents[1]


def settings():
    parser = ConfigParser(delimiters=['='])
    parser.read(root / 'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


def setup_arguments(monkeypatch):
    "What setup.py hands to setuptools, without building anything"
    got = {}
    fake = SimpleNamespace(setup=lambda **kw: got.update(kw), find_packages=lambda **kw: ['reinit_nb'])
    monkeypatch.setitem(sys.modules, 'setuptools', fake)
    runpy.run_path(str(root / 'setup.py'))
    return got


def test_setup_reads_settings(monkeypatch):
    cfg, got = settings(), setup_arguments(monkeypatch)
    assert (got['name'], got['version'], got['description']) == (cfg['lib_name'], cfg['version'], cfg['description'])
    assert got['python_requires'] == '>=' + cfg['min_python']
    assert got['install_requires'] == cfg['requirements'].split()
    want = {k: cfg[f'{k}_requirements'].split() for k in ('dev', 'docs', 'cluster')}
    assert got['extras_require'] == {**want, 'dev': want['dev'] + want['docs']}
    assert got['entry_points']['console_scripts'] == cfg['console_scripts'].split()
    assert got['entry_points']['nbdev'] == ['reinit_nb=reinit_nb._modidx:d']
    assert f'__version__ = "{cfg["version"]}"' in (root / 'reinit_nb/__init__.py').read_text(), 'run nbdev_export'


def test_library_does_not_cap_fastcore():
    caps = [o for o in settings()['requirements'].split() if '<' in o or '==' in o]
    assert not caps, f'{caps}: caps belong to dev_requirements; the library runs on the newest versions'


def test_commands_exist():
    for script in settings()['console_scripts'].split():
        module, func = re.fullmatch(r'\w+=([\w.]+):(\w+)', script).groups()
        src = (root / (module.replace('.', '/') + '.py')).read_text(encoding='utf-8')
        assert re.search(rf'^def {func}\b', src, re.M), f'{module} has no {func}, which settings.ini makes a command'


def test_constraints_fit_settings():
    cfg = settings()
    text = (root / 'constraints.txt').read_text(encoding='utf-8')
    lines = [line for line in text.splitlines() if line and line[0] != '#']
    assert all(re.match(r'[\w.-]+==[\w.]+(;|$)', line) for line in lines), (
        'constraints.txt holds name==version lines only: make constraints'
    )
    pins = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in map(Requirement, lines)}
    for req in map(Requirement, ' '.join(cfg[f'{o}requirements'] for o in ('', 'dev_', 'docs_')).split()):
        version = pins.get(canonicalize_name(req.name))
        assert version, f'constraints.txt does not pin {req.name}: make constraints'
        assert version in req.specifier, f'constraints.txt pins {req.name}=={version}, settings.ini wants {req}'


def test_site_settings_fit():
    cfg, yml = settings(), (root / 'nbs/nbdev.yml').read_text(encoding='utf-8')
    for key in ('title', 'description', 'branch', 'git_url'):
        assert cfg[key] in yml, f'nbs/nbdev.yml lacks {key}: run `make docs`, or edit it'


@pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')
@pytest.mark.parametrize(
    'target',
    'help env reproduce lint test test-fast test-data test-latest bench readme llms docs constraints clean'.split(),
)
def test_make_targets(target):
    r = subprocess.run(['make', '-n', target], cwd=root, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


@pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')
def test_make_says_what_is_missing(tmp_path):
    shutil.copy(root / 'Makefile', tmp_path)
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'constraints.txt'):
        (tmp_path / f).touch()
    r = subprocess.run(['make', 'env', 'PYTHON=no-such-python'], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode and 'older than Python 3.10' in r.stderr and not (tmp_path / '.venv').exists()


@pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')
@pytest.mark.parametrize('quarto', [False, True])
def test_make_docs_takes_quarto_if_there_is_one(quarto, tmp_path):
    shutil.copy(root / 'Makefile', tmp_path)
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', 'constraints.txt'):
        (tmp_path / f).touch()
    (tmp_path / 'bin').mkdir()
    (tmp_path / '.venv/bin').mkdir(parents=True)  # a path with nothing but a shell's needs
    for o in ('sh', 'make', 'cat', 'sed', 'echo'):
        (tmp_path / 'bin' / o).symlink_to(shutil.which(o))

    def command(path):
        path.write_text(f'#!{shutil.which("sh")}\necho "{path.name} $*"\n')
        path.chmod(0o755)

    for o in ('.venv/bin/python', '.venv/bin/nbdev_docs', 'bin/python3', *(['bin/quarto'] if quarto else [])):
        command(tmp_path / o)
    (tmp_path / '.venv/.installed').write_text(str(tmp_path))
    r = subprocess.run(
        ['make', '-s', 'docs'],
        cwd=tmp_path,
        env={**os.environ, 'PATH': str(tmp_path / 'bin')},
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0, r.stderr
    assert r.stdout.splitlines() == [
        'python3 .ci/readme.py',
        'python .ci/docs/build.py --llms',
        'nbdev_docs --n_workers 2' if quarto else 'python .ci/docs/build.py --n_workers 2',
    ]
    assert ('quarto.org' in r.stderr) != quarto


def test_check_script_is_executable():
    assert os.access(root / '.ci/run', os.X_OK), 'chmod +x .ci/run'

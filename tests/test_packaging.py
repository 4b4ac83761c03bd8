"The source distribution builds, a wheel builds from it, and the package in that wheel is whole"
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow

# what the build reads, taken to a folder of its own: a build leaves files next to setup.py
SOURCES = ('setup.py', 'settings.ini', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'CHANGELOG.md',
           'constraints.txt')

IMPORTS = '''
import pathlib
import reinit_nb, reinit_nb.cli, reinit_nb.claims.scorecard, reinit_nb.report.page
from reinit_nb.store import paper_table
print(pathlib.Path(reinit_nb.__file__).parent, reinit_nb.__version__)
assert len(paper_table('reinit_table1'))
'''


def run(*command, cwd, **env):
    environ = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'} | env
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def package_files(folder):
    "All files of the package, as paths from the folder that holds it"
    files = (p.relative_to(folder) for p in (Path(folder) / 'reinit_nb').rglob('*') if p.is_file())
    return {p.as_posix() for p in files if '__pycache__' not in p.parts}


@pytest.fixture(scope='module')
def sdist(tmp_path_factory):
    "The unpacked source distribution"
    pytest.importorskip('setuptools')
    tree, out = tmp_path_factory.mktemp('tree'), tmp_path_factory.mktemp('sdist')
    for name in SOURCES: shutil.copy(root / name, tree)
    shutil.copytree(root / 'reinit_nb', tree / 'reinit_nb', ignore=shutil.ignore_patterns('__pycache__'))
    run('setup.py', '-q', 'sdist', '--formats=gztar', '--dist-dir', out, cwd=tree)
    archive, = out.glob('*.tar.gz')
    with tarfile.open(archive) as f: f.extractall(out, filter='data')
    folder, = (p for p in out.iterdir() if p.is_dir())
    return folder


@pytest.fixture(scope='module')
def wheel(sdist, tmp_path_factory):
    "The unpacked wheel, built from nothing but the source distribution"
    out = tmp_path_factory.mktemp('wheel')
    run('-m', 'pip', '--disable-pip-version-check', 'wheel', '-q', '--no-deps', '--no-build-isolation', '--no-index',
        '-w', out, sdist, cwd=out)
    archive, = out.glob('*.whl')
    with zipfile.ZipFile(archive) as f: f.extractall(out / 'unpacked')
    return out / 'unpacked'


def test_sdist_holds_what_the_build_reads(sdist):
    assert not [name for name in SOURCES if not (sdist / name).is_file()]
    assert package_files(sdist) == package_files(root)


def test_wheel_holds_the_whole_package(wheel):
    assert package_files(wheel) == package_files(root)
    files = package_files(wheel)
    assert 'reinit_nb/py.typed' in files
    assert any(f.startswith('reinit_nb/data/') and f.endswith('.csv') for f in files)
    assert any(f.startswith('reinit_nb/report/templates/') for f in files)
    top = {p.name for p in wheel.iterdir() if not p.name.endswith('.dist-info')}
    assert top == {'reinit_nb'}, 'tests, notebooks and results are not installed'


def test_metadata(wheel):
    info, = wheel.glob('*.dist-info')
    metadata = (info / 'METADATA').read_text(encoding='utf-8')
    readme = (root / 'README.md').read_text(encoding='utf-8')
    assert 'License-Expression: Apache-2.0' in metadata
    assert readme.strip()[:200] in metadata, 'the description is the README'
    assert list(info.rglob('LICENSE'))
    assert 'reinit_repro' in (info / 'entry_points.txt').read_text(encoding='utf-8')


def test_package_imports_from_the_wheel(wheel, tmp_path):
    printed = run('-c', IMPORTS, cwd=tmp_path, PYTHONPATH=str(wheel))
    folder, version = printed.split()
    assert Path(folder) == wheel / 'reinit_nb'
    assert f'version = {version}' in (root / 'settings.ini').read_text(encoding='utf-8')

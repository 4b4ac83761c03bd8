"What a reader sees on a page can be pasted into an empty script, and runs"

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[1]
tutorials = sorted(path.stem for path in (root / 'nbs/tutorials').glob('*.ipynb'))
pages = [f'tutorials/{name}' for name in tutorials]
pages += [f'explanations/{path.stem}' for path in sorted((root / 'nbs/explanations').glob('*.ipynb'))]
unseen = re.compile(r'^#\s*\|\s*(hide|echo: *false|include: *false|export|default_exp)', re.M)


def visible_code(page):
    "Return the code that a page shows, as one script"
    notebook = json.loads((root / f'nbs/{page}.ipynb').read_text(encoding='utf-8'))
    sources = [''.join(cell['source']) for cell in notebook['cells'] if cell['cell_type'] == 'code']
    return '\n\n'.join(source for source in sources if not unseen.search(source)) + '\n'


def ruff(code):
    "Return names that are used and not defined"
    command = [sys.executable, '-m', 'ruff', 'check', '--isolated', '--select', 'F821', '--output-format',
               'concise', '-']
    return subprocess.run(command, input=code, capture_output=True, text=True).stdout


def test_ruff_finds_what_is_missing():
    assert 'Undefined name `learn`' in ruff('learn.fit(1)\n')


@pytest.mark.parametrize('page', pages)
def test_every_name_is_imported_where_it_is_seen(page):
    assert 'Undefined name' not in ruff(visible_code(page)), ruff(visible_code(page))


@pytest.mark.parametrize('page', pages[: len(tutorials)])
def test_no_machinery_of_tests_is_seen(page):
    found = re.findall(r'\b(by_scale|test_eq|test_fail|test_close)\(', visible_code(page))
    assert not found, f'{page} shows {found}'


@pytest.mark.slow
@pytest.mark.parametrize('name', tutorials)
def test_a_tutorial_runs_as_a_script(name, tmp_path):
    script = tmp_path / f'{name}.py'
    script.write_text(visible_code(f'tutorials/{name}'), encoding='utf-8')
    env = {k: v for k, v in os.environ.items() if not k.startswith('REINIT_')}
    env |= dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', REINIT_RUNS=str(tmp_path / 'runs'))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

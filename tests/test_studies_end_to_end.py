"Every study from its recipes to the report, with its smallest recipes: sweep → results → claims → report"

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

import reinit_nb
from reinit_nb.report.page import judge_results, results_page
from reinit_nb.store import Store
from reinit_nb.studies.common import STUDY_NAMES, StudyResults, flatten_recipes, get_study, write_results

# Results files that are small enough to run whole at smoke scale, and the claims that they decide
WHOLE = dict(
    synthetic=(['synthetic'], ['R1', 'R2', 'R3']),
    reinit_tables=([], ['R4', 'R5']),
    freezing=(['cover', 'freezing_width256', 'freezing_regularizer'], ['C1', 'C2', 'C4', 'C9', 'C11']),
    frozen_weights=(['frozen_weights_eigenvalues', 'frozen_weights_flow'], ['Z1', 'Z2']),
    spectra=(['spectra_laws'], ['F4']),
    plasticity=(['plasticity', 'plasticity_tuning'], [f'P{i}' for i in range(1, 13)]),
)
# Of the others a few runs are trained: the first of each list
FEW = dict(
    reinit_cnn='reinit_cnn_precision',
    freezing='freezing',
    frozen_weights='frozen_weights_pairs',
    transfer='transfer',
    interventions='interventions',
)


def test_every_study_is_here():
    assert set(WHOLE) | set(FEW) == set(STUDY_NAMES)


def report_on(study, folder):
    "Judge and show what is in a folder"
    results = {study.name: StudyResults(study, folder, 'smoke')}
    judged = judge_results(results)
    return judged.set_index('id'), results_page(results, judged)


@pytest.mark.parametrize('name', WHOLE)
def test_whole_files(name, tmp_path):
    study = get_study(name)
    files, claims = WHOLE[name]
    store = Store(tmp_path / 'runs')
    paths = write_results(study, tmp_path / 'results', 'smoke', files=files, store=store, show=False, workers=1)
    assert [path.name for path in paths] == [f'{file}_smoke.csv' for file in files]
    judged, html = report_on(study, tmp_path / 'results')
    assert list(judged.index[judged.verdict != '']) == claims
    words = unescape(html)
    for claim in claims:
        assert judged.n[claim] > 0 and judged.measured[claim] in words
    assert f'<h3>{study.title}</h3>' in html.replace('&#39;', "'")
    assert str(tmp_path) not in html


@pytest.mark.parametrize('name', FEW)
def test_few_runs(name, tmp_path):
    "One run of a file that takes longer; what the page cannot show it names"
    study = get_study(name)
    file = FEW[name]
    source = study.files[file]
    recipes = [
        recipe
        for recipe in flatten_recipes(source.lists('smoke', None))
        if not (study.unavailable and study.unavailable(recipe))
    ]

    def first_recipe(scale=None, seeds=None):
        return dict(first=recipes[:1])

    small = replace(study, files={file: replace(source, lists=first_recipe)})
    store = Store(tmp_path / 'runs')
    (path,) = write_results(small, tmp_path / 'results', 'smoke', store=store, show=False, workers=1)
    assert path.name == f'{file}_smoke.csv' and recipes[0] in store
    judged, html = report_on(study, tmp_path / 'results')
    assert list(judged.index) == list(study.claims)
    assert (judged.verdict == '').all()  # one run decides nothing
    assert 'Not shown: ' in html and f'{file}_smoke.csv' in html
    assert f'<h3>{study.title}</h3>' in html.replace('&#39;', "'")
    assert str(tmp_path) not in html


COINS = """
import pandas as pd
from .common import Look, ResultsFile, Study, Table

def lists(scale=None, seeds=None): return dict(coins=[Look('coins', 3)])

def measure(look): return pd.DataFrame(dict(toss=range(look.n), heads=[True, False, True]))

STUDY = Study('coins', 'Tossing coins', 'reinit', 'How often do heads come up?', 'experiments/coins.ipynb',
              dict(coins=ResultsFile(lists, measure=measure)),
              exhibits=dict(tosses=Table(lambda df: df[['toss', 'heads']], ('coins',), 'All tosses')))
"""


@pytest.mark.slow
def test_a_study_is_a_module_and_a_line(tmp_path):
    "In a copy of the package: the command knows the new study, runs it, and reports on it"
    package = tmp_path / 'reinit_nb'
    shutil.copytree(Path(reinit_nb.__file__).parent, package, ignore=shutil.ignore_patterns('__pycache__'))
    (package / 'studies/coins.py').write_text(COINS, encoding='utf-8')
    with (package / 'data/studies.csv').open('a', encoding='utf-8') as table:
        table.write('coins,fair and unfair ones\n')

    def command(*argv):
        code = 'import sys; from reinit_nb.cli import reinit_repro; sys.exit(reinit_repro())'
        env = os.environ | dict(PYTHONPATH=str(tmp_path))
        run = subprocess.run([sys.executable, '-c', code, *argv], cwd=tmp_path, env=env, capture_output=True,
                             encoding='utf-8')
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert re.search(r'coins +fair and unfair ones', command('--help'))
    command('coins', '--scale', 'smoke', '--out', 'out')
    assert (tmp_path / 'out/coins_smoke.csv').exists()
    page = (tmp_path / 'out/index.html').read_text(encoding='utf-8')
    assert '<h3>Tossing coins</h3>' in page and 'All tosses' in page

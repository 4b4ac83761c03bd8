"What is published in results/ belongs to the recipes of today, and says what we say it says"
from pathlib import Path

import pytest

from reinit_nb.reinit import PAPER_METHODS
from reinit_nb.store import load_results
from reinit_nb.studies.synthetic import (
    last_round,
    synthetic_table1,
    synthetic_table5,
    table1_recipes,
    table5_recipes,
)

RESULTS = Path(__file__).parent.parent / 'results'

@pytest.fixture(scope='module')
def runs():
    df = load_results(RESULTS / 'synthetic_laptop.csv')
    return {t: df[df.table == t] for t in ('table1', 'table5')}

def test_every_file_loads():
    files = sorted(RESULTS.glob('*.csv'))
    assert files
    for f in files: assert len(load_results(f))

@pytest.mark.parametrize('table, recipes', [('table1', table1_recipes), ('table5', table5_recipes)])
def test_all_recipes_of_the_tables_are_there_and_no_others(runs, table, recipes):
    "A recipe that has changed since has another hash"
    assert set(runs[table].recipe) == {r.hash for r in recipes('laptop')}

def test_every_round_is_there(runs):
    assert (runs['table1'].groupby('recipe')['round'].apply(sorted).map(tuple) == tuple(range(1, 10))).all()
    assert (runs['table5'].groupby('recipe')['round'].apply(sorted).map(tuple) == tuple(range(1, 6))).all()

def test_comparisons_are_compute_matched(runs):
    for df in runs.values(): assert last_round(df).step.nunique() == 1

def test_table1_is_within_three_points_of_the_paper_on_average(runs):
    t = synthetic_table1(runs['table1'])
    assert len(t) == 18 and t['diff'].abs().mean() <= 3
    wide = t.pivot(index='alpha', columns='method', values='mean')
    assert (wide.LW > wide.BL).all() and list(PAPER_METHODS) == list(dict.fromkeys(t.method))

def test_table5_has_the_planned_seeds(runs):
    assert synthetic_table5(runs['table5']).n.min() >= 20

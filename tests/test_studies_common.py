"Records of studies: complete, and in step with claims; what they show is in the tests of scorecard and report"
import pandas as pd
import pytest

from reinit_nb.claims.scorecard import all_claims
from reinit_nb.core import ReinitError
from reinit_nb.ensemble import MLPRun
from reinit_nb.studies.common import (
    STUDY_NAMES,
    ResultsFile,
    Study,
    Table,
    cost_table,
    flatten_recipes,
    get_study,
    label_runs,
    line_ends,
    seed_range,
)


@pytest.mark.parametrize('name', STUDY_NAMES)
def test_records_are_complete(name, request):
    s = get_study(name)
    assert s.name == name and s.title and s.about.endswith(('.', '?'))
    assert (request.config.rootpath / 'nbs' / s.page).exists()
    lists = [k for f in s.files.values() for k in f.lists('smoke')]
    assert len(lists) == len(set(lists)), 'names of lists are unique within a study'
    for f in s.files.values(): assert (f.engine is None) != (f.measure is None), 'a file is trained or measured'
    assert set(all_claims().paper) >= {s.paper}

@pytest.mark.parametrize('name', [k for k in STUDY_NAMES if get_study(k).files])
def test_lists_follow_scale_and_seeds(name):
    s = get_study(name)
    assert 0 < len(s.recipes('smoke')) <= len(s.recipes('laptop'))
    assert len(s.recipes('smoke', seeds=1)) <= len(s.recipes('smoke'))

def test_exhibits_are_made_once(tmp_path):
    made = []
    def table():
        made.append(pd.DataFrame(dict(a=[1])))
        return made[0]
    results = toy(dict, exhibits=dict(t=Table(table, (), 'A table'))).load(tmp_path)
    assert results.exhibit('t') is results.exhibit('t') is made[0] and len(made) == 1
    with pytest.raises(ReinitError, match='exhibit'): results.exhibit('u')

def toy(lists, **kw): return Study('toy', 'Toy', 'reinit', 'A toy.', '', dict(toy=ResultsFile(lists)), **kw)

def test_unavailable_recipes_are_not_missing(tmp_path):
    from reinit_nb.store import save_results
    have, lack = MLPRun(seed=0), MLPRun(seed=1)
    save_results(pd.DataFrame([dict(recipe=have.hash, seed=0)]), tmp_path / 'toy_laptop.csv')
    def lists(scale=None, seeds=None): return dict(both=[have, lack])
    with pytest.raises(ReinitError, match='lacks 1 of 2 runs'): toy(lists).load(tmp_path).rows('both')
    assert len(toy(lists, unavailable=lambda r: r.seed == 1).load(tmp_path).rows('both')) == 1

def test_labels_keep_the_order_of_recipes():
    a, b = MLPRun(seed=0), MLPRun(seed=1)
    df = pd.DataFrame(dict(recipe=[b.hash, a.hash, a.hash], step=[1, 1, 2], variant='old'))
    t = label_runs(df, {'first': [a], 'second': [b, MLPRun(seed=2)]}, columns=dict(step='time'))
    assert t.variant.tolist() == ['first', 'first', 'second'] and t.time.tolist() == [1, 2, 1]
    with pytest.raises(ReinitError, match='no recipes'): label_runs(df, {})

def test_helpers():
    assert seed_range(None, (1, 2, 3), 'paper') == range(3) and seed_range(5, (1, 2, 3), 'paper') == range(5)
    with pytest.raises(ReinitError, match='seeds'): seed_range(0, (1, 2, 3))
    t = cost_table([dict(dataset='a', ops=3.6e15), dict(dataset='b', ops=1.)], 'dataset', 1., 'networks')
    assert t.hours['a'] == pytest.approx(1.) and list(t.columns) == ['networks', 'ops', 'hours']
    assert line_ends(pd.DataFrame(dict(k='a', x=[1, 2, 2], y=[0., 2., 4.])), 'k', 'x', 'y') == 'a goes from 0.0 to 3.0'
    assert flatten_recipes({}) == []

"The study of interventions: what is done to a network, what runs share, ratios, and the recorded results"
import copy

import numpy as np
import pandas as pd
import pytest
import torch

from reinit_nb.between import dirac_reset
from reinit_nb.core import ReinitError
from reinit_nb.store import Store
from reinit_nb.studies import interventions as study
from reinit_nb.studies import spectra
from reinit_nb.sweep import run_sweep


def smoke_run(how, **kw):
    run = next(r for r in study.intervention_runs('smoke', hows=study.CONTINUATIONS) if r.how == how)
    return run.replace(**(dict(epochs=2, looked=8) | kw))

def same_parameters(net, state): return all(torch.equal(v, state[k]) for k, v in net.named_parameters())

@pytest.fixture(scope='module')
def trained():
    "Data, a fresh network, and the same after the first stretch"
    r = smoke_run('nothing')
    train, _, classes = spectra.image_data(spectra.ImageRun(r.model, r.task, n_test=10, seed=r.seed))
    fresh = spectra.image_net(r.model, classes, r.seed, size=train[0].shape[2], c_in=train[0].shape[1], width=r.width)
    return train, fresh, study._train(copy.deepcopy(fresh), train, r, seed=r.seed)

@pytest.mark.parametrize('how', study.CONTINUATIONS)
def test_what_a_continuation_begins_with(how, trained):
    train, fresh, first = trained
    run = smoke_run(how)
    net = study._second_start(run, first, fresh)
    begin = {k: v.clone() for k, v in net.state_dict().items()}
    now = study._after_intervention(run, net, train)
    expected = copy.deepcopy(fresh if how == 'reservoir' else first)
    if how == 'Dirac': dirac_reset(expected, run.reset)
    assert same_parameters(expected, begin)
    if how == 'LW': assert not torch.equal(next(now.block8.parameters()), next(first.block8.parameters()))
    else: assert now is net
    study._train(net, train, run, study._continuation_callbacks(run), run.seed + 1)
    front = tuple(f'block{i}.' for i in range(1, run.front + 1))
    stayed = [torch.equal(v, begin[k]) for k, v in net.named_parameters() if k.startswith(front)]
    assert all(stayed) == (how in ('frozen', 'reservoir'))

def test_runs_of_a_network_share_what_comes_before():
    rows = [o[0] for o in study.run_interventions([smoke_run(h) for h in ('nothing', 'Dirac')])]
    alone = study.run_interventions([smoke_run('Dirac')])[0][0]
    assert rows[1] == alone
    assert all(rows[0][k] == rows[1][k] for k in rows[0] if k.endswith('0'))
    assert rows[0]['width1'] != rows[1]['width1']
    # recipe by recipe, the first stretch would be trained again for each
    assert study.INTERVENTION_ENGINE.processes and study.INTERVENTION_ENGINE.together

@pytest.mark.slow
def test_two_workers_compute_what_one_does(tmp_path):
    "Training and symbolic tracing use global state: portions need processes of their own"
    runs = [r.replace(epochs=2, looked=4, probes=2) for r in study.intervention_runs('smoke', 2)
            if r.how in ('nothing', 'LW')]
    one, two = (run_sweep(runs, Store(tmp_path / str(n)), study.INTERVENTION_ENGINE, show=False, workers=n)
                for n in (1, 2))
    same = [c for c in one if c not in ('date', 'seconds')]
    pd.testing.assert_frame_equal(one[same], two[same], check_exact=True)

def test_runs_live_on_the_default_device(monkeypatch):
    asked = []
    def device():
        asked.append(1)
        return torch.device('cpu')
    monkeypatch.setattr(study, 'default_device', device)
    study.run_interventions([smoke_run('nothing')])
    assert len(asked) >= 3      # the network, and each of two stretches

def test_restarts_are_the_control_with_the_rounds_of_lw():
    control, restart, lw = (smoke_run(h) for h in ('nothing', 'restart', 'LW'))
    assert restart.replace(how='nothing') == control
    assert [r.how for r in study.intervention_restarts('smoke')] == ['restart'] * 2
    assert 'restart' not in {r.how for r in study.intervention_runs('smoke')}
    (cb,), (other,) = (study._continuation_callbacks(r) for r in (restart, lw))
    assert cb.rounds == other.blocks == restart.rounds

WRONG = [(dict(how='frozzen'), "did you mean 'frozen'"), (dict(rounds=0), 'rounds=0'), (dict(probes=1), 'probes=1'),
         (dict(reset=0.), 'reset=0'), (dict(how='LW', rounds=9, epochs=8), 'epochs=8 should be 9 or more')]

@pytest.mark.parametrize('kw, says', WRONG)
def test_wrong_recipes_are_refused(kw, says):
    with pytest.raises(ReinitError, match=says): study.BridgeRun(**kw)

def test_ratios_are_taken_seed_by_seed():
    rng = np.random.default_rng(0)
    rows = [dict(model=m, seed=s, how=h, width1=10.**s * (2. if h == 'LW' else 1.) * (1 + .01 * rng.random()))
            for m in 'ab' for s in range(4) for h in study.CONTINUATIONS]
    df = pd.DataFrame(rows)
    t = study.ratios_to_control(df, ['width'])
    lw = t[t.how == 'LW']
    assert len(t) == 2 * (len(study.CONTINUATIONS) - 1) and np.allclose(lw.ratio, 2, rtol=.02)
    assert (lw.lo > 1.9).all() and (lw.hi < 2.1).all()
    assert len(study.plot_ratios_to_control(t)) == 1
    assert len(study.ratios_to_control(df[df.seed == 0], ['width'])) == 0    # one seed has no interval

def test_a_row_of_the_figure_has_four_panels_at_most():
    rows = [dict(model='a', seed=s, how=h, **{f'{k}1': 1. + s for k in study.INTERVENTION_MEASURES})
            for s in range(2) for h in study.CONTINUATIONS]
    axs = study.plot_ratios_to_control(study.ratios_to_control(pd.DataFrame(rows)))
    assert len(axs) == len(study.INTERVENTION_MEASURES) and axs[0].get_gridspec().ncols <= 4

def test_recorded_results_are_complete():
    results = study.STUDY.load()
    df = results.part('interventions')
    assert set(df.recipe) == {r.hash for r in study.intervention_runs('laptop')}
    for exhibit in study.STUDY.figures.values():
        assert len(exhibit.draw(df)) == len(study.INTERVENTION_MEASURES)
        assert 'Intervals without 1' in exhibit.alt(df)
    for exhibit in study.STUDY.tables.values(): assert len(exhibit.make(df)) == 4 * len(study.INTERVENTION_MEASURES)

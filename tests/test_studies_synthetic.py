"The synthetic study: the control with restarts"
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from reinit_nb.store import Store, load_results
from reinit_nb.studies.synthetic import (
    STUDY,
    last_round,
    plot_synthetic_norms,
    plot_synthetic_rounds,
    restart_gains,
    table1_recipes,
    table5_methods,
    table5_recipes,
    table5_restarts,
)
from reinit_nb.sweep import run_sweep

RESULTS = Path(__file__).parent.parent / 'results'

def test_restarts_differ_from_the_baseline_in_nothing_else():
    base = [r for r in table5_recipes('laptop') if r.method == 'BL']
    restarts = table5_restarts('laptop')
    assert len(restarts) == len(base) == 6 * 20
    assert [r.replace(method='BL', redraw=True, rescale=True, normalize=True) for r in restarts] == base
    assert {(r.redraw, r.rescale, r.normalize, r.opt_state) for r in restarts} == {(False, False, False, 'zero')}

def test_without_state_a_restart_is_nothing(tmp_path):
    base = table1_recipes('smoke', 1)[0]
    other = base.replace(method='LW', redraw=False, rescale=False, normalize=False)
    df = run_sweep([base, other], Store(tmp_path), show=False, workers=1)
    a, b = (df[df.recipe == r.hash] for r in (base, other))
    for c in ('train_acc', 'test_acc', 'norm1'): assert a[c].tolist() == b[c].tolist()

def test_with_adam_it_is_not(tmp_path):
    base = next(r for r in table5_recipes('smoke', 1) if r.method == 'BL')
    other = table5_restarts('smoke', 1)[0]
    df = run_sweep([base, other], Store(tmp_path), show=False, workers=1)
    a, b = (df[df.recipe == r.hash].norm1.tolist() for r in (base, other))
    assert a[0] == b[0] and a[-1] != b[-1]

def test_recorded_restarts_are_complete_and_matched():
    df = load_results(RESULTS / 'synthetic_restart_laptop.csv')
    assert set(df.recipe) == {r.hash for r in table5_restarts('laptop')}
    both = STUDY.load(RESULTS).part('table5_controlled')
    assert last_round(both).step.nunique() == 1
    assert set(table5_methods(both)) == {'Baseline', 'Rescaling', 'LW', 'restart'}

def test_gains_over_restarts_by_hand():
    both = STUDY.load(RESULTS).part('table5_controlled')
    d = last_round(both).assign(arm=table5_methods)
    d = d[d.l2 == 0].pivot(index='seed', columns='arm', values='test_acc')
    said = restart_gains(both).loc[0.]
    assert float(said['restart − Baseline'].split()[0]) == pytest.approx(100 * (d.restart - d.Baseline).mean(), abs=.06)
    assert float(said['LW − restart'].split()[0]) == pytest.approx(100 * (d.LW - d.restart).mean(), abs=.06)


def test_legends_of_figures_by_round_cover_no_panel():
    df = STUDY.load(RESULTS).part('table1')
    for axs in (plot_synthetic_rounds(df), plot_synthetic_norms(df)):
        assert not any(ax.get_legend() for ax in axs)
        legend, = axs[0].figure.legends
        axs[0].figure.canvas.draw()
        assert all(ax.get_window_extent().x1 <= legend.get_window_extent().x0 for ax in axs)
    plt.close('all')

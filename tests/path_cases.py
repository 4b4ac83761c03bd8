"""A learning path that is killed and resumed equals one that was never killed, to the last bit.

Processes are forked and really killed (SIGKILL): within stages, between them, and while files are written.
"""
import os
import signal
from functools import partial

import pandas as pd
import pytest
import torch
from resume_cases import At, die, differences, in_child

import reinit_nb.core
import reinit_nb.path
from reinit_nb.path import Before, Learn, PathFolder, PathRun, train_path
from reinit_nb.store import Store
from reinit_nb.sweep import PATH, run_sweep
from reinit_nb.vision import Task

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
A, B = Task('digits', n_train=80, blur=.25, shift=.1), Task('digits', n_train=60, classes=4, shift=.1)
HOW = Learn(lr=.05, wd=.01, decay=.9, batch=24, epochs=3, patience=2)

def path(before='dirac', keep='best', **kw):
    stages = (A, HOW), (B, HOW.replace(before=Before(before))), (A, HOW.replace(epochs=1, patience=None))
    return PathRun('resnet18', stages, width=.0625, dropout=.3, keep=keep, **kw)

def child(run, folder, out, kill=None):
    "Train a path in a process of its own, and save all that it ended with"
    def go():
        cbs = [kill] if isinstance(kill, At) else []
        if kill and not cbs: kill()
        torch.manual_seed(torch.seed())   # what the process did before must not matter
        done = train_path(run, folder, cbs=cbs)
        torch.save(dict(model=done.learn.model.state_dict(), opt=done.learn.opt.state_dict(),
                        rows=done.rows.to_dict('list'), curves=done.curves.to_dict('list')), out)
    return in_child(go)

class InStage(At):
    "Die in one of the stages: the number of finished ones tells them apart"
    def __init__(self, stage, *args):
        self.stage = stage
        super().__init__(*args)

    def check(self, epoch, batch):
        finished = [f for f in os.listdir(FOLDER[0]) if f.endswith('.stage')]
        if len(finished) == self.stage: super().check(epoch, batch)

FOLDER = [None]

def replacing(n):
    "Die between the temporary file and its name, when the `n`-th file is written"
    plain, seen = os.replace, []
    def replace(a, b):
        seen.append(a)
        if len(seen) == n: die()
        plain(a, b)
    reinit_nb.core.os.replace = replace

def before_saving():
    "Die when a stage has ended, before its weights are written"
    PathFolder.save_stage = die

def after_saving():
    "Die when the weights of a stage are written, and its last checkpoint is still there"
    plain = PathFolder.save_stage
    def save(*args):
        plain(*args)
        die()
    PathFolder.save_stage = save

def measuring():
    reinit_nb.path.stage_row = die

@pytest.fixture(scope='module', autouse=True)
def warm():
    "Import and cache everything once, before the forks"
    short = tuple((task, how.replace(epochs=1, patience=None)) for task, how in path().path)
    train_path(path().replace(path=short))

KILLS = {
    'in stage 1': lambda: InStage(0, 'before_backward', 1, 1),
    'after an epoch of stage 1': lambda: InStage(0, 'after_epoch', 0),
    'while stage 1 is measured': lambda: measuring,
    'after stage 1': lambda: before_saving,
    'after its weights were written': lambda: after_saving,
    'in stage 2': lambda: InStage(1, 'before_backward', 2, 0),
    'validating in stage 2': lambda: InStage(1, 'after_validate', 1),
    'after stage 2': lambda: before_saving,
    'while a file is written': lambda: partial(replacing, 1),
    'in stage 3': lambda: InStage(2, 'after_validate', 0),
}

@pytest.mark.parametrize('before, keep', [('dirac', 'best'), ('LW', 'last')])
def test_killed_in_many_places_one_after_the_other(tmp_path, before, keep):
    run = path(before, keep)
    FOLDER[0] = folder = tmp_path / 'stages'
    folder.mkdir()
    assert child(run, None, tmp_path / 'whole.pth') == 0
    for name, kill in KILLS.items():
        assert child(run, folder, tmp_path / 'killed.pth', kill()) == signal.SIGKILL, f'was not killed {name}'
    assert not (tmp_path / 'killed.pth').exists()
    assert child(run, folder, tmp_path / 'killed.pth') == 0
    whole, killed = (torch.load(tmp_path / f'{o}.pth', weights_only=False) for o in ('whole', 'killed'))
    assert not differences(whole, killed)
    assert sorted(o.suffix for o in folder.iterdir()) == ['.json', '.stage', '.stage']

def test_a_sweep_that_is_killed_resumes(tmp_path):
    runs = [path('dirac'), path('FC'), path('dirac', seed=1)]
    def go(kill=None):
        if kill: kill()
        df = run_sweep(runs, Store(tmp_path / 'store'), PATH, show=False, workers=1)
        df.to_pickle(tmp_path / 'df.pkl')
    def die_at_fifth_row():
        plain, n = reinit_nb.path.stage_row, [0]
        def row(*args):
            n[0] += 1
            return die() if n[0] == 5 else plain(*args)
        reinit_nb.path.stage_row = row
    assert in_child(lambda: go(die_at_fifth_row)) == signal.SIGKILL
    assert in_child(go) == 0
    df = pd.read_pickle(tmp_path / 'df.pkl')
    assert len(df) == 9
    for run in runs:
        assert in_child(lambda run=run: train_path(run).rows.to_pickle(tmp_path / 'row.pkl')) == 0
        want = pd.read_pickle(tmp_path / 'row.pkl')
        got = df[df.recipe == run.hash][want.columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(got, want, check_dtype=False)

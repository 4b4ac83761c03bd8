"""A learning path that is killed and resumed equals one that was never killed, to the last bit: in processes that are forked and really killed (SIGKILL), within stages, between them, and while files are written"""
import os
import signal
from functools import partial

import pandas as pd
import pytest
import torch
from resume_cases import At, die, differences, in_child

import reinit_nb.core
import reinit_nb.sequence as seq
from reinit_nb.core import Store
from reinit_nb.path import Before, Learn
from reinit_nb.sequence import PathRun, follow
from reinit_nb.sweep import Engine
from reinit_nb.sweep import run as sweep
from reinit_nb.vision import Task

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
A, B = Task('digits', n_train=80, blur=.25, shift=.1), Task('digits', n_train=60, classes=4, shift=.1)
HOW = Learn(lr=.05, wd=.01, decay=.9, batch=24, epochs=3, patience=2)

def path(before='dirac', keep='best', **kw):
    return PathRun('resnet18', ((A, HOW), (B, HOW.replace(before=Before(before))), (A, HOW.replace(epochs=1, patience=None))), width=.0625, dropout=.3, keep=keep, **kw)

def child(run, folder, out, kill=None):
    "Follow a path in a process of its own, and leave all that it ended with"
    def go():
        cbs = [kill] if isinstance(kill, At) else []
        if kill and not cbs: kill()
        torch.manual_seed(torch.seed())   # whatever the process was at before must not matter
        done = follow(run, folder, cbs=cbs)
        torch.save(dict(model=done.learn.model.state_dict(), opt=done.learn.opt.state_dict(), rows=done.rows.to_dict('list'), curves=done.curves.to_dict('list')), out)
    return in_child(go)

class InStage(At):
    "Die in one of the stages: the number of classes, or the blur, tells them apart"
    def __init__(self, stage, *args): self.stage = stage; super().__init__(*args)
    def check(self, epoch, batch):
        seen = len(set(os.listdir(FOLDER[0])) & {f for f in os.listdir(FOLDER[0]) if f.endswith('.stage')})
        if seen == self.stage: super().check(epoch, batch)

FOLDER = [None]

def replacing(n):
    "Die between the temporary file and its name, when the `n`-th file is written"
    plain, seen = os.replace, []
    def replace(a, b):
        seen.append(a)
        if len(seen) == n: die()
        plain(a, b)
    reinit_nb.core.os.replace = replace

def between():
    "Die when a stage has ended, before its weights are kept"
    seq._keep_stage = die

def after_keeping():
    "Die when the weights of a stage are kept, and its last checkpoint is still there"
    plain = seq._keep_stage
    def keep(*args): plain(*args); die()
    seq._keep_stage = keep

def measuring():
    seq.stage_row = die

@pytest.fixture(scope='module', autouse=True)
def warm():
    "All that is imported or kept on first use, once, before the forks"
    follow(path().replace(path=tuple((t, h.replace(epochs=1, patience=None)) for t, h in path().path)))

KILLS = {'in stage 1': lambda: InStage(0, 'before_backward', 1, 1), 'after an epoch of stage 1': lambda: InStage(0, 'after_epoch', 0), 'while stage 1 is measured': lambda: measuring,
         'after stage 1': lambda: between, 'its weights kept': lambda: after_keeping, 'in stage 2': lambda: InStage(1, 'before_backward', 2, 0), 'validating in stage 2': lambda: InStage(1, 'after_validate', 1),
         'after stage 2': lambda: between, 'while a file is written': lambda: partial(replacing, 1), 'in stage 3': lambda: InStage(2, 'after_validate', 0)}

@pytest.mark.parametrize('before, keep, every', [('dirac', 'best', 1), ('LW', 'last', 1)])
def test_killed_in_many_places_one_after_the_other(tmp_path, before, keep, every):
    run = path(before, keep)
    FOLDER[0] = folder = tmp_path / 'stages'
    folder.mkdir()
    assert child(run, None, tmp_path / 'whole.pth') == 0
    for name, kill in list(KILLS.items())[::every]: assert child(run, folder, tmp_path / 'killed.pth', kill()) == signal.SIGKILL, f'was not killed {name}'
    assert not (tmp_path / 'killed.pth').exists()
    assert child(run, folder, tmp_path / 'killed.pth') == 0
    a, b = (torch.load(tmp_path / f'{o}.pth', weights_only=False) for o in ('whole', 'killed'))
    assert not differences(a, b)
    assert sorted(o.suffix for o in folder.iterdir()) == ['.json', '.stage', '.stage']

def test_a_sweep_that_is_killed_goes_on(tmp_path):
    runs = [path('dirac'), path('FC'), path('dirac', seed=1)]
    engine = Engine(seq.plan, seq.run, processes=True, resumes=True, missing=seq.missing)
    def go(kill=None):
        if kill: kill()
        sweep(runs, Store(tmp_path / 'store'), engine, show=False, workers=1).to_pickle(tmp_path / 'df.pkl')
    def second_row():
        plain, n = seq.stage_row, [0]
        def row(*args):
            n[0] += 1
            return die() if n[0] == 5 else plain(*args)
        seq.stage_row = row
    assert in_child(lambda: go(second_row)) == signal.SIGKILL
    assert in_child(go) == 0
    df = pd.read_pickle(tmp_path / 'df.pkl')
    assert len(df) == 9
    for r in runs:
        assert in_child(lambda: follow(r).rows.to_pickle(tmp_path / 'row.pkl')) == 0
        want = pd.read_pickle(tmp_path / 'row.pkl')
        pd.testing.assert_frame_equal(df[df.recipe == r.hash][want.columns].reset_index(drop=True), want, check_dtype=False)

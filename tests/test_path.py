"Runs on one task: deterministic, paired, and the baseline is plain fastai"
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback

from reinit_nb.baselines import METHODS
from reinit_nb.core import Recipe, ReinitError
from reinit_nb.path import (
    Learn,
    Method,
    Run,
    TimedCheckpoint,
    lr_at,
    make_optimizer,
    measure_learner,
    n_rounds,
    run_recipe,
    stage_model,
    train_path,
    train_run,
)
from reinit_nb.store import Store
from reinit_nb.sweep import PATH, Engine, run_sweep
from reinit_nb.vision import Task, image_dls

ROOT = Path(__file__).resolve().parents[1]
SMALL = Run('scnn', Task('digits', n_train=60, shift=.1), Learn(lr=.02, epochs=4, batch=20), width=.125, dropout=.3)

def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])
def of(method, **kw): return SMALL.replace(method=Method(method), **kw)

@pytest.mark.parametrize('method', METHODS)
def test_every_method_trains_for_as_many_steps(method):
    run = of(method)
    row, = run_recipe(run)
    assert row['steps'] == 8
    assert row['epochs'] == 4
    assert row['rounds'] == n_rounds(run)
    assert all(0 <= row[f'{part}_acc'] <= 1 for part in ('train', 'valid', 'test'))

def test_same_recipe_same_bits_whatever_ran_before():
    first = weights(train_run(of('LW')))
    run_recipe(of('WELS', seed=3))
    torch.manual_seed(17)
    torch.rand(5)
    state = torch.get_rng_state()
    assert torch.equal(weights(train_run(of('LW'))), first)
    assert torch.equal(torch.get_rng_state(), state)      # nor is the global generator moved
    assert not torch.equal(weights(train_run(of('LW', seed=1))), first)

CODE = '''
import json, sys
from reinit_nb.core import Recipe
from reinit_nb.path import run_recipe
print(json.dumps([run_recipe(Recipe.from_dict(r)) for r in json.loads(sys.stdin.read())]))'''

def test_same_numbers_in_another_process_and_order():
    recipes = [of('BL', seed=1), of('LW')]
    here = [run_recipe(r) for r in recipes]
    given = json.dumps([r.to_dict() for r in recipes[::-1]])
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='2')
    command = [sys.executable, '-W', 'ignore', '-c', CODE]
    p = subprocess.run(command, input=given, text=True, capture_output=True, env=env)
    assert json.loads(p.stdout.splitlines()[-1])[::-1] == here, p.stderr

def test_sweep_in_processes_gives_the_same_and_a_second_one_trains_nothing(tmp_path):
    recipes = [of(m, seed=s) for m in ('BL', 'FC') for s in (0, 1)]
    first = run_sweep(recipes, Store(tmp_path), PATH, show=False, workers=2)
    assert first.test_loss.tolist() == [run_recipe(r)[0]['test_loss'] for r in recipes]
    def never(portion): raise AssertionError
    again = run_sweep(recipes, Store(tmp_path), Engine(PATH.plan, never, processes=True), show=False, workers=2)
    pd.testing.assert_frame_equal(again, first)
    assert not list(tmp_path.glob('.checkpoints/*'))

def test_a_failure_is_named_and_the_others_are_kept(tmp_path):
    bad = SMALL.replace(learn=SMALL.learn.replace(lr=1e30))
    good = [of('BL', seed=s) for s in (0, 1)]
    with pytest.raises(ReinitError, match=r'(?s)diverged.*in the run of Run\(.*lr=1e\+30'):
        run_sweep([*good, bad], Store(tmp_path), PATH, show=False, workers=1)
    assert all(r in Store(tmp_path) for r in good)
    assert bad not in Store(tmp_path)

@pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw'])
def test_baseline_is_plain_fastai_to_the_last_bit(opt):
    from fastai.callback.progress import ProgressCallback
    from fastai.learner import Learner
    from fastai.optimizer import SGD, Adam
    run = SMALL.replace(dropout=0., learn=SMALL.learn.replace(opt=opt, wd=.01))
    def opt_func(params, lr): return (SGD if opt == 'sgd' else Adam)(params, lr, mom=.9, decouple_wd=opt == 'adamw')
    plain = Learner(image_dls(run.task, run.seed, bs=20), stage_model(run), opt_func=opt_func, wd=.01, wd_bn_bias=True)
    plain.remove_cb(ProgressCallback)
    with plain.no_logging(): plain.fit(4, .02)
    assert torch.equal(weights(plain), weights(train_run(run)))

def test_methods_of_a_seed_share_initial_weights_and_all_batches():
    class Spy(Callback):
        order = -10
        def before_fit(self): self.first, self.seen = weights(self.learn), []
        def before_batch(self):
            if self.training: self.seen += [self.xb[0].clone(), self.yb[0].clone()]
    def spy(run):
        cb = Spy()
        train_run(run, cbs=[cb])
        return cb.first, *cb.seen
    base = spy(of('BL'))
    for m in ('LW', 'DSD', 'RIFLE', 'shrink'):
        assert all(torch.equal(a, b) for a, b in zip(spy(of(m)), base, strict=True))
    assert not torch.equal(spy(of('BL', seed=1))[0], base[0])

def test_learning_rate_falls_by_decay_with_every_epoch():
    how = Learn(lr=1., decay=.5, epochs=8)
    assert [lr_at(how, e / 8) for e in (0, 1, 3)] == pytest.approx([1, .5, .125])
    learn = train_run(of('LW', learn=SMALL.learn.replace(decay=.5)))      # four rounds of an epoch, two batches each
    assert learn.recorder.lrs == pytest.approx([.02, .02 * .5**.5] * 4)

def test_measure_counts_without_augmentation_and_changes_nothing():
    learn = train_run(of('BL'))
    before = weights(learn)
    measured = measure_learner(learn)
    assert measure_learner(learn) == measured
    assert torch.equal(weights(learn), before)
    assert learn.model.training in (True, False)
    loss, acc = learn.validate(ds_idx=2)
    assert measured['test_acc'] == pytest.approx(acc)
    assert measured['test_loss'] == pytest.approx(loss, rel=1e-4)

def test_train_path_of_a_run_records_what_the_run_measures():
    done = train_path(of('LW'))
    learn = train_run(of('LW'))
    assert torch.equal(weights(done.learn), weights(learn))
    assert done.records == [measure_learner(learn)]
    assert done.curves.epoch.tolist() == [1, 2, 3, 4]

@pytest.mark.parametrize('wrong, said', [
    (lambda: Method('LW', frac=.2), 'LW has no frac'),
    (lambda: Method('KELS', scope='global'), 'KELS has no scope'),
    (lambda: Method('RIFEL'), "'RIFLE'"),
    (lambda: Method('BL', n_iter=2), 'BL has no n_iter; it has no options'),
    (lambda: Learn(opt='SGD'), "did you mean 'sgd'"),
    (lambda: Learn(momentum=1.), 'momentum=1'),
    (lambda: Learn(schedule='cos'), 'schedule'),
    (lambda: Run('resnet'), "did you mean 'resnet"),
    (lambda: Run(norm='group'), 'norm'),
    (lambda: train_run(of('LW', learn=Learn(epochs=3))), 'LW: 3 epochs cannot be shared among 4 rounds'),
    (lambda: train_run(SMALL.replace(method=Method('LW', blocks=9))), 'blocks=9')])
def test_wrong_input(wrong, said):
    with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)

def test_recipes_survive_json_and_say_all_they_mean():
    run = SMALL.replace(method=Method('LW', blocks=('block1', 'block2'), init='xavier'))
    assert Recipe.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert run.norm == 'layer'
    assert Method('DenseSparseDense').frac == .3
    assert Method('DSD').frac == .2
    assert Method('FC').frac is None
    assert make_optimizer(Learn(opt='adamw')).keywords['decouple_wd']

@pytest.mark.parametrize('seconds', [0, 99])      # with the latter there is no file to resume from
def test_an_interrupted_run_resumes_bit_by_bit(tmp_path, seconds):
    class Stop(Callback):
        def before_batch(self):
            if self.training and (self.epoch, self.iter) == (2, 1): raise KeyboardInterrupt
    file = tmp_path / 'run.pth'
    with pytest.raises(KeyboardInterrupt): train_run(of('LW'), TimedCheckpoint(file, seconds), cbs=[Stop()])
    assert file.exists() == (seconds == 0)
    again = train_run(of('LW'), TimedCheckpoint(file, seconds))
    whole = train_run(of('LW'))
    assert torch.equal(weights(again), weights(whole))
    assert measure_learner(again) == measure_learner(whole)

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
    PathRun,
    Run,
    TimedCheckpoint,
    fastest_precision,
    lr_at,
    make_optimizer,
    match_steps,
    measure_learner,
    n_rounds,
    precision_speeds,
    round_callback,
    run_recipe,
    scaled_decay,
    stage_model,
    train_path,
    train_run,
    training_accuracy,
    training_fit,
)
from reinit_nb.store import Store
from reinit_nb.sweep import PATH, Engine, run_matched, run_sweep
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
    row = {k: v for k, v in done.records[0].items() if not k[-1].isdigit()}   # rounds are recorded as well
    assert row == measure_learner(learn)
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

# ---------------------------------------------------------------- plateaus and convergence

PLATEAU = Learn(lr=.04, batch=20, epochs=40, schedule='plateau', patience=2, factor=.5, min_lr=.01, stop='converged',
                keep='best')
CONVERGING = Run('scnn', Task('digits', n_train=100, valid=.2), PLATEAU, width=.125)

def tensors(batch): return [o.as_subclass(torch.Tensor) for o in batch]

def error(net, dl):
    net.eval()
    with torch.no_grad(): wrong = sum((net(x).argmax(1) != y).sum().item() for x, y in map(tensors, dl))
    net.train()
    return wrong / dl.n

def plain_loop(run):
    "Train one round in plain torch: rates of every epoch, and the weights of the epoch with the lowest error"
    how = run.learn
    data = image_dls(run.task, run.seed, bs=how.batch, device='cpu')
    net = stage_model(run).train()
    opt = torch.optim.SGD(net.parameters(), how.lr, how.momentum, weight_decay=how.wd)
    best, waited, kept, rates = 1e9, 0, None, []
    for _ in range(how.epochs):
        rates.append(opt.param_groups[0]['lr'])
        for x, y in map(tensors, data.train):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        now = error(net, data.valid)
        waited += 1
        if now < best: best, waited, kept = now, 0, {k: v.clone() for k, v in net.state_dict().items()}
        if waited < how.patience: continue
        waited = 0
        lower = opt.param_groups[0]['lr'] * how.factor
        if lower < how.min_lr:
            if how.stop == 'converged': break
        else: opt.param_groups[0]['lr'] = lower
    return rates, kept, net.state_dict()

@pytest.mark.parametrize('stop', ['converged', 'epochs'])
@pytest.mark.parametrize('keep', ['best', 'last'])
def test_plateaus_equal_a_plain_loop(stop, keep):
    run = CONVERGING.replace(learn=PLATEAU.replace(stop=stop, keep=keep))
    rates, best, last = plain_loop(run)
    learn = train_run(run)
    per_epoch = len(learn.dls.train)
    assert learn.recorder.lrs[::per_epoch] == pytest.approx(rates, rel=1e-12)
    assert len(rates) < 40 if stop == 'converged' else len(rates) == 40
    assert len(set(rates)) == 3                                # .04, .02, .01
    expected = best if keep == 'best' else last
    assert any(not torch.equal(best[k], last[k]) for k in best)
    for k, w in learn.model.state_dict().items(): torch.testing.assert_close(w, expected[k], rtol=1e-4, atol=1e-6)
    row, = run_recipe(run)
    assert row['steps'] == row['steps_1'] == len(rates) * per_epoch
    assert row.get('converged') == (1 if stop == 'converged' else None)

def test_every_round_restarts_ends_by_itself_and_begins_with_its_best_weights():
    class Spy(Callback):
        "Weights and accuracies after each epoch, and what the next round meets"
        order = 62   # before the round is ended
        def before_fit(self): self.epochs = []
        def after_epoch(self): self.epochs.append((self.recorder.values[-1][-1], weights(self.learn)))
    run = CONVERGING.replace(method=Method('restart', rounds=3), learn=PLATEAU.replace(epochs=60))
    spy, first = Spy(), {}
    class First(Callback):
        order = 20   # after the method has begun a round
        def before_batch(self):
            step = round_callback(self.learn).step
            if self.training: first.setdefault(step, weights(self.learn))
    learn = train_run(run, cbs=[spy, First()])
    per_epoch, starts = len(learn.dls.train), round_callback(learn).starts
    assert len(starts) == 3
    ends = [*(s // per_epoch for s in starts[1:]), len(spy.epochs)]
    for a, b in zip((0, *ends), ends):
        accuracies = [acc for acc, _ in spy.epochs[a:b]]
        best = spy.epochs[a + int(pd.Series(accuracies).argmax())][1]
        begins = weights(learn) if b == len(spy.epochs) else first[b * per_epoch]
        assert torch.equal(begins, best)
        assert learn.recorder.lrs[a * per_epoch] == .04

def test_rounds_have_a_maximum_of_epochs():
    run = CONVERGING.replace(method=Method('LW'), learn=PLATEAU.replace(epochs=12, min_lr=1e-9))
    row, = run_recipe(run)
    assert [row[f'steps_{r}'] for r in range(1, 5)] == [12] * 4      # three epochs of four batches
    assert (row['steps'], row['converged']) == (48, 0)

def test_the_best_weights_of_fixed_rounds_are_kept_under_any_schedule():
    how = Learn(lr=.04, batch=20, epochs=8, schedule='cosine', keep='best', monitor='loss')
    learn = train_run(CONVERGING.replace(learn=how))
    lowest = min(loss for _, loss, _ in learn.recorder.values)
    assert learn.validate()[0] == pytest.approx(lowest, rel=1e-5)

def test_baseline_of_equal_steps():
    lw = CONVERGING.replace(method=Method('LW'))
    row, = run_recipe(lw)
    for method in (Method('BL'), Method('restart', rounds=4)):
        other = match_steps(lw, row['steps'], method)
        assert (other.learn.stop, other.learn.keep, other.seed) == ('epochs', 'best', lw.seed)
        assert run_recipe(other)[0]['steps'] == row['steps']
    assert sum(row[f'steps_{r}'] for r in range(1, 5)) == row['steps']
    with pytest.raises(ReinitError, match=r'steps=41 is no multiple of the 4 batches'): match_steps(lw, 41)

def test_matched_pairs_in_a_sweep(tmp_path):
    runs = [CONVERGING.replace(method=Method('LW'), seed=s) for s in (0, 1)]
    df = run_matched(runs, [Method('BL'), Method('restart', rounds=4)], Store(tmp_path), show=False, workers=1)
    assert (df.groupby('matched').steps.nunique() == 1).all()
    assert df.groupby('matched')['method.name'].agg(list).tolist() == [['LW', 'BL', 'restart']] * 2
    again = run_matched(runs, [Method('BL'), Method('restart', rounds=4)], Store(tmp_path), show=False, workers=1)
    pd.testing.assert_frame_equal(again, df)

@pytest.mark.parametrize('change', [dict(), dict(precision='bf16', channels_last=True)])
def test_interrupted_in_any_round_and_resumed(tmp_path, change):
    run = CONVERGING.replace(method=Method('LW'), dropout=.3, learn=PLATEAU.replace(epochs=60, **change))
    whole = train_path(run)
    class Stop(Callback):
        def __init__(self, batches): self.left = batches
        def after_step(self):
            self.left -= 1
            if self.left < 0: raise KeyboardInterrupt
    for batches in (3, 18, 21):
        with pytest.raises(KeyboardInterrupt): train_path(run, tmp_path, cbs=[Stop(batches)])
    again = train_path(run, tmp_path)
    assert again.records == whole.records
    assert torch.equal(weights(again.learn), weights(whole.learn))

def test_decay_by_share_of_training_ends_at_the_rate_of_the_paper():
    for epochs in (1, 7, 16, 200):
        how = Learn(lr=.1, epochs=epochs, decay=scaled_decay(.97, 200, epochs))
        for share in (.1, .5, 1.): assert lr_at(how, share) == pytest.approx(.1 * .97**(200 * share))
    with pytest.raises(ReinitError, match='paper_epochs=0'): scaled_decay(.97, 0, 10)

# ---------------------------------------------------------------- fit, precision, wrong input

def test_training_accuracy_of_every_round_is_that_of_its_last_weights():
    found = []
    class Spy(Callback):
        order = 64.5
        def after_epoch(self): found.append(training_accuracy(self.learn))
    done = train_path(of('LW', learn=SMALL.learn.replace(epochs=8)), cbs=[Spy()])
    row = done.records[0]
    assert [row[f'train_acc_{r}'] for r in range(1, 5)] == found[1::2]
    assert row['train_acc_4'] == row['train_acc']
    assert 'train_acc_1' not in run_recipe(of('BL'))[0]

def test_training_fit_looks_at_every_arm_round_and_setting_but_averages_seeds():
    df = pd.DataFrame([
        dict(data='a', method='BL', seed=0, train_acc=1.), dict(data='a', method='BL', seed=1, train_acc=.98),
        dict(data='a', method='LW', seed=0, train_acc=.5, train_acc_1=1., train_acc_2=.995),
        dict(data='a', method='LW', seed=1, train_acc=.5, train_acc_1=1., train_acc_2=.995),
        dict(data='b', method='BL', seed=0, train_acc=1.),
        dict(data='b', method='LW', seed=0, train_acc=1., train_acc_1=.9, train_acc_2=1.)])
    found = training_fit(df, 'method', ['data'])
    assert found.to_dict('records') == [dict(data='a', method='BL', train_acc=.99, fits=True),
                                        dict(data='b', method='LW', train_acc=.9, fits=False)]
    assert training_fit(df, 'method').fits.tolist() == [False]
    assert training_fit(df, 'method', ['data'], at=.9).fits.all()
    for by in ((), ['data']): assert list(training_fit(df[:0], 'method', by)) == [*by, 'method', 'train_acc', 'fits']
    with pytest.raises(ReinitError, match='arm'): training_fit(df, 'arm')

@pytest.mark.parametrize('change', [dict(precision='bf16'), dict(channels_last=True),
                                    dict(precision='bf16', channels_last=True)])
@pytest.mark.parametrize('name', ['scnn', 'resnet18', 'mobilenet', 'allcnn'])
def test_other_precisions_differ_by_rounding_only_at_the_start(name, change):
    run = Run(name, Task('digits', n_train=60, size=16), Learn(lr=.01, batch=20, epochs=1), width=.125)
    class LossSpy(Callback):
        def before_fit(self): self.found = []
        def after_loss(self):
            if self.training: self.found.append(self.loss.item())
    plain, other = LossSpy(), LossSpy()
    train_run(run, cbs=[plain])
    learn = train_run(run.replace(learn=run.learn.replace(**change)), cbs=[other])
    assert other.found[0] == pytest.approx(plain.found[0], rel=.02 if 'precision' in change else 1e-4)
    if 'precision' in change: assert other.found != plain.found
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled('cpu')

def test_autocast_ends_after_an_error_in_the_network():
    class Broken(Callback):
        order = 20
        def before_batch(self): raise KeyboardInterrupt
    run = SMALL.replace(learn=SMALL.learn.replace(precision='bf16'))
    with pytest.raises(KeyboardInterrupt): train_run(run, cbs=[Broken()])
    assert not torch.is_autocast_enabled('cpu')

def test_speeds_of_all_precisions():
    speeds = precision_speeds(SMALL, steps=1, repeats=2)
    assert len(speeds) == 4
    assert (speeds.steps_per_second > 0).all()
    assert speeds.ratio[0] == 1
    SMALL.learn.replace(**fastest_precision(SMALL, steps=1, repeats=1))
    with pytest.raises(ReinitError, match='repeats=0'): precision_speeds(SMALL, repeats=0)

@pytest.mark.parametrize('wrong, told', [
    (dict(schedule='plateau'), 'patience=None'),
    (dict(schedule='plateau', patience=3, factor=1.), 'factor=1'),
    (dict(schedule='plateau', patience=3, factor=0.), 'factor=0'),
    (dict(schedule='plateau', patience=3, min_lr=1.), 'min_lr=1 is above lr'),
    (dict(schedule='plateau', patience=3, decay=.9), 'decay=0.9'),
    (dict(schedule='plateau', patience=3, stop='convergd'), "did you mean 'converged'"),
    (dict(stop='converged'), "stop='converged' is for schedule='plateau'"),
    (dict(factor=.1), 'factor=0.1 is for'),
    (dict(keep='bst'), 'keep'), (dict(monitor='accuracy'), 'monitor'), (dict(precision='fp8'), 'precision')])
def test_wrong_fields_of_learn_are_named(wrong, told):
    with pytest.raises(ReinitError, match=told): Learn(**wrong)

def test_plateaus_need_validation_images_and_restarts():
    no_images = CONVERGING.replace(task=CONVERGING.task.replace(valid=0.))
    with pytest.raises(ReinitError, match="patience=2, keep='best' looks at the validation set"): train_run(no_images)
    with pytest.raises(ReinitError, match='restart=False'): CONVERGING.replace(method=Method('LW', restart=False))
    with pytest.raises(ReinitError, match='patience=3: a Run'): Run(learn=Learn(patience=3))
    both = PathRun(path=((CONVERGING.task, PLATEAU),))
    with pytest.raises(ReinitError, match="keep='best' is there twice"): both.replace(keep='best')

def test_a_path_can_converge_in_every_stage():
    stages = ((CONVERGING.task, PLATEAU), (CONVERGING.task, PLATEAU.replace(keep='last')))
    rows = run_recipe(PathRun('scnn', stages, width=.125))
    assert [r['converged'] for r in rows] == [1, 1]
    assert [r['steps'] for r in rows] == [r['steps_1'] for r in rows]
    plain, = run_recipe(CONVERGING)
    assert plain['test_loss'] == rows[0]['test_loss']

def test_recipes_recorded_so_far_keep_their_hashes():
    assert Learn().hash == 'be0a6338988a600d'
    assert Learn().hash != Learn(precision='bf16').hash != Learn(channels_last=True).hash
    assert Recipe.from_dict(CONVERGING.to_dict()) == CONVERGING

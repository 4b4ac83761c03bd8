"Paths of several tasks: what is handed on, interventions, scores, early stopping, wrong input, resuming"
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback
from hypothesis import given, settings
from hypothesis import strategies as st

import reinit_nb.path
from reinit_nb.between import INTERVENTIONS, dirac, sparsify
from reinit_nb.core import Recipe, ReinitError, flatten_recipe
from reinit_nb.init import drawn_weights
from reinit_nb.models import model
from reinit_nb.path import (
    Before,
    FinishedStages,
    Learn,
    PathFolder,
    PathProgress,
    PathRun,
    Run,
    Stage,
    check_path,
    classifier_name,
    fisher_pairs,
    fisher_score,
    imagenet_start,
    measure_learner,
    missing_inputs,
    penultimate_features,
    plan_paths,
    plot_path,
    run_recipe,
    stage_model,
    train_path,
    train_run,
    transfer_weights,
)
from reinit_nb.store import Store
from reinit_nb.sweep import PATH, run_sweep
from reinit_nb.vision import Task, image_dls

ROOT = Path(__file__).resolve().parents[1]
DIGITS, HOW = Task('digits', n_train=80), Learn(lr=.05, wd=.01, batch=24, epochs=2)
TWO = PathRun('resnet18', ((DIGITS.replace(blur=.25), HOW), (DIGITS, HOW)), width=.0625)
CHANGING = [name for name in INTERVENTIONS if name != 'none']

def weights(net): return torch.cat([p.detach().flatten() for p in net.parameters()])

def with_before(before, run=TWO):
    first, (task, how) = run.path
    return run.replace(path=(first, (task, how.replace(before=before))))

# ---------------------------------------------------------------- resuming

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
def test_killed_and_resumed_equals_never_killed():
    cases = Path(__file__).with_name('path_cases.py')
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(cases)]
    r = subprocess.run(command, cwd=cases.parent, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-6000:] + r.stderr[-2000:]
    assert int(re.search(r'(\d+) passed', r.stdout)[1]) >= 3, r.stdout[-1000:]
    assert 'skipped' not in r.stdout, r.stdout[-1000:]

def test_first_stages_are_shared_and_change_nothing(tmp_path, monkeypatch):
    trained = []
    plain = Stage.fit
    def fit(self, *args, **kw):
        trained.append(self.index)
        return plain(self, *args, **kw)
    runs = TWO, with_before(Before('FC')), with_before(Before('fresh'))
    monkeypatch.setattr(Stage, 'fit', fit)
    shared = [train_path(r, tmp_path) for r in runs]
    monkeypatch.undo()
    assert trained == [0, 1, 1, 1]
    for run, done in zip(runs, shared):
        alone = train_path(run)
        pd.testing.assert_frame_equal(alone.rows, done.rows)
        pd.testing.assert_frame_equal(alone.curves, done.curves)
        assert torch.equal(weights(alone.learn.model), weights(done.learn.model))

def test_a_file_of_another_recipe_is_refused(tmp_path):
    train_path(TWO, tmp_path)
    other = TWO.replace(width=.125)
    file = PathFolder(tmp_path, other).file(0, 'stage')
    PathFolder(tmp_path, TWO).file(0, 'stage').rename(file)
    with pytest.raises(ReinitError, match='another run: width is 0.0625 there and 0.125 here'):
        train_path(other, tmp_path)
    file.write_bytes(b'no')
    with pytest.raises(ReinitError, match='damaged'): train_path(other, tmp_path)

def test_a_checkpoint_within_a_stage_of_another_recipe_is_refused(tmp_path):
    class Stop(Callback):
        def before_batch(self):
            if self.training and self.epoch == 1: raise KeyboardInterrupt
    one = TWO.upto(1)
    with pytest.raises(KeyboardInterrupt): train_path(one, tmp_path, cbs=[Stop()])
    other = one.replace(keep='best')
    PathFolder(tmp_path, one).file(0, 'pth').rename(PathFolder(tmp_path, other).file(0, 'pth'))
    with pytest.raises(ReinitError, match=r'another run: StageCallback\(keep\) is last there and best here'):
        train_path(other, tmp_path)

def test_time_left_counts_the_epochs_of_this_session():
    n = [how.epochs for _, how in TWO.path]
    progress = PathProgress(TWO, FinishedStages(n=1))      # the first stage was finished before
    progress(1, 0)
    progress(1, n[1], .5, n[1] - 1)       # and so were all epochs of the second but the last
    assert progress.done == 1
    assert sum(n) - progress.earlier == 1

# ---------------------------------------------------------------- paths and runs

def test_one_stage_is_a_run():
    run = train_run(Run('resnet18', DIGITS, HOW, width=.0625, dropout=.3))
    path = train_path(PathRun('resnet18', ((DIGITS, HOW),), width=.0625, dropout=.3))
    assert torch.equal(weights(run.model), weights(path.learn.model))
    measured = measure_learner(run)
    assert all(path.rows[k][0] == measured[k] for k in measured if k != 'rounds')

def test_two_stages_by_hand():
    "The second stage is plain fastai, from the weights of the first"
    from fastai.callback.progress import ProgressCallback
    from fastai.learner import Learner
    from fastai.optimizer import SGD
    run = with_before(Before('dirac', s=.3, one_d='one'))
    net = train_path(run.upto(1)).learn.model
    before = weights(net).clone()
    for p in net.parameters(): p.data = torch.ones_like(p) if p.ndim == 1 else p.data + .3 * dirac(p.shape)
    loaders = image_dls(DIGITS, 0, bs=24, device='cpu')
    loaders.train.epoch = 2      # the order continues
    opt_func = partial(SGD, mom=.9, decouple_wd=False)
    plain = Learner(loaders, net, opt_func=opt_func, wd=.01, wd_bn_bias=True).remove_cb(ProgressCallback)
    with plain.no_logging(): plain.fit(2, .05)
    assert torch.equal(weights(plain.model), weights(train_path(run).learn.model))
    assert not torch.equal(weights(plain.model), before)

def test_rows_say_what_happened():
    second = DIGITS.replace(classes=4, size=16, channels=3), HOW.replace(epochs=3, before=Before('LW'))
    run = PathRun('resnet18', ((DIGITS, HOW), second), width=.0625)
    t = train_path(run).rows
    assert t.stage.tolist() == [1, 2]
    assert t.classes.tolist() == [10, 4]
    assert t.pixels.tolist() == [8, 16]
    assert t.channels.tolist() == [1, 3]
    assert t.epochs.tolist() == [2, 3]
    assert (t.steps == t.epochs * (t.images // 24)).all()
    assert t.intervention.tolist() == ['none', 'LW']
    assert (t.filters > 0).all() and (t.frozen <= t.filters).all()
    assert np.isfinite(t.fisher).all()
    assert not t.stopped.any()
    assert not set(t.columns) & set(flatten_recipe(run))

def test_validation_images_are_the_same_in_all_stages():
    from reinit_nb.core import Streams
    from reinit_nb.vision import task_images
    (a, va, _), (b, vb, _) = (task_images(DIGITS.replace(n_train=n), Streams(3)) for n in (.1, None))
    assert set(a.idx) <= set(b.idx)
    assert set(va.idx) <= set(vb.idx)
    assert not set(a.idx) & set(vb.idx)

CODE = '''
import json, sys
from reinit_nb.core import Recipe
from reinit_nb.path import run_recipe
print(json.dumps(run_recipe(Recipe.from_dict(json.loads(sys.stdin.read())))))'''

def test_numbers_do_not_depend_on_the_process():
    run = with_before(Before('shrink'), TWO.replace(dropout=.2))
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='2')
    p = subprocess.run([sys.executable, '-W', 'ignore', '-c', CODE], input=json.dumps(run.to_dict()), text=True,
                       capture_output=True, env=env)
    assert json.loads(p.stdout.splitlines()[-1]) == run_recipe(run), p.stderr

def test_training_leaves_the_generators_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train_path(TWO)
    assert torch.equal(torch.get_rng_state(), before)

# ---------------------------------------------------------------- early stopping

@pytest.mark.parametrize('keep', ['last', 'best'])
def test_stops_after_patience_epochs_and_keeps_what_it_should(keep):
    how = Learn(lr=.05, epochs=20, patience=3, batch=24)
    task = DIGITS.replace(random_labels=.6)
    run = PathRun('resnet18', ((task, how),), width=.0625, keep=keep)
    done = train_path(run)
    row, curves = done.rows.iloc[0], done.curves
    assert row.stopped
    assert row.epochs == row.best_epoch + 3 == len(curves)
    assert row.best_epoch == curves.valid_loss.idxmin() + 1
    expected = curves.valid_loss.min() if keep == 'best' else curves.valid_loss.iloc[-1]
    assert row.valid_loss == pytest.approx(expected, rel=1e-4)
    # up to there, it is the same as without patience
    full = train_path(run.replace(path=((task, how.replace(patience=None)),)))
    pd.testing.assert_frame_equal(full.curves[:len(curves)], curves)
    assert full.rows.epochs[0] == 20
    assert not full.rows.stopped[0]

# ---------------------------------------------------------------- what is handed on

@settings(deadline=None, max_examples=15)
@given(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.integers(2, 6), st.integers(2, 6),
       st.sampled_from(['resnet18', 'allcnn']))
def test_transfer_keeps_the_function_of_gray_images(c1, c2, n1, n2, name):
    a = model(name, c_in=c1, n_out=n1, size=16, width=.05, seed=0)
    b = model(name, c_in=c2, n_out=n2, size=16, width=.05, seed=1)
    def head(net): return net.state_dict()[classifier_name(net) + '.weight']
    drawn_head = head(b).clone()
    transfer_weights(a.state_dict(), b)
    x = torch.rand(2, 1, 16, 16)
    def features(net, c): return net.eval()[:-1](x.expand(-1, c, -1, -1))
    torch.testing.assert_close(features(a, c1), features(b, c2), rtol=1e-3, atol=1e-4)
    assert torch.equal(head(b), head(a) if n1 == n2 else drawn_head)

def test_weights_of_any_model_can_be_transferred():
    from torchvision.models import mobilenet_v2
    a, b = mobilenet_v2(num_classes=3), mobilenet_v2(num_classes=7)
    transfer_weights(a.state_dict(), b)
    assert torch.equal(a.features[0][0].weight, b.features[0][0].weight)
    assert classifier_name(b) == 'classifier.1'
    assert b.classifier[1].out_features == 7

# ---------------------------------------------------------------- interventions

@pytest.mark.parametrize('name', CHANGING)
def test_interventions_are_reproducible_and_leave_a_network_that_trains(name):
    a, b = (Before(name).apply(stage_model(TWO), 3) for _ in range(2))
    assert torch.equal(weights(a), weights(b))
    assert torch.isfinite(weights(a)).all()
    assert not torch.equal(weights(a), weights(stage_model(TWO)))
    t = train_path(with_before(Before(name))).rows
    assert np.isfinite(t.test_loss).all()
    assert t.intervention[1] == name

def test_interventions_by_hand():
    old = dict(stage_model(TWO).named_parameters())
    ws = drawn_weights(stage_model(TWO))
    def after(before, seed=0): return before.apply(stage_model(TWO), seed)
    for n, p in after(Before('dirac', s=.7, one_d='add')).named_parameters():
        torch.testing.assert_close(p, old[n] + .7 * dirac(p.shape) if n in ws else old[n] + .7)
    for n, p in after(Before('FC')).named_parameters():
        assert n.startswith('head') or torch.equal(p, old[n])
    llf = drawn_weights(after(Before('LLF', layer='block6')))
    assert {n.partition('.')[0] for n, p in llf.items() if torch.equal(p, ws[n])} == {f'block{i}' for i in range(1, 6)}
    lw = drawn_weights(after(Before('LW', k=3)))
    def likeness(n): return torch.cosine_similarity(lw[n].flatten(), ws[n].flatten(), 0)
    kept = [n for n in ws if n.startswith(('block1.', 'block2.', 'block3.'))]
    assert all(likeness(n) > .9999 for n in kept)
    assert all(abs(likeness(n)) < .5 for n in set(ws) - set(kept))
    ratio = torch.stack([lw[n].norm() / ws[n].norm() for n in kept])
    assert ((ratio - 1).abs() < .25).all()      # the norm of a fresh draw
    assert not any(torch.equal(p, ws[n]) for n, p in drawn_weights(after(Before('fresh'), 1)).items())

def test_a_fresh_network_forgets_its_statistics():
    net = train_path(TWO.upto(1)).learn.model
    norm = net.block1.stem.norm
    assert norm.running_mean.abs().sum() > 0
    Before('fresh').apply(net)
    assert norm.running_mean.abs().sum() == 0
    assert (norm.running_var == 1).all()

def test_interventions_of_torchvision_models():
    from torchvision.models import resnet18
    for name in CHANGING:
        torch.manual_seed(0)
        net = resnet18(num_classes=5)
        before = weights(net).clone()
        assert not torch.equal(weights(Before(name).apply(net)), before)

def test_frozen_filters_are_counted_before_and_after():
    "Filters that are set to zero are counted, and a Dirac reset brings them back"
    net = stage_model(TWO)
    sparsify(net, 'mutual', .5, 0, x=(2, 1, 8, 8))
    for before, gone in ((None, False), (Before('dirac', s=.2), True), (Before('fresh'), True)):
        counted = Stage(with_before(before), 1, net.state_dict()).before
        assert counted['frozen_before'] > 10
        assert (counted['frozen_after'] == 0) == gone

# ---------------------------------------------------------------- Fisher score

@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100), st.integers(2, 5), st.integers(1, 6))
def test_fisher_is_its_definition(seed, classes, dims):
    rng = np.random.RandomState(seed)
    h, y = rng.randn(30 * classes, dims) + .1 * seed, np.repeat(np.arange(classes), 30)
    h += rng.randn(classes, dims)[y]
    scores = []
    for a, b in itertools.combinations(range(classes), 2):
        w = h[y == b].mean(0) - h[y == a].mean(0)
        s = np.cov(h[y == a].T, bias=True) + np.cov(h[y == b].T, bias=True)
        scores.append((w @ w)**2 / (w @ np.atleast_2d(s) @ w))
    t = fisher_pairs(torch.tensor(h), torch.tensor(y))
    assert fisher_score(torch.tensor(h), torch.tensor(y)) == pytest.approx(np.mean(scores), rel=1e-6)
    torch.testing.assert_close(t.nan_to_num(), t.T.nan_to_num())

@torch.no_grad()
def test_penultimate_features_of_a_convolutional_head():
    net = model('allcnn', c_in=1, size=16, width=.05)
    valid = image_dls(DIGITS.replace(size=16), bs=24, device='cpu').valid
    net.train()
    h, y = penultimate_features(net, valid)
    classifier = net.head.classifier
    assert net.training
    assert h.shape == (len(valid.dataset), classifier.in_channels)
    net.eval()
    computed = h @ classifier.weight.flatten(1).T + classifier.bias
    logits = torch.cat([net(x.as_subclass(torch.Tensor)) for x, _ in valid])
    torch.testing.assert_close(computed, logits, rtol=1e-3, atol=1e-4)

# ---------------------------------------------------------------- recipes

def test_recipes_survive_json_and_old_hashes_hold():
    run = with_before(Before('LLF', layer='block3'), TWO.replace(keep='best'))
    assert Recipe.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert len({TWO.hash, run.hash, run.upto(1).hash}) == 3
    assert Learn().hash == 'be0a6338988a600d'
    assert Learn(patience=3).hash != Learn().hash
    assert not {'patience', 'before'} & set(Learn().to_dict()['fields'])

def test_published_results_keep_their_recipes():
    from reinit_nb.store import load_results
    from reinit_nb.studies.common import flatten_recipes, get_study
    recorded = load_results(ROOT / 'results/reinit_cnn_precision_laptop.csv')
    lists = get_study('reinit_cnn').files['reinit_cnn_precision'].lists('laptop')
    assert {r.hash for recipes in lists.values() for r in flatten_recipes(recipes)} <= set(recorded.recipe)

def test_plan_puts_shared_first_stages_together():
    runs = [TWO, TWO.replace(seed=1), with_before(Before('FC')), TWO.upto(1)]
    assert plan_paths(runs) == [[TWO, with_before(Before('FC')), TWO.upto(1)], [TWO.replace(seed=1)]]

def test_sweep_keeps_one_row_per_stage_and_leaves_out_what_has_no_data(tmp_path):
    none = TWO.replace(path=(*TWO.path, (Task('birds2010', size=8), HOW)))
    with pytest.warns(UserWarning, match='stage 3: no data found'):
        df = run_sweep([TWO, none], Store(tmp_path), PATH, show=False, workers=1)
    assert df.stage.tolist() == [1, 2]
    assert set(df.recipe) == {TWO.hash}
    assert sorted(f.suffix for f in (tmp_path / '.checkpoints').iterdir()) == ['.json', '.stage']

# ---------------------------------------------------------------- wrong input

def two(*tasks): return PathRun('resnet18', tuple((t, HOW) for t in tasks), width=.0625)
def scnn(*tasks): return PathRun('scnn', tuple((t, HOW) for t in tasks), width=.1)

@pytest.mark.parametrize('wrong, said', [
    (lambda: PathRun(path=()), 'path=() is empty'),
    (lambda: PathRun(path=((DIGITS, DIGITS),)), 'PathRun: path='),
    (lambda: PathRun(keep='first'), "keep='first'"),
    (lambda: train_path(two(DIGITS, Task('birds2010'))), "stage 2: no data found for 'birds2010'. Three ways"),
    (lambda: train_path(two(DIGITS, Task('digist'))), "did you mean 'digits'"),
    (lambda: train_path(two(DIGITS.replace(size=96), DIGITS)),
     'stage 2 of 2 (digits): block1.stem.conv.weight has shape (4, 1, 3, 3), and'),
    (lambda: train_path(two(DIGITS, DIGITS.replace(size=4))), 'stage 2 of 2 (digits): size=4 is too small'),
    (lambda: train_path(scnn(DIGITS, DIGITS.replace(size=16))), 'stage 2 of 2 (digits): head.dense.weight has shape'),
    (lambda: train_path(two(DIGITS, DIGITS.replace(n_train=10))), 'leaves no image of class'),
    (lambda: train_path(PathRun(path=((DIGITS.replace(valid=0.), HOW.replace(patience=1)),))), 'that is the test set'),
    (lambda: Learn(epochs=10, patience=10), 'patience=10 is not below epochs=10'),
    (lambda: Learn(patience=0), 'patience=0'),
    (lambda: Before('LW', s=1.), 'LW has no s; it has k'),
    (lambda: Before('drac'), "did you mean 'dirac'"),
    (lambda: Before('shrink', shrink=2.), 'shrink=2'),
    (lambda: train_path(with_before(Before('LW', k=20))), 'LW: k=20'),
    (lambda: train_path(with_before(Before('LLF', layer='nowhere'))), 'nowhere'),
    (lambda: Run(learn=Learn(before=Before())), 'use path.PathRun'),
    (lambda: train_run(TWO), 'this recipe has 2 tasks: use train_path'),
    (lambda: PathRun('scnn', pretrained='imagenet'), 'is a resnet50 of width 1'),
    (lambda: PathRun('resnet50', pretrained='places'), "pretrained='places'"),
    (lambda: train_path(TWO.replace(path=(TWO.path[0], (DIGITS, HOW.replace(lr=1e30))))), 'stage 2: ')])
def test_wrong_input_is_refused_before_training(wrong, said, monkeypatch):
    trained = []
    plain = reinit_nb.path.fit_stage

    def watched(*args, **kwargs):
        trained.append(1)
        return plain(*args, **kwargs)
    monkeypatch.setattr(reinit_nb.path, 'fit_stage', watched)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)
    assert not trained or 'finite' in str(e.value) or 'NaN' in str(e.value)      # divergence is found by training only

def test_missing_weights_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv('REINIT_DATA', str(tmp_path))
    task = DIGITS.replace(channels=3, size=32, normalize='imagenet')
    run = PathRun('resnet50', ((task, HOW),), pretrained='imagenet')
    assert 'resnet50_imagenet.npz' in missing_inputs(run)
    with pytest.raises(ReinitError, match='No pre-trained weights'): check_path(run)

# ---------------------------------------------------------------- the real ResNet-50

@pytest.mark.data
@torch.no_grad()
def test_imagenet_start_computes_what_the_network_computes():
    from reinit_nb.vision import IMAGENET_STATS
    from reinit_nb.zoo import imagenet_input, resnet50_imagenet
    own, ours = resnet50_imagenet().eval(), imagenet_start(3).eval()
    own.fc = ours.fc = torch.nn.Identity()
    x = torch.rand(2, 3, 48, 48)
    mean, std = (torch.tensor(o)[:, None, None] for o in IMAGENET_STATS)
    assert torch.cosine_similarity(own(imagenet_input(x)), ours((x - mean) / std)).min() > .99

@pytest.mark.data
def test_a_path_from_imagenet():
    task = Task('digits', n_train=40, size=32, channels=3, normalize='imagenet')
    first = Learn(lr=.003, epochs=1, batch=18, before=Before('dirac', s=.05, one_d='one'))
    second = Learn(lr=.003, epochs=1, batch=6)
    run = PathRun('resnet50', ((task, first), (task.replace(classes=3), second)), pretrained='imagenet')
    with pytest.raises(ReinitError, match='give the task channels=3'):
        check_path(run.replace(path=((task.replace(channels=1), HOW),)))
    t = train_path(run).rows
    assert t.classes.tolist() == [10, 3]
    assert np.isfinite(t.test_loss).all()
    assert (t.filters > 20000).all()

def test_plot():
    ax = plot_path(train_path(TWO).curves)
    assert len(ax.lines) == 6

"Learning paths: what is handed on between tasks, interventions, scores, early stopping, wrong input, resuming"
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinit_nb.blocks import drawn
from reinit_nb.core import Recipe, ReinitError, Store, flat
from reinit_nb.models import model
from reinit_nb.path import BEFORE, Before, Learn, Run, measure, train
from reinit_nb.reset import dirac
from reinit_nb.sequence import (
    PathRun,
    _file,
    carry,
    check_path,
    classifier,
    fisher_pairs,
    fisher_score,
    follow,
    imagenet_start,
    intervene,
    missing,
    penultimate,
    plan,
    plot_path,
    run_one,
    stage_learner,
    start,
)
from reinit_nb.sweep import Engine
from reinit_nb.sweep import run as sweep
from reinit_nb.vision import Task, dls

DIGITS, HOW = Task('digits', n_train=80), Learn(lr=.05, wd=.01, batch=24, epochs=2)
TWO = PathRun('resnet18', ((DIGITS.replace(blur=.25), HOW), (DIGITS, HOW)), width=.0625)

def weights(net): return torch.cat([p.detach().flatten() for p in net.parameters()])
def with_before(b, run=TWO): return run.replace(path=(run.path[0], (run.path[1][0], run.path[1][1].replace(before=b))))

# ---------------------------------------------------------------- resuming

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
def test_killed_and_resumed_equals_never_killed():
    cases = Path(__file__).with_name('sequence_cases.py')
    r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(cases)], cwd=cases.parent, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-6000:] + r.stderr[-2000:]
    assert int(re.search(r'(\d+) passed', r.stdout)[1]) >= 3 and 'skipped' not in r.stdout, r.stdout[-1000:]

def test_first_stages_are_shared_and_change_nothing(tmp_path):
    seen = []
    import reinit_nb.sequence as seq
    plain = seq._stage
    def stage(run, i, *args): seen.append((run.hash, i)); return plain(run, i, *args)
    seq._stage = stage
    try: shared = [follow(r, tmp_path) for r in (TWO, with_before(Before('FC')), with_before(Before('fresh')))]
    finally: seq._stage = plain
    assert [i for _, i in seen] == [0, 1, 1, 1]
    for r, s in zip((TWO, with_before(Before('FC')), with_before(Before('fresh'))), shared):
        alone = follow(r)
        pd.testing.assert_frame_equal(alone.rows, s.rows)
        pd.testing.assert_frame_equal(alone.curves, s.curves)
        assert torch.equal(weights(alone.learn.model), weights(s.learn.model))

def test_a_file_of_another_recipe_is_refused(tmp_path):
    follow(TWO, tmp_path)
    other = TWO.replace(width=.125)
    _file(tmp_path, TWO, 0, 'stage').rename(_file(tmp_path, other, 0, 'stage'))
    with pytest.raises(ReinitError, match='another run: width is 0.0625 there and 0.125 here'): follow(other, tmp_path)
    _file(tmp_path, other, 0, 'stage').write_bytes(b'no')
    with pytest.raises(ReinitError, match='damaged'): follow(other, tmp_path)

def test_a_checkpoint_within_a_stage_of_another_recipe_is_refused(tmp_path):
    from fastai.callback.core import Callback
    class Stop(Callback):
        def before_batch(self):
            if self.training and self.epoch == 1: raise KeyboardInterrupt
    one = TWO.upto(1)
    with pytest.raises(KeyboardInterrupt): follow(one, tmp_path, cbs=[Stop()])
    other = one.replace(keep='best')
    _file(tmp_path, one, 0, 'pth').rename(_file(tmp_path, other, 0, 'pth'))
    with pytest.raises(ReinitError, match=r'another run: StageCallback\(keep\) is last there and best here'): follow(other, tmp_path)

# ---------------------------------------------------------------- paths and runs

def test_one_stage_is_a_run():
    a = train(Run('resnet18', DIGITS, HOW, width=.0625, dropout=.3))
    b = follow(PathRun('resnet18', ((DIGITS, HOW),), width=.0625, dropout=.3))
    assert torch.equal(weights(a.model), weights(b.learn.model))
    m = measure(a)
    assert all(b.rows[k][0] == m[k] for k in m if k != 'rounds')

def test_two_stages_by_hand():
    "The second stage is plain fastai, from the weights of the first"
    from functools import partial

    from fastai.callback.progress import ProgressCallback
    from fastai.learner import Learner
    from fastai.optimizer import SGD
    run = with_before(Before('dirac', s=.3, one_d='one'))
    first = follow(run.upto(1)).learn.model
    state = {k: v.clone() for k, v in first.state_dict().items()}
    for n, p in first.named_parameters():
        p.data = torch.ones_like(p) if p.ndim == 1 else p.data + .3 * dirac(p.shape)
    loaders = dls(DIGITS, 0, bs=24, device='cpu')
    loaders.train.epoch = 2      # the order goes on
    plain = Learner(loaders, first, opt_func=partial(SGD, mom=.9, decouple_wd=False), wd=.01, wd_bn_bias=True).remove_cb(ProgressCallback)
    with plain.no_logging(): plain.fit(2, .05)
    assert torch.equal(weights(plain.model), weights(follow(run).learn.model))
    assert not torch.equal(torch.cat([v.flatten().float() for v in state.values()]), torch.cat([v.flatten().float() for v in first.state_dict().values()]))

def test_rows_say_what_happened():
    run = PathRun('resnet18', ((DIGITS, HOW), (DIGITS.replace(classes=4, size=16, channels=3), HOW.replace(epochs=3, before=Before('LW')))), width=.0625)
    t = follow(run).rows
    assert t.stage.tolist() == [1, 2] and t.classes.tolist() == [10, 4] and t.pixels.tolist() == [8, 16] and t.channels.tolist() == [1, 3]
    assert t.epochs.tolist() == [2, 3] and (t.steps == t.epochs * (t.images // 24)).all() and t.intervention.tolist() == ['none', 'LW']
    assert (t.filters > 0).all() and (t.frozen <= t.filters).all() and np.isfinite(t.fisher).all() and not t.stopped.any()
    assert not set(t.columns) & set(flat(run))

def test_validation_images_are_the_same_in_all_stages():
    from reinit_nb.core import Streams
    from reinit_nb.vision import make
    parts = [make(t, Streams(3)) for t in (DIGITS.replace(n_train=.1), DIGITS.replace(n_train=None))]
    (a, va, _), (b, vb, _) = parts
    assert set(a.idx) <= set(b.idx) and set(va.idx) <= set(vb.idx) and not set(a.idx) & set(vb.idx)

def test_numbers_do_not_depend_on_the_process(tmp_path):
    code = 'import json,sys\nfrom reinit_nb.core import Recipe\nimport reinit_nb.sequence as s\nprint(json.dumps(s.run_one(Recipe.from_dict(json.loads(sys.stdin.read())))))'
    run = with_before(Before('shrink'), TWO.replace(dropout=.2))
    p = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], input=json.dumps(run.to_dict()), text=True, capture_output=True,
                       env=dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[1]), OMP_NUM_THREADS='2'))
    assert json.loads(p.stdout.splitlines()[-1]) == run_one(run), p.stderr

def test_following_leaves_the_generators_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    follow(TWO)
    assert torch.equal(torch.get_rng_state(), before)

# ---------------------------------------------------------------- early stopping

@pytest.mark.parametrize('keep', ['last', 'best'])
def test_stops_after_patience_epochs_and_keeps_what_it_should(keep):
    how = Learn(lr=.05, epochs=20, patience=3, batch=24)
    run = PathRun('resnet18', ((DIGITS.replace(random_labels=.6), how),), width=.0625, keep=keep)
    done = follow(run)
    row, c = done.rows.iloc[0], done.curves
    assert row.stopped and row.epochs == row.best_epoch + 3 == len(c) and row.best_epoch == c.valid_loss.idxmin() + 1
    assert row.valid_loss == pytest.approx(c.valid_loss.min() if keep == 'best' else c.valid_loss.iloc[-1], rel=1e-4)
    # up to there, it is the same as without patience
    full = follow(run.replace(path=((run.path[0][0], how.replace(patience=None)),)))
    pd.testing.assert_frame_equal(full.curves[:len(c)], c)
    assert full.rows.epochs[0] == 20 and not full.rows.stopped[0]

# ---------------------------------------------------------------- what is handed on

@settings(deadline=None, max_examples=15)
@given(st.sampled_from([1, 3]), st.sampled_from([1, 3]), st.integers(2, 6), st.integers(2, 6), st.sampled_from(['resnet18', 'allcnn']))
def test_carry_keeps_the_function_of_grey_images(c1, c2, n1, n2, name):
    a, b = (model(name, c_in=c, n_out=n, size=16, width=.05, seed=s) for c, n, s in ((c1, n1, 0), (c2, n2, 1)))
    fresh = b.state_dict()[classifier(b) + '.weight'].clone()
    carry(a.state_dict(), b)
    x = torch.rand(2, 1, 16, 16)
    f = lambda net, c: net.eval()[:-1](x.expand(-1, c, -1, -1))
    torch.testing.assert_close(f(a, c1), f(b, c2), rtol=1e-3, atol=1e-4)
    head = b.state_dict()[classifier(b) + '.weight']
    assert torch.equal(head, a.state_dict()[classifier(a) + '.weight'] if n1 == n2 else fresh)

def test_any_model_can_be_carried():
    from torchvision.models import mobilenet_v2
    a, b = mobilenet_v2(num_classes=3), mobilenet_v2(num_classes=7)
    carry(a.state_dict(), b)
    assert torch.equal(a.features[0][0].weight, b.features[0][0].weight) and classifier(b) == 'classifier.1' and b.classifier[1].out_features == 7

# ---------------------------------------------------------------- interventions

@pytest.mark.parametrize('name', BEFORE)
def test_interventions_are_reproducible_and_leave_a_network_that_trains(name):
    a, b = (intervene(start(TWO), Before(name), 3) for _ in range(2))
    assert torch.equal(weights(a), weights(b)) and torch.isfinite(weights(a)).all() and not torch.equal(weights(a), weights(start(TWO)))
    t = follow(with_before(Before(name))).rows
    assert np.isfinite(t.test_loss).all() and t.intervention[1] == name

def test_interventions_by_hand():
    old, ws = start(TWO), drawn(start(TWO))
    d = intervene(start(TWO), Before('dirac', s=.7, one_d='add'))
    for n, p in d.named_parameters():
        q = dict(old.named_parameters())[n]
        torch.testing.assert_close(p, q + .7 * dirac(p.shape) if n in ws else q + .7)
    head = intervene(start(TWO), Before('FC'))
    assert all(torch.equal(p, dict(old.named_parameters())[n]) for n, p in head.named_parameters() if not n.startswith('head'))
    llf = intervene(start(TWO), Before('LLF', layer='block6'))
    same = {n.partition('.')[0] for n, p in drawn(llf).items() if torch.equal(p, ws[n])}
    assert same == {f'block{i}' for i in range(1, 6)}
    lw = intervene(start(TWO), Before('LW', k=3))
    kept = [n for n in ws if n.startswith(('block1.', 'block2.', 'block3.'))]
    for n in kept: assert torch.cosine_similarity(drawn(lw)[n].flatten(), ws[n].flatten(), 0) > .9999
    for n in set(ws) - set(kept): assert abs(torch.cosine_similarity(drawn(lw)[n].flatten(), ws[n].flatten(), 0)) < .5
    ratio = torch.stack([drawn(lw)[n].norm() / ws[n].norm() for n in kept])
    assert ((ratio - 1).abs() < .25).all()      # the norm of a fresh draw
    assert not any(torch.equal(p, ws[n]) for n, p in drawn(intervene(start(TWO), Before('fresh'), 1)).items())

def test_a_fresh_network_forgets_its_statistics():
    net = follow(TWO.upto(1)).learn.model
    assert net.block1.stem.norm.running_mean.abs().sum() > 0
    intervene(net, Before('fresh'))
    assert net.block1.stem.norm.running_mean.abs().sum() == 0 and (net.block1.stem.norm.running_var == 1).all()

def test_interventions_of_torchvision_models():
    from torchvision.models import resnet18
    for name in BEFORE:
        torch.manual_seed(0)
        net = resnet18(num_classes=5)
        before = weights(net).clone()
        assert not torch.equal(weights(intervene(net, Before(name))), before)

def test_frozen_filters_are_counted_before_and_after(monkeypatch):
    "Filters that are set to zero are seen, and a Dirac reset brings them back"
    from reinit_nb.reset import sparsify
    state = start(TWO)
    sparsify(state, 'mutual', .5, 0, x=(2, 1, 8, 8))
    for before, gone in ((None, False), (Before('dirac', s=.2), True), (Before('fresh'), True)):
        _, counted, _ = stage_learner(with_before(before), 1, state.state_dict())
        assert counted['frozen_before'] > 10 and (counted['frozen_after'] == 0) == gone

# ---------------------------------------------------------------- Fisher score

@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100), st.integers(2, 5), st.integers(1, 6))
def test_fisher_is_its_definition(seed, classes, dims):
    rng = np.random.RandomState(seed)
    h, y = rng.randn(30 * classes, dims) + .1 * seed, np.repeat(np.arange(classes), 30)
    h += rng.randn(classes, dims)[y]
    out = []
    for a, b in itertools.combinations(range(classes), 2):
        m1, m2 = h[y == a].mean(0), h[y == b].mean(0)
        w, s = m2 - m1, np.cov(h[y == a].T, bias=True) + np.cov(h[y == b].T, bias=True)
        out.append((w @ (m2 - m1))**2 / (w @ np.atleast_2d(s) @ w))
    t = fisher_pairs(torch.tensor(h), torch.tensor(y))
    assert fisher_score(torch.tensor(h), torch.tensor(y)) == pytest.approx(np.mean(out), rel=1e-6)
    torch.testing.assert_close(t.nan_to_num(), t.T.nan_to_num())

def test_penultimate_features_of_a_convolutional_head():
    net, data = model('allcnn', c_in=1, size=16, width=.05), dls(DIGITS.replace(size=16), bs=24, device='cpu')
    net.train()
    h, y = penultimate(net, data.valid)
    assert net.training and h.shape == (len(data.valid.dataset), net.head.classifier.in_channels)
    with torch.no_grad(): want = net.eval().head.classifier.weight.flatten(1) @ h.T + net.head.classifier.bias[:, None]
    with torch.no_grad(): torch.testing.assert_close(want.T, torch.cat([net(x.as_subclass(torch.Tensor)) for x, _ in data.valid]), rtol=1e-3, atol=1e-4)

# ---------------------------------------------------------------- recipes

def test_recipes_survive_json_and_old_hashes_hold():
    run = with_before(Before('LLF', layer='block3'), TWO.replace(keep='best'))
    assert Recipe.from_dict(json.loads(json.dumps(run.to_dict()))) == run and len({TWO.hash, run.hash, run.upto(1).hash}) == 3
    assert Learn().hash == 'be0a6338988a600d' and Learn(patience=3).hash != Learn().hash
    assert 'patience' not in Learn().to_dict()['fields'] and 'before' not in Learn().to_dict()['fields']

def test_published_results_keep_their_recipes():
    from reinit_nb.cnn import grid
    from reinit_nb.core import load_results
    df = load_results(Path(__file__).parent.parent / 'results/reinit_cnn_laptop.csv')
    assert {r.hash for r in grid('laptop')} <= set(df.recipe)

def test_plan_puts_shared_first_stages_together():
    runs = [TWO, TWO.replace(seed=1), with_before(Before('FC')), TWO.upto(1)]
    assert plan(runs) == [[TWO, with_before(Before('FC'))], [TWO.replace(seed=1)], [TWO.upto(1)]] or len(plan(runs)) == 2

def test_sweep_keeps_one_row_per_stage_and_leaves_out_what_has_no_data(tmp_path):
    engine = Engine(plan, __import__('reinit_nb.sequence', fromlist=['run']).run, processes=True, resumes=True, missing=missing)
    none = TWO.replace(path=(*TWO.path, (Task('birds2010', size=8), HOW)))
    with pytest.warns(UserWarning, match='stage 3: no data found'): df = sweep([TWO, none], Store(tmp_path), engine, show=False, workers=1)
    assert df.stage.tolist() == [1, 2] and set(df.recipe) == {TWO.hash}

# ---------------------------------------------------------------- wrong input

def two(*tasks, **kw): return PathRun('resnet18', tuple((t, HOW) for t in tasks), width=.0625).replace(**kw)

@pytest.mark.parametrize('wrong, said', [
    (lambda: PathRun(path=()), 'path=() is empty'), (lambda: PathRun(path=((DIGITS, DIGITS),)), 'PathRun: path='), (lambda: PathRun(keep='first'), "keep='first'"),
    (lambda: follow(two(DIGITS, Task('birds2010'))), "stage 2: no data found for 'birds2010'. Three ways"),
    (lambda: follow(two(DIGITS, Task('digist'))), "did you mean 'digits'"),
    (lambda: follow(two(DIGITS.replace(size=96), DIGITS)), 'stage 2 of 2 (digits): block1.stem.conv.weight has shape (4, 1, 3, 3), and'),
    (lambda: follow(two(DIGITS, DIGITS.replace(size=4))), 'stage 2 of 2 (digits): size=4 is too small'),
    (lambda: follow(PathRun('scnn', ((DIGITS, HOW), (DIGITS.replace(size=16), HOW)), width=.1)), 'stage 2 of 2 (digits): head.dense.weight has shape'),
    (lambda: follow(two(DIGITS, DIGITS.replace(n_train=10))), 'leaves no image of class'),
    (lambda: follow(PathRun(path=((DIGITS.replace(valid=0.), HOW.replace(patience=1)),))), 'that is the test set'),
    (lambda: Learn(epochs=10, patience=10), 'patience=10 is not below epochs=10'), (lambda: Learn(patience=0), 'patience=0'),
    (lambda: Before('LW', s=1.), 'LW has no s; it has k'), (lambda: Before('drac'), "did you mean 'dirac'"), (lambda: Before('shrink', shrink=2.), 'shrink=2'),
    (lambda: follow(with_before(Before('LW', k=20))), 'LW: k=20'), (lambda: follow(with_before(Before('LLF', layer='nowhere'))), 'nowhere'),
    (lambda: Run(learn=Learn(before=Before())), 'use sequence.PathRun'), (lambda: PathRun('scnn', pretrained='imagenet'), 'is a resnet50 of width 1'),
    (lambda: PathRun('resnet50', pretrained='places'), "pretrained='places'"),
    (lambda: follow(TWO.replace(path=(TWO.path[0], (DIGITS, HOW.replace(lr=1e30))))), 'stage 2: ')])
def test_wrong_input_is_said_before_training(wrong, said, monkeypatch):
    import reinit_nb.sequence as seq
    trained = []
    plain = seq.fit
    monkeypatch.setattr(seq, 'fit', lambda *a, **k: (trained.append(1), plain(*a, **k)))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)
    assert not trained or 'finite' in str(e.value) or 'NaN' in str(e.value)      # a learning rate of 1e30 is found out by training only

def test_missing_weights_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv('REINIT_DATA', str(tmp_path))
    run = PathRun('resnet50', ((DIGITS.replace(channels=3, size=32, normalize='imagenet'), HOW),), pretrained='imagenet')
    assert 'resnet50_imagenet.npz' in missing(run)
    with pytest.raises(ReinitError, match='No pre-trained weights'): check_path(run)

# ---------------------------------------------------------------- the real ResNet-50

@pytest.mark.data
def test_imagenet_start_sees_what_the_network_sees():
    from reinit_nb.models import imagenet_input, resnet50_imagenet
    from reinit_nb.vision import IMAGENET_STATS
    own, ours = resnet50_imagenet().eval(), imagenet_start(3).eval()
    own.fc = ours.fc = torch.nn.Identity()
    x = torch.rand(2, 3, 48, 48)
    mean, std = (torch.tensor(o)[:, None, None] for o in IMAGENET_STATS)
    with torch.no_grad(): assert torch.cosine_similarity(own(imagenet_input(x)), ours((x - mean) / std)).min() > .99

@pytest.mark.data
def test_a_path_from_imagenet():
    task = Task('digits', n_train=40, size=32, channels=3, normalize='imagenet')
    run = PathRun('resnet50', ((task, Learn(lr=.003, epochs=1, batch=18, before=Before('dirac', s=.05, one_d='one'))), (task.replace(classes=3), Learn(lr=.003, epochs=1, batch=6))), pretrained='imagenet')
    with pytest.raises(ReinitError, match='give the task channels=3'): check_path(run.replace(path=((task.replace(channels=1), HOW),)))
    t = follow(run).rows
    assert t.classes.tolist() == [10, 3] and np.isfinite(t.test_loss).all() and (t.filters > 20000).all()

def test_plot():
    ax = plot_path(follow(TWO).curves)
    assert len(ax.lines) == 6

def test_time_left_counts_the_epochs_of_this_session():
    from reinit_nb.sequence import _Tick
    run = TWO
    n = [h.epochs for _, h in run.path]
    tick = _Tick(run, False, None, 1, [], [])      # the first stage was there already
    tick(1, 0)
    tick.at(1)(n[1], .5, n[1] - 1)       # and so were all epochs of the second but the last
    assert tick.done == 1 and sum(n) - tick.base == 1

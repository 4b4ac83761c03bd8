"Comparisons: paired, compute-matched, refused where they would be unfair"
import random
import threading
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import MixUp
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy, error_rate
from fastai.optimizer import SGD
from scipy import stats as sps
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

import reinit_nb.path
from reinit_nb.compare import Comparison, compare, comparison_runs, differences_to
from reinit_nb.core import ReinitError
from reinit_nb.fc import LLFCallback
from reinit_nb.lw import LayerwiseCallback
from reinit_nb.path import Learn, Method, Run, run_recipe
from reinit_nb.stats import holm, power_of, seeds_needed, sign_test, wilcoxon
from reinit_nb.store import Store
from reinit_nb.vision import Task, image_dls

BASE = Run('scnn', Task('digits', n_train=60), Learn(lr=.02, epochs=4, batch=20), width=.125)
ARMS = ['BL', 'LW', 'restart', 'rescale', 'shrink']

@pytest.fixture(scope='module')
def store(tmp_path_factory): return Store(tmp_path_factory.mktemp('runs'))

@pytest.fixture(scope='module')
def result(store): return compare(BASE, seeds=2, store=store, show=False, workers=1)

@pytest.fixture
def nothing_is_run(monkeypatch):
    monkeypatch.setattr(reinit_nb.path, 'run_recipe', lambda *a, **kw: pytest.fail('was run'))

def toy(**methods):
    rows = [dict(method=m, seed=s, test_acc=v, test_loss=1 - v, steps=100)
            for m, values in methods.items() for s, v in enumerate(values)]
    return Comparison(rows)

def test_every_method_comes_with_baseline_and_controls(result):
    assert list(result.method) == ARMS * 2
    assert list(result.seed) == [0] * 5 + [1] * 5
    assert result.steps.nunique() == result.epochs.nunique() == 1
    assert set(result.rounds) == {1, 4}
    assert isinstance(result, Comparison)
    assert isinstance(result[result.seed == 0], Comparison)

def test_rows_are_those_of_the_runs(result):
    run = BASE.replace(method=Method('LW'), seed=1)
    row = result[result.recipe == run.hash].iloc[0]
    measured = run_recipe(run)[0]
    for k in ('test_acc', 'test_loss', 'steps'): assert row[k] == measured[k]

def test_what_is_stored_is_not_trained_again(result, store, nothing_is_run):
    again = compare(BASE, seeds=2, store=store, show=False, workers=1)
    pd.testing.assert_frame_equal(again, result)
    other = BASE.replace(seed=7, method=Method('FC'))   # method and seed of the recipe do not matter
    fewer = compare(other, 'LW', seeds=(1,), controls=False, store=store, show=False)
    assert list(fewer.method) == ['BL', 'LW']
    assert set(fewer.seed) == {1}

def test_results_file(result, tmp_path, monkeypatch, nothing_is_run):
    from reinit_nb.store import save_results
    monkeypatch.setenv('REINIT_SCALE', 'laptop')
    again = compare(BASE, seeds=2, results=save_results(result, tmp_path / 'r.csv'), show=False)
    assert list(again.method) == list(result.method)
    assert np.allclose(again.test_acc, result.test_acc, atol=1e-5)

def test_too_few_epochs_are_refused_before_any_training(nothing_is_run):
    short = BASE.replace(learn=Learn(epochs=3))
    with pytest.raises(ReinitError, match='LW: 3 epochs cannot be shared among 4 rounds'): compare(short)
    with pytest.raises(ReinitError, match='8 rounds'): compare(BASE, ('BL', Method('LW', n_iter=2)))

def test_controls_have_the_rounds_of_the_method():
    longer = BASE.replace(learn=Learn(epochs=8))
    methods = {r.method.name: r.method for r in comparison_runs(longer, Method('LW', n_iter=2), 1)}
    assert all(methods[c].n_iter == 2 for c in ('restart', 'rescale', 'shrink'))
    assert methods['BL'] == Method('BL')

@pytest.mark.parametrize('wrong, said', [
    (lambda: compare(BASE, 'LWS'), 'did you mean'),
    (lambda: compare(BASE, seeds=0), 'seeds=0'),
    (lambda: compare(BASE, seeds=()), 'at least one'),
    (lambda: compare(BASE, seeds=(1, 1)), 'different'),
    (lambda: compare('LW'), 'path.Run'),
    (lambda: compare(BASE, name='mine'), 'a recipe decides'),
    (lambda: compare(BASE, epochs=3), 'LW: 3 epochs'),
    (lambda: toy(BL=[.1]).summary(against='B'), "against='B'"),
    (lambda: toy(BL=[.1, .2], LW=[.3]).summary(), 'LW and BL cannot be paired by seed'),
    (lambda: Comparison(pd.concat([toy(BL=[.1], LW=[.3])] * 2)).summary(), 'LW and BL cannot be paired by seed'),
    (lambda: toy(BL=[.1]).summary('valid_acc'), "'valid_acc'")])
def test_wrong_input(wrong, said):
    with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)

def test_unequal_steps_are_refused(result):
    cheat = result.assign(steps=result.steps.where(result.method != 'BL', 4))
    for f in (cheat.summary, cheat.plot):
        with pytest.raises(ReinitError, match='BL 4; LW 8'): f()

def test_summary_by_hand():
    rng = np.random.default_rng(0)
    bl, a, b = rng.normal(size=(3, 9))
    b[0] = bl[0]
    t = toy(BL=bl, A=a, B=b).summary()
    assert t.loc['A', ['wins', 'ties', 'losses']].tolist() == [(a > bl).sum(), 0, (a < bl).sum()]
    assert t.loc['B', 'ties'] == 1
    assert t.loc['A', 'diff'] == pytest.approx((a - bl).mean())
    assert (t.diff_lo.dropna() < t.diff_hi.dropna()).all()
    assert t.p_wilcoxon['A'] == pytest.approx(sps.wilcoxon(a - bl, method='exact').pvalue)
    ps = [sps.binomtest(int((d > 0).sum()), int((d != 0).sum())).pvalue for d in (a - bl, b - bl)]
    assert t.p_sign[1:].tolist() == pytest.approx(ps)
    small, large = sorted(ps)
    by_hand = {small: min(1, 2 * small), large: max(min(1, 2 * small), large)}
    assert t.p_holm[1:].tolist() == pytest.approx([by_hand[p] for p in ps])
    lo, hi = sps.t.interval(.95, 8, (a - bl).mean(), sps.sem(a - bl))
    assert (t.diff_lo['A'], t.diff_hi['A']) == pytest.approx((lo, hi))

def test_a_comparison_of_the_baseline_alone():
    t = toy(BL=[.5, .6]).summary()
    assert list(t.index) == ['BL']
    assert np.isnan(t['diff']['BL'])

def test_less_loss_is_a_win():
    t = toy(BL=[.5] * 5, A=[.6] * 5).summary('test_loss')
    assert t.wins['A'] == 5
    assert t.losses['A'] == 0
    assert t['diff']['A'] == pytest.approx(-.1)

def test_few_pairs_have_no_p_value(result):
    t = result.summary()
    assert t[['p_sign', 'p_wilcoxon', 'p_holm']].isna().all(axis=None)
    assert t.note['LW'].endswith('2 pairs are too few for a test')
    one = toy(BL=[.5], A=[.6]).summary()
    assert np.isnan(one.diff_lo['A'])
    assert one.n['A'] == 1

def test_plot_shows_every_seed(result):
    ax = result.plot()
    assert [o.get_text() for o in ax.get_yticklabels()] == ARMS[1:]
    differences = differences_to(result)
    dots = {name: sorted(o.get_offsets()[:, 0]) for name, o in zip(differences, ax.collections)}
    assert dots == {name: pytest.approx(sorted(d)) for name, d in differences.items()}
    summary = result.summary()
    means = [line.get_xdata() for line in ax.lines if line.get_marker() == 'D'][0]
    assert means == pytest.approx(summary['diff'][ARMS[1:]].to_numpy(float))
    whiskers = [line.get_xdata() for line in ax.lines if line.get_marker() != 'D' and len(line.get_xdata()) > 2]
    ends = [(np.nanmin(x), np.nanmax(x)) for x in whiskers]
    assert np.array(ends) == pytest.approx(summary.loc[ARMS[1:], ['diff_lo', 'diff_hi']].to_numpy(float))

def test_exact_tests():
    assert sign_test([1] * 5) == pytest.approx(.0625)
    assert sign_test([]) == wilcoxon([]) == 1
    assert wilcoxon([1] * 6) == pytest.approx(2 / 2**6)          # all ties: as the sign test
    assert holm([.01, np.nan, .04])[[0, 2]].tolist() == pytest.approx([.02, .04])
    with pytest.raises(ReinitError): wilcoxon([np.inf])

# ---------------------------------------------------------------- a Learner of one's own

pytestmark = pytest.mark.filterwarnings('ignore:.*are too short')   # two epochs are

def digits(seed): return image_dls(Task('digits', n_train=60), seed, bs=20)

def small_net():
    return nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()),
                         nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.Dropout(.2)),
                         nn.Flatten(), nn.Linear(32, 10))

def make_learner(seed, cbs=None, metrics=accuracy, **kw):
    return Learner(digits(seed), small_net(), opt_func=partial(SGD, mom=.9), lr=.02, metrics=metrics, cbs=cbs, **kw)

def quick_compare(make=make_learner, methods=LayerwiseCallback, epochs=2, seeds=1, **kw):
    return compare(make, methods, epochs=epochs, seeds=seeds, show=False, **kw)

@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(Learner, 'fit', lambda *a, **kw: pytest.fail('was trained'))

class Watch(Callback):
    "Note the first weights and all labels and inputs of training"
    order = -60
    run_valid = False
    def __init__(self, log): self.log = log
    def before_fit(self): self.log.append(dict(weights=[p.detach().clone() for p in self.model.parameters()], seen=[]))
    def before_batch(self): self.log[-1]['seen'].append((self.x.clone(), self.y.clone()))

def trained(log): return [o for o in log if o['seen']]

def assert_paired(log, n_arms):
    assert len(log) == n_arms
    for other in log[1:]:
        assert all(torch.equal(a, b) for a, b in zip(log[0]['weights'], other['weights'], strict=True))
        for a, b in zip(log[0]['seen'], other['seen'], strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])

def test_arms_begin_with_the_same_weights_and_see_the_same_batches():
    log = []
    result = quick_compare(partial(make_learner, cbs=Watch(log)), seeds=(3, 4))
    assert list(result.method) == ARMS * 2
    log = trained(log)
    assert_paired(log[:5], 5)
    assert_paired(log[5:], 5)
    assert not torch.equal(log[0]['weights'][0], log[5]['weights'][0])
    assert not torch.equal(log[0]['seen'][0][0], log[5]['seen'][0][0])
    assert result.groupby('seed').test_loss.nunique().tolist() == [5, 5]
    assert set(result.steps) == {2 * len(digits(3).train)}

def tensor_loaders(augment=False):
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.randn(40, 1, 8, 8, generator=g), torch.randint(10, (40,), generator=g)))
    def noisy(b): return b[0] + torch.randn(b[0].shape), b[1]
    train = DataLoader(data, bs=8, shuffle=True, after_batch=noisy if augment else None)
    return DataLoaders(train, DataLoader(data[:16], bs=8))

def test_shared_loaders_and_global_generators_stay_as_they_were():
    dls, log = tensor_loaders(augment=True), []
    def make(seed):
        return Learner(dls, small_net(), CrossEntropyLossFlat(), lr=.01, metrics=accuracy, cbs=Watch(log))
    rng = dls.train.rng
    before = rng.getstate(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    quick_compare(make, seeds=2)
    after = dls.train.rng.getstate(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert dls.train.rng is rng and before[:3] == after[:3] and torch.equal(before[3], after[3])
    assert_paired(trained(log)[:5], 5)
    assert_paired(trained(log)[5:], 5)
    assert not torch.equal(trained(log)[0]['seen'][0][0], trained(log)[5]['seen'][0][0])

def test_loaders_of_torch():
    data = torch.utils.data.TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(10, (40,)))
    g = torch.Generator().manual_seed(5)
    loaders = [torch.utils.data.DataLoader(data, 8, shuffle=True, generator=g), torch.utils.data.DataLoader(data, 8)]
    dls, log = DataLoaders(*loaders), []
    state = g.get_state()
    def make(seed):
        return Learner(dls, small_net(), CrossEntropyLossFlat(), lr=.01, metrics=accuracy, cbs=Watch(log))
    result = quick_compare(make, controls=False)
    assert_paired(trained(log), 2)
    assert torch.equal(g.get_state(), state)
    assert {'train_acc', 'valid_acc'} <= set(result) and 'test_acc' not in result

def test_a_torchvision_model():
    def make(seed):
        net = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=8)   # a tenth of ResNet18
        net.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
        return Learner(digits(seed), net, lr=.001, metrics=accuracy)
    result = quick_compare(make, partial(LayerwiseCallback, blocks=2))
    assert list(result.method) == ['BL', 'LW(blocks=2)', 'restart', 'rescale', 'shrink']
    assert set(result.rounds[1:]) == {2}

def test_measured_values_are_those_of_the_learner():
    from reinit_nb.path import evaluate_learner, seeded
    kept = []
    def fit(learn, epochs, cbs):
        kept.append(learn)
        learn.fit(epochs, cbs=cbs)
    row = quick_compare(methods='FC', controls=False, fit=fit).iloc[0]
    learn = kept[0]
    for part, dl in zip(('valid', 'test'), learn.dls.loaders[1:]):
        loss, acc = evaluate_learner(learn, dl)
        assert (row[f'{part}_loss'], row[f'{part}_acc']) == pytest.approx((loss, acc), rel=1e-4)
    with seeded(0): train = learn.dls.train.new(shuffle=False, drop_last=False)
    assert row.train_acc == pytest.approx(evaluate_learner(learn, train)[1], rel=1e-4)

def test_an_interrupted_comparison_resumes(tmp_path):
    calls = []
    def make(seed, limit=99):
        calls.append(seed)
        if len(calls) > limit: raise RuntimeError('power cut')
        return make_learner(seed)
    options = dict(seeds=2, name='mine', store=Store(tmp_path))
    with pytest.raises(ReinitError, match='power cut'): quick_compare(partial(make, limit=6), **options)
    calls.clear()
    resumed = quick_compare(make, **options)
    assert calls == [0, 0, 0] + [1] * 5   # two to plan with, then the runs that were missing
    pd.testing.assert_series_equal(resumed.test_loss, quick_compare(seeds=2).test_loss)
    calls.clear()
    again = quick_compare(make, **options)
    assert calls == [0, 0]
    pd.testing.assert_frame_equal(again, resumed)
    assert len(quick_compare(make, seeds=2, name='other', store=Store(tmp_path), controls=False)) == 4

def test_another_model_under_the_same_name_is_refused(tmp_path):
    options = dict(name='mine', store=Store(tmp_path), controls=False)
    quick_compare(methods='FC', **options)
    def other(seed):
        learn = make_learner(seed)
        learn.model[-1].weight.data.mul_(2)
        return learn
    with pytest.raises(ReinitError, match='use another name'): quick_compare(other, 'FC', **options)
    with pytest.raises(ReinitError, match='use another name'): quick_compare(other, 'DSD', **options)

@pytest.mark.slow
def test_workers(tmp_path):
    alone = quick_compare(seeds=2, controls=False)
    together = quick_compare(seeds=2, controls=False, workers=2)
    assert alone.test_acc.tolist() == pytest.approx(together.test_acc.tolist(), abs=.02)
    assert alone.initial_weights.tolist() == together.initial_weights.tolist()
    assert alone.batches.tolist() == together.batches.tolist()

def test_what_cannot_be_pickled_is_refused_with_workers(no_training):
    lock = threading.Lock()
    def make(seed):
        with lock: return make_learner(seed)
    with pytest.raises(ReinitError, match='make_learner cannot be sent to other processes'):
        quick_compare(make, workers=2)

def test_runs_that_are_not_paired_are_refused():
    state = dict(calls=0)
    def drifting_weights(seed):
        state['calls'] += 1
        learn = make_learner(seed)
        if state['calls'] > 3: learn.model[0][0].weight.data.add_(1)
        return learn
    with pytest.raises(ReinitError, match='began with different weights'): quick_compare(drifting_weights)
    order = torch.Generator().manual_seed(0)
    def other_batches(seed):
        learn = make_learner(seed)
        learn.dls.train.streams = learn.dls.train.streams.fork(int(torch.randint(1000, (), generator=order)))
        return learn
    with pytest.raises(ReinitError, match='saw different batches'): quick_compare(other_batches)
    class StopMethod(Callback):
        def after_batch(self):
            if self.training and hasattr(self.learn, 'layerwise'): raise CancelFitException()
    def stops_early(seed): return make_learner(seed, cbs=StopMethod())
    with pytest.raises(ReinitError, match='equally many steps'): quick_compare(stops_early)

def test_metrics():
    both = quick_compare(partial(make_learner, metrics=[error_rate, accuracy]), 'FC', seeds=2, controls=False)
    assert both.attrs['metric'] == 'test_error_rate'
    default, named = both.summary(), both.summary('accuracy')
    assert default.wins['FC'] == named.wins['FC']
    assert default['diff']['FC'] == pytest.approx(-named['diff']['FC'], abs=1e-5)
    assert both[both.seed >= 0].summary()['mean']['BL'] == default['mean']['BL']
    by_name = quick_compare(methods='FC', controls=False, metric='valid_loss')
    assert by_name.summary()['mean']['BL'] == by_name.valid_loss[0]
    none = quick_compare(partial(make_learner, metrics=None), 'FC', controls=False)
    assert none.attrs['metric'] == 'test_loss'
    assert len(none.summary()) == 2

def test_methods_in_every_form():
    one_cycle = quick_compare(methods={'mine': lambda: LayerwiseCallback(freeze=True)}, fit=Learner.fit_one_cycle)
    assert list(one_cycle.method) == ['BL', 'mine', *ARMS[2:]]
    mixed = quick_compare(methods=['BL', MixUp, Method('LW', n_iter=1)], controls=False)
    assert list(mixed.method) == ['BL', 'MixUp', 'LW']
    assert list(quick_compare(methods=MixUp).method) == ['BL', 'MixUp']   # no rounds, no controls
    two = quick_compare(methods=[LayerwiseCallback, partial(LayerwiseCallback, n_iter=2)], epochs=4)
    assert list(two.method)[3:5] == ['restart(rounds=2)', 'rescale(rounds=2)'] and two.rounds.max() == 4

def test_fresh_weights_depend_on_the_seed():
    seeds = []
    class Note(LayerwiseCallback):
        def before_fit(self):
            super().before_fit()
            seeds.append(self.seed)
    quick_compare(methods=lambda: Note(), seeds=(2, 5), controls=False)
    assert set(seeds) == {2, 5}

def test_short_rounds_are_reported():
    with pytest.warns(UserWarning, match='LW: training accuracy .* are too short, try 4 epochs'):
        def slow_after_reset(seed): return Learner(digits(seed), small_net(), lr=.01, metrics=accuracy)
        result = quick_compare(slow_after_reset, partial(LayerwiseCallback), epochs=2, controls=False)
    assert 'try 4 epochs' in result.summary().note['LW']

def test_power_of_a_comparison():
    bl, a = np.random.default_rng(0).normal(.5, .02, size=(2, 6))
    t = toy(BL=bl, A=a).power()
    sd = (a - bl).std(ddof=1)
    assert t.sd['A'] == pytest.approx(sd)
    assert t.seeds_needed['A'] == seeds_needed(sd, .01)
    assert t.power['A'] == pytest.approx(power_of(6, sd, .01))
    assert toy(BL=bl, A=a).power(.1).seeds_needed['A'] == seeds_needed(sd, .1)
    assert toy(BL=bl, A=bl).power().seeds_needed['A'] == 2
    with pytest.raises(ReinitError, match='two seeds'): toy(BL=[.1], A=[.2]).power()

class Broken(LayerwiseCallback):
    def __init__(self, needed): super().__init__()

@pytest.mark.parametrize('wrong, said', [
    (lambda: quick_compare(make_learner(0)), 'a function that takes a seed'),
    (lambda: quick_compare(small_net()), 'make_learner is a Sequential'),
    (lambda: quick_compare(3), 'make_learner is a int'),
    (lambda: quick_compare(lambda: make_learner(0)), 'should take a seed'),
    (lambda: quick_compare(lambda a, b: make_learner(0)), 'should take a seed'),
    (lambda: quick_compare(lambda seed: small_net()), 'returned a Sequential'),
    (lambda: quick_compare(lambda seed: None), 'returned a NoneType'),
    (lambda: quick_compare(partial(lambda learn, seed: learn, make_learner(0))), 'the same model twice'),
    (lambda: quick_compare(lambda seed: make_learner(seed, cbs=LayerwiseCallback())), 'LayerwiseCallback already'),
    (lambda: quick_compare(epochs=0), 'epochs=0'),
    (lambda: quick_compare(epochs=None), 'epochs=None'),
    (lambda: quick_compare(epochs=1), 'LW: 1 epochs cannot be shared among 2 rounds'),
    (lambda: quick_compare(seeds=0), 'seeds=0'),
    (lambda: quick_compare(seeds=(1, 1)), 'different'),
    (lambda: quick_compare(workers=0), 'workers=0'),
    (lambda: quick_compare(methods=LayerwiseCallback()), 'the class LayerwiseCallback'),
    (lambda: quick_compare(methods=[LayerwiseCallback, LayerwiseCallback]), 'several are called LW'),
    (lambda: quick_compare(methods=partial(lambda cb: cb, LayerwiseCallback())), 'the same object every time'),
    (lambda: quick_compare(methods=lambda: 3), 'should make a fastai Callback'),
    (lambda: quick_compare(methods=[]), 'methods is empty'),
    (lambda: quick_compare(methods=3), 'should be a callback class'),
    (lambda: quick_compare(methods='LWW'), 'did you mean'),
    (lambda: quick_compare(methods=LLFCallback), 'partial(LLFCallback'),
    (lambda: quick_compare(methods=Broken), 'partial(Broken'),
    (lambda: quick_compare(metric='accurac'), 'did you mean'),
    (lambda: quick_compare(store=Store('x')), 'give name'),
    (lambda: quick_compare(results='x.csv'), 'results are for recipes')])
def test_wrong_input_is_refused_before_any_training(wrong, said, no_training):
    with pytest.raises(ReinitError) as e: wrong()
    assert said in str(e.value)

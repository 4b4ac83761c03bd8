"Image tasks: wrong input, nested subsets, pixels against torchvision, and loaders that are fastai's in every respect"
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reinit_nb import vision
from reinit_nb.core import Recipe, ReinitError, Streams
from reinit_nb.datasets import load_dataset
from reinit_nb.vision import (
    Task,
    augment_images,
    choose_images,
    draw_augmentation,
    image_dls,
    normalization_stats,
    paper_tasks,
    prepare_images,
    swapped_classes,
    task_images,
)

TF = pytest.importorskip('torchvision.transforms.v2.functional')
pytestmark = pytest.mark.filterwarnings('ignore:.*torch.jit.script')


def fails(f, *words):
    with pytest.raises(ReinitError) as e: f()
    for word in words: assert word in str(e.value), (word, str(e.value))


# ---------------------------------------------------------------- wrong input

@pytest.mark.parametrize('kw', [
    dict(n_train=0), dict(n_train=0.), dict(n_train=1.01), dict(n_train=-3), dict(n_train=True), dict(valid=1.),
    dict(size=0), dict(channels=2), dict(normalize='x'), dict(blur=0.), dict(shift=1.5), dict(affine=(1, 2)),
    dict(affine=(0, 0, 2)), dict(jitter=(0, 0, 0, .6)), dict(random_labels=-.1), dict(flip=1), dict(dataset=3)])
def test_task_refuses(kw):
    with pytest.raises(ReinitError): Task(**kw)


def test_subset_errors():
    fails(lambda: task_images(Task(n_train=5000), Streams(0)), '1,437')
    fails(lambda: task_images(Task(n_train=1437), Streams(0)), 'balanced')
    fails(lambda: task_images(Task(n_train=9), Streams(0)), 'no image of class')
    fails(lambda: task_images(Task(n_train=.001), Streams(0)), 'no image of class')
    fails(lambda: image_dls(bs=0), 'bs')


# ---------------------------------------------------------------- which images

counts = st.lists(st.integers(2, 40), min_size=2, max_size=6)

@settings(max_examples=60, deadline=None)
@given(counts, st.integers(0, 100), st.sampled_from([0., .1, .25, .5]))
def test_subsets_are_balanced_nested_and_disjoint(counts, seed, valid):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    train, held = set(), set()
    for k in range(1, min(counts) + 1):
        t, v = choose_images(y, [k] * len(counts), valid, Streams(seed).data)
        assert (np.bincount(y[np.r_[t, v]], minlength=len(counts)) == k).all()
        assert train <= set(t) and held <= set(v) and not set(t) & set(v)
        train, held = set(t), set(v)
    full = choose_images(y, counts, valid, Streams(seed).data)
    assert train <= set(full[0]) and sorted(np.concatenate(full)) == list(range(len(y)))


@given(st.integers(2, 50), st.integers(0, 100))
def test_swap_is_a_permutation_without_fixed_points(n, seed):
    p = swapped_classes(n, Streams(seed).data)
    assert sorted(p) == list(range(n)) and (p != np.arange(n)).all()


def test_labels():
    fields = {}, dict(random_labels=1.), dict(swap_labels=True)
    plain, rnd, swap = (task_images(Task(**kw), Streams(3)) for kw in fields)
    assert .02 < (plain[0].y == rnd[0].y).mean() < .2
    for i in (1, 2): np.testing.assert_array_equal(plain[i].y, rnd[i].y)
    pairs = set(zip(plain[0].y, swap[0].y))
    assert len(pairs) == 10 and pairs == set(zip(plain[2].y, swap[2].y)) == set(zip(plain[1].y, swap[1].y))
    assert (task_images(Task(random_labels=1.), Streams(3))[0].y == rnd[0].y).all()
    assert (task_images(Task(random_labels=1.), Streams(4))[0].y != rnd[0].y).any()


# ---------------------------------------------------------------- pixels

raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (12, 3, 20, 20), dtype=np.uint8))

def reference(t, x, h, p):
    "Each image alone, by torchvision"
    res, n = [], round(h * 248 / 224) if t.crop else h
    for i, o in enumerate(x):
        q = {k: v[i].item() for k, v in p.items()}
        o = TF.resize(TF.to_dtype(o, torch.float32, scale=True), [n, n], antialias=True)
        if t.channels == 1: o = TF.rgb_to_grayscale(o)
        if t.blur < 1: o = TF.resize(TF.resize(o, [round(n * t.blur)] * 2, antialias=True), [n, n], antialias=True)
        if t.crop: o = TF.crop(o, q['top'], q['left'], h, h)
        if q['flip']: o = TF.horizontal_flip(o)
        if q['vflip']: o = TF.vertical_flip(o)
        if t.shift: o = TF.affine(o, 0, [q['dx'], q['dy']], 1, [0, 0])
        if any(t.affine):
            bilinear = TF.InterpolationMode.BILINEAR
            o = TF.affine(o, q['angle'], [0, 0], q['zoom'], [q['shear'], 0], interpolation=bilinear)
        if any(t.jitter):
            o = TF.adjust_contrast(TF.adjust_brightness(o, q['brightness']), q['contrast'])
            if len(o) == 3: o = TF.adjust_hue(TF.adjust_saturation(o, q['saturation']), q['hue'])
        res.append(o)
    return torch.stack(res)


@pytest.mark.parametrize('h', [13, 20, 32])
@pytest.mark.parametrize('kw', [
    {}, dict(flip=True), dict(vflip=True), dict(shift=.3), dict(shift=1.), dict(crop=True), dict(blur=.25),
    dict(channels=1), dict(crop=True, flip=True, shift=.5, vflip=True, blur=.5),
    dict(affine=(30, 0, 0)), dict(affine=(0, 40, 0)), dict(affine=(10, 40, .4)),
    dict(jitter=(.5, 0, 0, 0)), dict(jitter=(0, .5, 0, 0)), dict(jitter=(0, 0, .5, 0)), dict(jitter=(0, 0, 0, .5)),
    dict(channels=1, jitter=(.5, .5, 0, 0)),
    dict(crop=True, flip=True, shift=.1, affine=(5, 5, .1), jitter=(.5, .5, .25, .1))], ids=str)
def test_pixels_agree_with_torchvision(kw, h):
    t = Task(**kw)
    n = round(h * 248 / 224) if t.crop else h
    p = draw_augmentation(t, len(raw), h, h, Streams(1).data)
    ours = augment_images(t, prepare_images(t, raw, n, n), h, h, p)
    exact = not (any(t.affine) or any(t.jitter))
    assert ours.shape[-2:] == (h, h)
    torch.testing.assert_close(ours, reference(t, raw, h, p), atol=2e-6 if exact else 2e-4, rtol=0)


def test_affine_of_images_that_are_not_square():
    x = torch.rand(3, 1, 12, 20, generator=torch.Generator().manual_seed(0))
    a, s, z = torch.tensor([10., -30, 80]), torch.tensor([0., 20, -5]), torch.tensor([1., .7, 1.3])
    for i, got in enumerate(vision.affine_images(x, a, s, z)):
        want = TF.affine(x[i], a[i].item(), [0, 0], z[i].item(), [s[i].item(), 0],
                         interpolation=TF.InterpolationMode.BILINEAR)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_draws_stay_in_their_ranges_and_columns():
    t = Task(crop=True, flip=True, shift=.5, affine=(10, 20, .4), jitter=(.5, .4, .3, .1))
    p = draw_augmentation(t, 5000, 32, 32, Streams(0).data)
    assert p['top'].min() == 0 and p['top'].max() == 3                 # 35 - 32
    assert p['dx'].min() == -16 and p['dx'].max() == 16
    assert abs(p['flip'].float().mean() - .5) < .05 and not p['vflip'].any()
    assert p['angle'].abs().max() <= 10 and p['hue'].abs().max() <= .1 and p['zoom'].min() >= .6
    q = draw_augmentation(t.replace(shift=0., affine=(0, 0, 0)), 5000, 32, 32, Streams(0).data)
    assert (p['flip'] == q['flip']).all() and (p['top'] == q['top']).all() and not q['dx'].any()


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_draws_move_with_at_most_one_copy(monkeypatch, device):
    t = Task(crop=True, flip=True, shift=.5, affine=(10, 20, .4), jitter=(.5, .4, .3, .1))
    draws = draw_augmentation(t, 20, 32, 32, Streams(0).data)
    copies, to = [], torch.Tensor.to
    def counted(self, *args, **kw):
        out = to(self, *args, **kw)
        if out.device != self.device: copies.append(out.shape)
        return out
    monkeypatch.setattr(torch.Tensor, 'to', counted)
    moved = vision._move_draws(draws, torch.device(device))
    assert len(copies) == (device != 'cpu')
    assert {k: (v.dtype, v.shape) for k, v in moved.items()} == {k: (v.dtype, v.shape) for k, v in draws.items()}


def test_draws_survive_the_copy_exactly(monkeypatch):
    "As on a device that is not the CPU: packed as floats, and unpacked"
    t = Task(size=224, crop=True, flip=True, shift=1., affine=(10, 20, .4), jitter=(.5, .4, .3, .1), random_blur=.5)
    draws = draw_augmentation(t, 500, 224, 224, Streams(0).data)
    class Elsewhere:
        type = 'elsewhere'
    monkeypatch.setattr(vision.torch, 'device', lambda d: Elsewhere if d == 'cpu' else d)
    moved = vision._move_draws(draws, 'cpu')
    monkeypatch.undo()
    for name, value in draws.items(): assert moved[name].dtype == value.dtype and torch.equal(moved[name], value), name


def test_without_augmentation_nothing_is_drawn(monkeypatch):
    assert not vision.is_augmented(Task(blur=.5, random_labels=.5))
    for kw in (dict(crop=True), dict(flip=True), dict(vflip=True), dict(shift=.1), dict(affine=(1, 0, 0)),
               dict(jitter=(0, 0, 0, .1)), dict(random_blur=.5)): assert vision.is_augmented(Task(**kw))
    def refuse(*args): raise AssertionError('drawn for nothing')
    dls = image_dls(Task(n_train=100), bs=20, device='cpu')
    monkeypatch.setattr(vision, 'draw_augmentation', refuse)
    assert len(list(dls.train)) == 4


# ---------------------------------------------------------------- fastai

@pytest.fixture(scope='module')
def small(): return image_dls(Task(n_train=400, shift=.2, flip=True), seed=1, bs=32, device='cpu')

def epoch(dl): return [tuple(torch.as_tensor(o) for o in b) for b in dl]
def same(a, b): return len(a) == len(b) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b))


def test_loader_lengths():
    d = image_dls(Task(n_train=400), bs=32, device='cpu')
    assert [len(dl.dataset) for dl in d] == [360, 40, 360] and [len(dl) for dl in d] == [11, 1, 6]
    assert [sum(len(b[1]) for b in dl) for dl in d] == [352, 40, 360]
    assert sum(len(b[1]) for b in image_dls(Task(n_train=400), bs=32, device='cpu', drop_last=False).train) == 360
    assert len(image_dls(Task(n_train=20), bs=500, device='cpu').train) == 1       # fewer images than a batch
    d = image_dls(Task(valid=0.), device='cpu')
    assert len(d.valid.dataset) == 360 and d.c == 10 and d.vocab[3] == '3'


def test_batches_follow_from_seed_and_epoch_alone():
    def new(**kw): return image_dls(Task(n_train=200, shift=.3), device='cpu', **kw).train
    a = new(seed=5)
    e0, e1 = epoch(a), epoch(a)
    torch.manual_seed(1)
    random.seed(1)
    b = new(seed=5)
    b.one_batch()
    b.one_batch()
    assert same(epoch(b), e0) and same(epoch(b), e1) and not same(e0, e1)
    c = new(seed=5)
    c.epoch = 1
    assert same(epoch(c), e1) and not same(epoch(new(seed=6)), e0)
    c = new(seed=5)
    next(iter(c))                            # an epoch that was left early counts
    assert same(epoch(c), e1)


def test_global_generators_are_left_alone():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    d = image_dls(Task(n_train=100, shift=.2), device='cpu')
    for dl in d: epoch(dl)
    d.one_batch()
    d.test_dl(d[2].dataset.x[:3]).one_batch()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_validation_is_not_augmented(small):
    a, b = epoch(small.valid), epoch(small.valid)
    plain = epoch(image_dls(Task(n_train=400), seed=1, bs=32, device='cpu').valid)
    assert same(a, b) and same(a, plain)


def test_normalization():
    x = torch.cat([b[0] for b in image_dls(Task(), bs=100, device='cpu', drop_last=False).train])
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
    x = image_dls(Task(normalize='none'), device='cpu').one_batch()[0]
    assert 0 <= x.min() and x.max() <= 1
    t = Task(normalize='imagenet', channels=3)
    x, u = (image_dls(t.replace(normalize=n), device='cpu').one_batch()[0] for n in ('imagenet', 'none'))
    torch.testing.assert_close(torch.as_tensor(x), TF.normalize(torch.as_tensor(u), *vision.IMAGENET_STATS))
    assert x.shape[1] == 3
    gray = task_images(Task(), Streams(0))[0]
    assert len(normalization_stats(Task(normalize='imagenet'), gray)[0]) == 1


def learner(d, **kw):
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    torch.manual_seed(0)
    c = d.one_batch()[0].shape[1]
    net = nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, d.c))
    return Learner(d, net, metrics=accuracy, **kw)


def test_learner(tmp_path):
    import fastai.callback.schedule  # noqa: F401 (adds lr_find)
    learn = learner(image_dls(Task(), device='cpu'), path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(show_plot=False, num_it=20)
        learn.fit(5, 3e-3)
        assert learn.validate()[1] > .8
        preds, targs = learn.get_preds(ds_idx=2)
        assert (preds.argmax(1) == targs).float().mean() > .7
        assert len(learn.get_preds(ds_idx=0)[0]) == len(learn.dls.train_ds)
        in_order = learn.get_preds(ds_idx=0)[1].numpy()
        np.testing.assert_array_equal(in_order, learn.dls.train_ds.y)
        ds = learn.dls[2].dataset
        files = [tmp_path / f'{i}.png' for i in range(3)]
        for i, file in enumerate(files): ds[i][0].save(file)
        pil = [ds[i][0] for i in range(3)]
        for items in (ds.x[:3], list(ds.x[:3]), files, [str(f) for f in files], pil, [ds[i] for i in range(3)],
                      torch.from_numpy(ds.x[:3])[:, None], [image.convert('RGB') for image in pil]):
            got = learn.get_preds(dl=learn.dls.test_dl(items))[0]
            torch.testing.assert_close(got, preds[:3], atol=1e-5, rtol=0)
        dl = learn.dls.test_dl([(ds[i][0], str(ds[i][1])) for i in range(3)], with_labels=True)
        assert learn.get_preds(dl=dl)[1].tolist() == ds.y[:3].tolist()
        label, i, p = learn.predict(files[0])
        assert label == str(int(i)) and int(i) == preds[0].argmax()
        learn.export('x.pkl')
    # a fresh process, which has imported nothing of ours
    code = '\n'.join(["import sys, warnings", "warnings.simplefilter('ignore')",
                      "from fastai.learner import load_learner", "import fastai.callback.progress",
                      "l = load_learner(sys.argv[1])",
                      "with l.no_bar(): print('label', l.predict(sys.argv[2])[0], len(l.dls.train_ds))"])
    r = subprocess.run([sys.executable, '-c', code, tmp_path / 'x.pkl', files[0]], capture_output=True, text=True)
    assert f'label {label} 0' in r.stdout, r.stderr


def test_interpretation_and_tta():
    plt = pytest.importorskip('matplotlib.pyplot')
    import fastai.callback.progress
    import fastai.vision.learner  # noqa: F401 (both act by being imported: no_bar, how top losses are shown)
    from fastai.interpret import ClassificationInterpretation
    learn = learner(image_dls(Task(shift=.3), device='cpu'))
    with learn.no_bar(), learn.no_logging():
        it = ClassificationInterpretation.from_learner(learn)
        assert it.confusion_matrix().sum() == len(learn.dls.valid_ds)
        assert list(it.vocab) == [str(i) for i in range(10)]
        it.plot_top_losses(4)
        plain, (mixed, targs) = learn.get_preds()[0], learn.tta(n=2, beta=0)
        assert mixed.shape == plain.shape and not torch.allclose(mixed, plain)
        assert targs.tolist() == learn.dls.valid_ds.y.tolist()
        assert not torch.equal(learn.tta(n=1, beta=0)[0], learn.tta(n=2, beta=0)[0])     # passes differ
        torch.testing.assert_close(learn.get_preds()[0], plain)                          # and leave nothing behind
    plt.close('all')


def test_show(small):
    plt = pytest.importorskip('matplotlib.pyplot')
    small.show_batch(max_n=4)
    small.show_batch(max_n=4, unique=True)
    small.valid.show_batch(max_n=2)
    with (learn := learner(small)).no_bar(): learn.show_results(max_n=2)
    assert len(plt.get_fignums()) >= 4
    plt.close('all')
    xs, ys, samples = small.show_batch(show=False)
    assert samples[0][1] in small.vocab and samples[0][0].shape == (1, 8, 8)


def test_vision_learner():
    from fastai.vision.learner import vision_learner
    from torchvision.models import resnet18
    dls = image_dls(Task(n_train=60, size=32, channels=3), bs=20, device='cpu')
    learn = vision_learner(dls, resnet18, pretrained=False)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.model[-1][-1].out_features == 10


def test_image_dl_is_found_by_name_and_pickles(small):
    from fastai.data.core import TfmdDL
    assert issubclass(vision.ImageDL, TfmdDL) and isinstance(small.train, vision.ImageDL)
    with pytest.raises(AttributeError): getattr(vision, 'ImageLD')  # noqa: B009 (that access is the test)
    assert same(epoch(pickle.loads(pickle.dumps(small.valid))), epoch(small.valid))


def test_float_images_are_refused(small):
    fails(lambda: small.test_dl([np.zeros((8, 8))]), 'uint8')


def test_tasks_of_the_papers():
    tasks = paper_tasks()
    assert sum(k.startswith('Table') for k in tasks) == 13 and sum(k.startswith('Section 3.1') for k in tasks) == 12
    for ts in tasks.values():
        for t in ts: assert Recipe.from_dict(t.to_dict()) == t
    # each of them runs, on digits and small
    for ts in tasks.values():
        t = ts[-1].replace(dataset='digits', size=16, n_train=None)
        assert image_dls(t, bs=4, device='cpu').one_batch()[0].isfinite().all()


# ---------------------------------------------------------------- real data

@pytest.mark.data
def test_cifar_pixels_agree_with_torchvision():
    t = Task('cifar10', crop=True, flip=True, shift=.1)
    x = torch.from_numpy(load_dataset('cifar10').x_train[:64]).permute(0, 3, 1, 2)
    p = draw_augmentation(t, 64, 32, 32, Streams(0).data)
    ours = augment_images(t, prepare_images(t, x, 35, 35), 32, 32, p)
    torch.testing.assert_close(ours, reference(t, x, 32, p), atol=2e-6, rtol=0)

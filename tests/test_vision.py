"Image tasks: wrong input, nested subsets, pixels against torchvision, and loaders that are fastai's in every respect"
import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from reinit_nb import vision
from reinit_nb.core import Recipe, ReinitError, Streams
from reinit_nb.vision import (
    Task,
    augment,
    available,
    catalogue,
    choose,
    dls,
    draw,
    load,
    make,
    paper_tasks,
    prepare,
    source,
    stats,
    swapped,
)

TF = pytest.importorskip('torchvision.transforms.v2.functional')
pytestmark = pytest.mark.filterwarnings('ignore:.*torch.jit.script')


@pytest.fixture
def box(tmp_path, monkeypatch):
    "An empty data folder and an empty cache"
    monkeypatch.setenv('REINIT_DATA', str(tmp_path / 'data'))
    monkeypatch.setenv('REINIT_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'data').mkdir()
    return tmp_path / 'data'


def arrays(n=40, hw=(6, 5), classes=4, colour=True, seed=0):
    rng = np.random.default_rng(seed)
    def x(n): return rng.integers(0, 256, (n, *hw, *((3,) if colour else ())), dtype=np.uint8)
    return dict(x_train=x(n), y_train=np.arange(n) % classes, x_test=x(n // 2), y_test=np.arange(n // 2) % classes,
                classes=np.array([f'class {i}' for i in range(classes)]))


def tree(root, d, fmt='png'):
    "The same images as a folder"
    for part in ('train', 'test'):
        for i, (im, y) in enumerate(zip(d[f'x_{part}'], d[f'y_{part}'])):
            f = root / part / str(d['classes'][y]) / f'{i:03}.{fmt}'
            f.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(im).save(f)
    return root


# Catalogue and sources

def test_catalogue_has_every_dataset_of_the_papers():
    names = set(catalogue().index)
    assert {t.dataset for ts in paper_tasks().values() for t in ts} <= names
    assert {'digits', 'mnist', 'svhn', 'imagenet', 'birds2010', 'patch_camelyon', 'resisc45', 'emnist_letters'} <= names
    df = catalogue()
    assert ((df.torchvision != '') | (df['by hand'] != '')).all()   # everything says how it is obtained


def test_torchvision_has_the_classes_named():
    from torchvision import datasets
    assert all(hasattr(datasets, c) for c in catalogue().torchvision if c)


def test_table_4_sizes():
    df = catalogue()
    want = dict(oxford_pet=(3680, 3669), stanford_dogs=(12000, 8580), cars196=(8144, 8041), caltech101=(3060, 6084), cassava=(5656, 1885), birds2010=(3000, 3033))
    assert {n: tuple(df.loc[n, ['train', 'test']]) for n in want} == want


def test_npz_before_folder_before_the_rest(box):
    assert source('digits') == 'scikit-learn' and source('mine') is None
    tree(box / 'digits', arrays(colour=False))
    assert source('digits') == 'folder' and load('digits').x_train.shape == (40, 6, 5)
    np.savez(box / 'digits.npz', **arrays())
    assert source('digits') == 'npz' and load('digits').x_train.shape == (40, 6, 5, 3)


def test_folder_and_npz_hold_the_same(box):
    d = arrays()
    np.savez_compressed(box / 'a.npz', **d)
    tree(box / 'b', d)
    a, b = load('a'), load('b')
    assert a.classes == b.classes and set(available()) >= {'a', 'b'}
    for c in range(4):
        np.testing.assert_array_equal(a.x_train[a.y_train == c], b.x_train[b.y_train == c])
        np.testing.assert_array_equal(a.x_test[a.y_test == c], b.x_test[b.y_test == c])


def test_changed_file_is_read_anew(box):
    np.savez(box / 'a.npz', **arrays(seed=0))
    first = load('a').x_train
    np.savez(box / 'a.npz', **arrays(seed=1))
    os.utime(box / 'a.npz', ns=(1, 1))
    assert (load('a').x_train != first).any()


@pytest.mark.parametrize('kind', ['npz', 'folder'])
def test_large_arrays_are_memory_mapped(box, monkeypatch, kind):
    monkeypatch.setattr(vision, 'LARGE', 100)
    d = arrays()
    if kind == 'npz': np.savez(box / 'a.npz', **d)
    else: tree(box / 'a', d)
    vision._load.cache_clear()
    x = load('a').x_train
    assert isinstance(x, np.memmap) and x.filename and not list((box.parent / 'cache').glob('*.tmp'))
    assert sorted(x.sum((1, 2, 3))) == sorted(d['x_train'].sum((1, 2, 3)))
    vision._load.cache_clear()
    assert (load('a').x_train == x).all()      # from the cache
    xb, yb = dls(Task('a'), bs=8, device='cpu').one_batch()
    assert xb.shape == (8, 3, 6, 5)


def test_huge_sets_are_streamed(box, monkeypatch):
    "Nothing is decoded in advance, and the batches of two epochs, augmentation included, are those of the set in memory"
    tree(box / 'a', arrays())
    task = Task('a', flip=True, shift=.2)
    def epochs():
        vision._load.cache_clear()
        d = dls(task, seed=3, bs=8, device='cpu')
        return d, [b for _ in range(2) for b in d.train] + list(d.valid)
    _, want = epochs()
    monkeypatch.setattr(vision, 'HUGE', 100)
    d, got = epochs()
    assert isinstance(d.train.dataset.x, vision.Streamed) and not list((box.parent / 'cache').glob('*'))
    assert len(got) == len(want) and all(torch.equal(a, b) for x, y in zip(got, want) for a, b in zip(x, y))
    x = pickle.loads(pickle.dumps(d.train.dataset.x))
    assert x[2].shape == x.shape[1:] and x[[0, 3]].shape == x[1:3].shape == (2, *x.shape[1:]) and len(x[:0]) == 0
    bad = sorted((box / 'a' / 'train').rglob('*.*'))[0]
    bad.write_bytes(bad.read_bytes()[:30])
    with pytest.raises(ReinitError, match=bad.name): list(d.train)


class FakeMNIST:
    def __init__(self, root, train, download):
        self.data, self.targets = torch.zeros(20 if train else 10, 28, 28, dtype=torch.uint8), torch.arange(20 if train else 10) % 10
        self.classes = [str(i) for i in range(10)]


class FakeEMNIST(FakeMNIST):
    def __init__(self, root, split, train, download):
        assert split == 'letters'
        n = 52 if train else 26
        self.data, self.targets = torch.arange(n * 6).view(n, 2, 3).to(torch.uint8), torch.arange(n) % 26 + 1


class FakeSVHN:
    def __init__(self, root, split, download):
        self.data, self.labels = np.zeros((20, 3, 32, 32), np.uint8), np.arange(20) % 10


class FakePet:
    def __init__(self, root, split, download):
        self._labels, self.classes = [0, 1, 0, 1], ['cat', 'dog']
    def __len__(self): return 4
    def __getitem__(self, i): return Image.new('RGB', (20 + i, 30), (i, 0, 0)), self._labels[i]


class FakeCaltech:
    def __init__(self, root, download): self.y, self.categories = [0] * 40 + [1] * 35, ['a', 'b']
    def __len__(self): return 75
    def __getitem__(self, i): return Image.new('L' if i % 2 else 'RGB', (9, 9)), self.y[i]


@pytest.mark.parametrize('name,fake,train,test', [
    ('mnist', FakeMNIST, (20, 28, 28), 10), ('emnist_letters', FakeEMNIST, (52, 3, 2), 26), ('svhn', FakeSVHN, (20, 32, 32, 3), 20),
    ('oxford_pet', FakePet, (4, 16, 16, 3), 4), ('caltech101', FakeCaltech, (60, 16, 16, 3), 15)])
def test_torchvision(box, monkeypatch, name, fake, train, test):
    from torchvision import datasets
    monkeypatch.setattr(datasets, catalogue().torchvision[name], fake)
    vision._load.cache_clear()
    d = load(name, size=16, download=True)
    assert d.x_train.shape == train and len(d.x_test) == test and d.y_train.min() == 0
    if name == 'emnist_letters': assert d.classes[0] == 'a' and d.x_train[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    if name == 'oxford_pet':
        with pytest.raises(ReinitError, match='size'): load(name, download=True)
    vision._load.cache_clear()


# Wrong input

def fails(f, *words):
    with pytest.raises(ReinitError) as e: f()
    for w in words: assert w in str(e.value), (w, str(e.value))


def test_missing_data_names_three_ways(box):
    fails(lambda: load('mnist'), 'mnist.npz', 'mnist/train/<class>/*', 'download=True', 'digits')
    fails(lambda: load('stanford_dogs'), 'cannot download', 'train_list.mat')
    fails(lambda: load('fashionmnist'), "did you mean 'fashion_mnist'?")
    fails(lambda: dls(Task('minst')), "did you mean 'mnist'?")


def test_failed_download_says_so(box, monkeypatch):
    from torchvision import datasets
    def broken(*a, **kw): raise RuntimeError('no network')
    monkeypatch.setattr(datasets, 'MNIST', broken)
    fails(lambda: load('mnist', download=True), 'no network', 'Three ways')


@pytest.mark.parametrize('change,words', [
    (dict(y_test=np.full(20, 4)), ('y_test', 'labels [4]', '4 classes')), (dict(y_train=np.arange(40) - 1), ('labels [-1',)),
    (dict(x_train=np.zeros((40, 6, 5))), ('float64', 'uint8')), (dict(x_train=np.zeros((40, 3, 6, 5), np.uint8)), ('N×H×W',)),
    (dict(y_train=np.zeros(3, int)), ('40 images',)), (dict(x_test=np.zeros((20, 6, 5), np.uint8)), ('grey',))])
def test_arrays_that_do_not_fit(box, change, words):
    np.savez(box / 'a.npz', **(arrays() | change))
    fails(lambda: load('a'), *words)


@pytest.mark.parametrize('keep', [0, 10, 500, 2000, -30])
@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_truncated_npz_is_named(box, save, keep):
    save(box / 'a.npz', **arrays())
    raw = (box / 'a.npz').read_bytes()
    (box / 'a.npz').write_bytes(raw[:keep])
    fails(lambda: load('a'), 'a.npz')


def test_flipped_byte_in_npz_is_noticed(box):
    np.savez(box / 'a.npz', **arrays())
    raw = bytearray((box / 'a.npz').read_bytes())
    raw[1000] ^= 255
    (box / 'a.npz').write_bytes(raw)
    fails(lambda: load('a'), 'a.npz')


def test_npz_with_objects_is_refused(box):
    np.savez(box / 'a.npz', **(arrays() | dict(classes=np.array([{}, 1, 2, 3], dtype=object))))
    fails(lambda: load('a'), 'a.npz')


@pytest.mark.parametrize('fmt,keep', [('png', 0), ('png', 20), ('png', 70), ('jpg', 100), ('bmp', 60)])
def test_damaged_image_is_named(box, fmt, keep):
    f = sorted(tree(box / 'a', arrays(), fmt).rglob('*.' + fmt))[3]
    f.write_bytes(f.read_bytes()[:keep])
    fails(lambda: load('a'), f.name)


def test_folders_that_do_not_fit(box):
    tree(box / 'a', arrays())
    (box / 'a/test').rename(box / 'a/tset')
    fails(lambda: load('a'), "no folder 'test'")
    (box / 'a/tset').rename(box / 'a/test')
    (box / 'a/test/stranger').mkdir()
    fails(lambda: load('a'), 'stranger')
    (box / 'b/train/x').mkdir(parents=True)
    (box / 'b/test/x').mkdir(parents=True)
    fails(lambda: load('b'), 'no images')


def test_sizes_that_differ(box):
    tree(box / 'a', arrays())
    Image.new('RGB', (9, 9)).save(box / 'a/train/class 0/z.png')
    fails(lambda: load('a'), 'different sizes', 'size')
    assert load('a', size=7).x_train.shape == (41, 7, 7, 3)
    assert dls(Task('a', size=14, crop=True), bs=4, device='cpu').one_batch()[0].shape == (4, 3, 14, 14)


def test_unwritable_cache(box, monkeypatch):
    (box / 'file').write_text('x')
    monkeypatch.setenv('REINIT_CACHE', str(box / 'file/below'))
    fails(vision.cache_dir, 'REINIT_CACHE')
    monkeypatch.setattr(vision, 'LARGE', 100)
    np.savez(box / 'a.npz', **arrays())
    fails(lambda: load('a'), 'REINIT_CACHE')


@pytest.mark.parametrize('kw', [dict(n_train=0), dict(n_train=0.), dict(n_train=1.01), dict(n_train=-3), dict(valid=1.), dict(size=0), dict(channels=2), dict(normalize='x'),
    dict(blur=0.), dict(shift=1.5), dict(affine=(1, 2)), dict(affine=(0, 0, 2)), dict(jitter=(0, 0, 0, .6)), dict(random_labels=-.1), dict(flip=1), dict(dataset=3), dict(n_train=True)])
def test_task_refuses(kw):
    with pytest.raises(ReinitError): Task(**kw)


def test_subset_errors():
    fails(lambda: make(Task(n_train=5000), Streams(0)), '1,437')
    fails(lambda: make(Task(n_train=1437), Streams(0)), 'balanced')
    fails(lambda: make(Task(n_train=9), Streams(0)), 'no image of class')
    fails(lambda: make(Task(n_train=.001), Streams(0)), 'no image of class')
    fails(lambda: dls(bs=0), 'bs')


# Which images

counts = st.lists(st.integers(2, 40), min_size=2, max_size=6)

@settings(max_examples=60, deadline=None)
@given(counts, st.integers(0, 100), st.sampled_from([0., .1, .25, .5]))
def test_subsets_are_balanced_nested_and_disjoint(counts, seed, valid):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    train, held = set(), set()
    for k in range(1, min(counts) + 1):
        t, v = choose(y, [k] * len(counts), valid, Streams(seed).data)
        assert (np.bincount(y[np.r_[t, v]], minlength=len(counts)) == k).all()
        assert train <= set(t) and held <= set(v) and not set(t) & set(v)
        train, held = set(t), set(v)
    full = choose(y, counts, valid, Streams(seed).data)
    assert train <= set(full[0]) and sorted(np.concatenate(full)) == list(range(len(y)))


@given(st.integers(2, 50), st.integers(0, 100))
def test_swap_is_a_permutation_without_fixed_points(n, seed):
    p = swapped(n, Streams(seed).data)
    assert sorted(p) == list(range(n)) and (p != np.arange(n)).all()


def test_labels():
    plain, rnd, swap = (make(Task(**kw), Streams(3)) for kw in ({}, dict(random_labels=1.), dict(swap_labels=True)))
    assert .02 < (plain[0].y == rnd[0].y).mean() < .2
    for i in (1, 2): np.testing.assert_array_equal(plain[i].y, rnd[i].y)
    pairs = set(zip(plain[0].y, swap[0].y))
    assert len(pairs) == 10 and pairs == set(zip(plain[2].y, swap[2].y)) == set(zip(plain[1].y, swap[1].y))
    assert (make(Task(random_labels=1.), Streams(3))[0].y == rnd[0].y).all()
    assert (make(Task(random_labels=1.), Streams(4))[0].y != rnd[0].y).any()


# Pixels

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
        if any(t.affine): o = TF.affine(o, q['angle'], [0, 0], q['zoom'], [q['shear'], 0], interpolation=TF.InterpolationMode.BILINEAR)
        if any(t.jitter):
            o = TF.adjust_contrast(TF.adjust_brightness(o, q['brightness']), q['contrast'])
            if len(o) == 3: o = TF.adjust_hue(TF.adjust_saturation(o, q['saturation']), q['hue'])
        res.append(o)
    return torch.stack(res)


@pytest.mark.parametrize('h', [13, 20, 32])
@pytest.mark.parametrize('kw', [{}, dict(flip=True), dict(vflip=True), dict(shift=.3), dict(shift=1.), dict(crop=True), dict(blur=.25), dict(channels=1),
    dict(crop=True, flip=True, shift=.5, vflip=True, blur=.5), dict(affine=(30, 0, 0)), dict(affine=(0, 40, 0)), dict(affine=(10, 40, .4)),
    dict(jitter=(.5, 0, 0, 0)), dict(jitter=(0, .5, 0, 0)), dict(jitter=(0, 0, .5, 0)), dict(jitter=(0, 0, 0, .5)), dict(channels=1, jitter=(.5, .5, 0, 0)),
    dict(crop=True, flip=True, shift=.1, affine=(5, 5, .1), jitter=(.5, .5, .25, .1))], ids=str)
def test_pixels_agree_with_torchvision(kw, h):
    t = Task(**kw)
    n = round(h * 248 / 224) if t.crop else h
    p = draw(t, len(raw), h, h, Streams(1).data)
    ours = augment(t, prepare(t, raw, n, n), h, h, p)
    exact = not (any(t.affine) or any(t.jitter))
    assert ours.shape[-2:] == (h, h)
    torch.testing.assert_close(ours, reference(t, raw, h, p), atol=2e-6 if exact else 2e-4, rtol=0)


def test_affine_of_images_that_are_not_square():
    x = torch.rand(3, 1, 12, 20)
    a, s, z = torch.tensor([10., -30, 80]), torch.tensor([0., 20, -5]), torch.tensor([1., .7, 1.3])
    want = torch.stack([TF.affine(x[i], a[i].item(), [0, 0], z[i].item(), [s[i].item(), 0], interpolation=TF.InterpolationMode.BILINEAR) for i in range(3)])
    torch.testing.assert_close(vision.affine(x, a, s, z), want, atol=1e-4, rtol=0)


def test_draws_stay_in_their_ranges_and_columns():
    t = Task(crop=True, flip=True, shift=.5, affine=(10, 20, .4), jitter=(.5, .4, .3, .1))
    p = draw(t, 5000, 32, 32, Streams(0).data)
    assert p['top'].min() == 0 and p['top'].max() == 3                 # 35 - 32
    assert p['dx'].min() == -16 and p['dx'].max() == 16
    assert abs(p['flip'].float().mean() - .5) < .05 and not p['vflip'].any()
    assert p['angle'].abs().max() <= 10 and p['hue'].abs().max() <= .1 and p['zoom'].min() >= .6
    q = draw(t.replace(shift=0., affine=(0, 0, 0)), 5000, 32, 32, Streams(0).data)
    assert (p['flip'] == q['flip']).all() and (p['top'] == q['top']).all() and not q['dx'].any()


# fastai

@pytest.fixture(scope='module')
def small(): return dls(Task(n_train=400, shift=.2, flip=True), seed=1, bs=32, device='cpu')

def epoch(dl): return [tuple(torch.as_tensor(o) for o in b) for b in dl]
def same(a, b): return len(a) == len(b) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b))


def test_loader_lengths():
    d = dls(Task(n_train=400), bs=32, device='cpu')
    assert [len(dl.dataset) for dl in d] == [360, 40, 360] and [len(dl) for dl in d] == [11, 1, 6]
    assert [sum(len(b[1]) for b in dl) for dl in d] == [352, 40, 360]
    assert sum(len(b[1]) for b in dls(Task(n_train=400), bs=32, device='cpu', drop_last=False).train) == 360
    assert len(dls(Task(n_train=20), bs=500, device='cpu').train) == 1       # fewer images than a batch
    d = dls(Task(valid=0.), device='cpu')
    assert len(d.valid.dataset) == 360 and d.c == 10 and d.vocab[3] == '3'


def test_batches_follow_from_seed_and_epoch_alone():
    new = lambda **kw: dls(Task(n_train=200, shift=.3), device='cpu', **kw).train
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
    d = dls(Task(n_train=100, shift=.2), device='cpu')
    for dl in d: epoch(dl)
    d.one_batch()
    d.test_dl(d[2].dataset.x[:3]).one_batch()
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate() and (before[2] == np.random.get_state()[1]).all()


def test_validation_is_not_augmented(small):
    a, b = epoch(small.valid), epoch(small.valid)
    plain = epoch(dls(Task(n_train=400), seed=1, bs=32, device='cpu').valid)
    assert same(a, b) and same(a, plain)


def test_normalisation():
    x = torch.cat([b[0] for b in dls(Task(), bs=100, device='cpu', drop_last=False).train])
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
    x = dls(Task(normalize='none'), device='cpu').one_batch()[0]
    assert 0 <= x.min() and x.max() <= 1
    t = Task(normalize='imagenet', channels=3)
    x, u = (dls(t.replace(normalize=n), device='cpu').one_batch()[0] for n in ('imagenet', 'none'))
    torch.testing.assert_close(torch.as_tensor(x), TF.normalize(torch.as_tensor(u), *vision.IMAGENET_STATS))
    assert x.shape[1] == 3 and len(stats(Task(normalize='imagenet'), make(Task(), Streams(0))[0])[0]) == 1


def learner(d, **kw):
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    torch.manual_seed(0)
    c = d.one_batch()[0].shape[1]
    net = nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, d.c))
    return Learner(d, net, metrics=accuracy, **kw)


def test_learner(tmp_path):
    learn = learner(dls(Task(), device='cpu'), path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(show_plot=False, num_it=20)
        learn.fit(5, 3e-3)
        assert learn.validate()[1] > .8
        preds, targs = learn.get_preds(ds_idx=2)
        assert (preds.argmax(1) == targs).float().mean() > .7
        assert len(learn.get_preds(ds_idx=0)[0]) == len(learn.dls.train_ds)
        np.testing.assert_array_equal(learn.get_preds(ds_idx=0)[1].numpy(), learn.dls.train_ds.y)    # in the order of the dataset
        ds = learn.dls[2].dataset
        files = []
        for i in range(3): files.append(tmp_path / f'{i}.png'); ds[i][0].save(files[-1])
        for items in (ds.x[:3], list(ds.x[:3]), files, [str(f) for f in files], [ds[i][0] for i in range(3)], [ds[i] for i in range(3)],
                      torch.from_numpy(ds.x[:3])[:, None], [ds[i][0].convert('RGB') for i in range(3)]):
            got = learn.get_preds(dl=learn.dls.test_dl(items))[0]
            torch.testing.assert_close(got, preds[:3], atol=1e-5, rtol=0)
        dl = learn.dls.test_dl([(ds[i][0], str(ds[i][1])) for i in range(3)], with_labels=True)
        assert learn.get_preds(dl=dl)[1].tolist() == ds.y[:3].tolist()
        label, i, p = learn.predict(files[0])
        assert label == str(int(i)) and int(i) == preds[0].argmax()
        learn.export('x.pkl')
    # a fresh process, which has imported nothing of ours
    code = ("import sys, warnings; warnings.simplefilter('ignore')\nfrom fastai.learner import load_learner\nimport fastai.callback.progress\nl = load_learner(sys.argv[1])\n"
            "with l.no_bar(): print('label', l.predict(sys.argv[2])[0], len(l.dls.train_ds))")
    r = subprocess.run([sys.executable, '-c', code, tmp_path / 'x.pkl', files[0]], capture_output=True, text=True)
    assert f'label {label} 0' in r.stdout, r.stderr


def test_interpretation_and_tta():
    plt = pytest.importorskip('matplotlib.pyplot')
    from fastai.interpret import ClassificationInterpretation
    learn = learner(dls(Task(shift=.3), device='cpu'))
    with learn.no_bar(), learn.no_logging():
        it = ClassificationInterpretation.from_learner(learn)
        assert it.confusion_matrix().sum() == len(learn.dls.valid_ds) and list(it.vocab) == [str(i) for i in range(10)]
        it.plot_top_losses(4)
        plain, (mixed, targs) = learn.get_preds()[0], learn.tta(n=2, beta=0)
        assert mixed.shape == plain.shape and not torch.allclose(mixed, plain) and targs.tolist() == learn.dls.valid_ds.y.tolist()
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
    learn = vision_learner(dls(Task(n_train=60, size=32, channels=3), bs=20, device='cpu'), resnet18, pretrained=False)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert learn.model[-1][-1].out_features == 10


def test_image_dl_is_found_by_name_and_pickles(small):
    from fastai.data.core import TfmdDL
    assert issubclass(vision.ImageDL, TfmdDL) and isinstance(small.train, vision.ImageDL)
    with pytest.raises(AttributeError): vision.ImageLD
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
        assert dls(t, bs=4, device='cpu').one_batch()[0].isfinite().all()


# Real data

@pytest.mark.data
def test_every_available_dataset_loads():
    for name in set(available()) & set(catalogue().index):
        d, row = load(name), catalogue().loc[name]
        assert len(d.classes) == row.classes and (d.x_train.ndim == 4) == (row.channels == 3)
        assert row.pixels in (0, d.x_train.shape[1]) and len(set(d.y_train)) == row.classes
        x, y = dls(Task(name, size=16, channels=3, n_train=2 * row.classes, crop=True), bs=8, device='cpu').one_batch()
        assert x.shape == (8, 3, 16, 16) and y.max() < row.classes


@pytest.mark.data
def test_weights_are_not_taken_for_images():
    assert 'resnet50_imagenet' not in available()


@pytest.mark.data
@pytest.mark.data
def test_cifar_pixels_agree_with_torchvision():
    t = Task('cifar10', crop=True, flip=True, shift=.1)
    x = torch.from_numpy(load('cifar10').x_train[:64]).permute(0, 3, 1, 2)
    p = draw(t, 64, 32, 32, Streams(0).data)
    torch.testing.assert_close(augment(t, prepare(t, x, 35, 35), 32, 32, p), reference(t, x, 32, p), atol=2e-6, rtol=0)

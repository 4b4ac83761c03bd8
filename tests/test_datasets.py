"Datasets: the catalog, the places where images come from, and files that are wrong or damaged"
import os
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from reinit_nb import datasets
from reinit_nb.core import ReinitError
from reinit_nb.datasets import (
    available_datasets,
    can_download,
    dataset_catalog,
    dataset_source,
    download_dataset,
    load_dataset,
)
from reinit_nb.vision import Task, image_dls, paper_tasks

pytestmark = pytest.mark.filterwarnings('ignore:.*torch.jit.script')


@pytest.fixture
def box(tmp_path, monkeypatch):
    "An empty data folder and an empty cache"
    monkeypatch.setenv('REINIT_DATA', str(tmp_path / 'data'))
    monkeypatch.setenv('REINIT_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'data').mkdir()
    datasets._read.cache_clear()
    yield tmp_path / 'data'
    datasets._read.cache_clear()


def arrays(n=40, hw=(6, 5), classes=4, color=True, seed=0):
    rng = np.random.default_rng(seed)
    shape = (*hw, 3) if color else hw
    def images(n): return rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    return dict(x_train=images(n), y_train=np.arange(n) % classes,
                x_test=images(n // 2), y_test=np.arange(n // 2) % classes,
                classes=np.array([f'class {i}' for i in range(classes)]))


def write_folder(root, d, suffix='png'):
    "Write the same images as a folder"
    for part in ('train', 'test'):
        for i, (image, label) in enumerate(zip(d[f'x_{part}'], d[f'y_{part}'])):
            file = root / part / str(d['classes'][label]) / f'{i:03}.{suffix}'
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return root


def fails(f, *words):
    with pytest.raises(ReinitError) as e: f()
    for word in words: assert word in str(e.value), (word, str(e.value))


# ---------------------------------------------------------------- catalog

def test_catalog_has_every_dataset_of_the_papers():
    df = dataset_catalog()
    assert {task.dataset for tasks in paper_tasks().values() for task in tasks} <= set(df.index)
    others = {'digits', 'mnist', 'svhn', 'imagenet', 'birds2010', 'patch_camelyon', 'resisc45', 'emnist_letters'}
    assert others <= set(df.index)
    assert ((df.torchvision != '') | (df.by_hand != '')).all()   # for each dataset there is a way to obtain it


def test_torchvision_has_the_classes_named():
    from torchvision import datasets as tv
    assert all(hasattr(tv, c) for c in dataset_catalog().torchvision if c)


def test_table_4_sizes():
    df = dataset_catalog()
    want = dict(oxford_pet=(3680, 3669), stanford_dogs=(12000, 8580), cars196=(8144, 8041), caltech101=(3060, 6084),
                cassava=(5656, 1885), birds2010=(3000, 3033))
    assert {n: tuple(df.loc[n, ['train', 'test']]) for n in want} == want


# ---------------------------------------------------------------- places

def test_npz_before_folder_before_the_rest(box):
    assert dataset_source('digits') == 'scikit-learn'
    assert dataset_source('mine') is None
    write_folder(box / 'digits', arrays(color=False))
    assert dataset_source('digits') == 'folder'
    assert load_dataset('digits').x_train.shape == (40, 6, 5)
    np.savez(box / 'digits.npz', **arrays())
    assert dataset_source('digits') == 'npz'
    assert load_dataset('digits').x_train.shape == (40, 6, 5, 3)


def test_folder_and_npz_hold_the_same(box):
    d = arrays()
    np.savez_compressed(box / 'a.npz', **d)
    write_folder(box / 'b', d)
    a, b = load_dataset('a'), load_dataset('b')
    assert a.classes == b.classes
    assert set(available_datasets()) >= {'a', 'b'}
    for c in range(4):
        np.testing.assert_array_equal(a.x_train[a.y_train == c], b.x_train[b.y_train == c])
        np.testing.assert_array_equal(a.x_test[a.y_test == c], b.x_test[b.y_test == c])


def test_changed_file_is_read_again(box):
    np.savez(box / 'a.npz', **arrays(seed=0))
    first = load_dataset('a').x_train
    np.savez(box / 'a.npz', **arrays(seed=1))
    os.utime(box / 'a.npz', ns=(1, 1))
    assert (load_dataset('a').x_train != first).any()


@pytest.mark.parametrize('kind', ['npz', 'folder'])
def test_large_arrays_are_memory_mapped(box, monkeypatch, kind):
    monkeypatch.setattr(datasets, 'MMAP_BYTES', 100)
    d = arrays()
    if kind == 'npz': np.savez(box / 'a.npz', **d)
    else: write_folder(box / 'a', d)
    x = load_dataset('a').x_train
    assert isinstance(x, np.memmap) and x.filename
    assert not list((box.parent / 'cache').glob('*.tmp'))
    assert sorted(x.sum((1, 2, 3))) == sorted(d['x_train'].sum((1, 2, 3)))
    datasets._read.cache_clear()
    assert (load_dataset('a').x_train == x).all()      # from the cache
    xb, yb = image_dls(Task('a'), bs=8, device='cpu').one_batch()
    assert xb.shape == (8, 3, 6, 5)


def test_no_part_of_a_file_stays_in_the_cache_after_an_error(box, monkeypatch):
    monkeypatch.setattr(datasets, 'MMAP_BYTES', 100)
    write_folder(box / 'a', arrays())
    bad = sorted((box / 'a' / 'train').rglob('*.png'))[7]
    bad.write_bytes(bad.read_bytes()[:60])
    fails(lambda: load_dataset('a'), bad.name)
    assert not list((box.parent / 'cache').glob('*'))


def test_huge_datasets_are_streamed(box, monkeypatch):
    "Nothing is decoded in advance, and the batches of two epochs, augmentation included, are those in memory"
    write_folder(box / 'a', arrays())
    task = Task('a', flip=True, shift=.2)
    def epochs():
        datasets._read.cache_clear()
        dls = image_dls(task, seed=3, bs=8, device='cpu')
        return dls, [b for _ in range(2) for b in dls.train] + list(dls.valid)
    _, want = epochs()
    monkeypatch.setattr(datasets, 'STREAM_BYTES', 100)
    dls, got = epochs()
    x = dls.train.dataset.x
    assert isinstance(x, datasets.StreamedImages) and not list((box.parent / 'cache').glob('*'))
    assert len(got) == len(want)
    for a, b in zip(got, want): assert all(torch.equal(u, v) for u, v in zip(a, b))
    x = pickle.loads(pickle.dumps(x))
    assert x[2].shape == x.shape[1:]
    assert x[[0, 3]].shape == x[1:3].shape == (2, *x.shape[1:])
    assert len(x[:0]) == 0
    bad = sorted((box / 'a' / 'train').rglob('*.*'))[0]
    bad.write_bytes(bad.read_bytes()[:30])
    with pytest.raises(ReinitError, match=bad.name): list(dls.train)


class FakeMNIST:
    def __init__(self, root, train, download):
        n = 20 if train else 10
        self.data, self.targets = torch.zeros(n, 28, 28, dtype=torch.uint8), torch.arange(n) % 10
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
    ('mnist', FakeMNIST, (20, 28, 28), 10), ('emnist_letters', FakeEMNIST, (52, 3, 2), 26),
    ('svhn', FakeSVHN, (20, 32, 32, 3), 20), ('oxford_pet', FakePet, (4, 16, 16, 3), 4),
    ('caltech101', FakeCaltech, (60, 16, 16, 3), 15)])
def test_torchvision(box, monkeypatch, name, fake, train, test):
    from torchvision import datasets as tv
    monkeypatch.setattr(tv, dataset_catalog().torchvision[name], fake)
    d = load_dataset(name, size=16, download=True)
    assert d.x_train.shape == train and len(d.x_test) == test and d.y_train.min() == 0
    if name == 'emnist_letters':
        assert d.classes[0] == 'a'
        assert d.x_train[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    if name == 'oxford_pet': fails(lambda: load_dataset(name, download=True), 'size')


def test_a_dataset_is_downloaded_once(box, monkeypatch):
    "Two that ask at once: one downloads, the other waits and finds it"
    from torchvision import datasets as tv
    calls, lock = [], threading.Lock()
    class Slow:
        def __init__(self, root, train=True, download=False):
            if download:
                with lock: calls.append(train)
                time.sleep(.05)
            elif not calls: raise RuntimeError('not found')
    monkeypatch.setattr(tv, 'MNIST', Slow)
    monkeypatch.setattr(datasets, 'dataset_source', lambda name: 'torchvision' if len(calls) == 2 else None)
    with ThreadPoolExecutor(2) as pool: got = list(pool.map(download_dataset, ['mnist'] * 2))
    assert sorted(got) == ['downloaded', 'torchvision'] and calls == [True, False]
    assert not list((box.parent / 'cache').rglob('*.lock'))


class InTwoFiles:
    "As SVHN: one file for each part"
    broken = False

    def __init__(self, root, train=True, download=False):
        file = Path(root) / ('train' if train else 'test')
        if download and not file.exists():
            if self.broken and not train: raise RuntimeError('the connection was lost')
            file.write_text('images')
        if not file.exists(): raise RuntimeError('not found')


def test_a_part_that_is_missing_is_downloaded(box, monkeypatch):
    "Training images alone are no dataset: `get` repairs what an interruption has left"
    from torchvision import datasets as tv
    monkeypatch.setattr(tv, 'MNIST', InTwoFiles)
    folder = datasets.cache_dir() / 'torchvision'
    folder.mkdir(parents=True)
    (folder / 'train').write_text('images')
    assert dataset_source('mnist') is None
    assert download_dataset('mnist') == 'downloaded' and dataset_source('mnist') == 'torchvision'
    assert {p.name for p in folder.iterdir() if p.is_file()} == {'train', 'test'}
    assert download_dataset('mnist') == 'torchvision'


def test_an_incomplete_download_is_not_seen(box, monkeypatch):
    "Parts are moved to their place when all are there; the next attempt begins with an empty folder"
    from torchvision import datasets as tv
    monkeypatch.setattr(tv, 'MNIST', InTwoFiles)
    monkeypatch.setattr(InTwoFiles, 'broken', True)
    fails(lambda: download_dataset('mnist'), 'the connection was lost')
    folder = datasets.cache_dir() / 'torchvision'
    assert dataset_source('mnist') is None and not (folder / 'train').exists()
    monkeypatch.setattr(InTwoFiles, 'broken', False)
    assert download_dataset('mnist') == 'downloaded'
    assert {p.name for p in folder.iterdir() if p.is_file()} == {'train', 'test'}


def test_a_dataset_that_is_being_downloaded_is_waited_for(box, monkeypatch):
    "It is asked for under the lock only"
    from torchvision import datasets as tv
    monkeypatch.setattr(tv, 'MNIST', InTwoFiles)
    folder = datasets.cache_dir() / 'torchvision'
    started = threading.Event()
    def other():
        with datasets.wait_lock(folder / '.mnist.lock'):
            (folder / 'train').write_text('images')
            started.set()
            time.sleep(.3)
            (folder / 'test').write_text('images')
    thread = threading.Thread(target=other)
    thread.start()
    started.wait()
    assert download_dataset('mnist') == 'torchvision'   # not `downloaded`
    thread.join()


def test_what_torchvision_cannot_download(box):
    can = {name for name in dataset_catalog().index if can_download(name)}
    assert {'mnist', 'cifar10', 'svhn', 'oxford_pet', 'caltech101'} <= can
    assert not can & {'imagenet', 'cars196', 'stanford_dogs', 'resisc45', 'digits'}
    fails(lambda: download_dataset('cars196'), 'its download has ended')
    fails(lambda: download_dataset('minst'), "did you mean 'mnist'?")
    assert download_dataset('digits') == 'scikit-learn'


def test_large_arrays_are_extracted_once(box, monkeypatch):
    "Two that read a large file for the first time: one writes the cache, the other waits"
    np.savez_compressed(box / 'own.npz', **arrays())
    monkeypatch.setattr(datasets, 'MMAP_BYTES', 100)
    real, written = shutil.copyfileobj, []
    def copy(f, g, n):
        written.append(g.name)
        time.sleep(.02)
        real(f, g, n)
    monkeypatch.setattr(datasets.shutil, 'copyfileobj', copy)
    def read(_): return datasets._npz_array(box / 'own.npz', 'x_train')
    with ThreadPoolExecutor(2) as pool: a, b = pool.map(read, range(2))
    assert len(written) == 1 and (a == b).all()


# ---------------------------------------------------------------- wrong input

def test_missing_data_names_three_ways(box):
    fails(lambda: load_dataset('mnist'), 'mnist.npz', 'mnist/train/<class>/*', 'download=True', 'digits')
    fails(lambda: load_dataset('stanford_dogs'), 'cannot download', 'train_list.mat')
    fails(lambda: load_dataset('fashionmnist'), "did you mean 'fashion_mnist'?")
    fails(lambda: image_dls(Task('minst')), "did you mean 'mnist'?")
    assert 'mnist.npz' in datasets.missing_dataset('mnist') and datasets.missing_dataset('digits') is None


def test_failed_download_is_reported(box, monkeypatch):
    from torchvision import datasets as tv
    def broken(*a, **kw): raise RuntimeError('no network')
    monkeypatch.setattr(tv, 'MNIST', broken)
    fails(lambda: load_dataset('mnist', download=True), 'no network', 'Three ways')


@pytest.mark.parametrize('change,words', [
    (dict(y_test=np.full(20, 4)), ('y_test', 'labels [4]', '4 classes')),
    (dict(y_train=np.arange(40) - 1), ('labels [-1',)),
    (dict(x_train=np.zeros((40, 6, 5))), ('float64', 'uint8')),
    (dict(x_train=np.zeros((40, 3, 6, 5), np.uint8)), ('N×H×W',)),
    (dict(y_train=np.zeros(3, int)), ('40 images',)),
    (dict(x_test=np.zeros((20, 6, 5), np.uint8)), ('gray',))])
def test_arrays_that_do_not_fit(box, change, words):
    np.savez(box / 'a.npz', **(arrays() | change))
    fails(lambda: load_dataset('a'), *words)


@pytest.mark.parametrize('missing', ['x_train', 'y_test', 'classes'])
def test_npz_without_an_array(box, missing):
    np.savez(box / 'a.npz', **{k: v for k, v in arrays().items() if k != missing})
    fails(lambda: load_dataset('a'), f'has no {missing}: it needs')


@pytest.mark.parametrize('keep', [0, 10, 500, 2000, -30])
@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_truncated_npz_is_named(box, save, keep):
    save(box / 'a.npz', **arrays())
    raw = (box / 'a.npz').read_bytes()
    (box / 'a.npz').write_bytes(raw[:keep])
    fails(lambda: load_dataset('a'), 'a.npz')


def test_flipped_byte_in_npz_is_noticed(box):
    np.savez(box / 'a.npz', **arrays())
    raw = bytearray((box / 'a.npz').read_bytes())
    raw[1000] ^= 255
    (box / 'a.npz').write_bytes(raw)
    fails(lambda: load_dataset('a'), 'a.npz')


def test_npz_with_objects_is_refused(box):
    np.savez(box / 'a.npz', **(arrays() | dict(classes=np.array([{}, 1, 2, 3], dtype=object))))
    fails(lambda: load_dataset('a'), 'a.npz')


@pytest.mark.parametrize('suffix,keep', [('png', 0), ('png', 20), ('png', 70), ('jpg', 100), ('bmp', 60)])
def test_damaged_image_is_named(box, suffix, keep):
    file = sorted(write_folder(box / 'a', arrays(), suffix).rglob('*.' + suffix))[3]
    file.write_bytes(file.read_bytes()[:keep])
    fails(lambda: load_dataset('a'), file.name)


def test_folders_that_do_not_fit(box):
    write_folder(box / 'a', arrays())
    (box / 'a/test').rename(box / 'a/tset')
    fails(lambda: load_dataset('a'), "no folder 'test'")
    (box / 'a/tset').rename(box / 'a/test')
    (box / 'a/test/stranger').mkdir()
    fails(lambda: load_dataset('a'), 'stranger')
    (box / 'b/train/x').mkdir(parents=True)
    (box / 'b/test/x').mkdir(parents=True)
    fails(lambda: load_dataset('b'), 'no images')


def test_sizes_that_differ(box):
    write_folder(box / 'a', arrays())
    Image.new('RGB', (9, 9)).save(box / 'a/train/class 0/z.png')
    fails(lambda: load_dataset('a'), 'different sizes', 'size')
    assert load_dataset('a', size=7).x_train.shape == (41, 7, 7, 3)
    task = Task('a', size=14, crop=True)
    assert image_dls(task, bs=4, device='cpu').one_batch()[0].shape == (4, 3, 14, 14)


def test_unwritable_cache(box, monkeypatch):
    (box / 'file').write_text('x')
    monkeypatch.setenv('REINIT_CACHE', str(box / 'file/below'))
    fails(datasets.cache_dir, 'REINIT_CACHE')
    monkeypatch.setattr(datasets, 'MMAP_BYTES', 100)
    np.savez(box / 'a.npz', **arrays())
    fails(lambda: load_dataset('a'), 'REINIT_CACHE')


# ---------------------------------------------------------------- real data

@pytest.mark.data
def test_every_available_dataset_loads():
    catalog = dataset_catalog()
    for name in set(available_datasets()) & set(catalog.index):
        d, row = load_dataset(name), catalog.loc[name]
        assert len(d.classes) == row.classes and (d.x_train.ndim == 4) == (row.channels == 3)
        assert row.pixels in (0, d.x_train.shape[1]) and len(set(d.y_train)) == row.classes
        task = Task(name, size=16, channels=3, n_train=2 * row.classes, crop=True)
        x, y = image_dls(task, bs=8, device='cpu').one_batch()
        assert x.shape == (8, 3, 16, 16) and y.max() < row.classes


@pytest.mark.data
def test_weights_are_not_taken_for_images():
    assert 'resnet50_imagenet' not in available_datasets()

"The prefix cache: where a network can be cut, and training from the cache changes no bit"

import copy
from functools import partial

import fastai.callback.schedule  # noqa: F401  adds lr_find
import numpy as np
import pytest
import torch
import torchvision
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam
from freezing_helpers import data, err, exact, learner, quiet_fit, same, small, snap, under
from torch import nn

from reinit_nb.core import ReinitError
from reinit_nb.freezing import (
    FrozenLayersCallback,
    freeze_layers,
    freeze_out,
    gradual_unfreezing,
)
from reinit_nb.models import model
from reinit_nb.prefix_cache import CachedPrefixCallback, cached_prefix, clean_cuts, frozen_prefix
from reinit_nb.vision import Task, image_dls

# ---------------------------------------------------------------- cuts


class Branches(nn.Module):
    "A functional addition, a skip over the cut, a module used twice"

    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b, self.act, self.c = kind, nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x):
        a = self.a(x)
        if self.kind == 'shared':
            return self.c(self.act(self.b(self.act(a))))
        if self.kind == 'skip':
            return self.c(self.b(a) + a)
        if self.kind == 'input':
            return self.c(self.b(a) + x)
        if self.kind == 'functional':
            return self.c(self.b(torch.tanh(a)))


def test_cuts():
    x = torch.randn(2, 6)
    assert clean_cuts(Branches('shared'), x).module.tolist() == ['a', 'act', 'b', 'act']
    assert clean_cuts(Branches('skip'), x).module.tolist() == ['a']
    assert clean_cuts(Branches('input'), x).module.tolist() == []
    assert clean_cuts(Branches('functional'), x).module.tolist() == ['a']
    net = Branches('input')
    freeze_layers(net, ['a', 'b'])
    err(lambda: frozen_prefix(net, x), 'no clean cut')
    err(lambda: frozen_prefix(small(), x), '0.weight is trained')
    net = Branches('shared')
    freeze_layers(net, 'a')
    net.b.requires_grad_(False)
    assert frozen_prefix(net, x).chain == ('a', 'act', 'b', 'act')
    err(lambda: frozen_prefix(net, x, upto='d'), "upto='d'")


def test_watching_leaves_everything_alone():
    net = torchvision.models.resnet18(num_classes=4).train()
    before, state = snap(net), torch.get_rng_state()
    clean_cuts(net, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert same(before, snap(net)) == set(before)
    assert torch.equal(state, torch.get_rng_state())
    assert all(m.training for m in net.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize(
    'name,front,cut',
    [
        ('resnet18', ['conv1', 'bn1', 'layer1', 'layer2', 'layer3'], 'layer3'),
        ('vgg11', 'features', 'avgpool'),
        ('mobilenet_v2', 'features', 'features'),
        ('densenet121', 'features', 'features'),
        ('squeezenet1_1', 'features', 'classifier.0'),
    ],
)
def test_cuts_of_torchvision(name, front, cut):
    net = getattr(torchvision.models, name)(num_classes=4)
    freeze_layers(net, front)
    net.eval()
    got = frozen_prefix(net, torch.randn(2, 3, 64, 64))
    assert got.module == cut


def test_timm():
    timm = pytest.importorskip('timm')
    net = timm.create_model('resnet18', num_classes=4).eval()
    freeze_layers(net, ['conv1', 'bn1', 'layer1'])
    assert frozen_prefix(net, torch.randn(2, 3, 64, 64)).module == 'layer1'
    vit = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=3, num_classes=4).eval()
    freeze_layers(vit, 'patch_embed')
    frozen_prefix(vit, torch.randn(2, 3, 32, 32))


# ---------------------------------------------------------------- the cache


def both(make, front, d, n=3, opt=Adam, **kw):
    "Train the same twice, without and with the cache; learners and report"
    out = []
    for cached in (False, True):
        net = make()
        learn = learner(net, opt, d())
        torch.manual_seed(5)
        cbs = [FrozenLayersCallback(**front) if isinstance(front, dict) else FrozenLayersCallback(front)] + (
            [cb := CachedPrefixCallback(**kw)] if cached else []
        )
        learn.add_cbs(cbs)
        try:
            quiet_fit(learn, n, 0.01, wd=0.1)
        except ReinitError as e:
            if 'on this machine' in str(e):
                pytest.skip('kernels of this machine round by place in the batch, and the cache says so')
            raise
        out.append(learn)
    return *out, cb


def assert_same(a, b):
    assert a.recorder.values == b.recorder.values or np.allclose(a.recorder.values, b.recorder.values, rtol=0, atol=0)
    x, y = snap(a.model), snap(b.model)
    assert same(x, y) == set(x)
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        s, t = a.opt.state[p], b.opt.state[q]
        assert s.keys() == t.keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(t[k])) for k, v in s.items())


@pytest.mark.parametrize('kind', ['fastai', 'torch'])
@pytest.mark.parametrize('n,bs', [(70, 16), (64, 16), (65, 16), (10, 16)])
@pytest.mark.parametrize('memory', [2**30, 0])
def test_cache_changes_no_bit(kind, n, bs, memory, tmp_path):
    plain, fast, cb = both(
        partial(small, drop=0.3), ['0', '1'], partial(data, n=n, bs=bs, kind=kind), memory=memory, folder=tmp_path
    )
    assert_same(plain, fast)
    assert len(list(tmp_path.iterdir())) == (4 if memory == 0 else 0)
    fast.remove_cb(cb)
    assert not list(tmp_path.iterdir())


def test_cache_goes_as_far_as_it_can():
    _, _, cb = both(partial(small, drop=0.3), ['0', '1'], data)
    assert cb.cut.module == '2' and cb.report.output.tolist() == [(8,)] * 2
    _, _, cb = both(partial(small, drop=0.3), ['0', '1', '3'], data)
    assert cb.cut.module == '4'  # dropout comes next, and belongs to the trained part


@pytest.mark.parametrize('name', ['resnet18', 'squeezenet1_1', 'mobilenet_v2'])
def test_cache_of_real_models(name):
    def make():
        torch.manual_seed(0)
        return getattr(torchvision.models, name)(num_classes=3)

    front = ['conv1', 'bn1', 'layer1', 'layer2', 'layer3'] if name == 'resnet18' else 'features'
    plain, fast, cb = both(make, front, partial(data, n=21, bs=8, shape=(3, 32, 32)), n=2)
    assert_same(plain, fast)


def test_cache_of_image_tasks():
    def make():
        torch.manual_seed(0)
        return model('scnn', c_in=1, size=8, width=0.25, norm='batch', dropout=0.2)

    plain, fast, cb = both(
        make, 'block[12]', lambda: image_dls(Task('digits', n_train=100), bs=32, device='cpu', drop_last=False), n=3
    )
    assert_same(plain, fast)
    assert cb.cut.module == 'block2'


def test_vision_learner():
    from fastai.vision.learner import vision_learner

    learn = vision_learner(
        image_dls(Task('digits', n_train=40, size=32, channels=3), bs=16, device='cpu'),
        torchvision.models.resnet18,
        pretrained=False,
        normalize=False,
    ).remove_cb(ProgressCallback)
    learn.freeze()  # fastai goes on training BatchNorm: only the first convolution is a frozen front
    with cached_prefix(learn) as cb:
        quiet_fit(learn, 1, 0.01)
        assert cb.cut.module == '0.0'
    before = snap(learn.model)
    with cached_prefix(learn) as cb:
        quiet_fit(learn, 1, 0.01, cbs=FrozenLayersCallback('0'))
        assert cb.cut.module == '1.1'
    assert under(before, '0.') <= same(before, snap(learn.model))


@pytest.mark.parametrize('schedule', ['unfreezing', 'freezeout', 'middle of an epoch'])
def test_cache_with_a_schedule(schedule):
    net = mlp_plain()
    s = {
        'unfreezing': gradual_unfreezing(net, 'layers'),
        'freezeout': freeze_out(net, 'layers', t0=0.25),
        'middle of an epoch': [(0.1, ('0', '1')), (0.6, '0')],
    }[schedule]
    plain, fast, cb = both(mlp_plain, dict(schedule=s), partial(data, n=64, shape=(32,)), n=4)
    assert_same(plain, fast)


def mlp_plain():
    torch.manual_seed(0)
    return exact(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(i, 32), nn.ReLU()) for i in (32, 32, 32)),
            nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 3)),
        )
    )


def test_several_fits_share_a_cache():
    net, calls = small(), []
    learn = learner(net)
    net[0].register_forward_hook(lambda *a: calls.append(1))
    with cached_prefix(learn) as cb:
        quiet_fit(learn, 1, cbs=FrozenLayersCallback(['0', '1']))
        store = cb.stores['train']
        quiet_fit(learn, 2, cbs=FrozenLayersCallback(['0', '1']))
        assert cb.stores['train'] is store
        with torch.no_grad():
            net[0].weight.add_(1)
        quiet_fit(learn, 1, cbs=FrozenLayersCallback(['0', '1']))
        assert cb.stores['train'] is not store
    assert not cb.stores


def test_other_inputs_run_through_all_of_it():
    net, seen = small(), []
    learn = learner(net)

    class Asks(Callback):
        def after_batch(self):
            if self.training and self.iter == 1:
                x, _ = self.dls.valid.one_batch()
                a = net(x)
                b = copy.deepcopy(net[6])(net[4](net[3](net[2](net[1](net[0](x))))))
                seen.append(torch.equal(a, b))

        def after_epoch(self):
            if self.learn.lock.locked():
                return
            with self.learn.no_bar():
                seen.append(len(self.learn.get_preds(ds_idx=0)[0]) == 70)

    quiet_fit(learn, 2, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), Asks()])
    assert seen == [True] * 4


def test_prefix_is_computed_once():
    net, n = small(bn=False), [0]

    class Counts(nn.Linear):
        def forward(self, x):
            n[0] += len(x)
            return super().forward(x)

    net[0] = Counts(6, 8)
    exact(net)
    quiet_fit(learner(net), 10, cbs=[FrozenLayersCallback('0'), CachedPrefixCallback()])
    assert n[0] < 3 * (70 + 35)  # instead of ten times


def test_images_of_other_batches_matter():
    class Center(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    net = nn.Sequential(nn.Linear(6, 8), Center(), nn.Linear(8, 3))
    err(
        lambda: quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback('0'), CachedPrefixCallback()]),
        'depends on the other images',
    )


def test_cache_refuses():
    net = exact(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 3)))
    err(
        lambda: quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback('[02]'), CachedPrefixCallback()]),
        'not deterministic',
        'dropout',
        "upto='0'",
    )
    quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback('[02]'), CachedPrefixCallback(upto='0')])
    err(
        lambda: quiet_fit(
            learner(small()), 1, cbs=[FrozenLayersCallback(['0', '1'], bn='train'), CachedPrefixCallback()]
        ),
        'BatchNorm in training mode',
    )
    err(lambda: quiet_fit(learner(small()), 1, cbs=CachedPrefixCallback()), 'nothing at the front is frozen')
    err(
        lambda: quiet_fit(
            learner(small()), 1, cbs=[FrozenLayersCallback('0', share=0.9, bias=True), CachedPrefixCallback()]
        ),
        '0.weight is trained',
    )

    class Noisy(list):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn(6) * 1e-3, y

    for loader in (DataLoader, torch.utils.data.DataLoader):
        d = DataLoaders(
            loader(Noisy(zip(torch.randn(40, 6), torch.randint(3, (40,)))), batch_size=8, shuffle=True), data().valid
        )
        err(
            partial(
                quiet_fit, learner(small(), d=d), 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback()]
            ),
            'augmented',
        )
    from fastai.callback.mixup import MixUp

    err(
        lambda: quiet_fit(learner(small()), 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), MixUp()]),
        'MixUp',
    )
    for task in (dict(shift=0.1), dict(flip=True), dict(jitter=(0.1, 0, 0, 0))):
        dls = image_dls(Task('digits', n_train=60, **task), bs=16, device='cpu')
        learn = Learner(dls, model('scnn', c_in=1, size=8, width=0.25)).remove_cb(ProgressCallback)
        err(partial(quiet_fit, learn, 1, cbs=[FrozenLayersCallback('block1'), CachedPrefixCallback()]), 'augmented')
    err(lambda: CachedPrefixCallback(folder='no/such/folder'), 'folder=')
    err(lambda: CachedPrefixCallback(memory=-1), 'memory=')


def test_rare_augmentation_is_known_by_its_class():
    from fastai.vision.all import CategoryBlock, DataBlock, FlipItem, ImageBlock, PILImageBW

    x = np.random.RandomState(0).randint(0, 255, (40, 8, 8)).astype(np.uint8)
    block = DataBlock(
        (ImageBlock(PILImageBW), CategoryBlock),
        get_x=lambda i: PILImageBW.create(x[i]),
        get_y=lambda i: i % 3,
        splitter=lambda o: (list(range(30)), list(range(30, 40))),
        item_tfms=[FlipItem(p=1e-9)],
    )
    d = block.dataloaders(range(40), bs=8, num_workers=0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))
    err(lambda: quiet_fit(learner(net, d=d), 1, cbs=[FrozenLayersCallback('1'), CachedPrefixCallback()]), 'FlipItem')


def test_a_changed_prefix_is_noticed():
    net = small()

    class Changes(Callback):
        def after_epoch(self):
            net[0].weight.data.add_(1)

    err(
        lambda: quiet_fit(learner(net), 1, cbs=[FrozenLayersCallback(['0', '1']), CachedPrefixCallback(), Changes()]),
        'was changed',
    )


def test_lr_find_with_the_cache(tmp_path):
    outs = []
    for cached in (False, True):
        learn = learner(small(), Adam, path=tmp_path)
        learn.add_cbs([FrozenLayersCallback(['0', '1'])] + [CachedPrefixCallback()] * cached)
        with learn.no_bar(), learn.no_logging():
            learn.lr_find(num_it=10, show_plot=False)
        outs.append([float(loss) for loss in learn.recorder.losses])
    assert outs[0] == outs[1]


def test_bits_that_depend_on_the_place():
    "As in some kernels: the last bit of a row depends on where in the batch it is"

    class ByPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + torch.arange(len(x))[:, None] % 2 * 1e-6)

    def fit(**kw):
        return quiet_fit(
            learner(exact(nn.Sequential(ByPlace(6, 8), nn.Linear(8, 3)))),
            1,
            cbs=[FrozenLayersCallback('0'), CachedPrefixCallback(**kw)],
        )

    err(fit, 'on this machine', 'exact=False')
    fit(exact=False)


def test_odd_sizes_are_computed_each_time():
    "A model whose bits depend on the size of the batch, as kernels do, but not on what is in it"

    class BySize(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + (len(x) != 16) * 1e-6)

    def make():
        torch.manual_seed(0)
        return exact(nn.Sequential(BySize(6, 8), nn.ReLU(), nn.Linear(8, 3)))

    plain, fast, cb = both(make, '0', data)
    assert_same(plain, fast)
    assert cb.report.computed_each_time.tolist() == [[6], []]

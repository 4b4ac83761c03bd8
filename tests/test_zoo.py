"`reinit_nb.zoo`: checkpoints of any origin are read safely, and fitted into networks by name"
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from reinit_nb.core import ReinitError
from reinit_nb.models import model
from reinit_nb.zoo import (
    FoldedShift,
    imagenet_input,
    load_arch,
    load_part,
    read_state,
    resnet18_imagenet,
    resnet18_imagenet_part,
    resnet50_imagenet,
)


def small(): return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))


def resnet():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torchvision.models.resnet18(num_classes=5)


# ---------------------------------------------------------------- files

STATE = small().state_dict()
FORMS = dict(plain=STATE, keyed=dict(model=STATE, opt=dict(lr=.1)),
             parallel=dict(state_dict={f'module.{k}': v for k, v in STATE.items()}),
             compiled={f'module._orig_mod.{k}': v for k, v in STATE.items()},
             nested=dict(epoch=1, model=dict(state_dict=STATE)))


@pytest.mark.parametrize('form', FORMS)
def test_read_state(tmp_path, form):
    torch.save(FORMS[form], tmp_path / 'a.pth')
    got = read_state(tmp_path / 'a.pth')
    assert list(got) == list(STATE)
    assert all(torch.equal(got[k], STATE[k]) for k in STATE)


def test_read_files_of_fastai(tmp_path):
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    learn = Learner(DataLoaders([], []), small(), loss_func=nn.CrossEntropyLoss(), path=tmp_path)
    learn.save('fastai')
    assert list(read_state(tmp_path / 'models/fastai.pth')) == list(STATE)


class Evil:
    def __reduce__(self): return os.mkdir, ('evil',)


def test_never_unpickled_unsafely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), 'a.pth')
    torch.save(dict(model=Evil()), 'b.pth')
    with open('c.pth', 'wb') as f: pickle.dump(Evil(), f)
    torch.save(small(), 'd.pth')
    for name in 'abd':
        with pytest.raises(ReinitError, match=r'holds more than tensors, and is not opened.*save model.state_dict\(\)'):
            read_state(f'{name}.pth')
    with pytest.raises(ReinitError, match="'c.pth'"): read_state('c.pth')
    assert not os.path.exists('evil')


def test_not_a_state_dict(tmp_path):
    torch.save([1, 2], tmp_path / 'a.pth')
    torch.save(dict(epoch=3, loss=.1), tmp_path / 'b.pth')
    (tmp_path / 'c.pth').write_bytes(b'hello')
    torch.save({}, tmp_path / 'd.pth')
    for name, said in (('a', 'holds a list, and no state dict'),
                       ('b', 'a dict with keys epoch, loss, and no state dict'),
                       ('c', 'damaged, or not written by torch.save'), ('d', 'no state dict'),
                       ('none', 'there is no file')):
        with pytest.raises(ReinitError, match=said): read_state(tmp_path / f'{name}.pth')
    with pytest.raises(ReinitError, match='cannot be read'): read_state(tmp_path)


# ---------------------------------------------------------------- networks by name

def test_load_arch():
    net = resnet()
    before = torch.get_rng_state()
    got = load_arch('resnet18', net.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert got.fc.out_features == 5 and type(got).__module__.startswith('torchvision')
    assert not got.training
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in got.state_dict().items())


def test_our_own_networks():
    state = model('resnet18', width=.25, c_in=1, n_out=4).state_dict()
    assert load_arch('resnet18', state, width=.25, c_in=1).head.classifier.out_features == 4
    assert load_arch('reinit_nb:resnet18', state, width=.25, c_in=1)


def test_networks_of_timm():
    timm = pytest.importorskip('timm')
    state = timm.create_model('resnet10t', num_classes=3).state_dict()
    assert load_arch('resnet10t', state).fc.out_features == 3


def test_files_that_do_not_fit():
    state = resnet().state_dict()
    cut = {k: v for k, v in state.items() if 'layer4' not in k}
    wrong_shape = state | {'conv1.weight': torch.zeros(64, 1, 7, 7)}
    for arch, given, said in (
            ('resnet18', cut, r'fit torchvision:resnet18: \d+ missing: layer4.0.conv1.weight, .* and \d+ more'),
            ('torchvision:resnet18', state | {'extra.weight': torch.zeros(2)}, '1 not in it: extra.weight'),
            ('torchvision:resnet18', wrong_shape, r'conv1.weight is \(64, 1, 7, 7\) and should be \(64, 3, 7, 7\)'),
            ('resnet81', state, "did you mean 'resnet18'?"), ('torch:resnet18', state, "arch='torch' is not known"),
            ('reinit_nb:nope', state, 'is not a network of reinit_nb')):
        with pytest.raises(ReinitError, match=said): load_arch(arch, given)
    with pytest.raises(ReinitError, match='cannot be made with'): load_arch('torchvision:resnet18', state, depth=3)


# ---------------------------------------------------------------- pre-trained

def test_weights_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.delenv('REINIT_DATA', raising=False)
    with pytest.raises(ReinitError, match='REINIT_DATA is not set.*IMAGENET1K_V1'): resnet50_imagenet()
    monkeypatch.setenv('REINIT_DATA', str(tmp_path))
    with pytest.raises(ReinitError, match='there is no file'): resnet50_imagenet()
    np.savez(tmp_path / 'resnet50_imagenet.npz', **{'conv1.weight': np.zeros((64, 3, 7, 7), np.float16)})
    with pytest.raises(ReinitError, match='does not hold a ResNet50'): resnet50_imagenet()
    whole = (tmp_path / 'resnet50_imagenet.npz').read_bytes()
    (tmp_path / 'resnet50_imagenet.npz').write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ReinitError, match='resnet50_imagenet.npz.*cannot be read'): resnet50_imagenet()
    np.savez(tmp_path / 'evil.npz', x=np.array([Path], dtype=object))
    with pytest.raises(ReinitError, match='cannot be read'): resnet50_imagenet(tmp_path / 'evil.npz')

def test_three_differences(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ref = torchvision.models.resnet50()
    np.savez(tmp_path / 'w.npz', **{k: v.numpy().astype(np.float16) for k, v in ref.state_dict().items() if v.dim()})
    before = torch.get_rng_state()
    net = resnet50_imagenet(tmp_path / 'w.npz')
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(t.is_meta for t in net.state_dict().values())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in net.parameters())
    assert {m.eps for m in net.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    for i, layer in enumerate((net.layer1, net.layer2, net.layer3, net.layer4)):
        assert layer[0].conv1.stride == ((2, 2) if i else (1, 1)) and layer[0].conv2.stride == (1, 1)
        assert all(m.stride == (1, 1) for b in layer[1:] for m in b.modules() if isinstance(m, nn.Conv2d))
    red = torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    red[:, 0] = 255
    assert imagenet_input(red).flatten().tolist() == pytest.approx([255 - 123.68, -116.779, -103.939])
    assert torch.equal(imagenet_input(red), imagenet_input(red / 255))

# Breeds of the Oxford pets that are ImageNet classes, under their names there. Left out are those that ImageNet
# lacks or splits (american_bulldog, american_pit_bull_terrier, havanese, shiba_inu, and all cats but three).
BREEDS = dict(
    basset_hound='basset', beagle='beagle', boxer='boxer', chihuahua='Chihuahua', Egyptian_Mau='Egyptian cat',
    english_cocker_spaniel='cocker spaniel', english_setter='English setter',
    german_shorthaired='German short-haired pointer', great_pyrenees='Great Pyrenees', japanese_chin='Japanese spaniel',
    keeshond='keeshond', leonberger='Leonberg', miniature_pinscher='miniature pinscher', newfoundland='Newfoundland',
    Persian='Persian cat', pomeranian='Pomeranian', pug='pug', saint_bernard='Saint Bernard', samoyed='Samoyed',
    scottish_terrier='Scotch terrier', Siamese='Siamese cat', staffordshire_bull_terrier='Staffordshire bullterrier',
    wheaten_terrier='soft-coated wheaten terrier', yorkshire_terrier='Yorkshire terrier')

def pets(n):
    "The first `n` test images of each breed in `BREEDS` at 224 pixels, and their ImageNet classes"
    names = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.meta['categories']
    folders = sorted((Path(os.environ['REINIT_DATA']) / 'oxford_pet' / 'test').iterdir())
    x, y = [], []
    for f in folders:
        breed = f.name.partition('_')[2]
        for g in sorted(f.iterdir())[:n] if breed in BREEDS else []:
            x.append(torch.from_numpy(np.array(Image.open(g).convert('RGB'))).permute(2, 0, 1))
            y.append(names.index(BREEDS[breed]))
    x = torch.stack(x).float() / 255
    return nn.functional.interpolate(x, size=224, mode='bilinear', antialias=True), torch.tensor(y)

@pytest.mark.data
def test_pets_by_the_pretrained_network():
    net = resnet50_imagenet().eval()
    x, y = pets(7)
    with torch.inference_mode(): top1 = torch.cat([net(imagenet_input(b)).argmax(1) for b in x.split(24)])
    assert len(y) >= 150 and len(y.unique()) == len(BREEDS)
    assert (top1 == y).float().mean() > .7, f'top-1 {(top1==y).float().mean():.1%} of {len(y)} images'


# ---------------------------------------------------------------- a part of a network

def folded(net, without=('layer4', 'fc')):
    "Convolutions with their normalizations folded in, by torch's own function"
    modules = dict(net.named_modules())
    state = {}
    for name, conv in modules.items():
        if not isinstance(conv, nn.Conv2d) or name.startswith(without): continue
        norm = name[:-1] + '1' if 'downsample' in name else name.replace('conv', 'bn')
        fused = torch.nn.utils.fuse_conv_bn_eval(conv, modules[norm])
        state |= {f'{name}.weight': fused.weight.detach(), f'{name}.bias': fused.bias.detach()}
    return state


def trained_resnet():
    net = resnet()
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                for t in (m.weight, m.bias, m.running_mean): t.normal_()
                m.running_var.uniform_(.5, 2)
    return net.eval()


def test_a_folded_part_computes_the_same(tmp_path):
    net = trained_resnet()
    state = folded(net)
    np.savez(tmp_path / 'part.npz', **{f'folded.{k}': v for k, v in state.items()},
             **{'plain.conv1.weight': net.conv1.weight.detach()})
    got = read_state(tmp_path / 'part.npz')
    assert list(got) == list(state)
    part = load_part('resnet18', got)
    x = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        h = net.layer3(net.layer2(net.layer1(net.maxpool(net.bn1(net.conv1(x)).relu()))))
        assert torch.allclose(part(x), h.mean((2, 3)), rtol=1e-4, atol=1e-4)
    assert isinstance(part.bn1, FoldedShift) and part.conv1.bias is None
    assert torch.equal(part.bn1.bias, state['conv1.bias'])
    assert isinstance(part.layer4, nn.Identity) and not part.training


def test_parts_that_do_not_fit():
    state = folded(trained_resnet())
    with pytest.raises(ReinitError, match='of another shape: conv1.weight'):
        load_part('resnet18', state | {'conv1.weight': torch.zeros(3, 3, 7, 7)})
    with pytest.raises(ReinitError, match='1 not in it: conv9.weight'):
        load_part('resnet18', state | {'conv9.weight': state['conv1.weight']})
    lacking = {k: v for k, v in state.items() if k != 'layer1.0.conv1.weight'}
    with pytest.raises(ReinitError, match='1 missing: layer1.0.conv1.weight'): load_part('resnet18', lacking)
    with pytest.raises(ReinitError, match='is not a network of'): load_part('resnet81', state)


def test_npz_files(tmp_path):
    net = resnet()
    np.savez(tmp_path / 'whole.npz', **net.state_dict())
    got = load_arch('resnet18', read_state(tmp_path / 'whole.npz'))
    x = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): assert torch.equal(got(x), net.eval()(x))
    with pytest.raises(ReinitError, match='there is no file'): read_state(tmp_path / 'none.npz')
    (tmp_path / 'bad.npz').write_bytes(b'PK no')
    with pytest.raises(ReinitError, match='truncated or not an .npz'): read_state(tmp_path / 'bad.npz')


def test_resnet18_from_the_cache_or_the_part(tmp_path, monkeypatch):
    "The cache of downloads first, then the part in REINIT_DATA, then an error that tells what to do"
    net = trained_resnet()
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    monkeypatch.delenv('REINIT_DATA', raising=False)
    def refuse(*args, **kwargs): raise OSError('no network')
    monkeypatch.setattr(torch.hub, 'download_url_to_file', refuse)
    for download in (True, False):
        with pytest.raises(ReinitError, match='REINIT_DATA is not set.*resnet18_imagenet_part.npz.*IMAGENET1K_V1'):
            resnet18_imagenet(download)
    np.savez(tmp_path / 'resnet18_imagenet_part.npz', **{f'folded.{k}': v for k, v in folded(net).items()})
    monkeypatch.setenv('REINIT_DATA', str(tmp_path))
    assert isinstance(resnet18_imagenet().layer4, nn.Identity)
    (tmp_path / 'checkpoints').mkdir(exist_ok=True)
    torch.save(net.state_dict(), tmp_path / 'checkpoints' / Path(weights.url).name)
    got = resnet18_imagenet(download=False)
    assert torch.equal(got.fc.weight, net.fc.weight) and torch.equal(got.bn1.bias, net.bn1.bias)


@pytest.mark.data
def test_resnet18_imagenet_part():
    "The part is torchvision's: plain weights are folded ones up to a factor for each filter"
    part = resnet18_imagenet_part()
    with np.load(Path(os.environ['REINIT_DATA']) / 'resnet18_imagenet_part.npz') as arrays:
        plain, shift = (torch.from_numpy(arrays[k]) for k in ('plain.conv1.weight', 'plain.bn1.bias'))
    dead = [2, 4, 7, 9, 13, 36, 38, 48]
    alive = [i for i in range(64) if i not in dead]
    cosine = nn.functional.cosine_similarity(plain.flatten(1), part.conv1.weight.detach().flatten(1))
    assert cosine[alive].abs().min() > .9999
    assert plain[dead].flatten(1).norm(dim=1).max() < 4e-5 and plain[alive].flatten(1).norm(dim=1).min() > .3
    assert torch.allclose(part.bn1.bias[dead], shift[dead], rtol=.01)

"Small models, for the tests of blocks, init and fixed_norm"
from collections import OrderedDict

import torch
import torchvision.models as tv
from torch import nn

from reinit_nb.core import Streams


def seeded(f, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return f()


def image(n=2, size=64, c=3): return torch.randn(n, c, size, size, generator=Streams(0).noise)


def small_vit():
    return tv.VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32,
                                num_classes=5)


def small_mobilenet(): return tv.MobileNetV2(num_classes=5, width_mult=.25)


def named():
    conv1, conv2, conv3 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, 3, stride=2)
    return nn.Sequential(OrderedDict(
        block1=nn.Sequential(conv1, nn.BatchNorm2d(4), nn.ReLU(), conv2, nn.ReLU()),
        block2=nn.Sequential(conv3, nn.ReLU()),
        head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))))


def mlp(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

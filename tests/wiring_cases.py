"Networks with a known wiring, for the tests of wiring and of counts"
import copy

import numpy as np
import torch
import torchvision
from torch import nn

from reinit_nb.fixed_norm import FixedNorm

Conv, Dense = nn.Conv2d, nn.Linear

def sequential(*modules):
    torch.manual_seed(0)
    return nn.Sequential(*modules)

@torch.no_grad()
def zero_row(m, i):
    "Set row `i` of a layer, or entry `i` of a normalization, to zero, with its bias"
    if isinstance(m, nn.modules.conv._ConvTransposeNd):
        per_group = m.out_channels // m.groups
        m.weight.view(m.groups, -1, *m.weight.shape[1:])[i // per_group, :, i % per_group] = 0
    else: m.weight[i] = 0
    if getattr(m, 'bias', None) is not None: m.bias[i] = 0

@torch.no_grad()
def zero_column(m, i, positions=1):
    "Set column `i` of a layer to zero: all `layer_positions` of a flattened channel"
    if isinstance(m, nn.Linear): m.weight[:, i * positions:(i + 1) * positions] = 0
    elif isinstance(m, nn.modules.conv._ConvTransposeNd): m.weight[i] = 0
    else:
        per_group = m.in_channels // m.groups
        m.weight.view(m.groups, -1, *m.weight.shape[1:])[i // per_group, :, i % per_group] = 0

image, deep_image = (1, 3, 9, 9), (1, 4, 9, 9)
CASES = {   # network, input, who writes, who reads, channels, positions, double-frozen weights of each channel
    'dense': (lambda: sequential(Dense(5, 6), nn.ReLU(), Dense(6, 4)), (1, 5), '0', '2', [1, 4], 1, (5 + 1) + 4),
    'no bias': (lambda: sequential(Dense(5, 6, bias=False), nn.GELU(), Dense(6, 4)), (1, 5), '0', '2', [0], 1, 5 + 4),
    'conv': (lambda: sequential(Conv(3, 4, 3), nn.ReLU(), Conv(4, 5, 3)), image, '0', '2', [2, 3], 1, (27 + 1) + 45),
    'conv1d': (lambda: sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 5, 3)), (1, 3, 9), '0', '2', [2], 1,
               (9 + 1) + 15),
    'conv3d': (lambda: sequential(nn.Conv3d(1, 4, 2), nn.ReLU(), nn.Conv3d(4, 2, 2)), (1, 1, 5, 5, 5), '0', '2', [2],
               1, (8 + 1) + 16),
    'pools': (lambda: sequential(Conv(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2),
                                 nn.Upsample(scale_factor=2), Conv(4, 5, 1)),
              (1, 3, 19, 19), '0', '5', [1], 1, 28 + 5),
    'flatten': (lambda: sequential(Conv(3, 4, 3), nn.ReLU(), nn.Flatten(), Dense(4 * 49, 5)), image, '0', '3', [3], 49,
                28 + 49 * 5),
    'pool+flat': (lambda: sequential(Conv(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(),
                                     Dense(4, 5)),
                  image, '0', '5', [0], 1, 28 + 5),
    'groups in': (lambda: sequential(Conv(3, 4, 3), nn.ReLU(), Conv(4, 6, 3, groups=2)), image, '0', '2', [3], 1,
                  28 + 3 * 9),
    'groups out': (lambda: sequential(Conv(4, 6, 3, groups=2), nn.ReLU(), Conv(6, 5, 3)), deep_image, '0', '2', [5], 1,
                   (2 * 9 + 1) + 45),
    'depthwise': (lambda: sequential(Conv(3, 4, 1), nn.ReLU(), Conv(4, 4, 3, groups=4)), image, '0', '2', [1, 2], 1,
                  4 + 9),
    'transposed': (lambda: sequential(nn.ConvTranspose2d(3, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 5, 2)), image, '0',
                   '2', [1], 1, (12 + 1) + 20),
    'grouped transposed': (lambda: sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), Conv(6, 5, 1)),
                           deep_image, '0', '2', [4], 1, (2 * 4 + 1) + 5),
    'batch norm': (lambda: sequential(Conv(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Conv(4, 5, 3)), image, '1', '3',
                   [1, 2], 1, 2 + 45),
    'group norm': (lambda: sequential(Conv(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), Conv(4, 5, 3)), image, '1', '3',
                   [1], 1, 2 + 45),
    'instance norm': (lambda: sequential(Conv(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), Conv(4, 5, 3)),
                      image, '1', '3', [1], 1, 2 + 45),
    'layer norm': (lambda: sequential(Dense(5, 6), nn.LayerNorm(6), nn.GELU(), Dense(6, 4)), (1, 5), '1', '3', [1], 1,
                   2 + 4),
    'rms norm': (lambda: sequential(Dense(5, 6), nn.RMSNorm(6), nn.GELU(), Dense(6, 4)), (1, 5), '1', '3', [1], 1,
                 1 + 4),
    'no affine': (lambda: sequential(Dense(5, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), Dense(6, 4)), (1, 5),
                  '0', '3', [1], 1, 6 + 4),
    'fixed norm': (lambda: sequential(Dense(5, 6), FixedNorm(.3, 2.), nn.ReLU(), Dense(6, 4)), (1, 5), '0', '3', [1],
                   1, 6 + 4),
    'norm, flatten': (lambda: sequential(Conv(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), Dense(4 * 49, 5)),
                      image, '1', '4', [1], 49, 2 + 49 * 5),
    'tokens': (lambda: sequential(nn.Unflatten(1, (3, 5)), Dense(5, 6), nn.ReLU(), Dense(6, 4)), (1, 15), '1', '3',
               [1], 1, 6 + 4)}

class Net(nn.Module):
    "A module whose forward pass is a function"
    def __init__(self, f, **modules):
        super().__init__()
        self.f = f
        for k, m in modules.items(): self.add_module(k, m)
    def forward(self, x): return self.f(self, x)

class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Conv(3, 4, 3, padding=1), Conv(4, 5, 3, padding=1)
        self.c, self.d = Conv(9, 6, 1), Conv(4, 2, 1)
    def forward(self, x):
        a = self.a(x).relu()
        return self.c(torch.cat([a, self.b(a).relu()], 1)).mean((2, 3)), self.d(a)

class Preactivation(nn.Module):
    "A normalization behind a sum"
    def __init__(self):
        super().__init__()
        self.stem = Conv(3, 4, 1)
        self.n1, self.c1 = nn.BatchNorm2d(4), Conv(4, 4, 1)
        self.n2, self.fc = nn.BatchNorm2d(4), Dense(4, 2)
    def forward(self, x):
        x = self.stem(x)
        x = x + self.c1(self.n1(x).relu())
        return self.fc(self.n2(x).relu().mean((2, 3)))

def frozen_resnet():
    "A ResNet18 with two frozen filters in each of two blocks, and one frozen channel in the stream of the last stage"
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=5)
    for b in (net.layer1[0], net.layer3[1]):
        for i in (0, 7):
            zero_row(b.bn1, i)
            zero_row(b.conv1, i)
            zero_column(b.conv2, i)
    for norm in (net.layer4[0].bn2, net.layer4[0].downsample[1], net.layer4[1].bn2): zero_row(norm, 3)
    zero_column(net.layer4[1].conv1, 3)
    zero_column(net.fc, 3)
    return net

def check_left_alone(measure):
    "Call `measure` on a network whose modes and flags differ, and assert that nothing has changed"
    net = torchvision.models.resnet18().train()
    net.layer1.eval()
    net.fc.weight.requires_grad_(False)
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    rng, np_rng = torch.get_rng_state(), np.random.get_state()[1].copy()
    measure(net)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng) and (np.random.get_state()[1] == np_rng).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())
    assert not net.fc.weight.requires_grad

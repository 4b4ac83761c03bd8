#!/usr/bin/env python
"""Apply the operations of reinit_nb to many models, and check that each one works or refuses clearly and does no harm.

python .ci/models.py --out nbs/benchmarks/models.csv            all models, in half an hour on one core
python .ci/models.py --out FILE --only 'resnet*' --only gru     some of them
python .ci/models.py --out FILE --operation recycle             one operation
"""
import argparse
import copy
import fnmatch
import logging
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import Tensor, nn
from torch.nn import functional as F

from reinit_nb.between import dirac_reset
from reinit_nb.blocks import NORM_NAME, blocks
from reinit_nb.core import ReinitError
from reinit_nb.fixed_norm import remove_norms
from reinit_nb.flatness import noise_curve
from reinit_nb.freezing import FrozenLayersCallback
from reinit_nb.frozen import mutually_frozen
from reinit_nb.health import health
from reinit_nb.init import reset
from reinit_nb.lw import LayerwiseCallback
from reinit_nb.recycle import RecycleCallback
from reinit_nb.separability import separability
from reinit_nb.wels import WELSCallback

CLASSES = 5

TORCHVISION = '''resnet18 squeezenet1_0 squeezenet1_1 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5
    shufflenet_v2_x1_0 mnasnet0_5 mnasnet1_0 efficientnet_b0 regnet_x_400mf regnet_y_400mf googlenet densenet121
    swin_v2_t convnext_tiny swin_t inception_v3'''.split()

TIMM = '''test_resnet test_vit test_vit4 test_convnext test_efficientnet test_efficientnet_gn test_byobnet test_mambaout
    resnet10t resnet14t resnet18d resnetblur18 resnetv2_18 seresnet18 skresnet18 ecaresnet26t botnet26t_256
    lambda_resnet26t convnext_atto convnextv2_atto mixer_s32_224 gmlp_ti16_224 resmlp_12_224 vit_tiny_patch16_224
    deit_tiny_distilled_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 pit_ti_224 levit_128s coat_lite_tiny
    convit_tiny poolformer_s12 poolformerv2_s12 pvt_v2_b0 visformer_tiny mobilevit_xxs mobilevitv2_050
    efficientformer_l1 efficientformerv2_s0 edgenext_xx_small fastvit_t8 ghostnet_050 ghostnetv2_100 hardcorenas_a
    mobilenetv4_conv_small mobilenetv3_small_050 mobileone_s0 repvgg_a0 repghostnet_050 tinynet_e lcnet_050
    efficientnet_lite0 mixnet_s fbnetc_100 spnasnet_100 dla46_c dpn68 hrnet_w18_small inception_next_atto
    nf_regnet_b0 rexnet_100 regnetz_005 selecsls42 semnasnet_050 ese_vovnet19b_dw cs3darknet_s gernet_s starnet_s1
    hgnetv2_b0'''.split()


class TwoNames(nn.Module):
    "One module under two names"
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.again, self.head = self.body, nn.Linear(8, CLASSES)

    def forward(self, x): return self.head(F.relu(self.again(F.relu(self.body(F.relu(self.stem(x)))))).mean((2, 3)))


class TiedWeights(nn.Module):
    "One parameter in two layers"
    def __init__(self):
        super().__init__()
        self.flat, self.first = nn.Flatten(), nn.Linear(3 * 32 * 32, 16)
        self.second, self.third, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.third.weight = self.second.weight

    def forward(self, x): return self.head(F.relu(self.third(F.relu(self.second(F.relu(self.first(self.flat(x))))))))


class Recurrent(nn.Module):
    "The rows of an image as a sequence"
    def __init__(self, cell):
        super().__init__()
        self.rnn, self.head = cell(96, 16, num_layers=2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x): return self.head(self.rnn(x.transpose(1, 2).flatten(2))[0][:, -1])


class Attention(nn.Module):
    "The rows of an image as tokens"
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Linear(96, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.embed(x.transpose(1, 2).flatten(2))
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


class TransformerRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(96, 16), nn.Linear(16, CLASSES)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, x): return self.head(self.body(self.embed(x.transpose(1, 2).flatten(2))).mean(1))


class UnusedLayers(nn.Module):
    "Two layers that no forward pass calls"
    def __init__(self):
        super().__init__()
        self.conv1, self.unused = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.conv2, self.head, self.old_head = nn.Conv2d(8, 8, 3), nn.Linear(8, CLASSES), nn.Linear(8, 7)

    def forward(self, x): return self.head(F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3)))


class OwnParameter(nn.Module):
    "A parameter outside any layer, without a rule for its reset"
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.scale, self.head = nn.Parameter(torch.full((8, 1, 1), .5)), nn.Linear(8, CLASSES)

    def forward(self, x): return self.head(F.relu(self.conv2(F.relu(self.conv1(x)) * self.scale)).mean((2, 3)))


class DictOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small_cnn()

    def forward(self, x): return dict(out=self.body(x))


def small_cnn(norm=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(),
                         nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def parametrized(f):
    model = small_cnn()
    for i in (0, 3): model[i] = f(model[i])
    return model


def partly_frozen():
    model = small_cnn()
    model[:3].requires_grad_(False).eval()
    return model


def with_hooks():
    model = small_cnn()
    model[3].register_forward_hook(lambda m, args, out: None)
    model[6].register_forward_pre_hook(lambda m, args: None)
    return model


def lazy_cnn():
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.LazyConv2d(8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.LazyLinear(CLASSES))


WRITTEN_HERE = {
    'one module under two names': TwoNames,
    'tied weights': TiedWeights,
    'gru': lambda: Recurrent(nn.GRU),
    'lstm': lambda: Recurrent(nn.LSTM),
    'rnn': lambda: Recurrent(nn.RNN),
    'attention': Attention,
    'transformer encoder': TransformerRows,
    'unused layers': UnusedLayers,
    'parameter without a reset rule': OwnParameter,
    'output is a dict': DictOutput,
    'weight norm': lambda: parametrized(nn.utils.parametrizations.weight_norm),
    'spectral norm': lambda: parametrized(nn.utils.parametrizations.spectral_norm),
    'partly frozen before': partly_frozen,
    'with hooks': with_hooks,
    'lazy layers': lazy_cnn,
    'batch norm without statistics': lambda: small_cnn(lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
    'instance norm': lambda: small_cnn(lambda n: nn.InstanceNorm2d(n, affine=True)),
    'double precision': lambda: small_cnn().double(),
    'linear': lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES)),
}


def torchvision_maker(name, pixels):
    import torchvision.models as tv
    options = dict(weights=None, num_classes=CLASSES)
    if name in ('googlenet', 'inception_v3'): options |= dict(aux_logits=True, init_weights=False)
    if name == 'vit_b_16': options |= dict(image_size=pixels)
    if name == 'maxvit_t': options |= dict(input_size=(pixels, pixels))
    return tv.get_model(name, **options)


def timm_maker(name, pixels):
    import timm
    try: return timm.create_model(name, pretrained=False, num_classes=CLASSES, img_size=pixels)
    except TypeError: return timm.create_model(name, pretrained=False, num_classes=CLASSES)


def seed_everything(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass
class Case:
    name: str
    source: str
    make: Callable  # Of the width of the images in pixels

    def build(self):
        "Return the model and the width of the smallest images on which it can be trained"
        failures = []
        for pixels in (32, 64, 128, 224, 256, 299):
            seed_everything()
            try:
                model = self.make(pixels)
                trial = copy.deepcopy(model)
                for mode in (True, False):
                    out = trial.train(mode)(images(pixels, trial))
                    if mode: loss(out, torch.arange(4) % CLASSES).backward()
                return model, pixels
            except Exception as e: failures.append(f'{pixels}: {type(e).__name__} {e}'.splitlines()[0])
        raise RuntimeError(f'{self.name} runs on no size: ' + '; '.join(failures))


def all_cases():
    cases = [Case(name, 'torchvision', lambda pixels, n=name: torchvision_maker(n, pixels)) for name in TORCHVISION]
    cases += [Case(name, 'timm', lambda pixels, n=name: timm_maker(n, pixels)) for name in TIMM]
    return cases + [Case(name, 'written here', lambda pixels, f=f: f()) for name, f in WRITTEN_HERE.items()]


def images(pixels, model, n=4, seed=0):
    dtypes = [p.dtype for p in model.parameters() if not nn.parameter.is_lazy(p)]
    x = torch.randn(n, 3, pixels, pixels, generator=torch.Generator().manual_seed(seed))
    return x.to(dtypes[0]) if dtypes else x


def loss(out, y):
    "Cross-entropy of the output, with that of auxiliary heads if there are any"
    if isinstance(out, dict): out = out['out']
    outputs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
    return sum(F.cross_entropy(o.float(), y) for o in outputs)   # fastai's Recorder wants single precision


# What must stay

def is_ours(name): return NORM_NAME in name.split('.')


class Snapshot:
    "Everything about a model that an operation could damage"
    def __init__(self, model):
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tensors = [(n, t) for n, t in tensors if not is_ours(n)]
        modules = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if not is_ours(n)]
        self.keys = [k for k in model.state_dict() if not is_ours(k)]
        self.kinds = {n: self.kind(t) for n, t in tensors}
        self.values = {n: t.detach().clone() for n, t in tensors if not nn.parameter.is_lazy(t)}
        first = {}
        self.sharing = {n: first.setdefault(id(t), n) for n, t in tensors}
        self.requires_grad = {n: t.requires_grad for n, t in tensors}
        self.modes = {n: m.training for n, m in modules}
        self.classes = {n: type(m) for n, m in modules}
        self.hooks = {n: {k: len(v) for k, v in vars(m).items() if '_hooks' in k and hasattr(v, '__len__')}
                      for n, m in modules}
        self.attributes = {n: {k: v for k, v in vars(m).items() if isinstance(v, (int, float, str)) and k != 'training'}
                           for n, m in modules}
        self.generators = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]

    @staticmethod
    def kind(t):
        if nn.parameter.is_lazy(t): return 'lazy'
        return type(t), tuple(t.shape), t.dtype, t.device

    def differences(self, other, skip=()):
        "Name what differs in `other`"
        found = []
        for what in vars(self):
            if what in skip: continue
            a, b = getattr(self, what), getattr(other, what)
            if what == 'values':
                changed = [n for n in a if n not in b or not torch.equal(a[n].nan_to_num(), b[n].nan_to_num())]
                if changed: found.append(f'values of {len(changed)} tensors, as {changed[0]}')
            elif a != b:
                example = ''
                if isinstance(a, dict): example = next((f' of {n!r}' for n in {**a, **b} if a.get(n) != b.get(n)), '')
                found.append(what + example)
        return found


class Damage(Exception): "An operation did something to the model that it must not do"


def check(condition, message):
    if not condition: raise Damage(message)


# Operations: each takes a model, and a batch

def find_blocks(model, x, y): blocks(model, x=x).table()
def count_frozen(model, x, y): mutually_frozen(model, x)
def measure_separability(model, x, y): separability(model, (x, y), measures=('least squares',))
def measure_noise(model, x, y): noise_curve(model, (x, y), sigmas=(.01,), repeats=1)


def reset_model(model, x, y):
    twin = copy.deepcopy(model)
    reset(model, streams=3)
    torch.rand(1)   # the global generator must not matter
    reset(twin, streams=3)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    check(same, 'a second reset with the same seed draws other weights')
    check_finite(model)


def reset_to_dirac(model, x, y):
    dirac_reset(model)
    check_finite(model)


def check_finite(model):
    bad = [n for n, p in model.named_parameters() if not p.isfinite().all()]
    check(not bad, f'{bad[:1]} is not finite')


class LastStep(Callback):
    "Note which parameters got a gradient in the last step, and which of them moved"
    order = 1000

    def before_step(self):
        self.before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.reached = {n for n, p in self.model.named_parameters() if p.grad is not None}
        lr = self.opt.hypers[-1]['lr']
        # a gradient may be so small that the step is lost in rounding: only what SGD would change must change
        self.driven = {n for n, p in self.model.named_parameters()
                       if p.grad is not None and not torch.equal(p.detach() - lr * p.grad, p.detach())}

    def after_step(self):
        params = dict(self.model.named_parameters())
        self.moved = {n for n, p in params.items() if not torch.equal(p, self.before[n])}


def fit(model, x, y, *cbs):
    "Train two epochs of one batch, with one round each; return what the last step did"
    data = [(a, b) for a, b in zip(x, y)]
    train = DataLoader(data, bs=4, num_workers=0)
    valid = DataLoader(data, bs=4, num_workers=0)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    last = LastStep()
    learn = Learner(DataLoaders(train, valid), model, loss_func=loss, opt_func=SGD, cbs=last, train_bn=True)
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2, cbs=cbs)
    held = {id(p) for group in learn.opt.param_lists for p in group}
    lost = [n for n, p in model.named_parameters() if n in trainable and id(p) not in held]
    check(not lost, f'{lost[:1]} is not in the optimizer')
    return last


def check_training(model, x, y, last, frozen=()):
    "Do the parameters that a plain fit trains still get gradients, and move?"
    plain = model.plain_fit
    missing = sorted(plain.reached - last.reached - set(frozen))
    check(not missing, f'{len(missing)} parameters get no gradient any more, as {missing[:1]}')
    stuck = sorted(last.driven - last.moved - set(frozen))
    check(not stuck, f'{len(stuck)} parameters have a gradient and do not move, as {stuck[:1]}')
    check_finite(model)


def fit_layerwise(model, x, y):
    try: k = min(2, len(blocks(model)))
    except ReinitError: k = None   # the callback must refuse, too
    last = fit(model, x, y, LayerwiseCallback(blocks=k))
    check_training(model, x, y, last)
    check(any(is_ours(n) for n, _ in model.named_modules()), 'there is no fixed norm')
    remove_norms(model)   # what is left must be the model as it was, trained


def fit_masked(model, x, y):
    last = fit(model, x, y, WELSCallback(rounds=2))
    check_training(model, x, y, last)


def fit_frozen(model, x, y):
    cb = FrozenLayersCallback(position='front', n=1)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not nn.parameter.is_lazy(p)}
    table = cb.plan(model)
    check(len(table) > 0, 'the plan is empty')
    last = fit(model, x, y, cb)
    same = [n for n, p in model.named_parameters() if n in before and torch.equal(before[n], p)]
    check(same, 'nothing was frozen')
    check_training(model, x, y, last, same)


class LastRecycle(Callback):
    "Note the state of the model before and after the last decision of a `RecycleCallback`"
    def __init__(self, order): self.order = order
    def after_step(self): self.state = {n: t.detach().clone() for n, t in self.model.state_dict().items()}


def every_other(score, age, memory): return torch.arange(len(score), device=score.device) % 2 == 1


def fit_recycled(model, x, y):
    "Recycle every other unit that can be, after the first step and after the second"
    cb, before, after = RecycleCallback(every=1, rule=every_other), LastRecycle(55.5), LastRecycle(56.5)
    fit(model, x, y, before, cb, after)
    last = cb.log[cb.log.step == 2]
    check(last.recycled.sum() > 0, 'nothing was recycled')
    check_finite(model)
    changed = sum(int((before.state[n] != t).sum()) for n, t in after.state.items())
    # less if a fresh value is the old one, or if an entry belongs to two units
    logged = int(last.redrawn.sum() + last.zeroed.sum())
    check(changed <= logged, f'{changed} entries have changed, and {logged} are in the log')


def measure_health(model, x, y): health(model, (x, y), loss=loss, sharpness=False)


@dataclass
class Operation:
    run: Callable
    measures: bool = False  # Must the model be as before?
    trains: bool = False    # Does fastai set modes and update buffers?

    def may_change(self):
        if self.measures: return ()
        return ('values', 'generators', 'modes') if self.trains else ('values', 'generators')


OPERATIONS = {
    'blocks': Operation(find_blocks, measures=True),
    'reset': Operation(reset_model),
    'LW': Operation(fit_layerwise, trains=True),
    'WELS': Operation(fit_masked, trains=True),
    'frozen layers': Operation(fit_frozen, trains=True),
    'mutually frozen': Operation(count_frozen, measures=True),
    'Dirac reset': Operation(reset_to_dirac),
    'separability': Operation(measure_separability, measures=True),
    'flatness': Operation(measure_noise, measures=True),
    'recycle': Operation(fit_recycled, trains=True),
    'health': Operation(measure_health, measures=True),
}


def apply(operation: Operation, model: nn.Module, x: Tensor, plain: LastStep) -> tuple[str, str]:
    "Return the outcome and a message; `plain` is what the last step of a plain fit did"
    y = torch.arange(len(x)) % CLASSES
    seed_everything()
    before = Snapshot(model)
    object.__setattr__(model, 'plain_fit', plain)
    lazy = 'lazy' in before.kinds.values()
    message = ''
    try:
        operation.run(model, x, y)
        outcome, skip = 'works', operation.may_change()
    except ReinitError as e:
        # a fit has begun when a callback refuses: fastai has set modes and drawn numbers
        outcome, skip = 'refuses', ('modes', 'generators') if operation.trains else ()
        message = str(e)
    except Damage as e: return 'damage', str(e)
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return 'error', f'{type(e).__name__}: {e} ({Path(where.filename).name}:{where.lineno})'
    finally: vars(model).pop('plain_fit', None)
    after = Snapshot(model)
    if lazy: skip += ('kinds', 'values', 'classes', 'hooks', 'attributes')   # a run gives lazy layers their shape
    differences = before.differences(after, skip)
    if 'modes' in skip:
        modes = set(after.modes.values())
        if after.modes != before.modes and len(modes) > 1 and len(set(before.modes.values())) == 1:
            differences.append('modes')
    if outcome == 'refuses' and any(is_ours(k) for k in model.state_dict()): differences.append('norms stay')
    if differences: return 'damage', f'{outcome}, but changed: ' + '; '.join(differences) + f' {message}'
    return outcome, message


def apply_all(case: Case, names=tuple(OPERATIONS)) -> list[dict]:
    model, pixels = case.build()
    x = images(pixels, model)
    n = sum(p.numel() for p in model.parameters() if not nn.parameter.is_lazy(p))
    seed_everything()
    plain = fit(copy.deepcopy(model), x, torch.arange(len(x)) % CLASSES)
    plain.before = plain.learn = None   # they hold a second model
    rows = []
    for name in names:
        start = time.perf_counter()
        outcome, message = apply(OPERATIONS[name], copy.deepcopy(model), x, plain)
        rows.append(dict(model=case.name, source=case.source, parameters=n, pixels=pixels, operation=name,
                         outcome=outcome, message=message, seconds=round(time.perf_counter() - start, 2)))
    return rows


def library_commit():
    "Return the commit of this checkout, with a plus sign if files were changed since"
    command = ['git', '-C', str(Path(__file__).parent), 'describe', '--always', '--dirty=+', '--exclude=*']
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or 'unknown'


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', required=True, help='CSV to write')
    parser.add_argument('--only', action='append', help='name or pattern of models; may be given several times')
    parser.add_argument('--operation', action='append', choices=OPERATIONS,
                        help='only this one; may be given several times')
    parser.add_argument('--source', help="only models of 'torchvision', 'timm' or 'written here'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    logging.disable(logging.WARNING)
    commit = library_commit()
    rows = []
    for case in all_cases():
        if args.only and not any(fnmatch.fnmatch(case.name, pattern) for pattern in args.only): continue
        if args.source not in (None, case.source): continue
        start = time.perf_counter()
        try: found = apply_all(case, args.operation or tuple(OPERATIONS))
        except (RuntimeError, ImportError) as e:
            print(f'{case.name}: not tested: {e}', file=sys.stderr, flush=True)
            continue
        rows += [dict(row, library=commit) for row in found]
        counts = pd.Series([r['outcome'] for r in found]).value_counts().to_dict()
        print(f'{case.name} ({found[0]["pixels"]} pixels, {time.perf_counter() - start:.0f} s): {counts}', flush=True)
        for r in found:
            if r['outcome'] in ('error', 'damage'): print(f'    {r["operation"]}: {r["outcome"]}: {r["message"]}')
        pd.DataFrame(rows).to_csv(args.out, index=False)
    df = pd.DataFrame(rows)
    bad = df[df.outcome.isin(['error', 'damage'])]
    print(f'{df.model.nunique()} models, {len(df)} cells: {df.outcome.value_counts().to_dict()}')
    sys.exit(bool(len(bad)))


if __name__ == '__main__': main()

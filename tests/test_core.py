"Properties of recipes and streams that must hold for any value, not only for the ones shown in the notebook"
import json
import math
import os
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinit_nb.core import (
    STREAMS,
    Recipe,
    ReinitError,
    Streams,
    atomic_write,
    canonical_json,
    check_number,
    diff_recipes,
    flatten_recipe,
    nearest_name,
    new_axes,
    progress,
)

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Inner(Recipe):
    rate: float = .5
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer(Recipe):
    a: int = 1
    b: float = 1.
    c: bool = False
    d: 'str|None' = None
    e: tuple[float, ...] = ()
    inner: Inner = Inner()


floats = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(Inner, rate=floats, names=st.lists(st.text(), max_size=3).map(tuple))
kwargs = st.fixed_dictionaries(dict(a=st.integers(), b=floats, c=st.booleans(), d=st.none() | st.text(),
                                    e=st.lists(floats, max_size=3).map(tuple), inner=inners))
seeds = st.integers(min_value=0, max_value=10**30)
keys = st.none() | st.integers(0, 9) | st.sampled_from(['0', '1', 'init', 'a/b', "'a'"])
names = st.sampled_from(STREAMS)


# Recipes

@given(kwargs, st.randoms())
def test_hash_ignores_the_order_of_fields(kw, rnd):
    items = list(kw.items())
    rnd.shuffle(items)
    assert Outer(**kw).hash == Outer(**dict(items)).hash


@given(kwargs, kwargs)
def test_hash_is_equal_exactly_when_recipes_are(x, y):
    a, b = Outer(**x), Outer(**y)
    assert (a == b) == (a.hash == b.hash) == (len(diff_recipes(a, b)) == 0)


@given(kwargs)
def test_round_trip_through_json_and_pickle(kw):
    r = Outer(**kw)
    back = Recipe.from_dict(json.loads(json.dumps(r.to_dict())))
    assert back == r and back.hash == r.hash
    assert pickle.loads(pickle.dumps(r)).hash == r.hash


@given(st.integers(-2**53, 2**53))
def test_an_int_for_a_float_is_that_float(n):
    assert Outer(b=n).hash == Outer(b=float(n)).hash
    assert type(Outer(b=n).b) is float


def test_minus_zero_is_zero():
    assert Outer(b=-0.).hash == Outer(b=0.).hash


@given(kwargs, floats)
def test_replace_changes_one_field_only(kw, x):
    r = Outer(**kw)
    new = r.replace(b=x)
    assert new.replace(b=r.b) == r
    assert set(diff_recipes(r, new)['field']) == (set() if r.b == x else {'b'})


@pytest.mark.parametrize('bad', [
    dict(a=1.), dict(a=True), dict(a='1'), dict(b=math.nan), dict(b=math.inf), dict(b='1'), dict(b=10**400), dict(c=1),
    dict(d=1), dict(e=1.), dict(e=(1, 'x')), dict(inner=None), dict(inner=Outer())])
def test_wrong_types_name_the_field(bad):
    with pytest.raises(ReinitError, match=f'Outer: {next(iter(bad))}='): Outer(**bad)


def test_unknown_field_names_the_nearest():
    with pytest.raises(ReinitError, match="did you mean 'inner'"): Outer(iner=Inner())
    with pytest.raises(ReinitError, match="did you mean 'inner'"): Outer().replace(iner=Inner())


def test_version_is_part_of_the_hash():
    old = canonical_json(Outer().to_dict())
    h = Outer().hash
    try:
        Outer.version = 2
        assert Outer().hash != h
        with pytest.raises(ReinitError, match='written as version 1 and is version 2'):
            Recipe.from_dict(json.loads(old))
    finally: del Outer.version


def test_a_class_pickled_by_value_does_not_replace_the_real_one():
    "Notebooks send their recipes to other processes by value, which makes an empty class of the same name"
    @dataclass(frozen=True)
    class Local(Recipe): n: int = 1

    @dataclass(frozen=True)
    class Holder(Recipe): local: Local = Local()

    def unfinished(): return type('Local', (Recipe,), {})   # as cloudpickle makes it, before it finds the real one
    unfinished()
    assert Recipe.from_dict(Local(n=2).to_dict()) == Local(n=2)
    assert Recipe.from_dict(Holder().to_dict()) == Holder()


def test_a_field_decides_which_of_two_classes_with_one_name_is_meant():
    @dataclass(frozen=True)
    class Twin(Recipe): n: int = 1
    first = Twin

    @dataclass(frozen=True)
    class TwinHolder(Recipe): twin: first | None = first()

    @dataclass(frozen=True)
    class Twin(Recipe): n: int = 1

    assert type(Recipe.from_dict(Twin().to_dict())) is Twin
    assert type(first.from_dict(Twin().to_dict())) is first
    assert Recipe.from_dict(TwinHolder().to_dict()) == TwinHolder()


OTHER_ORDER = '''
from dataclasses import dataclass
from reinit_nb.core import Recipe
@dataclass(frozen=True)
class Inner(Recipe):
    names: tuple[str, ...] = ()
    rate: float = .5
@dataclass(frozen=True)
class Outer(Recipe):
    inner: Inner = Inner()
    a: int = 1
    b: float = 1.
    c: bool = False
    d: 'str|None' = None
    e: tuple[float, ...] = ()
print(Outer(d='ä', e=(1, 2.5), inner=Inner(names=('x',))).hash)
'''


def test_hash_does_not_depend_on_the_process():
    other = '1' if os.environ.get('PYTHONHASHSEED') == '0' else '0'
    env = dict(os.environ, PYTHONHASHSEED=other, PYTHONPATH=str(ROOT))
    command = [sys.executable, '-c', OTHER_ORDER]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == Outer(d='ä', e=(1, 2.5), inner=Inner(names=('x',))).hash


# Streams

def draw(g, n=8): return torch.randint(2**62, (n,), generator=g)


@settings(deadline=None)
@given(seeds, names, names, st.integers(0, 50))
def test_one_stream_leaves_the_others_alone(seed, used, asked, n):
    a, b = Streams(seed), Streams(seed)
    draw(a[used], n)
    same = torch.equal(draw(a[asked]), draw(b[asked]))
    assert same == (used != asked or n == 0)


@settings(deadline=None)
@given(st.lists(st.tuples(seeds, keys, names), min_size=2, max_size=6, unique_by=repr))
def test_different_streams_differ(cases):
    def streams(seed, key): return Streams(seed) if key is None else Streams(seed).fork(key)
    drawn = {tuple(draw(streams(seed, key)[name]).tolist()) for seed, key, name in cases}
    assert len(drawn) == len(cases)


@settings(deadline=None)
@given(seeds, st.lists(names, max_size=5), st.lists(names, max_size=5))
def test_state_dict_resumes_bit_exactly(seed, before, after):
    s = Streams(seed).fork('x')
    for n in before: torch.randn(3, generator=s[n])     # an odd number of normals leaves one cached
    t = Streams(0)
    t.load_state_dict(s.state_dict())
    for n in after: assert torch.equal(torch.randn(3, generator=s[n]), torch.randn(3, generator=t[n]))


def test_forks_are_told_apart_by_their_keys():
    s = Streams(0)
    forks = [s, s.fork(1), s.fork('1'), s.fork(''), s.fork('1/1'), s.fork("1'/'1")]
    forks += [s.fork(1).fork(1), s.fork('1').fork('1')]
    assert len({tuple(draw(f.init).tolist()) for f in forks}) == len(forks)
    assert torch.equal(draw(s.fork(np.int64(1)).init), draw(s.fork(1).init))


def test_global_generators_are_untouched():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    s = Streams(1)
    for n in STREAMS: draw(s.fork(n)[n])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all() and random.getstate() == before[2]


def test_seeds_that_agree_in_32_bits_differ():
    "All that torch looks at on the CPU"
    for x, y in ((9354, 36656), (3843, 66510)):
        a, b = Streams(x).init, Streams(y).init
        assert (a.initial_seed() ^ b.initial_seed()) & 0xffffffff == 0
        assert not torch.equal(draw(a), draw(b))


def test_uniform_and_uncorrelated():
    x = torch.stack([torch.rand(20_000, generator=Streams(s)[n]) for s in (0, 1, 2**32) for n in STREAMS]).double()
    assert ((x.mean(1) - .5).abs() < 5 * (1 / 12 / 20_000)**.5).all()
    corr = torch.corrcoef(x) - torch.eye(len(x))
    assert corr.abs().max() < 5 / 20_000**.5


# Errors, files, results

@given(st.floats() | st.integers() | st.booleans() | st.text())
def test_check_number_accepts_exactly_what_it_says(v):
    ok = type(v) in (int, float) and 0 <= v <= 1
    if ok: assert check_number('x', v, 0, 1) == v
    else:
        with pytest.raises(ReinitError, match='should be a finite number >= 0 and <= 1'): check_number('x', v, 0, 1)


@given(st.lists(st.text(min_size=1), min_size=1, unique=True))
def test_nearest_is_an_option(options):
    assert nearest_name(options[0], options) is not None
    assert nearest_name(options[0].upper(), options) in [None, *options]


def test_flat_names_are_columns():
    assert flatten_recipe(Outer())['inner.rate'] == .5 and flatten_recipe(Outer())['inner'] == 'Inner'


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    p = atomic_write(tmp_path / 'a' / 'x.txt', 'old')
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(ReinitError, match='x.txt cannot be written: No space left'): atomic_write(p, 'new')
    assert p.read_text() == 'old' and [o.name for o in p.parent.iterdir()] == ['x.txt']


def test_progress_is_silent_in_a_log_and_ends_cleanly(capsys):
    assert list(progress(range(3), label='x')) == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        for _ in progress(range(3)): raise KeyboardInterrupt
    assert capsys.readouterr().out == ''


def test_progress_in_a_terminal_ends_its_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    assert list(progress(iter('abc'), total=2, label='rounds')) == ['a', 'b', 'c']      # a wrong total drops nothing
    out = capsys.readouterr().out
    assert '[2/2' in out and 'rounds' in out and out.endswith('\n')
    with pytest.raises(KeyboardInterrupt):
        for i in progress(range(3)):
            if i == 1: raise KeyboardInterrupt
    out = capsys.readouterr().out
    assert '[1/3' in out and '[2/3' not in out and out.endswith('\n')


def test_import_is_light():
    heavy = ('fastai', 'matplotlib', 'fastprogress', 'spacy')
    modules = 'core', 'store', 'probing', 'blocks', 'init', 'fixed_norm', 'models', 'synthetic', 'zoo'
    imports = ', '.join(f'reinit_nb.{name}' for name in modules)
    code = f'import sys, {imports}; print([m for m in {heavy} if m in sys.modules])'
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    out = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[]'


def test_new_axes_are_at_most_four_in_a_row():
    import matplotlib.pyplot as plt
    axes = new_axes(6, size=(2, 1), sharex=True)
    assert len(axes) == 6 and len(axes[0].figure.axes) == 6
    assert axes[0].figure.get_size_inches().tolist() == [8, 2]
    assert new_axes(ax=axes[3]) is axes[3]
    assert len(new_axes(1)) == 1
    assert new_axes(size=(3, 3)).figure.get_size_inches().tolist() == [3, 3]
    plt.close('all')

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
    Store,
    Streams,
    atomic_write,
    canonical,
    check_number,
    diff,
    flat,
    load_results,
    nearest,
    paper_table,
    progress,
    results_rows,
    save_results,
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
    assert (a == b) == (a.hash == b.hash) == (len(diff(a, b)) == 0)


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
    assert set(diff(r, new)['field']) == (set() if r.b == x else {'b'})


@pytest.mark.parametrize('bad', [dict(a=1.), dict(a=True), dict(a='1'), dict(b=math.nan), dict(b=math.inf), dict(b='1'), dict(b=10**400),
                                 dict(c=1), dict(d=1), dict(e=1.), dict(e=(1, 'x')), dict(inner=None), dict(inner=Outer())])
def test_wrong_types_name_the_field(bad):
    with pytest.raises(ReinitError, match=f'Outer: {next(iter(bad))}='): Outer(**bad)


def test_unknown_field_names_the_nearest():
    with pytest.raises(ReinitError, match="did you mean 'inner'"): Outer(iner=Inner())
    with pytest.raises(ReinitError, match="did you mean 'inner'"): Outer().replace(iner=Inner())


def test_version_is_part_of_the_hash():
    old = canonical(Outer().to_dict())
    h = Outer().hash
    try:
        Outer.version = 2
        assert Outer().hash != h
        with pytest.raises(ReinitError, match='written as version 1 and is version 2'): Recipe.from_dict(json.loads(old))
    finally: del Outer.version


@pytest.mark.parametrize('hashseed', ['0', '12345'])
def test_hash_does_not_depend_on_the_process(hashseed):
    src = ('from dataclasses import dataclass\nfrom reinit_nb.core import Recipe\n'
           '@dataclass(frozen=True)\nclass Inner(Recipe):\n names: tuple[str, ...] = ()\n rate: float = .5\n'   # another order of fields
           '@dataclass(frozen=True)\nclass Outer(Recipe):\n inner: Inner = Inner()\n a: int = 1\n b: float = 1.\n c: bool = False\n'
           " d: 'str|None' = None\n e: tuple[float, ...] = ()\n"
           "print(Outer(d='ä', e=(1, 2.5), inner=Inner(names=('x',))).hash)")
    env = dict(os.environ, PYTHONHASHSEED=hashseed, PYTHONPATH=str(ROOT))
    out = subprocess.run([sys.executable, '-c', src], env=env, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    assert out == Outer(d='ä', e=(1, 2.5), inner=Inner(names=('x',))).hash


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
@given(st.lists(st.tuples(seeds, st.none() | st.integers(0, 9) | st.sampled_from(['0', '1', 'init', 'a/b', "'a'"]), names),
                min_size=2, max_size=6, unique_by=repr))
def test_different_streams_differ(keys):
    drawn = {tuple(draw((Streams(s) if k is None else Streams(s).fork(k))[n]).tolist()) for s, k, n in keys}
    assert len(drawn) == len(keys)


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
    forks = [s, s.fork(1), s.fork('1'), s.fork(1).fork(1), s.fork('1/1'), s.fork('1').fork('1'), s.fork("1'/'1"), s.fork('')]
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
    assert nearest(options[0], options) is not None
    assert nearest(options[0].upper(), options) in [None, *options]


def test_flat_names_are_columns():
    assert flat(Outer())['inner.rate'] == .5 and flat(Outer())['inner'] == 'Inner'


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    p = atomic_write(tmp_path / 'a' / 'x.txt', 'old')
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(ReinitError, match='x.txt cannot be written: No space left'): atomic_write(p, 'new')
    assert p.read_text() == 'old' and [o.name for o in p.parent.iterdir()] == ['x.txt']


def test_results_keep_hashes_and_names_as_text(tmp_path):
    r = Outer(d='NA')
    s = Store(tmp_path / 'runs')
    s.put(r, [dict(name='nan', x=1 / 3, n=3), dict(name='None', x=math.nan, n=4)])
    df = s.frame([r], provenance=True)
    digits = df.assign(recipe='1234567890123456')            # a hash may consist of digits, or look like 12e34
    back = load_results(save_results(digits, tmp_path / 'r.csv'))
    assert back['recipe'].tolist() == ['1234567890123456'] * 2 and back['d'].tolist() == ['NA'] * 2
    back = load_results(save_results(df, tmp_path / 'r.csv'))
    assert back['name'].tolist() == ['nan', 'None'] and back['x'][0] == .333333 and math.isnan(back['x'][1])
    assert [o['n'] for o in results_rows(back, r)] == [3, 4] and set(results_rows(back, r)[0]) == {'name', 'x', 'n'}
    assert results_rows(back, Outer()) is None
    assert back['date'].tolist() == df['date'].tolist()


def test_results_cut_anywhere_inside_a_line_are_refused(tmp_path):
    p, s = tmp_path / 'r.csv', Store(tmp_path / 'runs')
    s.put(Outer(), [dict(x=i / 7) for i in range(3)])
    text = save_results(s.frame([Outer()]), p).read_text()
    for cut in range(len(text)):
        if text[:cut].endswith('\n') and text[:cut].count('\n') > 1: continue     # whole rows are missing: a CSV cannot tell
        p.write_text(text[:cut])
        with pytest.raises(ReinitError, match='r.csv is cut short'): load_results(p)


def test_paper_tables():
    assert {m for m in paper_table('reinit_table1')['method']} == {'BL', 'WELSR', 'DSD', 'WELS', 'FC', 'LW'}
    with pytest.raises(ReinitError, match="did you mean 'reinit_table"): paper_table('reinit_tabel1')


def test_progress_is_silent_in_a_log_and_ends_cleanly(capsys):
    assert list(progress(range(3), label='x')) == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        for i in progress(range(3)): raise KeyboardInterrupt
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
    code = "import sys, reinit_nb.core; print([m for m in ('fastai', 'matplotlib', 'fastprogress', 'spacy') if m in sys.modules])"
    out = subprocess.run([sys.executable, '-c', code], env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[]'

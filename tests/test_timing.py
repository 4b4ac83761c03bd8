"Timing: turns, references, the garbage collector and threads"

import gc
import time

import pytest
import torch

from reinit_nb.core import ReinitError
from reinit_nb.timing import time_call, time_interleaved, torch_threads


def test_every_way_starts_a_turn():
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in 'abc'}
    time_interleaved(ways, repeats=4, warmup=0)
    assert ''.join(calls) == 'abc' + 'bca' + 'cab' + 'abc'


def test_warmup_and_number():
    calls = []
    time_interleaved({'a': lambda: calls.append('a')}, repeats=2, number=3, warmup=4)
    assert len(calls) == 4 + 2 * 3


def test_best_time_counts_and_the_slowest_is_the_reference(monkeypatch):
    times = iter([3.0, 10.0, 8.0, 2.0, 5.0, 9.0])  # turns: fast slow, slow fast, fast slow
    monkeypatch.setattr('reinit_nb.timing.time_call', lambda fn, number: next(times))
    table = time_interleaved(dict(fast=int, slow=int), repeats=3).set_index('way')
    assert table.seconds.to_dict() == dict(fast=2.0, slow=8.0)
    assert table.ratio.to_dict() == dict(fast=0.25, slow=1.0)
    assert table.paired_ratio.to_dict() == dict(fast=0.3, slow=1.0)  # of 3/10, 2/8, 5/9


def test_named_reference(monkeypatch):
    times = iter([2.0, 8.0])
    monkeypatch.setattr('reinit_nb.timing.time_call', lambda fn, number: next(times))
    table = time_interleaved(dict(fast=int, slow=int), repeats=1, reference='fast')
    assert table.ratio.tolist() == table.paired_ratio.tolist() == [1.0, 4.0]


def test_time_is_per_call():
    assert 0.005 <= time_call(lambda: time.sleep(0.005), number=3) < 1


@pytest.mark.parametrize('collecting', [True, False])
def test_garbage_collector_is_as_before(collecting):
    seen = []
    was = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        time_call(lambda: seen.append(gc.isenabled()))
        with pytest.raises(ZeroDivisionError):
            time_call(lambda: 1 / 0)
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False]


def test_threads_are_as_before():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        with torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise RuntimeError
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    'options, says',
    [
        (dict(repeats=0), 'repeats=0'),
        (dict(number=0), 'number=0'),
        (dict(warmup=-1), 'warmup=-1'),
        (dict(reference='on'), "did you mean 'one'"),
    ],
)
def test_wrong_input(options, says):
    with pytest.raises(ReinitError, match=says):
        time_interleaved(dict(one=int, two=int), **options)


def test_no_ways_and_no_threads():
    with pytest.raises(ReinitError, match='ways is empty'):
        time_interleaved({})
    with pytest.raises(ReinitError, match='n=0'):
        with torch_threads(0):
            pass

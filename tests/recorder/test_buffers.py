"""Memory that is used again from step to step."""

from __future__ import annotations

import tracemalloc
from itertools import combinations

import numpy as np
import pytest

from padiff.recorder.tensor_copy import ArrayPool, Difference
from padiff.records import InMemory, Record, Step


def step_of(*sources):
    records = (Record("fc", "forward", f"output.{k}", source, "float32", ()) for k, source in enumerate(sources))
    return Step(0, tuple(records))


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(200, 100), (300, 2, 100), (4000, 1000)], ids=["small", "of three axes", "large"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_memory_comes_back(shape, dtype):
    pool = ArrayPool()
    pool.keep = True
    arrays = [pool.empty(shape, dtype) for _ in range(4)]
    for array in arrays:
        assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, dtype, True)
        assert array.flags.writeable
    assert len({address(array) for array in arrays}) == 4
    for array, other in combinations(arrays, 2):
        assert not np.shares_memory(array, other)
    pool.recycle(step_of(InMemory(arrays[0]), InMemory(arrays[0].T), Difference(arrays[1], arrays[2])))
    held = [pool.empty(shape, dtype) for _ in range(4)]
    again = {address(array) for array in held}
    assert len(again) == 4
    assert {address(array) for array in arrays[:3]} < again
    assert address(arrays[3]) not in again  # nobody gave it back


def test_memory_of_samples_comes_back_with_the_step():
    pool = ArrayPool()
    pool.keep = True
    array = pool.empty((200, 100), np.float32)
    pool.take_back([array[:50]])
    assert address(pool.empty((200, 100), np.float32)) != address(array)
    pool.recycle(step_of())
    assert address(pool.empty((200, 100), np.float32)) == address(array)


def test_a_recorder_that_rests_holds_no_memory():
    pool = ArrayPool()
    tracemalloc.start()
    try:
        for keep, held in ((True, 12_000_000), (False, 0)):
            pool.keep = keep
            pool.recycle(step_of(InMemory(pool.empty((3000, 1000), np.float32))))
            assert tracemalloc.get_traced_memory()[0] == pytest.approx(held, abs=100_000)
    finally:
        tracemalloc.stop()


def test_sizes_that_are_no_longer_used_are_let_go():
    pool = ArrayPool()
    pool.keep = True
    long, short = pool.empty((900, 100), np.float32), pool.empty((500, 100), np.float32)
    pool.recycle(step_of(InMemory(long)))
    pool.recycle(step_of(InMemory(short)))
    assert address(pool.empty((900, 100), np.float32)) != address(long)
    assert address(pool.empty((500, 100), np.float32)) == address(short)


def test_other_arrays_are_left_alone():
    pool = ArrayPool()
    pool.keep = True
    reference = np.zeros((200, 100), np.float32)
    pool.recycle(step_of(InMemory(reference), InMemory(reference[1:])))
    assert not np.shares_memory(pool.empty((200, 100), np.float32), reference)

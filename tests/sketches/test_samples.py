"""Samples side by side are sketched as each alone is; memory is asked for in few pieces, and given back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from padiff.sketches.samples import Samples
from padiff.sketches.sketch import ELEMENTS, Sketch, cut_of, sample, sketch_of

SIZES = (1, 60, 61, 700, ELEMENTS, 5000)


def tensor(size, seed, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=size) * 3
    return values.astype(getattr(ml_dtypes, dtype, dtype))


def assert_sketches(samples, number, expected):
    assert samples.table[number].tobytes() == sketch_of(expected).row().tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_differences_and_sums(size, dtype):
    before, after, third = (tensor(size, seed, dtype) for seed in range(3))
    samples = Samples()
    numbers = [samples.add(cut_of(t)) for t in (before, after, third)]
    update = samples.difference(numbers[1], numbers[0])
    assert_sketches(samples, update, after - before)
    samples.add_to(numbers[2], numbers[0])
    late = samples.add(cut_of(after))  # the table is made anew
    assert_sketches(samples, numbers[2], third + before)
    assert_sketches(samples, late, after)
    assert_sketches(samples, update, after - before)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_several_updates_is_closed_without_what_they_were_made_of(size):
    """The optimizer stepped twice: what the first step made of a parameter is what the second one changed."""
    weights = [tensor(size, seed) for seed in range(3)]
    counts = {}
    samples = Samples(counts=counts)
    numbers = [samples.add(cut_of(t)) for t in weights]
    other = samples.add(cut_of(tensor(size, 3)))
    updates = [samples.difference(numbers[k + 1], numbers[k]) for k in range(2)]
    samples.close()
    for number, expected in [(numbers[0], weights[0]), (other, tensor(size, 3))]:
        assert_sketches(samples, number, expected)
    for k, update in enumerate(updates):
        assert_sketches(samples, update, weights[k + 1] - weights[k])
    assert not samples.table[numbers[1:]].any()
    assert sum(counts.values()) == 4


def test_differences_of_16_bits_are_not_rounded():
    before, after = np.full(100, 1.0), np.full(100, 1.0078125)  # neighbours in bfloat16
    samples = Samples()
    numbers = [samples.add(cut_of(t.astype(ml_dtypes.bfloat16))) for t in (after, before)]
    update = samples.difference(*numbers)
    assert Sketch.of_row(samples.table[update], 100, False).maximum == 0.0078125


def test_infinities_make_no_noise():
    """A gradient that overflowed: warnings are errors here, as a user may have them."""
    samples = Samples()
    one, other = (samples.add(cut_of(np.full(100, np.inf, np.float32))) for _ in range(2))
    update = samples.difference(one, other)
    samples.add_to(one, other)
    assert samples.table[update][6] == 1.0
    assert samples.table[one][6] == 1.0


def test_a_cut_follows_its_memory():
    array = tensor((80, 90), 0)
    for turned in (False, True):
        cut = cut_of(array, turned)
        for factor in (1, 5):
            array *= factor
            samples = Samples()
            number = samples.add(cut)
            expected = sketch_of(array, turned).row()
            array += 1  # a copy: training goes on under it
            assert samples.table[number].tobytes() == expected.tobytes()


class Elsewhere:
    """A device: what is brought over comes when it is waited for."""

    def __init__(self):
        self.brought = 0

    def bring(self, tensors):
        self.brought += 1
        there = [np.array(t) for t in tensors]
        return lambda: there


def test_samples_on_another_device():
    device, array = Elsewhere(), tensor(5000, 1)
    samples = Samples(bring=device.bring)
    here = samples.add(cut_of(array))
    there = [samples.add_elsewhere(sample(t)) for t in (array * 2, array * 0)]
    assert [samples.zero(n) for n in (here, *there)] == [False, False, True]
    update = samples.difference(there[0], there[1])
    samples.add_to(there[1], there[0])
    samples.fetch()
    assert device.brought == 1
    for number, expected in ((here, array), (there[0], array * 2), (there[1], array * 2)):
        assert_sketches(samples, number, expected)
    assert device.brought == 1
    # The sum was made on the device before the difference was taken.
    assert_sketches(samples, update, array - array)
    later = samples.add_elsewhere(sample(array))
    assert_sketches(samples, later, array)
    assert device.brought == 2


def test_memory_comes_in_few_pieces():
    given, counts = [], {}

    def empty(shape, dtype):
        given.append(np.full(shape, 99, dtype))
        return given[-1]

    # Of a first step it is not known how many there will be. Three more are the table, and what it is worked out in.
    for pieces in (5 + 3, 1 + 3, 1 + 3):
        given.clear()
        samples = Samples(empty, counts=counts)
        numbers = [samples.add(cut_of(tensor(300, k))) for k in range(50)]
        samples.close()
        assert len(given) == pieces
        for number in numbers:
            assert_sketches(samples, number, tensor(300, number))
    many = Samples(empty, counts={(ELEMENTS, np.float32): 10**6})
    given.clear()
    many.add(cut_of(tensor(5000, 0)))
    assert given[0].nbytes <= 1 << 21


def test_none_at_all():
    samples = Samples()
    assert samples.table.shape[0] == 0
    samples.fetch()
    samples.close()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5)])
def test_tensors_without_elements(shape):
    samples = Samples()
    one, other = (samples.add(cut_of(np.empty(shape, np.float32))) for _ in range(2))
    full = samples.add(cut_of(tensor(300, 0)))
    update = samples.difference(one, other)
    assert samples.zero(one)
    for number in (one, other, update):
        assert_sketches(samples, number, np.empty(shape, np.float32))
    assert_sketches(samples, full, tensor(300, 0))
    samples.close()

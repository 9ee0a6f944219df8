"""What processes hold parts of, put together: held against arrays that were cut up here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from padiff.compare.measure.pairs import measure_pair
from padiff.errors import SketchOnlyError
from padiff.pair.merge_ranks import merge_ranks
from padiff.records import InMemory, Pair, Record, Sketched, Step
from padiff.records.recorded import Part
from padiff.sketches.samples import Samples
from padiff.sketches.sketch import own_of, sketch_of

SHAPE = (90, 70)  # more elements than a sketch looks at
WHOLE = (np.random.default_rng(3).normal(size=SHAPE) + 2).astype(np.float32)
FLAT = WHOLE.reshape(-1)


def _block(rows, columns, kind="shard", copy=0, values=WHOLE):
    part = Part(SHAPE, (rows[0], columns[0]), kind, copy)
    return values[slice(*rows), slice(*columns)], part


def _range(start, stop):
    return FLAT[start:stop], Part(SHAPE, (start,), "shard")


TERM = np.random.default_rng(4).normal(size=SHAPE).astype(np.float32)
WAYS = {
    "rows": [_block((0, 30), (0, 70)), _block((30, 60), (0, 70)), _block((60, 90), (0, 70))],
    "columns": [_block((0, 90), (0, 33)), _block((0, 90), (33, 70))],
    "rows and columns": [_block(r, c) for r in ((0, 50), (50, 90)) for c in ((0, 20), (20, 70))],
    "ranges": [_range(0, 1001), _range(1001, 5000), _range(5000, 6300)],
    "nothing on one": [_block((0, 90), (0, 70)), _block((90, 90), (0, 70))],
    "replicas": [_block((0, 90), (0, 70), "replica")] * 3,
    "replicas of shards": [_block(r, (0, 70), "shard", copy) for copy in (0, 1) for r in ((0, 45), (45, 90))],
    "terms": [_block((0, 90), (0, 70), "partial", 0, WHOLE - TERM), _block((0, 90), (0, 70), "partial", 0, TERM)],
    "terms, twice": [
        _block((0, 90), (0, 70), "partial", copy, values) for copy in (0, 1) for values in (WHOLE - TERM, TERM)
    ],
    "terms of shards": [
        _block(rows, (0, 70), "partial", 0, values) for rows in ((0, 45), (45, 90)) for values in (WHOLE - TERM, TERM)
    ],
}


def _sketched(values, part, turned):
    samples, own = Samples(), own_of(part.shape, part.offset, values.shape, turned)
    number = samples.add_part(np.ascontiguousarray(values).reshape(-1)[own.elements], own)
    return Sketched(samples.table[number], part.size, turned)


def _steps(pieces, sketched=lambda rank: False, turned=False, stage="weight"):
    steps = []
    for rank, (values, part) in enumerate(pieces):
        source = _sketched(values, part, turned) if sketched(rank) else InMemory(values)
        record = Record("layer", stage, "weight", source, "float32", values.shape, part=part)
        steps.append(Step(0, (record,), rank))
    return steps


@pytest.mark.parametrize("way", WAYS)
def test_parts_make_up_the_whole(way):
    first, *others = merge_ranks(_steps(WAYS[way]))
    (record,) = first.records
    assert record.shape == SHAPE and record.part is None and not first.notes
    np.testing.assert_allclose(
        record.value, WHOLE, rtol=0 if "terms" not in way else 1e-5, atol=1e-6 * ("terms" in way)
    )
    assert record.value.dtype == np.float32
    assert not any(step.records for step in others)


@pytest.mark.parametrize("some", [False, True], ids=["all sketches", "one in full"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if "terms" not in way])
def test_sketches_of_parts_make_up_that_of_the_whole(way, turned, some):
    first, *_ = merge_ranks(_steps(WAYS[way], lambda rank: rank > 0 or not some, turned))
    found, expected = first.records[0].source.sketch, sketch_of(WHOLE, turned)
    np.testing.assert_allclose(found.projection, expected.projection, rtol=0, atol=2e-4)
    assert found.size == expected.size and found.transposed == turned
    for name in ("mean", "minimum", "maximum", "mean_abs", "mean_square", "zeros", "nonfinite"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-9), name
    with pytest.raises(SketchOnlyError):
        first.records[0].source.read()


WRONG = {
    "a process is missing": WAYS["rows"][:2],
    "a range is missing": WAYS["ranges"][::2],
    "two hold the same rows": [_block((0, 60), (0, 70)), _block((30, 60), (0, 70)), _block((60, 90), (0, 35))],
    "ranges overlap": [_range(0, 3150), _range(3000, 6150)],
    "of tensors of two shapes": [_block((0, 45), (0, 70)), (WHOLE[45:], Part((100, 70), (45, 0), "shard"))],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_whole_has_no_record_and_that_is_said(wrong):
    first, *others = merge_ranks(_steps(WRONG[wrong]))
    assert not first.records and not any(step.records for step in others)
    (note,) = first.notes
    assert note.startswith("parts of 1 parameter(s) are not recorded (layer/weight)")


#: What processes hold of what should be equal: by what each multiplies it, and the share by which one departs most.
DEPARTING = {
    "the first of two": ((10, 1), 9),
    "the second of two": ((1, 10), 9),
    "halved on one": ((1, 0.5), 0.5),
    "not reduced: the mean is as it should be": ((1.5, 0.5), 0.5),
    "one of three": ((1, 1, 10), 9),
    "not reduced, of four": ((0.4, 0.8, 1.2, 1.6), 0.6),
    "equal": ((1, 1, 1), 0),
}


@pytest.mark.parametrize(("factors", "apart"), DEPARTING.values(), ids=DEPARTING)
def test_a_replica_that_differs_is_what_is_measured_whichever_it_is(factors, apart):
    values = [WHOLE * np.float32(factor) for factor in factors]
    first, *_ = merge_ranks(_steps([_block((0, 90), (0, 70), "replica", values=each) for each in values]))
    other = Record("layer", "weight", "weight", InMemory(WHOLE), "float32", SHAPE)
    for pair in (Pair(0, other, first.records[0]), Pair(0, first.records[0], other)):
        figures = measure_pair(pair).figures
        assert figures.l2 == pytest.approx(apart * np.linalg.norm(WHOLE), rel=1e-5)


def test_what_is_no_parameter_stays_where_it_is():
    steps = _steps(WAYS["rows"])
    output = Record("layer", "forward", "output.0", InMemory(TERM), "float32", SHAPE)
    steps = [Step(0, (*step.records, output), step.rank) for step in steps]
    found = merge_ranks(steps)
    assert [[record.stage for record in step.records] for step in found] == [
        ["weight", "forward"],
        ["forward"],
        ["forward"],
    ]
    assert len({step.spread for step in found}) == 1 and found[0].spread


def test_steps_without_parts_are_as_they_were():
    steps = [
        Step(0, (Record("layer", "weight", "weight", InMemory(WHOLE), "float32", SHAPE),), rank) for rank in (0, 1)
    ]
    assert merge_ranks(steps) == steps and all(one is other for one, other in zip(merge_ranks(steps), steps))


@pytest.mark.parametrize("lacking", ["its own", "one"])
def test_gradients_of_an_optimizer_that_is_shared_out_are_one_step(lacking):
    """Each of two processes consumes two of four gradients, or one of them lacks one that the other has."""
    names = ("a", "b", "c", "d")
    own = [names[:2], names[2:]] if lacking == "its own" else [names, names[:3]]
    steps = []
    for rank, consumed in enumerate(own):
        records = [(stage, name) for name in consumed for stage in ("grad", "update")]
        records = [*(("weight", name) for name in names), *records]
        values = {key: np.full(3, number, np.float32) for number, key in enumerate(sorted(records))}
        steps.append(
            Step(0, tuple(Record("fc", *key, InMemory(values[key]), "float32", (3,)) for key in records), rank=rank)
        )
    first, other = merge_ranks(steps)
    sites = [{record.site for record in step.records} for step in (first, other)]
    if lacking == "one":
        assert first is steps[0] and other is steps[1]
    else:
        assert sites == [{f"fc/{stage}/{name}" for stage in ("weight", "grad", "update") for name in names}, set()]
        assert first.spread != merge_ranks([steps[0], replace(steps[0], rank=1)])[0].spread


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fault", ["", "moved", "twice"])
def test_pieces_that_overlap_are_found_whatever_the_axis_and_their_order(axis, fault):
    bounds = np.linspace(0, SHAPE[axis], 8).astype(int)
    ranges = [[0, SHAPE[0], 0, SHAPE[1]] for _ in bounds[1:]]
    for own, begin, end in zip(ranges, bounds, bounds[1:]):
        own[2 * axis : 2 * axis + 2] = int(begin), int(end)
    if fault == "moved":
        ranges[3][2 * axis], ranges[3][2 * axis + 1] = ranges[3][2 * axis] - 1, ranges[3][2 * axis + 1] - 1
    if fault == "twice":  # as many elements in all, some of them held twice
        ranges[5] = [*ranges[2]]
        ranges[5][2 * axis + 1] += (bounds[6] - bounds[5]) - (bounds[3] - bounds[2])
    pieces = [_block((a, b), (c, d), "shard", 0, WHOLE) for a, b, c, d in ranges]
    pieces = [pieces[k] for k in np.random.default_rng(axis).permutation(len(pieces))]
    first, *_ = merge_ranks(_steps(pieces))
    assert bool(first.records) is not bool(fault) and bool(first.notes) is bool(fault)

"""Steps that are alike are paired as each would be by itself."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from kit.records import as_sketch, info, linear, record, root, step, write_run

from padiff import compare_runs
from padiff.align import align
from padiff.align.call_order import calls_differ
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.pair.merge_ranks import merge_ranks
from padiff.pair.plans import PairPlans
from padiff.pair.steps import pair_steps
from padiff.records import LOOP, ROOT, Both, InMemory, Pair
from padiff.records.recorded import Part

PACKED, FILES = Storage(pack=True), Storage()
TREE = info(root(2), linear("a", 4, 8), linear("b", 8, 2))


def reported(pairs: list[Pair]):
    return [
        (p.step, p.reference and p.reference.site, p.candidate and p.candidate.site, p.layout, p.scales, p.optional)
        for p in pairs
    ]


def mixed(number: int, seed: int, scale: float = 1.0):
    """A step of whatever records; by its seed the same ones, with other values in each step."""
    rng, values = random.Random(seed), np.random.default_rng(number)
    records = []
    for layer in (ROOT, "a", "b", "elsewhere", LOOP):
        for stage in ("input", "weight", "forward", "backward", "grad", "update"):
            for slot in ("weight", "bias", "output.0", "output.x"):
                for call in range(rng.choice([0, 1, 1, 2])):
                    shape = rng.choice([(2, 3), (3, 2), (4,), ()])
                    records.append(record(layer, stage, slot, values.normal(size=shape).astype(np.float32), call=call))
    rng.shuffle(records)
    return step(number, records, loss_scale=scale)


def runs(tmp_path, reference, candidate, storage=PACKED):
    return [
        open_run(write_run(tmp_path / name, TREE, steps, storage=storage))
        for name, steps in zip("rc", (reference, candidate))
    ]


def both(found, number):
    return Both(*(run.steps(number)[0] for run in found))


@pytest.mark.parametrize("storage", [PACKED, FILES], ids=["packed", "files"])
@pytest.mark.parametrize("seed", range(6))
def test_steps_that_are_alike_are_paired_as_each_by_itself(seed, storage, tmp_path, counted):
    reference = [mixed(n, seed, scale=2.0**n) for n in range(4)]
    candidate = [mixed(n, seed + 100, scale=4.0**n) for n in range(4)]
    found, alignment, known = runs(tmp_path, reference, candidate, storage), align(TREE, TREE), PairPlans()
    for number in range(4):
        sides = both(found, number)
        pairs = known.pairs(*sides, alignment)
        assert reported(pairs) == reported(pair_steps(*sides, alignment))
        assert all(a is None or any(a is r for r in sides.reference.records) for a in (p.reference for p in pairs))
        assert all(b is None or any(b is r for r in sides.candidate.records) for b in (p.candidate for p in pairs))
    # Where one side makes calls that the other does not, values tell which.
    assert len(counted) == 1 or calls_differ(sides.map(lambda step: step.records))


def test_steps_of_two_kinds_that_take_turns_are_each_paired_once(tmp_path, counted):
    reference = [mixed(n, n % 2) for n in range(6)]
    found, alignment, known = runs(tmp_path, reference, reference), align(TREE, TREE), PairPlans()
    for number in range(6):
        sides = both(found, number)
        assert reported(known.pairs(*sides, alignment)) == reported(pair_steps(*sides, alignment))
    assert len(counted) == 2


def test_a_step_in_files_that_is_unlike_the_one_before_is_paired_by_itself(tmp_path, counted):
    reference = [mixed(n, n // 3) for n in range(6)]
    found, alignment, known = runs(tmp_path, reference, reference, FILES), align(TREE, TREE), PairPlans()
    for number in range(6):
        sides = both(found, number)
        assert reported(known.pairs(*sides, alignment)) == reported(pair_steps(*sides, alignment))
    assert len(counted) == 2


def test_pairs_of_ever_other_steps_in_files_are_not_all_remembered(tmp_path):
    steps = [step(n, [record("a", "forward", "output.0", np.ones(n + 1, np.float32))]) for n in range(20)]
    (run, _), alignment, known = runs(tmp_path, steps, steps, FILES), align(TREE, TREE), PairPlans()
    for number in range(20):
        (one,) = run.steps(number)
        (pair,) = known.pairs(one, one, alignment)
        assert pair.reference.shape == (number + 1,)
    assert len(known._known) == 16


@pytest.mark.parametrize("storage", [PACKED, FILES], ids=["packed", "files"])
def test_another_alignment_pairs_anew(storage, tmp_path):
    tree = info(root(2), linear("a", 4, 4), linear("b", 4, 4))
    steps = [step(n, [record(path, "forward", "output.0", np.ones(4, np.float32)) for path in "ab"]) for n in range(2)]
    found, known = runs(tmp_path, steps, steps, storage), PairPlans()
    for layer_map in (None, [("a", "b"), ("b", "a")]):
        for number in range(2):
            sides, alignment = both(found, number), align(tree, tree, layer_map)
            assert reported(known.pairs(*sides, alignment)) == reported(pair_steps(*sides, alignment))


@pytest.mark.parametrize("storage", [PACKED, FILES], ids=["packed", "files"])
def test_calls_of_a_loss_that_values_tell_are_looked_at_in_each_step(storage, tmp_path):
    def one(number: int, turned: bool):
        values = [np.full(3, 1.0 + k, np.float32) for k in range(2)]
        return step(
            number,
            [
                record(LOOP, "loss", f"mse_loss().{role}", value, call=call)
                for call, value in enumerate(values[::-1] if turned else values)
                for role in ("prediction", "0")
            ],
        )

    found = runs(tmp_path, [one(0, False), one(1, False)], [one(0, False), one(1, True)], storage)
    alignment, known = align(TREE, TREE), PairPlans()
    calls = []
    for number in range(2):
        pairs = known.pairs(*both(found, number), alignment)
        calls.append([(p.reference.call, p.candidate.call) for p in pairs if p.complete])
    assert sorted(calls[0]) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert sorted(calls[1]) == [(0, 1), (0, 1), (1, 0), (1, 0)]


@pytest.mark.parametrize("count", [2, 9])
def test_steps_whose_parameters_are_spread_are_paired_once_for_each_process(count, tmp_path, counted):
    def ran(number, rank, factor):
        values = np.random.default_rng(number).normal(size=(9, 4)).astype(np.float32) * np.float32(factor)
        bounds = [9 * k // count for k in range(count + 1)]
        begin, end = bounds[rank : rank + 2]
        own = replace(record("a", "weight", "weight", values[begin:end]), part=Part((9, 4), (begin, 0), "shard"))
        out = record("a", "forward", "output.0", values[:2] + np.float32(rank))
        return replace(step(number, [own, out]), rank=rank)

    found = []
    for name, factor in (("r", 1.0), ("c", 1 + 1e-6)):
        writer = RunWriter(tmp_path / name, replace(TREE, world_size=count), storage=PACKED)
        for number in range(3):
            for rank in range(count):
                writer.add_step(ran(number, rank, factor))
        writer.close()
        found.append(open_run(tmp_path / name))
    alignment, known = align(*(run.info for run in found)), PairPlans()
    for number in range(3):
        sides = Both(*(merge_ranks(run.steps(number)) for run in found))
        for one, other in zip(sides.reference, sides.candidate):
            pairs = known.pairs(one, other, alignment)
            assert reported(pairs) == reported(pair_steps(one, other, alignment))
        whole = next(p for p in known.pairs(sides.reference[0], sides.candidate[0], alignment) if p.stage == "weight")
        expected = np.random.default_rng(number).normal(size=(9, 4)).astype(np.float32)
        np.testing.assert_array_equal(whole.reference.value, expected)
    assert len(counted) == count


def test_sketches_of_a_process_that_holds_a_part_are_compared_in_each_step(tmp_path):
    values, runs = np.random.default_rng(0).normal(size=(3, 2, 70, 60)).astype(np.float32), []
    for name, factor in (("a", 1.0), ("b", 1.5)):
        steps = [
            step(
                number,
                [
                    as_sketch(
                        record("a", "forward", "output.0", output[:5, :7] * np.float32(factor if number == 2 else 1.0))
                    ),
                    replace(record("a", "weight", "weight", weight), part=Part((70, 60), (0, 0), "shard")),
                ],
            )
            for number, (output, weight) in enumerate(values)
        ]
        runs.append(write_run(tmp_path / name, info(root(1), linear("a", 60, 70)), steps, storage=PACKED))
    report = compare_runs(*runs, workers=1)
    assert [diff.passed for diff in report.diffs] == [True] * 5 + [False]
    assert report.first_diff.stage == "forward" and report.first_diff.step == 2
    assert report.failed[0].figures.rel_l2 == pytest.approx(0.5, rel=1e-6)


def test_where_layers_lie_in_other_layouts_it_matters_which_tensors_are_the_same(tmp_path, counted):
    """A container gives out what a layer in it gave out: in one step the same tensor, in the next one a copy of it."""
    square = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)

    def one(number, turned):
        inner = InMemory(square.transpose(0, 2, 1).copy() if turned else square)
        outer = inner if number == 0 else InMemory(inner.array.copy())
        first = record("a", "forward", "output.0", square[:, :, :3].transpose(0, 2, 1) if turned else square[:, :, :3])
        inside = replace(record("b", "forward", "output.0", inner.array), source=inner)
        around = replace(record(ROOT, "forward", "output.0", inner.array), source=outer)
        return step(number, [first, inside, around])

    found = runs(tmp_path, [one(n, False) for n in range(2)], [one(n, True) for n in range(2)])
    alignment, known = align(TREE, TREE), PairPlans()
    for number in range(2):
        sides = both(found, number)
        assert reported(known.pairs(*sides, alignment)) == reported(pair_steps(*sides, alignment))
    assert len(counted) == 2

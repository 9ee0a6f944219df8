"""A run folder within a number of bytes: never above it, and the first, the worst and the latest steps stay."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from kit.frameworks import TORCH
from kit.nets import batch, mlp, one_step
from kit.records import as_sketch, info, linear, record, root, step, toy_info, toy_steps, write_run

import padiff
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.errors import WriterError
from padiff_hooks.paired import PairedRuns

TREE = info(root(1), linear("fc", 20, 30))
WAYS = {"files": {}, "packed": {"pack": True}, "zlib": {"pack": True, "compression": "zlib"}}


def total(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def made(number, records=4, size=2000, loss=1.0, rank=0, sketch=False):
    """A step of some tensors of noise, and a loss."""
    data = np.random.default_rng(number + 1000 * rank)
    some = [record("fc", "forward", f"output.{k}", data.normal(size=size).astype(np.float32)) for k in range(records)]
    some = [as_sketch(one) for one in some] if sketch else some
    return replace(step(number, [*some, record("(loop)", "loss", "loss", np.asarray(loss))]), rank=rank)


def filled(folder, steps, limit, marks=None, check=True, **options):
    """Write steps one by one and look after each; returns the numbers that are left."""
    storage = Storage(max_bytes=limit, **options.pop("storage", {}))
    writer = RunWriter(folder, options.pop("tree", TREE), storage=storage, **options)
    for one in steps:
        writer.add_step(one)
        writer.flush()
        if marks and one.number in marks:
            writer.mark(one.number, marks[one.number])
        if check:
            assert total(folder) <= limit
            assert one.number in open_run(folder).numbers()  # the latest is there
            assert min(open_run(folder).numbers()) == 0
    writer.close()
    assert total(folder) <= limit
    return open_run(folder).numbers()


@pytest.mark.parametrize("way", WAYS)
def test_never_above_the_limit(tmp_path, way):
    numbers = filled(tmp_path / "run", [made(n) for n in range(30)], 200_000, storage=WAYS[way])
    assert numbers[0] == 0
    assert numbers[1:] == list(range(numbers[1], 30))  # without worse ones, the latest
    assert 4 <= len(numbers) <= 7
    for number in numbers:
        assert len(open_run(tmp_path / "run").steps(number)[0].records) == 5


@pytest.mark.parametrize("way", ["files", "packed"])
def test_a_limit_is_made_use_of(tmp_path, way):
    """Room for twenty steps holds nearly twenty."""
    folder = tmp_path / "one"
    filled(folder, [made(0)], 10**9, storage=WAYS[way])
    filled(tmp_path / "two", [made(0), made(1)], 10**9, storage=WAYS[way])
    each = total(tmp_path / "two") - total(folder)
    numbers = filled(tmp_path / "run", [made(n) for n in range(40)], total(folder) + 20 * each, storage=WAYS[way])
    assert 18 <= len(numbers) <= 21


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_any_size(tmp_path, way):
    """Sequences of ever other lengths, in ever other structures; sketches in between."""
    data = np.random.default_rng(0)
    steps = [
        made(
            n,
            records=int(data.integers(1, 60)),
            size=int(data.integers(1, 1500)),
            sketch=way == "packed" and n % 3 == 0,
        )
        for n in range(40)
    ]
    numbers = filled(tmp_path / "run", steps, 900_000, storage=WAYS[way])
    assert len(numbers) > 3


@pytest.mark.parametrize("way", ["packed", "zlib"])
def test_ever_other_shapes_leave_nothing_behind(tmp_path, way):
    """What the records of steps that are gone were called must not fill the folder."""
    steps = [made(n, records=30, size=10 + n, sketch=way == "packed") for n in range(120)]
    numbers = filled(tmp_path / "run", steps, 250_000, storage=WAYS[way])
    assert numbers[1:] == list(range(numbers[1], 120))
    assert len(numbers) >= 5
    for number in numbers:
        assert len(open_run(tmp_path / "run").steps(number)[0].records) == 31


@pytest.mark.parametrize("way", ["files", "packed"])
def test_a_step_of_many_more_records(tmp_path, way):
    """What a record costs beside its values counts before it is written."""
    steps = [made(n, records=1, size=8000) for n in range(6)] + [made(6, records=150, size=1)]
    filled(tmp_path / "run", steps, 300_000 if way == "files" else 130_000, storage=WAYS[way])


def test_sketches_are_small(tmp_path):
    numbers = filled(tmp_path / "run", [made(n, sketch=True) for n in range(100)], 200_000, storage={"pack": True})
    assert len(numbers) > 40


@pytest.mark.parametrize("way", WAYS)
def test_the_worst_stay(tmp_path, way):
    marks = {3: 2.0, 5: 7.0, 8: 0.5, 12: 9.0, 14: 5.0, 20: 0.1}
    numbers = filled(tmp_path / "run", [made(n) for n in range(30)], 300_000, marks, storage=WAYS[way])
    assert numbers[:4] == [0, 5, 12, 14]
    assert numbers[4:] == list(range(numbers[4], 30))
    assert len(numbers) > 5


def test_the_first_steps_with_nan_stay(tmp_path):
    steps = [made(n, loss=math.nan if n >= 10 else 1.0) for n in range(30)]
    numbers = filled(tmp_path / "run", steps, 300_000, {4: 3.0})
    assert numbers[:4] == [0, 10, 11, 12]
    assert numbers[-1] == 29


def test_a_sketch_with_nan_is_noticed(tmp_path):
    steps = []
    for n in range(20):
        one = made(n, records=40)
        values = np.full(10, np.nan if n == 4 else 1.0, np.float32)
        steps.append(replace(one, records=(*one.records, as_sketch(record("fc", "grad", "weight", values)))))
    numbers = filled(tmp_path / "run", steps, 2_000_000, storage={"pack": True})
    assert 4 in numbers
    assert 3 not in numbers


def test_where_only_few_fit_the_least_bad_of_the_worst_go(tmp_path):
    numbers = filled(tmp_path / "run", [made(n) for n in range(12)], 150_000, {2: 3.0, 4: 9.0, 6: 5.0, 7: 1.0})
    assert numbers[:2] == [0, 4]
    assert numbers[-1] == 11


@pytest.mark.parametrize("way", WAYS)
def test_too_small_for_anything(tmp_path, way):
    with pytest.raises(WriterError, match=r"max_bytes=40,000 is too small.*detail"):
        filled(tmp_path / "run", [made(n) for n in range(3)], 40_000, storage=WAYS[way], check=False)
    assert total(tmp_path / "run") <= 40_000


def test_too_small_once_a_step_is_larger(tmp_path):
    steps = [made(0), made(1), made(2, size=20_000), made(3)]
    with pytest.raises(WriterError, match=r"step 2 could not be written.*max_bytes=150,000 is too small"):
        filled(tmp_path / "run", steps, 150_000)
    assert open_run(tmp_path / "run").numbers()[0] == 0


@pytest.mark.parametrize("way", WAYS)
def test_resume_counts_what_is_there(tmp_path, way):
    folder = tmp_path / "run"
    filled(folder, [made(n) for n in range(5)], 10**9, storage=WAYS[way])
    before = total(folder)
    numbers = filled(folder, [made(n) for n in range(5, 9)], before, storage=WAYS[way], existing="resume")
    assert numbers[0] == 0
    assert numbers[-1] == 8
    less = filled(folder, [made(9)], before // 2, storage=WAYS[way], existing="resume")
    assert less[0] == 0
    assert less[-1] == 9
    assert len(less) < len(numbers)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_written_again(tmp_path, way):
    """The old one and the new one are there at the same time, for a moment."""
    folder = tmp_path / "run"
    filled(folder, [made(n) for n in range(4)], 10**9, storage=WAYS[way])
    limit = total(folder) + 2000
    highest = []

    def look(_):
        highest.append(total(folder))

    storage = Storage(max_bytes=limit, **WAYS[way])
    writer = RunWriter(folder, TREE, storage=storage, existing="resume", on_written=look)
    sizes = []
    import os

    rename = os.rename

    def watched(source, target):
        sizes.append(total(folder))
        rename(source, target)

    os.rename = watched
    try:
        for number in (2, 3, 4):
            writer.add_step(made(number))
            writer.flush()
    finally:
        os.rename = rename
    writer.close()
    assert max(sizes) <= limit
    assert max(highest) <= limit
    assert {0, 4} <= set(open_run(folder).numbers())


def test_two_ranks(tmp_path):
    limit = 400_000
    tree = info(root(1), linear("fc", 20, 30), world_size=2)
    writers = [
        RunWriter(
            tmp_path / "run", tree, rank=rank, storage=Storage(max_bytes=limit), existing=("error", "resume")[rank]
        )
        for rank in range(2)
    ]
    for number in range(20):
        for rank, writer in enumerate(writers):
            writer.add_step(made(number, rank=rank))
            writer.flush()
            assert total(tmp_path / "run") <= limit
    for writer in reversed(writers):
        writer.close()
    found = open_run(tmp_path / "run")
    assert found.numbers()[0] == 0
    assert found.numbers()[-1] == 19
    assert 3 < len(found.numbers()) < 10
    assert all(len(found.steps(number)) == 2 for number in found.numbers())


def test_another_rank_that_is_ahead(tmp_path):
    """What it wrote of later steps counts, though those steps are not whole yet."""
    limit = 300_000
    tree = info(root(1), linear("fc", 20, 30), world_size=2)
    writers = [
        RunWriter(
            tmp_path / "run", tree, rank=rank, storage=Storage(max_bytes=limit), existing=("error", "resume")[rank]
        )
        for rank in range(2)
    ]
    for number in range(15):
        if number + 1 < 15:
            writers[1].add_step(made(number + 1, rank=1)) if number else [
                writers[1].add_step(made(k, rank=1)) for k in (0, 1)
            ]
            writers[1].flush()
        writers[0].add_step(made(number))
        writers[0].flush()
        assert total(tmp_path / "run") <= limit
    for writer in reversed(writers):
        writer.close()
    assert open_run(tmp_path / "run").numbers()[-1] == 14


# -- who looks on ------------------------------------------------------------------------------------------------------


def test_a_pair_of_runs_whose_steps_vanish(tmp_path):
    """`padiff watch` over a run that drops steps: those it saw are reported once, those it missed never."""
    reference = write_run(tmp_path / "torch", toy_info(), toy_steps(range(12)))
    writer = RunWriter(tmp_path / "paddle", toy_info(paddle=True), storage=Storage(max_bytes=80_000), existing="error")
    runs, seen = PairedRuns(reference, tmp_path / "paddle"), []
    for one in toy_steps(range(12), paddle=True):
        writer.add_step(one)
        writer.flush()
        if one.number % 3 == 2:
            seen += [report.coverage.steps[0] for report in runs.poll()]
    assert not runs.finished()
    writer.close()
    seen += [report.coverage.steps[0] for report in runs.poll()]
    assert seen == sorted(set(seen))
    assert seen[0] == 0
    assert seen[-1] == 11
    assert len(open_run(tmp_path / "paddle").numbers()) < 10
    assert runs.finished()
    report = padiff.compare_runs(reference, tmp_path / "paddle")
    assert report.passed
    assert report.coverage.steps == tuple(open_run(tmp_path / "paddle").numbers())
    assert report.coverage.reference_steps


def test_a_step_that_vanishes_while_it_is_read(tmp_path, monkeypatch):
    import shutil

    reference = write_run(tmp_path / "torch", toy_info(), toy_steps(range(3)))
    candidate = write_run(tmp_path / "paddle", toy_info(paddle=True), toy_steps(range(3), paddle=True))
    runs, seen = PairedRuns(reference, candidate), []
    for report in runs.poll():
        number = report.coverage.steps[0]
        seen.append(number)
        if number == 0:
            shutil.rmtree(candidate / "steps/00000001")  # it was in the list of this poll already
    assert seen == [0, 2]
    assert runs.finished()


@pytest.mark.parametrize("options", [{}, {"pack": True}, {"detail": "sketch"}, {"compression": "zlib"}], ids=str)
def test_a_recorder_with_a_limit(tmp_path, options):
    kit = TORCH
    kit.seed(0)
    model = mlp(kit, (60, 80, 3))
    optimizer = kit.sgd(model.parameters())
    limit = 120_000 if "detail" in options else 400_000
    with padiff.record(model, tmp_path / "run", optimizer=optimizer, max_bytes=limit, **options) as rec:
        for number in range(20):
            x, y = batch(kit, (6, 60), seed=number)
            one_step(kit, model, optimizer, x, y)
            rec.log_loss(math.nan if number == 6 else 1.0)
            rec.try_dump()
            rec.flush()
            if number == 9:
                rec.mark(9, 5.0)
            assert total(tmp_path / "run") <= limit
    numbers = open_run(tmp_path / "run").numbers()
    assert {0, 6, 9, 19} <= set(numbers)
    assert len(numbers) < 20

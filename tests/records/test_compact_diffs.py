"""Diffs of long comparisons are folded, and come out again as they went in."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
from kit.records import info, plain, planted, record, root, step, toy_folder

import padiff.compare.coverage
from padiff import Tolerance, compare_runs
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.errors import RunFolderError
from padiff.records import (
    TRANSPOSED,
    Both,
    CompactDiffs,
    Diff,
    Figure,
    Figures,
    InMemory,
    Judgement,
    Kind,
    Pair,
    Problem,
    Rule,
    Sketched,
    floor_lines,
    third_lines,
)
from padiff.records.compared import Float64Reference
from padiff.report_formats import json_parts, stage_table, to_json, to_junit, to_markdown, verdict
from padiff.sketches.sketch import sketch_of

FAULT = planted("body.0/forward/output.0", lambda v: v + 1e-2, at=1)


@pytest.fixture
def runs(tmp_path):
    return toy_folder(tmp_path / "a", range(4)), toy_folder(tmp_path / "b", range(4), paddle=True, plant=FAULT)


@pytest.fixture
def folding(monkeypatch):
    monkeypatch.setattr(padiff.compare.coverage, "_UNFOLDED", 0)


def reported(diff: Diff):
    """All of a diff but where its tensors are."""
    sides = [r and replace(r, source=InMemory(np.zeros(()))) for r in (diff.pair.reference, diff.pair.candidate)]
    sides = [side and {f.name: getattr(side, f.name) for f in fields(side) if f.name != "source"} for side in sides]
    pair = (diff.pair.step, diff.pair.layout, diff.pair.scales, diff.pair.optional, *sides)
    return (pair, diff.figures, diff.passed, diff.judgement, diff.problem)


@pytest.mark.parametrize("policy", [None, Tolerance(1e-6, 1e-6, "strict")], ids=["noise", "fixed"])
def test_a_folded_report_says_the_same(runs, policy, monkeypatch):
    plain_report = compare_runs(*runs, policy=policy)
    monkeypatch.setattr(padiff.compare.coverage, "_UNFOLDED", len(plain_report.diffs) // 2)
    folded = compare_runs(*runs, policy=policy)
    assert isinstance(folded.diffs, CompactDiffs) and not isinstance(plain_report.diffs, CompactDiffs)
    assert [reported(d) for d in folded.diffs] == [reported(d) for d in plain_report.diffs]
    assert folded.first_diff == plain_report.first_diff and not folded.passed
    assert folded.coverage == plain_report.coverage
    assert reported(folded.worst) == reported(plain_report.worst)
    assert [reported(d) for d in folded.failed] == [reported(d) for d in plain_report.failed] != []
    for made in (verdict, to_json, to_junit, to_markdown, stage_table):
        assert made(folded) == made(plain_report)


def test_the_text_of_a_report_in_json_is_written_part_by_part_a_diff_in_each_line(runs):
    report = compare_runs(*runs)
    text = "".join(json_parts(report))
    # What the library itself makes of the values: dicts in the same order, floats to the bit.
    assert json.dumps(json.loads(text)) == json.dumps(to_json(report))
    whole = [json.loads(line.strip().rstrip(",")) for line in text.splitlines() if line.startswith('{"stage"')]
    assert whole == [diff for step in to_json(report)["steps"] for diff in step["diffs"]] != []


def test_a_folded_report_is_a_sequence_as_any(runs, folding, monkeypatch):
    folded = compare_runs(*runs)
    all_of_it = list(folded.diffs)
    count = len(folded.diffs)
    assert count == len(all_of_it) > 40
    for k in (0, 1, count // 2, count - 1, -1, -count):
        assert reported(folded.diffs[k]) == reported(all_of_it[k])
    for k in (count, -count - 1):
        with pytest.raises(IndexError):
            folded.diffs[k]
    assert [reported(d) for d in folded.diffs[-3:]] == [reported(d) for d in all_of_it[-3:]]
    failed = [d for d in all_of_it if not d.passed]
    assert len(folded.failed) == len(failed) and reported(folded.failed[0]) == reported(failed[0])
    assert [reported(d) for d in folded.failed[:2]] == [reported(d) for d in failed[:2]]
    with pytest.raises(IndexError):
        folded.failed[len(failed)]


def test_floors_and_distances_from_float64_are_looked_for_only_where_there_are_any(runs):
    report = compare_runs(*runs)
    assert not isinstance(report.diffs, CompactDiffs)
    at = next(k for k, diff in enumerate(report.diffs) if diff.figures is not None and diff.compared)
    for changed, lines, other in (
        ({"floor": 1e-9}, floor_lines, third_lines),
        ({"third": Float64Reference(Both(1e-7, 3e-7), "reference")}, third_lines, floor_lines),
    ):
        diffs = list(report.diffs)
        diffs[at] = replace(diffs[at], figures=replace(diffs[at].figures, **changed))
        unfolded = replace(report, diffs=tuple(diffs))
        folded = CompactDiffs(Both(*map(open_run, runs)))
        folded.add(diffs, Both(0, 0), 0)
        assert lines(unfolded) == lines(replace(report, diffs=folded)) != []
        assert other(unfolded) == other(replace(report, diffs=folded)) == []
        assert folded.holds("floor") is (lines is floor_lines)


def test_tensors_of_a_folded_report_are_read_from_their_own_step(runs, folding):
    for diff in compare_runs(*runs).diffs:
        for run, side in zip(runs, (diff.pair.reference, diff.pair.candidate)):
            if side is not None:
                (whole,) = open_run(run).steps(diff.pair.step)
                np.testing.assert_array_equal(side.value, whole.records[side.order].value)


def test_a_step_that_is_gone_is_an_error_when_its_tensors_are_looked_at(runs, folding):
    report = compare_runs(*runs)
    shutil.rmtree(runs[0] / "steps" / "00000002")
    one, gone = (next(d for d in report.diffs if d.pair.step == n and d.pair.complete) for n in (1, 2))
    assert one.pair.reference.value.size
    with pytest.raises(RunFolderError, match="00000002"):
        _ = gone.pair.reference.value
    assert gone.pair.candidate.value.size


def test_sketches_of_ranks_are_found_again(tmp_path, folding):
    """Each rank has other values; one tensor is too small to be more than itself, one is sampled."""

    def made(path, seed):
        rng = np.random.default_rng(seed)
        about = replace(info(root(2), plain("l0", "relu"), plain("l1", "relu")), world_size=2)
        writer = RunWriter(path, about, storage=Storage(pack=True))
        for number in range(3):
            for rank in (0, 1):
                records = []
                for k, size in enumerate((40, 5000)):
                    values = rng.normal(size=size).astype(np.float32)
                    one = record(f"l{k}", "forward", "output.0", values.reshape(8, -1))
                    records.append(replace(one, source=Sketched(sketch_of(values.reshape(8, -1)).row(), size)))
                writer.add_step(replace(step(number, records), rank=rank))
        writer.close()
        return path

    folders = made(tmp_path / "a", 1), made(tmp_path / "b", 2)
    report = compare_runs(*folders)
    assert isinstance(report.diffs, CompactDiffs) and len(report.diffs) == 12
    expected = [
        run_step.records[k].sketch.row()
        for number in range(3)
        for run_step in open_run(folders[1]).steps(number)
        for k in (0, 1)
    ]
    for diff, row in zip(report.diffs, expected):
        assert diff.pair.candidate.source.sketched
        np.testing.assert_array_equal(diff.pair.candidate.sketch.row(), row)


SIDE = record("a", "forward", "output.0", np.zeros((3, 4), np.float32))
FILED = replace(SIDE, source=Sketched(np.zeros(68), 12))
NOTHING, ANYTHING = (Judgement(Figure.REL_L2, 0.0, limit, Rule.EQUAL) for limit in (0.0, np.inf))
DIFFS = {
    "complete": Diff(
        Pair(5, FILED, FILED, TRANSPOSED, Both(1.0, 8.0)),
        Figures(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 12, (2, 3), Both(0.5, -0.5), 3, 2, 1, 0.25, "tensors", 0.125),
        passed=False,
        judgement=Judgement(Figure.REL_L2, 5 / 6, 0.5, Rule.ROUNDING),
        problem=Problem(Kind.NONFINITE, "something"),
    ),
    "the first element": Diff(Pair(5, FILED, FILED), Figures(size=12, index=(0, 0)), judgement=NOTHING),
    "no index": Diff(Pair(5, FILED, FILED), Figures(size=12)),
    "an index of another shape": Diff(Pair(5, FILED, FILED), Figures(size=12, index=(7,))),
    "an index beyond": Diff(Pair(5, FILED, FILED), Figures(size=30, index=(2, 9))),
    "no figures": Diff(Pair(5, FILED, FILED), problem=Problem(Kind.UNMEASURABLE, "not measured")),
    "the reference alone": Diff(Pair(5, FILED, None, optional=True), Figures(size=12, reference_l2=3.0)),
    "the candidate alone": Diff(Pair(5, None, FILED), problem=Problem(Kind.MISSING, "missing on the reference")),
    "infinite": Diff(Pair(5, FILED, FILED), Figures(max_abs=np.inf, values=Both(np.inf, -np.inf)), judgement=ANYTHING),
    "worked out": Diff(Pair(5, SIDE, FILED), Figures(size=12, index=(1, 1))),
    "no elements": Diff(Pair(5, *(replace(FILED, shape=(0, 4)) for _ in "ab")), Figures(size=0), judgement=NOTHING),
}


def test_every_kind_of_diff_comes_out_as_it_went_in(tmp_path):
    runs = Both(*(open_run(toy_folder(tmp_path / side, [0])) for side in "ab"))
    folded = CompactDiffs(runs)
    folded.add(list(DIFFS.values()), Both(5, 5), 0)
    for diff, name in zip(folded, DIFFS):
        assert reported(diff) == reported(DIFFS[name]), name
    assert [reported(folded[k]) for k in range(len(DIFFS))] == [reported(d) for d in DIFFS.values()]
    # What was worked out is in no file, and so is kept.
    assert folded[list(DIFFS).index("worked out")].pair.reference.source is SIDE.source


@pytest.mark.slow
def test_a_long_comparison_keeps_little_of_each_diff(tmp_path, folding):
    layers = 40
    row = sketch_of(np.random.default_rng(0).normal(size=5000).astype(np.float32)).row()
    some = [
        replace(record(f"l{k}", "forward", "output.0", np.zeros(5000, np.float32)), source=Sketched(row, 5000))
        for k in range(layers)
    ]
    about = info(root(layers), *(plain(f"l{k}", "relu") for k in range(layers)))

    def kept(steps):
        paths = [tmp_path / f"{side}{steps}" for side in "ab"]
        for path in paths:
            writer = RunWriter(path, about, storage=Storage(pack=True))
            for number in range(steps):
                writer.add_step(step(number, some))
            writer.close()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        report = compare_runs(*paths)
        assert len(report.diffs) == layers * steps
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        kept(2)  # what is cached once
        growth = (kept(60) - kept(10)) / (50 * layers)
    finally:
        tracemalloc.stop()
    assert growth < 250  # bytes a diff; as objects they took ten times that


def test_short_comparisons_and_runs_in_memory_are_not_folded(tmp_path, folding, monkeypatch):
    paths = toy_folder(tmp_path / "a"), toy_folder(tmp_path / "b")
    in_memory = compare_runs(*(open_run(path) for path in paths))
    assert not isinstance(in_memory.diffs, CompactDiffs)
    monkeypatch.undo()
    assert not isinstance(compare_runs(*paths).diffs, CompactDiffs)


def test_runs_of_other_numbers_of_processes_are_not_folded(tmp_path, folding):
    for size in (1, 2):
        writer = RunWriter(tmp_path / str(size), replace(info(root(0)), world_size=size))
        for number in (0, 1):
            for rank in range(size):
                loss = record("(loop)", "loss", "loss", np.asarray(1.0 + rank))
                writer.add_step(replace(step(number, [loss]), rank=rank))
        writer.close()
    report = compare_runs(tmp_path / "1", tmp_path / "2")
    assert not isinstance(report.diffs, CompactDiffs)
    assert [d.pair.candidate.value for d in report.diffs if d.compared] == [1.5, 1.5]

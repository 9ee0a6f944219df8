"""One training on one process, data parallel, sharded, with split layers and on two axes: any two of these compare."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from kit.forking import python_with_frameworks

import padiff
from padiff.compare.replicas import RankFault, check_replicas

from . import layouts
from .launching import launch

#: By layout: on how many processes.
PROCESSES = {"alone": 1, "ddp": 2, "fsdp1": 2, "fsdp1_original": 2, "fsdp2": 2, "tensor": 2, "two_axes": 4, "hybrid": 4}
WAYS = {"full": {}, "sketch": {"detail": "sketch"}}
#: Layouts in which processes hold the same in the same place, and saw the same samples.
ALIKE = {("fsdp1", "fsdp1_original")}
PARAMETERS = 2 + 2 * 16 + 2 + 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run folders by layout, way, and whether one process multiplies its part of a gradient in the last step."""
    base = tmp_path_factory.mktemp("layouts")
    path = {
        (layout, way, faulty): base / f"{layout}-{way}-{faulty}"
        for layout in PROCESSES
        for way in WAYS
        for faulty in (False, True)
    }
    for processes in sorted(set(PROCESSES.values())):
        jobs = [
            (layout, str(folder), processes - 1 if faulty else None, WAYS[way])
            for (layout, way, faulty), folder in path.items()
            if PROCESSES[layout] == processes
        ]
        if processes == 1:
            layouts.main(json.dumps(jobs))
        else:
            launch(
                layouts.__file__, json.dumps(jobs), python=python_with_frameworks(), seconds=300, processes=processes
            )
    return path


@pytest.mark.parametrize(
    ("one", "other", "way"),
    # Each side's parts are put together by themselves: with one process, and with the next layout.
    [("alone", other, "full") for other in PROCESSES if other != "alone"]
    + [(*pair, "full") for pair in pairwise([*PROCESSES][1:])]
    + [("alone", other, "sketch") for other in PROCESSES if other != "alone"]
    + [("fsdp2", "hybrid", "sketch")],
)
def test_any_two_layouts_match_with_all_parameters_compared(made, one, other, way):
    report = padiff.compare_runs(made[one, way, False], made[other, way, False])
    assert report.outcome == "match", report.first_diff and report.first_diff.message
    for stage in ("weight", "grad", "update"):
        sites = [diff.pair.anchor.site for diff in report.diffs if diff.compared and diff.pair.stage == stage]
        own = [site for site in sites if not site.startswith("(loop)")]
        assert len(own) == len(set(own)) * layouts.STEPS == PARAMETERS * layouts.STEPS
    assert not report.coverage.missing
    assert not report.coverage.reference_unrecorded and not report.coverage.candidate_unrecorded
    common = (one, other) not in ALIKE
    assert ("compared are parameters" in report.coverage.ranks) == common
    assert any(diff.compared and diff.pair.stage == "forward" for diff in report.diffs) != common


# Of each the candidate's parts are put together, and the reference's of each once.
@pytest.mark.parametrize(
    ("layout", "other"),
    [(layout, "alone") for layout in PROCESSES] + [*zip(PROCESSES, ("fsdp1", "fsdp2", "tensor", "hybrid") * 2)],
)
def test_a_gradient_that_one_process_multiplies_is_reported_with_its_rank_and_parameter(made, layout, other):
    report = padiff.compare_runs(made[other, "full", False], made[layout, "full", True])
    first = report.first_diff
    assert (first.step, first.stage, first.slot) == (layouts.STEPS - 1, "grad", "bias"), first.message
    assert first.candidate == "blocks.1.down"
    last = PROCESSES[layout] - 1
    assert first.rank == (last or None), first.message


#: Where what the last process multiplies is held by another one, too: which that is.
REPLICA = {"ddp": 0, "tensor": 0, "two_axes": 2, "hybrid": 1}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", REPLICA)
def test_of_replicas_the_run_alone_tells_it_within_their_group(made, layout, way):
    run = padiff.open_run(made[layout, way, True])
    (found,) = check_replicas(run.info, [run.steps(number) for number in run.numbers()])
    assert (found.kind, found.step) == (RankFault.NOT_REDUCED, layouts.STEPS - 1), str(found)
    assert (found.ranks, found.sites) == ((REPLICA[layout], PROCESSES[layout] - 1), ("blocks.1.down/bias",))
    assert 9 / 10 - 1e-3 < found.error < 9 / 10 + 1e-3


@pytest.mark.parametrize("layout", PROCESSES)
def test_sketches_of_parts_tell_it_too(made, layout):
    report = padiff.compare_runs(made["alone", "sketch", False], made[layout, "sketch", True])
    first = report.first_diff
    assert (first.step, first.stage, first.slot) == (layouts.STEPS - 1, "grad", "bias"), first.message
    assert first.candidate == "blocks.1.down"
    if layout != "alone":
        report = padiff.compare_runs(made[layout, "sketch", False], made[layout, "sketch", True])
        assert report.first_diff.rank == PROCESSES[layout] - 1


@pytest.mark.parametrize(("layout", "way"), [(one, [*WAYS][k % 2]) for k, one in enumerate(PROCESSES)])
def test_of_one_layout_all_that_processes_recorded_is_compared(made, layout, way):
    report = padiff.compare_runs(made[layout, way, False], made[layout, way, True], steps=[*range(layouts.STEPS - 1)])
    assert report.outcome == "match" and not report.coverage.ranks
    compared = [diff.pair for diff in report.diffs if diff.compared]
    assert sum(pair.stage == "forward" for pair in compared) == (layouts.STEPS - 1) * 22 * PROCESSES[layout]
    times = PROCESSES[layout] if layout == "ddp" else 1
    assert sum(pair.stage == "grad" for pair in compared) == (layouts.STEPS - 1) * PARAMETERS * times


@pytest.mark.parametrize("layout", [name for name, processes in PROCESSES.items() if processes > 1])
def test_the_parts_of_a_clean_run_are_no_fault_of_its_ranks(made, layout):
    run = padiff.open_run(made[layout, "full", False])
    assert not check_replicas(run.info, [run.steps(number) for number in run.numbers()])

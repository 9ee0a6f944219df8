"""Two processes train one model: a folder for each rank, a step once both have written, and both compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit.forking import python_with_frameworks

import padiff
from padiff.compare.replicas import RankFault, check_replicas

from . import ranked
from .launching import launch

FRAMEWORKS = ("torch", "paddle")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs by framework, number of processes and fault: the folder, and what each rank's training left."""
    base = tmp_path_factory.mktemp("ranks")
    known = {}

    def two(framework):
        faults = ["plain", "nothing", "same samples", "not synchronised"]
        # It ends without its last step, so it comes last.
        faults += ["one ends early"] if framework == "torch" else []
        jobs = {fault: base / f"{framework}-{fault.replace(' ', '_')}" for fault in faults}
        trainings = [("" if fault == "plain" else str(p), fault, f"{p}.result") for fault, p in jobs.items()]
        # paddle's processes may crash when they end if torch is loaded, too.
        python = python_with_frameworks(only="" if framework == "torch" else framework)
        launch(ranked.__file__, framework, json.dumps(trainings), python=python)
        for fault, path in jobs.items():
            results = [dict(np.load(f"{path}.result.{rank}.npz")) for rank in range(2)]
            known[framework, 2, fault] = path, results

    def make(framework, world=2, fault="nothing"):
        if (framework, world, fault) not in known:
            if world == 2:
                two(framework)
            else:
                path = base / f"{framework}-alone"
                ranked.train(framework, str(path), fault, f"{path}.result")
                known[framework, 1, fault] = path, [dict(np.load(f"{path}.result.0.npz"))]
        return known[framework, world, fault]

    return make


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_training_is_the_same_to_the_bit_on_every_rank(made, framework):
    _, plain = made(framework, fault="plain")
    _, recorded = made(framework)
    for reference, candidate in zip(plain, recorded):
        assert reference.keys() == candidate.keys()
        for name, value in reference.items():
            np.testing.assert_array_equal(candidate[name], value, err_msg=name)
    assert not np.array_equal(plain[0]["losses"], plain[1]["losses"])  # each its own samples
    for name in ("p0", "p3"):
        np.testing.assert_array_equal(plain[0][name], plain[1][name])  # and one model


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_rank_has_a_folder_below_each_step(made, framework):
    folder, _ = made(framework)
    found = padiff.open_run(folder)
    assert found.info.world_size == 2
    assert found.finished()
    assert found.numbers() == [0, 1, 2]
    for number in found.numbers():
        step = folder / "steps" / f"{number:08d}"
        assert sorted(entry.name for entry in step.iterdir()) == ["rank_0", "rank_1"]
        steps = found.steps(number)
        assert [step.rank for step in steps] == [0, 1]
        sites = [[record.site for record in step.records] for step in steps]
        assert sites[0] == sites[1]
        # The last three: what went into the loss function, and what it gave.
        assert len(sites[0]) == 4 + 4 + 4 + 4 + 4 + 1 + 1 + 1 + 3
        x, _ = ranked.batch(number)
        for step in steps:
            values = {record.site: record.value for record in step.records}
            np.testing.assert_array_equal(values["(root)/input/input.input"], x[step.rank :: 2])
        # Reduced: what the optimizers consumed is the same on both.
        gradients = [{r.site: r.value for r in step.records if r.stage == "grad"} for step in steps]
        for site, gradient in gradients[0].items():
            np.testing.assert_array_equal(gradients[1][site], gradient, err_msg=site)


def test_torch_and_paddle_on_two_processes_match(made):
    report = padiff.compare_runs(made("torch")[0], made("paddle")[0])
    assert report.passed, report.first_diff.message
    assert list(report.coverage.steps) == [0, 1, 2]
    assert report.coverage.complete


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("fault", "step", "stage", "cause", "proven"),
    [
        ("same samples", 0, "input", "ranks 0 and 1 were given the same batch in step 0", False),
        ("not synchronised", 1, "grad", "differs from rank 0's since step 1 (all of them): it was not reduced", True),
    ],
)
def test_the_mistakes_of_parallel_trainings_are_found(made, framework, fault, step, stage, cause, proven):
    first = padiff.compare_runs(made("torch")[0], made(framework, fault=fault)[0]).first_diff
    assert (first.step, first.stage, first.rank) == (step, stage, 0), first.message
    assert f"at step {step}, rank 0, stage {stage}" in first.message
    assert (first.cause.kind, first.cause.proven) == ("ranks", proven), first.message
    assert "the candidate's ranks differ from each other: " in first.message
    assert cause in first.message


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("nothing", []),
        ("same samples", [(RankFault.SAME_BATCH, 0)]),
        ("not synchronised", [(RankFault.NOT_REDUCED, 1)]),
    ],
)
def test_the_mistakes_of_parallel_trainings_show_in_one_run_alone(made, framework, fault, found):
    run = padiff.open_run(made(framework, fault=fault)[0])
    findings = check_replicas(run.info, [run.steps(number) for number in run.numbers()])
    assert [(finding.kind, finding.step) for finding in findings] == found
    assert all(finding.ranks == (0, 1) for finding in findings)


def test_a_step_that_one_rank_did_not_write_is_no_step(made):
    found = padiff.open_run(made("torch", fault="one ends early")[0])
    assert found.numbers() == [0, 1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_processes_match_one_in_what_is_comparable(made, framework):
    one, two = made(framework, world=1)[0], made(framework)[0]
    # Equal shares of each batch: the mean of the processes' gradients is that of the whole.
    for stages in (("weight",), ("grad",), ("update",), ("weight", "grad", "update")):
        report = padiff.compare_runs(one, two, stages=stages)
        assert report.passed, report.first_diff.message
        assert report.coverage.compared >= 3 * 4
    wrong = made(framework, fault="not synchronised")[0]
    assert not padiff.compare_runs(one, wrong, stages=("weight", "grad", "update")).passed


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_processes_match_one_without_naming_stages(made, framework):
    report = padiff.compare_runs(made(framework, world=1)[0], made(framework)[0])
    assert report.passed, report.first_diff.message
    stages = {diff.pair.stage for diff in report.diffs if diff.compared}
    assert stages == {"weight", "loss", "grad", "update"}
    assert "1 process against 2" in report.coverage.ranks

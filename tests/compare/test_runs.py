from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from kit.records import (
    info,
    linear,
    memory_run,
    norm,
    plain,
    planted,
    record,
    root,
    step,
    toy_folder,
    toy_info,
    toy_run,
    toy_steps,
    write_run,
)

from padiff import Tolerance, compare_runs, open_run
from padiff.compare import NoisePolicy, RunComparison
from padiff.compare.step import Before, ComparisonPlan, compare_step
from padiff.dump import RunWriter
from padiff.dump.storage import Storage
from padiff.errors import NothingToCompareError, UsageError
from padiff.recorder import MemoryRun
from padiff.records import STAGES, Both


def test_two_right_runs_of_two_frameworks_match_in_full():
    report = compare_runs(toy_run(), toy_run(paddle=True))
    assert report.passed and report.first_diff is None
    # Of each step: 1 input, 4 weights, 4 forward, 1 loss, 3 backward, 4 grads, 4 updates, 1 learning rate.
    assert report.coverage.compared == len(report.diffs) == 3 * 22
    assert report.coverage.complete and report.coverage.share == 1.0
    assert report.coverage.steps == (0, 1, 2)


@pytest.mark.parametrize(
    ("site", "stage", "names", "slot"),
    [
        ("(root)/input/input.x", "input", ("(root)", "(root)"), "input.x"),
        ("body.0/weight/weight", "weight", ("fc1", "body.0"), "weight"),
        ("body.1/forward/output.0", "forward", ("act", "body.1"), "output.0"),
        ("(loop)/loss/loss", "loss", ("(loop)", "(loop)"), "loss"),
        ("body.0/backward/output.0", "backward", ("fc1", "body.0"), "output.0"),
        ("head/grad/bias", "grad", ("fc2", "head"), "bias"),
        ("head/update/weight", "update", ("fc2", "head"), "weight"),
        ("(loop)/update/learning_rate", "update", ("(loop)", "(loop)"), "learning_rate"),
    ],
)
def test_a_fault_at_one_site_is_found_there_and_nowhere_else(site, stage, names, slot):
    report = compare_runs(toy_run(), toy_run(paddle=True, plant=planted(site, lambda v: v * 1.05 + 1e-3, at=1)))
    first = report.first_diff
    assert (first.step, first.stage, first.reference, first.candidate, first.slot) == (1, stage, *names, slot)
    assert len(report.failed) == 1
    assert first.message.startswith(f"The runs differ first at step 1, stage {stage}, layer {names[0]}")
    assert first.max_abs == report.failed[0].figures.max_abs > 0


def test_a_gradient_times_7_is_reported():
    report = compare_runs(toy_run(), toy_run(paddle=True, plant=planted("head/backward/output.0", lambda v: 7 * v)))
    assert report.first_diff.stage == "backward" and "7 times the reference's" in report.first_diff.message


def test_the_first_diff_is_the_first_in_causal_order_and_all_are_gathered():
    sites = ["head/update/bias", "body.0/grad/weight", "body.1/forward/output.0", "body.0/forward/output.0"]

    def plant(seen, number):
        return 2 * seen.value + 1 if seen.site in sites and number in (1, 2) else None

    report = compare_runs(toy_run(), toy_run(paddle=True, plant=plant))
    found = [(d.pair.step, d.pair.candidate.site) for d in report.failed]
    assert found == [(n, site) for n in (1, 2) for site in reversed(sites)]
    assert report.first_diff.candidate == "body.0"


def test_every_common_step_is_compared_not_only_the_first():
    late = planted("body.0/forward/output.0", lambda v: v + 1, at=10)
    report = compare_runs(toy_run([0, 2, 10]), toy_run([0, 2, 10], paddle=True, plant=late))
    assert report.coverage.steps == (0, 2, 10)
    assert report.first_diff.step == 10


def test_steps_that_one_run_has_alone_are_listed():
    report = compare_runs(toy_run([0, 1, 2, 4]), toy_run([0, 2, 3]))
    assert report.passed
    assert (report.coverage.steps, report.coverage.reference_steps, report.coverage.candidate_steps) == (
        (0, 2),
        (1, 4),
        (3,),
    )


def test_runs_without_a_common_step_are_an_error():
    with pytest.raises(NothingToCompareError, match=r"torch has steps 0, 2, paddle has steps 1, 3.*same every_n_steps"):
        compare_runs(toy_run([0, 2]), toy_run([1, 3], paddle=True))


def test_runs_without_any_step_are_an_error():
    with pytest.raises(NothingToCompareError, match=r"torch has no step"):
        compare_runs(memory_run(toy_info()), toy_run([0]))
    with pytest.raises(NothingToCompareError, match=r"torch has no step, torch has no step"):
        compare_runs(memory_run(toy_info()), memory_run(toy_info()))


def test_runs_without_a_common_quantity_are_an_error():
    one = memory_run(info(root(0, "a"), name="one"), step(0, [record("(root)", "forward", "output.0", [1])]))
    other = memory_run(toy_info(), step(0, [record("fc1", "weight", "bias", [1])]))
    with pytest.raises(NothingToCompareError, match=r"the steps of one and torch have no quantity in common"):
        compare_runs(one, other)
    with pytest.raises(NothingToCompareError):
        compare_runs(memory_run(toy_info(), step(0, [])), memory_run(toy_info(), step(0, [])))


def test_a_surplus_layer_is_listed_by_name_with_what_it_owns():
    layers = toy_info().layers
    more = info(*layers[:3], norm("bn", 8), layers[3], plain("drop", "dropout"))
    [one] = toy_steps([0])
    extra = [record("bn", "weight", slot, np.ones(8)) for slot in ("weight", "bias", "running_mean", "running_var")]
    report = compare_runs(memory_run(more, step(0, [*one.records, *extra])), toy_run([0]))
    coverage = report.coverage
    assert set(coverage.reference_layers) == {"bn", "drop"} and coverage.candidate_layers == ()
    assert set(coverage.reference_parameters) == {"bn/weight", "bn/bias", "bn/running_mean", "bn/running_var"}
    assert not coverage.complete and coverage.share == pytest.approx(2 * 22 / (22 + 26))
    turned = compare_runs(toy_run([0]), memory_run(more, one)).coverage
    assert set(turned.candidate_layers) == {"bn", "drop"} and "candidate: drop" in turned.uncalled


def test_another_nesting_is_reported_as_containers():
    report = compare_runs(toy_run([0]), toy_run([0], paddle=True))
    assert report.coverage.candidate_containers == ("body",) and report.coverage.candidate_layers == ()


def test_records_of_paired_layers_that_one_side_lacks_are_listed_by_site():
    [one] = toy_steps([0])
    less = step(0, [r for r in one.records if r.site != "fc2/backward/output.0"])
    report = compare_runs(memory_run(toy_info(), one), memory_run(toy_info(), less))
    assert report.passed and report.coverage.reference_sites == ("fc2/backward/output.0",)
    assert (report.coverage.reference_records, report.coverage.candidate_records) == (22, 21)


def test_a_gradient_that_one_side_lacks_is_a_diff():
    [one] = toy_steps([0])
    less = step(0, [r for r in one.records if r.site != "fc2/grad/bias"])
    first = compare_runs(memory_run(toy_info(), one), memory_run(toy_info(), less)).first_diff
    assert (first.stage, first.reference, first.candidate, first.slot) == ("grad", "fc2", "fc2", "bias")
    assert "missing on the candidate" in first.message and np.isnan(first.max_abs)


def test_settings_that_differ_are_reported_even_in_a_match():
    def run(eps: float):
        tree = info(root(1), norm("bn", 2, eps=eps, momentum=0.1))
        return memory_run(tree, step(0, [record("bn", "forward", "output.0", [[1, 2]])]))

    assert compare_runs(run(1e-5), run(1e-3)).coverage.notes == ("bn / bn: eps 1e-05 against 0.001",)
    assert compare_runs(run(1e-5), run(1e-5)).coverage.notes == ()


def test_only_the_asked_stages_are_compared():
    plant = planted("body.0/weight/bias", lambda v: v + 1)
    runs = toy_run([0]), toy_run([0], paddle=True, plant=plant)
    assert not compare_runs(*runs)
    assert compare_runs(*runs, stages=("forward", "grad"))
    assert {d.pair.stage for d in compare_runs(*runs, stages=("forward", "grad"))} == {"forward", "grad"}


def test_a_policy_given_is_the_one_that_judges():
    plant = planted("head/forward/output.0", lambda v: v + 0.01)
    runs = toy_run([0]), toy_run([0], paddle=True, plant=plant)
    assert not compare_runs(*runs)
    report = compare_runs(*runs, policy=Tolerance(atol=0.02))
    assert report.passed and report.tolerance == "mean, atol 0.02, rtol 1e-07"


def test_a_layer_map_reaches_the_comparison():
    tree = info(root(2), linear("a", 2, 2), linear("b", 2, 2))

    def run(a: float, b: float):
        return memory_run(tree, step(0, [record(x, "forward", "output.0", [v]) for x, v in (("a", a), ("b", b))]))

    assert not compare_runs(run(1, 2), run(2, 1))
    assert compare_runs(run(1, 2), run(2, 1), layer_map={"a": "b", "b": "a"})
    with pytest.raises(UsageError, match=r"has no layer 'c'"):
        compare_runs(run(1, 2), run(2, 1), layer_map={"a": "c"})


def test_progress_is_reported_step_by_step():
    seen = []
    compare_runs(toy_run(), toy_run(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_run_in_a_folder_and_one_in_memory_are_compared(tmp_path):
    report = compare_runs(toy_folder(tmp_path / "run"), toy_run(paddle=True))
    assert report.passed and (report.reference, report.candidate) == ("torch", "paddle")


def test_a_run_that_grows_is_compared_step_by_step(tmp_path):
    writer = RunWriter(tmp_path / "run", toy_info())
    comparison = RunComparison(toy_run([0, 1]), open_run(tmp_path / "run"))
    assert comparison.common() == []
    for one in toy_steps([0, 1]):
        writer.add_step(one)
        writer.flush()
        assert comparison.common()[-1] == one.number
        assert comparison.compare(one.number).coverage.steps == (one.number,)
    writer.close()


def two_ranks(tmp_path, name: str, world: int, fault: int | None = None):
    writers = [RunWriter(tmp_path / name, toy_info(world_size=world), rank=rank) for rank in range(world)]
    for rank, writer in enumerate(writers):
        plant = planted("fc1/forward/output.0", lambda v: v + 1) if rank == fault else None
        writer.add_step(replace(toy_steps([0], plant=plant)[0], rank=rank))
        writer.close()
    return tmp_path / name


def test_all_ranks_are_compared(tmp_path):
    good, bad = two_ranks(tmp_path, "good", 2), two_ranks(tmp_path, "bad", 2, fault=1)
    assert compare_runs(good, good).coverage.compared == 44
    assert not compare_runs(good, bad)


def test_what_ranks_have_besides_what_is_comparable_is_not_lost(tmp_path):
    one, two = two_ranks(tmp_path, "one", 1), two_ranks(tmp_path, "two", 2)
    # 22 records of each rank, of which the two losses are one, their mean.
    for runs, counts in (((one, two), (22, 43)), ((two, one), (43, 22))):
        report = compare_runs(*runs)
        assert report.passed and not report.coverage.complete
        assert (report.coverage.reference_records, report.coverage.candidate_records) == counts
        # Parameters, gradients, updates, the learning rate and the mean loss: no matter how the batch is shared out.
        assert report.coverage.compared == 14
        assert {d.pair.stage for d in report.diffs if d.compared} == {"weight", "loss", "grad", "update"}


def test_one_rank_does_not_loosen_what_is_asked_of_the_next():
    # The first rank's output is within its limit; the second's, by three limits, is reported.
    def ranks(*errors):
        values = [np.full(64, 1.0 + error) for error in errors]
        return [step(0, [record("a", "forward", "output.0", v)], rank=rank) for rank, v in enumerate(values)]

    class Ranks(MemoryRun):
        def __init__(self, steps):
            super().__init__(info(root(1), linear("a", 2, 2), world_size=2))
            self._ranks = steps

        def numbers(self):
            return [0]

        def steps(self, number):
            return self._ranks

    allowed = 1e-10  # float64, forward
    report = compare_runs(Ranks(ranks(0.0, 0.0)), Ranks(ranks(allowed * 0.9, allowed * 3)))
    assert [diff.passed for diff in report] == [True, False]


def test_a_step_is_compared_by_a_pure_function_and_a_run_by_a_fold_over_it():
    plant = planted("head/update/bias", lambda v: v * 1.5, at=1)
    runs = Both(toy_run(range(3)), toy_run(range(3), paddle=True, plant=plant))
    whole = compare_runs(*runs)
    plan = ComparisonPlan(runs, RunComparison(*runs).alignment, NoisePolicy(), frozenset(STAGES))
    before, found = Before(), []
    for number in range(3):
        steps = runs.map(lambda run, number=number: run.steps(number))
        [diffs], after = compare_step(steps, plan, before)
        assert compare_step(steps, plan, before) == ([diffs], after)
        before = after
        found += diffs
    judged = [[(d.pair.anchor.site, d.passed, d.judgement) for d in diffs] for diffs in (found, whole.diffs)]
    assert judged[0] == judged[1] and not whole.passed


@pytest.mark.parametrize("pack", [False, True])
def test_a_steps_diffs_are_freed_with_the_next_step_without_a_look_for_cycles(pack, tmp_path):
    storage = Storage(pack=pack)
    runs = [write_run(tmp_path / name, toy_info(), toy_steps(range(4)), storage=storage) for name in ("a", "b")]
    comparison, freed = RunComparison(*map(open_run, runs)), []
    gc.disable()
    try:
        for number in range(4):
            diffs = comparison.diffs(number)
            freed.append([weakref.ref(each) for each in (diffs, diffs.rows)])
            assert len(list(diffs)) == len(diffs) > 0
            del diffs
        assert [[ref() is None for ref in refs] for refs in freed[:-1]] == [[True] * 2] * 3
    finally:
        gc.enable()

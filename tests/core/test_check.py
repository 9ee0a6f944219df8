from __future__ import annotations

import shutil

import pytest
from kit.records import memory_run, planted, step, toy_folder, toy_info, toy_run, toy_steps

from padiff import check_grads, check_params, check_report, check_weights
from padiff.errors import NothingToCompareError, UsageError
from padiff.records import STAGES

OWN = {
    check_report: {"input", "forward", "loss", "backward"},
    check_params: {"weight", "grad", "update"},
    check_weights: {"weight"},
    check_grads: {"grad"},
}
SITES = {
    "input": "(root)/input/input.x",
    "weight": "body.0/weight/weight",
    "forward": "body.0/forward/output.0",
    "loss": "(loop)/loss/loss",
    "backward": "body.0/backward/output.0",
    "grad": "body.0/grad/weight",
    "update": "body.0/update/weight",
}


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_each_check_looks_at_its_own_stages_only(check, stage):
    plant = planted(SITES[stage], lambda v: v + 1)
    report = check(toy_run([0]), toy_run([0], paddle=True, plant=plant))
    assert {diff.pair.stage for diff in report} == OWN[check]
    assert report.passed is (stage not in OWN[check])


@pytest.mark.parametrize("below", ["", "steps/00000002", "steps/00000002/rank_0"])
def test_a_check_takes_a_run_a_step_and_a_dump_folder(tmp_path, below):
    late = planted("body.0/forward/output.0", lambda v: v + 1, at=2)
    reference = toy_folder(tmp_path / "reference", [0, 2])
    candidate = toy_folder(tmp_path / "candidate", [0, 2], paddle=True, plant=late)
    report = check_report(reference / below, str(candidate / below))
    assert report == False and report.first_diff.step == 2  # noqa: E712
    assert report.coverage.steps == ((2,) if below else (0, 2))
    assert check_weights(reference / below, candidate / below)


def test_steps_of_two_numbers_are_compared_if_they_are_named(tmp_path):
    paths = [toy_folder(tmp_path / name, [0, 1]) / "steps" for name in ("a", "b")]
    report = check_weights(paths[0] / "00000000", paths[1] / "00000001", {"atol": 1.0})
    assert report.passed and report.coverage.compared == 4


def test_a_run_of_several_steps_is_compared_in_the_order_of_their_numbers(tmp_path):
    both = [toy_folder(tmp_path / name, [2, 10]) for name in ("a", "b")]
    assert [diff.pair.step for diff in check_grads(*both)] == [2] * 4 + [10] * 4


@pytest.mark.parametrize(
    ("cfg", "passed"),
    [
        (None, False),
        ({}, False),
        ({"atol": 0.011}, True),
        ({"atol": 0.011, "compare_mode": "strict"}, True),
        ({"atol": 0.009, "compare_mode": "strict"}, False),
        ({"atol": 0, "rtol": 10}, True),
    ],
)
def test_a_cfg_sets_the_tolerance(cfg, passed):
    plant = planted("head/forward/output.0", lambda v: v + 0.01)
    assert check_report(toy_run([0]), toy_run([0], paddle=True, plant=plant), cfg).passed is passed


def test_compare_mode_strict_sees_one_element_that_mean_does_not():
    def one(values):
        values = values.copy()
        values.flat[0] += 1e-3
        return values

    runs = toy_run([0]), toy_run([0], paddle=True, plant=planted("body.0/forward/output.0", one))
    assert check_report(*runs, {"compare_mode": "mean"})  # 1e-3 over 128 elements
    assert not check_report(*runs, {"compare_mode": "strict"})


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"atoll": 1}, r"cfg: unknown key 'atoll'\. Nearest: atol"),
        ({"mode": "mean"}, r"cfg: unknown key 'mode'\. Nearest: compare_mode"),
        ({"compare_mode": "abs"}, r"compare_mode is one of mean, strict, got 'abs'"),
        ({"atol": None}, r"atol has to be a number of at least 0, got None"),
    ],
)
def test_a_cfg_that_cannot_be_meant_is_refused(cfg, message):
    with pytest.raises(UsageError, match=message):
        check_report(toy_run([0]), toy_run([0]), cfg)


def test_checking_what_was_not_recorded_is_an_error():
    weights = step(0, [r for r in toy_steps([0])[0].records if r.stage == "weight"])
    run = memory_run(toy_info(), weights)
    assert check_weights(run, run)
    with pytest.raises(NothingToCompareError):
        check_grads(run, run)


def test_a_dump_with_one_of_its_two_files_is_checked(tmp_path):
    for name, gone in (("a", "report.json"), ("b", "report.json")):
        run = toy_folder(tmp_path / "runs" / name, [0])
        shutil.copytree(run / "steps" / "00000000" / "rank_0", tmp_path / name)
        (tmp_path / name / gone).unlink()
    both = [tmp_path / name for name in "ab"]
    assert check_params(*both)
    with pytest.raises(NothingToCompareError):
        check_report(*both)

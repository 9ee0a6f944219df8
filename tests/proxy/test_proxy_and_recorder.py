"""What a proxy and a recorder have in common: steps, arguments, lists; and the names of released versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kit.frameworks import hook_count
from kit.nets import data, tanh_mlp

import padiff
from padiff import check_grads, check_params, check_report, check_weights, create_model

from .proxies import nested, train

UsageError = padiff.PadiffError
CFG = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def clear(kit, model):
    for parameter in model.parameters():
        parameter.grad = None if kit.name == "torch" else parameter.clear_gradient(False)


def by_proxy(kit, model, steps=8, **dumping):
    """Train without an optimizer, dumping by a proxy; its folder."""
    proxy = create_model(model, dump_freq=dumping.pop("dump_freq", 1))
    for step in range(steps):
        train(kit, proxy, data(5, 4, seed=step))
        proxy.try_dump(**dumping)
        clear(kit, model)
    return proxy.dump_path


def by_recorder(kit, model, folder, steps=8, arguments=None, **options):
    written = []
    with padiff.record(model, folder, **options) as rec:
        for step in range(steps):
            loss = model(kit.tensor(data(5, 4, seed=step))).mean()
            loss.backward()
            written.append(rec.try_dump(**(arguments or {})))
            clear(kit, model)
    return written


def trained(kit, model, seed=0):
    model(kit.tensor(data(5, 4, seed=seed))).mean().backward()


def equal(pair):
    base, raw = (tanh_mlp(kit) for kit in pair)
    assert padiff.assign_weight(base, raw)
    return base, raw


# -- which steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dumping", "schedule", "numbers"),
    [({"per_step": 3}, padiff.Schedule(every=3, first=2), (2, 5)), ({"dump_freq": 3}, 3, (0, 3, 6))],
)
def test_a_proxys_steps_and_a_recorders_meet(every_pair, dumping, schedule, numbers):
    base, raw = equal(every_pair)
    folder = by_proxy(every_pair[0], base, **dumping)
    by_recorder(every_pair[1], raw, "run", every_n_steps=schedule)
    report = check_report(folder, "run", CFG)
    assert report, report.first_diff
    assert report.coverage.steps == numbers
    assert not report.coverage.reference_steps and not report.coverage.candidate_steps


def test_runs_without_a_common_step_say_how_to_record_them(pair):
    base, raw = equal(pair)
    folder = by_proxy(pair[0], base, per_step=3)
    by_recorder(pair[1], raw, "run", every_n_steps=3)
    with pytest.raises(UsageError) as reported:
        padiff.compare_runs(folder, "run")
    text = str(reported.value)
    assert "has steps 2, 5" in text and "has steps 0, 3, 6" in text
    assert "padiff.Schedule(every=3, first=2) gives the reference's steps" in text
    assert "dump_freq=3 is every_n_steps=3" in text
    # What it says is so.
    by_recorder(pair[1], raw, "again", every_n_steps=padiff.Schedule(every=3, first=2))
    assert padiff.compare_runs(folder, "again").coverage.steps == (2, 5)


@pytest.mark.parametrize("schedule", [3, padiff.Schedule(every=3, first=2)])
def test_a_recorder_takes_a_proxys_arguments_where_they_say_what_it_was_made_with(kit, schedule):
    due = [k for k in range(8) if padiff.Schedule.from_argument(schedule).due(k)]
    for folder, arguments in (
        ("a", {"per_step": 3, "dir_path": "a"}),
        ("b", {"per_step": 3}),
        ("c", {"dir_path": Path("c").absolute()}),
        ("d", {"per_step": "d"}),
    ):
        written = by_recorder(kit, tanh_mlp(kit), folder, arguments=arguments, every_n_steps=schedule)
        assert [k for k, done in enumerate(written) if done] == due


def test_a_recorder_refuses_arguments_that_contradict_how_it_was_made(kit):
    model = tanh_mlp(kit)
    with padiff.record(model, "run", every_n_steps=2) as rec:
        with pytest.raises(
            UsageError, match=r"made with every_n_steps=2, not with per_step=10.*every_n_steps=10 .*first=9"
        ):
            rec.try_dump(per_step=10)
        with pytest.raises(UsageError, match=r"writes to run, not in other: give the folder to padiff.record"):
            rec.try_dump(dir_path="other")
        with pytest.raises(UsageError, match="per_step has to be a whole number of at least 1, got 0"):
            rec.try_dump(per_step=0)
        assert rec.step == 0  # a refused call ends no step
    with padiff.record(model) as rec:
        trained(kit, model)
        rec.try_dump()
        with pytest.raises(UsageError, match="keeps its steps in memory, not in other"):
            rec.try_dump(1, "other")


def test_the_first_try_dump_says_where_to_and_how_often_if_nothing_else_does(kit):
    written = by_recorder(kit, tanh_mlp(kit), None, arguments={"per_step": 3, "dir_path": "dumps"})
    assert written == [True, False, False, True, False, False, True, False]
    by_recorder(kit, tanh_mlp(kit), "made", every_n_steps=3)
    first, made = padiff.open_run("dumps"), padiff.open_run("made")
    assert first.numbers() == made.numbers() == [0, 3, 6] and first.finished()
    assert first.info.recording == made.info.recording and first.name == "dumps"
    sites = [[r.site for r in run.steps(0)[0].records] for run in (first, made)]
    assert sites[0] == sites[1] and "fc0/forward/output.0" in sites[0]


@pytest.mark.parametrize("start", [0, 5])
def test_the_step_of_the_first_try_dump_is_recorded(kit, start):
    by_recorder(kit, tanh_mlp(kit), None, steps=4, arguments={"per_step": 2, "dir_path": "dumps"}, start_step=start)
    assert padiff.open_run("dumps").numbers() == [start, start + 2]


@pytest.mark.parametrize(
    ("options", "arguments", "steps"),
    [({"every_n_steps": 2}, {"dir_path": "dumps"}, [0, 2, 4, 6]), ({}, {"per_step": "dumps"}, list(range(8)))],
)
def test_what_record_was_given_stays(kit, options, arguments, steps):
    by_recorder(kit, tanh_mlp(kit), None, arguments=arguments, **options)
    assert padiff.open_run("dumps").numbers() == steps


def test_without_a_folder_the_first_try_dump_sets_the_schedule_of_a_run_in_memory(kit):
    model = tanh_mlp(kit)
    with padiff.record(model) as rec:
        for step in range(5):
            trained(kit, model, seed=step)
            rec.try_dump(per_step=2)
    assert rec.run.numbers() == [0, 2, 4] and rec.run.info.recording["every_n_steps"] == 2


def test_later_calls_that_say_something_else_are_refused(kit):
    model = tanh_mlp(kit)
    with padiff.record(model) as rec:
        trained(kit, model)
        rec.try_dump(per_step=2, dir_path="dumps")
        trained(kit, model)
        with pytest.raises(UsageError, match=r"made with every_n_steps=2, not with per_step=3"):
            rec.try_dump(per_step=3, dir_path="dumps")
        with pytest.raises(UsageError, match=r"writes to dumps, not in other"):
            rec.try_dump(per_step=2, dir_path="other")
        rec.try_dump(per_step=2, dir_path="dumps")
    assert padiff.open_run("dumps").numbers() == [0]


def test_a_folder_that_holds_a_run_is_left_as_it_is(kit):
    by_recorder(kit, tanh_mlp(kit), "dumps", steps=2)
    model = tanh_mlp(kit)
    with padiff.record(model) as rec:
        trained(kit, model)
        with pytest.raises(padiff.PadiffError, match="holds a run already"):
            rec.try_dump(per_step=5, dir_path="dumps")
        rec.try_dump()
    assert rec.run.numbers() == [0] and rec.run.info.recording["every_n_steps"] == 1
    assert padiff.open_run("dumps").numbers() == [0, 1]


# -- recording a proxy -------------------------------------------------------------------------------------------------


def layers_of(run, stage="forward"):
    return sorted({record.layer for record in run.steps(0)[0].records if record.stage == stage})


def recorded(kit, model, **options):
    with padiff.record(model, **options) as rec:
        model(kit.tensor(data(5, 4))).mean().backward()
    return rec.run


def test_a_proxy_is_recorded_as_the_model_in_it(kit):
    model = tanh_mlp(kit)
    proxy = create_model(model)
    x = kit.tensor(data(5, 4))
    with padiff.record(proxy) as rec:
        for called in (model, proxy):
            called(x).mean().backward()
            rec.try_dump()
    runs = [[(r.site, r.value.tobytes()) for r in rec.run.steps(k)[0].records if r.stage == "forward"] for k in (0, 1)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 6
    assert hook_count(kit, model) == 0


def test_a_proxys_lists_and_layer_map_are_taken_over(kit):
    proxy = create_model(nested(kit))
    proxy.update_white_list([proxy.model.block], "sublayers")
    proxy.update_white_list([proxy.model.head], "self")
    proxy.set_layer_map([proxy.model.block.inner])
    run = recorded(kit, proxy)
    assert layers_of(run) == ["block.inner", "block.last", "head"]
    assert run.info.layer_map == ("block.inner",)
    proxy = create_model(nested(kit))
    proxy.update_black_list([proxy.model.block], "sublayers")
    run = recorded(kit, proxy)
    assert layers_of(run) == ["(root)", "block", "head"]
    assert layers_of(run, "weight") == ["head"]


def test_what_is_given_beside_a_proxy_comes_before_its_own(kit):
    proxy = create_model(nested(kit))
    proxy.update_white_list([proxy.model.head])
    proxy.set_layer_map([proxy.model.block.inner])
    run = recorded(kit, proxy, black_list=["head"], layer_map=["block"])
    assert layers_of(run) == ["(root)", "block"]
    assert run.info.layer_map == ("block",)


def test_recorded_proxies_compare_by_their_layer_maps(every_pair):
    base, raw = equal(every_pair)
    proxies = create_model(base), create_model(raw)
    for proxy in proxies:
        proxy.set_layer_map([proxy.model.fc1, proxy.model.fc0])
    runs = [recorded(kit, proxy) for kit, proxy in zip(every_pair, proxies)]
    assert padiff.compare_runs(*runs)


# -- names of released versions ----------------------------------------------------------------------------------------


NAMES = ["report", "param", "params", "weight", "weights", "grad", "grads"]


def test_every_check_takes_every_name(kit):
    proxy = create_model(tanh_mlp(kit))
    for folder, scale in (("a", 1), ("b", 2)):
        train(kit, proxy, data(5, 4) * scale)
        proxy.try_dump(1, folder)
        clear(kit, proxy.model)
    for check in (check_report, check_params, check_weights, check_grads):
        for name in NAMES:
            assert check("a", **{f"{name}_path_1": "a"}, cfg={"atol": 1e-6})
        # The order of the two is kept.
        report = check(**{f"{name}_path_1": "b", f"{name}_path_0": "a"})
        if check is check_report or check is check_grads:
            diff = report.failed[0]
            assert np.abs(diff.pair.candidate.value).sum() > np.abs(diff.pair.reference.value).sum()


def test_wrong_names_of_the_two_dumps_are_reported():
    with pytest.raises(UsageError, match=r"check_params: unknown argument 'raport_path_0'. Nearest: report_path_0"):
        check_params(raport_path_0="a")
    with pytest.raises(UsageError, match=r"check_grads: two paths for dump 1: a and b \(report_path_1\)"):
        check_grads("a", "a", report_path_1="b")
    with pytest.raises(UsageError, match=r"check_weights needs two dumps, .*; number 1 is missing"):
        check_weights(report_path_0="a")


def test_the_checks_are_also_in_the_module_where_released_versions_have_them():
    from padiff import checker

    assert (checker.check_grads, checker.check_weights) == (check_grads, check_weights)
    assert (checker.check_params, checker.check_report) == (check_params, check_report)
    assert set(checker.__all__) == {"check_grads", "check_params", "check_report", "check_weights"}

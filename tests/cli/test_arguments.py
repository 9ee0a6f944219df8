"""What the commands make of their arguments, and how they end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from compare.test_unrecorded import RECORDED
from kit.records import norm, record, step, toy_folder, toy_info, toy_steps, write_run

import padiff
import padiff_cli.commands.compare
from padiff import NoisePolicy, Tolerance, compare_runs
from padiff.compare import RunComparison
from padiff.errors import NothingToCompareError, UsageError
from padiff_cli.arguments import Steps
from padiff_cli.main import main
from padiff_hooks.outputs import progress_text
from padiff_hooks.paired import PairedRuns


def wrong(*stages: str, factor: float = 2.0):
    """A plant: everything at these stages is so many times what it should be."""
    return lambda seen, number: factor * seen.value if seen.stage in stages and seen.layer != "(loop)" else None


@pytest.fixture
def bad(tmp_path: Path) -> list[str]:
    """Two runs whose gradients and updates are twice the reference's, in steps 0 to 5."""
    reference = toy_folder(tmp_path / "reference", range(6))
    return [
        str(reference),
        str(toy_folder(tmp_path / "candidate", range(6), paddle=True, plant=wrong("grad", "update"))),
    ]


# -- what is mistyped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["comprae", "a", "b"], "invalid choice: 'comprae'"),
        (["compare", "a", "b", "--laermap", "x"], "unrecognized arguments: --laermap x. Nearest: --layer-map"),
        (["compare", "a", "b", "--marckdown=x"], "Nearest: --markdown"),
        (["watch", "a", "b", "--logdir", "tb", "--intervall", "1"], "Nearest: --interval"),
        (["doctor", "a", "--stepz", "3"], "Nearest: --steps"),
    ],
)
def test_the_nearest_command_or_option_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err and "usage: padiff" in err
    if arguments[0] == "comprae":
        assert err.rstrip().endswith("Nearest: compare, calibrate, mcp")


# -- what is chosen ------------------------------------------------------------------------------------------------


def test_steps_stages_and_layers_can_be_chosen(bad, capsys):
    def compared(*flags: str) -> tuple[int, dict]:
        code = main(["compare", *bad, *flags, "--json", "-"])
        return code, json.loads(capsys.readouterr().out)

    code, content = compared("--steps", "1,3-4")
    assert code == 1 and [s["step"] for s in content["steps"]] == [1, 3, 4]
    assert content["coverage"]["unmatched_steps"] == {"reference": [], "candidate": []}
    code, content = compared("--stage", "forward, loss")
    assert code == 0 and {d["stage"] for s in content["steps"] for d in s["diffs"]} == {"forward", "loss"}
    code, content = compared("--layer", "fc2", "--layer", "body.1")
    sites = {d["reference"].split("/")[0] for s in content["steps"] for d in s["diffs"]}
    assert code == 1 and sites == {"fc2", "act"}
    assert content["first_diff"]["reference"] == "fc2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "1,x"], "--steps takes numbers and ranges, such as 0,8,100-200; got '1,x'"),
        (["--steps", "5-1"], "--steps takes numbers and ranges, such as 0,8,100-200; got '5-1'"),
        (["--steps", "70-80"], "none of the steps asked for (70-80) is one that both runs have"),
        (["--stage", "forwards"], "--stage: unknown stage 'forwards'. Nearest: forward"),
        (["--layer", "fc3"], "no layer of either run matches 'fc3'. Nearest: "),
        (["--top", "0"], "--top has to be at least 1, got 0"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(flags, message, bad, capsys):
    assert main(["compare", *bad, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"padiff: {message}")


def test_what_a_choice_allows_is_decided_with_a_look_at_the_rest(bad):
    """Gradients that are wrong are wrong whether or not outputs are shown."""
    whole, part = compare_runs(*bad), compare_runs(*bad, stages=["update"], steps=Steps("0"), layers=["fc1"])
    limits = {d.pair.anchor.site: d.judgement.limit for d in whole if d.pair.step == 0}
    assert len(part.diffs) == 2 and {d.pair.anchor.site: d.judgement.limit for d in part} == {
        site: limits[site] for site in ("fc1/update/weight", "fc1/update/bias")
    }


def test_no_common_step_is_still_said_where_steps_are_chosen(tmp_path):
    runs = [toy_folder(tmp_path / str(n), [n]) for n in (0, 1)]
    with pytest.raises(NothingToCompareError, match="the runs have no common step"):
        compare_runs(*runs, steps=[0])


def test_diffs_that_are_alike_are_printed_as_one_line_and_all_or_the_worst_on_demand(bad, capsys):
    assert main(["compare", *bad, "-v"]) == 1
    out = capsys.readouterr().out
    assert "48 of 132 pairs differ, in causal order (--all lists each):" in out
    assert (
        "  step 0  grad: 4 of 4 are 2 times the reference's (fc1/weight, fc1/bias, fc2/weight, ...)"
        "  (first difference)\n" in out
    )
    listed = out.partition("(--all lists each):\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) <= 10 and not any("..." in line and "more" in line for line in listed)
    assert main(["compare", *bad, "--all"]) == 1
    assert (
        sum(": max |diff|" in line for line in capsys.readouterr().out.splitlines() if line.startswith("  step")) == 48
    )
    assert main(["compare", *bad, "--top", "3"]) == 1
    out = capsys.readouterr().out
    listed = [line for line in out.splitlines() if line.startswith("  step")]
    assert "48 of 132 pairs differ, furthest beyond its limit first:" in out and len(listed) == 3
    with pytest.raises(SystemExit):
        main(["compare", *bad, "--top", "3", "--all"])


# -- how a comparison ends -----------------------------------------------------------------------------------------


def unrecorded(path: Path, paddle: bool = False) -> str:
    """A run that has no record of one parameter that trains."""
    layer = "head" if paddle else "fc2"
    steps = [
        replace(s, records=tuple(r for r in s.records if (r.layer, r.slot) != (layer, "weight")))
        for s in toy_steps(range(2), paddle)
    ]
    return str(write_run(path, replace(toy_info(paddle), **RECORDED), steps))


def test_what_cannot_be_reported_exits_with_3_from_each_command(tmp_path, capsys):
    runs = [unrecorded(tmp_path / "torch"), unrecorded(tmp_path / "paddle", True)]
    text = "Can't tell whether the runs match: parameters that train have no record, 1 of the reference (fc2/weight)"
    assert main(["compare", *runs]) == 3
    assert text in " ".join(capsys.readouterr().out.split())
    watch = ["watch", *runs, "--logdir", str(tmp_path / "tb"), "--interval", "0.01"]
    for _ in range(2):  # a second watch remembers it
        assert main(watch) == 3
    out = capsys.readouterr().out
    assert "step 1: cannot tell, " in out and text in out


def test_watch_ends_with_a_verdict(bad, tmp_path, capsys):
    good = [bad[0], str(toy_folder(tmp_path / "right", range(6), paddle=True))]
    assert main(["watch", *good, "--logdir", str(tmp_path / "tb1"), "--interval", "0.01"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("both runs have ended; 6 steps compared. The runs match, largest relative L2 ")
    assert main(["watch", *bad, "--logdir", str(tmp_path / "tb2"), "--interval", "0.01"]) == 1
    reported = capsys.readouterr().out.splitlines()
    steps = [line for line in reported if line.startswith(("DIFFER  step ", "step "))]
    assert steps[0].startswith("DIFFER  step 0, grad: fc1.weight") and len(steps) == 6
    assert steps[1].endswith("pairs differ, which follows from it")
    assert all(line.endswith("pairs differ") for line in steps[2:])  # said once
    last = reported[-1]
    assert last.startswith(
        "both runs have ended; 6 steps compared. 6 of them differ, first at step 0, grad: fc1.weight"
    )
    assert main(["watch", *bad, "--logdir", str(tmp_path / "tb2"), "--interval", "0.01"]) == 1
    assert "A step that was compared before differs (see diffs.jsonl)." in capsys.readouterr().out


@pytest.mark.parametrize("command", ["compare", "watch"])
def test_a_folder_that_is_compared_with_itself_is_refused(command, bad, tmp_path, capsys):
    (tmp_path / "link").symlink_to(bad[0])
    for other in (bad[0], f"{bad[0]}/", str(tmp_path / "link")):
        assert main([command, bad[0], other, "--logdir", str(tmp_path / "tb")]) == 2
        assert "are one folder: a run that is compared with itself always matches" in capsys.readouterr().err
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize("command", ["compare", "watch"])
@pytest.mark.parametrize("place", [".", "tb", "steps/tb"])
def test_a_log_folder_in_a_run_folder_is_refused(command, place, bad, capsys):
    assert main([command, *bad, "--logdir", f"{bad[1]}/{place}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("padiff: cannot make the log folder ") and f"it lies in the run folder {bad[1]}" in err
    assert sorted(p.name for p in Path(bad[1]).iterdir()) == ["finished.json", "run.json", "steps"]


def test_ctrl_c_is_answered(bad, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(padiff_cli.commands.compare, "compare_runs", interrupted)
    assert main(["compare", *bad]) == 130
    assert capsys.readouterr().err == "padiff: interrupted\n"


# -- how far it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        (0, 12, 0.0, "comparing: 0%, step 1 of 12"),
        (0.5, 12, 0.5, "comparing: 4%, step 1 of 12"),
        (3, 12, 10.0, "comparing: 25%, step 4 of 12, about 30 s left"),
        (1.5, 3, 300.0, "comparing: 50%, step 2 of 3, about 5 min left"),
        (1, 100, 3600.0, "comparing: 1%, step 2 of 100, about 99.0 h left"),
        (12, 12, 60.0, "comparing: 100%, step 12 of 12"),
    ],
)
def test_progress_is_a_share_and_the_time_left(done, total, seconds, text):
    assert progress_text("comparing", done, total, seconds) == text


def test_progress_within_a_large_step_is_reported_too(monkeypatch):
    from kit.records import toy_run

    from padiff.compare import measuring

    monkeypatch.setattr(measuring, "_TICK", 0.0)
    seen = []
    # With a tolerance each pair is measured by itself, as large tensors are.
    compare_runs(
        toy_run(), toy_run(), policy=Tolerance(0.0, 0.1), progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen if done == int(done)] == [0, 1, 2, 3] and {total for _, total in seen} == {3}
    assert sorted(done for done, _ in seen) == [done for done, _ in seen]
    assert any(0 < done < 1 for done, _ in seen)


# -- one default, through each door --------------------------------------------------------------------------------


def with_epsilon(path: Path, eps: float) -> str:
    tree = replace(toy_info(), layers=(*toy_info().layers, norm("bn", 2, eps=eps)))
    output = record("bn", "forward", "output.0", [[1.0, 2.0]])
    more = [record("bn", "weight", slot, [1.0, 1.0]) for slot in ("weight", "bias", "running_mean", "running_var")]
    return str(write_run(path, tree, [step(0, [*toy_steps([0])[0].records, output, *more])]))


def test_layers_that_are_set_differently_differ_through_each_door(tmp_path, capsys):
    runs = [with_epsilon(tmp_path / "a", 1e-5), with_epsilon(tmp_path / "b", 1e-3)]
    opened = [
        compare_runs(*runs),
        compare_runs(*runs, policy=NoisePolicy()),
        compare_runs(*runs, policy=NoisePolicy(2)),
    ]
    growing = list(PairedRuns(*runs).poll())
    stepwise = RunComparison(*(padiff.open_run(path) for path in runs)).compare(0)
    for report in (*opened, *growing, stepwise):
        assert report.outcome == "differ" and "eps 1e-05 against 0.001" in report.first_diff.message
    assert main(["compare", *runs]) == 1
    assert main(["watch", *runs, "--logdir", str(tmp_path / "tb"), "--interval", "0.01"]) == 1
    assert capsys.readouterr().out.count("eps 1e-05 against 0.001") >= 2
    # Who gives a tolerance says what counts as equal; what is set differently is still listed.
    given = compare_runs(*runs, policy=Tolerance())
    assert given.passed and given.coverage.notes
    assert main(["compare", *runs, "--atol", "1e-3"]) == 0
    assert next(PairedRuns(*runs, policy=Tolerance()).poll()).passed


def test_who_asks_for_parameters_alone_is_not_reported_of_settings(tmp_path):
    runs = [with_epsilon(tmp_path / "a", 1e-5), with_epsilon(tmp_path / "b", 1e-3)]
    assert compare_runs(*runs, stages=["weight"]).passed


def test_rounding_is_not_said_to_be_amplified_where_a_diff_explains_it(tmp_path):
    """A learning rate that differs in step 0 sets all later steps apart."""
    runs = [toy_folder(tmp_path / "a", range(8)), toy_folder(tmp_path / "b", range(8), paddle=True, rate=0.9)]
    report = compare_runs(*runs)
    assert report.first_diff.step == 0 and report.coverage.amplified is None
    assert "amplified" not in str(report)


def test_steps_of_the_command_line_are_a_container():
    assert [n for n in range(12) if n in Steps("0,8, 3-4")] == [0, 3, 4, 8] and "3" not in Steps("3")
    for text in ("", "-1", "a", "1-", "4-3", "1;2"):
        with pytest.raises(UsageError):
            Steps(text)

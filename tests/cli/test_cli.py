from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hard.children import started
from hooks.test_stream import points
from kit.records import planted, toy_folder, toy_info, write_run

import padiff_cli.commands.compare
from padiff import compare_runs
from padiff.errors import UsageError
from padiff_cli.main import main
from padiff_hooks.stream import DiffStream

SMALL = planted("body.0/forward/output.0", lambda v: v + 1e-3, at=1)


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Two runs that match."""
    return [str(toy_folder(tmp_path / "torch")), str(toy_folder(tmp_path / "paddle", paddle=True))]


@pytest.fixture
def bad(tmp_path: Path) -> list[str]:
    """Two runs whose forward is 1e-3 apart at step 1."""
    return [str(toy_folder(tmp_path / "reference")), str(toy_folder(tmp_path / "candidate", paddle=True, plant=SMALL))]


def test_a_match_exits_with_0_and_says_so(good, capsys):
    assert main(["compare", *good]) == 0
    out = capsys.readouterr().out
    assert out.startswith("MATCH   66 tensors in 3 steps, 100% of what was recorded\n")
    assert "torch (reference) against paddle (candidate)" in out


def test_a_diff_exits_with_1_and_names_the_place(bad, capsys):
    assert main(["compare", *bad]) == 1
    out = capsys.readouterr().out
    assert out.startswith("DIFFER  step 1, forward: fc1 against body.0\n") and "1 of 66 pairs differ" not in out
    assert main(["compare", *bad, "-v"]) == 1
    out = capsys.readouterr().out
    assert "The runs differ first at step 1, stage forward, layer fc1 (Linear) against body.0 (Linear), output.0" in out
    assert "1 of 66 pairs differ" in out


@pytest.mark.slow
def test_several_processes_tell_the_same(bad, capsys):
    reported = []
    for workers in ("1", "2"):
        assert main(["compare", *bad, "--workers", workers]) == 1
        reported.append(capsys.readouterr().out)
    assert reported[0] == reported[1]


def test_json_to_standard_output_is_nothing_but_json(bad, capsys):
    assert main(["compare", *bad, "--json", "-"]) == 1
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert content["passed"] is False and content["first_diff"]["candidate"] == "body.0"
    assert "DIFFER  step 1" in captured.err


def test_reports_are_written_where_asked(bad, tmp_path, capsys):
    outs = [tmp_path / name for name in ("out.json", "out.xml", "out.md")]
    flags = [str(x) for pair in zip(("--json", "--junit", "--markdown"), outs) for x in pair]
    assert main(["compare", *bad, *flags]) == 1
    assert json.loads(outs[0].read_text())["first_diff"]["step"] == 1
    assert ElementTree.parse(outs[1]).getroot().get("failures") == "1"
    assert outs[2].read_text().startswith("## padiff: differ")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("flag", "first"), [("--json", "{"), ("--junit", "<?xml"), ("--markdown", "## padiff: differ")]
)
def test_a_report_to_standard_output_is_nothing_but_the_report(flag, first, bad, capsys):
    assert main(["compare", *bad, "-v", flag, "-"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(first) and "DIFFER  step 1" in captured.err
    assert "pairs differ, in causal order" in captured.err and "pairs differ, in causal order" not in captured.out


def test_what_cannot_be_written_to_is_reported_before_comparing_and_leaves_nothing(bad, tmp_path, monkeypatch, capsys):
    def compared(*_, **__):
        raise AssertionError("it was compared")

    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(padiff_cli.commands.compare, "compare_runs", compared)
    for flag in ("--json", "--junit", "--markdown"):
        assert main(["compare", *bad, flag, str(folder)]) == 2
        assert capsys.readouterr().err == f"padiff: cannot write {folder}: it is a folder\n"
    assert main(["doctor", bad[0], "--json", str(folder)]) == 2
    assert capsys.readouterr().err == f"padiff: cannot write {folder}: it is a folder\n"
    assert main(["compare", *bad, "--json", "-", "--junit", "-"]) == 2
    expected = "only one of --brief, --json, --junit, --markdown and --html can go to standard output"
    assert expected in capsys.readouterr().err


def test_a_report_that_cannot_be_written_leaves_nothing_behind(bad, tmp_path):
    """A limit that the kernel sets: the report does not fit."""
    command = (
        f"ulimit -f 1; exec {sys.executable} -m padiff_cli.main compare {bad[0]} {bad[1]} --json {tmp_path}/r.json"
    )
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "DIFFER  step 1" in done.stdout
    assert f"padiff: cannot write {tmp_path}/r.json: " in done.stderr and "Traceback" not in done.stderr
    assert not [path.name for path in tmp_path.iterdir() if "r.json" in path.name]


@pytest.mark.parametrize("command", ["compare", "watch"])
def test_a_log_folder_on_a_full_disk_is_named_and_the_report_is_reported_all_the_same(command, bad, tmp_path):
    """A file system of 60 kB, where this process may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    more = f"--json {tmp_path}/r.json" if command == "compare" else "--interval 0.01"
    full = f"head -c {52000 if command == 'compare' else 40000} /dev/zero > {mount}/filler"
    run = f"{sys.executable} -m padiff_cli.main {command} {bad[0]} {bad[1]} --logdir {mount}/tb {more}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
         f"mount -t tmpfs -o size=60k none {mount} && {full}; exec {run}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[:80]}")
    assert done.returncode == 2, done.stderr
    assert ("DIFFER  step 1" if command == "compare" else "step 0: match") in done.stdout
    assert done.stderr.startswith(f"padiff: cannot write to the log folder {mount}/tb: the disk is full")
    assert done.stderr.count("\n") == 1, done.stderr
    if command == "compare":
        assert json.loads((tmp_path / "r.json").read_text())["passed"] is False


def test_what_is_no_plain_file_is_written_into_and_not_replaced(bad, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with started(["cat", str(pipe)]) as reader:
        assert main(["compare", *bad, "--json", str(pipe)]) == 1
        assert json.loads(reader.communicate(timeout=30)[0])["passed"] is False
    assert pipe.is_fifo()


def test_logdir_streams_every_step(good, tmp_path, capsys):
    for _ in range(2):  # the second time adds nothing
        assert main(["compare", *good, "--logdir", str(tmp_path / "tb")]) == 0
    assert [number for number, _ in points(tmp_path / "tb", "diff")["forward_rel_l2/000 fc1"]] == [0, 1, 2]
    assert not [tag for tag in points(tmp_path / "tb", "diff") if "max_abs" in tag]
    assert f"tensorboard --logdir {tmp_path / 'tb'}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["compare", "watch"])
def test_tags_say_which_curves_are_written(good, tmp_path, capsys, command):
    found = {}
    for tags in ("layers", "worst", "all"):
        assert main([command, *good, "--logdir", str(tmp_path / tags), "--tags", tags]) == 0
        found[tags] = {run: set(points(tmp_path / tags, run)) for run in ("diff", "reference")}
    layers, worst, everything = found.values()
    assert worst["diff"] <= layers["diff"] < everything["diff"]
    assert worst["reference"] == layers["reference"] < everything["reference"]
    assert "forward_l2/000 fc1" in everything["reference"]
    with pytest.raises(SystemExit) as ended:
        main([command, *good, "--logdir", str(tmp_path / "no"), "--tags", "wrost"])
    assert ended.value.code == 2 and not (tmp_path / "no").exists()
    said = capsys.readouterr().err
    assert "--tags" in said and "worst" in said


def test_logdir_is_written_step_by_step(good, tmp_path, monkeypatch, capsys):
    """As the comparison goes on, not when it is done: the reports of a long one are not kept."""
    written = []
    monkeypatch.setattr(DiffStream, "write", lambda _, report: written.append(report.coverage.steps))

    def compared(*paths, each, **__):
        def interrupted(report):
            each(report)
            if len(written) == 2:
                raise KeyboardInterrupt

        return compare_runs(*paths, each=interrupted)

    monkeypatch.setattr(padiff_cli.commands.compare, "compare_runs", compared)
    assert main(["compare", *good, "--logdir", str(tmp_path / "tb")]) == 130
    assert written == [(0,), (1,)]


def test_without_a_compared_step_no_log_folder_is_made(tmp_path, capsys):
    runs = [str(toy_folder(tmp_path / name, [number])) for name, number in (("a", 0), ("b", 1))]
    assert main(["compare", *runs, "--logdir", str(tmp_path / "tb")]) == 2
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([], 1),
        (["--atol", "1e-2"], 0),
        (["--atol", "1e-5"], 1),
        (["--rtol", "1"], 0),
        (["--rtol", "1e-9"], 1),
        (["--atol", "9e-4", "--compare-mode", "mean"], 1),
        (["--atol", "1.1e-3", "--compare-mode", "strict"], 0),
        (["--atol", "9e-4", "--compare-mode", "strict"], 1),
        (["--compare-mode", "mean"], 1),
    ],
)
def test_tolerances_given_replace_the_default_policy(bad, capsys, flags, code):
    assert main(["compare", *bad, *flags, "-v"]) == code
    assert ("tolerance: rounding noise" in capsys.readouterr().out) == (not flags)


def test_a_tolerance_that_cannot_be_meant_exits_with_2(good, capsys):
    assert main(["compare", *good, "--atol", "-1"]) == 2
    assert capsys.readouterr().err == "padiff: atol has to be a number of at least 0, got -1.0\n"


@pytest.mark.parametrize("runs", ["good", "bad"])
def test_the_printed_map_given_back_gives_the_same_verdict(runs, request, tmp_path, capsys):
    paths = request.getfixturevalue(runs)
    assert main(["compare", *paths, "--json", "-"]) == (runs == "bad")
    first = json.loads(capsys.readouterr().out)
    assert main(["map", *paths]) == 0
    text = capsys.readouterr().out
    assert "- {reference: fc2, candidate: head, confidence: 0.99}  # Linear / Linear, by only one fits: shapes" in text
    assert "#   body  (Sequential)" in text
    (tmp_path / "map.yaml").write_text(text)
    assert main(["compare", *paths, "--layer-map", str(tmp_path / "map.yaml"), "--json", "-"]) == (runs == "bad")
    again = json.loads(capsys.readouterr().out)
    # How each pair was found is all that differs.
    assert {one["reason"] for one in again["models"].pop("partners")} == {"given"}
    del first["models"]["partners"]
    assert again == first


def test_a_map_that_is_edited_changes_what_is_compared(good, tmp_path, capsys):
    path = tmp_path / "map.yaml"
    path.write_text("pairs:\n  - {reference: fc2, candidate: null}\n  - {reference: null, candidate: head}\n")
    assert main(["compare", *good, "--layer-map", str(path), "--json", "-"]) == 0
    coverage = json.loads(capsys.readouterr().out)["coverage"]
    assert coverage["unmatched_layers"] == {"reference": ["fc2"], "candidate": ["head"]}


def test_show_tells_what_a_run_holds(good, capsys):
    assert main(["show", good[0]]) == 0
    out = capsys.readouterr().out
    # 4 * 8 + 8 + 8 * 2 + 2 = 58 parameters.
    assert "torch: torch 2.0, Net" in out and "4 layers, 58 parameters; 3 recorded steps" in out
    assert "steps: 0, 1, 2" in out and "finished" in out
    assert "step 0, rank 0: 1 input, 4 weight, 4 forward, 1 loss, 3 backward, 4 grad, 4 update, 1 learning rate" in out


def test_show_of_a_run_without_steps(tmp_path, capsys):
    path = write_run(tmp_path / "run", toy_info(), [], finished=False)
    assert main(["show", str(path)]) == 0
    assert "0 recorded steps" in (out := capsys.readouterr().out) and "still growing, or ended early" in out


MISUSE = [
    (["compare", "nowhere", "{run}"], r"there is no run folder nowhere"),
    (["compare", "{run}", "nowhere"], r"there is no run folder nowhere"),
    (["compare", "{run}", "{run}/run.json"], r"run\.json is a file; expected a run folder"),
    (["compare", "{run}", "{empty}"], r"empty is no run folder"),
    (["compare", "{run}", "x" * 5000], r"File name too long"),
    (["show", "nowhere"], r"there is no run folder nowhere"),
    (["map", "{run}", "nowhere"], r"there is no run folder nowhere"),
    (["compare", "{run}", "{run}", "--layer-map", "{run}"], r"cannot read the layer map .*torch: .*directory"),
    (["compare", "{run}", "{run}", "--layer-map", "no.yaml"], r"cannot read the layer map no\.yaml: .*No such file"),
    (["compare", "{run}", "{run}", "--layer-map", "{run}/steps/00000000/rank_0/bad.yaml"], r"is no YAML"),
    (["compare", "{run}", "{run}", "--json", "missing/out.json"], r"cannot write missing/out\.json: there is no"),
    (["compare", "{run}", "{run}", "--junit", "missing/out.xml"], r"cannot write missing/out\.xml: there is no"),
    (["compare", "{run}", "{run}", "--markdown", "missing/x.md"], r"cannot write missing/x\.md: there is no folder"),
    (["compare", "{run}", "{run}", "--json", "{empty}"], r"cannot write .*empty: it is a folder"),
    (["compare", "{run}", "{run}", "--logdir", "{run}/run.json"], r"cannot make the log folder"),
    (["compare", "{run}", "{run}", "--workers", "0"], r"workers is how many processes measure, at least 1, got 0"),
    (["watch", "{run}", "{run}", "--logdir", "{run}/run.json"], r"cannot make the log folder"),
    (
        ["watch", "{run}", "{run}", "--logdir", "tb", "--interval", "0"],
        r"--interval has to be a number of seconds above 0, got 0\.0",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISUSE)
def test_misuse_is_one_line_and_exits_with_2(arguments, message, good, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (Path(good[0]) / "steps" / "00000000" / "rank_0" / "bad.yaml").write_text("pairs: [{")
    assert main([a.format(run=good[0], empty=tmp_path / "empty") for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("padiff: ") and re.search(message, err)
    assert err.count("\n") == 1 or "YAML" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["compare"],
        ["compare", "a"],
        ["compare", "a", "b", "c"],
        ["differ", "a", "b"],
        ["compare", "a", "b", "--atol", "little"],
        ["compare", "a", "b", "--compare-mode", "loose"],
        ["watch", "a", "b"],
    ],
)
def test_mixed_up_arguments_exit_with_2_and_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: padiff" in capsys.readouterr().err


def test_runs_without_a_common_step_exit_with_2(tmp_path, capsys):
    paths = [str(toy_folder(tmp_path / str(n), [n, n + 2])) for n in (0, 1)]
    assert main(["compare", *paths]) == 2
    assert "the runs have no common step" in capsys.readouterr().err


def test_a_step_and_a_rank_folder_are_compared_too(good, capsys):
    below = [f"{path}/steps/00000001" for path in good]
    assert main(["compare", *below]) == 0
    assert main(["compare", *(f"{path}/rank_0" for path in below)]) == 0
    assert "22 tensors in 1 step" in capsys.readouterr().out


@pytest.mark.slow
def test_the_installed_command_and_the_package_run_as_a_module_are_the_command(bad):
    installed = [Path(sys.executable).with_name("padiff")]
    for command, arguments, code in ((installed, ["compare", *bad], 1), ([sys.executable, "-m", "padiff"], [], 2)):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == code and "Traceback" not in done.stderr
    assert done.stderr.startswith("usage: padiff ")


def test_a_reader_that_leaves_is_no_traceback(bad):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "padiff_cli.main", "compare", *bad]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("fault", [False, True])
def test_comparing_leaves_the_garbage_collector_as_it_was(fault, monkeypatch, tmp_path):
    found, before = [], gc.get_threshold()

    def compared(*_, **__):
        found.append(gc.get_threshold())
        raise UsageError("no")

    if fault:
        monkeypatch.setattr("padiff_cli.commands.compare.compare_runs", compared)
    else:
        whole = padiff_cli.commands.compare.compare_runs
        monkeypatch.setattr(
            "padiff_cli.commands.compare.compare_runs",
            lambda *a, **k: found.append(gc.get_threshold()) or whole(*a, **k),
        )
    folders = [str(toy_folder(tmp_path / name)) for name in "ab"]
    assert main(["compare", *folders]) == (2 if fault else 0)
    assert gc.get_threshold() == before and found[0][0] > before[0]

"""What the commands print where names look like markup, and where the terminal can't show them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kit.records import planted, toy_folder
from rich.console import Console

import padiff_cli.commands.compare
from padiff import compare_runs
from padiff_cli.main import main
from padiff_hooks.show import print_report

ODD = "[v1] [/x] :cat: [red]"
SMALL = planted("body.0/forward/output.0", lambda v: v + 1e-3, at=1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two runs that differ, in folders whose names are like rich's markup."""
    monkeypatch.chdir(tmp_path)
    toy_folder(tmp_path / "plain" / "a")
    shutil.copytree(tmp_path / "plain" / "a", tmp_path / ODD)
    return ODD, str(toy_folder(tmp_path / "[b]", paddle=True, plant=SMALL))


@pytest.mark.parametrize("command", ["compare", "watch", "show", "doctor"])
def test_names_that_look_like_markup_are_printed_as_they_are(command, odd, capsys):
    logdir = ["--logdir", "tb[/y] :dog:"]
    arguments = {
        "compare": [*odd, *logdir],
        "watch": [*odd, *logdir, "--interval", "0.01"],
        "show": odd[:1],
        "doctor": odd[:1],
    }[command]
    assert main([command, *arguments]) == (1 if command in ("compare", "watch") else 0)
    out = capsys.readouterr().out
    assert "🐱" not in out and "🐶" not in out
    if command in ("compare", "watch"):
        assert "tensorboard --logdir tb[/y] :dog:" in out


def test_a_script_in_a_folder_like_markup_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("[/x]").mkdir(parents=True)
    Path("[/x]/train.py").write_text("print(1)")
    assert main(["doctor", "[/x]/train.py"]) == 2
    assert "[/x]/train.py opens no padiff recorder" in capsys.readouterr().err


@pytest.mark.parametrize("markup", [True, False])
def test_reports_are_printed_alike_on_any_console(markup, odd, capsys):
    report = replace(compare_runs(*odd), reference=ODD, candidate="[b]")
    print_report(report, Console(markup=markup, emoji=markup, width=200))
    out = capsys.readouterr().out
    assert re.search(r"\[v1\] \[/x\] :cat: \[red\] \(reference\) against \[b\] \(candidate\)", out), out


# -- what a terminal can't show, and what nobody foresaw ---------------------------------------------------------------


@pytest.mark.slow
def test_a_terminal_that_cannot_show_a_name_shows_its_codes(tmp_path):
    toy_folder(tmp_path / "größe")
    toy_folder(tmp_path / "b", paddle=True)
    commands = (["compare", "größe", "b", "--logdir", "größe-日"], ["map", "größe", "b"], ["compare", "b", "größer"])
    done = subprocess.run(
        [sys.executable, "-c", f"from padiff_cli.main import main; print(*map(main, {commands!a}))"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        encoding="ascii",
    )
    assert done.stdout.endswith("\n0 0 2\n"), done.stderr
    assert r"--logdir gr\xf6\xdfe-\u65e5" in done.stdout and r"gr\xf6\xdfer" in done.stderr


def test_output_that_cannot_be_written_is_no_diff(tmp_path):
    toy_folder(tmp_path / "a")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "padiff_cli.main", "show", "a"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2 and done.stderr.startswith("padiff: ") and "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_nobody_foresaw_exits_with_2_and_can_be_reported(odd, monkeypatch, capsys):
    def broken(*_, **__):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(padiff_cli.commands.compare, "compare_runs", broken)
    assert main(["compare", *odd]) == 2
    err = capsys.readouterr().err
    assert err.startswith("padiff: ") and "ZeroDivisionError: a mistake of ours" in err.splitlines()[0]
    assert "please report" in err and "Traceback" in err and "in broken" in err


@pytest.mark.parametrize(
    ("flag", "value", "reported"),
    [
        ("--interval", "nan", "--interval has to be a number of seconds above 0, got nan"),
        ("--interval", "inf", "--interval has to be a number of seconds above 0, got inf"),
        ("--interval", "1e300", "--interval has to be a number of seconds above 0, got 1e+300"),
        ("--timeout", "nan", "--timeout has to be a number of seconds of at least 0, got nan"),
        ("--timeout", "-1", "--timeout has to be a number of seconds of at least 0, got -1.0"),
    ],
)
def test_times_that_are_none_are_refused(flag, value, reported, odd, capsys):
    assert main(["watch", *odd, "--logdir", "tb", flag, value]) == 2
    assert capsys.readouterr().err == f"padiff: {reported}\n" and not Path("tb").exists()

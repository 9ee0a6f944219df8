"""What the commands print where names look like markup, and where the terminal can't show them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from core.making import planted, toy_folder
from rich.console import Console

from padiff import compare_runs
from padiff_hooks.cli import main
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

"""The composite action: its shell steps, run by bash as GitHub's runner runs them, with the real padiff."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hard.children import run_child
from kit.forking import interpreter
from kit.records import planted, toy_folder

# Each starts processes of its own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


@dataclass
class Job:
    """What a use of the action left."""

    summary: str = ""
    ran: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    artifact: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    pip: str = ""
    code: int = 0
    printed: str = ""


def filled(text, values):
    """A value of the file with its expressions worked out: names, and ``a || b``."""

    def value(match):
        return next((found for name in match[1].split("||") if (found := values.get(name.strip(), ""))), "")

    return re.sub(r"\$\{\{(.*?)\}\}", value, text)


def due(condition, values, failed):
    """Whether a step runs: ``always() &&`` and comparisons of a name with a word, as the action uses them."""
    if condition.startswith("always() && "):
        condition, failed = condition.removeprefix("always() && "), False
    if not condition or failed:
        return not failed
    name, not_equal, word = re.fullmatch(r"(\S+) (!=|==) '(.*)'", condition).groups()
    return (values.get(name, "") == word) == (not_equal == "==")


@pytest.fixture
def use(tmp_path):
    """Uses the action with inputs; returns the `Job`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    # pip would reach the network: it is written down what it is asked for. All else is the real interpreter.
    python = programs / "python"
    other = f'exec {interpreter()} "$@"'
    python.write_text(f'#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" >> {tmp_path}/pip.txt; else {other}; fi\n')
    python.chmod(0o755)

    def run(**given):
        inputs = {name: str(spec.get("default", "")) for name, spec in ACTION["inputs"].items()}
        inputs |= {name.replace("_", "-"): text for name, text in given.items()}
        values = {f"inputs.{name}": text for name, text in inputs.items()} | {"github.action_path": "/action"}
        job, failed = Job(), False
        summary, output = tmp_path / "summary.md", tmp_path / "output.txt"
        for step in ACTION["runs"]["steps"]:
            if not due(step.get("if", ""), values, failed):
                continue
            job.ran.append(step["name"])
            if "uses" in step:
                job.artifact = {name: filled(text, values) for name, text in step["with"].items()}
                continue
            assert step["shell"] == "bash"
            assert "${{" not in step["run"], "an input would become a part of the script"
            output.write_text("")
            (tmp_path / "step.sh").write_text(step["run"])
            environment = {name: filled(text, values) for name, text in step.get("env", {}).items()}
            environment |= {
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
                "RUNNER_TEMP": str(tmp_path),
                "GITHUB_STEP_SUMMARY": str(summary),
                "GITHUB_OUTPUT": str(output),
            }
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(tmp_path / "step.sh")]
            done = run_child(command, cwd=tmp_path, env=environment)
            job.printed += done.stdout + done.stderr
            found = dict(line.split("=", 1) for line in output.read_text().splitlines())
            values |= {f"steps.{step.get('id')}.outputs.{name}": text for name, text in found.items()}
            if done.returncode and not failed:
                job.code, failed = done.returncode, True
        job.summary = summary.read_text() if summary.exists() else ""
        job.outputs = {name: filled(spec["value"], values) for name, spec in ACTION["outputs"].items()}
        folder = job.outputs["folder"]
        job.files = sorted(path.name for path in Path(folder).iterdir()) if folder else []
        pip = tmp_path / "pip.txt"
        job.pip = pip.read_text() if pip.exists() else ""
        return job

    return run


@pytest.fixture
def runs(tmp_path):
    """A reference, one like it, and one with a fault in the output of a layer."""
    fault = planted("fc1/forward/output.0", lambda values: values * 1.5)
    return (
        str(toy_folder(tmp_path / "runs" / "reference")),
        str(toy_folder(tmp_path / "runs" / "the same")),
        str(toy_folder(tmp_path / "runs" / "faulty", plant=fault)),
    )


def test_runs_that_match(use, runs):
    job = use(reference=runs[0], candidate=runs[1])
    assert job.code == 0, job.printed
    assert job.outputs["verdict"] == "match"
    assert job.outputs["exit-code"] == "0"
    assert "MATCH  " in job.summary
    assert job.files == ["junit.xml", "report.html", "report.md"]
    assert job.pip == "-m pip install --quiet --disable-pip-version-check /action\n"


def test_runs_that_differ_fail_and_keep_the_page(use, runs):
    job = use(reference=runs[0], candidate=runs[2], install="none", artifact="mine")
    assert job.code == 1
    assert job.outputs["verdict"] == "differ"
    assert "DIFFER  step 0, forward" in job.summary
    assert job.files == ["junit.xml", "report.html", "report.md"]
    assert job.artifact["name"] == "mine"
    assert job.artifact["path"] == job.outputs["folder"]
    assert job.ran[-2:] == ["Keep the page", "Verdict"]
    assert job.pip == ""


def test_arguments_are_read_as_a_shell_reads_them_and_nothing_is_run(use, runs, tmp_path):
    # What differs is not looked at.
    job = use(reference=runs[0], candidate=runs[2], install="none", args="--stage 'input' --steps \"1-2\"")
    assert job.code == 0, job.printed
    job = use(reference=runs[0], candidate=runs[1], install="none", args="--layer '$(touch mine)' ; touch mine")
    assert job.code == 2
    assert not (tmp_path / "mine").exists()
    job = use(reference=runs[0], candidate=runs[1], install="none", args="--layer 'fc1")
    assert job.code != 0
    assert "No closing quotation" in job.printed


def test_what_can_t_be_compared_says_why_in_the_summary(use, runs):
    job = use(reference=runs[0], candidate="runs/none", install="none")
    assert job.code == 2
    assert job.outputs["verdict"] == "error"
    assert "padiff could not compare" in job.summary
    assert "runs/none" in job.summary


def test_commands_record_first(use, runs, tmp_path):
    copy = f"cp -r '{runs[0]}' runs/new && echo reference > order"
    job = use(
        reference="runs/new",
        candidate=runs[1],
        install="none",
        record_reference=copy,
        record_candidate="echo candidate >> order",
    )
    assert job.code == 0, job.printed
    assert (tmp_path / "order").read_text() == "reference\ncandidate\n"
    job = use(reference=runs[0], candidate=runs[1], install="none", record_candidate="false; true")
    assert job.code == 1
    assert "Compare" not in job.ran

"""The workflows run what the Makefile has, on the versions that `pyproject.toml` promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
PIN = re.compile(r"^([\w-]+)==([\d.]+)$", re.M)


def steps() -> Iterator[dict]:
    for workflow in WORKFLOWS.values():
        for job in workflow["jobs"].values():
            yield from job["steps"]


def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def numbers(version: str) -> list[int]:
    """Return a version's numbers without zeros at the end: 2.2.0 is 2.2."""
    return [int(part) for part in re.sub(r"(\.0)+$", "", version).split(".")]


def test_every_target_that_a_workflow_makes_is_in_the_makefile():
    made = {target for step in steps() for target in re.findall(r"\bmake (\w+)", step.get("run", ""))}
    assert made >= {"lint", "docs", "quick", "frameworks", "coverage", "dist"}
    assert made <= TARGETS


def test_every_python_of_the_classifiers_is_tested():
    classifiers = re.findall(r"Python :: (\d\.\d+)$", "\n".join(project()["classifiers"]), re.M)
    assert WORKFLOWS["ci"]["jobs"]["python"]["strategy"]["matrix"]["python"] == classifiers


def test_the_oldest_promised_versions_are_tested():
    pins = dict(PIN.findall((ROOT / ".ci/oldest.txt").read_text()))
    floors: dict[str, str] = {}
    for extra, requirements in {"": project()["dependencies"], **project()["optional-dependencies"]}.items():
        if extra not in ("docs", "lint", "paddleformers"):
            floors |= dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(requirements), re.M))
    tools = {name for name in floors if name.startswith(("pytest", "flask", "moto"))}
    # Of the rest, some floors have no build for the oldest Python: their pins are the first that have one.
    assert floors.keys() - tools == pins.keys() - {"protobuf"}  # what paddle 3.0 uses of it is no longer in version 7
    assert all(numbers(pins[name]) >= numbers(floors[name]) for name in pins if name in floors)
    exact = ("torch", "paddlepaddle", "lightning", "pytorch-lightning", "transformers", "numpy", "ml_dtypes")
    assert all(numbers(pins[name]) == numbers(floors[name]) for name in exact)
    matrix = WORKFLOWS["ci"]["jobs"]["frameworks"]["strategy"]["matrix"]["include"]
    assert all((ROOT / f".ci/{entry['versions']}.txt").exists() for entry in matrix)


def test_no_workflow_has_rights_or_secrets_that_it_does_not_need():
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
    texts = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    assert "secrets." not in texts
    # What a stranger names (a branch, a title) reaches no script as text.
    assert not [step for step in steps() if "${{" in step.get("run", "")]
    publish = WORKFLOWS["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"

"""The wheel holds what users need beside the code."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from padiff_cli.main import COMMANDS
from padiff_cli.parser import Parser

ROOT = Path(__file__).resolve().parents[2]
SKILL = "padiff/.agents/skills/align-two-trainings/SKILL.md"


@pytest.mark.slow
def test_the_wheel_holds_the_skill_and_the_data_of_the_packages(tmp_path):
    builder = WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read(SKILL) == (ROOT / SKILL).read_bytes()
    assert {"padiff/compare/diagnose/known.json", "padiff/py.typed", "padiff_processes.pth"} <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))}


def test_the_skill_has_a_head_and_is_short():
    lines = (ROOT / SKILL).read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
    end = lines.index("---", 1)
    head = dict(line.split(": ", 1) for line in lines[1:end])
    # The bounds of https://agentskills.io/specification: the name is that of the folder.
    assert lines[0] == "---" and head["name"] == Path(SKILL).parent.name
    assert 0 < len(head["description"]) <= 1024


@pytest.mark.parametrize("path", [SKILL, "AGENTS.md"])
def test_commands_and_options_that_it_names_exist(path):
    import importlib

    text = (ROOT / path).read_text(encoding="utf-8")
    commands = re.findall(r"padiff (?!-)([a-z-]+)((?: [^\n`]*)?)", "\n".join(re.findall(r"`+[^`]+`+", text)))
    named = {command for command, _ in commands}
    assert path == "AGENTS.md" or {"run", "compare", "fix", "port-check", "verify"} <= named
    assert named <= set(COMMANDS)
    for command, rest in commands:
        parser = Parser()
        module = importlib.import_module(COMMANDS[command].module)
        (module._fill if command == "run" else module.add_arguments)(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest.partition(" -- ")[0])) <= known, (command, rest)

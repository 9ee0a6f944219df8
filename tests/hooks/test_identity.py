"""Which recording a run folder holds: reported apart from the one before it, and the same after a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit.records import toy_folder, toy_info, toy_run, toy_steps, write_run

from padiff.dump import RunWriter, open_run


def identity(path: Path) -> str:
    return open_run(path).info.identity


def without_identity(path: Path) -> Path:
    """A run folder as an older padiff wrote it."""
    content = json.loads((path / "run.json").read_text())
    del content["id"]
    (path / "run.json").write_text(json.dumps(content))
    return path


def test_each_recording_has_an_identity_of_its_own(tmp_path):
    found = {identity(toy_folder(tmp_path / name)) for name in ("a", "b", "c")}
    assert len(found) == 3 and all(found)


def test_overwriting_makes_another_and_resuming_keeps_it(tmp_path):
    first = identity(toy_folder(tmp_path / "run", [0]))
    resumed = identity(write_run(tmp_path / "run", toy_info(), toy_steps([1]), existing="resume"))
    overwritten = identity(toy_folder(tmp_path / "run", [0], existing="overwrite"))
    assert first == resumed != overwritten


@pytest.mark.parametrize("existing", ["error", "resume", "overwrite"])
def test_a_folder_that_holds_no_run_yet_gets_one_whatever_is_asked_for(tmp_path, existing):
    assert identity(write_run(tmp_path / "run", toy_info(), toy_steps([0]), existing=existing))


def test_what_is_said_anew_while_recording_keeps_it(tmp_path):
    writer = RunWriter(tmp_path / "run", toy_info())
    before = identity(tmp_path / "run")
    writer.set_info(replace(toy_info(), environment={"autocast.dtype": "bfloat16"}))
    writer.add_step(toy_steps([0])[0])
    writer.close()
    assert open_run(tmp_path / "run").info.environment and identity(tmp_path / "run") == before


def test_older_folders_have_none_until_they_are_overwritten(tmp_path):
    run = without_identity(toy_folder(tmp_path / "run", [0]))
    assert identity(run) == ""
    assert identity(write_run(run, toy_info(), toy_steps([1]), existing="resume")) == ""
    assert identity(toy_folder(run, [0], existing="overwrite"))


def test_a_run_in_memory_has_none():
    assert toy_run().info.identity == ""

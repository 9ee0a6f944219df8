"""What two processes recorded is done again by two, each with its own rank's batches and masks."""

from __future__ import annotations

import json

import pytest
from conditions.launching import launch
from kit.forking import python_with_frameworks

import padiff
from padiff.errors import UsageError
from replay.trainings import Torch

from . import ranked


def run(framework, folder, reference="", faulty=""):
    # paddle's processes may crash when they end if torch is loaded, too.
    python = python_with_frameworks(only="" if framework == "torch" else framework)
    launch(ranked.__file__, framework, str(folder), str(reference), faulty, python=python)
    if reference:
        return [json.loads((folder.parent / f"{folder.name}.{rank}.json").read_text()) for rank in range(2)]
    return []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "there"
    run("torch", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_each_process_does_its_own_steps(recorded, tmp_path, framework):
    packs = padiff.open_run(recorded).packs
    assert (packs.ranks(2)[0].masks[0].kept() != packs.ranks(2)[1].masks[0].kept()).any()
    for found in run(framework, tmp_path / "here", recorded):
        assert found["passed"], found["text"]
        assert found["steps"] == [0, 2] and found["notes"] == []


@pytest.mark.slow
def test_a_fault_of_one_process_is_found(recorded, tmp_path):
    for found in run("torch", tmp_path / "here", recorded, "faulty"):
        assert not found["passed"] and found["stage"] == "loss", found["text"]


def test_fewer_processes_are_refused(recorded, tmp_path):
    with pytest.raises(UsageError, match="recorded by 2 processes, each with its own batch, and this is one process"):
        padiff.replay(recorded, Torch.ViT(), tmp_path / "here")

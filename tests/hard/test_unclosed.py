"""A recorder that nobody closes: what was recorded is written when the interpreter ends."""

from __future__ import annotations

import re
import subprocess

import pytest
from kit.forking import python_with_frameworks

import padiff

from .children import run_child

LOOP = """
import sys, time
import torch, padiff
import padiff.dump.write as write
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rec = padiff.record(model, sys.argv[1], optimizer=optimizer, pack=sys.argv[2] == "packed")
rec.__enter__()
if sys.argv[3] == "slow":
    import padiff.dump.write
    padiff.dump.write.AT_EXIT = 0.5
    whole = write.RunWriter._write
    write.RunWriter._write = lambda *args: (time.sleep(4 if args[1].number else 0), whole(*args))
for _ in range(5 if sys.argv[3] != "slow" else 2):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rec.try_dump()
if sys.argv[3] == "an error":
    raise RuntimeError("the training's own")
if sys.argv[3] == "gone":
    import shutil
    rec.flush()
    shutil.rmtree(sys.argv[1])
    model(torch.randn(8, 64)).sum().backward()
    rec.try_dump()
if sys.argv[3] == "closed":
    rec.close()
"""


def run(tmp_path, storage: str, how: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    # Once with all that is done where an interpreter ends.
    python = python_with_frameworks(taken_down=(storage, how) == ("plain", "the end"))
    command = [*python, str(script), str(tmp_path / "run"), storage, how]
    return run_child(command)


@pytest.mark.parametrize(("storage", "how"), [("plain", "the end"), ("packed", "the end"), ("plain", "an error")])
def test_what_is_queued_is_written_when_the_interpreter_ends(tmp_path, storage, how):
    done = run(tmp_path, storage, how)
    assert done.returncode == (how == "an error"), done.stderr
    found = padiff.open_run(tmp_path / "run")
    assert found.numbers() == [0, 1, 2, 3, 4] and not found.finished()
    assert all(record.value is not None for number in found.numbers() for record in found.steps(number)[0].records)
    assert "was never closed" in done.stderr and "is not marked as finished" in done.stderr
    assert not list((tmp_path / "run").rglob(".*"))


def test_nothing_is_said_of_a_recorder_that_was_closed(tmp_path):
    done = run(tmp_path, "plain", "closed")
    assert done.returncode == 0
    assert re.fullmatch(
        r"padiff: each recorded step takes \S+ kB\npadiff: recorded 5 steps, \S+ MB, in .*/run\n", done.stderr
    )
    assert padiff.open_run(tmp_path / "run").finished()


def test_a_disk_that_takes_too_long_is_not_waited_for(tmp_path):
    done = run(tmp_path, "plain", "slow")
    assert done.returncode == 0 and "steps that were still being written after" in done.stderr
    assert padiff.open_run(tmp_path / "run").numbers() == [0]


def test_a_step_that_cannot_be_written_then_is_reported(tmp_path):
    done = run(tmp_path, "plain", "gone")
    assert done.returncode == 0 and "step 5 could not be written" in done.stderr and "Traceback" not in done.stderr

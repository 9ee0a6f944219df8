"""A training that forks while it is recorded: the child records nothing, hangs nowhere, and disturbs nothing."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from kit.forking import python_with_frameworks

import padiff

from .children import run_child

TRAINING = """
    import contextlib, io, os, signal, sys, time, warnings
    import numpy as np
    from kit.frameworks import KITS, hook_count
    how, folder, child, kit = sys.argv[1], sys.argv[2], 0, KITS[sys.argv[3]]
    model = kit.Sequential(kit.Linear(300, 300), kit.Linear(300, 300))
    optimizer = kit.sgd(model.parameters())
    hooks = lambda: hook_count(kit, model)
    """
LOOP = """
    import padiff
    def step():
        model(kit.tensor(np.ones((20, 300)))).mean().backward()
        optimizer.step()
        kit.zero(optimizer)
    def watched(pid):
        # Not waited for without end: a child that hangs is what this looks for.
        for _ in range(600):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "it hangs"
    warnings.simplefilter("ignore")
    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for number in range(4):
            step()
            rec.try_dump()
            if number == 1:
                child = os.fork()
                if child == 0:
                    assert hooks() == 0, hooks()
                    if how == "exit":
                        sys.exit(0)
                    if how == "break":
                        break
                    if how == "go on":
                        step()
                        with contextlib.redirect_stderr(io.StringIO()) as reported:
                            rec.try_dump()
                        assert "fork" in reported.getvalue(), reported.getvalue()
                        for _ in range(3):
                            step()
                            assert rec.try_dump() is False
                        rec.flush()
                        break
                    if how == "another":
                        with padiff.record(model, folder + "-of-the-child", optimizer=optimizer) as mine:
                            step()
                            mine.try_dump()
                        break
    if child == 0:
        sys.exit(0)
    print(watched(child), hooks())
    """


def run(tmp_path: Path, framework: str, how: str, loop: str = LOOP, taken_down: bool = False) -> list[str]:
    code = textwrap.dedent(TRAINING) + textwrap.dedent(loop)
    done = run_child([*python_with_frameworks(taken_down), "-c", code, how, str(tmp_path / "run"), framework])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.parametrize("how", ["exit", "break", "go on"])
def test_a_fork_of_a_torch_training_ends_and_writes_nothing(tmp_path, how):
    # Once with all that is done where an interpreter ends, in the child and in its parent.
    assert run(tmp_path, "torch", how, taken_down=how == "exit") == ["0", "0"]
    found = padiff.open_run(tmp_path / "run")
    assert found.numbers() == [0, 1, 2, 3] and found.finished()
    assert not list((tmp_path / "run").rglob(".*"))


def test_a_fork_of_a_paddle_training_ends_and_writes_nothing(tmp_path):
    assert run(tmp_path, "paddle", "break") == ["0", "0"]
    found = padiff.open_run(tmp_path / "run")
    assert found.numbers() == [0, 1, 2, 3] and found.finished()


def test_a_fork_may_record_into_a_folder_of_its_own(tmp_path):
    assert run(tmp_path, "torch", "another") == ["0", "0"]
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3]
    assert padiff.open_run(tmp_path / "run-of-the-child").numbers() == [0]


HOST = """
    from padiff_hooks.training import TrainingRecorder
    def train(folder, fork="", **options):
        kit.seed(0)
        for layer in model:
            kit.set(layer.weight, np.ones((300, 300)))
        training = TrainingRecorder(folder, **options)
        training.start(model, [optimizer])
        for number in range(4):
            training.begin_batch()
            loss = model(kit.tensor(np.full((20, 300), 1e-4))).mean()
            loss.backward()
            optimizer.step()
            kit.zero(optimizer)
            training.end_batch(loss.detach())
            training.end_step()
            if number == 1 and fork:
                training._recorder.flush()
                if os.fork() == 0:
                    getattr(training, fork)()
                    sys.exit(0)
                os.wait()
        training.finish()
    train(folder + "-reference")
    train(folder, how, reference=folder + "-reference", logdir=folder + "-tb")
    """


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_a_fork_below_a_callback_leaves_comparing_and_streaming_to_the_parent(tmp_path, how):
    run(tmp_path, "torch", how, HOST)
    assert padiff.open_run(tmp_path / "run").finished()
    lines = (tmp_path / "run-tb" / "diffs.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [0, 1, 2, 3]

"""A training that forks while it is recorded: the child records nothing, hangs nowhere, and disturbs nothing."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from kit.forking import python_with_frameworks

import padiff

from .children import run_child
from .killing import ROOT

TORCH = """
    import torch as framework
    model = framework.nn.Sequential(framework.nn.Linear(300, 300), framework.nn.Linear(300, 300))
    optimizer = framework.optim.SGD(model.parameters(), lr=0.1)
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    """
PADDLE = """
    import paddle as framework
    model = framework.nn.Sequential(framework.nn.Linear(300, 300), framework.nn.Linear(300, 300))
    optimizer = framework.optimizer.SGD(parameters=model.parameters())
    hooks = lambda: sum(
        len(m._forward_post_hooks) + len(m._forward_pre_hooks) for m in model.sublayers(include_self=True)
    )
    """
LOOP = """
    import os, signal, sys, time, warnings
    import padiff
    how, folder, child = sys.argv[1], sys.argv[2], 0
    def step():
        model(framework.ones([20, 300])).mean().backward()
        optimizer.step()
        optimizer.clear_grad() if hasattr(optimizer, "clear_grad") else optimizer.zero_grad()
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
                        warnings.simplefilter("error")
                        step()
                        try:
                            rec.try_dump()
                            os._exit(3)
                        except RuntimeWarning as told:
                            assert "fork" in str(told), told
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


def run(tmp_path: Path, framework: str, how: str, loop: str = LOOP) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(framework) + textwrap.dedent(loop))
    done = run_child(
        [*python_with_frameworks(), str(script), how, str(tmp_path / "run")],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.parametrize("how", ["exit", "break", "go on"])
def test_a_fork_of_a_torch_training_ends_and_writes_nothing(tmp_path, how):
    assert run(tmp_path, TORCH, how) == ["0", "0"]
    found = padiff.open_run(tmp_path / "run")
    assert found.numbers() == [0, 1, 2, 3] and found.finished()
    assert not list((tmp_path / "run").rglob(".*"))


def test_a_fork_of_a_paddle_training_ends_and_writes_nothing(tmp_path):
    assert run(tmp_path, PADDLE, "break") == ["0", "0"]
    found = padiff.open_run(tmp_path / "run")
    assert found.numbers() == [0, 1, 2, 3] and found.finished()


def test_a_fork_may_record_into_a_folder_of_its_own(tmp_path):
    assert run(tmp_path, TORCH, "another") == ["0", "0"]
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3]
    assert padiff.open_run(tmp_path / "run-of-the-child").numbers() == [0]


HOST = """
    from padiff_hooks.training import TrainingRecorder
    import os, sys, time
    def train(folder, fork="", **options):
        framework.manual_seed(0)
        for layer in model:
            framework.nn.init.ones_(layer.weight)
        training = TrainingRecorder(folder, **options)
        training.start(model, [optimizer])
        for number in range(4):
            training.begin_batch()
            loss = model(framework.ones([20, 300]) / 1e4).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.end_batch(loss.detach())
            training.end_step()
            if number == 1 and fork:
                training._recorder.flush()
                if os.fork() == 0:
                    getattr(training, fork)()
                    sys.exit(0)
                os.wait()
        training.finish()
    train(sys.argv[2] + "-reference")
    train(sys.argv[2], sys.argv[1], reference=sys.argv[2] + "-reference", logdir=sys.argv[2] + "-tb")
    """


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_a_fork_below_a_callback_leaves_comparing_and_streaming_to_the_parent(tmp_path, how):
    run(tmp_path, TORCH, how, HOST)
    assert padiff.open_run(tmp_path / "run").finished()
    lines = (tmp_path / "run-tb" / "diffs.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [0, 1, 2, 3]

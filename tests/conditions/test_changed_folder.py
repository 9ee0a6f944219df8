"""Scripts that change their working directory (Hydra does): what was named before stays where it was."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from kit.forking import python_with_frameworks
from kit.nets import batch, mlp, one_step

import padiff
from padiff.recorder import MemoryRun
from padiff_hooks.training import TrainingRecorder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to begin in, and one to go to."""
    (tmp_path / "start" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "start"


def loop(kit, model, rec, leave_at, steps=4):
    optimizer = kit.sgd(model.parameters())
    for step in range(steps):
        if step == leave_at:
            os.chdir("sub")
        one_step(kit, model, optimizer, *batch(kit, seed=step), rec)


@pytest.mark.parametrize("leave_at", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}, {"pack": True, "detail": "full"}, {"max_bytes": 1e9}])
def test_record_writes_where_it_said(kit, folder, leave_at, options):
    model = mlp(kit)
    with padiff.record(model, "runs/here", replay_every_n_steps=2, **options) as rec:
        loop(kit, model, rec, leave_at)
    run = padiff.open_run(folder / "runs" / "here")
    assert run.numbers() == [0, 1, 2, 3] and run.finished() and len(run.packs) == 2
    assert list((folder / "sub").iterdir()) == []


def test_a_folder_is_named_before_the_with_begins(kit, folder):
    model = mlp(kit)
    recorder = padiff.record(model, "run")
    os.chdir("sub")
    with recorder as rec:
        loop(kit, model, rec, None)
    assert padiff.open_run(folder / "run").numbers() == [0, 1, 2, 3]


def test_try_dump_means_the_folder_that_it_named_first(kit, folder):
    for named in ("run", None):
        os.chdir(folder)
        model = mlp(kit)
        optimizer = kit.sgd(model.parameters())
        with padiff.record(model, named) as rec:
            for step in range(3):
                kit.cross_entropy(model(batch(kit, seed=step)[0]), batch(kit, seed=step)[1]).backward()
                optimizer.step()
                rec.try_dump(dir_path=named or "other")
                os.chdir(folder / "sub")
        assert padiff.open_run(folder / (named or "other")).numbers() == [0, 1, 2]


def test_a_callback_follows_its_reference_and_writes_its_logs_where_it_said(kit, folder):
    model = mlp(kit)
    start = {name: kit.numpy(value) for name, value in model.state_dict().items()}
    with padiff.record(model, "reference") as rec:
        loop(kit, model, rec, None)
    for name, value in model.state_dict().items():
        kit.set(value, start[name])
    training = TrainingRecorder("run", reference="reference", logdir="logs", on_diff="raise")
    os.chdir("sub")
    optimizer = kit.sgd(model.parameters())
    training.start(model, [optimizer])
    for step in range(4):
        training.begin_batch()
        loss = one_step(kit, model, optimizer, *batch(kit, seed=step))
        training.end_batch(loss)
        training.end_step()
    training.finish()
    assert padiff.open_run(folder / "run").numbers() == [0, 1, 2, 3]
    lines = [json.loads(line) for line in (folder / "logs" / "diffs.jsonl").read_text().splitlines()]
    assert sum(line.get("step") is not None for line in lines) >= 4
    assert list((folder / "sub").iterdir()) == []


def test_an_opened_run_is_read_where_it_was_opened(kit, folder):
    model = mlp(kit)
    with padiff.record(model, "run") as rec:
        loop(kit, model, rec, None)
    run = padiff.open_run("run")
    os.chdir("sub")
    assert [record.value.shape for record in run.steps(2)[0].records]
    padiff.set_dump_root_path("dumps")
    os.chdir(folder)
    assert padiff.create_model(mlp(kit)).dump_path.startswith(str(folder / "sub" / "dumps"))


def test_messages_name_a_folder_below_the_working_directory_as_it_was_named(kit, capsys):
    model = mlp(kit)
    with padiff.record(model, "runs/here") as rec:
        loop(kit, model, rec, None)
    assert capsys.readouterr().err.splitlines()[-1].endswith(", in runs/here")


def test_places_in_a_store_stay_as_they_are(kit):
    model = mlp(kit)
    with padiff.record(model, f"memory://bucket/{kit.name}") as rec:
        loop(kit, model, rec, 1)
    assert padiff.open_run(f"memory://bucket/{kit.name}").numbers() == [0, 1, 2, 3]


def test_a_run_in_memory_does_not_mind(kit):
    model = mlp(kit)
    with padiff.record(model) as rec:
        loop(kit, model, rec, 1)
    assert isinstance(rec.run, MemoryRun) and rec.run.numbers() == [0, 1, 2, 3]


SCRIPT = """
import os
import {framework}
from model import net_of
os.makedirs("outputs/today", exist_ok=True)
os.chdir("outputs/today")
net, optimizer, draw = net_of()
for step in range(4):
    net(draw()).sum().backward()
    optimizer.step()
    optimizer.{clear}()
"""
MODEL = {
    "torch": """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
    def forward(self, x):
        return torch.softmax(self.fc(x), dim=-1) * 2
def net_of():
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.1), lambda: torch.ones(2, 4)
""",
    "paddle": """
import paddle
class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = paddle.nn.Linear(4, 4)
    def forward(self, x):
        return paddle.nn.functional.softmax(self.fc(x), axis=-1) * 2
def net_of():
    paddle.seed(0)
    net = Net()
    return net, paddle.optimizer.SGD(0.1, parameters=net.parameters()), lambda: paddle.ones([2, 4])
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_padiff_run_records_a_script_that_changes_its_folder_first(framework, folder):
    (folder / "model.py").write_text(MODEL[framework])
    clear = "zero_grad" if framework == "torch" else "clear_grad"
    (folder / "train.py").write_text(SCRIPT.format(framework=framework, clear=clear))
    command = [*python_with_frameworks(), "-m", "padiff", "run", "--logdir", "logs"]
    subprocess.run([*command, "--dir", "one", "train.py"], check=True, cwd=folder)
    subprocess.run([*command, "--dir", "two", "--reference", "one", "train.py"], check=True, cwd=folder)
    for name in ("one", "two"):
        run = padiff.open_run(folder / name)
        assert run.numbers() == [0, 1, 2, 3]
        frames = {frame for call in run.steps(0)[0].trace.calls for frame in call.stack}
        assert {frame.file for frame in frames} >= {"train.py", "model.py"}
        assert all(frame.code for frame in frames) and any("softmax" in frame.code for frame in frames)
    assert (folder / "logs" / "diffs.jsonl").exists()
    assert list((folder / "outputs" / "today").iterdir()) == []

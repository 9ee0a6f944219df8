"""`padiff doctor`: real scripts in torch, paddle, Lightning and hapi; run folders that are whole and that are not."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from hard.children import started
from hard.test_children import gone
from kit.forking import interpreter

import padiff
import padiff_cli.commands.doctor
from padiff.errors import UsageError
from padiff_cli.doctor.script_check import Divergence, _unstable_text, first_divergence
from padiff_cli.doctor.script_runs import ScriptRun, ScriptRuns
from padiff_cli.main import main

pytestmark = pytest.mark.slow

# torch's own optimizers import a compiler, which takes as long as torch itself.
DESCENT = """
import sys
import torch
class Descent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""
TORCH = (
    DESCENT
    + """
import padiff
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    def forward(self, x):
        y = self.b(torch.relu(self.a(x)))
        return y * (1 + len(self.b._forward_hooks)) if "nosy" in sys.argv else y
model = Net()
optimizer = Descent(model.parameters(), {})
with padiff.record(model, "runs/one", optimizer=optimizer, every_n_steps=padiff.Schedule(every=2, first=3)) as rec:
    for step in range(1000):
        if "wild" in sys.argv and step == 2:
            torch.seed()
        x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        rec.log_loss(loss)
        optimizer.step()
        try:
            rec.try_dump()
        except BaseException:
            if "deaf" not in sys.argv:
                raise
"""
)

PADDLE = """
import warnings
warnings.simplefilter("ignore")
import numpy as np, paddle, padiff
from padiff_hapi import PaDiffCallback
paddle.seed(0)
net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 2))
clip = paddle.nn.ClipGradByGlobalNorm(0.5)
optimizer = paddle.optimizer.AdamW(parameters=net.parameters(), grad_clip=clip)
with padiff.record(net, "runs/loop", optimizer=optimizer) as rec:
    for _ in range(4):
        loss = net(paddle.randn([6, 4])).square().mean()
        loss.backward()
        rec.log_loss(loss)
        optimizer.step()
        optimizer.clear_grad()
        rec.try_dump()
data = np.random.RandomState(0).randn(24, 4).astype("float32")
class Data(paddle.io.Dataset):
    def __getitem__(self, index):
        return data[index], np.int64(index % 2)
    def __len__(self):
        return len(data)
other = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 2))
model = paddle.Model(other)
model.prepare(paddle.optimizer.SGD(parameters=other.parameters()), paddle.nn.CrossEntropyLoss())
model.fit(Data(), batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=[PaDiffCallback("runs/hapi")])
"""

LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch
import lightning.pytorch as pl
from padiff_lightning import PaDiffCallback
pl.seed_everything(0, verbose=False)
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(400, 4), torch.randint(0, 2, (400,)))
pl.Trainer(
    max_epochs=100, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu", callbacks=[PaDiffCallback("runs/lit", every_n_steps=2)],
).fit(Lit(), torch.utils.data.DataLoader(data, batch_size=4))
raise SystemExit("the training was not ended")
"""


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Scripts run in processes that have the frameworks already. Not those whose model is found by what they import."""
    monkeypatch.setattr(sys, "executable", str(interpreter()))


def script(text: str) -> Path:
    path = Path("train.py")
    path.write_text(text)
    return path


def doctor(*args: str) -> tuple[int, dict]:
    code = main(["doctor", "--json", "found.json", *args])
    return code, json.loads(Path("found.json").read_text())


# -- scripts ----------------------------------------------------------------------------------------------------


def test_a_torch_script_is_the_same_with_and_without(imported, capsys):
    script(TORCH)
    code, found = doctor("--steps", "6", "train.py")
    assert (code, found["verdict"], found["first"]) == (0, "same", None)
    assert (found["steps"], found["recorded_steps"]) == (6, 2)  # 3 and 5
    assert found["compared"] == {"losses": 6, "gradients": 24, "parameters": 24}
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert found["peak_memory"]["plain"] > 1e7 and found["recorded_bytes"] > 1000
    assert sorted(path.name for path in Path().iterdir()) == ["found.json", "train.py"]  # no runs/one
    assert "to the bit" in capsys.readouterr().out


def test_a_model_that_notices_hooks_is_caught_at_its_step(imported, capsys):
    script(TORCH)
    code, found = doctor("--steps", "5", "train.py", "--", "nosy")
    assert (code, found["verdict"]) == (1, "changed")
    assert found["first"]["step"] == 3 and found["first"]["what"] == "loss"
    assert "step 3: the loss is" in capsys.readouterr().out


def test_a_script_that_draws_other_numbers_each_time_proves_nothing(imported):
    script(TORCH)
    code, found = doctor("--steps", "4", "train.py", "--", "wild", "deaf")
    assert (code, found["verdict"]) == (2, "not deterministic")
    assert found["first"]["step"] == 2
    # Steps 0 and 1 are the same, but none of them is due: of recording they say nothing.
    assert "So nothing can be said about recording" in found["sentence"] and "seed" in found["sentence"]


def test_a_script_ends_with_a_doctor_that_is_killed():
    script("import os, time\nwith open('pid', 'w') as file: file.write(f'{os.getpid()}.')\ntime.sleep(600)\n")
    with started([sys.executable, "-m", "padiff", "doctor", "train.py"]) as process:
        end = time.monotonic() + 60
        while not (Path("pid").exists() and Path("pid").read_text().endswith(".")) and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
        assert gone(int(Path("pid").read_text()[:-1]))


UNSTEADY = Divergence(7, "loss", values=(1.0, 2.0))


@pytest.mark.parametrize(
    ("steps", "due", "first", "changed_nothing"),
    [
        (range(10), range(10), UNSTEADY, True),
        (range(10), range(6, 10), None, True),
        (range(10), range(7, 10), UNSTEADY, False),
        (range(7, 10), range(7, 10), UNSTEADY, False),  # a run that begins with step 7
        (range(10), range(10), Divergence(3, "gradient", "a/weight"), False),
        ((), (), None, False),
    ],
)
def test_the_steps_before_are_spoken_of_only_if_some_were_recorded(steps, due, first, changed_nothing):
    notes = ScriptRun({"notes_0_rank_0": [{"step": number, "due": number in due} for number in steps]})
    reported = _unstable_text(UNSTEADY, first, notes)
    assert ("In the steps before, recording changed nothing" in reported) == changed_nothing
    assert ("nothing can be said about recording" in reported) != changed_nothing


def test_paddle_loops_and_hapi_are_the_same(imported):
    script(PADDLE)
    code, found = doctor("--steps", "9", "train.py")
    assert (code, found["verdict"]) == (0, "same"), found
    # Two recorders: 4 steps of a loop that ends by itself, and 9 of the 18 that fit() would make.
    assert found["compared"] == {"losses": 13, "gradients": 52, "parameters": 52}


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--steps", "3", "--json", "found.json", "--", "--lr", "0.1", "--", "-x"],
        ["--steps", "3", "train.py", "--json=found.json", "--", "--lr", "0.1", "--", "-x"],
        ["--steps", "3", "--json", "found.json", "train.py", "--", "--lr", "0.1", "--", "-x"],
    ],
)
def test_options_stand_before_or_behind_the_script(arguments, monkeypatch, capsys):
    given = []

    def examine(path, args, steps, say):
        given.append((str(path), list(args), steps))
        raise UsageError("seen")

    monkeypatch.setattr(padiff_cli.commands.doctor, "examine", examine)
    script("print(1)")
    assert main(["doctor", *arguments]) == 2
    assert given == [("train.py", ["--lr", "0.1", "--", "-x"], 3)] and capsys.readouterr().err == "padiff: seen\n"


def test_lightning_is_the_same(imported, tmp_path):
    runs = ScriptRuns(script(LIGHTNING), [], 5, tmp_path, lambda _: None)
    plain, recording = runs.run("plain", record=False), runs.run("recording", record=True)
    assert (plain.trouble, recording.trouble) == ("", "")
    assert plain.length == recording.length == 5 and recording.due == 3
    assert plain.recorded == 0 and recording.recorded > 1000
    assert plain.count("losses") == 3 and plain.count("gradients") == 30  # the callback knows the loss of due steps
    assert first_divergence(plain, recording) is None
    next(iter(recording.steps.values()))[4]["gradients"]["net.2/weight"] = "another"
    found = first_divergence(plain, recording)
    assert found is not None
    assert (found.step, found.what, found.name) == (4, "gradient", "net.2/weight")


PLAIN = """{start}
{name}.{seed}(0)
model = {name}.nn.Sequential({name}.nn.Linear(4, 8), {name}.nn.ReLU(), {name}.nn.Linear(8, 2))
head = {name}.nn.Linear(2, 2)
held = list(model.parameters()) + (list(head.parameters()) if "split" in sys.argv else [])
optimizer = {optimizer}
for step in range(1000):
    loss = head(model({name}.randn([6, 4]))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.{clear}()
raise SystemExit("the training was not ended")
"""
TORCH_PLAIN = PLAIN.format(
    start=DESCENT, name="torch", seed="manual_seed", optimizer="Descent(held, {})", clear="zero_grad"
)
PADDLE_PLAIN = PLAIN.format(
    start="import paddle, sys", name="paddle", seed="seed", optimizer="paddle.optimizer.Adam(parameters=held)",
    clear="clear_grad",
)  # fmt: skip


@pytest.mark.parametrize("text", [TORCH_PLAIN, PADDLE_PLAIN], ids=["torch", "paddle"])
def test_a_script_that_does_not_record_is_recorded(text, tmp_path, request):
    runs = ScriptRuns(script(text), [], 4, tmp_path, lambda _: None)
    if text is TORCH_PLAIN:
        request.getfixturevalue("imported")
    recording = runs.run("recording", record=True)  # paddle's model is found as the framework is imported
    request.getfixturevalue("imported")
    plain = runs.run("plain", record=False)
    assert plain.trouble == recording.trouble == plain.refused == ""
    (steps,) = recording.steps.values()
    assert [step["step"] for step in steps] == [1, 2, 3, 4]  # in the first one the model is found
    # The loop also calls a head that the optimizer does not train.
    assert (plain.count("gradients"), plain.count("parameters")) == (16, 24) and plain.due == recording.due == 4
    assert plain.recorded == 0 and recording.recorded > 1000
    assert first_divergence(plain, recording) is None


def test_a_model_in_parts_is_found(imported, capsys):
    script(TORCH_PLAIN)
    assert main(["doctor", "train.py", "--steps", "3", "--", "split"]) == 0
    assert "3 steps, 3 of them recorded" in capsys.readouterr().out


@pytest.mark.parametrize("text", [TORCH_PLAIN, PADDLE_PLAIN], ids=["torch", "paddle"])
def test_recording_begins_when_all_optimizers_of_the_first_step_have_stepped(text, imported, tmp_path):
    line = next(line for line in text.splitlines() if line.startswith("optimizer = "))
    second = line.replace("optimizer", "second", 1).replace("held", "list(head.parameters())")
    text = text.replace(line, f"{line}\n{second}").replace(
        "    optimizer.step()\n", "    optimizer.step(); second.step()\n"
    )
    plain = ScriptRuns(script(text), [], 3, tmp_path, lambda _: None).run("plain", record=False)
    (steps,) = plain.steps.values()
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [len(step["gradients"]) for step in steps] == [len(step["parameters"]) for step in steps] == [6, 6, 6]


def test_a_tensor_of_no_layer_is_recorded(imported, capsys):
    bare = TORCH_PLAIN.replace("held = list(", "scale = torch.nn.Parameter(torch.ones(1))\nheld = [scale] or list(")
    script(bare.replace("head(model(", "(scale * head(model(").replace(".square()", ").square()"))
    assert main(["doctor", "train.py", "--steps", "3"]) == 0
    assert "3 steps, 3 of them recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "args", "reported"),
    [
        ("print(1)", (), "opens no padiff recorder, and its model was not found: it made no second step"),
        ("x = 1 / 0", (), "division by zero"),
        ("print(1)", ("--steps", "0"), "--steps has to be at least 1"),
        (None, (), "neither a script nor a run folder"),
    ],
)
def test_scripts_that_cannot_be_examined(text, args, reported, capsys):
    if text is not None:
        script(text)
    assert main(["doctor", *args, "train.py"]) == 2
    assert reported in capsys.readouterr().err


def test_a_script_that_records_none_of_the_steps(imported, capsys):
    script(TORCH)
    assert main(["doctor", "--steps", "2", "train.py"]) == 2
    assert "none of the first 2 steps is due" in capsys.readouterr().err


# -- run folders ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["torch", "paddle"])
def run_folder(request, tmp_path):
    path = tmp_path / "run"
    if request.param == "torch":
        model = torch.nn.Sequential(torch.nn.Linear(4, 80), torch.nn.Linear(80, 2))
        x = torch.ones(300, 4)
    else:
        model = paddle.nn.Sequential(paddle.nn.Linear(4, 80), paddle.nn.Linear(80, 2))
        x = paddle.ones([300, 4])
    with padiff.record(model, path) as rec:
        for _ in range(3):
            model(x).sum().backward()
            rec.try_dump()
    return path


def test_a_whole_run(run_folder, capsys):
    code, found = doctor(str(run_folder))
    assert (code, found["verdict"], found["damaged"]) == (0, "whole", [])
    files = len(list(run_folder.rglob("*.npy")))
    assert found["steps"] == 3 and found["tensors"] >= files > 10
    assert found["bytes"] == sum(path.stat().st_size for path in run_folder.rglob("*") if path.is_file())
    assert "whole" in capsys.readouterr().out


def test_a_cut_tensor_is_named(run_folder):
    largest = max((run_folder / "steps/00000001").rglob("*.npy"), key=lambda path: path.stat().st_size)
    assert largest.stat().st_size > 1 << 16  # so that it is memory-mapped, not loaded
    with open(largest, "r+b") as file:
        file.truncate(largest.stat().st_size - 8)
    code, found = doctor(str(run_folder))
    assert code == 1 and found["steps"] == 2
    assert all("step 1" in place and largest.name in place for place in found["damaged"]) and found["damaged"]


def test_a_lost_json_and_missing_ranks_are_named(run_folder):
    info = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps({**info, "world_size": 2}))
    (run_folder / "steps/00000002/rank_0/report.json").write_text("{")
    code, found = doctor(str(run_folder))
    assert code == 1
    assert [place for place in found["damaged"] if place == "step 0: rank 1 of 2 is missing"]
    assert any("step 2" in place and "report.json" in place for place in found["damaged"])


@pytest.mark.parametrize("ranks", [40, 10**9])
def test_a_number_of_ranks_that_nobody_has_is_one_finding(run_folder, ranks):
    info = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps({**info, "world_size": ranks}))
    code, found = doctor(str(run_folder))
    first = f"step 0: {ranks - 1} of {ranks} ranks are missing: 1, 2, 3, 4, 5, 6, 7, 8, ..."
    assert code == 1 and len(found["damaged"]) == 3 and found["damaged"][0] == first


def test_leftovers_and_nan_are_reported_and_are_no_damage(run_folder):
    steps = run_folder / "steps"
    shutil.copytree(steps / "00000002", steps / ".00000003.partial")
    (run_folder / "finished.json").unlink()
    weight = next((steps / "00000001").rglob("weights/*.npy"))
    values = np.load(weight)
    values.flat[0] = math.nan
    np.save(weight, values)
    code, found = doctor(str(run_folder))
    assert code == 0
    reported = " | ".join(found["remarks"])
    assert "step 3 was being written" in reported and "has not ended" in reported and "first in step 1" in reported


def test_no_run_folder(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["doctor", str(tmp_path / "empty")]) == 2
    assert "no run folder" in capsys.readouterr().err

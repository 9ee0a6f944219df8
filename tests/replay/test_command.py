"""``padiff replay RUN MODULE:FUNCTION``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import padiff
from padiff_cli.main import main
from replay.trainings import Torch, train

PORT = """
from replay.trainings import Paddle
from replay.vits import PaddleViT

def port(drop=0.1):
    net = PaddleViT(drop)
    net.train()
    optimizer = Paddle.adamw(net)
    def step(replayed):
        for batch in replayed.batches:
            (Paddle.cross_entropy(net(*batch.inputs), *batch.labels) / 2).backward()
        Paddle.update(net, optimizer)
    return net, optimizer, step

def faulty():
    return port(0.3)

def scheduled():
    net, optimizer, step = port()
    def stepped(replayed):
        optimizer.set_lr(0.01 * 0.5 ** replayed.number)
        step(replayed)
    return net, optimizer, stepped

def narrow():
    net, optimizer, step = port()
    def stepped(replayed):
        assert "float64" not in str(net.classifier.weight.dtype), "no float64 here"
        step(replayed)
    return net, optimizer, stepped

def torch_port():
    from replay.trainings import Torch
    from replay.vits import TorchViT
    net = TorchViT().train()
    optimizer = Torch.adamw(net)
    def step(replayed):
        for batch in replayed.batches:
            (Torch.cross_entropy(net(*batch.inputs), *batch.labels) / 2).backward()
        Torch.update(net, optimizer)
    return net, optimizer, step

def wrong():
    return port()[:2]

def failing():
    return (*port()[:2], lambda step: 1 / 0)

def broken():
    raise OSError("no data here")

number = 3
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    train(Torch, folder / "torch", steps=5, packs=2)
    return str(folder / "torch")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    Path(tmp_path / "port_of_vit.py").write_text(PORT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("port_of_vit", None)


@pytest.mark.parametrize("target", ["port_of_vit:port", "port_of_vit.py:port"])
def test_a_match_exits_with_0(run, capsys, target):
    assert main(["replay", run, target, "--json", "report.json", "--junit", "r.xml", "--markdown", "r.md"]) == 0
    assert "MATCH  " in capsys.readouterr().out
    assert [step["step"] for step in json.loads(Path("report.json").read_text())["steps"]] == [0, 2, 4]
    assert padiff.open_run("padiff-replay").finished()


def test_a_diff_exits_with_1(run, capsys):
    assert main(["replay", run, "port_of_vit:faulty", "--steps", "2-4", "--dir", "again"]) == 1
    assert "DIFFER  step 2" in capsys.readouterr().out
    assert main(["replay", run, "port_of_vit:port", "--steps", "2", "--dir", "again"]) == 2
    assert "existing='overwrite'" in capsys.readouterr().err
    assert main(["replay", run, "port_of_vit:port", "--steps", "2", "--dir", "again", "--overwrite"]) == 0


def test_floors_and_float64(run, capsys):
    arguments = ["replay", run, "port_of_vit:port", "--steps", "2", "--dir", "floors", "--floors", "3", "--float64"]
    assert main([*arguments, "--json", "r.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "have a measured floor" in out and "float64 (candidate's code)" in out
    assert padiff.open_run("floors").steps(2)[0].floors.runs == 3
    diffs = json.loads(Path("r.json").read_text())["steps"][0]["diffs"]
    assert any(diff.get("floors", 0) > 0 and diff["grade"] == "noise" for diff in diffs)


def test_what_does_not_run_in_float64_is_said(run, capsys):
    arguments = ["replay", run, "port_of_vit:narrow", "--steps", "2", "--dir", "n", "--floors", "2", "--float64"]
    assert main(arguments) == 0
    assert "not run in float64: AssertionError: no float64 here" in capsys.readouterr().err
    floors = padiff.open_run("n").steps(2)[0].floors
    assert floors.runs == 2 and not floors.exact


def test_calibrate(run, capsys):
    shutil.copytree(run, "torch")
    assert main(["calibrate", "torch", "port_of_vit:torch_port", "--steps", "2-4", "--runs", "2", "--no-float64"]) == 0
    assert "step 4: floors of" in capsys.readouterr().out
    assert main(["replay", "torch", "port_of_vit:port", "--steps", "2", "--dir", "again"]) == 0
    assert "have a measured floor" in " ".join(capsys.readouterr().out.split())
    assert main(["calibrate", "torch", "port_of_vit:port"]) == 2
    assert "the model is of paddle" in capsys.readouterr().err


def test_resync(run, tmp_path, capsys):
    folder = tmp_path / "every"
    train(Torch, folder, steps=3, packs=1)
    arguments = ["resync", str(folder), "port_of_vit:scheduled", "--steps", "2", "--step", "1", "--json", "r.json"]
    assert main(arguments) == 0
    assert "The learning rate keeps the runs together" in capsys.readouterr().out
    assert json.loads(Path("r.json").read_text())["helping"] == ["rate"]
    assert main(["resync", run, "port_of_vit:port"]) == 2
    assert "has no pack of step 1, and a resync from step 0 on needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["port_of_vit:poort"], "has no function 'poort'"),
        (["port_of_vit:number"], "has no function 'number'"),
        (["port_of_vit"], "expected MODULE:FUNCTION"),
        (["nowhere:port"], "nowhere can't be imported: ModuleNotFoundError"),
        (["nowhere.py:port"], "there is no file nowhere.py"),
        (["port_of_vit:wrong"], "it has to return (model, optimizer, step)"),
        (["port_of_vit:failing"], "the step function failed at step 0: ZeroDivisionError"),
        (["port_of_vit:broken"], "failed: OSError: no data here"),
        (["port_of_vit:port", "--steps", "1"], "no pack of the steps asked for: packed are 0, 2, 4"),
        (["port_of_vit:port", "--steps", "x"], "takes numbers and ranges"),
        (["port_of_vit:port", "--json", "-", "--junit", "-"], "only one of"),
    ],
)
def test_misuse_exits_with_2(run, capsys, arguments, said):
    assert main(["replay", run, *arguments]) == 2
    assert said in capsys.readouterr().err

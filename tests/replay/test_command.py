"""``padiff replay RUN MODULE:FUNCTION``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import padiff
from padiff_hooks.cli import main
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
    assert "The runs match" in capsys.readouterr().out
    assert [step["step"] for step in json.loads(Path("report.json").read_text())["steps"]] == [0, 2, 4]
    assert padiff.open_run("padiff-replay").finished()


def test_a_diff_exits_with_1(run, capsys):
    assert main(["replay", run, "port_of_vit:faulty", "--steps", "2-4", "--dir", "again"]) == 1
    assert "The runs part at step 2" in capsys.readouterr().out
    assert main(["replay", run, "port_of_vit:port", "--steps", "2", "--dir", "again"]) == 2
    assert "existing='overwrite'" in capsys.readouterr().err
    assert main(["replay", run, "port_of_vit:port", "--steps", "2", "--dir", "again", "--overwrite"]) == 0


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

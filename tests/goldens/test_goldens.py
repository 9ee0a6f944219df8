"""`padiff golden` on a training that somebody changes: what is equal, a drift or a fault, and what is blessed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from kit.forking import interpreter

import padiff.golden.sorting
from padiff.dump import open_run
from padiff.errors import RunFolderError
from padiff.golden.folder import MOST_BYTES, read_golden, size_of_folder
from padiff_cli.main import main

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAINING = """
import os
import torch
from torch import nn

torch.manual_seed(0)
width = int(os.environ.get("WIDTH", "32"))
net = nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU())
net.extend(nn.Linear(width, width) for _ in range(int(os.environ.get("DEPTH", "1"))))
net.append(nn.Linear(width, 4))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scale, halves = float(os.environ.get("SCALE", "1")), "HALVES" in os.environ
if halves:  # as another version may add
    plain = nn.functional.linear
    nn.functional.linear = lambda x, w, b=None: plain(x[..., ::2], w[:, ::2]) + plain(x[..., 1::2], w[:, 1::2]) + b
if "DROPOUT" in os.environ:
    net.append(nn.Dropout(0.2))
model = torch.compile(net, backend=os.environ["COMPILED"]) if os.environ.get("COMPILED") else net
for _ in range(4):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    loss = nn.functional.cross_entropy(model(x) * scale, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    for name in ("SCALE", "HALVES", "WIDTH", "DEPTH", "COMPILED", "DROPOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", str(interpreter()))
    Path("train.py").write_text(TRAINING)


def golden(*words, command=("train.py",)):
    return main(["golden", *map(str, words), "--", sys.executable, *command])


def checked(*words):
    code = golden("check", "goldens", "--json", "out.json", *words)
    return code, json.loads(Path("out.json").read_text())["goldens"]


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_equal_drift_and_fault_are_told_apart_and_only_a_drift_is_blessed(monkeypatch, capsys):
    assert golden("record", "goldens/net", "--runs", 2) == 0
    assert size_of_folder(Path("goldens/net")) <= MOST_BYTES
    code, (result,) = checked("--bless")
    assert (code, result["sort"], result["blessed"]) == (0, "equal", False)
    before = content_of("goldens")

    monkeypatch.setenv("SCALE", "1.0001")
    capsys.readouterr()
    code, (result,) = checked("--bless")
    text = capsys.readouterr().out
    assert (code, result["sort"], result["blessed"]) == (1, "fault", False)
    assert result["diagnostic"] is not None and 1 < result["largest"]["share_of_limit"] < 1e4
    assert "FAULT  net" in text and "first beyond" in text
    assert content_of("goldens") == before
    monkeypatch.delenv("SCALE")

    monkeypatch.setenv("HALVES", "1")
    code, (result,) = checked()
    text = capsys.readouterr().out
    assert (code, result["sort"]) == (4, "drift")
    assert result["first"]["site"].startswith("0/forward/") and result["first"]["step"] == 0
    assert 0 < result["first"]["units"] < 50
    assert "nothing that is known of the environment" in text
    assert content_of("goldens") == before

    code, (result,) = checked("--bless")
    assert (code, result["blessed"], result["proof"]) == (0, True, "goldens/net/proof.json")
    proof = json.loads(Path("goldens/net/proof.json").read_text())
    assert proof["marks"] == {"old": result["mark"]["golden"], "new": result["mark"]["now"]}
    assert proof["environments"]["old"]["framework.version"] == proof["environments"]["new"]["framework.version"]
    sites = [(each["step"], each["site"]) for each in proof["tensors"]]
    assert len(sites) == len(set(sites))
    assert proof["tensors"] and all(each["share_of_limit"] <= 1 for each in proof["tensors"])
    assert all(each["errors"]["l2"] <= each["limits"]["l2"] for each in proof["tensors"])
    assert read_golden(Path("goldens/net")).mark == proof["marks"]["new"]
    code, (result,) = checked()
    assert (code, result["sort"]) == (0, "equal")
    assert [path.name for path in Path("goldens").iterdir()] == ["net"]  # nothing else is left


def test_tensors_that_the_new_run_has_not_recorded_are_said(monkeypatch, capsys):
    assert golden("record", "goldens/net", "--runs", 1) == 0
    monkeypatch.setenv("COMPILED", "eager")
    capsys.readouterr()
    code, (result,) = checked("--bless")
    text = capsys.readouterr().out
    assert (code, result["sort"], result["first"]) == (0, "drift", None)
    assert "first to move  nothing" in text and "in another order" not in text
    assert result["not_compared"] and f"has not recorded {result['not_compared'][0]}" in text
    assert json.loads(Path(result["proof"]).read_text())["not_compared"] == result["not_compared"]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_dropout_of_compiled_code_is_no_fault_and_hides_none(monkeypatch, capsys):
    monkeypatch.setenv("DROPOUT", "1")
    assert golden("record", "goldens/net", "--runs", 2) == 0
    monkeypatch.setenv("COMPILED", "inductor")
    code, (result,) = checked()
    assert (code, result["sort"], result["draws_as_eager"]) == (4, "drift", True)
    assert "this run drew those of eager code" in capsys.readouterr().out
    assert main(["golden", "check", "goldens", "--bless", "--", sys.executable, "train.py"]) == 2
    assert "draws the random numbers of eager code" in capsys.readouterr().err
    monkeypatch.setenv("SCALE", "1.0001")
    code, (result,) = checked()
    assert (code, result["sort"], result["draws_as_eager"]) == (1, "fault", True)
    assert result["largest"]["share_of_limit"] < 1e4


def test_the_old_golden_stays_if_blessing_fails_and_comes_back_if_it_was_cut_off(monkeypatch, capsys):
    assert golden("record", "goldens/net", "--runs", 1) == 0
    before = content_of("goldens")
    monkeypatch.setenv("HALVES", "1")

    def fail(*_):
        raise OSError("no space left on device")

    for name in ("write_json", "swap"):
        with monkeypatch.context() as patch:
            patch.setattr(padiff.golden.sorting, name, fail)
            assert golden("check", "goldens", "--bless") == 2
        assert "no space left" in capsys.readouterr().err
        assert content_of("goldens") == before

    os.rename("goldens/net", "goldens/.net.123.old")  # cut off between the two renames
    for other in (".config.7.old", "goldens/.config.7.old"):  # somebody else's
        Path(other).mkdir()
    monkeypatch.delenv("HALVES")
    assert golden("check", "goldens") == 0
    assert content_of("goldens") == before
    assert Path(".config.7.old").is_dir() and Path("goldens/.config.7.old").is_dir()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("weight_decay=0.01", "weight_decay=0.0100001", "DIFFER"),
        ("tensor(0.01)", "tensor(0.01)", ""),
        ("leaky_relu(self.a(x), 0.01)", "leaky_relu(self.a(x), 0.01000001)", "negative_slope 0.01000001, it was 0.01"),
    ],
)
def test_a_setting_that_changes_less_than_rounding_is_a_fault(monkeypatch, capsys, old, new, said):
    script = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.b(nn.functional.leaky_relu(self.a(x), 0.01))
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01)
for _ in range(2):
    loss = (net(torch.randn(8, 6)).square() + torch.tensor(0.01)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    Path("train.py").write_text(script)
    assert old in script
    assert golden("record", "goldens/net", "--runs", 1) == 0
    Path("train.py").write_text(script.replace(old, new))
    assert checked()[0] == (1 if said else 0)
    assert said in capsys.readouterr().out


def test_a_golden_of_a_larger_model_stays_small_and_sorts_the_same(monkeypatch, capsys):
    monkeypatch.setenv("DEPTH", "60")
    assert golden("record", "goldens/net", "--runs", 2) == 0
    assert "left out" in capsys.readouterr().out
    assert size_of_folder(Path("goldens/net")) <= MOST_BYTES
    assert read_golden(Path("goldens/net")).left_out
    assert checked()[1][0]["sort"] == "equal"
    monkeypatch.setenv("HALVES", "1")
    assert checked()[1][0]["sort"] == "drift"
    monkeypatch.delenv("HALVES")
    monkeypatch.setenv("SCALE", "1.0001")
    code, (result,) = checked()
    assert (code, result["sort"]) == (1, "fault") and result["left_out"]


def test_each_golden_of_a_folder_can_have_its_own_command(monkeypatch, capsys):
    Path("other.py").write_text(TRAINING.replace("Adam(", "AdamW("))
    for name in ("train", "other"):
        assert golden("record", f"goldens/{name}", "--runs", 1, "--steps", 1, command=("{golden}.py",)) == 0
    assert golden("check", "goldens", command=("{golden}.py",)) == 0
    assert golden("check", "goldens/other", command=("train.py",)) == 1


def test_what_is_misuse_is_said_and_nothing_from_a_golden_is_run(capsys):
    def refused(text, *words, command=("train.py",)):
        assert golden(*words, command=command) == 2
        assert text in capsys.readouterr().err

    Path("goldens").mkdir()
    Path("kept").mkdir()
    Path("kept/notes.txt").write_text("")
    refused("holds no golden run", "check", "goldens")
    refused("the name becomes a folder's", "record", "goldens/.net")
    refused("exists and is no golden run", "record", "kept")
    refused("numbers of at least 1", "record", "goldens/net", "--steps", "-1")
    refused("--bless is for padiff golden check", "record", "goldens/net", "--bless")
    refused("recorded 0 of 2 steps", "record", "goldens/net", command=("-c", "print('nothing trains')"))
    assert not Path("goldens/net").exists()
    assert main(["golden", "check", "goldens"]) == 2
    assert "how is the training run?" in capsys.readouterr().err

    assert golden("record", "goldens/net", "--runs", 1, "--steps", 1) == 0
    refused("holds a golden run", "record", "goldens/net")
    refused("--steps and --runs are for padiff golden record", "check", "goldens", "--steps", "1")
    shutil.copytree("goldens/net", "goldens/x; touch spoiled")
    refused("the name becomes a folder's", "check", "goldens")
    assert not Path("spoiled").exists()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("golden.json", lambda text: text.replace(b"float32", b"float33")),
        ("golden.json", lambda text: b"[]"),
        ("golden.json", lambda text: b"{"),
        ("noise.safetensors", lambda text: text[:-40]),
        ("noise.safetensors", lambda text: text.replace(b"0/errors", b"9/errors")),
    ],
)
def test_a_golden_of_a_stranger_is_refused_where_it_is_damaged(recorded, file, change):
    path = recorded / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RunFolderError):
        read_golden(recorded)


@pytest.fixture
def recorded(tmp_path):
    assert golden("record", "goldens/net", "--runs", 1, "--steps", 1) == 0
    return tmp_path / "goldens" / "net"


def test_another_number_of_steps_is_a_fault_and_a_golden_is_a_run(recorded, capsys):
    assert open_run(recorded).numbers() == [0]
    Path("train.py").write_text(TRAINING.replace("range(4)", "range(0)"))
    assert golden("check", "goldens") == 2  # nothing was recorded
    assert "recorded 0 of 1 steps" in capsys.readouterr().err

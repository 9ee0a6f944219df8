"""`padiff fix` inserts what the candidate lacks, where no line of the reference says how the candidate writes it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from hard.children import run_padiff

from padiff_cli.mcp.tools import Tools

pytestmark = pytest.mark.slow

REFERENCE = """
import math
import torch
from torch import nn
import torch.nn.functional as F


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.b = nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.b(torch.tanh(self.norm(self.a(x)))) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = Mix()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(8)).softmax(-1)
        y = self.mix(weights @ x)
        return self.head(y), y.mean(-1)


def focal(z, t):
    p = z.sigmoid()
    near = torch.where(t > 0, p, 1 - p)
    return -((1 - near) ** 2.5 * near.log()).mean()


torch.manual_seed(0)
net = Net()
for p in net.parameters():
    if p.ndim < 2:
        p.data.add_(0.3)
flat = [p for p in net.parameters() if p.ndim < 2]
deep = [p for p in net.parameters() if p.ndim > 1]
opt = torch.optim.AdamW([{"params": deep}, {"params": flat, "weight_decay": 0.0}], lr=0.01, weight_decay=0.2)
for step in range(4):
    for part in range(3):
        x = torch.randn(5, 4, 8)
        z, side = net(x)
        target = (x[..., :3] > 0).float()
        loss = focal(z, target) + F.mse_loss(z.mean(-1), side.detach())
        (loss / 3).backward()
    opt.step()
    opt.zero_grad()
"""
CANDIDATE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

PARTS = 3


def attend(query, key, value):
    scores = torch.matmul(query, key.mT) * query.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1).matmul(value)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.ln = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)

    def forward(self, inputs):
        shortcut = inputs
        out = self.first(inputs)
        out = self.ln(out)
        out = torch.tanh(out)
        out = self.second(out)
        out = out + shortcut
        out = F.relu(out)
        return out


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.block = Block(width)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        hidden = self.block(attend(self.query(x), self.key(x), x))
        return self.out(hidden), hidden.mean(-1)


class Focal(nn.Module):
    def __init__(self, gamma=2.5):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, labels):
        p = logits.sigmoid()
        near = torch.where(labels > 0, p, 1 - p)
        return -((1 - near) ** self.gamma * near.log()).mean()


def agree(first, second):
    second = second.detach()
    return F.mse_loss(first, second)


def main():
    torch.manual_seed(0)
    model = Model()
    for p in model.parameters():
        if p.ndim < 2:
            p.data.add_(0.3)
    criterion = Focal()
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    groups.append({"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)
    for step in range(4):
        for part in range(PARTS):
            x = torch.randn(5, 4, 8)
            logits, side = model(x)
            loss = criterion(logits, (x[..., :3] > 0).float()) + agree(logits.mean(-1), side)
            loss = loss / PARTS
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
"""
GROUPS = """    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    groups.append({"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr"""
FAULTS = {
    "residual": ("        out = out + shortcut\n", "", "shortcut"),
    "scale": (" * query.shape[-1] ** -0.5", "", "torch.matmul(query, key.mT) * query.shape[-1] ** -0.5"),
    "exponent": ("** -0.5", "** -1.0", "query.shape[-1] ** -0.5"),
    "norm": ("        out = self.ln(out)\n", "", "self.ln("),
    "number": ("gamma=2.5", "gamma=2.0", "gamma=2.5"),
    "detach": ("    second = second.detach()\n", "", "F.mse_loss(first, second.detach())"),
    "divisor": ("            loss = loss / PARTS\n", "", "(loss / PARTS).backward()"),
    "groups": (
        GROUPS,
        "    optimizer = torch.optim.AdamW(model.parameters(), lr",
        '[{"params": [p for n, p in model.named_parameters() if not p.ndim < 2]}, '
        '{"params": [p for n, p in model.named_parameters() if p.ndim < 2], "weight_decay": 0.0}]',
    ),
}


def padiff(folder: Path, *words: str):
    done = run_padiff(folder, *words, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done


def recorded(folder: Path, name: str, code: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(code)
    padiff(folder, "run", "--dir", f"runs/{name}", "train.py")
    return folder


def fixed(folder: Path, reference: Path, code: str) -> dict:
    """Record a candidate, fix it, and return the result as `--json` gives it."""
    shutil.copytree(reference / "runs", folder / "runs")
    recorded(folder, "candidate", code)
    return json.loads(padiff(folder, "fix", "runs/reference", "runs/candidate", "--json", "-", "--", "train.py").stdout)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("reference"), "reference", REFERENCE)


def test_the_candidate_without_a_fault_matches(tmp_path, reference):
    shutil.copytree(reference / "runs", tmp_path / "runs")
    recorded(tmp_path, "candidate", CANDIDATE)
    assert padiff(tmp_path, "compare", "runs/reference", "runs/candidate").returncode == 0


def test_a_norm_that_the_candidate_does_not_have_is_made_and_called(tmp_path, reference):
    code = CANDIDATE
    for line in ("        self.ln = nn.LayerNorm(width)\n", "        out = self.ln(out)\n"):
        assert code.count(line) == 1
        code = code.replace(line, "")
    result = fixed(tmp_path, reference, code)
    assert result["outcome"] == "match", result
    added = [line for line in result["patch"].splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added[0].strip("+ ") == "self.norm = nn.LayerNorm(width)"
    assert len(added) == 2
    assert "self.norm(" in added[1]


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_candidate_lacks_is_inserted(tmp_path, reference, name):
    before, after, expected = FAULTS[name]
    assert CANDIDATE.count(before) == 1
    result = fixed(tmp_path, reference, CANDIDATE.replace(before, after))
    assert result["outcome"] == "match", result
    added = [line for line in result["patch"].splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(added) == 1
    assert expected in added[0]


TRAINER = """
import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


random = np.random.RandomState(0)
data = TensorDataset(torch.tensor(random.randn(24, 6), dtype=torch.float32), torch.tensor(random.randint(0, 3, 24)))
pl.seed_everything(0)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
trainer.fit(Lit(), DataLoader(data, batch_size=8))
"""


def test_an_argument_of_a_trainer_is_changed(tmp_path):
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("Lightning is not installed")
    origin = recorded(tmp_path / "origin", "reference", TRAINER)
    folder = tmp_path / "work"
    folder.mkdir()
    result = fixed(folder, origin, TRAINER.replace('="norm"', '="value"'))
    assert result["outcome"] == "match", result
    assert (
        '+                     enable_progress_bar=False, gradient_clip_val=0.1, gradient_clip_algorithm="norm")'
        in (result["patch"])
    )


AVERAGE = """
import copy
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
mean = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(4):
    x = torch.randn(5, 6)
    loss = nn.functional.mse_loss(net(x), mean(x) + 0.3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for own, new in zip(mean.parameters(), net.parameters()):
            own.mul_(0.97).add_(0.03 * new)
"""


def test_a_number_that_only_the_reference_has_is_found(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "reference.py").write_text(AVERAGE)
    padiff(folder, "run", "--dir", "runs/reference", "reference.py")
    own = "def averaged(mean, net, decay=0.9):\n    for own, new in zip(mean.parameters(), net.parameters()):\n"
    own += "        own.lerp_(new, 1 - decay)\n\n"
    head, _, _ = AVERAGE.partition("        for own, new")
    (folder / "train.py").write_text(own + head + "        averaged(mean, net)\n")
    padiff(folder, "run", "--dir", "runs/candidate", "train.py")
    done = padiff(folder, "fix", "runs/reference", "runs/candidate", "--json", "-", "--", "train.py")
    result = json.loads(done.stdout)
    assert result["outcome"] == "match", result
    assert "+def averaged(mean, net, decay=0.97):" in result["patch"]


PICTURES = """
import torch
from torch import nn

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.4]


def prepared(x):
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    x = torch.rand(4, 3, 8, 8)
    loss = net(prepared(x)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("[0.5, 0.4, 0.3]", "[0.3, 0.4, 0.5]", "+MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.4]"),
        ("net(prepared(x))", "net(prepared(x).flip(1))", "+    loss = net(prepared(x)).square()"),
    ],
)
def test_the_preparation_of_the_input_is_fixed(tmp_path, before, after, expected):
    origin = recorded(tmp_path / "origin", "reference", PICTURES)
    folder = tmp_path / "work"
    folder.mkdir()
    assert PICTURES.count(before) == 1
    result = fixed(folder, origin, PICTURES.replace(before, after))
    assert result["outcome"] == "match", result
    assert expected in result["patch"]


LOOP = """
import copy
from functools import partial

import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, make_norm=None):
        super().__init__()
        make_norm = make_norm or partial(nn.LayerNorm, eps=1e-2)
        self.stem, self.norm = nn.Linear(6, 8), make_norm(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.probe = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def groups_of(net, rate):
    groups = [{"params": [*net.stem.parameters(), *net.norm.parameters()], "lr": rate}]
    for k, block in enumerate(net.blocks):
        groups.append({"params": list(block.parameters()), "lr": rate * 0.5 ** (k + 1)})
    return groups


def average(mean, net, decay=0.9):
    with torch.no_grad():
        for own, new in zip(mean.parameters(), net.parameters()):
            own.mul_(decay).add_(new, alpha=1 - decay)


torch.manual_seed(0)
net = Net()
mean = copy.deepcopy(net).requires_grad_(False)
both = nn.ModuleDict({"net": net, "mean": mean})
optimizer = torch.optim.SGD(groups_of(net, 0.1))
probe_optimizer = torch.optim.SGD(net.probe.parameters(), lr=0.1)
for step in range(4):
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    features = net(x)
    loss = F.mse_loss(features, mean(x) + 0.3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average(mean, net)
    error = F.cross_entropy(net.probe(features.detach()), y)
    probe_optimizer.zero_grad()
    error.backward()
    probe_optimizer.step()
"""
LOOP_FAULTS = {
    "an optimizer never steps": (
        "    error.backward()\n    probe_optimizer.step()\n", "    error.backward()\n", "error.backward()",
        ["    probe_optimizer.step()"],
    ),
    "an average before the step": (
        "    optimizer.step()\n    average(mean, net)\n", "    average(mean, net)\n    optimizer.step()\n",
        "average(mean, net)", ["    optimizer.step()"],
    ),
    "the rate of a group": (
        "0.5 ** (k + 1)", "0.5 ** k", 'groups.append({"params": list(block.parameters()), "lr": rate * 0.5 ** k})',
        ['        groups.append({"params": list(block.parameters()), "lr": rate * 0.5 ** (k + 1)})'],
    ),
    "a class that is chosen": (
        "partial(nn.LayerNorm, eps=1e-2)", "nn.LayerNorm", "make_norm = make_norm or nn.LayerNorm",
        ["        make_norm = make_norm or partial(nn.LayerNorm, eps=0.01)"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("loop"), "reference", LOOP)


@pytest.mark.parametrize("name", LOOP_FAULTS)
def test_a_fault_of_a_loop_is_shown_and_fixed_where_it_is(tmp_path, loop, name):
    before, after, line, added = LOOP_FAULTS[name]
    assert LOOP.count(before) == 1
    result = fixed(tmp_path, loop, LOOP.replace(before, after))
    brief = json.loads(padiff(tmp_path, "compare", "runs/reference", "runs/candidate", "--brief").stdout)
    assert brief["places"]["candidate"]["code"] == line
    assert result["outcome"] == "match", result
    new = [each[1:] for each in result["patch"].splitlines() if each.startswith("+") and not each.startswith("+++")]
    assert new == added
    code = (brief["fix"] or {}).get("new")
    if brief["cause"]["proven"] and code:
        paths = {name: str(tmp_path / "runs" / name) for name in ("reference", "candidate")}
        with Tools([str(tmp_path)]) as tools:
            edit = code.partition('"lr": ')[2] or code
            (share,) = json.loads(tools.call("what_if", {**paths, "edit": edit}))["computed"]
        assert share["share"] == 1.0 and share["proven"]

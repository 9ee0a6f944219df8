"""The candidate's line that a verdict shows, for faults that are away from where they show."""

from __future__ import annotations

import subprocess

import pytest
from kit.forking import python_with_frameworks

import padiff
from padiff.records import Both
from padiff.records.diagnostic import diagnostic_of

PROGRAM = """
import padiff, torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(16, 3)
        self.scale = 16 ** -0.25
        for layer in (self.a, self.b, self.c):
            nn.init.normal_(layer.weight, std=0.5)

    def forward(self, x):
        x = self.a(x) * 0.5
        x = torch.tanh(x + 1)
        x = F.interpolate(F.relu(self.b(x)).unsqueeze(1), scale_factor=2).squeeze(1)
        return self.c(x * self.scale)

class Focal(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, out, y):
        ce = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-ce)) ** self.gamma * ce).mean()

class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, x):
        return (x - self.mean) / self.std

class Data(torch.utils.data.Dataset):
    def __init__(self, transform):
        g = torch.Generator().manual_seed(3)
        self.x, self.y = torch.rand(24, 6, generator=g), torch.randint(0, 3, (24,), generator=g)
        self.transform = transform

    def __len__(self):
        return 24

    def __getitem__(self, k):
        return self.transform(self.x[k]), self.y[k]

def groups(net, decay):
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]

torch.manual_seed(0)
net = Net()
criterion = Focal(2.0)
opt = AdamW(groups(net, 0.1), lr=0.01)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 4))
loader = torch.utils.data.DataLoader(Data(Normalize(0.5, 0.25)), batch_size=8)
with padiff.record(net, "RUN", optimizer=opt) as rec:
    for x, y in loader:
        loss = criterion(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        warm.step()
        rec.try_dump()
"""
TWO = """
import padiff, torch
from torch import nn
from torch.optim import Adam

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

torch.manual_seed(0)
net = Both()
opt_second = Adam(net.second.parameters(), lr=0.01, betas=(0.5, 0.999))
opt_first = Adam(net.first.parameters(), lr=0.01, betas=(0.5, 0.999))
with padiff.record(net, "RUN", optimizer=[opt_first, opt_second]) as rec:
    for x in torch.randn(3, 8, 4):
        net.second(net.first(x)).square().mean().backward()
        opt_first.step()
        opt_second.step()
        opt_first.zero_grad()
        opt_second.zero_grad()
        rec.try_dump()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The fault of a program, by its text before and after."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("lines")
    python = python_with_frameworks()

    def recorded(name, source):
        run = folder / f"run_{name}"
        if not run.exists():
            (folder / f"{name}.py").write_text(source.replace("RUN", run.name))
            command = [*python, f"{name}.py"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
        return run

    def fault(program, before, after):
        assert before in program
        number = {PROGRAM: "program", TWO: "two"}.get(program, "hand")
        runs = (
            recorded(number, program),
            recorded(f"{number}_{abs(hash((before, after)))}", program.replace(before, after)),
        )
        report = padiff.compare_runs(*runs)
        return diagnostic_of(report, Both(*map(str, runs)))

    return fault


@pytest.mark.parametrize(
    ("before", "after", "code", "fix"),
    [
        ("self.a(x) * 0.5", "self.a(x)", "x = self.a(x)", "x = self.a(x) * 0.5"),
        ("16 ** -0.25", "(16 // 4) ** -0.25", "self.scale = (16 // 4) ** -0.25", "self.scale = 16 ** -0.25"),
        ("F.relu(self.b(x))", "F.gelu(self.b(x))", "F.gelu(self.b(x))", "F.relu(self.b(x))"),
        ("Focal(2.0)", "Focal(1.5)", "criterion = Focal(1.5)", "criterion = Focal(2.0)"),
        (", 0.25)", ", 0.2)", "Normalize(0.5, 0.2)", "Normalize(0.5, 0.25)"),
        ("self.x[k])", "self.x[k] + 1)", "self.transform(self.x[k] + 1)", "return self.transform(self.x[k]), "),
        ('"weight_decay": 0.0', '"weight_decay": 0.1', '"weight_decay": 0.1},', '"weight_decay": 0.0'),
        ("/ 4))", "/ 8))", "LambdaLR(", "(step + 1) / 4))"),
        ("std=0.5", "std=0.4", "net = Net()", ""),
        ("        nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n", "", "opt.step()", "clip_grad_norm_"),
    ],
)
def test_the_line_of_a_fault_is_shown(found, before, after, code, fix):
    fault = found(PROGRAM, before, after)
    assert code in fault.places.candidate.code
    assert fix in ("" if fault.fix is None else fault.fix.text)


def test_the_optimizer_of_the_parameters_is_shown(found):
    line = "opt_first = Adam(net.first.parameters(), lr=0.01, betas=(0.5, 0.999))"
    fault = found(TWO, line, line.replace("0.5", "0.9"))
    assert fault.places.candidate.code == line.replace("0.5", "0.9")
    assert fault.places.reference.code == line


HAND = """
import padiff, torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

warmup, accumulate, beta2 = 4, 2, None
beta2 = 0.95


class LayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.gain * x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)


def table(width, theta=100.0):
    rates = theta ** (torch.arange(width) / width)
    return torch.cos(1 / rates), torch.sin(1 / rates)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, width), LayerNorm(width), nn.Linear(width, 3)
        cos, sin = table(width)
        self.register_buffer("cos", cos, persistent=False)

    def forward(self, x):
        return self.down(self.norm(self.up(x) * self.cos))

    def optimizer(self, rate, betas):
        return AdamW(self.parameters(), lr=rate, betas=betas)


def rate_at(step):
    if step < warmup:
        return 0.01 * step / warmup
    return 0.01


torch.manual_seed(0)
net = Net()
opt = net.optimizer(0.01, (0.9, beta2))
scaler = torch.amp.GradScaler("cpu", enabled=False)
with padiff.record(net, "RUN", optimizer=opt) as rec:
    for step in range(5):
        rate = rate_at(step) if warmup else 0.01
        for group in opt.param_groups:
            group["lr"] = rate
        for _ in range(accumulate):
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            loss = F.cross_entropy(net(x), y)
            loss = loss / accumulate
            scaler.scale(loss).backward()
        scaler.step(opt)
        opt.zero_grad()
        rec.try_dump()
"""


@pytest.mark.parametrize(
    ("before", "after", "code", "fix"),
    [
        ("beta2 = 0.95", "beta2 = 0.99", "beta2 = 0.99", "beta2 = 0.95"),
        ("0.01 * step / warmup", "0.01 * (step + 1) / warmup", "(step + 1) / warmup", "return 0.01 * step / warmup"),
        ("loss = loss / accumulate", "loss = loss", "loss = loss", ""),
        ("        opt.zero_grad()\n", "", "scaler.step(opt)", "opt"),
        ("theta=100.0", "theta=50.0", "def table(width, theta=50.0):", ""),
        ("eps=1e-5", "eps=1e-2", "def __init__(self, width, eps=1e-2):", "def __init__(self, width, eps=1e-5):"),
    ],
)
def test_the_line_of_code_that_a_framework_does_not_call_is_shown(found, before, after, code, fix):
    fault = found(HAND, before, after)
    assert code in fault.places.candidate.code
    assert fix in ("" if fault.fix is None else fault.fix.text)

"""The candidate's line that a verdict shows, for faults that are away from where they show."""

from __future__ import annotations

import subprocess

import pytest
from kit.forking import python_with_frameworks

import padiff
from padiff.records import Both, Cause, FirstDiff
from padiff.records.diagnostic import brief_fault, diagnostic_of
from padiff.records.report_data import Models
from padiff.system.frames import Frame

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

    def fault(program, before, after, port=""):
        numbers = {PROGRAM: "program", TWO: "two", TORCH: "torch", HAND: "hand", GAN: "gan"}
        number = numbers.get(program, f"other_{abs(hash(program))}")
        reference = recorded(number, program)
        changed = (port or program).replace("REFERENCE", reference.name)
        assert before in changed
        runs = reference, recorded(f"{number}_{abs(hash((before, after)))}", changed.replace(before, after))
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
        ("std=0.5", "std=0.4", "nn.init.normal_(layer.weight, std=0.4)", "std=0.5"),
        ("torch.manual_seed(0)", "torch.manual_seed(1)", "net = Net()", ""),
        ("        nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n", "", "opt.step()", "clip_grad_norm_"),
        (", lr=0.01)", ",\n  lr=0.01,  # (a remark\n  betas=(0.9, 0.99),\n)", "betas=(0.9, 0.99),", "0.999"),
        (
            ".unsqueeze(1), scale_factor=2)",
            ".unsqueeze(1),\n  scale_factor=2,\n  mode='linear',\n)",
            "mode='linear',",
            "",
        ),
        (
            "opt = AdamW(groups(net, 0.1), lr=0.01)",
            "DECAY = 0.1\nopt = AdamW(net.parameters(), lr=0.01, weight_decay=DECAY)",
            "weight_decay=DECAY)",
            "weight_decay",
        ),
        ("(step + 1) / 4))", "step / 4))", "step / 4))", "(step + 1) / 4))"),
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


GAN = """
import padiff, torch
from torch import nn

class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.disc = nn.Linear(3, 4), nn.Linear(4, 1)

torch.manual_seed(0)
gan, bce = Gan(), nn.BCEWithLogitsLoss()
opt = torch.optim.SGD(gan.parameters(), lr=0.1)
with padiff.record(gan, "RUN", optimizer=opt) as rec:
    for z, data in torch.randn(3, 2, 8, 4):
        opt.zero_grad()
        fake = gan.gen(z[:, :3])
        real, made = gan.disc(data), gan.disc(fake.detach())
        loss = bce(real, torch.full_like(real, 0.9)) + bce(made, torch.zeros_like(made))
        loss.backward(retain_graph=True)
        out = gan.disc(fake)
        bce(out, torch.ones_like(out)).backward()
        opt.step()
        rec.try_dump()
"""


@pytest.mark.parametrize(
    ("before", "after", "code", "fix"),
    [
        ("torch.full_like(real, 0.9)", "torch.ones_like(real)", "torch.ones_like(real)", "torch.full_like(real, 0.9)"),
        ("fake.detach()", "fake", "gan.disc(data), gan.disc(fake)", "gan.disc(fake.detach())"),
    ],
)
def test_the_call_of_one_of_several_losses_is_shown(found, before, after, code, fix):
    fault = found(GAN, before, after)
    assert code in fault.places.candidate.code
    assert fix in fault.fix.text


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
        ("LayerNorm(width)", "LayerNorm(width, eps=1e-2)", "LayerNorm(width, eps=1e-2)", "eps=1e-05"),
        ("torch.ones(width)", "torch.full((width,), 0.5)", "self.gain, self.eps", "torch.ones(width)"),
        ("theta=100.0", "theta=50.0", "def table(width, theta=50.0):", ""),
        ("eps=1e-5", "eps=1e-2", "def __init__(self, width, eps=1e-2):", "def __init__(self, width, eps=1e-5):"),
    ],
)
def test_the_line_of_code_that_a_framework_does_not_call_is_shown(found, before, after, code, fix):
    fault = found(HAND, before, after)
    assert code in fault.places.candidate.code
    assert fix in ("" if fault.fix is None else fault.fix.text)


def test_the_one_line_that_differs_is_shown_where_the_calls_at_fault_are_alike(found):
    term = "penalty = net.up.weight.square().mean()\n            loss = loss - 2.0 * penalty\n"
    program = HAND.replace("loss = loss / accumulate\n", term)
    program = program.replace("enabled=False)", "enabled=False)\nlimit = 0.5")
    program = program.replace(
        "scaler.step(opt)", "nn.utils.clip_grad_norm_(net.parameters(), limit)\n        scaler.step(opt)"
    )
    fault = found(program, "loss - 2.0", "loss + 2.0")
    assert fault.places.candidate.code == "loss = loss + 2.0 * penalty"
    assert fault.fix.text == "loss = loss - 2.0 * penalty"
    fault = found(program, "limit = 0.5", "limit = 0.1")
    assert fault.places.candidate.code == "limit = 0.1"


TORCH = """
import math, padiff, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.1)
        self.down = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.up(x))
        d = x.shape[1]
        x = torch.softmax((x @ x.T) / math.sqrt(d // self.heads), -1) @ x
        return self.down(x)

torch.manual_seed(0)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1)
with padiff.record(net, "RUN", optimizer=opt) as rec:
    for k in range(3):
        x = torch.sin(torch.arange(48.0).reshape(8, 6) * (k + 1))
        net(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
        rec.try_dump()
"""
PADDLE = """
import math, padiff, paddle
from paddle import nn

class Net(nn.Layer):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1D(
            8,
            momentum=0.9,
        )
        self.down = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.up(x))
        d = x.shape[1]
        x = nn.functional.softmax((x @ x.T) / math.sqrt(d // self.heads), -1) @ x
        return self.down(x)

net = Net()
padiff.start_from("REFERENCE", net)
opt = paddle.optimizer.Adam(
    0.01,
    parameters=net.parameters(),
    weight_decay=paddle.regularizer.L2Decay(0.1),
)
with padiff.record(net, "RUN", optimizer=opt) as rec:
    for k in range(3):
        x = paddle.sin(paddle.arange(48.0).reshape([8, 6]) * (k + 1))
        net(x).square().sum().backward()
        opt.step()
        opt.clear_grad()
        rec.try_dump()
"""


@pytest.mark.parametrize(
    ("before", "after", "fix"),
    [
        ("(d // self.heads)", "(d)", "math.sqrt(d // self.heads)"),
        ("momentum=0.9", "momentum=0.8", "momentum=0.9,"),
        ("L2Decay(0.1)", "L2Decay(0.3)", "weight_decay=paddle.regularizer.L2Decay(0.1)"),
    ],
)
def test_the_line_of_a_fault_in_a_port_is_shown_with_the_references_part(found, before, after, fix):
    fault = found(TORCH, before, after, PADDLE)
    assert after in fault.places.candidate.code
    assert fix in fault.fix.text


TABLES = [
    text.replace("class Net", 'HP = {"momentum": 0.1}\n\nclass Net').replace(number, 'momentum=HP["momentum"]')
    for text, number in ((TORCH, "momentum=0.1"), (PADDLE, "momentum=0.9"))
]
RIGHT, WRONG = 'HP = {"momentum": 0.9}', 'HP = {"momentum": 0.1}'
TARGETS = [text.replace("net(x).square()", "(net(x) - net(x * 0.5).detach()).square()") for text in (TORCH, PADDLE)]
SCALED = [
    text.replace("class Net", "def scale(k):\n    return (k + 1) * 0.2 + 0.3\n\nclass Net").replace(
        "(k + 1))", "scale(k))"
    )
    for text in (TORCH, PADDLE)
]
SKIPPED = [text.replace("self.up(x))", "self.up(x)) * math.sqrt(2.0)") for text in (TORCH, PADDLE)]
SMOOTHED = [
    text.replace("net = Net()", "net = Net()\nloss = nn.CrossEntropyLoss(label_smoothing=0.2)").replace(
        "net(x).square().sum()", f"loss(net(x), {made}([0, 1] * 4))"
    )
    for text, made in ((TORCH, "torch.tensor"), (PADDLE, "paddle.to_tensor"))
]

LOOP = "a, b = net(x), net(x * 0.5)\n        (a - b + 0.1).exp()"
SWAPPED = [text.replace("net(x).square()", LOOP) for text in (TORCH, PADDLE)]
AXES = [
    text.replace("net(x).square()", f"net(x).mean({axis}=(1,)).exp()")
    for text, axis in ((TORCH, "dim"), (PADDLE, "axis"))
]
DROPPED = TORCH.replace(
    "return self.down(x)", "x = nn.functional.dropout(x, 0.2, self.training)\n        return self.down(x)"
)
DROPS = "dropout(x, 0.2, self.training)"


@pytest.mark.parametrize(
    ("programs", "before", "after", "code", "fix"),
    [
        (SWAPPED, "(a - b ", "(b - a ", "(b - a ", "(a - b + 0.1).exp()"),
        (AXES, "axis=(1,)", "axis=(0,)", "axis=(0,)", "axis=[1]"),
        ((TORCH, PADDLE), "square().sum()", "square().mean()", "square().mean()", "square().sum()"),
        ((DROPPED, DROPPED), DROPS, DROPS.replace("self", "not self"), "not self.training", DROPS),
        ((TABLES[0], TABLES[1].replace(WRONG, RIGHT)), RIGHT, WRONG, WRONG, RIGHT),
        (TARGETS, ".detach()", "", "net(x * 0.5)).square()", "net(x * 0.5).detach()).square()"),
        (SCALED, "* 0.2 + 0.3", "* 0.3 + 0.2", "* 0.3 + 0.2", "* 0.2 + 0.3"),
        (SKIPPED, " * math.sqrt(2.0)", "", "x = self.norm(self.up(x))", "self.norm(self.up(x)) * math.sqrt(2.0)"),
        (SMOOTHED, "label_smoothing=0.2", "", "nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(label_smoothing=0.2)"),
    ],
    ids=[
        "operands",
        "axes",
        "reduction",
        "dropout",
        "same number",
        "detach",
        "numbers exchanged",
        "scale",
        "class of a loss",
    ],
)
def test_the_line_of_a_port_is_shown_as_it_has_to_be(found, programs, before, after, code, fix):
    fault = found(programs[0], before, after, programs[1])
    assert code in fault.places.candidate.code
    assert fix in fault.fix.text


def test_the_call_that_one_of_two_optimizers_lacks_is_shown(found):
    fault = found(TWO, "        opt_second.zero_grad()\n", "")
    assert fault.places.candidate.code == "opt_second.step()"
    assert fault.places.reference.code == "opt_second.zero_grad()"
    assert (fault.fix.text.partition("  #")[0], fault.fix.new) == ("opt_second.zero_grad()", None)


MODES = """
import padiff, torch
from torch import nn

def net(width):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))

torch.manual_seed(0)
student = net(4)
teacher = net(8)
teacher.eval()
student.train()
opt = torch.optim.SGD(student.parameters(), lr=0.1)
with padiff.record(nn.ModuleDict({"student": student, "teacher": teacher}), "RUN", optimizer=opt) as rec:
    for x in torch.randn(3, 8, 4):
        with torch.no_grad():
            soft = teacher(x)
        opt.zero_grad()
        (student(x) - soft).square().mean().backward()
        opt.step()
        rec.try_dump()
"""


def test_the_mode_of_another_model_is_not_the_line_of_a_mode(found):
    diagnostic = found(MODES, "teacher.eval()\n", "\n")
    assert "mode eval against train" in diagnostic.cause.text
    assert diagnostic.places.candidate.code.startswith("return nn.Sequential(")


def test_the_line_that_chooses_the_parameters_of_a_group_is_shown(found):
    program = PROGRAM.replace("def groups", 'SPARED = ("bias",)\n\ndef groups')
    for test, condition in (("> 1", "not n.endswith(SPARED)"), ("== 1", "n.endswith(SPARED)")):
        program = program.replace(
            f"p for p in net.parameters() if p.ndim {test}", f"p for n, p in net.named_parameters() if {condition}"
        )
    fault = found(program, '("bias",)', '("scale",)')
    assert fault.places.candidate.code == 'SPARED = ("scale",)'
    assert fault.fix.text == 'SPARED = ("bias",)'


# Both write a chain of layers, one of them with a function in its midst.
CALLED = """
import padiff, torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.b(F.gelu(self.a(x), approximate="tanh"))

torch.manual_seed(0)
net = Net()
with padiff.record(net, "RUN") as rec:
    net(torch.randn(8, 4)).square().mean().backward()
    rec.try_dump()
"""
CHAINED = """
import padiff, torch
from torch import nn

def mlp(width):
    return nn.Sequential(
        nn.Linear(4, width),
        nn.GELU(),
        nn.Linear(width, 2),
    )

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(16)

    def forward(self, x):
        return self.body(x)

net = Net()
padiff.start_from("REFERENCE", net)
torch.manual_seed(0)
_ = nn.Linear(4, 16), nn.Linear(16, 2)
with padiff.record(net, "RUN") as rec:
    net(torch.randn(8, 4)).square().mean().backward()
    rec.try_dump()
"""


def test_a_function_for_a_layer_of_a_chain_is_shown_where_the_layer_is_made(found):
    fault = found(CALLED, "nn.GELU()", "nn.GELU(approximate='none')", CHAINED)
    assert fault.cause.kind == "activation" and fault.cause.proven
    assert fault.places.reference.code == 'return self.b(F.gelu(self.a(x), approximate="tanh"))'
    assert fault.places.candidate.code == "nn.GELU(approximate='none'),"


# The reference calls a function, the candidate a layer of the framework's that calls the function.
RESIZED = """
import padiff, torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 3, 3)

    def forward(self, x):
        return F.interpolate(self.a(x), scale_factor=2, mode="bilinear", align_corners=False)

torch.manual_seed(0)
net = Net()
with padiff.record(net, "RUN") as rec:
    net(torch.randn(2, 2, 6, 6)).square().mean().backward()
    rec.try_dump()
"""
UPSAMPLED = (
    RESIZED.replace("nn.Conv2d(2, 3, 3)", "nn.Conv2d(2, 3, 3)\n        self.up = UP")
    .replace('F.interpolate(self.a(x), scale_factor=2, mode="bilinear", align_corners=False)', "self.up(self.a(x))")
    .replace("UP", 'nn.Upsample(None, 2, "bilinear", True)', 1)
)


def test_an_argument_of_a_layer_of_the_framework_is_shown_where_the_layer_is_made(found):
    fault = found(RESIZED, "self.up = nn", "self.up  = nn", UPSAMPLED)
    assert "align_corners" in fault.cause.text
    assert fault.places.candidate.code == 'self.up  = nn.Upsample(None, 2, "bilinear", True)'


# The epsilon of paddle's RMSProp is inside of the root: no number there gives torch's.
ROOTED = TORCH.replace("Adam(net.parameters(), lr=0.01, weight_decay=0.1)", "RMSprop(net.parameters(), 0.01, eps=1e-3)")
# Paddle counts the ignored rows of negative labels in the mean.
LABELS = "[[0, 1, -1, 2, 1, -1, 0, 2]] * 3)[0]"
IGNORED = TORCH.replace(
    "net(x).square().sum()", f"nn.functional.cross_entropy(net(x), torch.tensor({LABELS}, ignore_index=-1)"
)
PORTS = {
    ROOTED: ("Adam(", "RMSProp(", "weight_decay=paddle.regularizer.L2Decay(0.1),", "rho=0.99, epsilon=1e-6,", ""),
    IGNORED: (
        "net(x).square().sum()",
        f"nn.functional.cross_entropy(net(x), paddle.to_tensor({LABELS}, ignore_index=-1)",
        *("", ""),
        'paddle.nn.functional.cross_entropy(..., reduction="sum") / (labels != -1).sum()',
    ),
}


@pytest.mark.parametrize("program", PORTS, ids=["rooted", "ignored"])
def test_a_line_that_changes_nothing_or_not_enough_is_no_fix(found, program):
    before, after, more, other, fix = PORTS[program]
    fault = found(program, before, after, PADDLE.replace(more, other) if more else PADDLE)
    assert fault.cause.proven, fault.cause
    assert (fault.fix.text if fault.fix is not None else "") == fix


READ = """
import padiff, torch
from torch import nn
from torch.nn import functional as F

class Config:
    base_rate = 0.1
    batch_size = 32
    rate = base_rate * batch_size / 256
    betas = [0.9, 0.95]
    norm_first = True
    share = 0.25
    heat = 3.0
    warmup = 4

ACTIVATIONS = {"relu": nn.ReLU, "gelu": lambda: nn.GELU(approximate="tanh"), "tanh": nn.Tanh}
SPEC = [
    (6, 8, "gelu"),
    (8, 8, "tanh"),
    (8, 8, "gelu"),
]

class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        parts = []
        for size, width, name in SPEC:
            parts += [nn.Linear(size, width), ACTIVATIONS[name]()]
        self.body = nn.Sequential(*parts)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=cfg.norm_first, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        z = self.norm(self.mix(self.body(x)))
        pooled = z.mean(dim=1)
        return self.head(pooled), pooled.detach()

class Loss(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heat, self.share = cfg.heat, cfg.share

    def forward(self, guess, target):
        soft = F.kl_div(
            F.log_softmax(guess / self.heat, dim=1),
            F.softmax(target / self.heat, dim=1),
            reduction="batchmean",
        ) * self.heat ** 2
        size = 1 + guess.abs().sum() / guess.shape[0]
        return soft + F.mse_loss(guess, target) + cfg.share * size

torch.manual_seed(0)
cfg = Config()
net = Net(cfg)
loss = Loss(cfg)
opt = torch.optim.Adam(net.parameters(), lr=cfg.rate, betas=tuple(cfg.betas))
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / cfg.warmup))
with padiff.record(net, "RUN", optimizer=opt) as rec:
    for x in torch.randn(3, 4, 5, 6):
        opt.zero_grad()
        guess, target = net(x)
        loss(guess, target).backward()
        opt.step()
        warm.step()
        rec.try_dump()
"""


@pytest.mark.parametrize(
    ("before", "after", "code", "fix"),
    [
        ("warmup = 4", "warmup = 5", "warmup = 5", "warmup = 4"),
        ("share = 0.25", "share = 1.0", "share = 1.0", "share = 0.25"),
        (") * self.heat ** 2", ")", ")", ") * self.heat ** 2"),
        ("/ 256", "/ 128", "rate = base_rate * batch_size / 128", "rate = base_rate * batch_size / 256"),
        ("base_rate = 0.1", "base_rate = 0.2", "base_rate = 0.2", "base_rate = 0.1"),
        ("betas = [0.9, 0.95]", "betas = [0.9, 0.999]", "betas = [0.9, 0.999]", "betas = [0.9, 0.95]"),
        ('(8, 8, "gelu")', '(8, 8, "relu")', '(8, 8, "relu"),', '(8, 8, "gelu"),'),
        ("norm_first = True", "norm_first = False", "norm_first = False", None),
        ("z.mean(dim=1)", "z.sum(dim=1)", "pooled = z.sum(dim=1)", "pooled = z.mean(dim=1)"),
        ("z.mean(dim=1)", "(z * z).mean(dim=1)", "pooled = (z * z).mean(dim=1)", "pooled = z.mean(dim=1)"),
        # That the reference detaches a tensor is likely, so that no fix is shown.
        ("pooled.detach()", "pooled", "return self.head(pooled), pooled", None),
    ],
)
def test_the_line_that_defines_chooses_or_returns_a_value_is_shown(found, before, after, code, fix):
    fault = found(READ, before, after)
    assert fault.places.candidate is not None and fault.places.candidate.code == code, fault.cause
    assert fix is None or (fault.fix is not None and fault.fix.text == fix)


OF_DATA = {"reference": ["rng = RandomState(3)", "x = x - x.min()", "return (x - 0.25) / 0.5, x[2:]"],
        "candidate": ["def __init__(self, mean=0.25, std=0.75):", "x = x - x.min()", "part = x[0:8]", "y = x / x.std()",
                      "img = img.transpose(2, 1, 0)"]}  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "line"),
    [
        ("1.5 times the reference's", 4),
        ("1.01058 times the reference's (the candidate's variance of 48 values)", 4),
        ("the same with axes 1 and 3 exchanged", 5),
        ("shifted by 2 along axis 1, back", 3),
        ("the same samples in reverse", 9),
    ],
)
def test_the_line_of_the_data_does_what_the_cause_says(sentence, line):
    first = FirstDiff(0, "input", "", "", cause=Cause("input", sentence, True))
    sides = [
        {f"@data:{k}": Frame("a.py", k, "", code) for k, code in enumerate(OF_DATA[side], 1)}
        | {"@batch": Frame("a.py", 9, "", "for x in loader:")}
        for side in ("reference", "candidate")
    ]
    fault = brief_fault(first, Models(Both((), ()), Both("torch 2", "paddle 3"), lines=Both(*sides)))
    assert fault.places.candidate.line == line


def test_the_number_that_scales_the_data_is_the_references():
    code = "def __init__(self, mean=0.25, std=0.75):"
    cause = Cause("input_scaled", "the candidate's input is 0.666667 times the reference's", True,
                  values=Both(None, ((2 / 3, 0.0),)))  # fmt: skip
    sides = [{"@data:0": Frame("a.py", 7, "", text)} for text in ("return (x - 0.25) / 0.5", code)]
    models = Models(Both((), ()), Both("torch 2", "paddle 3"), lines=Both(*sides))
    fault = brief_fault(FirstDiff(0, "input", "", "", cause=cause), models)
    assert fault.fix is not None and fault.fix.new == code.replace("0.75", "0.5")
    assert code[slice(*fault.places.candidate.span)] == "0.75"


def test_a_number_that_an_attribute_holds_is_shown_where_it_is_computed():
    called = Both(Frame("a.py", 3, "", "s = q @ k / math.sqrt(8)"), Frame("b.py", 9, "", "s = q @ k * self.scale"))
    text = "the scale of attention in div() in `a` is 5.65685 (sqrt(32)) for the reference's 2.82843 (sqrt(8))"
    lines = Both({}, {"self.scale": Frame("b.py", 4, "", "self.scale = width ** -0.5")})
    models = Models(Both((), ()), Both("torch 2", "paddle 3"), lines=lines)
    places = [
        brief_fault(
            FirstDiff(0, "forward", "a", "b", cause=Cause("attention_scale", sentence, True, lines=called)), models
        )
        for sentence in (text, "other code: the candidate computes `s * scale`")
    ]
    assert [each.places.candidate.line for each in places] == [4, 9]

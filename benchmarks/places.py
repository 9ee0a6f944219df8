"""How often the first five lines of a verdict name the line of the fault, and how often the fix is a call to write.

Each fault is one change in the source of a training: a value, an argument, a call, a line. The reference is a torch
training, the candidate the same one with the fault, its paddle port with the fault, or a training in two files.

    python benchmarks/places.py [NAME ...]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

TORCH = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CFG = {"eps": 1e-5, "heads": 4, "lr": 1e-2, "decay": 0.01, "drop": 0.0, "smooth": 0.0}


class Block(nn.Module):
    def __init__(self, dim, cfg):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=cfg["eps"])
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.norm(x)
        h = F.gelu(self.up(h))
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(16, cfg) for _ in range(3)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = F.normalize(x, dim=-1)
        return self.head(x)


def batches():
    rng = np.random.default_rng(0)
    for _ in range(6):
        x = rng.normal(size=(16, 8)).astype("float32")
        yield x, rng.integers(0, 4, 16)


torch.manual_seed(0)
net = Net(CFG)
optimizer = torch.optim.AdamW(net.parameters(), lr=CFG["lr"], weight_decay=CFG["decay"])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
criterion = nn.CrossEntropyLoss(label_smoothing=CFG["smooth"])
for x, y in batches():
    logits = net(torch.from_numpy(x))
    loss = criterion(logits, torch.from_numpy(y))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
"""

PADDLE = """
import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
import padiff

CFG = {"eps": 1e-5, "heads": 4, "lr": 1e-2, "decay": 0.01, "drop": 0.0, "smooth": 0.0}


class Block(nn.Layer):
    def __init__(self, dim, cfg):
        super().__init__()
        self.norm = nn.LayerNorm(dim, epsilon=cfg["eps"])
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.norm(x)
        h = F.gelu(self.up(h))
        return x + self.down(h)


class Net(nn.Layer):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.LayerList([Block(16, cfg) for _ in range(3)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = F.normalize(x, axis=-1)
        return self.head(x)


def batches():
    rng = np.random.default_rng(0)
    for _ in range(6):
        x = rng.normal(size=(16, 8)).astype("float32")
        yield x, rng.integers(0, 4, 16)


net = Net(CFG)
padiff.start_from("runs/reference", net)
scheduler = paddle.optimizer.lr.StepDecay(CFG["lr"], step_size=2, gamma=0.5)
optimizer = paddle.optimizer.AdamW(scheduler, parameters=net.parameters(), weight_decay=CFG["decay"], grad_clip=nn.ClipGradByGlobalNorm(1.0))
criterion = nn.CrossEntropyLoss(label_smoothing=CFG["smooth"])
for x, y in batches():
    logits = net(paddle.to_tensor(x))
    loss = criterion(logits, paddle.to_tensor(y))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    scheduler.step()
"""  # noqa: E501

MODEL = """
import torch.nn.functional as F
from torch import nn


def conv_block(i, o, stride=1, momentum=0.1):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(o, momentum=momentum),
        nn.ReLU(inplace=True),
    )


class Classifier(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.stem = conv_block(3, args.width)
        self.stages = nn.Sequential(conv_block(args.width, 2 * args.width, stride=2), conv_block(2 * args.width, 2 * args.width))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(args.dropout)
        self.fc = nn.Linear(2 * args.width, 10)
        self.scale = args.temperature

    def features(self, x):
        x = self.stem(x)
        x = F.max_pool2d(x, 2)
        return self.stages(x)

    def forward(self, x):
        x = self.pool(self.features(x)).flatten(1)
        return self.fc(self.drop(x)) / self.scale
"""  # noqa: E501

TRAIN = """
import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from model import Classifier


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--smoothing", type=float, default=0.1)
    return parser.parse_args()


class Data(torch.utils.data.Dataset):
    def __init__(self):
        rng = np.random.default_rng(3)
        self.images = rng.integers(0, 255, (64, 3, 16, 16)).astype("uint8")
        self.targets = rng.integers(0, 10, 64)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].astype("float32") / 255.0
        image = (image - 0.45) / 0.25
        return torch.from_numpy(image), int(self.targets[index])


def train_one_epoch(model, loader, optimizer, scheduler, args):
    model.train()
    for images, targets in loader:
        output = model(images)
        loss = F.cross_entropy(output, targets, label_smoothing=args.smoothing)
        reg = sum(p.abs().sum() for p in model.fc.parameters())
        loss = loss + 1e-3 * reg
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        scheduler.step()


def main():
    args = get_args()
    torch.manual_seed(1)
    model = Classifier(args)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = SGD(
        [{"params": decay, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        momentum=args.momentum,
        nesterov=True,
    )
    scheduler = CosineAnnealingLR(optimizer, T_max=8)
    loader = torch.utils.data.DataLoader(Data(), batch_size=16, shuffle=False, drop_last=True)
    for epoch in range(2):
        train_one_epoch(model, loader, optimizer, scheduler, args)


if __name__ == "__main__":
    main()
"""

PROGRAMS = {
    "torch": {"train.py": TORCH},
    "paddle": {"train.py": PADDLE},
    "files": {"model.py": MODEL, "train.py": TRAIN},
}


class Fault(NamedTuple):
    """A change of a program: its file, the text before and after, and a part of the line at fault."""

    name: str
    file: str
    before: str
    after: str
    at: str


FAULTS = [
    Fault("torch/eps-config", "train.py", '"eps": 1e-5', '"eps": 1e-3', '"eps": 1e-3'),
    Fault("paddle/eps-config-p", "train.py", '"eps": 1e-5', '"eps": 1e-3', '"eps": 1e-3'),
    Fault(
        "torch/gelu-tanh",
        "train.py",
        "F.gelu(self.up(h))",
        'F.gelu(self.up(h), approximate="tanh")',
        'approximate="tanh"',
    ),
    Fault(
        "paddle/gelu-tanh-p",
        "train.py",
        "F.gelu(self.up(h))",
        "F.gelu(self.up(h), approximate=True)",
        "approximate=True",
    ),
    Fault("paddle/relu", "train.py", "F.gelu(", "F.relu(", "F.relu("),
    Fault("torch/silu", "train.py", "F.gelu(", "F.silu(", "F.silu("),
    Fault("torch/normalize-dim", "train.py", "F.normalize(x, dim=-1)", "F.normalize(x, dim=0)", "dim=0"),
    Fault("paddle/normalize-p", "train.py", "F.normalize(x, axis=-1)", "F.normalize(x, p=1, axis=-1)", "p=1"),
    Fault(
        "torch/residual",
        "train.py",
        "return x + self.down(h)",
        "return h.new_zeros(()) + x * 0.5 + self.down(h)",
        "x * 0.5",
    ),
    Fault(
        "paddle/noskip",
        "train.py",
        "return x + self.down(h)",
        "return self.norm(x) + self.down(h)",
        "return self.norm(x)",
    ),
    Fault("torch/lr", "train.py", '"lr": 1e-2', '"lr": 2e-2', '"lr": 2e-2'),
    Fault("paddle/decay", "train.py", '"decay": 0.01', '"decay": 0.1', '"decay": 0.1'),
    Fault("torch/decay-arg", "train.py", 'weight_decay=CFG["decay"]', "weight_decay=0.1", "weight_decay=0.1"),
    Fault(
        "torch/beta",
        "train.py",
        'weight_decay=CFG["decay"])',
        'weight_decay=CFG["decay"], betas=(0.9, 0.99))',
        "betas=",
    ),
    Fault("paddle/beta-p", "train.py", "scheduler, parameters", "scheduler, beta2=0.99, parameters", "beta2=0.99"),
    Fault("paddle/opt-eps", "train.py", "scheduler, parameters", "scheduler, epsilon=1e-6, parameters", "epsilon=1e-6"),
    Fault("torch/adam", "train.py", "torch.optim.AdamW", "torch.optim.Adam", "torch.optim.Adam("),
    Fault("torch/clip", "train.py", "net.parameters(), 1.0)", "net.parameters(), 0.1)", "0.1)"),
    Fault(
        "paddle/clip-p",
        "train.py",
        "ClipGradByGlobalNorm(1.0)",
        "ClipGradByGlobalNorm(0.1)",
        "ClipGradByGlobalNorm(0.1)",
    ),
    Fault("torch/gamma", "train.py", "gamma=0.5", "gamma=0.1", "gamma=0.1"),
    Fault("paddle/step-size", "train.py", "step_size=2", "step_size=3", "step_size=3"),
    Fault("torch/smooth", "train.py", '"smooth": 0.0', '"smooth": 0.1', '"smooth": 0.1'),
    Fault(
        "paddle/smooth-arg", "train.py", 'label_smoothing=CFG["smooth"]', "label_smoothing=0.1", "label_smoothing=0.1"
    ),
    Fault(
        "torch/reduction",
        "train.py",
        'label_smoothing=CFG["smooth"])',
        'label_smoothing=CFG["smooth"], reduction="sum")',
        'reduction="sum"',
    ),
    Fault(
        "torch/scale-loss",
        "train.py",
        "loss = criterion(logits, torch.from_numpy(y))",
        "loss = criterion(logits, torch.from_numpy(y)) * 2",
        "* 2",
    ),
    Fault("torch/data-scale", "train.py", '.astype("float32")\n', '.astype("float32") * 2\n', "* 2"),
    Fault("paddle/data-seed", "train.py", "default_rng(0)", "default_rng(1)", "default_rng(1)"),
    Fault(
        "torch/labels", "train.py", "yield x, rng.integers(0, 4, 16)", "yield x, 3 - rng.integers(0, 4, 16)", "3 - rng"
    ),
    Fault("paddle/temperature", "train.py", "return self.head(x)", "return self.head(x) / 0.9", "/ 0.9"),
    Fault("torch/nograd", "train.py", "h = self.norm(x)", "h = self.norm(x).detach()", ".detach()"),
    Fault(
        "torch/zero-grad",
        "train.py",
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad() if x[0, 0] > 0 else None\n",
        "optimizer.zero_grad()",
    ),
    Fault("files/bn-momentum", "model.py", "momentum=momentum)", "momentum=0.01)", "momentum=0.01)"),
    Fault("files/bn-default", "model.py", "stride=1, momentum=0.1", "stride=1, momentum=0.2", "momentum=0.2"),
    Fault("files/bias", "model.py", "bias=False", "bias=True", "bias=True"),
    Fault("files/leaky", "model.py", "nn.ReLU(inplace=True)", "nn.LeakyReLU(0.01, inplace=True)", "LeakyReLU"),
    Fault("files/pool", "model.py", "F.max_pool2d(x, 2)", "F.avg_pool2d(x, 2)", "avg_pool2d"),
    Fault("files/adaptive", "model.py", "nn.AdaptiveAvgPool2d(1)", "nn.AdaptiveMaxPool2d(1)", "AdaptiveMaxPool2d"),
    Fault(
        "files/temp",
        "train.py",
        '"--temperature", type=float, default=1.0',
        '"--temperature", type=float, default=2.0',
        "default=2.0",
    ),
    Fault(
        "files/dropout",
        "train.py",
        '"--dropout", type=float, default=0.0',
        '"--dropout", type=float, default=0.2',
        "default=0.2",
    ),
    Fault("files/lr", "train.py", "default=0.05", "default=0.1", "default=0.1)"),
    Fault("files/momentum", "train.py", "default=0.9", "default=0.8", "default=0.8"),
    Fault("files/wd", "train.py", "default=5e-4", "default=5e-3", "default=5e-3"),
    Fault(
        "files/wd-rest",
        "train.py",
        '"params": rest, "weight_decay": 0.0',
        '"params": rest, "weight_decay": args.weight_decay',
        '"params": rest',
    ),
    Fault("files/nesterov", "train.py", "nesterov=True", "nesterov=False", "nesterov=False"),
    Fault("files/smoothing", "train.py", "default=0.1)\n    return", "default=0.0)\n    return", '"--smoothing"'),
    Fault("files/reg", "train.py", "1e-3 * reg", "1e-2 * reg", "1e-2 * reg"),
    Fault("files/noreg", "train.py", "        loss = loss + 1e-3 * reg\n", "", "loss = F.cross_entropy"),
    Fault("files/clip", "train.py", "max_norm=0.5", "max_norm=0.05", "max_norm=0.05"),
    Fault("files/tmax", "train.py", "T_max=8", "T_max=4", "T_max=4"),
    Fault("files/norm-const", "train.py", "0.45) / 0.25", "0.5) / 0.25", "0.5) / 0.25"),
    Fault("files/shuffle", "train.py", "shuffle=False", "shuffle=True", "shuffle=True"),
    Fault("files/batch", "train.py", "batch_size=16", "batch_size=8", "batch_size=8"),
    Fault("files/eval", "train.py", "model.train()", "model.eval()", "model.eval()"),
    Fault(
        "files/zero-late",
        "train.py",
        "        optimizer.zero_grad(set_to_none=True)\n        loss.backward()\n",
        "        loss.backward()\n        optimizer.zero_grad(set_to_none=True)\n",
        "optimizer.zero_grad",
    ),
    Fault("files/target", "train.py", "int(self.targets[index])", "int(self.targets[index - 1])", "index - 1"),
]


def record(folder: Path, name: str) -> str:
    """Record a program; return what it printed if it failed."""
    command = [sys.executable, "-m", "padiff", "run", "--dir", f"runs/{name}", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr[-500:] if done.returncode else ""


def main(names: list[str]) -> int:
    found = fixes = 0
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    with tempfile.TemporaryDirectory() as temporary:
        references = {}
        for program, files in (("torch", PROGRAMS["torch"]), ("files", PROGRAMS["files"])):
            folder = Path(temporary, f"reference-{program}")
            folder.mkdir()
            for file, text in files.items():
                (folder / file).write_text(text)
            assert not (error := record(folder, "reference")), error
            references[program] = folder / "runs" / "reference"
        for fault in chosen:
            program = fault.name.partition("/")[0]
            folder = Path(temporary, fault.name)
            shutil.copytree(references["files" if program == "files" else "torch"], folder / "runs" / "reference")
            for file, text in PROGRAMS[program].items():
                (folder / file).write_text(text.replace(fault.before, fault.after, 1) if file == fault.file else text)
            lines = (folder / fault.file).read_text().split("\n")
            line = next(number for number, text in enumerate(lines, 1) if fault.at in text)
            error = record(folder, "candidate")
            command = [sys.executable, "-m", "padiff", "compare", "runs/reference", "runs/candidate"]
            text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
            places = [re.match(r"  --> (\S+):(\d+)", each) for each in text.split("\n")[:5]]
            shown = [f"{place[1]}:{place[2]}" for place in places if place is not None]
            right = f"{fault.file}:{line}" in shown
            fix = re.search(r"^  fix +(.*)", text, re.MULTILINE)
            found, fixes = found + right, fixes + (fix is not None)
            marks = f"{'line' if right else '-':5} {'fix' if fix else '-':4}"
            print(f"{fault.name:22} {marks} {text.splitlines()[0][:70]} {error}")
    print(f"the line of {found} of {len(chosen)} faults; a fix for {fixes}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

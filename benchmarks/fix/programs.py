"""Programs whose planted faults `padiff fix` has to remove: a reference, and a candidate of another author.

Each program is a folder of files for either side. A fault is a change of the candidate's source.
"""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """Two trainings that match: the files of either side, and the command line of the candidate."""

    reference: dict[str, str]
    candidate: dict[str, str]
    arguments: tuple[str, ...] = ()


class Planted(NamedTuple):
    """A fault: changes of the candidate's files, each the file, the text before and the text after.

    Attributes:
        name: program and fault.
        changes: the changes; several for several faults.
        unseen: True for faults that are run when the rules are finished, not while they are written.
    """

    name: str
    changes: tuple[tuple[str, str, str], ...]
    unseen: bool = False


SEG_TORCH = """
import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __init__(self, n=24):
        rng = np.random.default_rng(7)
        self.images = rng.integers(0, 256, (n, 3, 16, 16)).astype("float32")
        self.masks = rng.integers(0, 5, (n, 16, 16)).astype("int64")
        self.masks[:, :2] = 255

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i] / 255.0
        image = (image - 0.485) / 0.229
        return image, self.masks[i]


class ConvBNReLU(nn.Module):
    def __init__(self, cin, cout, k=3, stride=1, dilation=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, k, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn = nn.BatchNorm2d(cout, eps=1e-3, momentum=0.1)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class SegNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = ConvBNReLU(3, 8, stride=2)
        self.body = ConvBNReLU(8, 8, dilation=2)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        size = x.shape[-2:]
        y = self.stem(x)
        y = y + self.body(y)
        y = self.head(y)
        return F.interpolate(y, size=size, mode="bilinear", align_corners=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = SegNet()
    loader = DataLoader(Scenes(), batch_size=args.batch_size, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.wd)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=20, power=0.9)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    for epoch in range(1):
        for images, masks in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), masks)
            loss.backward()
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    main()
"""

SEG_PADDLE = """
import argparse

import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset

import padiff


class SceneData(Dataset):
    \"\"\"Random scenes with masks.\"\"\"

    def __init__(self, n=24):
        super().__init__()
        gen = np.random.default_rng(7)
        self.imgs = gen.integers(0, 256, (n, 3, 16, 16)).astype("float32")
        self.labels = gen.integers(0, 5, (n, 16, 16)).astype("int64")
        self.labels[:, :2] = 255

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, idx):
        img = self.imgs[idx] / 255.0
        img = (img - 0.485) / 0.229  # ImageNet's first channel
        return img, self.labels[idx]


class Block(nn.Layer):
    def __init__(self, in_ch, out_ch, ksize=3, stride=1, dilation=1):
        super().__init__()
        self.conv = nn.Conv2D(
            in_ch,
            out_ch,
            ksize,
            stride,
            padding=dilation,
            dilation=dilation,
            bias_attr=False,
        )
        self.norm = nn.BatchNorm2D(out_ch, epsilon=1e-3, momentum=0.9)  # paddle's momentum
        self.relu = nn.ReLU()

    def forward(self, inp):
        out = self.conv(inp)
        out = self.norm(out)
        return self.relu(out)


class Segmenter(nn.Layer):
    def __init__(self, num_classes=5):
        super().__init__()
        self.stem = Block(3, 8, stride=2)
        self.body = Block(8, 8, dilation=2)
        self.classifier = nn.Conv2D(8, num_classes, 1)

    def forward(self, inp):
        feat = self.stem(inp)
        feat = feat + self.body(feat)
        logits = self.classifier(feat)
        return F.interpolate(logits, size=inp.shape[-2:], mode="bilinear", align_corners=False)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--learning-rate", type=float, default=0.05)
    p.add_argument("--momentum", type=float, default=0.9)
    p.add_argument("--weight-decay", type=float, default=1e-4)
    p.add_argument("--batch-size", type=int, default=4)
    return p.parse_args()


def main():
    opts = parse()
    net = Segmenter()
    padiff.start_from("runs/reference", net)
    data = DataLoader(SceneData(), batch_size=opts.batch_size, shuffle=False)
    lr = paddle.optimizer.lr.PolynomialDecay(opts.learning_rate, decay_steps=20, end_lr=0.0, power=0.9)
    optim = paddle.optimizer.Momentum(
        lr, momentum=opts.momentum, parameters=net.parameters(), weight_decay=opts.weight_decay
    )
    ce = nn.CrossEntropyLoss(axis=1, ignore_index=255)
    for imgs, labels in data:
        out = net(imgs)
        loss = ce(out, labels)
        loss.backward()
        optim.step()
        optim.clear_grad()
        lr.step()


if __name__ == "__main__":
    main()
"""

TABLE_REFERENCE = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    hidden: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.02
    beta2: float = 0.98
    clip: float = 0.5
    slope: float = 0.1
    delta: float = 1.0


class Tabular(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, cfg.hidden),
            nn.BatchNorm1d(cfg.hidden),
            nn.LeakyReLU(cfg.slope),
            nn.Linear(cfg.hidden, cfg.hidden),
            nn.LayerNorm(cfg.hidden),
            nn.GELU(),
        )
        self.out = nn.Linear(cfg.hidden, 1)

    def forward(self, x):
        h = self.net(x)
        return torch.tanh(self.out(h)).squeeze(-1)


def run(cfg):
    torch.manual_seed(3)
    model = Tabular(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[2, 4], gamma=0.3)
    generator = torch.Generator().manual_seed(11)
    loss_fn = nn.SmoothL1Loss(beta=cfg.delta)
    for _ in range(6):
        x = torch.randn(20, 12, generator=generator)
        target = torch.sin(x.sum(dim=1))
        opt.zero_grad()
        pred = model(x)
        loss = loss_fn(pred, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        opt.step()
        sched.step()


run(Config())
"""

TABLE_CONFIG = """
SETTINGS = dict(
    width=32,
    learning_rate=3e-3,
    decay=0.02,  # decoupled
    beta2=0.98,
    max_grad=0.5,
    negative=0.1,
    beta=1.0,
)
"""

TABLE_CANDIDATE = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR

from settings import SETTINGS


class Net(nn.Module):
    def __init__(self, width, negative):
        super().__init__()
        self.fc1 = nn.Linear(12, width)
        self.bn = nn.BatchNorm1d(width)
        self.act = nn.LeakyReLU(negative)
        self.fc2 = nn.Linear(width, width)
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs):
        y = self.act(self.bn(self.fc1(inputs)))
        y = self.ln(self.fc2(y))
        y = F.gelu(y)
        y = self.head(y)
        return torch.tanh(y)[:, 0]


def train():
    torch.manual_seed(3)
    net = Net(SETTINGS["width"], SETTINGS["negative"])
    optimizer = AdamW(
        net.parameters(),
        lr=SETTINGS["learning_rate"],
        betas=(0.9, SETTINGS["beta2"]),
        weight_decay=SETTINGS["decay"],
    )
    scheduler = MultiStepLR(optimizer, milestones=[2, 4], gamma=0.3)
    gen = torch.Generator().manual_seed(11)
    for step in range(6):
        batch = torch.randn(20, 12, generator=gen)
        goal = torch.sin(batch.sum(dim=1))
        guess = net(batch)
        loss = F.smooth_l1_loss(guess, goal, beta=SETTINGS["beta"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), SETTINGS["max_grad"])
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    train()
"""

TEXT_MODEL_TORCH = """
import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        weights = torch.softmax(scores, dim=-1)
        y = (weights @ v).transpose(1, 2).reshape(b, t, d)
        return self.proj(y)


class Layer(nn.Module):
    def __init__(self, dim, heads, eps):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, heads)
        self.ln2 = nn.LayerNorm(dim, eps=eps)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        h = torch.nn.functional.gelu(self.fc1(self.ln2(x)))
        return x + self.fc2(h)


class Encoder(nn.Module):
    def __init__(self, vocabulary=50, dim=16, heads=2, layers=2, classes=3, eps=1e-6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, eps) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, tokens):
        x = self.embed(tokens) * 4.0
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.norm(x).mean(dim=1))
"""

TEXT_TRAIN_TORCH = """
import numpy as np
import torch
from torch.nn import functional as F

from model import Encoder

torch.manual_seed(5)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
rng = np.random.default_rng(2)
for step in range(6):
    tokens = torch.from_numpy(rng.integers(0, 50, (8, 10)))
    labels = torch.from_numpy(rng.integers(0, 3, 8))
    logits = model(tokens)
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
"""

TEXT_MODEL_PADDLE = """
import paddle
from paddle import nn
from paddle.nn import functional as F


class SelfAttention(nn.Layer):
    def __init__(self, hidden, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, states):
        b, t, d = states.shape
        mixed = self.qkv(states).reshape([b, t, 3, self.num_heads, d // self.num_heads])
        q, k, v = mixed.transpose([2, 0, 3, 1, 4]).unbind(0)
        scores = paddle.matmul(q, k, transpose_y=True) / (d // self.num_heads) ** 0.5
        probs = F.softmax(scores, axis=-1)
        merged = paddle.matmul(probs, v).transpose([0, 2, 1, 3]).reshape([b, t, d])
        return self.out(merged)


class EncoderLayer(nn.Layer):
    def __init__(self, hidden, num_heads, epsilon):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, epsilon=epsilon)
        self.attention = SelfAttention(hidden, num_heads)
        self.norm2 = nn.LayerNorm(hidden, epsilon=epsilon)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, states):
        states = states + self.attention(self.norm1(states))
        inner = F.gelu(self.up(self.norm2(states)))
        return states + self.down(inner)


class TextEncoder(nn.Layer):
    def __init__(self, vocab=50, hidden=16, num_heads=2, depth=2, num_labels=3, epsilon=1e-6):
        super().__init__()
        self.word = nn.Embedding(vocab, hidden)
        self.blocks = nn.LayerList([EncoderLayer(hidden, num_heads, epsilon) for _ in range(depth)])
        self.final = nn.LayerNorm(hidden, epsilon=epsilon)
        self.fc = nn.Linear(hidden, num_labels)

    def forward(self, ids):
        states = self.word(ids) * 4.0
        for block in self.blocks:
            states = block(states)
        pooled = self.final(states).mean(axis=1)
        return self.fc(pooled)
"""

TEXT_TRAIN_PADDLE = """
import numpy as np
import paddle
import paddle.nn.functional as F

import padiff
from network import TextEncoder

net = TextEncoder()
padiff.start_from("runs/reference", net)
lr = paddle.optimizer.lr.ExponentialDecay(2e-3, gamma=0.8)
opt = paddle.optimizer.AdamW(
    learning_rate=lr,
    beta1=0.9,
    beta2=0.95,
    parameters=net.parameters(),
    weight_decay=0.1,
    grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
)
rng = np.random.default_rng(2)
for it in range(6):
    ids = paddle.to_tensor(rng.integers(0, 50, (8, 10)))
    target = paddle.to_tensor(rng.integers(0, 3, 8))
    logits = net(ids)
    loss = F.cross_entropy(logits, target, label_smoothing=0.1)
    loss.backward()
    opt.step()
    opt.clear_grad()
    lr.step()
"""

PLAIN_REFERENCE = """
import numpy as np
import torch

rng = np.random.default_rng(4)
data = rng.normal(size=(60, 6)).astype("float32")
mean, std = 0.1, 1.5
values = torch.from_numpy((data - mean) / std)
goals = torch.from_numpy(rng.normal(size=(60, 2)).astype("float32"))

torch.manual_seed(9)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 24),
    torch.nn.Tanh(),
    torch.nn.Dropout(0.0),
    torch.nn.Linear(24, 24, bias=False),
    torch.nn.ELU(alpha=0.5),
    torch.nn.Linear(24, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True)
for epoch in range(2):
    for start in range(0, 60, 20):
        x, y = values[start : start + 20], goals[start : start + 20]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()
"""

PLAIN_CANDIDATE = """
import numpy as np
import torch
from torch import nn, optim

LR = 0.1
MOMENTUM = 0.8
MEAN, STD = 0.1, 1.5

rng = np.random.default_rng(4)
table = rng.normal(size=(60, 6)).astype("float32")
inputs = torch.from_numpy((table - MEAN) / STD)
targets = torch.from_numpy(rng.normal(size=(60, 2)).astype("float32"))


def build(width=24, alpha=0.5):
    return nn.Sequential(
        nn.Linear(6, width),
        nn.Tanh(),
        nn.Dropout(0.0),
        nn.Linear(width, width, bias=False),  # the next layer shifts
        nn.ELU(alpha=alpha),
        nn.Linear(width, 2),
    )


torch.manual_seed(9)
mlp = build()
opt = optim.SGD(mlp.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
mse = nn.MSELoss()
for epoch in range(2):
    for first in range(0, 60, 20):
        opt.zero_grad()
        guess = mlp(inputs[first : first + 20])
        loss = mse(guess, targets[first : first + 20])
        loss = loss + 0.01 * sum(p.square().sum() for p in mlp.parameters())
        loss.backward()
        nn.utils.clip_grad_value_(mlp.parameters(), 0.2)
        opt.step()
"""

PROGRAMS = {
    "seg": Program({"train.py": SEG_TORCH}, {"seg_paddle.py": SEG_PADDLE}),
    "table": Program({"train.py": TABLE_REFERENCE}, {"train_table.py": TABLE_CANDIDATE, "settings.py": TABLE_CONFIG}),
    "text": Program(
        {"train.py": TEXT_TRAIN_TORCH, "model.py": TEXT_MODEL_TORCH},
        {"train_text.py": TEXT_TRAIN_PADDLE, "network.py": TEXT_MODEL_PADDLE},
    ),
    "plain": Program({"train.py": PLAIN_REFERENCE}, {"mlp.py": PLAIN_CANDIDATE}),
}


def _one(name: str, file: str, before: str, after: str, unseen: bool = False) -> Planted:
    return Planted(name, ((file, before, after),), unseen)


_SEG, _TABLE, _TEXT, _PLAIN = "seg_paddle.py", "train_table.py", "train_text.py", "mlp.py"
PLANTED = [
    _one("seg/bn-momentum", _SEG, "momentum=0.9)  #", "momentum=0.1)  #"),
    _one("seg/bn-eps", _SEG, "epsilon=1e-3, ", ""),
    _one("seg/corners", _SEG, "align_corners=False", "align_corners=True"),
    _one("seg/decay", _SEG, '"--weight-decay", type=float, default=1e-4', '"--weight-decay", type=float, default=1e-3'),
    _one("seg/power", _SEG, "power=0.9", "power=1.0"),
    _one("seg/ignore", _SEG, "axis=1, ignore_index=255", "axis=1, ignore_index=255, reduction=\"sum\"", True),
    _one("seg/normalize", _SEG, "- 0.485) / 0.229", "- 0.456) / 0.224"),
    _one("seg/no-lr-step", _SEG, "        optim.clear_grad()\n        lr.step()\n", "        optim.clear_grad()\n"),
    _one("seg/batch", _SEG, '"--batch-size", type=int, default=4', '"--batch-size", type=int, default=6', True),
    _one("seg/start", _SEG, '    padiff.start_from("runs/reference", net)\n', ""),
    _one("seg/dilation", _SEG, "Block(8, 8, dilation=2)", "Block(8, 8)", True),
    _one("seg/zero", _SEG, "        optim.clear_grad()\n", "", True),
    Planted("seg/two", ((_SEG, "epsilon=1e-3, ", ""), (_SEG, '"--momentum", type=float, default=0.9',
            '"--momentum", type=float, default=0.8'))),
    _one("table/slope", "settings.py", "negative=0.1", "negative=0.01"),
    _one("table/beta2", "settings.py", "beta2=0.98", "beta2=0.999", True),
    _one("table/decay", "settings.py", "decay=0.02", "decay=0.2"),
    _one("table/adam", _TABLE, "    optimizer = AdamW(", "    optimizer = torch.optim.Adam("),
    _one("table/no-clip", _TABLE, '        nn.utils.clip_grad_norm_(net.parameters(), SETTINGS["max_grad"])\n', ""),
    _one("table/milestones", _TABLE, "milestones=[2, 4]", "milestones=[3, 4]"),
    _one("table/gelu", _TABLE, "y = F.gelu(y)", "y = F.silu(y)"),
    _one("table/detach", _TABLE, "self.bn(self.fc1(inputs))", "self.bn(self.fc1(inputs).detach())", True),
    _one("table/loss", _TABLE, 'F.smooth_l1_loss(guess, goal, beta=SETTINGS["beta"])', "F.mse_loss(guess, goal)"),
    _one("table/tanh", _TABLE, "return torch.tanh(y)[:, 0]", "return y[:, 0]", True),
    _one("text/eps", "network.py", "num_labels=3, epsilon=1e-6", "num_labels=3, epsilon=1e-5"),
    _one("text/smoothing", _TEXT, ", label_smoothing=0.1", ""),
    _one("text/clip", _TEXT, "    grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),\n", ""),
    _one("text/beta2", _TEXT, "    beta2=0.95,\n", ""),
    _one("text/tanh-gelu", "network.py", "F.gelu(self.up(self.norm2(states)))",
         "F.gelu(self.up(self.norm2(states)), approximate=True)"),
    _one("text/embed-scale", "network.py", "self.word(ids) * 4.0", "self.word(ids)"),
    _one("text/residual", "network.py", "return states + self.down(inner)", "return self.down(inner)", True),
    _one("text/gamma", _TEXT, "gamma=0.8", "gamma=0.9", True),
    _one("text/softmax", "network.py", "F.softmax(scores, axis=-1)", "F.softmax(scores, axis=-2)", True),
    _one("text/decay", _TEXT, "    weight_decay=0.1,\n", ""),
    _one("plain/lr", _PLAIN, "LR = 0.1", "LR = 0.2"),
    _one("plain/nesterov", _PLAIN, ", nesterov=True", ""),
    _one("plain/elu", _PLAIN, "nn.ELU(alpha=alpha)", "nn.ELU()"),
    _one("plain/mean", _PLAIN, "MEAN, STD = 0.1, 1.5", "MEAN, STD = 0.0, 1.5"),
    _one("plain/l2", _PLAIN, "0.01 * sum", "0.02 * sum", True),
    _one("plain/clip-kind", _PLAIN, "clip_grad_value_(", "clip_grad_norm_("),
    _one("plain/relu", _PLAIN, "nn.Tanh()", "nn.ReLU()"),
    Planted("plain/three", ((_PLAIN, "nn.ELU(alpha=alpha)", "nn.ELU()"), (_PLAIN, "MOMENTUM = 0.8", "MOMENTUM = 0.9"),
            (_PLAIN, "mlp.parameters(), 0.2", "mlp.parameters(), 0.1"))),
    _one("seg/relu6", _SEG, "self.relu = nn.ReLU()", "self.relu = nn.Sigmoid()", True),
    _one("seg/shuffle", _SEG, "shuffle=False", "shuffle=True", True),
    _one("seg/residual", _SEG, "feat = feat + self.body(feat)", "feat = self.body(feat)", True),
    _one("seg/lr", _SEG, '"--learning-rate", type=float, default=0.05',
         '"--learning-rate", type=float, default=0.01', True),
    _one("table/no-norm", _TABLE, "y = self.ln(self.fc2(y))", "y = self.fc2(y)", True),
    _one("table/gamma", _TABLE, "gamma=0.3", "gamma=0.5", True),
    _one("table/sum", _TABLE, 'beta=SETTINGS["beta"])', 'beta=SETTINGS["beta"], reduction="sum")', True),
    _one("text/scale", "network.py", "** 0.5", "** 1.0", True),
    _one("text/pool", "network.py", ".mean(axis=1)", ".max(axis=1)", True),
    _one("text/clip-kind", _TEXT, "ClipGradByGlobalNorm(1.0)", "ClipGradByNorm(0.2)", True),
    _one("plain/std", _PLAIN, "MEAN, STD = 0.1, 1.5", "MEAN, STD = 0.1, 2.0", True),
    _one("plain/no-l2", _PLAIN,
         "        loss = loss + 0.01 * sum(p.square().sum() for p in mlp.parameters())\n", "", True),
    _one("plain/dropout", _PLAIN, "nn.Dropout(0.0)", "nn.Dropout(0.2)", True),
]  # fmt: skip

"""Ports of sixteen authors' styles, from torch to paddle, with one or two faults each: for `run.py --ports`.

A style is a way to configure, build and train: options of the command line, dataclasses, factories, wrappers, keyword
dictionaries, YAML and JSON, trainer classes, `paddle.Model`.
"""

from __future__ import annotations

from programs import Planted, Program

PORTS: dict[str, Program] = {}
PORT_FAULTS: list[Planted] = []


def _port(
    name: str,
    reference: dict[str, str],
    candidate: dict[str, str],
    *changes: tuple[str, str, str],
    unseen: bool = False,
) -> None:
    PORTS[name] = Program(reference, candidate)
    PORT_FAULTS.append(Planted(f"{name}/port", changes, unseen))


_port(
    "argcnn",
    {"train.py": """
import argparse

import numpy as np
import torch
import torch.nn as nn


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--smoothing", type=float, default=0.02)
    p.add_argument("--width", type=int, default=8)
    p.add_argument("--steps", type=int, default=6)
    return p.parse_args()


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = torch.relu(self.conv2(x)).mean(dim=(2, 3))
        return self.fc(x)


args = parse()
torch.manual_seed(1)
net = Net(args.width)
opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.95)
loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
rng = np.random.default_rng(0)
for _ in range(args.steps):
    x = torch.from_numpy(rng.normal(size=(8, 3, 12, 12)).astype("float32"))
    y = torch.from_numpy(rng.integers(0, 10, 8))
    opt.zero_grad()
    loss = loss_fn(net(x), y)
    loss.backward()
    opt.step()
"""},
    {"port.py": """
import argparse

import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

import padiff


class ConvNet(nn.Layer):
    def __init__(self, channels=8, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2D(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2D(channels)
        self.pool = nn.AvgPool2D(3, stride=2, padding=1, exclusive=False)
        self.conv2 = nn.Conv2D(channels, channels * 2, 3)
        self.head = nn.Linear(channels * 2, num_classes)

    def forward(self, img):
        h = F.relu(self.norm(self.conv1(img)))
        h = self.pool(h)
        h = F.relu(self.conv2(h))
        h = paddle.mean(h, axis=[2, 3])
        return self.head(h)


parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=6)
opts = parser.parse_args()
model = ConvNet()
padiff.start_from("runs/reference", model)
optimizer = paddle.optimizer.Momentum(opts.learning_rate, momentum=0.95, parameters=model.parameters())
criterion = nn.CrossEntropyLoss(label_smoothing=0.02)
gen = np.random.default_rng(0)
for it in range(opts.epochs):
    imgs = paddle.to_tensor(gen.normal(size=(8, 3, 12, 12)).astype("float32"))
    target = paddle.to_tensor(gen.integers(0, 10, 8))
    loss = criterion(model(imgs), target)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
"""},
    ("port.py", "nn.CrossEntropyLoss(label_smoothing=0.02)", "nn.CrossEntropyLoss()"),
    ("port.py", ", exclusive=False", ""),
)  # fmt: skip

_port(
    "dataclass",
    {"train.py": """
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    latent: int = 4
    hidden: int = 24
    beta: float = 0.5
    lr: float = 2e-3


class VAE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.enc = nn.Linear(20, cfg.hidden)
        self.mu = nn.Linear(cfg.hidden, cfg.latent)
        self.logvar = nn.Linear(cfg.hidden, cfg.latent)
        self.dec = nn.Sequential(nn.Linear(cfg.latent, cfg.hidden), nn.Softplus(), nn.Linear(cfg.hidden, 20))

    def forward(self, x, noise):
        h = F.elu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


cfg = Config()
torch.manual_seed(4)
model = VAE(cfg)
opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.99))
rng = np.random.default_rng(3)
for step in range(6):
    x = torch.from_numpy(rng.random((16, 20)).astype("float32"))
    noise = torch.from_numpy(rng.normal(size=(16, cfg.latent)).astype("float32"))
    out, mu, logvar = model(x, noise)
    rec = F.binary_cross_entropy_with_logits(out, x, reduction="sum") / x.shape[0]
    kl = -0.5 * torch.mean(torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1))
    loss = rec + cfg.beta * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"vae.py": """
from dataclasses import dataclass, field

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

import padiff


@dataclass
class Settings:
    z_dim: int = 4
    width: int = 24
    kl_weight: float = 0.5
    learning_rate: float = 2e-3
    betas: tuple = field(default=(0.9, 0.99))


class Vae(nn.Layer):
    def __init__(self, s: Settings):
        super().__init__()
        self.encoder = nn.Linear(20, s.width)
        self.to_mu = nn.Linear(s.width, s.z_dim)
        self.to_logvar = nn.Linear(s.width, s.z_dim)
        self.decoder = nn.Sequential(nn.Linear(s.z_dim, s.width), nn.Softplus(), nn.Linear(s.width, 20))

    def forward(self, inputs, eps):
        hidden = F.elu(self.encoder(inputs))
        mean = self.to_mu(hidden)
        log_variance = self.to_logvar(hidden)
        code = mean + eps * paddle.exp(0.5 * log_variance)
        return self.decoder(code), mean, log_variance


def elbo(s, logits, inputs, mean, log_variance):
    rec = F.binary_cross_entropy_with_logits(logits, inputs, reduction="sum") / inputs.shape[0]
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(axis=1).mean()
    return rec + s.kl_weight * kl


s = Settings()
net = Vae(s)
padiff.start_from("runs/reference", net)
optim = paddle.optimizer.Adam(
    learning_rate=s.learning_rate, beta1=s.betas[0], beta2=s.betas[1], parameters=net.parameters()
)
gen = np.random.default_rng(3)
for _ in range(6):
    batch = paddle.to_tensor(gen.random((16, 20)).astype("float32"))
    eps = paddle.to_tensor(gen.normal(size=(16, s.z_dim)).astype("float32"))
    logits, mean, log_variance = net(batch, eps)
    loss = elbo(s, logits, batch, mean, log_variance)
    loss.backward()
    optim.step()
    optim.clear_grad()
"""},
    ("vae.py", "kl_weight: float = 0.5", "kl_weight: float = 1.0"),
    ("vae.py", "default=(0.9, 0.99)", "default=(0.9, 0.999)"),
)  # fmt: skip

_port(
    "factory",
    {"train.py": """
import numpy as np
import torch
from torch import nn


def make_mlp(sizes, norm=True, act=nn.SiLU):
    layers = []
    for n_in, n_out in zip(sizes[:-2], sizes[1:-1]):
        layers.append(nn.Linear(n_in, n_out))
        if norm:
            layers.append(nn.LayerNorm(n_out))
        layers.append(act())
    layers.append(nn.Linear(sizes[-2], sizes[-1]))
    return nn.Sequential(*layers)


torch.manual_seed(0)
model = make_mlp([10, 32, 16, 3])
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
rng = np.random.default_rng(8)
x = torch.from_numpy(rng.normal(size=(64, 10)).astype("float32"))
y = torch.from_numpy(rng.integers(0, 3, 64))
for epoch in range(2):
    for k in range(0, 64, 16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[k : k + 16]), y[k : k + 16])
        loss.backward()
        optimizer.step()
"""},
    {"port.py": """
import numpy as np
import paddle
import paddle.nn as nn

import padiff

ACTIVATIONS = {"silu": nn.Silu, "relu": nn.ReLU}


def build_network(dims, activation="silu"):
    \"\"\"Hidden layers with their norms, and a linear head.\"\"\"
    modules = []
    for i in range(len(dims) - 2):
        modules.append(nn.Linear(dims[i], dims[i + 1]))
        modules.append(nn.LayerNorm(dims[i + 1]))
        modules.append(ACTIVATIONS[activation]())
    modules.append(nn.Linear(dims[-2], dims[-1]))
    return nn.Sequential(*modules)


net = build_network([10, 32, 16, 3])
padiff.start_from("runs/reference", net)
opt = paddle.optimizer.Adagrad(learning_rate=0.05, epsilon=1e-10, parameters=net.parameters())
gen = np.random.default_rng(8)
features = paddle.to_tensor(gen.normal(size=(64, 10)).astype("float32"))
labels = paddle.to_tensor(gen.integers(0, 3, 64))
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    for i in range(4):
        batch, target = features[16 * i : 16 * (i + 1)], labels[16 * i : 16 * (i + 1)]
        loss = criterion(net(batch), target)
        loss.backward()
        opt.step()
        opt.clear_grad()
"""},
    (
        "port.py",
        "        modules.append(nn.LayerNorm(dims[i + 1]))\n        modules.append(ACTIVATIONS[activation]())\n",
        "        modules.append(ACTIVATIONS[activation]())\n        modules.append(nn.LayerNorm(dims[i + 1]))\n",
    ),
)  # fmt: skip

_MASKED_MODEL = """
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=40, dim=16, classes=4, heads=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, classes)

    def forward(self, ids):
        mask = (ids != 0).float()
        x = self.emb(ids)
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        scores = scores + (1.0 - mask)[:, None, None, :] * -1e4
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        h = self.norm(x + self.o(y))
        pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.cls(pooled)
"""
_MASKED_PORT = """
import paddle
from paddle import nn
from paddle.nn import functional as F


class SelfAttention(nn.Layer):
    def __init__(self, hidden, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden // num_heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def split(self, x):
        b, t, _ = x.shape
        return x.reshape([b, t, self.num_heads, self.head_dim]).transpose([0, 2, 1, 3])

    def forward(self, x, bias):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = paddle.matmul(q, k, transpose_y=True) * self.head_dim**-0.5 + bias
        out = paddle.matmul(F.softmax(scores, axis=-1), v)
        return self.out_proj(out.transpose([0, 2, 1, 3]).reshape(x.shape))


class Classifier(nn.Layer):
    def __init__(self, vocab_size=40, hidden=16, num_labels=4, num_heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.attention = SelfAttention(hidden, num_heads)
        self.norm = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, num_labels)

    def forward(self, tokens):
        valid = (tokens != 0).astype("float32")
        bias = (1.0 - valid).unsqueeze([1, 2]) * -1e4
        emb = self.embedding(tokens)
        hidden = self.norm(emb + self.attention(emb, bias))
        pooled = (hidden * valid.unsqueeze(-1)).sum(axis=1) / valid.sum(axis=1, keepdim=True)
        return self.fc(pooled)
"""
_port(
    "masked",
    {"model.py": _MASKED_MODEL, "train.py": """
import numpy as np
import torch

from model import Tagger

torch.manual_seed(2)
model = Tagger()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
rng = np.random.default_rng(5)
for step in range(5):
    ids = rng.integers(1, 40, (6, 9))
    for row, length in enumerate(rng.integers(3, 9, 6)):
        ids[row, length:] = 0
    labels = torch.from_numpy(rng.integers(0, 4, 6))
    loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(ids)), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"classifier.py": _MASKED_PORT, "main.py": """
import numpy as np
import paddle

import padiff
from classifier import Classifier

model = Classifier()
padiff.start_from("runs/reference", model)
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), weight_decay=0.01)
gen = np.random.default_rng(5)
for step in range(5):
    tokens = gen.integers(1, 40, (6, 9))
    for row, length in enumerate(gen.integers(3, 9, 6)):
        tokens[row, length:] = 0
    target = paddle.to_tensor(gen.integers(0, 4, 6))
    loss = paddle.nn.functional.cross_entropy(model(paddle.to_tensor(tokens)), target)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
"""},
    (
        "classifier.py",
        "(hidden * valid.unsqueeze(-1)).sum(axis=1) / valid.sum(axis=1, keepdim=True)",
        "hidden.mean(axis=1)",
    ),
)  # fmt: skip

_port(
    "equalcalls",
    {"train.py": """
import numpy as np
import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(2, 8, 5, padding=2)
        self.a1 = nn.LeakyReLU(0.2)
        self.c2 = nn.Conv1d(8, 8, 5, padding=2)
        self.a2 = nn.LeakyReLU(0.2)
        self.n2 = nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        x = self.a1(self.c1(x))
        x = self.a2(self.n2(self.c2(x)))
        return self.out(x.mean(-1))


torch.manual_seed(6)
critic = Critic()
opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
rng = np.random.default_rng(9)
for i in range(5):
    real = torch.from_numpy(rng.normal(size=(8, 2, 24)).astype("float32"))
    fake = torch.from_numpy(rng.uniform(-1, 1, size=(8, 2, 24)).astype("float32"))
    loss = torch.relu(1 - critic(real)).mean() + 0.5 * torch.relu(1 + critic(fake)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"hinge.py": """
import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

import padiff


class Discriminator(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1D(2, 8, 5, padding=2)
        self.act_first = nn.LeakyReLU(0.2)
        self.second = nn.Conv1D(8, 8, 5, padding=2)
        self.norm = nn.GroupNorm(2, 8)
        self.act_second = nn.LeakyReLU(0.2)
        self.score = nn.Linear(8, 1)

    def forward(self, signal):
        h = self.act_first(self.first(signal))
        h = self.act_second(self.norm(self.second(h)))
        return self.score(h.mean(axis=-1))


net = Discriminator()
padiff.start_from("runs/reference", net)
adam = paddle.optimizer.Adam(1e-3, beta1=0.5, beta2=0.9, parameters=net.parameters())
gen = np.random.default_rng(9)
for step in range(5):
    real = paddle.to_tensor(gen.normal(size=(8, 2, 24)).astype("float32"))
    fake = paddle.to_tensor(gen.uniform(-1, 1, size=(8, 2, 24)).astype("float32"))
    loss = F.relu(1 - net(real)).mean() + 0.5 * F.relu(1 + net(fake)).mean()
    loss.backward()
    adam.step()
    adam.clear_grad()
"""},
    ("hinge.py", "self.act_first = nn.LeakyReLU(0.2)", "self.act_first = nn.LeakyReLU()"),
    ("hinge.py", "self.act_second = nn.LeakyReLU(0.2)", "self.act_second = nn.LeakyReLU()"),
)  # fmt: skip

_port(
    "hapi",
    {"train.py": """
import numpy as np
import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 16, 20), nn.Hardswish(),
    nn.Linear(20, 4),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
rng = np.random.default_rng(1)
images = rng.random((32, 1, 8, 8)).astype("float32")
labels = rng.integers(0, 4, 32)
criterion = nn.CrossEntropyLoss()
for k in range(0, 32, 8):
    loss = criterion(net(torch.from_numpy(images[k : k + 8])), torch.from_numpy(labels[k : k + 8]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""},
    {"fit.py": """
import numpy as np
import paddle
from paddle import nn
from paddle.io import TensorDataset

import padiff


class LeNet(nn.Layer):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2D(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2, 2))
        self.fc1 = nn.Linear(96, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x):
        x = paddle.flatten(self.features(x), 1)
        x = nn.functional.hardswish(self.fc1(x))
        return self.fc2(x)


gen = np.random.default_rng(1)
images = paddle.to_tensor(gen.random((32, 1, 8, 8)).astype("float32"))
labels = paddle.to_tensor(gen.integers(0, 4, 32))
net = LeNet()
padiff.start_from("runs/reference", net)
model = paddle.Model(net)
optim = paddle.optimizer.Momentum(
    learning_rate=0.05, momentum=0.9, parameters=model.parameters(), weight_decay=5e-4
)
model.prepare(optim, nn.CrossEntropyLoss())
model.fit(TensorDataset([images, labels]), batch_size=8, epochs=1, shuffle=False, verbose=0)
"""},
    ("fit.py", "parameters=model.parameters(), weight_decay=5e-4", "parameters=model.parameters()"),
    ("fit.py", "nn.functional.hardswish(", "nn.functional.silu("),
)  # fmt: skip

_port(
    "trainer",
    {"train.py": """
import numpy as np
import torch
from torch import nn


class Trainer:
    def __init__(self, model, lr, clip):
        self.model, self.clip = model, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.loss = nn.HuberLoss(delta=0.5)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x).squeeze(-1), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def fit(self, data, epochs):
        for _ in range(epochs):
            for x, y in data:
                self.step(x, y)
            self.scheduler.step()


rng = np.random.default_rng(0)
pairs = [(rng.normal(size=(10, 5)).astype("float32"), rng.normal(size=10).astype("float32")) for _ in range(2)]
data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs]
torch.manual_seed(0)
Trainer(nn.Sequential(nn.Linear(5, 16), nn.Mish(), nn.Linear(16, 1)), 0.01, 0.3).fit(data, 4)
"""},
    {"run.py": """
import numpy as np
import paddle
import paddle.nn as nn

import padiff


class Loop:
    \"\"\"Trains a regression.\"\"\"

    def __init__(self, net, base_lr=0.01, max_norm=0.3):
        self.net = net
        self.sched = paddle.optimizer.lr.StepDecay(base_lr, step_size=2, gamma=0.5)
        self.opt = paddle.optimizer.AdamW(
            learning_rate=self.sched,
            parameters=self.net.parameters(),
            weight_decay=0.05,
            grad_clip=nn.ClipGradByGlobalNorm(max_norm),
        )

    def loss(self, pred, target):
        return nn.functional.smooth_l1_loss(pred, target, delta=0.5)

    def train_epoch(self, batches):
        for inputs, target in batches:
            value = self.loss(self.net(inputs)[:, 0], target)
            value.backward()
            self.opt.step()
            self.opt.clear_grad()

    def train(self, batches, epochs=4):
        for epoch in range(epochs):
            self.train_epoch(batches)
            self.sched.step()


def main():
    gen = np.random.default_rng(0)
    batches = []
    for _ in range(2):
        inputs = gen.normal(size=(10, 5)).astype("float32")
        target = gen.normal(size=10).astype("float32")
        batches.append((paddle.to_tensor(inputs), paddle.to_tensor(target)))
    net = nn.Sequential(nn.Linear(5, 16), nn.Mish(), nn.Linear(16, 1))
    padiff.start_from("runs/reference", net)
    Loop(net).train(batches)


if __name__ == "__main__":
    main()
"""},
    ("run.py", "self.opt.clear_grad()\n", "self.opt.clear_grad()\n            self.sched.step()\n"),
    ("run.py", "self.train_epoch(batches)\n            self.sched.step()\n", "self.train_epoch(batches)\n"),
    ("run.py", "max_norm=0.3", "max_norm=1.0"),
)  # fmt: skip

_port(
    "yaml",
    {"train.py": """
import numpy as np
import torch
from torch import nn

torch.manual_seed(7)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 2))
opt = torch.optim.AdamW(model.parameters(), lr=0.002, betas=(0.9, 0.95), weight_decay=0.1)
rng = np.random.default_rng(6)
for step in range(5):
    x = torch.from_numpy(rng.normal(size=(12, 8)).astype("float32"))
    y = torch.from_numpy(rng.normal(size=(12, 2)).astype("float32"))
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"config.yaml": """
# hyper parameters
model:
  dim: 16
  ratio: 3
  epsilon: 1.0e-6   # as in the paper
optimizer:
  learning_rate: 0.002
  beta2: 0.95
  weight_decay: 0.1
""",
     "train_yaml.py": """
import numpy as np
import paddle
import yaml
from paddle import nn

import padiff

with open("config.yaml") as file:
    config = yaml.safe_load(file)


class MlpBlock(nn.Layer):
    def __init__(self, dim, ratio, epsilon):
        super().__init__()
        self.ln = nn.LayerNorm(dim, epsilon=epsilon)
        self.fc1 = nn.Linear(dim, ratio * dim)
        self.fc2 = nn.Linear(ratio * dim, dim)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.ln(x))))


class Net(nn.Layer):
    def __init__(self, dim, ratio, epsilon):
        super().__init__()
        self.stem = nn.Linear(8, dim)
        self.blocks = nn.LayerList([MlpBlock(dim, ratio, epsilon) for _ in range(2)])
        self.head = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


net = Net(**config["model"])
padiff.start_from("runs/reference", net)
oc = config["optimizer"]
opt = paddle.optimizer.AdamW(
    oc["learning_rate"], beta2=oc["beta2"], parameters=net.parameters(), weight_decay=oc["weight_decay"]
)
gen = np.random.default_rng(6)
for step in range(5):
    x = paddle.to_tensor(gen.normal(size=(12, 8)).astype("float32"))
    y = paddle.to_tensor(gen.normal(size=(12, 2)).astype("float32"))
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    opt.clear_grad()
"""},
    ("config.yaml", "epsilon: 1.0e-6", "epsilon: 1.0e-5"),
    ("config.yaml", "weight_decay: 0.1", "weight_decay: 0.01"),
)  # fmt: skip

_port(
    "wrapper",
    {"train.py": """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.a = nn.Linear(14, width)
        self.b = nn.Linear(width, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Contrastive(nn.Module):
    def __init__(self, backbone, temperature=0.2):
        super().__init__()
        self.backbone, self.temperature = backbone, temperature

    def forward(self, first, second):
        one = F.normalize(self.backbone(first), dim=-1)
        two = F.normalize(self.backbone(second), dim=-1)
        return one @ two.t() / self.temperature


torch.manual_seed(12)
model = Contrastive(Backbone())
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
rng = np.random.default_rng(13)
for step in range(5):
    base = rng.normal(size=(10, 14)).astype("float32")
    views = [torch.from_numpy(base + 0.1 * rng.normal(size=(10, 14)).astype("float32")) for _ in range(2)]
    logits = model(*views)
    labels = torch.arange(10)
    loss = 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"simclr.py": """
import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

import padiff


class Encoder(nn.Layer):
    def __init__(self, hidden=24, out=8):
        super().__init__()
        self.fc1 = nn.Linear(14, hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x):
        return self.fc2(F.tanh(self.fc1(x)))


class PairModel(nn.Layer):
    \"\"\"Wraps an encoder: similarities of all pairs.\"\"\"

    def __init__(self, encoder, tau=0.2):
        super().__init__()
        self.encoder = encoder
        self.tau = tau

    def embed(self, x):
        return F.normalize(self.encoder(x), axis=-1)

    def forward(self, left, right):
        return paddle.matmul(self.embed(left), self.embed(right), transpose_y=True) / self.tau


def pair_loss(sim):
    target = paddle.arange(sim.shape[0])
    return (F.cross_entropy(sim, target) + F.cross_entropy(sim.t(), target)) * 0.5


net = PairModel(Encoder())
padiff.start_from("runs/reference", net)
opt = paddle.optimizer.Momentum(0.1, momentum=0.9, use_nesterov=True, parameters=net.parameters())
gen = np.random.default_rng(13)
for _ in range(5):
    base = gen.normal(size=(10, 14)).astype("float32")
    left = paddle.to_tensor(base + 0.1 * gen.normal(size=(10, 14)).astype("float32"))
    right = paddle.to_tensor(base + 0.1 * gen.normal(size=(10, 14)).astype("float32"))
    loss = pair_loss(net(left, right))
    loss.backward()
    opt.step()
    opt.clear_grad()
"""},
    ("simclr.py", "return F.normalize(self.encoder(x), axis=-1)", "return self.encoder(x)"),
    ("simclr.py", "use_nesterov=True, ", ""),
    unseen=True,
)  # fmt: skip

_port(
    "kwargs",
    {"train.py": """
import numpy as np
import torch
from torch import nn

conv = dict(kernel_size=3, padding=1, bias=False)
norm = dict(eps=1e-3, momentum=0.03)


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, **conv)
        self.bn = nn.BatchNorm2d(cout, **norm)

    def forward(self, x):
        return nn.functional.silu(self.bn(self.conv(x)))


torch.manual_seed(21)
net = nn.Sequential(Stage(3, 8), nn.MaxPool2d(2), Stage(8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))
opt = torch.optim.Adam(net.parameters(), lr=0.004, betas=(0.9, 0.999), eps=1e-7)
rng = np.random.default_rng(22)
for _ in range(5):
    x = torch.from_numpy(rng.random((6, 3, 12, 12)).astype("float32"))
    y = torch.from_numpy(rng.integers(0, 5, 6))
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"yolo_like.py": """
import numpy as np
import paddle
from paddle import nn

import padiff

CONV_KWARGS = {"kernel_size": 3, "padding": 1, "bias_attr": False}
NORM_KWARGS = {"epsilon": 1e-3, "momentum": 0.97}
OPTIMIZER = {"learning_rate": 0.004, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7}


class ConvNormAct(nn.Layer):
    def __init__(self, in_channels, out_channels, **kwargs):
        super().__init__()
        self.conv = nn.Conv2D(in_channels, out_channels, **{**CONV_KWARGS, **kwargs})
        self.norm = nn.BatchNorm2D(out_channels, **NORM_KWARGS)
        self.act = nn.Silu()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


model = nn.Sequential(
    ConvNormAct(3, 8),
    nn.MaxPool2D(2),
    ConvNormAct(8, 12),
    nn.AdaptiveAvgPool2D(1),
    nn.Flatten(),
    nn.Linear(12, 5),
)
padiff.start_from("runs/reference", model)
optimizer = paddle.optimizer.Adam(parameters=model.parameters(), **OPTIMIZER)
gen = np.random.default_rng(22)
for it in range(5):
    images = paddle.to_tensor(gen.random((6, 3, 12, 12)).astype("float32"))
    target = paddle.to_tensor(gen.integers(0, 5, 6))
    loss = nn.functional.cross_entropy(model(images), target)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
"""},
    ("yolo_like.py", '"momentum": 0.97', '"momentum": 0.03'),
    ("yolo_like.py", ', "epsilon": 1e-7}', "}"),
    unseen=True,
)  # fmt: skip

_port(
    "json",
    {"train.py": """
import numpy as np
import torch
from torch import nn

torch.manual_seed(31)
model = nn.ModuleDict({"rnn": nn.GRU(6, 12, batch_first=True), "drop": nn.Dropout(0.0), "out": nn.Linear(12, 3)})
opt = torch.optim.Adam(model.parameters(), lr=0.005)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=8, eta_min=0.0005)
rng = np.random.default_rng(32)
for step in range(6):
    x = torch.from_numpy(rng.normal(size=(5, 7, 6)).astype("float32"))
    y = torch.from_numpy(rng.integers(0, 3, 5))
    h, _ = model["rnn"](x)
    loss = nn.functional.cross_entropy(model["out"](model["drop"](h[:, -1])), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    sched.step()
"""},
    {"hparams.json": """
{
  "hidden": 12,
  "lr": 0.005,
  "schedule": {"T_max": 8, "eta_min": 0.0005},
  "clip": 0.5
}
""",
     "gru.py": """
import json
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

import padiff

hp = json.loads(Path("hparams.json").read_text())


class GruClassifier(nn.Layer):
    def __init__(self, hidden):
        super().__init__()
        self.gru = nn.GRU(6, hidden)
        self.fc = nn.Linear(hidden, 3)

    def forward(self, seq):
        out, _ = self.gru(seq)
        return self.fc(out[:, -1])


net = GruClassifier(hp["hidden"])
padiff.start_from("runs/reference", net)
scheduler = paddle.optimizer.lr.CosineAnnealingDecay(hp["lr"], **hp["schedule"])
clip = nn.ClipGradByGlobalNorm(hp["clip"])
adam = paddle.optimizer.Adam(scheduler, parameters=net.parameters(), grad_clip=clip)
gen = np.random.default_rng(32)
for step in range(6):
    seq = paddle.to_tensor(gen.normal(size=(5, 7, 6)).astype("float32"))
    target = paddle.to_tensor(gen.integers(0, 3, 5))
    loss = nn.functional.cross_entropy(net(seq), target)
    loss.backward()
    adam.step()
    adam.clear_grad()
    scheduler.step()
"""},
    ("hparams.json", '"T_max": 8', '"T_max": 6'),
    ("hparams.json", '"clip": 0.5', '"clip": 5.0'),
    unseen=True,
)  # fmt: skip

_port(
    "lm",
    {"train.py": """
import numpy as np
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=30, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(8, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.ln = nn.LayerNorm(dim)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        h, _ = self.lstm(x)
        return self.ln(h) @ self.wte.weight.t()


torch.manual_seed(41)
lm = LM()
opt = torch.optim.AdamW(lm.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
rng = np.random.default_rng(42)
for step in range(5):
    ids = torch.from_numpy(rng.integers(0, 30, (4, 9)))
    logits = lm(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 30), ids[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"lm_paddle.py": """
import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

import padiff


class LanguageModel(nn.Layer):
    def __init__(self, vocab_size, hidden_size, max_len=8):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_len, hidden_size)
        self.rnn = nn.LSTM(hidden_size, hidden_size)
        self.final_norm = nn.LayerNorm(hidden_size)

    def forward(self, ids):
        pos = paddle.arange(ids.shape[1])
        emb = self.tokens(ids) + self.positions(pos)
        states, _ = self.rnn(emb)
        states = self.final_norm(states)
        return paddle.matmul(states, self.tokens.weight, transpose_y=True)


def next_token_loss(logits, ids):
    flat = logits.reshape([-1, logits.shape[-1]])
    return F.cross_entropy(flat, ids[:, 1:].reshape([-1]))


def train(steps=5):
    net = LanguageModel(30, 12)
    padiff.start_from("runs/reference", net)
    opt = paddle.optimizer.AdamW(3e-3, beta1=0.9, beta2=0.95, parameters=net.parameters(), weight_decay=0.0)
    gen = np.random.default_rng(42)
    for _ in range(steps):
        ids = paddle.to_tensor(gen.integers(0, 30, (4, 9)))
        loss = next_token_loss(net(ids[:, :-1]), ids)
        loss.backward()
        opt.step()
        opt.clear_grad()


train()
"""},
    ("lm_paddle.py", "emb = self.tokens(ids) + self.positions(pos)", "emb = self.tokens(ids)"),
    ("lm_paddle.py", ", weight_decay=0.0)", ")"),
    unseen=True,
)  # fmt: skip

_port(
    "unet",
    {"train.py": """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.InstanceNorm2d(cout), nn.LeakyReLU(0.1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = block(1, 6), block(6, 12)
        self.up = block(18, 6)
        self.head = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=True)
        return self.head(self.up(torch.cat([a, b], dim=1)))


def dice(logits, target, smooth=1.0):
    p = torch.sigmoid(logits)
    inter = (p * target).sum(dim=(1, 2, 3))
    total = p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return (1 - (2 * inter + smooth) / (total + smooth)).mean()


torch.manual_seed(51)
net = UNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
rng = np.random.default_rng(52)
for _ in range(5):
    x = torch.from_numpy(rng.random((4, 1, 16, 16)).astype("float32"))
    y = torch.from_numpy((rng.random((4, 1, 16, 16)) > 0.7).astype("float32"))
    out = net(x)
    loss = F.binary_cross_entropy_with_logits(out, y) + dice(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"unet_paddle.py": """
import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

import padiff


class ConvBlock(nn.Layer):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2D(cin, cout, 3, padding=1)
        self.norm = nn.InstanceNorm2D(cout, weight_attr=False, bias_attr=False)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Unet(nn.Layer):
    def __init__(self, base=6):
        super().__init__()
        self.enc1 = ConvBlock(1, base)
        self.enc2 = ConvBlock(base, 2 * base)
        self.dec = ConvBlock(3 * base, base)
        self.out = nn.Conv2D(base, 1, 1)

    def forward(self, x):
        skip = self.enc1(x)
        deep = self.enc2(F.max_pool2d(skip, 2))
        deep = F.interpolate(deep, scale_factor=2, mode="bilinear", align_corners=True)
        return self.out(self.dec(paddle.concat([skip, deep], axis=1)))


def dice_loss(logits, target, smooth=1.0):
    prob = F.sigmoid(logits)
    inter = (prob * target).sum(axis=[1, 2, 3])
    total = prob.sum(axis=[1, 2, 3]) + target.sum(axis=[1, 2, 3])
    score = (2 * inter + smooth) / (total + smooth)
    return (1 - score).mean()


net = Unet()
padiff.start_from("runs/reference", net)
opt = paddle.optimizer.Adam(1e-3, parameters=net.parameters())
gen = np.random.default_rng(52)
for _ in range(5):
    image = paddle.to_tensor(gen.random((4, 1, 16, 16)).astype("float32"))
    mask = paddle.to_tensor((gen.random((4, 1, 16, 16)) > 0.7).astype("float32"))
    logits = net(image)
    loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
    loss.backward()
    opt.step()
    opt.clear_grad()
"""},
    ("unet_paddle.py", "paddle.concat([skip, deep], axis=1)", "paddle.concat([deep, skip], axis=1)"),
    ("unet_paddle.py", "smooth=1.0", "smooth=1e-5"),
    unseen=True,
)  # fmt: skip

_port(
    "multitask",
    {"train.py": """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WEIGHTS = {"box": 2.0, "cls": 0.5}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU6())
        self.box = nn.Linear(8, 4)
        self.cls = nn.Linear(8, 3)

    def forward(self, x):
        f = self.trunk(x).amax(dim=(2, 3))
        return self.box(f), self.cls(f)


torch.manual_seed(61)
net = Detector()
opt = torch.optim.SGD(
    [
        {"params": [p for n, p in net.named_parameters() if n.endswith("weight")], "weight_decay": 1e-2},
        {"params": [p for n, p in net.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
    ],
    lr=0.02,
    momentum=0.9,
)
rng = np.random.default_rng(62)
for _ in range(5):
    x = torch.from_numpy(rng.normal(size=(6, 3, 11, 11)).astype("float32"))
    boxes = torch.from_numpy(rng.random((6, 4)).astype("float32"))
    labels = torch.from_numpy(rng.integers(0, 3, 6))
    b, c = net(x)
    loss = WEIGHTS["box"] * F.l1_loss(b, boxes) + WEIGHTS["cls"] * F.cross_entropy(c, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""},
    {"detect.py": """
import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

import padiff


class Losses:
    box_weight = 2.0
    cls_weight = 0.5

    @classmethod
    def total(cls, out, target):
        box = F.l1_loss(out["box"], target["box"])
        label = F.cross_entropy(out["cls"], target["cls"])
        return cls.box_weight * box + cls.cls_weight * label


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2D(3, 8, 3, stride=2)
        self.bn = nn.BatchNorm2D(8)
        self.relu6 = nn.ReLU6()
        self.box_head = nn.Linear(8, 4)
        self.cls_head = nn.Linear(8, 3)

    def forward(self, image):
        feat = self.relu6(self.bn(self.conv(image)))
        feat = paddle.max(feat, axis=[2, 3])
        return {"box": self.box_head(feat), "cls": self.cls_head(feat)}


net = Net()
padiff.start_from("runs/reference", net)
biases = [p for n, p in net.named_parameters() if n.endswith("bias")]
weights = [p for n, p in net.named_parameters() if not n.endswith("bias")]
opt = paddle.optimizer.Momentum(
    learning_rate=0.02,
    momentum=0.9,
    parameters=[{"params": weights, "weight_decay": 1e-2}, {"params": biases, "weight_decay": 0.0}],
)
gen = np.random.default_rng(62)
for step in range(5):
    image = paddle.to_tensor(gen.normal(size=(6, 3, 11, 11)).astype("float32"))
    target = {"box": paddle.to_tensor(gen.random((6, 4)).astype("float32"))}
    target["cls"] = paddle.to_tensor(gen.integers(0, 3, 6))
    loss = Losses.total(net(image), target)
    loss.backward()
    opt.step()
    opt.clear_grad()
"""},
    ("detect.py", "box_weight = 2.0", "box_weight = 5.0"),
    ("detect.py", '"weight_decay": 1e-2}', '"weight_decay": 1e-4}'),
    unseen=True,
)  # fmt: skip

_port(
    "accumulate",
    {"train.py": """
import numpy as np
import torch
from torch import nn

ACCUMULATION = 3
torch.manual_seed(71)
model = nn.Sequential(nn.Linear(9, 20), nn.GELU(approximate="tanh"), nn.RMSNorm(20, eps=1e-6), nn.Linear(20, 1))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
rng = np.random.default_rng(72)
for step in range(12):
    x = torch.from_numpy(rng.normal(size=(8, 9)).astype("float32"))
    y = torch.from_numpy(rng.integers(0, 2, (8, 1)).astype("float32"))
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y, pos_weight=torch.tensor(3.0))
    (loss / ACCUMULATION).backward()
    if (step + 1) % ACCUMULATION == 0:
        opt.step()
        opt.zero_grad()
"""},
    {"accumulate.py": """
import numpy as np
import paddle
from paddle import nn

import padiff


class RMSNorm(nn.Layer):
    def __init__(self, dim, epsilon=1e-6):
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=nn.initializer.Constant(1.0))
        self.epsilon = epsilon

    def forward(self, x):
        variance = x.square().mean(axis=-1, keepdim=True)
        return x * paddle.rsqrt(variance + self.epsilon) * self.weight


class Mlp(nn.Layer):
    def __init__(self, dim=20):
        super().__init__()
        self.fc_in = nn.Linear(9, dim)
        self.act = nn.GELU(approximate=True)
        self.norm = RMSNorm(dim)
        self.fc_out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.fc_out(self.norm(self.act(self.fc_in(x))))


def main(accumulation_steps=3, micro_batches=12):
    net = Mlp()
    padiff.start_from("runs/reference", net)
    criterion = nn.BCEWithLogitsLoss(pos_weight=paddle.to_tensor(3.0))
    optimizer = paddle.optimizer.AdamW(2e-3, parameters=net.parameters(), weight_decay=0.01)
    gen = np.random.default_rng(72)
    for index in range(micro_batches):
        x = paddle.to_tensor(gen.normal(size=(8, 9)).astype("float32"))
        y = paddle.to_tensor(gen.integers(0, 2, (8, 1)).astype("float32"))
        loss = criterion(net(x), y) / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.clear_grad()


main()
"""},
    ("accumulate.py", "criterion(net(x), y) / accumulation_steps", "criterion(net(x), y)"),
    ("accumulate.py", "nn.BCEWithLogitsLoss(pos_weight=paddle.to_tensor(3.0))", "nn.BCEWithLogitsLoss()"),
    unseen=True,
)  # fmt: skip

_port(
    "vit",
    {"model.py": """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attend(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=16, depth=2, heads=2, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 10, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
""",
     "train.py": """
import numpy as np
import torch

from model import ViT

torch.manual_seed(81)
vit = ViT()
opt = torch.optim.AdamW(vit.parameters(), lr=1e-3, weight_decay=0.05)
warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.25, total_iters=4)
rng = np.random.default_rng(82)
for step in range(6):
    x = torch.from_numpy(rng.random((4, 3, 12, 12)).astype("float32"))
    y = torch.from_numpy(rng.integers(0, 5, 4))
    loss = torch.nn.functional.cross_entropy(vit((x - 0.5) / 0.5), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    warm.step()
"""},
    {"vision.py": """
import paddle
import paddle.nn as nn
import paddle.nn.functional as F


class Attention(nn.Layer):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias_attr=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        n, length, dim = x.shape
        qkv = self.qkv(x).reshape([n, length, 3, self.num_heads, dim // self.num_heads]).transpose([2, 0, 3, 1, 4])
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.softmax(q.matmul(k.transpose([0, 1, 3, 2])) * self.scale, axis=-1)
        return self.proj(attn.matmul(v).transpose([0, 2, 1, 3]).reshape([n, length, dim]))


class Mlp(nn.Layer):
    def __init__(self, dim, ratio=2):
        super().__init__()
        self.fc1 = nn.Linear(dim, ratio * dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(ratio * dim, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class EncoderBlock(nn.Layer):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class VisionTransformer(nn.Layer):
    def __init__(self, embed_dim=16, depth=2, num_heads=2, num_classes=5):
        super().__init__()
        self.patch_embed = nn.Conv2D(3, embed_dim, 4, stride=4)
        self.cls_token = self.create_parameter([1, 1, embed_dim])
        self.pos_embed = self.create_parameter([1, 10, embed_dim])
        self.blocks = nn.LayerList([EncoderBlock(embed_dim, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, img):
        x = self.patch_embed(img).flatten(2).transpose([0, 2, 1])
        cls = self.cls_token.expand([x.shape[0], -1, -1])
        x = paddle.concat([cls, x], axis=1) + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
        x = self.norm(x)
        return self.head(x[:, 0])
""",
     "train_vit.py": """
import numpy as np
import paddle

import padiff
from vision import VisionTransformer

MEAN, STD = 0.5, 0.5


def build_optimizer(net, lr=1e-3, wd=0.05, warmup=4):
    schedule = paddle.optimizer.lr.LinearWarmup(lr, warmup_steps=warmup, start_lr=0.25 * lr, end_lr=lr)
    return paddle.optimizer.AdamW(schedule, parameters=net.parameters(), weight_decay=wd), schedule


def main():
    net = VisionTransformer()
    padiff.start_from("runs/reference", net)
    opt, schedule = build_optimizer(net)
    gen = np.random.default_rng(82)
    for step in range(6):
        image = paddle.to_tensor(gen.random((4, 3, 12, 12)).astype("float32"))
        label = paddle.to_tensor(gen.integers(0, 5, 4))
        loss = paddle.nn.functional.cross_entropy(net((image - MEAN) / STD), label)
        loss.backward()
        opt.step()
        opt.clear_grad()
        schedule.step()


if __name__ == "__main__":
    main()
"""},
    ("vision.py", "x = x + self.mlp(self.norm2(x))", "x = self.norm2(x)\n        x = x + self.mlp(x)"),
    ("train_vit.py", "start_lr=0.25 * lr", "start_lr=0.0"),
    unseen=True,
)  # fmt: skip

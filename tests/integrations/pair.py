"""A held-out pair: an MLP-mixer written twice, with other names and another nesting on each side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import paddle
import torch
from torch import nn

from padiff_hapi import PaDiffCallback as HapiCallback
from padiff_lightning import PaDiffCallback as LightningCallback

from .lit import QUIET

TOKENS, WIDTH, CLASSES, BATCH = 6, 16, 5, 16


# -- the reference, in torch -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Sequential(
            nn.LayerNorm(WIDTH), Swap(), nn.Linear(TOKENS, 12), nn.GELU(), nn.Linear(12, TOKENS), Swap()
        )
        self.channels = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.tokens(x)
        return x + self.channels(x)


class Swap(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x.mean(1))))


# -- the candidate, in paddle ----------------------------------------------------------------------------------------


class TimesSeven(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7.0


class MixerLayer(paddle.nn.Layer):
    def __init__(self, faults):
        super().__init__()
        p, epsilon = paddle.nn, faults.get("epsilon", 1e-5)
        self.ln1 = p.LayerNorm(WIDTH, epsilon=epsilon)
        if faults.get("norms_first"):  # no fault: many people define them so
            self.ln2 = p.LayerNorm(WIDTH, epsilon=epsilon)
        self.mix_in, self.mix_act, self.mix_out = p.Linear(TOKENS, 12), p.GELU(), p.Linear(12, TOKENS)
        if not faults.get("norms_first"):
            self.ln2 = p.LayerNorm(WIDTH, epsilon=epsilon)
        self.expand, self.act, self.reduce = p.Linear(WIDTH, WIDTH), p.GELU(), p.Linear(WIDTH, WIDTH)
        self.mix_act._approximate = self.act._approximate = faults.get("approximate", False)
        self.times_seven = False

    def forward(self, x):
        y = self.ln1(x).transpose([0, 2, 1])
        x = x + self.mix_out(self.mix_act(self.mix_in(y))).transpose([0, 2, 1])
        y = self.act(self.expand(self.ln2(x)))
        return x + self.reduce(TimesSeven.apply(y) if self.times_seven else y)


class MixerPort(paddle.nn.Layer):
    def __init__(self, faults):
        super().__init__()
        p = paddle.nn
        self.stem = p.Linear(12, WIDTH)
        self.body = p.Sequential(MixerLayer(faults), MixerLayer(faults))
        self.body[1].times_seven = faults.get("times_seven", False)
        self.top = p.Sequential(
            p.BatchNorm1D(WIDTH, momentum=faults.get("momentum", 0.9)),
            p.Dropout(faults.get("dropout", 0.0)),
            p.Linear(WIDTH, CLASSES),
        )

    def forward(self, x):
        return self.top(self.body(self.stem(x)).mean(1))


class Smoothed(paddle.nn.Layer):
    """Cross entropy with label smoothing; paddle's own takes no integer labels for it on the CPU."""

    def forward(self, logits, labels):
        targets = paddle.nn.functional.one_hot(labels.reshape([-1]), CLASSES) * 0.9 + 0.1 / CLASSES
        return paddle.nn.functional.cross_entropy(logits, targets, soft_label=True)


# -- training both -----------------------------------------------------------------------------------------------------


def carry_over(source, target):
    """torch's parameters to paddle's, in one order; linear matrices are transposed."""
    linear = {id(m.weight) for m in source.modules() if isinstance(m, nn.Linear)}
    given = by_call(source)
    taking = by_call(target)
    assert len(given) == len(taking)
    for p, q in zip(given, taking):
        value = p.detach().numpy()
        q.set_value(value.T.copy() if id(p) in linear else value.copy())


def by_call(model):
    """Trainable parameters, layer by layer; the mixer's layers in the order of their calls."""
    if isinstance(model, MixerPort):
        order = [model.stem]
        for layer in model.body:
            order += [layer.ln1, layer.mix_in, layer.mix_out, layer.ln2, layer.expand, layer.reduce]
        order += [model.top[0], model.top[2]]
        return [p for layer in order for p in layer.parameters() if not p.stop_gradient]
    return [p for p in model.parameters() if not getattr(p, "stop_gradient", False)]


def batches(shape=(TOKENS, 12), steps=40, classes=CLASSES, seed=0, size=BATCH):
    """Classes around centres, so that there is something to learn."""
    data = np.random.default_rng(seed)
    centres = data.normal(size=(classes, *shape))
    labels = data.integers(0, classes, (steps, size))
    return (centres[labels] + data.normal(size=(steps, size, *shape))).astype(np.float32), labels


@dataclass
class Recipe:
    """How both sides train; the two functions take parameters and give an optimizer."""

    torch: Any = lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)
    paddle: Any = lambda p, **o: paddle.optimizer.AdamW(
        o.get("rate", 1e-2), parameters=p, weight_decay=o.get("decay", 0.1)
    )
    trainer: dict = field(default_factory=dict)


class Module(pl.LightningModule):
    def __init__(self, network, make):
        super().__init__()
        self.network, self.make = network, make

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make(self.parameters())


class Dataset(paddle.io.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x.reshape(-1, *x.shape[2:]), y.reshape(-1, 1)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


def train_torch(folder, network, recipe, data, every=4):
    x, y = data
    flat = torch.utils.data.TensorDataset(torch.from_numpy(x.reshape(-1, *x.shape[2:])), torch.from_numpy(y.ravel()))
    loader = torch.utils.data.DataLoader(flat, batch_size=y.shape[1])
    callback = LightningCallback(folder, every_n_steps=every)
    pl.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [callback], **recipe.trainer}).fit(
        Module(network, recipe.torch), loader
    )


def train_paddle(folder, network, optimizer, data, every=4, loss=None, **options):
    x, y = data
    model = paddle.Model(network)
    model.prepare(optimizer, loss or paddle.nn.CrossEntropyLoss())
    callback = HapiCallback(folder, every_n_steps=every, **options)
    model.fit(Dataset(x, y), batch_size=y.shape[1], epochs=1, shuffle=False, verbose=0, callbacks=[callback])

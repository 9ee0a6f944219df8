"""A training loop in either framework, recorded with packs; and the same steps done again."""

from __future__ import annotations

import numpy as np
import paddle
import torch

import padiff
from replay.vits import CLASSES, SIZE, PaddleViT, TorchViT

ACCUMULATED, BATCH, CLIP = 2, 4, 0.5


class Torch:
    name, ViT = "torch", TorchViT
    cross_entropy = staticmethod(torch.nn.functional.cross_entropy)

    @staticmethod
    def seed(number):
        torch.manual_seed(number)

    @staticmethod
    def tensor(array):
        return torch.from_numpy(array)

    @staticmethod
    def adamw(net, rate=0.01):
        return torch.optim.AdamW(net.parameters(), rate, weight_decay=0.05)

    @staticmethod
    def momentum(net, rate=0.05):
        return torch.optim.SGD(net.parameters(), rate, momentum=0.9)

    @staticmethod
    def update(net, optimizer, clip=CLIP):
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    @staticmethod
    def rate(optimizer, value):
        for group in optimizer.param_groups:
            group["lr"] = value

    @staticmethod
    def values(net):
        return [tensor.detach().numpy().copy() for tensor in net.state_dict().values()]

    @staticmethod
    def drawn():
        return torch.rand(4).numpy()


class Paddle:
    name, ViT = "paddle", PaddleViT
    cross_entropy = staticmethod(paddle.nn.functional.cross_entropy)

    @staticmethod
    def seed(number):
        paddle.seed(number)

    @staticmethod
    def tensor(array):
        return paddle.to_tensor(array)

    @staticmethod
    def adamw(net, rate=0.01):
        # Its clipping leaves out the 1e-6 that torch's has: of no account here.
        clip = paddle.nn.ClipGradByGlobalNorm(CLIP)
        return paddle.optimizer.AdamW(rate, parameters=net.parameters(), weight_decay=0.05, grad_clip=clip)

    @staticmethod
    def momentum(net, rate=0.05):
        return paddle.optimizer.Momentum(rate, 0.9, parameters=net.parameters())

    @staticmethod
    def update(net, optimizer, clip=CLIP):
        optimizer.step()
        optimizer.clear_grad()

    @staticmethod
    def rate(optimizer, value):
        optimizer.set_lr(value)

    @staticmethod
    def values(net):
        return [tensor.numpy().copy() for tensor in net.state_dict().values()]

    @staticmethod
    def drawn():
        return paddle.rand([4]).numpy()


SIDES = {"torch": Torch, "paddle": Paddle}


def images(number, batch=BATCH):
    random = np.random.RandomState(number)
    return random.randn(batch, 3, SIZE, SIZE).astype("float32"), random.randint(0, CLASSES, batch)


def train(side, folder, steps=4, packs=None, net=None, optimizer=None, started=None, **options):
    """Train; returns losses, weights at the end, and what the generator gives next."""
    side.seed(3)
    net = side.ViT() if net is None else net
    net.train()
    optimizer = (side.adamw if optimizer is None else optimizer)(net)
    more = {} if packs is None else {"replay_every_n_steps": packs}
    losses = []
    with padiff.record(net, folder, optimizer=optimizer, name=side.name, **more, **options) as rec:
        for step in range(steps):
            if started is not None:
                started(step, net, optimizer)
            for micro in range(ACCUMULATED):
                x, y = images(ACCUMULATED * step + micro)
                loss = side.cross_entropy(net(side.tensor(x)), side.tensor(y)) / ACCUMULATED
                loss.backward()
                losses.append(loss.item())
            side.update(net, optimizer)
            side.rate(optimizer, 0.01 * 0.8 ** (step + 1))
            rec.try_dump()
    return losses, side.values(net), side.drawn()


def replayed(side, reference, folder, net=None, optimizer=None, during=None, **options):
    """The packed steps again, as a user's loop does them; returns the report."""
    side.seed(11)
    net = side.ViT() if net is None else net
    net.train()
    optimizer = side.adamw(net, 0.5) if optimizer is None else optimizer
    with padiff.replay(reference, net, folder, optimizer=optimizer, **options) as replay:
        for step in replay:
            if during is not None:
                during(step, net, optimizer)
            for batch in step.batches:
                loss = side.cross_entropy(net(*batch.inputs), *batch.labels) / len(step.batches)
                loss.backward()
            side.update(net, optimizer)
    return replay.report

"""Trainings as people write their loops: accumulation, clipping, a GAN, frozen parts, and others."""

from __future__ import annotations

import numpy as np
import paddle
import torch

from .training import Training


class Accumulation(Training):
    """Three micro-batches a step; the fault leaves one out."""

    def step(self, number, log):
        total, parts = 0.0, 2 if self.fault and number == 2 else 3
        for part in range(parts):
            loss = self.loss(3 * number + part) / parts
            loss.backward()
            log(loss)
            total += float(loss.detach())
        self.update()
        return total


class Clipping(Accumulation):
    """Gradients clipped by their global norm; the fault clips at another norm."""

    def optimize(self):
        self.norm = 0.2 if self.fault else 0.1
        if self.kit.name == "torch":
            return [torch.optim.SGD(self.model.parameters(), lr=0.1)]
        clip = paddle.nn.ClipGradByGlobalNorm(self.norm)
        return [paddle.optimizer.SGD(0.1, parameters=self.model.parameters(), grad_clip=clip)]

    def step(self, number, log):
        loss = self.loss(number)
        loss.backward()
        log(loss)
        if self.kit.name == "torch":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)
        self.update()
        return float(loss.detach())


class Gan(Training):
    """Two models in one, two optimizers that step by turns; the fault is the discriminator's learning rate."""

    def build(self):
        kit = self.kit

        class Both(kit.Net):
            def build(self):
                self.generator = kit.Sequential(kit.Linear(2, 6), kit.ReLU(), kit.Linear(6, 4))
                self.discriminator = kit.Sequential(kit.Linear(4, 6), kit.ReLU(), kit.Linear(6, 2))

        return Both()

    def optimize(self):
        kit, model = self.kit, self.model
        rate = 0.11 if self.fault else 0.1
        return [kit.sgd(model.generator.parameters(), 0.1), kit.sgd(model.discriminator.parameters(), rate)]

    def step(self, number, log):
        kit, model, data = self.kit, self.model, np.random.default_rng(number)
        generate, judge = self.optimizers
        noise, real = kit.tensor(data.normal(size=(5, 2))), kit.tensor(data.normal(size=(5, 4)))
        ones, zeros = kit.tensor(np.ones(5), "int64"), kit.tensor(np.zeros(5), "int64")
        fake = model.generator(noise)
        loss = kit.cross_entropy(model.discriminator(real), ones)
        loss = loss + kit.cross_entropy(model.discriminator(fake.detach()), zeros)
        loss.backward()
        judge.step()
        kit.zero(judge)
        other = kit.cross_entropy(model.discriminator(fake), ones)
        other.backward()
        generate.step()
        kit.zero(generate)
        kit.zero(judge)
        log(loss)
        log(other)
        return float(loss.detach()) + float(other.detach())


class Frozen(Accumulation):
    """The first layer is frozen; the fault trains it."""

    def optimize(self):
        if not self.fault:
            for parameter in self.model[0].parameters():
                self.kit.freeze(parameter)
        return super().optimize()

    step = Training.step


class Skipping(Frozen):
    """Blocks are left out at random (stochastic depth); the fault leaves out another one in step 2."""

    #: Whether paddle's ``clear_grad`` leaves zeros, as it does by default.
    zeros = False
    #: Which of the three blocks run, step by step.
    KEPT = ((1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 0))

    def build(self):
        kit = self.kit

        class Net(kit.Layer):
            kept = (1, 1, 1)

            def __init__(self):
                super().__init__()
                for k in range(3):
                    setattr(self, f"block{k}", kit.Sequential(kit.Linear(4, 4), kit.ReLU()))
                self.head = kit.Linear(4, 3)

            def forward(self, x):
                for k, kept in enumerate(self.kept):
                    if kept:
                        x = x + getattr(self, f"block{k}")(x)
                return self.head(x)

        return Net()

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def step(self, number, log):
        self.model.kept = (0, 1, 1) if self.fault and number == 2 else self.KEPT[number]
        return super().step(number, log)

    def update(self):
        if self.kit.name == "torch" or self.zeros:
            super().update()
        else:
            # As torch: without a gradient, where paddle's default is one of zeros, which the optimizer consumes.
            self.optimizers[0].step()
            self.optimizers[0].clear_grad(set_to_zero=False)


class Lengths(Frozen):
    """Sequences of another length in each step; the fault cuts those of step 3 short."""

    LENGTHS = (3, 9, 5, 7)

    def build(self):
        kit = self.kit
        embedding = torch.nn.Embedding if kit.name == "torch" else paddle.nn.Embedding

        return kit.net(
            lambda net, tokens: net.head(net.mix(net.words(tokens)).tanh().mean(1)),
            words=embedding(10, 4),
            mix=kit.Linear(4, 6),
            head=kit.Linear(6, 3),
        )

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def batch(self, number, shape=(6, 4), classes=3):
        length = self.LENGTHS[number] - (1 if self.fault and number == 3 else 0)
        data = np.random.default_rng(number)
        labels, tokens = data.integers(0, classes, 6), data.integers(0, 10, (6, self.LENGTHS[number]))
        return self.kit.tensor(tokens[:, :length], "int64"), self.kit.tensor(labels, "int64")


class Evaluating(Frozen):
    """An evaluation without gradients in every step; the fault forgets ``eval()``."""

    def build(self):
        kit = self.kit
        norm = torch.nn.BatchNorm1d if kit.name == "torch" else paddle.nn.BatchNorm1D
        return kit.Sequential(kit.Linear(4, 8), norm(8), kit.ReLU(), kit.Linear(8, 3))

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def step(self, number, log):
        loss = super().step(number, log)
        if not self.fault:
            self.model.eval()
        with self.kit.no_grad():
            self.loss(100 + number)
            self.loss(200 + number)
        self.model.train()
        return loss

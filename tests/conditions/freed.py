"""Trainings with tensors whose memory is gone, smaller than they are, or in other tensors.

As a script it trains each of them, plain and recorded, into a folder: reading such memory ends the process, so this is
tried in another one first.
"""

from __future__ import annotations

import faulthandler
import sys
import warnings
from pathlib import Path

import torch
from kit.frameworks import TORCH

from .training import OPTIONS, Training, train


class Elsewhere(torch.Tensor):
    """A tensor made of another one, which says that it begins somewhere within memory that it has not."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=8, dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach())
        raise NotImplementedError(f"{func} is not there")


def without_memory(tensor, left=0):
    """The tensor, after its memory was freed but for some bytes."""
    tensor.untyped_storage().resize_(left)
    return tensor


def part(dtype=torch.float32):
    return torch.zeros(100_000, dtype=dtype)[16:]


#: What a layer hands out besides, and why it is not recorded.
MADE = {
    "freed": (lambda: without_memory(part()), "its memory was freed: 0 bytes are left of the 400000 that it needs"),
    "freed sign": (lambda: without_memory(part(torch.complex64)).conj(), "its memory was freed: 0 bytes are left"),
    "freed sixteen bits": (lambda: without_memory(part(torch.bfloat16)), "its memory was freed: 0 bytes are left"),
    "cut off": (lambda: without_memory(part(), 400), "its memory was freed: 400 bytes are left of the 400000"),
    "transposed": (lambda: without_memory(torch.zeros(300, 400).t()[3:]), "its memory was freed: 0 bytes are left"),
    "elsewhere": (lambda: Elsewhere(torch.ones(4, 4)), "tensors of the type Elsewhere have no memory of their own"),
}


class Handing(torch.nn.Module):
    """Hands out, beside what it is given, something that is made anew."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return x * 1, self.make()


class Handed(Training):
    """A net whose middle hands out a tensor without memory; the fault is the rate."""

    make = None

    def build(self):
        class Net(torch.nn.Module):
            def __init__(self, make):
                super().__init__()
                self.one, self.made, self.two = torch.nn.Linear(4, 8), Handing(make), torch.nn.Linear(8, 3)

            def forward(self, x):
                return self.two(self.made(self.one(x))[0])

        return Net(self.make)

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.12 if self.fault else 0.1)]


class Flat(Handed):
    """All parameters are views of one flat tensor, which has memory only from the first call of a step to its update,
    as FSDP has it. Every other step accumulates: in it no optimizer steps.
    """

    steps = 6

    def __init__(self, kit, fault=False):
        super().__init__(kit, fault)
        #: What the parameters hold after each step.
        self.after = []
        # There is nothing to look at when the training is over.
        self.kit = type("Kit", (type(kit),), {"state": lambda self, model: {}})()

    def build(self):
        return torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.ReLU(), torch.nn.Linear(80, 3))

    def batch(self, number, shape=(6, 64), classes=3):
        return super().batch(number, shape, classes)

    def optimize(self):
        parameters = list(self.model.parameters())
        self.flat = torch.cat([torch.zeros(16), *(p.detach().reshape(-1) for p in parameters)])
        views = self.flat[16:].split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views):
            parameter.data = view.view(parameter.shape)
        self.kept = self.flat.clone()
        without_memory(self.flat)
        return super().optimize()

    def step(self, number, log):
        self.flat.untyped_storage().resize_(self.kept.nbytes)
        self.flat.copy_(self.kept)
        loss = self.loss(number)
        loss.backward()
        log(loss)
        if number % 2:
            self.update()
        self.kept.copy_(self.flat)
        self.after.append(self.kept[16:].numpy().copy())
        without_memory(self.flat)
        return float(loss.detach())


def handed(name):
    return type(name, (Handed,), {"make": staticmethod(MADE[name][0])})


KINDS = {**{name: handed(name) for name in MADE}, "flat": Flat}


def main(folder: str) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    for name, kind in KINDS.items():
        for way, options in OPTIONS.items():
            print(name, way, flush=True)
            train(kind(TORCH), Path(folder) / name / way, options)


if __name__ == "__main__":
    main(*sys.argv[1:])

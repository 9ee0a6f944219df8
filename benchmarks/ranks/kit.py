"""What a planted fault of a training on several processes is, and what a good verdict says of it."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

#: Steps of every training; what happens once happens at `EVENT`.
STEPS, EVENT = 4, 2


@dataclass(frozen=True)
class Planted:
    """One fault.

    Attributes:
        name: what is wrong, and what `train` gets.
        alone: whether the run's own folder tells it: it is about what ranks hold alike, or must not.
        step: the first at which it can show.
        rank: whose fault it is; None where all ranks are wrong alike, or where two of them only tell that they differ.
        places: pattern of a parameter, buffer or layer of which one has to be named; empty: any.
        words: patterns of which one has to be in the sentence (a finding's, or a first diff's with its cause).
        twin: the clean training to compare with, where it is not the one called ``""``.
    """

    name: str
    alone: bool = True
    step: int = EVENT
    rank: int | None = None
    places: str = ""
    words: tuple[str, ...] = ()
    twin: str = ""


@dataclass(frozen=True)
class Program:
    """A module of this folder: ``train(name, rank, world, record)`` trains as the fault or clean way of that name says.

    Attributes:
        clean: ways to train without a fault, none of which may give an alarm; the first is the reference.
    """

    name: str
    framework: str
    world: int
    faults: tuple[Planted, ...]
    clean: tuple[str, ...] = ("",)
    options: tuple[tuple[str, Any], ...] = ()


def recorder(folder: str, **options: Any):
    """What programs call in the place of ``padiff.record``: given no folder, it records nothing."""
    if not folder:
        return lambda *_, **__: nullcontext()

    def record(model: Any, **given: Any):
        import padiff

        return padiff.record(model, folder, **given, **options)

    return record


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.ranks.{name}")

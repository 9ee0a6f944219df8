"""A pair of models whose layers are known to answer to each other, and how such a pair is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kit.frameworks import PADDLE, TORCH
from kit.nets import randomized

from .copying import same

#: The path of a model itself, for parameters that no sublayer owns.
ROOT = "(root)"


@dataclass(frozen=True)
class Pair:
    """Two models, and the truth about them.

    Attributes:
        name: what tests call it.
        build: makes (reference, candidate), each with random weights of its own; both can be put into eval mode.
        inputs: positional arguments for each, the same numbers.
        layers: the true map: (reference path, candidate path) of all layers that own parameters. A fused layer answers
            to several, so it stands in several entries.
        transfer: copies the reference's weights into the candidate by hand, after which outputs are equal. Raises
            `MismatchError` where that can't be done (negative pairs only).
        evidence: ``definition`` where the live models alone tell (names, types, shapes, order of definition);
            ``execution`` where only the order in which layers run tells.
        same: whether the two compute the same function.
        differs: for negative pairs, the reference's layer where they differ.
        extra: layers with no partner, of the reference and of the candidate.
        shows: where a negative pair differs: in the ``output``, or only after a step in ``training`` mode.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]
    inputs: Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]]
    layers: tuple[tuple[str, str], ...]
    transfer: Callable[[Any, Any], None]
    evidence: str = "definition"
    same: bool = True
    differs: str = ""
    extra: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    shows: str = "output"


def links(text, blocks=2):
    """The map that ``text`` tells: two paths a line, a line with ``{i}`` once for each block."""
    found = []
    for line in filter(str.strip, text.splitlines()):
        for index in range(blocks if "{i}" in line else 1):
            ref, cand = line.replace("{i}", str(index)).split()
            found.append((ref, cand))
    return tuple(found)


def straight(layers):
    """A transfer that copies layer by layer, as the map says."""

    def transfer(ref, cand):
        for paths in layers:
            same(ref, paths[0], cand, paths[1])

    return transfer


def pair(name, reference, candidate, data, layers, transfer=None, kits=(TORCH, PADDLE), **more):
    """A `Pair` of two functions that make a model from a kit, and of input arrays."""

    def build():
        return randomized(kits[0], reference(kits[0]), 11), randomized(kits[1], candidate(kits[1]), 22)

    def inputs():
        return tuple(tuple(kit.tensor(each, None) for each in data) for kit in kits)

    return Pair(name, build, inputs, layers, transfer or straight(layers), **more)


def normal(*shape, seed=3):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def tokens(*shape, vocabulary=13, seed=4):
    return np.random.default_rng(seed).integers(0, vocabulary, size=shape).astype("int64")

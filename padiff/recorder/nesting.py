"""How deep a model may be nested for its calls to be recorded: Python bounds how deep calls are nested."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from padiff.model.selection import Node
from padiff.records import ROOT
from padiff.system.warn import warn

# Frames of a layer in a layer, as Python counts them (3.11, torch 2.13; paddle has one less): the layer's `__call__`,
# two functions of the framework, `forward`. A hook adds one to each layer that has one.
_FRAMES = 4
# Frames of recording a call, and of what the training's loop is in when it calls the model; 40 were measured.
_RESERVE = 120


def within_reach(nodes: Sequence[Node]) -> Sequence[Node]:
    """The layers that can have hooks without the training ending in a RecursionError.

    They are all, but in models that are nested beyond reason. What is left out is warned of.
    """
    deepest = max(map(_depth, nodes), default=0)
    frames = sys.getrecursionlimit() - _RESERVE
    if (_FRAMES + 1) * deepest <= frames:
        return nodes
    reach = max(frames - _FRAMES * deepest, 0)
    warn(
        f"padiff: the model's layers are nested {deepest} deep; calls of those deeper than {reach} are not recorded, "
        f"for Python nests {sys.getrecursionlimit()} calls at most (sys.setrecursionlimit)"
    )
    return [node for node in nodes if _depth(node) <= reach]


def _depth(node: Node) -> int:
    return 0 if node.path == ROOT else node.path.count(".") + 1

"""The maximum nesting depth of recorded layers, which follows from Python's recursion limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from padiff.model.selection import Node
from padiff.records import ROOT
from padiff.system.warn import warn

# Stack frames per nested layer (Python 3.11, torch 2.13; one less in paddle): the layer's `__call__`, two functions of
# the framework, `forward`. A hook adds one frame.
_FRAMES = 4
# Stack frames reserved for recording a call and for the callers of the training loop; 40 were measured.
_RESERVE = 120


def within_reach(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return the layers that can have hooks without a RecursionError in the training.

    All layers are returned, except in extremely nested models. A warning names the depth from which on layers are left
    out.
    """
    deepest = max(map(_depth, nodes), default=0)
    frames = sys.getrecursionlimit() - _RESERVE
    if (_FRAMES + 1) * deepest <= frames:
        return nodes
    reach = max(frames - _FRAMES * deepest, 0)
    warn(
        f"the model's layers are nested {deepest} deep; calls of those deeper than {reach} are not recorded, "
        f"for Python nests {sys.getrecursionlimit()} calls at most (sys.setrecursionlimit)"
    )
    return [node for node in nodes if _depth(node) <= reach]


def _depth(node: Node) -> int:
    return 0 if node.path == ROOT else node.path.count(".") + 1

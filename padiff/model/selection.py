"""White and black lists: selection of the layers to record."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.errors import SelectionError, UsageError
from padiff.records import ROOT
from padiff.system.terminal import nearest

MODES = ("self", "sublayers", "all")


@dataclass(frozen=True)
class Node:
    """A live layer with all of its paths; the first path is its name."""

    path: str
    layer: Any
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)


def select(
    nodes: Sequence[Node],
    white_list: Iterable[Any] | None = None,
    black_list: Iterable[Any] | None = None,
    hidden: Iterable[Any] = (),
) -> frozenset[str]:
    """Return the paths of the layers to record.

    Args:
        nodes: the model's layers.
        white_list: items to record; the black list is ignored if this one has items.
        black_list: items not to record.
        hidden: layers whose sublayers are never recorded (those of a layer map).

    An item is a layer object, a layer class or a path pattern (``encoder.*``, matched as a shell does, ``*`` also
    matches dots), or a pair of one of these and a mode: ``self`` means the layer alone, ``sublayers`` the layers below
    it, ``all`` both (the default).

    Raises:
        SelectionError: an item matches no layer; the message names the nearest paths.
        UsageError: an unknown mode, or an item of another type.
    """
    everything = frozenset(node.path for node in nodes)
    if white_list is not None and (white := _matching(nodes, white_list, "white_list")):
        chosen = white
    elif black_list is not None:
        chosen = everything - _matching(nodes, black_list, "black_list")
    else:
        chosen = everything
    return chosen - _matching(nodes, [(item, "sublayers") for item in hidden], "layer_map")


def find_paths(nodes: Sequence[Node], item: Any, where: str) -> list[str]:
    """Return the paths of the layers that one item of a list selects, in the model's order."""
    if isinstance(item, str):
        matches = [n.path for n in nodes if any(fnmatch.fnmatchcase(path, item) for path in n.paths)]
        if not matches:
            paths = [path for node in nodes for path in node.paths]
            raise SelectionError(f"{where}: the pattern {item!r} matches no layer of the model. {nearest(item, paths)}")
    elif isinstance(item, type):
        matches = [n.path for n in nodes if isinstance(n.layer, item)]
        if not matches:
            kinds = sorted({type(n.layer).__name__ for n in nodes})
            raise SelectionError(
                f"{where}: the model has no layer of the class {item.__module__}.{item.__qualname__}; "
                f"it has {', '.join(kinds[:12])}"
            )
    else:
        matches = [n.path for n in nodes if n.layer is item]
        if not matches:
            raise SelectionError(
                f"{where}: {_short(item)} is no layer of the model. Give a layer object of this very model, "
                "a layer class, or a path pattern such as 'encoder.*'"
            )
    return matches


def _matching(nodes: Sequence[Node], items: Iterable[Any], where: str) -> frozenset[str]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise UsageError(f"{where} has to be a list of layers, classes or path patterns, got {_short(items)}")
    selected: set[str] = set()
    for entry in items:
        item, mode = with_mode(entry, where)
        for path in find_paths(nodes, item, where):
            node = next(n for n in nodes if n.path == path)
            if mode in ("self", "all"):
                selected.add(path)
            if mode in ("sublayers", "all"):
                selected.update(n.path for n in nodes if _is_below(n, node))
    return frozenset(selected)


def with_mode(entry: Any, where: str) -> tuple[Any, str]:
    """Return a list's item and its mode.

    Raises:
        UsageError: an unknown mode.
    """
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], str):
        item, mode = entry
        if mode not in MODES:
            raise UsageError(f"{where}: unknown mode {mode!r}; the modes are {', '.join(MODES)}")
        return item, mode
    return entry, "all"


def _is_below(node: Node, above: Node) -> bool:
    if above.path == ROOT:
        return node.path != ROOT
    return any(path.startswith(f"{top}.") for path in node.paths for top in above.paths)


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:77]}..."

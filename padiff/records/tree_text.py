"""Layer tree as text, with a marked layer."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.records.both import Both
from padiff.records.models import Models
from padiff.records.recorded import ROOT, Layer, is_below
from padiff.system.printable import printable

#: Marker of a layer.
HERE = "    <---  *** HERE ***"
# Maximum number of lines; a longer tree is cut to the surroundings of the mark.
_MOST_LINES = 120
# Number of layers shown before and after a layer, in addition to the layers that contain it.
_NEAR = 3
_GAP = "    ..."
_BETWEEN = 4


def tree_text(layers: Sequence[Layer], marked: str | None = None) -> str:
    """Return the tree as text, a line for each layer; `marked` is the path of the layer to mark."""
    lines = [_line(layers, position, layer.path == marked) for position, layer in enumerate(layers)]
    place = next((k for k, layer in enumerate(layers) if layer.path == marked), 0)
    start = max(0, min(place - _MOST_LINES // 2, len(lines) - _MOST_LINES))
    shown = lines[start : start + _MOST_LINES]
    if start:
        shown.insert(0, f"    ... {start} layers above")
    if start + _MOST_LINES < len(lines):
        shown.append(f"    ... {len(lines) - start - _MOST_LINES} layers below")
    return "\n".join(shown)


def around_lines(layers: Sequence[Layer], marked: str) -> list[str]:
    """Return the lines of a tree near a layer: the layers that contain it, and a few before and after it."""
    place = next((k for k, layer in enumerate(layers) if layer.path == marked), None)
    if place is None:
        return []
    shown = [k for k, layer in enumerate(layers) if abs(k - place) <= _NEAR or is_below(marked, layer.path) or not k]
    lines: list[str] = []
    before = -1
    for k in shown:
        lines += [_GAP] if k > before + 1 else []
        lines.append(_line(layers, k, k == place))
        before = k
    return lines + ([_GAP] if before + 1 < len(layers) else [])


def place_lines(
    models: Models, names: Both[str], paths: Both[str | None], stacks: Both[tuple[str, ...]], width: int
) -> list[str]:
    """Return both trees near two layers with the lines of code that call them; empty if neither layer exists.

    The trees are side by side if they fit into `width` columns, else one below the other.
    """
    sides = models.layers.zip(paths).map(lambda side: around_lines(side[0], side[1]) if side[1] else [])
    if not any(sides):
        return []
    heads = names.zip(models.frameworks).map(lambda side: f"    {printable(side[0])} ({printable(side[1])})")
    left, right = heads.zip(sides).map(lambda side: [side[0], *(side[1] or ["    no such layer"])])
    # Side by side, the stacks of both trees start in the same row.
    height = max(len(left), len(right)) if any(stacks) else 0
    for side, stack in zip((left, right), stacks):
        side += [""] * (height - len(side)) + _stack_lines(stack)
    column = max(map(len, left)) + _BETWEEN
    if column + max(map(len, right)) > width:
        return [*left, "", *right]
    rows = max(len(left), len(right))
    padded = [*left, *[""] * (rows - len(left))], [*right, *[""] * (rows - len(right))]
    return [f"{reference.ljust(column)}{candidate}".rstrip() for reference, candidate in zip(*padded)]


def _stack_lines(stack: Sequence[str]) -> list[str]:
    heads = ["    called at ", *["         from "] * len(stack)]
    return [f"{head}{printable(line.replace(' ', ' in ', 1))}" for head, line in zip(heads, stack)]


def _line(layers: Sequence[Layer], position: int, here: bool) -> str:
    layer = layers[position]
    depth = 0 if layer.path == ROOT else layer.path.count(".") + 1
    name = f"({layer.path.rsplit('.', 1)[-1]}) " if depth else ""
    last = not any(_is_sibling(layer, later) for later in layers[position + 1 :])
    branch = "" if not depth else "     " * (depth - 1) + (" +--- " if last else " |--- ")
    return f"    {branch}{printable(name + layer.type)}{HERE if here else ''}"


def _is_sibling(layer: Layer, later: Layer) -> bool:
    above = layer.path.rpartition(".")[0]
    return later.path.rpartition(".")[0] == above and later.path != ROOT

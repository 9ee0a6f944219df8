"""A layer tree as text, with the place marked."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.records import ROOT, Layer

_MARK = "    <---  *** HERE ***"
# A longer tree shows what is around the mark only.
_MOST_LINES = 120


def tree_text(layers: Sequence[Layer], marked: str | None = None) -> str:
    """The tree, a layer a line; ``marked`` is the path of the layer to point at."""
    lines: list[tuple[str, bool]] = []
    for position, layer in enumerate(layers):
        depth = 0 if layer.path == ROOT else layer.path.count(".") + 1
        name = f"({layer.path.rsplit('.', 1)[-1]}) " if depth else ""
        last = not any(_is_sibling(layer, other) for other in layers[position + 1 :])
        branch = "" if not depth else "     " * (depth - 1) + (" +--- " if last else " |--- ")
        here = layer.path == marked
        lines.append((f"    {branch}{name}{layer.type}{_MARK if here else ''}", here))
    place = next((k for k, (_, here) in enumerate(lines) if here), 0)
    start = max(0, min(place - _MOST_LINES // 2, len(lines) - _MOST_LINES))
    shown = [text for text, _ in lines[start : start + _MOST_LINES]]
    if start:
        shown.insert(0, f"    ... {start} layers above")
    if start + _MOST_LINES < len(lines):
        shown.append(f"    ... {len(lines) - start - _MOST_LINES} layers below")
    return "\n".join(shown)


def _is_sibling(layer: Layer, other: Layer) -> bool:
    above = layer.path.rpartition(".")[0]
    return other.path.rpartition(".")[0] == above and other.path != ROOT

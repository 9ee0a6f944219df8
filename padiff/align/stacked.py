"""Parameters that one model stacks in one tensor and the other keeps in a list: the matrices of experts.

Such a layer gets a child for each element of its stack, so that the rest of the alignment sees two lists.
`StackedLayers` names these children's parameters as what they are: elements of the stacked one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from padiff.align.runtime_evidence import RuntimeEvidence, Values
from padiff.align.slices import ParameterPair, Slice
from padiff.records import ROOT, Both, Layer, Parameter, RunInfo
from padiff.sketches.sketch import Sketch

# Number of axes of stacked matrices, and of their stacked biases.
_MATRICES, _BIASES = 3, 2
_ELEMENT = re.compile(r"^(.*?)\.?(\d+)$")


@dataclass(frozen=True)
class StackedLayers:
    """The elements of one model's stacks, as layers.

    Attributes:
        elements: layer and position of each element, by the path of the layer that stands for it.
        shapes: shapes of the stacked parameters, by layer and slot.
    """

    elements: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    shapes: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def seen(self, seen: RuntimeEvidence) -> RuntimeEvidence:
        """Return the observations, with the values of the elements."""
        if not self.elements or seen.values is None:
            return seen
        return replace(seen, values=self._values(seen.values))

    def _values(self, read: Values) -> Values:
        def values(path: str, slot: str) -> np.ndarray | Sketch | None:
            if path not in self.elements:
                return read(path, slot)
            layer, number = self.elements[path]
            stack = read(layer, slot)
            return stack[number] if isinstance(stack, np.ndarray) else None

        return values

    def slices(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """Return slices, with those of elements as slices of the stacked parameter."""
        return tuple(self._slice(each) if each.layer in self.elements else each for each in slices)

    def _slice(self, slice_: Slice) -> Slice:
        layer, number = self.elements[slice_.layer]
        return replace(slice_, layer=layer, shape=self.shapes[layer, slice_.slot], element=number)


def unstacked(infos: Both[RunInfo]) -> tuple[Both[RunInfo], Both[StackedLayers]]:
    """Return both runs, with layers for the elements of stacks that the other side keeps in lists; and these layers."""
    lists = infos.map(_lists)
    sides = [_unstacked(info, others) for info, others in zip(infos, lists.swapped())]
    return Both(*(side[0] for side in sides)), Both(*(side[1] for side in sides))


def real_pairs(pairs: Iterable[ParameterPair], stacks: Both[StackedLayers]) -> tuple[ParameterPair, ...]:
    """Return pairs of parameters, with elements as slices of the stacked parameters."""
    if not any(side.elements for side in stacks):
        return tuple(pairs)
    return tuple(ParameterPair(*(side.slices(slices) for side, slices in zip(stacks, pair))) for pair in pairs)


def _lists(info: RunInfo) -> set[tuple[int, int]]:
    """Return the number of layers, and of the elements of their parameters, of each list of alike layers."""
    sizes: dict[str, int] = {}
    for layer in info.layers:
        size = sum(math.prod(p.shape) for p in layer.parameters if p.role == "parameter" and not p.tied_to)
        path = layer.path
        while size and path != ROOT:
            sizes[path] = sizes.get(path, 0) + size
            path = path.rpartition(".")[0] or ROOT
    lists: dict[str, list[int]] = {}
    for path, size in sizes.items():
        match = _ELEMENT.match(path)
        if match is not None:
            lists.setdefault(match[1], []).append(size)
    return {(len(each), sum(each)) for each in lists.values() if len(each) > 1 and len(set(each)) == 1}


def _unstacked(info: RunInfo, lists: Collection[tuple[int, int]]) -> tuple[RunInfo, StackedLayers]:
    layers: list[Layer] = []
    elements: dict[str, tuple[str, int]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    paths = {layer.path for layer in info.layers}
    for layer in info.layers:
        stack = _stack(layer, lists)
        names = (
            [f"{number}" if layer.path == ROOT else f"{layer.path}.{number}" for number in range(stack[0].shape[0])]
            if stack
            else []
        )
        if not stack or paths & set(names):
            layers.append(layer)
            continue
        slots = {p.slot for p in stack}
        rest = tuple(p for p in layer.parameters if p.slot not in slots)
        layers.append(replace(layer, parameters=rest, children=layer.children + len(names)))
        inside = tuple(replace(p, shape=p.shape[1:]) for p in stack)
        layers += [Layer(name, layer.type, layer.kind, inside, recorded=layer.recorded) for name in names]
        elements |= {name: (layer.path, number) for number, name in enumerate(names)}
        shapes |= {(layer.path, p.slot): p.shape for p in stack}
    if not elements:
        return info, StackedLayers()
    return replace(info, layers=tuple(layers)), StackedLayers(elements, shapes)


def _stack(layer: Layer, lists: Collection[tuple[int, int]]) -> list[Parameter]:
    """Return the parameters of a layer that hold as many elements as a list of the other side; empty if none do."""
    own = [p for p in layer.parameters if p.role == "parameter" and not p.tied_to]
    matrices = [p for p in own if len(p.shape) == _MATRICES]
    for count in {p.shape[0] for p in matrices}:
        here = [p for p in matrices if p.shape[0] == count]
        biases = [p for p in own if len(p.shape) == _BIASES and p.shape[0] == count]
        for some in ([*here, *biases], here):
            if (count, sum(math.prod(p.shape) for p in some)) in lists:
                return sorted(some, key=own.index)
        alone = [p for p in here if (count, math.prod(p.shape)) in lists]
        if alone:
            return alone
    return []

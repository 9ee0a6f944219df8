"""Pairs of parameters or of their rows, stacked ones too, ambiguities about storage, and what running showed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from padiff.records import LOOP, ROOT, Both, Layer, Parameter, RunInfo, Step, is_functional
from padiff.records.step_schema import without_values
from padiff.sketches.sketch import Sketch


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter, or some rows or columns of it.

    A matrix has the order (out, in) here. Its rows form ``groups`` equal groups (1: a single group; the number of heads
    if query, key and value alternate head by head); the slice contains the rows ``start`` to ``stop`` of each group.

    Attributes:
        layer, slot: the parameter.
        shape: the shape in which the framework stores it.
        layout: ``in_out`` if the stored matrix is transposed.
        stop: `None` for all rows to the end.
        columns: start and stop of a matrix's columns; `None` for all columns.
        axes: permutation that gives the parameter the other side's order of axes; empty for the same order.
        label: name of the rows (``key``), if both sides store them in one parameter.
        element: position in a stack of matrices along the first axis, to which all other fields then apply; `None` for
            a parameter that is no stack.
    """

    layer: str
    slot: str
    shape: tuple[int, ...]
    layout: str = ""
    groups: int = 1
    start: int = 0
    stop: int | None = None
    columns: tuple[int, int] | None = None
    axes: tuple[int, ...] = ()
    label: str = ""
    element: int | None = None

    @property
    def whole(self) -> bool:
        return self.stop is None and self.columns is None and self.element is None

    @property
    def site(self) -> str:
        return f"{self.layer}/{self.slot}" + ("" if self.whole else f"[{self.rows_text}]")

    @property
    def rows_text(self) -> str:
        rows = ":" if self.stop is None else f"{self.start}:{self.stop}"
        columns = f", {self.columns[0]}:{self.columns[1]}" if self.columns is not None else ""
        if self.element is not None:
            rows = f"{self.element}" if self.stop is None else f"{self.element}, {rows}"
        return rows + (f" of each of {self.groups}" if self.groups > 1 else "") + columns

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Return the slice of a stored parameter, as (out, in)."""
        matrix = self._as_out_in(stored)
        if self.stop is not None:
            matrix = matrix[self.rows(len(matrix))]
        return matrix if self.columns is None else matrix[:, self.columns[0] : self.columns[1]]

    def write(self, stored: np.ndarray, values: np.ndarray) -> None:
        """Write the slice's values, as (out, in), into an array of the stored shape."""
        matrix = self._as_out_in(stored)
        if self.columns is not None:
            matrix = matrix[:, self.columns[0] : self.columns[1]]
        if self.stop is None:
            matrix[...] = values.reshape(matrix.shape)
        else:
            rows = self.rows(len(matrix))
            matrix[rows] = values.reshape(len(rows), *matrix.shape[1:])

    def rows(self, count: int) -> np.ndarray:
        """Return the indices of the slice's rows.

        Args:
            count: number of the parameter's rows.
        """
        indices: np.ndarray = np.arange(count).reshape(self.groups, -1)[:, self.start : self.stop].reshape(-1)
        return indices

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Return the shape of the array that `take` returns."""
        shape = self.shape if self.element is None else self.shape[1:]
        shape = tuple(shape[axis] for axis in self.axes) or shape
        if self.layout == "in_out" and len(shape) == 2:
            shape = shape[::-1]
        if self.stop is not None and shape:
            shape = (self.groups * (self.stop - self.start), *shape[1:])
        return shape if self.columns is None else (shape[0], self.columns[1] - self.columns[0], *shape[2:])

    def _as_out_in(self, stored: np.ndarray) -> np.ndarray:
        if self.element is not None:
            stored = stored[self.element]
        if self.axes:
            return stored.transpose(self.axes)
        return stored.T if self.layout == "in_out" and stored.ndim == 2 else stored


@dataclass(frozen=True, slots=True)
class ParameterPair(Both[tuple[Slice, ...]]):
    """Parameters, or rows of them, with the same values. Several slices on a side are summed (two biases of an
    LSTM).
    """


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """A choice between forms of storage that names and shapes do not decide; it applies to all layers of a class.

    Attributes:
        about: subject of the choice, e.g. ``order of rows in GPTAttention.qkv_proj of the candidate``.
        options: the possible answers; the first one is the default.
        answer: the answer that values or outputs gave; empty if there is none.
    """

    about: str
    options: tuple[str, ...]
    answer: str = ""


#: ``values(path, slot)``: the values of a layer's parameter, or `None` if they are not available.
Values = Callable[[str, str], "np.ndarray | Sketch | None"]


@dataclass(frozen=True)
class RuntimeEvidence:
    """Observations from running a model, in addition to its tree.

    Attributes:
        order: position of each layer's first forward call, by path; layers that were not called are absent.
        outputs: shape of the first output of each layer's first call, by path.
        values: the parameters' values at the start; `None` if they are not available.
        trained: paths of layers with parameters that an optimizer has changed.
    """

    order: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Values | None = None
    trained: frozenset[str] = frozenset()

    @classmethod
    def from_step(cls, step: Step) -> RuntimeEvidence:
        """Return the observations of a recorded step."""
        order: dict[str, int] = {}
        outputs: dict[str, tuple[int, ...]] = {}
        weights: dict[tuple[str, str], int] = {}
        trained: set[str] = set()
        for place, record in enumerate(without_values(step.records)):
            if record.stage == "forward" and record.layer != LOOP and not is_functional(record.slot):
                order.setdefault(record.layer, record.order)
                outputs.setdefault(record.layer, record.shape)
            elif record.stage == "weight":
                weights[record.layer, record.slot] = place
            elif record.stage == "update":
                trained.add(record.layer)

        def values(path: str, slot: str) -> np.ndarray | Sketch | None:
            place = weights.get((path, slot))
            if place is None:
                return None
            source = step.records[place].source
            return source.sketch if source.sketched else source.read()

        return cls(order, outputs, values if weights else None, frozenset(trained))


#: Observations of models that were not run.
NOTHING_SEEN = Both(RuntimeEvidence(), RuntimeEvidence())


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

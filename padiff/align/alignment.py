"""What an alignment is: layers and parameters that answer to each other, how sure that is, and what is left over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np

from padiff.records import LOOP, ROOT, SIDES, Both, Layer, Sketched, Step, TensorSource, is_functional
from padiff.sketches.sketch import Sketch

#: Gives a parameter's values by the layer's path and the slot, or `None` where they are not at hand.
Values = Callable[[str, str], "np.ndarray | Sketch | None"]


# From which confidence on a pair needs no further proof.
_SURE = 0.8

_T = TypeVar("_T")


@dataclass(frozen=True)
class Seen:
    """What running a model shows of it, besides its tree.

    Attributes:
        order: position of each layer's first forward call, by path; layers that were not called are absent.
        outputs: shape of the first output of each layer's first call, by path.
        values: the parameters' values at the start, where they are at hand.
    """

    order: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Values | None = None

    @classmethod
    def of(cls, step: Step) -> Seen:
        """What a recorded step shows."""
        order: dict[str, int] = {}
        outputs: dict[str, tuple[int, ...]] = {}
        weights: dict[tuple[str, str], TensorSource] = {}
        for record in step.records:
            if record.stage == "forward" and record.layer != LOOP and not is_functional(record.slot):
                order.setdefault(record.layer, record.order)
                outputs.setdefault(record.layer, record.shape)
            elif record.stage == "weight":
                weights[record.layer, record.slot] = record.source

        def values(path: str, slot: str) -> np.ndarray | Sketch | None:
            source = weights.get((path, slot))
            if isinstance(source, Sketched):
                return source.sketch
            return None if source is None else source.read()

        return cls(order, outputs, values if weights else None)


#: Of models that were not run.
NOTHING_SEEN = Both(Seen(), Seen())


@dataclass(frozen=True, slots=True)
class LayerPair(Both[Layer]):
    """Two layers that answer to each other.

    Attributes:
        reason: the kind of evidence that decided: ``given``, ``path``, ``names``, ``kinds``, ``values``, ``execution``,
            ``order``, ``only one fits``, ``kind`` (though the shapes differ), ``contents``.
        confidence: 0 to 1; 1 for what a person gave.
        evidence: the reasons in words.
        alternatives: paths of the candidate's layers that would have fitted nearly as well.
    """

    reason: str
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()

    @property
    def ambiguous(self) -> bool:
        return bool(self.alternatives)


@dataclass(frozen=True, slots=True)
class SplitPair(Both[tuple[Layer, ...]]):
    """A layer of one side that answers to several of the other, in the order of its parts."""

    reason: str
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, or some rows or columns of it.

    A matrix is seen as (out, in) here. Its rows lie in ``groups`` equal groups (1: all together; the number of heads
    where query, key and value alternate head by head); of each group the rows ``start`` to ``stop`` are meant.

    Attributes:
        layer, slot: whose parameter.
        shape: as the framework stores it.
        layout: ``in_out`` where the stored matrix is transposed.
        stop: `None` for all rows to the end.
        columns: of a matrix, the columns from and to; `None` for all of them.
        axes: the order of axes that makes it like the other side's, where it is another.
        label: what the rows are called (``key``), where both sides have them in one.
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

    @property
    def whole(self) -> bool:
        return self.stop is None and self.columns is None

    @property
    def site(self) -> str:
        return f"{self.layer}/{self.slot}" + ("" if self.whole else f"[{self.rows_text}]")

    @property
    def rows_text(self) -> str:
        rows = ":" if self.stop is None else f"{self.start}:{self.stop}"
        columns = f", {self.columns[0]}:{self.columns[1]}" if self.columns is not None else ""
        return rows + (f" of each of {self.groups}" if self.groups > 1 else "") + columns

    def take(self, stored: np.ndarray) -> np.ndarray:
        """What is meant of a stored parameter, as (out, in)."""
        turned = self._turned(stored)
        if self.stop is not None:
            turned = turned[self.rows(len(turned))]
        return turned if self.columns is None else turned[:, self.columns[0] : self.columns[1]]

    def put(self, stored: np.ndarray, values: np.ndarray) -> None:
        """Write what is meant, given as (out, in), into an array of the stored shape."""
        turned = self._turned(stored)
        if self.columns is not None:
            turned = turned[:, self.columns[0] : self.columns[1]]
        if self.stop is None:
            turned[...] = values.reshape(turned.shape)
        else:
            rows = self.rows(len(turned))
            turned[rows] = values.reshape(len(rows), *turned.shape[1:])

    def rows(self, count: int) -> np.ndarray:
        """Indices of the meant rows among so many."""
        found: np.ndarray = np.arange(count).reshape(self.groups, -1)[:, self.start : self.stop].reshape(-1)
        return found

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of what `take` gives."""
        shape = tuple(self.shape[axis] for axis in self.axes) or self.shape
        if self.layout == "in_out" and len(shape) == 2:
            shape = shape[::-1]
        if self.stop is not None and shape:
            shape = (self.groups * (self.stop - self.start), *shape[1:])
        return shape if self.columns is None else (shape[0], self.columns[1] - self.columns[0], *shape[2:])

    def _turned(self, stored: np.ndarray) -> np.ndarray:
        if self.axes:
            return stored.transpose(self.axes)
        return stored.T if self.layout == "in_out" and stored.ndim == 2 else stored


@dataclass(frozen=True, slots=True)
class ParameterPair(Both[tuple[Part, ...]]):
    """Parameters, or rows of them, that hold the same. Several on a side are added up (two biases of an LSTM)."""


def unzipped(pairs: Iterable[Both[_T]]) -> Both[list[_T]]:
    """Of many pairs, what stands on either side."""
    pairs = list(pairs)
    return Both([pair.reference for pair in pairs], [pair.candidate for pair in pairs])


@dataclass(frozen=True, slots=True)
class Doubt:
    """How something is stored that neither names nor shapes tell; the same choice holds for all layers of a class.

    Attributes:
        about: what it is about, e.g. ``order of rows in GPTAttention.qkv_proj of the candidate``.
        options: the possible answers; the first one was taken unless there is an answer.
        answer: the one that values or outputs gave.
    """

    about: str
    options: tuple[str, ...]
    answer: str = ""


# Pairs, and layers without a partner, that a printed alignment lists.
_SHOWN = 40


@dataclass(frozen=True, repr=False)
class Alignment:
    """The layers and parameters of two runs that answer to each other, in the reference's order of definition.

    Attributes:
        pairs: layers, one to one.
        reference_only, candidate_only: layers without a partner.
        splits: layers that answer to several.
        parameters: parameters, or parts of them.
        reference_parameters, candidate_parameters: ``layer/slot`` of parameters without a partner.
        doubts: what had to be assumed.
        cut_elsewhere: pairs of layers, by path, that hold the same but end at other places of the computation, so
            that their outputs are not compared.
        differ_inside: pairs of layers, by path, of the runs' own layer maps that do not hold the same: what they give
            is compared, what they hold is not.
    """

    pairs: tuple[LayerPair, ...]
    reference_only: tuple[Layer, ...] = ()
    candidate_only: tuple[Layer, ...] = ()
    splits: tuple[SplitPair, ...] = ()
    parameters: tuple[ParameterPair, ...] = ()
    reference_parameters: tuple[str, ...] = ()
    candidate_parameters: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    cut_elsewhere: frozenset[tuple[str, str]] = frozenset()
    differ_inside: frozenset[tuple[str, str]] = frozenset()

    @property
    def layers(self) -> Both[list[Layer]]:
        """All layers of either side."""
        paired, split = unzipped(self.pairs), unzipped(self.splits)
        return Both(
            [*paired.reference, *self.reference_only, *chain(*split.reference)],
            [*paired.candidate, *self.candidate_only, *chain(*split.candidate)],
        )

    @property
    def surplus(self) -> Both[tuple[str, ...]]:
        """The outermost layers of either side that hold parameters none of which has a partner."""
        covered = unzipped(self.parameters).map(lambda side: {part.layer for part in chain(*side)})
        left = Both(self.reference_parameters, self.candidate_parameters)
        return Both(*(_surplus(*side) for side in zip(self.layers, left, covered)))

    def __str__(self) -> str:
        lines = [repr(self)[1:-1]]
        width = max((len(pair.reference.path) for pair in self.pairs), default=0)
        lines += [
            f"  {pair.reference.path.ljust(width)}  {pair.candidate.path}  (by {pair.reason}, {pair.confidence:.2f})"
            for pair in self.pairs[:_SHOWN]
        ]
        if len(self.pairs) > _SHOWN:
            lines.append(f"  ... and {len(self.pairs) - _SHOWN} more pairs")
        for side, layers in zip(SIDES, (self.reference_only, self.candidate_only)):
            if layers:
                more = f", and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
                lines.append(f"{side} only: {', '.join(layer.path for layer in layers[:_SHOWN])}{more}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        left = len(self.reference_parameters) + len(self.candidate_parameters)
        return (
            f"<Alignment: {len(self.pairs)} layers paired, {len(self.reference_only)} left of the reference and "
            f"{len(self.candidate_only)} of the candidate; {left} parameters without a partner>"
        )

    @property
    def sure(self) -> bool:
        """Whether all parameters have partners, and nothing had to be assumed or was a close choice."""
        open_doubts = (doubt for doubt in self.doubts if not doubt.answer)
        left = (*self.reference_parameters, *self.candidate_parameters, *open_doubts, *self.ambiguous)
        found = [pair.confidence for pair in self.pairs if pair.reference.parameters]
        found += [split.confidence for split in self.splits]
        return not left and min(found, default=1.0) >= _SURE

    @property
    def ambiguous(self) -> tuple[LayerPair, ...]:
        """The pairs that another partner would fit nearly as well."""
        return tuple(pair for pair in self.pairs if pair.ambiguous)


def _surplus(layers: Iterable[Layer], left: Iterable[str], covered: Collection[str]) -> tuple[str, ...]:
    gone = {site.rpartition("/")[0] for site in left}
    whole = [
        layer.path
        for layer in sorted(layers, key=lambda layer: layer.path)
        if layer.path in gone or any(path.startswith(f"{layer.path}.") for path in gone)
        if not any(path == layer.path or path.startswith(f"{layer.path}.") for path in covered)
        if layer.path != ROOT
    ]
    return tuple(path for path in whole if not any(path.startswith(f"{above}.") for above in whole))

"""Picture of both tensors of a first diff, in some kilobytes."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.both import Both


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a pair: its index and both values."""

    index: tuple[int, ...]
    values: Both[float]


@dataclass(frozen=True, slots=True)
class Picture:
    """Histograms, worst elements, and a small grid of the error of two tensors.

    Attributes:
        shape: shape of the reference's tensor.
        edges: edges of the bins of both histograms, one more than there are bins.
        counts: number of finite values of each side in each bin.
        worst: the elements with the largest differences, the worst first.
        error: the largest ``|c - r|`` in each cell of a small grid; its rows are ranges of one axis of the tensor.
        rows, columns: meaning of the grid's rows and columns, in words.
    """

    shape: tuple[int, ...]
    edges: tuple[float, ...]
    counts: Both[tuple[int, ...]]
    worst: tuple[Element, ...]
    error: tuple[tuple[float, ...], ...]
    rows: str
    columns: str

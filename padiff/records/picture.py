"""What the two tensors of a first diff look like, in some kilobytes."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.both import Both


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a pair: where it is, and both values."""

    index: tuple[int, ...]
    values: Both[float]


@dataclass(frozen=True, slots=True)
class Picture:
    """Distributions, worst elements and a small picture of the error of two tensors.

    Attributes:
        shape: of the reference's tensor.
        edges: of the bins of both histograms, one more than bins.
        counts: how many finite values of either side are in each bin.
        worst: the elements that are furthest apart, the worst first.
        error: the largest ``|c - r|`` of each field of a small grid; rows are one axis of the tensor, folded.
        rows, columns: what the grid's rows and columns are, in words.
    """

    shape: tuple[int, ...]
    edges: tuple[float, ...]
    counts: Both[tuple[int, ...]]
    worst: tuple[Element, ...]
    error: tuple[tuple[float, ...], ...]
    rows: str
    columns: str

"""Floors: how far off each tensor of a step is by rounding alone, measured on the very model and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from padiff.records.sources import TensorSource

#: Stages that floors are measured of: what a step computes. What it starts from is moved by hand.
MEASURED_STAGES = frozenset({"forward", "loss", "backward", "grad", "update"})


@dataclass(frozen=True, slots=True)
class Floor:
    """What rounding makes of one tensor.

    Attributes:
        error: largest L2 norm of its change, for a move by one unit in the last place.
        norm: its own L2 norm.
        size: how many elements it has.
    """

    error: float
    norm: float
    size: int

    @property
    def relative(self) -> float:
        """The error as a share of the norm; 0 of what is zero."""
        return self.error / self.norm if self.norm > 0 else 0.0


@dataclass(frozen=True)
class Floors:
    """The floors of a step.

    Attributes:
        step: its number.
        runs: how often it was run again, moved.
        units: by how many units in the last place each of these runs was moved.
        dtype: of whose last places: the coarsest that the step computes in.
        seed: of the random signs.
        sites: the floor of each tensor, by the site of its record.
        exact: the tensors of the step in float64, likewise; empty: it was not run in float64.
        rank: which process of a distributed run.
        notes: sentences about what could not be measured.
    """

    step: int
    runs: int
    units: tuple[int, ...]
    dtype: str
    seed: int
    sites: Mapping[str, Floor]
    exact: Mapping[str, TensorSource] = field(default_factory=dict)
    rank: int = 0
    notes: tuple[str, ...] = ()

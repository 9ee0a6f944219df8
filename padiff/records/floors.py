"""Floors: the error of each tensor of a step by rounding alone, measured with the same model and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from padiff.records.sources import TensorSource

#: Stages that have floors: everything that a step computes. Inputs and weights are what the measurement perturbs.
MEASURED_STAGES = frozenset({"forward", "loss", "backward", "grad", "update"})


@dataclass(frozen=True, slots=True)
class Floor:
    """Rounding error of one tensor.

    Attributes:
        error: largest L2 norm of the tensor's change, per perturbation of one unit in the last place.
        norm: L2 norm of the tensor.
        size: number of elements of the tensor.
    """

    error: float
    norm: float
    size: int

    @property
    def relative(self) -> float:
        """Return the error as a share of the norm; 0 if the norm is 0."""
        return self.error / self.norm if self.norm > 0 else 0.0


@dataclass(frozen=True)
class Floors:
    """The floors of a step.

    Attributes:
        step: number of the step.
        runs: number of perturbed runs of the step.
        units: size of the perturbation of each run, in units in the last place.
        dtype: the coarsest dtype that the step computes in; the units are those of its last place.
        seed: seed of the random signs.
        sites: the floor of each tensor, by the site of its record.
        exact: the tensors of the step in float64, by the site of the record; empty: the step was not run in float64.
        rank: number of the process of a distributed run.
        notes: sentences about tensors that could not be measured.
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

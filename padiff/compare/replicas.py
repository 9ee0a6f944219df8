"""What the processes of one training hold in common is checked against itself; that needs no other run.

Processes that share out a batch keep the whole model each. Their weights, reduced gradients and updates are equal to
the bit; what each of them reads is not.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.records import ROOT, Record, RunInfo, Step
from padiff.records.parts import PARTIAL

# Of sketches, the numbers that were added up on two machines may differ in their last digits.
_SKETCHES_DIFFER = 1e-6
# Gradients that are one multiple of another rank's: float32 rounds their ratio by some units in the last place.
_ONE_FACTOR = 1e-5
_NAMED = 3


class RankFault(enum.Enum):
    """What is wrong between two processes of one training.

    Attributes:
        fault: whether the training is wrong; else it is worth knowing.
    """

    OTHER_START = "other weights from the first recorded step on"
    NOT_REDUCED = "a gradient that was not reduced"
    OWN_FACTOR = "gradients multiplied by a factor of the process's own"
    OWN_UPDATE = "an update of its own from an equal gradient"
    WRITTEN = "a weight that something other than the optimizer changed"
    SAME_BATCH = "the same batch"

    @property
    def fault(self) -> bool:
        return self not in (RankFault.OTHER_START, RankFault.SAME_BATCH)


@dataclass(frozen=True)
class RankFinding:
    """A difference between two processes that should not be, or an equality.

    Attributes:
        kind: what it is.
        step: the first step that shows it.
        ranks: the process that others are held against, and the one that departs.
        sites: where, ``layer/slot``, in the order of the records; empty for batches.
        error: the largest relative L2 difference; 0 for what is equal.
        sentence: the finding in words.
    """

    kind: RankFault
    step: int
    ranks: tuple[int, int]
    sites: tuple[str, ...]
    error: float
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class ReplicaCheck:
    """Looks at the steps of a run in their order, each as all ranks saw it.

    Attributes:
        findings: so far; of each kind and rank the first.
    """

    def __init__(self, info: RunInfo) -> None:
        self._parameters = {
            (layer.path, parameter.slot)
            for layer in info.layers
            for parameter in layer.parameters
            if parameter.role == "parameter"
        }
        self._trainable = {
            (layer.path, parameter.slot)
            for layer in info.layers
            for parameter in layer.parameters
            if parameter.role == "parameter" and parameter.trainable and not parameter.tied_to
        }
        self.findings: list[RankFinding] = []
        #: Sites whose weights differ from the start: parts of a model that is spread out, or a missing broadcast.
        self._apart: dict[int, set[tuple[str, str]]] = {}
        self._known: set[tuple[RankFault, int]] = set()

    def look(self, steps: Sequence[Step]) -> None:
        """Look at one step; reads its weights, gradients, updates and what goes into the model."""
        if len(steps) < 2:
            return
        first, *others = sorted(steps, key=lambda step: step.rank)
        own = self._of(first)
        for step in others:
            self._compare(first, *_replicated(own, self._of(step)), step)

    def _of(self, step: Step) -> Mapping[str, dict[tuple[str, str], Record]]:
        found: dict[str, dict[tuple[str, str], Record]] = defaultdict(dict)
        for record in step.records:
            key = record.layer, record.slot
            if record.stage in ("weight", "grad", "update") and key in self._parameters:
                found[record.stage].setdefault(key, record)
        return found

    def _compare(
        self,
        first: Step,
        own: Mapping[str, dict[tuple[str, str], Record]],
        other: Mapping[str, dict[tuple[str, str], Record]],
        step: Step,
    ) -> None:
        differ = {stage: _differing(own[stage], other[stage]) for stage in ("weight", "grad", "update")}
        begins = step.rank not in self._apart
        apart = self._apart.setdefault(step.rank, set(differ["weight"]) if begins else set())
        where = first.rank, step.rank
        if begins and apart:
            self._find(RankFault.OTHER_START, step.number, where, differ["weight"], len(own["weight"]))
        if begins and not apart and own["weight"].keys() >= self._trainable <= other["weight"].keys():
            self._same_batch(first, step)
        for stage in differ:
            differ[stage] = {key: error for key, error in differ[stage].items() if key not in apart}
        if differ["grad"]:
            factor = _one_factor(own["grad"], other["grad"], differ["grad"])
            kind = RankFault.NOT_REDUCED if factor is None else RankFault.OWN_FACTOR
            self._find(kind, step.number, where, differ["grad"], len(own["grad"]), factor)
        elif differ["update"] and own["grad"]:
            self._find(RankFault.OWN_UPDATE, step.number, where, differ["update"], len(own["update"]))
        elif differ["weight"]:
            self._find(RankFault.WRITTEN, step.number, where, differ["weight"], len(own["weight"]))

    def _find(
        self,
        kind: RankFault,
        number: int,
        ranks: tuple[int, int],
        differ: Mapping[tuple[str, str], float],
        of: int,
        factor: float | None = None,
    ) -> None:
        # What follows from an earlier finding is no news: weights drift apart once a gradient was not reduced.
        if any(rank == ranks[1] and known.fault for known, rank in self._known) or (kind, ranks[1]) in self._known:
            return
        self._known.add((kind, ranks[1]))
        sites = tuple(f"{layer}/{slot}" for layer, slot in differ)
        sentence = _sentence(kind, number, ranks, sites, of, factor)
        self.findings.append(RankFinding(kind, number, ranks, sites, max(differ.values(), default=0.0), sentence))

    def _same_batch(self, first: Step, step: Step) -> None:
        inputs = [
            {record.site: record for record in one.records if record.layer == ROOT and record.stage == "input"}
            for one in (first, step)
        ]
        shared = [(record, inputs[1][site]) for site, record in inputs[0].items() if site in inputs[1]]
        telling = [pair for pair in shared if not _constant(pair[0])]
        if telling and len(shared) == len(inputs[0]) and all(_error(*pair) == 0 for pair in telling):
            self._find(RankFault.SAME_BATCH, step.number, (first.rank, step.rank), {}, 0)


def check_replicas(info: RunInfo, steps: Iterable[Sequence[Step]]) -> list[RankFinding]:
    """Check the processes of a run against each other.

    Args:
        info: of the run.
        steps: in their order, each as all ranks saw it.

    Raises:
        PadiffError: a tensor can't be read.
    """
    check = ReplicaCheck(info)
    for step in steps:
        check.look(step)
    return check.findings


_Held = Mapping[str, dict[tuple[str, str], Record]]


def _replicated(own: _Held, other: _Held) -> tuple[_Held, _Held]:
    """What of two processes' parameters is the same part of the same: all else differs, as it has to."""
    if not any(record.part is not None for side in (own, other) for held in side.values() for record in held.values()):
        return own, other
    found: tuple[_Held, _Held] = defaultdict(dict), defaultdict(dict)
    for stage, records in own.items():
        for key, record in records.items():
            partner = other.get(stage, {}).get(key)
            if partner is not None and _place(record) == _place(partner) is not None:
                found[0][stage][key], found[1][stage][key] = record, partner
    return found


def _place(record: Record) -> object:
    """Which elements a record has, equal for replicas; `None` for a term of a sum."""
    part = record.part
    if part is None:
        return (0,) * len(record.shape), record.shape, record.shape
    return None if part.kind == PARTIAL else (part.offset, record.shape, part.shape)


def _differing(
    own: Mapping[tuple[str, str], Record], other: Mapping[tuple[str, str], Record]
) -> dict[tuple[str, str], float]:
    errors = {key: _error(record, other[key]) for key, record in own.items() if key in other}
    return {key: error for key, error in errors.items() if error > 0}


def _error(a: Record, b: Record) -> float:
    """The relative L2 difference; 0 where they are equal to the bit (of sketches: but for their last digits)."""
    if a.sketch is not None and b.sketch is not None:
        left, right = a.sketch.projection.astype(np.float64), b.sketch.projection.astype(np.float64)
        error = _relative(left, right) if left.shape == right.shape else np.inf
        return error if error > _SKETCHES_DIFFER else 0.0
    if a.sketch is not None or b.sketch is not None:
        return 0.0  # not comparable
    x, y = a.value, b.value
    if x.shape != y.shape:
        return np.inf
    if np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
        return 0.0
    return _relative(x.astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1)) or np.finfo(np.float64).tiny


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    scale, difference = max(float(np.linalg.norm(x)), float(np.linalg.norm(y))), float(np.linalg.norm(x - y))
    if not np.isfinite(difference):
        return np.inf  # NaN or infinity on one side, or at other places
    return difference / scale if scale else 0.0


def _constant(record: Record) -> bool:
    if record.sketch is not None:
        return record.sketch.minimum == record.sketch.maximum
    value = record.value
    return value.size == 0 or bool((value == value.flat[0]).all())


def _one_factor(
    own: Mapping[tuple[str, str], Record],
    other: Mapping[tuple[str, str], Record],
    differ: Mapping[tuple[str, str], float],
) -> float | None:
    """What all gradients of a rank are of the first one's; `None` where they are not one multiple of them."""
    factors = []
    for key in differ:
        a, b = own[key], other[key]
        x, y = (
            r.sketch.projection.astype(np.float64) if r.sketch is not None else r.value.astype(np.float64).reshape(-1)
            for r in (a, b)
        )
        square = float(x @ x) if x.shape == y.shape else 0.0
        if not square or not np.isfinite(square):
            return None
        factor = float(x @ y) / square
        if _relative(factor * x, y) > _ONE_FACTOR:
            return None
        factors.append(factor)
    if len(factors) < 2 or max(factors) - min(factors) > _ONE_FACTOR * abs(factors[0]):
        return None
    return factors[0]


def _sentence(
    kind: RankFault, number: int, ranks: tuple[int, int], sites: Sequence[str], of: int, factor: float | None
) -> str:
    first, rank = ranks
    named = ", ".join(sites[:_NAMED]) + (f" and {len(sites) - _NAMED} more" if len(sites) > _NAMED else "")
    many = "all of them" if len(sites) == of and of > 1 else f"{len(sites)} of {of}"
    if kind is RankFault.OTHER_START:
        return (
            f"Ranks {first} and {rank} hold other weights in the first recorded step ({many}: {named}). Either the "
            "model is spread over processes, or its weights were not broadcast."
        )
    if kind is RankFault.NOT_REDUCED:
        return (
            f"Rank {rank}'s gradient of {named} differs from rank {first}'s since step {number} ({many}): it was not "
            "reduced, or changed by one rank alone."
        )
    if kind is RankFault.OWN_FACTOR:
        return (
            f"Rank {rank}'s gradients are {factor:.6g} times rank {first}'s since step {number} ({many}): each rank "
            "multiplies by a factor of its own, as clipping by its own norm does."
        )
    if kind is RankFault.OWN_UPDATE:
        return (
            f"Rank {rank}'s update of {named} differs from rank {first}'s since step {number} ({many}), and the "
            "gradients are equal: each rank's optimizer has values or a state of its own."
        )
    if kind is RankFault.WRITTEN:
        return (
            f"Rank {rank}'s weight {named} differs from rank {first}'s since step {number} ({many}), and no recorded "
            "gradient or update does: something other than the optimizer wrote it, or a step that was not recorded."
        )
    return f"Ranks {first} and {rank} were given the same batch in step {number}: each should read a part of its own."

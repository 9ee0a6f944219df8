"""Check the replicas of one training against each other: batches, masks, rates, clipping, buffers, weights."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from padiff.compare.rank_draws import (
    STATISTICS,
    MaskCheck,
    classes,
    error,
    is_batch_norm,
    one_factor,
    own_statistics,
    same_samples,
    samples_of,
)
from padiff.errors import PadiffError
from padiff.records import LOOP, Layer, Record, RunInfo, Step, settings_at
from padiff.records.recorded import PARTIAL, SHARD
from padiff.system.terminal import first_few

_NAMED = 3


class RankFault(enum.Enum):
    """Kind of finding between two processes of one training.

    Attributes:
        fault: True if the training is wrong; otherwise the finding is informative.
    """

    OTHER_START = "other weights from the first recorded step on"
    NOT_REDUCED = "a gradient that was not reduced"
    OWN_FACTOR = "gradients multiplied by a factor of the process's own"
    OWN_UPDATE = "an update of its own from an equal gradient"
    WRITTEN = "a weight that something other than the optimizer changed"
    OWN_NORM = "gradients clipped by the norm of the process's own shards"
    OWN_RATE = "a learning rate of its own"
    SAME_BATCH = "the same batch"
    SAME_MASKS = "the same elements dropped"
    OWN_STATISTICS = "a batch norm that counts its own process's samples"
    OWN_BUFFERS = "a buffer that each process works out for itself"

    @property
    def fault(self) -> bool:
        return self in _FAULTS


_FAULTS = frozenset(
    {
        RankFault.NOT_REDUCED,
        RankFault.OWN_FACTOR,
        RankFault.OWN_UPDATE,
        RankFault.WRITTEN,
        RankFault.OWN_NORM,
        RankFault.OWN_RATE,
    }
)


@dataclass(frozen=True)
class RankFinding:
    """Unexpected difference or equality between processes.

    Attributes:
        kind: kind of the finding.
        step: the first step that shows the finding.
        ranks: the reference process, then the processes that differ from it.
        sites: sites of the tensors, ``layer/slot``, in the order of the records; empty for batches.
        error: the largest relative L2 difference; 0 for an equality.
        sentence: the finding in words.
    """

    kind: RankFault
    step: int
    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    error: float
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def sentence(
    kind: RankFault,
    number: int,
    ranks: Sequence[int],
    sites: Sequence[str],
    of: int,
    factor: float | None = None,
    also: str = "",
) -> str:
    """Return a finding in words.

    Args:
        number: number of the step.
        ranks: the reference process, then the processes that differ from it.
        sites: sites of the tensors.
        of: number of compared sites.
        factor: ratio of the gradients to the reference process's gradients.
        also: further evidence, inserted into the sentence.
    """
    first, others = ranks[0], ranks_text(ranks[1:])
    named = first_few(sites, _NAMED)
    many = "all of them" if len(sites) == of and of > 1 else f"{len(sites)} of {of}"
    if kind is RankFault.OTHER_START:
        begins = "begins" if len(ranks) == 2 else "begin"
        return (
            f"{others} {begins} with other weights than rank {first} in the first recorded step ({many}: {named}). "
            "Either the model is spread over processes, or each drew its own and they were not broadcast."
        )
    if kind is RankFault.NOT_REDUCED:
        return (
            f"{others}'s gradient of {named} differs from rank {first}'s since step {number} ({many}): it was not "
            f"reduced, or changed by one rank alone{also}."
        )
    if kind is RankFault.OWN_FACTOR:
        return (
            f"{others}'s gradients are {factor:.6g} times rank {first}'s since step {number} ({many}): each rank "
            "multiplies by a factor of its own, as clipping by its own norm does."
        )
    if kind is RankFault.OWN_UPDATE:
        return (
            f"{others}'s update of {named} differs from rank {first}'s since step {number} ({many}), and the "
            f"gradients are equal: each rank's optimizer has values or a state of its own{also}."
        )
    if kind is RankFault.WRITTEN:
        return (
            f"{others}'s weight {named} differs from rank {first}'s since step {number} ({many}), and no recorded "
            f"gradient or update {also or 'does'}: something other than the optimizer wrote it, or a step that was not "
            "recorded."
        )
    if kind is RankFault.OWN_RATE:
        return (
            f"{others}'s learning rate differs from rank {first}'s since step {number}{also}, though they train the "
            "same parameters: each rank's optimizer or schedule is set by itself."
        )
    if kind is RankFault.OWN_BUFFERS:
        return (
            f"{others}'s buffer {named} differs from rank {first}'s since step {number}, and was equal before: each "
            "rank works it out from its own samples, and one rank's alone goes into a checkpoint."
        )
    if kind is RankFault.SAME_MASKS:
        return (
            f"{ranks_text(ranks)} drop the same elements in {named} in step {number}: their random numbers are of one "
            "seed, and each rank's dropout should draw its own."
        )
    if kind is RankFault.OWN_STATISTICS:
        return (
            f"{ranks_text(ranks)} normalise by their own samples' statistics in {named} since step {number}: with "
            "SyncBatchNorm they would be those of all ranks' samples."
        )
    return f"{ranks_text(ranks)} were given the same batch in step {number}: each should read a part of its own."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the names of processes, as the beginning of a sentence."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


# Smallest share of common parameters at which two processes count as training the same model, or shards of it.
_MOST = 0.5


def differing_learning_rates(
    steps: Sequence[Step], weights: Mapping[tuple[str, str], Mapping[int, Record]]
) -> Iterator[tuple[int, list[int], str]]:
    """Yield a rank of the majority, the ranks whose learning rates differ from the majority's, and the rates in words.

    Args:
        weights: by layer and slot, each process's record of a parameter.
    """
    parameters: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for key, records in weights.items():
        for rank in records:
            parameters[rank].add(key)
    rates = {step.rank: tuple(_rates(step).items()) for step in steps}
    partners: list[list[Step]] = []
    for step in steps:
        keys = parameters[step.rank]
        for group in partners:
            partner = parameters[group[0].rank]
            if keys and len(keys & partner) >= _MOST * max(len(keys), len(partner)):
                group.append(step)
                break
        else:
            partners.append([step])
    for group in partners:
        alike: dict[object, list[Step]] = defaultdict(list)
        for step in group:
            if rates[step.rank]:
                alike[rates[step.rank]].append(step)
        if len(alike) < 2:
            continue
        most, *others = sorted(alike.values(), key=lambda same: (-len(same), same[0].rank))
        for same in others:
            text = rates_text(most[0], same[0])
            if text:
                yield most[0].rank, [step.rank for step in same], text


def rates_text(one: Step, other: Step) -> str:
    """Return the first learning rate that differs between two processes, in words; empty if all are equal."""
    first, second = _rates(one), _rates(other)
    for site, rate in first.items():
        if second.get(site, rate) != rate:
            return f" (learning rate {second[site]:.6g} against {rate:.6g})"
    return ""


def _rates(step: Step) -> dict[str, float]:
    return {
        r.site: float(r.value)
        for r in step.records
        if r.layer == LOOP and r.slot.startswith("learning_rate") and not r.shape
    }


# Largest relative difference of two norms clipped to one limit: clipping adds 1e-6 to the divisor, and float32 rounds.
_ONE_LIMIT = 1e-5
# Largest relative difference of a norm from a known limit; larger, because a chance agreement is less likely.
_THE_LIMIT = 1e-4
# Least relative excess of the total norm over the limit, beyond rounding.
_ABOVE = 1e-3
# Number of processes whose equal norms in one step suffice: chance makes these equal once in 10 ** 8 steps. With two
# processes, two steps have to agree.
_MANY = 3
# Elements that are read and converted to float64 at a time.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class LocalClipping:
    """Evidence of clipping by shard norms.

    Attributes:
        ranks: processes whose norms equal the limit, or the largest norm if the limit is unknown; all processes if
            `recorded`.
        norm: the limit, if known; otherwise the largest norm of a process's shards.
        whole: norm of all shards together.
        recorded: True if clipping returned different norms in the processes.
        since: the first step that shows the fault.
    """

    ranks: tuple[int, ...]
    norm: float
    whole: float
    recorded: bool
    since: int


class NormCheck:
    """Check of a run's gradient clipping, fed with the steps in order."""

    def __init__(self, info: RunInfo) -> None:
        self._settings = info.settings
        #: Number, ranks and norm of the step before, if several processes had equal largest norms in that step.
        self._before: tuple[int, tuple[int, ...], float] | None = None

    def check(self, steps: Sequence[Step]) -> LocalClipping | None:
        """Return the evidence of one step, given all its processes; reads the gradients if they are shards."""
        before, self._before = self._before, None
        shards = {step.rank: _shards(step) for step in steps}
        if not all(shards.values()) or len(shards) < 2:
            return None
        number = steps[0].number
        squares = {
            rank: {place: _square(record) for place, record in rank_values.items()}
            for rank, rank_values in shards.items()
        }
        if any(math.isnan(square) for rank_values in squares.values() for square in rank_values.values()):
            return None  # the sketch is a sample, or values are not finite
        norms = {rank: math.sqrt(sum(rank_values.values())) for rank, rank_values in squares.items()}
        total = math.sqrt(
            sum({place: square for rank_values in squares.values() for place, square in rank_values.items()}.values())
        )
        returned = {step.rank: _given(step) for step in steps}
        different = {norm for norm in returned.values() if norm is not None}
        if None not in returned.values() and max(different) - min(different) > _ABOVE * max(different):
            return LocalClipping(tuple(returned), max(norms.values()), total, True, number)
        limit = self._limit(steps[0])
        if limit is not None:
            at_it = tuple(rank for rank, norm in norms.items() if abs(norm - limit) <= _THE_LIMIT * limit)
            above = total > limit * (1 + _ABOVE)
            return LocalClipping(at_it, limit, total, False, number) if at_it and above else None
        largest = max(norms.values())
        alike = tuple(rank for rank, norm in norms.items() if norm >= largest * (1 - _ONE_LIMIT))
        # Replicas of one shard have equal norms anyway; only different shards are evidence.
        apart = len({tuple(sorted(shards[rank])) for rank in alike})
        if not largest or apart < 2 or total <= largest * (1 + _ABOVE):
            return None
        if apart >= _MANY:
            return LocalClipping(alike, largest, total, False, number)
        if before is not None and abs(before[2] - largest) <= _ONE_LIMIT * largest:
            return LocalClipping(tuple(sorted({*alike, *before[1]})), largest, total, False, before[0])
        self._before = number, alike, largest
        return None

    def _limit(self, step: Step) -> float | None:
        """Return the limit of the global gradient norm; `None` if unknown."""
        settings: Mapping[str, object] = settings_at(self._settings, step.settings)
        limit = settings.get("clip.limit")
        is_global_norm = settings.get("clip.kind") == "global_norm" and settings.get("clip.norm_type", 2.0) == 2.0
        return float(limit) if is_global_norm and isinstance(limit, int | float) and limit > 0 else None


def local_clipping_text(found: LocalClipping, ranks: str) -> str:
    """Return the finding as a sentence.

    Args:
        ranks: the processes, as the beginning of the sentence.
    """
    single = len(found.ranks) == 1
    if found.recorded:
        shown = "the norms that clipping gave differ between ranks, which hold shards of one gradient"
    else:
        shown = (
            f"{'its shards have' if single else 'the shards of each have'} the norm {found.norm:.6g} together, and "
            f"those of all ranks {found.whole:.6g}"
        )
    return (
        f"{ranks} clip{'s' if single else ''} gradients by the norm of {'its' if single else 'their'} own shards since "
        f"step {found.since}: {shown}. Clip by the norm of all shards (torch.nn.utils.clip_grad_norm_ of the model's "
        "parameters, which are DTensors; with FullyShardedDataParallel the model's clip_grad_norm_)."
    )


def _shards(step: Step) -> dict[tuple[object, ...], Record]:
    """Return by place the gradients that the process's optimizers consumed, if some are shards; otherwise an empty
    dict.
    """
    gradients = {
        (r.layer, r.slot, *((r.part.offset, r.shape) if r.part is not None else ())): r
        for r in step.records
        if r.stage == "grad" and r.layer != LOOP
    }
    if any(r.part is not None and r.part.kind == PARTIAL for r in gradients.values()):
        return {}
    sharded = any(r.part is not None and r.part.kind == SHARD and r.shape != r.part.shape for r in gradients.values())
    return gradients if sharded else {}


def _square(record: Record) -> float:
    """Return the squared L2 norm; NaN if unknown."""
    sketch = record.sketch
    if sketch is not None:
        return sketch.mean_square * sketch.size if sketch.looked_at == sketch.size else math.nan
    try:
        value = np.asarray(record.value).reshape(-1)
        total = 0.0
        for start in range(0, value.size, _AT_ONCE):
            part = value[start : start + _AT_ONCE].astype(np.float64)
            total += float(part @ part)
    except (PadiffError, TypeError, ValueError):
        return math.nan
    return total if math.isfinite(total) else math.nan


def _given(step: Step) -> float | None:
    """Return the norm that the step's call of clip_grad_norm returned; `None` unless exactly one such call exists."""
    records = [r for r in step.records if r.layer == LOOP and r.stage == "grad" and r.slot.startswith("clip_grad_norm")]
    if len(records) != 1:
        return None
    try:
        value = float(np.asarray(records[0].value).reshape(()))
    except (PadiffError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


class UnsyncedBuffers(NamedTuple):
    """Buffers that differ between processes.

    Attributes:
        ranks: the rank used as reference, then the ranks whose buffers differ from it.
        sites: sites of the buffers, ``layer/slot``.
        error: the largest relative L2 difference.
    """

    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    error: float


class BufferCheck:
    """Check of a run's buffers, fed with the steps in order.

    Args:
        known: layers and slots of buffers that another check covers.
    """

    def __init__(self, layers: Sequence[Layer], known: Collection[tuple[str, str]]) -> None:
        #: Buffers that were equal so far. Integer buffers count steps or samples and are left out.
        self._equal = {
            (layer.path, p.slot)
            for layer in layers
            for p in layer.parameters
            if p.role == "buffer" and "float" in p.dtype and (layer.path, p.slot) not in known
        }
        self._begun = False

    def check(self, steps: Sequence[Step]) -> UnsyncedBuffers | None:
        """Return the buffers that differ between the processes in one step; at most one report per run."""
        buffers: dict[tuple[str, str], dict[int, Record]] = {}
        for step in steps if self._equal else ():
            for record in step.records:
                key = record.layer, record.slot
                if record.stage == "weight" and key in self._equal:
                    buffers.setdefault(key, {}).setdefault(step.rank, record)
        apart: dict[tuple[str, str], dict[int, float]] = {}
        for key, records in buffers.items():
            (_, first), *others = records.items()
            errors = {rank: error(first, record) for rank, record in others if record.shape == first.shape}
            # Shards, and tables that grow, differ from process to process.
            unsharded = all(r.part is None or r.shape == r.part.shape for r in records.values())
            if not unsharded or len(errors) < len(others):
                self._equal.discard(key)
            elif any(errors.values()):
                apart[key] = {rank: far for rank, far in errors.items() if far}
        begun, self._begun = self._begun, True
        self._equal -= set(apart)
        if not begun or not apart:
            return None
        self._equal.clear()  # reported once; later differences follow from this one
        ranks = sorted({rank for errors_by_rank in apart.values() for rank in errors_by_rank})
        sites = tuple(f"{layer}/{slot}" for layer, slot in apart)
        return UnsyncedBuffers(
            (steps[0].rank, *ranks), sites, max(max(errors_by_rank.values()) for errors_by_rank in apart.values())
        )


__all__ = ["RankFault", "RankFinding", "ReplicaCheck", "check_replicas"]

_STAGES = ("weight", "grad", "update")
_Key = tuple[str, str]
#: Records of one stage: by layer and slot, each rank's record.
_Held = Mapping[_Key, dict[int, Record]]


@dataclass
class _Departs:
    """Differences of one rank from its reference ranks, in one stage.

    Attributes:
        apart: by layer and slot, the reference rank, its record, and this rank's record.
        of: number of tensors that the rank shares with other ranks.
        updated_apart: for weights: True if the updates of the step differ, too.
    """

    apart: dict[_Key, tuple[int, Record, Record]] = field(default_factory=dict)
    of: int = 0
    updated_apart: bool = False

    @property
    def reference(self) -> int:
        return next(iter(self.apart.values()))[0]

    @property
    def error(self) -> float:
        return max(error(expected, actual) for _, expected, actual in self.apart.values())


class ReplicaCheck:
    """Check of a run's replicas, fed with the steps in order, each with all ranks.

    Attributes:
        findings: the findings so far; the first one for each kind and rank.
    """

    def __init__(self, info: RunInfo) -> None:
        self._layers = info.layers
        self._parameters = {
            (layer.path, p.slot) for layer in info.layers for p in layer.parameters if p.role == "parameter"
        }
        self._trainable = {
            (layer.path, p.slot)
            for layer in info.layers
            for p in layer.parameters
            if p.role == "parameter" and p.trainable and not p.tied_to
        }
        self._statistics = {
            (layer.path, p.slot)
            for layer in info.layers
            for p in layer.parameters
            if is_batch_norm(layer) and p.slot in STATISTICS
        }
        self._parameters -= self._statistics
        self._buffers = BufferCheck(info.layers, self._statistics)
        self._masks, self._norms = MaskCheck(info.layers), NormCheck(info)
        #: Number of checked steps, and the number of the latest step.
        self._looked, self._latest = 0, -1
        self.findings: list[RankFinding] = []
        #: Class of equal weights at the start, by layer and rank. Weights differ at the start if a model is split by
        #: hand, or was not broadcast; only weights that were equal are compared with each other.
        self._start: dict[str, dict[int, Hashable]] | None = None
        self._known: set[tuple[RankFault, int]] = set()

    def check(self, steps: Sequence[Step]) -> None:
        """Check one step; reads its weights, gradients, updates, inputs, and some of its outputs."""
        if len(steps) < 2:
            return
        ordered = sorted(steps, key=lambda step: step.rank)
        records = self._of(ordered)
        number = ordered[0].number
        if self._start is None:
            self._start = self._begin(records["weight"])
            self._begun(number)
        self._same_samples(ordered, records["weight"])
        for ranks, places, since in self._masks.check(ordered):
            self._find(RankFault.SAME_MASKS, since, ranks, places, 0.0, 0)
        departs = {stage: self._departing(records[stage]) for stage in _STAGES}
        faults: dict[tuple[RankFault, int, tuple[str, ...], float | None], list[tuple[int, _Departs]]] = defaultdict(
            list
        )
        for step in ordered:
            rank_departs = {stage: departs[stage][step.rank] for stage in _STAGES}
            kind, stage, factor = self._kind(rank_departs, number)
            if kind is not None:
                sites = tuple(f"{layer}/{slot}" for layer, slot in rank_departs[stage].apart)
                faults[kind, rank_departs[stage].reference, sites, factor].append((step.rank, rank_departs[stage]))
        by_rank = {step.rank: step for step in ordered}
        also_of = {
            (key, departing[0][0]): _also(key[0], by_rank, (key[1], departing[0][0]))
            for key, departing in faults.items()
        }
        has_cause = any(also for ((kind, *_), _), also in also_of.items() if kind is RankFault.NOT_REDUCED)
        for key, departing in faults.items():
            kind, reference, sites, factor = key
            ranks = (reference, *(rank for rank, _ in departing))
            also = also_of[key, departing[0][0]]
            if kind is RankFault.WRITTEN and any(entry[1].updated_apart for entry in departing):
                also = "did before this step"
            if kind is RankFault.NOT_REDUCED and has_cause and not also:
                continue  # the fault is in another rank's batch, and came into this gradient by the reduction
            worst, of = max(entry.error for _, entry in departing), departing[0][1].of
            self._find(kind, number, ranks, sites, worst, of, factor, also)
        self._own_norms(ordered)
        for reference, others, text in differing_learning_rates(ordered, records["weight"]):
            self._find(RankFault.OWN_RATE, number, (reference, *others), (), 0.0, 0, also=text)
        self._own_statistics(ordered)
        apart = self._buffers.check(ordered)
        if apart is not None:
            self._find(RankFault.OWN_BUFFERS, number, apart.ranks, apart.sites, apart.error, len(apart.sites))
        self._looked, self._latest = self._looked + 1, number

    def _of(self, steps: Sequence[Step]) -> dict[str, dict[_Key, dict[int, Record]]]:
        records_by_stage: dict[str, dict[_Key, dict[int, Record]]] = {stage: {} for stage in _STAGES}
        for step in steps:
            for record in step.records:
                key = record.layer, record.slot
                if record.stage in records_by_stage and key in self._parameters:
                    records_by_stage[record.stage].setdefault(key, {}).setdefault(step.rank, record)
        return records_by_stage

    def _begin(self, weights: _Held) -> dict[str, dict[int, Hashable]]:
        """Return, by layer, a key of each rank's weights, equal for equal weights; and remember the weights that
        differ.
        """
        keys: dict[str, dict[int, list[Hashable]]] = defaultdict(lambda: defaultdict(list))
        departs: dict[int, _Departs] = defaultdict(_Departs)
        for key, records in weights.items():
            for group in _groups(records):
                for number, same in enumerate(groups := classes(group)):
                    for rank, record in same:
                        keys[key[0]][rank].append((key[1], number))
                        departs[rank].of += len(group) > 1
                        if number:
                            departs[rank].apart[key] = (groups[0][0][0], groups[0][0][1], record)
        self._others = {rank: departure for rank, departure in departs.items() if departure.apart}
        return {layer: {rank: tuple(groups) for rank, groups in ranks.items()} for layer, ranks in keys.items()}

    def _begun(self, number: int) -> None:
        """Report weights that differ in the first step."""
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for rank, departure in self._others.items():
            alike[departure.reference, tuple(f"{layer}/{slot}" for layer, slot in departure.apart)].append(rank)
        for (reference, sites), ranks in alike.items():
            worst, of = max(self._others[rank].error for rank in ranks), self._others[ranks[0]].of
            self._find(RankFault.OTHER_START, number, (reference, *sorted(ranks)), sites, worst, of)

    def _same_samples(self, steps: Sequence[Step], weights: _Held) -> None:
        for same in same_samples(steps, self._looked):
            # Ranks that split a layer see the same samples: compare one rank of each such group.
            apart: list[int] = []
            for rank in same:
                if all(self._shares_out(weights, member, rank) for member in apart):
                    apart.append(rank)
            if len(apart) > 1:
                self._find(RankFault.SAME_BATCH, steps[0].number, tuple(apart), (), 0.0, 0)

    def _own_norms(self, steps: Sequence[Step]) -> None:
        evidence = self._norms.check(steps)
        # For ranks that share gradients, the finding about gradients already reports the fault and its factor.
        named = {rank for kind, rank in self._known if kind.fault}
        if evidence is not None and not named & {*evidence.ranks}:
            text = local_clipping_text(evidence, ranks_text(evidence.ranks))
            self._find(RankFault.OWN_NORM, evidence.since, evidence.ranks, (), 0.0, 0, text=text)

    def _shares_out(self, weights: _Held, first: int, second: int) -> bool:
        """Return True if two processes should read different samples, because either uses the whole model."""
        both = {
            key: (records[first], records[second])
            for key, records in weights.items()
            if first in records and second in records
        }
        parts = [(a.part, b.part) for a, b in both.values() if a.part is not None and b.part is not None]
        if any(a.share != b.share for a, b in parts if a.share >= 0 <= b.share):
            return True
        alike = {key for key, (a, b) in both.items() if _place(a) == _place(b) is not None}
        assert self._start is not None
        same = all(ranks.get(first) == ranks.get(second) for ranks in self._start.values())
        return alike >= self._trainable and same

    def _departing(self, stage_records: _Held) -> dict[int, _Departs]:
        """Return the differences of each rank from the ranks that hold the same part of the same parameter."""
        departures: dict[int, _Departs] = defaultdict(_Departs)
        assert self._start is not None
        for key, records in stage_records.items():
            start = self._start.get(key[0], {})
            for group in _groups(records):
                began: dict[Hashable, list[tuple[int, Record]]] = defaultdict(list)
                for rank, record in group:
                    began[start.get(rank)].append((rank, record))
                for same in (members for members in began.values() if len(members) > 1):
                    first, *others = classes(same)
                    for rank, _ in same:
                        departures[rank].of += 1
                    for rank, record in (entry for variant in others for entry in variant):
                        departures[rank].apart[key] = (first[0][0], first[0][1], record)
        return departures

    def _kind(self, departures: Mapping[str, _Departs], number: int) -> tuple[RankFault | None, str, float | None]:
        """Return the fault of a rank in a step, the stage that shows the fault, and the factor of the gradients."""
        if departures["grad"].apart:
            factor = one_factor((a, b) for _, a, b in departures["grad"].apart.values())
            return (RankFault.NOT_REDUCED if factor is None else RankFault.OWN_FACTOR), "grad", factor
        departures["weight"].updated_apart = bool(departures["update"].apart)
        # The step before was recorded, and equal: a difference before this update does not come from that step.
        written = departures["weight"].apart and self._latest == number - 1
        if departures["update"].apart and departures["grad"].of and not written:
            return RankFault.OWN_UPDATE, "update", None
        return (RankFault.WRITTEN if departures["weight"].apart else None), "weight", None

    def _own_statistics(self, steps: Sequence[Step]) -> None:
        """Report batch norms whose statistics differ, or whose outputs show that each process uses its own samples."""
        if not self._statistics or any(kind is RankFault.OWN_STATISTICS for kind, _ in self._known):
            return
        first, *others = steps
        statistics = {(r.layer, r.slot): r for r in first.records if (r.layer, r.slot) in self._statistics}
        layers: dict[str, float] = {}
        ranks = [first.rank]
        for step in others:
            errors = {
                record.layer: error(statistics[record.layer, record.slot], record)
                for record in step.records
                if record.stage == "weight" and (record.layer, record.slot) in statistics
            }
            apart = {layer: size for layer, size in errors.items() if size > 0}
            apart |= {layer: 0.0 for layer in own_statistics(self._layers, first, step) if layer not in apart}
            ranks += [step.rank] if apart else []
            layers |= apart
        if layers:
            worst = max(layers.values())
            self._find(RankFault.OWN_STATISTICS, first.number, tuple(ranks), tuple(layers), worst, len(layers))

    def _find(
        self,
        kind: RankFault,
        number: int,
        ranks: tuple[int, ...],
        sites: tuple[str, ...],
        worst: float,
        of: int,
        factor: float | None = None,
        also: str = "",
        text: str = "",
    ) -> None:
        # Consequences of an earlier finding are left out: weights drift apart once a gradient was not reduced.
        faulty = {rank for earlier, rank in self._known if earlier.fault}
        # Clipping by shard norms is reported for every rank; it has no reference rank.
        others = ranks if kind is RankFault.OWN_NORM else ranks[1:]
        news = [rank for rank in others if rank not in faulty and (kind, rank) not in self._known]
        if not news:
            return
        self._known.update((kind, rank) for rank in news)
        named = (*ranks[: len(ranks) - len(others)], *news)
        text = text or sentence(kind, number, named, sites, of, factor, also)
        self.findings.append(RankFinding(kind, number, named, sites, worst, text))


def check_replicas(info: RunInfo, steps: Iterable[Sequence[Step]]) -> list[RankFinding]:
    """Check the processes of a run against each other.

    Args:
        info: description of the run.
        steps: the steps in order, each with all ranks.

    Returns:
        The findings, the first one for each kind and rank.

    Raises:
        PadiffError: a tensor can't be read.
    """
    check = ReplicaCheck(info)
    for step in steps:
        check.check(step)
    return check.findings


def _groups(records: Mapping[int, Record]) -> list[list[tuple[int, Record]]]:
    """Group ranks by equal parts of a parameter, with their records.

    Different parts are never compared. Terms of a sum are in no group.
    """
    if all(record.part is None for record in records.values()):
        return [list(records.items())]
    by_place: dict[object, list[tuple[int, Record]]] = defaultdict(list)
    for rank, record in records.items():
        place = _place(record)
        if place is not None:
            by_place[place].append((rank, record))
    return list(by_place.values())


def _place(record: Record) -> object:
    """Return the extent of a record's elements, equal for replicas; `None` for a term of a sum."""
    part = record.part
    if part is None:
        return (0,) * len(record.shape), record.shape, record.shape
    return None if part.kind == PARTIAL else (part.offset, record.shape, part.shape)


def _also(kind: RankFault, steps: Mapping[int, Step], ranks: tuple[int, ...]) -> str:
    """Return further evidence about ranks that differ: learning rates, or inputs that should be equal; empty if
    none.
    """
    expected, actual = steps[ranks[0]], steps[ranks[1]]
    if kind is RankFault.OWN_UPDATE:
        return rates_text(expected, actual)
    shares = [
        {r.part.share for r in step.records if r.part is not None and r.stage == "weight"}
        for step in (expected, actual)
    ]
    if kind is RankFault.NOT_REDUCED and shares[0] and shares[0] == shares[1]:
        samples = samples_of(expected), samples_of(actual)
        if all(samples) and any(error(a, samples[1][site]) > 0 for site, a in samples[0].items() if site in samples[1]):
            return "; their batches differ, too, which have to be equal where layers are split"
    return ""

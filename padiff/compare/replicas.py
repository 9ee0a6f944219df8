"""Check the replicas of one training against each other; no second run is needed.

Processes that share out a batch hold the whole model each, or the same shard of it. Their weights, reduced gradients
and updates are equal to the bit; their inputs are not. The process that differs from the majority is reported,
whichever its number; if only two processes differ, the higher rank is reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from padiff.compare.rank_dropout_masks import MaskCheck
from padiff.compare.rank_duplicate_batches import STATISTICS, is_batch_norm, own_statistics, same_samples, samples_of
from padiff.compare.rank_figures import classes, error, one_factor
from padiff.compare.rank_findings import RankFault, RankFinding, ranks_text, sentence
from padiff.compare.rank_learning_rates import differing_learning_rates, rates_text
from padiff.compare.rank_local_clipping import NormCheck, local_clipping_text
from padiff.compare.rank_unsynced_buffers import BufferCheck
from padiff.records import Record, RunInfo, Step
from padiff.records.parts import PARTIAL

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

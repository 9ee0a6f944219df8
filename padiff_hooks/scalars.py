"""Scalars of a step's report, or of a single run's step, with their TensorBoard runs and tags."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from padiff.records import LOOP, SIDES, Both, Diff, Record, Report, Step, is_loss, is_of_loss
from padiff_hooks.step_lines import Rows
from padiff_hooks.tags import ALL, LOSS, RATE, WORST, Numbered, Stages, Worst

#: ``(tag, value)`` of one step.
Scalars = list[tuple[str, float]]
#: Upper bound for the ratio to the limit, infinity included: a chart can't show infinity.
MOST_TIMES = 1e6
# Lower bound for the ratio of a failed diff, so that the curve is visibly above 1.
_BEYOND = 1.001


@dataclass
class StepScalars:
    """Scalars of one step.

    Attributes:
        verdict: scalars of the run ``diff`` in its first group.
        layers: scalars of the run ``diff`` for each layer.
        own: scalars of the runs ``reference`` and ``candidate``.
        curves: with ``tags="worst"``, the layers that get curves from this step on, by stage.
    """

    verdict: Scalars
    layers: Scalars
    own: Both[Scalars]
    curves: dict[str, list[str]] = field(default_factory=dict)


class Tagging:
    """Maker of the tagged scalars of successive reports.

    Args:
        tags: one of `padiff_hooks.tags.TAGS`.

    Attributes:
        numbered: numbers of the layers.
        stages: stages that have a card.
        worst: layers that have curves with ``tags="worst"``.
    """

    def __init__(self, tags: str) -> None:
        self._tags = tags
        self.numbered, self.stages, self.worst = Numbered(), Stages(), Worst()

    def scalars_of(self, report: Report) -> StepScalars:
        """Return the scalars of one step's report.

        A layer's norm covers all of its slots and calls at the stage; a layer's diff is the largest among them. Layers
        have the reference's paths.
        """
        self.numbered.learn((diff.pair.stage, diff.pair.anchor.layer) for diff in report.diffs)
        own_scalars = Both(*(OwnScalars(self.numbered, self._tags) for _ in SIDES))
        figures_by_place: dict[tuple[str, str], dict[str, float]] = {}
        by_stage: dict[str, float] = {}
        by_layer: dict[tuple[str, str], float] = {}
        for diff in report.diffs:
            anchor, times = diff.pair.anchor, times_allowed(diff)
            place = anchor.stage, _name(anchor)
            if times is not None:
                by_stage[anchor.stage] = max(by_stage.get(anchor.stage, 0.0), times)
                by_layer[place] = max(by_layer.get(place, 0.0), times)
            figures = diff.figures
            if figures is None or is_of_loss(anchor):
                continue
            norms = Both(figures.reference_l2, figures.candidate_l2)
            for scalars, (record, (value, norm)) in own_scalars.zip(diff.pair.sides.zip(figures.values.zip(norms))):
                if record is not None:
                    scalars.add(anchor, value, norm**2)
            if diff.compared:
                worst = figures_by_place.setdefault(place, {"rel_l2": 0.0, "max_abs": 0.0})
                worst["rel_l2"] = max(worst["rel_l2"], figures.rel_l2)
                worst["max_abs"] = max(worst["max_abs"], figures.max_abs)
        curves = {}
        if self._tags == WORST:
            curves = self.worst.choose({place: by_layer.get(place, 0.0) for place in figures_by_place})
        return StepScalars(
            self.stages.scalars(by_stage), list(self._layers(figures_by_place)), own_scalars.map(OwnScalars.all), curves
        )

    def learn(self, places: Sequence[tuple[str, str]], rows: Rows, curves: Mapping[str, Iterable[str]]) -> None:
        """Restore the order of layers and the choice of curves from a step that an earlier process wrote.

        Args:
            places: stage and layer of each row.
            rows: the step's diffs.
            curves: layers that got curves in the step, by stage.
        """
        self.numbered.learn(places)
        by_stage: dict[str, float] = {}
        for (stage, _), times in zip(places, rows.times.tolist()):
            if not math.isnan(times):
                by_stage[stage] = max(by_stage.get(stage, 0.0), times)
        self.stages.scalars(by_stage)
        for stage, layers in curves.items():
            self.worst.keep(stage, layers)

    def _layers(self, figures_by_place: dict[tuple[str, str], dict[str, float]]) -> Scalars:
        scalars: Scalars = []
        largest: dict[str, float] = {}
        for (stage, layer), figures in figures_by_place.items():
            if self._tags == WORST and (stage, layer) not in self.worst:
                continue
            for figure, value in figures.items():
                if figure == "rel_l2" or self._tags == ALL:
                    scalars.append((f"{stage}_{figure}/{self.numbered.tag(layer)}", value))
                tag = f"worst/{stage}_{figure}"
                largest[tag] = max(largest.get(tag, 0.0), value)
        return scalars + (list(largest.items()) if self._tags == ALL else [])


def times_allowed(diff: Diff) -> float | None:
    """Return the ratio of a diff to its limit, above 1 if the diff failed; `None` if nothing was judged."""
    if not diff.counts:
        return None
    if diff.passed:
        return min(diff.excess, 1.0)
    excess = math.inf if diff.problem or math.isnan(diff.excess) else diff.excess
    return min(max(excess, _BEYOND), MOST_TIMES)


def _name(record: Record) -> str:
    return "loss" if is_loss(record) else record.layer


def own_scalars_of(step: Step, tags: str = ALL) -> Scalars:
    """Return the loss, learning rates and per-layer norms of a run that is not compared with another one."""
    numbered = Numbered()
    numbered.learn((record.stage, record.layer) for record in step.records)
    scalars = OwnScalars(numbered, tags)
    for record in step.records:
        if is_of_loss(record) or (tags != ALL and record.layer != LOOP):
            continue
        if record.sketch is not None:
            scalars.add(record, 0.0, record.sketch.l2**2)
            continue
        value = record.value
        wide = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        number = float(value.reshape(())) if record.layer == LOOP else 0.0
        scalars.add(record, number, float(np.square(np.abs(wide)).sum()))
    return scalars.all()


class OwnScalars:
    """Collector of one run's scalars of a step: the loop's values, the loss, and the norm of each layer's tensors."""

    def __init__(self, numbered: Numbered, tags: str) -> None:
        self._numbered, self._tags = numbered, tags
        self._loop: Scalars = []
        self._losses: list[float] = []
        self._squares: dict[str, float] = defaultdict(float)

    def add(self, record: Record, value: float, square: float) -> None:
        """Add a record: its value if the loop reported it, or else its squared norm."""
        if record.layer != LOOP:
            self._squares[f"{record.stage}_l2/{self._numbered.tag(record.layer)}"] += square
        elif record.stage == "loss":
            self._losses.append(value)
        else:
            self._loop.append((record.slot, value))

    def all(self) -> Scalars:
        scalars = [(LOSS, sum(self._losses) / len(self._losses))] if self._losses else []
        for slot, value in self._loop:
            if slot == "learning_rate":
                scalars.append((RATE, value))
            elif self._tags == ALL:
                scalars.append((f"loop/{slot}", value))
        if self._tags == ALL:
            scalars += [(tag, math.sqrt(square)) for tag, square in self._squares.items()]
        return scalars

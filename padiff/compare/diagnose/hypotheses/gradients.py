"""Hypotheses on gradients: what happens between the backward and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.compare.diagnose.hypotheses import mending, ratios
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.scene import (
    Place,
    Scene,
    is_elements,
    place_of,
    rounding_of,
    values_of,
    whole_of,
)
from padiff.model import equivalents
from padiff.records import SIDES, Both, Diff, Pair

# Elements of a gradient that are looked at; and steps before this one that a stale gradient may come from.
_ELEMENTS, _BEFORE = 2048, 4
# Gradients of two right implementations are off by some times what those of the outputs are off, and by so much of
# rounding at least; at most by the share of themselves at which a tensor says nothing any more.
_OF_OUTPUTS, _ROUNDINGS, _AT_MOST = 4.0, 32.0, 1e-3


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, as the optimizers got them.

    Attributes:
        stage: ``grad``, or ``backward`` for those of outputs.
        tensors: those of which some elements are known, both sides; `Prediction.without` is the reference's.
        places: whose they are.
        elements: whether elements of them are known; else projections.
        failed: whether they are diffs.
        norms: of each whole tensor, both sides.
    """

    stage: str
    tensors: tuple[Prediction, ...]
    places: tuple[Place, ...]
    elements: tuple[bool, ...]
    failed: tuple[bool, ...]
    norms: Mapping[Place, Both[float]]

    @property
    def wrong(self) -> tuple[list[Prediction], str]:
        """Those that are diffs, where others are none; and which these are, in words."""
        wrong = [one for one, failed in zip(self.tensors, self.failed) if failed]
        names = list(dict.fromkeys(one.site.replace(f"/{self.stage}/", "/") for one in wrong))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ([], "") if len(wrong) == len(self.tensors) else (wrong, f" of {', '.join(names[:3])}{more}")

    @property
    def all_norms(self) -> Both[float]:
        """The norm of all gradients together."""
        sides = Both([n.reference for n in self.norms.values()], [n.candidate for n in self.norms.values()])
        return sides.map(lambda norms: float(np.sqrt(np.sum(np.square(norms)))))


def gradients_of(scene: Scene, stage: str = "grad") -> Gradients:
    """The gradients of the first diff's step; ``backward`` gives those of outputs."""
    diffs = [d for d in scene.diffs(stage) if d.figures is not None and d.pair.complete]
    level = noise_level(scene)
    scales: dict[str, float] = {}
    for diff in diffs:
        scales[diff.pair.anchor.layer] = max(scales.get(diff.pair.anchor.layer, 0.0), _rms(diff))
    tensors, places, elements, failed = [], [], [], []
    for diff in sorted(diffs, key=lambda d: -(d.figures.size if d.figures else 0)):
        values = values_of(diff.pair, _ELEMENTS)
        if values is None or np.iscomplexobj(values.reference):
            continue
        sketched = diff.figures is not None and diff.figures.basis != "tensors"
        own = float(np.sqrt(np.mean(np.square(values.reference)))) if values.reference.size else 0.0
        # A gradient that is zero but for rounding is off by what its layer's others are.
        noise = level * max(own, 0.0 if sketched else scales[diff.pair.anchor.layer])
        if noise > 0:
            limit = scene.limit(diff.pair)
            site = f"{diff.pair.anchor.layer}/{stage}/{diff.pair.anchor.slot}"
            tensors.append(Prediction(site, values.candidate, values.reference, values.reference, noise, limit))
            places.append(place_of(diff.pair))
            elements.append(is_elements(diff.pair))
            failed.append(not diff.passed)
    norms = {
        place_of(d.pair): Both(d.figures.reference_l2, d.figures.candidate_l2)
        for d in scene.step
        if d.pair.stage == stage and d.figures is not None and d.pair.anchor.layer != "(loop)"
    }
    return Gradients(stage, tuple(tensors), tuple(places), tuple(elements), tuple(failed), norms)


def noise_level(scene: Scene) -> float:
    """What two right implementations' gradients are off by, as a share of themselves: as gradients of outputs are."""
    errors = [d.figures.rel_l2 for d in scene.diffs("backward", "forward") if d.passed and d.figures is not None]
    rounding = max((rounding_of(d.pair) for d in scene.diffs("forward", "grad")), default=2.0**-24)
    outputs = float(np.percentile([e for e in errors if math.isfinite(e)] or [0.0], 90))
    return min(max(_OF_OUTPUTS * outputs, _ROUNDINGS * rounding), max(_AT_MOST, _ROUNDINGS * rounding))


def _rms(diff: Diff) -> float:
    figures = diff.figures
    return figures.reference_l2 / math.sqrt(figures.size) if figures is not None and figures.size else 0.0


# -- what a gradient is made of ------------------------------------------------------------------------------------


def bias_sums(scene: Scene, number: int) -> list[tuple[Pair, Both[list[np.ndarray]]]]:
    """Gradients of biases, with what each call of their layer adds to them: the sum of its output's gradient.

    So what the backward gave is known, whatever was done to it before the optimizer got it.
    """
    kinds = {p.reference.path: equivalents.group_of_kinds(equivalents.kind(p.reference)) for p in scene.alignment.pairs}
    outputs: dict[str, list[Pair]] = {}
    for pair in scene.pairs(number, "backward").values():
        outputs.setdefault(pair.anchor.layer, []).append(pair)
    found = []
    for (layer, slot, call), pair in scene.pairs(number, "grad").items():
        if call or equivalents.slot(slot) != "bias" or kinds.get(layer) not in ("linear", "conv"):
            continue
        calls = sorted(outputs.get(layer, ()), key=lambda one: one.anchor.call)
        sums = [_summed(one, kinds[layer], pair.anchor.shape) for one in calls]
        if sums and all(one is not None for one in sums):
            sides = [one for one in sums if one is not None]
            found.append((pair, Both([s.reference for s in sides], [s.candidate for s in sides])))
    return found


def _summed(pair: Pair, kind: str, shape: tuple[int, ...]) -> Both[np.ndarray] | None:
    values = whole_of(pair)
    if values is None or len(shape) != 1 or values.reference.ndim < 2:
        return None
    axis = values.reference.ndim - 1 if kind == "linear" else 1
    if values.reference.shape[axis] != shape[0]:
        return None
    rest = tuple(k for k in range(values.reference.ndim) if k != axis)
    return values.map(lambda v: np.asarray(v.sum(axis=rest)))


def made_of(scene: Scene, number: int) -> Both[float | None]:
    """What multiple of what the backward gave the optimizers of either side got; `None` where that is not known."""
    rows = bias_sums(scene, number)
    found: list[float | None] = []
    for side in SIDES:
        above = below = rest = 0.0
        pairs = []
        for pair, sums in rows:
            whole = whole_of(pair)
            if whole is not None:
                pairs.append((getattr(whole, side).ravel(), sum(getattr(sums, side))))
        for got, gave in pairs:
            above, below = above + float(got @ gave), below + float(gave @ gave)
        ratio = above / below if below > 0 else None
        if ratio is not None:
            rest = sum(float(np.sum(np.square(got - ratio * gave))) for got, gave in pairs)
            total = sum(float(np.sum(np.square(got))) for got, _ in pairs)
            ratio = ratio if rest <= _AT_MOST**2 * total else None
        found.append(ratio)
    return Both(*found)


# -- hypotheses ----------------------------------------------------------------------------------------------------


def backward_hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in the gradients of outputs, or in the loss."""
    gradients = gradients_of(scene, "backward")
    if gradients.tensors:
        yield from _ratios(scene, gradients, "gradients of outputs")


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in the gradients that an optimizer got, the simplest first."""
    gradients = gradients_of(scene)
    if not gradients.tensors:
        return
    for one in _ratios(scene, gradients, "gradients"):
        yield replace(one, sentence=one.sentence + _departing(scene)) if one.changes == 1 else one
    yield from _stale(scene, gradients)
    yield from _missing_calls(scene)
    yield from _decayed(scene, gradients)


def _ratios(scene: Scene, gradients: Gradients, what: str) -> Iterator[Hypothesis]:
    """One ratio of all gradients, or of those that are diffs."""
    facts = ratios.facts(scene)
    yield from ratios.ratio_hypotheses(gradients.tensors, what, "gradient_scale", facts)
    wrong, which = gradients.wrong
    for one in ratios.ratio_hypotheses(wrong, f"{what}{which}", "gradient_scale", facts):
        # Of a few gradients no number of the run is the ratio.
        yield replace(one, kind="gradient_scale", changes=2, telling=False)


def _departing(scene: Scene) -> str:
    """Which side's optimizer got something else than its backward gave; empty where that is not known."""
    made = made_of(scene, scene.number)
    if made.reference is None or made.candidate is None:
        return ""
    same = made.map(lambda ratio: ratio is not None and abs(ratio - 1) <= _AT_MOST)
    if same.reference == same.candidate:
        return ""
    side, ratio = ("candidate", made.candidate) if same.reference else ("reference", made.reference)
    return f"; the {side}'s are {ratio:.5g} times what its backward gave, the other side's are what it gave"


def _stale(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    """Gradients of a step before that are still there, or stand in this one's place."""
    for number in [n for n in reversed(scene.numbers) if n < scene.number][:_BEFORE]:
        before = scene.pairs(number, "grad")
        old: list[np.ndarray | None] = []
        for place, one in zip(gradients.places, gradients.tensors):
            values = values_of(before[place], _ELEMENTS) if place in before else None
            fits = values is not None and values.candidate.shape == one.actual.shape
            old.append(values.candidate if values is not None and fits else None)
        if all(values is None for values in old):
            continue

        def with_old(kept: float, old: Sequence[np.ndarray | None] = old) -> Iterator[Prediction]:
            for one, values in zip(gradients.tensors, old):
                if values is not None:
                    yield replace(one, predicted=kept * one.without + values)

        yield Hypothesis(
            "stale_gradient",
            f"gradients of step {number}",
            f"the candidate's gradients are this step's plus those of step {number}: they were not zeroed after it",
            lambda with_old=with_old: with_old(1.0),  # type: ignore[misc]
            "gradients",
            tried=_BEFORE,
            fix=mending.zeroing(scene.frameworks.candidate),
        )
        yield Hypothesis(
            "gradient_of_another_step",
            f"gradients of step {number} alone",
            f"the candidate's gradients are those of step {number}: its optimizer steps before this step's backward",
            lambda with_old=with_old: with_old(0.0),  # type: ignore[misc]
            "gradients",
            tried=_BEFORE,
        )


def _missing_calls(scene: Scene) -> Iterator[Hypothesis]:
    """That some micro-batches' gradients are not in the sum, as biases show."""
    rows = bias_sums(scene, scene.number)
    calls = {len(side) for _, sums in rows for side in sums}
    if len(calls) != 1 or calls == {1}:
        return
    (count,) = calls
    level = noise_level(scene)
    got = [(pair, whole_of(pair), sums) for pair, sums in rows]
    known = [(pair, whole, sums) for pair, whole, sums in got if whole is not None]
    if not known:
        return
    columns = np.concatenate([np.stack(sums.candidate, axis=1) for _, _, sums in known])
    target = np.concatenate([whole.candidate.ravel() for _, whole, _ in known])
    parts = np.linalg.lstsq(columns, target, rcond=None)[0]
    largest = float(np.max(np.abs(parts)))
    if not largest or len(target) <= count:
        return
    present = np.abs(parts) > 0.5 * largest
    if present.all() or np.ptp(parts[present]) > 1e-3 * largest:
        return
    scale = float(np.mean(parts[present]))
    counted = ", ".join(str(k) for k in np.flatnonzero(present))
    only = "only the last micro-batch is" if counted == str(count - 1) else f"only micro-batches {counted} are"

    def predict() -> Iterator[Prediction]:
        for pair, whole, sums in known:
            parts = [one for one, there in zip(sums.candidate, present) if there]
            predicted = np.asarray(scale * np.sum(parts, axis=0))
            size = float(np.sqrt(np.mean(np.square(whole.candidate)))) or 1.0
            # Without: all of them, at the reference's scale.
            without = whole.reference.ravel()
            yield Prediction(pair.anchor.site, whole.candidate.ravel(), predicted, without, level * size)

    yield Hypothesis(
        "micro_batch_missing",
        "micro-batches left out",
        f"{only} in the candidate's gradients, of {count} whose backward ran: they are zeroed in between",
        predict,
        "gradients of biases",
        free=1,
        tried=2**count,
    )


def _decayed(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    """That a multiple of the weights is in one side's gradients: decay as a part of the loss, or by hand."""
    weights = scene.pairs(scene.number, "weight")
    rows = []
    for place, one in zip(gradients.places, gradients.tensors):
        values = values_of(weights[place], _ELEMENTS) if place in weights else None
        if values is not None and values.reference.shape == one.actual.shape:
            rows.append((place, one, values.reference))
    for name, chosen in (("", rows), (" (matrices only)", [row for row in rows if len(_shape(scene, row[0])) > 1])):
        square = sum(float(np.sum(np.square(w / one.noise))) for _, one, w in chosen)
        if not square:
            continue
        product = sum(float(np.sum(w * (one.actual - one.without) / np.square(one.noise))) for _, one, w in chosen)
        decay = product / square
        if abs(decay) < 1e-9:
            continue
        side, other = SIDES if decay < 0 else SIDES.swapped()

        def predict(
            chosen: Sequence[tuple[Place, Prediction, np.ndarray]] = chosen, decay: float = decay
        ) -> Iterator[Prediction]:
            for _, one, weight in chosen:
                yield replace(one, predicted=one.without + decay * weight)

        yield Hypothesis(
            "weight_decay_in_gradient",
            "weight decay in the gradient",
            f"{abs(decay):.5g} times the weight is added to the {side}'s gradients{name}, and not to the {other}'s: "
            "weight decay in the loss or by hand",
            predict,
            "gradients",
            free=1,
            tried=2,
        )
        return


def _shape(scene: Scene, place: Place) -> tuple[int, ...]:
    return scene.pairs(scene.number, "weight")[place].anchor.shape

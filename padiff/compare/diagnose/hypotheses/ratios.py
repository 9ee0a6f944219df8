"""Constant ratios, and which number of the run they are: 4 for accumulated batches, 2 for processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.divided import division_text, divisors
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.records import is_of_loss, loss_role

#: How near a ratio has to be to a fact's, relative to it; what it was measured to is known better.
NEAR = 2e-5
# Powers of two that scalers begin with, or come to; from where on they are nothing else.
_SCALES, _SURELY = tuple(2.0**k for k in range(7, 25)), 1024.0


@dataclass(frozen=True)
class Fact:
    """A number of the run that a ratio may be.

    Attributes:
        value: the number.
        kind: machine-readable name of the cause that it then is.
        times: what it means that the candidate's tensor is so many times the reference's.
        share: what it means that it is one of so many parts.
    """

    value: float
    kind: str
    times: str
    share: str


@dataclass(frozen=True)
class Recognised:
    """A ratio that is a number of the run.

    Attributes:
        ratio: the number itself.
        kind: machine-readable name of the cause.
        text: what it means, in words.
        sure: whether no other number of the run is the same.
    """

    ratio: float
    kind: str
    text: str
    sure: bool = True


def facts(scene: Scene) -> list[Fact]:
    """The numbers of the run that gradients and losses get multiplied by."""
    found: list[Fact] = []
    sides = scene.sides(scene.number)
    if sides is not None:
        several = sorted({step.micro_batches for step in sides} - {0, 1})
        divided = divisors(scene) if several else None
        for count in several:
            known = division_text(count, divided)
            found.append(
                Fact(
                    count,
                    "accumulation",
                    f"{count} micro-batches are accumulated: "
                    + (known or "the candidate does not divide by their number, or the reference does so twice"),
                    f"{count} micro-batches are accumulated: "
                    + (known or "the candidate divides by their number, the reference not, or once less"),
                )
            )
            square = f"{count} micro-batches are accumulated, and {count * count} is {count} times {count}"
            twice = "divides by their number twice, the"
            found.append(
                Fact(
                    count * count,
                    "accumulation",
                    f"{square}: {known or f'the reference {twice} candidate not at all'}",
                    f"{square}: {known or f'the candidate {twice} reference not at all'}",
                )
            )
        # A host that divides gradients by their number after backward says so as a loss scale.
        counts = {float(step.micro_batches) for step in sides}
        for scale in sorted({step.loss_scale for step in sides} - {1.0} - counts):
            text = f"it is the loss scale, {scale:g}"
            found.append(Fact(scale, "loss_scale", f"{text}: not undone in the candidate", f"{text}: undone twice"))
        for size in (
            ()
            if _loss_agrees(scene)
            else sorted({r.shape[0] for step in sides for r in step.records if r.stage == "input" and r.shape})
        ):
            if size > 1:
                found.append(
                    Fact(
                        size,
                        "loss_reduction",
                        f"the batch has {size} samples: the candidate's loss is their sum, the reference's their mean",
                        f"the batch has {size} samples: the candidate's loss is their mean, the reference's their sum",
                    )
                )
    for size in sorted({run.info.world_size for run in scene.runs} - {1}):
        text = f"{size} processes train"
        found.append(Fact(size, "world_size", f"{text}: summed over, not averaged", f"{text}: averaged, not summed"))
    return found


def _loss_agrees(scene: Scene) -> bool:
    """Whether the losses were recorded and agree: then they are reduced alike."""
    losses = [diff for diff in scene.step if diff.pair.stage == "loss" and diff.compared]
    return bool(losses) and all(diff.passed for diff in losses)


def recognised(ratio: float, known: Sequence[Fact], near: float = NEAR) -> Recognised | None:
    """What number of the run a ratio is; `None` if none.

    Args:
        near: how near it has to be, relative to it.
    """
    found: list[Recognised] = []
    for fact in known:
        for value, text in ((fact.value, fact.times), (1 / fact.value, fact.share)):
            if _is(ratio, value, near):
                found.append(Recognised(value, fact.kind, f"{_share(fact.value, value)} = {text}"))
    if not found:
        for scale in _SCALES:
            if _is(ratio, scale, near) or _is(ratio, 1 / scale, near):
                how = "not undone in the candidate" if ratio > 1 else "not undone in the reference"
                return Recognised(ratio, "loss_scale", f"{ratio:.6g} = a loss scale, {how}", scale >= _SURELY)
        if _is(ratio, -1.0, near):
            return Recognised(-1.0, "sign", "-1: the sign is flipped")
        return None
    kinds = {one.kind for one in found}
    text = "; or ".join(dict.fromkeys(one.text for one in found))
    return Recognised(found[0].ratio, found[0].kind, text, len(kinds) == 1)


def counts(scene: Scene) -> frozenset[int]:
    """What the run has counts of: samples, labels, labels that are not ignored."""
    found: set[int] = set()
    for step in scene.sides(scene.number) or ():
        for record in step.records:
            if record.stage == "input" and record.shape:
                found.add(record.shape[0])
            elif is_of_loss(record) and loss_role(record.slot) == "labels" and not record.source.sketched:
                labels = record.value
                found |= {labels.size, int((labels >= 0).sum())}
    return frozenset(found - {0, 1})


def fraction(ratio: float, known: Collection[int]) -> str:
    """A ratio, with the fraction of two counts of the run that it is; ``0.8333 = 5 / 6``."""
    for below in sorted(known):
        above = round(ratio * below)
        if above in known and above != below and _is(ratio, above / below):
            return f"{ratio:.5g} = {above} / {below}"
    return f"{ratio:.5g}"


def ratio_of(tensors: Iterable[Prediction]) -> float | None:
    """The factor that makes the tensors without a fault those that were recorded, by least squares."""
    square = product = 0.0
    for one in tensors:
        noise = np.asarray(one.noise)
        square += float(np.sum(np.square(one.without / noise)))
        product += float(np.sum(one.without * one.actual / np.square(noise)))
    return product / square if square > 0 and math.isfinite(product) else None


def scaled(tensors: Sequence[Prediction], ratio: float) -> Iterator[Prediction]:
    """The prediction that all tensors are multiplied by a ratio."""
    for one in tensors:
        yield Prediction(one.site, one.actual, ratio * one.without, one.without, one.noise, one.limit)


def ratio_hypotheses(
    tensors: Sequence[Prediction],
    what: str,
    kind: str,
    known: Sequence[Fact],
    counted: Collection[int] = (),
    near: float = NEAR,
) -> Iterator[Hypothesis]:
    """That all tensors are multiplied by one number; and that it is a number of the run.

    Args:
        tensors: those of the step; `Prediction.without` is the reference's.
        what: what they are, in the plural.
        kind: of the cause where the number is none of the run's.
        known: the numbers of the run.
        counted: the counts of the run.
        near: how near the ratio has to be to a number of the run's: coarse dtypes round it.
    """
    ratio = ratio_of(tensors)
    if ratio is None or ratio == 0 or abs(ratio - 1) < 1e-4:
        return
    number = recognised(ratio, known, near)
    if number is not None:
        yield Hypothesis(
            number.kind,
            "a number of the run",
            f"{what} are {number.ratio:.5g} times the reference's: {number.text}",
            lambda: scaled(tensors, number.ratio),
            what,
            tried=2 * len(known) + 2 * len(_SCALES),
            telling=number.sure,
        )
    else:
        text = f"{what} are {fraction(ratio, counted)} times the reference's"
        yield Hypothesis(kind, "a constant ratio", text, lambda: scaled(tensors, ratio), what, free=1, telling=False)


def _is(ratio: float, value: float, near: float = NEAR) -> bool:
    return abs(ratio - value) <= near * abs(value)


def _share(fact: float, value: float) -> str:
    return f"{fact:g}" if value == fact else f"{value:.5g} = 1 / {fact:g}"

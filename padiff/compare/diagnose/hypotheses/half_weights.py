"""Hypothesis that one side keeps its weights in 16 bits, where small updates are rounded away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, place_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.parameter_history import ParameterHistories, joined, tracks_of
from padiff.compare.diagnose.recompute.declared_rules import DeclaredRule
from padiff.compare.diagnose.recompute.which_side import declared_groups
from padiff.compare.judge.limits import is_half
from padiff.frameworks.catalog import checked_fix
from padiff.records import SIDES, Both

_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
# Width of the band around a tie of rounding in which either neighbour is right: shares of the update, whose moments
# may have 16 bits too, and of the last place.
_OF_UPDATE, _OF_PLACE = 0.02, 0.02


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis if one side's weights have 16 bits, and the other's more."""
    place = place_of(scene.diff.pair)
    pair = scene.pairs(scene.number, "weight").get(place)
    if pair is None:
        return
    dtypes = Both(*(str(record.dtype) if record is not None else "" for record in pair.sides))
    halves = [name for name, dtype in zip(SIDES, dtypes) if is_half(dtype)]
    groups, tracks = declared_groups(scene, place), tracks_of(scene, later=0)
    if len(halves) != 1 or groups is None or tracks is None:
        return
    side = halves[0]
    full = SIDES.candidate if side == SIDES.reference else SIDES.reference
    # The rule and the rates of the other side: settings that differ are a cause of their own.
    rule = DeclaredRule.from_group(getattr(groups, full), getattr(scene.frameworks, full))
    if rule is None:
        return
    half, other = getattr(dtypes, side), getattr(dtypes, full)
    # Torch's optimizers have no copy of the weights in float32.
    known = getattr(groups, side).rule in ("Adam", "AdamW")
    copies = scene.frameworks.candidate == "paddle" and side == SIDES.candidate and known
    yield Hypothesis(
        "half_weights",
        "weights of 16 bits",
        f"the {side} keeps its weights in {half}, the other side in {other}: updates smaller than half of a weight's "
        "last place are rounded away",
        partial(_predicted, tracks, side, full, rule, _DTYPES[half]),
        "updates",
        fix=checked_fix("paddle", f"paddle.optimizer.{groups.candidate.rule}(..., multi_precision=True)")
        if copies
        else "",
    )


def _predicted(
    tracks: ParameterHistories, side: str, full: str, rule: DeclaredRule, dtype: np.dtype[Any]
) -> Iterator[Prediction]:
    rates = getattr(tracks.rates, full)
    if rule.group >= rates.shape[1]:
        return
    for track in tracks.parameters:
        if not track.elements:
            continue  # rounding shows in elements only
        history, noise = joined([track], side)
        history = replace(history, rates=rates[:, rule.group])
        update, weight = rule.updates(history, noise)[tracks.at], history.weights[tracks.at]
        rounded = (weight + update).astype(dtype)
        upper, lower = (np.nextafter(rounded, dtype.type(sign * np.inf)).astype(np.float64) for sign in (1, -1))
        sums, middle = weight + update, rounded.astype(np.float64)
        room = np.minimum(np.abs(sums - (middle + upper) / 2), np.abs(sums - (middle + lower) / 2))
        step = np.maximum(upper - middle, middle - lower)
        # Near a tie either neighbour is right.
        tied = room <= _OF_UPDATE * np.abs(update) + _OF_PLACE * step
        other = getattr(track.histories, full).updates[tracks.at]
        yield Prediction(
            f"{track.place[0]}/update/{track.place[1]}",
            history.updates[tracks.at],
            middle - weight,
            other,
            np.maximum(np.where(tied, step, step / 64), _OF_UPDATE * np.abs(update)),
        )

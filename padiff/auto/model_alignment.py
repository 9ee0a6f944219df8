"""Alignment of the two models of an ``auto_diff``, for the transfer of weights and for the comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padiff.align import NOTHING_SEEN, Alignment, RuntimeEvidence, align
from padiff.auto.settings import ModelSetup, Settings
from padiff.errors import UsageError
from padiff.records import Both
from padiff.weights.assign import AssignError, Carried, carry_over
from padiff.weights.output_proof import Inputs, run_once


def carried_over(settings: Settings) -> Carried:
    """Copy the weights to the candidate; one run of both models helps to pair layers, and proves the result.

    Raises:
        AssignError: the weights can't be copied; nothing was changed.
    """
    base, raw = (side.model for side in settings.sides)
    try:
        return carry_over(base, raw, settings.layer_map, tuple(_inputs(settings)), may_stay=settings.mapped)
    except AssignError:
        raise
    except UsageError:
        # The models may fail in eval mode only; wrong inputs raise an error in the passes that follow.
        return carry_over(base, raw, settings.layer_map, may_stay=settings.mapped)


def aligned_as(carried: Carried | None, settings: Settings) -> Callable[..., Alignment]:
    """Return the function that aligns the models: `align` with the answers from the transfer of weights.

    If a rule of the user arranged a layer's parameters differently than the alignment does, the insides of this layer
    are not compared.
    """
    otherwise: set[tuple[str, str]] | None = None
    unseen: tuple[tuple[Any, ...], Alignment] | None = None
    answers: Mapping[str, str] = carried.choices if carried is not None else {}
    without = carried.without if carried is not None else ()

    def aligned(
        reference: Any,
        candidate: Any,
        layer_map: Any = None,
        seen: Both[RuntimeEvidence] = NOTHING_SEEN,
    ) -> Alignment:
        nonlocal otherwise, unseen
        arguments = reference, candidate, layer_map
        if seen is NOTHING_SEEN and unseen is not None and all(a is b for a, b in zip(arguments, unseen[0])):
            return unseen[1]  # called before the first step, and again if evidence from running is not needed
        alignment = align(reference, candidate, layer_map, seen, without=without).answered(answers)
        if otherwise is None:
            otherwise = {
                pair for pair in settings.ruled if pair in settings.mapped and _other(settings, pair, alignment)
            }
        alignment = replace(alignment, differ_inside=alignment.differ_inside | otherwise)
        if seen is NOTHING_SEEN:
            unseen = arguments, alignment
        return alignment

    return aligned


def _other(settings: Settings, pair: tuple[str, str], alignment: Alignment) -> bool:
    """Return True if two layers' initial values differ from the values that the alignment implies."""
    models = settings.sides.map(lambda side: side.live)
    within = {layer.path for layer in models.reference.below(pair[0])}
    for parameters in alignment.parameters:
        parts = Both(parameters.reference, parameters.candidate)
        if parts.reference[0].layer not in within or any(len(several) != 1 for several in parts):
            continue
        expected, actual = (
            part.read(model.value(part.layer, part.slot)).ravel() for model, (part,) in models.zip(parts)
        )
        if expected.size == actual.size and not np.allclose(expected, actual, rtol=1e-2, atol=1e-6):
            return True
    return False


@dataclass(frozen=True)
class ComparedWhole:
    """Two layers that are compared by their outputs only: their paths, and the parameters that are not compared."""

    paths: Both[str]
    parameters: Both[list[str]]


def compared_wholes(settings: Settings, alignment: Alignment) -> list[ComparedWhole]:
    """Return the mapped layers with sublayers, rules or parameters that are not compared."""
    layers = []
    for pair in settings.mapped:
        places, differ = list(zip(settings.sides, pair)), pair in alignment.differ_inside
        names = Both(*(_uncompared(side, path, differ) for side, path in places))
        more = any(len(side.live.below(path)) > 1 for side, path in places)
        if any(names) or more or pair in settings.ruled:
            layers.append(ComparedWhole(Both(*pair), names))
    return layers


def _uncompared(side: ModelSetup, path: str, differ: bool) -> list[str]:
    return [
        f"{layer.path}/{p.slot}"
        for layer in side.live.below(path)
        for p in layer.parameters
        if p.role == "parameter" and (differ or layer.path not in side.owning)
    ]


def seen_of(settings: Settings, carried: Carried | None) -> Both[RuntimeEvidence]:
    """Return evidence from running both models; no evidence if they do not run in eval mode."""
    if carried is not None and carried.seen.reference.order:
        return carried.seen
    with suppress(UsageError):
        return settings.sides.zip(_inputs(settings)).map(
            lambda run: RuntimeEvidence.from_step(run_once(run[0].live, run[1]))
        )
    return NOTHING_SEEN


def _inputs(settings: Settings) -> Both[Inputs]:
    return settings.sides.map(lambda side: Inputs(side.args, side.kwargs))

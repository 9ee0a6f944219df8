"""Which layers of an ``auto_diff``'s two models answer to each other: for the weights, and for all that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padiff.align import NOTHING_SEEN, Alignment, Seen, align
from padiff.auto.settings import ModelSetup, Settings
from padiff.errors import UsageError
from padiff.records import Both
from padiff.weights.assign import AssignError, Carried, carry_over
from padiff.weights.output_proof import Inputs, run_once


def carried_over(settings: Settings) -> Carried:
    """Carry the weights over; what running both models once shows helps to pair them, and proves it.

    Raises:
        AssignError: the weights can't be carried over; nothing was changed.
    """
    base, raw = (side.model for side in settings.sides)
    try:
        return carry_over(base, raw, settings.layer_map, tuple(_inputs(settings)), may_stay=settings.mapped)
    except AssignError:
        raise
    except UsageError:
        # They don't run in eval mode, say; what is wrong with the inputs is an error where they are really used.
        return carry_over(base, raw, settings.layer_map, may_stay=settings.mapped)


def aligned_as(carried: Carried | None, settings: Settings) -> Callable[..., Alignment]:
    """What pairs the layers: `align`, with what the outputs decided when the weights were carried over.

    What a rule of the user's laid out otherwise than the alignment would is not compared by it.
    """
    otherwise: set[tuple[str, str]] | None = None
    unseen: tuple[tuple[Any, ...], Alignment] | None = None
    known: Mapping[str, str] = carried.choices if carried is not None else {}
    without = carried.without if carried is not None else ()

    def aligned(
        reference: Any,
        candidate: Any,
        layer_map: Any = None,
        seen: Both[Seen] = NOTHING_SEEN,
    ) -> Alignment:
        nonlocal otherwise, unseen
        asked = reference, candidate, layer_map
        if seen is NOTHING_SEEN and unseen is not None and all(a is b for a, b in zip(asked, unseen[0])):
            return unseen[1]  # asked before the first step, and again where what it shows is of no matter
        found = align(reference, candidate, layer_map, seen, without=without).answered(known)
        if otherwise is None:
            otherwise = {pair for pair in settings.ruled if pair in settings.mapped and _other(settings, pair, found)}
        found = replace(found, differ_inside=found.differ_inside | otherwise)
        if seen is NOTHING_SEEN:
            unseen = asked, found
        return found

    return aligned


def _other(settings: Settings, pair: tuple[str, str], alignment: Alignment) -> bool:
    """Whether two layers hold other values, before any step, than the alignment says that they should."""
    models = settings.sides.map(lambda side: side.live)
    within = {layer.path for layer in models.reference.below(pair[0])}
    for parameters in alignment.parameters:
        parts = Both(parameters.reference, parameters.candidate)
        if parts.reference[0].layer not in within or any(len(several) != 1 for several in parts):
            continue
        one, other = (part.take(model.value(part.layer, part.slot)).ravel() for model, (part,) in models.zip(parts))
        if one.size == other.size and not np.allclose(one, other, rtol=1e-2, atol=1e-6):
            return True
    return False


@dataclass(frozen=True)
class ComparedWhole:
    """Two layers that are compared as wholes: their paths, and their parameters that are not compared."""

    paths: Both[str]
    parameters: Both[list[str]]


def compared_wholes(settings: Settings, alignment: Alignment) -> list[ComparedWhole]:
    """The mapped layers that hold more than what is compared."""
    found = []
    for pair in settings.mapped:
        places, differ = list(zip(settings.sides, pair)), pair in alignment.differ_inside
        names = Both(*(_uncompared(side, path, differ) for side, path in places))
        more = any(len(side.live.below(path)) > 1 for side, path in places)
        if any(names) or more or pair in settings.ruled:
            found.append(ComparedWhole(Both(*pair), names))
    return found


def _uncompared(side: ModelSetup, path: str, differ: bool) -> list[str]:
    return [
        f"{layer.path}/{p.slot}"
        for layer in side.live.below(path)
        for p in layer.parameters
        if p.role == "parameter" and (differ or layer.path not in side.owning)
    ]


def seen_of(settings: Settings, carried: Carried | None) -> Both[Seen]:
    """What running both models shows; nothing where they don't run in eval mode."""
    if carried is not None and carried.seen.reference.order:
        return carried.seen
    with suppress(UsageError):
        return settings.sides.zip(_inputs(settings)).map(lambda run: Seen.of(run_once(run[0].live, run[1])))
    return NOTHING_SEEN


def _inputs(settings: Settings) -> Both[Inputs]:
    return settings.sides.map(lambda side: Inputs(side.args, side.kwargs))

"""Which layers of an ``auto_diff``'s two models answer to each other: for the weights, and for all that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padiff.align import NOTHING_SEEN, Alignment, Seen, align
from padiff.auto.settings import Settings
from padiff.errors import UsageError
from padiff.records import Both
from padiff.weights.assign import AssignError, Carried, carry_over
from padiff.weights.trial import Inputs, run_once


def carried_over(settings: Settings) -> Carried:
    """Carry the weights over; what running both models once shows helps to pair them, and proves it.

    Raises:
        AssignError: the weights can't be carried over; nothing was changed.
    """
    models = settings.base.model, settings.raw.model
    try:
        return carry_over(*models, settings.layer_map, _inputs(settings), may_stay=settings.mapped)
    except AssignError:
        raise
    except UsageError:
        # They don't run in eval mode, say; what is wrong with the inputs is told where they are really used.
        return carry_over(*models, settings.layer_map, may_stay=settings.mapped)


def aligned_as(carried: Carried | None, settings: Settings) -> Callable[..., Alignment]:
    """What pairs the layers: `align`, with what the outputs decided when the weights were carried over.

    What a rule of the user's laid out otherwise than the alignment would is not compared by it.
    """
    otherwise: set[tuple[str, str]] | None = None
    known: Mapping[str, str] = carried.choices if carried is not None else {}
    without = carried.without if carried is not None else ()

    def aligned(
        reference: Any,
        candidate: Any,
        layer_map: Any = None,
        seen: Both[Seen] = NOTHING_SEEN,
    ) -> Alignment:
        nonlocal otherwise
        found = align(reference, candidate, layer_map, seen, without=without).answered(known)
        if otherwise is None:
            otherwise = {pair for pair in settings.ruled if pair in settings.mapped and _other(settings, pair, found)}
        return replace(found, differ_inside=found.differ_inside | otherwise)

    return aligned


def _other(settings: Settings, pair: tuple[str, str], alignment: Alignment) -> bool:
    """Whether two layers hold other values, before any step, than the alignment says that they should."""
    base, raw = settings.base.live, settings.raw.live
    within = {layer.path for layer in base.below(pair[0])}
    for parameters in alignment.parameters:
        ours, theirs = parameters.reference, parameters.candidate
        if ours[0].layer not in within or len(ours) != 1 or len(theirs) != 1:
            continue
        values = ours[0].take(base.value(ours[0].layer, ours[0].slot))
        others = theirs[0].take(raw.value(theirs[0].layer, theirs[0].slot))
        if values.size == others.size and not np.allclose(values.ravel(), others.ravel(), rtol=1e-2, atol=1e-6):
            return True
    return False


@dataclass(frozen=True)
class Unlooked:
    """Two layers that are compared as wholes: their paths, and their parameters that are not compared, by side."""

    base: str
    raw: str
    parameters: tuple[tuple[str, ...], tuple[str, ...]]


def unlooked(settings: Settings, alignment: Alignment) -> list[Unlooked]:
    """The mapped layers that hold more than what is compared."""
    found = []
    for pair in settings.mapped:
        differ = pair in alignment.differ_inside
        names = tuple(
            tuple(
                f"{layer.path}/{p.slot}"
                for layer in side.live.below(path)
                for p in layer.parameters
                if p.role == "parameter" and (differ or layer.path not in side.owning)
            )
            for side, path in zip((settings.base, settings.raw), pair)
        )
        more = any(len(side.live.below(path)) > 1 for side, path in zip((settings.base, settings.raw), pair))
        if any(names) or more or pair in settings.ruled:
            found.append(Unlooked(*pair, (names[0], names[1])))
    return found


def seen_of(settings: Settings, carried: Carried | None) -> Both[Seen]:
    """What running both models shows; nothing where they don't run in eval mode."""
    if carried is not None and carried.seen.reference.order:
        return carried.seen
    with suppress(UsageError):
        base, raw = (
            run_once(side.live, given)
            for side, given in zip((settings.base, settings.raw), _inputs(settings), strict=True)
        )
        return Both(base, raw).map(Seen.of)
    return NOTHING_SEEN


def _inputs(settings: Settings) -> tuple[Inputs, Inputs]:
    return Inputs(settings.base.args, settings.base.kwargs), Inputs(settings.raw.args, settings.raw.kwargs)

"""Which layers of an ``auto_diff``'s two models answer to each other: for the weights, and for all that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from padiff.align import Alignment, Seen, align
from padiff.auto.settings import Settings
from padiff.errors import UsageError
from padiff.weights.assign import AssignError, Carried, carry_over
from padiff.weights.trial import Inputs, run_once


def carried_over(settings: Settings) -> Carried:
    """Carry the weights over; what running both models once shows helps to pair them, and proves it.

    Raises:
        AssignError: the weights can't be carried over; nothing was changed.
    """
    models = settings.base.model, settings.raw.model
    try:
        return carry_over(*models, settings.layer_map, _inputs(settings))
    except AssignError:
        raise
    except UsageError:
        # They don't run in eval mode, say; what is wrong with the inputs is told where they are really used.
        return carry_over(*models, settings.layer_map)


def aligned_as(carried: Carried | None) -> Callable[..., Alignment]:
    """What pairs the layers: `align`, with what the outputs decided when the weights were carried over."""
    known: Mapping[str, str] = carried.choices if carried is not None else {}
    without = carried.without if carried is not None else ()

    def aligned(
        reference: Any,
        candidate: Any,
        layer_map: Any = None,
        seen: tuple[Seen, Seen] = (Seen(), Seen()),
        choices: Mapping[str, str] | None = None,
    ) -> Alignment:
        return align(reference, candidate, layer_map, seen, choices={**known, **(choices or {})}, without=without)

    return aligned


def seen_of(settings: Settings, carried: Carried | None) -> tuple[Seen, Seen]:
    """What running both models shows; nothing where they don't run in eval mode."""
    if carried is not None and carried.seen[0].order:
        return carried.seen
    with suppress(UsageError):
        base, raw = (
            run_once(side.live, given)
            for side, given in zip((settings.base, settings.raw), _inputs(settings), strict=True)
        )
        return Seen.of(base), Seen.of(raw)
    return Seen(), Seen()


def _inputs(settings: Settings) -> tuple[Inputs, Inputs]:
    return Inputs(settings.base.args, settings.base.kwargs), Inputs(settings.raw.args, settings.raw.kwargs)

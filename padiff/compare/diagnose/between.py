"""Causes of a diff in the code between two layers, or in the functions that a layer's code calls."""

from __future__ import annotations

from dataclasses import replace

from padiff.compare.diagnose.call_words import called, calls_text
from padiff.compare.diagnose.place import Calls, Place
from padiff.compare.diagnose.values import masked_apart, values_of
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Both, Cause, TracedCall

# Up to this many calls that only one side makes count as a missing or a surplus call. More calls mean that the code is
# written in another way.
_FEW = 3
_CAST = "cast"


def cause_in_place(place: Place) -> Cause | None:
    """Return the likely cause of a diff that a call of the layer's code shows, or random dropping of values; else
    `None`.

    Args:
        place: where in the code the diff comes from.
    """
    if place.between and place.diff.problem is None and _is_dropout(place):
        text = "dropout: each run draws its own random mask; train with rate 0 (or record in eval mode) to compare"
        return Cause("dropout", text)
    return cause_of_calls(place.calls) if place.calls is not None else None


def where_in_code(place: Place, excluded: tuple[str, ...] = ()) -> Cause | None:
    """Return an unproven cause that names the code to read, for a diff that neither a call nor a hypothesis explains.

    Args:
        place: where in the code the diff comes from.
        excluded: hypotheses that were tried and ruled out.

    Returns:
        The cause, of kind ``unknown``; `None` if the traces do not narrow down the code.
    """
    if place.calls is not None and max(map(len, place.calls.only)) <= 2 * _FEW:
        texts = place.calls.only.map(lambda some: calls_text(some) if some else "nothing")
        calls = f"the reference calls {texts.reference} there, the candidate {texts.candidate}"
        return Cause("unknown", f"unknown; {calls}", excluded=excluded)
    if not place.between:
        return None
    uncalled = _called_by_one(place)
    if uncalled is not None:
        return replace(uncalled, excluded=excluded)
    where = "before this layer" if place.inside is False else "of this layer, after those inside of it"
    text = f"unknown; the code {where}: what it adds, scales or masks, and which tensors it hands on"
    return Cause("unknown", text, excluded=excluded)


def _called_by_one(place: Place) -> Cause | None:
    """Return the cause that one side never calls a layer that both models have; `None` unless these are few.

    Layers of lists do not count: experts are called if a row chooses them.
    """
    if place.graphs is None or place.ends is None:
        return None
    common = place.graphs.reference.paths & place.graphs.candidate.paths
    called = place.graphs.map(lambda graph: {path for path, _ in graph.layers if not path.split(".")[-1].isdigit()})
    only = called.zip(called.swapped()).map(lambda side: sorted((side[0] - side[1]) & common))
    if all(only) or not 0 < max(map(len, only)) <= _FEW:
        return None
    side, paths = ("reference", only.reference) if only.reference else ("candidate", only.candidate)
    return Cause("uncalled_layer", f"only the {side} calls {', '.join(f'`{path}`' for path in paths)}")


def _is_dropout(place: Place) -> bool:
    if place.graphs is not None:
        calls = [call for graph in place.graphs for call in graph.trace.calls]
        draws = any("dropout" in (call.function or call.layer_type).lower() for call in calls)
        if not draws and any(call.choice is not None for call in calls):
            return False  # what the code chooses is zero elsewhere, too: a capacity, a hard mask
    try:
        return masked_apart(*values_of(place.diff.pair))
    except (RunFolderError, SketchOnlyError):
        return False


def cause_of_calls(calls: Calls) -> Cause | None:
    """Return the likely cause that calls of both sides' code show; `None` if they show none."""
    both = calls.same
    if both is None:
        return _one_sided(calls.only)
    if calls.slots is not None:
        slots = calls.slots
        names = f"`{slots.reference}`" + (f" (`{slots.candidate}`)" if slots.candidate != slots.reference else "")
        text = f"what goes into {called(both.reference)} as {names} differs: a mask, a constant"
        return Cause("call_input", text, lines=both.map(lambda call: call.line))
    if calls.shapes is not None:
        shapes = calls.shapes.map(lambda shape: f"({', '.join(map(str, shape))})")
        text = f"{both.candidate.function}() gives a tensor of shape {shapes.candidate} for the reference's"
        return Cause("call_shape", f"{text} {shapes.reference}", lines=both.map(lambda call: call.line))
    texts, lines = both.map(called), both.map(lambda call: call.line)
    if calls.given_otherwise:
        text = f"{texts.reference} against {texts.candidate}, though the same goes in"
        return Cause("call_arguments", text, lines=lines)
    return Cause("call", f"{texts.reference} gives something else, though the same goes in", lines=lines)


def _one_sided(only: Both[tuple[TracedCall, ...]]) -> Cause | None:
    calls = only.reference or only.candidate
    # Casts are left to the hypotheses, which compute the rounding to another dtype.
    if all(only) or len(calls) > _FEW or all(call.function == _CAST for call in calls):
        return None
    texts = only.map(calls_text)
    if not only.candidate:
        return Cause("missing_call", f"only the reference calls {texts.reference} there")
    text = f"only the candidate calls {texts.candidate} there"
    return Cause("surplus_call", text, lines=Both(None, only.candidate[0].line))

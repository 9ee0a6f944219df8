"""Why a diff comes from the code between two layers, or from the functions that a layer's code calls."""

from __future__ import annotations

from padiff.compare.diagnose.call_words import called, calls_text
from padiff.compare.diagnose.place import Calls, Place
from padiff.compare.diagnose.values import masked_apart, ratio_of, same_values, times, values_of
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Both, Cause, TracedCall


def cause_in_place(place: Place) -> Cause | None:
    """The likely cause of a diff that does not come from what the layer itself computes; else `None`."""
    by_calls = _by_calls(place.calls) if place.calls is not None else None
    if not place.between:
        return by_calls
    try:
        return _by_values(place, by_calls)
    except (RunFolderError, SketchOnlyError):
        return by_calls


def _by_values(place: Place, by_calls: Cause | None) -> Cause:
    if place.diff.problem is not None:
        return by_calls or Cause("between_layers", "the code between the layers gives something else")
    reference, candidate = values_of(place.diff.pair)
    if masked_apart(reference, candidate):
        text = "dropout: each run draws its own random mask; train with rate 0 (or record in eval mode) to compare"
        return Cause("dropout", text)
    if by_calls is not None:
        return by_calls
    what = "what goes in" if place.inside is False else "the output"
    where = "before this layer" if place.inside is False else "of this layer, after those inside of it"
    ratio = ratio_of(reference, candidate)
    if ratio is not None:
        return Cause("between_layers", f"{what} is {times(ratio)}: a factor in the code {where}")
    if reference.ndim > 1 and same_values(reference, candidate):
        text = f"{what} has the same values in another order: another axis, layout or order of reshaping"
        return Cause("between_layers", text)
    return Cause(
        "between_layers",
        f"the code {where}: what it adds, scales or masks, the functions that it calls, or which tensors it hands on",
    )


def _by_calls(calls: Calls) -> Cause:
    both = calls.same
    if both is None:
        return _one_sided(calls.only)
    if calls.slots is not None:
        slots = calls.slots
        names = f"`{slots.reference}`" + (f" (`{slots.candidate}`)" if slots.candidate != slots.reference else "")
        return Cause("call_input", f"what goes into {called(both.reference)} as {names} differs: a mask, a constant")
    texts = both.map(called)
    if calls.given_otherwise:
        return Cause("call_arguments", f"{texts.reference} against {texts.candidate}, though the same goes in")
    return Cause("call", f"{texts.reference} gives something else, though the same goes in")


def _one_sided(only: Both[tuple[TracedCall, ...]]) -> Cause:
    texts = only.map(calls_text)
    if not only.candidate:
        return Cause("missing_call", f"only the reference calls {texts.reference} there")
    if not only.reference:
        return Cause("surplus_call", f"only the candidate calls {texts.candidate} there")
    return Cause("other_calls", f"the reference calls {texts.reference} there, the candidate {texts.candidate}")

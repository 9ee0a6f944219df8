"""Why a diff comes from the code between two layers, or from the functions that a layer's code calls."""

from __future__ import annotations

from padiff.compare.diagnose.call_words import called, calls_text
from padiff.compare.diagnose.place import Calls, Place
from padiff.compare.diagnose.values import masked_apart, values_of
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Both, Cause, TracedCall

# So many calls that only one side makes are a step too many or too few; more are another way to write it.
_FEW = 3
_CAST = "cast"


def cause_in_place(place: Place) -> Cause | None:
    """The likely cause of a diff, where one call of the layer's code shows it, or the code between two layers drops
    values at random; else `None`.
    """
    if place.between and place.diff.problem is None and _is_dropout(place):
        text = "dropout: each run draws its own random mask; train with rate 0 (or record in eval mode) to compare"
        return Cause("dropout", text)
    return _by_calls(place.calls) if place.calls is not None else None


def where_in_code(place: Place, excluded: tuple[str, ...] = ()) -> Cause | None:
    """Where the cause has to be looked for, where neither a call nor a hypothesis shows it; `None` if that is not
    known.
    """
    if place.calls is not None and max(map(len, place.calls.only)) <= 2 * _FEW:
        texts = place.calls.only.map(lambda some: calls_text(some) if some else "nothing")
        calls = f"the reference calls {texts.reference} there, the candidate {texts.candidate}"
        return Cause("unknown", f"unknown; {calls}", excluded=excluded)
    if not place.between:
        return None
    where = "before this layer" if place.inside is False else "of this layer, after those inside of it"
    text = f"unknown; the code {where}: what it adds, scales or masks, and which tensors it hands on"
    return Cause("unknown", text, excluded=excluded)


def _is_dropout(place: Place) -> bool:
    try:
        return masked_apart(*values_of(place.diff.pair))
    except (RunFolderError, SketchOnlyError):
        return False


def _by_calls(calls: Calls) -> Cause | None:
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


def _one_sided(only: Both[tuple[TracedCall, ...]]) -> Cause | None:
    one = only.reference or only.candidate
    # That values were rounded to another dtype is computed.
    if all(only) or len(one) > _FEW or all(call.function == _CAST for call in one):
        return None
    texts = only.map(calls_text)
    if not only.candidate:
        return Cause("missing_call", f"only the reference calls {texts.reference} there")
    return Cause("surplus_call", f"only the candidate calls {texts.candidate} there")

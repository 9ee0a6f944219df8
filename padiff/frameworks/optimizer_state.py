"""Whether a state fits an optimizer; the same for every framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.records.optimizer_state import (
    GRADIENT_AVERAGE,
    MASTER_WEIGHT,
    MAX_SECOND_MOMENT,
    MOMENTUM,
    STEPS,
    ParameterState,
)

# Rules that hold the same of a parameter, and differ in what else they do.
_ALIKE = frozenset({"Adam", "AdamW"})
# Rules that make nothing of a step without its count.
COUNTING = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb"})


def check_rule(given: str, own: str) -> None:
    """Make sure that the state of one rule can serve another.

    Raises:
        UsageError: it can't.
    """
    if given != own and not {given, own} <= _ALIKE:
        raise UsageError(f"the state is that of {given}, the optimizer is {own}: use the same rule on both sides")


def check_slots(
    rule: str, site: str, given: ParameterState, wanted: Collection[str] | None, shape: tuple[int, ...]
) -> None:
    """Make sure that a parameter's state is what an optimizer needs, neither more nor less.

    Args:
        wanted: names of the tensors that it needs; `None` where that is not known.

    Raises:
        UsageError: a tensor is missing, or there is no place for it, or it is of another shape.
    """
    there = set(given.tensors) - {MASTER_WEIGHT}
    if wanted is not None:
        missing, surplus = set(wanted) - there, there - set(wanted)
        if missing:
            raise UsageError(
                f"{site}: {rule} as it is set here needs {_words(missing)}, which the state does not have: set both "
                "optimizers alike (amsgrad, momentum, centered)"
            )
        if surplus:
            raise UsageError(
                f"{site}: {rule} as it is set here has no place for {_words(surplus)} of the state: set both "
                "optimizers alike (amsgrad, momentum, centered)"
            )
    for name, array in given.tensors.items():
        if array.shape != shape:
            raise UsageError(f"{site}: {name} is {[*array.shape]}, expected the parameter's shape, {[*shape]}")
    if rule in COUNTING and STEPS not in given.numbers:
        raise UsageError(f"{site}: the state of {rule} has no count of steps")


def _words(names: Collection[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in sorted(names))


def needed(slots: Iterable[str], settings: Mapping[str, Any]) -> frozenset[str]:
    """Of a rule's tensors, by their common names, those that it needs as it is set."""
    off = {
        MAX_SECOND_MOMENT: not settings.get("amsgrad"),
        MOMENTUM: not settings.get("momentum"),
        GRADIENT_AVERAGE: not settings.get("centered"),
    }
    return frozenset(name for name in slots if not off.get(name))

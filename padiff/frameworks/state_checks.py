"""Checks that a state fits an optimizer, shared by both frameworks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.optimizer_catalog import CATALOG
from padiff.records.parameter_states import (
    GRADIENT_AVERAGE,
    MASTER_WEIGHT,
    MAX_SECOND_MOMENT,
    MOMENTUM,
    STEPS,
    ParameterState,
)

# Rules whose states have the same tensors and numbers, so that one can use the state of the other.
_ALIKE = frozenset({"Adam", "AdamW"})
# Rules whose update depends on the number of steps.
COUNTING = frozenset(row.rule for row in CATALOG if row.counts)


def check_rule(given: str, own: str) -> None:
    """Check that an optimizer of the rule ``own`` can use a state of the rule ``given``.

    Raises:
        UsageError: the optimizer can't use the state.
    """
    if given != own and not {given, own} <= _ALIKE:
        raise UsageError(f"the state is that of {given}, the optimizer is {own}: use the same rule on both sides")


def check_slots(
    rule: str, site: str, given: ParameterState, wanted: Collection[str] | None, shape: tuple[int, ...]
) -> None:
    """Check that a parameter's state has exactly the tensors and numbers that an optimizer needs.

    Args:
        site: the parameter, for messages.
        given: the state to check.
        wanted: names of the tensors that the optimizer needs; `None` if they are unknown.
        shape: the parameter's shape.

    Raises:
        UsageError: a tensor is missing, superfluous or of another shape, or the count of steps is missing.
    """
    names = set(given.tensors) - {MASTER_WEIGHT}
    if wanted is not None:
        missing, surplus = set(wanted) - names, names - set(wanted)
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
    """Return the tensors that a rule needs under these settings, out of all tensors of the rule (common names)."""
    off = {
        MAX_SECOND_MOMENT: not settings.get("amsgrad"),
        MOMENTUM: not settings.get("momentum"),
        GRADIENT_AVERAGE: not settings.get("centered"),
    }
    return frozenset(name for name in slots if not off.get(name))

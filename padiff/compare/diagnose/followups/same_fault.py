"""Tests for two faults that may be one, as a fault in the code shows wherever the code runs."""

from __future__ import annotations

from typing import Protocol

from padiff.compare.diagnose.evidence import Evidence
from padiff.model import equivalents
from padiff.records import Cause, FirstDiff, Recomputed

# Causes that affect all layers or the whole training: beside such a cause there is no second fault.
_EVERYWHERE = frozenset(
    {"environment", "autocast", "tf32", "precision", "dropout", "mode", "surplus_layers", "not_called", "no_backward"}
)
# Families of causes that are too general to show that two faults are one.
_ANYWHERE = frozenset({"layer", "call"})
# Kinds of faults that are found from a side's own tensors, independent of the code that computed these tensors.
_BY_ITSELF = frozenset({"update", "loss", "labels", "gradients", "weight", "input"})
# Kinds of faults in a layer's weights or inputs, independent of the layer's own computation.
_GIVEN = frozenset({"weight", "input"})


class KnownFault(Protocol):
    """The attributes of a fault that `are_one` reads."""

    @property
    def cause(self) -> Cause | None: ...

    @property
    def recomputed(self) -> Recomputed | None: ...


def families(cause: Cause | None) -> frozenset[str]:
    """Return the families of a cause: the first words of its kinds. Empty for an unknown cause."""
    if cause is None or cause.kind == "unknown":
        return frozenset()
    return frozenset(map(_family, cause.kind.split("+")))


def _family(kind: str) -> str:
    if kind in _EVERYWHERE:
        return kind
    return "call" if "call" in kind.split("_") else kind.partition("_")[0]


def are_one(one: KnownFault, kind: str, other: KnownFault, of: str) -> bool:
    """Return True if two faults may be one.

    Args:
        one, other: the two faults.
        kind, of: the kind of layer, or the stage, of the first and of the second fault.
    """
    first, second = families(one.cause), families(other.cause)
    if one.cause is not None and other.cause is not None and one.cause.sentence == other.cause.sentence:
        return True
    if (first | second) & _EVERYWHERE:
        return True
    if kind == of:
        proven = all(fault.cause is not None and fault.cause.proven for fault in (one, other))
        return not proven or bool(first & second)
    if (first & second) - _ANYWHERE:
        return True
    if (first - {"call"} and second - {"call"}) or kind in _BY_ITSELF:
        return False
    # Without causes: two layers that both fail their own computation are two faults, and so are a layer and its inputs.
    wrong = [fault.recomputed is not None and bool(fault.recomputed.wrong) for fault in (one, other)]
    return not (wrong[0] and (wrong[1] or of in _GIVEN))


def kind_of_place(first: FirstDiff, evidence: Evidence) -> str:
    """Return the kind of the layer that a diff belongs to, or the diff's stage if there is no layer."""
    if first.stage != "forward" or first.reference is None:
        return first.stage
    layers = evidence.runs.reference.info.layers
    layer = next((layer for layer in layers if layer.path == first.reference), None)
    return equivalents.kind(layer) if layer is not None else first.stage

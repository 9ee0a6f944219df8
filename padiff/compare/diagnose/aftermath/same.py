"""Whether two faults may be one: a fault in the code shows wherever the code runs."""

from __future__ import annotations

from typing import Protocol

from padiff.compare.diagnose.evidence import Evidence
from padiff.model import equivalents
from padiff.records import Cause, FirstDiff, Recomputed

# What all layers, or all of a training, go through: with such a cause nothing is another fault.
_EVERYWHERE = frozenset({"environment", "precision", "dropout", "mode", "surplus", "not", "no"})
# Computed from a side's own tensors: a fault there is no fault of what made these.
_BY_ITSELF = frozenset({"update", "loss", "labels", "gradients", "weight", "input"})


class Known(Protocol):
    """What is known of a fault."""

    @property
    def cause(self) -> Cause | None: ...

    @property
    def recomputed(self) -> Recomputed | None: ...


def families(cause: Cause | None) -> frozenset[str]:
    """What a cause is at large: kinds that begin alike are of one family. Empty where nothing is known."""
    if cause is None or cause.kind == "unknown":
        return frozenset()
    return frozenset(kind if kind in _EVERYWHERE else kind.partition("_")[0] for kind in cause.kind.split("+"))


def are_one(one: Known, kind: str, other: Known, of: str) -> bool:
    """Whether two faults may be one.

    Args:
        kind, of: of what they are faults: a kind of layer, or a stage.
    """
    first, second = families(one.cause), families(other.cause)
    if (first | second) & _EVERYWHERE:
        return True
    if kind == of:
        proven = all(known.cause is not None and known.cause.proven for known in (one, other))
        return not proven or bool(first & second)
    # What is declared of a layer is named by the setting, which the kind of layer tells apart.
    if first & second - {"layer"}:
        return True
    if (first and second) or kind in _BY_ITSELF:
        return False
    # Nothing tells why: but if both layers depart from what they are, they are two.
    return not all(known.recomputed is not None and known.recomputed.wrong for known in (one, other))


def kind_of_place(first: FirstDiff, evidence: Evidence) -> str:
    """Of what kind the layer is at which a diff is; else its stage."""
    if first.stage != "forward" or first.reference is None:
        return first.stage
    layers = evidence.runs.reference.info.layers
    layer = next((layer for layer in layers if layer.path == first.reference), None)
    return equivalents.kind(layer) if layer is not None else first.stage

"""Whether two faults may be one: a fault in the code shows wherever the code runs."""

from __future__ import annotations

from typing import Protocol

from padiff.compare.diagnose.evidence import Evidence
from padiff.model import equivalents
from padiff.records import Cause, FirstDiff, Recomputed

# What all layers, or all of a training, go through: with such a cause nothing is another fault.
_EVERYWHERE = frozenset(
    {"environment", "autocast", "tf32", "precision", "dropout", "mode", "surplus_layers", "not_called", "no_backward"}
)
# Causes that are found anywhere: what is set, or called, tells one from the other, which their kind does not.
_ANYWHERE = frozenset({"layer", "call"})
# Computed from a side's own tensors: a fault there is no fault of what made these.
_BY_ITSELF = frozenset({"update", "loss", "labels", "gradients", "weight", "input"})
# What a layer is given, whatever it makes of it.
_GIVEN = frozenset({"weight", "input"})


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
    return frozenset(map(_family, cause.kind.split("+")))


def _family(kind: str) -> str:
    if kind in _EVERYWHERE:
        return kind
    return "call" if "call" in kind.split("_") else kind.partition("_")[0]


def are_one(one: Known, kind: str, other: Known, of: str) -> bool:
    """Whether two faults may be one.

    Args:
        kind, of: of what they are faults: a kind of layer, or a stage.
    """
    first, second = families(one.cause), families(other.cause)
    if one.cause is not None and other.cause is not None and one.cause.sentence == other.cause.sentence:
        return True
    if (first | second) & _EVERYWHERE:
        return True
    if kind == of:
        proven = all(known.cause is not None and known.cause.proven for known in (one, other))
        return not proven or bool(first & second)
    if (first & second) - _ANYWHERE:
        return True
    if (first - {"call"} and second - {"call"}) or kind in _BY_ITSELF:
        return False
    # Nothing tells why: but layers that both depart from what they are are two, and so is one from what it is given.
    wrong = [known.recomputed is not None and bool(known.recomputed.wrong) for known in (one, other)]
    return not (wrong[0] and (wrong[1] or of in _GIVEN))


def kind_of_place(first: FirstDiff, evidence: Evidence) -> str:
    """Of what kind the layer is at which a diff is; else its stage."""
    if first.stage != "forward" or first.reference is None:
        return first.stage
    layers = evidence.runs.reference.info.layers
    layer = next((layer for layer in layers if layer.path == first.reference), None)
    return equivalents.kind(layer) if layer is not None else first.stage

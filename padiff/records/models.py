"""The two models of a comparison, and which of their layers answer to each other, for those who show a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from padiff.records.both import Both
from padiff.records.recorded import Layer
from padiff.system.frames import Frame

_NOT_RECORDED: Both[Mapping[str, tuple[Frame, ...]]] = Both({}, {})


@dataclass(frozen=True, slots=True)
class Partners:
    """Two layers that answer to each other; a layer that answers to several is in as many.

    Attributes:
        reference, candidate: their paths.
        reason: the kind of evidence that decided, e.g. ``names``.
        confidence: 0 to 1; 1 for what a person gave.
    """

    reference: str
    candidate: str
    reason: str
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class Models:
    """Both layer trees, and the pairs that were found.

    Attributes:
        layers: each tree, depth first, in order of definition.
        frameworks: name and version of either side's framework.
        partners: the pairs, in the reference's order of definition.
        stacks: where each layer is called first, by its path, outermost line first; as far as that was recorded.
    """

    layers: Both[tuple[Layer, ...]]
    frameworks: Both[str]
    partners: tuple[Partners, ...] = ()
    stacks: Both[Mapping[str, tuple[Frame, ...]]] = _NOT_RECORDED

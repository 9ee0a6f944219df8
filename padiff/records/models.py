"""The two models of a comparison, and which of their layers answer to each other, for those who show a report."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.both import Both
from padiff.records.recorded import Layer


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
    """

    layers: Both[tuple[Layer, ...]]
    frameworks: Both[str]
    partners: tuple[Partners, ...] = ()

"""Both models of a comparison and the pairs of their layers, for the display of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from padiff.records.both import Both
from padiff.records.recorded import Layer
from padiff.system.frames import Frame

_NOT_RECORDED: Both[Mapping[str, tuple[Frame, ...]]] = Both({}, {})
_NO_LINES: Both[Mapping[str, Frame]] = Both({}, {})
#: Stands for files that are not known.
NO_FILES: Both[Mapping[str, str]] = Both({}, {})


@dataclass(frozen=True, slots=True)
class Partners:
    """Two layers that correspond to each other; a layer with several partners has one object for each.

    Attributes:
        reference, candidate: paths of the two layers.
        reason: the kind of evidence that decided, e.g. ``names``.
        confidence: 0 to 1; 1 for pairs from a layer map that a person wrote.
    """

    reference: str
    candidate: str
    reason: str
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class Models:
    """Both layer trees, and the pairs of layers that the alignment found.

    Attributes:
        layers: each tree, depth first, in order of definition.
        frameworks: name and version of each side's framework.
        partners: the pairs, in the reference's order of definition.
        stacks: the stack of each layer's first call, by the layer's path, outermost line first; for layers whose stack
            was recorded.
        lines: the line that constructs each layer (by path) and each optimizer (``optimizer.0``), where it is known.
        files: the SHA-256 of each file of the user's code, by path, where it is known.
        optimized: the key of each parameter's group in its optimizer (``optimizer.0.group.1``), by ``layer/slot``.
        command: the command line of the candidate's training, where it is known.
    """

    layers: Both[tuple[Layer, ...]]
    frameworks: Both[str]
    partners: tuple[Partners, ...] = ()
    stacks: Both[Mapping[str, tuple[Frame, ...]]] = _NOT_RECORDED
    lines: Both[Mapping[str, Frame]] = _NO_LINES
    files: Both[Mapping[str, str]] = NO_FILES
    optimized: Both[Mapping[str, str]] = NO_FILES
    command: str = ""

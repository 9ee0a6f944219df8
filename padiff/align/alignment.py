"""Result of an alignment: pairs of layers and parameters, their confidence, and layers and parameters without a
partner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from padiff.align.call_order import NO_INPUTS, SAME_ORDER, CallOrder, InputSite
from padiff.align.matching.parameter_pairing import StoredParameters
from padiff.align.slices import Ambiguity, ParameterPair, RuntimeEvidence, Values
from padiff.records import ROOT, SIDES, Both, Layer, unzipped
from padiff.sketches.sketch import Sketch

# Minimum confidence of a pair that needs no further proof.
_SURE = 0.8


@dataclass(frozen=True, slots=True)
class LayerPair(Both[Layer]):
    """Two layers that correspond to each other.

    Attributes:
        reason: the kind of evidence that decided: ``given``, ``path``, ``names``, ``kinds``, ``values``, ``execution``,
            ``order``, ``only one fits``, ``kind`` (though the shapes differ), ``contents``.
        confidence: 0 to 1; 1 for pairs from a layer map that a person wrote.
        evidence: the reasons in words.
        alternatives: paths of the candidate's layers that fit nearly as well.
    """

    reason: str
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()

    @property
    def ambiguous(self) -> bool:
        return bool(self.alternatives)


@dataclass(frozen=True, slots=True)
class SplitPair(Both[tuple[Layer, ...]]):
    """A layer of one side that corresponds to several layers of the other side, in the order of its parts."""

    reason: str
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()


# Maximum number of pairs, and of layers without a partner, that a printed alignment lists.
_SHOWN = 40


@dataclass(frozen=True, repr=False)
class Alignment:
    """Pairs of the layers and parameters of two runs, in the reference's order of definition.

    Attributes:
        pairs: pairs of one layer on each side.
        reference_only, candidate_only: layers without a partner.
        splits: pairs of one layer with several layers.
        parameters: pairs of parameters, or of parts of parameters.
        reference_parameters, candidate_parameters: ``layer/slot`` of parameters without a partner.
        ambiguities: assumptions about the storage of parameters.
        cut_elsewhere: pairs of layers, by path, with the same contents that end at different places of the computation,
            so that their outputs are not compared.
        differ_inside: pairs of layers, by path, from the runs' own layer maps that have different contents: their
            outputs are compared, their contents are not.
        call_order: calls of the candidate's loop that the reference's loop makes in another order.
        derived: sites of the inputs, on each side, that are computed from an output of a recorded layer.
        storage: computes the parameters for other answers to the ambiguities; `None` without ambiguities.
    """

    pairs: tuple[LayerPair, ...]
    reference_only: tuple[Layer, ...] = ()
    candidate_only: tuple[Layer, ...] = ()
    splits: tuple[SplitPair, ...] = ()
    parameters: tuple[ParameterPair, ...] = ()
    reference_parameters: tuple[str, ...] = ()
    candidate_parameters: tuple[str, ...] = ()
    ambiguities: tuple[Ambiguity, ...] = ()
    cut_elsewhere: frozenset[tuple[str, str]] = frozenset()
    differ_inside: frozenset[tuple[str, str]] = frozenset()
    call_order: CallOrder = field(default=SAME_ORDER, compare=False)
    derived: Both[frozenset[InputSite]] = NO_INPUTS
    storage: StoredParameters | None = field(default=None, compare=False)

    def answered(self, answers: Mapping[str, str]) -> Alignment:
        """Return the alignment with answers to ambiguities, by `Ambiguity.about`; earlier answers to others stay."""
        if self.storage is None:
            return self
        storage = self.storage.answered(answers)
        return replace(self, parameters=storage.pairs, ambiguities=storage.ambiguities, storage=storage)

    @property
    def layers(self) -> Both[list[Layer]]:
        """Return all layers of each side."""
        paired, split = unzipped(self.pairs), unzipped(self.splits)
        return Both(
            [*paired.reference, *self.reference_only, *chain(*split.reference)],
            [*paired.candidate, *self.candidate_only, *chain(*split.candidate)],
        )

    @property
    def surplus(self) -> Both[tuple[str, ...]]:
        """Return the outermost layers of each side that contain parameters and no paired parameter."""
        covered = unzipped(self.parameters).map(lambda side: {part.layer for part in chain(*side)})
        unmatched = Both(self.reference_parameters, self.candidate_parameters)
        return Both(*(_surplus(*side) for side in zip(self.layers, unmatched, covered)))

    def __str__(self) -> str:
        lines = [repr(self)[1:-1]]
        width = max((len(pair.reference.path) for pair in self.pairs), default=0)
        lines += [
            f"  {pair.reference.path.ljust(width)}  {pair.candidate.path}  (by {pair.reason}, {pair.confidence:.2f})"
            for pair in self.pairs[:_SHOWN]
        ]
        if len(self.pairs) > _SHOWN:
            lines.append(f"  ... and {len(self.pairs) - _SHOWN} more pairs")
        for side, layers in zip(SIDES, (self.reference_only, self.candidate_only)):
            if layers:
                more = f", and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
                lines.append(f"{side} only: {', '.join(layer.path for layer in layers[:_SHOWN])}{more}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        unmatched = len(self.reference_parameters) + len(self.candidate_parameters)
        return (
            f"<Alignment: {len(self.pairs)} layers paired, {len(self.reference_only)} left of the reference and "
            f"{len(self.candidate_only)} of the candidate; {unmatched} parameters without a partner>"
        )

    @property
    def sure(self) -> bool:
        """Return True if all parameters have partners, all ambiguities an answer, and no pair is a close choice or
        uncertain.
        """
        unanswered = (ambiguity for ambiguity in self.ambiguities if not ambiguity.answer)
        undecided = (*self.reference_parameters, *self.candidate_parameters, *unanswered, *self.ambiguous)
        confidences = [pair.confidence for pair in self.pairs if pair.reference.parameters]
        confidences += [split.confidence for split in self.splits]
        return not undecided and min(confidences, default=1.0) >= _SURE

    @property
    def ambiguous(self) -> tuple[LayerPair, ...]:
        """Return the pairs for which another partner fits nearly as well."""
        return tuple(pair for pair in self.pairs if pair.ambiguous)


def _surplus(layers: Iterable[Layer], unmatched: Iterable[str], covered: Collection[str]) -> tuple[str, ...]:
    owners = {site.rpartition("/")[0] for site in unmatched}
    paths = [
        layer.path
        for layer in sorted(layers, key=lambda layer: layer.path)
        if layer.path in owners or any(path.startswith(f"{layer.path}.") for path in owners)
        if not any(path == layer.path or path.startswith(f"{layer.path}.") for path in covered)
        if layer.path != ROOT
    ]
    return tuple(path for path in paths if not any(path.startswith(f"{above}.") for above in paths))


#: Relative L2 error below which two starting weights count as the same.
_SAME = 1e-3


def resolved(alignment: Alignment, seen: Both[RuntimeEvidence]) -> Alignment:
    """Return the alignment with each ambiguity answered by the option under which most starting weights agree.

    Args:
        seen: observations from running the two models; without values, the default options stay.
    """
    values = seen.map(lambda side: side.values)
    storage = alignment.storage
    if storage is None or None in values:
        return alignment
    for ambiguity in alignment.ambiguities:
        agreeing = {
            option: sum(_same(pair, values) for pair in storage.pairs_if(ambiguity.about, option))
            for option in ambiguity.options
        }
        # If no option fits, the weights of this ambiguity start unequal, and the values do not decide it.
        if any(agreeing.values()):
            storage = storage.answered({ambiguity.about: max(agreeing, key=agreeing.__getitem__)})
    return alignment.answered(storage.answers)


def _same(pair: ParameterPair, values: Both[Values | None]) -> bool:
    arrays = []
    for parts, read in zip(pair, values):
        stored = read(parts[0].layer, parts[0].slot) if read is not None and len(parts) == 1 else None
        if stored is None or isinstance(stored, Sketch):
            return False
        arrays.append(parts[0].read(stored).ravel().astype(np.float64))
    a, b = arrays
    # Zeros agree in any order.
    return a.size == b.size and bool(np.linalg.norm(a - b) < _SAME * np.linalg.norm(a))

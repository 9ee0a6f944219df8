"""What an alignment is: layers and parameters that answer to each other, how sure that is, and what is left over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from padiff.align.matching.parameters import StoredParameters
from padiff.align.slices import Ambiguity, ParameterPair
from padiff.records import ROOT, SIDES, Both, Layer, unzipped

# From which confidence on a pair needs no further proof.
_SURE = 0.8


@dataclass(frozen=True, slots=True)
class LayerPair(Both[Layer]):
    """Two layers that answer to each other.

    Attributes:
        reason: the kind of evidence that decided: ``given``, ``path``, ``names``, ``kinds``, ``values``, ``execution``,
            ``order``, ``only one fits``, ``kind`` (though the shapes differ), ``contents``.
        confidence: 0 to 1; 1 for what a person gave.
        evidence: the reasons in words.
        alternatives: paths of the candidate's layers that would have fitted nearly as well.
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
    """A layer of one side that answers to several of the other, in the order of its parts."""

    reason: str
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()


# Pairs, and layers without a partner, that a printed alignment lists.
_SHOWN = 40


@dataclass(frozen=True, repr=False)
class Alignment:
    """The layers and parameters of two runs that answer to each other, in the reference's order of definition.

    Attributes:
        pairs: layers, one to one.
        reference_only, candidate_only: layers without a partner.
        splits: layers that answer to several.
        parameters: parameters, or parts of them.
        reference_parameters, candidate_parameters: ``layer/slot`` of parameters without a partner.
        ambiguities: what had to be assumed.
        cut_elsewhere: pairs of layers, by path, that hold the same but end at other places of the computation, so
            that their outputs are not compared.
        differ_inside: pairs of layers, by path, of the runs' own layer maps that do not hold the same: what they give
            is compared, what they hold is not.
        storage: gives the parameters under other answers; `None` where nothing had to be assumed.
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
    storage: StoredParameters | None = field(default=None, compare=False)

    def answered(self, answers: Mapping[str, str]) -> Alignment:
        """The alignment with ambiguities answered so, by what they are about; other answers that it has stand."""
        if self.storage is None:
            return self
        storage = self.storage.answered(answers)
        return replace(self, parameters=storage.pairs, ambiguities=storage.ambiguities, storage=storage)

    @property
    def layers(self) -> Both[list[Layer]]:
        """All layers of either side."""
        paired, split = unzipped(self.pairs), unzipped(self.splits)
        return Both(
            [*paired.reference, *self.reference_only, *chain(*split.reference)],
            [*paired.candidate, *self.candidate_only, *chain(*split.candidate)],
        )

    @property
    def surplus(self) -> Both[tuple[str, ...]]:
        """The outermost layers of either side that hold parameters none of which has a partner."""
        covered = unzipped(self.parameters).map(lambda side: {part.layer for part in chain(*side)})
        left = Both(self.reference_parameters, self.candidate_parameters)
        return Both(*(_surplus(*side) for side in zip(self.layers, left, covered)))

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
        left = len(self.reference_parameters) + len(self.candidate_parameters)
        return (
            f"<Alignment: {len(self.pairs)} layers paired, {len(self.reference_only)} left of the reference and "
            f"{len(self.candidate_only)} of the candidate; {left} parameters without a partner>"
        )

    @property
    def sure(self) -> bool:
        """Whether all parameters have partners, and nothing had to be assumed or was a close choice."""
        unanswered = (ambiguity for ambiguity in self.ambiguities if not ambiguity.answer)
        left = (*self.reference_parameters, *self.candidate_parameters, *unanswered, *self.ambiguous)
        found = [pair.confidence for pair in self.pairs if pair.reference.parameters]
        found += [split.confidence for split in self.splits]
        return not left and min(found, default=1.0) >= _SURE

    @property
    def ambiguous(self) -> tuple[LayerPair, ...]:
        """The pairs that another partner would fit nearly as well."""
        return tuple(pair for pair in self.pairs if pair.ambiguous)


def _surplus(layers: Iterable[Layer], left: Iterable[str], covered: Collection[str]) -> tuple[str, ...]:
    gone = {site.rpartition("/")[0] for site in left}
    whole = [
        layer.path
        for layer in sorted(layers, key=lambda layer: layer.path)
        if layer.path in gone or any(path.startswith(f"{layer.path}.") for path in gone)
        if not any(path == layer.path or path.startswith(f"{layer.path}.") for path in covered)
        if layer.path != ROOT
    ]
    return tuple(path for path in whole if not any(path.startswith(f"{above}.") for above in whole))

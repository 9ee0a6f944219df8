"""What of a comparison is asked for: some stages, some layers."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass

from padiff.errors import UsageError
from padiff.records import STAGES, Both, Difference, Pair, RunInfo
from padiff.system.spelling import nearest


@dataclass(frozen=True)
class Asked:
    """What is reported.

    Attributes:
        stages: these stages only.
        layers: paths of the reference's layers and of the candidate's; `None`: all.
    """

    stages: frozenset[str]
    layers: Both[set[str]] | None = None

    @classmethod
    def of(cls, stages: Collection[str], patterns: Collection[str] | None, infos: Both[RunInfo]) -> Asked:
        """What a caller's stages and path patterns mean.

        Raises:
            UsageError: an unknown stage; a pattern that matches no layer of either run.
        """
        unknown = sorted({*stages} - {*STAGES})
        if unknown:
            raise UsageError(f"unknown stage {unknown[0]!r}. {nearest(unknown[0], STAGES)}")
        return cls(frozenset(stages), None if patterns is None else _matching(patterns, infos))

    @property
    def everything(self) -> bool:
        """Whether all that was compared is."""
        return self.layers is None and self.stages.issuperset(STAGES)

    def has(self, pair: Pair) -> bool:
        """Whether a pair is of one of these stages and layers."""
        if pair.stage not in self.stages:
            return False
        sides = zip(self.layers or (), pair.sides)
        return self.layers is None or any(record is not None and record.layer in paths for paths, record in sides)

    def concerns(self, difference: Difference) -> bool:
        """Whether what the runs declare differently is of these; what is of no layer is of all."""
        if difference.stage not in self.stages:
            return False
        sides = zip(self.layers or (), difference.layers)
        return self.layers is None or not any(difference.layers) or any({*own} & paths for paths, own in sides)


def _matching(patterns: Collection[str], infos: Both[RunInfo]) -> Both[set[str]]:
    found: Both[set[str]] = Both(set(), set())
    paths = infos.map(lambda info: {path for layer in info.layers for path in (layer.path, *layer.aliases)})
    for pattern in patterns:
        matching = [{path for path in side if fnmatch.fnmatchcase(path, pattern)} for side in paths]
        if not any(matching):
            raise UsageError(
                f"no layer of either run matches {pattern!r}. {nearest(pattern, sorted(set().union(*paths)))}"
            )
        for side, more in zip(found, matching):
            side |= more
    return found

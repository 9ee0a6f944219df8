"""Filter of a comparison's report by stage and by layer."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from dataclasses import dataclass

from padiff.errors import UsageError
from padiff.records import STAGES, Both, Difference, Pair, RunInfo
from padiff.system.spelling import nearest

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True)
class ReportFilter:
    """Filter of the reported diffs.

    Attributes:
        stages: the stages to report.
        layers: paths of the reference's layers and of the candidate's layers to report; `None` for all layers.
    """

    stages: frozenset[str]
    layers: Both[set[str]] | None = None

    @classmethod
    def from_arguments(
        cls, stages: Collection[str], patterns: Collection[str] | None, infos: Both[RunInfo]
    ) -> ReportFilter:
        """Build the filter from a caller's stages and path patterns.

        Raises:
            UsageError: a stage is unknown, or a pattern matches no layer of either run.
        """
        unknown = sorted({*stages} - {*STAGES})
        if unknown:
            raise UsageError(f"unknown stage {unknown[0]!r}. {nearest(unknown[0], STAGES)}")
        return cls(frozenset(stages), None if patterns is None else _matching(patterns, infos))

    @property
    def everything(self) -> bool:
        """Return True if the filter excludes nothing."""
        return self.layers is None and self.stages.issuperset(STAGES)

    def has(self, pair: Pair) -> bool:
        """Return True if the pair's stage and one of its layers pass the filter."""
        if pair.stage not in self.stages:
            return False
        sides = zip(self.layers or (), pair.sides)
        return self.layers is None or any(record is not None and record.layer in paths for paths, record in sides)

    def concerns(self, difference: Difference) -> bool:
        """Return True if a declared difference passes the filter; a difference that names no layer passes for all
        layers.
        """
        if difference.stage not in self.stages:
            return False
        sides = zip(self.layers or (), difference.layers)
        return self.layers is None or not any(difference.layers) or any({*names} & paths for paths, names in sides)


def _matching(patterns: Collection[str], infos: Both[RunInfo]) -> Both[set[str]]:
    matches: Both[set[str]] = Both(set(), set())
    paths = infos.map(lambda info: {path for layer in info.layers for path in (layer.path, *layer.aliases)})
    for pattern in patterns:
        matching = [{path for path in side if fnmatch.fnmatchcase(path, pattern)} for side in paths]
        if not any(matching):
            raise UsageError(
                f"no layer of either run matches {pattern!r}. {nearest(pattern, sorted(set().union(*paths)))}"
            )
        for side, more in zip(matches, matching):
            side |= more
    return matches


class Steps:
    """Step numbers parsed from a text such as ``0,8,100-200``; ``in`` tests a number."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ranges: list[tuple[int, int]] = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part.strip())
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise UsageError(f"--steps takes numbers and ranges, such as 0,8,100-200; got {text!r}")
            self._ranges.append((int(match[1]), int(match[2] or match[1])))

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(first <= number <= last for first, last in self._ranges)

    def __repr__(self) -> str:
        return self._text

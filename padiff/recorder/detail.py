"""Levels of detail: the amount of data recorded per tensor in a due step."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from padiff.errors import UsageError
from padiff.model.selection import Node, find_paths
from padiff.recorder.schedule import Schedule
from padiff.records import STAGES
from padiff.system.spelling import nearest

#: In order: nothing; a sketch of some hundred bytes (`padiff.sketches.sketch`); the full tensor; full tensors in the
#: first steps, within a budget, and sketches in later steps (`padiff.recorder.levels`).
NOTHING, SKETCH, FULL, AUTO = LEVELS = ("nothing", "sketch", "full", "auto")
#: Internal level: a small tensor in full, a sketch of a larger one. Replaces ``sketch`` in the first recorded step.
SMALL = "small"
#: Internal level: full tensors up to a number of bytes, then sketches. Used for activations in the first recorded step.
WITHIN = "within"


@dataclass(frozen=True)
class Detail:
    """Level of detail by stage and layer.

    Args:
        level: ``auto``, ``full``, ``sketch`` or ``nothing``; the level if no rule matches.
        rules: levels for stages and layers; the last matching rule wins. A key is a stage (``backward``), a path
            pattern (``encoder.*``, matched like a file name in a shell; ``*`` also matches dots), or both
            (``encoder.*/backward``).
        full_every_n_steps: the due steps in which sketches are replaced by full tensors: a number or a `Schedule`.
            Default: none.

    Raises:
        UsageError: an unknown level or stage.
    """

    level: str = AUTO
    rules: Mapping[str, str] = field(default_factory=dict)
    full_every_n_steps: int | Schedule | None = None

    def __post_init__(self) -> None:
        for where, level in (("detail", self.level), *((f"detail[{key!r}]", lv) for key, lv in self.rules.items())):
            if level not in LEVELS:
                raise UsageError(
                    f"{where}: a level of detail is one of {', '.join(LEVELS)}, got {level!r}. "
                    + nearest(str(level), LEVELS)
                )
        for key in self.rules:
            _, stage = _split(key)
            if stage and stage not in STAGES:
                raise UsageError(f"detail[{key!r}]: unknown stage {stage!r}. {nearest(stage, STAGES)}")

    @classmethod
    def from_arguments(
        cls, detail: str | Mapping[str, str] | Detail, full_every_n_steps: int | Schedule | None = None
    ) -> Detail:
        """Return the `Detail` for the arguments ``detail`` and ``full_every_n_steps`` of a call.

        A mapping holds rules; its key ``*`` is the level of everything else (default ``auto``).

        Raises:
            UsageError: ``detail`` has another type, or ``full_every_n_steps`` is given twice.
        """
        if isinstance(detail, Detail):
            if full_every_n_steps is not None:
                raise UsageError("full_every_n_steps is given twice: in the Detail, and beside it")
            return detail
        if isinstance(detail, Mapping):
            rules = {str(key): level for key, level in detail.items() if key != "*"}
            return cls(detail.get("*", AUTO), rules, full_every_n_steps)
        if not isinstance(detail, str):
            raise UsageError(
                f"detail is a level ({', '.join(LEVELS)}), a mapping from stages and path patterns to levels, or a "
                f"padiff.Detail, got {type(detail).__name__}"
            )
        return cls(detail, {}, full_every_n_steps)

    @property
    def sketches(self) -> bool:
        """Return True if any tensor may be sketched."""
        return bool({SKETCH, AUTO} & {self.level, *self.rules.values()})

    @property
    def automatic(self) -> bool:
        """Return True if any level is ``auto``."""
        return AUTO in (self.level, *self.rules.values())

    def without_auto(self) -> Detail:
        """Return a copy with ``auto`` replaced by ``full``."""
        rules = {key: FULL if level == AUTO else level for key, level in self.rules.items()}
        return replace(self, level=FULL if self.level == AUTO else self.level, rules=rules)

    def described(self) -> dict[str, Any]:
        """Return the levels in the format of a run's ``recording``; empty if all tensors are recorded in full."""
        if self.level == FULL and not self.rules:
            return {}
        every = self.full_every_n_steps
        full = {} if every is None else {"full_every_n_steps": Schedule.from_argument(every).described()}
        return {"detail": {"*": self.level, **self.rules}, **full}

    def check_patterns(self, nodes: Sequence[Node]) -> None:
        """Check that each pattern matches a layer of the model.

        Raises:
            SelectionError: a pattern matches no layer; the message names the nearest paths.
        """
        for key in self.rules:
            pattern, _ = _split(key)
            if pattern:
                find_paths(nodes, pattern, f"detail[{key!r}]")

    def level_of(self, path: str, stage: str) -> str:
        """Return the level of a layer, given by path, at a stage."""
        result = self.level
        for key, level in self.rules.items():
            pattern, only = _split(key)
            if (not only or only == stage) and (not pattern or fnmatch.fnmatchcase(path, pattern)):
                result = level
        return result


def _split(key: str) -> tuple[str, str]:
    """Return the path pattern and the stage of a rule's key; either may be empty."""
    if key in STAGES:
        return "", key
    pattern, slash, stage = key.rpartition("/")
    return (pattern, stage) if slash else (key, "")

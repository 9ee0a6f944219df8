"""Levels of detail: how much is kept of each tensor of a due step."""

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

#: Nothing; a sketch of some hundred bytes (`padiff.sketches.sketch`); the full tensor; full tensors in the first steps,
#: within a budget, and sketches after that (`padiff.recorder.levels`).
NOTHING, SKETCH, FULL, AUTO = LEVELS = ("nothing", "sketch", "full", "auto")
#: All of a small tensor, a sketch of a larger one: what sketches are in the first recorded step. Nobody asks for it.
SMALL = "small"
#: The full tensor as long as it fits, a sketch of it else: what the first recorded step keeps of activations. Likewise.
WITHIN = "within"


@dataclass(frozen=True)
class Detail:
    """What is kept, by stage and layer.

    Args:
        level: ``auto``, ``full``, ``sketch`` or ``nothing``, where no rule says otherwise.
        rules: which level where, in order; the last that fits wins. A key is a stage (``backward``), a path pattern
            (``encoder.*``, matched as a shell does, ``*`` passing dots), or both (``encoder.*/backward``).
        full_every_n_steps: in which of the due steps sketches give way to full tensors: a number or a `Schedule`.
            Default: in none.

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
    def of(cls, detail: str | Mapping[str, str] | Detail, full_every_n_steps: int | Schedule | None = None) -> Detail:
        """What a call's ``detail`` and ``full_every_n_steps`` mean.

        A mapping holds rules; its key ``*`` is the level of everything else (default ``auto``).
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
        """Whether anything may be sketched."""
        return bool({SKETCH, AUTO} & {self.level, *self.rules.values()})

    @property
    def automatic(self) -> bool:
        """Whether anything is kept in full for as long as there is room."""
        return AUTO in (self.level, *self.rules.values())

    def without_auto(self) -> Detail:
        """The same, but that what would be kept in full for as long as there is room always is."""
        rules = {key: FULL if level == AUTO else level for key, level in self.rules.items()}
        return replace(self, level=FULL if self.level == AUTO else self.level, rules=rules)

    def described(self) -> dict[str, Any]:
        """The levels as a run's ``recording`` has them; empty where everything is kept."""
        if self.level == FULL and not self.rules:
            return {}
        every = self.full_every_n_steps
        full = {} if every is None else {"full_every_n_steps": Schedule.of(every).described()}
        return {"detail": {"*": self.level, **self.rules}, **full}

    def check(self, nodes: Sequence[Node]) -> None:
        """Tell a pattern that matches no layer of the model.

        Raises:
            SelectionError: naming the nearest paths.
        """
        for key in self.rules:
            pattern, _ = _split(key)
            if pattern:
                find_paths(nodes, pattern, f"detail[{key!r}]")

    def level_of(self, path: str, stage: str) -> str:
        """The level for a layer, by path, at a stage."""
        found = self.level
        for key, level in self.rules.items():
            pattern, only = _split(key)
            if (not only or only == stage) and (not pattern or fnmatch.fnmatchcase(path, pattern)):
                found = level
        return found


def _split(key: str) -> tuple[str, str]:
    """A rule's path pattern and stage; either may be empty."""
    if key in STAGES:
        return "", key
    pattern, slash, stage = key.rpartition("/")
    return (pattern, stage) if slash else (key, "")

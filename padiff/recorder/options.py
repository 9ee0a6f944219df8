"""Options of a recording: names, types, meaning, schedules of steps, and levels of detail."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar

from padiff.dump.store import AnyPath
from padiff.errors import OptionError, UsageError
from padiff.model.selection import Node, find_paths
from padiff.records import STAGES, Step
from padiff.system.terminal import nearest

# Maximum number of steps that a run's description lists one by one.
_FEW = 100


@dataclass(frozen=True)
class Schedule:
    """A schedule of the steps to record.

    Args:
        every: interval between recorded steps; 1 means every step.
        first: first step that may be recorded.
        last: last step that may be recorded; `None` for no end.
        steps: exactly these steps; ``every`` is then ignored.

    Raises:
        UsageError: a number is negative, or ``every`` is below 1.
    """

    every: int = 1
    first: int = 0
    last: int | None = None
    steps: Collection[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"every_n_steps has to be a whole number of at least 1, got {self.every!r}")
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise UsageError(f"a schedule needs 0 <= first <= last, got first={self.first}, last={self.last}")
        if self.steps is not None:
            wrong = [s for s in self.steps if not isinstance(s, int) or s < 0]
            if wrong:
                raise UsageError(f"steps to record are whole numbers of at least 0, got {wrong[0]!r}")
            object.__setattr__(self, "steps", frozenset(self.steps))

    @classmethod
    def from_argument(cls, every_n_steps: int | Schedule) -> Schedule:
        """Return the schedule for an ``every_n_steps`` option: a number, or a schedule."""
        return every_n_steps if isinstance(every_n_steps, Schedule) else cls(every=every_n_steps)

    def due(self, step: int) -> bool:
        """Return True if this step is to be recorded."""
        if step < self.first or (self.last is not None and step > self.last):
            return False
        return step in self.steps if self.steps is not None else (step - self.first) % self.every == 0

    def count(self, begin: int, end: int) -> int:
        """Return the number of steps to record from ``begin`` (included) to ``end`` (excluded)."""
        if self.steps is not None:
            return sum(begin <= step < end and self.due(step) for step in self.steps)
        last = end - 1 if self.last is None else min(self.last, end - 1)
        first = self.first + max(0, -(-(begin - self.first) // self.every)) * self.every
        return max(0, (last - first) // self.every + 1)

    def described(self) -> int | list[int] | dict[str, int | None]:
        """Return the schedule for a run's description: the interval, the list of steps, or the fields that are set."""
        if self.steps is not None:
            few = len(self.steps) <= _FEW
            return sorted(self.steps) if few else {"steps": len(self.steps), "first": min(self.steps)}
        if not self.first and self.last is None:
            return self.every
        return {"every": self.every, "first": self.first, "last": self.last}


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


class RunOptions(TypedDict, total=False):
    """Options of every recorded run, accepted by `padiff.record` and by the callbacks of hosts."""

    every_n_steps: int | Schedule
    """Steps that are recorded: every so many steps, or a `Schedule`. Default 1."""
    detail: str | Mapping[str, str] | Detail
    """Recording level of tensors: ``"auto"`` (default: full tensors in the first recorded steps, up to 200 MB in
    total, and sketches after that), ``"full"``, ``"sketch"`` (some hundred bytes, from which the relative
    L2 error to another run is estimated; small tensors of the first step are stored in full), ``"nothing"``; or a
    mapping from stages and path patterns to levels, e.g.
    ``{"*": "sketch", "backward": "nothing", "head.*/forward": "full"}``.
    With ``pack=False`` the default is ``"full"``, as only packed steps can store sketches."""
    full_every_n_steps: int | Schedule | None
    """Steps, among the recorded ones, that store full tensors instead of sketches. Default: none."""
    replay_every_n_steps: int | Schedule | None
    """Steps that store a replay pack (`padiff.records.traces.Pack`): all that is needed to repeat the step elsewhere.
    Such a step is always recorded, whatever ``every_n_steps`` says, and recorded in full. Default: none."""
    white_list: Iterable[Any] | None
    """Record these layers only; see `padiff.model.selection.select`. With a white list, a black list does nothing."""
    black_list: Iterable[Any] | None
    """Record all layers except these; see `padiff.model.selection.select`."""
    functions: bool
    """True to also record the functions and operators that the code of the layers calls, with their inputs and
    outputs, in the first recorded step, in the second one if it is recorded in full, and in steps that are requested.
    A diff is then located in the code between two layers. Where the level is sketch, the first step also stores small
    tensors in full, at most 32 MB of them. Such a step takes up to three times as long as other recorded steps.
    Default True."""
    sources: bool
    """False to leave the text of your code out of the run: a verdict then names files and lines of calls only, and not
    where layers and optimizers are constructed. Default True: lines of at most 200 characters are kept."""
    pack: bool | None
    """True to store each step as one file, in the safetensors format; False to store JSON and an ``.npy`` file for each
    tensor. Default: True for steps that have sketches, and for all steps with a compression."""
    compression: str
    """Compression of packed tensors: ``"zlib"``, or ``"zstd"`` (needs the package zstandard). Default: none."""
    max_bytes: float | None
    """Maximum size of the run folder (default: no limit), or of a run in memory (default: 1 GB). Before a step
    is written that does not fit, other steps are deleted, beginning in the middle of the run. The first step, the worst
    steps (NaN, the largest diffs of a live comparison) and the latest step stay."""
    name: str
    """Name of the run in reports. Default: the name of the folder."""
    command: str
    """Command line of the training, as `padiff run` sets it. A verdict names it in a command to run next; nothing of
    padiff runs it by itself. Default: not recorded."""
    start_step: int
    """Number of the first step. Default 0."""
    existing: str
    """Behaviour if the folder holds a run already: raise an error (``"error"``, default), continue the run
    (``"resume"``; steps that are recorded again are replaced), or replace the run (``"overwrite"``)."""
    on_error: str | None
    """Behaviour on an error of the recording (a full disk, an internal error of padiff): ``"warn"`` and let the
    training continue, or ``"raise"`` in the loop. Default: raise if the run can't be created, and warn after that."""


class RecordOptions(RunOptions, total=False):
    """The options of `padiff.record`."""

    optimizer: Any
    """The optimizer, or several (a list, a mapping). With an optimizer, `grad` is the gradient that it consumed (after
    clipping and unscaling), and `update` is the change of the parameter. Without an optimizer, `grad` is the gradient
    that backward left in the parameter."""
    layer_map: Sequence[Any] | None
    """Layers that correspond, in order, to those of the other run's ``layer_map``. Their sublayers are not recorded."""
    rank: int | None
    """Rank of this process in a distributed run. Default: the rank that the framework reports."""
    world_size: int | None
    """Number of processes of a distributed run. Default: the number that the framework reports."""
    on_written: Callable[[Step], None] | None
    """Function that the writer's thread calls with each step after the step is written."""


@dataclass(frozen=True)
class Scope:
    """Options that select the steps, the layers and the recording level of tensors. See `RecordOptions`.

    Attributes:
        every_n_steps: `None` if the caller did not set it: every step is recorded, unless the first ``try_dump`` sets
            another number.
    """

    every_n_steps: int | Schedule | None = None
    detail: str | Mapping[str, str] | Detail = AUTO
    full_every_n_steps: int | Schedule | None = None
    optimizer: Any = None
    white_list: Iterable[Any] | None = None
    black_list: Iterable[Any] | None = None
    layer_map: Sequence[Any] | None = None
    start_step: int = 0
    functions: bool = True
    sources: bool = True
    replay_every_n_steps: int | Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.functions, bool):
            raise UsageError(f"functions is True or False, got {self.functions!r}")
        if not isinstance(self.sources, bool):
            raise UsageError(f"sources is True or False, got {self.sources!r}")
        start = self.start_step
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UsageError(f"start_step has to be a whole number of at least 0, got {start!r}")


@dataclass(frozen=True)
class Target:
    """Options of storing steps: the folder, the file format, and the behaviour on a writing error. See `RecordOptions`.

    Attributes:
        dir_path: the run folder; `None` for memory.
    """

    dir_path: str | AnyPath | None = None
    pack: bool | None = None
    compression: str = ""
    max_bytes: float | None = None
    existing: str = "error"
    on_error: str | None = None
    on_written: Callable[[Step], None] | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn", None):
            raise UsageError(f"on_error is 'raise' or 'warn', got {self.on_error!r}")


@dataclass(frozen=True)
class Identity:
    """Name and command of the run, rank of this process, and number of processes. See `RecordOptions`."""

    name: str = ""
    command: str = ""
    rank: int | None = None
    world_size: int | None = None


_Group = TypeVar("_Group", Scope, Target, Identity)


def group(kind: type[_Group], options: Mapping[str, Any], **more: Any) -> _Group:
    """Return the options of one group, as an object of class ``kind``; a missing option gets its default."""
    merged = {**options, **more}
    return kind(**{field.name: merged[field.name] for field in fields(kind) if field.name in merged})


def check_names(options: Mapping[str, Any], known: type) -> None:
    """Check that all options exist.

    Args:
        options: options of a call, by name.
        known: `TypedDict` of the options that the call accepts.

    Raises:
        OptionError: an option does not exist; the message suggests similar names.
    """
    for name in options:
        if name not in known.__annotations__:
            raise OptionError(f"unexpected keyword argument {name!r}. {nearest(name, known.__annotations__)}")

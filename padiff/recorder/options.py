"""The options of a recording: their names, types and meaning for callers, and the values they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from padiff.dump.remote_path import AnyPath
from padiff.errors import OptionError, UsageError
from padiff.recorder.detail import AUTO, Detail
from padiff.recorder.schedule import Schedule
from padiff.records import Step
from padiff.system.spelling import nearest


class RunOptions(TypedDict, total=False):
    """What can be asked of every recorded run: by `padiff.record`, and by the callbacks of hosts."""

    every_n_steps: int | Schedule
    """Which steps are due: a number or a `Schedule`. Default 1."""
    detail: str | Mapping[str, str] | Detail
    """How much is kept of each tensor: ``"auto"`` (default: full tensors in the first recorded steps, 200 MB of them in
    all, and sketches after that), ``"full"``, ``"sketch"`` (some hundred bytes, from which the relative
    L2 error to another run is estimated; in the first step small tensors are whole), ``"nothing"``; or a mapping from
    stages and path patterns to these, e.g. ``{"*": "sketch", "backward": "nothing", "head.*/forward": "full"}``.
    With ``pack=False`` the default is ``"full"``, as sketches are kept in packed steps."""
    full_every_n_steps: int | Schedule | None
    """In which of the due steps full tensors are kept instead of sketches. Default: none."""
    replay_every_n_steps: int | Schedule | None
    """In which steps a replay pack is kept (`padiff.records.pack.Pack`): what it takes to do the step again elsewhere.
    Such a step is due whatever ``every_n_steps`` says, and recorded in full. Default: none."""
    white_list: Iterable[Any] | None
    """Record these layers only; see `padiff.model.selection.select`. With a white list, a black list does nothing."""
    black_list: Iterable[Any] | None
    """Record all layers but these; see `padiff.model.selection.select`."""
    functions: bool
    """Whether the first recorded step, and steps that are asked for, also hold which functions and operators the code
    of the layers calls, what goes into them and what comes out: where in the code between two layers a diff comes from.
    The first one then has small tensors whole where sketches are asked for, 32 MB of them at most.
    Such a step takes up to three times as long as another one that is recorded. Default true."""
    pack: bool | None
    """Whether all of a step goes into one file, in the safetensors format. Default: where the step has sketches, or a
    compression asks for it; else a step is JSON and an ``.npy`` file for each tensor."""
    compression: str
    """How packed tensors are compressed: ``"zlib"``, or ``"zstd"`` (needs the package zstandard). Default: not."""
    max_bytes: float | None
    """How large the run folder may become; of a run in memory, how much of it is held (default: 1 GB). Before a step
    is written that does not fit, others are taken away: first those in the middle; the first step, the worst ones
    (NaN, the largest diffs of a live comparison) and the latest stay. Default: no limit."""
    name: str
    """What reports call the run. Default: the folder's name."""
    start_step: int
    """Number of the first step. Default 0."""
    existing: str
    """What to do with a run that the folder holds already: ``"error"`` (default), ``"resume"`` it (steps recorded
    again are replaced), or ``"overwrite"`` it."""
    on_error: str | None
    """What an error of the recording does (a full disk, an error of padiff's own): ``"warn"`` while the training goes
    on, or ``"raise"`` in the loop. Default: raise if the run can't be made, and warn once it is."""


class RecordOptions(RunOptions, total=False):
    """The options of `padiff.record`."""

    optimizer: Any
    """The optimizer, or several (a list, a mapping); with it `grad` is what the optimizer consumed (after clipping and
    unscaling) and `update` is what it did. Without it `grad` is what backward left."""
    layer_map: Sequence[Any] | None
    """Layers that correspond, in order, to those of the other run's ``layer_map``; their sublayers are not recorded."""
    rank: int | None
    """Number of this process in a distributed run. Default: what the framework says."""
    world_size: int | None
    """How many processes a distributed run has. Default: what the framework says."""
    on_written: Callable[[Step], None] | None
    """Called with each step once it is written, on the writer's thread."""


@dataclass(frozen=True)
class Scope:
    """What of a training is recorded: which steps, which layers, how much of each tensor. See `RecordOptions`.

    Attributes:
        every_n_steps: `None` where nobody has said it; that means each step, or what the first ``try_dump`` says.
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
    replay_every_n_steps: int | Schedule | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.functions, bool):
            raise UsageError(f"functions is True or False, got {self.functions!r}")
        start = self.start_step
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UsageError(f"start_step has to be a whole number of at least 0, got {start!r}")


@dataclass(frozen=True)
class Target:
    """Where steps go and how they are stored, and what a writing error does. See `RecordOptions`.

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
    """Which run it is, and which of its processes this one. See `RecordOptions`."""

    name: str = ""
    rank: int | None = None
    world_size: int | None = None


_Group = TypeVar("_Group", Scope, Target, Identity)


def group(kind: type[_Group], options: Mapping[str, Any], **more: Any) -> _Group:
    """Those of the options that belong together; what is not given has the group's default."""
    given = {**options, **more}
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


def check_names(options: Mapping[str, Any], known: type) -> None:
    """Refuse options that a call does not have.

    Args:
        known: the `TypedDict` of those that it has.

    Raises:
        OptionError: naming the nearest that there are.
    """
    for name in options:
        if name not in known.__annotations__:
            raise OptionError(f"unexpected keyword argument {name!r}. {nearest(name, known.__annotations__)}")

"""Options of a recording: names, types and meaning for callers, and the dataclasses that group the options."""

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
    """Steps that store a replay pack (`padiff.records.pack.Pack`): all that is needed to repeat the step elsewhere.
    Such a step is always recorded, whatever ``every_n_steps`` says, and recorded in full. Default: none."""
    white_list: Iterable[Any] | None
    """Record these layers only; see `padiff.model.selection.select`. With a white list, a black list does nothing."""
    black_list: Iterable[Any] | None
    """Record all layers except these; see `padiff.model.selection.select`."""
    functions: bool
    """True to also record the functions and operators that the code of the layers calls, with their inputs and
    outputs, in the first recorded step and in steps that are requested. A diff is then located in the code between two
    layers. Where the level is sketch, the first step also stores small tensors in full, at most 32 MB of them.
    Such a step takes up to three times as long as other recorded steps. Default True."""
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

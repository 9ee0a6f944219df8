"""The options of the callbacks: what they are, and whether they go together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padiff.compare import Policy
from padiff.dump.local import absolute, local_folder, run_folder
from padiff.dump.remote_path import AnyPath
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.recorder.detail import Detail
from padiff.recorder.options import RunOptions, check_names
from padiff.recorder.schedule import Schedule
from padiff.replaying.replay_function import runs_of
from padiff_hooks.tags import LAYERS, check_tags

ON_DIFF = ("warn", "stop", "raise")


class TrainingOptions(RunOptions, total=False):
    """The options of a callback."""

    layer_map: Any
    """Without a reference, layers of this model that answer, in order, to those of the other run's map; with one, also
    pairs of paths (reference, candidate), a mapping, or a YAML file."""
    reference: str | Path | None
    """A run folder, recorded before or growing beside this one, to compare with while training."""
    on_diff: str
    """What a diff does: ``"warn"`` once (default), ``"stop"`` the training, or ``"raise"`` `RunsDifferError`."""
    logdir: str | Path | None
    """Where scalars and first-diff events go (without a reference: this run's own loss and norms). Default: nowhere, or
    the host's TensorBoard logger."""
    tags: str
    """Which curves go to ``logdir``: ``"layers"`` (default), the diff of each layer at each stage; ``"worst"``, of the
    ten worst layers of each stage; ``"all"``, norms of each run, maxima and all else that is known, too."""
    log_to_host: bool
    """Whether the host's TensorBoard logger gets the verdict, ten tags at most (default); else it gets nothing. All
    other curves go to folders of their own below its folder."""
    replay: str | Path | None
    """A run with replay packs, whose steps are done again in the place of the training (`padiff.replay`): each batch of
    the host's is exchanged for the reference's, and the training stops when all are done. The model is given back."""
    floors: int | bool
    """With ``replay``: how often each packed step is done once more, moved by units in the last place, to measure what
    rounding makes of each tensor; True: 8 times. The training takes as many more optimizer steps. Default: none."""
    float64: bool
    """With ``replay``: whether each packed step is done once more in float64, the third side. Default: False."""
    start_from: str | Path | None
    """A run folder, or a folder of safetensors, whose weights and buffers the model gets before the first step, and
    the optimizer what the recorded one held where a pack has it (`padiff.start_from`). A training that is resumed goes
    on from its own checkpoint. Default: the model starts as it is."""
    policy: Policy | None
    """When a diff passes. Default: `padiff.NoisePolicy`."""


def check(dir_path: str | AnyPath, options: TrainingOptions) -> None:
    """Check what can be checked before there is a model.

    Raises:
        UsageError: an option is unknown, is none of its values, or does not go with another one.
    """
    check_names(options, TrainingOptions)
    reference, replay, start_from = options.get("reference"), options.get("replay"), options.get("start_from")
    floors, float64 = runs_of(options.get("floors", False)), options.get("float64", False)
    check_tags(options.get("tags", LAYERS))
    to_host, on_diff = options.get("log_to_host", True), options.get("on_diff", "warn")
    if not isinstance(to_host, bool):
        raise UsageError(f"log_to_host is True or False, got {to_host!r}")
    if on_diff not in ON_DIFF:
        raise UsageError(f"on_diff is one of {', '.join(ON_DIFF)}, got {on_diff!r}")
    own = run_folder(dir_path, "dir_path")
    folders = {"reference": reference, "logdir": options.get("logdir"), "start_from": start_from, "replay": replay}
    for name, path in folders.items():
        if path is not None:
            (local_folder if name == "logdir" else run_folder)(path, name)
    if replay is not None and (reference is not None or start_from is not None):
        raise UsageError("replay gives each step all that it starts from: leave reference and start_from away")
    if replay is None and (floors or float64):
        raise UsageError("floors and float64 are measured by doing steps again: give replay='runs/...', too")
    if reference is None and replay is None and on_diff != "warn":
        raise UsageError(f"on_diff={on_diff!r} needs a reference run to differ from: give reference='runs/...'")
    if reference is not None and run_folder(reference, "reference").resolve() == own.resolve():
        raise UsageError(f"the reference is this run's own folder, {dir_path}: a run can't be compared with itself")


def make_folders_absolute(options: Any) -> None:
    """Replace the folders among the options by absolute ones: a script may change its working directory before it
    trains.

    Raises:
        UsageError: one of them is no path, or a place in a store that is not known.
    """
    for name in ("reference", "logdir", "start_from", "replay"):
        if options.get(name) is not None:
            options[name] = absolute(run_folder(options[name], name))


def lasting(options: TrainingOptions) -> RunOptions:
    """The options as they hold for every training that the callback is given: checked, and lists listed."""
    rest: Any = {**options}
    rest["every_n_steps"] = Schedule.of(options.get("every_n_steps", 1))
    rest["detail"] = Detail.of(options.get("detail", "auto"), rest.pop("full_every_n_steps", None))
    for name in ("white_list", "black_list"):
        if rest.get(name) is not None:
            rest[name] = list(rest[name])
    lasting: RunOptions = rest
    return lasting


def split_map(layer_map: Any, paired: bool) -> tuple[list[Any] | None, GivenMap | None]:
    """Tell a list of this model's own layers from pairs of layers of two runs."""
    if layer_map is None:
        return None, None
    pairs = isinstance(layer_map, (Mapping, GivenMap, str, Path)) or (
        bool(layer_map) and all(isinstance(item, (tuple, list, Mapping)) and len(item) == 2 for item in layer_map)
    )
    if not pairs:
        return list(layer_map), None
    if not paired:
        raise UsageError(
            "layer_map: pairs of layers answer to each other when two runs are compared; without `reference` or "
            "`start_from` give a list of this model's own layers, or give the pairs to the comparison"
        )
    return None, GivenMap.of(layer_map)

"""Options of the callbacks, and the checks of their values and combinations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padiff.compare import Policy
from padiff.dump.store import AnyPath, absolute, local_folder, run_folder
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.recorder.options import Detail, RunOptions, Schedule, check_names
from padiff.replaying.session import runs_of
from padiff_hooks.tags import LAYERS, check_tags

ON_DIFF = ("warn", "stop", "raise")


class TrainingOptions(RunOptions, total=False):
    """The options of a callback."""

    layer_map: Any
    """Without a reference: a list of layers of this model, which correspond in order to the layers in the other run's
    list. With a reference: also pairs of paths (reference, candidate), a mapping, or a YAML file."""
    reference: str | Path | None
    """Run folder to compare with while training; finished, or recorded at the same time."""
    on_diff: str
    """Reaction to a diff: ``"warn"`` once (default), ``"stop"`` the training, or ``"raise"`` `RunsDifferError`."""
    logdir: str | Path | None
    """Folder for scalars and first-diff events (without a reference: this run's loss and norms). Default: the folder of
    the host's TensorBoard logger; nothing is written if the host has none."""
    tags: str
    """Curves that go to ``logdir``: ``"layers"`` (default), the diff of each layer at each stage; ``"worst"``, diffs of
    the ten worst layers of each stage; ``"all"``, the diffs, the norms of each run, maxima and all other scalars."""
    log_to_host: bool
    """If True (default), the host's TensorBoard logger gets the verdict, at most ten tags; if False, nothing. All other
    curves go to separate folders below the logger's folder."""
    replay: str | Path | None
    """Run with replay packs whose steps are replayed instead of the training (`padiff.replay`). Each batch of the host
    is replaced by the reference's batch. The training stops after the last step, and the model is restored."""
    floors: int | bool
    """With ``replay``: number of extra runs of each packed step, perturbed by units in the last place, to measure the
    effect of rounding on each tensor; True: 8 runs. Each extra run takes an optimizer step. Default: none."""
    float64: bool
    """With ``replay``: if True, each packed step is also run once in float64, as a third side. Default: False."""
    start_from: str | Path | None
    """Run folder, or folder of safetensors, whose weights and buffers are loaded into the model before the first step.
    The optimizer state is loaded, too, if a pack has it (`padiff.start_from`). A resumed training continues from its
    checkpoint instead. Default: the model starts as it is."""
    stop_after: int | None
    """Number of steps after which the training stops, recorded or not. Default: none."""
    policy: Policy | None
    """Rule for when a diff passes. Default: `padiff.NoisePolicy`."""


def check(dir_path: str | AnyPath, options: TrainingOptions) -> None:
    """Check the options as far as possible without a model.

    Raises:
        UsageError: an option is unknown, has an invalid value, or conflicts with another option.
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
    stop_after = options.get("stop_after")
    if stop_after is not None and (isinstance(stop_after, bool) or not isinstance(stop_after, int) or stop_after < 1):
        raise UsageError(f"stop_after is a number of steps, at least 1, got {stop_after!r}")
    folder = run_folder(dir_path, "dir_path")
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
    if reference is not None and run_folder(reference, "reference").resolve() == folder.resolve():
        raise UsageError(f"the reference is this run's own folder, {dir_path}: a run can't be compared with itself")


def make_folders_absolute(options: Any) -> None:
    """Make the folders among the options absolute, as a script may change its working directory before it trains.

    Raises:
        UsageError: a folder is no path, or is in an unknown store.
    """
    for name in ("reference", "logdir", "start_from", "replay"):
        if options.get(name) is not None:
            options[name] = absolute(run_folder(options[name], name))


def lasting(options: TrainingOptions) -> RunOptions:
    """Return the options in the form that can be reused for several trainings.

    The schedule and the detail are parsed (and checked), and iterators of layers become lists.
    """
    remaining: Any = {**options}
    remaining["every_n_steps"] = Schedule.from_argument(options.get("every_n_steps", 1))
    remaining["detail"] = Detail.from_arguments(
        options.get("detail", "auto"), remaining.pop("full_every_n_steps", None)
    )
    for name in ("white_list", "black_list"):
        if remaining.get(name) is not None:
            remaining[name] = list(remaining[name])
    lasting: RunOptions = remaining
    return lasting


def split_map(layer_map: Any, paired: bool) -> tuple[list[Any] | None, GivenMap | None]:
    """Return the layer map as a list of this model's layers, or as pairs of layers of two runs; the other is `None`.

    Args:
        layer_map: the user's layer map.
        paired: True if there is another run to pair with.

    Raises:
        UsageError: the map holds pairs, and there is no other run.
    """
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
    return None, GivenMap.from_value(layer_map)

"""A recorder for people who come from ``create_model``: its object as the model, its arguments in ``try_dump``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from padiff.dump.local import run_folder
from padiff.dump.remote_path import AnyPath
from padiff.errors import UsageError
from padiff.recorder.schedule import Schedule


def unwrapped(
    model: Any, white_list: Iterable[Any] | None, black_list: Iterable[Any] | None, layer_map: Sequence[Any] | None
) -> tuple[Any, Iterable[Any] | None, Iterable[Any] | None, Sequence[Any] | None]:
    """The model inside of a proxy, with the proxy's lists and layer map where none are given.

    The class is asked: some models answer to any attribute. A white list makes a black list void, so the two lists are
    taken over together or not at all.
    """
    if not hasattr(type(model), "padiff_model"):
        return model, white_list, black_list, layer_map
    if white_list is None and black_list is None:
        white_list, black_list = model.padiff_lists
    return model.padiff_model, white_list, black_list, model.padiff_layer_map if layer_map is None else layer_map


def _is_one(given: Any, folder: AnyPath | None) -> bool:
    if isinstance(folder, Path):
        return Path(given).absolute() == folder.absolute()
    return folder is not None and run_folder(given, "dir_path") == folder


def check_as_made(per_step: Any, dir_path: Any, schedule: Schedule, folder: AnyPath | None) -> None:
    """Whether the arguments of a proxy's ``try_dump`` say what a recorder was made with.

    Raises:
        UsageError: they do not.
    """
    if isinstance(per_step, (str, Path)):
        per_step, dir_path = None, per_step
    if dir_path is not None and not _is_one(dir_path, folder):
        raise UsageError(
            f"try_dump: this recorder {f'writes to {folder}' if folder else 'keeps its steps in memory'}, not in "
            f"{dir_path}: give the folder to padiff.record(model, dir_path)"
        )
    if per_step is None:
        return
    if isinstance(per_step, bool) or not isinstance(per_step, int) or per_step < 1:
        raise UsageError(f"per_step has to be a whole number of at least 1, got {per_step!r}")
    if schedule.steps is not None or schedule.every != per_step:
        raise UsageError(
            f"try_dump: this recorder was made with every_n_steps={schedule.described()!r}, not with "
            f"per_step={per_step}. Give padiff.record every_n_steps={per_step} (steps 0, {per_step}, ...), or "
            f"every_n_steps=padiff.Schedule(every={per_step}, first={per_step - 1}), which are the steps that a "
            f"proxy's per_step={per_step} dumps"
        )

"""Compatibility of recorders with ``create_model``: its proxies as models, and its arguments of ``try_dump``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from padiff.dump.local import shown
from padiff.errors import UsageError
from padiff.recorder.output import Output
from padiff.recorder.schedule import Schedule


def unwrapped(
    model: Any, white_list: Iterable[Any] | None, black_list: Iterable[Any] | None, layer_map: Sequence[Any] | None
) -> tuple[Any, Iterable[Any] | None, Iterable[Any] | None, Sequence[Any] | None]:
    """Return the model inside of a proxy, with the proxy's lists and layer map as defaults.

    A model that is no proxy is returned unchanged. The class is checked, as some models have every attribute. A white
    list makes a black list void, so the proxy's two lists are used together, if both arguments are `None`.
    """
    if not hasattr(type(model), "padiff_model"):
        return model, white_list, black_list, layer_map
    if white_list is None and black_list is None:
        white_list, black_list = model.padiff_lists
    return model.padiff_model, white_list, black_list, model.padiff_layer_map if layer_map is None else layer_map


def dump_arguments(per_step: Any, dir_path: Any) -> tuple[int | None, Any]:
    """Return the step interval and the folder from the arguments of a proxy's ``try_dump``.

    Raises:
        UsageError: the step interval is not a whole number of at least 1.
    """
    if isinstance(per_step, (str, os.PathLike)):
        return None, per_step
    if per_step is not None and (isinstance(per_step, bool) or not isinstance(per_step, int) or per_step < 1):
        raise UsageError(f"per_step has to be a whole number of at least 1, got {per_step!r}")
    return per_step, dir_path


def check_as_made(per_step: int | None, dir_path: Any, schedule: Schedule, output: Output) -> None:
    """Check that the arguments of a proxy's ``try_dump`` agree with the options of the recorder.

    Raises:
        UsageError: the folder or the step interval differs.
    """
    if dir_path is not None and not output.is_named(dir_path):
        folder = output.folder
        raise UsageError(
            f"try_dump: this recorder {f'writes to {shown(folder)}' if folder else 'keeps its steps in memory'}, not "
            f"in {dir_path}: give the folder to padiff.record(model, dir_path), or to the first try_dump"
        )
    if per_step is not None and (schedule.steps is not None or schedule.every != per_step):
        raise UsageError(
            f"try_dump: this recorder was made with every_n_steps={schedule.described()!r}, not with "
            f"per_step={per_step}. Give padiff.record every_n_steps={per_step} (steps 0, {per_step}, ...), or "
            f"every_n_steps=padiff.Schedule(every={per_step}, first={per_step - 1}), which are the steps that a "
            f"proxy's per_step={per_step} dumps"
        )

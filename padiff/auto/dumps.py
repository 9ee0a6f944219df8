"""The dumps that an ``auto_diff`` of two proxies leaves: what it compared last, for ``check_report`` and its like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from padiff.align import align
from padiff.auto.settings import Settings
from padiff.records import Step
from padiff.weights.live import is_proxy

_FOLDER = "auto_diff"


def leave_dumps(settings: Settings, compared: tuple[Mapping[str, Step], Mapping[str, Step]]) -> list[str]:
    """Write both sides into ``<dump_path>/auto_diff``; the folders, none where a model is no proxy."""
    folders = _folders(settings)
    sides = (settings.base, settings.raw)
    maps = _layer_maps(settings) if folders else ((), ())
    for side, folder, stages, paths in zip(sides, folders, compared, maps):
        steps = list(stages.values())
        records = [replace(record, order=0) for step in steps for record in step.records]
        whole = replace(steps[-1], records=tuple(replace(r, order=order) for order, r in enumerate(records)))
        side.model.padiff_dump(folder, whole, paths)
    return [str(folder) for folder in folders]


def forget_dumps(settings: Settings) -> None:
    """Take away what an earlier call left: it says nothing about this one."""
    for side, folder in zip((settings.base, settings.raw), _folders(settings)):
        side.model.padiff_forget(folder)


def _folders(settings: Settings) -> list[Path]:
    sides = (settings.base, settings.raw)
    if not all(is_proxy(side.model) for side in sides):
        return []
    folders = [Path(side.model.dump_path) / _FOLDER for side in sides]
    # Two dumps in one folder would be one dump, compared with itself.
    return folders if folders[0] != folders[1] else [folder / side.name for folder, side in zip(folders, sides)]


def _layer_maps(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The pairs that were given by hand, as the two dumps' own lists."""
    alignment = align(settings.base.live.info, settings.raw.live.info, settings.whole_map())
    given = [(pair.reference.path, pair.candidate.path) for pair in alignment.pairs if pair.reason == "given"]
    return tuple(ours for ours, _ in given), tuple(theirs for _, theirs in given)

"""Dumps of an ``auto_diff`` of two proxies with the records compared last, for ``check_report`` and similar calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from padiff.align import align
from padiff.auto.settings import Settings
from padiff.model.live_model import is_proxy
from padiff.records import Both, Step

_FOLDER = "auto_diff"


def leave_dumps(settings: Settings, compared: Both[dict[str, Step]]) -> list[str]:
    """Write both sides into ``<dump_path>/auto_diff``, and return the folders; none if a model is not a proxy."""
    folders = _folders(settings)
    maps = _layer_maps(settings) if folders else ()
    for side, folder, stages, paths in zip(settings.sides, folders, compared, maps):
        steps = list(stages.values())
        records = [replace(record, order=0) for step in steps for record in step.records]
        numbered = tuple(replace(record, order=order) for order, record in enumerate(records))
        merged = replace(steps[-1], records=numbered, trace=steps[0].trace)
        side.model.padiff_dump(folder, merged, paths)
    return [str(folder) for folder in folders]


def forget_dumps(settings: Settings) -> None:
    """Delete the dumps of an earlier call."""
    for side, folder in zip(settings.sides, _folders(settings)):
        side.model.padiff_forget(folder)


def _folders(settings: Settings) -> list[Path]:
    sides = settings.sides
    if not all(is_proxy(side.model) for side in sides):
        return []
    folders = sides.map(lambda side: Path(side.model.dump_path) / _FOLDER)
    # A second dump in the same folder would overwrite the first.
    shared = folders.reference == folders.candidate
    return [folder / side.name if shared else folder for folder, side in folders.zip(sides)]


def _layer_maps(settings: Settings) -> Both[list[str]]:
    """Return the layer paths that the user's map pairs, as one list per side in the same order."""
    infos = settings.sides.map(lambda side: side.live.info)
    pairs = align(infos.reference, infos.candidate, settings.whole_map()).pairs
    user_pairs = [pair for pair in pairs if pair.reason == "given"]
    return Both([pair.reference.path for pair in user_pairs], [pair.candidate.path for pair in user_pairs])

"""Known differences of torch and paddle as the likely cause of a diff between a run of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from padiff.compare.diagnose.call_words import given_in_common
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.known_differences import AtlasRow, known_difference
from padiff.compare.diagnose.place import Place
from padiff.model import equivalents
from padiff.records import Both, Cause, Layer, RunInfo, is_of_loss

# Groups of the table, by the stage at which their differences show.
_FORWARD = ("activations", "normalisation", "pooling", "dropout", "attention", "embeddings", "recurrent", "images",
            "reductions")  # fmt: skip
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "forward": _FORWARD, "loss": ("losses",), "update": ("optimizers",), "weight": ("normalisation",),
    "grad": ("clipping",),
}  # fmt: skip
# The most rows that a cause names.
_MOST = 2
_KEYWORD = re.compile(r"(\w+)=([^,()\n]+)")


def known_cause(scene: DiffContext, place: Place) -> Cause | None:
    """Return a known difference of torch and paddle in the operation of a first diff as its cause.

    `None` if no difference is known, or if both runs are of one framework.
    """
    if sorted(scene.frameworks) != ["paddle", "torch"]:
        return None
    groups = ("initialisation",) if _at_start(scene) else _GROUPS.get(scene.stage, ())
    slot = equivalents.slot(scene.diff.pair.anchor.slot)
    running = slot.startswith("running_")
    for operation, settings in _operations(scene, place):
        rows = [
            row
            for row in known_difference(operation)
            if row.group in groups and _is_about(row, operation) and _fits(row, settings)
            # Running statistics do not change an output in training mode, and a mean is not off by a variance's reason.
            if (slot in row.name if running else "running_" not in row.name)
            if not (running and "momentum=" in row.torch and _same_momentum(scene))
        ]
        if rows:
            return _cause(operation, rows[:_MOST], scene.frameworks)
    return None


def says_where(recorded: Cause, place: Place) -> bool:
    """Return True if a recorded cause only names a call, whose arguments agree as far as both sides have them."""
    if recorded.kind == "call":
        return True
    if recorded.kind != "call_arguments" or place.calls is None or place.calls.same is None:
        return False
    return not given_in_common(place.calls.same)


def _same_momentum(scene: DiffContext) -> bool:
    """Return True if both layers declare one momentum, counted as torch does."""
    momenta = {None} if scene.layers is None else {layer.settings.get("momentum") for layer in scene.layers}
    return len(momenta) == 1 and None not in momenta


def _at_start(scene: DiffContext) -> bool:
    return scene.stage == "weight" and scene.number == 0


def _operations(scene: DiffContext, place: Place) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the operations that the diff may come from, each with its settings, the nearest first."""
    if place.calls is not None and place.calls.same is not None:
        call = place.calls.same.reference
        if call.function:
            yield call.function, call.arguments
    anchor = scene.diff.pair.anchor
    if scene.stage == "loss":
        if is_of_loss(anchor):
            yield anchor.slot.partition("()")[0], {}
    elif scene.stage == "update":
        for rule in _declared(scene.runs.reference.info, "optimizer", "rule"):
            yield rule, {}
    elif not place.between or scene.stage == "weight":
        layer = _layer(scene)
        if layer is not None:
            running = equivalents.slot(anchor.slot).startswith("running_")
            if scene.stage != "weight" or _at_start(scene) or running:
                yield layer.kind, layer.settings


def _layer(scene: DiffContext) -> Layer | None:
    return scene.layers.reference if scene.layers is not None else None


def _declared(info: RunInfo, part: str, name: str) -> Iterator[str]:
    for key, value in info.settings.items():
        if key.startswith(part) and key.endswith(f".{name}") and isinstance(value, str):
            yield value


def _is_about(row: AtlasRow, operation: str) -> bool:
    """Return True if a row is about the operation itself, and not only about an operation applied to its output."""
    bare = re.sub(r"[123]d$|loss$", "", operation.lower().replace("_", ""))
    return bare in row.name.lower().replace("_", "").replace("-", "")


def _fits(row: AtlasRow, settings: Mapping[str, Any]) -> bool:
    """Return True if the arguments of the probe's call agree with the layer's settings, as far as these are known."""
    if not row.note and not row.mended and not row.mended_torch:
        return False
    for name, text in _KEYWORD.findall(row.torch):
        if name not in settings:
            continue
        try:
            argument = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            continue
        # A difference that needs an option, such as padding, does not show where the layer does not use the option.
        if argument and not (settings[name] and settings[name] != "none"):
            return False
    return True


def _cause(operation: str, rows: list[AtlasRow], frameworks: Both[str]) -> Cause:
    notes = [row.note if row.note and not row.note.startswith("as with") else row.name for row in rows]
    sentence = f"torch and paddle are known to differ in {operation}: {'; '.join(dict.fromkeys(notes))}"
    row = rows[0]
    mends_candidate = row.mended if frameworks.candidate == "paddle" else row.mended_torch
    mends_reference = row.mended_torch if frameworks.candidate == "paddle" else row.mended
    fix = mends_candidate or (f"{mends_reference} in the reference" if mends_reference else "")
    return Cause("known_difference", sentence, fix=" ".join(fix.split("\n")[-1:]))

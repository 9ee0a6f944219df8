"""Known differences of torch and paddle, and of compiled code, as the cause of a diff: the table of `padiff atlas`."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.place import Place
from padiff.compare.diagnose.traced import given_in_common
from padiff.model import equivalents
from padiff.pair.joined_calls import is_joined
from padiff.records import ROOT, SIDES, Both, Cause, FirstDiff, Layer, Report, RunInfo, is_of_loss
from padiff.records.traces import DRAWS, Region
from padiff.system.frames import Frame

#: Version of the table's JSON.
SCHEMA_VERSION = 1

_SHIPPED = Path(__file__).with_name("known.json")


@dataclass(frozen=True, slots=True)
class AtlasRow:
    """One operation, called with the same arguments in torch and paddle.

    Attributes:
        name: the compared behaviour, in words.
        group: the group of probes that the row belongs to, e.g. ``losses``.
        operations: the layers and functions that the row is about, in lower case, as either framework spells them.
        torch, paddle: the two calls.
        kind: ``same``, ``values``, ``shapes`` (also another number of outputs), or ``raises``.
        at: the difference: the two values that are furthest apart, the two shapes, or ``runs`` and the error.
        rel_l2: the norm of the difference over torch's norm; infinity if torch's norm is zero or one side is not
            finite; `None` without values.
        max_abs: the largest difference, with the same rules for infinity and `None`.
        ratio: paddle's values over torch's, if the ratio is the same everywhere; else `None`.
        direction: ``+`` if paddle's values are larger, ``-`` if they are smaller, ``±`` if both occur; or empty.
        mended, mended_torch: the call of paddle, or of torch, changed to agree with the other framework; empty if none
            is known.
        mended_agrees, mended_torch_agrees: True if running the changed call showed that the two agree.
        formula: the definition in numpy, computed in float64; empty if none is known.
        agrees: the side that agrees with the formula: ``torch``, ``paddle``, ``both``, ``neither``; empty without a
            formula.
        note: the reason of the difference, in words.
    """

    name: str
    group: str
    operations: tuple[str, ...]
    torch: str
    paddle: str
    kind: str = "same"
    at: tuple[str, str] = ("", "")
    rel_l2: float | None = None
    max_abs: float | None = None
    ratio: float | None = None
    direction: str = ""
    mended: str = ""
    mended_agrees: bool = False
    mended_torch: str = ""
    mended_torch_agrees: bool = False
    formula: str = ""
    agrees: str = ""
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.kind != "same"

    @property
    def wrong(self) -> bool:
        """True if a changed call that should agree with the other framework does not."""
        mended = (self.mended, self.mended_agrees), (self.mended_torch, self.mended_torch_agrees)
        return any(call and not agrees for call, agrees in mended)


@dataclass(frozen=True, slots=True)
class Atlas:
    """The results of all probes.

    Attributes:
        versions: the versions of torch (reference) and paddle (candidate).
        rows: one row for each probe.
    """

    versions: Both[str]
    rows: tuple[AtlasRow, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Atlas:
        """Return the table that parsed JSON holds."""
        rows = []
        for row in values["probes"]:
            numbers = {name: _number(row.get(name)) for name in ("rel_l2", "max_abs", "ratio")}
            rows.append(
                AtlasRow(
                    **row | numbers | {"operations": tuple(row["operations"]), "at": tuple(row.get("at", ("", "")))}
                )
            )
        return cls(Both(values["versions"]["torch"], values["versions"]["paddle"]), tuple(rows))

    def to_json(self) -> str:
        """Return the table as JSON, one row per line; fields with their default value are left out."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "versions": {"torch": self.versions.reference, "paddle": self.versions.candidate},
            "differ": sum(row.differs for row in self.rows),
        }
        rows = ",\n".join(json.dumps(_plain(row), ensure_ascii=False) for row in self.rows)
        return f'{json.dumps(head)[:-1]}, "probes": [\n{rows}\n]}}'


@functools.cache
def shipped_atlas() -> Atlas:
    """Return the table for the versions that padiff is tested with."""
    return Atlas.from_json(json.loads(_SHIPPED.read_text(encoding="utf-8")))


def known_difference(operation: str) -> tuple[AtlasRow, ...]:
    """Return the rows on an operation in which torch and paddle differ; empty if they agree or it was not probed.

    Args:
        operation: a layer's kind, a function or an optimizer, in either framework's spelling: ``BatchNorm2D``,
            ``avg_pool2d``, ``CrossEntropyLoss``, ``RMSProp``. If nothing is known of ``avg_pool3d``, for example, the
            rows of the other dimensions are returned.
    """
    rows, key = _by_operation(), _key(operation)
    return rows.get(key) or rows.get(_any_dimension(key), ())


@functools.cache
def _by_operation() -> dict[str, tuple[AtlasRow, ...]]:
    rows_by_key: dict[str, list[AtlasRow]] = {}
    for row in shipped_atlas().rows:
        if row.differs:
            keys = [_key(operation) for operation in row.operations]
            for key in dict.fromkeys([*keys, *map(_any_dimension, keys)]):
                rows_by_key.setdefault(key, []).append(row)
    return {key: tuple(rows) for key, rows in rows_by_key.items()}


def _key(operation: str) -> str:
    return equivalents.common_kind(operation.lower().replace("_", "")).removesuffix("loss")


def _any_dimension(key: str) -> str:
    return re.sub(r"[123]d$", "", key)


def _plain(row: AtlasRow) -> dict[str, Any]:
    usual = {field.name: field.default for field in fields(row) if field.name != "kind"}
    values = {name: value for name, value in asdict(row).items() if name not in usual or value != usual[name]}
    for name in ("rel_l2", "max_abs", "ratio"):
        if name in values:
            values[name] = "inf" if math.isinf(values[name]) else float(f"{values[name]:.6g}")
    return values


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


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
    joined = any(record is not None and is_joined(record) for record in scene.diff.pair.sides)
    if sorted(scene.frameworks) != ["paddle", "torch"] or joined:  # what goes into the calls may differ
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
    if "time_major=True" in row.mended and settings.get("batch_first"):
        return False  # the order of axes that the mended call gives is the reference's already
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


# Operations and kernels that are named.
_FEW = 3


#: Compiled regions of a run, with the number of the step, in order.
RegionsOfSteps = list[tuple[int, tuple[Region, ...]]]


def with_regions(report: Report, recorded: Both[RegionsOfSteps]) -> Report:
    """Return a report with what the runs' compiled regions show: notes, and the cause of the first diff.

    Args:
        report: the report.
        recorded: the regions of the compared steps of each run.
    """
    first = report.first_diff
    last = math.inf if first is None else first.step
    regions = [(side, *_regions([each for each in steps if each[0] <= last])) for side, steps in zip(SIDES, recorded)]
    notes = [note for side, step, each in regions for note in _notes(side, step, each, first is not None)]
    # The candidate's regions first: the reference is the run to trust.
    wrong = next(((side, step, each) for side, step, found in reversed(regions) for each in found if each.failed), None)
    if wrong is not None:
        side, step, region = wrong
        cause = _region_cause(side, region, first)
        if first is None:
            first = _of_region(step, region, cause)
            report = replace(report, moved=None)
        elif first.diff is not None and _explains(first):
            if first.cause is not None and first.cause.proven:
                cause = replace(cause, evidence=f"{cause.evidence}; {first.cause.sentence}")
            first = replace(first, cause=cause)
    elif first is not None and first.diff is not None and first.stage in ("forward", "loss", "backward"):
        drawing = Both(*(next((each for each in found if each.note == DRAWS), None) for _, _, found in regions))
        if (drawing.reference is None) != (drawing.candidate is None) and (
            first.cause is None or (first.cause.kind in ("unknown", "code") and not first.cause.proven)
        ):
            side, region = next((side, each) for side, each in zip(SIDES, drawing) if each is not None)
            first = replace(first, cause=_drawing_cause(side, region))
    return replace(report, first_diff=first, regions=tuple(notes)) if notes else report


def _drawing_cause(side: str, region: Region) -> Cause:
    return Cause(
        "compiled_random_numbers",
        f"compiled region {region.number} of the {side} draws other random numbers than eager code: "
        "other dropout masks",
        fix="torch._inductor.config.fallback_random = True" if side == SIDES.candidate else "",
        lines=Both(region.frame, None) if side == SIDES.reference else Both(None, region.frame),
    )


def _regions(steps: RegionsOfSteps) -> tuple[int, tuple[Region, ...]]:
    """Return the regions of the first step in which one differs, else those of the last step."""
    failed = (each for each in steps if any(region.failed for region in each[1]))
    return next(failed, steps[-1] if steps else (0, ()))


def _notes(side: str, step: int, regions: Sequence[Region], differs: bool) -> list[str]:
    if not regions:
        return []
    measured = [region for region in regions if region.measured]
    wrong = [region for region in measured if region.failed]
    notes = []
    if measured and not wrong:
        notes.append(
            f"Compiled regions of the {side} against eager code on the same inputs, in step {step}: {len(measured)}, "
            "with rounding only; the difference was not made there"
            if differs
            else f"Compiled regions of the {side} against eager code on the same inputs, in step {step}: "
            f"{len(measured)}, with rounding only"
        )
    for region in wrong[:_FEW]:
        tensor = region.failed
        assert tensor is not None
        notes.append(
            f"Compiled region {region.number} of the {side} ({_place(region)}), {tensor.name}: relative error "
            f"{tensor.error:.2g}, eager code {tensor.eager:.2g}, on the same inputs in step {step}"
        )
        if region.kernels:
            notes.append(f"Kernels of compiled region {region.number}: {_listed(region.kernels)}")
    missed = [region for region in regions if region.note and not region.failed]
    for region in missed[:_FEW]:
        notes.append(
            f"Compiled region {region.number} of the {side}: its gradients were not run again, as {region.note}"
            if region.measured
            else f"Compiled region {region.number} of the {side}: it was not run again, as {region.note}"
        )
    return notes


def _explains(first: FirstDiff) -> bool:
    """Return True if a region that computes otherwise can be the cause of a diff, before any other cause.

    Whatever formula fits the values: run eagerly, the same code does not compute them.
    """
    if first.stage in ("input", "weight"):
        return False  # the runs were not equal before the region was called
    return first.stage in ("forward", "loss", "backward") or first.cause is None or not first.cause.proven


def _of_region(step: int, region: Region, cause: Cause) -> FirstDiff:
    """Return a first diff that no compared tensor shows: a region that is beyond rounding on its own inputs."""
    stage = "forward" if any(not each.passed for each in region.outputs) else "backward"
    layer = region.wrong.layer if region.wrong is not None else next(iter(region.layers), "")
    layer = layer or ROOT
    return FirstDiff(
        step,
        stage,
        layer,
        layer,
        slot=f"compiled region {region.number}",
        cause=cause,
        statement=f"Step {step}, stage {stage}, {layer}: {cause.sentence}; compared tensors stay within their limits.",
    )


def _region_cause(side: str, region: Region, first: FirstDiff | None) -> Cause:
    tensor, wrong = region.failed, region.wrong
    assert tensor is not None
    number = region.number
    if wrong is not None and wrong.layer:
        sentence = (
            f"the {side}'s compiler ({region.compiler}) computes {wrong.name} of `{wrong.layer}` otherwise than eager "
            f"code, in compiled region {number}: relative error {wrong.error:.2g}, eager code {wrong.eager:.2g}"
        )
    elif wrong is not None:
        sentence = (
            f"the {side}'s compiler ({region.compiler}) computes {wrong.name} otherwise than eager code, in compiled "
            f"region {number}: relative error {wrong.error:.2g}, eager code {wrong.eager:.2g}"
        )
    else:
        sentence = (
            f"the {side}'s compiler ({region.compiler}) computes compiled region {number} otherwise than eager code "
            f"({_listed(region.operations)}): relative error {tensor.error:.2g}, eager code {tensor.eager:.2g}"
        )
    frame: Frame | None = region.frame if wrong is None or wrong.frame is None else wrong.frame
    diff = None if first is None else first.diff
    total = None if diff is None or diff.figures is None else diff.figures.rel_l2
    evidence = "the region was run again eagerly on its own inputs"
    if first is not None and total is not None:
        evidence += f"; the relative error of {first.slot} is {total:.2g} in all"
    lines = Both(frame, None) if side == SIDES.reference else Both(None, frame)
    return Cause("compiled", sentence, proven=True, evidence=evidence, lines=lines)


def _place(region: Region) -> str:
    layers = [layer for layer in region.layers if layer]
    span = "" if not layers else layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    line = "" if region.frame is None else f"{region.frame.file}:{region.frame.line}"
    return ", ".join(filter(None, (span, line))) or _listed(region.operations)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")

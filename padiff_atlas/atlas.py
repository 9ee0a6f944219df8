"""Run of all probes in both frameworks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from padiff.compare.diagnose.known_differences import Atlas, AtlasRow
from padiff.errors import UsageError
from padiff.records import Both
from padiff.system.terminal import nearest
from padiff_atlas import sides
from padiff_atlas.measure import Outputs, gap
from padiff_atlas.probe import Group, Probe
from padiff_atlas.sides import Side
from padiff_atlas.ways import answer

#: Functions that only create a call's arguments or process its result, and are not the probed operation.
_AUXILIARY = frozenset({"tensor", "to_tensor", "unique", "astype", "float", "empty", "create_parameter"})


def chosen(groups: Sequence[Group], only: Sequence[str]) -> list[Group]:
    """Return the groups with the given names; all groups if no name is given.

    Raises:
        UsageError: there is no group of that name.
    """
    names = [group.name for group in groups]
    for name in only:
        if name not in names:
            raise UsageError(f"no group of probes is called {name!r}. {nearest(name, names)}")
    return [group for group in groups if not only or group.name in only]


def survey(groups: Sequence[Group]) -> Atlas:
    """Run all probes in both frameworks; random states and settings are restored.

    Raises:
        UsageError: a framework is not installed.
    """
    both = sides.load()
    with sides.kept(both):
        rows = tuple(ask(both, group, probe) for group in groups for probe in group.probes)
    return Atlas(both.map(lambda side: side.version), rows)


def ask(both: Both[Side], group: Group, probe: Probe) -> AtlasRow:
    """Run one probe and return its result; call this inside `sides.kept`."""
    torch, layer = _asked(both, both.reference, probe, probe.torch, group.inputs, None)
    paddle, _ = _asked(both, both.candidate, probe, probe.paddle, group.inputs, layer)
    difference = gap(torch, paddle, probe.tolerance)
    agree = {"mended": False, "mended_torch": False}
    if probe.mended:
        outputs, _ = _asked(both, both.candidate, probe, probe.mended, group.inputs, layer)
        agree["mended"] = gap(torch, outputs, probe.tolerance).kind == "same"
    if probe.mended_torch:
        outputs, _ = _asked(both, both.reference, probe, probe.mended_torch, group.inputs, None)
        agree["mended_torch"] = gap(outputs, paddle, probe.tolerance).kind == "same"
    return AtlasRow(
        name=probe.name,
        group=group.name,
        operations=tuple(_operations(probe, group.inputs)),
        torch=probe.torch,
        paddle=probe.paddle,
        kind=difference.kind,
        at=(difference.torch, difference.paddle),
        rel_l2=difference.rel_l2,
        max_abs=difference.max_abs,
        ratio=difference.ratio,
        direction=difference.direction,
        mended=probe.mended,
        mended_agrees=agree["mended"],
        mended_torch=probe.mended_torch,
        mended_torch_agrees=agree["mended_torch"],
        formula=probe.formula,
        agrees=_agreeing(probe, group.inputs, Both(torch, paddle)),
        note=probe.note,
    )


def _asked(
    both: Both[Side], side: Side, probe: Probe, text: str, inputs: Mapping[str, Any], like: Any
) -> tuple[Outputs, Any]:
    sides.seed(both, 0)
    try:
        result = answer(side, probe, text, inputs, like)
    except Exception as error:  # an error in one framework is a difference, too
        return error, None
    return result.outputs, result.layer


def _agreeing(probe: Probe, inputs: Mapping[str, Any], outputs: Both[Outputs]) -> str:
    if not probe.formula:
        return ""
    import scipy.special as special  # imported on demand like the frameworks, because the import is slow

    names = {"np": np, "special": special} | {
        name: value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
        for name, value in inputs.items()
    }
    right = np.asarray(eval(probe.formula, names), dtype=np.float64)
    agree = outputs.map(lambda side: gap([right], side, probe.tolerance).kind == "same")
    if agree.reference == agree.candidate:
        return "both" if agree.reference else "neither"
    return "torch" if agree.reference else "paddle"


def _operations(probe: Probe, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the framework functions and layers in the two calls, each once."""
    yielded: set[str] = set()
    for text in (probe.torch, probe.paddle):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            root = node.func.value
            while isinstance(root, ast.Attribute):
                root = root.value
            is_operation = isinstance(root, ast.Name) and root.id in {"torch", "paddle", "nn", "F", "init", *inputs}
            name = node.func.attr.lower()
            if is_operation and name not in _AUXILIARY | yielded:
                yielded.add(name)
                yield name

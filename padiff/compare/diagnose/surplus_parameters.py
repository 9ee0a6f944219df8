"""Cause of a diff after the first step: one side trains parameters that the other side has not, of a norm or a bias."""

from __future__ import annotations

import math

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.frameworks.catalog import LAYERS, checked_fix
from padiff.records import SIDES, Both, Cause, Layer
from padiff.system.naming import first_few

_ELEMENTWISE = frozenset({"LayerNorm", "RMSNorm"})
_STAGES = frozenset({"weight", "forward", "loss", "backward", "grad", "update"})


def surplus_cause(scene: DiffContext) -> Cause | None:
    """Return the cause if only one side has trained parameters in a layer that both have; else `None`."""
    # In the first step, weights differ before anything is trained: its own updates show what is.
    earlier = [number for number in scene.numbers if number < scene.number + (scene.stage == "weight")]
    if not earlier or scene.stage not in _STAGES:
        return None
    alignment = scene.alignment
    lone = {"reference": alignment.reference_parameters, "candidate": alignment.candidate_parameters}
    for side, other in (SIDES.swapped(), SIDES):
        steps = scene.sides(earlier[-1])
        records = [] if steps is None else getattr(steps, side).records
        updated = {f"{record.layer}/{record.slot}" for record in records if record.stage == "update"}
        layers = {layer.path: layer for layer in getattr(scene.runs, side).info.layers}
        sites = [site for site in lone[side] if site in updated]
        owners = [layers[path] for path in dict.fromkeys(site.rpartition("/")[0] for site in sites) if path in layers]
        if not owners or not all(_is_known(layer, scene, other) for layer in owners):
            continue
        shapes = {f"{layer.path}/{each.slot}": each.shape for layer in owners for each in layer.parameters}
        count = sum(math.prod(shapes[site]) for site in sites if site in shapes)
        kinds = first_few([*dict.fromkeys(layer.type for layer in owners)], 2)
        text = f"the {side} trains {count:,} numbers that the {other} has not: {first_few(sites, 4)} ({kinds})"
        fixes = (
            {_fix(scene.frameworks.candidate, layer, sites) for layer in owners} if side == SIDES.candidate else set()
        )
        owner = owners[0].path
        pairs = (Both(pair.reference.path, pair.candidate.path) for pair in alignment.pairs)
        paths = next((both for both in pairs if getattr(both, side) == owner), Both(owner, owner))
        lines = scene.runs.zip(paths).map(lambda sides: sides[0].info.lines.get(sides[1]))
        return Cause("surplus_parameters", text, fix=fixes.pop() if len(fixes) == 1 else "", lines=lines)
    return None


def _is_known(layer: Layer, scene: DiffContext, other: str) -> bool:
    """Return True if the other side has this layer too, or one of its kind without these parameters."""
    alignment = scene.alignment
    if any(layer.path in (pair.reference.path, pair.candidate.path) for pair in alignment.pairs):
        return True
    lone = alignment.reference_only if other == SIDES.reference else alignment.candidate_only
    return any(each.kind == layer.kind and not each.parameters for each in lone)


def _fix(framework: str, layer: Layer, sites: list[str]) -> str:
    """Return the call that creates a layer of a framework without these of its parameters; empty if unknown."""
    if layer.type not in LAYERS.get(framework, ()):
        return ""
    is_weight = any(f"{layer.path}/{slot}" in sites for slot in ("weight", "scale"))
    is_bias = f"{layer.path}/bias" in sites
    if framework == "paddle":
        arguments = [*(["weight_attr=False"] if is_weight else []), *(["bias_attr=False"] if is_bias else [])]
        return checked_fix(framework, f"paddle.nn.{layer.type}(..., {', '.join(arguments)})") if arguments else ""
    if not is_weight:
        return checked_fix(framework, f"torch.nn.{layer.type}(..., bias=False)") if is_bias else ""
    argument = "elementwise_affine" if layer.type in _ELEMENTWISE else "affine"
    return checked_fix(framework, f"torch.nn.{layer.type}(..., {argument}=False)") if "norm" in layer.kind else ""

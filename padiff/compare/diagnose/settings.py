"""Hyper-parameters that differ between layers that answer to each other."""

from __future__ import annotations

import math
from collections.abc import Collection

from padiff.align import Alignment, LayerPair
from padiff.model import equivalents
from padiff.records import Both, Cause, FirstDiff, Pair

# Settings that change what is computed or learnt, though it may be less than rounding shows; dropout's rate is none.
_TELLING = frozenset(
    {"eps", "momentum", "approximate", "slope", "alpha", "padding_mode", "num_heads", "num_groups", "groups"}
)


def setting_notes(alignment: Alignment) -> tuple[str, ...]:
    """Hyper-parameters that differ between layers that answer to each other."""
    found = ((pair, ", ".join(_differing(pair).values())) for pair in alignment.pairs)
    return tuple(f"{pair.reference.path} / {pair.candidate.path}: {text}" for pair, text in found if text)


def setting_diff(alignment: Alignment, called: Both[Collection[str]], step: int) -> FirstDiff | None:
    """A hyper-parameter that differs between layers that ran, as where the models part; `None` if none does."""
    found = []
    for pair in alignment.pairs:
        differing = [text for name, text in _differing(pair).items() if name in _TELLING]
        if differing and pair.reference.path in called.reference and pair.candidate.path in called.candidate:
            found.append((pair, ", ".join(differing)))
    if not found:
        return None
    pair, text = found[0]
    more = f", and {len(found) - 1} more layers are" if len(found) > 1 else ""
    sides = f"layer {pair.reference.path} ({pair.reference.type}) against {pair.candidate.path} ({pair.candidate.type})"
    return FirstDiff(
        step,
        "forward",
        pair.reference.path,
        pair.candidate.path,
        statement=f"No tensor parts by more than is allowed, but {sides} is set differently: {text}{more}. The models "
        "do not compute the same; other inputs, or more steps, will show it.",
        cause=_set_differently(text),
    )


def cause_in_settings(pair: Pair, layers: LayerPair | None) -> Cause | None:
    """How the settings of two layers explain a diff of theirs; else `None`."""
    if layers is None or pair.stage not in ("forward", "weight", "backward"):
        return None
    if equivalents.kind(layers.reference) != equivalents.kind(layers.candidate):
        return None  # a convolution and a linear layer that do the same are set in other ways
    differing = _differing(layers)
    momentum = differing.pop("momentum", "")
    if pair.stage == "weight":
        running = equivalents.slot(pair.anchor.slot).startswith("running_")
        convention = ", counted as torch does: paddle's own `momentum` is 1 minus it"
        return _set_differently(f"{momentum}{convention}") if running and momentum else None
    return _set_differently(", ".join(differing.values())) if differing else None


def _set_differently(text: str) -> Cause:
    return Cause("layer_setting", f"the layers are set differently: {text}")


def _differing(pair: LayerPair) -> dict[str, str]:
    """The settings that differ, by name, in words."""
    reference, candidate = pair.map(lambda layer: layer.settings)
    return {
        name: f"{name} {value} against {candidate[name]}"
        for name, value in reference.items()
        if name in candidate and not _equal(value, candidate[name])
    }


def _equal(a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b or type(a) is not type(b)

"""Dropout with the same masks in both models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from padiff.align import Alignment
from padiff.auto.settings import ModelSetup
from padiff.auto.single_step import hooked

#: Factors that each dropout layer of the reference multiplied its input by, by layer path and index of the call.
Masks = dict[tuple[str, int], np.ndarray]


@contextmanager
def masks_drawn(reference: ModelSetup, masks: Masks) -> Iterator[None]:
    """Draw, apply and store a mask in each call of a dropout layer of the reference.

    Enter before attaching the recording hooks.
    """
    paths = _dropouts(reference)

    def replaced(path: str, call: int, args: tuple[Any, ...], output: Any) -> Any:
        if not _fits(reference, args, output):
            return output
        # A zero output can come from a zero input, and does not reveal the mask: run the layer on ones instead.
        mask = _on_ones(reference, path, args[0])
        masks.setdefault((path, call), reference.framework.tensors.copy(mask))
        return args[0] * mask

    with hooked(reference, {path: path for path in paths}, replaced):
        yield


@contextmanager
def masks_of_reference(candidate: ModelSetup, masks: Masks, alignment: Alignment) -> Iterator[None]:
    """Apply the reference's masks in the candidate's dropout layers.

    Enter before attaching the recording hooks. Kept elements are scaled by the candidate layer's own factor, so that a
    different dropout rate is still detected.
    """
    drops = _dropouts(candidate)
    partners = {pair.candidate.path: pair.reference.path for pair in alignment.pairs if pair.candidate.path in drops}
    own_paths = {reference: path for path, reference in partners.items()}

    def replaced(path: str, call: int, args: tuple[Any, ...], output: Any) -> Any:
        mask = masks.get((path, call))
        if (
            mask is None
            or not _fits(candidate, args, output)
            or mask.shape != candidate.framework.tensors.shape(output)
        ):
            return output
        drawn = candidate.framework.tensors.copy(_on_ones(candidate, own_paths[path], args[0])).astype(np.float64)
        scale = drawn.max() if drawn.any() else float(mask.max())
        return args[0] * candidate.framework.tensors.like(output, np.where(mask != 0, scale, 0.0))

    with hooked(candidate, partners, replaced):
        yield


def _dropouts(side: ModelSetup) -> set[str]:
    """Return the paths of active dropout layers, without those that also shift kept elements (AlphaDropout)."""
    return {
        layer.path
        for layer in side.live.info.layers
        if "dropout" in layer.kind and "alpha" not in layer.kind and side.live.layer(layer.path).training
    }


def _fits(side: ModelSetup, args: tuple[Any, ...], output: Any) -> bool:
    framework = side.framework
    if not args or not framework.tensors.is_tensor(args[0]) or not framework.tensors.is_tensor(output):
        return False
    return bool(framework.tensors.shape(args[0]) == framework.tensors.shape(output))


def _on_ones(side: ModelSetup, path: str, like: Any) -> Any:
    ones = np.ones(side.framework.tensors.shape(like), np.float32)
    with side.framework.tensors.without_grad():
        return side.live.layer(path).forward(side.framework.tensors.like(like, ones))

"""Single step: the raw model's layers run on what the base model computed, so that errors do not add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from padiff.align import Alignment
from padiff.auto.arguments import Side
from padiff.frameworks.base import Handle
from padiff.records import Step
from padiff.structure import flatten, replace_tensors

#: Values of the base by its layer's path, slot and call.
_Values = dict[tuple[str, str, int], np.ndarray]


@contextmanager
def outputs_of_base(raw: Side, base: Step, alignment: Alignment) -> Iterator[None]:
    """Replace every paired layer's output by the base's, once it is recorded: what follows runs on that."""
    values = _values(base, "forward")

    def replaced(path: str, call: int, _: tuple[Any, ...], output: Any) -> Any:
        def new(slot: str, tensor: Any) -> Any:
            array = values.get((path, slot, call))
            fits = array is not None and array.shape == raw.framework.shape(tensor)
            return raw.framework.tensor_like(tensor, array) if fits else tensor

        return replace_tensors(output, "output", raw.framework.is_tensor, new)

    with _hooked(raw, alignment, replaced):
        yield


@contextmanager
def gradients_of_base(raw: Side, base: Step, alignment: Alignment) -> Iterator[None]:
    """Replace the gradient that reaches every paired layer's output by the base's, once it is recorded."""
    values = _values(base, "backward")
    seen: set[int] = set()
    alive: list[Any] = []  # an id stands for a tensor only while that tensor lives

    def hooked(path: str, call: int, _: tuple[Any, ...], output: Any) -> None:
        for slot, tensor in flatten(output, "output", raw.framework.is_tensor):
            array = values.get((path, slot, call))
            if array is None or id(tensor) in seen or array.shape != raw.framework.shape(tensor):
                continue
            seen.add(id(tensor))
            alive.append(tensor)
            raw.framework.hook_gradient(tensor, partial(_in_place_of, raw, array))

    with _hooked(raw, alignment, hooked):
        yield


def _in_place_of(raw: Side, array: np.ndarray, gradient: Any) -> Any:
    return raw.framework.tensor_like(gradient, array)


@contextmanager
def masks_of_base(raw: Side, base: Step, alignment: Alignment) -> Iterator[None]:
    """Give every paired dropout layer of the raw model the mask that the base's drew.

    A mask shows where the base's output is zero. What is kept is scaled as the base scaled it; where the raw layer
    is not training, nothing is done.
    """
    values = _values(base, "forward")

    def replaced(path: str, call: int, args: tuple[Any, ...], output: Any) -> Any:
        array = values.get((path, "output.0", call))
        if array is None or not raw.framework.is_tensor(output) or array.shape != raw.framework.shape(output):
            return output
        kept = array != 0
        share = float(kept.mean())
        rate = rates.get(path, 1.0 - share)
        mask = kept.astype(np.float32) / (1.0 - rate) if rate < 1 else kept.astype(np.float32)
        return args[0] * raw.framework.tensor_like(output, mask)

    rates = {
        pair.reference.path: float(pair.reference.settings["p"])
        for pair in alignment.pairs
        if "dropout" in pair.reference.kind and "p" in pair.reference.settings
    }
    training = {
        pair.candidate.path
        for pair in alignment.pairs
        if "dropout" in pair.candidate.kind and raw.framework.training(raw.live.layer(pair.candidate.path))
    }
    with _hooked(raw, alignment, replaced, only=training):
        yield


@contextmanager
def _hooked(
    raw: Side,
    alignment: Alignment,
    replaced: Callable[[str, int, tuple[Any, ...], Any], Any],
    only: set[str] | None = None,
) -> Iterator[None]:
    handles: list[Handle] = []
    calls: Counter[str] = Counter()

    def hook(base_path: str, raw_path: str, args: tuple[Any, ...], output: Any) -> Any:
        call = calls[raw_path]
        calls[raw_path] += 1
        return replaced(base_path, call, args, output)

    try:
        for pair in alignment.pairs:
            if only is None or pair.candidate.path in only:
                ours, theirs = pair.reference.path, pair.candidate.path
                handles.append(
                    raw.framework.hook_outputs(
                        raw.live.layer(theirs), lambda args, output, a=ours, b=theirs: hook(a, b, args, output)
                    )
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _values(base: Step, stage: str) -> _Values:
    return {(r.layer, r.slot, r.call): r.value for r in base.records if r.stage == stage}

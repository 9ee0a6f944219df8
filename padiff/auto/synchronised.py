"""Single step: the raw model's layers run on what the base model computed, so that errors do not add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from padiff.align import Alignment
from padiff.auto.settings import Side
from padiff.frameworks.base import Handle
from padiff.model.structure import flatten, replace_tensors
from padiff.records import Step

#: Values of the base by its layer's path and call, then by slot.
_Values = dict[tuple[str, int], dict[str, np.ndarray]]


@contextmanager
def outputs_of_base(raw: Side, base: Step, alignment: Alignment) -> Iterator[None]:
    """Replace every paired layer's output by the base's, once it is recorded: what follows runs on that."""
    values = _values(base, "forward")

    def replaced(path: str, call: int, _: tuple[Any, ...], output: Any) -> Any:
        of_base = _by_slot(values.get((path, call), {}), output, raw)

        def new(slot: str, tensor: Any) -> Any:
            array = of_base.get(slot)
            fits = array is not None and array.shape == raw.framework.tensors.shape(tensor)
            return raw.framework.tensors.like(tensor, array) if fits else tensor

        return replace_tensors(output, "output", raw.framework.tensors.is_tensor, new)

    with hooked(raw, _partners(alignment), replaced):
        yield


@contextmanager
def gradients_of_base(raw: Side, base: Step, alignment: Alignment) -> Iterator[None]:
    """Replace the gradient that reaches every paired layer's output by the base's, once it is recorded."""
    values = _values(base, "backward")
    seen: set[int] = set()
    alive: list[Any] = []  # an id stands for a tensor only while that tensor lives

    def catch(path: str, call: int, _: tuple[Any, ...], output: Any) -> None:
        of_base = _by_slot(values.get((path, call), {}), output, raw)
        for slot, tensor in flatten(output, "output", raw.framework.tensors.is_tensor):
            array = of_base.get(slot)
            if array is None or id(tensor) in seen or array.shape != raw.framework.tensors.shape(tensor):
                continue
            seen.add(id(tensor))
            alive.append(tensor)
            raw.framework.hooks.on_gradient(tensor, partial(_in_place_of, raw, array))

    with hooked(raw, _partners(alignment), catch):
        yield


def _in_place_of(raw: Side, array: np.ndarray, gradient: Any) -> Any:
    return raw.framework.tensors.like(gradient, array)


@contextmanager
def hooked(
    side: Side, partners: Mapping[str, str], replaced: Callable[[str, int, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Call ``replaced(partner, call, args, output)`` after each call of a side's layers; its value is the new output.

    Args:
        side: the model whose layers are hooked.
        partners: paths of its layers, each with the path that ``replaced`` is told.
    """
    handles: list[Handle] = []
    calls: Counter[str] = Counter()
    again: Counter[str] = Counter()

    def hook(path: str, args: tuple[Any, ...], output: Any) -> Any:
        # Recomputation in backward repeats the calls of forward, in their order.
        counter = again if side.framework.hooks.recomputing() else calls
        call = counter[path]
        counter[path] += 1
        return replaced(partners[path], call, args, output)

    try:
        for path in partners:
            handles.append(side.framework.hooks.on_outputs(side.live.layer(path), partial(hook, path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _partners(alignment: Alignment) -> dict[str, str]:
    return {pair.candidate.path: pair.reference.path for pair in alignment.pairs}


def _values(base: Step, stage: str) -> _Values:
    values: _Values = {}
    for record in base.records:
        if record.stage == stage:
            values.setdefault((record.layer, record.call), {})[record.slot] = record.value
    return values


def _by_slot(of_base: Mapping[str, np.ndarray], output: Any, raw: Side) -> Mapping[str, np.ndarray]:
    """The base's values under the raw layer's slots: those of one name, and by position where all names differ."""
    slots = [slot for slot, _ in flatten(output, "output", raw.framework.tensors.is_tensor)]
    if len(slots) == len(of_base) and not of_base.keys() & set(slots):
        return dict(zip(slots, of_base.values()))
    return of_base

"""Single-step mode: the candidate's layers run on the reference's values, so that errors do not accumulate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from padiff.align import Alignment
from padiff.auto.settings import ModelSetup
from padiff.frameworks.hooking import Handle
from padiff.model.nested import flatten, replace_tensors
from padiff.recorder.copying import own_calls
from padiff.records import Step

#: Values of the reference by layer path and call index, then by slot.
_Values = dict[tuple[str, int], dict[str, np.ndarray]]


@contextmanager
def outputs_of_reference(candidate: ModelSetup, reference: Step, alignment: Alignment) -> Iterator[None]:
    """Replace each paired layer's output, after it is recorded, by the reference's output."""
    values = _values(reference, "forward")

    def replaced(path: str, call: int, _: tuple[Any, ...], output: Any) -> Any:
        of_reference = _by_slot(values.get((path, call), {}), output, candidate)

        def new(slot: str, tensor: Any) -> Any:
            array = of_reference.get(slot)
            fits = array is not None and array.shape == candidate.framework.tensors.shape(tensor)
            return candidate.framework.tensors.like(tensor, array) if fits else tensor

        return replace_tensors(output, "output", candidate.framework.tensors.is_tensor, new)

    with hooked(candidate, _partners(alignment), replaced):
        yield


@contextmanager
def gradients_of_reference(candidate: ModelSetup, reference: Step, alignment: Alignment) -> Iterator[None]:
    """Replace the gradient of each paired layer's output, after it is recorded, by the reference's gradient."""
    values = _values(reference, "backward")
    hooked_ids: set[int] = set()
    alive: list[Any] = []  # an id identifies a tensor only as long as the tensor exists

    def catch(path: str, call: int, _: tuple[Any, ...], output: Any) -> None:
        of_reference = _by_slot(values.get((path, call), {}), output, candidate)
        for slot, tensor in flatten(output, "output", candidate.framework.tensors.is_tensor):
            array = of_reference.get(slot)
            if array is None or id(tensor) in hooked_ids or array.shape != candidate.framework.tensors.shape(tensor):
                continue
            hooked_ids.add(id(tensor))
            alive.append(tensor)
            candidate.framework.hooks.on_gradient(tensor, partial(_in_place_of, candidate, array))

    with hooked(candidate, _partners(alignment), catch):
        yield


def _in_place_of(candidate: ModelSetup, array: np.ndarray, gradient: Any) -> Any:
    return candidate.framework.tensors.like(gradient, array)


@contextmanager
def hooked(
    side: ModelSetup, partners: Mapping[str, str], replaced: Callable[[str, int, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Call ``replaced(partner, call, args, output)`` after each call of a side's layers; its result is the new output.

    Args:
        side: the model whose layers are hooked.
        partners: layer paths, each with the path that is passed to ``replaced``.
        replaced: the function to call.
    """
    handles: list[Handle] = []
    calls: Counter[str] = Counter()
    again: Counter[str] = Counter()

    def hook(path: str, args: tuple[Any, ...], output: Any) -> Any:
        # Recomputation during backward repeats the forward's calls in the same order.
        counter = again if side.framework.hooks.recomputing() else calls
        call = counter[path]
        counter[path] += 1
        with own_calls():
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


def _values(reference: Step, stage: str) -> _Values:
    values: _Values = {}
    for record in reference.records:
        if record.stage == stage:
            values.setdefault((record.layer, record.call), {})[record.slot] = record.value
    return values


def _by_slot(of_reference: Mapping[str, np.ndarray], output: Any, candidate: ModelSetup) -> Mapping[str, np.ndarray]:
    """Return the reference's values by the candidate's slots: by name, or by position if all names differ."""
    slots = [slot for slot, _ in flatten(output, "output", candidate.framework.tensors.is_tensor)]
    if len(slots) == len(of_reference) and not of_reference.keys() & set(slots):
        return dict(zip(slots, of_reference.values()))
    return of_reference

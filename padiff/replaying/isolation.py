"""Each layer by itself: run on what the reference's layer was given, so that nothing is inherited from those before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from padiff.compare.judge.limits import ROUNDING, allowed, coarse
from padiff.frameworks.hooking import Handle
from padiff.model.live_model import LiveModel
from padiff.model.nested import flatten, flatten_inputs, replace_tensors
from padiff.pair.layouts import layout_between
from padiff.records import Step, TracedCall, is_below
from padiff.replaying.feeding import MaskFeeder
from padiff.replaying.own_errors import Isolation, OwnError


class Isolator:
    """Runs each layer that the candidate calls once more, on the reference's inputs, and looks at what it gives.

    Args:
        model: the candidate.
        reference: the recorded step.
        partners: the reference's layer for each of the candidate's, by path.
        feeder: what gives dropout its masks; what the layer was given, its second run is given, too.
        unheard: a context in which the recorder hears nothing.
        into: what takes the errors.
    """

    def __init__(
        self,
        model: LiveModel,
        reference: Step,
        partners: Mapping[str, str],
        feeder: MaskFeeder,
        unheard: Callable[[], AbstractContextManager[None]],
        into: Isolation,
    ) -> None:
        self._model, self._framework = model, model.framework
        self._partners, self._feeder, self._unheard, self._into = partners, feeder, unheard, into
        trace = reference.trace
        self._tensors, self._calls = trace.tensors, list(trace.calls)
        self._parents = _parents(self._calls)
        self._traced = {(call.layer, call.call): call for call in self._calls if not call.function}
        self._outputs: dict[tuple[str, int], dict[str, Any]] = {}
        self._gradients: dict[tuple[str, int], dict[str, Any]] = {}
        for record in reference.records:
            if record.stage == "forward" and "()" not in record.slot:
                self._outputs.setdefault((record.layer, record.call), {})[record.slot] = record.source
            elif record.stage == "backward" and "@" not in record.slot and "()" not in record.slot:
                self._gradients.setdefault((record.layer, record.call), {})[record.slot] = record.source
        self._counts: Counter[str] = Counter()
        self._under_way: list[tuple[str, Any, dict[str, Any], int]] = []
        self._again = False
        self._handles: list[Handle] = []
        for path in partners:
            self._handles += self._framework.hooks.on_calls(model.layer(path), path, self._before, self._after)

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def finish(self, elsewhere: Collection[tuple[str, str]]) -> None:
        """The step is done: leave out what does not answer call for call.

        Args:
            elsewhere: pairs of layers, by path, that hold the same but end at other places of the computation.
        """
        times = Counter(layer for layer, _ in self._traced)
        for path, one in list(self._into.layers.items()):
            there, here = times[one.reference], self._counts[path]
            if (one.reference, path) in elsewhere:
                why = "it ends at another place of the computation there"
            elif there != here:
                why = f"calls: {here} here, {there} there"
            else:
                continue
            self._into.layers[path] = replace(one, forward=None, backward=None, why=why)

    def _before(self, path: str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._again and not self._framework.hooks.recomputing():
            self._under_way.append((path, args, kwargs, len(self._feeder.log)))

    def _after(self, _: str, layer: Any, output: Any, failed: bool) -> None:
        if self._again or self._framework.hooks.recomputing() or not self._under_way:
            return
        path, args, kwargs, masks = self._under_way.pop()
        if failed or self._model.layer(path) is not layer:
            return
        number = self._counts[path]
        self._counts[path] += 1
        reference = self._partners[path]
        own = OwnError(path, reference, type(layer).__name__)
        call = self._traced.get((reference, number))
        if call is None:
            self._into.add(replace(own, why="its inputs were not recorded"))
            return
        self._again = True
        try:
            with self._unheard(), self._feeder.again(masks), self._state_kept(layer):
                self._into.add(self._found(own, layer, args, kwargs, call))
        except Exception as error:
            self._into.add(replace(own, why=f"it can't be run by itself: {type(error).__name__}: {error}"))
        finally:
            self._again = False

    @contextmanager
    def _state_kept(self, layer: Any) -> Iterator[None]:
        """Buffers, and the state of random generators, are as before afterwards."""
        tensors, layers = self._framework.tensors, self._framework.layers
        path = next(path for path in self._partners if self._model.layer(path) is layer)
        inside = [node.layer for node in self._model.nodes if node.path == path or is_below(node.path, path)]
        owned = [(t, role) for each in inside for _, t, role in layers.parameters(each)]
        buffers = [(tensor, tensors.copy(tensor)) for tensor, role in owned if role == "buffer"]
        try:
            with self._framework.randomness.kept():
                yield
        finally:
            for tensor, values in buffers:
                tensors.write(tensor, values)

    def _found(self, own: OwnError, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: TracedCall) -> Any:
        framework, is_tensor = self._framework, self._framework.tensors.is_tensor
        slots = [slot for slot, _ in flatten_inputs(layer.forward, args, kwargs, is_tensor)]
        if len(slots) != len(call.inputs):
            what = f"it takes {len(slots)} tensors, the reference's {len(call.inputs)}"
            return replace(own, why=what)
        by_name = {operand.slot: operand.tensor for operand in call.inputs}
        named = set(slots) == set(by_name)
        numbers = iter([by_name[slot] for slot in slots] if named else [operand.tensor for operand in call.inputs])
        given: list[tuple[int, Any]] = []

        def of_reference(_: str, tensor: Any) -> Any:
            number = next(numbers)
            source = self._tensors[number].source
            if source is None or source.sketched:
                raise LookupError("only a sketch of its input was recorded")
            new = self._like(tensor, source.read())
            given.append((number, new))
            return new

        args = replace_tensors(tuple(args), "input", is_tensor, of_reference)
        kwargs = replace_tensors(dict(kwargs), "input", is_tensor, of_reference)
        output = layer(*args, **kwargs)
        outputs = [("output.0", output)] if is_tensor(output) else list(flatten(output, "output", is_tensor))
        expected = _paired(self._outputs.get((call.layer, call.call), {}), [slot for slot, _ in outputs])
        errors, worst = [], "float32"
        for slot, tensor in outputs:
            if slot in expected:
                errors.append(_error(framework.tensors.copy(tensor), expected[slot].read()))
                worst = _coarser(worst, framework.tensors.dtype(tensor))
        if not errors:
            return replace(own, why="the reference's outputs are not paired with its own")
        backward = None
        with suppress(LookupError):
            backward = self._backward(outputs, given, call)
        limit = allowed(worst, "forward")
        return replace(own, forward=max(errors), backward=backward, unit=ROUNDING[worst], limit=limit)

    def _like(self, tensor: Any, array: np.ndarray) -> Any:
        """The reference's tensor in the shape and dtype of the candidate's; a gradient can be had of it."""
        tensors = self._framework.tensors
        shape = tensors.shape(tensor)
        array = layout_between(array.shape, shape).undo(array, shape)
        if array.shape != shape:
            raise LookupError(f"what goes in is {list(array.shape)} there, {list(shape)} here")
        return tensors.leaf(tensor, array)

    def _backward(self, outputs: Sequence[tuple[str, Any]], given: Sequence[tuple[int, Any]], call: TracedCall) -> Any:
        """The largest error of a gradient of what went in, of those that the reference has, and that are its alone."""
        expected = [(self._gradient_of(number, call), tensor) for number, tensor in given]
        wanted = [(source, tensor) for source, tensor in expected if source is not None]
        seeds = _paired(self._gradients.get((call.layer, call.call), {}), [slot for slot, _ in outputs])
        learning = [(slot, tensor) for slot, tensor in outputs if self._framework.tensors.trainable(tensor)]
        if not wanted or not learning or any(slot not in seeds for slot, _ in learning):
            raise LookupError("no gradients to compare")
        values = [self._undone(tensor, seeds[slot].read()) for slot, tensor in learning]
        # Of the parameters too: asked for that of the input alone, paddle's LayerNorm gives a wrong one on the CPU.
        owned = [tensor for tensor in self._owned(call) if self._framework.tensors.trainable(tensor)]
        inputs = [*(tensor for _, tensor in wanted), *owned]
        found = self._framework.tensors.gradients([tensor for _, tensor in learning], inputs, values)
        errors = [
            _error(self._framework.tensors.copy(gradient), source.read())
            for (source, _), gradient in zip(wanted, found)
            if gradient is not None
        ]
        return max(errors) if errors else None

    def _known_around(self, number: int, call: TracedCall) -> bool:
        """Whether all that is made of a tensor is known: the code around the call was heard, or only hands tensors on.

        What the frameworks' own layers call is not heard.
        """
        above = self._parents.get(id(call))
        if above is None:
            return True
        inside = [other for other in self._traced.values() if self._parents.get(id(other)) is above]
        heard = any(other.function and other.layer == above.layer for other in self._calls)
        if not heard:
            made = {operand.tensor for other in inside for operand in other.outputs}
            given = {operand.tensor for operand in above.inputs}
            taken = {operand.tensor for other in inside for operand in other.inputs}
            if not taken <= made | given or not {operand.tensor for operand in above.outputs} <= made:
                return False
        return all(operand.tensor != number for operand in above.inputs) or self._known_around(number, above)

    def _owned(self, call: TracedCall) -> list[Any]:
        """The parameters of the candidate's layer that answers to the reference's, and of those inside."""
        path = next(path for path, reference in self._partners.items() if reference == call.layer)
        inside = [node for node in self._model.nodes if node.path == path or is_below(node.path, path)]
        found = {id(t): t for node in inside for _, t, _ in self._framework.layers.parameters(node.layer)}
        return list(found.values())

    def _undone(self, tensor: Any, array: np.ndarray) -> Any:
        shape = self._framework.tensors.shape(tensor)
        array = layout_between(array.shape, shape).undo(array, shape)
        if array.shape != shape:
            raise LookupError("a gradient of another shape")
        return self._framework.tensors.like(tensor, array)

    def _gradient_of(self, number: int, call: TracedCall) -> Any:
        """The gradient of a tensor that this call alone makes anything of: else it is not this call's own."""
        for other in self._calls:
            if other is call or is_below(other.layer, call.layer) or (other.layer == call.layer and other.function):
                continue
            around = not other.function and is_below(call.layer, other.layer)
            if not around and any(operand.tensor == number for operand in other.inputs):
                return None
        if not self._known_around(number, call):
            return None
        for other in self._traced.values():
            for operand in other.outputs:
                source = self._gradients.get((other.layer, other.call), {}).get(operand.slot)
                if operand.tensor == number and source is not None:
                    return source
        return None


def _parents(calls: Sequence[TracedCall]) -> dict[int, TracedCall]:
    """The call that each layer's call was made in, by identity. Calls stand in the order in which they ended."""
    found: dict[int, TracedCall] = {}
    around: list[TracedCall] = []
    for call in reversed(calls):
        if call.function:
            continue
        while around and not is_below(call.layer, around[-1].layer):
            around.pop()
        if around:
            found[id(call)] = around[-1]
        around.append(call)
    return found


def _paired(there: Mapping[str, Any], slots: Sequence[str]) -> Mapping[str, Any]:
    """The reference's values under the candidate's slots: those of one name, and by position where all names differ."""
    if len(slots) == len(there) and not there.keys() & set(slots):
        return dict(zip(slots, there.values()))
    return there


def _error(own: np.ndarray, reference: np.ndarray) -> float:
    layout = layout_between(reference.shape, own.shape)
    own = layout.apply(own, reference.shape)
    if own.shape != reference.shape:
        raise LookupError(f"it gives {list(own.shape)}, the reference {list(reference.shape)}")
    a, b = own.astype(np.float64), reference.astype(np.float64)
    size, apart = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
    return apart / size if size > 0 else apart


def _coarser(one: str, other: str) -> str:
    known = [dtype for dtype in (one, coarse(other)) if dtype in ROUNDING]
    return max(known, key=ROUNDING.__getitem__, default="float32")

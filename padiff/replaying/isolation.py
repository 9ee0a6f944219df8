"""Isolated runs of each layer on the reference's inputs, so that no error is inherited from earlier layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.compare.judge.limits import ROUNDING, allowed, coarse
from padiff.frameworks.hooking import Handle
from padiff.model.nested import flatten, flatten_inputs, replace_tensors
from padiff.model.tree import LiveModel
from padiff.pair.joined_calls import layout_between
from padiff.records import Step, TracedCall, is_below
from padiff.replaying.feeding import MaskFeeder


@dataclass(frozen=True)
class OwnError:
    """The error of one layer in isolation.

    Attributes:
        candidate, reference: paths of the layers.
        kind: class of the candidate's layer.
        forward: relative L2 error of its outputs on the reference's inputs; `None` if unknown.
        backward: relative L2 error of its input gradients, from the reference's output gradients; `None` if unknown.
        unit: rounding error of its dtype, the unit of the table.
        limit: allowed relative error of the outputs.
        why: reason why the error is unknown.
    """

    candidate: str
    reference: str
    kind: str
    forward: float | None = None
    backward: float | None = None
    unit: float = ROUNDING["float32"]
    limit: float = math.inf
    why: str = ""

    @property
    def passed(self) -> bool:
        """Return True if rounding explains the error of the outputs, or if the error is unknown."""
        return self.forward is None or self.forward <= self.limit


@dataclass
class Isolation:
    """The own errors of a replayed step's layers, filled during the step. Its text is a table.

    Attributes:
        step: number of the step.
        layers: errors by the candidate's layer path, in the order of the first calls.
    """

    step: int
    layers: dict[str, OwnError] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[OwnError, ...]:
        """Return the innermost layers whose own error exceeds rounding, in order."""
        failed = [error for error in self.layers.values() if not error.passed]
        return tuple(
            error for error in failed if not any(is_below(inner.candidate, error.candidate) for inner in failed)
        )

    def add(self, found: OwnError) -> None:
        """Add a layer's error; of several calls of a layer, the largest error counts."""
        previous = self.layers.get(found.candidate)
        if previous is not None:
            found = replace(
                previous,
                forward=_larger(previous.forward, found.forward),
                backward=_larger(previous.backward, found.backward),
                limit=min(previous.limit, found.limit),
                why=previous.why or found.why,
            )
        self.layers[found.candidate] = found

    def __str__(self) -> str:
        width = max((len(error.candidate) for error in self.layers.values()), default=5)
        lines = [
            f"own errors at step {self.step}, in multiples of rounding (each layer on the reference's inputs)",
            f"{'layer':{width}}  {'forward':>9}  {'backward':>9}",
        ]
        for error in self.layers.values():
            mark = "  <" if not error.passed else f"  {error.why}" if error.why and error.forward is None else ""
            lines.append(
                f"{error.candidate:{width}}  {_units(error.forward, error)}  {_units(error.backward, error)}{mark}"
            )
        failed = [f"{error.candidate} ({error.kind}): own error {error.forward:.2g}" for error in self.failed]
        if failed:
            lines.append(f"{'; '.join(failed)}. Nothing of it is inherited from the layers before")
        else:
            lines.append("no layer has an error of its own beyond rounding")
        return "\n".join(lines)


def _larger(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _units(value: float | None, entry: OwnError) -> str:
    return f"{'-':>9}" if value is None else f"{value / entry.unit:>9.3g}"


class Isolator:
    """Hooks that repeat each layer call of the candidate on the reference's inputs and measure its error.

    Args:
        model: the candidate.
        reference: the recorded step.
        partners: the reference's layer path by the candidate's layer path.
        feeder: source of dropout masks; the repeated call gets the same masks as the first.
        unheard: returns a context in which the recorder records nothing.
        into: table that receives the errors.
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
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def drop_unpaired(self, elsewhere: Collection[tuple[str, str]]) -> None:
        """Drop the errors of layers whose calls do not correspond one to one, after the step.

        Args:
            elsewhere: pairs of layers, by path, that end at different places of the computation.
        """
        times = Counter(layer for layer, _ in self._traced)
        for path, entry in list(self._into.layers.items()):
            expected_calls, actual_calls = times[entry.reference], self._counts[path]
            if (entry.reference, path) in elsewhere:
                why = "it ends at another place of the computation there"
            elif expected_calls != actual_calls:
                why = f"calls: {actual_calls} here, {expected_calls} there"
            else:
                continue
            self._into.layers[path] = replace(entry, forward=None, backward=None, why=why)

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
        entry = OwnError(path, reference, type(layer).__name__)
        call = self._traced.get((reference, number))
        if call is None:
            self._into.add(replace(entry, why="its inputs were not recorded"))
            return
        self._again = True
        try:
            with self._unheard(), self._feeder.again(masks), self._state_kept(layer):
                self._into.add(self._found(entry, layer, args, kwargs, call))
        except Exception as error:
            self._into.add(replace(entry, why=f"it can't be run by itself: {type(error).__name__}: {error}"))
        finally:
            self._again = False

    @contextmanager
    def _state_kept(self, layer: Any) -> Iterator[None]:
        """Restore buffers and random states at the end of the block."""
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

    def _found(self, row: OwnError, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: TracedCall) -> Any:
        framework, is_tensor = self._framework, self._framework.tensors.is_tensor
        slots = [slot for slot, _ in flatten_inputs(layer.forward, args, kwargs, is_tensor)]
        if len(slots) != len(call.inputs):
            what = f"it takes {len(slots)} tensors, the reference's {len(call.inputs)}"
            return replace(row, why=what)
        by_name = {operand.slot: operand.tensor for operand in call.inputs}
        named = set(slots) == set(by_name)
        numbers = iter([by_name[slot] for slot in slots] if named else [operand.tensor for operand in call.inputs])
        leaves: list[tuple[int, Any]] = []

        def of_reference(_: str, tensor: Any) -> Any:
            number = next(numbers)
            source = self._tensors[number].source
            if source is None or source.sketched:
                raise LookupError("only a sketch of its input was recorded")
            new = self._like(tensor, source.read())
            leaves.append((number, new))
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
            return replace(row, why="the reference's outputs are not paired with its own")
        backward = None
        with suppress(LookupError):
            backward = self._backward(outputs, leaves, call)
        limit = allowed(worst, "forward")
        return replace(row, forward=max(errors), backward=backward, unit=ROUNDING[worst], limit=limit)

    def _like(self, tensor: Any, array: np.ndarray) -> Any:
        """Return the reference's tensor in the candidate's shape and dtype, as a leaf that can receive a gradient.

        Raises:
            LookupError: the shapes do not correspond.
        """
        tensors = self._framework.tensors
        shape = tensors.shape(tensor)
        array = layout_between(array.shape, shape).undo(array, shape)
        if array.shape != shape:
            raise LookupError(f"what goes in is {list(array.shape)} there, {list(shape)} here")
        return tensors.leaf(tensor, array)

    def _backward(self, outputs: Sequence[tuple[str, Any]], leaves: Sequence[tuple[int, Any]], call: TracedCall) -> Any:
        """Return the largest error of the input gradients that only this call contributes to.

        Raises:
            LookupError: there are no such recorded gradients, or their shapes do not correspond.
        """
        expected = [(self._gradient_of(number, call), tensor) for number, tensor in leaves]
        targets = [(source, tensor) for source, tensor in expected if source is not None]
        seeds = _paired(self._gradients.get((call.layer, call.call), {}), [slot for slot, _ in outputs])
        learning = [(slot, tensor) for slot, tensor in outputs if self._framework.tensors.trainable(tensor)]
        if not targets or not learning or any(slot not in seeds for slot, _ in learning):
            raise LookupError("no gradients to compare")
        values = [self._undone(tensor, seeds[slot].read()) for slot, tensor in learning]
        # Parameters are included because paddle's LayerNorm on the CPU computes a wrong input gradient without them.
        owned = [tensor for tensor in self._owned(call) if self._framework.tensors.trainable(tensor)]
        inputs = [*(tensor for _, tensor in targets), *owned]
        gradients = self._framework.tensors.gradients([tensor for _, tensor in learning], inputs, values)
        errors = [
            _error(self._framework.tensors.copy(gradient), source.read())
            for (source, _), gradient in zip(targets, gradients)
            if gradient is not None
        ]
        return max(errors) if errors else None

    def _known_around(self, number: int, call: TracedCall) -> bool:
        """Return True if all uses of a tensor around the call are known.

        This holds if the calls in the enclosing layer's code were traced, or if that layer only passes tensors between
        its sublayers. Calls inside the frameworks' own layers are not traced.
        """
        above = self._parents.get(id(call))
        if above is None:
            return True
        inside = [sibling for sibling in self._traced.values() if self._parents.get(id(sibling)) is above]
        heard = any(sibling.function and sibling.layer == above.layer for sibling in self._calls)
        if not heard:
            produced = {operand.tensor for sibling in inside for operand in sibling.outputs}
            entering = {operand.tensor for operand in above.inputs}
            consumed = {operand.tensor for sibling in inside for operand in sibling.inputs}
            if not consumed <= produced | entering or not {operand.tensor for operand in above.outputs} <= produced:
                return False
        return all(operand.tensor != number for operand in above.inputs) or self._known_around(number, above)

    def _owned(self, call: TracedCall) -> list[Any]:
        """Return the parameters of the candidate's layer for this call, those of inner layers included."""
        path = next(path for path, reference in self._partners.items() if reference == call.layer)
        inside = [node for node in self._model.nodes if node.path == path or is_below(node.path, path)]
        parameters = {id(t): t for node in inside for _, t, _ in self._framework.layers.parameters(node.layer)}
        return list(parameters.values())

    def _undone(self, tensor: Any, array: np.ndarray) -> Any:
        shape = self._framework.tensors.shape(tensor)
        array = layout_between(array.shape, shape).undo(array, shape)
        if array.shape != shape:
            raise LookupError("a gradient of another shape")
        return self._framework.tensors.like(tensor, array)

    def _gradient_of(self, number: int, call: TracedCall) -> Any:
        """Return the recorded gradient of a tensor that no other call uses, else `None`."""
        for call_elsewhere in self._calls:
            if (
                call_elsewhere is call
                or is_below(call_elsewhere.layer, call.layer)
                or (call_elsewhere.layer == call.layer and call_elsewhere.function)
            ):
                continue
            around = not call_elsewhere.function and is_below(call.layer, call_elsewhere.layer)
            if not around and any(operand.tensor == number for operand in call_elsewhere.inputs):
                return None
        if not self._known_around(number, call):
            return None
        for call_elsewhere in self._traced.values():
            for operand in call_elsewhere.outputs:
                source = self._gradients.get((call_elsewhere.layer, call_elsewhere.call), {}).get(operand.slot)
                if operand.tensor == number and source is not None:
                    return source
        return None


def _parents(calls: Sequence[TracedCall]) -> dict[int, TracedCall]:
    """Return the enclosing layer call of each layer call, by ``id``.

    The trace lists calls in the order in which they ended.
    """
    parents: dict[int, TracedCall] = {}
    enclosing: list[TracedCall] = []
    for call in reversed(calls):
        if call.function:
            continue
        while enclosing and not is_below(call.layer, enclosing[-1].layer):
            enclosing.pop()
        if enclosing:
            parents[id(call)] = enclosing[-1]
        enclosing.append(call)
    return parents


def _paired(values: Mapping[str, Any], slots: Sequence[str]) -> Mapping[str, Any]:
    """Return the reference's values by the candidate's slots: by name, or by position if all names differ."""
    if len(slots) == len(values) and not values.keys() & set(slots):
        return dict(zip(slots, values.values()))
    return values


def _error(result: np.ndarray, reference: np.ndarray) -> float:
    layout = layout_between(reference.shape, result.shape)
    result = layout.apply(result, reference.shape)
    if result.shape != reference.shape:
        raise LookupError(f"it gives {list(result.shape)}, the reference {list(reference.shape)}")
    a, b = result.astype(np.float64), reference.astype(np.float64)
    size, apart = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
    return apart / size if size > 0 else apart


def _coarser(first: str, second: str) -> str:
    comparable = [dtype for dtype in (first, coarse(second)) if dtype in ROUNDING]
    return max(comparable, key=ROUNDING.__getitem__, default="float32")

"""``padiff.assert_same``: train two models side by side in memory, and compare the runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.compare import Policy, compare_runs
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.model.nested import flatten
from padiff.model.tree import LiveModel
from padiff.recorder import Recorder, record
from padiff.records import Both, Report, Run
from padiff.weights.assign import AssignError, carry_over
from padiff_pytest.feeding import Call, calls_of, steps_of

NAMES = Both("reference", "candidate")
_STEPS = 3


@dataclass(frozen=True)
class Side:
    """One of the two models with its optimizer, loss and calls."""

    name: str
    live: LiveModel
    optimizer: Any
    loss: Callable[..., Any] | None
    calls: Sequence[Call]

    def train(self, detail: Any, max_bytes: float | None) -> Run:
        """Train the model, and record the training in memory.

        The state of the random generators is restored, so that two models of one framework draw the same numbers.
        """
        __tracebackhide__ = True  # errors in the model's code are shown from that code on
        framework, model = self.live.framework, self.live.model
        framework.layers.clear_gradients(model)
        with framework.randomness.kept():
            recorder = record(model, optimizer=self.optimizer, detail=detail, max_bytes=max_bytes, name=self.name)
            try:
                with recorder as rec:
                    for call in self.calls:
                        self._step(rec, call)
            finally:
                framework.layers.clear_gradients(model)
        assert recorder.run is not None
        return recorder.run

    def _step(self, rec: Recorder, call: Call) -> None:
        __tracebackhide__ = True
        framework = self.live.framework
        output = self.live.model(*call.args, **call.kwargs)
        loss = self._squares(output) if self.loss is None else self.loss(output, *call.labels)
        if not framework.tensors.is_tensor(loss) or framework.tensors.shape(loss) not in ((), (1,)):
            got = list(framework.tensors.shape(loss)) if framework.tensors.is_tensor(loss) else type(loss).__name__
            raise UsageError(
                f"loss: the {self.name}'s loss has to be a {framework.name} tensor of one element, got {got}"
            )
        rec.log_loss(loss)
        loss.backward()
        if self.optimizer is not None:
            framework.optimizers.step(self.optimizer)
        rec.try_dump()
        framework.layers.clear_gradients(self.live.model)

    def _squares(self, output: Any) -> Any:
        """Return the default loss: the sum of the mean squares of all floating-point outputs.

        The gradient of a plain mean would not depend on the output.
        """
        tensors = self.live.framework.tensors
        floating = [
            tensor
            for _, tensor in flatten(output, "output", tensors.is_tensor)
            if "float" in tensors.dtype(tensor) and tensors.trainable(tensor)
        ]
        if not floating:
            raise UsageError(f"the {self.name}'s output holds no floating tensor with a gradient: give loss=")
        total = (floating[0] * floating[0]).mean()
        for tensor in floating[1:]:
            total = total + (tensor * tensor).mean()
        return total


def compared(
    models: Both[Any],
    inputs: Any,
    *,
    labels: Any,
    steps: int | None,
    optimizers: Any,
    loss: Any,
    layer_map: Any,
    start_equal: bool,
    policy: Policy | None,
    detail: Any,
    max_bytes: float | None,
) -> Report | AssignError:
    """Train both models and compare the runs; return an `AssignError` if the weights can't be copied.

    Raises:
        UsageError: an argument is wrong.
    """
    __tracebackhide__ = True
    if not isinstance(start_equal, bool):
        raise UsageError(f"start_equal is True or False, got {start_equal!r}")
    lives = models.map(LiveModel.from_model)
    optimizer = _pair(optimizers, "optimizers")
    losses = _losses(loss, labels)
    _check_apart(lives, optimizer)
    count = steps_of(inputs, labels, steps, _STEPS if optimizer.reference is not None else 1)
    sides = Both(
        *(
            Side(name, live, side_optimizer, of_loss, calls_of(inputs, labels, count, name, live))
            for name, live, side_optimizer, of_loss in zip(NAMES, lives, optimizer, losses)
        )
    )
    pairs = GivenMap.resolve(layer_map, lives.map(lambda live: live.nodes))
    if start_equal:
        try:
            _start_equal(models, sides, pairs)
        except AssignError as error:
            return error
    # No lambda here: a traceback would show its frame.
    reference, candidate = sides.reference.train(detail, max_bytes), sides.candidate.train(detail, max_bytes)
    return compare_runs(reference, candidate, layer_map=pairs, policy=policy)


def _start_equal(models: Both[Any], sides: Both[Side], pairs: GivenMap) -> None:
    """Copy the reference's weights and buffers to the candidate; one run of both models helps to pair layers."""
    first = tuple((side.calls[0].args, side.calls[0].kwargs) for side in sides)
    inputs = tuple(dict(kwargs) if kwargs else args for args, kwargs in first)
    try:
        carry_over(models.reference, models.candidate, pairs, inputs)
    except AssignError:
        raise
    except UsageError:
        # The models may fail in eval mode: pair layers by names and shapes only.
        carry_over(models.reference, models.candidate, pairs)


def _pair(value: Any, what: str) -> Both[Any]:
    if value is None:
        return Both(None, None)
    if isinstance(value, Mapping) or not isinstance(value, (list, tuple)) or len(value) != 2:
        got = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
        raise UsageError(f"{what} has to be a pair, (the reference's, the candidate's), got {got}")
    if any(item is None for item in value):
        raise UsageError(f"{what}: one of the two is None; give one for each model, or none")
    return Both(*value)


def _losses(loss: Any, labels: Any) -> Both[Any]:
    """Return the two models' loss functions; a single function is used for both."""
    pair = Both(loss, loss) if callable(loss) else _pair(loss, "loss")
    if pair.reference is None and labels is not None:
        raise UsageError("labels: nothing takes them. Give loss=, a function (or a pair) of the output and the labels")
    count = 1 if labels is None else 2
    takes = "the output" if labels is None else "the output and the labels"
    for name, function in zip(NAMES, pair):
        if function is None:
            continue
        if not callable(function):
            raise UsageError(f"loss: the {name}'s has to be a function of {takes}, got {function!r}")
        try:
            inspect.signature(getattr(function, "forward", function)).bind(*(None,) * count)
        except TypeError as error:
            more = " Give labels=, if the second argument is these" if labels is None else ""
            raise UsageError(f"loss: the {name}'s has to take {takes} ({error}).{more}") from None
        except ValueError:
            pass  # a builtin without a signature
    return pair


def _check_apart(lives: Both[LiveModel], optimizers: Both[Any]) -> None:
    """Refuse models or optimizers that are shared, because shared parameters would be trained twice.

    Raises:
        UsageError: the models are one or share parameters, or the optimizers are one.
    """
    shared = {id(tensor) for _, tensor in lives.reference.tensors()} & {id(t) for _, t in lives.candidate.tensors()}
    if lives.reference.model is lives.candidate.model or shared:
        what = "are one model" if lives.reference.model is lives.candidate.model else "share parameters"
        raise UsageError(
            f"the two models {what}, and would train each other: make the candidate anew, or give copy.deepcopy(model)"
        )
    if optimizers.reference is not None and optimizers.reference is optimizers.candidate:
        raise UsageError("optimizers: both are one; each has to be made of its own model's parameters")

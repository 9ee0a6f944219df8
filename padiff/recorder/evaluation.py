"""Evaluation between training steps: calls of which a step records the number and the input shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.nested import flatten
from padiff.model.selection import Node
from padiff.recorder.calls import Calls
from padiff.recorder.model_hooks import Hooks
from padiff.system.guard import reraise_from_signal_handler


class TrainingHistory:
    """Evidence that a model is trained, collected over the steps of a recorder.

    Attributes:
        trains: True if the recorder has an optimizer, or a backward has followed a call in training mode.
        parts: paths of layers that the loop has called directly in training mode with gradients enabled.
    """

    def __init__(self, trains: bool = False) -> None:
        self.trains = trains
        self.parts: set[str] = set()


class EvaluationFilter:
    """Filter that decides at the beginning of each call of the loop if the step only counts this call.

    Args:
        calls: counter of the step's calls.
        history: evidence from earlier steps.
    """

    def __init__(self, framework: Framework, calls: Calls, history: TrainingHistory) -> None:
        self._framework, self._calls, self._history = framework, calls, history
        #: True if the loop's last call was only counted.
        self.active = False

    def check(self, node: Node, root: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if a call is evaluation, and count the call in this case.

        Args:
            node: the called layer.
            root: the model; the mode of the call is the model's mode.
        """
        learning = self._framework.hooks.learning()
        self.active = self._is_evaluation(node, root, learning)
        if self.active:
            self._calls.count_evaluation(node.path, self._shapes(args, kwargs), learning)
        elif learning and node.layer.training:
            self._history.parts.add(node.path)
        return self.active

    def _is_evaluation(self, node: Node, root: Node, learning: bool) -> bool:
        if not root.layer.training:
            # A step with training calls drops the records of evaluation calls in the end anyway.
            return self._calls.has_trained or (not learning and self._history.trains)
        return not learning and not node.layer.training and node.path in self._history.parts

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        tensors = self._framework.tensors
        try:
            return tuple(tuple(tensors.shape(each)) for _, each in flatten((args, kwargs), "", tensors.is_tensor))
        except Exception as error:  # a tensor without a shape
            reraise_from_signal_handler(error)
            return ()

    def note_gradient(self) -> None:
        """Note that a parameter has received a gradient."""
        if not self._history.trains and self._calls.has_trained:
            self._history.trains = True


class EvaluationObserver:
    """Observer that replaces a step's observer until an evaluation call ends, and records nothing.

    Args:
        key: identity of the called layer.
        hooks: the hooks that call the step's observer.
    """

    autocast_open = False
    losses = None
    planning: Any = SimpleNamespace(following=None)

    def __init__(self, key: int, hooks: Hooks) -> None:
        self._key, self._hooks, self._depth = key, hooks, 1
        self._observer, hooks.observer = hooks.observer, self

    def before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if key == self._key:
            self._depth += 1

    def after_call(self, key: int, output: Any, failed: bool) -> None:
        if key == self._key:
            self._depth -= 1
            if not self._depth and self._hooks.observer is self:
                self._hooks.observer = self._observer

    def after_function(self, name: str, output: Any) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_ended(self, tensor: Any) -> None: ...

    def add_gradient(self, key: int, gradient: Any) -> None: ...

    def consume(self, optimizer: Any, parameters: Sequence[Any], gradients: Sequence[Any]) -> None: ...

    def optimizer_stepped(self, optimizer: Any) -> None: ...

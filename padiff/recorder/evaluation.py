"""Evaluation between the steps of a training: calls of which a step keeps the number and the shapes, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.nested import flatten
from padiff.model.selection import Node
from padiff.recorder.calls import Calls
from padiff.recorder.hooks import Hooks
from padiff.system.guard import reraise_from_signal_handler


class TrainingHistory:
    """Evidence that a model is trained, collected over the steps of a recorder.

    Attributes:
        trains: whether an optimizer was given, or a backward has followed a call in training mode.
        parts: paths of layers that the loop itself has called in training mode with gradients.
    """

    def __init__(self, trains: bool = False) -> None:
        self.trains = trains
        self.parts: set[str] = set()


class EvaluationFilter:
    """Decides for each call of the loop, as the call begins, if the step only counts it.

    Args:
        calls: the step's, which count.
        history: what the steps before have shown.
    """

    def __init__(self, framework: Framework, calls: Calls, history: TrainingHistory) -> None:
        self._framework, self._calls, self._history = framework, calls, history
        #: Whether the loop's last call was only counted.
        self.active = False

    def check(self, node: Node, root: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Count a call and return True, if it is evaluation; else return False.

        Args:
            node: the layer that the loop calls.
            root: the model, whose mode is the mode of the call.
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
            # Beside training calls nothing else of it would be left in the end.
            return self._calls.has_trained or (not learning and self._history.trains)
        return not learning and not node.layer.training and node.path in self._history.parts

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        tensors = self._framework.tensors
        try:
            return tuple(tuple(tensors.shape(each)) for _, each in flatten((args, kwargs), "", tensors.is_tensor))
        except Exception as error:  # of a kind that has no shape
            reraise_from_signal_handler(error)
            return ()

    def note_gradient(self) -> None:
        """A parameter has got a gradient."""
        if not self._history.trains and self._calls.has_trained:
            self._history.trains = True


class EvaluationObserver:
    """Takes the place of a step's observer during an evaluation call: waits for its end, and records nothing.

    Args:
        key: of the layer that the loop calls.
        hooks: those that call the step's observer.
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

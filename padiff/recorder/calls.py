"""The running and the counted calls of layers in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from padiff.model.selection import Node
from padiff.records import Evaluation
from padiff.system.frames import Frame

# Number of different input shapes of evaluation calls that a step keeps.
_SHAPES = 20


@dataclass(slots=True)
class Call:
    """A running call of a layer."""

    node: Node
    number: int
    training: bool
    recomputed: bool
    #: True inside of a function transform: the call is then not recorded.
    transformed: bool = False
    #: Inputs: each slot followed by its tensor's number in the trace; None if the inputs are not traced.
    inputs: tuple[Any, ...] | None = None
    #: Python stack of the call; empty if stacks are not traced.
    stack: tuple[Frame, ...] = ()


class Calls:
    """The calls of a step so far.

    Attributes:
        running: stack of the running calls, the outermost first.
    """

    def __init__(self) -> None:
        self.running: list[Call] = []
        # Number of calls by path and mode (True for training).
        self._numbers: dict[tuple[str, bool], int] = {}
        self._recomputed: dict[tuple[str, bool], int] = {}
        self._outermost: Counter[tuple[str, bool]] = Counter()
        #: Number of outermost calls without gradients, by path and mode.
        self._without_gradients: Counter[tuple[str, bool]] = Counter()
        self._functions: Counter[tuple[str, str, bool, bool]] = Counter()
        self._transformed: set[str] = set()
        #: Number of evaluation calls that are only counted, by path and input shapes.
        self._evaluations: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self._evaluated_with_gradients = False

    def begin(self, node: Node, training: bool, recomputed: bool, learning: bool = True) -> Call:
        """Begin a layer's call and number the call among the layer's calls of its mode.

        Recomputed calls have numbers of their own.

        Args:
            learning: False for an outermost call that computes no gradients, which is no micro-batch.
        """
        numbers = self._recomputed if recomputed else self._numbers
        key = node.path, training
        number = numbers.get(key, 0)
        numbers[key] = number + 1
        call = Call(node, number, training, recomputed)
        if not self.running and not recomputed:
            self._outermost[key] += 1
            self._without_gradients[key] += not learning
        self.running.append(call)
        return call

    def begin_transformed(self, node: Node, training: bool, recomputed: bool) -> None:
        """Begin a call inside of a function transform; the call gets no number."""
        self.running.append(Call(node, 0, training, recomputed, transformed=True))
        self._transformed.add(node.path)

    def end(self, node: Node) -> Call | None:
        """End a layer's call and return the call, or None if no such call is running."""
        while self.running:
            # Above this call there may be one that ended in an exception which the model caught.
            call = self.running.pop()
            if call.node is node:
                return call
        return None

    def count(self, calls: Iterable[tuple[tuple[str, bool], int]]) -> None:
        """Set the number of calls so far by (path, mode), for calls that were not begun and ended one by one."""
        self._numbers.update(calls)

    def count_evaluation(self, path: str, shapes: tuple[tuple[int, ...], ...], learning: bool) -> None:
        """Count a call in evaluation mode that is not recorded.

        Args:
            learning: True if gradients were enabled in the call.
        """
        if len(self._evaluations) >= _SHAPES and (path, shapes) not in self._evaluations:
            shapes = ()
        self._evaluations[path, shapes] += 1
        self._evaluated_with_gradients = self._evaluated_with_gradients or learning

    def function(self, inside: Call, name: str) -> Call:
        """Return a copy of the layer's call around a function call, numbered among the calls of this function there."""
        key = (inside.node.path, name, inside.training, inside.recomputed)
        self._functions[key] += 1
        return replace(inside, number=self._functions[key] - 1)

    @property
    def any(self) -> bool:
        """Return True if any layer was called."""
        return bool(self._numbers or self._transformed)

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths of the layers that were called."""
        return frozenset([path for path, _ in self._numbers]) | self._transformed

    @property
    def recomputed(self) -> frozenset[str]:
        """Return the paths of the layers whose forward ran again inside of a backward."""
        return frozenset(path for path, _ in self._recomputed)

    @property
    def in_both_modes(self) -> bool:
        """Return True if the model was called both in training mode and in evaluation mode."""
        return self.has_trained and (self._has_evaluated or bool(self._evaluations))

    @property
    def mixed(self) -> bool:
        """Return True if there may be records of calls in both modes."""
        return self.has_trained and (self._has_evaluated or self._evaluated_with_gradients)

    @property
    def has_trained(self) -> bool:
        """Return True if the model was called in training mode."""
        return any(training for _, training in self._outermost)

    @property
    def _has_evaluated(self) -> bool:
        return not all(training for _, training in self._outermost)

    @property
    def evaluations(self) -> int:
        """Return the number of calls in evaluation mode that are left out of the step.

        These are the calls that were only counted. In a step that has calls in training mode, these are all calls in
        evaluation mode.
        """
        skipped = sum(n for (_, training), n in self._outermost.items() if not training) if self.has_trained else 0
        return skipped + sum(self._evaluations.values())

    @property
    def evaluated(self) -> tuple[Evaluation, ...]:
        """Return the evaluation calls that are left out of the step; shapes are known of counted ones only."""
        counted = Counter(self._evaluations)
        if self.has_trained:
            counted.update({(path, ()): n for (path, training), n in self._outermost.items() if not training})
        return tuple(Evaluation(path, n, shapes) for (path, shapes), n in counted.items())

    @property
    def micro_batches(self) -> int:
        """Return the largest number of outermost calls of a layer: the step's number of micro-batches.

        Calls without gradients (the targets of a network that is trained) count only if there are no others.
        """
        trained = self.has_trained
        calls = {key: n for key, n in self._outermost.items() if key[1] or not trained}
        learning = max((n - self._without_gradients[key] for key, n in calls.items()), default=0)
        return learning or max(calls.values(), default=1)

    def trained(self, path: str) -> int:
        """Return the number of outermost calls of a layer in training mode."""
        return self._outermost[path, True]

"""The calls of layers in a step: which are under way, and how many there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from padiff.model.selection import Node
from padiff.records import Evaluation
from padiff.system.frames import Frame

# Different shapes of evaluation calls that a step keeps.
_SHAPES = 20


@dataclass(slots=True)
class Call:
    """A layer's call that is under way."""

    node: Node
    number: int
    training: bool
    recomputed: bool
    #: Whether it is made inside of a function transform: then nothing of it is recorded.
    transformed: bool = False
    #: What went in: slots, each with its tensor's number in the trace behind it; `None` where that is not looked at.
    inputs: tuple[Any, ...] | None = None
    #: Where it is called; empty where that is not looked at.
    stack: tuple[Frame, ...] = ()


class Calls:
    """The calls of a step so far.

    Attributes:
        running: those that are under way, the outermost first.
    """

    def __init__(self) -> None:
        self.running: list[Call] = []
        # By path and whether in training mode.
        self._numbers: dict[tuple[str, bool], int] = {}
        self._recomputed: dict[tuple[str, bool], int] = {}
        self._outermost: Counter[tuple[str, bool]] = Counter()
        self._functions: Counter[tuple[str, str, bool, bool]] = Counter()
        self._transformed: set[str] = set()
        #: Calls that are only counted, by path and the shapes that went in.
        self._evaluations: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self._evaluated_with_gradients = False

    def begin(self, node: Node, training: bool, recomputed: bool) -> Call:
        """A layer's call begins; it is numbered among the layer's calls of its mode, recomputed ones on their own."""
        numbers = self._recomputed if recomputed else self._numbers
        key = node.path, training
        number = numbers.get(key, 0)
        numbers[key] = number + 1
        call = Call(node, number, training, recomputed)
        if not self.running and not recomputed:
            self._outermost[key] += 1
        self.running.append(call)
        return call

    def begin_transformed(self, node: Node, training: bool, recomputed: bool) -> None:
        """A call begins inside of a function transform: it counts for no number."""
        self.running.append(Call(node, 0, training, recomputed, transformed=True))
        self._transformed.add(node.path)

    def end(self, node: Node) -> Call | None:
        """A layer's call ends; `None` where it is not known to have begun."""
        while self.running:
            # A call that ended in an exception which the model itself caught may still lie above this one.
            call = self.running.pop()
            if call.node is node:
                return call
        return None

    def count(self, calls: Iterable[tuple[tuple[str, bool], int]]) -> None:
        """Calls have begun, and ended, that were not noted one by one: by path and mode, how many there are now."""
        self._numbers.update(calls)

    def count_evaluation(self, path: str, shapes: tuple[tuple[int, ...], ...], learning: bool) -> None:
        """Count a call in evaluation mode, of which nothing else is recorded."""
        if len(self._evaluations) >= _SHAPES and (path, shapes) not in self._evaluations:
            shapes = ()
        self._evaluations[path, shapes] += 1
        self._evaluated_with_gradients = self._evaluated_with_gradients or learning

    def function(self, inside: Call, name: str) -> Call:
        """A function is called inside of a layer's call: that call, with the function's own number among its like."""
        key = (inside.node.path, name, inside.training, inside.recomputed)
        self._functions[key] += 1
        return replace(inside, number=self._functions[key] - 1)

    @property
    def any(self) -> bool:
        """Whether there was one."""
        return bool(self._numbers or self._transformed)

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the layers that were called."""
        return frozenset([path for path, _ in self._numbers]) | self._transformed

    @property
    def recomputed(self) -> frozenset[str]:
        """Paths of the layers whose forward ran again inside of a backward."""
        return frozenset(path for path, _ in self._recomputed)

    @property
    def in_both_modes(self) -> bool:
        """Whether the model was called in training mode and in evaluation mode."""
        return self.has_trained and (self._has_evaluated or bool(self._evaluations))

    @property
    def mixed(self) -> bool:
        """Whether there may be records of calls in evaluation mode beside those in training mode."""
        return self.has_trained and (self._has_evaluated or self._evaluated_with_gradients)

    @property
    def has_trained(self) -> bool:
        """Whether the model was called in training mode."""
        return any(training for _, training in self._outermost)

    @property
    def _has_evaluated(self) -> bool:
        return not all(training for _, training in self._outermost)

    @property
    def evaluations(self) -> int:
        """How many calls in evaluation mode are left out: those that were only counted, and in a step that has calls
        in training mode all.
        """
        beside = sum(n for (_, training), n in self._outermost.items() if not training) if self.has_trained else 0
        return beside + sum(self._evaluations.values())

    @property
    def evaluated(self) -> tuple[Evaluation, ...]:
        """The calls that were only counted."""
        return tuple(Evaluation(path, n, shapes) for (path, shapes), n in self._evaluations.items())

    @property
    def micro_batches(self) -> int:
        """How often the model was called for the step."""
        trained = self.has_trained
        return max((n for (_, training), n in self._outermost.items() if training or not trained), default=1)

    def trained(self, path: str) -> int:
        """How often a layer was called in training mode, from outside of all others."""
        return self._outermost[path, True]

"""Inputs of a call: operands by position, and arguments by any of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.compare.diagnose.computing.formula import UnknownError

_MISSING = object()
# Positions of operands, by parameter name.
_PLACES = {
    "input": 0, "x": 0, "self": 0, "query": 0, "other": 1, "y": 1, "key": 1, "value": 2, "weight": 1, "bias": 2,
    "mask": 1, "attn_mask": 3, "condition": 0,
}  # fmt: skip
_IN_FUNCTION = {
    "where": {"condition": 0, "input": 1, "x": 1, "other": 2, "y": 2},
    "layer_norm": {"weight": 1, "bias": 2},
    "rms_norm": {"weight": 1, "bias": 2, "norm_weight": 1, "norm_bias": 2},
    "group_norm": {"weight": 1, "bias": 2},
    "embedding": {"weight": 1},
    "batch_norm": {"running_mean": 1, "running_var": 2, "weight": 3, "bias": 4},
    "masked_fill": {"mask": 1, "value": 2},
    "cross_entropy": {"target": 1, "label": 1, "weight": 2},
    "nll_loss": {"target": 1, "label": 1, "weight": 2},
    "binary_cross_entropy": {"target": 1, "label": 1, "weight": 2},
    "binary_cross_entropy_with_logits": {"logit": 0, "target": 1, "label": 1, "weight": 2, "pos_weight": 3},
}
# Parameters of an index, one operand for each axis that is indexed by a tensor.
_INDICES = frozenset({"key", "item"})
_KEYWORDS = frozenset({"tensors", "seq", "arrays", "operands"})


@dataclass(frozen=True)
class KnownInputs:
    """The inputs of a function call.

    Attributes:
        function: the common name of the function.
        nodes: the operands as nodes of a formula, by position.
        arguments: the other arguments, by parameter name or position.
    """

    function: str
    nodes: Mapping[int, int]
    arguments: Mapping[str, Any]

    @property
    def first(self) -> int:
        return self.node(0)

    def node(self, place: int) -> int:
        """Return the operand at a position.

        Raises:
            UnknownError: there is no operand at this position.
        """
        if place not in self.nodes:
            raise UnknownError(f"{self.function} has no operand in place {place}")
        return self.nodes[place]

    @property
    def all(self) -> list[int]:
        """The operands, in order."""
        return [self.nodes[k] for k in sorted(self.nodes)]

    def argument(self, names: Sequence[str], place: int = -1, default: Any = _MISSING) -> Any:
        """Return an argument by one of its names or by its position.

        Args:
            names: the possible names of the parameter.
            place: the position.
            default: the value to return if the call does not have the argument.

        Raises:
            UnknownError: the call does not have the argument, and there is no default.
        """
        for name in (*names, str(place)):
            if name in self.arguments:
                return self.arguments[name]
        if default is _MISSING:
            raise UnknownError(f"{self.function} without {names[0]}")
        return default

    def numbers(self, names: Sequence[str], place: int) -> list[int]:
        """Return a list of numbers, passed as one argument or as positional arguments from a position on.

        Args:
            names: the possible names of the parameter.
            place: the position of the first number.

        Raises:
            UnknownError: the call does not have the argument.
        """
        value = self.argument(names, place, None)
        if isinstance(value, list):
            return value
        if value is None and not any(name in self.arguments for name in names):
            raise UnknownError(f"{self.function} without {names[0]}")
        numbers: list[int] = []
        while str(place + len(numbers)) in self.arguments:
            numbers.append(self.arguments[str(place + len(numbers))])
        return numbers or [value]


def placed(function: str, slots: Sequence[tuple[str, int]], parameters: Sequence[int]) -> dict[int, int]:
    """Return operands by position, from their slots; parameters fill the remaining positions.

    Args:
        function: the common name of the function.
        slots: the slot and the node of each operand.
        parameters: the nodes of the parameters, in order.
    """
    positions = {**_PLACES, **_IN_FUNCTION.get(function, {})}
    operands: dict[int, int] = {}
    for slot, node in slots:
        head, _, tail = slot.partition(".")
        if function == "getitem" and head in _INDICES:
            place = 1 + int(tail or 0)
        elif head.isdecimal():
            place = int(head) if not tail.isdecimal() else int(tail)
        elif tail.isdecimal():
            place = int(tail)
        else:
            place = positions.get(head, len(operands))
        operands[place if place not in operands else max(operands) + 1] = node
    remaining = iter(parameters)
    place = 0
    for node in remaining:
        while place in operands:
            place += 1
        operands[place] = node
    return operands

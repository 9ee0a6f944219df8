"""What a call was given: its operands in their places, and its arguments by any of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.compare.diagnose.computing.formula import UnknownError

_MISSING = object()
# Places of operands, by what functions call them.
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
_KEYWORDS = frozenset({"tensors", "seq", "arrays", "operands"})


@dataclass(frozen=True)
class Given:
    """What a call was given.

    Attributes:
        function: its common name.
        nodes: of a formula, by place.
        arguments: what else, by the names of parameters or by place.
    """

    function: str
    nodes: Mapping[int, int]
    arguments: Mapping[str, Any]

    @property
    def first(self) -> int:
        return self.node(0)

    def node(self, place: int) -> int:
        """The operand in a place.

        Raises:
            UnknownError: there is none.
        """
        if place not in self.nodes:
            raise UnknownError(f"{self.function} has no operand in place {place}")
        return self.nodes[place]

    @property
    def all(self) -> list[int]:
        """The operands, in their order."""
        return [self.nodes[k] for k in sorted(self.nodes)]

    def argument(self, names: Sequence[str], place: int = -1, default: Any = _MISSING) -> Any:
        """An argument by one of its names, or by place.

        Raises:
            UnknownError: it was not given, and there is no default.
        """
        for name in (*names, str(place)):
            if name in self.arguments:
                return self.arguments[name]
        if default is _MISSING:
            raise UnknownError(f"{self.function} without {names[0]}")
        return default

    def numbers(self, names: Sequence[str], place: int) -> list[int]:
        """A list of numbers, which may be given one by one from a place on."""
        found = self.argument(names, place, None)
        if isinstance(found, list):
            return found
        if found is None and not any(name in self.arguments for name in names):
            raise UnknownError(f"{self.function} without {names[0]}")
        numbers: list[int] = []
        while str(place + len(numbers)) in self.arguments:
            numbers.append(self.arguments[str(place + len(numbers))])
        return numbers or [found]


def placed(function: str, slots: Sequence[tuple[str, int]], parameters: Sequence[int]) -> dict[int, int]:
    """Operands by place, given their slots; parameters fill the places that are left."""
    known = {**_PLACES, **_IN_FUNCTION.get(function, {})}
    found: dict[int, int] = {}
    for slot, node in slots:
        head, _, tail = slot.partition(".")
        if head.isdecimal():
            place = int(head) if not tail.isdecimal() else int(tail)
        elif tail.isdecimal():
            place = int(tail)
        else:
            place = known.get(head, len(found))
        found[place if place not in found else max(found) + 1] = node
    left = iter(parameters)
    place = 0
    for node in left:
        while place in found:
            place += 1
        found[place] = node
    return found

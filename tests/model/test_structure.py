from __future__ import annotations

import collections
import dataclasses

from padiff.model.nested import flatten, flatten_inputs


class T:
    """Stands for a tensor."""


A, B, C = T(), T(), T()


def slots(value) -> list[tuple[str, T]]:
    return list(flatten(value, "output", lambda v: isinstance(v, T)))


def test_a_lone_tensor_and_the_first_of_a_tuple_share_a_slot():
    assert slots(A) == slots((A,)) == [("output.0", A)]


def test_nested_values_are_numbered_and_named_in_order():
    assert slots([A, {"x": B, "y": (None, C)}]) == [("output.0", A), ("output.1.x", B), ("output.1.y.1", C)]


def test_dataclasses_and_named_tuples_are_taken_apart():
    Out = dataclasses.make_dataclass("Out", ["logits", "hidden"])
    assert slots(Out(A, [B])) == [("output.logits", A), ("output.hidden.0", B)]
    Pair = collections.namedtuple("Pair", "x y")
    assert slots(Pair(A, B)) == [("output.0", A), ("output.1", B)]


def test_what_is_no_tensor_is_passed_over():
    assert slots([None, 3, "text", A, T]) == [("output.3", A)]
    assert slots(None) == []


def test_a_value_that_contains_itself_ends():
    value: list = [A]
    value.append(value)
    assert slots(value)[:2] == [("output.0", A), ("output.1.0", A)]


def inputs(forward, *args, **kwargs) -> list[tuple[str, T]]:
    return list(flatten_inputs(forward, args, kwargs, lambda v: isinstance(v, T)))


def test_inputs_bear_the_names_that_forward_gives_them():
    def forward(x, mask=None, *, scale=1): ...

    assert inputs(forward, A, B) == [("input.x", A), ("input.mask", B)]
    assert inputs(forward, A, scale=C) == [("input.x", A), ("input.scale", C)]
    assert inputs(forward, [A, B]) == [("input.x.0", A), ("input.x.1", B)]


def test_inputs_beyond_the_names_are_numbered():
    def forward(x, *rest): ...

    assert inputs(forward, A, B, C) == [("input.x", A), ("input.1", B), ("input.2", C)]


def test_a_callable_without_a_signature_has_numbered_inputs():
    assert inputs(dict.fromkeys, A)[0][1] is A
    assert inputs(type("Odd", (), {"__call__": print, "__signature__": 5})(), A) == [("input.0", A)]

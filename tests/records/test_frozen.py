"""Frozen values that are made quickly are what `dataclasses` makes."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, make_dataclass, replace

import numpy as np
import pytest

from padiff.records import Both, Diff, Figure, Figures, InMemory, Judgement, Pair, Record, Rule
from padiff.records.both import fast_frozen_init

RECORD = Record("a", "weight", "w", InMemory(np.zeros(2)), "float32", (2,))
PAIR = Pair(3, RECORD, None)
FIGURES = Figures(1.0, l2=2.0, values=Both(3.0, 4.0))
JUDGEMENT = Judgement(Figure.REL_L2, 1.0, 2.0, Rule.ROUNDING)
VALUES = [RECORD, PAIR, FIGURES, JUDGEMENT, Diff(PAIR, FIGURES, False, JUDGEMENT), Both(1.0, "two")]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_has_what_a_plain_dataclass_of_its_fields_has(value):
    own = [one for one in fields(value) if one.init]
    plain = make_dataclass("Plain", [(one.name, one.type, one.default) for one in own], frozen=True)
    some = {one.name: getattr(value, one.name) for one in own[:6]}
    reference, candidate = type(value)(*some.values()), plain(**some)
    assert type(reference) is type(value)
    assert {one.name: getattr(reference, one.name) for one in own} == vars(candidate)
    assert reference == type(value)(**some)
    assert replace(value) == value == copy.copy(value)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_cannot_be_changed(value):
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.another = 1


def test_a_value_goes_to_another_process_and_back():
    for value in (FIGURES, JUDGEMENT):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("slots", [False, True])
def test_a_value_of_two_sides_can_have_more_than_these(slots):
    @dataclass(frozen=True, slots=slots)
    class Sides(Both[int]):
        more: str

    sides = Sides(1, 2, "three")
    assert type(sides) is Sides and (sides.reference, sides.candidate, sides.more) == (1, 2, "three")
    assert type(sides.swapped()) is Both and [*sides.swapped()] == [2, 1]


def test_what_is_worked_out_from_the_fields_is_there():
    assert (PAIR.anchor, PAIR.stage, PAIR.complete) == (RECORD, "weight", False)


def test_arguments_are_refused_as_ever():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'pair'"):
        Diff()
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        Figures(nothing=1)
    with pytest.raises(AssertionError, match="at least one side"):
        Pair(0, None, None)


def test_a_default_that_is_made_is_refused():
    @dataclass(frozen=True, slots=True)
    class Made:
        some: list = field(default_factory=list)

    with pytest.raises(AssertionError, match="some has a default that is made"):
        fast_frozen_init(Made)

from __future__ import annotations

import pytest

from padiff.errors import SelectionError, UsageError
from padiff.model.selection import Node, select
from padiff.records import ROOT
from padiff.system.terminal import nearest


class Block: ...


class Linear(Block): ...


class Dropout(Block): ...


NODES = [
    Node(ROOT, Block()),
    Node("encoder", Block()),
    Node("encoder.0", Linear()),
    Node("encoder.drop", Dropout()),
    Node("encoder2", Linear()),
    Node("head", Linear(), aliases=("tied.head",)),
    Node("head.inner", Dropout()),
]
ALL = {node.path for node in NODES}


def chosen(**lists) -> set[str]:
    return set(select(NODES, **lists))


def test_without_lists_everything_is_recorded():
    assert chosen() == ALL


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("encoder.*", {"encoder.0", "encoder.drop"}),
        ("encoder", {"encoder", "encoder.0", "encoder.drop"}),
        (("encoder", "self"), {"encoder"}),
        (("encoder", "sublayers"), {"encoder.0", "encoder.drop"}),
        (("encoder", "all"), {"encoder", "encoder.0", "encoder.drop"}),
        (Dropout, {"encoder.drop", "head.inner"}),
        ((Block, "self"), ALL),
        (NODES[5].layer, {"head", "head.inner"}),
        ((NODES[5].layer, "self"), {"head"}),
        ((ROOT, "sublayers"), ALL - {ROOT}),
        ("tied.*", {"head", "head.inner"}),
        ("*.drop", {"encoder.drop"}),
    ],
)
def test_an_item_of_a_list_means(item, expected):
    assert chosen(white_list=[item]) == expected
    assert chosen(black_list=[item]) == ALL - expected


def test_white_beats_black():
    assert chosen(white_list=["encoder.*"], black_list=["encoder.0"]) == {"encoder.0", "encoder.drop"}


def test_an_empty_white_list_leaves_the_black_list_in_force():
    assert chosen(white_list=[], black_list=["head"]) == ALL - {"head", "head.inner"}


def test_several_items_add_up():
    assert chosen(white_list=[("head", "self"), "encoder2"]) == {"head", "encoder2"}


def test_what_is_below_a_mapped_layer_is_left_out_whatever_the_lists_say():
    assert chosen(hidden=[NODES[1].layer]) == ALL - {"encoder.0", "encoder.drop"}
    assert chosen(white_list=["encoder"], hidden=[NODES[1].layer]) == {"encoder"}


def test_a_pattern_that_matches_nothing_is_reported_with_the_nearest_paths():
    with pytest.raises(SelectionError, match=r"white_list: the pattern 'encodr\.\*' matches no.* Nearest: encoder"):
        chosen(white_list=["encodr.*"])
    with pytest.raises(SelectionError, match=r"black_list: the pattern 'x' matches no layer"):
        chosen(black_list=["x"])


def test_a_class_that_no_layer_has_is_reported_with_those_there_are():
    with pytest.raises(SelectionError, match=r"no layer of the class builtins.int; it has Block, Dropout, Linear"):
        chosen(black_list=[int])


def test_a_layer_of_another_model_is_reported():
    with pytest.raises(SelectionError, match=r"is no layer of the model. Give a layer object of this very model"):
        chosen(white_list=[Linear()])


@pytest.mark.parametrize("value", ["encoder", b"x", 5])
def test_a_list_that_is_no_list_is_refused(value):
    with pytest.raises(UsageError, match=r"white_list has to be a list of layers, classes or path patterns, got"):
        chosen(white_list=value)


def test_an_unknown_mode_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match=r"unknown mode 'below'; the modes are self, sublayers, all"):
        chosen(white_list=[("encoder", "below")])


def test_nearest_names_the_likeliest_first_and_something_in_any_case():
    assert nearest("encoder.O", ["head", "encoder.0", "tail"]) == "Nearest: encoder.0"
    assert nearest("zzz", ["a", "b"]) == "Nearest: a, b"
    assert nearest("zzz", []) == "There are none."

"""The code computed again with one thing written otherwise: planted faults are proven, near misses are not."""

from __future__ import annotations

import functools
import re

import pytest

import padiff
from compare.computing.nets import Images, Net, trained
from padiff.recorder import copying


@functools.cache
def reference(kind):
    return trained(kind)


def cause_of(kind, fault):
    return padiff.compare_runs(reference(kind), trained(kind, fault)).first_diff.cause


FAULTS = {
    "eps": (r"norm_eps", "0.01 for the reference's 1e-05"),
    "unbiased": (r"variance", "unbiased"),
    "uncentred": (r"branch_missing|norm_form|.*_missing", "mean"),
    "no norm": (r"norm_missing", "`block.norm`"),
    "parts swapped": (r"parts_order", "`block.q`"),
    "scale of the width": (r"attention_scale", "for the reference's 2"),
    "mask inverted": (r"mask_inverted", "inverted"),
    "no mask": (r"mask_missing", "mask is missing"),
    "softmax axis": (r"softmax_axis", "over axis 2 for the reference's 3"),
    "heads not turned back": (r"axes_order|flatten_order", "order"),
    "heads by reshape": (r"flatten_order", "a reshape stands for the first transpose() in `block`, the second"),
    "no residual": (r"residual_missing", "residual"),
    "branch twice": (r"scale(_added)?", "2"),
    "gate and up": (r"parts_order|.*", "`block.gate`"),
    "gelu": (r"activation", "exact GELU for the reference's SiLU"),
    "no activation": (r"activation_missing", "SiLU"),
    "no embedding scale": (r"scale.*", "scaled by 4"),
    "places rolled": (r"shifted|roll_added", "roll"),
    "no places": (r"term_missing", "(root)/places"),
    "rounded": (r"precision", "bfloat16"),
    "mean over pads": (r"mean_over_pads", "padding"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_code_of_a_transformer_is_proven(fault):
    cause = cause_of(Net, fault)
    kind, words = FAULTS[fault]
    assert cause.proven, cause.text
    assert re.fullmatch(kind, cause.kind), cause.text
    assert words in cause.sentence


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("padding", "layer_setting", "padding_mode zeros against reflect"),
        ("declared eps", "layer_setting", "eps 1e-05 against 0.01"),
        ("no norm", "norm_missing", "`norm`"),
        ("average", "pooling", "average pooling"),
        ("transposed", "weight_transposed", "`(root)/mix`"),
        ("flattened", "flatten_order", "flattened in another order"),
    ],
)
def test_a_fault_in_the_code_of_a_convolutional_net_is_proven(fault, kind, words):
    cause = cause_of(Images, fault)
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


def test_two_faults_side_by_side_are_read_from_the_calls_of_both_sides():
    cause = cause_of(Net, "two at once")
    assert (cause.kind, cause.proven) == ("code", True), cause.text
    assert "the candidate calls gelu(), then the first mul() in `block`" in cause.sentence


def test_other_code_that_takes_a_mask_of_one_side_is_read_from_both():
    cause = cause_of(Net, "squares")
    assert (cause.kind, cause.proven) == ("code", True), cause.text
    assert "sqrt(mean(square(x), dim=1))" in cause.sentence
    assert "sum(x * a, dim=1) / sum(a, dim=1, keepdim=True)" in cause.sentence


def test_what_no_single_edit_gives_is_not_proven():
    cause = cause_of(Images, "declared eps and more")
    assert not cause.proven, cause.text


def test_what_is_written_otherwise_and_computes_the_same_matches():
    assert padiff.compare_runs(reference(Images), trained(Images, "einsum")).passed


def test_sketches_of_tensors_are_enough_where_weights_and_what_goes_in_are_there(monkeypatch):
    rules = {"*": "full", "conv/forward": "sketch"}
    monkeypatch.setattr(copying, "SMALL_ELEMENTS", 0)  # as though it were a large one
    one, other = (trained(Images, fault, detail=rules) for fault in ("", "padding"))
    first = padiff.compare_runs(one, other).first_diff
    assert first.diff.figures.basis != "tensors"
    assert (first.cause.kind, first.cause.proven) == ("layer_setting", True), first.cause.text

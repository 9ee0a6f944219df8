"""What the probes find in the installed torch and paddle."""

from __future__ import annotations

import math

import pytest

from padiff_atlas.probes import GROUPS

pytestmark = pytest.mark.slow

# Measured by hand before there was an atlas; the ratio is worked out from the definition where there is one.
DIFFERENT = {
    "cross_entropy, ignored labels, mean": 5 / 6,  # 5 of 6 labels are counted, and all 6 divide
    "AvgPool2d, padded": None,
    "smooth_l1_loss, beta 0.5": 0.5,  # Huber's is delta times it
    "SmoothL1Loss, beta 0.5": 0.5,
    "BatchNorm2d, running_mean after a step": 9.0,  # 0.9 of the batch's mean for 0.1 of it
    "BatchNorm2d, running_var, momentum by default": None,
    "Adamax": None,
    "RMSprop": None,
    "MultiheadAttention, boolean mask": None,
    "embedding, padding_idx": None,
    "Embedding, padding_idx": None,
    "clip by global norm": None,
}
WITHOUT_A_CALL = {
    "Adamax", "RMSprop", "RMSprop, defaults", "RMSprop, centered, momentum", "grid_sample, bicubic",
    "atan2, gradient at 0",
}  # fmt: skip
ALIKE = (
    "SGD", "momentum", "Nesterov", "Adagrad", "Adam", "AdamW", "gelu", "gelu, tanh", "interpolate, bilinear",
    "interpolate, bicubic", "pad, reflect", "polynomial decay",
)  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_was_measured_to_differ_differs_and_its_mended_call_agrees(rows, name):
    row = rows[name]
    assert row.kind == "values" and not row.wrong
    assert row.mended_agrees == (name not in WITHOUT_A_CALL)
    if DIFFERENT[name] is not None:
        assert row.ratio == pytest.approx(DIFFERENT[name], rel=1e-4)
    assert row.agrees in ("torch", "")  # float64's word, where there is a formula


@pytest.mark.parametrize("name", ALIKE)
def test_what_was_measured_to_be_the_same_is_the_same(rows, name):
    assert rows[name].kind == "same" and rows[name].rel_l2 < 5e-6
    assert rows[name].agrees in ("both", "")


def test_the_figures_of_differences_are_those_of_their_definitions(rows):
    # n values in a channel: 2 images of 7 by 7. Of both variances 0.1 is taken, and 0.9 was there before.
    torch, paddle = (float(value) for value in rows["BatchNorm2d, running_var, momentum by default"].at)
    assert (torch - 0.9) / (paddle - 0.9) == pytest.approx(98 / 97, rel=2e-3)
    # Median of 1, 2, 3, 4.
    assert rows["median of an even number"].at == ("2", "2.5")
    # An epsilon of 1e-6 counts as 1e-3 below the root: tiny gradients move paddle's parameters far less.
    torch, paddle = (float(value) for value in rows["RMSprop"].at)
    assert abs(torch) > 10 * abs(paddle)
    assert rows["embedding, padding_idx"].at[1] == "0"
    assert rows["cross_entropy of large logits"].at[1] == "64"
    # Gradients of a norm of some 1e-3, and 1e-6 added to it.
    assert rows["clip by global norm"].ratio - 1 == pytest.approx(1e-6 / 1.46e-3, rel=0.02)
    assert rows["OneCycleLR"].direction == "+"


def test_the_place_of_epsilon_is_all_that_differs_in_adamax_and_rmsprop(rows):
    assert rows["Adamax, next to no epsilon"].kind == rows["RMSprop, next to no epsilon"].kind == "same"


def test_every_call_that_is_said_to_agree_agrees(atlas):
    assert [row.name for row in atlas.rows if row.wrong] == []


def test_each_difference_has_a_call_that_agrees_but_for_those_that_are_known_to_have_none(atlas):
    assert {row.name for row in atlas.rows if row.differs and not row.mended and not row.mended_torch} == WITHOUT_A_CALL


def test_torch_runs_all_of_its_calls_and_every_call_gives_something(atlas):
    assert [row.name for row in atlas.rows if row.kind == "raises" and row.at[0] != "runs"] == []
    assert [row.name for row in atlas.rows if "nothing" in row.at] == []


def test_every_formula_agrees_with_a_side_at_least(atlas):
    assert [row.name for row in atlas.rows if row.agrees == "neither"] == []
    assert sum(bool(row.agrees) for row in atlas.rows) >= 70


def test_what_agrees_is_far_from_what_differs(atlas):
    drawn = {"initialisation", "dropout"}
    alike = [row.rel_l2 for row in atlas.rows if row.kind == "same" and row.rel_l2 and row.group not in drawn]
    apart = [row.rel_l2 for row in atlas.rows if row.kind == "values"]
    assert max(alike) < 3e-6 and min(apart) > 3e-5
    assert all(math.isinf(size) or size > 0 for size in apart)


def test_a_call_that_agrees_anyway_is_not_said_to_need_another(atlas):
    assert [row.name for row in atlas.rows if not row.differs and (row.mended or row.mended_torch or row.note)] == []


def test_names_are_their_own_and_groups_too():
    names = [probe.name for group in GROUPS for probe in group.probes]
    assert len({*names}) == len(names) >= 100
    assert len({group.name for group in GROUPS}) == len(GROUPS)

"""How probes are asked: planted faults are seen, and nothing of the process changes."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import paddle
import pytest
import torch

from padiff.errors import UsageError
from padiff_atlas.atlas import chosen, survey
from padiff_atlas.probe import Group, Probe
from padiff_atlas.probes import GROUPS

INPUTS = {"x": np.array([[3.0, -1.0], [0.5, 2.0]]), "ids": np.array([1, 0])}


def found(*probes: Probe, **inputs: object):
    return survey([Group("planted", probes, INPUTS | inputs)]).rows


def test_a_wrong_call_that_should_agree_is_seen():
    wrong = Probe("wrong", "x.sum()", "x.mean()", mended="x.sum() * 1.001", mended_torch="x.mean() * 0.999")
    right = Probe("right", "x.sum()", "x.mean()", mended="x.sum()", mended_torch="x.mean()")
    rows = found(wrong, right)
    assert [row.wrong for row in rows] == [True, False]
    assert (rows[0].mended_agrees, rows[0].mended_torch_agrees) == (False, False)
    assert all(row.ratio == pytest.approx(1 / 4) for row in rows)


def test_a_formula_says_which_side_is_right():
    twice = [Probe(f"{n}", "x.sum()", "2 * x.sum()", formula=f"{n} * x.sum()") for n in (1, 2, 3)]
    same = Probe("same", "x.sum()", formula="x.sum()")
    assert [row.agrees for row in found(*twice, same)] == ["torch", "paddle", "neither", "both"]


def test_a_call_that_is_refused_is_a_difference():
    (row,) = found(Probe("refused", "torch.sum(x)", "paddle.no_such_thing(x)"))
    assert (row.kind, row.at) == ("raises", ("runs", "raises AttributeError"))


def test_other_shapes_and_other_numbers_of_outputs_are_differences():
    shape, number = found(Probe("shape", "x.sum()", "x.sum(0)"), Probe("number", "[x, x]", "[x]"))
    assert (shape.kind, shape.at) == ("shapes", ("[]", "[2]"))
    assert (number.kind, number.at) == ("shapes", ("[2, 2] [2, 2]", "[2, 2]"))


def test_a_nan_on_both_sides_is_the_same_and_on_one_side_is_not():
    same, other = found(Probe("same", "x.log()"), Probe("other", "x.log()", "x.abs().log()"))
    assert same.kind == "same" and (other.kind, other.at) == ("values", ("nan", "0"))
    assert other.rel_l2 == float("inf")


def test_layers_get_the_same_weights_whatever_their_layout():
    layer, bare = found(
        Probe("layer", "layer = nn.Linear(2, 2)\nlayer(x)"),
        Probe("bare", "nn.Linear(2, 2)(x)"),
    )
    assert layer.kind == "same" and bare.kind == "values"


def test_statistics_begin_anew_for_each_call():
    text = "layer = nn.BatchNorm1d(2)\nlayer(x)\nlayer.running_mean"
    again = "layer = nn.BatchNorm1D(2)\nlayer(x)\nlayer._mean"
    (row,) = found(Probe("mean", text, again, mended=again))
    assert row.kind == "same" and row.mended_agrees


def test_gradients_updates_rates_clips_and_draws_are_compared():
    rows = found(
        Probe("gradient", "(x * x).sum()", "(x * x * 2).sum()", way="gradient"),
        Probe("rate", "torch.optim.SGD(parameters, lr=0.1)", "paddle.optimizer.SGD(0.3, parameters=parameters)",
              way="optimizer", dtype="float64"),
        Probe("schedule", "torch.optim.lr_scheduler.StepLR(optimizer, 3)", "paddle.optimizer.lr.StepDecay(0.2, 3)",
              way="schedule"),
        Probe("clip", "nn.utils.clip_grad_value_(parameters, 1e-9)", "nn.ClipGradByValue(2e-9)", way="clip"),
        Probe("drawn", "torch.rand(20000)", "paddle.rand([20000]) * 5", way="drawn", tolerance=0.05),
        losses=(1.0,) * 14,
    )  # fmt: skip
    assert [row.kind for row in rows] == ["values"] * 5
    assert [row.ratio for row in rows[:4:3]] == [pytest.approx(2.0), None]
    assert [row.ratio for row in rows[1:3]] == [pytest.approx(3.0), pytest.approx(2.0)]
    assert rows[4].rel_l2 == pytest.approx(4.0, rel=0.05)


def test_operations_are_what_the_calls_name():
    texts = "layer = nn.BatchNorm1d(2)\nlayer(x)", "F.batch_norm(paddle.to_tensor(x), x, x)"
    assert found(Probe("names", *texts))[0].operations == ("batchnorm1d", "batch_norm")
    assert found(Probe("method", "x.T.std(1)"))[0].operations == ("std",)


def test_a_probe_of_an_unknown_way_is_an_error():
    with pytest.raises(ValueError, match=r"its way is one of value, gradient, .*, got 'gradients'"):
        Probe("x", "x", way="gradients")


def test_an_unknown_group_is_an_error_that_names_the_nearest():
    assert [group.name for group in chosen(GROUPS, ["losses"])] == ["losses"]
    with pytest.raises(UsageError, match=r"no group of probes is called 'loses'.*losses"):
        chosen(GROUPS, ["loses"])


def state() -> tuple:
    return (
        torch.get_rng_state().numpy().tobytes(), random.getstate(),
        np.random.get_state()[1].tobytes(), torch.get_default_dtype(), paddle.get_default_dtype(),
        torch.get_num_threads(), torch.is_grad_enabled(), paddle.is_grad_enabled(), paddle.get_device(),
        threading.active_count(), list(warnings.filters), paddle.in_dynamic_mode(),
    )  # fmt: skip


@pytest.mark.slow
def test_nothing_of_the_process_changes():
    name = paddle.nn.Linear(1, 1).weight.name
    torch.manual_seed(3)
    paddle.seed(3)
    numbers = torch.rand(2), paddle.rand([2]).numpy()
    torch.manual_seed(3)
    paddle.seed(3)
    before = state()
    survey(chosen(GROUPS, ["dropout", "initialisation", "optimizers", "recurrent"]))
    assert state() == before
    assert torch.equal(torch.rand(2), numbers[0]) and np.array_equal(paddle.rand([2]).numpy(), numbers[1])
    after = paddle.nn.Linear(1, 1).weight.name
    count = [int(text.split("_")[1].split(".")[0]) for text in (name, after)]
    assert count[1] == count[0] + 1, "the probes' layers count among the user's"


def test_probing_works_where_gradients_are_off():
    with torch.no_grad(), paddle.no_grad():
        (row,) = found(Probe("gradient", "x * x", way="gradient"))
    assert row.kind == "same"

"""What a call of ``auto_diff`` may say, and what it answers to anything else."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH, hook_count
from kit.nets import both, data, tanh_mlp

import padiff

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}
UsageError = padiff.PadiffError


def models(pair):
    return tanh_mlp(pair[0]), tanh_mlp(pair[1])


def call(pair, **options):
    base, raw = models(pair)
    inputs = options.pop("inputs", both(pair, data(5, 4)))
    return padiff.auto_diff(base, raw, inputs, **options)


# -- losses ----------------------------------------------------------------------------------------------------------


def test_the_loss_that_is_compared_is_that_of_numpy(pair):
    base, raw = models(pair)
    x, label = data(5, 4), data(5, 3, seed=7)
    report = padiff.auto_diff(base, raw, both(pair, x), [kit.mse(label) for kit in pair], **CLOSE)
    from kit.nets import forward_of_tanh_mlp

    expected = np.mean((forward_of_tanh_mlp(pair[0], base, x) - label) ** 2)
    (loss,) = [d for d in report if d.pair.stage == "loss"]
    assert float(loss.pair.reference.value) == pytest.approx(expected, rel=1e-5)


class _TorchLoss(torch.nn.Module):
    def forward(self, output):
        return (output**2).mean()


class _PaddleLoss(paddle.nn.Layer):
    def forward(self, output):
        return (output**2).mean()


def test_losses_may_be_layers_of_one_argument():
    assert call((TORCH, PADDLE), loss_fns=[_TorchLoss(), _PaddleLoss()], **CLOSE)


def test_different_losses_are_found_in_the_loss_stage(pair):
    label = data(5, 3, seed=7)
    report = call(pair, loss_fns=[pair[0].mse(label), pair[1].mse(label + 1)], **CLOSE)
    assert not report
    assert report.first_diff.stage == "loss"


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_a_dtype_that_does_not_fit_the_model_is_reported_with_both_dtypes(pair):
    inputs = [kit.tensor(data(5, 4, dtype="float64"), None) for kit in pair]
    with pytest.raises(UsageError, match=r"the base model's forward failed .*float64 \[5, 4\].*parameters are float32"):
        call(pair, inputs=inputs)


def test_an_error_of_the_users_own_forward_keeps_its_type_and_leaves_no_hook(pair):
    base, raw = models(pair)

    def broken(x):
        raise KeyError("the user's own")

    raw.forward = broken
    with pytest.raises(KeyError, match="the user's own"):
        padiff.auto_diff(base, raw, both(pair, data(5, 4)))
    assert [hook_count(kit, model) for kit, model in zip(pair, (base, raw))] == [0, 0]


# -- optimizers and steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_five_steps_of_training_match(pair, kind):
    base, raw = models(pair)
    optimizers = [getattr(kit, kind)(model.parameters()) for kit, model in zip(pair, (base, raw))]
    before = pair[0].weight(base.fc0)
    label = data(5, 3, seed=7)
    losses = [kit.mse(label) for kit in pair]
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), losses, optimizers, steps=5, **CLOSE)
    assert report
    assert report.coverage.steps == (0, 1, 2, 3, 4, 5)
    reported = [float(d.pair.reference.value) for d in report if d.pair.stage == "loss"]
    assert len(reported) == 5
    assert reported == sorted(reported, reverse=True)
    assert np.abs(pair[0].weight(base.fc0) - before).max() > 1e-3
    np.testing.assert_allclose(pair[1].weight(raw.fc0), pair[0].weight(base.fc0), atol=1e-5)


def test_optimizers_may_be_functions_that_step_and_clear(pair):
    base, raw = models(pair)
    stepped = []

    def by_hand(kit, model):
        def step():
            stepped.append(kit.name)
            for parameter in model.parameters():
                kit.set(parameter, (kit.float64(parameter) - 0.5 * kit.grad(parameter)).astype("float32"))

        return step

    optimizers = [by_hand(kit, model) for kit, model in zip(pair, (base, raw))]
    assert padiff.auto_diff(base, raw, both(pair, data(5, 4)), optimizers=optimizers, steps=3, **CLOSE)
    assert stepped == [pair[0].name, pair[1].name] * 3


def test_a_step_of_sgd_is_the_closed_form(pair):
    base, raw = pair[0].Linear(4, 1), pair[1].Linear(4, 1)
    before, x = pair[0].weight(base), data(5, 4)
    optimizers = [kit.sgd(model.parameters(), 0.5) for kit, model in zip(pair, (base, raw))]
    assert padiff.auto_diff(base, raw, both(pair, x), optimizers=optimizers, **CLOSE)
    # The built-in loss is the output's mean: its gradient by the weight is the mean input.
    for kit, model in zip(pair, (base, raw)):
        np.testing.assert_allclose(kit.weight(model), before - 0.5 * x.mean(0, dtype="float64"), rtol=1e-5)


def test_a_wrong_learning_rate_is_found_in_the_weights_after_the_optimizer(pair, capsys):
    base, raw = models(pair)
    optimizers = [pair[0].sgd(base.parameters(), 0.1), pair[1].sgd(raw.parameters(), 0.2)]
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), optimizers=optimizers, **CLOSE)
    assert not report
    assert (report.first_diff.stage, report.first_diff.step) == ("weight", 1)
    assert "(after the optimizer's step)" in capsys.readouterr().out
    grads = [d for d in report if d.pair.stage == "grad"]
    assert grads
    assert all(d.passed for d in grads)


@pytest.mark.parametrize("options", [{"diff_phase": "forward"}, {"single_step": True}])
def test_optimizers_that_are_not_used_are_reported(pair, options, capsys):
    base, raw = models(pair)
    optimizers = [kit.sgd(model.parameters()) for kit, model in zip(pair, (base, raw))]
    assert padiff.auto_diff(base, raw, both(pair, data(5, 4)), None, optimizers, **options, **CLOSE)
    assert "the optimizers are not used" in capsys.readouterr().out


# -- options ---------------------------------------------------------------------------------------------------------


X = data(5, 4)
TORCH_X, PADDLE_X = both((TORCH, PADDLE), X)
ONE = r"the base model's loss has to take one argument"
STEPS = "steps has to be a whole number of at least 1"


def mean(output):
    return output.mean()


def optimizers(base, raw):
    return [TORCH.sgd(base.parameters()), PADDLE.sgd(raw.parameters())]


def evaluated(base, raw):
    raw.eval()
    return {}


#: Arguments of a call with a model of torch and one of paddle, or functions of both models, and what is said of them.
WRONG = [
    ({"loss_fns": [mean, lambda out, label: out]}, r"the raw model's loss has to take one argument.*functools.partial"),
    ({"loss_fns": [lambda: 0, mean]}, ONE),
    ({"loss_fns": [torch.nn.MSELoss(), paddle.nn.MSELoss()]}, ONE),
    ({"loss_fns": [lambda out: out, mean]}, r"the base model's loss has to be a tensor of one element, got \[5, 3\]"),
    ({"loss_fns": [lambda out: 1.0, mean]}, "has to be a tensor of one element, got float"),
    ({"loss_fns": [3, mean]}, "the base model's loss has to be a function of the output, got 3"),
    ({"loss_fns": [mean]}, r"loss_fns has to be a pair .*, got 1 items"),
    ({"loss_fns": mean}, r"loss_fns has to be a pair .*, got function"),
    ({"loss_fns": [None, mean]}, "loss_fns: one of the two is None; give one for each model, or none"),
    ({"optimizers": [mean]}, r"optimizers has to be a pair .*, got 1 items"),
    ({"optimizers": [None, mean]}, "optimizers: one of the two is None; give one for each model, or none"),
    (lambda base, raw: {"optimizers": optimizers(base, raw)[1:] * 2}, r"expected an optimizer of torch .*, got paddle"),
    ({"inputs": [1, 2, 3]}, r"inputs has to be a pair \(for the base model, for the raw model\), got 3"),
    ({"inputs": {"x": 1}}, "got dict"),
    ({"inputs": (TORCH_X, {"xx": PADDLE_X})}, r"the raw model's forward takes \(x\).*'xx' is none of them. Nearest: x"),
    ({"inputs": ({}, PADDLE_X)}, r"the base model's forward takes \(x\): missing a required argument: 'x'"),
    ({"inputs": (PADDLE_X, PADDLE_X)}, r"the base model's input is .* a torch tensor .*, got paddle"),
    ({"inputs": (X, X)}, "got numpy.ndarray"),
    ({"inputs": ({"x": PADDLE_X}, PADDLE_X)}, "the base model is of torch, its input 'x' is a tensor of paddle"),
    ({"inputs": (TORCH_X.to("meta"), PADDLE_X)}, "the base model is on cpu, an input of it on meta: bring them to one"),
    ({"inputs": None}, "auto_diff needs base_model, raw_model, inputs; inputs is missing"),
    ({"steps": 3}, "steps=3 needs optimizers"),
    *[({"steps": steps}, STEPS) for steps in (0, -1, 1.5, True, "2")],
    *[
        (
            lambda *of, more=more: {"optimizers": optimizers(*of), "steps": 2, **more},
            "steps=2 needs diff_phase='both' and",
        )
        for more in ({"diff_phase": "forward"}, {"single_step": True})
    ],
    ({"singl_step": True}, "unknown argument 'singl_step'. Nearest: single_step"),
    ({"options": {"a_tol": 1e-4}}, "unknown option 'a_tol'. Nearest: atol"),
    ({"diff_phase": "forwrd"}, "diff_phase is one of both, forward, backward, got 'forwrd'. Nearest: forward"),
    ({"compare_mode": "median"}, "median"),
    ({"atol": -1}, "atol"),
    ({"rtol": "x"}, "rtol"),
    ({"auto_init": "yes"}, "auto_init is True or False, got 'yes'"),
    ({"single_step": 1}, "single_step is True or False, got 1"),
    (lambda base, raw: {"raw_model": raw}, "'raw_model' is given twice"),
    (
        evaluated,
        "the base model is in train mode, the raw model is in eval mode: call train",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_wrong_argument_is_an_error_that_names_it(options, message):
    base, raw = models((TORCH, PADDLE))
    said = options(base, raw) if callable(options) else dict(options)
    inputs = said.pop("inputs", (TORCH_X, PADDLE_X))
    with pytest.raises(UsageError, match=message):
        padiff.auto_diff(base, raw, *(() if inputs is None else (inputs,)), **said)


def test_what_is_no_model_and_too_many_arguments_are_errors():
    base, raw = models((TORCH, PADDLE))
    with pytest.raises(UsageError, match="at most 5 positional arguments, got 6"):
        padiff.auto_diff(base, raw, (TORCH_X, PADDLE_X), None, None, None)
    with pytest.raises(UsageError, match=r"expected a torch.nn.Module or a paddle.nn.Layer, got builtins.str"):
        padiff.auto_diff("model", base, (1, 2))

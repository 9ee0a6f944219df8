"""What a call of ``auto_diff`` may say, and what it answers to anything else."""

from __future__ import annotations

from functools import partial

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


def test_losses_are_run_and_compared(pair):
    label = data(5, 3, seed=7)
    report = call(pair, loss_fns=[kit.mse(label) for kit in pair], **CLOSE)
    assert report
    (loss,) = [d for d in report if d.pair.stage == "loss"]
    assert loss.figures.size == 1
    assert loss.pair.reference.value == pytest.approx(float(loss.pair.candidate.value), rel=1e-5)


def test_the_loss_that_is_compared_is_that_of_numpy(pair):
    base, raw = models(pair)
    x, label = data(5, 4), data(5, 3, seed=7)
    report = padiff.auto_diff(base, raw, both(pair, x), [kit.mse(label) for kit in pair], **CLOSE)
    from kit.nets import forward_of_tanh_mlp

    expected = np.mean((forward_of_tanh_mlp(pair[0], base, x) - label) ** 2)
    (loss,) = [d for d in report if d.pair.stage == "loss"]
    assert float(loss.pair.reference.value) == pytest.approx(expected, rel=1e-5)


def test_partial_and_layer_losses_work():
    label = data(5, 3, seed=7)
    losses = [
        partial(torch.nn.MSELoss(), target=torch.tensor(label)),
        partial(paddle.nn.MSELoss(), label=paddle.to_tensor(label)),
    ]
    assert call((TORCH, PADDLE), loss_fns=losses, **CLOSE)


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


def test_a_loss_of_another_arity_is_an_error(pair):
    with pytest.raises(UsageError, match=r"the raw model's loss has to take one argument.*functools.partial"):
        call(pair, loss_fns=[lambda out: out.mean(), lambda out, label: out.mean()])
    with pytest.raises(UsageError, match="the base model's loss has to take one argument"):
        call(pair, loss_fns=[lambda: 0, lambda out: out.mean()])


def test_a_layer_as_loss_with_two_arguments_is_an_error():
    with pytest.raises(UsageError, match="the base model's loss has to take one argument"):
        call((TORCH, PADDLE), loss_fns=[torch.nn.MSELoss(), paddle.nn.MSELoss()])


def test_a_loss_that_is_no_scalar_is_an_error(pair):
    with pytest.raises(UsageError, match=r"the base model's loss has to be a tensor of one element, got \[5, 3\]"):
        call(pair, loss_fns=[lambda out: out, lambda out: out.mean()])
    with pytest.raises(UsageError, match="has to be a tensor of one element, got float"):
        call(pair, loss_fns=[lambda out: 1.0, lambda out: out.mean()])


def test_a_loss_that_is_no_function_is_an_error(pair):
    with pytest.raises(UsageError, match="the base model's loss has to be a function of the output, got 3"):
        call(pair, loss_fns=[3, lambda out: out.mean()])


@pytest.mark.parametrize("what", ["loss_fns", "optimizers"])
def test_unequal_lengths_are_an_error(pair, what):
    with pytest.raises(UsageError, match=rf"{what} has to be a pair .*, got 1 items"):
        call(pair, **{what: [lambda out: out.mean()]})
    with pytest.raises(UsageError, match=rf"{what} has to be a pair .*, got function"):
        call(pair, **{what: lambda out: out.mean()})
    with pytest.raises(UsageError, match=rf"{what}: one of the two is None; give one for each model, or none"):
        call(pair, **{what: [None, lambda *out: out[0].mean()]})


def test_inputs_have_to_be_a_pair(pair):
    with pytest.raises(UsageError, match=r"inputs has to be a pair \(for the base model, for the raw model\), got 3"):
        call(pair, inputs=[1, 2, 3])
    with pytest.raises(UsageError, match="got dict"):
        call(pair, inputs={"x": 1})


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_a_surplus_input_name_is_named_with_the_nearest(pair):
    x, y = both(pair, data(5, 4))
    with pytest.raises(UsageError, match=r"the raw model's forward takes \(x\).*'xx' is none of them. Nearest: x"):
        call(pair, inputs=({"x": x}, {"xx": y}))


def test_a_missing_input_is_named(pair):
    _x, y = both(pair, data(5, 4))
    with pytest.raises(UsageError, match=r"the base model's forward takes \(x\): missing a required argument: 'x'"):
        call(pair, inputs=({}, {"x": y}))


def test_an_input_of_the_wrong_framework_is_reported():
    x = data(5, 4)
    with pytest.raises(UsageError, match=r"the base model's input is .* a torch tensor .*, got paddle"):
        call((TORCH, PADDLE), inputs=(paddle.to_tensor(x), paddle.to_tensor(x)))
    with pytest.raises(UsageError, match=r"got numpy.ndarray"):
        call((TORCH, PADDLE), inputs=(x, x))


def test_an_input_of_the_wrong_framework_inside_of_a_dict_is_reported_too():
    x = data(5, 4)
    with pytest.raises(UsageError, match="the base model is of torch, its input 'x' is a tensor of paddle"):
        call((TORCH, PADDLE), inputs=({"x": paddle.to_tensor(x)}, {"x": paddle.to_tensor(x)}))


def test_a_dtype_that_does_not_fit_the_model_is_reported_with_both_dtypes(pair):
    inputs = [kit.tensor(data(5, 4, dtype="float64"), None) for kit in pair]
    with pytest.raises(UsageError, match=r"the base model's forward failed .*float64 \[5, 4\].*parameters are float32"):
        call(pair, inputs=inputs)


def test_a_device_that_does_not_fit_the_model_is_reported():
    base, raw = torch.nn.Linear(4, 3), paddle.nn.Linear(4, 3)
    x = data(5, 4)
    with pytest.raises(UsageError, match="the base model is on cpu, an input of it on meta: bring them to one device"):
        padiff.auto_diff(base, raw, (torch.tensor(x).to("meta"), paddle.to_tensor(x)))


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


def test_steps_without_optimizers_are_an_error(pair):
    with pytest.raises(UsageError, match="steps=3 needs optimizers"):
        call(pair, steps=3)


@pytest.mark.parametrize("options", [{"diff_phase": "forward"}, {"single_step": True}])
def test_steps_need_training(pair, options):
    base, raw = models(pair)
    optimizers = [kit.sgd(model.parameters()) for kit, model in zip(pair, (base, raw))]
    with pytest.raises(UsageError, match="steps=2 needs diff_phase='both' and single_step=False"):
        padiff.auto_diff(base, raw, both(pair, data(5, 4)), None, optimizers, steps=2, **options)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_steps_are_a_whole_number(pair, steps):
    with pytest.raises(UsageError, match="steps has to be a whole number of at least 1"):
        call(pair, steps=steps)


def test_an_optimizer_of_the_other_framework_is_reported():
    base, raw = tanh_mlp(TORCH), tanh_mlp(PADDLE)
    with pytest.raises(UsageError, match=r"the base model is of torch; expected an optimizer of torch .*, got paddle"):
        padiff.auto_diff(base, raw, both((TORCH, PADDLE), data(5, 4)), None, [PADDLE.sgd(raw.parameters())] * 2)


@pytest.mark.parametrize("options", [{"diff_phase": "forward"}, {"single_step": True}])
def test_optimizers_that_are_not_used_are_reported(pair, options, capsys):
    base, raw = models(pair)
    optimizers = [kit.sgd(model.parameters()) for kit, model in zip(pair, (base, raw))]
    assert padiff.auto_diff(base, raw, both(pair, data(5, 4)), None, optimizers, **options, **CLOSE)
    assert "the optimizers are not used" in capsys.readouterr().out


# -- options ---------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_named_with_the_nearest(pair):
    with pytest.raises(UsageError, match=r"unknown argument 'singl_step'. Nearest: single_step"):
        call(pair, singl_step=True)


def test_an_unknown_key_in_options_is_named_with_the_nearest():
    layer, module = tanh_mlp(PADDLE), tanh_mlp(TORCH)
    with pytest.raises(UsageError, match=r"unknown option 'a_tol'. Nearest: atol"):
        padiff.auto_diff(layer, module, both((PADDLE, TORCH), data(5, 4)), options={"a_tol": 1e-4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diff_phase": "forwrd"}, r"diff_phase is one of both, forward, backward, got 'forwrd'. Nearest: forward"),
        ({"compare_mode": "median"}, "median"),
        ({"atol": -1}, "atol"),
        ({"rtol": "x"}, "rtol"),
        ({"auto_init": "yes"}, "auto_init is True or False, got 'yes'"),
        ({"single_step": 1}, "single_step is True or False, got 1"),
    ],
)
def test_an_option_of_a_wrong_value_is_reported(pair, options, message):
    with pytest.raises(UsageError, match=message):
        call(pair, **options)


def test_models_in_different_modes_are_reported(pair):
    base, raw = models(pair)
    raw.eval()
    with pytest.raises(UsageError, match="the base model is in train mode, the raw model is in eval mode: call train"):
        padiff.auto_diff(base, raw, both(pair, data(5, 4)))


def test_a_missing_argument_and_one_given_twice_are_reported(pair):
    base, raw = models(pair)
    with pytest.raises(UsageError, match="auto_diff needs base_model, raw_model, inputs; inputs is missing"):
        padiff.auto_diff(base, raw)
    with pytest.raises(UsageError, match="'raw_model' is given twice"):
        padiff.auto_diff(base, raw, both(pair, data(5, 4)), raw_model=raw)
    with pytest.raises(UsageError, match="at most 5 positional arguments, got 6"):
        padiff.auto_diff(base, raw, both(pair, data(5, 4)), None, None, None)


def test_a_value_that_is_no_model_is_reported():
    with pytest.raises(UsageError, match=r"expected a torch.nn.Module or a paddle.nn.Layer, got builtins.str"):
        padiff.auto_diff("model", tanh_mlp(TORCH), (1, 2))

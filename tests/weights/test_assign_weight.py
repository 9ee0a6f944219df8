"""``assign_weight``, rule by rule, in both directions: equal outputs and equal gradients afterwards."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import data

import padiff

from .layers import CASES


def scramble(kit, model, seed):
    """Every parameter and buffer gets values of its own: what is not carried over is seen."""
    random = np.random.default_rng(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        shape = tuple(tensor.shape)
        if "num_batches" in name or (kit is PADDLE and not tensor._is_initialized()):
            continue
        if kit is PADDLE and tensor.stop_gradient and "bias_" in name:
            continue  # a cell without biases has frozen zeros
        values = random.normal(size=shape) * 0.5
        if "var" in name:
            values = np.abs(values) + 0.5
        kit.set(tensor, values)


def run(kit, case, model, inputs):
    """Outputs, gradients of the inputs, and all gradients of parameters as one sorted row (layouts differ)."""
    tensors = [kit.tensor(x, None, grad=x.dtype.kind == "f") for x in inputs]
    output = case.calls[kit.name](model, *tensors)
    target = data(*output.shape, seed=9, dtype="float64")
    (output * kit.tensor(target, None)).sum().backward()
    gradients = [kit.grad(p) for _, p in model.named_parameters()]
    row = np.sort(np.concatenate([g.ravel() for g in gradients if g is not None] or [np.zeros(0)]))
    floating = [kit.float64(t.grad) for t in tensors if t.grad is not None]
    return kit.float64(output), floating, row


def assert_alike(base, raw):
    np.testing.assert_allclose(raw[0], base[0], rtol=1e-9, atol=1e-10)
    assert len(raw[1]) == len(base[1])
    for reference, candidate in zip(base[1], raw[1]):
        np.testing.assert_allclose(candidate, reference, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(raw[2], base[2], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_computes_and_learns_the_same_after_its_weights_were_carried_over(case, pair):
    kits = pair
    models = [kit.double(case.makes[kit.name]) for kit in kits]
    for seed, (kit, model) in enumerate(zip(kits, models)):
        scramble(kit, model, seed)
        if case.evaluated:
            model.eval()
    assert padiff.assign_weight(models[0], models[1]) is True
    assert_alike(*(run(kit, case, model, case.inputs()) for kit, model in zip(kits, models)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_sees_a_layer_whose_weights_were_not_carried_over(case):
    models = [TORCH.double(case.makes["torch"]) for _ in range(2)]
    for seed, model in enumerate(models):
        scramble(TORCH, model, seed)
        if case.evaluated:
            model.eval()
    results = [run(TORCH, case, model, case.inputs()) for model in models]
    assert not np.allclose(results[0][0], results[1][0])


def test_a_linear_layers_matrix_has_the_very_values_transposed_even_when_square(pair):
    base, raw = (kit.Linear(5, 5) for kit in pair)
    assert padiff.assign_weight(base, raw)
    np.testing.assert_array_equal(pair[1].weight(raw), pair[0].weight(base))
    np.testing.assert_array_equal(pair[1].float64(raw.bias), pair[0].float64(base.bias))


def test_no_memory_is_shared_afterwards(pair):
    base, raw = (kit.Linear(4, 4) for kit in pair)
    assert padiff.assign_weight(base, raw)
    assert pair[0].storage(base.weight) != pair[1].storage(raw.weight)
    before = pair[0].weight(base)
    pair[1].set(raw.weight, np.full((4, 4), 7.0))
    np.testing.assert_array_equal(pair[0].weight(base), before)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_the_raw_models_dtype_stays_and_gets_the_bases_values_rounded(pair, dtype):
    base, raw = pair[0].Linear(6, 3), pair[1].Linear(6, 3)
    raw = raw.to(getattr(torch, dtype)) if pair[1] is TORCH else raw.to(dtype=dtype)
    assert padiff.assign_weight(base, raw)
    assert str(raw.weight.dtype).endswith(dtype)
    rounded = torch.tensor(pair[0].weight(base)).float().to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(pair[1].weight(raw), rounded)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_a_base_of_another_dtype_is_carried_over_exactly(pair, dtype):
    base, raw = pair[0].Linear(6, 3), pair[1].Linear(6, 3)
    base = base.to(getattr(torch, dtype)) if pair[0] is TORCH else base.to(dtype=dtype)
    assert padiff.assign_weight(base, raw)
    assert str(raw.weight.dtype).endswith("float32")
    np.testing.assert_array_equal(pair[1].weight(raw), pair[0].weight(base).astype("float32"))


def test_tied_parameters_stay_tied_and_are_written_once(pair):
    def tied(kit):
        model = kit.Sequential(kit.Linear(4, 4), kit.Tanh(), kit.Linear(4, 4))
        first, last = next(iter(model.children())), list(model.children())[2]
        last.weight = first.weight
        return model

    base, raw = tied(pair[0]), tied(pair[1])
    assert padiff.assign_weight(base, raw)
    layers = list(raw.children())
    assert layers[0].weight is layers[2].weight
    x = data(2, 4)
    np.testing.assert_allclose(
        pair[1].float64(raw(pair[1].tensor(x))), pair[0].float64(base(pair[0].tensor(x))), rtol=1e-5, atol=1e-6
    )


def test_a_raw_model_that_ties_what_the_base_does_not_is_refused(pair, capsys):
    base, raw = (kit.Sequential(kit.Linear(4, 4), kit.Linear(4, 4)) for kit in pair)
    layers = list(raw.children())
    layers[1].weight = layers[0].weight
    assert padiff.assign_weight(base, raw) is False
    assert "ties `1/weight` to another parameter, the base model has two different ones" in capsys.readouterr().out


def _surplus_bias(kit, other):
    reference = kit.Sequential(kit.Linear(3, 3), kit.linear(3, 3, bias=False))
    return reference, other.Sequential(other.Linear(3, 3), other.Linear(3, 3))


def _missing_bias(kit, other):
    candidate = other.Sequential(other.Linear(3, 3), other.linear(3, 3, bias=False))
    return kit.Sequential(kit.Linear(3, 3), kit.Linear(3, 3)), candidate


def _surplus_layer(kit, other):
    return kit.Sequential(kit.Linear(3, 3)), other.Sequential(other.Linear(3, 3), other.Linear(3, 3))


def _missing_layer(kit, other):
    return kit.Sequential(kit.Linear(3, 3), kit.Linear(3, 3)), other.Sequential(other.Linear(3, 3))


def _other_shape(kit, other):
    return kit.Sequential(kit.Linear(3, 3), kit.Linear(3, 5)), other.Sequential(other.Linear(3, 3), other.Linear(3, 4))


@pytest.mark.parametrize("make", [_surplus_bias, _missing_bias, _surplus_layer, _missing_layer, _other_shape])
def test_what_does_not_fit_is_refused_and_nothing_is_half_assigned(make, pair, capsys):
    base, raw = make(*pair)
    before = pair[1].state(raw)
    assert padiff.assign_weight(base, raw) is False
    after = pair[1].state(raw)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    printed = capsys.readouterr().out
    assert "Assign weight Failed !!!" in printed
    assert f"Base model ({pair[0].name})" in printed
    assert f"Raw model ({pair[1].name})" in printed
    assert "<---  *** HERE ***" in printed
    assert "add_special_init" in printed


def test_the_explanation_names_the_parameter_and_its_shape(capsys):
    base, raw = _surplus_bias(TORCH, PADDLE)
    padiff.assign_weight(base, raw)
    assert "The base layer has nothing for the raw layer's `bias` [3]" in capsys.readouterr().out


def test_running_statistics_are_carried_over(pair):
    base, raw = (kit.BatchNorm(3) for kit in pair)
    base(pair[0].tensor(data(4, 3, 5, 5) * 3 + 2))
    assert padiff.assign_weight(base, raw)
    base.eval(), raw.eval()
    x = data(2, 3, 4, 4, seed=5)
    np.testing.assert_allclose(
        pair[1].float64(raw(pair[1].tensor(x))), pair[0].float64(base(pair[0].tensor(x))), rtol=1e-4, atol=1e-5
    )


def test_the_first_generation_copies_from_torch_to_paddle_whatever_the_form():
    forms = [
        lambda layer, module: padiff.assign_weight(layer, module, padiff.LayerMap()),
        lambda layer, module: padiff.assign_weight(layer=layer, module=module),
        lambda layer, module: padiff.assign_weight(layer, module, layer_map=padiff.LayerMap()),
        lambda layer, module: padiff.assign_weight(layer, module, layer_map={}),
    ]
    for form in forms:
        layer, module = paddle.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        before = TORCH.weight(module)
        assert form(layer, module) is True
        np.testing.assert_array_equal(TORCH.weight(module), before)
        np.testing.assert_array_equal(PADDLE.weight(layer), before)


def test_the_second_generation_copies_from_the_base_to_the_raw_model():
    base, raw = paddle.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = PADDLE.weight(base)
    assert padiff.assign_weight(base, raw) is True
    np.testing.assert_array_equal(TORCH.weight(raw), before)
    assert padiff.assign_weight(base_model=base, raw_model=raw) is True


def test_proxies_are_taken_like_plain_models(pair):
    base, raw = (kit.Linear(3, 2) for kit in pair)
    assert padiff.assign_weight(padiff.create_model(base), padiff.create_model(raw)) is True
    np.testing.assert_array_equal(pair[1].weight(raw), pair[0].weight(base))


def test_a_call_of_neither_form_is_reported():
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(padiff.PadiffError, match=r"assign_weight takes \(base_model, raw_model\), or \(layer, module"):
        padiff.assign_weight(layer)
    with pytest.raises(padiff.PadiffError, match="and base, raw"):
        padiff.assign_weight(base=layer, raw=layer)
    with pytest.raises(padiff.PadiffError, match=r"expected a torch.nn.Module or a paddle.nn.Layer, got builtins.int"):
        padiff.assign_weight(layer, 3)

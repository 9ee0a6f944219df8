"""``auto_diff`` in the words of both generations at once: what is clear is taken, a contradiction is reported."""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH
from kit.nets import both, data, tanh_mlp

import padiff
from padiff import LayerMap, auto_diff

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def losses(pair):
    label = data(5, 3, seed=7)
    return [kit.mse(label) for kit in pair]


def optimizers(pair, models):
    return [kit.sgd(model.parameters()) for kit, model in zip(pair, models)]


#: Keywords of mixed calls of two models, and whether the first generation's are among them.
MIXED = {
    "auto_weights, atol": (lambda *_: {"auto_weights": True, "atol": 1e-5}, True),
    "loss_fn, atol": (lambda pair, *_: {"loss_fn": losses(pair), "atol": 1e-5}, True),
    "loss_fns, auto_weights": (lambda pair, *_: {"loss_fns": losses(pair), "auto_weights": True, **CLOSE}, True),
    "loss_fn, auto_init": (lambda pair, *_: {"loss_fn": losses(pair), "auto_init": True, **CLOSE}, True),
    "options, direct": (lambda *_: {"options": {"atol": 1e-5}, "rtol": 1e-5, "compare_mode": "strict"}, True),
    "options, both the same": (lambda *_: {"options": CLOSE, **CLOSE}, True),
    "options, more than its own": (lambda *_: {"options": {**CLOSE, "auto_init": True, "full_stacks": True}}, True),
    "optimizer, steps, atol": (
        lambda pair, *models: {"optimizer": optimizers(pair, models), "steps": 2, "atol": 1e-5},
        True,
    ),
    "optimizers, options": (lambda pair, *models: {"optimizers": optimizers(pair, models), "options": CLOSE}, True),
    "optimizer, loss_fns": (
        lambda pair, *models: {"optimizer": optimizers(pair, models), "loss_fns": losses(pair), **CLOSE},
        True,
    ),
    "layer_mapping, atol": (lambda _, a, b: {"layer_mapping": {a.fc0: b.fc0}, **CLOSE}, True),
    "layer_map, auto_weights": (lambda _, a, b: {"layer_map": {a.fc0: b.fc0}, "auto_weights": True, **CLOSE}, True),
    "an empty map of either word": (lambda _, a, b: {"layer_map": {}, "layer_mapping": {a.fc0: b.fc0}, **CLOSE}, True),
    "auto_init and auto_weights": (lambda *_: {"auto_init": True, "auto_weights": True, **CLOSE}, True),
    "nothing of the first": (lambda pair, *_: {"loss_fns": losses(pair), **CLOSE}, False),
    "None is nothing": (
        lambda *_: {"loss_fn": None, "loss_fns": None, "optimizer": None, "options": None, **CLOSE},
        True,
    ),
}


@pytest.mark.parametrize("words", MIXED)
def test_mixed_words_are_taken_and_say_which_model_is_the_base(words, pair, capsys):
    a, b = tanh_mlp(pair[0]), tanh_mlp(pair[1])
    make, old = MIXED[words]
    before = [kit.weight(model.fc1) for kit, model in zip(pair, (a, b))]
    seen = {}
    for name, kit, model in zip("ab", pair, (a, b)):
        seen[name] = _weights_at_first_calls(kit, model)
    said = make(pair, a, b)
    report = auto_diff(a, b, both(pair, data(5, 4)), **said)
    assert report, report.first_diff
    source = 1 if old and [kit.name for kit in pair] == ["paddle", "torch"] else 0
    # Both models were run with the base's weights.
    assert seen["ab"[source]][0] == before[source].tobytes()
    for name in "ab":
        assert before[source].tobytes() in seen[name]
    frameworks = [kit.name for kit in pair]
    assert f"weights: {frameworks[source]} Net -> {frameworks[1 - source]} Net" in capsys.readouterr().out


def _weights_at_first_calls(kit, model):
    """The middle layer's weights in the model's first calls."""
    seen = []
    forward = type(model).forward

    def noted(x):
        if len(seen) < 3:
            seen.append(kit.weight(model.fc1).tobytes())
        return forward(model, x)

    model.forward = noted
    return seen


@pytest.mark.parametrize("first", ["inputs", "example_inp"])
def test_models_and_inputs_by_name_in_all_words(pair, first):
    for models in (("base_model", "raw_model"), ("layer", "module")):
        a, b = tanh_mlp(pair[0]), tanh_mlp(pair[1])
        before = [kit.weight(model.fc1) for kit, model in zip(pair, (a, b))]
        named = dict(zip(models, (a, b)))
        assert auto_diff(**named, **{first: both(pair, data(5, 4))}, auto_weights=True, **CLOSE)
        # Who writes base_model says which one it is, whatever other words are there.
        old = models[0] == "layer" and [kit.name for kit in pair] == ["paddle", "torch"]
        for kit, model in zip(pair, (a, b)):
            np.testing.assert_array_equal(kit.weight(model.fc1), before[1 if old else 0])


def test_by_position_and_with_later_options(pair):
    label = losses(pair)
    for args in ((True,), (True, 1), (True, {}, {"atol": 1e-5}), (True, 1, LayerMap(), label)):
        a, b = tanh_mlp(pair[0]), tanh_mlp(pair[1])
        assert auto_diff(a, b, both(pair, data(5, 4)), *args, rtol=1e-5, full_stacks=True)
    for args in ((label,), (None, None), (label, None)):
        a, b = tanh_mlp(pair[0]), tanh_mlp(pair[1])
        assert auto_diff(a, b, both(pair, data(5, 4)), *args, auto_weights=True, options={"atol": 1e-5})


@pytest.mark.parametrize("fault", [0, 1])
def test_a_fault_is_found_and_named_in_the_words_of_the_call(fault, capsys):
    for pair, names in (((PADDLE, TORCH), ("layer", "module")), ((TORCH, PADDLE), ("module", "layer"))):
        models = [tanh_mlp(kit) for kit in pair]
        padiff.assign_weight(*models)
        kit = pair[fault]
        kit.set(models[fault].fc1.bias, kit.float64(models[fault].fc1.bias).astype("float32") + 1)
        report = auto_diff(*models, both(pair, data(5, 4)), auto_weights=False, **CLOSE)
        assert (report.first_diff.stage, report.first_diff.reference) == ("weight", "fc1")
        value = tuple(report.failed[0].figures.values)
        base = [kit.name for kit in pair].index("torch")
        assert value[0 if fault == base else 1] > value[1 if fault == base else 0]
        out = capsys.readouterr().out
        assert f"{names[0]} model ({pair[0].name})\n" in out
        assert f"{names[1]} model ({pair[1].name})\n" in out


CONTRADICTIONS = [
    (
        {"auto_init": True, "auto_weights": False},
        "auto_init and auto_weights say different things: True and False. Give one of",
    ),
    ({"options": {"atol": 1e-4}, "atol": 1e-5}, r"options\['atol'\] and atol say different things: 0.0001 and 1e-05"),
    ({"loss_fn": [abs, abs], "loss_fns": [abs, len]}, "loss_fn and loss_fns say different things"),
    ({"optimizer": [abs, abs], "optimizers": [abs, len]}, "optimizer and optimizers say different things"),
    (
        {"layer_map": {"fc0": "fc0"}, "layer_mapping": {"fc0": "fc1"}},
        "layer_map and layer_mapping say different things",
    ),
    ({"example_inp": 1, "auto_weights": True}, "example_inp' is given twice, by position and by name"),
    ({"options": {"a_tol": 1}}, "unknown option 'a_tol'. Nearest: atol"),
    ({"options": 3}, "options is a dictionary of atol, rtol"),
    ({"auto_weigths": True}, "unknown argument 'auto_weigths'. Nearest: auto_weights"),
]


@pytest.mark.parametrize(("wrong", "message"), CONTRADICTIONS)
def test_contradictions_are_reported(wrong, message):
    pair = TORCH, PADDLE
    a, b = tanh_mlp(pair[0]), tanh_mlp(pair[1])
    with pytest.raises(padiff.PadiffError, match=message):
        auto_diff(a, b, both(pair, data(5, 4)), **wrong)


def test_models_in_words_of_both_generations_are_reported():
    pair = TORCH, PADDLE
    a, b = tanh_mlp(pair[0]), tanh_mlp(pair[1])
    with pytest.raises(padiff.PadiffError, match="layer and module are the first generation's words"):
        auto_diff(layer=a, raw_model=b, inputs=both(pair, data(5, 4)))
    with pytest.raises(padiff.PadiffError, match="needs layer, module, example_inp; module is missing"):
        auto_diff(layer=a, example_inp=both(pair, data(5, 4)))
    with pytest.raises(padiff.PadiffError, match="too many positional arguments"):
        auto_diff(a, b, both(pair, data(5, 4)), True, None, None, [abs, abs])

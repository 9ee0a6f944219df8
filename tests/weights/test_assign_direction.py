"""Which of two models ``assign_weight`` copies from, in every form of the call and for every pair of frameworks."""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH
from kit.nets import data

import padiff

#: Each form of the call, and whether it is one of the first generation.
FORMS = {
    "by position": (lambda a, b: padiff.assign_weight(a, b), False),
    "positional layer_map": (lambda a, b: padiff.assign_weight(a, b, padiff.LayerMap()), True),
    "keyword layer_map": (lambda a, b: padiff.assign_weight(a, b, layer_map=padiff.LayerMap()), True),
    "an empty dict": (lambda a, b: padiff.assign_weight(a, b, {}), True),
    "layer and module": (lambda a, b: padiff.assign_weight(layer=a, module=b), True),
    "module by name": (lambda a, b: padiff.assign_weight(a, module=b), True),
    "layer, module and layer_map": (lambda a, b: padiff.assign_weight(layer=a, module=b, layer_map={}), True),
    "partial": (lambda a, b: padiff.assign_weight(a, b, {}, partial=True), True),
    "base_model and raw_model": (lambda a, b: padiff.assign_weight(base_model=a, raw_model=b), False),
    "raw_model by name": (lambda a, b: padiff.assign_weight(a, raw_model=b, layer_map={}), False),
    "base_model, raw_model and layer_map": (
        lambda a, b: padiff.assign_weight(raw_model=b, base_model=a, layer_map=padiff.LayerMap()),
        False,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_whose_values_survive(form, pair, capsys):
    call, old = FORMS[form]
    models = [kit.Sequential(kit.Linear(3, 4), kit.BatchNorm(4)) for kit in pair]
    linears = [next(iter(model.children())) for model in models]
    before = [kit.weight(linear) for kit, linear in zip(pair, linears)]
    assert np.abs(before[0] - before[1]).max() > 1e-3
    assert call(*models) is True
    # The first generation copies torch to paddle, and its calls have the paddle layer first; all else from the first.
    source = 1 if old and [kit.name for kit in pair] == ["paddle", "torch"] else 0
    for kit, linear in zip(pair, linears):
        np.testing.assert_array_equal(kit.weight(linear), before[source])
    out = capsys.readouterr().out
    names = [kit.name for kit in pair]
    (line,) = [line for line in out.splitlines() if "weights: " in line]
    reported = (
        f"[AutoDiff] weights: {names[source]} Sequential -> {names[1 - source]} Sequential (4 tensors, 2 buffers)"
    )
    assert line == reported + ("; the second argument is the source, as in PaDiff's first generation" if source else "")
    assert out.endswith("[AutoDiff] Assign weight success !!!\n")


def net(kit):
    return kit.Sequential(kit.Linear(4, 4), kit.Tanh(), kit.Linear(4, 2))


@pytest.mark.parametrize(
    "form", ["by position", "positional layer_map", "layer and module", "base_model and raw_model"]
)
def test_inputs_add_a_proof_and_change_no_direction(form, pair, capsys):
    base, raw = (net(kit) for kit in pair)
    inputs = tuple(kit.tensor(data(5, 4)) for kit in pair)
    calls = {
        "by position": lambda: padiff.assign_weight(base, raw, inputs=inputs),
        "positional layer_map": lambda: padiff.assign_weight(base, raw, {}, inputs=inputs),
        "layer and module": lambda: padiff.assign_weight(layer=base, module=raw, inputs=inputs),
        "base_model and raw_model": lambda: padiff.assign_weight(base_model=base, raw_model=raw, inputs=inputs),
    }
    first = [next(iter(model.children())) for model in (base, raw)]
    before = [kit.weight(layer) for kit, layer in zip(pair, first)]
    assert calls[form]() is True
    old = FORMS[form][1] and [kit.name for kit in pair] == ["paddle", "torch"]
    for kit, layer in zip(pair, first):
        np.testing.assert_array_equal(kit.weight(layer), before[1 if old else 0])
    assert "Largest output diff of each layer" in capsys.readouterr().out


def test_models_named_in_both_generations_words_are_reported():
    layer, module = PADDLE.Linear(3, 2), TORCH.Linear(3, 2)
    for wrong in (
        {"layer": layer, "raw_model": module},
        {"base_model": layer, "module": module},
        {"layer": layer, "module": module, "raw_model": module},
    ):
        with pytest.raises(padiff.PadiffError, match=r"assign_weight takes \(base_model, raw_model\), or \(layer, mod"):
            padiff.assign_weight(**wrong)
    with pytest.raises(padiff.PadiffError, match="partial is True or False, got 'yes'"):
        padiff.assign_weight(module, layer, partial="yes")

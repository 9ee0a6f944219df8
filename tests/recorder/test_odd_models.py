"""Models that nobody would build, and that a recorder must not be the end of."""

import sys
import warnings

import numpy as np
import pytest
import torch

import padiff


def nested(depth, framework):
    if framework == "torch":
        model = torch.nn.Linear(4, 4)
        for _ in range(depth):
            model = torch.nn.Sequential(model)
        return model, torch.ones(2, 4)
    import paddle

    model = paddle.nn.Linear(4, 4)
    for _ in range(depth):
        model = paddle.nn.Sequential(model)
    return model, paddle.ones([2, 4])


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("left", [1.1, 1.3])
def test_a_model_that_is_nested_nearly_too_deep_trains_as_without_a_recorder(framework, left, tmp_path, monkeypatch):
    """``left``: what Python allows, as a multiple of what the model needs."""
    depth = int(sys.getrecursionlimit() / 4.2 / left)
    model, x = nested(depth, framework)

    def step():
        loss = model(x).sum()
        loss.backward()
        return float(loss.detach()), [np.asarray(p.grad.numpy()) for p in model.parameters()]

    loss, gradients = step()
    for parameter in model.parameters():  # the framework's own way walks through all layers
        parameter.clear_gradient(False) if framework == "paddle" else setattr(parameter, "grad", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with padiff.record(model, tmp_path / "run") as rec:
            recorded = step()
            rec.try_dump()
    assert recorded[0] == loss
    for found, expected in zip(recorded[1], gradients, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert any(f"nested {depth + 1} deep" in str(w.message) or f"nested {depth} deep" in str(w.message) for w in caught)
    records = padiff.open_run(tmp_path / "run").steps(0)[0].records
    assert {"forward", "weight"} <= {record.stage for record in records}


def test_an_ordinary_model_is_recorded_whole_and_nothing_is_said(tmp_path):
    model, x = nested(30, "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with padiff.record(model, tmp_path / "run") as rec:
            model(x)
            rec.try_dump()
    records = padiff.open_run(tmp_path / "run").steps(0)[0].records
    assert len({record.layer for record in records if record.stage == "forward"}) == 31


@pytest.mark.parametrize("name", ["(root)", "(loop)"])
def test_a_layer_that_is_called_as_padiff_calls_the_model_is_another_one(name, tmp_path):
    model = torch.nn.Sequential()
    model.add_module(name, torch.nn.Linear(4, 4))
    model.add_module("last", torch.nn.Linear(4, 1))
    for folder in ("a", "b"):
        with padiff.record(model, tmp_path / folder) as rec:
            model(torch.ones(2, 4)).sum().backward()
            rec.try_dump()
            model.zero_grad()
    run = padiff.open_run(tmp_path / "a")
    assert [layer.path for layer in run.info.layers] == ["(root)", f"layer{name}", "last"]
    report = padiff.compare_runs(tmp_path / "a", tmp_path / "b")
    assert report.passed
    assert "100.0% of what was recorded" in str(report)

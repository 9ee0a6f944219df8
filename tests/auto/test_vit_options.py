"""The options as ``check_vitpose.md`` writes them, on a correct ViT: an attention's key bias has a gradient of zero."""

from __future__ import annotations

import paddle
import pytest
import torch
from kit.nets import both, data

from padiff import auto_diff, check_grads, check_params, create_model

from .test_vit_walkthrough import batches, losses, start

DOCUMENT = {"atol": 0.0, "rtol": 1e-5, "single_step": False, "diff_phase": "both"}
KEYS = tuple(f"blocks.{k}.attn.qkv/grad/bias[key]" for k in (0, 1))


def call(models, inputs, targets, **more):
    paddle_model, torch_model, layer_map = models
    options = {**DOCUMENT, **more.pop("options", {})}
    more.setdefault("loss_fn", losses(targets))
    return auto_diff(
        paddle_model, torch_model, inputs, auto_weights=False, layer_map=layer_map, options=options, **more
    )


def optimizers(models, name):
    paddle_model, torch_model, _ = models
    if name == "sgd":
        return [
            paddle.optimizer.SGD(0.05, parameters=paddle_model.parameters()),
            torch.optim.SGD(torch_model.parameters(), lr=0.05),
        ]
    return [
        paddle.optimizer.AdamW(1e-3, parameters=paddle_model.parameters(), weight_decay=0.01),
        torch.optim.AdamW(torch_model.parameters(), lr=1e-3, weight_decay=0.01),
    ]


@pytest.mark.parametrize(("evaluated", "single_step"), [(True, True), (False, False)], ids=["eval", "train"])
def test_a_correct_vit_passes_and_the_noise_is_named(evaluated, single_step, capsys):
    models = start(evaluated)
    inputs, targets = next(batches())
    report = call(models, inputs, targets, options={"single_step": single_step})
    assert report, report.first_diff
    assert set(report.coverage.zeros) <= set(KEYS)
    assert report.coverage.zeros
    out = capsys.readouterr().out
    assert "rounding noise around zero, which no tolerance can judge: " in out
    assert KEYS[0] in out


@pytest.mark.parametrize(("evaluated", "name", "steps"), [(True, "sgd", 4), (False, "adamw", 3)])
def test_steps_of_a_correct_vit_pass(evaluated, name, steps):
    models = start(evaluated)
    inputs, targets = next(batches())
    report = call(models, inputs, targets, optimizer=optimizers(models, name), steps=steps)
    assert report, report.first_diff
    values = [float(d.pair.reference.value) for d in report if d.pair.stage == "loss"]
    assert len(values) == steps and values[-1] < values[0]
    assert report.coverage.steps == tuple(range(steps + 1))
    named = {site.rpartition("/")[0] for site in report.coverage.zeros}
    # What an adaptive optimizer makes of noise: the key biases themselves, and what their own layer gives.
    own = {f"blocks.{k}.attn.qkv/{stage}" for k in (0, 1) for stage in ("grad", "weight", "forward")}
    assert named <= own
    assert {"blocks.0.attn.qkv/grad", "blocks.1.attn.qkv/grad"} <= named


def test_a_key_bias_whose_gradient_is_of_normal_size_on_one_side_is_found():
    models = start()
    models[0].blocks[1].attn.qkv.bias.register_hook(lambda gradient: gradient + 1e-3)
    inputs, targets = next(batches())
    report = call(models, inputs, targets)
    assert report.first_diff.stage == "grad"
    assert report.first_diff.reference == "blocks.1.attn.qkv"
    assert KEYS[1] in {d.pair.anchor.site for d in report.failed}


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_a_small_gradient_that_is_wrong_by_1_percent_is_found(scale):
    """The loss is scaled down, so that all gradients are small; one is off."""
    models = start()
    models[0].blocks[0].norm1.bias.register_hook(lambda gradient: gradient * 1.01)
    inputs, targets = next(batches())
    small = [lambda output, loss=loss: loss(output) * scale for loss in losses(targets)]
    report = call(models, inputs, targets, loss_fn=small)
    assert [d.pair.anchor.site for d in report.failed] == ["blocks.0.norm1/grad/bias"]
    assert report.first_diff.stage == "grad"


def test_a_weight_that_something_else_than_noise_moved_is_found():
    models = start()
    inputs, targets = next(batches())
    pair = optimizers(models, "adamw")
    bias = models[0].blocks[0].attn.qkv.bias

    def stepped():
        pair[0].step()
        pair[0].clear_grad()
        moved = bias.numpy()
        moved[16:32] += 0.05  # fifty times the learning rate, on the key's part alone
        bias.set_value(paddle.to_tensor(moved))

    report = call(models, inputs, targets, optimizer=[stepped, pair[1]])
    assert (report.first_diff.stage, report.first_diff.step) == ("weight", 1)
    assert [d.pair.anchor.site for d in report.failed] == ["blocks.0.attn.qkv/weight/bias[key]"]


def test_checks_on_dumps_know_it_too():
    paddle_model, torch_model, _ = start()
    inputs, targets = next(batches())
    for proxy, given, loss, folder in zip(
        (create_model(paddle_model), create_model(torch_model)), inputs, losses(targets), "pt"
    ):
        proxy.backward(loss(proxy(**given)))
        proxy.dump_params(folder)
    cfg = {"atol": 0.0, "rtol": 1e-5}
    for check in (check_params, check_grads):
        report = check("t", "p", cfg)
        assert report, report.first_diff
        assert set(report.coverage.zeros) == set(KEYS)
    bias = paddle_model.blocks[0].attn.qkv.bias
    bias.grad.set_value(bias.grad + 1e-3)
    again = create_model(paddle_model)
    again.dump_params("wrong")
    for check in (check_params, check_grads):
        report = check("t", "wrong", cfg)
        assert report.first_diff.stage == "grad"
        assert KEYS[0] in {d.pair.anchor.site for d in report.failed}


def test_a_convolutions_bias_before_a_batch_norm_is_noise_in_any_pair_of_frameworks(every_pair):
    def net(kit):
        return kit.Sequential(kit.Conv(3, 6, 3), kit.BatchNorm(6), kit.ReLU(), kit.Conv(6, 2, 3))

    base, raw = net(every_pair[0]), net(every_pair[1])
    report = auto_diff(base, raw, both(every_pair, data(4, 3, 9, 9)), [_square] * 2, atol=0.0, rtol=1e-4)
    assert report, report.first_diff
    # Two models of one framework compute the same noise.
    assert report.coverage.zeros == (() if every_pair[0] is every_pair[1] else ("0/grad/bias",))


def _square(output):
    return (output * output).mean()

"""The flow of ``check_vitpose.md`` with a small ViT pair and real data loaders of both frameworks."""

from __future__ import annotations

import paddle
import torch

from padiff import LayerMap, assign_weight, auto_diff, check_dataloader

from .vits import PaddlePose, TorchPose, loaders

OPTIONS = {"atol": 1e-5, "rtol": 1e-5, "single_step": False}


def start(evaluated=True):
    """Steps 1 to 4 of the document: models, loaders, layer map, weights."""
    torch_model, paddle_model = TorchPose(), PaddlePose()
    if evaluated:
        torch_model.eval(), paddle_model.eval()
    layer_map = LayerMap()
    layer_map.auto(paddle_model, torch_model)
    assert assign_weight(paddle_model, torch_model, layer_map)
    return paddle_model, torch_model, layer_map


def batches():
    for paddle_batch, torch_batch in zip(*loaders()):
        inputs = ({"x": paddle_batch["image"]}, {"x": torch_batch["img"]})
        yield inputs, (paddle_batch["target"], torch_batch["target"])


def losses(targets):
    return [
        lambda output: paddle.nn.functional.mse_loss(output, targets[0]),
        lambda output: torch.nn.functional.mse_loss(output, targets[1]),
    ]


def test_the_two_data_loaders_give_the_same_batches():
    assert check_dataloader(*loaders())


def test_the_loss_matches_on_every_batch_and_a_wrong_one_is_found():
    paddle_model, torch_model, layer_map = start()
    for inputs, targets in batches():
        call = {"auto_weights": False, "layer_map": layer_map, "options": {**OPTIONS, "diff_phase": "forward"}}
        assert auto_diff(paddle_model, torch_model, inputs, loss_fn=losses(targets), **call)
        wrong = [losses(targets)[0], lambda output, target=targets[1]: ((output - target) ** 2).sum()]
        report = auto_diff(paddle_model, torch_model, inputs, loss_fn=wrong, **call)
        assert report == False  # noqa: E712
        assert report.first_diff.stage == "loss"


def test_training_over_many_batches_matches():
    paddle_model, torch_model, layer_map = start(evaluated=False)
    optimizers = [
        paddle.optimizer.AdamW(1e-3, parameters=paddle_model.parameters(), weight_decay=0.01),
        torch.optim.AdamW(torch_model.parameters(), lr=1e-3, weight_decay=0.01),
    ]
    before = torch_model.head[3].weight.detach().clone()
    count = 0
    for _ in range(2):
        for inputs, targets in batches():
            report = auto_diff(
                paddle_model,
                torch_model,
                inputs,
                auto_weights=False,
                layer_map=layer_map,
                options={"atol": 1e-3, "rtol": 1e-3, "diff_phase": "both"},
                loss_fn=losses(targets),
                optimizer=optimizers,
            )
            assert report, report.first_diff
            count += 1
    assert count == 6
    moved = (torch_model.head[3].weight.detach() - before).abs()
    assert moved.max() > 3e-3  # six steps of Adam, each of about the learning rate


def test_a_planted_fault_is_located_precisely_by_a_single_step():
    paddle_model, torch_model, layer_map = start()
    # Not the erf, but the tanh form of GELU: wrong by about 1e-3, in the middle of the net, and no weight is off.
    paddle_model.blocks[1].mlp.act = paddle.nn.GELU(approximate=True)
    inputs, _ = next(batches())
    call = {"auto_weights": False, "layer_map": layer_map}
    spread = auto_diff(paddle_model, torch_model, inputs, options={"atol": 1e-6, "rtol": 1e-5}, **call)
    assert spread == False  # noqa: E712
    assert len({d.pair.anchor.layer for d in spread.failed if d.pair.stage == "forward"}) > 3
    report = auto_diff(
        paddle_model,
        torch_model,
        inputs,
        options={"atol": 1e-6, "rtol": 1e-5, "single_step": True, "diff_phase": "both"},
        **call,
    )
    assert report == False  # noqa: E712
    assert report.first_diff.stage == "forward"
    assert report.first_diff.candidate == "blocks.1.mlp.act"
    leaves = {d.pair.candidate.layer for d in report.failed if d.pair.stage == "forward"}
    assert leaves == {"blocks.1.mlp.act"}


def test_a_wrong_backward_is_located_precisely_by_a_single_step():
    paddle_model, torch_model, layer_map = start()
    norm = paddle_model.blocks[1].norm2
    real = norm.forward
    norm.forward = lambda x: real(x * 0.5 + x.detach() * 0.5)  # the same value, half the gradient
    inputs, _ = next(batches())
    report = auto_diff(
        paddle_model,
        torch_model,
        inputs,
        auto_weights=False,
        layer_map=layer_map,
        options={"atol": 1e-7, "rtol": 1e-4, "single_step": True, "diff_phase": "backward"},
    )
    assert report == False  # noqa: E712
    assert report.first_diff.stage == "backward"
    # norm2's input comes from the block's first half: what reaches the attention's projection is wrong.
    assert {d.pair.candidate.layer for d in report.failed if d.pair.stage == "backward"} >= {"blocks.1.attn.proj"}
    assert not any("blocks.1.mlp" in d.pair.candidate.layer for d in report.failed)

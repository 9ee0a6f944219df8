"""The code blocks of the seeds' documents, in spirit: the same calls on models of our own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import data

from padiff import (
    LayerMap,
    PadiffError,
    assign_weight,
    auto_diff,
    check_grads,
    check_params,
    check_report,
    check_weights,
    create_model,
)


class SimpleLayer(paddle.nn.Layer):
    """x -> linear1 -> relu -> + x -> linear2"""

    def __init__(self):
        super().__init__()
        self.linear1 = paddle.nn.Linear(100, 100)
        self.linear2 = paddle.nn.Linear(100, 10)
        self.act = paddle.nn.ReLU()

    def forward(self, x):
        residual = x
        x = self.act(self.linear1(x))
        return self.linear2(x + residual)


class SimpleModule(torch.nn.Module):
    """The same; its input is called ``y``, as in the readme's call."""

    def __init__(self):
        super().__init__()
        self.linear1 = torch.nn.Linear(100, 100)
        self.linear2 = torch.nn.Linear(100, 10)
        self.act = torch.nn.ReLU()

    def forward(self, y):
        residual = y
        y = self.act(self.linear1(y))
        return self.linear2(y + residual)


def simple():
    array = data(100, 100) * 0.1
    inputs = ({"x": paddle.to_tensor(array)}, {"y": torch.as_tensor(array)})
    return SimpleLayer(), SimpleModule(), inputs


OPTIONS = {"atol": 1e-4, "rtol": 0, "compare_mode": "strict", "single_step": False}


# -- readme and interfaces of v0.1 -----------------------------------------------------------------------------------


def test_case_1_of_the_readme_by_position_and_by_keyword():
    for call in (
        lambda layer, module, inp: auto_diff(layer, module, inp, auto_weights=True, options=OPTIONS),
        lambda layer, module, inp: auto_diff(layer, module, inp, True, {}, OPTIONS),
        lambda layer, module, inp: auto_diff(layer, module, inp, True, 1, OPTIONS),
        lambda layer, module, inp: auto_diff(layer=layer, module=module, example_inp=inp, options=OPTIONS),
        lambda layer, module, inp: auto_diff(layer, module, example_inp=inp, auto_weights=True, options=OPTIONS),
    ):
        layer, module, inp = simple()
        before = TORCH.weight(module.linear1)
        assert call(layer, module, inp)
        # torch's weights went to paddle.
        np.testing.assert_array_equal(TORCH.weight(module.linear1), before)
        np.testing.assert_array_equal(PADDLE.weight(layer.linear1), before)


def test_auto_weights_false_leaves_the_weights_and_finds_them_different():
    layer, module, inp = simple()
    before = PADDLE.weight(layer.linear1)
    assert not auto_diff(layer, module, inp, auto_weights=False, options=OPTIONS)
    np.testing.assert_array_equal(PADDLE.weight(layer.linear1), before)


class AttentionLayer(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.attn = paddle.nn.MultiHeadAttention(16, 1)

    def forward(self, q, k, v):
        return self.attn(q, k, v)


class AttentionModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(16, 1, batch_first=True)

    def forward(self, q, k, v):
        return self.attn(q, k, v)[0]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", ["layer_mapping", "layer_map"])
def test_case_2_of_the_readme_a_mapping_of_objects_in_either_order(turned, name):
    layer, module = AttentionLayer(), AttentionModule()
    mapping = {module.attn: layer.attn} if turned else {layer.attn: module.attn}
    inp = data(2, 4, 16)
    inp = ({k: paddle.to_tensor(inp) for k in "qkv"}, {k: torch.as_tensor(inp) for k in "qkv"})
    report = auto_diff(layer, module, inp, auto_weights=True, options={"atol": 1e-4}, **{name: mapping})
    assert report
    compared = {d.pair.anchor.site for d in report if d.compared and d.pair.stage == "weight"}
    assert compared >= {f"attn/weight/in_proj_{kind}[{x}_proj]" for x in "qkv" for kind in ("weight", "bias")}


def test_case_2_sees_an_attention_whose_key_is_off():
    layer, module = AttentionLayer(), AttentionModule()
    assert assign_weight(layer, module, LayerMap({layer.attn: module.attn}))
    weight = layer.attn.k_proj.weight
    PADDLE.set(weight, weight.numpy() * 1.5)
    inp = data(2, 4, 16)
    inp = ({k: paddle.to_tensor(inp) for k in "qkv"}, {k: torch.as_tensor(inp) for k in "qkv"})
    report = auto_diff(layer, module, inp, auto_weights=False, layer_map={layer.attn: module.attn}, options=OPTIONS)
    assert not report
    weights = [d.pair.anchor.site for d in report.failed if d.pair.stage == "weight"]
    assert weights == ["attn/weight/in_proj_weight[k_proj]"]


def test_case_3_of_the_readme_loss_functions():
    label = data(10, seed=4)

    def paddle_loss(inp, label):
        return inp.mean() - paddle.to_tensor(label).mean()

    def torch_loss(inp, label):
        return inp.mean() - torch.tensor(label).mean()

    layer, module, inp = simple()
    losses = [partial(paddle_loss, label=label), partial(torch_loss, label=label)]
    assert auto_diff(layer, module, inp, auto_weights=True, options={"atol": 1e-4}, loss_fn=losses)
    losses = [
        partial(paddle.nn.MSELoss(), label=paddle.to_tensor(label)),
        partial(torch.nn.MSELoss(), target=torch.tensor(label).expand(100, 10)),
    ]
    assert auto_diff(layer, module, inp, auto_weights=True, options={"atol": 1e-4}, loss_fn=losses)


@pytest.mark.parametrize("phase", ["forward", "both"])
@pytest.mark.parametrize("single_step", [True, False])
def test_the_options_of_v0_1(phase, single_step):
    layer, module, inp = simple()
    options = {**OPTIONS, "diff_phase": phase, "single_step": single_step}
    assert auto_diff(layer, module, inp, auto_weights=True, options=options)


def test_optimizers_and_steps_of_v0_1():
    layer, module, inp = simple()
    optimizer = [PADDLE.adam(layer.parameters(), 1e-3), TORCH.adam(module.parameters(), 1e-3)]
    before = TORCH.weight(module.linear2)
    report = auto_diff(
        layer, module, inp, auto_weights=True, options={**OPTIONS, "diff_phase": "both"}, optimizer=optimizer, steps=4
    )
    assert report
    assert np.abs(TORCH.weight(module.linear2) - before).max() > 2e-3


@pytest.mark.parametrize(
    "extra", [{"steps": 1}, {"layer_map": LayerMap()}, {"layer_map": {}}, {"steps": 1, "layer_map": {}}]
)
def test_steps_or_a_layer_map_alone_say_the_first_generation_too(extra):
    layer, module, inp = simple()
    before = TORCH.weight(module.linear1)
    auto_diff(layer, module, inp, **extra)
    np.testing.assert_array_equal(TORCH.weight(module.linear1), before)
    np.testing.assert_array_equal(PADDLE.weight(layer.linear1), before)


def test_without_any_keyword_the_newer_generation_decides():
    layer, module, inp = simple()
    before = PADDLE.weight(layer.linear1)
    auto_diff(layer, module, inp)
    np.testing.assert_array_equal(PADDLE.weight(layer.linear1), before)
    np.testing.assert_array_equal(TORCH.weight(module.linear1), before)


def test_a_call_of_the_first_generation_with_torch_first_takes_its_inputs_in_that_order():
    layer, module, inp = simple()
    before = TORCH.weight(module.linear1)
    assert auto_diff(module, layer, inp[::-1], auto_weights=True, options=OPTIONS)
    np.testing.assert_array_equal(PADDLE.weight(layer.linear1), before)
    with pytest.raises(PadiffError, match="the module model's forward takes"):
        auto_diff(module, layer, inp, auto_weights=True, options=OPTIONS)


def test_assign_weight_with_a_layer_map_copies_torch_to_paddle_whichever_stands_first():
    for turned in (False, True):
        layer, module, _ = simple()
        before = TORCH.weight(module.linear1)
        models = (module, layer) if turned else (layer, module)
        assert assign_weight(*models, LayerMap())
        np.testing.assert_array_equal(PADDLE.weight(layer.linear1), before)


def test_the_failure_that_the_readme_shows(capsys):
    layer, module, inp = simple()
    assign_weight(layer, module, LayerMap())
    TORCH.set(module.linear1.bias, TORCH.float64(module.linear1.bias) + 3)
    assert not auto_diff(layer, module, inp, auto_weights=False, options=OPTIONS)
    out = capsys.readouterr().out
    assert "FAILED !!!" in out
    assert "<class 'torch.nn.modules.linear.Linear'> vs <class 'paddle.nn.layer.common.Linear'>" in out
    assert "y = self.act(self.linear1(y))" in out
    assert "x = self.act(self.linear1(x))" in out


def test_the_layer_map_of_the_faqs():
    module = torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    layer = paddle.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0)
    layer_map = {
        layer.encoder.layers[0].self_attn: module.encoder.layers[0].self_attn,
        layer.decoder.layers[0].self_attn: module.decoder.layers[0].self_attn,
        layer.decoder.layers[0].cross_attn: module.decoder.layers[0].multihead_attn,
    }
    x, y = data(2, 4, 16), data(2, 3, 16, seed=2)
    inp = ((paddle.to_tensor(x), paddle.to_tensor(y)), (torch.tensor(x), torch.tensor(y)))
    assert assign_weight(layer, module, layer_map)
    assert auto_diff(layer, module, inp, auto_weights=False, layer_map=layer_map, options={"atol": 1e-4})


# -- interfaces of v0.2 ------------------------------------------------------------------------------------------------


def test_the_auto_diff_of_v0_2():
    module, layer = torch.nn.Linear(100, 10), paddle.nn.Linear(100, 10)
    inp = paddle.rand((100, 100)).numpy().astype("float32")
    inp = ({"input": torch.as_tensor(inp)}, {"input": paddle.to_tensor(inp)})
    before = TORCH.weight(module)
    assert auto_diff(module, layer, inp, atol=1e-4, rtol=0, auto_init=True, compare_mode="strict", single_step=False)
    np.testing.assert_array_equal(PADDLE.weight(layer), before)


def test_the_loop_of_v0_2_with_try_dump(kit):
    make = SimpleLayer if kit is PADDLE else SimpleModule
    model = create_model(make(), name="Simple")
    optimizer = kit.sgd(model.model.parameters())
    done = []
    for step in range(20):
        output = model(kit.tensor(data(4, 100, seed=step)))
        model.backward(output.mean())
        optimizer.step()
        done.append(model.try_dump(per_step=10, dir_path="dump"))
    assert [step for step, written in enumerate(done) if written] == [9, 19]
    assert Path("dump/report.json").exists()


def test_the_freer_dumps_of_v0_2():
    layer, module, _ = simple()
    assign_weight(module, layer)
    models = [create_model(module, name="Simple"), create_model(layer, name="Simple")]
    optimizers = [TORCH.sgd(module.parameters()), PADDLE.sgd(layer.parameters())]
    for index in range(2):
        for kit, model, optimizer in zip((TORCH, PADDLE), models, optimizers):
            folder = f"{model.name}/{index}"
            output = model(kit.tensor(data(4, 100, seed=index) * 0.1))
            model.backward((output * output).mean())
            model.dump_report(folder)
            model.dump_params(folder)
            model.dump_grads(folder)
            optimizer.step()
            model.dump_weights(folder)
            model.clear_report()
            optimizer.zero_grad() if kit is TORCH else optimizer.clear_grad()
    for index in range(2):
        folders = [f"{model.name}/{index}" for model in models]
        for check in (check_report, check_params, check_weights, check_grads):
            assert check(*folders, {"atol": 1e-5, "compare_mode": "strict"})
    assert not check_report(f"{models[0].name}/0", f"{models[1].name}/1")


def test_the_lists_and_the_layer_map_of_v0_2():
    layer, module, _ = simple()
    models = [create_model(module), create_model(layer)]
    for model in models:
        model.update_black_list([model.model.act, model.model.linear1], "all")
        model.update_white_list([model.model.linear2], "self")
        model.set_layer_map([model.model.linear1, model.model.linear2])
    inp = data(4, 100)
    report = auto_diff(*models, ({"y": torch.tensor(inp)}, {"x": paddle.to_tensor(inp)}), atol=1e-4)
    assert report
    assert {d.pair.anchor.layer for d in report if d.pair.stage == "forward"} == {"linear2"}

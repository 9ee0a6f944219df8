"""``LayerMap`` with live layers: what people write by hand, and what ``auto`` finds."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import both, data, tanh_mlp

import padiff
from padiff import LayerMap, assign_weight, auto_diff


class TorchAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(self.attn(x, x, x)[0])


class PaddleAttention(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = paddle.nn.Linear(16, 16)
        self.attn = paddle.nn.MultiHeadAttention(16, 2)

    def forward(self, x):
        return self.fc(self.attn(x, x, x))


def attentions():
    return TorchAttention(), PaddleAttention()


def inputs(reverse=False):
    pair = both((TORCH, PADDLE), data(2, 4, 16))
    return pair[::-1] if reverse else pair


@pytest.mark.parametrize(
    "mapped",
    [
        lambda base, raw: {base.attn: raw.attn},
        lambda base, raw: {raw.attn: base.attn},
        lambda base, raw: [(base.attn, raw.attn), (raw.fc, base.fc)],
        lambda base, raw: LayerMap({base.attn: raw.attn}),
        lambda base, raw: {"attn": "attn"},
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_map_of_objects_may_have_either_side_first(mapped, turned):
    base, raw = attentions()[:: -1 if turned else 1]
    report = auto_diff(base, raw, inputs(turned), layer_map=mapped(base, raw), atol=1e-5, rtol=1e-5)
    assert report
    paired = [d.pair for d in report if d.compared and d.pair.stage == "forward"]
    assert ("attn", "attn") in [(p.reference.layer, p.candidate.layer) for p in paired]


def test_the_map_attribute_may_be_set():
    base, raw = attentions()
    layer_map = LayerMap()
    layer_map.map = {raw.attn: base.attn}
    assert layer_map.map == {raw.attn: base.attn}
    assert auto_diff(base, raw, inputs(), layer_map=layer_map, atol=1e-5)


def test_auto_finds_and_prints_the_pairs(capsys):
    module, layer = attentions()
    layer_map = LayerMap()
    assert layer_map.auto(layer, module) is layer_map
    assert layer_map.map == {layer.attn: module.attn}
    assert "`attn` answers to `attn` (multiheadattention)" in capsys.readouterr().out
    assert assign_weight(layer, module, layer_map)


def test_auto_says_so_when_no_map_is_needed(capsys):
    assert len(LayerMap().auto(tanh_mlp(TORCH), tanh_mlp(PADDLE))) == 0
    assert "no layer of these models needs a map" in capsys.readouterr().out


def test_auto_refuses_models_with_different_layers_to_map():
    module, _ = attentions()
    with pytest.raises(
        padiff.PadiffError, match=r"not have the same layers to map: attn \(multiheadattention\) ag.* none"
    ):
        LayerMap().auto(module, tanh_mlp(PADDLE))


def test_auto_takes_proxies():
    module, layer = attentions()
    layer_map = LayerMap().auto(padiff.create_model(layer), padiff.create_model(module))
    assert layer_map.map == {layer.attn: module.attn}


@pytest.mark.parametrize(
    ("mapped", "message"),
    [
        (lambda base, raw: {base.fc0: PADDLE.Linear(1, 1)}, "Linear is a layer of neither model; give layers of these"),
        (lambda base, raw: {base.fc0: base.fc1}, "fc0 and fc1 are both layers of the base model"),
        (lambda base, raw: {"fc0": "fc9"}, "no layer 'fc9'. Nearest: fc"),
        (lambda base, raw: {base.fc0: raw.fc1, base.fc1: raw.fc1}, "'fc1' is given twice"),
    ],
)
def test_a_wrong_map_is_an_error_that_names_it(mapped, message):
    base, raw = tanh_mlp(TORCH), tanh_mlp(PADDLE)
    with pytest.raises(padiff.PadiffError, match=message):
        auto_diff(base, raw, both((TORCH, PADDLE), data(5, 4)), layer_map=mapped(base, raw))


def swapped(kit, swap):
    """Two layers of one shape, defined in one order or the other."""

    class Net(kit.Net):
        def build(self):
            for name in ("left", "right")[:: -1 if swap else 1]:
                setattr(self, f"{name}_{'b' if swap else 'a'}", kit.Linear(4, 4))

        def forward(self, x):
            names = ("left_b", "right_b") if swap else ("left_a", "right_a")
            left, right = (getattr(self, name)(x) for name in names)
            return left - 2 * right

    return Net()


def test_a_map_says_which_weights_go_where(pair):
    base, raw = swapped(pair[0], False), swapped(pair[1], True)
    x = both(pair, data(5, 4))
    assert auto_diff(base, raw, x, atol=1e-5)  # the names tell, though the order of definition is another
    np.testing.assert_array_equal(pair[1].weight(raw.left_b), pair[0].weight(base.left_a))
    assert not auto_diff(base, raw, x, atol=1e-5, layer_map={base.left_a: raw.right_b, base.right_a: raw.left_b})
    np.testing.assert_array_equal(pair[1].weight(raw.right_b), pair[0].weight(base.left_a))


def test_the_lists_of_two_proxies_say_it_too(pair):
    proxies = [padiff.create_model(swapped(kit, swap)) for kit, swap in zip(pair, (False, True))]
    proxies[0].set_layer_map([proxies[0].model.left_a, proxies[0].model.right_a])
    proxies[1].set_layer_map([proxies[1].model.left_b, proxies[1].model.right_b])
    assert auto_diff(*proxies, both(pair, data(5, 4)), atol=1e-5)


def extra(kit, surplus):
    class Net(kit.Net):
        def build(self):
            self.fc0 = kit.Linear(4, 4)
            if surplus:
                self.spare = kit.Linear(4, 4)
            self.fc1 = kit.Linear(4, 2)

        def forward(self, x):
            return self.fc1(self.fc0(x))

    return Net()


def test_an_ignored_layer_answers_to_nothing_and_its_weights_are_left_alone(pair, capsys):
    base, raw = extra(pair[0], False), extra(pair[1], True)
    assert not auto_diff(base, raw, both(pair, data(5, 4)), atol=1e-5)
    before = pair[1].weight(raw.spare)
    layer_map = LayerMap()
    layer_map.ignore(raw.spare)
    assert auto_diff(base, raw, both(pair, data(5, 4)), layer_map=layer_map, atol=1e-5)
    np.testing.assert_array_equal(pair[1].weight(raw.spare), before)
    assert "spare" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["ignore_recursivly", "ignore_class"])
def test_more_may_be_ignored_at_once(pair, how):
    base, raw = extra(pair[0], True), extra(pair[1], True)
    layer_map = LayerMap()
    if how == "ignore_recursivly":
        layer_map.ignore_recursivly(raw.spare)
        layer_map.ignore_recursivly(base.spare)
    else:
        layer_map.ignore_class(raw.spare, pair[1].Linear)
        layer_map.ignore_class(base.spare, pair[0].Linear)
    report = auto_diff(base, raw, both(pair, data(5, 4)), layer_map=layer_map, atol=1e-5)
    assert report
    assert "spare" not in {d.pair.anchor.layer for d in report if d.compared}

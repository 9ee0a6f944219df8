"""Each argument of each layer of both frameworks is recorded as a setting, or left out for a reason given here."""

# ruff: noqa: SIM905
from __future__ import annotations

import inspect

import paddle
import pytest
import torch
from kit.frameworks import is_before

from padiff.frameworks.catalog import LAYERS
from padiff.frameworks.settings import LAYER_SETTINGS, plain_settings, settings_of_class

pytestmark = pytest.mark.skipif(
    is_before(torch, 2, 6) or is_before(paddle, 3, 2), reason="the catalog has layers that an older framework lacks"
)

SHAPES = "the shapes of parameters and outputs show it"
PARAMETERS = "the layer tree shows which parameters there are, and the first step's weights what they hold"
LAYOUT = "the shapes of inputs show it, and values are compared in the reference's layout"
INNER = "the layers inside have settings of their own"
NOWHERE = "it changes no value"
TRACED = "the call of the function is traced with it"
BUFFERS = "the layer tree shows the buffers"
REASONS = {
    **dict.fromkeys(
        "affine bias elementwise_affine bias_attr weight_attr param_attr weight_ih_attr weight_hh_attr bias_ih_attr "
        "bias_hh_attr init num_parameters _weight add_bias_kv moving_mean_name moving_variance_name".split(),
        PARAMETERS,
    ),
    **dict.fromkeys(
        "d_model dim_feedforward embed_dim embedding_dim num_embeddings hidden_size input_size in1_features "
        "in2_features kdim vdim normalized_shape num_channels num_features num_layers num_encoder_layers "
        "num_decoder_layers proj_size direction unflattened_size shape weight_shape output_size output_sizes "
        "output_padding start_dim end_dim start_axis stop_axis include_last_offset recompute_scale_factor".split(),
        SHAPES,
    ),
    **dict.fromkeys("batch_first time_major data_format data_layout".split(), LAYOUT),
    **dict.fromkeys(
        "custom_encoder custom_decoder encoder_layer decoder_layer cell cell_fw cell_bw norm activation "
        "act_dropout".split(),
        INNER,
    ),
    **dict.fromkeys(
        "name device dtype inplace in_place return_indices return_mask need_weights sparse enable_nested_tensor "
        "mask_check process_group _freeze is_test do_model_average_for_mean_and_var".split(),
        NOWHERE,
    ),
    **dict.fromkeys(
        "dim axis keepdim kernel_sizes strides paddings dilations norm_type align_mode output_ratio is_reverse "
        "_random_samples random_u add_zero_attn scale_grad_by_freq power_iters scale".split(),
        TRACED,
    ),
    **dict.fromkeys("track_running_stats trainable_statistics".split(), BUFFERS),
    "exclusive": "recorded as count_include_pad",
}  # fmt: skip
# Arguments that other classes record.
OF_CLASSES = {
    **dict.fromkeys([("Transformer", "norm_first"), ("Transformer", "normalize_before")], INNER),
    **dict.fromkeys([("Hardtanh", "min_value"), ("Hardtanh", "max_value")], "an old name of min_val and max_val"),
    **dict.fromkeys(
        [
            ("CrossMapLRN2d", "size"),
            ("CrossMapLRN2d", "k"),
            ("ThresholdedReLU", "threshold"),
            ("ThresholdedReLU", "value"),
        ],
        TRACED,
    ),
    **dict.fromkeys([("Dropout", "mode"), ("EmbeddingBag", "mode")], TRACED),
    **dict.fromkeys([(f"Pad{d}D", name) for d in (1, 2, 3) for name in ("mode", "value")], TRACED),
}
FRAMEWORKS = {"torch": torch.nn, "paddle": paddle.nn}


def _arguments(cls) -> list[str]:
    return [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "args", "kwargs")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_argument_of_each_layer_is_recorded_or_has_a_reason(framework):
    missing = []
    for name in sorted(LAYERS[framework]):
        cls = getattr(FRAMEWORKS[framework], name)
        of_class = settings_of_class(cls)
        for argument in _arguments(cls):
            recorded = argument in of_class or plain_settings({argument: 1})
            if not recorded and argument not in REASONS and (name, argument) not in OF_CLASSES:
                missing.append((name, argument))
    assert not missing


def test_no_reason_stands_for_nothing():
    arguments = {
        argument
        for framework, module in FRAMEWORKS.items()
        for name in LAYERS[framework]
        for argument in _arguments(getattr(module, name))
    }
    assert set(REASONS) <= arguments
    assert {argument for _, argument in OF_CLASSES} <= arguments


PAIRS = [
    (
        lambda: torch.nn.Upsample(scale_factor=2, mode="bilinear"),
        lambda: paddle.nn.Upsample(scale_factor=2, mode="bilinear"),
    ),
    (
        lambda: torch.nn.Upsample(size=(4, 4), mode="bilinear", align_corners=True),
        lambda: paddle.nn.Upsample(size=[4, 4], mode="bilinear", align_corners=True),
    ),
    (lambda: torch.nn.UpsamplingNearest2d(scale_factor=2), lambda: paddle.nn.UpsamplingNearest2D(scale_factor=2)),
    (lambda: torch.nn.Hardtanh(-2, 3), lambda: paddle.nn.Hardtanh(-2, 3)),
    (lambda: torch.nn.Softshrink(0.3), lambda: paddle.nn.Softshrink(0.3)),
    (lambda: torch.nn.Softplus(2, 10), lambda: paddle.nn.Softplus(2, 10)),
    (lambda: torch.nn.RReLU(0.1, 0.2), lambda: paddle.nn.RReLU(0.1, 0.2)),
    (lambda: torch.nn.PixelShuffle(3), lambda: paddle.nn.PixelShuffle(3)),
    (lambda: torch.nn.LocalResponseNorm(3, k=2.0), lambda: paddle.nn.LocalResponseNorm(3, k=2.0)),
    (lambda: torch.nn.RNNCell(2, 3, nonlinearity="relu"), lambda: paddle.nn.SimpleRNNCell(2, 3, activation="relu")),
    (lambda: torch.nn.AdaptiveAvgPool2d(2), lambda: paddle.nn.AdaptiveAvgPool2D(2)),
    (lambda: torch.nn.AvgPool2d(2, divisor_override=3), lambda: paddle.nn.AvgPool2D(2, divisor_override=3)),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "candidate"), PAIRS)
def test_equal_layers_have_equal_settings(reference, candidate):
    from padiff.frameworks.paddle import layers as paddle_layers
    from padiff.frameworks.torch import layers as torch_layers

    first, second = torch_layers.settings(reference()), paddle_layers.settings(candidate())
    names = set(settings_of_class(type(reference())).values()) & first.keys() & second.keys()
    assert names
    assert {name: first[name] for name in names} == {name: second[name] for name in names}
    assert {*first, *second} <= LAYER_SETTINGS


def test_a_users_class_has_no_settings_of_a_frameworks():
    class Upsample(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mode, self.size, self.scale_factor = "of its own", 3, 2

    from padiff.frameworks.torch import layers

    assert layers.settings(Upsample()) == {}

"""timm's models and PaddleClas's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import timm
import torch
from paddleclas.ppcls.arch import backbone
from paddleclas.ppcls.utils import logger

from library_zoo.pair import Pair, State, images, renamed

logger.init_logger(log_level=40)


def _pair(
    name: str,
    other: str,
    size: int,
    same: bool = True,
    why: str = "",
    truth: Callable[[State], State] | None = None,
    eps: float | None = None,
    label: str = "",
    scale: float = 1.0,
) -> Pair:
    def build() -> tuple[Any, Any]:
        reference = timm.create_model(name, num_classes=10)
        if eps is not None:
            for module in reference.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.eps = eps
        return reference, getattr(backbone, other)(class_num=10)

    return Pair(f"classify/{name}{label}", build, images(size), same, why, truth, scale=scale)


def _swin(state: State) -> State:
    def before(found: re.Match[str]) -> str:
        return f"layers.{int(found[1]) - 1}.downsample"

    moved = {re.sub(r"layers\.(\d)\.downsample", before, name): value for name, value in state.items()}
    return renamed((r"^head\.fc", "head"))(moved)


def _unshifted() -> tuple[Any, Any]:
    candidate = backbone.SwinTransformer_tiny_patch4_window7_224(class_num=10)
    candidate.layers[3].blocks[1].shift_size = 0
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=10), candidate


_convnext = renamed(
    (r"^stem", "downsample_layers.0"),
    (r"^stages\.(\d)\.downsample", r"downsample_layers.\1"),
    (r"^stages\.(\d)\.blocks", r"stages.\1"),
    ("conv_dw", "dwconv"),
    (r"mlp\.fc", "pwconv"),
    (r"^head\.norm", "norm"),
    (r"^head\.fc", "head"),
)


def _tnt(state: State) -> State:
    position = state["pixel_pos"]
    return renamed()(state | {"pixel_pos": np.moveaxis(position, 1, -1).reshape(1, -1, position.shape[1])})


def _rexnet(state: State) -> State:
    names = list(backbone.ReXNet_1_0(class_num=10).state_dict())
    values = list(state.values())
    return dict(zip(names, [v.reshape(*v.shape, 1, 1) if v.shape == (10, 1280) else v for v in values]))


def _fasternet(state: State) -> State:
    def stage(found: re.Match[str]) -> str:
        return f"stages.{2 * int(found[1])}.blocks"

    def merging(found: re.Match[str]) -> str:
        return f"stages.{2 * int(found[1]) - 1}"

    moved = {re.sub(r"stages\.(\d)\.blocks", stage, name): value for name, value in state.items()}
    heads = (r"^conv_head", "avgpool_pre_head.1"), (r"^classifier", "head")
    return renamed(*heads)({re.sub(r"stages\.(\d)\.downsample", merging, name): value for name, value in moved.items()})


PAIRS = [
    _pair("deit_tiny_patch16_224", "DeiT_tiny_patch16_224", 224, truth=renamed()),
    _pair("deit_tiny_distilled_patch16_224", "DeiT_tiny_distilled_patch16_224", 224, truth=renamed()),
    Pair("classify/swin_tiny/shift", _unshifted, images(224), why="paddle's last stage set not to shift", truth=_swin),
    _pair(
        "swin_tiny_patch4_window7_224",
        "SwinTransformer_tiny_patch4_window7_224",
        224,
        False,
        "the last block of paddle shifts its only window, torch's does not",
        truth=_swin,
    ),
    _pair("convnext_tiny", "ConvNeXt_tiny", 64, truth=_convnext),
    _pair("twins_svt_small", "alt_gvt_small", 224, truth=renamed()),
    _pair("twins_pcpvt_small", "pcpvt_small", 224, truth=renamed()),
    _pair("pvt_v2_b0", "PVT_V2_B0", 64),
    _pair("tnt_s_patch16_224", "TNT_small", 224, truth=_tnt),
    _pair("vgg11", "VGG11", 224, False, "paddle's convolutions have no bias"),
    _pair("resnet18", "ResNet18", 64, False, "paddle's first block has a projection more in its shortcut"),
    _pair("resnet50", "ResNet50", 64),
    _pair("resnet50d", "ResNet50_vd", 64),
    _pair("resnext50_32x4d", "ResNeXt50_32x4d", 64),
    _pair("dla34", "DLA34", 64),
    _pair("regnetx_002", "RegNetX_200MF", 64),
    _pair("starnet_s1", "StarNet_S1", 64, scale=0.4),
    _pair("cspdarknet53", "CSPDarkNet53", 64),
    _pair("hgnet_tiny", "PPHGNet_tiny", 224),
    _pair(
        "hgnetv2_b0",
        "PPHGNetV2_B0",
        64,
        False,
        "the stem's pooling is padded with zeros by torch, with minus infinity by paddle; it gets values below zero",
    ),
    _pair("mobilenetv4_conv_small", "MobileNetV4_conv_small", 64),
    _pair(
        "mobilenetv3_large_100",
        "MobileNetV3_large_x1_0",
        64,
        False,
        "paddle's first block has an expansion more; its squeezes have other widths",
    ),
    _pair(
        "mobilevit_xxs",
        "MobileViT_XXS",
        256,
        why="torch's epsilons, 1e-5, set to paddle's 1e-6",
        eps=1e-6,
        label="/eps",
    ),
    _pair("efficientnet_b0", "EfficientNetB0", 64, False, "paddle pads as TensorFlow does; epsilon 1e-5 against 1e-3"),
    _pair("mixnet_s", "MixNet_S", 224),
    _pair("rexnet_100", "ReXNet_1_0", 64, truth=_rexnet),
    _pair("fasternet_t0", "FasterNet_T0", 64, truth=_fasternet),
    _pair("inception_v4", "InceptionV4", 96, False, "the 1x7 and 7x1 kernels come in the other order"),
]

"""torchvision's models and those of ``paddle.vision.models``."""

from __future__ import annotations

from typing import Any

import paddle.vision.models as paddle_models
import torchvision.models as torch_models

from library_zoo.pair import Pair, images

_SIZES = {"inception_v3": 96, "googlenet": 224, "alexnet": 224}


def _pair(
    name: str, same: bool = True, why: str = "", label: str = "", size: int = 0, dropout: bool = False, **options: Any
) -> Pair:
    base = name.removesuffix("_bn")
    other = {"batch_norm": True} if name.endswith("_bn") else {}

    def build() -> tuple[Any, Any]:
        return getattr(torch_models, name)(num_classes=10, **options), getattr(paddle_models, base)(
            num_classes=10, **other
        )

    size = size or _SIZES.get(name, 64)
    return Pair(f"vision/{name}{label}", build, images(size), same, why, dropout=dropout)


def _inception() -> tuple[Any, Any]:
    model = torch_models.inception_v3(num_classes=10, init_weights=False, aux_logits=False)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-5
    return model, paddle_models.inception_v3(num_classes=10)


_DROPOUT = "paddle's Dropout has mode downscale_in_infer: what it lets through is multiplied by 1 - p for evaluation"

PAIRS = [
    _pair("alexnet"),
    _pair("alexnet", False, _DROPOUT, label="/dropout", dropout=True),
    *(_pair(f"vgg{depth}{bn}", init_weights=False) for depth in (11, 13, 16, 19) for bn in ("", "_bn")),
    *(_pair(f"resnet{depth}") for depth in (18, 34, 50, 101, 152)),
    *(_pair(name) for name in ("resnext50_32x4d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2")),
    _pair("mobilenet_v2"),
    *(_pair(f"mobilenet_v3_{size}") for size in ("small", "large")),
    *(_pair(f"densenet{depth}") for depth in (121, 161, 169, 201)),
    # torch rounds the size up when it pools, paddle down: the same for some sizes of images only.
    _pair("squeezenet1_0", why="67 pixels, so that no pooled size is rounded", size=67),
    _pair("squeezenet1_0", False, "torch pools with ceil_mode, paddle without", label="/64"),
    _pair("squeezenet1_1", False, "the first convolution has padding 0 in torch, 1 in paddle; ceil_mode as in 1_0"),
    *(_pair(f"shufflenet_v2_x{width}") for width in ("0_5", "1_0", "1_5")),
    _pair("shufflenet_v2_x2_0", False, "the second stage is 244 wide in torch, 224 in paddle"),
    _pair(
        "googlenet",
        False,
        "torch has BatchNorms, ReLUs and a 3x3 kernel where paddle has bare convolutions and a 5x5 kernel",
        init_weights=False,
        aux_logits=True,
    ),
    _pair(
        "inception_v3",
        False,
        "the BatchNorms' epsilon is 0.001 in torch, 1e-5 in paddle",
        init_weights=False,
        aux_logits=False,
    ),
    Pair("vision/inception_v3/eps", _inception, images(96), why="torch's epsilons set to 1e-5"),
]

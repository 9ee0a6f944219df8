"""The masks that paddle's dropout draws; see `padiff.frameworks.base.Masks`."""

from typing import Any

import paddle

from padiff.frameworks.feeding import MaskObserver, MasksFed, MaskSource, MasksSeen
from padiff.frameworks.hooking import Handle
from padiff.frameworks.paddle import dropouts


def unfed(layer: Any) -> bool:
    if isinstance(layer, paddle.nn.RReLU):
        return True
    # Fused layers apply dropout in C++.
    rates = [value for name, value in vars(layer).items() if "dropout" in name or name == "p"]
    fused = any(kind.__module__.startswith("paddle.incubate.nn") for kind in type(layer).__mro__)
    return fused and any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def see(observer: MaskObserver) -> Handle:
    return MasksSeen(dropouts, observer)


def feed(source: MaskSource) -> Handle:
    return MasksFed(dropouts, source)

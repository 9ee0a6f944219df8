"""The masks that PyTorch's dropout draws; see `padiff.frameworks.base.Masks`."""

from typing import Any

import torch

from padiff.frameworks.feeding import MaskObserver, MasksFed, MaskSource, MasksSeen
from padiff.frameworks.hooking import Handle
from padiff.frameworks.torch import dropouts


def unfed(layer: Any) -> bool:
    # Layers that draw random numbers without dropout.
    return isinstance(layer, (torch.nn.RReLU, torch.nn.FractionalMaxPool2d, torch.nn.FractionalMaxPool3d))


def see(observer: MaskObserver) -> Handle:
    return MasksSeen(dropouts, observer)


def feed(source: MaskSource) -> Handle:
    return MasksFed(dropouts, source)

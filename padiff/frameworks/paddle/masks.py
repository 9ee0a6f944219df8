"""The masks that paddle's dropout draws; see `padiff.frameworks.base.Masks`."""

from typing import Any

import paddle

from padiff.frameworks.dropouts import MaskObserver, MasksFed, MaskSource, MasksSeen
from padiff.frameworks.hooking import Handle
from padiff.frameworks.paddle import dropouts


def unfed(layer: Any) -> bool:
    # Between the layers of a recurrent network, in C++.
    return isinstance(layer, paddle.nn.layer.rnn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1


def see(observer: MaskObserver) -> Handle:
    return MasksSeen(dropouts, observer)


def feed(source: MaskSource) -> Handle:
    return MasksFed(dropouts, source)

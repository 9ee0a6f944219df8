"""PaddlePaddle's functions that choose; see `padiff.frameworks.feeding`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from padiff.frameworks.feeding import ChoicesFed, ChoiceSource
from padiff.frameworks.hooking import Handle

_NAMES = ("topk", "argmax", "argmin", "argsort")


def functions() -> Iterator[tuple[Any, str, str]]:
    # Methods of tensors are the same functions.
    for name in _NAMES:
        yield paddle, name, name


def choosing(scores: Any, output: Any, axis: int | None, places: np.ndarray) -> Any:
    if isinstance(output, paddle.Tensor):
        return paddle.to_tensor(places, dtype=output.dtype, place=output.place)
    values, own = output
    chosen = paddle.to_tensor(places, dtype=own.dtype, place=own.place)
    pair = paddle.take_along_axis(scores, chosen, axis).reshape(values.shape), chosen
    return type(output)(*pair) if hasattr(output, "_fields") else type(output)(pair)


def feed(source: ChoiceSource) -> Handle:
    return ChoicesFed(sys.modules[__name__], source)

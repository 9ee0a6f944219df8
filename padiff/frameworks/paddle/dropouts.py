"""paddle's dropout; see `padiff.frameworks.dropout_masks`.

The layers call these functions, and so does attention if it computes its weights, which it always does on the CPU.
Masks that paddle draws inside C++ are not recorded: dropout inside of fused layers, and between the layers of a
recurrent network on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional

from padiff.frameworks.dropout_masks import DropoutCall
from padiff.frameworks.interception import InterceptedCall
from padiff.frameworks.paddle import randomness, tensors
from padiff.frameworks.paddle.recurrent import FUNCTION, Recurrent

state, restore = randomness.state, randomness.restore

_ALPHA = ("alpha_dropout", "feature_alpha_dropout")
# The limit of SELU for large negative inputs.
_SATURATION = -1.7580993408473766
# The largest relative distance between the output of a recurrent network and the output computed with masks, for these
# masks to be accepted as the ones that were used.
_ALIKE = 0.1


def functions() -> Iterator[tuple[Any, str, str]]:
    for name in ("dropout", "dropout2d", "dropout3d", *_ALPHA):
        if hasattr(functional, name):
            yield functional, name, name
    yield paddle._C_ops, FUNCTION, FUNCTION


def about(name: str, heard: InterceptedCall) -> DropoutCall | None:
    if not paddle.in_dynamic_mode():
        return None
    if name == FUNCTION:
        call = Recurrent.from_call(heard)
        drops = 0 < call.rate < 1 and call.between
        return DropoutCall(call.mode.lower(), call.rate, call.shape, call.between) if drops else None
    arguments = heard.arguments()
    rate = float(arguments["p"]) if arguments["training"] else 0.0
    return DropoutCall(name, rate, tuple(arguments["x"].shape)) if 0.0 < rate < 1.0 else None


def kept(name: str, heard: InterceptedCall, output: Any, before: Any) -> np.ndarray | None:
    with paddle.no_grad():
        if name == FUNCTION:
            randomness.restore(before)
            masks = Recurrent.from_call(heard).drawn()
            expected = Recurrent.from_call(heard).keeping(masks)[0].astype("float32")
            apart = paddle.linalg.norm(expected - output[0].detach().astype("float32"))
            return masks if float(apart) <= _ALIKE * float(paddle.linalg.norm(expected)) else None
        ones = paddle.ones_like(heard.arguments()["x"].detach())
        randomness.restore(before)
        mask = _on_ones(heard, ones) > 0
    return tensors.copy(mask)


def draw(name: str, heard: InterceptedCall) -> None:
    with paddle.no_grad():
        if name == FUNCTION:
            Recurrent.from_call(heard).drawn()
            return
        _on_ones(heard, paddle.ones_like(heard.arguments()["x"].detach()))


def handed_on(name: str, heard: InterceptedCall) -> None:
    return None


def _on_ones(heard: InterceptedCall, ones: Any) -> Any:
    arguments = heard.arguments()
    # All arguments except `inplace` and `name`.
    more = {key: arguments[key] for key in ("p", "axis", "training", "mode", "data_format") if key in arguments}
    return heard.function(ones, **more)


def keeping(name: str, heard: InterceptedCall, mask: np.ndarray) -> Any:
    if name == FUNCTION:
        return Recurrent.from_call(heard).keeping(mask)
    arguments = heard.arguments()
    source, rate = arguments["x"], float(arguments["p"])
    if name in _ALPHA:
        scale = 1 / math.sqrt((_SATURATION**2 * rate + 1) * (1 - rate))
        shift = np.where(mask, 0.0, scale * _SATURATION) - scale * _SATURATION * rate
        return source * tensors.like(source, mask * scale) + tensors.like(source, shift)
    if arguments.get("mode") == "downscale_in_infer" or arguments.get("axis") is not None or name != "dropout":
        scale = 1.0 if arguments.get("mode") == "downscale_in_infer" else 1 / (1 - rate)
        output = source * tensors.like(source, mask * scale)
    else:
        # Divide, as paddle's kernel does. The CPU has no division for dtypes narrower than float32.
        wide = source if source.dtype in (paddle.float32, paddle.float64) else source.astype("float32")
        output = (wide / tensors.like(wide, np.where(mask, 1 - rate, np.inf))).astype(source.dtype)
    return paddle.assign(output, source) if arguments.get("inplace") else output

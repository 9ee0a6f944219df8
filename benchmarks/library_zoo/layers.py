"""``torch.nn``'s composite layers and those of ``paddle.nn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import torch

from library_zoo.pair import Pair, State, both


def _inputs(*shapes: tuple[int, ...]) -> Callable[[], Any]:
    def made() -> Any:
        draw = np.random.default_rng(0)
        pairs = [both(draw.standard_normal(shape).astype("float32")) for shape in shapes]
        return tuple(x for x, _ in pairs), tuple(y for _, y in pairs)

    return made


def _recurrent(kind: str, layers: int, both_ways: bool) -> Pair:
    def build() -> tuple[Any, Any]:
        reference = getattr(torch.nn, kind)(6, 8, num_layers=layers, bidirectional=both_ways, batch_first=True)
        candidate = getattr(paddle.nn, {"RNN": "SimpleRNN"}.get(kind, kind))(
            6, 8, num_layers=layers, direction="bidirect" if both_ways else "forward"
        )
        return reference, candidate

    name = f"layers/{kind.lower()}_{layers}{'_bidirectional' if both_ways else ''}"
    return Pair(name, build, _inputs((2, 5, 6)), truth=lambda state: state)


def _unpacked(state: State) -> State:
    made: State = {}
    for name, value in state.items():
        name = name.replace("multihead_attn", "cross_attn")
        if "in_proj_" in name:
            for part, piece in zip("qkv", np.split(value, 3)):
                made[name.replace("in_proj_", f"{part}_proj.")] = piece
        else:
            made[name] = value
    return made


def _transformer(name: str, build: Callable[[], tuple[Any, Any]], *shapes: tuple[int, ...], **more: Any) -> Pair:
    return Pair(f"layers/{name}", build, _inputs(*shapes), truth=_unpacked, **more)


def _encoder_layer(first: bool = False) -> tuple[Any, Any]:
    return (
        torch.nn.TransformerEncoderLayer(16, 4, 24, 0.0, "gelu", batch_first=True, norm_first=first),
        paddle.nn.TransformerEncoderLayer(16, 4, 24, 0.0, "gelu", normalize_before=first),
    )


def _decoder_layer() -> tuple[Any, Any]:
    return (
        torch.nn.TransformerDecoderLayer(16, 4, 24, 0.0, batch_first=True),
        paddle.nn.TransformerDecoderLayer(16, 4, 24, 0.0),
    )


def _encoder() -> tuple[Any, Any]:
    reference, candidate = _encoder_layer()
    return torch.nn.TransformerEncoder(reference, 3, enable_nested_tensor=False), paddle.nn.TransformerEncoder(
        candidate, 3
    )


def _decoder() -> tuple[Any, Any]:
    reference, candidate = _decoder_layer()
    return torch.nn.TransformerDecoder(reference, 2), paddle.nn.TransformerDecoder(candidate, 2)


def _whole() -> tuple[Any, Any]:
    return torch.nn.Transformer(16, 4, 2, 2, 24, 0.0, batch_first=True), paddle.nn.Transformer(16, 4, 2, 2, 24, 0.0)


def _attention(width: int | None = None) -> tuple[Any, Any]:
    reference = torch.nn.MultiheadAttention(16, 4, batch_first=True, kdim=width, vdim=width)
    return reference, paddle.nn.MultiHeadAttention(16, 4, kdim=width, vdim=width)


def _apart(state: State) -> State:
    return _unpacked({name.replace("_proj_weight", "_proj.weight"): value for name, value in state.items()})


_A, _B = (2, 5, 16), (2, 7, 16)

PAIRS = [
    *(_recurrent(kind, layers, ways) for kind in ("LSTM", "GRU", "RNN") for layers in (1, 3) for ways in (False, True)),
    _transformer("attention", _attention, _A, _B, _B),
    Pair("layers/attention_widths", lambda: _attention(12), _inputs(_A, (2, 7, 12), (2, 7, 12)), truth=_apart),
    _transformer("encoder_layer", _encoder_layer, _A),
    _transformer("encoder_layer_norm_first", lambda: _encoder_layer(True), _A),
    _transformer("decoder_layer", _decoder_layer, _A, _B),
    _transformer("encoder", _encoder, _A),
    _transformer("decoder", _decoder, _A, _B),
    _transformer("transformer", _whole, _A, _B),
]

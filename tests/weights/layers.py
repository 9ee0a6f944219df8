"""Layers that the built-in rules are about, written in both frameworks, with inputs and a call that gives a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle
import torch
from kit.nets import data

tn, pn = torch.nn, paddle.nn


@dataclass(frozen=True)
class Case:
    name: str
    makes: dict[str, Callable]
    inputs: Callable
    calls: dict[str, Callable]
    evaluated: bool = False


def _plain(model, *inputs):
    return model(*inputs)


def _first(model, *inputs):
    return model(*inputs)[0]


def case(name, make_torch, make_paddle, *shapes, call=_plain, call_paddle=None, evaluated=False, inputs=None):
    def drawn():
        return [data(*shape, seed=k, dtype="float64") for k, shape in enumerate(shapes)]

    calls = {"torch": call, "paddle": call_paddle or call}
    return Case(name, {"torch": make_torch, "paddle": make_paddle}, inputs or drawn, calls, evaluated)


def _tokens():
    return [np.array([[0, 3, 3], [6, 1, 0]])]


def _lstm_cell(model, x, h, c):
    return model(x, (h, c))[0]


ATTENTION = {"embed_dim": 8, "num_heads": 2}
LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0}


def _recurrent(name, reference, candidate, layers=1, both_ways=False):
    # Without biases paddle 3.3's own recurrent layers fail (in __init__, or with a segmentation fault): cells only.
    direction = "bidirect" if both_ways else "forward"
    return case(
        name,
        lambda: reference(3, 4, num_layers=layers, bidirectional=both_ways, batch_first=True),
        lambda: candidate(3, 4, num_layers=layers, direction=direction),
        (2, 5, 3),
        call=_first,
    )


def _attention(name, torch_options, paddle_options, *shapes):
    return case(
        name,
        lambda: tn.MultiheadAttention(**ATTENTION, batch_first=True, **torch_options),
        lambda: pn.MultiHeadAttention(**ATTENTION, **paddle_options),
        *(shapes or ((2, 3, 8), (2, 5, 8), (2, 5, 8))),
        call=_first,
        call_paddle=_plain,
    )


CASES = [
    case("linear", lambda: tn.Linear(4, 3), lambda: pn.Linear(4, 3), (5, 4)),
    case("linear-square", lambda: tn.Linear(4, 4), lambda: pn.Linear(4, 4), (5, 4)),
    case("linear-no-bias", lambda: tn.Linear(4, 3, bias=False), lambda: pn.Linear(4, 3, bias_attr=False), (5, 4)),
    case("bilinear", lambda: tn.Bilinear(3, 4, 2), lambda: pn.Bilinear(3, 4, 2), (5, 3), (5, 4)),
    case(
        "conv1d-grouped",
        lambda: tn.Conv1d(4, 6, 3, groups=2, padding=1),
        lambda: pn.Conv1D(4, 6, 3, groups=2, padding=1),
        (2, 4, 7),
    ),
    case("conv2d", lambda: tn.Conv2d(3, 3, 3, stride=2), lambda: pn.Conv2D(3, 3, 3, stride=2), (2, 3, 7, 7)),
    case(
        "conv2d-grouped",
        lambda: tn.Conv2d(4, 6, (3, 2), groups=2),
        lambda: pn.Conv2D(4, 6, (3, 2), groups=2),
        (2, 4, 6, 6),
    ),
    case("conv3d-grouped", lambda: tn.Conv3d(2, 4, 2, groups=2), lambda: pn.Conv3D(2, 4, 2, groups=2), (2, 2, 4, 4, 4)),
    case(
        "conv-transpose1d",
        lambda: tn.ConvTranspose1d(4, 6, 3, stride=2, groups=2),
        lambda: pn.Conv1DTranspose(4, 6, 3, stride=2, groups=2),
        (2, 4, 5),
    ),
    case(
        "conv-transpose2d",
        lambda: tn.ConvTranspose2d(4, 4, 3, stride=2, groups=2, padding=1),
        lambda: pn.Conv2DTranspose(4, 4, 3, stride=2, groups=2, padding=1),
        (2, 4, 5, 5),
    ),
    case("conv-transpose3d", lambda: tn.ConvTranspose3d(2, 3, 2), lambda: pn.Conv3DTranspose(2, 3, 2), (1, 2, 3, 3, 3)),
    case("batchnorm1d", lambda: tn.BatchNorm1d(3), lambda: pn.BatchNorm1D(3), (6, 3)),
    case("batchnorm1d-eval", lambda: tn.BatchNorm1d(3), lambda: pn.BatchNorm1D(3), (6, 3, 4), evaluated=True),
    case("batchnorm2d-eval", lambda: tn.BatchNorm2d(3), lambda: pn.BatchNorm2D(3), (2, 3, 4, 4), evaluated=True),
    case("batchnorm3d-eval", lambda: tn.BatchNorm3d(3), lambda: pn.BatchNorm3D(3), (2, 3, 2, 2, 2), evaluated=True),
    case(
        "batchnorm-old-eval",
        lambda: tn.BatchNorm2d(3),
        lambda: pn.BatchNorm(3, dtype=paddle.get_default_dtype()),
        (2, 3, 4, 4),
        evaluated=True,
    ),
    case("layernorm", lambda: tn.LayerNorm(4), lambda: pn.LayerNorm(4), (3, 4)),
    case("layernorm-2d", lambda: tn.LayerNorm((3, 4)), lambda: pn.LayerNorm((3, 4)), (2, 3, 4)),
    case("groupnorm", lambda: tn.GroupNorm(2, 4), lambda: pn.GroupNorm(2, 4), (2, 4, 3, 3)),
    case("instancenorm1d", lambda: tn.InstanceNorm1d(3, affine=True), lambda: pn.InstanceNorm1D(3), (2, 3, 5)),
    case("instancenorm2d", lambda: tn.InstanceNorm2d(3, affine=True), lambda: pn.InstanceNorm2D(3), (2, 3, 4, 4)),
    case("instancenorm3d", lambda: tn.InstanceNorm3d(3, affine=True), lambda: pn.InstanceNorm3D(3), (2, 3, 2, 3, 2)),
    case("embedding", lambda: tn.Embedding(7, 4), lambda: pn.Embedding(7, 4), inputs=_tokens),
    case("embedding-square", lambda: tn.Embedding(7, 7), lambda: pn.Embedding(7, 7), inputs=_tokens),
    case("prelu", lambda: tn.PReLU(), lambda: pn.PReLU(), (2, 3, 4, 4)),
    case("prelu-channels", lambda: tn.PReLU(3), lambda: pn.PReLU(3), (2, 3, 4, 4)),
    _attention("attention", {}, {}),
    _attention("attention-no-bias", {"bias": False}, {"bias_attr": False}),
    _attention("attention-kdim-vdim", {"kdim": 5, "vdim": 6}, {"kdim": 5, "vdim": 6}, (2, 3, 8), (2, 4, 5), (2, 4, 6)),
    _attention("attention-kdim", {"kdim": 5}, {"kdim": 5}, (2, 3, 8), (2, 4, 5), (2, 4, 8)),
    _recurrent("lstm", tn.LSTM, pn.LSTM),
    _recurrent("lstm-two-layers-both-ways", tn.LSTM, pn.LSTM, layers=2, both_ways=True),
    _recurrent("gru", tn.GRU, pn.GRU),
    _recurrent("gru-both-ways", tn.GRU, pn.GRU, both_ways=True),
    _recurrent("rnn", tn.RNN, pn.SimpleRNN),
    _recurrent("rnn-three-layers-both-ways", tn.RNN, pn.SimpleRNN, layers=3, both_ways=True),
    case("lstm-cell", lambda: tn.LSTMCell(3, 4), lambda: pn.LSTMCell(3, 4), (2, 3), (2, 4), (2, 4), call=_lstm_cell),
    case(
        "lstm-cell-no-bias",
        lambda: tn.LSTMCell(3, 4, bias=False),
        lambda: pn.LSTMCell(3, 4, bias_ih_attr=False, bias_hh_attr=False),
        (2, 3),
        (2, 4),
        (2, 4),
        call=_lstm_cell,
    ),
    case(
        "gru-cell", lambda: tn.GRUCell(3, 4), lambda: pn.GRUCell(3, 4), (2, 3), (2, 4), call=_plain, call_paddle=_first
    ),
    case(
        "rnn-cell",
        lambda: tn.RNNCell(3, 4),
        lambda: pn.SimpleRNNCell(3, 4),
        (2, 3),
        (2, 4),
        call=_plain,
        call_paddle=_first,
    ),
    case(
        "encoder-layer",
        lambda: tn.TransformerEncoderLayer(**LAYER, batch_first=True),
        lambda: pn.TransformerEncoderLayer(**LAYER),
        (2, 3, 8),
    ),
    case(
        "decoder-layer",
        lambda: tn.TransformerDecoderLayer(**LAYER, batch_first=True),
        lambda: pn.TransformerDecoderLayer(**LAYER),
        (2, 3, 8),
        (2, 4, 8),
    ),
    case(
        "encoder",
        lambda: tn.TransformerEncoder(
            tn.TransformerEncoderLayer(**LAYER, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: pn.TransformerEncoder(pn.TransformerEncoderLayer(**LAYER), 2),
        (2, 3, 8),
    ),
    case(
        "transformer",
        lambda: tn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True),
        lambda: pn.Transformer(8, 2, 2, 2, 12, dropout=0.0),
        (2, 3, 8),
        (2, 4, 8),
    ),
]

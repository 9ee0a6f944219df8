"""Pairs of the other files the other way round, where going back is another matter: packing, fusing, leaving zero."""

from __future__ import annotations

from functools import partial

import numpy as np
from kit.frameworks import PADDLE, TORCH

from .beits import TIMM_TO_BEIT, beit
from .copying import dense, fuse, put, same, value
from .pair import links, pair, straight
from .recurrent import NAMES, SERIES, by_gates, one_bias, single, stacked, two_lstms
from .vits import FUSED_TO_NESTED, PICTURES, nested, timm

BACK = (PADDLE, TORCH)


def flip(layers):
    return tuple((candidate, reference) for reference, candidate in layers)


def carry_vit(ref, cand):
    for reference, candidate in flip(FUSED_TO_NESTED):
        if candidate != "(root)" and not candidate.endswith("qkv"):
            same(ref, reference, cand, candidate)
    for index in (0, 1):
        inside = f"vit.encoder.layer.{index}.attention.attention."
        fuse(ref, [inside + name for name in ("query", "key", "value")], cand, f"blocks.{index}.attn.qkv")
    put(cand, "(root)", "cls_token", value(ref, "vit.embeddings", "cls_token"))
    put(cand, "(root)", "pos_embed", value(ref, "vit.embeddings", "position_embeddings"))


def carry_beit(ref, cand):
    kept = [
        (reference, candidate)
        for reference, candidate in flip(TIMM_TO_BEIT)
        if candidate != "(root)" and ".ls" not in candidate
    ]
    straight(kept)(ref, cand)
    for index in (0, 1):
        put(cand, f"blocks.{index}.ls1", "weight", value(ref, f"model.layer{index}", "gamma_1"))
        put(cand, f"blocks.{index}.ls2", "weight", value(ref, f"model.layer{index}", "gamma_2"))
    put(cand, "(root)", "cls_token", value(ref, "model", "token"))
    put(cand, "(root)", "pos_embed", value(ref, "model", "position"))


def carry_stack(ref, cand):
    same(ref, "head", cand, "fc")
    for layer, path in ((0, "rnn_1"), (1, "rnn_2")):
        for name in NAMES:
            for end in ("", "_reverse"):
                put(cand, "lstm", f"{name}_l{layer}{end}", value(ref, path, f"{name}_l0{end}"))


def _put_lstm(cand, w_ih, w_hh, bias):
    # One bias has what the other lacks.
    for name, array in zip(NAMES, (w_ih, w_hh, bias, np.zeros_like(bias))):
        put(cand, "lstm", f"{name}_l0", array)


def carry_one_bias(ref, cand):
    same(ref, "out", cand, "fc")
    _put_lstm(cand, dense(ref, "cell.x2h")[0], dense(ref, "cell.h2h")[0], dense(ref, "cell.x2h")[1])


def carry_gates(ref, cand):
    same(ref, "out", cand, "fc")
    names = ("input_gate", "forget_gate", "candidate", "output_gate")
    matrices, biases = zip(*(dense(ref, f"cell.{name}") for name in names))
    both = np.concatenate(matrices)
    width = both.shape[1] // 2
    _put_lstm(cand, both[:, :width], both[:, width:], np.concatenate(biases))


GATES = links("\n".join(f"cell.{name} lstm" for name in ("input_gate", "forget_gate", "candidate", "output_gate")))

PAIRS = (
    # Three layers into one qkv, an embeddings layer's parameters into the root's; in torch.
    pair("vit_nested_to_fused", nested, timm, PICTURES, flip(FUSED_TO_NESTED), carry_vit, (TORCH, TORCH)),
    # The block's own layer scale into layers; the reference has the wrapper, and the head without a partner.
    pair(
        "vit_layer_scale_to_layers",
        beit,
        partial(timm, scaled=True),
        PICTURES,
        flip(TIMM_TO_BEIT),
        carry_beit,
        BACK,
        extra=(("model.aux_head",), ()),
    ),
    # Two bidirectional LSTMs of one layer into one of two.
    pair(
        "lstm_two_to_stack", two_lstms, stacked, SERIES, links("rnn_1 lstm\n rnn_2 lstm\n head fc"), carry_stack, BACK
    ),
    # Four gates with one bias each into an LSTM with two biases.
    pair("lstm_from_gates", by_gates, single, SERIES, (*GATES, ("out", "fc")), carry_gates),
    # Two Linear layers with one bias between them into paddle's LSTM.
    pair(
        "lstm_from_one_bias", one_bias, single, SERIES, links("cell.x2h lstm\n cell.h2h lstm\n out fc"), carry_one_bias
    ),
)

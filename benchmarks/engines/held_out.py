"""Faults of another author: GPT-2, whose positions are learned."""

from __future__ import annotations

import torch
from ways import Expected, Fault, Options, scaled_logits


def _no_final_norm(model):
    model.transformer.ln_f = torch.nn.Identity()


def _activation(model):
    model.transformer.h[0].mlp.act = torch.nn.GELU(approximate="none")


def _heads_swapped(model):
    weight = model.transformer.h[1].attn.c_proj.weight
    weight.data = torch.cat([weight.data[8:], weight.data[:8]])


FAMILY = "gpt2"
FAULTS = {
    "left padding without positions": Fault(
        "left", Expected(r"(wpe|embed).*sequence 0, token 0", r"token 0 of sequence 0 at position 3, the reference at position 0"),
        Options(positions=False), reference="packed",
    ),
    "left padding without mask": Fault(
        "left", Expected(r"input", r"candidate computes \d tokens before sequence \d .*padding without a mask"),
        Options(mask=False, positions=False), reference="decoded",
    ),
    "packed positions two later": Fault(
        "packed", Expected(r"wpe.*sequence 0, token 0", r"at position 2, the reference at position 0"),
        Options(shift=2), reference="decoded",
    ),
    "packed without blocks": Fault(
        "packed", Expected(r"h\.0\.attn.*sequence 1, token 0", r"packed behind another"), Options(blocks=False),
        reference="batched",
    ),
    "batched decoding one late": Fault(
        "batched", Expected(r"wpe.*sequence \d, token", r"at position \d+, the reference at position \d+"), Options(late=1),
    ),
    "a cache never gets a token": Fault(
        "decoded", Expected(r"input", r"candidate never gets token 3 of sequence 0"), Options(dropped=(0, 3)),
        reference="packed",
    ),
    "a cache loses two entries": Fault(
        "decoded", Expected(r"h\.0\.attn.*token 3", r"with a cache"), Options(forgotten=2), reference="packed"
    ),
    "temperature": Fault("batched", Expected(r"logits|lm_head", r"1\.3|0\.769"), change=scaled_logits(1.3)),
    "no final norm": Fault("decoded", Expected(r"ln_f"), change=_no_final_norm),
    "another activation": Fault("packed", Expected(r"h\.0\.mlp\.act"), change=_activation, reference="batched"),
    "weights of heads swapped": Fault("packed", Expected(r"h\.1\.attn\.c_proj"), change=_heads_swapped, reference="left"),
}  # fmt: skip

"""Faults in OPT, which learns its positions, and makes them of the mask, with an offset."""

from __future__ import annotations

from ways import Expected, Fault, Options, scaled_logits


def _norm(model):
    model.model.decoder.layers[1].final_layer_norm.eps = 1e-2


FAMILY = "opt"
FAULTS = {
    "left padding without mask": Fault(
        "batched", Expected(r"input", r"candidate computes \d tokens before sequence \d .*padding without a mask"),
        Options(mask=False, positions=False),
    ),
    "a cache never gets a token": Fault(
        "decoded", Expected(r"input", r"candidate never gets token 2 of sequence 0"), Options(dropped=(0, 2), prefill=2),
        reference="batched",
    ),
    "packed without blocks": Fault(
        "packed", Expected(r"layers\.0\.self_attn.*sequence 1, token 0", r"packed behind another"), Options(blocks=False),
        reference="decoded",
    ),
    "temperature": Fault("decoded", Expected(r"logits|lm_head", r"0\.5|2"), change=scaled_logits(0.5), reference="padded"),
    "epsilon of one layer": Fault("batched", Expected(r"layers\.1\.final_layer_norm", r"eps"), change=_norm),
}  # fmt: skip

"""Faults of one author: Llama."""

from __future__ import annotations

from ways import Expected, Fault, Options, scaled_logits

FAMILY = "llama"


def _eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 3e-2


FAULTS = {
    "packed positions off by one": Fault(
        # Rotary embeddings see distances only, so that nothing but the positions themselves differs.
        "packed", Expected(r"rotary_emb.*sequence 0, token 0", r"at position 1, the reference at position 0"),
        Options(shift=1),
    ),
    "packed positions go on": Fault(
        "packed", Expected(r"rotary_emb.*sequence 1, token 0", r"at position 7, the reference at position 0"),
        Options(restart=False),
    ),
    "packed without blocks": Fault(
        "packed", Expected(r"layers\.0\.self_attn.*sequence 1, token 0", r"packed behind another"), Options(blocks=False)
    ),
    "left padding without mask": Fault(
        "left", Expected(r"input", r"candidate computes \d tokens before sequence \d .*padding without a mask"),
        Options(mask=False),
    ),
    "left padding without positions": Fault(
        "left", Expected(r"rotary_emb.*sequence 0, token 0", r"token 0 of sequence 0 at position 3, the reference at position 0"),
        Options(positions=False),
    ),
    "a cache never gets a token": Fault(
        "decoded", Expected(r"input", r"candidate never gets token 5 of sequence 2"), Options(dropped=(2, 5))
    ),
    "a cache loses an entry": Fault(
        "decoded", Expected(r"layers\.0\.self_attn.*sequence 0, token 3", r"with a cache"), Options(forgotten=1)
    ),
    "decoded positions off by one": Fault(
        "decoded", Expected(r"rotary_emb.*sequence 0, token 3", r"at position 4, the reference at position 3"),
        Options(late=1),
    ),
    "temperature": Fault("packed", Expected(r"logits", r"0\.7|1\.4"), change=scaled_logits(0.7)),
    "rope base": Fault(
        "decoded", Expected(r"rotary_emb.*sequence 0, token 1", ""),
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "eps of one norm": Fault("packed", Expected(r"layers\.1\.input_layernorm", "eps"), change=_eps),
}  # fmt: skip

"""Faults of a third author: Qwen2, grouped queries and biases."""

from __future__ import annotations

from ways import Expected, Fault, Options, scaled_logits


def _scale(model):
    model.model.layers[1].self_attn.scaling *= 1.2


def _no_bias(model):
    model.model.layers[0].self_attn.q_proj.bias.data.add_(0.3)


FAMILY = "qwen2"
FAULTS = {
    "packed positions go on": Fault(
        "packed", Expected(r"rotary_emb.*sequence 1, token 0", r"at position 7, the reference at position 0"),
        Options(restart=False), reference="decoded",
    ),
    "decoded positions three late": Fault(
        "decoded", Expected(r"rotary_emb.*token 3", r"at position 6, the reference at position 3"), Options(late=3),
        reference="packed",
    ),
    "left padding without mask": Fault(
        "batched", Expected(r"input", r"candidate computes \d tokens before sequence \d .*padding without a mask"),
        Options(mask=False, positions=False),
    ),
    "a cache never gets the last but one token": Fault(
        "decoded", Expected(r"input", r"candidate never gets token 2 of sequence 1"), Options(dropped=(1, 2), prefill=2),
    ),
    "packed without blocks": Fault(
        "packed", Expected(r"layers\.0\.self_attn.*sequence 1, token 0", r"packed behind another"), Options(blocks=False),
        reference="decoded",
    ),
    "temperature": Fault("decoded", Expected(r"logits|lm_head", r"0\.5|2"), change=scaled_logits(0.5), reference="packed"),
    "rope base": Fault(
        "packed", Expected(r"rotary_emb", r"rope_theta|base|frequen"),
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, reference="batched",
    ),
    "scale of one attention": Fault("batched", Expected(r"layers\.1\.self_attn"), change=_scale, reference="packed"),
    "bias of queries": Fault("decoded", Expected(r"layers\.0\.self_attn\.q_proj"), change=_no_bias, reference="packed"),
}  # fmt: skip

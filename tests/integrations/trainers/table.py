"""What both trainers train, and the faults that are planted in the candidate's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCABULARY, LENGTH, SAMPLES, IGNORED = 64, 12, 24, -100

MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 1e-3,
    "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 0, "dataloader_num_workers": 0,
    "report_to": [],
}  # fmt: skip


def samples(count: int = SAMPLES, shifted: bool = False, order: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels, of which the first few are ignored, in each sample another number of them."""
    data = np.random.default_rng(0)
    ids = data.integers(3, VOCABULARY, (count, LENGTH))
    labels = ids.copy()
    for row in range(count):
        labels[row, : 3 + row % 3] = IGNORED
    if shifted:
        labels = np.concatenate([labels[:, 1:], np.full((count, 1), IGNORED)], axis=1)
    rows = np.arange(count) if order is None else np.random.default_rng(order).permutation(count)
    return ids[rows], labels[rows]


@dataclass(frozen=True)
class Fault:
    """A fault of the candidate's training, and where it has to be found.

    Attributes:
        model, arguments: what differs of `MODEL` and `ARGUMENTS`.
        data: what differs for `samples`.
        how: something else that the sides know by name.
        stage, step: where it is seen first.
        layer: of the first diff; empty where any is right.
        words: one of them has to be in the cause.
        both: arguments of both sides.
    """

    stage: str
    step: int
    layer: str
    words: tuple[str, ...]
    model: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    how: str = ""
    both: dict[str, Any] = field(default_factory=dict)
    of_reference: str = ""
    #: Of a candidate that is transformers', too.
    of_candidate: str = ""


_NORM = "model.layers.0.input_layernorm"
FAULTS: dict[str, Fault] = {
    "rms_eps": Fault("forward", 0, _NORM, ("eps",), model={"rms_norm_eps": 1e-3}),
    # start_from leaves what a model computes by itself, and so the table is where they part.
    "rope_theta": Fault("weight", 0, "model.rotary_emb", ("rope_theta",), model={"rope_theta": 1e5}),
    "schedule": Fault("update", 3, "", ("learning rate", "schedule"), arguments={"lr_scheduler_type": "linear"}),
    "weight_decay": Fault("update", 0, "", ("weight decay",), arguments={"weight_decay": 0.01}),
    "beta2": Fault("update", 0, "", ("beta2",), arguments={"adam_beta2": 0.999}),
    "clip": Fault("grad", 0, "", ("clip",), arguments={"max_grad_norm": 0.5}),
    "labels_not_shifted": Fault("loss", 0, "", ("shift",), data={"shifted": False}),
    # In the attention's own code, before its last layer.
    "attention_dropout": Fault(
        "forward", 0, "model.layers.0.self_attn.o_proj", ("dropout",), model={"attention_dropout": 0.1}
    ),
    "accumulation": Fault("input", 0, "", ("micro-batch", "batches"), arguments={"gradient_accumulation_steps": 4}),
    "order": Fault("input", 0, "", ("order", "shuffl"), data={"order": 1}),
    "left_over": Fault("input", 2, "", ("left over",), both={"num_train_epochs": 2}, data={"count": 10}),
    "warmup": Fault("update", 1, "", ("warm-up", "learning rate"), arguments={"warmup_steps": 0, "warmup_ratio": 0.25}),
    "loss_mean": Fault("loss", 0, "", ("mean",), of_reference="tokens"),
    "doubled": Fault("grad", 0, "(loop)", ("before they are clipped",), how="doubled"),
    "divided_twice": Fault("backward", 0, "", ("twice",), of_reference="tokens", of_candidate="as it is"),
}

"""What both trainers are given."""

from __future__ import annotations

from typing import Any

import numpy as np

MODEL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-3, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 1e-3,
    "weight_decay": 0.1, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 100,
    "save_strategy": "no", "disable_tqdm": True, "seed": 0, "dataloader_num_workers": 0, "report_to": [],
}  # fmt: skip


def samples(shifted: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels. transformers shifts labels inside of the model, PaddleFormers is given shifted ones."""
    ids = np.random.default_rng(0).integers(3, 64, (16, 12))
    labels = ids.copy()
    labels[:, :3] = -100
    return ids, np.concatenate([labels[:, 1:], np.full((16, 1), -100)], axis=1) if shifted else labels

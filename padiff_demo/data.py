"""Handwritten digits from scikit-learn, in the same order for both runs."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

#: Batch size, and learning rate of both optimizers.
BATCH, LEARNING_RATE = 64, 1e-3


def batches(epochs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all batches of the training, in order.

    Returns:
        Images ``(batches, BATCH, 1, 8, 8)`` in float32 from 0 to 1, and labels ``(batches, BATCH)`` in int64. The 1,797
        images are shuffled once per epoch with a fixed seed; an incomplete last batch is left out.
    """
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    shuffled = np.random.default_rng(0)
    per_epoch = len(labels) // BATCH
    order = np.concatenate([shuffled.permutation(len(labels))[: per_epoch * BATCH] for _ in range(epochs)])
    return images[order].reshape(-1, BATCH, 1, 8, 8), labels[order].reshape(-1, BATCH)

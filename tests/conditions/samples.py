"""Samples for DataLoader workers; a module of its own, so that a spawned worker imports no second framework."""

from __future__ import annotations

import os
import threading

import numpy as np


class Numbers:
    """Six samples for each of four batches; each says which process, with how many writers' threads, made it."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        data = np.random.default_rng(index)
        writers = sum(thread.name == "padiff-writer" for thread in threading.enumerate())
        about = np.array([os.getpid(), writers])
        return data.normal(size=4).astype("float32"), np.int64(data.integers(0, 3)), about

"""Quiet Trainers, and one thread."""

from __future__ import annotations

import logging

import torch

torch.set_num_threads(1)

for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(f"{_name}.utilities.rank_zero").setLevel(logging.ERROR)

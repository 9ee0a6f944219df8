"""Quiet Trainers."""

from __future__ import annotations

import logging

for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(f"{_name}.utilities.rank_zero").setLevel(logging.ERROR)

"""Carrying weights from one model to another, whatever framework either is of."""

from padiff.weights.assign import assign_weight
from padiff.weights.special_init import add_special_init

__all__ = ["add_special_init", "assign_weight"]

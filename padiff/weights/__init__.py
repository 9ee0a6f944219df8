"""Transfer of weights from one model to another, between the frameworks or within one."""

from padiff.weights.assign import assign_weight
from padiff.weights.carried_state import add_special_init
from padiff.weights.start import Started, start_from

__all__ = ["Started", "add_special_init", "assign_weight", "start_from"]

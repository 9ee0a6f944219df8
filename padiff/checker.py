"""Alias of `padiff.check` under the module name of released versions of PaDiff."""

from padiff.check import check_grads, check_params, check_report, check_weights

__all__ = ["check_grads", "check_params", "check_report", "check_weights"]

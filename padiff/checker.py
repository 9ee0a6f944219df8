"""The offline checks under the name of the module where released versions of PaDiff have them."""

from padiff.check import check_grads, check_params, check_report, check_weights

__all__ = ["check_grads", "check_params", "check_report", "check_weights"]

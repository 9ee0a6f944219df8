"""The offline checks under the name of the module where released versions of PaDiff have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padiff.check import check_grads as check_grads
    from padiff.check import check_params as check_params
    from padiff.check import check_report as check_report
    from padiff.check import check_weights as check_weights

__all__ = ["check_grads", "check_params", "check_report", "check_weights"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from padiff import check  # only now: importing this module does nothing

        return getattr(check, name)
    raise AttributeError(f"module 'padiff.checker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

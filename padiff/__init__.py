"""padiff: where do two training runs that should be equal part?

Importing this package imports neither torch nor paddle, and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padiff.align import Alignment as Alignment
    from padiff.align import align as align
    from padiff.check import check_grads as check_grads
    from padiff.check import check_params as check_params
    from padiff.check import check_report as check_report
    from padiff.check import check_weights as check_weights
    from padiff.compare import NoisePolicy as NoisePolicy
    from padiff.compare import Tolerance as Tolerance
    from padiff.compare import compare_runs as compare_runs
    from padiff.dump import open_run as open_run
    from padiff.errors import PadiffError as PadiffError
    from padiff.layer_map import LayerMap as LayerMap
    from padiff.recorder import Recorder as Recorder
    from padiff.recorder import record as record
    from padiff.records import Report as Report
    from padiff.schedule import Schedule as Schedule

__version__ = "0.1.0"

# Where each public name comes from; looked up when first asked for.
_PUBLIC = {
    "Alignment": "padiff.align",
    "LayerMap": "padiff.layer_map",
    "NoisePolicy": "padiff.compare",
    "PadiffError": "padiff.errors",
    "Recorder": "padiff.recorder",
    "Report": "padiff.records",
    "Schedule": "padiff.schedule",
    "Tolerance": "padiff.compare",
    "align": "padiff.align",
    "check_grads": "padiff.check",
    "check_params": "padiff.check",
    "check_report": "padiff.check",
    "check_weights": "padiff.check",
    "compare_runs": "padiff.compare",
    "open_run": "padiff.dump",
    "record": "padiff.recorder",
}

__all__ = [
    "Alignment",
    "LayerMap",
    "NoisePolicy",
    "PadiffError",
    "Recorder",
    "Report",
    "Schedule",
    "Tolerance",
    "__version__",
    "align",
    "check_grads",
    "check_params",
    "check_report",
    "check_weights",
    "compare_runs",
    "open_run",
    "record",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'padiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

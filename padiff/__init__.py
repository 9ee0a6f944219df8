"""padiff: where do two training runs that should be equal part?

Importing this package imports neither torch nor paddle, and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padiff.align import Alignment as Alignment
    from padiff.auto import auto_diff as auto_diff
    from padiff.check import check_grads as check_grads
    from padiff.check import check_params as check_params
    from padiff.check import check_report as check_report
    from padiff.check import check_weights as check_weights
    from padiff.compare import NoisePolicy as NoisePolicy
    from padiff.compare import Tolerance as Tolerance
    from padiff.compare import compare_runs as compare_runs
    from padiff.dump import open_run as open_run
    from padiff.errors import PadiffError as PadiffError
    from padiff.proxy import ProxyModel as ProxyModel
    from padiff.proxy import check_dataloader as check_dataloader
    from padiff.proxy import create_model as create_model
    from padiff.proxy import get_dump_root_path as get_dump_root_path
    from padiff.proxy import set_dump_root_path as set_dump_root_path
    from padiff.recorder import Recorder as Recorder
    from padiff.recorder import record as record
    from padiff.recorder.detail import Detail as Detail
    from padiff.recorder.schedule import Schedule as Schedule
    from padiff.records import Report as Report
    from padiff.weights import add_special_init as add_special_init
    from padiff.weights import assign_weight as assign_weight
    from padiff.weights.found_map import LayerMap as LayerMap

__version__ = "0.1.0"

# Where each public name comes from; looked up when first asked for.
_PUBLIC = {
    "Alignment": "padiff.align",
    "Detail": "padiff.recorder.detail",
    "LayerMap": "padiff.weights.found_map",
    "NoisePolicy": "padiff.compare",
    "PadiffError": "padiff.errors",
    "ProxyModel": "padiff.proxy",
    "Recorder": "padiff.recorder",
    "Report": "padiff.records",
    "Schedule": "padiff.recorder.schedule",
    "Tolerance": "padiff.compare",
    "add_special_init": "padiff.weights",
    "assign_weight": "padiff.weights",
    "auto_diff": "padiff.auto",
    "check_dataloader": "padiff.proxy",
    "check_grads": "padiff.check",
    "check_params": "padiff.check",
    "check_report": "padiff.check",
    "check_weights": "padiff.check",
    "compare_runs": "padiff.compare",
    "create_model": "padiff.proxy",
    "get_dump_root_path": "padiff.proxy",
    "open_run": "padiff.dump",
    "record": "padiff.recorder",
    "set_dump_root_path": "padiff.proxy",
}

__all__ = [
    "Alignment",
    "Detail",
    "LayerMap",
    "NoisePolicy",
    "PadiffError",
    "ProxyModel",
    "Recorder",
    "Report",
    "Schedule",
    "Tolerance",
    "__version__",
    "add_special_init",
    "assign_weight",
    "auto_diff",
    "check_dataloader",
    "check_grads",
    "check_params",
    "check_report",
    "check_weights",
    "compare_runs",
    "create_model",
    "get_dump_root_path",
    "open_run",
    "record",
    "set_dump_root_path",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'padiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

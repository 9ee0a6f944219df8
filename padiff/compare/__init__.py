"""Measuring pairs, judging diffs, and comparing whole runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from padiff.compare.comparison import RunComparison
    from padiff.compare.judge.noise import NoisePolicy
    from padiff.compare.judge.policy import Policy, Tolerance
    from padiff.compare.runs import compare_runs

__all__ = ["NoisePolicy", "Policy", "RunComparison", "Tolerance", "compare_runs"]

# Imported when they are asked for: a process that only measures starts in half the time without what explains.
_MODULES = {
    "NoisePolicy": "judge.noise",
    "Policy": "judge.policy",
    "RunComparison": "comparison",
    "Tolerance": "judge.policy",
    "compare_runs": "runs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

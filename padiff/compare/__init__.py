"""Measuring pairs, judging diffs, and comparing whole runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from padiff.system.lazily import names_from

if TYPE_CHECKING:
    from padiff.compare.comparison import RunComparison
    from padiff.compare.judge.policy import NoisePolicy, Policy, Tolerance
    from padiff.compare.runs import compare_runs
else:
    # Imported on first access: a process that only measures starts in half the time without the other modules.
    __getattr__ = names_from(
        __name__,
        {
            "NoisePolicy": "padiff.compare.judge.policy",
            "Policy": "padiff.compare.judge.policy",
            "RunComparison": "padiff.compare.comparison",
            "Tolerance": "padiff.compare.judge.policy",
            "compare_runs": "padiff.compare.runs",
        },
    )

__all__ = ["NoisePolicy", "Policy", "RunComparison", "Tolerance", "compare_runs"]

"""Measuring pairs, judging diffs, and comparing whole runs."""

from padiff.compare.measure import measure
from padiff.compare.noise import NoisePolicy
from padiff.compare.runs import RunComparison, compare_runs
from padiff.compare.tolerance import Policy, Tolerance

__all__ = ["NoisePolicy", "Policy", "RunComparison", "Tolerance", "compare_runs", "measure"]

"""Measuring pairs, judging diffs, and comparing whole runs."""

from padiff.compare.comparison import RunComparison
from padiff.compare.judge.noise import NoisePolicy
from padiff.compare.judge.policy import Policy, Tolerance
from padiff.compare.runs import compare_runs

__all__ = ["NoisePolicy", "Policy", "RunComparison", "Tolerance", "compare_runs"]

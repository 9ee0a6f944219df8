"""Policies that pass or fail diffs, and their model of rounding."""

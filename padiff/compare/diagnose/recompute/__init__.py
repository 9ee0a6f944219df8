"""Recomputing a recorded step in float64, each side from its own records."""

"""Pairs of models that different people wrote, from libraries that can be installed."""

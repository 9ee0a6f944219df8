"""Sketches: a few hundred bytes per tensor from which the distance between two tensors is estimated."""

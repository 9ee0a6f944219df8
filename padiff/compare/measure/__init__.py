"""Measurement of the distance between two tensors."""

"""Arithmetic of the distance between two tensors."""

"""How far two tensors are apart: the arithmetic."""

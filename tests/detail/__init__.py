"""Levels of detail: sketches, packed steps, the size budget, and comparing what is left."""

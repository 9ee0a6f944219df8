"""Sketches: a few hundred bytes of a tensor that tell how far it is from another one."""

"""Golden runs: a few steps of a training in at most 200 kB, with the rounding of each tensor, measured.

A later run of the training is sorted into `EQUAL` (to the bit), `DRIFT` (rounding explains all) or `FAULT`.
"""

"""Declared differences of two runs: optimizers, clipping, loss, train or eval mode, settings of layers."""

from padiff.compare.declared.run import Declared, at_the_start

__all__ = ["Declared", "at_the_start"]

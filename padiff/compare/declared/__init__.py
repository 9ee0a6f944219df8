"""What two runs declare differently: optimizers, clipping, loss, train or eval, the settings of layers."""

from padiff.compare.declared.differences import Declared, at_the_start

__all__ = ["Declared", "at_the_start"]

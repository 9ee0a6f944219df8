"""Checks that many tensors and layers of torch have not changed, in few calls for all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from padiff.frameworks.torch.calls import original
from padiff.system.guard import reraise_from_signal_handler

# An undocumented name of torch, so it may be missing.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

# The smallest size of a tensor, in bytes, for which the size of its storage is checked. If a smaller tensor was freed
# and a smaller block allocated at the same address, reading beyond the block still stays in the process's memory.
_LARGE = 1 << 15
# Number of guards to remember: the same tensors are checked inside and outside of autocast.
_MOST = 4

_Tensor = torch.Tensor
_TRAINS = attrgetter("requires_grad")
#: Classes of tensors whose memory is their own.
OWN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def _ordinary(tensor: Any) -> bool:
    # torch's guards crash the process on a nested tensor.
    return type(tensor) in OWN_CLASSES and tensor.layout is torch.strided and not tensor.is_nested


class Kinds:
    """Properties of a list of tensors, checked by the guards of `torch.compile`.

    The properties are class, dtype, device, shape, strides, trainability, pending negation or conjugation, and
    function transforms.
    """

    __slots__ = ("_guards",)

    def __init__(self) -> None:
        self._guards: list[Any] = []

    def known(self, tensors: Sequence[Any]) -> bool:
        """Return True if the tensors have the same properties as a list passed to `learn`; `False` if unknown."""
        return any(guard.check(*tensors) for guard in self._guards)

    def learn(self, tensors: Sequence[Any]) -> None:
        """Remember the current properties of the tensors, if all of them are ordinary strided tensors."""
        if TensorGuards is None or self.known(tensors) or not all(map(_ordinary, tensors)):
            return
        try:
            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if guard.check(*tensors):
                self._guards = [guard, *self._guards[: _MOST - 1]]
        except Exception as error:  # a torch version with other guards
            reraise_from_signal_handler(error)
            return


class TensorsWatch:
    """A watch of tensors; see `padiff.frameworks.values.Tensors.watch`."""

    __slots__ = ("_kinds", "_large", "_memory", "_tensors", "_trains")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors, self._kinds = tensors, Kinds()
        #: Tensors whose storage size is checked.
        self._large: list[Any] = []
        #: The recorded addresses and storage sizes; `None` if they are unknown.
        self._memory: Any = None
        self._trains: list[bool] = []

    def note(self, unchanged: bool = False) -> bool:
        self._memory = None
        if not unchanged:
            # The guards do not tell which of several remembered lists matched, so forget the others.
            self._kinds = Kinds()
        try:
            self._large = [tensor for tensor in self._tensors if tensor.nbytes >= _LARGE]
            self._kinds.learn(self._tensors)
            self._trains = list(map(_TRAINS, self._tensors))
            self._memory = self._now()
        except Exception as error:  # lazy, or a kind without memory
            reraise_from_signal_handler(error)
            return False
        return True

    def same(self) -> bool:
        try:
            if self._memory is None or not self._kinds.known(self._tensors) or self._now() != self._memory:
                return False
            # Without grad mode, the guards may ignore which tensors are trainable.
            return torch.is_grad_enabled() or list(map(_TRAINS, self._tensors)) == self._trains
        except Exception as error:  # the memory does not exist any more
            reraise_from_signal_handler(error)
            return False

    def _now(self) -> Any:
        lengths = [tensor.untyped_storage().nbytes() for tensor in self._large]
        return list(map(_Tensor.data_ptr, self._tensors)), lengths


#: The dictionaries of a layer's sublayers and own tensors.
_HELD = attrgetter("_modules", "_parameters", "_buffers")
_SHAPE = attrgetter("shape")


def held(layers: Sequence[Any]) -> list[Any]:
    """Return the sublayers and own tensors of layers as comparable lists, without a Python loop step per layer.

    Raises:
        Exception: a lazy parameter has no shape.
    """
    classes = list(map(type, layers))
    if any(each.__name__ == "OptimizedModule" for each in set(classes)):
        layers = [original(layer) for layer in layers]
    holders = list(chain.from_iterable(map(_HELD, layers)))
    values = list(chain.from_iterable(map(dict.values, holders)))
    parameters = [each for each in chain.from_iterable(map(dict.values, holders[1::3])) if each is not None]
    names, counts = list(chain.from_iterable(holders)), list(map(len, holders))
    # A lazy parameter that is initialized changes its class but stays the same object.
    return [classes, names, counts, list(map(id, values)), list(map(type, values)), list(map(_SHAPE, parameters))]

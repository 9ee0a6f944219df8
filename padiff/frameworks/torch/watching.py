"""Whether many tensors and layers of torch are what they were: asked in a few calls, none of which is of one alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from padiff.frameworks.torch.calls import original
from padiff.system.guard import reraise_from_signal_handler

# None of torch's documented names.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

# Bytes of a tensor from which on it is asked how far its memory reaches. Where less memory has taken the place of what
# was freed, at the same address, what lies beyond its end is still the process's.
_LARGE = 1 << 15
# Kinds that are kept in mind: the same tensors are asked inside of autocast and outside of it.
_MOST = 4

_Tensor = torch.Tensor
_TRAINS = attrgetter("requires_grad")
#: Classes of tensors whose memory is their own.
OWN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def _ordinary(tensor: Any) -> bool:
    # torch ends the process when it is to learn what a nested tensor is.
    return type(tensor) in OWN_CLASSES and tensor.layout is torch.strided and not tensor.is_nested


class Kinds:
    """What tensors are: class, dtype, device, shape, strides, whether they are trainable, have a sign still to be
    changed, or are being transformed. It is what `torch.compile` asks of the arguments of what it has compiled.
    """

    __slots__ = ("_guards",)

    def __init__(self) -> None:
        self._guards: list[Any] = []

    def known(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors are what as many others were of which that was learnt; `False` where it can't be said."""
        return any(guard.check(*tensors) for guard in self._guards)

    def learn(self, tensors: Sequence[Any]) -> None:
        """Learn what tensors are now, if they are ordinary ones."""
        if TensorGuards is None or self.known(tensors) or not all(map(_ordinary, tensors)):
            return
        try:
            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if guard.check(*tensors):
                self._guards = [guard, *self._guards[: _MOST - 1]]
        except Exception as error:  # of a version that asks otherwise
            reraise_from_signal_handler(error)
            return


class TensorsWatch:
    """Watches tensors: see `padiff.frameworks.values.Tensors.watch`."""

    __slots__ = ("_kinds", "_large", "_memory", "_tensors", "_trains")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors, self._kinds = tensors, Kinds()
        #: Those that are asked how far their memory reaches.
        self._large: list[Any] = []
        #: Where it was; `None`: not to be said.
        self._memory: Any = None
        self._trains: list[bool] = []

    def note(self, unchanged: bool = False) -> bool:
        self._memory = None
        if not unchanged:
            # Which of several kinds they were is not said.
            self._kinds = Kinds()
        try:
            self._large = [tensor for tensor in self._tensors if tensor.nbytes >= _LARGE]
            self._kinds.learn(self._tensors)
            self._trains = list(map(_TRAINS, self._tensors))
            self._memory = self._now()
        except Exception as error:  # lazy, or of a kind that has no memory
            reraise_from_signal_handler(error)
            return False
        return True

    def same(self) -> bool:
        try:
            if self._memory is None or not self._kinds.known(self._tensors) or self._now() != self._memory:
                return False
            # Where nothing is to be trained, kinds need not tell which tensors are.
            return torch.is_grad_enabled() or list(map(_TRAINS, self._tensors)) == self._trains
        except Exception as error:  # of a kind that has no memory by now
            reraise_from_signal_handler(error)
            return False

    def _now(self) -> Any:
        lengths = [tensor.untyped_storage().nbytes() for tensor in self._large]
        return list(map(_Tensor.data_ptr, self._tensors)), lengths


#: What a layer holds and owns.
_HELD = attrgetter("_modules", "_parameters", "_buffers")
_SHAPE = attrgetter("shape")


def held(layers: Sequence[Any]) -> list[Any]:
    """What layers hold and own, without a step of Python's for each of them.

    Raises:
        Exception: lazy parameters have no shape.
    """
    classes = list(map(type, layers))
    if any(each.__name__ == "OptimizedModule" for each in set(classes)):
        layers = [original(layer) for layer in layers]
    holders = list(chain.from_iterable(map(_HELD, layers)))
    values = list(chain.from_iterable(map(dict.values, holders)))
    parameters = [each for each in chain.from_iterable(map(dict.values, holders[1::3])) if each is not None]
    names, counts = list(chain.from_iterable(holders)), list(map(len, holders))
    # Lazy parameters become others by getting another class.
    return [classes, names, counts, list(map(id, values)), list(map(type, values)), list(map(_SHAPE, parameters))]

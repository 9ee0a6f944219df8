"""Whether many tensors and layers of torch are what they were: asked in a few calls, none of which is of one alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from padiff.frameworks.torch.calls import original

# None of torch's documented names.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

# Bytes of a tensor from which on it is asked how far its memory reaches. Where less memory has taken the place of what
# was freed, at the same address, what lies beyond its end is still the process's.
_LARGE = 1 << 15
# Kinds that are kept in mind: the same tensors are asked inside of autocast and outside of it.
_MOST = 4
# Tensors that are asked at a time, one thing after the other: of more, the first ones have left the processor's cache.
_AT_ONCE = 250

_Tensor = torch.Tensor
_TRAINS = attrgetter("requires_grad")
#: Classes of tensors whose memory is their own.
OWN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def in_turn(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    """Some tensors at a time."""
    return [tensors[start : start + _AT_ONCE] for start in range(0, len(tensors), _AT_ONCE)]


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
        except Exception:  # of a version that asks otherwise
            return


class _Some:
    """Some of the tensors that are watched."""

    __slots__ = ("_kinds", "_large", "_memory", "_tensors", "_trains")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors, self._kinds = tensors, Kinds()
        #: Those that are asked how far their memory reaches.
        self._large: list[Any] = []
        #: Where it was; `None`: not to be said.
        self._memory: Any = None
        self._trains: list[bool] = []

    def note(self, unchanged: bool) -> None:
        self._memory = None
        if not unchanged:
            # Which of several kinds they were is not said.
            self._kinds = Kinds()
        try:
            self._large = [tensor for tensor in self._tensors if tensor.nbytes >= _LARGE]
            self._kinds.learn(self._tensors)
            self._trains = list(map(_TRAINS, self._tensors))
            self._memory = self._now()
        except Exception:  # lazy, or of a kind that has no memory
            return

    def same(self) -> bool:
        if self._memory is None or not self._kinds.known(self._tensors) or self._now() != self._memory:
            return False
        # Where nothing is to be trained, kinds don't tell which tensors are.
        return torch.is_grad_enabled() or list(map(_TRAINS, self._tensors)) == self._trains

    def _now(self) -> Any:
        lengths = [tensor.untyped_storage().nbytes() for tensor in self._large]
        return list(map(_Tensor.data_ptr, self._tensors)), lengths


class TensorsWatch:
    """See `padiff.frameworks.values.Tensors.watch`."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._some = [_Some(some) for some in in_turn(tensors)]

    def note(self, unchanged: bool = False) -> None:
        for some in self._some:
            some.note(unchanged)

    def same(self) -> bool:
        try:
            return all(some.same() for some in self._some)
        except Exception:  # of a kind that has no memory by now
            return False


#: What a layer holds and owns.
_HELD = attrgetter("_modules", "_parameters", "_buffers")
_SHAPE = attrgetter("shape")


class LayersWatch:
    """See `padiff.frameworks.base.Layers.watch`."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._some = in_turn(layers)
        self._noted: list[Any] = []

    def note(self, unchanged: bool = False) -> None:
        try:
            self._noted = [_held(some) for some in self._some]
        except Exception:  # lazy parameters have no shape
            self._noted = []

    def same(self) -> bool:
        try:
            return bool(self._noted) and all(_held(some) == noted for some, noted in zip(self._some, self._noted))
        except Exception:  # likewise
            return False


def _held(layers: Sequence[Any]) -> list[Any]:
    """What layers hold and own, without a step of Python's for each of them."""
    classes = list(map(type, layers))
    if any(each.__name__ == "OptimizedModule" for each in set(classes)):
        layers = [original(layer) for layer in layers]
    holders = list(chain.from_iterable(map(_HELD, layers)))
    held = list(chain.from_iterable(map(dict.values, holders)))
    parameters = [each for each in chain.from_iterable(map(dict.values, holders[1::3])) if each is not None]
    # Lazy parameters become others by getting another class.
    of = [classes, list(map(len, holders)), list(map(id, held)), list(map(type, held)), list(map(_SHAPE, parameters))]
    return [*of, list(chain.from_iterable(holders))]

"""Seeing the values of torch's tensors as arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from padiff.frameworks.hooking import TRANSFORMED
from padiff.frameworks.torch.watching import OWN_CLASSES, Kinds
from padiff.frameworks.values import UncopiedError
from padiff.frameworks.watching import in_turn
from padiff.sketches.cuts import Cut, Form, cut_of, form_of

# numpy has no such dtypes, and torch's .numpy() raises for them: their bits are seen as integers of the same width.
_BITS = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
#: Dtypes that numpy has too and calculates with as torch does.
PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool})
_OTHERS = (torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128)
# Not every version of torch has these.
_UNSIGNED = [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]


def _spelt(dtype: torch.dtype) -> tuple[str, int, bool]:
    size = dtype.itemsize
    name = f"int{8 * size}" if dtype in _BITS else str(dtype).removeprefix("torch.")
    return np.dtype(name).str, size, dtype.is_complex


#: By dtype: its name in numpy's array interface, bytes of an element, whether it is complex.
_SPELT = {dtype: _spelt(dtype) for dtype in (*PLAIN, *_OTHERS, *_UNSIGNED, *_BITS)}

#: By what numpy calls them, the dtypes that it calculates with as torch does.
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN}


class _Memory:
    """A tensor's memory, as numpy asks for it. It holds the storage, not the tensor: so it keeps no graph.

    The storage keeps the memory, until somebody resizes it: then the memory is another, and this one is freed.
    """

    storage: Any
    __array_interface__: dict[str, Any]
    __slots__ = ("__array_interface__", "storage")


@lru_cache(maxsize=4096)
def _strided(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> tuple[tuple[int, ...], int]:
    """Strides in bytes, and bytes from the first element to the end of the last."""
    strides = tuple(size * each for each in stride)
    return strides, size + sum((length - 1) * each for length, each in zip(shape, strides))


def memory_of(tensor: Any) -> np.ndarray | None:
    """A tensor's own memory on the CPU as an array, where there is such memory; else `None`.

    Not by ``.numpy()``: after that torch refuses for good to resize the tensor's storage, and training code that does
    (the observers of quantization-aware training, sharding) would fail. So the array is to be read at once: whoever
    keeps it has to look before each reading whether the tensor still has this memory (`memory`).
    """
    dtype = tensor.dtype
    spelt = _SPELT.get(dtype)
    if spelt is None:
        return None
    try:
        name, size, is_complex = spelt
        if tensor.is_neg() or (is_complex and tensor.is_conj()):
            return None  # a sign still to be changed
        storage, shape = tensor.untyped_storage(), tensor.shape
        start = storage.data_ptr()
        first = size * tensor.storage_offset()
        interface = {"version": 3, "typestr": name, "data": (start + first, False), "shape": shape}
        if tensor.is_contiguous():
            end = first + tensor.nbytes
        else:
            interface["strides"], length = _strided(shape, tensor.stride(), size)
            end = first + length
        # A null pointer with an offset is no null pointer: only the storage says whether there is memory, and how much.
        if (not start or end > storage.nbytes()) and 0 not in shape:
            return None  # made of other tensors, or freed, or shrunk
        held = _Memory()
        held.storage, held.__array_interface__ = storage, interface
        array = np.asarray(held)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None  # sparse, quantized, nested, or of a kind that has no memory of its own
    bits = _BITS.get(dtype)
    return array if bits is None else array.view(bits)


@lru_cache(maxsize=4096)
def _form(shape: torch.Size, dtype: torch.dtype) -> Form:
    return form_of(np.dtype(_SPELT[dtype][0]), str(dtype).removeprefix("torch."), tuple(shape))


def cut(tensor: Any, transposed: bool = False) -> Cut | None:
    """Where the sample of a tensor is, if its memory is plain memory of the CPU."""
    dtype = tensor.dtype
    if not tensor.is_cpu or dtype not in PLAIN:
        return None
    try:
        if transposed or not tensor.is_contiguous():
            array = memory_of(tensor)
            return None if array is None else cut_of(array, transposed)
        if tensor.is_neg():
            return None
        form, start, storage = _form(tensor.shape, dtype), tensor.data_ptr(), tensor.untyped_storage()
        memory = storage.data_ptr()
        if (not memory or start + form.nbytes > memory + storage.nbytes()) and form.nbytes:
            return None  # as `memory_of` says
        return form.at(start)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None


def form(dtype: str, shape: tuple[int, ...]) -> Form | None:
    """How a contiguous tensor lies in memory of the CPU; `None` where it has none that is plain."""
    of_torch = _NAMED.get(dtype)
    return None if of_torch is None or 0 in shape else _form(torch.Size(shape), of_torch)


def address(tensor: Any, form: Form) -> int:
    """Where the memory of a tensor begins, if it is contiguous on the CPU and of a form; else 0.

    For tensors that the framework itself is about to read all of: a plain one is not asked how far its memory reaches.
    torch would make an object of Python's for each storage, which the garbage collector goes through as long as the
    tensor lives: in a step of many small layers that takes longer than all else that is done with their gradients.
    """
    try:
        if tensor.shape != form.shape or tensor.dtype is not _NAMED.get(form.dtype) or not tensor.is_cpu:
            return 0
        if not tensor.is_contiguous() or tensor.is_neg():
            return 0
        start: int = tensor.data_ptr()
        # A null pointer with an offset is no null pointer: only the storage says whether there is memory.
        if type(tensor) not in OWN_CLASSES or tensor.storage_offset():
            storage = tensor.untyped_storage()
            if start + form.nbytes > storage.data_ptr() + storage.nbytes() and form.nbytes:
                return 0
        return start
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return 0


def locator(forms: Sequence[Form]) -> Callable[[Sequence[Any]], list[int] | None]:
    some = [(Kinds(), each) for each in in_turn(forms)]

    def locate(tensors: Sequence[Any]) -> list[int] | None:
        found: list[int] = []
        try:
            for (kinds, of), these in zip(some, in_turn(tensors)):
                found += _located(kinds, of, these)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            return None
        return None if 0 in found else found

    return locate


def _located(kinds: Kinds, forms: Sequence[Form], tensors: Sequence[Any]) -> list[int]:
    """The address of each tensor; ``kinds``: what those were that were of these forms."""
    own = torch.Tensor
    if kinds.known(tensors) and not any(map(own.storage_offset, tensors)):
        return list(map(own.data_ptr, tensors))
    found = list(map(address, tensors, forms))
    if 0 not in found:
        kinds.learn(tensors)
    return found


def memory(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor's memory is, how far it reaches, and how the tensor lies in it; for comparing with a later one."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.dtype, tensor.shape, tensor.stride()


def _unreadable(tensor: Any) -> str:
    """Why a tensor has no memory that could be read; empty where it has some, on whatever device."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return ""  # sparse, say: made of tensors that have memory
    if not tensor.numel():
        return ""
    length, size = storage.nbytes(), tensor.element_size()
    end = size * tensor.storage_offset() + _strided(tensor.shape, tensor.stride(), size)[1]
    try:
        start = storage.data_ptr()
    except RuntimeError:  # torch calls it an invalid storage
        start = 0
    if end > length:
        return f"its memory was freed: {length} bytes are left of the {end} that it needs"
    return "" if start else f"tensors of the type {type(tensor).__name__} have no memory of their own"


def _arrived(tensor: Any) -> Any:
    """What a collective gives that is still under way (tensor parallelism), waited for; any other tensor itself."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    waiting = getattr(collectives, "AsyncCollectiveTensor", None)
    return tensor.wait() if waiting is not None and isinstance(tensor, waiting) else tensor


# Looked up once: it is asked in each call of a layer.
_interpreters = torch._C._functorch.peek_interpreter_stack


def transforming() -> bool:
    """Whether code that runs now is being transformed by ``torch.func`` (vmap, grad, jvp, ...)."""
    return _interpreters() is not None


def readable(tensor: Any) -> Any:
    """The tensor, or what it stands for, whose memory can be read on its device.

    Raises:
        UncopiedError: there is no such memory.
    """
    functorch = torch._C._functorch
    # Inside, of any tensor: whatever is calculated from it there is of the transformation, and ends with it.
    if transforming() or functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        raise UncopiedError(TRANSFORMED)
    if tensor.is_nested:
        raise UncopiedError("nested tensors have no one shape")
    if tensor.is_meta:
        raise UncopiedError("tensors on the meta device have no values")
    tensor = _arrived(tensor)
    reason = _unreadable(tensor)
    if reason:
        raise UncopiedError(reason)
    return tensor


def array_of(tensor: Any) -> np.ndarray:
    """The tensor's values as an array, wherever they are and however they lie; on the CPU a view of live memory.

    Raises:
        UncopiedError: of this kind of tensor there is no such array.
    """
    tensor = readable(tensor).detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    array = memory_of(tensor)
    return np.asarray(tensor.numpy()) if array is None else array  # of dtypes that are rare

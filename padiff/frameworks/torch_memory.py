"""Seeing the values of torch's tensors as arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from padiff.frameworks.base import TRANSFORMED, UncopiedError

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


def _spelt(dtype: torch.dtype) -> tuple[str, int]:
    size = torch.empty((), dtype=dtype).element_size()
    name = f"int{8 * size}" if dtype in _BITS else str(dtype).removeprefix("torch.")
    return np.dtype(name).str, size


#: By dtype: its name in numpy's array interface, and bytes of an element.
_SPELT = {dtype: _spelt(dtype) for dtype in (*PLAIN, *_OTHERS, *_UNSIGNED, *_BITS)}


class _Memory:
    """A tensor's memory, as numpy asks for it. It holds the storage, not the tensor: so it keeps no graph."""

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, storage: Any, interface: dict[str, Any]) -> None:
        self._storage, self.__array_interface__ = storage, interface


def memory_of(tensor: Any) -> np.ndarray | None:
    """A tensor's own memory on the CPU as an array, where there is such memory; else `None`.

    Not by ``.numpy()``: after that torch refuses for good to resize the tensor's storage, and training code that does
    (the observers of quantization-aware training) would fail. Whoever keeps the array has to look whether the tensor
    still has this memory.
    """
    dtype = tensor.dtype
    spelt = _SPELT.get(dtype)
    if spelt is None:
        return None
    try:
        address = tensor.data_ptr()
        if tensor.is_neg() or (not address and tensor.numel()) or (dtype.is_complex and tensor.is_conj()):
            return None  # a sign still to be changed; a tensor made of others
        name, size = spelt
        interface = {"version": 3, "typestr": name, "data": (address, False), "shape": tuple(tensor.shape)}
        if not tensor.is_contiguous():
            interface["strides"] = tuple([size * stride for stride in tensor.stride()])
        array = np.asarray(_Memory(tensor.untyped_storage(), interface))
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None  # sparse, quantized, nested, or of a kind that has no memory of its own
    bits = _BITS.get(dtype)
    return array if bits is None else array.view(bits)


def transforming() -> bool:
    """Whether code that runs now is being transformed by ``torch.func`` (vmap, grad, jvp, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse(tensor: Any) -> None:
    """Raise `UncopiedError` for a tensor of whose kind no copy can be made."""
    functorch = torch._C._functorch
    # Inside, of any tensor: whatever is calculated from it there is of the transformation, and ends with it.
    if transforming() or functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        raise UncopiedError(TRANSFORMED)
    if tensor.is_nested:
        raise UncopiedError("nested tensors have no one shape")
    if tensor.is_meta:
        raise UncopiedError("tensors on the meta device have no values")


def array_of(tensor: Any) -> np.ndarray:
    """The tensor's values as an array, wherever they are and however they lie; on the CPU a view of live memory.

    Raises:
        UncopiedError: of this kind of tensor there is no such array.
    """
    refuse(tensor)
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    array = memory_of(tensor)
    if array is not None:
        return array
    if tensor.numel() and not tensor.data_ptr():
        raise UncopiedError(f"a {type(tensor).__name__} has no memory of its own")
    return np.asarray(tensor.numpy())  # of dtypes that are rare

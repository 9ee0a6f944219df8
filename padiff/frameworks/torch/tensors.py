"""Tensors of PyTorch; see `padiff.frameworks.base.Tensors`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any

import ml_dtypes
import numpy as np
import torch

from padiff.frameworks.base import Each, UncopiedError, in_turn
from padiff.frameworks.hooking import TRANSFORMED
from padiff.frameworks.torch.calls import OWN_CLASSES, Kinds, TensorsWatch, capturing
from padiff.sketches import sketch
from padiff.sketches.sketch import BLOCK, ELEMENTS, Cut, Form, block_rows, cut_of, form_of

# Dtypes that numpy lacks, and for which torch's .numpy() raises: their memory is read as integers of the same width.
_BITS = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
#: Dtypes that numpy has too, with the same arithmetic.
PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool})
_OTHERS = (torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128)
# Not every version of torch has these.
_UNSIGNED = [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]


def _spelt(dtype: torch.dtype) -> tuple[str, int, bool]:
    size = dtype.itemsize
    name = f"int{8 * size}" if dtype in _BITS else str(dtype).removeprefix("torch.")
    return np.dtype(name).str, size, dtype.is_complex


#: By dtype: its name in numpy's array interface, bytes per element, True if it is complex.
_SPELT = {dtype: _spelt(dtype) for dtype in (*PLAIN, *_OTHERS, *_UNSIGNED, *_BITS)}

#: The `PLAIN` dtypes by their numpy names.
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN}


class _Memory:
    """A tensor's memory with numpy's array interface. The object holds the storage, not the tensor or its graph.

    The storage keeps the memory alive until the storage is resized: then this memory is freed.
    """

    storage: Any
    __array_interface__: dict[str, Any]
    __slots__ = ("__array_interface__", "storage")


@lru_cache(maxsize=4096)
def _strided(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> tuple[tuple[int, ...], int]:
    """Return the strides in bytes, and the number of bytes from the first element to the end of the last."""
    strides = tuple(size * each for each in stride)
    return strides, size + sum((length - 1) * each for length, each in zip(shape, strides))


def memory_of(tensor: Any) -> np.ndarray | None:
    """Return a CPU tensor's own memory as an array; `None` if the tensor has no such memory.

    ``.numpy()`` would not do: after it torch refuses to resize the tensor's storage, so training code that resizes it
    (observers of quantization-aware training, sharding) would fail. Read the array at once; before any later read,
    check that the tensor still has the same `memory`.
    """
    dtype = tensor.dtype
    spelt = _SPELT.get(dtype)
    if spelt is None:
        return None
    try:
        name, size, is_complex = spelt
        if tensor.is_neg() or (is_complex and tensor.is_conj()):
            return None  # a lazy negation or conjugation is pending
        storage, shape = tensor.untyped_storage(), tensor.shape
        start = storage.data_ptr()
        first = size * tensor.storage_offset()
        interface = {"version": 3, "typestr": name, "data": (start + first, False), "shape": shape}
        if tensor.is_contiguous():
            end = first + tensor.nbytes
        else:
            interface["strides"], length = _strided(shape, tensor.stride(), size)
            end = first + length
        # With an offset, the address of missing memory is not null, so check the address and size of the storage.
        if (not start or end > storage.nbytes()) and 0 not in shape:
            return None  # composed of other tensors, freed, or shrunk
        owner = _Memory()
        owner.storage, owner.__array_interface__ = storage, interface
        array = np.asarray(owner)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None  # sparse, quantized, nested, or a subclass without memory of its own
    bits = _BITS.get(dtype)
    return array if bits is None else array.view(bits)


@lru_cache(maxsize=4096)
def _form(shape: torch.Size, dtype: torch.dtype) -> Form:
    return form_of(np.dtype(_SPELT[dtype][0]), str(dtype).removeprefix("torch."), tuple(shape))


def cut(tensor: Any, transposed: bool = False) -> Cut | None:
    """Return the position of a tensor's sample if its memory is plain CPU memory, else `None`."""
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
            return None  # freed or shrunk, as in `memory_of`
        return form.at(start)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None


def form(dtype: str, shape: tuple[int, ...]) -> Form | None:
    """Return the memory layout of a contiguous CPU tensor; `None` for an empty tensor or an unsupported dtype."""
    of_torch = _NAMED.get(dtype)
    return None if of_torch is None or 0 in shape else _form(torch.Size(shape), of_torch)


def address(tensor: Any, form: Form) -> int:
    """Return the address of a tensor's memory if the tensor is contiguous on the CPU and of this form, else 0.

    Call this only for tensors that torch itself is about to read: the size of an ordinary tensor's storage is not
    checked. The check would create a Python object per storage, which lives as long as the tensor and slows down the
    garbage collector: with many small layers this would cost more time than all other work on their gradients.
    """
    try:
        if tensor.shape != form.shape or tensor.dtype is not _NAMED.get(form.dtype) or not tensor.is_cpu:
            return 0
        if not tensor.is_contiguous() or tensor.is_neg():
            return 0
        start: int = tensor.data_ptr()
        # With an offset, the address of missing memory is not null, so check the storage.
        if type(tensor) not in OWN_CLASSES or tensor.storage_offset():
            storage = tensor.untyped_storage()
            if start + form.nbytes > storage.data_ptr() + storage.nbytes() and form.nbytes:
                return 0
        return start
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return 0


def locator(forms: Sequence[Form]) -> Callable[[Sequence[Any]], list[int] | None]:
    chunks = [(Kinds(), each) for each in in_turn(forms)]

    def locate(tensors: Sequence[Any]) -> list[int] | None:
        addresses: list[int] = []
        try:
            for (kinds, of), these in zip(chunks, in_turn(tensors)):
                addresses += _located(kinds, of, these)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            return None
        return None if 0 in addresses else addresses

    return locate


def _located(kinds: Kinds, forms: Sequence[Form], tensors: Sequence[Any]) -> list[int]:
    """Return the address of each tensor; ``kinds`` remembers tensors that had these forms, to skip their checks."""
    tensor_class = torch.Tensor
    if kinds.known(tensors) and not any(map(tensor_class.storage_offset, tensors)):
        return list(map(tensor_class.data_ptr, tensors))
    addresses = list(map(address, tensors, forms))
    if 0 not in addresses:
        kinds.learn(tensors)
    return addresses


def memory(tensor: Any) -> tuple[Any, ...]:
    """Return the address, storage size, dtype, shape and strides of a tensor, to compare with later values."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.dtype, tensor.shape, tensor.stride()


def _unreadable(tensor: Any) -> str:
    """Return the reason why a tensor has no readable memory on its device; empty if it has."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return ""  # for example sparse: composed of tensors that have memory
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
    """Wait for the result of a running collective (tensor parallelism), and return it; any other tensor itself."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    waiting = getattr(collectives, "AsyncCollectiveTensor", None)
    return tensor.wait() if waiting is not None and isinstance(tensor, waiting) else tensor


# Looked up once, because each call of a layer calls this function.
_interpreters = torch._C._functorch.peek_interpreter_stack
# The second is absent from torch 2.2.
_WRAPPED = [
    getattr(torch._C._functorch, name)
    for name in ("is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
    if hasattr(torch._C._functorch, name)
]


def transforming() -> bool:
    """Return True inside a transform of ``torch.func`` (vmap, grad, jvp, ...)."""
    return _interpreters() is not None


def readable(tensor: Any) -> Any:
    """Return the tensor if its memory is readable on its device; wait for the result of a running collective.

    Raises:
        UncopiedError: the tensor has no readable memory.
    """
    # Inside a transform this holds for any tensor: results computed from it there belong to the transform.
    if transforming() or any(belongs(tensor) for belongs in _WRAPPED):
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
    """Return the values of a tensor of any device and layout as an array; for a CPU tensor, a view of its live memory.

    Raises:
        UncopiedError: the tensor has no readable memory.
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
    return np.asarray(tensor.numpy()) if array is None else array  # for rare dtypes


_WIDENED = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


TYPE: type = torch.Tensor


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def trainable(tensor: Any) -> bool:
    return bool(tensor.requires_grad)


def watch(tensors: Sequence[Any]) -> Each:
    return Each([TensorsWatch(chunk) for chunk in in_turn(tensors)])


def all_trainable(tensors: Sequence[Any]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]


def dtype(tensor: Any) -> str:
    return _name(tensor.dtype)


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def device(tensor: Any) -> str:
    return str(tensor.device.type)


def copy(tensor: Any) -> np.ndarray:
    on_cpu = tensor.is_cpu
    array = memory_of(tensor) if on_cpu else None
    if array is None:
        array = array_of(tensor)
    if not on_cpu:
        # .cpu() copied already.
        return np.ascontiguousarray(array).reshape(array.shape)
    return np.array(array, order="C")


def sample(tensor: Any, transposed: bool = False) -> Any:
    array = live(tensor)
    if array is not None:
        return sketch.sample(array, transposed)
    tensor = readable(tensor)
    if tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        return sketch.sample(array_of(tensor), transposed)
    tensor = tensor.detach().t() if transposed else tensor.detach()
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    if flat.numel() <= ELEMENTS:
        return flat.clone()
    first, _ = block_rows(flat.numel())
    blocks = flat[first:]
    blocks = blocks[: blocks.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    return blocks.index_select(0, _on_device(flat.numel(), flat.device)).reshape(-1)


def elements(tensor: Any, chosen: np.ndarray) -> Any:
    array = live(tensor)
    if array is not None:
        return array.reshape(-1)[chosen]
    tensor = readable(tensor).detach()
    if tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        return array_of(tensor).reshape(-1)[chosen]
    return tensor.reshape(-1).index_select(0, torch.from_numpy(chosen).to(tensor.device))


JOINS = True


def pieces(tensor: Any, transposed: bool = False) -> Sequence[Any]:
    tensor = readable(tensor).detach()
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_complex() or tensor.is_neg())
    if transposed or not plain or not tensor.is_contiguous():
        return ()
    flat = tensor.view(-1)
    if flat.numel() <= ELEMENTS:
        return [flat]
    first, rows = block_rows(flat.numel())
    return [flat[start : start + BLOCK] for start in (first + rows * BLOCK).tolist()]


def join(pieces: Sequence[Sequence[Any]]) -> list[Any]:
    joined: dict[int, Any] = {}
    for members in _by_kind([views[0] for views in pieces]).values():
        joined_tensor = torch.cat([view for k in members for view in pieces[k]])
        joined.update(zip(members, joined_tensor.split([sum(map(len, pieces[k])) for k in members])))
    return [joined[k] for k in range(len(pieces))]


def _by_kind(tensors: Sequence[Any]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """Return the indices of the tensors by dtype and device; tensors with the same key can be concatenated."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(place)
    return groups


@lru_cache(maxsize=1024)
def _on_device(size: int, device: torch.device) -> torch.Tensor:
    """Return the rows of the blocks that a sketch samples, as a tensor on the device."""
    return torch.from_numpy(block_rows(size)[1]).to(device)


def live(tensor: Any) -> np.ndarray | None:
    return memory_of(tensor) if tensor.is_cpu and tensor.dtype in PLAIN else None


def same_values(tensor: Any, other: Any) -> bool:
    if tensor.numel() != other.numel() or tensor.dtype != other.dtype or tensor.device != other.device:
        return False
    plain = all(t.layout is torch.strided and not (t.is_conj() or t.is_neg()) for t in (tensor, other))
    if not plain or not tensor.numel() or tensor.data_ptr() != other.data_ptr() or not tensor.data_ptr():
        return False
    return bool(tensor.is_contiguous() and other.is_contiguous())


WRITTEN: Callable[[Any], int] = attrgetter("_version")


def version_of(tensor: Any) -> int:
    try:  # inference tensors keep none, and the error takes a hundred times as long as the question
        return -1 if torch.is_inference_mode_enabled() and tensor.is_inference() else int(tensor._version)
    except RuntimeError:
        return -1


def fetch(tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
    if capturing():
        raise UncopiedError("nothing can be fetched while a CUDA graph is captured")
    moved = []
    for (_, device), members in _by_kind(tensors).items():
        flat = torch.cat([tensors[k] for k in members]).resolve_conj()
        if device.type == "cuda":
            # Into pinned memory, so that the copy runs in parallel to the training.
            landing = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            landing.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            moved.append((members, landing, event))
        else:
            moved.append((members, flat.cpu(), None))
    lengths = [tensor.numel() for tensor in tensors]

    def wait() -> list[np.ndarray]:
        arrays: dict[int, np.ndarray] = {}
        for members, landed, event in moved:
            if event is not None:
                event.synchronize()
            ends = np.cumsum([lengths[k] for k in members])[:-1]
            arrays.update(zip(members, np.split(array_of(landed), ends)))
        return [arrays[k] for k in range(len(lengths))]

    return wait


def write(tensor: Any, array: np.ndarray) -> None:
    if array.dtype.name in _WIDENED:
        array = array.astype(np.float32)  # exact, and torch supports float32
    # A copy, because the tensor must not share memory with the array, nor with the model the array came from.
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.array(array, order="C")))


def like(tensor: Any, array: np.ndarray) -> Any:
    new = torch.empty_like(tensor, requires_grad=False)
    write(new, array)
    return new


def leaf(tensor: Any, array: np.ndarray) -> Any:
    new = like(tensor.detach(), array)
    return new.requires_grad_() if new.is_floating_point() or new.is_complex() else new


def gradients(outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> Sequence[Any]:
    results: Sequence[Any] = torch.autograd.grad(list(outputs), list(inputs), list(seeds), allow_unused=True)
    return results


def make(array: np.ndarray, near: Any) -> Any:
    if array.dtype.name in _WIDENED:
        return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, array.dtype.name)).to(near.device)
    return torch.from_numpy(np.array(array, order="C")).to(near.device)


def in_float64(tensors: Sequence[Any]) -> Callable[[], None]:
    wide = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype is not torch.float64]
    before = [(tensor, tensor.data) for tensor in wide]
    default = torch.get_default_dtype()

    def undo() -> None:
        torch.set_default_dtype(default)
        for tensor, values in before:
            tensor.data = values

    try:
        for tensor, values in before:
            tensor.data = values.double()
        torch.set_default_dtype(torch.float64)
    except BaseException:
        undo()
        raise
    return undo


def rows(tensor: Any, axis: int | None) -> Any:
    tensor = tensor.detach()
    return tensor.reshape(1, -1) if axis is None else tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


def ranked(scores: Any, count: int, largest: bool) -> tuple[Any, Any]:
    values, places = torch.topk(scores, count, dim=-1, largest=largest)
    return values, places


def drawn(name: str, given: Mapping[str, Any]) -> Any:
    values, *_ = given.values()
    device, generator = values.device, given.get("generator")
    if generator is None:
        if device.type == "cuda":
            generator = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        elif device.type == "cpu":
            generator = torch.default_generator
        else:
            return None
    again = torch.Generator(device)
    again.set_state(generator.get_state())
    values = values.detach()
    if name == "multinomial":
        # In logarithms: the largest of such numbers is many times the size of most.
        return (values / torch.empty_like(values).exponential_(1, generator=again)).double().log()
    noise = -torch.empty_like(values, memory_format=torch.contiguous_format).exponential_(generator=again).log()
    return ((values + noise) / given.get("tau", 1)).softmax(given.get("dim", -1))


def along(tensor: Any, places: Any) -> Any:
    return tensor.gather(-1, places)


def without_grad() -> AbstractContextManager[Any]:
    return torch.no_grad()

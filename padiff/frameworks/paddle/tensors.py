"""Tensors of paddle; see `padiff.frameworks.base.Tensors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from padiff.frameworks.base import Each, UncopiedError, compared
from padiff.sketches import sketch
from padiff.sketches.sketch import BLOCK, ELEMENTS, Cut, Form, block_rows, cut_of, form_of

# Dtypes that paddle's .numpy() silently returns as integers of the same width.
_BITS = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}

# Dtypes that numpy accepts through DLPack, and the number of elements from which DLPack is faster.
_SHARED = frozenset({"float32", "float64", "float16", "int64", "int32"})
_SHARED_DTYPES = frozenset(getattr(paddle, name) for name in _SHARED)


TYPE: type = paddle.Tensor


def is_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor)


def trainable(tensor: Any) -> bool:
    return not tensor.stop_gradient


def all_trainable(tensors: Sequence[Any]) -> list[bool]:
    return [not tensor.stop_gradient for tensor in tensors]


def dtype(tensor: Any) -> str:
    return _name(tensor.dtype)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")


def shape(tensor: Any) -> tuple[int, ...]:
    if tensor.is_selected_rows():
        # The tensor's own shape counts the stored rows; the height counts all rows.
        return (tensor.get_selected_rows().height(), *tensor.shape[1:])
    return tuple(tensor.shape)


def device(tensor: Any) -> str:
    return "cpu" if tensor.place.is_cpu_place() else "gpu"


def copy(tensor: Any) -> np.ndarray:
    tensor = _whole(tensor).detach()
    if tensor.is_selected_rows():
        rows = tensor.get_selected_rows()
        values = np.asarray(rows.get_tensor())
        dense = np.zeros(shape(tensor), values.dtype)
        np.add.at(dense, np.asarray(rows.rows()), values)
        return dense
    if tensor.is_sparse():
        tensor = tensor.to_dense()
    device(tensor)  # raises if the memory is gone, where .numpy() returns an array without elements
    array = tensor.numpy()
    bits = _BITS.get(dtype(tensor))
    if bits is not None:
        array = array.view(bits)
    return np.ascontiguousarray(array).reshape(array.shape)


def sample(tensor: Any, transposed: bool = False) -> Any:
    array = live(tensor)
    if array is not None:
        return sketch.sample(array, transposed)
    tensor = _whole(tensor).detach()
    plain = not (tensor.is_selected_rows() or tensor.is_sparse())
    if tensor.place.is_cpu_place() or not plain:
        return sketch.sample(copy(tensor), transposed)
    with paddle.no_grad():
        tensor = tensor.t() if transposed else tensor
        flat = (paddle.as_real(tensor) if tensor.is_complex() else tensor).reshape([-1])
        if flat.size <= ELEMENTS:
            return flat.clone()
        first, rows = block_rows(flat.size)
        blocks = flat[first:]
        blocks = blocks[: blocks.size // BLOCK * BLOCK].reshape([-1, BLOCK])
        return paddle.index_select(blocks, paddle.to_tensor(rows, place=tensor.place), 0).reshape([-1])


def elements(tensor: Any, chosen: np.ndarray) -> Any:
    if tensor.place.is_cpu_place():
        return copy(tensor).reshape(-1)[chosen]
    with paddle.no_grad():
        places = paddle.to_tensor(chosen, place=tensor.place)
        return paddle.index_select(_whole(tensor).detach().reshape([-1]), places, 0)


def live(tensor: Any) -> np.ndarray | None:
    if tensor.dtype not in _SHARED_DTYPES or not tensor.place.is_cpu_place() or not tensor.size:
        return None
    if tensor.is_selected_rows() or tensor.is_sparse() or tensor.is_dist():
        return None
    return np.from_dlpack(tensor.detach())


@lru_cache(maxsize=4096)
def _form(shape: tuple[int, ...], dtype: Any) -> Form | None:
    """Return the memory layout of a contiguous CPU tensor; `None` for dtypes that numpy does not accept."""
    if dtype not in _SHARED_DTYPES:
        return None
    of_numpy = np.dtype(_name(dtype))
    return form_of(of_numpy, of_numpy.name, shape)


def cut(tensor: Any, transposed: bool = False) -> Cut | None:
    plain = tensor.is_dense() and not (tensor.is_selected_rows() or tensor.is_dist())
    if not plain or not tensor.place.is_cpu_place():
        return None
    form, start = _form(tuple(tensor.shape), tensor.dtype), tensor.data_ptr()
    if form is None or not form.kind[0]:
        return None
    if transposed or not start or not tensor.is_contiguous():
        array = live(tensor)
        return None if array is None else cut_of(array, transposed)
    return form.at(start)


def form(dtype: str, shape: tuple[int, ...]) -> Form | None:
    if dtype not in _SHARED:
        return None
    layout = _form(shape, getattr(paddle, dtype))
    return layout if layout is not None and layout.nbytes else None


def address(tensor: Any, form: Form) -> int:
    position = cut(tensor)
    return 0 if position is None or position.form is not form else position.address


def locator(forms: Sequence[Form]) -> Callable[[Sequence[Any]], list[int] | None]:
    def locate(tensors: Sequence[Any]) -> list[int] | None:
        addresses = list(map(address, tensors, forms))
        return None if 0 in addresses else addresses

    return locate


#: False, because a slice of a paddle tensor may be a copy.
JOINS = False


def pieces(tensor: Any, transposed: bool = False) -> Sequence[Any]:
    return ()


def join(pieces: Sequence[Sequence[Any]]) -> list[Any]:
    with paddle.no_grad():
        return [paddle.concat(list(views)) for views in pieces]


def memory(tensor: Any) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.strides


def watch(tensors: Sequence[Any]) -> Each:
    return compared(_seen, tensors)


def _seen(tensors: Sequence[Any]) -> list[Any]:
    return [(t.data_ptr(), t.dtype, t.shape, t.strides, t.stop_gradient) for t in tensors]


def same_values(tensor: Any, other: Any) -> bool:
    if tensor.size != other.size or tensor.dtype != other.dtype or not tensor.size:
        return False
    if not all(t.is_dense() and not t.is_dist() and t.is_contiguous() for t in (tensor, other)):
        return False
    return bool(tensor.data_ptr() == other.data_ptr())


WRITTEN: Callable[[Any], int] = attrgetter("inplace_version")


def version_of(tensor: Any) -> int:
    return int(tensor.inplace_version)


def fetch(tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
    groups: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(dtype(tensor), []).append(index)
    with paddle.no_grad():
        # To pinned memory; paddle runs the copy after the operations that are queued on the device.
        moved = [(members, paddle.concat([tensors[k] for k in members]).pin_memory()) for members in groups.values()]
    lengths = [tensor.size for tensor in tensors]

    def wait() -> list[np.ndarray]:
        arrays: dict[int, np.ndarray] = {}
        for members, landed in moved:
            ends = np.cumsum([lengths[k] for k in members])[:-1]
            arrays.update(zip(members, np.split(copy(landed), ends)))
        return [arrays[k] for k in range(len(lengths))]

    return wait


def write(tensor: Any, array: np.ndarray) -> None:
    value = paddle.to_tensor(np.array(array.astype(np.float32) if array.dtype.name in _BITS else array, order="C"))
    with paddle.no_grad():
        # set_value keeps the place, but requires the same dtype.
        tensor.set_value(value.astype(tensor.dtype))


def like(tensor: Any, array: np.ndarray) -> Any:
    new = paddle.empty_like(tensor)
    write(new, array)
    return new


def leaf(tensor: Any, array: np.ndarray) -> Any:
    new = like(tensor.detach(), array)
    new.stop_gradient = not (new.is_floating_point() or new.is_complex())
    return new


def gradients(outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> Sequence[Any]:
    results: Sequence[Any] = paddle.grad(list(outputs), list(inputs), list(seeds), allow_unused=True)
    return results


def make(array: np.ndarray, near: Any) -> Any:
    foreign = array.dtype.name in _BITS
    tensor = paddle.to_tensor(np.array(array.astype(np.float32) if foreign else array, order="C"), place=near.place)
    return tensor.astype(array.dtype.name) if foreign else tensor


def in_float64(tensors: Sequence[Any]) -> Callable[[], None]:
    wide = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype != paddle.float64]
    with paddle.no_grad():
        before = [(tensor, tensor.detach().clone()) for tensor in wide]
    default = paddle.get_default_dtype()

    def undo() -> None:
        paddle.set_default_dtype(default)
        for tensor, values in before:
            _take_over(tensor, values)

    try:
        for tensor, values in before:
            with paddle.no_grad():
                _take_over(tensor, values.cast("float64"))
        paddle.set_default_dtype("float64")
    except BaseException:
        undo()
        raise
    return undo


def _take_over(tensor: Any, values: Any) -> None:
    """Make a tensor share the memory and dtype of ``values``, as ``Layer.to`` does."""
    tensor.value().get_tensor()._share_data_with(values.value().get_tensor())


def rows(tensor: Any, axis: int | None) -> Any:
    tensor = tensor.detach()
    return tensor.reshape([1, -1]) if axis is None else tensor.moveaxis(axis, -1).reshape([-1, tensor.shape[axis]])


def ranked(scores: Any, count: int, largest: bool) -> tuple[Any, Any]:
    values, places = paddle.topk(scores, count, axis=-1, largest=largest)
    return values, places


def drawn(name: str, given: Mapping[str, Any]) -> Any:
    return None  # its generator has no copy that draws


def along(tensor: Any, places: Any) -> Any:
    tensor = tensor.astype("int32") if tensor.dtype == paddle.bool else tensor  # it takes no booleans along an axis
    return paddle.take_along_axis(tensor, places, -1)


def without_grad() -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = paddle.no_grad()
    return context


def _whole(tensor: Any) -> Any:
    """Return the local value of a replicated distributed tensor; return a tensor that is not distributed itself.

    ``.numpy()`` would not do, because it makes all processes communicate.

    Raises:
        UncopiedError: this process holds only a part.
    """
    if not tensor.is_dist():
        return tensor
    if all(placement.is_replicated() for placement in tensor.placements):
        return tensor._local_value()
    raise UncopiedError("distributed tensors are spread over the processes: this one holds a part of each")

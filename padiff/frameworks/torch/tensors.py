"""Tensors of PyTorch; see `padiff.frameworks.values.Tensors`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from padiff.frameworks.torch.modes import capturing
from padiff.frameworks.torch.tensor_memory import PLAIN, array_of, memory_of, readable
from padiff.frameworks.torch.tensor_memory import address as address
from padiff.frameworks.torch.tensor_memory import cut as cut
from padiff.frameworks.torch.tensor_memory import form as form
from padiff.frameworks.torch.tensor_memory import locator as locator
from padiff.frameworks.torch.tensor_memory import memory as memory
from padiff.frameworks.torch.watching import TensorsWatch
from padiff.frameworks.values import UncopiedError
from padiff.frameworks.watching import Each, in_turn
from padiff.sketches import cuts
from padiff.sketches.places import BLOCK, ELEMENTS, block_rows
from padiff.sketches.samples import Empty

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


def copy(tensor: Any, empty: Empty = np.empty) -> np.ndarray:
    on_cpu = tensor.is_cpu
    array = memory_of(tensor) if on_cpu else None
    if array is None:
        array = array_of(tensor)
    if not on_cpu:
        # .cpu() copied already.
        return np.ascontiguousarray(array).reshape(array.shape)
    copied = empty(array.shape, array.dtype)
    np.copyto(copied, array)
    return copied


def sample(tensor: Any, transposed: bool = False) -> Any:
    array = live(tensor)
    if array is not None:
        return cuts.sample(array, transposed)
    tensor = readable(tensor)
    if tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        return cuts.sample(array_of(tensor), transposed)
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
    try:
        return int(tensor._version)
    except RuntimeError:  # inference tensors keep none
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


def along(tensor: Any, places: Any) -> Any:
    return tensor.gather(-1, places)


def without_grad() -> AbstractContextManager[Any]:
    return torch.no_grad()

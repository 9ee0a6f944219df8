"""Sharded tensors of PyTorch; see `padiff.frameworks.base.Spreading`.

The placements of a ``DTensor`` tell which part this process holds. FSDP replaces the parameters of a layer by whole
ones during the layer's call. ``fully_shard`` has one ``DTensor`` per parameter. ``FullyShardedDataParallel`` has flat
parameters, of which each process holds an arbitrary range; only FSDP's own data tell where the parameters are.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from padiff.frameworks.base import Held, UncopiedError
from padiff.frameworks.torch.tensors import dtype
from padiff.records.recorded import PARTIAL, REPLICA, SHARD, Part
from padiff.system.guard import reraise_from_signal_handler

#: By layer, functions that return its sharded parameters (`Held`). Weak, so that layers are not kept alive.
_FOUND: WeakKeyDictionary[Any, list[Callable[[], Held | None]]] = WeakKeyDictionary()


# -- DTensor -----------------------------------------------------------------------------------------------


def is_spread(tensor: Any) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    distributed = _dtensor()
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _dtensor() -> Any:
    """Return the module of distributed tensors, or `None` if no code has imported it."""
    return sys.modules.get("torch.distributed.tensor")


def local(tensor: Any) -> tuple[Any, Part | None]:
    if not is_spread(tensor):
        return tensor, None
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UncopiedError("this process holds nothing of a tensor that is spread over others")
    offset, extent, kind, replica = _block(shape, tuple(tensor.placements), tuple(coordinate), tuple(mesh.shape))
    part = tensor.detach()._local_tensor
    part = part.wait() if hasattr(part, "wait") else part
    if tuple(part.shape) != extent:
        raise UncopiedError(f"this process holds {tuple(part.shape)} of {shape}, another part than the placements say")
    # Several meshes may each hold the whole tensor (along a dimension of the job that is not part of its mesh).
    return part, Part(shape, offset, kind, int(mesh.mesh.min()) * mesh.size() + replica)


@lru_cache(maxsize=4096)
def _block(
    shape: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Return a process's part: its offset and its length along each axis, its kind, and the number of the replica.

    Args:
        shape: the shape of the whole tensor.
        placements: the placement for each dimension of the mesh.
        coordinate, lengths: the position of the process in the mesh, and the size of the mesh.
    """
    indexes = [torch.arange(length) for length in shape]
    kind, replica = REPLICA, 0
    for placement, number, length in zip(placements, coordinate, lengths):
        name = type(placement).__name__
        if name == "Replicate":
            replica = replica * length + number
        elif name == "Partial":
            if placement.reduce_op != "sum":
                raise UncopiedError(f"its processes hold terms of a {placement.reduce_op}, which is not a sum")
            kind = PARTIAL
        elif name in ("Shard", "_StridedShard"):
            along = _along(indexes[placement.dim], placement.dim)
            pieces, _ = placement._split_tensor(along, length, with_padding=False, contiguous=False)
            indexes[placement.dim] = pieces[number].reshape(-1)
            kind = kind if kind == PARTIAL else SHARD
        else:
            raise UncopiedError(f"a placement {name} is not known: which part this process holds can't be said")
    if any(len(index) and int(index[-1] - index[0]) != len(index) - 1 for index in indexes):
        raise UncopiedError("this process holds elements that are no one block of the whole")
    offset = tuple(int(index[0]) if len(index) else 0 for index in indexes)
    return offset, tuple(map(len, indexes)), kind, replica


def _along(index: torch.Tensor, axis: int) -> torch.Tensor:
    """Return indexes along an axis, reshaped to a tensor in which they vary along that axis."""
    return index.reshape([-1 if each == axis else 1 for each in range(axis + 1)])


# -- FSDP --------------------------------------------------------------------------------------------------


def find_shards(model: Any) -> None:
    if "torch.distributed.fsdp" not in sys.modules:
        return
    getters: dict[Any, list[Callable[[], Held | None]]] = defaultdict(list)
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state as state_of

        for module in model.modules():
            for place, give in (*_of_fully_shard(state_of(module)), *_of_flat(module)):
                getters[place] += [give] if give is not None else []
    except (AttributeError, ImportError, TypeError, ValueError):
        return  # another version of FSDP stores them differently: they are skipped, with a message
    for place, gives in getters.items():
        _FOUND[place] = gives


def held(layer: Any) -> Sequence[Held]:
    if not _FOUND:
        return ()
    try:
        return [parameter for give in _FOUND.get(layer, ()) if (parameter := give()) is not None]
    except Exception as error:  # must not stop the training: they are skipped, with a message
        reraise_from_signal_handler(error)
        return ()


#: The name of a flat parameter.
FLAT = "_flat_param"


def is_flat(layer: Any) -> bool:
    """Return True if `look` found the parameters that make up the layer's flat parameter."""
    return layer in _FOUND


def _of_fully_shard(state: Any) -> Iterator[tuple[Any, Callable[[], Held | None]]]:
    """Yield each layer and a function that returns its `Held`, for the parameters that ``fully_shard`` manages here."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = getattr(state, "_fsdp_param_group", None)
        groups = [only] if only is not None else []
    for group in groups:
        for parameter in group.fsdp_params:
            about, share = parameter._module_info, _share(group)
            weak = ref(parameter)
            yield about.module, partial(_sharded, weak, about.param_name, share)
            for shared, name in zip(about.shared_modules, about.shared_param_names):
                yield shared, partial(_sharded, weak, name, share)


def _share(group: Any) -> int:
    """Return the index of this process's share of the batch in the mesh of ``fully_shard``; -1 if it is unknown."""
    mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
    if mesh is None:
        return -1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return -1
    share = 0
    for number, length in zip(coordinate, mesh.shape):
        share = share * length + number
    return share


def _local_share(tensor: Any, share: int) -> tuple[Any, Part | None]:
    tensor_part, part = local(tensor)
    return tensor_part, part if part is None else replace(part, share=share)


def _sharded(weak: Callable[[], Any], slot: str, share: int) -> Held | None:
    parameter = weak()
    if parameter is None:
        return None
    sharded = parameter.sharded_param
    return Held(
        slot,
        tuple(sharded.shape),
        dtype(sharded),
        bool(sharded.requires_grad),
        sharded,
        None,
        partial(_local_share, sharded, share),
        lambda: sharded.grad,
    )


def _of_flat(module: Any) -> Iterator[tuple[Any, Callable[[], Held | None] | None]]:
    """Yield each layer and a function that returns its `Held`, for the parameters in this module's flat parameter.

    The layer that has the flat parameter comes first, with `None`.
    """
    handle = module.__dict__.get("_handle") if type(module).__name__ == "FullyShardedDataParallel" else None
    if handle is None:
        return
    flat, weak, places = handle.flat_param, ref(handle), {}
    yield handle._fully_sharded_module, None
    for number, about in enumerate(flat._param_infos):
        places[id(about.module), about.param_name] = number
        yield about.module, partial(_range, weak, number, about.param_name)
    for about in flat._shared_param_infos:
        first = places.get((id(about.prim_module), about.prim_param_name))
        if first is not None:
            yield about.module, partial(_range, weak, first, about.param_name)


def _kept(flat: Any) -> Any:
    """Return this process's shard of a flat parameter; before the first forward this is the flat parameter itself."""
    shard = getattr(flat, "_local_shard", None)
    return (flat if shard is None else shard).detach()


def _range(weak: Callable[[], Any], number: int, slot: str) -> Held | None:
    handle = weak()
    if handle is None:
        return None
    flat = handle.flat_param
    shape, place = tuple(flat._shapes[number]), flat._shard_param_infos[number]
    original = flat._params[number] if handle._use_orig_params else None
    values = _kept(flat)
    start, count = (place.offset_in_shard, place.numel_in_shard) if place.in_shard else (0, 0)
    kind = SHARD if handle.uses_sharded_strategy else REPLICA
    copy = min(torch.distributed.get_process_group_ranks(handle.process_group)) if kind == SHARD else 0

    def part() -> tuple[Any, Part | None]:
        if not place.in_shard:
            return None, None
        own_range = _kept(flat)[start : start + count]
        if kind == REPLICA:
            as_stepped = own_range if original is None else own_range.reshape(original.shape)
            return as_stepped, Part(shape, (0,) * as_stepped.dim(), kind)
        return own_range, Part(shape, (place.intra_param_start_idx,), kind, copy, handle.process_group.rank())

    def gradient() -> Any:
        gradient_tensor = flat.grad if original is None else original.grad
        if gradient_tensor is None or original is not None:
            return gradient_tensor
        return gradient_tensor[start : start + count]

    trainable = bool(flat.requires_grad if original is None else original.requires_grad)
    within = (start, count) if original is None else None
    return Held(
        slot,
        shape,
        dtype(values),
        trainable,
        flat if original is None else original,
        within,
        part,
        gradient,
        number if original is None else -1,
    )

"""Sharded tensors of paddle; see `padiff.frameworks.base.Spreading`.

The placements of a distributed tensor tell which part this process holds. Layers of fleet's model parallelism have
plain tensors, whose attributes tell that they are parts (``is_distributed``) and of which axis (``split_axis``); the
layer's group tells the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from padiff.frameworks.base import Held, UncopiedError
from padiff.frameworks.paddle.tensors import dtype
from padiff.records.recorded import PARTIAL, REPLICA, SHARD, Part


def find_shards(model: Any) -> None:
    """Do nothing: in paddle, parameters stay on their layers."""


def held(layer: Any) -> Sequence[Held]:
    shared = [
        (slot, tensor)
        for slot, tensor in layer._parameters.items()
        if tensor is not None and getattr(tensor, "is_distributed", False) and hasattr(tensor, "split_axis")
    ]
    group = _group(layer) if shared else None
    if group is None or group.nranks < 2:
        return ()
    return [_share(slot, tensor, group.rank, group.nranks, min(group.ranks)) for slot, tensor in shared]


def _group(layer: Any) -> Any:
    """Return the group of processes that share a layer's parameters: the layer's own, else fleet's, else the default.

    The result is `None` if training is not distributed.
    """
    group = getattr(layer, "model_parallel_group", None)
    if group is not None or not paddle.distributed.is_initialized():
        return group
    hybrid = getattr(paddle.distributed.fleet.fleet, "_hcg", None)
    return paddle.distributed.get_group(0) if hybrid is None else hybrid.get_model_parallel_group()


def _share(slot: str, tensor: Any, rank: int, ranks: int, first: int) -> Held:
    """Describe a parameter of fleet's model parallelism, of which each process holds an equal part along one axis."""
    part_shape, axis = tuple(tensor.shape), tensor.split_axis
    shape = (*part_shape[:axis], part_shape[axis] * ranks, *part_shape[axis + 1 :])
    offset = tuple(part_shape[axis] * rank if each == axis else 0 for each in range(len(part_shape)))
    return Held(
        slot,
        shape,
        dtype(tensor),
        not tensor.stop_gradient,
        tensor,
        None,
        lambda: (tensor, Part(shape, offset, SHARD, first)),
        lambda: tensor.grad,
        heard=True,
    )


def is_spread(tensor: Any) -> bool:
    return bool(tensor.is_dist())


def local(tensor: Any) -> tuple[Any, Part | None]:
    if not tensor.is_dist():
        return tensor, None
    mesh, shape = tensor.process_mesh, tuple(tensor.shape)
    ids, lengths = list(mesh.process_ids), list(mesh.shape)
    me = paddle.distributed.get_rank()
    if me not in ids:
        raise UncopiedError("this process holds nothing of a tensor that is spread over others")
    place = ids.index(me)
    coordinate: list[int] = []
    for length in reversed(lengths):
        place, number = divmod(place, length)
        coordinate.insert(0, number)
    start, extent = [0] * len(shape), list(shape)
    kind, replica, axes = REPLICA, 0, set()
    for placement, number, length in zip(tensor.placements, coordinate, lengths):
        if placement.is_replicated():
            replica = replica * length + number
        elif placement.is_partial():
            if "sum" not in str(placement.reduce_type()).lower():
                raise UncopiedError("its processes hold terms of something that is not a sum")
            kind = PARTIAL
        else:
            axis = placement.get_dim()
            if axis in axes:
                raise UncopiedError(f"axis {axis} is shared out twice: which part this process holds can't be said")
            axes.add(axis)
            most = -(-extent[axis] // length)
            begin = min(most * number, extent[axis])
            start[axis] += begin
            extent[axis] = min(most, extent[axis] - begin)
            kind = kind if kind == PARTIAL else SHARD
    part = tensor.detach()._local_value()
    if list(part.shape) != extent:
        raise UncopiedError(f"this process holds {list(part.shape)} of {list(shape)}, not what the placements say")
    return part, Part(shape, tuple(start), kind, min(ids) * len(ids) + replica)

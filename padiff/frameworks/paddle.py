"""PaddlePaddle, as far as recording needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import paddle
from paddle.jit.dy2static.program_translator import ASTStaticFunction

from padiff.frameworks.base import (
    AfterCall,
    BeforeCall,
    Handle,
    Hook,
    OnCall,
    OnConsumed,
    OnGradient,
    Replaced,
    UncopiedError,
)
from padiff.frameworks.compiled import tell_compiled
from padiff.frameworks.paddle_api import Seeing
from padiff.frameworks.paddle_environment import paddle_autocast, paddle_environment
from padiff.frameworks.paddle_optimizers import hook_optimizer, learning_rates, optimized, steppers
from padiff.frameworks.settings import plain_settings
from padiff.sketches.samples import Empty
from padiff.sketches.sketch import BLOCK, ELEMENTS, block_rows, sample

# paddle's .numpy() hands these out as integers of the same width, without a word.
_BITS = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}

# Dtypes that numpy takes through DLPack, and elements from which on that is the faster way.
_SHARED = frozenset({"float32", "float64", "float16", "int64", "int32"})
_LARGE = 1 << 14
_SHARED_DTYPES = frozenset(getattr(paddle, name) for name in _SHARED)

# paddle keeps a BatchNorm's running statistics among the layer's parameters; they are buffers in every other respect.
_STATISTICS = frozenset({"_mean", "_variance"})


class Paddle:
    """The `Framework` of ``paddle.nn.Layer``."""

    name = "paddle"
    hands_errors_on = False  # an OSError comes out, whatever it was

    @property
    def version(self) -> str:
        return str(paddle.__version__)

    def is_model(self, value: Any) -> bool:
        return isinstance(value, paddle.nn.Layer)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, paddle.Tensor)

    def is_optimizer(self, value: Any) -> bool:
        return isinstance(value, paddle.optimizer.Optimizer)

    def steppers(self, optimizer: Any) -> list[Any]:
        return steppers(optimizer)

    def unwrap(self, model: Any) -> Any:
        while isinstance(model, paddle.DataParallel):
            model = model._layers
        # With full_graph=False (the default) paddle calls hooks inside, with values: nothing is missed.
        whole = [
            path
            for path, layer in model.named_sublayers(include_self=True)
            if isinstance(vars(layer).get("forward"), ASTStaticFunction) and any(True for _ in layer.children())
        ]
        tell_compiled(whole, "to_static(full_graph=True)", "call paddle.jit.enable_to_static(False) before it")
        return model

    def children(self, layer: Any) -> Iterator[tuple[str, Any]]:
        # Not named_children(): it leaves out repeats, and a shared layer has to be known under all of its paths.
        for name, child in layer._sub_layers.items():
            if child is not None:
                yield name, child

    def parameters(self, layer: Any) -> Iterator[tuple[str, Any, str]]:
        normalisation = "norm" in self.kind(layer)
        for slot, tensor in layer._parameters.items():
            if tensor is not None and tensor._is_initialized():
                statistics = normalisation and slot in _STATISTICS
                yield slot, tensor, "buffer" if statistics else "parameter"
        for slot, tensor in layer._buffers.items():
            # An RNN holds an uninitialised buffer for cuDNN's dropout state.
            if tensor is not None and tensor._is_initialized():
                yield slot, tensor, "buffer"

    def sharded(self, layer: Any) -> bool:
        return False

    def kind(self, layer: Any) -> str:
        for cls in type(layer).__mro__:
            if cls.__module__.startswith("paddle.") and cls is not paddle.nn.Layer:
                return cls.__name__.lower()
        return type(layer).__name__.lower()

    def layout(self, layer: Any, slot: str) -> str:
        return "in_out" if slot == "weight" and isinstance(layer, paddle.nn.Linear) else ""

    def settings(self, layer: Any) -> dict[str, Any]:
        found = plain_settings(vars(layer))
        if "norm" in self.kind(layer) and isinstance(found.get("momentum"), float):
            # paddle: running = momentum * running + (1 - momentum) * batch; torch: the other way round.
            found["momentum"] = round(1.0 - found["momentum"], 12)
        if isinstance(found.get("approximate"), bool):
            found["approximate"] = "tanh" if found["approximate"] else "none"
        return found

    def trainable(self, tensor: Any) -> bool:
        return not tensor.stop_gradient

    def training(self, model: Any) -> bool:
        return bool(model.training)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("paddle.")

    def shape(self, tensor: Any) -> tuple[int, ...]:
        if tensor.is_selected_rows():
            # Its own shape counts the rows that are held, the height all that there are.
            return (tensor.get_selected_rows().height(), *tensor.shape[1:])
        return tuple(tensor.shape)

    def to_numpy(self, tensor: Any, empty: Empty = np.empty) -> np.ndarray:
        tensor = _whole(tensor).detach()
        if tensor.is_selected_rows():
            rows = tensor.get_selected_rows()
            values = np.asarray(rows.get_tensor())
            dense = np.zeros(self.shape(tensor), values.dtype)
            np.add.at(dense, np.asarray(rows.rows()), values)
            return dense
        if tensor.is_sparse():
            tensor = tensor.to_dense()
        if tensor.place.is_cpu_place() and self.dtype(tensor) in _SHARED and tensor.size >= _LARGE:
            # A view through DLPack, copied: into memory that is there, where .numpy() always takes fresh memory.
            view = np.from_dlpack(tensor)
            copied = empty(view.shape, view.dtype)
            np.copyto(copied, view)
            return copied
        array = tensor.numpy()
        bits = _BITS.get(self.dtype(tensor))
        if bits is not None:
            array = array.view(bits)
        return np.ascontiguousarray(array).reshape(array.shape)

    def sample(self, tensor: Any, turned: bool = False) -> Any:
        live = self.live(tensor)
        if live is not None:
            return sample(live, turned)
        tensor = _whole(tensor).detach()
        plain = not (tensor.is_selected_rows() or tensor.is_sparse())
        if tensor.place.is_cpu_place() or not plain:
            return sample(self.to_numpy(tensor), turned)
        with paddle.no_grad():
            tensor = tensor.t() if turned else tensor
            flat = (paddle.as_real(tensor) if tensor.is_complex() else tensor).reshape([-1])
            if flat.size <= ELEMENTS:
                return flat.clone()
            first, rows = block_rows(flat.size)
            blocks = flat[first:]
            blocks = blocks[: blocks.size // BLOCK * BLOCK].reshape([-1, BLOCK])
            return paddle.index_select(blocks, paddle.to_tensor(rows, place=tensor.place), 0).reshape([-1])

    def live(self, tensor: Any) -> np.ndarray | None:
        if tensor.dtype not in _SHARED_DTYPES or not tensor.place.is_cpu_place() or not tensor.size:
            return None
        if tensor.is_selected_rows() or tensor.is_sparse() or tensor.is_dist():
            return None
        return np.from_dlpack(tensor.detach())

    def memory(self, tensor: Any) -> Any:
        return tensor.data_ptr(), tensor.shape, tensor.strides

    def fetch(self, tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
        groups: dict[str, list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault(self.dtype(tensor), []).append(index)
        with paddle.no_grad():
            # To pinned memory; paddle orders the copy after what is queued on the device.
            moved = [
                (members, paddle.concat([tensors[k] for k in members]).pin_memory()) for members in groups.values()
            ]
        lengths = [tensor.size for tensor in tensors]

        def wait() -> list[np.ndarray]:
            arrays: dict[int, np.ndarray] = {}
            for members, landed in moved:
                ends = np.cumsum([lengths[k] for k in members])[:-1]
                arrays.update(zip(members, np.split(self.to_numpy(landed), ends)))
            return [arrays[k] for k in range(len(lengths))]

        return wait

    def itemsize(self, tensor: Any) -> int:
        return int(tensor.element_size())

    def write(self, tensor: Any, array: np.ndarray) -> None:
        value = paddle.to_tensor(np.array(array.astype(np.float32) if array.dtype.name in _BITS else array, order="C"))
        with paddle.no_grad():
            # set_value keeps the place, but wants the very dtype.
            tensor.set_value(value.astype(tensor.dtype))

    def version_of(self, tensor: Any) -> int:
        return int(tensor.inplace_version)

    def hook_calls(self, layer: Any, before: BeforeCall, after: AfterCall) -> list[Handle]:
        def hook_before(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Inside of to_static, while it builds its graph, there are no values, and asking for them crashes paddle.
            if paddle.in_dynamic_mode():
                before(called, args, kwargs)

        def hook(called: Any, _: Any, output: Any) -> None:
            if not paddle.in_dynamic_mode():
                return
            # always_call also calls after an exception in forward, with no output.
            after(called, output, output is None and sys.exc_info()[0] is not None)

        return [
            layer.register_forward_pre_hook(Hook(hook_before), with_kwargs=True),
            layer.register_forward_post_hook(Hook(hook), always_call=True),
        ]

    def see_calls(self, called: OnCall, third_party: Sequence[str]) -> Handle:
        return Seeing(called, third_party)

    def hook_gradient(self, tensor: Any, gradient: OnGradient) -> Handle | None:
        handle: Handle | None = None if tensor.stop_gradient else tensor.register_hook(gradient)
        return handle

    def hook_optimizer(self, optimizer: Any, consumed: OnConsumed, stepped: Callable[[], None]) -> list[Handle]:
        return hook_optimizer(optimizer, consumed, stepped)

    def hook_outputs(self, layer: Any, replaced: Replaced) -> Handle:
        handle: Handle = layer.register_forward_post_hook(lambda _, args, output: replaced(args, output))
        return handle

    def device(self, tensor: Any) -> str:
        return "cpu" if tensor.place.is_cpu_place() else "gpu"

    def tensor_like(self, tensor: Any, array: np.ndarray) -> Any:
        new = paddle.empty_like(tensor)
        self.write(new, array)
        return new

    def clear_gradients(self, model: Any) -> None:
        for parameter in model.parameters():
            # Not to zero: an optimizer skips a parameter without a gradient, and steps one with a zero gradient.
            parameter.clear_gradient(False)

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)

    def gradient(self, parameter: Any) -> Any | None:
        return parameter.grad

    def optimized(self, optimizer: Any) -> Sequence[Any]:
        return optimized(optimizer)

    def learning_rates(self, optimizer: Any) -> list[float]:
        return learning_rates(optimizer)

    def transforming(self) -> bool:
        return False

    def recomputing(self) -> bool:
        # paddle does not tell whether a backward is running; its recompute calls forward from a PyLayer's backward.
        if "paddle.distributed.fleet.recompute.recompute" not in sys.modules:
            return False
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name in ("backward", "unpack") and code.co_filename.endswith("recompute.py"):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    @contextmanager
    def on_trial(self, layers: Iterable[Any]) -> Iterator[None]:
        modes = [(layer, layer.training) for layer in layers]
        state = paddle.get_rng_state()
        try:
            for layer, _ in modes:
                layer.training = False
            with paddle.no_grad():
                yield
        finally:
            for layer, mode in modes:
                layer.training = mode
            paddle.set_rng_state(state)

    def without_grad(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = paddle.no_grad()
        return context

    def environment(self, kinds: Collection[str]) -> dict[str, Any]:
        return paddle_environment(kinds)

    def autocast(self) -> dict[str, Any]:
        return paddle_autocast()

    def distributed(self) -> tuple[int, int]:
        if paddle.distributed.is_initialized():
            return paddle.distributed.get_rank(), paddle.distributed.get_world_size()
        return 0, 1


def _whole(tensor: Any) -> Any:
    """What this process holds of a distributed tensor, if that is all of it; any other tensor itself.

    Not ``.numpy()``, which would have all processes communicate.

    Raises:
        UncopiedError: this process holds a part.
    """
    if not tensor.is_dist():
        return tensor
    if all(placement.is_replicated() for placement in tensor.placements):
        return tensor._local_value()
    raise UncopiedError("distributed tensors are spread over the processes: this one holds a part of each")


FRAMEWORK = Paddle()

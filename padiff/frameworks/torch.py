"""PyTorch, as far as recording needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from padiff.frameworks.base import AfterCall, BeforeCall, Handle, OnCall, OnConsumed, OnGradient, Replaced
from padiff.frameworks.compiled import tell_compiled
from padiff.frameworks.settings import plain_settings
from padiff.frameworks.torch_api import Seeing
from padiff.frameworks.torch_calls import compiled_paths, hook_calls, original
from padiff.frameworks.torch_environment import torch_autocast, torch_environment
from padiff.frameworks.torch_fused import gradients_of, skips
from padiff.frameworks.torch_memory import PLAIN, array_of, memory_key, memory_of, readable, transforming
from padiff.frameworks.torch_wrapped import steppers
from padiff.sketches.samples import Empty
from padiff.sketches.sketch import BLOCK, ELEMENTS, block_rows, sample

_WIDENED = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


class Torch:
    """The `Framework` of ``torch.nn.Module``."""

    name = "torch"
    hands_errors_on = True

    @property
    def version(self) -> str:
        return str(torch.__version__)

    def is_model(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def is_optimizer(self, value: Any) -> bool:
        return isinstance(value, torch.optim.Optimizer)

    def steppers(self, optimizer: Any) -> list[Any]:
        return steppers(optimizer)

    def unwrap(self, model: Any) -> Any:
        wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
        while isinstance(model, wrappers):
            model = model.module
        tell_compiled(compiled_paths(model), "torch.compile", "set TORCH_COMPILE_DISABLE=1 in the environment")
        return model

    def children(self, layer: Any) -> Iterator[tuple[str, Any]]:
        # Not named_children(): it leaves out repeats, and a shared layer has to be known under all of its paths.
        for name, child in original(layer)._modules.items():
            if child is not None:
                yield name, child

    def parameters(self, layer: Any) -> Iterator[tuple[str, Any, str]]:
        lazy = torch.nn.parameter.UninitializedTensorMixin
        layer = original(layer)
        for role, tensors in (("parameter", layer._parameters), ("buffer", layer._buffers)):
            for slot, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, lazy):
                    yield slot, tensor, role

    def sharded(self, layer: Any) -> bool:
        # Both generations of FSDP set it, for torch.compile.
        return "_is_fsdp_managed_module" in vars(original(layer))

    def kind(self, layer: Any) -> str:
        layer = original(layer)
        for cls in type(layer).__mro__:
            if cls.__module__.startswith("torch.") and cls is not torch.nn.Module:
                return cls.__name__.lower()
        return type(layer).__name__.lower()

    def layout(self, layer: Any, slot: str) -> str:
        layer = original(layer)
        if slot != "weight":
            return ""
        if isinstance(layer, torch.nn.Linear):
            return "out_in"
        # The GPT-2 family's Conv1D of transformers is a linear layer with its matrix the other way round.
        return "in_out" if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") else ""

    def settings(self, layer: Any) -> dict[str, Any]:
        return plain_settings(vars(original(layer)))

    def trainable(self, tensor: Any) -> bool:
        return bool(tensor.requires_grad)

    def training(self, model: Any) -> bool:
        return bool(model.training)

    def dtype(self, tensor: Any) -> str:
        return _name(tensor.dtype)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def to_numpy(self, tensor: Any, empty: Empty = np.empty) -> np.ndarray:
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

    def sample(self, tensor: Any, turned: bool = False) -> Any:
        live = self.live(tensor)
        if live is not None:
            return sample(live, turned)
        tensor = readable(tensor)
        if tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return sample(array_of(tensor), turned)
        tensor = tensor.detach().t() if turned else tensor.detach()
        flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
        if flat.numel() <= ELEMENTS:
            return flat.clone()
        first, _ = block_rows(flat.numel())
        blocks = flat[first:]
        blocks = blocks[: blocks.numel() // BLOCK * BLOCK].view(-1, BLOCK)
        return blocks.index_select(0, _on_device(flat.numel(), flat.device)).reshape(-1)

    def live(self, tensor: Any) -> np.ndarray | None:
        return memory_of(tensor) if tensor.is_cpu and tensor.dtype in PLAIN else None

    def memory(self, tensor: Any) -> Any:
        return memory_key(tensor)

    def fetch(self, tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
        groups: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        moved = []
        for (_, device), members in groups.items():
            whole = torch.cat([tensors[k] for k in members]).resolve_conj()
            if device.type == "cuda":
                # Into pinned memory, so that the copy runs while the training goes on.
                landing = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
                landing.copy_(whole, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                moved.append((members, landing, event))
            else:
                moved.append((members, whole.cpu(), None))
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

    def itemsize(self, tensor: Any) -> int:
        return int(tensor.element_size())

    def write(self, tensor: Any, array: np.ndarray) -> None:
        if array.dtype.name in _WIDENED:
            array = array.astype(np.float32)  # exact, and torch takes it
        # A copy: the tensor must not share memory with the array, nor with the model the array came from.
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(array, order="C")))

    def version_of(self, tensor: Any) -> int:
        try:
            return int(tensor._version)
        except RuntimeError:  # inference tensors keep none
            return -1

    def hook_calls(self, layer: Any, before: BeforeCall, after: AfterCall) -> list[Handle]:
        return hook_calls(layer, before, after)

    def see_calls(self, called: OnCall, third_party: Sequence[str]) -> Handle:
        return Seeing(called)

    def hook_gradient(self, tensor: Any, gradient: OnGradient) -> Handle | None:
        handle: Handle | None = tensor.register_hook(gradient) if tensor.requires_grad else None
        return handle

    def hook_optimizer(self, optimizer: Any, consumed: OnConsumed, stepped: Callable[[], None]) -> list[Handle]:
        def tell() -> None:
            if not skips(optimizer):
                consumed(gradients_of(optimizer, self.optimized(optimizer)))

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # args[0] is the optimizer. With a closure (Lightning passes one), the gradients of this step
            # come into being inside of it, so they are looked at when it returns.
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                tell()
                return None

            def closure_then_tell() -> Any:
                loss = closure()
                tell()
                return loss

            if len(args) > 1:
                return (args[0], closure_then_tell, *args[2:]), kwargs
            return args, {**kwargs, "closure": closure_then_tell}

        return [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda *_: stepped()),
        ]

    def hook_outputs(self, layer: Any, replaced: Replaced) -> Handle:
        handle: Handle = layer.register_forward_hook(lambda _, args, output: replaced(args, output))
        return handle

    def device(self, tensor: Any) -> str:
        return str(tensor.device.type)

    def tensor_like(self, tensor: Any, array: np.ndarray) -> Any:
        new = torch.empty_like(tensor, requires_grad=False)
        self.write(new, array)
        return new

    def clear_gradients(self, model: Any) -> None:
        model.zero_grad(set_to_none=True)

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def gradient(self, parameter: Any) -> Any | None:
        return parameter.grad

    def optimized(self, optimizer: Any) -> Sequence[Any]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def learning_rates(self, optimizer: Any) -> list[float]:
        return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

    def transforming(self) -> bool:
        return transforming()

    def recomputing(self) -> bool:
        # The number of the running backward, -1 outside of one. torch.utils.checkpoint itself asks this way.
        return bool(torch._C._current_graph_task_id() != -1)

    @contextmanager
    def on_trial(self, layers: Iterable[Any]) -> Iterator[None]:
        modes = [(layer, layer.training) for layer in layers]
        try:
            # Not eval(): people override it. The fused paths that torch takes in eval mode call no layers inside.
            for layer, _ in modes:
                layer.training = False
            with torch.random.fork_rng(), torch.no_grad(), _unfused():
                yield
        finally:
            for layer, mode in modes:
                layer.training = mode

    def without_grad(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def environment(self, kinds: Collection[str]) -> dict[str, Any]:
        return torch_environment(kinds)

    def autocast(self) -> dict[str, Any]:
        return torch_autocast()

    def distributed(self) -> tuple[int, int]:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=1024)
def _on_device(size: int, device: torch.device) -> torch.Tensor:
    """Which blocks a sketch looks at, where the tensor is."""
    return torch.from_numpy(block_rows(size)[1]).to(device)


@contextmanager
def _unfused() -> Iterator[None]:
    """Without the fused paths of attention, which call none of the layers inside."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


FRAMEWORK = Torch()

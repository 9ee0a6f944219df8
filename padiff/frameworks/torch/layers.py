"""Modules of PyTorch; see `padiff.frameworks.base.Layers`."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from padiff.frameworks.base import MATRICES, Each, compared, evaluating_in
from padiff.frameworks.settings import plain_settings, warn_of_compiled
from padiff.frameworks.torch import spread
from padiff.frameworks.torch.calls import compiled_in_place, compiled_paths, compiling_is_off, held, original

_LAZY = torch.nn.parameter.UninitializedTensorMixin


def is_model(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


#: Class name of a wrapper -> the attribute with the wrapped module. Names, so that nothing has to be imported.
_INSIDE = {
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def _inside(layer: Any) -> Any:
    """Return the user's own layer inside a wrapper; any other layer itself."""
    while (name := _INSIDE.get(type(layer).__name__)) is not None and type(layer).__module__.startswith("torch."):
        inner = layer._modules.get(name)
        if inner is None:
            break
        layer = inner
    return layer


def unwrap(model: Any) -> Any:
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    spread.find_shards(model)
    while True:
        inside = model.module if isinstance(model, wrappers) else _inside(model)
        if inside is model:
            break
        model = inside
    warn_of_compiled(compiled_paths(model), "torch.compile", "set TORCH_COMPILE_DISABLE=1 in the environment")
    return model


def children(layer: Any) -> Iterator[tuple[str, Any]]:
    # Not named_children(): it omits repeats, but a shared layer is recorded under all of its paths.
    for name, child in original(layer)._modules.items():
        if child is not None:
            yield name, _inside(child)


def parameters(layer: Any) -> Iterator[tuple[str, Any, str]]:
    layer = original(layer)
    for role, tensors in (("parameter", layer._parameters), ("buffer", layer._buffers)):
        for slot, tensor in tensors.items():
            flat = slot == spread.FLAT and spread.is_flat(layer)
            if tensor is not None and not flat and not isinstance(tensor, _LAZY):
                yield slot, tensor, role


def computed(layer: Any) -> Collection[str]:
    return original(layer)._non_persistent_buffers_set


def watch(layers: Sequence[Any]) -> Each:
    return compared(held, layers)


def is_builtin(layer: Any) -> bool:
    if original(layer) is not layer or compiled_in_place(layer) or isinstance(layer, torch.jit.ScriptModule):
        return True
    return str(getattr(layer.forward, "__module__", "")).startswith("torch.")


def sharded(layer: Any) -> bool:
    # Both versions of FSDP set this attribute, for torch.compile.
    return "_is_fsdp_managed_module" in vars(original(layer))


def compiled(layer: Any) -> bool:
    return (original(layer) is not layer or compiled_in_place(layer)) and not compiling_is_off()


def kind(layer: Any) -> str:
    layer = original(layer)
    for cls in type(layer).__mro__:
        if cls.__module__.startswith("torch.") and cls is not torch.nn.Module:
            return cls.__name__.lower()
    return type(layer).__name__.lower()


def layout(layer: Any, slot: str) -> str:
    layer = original(layer)
    if slot not in MATRICES:
        return ""
    if isinstance(layer, torch.nn.Linear):
        return "out_in"
    # Conv1D of transformers (GPT-2 models) is a linear layer with a transposed matrix.
    return "in_out" if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") else ""


def settings(layer: Any) -> dict[str, Any]:
    layer = original(layer)
    return plain_settings(vars(layer), type(layer))


def evaluating(layers: Iterable[Any]) -> AbstractContextManager[None]:
    return evaluating_in(layers, _unfused())


class _Unfused:
    """A context without a graph and without the fused fast paths of attention in eval mode, which skip sublayers.

    The switch of the fast paths is global. The first thread that enters saves its value, the last one that exits
    restores it. torch 2.2 has no switch: there a graph of the parameters that train turns the fast paths off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was = True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not hasattr(torch.backends, "mha"):
            with torch.enable_grad():
                yield
            return
        with self._lock:
            if not self._inside:
                self._was = torch.backends.mha.get_fastpath_enabled()
            self._inside += 1
            torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad():
                yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    torch.backends.mha.set_fastpath_enabled(self._was)


_unfused = _Unfused()


def clear_gradients(model: Any) -> None:
    model.zero_grad(set_to_none=True)

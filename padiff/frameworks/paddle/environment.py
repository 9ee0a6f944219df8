"""PaddlePaddle's versions, devices and switches that can change numbers, its random numbers, and datasets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from padiff.frameworks.base import Items
from padiff.frameworks.paddle import tensors
from padiff.frameworks.settings import launched

# paddle's flag -> common name of the switch, shared with torch.
_FLAGS = {
    "FLAGS_paddle_num_threads": "threads.intra_op",
    "FLAGS_cudnn_deterministic": "cudnn.deterministic",
    "FLAGS_cudnn_exhaustive_search": "cudnn.benchmark",
    "FLAGS_embedding_deterministic": "deterministic.embedding",
    "FLAGS_use_mkldnn": "onednn.enabled",  # in paddle 3.0
    "FLAGS_use_onednn": "onednn.enabled",
}


def read(kinds: Collection[str]) -> dict[str, Any]:
    core = paddle.base.core
    flags = core.globals()  # get_flags() refuses some of them
    values: dict[str, Any] = {}
    for flag, name in _FLAGS.items():
        with contextlib.suppress(KeyError, ValueError, RuntimeError, TypeError):
            if flag in flags.keys():  # noqa: SIM118 - not a dict: it does not support `in`
                value = flags[flag]
                values[name] = bool(value) if name == "deterministic.embedding" else value
    readers: dict[str, Callable[[], Any]] = {
        "framework.cuda": lambda: _version(paddle.version.cuda()),
        "framework.cudnn": lambda: _version(paddle.version.cudnn()),
        "dtype.default": paddle.get_default_dtype,
        "tf32.matmul": lambda: bool(core.get_cublas_switch()),
        "tf32.cudnn": lambda: bool(core.get_cudnn_switch()),
    }
    for name, ask in readers.items():
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            values[name] = ask()
    # The model is on a GPU, so the device is in use already.
    if "gpu" in kinds and paddle.device.is_compiled_with_cuda():
        count = paddle.device.cuda.device_count()
        values["device.count"] = count
        values["device.names"] = ", ".join(
            sorted({paddle.device.cuda.get_device_name(index) for index in range(count)})
        )
    return values


def autocast() -> dict[str, Any]:
    tracer = paddle.base.framework._dygraph_tracer()
    level = getattr(getattr(tracer, "_amp_level", None), "name", "O0")
    if level == "O0":
        return {"autocast.dtype": "off"}
    return {"autocast.dtype": str(tracer._amp_dtype), "autocast.level": level}


def distributed() -> tuple[int, int]:
    if paddle.distributed.is_initialized():
        return paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    # Before the process group is initialized, the launcher's environment variables have the rank.
    return launched("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")


def _version(text: Any) -> str | None:
    return None if str(text) in ("False", "None") else str(text)


# The index of the memory address among the words of a state's text.
_ADDRESS = 3


@contextmanager
def kept() -> Iterator[None]:
    state = paddle.get_rng_state()
    try:
        yield
    finally:
        paddle.set_rng_state(state)


def _generators() -> dict[str, Any]:
    core = paddle.framework.core
    generators = {"paddle.cpu": core.default_cpu_generator()}
    if paddle.is_compiled_with_cuda() and not paddle.framework._current_expected_place().is_cpu_place():
        generators |= {f"paddle.gpu.{k}": core.default_cuda_generator(k) for k in range(core.get_cuda_device_count())}
    return generators


def state() -> dict[str, Any]:
    return {name: generator.get_state() for name, generator in _generators().items()}


def restore(state: Mapping[str, Any]) -> None:
    for name, generator in _generators().items():
        if name in state:
            generator.set_state(state[name])


def stamp() -> Hashable:
    words = [str(generator_state).split(" ") for generator_state in state().values()]
    return tuple((*parts[:_ADDRESS], *parts[_ADDRESS + 1 :]) for parts in words)


def draw_as_eager() -> None:
    """Compiled code draws what eager code draws."""


def as_arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {}


class _Dataset(Items, paddle.io.Dataset):
    pass


def dataset(items: Sequence[Any]) -> Any:
    return _Dataset(items)


def tensor(array: np.ndarray, near: Any = None) -> Any:
    return tensors.make(array, paddle.empty([0]) if near is None else near)

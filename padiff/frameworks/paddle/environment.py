"""What of PaddlePaddle's state can change numbers; reading it sets no flag and starts no device. See
`padiff.frameworks.base.Environment`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import paddle

from padiff.frameworks.launchers import launched

# Under the names that torch's switches have too.
_FLAGS = {
    "threads.intra_op": "FLAGS_paddle_num_threads",
    "cudnn.deterministic": "FLAGS_cudnn_deterministic",
    "cudnn.benchmark": "FLAGS_cudnn_exhaustive_search",
    "deterministic.embedding": "FLAGS_embedding_deterministic",
    "onednn.enabled": "FLAGS_use_onednn",
}


def read(kinds: Collection[str]) -> dict[str, Any]:
    core = paddle.base.core
    flags = core.globals()  # get_flags() refuses some of them
    found: dict[str, Any] = {}
    for name, flag in _FLAGS.items():
        with contextlib.suppress(KeyError, ValueError, RuntimeError, TypeError):
            if flag in flags.keys():  # noqa: SIM118 - no dict: it has no `in` of its own
                value = flags[flag]
                found[name] = bool(value) if name == "deterministic.embedding" else value
    asked: dict[str, Callable[[], Any]] = {
        "framework.cuda": lambda: _version(paddle.version.cuda()),
        "framework.cudnn": lambda: _version(paddle.version.cudnn()),
        "dtype.default": paddle.get_default_dtype,
        "tf32.matmul": lambda: bool(core.get_cublas_switch()),
        "tf32.cudnn": lambda: bool(core.get_cudnn_switch()),
    }
    for name, ask in asked.items():
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            found[name] = ask()
    # The model is on a GPU, so the device is in use already.
    if "gpu" in kinds and paddle.device.is_compiled_with_cuda():
        count = paddle.device.cuda.device_count()
        found["device.count"] = count
        found["device.names"] = ", ".join(sorted({paddle.device.cuda.get_device_name(index) for index in range(count)}))
    return found


def autocast() -> dict[str, Any]:
    tracer = paddle.base.framework._dygraph_tracer()
    level = getattr(getattr(tracer, "_amp_level", None), "name", "O0")
    if level == "O0":
        return {"autocast.dtype": "off"}
    return {"autocast.dtype": str(tracer._amp_dtype), "autocast.level": level}


def distributed() -> tuple[int, int]:
    if paddle.distributed.is_initialized():
        return paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    # Before the process group is made, the launcher has said it already.
    return launched("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")


def _version(text: Any) -> str | None:
    return None if str(text) in ("False", "None") else str(text)

"""paddle's random numbers; see `padiff.frameworks.base.Randomness`.

The state of a generator can be kept and put back, but not be made from numbers: a file can't hold it.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

# Where, among the words that say a state, stands where it lies in memory.
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
    found = {"paddle.cpu": core.default_cpu_generator()}
    if paddle.is_compiled_with_cuda() and not paddle.framework._current_expected_place().is_cpu_place():
        found |= {f"paddle.gpu.{k}": core.default_cuda_generator(k) for k in range(core.get_cuda_device_count())}
    return found


def state() -> dict[str, Any]:
    return {name: generator.get_state() for name, generator in _generators().items()}


def restore(state: Mapping[str, Any]) -> None:
    for name, generator in _generators().items():
        if name in state:
            generator.set_state(state[name])


def stamp() -> Hashable:
    words = [str(one).split(" ") for one in state().values()]
    return tuple((*some[:_ADDRESS], *some[_ADDRESS + 1 :]) for some in words)


def as_arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {}

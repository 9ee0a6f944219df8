"""paddle's random numbers; see `padiff.frameworks.base.Randomness`.

A generator's state can be saved and restored in the process, but not converted from numbers, so no file can store it.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

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


def as_arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {}

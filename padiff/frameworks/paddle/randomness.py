"""paddle's random numbers; see `padiff.frameworks.base.Randomness`."""

from collections.abc import Iterator
from contextlib import contextmanager

import paddle


@contextmanager
def kept() -> Iterator[None]:
    state = paddle.get_rng_state()
    try:
        yield
    finally:
        paddle.set_rng_state(state)

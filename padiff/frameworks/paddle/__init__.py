"""The implementation of the protocols in `padiff.frameworks.base` for PaddlePaddle."""

import paddle

from padiff.frameworks.base import Framework
from padiff.frameworks.paddle import (
    choosing,
    data,
    environment,
    hooks,
    layers,
    masks,
    optimizers,
    randomness,
    spread,
    tensors,
)

FRAMEWORK = Framework(
    "paddle",
    str(paddle.__version__),
    tensors,
    layers,
    hooks,
    optimizers,
    randomness,
    masks,
    choosing,
    environment,
    data,
    spread,
)

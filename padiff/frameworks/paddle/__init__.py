"""The implementation of the protocols in `padiff.frameworks.base` for PaddlePaddle."""

import paddle

from padiff.frameworks.base import Framework
from padiff.frameworks.paddle import choosing, dropouts, environment, hooks, layers, optimizers, spread, tensors

FRAMEWORK = Framework(
    "paddle",
    str(paddle.__version__),
    tensors,
    layers,
    hooks,
    optimizers,
    environment,
    dropouts,
    choosing,
    environment,
    environment,
    spread,
)

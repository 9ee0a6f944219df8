"""The implementation of the protocols in `padiff.frameworks.base` for PaddlePaddle."""

import paddle

from padiff.frameworks.base import Framework
from padiff.frameworks.paddle import choosing, environment, hooks, layers, masks, optimizers, spread, tensors

FRAMEWORK = Framework(
    "paddle",
    str(paddle.__version__),
    tensors,
    layers,
    hooks,
    optimizers,
    environment,
    masks,
    choosing,
    environment,
    environment,
    spread,
)

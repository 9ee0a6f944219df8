"""The implementation of the protocols in `padiff.frameworks.base` for PyTorch."""

import torch

from padiff.frameworks.base import Framework
from padiff.frameworks.torch import choosing, dropouts, environment, hooks, layers, optimizers, spread, tensors

FRAMEWORK = Framework(
    "torch",
    str(torch.__version__),
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

"""PyTorch, as far as recording needs it."""

import torch

from padiff.frameworks.base import Framework
from padiff.frameworks.torch import data, environment, hooks, layers, masks, optimizers, randomness, spread, tensors

FRAMEWORK = Framework(
    "torch", str(torch.__version__), tensors, layers, hooks, optimizers, randomness, masks, environment, data, spread
)

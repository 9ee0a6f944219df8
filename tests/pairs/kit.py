"""The same few calls in both frameworks, so that a style of writing a model serves either. Values come from numpy."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import paddle
import paddle.nn.functional as paddle_f
import torch
import torch.nn.functional as torch_f

torch.set_num_threads(1)


def _late(module, name):
    """A function looked up when it is called, the way a model's own code does it."""
    return staticmethod(lambda *args: getattr(module, name)(*args))


class TorchKit:
    name = "torch"
    nn = torch.nn
    Layer, List, Dict, Sequential = torch.nn.Module, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential
    ReLU, GELU, SiLU, Tanh, Sigmoid = torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Tanh, torch.nn.Sigmoid
    ReLU6, Dropout, Flatten, Identity = torch.nn.ReLU6, torch.nn.Dropout, torch.nn.Flatten, torch.nn.Identity
    MaxPool, LSTM, GRU = torch.nn.MaxPool2d, torch.nn.LSTM, torch.nn.GRU
    relu, relu6, silu = _late(torch_f, "relu"), _late(torch_f, "relu6"), _late(torch_f, "silu")
    tanh, sigmoid, sqrt = _late(torch, "tanh"), _late(torch, "sigmoid"), _late(torch, "sqrt")
    cat, stack, permute = _late(torch, "cat"), _late(torch, "stack"), _late(torch, "permute")

    def gelu(self, x, approximate=False):
        return torch_f.gelu(x, approximate="tanh" if approximate else "none")

    def softmax(self, x):
        return torch.softmax(x, -1)

    def max_pool(self, x, size=2):
        return torch_f.max_pool2d(x, size)

    def upsample(self, x):
        return torch_f.interpolate(x, scale_factor=2, mode="nearest")

    def linear(self, inputs, outputs, bias=True):
        return torch.nn.Linear(inputs, outputs, bias=bias)

    def conv(self, inputs, outputs, size, bias=True, **more):
        return torch.nn.Conv2d(inputs, outputs, size, bias=bias, **more)

    def conv1d(self, inputs, outputs, size, **more):
        return torch.nn.Conv1d(inputs, outputs, size, **more)

    def batchnorm1d(self, width):
        return torch.nn.BatchNorm1d(width)

    def deconv(self, inputs, outputs, size, **more):
        return torch.nn.ConvTranspose2d(inputs, outputs, size, **more)

    def embedding(self, count, width):
        return torch.nn.Embedding(count, width)

    def layernorm(self, width, eps=1e-5):
        return torch.nn.LayerNorm(width, eps=eps)

    def batchnorm(self, width, eps=1e-5, momentum=0.1):
        return torch.nn.BatchNorm2d(width, eps=eps, momentum=momentum)

    def groupnorm(self, groups, width, eps=1e-5):
        return torch.nn.GroupNorm(groups, width, eps=eps)

    def named(self, **layers):
        return torch.nn.Sequential(OrderedDict(layers))

    def param(self, *shape):
        return torch.nn.Parameter(torch.ones(*shape))

    def zeros(self, *shape):
        return torch.zeros(*shape)

    def tensor(self, array):
        return torch.tensor(np.asarray(array))

    def numpy(self, tensor):
        return tensor.detach().numpy().copy()

    def set(self, tensor, array):
        with torch.no_grad():
            tensor.copy_(torch.tensor(np.asarray(array)))

    def layers(self, model):
        return dict(model.named_modules(remove_duplicate=False))

    def run(self, model, args):
        with torch.no_grad():
            return self.numpy(model(*args))


class PaddleKit:
    name = "paddle"
    nn = paddle.nn
    Layer, List, Dict, Sequential = paddle.nn.Layer, paddle.nn.LayerList, paddle.nn.LayerDict, paddle.nn.Sequential
    ReLU, GELU, SiLU, Tanh, Sigmoid = paddle.nn.ReLU, paddle.nn.GELU, paddle.nn.Silu, paddle.nn.Tanh, paddle.nn.Sigmoid
    ReLU6, Dropout, Flatten, Identity = paddle.nn.ReLU6, paddle.nn.Dropout, paddle.nn.Flatten, paddle.nn.Identity
    MaxPool, LSTM, GRU = paddle.nn.MaxPool2D, paddle.nn.LSTM, paddle.nn.GRU
    relu, relu6, silu = _late(paddle_f, "relu"), _late(paddle_f, "relu6"), _late(paddle_f, "silu")
    tanh, sigmoid, sqrt = _late(paddle, "tanh"), _late(paddle_f, "sigmoid"), _late(paddle, "sqrt")
    cat, stack, permute = _late(paddle, "concat"), _late(paddle, "stack"), _late(paddle, "transpose")

    def gelu(self, x, approximate=False):
        return paddle_f.gelu(x, approximate=approximate)

    def softmax(self, x):
        return paddle_f.softmax(x, -1)

    def max_pool(self, x, size=2):
        return paddle_f.max_pool2d(x, size)

    def upsample(self, x):
        return paddle_f.interpolate(x, scale_factor=2, mode="nearest")

    def linear(self, inputs, outputs, bias=True):
        return paddle.nn.Linear(inputs, outputs, bias_attr=None if bias else False)

    def conv(self, inputs, outputs, size, bias=True, **more):
        return paddle.nn.Conv2D(inputs, outputs, size, bias_attr=None if bias else False, **more)

    def conv1d(self, inputs, outputs, size, **more):
        return paddle.nn.Conv1D(inputs, outputs, size, **more)

    def batchnorm1d(self, width):
        return paddle.nn.BatchNorm1D(width)

    def deconv(self, inputs, outputs, size, **more):
        return paddle.nn.Conv2DTranspose(inputs, outputs, size, **more)

    def embedding(self, count, width):
        return paddle.nn.Embedding(count, width)

    def layernorm(self, width, eps=1e-5):
        return paddle.nn.LayerNorm(width, epsilon=eps)

    def batchnorm(self, width, eps=1e-5, momentum=0.1):
        return paddle.nn.BatchNorm2D(width, epsilon=eps, momentum=1 - momentum)

    def groupnorm(self, groups, width, eps=1e-5):
        return paddle.nn.GroupNorm(groups, width, epsilon=eps)

    def named(self, **layers):
        return paddle.nn.Sequential(*layers.items())

    def param(self, *shape):
        return paddle.create_parameter(list(shape), "float32")

    def zeros(self, *shape):
        return paddle.zeros(list(shape), "float32")

    def tensor(self, array):
        return paddle.to_tensor(np.asarray(array))

    def numpy(self, tensor):
        return tensor.detach().numpy().copy()

    def set(self, tensor, array):
        tensor.set_value(paddle.to_tensor(np.asarray(array)))

    def layers(self, model):
        return {"": model, **_sublayers(model, "")}

    def run(self, model, args):
        with paddle.no_grad():
            return self.numpy(model(*args))


def _sublayers(layer, prefix):
    # Layer.named_sublayers and named_children name a shared layer only once.
    found = {}
    for name, below in layer._sub_layers.items():
        found[prefix + name] = below
        found |= _sublayers(below, f"{prefix}{name}.")
    return found


TORCH, PADDLE = TorchKit(), PaddleKit()


def kit_of(model):
    return TORCH if isinstance(model, torch.nn.Module) else PADDLE


def randomized(kit, model, seed):
    """The model with every parameter and statistic drawn anew, so that nothing is left at a default or constant."""
    rng = np.random.default_rng(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        leaf, shape = name.rsplit(".", 1)[-1], tuple(tensor.shape)
        if "mask" in leaf or "float" not in str(tensor.dtype):
            continue
        if "var" in leaf:
            value = rng.uniform(0.5, 1.5, shape)
        elif leaf.endswith("mean") or leaf in ("bias", "beta") or "bias" in leaf:
            value = rng.normal(size=shape) * 0.4
        elif len(shape) == 1:
            value = rng.uniform(0.5, 1.5, shape)
        elif len(shape) == 3:
            value = rng.normal(size=shape) * 0.5
        else:
            fan = min(shape) if len(shape) == 2 else math.prod(shape[1:])
            value = rng.normal(size=shape) * 1.3 / math.sqrt(fan)
        kit.set(tensor, value.astype("float32"))
    return model


def attend(kit, q, k, v, heads, causal=False):
    """Multi-head attention on projected queries, keys and values, each (batch, length, width)."""
    batch, length, width = q.shape
    q, k, v = (kit.permute(x.reshape((batch, x.shape[1], heads, width // heads)), (0, 2, 1, 3)) for x in (q, k, v))
    scores = q @ kit.permute(k, (0, 1, 3, 2)) / math.sqrt(width // heads)
    if causal:
        scores = scores + kit.tensor(np.triu(np.full((length, length), -1e9, "float32"), 1))
    return kit.permute(kit.softmax(scores) @ v, (0, 2, 1, 3)).reshape((batch, length, width))

"""The same few calls in both frameworks, and small models written twice. Both frameworks are real."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import torch

torch.set_num_threads(1)


class TorchKit:
    name = "torch"
    nn = torch.nn
    Layer = torch.nn.Module
    Linear, ReLU, Sequential, Dropout = torch.nn.Linear, torch.nn.ReLU, torch.nn.Sequential, torch.nn.Dropout
    Conv, BatchNorm, LayerNorm, Tanh = torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.LayerNorm, torch.nn.Tanh
    plain = staticmethod(torch.nn.Linear)
    seed = staticmethod(torch.manual_seed)

    def tensor(self, array, dtype=None, grad=False):
        tensor = torch.tensor(np.asarray(array))
        tensor = tensor if dtype is None else tensor.to(getattr(torch, dtype))
        return tensor.requires_grad_() if grad else tensor

    def numpy(self, tensor):
        return tensor.detach().to(torch.float64).numpy().copy()

    def no_bias(self, inputs, outputs):
        return torch.nn.Linear(inputs, outputs, bias=False)

    def grad(self, parameter):
        return None if parameter.grad is None else self.numpy(parameter.grad)

    def state(self, model):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.detach().numpy().copy() for name, tensor in tensors}

    def set(self, tensor, array):
        with torch.no_grad():
            tensor.copy_(torch.tensor(np.asarray(array)))

    def weight(self, linear):
        """The matrix of a linear layer as (out, in)."""
        return self.numpy(linear.weight)

    def set_weight(self, linear, matrix):
        self.set(linear.weight, matrix)

    def sgd(self, model, rate=0.1):
        return torch.optim.SGD(model.parameters(), lr=rate)

    def adam(self, model, rate=1e-2):
        return torch.optim.Adam(model.parameters(), lr=rate, eps=1e-8)

    def double(self, make):
        """What ``make()`` makes, in float64."""
        return make().double()

    def storage(self, tensor):
        return tensor.data_ptr()

    def scaled_gradient(self, x, factor):
        return _TorchScale.apply(x, factor)

    def add_(self, x, value):
        return x + value

    def mse(self, label):
        return lambda output: torch.nn.functional.mse_loss(output, self.tensor(label))

    def hooks_on(self, model):
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


class PaddleKit:
    name = "paddle"
    nn = paddle.nn
    Layer = paddle.nn.Layer
    Linear, ReLU, Sequential, Dropout = paddle.nn.Linear, paddle.nn.ReLU, paddle.nn.Sequential, paddle.nn.Dropout
    Conv, BatchNorm, LayerNorm, Tanh = paddle.nn.Conv2D, paddle.nn.BatchNorm2D, paddle.nn.LayerNorm, paddle.nn.Tanh
    seed = staticmethod(paddle.seed)

    def tensor(self, array, dtype=None, grad=False):
        tensor = paddle.to_tensor(np.asarray(array))
        tensor = tensor if dtype is None else tensor.astype(dtype)
        tensor.stop_gradient = not grad
        return tensor

    def numpy(self, tensor):
        return tensor.detach().astype("float64").numpy().copy()

    def no_bias(self, inputs, outputs):
        return paddle.nn.Linear(inputs, outputs, bias_attr=False)

    def grad(self, parameter):
        return None if parameter.grad is None else self.numpy(parameter.grad)

    def state(self, model):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.numpy().copy() for name, tensor in tensors if tensor._is_initialized()}

    def set(self, tensor, array):
        tensor.set_value(paddle.to_tensor(np.asarray(array)).astype(tensor.dtype))

    def weight(self, linear):
        return self.numpy(linear.weight).T

    def set_weight(self, linear, matrix):
        self.set(linear.weight, np.asarray(matrix).T.copy())

    def sgd(self, model, rate=0.1):
        return paddle.optimizer.SGD(rate, parameters=model.parameters())

    def adam(self, model, rate=1e-2):
        return paddle.optimizer.Adam(rate, parameters=model.parameters(), epsilon=1e-8)

    def double(self, make):
        paddle.set_default_dtype("float64")  # Layer.to(dtype=) fails on a recurrent layer's empty buffer
        try:
            return make()
        finally:
            paddle.set_default_dtype("float32")

    def storage(self, tensor):
        return tensor.data_ptr()

    def scaled_gradient(self, x, factor):
        return _PaddleScale.apply(x, factor)

    def mse(self, label):
        return lambda output: paddle.nn.functional.mse_loss(output, self.tensor(label))

    def hooks_on(self, model):
        layers = model.sublayers(include_self=True)
        return sum(len(m._forward_post_hooks) + len(m._forward_pre_hooks) for m in layers)


class _TorchScale(torch.autograd.Function):
    """Forward the identity, backward a multiple: a wrong gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class _PaddleScale(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


KITS = {"torch": TorchKit(), "paddle": PaddleKit()}


def data(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def mlp(kit, widths=(4, 8, 8, 3)):
    """Linear layers ``fc0``, ``fc1``, ... with a tanh between them; ``fault(index, x)`` may spoil what comes out."""

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.count = len(widths) - 1
            for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
                setattr(self, f"fc{index}", kit.Linear(inputs, outputs))
                setattr(self, f"act{index}", kit.Tanh())

        def forward(self, x):
            for index in range(self.count):
                x = getattr(self, f"fc{index}")(x)
                if index + 1 < self.count:
                    x = getattr(self, f"act{index}")(x)
            return x

    return Net()


def forward_of_mlp(kit, model, x):
    """What ``mlp`` has to give, worked out with numpy in float64."""
    x = np.asarray(x, np.float64)
    for index in range(model.count):
        layer = getattr(model, f"fc{index}")
        x = x @ kit.weight(layer).T + kit.numpy(layer.bias)
        if index + 1 < model.count:
            x = np.tanh(x)
    return x


def both(pair, x):
    """One input for each of the two models."""
    return tuple(kit.tensor(x) for kit in pair)


def spoiled(kit, model, index, amount):
    """The model with the bias of one layer off."""
    bias = getattr(model, f"fc{index}").bias
    kit.set(bias, kit.numpy(bias).astype("float32") + np.float32(amount))
    return model

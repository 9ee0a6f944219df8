"""The same few calls in both frameworks, so that one test serves both. Real frameworks, nothing in between."""

from __future__ import annotations

from collections import OrderedDict

import ml_dtypes
import numpy as np
import paddle
import paddle.nn.functional as paddle_f
import torch
import torch.nn.functional as torch_f

torch.set_num_threads(1)
# Paddle's handler of a crash takes memory, and waits for ever where memory was just taken. Without, the test is named.
paddle.disable_signal_handler()


def is_before(module, *numbers):
    """Return True for a framework older than a version: a test of what it does not have is skipped."""
    return tuple(map(int, module.__version__.partition("+")[0].split(".")[: len(numbers)])) < numbers


def _late(module, name):
    """A function looked up when it is called, the way a model's own code does it."""
    return staticmethod(lambda *args: getattr(module, name)(*args))


class Built:
    """For layers that only say in `build` what they are built of."""

    def __init__(self, *args, **options):
        super().__init__()
        self.build(*args, **options)


class Kit:
    """What both say alike, or in terms of what each says in its own way."""

    def net(self, forward, **layers):
        """A net of layers, by name; ``forward`` takes the net and its input."""

        class Net(self.Layer):
            def __init__(self):
                super().__init__()
                for name, layer in layers.items():
                    setattr(self, name, layer)

        Net.forward = forward
        return Net()

    def float64(self, tensor):
        return self.numpy(tensor).astype(np.float64)

    def grad(self, parameter):
        return None if parameter.grad is None else self.float64(parameter.grad)

    def state(self, model):
        return {name: self.numpy(value) for name, value in model.state_dict().items()}

    def set_weight(self, linear, matrix):
        """Give a linear layer its matrix, (out, in)."""
        self.set(linear.weight, np.asarray(matrix) if self.name == "torch" else np.asarray(matrix).T.copy())

    def weight(self, linear):
        """The matrix of a linear layer, (out, in)."""
        matrix = self.float64(linear.weight)
        return matrix if self.name == "torch" else matrix.T

    def storage(self, tensor):
        return tensor.data_ptr()

    def run(self, model, args):
        with self.no_grad():
            return self.numpy(model(*args))


class TorchKit(Kit):
    name = "torch"
    nn = torch.nn
    Net = type("Net", (Built, torch.nn.Module), {})
    Layer, List, Dict, Sequential = torch.nn.Module, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential
    ReLU, GELU, SiLU, Tanh, Sigmoid = torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Tanh, torch.nn.Sigmoid
    ReLU6, Dropout, Flatten, Identity = torch.nn.ReLU6, torch.nn.Dropout, torch.nn.Flatten, torch.nn.Identity
    MaxPool, LSTM, GRU = torch.nn.MaxPool2d, torch.nn.LSTM, torch.nn.GRU
    Linear, Conv, BatchNorm, LayerNorm = torch.nn.Linear, torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.LayerNorm
    relu, relu6, silu = _late(torch_f, "relu"), _late(torch_f, "relu6"), _late(torch_f, "silu")
    tanh, sigmoid, sqrt = _late(torch, "tanh"), _late(torch, "sigmoid"), _late(torch, "sqrt")
    cat, stack, permute = _late(torch, "cat"), _late(torch, "stack"), _late(torch, "permute")
    relu_, cross_entropy = _late(torch, "relu_"), _late(torch_f, "cross_entropy")
    no_grad = staticmethod(torch.no_grad)
    # torch.manual_seed also notes, with the whole stack, to seed each kind of device that may begin to be used.
    seed = staticmethod(torch.default_generator.manual_seed)

    # -- tensors

    def tensor(self, array, dtype="float32", grad=False):
        """``dtype`` None: the array's own."""
        tensor = torch.tensor(np.asarray(array))
        tensor = tensor if dtype is None else tensor.to(getattr(torch, dtype))
        return tensor.requires_grad_() if grad else tensor

    def numpy(self, tensor):
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:  # exact: bfloat16 is a float32 cut off
            return tensor.float().numpy().astype(ml_dtypes.bfloat16)
        return tensor.numpy().copy()

    def cast(self, tensor, dtype):
        return tensor.to(getattr(torch, dtype))

    def set(self, tensor, array):
        with torch.no_grad():
            tensor.copy_(torch.tensor(np.asarray(array)))

    def zeros(self, *shape):
        return torch.zeros(*shape)

    def drawn(self):
        """The next random numbers: equal where the random state is equal."""
        return torch.rand(5).numpy()

    # -- layers and functions

    def linear(self, inputs, outputs, bias=True):
        return torch.nn.Linear(inputs, outputs, bias=bias)

    def conv(self, inputs, outputs, size, bias=True, **more):
        return torch.nn.Conv2d(inputs, outputs, size, bias=bias, **more)

    def conv1d(self, inputs, outputs, size, **more):
        return torch.nn.Conv1d(inputs, outputs, size, **more)

    def deconv(self, inputs, outputs, size, **more):
        return torch.nn.ConvTranspose2d(inputs, outputs, size, **more)

    def embedding(self, count, width):
        return torch.nn.Embedding(count, width)

    def layernorm(self, width, eps=1e-5):
        return torch.nn.LayerNorm(width, eps=eps)

    def batchnorm(self, width, eps=1e-5, momentum=0.1):
        return torch.nn.BatchNorm2d(width, eps=eps, momentum=momentum)

    def batchnorm1d(self, width):
        return torch.nn.BatchNorm1d(width)

    def groupnorm(self, groups, width, eps=1e-5):
        return torch.nn.GroupNorm(groups, width, eps=eps)

    def named(self, **layers):
        return torch.nn.Sequential(OrderedDict(layers))

    def param(self, *shape):
        return torch.nn.Parameter(torch.ones(*shape))

    def double(self, make):
        """What ``make()`` makes, in float64."""
        return make().double()

    def gelu(self, x, approximate=False):
        return torch_f.gelu(x, approximate="tanh" if approximate else "none")

    def softmax(self, x):
        return torch.softmax(x, -1)

    def max_pool(self, x, size=2):
        return torch_f.max_pool2d(x, size)

    def upsample(self, x):
        return torch_f.interpolate(x, scale_factor=2, mode="nearest")

    def mse(self, label):
        return lambda output: torch_f.mse_loss(output, self.tensor(label))

    def scaled_gradient(self, x, factor):
        return _TorchScale.apply(x, factor)

    # -- models and optimizers

    def layers(self, model):
        return list(model.modules())

    def named_layers(self, model):
        return dict(model.named_modules(remove_duplicate=False))

    def load(self, model, state):
        model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})

    def freeze(self, parameter):
        parameter.requires_grad_(False)

    def autograd(self, loss, tensors):
        return [self.numpy(g) for g in torch.autograd.grad(loss, tensors, retain_graph=True)]

    def sgd(self, parameters, rate=0.1):
        return torch.optim.SGD(list(parameters), lr=rate)

    def adam(self, parameters, rate=1e-2):
        return torch.optim.Adam(list(parameters), lr=rate)

    def zero(self, optimizer):
        optimizer.zero_grad()

    def hooks_on(self, layer):
        return len(layer._forward_hooks) + len(layer._forward_pre_hooks) + len(layer._backward_hooks)

    def hooks_on_optimizer(self, optimizer):
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class PaddleKit(Kit):
    name = "paddle"
    nn = paddle.nn
    Net = type("Net", (Built, paddle.nn.Layer), {})
    Layer, List, Dict, Sequential = paddle.nn.Layer, paddle.nn.LayerList, paddle.nn.LayerDict, paddle.nn.Sequential
    ReLU, GELU, SiLU, Tanh, Sigmoid = paddle.nn.ReLU, paddle.nn.GELU, paddle.nn.Silu, paddle.nn.Tanh, paddle.nn.Sigmoid
    ReLU6, Dropout, Flatten, Identity = paddle.nn.ReLU6, paddle.nn.Dropout, paddle.nn.Flatten, paddle.nn.Identity
    MaxPool, LSTM, GRU = paddle.nn.MaxPool2D, paddle.nn.LSTM, paddle.nn.GRU
    Linear, Conv, BatchNorm, LayerNorm = paddle.nn.Linear, paddle.nn.Conv2D, paddle.nn.BatchNorm2D, paddle.nn.LayerNorm
    relu, relu6, silu = _late(paddle_f, "relu"), _late(paddle_f, "relu6"), _late(paddle_f, "silu")
    tanh, sigmoid, sqrt = _late(paddle, "tanh"), _late(paddle_f, "sigmoid"), _late(paddle, "sqrt")
    cat, stack, permute = _late(paddle, "concat"), _late(paddle, "stack"), _late(paddle, "transpose")
    relu_, cross_entropy = _late(paddle_f, "relu_"), _late(paddle_f, "cross_entropy")
    no_grad, seed = staticmethod(paddle.no_grad), staticmethod(paddle.seed)

    # -- tensors

    def tensor(self, array, dtype="float32", grad=False):
        tensor = paddle.to_tensor(np.asarray(array))
        tensor = tensor if dtype is None else tensor.astype(dtype)
        tensor.stop_gradient = not grad
        return tensor

    def numpy(self, tensor):
        if tensor.dtype == paddle.bfloat16:
            return tensor.detach().astype("float32").numpy().astype(ml_dtypes.bfloat16)
        return tensor.detach().numpy().copy()

    def cast(self, tensor, dtype):
        return tensor.astype(dtype)

    def set(self, tensor, array):
        tensor.set_value(paddle.to_tensor(np.asarray(array)).astype(tensor.dtype))

    def zeros(self, *shape):
        return paddle.zeros(list(shape), "float32")

    def drawn(self):
        return paddle.rand([5]).numpy()

    # -- layers and functions

    def linear(self, inputs, outputs, bias=True):
        return paddle.nn.Linear(inputs, outputs, bias_attr=None if bias else False)

    def conv(self, inputs, outputs, size, bias=True, **more):
        return paddle.nn.Conv2D(inputs, outputs, size, bias_attr=None if bias else False, **more)

    def conv1d(self, inputs, outputs, size, **more):
        return paddle.nn.Conv1D(inputs, outputs, size, **more)

    def deconv(self, inputs, outputs, size, **more):
        return paddle.nn.Conv2DTranspose(inputs, outputs, size, **more)

    def embedding(self, count, width):
        return paddle.nn.Embedding(count, width)

    def layernorm(self, width, eps=1e-5):
        return paddle.nn.LayerNorm(width, epsilon=eps)

    def batchnorm(self, width, eps=1e-5, momentum=0.1):
        return paddle.nn.BatchNorm2D(width, epsilon=eps, momentum=1 - momentum)

    def batchnorm1d(self, width):
        return paddle.nn.BatchNorm1D(width)

    def groupnorm(self, groups, width, eps=1e-5):
        return paddle.nn.GroupNorm(groups, width, epsilon=eps)

    def named(self, **layers):
        return paddle.nn.Sequential(*layers.items())

    def param(self, *shape):
        return paddle.create_parameter(list(shape), "float32")

    def double(self, make):
        paddle.set_default_dtype("float64")  # Layer.to(dtype=) fails on a recurrent layer's empty buffer
        try:
            return make()
        finally:
            paddle.set_default_dtype("float32")

    def gelu(self, x, approximate=False):
        return paddle_f.gelu(x, approximate=approximate)

    def softmax(self, x):
        return paddle_f.softmax(x, -1)

    def max_pool(self, x, size=2):
        return paddle_f.max_pool2d(x, size)

    def upsample(self, x):
        return paddle_f.interpolate(x, scale_factor=2, mode="nearest")

    def mse(self, label):
        return lambda output: paddle_f.mse_loss(output, self.tensor(label))

    def scaled_gradient(self, x, factor):
        return _PaddleScale.apply(x, factor)

    # -- models and optimizers

    def layers(self, model):
        return list(model.sublayers(include_self=True))

    def named_layers(self, model):
        return {"": model, **_sublayers(model, "")}

    def load(self, model, state):
        model.set_state_dict(state)

    def freeze(self, parameter):
        parameter.stop_gradient = True

    def autograd(self, loss, tensors):
        return [self.numpy(g) for g in paddle.grad(loss, tensors, retain_graph=True)]

    def sgd(self, parameters, rate=0.1):
        return paddle.optimizer.SGD(rate, parameters=list(parameters))

    def adam(self, parameters, rate=1e-2):
        return paddle.optimizer.Adam(rate, parameters=list(parameters))

    def zero(self, optimizer):
        optimizer.clear_grad()

    def hooks_on(self, layer):
        return len(layer._forward_post_hooks) + len(layer._forward_pre_hooks)

    def hooks_on_optimizer(self, optimizer):
        return sum(name in vars(optimizer) for name in ("step", "minimize", "append_regularization_ops"))


def _sublayers(layer, prefix):
    # Layer.named_sublayers and named_children name a shared layer only once.
    found = {}
    for name, below in layer._sub_layers.items():
        found[prefix + name] = below
        found |= _sublayers(below, f"{prefix}{name}.")
    return found


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


TORCH, PADDLE = TorchKit(), PaddleKit()
KITS = {"torch": TORCH, "paddle": PADDLE}


def kit_of(model):
    return TORCH if isinstance(model, torch.nn.Module) else PADDLE


def hook_count(kit, model, *optimizers):
    return sum(kit.hooks_on(layer) for layer in kit.layers(model)) + sum(map(kit.hooks_on_optimizer, optimizers))

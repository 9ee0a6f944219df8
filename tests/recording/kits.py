"""The same few calls in both frameworks, so that one test serves both. Real frameworks, nothing in between."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import torch

import padiff

torch.set_num_threads(1)


class TorchKit:
    name = "torch"
    Layer = torch.nn.Module
    Dropout, Conv, BatchNorm, ReLU, Flatten, Linear = (
        torch.nn.Dropout,
        torch.nn.Conv2d,
        torch.nn.BatchNorm2d,
        torch.nn.ReLU,
        torch.nn.Flatten,
        torch.nn.Linear,
    )
    Sequential = torch.nn.Sequential
    no_grad = staticmethod(torch.no_grad)

    def seed(self, number):
        torch.manual_seed(number)

    def drawn(self):
        """The next random numbers: equal where the random state is equal."""
        return torch.rand(5).numpy()

    def tensor(self, array, dtype="float32", grad=False):
        tensor = torch.tensor(np.asarray(array)).to(getattr(torch, dtype))
        return tensor.requires_grad_() if grad else tensor

    def numpy(self, tensor):
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:  # exact: bfloat16 is a float32 cut off
            return tensor.float().numpy().astype(ml_dtypes.bfloat16)
        return tensor.numpy().copy()

    def cast(self, tensor, dtype):
        return tensor.to(getattr(torch, dtype))

    def sgd(self, parameters, rate=0.1):
        return torch.optim.SGD(list(parameters), lr=rate)

    def adam(self, parameters, rate=1e-2):
        return torch.optim.Adam(list(parameters), lr=rate)

    def zero(self, optimizer):
        optimizer.zero_grad()

    def cross_entropy(self, output, labels):
        return torch.nn.functional.cross_entropy(output, labels)

    def autograd(self, loss, tensors):
        return [self.numpy(g) for g in torch.autograd.grad(loss, tensors, retain_graph=True)]

    def freeze(self, parameter):
        parameter.requires_grad_(False)

    def hooks_on(self, layer):
        return len(layer._forward_hooks) + len(layer._forward_pre_hooks) + len(layer._backward_hooks)

    def hooks_on_optimizer(self, optimizer):
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)

    def layers(self, model):
        return list(model.modules())

    def state(self, model):
        return {name: self.numpy(value) for name, value in model.state_dict().items()}

    def load(self, model, state):
        model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})

    def relu_(self, x):
        return torch.relu_(x)

    def weight_as_out_in(self, linear):
        return self.numpy(linear.weight)


class PaddleKit:
    name = "paddle"
    Layer = paddle.nn.Layer
    Dropout, Conv, BatchNorm, ReLU, Flatten, Linear = (
        paddle.nn.Dropout,
        paddle.nn.Conv2D,
        paddle.nn.BatchNorm2D,
        paddle.nn.ReLU,
        paddle.nn.Flatten,
        paddle.nn.Linear,
    )
    Sequential = paddle.nn.Sequential
    no_grad = staticmethod(paddle.no_grad)

    def seed(self, number):
        paddle.seed(number)

    def drawn(self):
        return paddle.rand([5]).numpy()

    def tensor(self, array, dtype="float32", grad=False):
        tensor = paddle.to_tensor(np.asarray(array)).astype(dtype)
        tensor.stop_gradient = not grad
        return tensor

    def numpy(self, tensor):
        if tensor.dtype == paddle.bfloat16:
            return tensor.detach().astype("float32").numpy().astype(ml_dtypes.bfloat16)
        return tensor.detach().numpy().copy()

    def cast(self, tensor, dtype):
        return tensor.astype(dtype)

    def sgd(self, parameters, rate=0.1):
        return paddle.optimizer.SGD(rate, parameters=list(parameters))

    def adam(self, parameters, rate=1e-2):
        return paddle.optimizer.Adam(rate, parameters=list(parameters))

    def zero(self, optimizer):
        optimizer.clear_grad()

    def cross_entropy(self, output, labels):
        return paddle.nn.functional.cross_entropy(output, labels)

    def autograd(self, loss, tensors):
        return [self.numpy(g) for g in paddle.grad(loss, tensors, retain_graph=True)]

    def freeze(self, parameter):
        parameter.stop_gradient = True

    def hooks_on(self, layer):
        return len(layer._forward_post_hooks) + len(layer._forward_pre_hooks)

    def hooks_on_optimizer(self, optimizer):
        return sum(name in vars(optimizer) for name in ("step", "minimize", "append_regularization_ops"))

    def layers(self, model):
        return list(model.sublayers(include_self=True))

    def state(self, model):
        return {name: self.numpy(value) for name, value in model.state_dict().items()}

    def load(self, model, state):
        model.set_state_dict(state)

    def relu_(self, x):
        return paddle.nn.functional.relu_(x)

    def weight_as_out_in(self, linear):
        return self.numpy(linear.weight).T


KITS = (TorchKit(), PaddleKit())


# -- what tests are made of ----------------------------------------------------------------------------------------


def mlp(kit, widths=(4, 8, 3)):
    """Linear, ReLU, Linear: paths 0, 1, 2."""
    return kit.Sequential(kit.Linear(widths[0], widths[1]), kit.ReLU(), kit.Linear(widths[1], widths[2]))


def cnn(kit):
    """Convolution, BatchNorm, ReLU, dropout, classifier for (batch, 1, 6, 6)."""
    return kit.Sequential(
        kit.Conv(1, 4, 3, padding=1),
        kit.BatchNorm(4),
        kit.ReLU(),
        kit.Dropout(0.5),
        kit.Flatten(),
        kit.Linear(4 * 6 * 6, 5),
    )


def batch(kit, shape=(6, 4), classes=3, seed=0):
    data = np.random.default_rng(seed)
    return kit.tensor(data.normal(size=shape)), kit.tensor(data.integers(0, classes, shape[0]), "int64")


def one_step(kit, model, optimizer, x, y, rec=None):
    """A training step as people write it; returns the loss."""
    loss = kit.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    kit.zero(optimizer)
    if rec is not None:
        rec.log_loss(loss)
        rec.try_dump()
    return loss


def recorded(rec, number=0):
    """A recorded step's values by site."""
    (step,) = rec.run.steps(number)
    return {record.site: record.value for record in step.records}


def sites(rec, stage, number=0):
    (step,) = rec.run.steps(number)
    return [record.site for record in step.records if record.stage == stage]


def record_one(kit, model, x, y, **options):
    """Record one SGD step in memory and return its recorder."""
    optimizer = kit.sgd(p for p in model.parameters() if not getattr(p, "stop_gradient", not p.requires_grad))
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        one_step(kit, model, optimizer, x, y, rec)
    return rec


def hook_count(kit, model, *optimizers):
    return sum(kit.hooks_on(layer) for layer in kit.layers(model)) + sum(map(kit.hooks_on_optimizer, optimizers))

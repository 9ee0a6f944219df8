"""Small nets, written once for both frameworks; how they are filled, trained and recorded."""

from __future__ import annotations

import itertools
import math

import numpy as np

import padiff


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


def learn(kit, optimizer, loss, rec, log=True, clip=None):
    """The rest of a step from the loss on: backward, clipping, logging, the update, the end of the step."""
    loss.backward()
    if clip is not None:
        clip()
    if log:
        rec.log_loss(loss)
    optimizer.step()
    kit.zero(optimizer)
    rec.try_dump()


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
    trains = [not p.stop_gradient if hasattr(p, "stop_gradient") else p.requires_grad for p in model.parameters()]
    optimizer = kit.sgd(p for p, is_trained in zip(model.parameters(), trains) if is_trained)
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        one_step(kit, model, optimizer, x, y, rec)
    return rec


def data(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tanh_mlp(kit, widths=(4, 8, 8, 3)):
    """Linear layers ``fc0``, ``fc1``, ... with a tanh between them; ``fault(index, x)`` may spoil what comes out."""

    class Net(kit.Net):
        def build(self):
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


def forward_of_tanh_mlp(kit, model, x):
    """What `tanh_mlp` has to give, worked out with numpy in float64."""
    x = np.asarray(x, np.float64)
    for index in range(model.count):
        layer = getattr(model, f"fc{index}")
        x = x @ kit.weight(layer).T + kit.float64(layer.bias)
        if index + 1 < model.count:
            x = np.tanh(x)
    return x


def both(pair, x):
    """One input for each of the two models."""
    return tuple(kit.tensor(x, None) for kit in pair)


def spoiled(kit, model, index, amount):
    """The model with the bias of one layer off."""
    bias = getattr(model, f"fc{index}").bias
    kit.set(bias, kit.float64(bias).astype("float32") + np.float32(amount))
    return model


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

"""Small trainings in both frameworks, written in three styles, with any number of faults planted in the candidate."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import torch

import padiff
from padiff.records import Run

BATCH, STEPS, CLASSES = 12, 4, 5
WORDS, LENGTH, WIDTH = 17, 6, 16
RATE, DECAY, SMOOTHING, LIMIT = 0.05, 0.02, 0.1, 0.5


# -- models --------------------------------------------------------------------------------------------------------


def _kit(framework: str) -> Any:
    return torch.nn if framework == "torch" else paddle.nn


def _conv(nn: Any, *args: int) -> Any:
    return nn.Conv2d(*args, padding=1) if nn is torch.nn else nn.Conv2D(*args, padding=1)


def _batch_norm(nn: Any, width: int) -> Any:
    return nn.BatchNorm2d(width) if nn is torch.nn else nn.BatchNorm2D(width)


def _avg_pool(nn: Any) -> Any:
    return nn.AvgPool2d(2) if nn is torch.nn else nn.AvgPool2D(2)


def _cat(nn: Any, parts: list[Any]) -> Any:
    return torch.cat(parts, 1) if nn is torch.nn else paddle.concat(parts, 1)


def towers(framework: str) -> Any:
    """Two towers, of an image and of a row of numbers, and a head over both."""
    nn = _kit(framework)

    class Towers(_module(nn)):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.relu, self.pool = _conv(nn, 3, 6, 3), _batch_norm(nn, 6), nn.ReLU(), _avg_pool(nn)
            self.flat, self.squeeze = nn.Flatten(), nn.Linear(6 * 9, WIDTH)
            self.up, self.norm, self.act, self.down = (
                nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, WIDTH),
            )  # fmt: skip
            self.join, self.tanh, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)

        def forward(self, image: Any, row: Any) -> Any:
            one = self.squeeze(self.flat(self.pool(self.relu(self.bn(self.conv(image))))))
            other = self.down(self.act(self.norm(self.up(row))))
            return self.head(self.tanh(self.join(_cat(nn, [one, other]))))

    return Towers()


def stack(framework: str) -> Any:
    """Layers one after the other."""
    nn = _kit(framework)
    inside = [nn.Linear(8, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 24), nn.Sigmoid(), nn.LayerNorm(24)]
    return nn.Sequential(*inside, nn.Linear(24, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def words(framework: str) -> Any:
    """Attention over words, in code of its own, with residuals."""
    nn = _kit(framework)
    softmax = torch.softmax if nn is torch.nn else paddle.nn.functional.softmax

    class Block(_module(nn)):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k, self.v = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.out, self.norm2, self.up, self.act, self.down = (
                nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH),
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            given = self.norm(x)
            q, k, v = self.q(given), self.k(given), self.v(given)
            turned = k.transpose(-1, -2) if nn is torch.nn else k.transpose([0, 2, 1])
            x = x + self.out(softmax(q @ turned * WIDTH**-0.5, -1) @ v)
            return x + self.down(self.act(self.up(self.norm2(x))))

    class Words(_module(nn)):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.first, self.second = nn.Embedding(WORDS, WIDTH), Block(), Block()
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, ids: Any) -> Any:
            return self.head(self.norm(self.second(self.first(self.emb(ids)))).mean(1))

    return Words()


def _module(nn: Any) -> Any:
    return nn.Module if nn is torch.nn else nn.Layer


STYLES = {"towers": towers, "stack": stack, "words": words}


def batches(style: str, steps: int = STEPS) -> list[tuple[list[np.ndarray], np.ndarray]]:
    rng = np.random.default_rng(3)
    made = []
    for _ in range(steps):
        labels = rng.integers(0, CLASSES, BATCH)
        if style == "words":
            given = [rng.integers(0, WORDS, (BATCH, LENGTH))]
        else:
            given = [rng.normal(size=(BATCH, 8)).astype("float32")]
        if style == "towers":
            given.insert(0, rng.normal(size=(BATCH, 3, 6, 6)).astype("float32"))
        made.append((given, labels))
    return made


# -- faults --------------------------------------------------------------------------------------------------------


def _after(layer: Any, change: Any) -> None:
    """Change what a layer gives, in its own code."""
    own = layer.forward
    layer.forward = lambda *args: change(own(*args))


def layer_at(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name) if not name.isdigit() else model[int(name)]
    return model


def _plant(model: Any, fault: str, framework: str) -> None:
    """``PATH:KIND``: a fault in a layer's code."""
    path, _, kind = fault.partition(":")
    layer = layer_at(model, path)
    functional = _kit(framework).functional
    if kind == "scaled":
        _after(layer, lambda y: y * 1.25)
    elif kind == "halved":
        _after(layer, lambda y: y * 0.5)
    elif kind == "shifted":
        _after(layer, lambda y: y + 0.3)
    elif kind == "negated":
        _after(layer, lambda y: -y)
    elif kind == "no_bias":
        own = layer.bias
        _after(layer, lambda y: y - own)
    elif kind == "relu":
        layer.forward = functional.relu
    elif kind == "tanh":
        layer.forward = functional.tanh
    elif kind == "tanh_gelu":
        layer.forward = lambda x: functional.gelu(x, approximate="tanh" if framework == "torch" else True)
    elif kind == "eps":
        if framework == "torch":
            layer.forward = lambda x: functional.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, 1e-3)
        else:
            layer.forward = lambda x: functional.layer_norm(
                x, layer._normalized_shape, layer.weight, layer.bias, epsilon=1e-3
            )
    elif kind == "declared_eps":
        setattr(layer, "eps" if framework == "torch" else "_epsilon", 1e-3)
    elif kind == "eval":
        layer.eval()
    elif kind == "weight":
        with torch.no_grad() if framework == "torch" else paddle.no_grad():
            rng = np.random.default_rng(1)
            made = layer.weight.numpy() + 0.1 * rng.standard_normal(layer.weight.shape).astype("float32")
            if framework == "torch":
                layer.weight.copy_(torch.from_numpy(made))
            else:
                layer.weight.set_value(made)
    else:
        raise ValueError(fault)


# -- trainings -----------------------------------------------------------------------------------------------------


def _groups(model: Any, framework: str, faults: frozenset[str]) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and norms and biases, which do not."""
    matrices = [p for p in model.parameters() if len(p.shape) > 1]
    others = [p for p in model.parameters() if len(p.shape) <= 1]
    decay = 0.0 if "no_decay" in faults else DECAY
    on_norms = 0.2 if "decay_on_norms" in faults else 0.0
    factors = (1.0, 2.0 if "rate_of_norms" in faults else 1.0)
    if framework == "torch":
        return [
            {"params": some, "weight_decay": own, "lr": RATE * by}
            for some, own, by in zip((matrices, others), (decay, on_norms), factors)
        ]
    return [
        {"params": some, "weight_decay": own, "learning_rate": by}
        for some, own, by in zip((matrices, others), (decay, on_norms), factors)
    ]


def _optimizer(model: Any, framework: str, rule: str, faults: frozenset[str]) -> Any:
    groups = _groups(model, framework, faults)
    rate = RATE * (1.5 if "rate" in faults else 1.0) * (0.1 if rule == "adamw" else 1.0)
    eps, beta2 = 1e-3 if "adam_eps" in faults else 1e-8, 0.95 if "beta2" in faults else 0.999
    momentum = 0.5 if "momentum" in faults else 0.9
    if framework == "torch":
        for group in groups:
            group["lr"] = rate * group["lr"] / RATE
        if rule == "adamw":
            return torch.optim.AdamW(groups, betas=(0.9, beta2), eps=eps)
        return torch.optim.SGD(groups, momentum=momentum)
    if rule == "adamw":
        return paddle.optimizer.AdamW(rate, parameters=groups, beta2=beta2, epsilon=eps)
    return paddle.optimizer.Momentum(rate, momentum, parameters=groups)


def _clip(model: Any, framework: str, limit: float) -> None:
    if framework == "torch":
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        return
    some = [p for p in model.parameters() if p.grad is not None]
    norm = float(np.sqrt(sum(float((p.grad.numpy().astype("float64") ** 2).sum()) for p in some)))
    for p in some:
        p.grad.set_value(p.grad.numpy() * np.float32(min(1.0, limit / (norm + 1e-6))))


def _loss(framework: str, outputs: Any, labels: np.ndarray, faults: frozenset[str]) -> Any:
    smoothing = 0.0 if "no_smoothing" in faults else SMOOTHING
    labels = np.roll(labels, 1) if "labels_rolled" in faults else labels
    given = torch.from_numpy(labels) if framework == "torch" else paddle.to_tensor(labels)
    return _kit(framework).functional.cross_entropy(outputs, given, label_smoothing=smoothing)


def trained(framework: str, style: str, rule: str = "sgd", faults: frozenset[str] = frozenset(), **options: Any) -> Run:
    """Train from the style's start weights; ``clip`` among the faults stands for both sides' loop, as a setting."""
    options = dict(options)
    clips = options.pop("clips", False)
    steps = options.pop("steps", STEPS)
    model = _from_start(framework, style)
    for fault in faults:
        if ":" in fault:
            _plant(model, fault, framework)
    optimizer = _optimizer(model, framework, rule, faults)
    kept = {}
    with padiff.record(model, optimizer=optimizer, name=framework, **options) as rec:
        feed = batches(style, steps + 1)
        for number in range(steps):
            given, labels = feed[number + ("other_batch" in faults and number == 2)]
            tensors = [torch.from_numpy(one) if framework == "torch" else paddle.to_tensor(one) for one in given]
            if "flipped" in faults and style == "towers":
                tensors[1] = tensors[1].flip(-1) if framework == "torch" else paddle.flip(tensors[1], -1)
            if "reload" in faults and number == 3:
                _load(model, kept[1], framework)
            kept[number] = {name: p.numpy().copy() for name, p in model.state_dict().items()} if faults else {}
            loss = _loss(framework, model(*tensors), labels, faults)
            loss.backward()
            rec.log_loss(loss)
            if clips and "clip_missing" not in faults:
                _clip(model, framework, LIMIT * (2 if "clip_limit" in faults else 1))
            if "gradients_doubled" in faults:
                _doubled(model, framework)
            if not ("skip" in faults and number == 2):
                optimizer.step()
            optimizer.zero_grad() if framework == "torch" else optimizer.clear_grad()
            rec.try_dump()
    return rec.run


def _doubled(model: Any, framework: str) -> None:
    for p in model.parameters():
        if p.grad is None:
            continue  # a BatchNorm's statistics
        if framework == "torch":
            p.grad.mul_(2)
        else:
            p.grad.set_value(p.grad.numpy() * 2)


def _load(model: Any, values: dict[str, np.ndarray], framework: str) -> None:
    if framework == "torch":
        model.load_state_dict({name: torch.from_numpy(np.asarray(value)) for name, value in values.items()})
    else:
        model.set_state_dict({name: paddle.to_tensor(value) for name, value in values.items()})


@functools.cache
def _start(style: str) -> Any:
    torch.manual_seed(0)
    return STYLES[style]("torch")


def _from_start(framework: str, style: str) -> Any:
    if framework == "torch":
        model = STYLES[style]("torch")
        model.load_state_dict(_start(style).state_dict())
        return model
    model = STYLES[style]("paddle")
    padiff.assign_weight(_start(style), model)
    return model


@functools.cache
def reference(style: str, rule: str = "sgd", clips: bool = False, detail: str = "full") -> Run:
    return trained("torch", style, rule, clips=clips, detail=detail)

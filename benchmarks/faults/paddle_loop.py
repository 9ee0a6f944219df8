"""A training loop in PaddlePaddle, as people write it, and the ways in which one goes wrong."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import paddle
from kit import Batch, Program, Recipe, Side, Trace, is_norm, rate_factor

import padiff


def trained(model: Any) -> dict[str, Any]:
    """The parameters, without running statistics."""
    return {name: p for name, p in model.named_parameters() if not name.endswith(("._mean", "._variance"))}


def clip_of(recipe: Recipe) -> Any:
    """The optimizer's `grad_clip`."""
    if "own_clip" in recipe.style:
        return None
    if recipe.clip == "norm":
        return paddle.nn.ClipGradByGlobalNorm(recipe.limit)
    if recipe.clip == "value":
        return paddle.nn.ClipGradByValue(recipe.limit)
    return paddle.nn.ClipGradByNorm(recipe.limit) if recipe.clip == "tensor" else None


def clip_by_hand(model: Any, recipe: Recipe) -> None:
    """Clip gradients with torch's calls, which paddle has, too."""
    params = [p for p in model.parameters() if p.grad is not None]
    if recipe.clip == "norm":
        paddle.nn.utils.clip_grad_norm_(params, recipe.limit)
    elif recipe.clip == "value":
        paddle.nn.utils.clip_grad_value_(params, recipe.limit)


def rate_of(recipe: Recipe) -> Any:
    """The learning rate, or its schedule."""
    lr = paddle.optimizer.lr
    if not recipe.schedule:
        return recipe.rate
    if recipe.schedule == "cosine" and "lambda" not in recipe.style:
        return lr.CosineAnnealingDecay(recipe.rate, 12)
    if recipe.schedule == "step" and "lambda" not in recipe.style:
        return lr.StepDecay(recipe.rate, 3, 0.5)
    return lr.LambdaDecay(recipe.rate, lambda at: rate_factor(recipe.schedule, at))


def optimizer_of(model: Any, recipe: Recipe, rate: Any) -> Any:
    """The recipe's optimizer."""
    decay = recipe.decay if "by_hand" not in recipe.style else 0.0
    held = {name: p for name, p in trained(model).items() if not (recipe.unheld and re.search(recipe.unheld, name))}
    made: dict[tuple[bool, bool], list[Any]] = {}
    for name, p in held.items():
        head = bool(recipe.head and re.search(recipe.head, name))
        made.setdefault((recipe.norms or not is_norm(name, p.ndim), head), []).append(p)
    parts: Any = [
        dict(params=params, weight_decay=decay if decays else 0.0, learning_rate=recipe.head_rate if head else 1.0)
        for (decays, head), params in made.items()
    ]
    if len(parts) == 1 and not recipe.head:
        parts = list(held.values())
    common = dict(learning_rate=rate, parameters=parts, grad_clip=clip_of(recipe))
    kinds = paddle.optimizer
    if recipe.rule == "sgd" and recipe.momentum:
        more = dict(momentum=recipe.momentum, use_nesterov=recipe.nesterov, weight_decay=decay or None)
        return kinds.Momentum(**more, **common)
    if recipe.rule == "sgd":
        return kinds.SGD(weight_decay=decay or None, **common)
    if recipe.rule == "rmsprop":
        raise ValueError("torch and paddle differ in RMSProp's epsilon: no twin is clean")
    betas = dict(beta1=recipe.betas[0], beta2=recipe.betas[1], epsilon=recipe.eps)
    if recipe.rule == "adam" or recipe.coupled:
        return kinds.Adam(weight_decay=decay or None, **betas, **common)
    if not recipe.norms and not recipe.head:
        # The usual way in paddle: one group, and a function that says what decays.
        decaying = {p.name for name, p in held.items() if not is_norm(name, p.ndim)}
        common["parameters"] = list(held.values())
        return kinds.AdamW(weight_decay=decay, apply_decay_param_fun=lambda n: n in decaying, **betas, **common)
    return kinds.AdamW(weight_decay=decay, **betas, **common)


def forget(optimizer: Any, recipe: Recipe) -> None:
    """What a fresh optimizer's state is."""
    inner = getattr(optimizer, "_accumulators", {})
    for kind, of_params in inner.items():
        start = recipe.betas[0] if "beta1" in kind else recipe.betas[1] if "beta2" in kind else 0.0
        for value in of_params.values():
            value.set_value(np.full(value.shape, start, "float32"))


def tensors(batch: Batch) -> dict[str, Any]:
    """A batch as tensors."""
    return {name: paddle.to_tensor(np.array(value)) for name, value in batch.items()}


def decay_by_hand(model: Any, rate: float, recipe: Recipe) -> None:
    """AdamW's decay, outside of the optimizer."""
    with paddle.no_grad():
        for name, p in trained(model).items():
            if p.grad is None or not (recipe.norms or not is_norm(name, p.ndim)):
                continue
            p.set_value(p * (1 - rate * recipe.decay))


class Happenings:
    """What happens to the weights from outside: a checkpoint loaded, an average put in, a clamp."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.kept: list[dict[str, np.ndarray]] = []
        self.average = {name: p.numpy().copy() for name, p in trained(model).items()}

    def before(self, step: int) -> None:
        own = trained(self.model)
        if step == self.recipe.reload:
            for name, value in self.kept[step - 2].items():
                own[name].set_value(value)
        if step == self.recipe.average:
            for name, value in self.average.items():
                own[name].set_value(value)
        self.kept.append({name: p.numpy().copy() for name, p in own.items()})

    def after(self) -> None:
        for name, p in trained(self.model).items():
            if self.recipe.clamp:
                p.set_value(p.clip(-self.recipe.clamp, self.recipe.clamp))
            self.average[name] = np.float32(0.6) * self.average[name] + np.float32(0.4) * p.numpy()


def train(
    program: Program,
    side: Side,
    model: Any,
    recipe: Recipe,
    batches: list[list[Batch]],
    fault: str,
    folder: Any,
    precision: str = "float32",
    **options: Any,
) -> Trace:
    """Train as a user would, recording into `folder`; `batches` holds the micro-batches of each step."""
    assert precision == "float32", "paddle has no bfloat16 kernels on the CPU"
    began = time.perf_counter()
    for name, p in trained(model).items():
        if recipe.frozen and re.search(recipe.frozen, name):
            p.stop_gradient = True
    rate = rate_of(recipe)
    scheduler = rate if recipe.schedule else None
    optimizer = optimizer_of(model, recipe, rate)
    for _ in range(recipe.shift if scheduler else 0):
        scheduler.step()
    happenings = Happenings(model, recipe)
    losses = []
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for step, micro in enumerate(batches):
            happenings.before(step)
            if step == recipe.forget:
                forget(optimizer, recipe)
            for batch in micro[: recipe.micro or None]:
                given = tensors(batch)
                outputs = model(*(given[name] for name in program.inputs))
                loss = side.loss(outputs, given, fault)
                (loss / len(micro) if recipe.divide else loss).backward()
                if program.shown:
                    rec.log_loss(loss)
                losses.append(float(loss))
            if "own_clip" in recipe.style:
                clip_by_hand(model, recipe)
            if recipe.decay and "by_hand" in recipe.style:
                decay_by_hand(model, optimizer.get_lr(), recipe)
            if step != recipe.skip:
                optimizer.step()
            if step == recipe.twice:
                optimizer.step()
            if step != recipe.stale:
                optimizer.clear_grad()
            if scheduler and (step + 1) % recipe.pace == 0:
                scheduler.step()
            happenings.after()
            rec.try_dump()
    weights = {name: p.numpy() for name, p in trained(model).items()}
    return Trace(tuple(losses), time.perf_counter() - began, weights)


def load(model: Any, values: dict[str, np.ndarray]) -> None:
    """Put values, as torch holds them, into parameters of the same names."""
    linear = {id(m.weight) for m in model.sublayers(include_self=True) if isinstance(m, paddle.nn.Linear)}
    for name, p in trained(model).items():
        value = values[name].T if id(p) in linear else values[name]
        p.set_value(np.ascontiguousarray(value).reshape(p.shape))

"""A training loop in PyTorch, as people write it, and the ways in which one goes wrong."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from kit import Batch, Program, Recipe, Side, Trace, is_norm, rate_factor

import padiff


class OwnAdam(torch.optim.Optimizer):
    """Adam by hand; decay decoupled or not, bias correction or not."""

    def __init__(self, params, lr, betas, eps, weight_decay, coupled, corrected):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.coupled, self.corrected = coupled, corrected

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (one, two), lr, wd = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, g = self.state[p], p.grad
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                if wd and self.coupled:
                    g = g + wd * p
                elif wd:
                    p.mul_(1 - lr * wd)
                state["m"] = one * state["m"] + (1 - one) * g
                state["v"] = two * state["v"] + (1 - two) * g * g
                m, v = state["m"], state["v"]
                if self.corrected:
                    m, v = m / (1 - one ** state["t"]), v / (1 - two ** state["t"])
                p.sub_(lr * m / (v.sqrt() + group["eps"]))


class OwnSGD(torch.optim.Optimizer):
    """SGD with momentum by hand."""

    def __init__(self, params, lr, momentum, dampening, nesterov, weight_decay):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.dampening, self.nesterov = dampening, nesterov

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad + group["weight_decay"] * p
                if group["momentum"]:
                    last = self.state[p].get("v")
                    v = g.clone() if last is None else group["momentum"] * last + (1 - self.dampening) * g
                    self.state[p]["v"] = v
                    g = g + group["momentum"] * v if self.nesterov else v
                p.sub_(group["lr"] * g)


def groups(model: Any, recipe: Recipe) -> list[dict[str, Any]]:
    """The optimizer's groups: with and without decay, with and without a rate of the head."""
    made: dict[tuple[bool, bool], list[Any]] = {}
    for name, p in model.named_parameters():
        if recipe.unheld and re.search(recipe.unheld, name):
            continue
        head = bool(recipe.head and re.search(recipe.head, name))
        decays = recipe.norms or not is_norm(name, p.dim())
        made.setdefault((decays, head), []).append(p)
    return [
        dict(
            params=params,
            weight_decay=recipe.decay if decays and "by_hand" not in recipe.style else 0.0,
            lr=recipe.rate * (recipe.head_rate if head else 1),
        )
        for (decays, head), params in made.items()
    ]


def optimizer_of(model: Any, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer, of torch or by hand."""
    parts: Any = groups(model, recipe)
    plain = dict(lr=recipe.rate, weight_decay=recipe.decay)
    if "own_rule" in recipe.style:
        if recipe.rule == "sgd":
            return OwnSGD(
                parts, momentum=recipe.momentum, dampening=recipe.dampening, nesterov=recipe.nesterov, **plain
            )
        coupled = recipe.coupled or recipe.rule == "adam"
        return OwnAdam(parts, betas=recipe.betas, eps=recipe.eps, coupled=coupled, corrected=recipe.corrected, **plain)
    if "foreach" in recipe.style:
        plain["foreach"] = True
    if recipe.rule == "sgd":
        more = dict(momentum=recipe.momentum, dampening=recipe.dampening, nesterov=recipe.nesterov)
        return torch.optim.SGD(parts, **more, **plain)
    if recipe.rule == "rmsprop":
        more = dict(alpha=recipe.alpha, eps=recipe.eps, momentum=recipe.momentum)
        return torch.optim.RMSprop(parts, **more, **plain)
    kind = torch.optim.Adam if recipe.rule == "adam" or recipe.coupled else torch.optim.AdamW
    return kind(parts, betas=recipe.betas, eps=recipe.eps, **plain)


def scheduler_of(optimizer: Any, recipe: Recipe) -> Any:
    """The recipe's schedule: of torch's own, or of a function."""
    if not recipe.schedule:
        return None
    lr = torch.optim.lr_scheduler
    if recipe.schedule == "cosine" and "lambda" not in recipe.style:
        made: Any = lr.CosineAnnealingLR(optimizer, 12)
    elif recipe.schedule == "step" and "lambda" not in recipe.style:
        made = lr.StepLR(optimizer, 3, 0.5)
    else:
        made = lr.LambdaLR(optimizer, lambda at: rate_factor(recipe.schedule, at))
    return made


def clip(model: Any, recipe: Recipe) -> None:
    """Clip gradients, by torch's call or by hand."""
    params = [p for p in model.parameters() if p.grad is not None]
    if recipe.clip == "norm" and "own_clip" in recipe.style:
        norm = torch.sqrt(sum((p.grad.float() ** 2).sum() for p in params))
        for p in params:
            p.grad.mul_((recipe.limit / norm).clamp(max=1.0).to(p.grad.dtype))
    elif recipe.clip == "norm":
        torch.nn.utils.clip_grad_norm_(params, recipe.limit, foreach="foreach" in recipe.style or None)
    elif recipe.clip == "value" and "own_clip" in recipe.style:
        for p in params:
            p.grad.clamp_(-recipe.limit, recipe.limit)
    elif recipe.clip == "value":
        torch.nn.utils.clip_grad_value_(params, recipe.limit)
    elif recipe.clip == "tensor":
        for p in params:
            torch.nn.utils.clip_grad_norm_(p, recipe.limit)


def tensors(batch: Batch, low: bool) -> dict[str, torch.Tensor]:
    """A batch as tensors; floats in bfloat16 where the weights are."""
    made = {name: torch.from_numpy(np.array(value)) for name, value in batch.items()}
    return {name: t.bfloat16() if low and t.is_floating_point() else t for name, t in made.items()}


def decay_by_hand(model: Any, optimizer: Any, recipe: Recipe) -> None:
    """AdamW's decay, outside of the optimizer."""
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.grad is None or not (recipe.norms or not is_norm(name, p.dim())):
                continue
            p.mul_(1 - rates[id(p)] * recipe.decay)


class Happenings:
    """What happens to the weights from outside: a checkpoint loaded, an average put in, a clamp."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.kept: list[dict[str, Any]] = []
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def before(self, step: int) -> None:
        own = dict(self.model.named_parameters())
        if step == self.recipe.reload:
            for name, value in self.kept[step - 2].items():
                own[name].copy_(value)
        if step == self.recipe.average:
            for name, value in self.average.items():
                own[name].copy_(value)
        self.kept.append({name: p.detach().clone() for name, p in own.items()})

    @torch.no_grad()
    def after(self) -> None:
        for name, p in self.model.named_parameters():
            if self.recipe.clamp:
                p.clamp_(-self.recipe.clamp, self.recipe.clamp)
            self.average[name].mul_(0.6).add_(p, alpha=0.4)


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
    began = time.perf_counter()
    low = precision == "bfloat16" and program.pure
    if low:
        model = model.to(torch.bfloat16)
    for name, p in model.named_parameters():
        if recipe.frozen and re.search(recipe.frozen, name):
            p.requires_grad_(False)
    optimizer = optimizer_of(model, recipe)
    scheduler = scheduler_of(optimizer, recipe)
    for _ in range(recipe.shift if scheduler else 0):
        optimizer.step()
        scheduler.step()
    mixed = precision == "bfloat16" and not program.pure
    happenings = Happenings(model, recipe)
    losses = []
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for step, micro in enumerate(batches):
            happenings.before(step)
            if step == recipe.forget:
                optimizer.state.clear()
            for batch in micro[: recipe.micro or None]:
                given = tensors(batch, low)
                with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
                    outputs = model(*(given[name] for name in program.inputs))
                    loss = side.loss(outputs, given, fault)
                (loss / len(micro) if recipe.divide else loss).backward()
                if program.shown:
                    rec.log_loss(loss)
                losses.append(loss.item())
            clip(model, recipe)
            if recipe.decay and "by_hand" in recipe.style:
                decay_by_hand(model, optimizer, recipe)
            if step != recipe.skip:
                optimizer.step()
            if step == recipe.twice:
                optimizer.step()
            if step != recipe.stale:
                optimizer.zero_grad()
            if scheduler and (step + 1) % recipe.pace == 0:
                scheduler.step()
            happenings.after()
            rec.try_dump()
    weights = {name: p.detach().float().numpy() for name, p in model.named_parameters()}
    return Trace(tuple(losses), time.perf_counter() - began, weights)


def arrays(model: Any) -> dict[str, np.ndarray]:
    """The model's parameters, as numpy arrays."""
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


@torch.no_grad()
def load(model: Any, values: dict[str, np.ndarray]) -> None:
    """Put values into parameters of the same names."""
    for name, p in model.named_parameters():
        p.copy_(torch.from_numpy(np.ascontiguousarray(values[name])).reshape(p.shape))

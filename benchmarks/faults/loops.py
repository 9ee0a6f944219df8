"""Faults of the training loop that any program can have: the optimizer, gradients, data, the start, events.

Each is a function of the program's recipe, because what can show, and when, depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kit import EVENT, STEPS, Batch, Fault, Recipe, rate_factor

_RATE = (r"learning rate", r"\blr\b", r"schedule")
_DECAY = (r"weight[_ ]decay", r"\bdecay", r"regulari[sz]")


def _set(name: str, kind: str, words: Sequence[str], changes: Mapping[str, Any], **more: Any) -> Fault:
    """A setting of the optimizer: it shows in the update, and may be read from what the runs declare."""
    step = more.pop("step", 0)
    return Fault(name, "update|learning_rate", "", kind, tuple(words), step, recipe=changes, declared=True, **more)


def _rate_step(recipe: Recipe, shift: int, pace: int) -> int:
    """The first step whose rate is another one."""
    for step in range(STEPS):
        if abs(rate_factor(recipe.schedule, step) - rate_factor(recipe.schedule, shift + step // pace)) > 1e-9:
            return step
    raise ValueError("the schedule's fault never shows")


def _schedule(name: str, words: Sequence[str], shift: int, pace: int) -> Callable[[Recipe], Fault]:
    def make(r: Recipe) -> Fault:
        step = _rate_step(r, shift, pace)
        kind = "learning_rate|rate|lr|schedule"
        return _set(name, kind, (*_RATE, *words), {"shift": shift, "pace": pace}, step=step)

    return make


def _setting(
    name: str,
    kind: str,
    words: Sequence[str],
    changes: Callable[[Recipe], Mapping[str, Any]],
    step: int = 0,
    late: int = 0,
    fine: bool = False,
) -> Callable[[Recipe], Fault]:
    return lambda r: _set(name, kind, words, changes(r), step=step, late=late, fine=fine)


def _event(
    name: str, field: str, stages: str, kind: str, words: Sequence[str], after: int = 0, late: int = 0
) -> Callable[[Recipe], Fault]:
    def make(r: Recipe) -> Fault:
        return Fault(name, stages, "", kind, tuple(words), EVENT + after, late, {field: EVENT})

    return make


def _gradient(
    name: str, kind: str, words: Sequence[str], changes: Callable[[Recipe], Mapping[str, Any]], stages: str = "grad"
) -> Callable[[Recipe], Fault]:
    return lambda r: Fault(name, stages, "", kind, tuple(words), recipe=changes(r), declared=True)


def _fed(
    name: str,
    feed: Callable[[Sequence[Batch]], Sequence[Batch]],
    words: Sequence[str],
    stages: str = "input",
    step: int = 0,
    kind: str = "data|batch|input|permut|order|scale|label|target",
) -> Callable[[Recipe], Fault]:
    return lambda r: Fault(name, stages, "", kind, tuple(words), step, recipe={"feed": feed})


def _floats(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Sequence[Batch]], Sequence[Batch]]:
    def feed(batches: Sequence[Batch]) -> Sequence[Batch]:
        return [
            {k: change(v).astype(v.dtype) if k in ("x", "image") and v.dtype == np.float32 else v for k, v in b.items()}
            for b in batches
        ]

    return feed


def _labels(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Sequence[Batch]], Sequence[Batch]]:
    return lambda batches: [{k: change(v) if k == "y" else v for k, v in b.items()} for b in batches]


def _rows(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Every batch in another order of its samples; inputs and labels go together."""
    order = np.random.default_rng(5)
    return [{k: v[p] for k, v in b.items()} for b in batches for p in [order.permutation(len(b["y"]))]]


def _swapped(batches: Sequence[Batch]) -> Sequence[Batch]:
    return [batches[k ^ 1] if k ^ 1 < len(batches) else b for k, b in enumerate(batches)]


_NEXT = (r"batch (of|from|that)", r"batches", r"shift", r"order", r"step \d")
_MISSED = (r"not clipped|unclipped|without clipping|no clipping|clip", r"limit")

TABLE: dict[str, Callable[[Recipe], Fault]] = {
    # -- settings of the optimizer
    "rate": _setting("rate", "learning_rate|rate|lr", _RATE, lambda r: {"rate": r.rate * 1.2}),
    "rate_tenth": _setting("rate_tenth", "learning_rate|rate|lr", _RATE, lambda r: {"rate": r.rate / 10}),
    "beta1": _setting("beta1", "beta", (r"beta_?1", r"betas"), lambda r: {"betas": (0.8, r.betas[1])}, step=1),
    "beta2": _setting(
        "beta2",
        "beta",
        (r"beta_?2", r"betas"),
        lambda r: {"betas": (r.betas[0], 0.8 if r.betas[1] == 0.95 else 0.95)},
        step=1,
    ),
    "beta2_fine": _setting(
        "beta2_fine", "beta", (r"beta_?2", r"betas"), lambda r: {"betas": (r.betas[0], 0.99)}, step=1, fine=True
    ),
    "betas_swapped_in": _setting(
        "betas_swapped_in", "beta", (r"beta_?1", r"betas"), lambda r: {"betas": (0.95, r.betas[1])}, step=1
    ),
    "adam_eps": _setting("adam_eps", "eps", (r"eps",), lambda r: {"eps": 1e-3}),
    "adam_eps_fine": _setting("adam_eps_fine", "eps", (r"eps",), lambda r: {"eps": 1e-5}, fine=True),
    "decay_missing": _setting("decay_missing", "decay", _DECAY, lambda r: {"decay": 0.0}),
    "decay_ten": _setting("decay_ten", "decay", _DECAY, lambda r: {"decay": r.decay * 10}),
    "decay_half": _setting("decay_half", "decay", _DECAY, lambda r: {"decay": r.decay / 2}, fine=True),
    "decay_coupled": _setting(
        "decay_coupled",
        "decay|rule|coupled",
        (r"(de)?coupled", r"AdamW", r"form of", r"decay"),
        lambda r: {"coupled": True},
    ),
    "decay_on_norms": _setting(
        "decay_on_norms",
        "decay|group",
        (r"decay", r"group"),
        lambda r: {"norms": True},
        late=1,
    ),
    # Nesterov's first update is 1 + momentum gradients, plain momentum's one.
    "momentum": lambda r: _set("momentum", "momentum", (r"momentum",), {"momentum": 0.8}, step=0 if r.nesterov else 1),
    "momentum_missing": lambda r: _set(
        "momentum_missing",
        "momentum",
        (r"momentum",),
        {"momentum": 0.0, "nesterov": False},
        step=0 if r.nesterov else 1,
    ),
    "dampening": _setting("dampening", "dampening", (r"dampening",), lambda r: {"dampening": 0.1}, step=1),
    "no_nesterov": _setting("no_nesterov", "nesterov", (r"[Nn]esterov",), lambda r: {"nesterov": False}),
    "nesterov": _setting("nesterov", "nesterov", (r"[Nn]esterov",), lambda r: {"nesterov": True}),
    "uncorrected": _setting(
        "uncorrected",
        "bias_correction|correction",
        (r"bias.correct",),
        lambda r: {"corrected": False, "style": "own_rule"},
    ),
    "alpha": _setting("alpha", "alpha|rho|smoothing", (r"alpha", r"rho", r"smoothing"), lambda r: {"alpha": 0.9}),
    "rule_sgd": _setting(
        "rule_sgd",
        "rule|optimizer",
        (r"\bSGD\b", r"rule", r"another optimizer"),
        lambda r: {"rule": "sgd", "style": ""},
    ),
    "rule_adam": _setting(
        "rule_adam", "rule|optimizer", (r"\bAdam\b", r"rule", r"another optimizer"), lambda r: {"rule": "adam"}
    ),
    "head_rate": _setting("head_rate", "learning_rate|rate|lr|group", (*_RATE, r"group"), lambda r: {"head_rate": 1.0}),
    # -- the schedule
    "schedule_late": _schedule("schedule_late", (r"shift", r"step (later|earlier)", r"neighbou?ring"), 1, 1),
    "schedule_half": _schedule("schedule_half", (r"half", r"slow", r"every second"), 0, 2),
    "schedule_per_epoch": _schedule("schedule_per_epoch", (r"epoch", r"constant", r"never"), 0, 100),
    # -- what the optimizer gets
    "clip_missing": _gradient("clip_missing", "clip", _MISSED, lambda r: {"clip": ""}),
    "clip_limit": _gradient("clip_limit", "clip", (r"clip", r"limit"), lambda r: {"limit": r.limit * 2}),
    "clip_by_value": _gradient(
        "clip_by_value", "clip", (r"clip", r"by value"), lambda r: {"clip": "value", "limit": 0.01}
    ),
    "clip_by_tensor": _gradient(
        "clip_by_tensor", "clip", (r"clip", r"each (tensor|parameter)"), lambda r: {"clip": "tensor"}
    ),
    "clip_added": _gradient("clip_added", "clip", (r"clip",), lambda r: {"clip": "norm", "limit": 0.05}),
    "undivided": _gradient(
        "undivided",
        "accumul|divid|ratio|scale",
        (r"accumul", r"divid", r"micro"),
        lambda r: {"divide": False},
        "loss|backward|grad",
    ),
    "micro_missing": _gradient(
        "micro_missing",
        "micro|accumul|batch|missing",
        (r"micro", r"accumul", r"batch", r"call"),
        lambda r: {"micro": 1},
        "input|forward|loss|backward|grad",
    ),
    # -- events
    "skip": _event(
        "skip",
        "skip",
        "grad|update",
        "skip|step|update",
        (r"skip", r"did not (step|run)", r"no (optimizer )?step", r"step\(\)"),
    ),
    "twice": _event(
        "twice",
        "twice",
        "grad|update",
        "twice|double|step",
        (r"twice", r"doubl", r"two (optimizer )?steps", r"a second"),
    ),
    "forget": _event(
        "forget",
        "forget",
        "update",
        "state",
        (r"\bstate\b.*(lost|fresh|new|empty|reset|start|zero)", r"(lost|reset|fresh).*state"),
    ),
    "stale": _event(
        "stale",
        "stale",
        "grad|backward",
        "stale|zero_grad|accumul",
        (r"stale", r"zero_grad|clear_grad", r"step before", r"not (zeroed|cleared)", r"left (from|over)"),
        1,
    ),
    "reload": _event(
        "reload",
        "reload",
        "weight",
        "checkpoint|reload|written|weight|outside",
        (
            r"checkpoint",
            r"loaded",
            r"wr(ote|itten)",
            r"(else|outside).*(chang|weight)",
            r"chang\w* (outside|between)",
            r"step 2",
        ),
    ),
    "average": _event(
        "average",
        "average",
        "weight",
        "average|ema|written|weight|outside",
        (r"average|EMA", r"wr(ote|itten)", r"(else|outside).*(chang|weight)", r"chang\w* (outside|between)"),
    ),
    "clamp": lambda r: Fault(
        "clamp",
        "update|weight",
        "",
        "clamp|written|weight|outside",
        (r"clamp", r"wr(ote|itten)", r"(else|outside).*(chang|weight)", r"chang\w* (outside|between)"),
        0,
        1,
        {"clamp": 0.2},
    ),
    # -- data
    "scaled": _fed(
        "scaled",
        _floats(lambda v: v * 0.5),
        (r"scale", r"factor", r"0\.5", r"half", r"normali[sz]"),
        kind="data|input|scale|ratio|normal",
    ),
    "offset": _fed("offset", _floats(lambda v: v + 0.3), (r"offset", r"shift", r"0\.3", r"mean", r"normali[sz]")),
    "flipped": _fed("flipped", _floats(lambda v: v[..., ::-1]), (r"flip", r"revers", r"mirror", r"order", r"permut")),
    "channels": _fed(
        "channels", _floats(lambda v: v[:, ::-1]), (r"channel", r"RGB|BGR", r"order", r"permut", r"revers")
    ),
    "rows": _fed("rows", _rows, (r"order", r"permut", r"shuffl", r"rows|samples")),
    "next_batch": _fed("next_batch", lambda b: [*b[1:], b[0]], _NEXT),
    "swapped_batches": _fed("swapped_batches", _swapped, _NEXT),
    "labels_rolled": _fed("labels_rolled", _labels(lambda v: np.roll(v, 1, 0)), (r"label", r"target"), "input|loss"),
    # -- the start
}


def faults(recipe: Recipe, *names: str, **changed: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Those of the table, for a program's recipe.

    Args:
        changed: to values of both recipes, by fault: a rule that the fault needs and the program has not.
    """
    made = []
    for name in names:
        start = changed.get(name, {})
        made.append(replace(TABLE[name](replace(recipe, **start)), start=start))
    return tuple(made)


def frozen(pattern: str, places: str) -> Fault:
    """A parameter that does not require a gradient."""
    words = (r"frozen", r"requires_grad|stop_gradient", r"train(ed|able|s)?\b")
    return Fault(
        "frozen",
        "weight|backward|grad|update",
        places,
        "frozen|trainable|train",
        words,
        recipe={"frozen": pattern},
        declared=True,
    )


def unheld(pattern: str, places: str) -> Fault:
    """A parameter that the optimizer was not given."""
    words = (
        r"optimizer (does not|doesn't) (hold|have)",
        r"not (held|in|given)",
        r"\bholds?\b",
        r"group",
        r"without an optimizer",
    )
    return Fault(
        "unheld", "grad|update", places, "held|unheld|optimizer|group", words, recipe={"unheld": pattern}, declared=True
    )


def restarted(pattern: str, places: str) -> Fault:
    """A parameter that starts from other values."""
    words = (r"initial", r"start", r"carried|copied|assign|load", r"init")
    return Fault("restarted", "weight", places, "init|start|weight", words, recipe={"restarted": pattern})

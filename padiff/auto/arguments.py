"""What a call of ``auto_diff`` means, in each generation of the interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.align import align
from padiff.align.given_map import entries
from padiff.auto.checks import check_call, check_loss, check_optimizer, drop_inside
from padiff.auto.settings import Settings, Side
from padiff.auto.words import Said, said
from padiff.compare import Tolerance
from padiff.errors import UsageError
from padiff.model.layer_map import LayerMap
from padiff.model.selection import nearest
from padiff.records import ROOT, Both
from padiff.weights.live import LiveModel, frameworks_name
from padiff.weights.special_init import ruled, special_init

PHASES = ("both", "forward", "backward")


def understand(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Settings:
    """Settings of a call: ``(base_model, raw_model, inputs, loss_fns=None, optimizers=None, **options)``, the first
    generation's ``(layer, module, example_inp, auto_weights, ...)``, or any mixture of their words that is clear.

    Raises:
        UsageError: an argument is missing, unknown or of the wrong form, or contradicts another.
    """
    call = said(args, kwargs)
    names = _names(call)
    sides = _sides(call.models, call.inputs, call.loss_fns, call.optimizers, names)
    # In the first generation weights go from torch to paddle, and torch's inputs are what a single step runs on.
    return _settings(sides[::-1] if call.turned else sides, call)


def _names(call: Said) -> tuple[str, str]:
    """What the two models are called, in the order in which the call gives them."""
    frameworks = [frameworks_name(model) for model in call.models]
    if call.first_generation and frameworks[0] != frameworks[1]:
        return ("layer", "module") if frameworks[0] == "paddle" else ("module", "layer")
    return "base", "raw"


def _sides(
    models: tuple[Any, Any], inputs: Any, losses: Any, optimizers: Any, names: tuple[str, str]
) -> tuple[Side, Side]:
    pairs = {
        "inputs": _two(inputs, "inputs", names),
        "loss_fns": (None, None) if losses is None else _two(losses, "loss_fns", names),
        "optimizers": (None, None) if optimizers is None else _two(optimizers, "optimizers", names),
    }
    for what in ("loss_fns", "optimizers"):
        if (pairs[what][0] is None) != (pairs[what][1] is None):
            raise UsageError(f"{what}: one of the two is None; give one for each model, or none")
    sides = []
    for index, model in enumerate(models):
        live = LiveModel.of(model)
        args, kwargs = _call(pairs["inputs"][index], names[index], live)
        loss = pairs["loss_fns"][index]
        if loss is not None:
            check_loss(loss, names[index], live)
        optimizer = pairs["optimizers"][index]
        check_optimizer(optimizer, names[index], live)
        sides.append(Side(names[index], live, model, args, kwargs, loss, optimizer))
    return sides[0], sides[1]


def _two(value: Any, what: str, names: tuple[str, str]) -> tuple[Any, Any]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        got = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
        raise UsageError(f"{what} has to be a pair (for the {names[0]} model, for the {names[1]} model), got {got}")
    return value[0], value[1]


def _call(given: Any, name: str, live: LiveModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    framework = live.framework
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, Mapping):
        kwargs = dict(given)
    elif framework.is_tensor(given):
        args = (given,)
    elif isinstance(given, (tuple, list)):
        args = tuple(given)
    else:
        raise UsageError(
            f"inputs: the {name} model's input is a dict of named inputs, a {framework.name} tensor or a tuple of "
            f"them, got {type(given).__module__}.{type(given).__qualname__}"
        )
    check_call(args, kwargs, name, live)
    return args, kwargs


def _settings(sides: tuple[Side, ...], call: Said) -> Settings:
    base, raw = sides
    options = call.options
    phase, steps = options["diff_phase"], options["steps"]
    if phase not in PHASES:
        raise UsageError(f"diff_phase is one of {', '.join(PHASES)}, got {phase!r}. {nearest(str(phase), PHASES)}")
    for name in ("auto_init", "single_step", "same_dropout", "full_stacks"):
        if not isinstance(options[name], bool):
            raise UsageError(f"{name} is True or False, got {options[name]!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps has to be a whole number of at least 1, got {steps!r}")
    if steps > 1 and (base.optimizer is None or raw.optimizer is None):
        raise UsageError(f"steps={steps} needs optimizers, or every step would be the first one again")
    if steps > 1 and (phase != "both" or options["single_step"]):
        raise UsageError(f"steps={steps} needs diff_phase='both' and single_step=False: weights have to be updated")
    modes = [side.framework.training(side.live.model) for side in sides]
    if modes[0] != modes[1]:
        told = [f"the {side.name} model is in {'train' if mode else 'eval'} mode" for side, mode in zip(sides, modes)]
        raise UsageError(f"{told[0]}, {told[1]}: call train() or eval() on both")
    notices = []
    if phase == "backward" and not options["single_step"]:
        phase = "both"
        notices.append("diff_phase='backward' holds with single_step=True only; comparing both phases")
    if base.optimizer is not None and (phase == "forward" or options["single_step"]):
        why = "single_step=True" if options["single_step"] else "diff_phase='forward'"
        notices.append(f"{why} trains nothing: the optimizers are not used")
    if options["same_dropout"]:
        inside = [f"`{path}` of the {side.name} model" for side in sides for path in drop_inside(side)]
        if inside:
            notices.append(
                f"same_dropout reaches dropout layers; {', '.join(inside)} drop by a call of their own inside: "
                "set their rate to 0 to compare"
            )
    pairs = LayerMap.resolve(call.layer_map, base.live.nodes, raw.live.nodes)
    # The map's pairs and those of the proxies' own lists, then those that only a rule pairs.
    both = entries(Both(base.live.info, raw.live.info), pairs)
    given = [(entry.reference[0], entry.candidate[0]) for entry in both if entry.one_to_one]
    by_rule = _ruled(base, raw, pairs)
    besides = tuple(pair for pair in by_rule if pair not in given)
    mapped = [pair for pair in (*given, *besides) if ROOT not in pair]
    base.mapped, raw.mapped = (tuple(pair[k] for pair in mapped) for k in (0, 1))
    return Settings(
        ruled=by_rule,
        ruled_besides=besides,
        base=base,
        raw=raw,
        tolerance=Tolerance(options["atol"], options["rtol"], options["compare_mode"]),
        auto_init=options["auto_init"],
        diff_phase=phase,
        single_step=options["single_step"],
        steps=steps,
        layer_map=pairs,
        same_dropout=options["same_dropout"],
        full_stacks=options["full_stacks"],
        notices=tuple(notices),
        first_generation=call.first_generation,
    )


def _ruled(base: Side, raw: Side, pairs: LayerMap) -> tuple[tuple[str, str], ...]:
    """Layers that answer to each other, found or by the map, and that a rule of the user's is about."""
    rules = ruled(base.framework.name, raw.framework.name)
    if not rules:
        return ()
    return tuple(
        (pair.reference.path, pair.candidate.path)
        for pair in align(base.live.info, raw.live.info, pairs, whole=rules).pairs
        if special_init(
            base.framework.name,
            base.live.layer(pair.reference.path),
            raw.framework.name,
            raw.live.layer(pair.candidate.path),
        )
    )

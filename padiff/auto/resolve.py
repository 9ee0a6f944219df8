"""Settings of an ``auto_diff`` from the arguments of a call: checked, with defaults and a resolved layer map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.align import align
from padiff.align.map_entries import entries
from padiff.auto.arguments import AutoDiffCall, read_call
from padiff.auto.settings import ModelSetup, Settings
from padiff.auto.validate import check_call, check_loss, check_optimizer, drop_inside
from padiff.compare import Tolerance
from padiff.errors import UsageError
from padiff.frameworks.conventions import FRAMEWORKS
from padiff.model.given_map import GivenMap
from padiff.model.live_model import LiveModel, frameworks_name, layers_at
from padiff.records import ROOT, Both
from padiff.system.spelling import nearest
from padiff.weights.special_init import ruled, special_init

PHASES = ("both", "forward", "backward")


def resolve_settings(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Settings:
    """Return the settings of a call.

    The forms are ``(base_model, raw_model, inputs, loss_fns=None, optimizers=None, **options)``, the first generation's
    ``(layer, module, example_inp, auto_weights, ...)``, or any unambiguous mixture of their names.

    Raises:
        UsageError: an argument is missing, unknown, of the wrong form, or contradicts another.
    """
    call = read_call(args, kwargs)
    names = _names(call)
    inputs = _two(call.inputs, "inputs", names)
    losses = _two_or_none(call.loss_fns, "loss_fns", names)
    optimizers = _two_or_none(call.optimizers, "optimizers", names)
    sides = Both(*map(_side, names, call.models, inputs, losses, optimizers))
    # In the first generation torch is the reference: weights go to paddle, and a single step uses torch's values.
    return _settings(sides.swapped(call.swapped), call)


def _names(call: AutoDiffCall) -> Both[str]:
    """Return the names of the two models for messages, in the order of the call."""
    frameworks = call.models.map(frameworks_name)
    if call.first_generation and frameworks.reference != frameworks.candidate:
        return frameworks.map(lambda name: FRAMEWORKS[name].layer)
    return Both("base", "raw")


def _side(name: str, model: Any, inputs: Any, loss: Any, optimizer: Any) -> ModelSetup:
    live = LiveModel.from_model(model)
    args, kwargs = _call(inputs, name, live)
    if loss is not None:
        check_loss(loss, name, live)
    check_optimizer(optimizer, name, live)
    return ModelSetup(name, live, model, args, kwargs, loss, optimizer)


def _two(value: Any, what: str, names: Both[str]) -> Both[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        got = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
        first, second = names
        raise UsageError(f"{what} has to be a pair (for the {first} model, for the {second} model), got {got}")
    return Both(*value)


def _two_or_none(value: Any, what: str, names: Both[str]) -> Both[Any]:
    pair = Both(None, None) if value is None else _two(value, what, names)
    if (pair.reference is None) != (pair.candidate is None):
        raise UsageError(f"{what}: one of the two is None; give one for each model, or none")
    return pair


def _call(inputs: Any, name: str, live: LiveModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    framework = live.framework
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif framework.tensors.is_tensor(inputs):
        args = (inputs,)
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    else:
        raise UsageError(
            f"inputs: the {name} model's input is a dict of named inputs, a {framework.name} tensor or a tuple of "
            f"them, got {type(inputs).__module__}.{type(inputs).__qualname__}"
        )
    check_call(args, kwargs, name, live)
    return args, kwargs


def _settings(sides: Both[ModelSetup], call: AutoDiffCall) -> Settings:
    options = call.options
    optimized = sides.reference.optimizer is not None
    phase, steps = options["diff_phase"], options["steps"]
    if phase not in PHASES:
        raise UsageError(f"diff_phase is one of {', '.join(PHASES)}, got {phase!r}. {nearest(str(phase), PHASES)}")
    for name in ("auto_init", "single_step", "same_dropout", "full_stacks"):
        if not isinstance(options[name], bool):
            raise UsageError(f"{name} is True or False, got {options[name]!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps has to be a whole number of at least 1, got {steps!r}")
    if steps > 1 and not optimized:
        raise UsageError(f"steps={steps} needs optimizers, or every step would be the first one again")
    if steps > 1 and (phase != "both" or options["single_step"]):
        raise UsageError(f"steps={steps} needs diff_phase='both' and single_step=False: weights have to be updated")
    modes = sides.map(lambda side: "train" if side.live.model.training else "eval")
    if modes.reference != modes.candidate:
        texts = [f"the {side.name} model is in {mode} mode" for side, mode in sides.zip(modes)]
        raise UsageError(f"{', '.join(texts)}: call train() or eval() on both")
    remarks = []
    if phase == "backward" and not options["single_step"]:
        phase = "both"
        remarks.append("diff_phase='backward' holds with single_step=True only; comparing both phases")
    if optimized and (phase == "forward" or options["single_step"]):
        why = "single_step=True" if options["single_step"] else "diff_phase='forward'"
        remarks.append(f"{why} trains nothing: the optimizers are not used")
    if options["same_dropout"]:
        inside = [f"`{path}` of the {side.name} model" for side in sides for path in drop_inside(side)]
        if inside:
            remarks.append(
                f"same_dropout reaches dropout layers; {', '.join(inside)} drop by a call of their own inside: "
                "set their rate to 0 to compare"
            )
    pairs = GivenMap.resolve(call.layer_map, sides.map(lambda side: side.live.nodes))
    # Pairs of the map and of the proxies' own lists come first, then pairs that only a rule defines.
    infos = sides.map(lambda side: side.live.info)
    named = entries(infos, pairs)
    map_pairs = [(entry.reference[0], entry.candidate[0]) for entry in named if entry.one_to_one]
    by_rule = _ruled(sides, pairs)
    besides = tuple(pair for pair in by_rule if pair not in map_pairs)
    mapped = [pair for pair in (*map_pairs, *besides) if ROOT not in pair]
    for side, *paths in zip(sides, *mapped):
        side.mapped = tuple(paths)
    return Settings(
        ruled=by_rule,
        ruled_besides=besides,
        sides=sides,
        tolerance=Tolerance(options["atol"], options["rtol"], options["compare_mode"]),
        auto_init=options["auto_init"],
        diff_phase=phase,
        single_step=options["single_step"],
        steps=steps,
        layer_map=pairs,
        same_dropout=options["same_dropout"],
        full_stacks=options["full_stacks"],
        remarks=tuple(remarks),
        first_generation=call.first_generation,
    )


def _ruled(sides: Both[ModelSetup], pairs: GivenMap) -> tuple[tuple[str, str], ...]:
    """Return the pairs of layers, by path, that have a rule of the user."""
    models = sides.map(lambda side: side.live)
    frameworks = models.map(lambda model: model.framework.name)
    rules = ruled(frameworks)
    if not rules:
        return ()
    aligned = align(models.reference.info, models.candidate.info, pairs, whole=rules).pairs
    paths = [Both(pair.reference.path, pair.candidate.path) for pair in aligned]
    return tuple((p.reference, p.candidate) for p in paths if special_init(frameworks, layers_at(models, p)))

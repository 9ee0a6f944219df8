"""What a call of ``auto_diff`` means, in each generation of the interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from padiff.align import align
from padiff.auto.checks import check_call, check_loss, check_optimizer, drop_inside
from padiff.auto.settings import Settings, Side
from padiff.compare import Tolerance
from padiff.errors import UsageError
from padiff.layer_map import LayerMap
from padiff.records import ROOT
from padiff.selection import nearest
from padiff.weights.live import LiveModel, frameworks_name
from padiff.weights.special_init import ruled, special_init

PHASES = ("both", "forward", "backward")

#: The second generation's options, with their defaults.
OPTIONS: Mapping[str, Any] = {
    "atol": 0.0,
    "rtol": 1e-7,
    "auto_init": True,
    "compare_mode": "mean",
    "diff_phase": "both",
    "single_step": False,
    "steps": 1,
    "same_dropout": False,
    "full_stacks": False,
}
_OLD_NAMES = (
    "layer", "module", "example_inp", "auto_weights", "steps", "options", "layer_map", "layer_mapping", "loss_fn",
    "optimizer",
)  # fmt: skip
# What only the first generation has: one of these in a call says that it is of the first generation.
_OLD_ONLY = frozenset(_OLD_NAMES) - {"steps", "layer_map"}
_OLD_OPTIONS = ("atol", "rtol", "diff_phase", "compare_mode", "single_step")


def understand(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Settings:
    """Settings of a call: ``(base_model, raw_model, inputs, loss_fns=None, optimizers=None, **options)``, or the
    first generation's ``(layer, module, example_inp, auto_weights, ...)``.

    Raises:
        UsageError: an argument is missing, unknown or of the wrong form.
    """
    return _understand_old(args, dict(kwargs)) if _is_old(args, kwargs) else _understand_new(args, dict(kwargs))


def _is_old(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is of the first generation."""
    if _OLD_ONLY & kwargs.keys() or (len(args) > 3 and isinstance(args[3], bool)):
        return True
    # `steps` and `layer_map` alone: a paddle layer first, a torch module second is how that generation has it.
    if len(args) != 3 or not kwargs or not kwargs.keys() <= {"steps", "layer_map"}:
        return False
    return [frameworks_name(model) for model in args[:2]] == ["paddle", "torch"]


def _understand_new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Settings:
    names = ("base_model", "raw_model", "inputs", "loss_fns", "optimizers")
    given = _by_name("auto_diff", names, names[:3], args, kwargs, (*OPTIONS, "layer_map"))
    options = {**OPTIONS, **{name: value for name, value in given.items() if name in OPTIONS}}
    models = (given["base_model"], given["raw_model"])
    sides = _sides(models, given["inputs"], given.get("loss_fns"), given.get("optimizers"), ("base", "raw"))
    return _settings(sides, options, given.get("layer_map"))


def _understand_old(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Settings:
    names: list[str] = ["layer", "module", "example_inp", "auto_weights"]
    for value in args[4:]:
        # The two documents of this generation disagree about the order from here on: the type decides.
        if isinstance(value, int) and not isinstance(value, bool):
            names.append("steps")
        elif isinstance(value, LayerMap) or (isinstance(value, Mapping) and not _is_options(value)):
            names.append("layer_map")
        elif isinstance(value, Mapping):
            names.append("options")
        else:
            names.append("loss_fn" if "loss_fn" not in names else "optimizer")
    extra = tuple(name for name in _OLD_NAMES if name not in names)
    given = _by_name("auto_diff", names, names[:3], args, kwargs, extra)
    unknown = [key for key in given.get("options", {}) if key not in _OLD_OPTIONS]
    if unknown:
        raise UsageError(f"auto_diff: unknown option {unknown[0]!r}. {nearest(str(unknown[0]), _OLD_OPTIONS)}")
    options = {**OPTIONS, **given.get("options", {}), "auto_init": given.get("auto_weights", True)}
    options["steps"] = given.get("steps", 1)
    models = (given["layer"], given["module"])
    if [frameworks_name(model) for model in models] == ["torch", "paddle"]:
        raise UsageError(
            "auto_diff: a call with the first generation's arguments takes the paddle layer and its input first, the "
            "torch module second. For the other order: auto_diff(base_model, raw_model, inputs, atol=...)"
        )
    sides = _sides(models, given["example_inp"], given.get("loss_fn"), given.get("optimizer"), ("layer", "module"))
    # Weights go from torch to paddle, and torch's inputs are what a single step runs on: the module is the base.
    return _settings((sides[1], sides[0]), options, given.get("layer_map") or given.get("layer_mapping"))


def _is_options(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and key in _OLD_OPTIONS for key in value)


def _by_name(
    what: str,
    names: Sequence[str],
    required: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    extra: Sequence[str],
) -> dict[str, Any]:
    if len(args) > len(names):
        raise UsageError(f"{what} takes at most {len(names)} positional arguments, got {len(args)}")
    given = dict(zip(names, args))
    for name, value in kwargs.items():
        if name not in names and name not in extra:
            raise UsageError(f"{what}: unknown argument {name!r}. {nearest(name, [*names, *extra])}")
        if name in given:
            raise UsageError(f"{what}: {name!r} is given twice, by position and by name")
        given[name] = value
    missing = [name for name in required if name not in given]
    if missing:
        raise UsageError(f"{what} needs {', '.join(required)}; {', '.join(missing)} is missing")
    return given


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


def _settings(sides: tuple[Side, Side], options: Mapping[str, Any], layer_map: Any) -> Settings:
    base, raw = sides
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
    pairs = LayerMap.resolve(layer_map, base.live.nodes, raw.live.nodes)
    by_rule = _ruled(base, raw, pairs)
    wholes = [pair for pair in (*pairs, *by_rule) if ROOT not in pair and None not in pair]
    base.mapped, raw.mapped = (_own_paths(side, [pair[k] for pair in wholes]) for k, side in enumerate(sides))
    return Settings(
        ruled=by_rule,
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
    )


def _ruled(base: Side, raw: Side, pairs: LayerMap) -> tuple[tuple[str, str], ...]:
    """Layers that answer to each other and that a rule of the user's is about, without those of the map."""
    rules = ruled(base.framework.name, raw.framework.name)
    if not rules:
        return ()
    given = [{pair[k] for pair in pairs} for k in (0, 1)]
    return tuple(
        (pair.reference.path, pair.candidate.path)
        for pair in align(base.live.info, raw.live.info, pairs, whole=rules).pairs
        if pair.reference.path not in given[0]
        and pair.candidate.path not in given[1]
        and special_init(
            base.framework.name,
            base.live.layer(pair.reference.path),
            raw.framework.name,
            raw.live.layer(pair.candidate.path),
        )
    )


def _own_paths(side: Side, paths: Sequence[str]) -> tuple[str, ...]:
    """The paths that name layers, without wrong ones: those are told where the map is used."""
    known = {path for node in side.live.nodes for path in node.paths}
    return tuple(path for path in paths if path in known)

"""Arguments of ``auto_diff``: the names of all interface generations, checked against the models, as settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.align import align
from padiff.align.layers import entries
from padiff.compare import Tolerance
from padiff.errors import UsageError
from padiff.frameworks import framework_of_tensor
from padiff.frameworks.settings import FRAMEWORKS
from padiff.model.given_map import GivenMap
from padiff.model.selection import select
from padiff.model.tree import LiveModel, frameworks_name, is_proxy, layers_at, owning
from padiff.records import ROOT, Both
from padiff.system.terminal import nearest
from padiff.weights.assign import torch_is_second
from padiff.weights.carried_state import ruled, special_init

#: The options, with their defaults.
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
_NEW_MODELS, _OLD_MODELS = ("base_model", "raw_model"), ("layer", "module")
# Older argument names, with the current ones.
_RENAMED = {
    "example_inp": "inputs",
    "auto_weights": "auto_init",
    "loss_fn": "loss_fns",
    "optimizer": "optimizers",
    "layer_mapping": "layer_map",
    "layer": "first",
    "module": "second",
    "base_model": "first",
    "raw_model": "second",
}
# Names that only the first generation has: one of these identifies a call of the first generation.
_OLD_ONLY = frozenset({*_OLD_MODELS, "example_inp", "auto_weights", "options", "layer_mapping", "loss_fn", "optimizer"})
_WORDS = (*_RENAMED, "inputs", "loss_fns", "optimizers", "layer_map", "options", *OPTIONS)
_OPTION_WORDS = (*OPTIONS, "auto_weights")


@dataclass(frozen=True)
class AutoDiffCall:
    """The arguments of a call of ``auto_diff``. Pairs are in the order of the models in the call.

    Attributes:
        models, inputs, loss_fns, optimizers: one item for each of the two models.
        layer_map: a layer map, in a form that `padiff.model.given_map.GivenMap.from_value` accepts.
        options: all options; those missing in the call have their defaults.
        first_generation: True if the call uses names of the first generation.
        swapped: True if the second model is the reference: in the first generation's calls with a paddle layer and a
            torch module, torch is the reference.
    """

    models: Both[Any]
    inputs: Any
    loss_fns: Any
    optimizers: Any
    layer_map: Any
    options: Mapping[str, Any]
    first_generation: bool
    swapped: bool


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AutoDiffCall:
    """Read the arguments of a call.

    Raises:
        UsageError: an argument is missing, unknown, or contradicts another.
    """
    named = bool(kwargs.keys() & set(_NEW_MODELS))
    old_shape = len(args) > 3 and isinstance(args[3], bool)
    old = old_shape or bool(_OLD_ONLY & kwargs.keys())
    if named and kwargs.keys() & set(_OLD_MODELS):
        raise UsageError(
            "auto_diff: layer and module are the first generation's words for the two models, base_model and raw_model "
            "the second's: give one or the other"
        )
    words = (*_OLD_MODELS, "example_inp") if old and not named else (*_NEW_MODELS, "inputs")
    call = _Words()
    for word, value in zip(words, args):
        call.add(word, value)
    _put_rest(call, args[3:], old_shape)
    for word, value in kwargs.items():
        if word not in _WORDS:
            raise UsageError(f"auto_diff: unknown argument {word!r}. {nearest(word, _WORDS)}")
        call.add(word, value)
    missing = [word for word, name in zip(words, ("first", "second", "inputs")) if name not in call.values]
    if missing:
        raise UsageError(f"auto_diff needs {', '.join(words)}; {', '.join(missing)} is missing")
    values = call.values
    models = Both(values["first"], values["second"])
    if not old and len(args) == 3 and kwargs and kwargs.keys() <= {"steps", "layer_map"}:
        # Both generations have these names: a paddle layer followed by a torch module identifies the first generation.
        old = torch_is_second(models)
    return AutoDiffCall(
        models=models,
        inputs=values["inputs"],
        loss_fns=values.get("loss_fns"),
        optimizers=values.get("optimizers"),
        layer_map=values.get("layer_map"),
        options={name: values.get(name, default) for name, default in OPTIONS.items()},
        first_generation=old,
        swapped=old and not named and torch_is_second(models),
    )


class _Words:
    """The arguments read so far, by their current names. Equal duplicates are accepted, contradictions are errors."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._places: dict[str, str] = {}

    def add(self, word: str, value: Any, where: str = "") -> None:
        """Add a value; ``where`` names its place in error messages."""
        if word == "options":
            self._put_options(value)
            return
        name, place = _RENAMED.get(word, word), where or word
        if name in ("loss_fns", "optimizers", "layer_map") and _is_nothing(value):
            return
        if name not in self.values:
            self.values[name], self._places[name] = value, place
            return
        previous = self._places[name]
        if previous == place:
            raise UsageError(f"auto_diff: {word!r} is given twice, by position and by name")
        if not _same(self.values[name], value):
            raise UsageError(
                f"auto_diff: {previous} and {place} say different things: {_short(self.values[name])} and "
                f"{_short(value)}. Give one of them"
            )

    def _put_options(self, options: Any) -> None:
        if options is None:
            return
        if not isinstance(options, Mapping):
            raise UsageError(f"auto_diff: options is a dictionary of {', '.join(OPTIONS)}, got {_short(options)}")
        for key, value in options.items():
            if key not in _OPTION_WORDS:
                raise UsageError(f"auto_diff: unknown option {key!r}. {nearest(str(key), _OPTION_WORDS)}")
            self.add(key, value, f"options[{key!r}]")


def _put_rest(call: _Words, values: Sequence[Any], old_shape: bool) -> None:
    """Add the positional arguments that follow the models and inputs."""
    if not old_shape:
        if len(values) > 2:
            raise UsageError(f"auto_diff takes at most 5 positional arguments, got {3 + len(values)}")
        for word, value in zip(("loss_fns", "optimizers"), values):
            call.add(word, value)
        return
    call.add("auto_weights", values[0])
    losses = 0
    for value in values[1:]:
        # The first generation's documents disagree on the order of these arguments: the type decides.
        if isinstance(value, int) and not isinstance(value, bool):
            call.add("steps", value)
        elif isinstance(value, (GivenMap, Mapping)):
            call.add("options" if _is_options(value) else "layer_map", value)
        elif losses < 2:
            call.add(("loss_fn", "optimizer")[losses], value)
            losses += 1
        else:
            raise UsageError(f"auto_diff: too many positional arguments; {_short(value)} is none that it takes")


def _is_options(value: Any) -> bool:
    """Return True if a mapping holds options, not layers: by names of options, or by values that are no layer paths."""
    if isinstance(value, GivenMap) or not value or not all(isinstance(key, str) for key in value):
        return False
    return any(key in _OPTION_WORDS for key in value) or any(isinstance(v, (bool, int, float)) for v in value.values())


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (GivenMap, Mapping)) and not len(value))


def _same(first: Any, second: Any) -> bool:
    plain = (bool, int, float, str, GivenMap, dict)
    return first is second or (isinstance(first, plain) and isinstance(second, plain) and bool(first == second))


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass
class ModelSetup:
    """One of the two models with its inputs, loss function and optimizer."""

    name: str
    live: LiveModel
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Any] | None
    optimizer: Any
    #: Paths of the mapped layers; layers below these are not compared.
    mapped: tuple[str, ...] = ()

    @property
    def framework(self) -> Any:
        return self.live.framework

    @property
    def chosen(self) -> frozenset[str]:
        """Return the paths of the layers to record: all, restricted by the proxy's lists and the layer map."""
        chosen: frozenset[str] = self.model.padiff_chosen if is_proxy(self.model) else self._all
        return select(self.live.nodes, hidden=self.mapped) & chosen

    @property
    def owning(self) -> frozenset[str]:
        """Return the paths of the layers whose parameters to record."""
        listed: frozenset[str] = self.model.padiff_owning if is_proxy(self.model) else self._all
        return owning(
            self.live.nodes, self.framework, select(self.live.nodes, hidden=self.mapped) & listed, self.mapped
        )

    @property
    def _all(self) -> frozenset[str]:
        return frozenset(node.path for node in self.live.nodes)


@dataclass
class Settings:
    """All settings of a call of ``auto_diff``."""

    sides: Both[ModelSetup]
    tolerance: Tolerance
    auto_init: bool
    diff_phase: str
    single_step: bool
    steps: int
    layer_map: GivenMap
    same_dropout: bool = False
    full_stacks: bool = False
    remarks: tuple[str, ...] = ()
    #: True if the call has the first generation's form.
    first_generation: bool = False
    #: Pairs of layers, by path, with a rule of the user; and the subset of these pairs that is not in the layer map.
    ruled: tuple[tuple[str, str], ...] = ()
    ruled_besides: tuple[tuple[str, str], ...] = ()

    @property
    def mapped(self) -> list[tuple[str, str]]:
        """Return the pairs of layers that are compared by their outputs, without the layers below."""
        return list(zip(self.sides.reference.mapped, self.sides.candidate.mapped))

    def whole_map(self) -> GivenMap:
        """Return the layer map with the pair of root layers added, so that the models' outputs are always compared."""
        pairs = [*self.layer_map, *self.ruled_besides]
        return GivenMap(pairs if any(ROOT in pair for pair in pairs) else [(ROOT, ROOT), *pairs])

    def options(self) -> dict[str, Any]:
        """Return the effective options for the log."""
        return {
            "auto_init": self.auto_init,
            "atol": self.tolerance.atol,
            "rtol": self.tolerance.rtol,
            "diff_phase": self.diff_phase,
            "compare_mode": self.tolerance.mode,
            "single_step": self.single_step,
            "steps": self.steps,
            "use_loss": self.sides.reference.loss_fn is not None,
            "use_opt": self.sides.reference.optimizer is not None,
        }


def check_call(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, live: LiveModel) -> None:
    """Check that the model's forward accepts these inputs, and that their framework and device are the model's.

    Raises:
        UsageError: the inputs do not fit.
    """
    signature = inspect.signature(live.model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values())
        hint = ""
        wrong = [key for key in kwargs if key not in signature.parameters]
        if wrong:
            hint = f" {wrong[0]!r} is none of them. {nearest(wrong[0], signature.parameters)}"
        raise UsageError(f"inputs: the {name} model's forward takes ({takes}): {error}.{hint}") from None
    framework = live.framework
    devices = {framework.tensors.device(tensor) for _, tensor in live.tensors()}
    for key, value in (*enumerate(args), *kwargs.items()):
        source = framework_of_tensor(value)
        if source is not None and source is not framework:
            raise UsageError(
                f"inputs: the {name} model is of {framework.name}, its input {key!r} is a tensor of {source.name}"
            )
        if framework.tensors.is_tensor(value) and devices and framework.tensors.device(value) not in devices:
            raise UsageError(
                f"inputs: the {name} model is on {', '.join(sorted(devices))}, an input of it on "
                f"{framework.tensors.device(value)}: bring them to one device"
            )


def check_loss(loss: Any, name: str, live: LiveModel) -> None:
    """Check that a loss is a function of one argument.

    Raises:
        UsageError: the loss is not.
    """
    if not callable(loss):
        raise UsageError(f"loss_fns: the {name} model's loss has to be a function of the output, got {loss!r}")
    try:
        # The signature of a layer is that of its forward: its __call__ accepts anything.
        inspect.signature(loss.forward if live.framework.layers.is_model(loss) else loss).bind(None)
    except TypeError as error:
        raise UsageError(
            f"loss_fns: the {name} model's loss has to take one argument, the model's output ({error}). "
            "Bind the others, by name: functools.partial(loss, label=label)"
        ) from None
    except ValueError:
        pass  # a builtin without a signature


def check_optimizer(optimizer: Any, name: str, live: LiveModel) -> None:
    """Check that an optimizer belongs to the model's framework, or is a function that steps and clears gradients.

    Raises:
        UsageError: the optimizer is neither.
    """
    if optimizer is None or live.framework.optimizers.is_optimizer(optimizer):
        return
    if callable(optimizer) and not hasattr(optimizer, "step"):
        return  # a function without arguments that steps and clears the gradients
    raise UsageError(
        f"optimizers: the {name} model is of {live.framework.name}; expected an optimizer of {live.framework.name} or "
        f"a function without arguments, got {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    )


def drop_inside(side: ModelSetup) -> list[str]:
    """Return the paths of attentions and recurrent layers that apply dropout without a dropout layer."""
    paths = []
    for node in side.live.nodes:
        rate = getattr(node.layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0 and node.layer.training:
            paths.append(node.path)
    return paths


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

"""Arguments of ``auto_diff``: the names of all interface generations, mapped to one name each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.records import Both
from padiff.system.spelling import nearest
from padiff.weights.arguments import torch_is_second

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

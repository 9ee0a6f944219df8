"""The arguments of ``auto_diff``, in the words of whichever generation of the interface, under one name each."""

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
# Older words for what has another name now.
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
# What only the first generation has: one of these in a call says that it is of the first generation.
_OLD_ONLY = frozenset({*_OLD_MODELS, "example_inp", "auto_weights", "options", "layer_mapping", "loss_fn", "optimizer"})
_WORDS = (*_RENAMED, "inputs", "loss_fns", "optimizers", "layer_map", "options", *OPTIONS)
_OPTION_WORDS = (*OPTIONS, "auto_weights")


@dataclass(frozen=True)
class AutoDiffCall:
    """A call of ``auto_diff``: two models, in the order in which it gives them, and what belongs to them in that order.

    Attributes:
        models, inputs, loss_fns, optimizers: of the two models.
        layer_map: as `padiff.model.given_map.GivenMap.of` takes it.
        options: all options, those that the call does not give with their defaults.
        first_generation: whether the first generation's words are in it.
        swapped: whether the second model is the reference: of a paddle layer and a torch module in the first
            generation's words, torch is the one to trust.
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
    """What a call says.

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
        call.put(word, value)
    _put_rest(call, args[3:], old_shape)
    for word, value in kwargs.items():
        if word not in _WORDS:
            raise UsageError(f"auto_diff: unknown argument {word!r}. {nearest(word, _WORDS)}")
        call.put(word, value)
    missing = [word for word, name in zip(words, ("first", "second", "inputs")) if name not in call.values]
    if missing:
        raise UsageError(f"auto_diff needs {', '.join(words)}; {', '.join(missing)} is missing")
    values = call.values
    models = Both(values["first"], values["second"])
    if not old and len(args) == 3 and kwargs and kwargs.keys() <= {"steps", "layer_map"}:
        # These two alone: a paddle layer first, a torch module second is how the first generation has it.
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
    """What was given so far, by today's names; giving it twice is no mistake, contradicting oneself is."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._places: dict[str, str] = {}

    def put(self, word: str, value: Any, where: str = "") -> None:
        """Take a value; ``where`` is what an error calls its place."""
        if word == "options":
            self._put_options(value)
            return
        name, place = _RENAMED.get(word, word), where or word
        if name in ("loss_fns", "optimizers", "layer_map") and _is_nothing(value):
            return
        if name not in self.values:
            self.values[name], self._places[name] = value, place
            return
        other = self._places[name]
        if other == place:
            raise UsageError(f"auto_diff: {word!r} is given twice, by position and by name")
        if not _same(self.values[name], value):
            raise UsageError(
                f"auto_diff: {other} and {place} say different things: {_short(self.values[name])} and "
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
            self.put(key, value, f"options[{key!r}]")


def _put_rest(call: _Words, rest: Sequence[Any], old_shape: bool) -> None:
    """What stands behind models and inputs, by position."""
    if not old_shape:
        if len(rest) > 2:
            raise UsageError(f"auto_diff takes at most 5 positional arguments, got {3 + len(rest)}")
        for word, value in zip(("loss_fns", "optimizers"), rest):
            call.put(word, value)
        return
    call.put("auto_weights", rest[0])
    losses = 0
    for value in rest[1:]:
        # The two documents of this generation disagree about the order from here on: the type decides.
        if isinstance(value, int) and not isinstance(value, bool):
            call.put("steps", value)
        elif isinstance(value, (GivenMap, Mapping)):
            call.put("options" if _is_options(value) else "layer_map", value)
        elif losses < 2:
            call.put(("loss_fn", "optimizer")[losses], value)
            losses += 1
        else:
            raise UsageError(f"auto_diff: too many positional arguments; {_short(value)} is none that it takes")


def _is_options(value: Any) -> bool:
    """Whether a mapping is of options rather than of layers: by its keys, or for values that are no layers' paths."""
    if isinstance(value, GivenMap) or not value or not all(isinstance(key, str) for key in value):
        return False
    return any(key in _OPTION_WORDS for key in value) or any(isinstance(v, (bool, int, float)) for v in value.values())


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (GivenMap, Mapping)) and not len(value))


def _same(one: Any, other: Any) -> bool:
    plain = (bool, int, float, str, GivenMap, dict)
    return one is other or (isinstance(one, plain) and isinstance(other, plain) and bool(one == other))


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."

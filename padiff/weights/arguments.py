"""Arguments of ``assign_weight``, in either of its two call forms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.conventions import FRAMEWORKS
from padiff.model.live_model import frameworks_name
from padiff.records import Both

_NEW, _OLD = ("base_model", "raw_model"), ("layer", "module")
_MORE = ("layer_map", "inputs", "partial")


@dataclass(frozen=True)
class AssignCall:
    """The arguments of a call of ``assign_weight`` in one form.

    Attributes:
        models: the source of the weights (reference) and the model that receives the weights (candidate).
        inputs: inputs of the two models, in the same order.
        partial: True to carry over the weights that fit and list all others.
        swapped: True if the source of the weights is the second model in the call.
    """

    models: Both[Any]
    layer_map: Any = None
    inputs: Any = None
    partial: bool = False
    swapped: bool = False


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AssignCall:
    """Read the arguments: ``(base_model, raw_model)``, or the first generation's ``(layer, module, layer_map)``.

    Raises:
        UsageError: the arguments have neither form, or mix both.
    """
    names = _OLD if kwargs.keys() & set(_OLD) else _NEW
    values = dict(zip((*names, "layer_map"), args))
    allowed = {*names, *_MORE}
    if len(args) > 3 or kwargs.keys() - allowed or values.keys() & kwargs.keys() or not {*names} <= {*values, *kwargs}:
        raise UsageError(
            "assign_weight takes (base_model, raw_model), or (layer, module, layer_map) as in the first generation, "
            f"and layer_map, inputs, partial by name; got {len(args)} positional arguments"
            + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    values |= kwargs
    partial = values.get("partial", False)
    if not isinstance(partial, bool):
        raise UsageError(f"assign_weight: partial is True or False, got {partial!r}")
    if isinstance(values[names[1]], (str, os.PathLike)):
        raise UsageError(f"assign_weight: weights go into a live model, got the path {str(values[names[1]])!r}")
    # Only the first generation's form had a positional layer map; the keyword `base_model` rules that form out.
    old = names is _OLD or ("layer_map" in values and not kwargs.keys() & set(_NEW))
    models, inputs = Both(*(values[name] for name in names)), values.get("inputs")
    swapped = old and torch_is_second(models)
    if swapped:
        models = models.swapped()
        inputs = inputs[::-1] if isinstance(inputs, (list, tuple)) else inputs
    return AssignCall(models, values.get("layer_map"), inputs, partial, swapped)


def torch_is_second(models: Both[Any]) -> bool:
    """Return True if the models are a paddle layer and a torch module, the pair of the first generation's calls.

    In calls of the first generation the torch module of such a pair is the reference. For all other pairs the first
    model is the reference.
    """
    if any(isinstance(model, (str, os.PathLike)) for model in models):
        return False
    return models.map(lambda model: FRAMEWORKS[frameworks_name(model)].layer) == Both("layer", "module")

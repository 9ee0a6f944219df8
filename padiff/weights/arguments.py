"""The arguments of ``assign_weight``, in the words of whichever generation of the interface."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.known import FRAMEWORKS
from padiff.model.live_model import frameworks_name
from padiff.records import Both

_NEW, _OLD = ("base_model", "raw_model"), ("layer", "module")
_MORE = ("layer_map", "inputs", "partial")


@dataclass(frozen=True)
class AssignCall:
    """A call of ``assign_weight``, understood.

    Attributes:
        models: the one that the weights come from, and the one that they go to.
        inputs: theirs, in this order.
        partial: whether what fits is carried over, and the rest listed.
        swapped: whether the weights come from the second of the two models as the call gives them.
    """

    models: Both[Any]
    layer_map: Any = None
    inputs: Any = None
    partial: bool = False
    swapped: bool = False


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AssignCall:
    """The call: ``(base_model, raw_model)``, or the first generation's ``(layer, module, layer_map)``.

    Raises:
        UsageError: the arguments are of neither form, or of both.
    """
    names = _OLD if kwargs.keys() & set(_OLD) else _NEW
    given = dict(zip((*names, "layer_map"), args))
    known = {*names, *_MORE}
    if len(args) > 3 or kwargs.keys() - known or given.keys() & kwargs.keys() or not {*names} <= {*given, *kwargs}:
        raise UsageError(
            "assign_weight takes (base_model, raw_model), or (layer, module, layer_map) as in the first generation, "
            f"and layer_map, inputs, partial by name; got {len(args)} positional arguments"
            + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    given |= kwargs
    partial = given.get("partial", False)
    if not isinstance(partial, bool):
        raise UsageError(f"assign_weight: partial is True or False, got {partial!r}")
    if isinstance(given[names[1]], (str, os.PathLike)):
        raise UsageError(f"assign_weight: weights go into a live model, got the path {str(given[names[1]])!r}")
    # A layer map went with the first generation's form alone; who writes `base_model` says which is which.
    old = names is _OLD or ("layer_map" in given and not kwargs.keys() & set(_NEW))
    models, inputs = Both(*(given[name] for name in names)), given.get("inputs")
    swapped = old and torch_is_second(models)
    if swapped:
        models = models.swapped()
        inputs = inputs[::-1] if isinstance(inputs, (list, tuple)) else inputs
    return AssignCall(models, given.get("layer_map"), inputs, partial, swapped)


def torch_is_second(models: Both[Any]) -> bool:
    """Whether two models, as a call gives them, are the first generation's pair, a paddle layer and a torch module.

    Of such a pair torch is the one to trust, in calls of that generation; of any other pair it is the first.
    """
    if any(isinstance(model, (str, os.PathLike)) for model in models):
        return False
    return models.map(lambda model: FRAMEWORKS[frameworks_name(model)].layer) == Both("layer", "module")

"""What a run declares beside its tensors: optimizers, clipping, loss, train or eval.

Settings are a flat mapping from names that both frameworks share (``optimizer.0.group.1.beta2``, ``loss.reduction``)
to plain values: numbers, words, switches, and lists of them. What gathers them is `padiff.recorder.settings`, what
compares them `padiff.compare.declared`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError

Settings = Mapping[str, Any]

# Names of a step, and items of a list, that are read of a folder at most.
_MOST = 1_000_000


def settings_at(run: Settings, step: Settings) -> dict[str, Any]:
    """What holds in a step: the run's settings with the step's over them; a name that is gone has `None` there."""
    return {name: value for name, value in {**run, **step}.items() if value is not None}


def settings_delta(run: Settings, now: Settings) -> dict[str, Any]:
    """What a step has to say so that `settings_at` gives what holds in it."""
    found = {name: value for name, value in now.items() if name not in run or not _same(run[name], value)}
    return found | {name: None for name in run if name not in now}


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def plain_setting(value: Any) -> Any:
    """A value as it may stand among settings; `None` where it can't.

    Numbers of numpy and tensors of one element become plain numbers, what is no finite number becomes the word for it.
    """
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain_setting(item) for item in value]
        return items if all(item is not None and not isinstance(item, list) for item in items) else None
    if isinstance(value, int):
        return value if abs(value) < 2**63 else float(value)
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, (bool, int)):
            return number
        number = float(number) if isinstance(number, float) else None
    except Exception:  # a tensor of several elements, or one that has no value
        return None
    return number if number is None or math.isfinite(number) else str(number)


def settings_from_json(content: Any) -> dict[str, Any]:
    """The settings of a run folder.

    Raises:
        UsageError: they are no mapping of names to plain values.
    """
    wrong = "settings are a mapping of names to numbers, words, switches, lists of them, or null"
    if not isinstance(content, Mapping) or len(content) > _MOST:
        raise UsageError(wrong)
    for value in content.values():
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
            raise UsageError(wrong)
    return {str(name): value for name, value in content.items()}


def setting_text(value: Any) -> str:
    """A setting's value in words."""
    if value is None:
        return "not set"
    return str(float(f"{value:.7g}")) if isinstance(value, float) else str(value)

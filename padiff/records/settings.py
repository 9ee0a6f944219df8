"""Settings that a run declares beside its tensors: optimizers, clipping, loss, train or eval.

Settings are a flat mapping from names that both frameworks share (``optimizer.0.group.1.beta2``, ``loss.reduction``) to
plain values: numbers, words, switches, and lists of them. `padiff.recorder.settings` collects them,
`padiff.compare.declared` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError

Settings = Mapping[str, Any]

# Maximum number of names that are accepted from a folder.
_MOST = 1_000_000


def settings_at(run: Settings, step: Settings) -> dict[str, Any]:
    """Return the settings that apply in a step: the run's, updated by the step's; `None` in a step removes a name."""
    return {name: value for name, value in {**run, **step}.items() if value is not None}


def settings_delta(run: Settings, now: Settings) -> dict[str, Any]:
    """Return the settings that a step has to store so that `settings_at` returns `now`."""
    changed = {name: value for name, value in now.items() if name not in run or not _same(run[name], value)}
    return changed | {name: None for name in run if name not in now}


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and bool(first == second)


def plain_setting(value: Any) -> Any:
    """Return a value as a plain value for settings; `None` if there is no plain value.

    Numbers of numpy and tensors of one element become plain numbers; NaN and infinities become words.
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
    """Return the settings from the parsed JSON of a run folder.

    Raises:
        UsageError: the content is no mapping of names to plain values.
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
    """Return a setting's value in words."""
    if value is None:
        return "not set"
    return str(float(f"{value:.7g}")) if isinstance(value, float) else str(value)

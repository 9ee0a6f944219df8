"""The share of the first diff that an edit of the candidate explains, by the arithmetic of the causes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.engine import Trial, trials
from padiff.records.cause import Cause
from padiff.records.diagnostic import named_at

_KEYWORD = re.compile(r"\b([A-Za-z_]\w*)\s*(?:=|:)\s*([^\s,()]+)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)")
_WORD = re.compile(r"[A-Za-z_]{3,}")
# Words of an edit that say nothing about a cause.
_FILLERS = frozenset({
    "the", "and", "with", "for", "from", "instead", "use", "set", "add", "remove", "change", "make", "not", "its",
    "paddle", "torch", "nn",
})  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """An edit that was computed.

    Attributes:
        kind, text, fix: the cause that the edit would remove, and the line of code; the line may be empty.
        share: share of the difference that the cause explains, 0 to 1: 1 minus the error that is left, over the error
            without it.
        remaining: error that is left, as a multiple of the rounding noise; `None` if nothing is explained.
        proven: True if what is left is rounding, and not by chance.
    """

    kind: str
    text: str
    fix: str
    share: float
    remaining: float | None
    proven: bool


def explanations(scene: DiffContext, cause: Cause | None = None) -> list[Explanation]:
    """Return every edit that applies to a scene's first diff, the one that explains most first.

    Args:
        scene: the first diff, and the records around it.
        cause: the cause that the report names; its fix is that of an explanation without one, of the same kind or
            about the same argument.
    """
    found = [_explanation(trial) for trial in trials(scene)]
    if cause is not None and cause.fix:
        fix = cause.fix
        names = [name for name, _ in _KEYWORD.findall(fix)]
        for k, each in enumerate(found):
            is_named = any(named_at(_words(each), name) is not None for name in names)
            if not each.fix and (each.kind == cause.kind or is_named):
                found[k] = replace(each, fix=fix)
    return sorted(found, key=lambda each: (-each.share, not each.proven))


def matching(edit: str, known: Sequence[Explanation]) -> list[Explanation]:
    """Return the computed edits that a text such as ``eps=1e-3`` or ``mean instead of sum`` asks for.

    An edit that sets an argument matches if it names the argument and the value; other texts by their words, of which
    most have to be named, and by their numbers.
    """
    arguments = dict(_KEYWORD.findall(edit))
    if arguments:
        return [each for each in known if all(_sets(each, *argument) for argument in arguments.items())]
    words = [word for word in _WORD.findall(edit) if word.lower() not in _FILLERS]
    numbers = _numbers(edit)
    return [
        each
        for each in known
        if words
        and 2 * sum(named_at(_words(each), word) is not None for word in words) > len(words)
        and numbers <= _numbers(_words(each))
    ]


def _explanation(trial: Trial) -> Explanation:
    weight, hypothesis = trial.weight, trial.hypothesis
    known = math.isfinite(weight.residual) and weight.without > 0
    share = max(0.0, 1.0 - weight.residual / weight.without) if known else 0.0
    try:
        fix = hypothesis.fix_line
    except Exception:  # a fix that has to be computed from tensors that are gone
        fix = ""
    return Explanation(
        hypothesis.kind, hypothesis.sentence, fix, share, weight.residual if known else None, trial.proven
    )


def _sets(each: Explanation, name: str, value: str) -> bool:
    """Return True if an explanation's fix gives an argument this value; without a fix, if its words name both."""
    for named, given in _KEYWORD.findall(each.fix):
        if named_at(named, name) is not None:
            return _is_same(given, value)
    numbers = _numbers(value)
    is_named = named_at(_words(each), name) is not None
    return is_named and (numbers <= _numbers(_words(each)) if numbers else value.lower() in _words(each).lower())


def _is_same(value: str, other: str) -> bool:
    numbers = [_numbers(text) for text in (value, other)]
    return numbers[0] == numbers[1] if all(numbers) else value.strip("\"'").lower() == other.strip("\"'").lower()


def _numbers(text: str) -> set[float]:
    return {float(each) for each in _NUMBER.findall(text)}


def _words(each: Explanation) -> str:
    return f"{each.kind.replace('_', ' ')} {each.text} {each.fix}"

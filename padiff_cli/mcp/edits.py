"""Edits as text, such as ``eps=1e-5`` or ``mean instead of sum``: the computed explanations that are about one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from padiff.compare.diagnose.hypotheses.engine import Explanation
from padiff.frameworks.catalog import common_name
from padiff.records import Both
from padiff.records.diagnostic import ARGUMENT_NAMES, named_at

_KEYWORD = re.compile(r"\b([A-Za-z_]\w*)\s*(?:=(?!=)|:)\s*([^\s,()]+)")
_BETAS = re.compile(r"\bbetas\s*=\s*[(\[]\s*([^\s,]+)\s*,\s*([^\s,)\]]+)\s*[)\]]")
_LIST = re.compile(r"\b(\w+)\s*=\s*(?:[\w.]+\()?(\[[-+\d.e,\s]*\])\)?")
# A list of names, whose order is all that an edit may be about.
_PARTS = re.compile(r"[(\[]\s*\[\s*[A-Za-z_]")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)")
_WORD = re.compile(r"[A-Za-z_]\w{2,}")
_ENDING = re.compile(r"(?<=\w{4})(?:ing|ed|s)$")
_INSTEAD = re.compile(r"\b(?:instead of|rather than|for)\b", re.IGNORECASE)
_CALL = re.compile(r"\s*(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)\(.*\)\s*")
_INVERSE, _ROOT = re.compile(r"\b1(?:\.0)?\s*/"), re.compile(r"sqrt|\*\*\s*-?0?\.5")
# A number as a root, which a text has beside the number.
_AS_ROOT = re.compile(r" \((?:1 / )?sqrt\(\d+\)\)")
# "... uses ReLU for the reference's GELU": where the words of what the candidate needs begin.
_FOR = re.compile(r" for (?:what )?the (?:reference's )?")
# The argument of GELU that chooses its form.
_GELU = re.compile(r"\bapproximate\s*=\s*(?:(True|[\"']tanh[\"'])|False|[\"']none[\"']|None)")
# Words of an edit that say nothing about a cause.
_FILLERS = frozenset({
    "the", "and", "with", "from", "use", "set", "add", "remove", "change", "make", "not", "its", "paddle", "torch",
    "nn", "layer", "function", "call", "return", "self",
})  # fmt: skip
# What people write of an edit, in words or as code, and what explanations of it say. The first row counts.
_CHANGES = (
    (r"\w\([^()]*\w \+ \w[^()]*\)$|\b(?:before|after) the \w+", r"of the sum|before the|order"),
    (r"residual|skip|shortcut|\b\w+ \+ [\w.]+\(|\) \+ \w+\b(?!\()", r"residual"),
    (r"\bscal|multipl|divid|\* ?[\w.]|[\w)] ?/ ?[\w.]", r"scale|mul\(|div\(|times|divided"),
)
# An edit that takes something away, and what explanations of it say.
_REMOVED, _SURPLUS = (
    re.compile(r"\s*(?:remove|drop|delete|leave out)\b"),
    re.compile(r"\bmore\b|\bno\b|only the candidate|left out"),
)
# Least share of an explanation that decides about other values of its argument, and least number of learning rates that
# show the form of a schedule: a cosine has three numbers.
_DECIDES, _LEAST_RATES = 0.9, 4
# Words of explanations by one number for each group of parameters: one number is none of them.
_OF_GROUPS = "by parameter group"
# Least share of an explanation that a change in words may mean. Chosen.
_MOSTLY = 0.5


def answering(
    edit: str, known: Sequence[Explanation], has: Mapping[str, object] = MappingProxyType({})
) -> list[Explanation]:
    """Return the explanations that an edit asks for.

    An edit that sets an argument asks for the explanations of this argument; other texts for those with their words. If
    they need another value than the edit has, the answer is what the edit leaves: the share is estimated on the line
    between the values of the two sides, and nothing is proven.

    Args:
        edit: the edit.
        known: the explanations.
        has: what the candidate declares, by the name of the setting: an argument that it has already changes nothing.
    """
    edit = _GELU.sub(lambda match: f"{'tanh-form' if match[1] else 'exact'} GELU", edit)
    wanted, _, replaced = _INSTEAD.sub("\0", edit, count=1).partition("\0")
    arguments, numbers = _arguments(edit), _numbers(_INVERSE.sub("", wanted))
    if _PARTS.search(edit):
        arguments, numbers = {}, set()
    changed = {name: value for name, value in arguments.items() if _numbers(value) != {has.get(name)}}
    if changed and len(changed) < len(arguments):
        arguments, numbers = changed, set().union(*map(_numbers, changed.values()))
    # What an edit of one of several causes leaves is not computed.
    known = [each for each in known if each.kind.count("+") < max(1, len(arguments))]
    if _REMOVED.match(edit):
        known = [each for each in known if _SURPLUS.search(each.text)]
    call = _CALL.fullmatch(edit)
    called = "" if call is None else common_name(call[1]) or call[1]
    changes = [] if arguments or call else [said for text, said in _CHANGES if re.search(text, edit, re.IGNORECASE)]
    named = [name for names in ARGUMENT_NAMES for name in names if named_at(edit, name) is not None and name != "p"]
    if arguments:
        related = [each for name in arguments for each in _about(name, known)]
        setting = [[each for each in known if _sets(each, *argument)] for argument in arguments.items()]
        agreeing = [each for each in setting[0] if all(each in explained for explained in setting)]
        if len(arguments) > 1 and not all(_about(name, known) for name in arguments):
            return []  # what the other argument does is not known
        if not agreeing and all(setting):
            # Several causes, with an argument each.
            agreeing = list({id(each): each for explained in setting for each in explained[:1]}.values())
        if not related and not any(name in names for names in ARGUMENT_NAMES for name in arguments):
            agreeing = _with_numbers(numbers, known)
    else:
        if changes:
            related = [each for each in known if re.search(changes[0], _words(each))]
        elif named and numbers and not call:
            related = [each for each in known if named_at(_words(each), named[0]) is not None]
        else:
            related = _named_by_words(called if call else wanted, replaced, known)
        rooted = _ROOT.search(edit) is not None
        agreeing = [each for each in related if all(_is_needed(number, each, rooted) for number in numbers)]
        # The words of a change are those of many edits: one that explains little may be another one.
        agreeing = [each for each in agreeing if not changes or each.share >= _MOSTLY]
        if not changes:
            agreeing = [each for each in agreeing if not _is_own(each, called if call else wanted)]
        if not agreeing and not call:
            # No word in common: a number may say which one is meant.
            agreeing = _with_numbers(numbers, known)
    if agreeing:
        return agreeing
    kinds = {each.kind for each in related}
    about = [each for each in known if replaced and all(_names(_words(each), word) for word in _telling(replaced))]
    others = about + [each for each in known if each.kind in kinds and each not in about]
    unanswered = (_left(each, numbers) for each in others if each.proven or each.declared or each.share >= _DECIDES)
    return [each for each in unanswered if each is not None]


def _about(argument: str, known: Sequence[Explanation]) -> list[Explanation]:
    """Return the explanations that name an argument."""
    return [each for each in known if named_at(_words(each), argument) is not None]


def schedule_of(edit: str, rates: Mapping[int, Both[float]]) -> tuple[str, float] | None:
    """Return the form of the schedule whose number an edit gives as the reference has it, and the candidate's number.

    The form is ``cosine`` or ``exponential``. The reference's rates have to follow the form with the edit's number, and
    the candidate's with one other number and the same first and last rate.

    Args:
        edit: the edit, with one number.
        rates: the learning rates of the steps in which they differ, by the number of the step.
    """
    numbers = [float(each) for each in _NUMBER.findall(_INSTEAD.split(edit)[0])]
    if len(numbers) != 1 or numbers[0] <= 0 or len(rates) < _LEAST_RATES:
        return None
    number, steps = numbers[0], np.array(sorted(rates), float)
    reference, candidate = (np.array(list(column), float) for column in zip(*(rates[k] for k in sorted(rates))))
    with np.errstate(all="ignore"):
        start = reference[0] / number ** steps[0]
        weights = (1 + np.cos(np.pi * steps / number)) / 2
        (last, first), *_ = np.linalg.lstsq(np.stack([1 - weights, weights], 1), reference, rcond=None)
        found = [
            ("exponential", start * number**steps, (candidate / start) ** (1 / steps)),
            ("cosine", last * (1 - weights) + first * weights,
             np.pi * steps / np.arccos(2 * (candidate - last) / (first - last) - 1)),
        ]  # fmt: skip
        for form, rule, of_candidate in found:
            if np.allclose(rule, reference, rtol=1e-6, atol=0) and np.allclose(
                of_candidate, of_candidate[0], rtol=1e-4, atol=0
            ):
                return form, float(f"{of_candidate[0]:.6g}")
    return None


def _with_numbers(numbers: set[float], known: Sequence[Explanation]) -> list[Explanation]:
    """Return the certain explanations that need the numbers of an edit, which 0 and 1 do not tell from others.

    Of a scaled input or output no number of the reference's code is known.
    """
    certain = [each for each in known if each.proven or each.declared]
    certain = [each for each in certain if not each.kind.startswith(("input_", "output_"))]
    return [each for each in certain if numbers - {0.0, 1.0} and numbers <= _reference_numbers(each)]


def _named_by_words(wanted: str, replaced: str, known: Sequence[Explanation]) -> list[Explanation]:
    """Return the explanations with most of the words of an edit; of equal ones, first those of what it replaces."""
    words, more = _telling(wanted), _telling(replaced)
    related = [each for each in known if words and 2 * sum(_names(_words(each), w) for w in words) > len(words)]
    return sorted(related, key=lambda e: (not e.proven, -e.share, -sum(_names(_words(e), word) for word in more)))


def _telling(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if word.lower() not in _FILLERS]


def _both_sides(each: Explanation) -> tuple[str, str]:
    """Return what the candidate has and what it needs, as an explanation says; the latter may be empty."""
    has, _, needs = _FOR.sub("\0", _AS_ROOT.sub("", each.text), count=1).partition("\0")
    return has, needs


def _is_own(each: Explanation, wanted: str) -> bool:
    """Return True if an edit's words are of what the candidate has already, not of what it has to get."""
    has, needs = _both_sides(each)
    names = [(_names(has, word), _names(f"{needs} {each.fix}", word)) for word in _telling(wanted) if needs]
    return (True, False) in names and (False, True) not in names


def _left(each: Explanation, numbers: set[float]) -> Explanation | None:
    """Return what an edit leaves that sets another value than the explanation needs.

    `None` if the edit's numbers need not be of the quantity that the explanation has.
    """
    share = 0.0
    reference = _reference_numbers(each)
    if (len(numbers) != len(reference) and numbers and not each.fix) or _OF_GROUPS in each.text:
        return None
    has, needs = _both_sides(each)
    others = [number for number in _ordered_numbers(has) if number not in reference]
    others = others or ([1.0] if each.kind == "scale_missing" else [])  # without a factor
    if len(numbers) == len(reference) == 1 and others:
        (asked,), (needed,), candidate = numbers, reference, others[-1 if needs else 0]
        if needed not in _numbers(each.text) and any(math.isclose(1.0 - needed, number) for number in others):
            # A momentum: the text counts from the other end than the fix.
            candidate = 1.0 - candidate
        share = each.share * max(0.0, 1.0 - abs(asked - needed) / abs(candidate - needed))
    remaining = None if each.without is None else (1.0 - share) * each.without
    text = f"a difference is left: {each.text}"
    return replace(each, text=text, share=share, remaining=remaining, proven=False)


def _reference_numbers(each: Explanation) -> set[float]:
    """Return the numbers that the candidate has to get: of the fix; else those named as the reference's; else all."""
    text = _AS_ROOT.sub("", each.text)
    text = text.rpartition("reference's")[2] if "reference's" in text else text
    return _numbers(each.fix) or _numbers(text) or _numbers(each.text)


def _is_needed(asked: float, each: Explanation, rooted: bool) -> bool:
    """Return True if a number, or its inverse, is one that an explanation needs; of the root, if the edit has one.

    Numbers of three digits and more may be rounded.
    """
    needed = _reference_numbers(each)
    if asked <= 0:
        return asked in needed
    digits = len(f"{asked:.12g}".partition("e")[0].replace(".", "").strip("0"))
    rounded = 10.0 ** (1 - digits) if 3 <= digits <= 6 else 1e-5
    root = asked**0.5
    forms = (asked, 1 / asked, root, 1 / root) if rooted else (asked, 1 / asked)
    return any(math.isclose(form, other, rel_tol=rounded) for form in forms for other in needed)


def _arguments(text: str) -> dict[str, str]:
    """Return the arguments that a text sets; a pair of betas as beta1 and beta2."""
    pairs = {f"beta{k}": value for match in _BETAS.finditer(text) for k, value in enumerate(match.groups(), 1)}
    if "[" in text:
        pairs |= {match[1]: match[2] for match in _LIST.finditer(text)}
        text = _LIST.sub("", text)
    return {**dict(_KEYWORD.findall(_BETAS.sub("", text))), **pairs} if "(" not in _assigned(text) else pairs


def _assigned(text: str) -> str:
    """Return the value of a text that is an assignment, such as ``x = x + self.body(x)``; else nothing."""
    match = re.fullmatch(r"\s*[A-Za-z_][\w.]*\s*=(?!=)\s*(.*)", text)
    return match.group(1) if match is not None else ""


def _sets(each: Explanation, name: str, value: str) -> bool:
    """Return True if an explanation's fix gives an argument this value; without a fix, if its words name both."""
    settings = _arguments(each.fix)
    for spelling in [name] if name in settings else settings:
        # beta1 is no other spelling of beta2, though both are of betas.
        if named_at(spelling, name) is not None and {name, spelling} != {"beta1", "beta2"}:
            if _numbers(settings[spelling]) or not _numbers(value):
                return _is_same(settings[spelling], value)
            break  # a call, whose number is the argument's
    numbers = _numbers(value)
    is_named = named_at(_words(each), name) is not None
    if numbers:
        return is_named and (not each.fix or numbers <= _numbers(each.fix)) and numbers <= _reference_numbers(each)
    return is_named and value.strip("\"'").lower() in _words(each).lower()


def _is_same(value: str, other: str) -> bool:
    numbers = [_ordered_numbers(text) for text in (value, other)]
    return numbers[0] == numbers[1] if all(numbers) else value.strip("\"'").lower() == other.strip("\"'").lower()


def _numbers(text: str) -> set[float]:
    return set(_ordered_numbers(text))


def _ordered_numbers(text: str) -> list[float]:
    return [float(each) for each in _NUMBER.findall(re.sub(r"`[^`]*`", "", text))]  # names of layers have numbers, too


def _names(text: str, word: str) -> bool:
    """Return True if a text has a word; the name of a function, such as ``l1_loss``, is not a part of another name."""
    if not word.isalpha() and re.search(rf"(?<!\w){re.escape(word)}", text, re.IGNORECASE) is None:
        return False
    stem = _ENDING.sub("", word)
    inflected = rf"(?<![^\W_]){re.escape(stem)}(?:s|ed|ing)?(?![^\W_])" if word.isalpha() and len(stem) > 4 else r"(?!)"
    return named_at(text, word) is not None or re.search(inflected, text, re.IGNORECASE) is not None


def _words(each: Explanation) -> str:
    return f"{each.kind.replace('_', ' ')} {each.text} {each.fix}"

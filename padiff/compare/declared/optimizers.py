"""Settings of the optimizers of two runs, compared parameter by parameter."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from padiff.align import Alignment
from padiff.compare.declared.layers import attribute_fix, optimizer_fix, parameter_test
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.frameworks.catalog import epsilon_of, number_text
from padiff.records import LOOP, Both, Diff, Difference, Record, RunInfo, Step, setting_text, unzipped
from padiff.records.pair_table import PairSchema
from padiff.records.step_diffs import StepDiffs
from padiff.records.step_schema import fact_of

_NAME = re.compile(r"optimizer\.(\d{1,6})\.(?:group\.(\d{1,6})\.)?(.+)", re.DOTALL)
# Values of settings that a run does not declare, because the framework lacks the setting or it is off.
_USUAL = {
    "momentum": 0.0, "dampening": 0.0, "nesterov": False, "amsgrad": False, "maximize": False, "centered": False,
    "rescale_grad": 1.0, "lr_decay": 0.0, "initial_accumulator_value": 0.0,
}  # fmt: skip
# Settings that are compared separately, or do not belong to the rule.
_APART = frozenset({"lr", "lr_factor", "rate", "parameters", "others", "clipped", "param_attr", "resumed"})
_FORMS = {"decay.coupled": "coupled, as L2 of the gradient", "decay.decoupled": "decoupled", "decay.l1": "L1"}
# Largest relative difference of equal numbers, one of which may be stored in float32; and of equal learning rates,
# whose schedules add up rounding.
_SAME, _SAME_RATE = 1e-6, 1e-5


@dataclass(frozen=True, eq=False)
class Group:
    """Group of an optimizer's parameters with common settings.

    Attributes:
        is_single: True if the optimizer has no other group.
    """

    rule: str
    values: Mapping[str, Any]
    parameters: tuple[str, ...]
    is_single: bool = False

    @property
    def known(self) -> bool:
        """Return True if the rule is one of the framework's own, with the same meaning in both frameworks."""
        return "." not in self.rule

    def setting(self, name: str, default: float = 0.0) -> float:
        value = self.values.get(name, default)
        return float(value) if isinstance(value, (int, float)) else default


@dataclass(frozen=True)
class Optimizers:
    """Settings of one run's optimizers.

    Attributes:
        groups: all parameter groups.
        by_site: the group of each parameter, by ``layer/slot``.
        count: number of optimizers.
        whole: True if all trained parameters are identified.
    """

    groups: tuple[Group, ...] = ()
    by_site: Mapping[str, Group] = field(default_factory=dict)
    count: int = 0
    whole: bool = False

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Optimizers:
        """Build from a run's settings; malformed entries are ignored."""
        rules: dict[int, str] = {}
        resumed: set[int] = set()
        values: dict[tuple[int, int], dict[str, Any]] = {}
        for name, value in settings.items():
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            number, group, setting = int(match[1]), match[2], match[3]
            if group is not None:
                values.setdefault((number, int(group)), {})[setting] = value
            elif setting == "rule":
                rules[number] = str(value)
            elif setting == "resumed" and value is True:
                resumed.add(number)
        for (number, _), group_values in values.items():
            group_values["resumed"] = number in resumed
        counts = Counter(number for number, _ in values)
        groups = [
            Group(rules[number], group_values, _sites(group_values), counts[number] == 1)
            for (number, _), group_values in sorted(values.items())
            if number in rules
        ]
        is_complete = bool(groups) and not any(group.values.get("others") for group in groups)
        by_site = {site: group for group in groups for site in group.parameters}
        return cls(tuple(groups), by_site, len(rules), is_complete)


def groups_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the key of each parameter's group (``optimizer.0.group.1``), by ``layer/slot``."""
    return {
        site: name.removesuffix(".parameters")
        for name in settings
        if (match := _NAME.fullmatch(name)) is not None and match[2] is not None and match[3] == "parameters"
        for site in _sites({"parameters": settings[name]})
    }


def _sites(values: Mapping[str, Any]) -> tuple[str, ...]:
    listed = values.get("parameters")
    return tuple(site for site in listed if isinstance(site, str)) if isinstance(listed, list) else ()


@dataclass(frozen=True)
class GroupPair(Both[Group]):
    """Two groups with parameters that are paired, and the sites of these parameters."""

    sites: Both[list[str]] = field(default_factory=lambda: Both([], []))


def site_pairs(alignment: Alignment, infos: Both[RunInfo]) -> list[Both[str]]:
    """Return the paired parameters, each by the first name in its run."""
    homes = infos.map(tied_homes)
    by_names = {}
    for pair in alignment.parameters:
        for expected in pair.reference:
            for actual in pair.candidate:
                sites = Both(f"{expected.layer}/{expected.slot}", f"{actual.layer}/{actual.slot}")
                named = homes.zip(sites).map(lambda side: side[0].get(side[1], side[1]))
                by_names[named.reference, named.candidate] = named
    return list(by_names.values())


def tied_homes(info: RunInfo) -> dict[str, str]:
    """Return the first name of each parameter that has several names."""
    return {f"{layer.path}/{p.slot}": p.tied_to for layer in info.layers for p in layer.parameters if p.tied_to}


def group_pairs(optimizers: Both[Optimizers], sites: list[Both[str]]) -> list[GroupPair]:
    """Return the pairs of groups that have paired parameters, with the sites of these parameters."""
    by_groups: dict[tuple[int, int], GroupPair] = {}
    for pair in sites:
        groups = optimizers.zip(pair).map(lambda side: side[0].by_site.get(side[1]))
        if groups.reference is None or groups.candidate is None:
            continue
        key = id(groups.reference), id(groups.candidate)
        if key not in by_groups:
            by_groups[key] = GroupPair(groups.reference, groups.candidate)
        by_groups[key].sites.reference.append(pair.reference)
        by_groups[key].sites.candidate.append(pair.candidate)
    return list(by_groups.values())


@dataclass(frozen=True)
class _Found:
    """Difference between two groups.

    Attributes:
        names: names of the reference's values that fix the difference.
        rule: rule whose values these are.
        base_rate: the learning rate of all of the candidate's groups, if there is one only.
    """

    name: str
    values: Both[Any]
    names: tuple[str, ...]
    rule: str
    changes: bool = True
    note: str = ""
    kind: str = "optimizer_setting"
    base_rate: float | None = None


def optimizer_differences(pairs: list[GroupPair], frameworks: Both[str]) -> Iterator[Difference]:
    """Yield the differences between the groups of two runs; equal differences are merged."""
    yield from _together([(pair, _between(pair, frameworks)) for pair in pairs], frameworks.candidate)


def rate_differences(
    pairs: list[GroupPair], optimizers: Both[Optimizers], steps: Both[Step], frameworks: Both[str]
) -> Iterator[Difference]:
    """Yield the parameters with different learning rates, as the step's records show."""
    # With several optimizers, the records do not tell which optimizer a rate belongs to.
    if max(optimizers.map(lambda side: side.count)) != 1 or not pairs:
        return
    rates = steps.map(_rates)
    differences = []
    is_single = len({id(pair.candidate) for pair in pairs}) == 1
    for pair in pairs:
        expected, actual = pair.zip(rates).map(lambda side: _rate(*side))
        if expected is None or actual is None:
            continue
        values = Both(expected, actual)
        first = max(group.setting("lr") for group in pair)
        # Rates near zero, as at the end of a schedule, are compared relative to the initial rate.
        if abs(values.reference - values.candidate) > _SAME_RATE * max(
            abs(values.reference), abs(values.candidate), 1e-3 * first
        ):
            own = _has_own(pair.candidate, "learning_rate")
            factors = pair.map(lambda group, own=own: group.setting("lr_factor", 1.0) if own else 1.0)  # type: ignore[misc]
            lasting = all(
                math.isclose(group.setting("lr") * factor, rate, rel_tol=_SAME)
                for group, factor, rate in zip(pair, factors, values)
            )
            names = ("lr",) if lasting else ()
            base = pair.candidate.setting("lr") if is_single else None
            difference = _Found("lr", values, names, pair.candidate.rule, kind="learning_rate", base_rate=base)
            differences.append((pair, [difference]))
    yield from _together(differences, frameworks.candidate, len(pairs))


def rates_agree(pairs: list[GroupPair], optimizers: Both[Optimizers], steps: Both[Step]) -> bool:
    """Return True if all parameters trained by both runs are known to have the same learning rate."""
    groups = unzipped(pairs).map(lambda side: {id(group) for group in side})
    paired = all(len(of_pairs) == len(side.groups) for of_pairs, side in zip(groups, optimizers))
    if not paired or not pairs or max(optimizers.map(lambda side: side.count)) != 1:
        return False
    rates = steps.map(_rates)
    rate_pairs = [pair.zip(rates).map(lambda side: _rate(*side)) for pair in pairs]
    return all(None not in (*both,) and math.isclose(*both, rel_tol=_SAME_RATE) for both in rate_pairs)


def _rates(step: Step) -> dict[int, float]:
    """Return the learning rates that a step records, by their numbers."""
    return {number: float(step.records[place].value) for number, place in fact_of(step.records, _rate_places)}


def _rate_places(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Return the number of each learning rate, and the index of its record."""
    numbered = []
    for place, record in enumerate(records):
        if record.layer == LOOP and record.stage == "update":
            name, _, number = record.slot.partition(".")
            if name == "learning_rate":
                numbered.append((int(number or 0), place))
    return numbered


def _rate(group: Group, rates: Mapping[int, float]) -> float | None:
    rate = rates.get(group.values.get("rate", -1))
    return None if rate is None else rate * group.setting("lr_factor", 1.0)


def _together(
    groups: list[tuple[GroupPair, list[_Found]]], framework: str, count: int | None = None
) -> Iterator[Difference]:
    """Merge equal differences of several groups."""
    merged: dict[tuple[Any, ...], tuple[_Found, GroupPair, Both[list[str]], int, bool]] = {}
    for pair, differences in groups:
        for difference in differences:
            key = difference.name, *map(str, difference.values), difference.rule
            first, origin, sites, number, whole = merged.get(key, (difference, pair, Both([], []), 0, True))
            sites.reference.extend(pair.sites.reference)
            sites.candidate.extend(pair.sites.candidate)
            whole = whole and pair.candidate.is_single and {*pair.candidate.parameters} <= {*pair.sites.candidate}
            merged[key] = first, origin, sites, number + 1, whole
    count = len(groups) if count is None else count
    pairs = [pair for pair, _ in groups]
    for difference, pair, sites, number, whole in merged.values():
        # If all groups differ, the parameters need no names.
        parameters = Both((), ()) if number == count else sites.map(tuple)
        yield Difference(
            difference.name,
            difference.values,
            "update",
            difference.kind,
            about="" if difference.name in ("rule", "lr") else pair.reference.rule,
            changes=difference.changes,
            # One optimizer of several needs no groups.
            fix=_fix(difference, pair, framework, () if whole else parameters.candidate, sites.candidate, pairs)
            if difference.names or difference.name == "rule"
            else "",
            parameters=parameters,
            note=difference.note,
        )


def _fix(
    difference: _Found,
    pair: GroupPair,
    framework: str,
    parameters: Sequence[str],
    sites: Sequence[str],
    pairs: Sequence[GroupPair],
) -> str:
    """Return the code that fixes a difference: of the optimizer, or of parameters that have the setting themselves.

    Args:
        parameters: names of the parameters in the optimizer's call; empty for all parameters.
        sites: all parameters that differ.
        pairs: all pairs of groups.
    """
    values = {**_USUAL, **dict.fromkeys(_FORMS, 0.0), **pair.reference.values}
    if difference.name == "weight_decay" and any(_has_own(group, "regularizer") for group in pair):
        return _own_decay_fix(pair, sites)
    if difference.name == "lr" and _has_own(pair.candidate, "learning_rate"):
        factor = pair.candidate.setting("lr_factor", 1.0) * difference.values.reference / difference.values.candidate
        return attribute_fix(sites, f"learning_rate={number_text(factor)}")
    if difference.name == "weight_decay" and framework == "paddle" and parameters:
        excluding = _excluding_fix(pairs)
        if excluding:
            return excluding
    rest = [site for each in pairs for site in each.sites.candidate if site not in sites]
    # Another class may have a weight decay of its own for the rest.
    rest = rest if pair.candidate.is_single and pair.candidate.rule == difference.rule else []
    return optimizer_fix(framework, difference.rule, difference.names, values, parameters, difference.base_rate, rest)


def _excluding_fix(pairs: Sequence[GroupPair]) -> str:
    """Return paddle's AdamW with the parameters that the reference's weight decay excludes; empty if there is none.

    The decay of all other parameters has to be the same number in both runs.
    """
    decays = [pair.map(lambda group: group.setting("decay.decoupled")) for pair in pairs]
    numbers = {value for each in decays for value in each if value}
    if len(numbers) != 1 or any(group.rule != "AdamW" for pair in pairs for group in pair):
        return ""
    sites: Both[list[str]] = Both([], [])  # those without decay, and those with it, by the reference
    for pair, decay in zip(pairs, decays):
        (sites.candidate if decay.reference else sites.reference).extend(pair.sites.candidate)
    if not sites.reference:
        return "paddle.optimizer.AdamW(..., apply_decay_param_fun=None)" if all(map(all, decays)) else ""
    test = parameter_test(*sites)
    if not test:
        return ""
    names = f"p.name for n, p in candidate_model.named_parameters() if {test}"
    has_it = all(decay.candidate for decay in decays if decay.reference)
    number = "" if has_it else f"weight_decay={number_text(numbers.pop())}, "
    excluded = f"{{{names}}}"
    return f"paddle.optimizer.AdamW(..., {number}apply_decay_param_fun=lambda name: name not in {excluded})"


def _has_own(group: Group, argument: str) -> bool:
    """Return True if the parameters of a group have a setting by their own `ParamAttr`, which no optimizer changes."""
    return argument in str(group.values.get("param_attr", "")).split(", ")


def _own_decay_fix(pair: Both[Group], sites: Sequence[str]) -> str:
    """Return the attribute of paddle's parameters that gives them the reference's weight decay; empty if there is none.

    A parameter's own regularizer replaces the optimizer's; a decoupled decay is added to it.
    """
    forms = pair.map(lambda group: {name: group.setting(name) for name in _FORMS})
    decoupled = forms.map(lambda side: side["decay.decoupled"])
    coupled, lasso = (forms.reference[name] for name in ("decay.coupled", "decay.l1"))
    if not _has_own(pair.candidate, "regularizer") or not same(*decoupled) or (coupled and lasso):
        return ""
    kind = "L1Decay" if lasso else "L2Decay"
    return attribute_fix(sites, f"regularizer=paddle.regularizer.{kind}({number_text(float(lasso or coupled))})")


def _between(pair: GroupPair, frameworks: Both[str]) -> list[_Found]:
    reference, candidate = pair.reference, pair.candidate
    if _family(reference.rule) != _family(candidate.rule):
        if not (reference.known and candidate.known):
            return []  # an unknown optimizer class may compute the same
        return [_Found("rule", pair.map(lambda group: group.rule), tuple(_said(reference)), reference.rule)]
    if not reference.known and frameworks.reference != frameworks.candidate:
        return []
    differences = _decay(pair)
    # One call sets all of them: that of the class which has the reference's weight decay.
    rule = differences[0].rule if differences else candidate.rule
    # Where the frameworks add epsilon in different places, the same number is not the same rule.
    places = frameworks.map(lambda framework: epsilon_of(framework, reference.rule))
    elsewhere = places.reference != places.candidate
    values = pair.map(_meant)
    for name in {**values.reference, **values.candidate}:
        if name not in values.reference or name not in values.candidate:
            continue
        both = values.map(lambda side, name=name: side[name])  # type: ignore[misc]
        if same(*both):
            continue
        # The same epsilon means something else where the frameworks add it in different places.
        is_comparable = not (elsewhere and name == "eps")
        names = (name,) if is_comparable else ()
        differences.append(_Found(name, both, names, rule, changes=is_comparable))
    resumed = pair.map(lambda group: bool(group.values.get("resumed")))
    if resumed.reference != resumed.candidate:
        words = resumed.map(lambda side: "of earlier updates" if side else "none")
        differences.append(_Found("state", words, (), rule, changes=False, kind="optimizer_state"))
    if elsewhere:
        phrases = places.map(lambda place: "elsewhere" if place is None else place.epsilon)
        differences.append(_Found("place of epsilon", phrases, (), candidate.rule, changes=False, note=_ELSEWHERE))
    return differences


_ELSEWHERE = "the frameworks add epsilon in different places of this rule"


def _family(rule: str) -> str:
    return "Adam" if rule == "AdamW" else rule


def _said(group: Group) -> Iterator[str]:
    """Yield the names of a group's values that differ from the usual values."""
    for name, value in group.values.items():
        if name in _APART or (name.startswith("decay.") and not value):
            continue
        if name not in _USUAL or not same(value, _USUAL[name]):
            yield name


def _meant(group: Group) -> dict[str, Any]:
    """Return a group's values, without values that have no effect beside the others."""
    values = {**_USUAL, **{n: v for n, v in group.values.items() if n not in _APART and not n.startswith("decay.")}}
    if same(values["momentum"], 0.0):
        for name in ("dampening", "nesterov"):
            values[name] = _USUAL[name]
    return values


def _decay(pair: GroupPair) -> list[_Found]:
    if any("decay.own" in group.values for group in pair):
        return []
    forms = pair.map(lambda group: {name: group.setting(name) for name in _FORMS})
    if all(same(forms.reference[name], forms.candidate[name]) for name in _FORMS):
        return []
    used = forms.map(lambda side: [name for name, value in side.items() if value])
    kinds = {*used.reference, *used.candidate}
    if len(kinds) == 1:
        (kind,) = kinds
        values: Both[Any] = forms.map(lambda side: side[kind])
    else:
        values = forms.zip(used).map(lambda side: _decay_text(*side))
    rule = pair.candidate.rule
    if _family(rule) == "Adam" and used.reference:
        rule = "AdamW" if "decay.decoupled" in used.reference else "Adam"
    return [_Found("weight_decay", values, tuple(used.reference) or ("decay.coupled",), rule)]


def _decay_text(values: Mapping[str, float], used: list[str]) -> str:
    return " and ".join(f"{setting_text(values[name])} ({_FORMS[name]})" for name in used) or "0.0"


def same(one: Any, other: Any) -> bool:
    """Return True if two values mean the same number, word or switch."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_SAME)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


#: Rules whose weights are larger by the share ``rate * decay`` after a step without decay.
_LINEAR = frozenset({"AdamW", "SGD"})
#: Largest remaining share of a decay's effect on the weights that proves compensation by hand; and least multiple of
#: rounding that the effect must have. Chosen: a missing decay leaves the whole effect, one of half the size half of it.
_LEFT, _BEYOND = 0.1, 10.0


def manual_weight_decay(difference: Difference, diffs: Sequence[Diff], rates: Mapping[int, float]) -> bool:
    """Return True if the weights of a later step show that the other run compensates a declared weight decay.

    Args:
        diffs: diffs of a step after the first step with the difference.
        rates: learning rate of each step so far, the smallest of the groups' rates.
    """
    by = difference.values
    if difference.name != "weight_decay" or difference.about not in _LINEAR:
        return False
    if not all(isinstance(value, (int, float)) for value in by):
        return False
    stepped = _stepped(rates, difference.step, max((d.pair.step for d in diffs), default=0))
    if stepped <= 0:
        return False
    share = stepped * abs(by.reference - by.candidate)
    concerned = frozenset(difference.parameters.reference)
    remaining_shares = []
    for diff in diffs:
        anchor, figures = diff.pair.anchor, diff.figures
        if diff.pair.stage != "weight" or anchor.layer == LOOP or figures is None or not diff.compared:
            continue
        if concerned and f"{anchor.layer}/{anchor.slot.partition('[')[0]}" not in concerned:
            continue
        if figures.reference_l2 > 0 and share > _BEYOND * ROUNDING.get(coarse(anchor.dtype), 1.0):
            remaining_shares.append(figures.rel_l2 / share)
    # The median, because a bias driven by noise differs for other reasons.
    return bool(remaining_shares) and median(remaining_shares) <= _LEFT


def _stepped(rates: Mapping[int, float], first: int, last: int) -> float:
    """Return the sum of the learning rates of the steps from ``first`` up to, but without, ``last``.

    Between two recorded steps the smaller of their rates counts.
    """
    numbers = sorted(number for number in rates if first <= number <= last)
    return sum(
        rates[earlier] if later - earlier == 1 else (later - earlier) * min(rates[earlier], rates[later])
        for earlier, later in pairwise(numbers)
    )


def _decay_places(sites: PairSchema) -> list[int]:
    return [place for place, slot in enumerate(sites.slots) if slot.startswith("learning_rate")]


def rate_of(ranks: Sequence[StepDiffs]) -> float | None:
    """Return the reference's smallest learning rate in a step; `None` if none was compared."""
    rate_diffs = [diffs[place] for diffs in ranks for place in diffs.sites.fact(_decay_places)]
    return min((diff.figures.values.reference for diff in rate_diffs if diff.figures), default=None)


def without_manual_weight_decay(found: Sequence[Difference], known: Mapping[object, int]) -> tuple[Difference, ...]:
    """Return the differences, with those marked as harmless that the other run compensates by hand.

    Args:
        found: the differences.
        known: by a difference's key, the step whose weights prove the compensation.
    """
    return tuple(
        replace(
            difference,
            changes=False,
            note=f"the weights of step {known[difference.key]} show that it is made up for by hand",
        )
        if difference.key in known
        else difference
        for difference in found
    )

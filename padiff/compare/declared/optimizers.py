"""What the optimizers of two runs are set to, parameter by parameter.

Groups are not compared: other groups of the same values are no difference. Nor is what can be written in two ways: Adam
and AdamW without decay are one rule, and so are SGD without momentum and SGD with a momentum of 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from padiff.align import Alignment
from padiff.compare.declared.fixes import optimizer_fix
from padiff.frameworks.spelled import SPELLINGS
from padiff.records import LOOP, Both, Difference, Record, RunInfo, Step, setting_text, unzipped
from padiff.records.structured import fact_of

_NAME = re.compile(r"optimizer\.(\d{1,6})\.(?:group\.(\d{1,6})\.)?(.+)", re.DOTALL)
# What a value is where it is not said: the framework has nothing of the kind, or it is off.
_USUAL = {
    "momentum": 0.0, "dampening": 0.0, "nesterov": False, "amsgrad": False, "maximize": False, "centered": False,
    "rescale_grad": 1.0, "lr_decay": 0.0, "initial_accumulator_value": 0.0,
}  # fmt: skip
# What is compared in its own way, or is none of the rule.
_APART = frozenset({"lr", "lr_factor", "rate", "parameters", "others", "clipped"})
_FORMS = {"decay.coupled": "coupled, as L2 of the gradient", "decay.decoupled": "decoupled", "decay.l1": "L1"}
# Rules in which the frameworks add epsilon in different places: the same number is not the same rule there.
_EPS_ELSEWHERE = frozenset({"RMSProp", "Adamax"})
# How far two numbers may be apart that are one: one may have been kept in float32. Schedules add up.
_SAME, _SAME_RATE = 1e-6, 1e-5


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that an optimizer treats alike, and how."""

    rule: str
    values: Mapping[str, Any]
    parameters: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether the rule is one of the framework's own, and so means the same in both."""
        return "." not in self.rule

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.values.get(name, default)
        return float(value) if isinstance(value, (int, float)) else default


@dataclass(frozen=True)
class Optimizers:
    """What one run's optimizers are set to.

    Attributes:
        groups: all of them.
        by_site: the group of each parameter, by ``layer/slot``.
        count: how many optimizers there are.
        whole: whether it is known of every parameter that they train which one it is.
    """

    groups: tuple[Group, ...] = ()
    by_site: Mapping[str, Group] = field(default_factory=dict)
    count: int = 0
    whole: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Optimizers:
        """As a run's settings say it; what is not as it should be there is passed over."""
        rules: dict[int, str] = {}
        values: dict[tuple[int, int], dict[str, Any]] = {}
        for name, value in settings.items():
            found = _NAME.fullmatch(name)
            if found is None:
                continue
            number, group, rest = int(found[1]), found[2], found[3]
            if group is not None:
                values.setdefault((number, int(group)), {})[rest] = value
            elif rest == "rule":
                rules[number] = str(value)
        groups = [
            Group(rules[number], own, _sites(own)) for (number, _), own in sorted(values.items()) if number in rules
        ]
        whole = bool(groups) and not any(group.values.get("others") for group in groups)
        by_site = {site: group for group in groups for site in group.parameters}
        return cls(tuple(groups), by_site, len(rules), whole)


def _sites(values: Mapping[str, Any]) -> tuple[str, ...]:
    listed = values.get("parameters")
    return tuple(site for site in listed if isinstance(site, str)) if isinstance(listed, list) else ()


@dataclass(frozen=True)
class GroupPair(Both[Group]):
    """Two groups with parameters that answer to each other, and those."""

    sites: Both[list[str]] = field(default_factory=lambda: Both([], []))


def site_pairs(alignment: Alignment, infos: Both[RunInfo]) -> list[Both[str]]:
    """Parameters that answer to each other, by the first name that either has in its run."""
    homes = infos.map(tied_homes)
    found = {}
    for pair in alignment.parameters:
        for one in pair.reference:
            for other in pair.candidate:
                sites = Both(f"{one.layer}/{one.slot}", f"{other.layer}/{other.slot}")
                named = homes.zip(sites).map(lambda side: side[0].get(side[1], side[1]))
                found[named.reference, named.candidate] = named
    return list(found.values())


def tied_homes(info: RunInfo) -> dict[str, str]:
    """Where parameters that have several names are found first."""
    return {f"{layer.path}/{p.slot}": p.tied_to for layer in info.layers for p in layer.parameters if p.tied_to}


def group_pairs(optimizers: Both[Optimizers], sites: list[Both[str]]) -> list[GroupPair]:
    """The groups that have parameters in common, with these."""
    found: dict[tuple[int, int], GroupPair] = {}
    for pair in sites:
        groups = optimizers.zip(pair).map(lambda side: side[0].by_site.get(side[1]))
        if groups.reference is None or groups.candidate is None:
            continue
        key = id(groups.reference), id(groups.candidate)
        if key not in found:
            found[key] = GroupPair(groups.reference, groups.candidate)
        found[key].sites.reference.append(pair.reference)
        found[key].sites.candidate.append(pair.candidate)
    return list(found.values())


@dataclass(frozen=True)
class _Found:
    """What is different between two groups.

    Attributes:
        names: which of the reference's values mend it, of which rule.
    """

    name: str
    values: Both[Any]
    names: tuple[str, ...]
    rule: str
    changes: bool = True
    note: str = ""
    kind: str = "optimizer_setting"


def optimizer_differences(pairs: list[GroupPair], frameworks: Both[str]) -> Iterator[Difference]:
    """How the groups of two runs differ, together where they differ alike."""
    yield from _together([(pair, _between(pair, frameworks)) for pair in pairs], frameworks.candidate)


def rate_differences(
    pairs: list[GroupPair], optimizers: Both[Optimizers], steps: Both[Step], frameworks: Both[str]
) -> Iterator[Difference]:
    """Where parameters are stepped with other learning rates, which are records of the step."""
    # Of several optimizers it is not known whose rate a record is.
    if max(optimizers.map(lambda side: side.count)) != 1 or not pairs:
        return
    rates = steps.map(_rates)
    found = []
    for pair in pairs:
        one, other = pair.zip(rates).map(lambda side: _rate(*side))
        if one is None or other is None:
            continue
        own = Both(one, other)
        first = max(group.number("lr") for group in pair)
        # At the end of a schedule both are nothing.
        if abs(own.reference - own.candidate) > _SAME_RATE * max(abs(own.reference), abs(own.candidate), 1e-3 * first):
            lasting = all(math.isclose(group.number("lr"), rate, rel_tol=_SAME) for group, rate in zip(pair, own))
            names = ("lr",) if lasting else ()
            found.append((pair, [_Found("lr", own, names, pair.candidate.rule, kind="learning_rate")]))
    yield from _together(found, frameworks.candidate, len(pairs))


def rates_agree(pairs: list[GroupPair], optimizers: Both[Optimizers], steps: Both[Step]) -> bool:
    """Whether it is known of all that both runs train that it is stepped with the same rate."""
    groups = unzipped(pairs).map(lambda side: {id(group) for group in side})
    paired = all(len(of_pairs) == len(side.groups) for of_pairs, side in zip(groups, optimizers))
    if not paired or not pairs or max(optimizers.map(lambda side: side.count)) != 1:
        return False
    rates = steps.map(_rates)
    found = [pair.zip(rates).map(lambda side: _rate(*side)) for pair in pairs]
    return all(None not in (*both,) and math.isclose(*both, rel_tol=_SAME_RATE) for both in found)


def _rates(step: Step) -> dict[int, float]:
    """The learning rates that a step records, by their numbers."""
    return {number: float(step.records[place].value) for number, place in fact_of(step.records, _rate_places)}


def _rate_places(records: Sequence[Record]) -> list[tuple[int, int]]:
    """The number of each learning rate, and the place of its record."""
    found = []
    for place, record in enumerate(records):
        if record.layer == LOOP and record.stage == "update":
            name, _, number = record.slot.partition(".")
            if name == "learning_rate":
                found.append((int(number or 0), place))
    return found


def _rate(group: Group, rates: Mapping[int, float]) -> float | None:
    rate = rates.get(group.values.get("rate", -1))
    return None if rate is None else rate * group.number("lr_factor", 1.0)


def _together(
    found: list[tuple[GroupPair, list[_Found]]], framework: str, count: int | None = None
) -> Iterator[Difference]:
    """The differences of groups; one for all that differ alike."""
    merged: dict[tuple[Any, ...], tuple[_Found, GroupPair, Both[list[str]], int]] = {}
    for pair, differences in found:
        for one in differences:
            key = one.name, *map(str, one.values), one.rule
            first, origin, sites, number = merged.get(key, (one, pair, Both([], []), 0))
            sites.reference.extend(pair.sites.reference)
            sites.candidate.extend(pair.sites.candidate)
            merged[key] = first, origin, sites, number + 1
    count = len(found) if count is None else count
    for one, pair, sites, number in merged.values():
        # All of what is compared: then it need not be named.
        some = Both((), ()) if number == count else sites.map(tuple)
        yield Difference(
            one.name,
            one.values,
            "update",
            one.kind,
            about="" if one.name in ("rule", "lr") else pair.reference.rule,
            changes=one.changes,
            fix=optimizer_fix(
                framework,
                one.rule,
                one.names,
                {**_USUAL, **dict.fromkeys(_FORMS, 0.0), **pair.reference.values},
                some.candidate,
            )
            if one.names or one.name == "rule"
            else "",
            parameters=some,
            note=one.note,
        )


def _between(pair: GroupPair, frameworks: Both[str]) -> list[_Found]:
    reference, candidate = pair.reference, pair.candidate
    if _family(reference.rule) != _family(candidate.rule):
        if not (reference.known and candidate.known):
            return []  # a class of somebody's own may well compute the same
        return [_Found("rule", pair.map(lambda group: group.rule), tuple(_said(reference)), reference.rule)]
    if not reference.known and frameworks.reference != frameworks.candidate:
        return []
    found = _decay(pair)
    elsewhere = reference.rule in _EPS_ELSEWHERE and frameworks.reference != frameworks.candidate
    values = pair.map(_meant)
    for name in {**values.reference, **values.candidate}:
        if name not in values.reference or name not in values.candidate:
            continue
        both = values.map(lambda side, name=name: side[name])  # type: ignore[misc]
        if same(*both):
            continue
        found.append(_Found(name, both, (name,), candidate.rule, changes=not (elsewhere and name == "eps")))
    if elsewhere:
        places = frameworks.map(lambda framework: _place_of_eps(framework, reference.rule))
        found.append(_Found("place of epsilon", places, (), candidate.rule, changes=False, note=_ELSEWHERE))
    return found


_ELSEWHERE = "the frameworks add epsilon in different places of this rule"


def _place_of_eps(framework: str, rule: str) -> str:
    spelling = SPELLINGS.get(framework)
    return "elsewhere" if spelling is None else spelling.epsilon.get(rule, "elsewhere")


def _family(rule: str) -> str:
    return "Adam" if rule == "AdamW" else rule


def _said(group: Group) -> Iterator[str]:
    """Names of a group's values that are other than usual."""
    for name, value in group.values.items():
        if name in _APART or (name.startswith("decay.") and not value):
            continue
        if name not in _USUAL or not same(value, _USUAL[name]):
            yield name


def _meant(group: Group) -> dict[str, Any]:
    """A group's values, without those that mean nothing beside the others."""
    found = {**_USUAL, **{n: v for n, v in group.values.items() if n not in _APART and not n.startswith("decay.")}}
    if same(found["momentum"], 0.0):
        for name in ("dampening", "nesterov"):
            found[name] = _USUAL[name]
    return found


def _decay(pair: GroupPair) -> list[_Found]:
    if any("decay.own" in group.values for group in pair):
        return []
    forms = pair.map(lambda group: {name: group.number(name) for name in _FORMS})
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
    """Whether two values mean one number, word or switch."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_SAME)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)

"""The searches on causes that are known: an oracle in the place of trainings answers what padiff's verdict would."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import combinations

import pytest

from padiff_cli.bisect.search import BAD, GOOD, SKIP, ChangeSearch, LineSearch, TrialError, Values, smallest


@dataclass
class Oracle:
    """Judges states by their effects: each has some, in causal order; the first one that differs is the place."""

    effects: object
    broken: frozenset = frozenset()
    runs: set = field(default_factory=set)
    notes: list = field(default_factory=list)

    def difference(self, reference, state):
        for each in (reference, state):
            self.runs.add(each)
            if each in self.broken:
                raise TrialError("broken")
        apart = self.effects(reference) ^ self.effects(state)
        return min(apart) if apart else None

    def verdict(self, reference, end, place, state):
        self.runs.add(state)
        if state in self.broken:
            return SKIP
        apart = self.effects(reference) ^ self.effects(state)
        return BAD if place in {effect[:1] for effect in apart} | apart else GOOD

    def check_repeats(self, state, place):
        pass

    def expect(self, count):
        pass

    def remark(self, text):
        self.notes.append(text)


def line(effects, length, broken=()):
    """Search a line of numbers, each of which has the effects of the causes up to it."""
    oracle = Oracle(lambda number: frozenset(e for cause, e in effects.items() if cause <= number), frozenset(broken))
    findings = LineSearch(Values(tuple(range(length + 1))), oracle).between(0, length)
    return findings, oracle


@pytest.mark.parametrize("length", [1, 2, 3, 8, 30, 100])
def test_each_culprit_of_a_line_is_found_in_log2_runs(length):
    for culprit in range(1, length + 1):
        findings, oracle = line({culprit: "a"}, length)
        assert [finding.suspects for finding in findings] == [(culprit,)]
        assert len(oracle.runs) <= math.ceil(math.log2(length)) + 2 if length > 1 else 2


def test_all_culprits_of_a_line_are_found_whatever_their_order():
    choice = random.Random(0)
    for _ in range(200):
        places = choice.sample("abcdef", choice.randint(2, 4))
        causes = dict(zip(choice.sample(range(1, 21), len(places)), places))
        findings, _ = line(causes, 20)
        assert {finding.suspects for finding in findings} == {(cause,) for cause in causes}
        assert findings[0].place == min(places)


def test_states_that_cannot_be_judged_are_skipped_and_a_culprit_next_to_them_is_suspected():
    findings, _ = line({6: "a"}, 10, broken={4, 5, 9})
    assert {6} <= set(findings[0].suspects) <= {4, 5, 6}
    findings, _ = line({8: "a"}, 10, broken={4, 5})
    assert [finding.suspects for finding in findings] == [(8,)]
    with pytest.raises(TrialError):
        line({6: "a"}, 10, broken={10})


def sets(causes, count, broken=lambda state: False):
    """Search changes; a cause is a set of changes that has an effect only as a whole."""
    names = [f"k{number:02}" for number in range(count)]
    effects = lambda state: frozenset(e for group, e in causes.items() if {names[n] for n in group} <= state)  # noqa: E731
    oracle = Oracle(effects)
    oracle.broken = type("", (), {"__contains__": lambda _, state: broken(state)})()
    findings = ChangeSearch(lambda keys: frozenset(keys), oracle).among(names)
    return [tuple(sorted(names.index(n) for n in f.culprits)) for f in findings], findings, oracle


def test_each_single_key_of_twelve_is_found_in_few_runs():
    counts = []
    for key in range(12):
        groups, _, oracle = sets({(key,): "a"}, 12)
        assert groups == [(key,)]
        counts.append(len(oracle.runs) - math.ceil(math.log2(12)) - 2)
    # One run of all the others; for at most a third of the keys, one more that shows whether the key acts alone.
    assert max(counts) <= 2 and sum(counts) / 12 <= 1 + 1 / 3


def test_each_pair_of_twelve_keys_that_acts_only_together_is_found():
    for pair in combinations(range(12), 2):
        groups, _, _ = sets({pair: "a"}, 12)
        assert groups == [pair]


def test_each_two_of_twelve_keys_with_effects_at_different_or_the_same_places_are_found():
    for first, second in combinations(range(12), 2):
        for places in ("ab", "ba"):
            groups, findings, _ = sets({(first,): places[0], (second,): places[1]}, 12)
            assert sorted(groups) == [(first,), (second,)]
            assert findings[0].place == "a"


def test_a_key_that_another_one_hides_is_found():
    # Key 3 has its effect only without key 7, which has one of its own.
    for hidden, hiding in ((3, 7), (7, 3)):
        names = [f"k{number:02}" for number in range(12)]

        def effects(state, hidden=names[hidden], hiding=names[hiding]):
            return frozenset({"a"} if hiding in state else {"b"} if hidden in state else ())

        oracle = Oracle(effects)
        findings = ChangeSearch(lambda keys: frozenset(keys), oracle).among(names)
        assert {finding.culprits for finding in findings} == {(names[hidden],), (names[hiding],)}


def test_configs_that_cannot_be_run_are_skipped():
    # Keys 4 and 5 belong together: with one of them alone, nothing runs.
    groups, _, _ = sets({(9,): "a"}, 12, lambda state: ("k04" in state) != ("k05" in state))
    assert groups == [(9,)]
    _, findings, _ = sets({(4,): "a"}, 12, lambda state: ("k04" in state) != ("k05" in state))
    assert set(findings[0].culprits) == {"k04", "k05"}
    # Key 5 runs alone and changes nothing; key 4 needs it, and key 6 as well.
    needs = lambda state: "k04" in state and not {"k05", "k06"} <= state  # noqa: E731
    groups, findings, oracle = sets({(4,): "a", (9,): "b"}, 12, needs)
    assert sorted(groups) == [(4, 5, 6), (9,)]
    assert findings[0].suspects == ()
    assert [note for note in oracle.notes if "k04" in note and "are named together" in note]


def test_no_subset_of_what_is_found_makes_the_difference():
    choice = random.Random(1)
    for _ in range(100):
        names = tuple(range(choice.randint(1, 14)))
        group = set(choice.sample(names, choice.randint(1, min(4, len(names)))))
        found, suspects = smallest(names, lambda subset, group=group: BAD if group <= set(subset) else GOOD)
        assert set(found) == group
        assert suspects == ()

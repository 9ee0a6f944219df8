"""Order of the calls that a training loop makes of its models, and the inputs that a model's output feeds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import chain
from typing import Any

import numpy as np

from padiff.records import LOOP, PARAMETER_STAGES, Both, Record, Step, is_functional

#: Slot of the losses of a loop.
LOSS = "loss"
# Largest relative difference of two losses that are the same.
_SAME_LOSS = 1e-3
#: Layer, slot and number of the call of an input.
InputSite = tuple[str, str, int]
#: Layer, or layer and function, whose calls are numbered.
Called = tuple[str, str]


@dataclass(frozen=True)
class CallOrder:
    """Numbers of the reference's calls that the candidate's calls correspond to.

    Attributes:
        calls: the candidate's calls of outermost layers; the numbers hold for steps with these calls only.
        numbers: the reference's number of each call of the candidate, by layer and function.
    """

    calls: frozenset[tuple[str, int]] = frozenset()
    numbers: Mapping[Called, Mapping[int, int]] = field(default_factory=dict)

    def renumbered(self, records: Sequence[Record]) -> tuple[Sequence[Record], Mapping[int, Record]]:
        """Return a candidate's records with the reference's numbers of calls, and the originals by their ids."""
        if not self.numbers or outermost_calls(records) != self.calls:
            return records, {}
        renumbered, originals = [], {}
        for record in records:
            number = self.numbers.get(_called(record), {}).get(record.call, record.call)
            of_loop = record.layer == LOOP and record.slot != LOSS
            keeps = number == record.call or of_loop or record.stage in PARAMETER_STAGES
            other = record if keeps else replace(record, call=number)
            originals[id(other)] = record
            renumbered.append(other)
        return renumbered, originals


def calls_differ(records: Both[Sequence[Record]]) -> bool:
    """Return True if one loop calls a layer more often than the other does, and gradients come to some of its calls."""
    calls = records.map(outermost_calls)
    counts = calls.map(lambda side: Counter(path for path, _ in side))
    for own, many, few in zip(records, counts, reversed([*counts])):
        more = {path for path, count in many.items() if count > few.get(path, count)}
        learning = Counter(path for path, _ in _with_gradients(own) if path in more)
        if any(count < many[path] for path, count in learning.items()):
            return True
    return False


def _with_gradients(records: Iterable[Record]) -> set[tuple[str, int]]:
    """Return layer and number of the calls whose outputs have a gradient."""
    return {(record.layer, record.call) for record in records if record.stage == "backward"}


#: Calls that both sides make in one order.
SAME_ORDER = CallOrder()
#: No derived inputs on either side.
NO_INPUTS: Both[frozenset[InputSite]] = Both(frozenset(), frozenset())


def call_order(
    steps: Both[Step],
    derived: Both[frozenset[InputSite]],
    pairs: Iterable[tuple[str, str]],
    agree: Callable[[Record, Record], bool],
) -> CallOrder:
    """Pair calls of a layer that the loops make in another order, by their inputs.

    A call keeps its number if its inputs agree in place. Calls with inputs that agree nowhere are paired in order.
    Calls before an optimizer's step are no partners of those after.

    Args:
        steps: the first step of both runs.
        derived: sites of the derived inputs.
        pairs: paths of the paired layers.
        agree: returns True if two inputs agree.
    """
    sides = steps.map(lambda step: _calls(step.records, "input"))
    partners: dict[tuple[str, int], tuple[str, int]] = {}
    paths = dict(pairs)
    for reference_path, candidate_path in paths.items():
        calls = Both(sides.reference.get(reference_path, {}), sides.candidate.get(candidate_path, {}))
        if min(map(len, calls)) < 1 or max(map(len, calls)) < 2 or not _is_free(steps, derived, calls):
            continue
        groups, others = steps.zip(calls).map(lambda side: _by_turn(*side))
        numbers: dict[int, int] = {}
        unused = 1 + max(chain(*calls))
        for turn, candidate in others.items():
            numbers.update(_paired(Both(groups.get(turn, {}), candidate), agree, unused))
        if any(number != call for call, number in numbers.items()):
            partners |= {(candidate_path, call): (reference_path, number) for call, number in numbers.items()}
    inner = steps.map(lambda step: _inner_calls(step.records))
    numbers_of = _by_outputs(steps, paths, inner, agree)
    if not partners and not numbers_of:
        return SAME_ORDER
    references = {candidate: reference for reference, candidate in paths.items()}
    for (path, function), by_outer in inner.candidate.items():
        theirs = inner.reference.get((references.get(path, path), function), {})
        unused = 1 + max(chain.from_iterable((*theirs.values(), *by_outer.values())), default=0)
        for outer, own in by_outer.items():
            if outer in partners:
                other = theirs.get(partners[outer], [])
                renumbered = numbers_of.setdefault((path, function), {})
                renumbered.update((call, other[k] if k < len(other) else unused + call) for k, call in enumerate(own))
    losses = _losses_in_order(steps)
    if losses:
        numbers_of[LOOP, LOSS] = losses
    return CallOrder(outermost_calls(steps.candidate.records), numbers_of)


def _by_outputs(
    steps: Both[Step],
    paths: Mapping[str, str],
    inner: Both[dict[Called, dict[tuple[str, int], list[int]]]],
    agree: Callable[[Record, Record], bool],
) -> dict[Called, dict[int, int]]:
    """Pair calls of layers whose models are called in another order, by their outputs: the models have no partner.

    All outputs of a layer have to agree in the other order. Layers of the same calls of a model follow it.
    """
    outputs, backwards = steps.map(lambda step: _calls(step.records, "forward")), steps.map(_backwards)
    numbers_of: dict[tuple[tuple[str, int], ...], dict[int, int]] = {}
    layers: dict[str, tuple[tuple[str, int], ...]] = {}
    for reference_path, candidate_path in paths.items():
        calls = Both(outputs.reference.get(reference_path, {}), outputs.candidate.get(candidate_path, {}))
        outer = Both(*(side.get((path, ""), {}) for side, path in zip(inner, (reference_path, candidate_path))))
        if len(calls.reference) != len(calls.candidate) or min(map(len, outer)) < 2:
            continue
        model, partner = outer.map(lambda side: next(iter(side))[0])
        if paths.get(model) == partner:
            continue  # paired by their inputs
        models = layers[candidate_path] = tuple(outer.candidate)
        if models in numbers_of or not all(0 < count < len(side) for count, side in zip(backwards, calls)):
            continue
        numbers = _paired(calls, agree, 1 + max(chain(*calls)))
        if any(number != call for call, number in numbers.items()) and all(
            number in calls.reference and all(map(agree, calls.reference[number], calls.candidate[call]))
            for call, number in numbers.items()
        ):
            numbers_of[models] = numbers
    return {(path, ""): numbers_of[models] for path, models in layers.items() if models in numbers_of}


# Most calls of layers in a step whose sequences are compared.
_MOST_CALLS = 2000


def order_within(steps: Both[Step], pairs: Iterable[tuple[str, str]], uneven: Iterable[tuple[str, str]]) -> CallOrder:
    """Pair calls of layers that the code of one model calls more often, by what is called before and after them.

    A model that uses one layer in several places (`self.relu`) may leave out a call of it: the next ones keep their
    partners.

    Args:
        steps: a step of both runs, in which the loops call the models equally often.
        pairs: paths of the paired layers.
        uneven: those of the pairs with other numbers of calls.
    """
    outer = steps.map(lambda step: outermost_calls(step.records))
    names = {candidate: reference for reference, candidate in pairs}
    references = {reference: candidate for candidate, reference in names.items()}
    loops = Counter(references.get(path, path) for path, _ in outer.reference), Counter(p for p, _ in outer.candidate)
    if loops[0] != loops[1]:
        return SAME_ORDER
    sequences = steps.map(
        lambda step: [*dict.fromkeys((r.layer, r.call) for r in step.records if r.stage == "forward")]
    )
    calls = sequences.zip(Both(references, names)).map(lambda side: [each for each in side[0] if each[0] in side[1]])
    inner = calls.zip(outer).map(lambda side: Counter(path for path, _ in {*side[0]} - side[1]))
    apart = {path for partner, path in uneven if 0 < inner.candidate[path] != inner.reference[partner] > 0}
    if not apart or max(map(len, calls)) > _MOST_CALLS:
        return SAME_ORDER
    places = {each: place for place, each in enumerate(calls.reference)}
    in_place = [places[names[path], call] for path, call in calls.candidate if (names[path], call) in places]
    if in_place == sorted(in_place):
        return SAME_ORDER  # calls of one number are called in one order: a turn of a loop is missing, say
    paths = Both([path for path, _ in calls.reference], [names[path] for path, _ in calls.candidate])
    numbers: dict[Called, dict[int, int]] = defaultdict(dict)
    for block in SequenceMatcher(None, paths.reference, paths.candidate, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            path, call = calls.candidate[block.b + k]
            if path in apart:
                numbers[path, ""][call] = calls.reference[block.a + k][1]
    unused = 1 + max(call for side in calls for _, call in side)
    for path, call in calls.candidate:
        if path in apart:
            numbers[path, ""].setdefault(call, unused + call)
    return CallOrder(outer.candidate, numbers)


def outermost_calls(records: Iterable[Record]) -> frozenset[tuple[str, int]]:
    """Return layer and number of the calls that the loop itself makes."""
    return frozenset((r.layer, r.call) for r in records if r.stage == "input" and r.layer != LOOP)


def derived_inputs(step: Step, settings: Mapping[str, Any]) -> frozenset[InputSite]:
    """Return the sites of inputs that are computed from an output of a model, by the trace and settings of a step."""
    computed_inputs = str(settings.get("inputs.computed", "")).split(", ")
    trace, inputs = step.trace, {(r.layer, r.slot, r.call) for r in step.records if r.stage == "input"}
    computed: set[int] = set()
    sites = {site for site in inputs if _text(site) in computed_inputs}
    for call in trace.calls:
        operands = {operand.tensor for operand in call.inputs}
        if not call.function:
            sites.update((call.layer, o.slot, call.call) for o in call.inputs if o.tensor in computed)
        if call.layer != LOOP or not call.function or operands & computed:
            computed.update(operand.tensor for operand in call.outputs if operand.tensor not in operands)
    return frozenset(sites & inputs)


def _text(site: InputSite) -> str:
    layer, slot, call = site
    return f"{layer}/{slot}#{call}" if call else f"{layer}/{slot}"


def is_derived(record: Record, sites: Collection[InputSite]) -> bool:
    """Return True if a record is one of the derived inputs."""
    return record.stage == "input" and (record.layer, record.slot, record.call) in sites


def _calls(records: Iterable[Record], stage: str) -> dict[str, dict[int, list[Record]]]:
    """Return the inputs of the calls that the loop makes, or the outputs of layers, by layer and number of the call."""
    calls: dict[str, dict[int, list[Record]]] = defaultdict(dict)
    for record in records:
        if record.stage == stage and record.layer != LOOP and not is_functional(record.slot):
            calls[record.layer].setdefault(record.call, []).append(record)
    return calls


def _is_free(steps: Both[Step], derived: Both[frozenset[InputSite]], calls: Both[dict[int, list[Record]]]) -> bool:
    """Return True if the order of a layer's calls is the author's choice: the calls are no micro-batches."""
    if all(any(site in sites for site in _sites(side)) for sites, side in zip(derived, calls)):
        return True
    counts = [*zip(steps.map(_backwards), map(len, calls))]
    if any(step.evaluations for step in steps):  # a call may be left out, as it is in evaluation mode
        return all(0 < backward < count for backward, count in counts)
    return all(0 < backward <= count for backward, count in counts) and any(b < count for b, count in counts)


def _backwards(step: Step) -> int:
    """Return the number of backwards of a step; of one without a trace, that of calls whose output has a gradient."""
    if step.trace.functions:
        return step.trace.backwards
    return len(outermost_calls(step.records) & _with_gradients(step.records))


def _sites(calls: Mapping[int, list[Record]]) -> list[InputSite]:
    return [(record.layer, record.slot, record.call) for records in calls.values() for record in records]


def _by_turn(step: Step, calls: Mapping[int, list[Record]]) -> dict[int, dict[int, list[Record]]]:
    """Return calls by the number of optimizer steps before them."""
    groups: dict[int, dict[int, list[Record]]] = defaultdict(dict)
    turn, stepped = 0, False
    for record in sorted(step.records, key=lambda record: record.order):
        if record.stage == "update":
            stepped = True
        elif record.stage == "input" and record.layer != LOOP:
            turn, stepped = turn + stepped, False
            if any(record is other for other in calls.get(record.call, ())):
                groups[turn][record.call] = calls[record.call]
    return groups


def _paired(
    calls: Both[dict[int, list[Record]]], agree: Callable[[Record, Record], bool], unused: int
) -> dict[int, int]:
    """Return the reference's call of each call of the candidate.

    Args:
        unused: a number above those of all calls, for calls without a partner.
    """

    def same(reference: list[Record], candidate: list[Record]) -> bool:
        return len(reference) == len(candidate) and all(map(agree, reference, candidate))

    reference, candidate = calls
    numbers = {call: call for call in candidate if call in reference and same(reference[call], candidate[call])}
    for number in reference:
        if number not in numbers.values():
            partners = (call for call in candidate if call not in numbers and same(reference[number], candidate[call]))
            partner = next(partners, None)
            if partner is not None:
                numbers[partner] = number
    rest = [number for number in reference if number not in numbers.values()]
    for k, call in enumerate(call for call in candidate if call not in numbers):
        numbers[call] = rest[k] if k < len(rest) else unused + call
    return numbers


def _inner_calls(records: Iterable[Record]) -> dict[Called, dict[tuple[str, int], list[int]]]:
    """Return the calls of each layer and function, by the call of the loop that they are made in, in order."""
    outer = ("", 0)
    calls: dict[Called, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=lambda record: record.order):
        if record.stage == "input" and record.layer != LOOP:
            outer = record.layer, record.call
        if record.stage in ("input", "forward") and record.layer != LOOP:
            numbers = calls[_called(record)][outer]
            if record.call not in numbers:
                numbers.append(record.call)
    return calls


def _losses_in_order(steps: Both[Step]) -> dict[int, int]:
    """Return the reference's number of each loss of the candidate, if these are the same numbers in another order."""
    sides = steps.map(
        lambda step: [r for r in step.records if r.layer == LOOP and r.slot == LOSS and not r.source.sketched]
    )
    values = sides.map(lambda side: [float(np.ravel(record.value)[0]) for record in side])
    if len(values.reference) != len(values.candidate) or len(values.reference) < 2:
        return {}
    orders = values.map(lambda side: np.argsort(side, kind="stable"))
    reference, candidate = values.map(np.array)
    apart = np.abs(reference[orders.reference] - candidate[orders.candidate])
    in_place = np.abs(reference - candidate)
    size = np.abs(reference[orders.reference])
    if (apart > _SAME_LOSS * size).any() or in_place.sum() <= 2 * apart.sum():
        return {}
    return {
        sides.candidate[other].call: sides.reference[own].call
        for own, other in zip(orders.reference.tolist(), orders.candidate.tolist())
    }


def _called(record: Record) -> Called:
    if (record.layer, record.slot) == (LOOP, LOSS):
        return LOOP, LOSS
    return record.layer, record.slot.partition("()")[0] if is_functional(record.slot) else ""

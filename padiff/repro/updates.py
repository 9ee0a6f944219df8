"""Scripts for updates by an optimizer, and for running statistics of a normalization."""

from __future__ import annotations

import numpy as np

from padiff.compare.declared.fixes import optimizer_call
from padiff.compare.declared.optimizers import Optimizers
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.model import equivalents
from padiff.records import LOOP, Both, Pair, Record
from padiff.repro.case import CannotWriteError, Case, values_of
from padiff.repro.expressions import language_of, layer_text
from padiff.repro.side import Side
from padiff.system.code import literal

#: Largest number of steps in a script.
MOST_STEPS = 64


def update_cases(scene: DiffContext, sides: Both[Side]) -> Both[Case | CannotWriteError]:
    """Return the scripts' cases for an update that differs: the optimizer over all steps so far, on recorded weights.

    Raises:
        CannotWriteError: neither side can have a script.
    """
    pair = scene.diff.pair
    if pair.anchor.layer == LOOP:
        raise CannotWriteError(
            "the learning rates differ, which the loops or their schedules set: nothing of a framework to show"
        )
    numbers = scene.numbers
    last = scene.number
    if numbers[: last + 1] != list(range(last + 1)) or last >= MOST_STEPS:
        raise CannotWriteError(
            f"what an optimizer does in step {last} depends on all steps before, of which both runs have "
            f"{sum(n < last for n in numbers)}. Record every step from the first one on (every_n_steps=1), "
            f"for {MOST_STEPS} steps at most"
        )
    return _each_side(pair, sides, lambda side, record: _update(scene, side, record))


def _each_side(pair: Pair, sides: Both[Side], write) -> Both[Case | CannotWriteError]:  # type: ignore[no-untyped-def]
    cases: list[Case | CannotWriteError] = []
    for side, record, counterpart in ((sides.reference, *pair.sides), (sides.candidate, *pair.sides.swapped())):
        assert record is not None and counterpart is not None
        try:
            case = write(side, record)
            case.own, case.other = (values_of(tensor.source, tensor.site) for tensor in (record, counterpart))
            cases.append(case)
        except CannotWriteError as error:
            cases.append(error)
    return Both(*cases)


def _update(scene: DiffContext, side: Side, record: Record) -> Case:
    site = f"{record.layer}/{record.slot}"
    optimizers = Optimizers.from_settings(side.settings)
    group = optimizers.by_site.get(site)
    if group is None or optimizers.count != 1:
        raise CannotWriteError(
            f"the {side.name} does not say what its optimizer of {site} is set to"
            + (f": it has {optimizers.count} optimizers" if optimizers.count > 1 else "")
        )
    framework = side.info.framework
    language = language_of(framework)
    call = optimizer_call(framework, group.rule, group.values, "RATES[0]", "weight") if group.known else ""
    if not call:
        raise CannotWriteError(f"the {side.name}'s optimizer is {group.rule}: not one that is known here")
    case = side.case(f"{group.rule}, the update of {site}")
    rates: list[float] = []
    place = group.values.get("rate", 0)
    for number in range(scene.number + 1):
        steps, step_rates = scene.sides(number), getattr(scene.rates(number), side.name)
        if steps is None or not isinstance(place, int) or place >= len(step_rates):
            raise CannotWriteError(f"the learning rate of step {number} of the {side.name} was not recorded")
        rates.append(step_rates[place] * group.setting("lr_factor", 1.0))
        records = {(r.layer, r.stage, r.slot): r for r in getattr(steps, side.name).records}
        for stage, name in (("weight", "weight"), ("grad", "gradient")):
            tensor = records.get((record.layer, stage, record.slot))
            what = f"the {name} of {site} of the {side.name} in step {number}"
            if tensor is None:
                raise CannotWriteError(f"{what} was not recorded")
            array = values_of(tensor.source, what)
            case.give_array(f"{name}_{number}", array, tensor.dtype, what)
    case.lines += [f"RATES = {literal(rates)}", *(line.format(call=call) for line in language.optimizer)]
    return case


def statistics_cases(scene: DiffContext, sides_at) -> Both[Case | CannotWriteError]:  # type: ignore[no-untyped-def]
    """Return the scripts' cases for running statistics that differ: the normalization layer in the step before.

    Args:
        scene: the context of the first diff.
        sides_at: returns both sides of a step, given its number, or `None`.

    Raises:
        CannotWriteError: neither side can have a script, as for weights that are no running statistics.
    """
    pair, number = scene.diff.pair, scene.number
    assert pair.reference is not None
    slot = equivalents.slot(pair.reference.slot)
    if number == 0:
        raise CannotWriteError(
            "the runs start from other weights: nothing of a framework to show. `padiff.start_from` gives the "
            "candidate the reference's"
        )
    if slot not in ("running_mean", "running_var"):
        raise CannotWriteError(
            "a weight differs though the updates that were recorded do not: something besides the optimizer changes it "
            "(a load, a clamp, an average), or a step between was not recorded"
        )
    before = sides_at(number - 1) if number - 1 in scene.numbers else None
    if before is None:
        raise CannotWriteError(
            f"step {number - 1} was not recorded, in which the statistics became what they are in step {number}: "
            "record every step (every_n_steps=1)"
        )
    return _each_side(pair, before, lambda side, record: _statistic(side, record, slot))


def _statistic(side: Side, record: Record, slot: str) -> Case:
    layer = side.layers[record.layer]
    calls = [call for call in side.graph.trace.calls if call.layer == layer.path and not call.function]
    if len(calls) != 1 or len(calls[0].inputs) != 1 or not equivalents.kind(layer).startswith("batchnorm"):
        raise CannotWriteError(
            f"`{layer.path}` ({layer.type}) is called {len(calls)} times in a step, or is no BatchNorm"
        )
    case = side.case(f"{layer.type}, {record.slot} after one step")
    traced = side.graph.trace.tensors[calls[0].inputs[0].tensor]
    x = case.give("x", traced.source, traced.dtype, f"what goes into `{layer.path}` of the {side.name}")
    tensors = {}
    for parameter in layer.parameters:
        slot_name = equivalents.slot(parameter.slot)
        if slot_name not in equivalents.ONE_SIDED:
            weight = side.weight(f"{layer.path}/{parameter.slot}")
            tensors[slot_name] = case.give(slot_name, weight.source, weight.dtype, weight.site)
    if side.training(layer) is not True:
        raise CannotWriteError(
            f"`{layer.path}` of the {side.name} does not train, or it is not recorded whether it does"
        )
    shape = tuple(np.shape(case.given[x]))
    text = layer_text(side.info.framework, layer, x, tensors, True, shape)
    case.lines += [text, f"made = {tensors[slot]}"]
    return case

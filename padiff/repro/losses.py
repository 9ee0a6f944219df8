"""Scripts for loss functions."""

from __future__ import annotations

import math

from padiff.compare.measure.losses import RecordedLoss, loss_settings, recorded_losses
from padiff.frameworks.argument_names import SPELLINGS, number_text
from padiff.frameworks.catalog import is_loss
from padiff.frameworks.losses import ROLES
from padiff.records import Both, Diff, Record, is_functional
from padiff.repro.case import CannotWriteError, Case, values_of
from padiff.repro.expressions import keyword_text, language_of
from padiff.repro.side import Side
from padiff.system.code import refused

# Settings that a framework's function lacks -> values that equal its behaviour, so the setting can be left out.
_ONLY = {"torch": {"soft_label": (False,), "use_softmax": (True,), "axis": (-1, 1)}, "paddle": {}}


def loss_cases(diff: Diff, sides: Both[Side]) -> Both[Case | CannotWriteError]:
    """Return the scripts' cases for a loss that differs."""
    records = diff.pair.sides
    cases: list[Case | CannotWriteError] = []
    for side, record, counterpart in ((sides.reference, *records), (sides.candidate, *records.swapped())):
        assert record is not None and counterpart is not None
        try:
            case = _case(side, record)
            case.own, case.other = (values_of(loss.source, "the loss") for loss in (record, counterpart))
            cases.append(case)
        except CannotWriteError as error:
            cases.append(error)
    return Both(*cases)


def _case(side: Side, record: Record) -> Case:
    if not is_functional(record.slot) and not recorded_losses(side.step.records):
        raise CannotWriteError(
            f"the {side.name}'s loop computes its loss in code of its own, of which nothing is recorded: use one of "
            "the framework's loss functions"
        )
    case = side.case("the loss")
    text, _ = loss_lines(side, case, None, record)
    case.what = f"the loss, {text.partition('(')[0]}"
    case.lines += [f"made = {text}"]
    return case


def loss_lines(
    side: Side, case: Case, shape: tuple[int, ...] | None = None, record: Record | None = None
) -> tuple[str, str]:
    """Return the call of the step's loss function as code, and the variable of its first input.

    Args:
        side: the side of the step.
        case: the case, which gets the inputs.
        shape: shape of the tensor that must be the first input, apart from a reshape. Default: not checked.
        record: the record of the loss. Default: the step's only loss.

    Raises:
        CannotWriteError: the step has several losses, or the call can't be written.
        ForeignCodeError: the loss function is not in the catalog.
    """
    losses = recorded_losses(side.step.records)
    foreign = [loss.function for loss in losses if loss.function not in ROLES]
    if foreign:
        raise refused("the loss function", foreign[0])
    if record is not None and is_functional(record.slot):
        losses = [
            entry for entry in losses if entry.function == record.slot.partition("()")[0] and entry.call == record.call
        ]
    if len(losses) != 1:
        raise CannotWriteError(
            f"the {side.name}'s step calls {len(losses)} loss functions that were recorded: one is what a script shows"
        )
    [loss] = losses
    roles = ROLES.get(loss.function, ())
    names = {}
    for role in (*roles, *(entry for entry in ("weight", "pos_weight") if entry in loss.records)):
        if role not in loss.records:
            raise CannotWriteError(f"the {role} of {loss.function}() of the {side.name} were not recorded")
        tensor = loss.records[role]
        names[role] = case.give(
            role, tensor.source, tensor.dtype, f"the {role} of {loss.function}() of the {side.name}"
        )
    first = next(iter(names.values()))
    if shape is not None and math.prod(shape) != case.given[first].size:
        raise CannotWriteError(
            f"the loss of the {side.name} is not of this tensor alone: code of the loop lies between"
        )
    return _text(side, loss, names), first


def _text(side: Side, loss: RecordedLoss, names: dict[str, str]) -> str:
    framework = side.info.framework
    language, spelling = language_of(framework), SPELLINGS[framework]
    variants = loss_settings(side.settings, loss.function)
    if not is_loss(loss.function, [name for settings in variants for name in settings]):
        raise refused("the loss function, or a setting of it,", loss.function)
    if len(variants) != 1:
        raise CannotWriteError(f"{loss.function}() is set in {len(variants)} ways in this step of the {side.name}")
    function, extra = spelling.losses.get(loss.function, (loss.function, ""))
    arguments = [extra] if extra else []
    for name, value in variants[0].items():
        neutral = _ONLY[framework].get(name)
        if name == "function" or neutral is not None:
            if neutral is not None and value not in neutral:
                raise CannotWriteError(
                    f"{loss.function}() is set to {name}={value!r}, which {framework} has no word for"
                )
            continue
        arguments.append(keyword_text(spelling.loss_arguments.get(name, name), number_text(value)))
    tensors = [name if role not in ("weight", "pos_weight") else f"{role}={name}" for role, name in names.items()]
    return f"{language.functional}.{function}({', '.join([*tensors, *arguments])})"

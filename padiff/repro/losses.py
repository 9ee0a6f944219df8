"""Scripts of loss functions."""

from __future__ import annotations

import math

from padiff.compare.measure.losses import RecordedLoss, loss_settings, recorded_losses
from padiff.frameworks.catalog import is_loss
from padiff.frameworks.losses import ROLES
from padiff.frameworks.spelled import SPELLINGS, number_text
from padiff.records import Both, Diff, Record, is_functional
from padiff.repro.case import CannotWriteError, Case, values_of
from padiff.repro.expressions import keyword_text, language_of
from padiff.repro.side import Side
from padiff.system.code import refused

# What only one framework's function takes; where it is as the other one has it by default, nothing is lost.
_ONLY = {"torch": {"soft_label": (False,), "use_softmax": (True,), "axis": (-1, 1)}, "paddle": {}}


def loss_cases(diff: Diff, sides: Both[Side]) -> Both[Case | CannotWriteError]:
    """Scripts of a loss function's call whose outcome differs."""
    records = diff.pair.sides
    found: list[Case | CannotWriteError] = []
    for side, own, other in ((sides.reference, *records), (sides.candidate, *records.swapped())):
        assert own is not None and other is not None
        try:
            case = _case(side, own)
            case.own, case.other = (values_of(one.source, "the loss") for one in (own, other))
            found.append(case)
        except CannotWriteError as error:
            found.append(error)
    return Both(*found)


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
    """The call of the step's loss function, and the variable of what it is the loss of.

    Args:
        shape: of the tensor that goes in first, of which it may be another view.
        record: which loss; default: the only one.

    Raises:
        CannotWriteError: there are several, or it can't be written.
    """
    losses = recorded_losses(side.step.records)
    foreign = [loss.function for loss in losses if loss.function not in ROLES]
    if foreign:
        raise refused("the loss function", foreign[0])
    if record is not None and is_functional(record.slot):
        losses = [one for one in losses if one.function == record.slot.partition("()")[0] and one.call == record.call]
    if len(losses) != 1:
        raise CannotWriteError(
            f"the {side.name}'s step calls {len(losses)} loss functions that were recorded: one is what a script shows"
        )
    [loss] = losses
    roles = ROLES.get(loss.function, ())
    names = {}
    for role in (*roles, *(one for one in ("weight", "pos_weight") if one in loss.records)):
        if role not in loss.records:
            raise CannotWriteError(f"the {role} of {loss.function}() of the {side.name} were not recorded")
        own = loss.records[role]
        names[role] = case.give(role, own.source, own.dtype, f"the {role} of {loss.function}() of the {side.name}")
    first = next(iter(names.values()))
    if shape is not None and math.prod(shape) != case.given[first].size:
        raise CannotWriteError(
            f"the loss of the {side.name} is not of this tensor alone: code of the loop lies between"
        )
    return _text(side, loss, names), first


def _text(side: Side, loss: RecordedLoss, names: dict[str, str]) -> str:
    framework = side.info.framework
    language, spelling = language_of(framework), SPELLINGS[framework]
    several = loss_settings(side.settings, loss.function)
    if not is_loss(loss.function, [name for settings in several for name in settings]):
        raise refused("the loss function, or a setting of it,", loss.function)
    if len(several) != 1:
        raise CannotWriteError(f"{loss.function}() is set in {len(several)} ways in this step of the {side.name}")
    function, more = spelling.losses.get(loss.function, (loss.function, ""))
    arguments = [more] if more else []
    for name, value in several[0].items():
        usual = _ONLY[framework].get(name)
        if name == "function" or usual is not None:
            if usual is not None and value not in usual:
                raise CannotWriteError(
                    f"{loss.function}() is set to {name}={value!r}, which {framework} has no word for"
                )
            continue
        arguments.append(keyword_text(spelling.loss_arguments.get(name, name), number_text(value)))
    tensors = [name if role not in ("weight", "pos_weight") else f"{role}={name}" for role, name in names.items()]
    return f"{language.functional}.{function}({', '.join([*tensors, *arguments])})"

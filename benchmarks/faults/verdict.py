"""What a verdict of padiff is worth: found, at the right place, with the right cause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kit import STEPS, Fault

#: Steps that each condition records.
RECORDED = {"every3": tuple(range(0, STEPS, 3))}

#: A verdict that names several of these in one breath is a list of suspects, and names none.
_SUSPECTS = (
    r"weight decay", r"\bbetas?\d?\b", r"epsilon|\beps\b", r"momentum", r"bias correction", r"\bstate\b",
    r"learning rate", r"clipping", r"\baxes\b", r"dropout", r"activation", r"running (statistics|ones)", r"mask",
    r"\bscal(e|ing|ed)\b", r"weighting", r"reduction", r"smoothing", r"ignored", r"class weights?",
    r"accumulat(ion|ed)", r"shared parameter", r"rounding", r"frozen", r"detached", r"unused", r"not in its optimizer",
    r"augmentation", r"normalisation", r"order of the data",
)  # fmt: skip
_MOST_SUSPECTS = 2
#: What says only where, not why.
_GENERIC = (
    r"^the computation", r"computes? (something )?else", r"^unknown", r"at this very place", r"cannot (tell|be told)",
    r"^forward agrees here", r"^(the (output|gradient|update) is|all gradients are) \S+ times the reference's$",
)  # fmt: skip

NAMED, SUSPECTS, GENERIC, WRONG, NO_CAUSE = "named", "suspects", "generic", "wrong", "none"


@dataclass(frozen=True)
class Verdict:
    """How one fault fared. `cause` is one of the words above; `proven` is what padiff claims."""

    detected: bool
    placed: bool
    cause: str
    proven: bool
    step: int | None = None
    stage: str = ""
    where: str = ""
    sentence: str = ""
    message: str = ""


def _stages(first: Any, fault: Fault, moved: bool) -> bool:
    wanted = fault.stages.split("|") + (["weight", "update"] if moved else [])
    if first.stage in wanted or (first.slot == "learning_rate" and "learning_rate" in wanted):
        return True
    # Settings that the runs declare may be a stage of their own, or no tensor's.
    return (fault.declared or "loss" in wanted) and (
        first.diff is None or first.stage in ("settings", "setting", "optimizer")
    )


def _steps(first: Any, fault: Fault, condition: str) -> tuple[bool, bool]:
    """Whether the step is right, and whether it had to move because the fault's own was not recorded."""
    recorded = RECORDED.get(condition, tuple(range(STEPS)))
    due = [step for step in recorded if step >= fault.step] or [recorded[-1]]
    last = next((step for step in recorded if step >= fault.step + fault.late), due[0])
    right = {step for step in due if step <= last}
    moved = due[0] != fault.step or (first.step > fault.step and fault.step + fault.late not in recorded)
    if fault.declared:
        # What the runs declare is known before anything shows.
        undeclared = first.diff is not None and first.step < fault.step
        return not undeclared and (first.step in right or first.step <= fault.step), moved
    return first.step in right, moved


def places(first: Any) -> list[str]:
    """The candidate's names of the place: the layer, and the parameter in it."""
    layer = first.candidate or ""
    return [layer, f"{layer}.{first.slot}".lstrip("."), first.slot]


def judge(first: Any, fault: Fault, condition: str) -> Verdict:
    """Judge `Report.first_diff` by what is known of the fault."""
    if first is None:
        return Verdict(False, False, NO_CAUSE, False)
    steps, moved = _steps(first, fault, condition)
    anywhere = not fault.places or moved or first.stage == "loss"
    where = anywhere or any(re.fullmatch(fault.places, place) for place in places(first))
    placed = steps and where and _stages(first, fault, moved)
    cause = getattr(first, "cause", "")
    # A fault that no tensor shows is told by its statement, which is cause enough.
    sentence = str(cause) or (first.message if first.diff is None else "")
    proven = bool(getattr(cause, "proven", False))
    where_text = f"{first.candidate}.{first.slot}" if first.slot else str(first.candidate)
    return Verdict(
        True, placed, cause_of(sentence, str(getattr(cause, "kind", "")), fault), proven,
        first.step, first.stage, where_text, sentence, first.message,
    )  # fmt: skip


def cause_of(sentence: str, kind: str, fault: Fault) -> str:
    """What the sentence comes to: named, a list of suspects, generic, wrong, or none."""
    if not sentence:
        return NO_CAUSE
    sentence = re.split(r"(?:Tried and e|E)xcluded", sentence)[0]
    suspects = sum(bool(re.search(pattern, sentence)) for pattern in _SUSPECTS)
    right = any(re.search(word, sentence, re.IGNORECASE) for word in fault.words)
    of_kind = bool(kind and re.search(fault.kind, kind, re.IGNORECASE))
    if suspects > _MOST_SUSPECTS + 2 * of_kind:
        return SUSPECTS
    if right or of_kind:
        return NAMED
    # What the traced calls of both sides are is true of the code, and names no reason.
    generic = kind == "code" or any(re.search(word, sentence, re.IGNORECASE) for word in _GENERIC)
    return GENERIC if generic else WRONG

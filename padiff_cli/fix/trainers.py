"""Proposals that set arguments of trainers: of transformers, PaddleFormers and Lightning.

A trainer makes optimizer, clipping and schedule in its own code, so that no line of the candidate is about them but the
arguments of the trainer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from padiff.records import Difference
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.matching import Change, UnwritableError, Writer
from padiff_cli.fix.source import Edit, Project, Proposal, Source, last_name
from padiff_cli.fix.vocabulary import number_of, value_text

_WEIGHT = 1.2
# The arguments that make a setting, by its name in `Difference.name`; an argument that no call has is added where the
# class is one of `_CLASSES`.
_ARGUMENTS = {
    "warm-up steps": ("warmup_steps",),
    "the schedule of the learning rate": ("lr_scheduler_type",),
    "steps of the whole training": ("max_steps",),
    "label smoothing": ("label_smoothing_factor",),
    "samples of a micro-batch": ("per_device_train_batch_size",),
    "accumulation": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "weight_decay": ("weight_decay",),
    "decay.decoupled": ("weight_decay",),
    "decay.coupled": ("weight_decay",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "eps": ("adam_epsilon",),
}
_CLASSES = frozenset(("TrainingArguments", "Seq2SeqTrainingArguments", "PretrainingTrainingArguments", "SFTConfig"))
_LIGHTNING = "Trainer"
_CLIP = re.compile(r"(clip_grad_norm_|clip_grad_value_|ClipGradByGlobalNorm|ClipGradByValue)\(.*?([\d.e+-]+)\)")
# Settings whose effect on the optimizer's step a trainer decides.
_RATES = ("warm-up steps", "the schedule of the learning rate", "steps of the whole training")


def trainer_arguments(fault: Fault, project: Project) -> Iterator[Proposal]:
    """Yield arguments of trainers with the reference's values of the settings that a fault is about."""
    calls = [(source, call) for source, call in project.calls(*_CLASSES, _LIGHTNING) if call.keywords]
    if not calls:
        return
    for difference in fault.settings:
        if difference.name in _ARGUMENTS and _is_about(difference, fault):
            for name in _ARGUMENTS[difference.name]:
                yield from _set(project, calls, name, difference.values.reference)
    yield from _rate(fault, project, calls)
    clip = _CLIP.search(fault.fix) if fault.kind.startswith("clip") else None
    if clip is not None:
        limit, by_norm = float(clip[2]), "orm" in clip[1]
        of_lightning = [(source, call) for source, call in calls if _keyword(call, "gradient_clip_val") is not None]
        yield from _set(project, calls, "max_grad_norm", limit if by_norm else None)
        yield from _set(project, of_lightning, "gradient_clip_algorithm", "norm" if by_norm else "value")
        yield from _set(project, calls, "gradient_clip_val", limit)


def _is_about(difference: Difference, fault: Fault) -> bool:
    """Return True if a setting may have made a fault."""
    stage, kind = fault.first.stage, fault.kind
    if difference.name in _RATES:
        return kind in ("learning_rate", "lr", "rate") or stage == "update"
    return difference.stage == stage or difference.name in (fault.first.slot or "", kind) or difference.kind == kind


def _rate(fault: Fault, project: Project, calls: list[tuple[Source, ast.Call]]) -> Iterator[Proposal]:
    """Yield the learning rate, where the reference's is the candidate's times one number in all steps."""
    pairs = [(each.values.reference, each.values.candidate) for each in fault.settings if each.kind == "learning_rate"]
    numbers = [pair for pair in pairs if all(isinstance(value, (int, float)) and value > 0 for value in pair)]
    if not numbers or len(numbers) != len(pairs):
        return
    ratios = [reference / candidate for reference, candidate in numbers]
    if max(ratios) - min(ratios) > 1e-6 * max(ratios):
        return
    for source, call in calls:
        keyword = _keyword(call, "learning_rate")
        places = [] if keyword is None else _numbers_of(project, source, keyword.value)
        for place, node in places:
            own = number_of(node)
            if own:
                text = value_text(ast.Constant(float(f"{own * ratios[0]:.6g}")))
                start, end = place.span(node)
                yield Proposal((Edit(place.file, start, end, text),), f"`learning_rate` is {text}", _WEIGHT)


def _set(project: Project, calls: list[tuple[Source, ast.Call]], name: str, value: Any) -> Iterator[Proposal]:
    """Yield edits that give a trainer's argument a value: where it is defined, in the call, or as a new argument."""
    text = value_text(ast.Constant(value)) if isinstance(value, (int, float, str)) else ""
    if not text:
        return
    words = f"`{name}` is {text}"
    having = [(source, keyword) for source, call in calls if (keyword := _keyword(call, name)) is not None]
    for source, keyword in having:
        for place, node in _numbers_of(project, source, keyword.value):
            start, end = place.span(node)
            yield Proposal((Edit(place.file, start, end, text),), words, _WEIGHT)
        start, end = source.span(keyword.value)
        yield Proposal((Edit(source.file, start, end, text),), words, _WEIGHT + 0.1)
    if having:
        return
    is_lightning = name in ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
    for source, call in calls:
        if (last_name(call.func) == _LIGHTNING) == is_lightning and not _is_hugging_face(call):
            try:
                edits = Writer(source, "torch", {}).edits(Change("add", call, name, ast.Constant(value)))
            except UnwritableError:
                continue
            yield Proposal(edits, words, _WEIGHT + 0.2)


def _is_hugging_face(call: ast.Call) -> bool:
    return last_name(call.func) == _LIGHTNING and any(each.arg in ("model", "args") for each in call.keywords)


def _numbers_of(project: Project, source: Source, value: ast.expr) -> list[tuple[Source, ast.expr]]:
    """Return the places where the value of an argument is defined."""
    return [(source, value)] if isinstance(value, ast.Constant) else project.definitions(source, value)


def _keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((each for each in call.keywords if each.arg == name), None)

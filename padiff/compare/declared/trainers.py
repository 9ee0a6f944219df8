"""Trainer arguments that change a result: each setting ``trainer.<name>``, with a sentence about its effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from padiff.compare.declared.optimizers import same
from padiff.records import Both, Difference

# Line that makes only the Trainer divide the loss; it belongs before ``trainer.train()``.
_DIVIDE_ONCE = "trainer.accelerator.gradient_accumulation_steps = 1"


@dataclass(frozen=True)
class TrainerSetting:
    """Argument of a trainer that changes the result.

    Attributes:
        name: name of the setting, without ``trainer.``.
        words: name in reports.
        stage: first stage of a step that shows the effect.
        note: effect of the setting, in words.
    """

    name: str
    words: str
    stage: str
    note: str


#: Settings in causal order; within a stage, the most informative settings come first.
TRAINER = (
    TrainerSetting(
        "micro_batch_size", "samples of a micro-batch", "input", "both trainers have to be given batches of one size"
    ),
    TrainerSetting(
        "label_shift",
        "labels are shifted",
        "loss",
        "transformers' language models shift the labels by themselves, PaddleFormers' are given labels that are: "
        "labels[t] = input_ids[t + 1]",
    ),
    TrainerSetting("label_smoothing", "label smoothing", "loss", "the loss is not the same function"),
    TrainerSetting(
        "loss_mean",
        "the loss is a mean",
        "loss",
        "the two are the same only where each micro-batch has as many labels that count",
    ),
    TrainerSetting(
        "loss_divided_by",
        "the loss of a micro-batch is divided by",
        "backward",
        "where it is the square of the accumulation, it is divided twice: transformers 5.2 to 5.5 divide, and have "
        "accelerate divide again",
    ),
    TrainerSetting("schedule", "the schedule of the learning rate", "update", "another schedule gives other rates"),
    TrainerSetting(
        "warmup_steps",
        "warm-up steps",
        "update",
        "from warmup_ratio, transformers rounds their number up, PaddleFormers down: give warmup_steps",
    ),
    TrainerSetting("steps", "steps of the whole training", "update", "schedules end there"),
)


def trainer_differences(settings: Both[Mapping[str, Any]]) -> Iterator[Difference]:
    """Yield the differences in trainer settings. None counts alone: the tensors show any effect."""
    for setting in TRAINER:
        values = settings.map(lambda side, name=setting.name: side.get(f"trainer.{name}"))  # type: ignore[misc]
        if None in (values.reference, values.candidate) or same(*values):
            continue
        fix = ""
        if setting.name == "loss_divided_by":
            twice = values.zip(settings).map(lambda side: side[0] == side[1].get("accumulation", 0) ** 2)
            if twice.reference == twice.candidate:
                continue  # the different accumulation explains the divisors
            fix = _DIVIDE_ONCE if twice.candidate else ""
        yield Difference(setting.words, values, setting.stage, "trainer", changes=False, fix=fix, note=setting.note)

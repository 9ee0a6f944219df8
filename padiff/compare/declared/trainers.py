"""What arguments of trainers mean for a result: each setting ``trainer.<name>`` with the sentence that says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from padiff.records import Both


@dataclass(frozen=True)
class TrainerSetting:
    """An argument of a trainer that changes the result.

    Attributes:
        name: behind ``trainer.`` among the settings.
        words: what reports call it.
        stage: where in a step it shows first.
        note: what it means.
        line: what undoes it where the candidate's value is the larger number. May be empty.
    """

    name: str
    words: str
    stage: str
    note: str
    line: str = ""

    def fix(self, settings: Both[Mapping[str, Any]]) -> str:
        """The line that mends a difference; empty where none is known."""
        values = settings.map(lambda side: side.get(f"trainer.{self.name}"))
        numbers = all(isinstance(value, (int, float)) for value in values)
        return self.line if numbers and values.candidate > values.reference else ""


#: In causal order; of one stage, what says more comes first.
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
        "divided by the accumulation twice where it is the square of it: transformers 5.2 to 5.5 divide, and have "
        "accelerate divide again",
        "trainer.accelerator.gradient_accumulation_steps = 1  # before trainer.train()",
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

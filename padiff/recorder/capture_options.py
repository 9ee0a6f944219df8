"""Optional parts of a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from padiff.recorder.evaluation import TrainingHistory


@dataclass(frozen=True)
class CaptureOptions:
    """Optional parts of a capture; the fields are arguments of `padiff.recorder.capture.Capture`."""

    stepped: Callable[[int], None] | None = None
    stacks: bool = False
    consuming: Callable[[Any], None] | None = None
    functions: bool = False
    losses: bool = False
    packing: bool = False
    whole: bool = False
    loss_logged: bool = False
    history: TrainingHistory = field(default_factory=TrainingHistory)

"""Tensors and calls that a step could not record, and the sentences that report them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from padiff.frameworks.values import UncopiedError
from padiff.system.guard import reraise_from_signal_handler

# Largest number of characters of an error's text, of named layers and of reasons: a step may skip thousands of tensors.
_LETTERS, _NAMED, _REASONS = 120, 3, 5


@dataclass(frozen=True, slots=True)
class SkippedTensor:
    """Placeholder for a copy that could not be made.

    Attributes:
        reason: text of the reason.
    """

    reason: str

    level: ClassVar[str] = ""
    zero: ClassVar[bool] = False

    @classmethod
    def because(cls, error: Exception) -> SkippedTensor:
        """Return the placeholder for a copy that failed with an error. Call this in the ``except`` block.

        Raises:
            MemoryError: the error is one; other errors are kept from the training.
        """
        reraise_from_signal_handler(error)
        if isinstance(error, MemoryError):
            raise error
        if isinstance(error, UncopiedError):
            return cls(str(error))
        text = " ".join(str(error).split())
        short = f"{text[:_LETTERS]} ..." if len(text) > _LETTERS else text.rstrip(".")
        return cls(f"copying failed with {type(error).__name__}: {short}")


class SkipLog:
    """Counter of the skipped tensors and calls of a step, by reason."""

    def __init__(self) -> None:
        #: Number of skips per layer path, by (kind, reason, True for training mode).
        self._counts: dict[tuple[str, str, bool], dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def __bool__(self) -> bool:
        """Return True if anything was skipped."""
        return bool(self._counts)

    def add(self, path: str, reason: str, training: bool, what: str = "tensor") -> None:
        """Count a skipped tensor, or call, of a layer."""
        self._counts[what, reason, training][path] += 1

    def notes(self, training_only: bool) -> tuple[str, ...]:
        """Return a sentence for each reason.

        Args:
            training_only: True to ignore calls in evaluation mode.
        """
        merged: dict[tuple[str, str], dict[str, int]] = {}
        for (what, reason, training), counts in self._counts.items():
            if training or not training_only:
                layer_counts = merged.setdefault((what, reason), {})
                for path, count in counts.items():
                    layer_counts[path] = layer_counts.get(path, 0) + count
        sentences = []
        for (what, reason), layer_counts in list(merged.items())[:_REASONS]:
            named = ", ".join(list(layer_counts)[:_NAMED]) + (", ..." if len(layer_counts) > _NAMED else "")
            count = sum(layer_counts.values())
            sentences.append(f"{count} {what}(s) of {len(layer_counts)} layer(s) are not recorded ({named}): {reason}")
        omitted = len(merged) - _REASONS
        return (*sentences, f"more is not recorded, for {omitted} other reason(s)") if omitted > 0 else tuple(sentences)

"""What a step has no records of, because it can't be copied, and the sentences that say so."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from padiff.frameworks.values import UncopiedError
from padiff.system.guard import reraise_from_signal_handler

# Letters of an error's text, layers that are named, reasons that are given: a step may have thousands of such tensors.
_LETTERS, _NAMED, _REASONS = 120, 3, 5


@dataclass(frozen=True, slots=True)
class Left:
    """Stands in the place of a copy that could not be made.

    Attributes:
        reason: why, in words.
    """

    reason: str

    level: ClassVar[str] = ""
    zero: ClassVar[bool] = False

    @classmethod
    def because(cls, error: Exception) -> Left:
        """After an error, which the training must not see: but where memory is short, it is to know.

        To be called while the error is handled.
        """
        reraise_from_signal_handler(error)
        if isinstance(error, MemoryError):
            raise error
        if isinstance(error, UncopiedError):
            return cls(str(error))
        text = " ".join(str(error).split())
        short = f"{text[:_LETTERS]} ..." if len(text) > _LETTERS else text.rstrip(".")
        return cls(f"copying failed with {type(error).__name__}: {short}")


class LeftOut:
    """Counts what is left out in a step, by reason."""

    def __init__(self) -> None:
        #: By what it is, why, and whether in training mode: how often in which layer.
        self._counts: dict[tuple[str, str, bool], dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self._counts)

    def add(self, path: str, reason: str, training: bool, what: str = "tensor") -> None:
        """Count a tensor, or a call, of a layer."""
        self._counts[what, reason, training][path] += 1

    def notes(self, training_only: bool) -> tuple[str, ...]:
        """A sentence for each reason; ``training_only`` leaves out calls in evaluation mode."""
        merged: dict[tuple[str, str], dict[str, int]] = {}
        for (what, reason, training), counts in self._counts.items():
            if training or not training_only:
                of_layers = merged.setdefault((what, reason), {})
                for path, count in counts.items():
                    of_layers[path] = of_layers.get(path, 0) + count
        sentences = []
        for (what, reason), of_layers in list(merged.items())[:_REASONS]:
            named = ", ".join(list(of_layers)[:_NAMED]) + (", ..." if len(of_layers) > _NAMED else "")
            count = sum(of_layers.values())
            sentences.append(f"{count} {what}(s) of {len(of_layers)} layer(s) are not recorded ({named}): {reason}")
        more = len(merged) - _REASONS
        return (*sentences, f"more is not recorded, for {more} other reason(s)") if more > 0 else tuple(sentences)

"""Which models are being recorded. Nothing is written on the model itself: copies and pickles of it know nothing."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

# Replaced, never edited; weak references only, so that it keeps nothing alive.
_MARKS: ContextVar[tuple[Mark, ...]] = ContextVar("padiff_recorded", default=())


class Mark:
    """Says that a living recorder is at work on a model."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self.model = weakref.ref(model)
        self.recorder = weakref.ref(recorder)

    @classmethod
    def set(cls, model: Any, recorder: Any) -> Mark:
        living = tuple(mark for mark in _MARKS.get() if mark.valid)
        mark = cls(model, recorder)
        _MARKS.set((*living, mark))
        return mark

    @property
    def valid(self) -> bool:
        return self.model() is not None and self.recorder() is not None

    def remove(self) -> None:
        _MARKS.set(tuple(mark for mark in _MARKS.get() if mark is not self))


def marked(model: Any) -> bool:
    """Whether a living recorder is at work on the model."""
    return any(mark.model() is model and mark.valid for mark in _MARKS.get())

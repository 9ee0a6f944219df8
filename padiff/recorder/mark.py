"""Which models are being recorded. Nothing is written on the model itself: copies and pickles of it know nothing."""

from __future__ import annotations

import weakref
from typing import Any

# By the model's identity, with a weak reference that tells when the identity has gone to another object.
_MARKS: dict[int, Mark] = {}


class Mark:
    """Says that a living recorder is at work on a model."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self._key = id(model)
        self.model = weakref.ref(model)
        self.recorder = weakref.ref(recorder)

    @classmethod
    def set(cls, model: Any, recorder: Any) -> Mark:
        for key in [key for key, mark in _MARKS.items() if mark.model() is None or mark.recorder() is None]:
            del _MARKS[key]
        _MARKS[id(model)] = mark = cls(model, recorder)
        return mark

    def remove(self) -> None:
        if _MARKS.get(self._key) is self:
            del _MARKS[self._key]


def marked(model: Any) -> bool:
    """Whether a living recorder is at work on the model."""
    mark = _MARKS.get(id(model))
    return mark is not None and mark.model() is model and mark.recorder() is not None

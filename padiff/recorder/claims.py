"""Which models are being recorded. Nothing is written on the model itself: copies and pickles of it know nothing."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

# Replaced, never edited; weak references only, so that it keeps nothing alive.
_CLAIMS: ContextVar[tuple[Claim, ...]] = ContextVar("padiff_recorded", default=())


class Claim:
    """Says that a living recorder is at work on a model."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self.model = weakref.ref(model)
        self.recorder = weakref.ref(recorder)

    @classmethod
    def set(cls, model: Any, recorder: Any) -> Claim:
        living = tuple(claim for claim in _CLAIMS.get() if claim.valid)
        claim = cls(model, recorder)
        _CLAIMS.set((*living, claim))
        return claim

    @property
    def valid(self) -> bool:
        return self.model() is not None and self.recorder() is not None

    def remove(self) -> None:
        _CLAIMS.set(tuple(claim for claim in _CLAIMS.get() if claim is not self))


def claimed(model: Any) -> bool:
    """Whether a living recorder is at work on the model."""
    return any(claim.model() is model and claim.valid for claim in _CLAIMS.get())

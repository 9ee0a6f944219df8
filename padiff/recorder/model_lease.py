"""Registry of the models that are being recorded. The models get no attribute, so copies and pickles stay clean."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

# The tuple is replaced, never modified. Claims hold weak references, so the registry keeps no model alive.
_CLAIMS: ContextVar[tuple[ModelLease, ...]] = ContextVar("padiff_recorded", default=())


class ModelLease:
    """Registration of a recorder for a model; valid as long as both objects are alive."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self.model = weakref.ref(model)
        self.recorder = weakref.ref(recorder)

    @classmethod
    def set(cls, model: Any, recorder: Any) -> ModelLease:
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
    """Return True if a living recorder is registered for the model."""
    return any(claim.model() is model and claim.valid for claim in _CLAIMS.get())

"""The mark that a recorder leaves on a model while it records it."""

from __future__ import annotations

import weakref
from typing import Any

_NAME = "_padiff_recorder"


class Mark:
    """Says that a living recorder is at work on a model. Copies and pickles of the model don't carry it."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self._model = weakref.ref(model)
        self._recorder = weakref.ref(recorder)

    @classmethod
    def set(cls, model: Any, recorder: Any) -> Mark:
        mark = cls(model, recorder)
        # Past the model's own __setattr__, which sorts attributes into parameters, buffers and sublayers.
        object.__setattr__(model, _NAME, mark)
        return mark

    @property
    def valid(self) -> bool:
        return self._recorder() is not None

    def remove(self) -> None:
        model = self._model()
        if model is not None:
            vars(model).pop(_NAME, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


def marked(model: Any) -> bool:
    """Whether a living recorder is at work on the model."""
    mark = vars(model).get(_NAME)
    return isinstance(mark, Mark) and mark.valid

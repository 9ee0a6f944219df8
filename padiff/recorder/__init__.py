"""Recording a training loop without changing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from padiff.system.lazily import names_from

if TYPE_CHECKING:
    from padiff.recorder.factory import record
    from padiff.recorder.options import RecordOptions
    from padiff.recorder.output import MemoryRun
    from padiff.recorder.session import Recorder
else:
    # Lazy imports: a comparison uses `padiff.recorder.options` and does not need the rest.
    __getattr__ = names_from(
        __name__,
        {
            "MemoryRun": "padiff.recorder.output",
            "RecordOptions": "padiff.recorder.options",
            "Recorder": "padiff.recorder.session",
            "record": "padiff.recorder.factory",
        },
    )

__all__ = ["MemoryRun", "RecordOptions", "Recorder", "record"]

"""Recording a training loop without changing it."""

from padiff.recorder.memory import MemoryRun
from padiff.recorder.session import Recorder, record

__all__ = ["MemoryRun", "Recorder", "record"]

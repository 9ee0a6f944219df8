"""Recording a training loop without changing it."""

from padiff.recorder.factory import record
from padiff.recorder.memory import MemoryRun
from padiff.recorder.options import RecordOptions
from padiff.recorder.session import Recorder

__all__ = ["MemoryRun", "RecordOptions", "Recorder", "record"]

"""Replay of recorded steps with another model, each from the reference's recorded state."""

from padiff.replaying.calibrating import calibrate
from padiff.replaying.isolation import Isolation, OwnError
from padiff.replaying.resync_experiments import Resync, Resynced, resync
from padiff.replaying.session import Replay, replay
from padiff.replaying.step_runner import ReplayBatch, ReplayStep

__all__ = [
    "Isolation",
    "OwnError",
    "Replay",
    "ReplayBatch",
    "ReplayStep",
    "Resync",
    "Resynced",
    "calibrate",
    "replay",
    "resync",
]

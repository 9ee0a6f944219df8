"""Replay of recorded steps with another model, each from the reference's recorded state."""

from padiff.replaying.calibrating import calibrate
from padiff.replaying.layer_errors import Isolation, OwnError
from padiff.replaying.replay_function import replay
from padiff.replaying.resync_experiments import resync
from padiff.replaying.resync_report import Resync, Resynced
from padiff.replaying.session import Replay
from padiff.replaying.step import ReplayBatch, ReplayStep

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

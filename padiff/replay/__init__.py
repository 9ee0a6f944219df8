"""Doing recorded steps again with another model, each from where the recorded run was."""

from padiff.replay.session import Replay, replay
from padiff.replay.step import ReplayBatch, ReplayStep

__all__ = ["Replay", "ReplayBatch", "ReplayStep", "replay"]

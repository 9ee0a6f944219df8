"""What TensorBoard would show."""

from __future__ import annotations

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray


def events(folder):
    """Tags and points of the event files right in a folder, not below it."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()
    points = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        found = [(e.step, make_ndarray(e.tensor_proto)) for e in accumulator.Tensors(tag)]
        if found[0][1].dtype == np.float32:
            points[tag] = [(step, float(value)) for step, value in found]
    return points


def texts(folder):
    """The last text of each text tag."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    found = {tag: make_ndarray(accumulator.Tensors(tag)[-1].tensor_proto) for tag in accumulator.Tags()["tensors"]}
    return {tag: value.item().decode() for tag, value in found.items() if value.dtype == object and value.size == 1}


def tags(folder):
    """All tags of the event files right in a folder."""
    accumulator = EventAccumulator(str(folder)).Reload()
    return {tag for kind in ("scalars", "images", "tensors") for tag in accumulator.Tags()[kind]}

"""Run two live models once, restore their state, and compare their outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.align import Alignment
from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.model.live_model import LiveModel
from padiff.pair.steps import pair_steps
from padiff.recorder.capture import Capture
from padiff.recorder.layers import FixedLayers
from padiff.records import ROOT, Both, Pair, Step

#: Relative L2 error up to which two outputs agree: float32 rounding errors of many layers stay below it.
AGREES = 1e-3


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def pair(cls, value: Any) -> Both[Inputs]:
        """Read the inputs of two models from a pair; each is a dict of keywords, a tuple of arguments, or one tensor.

        Raises:
            UsageError: `value` is not a pair.
        """
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise UsageError(
                f"inputs have to be a pair, the base model's and the raw model's, got {type(value).__name__}"
            )
        return Both(*value).map(cls.from_value)

    @classmethod
    def from_value(cls, value: Any) -> Inputs:
        """Read the inputs of one model from a dict of keywords, a tuple or list of arguments, or one tensor."""
        if isinstance(value, Inputs):
            return value
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(tuple(value), {}) if isinstance(value, (list, tuple)) else cls((value,), {})


def run_once(live: LiveModel, inputs: Inputs, training: bool = False) -> Step:
    """Run a model once and return its records; modes, buffers and random states are restored.

    Args:
        training: True to run in training mode, False for eval mode.

    Raises:
        UsageError: the model's forward failed on these inputs; the cause is attached.
    """
    framework = live.framework
    paths = frozenset(node.path for node in live.nodes)
    capture = Capture(0, FixedLayers(framework, live.nodes, paths))
    layers = [node.layer for node in live.nodes]
    mode = _training(layers, framework) if training else framework.layers.evaluating(layers)
    with live.buffers_kept(), mode, framework.randomness.kept(), _draws_kept():
        capture.attach()
        try:
            live.model(*inputs.args, **inputs.kwargs)
            return capture.finish(updates=False)
        except Exception as error:
            raise UsageError(f"the forward of {type(live.model).__name__} failed on the inputs: {error}") from error
        finally:
            capture.detach()


@contextmanager
def _draws_kept() -> Iterator[None]:
    """Restore the random states of Python and numpy at the end of the block."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _training(layers: Sequence[Any], framework: Framework) -> Iterator[None]:
    """Put the layers into training mode without gradients; restore their modes at the end of the block."""
    modes = [(layer, layer.training) for layer in layers]
    try:
        for layer in layers:
            layer.training = True
        with framework.tensors.without_grad():
            yield
    finally:
        for layer, mode in modes:
            layer.training = mode


@dataclass(frozen=True)
class Output:
    """Difference of one output of two paired layers: place, relative L2 error and largest absolute difference."""

    path: str
    slot: str
    error: float
    max_abs: float


@dataclass(frozen=True)
class Proof:
    """Differences of the outputs of all paired layers, after both models ran once on equal weights.

    Attributes:
        outputs: the differences, in the base model's order of execution.
    """

    outputs: tuple[Output, ...]

    @property
    def holds(self) -> bool:
        """Return True if the root layers' outputs agree; if none was compared, the last compared output decides."""
        final = [output for output in self.outputs if output.path == ROOT] or list(self.outputs[-1:])
        return bool(final) and all(output.error <= AGREES for output in final)

    @property
    def agreeing(self) -> int:
        """Return the number of outputs that agree."""
        return sum(output.error <= AGREES for output in self.outputs)

    @property
    def rank(self) -> tuple[bool, int]:
        """Return the sort key of this proof, larger is better: final outputs first, then the number of agreeing
        outputs.
        """
        return self.holds, self.agreeing

    def table(self, at_most: int = 20) -> str:
        """Return the `at_most` largest diffs as text, one for each layer, in the base's order of execution."""
        worst: dict[str, Output] = {}
        for output in self.outputs:
            if output.path not in worst or worst[output.path].error < output.error:
                worst[output.path] = output
        shown = sorted(worst, key=lambda path: -worst[path].error)[:at_most]
        lines = [
            f"    {path}  {output.slot}: relative L2 {output.error:.3g}, max |diff| {output.max_abs:.3g}"
            for path, output in worst.items()
            if path in shown
        ]
        if len(worst) > len(shown):
            lines.append(f"    ... and {len(worst) - len(shown)} more layers with smaller diffs")
        return "\n".join(lines)


def prove(reference: Step, candidate: Step, alignment: Alignment) -> Proof:
    """Compare the outputs of two forward passes."""
    pairs = (p for p in pair_steps(reference, candidate, alignment) if p.stage == "forward" and p.complete)
    return Proof(tuple(_output(pair) for pair in pairs if not (pair.reference and pair.reference.source.sketched)))


def _output(pair: Pair) -> Output:
    assert pair.reference is not None and pair.candidate is not None
    reference = pair.reference.value
    candidate = pair.layout.apply(pair.candidate.value, reference.shape)
    path, slot = pair.reference.layer, pair.reference.slot
    try:
        reference, candidate = np.broadcast_arrays(reference, candidate)
    except ValueError:
        return Output(path, slot, math.inf, math.inf)
    if reference.size == 0 or reference.dtype.kind not in "fV":
        return Output(path, slot, 0.0 if np.array_equal(reference, candidate) else math.inf, 0.0)
    # The plain norm in the tensors' own precision is enough here, and fast: a search runs several trials.
    sides = Both(reference, candidate).map(lambda a: a.astype(np.promote_types(a.dtype, np.float32), copy=False))
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(sides.reference - sides.candidate)
        size = float(np.linalg.norm(np.nan_to_num(sides.reference)))
    error = float(np.linalg.norm(apart))
    return Output(path, slot, error / size if size else (math.inf if error else 0.0), float(np.abs(apart).max()))

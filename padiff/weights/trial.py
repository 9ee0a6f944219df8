"""Running two live models once, without leaving a trace: what this shows of them, and how far their outputs part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.align import Alignment, pair_steps
from padiff.compare.measure import measure
from padiff.errors import UsageError
from padiff.recorder.capture import Capture
from padiff.records import Diff, Step
from padiff.weights.live import LiveModel

#: Relative L2 error below which an output counts as the same: what float32 rounding leaves after many layers.
AGREES = 1e-3


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def pair(cls, value: Any) -> tuple[Inputs, Inputs]:
        """The two models' inputs from a pair; each a dict of keywords, a tuple of arguments, or one tensor.

        Raises:
            UsageError: it is no pair.
        """
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise UsageError(
                f"inputs have to be a pair, the base model's and the raw model's, got {type(value).__name__}"
            )
        return cls.of(value[0]), cls.of(value[1])

    @classmethod
    def of(cls, value: Any) -> Inputs:
        if isinstance(value, Inputs):
            return value
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(tuple(value), {}) if isinstance(value, (list, tuple)) else cls((value,), {})


def run_once(live: LiveModel, inputs: Inputs) -> Step:
    """What a model computes on these inputs in eval mode; its modes, buffers and random state are as before.

    Raises:
        UsageError: the model's forward failed on these inputs; the cause is attached.
    """
    framework = live.framework
    paths = frozenset(node.path for node in live.nodes)
    capture = Capture(0, framework, live.nodes, paths, parameters=False)
    kept = [
        (tensor, framework.to_numpy(tensor))
        for node in live.nodes
        for _, tensor, role in framework.parameters(node.layer)
        if role == "buffer"
    ]
    with framework.on_trial(node.layer for node in live.nodes):
        capture.attach()
        try:
            live.model(*inputs.args, **inputs.kwargs)
            return capture.finish(updates=False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UsageError(f"the forward of {type(live.model).__name__} failed on the inputs: {error}") from error
        finally:
            capture.detach()
            for tensor, values in kept:
                framework.write(tensor, values)


@dataclass(frozen=True)
class Proof:
    """Both models run once on equal weights: the outputs of all layers that answer to each other.

    Attributes:
        diffs: in the order in which the base ran.
    """

    diffs: tuple[Diff, ...]

    @property
    def worst(self) -> float:
        """Largest relative L2 error of a layer's output; infinite where nothing was compared."""
        found = [_error(diff) for diff in self.diffs]
        return max(found, default=float("inf"))

    @property
    def holds(self) -> bool:
        return self.worst <= AGREES

    @property
    def agreeing(self) -> int:
        """How many outputs agree."""
        return sum(_error(diff) <= AGREES for diff in self.diffs)

    def table(self, at_most: int = 20) -> str:
        """The largest output diff of each layer, in the order in which the base ran; the largest ones if many."""
        rows = [(diff.pair.anchor.layer, diff.pair.anchor.slot, _error(diff), diff) for diff in self.diffs]
        shown = sorted(range(len(rows)), key=lambda k: -rows[k][2])[:at_most]
        lines = []
        for k in sorted(shown):
            path, slot, error, diff = rows[k]
            largest = f"max |diff| {diff.figures.max_abs:.3g}" if diff.figures is not None else diff.problem
            lines.append(f"    {path}  {slot}: relative L2 {error:.3g}, {largest}")
        if len(rows) > len(shown):
            lines.append(f"    ... and {len(rows) - len(shown)} more with smaller diffs")
        return "\n".join(lines)


def prove(base: Step, raw: Step, alignment: Alignment) -> Proof:
    """Compare the outputs of two passes."""
    pairs: Sequence[Any] = [p for p in pair_steps(base, raw, alignment) if p.stage == "forward" and p.complete]
    return Proof(tuple(measure(pair) for pair in pairs))


def _error(diff: Diff) -> float:
    if diff.figures is None or diff.problem:
        return float("inf")
    return diff.figures.rel_l2 if diff.figures.l2 else 0.0

"""One recorded pass of one model: forward, loss, backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any

from padiff.auto.settings import ModelSetup
from padiff.errors import UsageError
from padiff.model.nested import flatten
from padiff.recorder.capture import Capture
from padiff.recorder.layers import FixedLayers
from padiff.records import Step

#: A context that is active during a pass (hooks that replace outputs).
During = Callable[[], AbstractContextManager[Any]]


@dataclass
class Pass:
    """Results of a pass: the step's records, and the Python stack of each layer's call."""

    step: Step
    stacks: dict[tuple[str, int], StackSummary]


def run_pass(
    side: ModelSetup, number: int, backward: bool, during: During = nullcontext, around: During = nullcontext
) -> Pass:
    """Run a model once on its inputs and record it. Gradients are cleared before, and no optimizer steps.

    Args:
        number: number of the step.
        backward: True to run backward, too.
        during: hooks that replace a layer's output for later layers, after the output is recorded.
        around: hooks that replace a layer's output before it is recorded.

    Raises:
        UsageError: the model's forward, or the loss, failed on these inputs; the cause is attached.
    """
    framework, live = side.framework, side.live
    # Function calls are recorded in the first pass only, where the weights are equal.
    layers = FixedLayers(framework, live.nodes, side.chosen, side.owning)
    capture = Capture(number, layers, stacks=True, functions=number == 0)
    framework.layers.clear_gradients(live.model)
    with around():
        capture.attach()
        try:
            with during():
                output = _forward(side)
                if backward or side.loss_fn is not None:
                    loss = _loss(side, output)
                    capture.log_loss(loss)
                    if backward:
                        loss.backward()
            step = capture.finish(updates=False)
        finally:
            capture.detach()
    return Pass(step, capture.stacks)


def weights_after(side: ModelSetup, number: int) -> Step:
    """Return the current parameters as the initial weights of the step ``number``."""
    return Capture(number, FixedLayers(side.framework, side.live.nodes, side.chosen, side.owning)).weights()


def update(side: ModelSetup) -> None:
    """Step the side's optimizer and clear its gradients, or call the user's function, which does both."""
    if side.framework.optimizers.is_optimizer(side.optimizer):
        side.framework.optimizers.step(side.optimizer)
    elif side.optimizer is not None:
        side.optimizer()


def _forward(side: ModelSetup) -> Any:
    try:
        return side.live.model(*side.args, **side.kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        framework = side.framework
        shapes = {
            name: f"{framework.tensors.dtype(value)} {list(framework.tensors.shape(value))}"
            for name, value in (*enumerate(side.args), *side.kwargs.items())
            if framework.tensors.is_tensor(value)
        }
        owned = sorted({framework.tensors.dtype(tensor) for _, tensor in side.live.tensors()})
        raise UsageError(
            f"the {side.name} model's forward failed on its inputs {shapes} (its parameters are {', '.join(owned)}): "
            f"{error}"
        ) from error


def _loss(side: ModelSetup, output: Any) -> Any:
    framework = side.framework
    if side.loss_fn is None:
        return _mean_of_all(side, output)
    loss = side.loss_fn(output)
    if not framework.tensors.is_tensor(loss) or math.prod(framework.tensors.shape(loss)) != 1:
        got = list(framework.tensors.shape(loss)) if framework.tensors.is_tensor(loss) else type(loss).__name__
        raise UsageError(f"loss_fns: the {side.name} model's loss has to be a tensor of one element, got {got}")
    return loss


def _mean_of_all(side: ModelSetup, output: Any) -> Any:
    """Return the default loss: the sum of the means of all floating-point outputs."""
    framework = side.framework
    floating = [
        tensor
        for _, tensor in flatten(output, "output", framework.tensors.is_tensor)
        if framework.tensors.dtype(tensor).startswith(("float", "bfloat")) and framework.tensors.trainable(tensor)
    ]
    if not floating:
        raise UsageError(
            f"the {side.name} model's output holds no floating tensor with a gradient: give loss_fns, or "
            "diff_phase='forward'"
        )
    total = floating[0].mean()
    for tensor in floating[1:]:
        total = total + tensor.mean()
    return total

"""Replay of packed steps inside of a host's training loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import padiff
from padiff.compare import Policy
from padiff.dump.store import AnyPath
from padiff.errors import NothingToCompareError, RunsDifferError, UsageError
from padiff.frameworks.base import Framework
from padiff.records import Report
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import summary_line
from padiff.replaying import Replay, ReplayBatch, ReplayStep
from padiff.system.terminal import say

_NO_MORE = object()


class HostReplay:
    """A replay that runs inside of a host's training loop: each batch of the host is replaced by a recorded batch.

    Args:
        reference: the run with packs.
        dir_path: run folder that the candidate is recorded to.
        layer_map: pairs of layers of the two models.
        policy: rule for when a diff passes.
        existing: treatment of an existing run folder.
        on_diff: ``raise`` raises an error if the steps differ; any other value reports the result.
        floors: number of extra perturbed runs of each step that measure its noise floors.
        float64: True to run each step in float64, too.
    """

    def __init__(
        self,
        reference: str | Path,
        dir_path: AnyPath,
        layer_map: Any,
        policy: Policy | None,
        existing: str,
        on_diff: str,
        floors: int = 0,
        float64: bool = False,
    ) -> None:
        self._reference, self._dir_path, self._on_diff = reference, dir_path, on_diff
        self._layer_map, self._policy, self._existing = layer_map, policy, existing
        self._floors, self._float64 = floors, float64
        self._replay: Replay | None = None
        self._steps: Generator[ReplayStep | None, None, None] | None = None
        self._step: ReplayStep | None = None
        self._batches = 0
        self._over = False
        self.report: Report | None = None

    def start(self, model: Any, optimizers: Sequence[Any], settings: Mapping[str, Any], world_size: int | None) -> None:
        """Open the replay when the training begins.

        Raises:
            UsageError: the run can't be replayed in this training.
        """
        if (world_size or 1) > 1:
            raise UsageError(
                f"replay: this training runs in {world_size} processes, and a replay does the steps of one: use one "
                "device"
            )
        self._replay = padiff.replay(
            self._reference,
            model,
            self._dir_path,
            optimizer=list(optimizers) or None,
            layer_map=self._layer_map,
            policy=self._policy,
            existing=self._existing,
            floors=self._floors,
            float64=self._float64,
        )
        self._replay.check_batches(settings.get("accumulation"))
        self._replay.open()
        self._steps, self._step, self._over = self._replay.steps(), None, False

    def begin_batch(self) -> ReplayBatch | None:
        """Return the recorded batch to train on instead of the host's next batch; `None` once all steps are done."""
        if self._replay is None or self._steps is None or self._over:
            return None
        if self._step is not None:
            self._replay.attach()
        else:
            # Take the next step only now: the host may have changed weights and learning rates since the last step.
            self._step, self._batches = next(self._steps), 0
            assert self._step is not None
        batch = self._step.batches[self._batches]
        self._batches += 1
        return batch

    @property
    def batches(self) -> Sequence[ReplayBatch]:
        """Return the micro-batches of the current step."""
        return self._step.batches if self._step is not None else ()

    def remove_hooks(self) -> None:
        """Remove the hooks until the batch continues, or after it was left by an exception."""
        if self._replay is not None:
            self._replay.detach()

    def end_batch(self, loss_scale: float) -> None:
        """Note the loss scale of a batch that ended, and remove the hooks."""
        if self._replay is not None:
            self._replay.loss_scale = loss_scale
            self._replay.detach()

    def end_step(self) -> bool:
        """End the current step after an optimizer step, and return True if all packed steps are done.

        Raises:
            UsageError: the optimizer stepped before the last micro-batch.
        """
        if self._replay is None or self._steps is None or self._step is None:
            return self._over
        if self._batches != len(self._step.batches):
            raise UsageError(
                f"replay: the host stepped after {self._batches} of the {len(self._step.batches)} micro-batches of "
                f"step {self._step.number}: use a number of batches that is a multiple of the accumulation steps"
            )
        # The next step begins with its first batch: until then the host may step its scheduler or evaluate.
        self._over = next(self._steps, _NO_MORE) is _NO_MORE
        self._step = None
        return self._over

    def end_training(self) -> None:
        """Close the replay when the training ends, and report its result.

        Raises:
            RunsDifferError: the steps differ, and ``on_diff="raise"``.
        """
        replay, over = self._left(), self._over
        if replay is None:
            return
        replay.close()
        if not over:
            once = self._floors + self._float64
            each = f", each {1 + once} times to measure its floors" if once else ""
            say(
                f"replay: the training ended after {len(replay.done)} of {len(replay.numbers)} packed steps{each}: let "
                f"it run for {len(replay.numbers) * (1 + once)} optimizer steps"
            )
        try:
            self.report = replay.report
        except NothingToCompareError as error:
            say(f"replay: {error}")
            return
        say(f"replay of {self._reference}: {summary_line(diagnostic_of(self.report))}")
        if self.report.first_diff is not None and self._on_diff == "raise":
            raise RunsDifferError(self.report.first_diff.message, self.report)

    def abort(self) -> None:
        """Close the replay after an exception, and restore the model."""
        exact = self._step is not None and self._step.exact
        replay = self._left()
        if replay is not None:
            replay.close(finished=False)
            if exact:
                say(
                    "replay: this training failed in the step that was done in float64: some code makes tensors of "
                    "another dtype. Leave float64 out"
                )

    def _left(self) -> Replay | None:
        """Drop the current step, and return the replay that is to be closed, if there is one."""
        steps, self._steps, self._step = self._steps, None, None
        if steps is not None:
            steps.close()
        replay, self._replay = self._replay, None
        return replay


def exchanged_lists(
    batch: ReplayBatch, inputs: Sequence[Any], labels: Sequence[Any], framework: Framework
) -> tuple[list[Any], list[Any]]:
    """Return the recorded inputs and labels in the order of the host's inputs and labels.

    Raises:
        UsageError: the recorded tensors differ from the host's in number, rank or kind.
    """
    values = [*batch.inputs, *batch.kwargs.values()]
    return (
        _in_order("inputs", batch, values, list(inputs), framework),
        _in_order("labels", batch, list(batch.labels), list(labels), framework),
    )


def exchanged(batch: ReplayBatch, own: Any, framework: Framework) -> Any:
    """Return the recorded batch in the nested form of the host's batch `own`.

    Raises:
        UsageError: the recorded tensors differ from the host's in number, rank or kind.
    """
    is_tensor = framework.tensors.is_tensor
    host_tensors = list(_tensors(own, is_tensor))
    complete_batch = batch.whole
    reference_tensors = list(_tensors(complete_batch, is_tensor)) if complete_batch is not None else []
    if len(reference_tensors) != len(host_tensors):
        reference_tensors = [
            tensor for part in (batch.inputs, batch.kwargs, batch.labels) for tensor in _tensors(part, is_tensor)
        ]
    ordered = iter(_in_order("tensors", batch, reference_tensors, host_tensors, framework))
    return _filled(own, is_tensor, lambda: next(ordered))


def _in_order(what: str, batch: ReplayBatch, sources: list[Any], targets: list[Any], framework: Framework) -> list[Any]:
    shape, dtype = framework.tensors.shape, framework.tensors.dtype
    if len(sources) != len(targets):
        raise UsageError(
            f"{batch.where}: the reference's batch has {len(sources)} {what}, this training's {len(targets)}: a replay "
            "needs the same number of tensors. Replay it in a loop of your own (padiff.replay)"
        )
    values = []
    for source, target in zip(sources, targets):
        if not framework.tensors.is_tensor(source) or not framework.tensors.is_tensor(target):
            values.append(source)
            continue
        sizes = shape(source), shape(target)
        if len(sizes[0]) != len(sizes[1]) and _per_sample(sizes[0]) == _per_sample(sizes[1]):
            source = source.reshape([sizes[0][0], *sizes[1][1:]])
            sizes = shape(source), sizes[1]
        if len(sizes[0]) != len(sizes[1]) or _is_whole(dtype(source)) != _is_whole(dtype(target)):
            raise UsageError(
                f"{batch.where}: the reference's batch has {list(sizes[0])} {dtype(source)} where this training's has "
                f"{list(sizes[1])} {dtype(target)}: the models are not given the same. Give this training batches of "
                "that form, or replay in a loop of your own (padiff.replay)"
            )
        values.append(source)
    return values


def _per_sample(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape[1:]:
        size *= extent
    return size


def _is_whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _tensors(value: Any, is_tensor: Callable[[Any], bool]) -> list[Any]:
    if is_tensor(value):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in _tensors(inner, is_tensor)]
    if isinstance(value, (tuple, list)):
        return [tensor for inner in value for tensor in _tensors(inner, is_tensor)]
    return []


def _filled(value: Any, is_tensor: Callable[[Any], bool], following: Callable[[], Any]) -> Any:
    if is_tensor(value):
        return following()
    if isinstance(value, Mapping):
        return {key: _filled(inner, is_tensor, following) for key, inner in value.items()}
    if isinstance(value, tuple):
        items = [_filled(inner, is_tensor, following) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return [_filled(inner, is_tensor, following) for inner in value] if isinstance(value, list) else value

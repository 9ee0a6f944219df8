"""Doing packed steps again inside of a host's own training loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import padiff
from padiff.compare import Policy
from padiff.dump.remote_path import AnyPath
from padiff.errors import NothingToCompareError, RunsDifferError, UsageError
from padiff.frameworks.base import Framework
from padiff.records import Report
from padiff.replaying import Replay, ReplayBatch, ReplayStep
from padiff.system.switches import say

_NO_MORE = object()


class HostReplay:
    """Replays a run in the place of a host's training: its batches tick, and the reference's are trained on.

    Args:
        reference: the run with packs.
        dir_path: where the candidate is recorded.
        on_diff: ``raise`` raises where the steps differ; else it is said.
        floors: how often each step is done once more, moved, to measure its floors.
        float64: whether each is done in float64, too.
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
        """Training begins.

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
        """A batch of the host's begins: the one to train on instead; `None` once all steps are done."""
        if self._replay is None or self._steps is None or self._over:
            return None
        if self._step is not None:
            self._replay.attach()
        else:
            # In what is left as it was at the end of the last one, the host may have changed weights and rates.
            self._step, self._batches = next(self._steps), 0
            assert self._step is not None
        batch = self._step.batches[self._batches]
        self._batches += 1
        return batch

    @property
    def batches(self) -> Sequence[ReplayBatch]:
        """The micro-batches of the step under way."""
        return self._step.batches if self._step is not None else ()

    def detach(self) -> None:
        """Hooks off; the batch goes on, or was left."""
        if self._replay is not None:
            self._replay.detach()

    def end_batch(self, loss_scale: float) -> None:
        """The batch ended."""
        if self._replay is not None:
            self._replay.loss_scale = loss_scale
            self._replay.detach()

    def end_step(self) -> bool:
        """The optimizer stepped. Returns whether all packed steps are done.

        Raises:
            UsageError: it stepped before all micro-batches were there.
        """
        if self._replay is None or self._steps is None or self._step is None:
            return self._over
        if self._batches != len(self._step.batches):
            raise UsageError(
                f"replay: the host stepped after {self._batches} of the {len(self._step.batches)} micro-batches of "
                f"step {self._step.number}: use a number of batches that is a multiple of the accumulation steps"
            )
        # It ends here, and the next one begins with its batch: in between, the host steps its schedule, or evaluates.
        self._over = next(self._steps, _NO_MORE) is _NO_MORE
        self._step = None
        return self._over

    def finish(self) -> None:
        """Training ended: say what came out.

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
        say(f"replay of {self._reference}: {str(self.report).splitlines()[0]}")
        if self.report.first_diff is not None and self._on_diff == "raise":
            raise RunsDifferError(self.report.first_diff.message, self.report)

    def abort(self) -> None:
        """Training ended by an exception: the model is given back."""
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
        """The training is over: a step under way is forgotten."""
        steps, self._steps, self._step = self._steps, None, None
        if steps is not None:
            steps.close()
        replay, self._replay = self._replay, None
        return replay


def exchanged_lists(
    batch: ReplayBatch, inputs: Sequence[Any], labels: Sequence[Any], framework: Framework
) -> tuple[list[Any], list[Any]]:
    """The reference's inputs and labels, each in the order that the host gives its own.

    Raises:
        UsageError: they are not as many, or of other kinds.
    """
    given = [*batch.inputs, *batch.kwargs.values()]
    return (
        _in_order("inputs", batch, given, list(inputs), framework),
        _in_order("labels", batch, list(batch.labels), list(labels), framework),
    )


def exchanged(batch: ReplayBatch, own: Any, framework: Framework) -> Any:
    """The reference's batch, in the form that the host's own one has.

    Raises:
        UsageError: its tensors are not as many, or of other kinds.
    """
    is_tensor = framework.tensors.is_tensor
    wanted = list(_tensors(own, is_tensor))
    whole = batch.whole
    given = list(_tensors(whole, is_tensor)) if whole is not None else []
    if len(given) != len(wanted):
        given = [tensor for part in (batch.inputs, batch.kwargs, batch.labels) for tensor in _tensors(part, is_tensor)]
    found = iter(_in_order("tensors", batch, given, wanted, framework))
    return _filled(own, is_tensor, lambda: next(found))


def _in_order(what: str, batch: ReplayBatch, given: list[Any], own: list[Any], framework: Framework) -> list[Any]:
    shape, dtype = framework.tensors.shape, framework.tensors.dtype
    if len(given) != len(own):
        raise UsageError(
            f"{batch.where}: the reference's batch has {len(given)} {what}, this training's {len(own)}: a replay "
            "needs the same number of tensors. Replay it in a loop of your own (padiff.replay)"
        )
    found = []
    for one, other in zip(given, own):
        if not framework.tensors.is_tensor(one) or not framework.tensors.is_tensor(other):
            found.append(one)
            continue
        sizes = shape(one), shape(other)
        if len(sizes[0]) != len(sizes[1]) and _per_sample(sizes[0]) == _per_sample(sizes[1]):
            one = one.reshape([sizes[0][0], *sizes[1][1:]])
            sizes = shape(one), sizes[1]
        if len(sizes[0]) != len(sizes[1]) or _is_whole(dtype(one)) != _is_whole(dtype(other)):
            raise UsageError(
                f"{batch.where}: the reference's batch has {list(sizes[0])} {dtype(one)} where this training's has "
                f"{list(sizes[1])} {dtype(other)}: the models are not given the same. Give this training batches of "
                "that form, or replay in a loop of your own (padiff.replay)"
            )
        found.append(one)
    return found


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

"""Warnings about trainings that a recorder cannot observe completely."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.recorder.capture import Capture
from padiff.recorder.memory import MemoryRun
from padiff.records import bytes_text
from padiff.system.warn import warn

# Optimizer steps within one recorded step that suggest a missing try_dump(). The critic of a GAN takes about five.
_MANY_STEPS = 10


class RecorderWarnings:
    """Warnings about a training, collected during a step and issued at its end; most kinds only once per training."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._changed = self._unstepped = self._left_out = self._forked = self._dropped = self._evaluated = False
        self._unseen_steps = 0

    def called(self, capture: Capture) -> None:
        """Warn of a step in which no layer was called, or the model in evaluation mode only."""
        if capture.evaluations and capture.empty:
            if not self._evaluated:
                self._evaluated = True
                self._waiting.append(
                    f"step {capture.number} is not recorded: the model was called in evaluation mode without "
                    "gradients alone. Evaluation is counted, and not recorded, in a loop that trains. To record it, "
                    "use a recorder without an optimizer"
                )
        elif capture.has_layers and not capture.called:
            self._waiting.append(
                f"no layer of the recorded model was called in step {capture.number}, so nothing of what it "
                "computes is recorded. Does the loop train this model? (What a compiled function calls, or "
                "a CUDA graph replays, is not seen.)"
            )

    def changed(self, capture: Capture, changes: str) -> None:
        """Warn that the model's layers have changed in a step; only once."""
        if changes and not self._changed:
            self._changed = True
            self._waiting.append(
                f"the layers of the recorded model changed in step {capture.number} ({changes}). They are "
                "recorded as they are now, and the run's layer tree is that of the model as it is now. What was "
                "recorded of layers that are gone can still be read, but is not compared. (Said once, whatever changes "
                "later.)"
            )

    def stepped(self, capture: Capture) -> None:
        """Warn that parameters change although the recorded optimizer does not step.

        The warning comes after two recorded steps in a row, and only once. Gradient accumulation, and steps that a loss
        scaler skips, change no parameter and cause no warning.
        """
        self._unseen_steps = self._unseen_steps + 1 if capture.parameters.moved_unseen else 0
        if self._unseen_steps >= 2 and not self._unstepped:
            self._unstepped = True
            self._waiting.append(
                f"in step {capture.number} and the due step before it the parameters changed, but step() of "
                "the optimizer that was given was not called, so gradients and updates (grad, update) are not "
                "recorded. It may hand its work to an optimizer of its own, as SAM does (base_optimizer), or another "
                "one has taken its place: give optimizer= the one whose step() is called."
            )

    def say(self, what: str) -> None:
        """Add a warning with this text, unless the text is empty."""
        if what:
            self._waiting.append(f"{what}.")

    def unended(self, times: int) -> None:
        """Warn at once that try_dump() is missing, when the number of optimizer steps reaches `_MANY_STEPS`."""
        if times == _MANY_STEPS:
            warn(
                f"an optimizer stepped {times} times, and try_dump() was not called: so far all of it is one "
                "step. Call rec.try_dump() at the end of each step"
            )

    def folded(self, capture: Capture) -> None:
        """Warn that several optimizer steps are recorded as one step, as try_dump() was never called."""
        times = capture.parameters.steps_taken
        if times > 1:
            self._waiting.append(
                f"try_dump() was never called, so {times} optimizer steps are recorded as one step. Call "
                "rec.try_dump() at the end of each step"
            )

    def dropped(self, run: MemoryRun) -> None:
        """Warn that a run in memory is full and drops steps; only once."""
        if not self._dropped:
            self._dropped = True
            self._waiting.append(
                f"this run is kept in memory, which holds {bytes_text(run.max_bytes)} of it: step "
                f"{run.dropped[0]} was let go, and others will be; the first step and the latest stay. Give a folder, "
                "padiff.record(model, dir_path), or a larger max_bytes"
            )

    def left_out(self, capture: Capture) -> None:
        """Warn of tensors of a step that could not be copied; only once."""
        why: Sequence[str] = capture.left_out
        if why and not self._left_out:
            self._left_out = True
            self._waiting.append(
                f"in step {capture.number}, {'; '.join(why)}. Everything else is recorded; the training is "
                "not affected. This is said once; each step's notes list what is missing."
            )

    def forked(self) -> None:
        """Warn that a step ended in a fork of the recording process; only once."""
        if not self._forked:
            self._forked = True
            self._waiting.append(
                "this process was forked from the recording one; it records nothing. Open a recorder "
                "after the fork, with a folder of its own"
            )

    def give(self) -> None:
        """Issue the collected warnings, after the step is handed on: a warning may be raised as an error."""
        while self._waiting:
            warn(self._waiting.pop(0))

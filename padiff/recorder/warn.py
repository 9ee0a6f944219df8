"""What a recorder warns of in a training that it can't see all of."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.recorder.capture import Capture
from padiff.recorder.memory import MemoryRun
from padiff.records import bytes_text
from padiff.system.warn import warn

# Steps of an optimizer within one step from which on try_dump() was probably forgotten: a critic takes five.
_MANY_STEPS = 10


class RecorderWarnings:
    """Warnings about a training, given when its step is over. What is said once for a training is not said again."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._changed = self._unstepped = self._left_out = self._forked = self._dropped = self._evaluated = False
        self._unseen_steps = 0

    def called(self, capture: Capture) -> None:
        """Warn of a step in which nothing was called."""
        if capture.evaluations and capture.empty:
            if not self._evaluated:
                self._evaluated = True
                self._waiting.append(
                    f"padiff: step {capture.number} is not recorded: the model was called in evaluation mode without "
                    "gradients alone. Evaluation is counted, and not recorded, in a loop that trains. To record it, "
                    "use a recorder without an optimizer"
                )
        elif not capture.called:
            self._waiting.append(
                f"padiff: no layer of the recorded model was called in step {capture.number}, so nothing of what it "
                "computes is recorded. Does the loop train this model? (What a compiled function calls is not "
                "seen.)"
            )

    def changed(self, capture: Capture, changes: str) -> None:
        """Warn that the model has other layers since a step."""
        if changes and not self._changed:
            self._changed = True
            self._waiting.append(
                f"padiff: the layers of the recorded model changed in step {capture.number} ({changes}). They are "
                "recorded as they are now, and the run's layer tree is that of the model as it is now. What was "
                "recorded of layers that are gone can still be read, but is not compared. (Said once, whatever changes "
                "later.)"
            )

    def stepped(self, capture: Capture) -> None:
        """Warn that it is another optimizer that steps, once it did so in two due steps in a row: accumulated gradients
        and steps that a loss scaler skips change no parameter.
        """
        self._unseen_steps = self._unseen_steps + 1 if capture.parameters.moved_unseen else 0
        if self._unseen_steps >= 2 and not self._unstepped:
            self._unstepped = True
            self._waiting.append(
                f"padiff: in step {capture.number} and the due step before it the parameters changed, but step() of "
                "the optimizer that was given was not called, so gradients and updates (grad, update) are not "
                "recorded. It may hand its work to an optimizer of its own, as SAM does (base_optimizer), or another "
                "one has taken its place: give optimizer= the one whose step() is called."
            )

    def say(self, what: str) -> None:
        """Say something when the step is over; nothing where it is empty."""
        if what:
            self._waiting.append(f"padiff: {what}.")

    def unended(self, times: int) -> None:
        """Say at once that steps are not ended, where an optimizer has stepped so often that this is no critic's."""
        if times == _MANY_STEPS:
            warn(
                f"padiff: an optimizer stepped {times} times, and try_dump() was not called: so far all of it is one "
                "step. Call rec.try_dump() at the end of each step"
            )

    def folded(self, capture: Capture) -> None:
        """Warn that several optimizer steps became one step, since none was ended."""
        times = capture.parameters.steps_taken
        if times > 1:
            self._waiting.append(
                f"padiff: try_dump() was never called, so {times} optimizer steps are recorded as one step. Call "
                "rec.try_dump() at the end of each step"
            )

    def dropped(self, run: MemoryRun) -> None:
        """Warn that a run in memory is full."""
        if not self._dropped:
            self._dropped = True
            self._waiting.append(
                f"padiff: this run is kept in memory, which holds {bytes_text(run.max_bytes)} of it: step "
                f"{run.dropped[0]} was let go, and others will be; the first step and the latest stay. Give a folder, "
                "padiff.record(model, dir_path), or a larger max_bytes"
            )

    def left_out(self, capture: Capture) -> None:
        """Warn of what of a step could not be copied."""
        why: Sequence[str] = capture.left_out
        if why and not self._left_out:
            self._left_out = True
            self._waiting.append(
                f"padiff: in step {capture.number}, {'; '.join(why)}. Everything else is recorded; the training is "
                "not affected. This is said once; each step's notes list what is missing."
            )

    def forked(self) -> None:
        """Warn that a step ended in a fork of the process that records."""
        if not self._forked:
            self._forked = True
            self._waiting.append(
                "padiff: this process was forked from the recording one; it records nothing. Open a recorder "
                "after the fork, with a folder of its own"
            )

    def give(self) -> None:
        """Warn, at the line that ended the step: a warning that is an error must not cost the step."""
        while self._waiting:
            warn(self._waiting.pop(0))

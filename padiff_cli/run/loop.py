"""Records a plain loop: the model that owns the parameters of the optimizer that steps."""

from __future__ import annotations

from typing import Any

from padiff.errors import PadiffError, RunsDifferError
from padiff.frameworks import framework_of
from padiff_cli.finding import NO_OWNER, SEVERAL, ModelFinder
from padiff_cli.run.recording import Recording
from padiff_hooks.training import TrainingRecorder

_BY_HAND = "Record it from inside: padiff.record(model, ..., optimizer=[...])"
_WHY = {
    SEVERAL: f"{SEVERAL}, and where a step of the training ends is not seen from outside. {_BY_HAND}",
    NO_OWNER: f"{NO_OWNER}. {_BY_HAND}, with a model that holds all of its parts",
}


class Stopped(SystemExit):
    """Ends the script of a plain loop, which nobody can ask to stop, with ``on_diff="stop"``; exit code 1."""

    code = 1


class LoopFinder(ModelFinder):
    """Finds the model at its first call, where a single optimizer was made by then; else once an optimizer stepped."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._training: TrainingRecorder | None = None
        self._first: Any = None
        self._steps = 0
        self._failed = False
        super().__init__()

    @property
    def recorded(self) -> bool:
        """Whether a step of a loop was recorded."""
        return self._training is not None and self._steps > 0

    def fail(self) -> None:
        """The script was left by an exception: what is recorded is not the whole of it."""
        self._failed = True
        self.leave()

    def _records_itself(self) -> None:
        self.fail()
        self._recording.leave()

    # -- finding ---------------------------------------------------------------------------------------------

    def _call(self, layer: Any) -> None:
        super()._call(layer)
        if self._steps or not getattr(layer, "training", False):
            return
        optimizers = self.optimizers()
        if len(optimizers) == 1 and framework_of(layer).hooks.learning() and self._owns(layer, optimizers[0]):
            self._found(layer, optimizers[0])

    def _stepped(self, optimizer: Any) -> None:
        self._steps += 1
        super()._stepped(optimizer)

    def _decides(self, optimizer: Any) -> bool:
        if self._first is None:
            self._first = optimizer
            # Where there are others they may be about to step; if none does, this one steps again.
            return len(self.optimizers()) < 2
        if self._first is not optimizer:
            self._refuse(SEVERAL)
            return False
        return True

    # -- recording -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        options, dir_path = self._recording.options, self._recording.dir_path
        training = TrainingRecorder(dir_path, **options)
        training.step += self._steps
        framework = framework_of(self.model)
        try:
            training.start(self.model, [self.optimizer], resumed=options.get("existing") == "resume")
        except RunsDifferError:
            raise
        except PadiffError as error:
            self._refuse(str(error))
            return
        model, rule = type(framework.layers.unwrap(self.model)).__name__, type(self.optimizer).__name__
        self._recording.take(f"a plain loop: {model}, which {rule} trains ({framework.name})")
        self._training = training
        training.begin_batch()

    def _end_step(self) -> None:
        if self._training is None:
            return
        self._training.end_batch()
        if self._training.end_step():
            raise Stopped
        self._training.begin_batch()

    def _end(self) -> None:
        training = self._training
        if training is not None and self._failed:
            training.abort()
        elif training is not None:
            training.finish()

    def _refuse(self, why: str) -> None:
        self.fail()
        self._recording.refuse(_WHY.get(why, why))

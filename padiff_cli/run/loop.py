"""Records plain loops: the models whose parameters the optimizers that step hold, or the loop itself changes."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from types import FrameType
from typing import Any

import numpy as np

from padiff.errors import PadiffError, RunsDifferError
from padiff.frameworks import framework_of
from padiff.frameworks.base import Framework
from padiff.recorder import Recorder
from padiff.recorder.model_copies import is_copy, parameters_of
from padiff.recorder.tracer import Prelude
from padiff.system.guard import Guard, reraise_from_signal_handler
from padiff_cli.finding import SEVERAL, ModelFinder, _framework, _owned
from padiff_cli.guard import guarded
from padiff_cli.run.iterations import clearing_around, stepping_around
from padiff_cli.run.recording import Recording
from padiff_hooks.training import TrainingRecorder

AGAIN = "the model of an earlier run trains again"
_BY_HAND = "Record it from inside: padiff.record(model, ..., optimizer=[...])"
_WHY = {
    SEVERAL: f"{SEVERAL}, and where a step of the training ends is not seen from outside. {_BY_HAND}",
    AGAIN: f"{AGAIN}, and models that take turns are no trainings one after the other. {_BY_HAND}",
}


# Number of parameters, spread over the model, whose gradients show a backward.
_HOOKED = 4


class Stopped(SystemExit):
    """Ends the script of a plain loop, which nobody can ask to stop: exit code 0 after the steps that were asked for
    (``stop_after``), 1 at a difference (``on_diff="stop"``).
    """


class LoopFinder(ModelFinder):
    """Records the models of optimizers from their first call that can be learned from.

    A loop that trains other models with other optimizers is another training, with a folder of its own.

    Attributes:
        learned: whether a layer was called in training, with gradients on.
        stepped: whether an optimizer stepped.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._training: TrainingRecorder | None = None
        self._steps = self._missed = 0
        self._failed = self._paused = False
        #: Thread that trains what is recorded.
        self._thread = 0
        #: The step at which a run goes on that was ended to have other optimizers.
        self._resumes: int | None = None
        self.learned = self.stepped = False
        #: Watch of a model in a loop that may change its parameters without an optimizer; no other one after it.
        self._by_hand: _Updates | None = None
        self._by_hand_is_over = False
        #: Whether a step is recorded of which it is not known yet whether it trains.
        self._on_trial = False
        #: Listener to what the loop computes before the training is found.
        self._prelude: Prelude | None = None
        #: Optimizers of trainings that are over.
        self._past: list[weakref.ref[Any]] = []
        #: Layers that own nothing of what the optimizers that are not recorded hold.
        self._strangers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        #: Layers that are no copies of what optimizers hold.
        self._no_copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        super().__init__()

    @property
    def recorded(self) -> bool:
        """Whether a step of a loop was recorded, and the loop may go on."""
        return self._training is not None and self._steps > 0

    @guarded
    def end_script(self) -> None:
        """The script is over."""
        self.stop()

    @guarded
    def fail(self) -> None:
        """The script was left by an exception: what is recorded is not the whole of it."""
        self._failed = True
        self.stop()

    def pause(self) -> None:
        """A host trains: see nothing until it has ended. A loop before it was a training of its own."""
        self._finish()
        self._paused = True
        self._end_prelude()
        if self._records_itself in Recorder.leaving:
            Recorder.leaving.remove(self._records_itself)

    def resume(self) -> None:
        """The host has ended."""
        self._paused = False
        if not self.gone:
            Recorder.leaving.append(self._records_itself)
            self._watch_if_needed()

    def _records_itself(self) -> None:
        self.fail()
        self._recording.withdraw()

    # -- finding ---------------------------------------------------------------------------------------------

    def _add(self, optimizer: Any, framework: str) -> None:
        super()._add(optimizer, framework)
        self._leave_hand()
        self._strangers.clear()
        self._no_copies.clear()
        self._watch(True)
        self._begin_prelude(framework)

    def _others_alive(self) -> list[Any]:
        """Return the optimizers that are not recorded."""
        return [each for each in self._alive() if not any(each is one for one in self.optimizers)]

    def _fresh(self, framework: Framework) -> list[Any]:
        """Return the optimizers of a framework that are not recorded."""
        return [each for each in self._others_alive() if framework.optimizers.is_optimizer(each)]

    def _watch_if_needed(self) -> None:
        self._watch(bool(self._others_alive()) or not self.learned or self._by_hand is not None)

    def _around(self, frame: FrameType | None, optimizers: Sequence[Any]) -> list[Any]:
        """Return the optimizers of the loops around a frame: those that step there, and those that are cleared there
        and hold what no other one does. A wrapper around another optimizer is cleared, too, and does not step itself.
        """
        stepping = stepping_around(frame, optimizers)
        cleared = [each for each in clearing_around(frame, optimizers) if not any(each is one for one in stepping)]
        if not cleared:
            return stepping
        made = [
            (each, _framework(name).optimizers) for reference, name in self._made if (each := reference()) is not None
        ]
        held = [{id(tensor) for tensor in owner.optimized(each)} for each, owner in made]
        shared = {key for key, count in Counter(chain.from_iterable(held)).items() if count > 1}
        alone = [each for (each, _), tensors in zip(made, held) if not tensors & shared]
        return [*stepping, *(each for each in cleared if any(each is one for one in alone))]

    def _is_beside(self) -> bool:
        """Return True in another thread than the one that trains what is recorded and is still in its loop."""
        if self._training is None or threading.get_ident() == self._thread:
            return False
        return bool(self._around(sys._current_frames().get(self._thread), self.optimizers))

    def _call(self, layer: Any) -> None:
        if self._paused or id(layer) in self._strangers or self._is_beside():
            return
        framework = framework_of(layer)
        if not getattr(layer, "training", False) or not framework.hooks.learning():
            super()._call(layer)
            if self._training is None:
                self._begin_with_copy(layer, framework)
            if self._training is None and getattr(layer, "training", False):
                self._begin_without_gradients(layer, framework)
            if self._training is None and framework.hooks.learning():
                self._begin_with_frozen(layer, framework)
            return
        self.learned = True
        if not (self._made or self._by_hand_is_over) and self._watch_by_hand(layer, framework):
            return
        over = [reference() for reference in self._past] if self._training is not None else []
        fresh = [each for each in self._fresh(framework) if not any(each is one for one in over)]
        owned = _owned(layer)
        if not any(id(t) in owned for each in fresh for t in framework.optimizers.optimized(each)):
            self._strangers[id(layer)] = layer
            if not fresh:
                self._watch_if_needed()
            elif self._training is None:
                self._begin_with_frozen(layer, framework)
            return
        frame = sys._getframe(1)
        around = self._around(frame, [*fresh, *self.optimizers])
        chosen = [each for each in fresh if any(each is one for one in around)]
        if not chosen and self._training is not None and any(each is one for each in self.optimizers for one in around):
            return  # a teacher, say, which is called in the loop and not trained by it
        chosen = chosen or fresh
        if any(id(t) in owned for each in chosen for t in framework.optimizers.optimized(each)):
            self._train(chosen, around, layer)

    def _watch_by_hand(self, layer: Any, framework: Framework) -> bool:
        """Follow a loop without an optimizer; return True if it may train this layer.

        The loop trains a model if the model's values change between a backward and the next call. The first step is
        recorded on trial; a second call before a backward ends the trial, and the recording begins with the next step.
        """
        if self._by_hand is None:
            if self._training is None and any(True for _ in parameters_of(layer, framework)):
                try:
                    self._by_hand = _Updates(layer, framework)
                except Exception as error:  # parameters that a first call makes, say
                    reraise_from_signal_handler(error)
                    self._leave_hand()
                else:
                    self._on_trial = self._recording.may_try()
                    if self._on_trial:
                        self._start(layer, [])
            return self._by_hand is not None
        if layer is not self._by_hand.model():
            if (self._training is None or self._on_trial) and not self._by_hand.holds(layer):
                self._leave_hand()  # one of several models
            return False
        if self._by_hand.happened():
            if self._training is None:
                self._missed = 1
                self._start(layer, [])
            else:
                self._end_trial(trains=True)
                self._end_step()
        elif not self._by_hand.learned:
            self._end_trial(trains=False)
        return True

    def _end_trial(self, trains: bool) -> None:
        """End the trial of a first step, if there is one: the step stays, or nothing of it."""
        if not self._on_trial:
            return
        self._on_trial = False
        if trains:
            self._say_of(framework_of(self.model))
        else:
            self._close(finished=False)
            self._recording.undo()

    def _leave_hand(self) -> None:
        self._by_hand_is_over = True
        self._end_trial(trains=False)
        if self._by_hand is not None:
            self._by_hand.remove()
            self._by_hand = None

    def _begin_with_copy(self, layer: Any, framework: Framework) -> None:
        """Begin with the call of a copy of the model (a target network, a teacher), which needs no gradients."""
        if id(layer) in self._no_copies:
            return
        fresh = self._fresh(framework)
        if not any(is_copy(layer, framework.optimizers.optimized(each), framework) for each in fresh):
            self._no_copies[id(layer)] = layer
            return
        frame = sys._getframe(1)
        around = self._around(frame, fresh)
        # What trains has not been called: it has to be among the script's variables.
        if around and not self._select(around, frame)[1]:
            self._train(around, around)

    def _begin_without_gradients(self, layer: Any, framework: Framework) -> None:
        """Begin with a call of the model without gradients, inside of the loop that trains it: samples, a target."""
        if framework.hooks.learning():
            return
        around = self._around(sys._getframe(1), self._fresh(framework))
        owned = _owned(layer) if around else set()
        if any(id(t) in owned for each in around for t in framework.optimizers.optimized(each)):
            self._train(around, around, layer)

    def _begin_with_frozen(self, layer: Any, framework: Framework) -> None:
        """Begin with the call of a network that does not train, where the optimizers hold tensors of no layer."""
        fresh = self._fresh(framework)
        frame = sys._getframe(1)
        around = self._around(frame, fresh)
        if around and not self._select(around, frame)[0]:
            self._train(around, around, layer)

    def _before_step(self, optimizer: Any) -> None:
        """Begin at the first step, where no call was seen: of layers inside of a compiled function, say."""
        fresh = self._others_alive()
        if not self._paused and any(optimizer is each for each in fresh) and not self._is_beside():
            around = self._around(sys._getframe(1), [*fresh, *self.optimizers])
            others = [each for each in around if each is not optimizer and any(each is one for one in fresh)]
            self._train([optimizer, *others], around)

    def _step(self, optimizer: Any) -> None:
        if self._paused:
            return
        self.stepped = True
        if self._training is None:
            self._missed = 1  # this one is over
        elif not any(optimizer is each for each in self.optimizers):
            if self._is_beside():
                return
            around = self._around(sys._getframe(1), [*self._others_alive(), *self.optimizers])
            self._missed = 1
            self._train([optimizer], around)
            return
        super()._step(optimizer)

    def _train(self, optimizers: Sequence[Any], around: Sequence[Any], layer: Any = None) -> None:
        """Record what optimizers train: another training, or the same one with other optimizers."""
        frame = sys._getframe(1)
        if self._training is None or not self._steps:
            self._abandon()
            self._find(optimizers, frame, layer)
            return
        framework = framework_of(self.model)
        owned = _owned(self.model)
        if all(id(t) in owned for each in optimizers for t in framework.optimizers.optimized(each)):
            # The same model with another optimizer: the run goes on.
            go_on = [each for each in self.optimizers if any(each is one for one in around)]
            model, self._resumes = self.model, self._training.step
            self._close(finished=True)
            self._start(model, [*go_on, *(each for each in optimizers if not any(each is one for one in go_on))])
        elif any(each is one for each in self.optimizers for one in around):
            self._refuse(SEVERAL)
        elif any(each is reference() for each in optimizers for reference in self._past):
            self._refuse(AGAIN)
        else:
            self._finish()
            self._find(optimizers, frame, layer)

    # -- recording -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        dir_path, options = self._recording.target()
        goes_on = self._resumes is not None
        if goes_on:
            options["existing"] = "resume"
        training = TrainingRecorder(dir_path, **options)
        training.step = (training.step if self._resumes is None else self._resumes) + self._missed
        framework = framework_of(self.model)
        try:
            training.start(
                self.model, self.optimizers, resumed=options.get("existing") == "resume", prelude=self._prelude
            )
        except RunsDifferError:
            raise
        except PadiffError as error:
            self._on_trial = False
            self._refuse(str(error))
            return
        self._steps, self._resumes, self._missed = int(goes_on) + self._missed, None, 0
        self._training, self._thread = training, threading.get_ident()
        if self._on_trial:
            self._recording.try_out()
        elif not goes_on:
            self._say_of(framework)
        self._watch_if_needed()
        training.begin_batch()
        self._end_prelude()

    def _begin_prelude(self, framework: str) -> None:
        # Paddle makes an optimizer while it is imported: its functions are not all there yet.
        is_whole = not getattr(sys.modules[framework].__spec__, "_initializing", False)
        if is_whole and self._prelude is None and self._training is None and not self._paused:
            self._prelude = Prelude(_framework(framework), Guard())

    def _end_prelude(self) -> None:
        if self._prelude is not None:
            self._prelude.remove()
            self._prelude = None

    def _say_of(self, framework: Any) -> None:
        rules = [*dict.fromkeys(type(each).__name__ for each in self.optimizers)]
        models = type(self.model).__name__
        if models in ("ModuleDict", "LayerDict"):
            parts = [f"{name} ({_kind(each)})" for name, each in framework.layers.children(self.model)]
            if self.unowned:
                parts.append(f"{', '.join(self.unowned[:3])}{', ...' if len(self.unowned) > 3 else ''} (of no layer)")
            models = " and ".join(parts)
        else:
            models = _kind(self.model)
        trains = f", which {' and '.join(rules)} train{'s' if len(rules) == 1 else ''}" if rules else ""
        loop = "a plain loop" if rules else "a plain loop without an optimizer"
        self._recording.announce(f"{loop}: {models}{trains} ({framework.name})")

    def _end_step(self) -> None:
        if self._training is None:
            return
        if self._ends_training(self._training):
            self._failed = not self._training.is_complete
            raise Stopped(int(self._failed))
        self._training.begin_batch()

    def _ends_training(self, training: TrainingRecorder) -> bool:
        """End a recorded step; return True if the training is to stop."""
        self._steps += 1
        training.end_batch()
        return training.end_step()

    def _finish(self) -> None:
        """The training is over, and another one may begin."""
        if self.recorded:
            self._past += [weakref.ref(each) for each in self.optimizers]
            self._close(finished=True)
            self._recording.advance()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Nothing was trained of what was found: the folder is free for what is."""
        if self._training is not None:
            self._close(finished=False)
            self._recording.overwrite()

    def _close(self, finished: bool) -> None:
        training, self._training = self._training, None
        self.model, self.optimizers, self._steps = None, [], 0
        if training is not None:
            if finished:
                training.finish()
            else:
                training.abort()

    def _end(self) -> None:
        self._end_prelude()
        if self._by_hand is not None:
            if self._training is not None and not self._failed and self._by_hand.happened():
                self._end_trial(trains=True)
                self._ends_training(self._training)
            self._leave_hand()
        if self._training is not None and not (self._steps or self._failed or self._on_trial) and self.learned:
            self._ends_training(self._training)  # its optimizer never steps
        if not self.recorded:
            self._recording.overwrite()
        self._close(finished=not self._failed)

    def _refuse(self, why: str) -> None:
        self.fail()
        self._recording.refuse(_WHY.get(why, why))


class _Updates:
    """Watch of a model's parameters, for values that change after a backward.

    Args:
        model: the model; it has parameters.
    """

    def __init__(self, model: Any, framework: Framework) -> None:
        self.model = weakref.ref(model)
        self._owned = _owned(model)
        self._tensors = framework.tensors
        parameters = [tensor for _, tensor in parameters_of(model, framework) if self._tensors.trainable(tensor)]
        self._parameters = [weakref.ref(tensor) for tensor in parameters]
        #: Whether a backward came since the values changed.
        self.learned = False
        few = parameters[:: max(1, len(parameters) // _HOOKED)]
        self._handles = [tensor.register_hook(self._learn) for tensor in few]
        self._before = self._values()

    def holds(self, layer: Any) -> bool:
        """Return True if a layer has no parameters but those of the model."""
        return _owned(layer) <= self._owned

    def happened(self) -> bool:
        """Return True if a backward and a change of values came since the last time that both did."""
        if not self.learned:
            return False
        values = self._values()
        changed = any(not np.array_equal(now, before) for now, before in zip(values, self._before))
        if changed:
            self.learned, self._before = False, values
        return changed

    def remove(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def _learn(self, gradient: Any) -> None:
        self.learned = True

    def _values(self) -> list[np.ndarray]:
        alive = [tensor for tensor in (reference() for reference in self._parameters) if tensor is not None]
        samples = [self._tensors.sample(tensor) for tensor in alive]
        fetched = iter(self._tensors.fetch([each for each in samples if not isinstance(each, np.ndarray)])())
        return [each if isinstance(each, np.ndarray) else next(fetched) for each in samples]


def _kind(layer: Any) -> str:
    """Return the name of a model's class, inside of the wrappers that call it."""
    while True:
        layer = getattr(layer, "_orig_mod", layer)
        children = list(framework_of(layer).layers.children(layer))
        if len(children) != 1 or children[0][0] not in ("module", "_forward_module", "_layers"):
            return str(getattr(layer, "original_name", type(layer).__name__))
        layer = children[0][1]

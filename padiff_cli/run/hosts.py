"""Adds padiff's callback to a trainer of a host that the script uses, when its training begins."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from padiff_cli.after_import import AfterImport
from padiff_cli.guard import guarded
from padiff_cli.run.loop import LoopFinder
from padiff_cli.run.recording import Recording


@dataclass(frozen=True)
class Host:
    """Where a host trains.

    Attributes:
        name: what messages call it.
        module: where its class is that trains.
        integration: the package that has its `PaDiffCallback`.
        kind, method: that class, and the call that trains.
        callbacks: the callbacks that a call has: of the trainer and of its arguments.
        add: adds a callback to either.
        remove: takes it off the trainer.
    """

    name: str
    module: str
    integration: str
    kind: str
    method: str
    callbacks: Callable[[Any, inspect.BoundArguments], list[Any]]
    add: Callable[[Any, inspect.BoundArguments, Any], None]
    remove: Callable[[Any, Any], None]


def _events(trainer: Any, _: inspect.BoundArguments) -> list[Any]:
    return list(trainer.callback_handler.callbacks)


def _add_event(trainer: Any, _: inspect.BoundArguments, callback: Any) -> None:
    trainer.add_callback(callback)


def _remove_event(trainer: Any, callback: Any) -> None:
    trainer.remove_callback(callback)


def _lightning(trainer: Any, _: inspect.BoundArguments) -> list[Any]:
    return list(trainer.callbacks)


def _add_lightning(trainer: Any, _: inspect.BoundArguments, callback: Any) -> None:
    callback.state_dict = dict  # the user's checkpoints hold nothing of padiff's
    trainer.callbacks.insert(0, callback)  # those that write checkpoints have to stay last


def _remove_lightning(trainer: Any, callback: Any) -> None:
    trainer.callbacks.remove(callback)


def _hapi(_: Any, given: inspect.BoundArguments) -> list[Any]:
    callbacks = given.arguments.get("callbacks") or []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _add_hapi(model: Any, given: inspect.BoundArguments, callback: Any) -> None:
    given.arguments["callbacks"] = [*_hapi(model, given), callback]


def _remove_hapi(model: Any, callback: Any) -> None:
    """Nothing: the callback was given for one call."""


_EVENTS = ("Trainer", "train", _events, _add_event, _remove_event)
_LIGHTNING = ("Trainer", "fit", _lightning, _add_lightning, _remove_lightning)

HOSTS = (
    Host("transformers' Trainer", "transformers.trainer", "padiff_transformers", *_EVENTS),
    Host("PaddleFormers' Trainer", "paddleformers.trainer.trainer", "padiff_paddleformers", *_EVENTS),
    Host("PaddleNLP's Trainer", "paddlenlp.trainer.trainer", "padiff_paddleformers", *_EVENTS),
    Host("Lightning's Trainer", "pytorch_lightning.trainer.trainer", "padiff_lightning", *_LIGHTNING),
    Host("Lightning's Trainer", "lightning.pytorch.trainer.trainer", "padiff_lightning", *_LIGHTNING),
    Host("paddle.Model", "paddle.hapi.model", "padiff_hapi", "Model", "fit", _hapi, _add_hapi, _remove_hapi),
)


class HostWatch:
    """Waits for the hosts that the script imports, and records each of their trainings."""

    def __init__(self, recording: Recording, loop: LoopFinder) -> None:
        self._recording, self._loop = recording, loop
        self._training = False
        self._off: list[Callable[[], None]] = []
        self._imports = AfterImport({host.module: functools.partial(self._on_import, host) for host in HOSTS})

    @property
    def is_attached(self) -> bool:
        """True while a trainer trains with padiff's callback."""
        return self._training

    @guarded
    def remove(self) -> None:
        """Put the hosts' classes back."""
        self._imports.remove()
        while self._off:
            self._off.pop()()

    def give_up(self, error: Exception) -> None:
        """Record nothing (more), because of an error of padiff's own."""
        self._recording.refuse(f"padiff failed: {type(error).__name__}: {error}")

    @guarded
    def _on_import(self, host: Host, module: ModuleType) -> None:
        kind = getattr(module, host.kind, None)
        train = getattr(kind, host.method, None)
        if train is None:  # of a version that has it elsewhere
            return

        @functools.wraps(train)
        def recorded(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._training:  # a training calls itself
                return train(trainer, *args, **kwargs)
            given = inspect.signature(train).bind(trainer, *args, **kwargs)
            callback = self._attach(host, trainer, given)
            self._training = True
            try:
                return train(*given.args, **given.kwargs)
            except BaseException:
                if callback is not None:
                    # Not every host tells its callbacks of an exception.
                    callback._training.abort()
                raise
            finally:
                self._training = False
                self._detach(host, trainer, callback)

        setattr(kind, host.method, recorded)
        self._off.append(lambda: setattr(kind, host.method, train))

    @guarded
    def _attach(self, host: Host, trainer: Any, given: inspect.BoundArguments) -> Any:
        """Return the callback that records this call of a trainer; `None` where it is not to be recorded."""
        integration = importlib.import_module(host.integration)
        if any(isinstance(each, integration.PaDiffCallback) for each in host.callbacks(trainer, given)):
            self._loop.fail()
            self._recording.withdraw()
        self._loop.pause()
        if self._recording.alone:
            return None
        dir_path, options = self._recording.target()
        callback = integration.PaDiffCallback(dir_path, **options)
        self._recording.announce(f"{host.name}: {type(_model(trainer, given)).__name__}")
        host.add(trainer, given, callback)  # last: after an error the trainer has no callback
        return callback

    @guarded
    def _detach(self, host: Host, trainer: Any, callback: Any) -> None:
        """Take the callback off again, and see loops again: each training has a run of its own."""
        if callback is not None:
            host.remove(trainer, callback)
            if callback._training.step > self._recording.options.get("start_step", 0):
                self._recording.advance()
            else:
                self._recording.overwrite()
        self._loop.resume()


def _model(trainer: Any, given: inspect.BoundArguments) -> Any:
    """The model, as messages name it."""
    found = (given.arguments.get("model"), getattr(trainer, "model", None), getattr(trainer, "network", None))
    return next((model for model in found if model is not None), None)

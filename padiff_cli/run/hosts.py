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
    """

    name: str
    module: str
    integration: str
    kind: str
    method: str
    callbacks: Callable[[Any, inspect.BoundArguments], list[Any]]
    add: Callable[[Any, inspect.BoundArguments, Any], None]


def _events(trainer: Any, _: inspect.BoundArguments) -> list[Any]:
    return list(trainer.callback_handler.callbacks)


def _add_event(trainer: Any, _: inspect.BoundArguments, callback: Any) -> None:
    trainer.add_callback(callback)


def _lightning(trainer: Any, _: inspect.BoundArguments) -> list[Any]:
    return list(trainer.callbacks)


def _add_lightning(trainer: Any, _: inspect.BoundArguments, callback: Any) -> None:
    trainer.callbacks.insert(0, callback)  # those that write checkpoints have to stay last


def _hapi(_: Any, given: inspect.BoundArguments) -> list[Any]:
    callbacks = given.arguments.get("callbacks") or []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _add_hapi(model: Any, given: inspect.BoundArguments, callback: Any) -> None:
    given.arguments["callbacks"] = [*_hapi(model, given), callback]


_EVENTS = ("Trainer", "train", _events, _add_event)
_LIGHTNING = ("Trainer", "fit", _lightning, _add_lightning)

HOSTS = (
    Host("transformers' Trainer", "transformers.trainer", "padiff_transformers", *_EVENTS),
    Host("PaddleFormers' Trainer", "paddleformers.trainer.trainer", "padiff_paddleformers", *_EVENTS),
    Host("PaddleNLP's Trainer", "paddlenlp.trainer.trainer", "padiff_paddleformers", *_EVENTS),
    Host("Lightning's Trainer", "pytorch_lightning.trainer.trainer", "padiff_lightning", *_LIGHTNING),
    Host("Lightning's Trainer", "lightning.pytorch.trainer.trainer", "padiff_lightning", *_LIGHTNING),
    Host("paddle.Model", "paddle.hapi.model", "padiff_hapi", "Model", "fit", _hapi, _add_hapi),
)


class HostWatch:
    """Waits for the hosts that the script imports."""

    def __init__(self, recording: Recording, loop: LoopFinder) -> None:
        self._recording, self._loop = recording, loop
        self._callback: Any = None
        self._off: list[Callable[[], None]] = []
        self._imports = AfterImport({host.module: functools.partial(self._imported, host) for host in HOSTS})

    @property
    def is_attached(self) -> bool:
        """True once padiff has added its callback to a trainer."""
        return self._callback is not None

    def remove(self) -> None:
        """Put the hosts' classes back."""
        self._imports.remove()
        while self._off:
            self._off.pop()()

    def _imported(self, host: Host, module: ModuleType) -> None:
        kind = getattr(module, host.kind, None)
        train = getattr(kind, host.method, None)
        if train is None:  # of a version that has it elsewhere
            return

        @functools.wraps(train)
        def recorded(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(train).bind(trainer, *args, **kwargs)
            callback = self._attached(host, trainer, given)
            try:
                return train(*given.args, **given.kwargs)
            except BaseException:
                if callback is not None:
                    # Not every host tells its callbacks of an exception.
                    callback._training.abort()
                raise

        setattr(kind, host.method, recorded)
        self._off.append(lambda: setattr(kind, host.method, train))

    def _attached(self, host: Host, trainer: Any, given: inspect.BoundArguments) -> Any:
        """The callback that records this call of a trainer; `None` where it is not to be recorded."""
        callbacks = host.callbacks(trainer, given)
        integration = importlib.import_module(host.integration)
        if any(one is self._callback for one in callbacks if one is not None):
            return self._callback  # it trains once more
        if any(isinstance(one, integration.PaDiffCallback) for one in callbacks):
            self._loop.fail()
            self._recording.leave()
            return None
        if self._callback is not None or self._loop.recorded:
            self._recording.refuse(f"another training begins, of {host.name}, and a run folder holds one")
            return None
        options = dict(self._recording.options)
        if self._loop.model is not None:
            options["existing"] = "overwrite"  # it was called before its trainer trained it: nothing is recorded yet
        self._loop.fail()
        callback = integration.PaDiffCallback(self._recording.dir_path, **options)
        host.add(trainer, given, callback)
        self._callback = callback
        self._recording.take(f"{host.name}: {type(_model(trainer, given)).__name__}")
        return callback


def _model(trainer: Any, given: inspect.BoundArguments) -> Any:
    """The model, as messages name it."""
    found = (given.arguments.get("model"), getattr(trainer, "model", None), getattr(trainer, "network", None))
    return next((model for model in found if model is not None), None)

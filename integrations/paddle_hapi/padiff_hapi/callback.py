"""hapi callback that passes the events of ``paddle.Model.fit`` to a `TrainingRecorder`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padiff.errors import PadiffError, UsageError
from padiff.frameworks import framework_of
from padiff.replaying import ReplayBatch
from padiff.system.guard import guarded
from padiff_hooks.options import TrainingOptions
from padiff_hooks.replaying import exchanged_lists
from padiff_hooks.results import TrainingResults
from padiff_hooks.training import TrainingRecorder

try:
    from paddle.callbacks import Callback
except ImportError as error:
    raise ImportError("padiff_hapi needs PaddlePaddle: pip install 'paddlepaddle>=3.0'") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PaDiffCallback(TrainingResults, Callback):
    """Callback that records a ``paddle.Model.fit``, and compares it live with a reference run if the option is set.

    Steps are optimizer steps, not batches; evaluation is not recorded. Gradients are recorded after `grad_clip`, and
    unscaled under AMP. The options are those of `padiff_hooks.options.TrainingOptions`.

    hapi runs forward, backward, optimizer step and clearing of gradients in one ``train_batch`` call, and does not
    report exceptions to callbacks. So the callback wraps ``train_batch`` on the model object for each single call: the
    wrapper adds the hooks, calls the original method, and removes the hooks, also after an exception.

    Example:
        ``model.fit(data, callbacks=[PaDiffCallback("runs/paddle", every_n_steps=10)])``
    """

    def __init__(self, dir_path: str | Path, **options: Unpack[TrainingOptions]) -> None:
        super().__init__()
        self._training = TrainingRecorder(dir_path, **options)
        self._trained = False
        self._updated = False
        self._loss_scale = 1.0

    @guarded(passing=(PadiffError,))
    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model._optimizer
        if optimizer is None:
            raise UsageError("the paddle.Model has no optimizer: call model.prepare(optimizer, loss) before fit()")
        self._training.start(
            self.model.network,
            [optimizer],
            resumed=self._trained,
            settings=_settings(self.model),
            end=_end(self._training.step, self.model, self.params),
        )
        self._trained = True

    @guarded(passing=(PadiffError,))
    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        # The wrapper is set on the object, not the class, and removes itself before it calls the original method.
        self.model.train_batch = self._recorded(self.model, self.model.train_batch)

    def _recorded(self, model: Any, train_batch: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(inputs: Any, labels: Any = None, update: bool = True) -> Any:
            del model.train_batch
            self._updated = update
            scale = self.guard.attempt(_scale, model)
            try:
                batch = self._training.begin_batch(inputs=inputs, labels=labels)
                if batch is not None:
                    inputs, labels = _exchanged(batch, inputs, labels, model.network)
            except BaseException:
                self._training.abort()
                raise
            try:
                result = train_batch(inputs, labels, update)
            except BaseException:
                self._training.abort()
                raise
            # Done here and not in on_train_batch_end, as another callback may raise before.
            self._training.remove_hooks()
            # hapi makes the scaler in the first batch; a scaler may change its scale at the end of each batch.
            self._loss_scale = scale if scale is not None else self.guard.attempt(_first_scale, model) or 1.0
            return result

        return recorded

    @guarded(passing=(PadiffError,))
    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        if isinstance(loss, (list, tuple)):
            loss = sum(loss)
        self._training.end_batch(loss if self._training.due else None, self._loss_scale)
        if self._updated and self._training.end_step():
            self.model.stop_training = True
            # fit() checks stop_training only after an epoch, and num_iters after each batch.
            self.model.num_iters = 1

    @guarded(passing=(PadiffError,))
    def on_train_end(self, logs: Any = None) -> None:
        self._training.finish()


def _exchanged(batch: ReplayBatch, inputs: Any, labels: Any, network: Any) -> tuple[list[Any], list[Any]]:
    """Return the inputs and labels of a recorded batch as lists, in the order of hapi's inputs and labels."""
    input_list, label_list = (list(each) if isinstance(each, (list, tuple)) else [each] for each in (inputs, labels))
    return exchanged_lists(batch, input_list, label_list, framework_of(network))


def _settings(model: Any) -> dict[str, Any]:
    """Return the settings of ``prepare`` and ``fit`` that the model holds."""
    settings = {"accumulation": getattr(model, "_accumulate", None), "precision": getattr(model, "_amp_level", None)}
    return {name: value for name, value in settings.items() if value is not None}


def _end(begin: int, model: Any, params: Any) -> int | None:
    """Return the step that ``fit`` ends before; `None` where the length of its data is not known."""
    epochs, batches, most = params.get("epochs"), params.get("steps"), getattr(model, "num_iters", None)
    accumulated = getattr(model, "_accumulate", None) or 1
    if not isinstance(epochs, int) or not isinstance(batches, int):
        return None
    steps = epochs * -(-batches // accumulated)
    return begin + (steps if most is None else min(steps, -(-most // accumulated)))


def _scale(model: Any) -> float | None:
    """Return the current loss scale, or `None` if there is no scaler (yet)."""
    scaler = getattr(model, "_scaler", None)
    if scaler is None:
        return None
    state = scaler.state_dict()  # empty when the scaler is switched off
    scale = state.get("scale")
    return float(np.asarray(scale).reshape(-1)[0]) if scale is not None else 1.0  # an array of one element


def _first_scale(model: Any) -> float:
    """Return the initial scale of a scaler that was made in the last batch; 1 without a scaler."""
    scaler = getattr(model, "_scaler", None)
    return float(scaler.get_init_loss_scaling()) if scaler is not None else 1.0

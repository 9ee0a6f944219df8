"""PaddleFormers callback that passes the Trainer's events to a `TrainingRecorder`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from padiff_hooks.trainers import TrainerEvents, plain


def _base() -> Any:
    """Return the base class of callbacks from PaddleFormers, or else from PaddleNLP, which has the same events."""
    for package in ("paddleformers", "paddlenlp"):
        try:
            return importlib.import_module(f"{package}.trainer").TrainerCallback
        except ImportError as error:
            missing = error
    raise ImportError("padiff_paddleformers needs PaddleFormers: pip install 'paddleformers>=1.2'") from missing


class PaDiffCallback(TrainerEvents, _base()):  # type: ignore[misc]
    """Callback that records a training of PaddleFormers' ``Trainer``, and can compare it live with a reference run.

    See `padiff_hooks.trainers.TrainerEvents`. PaddleNLP's ``Trainer`` has the same events, and accepts this callback if
    PaddleFormers is not installed.

    Example:
        ``Trainer(model, args=args, train_dataset=data, callbacks=[PaDiffCallback("runs/paddle", every_n_steps=10)])``
    """

    def settings_of(self, trainer: Any, args: Any, model: Any, state: Any) -> dict[str, Any]:
        of_steps = args.gradient_accumulation_steps
        schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        # Computed like the Trainer's scheduler does; `args.get_warmup_steps` rounds the other way.
        warmup = args.warmup_steps if args.warmup_steps > 0 else int(args.warmup_ratio * state.max_steps)
        return plain(
            {
                "accumulation": of_steps,
                "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "no",
                "trainer.loss_mean": None if of_steps == 1 else "over each micro-batch, then over these",
                "trainer.loss_divided_by": of_steps,
                "trainer.label_shift": _shift(model),
                "trainer.label_smoothing": float(getattr(args, "label_smoothing_factor", 0.0)),
                "trainer.schedule": str(schedule),
                "trainer.warmup_steps": int(warmup),
                "trainer.steps": state.max_steps,
                "trainer.micro_batch_size": args.per_device_train_batch_size,
            }
        )

    def loss_scale_of(self, trainer: Any, args: Any) -> float:
        # The Trainer divides the gradients of parameters by the number of micro-batches after the last one. Gradients
        # of activations are not divided.
        scaler = getattr(trainer, "scaler", None) if getattr(trainer, "do_grad_scaling", False) else None
        scale = scaler.state_dict().get("scale") if scaler is not None else None
        return args.gradient_accumulation_steps * (1.0 if scale is None else float(np.asarray(scale).reshape(-1)[0]))

    def parts_of(self, trainer: Any, args: Any) -> int:
        return int(args.gradient_accumulation_steps)


def _shift(model: Any) -> str | None:
    """Return ``in the data`` for a language model, as PaddleFormers' models never shift labels; `None` for others."""
    return "in the data" if hasattr(model, "criterion") and hasattr(model, "lm_head") else None

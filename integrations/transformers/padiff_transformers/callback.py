"""transformers callback that passes the Trainer's events to a `TrainingRecorder`."""

from __future__ import annotations

from typing import Any

from padiff_hooks.trainers import TrainerEvents, plain

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("padiff_transformers needs transformers: pip install 'transformers>=4.46'") from error


class PaDiffCallback(TrainerEvents, TrainerCallback):
    """Callback that records a training of transformers' ``Trainer``, and can compare it live with a reference run.

    See `padiff_hooks.trainers.TrainerEvents`. Trainers derived from this one (TRL's, ms-swift's, LLaMA-Factory's) also
    accept the callback.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[PaDiffCallback("runs/torch", every_n_steps=10)])``
    """

    # The divisor is measured, because accelerate divides once more in some versions.
    DIVIDES_BEFORE = True

    def settings_of(self, trainer: Any, args: Any, model: Any, state: Any) -> dict[str, Any]:
        by_tokens = _by_tokens(trainer)
        of_steps = args.gradient_accumulation_steps
        schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        warmup = args.get_warmup_steps(state.max_steps)
        return plain(
            {
                "accumulation": of_steps,
                "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "no",
                "trainer.loss_mean": None
                if by_tokens is None or of_steps == 1
                else "over the tokens of a step"
                if by_tokens
                else "over each micro-batch, then over these",
                "trainer.label_shift": _shift(model),
                "trainer.label_smoothing": float(args.label_smoothing_factor),
                "trainer.schedule": str(schedule),
                "trainer.warmup_steps": warmup,
                "trainer.steps": state.max_steps,
                "trainer.micro_batch_size": args.per_device_train_batch_size,
            }
        )

    def loss_scale_of(self, trainer: Any, args: Any) -> float:
        # Losses are divided before backward, so gradients of activations need no further division.
        scaler = getattr(trainer.accelerator, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def parts_of(self, trainer: Any, args: Any) -> int:
        return int(getattr(trainer, "current_gradient_accumulation_steps", None) or args.gradient_accumulation_steps)

    def exchange(self, trainer: Any, arguments: dict[str, Any], batches: list[Any]) -> None:
        count = getattr(trainer, "_get_num_items_in_batch", None)
        if arguments.get("num_items_in_batch") is not None and count is not None:
            arguments["num_items_in_batch"] = count(batches, trainer.args.device)


def _by_tokens(trainer: Any) -> bool | None:
    """Return True if a micro-batch's loss is the sum over its tokens divided by the number of tokens of the step.

    Returns `None` if the trainer is not known.
    """
    if trainer is None:
        return None
    has_loss_function = getattr(trainer, "compute_loss_func", None) is not None
    return has_loss_function or bool(getattr(trainer, "model_accepts_loss_kwargs", False))


def _shift(model: Any) -> str | None:
    """Return ``in the model`` for a language model that shifts its labels itself; `None` for others."""
    kind = getattr(model, "loss_type", None)
    return "in the model" if isinstance(kind, str) and kind.startswith("ForCausalLM") else None

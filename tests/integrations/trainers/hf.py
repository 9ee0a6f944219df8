"""The tiny LLaMA under transformers' Trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from .table import ARGUMENTS, MODEL, samples


class Samples(torch.utils.data.Dataset):
    def __init__(self, **data: Any) -> None:
        self.ids, self.labels = samples(**data)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor(self.ids[index]), "labels": torch.tensor(self.labels[index])}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(folder: Any, callbacks: Any = (), *, how: str = "means", model: Any = None, **options: Any) -> Trainer:
    """A Trainer, as PaddleFormers' is: the loss is the mean of each micro-batch, divided once.

    Args:
        how: ``"means"``; ``"tokens"``: its own mean over the tokens of a step; ``"as it is"``: that, and divided by
            accelerate once more.
        options: of `MODEL` in ``config``, of `samples` in ``data``, the rest of `ARGUMENTS`.
    """
    torch.manual_seed(0)
    network = model if model is not None else LlamaForCausalLM(LlamaConfig(**{**MODEL, **options.pop("config", {})}))
    data = Samples(**options.pop("data", {}))
    evaluated = Samples(count=4) if "eval_strategy" in options else None
    arguments = TrainingArguments(str(folder), use_cpu=True, **{**ARGUMENTS, **options})
    made = InOrder(model=network, args=arguments, train_dataset=data, eval_dataset=evaluated, callbacks=list(callbacks))
    if how != "as it is":
        made.accelerator.gradient_accumulation_steps = 1
    if how == "means":
        made.model_accepts_loss_kwargs = False
    return made


def losses(made: Trainer) -> list[float]:
    return [line["loss"] for line in made.state.log_history if "loss" in line]


def hooks(made: Trainer) -> int:
    """Hooks that are left, and attributes that were set."""
    found = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in made.model.modules())
    inner = getattr(made.optimizer, "optimizer", made.optimizer)
    found += len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks) if inner is not None else 0
    return found + ("training_step" in vars(made))


def weights(made: Trainer) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in made.model.parameters()]

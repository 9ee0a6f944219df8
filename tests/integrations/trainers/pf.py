"""The tiny LLaMA under PaddleFormers' Trainer. Importing it changes paddle for the whole process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

paddle.set_device("cpu")

from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from paddleformers.utils.log import logger  # noqa: E402

from .table import ARGUMENTS, MODEL, samples  # noqa: E402

logger.set_level("ERROR")
# It waits for a device after each accumulated step, and a CPU is none for paddle.
paddle.device.synchronize = lambda *args, **kwargs: None


class Samples(paddle.io.Dataset):
    def __init__(self, **data: Any) -> None:
        self.ids, self.labels = samples(**{"shifted": True, **data})

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return paddle.io.BatchSampler(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


class Doubled(InOrder):
    """Gradients twice as large, behind backward, and before they are clipped."""

    def optimizer_step(self, args: Any, model: Any, parameters_list: Any = None) -> Any:
        with paddle.no_grad():
            for parameter in model.parameters():
                parameter.grad.scale_(2.0)
        return super().optimizer_step(args, model=model, parameters_list=parameters_list)


class Log(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def trainer(folder: Any, callbacks: Any = (), *, how: str = "", model: Any = None, **options: Any) -> Trainer:
    paddle.seed(0)
    settings = {**MODEL, "fuse_rms_norm": False, **options.pop("config", {})}
    network = model if model is not None else LlamaForCausalLM(LlamaConfig(**settings))
    data = Samples(**options.pop("data", {}))
    kind = options.pop("kind", Doubled if how == "doubled" else InOrder)
    arguments = TrainingArguments(str(folder), amp_master_grad=False, device="cpu", **{**ARGUMENTS, **options})
    return kind(model=network, args=arguments, train_dataset=data, callbacks=list(callbacks))


def hooks(made: Trainer) -> int:
    layers = made.model.sublayers(include_self=True)
    found = sum(len(layer._forward_post_hooks) + len(layer._forward_pre_hooks) for layer in layers)
    named = [name for name in ("step", "minimize", "append_regularization_ops") if name in vars(made.optimizer)]
    clip = made.optimizer._grad_clip
    return found + len(named) + ("training_step" in vars(made)) + (clip is not None and "_dygraph_clip" in vars(clip))


def weights(made: Trainer) -> list[np.ndarray]:
    return [p.numpy().copy() for p in made.model.parameters()]

"""A tiny LLaMA under transformers' Trainer: ``python train_hf.py FOLDER``."""

from __future__ import annotations

import sys

import torch
from data import ARGUMENTS, MODEL, samples
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from padiff_transformers import PaDiffCallback


class Samples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids, self.labels = samples()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(self.ids[index]), "labels": torch.tensor(self.labels[index])}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: object, **kwargs: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


folder = sys.argv[1]
torch.manual_seed(0)
trainer = InOrder(
    model=LlamaForCausalLM(LlamaConfig(**MODEL)),
    args=TrainingArguments(f"{folder}/out", use_cpu=True, **ARGUMENTS),
    train_dataset=Samples(),
    callbacks=[PaDiffCallback(f"{folder}/hf", existing="overwrite")],
)
# As PaddleFormers: the loss is the mean of each micro-batch, and divided once.
trainer.accelerator.gradient_accumulation_steps = 1
trainer.model_accepts_loss_kwargs = False
trainer.train()

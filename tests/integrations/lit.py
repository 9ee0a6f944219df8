"""A small LightningModule and a quiet Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

import padiff
from padiff_lightning import PaDiffCallback


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Lit(pl.LightningModule):
    """Automatic optimization; `fail_at` raises in the training step of that batch."""

    def __init__(self, network=None, rate=0.1, fail_at=None):
        super().__init__()
        self.net = network if network is not None else net()
        self.rate, self.fail_at = rate, fail_at
        self.losses = []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            self.net(batch[0])
            raise ZeroDivisionError("in training_step")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Validated(Lit):
    """The same with a validation."""

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


def loader(batches=6, size=8, seed=0):
    data = np.random.default_rng(seed)
    x = torch.from_numpy(data.normal(size=(batches * size, 4)).astype(np.float32))
    y = torch.from_numpy(data.integers(0, 3, batches * size))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=size)


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(folder, module=None, data=None, options=None, host=pl, ckpt_path=None, **trainer_options):
    """Fit one epoch with a callback; returns the callback, the Trainer and the module."""
    module = module if module is not None else Lit()
    callback = PaDiffCallback(folder, **(options or {}))
    trainer = host.Trainer(**{"max_epochs": 1, **QUIET, **trainer_options, "callbacks": [callback]})
    trainer.fit(module, data if data is not None else loader(), ckpt_path=ckpt_path)
    return callback, trainer, module


def values(folder, number=0):
    (step,) = padiff.open_run(folder).steps(number)
    return {record.site: record.value for record in step.records}


def hooks(module, *optimizers):
    found = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    return found + sum(len(o._optimizer_step_pre_hooks) + len(o._optimizer_step_post_hooks) for o in optimizers)

"""The same under PaddleFormers' Trainer, from the recorded weights: ``python train_pf.py FOLDER``.

The fault: its RMSNorm has an epsilon of 1e-5 where the other one has 1e-3.
"""

from __future__ import annotations

import sys
from typing import Any

import paddle

paddle.set_device("cpu")

from data import ARGUMENTS, MODEL, samples  # noqa: E402
from paddleformers.trainer import Trainer, TrainingArguments  # noqa: E402
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from paddleformers.utils.log import logger  # noqa: E402

from padiff_paddleformers import PaDiffCallback  # noqa: E402

logger.set_level("ERROR")
# It waits for a device after each accumulated step, and a CPU is none for paddle.
paddle.device.synchronize = lambda *args, **kwargs: None


class Samples(paddle.io.Dataset):
    def __init__(self) -> None:
        self.ids, self.labels = samples(shifted=True)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return paddle.io.BatchSampler(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


folder = sys.argv[1]
config = LlamaConfig(**{**MODEL, "rms_norm_eps": 1e-5}, fuse_rms_norm=False)
InOrder(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(f"{folder}/out", amp_master_grad=False, device="cpu", **ARGUMENTS),
    train_dataset=Samples(),
    callbacks=[PaDiffCallback(f"{folder}/pf", start_from=f"{folder}/hf", existing="overwrite")],
).train()

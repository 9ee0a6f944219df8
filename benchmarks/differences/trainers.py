"""What the Trainers of transformers and PaddleFormers do otherwise. Each trains a LLaMA of two layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from entry import Difference, Words, verdict

import padiff

ROOT = Path(__file__).resolve().parents[2]
#: Seconds, for importing the libraries and six steps.
LIMIT = 280


def _trained(folder: Path, name: str, *sides: str) -> str:
    # The two Trainers can't share a process: PaddleFormers switches torch off for transformers.
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks"), *filter(None, sys.path)])
    for side in sides:
        code = "import runpy; runpy.run_module('integrations.trainers.child', run_name='__main__')"
        if side == "hf":
            code = f"from library_zoo import shim; shim.torchvision_of_another_build(); {code}"
        command = [sys.executable, "-W", "ignore", "-c", code, side, str(folder), name]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=LIMIT
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
    return verdict(padiff.compare_runs(folder / f"hf_{name}", folder / f"pf_{name}"))


def divided_twice(folder: Path) -> str:
    """transformers with accelerate set to divide by 1, against transformers as it is."""
    return _trained(folder, "divided_twice", "hf")


def left_over(folder: Path) -> str:
    """Two epochs of five batches, two batches a step."""
    return _trained(folder, "left_over", "hf", "pf")


FOUND = [
    Difference(
        "divided_twice",
        ("torch", "transformers", "accelerate"),
        divided_twice,
        "is divided by 2 against 4",
        Words(
            "transformers 5.2 to 5.5: the loss is divided twice by the accumulation steps",
            "With `gradient_accumulation_steps=2` the Trainer divides the loss by the tokens of the whole step. Then "
            "accelerate divides it by 2 once more. Clipping hides it: gradients that are clipped to norm 1 come out the "
            "same. The reference is the same Trainer, with `trainer.accelerator.gradient_accumulation_steps = 1`.",
            "`trainer.accelerator.gradient_accumulation_steps = 1` before `trainer.train()`.",
        ),
        Words(
            "transformers 5.2 到 5.5：损失被梯度累积步数除了两次",
            "设 `gradient_accumulation_steps=2`。Trainer 先用整个 step 的 token 数去除损失，accelerate 又除以 2。"
            "梯度裁剪会掩盖这个问题：裁剪到范数 1 之后，梯度看起来相同。这里的 reference 是同一个 Trainer，"
            "只是设置了 `trainer.accelerator.gradient_accumulation_steps = 1`。",
            "在 `trainer.train()` 之前设置 `trainer.accelerator.gradient_accumulation_steps = 1`。",
        ),
    ),
    Difference(
        "left_over",
        ("torch", "transformers", "paddlepaddle", "paddleformers"),
        left_over,
        "are left over",
        Words(
            "PaddleFormers 1.2: gradients are carried over the end of an epoch",
            "An epoch has 5 batches, and a step takes 2 of them. transformers makes a step of the fifth batch alone. "
            "PaddleFormers makes no step of it, keeps its gradients, and adds them to the first step of the next epoch. "
            "This happens wherever the number of batches is no multiple of the accumulation steps.",
            "Take a number of batches that is a multiple of the accumulation steps, or drop the last ones.",
        ),
        Words(
            "PaddleFormers 1.2：梯度被带到下一个 epoch",
            "一个 epoch 有 5 个 batch，每个 step 用 2 个。transformers 用第 5 个 batch 单独完成一个 step。"
            "PaddleFormers 不做这个 step，而是保留它的梯度，加到下一个 epoch 的第一个 step 上。"
            "只要 batch 数不是累积步数的整数倍，就会这样。",
            "让 batch 数是累积步数的整数倍，或者丢弃最后几个 batch。",
        ),
    ),
]

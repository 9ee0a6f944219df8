"""Functions and layers of paddle that compute something else than torch's of the same name."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import torch
from entry import Difference, Words, train, verdict

import padiff


def _both(in_torch: Any, in_paddle: Any, data: list[tuple[np.ndarray, np.ndarray]]) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        padiff.assign_weight(in_torch, in_paddle)
    reference = train(
        in_torch,
        torch.optim.SGD(in_torch.parameters(), 0.1),
        [tuple(map(torch.from_numpy, batch)) for batch in data],
        torch.nn.functional.cross_entropy,
    )
    candidate = train(
        in_paddle,
        paddle.optimizer.SGD(0.1, parameters=in_paddle.parameters()),
        [tuple(map(paddle.to_tensor, batch)) for batch in data],
        paddle.nn.functional.cross_entropy,
    )
    return verdict(padiff.compare_runs(reference, candidate))


def ignored_labels(folder: Path) -> str:
    """A classifier, where some labels are to be ignored."""
    torch.manual_seed(0)
    chance = np.random.default_rng(0)
    data = []
    for _ in range(3):
        labels = chance.integers(0, 4, 12)
        labels[:3] = -100
        data.append((chance.normal(size=(12, 16)).astype("float32"), labels))
    in_torch = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    in_paddle = paddle.nn.Sequential(paddle.nn.Linear(16, 32), paddle.nn.GELU(), paddle.nn.Linear(32, 4))
    return _both(in_torch, in_paddle, data)


def padding_idx(folder: Path) -> str:
    """Embeddings whose row for padding is not zero, as in a checkpoint that was trained without `padding_idx`."""
    torch.manual_seed(0)
    chance = np.random.default_rng(0)
    data = [(chance.integers(0, 10, (8, 6)), chance.integers(0, 4, 8)) for _ in range(3)]
    in_torch = torch.nn.Sequential(
        torch.nn.Embedding(10, 16, padding_idx=0), torch.nn.Flatten(), torch.nn.Linear(16 * 6, 4)
    )
    in_paddle = paddle.nn.Sequential(
        paddle.nn.Embedding(10, 16, padding_idx=0), paddle.nn.Flatten(), paddle.nn.Linear(16 * 6, 4)
    )
    with torch.no_grad():
        in_torch[0].weight[0] = torch.randn(16)
    return _both(in_torch, in_paddle, data)


FOUND = [
    Difference(
        "ignored_labels",
        ("torch", "paddlepaddle"),
        ignored_labels,
        "paddle counts ignored rows",
        Words(
            "paddle: the mean of `cross_entropy` counts ignored labels",
            "With `ignore_index=-100`, which is the default of both, torch divides the loss by the number of labels that "
            "count. paddle divides it by the number of all labels. Here 3 of 12 labels are ignored.",
            "Use `reduction='sum'` and divide by the number of labels that count. Or mark the labels to ignore by a number "
            "that is neither negative nor a class (255, say): then paddle's mean is torch's.",
        ),
        Words(
            "paddle：`cross_entropy` 求平均时计入了被忽略的标签",
            "两个框架默认都是 `ignore_index=-100`。torch 用有效标签的个数作除数，paddle 用全部标签的个数作除数。"
            "这里 12 个标签中有 3 个被忽略。",
            "使用 `reduction='sum'`，再除以有效标签的个数。或者用一个不是类别的非负数（例如 255）标记要忽略的标签，这时 paddle 的均值与 torch 相同。",
        ),
    ),
    Difference(
        "padding_idx",
        ("torch", "paddlepaddle"),
        padding_idx,
        "gives zeros",
        Words(
            "paddle: `Embedding(padding_idx)` gives zeros",
            "In torch, `padding_idx` only keeps the row from being trained: the layer gives whatever the row holds. In "
            "paddle, the layer gives zeros. They differ if the row is not zero: after carrying weights over from a "
            "checkpoint, for example.",
            "Set the row to zero in both, or leave `padding_idx` out in paddle and keep the row's gradient at zero.",
        ),
        Words(
            "paddle：`Embedding(padding_idx)` 输出零",
            "在 torch 中，`padding_idx` 只表示这一行不参与训练，输出仍是该行保存的值。在 paddle 中，输出为零。"
            "该行不为零时两者就不一致，例如从检查点拷贝权重之后。",
            "把两侧的这一行都设为零；或者在 paddle 中不写 `padding_idx`，并让这一行的梯度保持为零。",
        ),
    ),
]

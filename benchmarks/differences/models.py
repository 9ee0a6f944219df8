"""Models of PaddleClas and paddle.vision that are set otherwise than those which they were written after.

``benchmarks/library_pairs.py`` says what has to be installed for them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path

from entry import Difference, Words, verdict

import padiff

sys.path.append(str(Path(__file__).resolve().parents[1]))


def _of_the_zoo(module: str, name: str) -> str:
    """The verdict on a pair that `library_pairs` knows."""
    from library_zoo import shim

    shim.install()
    (pair,) = (one for one in importlib.import_module(f"library_zoo.{module}").PAIRS if one.name == name)
    reference, candidate = pair.models()
    with contextlib.redirect_stdout(io.StringIO()):
        padiff.assign_weight(reference, candidate)
        return verdict(
            padiff.auto_diff(
                reference, candidate, pair.inputs(), atol=1e-6, rtol=1e-4, auto_init=False, diff_phase="forward"
            )
        )


def _carried(timm_name: str, paddle_name: str) -> str:
    """What carrying the weights over says: these two do not own the same."""
    from library_zoo import shim

    shim.install()
    importlib.import_module("library_zoo.classify")  # which sets PaddleClas's logger
    import timm
    from paddleclas.ppcls.arch import backbone

    reference, candidate = timm.create_model(timm_name, num_classes=10), getattr(backbone, paddle_name)(class_num=10)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if padiff.assign_weight(reference, candidate):
            return "The weights were carried over."
    lines = said.getvalue().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("Error occurred"))
    end = next(k for k, line in enumerate(lines) if line.startswith("Base model"))
    return "\n".join(line for line in lines[start:end] if line.strip())


def inception_v3(folder: Path) -> str:
    return _of_the_zoo("vision", "vision/inception_v3")


def inception_v4(folder: Path) -> str:
    return _of_the_zoo("classify", "classify/inception_v4")


def fasternet(folder: Path) -> str:
    return _of_the_zoo("classify", "classify/fasternet_t0")


def hrnet(folder: Path) -> str:
    return _carried("hrnet_w18", "HRNet_W18_C")


def resnest(folder: Path) -> str:
    return _carried("resnest50d", "ResNeSt50")


_CLAS = ("torch", "timm", "torchvision", "paddlepaddle", "paddleclas")
FOUND = [
    Difference(
        "inception_v3",
        ("torch", "torchvision", "paddlepaddle"),
        inception_v3,
        "eps 0.001 against 1e-05",
        Words(
            "paddle.vision: `inception_v3` has another epsilon in its BatchNorms",
            "The original network and torchvision have 0.001. paddle.vision leaves paddle's default, 1e-5. Weights of "
            "one give other outputs in the other.",
            "Set `_epsilon = 1e-3` in every BatchNorm of paddle's model. With equal epsilons the outputs of the two agree "
            "to 8e-07 (`python benchmarks/library_pairs.py inception_v3`).",
        ),
        Words(
            "paddle.vision：`inception_v3` 的 BatchNorm 使用了另一个 epsilon",
            "原始网络和 torchvision 的 epsilon 是 0.001。paddle.vision 保留了 paddle 的默认值 1e-5。"
            "同一份权重在两侧得到不同的输出。",
            "把 paddle 模型中每个 BatchNorm 的 `_epsilon` 设为 1e-3。epsilon 相同时，两侧输出之差为 8e-07"
            "（`python benchmarks/library_pairs.py inception_v3`）。",
        ),
    ),
    Difference(
        "inception_v4",
        _CLAS,
        inception_v4,
        "eps 0.001 against 1e-05",
        Words(
            "PaddleClas: `InceptionV4` has another epsilon in its BatchNorms",
            "timm has 0.001, as the original. PaddleClas leaves paddle's default, 1e-5. Behind it the 1x7 and 7x1 kernels "
            "of some blocks come in another order, too.",
            "Set the epsilon as above. The order of the kernels is in the code of the blocks.",
        ),
        Words(
            "PaddleClas：`InceptionV4` 的 BatchNorm 使用了另一个 epsilon",
            "timm 与原始实现一样是 0.001。PaddleClas 保留了 paddle 的默认值 1e-5。"
            "此外，后面一些 block 中 1x7 与 7x1 卷积的顺序也不同。",
            "按上一条设置 epsilon。卷积的顺序写在 block 的代码里。",
        ),
    ),
    Difference(
        "fasternet",
        _CLAS,
        fasternet,
        "momentum 0.1 against 0.9",
        Words(
            "PaddleClas: FasterNet takes BatchNorm's momentum as torch counts it",
            "torch's `momentum=0.1` is paddle's `momentum=0.9`. The port has 0.1, so its running statistics are almost "
            "those of the last batch. In evaluation with equal weights the outputs agree; in training they differ.",
            "`momentum=0.9` in PaddleClas's layers.",
        ),
        Words(
            "PaddleClas：FasterNet 按 torch 的含义填写 BatchNorm 的 momentum",
            "torch 的 `momentum=0.1` 对应 paddle 的 `momentum=0.9`。移植后的代码写的是 0.1，"
            "所以它的滑动统计量几乎等于最后一个 batch 的统计量。权重相同时，评估模式的输出一致；训练中则不一致。",
            "在 PaddleClas 的层中使用 `momentum=0.9`。",
        ),
    ),
    Difference(
        "hrnet",
        _CLAS,
        hrnet,
        "has no parameter for `bias`",
        Words(
            "PaddleClas: the head of HRNet has no biases",
            "timm's convolutions in front of the head's BatchNorms have a bias each, PaddleClas's have none. The weights "
            "can't be carried over completely, and `assign_weight` says where.",
            "Subtract the bias from the running mean of the BatchNorm behind it. In training it has no effect.",
        ),
        Words(
            "PaddleClas：HRNet 的 head 没有 bias",
            "timm 的 head 中，BatchNorm 之前的卷积都带 bias，PaddleClas 的没有。权重无法完整拷贝，"
            "`assign_weight` 会指出位置。",
            "从其后 BatchNorm 的滑动均值中减去 bias。训练时它不起作用。",
        ),
    ),
    Difference(
        "resnest",
        _CLAS,
        resnest,
        "has no parameter for `bias`",
        Words(
            "PaddleClas: ResNeSt's attention has no biases",
            "As with HRNet: timm's convolutions in the split attention have biases.",
            "Subtract the bias from the running mean of the BatchNorm behind it. In training it has no effect.",
        ),
        Words(
            "PaddleClas：ResNeSt 的注意力部分没有 bias",
            "与 HRNet 相同：timm 的 split attention 中，卷积带 bias。",
            "从其后 BatchNorm 的滑动均值中减去 bias。训练时它不起作用。",
        ),
    ),
]

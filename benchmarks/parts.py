"""Where the time of a sketched step goes that is not the training's: torch ResNet-18, 64 x 64, batch 8, one thread.

Each part is measured alone, with the others as they are: what it calls is wrapped, and a step's calls are added up, by
the clock of the thread that they run on, which has to look at its clock twice for each call. Medians of several steps,
the first three not among them: of two more is kept, and the third is the first that follows a plan.

    python benchmarks/parts.py [--steps 12] [--write]
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before a framework is imported
warnings.filterwarnings("ignore")

import numpy as np
import performance_page as pages
from recording import TorchTraining

import padiff
from padiff.dump.write import RunWriter
from padiff.recorder.model_hooks import Hooks
from padiff.recorder.parameters import Parameters
from padiff.recorder.session import Recorder
from padiff.recorder.template_matcher import TemplateMatcher

#: By part, what it is done in. The loop's thread goes through all but the last.
PARTS: dict[str, tuple[type, str]] = {
    "before": (Hooks, "_before_call"),
    "weights": (Parameters, "snapshot"),
    "outputs": (Hooks, "_after_call"),
    "gradients": (TemplateMatcher, "gradient"),
    "consumed": (Parameters, "consume"),
    "updates": (Parameters, "stepped"),
    "end": (Recorder, "try_dump"),
    "writer": (RunWriter, "_handle"),
}
_ROWS = {
    pages.ENGLISH: {
        "before": "before layers' calls: what goes in, whether layers are what they were; weights too",
        "weights": "weights and buffers: 122 samples",
        "outputs": "outputs: 61 samples, each with a hook on its gradient",
        "gradients": "gradients of outputs: 60 samples",
        "consumed": "gradients of parameters: 62 samples",
        "updates": "what the optimizer did: 62 samples",
        "end": "the end of the step, and the beginning of the next",
        "writer": "on the writer's thread: sketches, and the step's file",
    },
    pages.CHINESE: {
        "before": "层的调用开始：是哪一层，输入什么，各层是否与之前相同；包括权重",
        "weights": "权重和缓冲区：122 个样本",
        "outputs": "输出：61 个样本，各有一个梯度上的 hook",
        "gradients": "输出的梯度：60 个样本",
        "consumed": "参数的梯度：62 个样本",
        "updates": "优化器所做的更新：62 个样本",
        "end": "一个 step 的结束和下一个 step 的开始",
        "writer": "写入线程：摘要，以及该 step 的文件",
    },
}
_HEAD = {pages.ENGLISH: ("part", "ms"), pages.CHINESE: ("部分", "ms")}
_SAID = {
    pages.ENGLISH: "A plain step takes {plain} ms. Ranges over up to {most} runs of medians; {where}, which others "
    "used at the same time.",
    pages.CHINESE: "普通 step 为 {plain} ms。最多 {most} 次运行的中位数的范围；{where}，同时有其他人使用。",
}


def timed(wrapped: Any, spent: list[float]) -> Any:
    @functools.wraps(wrapped)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = time.thread_time()
        try:
            return wrapped(*args, **kwargs)
        finally:
            spent[0] += time.thread_time() - before

    return call


def measure(training: TorchTraining, owner: type, name: str, folder: Path, steps: int) -> float:
    """Milliseconds of a step that are spent in a method."""
    spent, found = [0.0], []
    recording = padiff.record(training.model, folder, optimizer=training.optimizer, detail="sketch")
    with patch.object(owner, name, timed(getattr(owner, name), spent)), recording as rec:
        for _ in range(steps + 3):
            spent[0] = 0.0
            training.step()
            rec.try_dump()
            rec.flush()
            found.append(spent[0] * 1e3)
    return float(np.median(found[3:]))


def block(language: str, kept: pages.Figures) -> str:
    """What stands in the page."""
    rows = [[title, kept.text(part, language, 1)] for part, title in _ROWS[language].items()]
    said = _SAID[language].format(
        plain=kept.text("plain", language, 0), most=pages.MOST, where=kept.measured_on(language)
    )
    return pages.table(_HEAD[language], rows) + "\n\n" + said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="keep the figures, and write them into the pages")
    args = parser.parse_args()
    training = TorchTraining("resnet18", argparse.Namespace(size=64, batch=8, device="cpu"))
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-"))
    try:
        training.step()
        plain = []
        for _ in range(args.steps):
            before = time.thread_time()
            training.step()
            plain.append((time.thread_time() - before) * 1e3)
        found = {"plain": float(np.median(plain))}
        for part, (owner, name) in PARTS.items():
            found[part] = measure(training, owner, name, folder / part, args.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for part, value in found.items():
        print(f"{part:10} {value:7.2f} ms")
    if args.write:
        kept = pages.keep("parts", found)
        pages.write("parts", lambda language: block(language, kept))


if __name__ == "__main__":
    main()

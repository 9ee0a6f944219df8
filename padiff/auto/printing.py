"""Output of ``auto_diff``: options, stages, the verdict, and on failure the place in both models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import StackSummary

from padiff.auto.model_alignment import ComparedWhole
from padiff.auto.settings import ModelSetup, Settings
from padiff.records import CANNOT_TELL, ROOT, Both, Diff, Report, count_text, is_functional, verdict, zeros_text
from padiff.records.tree_text import tree_text
from padiff.system.frames import is_users
from padiff.system.naming import first_few
from padiff.weights.assign import Carried, success_text

_STAGE_NAMES = {
    "input": "Input",
    "weight": "Weight",
    "forward": "Forward",
    "loss": "Loss",
    "backward": "Backward",
    "grad": "Weight Grad",
    "update": "Update",
}
#: Python stacks by layer path and index of the call.
Stacks = Mapping[tuple[str, int], StackSummary]


class Printer:
    """Printer of the progress of an ``auto_diff``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def print_options(self) -> None:
        self._say("Your options:")
        print("{")
        for name, value in self._settings.options().items():
            print(f"  {name}: `{value}`")
        print("}")
        for remark in self._settings.remarks:
            self._say(remark)

    def weights_assigned(self, carried: Carried) -> None:
        for line in (*carried.described(), success_text(carried)):
            self._say(line)

    def weights_failed(self, error: Exception) -> None:
        self._say("Assign weight Failed !!!")
        print(f"\n{error}\n")

    def wholes(self, pairs: Sequence[ComparedWhole]) -> None:
        """Print the layers that are compared by inputs and outputs only, with the parameters that are not compared."""
        for pair in pairs:
            few = " against ".join(_few(side) for side in pair.parameters)
            names = f" (parameters not compared: {few})" if any(pair.parameters) else ""
            self._say(f"Compared as a whole, not inside: {' and '.join(f'`{path}`' for path in pair.paths)}{names}")

    def step(self, number: int) -> None:
        self._say(f"=================Train Step {number}=================")

    def compared(self, diffs: Sequence[Diff], number: int) -> None:
        """Print the stages of the step that agree, and the largest difference of the outputs."""
        outputs = [
            d.figures.max_abs
            for d in diffs
            if d.pair.stage == "forward" and d.pair.anchor.layer == ROOT and d.pair.step == number and d.figures
        ]
        if outputs:
            self._say(f"Max elementwise output diff is {max(outputs)}")
        for stage in ("forward", "loss", "backward", "grad"):
            here = [d for d in diffs if d.pair.stage == stage and d.pair.step == number and d.compared]
            if here and all(d.passed for d in here):
                self._say(f"{_STAGE_NAMES[stage].lower()} stage compared.")
        after = [d for d in diffs if d.pair.stage == "weight" and d.pair.step == number + 1]
        if after and all(d.passed for d in after):
            self._say("weight after the optimizer compared.")

    def dumped(self, folders: Sequence[str]) -> None:
        """Print the folders of the dumps, if there are any."""
        if folders:
            self._say(f"Dumps of both models: {' and '.join(folders)}")

    def logged(self, files: Sequence[Path]) -> None:
        for file in files:
            self._say(f"Differences in weight or grad !!! Check reports at `{file}`")

    def verdict(self, report: Report, stacks: Both[Stacks]) -> None:
        zeros = report.coverage.zeros
        if zeros:
            self._say(f"{zeros_text(zeros)}, which no tolerance can judge: {_few(zeros)}")
        if report.first_diff is None:
            unpaired = (*report.coverage.reference_layers, *report.coverage.candidate_layers)
            if unpaired:
                self._say(f"Not compared, no partner: {', '.join(unpaired)}")
            if report.outcome == CANNOT_TELL:
                self._say("FAILED !!!")
                print(f"\n{verdict(report)}\n")
            else:
                self._say("SUCCESS !!!")
            return
        first = report.first_diff
        if not report.failed:
            self._say("FAILED !!!")
            print(f"\n{first.message}\n")
            return
        diff = report.failed[0]
        name = _STAGE_NAMES[first.stage]
        optimizer = " (after the optimizer's step)" if first.stage == "weight" and first.step > 0 else ""
        self._say("FAILED !!!")
        self._say(f"    Diff found in `{name} Stage`{optimizer} in step: {first.step}, slot `{first.slot}`")
        sides, paths = self._settings.sides, Both(first.reference, first.candidate)
        self._say(f"    Type of layer is: {' vs '.join(map(_type, sides, paths))}")
        self._say(f"    Path of layer is: {' vs '.join(f'`{path}`' for path in paths)}")
        print(f"\n{first.message}\n")
        print(f"{count_text(report)}.\n")
        self._say("Check model struct:")
        for side, path in sides.zip(paths):
            print(f"{side.name} model ({side.framework.name})\n=========================")
            print(tree_text(side.live.info.layers, path))
        for side, path, record, side_stacks in zip(sides, paths, (diff.pair.reference, diff.pair.candidate), stacks):
            call = record.call if record is not None else 0
            name = path or ""
            if record is not None and is_functional(record.slot):
                name = f"{path}/{record.slot.rpartition('.')[0]}"
            stack = side_stacks.get((name, call)) or side_stacks.get((path or "", 0))
            if stack is not None:
                print(f"\n{side.name} stacks ({side.framework.name}):\n=========================")
                print(stack_text(stack, self._settings.full_stacks))

    def _say(self, text: str) -> None:
        print(f"[AutoDiff] {text}")


def _few(names: Sequence[str]) -> str:
    return first_few(names, 4) or "none"


def _type(side: ModelSetup, path: str | None) -> str:
    if path is None or not any(node.path == path for node in side.live.nodes):
        return str(path)
    return str(type(side.live.layer(path)))


def stack_text(stack: StackSummary, full: bool) -> str:
    """Return a call stack as text; only the user's own lines unless `full` is True."""
    frames = [frame for frame in stack if full or is_users(frame.filename)]
    lines = [] if full else ["         ..."]
    for frame in frames or list(stack)[-3:]:
        lines.append(f"         File {frame.filename}: {frame.lineno}    {frame.name}")
        lines.append(f"                {frame.line}")
    return "\n".join(lines)

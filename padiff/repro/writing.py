"""Finds the first diff of two runs, and writes its scripts."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padiff.compare import Policy, RunComparison
from padiff.compare.diagnose.first import scene_of
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.place import place_of_diff
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import allowed
from padiff.compare.judge.noise import NoisePolicy
from padiff.dump import open_run
from padiff.dump.safetensors import write_safetensors
from padiff.errors import NothingToCompareError, UsageError
from padiff.model.given_map import GivenMap
from padiff.pair.layouts import layout_between
from padiff.records import SIDES, Both, Diff, Figure, FirstDiff, Layout, Run, RunInfo, Step, printable
from padiff.repro.case import CannotWriteError, Case, tensors_of
from padiff.repro.computing import gradient_cases, output_cases
from padiff.repro.losses import loss_cases
from padiff.repro.script import script_text
from padiff.repro.side import Side
from padiff.repro.updates import statistics_cases, update_cases

# What of an environment an upstream issue asks for.
_ASKED = ("framework.", "device", "cpu", "python", "platform", "threads", "tf32", "autocast", "matmul", "deterministic",
          "onednn", "cudnn", "numpy", "dtype", "attention")  # fmt: skip
_README, _ENVIRONMENT = "README.md", "environment.json"


@dataclass(frozen=True)
class Repro:
    """What was written.

    Attributes:
        folder: where.
        first: the first diff.
        scripts: by side, those that were written.
        reasons: by side, why there is none.
    """

    folder: Path
    first: FirstDiff
    scripts: Mapping[str, Path]
    reasons: Mapping[str, str]


def write_repro(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    out: str | Path,
    layer_map: Any = None,
    policy: Policy | None = None,
    overwrite: bool = False,
) -> Repro | None:
    """Write the first diff of two runs as two short scripts, with the tensors that they need and the environments.

    Each script computes what differs as its run did, from what that run recorded, and exits with 1 if it is apart from
    what the other run recorded. They need the framework, numpy and safetensors.

    Args:
        reference, candidate: run folders, or runs in memory.
        out: the folder to write; it must not be there, or be empty.
        layer_map, policy: as `padiff.compare_runs` has them.
        overwrite: replace the scripts that a folder holds.

    Returns:
        What was written; `None` if the runs match.

    Raises:
        UsageError: neither side's script can be written (the error says why), or the folder holds something.
    """
    folder = Path(out)
    _check(folder, overwrite)
    runs = Both(reference, candidate).map(lambda run: open_run(run) if isinstance(run, (str, Path)) else run)
    used = policy if policy is not None else NoisePolicy()
    comparison = RunComparison(runs.reference, runs.candidate, GivenMap.of(layer_map), used)
    numbers = comparison.common()
    if not numbers:
        raise NothingToCompareError("the runs have no common step")
    for number in numbers:
        diffs = comparison.diffs(number)
        first = comparison.first(diffs)
        if first is not None:
            break
    else:
        declared = comparison.report([], numbers).first_diff
        if declared is None:
            return None
        raise CannotWriteError(
            f"no tensor differs that was recorded, so there is nothing to compute. {declared.message}"
        )
    failed = next(diff for diff in diffs if not diff.passed)
    try:
        cases = _cases(failed, diffs, comparison, used)
    except CannotWriteError as error:
        raise CannotWriteError(f"{_place(first)}: there is no script for it: {error}") from None
    return _written(folder, first, cases, runs, failed, overwrite)


def _place(first: FirstDiff) -> str:
    return printable(f"The runs part at {first.where}")


def _cases(
    failed: Diff, diffs: Sequence[Diff], comparison: RunComparison, policy: Policy
) -> Both[Case | CannotWriteError]:
    """Both sides' cases, or why there is none.

    Raises:
        CannotWriteError: there can be none of either.
    """
    pair = failed.pair
    if not pair.complete:
        raise CannotWriteError(f"it is {failed.problem}: there is nothing to hold a tensor against")
    if pair.stage == "input":
        raise CannotWriteError(
            "the batches differ already, which the loops give to the models: nothing of a framework to show. "
            "`padiff.batches` gives the candidate the reference's"
        )
    scene = scene_of(failed, diffs, comparison.alignment, comparison.runs)
    infos = comparison.runs.map(lambda run: run.info)
    steps = scene.sides(scene.number)
    if steps is None:
        raise CannotWriteError(f"step {scene.number} can't be read any more")
    sides = _sides(infos, steps)
    if pair.stage == "loss":
        return loss_cases(failed, sides)
    if pair.stage == "update":
        return update_cases(scene, sides)
    if pair.stage == "weight":
        return statistics_cases(scene, lambda number: _at(scene, number, infos))
    if pair.stage in ("backward", "grad"):
        return gradient_cases(failed, sides, _agreeing_gradients(scene, sides))
    place = place_of_diff(failed, scene.step, steps, infos, policy)
    return output_cases(failed, place, sides, list(scene.step), policy)


def _sides(infos: Both[RunInfo], steps: Both[Step]) -> Both[Side]:
    named = SIDES.zip(infos.zip(steps))
    return named.map(lambda one: Side(one[1][1], one[1][0], Graph(one[1][1].trace, one[1][0].layers), one[0]))


def _at(scene: Scene, number: int, infos: Both[RunInfo]) -> Both[Side] | None:
    steps = scene.sides(number)
    return None if steps is None else _sides(infos, steps)


def _agreeing_gradients(scene: Scene, sides: Both[Side]) -> Both[set[int]]:
    """Tensors whose gradients agree, by their numbers."""
    found: Both[set[int]] = Both(set(), set())
    for diff in scene.step:
        if diff.pair.stage == "backward" and diff.passed and diff.compared:
            for numbers, side, record in zip(found, sides, diff.pair.sides):
                tensor = side.graph.tensor_of(record) if record is not None else None
                if tensor is not None:
                    numbers.add(tensor)
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def _written(
    folder: Path, first: FirstDiff, cases: Both[Case | CannotWriteError], runs: Both[Run], failed: Diff, overwrite: bool
) -> Repro:
    reasons = {name: str(case) for name, case in zip(SIDES, cases) if isinstance(case, CannotWriteError)}
    if len(reasons) == 2:
        why = " ".join(dict.fromkeys(reasons.values()))
        raise CannotWriteError(f"{_place(first)}: there is no script for it: {why}")
    scripts: dict[str, Path] = {}
    texts: dict[str, tuple[str, Case]] = {}
    verdict = textwrap.fill(printable(first.message), 118, break_long_words=False, break_on_hyphens=False)
    for is_reference, name, case, run in zip((True, False), SIDES, cases, runs):
        if isinstance(case, CannotWriteError):
            continue
        case.limit = _limit(failed)
        case.other = _in_own_order(case, failed, is_reference)
        file = folder / f"{name}_{case.framework}.py"
        tensors = file.with_suffix(".safetensors")
        versions = f"{run.info.framework} {run.info.framework_version}"
        texts[name] = script_text(case, verdict, tensors.name, versions), case
        scripts[name] = file
    # Nothing is written, or replaced, before both scripts are checked.
    if overwrite and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (script, case) in texts.items():
        file = scripts[name]
        about = {"made by": "padiff repro", "step": str(first.step)}
        write_safetensors(file.with_suffix(".safetensors"), tensors_of(case), about)
        file.write_text(script, encoding="utf-8", errors="backslashreplace")
    environments = dict(SIDES.zip(runs.map(lambda run: _environment(run.info))))
    (folder / _ENVIRONMENT).write_text(json.dumps(environments, indent=1), encoding="utf-8")
    text = _readme(verdict, scripts, reasons, environments)
    (folder / _README).write_text(text, encoding="utf-8", errors="backslashreplace")
    return Repro(folder, first, scripts, reasons)


def _check(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    own = (folder / _ENVIRONMENT).exists() and (folder / _README).exists()
    if not folder.is_dir() or (any(folder.iterdir()) and not (own and overwrite)):
        hint = "--overwrite replaces them" if own else "give another one"
        raise UsageError(f"{folder} holds {'scripts' if own else 'something'} already: {hint}")


def _limit(failed: Diff) -> float:
    judged = failed.judgement
    if judged is not None and judged.figure is Figure.REL_L2 and judged.limit > 0:
        return judged.limit
    return allowed(failed.pair.anchor.dtype, failed.pair.stage)


def _in_own_order(case: Case, failed: Diff, is_reference: bool) -> np.ndarray:
    """What the other side recorded, as this side's lies; as it is where it is of another size."""
    own, other = case.own, case.other
    assert own is not None and other is not None
    pair = failed.pair
    layout: Layout = pair.layout
    shapes = pair.sides.map(lambda record: record.shape if record is not None else ())
    shapes = shapes if is_reference else shapes.swapped()
    if (own.shape, other.shape) == (shapes.reference, shapes.candidate):
        other = layout.apply(other, own.shape) if is_reference else layout.undo(other, own.shape)
    elif other.shape != own.shape:
        between = layout_between(own.shape, other.shape)
        other = between.apply(other, own.shape) if between else other
    if other.shape != own.shape and other.size == own.size:
        other = other.reshape(own.shape)
    return np.ascontiguousarray(other)


def _environment(info: RunInfo) -> dict[str, Any]:
    return {"framework": f"{info.framework} {info.framework_version}", **dict(sorted(info.environment.items()))}


def _readme(
    verdict: str, scripts: Mapping[str, Path], reasons: Mapping[str, str], environments: Mapping[str, Mapping[str, Any]]
) -> str:
    lines = ["# A minimal reproduction", "", "```text", verdict.replace("```", "'''"), "```", "", "Run:", "", "```"]
    lines += [f"python {path.name}" for path in scripts.values()] + ["```", ""]
    lines += [
        "Each script computes what differs as its run did, from what that run recorded. It prints how far that is from "
        "what the other run recorded, and from the same in float64, and exits with 1 if they differ. It needs the "
        "framework, numpy and safetensors.",
        "",
    ]
    lines += [f"There is no script of the {name}: {printable(why)}\n" for name, why in reasons.items()]
    for name, environment in environments.items():
        lines += [f"## Environment of the {name}", "", "```text"]
        lines += [
            printable(f"{key}: {value}") for key, value in environment.items() if key.startswith(("framework", *_ASKED))
        ]
        lines += ["```", ""]
    return "\n".join(lines)

"""Writing of the scripts that reproduce the first diff of two runs."""

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
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.place import place_of_diff
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import allowed
from padiff.compare.judge.noise import NoisePolicy
from padiff.dump.opening import opened
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

# Beginnings of the environment entries that issue templates of the frameworks ask for.
_ASKED = ("framework.", "device", "cpu", "python", "platform", "threads", "tf32", "autocast", "matmul", "deterministic",
          "onednn", "cudnn", "numpy", "dtype", "attention")  # fmt: skip
_README, _ENVIRONMENT = "README.md", "environment.json"


@dataclass(frozen=True)
class Repro:
    """The written scripts.

    Attributes:
        folder: the folder of the scripts.
        first: the first diff.
        scripts: side -> path of its script.
        reasons: side -> reason why it has no script.
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

    Each script repeats the computation that differs, from the inputs that its run recorded, and exits with 1 if the
    result differs from the one that the other run recorded. A script needs the framework, numpy and safetensors.

    Args:
        reference, candidate: run folders, or runs in memory.
        out: the folder to write; it must be new or empty.
        layer_map, policy: see `padiff.compare_runs`.
        overwrite: replace the scripts in an existing folder of scripts.

    Returns:
        The written scripts; `None` if the runs match.

    Raises:
        UsageError: neither side's script can be written (the error gives the reason), or the folder is not empty.
    """
    folder = Path(out)
    _check(folder, overwrite)
    runs = Both(reference, candidate).map(opened)
    used = policy if policy is not None else NoisePolicy()
    comparison = RunComparison(runs.reference, runs.candidate, GivenMap.from_value(layer_map), used)
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
    return printable(f"The runs differ first at {first.where}")


def _cases(
    failed: Diff, diffs: Sequence[Diff], comparison: RunComparison, policy: Policy
) -> Both[Case | CannotWriteError]:
    """Return the case of each side, or the reason why a side has none.

    Raises:
        CannotWriteError: neither side can have a script.
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


def _at(scene: DiffContext, number: int, infos: Both[RunInfo]) -> Both[Side] | None:
    steps = scene.sides(number)
    return None if steps is None else _sides(infos, steps)


def _agreeing_gradients(scene: DiffContext, sides: Both[Side]) -> Both[set[int]]:
    """Return the numbers of the tensors whose gradients agree, for each side."""
    agreeing: Both[set[int]] = Both(set(), set())
    for diff in scene.step:
        if diff.pair.stage == "backward" and diff.passed and diff.compared:
            for numbers, side, record in zip(agreeing, sides, diff.pair.sides):
                tensor = side.graph.tensor_of(record) if record is not None else None
                if tensor is not None:
                    numbers.add(tensor)
    return agreeing


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
    # Both scripts are checked before anything is written or replaced.
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
    is_repro = (folder / _ENVIRONMENT).exists() and (folder / _README).exists()
    if not folder.is_dir() or (any(folder.iterdir()) and not (is_repro and overwrite)):
        hint = "--overwrite replaces them" if is_repro else "give another one"
        raise UsageError(f"{folder} holds {'scripts' if is_repro else 'something'} already: {hint}")


def _limit(failed: Diff) -> float:
    judged = failed.judgement
    if judged is not None and judged.figure is Figure.REL_L2 and judged.limit > 0:
        return judged.limit
    return allowed(failed.pair.anchor.dtype, failed.pair.stage)


def _in_own_order(case: Case, failed: Diff, is_reference: bool) -> np.ndarray:
    """Return the other side's tensor in the layout of this side; unchanged if the sizes differ."""
    recorded, counterpart = case.own, case.other
    assert recorded is not None and counterpart is not None
    pair = failed.pair
    layout: Layout = pair.layout
    shapes = pair.sides.map(lambda record: record.shape if record is not None else ())
    shapes = shapes if is_reference else shapes.swapped()
    if (recorded.shape, counterpart.shape) == (shapes.reference, shapes.candidate):
        counterpart = (
            layout.apply(counterpart, recorded.shape) if is_reference else layout.undo(counterpart, recorded.shape)
        )
    elif counterpart.shape != recorded.shape:
        between = layout_between(recorded.shape, counterpart.shape)
        counterpart = between.apply(counterpart, recorded.shape) if between else counterpart
    if counterpart.shape != recorded.shape and counterpart.size == recorded.size:
        counterpart = counterpart.reshape(recorded.shape)
    return np.ascontiguousarray(counterpart)


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

"""Measured floors: how far clean replays are from them, and whether they find what the modelled limits find.

Records a reference with packs, replays it with the other framework (`tests/pairs`, as torch and paddle write one model)
or with another author's version (`benchmarks/faults/seen`, clean and with faults), and measures floors. Prints, for
every stage, the largest multiple of a floor that a clean replay shows; above `limits.FLOORS` it would be a false alarm.

    python benchmarks/floors.py pairs [NAME ...]
    python benchmarks/floors.py programs [NAME ...]
    python benchmarks/floors.py faults [NAME ...]
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

for _threads in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_threads}_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "3")
warnings.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[1]
# Both have a `kit` and `pairs` of their own.
sys.path[:0] = [str(ROOT / ("tests" if sys.argv[1:2] == ["pairs"] else "benchmarks/faults")), str(ROOT)]

import paddle
import torch

import padiff
from padiff.records import Report

torch.set_num_threads(1)
paddle.set_device("cpu")

RUNS, RATE = 8, 1e-4


def quiet() -> Any:
    """What padiff says on standard error is of no interest here."""
    return contextlib.redirect_stderr(io.StringIO())


def multiples(report: Report) -> dict[str, list[tuple[float, str]]]:
    """Of each stage, the multiples of floors, the largest first, each with its rule and site."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for diff in report.diffs:
        if diff.floors is not None and diff.judgement is not None:
            at = f"{diff.judgement.rule.name} {diff.pair.anchor.site} step {diff.pair.step}"
            found[diff.pair.stage].append((diff.floors, at))
    return {stage: sorted(some, reverse=True) for stage, some in found.items()}


def shown(name: str, report: Report, worst: dict[str, list[tuple[float, str, str]]]) -> None:
    """A line for a clean replay."""
    found = multiples(report)
    line = "  ".join(f"{stage} {some[0][0]:.3g}" for stage, some in found.items())
    print(f"{name:34s} {'match' if report.passed else 'DIFFER'}  {line}", flush=True)
    for stage, some in found.items():
        worst[stage] += [(value, name, at) for value, at in some if at.startswith("MEASURED")]
    if not report.passed:
        print("   ", report.first_diff.message[:300])


def pairs(names: list[str]) -> None:
    """Replays of one framework's model with the other's."""
    from kit.frameworks import TORCH, kit_of
    from pairs import PAIRS
    from pairs.test_runs import HALF_TIED, TWO_BIASES, evaluated, transferred

    def optimizer_of(model: Any) -> Any:
        if kit_of(model) is TORCH:
            return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        return paddle.optimizer.Momentum(RATE, 0.9, parameters=model.parameters())

    def stepped(model: Any, optimizer: Any, args: Any) -> None:
        out = model(*args)
        (out * out).mean().backward()
        optimizer.step()
        optimizer.clear_grad() if hasattr(optimizer, "clear_grad") else optimizer.zero_grad()

    worst: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for pair in PAIRS:
        if pair.name in TWO_BIASES | HALF_TIED or (names and not any(fnmatch(pair.name, n) for n in names)):
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            with quiet():
                models = transferred(pair)
                inputs = pair.inputs()
                model, optimizer = evaluated(models[0]), optimizer_of(models[0])
                with padiff.record(model, folder / "a", optimizer=optimizer, replay_every_n_steps=2) as rec:
                    for _ in range(3):
                        stepped(model, optimizer, inputs[0])
                        rec.try_dump()
                model, optimizer = evaluated(models[1]), optimizer_of(models[1])
                with padiff.replay(folder / "a", model, folder / "b", optimizer=optimizer, floors=RUNS) as replay:
                    for step in replay:
                        stepped(model, optimizer, step.inputs)
                report = replay.report
            shown(pair.name, report, worst)
        except Exception as error:
            print(f"{pair.name:34s} not done: {type(error).__name__}: {str(error)[:150]}", flush=True)
        finally:
            shutil.rmtree(folder)
    summary(worst)


def summary(worst: dict[str, list[tuple[float, str, str]]]) -> None:
    """Over all clean replays."""
    for stage, some in worst.items():
        some.sort(reverse=True)
        values = [value for value, _, _ in some]
        at = "  ".join(f"1 in {n}: {values[len(values) // n]:.3g}" for n in (2, 100, 1000))
        print(f"\n{stage}: {len(values)} tensors, largest {values[0]:.3g}, {at}")
        for value, name, where in some[:5]:
            print(f"    {value:8.3g}  {name}  {where}")


def replayed(program: Any, recipe: Any, folder: Path, fault: str, variant: str, seed: int, start: Path) -> Report:
    """The candidate's replay of a program, its floors measured."""
    import paddle_loop
    import torch_loop
    from pairs import micro_batches

    side = program.candidate
    torch.manual_seed(seed + 1)
    model = side.build(fault, variant)
    if side.framework == "torch":
        loop, optimizer = torch_loop, torch_loop.optimizer_of(model, recipe)
        model.train()
    else:
        loop, optimizer = paddle_loop, paddle_loop.optimizer_of(model, recipe, recipe.rate)
    data = micro_batches(program, recipe, seed)
    with padiff.replay(start, model, folder, optimizer=optimizer, floors=RUNS) as replay:
        for step in replay:
            micro = data[step.number]
            for batch, arrays in zip(step.batches, micro):
                given = loop.tensors(arrays, False) if loop is torch_loop else loop.tensors(arrays)
                given |= dict(zip(program.inputs, [*batch.inputs, *batch.kwargs.values()]))
                loss = side.loss(model(*(given[name] for name in program.inputs)), given, fault)
                (loss / len(micro) if recipe.divide else loss).backward()
            if loop is torch_loop:
                torch_loop.clip(model, recipe)
            elif "own_clip" in recipe.style:
                paddle_loop.clip_by_hand(model, recipe)
            optimizer.step()
            optimizer.zero_grad() if loop is torch_loop else optimizer.clear_grad()
    return replay.report


def programs(names: list[str], faults: bool) -> None:
    """Replays of the seen programs, clean or with faults of the model and the loss."""
    import run
    import torch_loop
    from pairs import micro_batches

    worst: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    found, modelled, count = 0, 0, 0
    for program in run.programs("seen"):
        if names and not any(fnmatch(program.name, n) for n in names):
            continue
        if program.reference.framework != "torch":
            continue
        # The loop that replays does not decay, step or clip by hand.
        cases = (
            [f for f in program.faults if not f.recipe and not f.start]
            if faults
            else [
                clean
                for clean in program.clean
                if not {"by_hand", "own_rule"} & {*clean.recipe.get("style", "").split()}
            ]
        )
        for case in cases:
            folder, recipe = Path(tempfile.mkdtemp()), replace(program.recipe, **case.start)
            seed = getattr(case, "seed", 0)
            label = f"{program.name}/{case.name}"
            try:
                with quiet():
                    torch.manual_seed(seed)
                    torch_loop.train(
                        program, program.reference, program.reference.build("", ""), recipe,
                        micro_batches(program, recipe, seed), "", folder / "a", replay_every_n_steps=3,
                    )  # fmt: skip
                    own = replace(recipe, **case.recipe)
                    fault, variant = (case.name, "") if faults else ("", case.variant)
                    report = replayed(program, own, folder / "b", fault, variant, seed, folder / "a")
                if faults:
                    shutil.rmtree(folder / "b" / "floors")
                    without = padiff.compare_runs(folder / "a", folder / "b")
                    count, found, modelled = count + 1, found + (not report.passed), modelled + (not without.passed)
                    first = report.first_diff
                    at = f"{first.stage} {first.candidate}" if first is not None else ""
                    print(
                        f"{label:34s} measured {not report.passed!s:5}  modelled {not without.passed!s:5}  {at}",
                        flush=True,
                    )
                else:
                    shown(label, report, worst)
            except Exception as error:
                print(f"{label:34s} not done: {type(error).__name__}: {str(error)[:150]}", flush=True)
            finally:
                shutil.rmtree(folder)
    if faults:
        print(f"\n{count} faults: measured floors find {found}, the modelled limits {modelled}")
    else:
        summary(worst)


if __name__ == "__main__":
    began = time.time()
    what, chosen = sys.argv[1], sys.argv[2:]
    pairs(chosen) if what == "pairs" else programs(chosen, what == "faults")
    print(f"{time.time() - began:.0f} s; {RUNS} runs each")

"""Reports to look at: two toy runs with a planted fault, and reports as large as one likes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kit.records import memory_run, planted, toy_run

from padiff.compare import RunComparison, compare_runs
from padiff.records import Report
from padiff.report_formats import to_json

#: A layer's name that would run, were it taken for markup.
EVIL = "<script>alert(1)</script>"
STEPS = 6
#: Where the fault is planted: step, and site of either side.
STEP, REFERENCE, CANDIDATE = 3, "fc2/forward/output.0", "head/forward/output.0"


def plant(number: int = STEP) -> Any:
    return planted(CANDIDATE, lambda values: values + 0.5, at=number)


def report_of(evil: bool = False) -> Report:
    """Six steps, whose outputs part in step 3 at the last layer."""
    runs = [toy_run(range(STEPS)), toy_run(range(STEPS), paddle=True, plant=plant())]
    return compare_runs(*(_renamed(run) for run in runs) if evil else runs)


def content_of(evil: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(to_json(report_of(evil))))
    return content


def step_reports() -> list[Report]:
    """A report of each step, as a log folder gets them."""
    comparison = RunComparison(toy_run(range(STEPS)), toy_run(range(STEPS), paddle=True, plant=plant()))
    return [comparison.compare(number) for number in range(STEPS)]


def _renamed(run: Any) -> Any:
    """The run with a name that is markup in the place of the first linear layer's."""
    names = {"fc1": EVIL, "body.0": f"body.{EVIL}"}
    layers = tuple(replace(one, path=names.get(one.path, one.path), type=EVIL) for one in run.info.layers)
    steps = [
        replace(step, records=tuple(replace(r, layer=names.get(r.layer, r.layer)) for r in step.records))
        for number in run.numbers()
        for step in run.steps(number)
    ]
    return memory_run(replace(run.info, layers=layers, name=f"{run.info.name} {EVIL}"), *steps)


def large(layers: int, steps: int) -> dict[str, Any]:
    """A report of many layers and steps with the figures of a clean run; every figure has all of its digits."""
    found = content_of()
    pattern = next(diff for diff in found["steps"][1]["diffs"] if diff["reference"] == REFERENCE)
    stages = ("forward", "backward", "weight", "weight", "weight", "weight", "grad", "grad", "update", "update")
    found["steps"] = []
    for step in range(steps):
        diffs = []
        for number in range(layers):
            stage = stages[number % len(stages)]
            site = f"layer{number // 100}.{number // 10 % 10}.conv/{stage}/slot{number}"
            share = ((number * 7919 + step * 104729) % 9973 + 0.123456789012) / 9973
            figures = {name: share * (k + 1) / 3 for k, name in enumerate(("max_abs", "max_rel", "mean_abs", "rel_l2"))}
            judged = {**pattern["judged"], "value": share / 7, "limit": 1 / (share + 6)}
            norms = {"reference": share * 11, "candidate": share * 13}
            diffs.append({**pattern, "stage": stage, "reference": site, "candidate": site, **figures, "judged": judged})
            diffs[-1]["l2"] = norms
        found["steps"].append({"step": step, "passed": True, "diffs": diffs})
    return found

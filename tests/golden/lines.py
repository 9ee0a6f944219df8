"""What a comparison says of a pair of runs, as lines of text that two versions of padiff can be held to."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import padiff
from padiff.align import align
from padiff.compare import NoisePolicy, RunComparison, Tolerance, diagnose
from padiff.dump import open_run
from padiff.errors import PadiffError
from padiff.model.given_map import GivenMap
from padiff.records import Diff, FirstDiff, Report

PAIRS = Path(__file__).with_name("pairs.tar.xz")
EXPECTED = Path(__file__).with_name("expected.txt.xz")

_FIGURES = [
    "max_abs",
    "max_rel",
    "mean_abs",
    "mean_reference",
    "l2",
    "reference_l2",
    "candidate_l2",
    "bulk_l2",
    "size",
    "index",
    "values",
    "mismatched",
    "nonfinite",
    "overflowed",
    "basis",
    "spread",
]


def lines_of(folder: Path) -> tuple[list[str], Report | None]:
    """The limits, verdicts, first diff and messages of a pair of runs, one line for each thing that may change.

    Returns:
        The lines, and the report; `None` if the pair is refused.
    """
    meta = json.loads((folder / "pair.json").read_text())
    layer_map, policy = asked(meta)
    runs = [open_run(folder / side) for side in ("reference", "candidate")]
    try:
        report = padiff.compare_runs(*runs, layer_map=layer_map, policy=policy, stages=meta["stages"], workers=1)
    except PadiffError as error:
        return [f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")], None
    return [*_aligned(runs, layer_map), *(_diff(diff) for diff in report.diffs), *_sentences(report)], report


def asked(meta: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The layer map and the policy of a pair."""
    policy = eval(meta["policy"], {"NoisePolicy": NoisePolicy, "Tolerance": Tolerance})
    return [tuple(tuple(s) if isinstance(s, list) else s for s in pair) for pair in meta["layer_map"]], policy


def reports_of(folder: Path, meta: Mapping[str, Any]) -> list[Report]:
    """The reports of a comparison that sees one step after the other."""
    comparison = RunComparison(*(open_run(folder / side) for side in ("reference", "candidate")), *asked(meta))
    return [comparison.compare(number) for number in comparison.common()]


def live(reports: list[Report]) -> FirstDiff | None:
    """The first diff that a comparison has named by its end if it saw one step after the other."""
    first: Report | None = None
    for report in reports:
        if report.first_diff is not None and (first is None or diagnose.shows(report, first)):
            first = report
        if report.explained is not None and first is not None:
            first = replace(first, first_diff=report.explained)
    return None if first is None else first.first_diff


def _aligned(runs: list[Any], layer_map: Any) -> Iterator[str]:
    alignment = align(runs[0].info, runs[1].info, GivenMap.from_value(layer_map))
    yield from (f"align {line}" for line in str(alignment).splitlines())


def _diff(diff: Diff) -> str:
    pair, figures = diff.pair, diff.figures
    sides = [record.site if record is not None else None for record in (pair.reference, pair.candidate)]
    numbers = None
    if figures is not None:
        numbers = [getattr(figures, name) for name in _FIGURES]
        numbers[_FIGURES.index("values")] = tuple(figures.values)
    judged, limit, rule = ("", 0.0), None, ""
    if diff.judgement is not None:
        found = diff.judgement
        judged, limit, rule = (str(found.figure), found.value), found.limit, found.rule.name
    return (
        f"diff {pair.step} {sides[0]} {sides[1]} [{pair.layout}] {diff.passed} {limit!r} {judged!r} {rule} "
        f"[{diff.problem or ''}] {numbers!r}"
    )


def _sentences(report: Report) -> Iterator[str]:
    yield f"outcome {report.outcome}"
    first = report.first_diff
    if first is not None:
        yield f"first {first.step} {first.stage} {first.reference} {first.candidate} {first.slot} {first.max_abs!r}"
        yield f"cause {first.cause or ''}"
    yield from (f"told {line}" for line in str(report).splitlines())


def write_expected(lines: Mapping[str, list[str]]) -> None:
    """Write the golden file."""
    text = "".join(f"# {name}\n" + "".join(f"{line}\n" for line in found) for name, found in sorted(lines.items()))
    EXPECTED.write_bytes(lzma.compress(text.encode(), preset=9))


def read_expected() -> dict[str, list[str]]:
    """What the golden file says of each pair."""
    found: dict[str, list[str]] = {}
    for line in lzma.decompress(EXPECTED.read_bytes()).decode().split("\n")[:-1]:
        if line.startswith("# "):
            lines = found.setdefault(line[2:], [])
        else:
            lines.append(line)
    return found

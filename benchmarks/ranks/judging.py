"""What padiff says of a planted fault: of the run's own folder, or of the run beside its clean twin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import padiff
from padiff.compare.replicas import check_replicas

from .kit import Planted, Program


@dataclass(frozen=True)
class Said:
    step: int | None
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Row:
    """Of one fault: whether it was reported, at the right step, with the right rank and place, and why."""

    program: str
    fault: str
    alone: bool
    reported: bool
    step: bool
    rank: bool
    place: bool
    words: bool
    text: str


def findings(folder: Path) -> list[Said]:
    """Of one run's folder alone, as `padiff doctor` and the callbacks say it."""
    run = padiff.open_run(folder)
    found = check_replicas(run.info, [run.steps(number) for number in run.numbers()])
    return [Said(each.step, each.ranks, str(each)) for each in found]


def compared(reference: Path, candidate: Path) -> Said | None:
    report = padiff.compare_runs(reference, candidate)
    first = report.first_diff
    if first is None:
        return None if report.outcome == "match" else Said(None, (), f"outcome: {report.outcome}")
    return Said(first.step, () if first.rank is None else (first.rank,), first.message)


def rows(program: Program, folders: dict[str, Path]) -> Iterator[Row]:
    for fault in program.faults:
        yield _row(program, fault, folders)


def _row(program: Program, fault: Planted, folders: dict[str, Path]) -> Row:
    twin = fault.twin or program.clean[0]
    if fault.alone:
        quiet = {_shape(each) for each in findings(folders[twin])}
        said = [each for each in findings(folders[fault.name]) if _shape(each) not in quiet]
        first = min(said, key=lambda each: (each.step is None, each.step), default=None)
        same = [each for each in said if first is not None and each.step == first.step]
    else:
        first = compared(folders[twin], folders[fault.name])
        same = [first] if first is not None else []
    text = " ".join(each.text for each in same)

    def has(patterns: Any) -> bool:
        return not patterns or any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)

    return Row(
        program.name,
        fault.name,
        fault.alone,
        bool(same),
        bool(same) and first is not None and first.step == fault.step,
        bool(same) and (fault.rank is None or _names(same, fault.rank, program.world)),
        bool(same) and has((fault.places,) if fault.places else ()),
        bool(same) and has(fault.words),
        text,
    )


def _names(said: list[Said], rank: int, world: int) -> bool:
    """Whether the rank is the one that is said to depart; of two ranks, none is the odd one."""
    return all(rank in each.ranks if world == 2 else rank in each.ranks[-1:] and len(each.ranks) <= 2 for each in said)


def _shape(said: Said) -> tuple[object, ...]:
    return said.step, said.ranks, re.sub(r"[\d.e+-]+", "", said.text)


def alarms(program: Program, folders: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Clean trainings, and what was said of them though nothing is wrong."""
    for name in program.clean:
        yield name, " ".join(each.text for each in findings(folders[name]))

"""The figures of docs/performance.md and of the README, in both languages, as the benchmarks measured them.

A block is what stands in a page between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``; a benchmark replaces its
own:

    figures = keep("comparing", {"large tensors, of the floor": 0.52})
    write("comparing", lambda language: table(head[language], rows_in(language, figures)))

`keep` adds what a run of the benchmark measured to benchmarks/figures/NAME.json, so that a figure is a range over the
last `MOST` runs; on another machine, or with other versions, it begins anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
#: Runs over which a range is shown: enough to see how far a figure moves, and soon those of code that is no more.
MOST = 5

ENGLISH, CHINESE = "en", "zh"
#: Between the ends of a range.
_TO = {ENGLISH: " to ", CHINESE: " 到 "}
_NOT_MEASURED = {ENGLISH: "not measured", CHINESE: "未测量"}
_MACHINE = {ENGLISH: "{cores} cores of an {name}, {system}, Python {python}, {packages}"}
_MACHINE[CHINESE] = "{name} 的 {cores} 个核，{system}，Python {python}，{packages}"


@dataclass(frozen=True)
class Figures:
    """What the last runs of a benchmark measured.

    Attributes:
        machine: on what, by the parts of `machine`.
        values: by the name of a figure, one value for each run that measured it, the latest last.
    """

    machine: Mapping[str, str]
    values: Mapping[str, Sequence[float]]

    def text(self, name: str, language: str = ENGLISH, digits: int = 2) -> str:
        """A figure as the range over its runs: ``1.05 to 1.19``; one number where both ends read the same."""
        values = self.values.get(name)
        if not values:
            return _NOT_MEASURED[language]
        ends = [f"{value:,.{digits}f}" for value in (min(values), max(values))]
        return _TO[language].join(dict.fromkeys(ends))

    def measured_on(self, language: str = ENGLISH) -> str:
        """The machine and the versions, in words."""
        return _MACHINE[language].format(**self.machine)


def machine() -> dict[str, str]:
    """What figures depend on: processor, number of cores, system, versions of Python and the frameworks."""
    installed = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    packages = [f"{name} {installed[known]}" for name, known in _PACKAGES.items() if known in installed]
    return {
        "name": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": ", ".join(packages),
    }


_PACKAGES = {"numpy": "numpy", "torch": "torch", "paddle": "paddlepaddle"}


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep(name: str, measured: Mapping[str, float], folder: Path = FIGURES) -> Figures:
    """Add what a run of a benchmark measured to what is kept of it; returns all that is kept."""
    before, here = kept(name, folder), machine()
    values = {} if before is None or before.machine != here else dict(before.values)
    for figure, value in measured.items():
        values[figure] = [*values.get(figure, ()), value][-MOST:]
    folder.mkdir(exist_ok=True)
    text = json.dumps({"machine": here, "values": values}, indent=1, sort_keys=True)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return Figures(here, values)


def kept(name: str, folder: Path = FIGURES) -> Figures | None:
    """What is kept of a benchmark; `None` where it was not run yet."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return Figures(found["machine"], found["values"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def write(name: str, text: Callable[[str], str], page: str = "docs/performance.md", root: Path = ROOT) -> None:
    """Replace a block of a page and of its Chinese partner.

    Args:
        text: gives the block in a language, `ENGLISH` or `CHINESE`.
        page: relative to ``root``.

    Raises:
        ValueError: a page does not have the block once.
    """
    paths = {ENGLISH: root / page, CHINESE: root / _partner(page)}
    pages = {path: replaced(path.read_text(encoding="utf-8"), name, text(each)) for each, path in paths.items()}
    for path, whole in pages.items():
        path.write_text(whole, encoding="utf-8")


def replaced(page: str, name: str, text: str) -> str:
    """A page with another text in one of its blocks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page has to have one block that begins with {begin.strip()} and ends with {end}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"


def _partner(page: str) -> str:
    path = Path(page)
    return str(path.with_suffix(".zh.md") if path.parent == Path() else path.parent / "zh" / path.name)

"""What an entry of the page is, and how two models are trained for it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import padiff


@dataclass(frozen=True)
class Words:
    """The text of an entry in one language: its heading, what differs, and how both sides are made equal."""

    title: str
    what: str
    equal: str


@dataclass(frozen=True)
class Difference:
    """One difference between public libraries.

    Attributes:
        name: the word by which it is called on the command line.
        packages: what has to be installed, as pip calls it; their versions stand on the page.
        find: makes both runs, in a folder that is given, and returns what padiff says of them.
        shows: what that has to contain to be this difference.
        english, chinese: the text.
    """

    name: str
    packages: tuple[str, ...]
    find: Callable[[Path], str]
    shows: str
    english: Words
    chinese: Words

    def reproduced(self, said: str) -> bool:
        """Whether what padiff says is this difference, and not that the two match or part elsewhere."""
        return self.shows in said

    def missing(self) -> list[str]:
        return [name for name in self.packages if version(name) is None]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def verdict(report: padiff.Report) -> str:
    """One line: where the two part, and why."""
    return report.first_diff.message if report.first_diff is not None else "The runs match."


def train(model: Any, optimizer: Any, batches: Any, loss: Callable[[Any, Any], Any]) -> padiff.Report | Any:
    """A plain loop of either framework, recorded in memory."""
    clear = getattr(optimizer, "zero_grad", None) or optimizer.clear_grad
    with padiff.record(model, optimizer=optimizer) as rec:
        for inputs, labels in batches:
            loss(model(inputs), labels).backward()
            optimizer.step()
            clear()
            rec.try_dump()
    return rec.run

"""The pages of the documents, in both languages, and what they are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<kind>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) +(.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Page:
    """A page of Markdown.

    Attributes:
        path: of its file.
        text: all of it.
    """

    path: Path
    text: str

    @classmethod
    def of(cls, path: Path) -> Page:
        return cls(path, path.read_text(encoding="utf-8"))

    @property
    def prose(self) -> str:
        """The text without its blocks of code."""
        return _BLOCK.sub("", self.text)

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Each block of code, with its language."""
        return [(found["kind"], found["text"]) for found in _BLOCK.finditer(self.text)]

    @property
    def levels(self) -> list[int]:
        """The level of each heading."""
        return [len(marks) for marks, _ in _HEADING.findall(self.prose)]

    @property
    def rows(self) -> list[int]:
        """How many rows each table has."""
        lengths, length = [], 0
        for line in [*self.prose.splitlines(), ""]:
            if line.startswith("|"):
                length += 1
            elif length:
                lengths.append(length)
                length = 0
        return lengths

    @property
    def items(self) -> int:
        """How many items its lists have."""
        return len(re.findall(r"^ *(\*|\d+\.) ", self.prose, re.MULTILINE))

    @property
    def shown(self) -> list[str]:
        """Names of which the reference shows what their docstrings say."""
        return re.findall(r"^::: (\S+)$", self.prose, re.MULTILINE)

    @property
    def links(self) -> list[str]:
        """Files of the repository that it links to."""
        found = (link.partition("#")[0] for link in _LINK.findall(self.prose))
        return [link for link in found if link and "://" not in link]


def partners() -> list[tuple[Path, Path]]:
    """Every page in English with its partner in Chinese, which need not be there."""
    pages = [path for path in sorted(DOCS.rglob("*.md")) if "zh" not in path.relative_to(DOCS).parts]
    return [
        (ROOT / "README.md", ROOT / "README.zh.md"),
        *((path, DOCS / "zh" / path.relative_to(DOCS)) for path in pages),
    ]

"""The page of troubleshooting quotes messages as the packages print them, and covers all refusals."""

from __future__ import annotations

import re

import pytest

from .messages import Raised, nodes_of, occurs, raised, source_files, templates
from .pages import DOCS, ROOT, Page

PAGE = Page.of(DOCS / "troubleshooting.md")
_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_LETTER = re.compile(r"[a-z]")
#: Errors that a user gets to see.
ERRORS = {
    "AssignError",
    "CannotWriteError",
    "NothingToCompareError",
    "OptionError",
    "RunFolderError",
    "SelectionError",
    "SketchOnlyError",
    "StoreError",
    "TensorFileError",
    "TransferError",
    "UnwritableFolderError",
    "UsageError",
    "WriterError",
}
#: A quote of fewer letters would stand for any message.
FEWEST_LETTERS = 6


def _quotes(page: Page) -> list[str]:
    return _ROW.findall(page.prose)


@pytest.fixture(scope="module")
def printed() -> tuple[list[str], list[Raised]]:
    """All texts and all errors of the packages."""
    texts: list[str] = []
    errors: list[Raised] = []
    for path in source_files():
        nodes = nodes_of(path.read_text(encoding="utf-8"))
        texts += templates(nodes)
        errors += raised(nodes, str(path.relative_to(ROOT)))
    return texts, errors


@pytest.fixture
def texts(printed: tuple[list[str], list[Raised]]) -> list[str]:
    return printed[0]


def _untrue(quotes: list[str], texts: list[str]) -> list[str]:
    return [quote for quote in quotes if not occurs(quote, texts)]


def _uncovered(errors: list[Raised], quotes: list[str]) -> list[Raised]:
    return [
        each
        for each in errors
        if each.error in ERRORS
        and len(_LETTER.findall(each.text)) >= FEWEST_LETTERS
        and not any(occurs(quote, [each.text]) for quote in quotes)
    ]


def test_each_quoted_message_occurs_in_the_source(texts):
    assert len(_quotes(PAGE)) > 100
    assert not _untrue(_quotes(PAGE), texts)


def test_each_refusal_has_a_row(printed):
    _, errors = printed
    assert len({error.error for error in errors} & ERRORS) == len(ERRORS)
    assert not _uncovered(errors, _quotes(PAGE))


def test_both_languages_quote_the_same_messages():
    assert _quotes(Page.of(DOCS / "zh/troubleshooting.md")) == _quotes(PAGE)


def test_a_quote_that_nothing_prints_or_that_stands_for_all_is_seen(texts):
    assert _untrue(["the runs have no common stride"], texts) == ["the runs have no common stride"]
    assert not _untrue(["the runs have no common step: ... has"], texts)
    short = [quote for quote in _quotes(PAGE) if len(_LETTER.findall(quote)) < FEWEST_LETTERS]
    assert short == ["got ..."]  # all messages on the form of a value


def test_a_refusal_without_a_row_is_seen():
    error = Raised("padiff/a.py:1", "RunFolderError", "\0 is upside down")
    assert _uncovered([error], _quotes(PAGE)) == [error]
    assert not _uncovered([error], ["is upside ..."])


def test_docstrings_are_no_messages_and_values_stand_apart():
    source = 'def f(a):\n    """Return a."""\n    raise ValueError(f"{a} is " f"no {a}. " + "b")\n'
    assert "Return a." not in list(templates(nodes_of(source)))
    assert "\0 is no \0. b" in list(templates(nodes_of(source)))

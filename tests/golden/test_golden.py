"""Limits, verdicts, first diffs and messages of the pairs of runs that tests compare: as they were, to the bit.

What changes on purpose changes the file, too: ``PYTHONPATH=tests:. python -m golden.collect FOLDER`` writes it anew,
from the pairs in a folder (``tar -xf tests/golden/pairs.tar.xz -C FOLDER``).
"""

from __future__ import annotations

import io
import json
import lzma
import math
import re
import tarfile
from collections import defaultdict

import pytest
from kit.schema import violations

from padiff.records import STAGES
from padiff.records.diagnostic import (
    LARGEST,
    Diagnostic,
    diagnostic_json,
    diagnostic_of,
    diagnostic_schema,
    position_text,
)
from padiff.records.diagnostic_text import columns, diagnostic_text
from padiff.system.language import translated
from padiff_cli.commands.watch import _Watched

from .lines import PAIRS, lines_of, live, read_expected, reports_of

SCHEMA = diagnostic_schema()

#: Other processors add up in another order: numpy's sums of float32 are then some 1e-7 off.
_OTHER_PROCESSOR = 1e-5
#: Limits of two rules that are the same number, calculated in two ways: which is the larger one is then rounding.
_TIED = 1e-9

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
_LIMIT = re.compile(r" (?:True|False) (?P<limit>[-+.e\d]+) \('\w+', [^)]*\) (?P<rule>[A-Z_]+) ")
# A share of rounding noise, in two digits: it is made of what is lost in rounding.
_BELOW_NOISE = re.compile(r"agree to 0\.\d+ times the rounding noise")

EXPECTED = read_expected()


@pytest.fixture(scope="module")
def pairs():
    """The archive, and its members by pair. Each test extracts its own: processes share the tests out."""
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(PAIRS.read_bytes()))) as archive:
        members = defaultdict(list)
        for member in archive:
            members[member.name.partition("/")[0]].append(member)
        yield archive, members


def _as_expected(line: str, expected: str) -> bool:
    if line == expected:
        return True
    line, expected = (_BELOW_NOISE.sub("agree", each) for each in (line, expected))
    limits = [_LIMIT.search(each) for each in (line, expected)]
    if all(limits) and math.isclose(*(float(found["limit"]) for found in limits), rel_tol=_TIED):
        line, expected = (
            f"{each[: found.start('rule')]}{each[found.end('rule') :]}" for each, found in zip((line, expected), limits)
        )
    if _NUMBER.sub("", line) != _NUMBER.sub("", expected):
        return False
    numbers = zip(map(float, _NUMBER.findall(line)), map(float, _NUMBER.findall(expected)))
    return all(math.isclose(a, b, rel_tol=_OTHER_PROCESSOR) for a, b in numbers)


def test_all_outcomes_are_among_the_pairs():
    outcomes = {line for lines in EXPECTED.values() for line in lines if line.startswith("outcome")}
    assert outcomes == {"outcome match", "outcome differ", "outcome cannot tell"}
    assert len(EXPECTED) > 300


@pytest.mark.parametrize("name", EXPECTED)
def test_a_pair_is_reported_as_it_was_in_all_forms_and_live(pairs, name, tmp_path):
    archive, members = pairs
    archive.extractall(tmp_path, members[name], filter="fully_trusted")
    folder = tmp_path / name
    lines, report = lines_of(folder)
    assert [(a, b) for a, b in zip(EXPECTED[name], lines) if not _as_expected(b, a)] == []
    assert len(lines) == len(EXPECTED[name])
    if report is None:
        return
    diagnostic = diagnostic_of(report)
    text = diagnostic_json(diagnostic)
    assert len(text) <= LARGEST and violations(json.loads(text), SCHEMA, SCHEMA) == []
    assert all(len(line) <= 80 for line in report.text(80).splitlines() if not line.startswith("  fix"))
    assert [text for text in told(diagnostic) if english(translated(text, to="zh"))] == []
    chinese = diagnostic_text(diagnostic, 80, "zh").splitlines()
    assert all(columns(line) <= 80 for line in chinese if not line.startswith("  修复"))
    meta = json.loads((folder / "pair.json").read_text())
    if len(meta["stages"] or STAGES) == len(STAGES):
        reports, watched = reports_of(folder, meta), _Watched(80)
        for one in reports:
            watched.add(one, known=False)
        first = live(reports)
        expected = report.first_diff and position_text(report.first_diff)
        assert (first and position_text(first)) == expected and watched.first == (expected or "")


def told(diagnostic: Diagnostic) -> list[str]:
    """The sentences of a diagnostic."""
    texts = [diagnostic.follows, diagnostic.closest, diagnostic.moved, *diagnostic.notes]
    for fault in diagnostic.all_faults:
        texts += [fault.where, fault.size, fault.cause and fault.cause.text, fault.fix and fault.fix.text]
    return [text for text in texts if text]


def english(text: str) -> bool:
    """Whether a text is an English sentence: two lowercase words in a row, outside of code."""
    return re.search(r"(?<![\w.`'])[a-z]{2,} [a-z]{2,}(?![\w.(=])", re.sub("reference|candidate", "", text)) is not None


def test_an_english_sentence_is_seen():
    assert english("all inputs agree: 0.1") and english("fc1.weight 是 the same")
    assert not english("fc1.weight 对 body.0，限值 0.1") and not english("torch.nn.BatchNorm2d(..., momentum=0.1)")


def test_another_limit_is_seen():
    assert _as_expected("1 True 3.0000000000000001e-05 x", "1 True 3.00000000001e-05 x")
    assert not _as_expected("1 True 3.1e-05 x", "1 True 3.0e-05 x")
    assert not _as_expected("1 False 3.0e-05 x", "1 True 3.0e-05 x")


def test_another_rule_is_seen_but_where_two_have_the_same_limit():
    line = "diff 7 a/grad/w b/grad/w [] True 0.030065730784906222 ('rel_l2', 9.7e-08) LAYER [] [2.9e-08]"
    other = line.replace("LAYER", "INHERITED")
    assert _as_expected(other.replace("784906222", "78369397"), line)
    assert not _as_expected(other.replace("784906222", "884906222"), line)
    assert not _as_expected(other.replace("2.9e-08", "3.0e-08"), line)

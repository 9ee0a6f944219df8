"""Messages in Chinese, and the table that they are in."""

from __future__ import annotations

import ast
import io
import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from kit.records import planted, toy_run
from rich.console import Console

import padiff
from padiff import compare_runs
from padiff.records.diagnostic_text import columns
from padiff.report_formats import to_json, to_junit, to_markdown
from padiff.system.language import language, messages, translated, writes_chinese
from padiff_hooks.show import print_report

SOURCE = Path(padiff.__file__).parent
#: Where messages of the block are written, and what of them it does not show: evidence, and names of what was excluded.
ROOMS = ("compare/diagnose", "compare/declared", "records/diagnostic.py", "records/diagnostic_text.py")
NOT_SHOWN = Path(__file__).with_name("english.txt")
TABLE = [*messages()]


def written(folder: str) -> Iterator[str]:
    """The messages in the code of a folder or file, with a number for each value."""
    path = SOURCE / folder
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        tree, skipped = ast.parse(file.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                skipped.add(node.value)  # a docstring
            elif isinstance(node, (ast.Raise, ast.Assert)):
                skipped |= {*ast.walk(node)}
            elif isinstance(node, ast.JoinedStr):
                skipped |= {*node.values}
        for node in ast.walk(tree):
            if node in skipped:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "7" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"\{\w*\}", "7", node.value)


def test_each_message_of_the_code_is_in_the_table():
    sentences = {text for room in ROOMS for text in written(room) if re.search(r"[a-z]{2,},? [a-z]", text)}
    missing = {text for text in sentences if translated(text, to="zh") == text}
    assert sorted(missing) == NOT_SHOWN.read_text().split("\n")[:-1], "translate it in padiff/system/zh.po"


def test_each_message_of_the_table_is_in_the_code():
    code = "\n".join(text for room in ("", "../padiff_hooks", "../padiff_cli") for text in written(room)).lower()
    static = SOURCE.parent / "padiff_page" / "static"
    code += "\n".join(file.read_text() for file in sorted(static.glob("*.js"))).lower()
    # Some are put together of several texts: most pairs of neighbouring words are then in one of them.
    for _, message, _ in TABLE:
        parts = [part.split() for part in re.split(r"\{\w+\}", message.lower())]
        pairs = [" ".join(pair) for words in parts for pair in pairwise(words)]
        found = sum(pair in code for pair in pairs)
        short = len(pairs) < 3 and all(word.strip("():") in code for words in parts for word in words)
        assert short or found >= max(0.6 * len(pairs), 1), f"no code writes {message!r} any more"


def test_each_translation_has_the_values_of_its_message():
    assert len({entry[:2] for entry in TABLE}) == len(TABLE) > 600
    for _, message, translation in TABLE:
        assert translation.strip(), message
        assert {*re.findall(r"\{(\w+)\}", translation)} <= {*re.findall(r"\{(\w+)\}", message)}, message


def test_the_table_is_a_file_of_gettext(tmp_path):
    entries = {(context, message): translation for context, message, translation in TABLE}
    file = tmp_path / "x.po"
    head, more = 'msgid ""\nmsgstr "Language: zh"\n\n# a remark\n', 'msgid ""\n"two "\n"lines"\nmsgstr "\\"x\\""\n'
    file.write_text(f'{head}msgctxt "label"\n{more}')
    assert [*messages(file)] == [("label", "two lines", '"x"')]
    assert entries["label", "cause"] == "原因"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "PADIFF_LANG": "en"}, "en"),
        ({"LANG": "de_DE.UTF-8", "PADIFF_LANG": "ZH"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "PADIFF_LANG": ""}, "zh"),
    ],
)
def test_the_language_is_that_of_the_variable_else_of_the_locale(environment, expected):
    assert language(environment) == expected


def test_a_stream_that_has_no_chinese_characters_gets_english():
    assert [writes_chinese(each) for each in ("utf-8", "gbk", "ascii", "latin-1", "nothing")] == [
        True,
        True,
        *[False] * 3,
    ]


def test_values_stay_as_they_are():
    assert (
        translated("the layers are set differently: eps 1e-05 against 0.001", to="zh")
        == "两侧层的设置不同：eps 1e-05 对 0.001"
    )
    assert translated("shapes differ: (4, 10) against (4, 12)", to="zh") == "形状不同：(4, 10) 对 (4, 12)"
    assert translated("the input weight", to="zh") == "输入 weight"


def test_what_the_table_does_not_have_stays_english():
    for text in (
        "the moon is full",
        "the moon is full.",
        "(the moon) is full.",
        "the layers are set differently: the moon is full",
        "",
        "fc1.weight",
    ):
        assert translated(text, to="zh") == text
    assert translated("the loss", to="en") == "the loss"


def test_a_hostile_name_takes_no_time():
    begin = time.process_time()
    for name in (" against " * 160, "; the " * 240, ", and (" * 200, "a. b: " * 240):
        translated(f"the output is {name}", to="zh")
    assert time.process_time() - begin < 10


@pytest.fixture
def bad():
    return compare_runs(toy_run(), toy_run(paddle=True, plant=planted("head/grad/weight", lambda v: v + 1, at=1)))


def test_people_read_chinese_and_machines_english(bad, monkeypatch):
    english = bad.text(80), to_markdown(bad), to_json(bad), to_junit(bad), json.dumps(bad.brief())
    monkeypatch.setenv("PADIFF_LANG", "zh")
    chinese = bad.text(80), to_markdown(bad), to_json(bad), to_junit(bad), json.dumps(bad.brief())
    assert chinese[2:] == english[2:]
    assert "原因" in chinese[0] and "cause" not in chinese[0] and "原因" in chinese[1]
    assert "不一致" in bad._repr_html_()
    assert max(columns(line) for line in chinese[0].splitlines()) <= 80 < max(map(columns, chinese[1].splitlines()))


def test_the_evidence_is_chinese_too(bad, monkeypatch):
    monkeypatch.setenv("PADIFF_LANG", "zh")
    stream = io.StringIO()
    print_report(bad, Console(file=stream, width=120), details=True)
    details = stream.getvalue().split("\n\n", 1)[1]
    tree = [line for line in details.splitlines() if "(toy" in line or "|---" in line or "+---" in line]
    english = re.sub(r"max \|diff\|", "", "\n".join(line for line in details.splitlines() if line not in tree))
    assert not re.findall(r"\b[a-z]{3,} (?!float32)[a-z]{3,} [a-z]{3,}\b", english)
    assert (
        "对不一致，按因果顺序" in details
        and "两次运行首次不一致" in details
        and "占所比较 step 中录制内容的" in details
    )

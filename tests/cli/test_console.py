"""What a person sees on a terminal: colours, what comes first and last, and names that would steer the terminal."""

from __future__ import annotations

import html
import os
import pty
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hard.children import started
from kit.forking import python_with_frameworks
from kit.records import info, memory_run, plain, planted, record, root, step, toy_folder

from padiff import Report, compare_runs
from padiff.records import printable, verdict
from padiff.report_formats import to_junit, to_markdown
from padiff.system.terminal import coloured
from padiff_cli.main import main
from padiff_hooks.outputs import console_for
from padiff_hooks.show import print_report

SMALL = planted("body.0/forward/output.0", lambda v: v + 1e-3, at=1)
ROOT = Path(__file__).resolve().parents[2]
# It sets a terminal's title, clears it, and is red; it turns the direction, goes back in its line, and ends it.
EVIL = "a\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m\u202e\rb\nMATCH"


@pytest.fixture
def bad(tmp_path: Path) -> list[str]:
    """Two runs whose forward is 1e-3 apart at step 1."""
    return [str(toy_folder(tmp_path / "reference")), str(toy_folder(tmp_path / "candidate", paddle=True, plant=SMALL))]


def named(name: str) -> Report:
    """Two runs that part in a layer of this name."""
    tree = info(root(2), plain("before", "relu"), plain(name, "relu"))

    def run(value: float):
        records = [record("before", "forward", "output.0", np.ones(4))]
        return memory_run(tree, step(0, [*records, record(name, "forward", "output.0", np.asarray([1.0, value]))]))

    return compare_runs(run(2.0), run(3.0))


def on_a_terminal(arguments: list[str], **environment: str) -> str:
    """What a command writes to a terminal of 100 columns."""
    master, slave = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100"} | environment
    command = [*python_with_frameworks(), "-m", "padiff_cli.main", *arguments]
    with started(command, stdout=slave, stderr=slave, stdin=slave, env=environ) as process:
        os.close(slave)
        parts = []
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
        process.wait(timeout=60)
    os.close(master)
    return b"".join(parts).decode().replace("\r\n", "\n")


# -- colours -----------------------------------------------------------------------------------------------------------


def test_a_terminal_gets_colours_and_no_color_none(bad):
    reported = on_a_terminal(["compare", *bad])
    assert re.search(r"\x1b\[1;31mstep 1, forward: fc1 against body\.0", reported), reported
    assert "\x1b[2mtorch (reference) against paddle (candidate): 66 tensors" in reported
    reported = on_a_terminal(["compare", *bad, "-v"])
    assert "\x1b[1;31m<---  *** HERE ***\x1b[0m" in reported
    # No escape codes at all, other than those of what shows how far it is.
    plain_ = on_a_terminal(["compare", *bad], NO_COLOR="1").rpartition("DIFFER  ")
    assert plain_[1] and "\x1b" not in plain_[2]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "0"}, False),
     ({"NO_COLOR": "", "FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)  # fmt: skip
def test_pipes_get_colours_only_where_they_are_forced(environment, expected, bad, monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["compare", *bad]) == 1
    out = capsys.readouterr().out
    assert ("\x1b[1;31mDIFFER" in out) == expected and ("\x1b" in out) == expected
    # Colours only: nothing that moves a cursor or hides it.
    assert re.findall(r"\x1b(?!\[[0-9;]*m)", out) == []


def test_a_closed_stream_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with open(tmp_path / "file", "w") as stream:
        assert not coloured(stream)
    assert not coloured(stream)


# -- what comes first, and last ----------------------------------------------------------------------------------------


def test_the_verdict_is_first_and_last_and_ten_lines_say_what_differs(bad, tmp_path, capsys):
    rng = np.random.default_rng(0)

    def plant(seen, number):
        return seen.value + rng.normal(size=seen.value.shape) if seen.stage in ("grad", "forward", "weight") else None

    runs = [str(toy_folder(tmp_path / "a")), str(toy_folder(tmp_path / "b", paddle=True, plant=plant))]
    assert main(["compare", *runs, "-v"]) == 1
    lines = capsys.readouterr().out.splitlines()
    report = compare_runs(*runs)
    assert lines[0].split() == ["DIFFER", "step", "0,", "weight:", "fc1.weight", "against", "body.0"]
    assert lines[-1] == verdict(report)
    start = next(k for k, line in enumerate(lines) if "pairs differ, in causal order" in line)
    assert 2 <= lines.index("", start) - start <= 11
    assert str(report).splitlines()[0] == lines[0] and str(report).splitlines()[-1] == verdict(report)
    match = [runs[0], str(toy_folder(tmp_path / "c"))]
    capsys.readouterr()
    assert main(["compare", *match, "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "MATCH   66 tensors in 3 steps, 100% of what was recorded"
    assert lines[-1].startswith("The runs match: 66 tensors in 3 steps compared")


def test_the_lines_of_what_differs_are_short_and_all_has_the_rest(bad, capsys):
    assert main(["compare", *bad, "-v"]) == 1
    short = capsys.readouterr().out
    report = compare_runs(*bad)
    [diff] = report.failed
    reported = f"relative L2 {diff.figures.rel_l2:.3g}, {diff.excess:.3g} times the limit  (first difference)"
    assert f"\n  step 1  fc1/forward/output.0: {reported}\n" in short
    assert main(["compare", *bad, "--all"]) == 1
    assert f"\n  {diff}  (first difference)\n" in capsys.readouterr().out


def test_both_trees_show_the_place(bad, capsys):
    assert main(["compare", *bad, "-v"]) == 1
    out = capsys.readouterr().out
    both = [line for line in out.splitlines() if "*** HERE ***" in line]
    assert sum(line.count("*** HERE ***") for line in both) == 2
    assert any("(fc1) Linear    <---" in line for line in both) and any("(0) Linear    <---" in line for line in both)
    assert all(mark in str(compare_runs(*bad)) for mark in ("(fc1) Linear    <---", "(0) Linear    <---"))


def test_long_trees_show_what_is_around_the_place():
    layers = [plain(f"r{k}", "relu") for k in range(50)]
    tree = info(root(50), *layers)

    def run(value: float):
        return memory_run(tree, step(0, [record("r25", "forward", "output.0", np.asarray([1.0, value]))]))

    text = str(compare_runs(run(2.0), run(3.0)))
    assert "(r22)" in text and "(r28)" in text and "(r21)" not in text and "(r29)" not in text


# -- names that come from others ---------------------------------------------------------------------------------------


def test_control_characters_of_names_do_not_reach_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    report = named(EVIL)
    assert not report.passed
    for everything in (False, True):
        print_report(report, console_for(), everything=everything)
    print_report(report, console_for(), top=3)
    print(report)
    out = capsys.readouterr().out
    assert r"a\x1b]0;owned\x07\x1b[2J" in out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert not [line for line in out.splitlines() if line.startswith("MATCH")]


def test_what_is_printable_is_left_alone():
    assert printable("größe 日本 😀 [v1] a/b#1") == "größe 日本 😀 [v1] a/b#1"
    assert printable("a\nb\tc\x9b", lines=True) == "a\nb\\tc\\x9b" and printable("a\nb") == "a\\nb"
    assert printable("\ud800\u2028") == "\\ud800\\u2028"


def test_junit_stays_well_formed_whatever_layers_are_called():
    for name in (EVIL, "a\x00\x08\ufffe\ud800b", "<failure/>&\"'"):
        suite = ElementTree.fromstring(to_junit(named(name)).encode("utf-8"))
        assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    [case] = [case for case in suite if case.find("failure") is not None]
    assert case.get("name") == "<failure/>&\"'/forward/output.0"


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>", "[x](javascript:alert(1))", "![x](http://x/y.png)", "<http://x>", "a|b", "`x",
        "`x`<b>`", "*x*", "__x__", "~~x~~", "@someone", "https://x", "</details>", "&lt;b>", "x](y", "a\\`b", "$x$",
    ],
)  # fmt: skip
def test_names_are_text_in_markdown(name):
    text = to_markdown(named(name))
    # Whatever is code is as it is; of the rest nothing is a tag, a link or an image.
    inside, code = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            code = not code
        elif not code:
            inside.append(re.sub(r"(?<!\\)`[^`]+`", "", line))
    outside = "\n".join(inside)
    allowed = {"<details>", "</details>", "<summary>", "</summary>", "<!-- -->"}
    assert set(re.findall(r"(?<!\\)<[^>\s][^>]*>", outside)) <= allowed
    assert outside.count("<details>") == outside.count("</details>")
    assert not re.search(r"(?<!\\)\]\(", outside) and "://" not in outside and not re.search(r"@\w", outside)
    assert not re.search(r"(?<!\\)[*~$]{1}x", outside)
    rows = [line for line in inside if line.startswith("| ")]
    assert rows and {line.replace("\\|", "").count("|") for line in rows} <= {5, 7, 8}
    if not set(name) & set("`|\\"):
        shown = html.unescape(re.sub(r"\\(?=[\W_])", "", outside.replace("<!-- -->", "")))
        assert f"{name}/forward/output.0" in shown


def test_markdown_lists_what_differs_and_folds_the_rest():
    text = to_markdown(named("last"))
    lines = text.splitlines()
    assert lines[0] == "## padiff: differ" and lines[2:4] == ["```text", "DIFFER  step 0, forward: last"]
    assert "| step | where | what |  |" in lines
    [row] = [line for line in lines if line.startswith("| step 0 | last/forward/output.0 | max \\|diff\\| 1, ")]
    assert row.endswith("| first difference |")
    summaries = re.findall(r"<summary>(.*)</summary>\n\n", text)
    assert summaries == ["Where it is in both models", "What was compared, and how", "The evidence"]
    match = compare_runs(
        *[memory_run(info(root(1), plain("a", "relu")), step(0, [record("a", "forward", "output.0", [1])]))] * 2
    )
    assert "| step | where |" not in to_markdown(match) and "MATCH   1 tensors in 1 step" in to_markdown(match)

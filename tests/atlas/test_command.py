"""`padiff atlas`, the shipped table and the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hard.children import run_child
from kit.forking import python_with_frameworks

import padiff_atlas.command
from padiff.compare.diagnose.known_differences import Atlas, AtlasRow, known_difference, shipped_atlas
from padiff.records import Both
from padiff_atlas.changes import changes
from padiff_atlas.changes_page import changes_markdown
from padiff_atlas.probe import Group, Probe
from padiff_atlas.table import difference_text, markdown
from padiff_cli.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "atlas.md"
ANEW = (
    "write it anew: padiff atlas --json padiff/compare/diagnose/known.json --markdown docs/atlas.md; "
    "python docs/zh/write_atlas.py"
)


@pytest.mark.slow
def test_the_shipped_table_is_what_the_probes_find(atlas):
    shipped = shipped_atlas()
    assert shipped.versions == atlas.versions, ANEW
    assert [row.name for row in shipped.rows] == [row.name for row in atlas.rows], ANEW
    assert list(changes(shipped, atlas)) == [], ANEW
    texts = ("group", "operations", "formula", "note")
    assert [[getattr(row, name) for name in texts] for row in shipped.rows] == [
        [getattr(row, name) for name in texts] for row in atlas.rows
    ], ANEW


def test_the_page_is_the_shipped_table():
    assert PAGE.read_text(encoding="utf-8") == markdown(shipped_atlas()), ANEW


ROW = AtlasRow(
    "loss", "losses", ("loss",), "torch.loss()", "paddle.loss()", "values", ("2", "1"), 0.5, 1.0, 0.5, "-",
    mended="paddle.loss(2)", mended_agrees=True, formula="2", agrees="torch", note="half of it",
)  # fmt: skip


def table(*rows: AtlasRow) -> Atlas:
    return Atlas(Both("1", "2"), rows)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"rel_l2": 0.6, "at": ("2.01", "1.01"), "max_abs": 1.1, "ratio": 0.501}, None),
        ({"ratio": 0.6}, "paddle's is 0.6 times torch's, it was paddle's is 0.5 times torch's"),
        ({"ratio": None}, "relative L2 0.5: 2 against 1, it was"),
        ({"direction": "+"}, "it was"),
        ({"direction": "±"}, None),
        ({"kind": "same"}, "same, it was paddle's is 0.5 times torch's"),
        ({"kind": "raises", "at": ("runs", "raises ValueError")}, "paddle raises ValueError, it was"),
        ({"mended_agrees": False}, "the call that should agree does not"),
        ({"agrees": "both"}, "float64 agrees with both, it was torch"),
        ({"torch": "torch.loss(1)"}, "another call"),
    ],
)
def test_what_changes_between_two_tables_is_reported_but_for_rounding(change, reported):
    found = list(changes(table(ROW), table(dataclasses.replace(ROW, **change))))
    assert (
        (found == [])
        if reported is None
        else (len(found) == 1 and found[0].new.name == "loss" and reported in found[0].what)
    )


def test_the_page_of_changes_says_whose_they_are_and_escapes_what_it_is_given():
    old, new = Atlas(Both("1", "2"), (ROW,)), Atlas(Both("1", "3"), (dataclasses.replace(ROW, ratio=0.6),))
    page = changes_markdown(old, new, list(changes(old, new)))
    assert "# What changed: Torch 1 and Paddle 2 to 3" in page and "so each change is paddle's" in page
    assert "1 of 1 probes changed" in page
    row = next(line for line in page.splitlines() if line.startswith("| loss"))
    assert row.endswith("| paddle's is 0.5 times torch's | paddle's is 0.6 times torch's |")
    both = Atlas(Both("0", "3"), (dataclasses.replace(ROW, ratio=0.6, name="a|b"), dataclasses.replace(ROW, name="n")))
    page = changes_markdown(Atlas(Both("1", "2"), (dataclasses.replace(ROW, name="a|b"),)), both, [])
    assert "a row does not say whose change it is" in page and "Not in the older table: n." in page
    found = list(changes(Atlas(Both("1", "2"), (dataclasses.replace(ROW, name="a|b"),)), both))
    assert "| a\\|b |" in changes_markdown(old, both, found)


def test_a_change_of_the_advice_alone_says_so_on_the_page():
    old, new = table(ROW), table(dataclasses.replace(ROW, mended_agrees=False))
    page = changes_markdown(old, new, list(changes(old, new)))
    assert "| paddle's is 0.5 times torch's | the call that should agree does not |" in page


def test_a_difference_that_grows_is_reported_where_no_ratio_is():
    old = dataclasses.replace(ROW, ratio=None)
    assert not list(changes(table(old), table(dataclasses.replace(old, rel_l2=1.0))))
    assert list(changes(table(old), table(dataclasses.replace(old, rel_l2=5.0))))
    assert list(changes(table(old), table(dataclasses.replace(old, rel_l2=float("inf")))))


def test_a_table_reads_as_it_was_written():
    endless = dataclasses.replace(ROW, name="endless", rel_l2=float("inf"), max_abs=None, ratio=None)
    atlas = table(ROW, endless, AtlasRow("same", "losses", (), "a", "b", rel_l2=0.0))
    assert Atlas.from_json(json.loads(atlas.to_json())) == atlas


def test_known_differences_are_found_by_either_framework_s_names():
    def names(operation: str) -> set[str]:
        return {row.name for row in known_difference(operation)}

    assert "BatchNorm2d, running_mean after a step" in names("BatchNorm2D") == names("batchnorm2d")
    assert names("BatchNorm2D") == names("batch_norm") == names("SyncBatchNorm") == names("BatchNorm3d")
    assert names("avg_pool2d") == names("AvgPool2D") == {"AvgPool2d, padded", "AvgPool2d, padded, ceil_mode"}
    assert "cross_entropy, ignored labels, mean" in names("CrossEntropyLoss") == names("cross_entropy")
    assert names("SmoothL1Loss") == names("smooth_l1_loss") >= {"smooth_l1_loss, beta 0.5", "SmoothL1Loss, beta 0.5"}
    assert {"Adamax"} <= names("Adamax") and {"RMSprop"} <= names("RMSProp")
    assert {"MultiheadAttention, boolean mask"} <= names("MultiHeadAttention")
    assert {"embedding, padding_idx"} <= names("Embedding")
    assert {"clip by global norm"} <= names("ClipGradByGlobalNorm") & names("clip_grad_norm_")
    assert names("Adam") == names("gelu") == names("no such thing") == set()
    assert all(row.differs for row in known_difference("cross_entropy"))


def test_differences_read_as_text():
    assert difference_text(ROW) == "paddle's is 0.5 times torch's"
    assert difference_text(dataclasses.replace(ROW, ratio=None)) == "relative L2 0.5: 2 against 1"
    assert (
        difference_text(dataclasses.replace(ROW, ratio=None, rel_l2=float("inf"), at=("0", "nan"))) == "0 against nan"
    )
    assert difference_text(dataclasses.replace(ROW, kind="shapes", at=("[2]", "[]"))) == "[2] against []"


def test_a_page_marks_a_call_that_does_not_agree_and_keeps_its_columns():
    bad = dataclasses.replace(ROW, name="a | b", torch="torch.a(x | y)\ntorch.b()", mended_agrees=False)
    line = next(line for line in markdown(table(bad)).splitlines() if line.startswith("| a"))
    assert line == (
        "| a \\| b<br>half of it | `torch.a(x \\| y); torch.b()` | `paddle.loss()` | paddle's is 0.5 times torch's; "
        "float64 agrees with torch | should agree and does not: `paddle.loss(2)` |"
    )


# -- the command


def groups(*probes: Probe) -> tuple[Group, ...]:
    return (Group("planted", probes, {"x": shipped_inputs()}), Group("other", (), {}))


def shipped_inputs():
    import numpy as np

    return np.array([[3.0, -1.0], [0.5, 2.0]])


GOOD = Probe("mean for sum", "x.sum()", "x.mean()", mended="x.sum()", note="planted")
BAD = Probe("wrong advice", "x.sum()", "x.mean()", mended="x.sum() + 1")


def test_the_command_prints_and_writes_what_differs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(padiff_atlas.command, "GROUPS", groups(GOOD, Probe("sum", "x.sum()")))
    outputs = ("--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md"))
    assert main(["atlas", "--only", "planted", *outputs]) == 0
    printed = capsys.readouterr().out
    assert "mean for sum: paddle's is 0.25 times torch's" in printed and "1 of 2 probes differ" in printed
    assert "    torch   x.sum()\n    paddle  x.mean()\n    so      x.sum()\n    why     planted\n" in printed
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["schema_version"] == 1 and values["versions"]["torch"].startswith("2.") and values["differ"] == 1
    assert [(row["name"], row["kind"]) for row in values["probes"]] == [("mean for sum", "values"), ("sum", "same")]
    assert "The same: sum." in (tmp_path / "a.md").read_text()


def test_the_command_fails_where_its_advice_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(padiff_atlas.command, "GROUPS", groups(GOOD, BAD))
    assert main(["atlas"]) == 1
    printed = capsys.readouterr().out
    assert "should agree and does not: x.sum() + 1" in printed
    assert "Calls that should agree and do not: wrong advice." in printed


def test_the_command_says_what_is_unlike_the_shipped_table(monkeypatch, capsys):
    probe = Probe("gelu", "x.sum()", "x.mean()")
    monkeypatch.setattr(padiff_atlas.command, "GROUPS", groups(probe))
    assert main(["atlas"]) == 0
    assert "Unlike torch 2.13.0 and paddle 3.3.1: gelu: another call" in capsys.readouterr().out


def test_the_command_says_what_is_unlike_a_table_of_other_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(padiff_atlas.command, "GROUPS", groups(Probe("sum", "x.sum()", "x.mean()")))
    assert main(["atlas", "--json", str(tmp_path / "old.json")]) == 0
    old = json.loads((tmp_path / "old.json").read_text())
    old["versions"]["torch"] = "1.0"
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert main(["atlas", "--changes", str(tmp_path / "old.json")]) == 0
    assert "Unlike" not in capsys.readouterr().out
    monkeypatch.setattr(padiff_atlas.command, "GROUPS", groups(Probe("sum", "x.sum()", "x.sum()")))
    assert main(["atlas", "--changes", str(tmp_path / "old.json")]) == 0
    assert "Unlike torch 1.0 and paddle 3.3.1: sum: another call" in capsys.readouterr().out
    assert main(["atlas", "--changes", str(tmp_path / "old.json"), "--markdown", str(tmp_path / "new.md")]) == 0
    assert "# What changed: Torch 1.0 to 2.13.0 and Paddle 3.3.1" in (tmp_path / "new.md").read_text()
    for text in ("[]", "{", '{"versions": {}, "probes": [1]}'):
        (tmp_path / "old.json").write_text(text)
        assert main(["atlas", "--changes", str(tmp_path / "old.json")]) == 2
        assert "is no table that padiff atlas --json wrote" in capsys.readouterr().err


@pytest.mark.parametrize("other", [("--json", "-"), ("--markdown", "-")])
def test_a_table_on_standard_output_is_all_there(monkeypatch, capsys, other):
    monkeypatch.setattr(padiff_atlas.command, "GROUPS", groups(GOOD))
    assert main(["atlas", *other]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(("{", "# ")) and "1 of 1 probes differ" in err


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--only", "loses"), "no group of probes is called 'loses'"),
        (("--json", "-", "--markdown", "-"), "only one of --json and --markdown can go to standard output"),
        (("--json", "no/such/folder/a.json"), "there is no folder"),
    ],
)
def test_misuse_has_exit_code_2_and_is_reported_before_anything_runs(capsys, arguments, reported):
    assert main(["atlas", *arguments]) == 2
    assert reported in capsys.readouterr().err


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from padiff_cli.main import main
sys.exit(main(["atlas", "--only", "dropout"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), [("torch", "paddle"), ("paddle", "torch")])
def test_a_missing_framework_has_exit_code_2_and_says_how_to_get_it(name, other):
    done = run_child([*python_with_frameworks(only=other), "-W", "ignore", "-c", BLOCKED.format(name=name)])
    assert done.returncode == 2, done.stderr
    assert f"{name} can't be imported" in done.stderr and f"pip install 'padiff-hooks[{name}]'" in done.stderr

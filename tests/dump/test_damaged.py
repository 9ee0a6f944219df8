"""Runs of which a part is lost, or that must not be read: never a verdict on what is left."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from kit.records import toy_folder

from padiff import compare_runs, open_run
from padiff.errors import RunFolderError, UsageError
from padiff.model.given_map import GivenMap
from padiff_cli.main import main


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return toy_folder(tmp_path / "torch"), toy_folder(tmp_path / "paddle", paddle=True)


@pytest.mark.parametrize("name", ["params.json", "report.json"])
def test_a_step_that_lost_one_of_its_files_is_damaged_and_not_different(runs, name, capsys):
    (runs[1] / "steps" / "00000001" / "rank_0" / name).unlink()
    with pytest.raises(RunFolderError, match=rf"00000001/rank_0/{name} is missing: the step is damaged. Copy the run"):
        compare_runs(*runs)
    assert main(["compare", *map(str, runs)]) == 2
    assert capsys.readouterr().err.startswith(f"padiff: {runs[1]}/steps/00000001/rank_0/{name} is missing")
    assert main(["doctor", str(runs[1])]) == 1
    out = capsys.readouterr().out
    assert f"damaged: step 1: {runs[1]}/steps/00000001/rank_0/{name} is missing" in out
    assert "This run is damaged in 1 place." in out and "2 steps read whole" in out


def test_its_folder_alone_is_damaged_too(runs):
    rank = runs[1] / "steps" / "00000001" / "rank_0"
    (rank / "params.json").unlink()
    for path in (rank, rank.parent):
        with pytest.raises(RunFolderError, match=r"params.json is missing: the step is damaged"):
            open_run(path).steps(1)


def test_a_dump_of_one_file_is_whole(runs, tmp_path):
    """`dump_report` and `dump_params` write one each, outside of any run."""
    shutil.copytree(runs[0] / "steps" / "00000001" / "rank_0", tmp_path / "dump")
    (tmp_path / "dump" / "params.json").unlink()
    [step] = open_run(tmp_path / "dump").steps(1)
    assert {record.stage for record in step.records} == {"input", "forward", "loss", "backward", "update"}


def test_a_folder_that_must_not_be_read_is_not_called_damaged(runs, monkeypatch, capsys):
    """The tests may run as root, who may read anything: so the operating system's answer is put in its place."""
    forbidden = runs[1] / "steps" / "00000001"
    listed = os.listdir

    def refused(path):
        if Path(path) == forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refused)
    assert main(["compare", *map(str, runs), "--workers", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"padiff: {forbidden} must not be read by this user (Permission denied). Allow it (chmod")
    assert "damaged" not in err
    forbidden = runs[1]
    with pytest.raises(RunFolderError, match="must not be read by this user"):
        open_run(runs[1])


def test_where_a_run_folder_is_missing_its_neighbours_are_named(runs, tmp_path):
    toy_folder(tmp_path / "torch_2")
    (tmp_path / "other").mkdir()
    with pytest.raises(
        RunFolderError, match=r"there is no run folder .*toch\. In .* there are the run folders torch, "
    ):
        open_run(tmp_path / "toch")
    with pytest.raises(RunFolderError, match=r"there is no run folder .*x$"):
        open_run(tmp_path / "other" / "x")
    for k in range(8):
        toy_folder(tmp_path / f"r{k}", [0])
    with pytest.raises(RunFolderError, match=r"run folders (\w+, ){5}\.\.\.$"):
        open_run(tmp_path / "r")


# -- layer maps in files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pairs:\n  - {reference: a, candidate: b}\n  - {reference: c\n",
            r"map.yaml, line 4, column 1, is no YAML: .*",
        ),
        (
            "pairs:\n- {reference: a, candidate: b}\n- {referense: c, candidate: d}\n",
            r"map.yaml, line 3: .*'referense'",
        ),
        ("pairs:\n- [a, b]\n- 3\n", r"map.yaml, line 3: layer map: expected a pair of layer paths .*, got 3"),
        ("a: b\nc: [d]\ne: 1\n", r"map.yaml, line 3: layer map: expected a pair"),
        ("just words", r"map.yaml holds str;"),
    ],
)
def test_an_error_in_a_layer_map_names_file_line_and_what_was_expected(text, message, tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        GivenMap.read(path)
    assert str(caught.value).endswith(
        "expected 'pairs:' with a list of '- {reference: PATH, candidate: PATH}', as `padiff map` writes it"
    )


def test_a_layer_map_in_a_file_is_read_as_before(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(
        "pairs:\n  - {reference: a, candidate: b, confidence: 0.9}  # why\n  - [c, [d, e]]\n  - [f, null]\n"
    )
    assert GivenMap.read(path) == GivenMap([("a", "b"), ("c", ("d", "e")), ("f", None)])
    path.write_text("pairs: []\n")
    assert len(GivenMap.read(path)) == 0

"""What `padiff bisect` refuses before anything runs, and the small parts of it."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import spec_from_file_location

import pytest

from padiff.errors import UsageError
from padiff_cli.bisect.changes import Environments, Variable, read_variables
from padiff_cli.bisect.commits import Commits
from padiff_cli.bisect.outcome import notes_of
from padiff_cli.bisect.packages import changelog_section
from padiff_cli.main import main

from .planted import git, repository


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "x"], "got none of them"),
        (["--good", "a", "--env", "A=1..2", "--", "x"], "got commits and environment"),
        (["--bad", "a", "--", "x"], "--good is missing"),
        (["--env", "A=1..2"], "the training's command is missing"),
        (["--env", "A=1", "--", "x"], "--env takes NAME=GOOD..BAD"),
        (["--env", "A=1..1", "--", "x"], "the two environments are the same"),
        (["--env", "A=1..2", "--steps", "0", "--", "x"], "--steps has to be at least 1"),
        (["--package", "torch>2", "--", "x"], "--package takes NAME==GOOD..BAD"),
        (["--package", "torch==a..b", "--", "x"], "Invalid version"),
        (["--good", "a", "--", "x"], "git rev-parse failed"),
    ],
)
def test_misuse_is_said(words, message, capsys):
    assert main(["bisect", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_config_that_the_command_does_not_have_is_said(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "b.json").write_text('{"a": 2}')
    assert main(["bisect", "--config", "a.json", "b.json", "--", "x"]) == 2
    assert "the command has no {config}" in capsys.readouterr().err


def test_commits_that_are_no_range_are_said(tmp_path, monkeypatch, capsys):
    hashes = repository(tmp_path / "repo", [{}, {}])
    monkeypatch.chdir(tmp_path / "repo")
    git(tmp_path / "repo", "checkout", "-q", "-b", "other", hashes[0])
    git(tmp_path / "repo", "commit", "-q", "--allow-empty", "-m", "x")
    assert main(["bisect", "--good", "other", "--bad", "main", "--", "x"]) == 2
    assert f"where they parted as --good: {hashes[0][:12]}" in capsys.readouterr().err
    assert main(["bisect", "--good", "nothing", "--", "x"]) == 2
    assert "has no such commit" in capsys.readouterr().err
    assert main(["bisect", "--good", "other", "--bad", "other", "--", "x"]) == 2
    assert "are one commit" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/mine").write_text("")
    assert main(["bisect", "--dir", "b", "--env", "A=1..2", "--", sys.executable, "-c", ""]) == 2
    assert "is no folder of a bisection" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine"]


def test_a_good_state_that_does_not_run_is_said_with_its_output(capsys):
    code = main(["bisect", "--dir", "b", "--env", "A=1..2", "--", sys.executable, "-c", "raise SystemExit('no data')"])
    assert code == 2
    error = capsys.readouterr().err
    assert "exit code 1" in error
    assert "no data" in error


def test_two_files_of_variables_are_read(tmp_path):
    (tmp_path / "good").write_text("A=1\nB=2\nPWD=/x\nnoise\nOMP_NUM_THREADS=4\nSAME=1\n")
    (tmp_path / "bad").write_text("A=1=2\nC=\nPWD=/y\nOMP_NUM_THREADS=1\nSAME=1\n")
    assert read_variables(["good", "bad"]) == [
        Variable("A", "1", "1=2"),
        Variable("B", "2", None),
        Variable("OMP_NUM_THREADS", "4", "1"),
        Variable("C", None, ""),
    ]
    assert Variable("OMP_NUM_THREADS", "4", "1").counts == ("4", "3", "2", "1")
    assert Variable("A_COUNT", "4", "1").counts == ("4", "1")
    with pytest.raises(UsageError, match="cannot read"):
        read_variables(["good", "absent"])
    environments = Environments(read_variables(["good", "bad"]), ["x"])
    values = environments.prepare(environments.make(frozenset({"B", "C"}))).environment
    assert "B" not in values
    assert (values["A"], values["C"], values["OMP_NUM_THREADS"]) == ("1", "", "4")


@pytest.mark.parametrize(
    "text",
    [
        "# Changes\n\n## [1.2.0] - 2024\n- new\n\n## 1.1.0\n- old\n",
        "Changes\n\nVersion 1.2.0 (2024)\n--------------------\n- new\n\nVersion 1.1.0\n-------------\n- old\n",
        "v1.2.0\n- new\nsee 1.1.0 too\n\nv1.1.0\n- old\n",
    ],
)
def test_the_section_of_a_version_is_found(text):
    section = changelog_section(text, "1.2.0")
    assert "- new" in section
    assert "- old" not in section
    assert changelog_section(text, "1.2") == ""
    assert changelog_section(text, "2.0") == ""


def test_compare_has_exit_codes_for_git(tmp_path, capsys):
    git = ["compare", "--exit-codes", "git"]
    assert main([*git, "absent", "other"]) == 125
    assert main([*git, "absent"]) == 125
    assert main(["compare", "--exit-codes=git", "a", "b", "--no-such-option"]) == 125
    assert main(["compare", "--exit", "git", "a", "a"]) == 125
    assert main(["compare", "absent", "other"]) == 2
    assert json.dumps(capsys.readouterr().err)


def test_a_framework_that_is_to_blame_is_named_with_the_commands_that_write_its_changes():
    (note,) = notes_of(["torch==2.14.1", "numpy==2.0"], {"torch": "2.13.0", "numpy": "1.26"})
    assert "with torch==2.13.0: padiff atlas --json old.json" in note
    assert "with torch==2.14.1: padiff atlas --changes old.json --markdown changes.md" in note
    assert notes_of(["paddlepaddle==3.3.1"], {}) and not notes_of(["torchvision==0.2"], {"torchvision": "0.1"})


def test_a_package_installed_by_an_import_hook_is_that_of_the_worktree(tmp_path, monkeypatch):
    # As setuptools installs one in development mode whose folder is not named by a path.
    root, site = tmp_path / "repo", tmp_path / "site"
    hashes = repository(root, [{}])
    (root / "code/hooked_package").mkdir(parents=True)
    (root / "code/hooked_package/__init__.py").write_text("")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "package")
    info = site / "hooked-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooked\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": root.as_uri()}))
    (info / "top_level.txt").write_text("hooked_package\nabsent_package\n")

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            file = root / "code/hooked_package/__init__.py"
            return spec_from_file_location(name, file) if name == "hooked_package" else None

    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.chdir(root)
    commits = Commits(hashes[0], "HEAD", tmp_path / "tree", ["x"])
    try:
        paths = commits.prepare(commits.end).environment["PYTHONPATH"].split(os.pathsep)
    finally:
        commits.close()
    assert str(tmp_path / "tree/code") in paths

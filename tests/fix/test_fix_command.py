"""`padiff fix` on real trainings: what it proposes, what it leaves untouched, how it ends."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hard.children import run_child, started
from hard.children import run_padiff as padiff

from padiff_cli.main import main

pytestmark = pytest.mark.slow

TRAIN = """
import sys, time
import torch
from torch import nn

from settings import LR

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))  # small
optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
for step in range(3):
    x = torch.randn(5, 6)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SETTINGS = "LR = 0.1  # as in the paper\n"


def written(folder: Path, train: str = TRAIN, settings: str = SETTINGS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(train)
    (folder / "settings.py").write_text(settings)
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = written(tmp_path_factory.mktemp("reference"))
    assert padiff(folder, "run", "--dir", "run", "train.py").returncode == 0
    return folder / "run"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, reference):
    folder = written(
        tmp_path_factory.mktemp("work"), TRAIN.replace("nn.ReLU()", "nn.Tanh()"), "LR = 0.2  # as in the paper\n"
    )
    shutil.copytree(reference, folder / "runs" / "reference")
    assert padiff(folder, "run", "--dir", "runs/candidate", "train.py").returncode == 0
    return folder


@pytest.fixture
def faulty(tmp_path, recorded, monkeypatch):
    """A working folder with two faults, in two files, and the runs of both sides."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return Path(shutil.copytree(recorded, tmp_path / "work"))


def state(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fix(folder: Path, *options: str, command=("train.py",), **more):
    return padiff(folder, "fix", "runs/reference", "runs/candidate", *options, "--", *command, **more)


def left_over() -> set[str]:
    return {name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("padiff-fix-")}


def test_the_comparison_names_the_command_that_fixes(faulty):
    done = padiff(faulty, "compare", "runs/reference", "runs/candidate")
    assert "padiff fix runs/reference runs/candidate -- train.py" in done.stdout


def test_two_faults_in_two_files_are_fixed_and_nothing_is_touched(faulty, tmp_path, monkeypatch):
    """The files that the script writes stay in the copy; the patch applies where fix was called.

    `python` is the one that recorded the candidate, and not the first one of PATH, which has no torch.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    save, start = "torch.save({}, 'checkpoint.pt')\n", "optimizer ="
    text = (faulty / "train.py").read_text()
    (faulty / "train.py").write_text(text.replace(start, save + start))
    (faulty / "checkpoint.pt").write_bytes(b"old")
    before = state(faulty)
    done = fix(faulty, "--json", "-", "--patch", str(tmp_path / "fix.patch"), command=("python", "train.py"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["outcome"] == "match"
    assert {each["file"] for each in result["fixes"]} == {"train.py", "settings.py"}
    assert "-net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))  # small" in result["patch"]
    assert "+net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))  # small" in result["patch"]
    assert "+LR = 0.1  # as in the paper" in result["patch"]
    assert all("times the limit ->" in each["proof"] for each in result["fixes"])
    assert state(faulty) == before
    assert not left_over()
    subprocess.run(["patch", "-s", "-p1", "-i", str(tmp_path / "fix.patch")], cwd=faulty, check=True)
    assert (faulty / "train.py").read_text() == TRAIN.replace(start, save + start)
    assert (faulty / "settings.py").read_text() == SETTINGS


def test_apply_changes_the_files_that_the_patch_names(faulty):
    (faulty / "train.py").chmod(0o640)
    before = state(faulty)
    done = fix(faulty, "--apply")
    assert done.returncode == 0, done.stderr
    assert (faulty / "train.py").read_text() == TRAIN
    assert (faulty / "train.py").stat().st_mode & 0o777 == 0o640
    after = state(faulty)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"train.py", "settings.py"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(faulty, number, code):
    slow = (faulty / "train.py").read_text().replace("for step", "time.sleep(60)\nfor step")
    (faulty / "train.py").write_text(slow)
    before = state(faulty)
    words = [sys.executable, "-m", "padiff", "fix", "runs/reference", "runs/candidate", "--", "train.py"]
    with started(words, cwd=faulty) as process:
        deadline = time.monotonic() + 60
        while not left_over() and time.monotonic() < deadline:
            time.sleep(0.1)
        own = left_over()
        time.sleep(2)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert state(faulty) == before
    assert own and not left_over()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in own)


def test_a_value_of_a_yaml_file_is_changed_where_it_stands(tmp_path, reference):
    head = "import yaml\nLR = float(yaml.safe_load(open('conf/a.yaml'))['optim']['lr'])\n"
    folder = written(tmp_path / "work", head + TRAIN.replace("from settings import LR\n", ""))
    (folder / "conf").mkdir()
    config = folder / "conf" / "a.yaml"
    config.write_text("optim: # as in the paper\n  lr: 2e-1  # base\n")
    shutil.copytree(reference, folder / "runs" / "reference")
    assert padiff(folder, "run", "--dir", "runs/candidate", "train.py").returncode == 0
    before = state(folder)
    done = fix(folder, "--apply")
    assert done.returncode == 0, done.stdout + done.stderr
    assert config.read_text() == "optim: # as in the paper\n  lr: 0.1  # base\n"
    assert {name for name, digest in state(folder).items() if before[name] != digest} == {"conf/a.yaml"}


def test_a_script_that_fails_is_an_error_that_says_why(faulty):
    (faulty / "train.py").write_text("raise ValueError('no data here')\n")
    before = state(faulty)
    done = fix(faulty)
    assert done.returncode == 2
    assert "does not run in a copy of the working folder: ValueError: no data here" in done.stderr
    assert state(faulty) == before


def test_a_script_that_takes_too_long_is_ended(faulty):
    (faulty / "train.py").write_text("import time\ntime.sleep(300)\n")
    began = time.monotonic()
    done = fix(faulty, "--timeout", "3")
    assert done.returncode == 2
    assert "it was ended after 3 seconds" in done.stderr
    assert time.monotonic() - began < 60


def test_a_script_that_writes_by_an_absolute_path_is_reported(faulty):
    text = (faulty / "train.py").read_text()
    elsewhere = "/".join(("", ".", *faulty.parts[1:], "log.txt"))
    (faulty / "train.py").write_text(f"open({elsewhere!r}, 'a').write('x')\n{text}")
    done = fix(faulty)
    assert "file(s) of this folder changed, log.txt for one" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/reference", "runs/candidate"], "how is the candidate run?"),
        (["runs/reference", "runs/candidate", "--", "none.py"], "has no script none.py"),
        (["runs/reference", "runs/candidate", "--", "port.ipynb"], "port.ipynb is a notebook"),
        (["runs/reference", "runs/reference", "--", "train.py"], "are one folder"),
        (["runs/none", "runs/candidate", "--", "train.py"], "runs/none"),
        (["runs/reference", "runs/candidate", "--timeout", "0", "--", "train.py"], "--timeout is a number of seconds"),
        (["runs/reference", "runs/candidate", "--", "../other.py"], "outside of the working folder"),
    ],
)
def test_misuse_is_one_line(faulty, monkeypatch, capsys, words, message):
    (faulty.parent / "other.py").write_text("")
    monkeypatch.chdir(faulty)
    assert main(["fix", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_fault_without_a_rule_is_left_and_said(tmp_path, reference):
    folder = written(tmp_path / "work", TRAIN.replace("manual_seed(0)", "manual_seed(0); torch.randn(3)"))
    shutil.copytree(reference, folder / "runs" / "reference")
    text = (folder / "train.py").read_text().replace("net = ", "import padiff\nnet = ")
    start = "optimizer = torch"
    (folder / "train.py").write_text(text.replace(start, f'padiff.start_from("runs/reference", net)\n{start}'))
    assert padiff(folder, "run", "--dir", "runs/candidate", "train.py").returncode == 0
    done = fix(folder, "--json", "-")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["patch"] == ""
    assert "other batch" in result["left"]
    assert any("no edit is known" in note for note in result["notes"])


def test_a_run_stops_after_the_steps_that_it_was_given(tmp_path):
    folder = written(tmp_path)
    done = padiff(folder, "run", "--dir", "runs/short", "--stop-after", "2", "train.py")
    assert done.returncode == 0
    assert "recorded 2 steps" in done.stderr
    assert len(list((folder / "runs" / "short" / "steps").iterdir())) == 2


@pytest.mark.parametrize(("scale", "code", "differ"), [("1.0", 0, 0), ("(1.0 if SEED == 0 else 2.0)", 1, 3)])
def test_a_patch_is_compared_on_three_other_seeds(faulty, scale, code, differ):
    (faulty / "reference.py").write_text(TRAIN.replace("from settings import LR", "LR = 0.1"))
    own = (faulty / "train.py").read_text().replace("torch.manual_seed(0)", "SEED = 0\ntorch.manual_seed(SEED)")
    (faulty / "train.py").write_text(own.replace("torch.randn(5, 6)", f"torch.randn(5, 6) * {scale}"))
    done = fix(faulty, "--check-with", "reference.py", "--json", "-")
    result = json.loads(done.stdout)
    assert result["seeds"] == {"compared": 3, "differ": differ}
    assert done.returncode == code
    assert ("with other seeds (each one + 1000) the runs differ" in " ".join(result["notes"])) == bool(differ)


def test_what_a_killed_fix_leaves_is_deleted_by_the_next_one(faulty):
    slow = (faulty / "train.py").read_text().replace("for step", "time.sleep(60)\nfor step")
    (faulty / "train.py").write_text(slow)
    words = [sys.executable, "-m", "padiff", "fix", "runs/reference", "runs/candidate", "--", "train.py"]
    temporary = Path(os.environ["TMPDIR"])
    with started(words, cwd=faulty) as process:
        until(lambda: [name for name in left_over() if (temporary / name / "1" / "run" / "run.json").exists()])
        killed = left_over()
        with started(words, cwd=faulty) as other:
            until(lambda: len(left_over()) == 2)
            living = left_over() - killed
            process.kill()
            process.wait(timeout=60)
            # The script of the killed command ends, too.
            until(lambda: not any(name in ps() for name in killed))
            assert left_over() == killed | living
            foreign = [temporary / "padiff-fix-notes", temporary / "padiff-fix-link"]
            foreign[0].mkdir()
            (foreign[0] / ".padiff-fix").write_text("mine")
            foreign[1].symlink_to(foreign[0])
            # No fork: of one that is ended the folder may still be written to.
            assert run_child([*words[:-2], "--timeout", "2", *words[-2:]], cwd=faulty).returncode == 2
            assert left_over() == living | {each.name for each in foreign}
            other.send_signal(signal.SIGTERM)
            other.wait(timeout=60)
    assert left_over() == {each.name for each in foreign}


def ps() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def until(condition) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)

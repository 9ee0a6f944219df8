"""Paths with a scheme: runs may lie in some, all others are refused at every door; no folder `s3:` comes into being."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import padiff
from padiff.dump.store import is_remote, local_folder
from padiff.errors import UsageError
from padiff.records import Both
from padiff_cli.main import main
from padiff_hooks.paired import PairedRuns
from padiff_hooks.stream import DiffStream
from padiff_hooks.training import TrainingRecorder

REMOTE = [
    "s3://bucket/run",
    Path("s3://bucket/run"),
    "gs://bucket",
    "hdfs://host:8020/run",
    "memory://",
    "file:///tmp/x",
]
LOCAL = [
    "runs/torch",
    "/tmp/run",
    Path("runs"),
    "C:\\runs\\torch",
    "C:/runs/torch",
    "d://runs",
    "a:b",
    "lr=0.1:/x",
    "",
    ".",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder, which stays empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("path", REMOTE, ids=str)
def test_a_path_with_a_scheme_is_remote(path):
    assert is_remote(path)


@pytest.mark.parametrize("path", LOCAL, ids=str)
def test_other_paths_and_drives_of_windows_are_local(path):
    assert not is_remote(path)
    assert local_folder(path, "dir_path") == Path(path)


@pytest.mark.parametrize("path", [3, None, 1.5, b"runs", ["runs"]], ids=str)
def test_what_is_no_path_is_refused(path):
    with pytest.raises(UsageError, match=f"dir_path has to be the path of a folder, got {type(path).__name__}"):
        local_folder(path, "dir_path")


def training(**given):
    return TrainingRecorder(given.pop("dir_path", "run"), **given)


def model():
    return torch.nn.Linear(2, 2)


def dump(path):
    layer = padiff.create_model(model(), name="linear")
    layer(torch.ones(1, 2))
    layer.try_dump(path)


DOORS = {
    "record": (lambda path: padiff.record(model(), path), "dir_path"),
    "open_run": (padiff.open_run, "run"),
    "reference": (lambda path: padiff.compare_runs(path, "run"), "run"),
    "check_report": (lambda path: padiff.check_report(path, "run"), "run"),
    "dump": (dump, "dir_path"),
    "dump root": (padiff.set_dump_root_path, "path"),
    "callback's dir_path": (lambda path: training(dir_path=path), "dir_path"),
    "callback's reference": (lambda path: training(reference=path), "reference"),
    "callback's logdir": (lambda path: training(logdir=path), "logdir"),
    "watched reference": (lambda path: PairedRuns(path, "run"), "reference"),
    "watched candidate": (lambda path: PairedRuns("run", path), "candidate"),
    "log folder": (lambda path: DiffStream(path, Both("a", "b")), "logdir"),
}


LOCAL_ONLY = ["dump", "dump root", "callback's logdir", "log folder"]


@pytest.mark.parametrize("path", ["ftp://bucket/run", Path("ftp://bucket/run")], ids=["text", "path"])
@pytest.mark.parametrize("door", [door for door in DOORS if door not in LOCAL_ONLY])
def test_every_door_refuses_a_scheme_that_runs_are_not_stored_under(door, path):
    enter, what = DOORS[door]
    with pytest.raises(UsageError) as reported:
        enter(path)
    text = str(reported.value)
    assert text.startswith(f"{what}: runs are recorded to and read from local folders, and s3://, gs://, hdfs://")
    assert repr(str(path)) in text


@pytest.mark.parametrize("path", ["s3://bucket/run", Path("s3://bucket/run")], ids=["text", "path"])
@pytest.mark.parametrize("door", LOCAL_ONLY)
def test_what_is_no_run_stays_on_this_machine(door, path):
    enter, what = DOORS[door]
    with pytest.raises(UsageError) as reported:
        enter(path)
    text = str(reported.value)
    assert text.startswith(f"{what} has to be a local folder, got {str(path)!r}")
    assert "copy it" in text


@pytest.mark.parametrize(
    "arguments", [["show", "ftp://bucket/run"], ["compare", "ftp://bucket/a", "ftp://bucket/b"], ["watch", "a", "b"]]
)
def test_the_commands_refuse_it(arguments, capsys):
    logdir = ["--logdir", "s3://bucket/tb"] if arguments[0] == "watch" else []
    assert main([*arguments, *logdir]) == 2
    assert "local folder" in capsys.readouterr().err


def test_a_hosts_remote_log_folder_does_not_end_its_training(tmp_path):
    recorder = TrainingRecorder(tmp_path / "run")
    net = model()
    with pytest.warns(RuntimeWarning, match=r"the logger's folder is remote \(s3://bucket/logs\)"):
        recorder.start(net, [], logdir="s3://bucket/logs")
    recorder.begin_batch()
    net(torch.ones(1, 2)).sum().backward()
    recorder.end_batch()
    recorder.end_step()
    recorder.finish()
    assert padiff.open_run(tmp_path / "run").numbers() == [0]
    assert np.isfinite(padiff.open_run(tmp_path / "run").steps(0)[0].records[0].value).all()

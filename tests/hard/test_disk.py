"""The disk is full, read-only or gone, handles run out: the training goes on or stops as asked, and says which."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
from kit.forking import python_with_frameworks
from kit.frameworks import TORCH
from kit.nets import mlp

import padiff
from padiff.dump.write import explain_os_error
from padiff.errors import UnwritableFolderError, WriterError

from .children import run_child
from .killing import ROOT


class Loop:
    """Five steps of a linear layer; `disturb` is called before the third."""

    def __init__(self, kit) -> None:
        kit.seed(0)
        self.kit, self.model = kit, mlp(kit, (4, 8, 1))
        self.optimizer = kit.sgd(self.model.parameters())

    def step(self, number):
        loss = self.model(self.kit.tensor(np.full((2, 4), 1.0 + number))).sum()
        loss.backward()
        self.optimizer.step()
        self.kit.zero(self.optimizer)
        return float(loss.detach())


def train(loop, folder=None, disturb=lambda: None, **options) -> list[float]:
    """Losses of five steps, recorded or not."""
    if folder is None:
        return [loop.step(number) for number in range(5)]
    losses = []
    with padiff.record(loop.model, folder, optimizer=loop.optimizer, **options) as rec:
        for number in range(5):
            if number == 2:
                rec.flush()
                disturb()
            losses.append(loop.step(number))
            rec.try_dump()
    return losses


def whole_steps(folder: Path) -> list[int]:
    run = padiff.open_run(folder)
    for number in run.numbers():
        for step in run.steps(number):
            assert all(np.isfinite(record.value).all() for record in step.records)
    return run.numbers()


def remove(folder: Path):
    shutil.rmtree(folder)


def move(folder: Path):
    folder.rename(folder.with_name("moved"))


def replace_by_file(folder: Path):
    remove(folder)
    folder.write_text("x")


def remove_steps(folder: Path):
    shutil.rmtree(folder / "steps")


GONE = {"removed": remove, "moved": move, "replaced by a file": replace_by_file, "emptied of steps": remove_steps}


@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("options", [{}, {"pack": True}], ids=["plain", "packed"])
def test_a_folder_that_goes_away_does_not_end_the_training_if_asked_so(tmp_path, kit, how, options):
    folder = tmp_path / "run"
    with pytest.warns(RuntimeWarning, match=r"recording stops, the training goes on: step 2 .*the run folder is gone"):
        losses = train(Loop(kit), folder, lambda: GONE[how](folder), on_error="warn", **options)
    assert losses == train(Loop(kit))
    assert not (folder / "steps").exists()  # nothing was made anew
    if how == "moved":
        assert whole_steps(tmp_path / "moved") == [0, 1]


def test_a_folder_that_goes_away_stops_the_training_if_asked_so(tmp_path, kit):
    folder = tmp_path / "run"
    one = Loop(kit)
    with pytest.raises(WriterError, match=r"run folder is gone.*existing='resume'.*on_error='warn'"):
        train(one, folder, lambda: move(folder), on_error="raise")
    one.step(9)  # the model is free again
    (tmp_path / "moved").rename(folder)
    assert train(one, folder, existing="resume", start_step=2)
    assert whole_steps(folder) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_folder_that_cannot_be_made(tmp_path, kit, on_error):
    (tmp_path / "file").write_text("")
    one = Loop(kit)
    if on_error == "raise":
        with pytest.raises(UnwritableFolderError, match=r"cannot make the run folder .*run"):
            train(one, tmp_path / "file" / "run", on_error="raise")
        return
    with pytest.warns(RuntimeWarning, match=r"nothing is recorded, the training goes on: cannot make the run folder"):
        assert train(one, tmp_path / "file" / "run", on_error="warn") == train(Loop(kit))


# -- limits of the process, in one of its own, in which numpy writes ---------------------------------------------------

WRITER = """
import errno, json, os, resource, sys
from pathlib import Path
import numpy as np
from padiff.dump import RunWriter
from padiff.errors import PadiffError
from padiff.records import ROOT, InMemory, Layer, Record, RunInfo, Step
from padiff.dump.storage import Storage

info = RunInfo("torch", "2", (Layer(ROOT, "Net", "net", children=1), Layer("fc", "Fc", "fc")))
writer = None

def step(number, size=1000):
    values = np.full(size, float(number))
    return Step(number, (Record("fc", "forward", "output.0", InMemory(values), "float64", values.shape),))

def open_writer(**rest):
    global writer
    writer = RunWriter(Path(sys.argv[1]), info, storage=Storage(pack=sys.argv[2] == "packed"), **rest)

def write(*numbers, size=1000):
    for number in numbers:
        writer.add_step(step(number, size))
    writer.flush()

def reported(call, *args, **rest):
    try:
        call(*args, **rest)
    except PadiffError as error:
        print(type(error).__name__, error)
    else:
        print("nothing was reported")
"""


def reported(folder: Path, storage: str, script: str) -> str:
    command = [*python_with_frameworks(), "-c", WRITER + textwrap.dedent(script), str(folder), storage]
    done = run_child(command, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


STORAGE = pytest.mark.parametrize("storage", ["plain", "packed"])


@STORAGE
def test_files_that_may_not_grow(tmp_path, storage):
    out = reported(
        tmp_path / "run",
        storage,
        """
        open_writer()
        write(0, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        reported(write, 2, size=10_000)
        reported(write, 3)
        writer.close(finished=False)
        """,
    )
    assert "WriterError step 2 could not be written" in out and "`ulimit -f`" in out and out.count("WriterError") == 1
    run = padiff.open_run(tmp_path / "run")
    assert [run.steps(n)[0].records[0].value[0] for n in run.numbers()] == [0, 1, 3]
    assert not list((tmp_path / "run").rglob(".*"))


@STORAGE
def test_a_full_disk(tmp_path, storage):
    """Real errors of the kernel: /dev/full takes the place of the step's large file."""
    out = reported(
        tmp_path / "run",
        storage,
        """
        open_writer()
        write(0, 1)
        import builtins
        opened = builtins.open
        def full(path, mode="r", *rest, **more):
            if "w" in mode and str(path).endswith((".npy", ".safetensors")):
                path = "/dev/full"
            return opened(path, mode, *rest, **more)
        builtins.open = full
        reported(write, 2)
        writer.close(finished=False)
        """,
    )
    assert "WriterError step 2 could not be written" in out
    assert "the disk is full" in out and "No space left" in out and "Free space there" in out
    assert whole_steps(tmp_path / "run") == [0, 1]
    assert not list((tmp_path / "run").rglob(".*"))


@STORAGE
def test_a_disk_that_is_really_full(tmp_path, storage):
    """A file system of 200 kB, where this process may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    script = WRITER + textwrap.dedent(
        """
        open_writer()
        reported(lambda: [write(number) for number in range(100)])
        reported(writer.close)
        print(len(list(Path(sys.argv[1]).glob("steps/0*"))))
        from padiff import open_run
        run = open_run(sys.argv[1])
        assert [run.steps(n)[0].records[0].value[0] for n in run.numbers()] == run.numbers()
        reported(open_writer, existing="overwrite")
        """
    )
    command = f'mount -t tmpfs -o size=200k none {mount} && exec {sys.executable} -c "$0" {mount}/run {storage}'
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    done = run_child([*own, "sh", "-c", command, script], timeout=60, cwd=ROOT)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("WriterError step ") and "the disk is full" in lines[0]
    assert int(lines[2]) >= 2


@STORAGE
def test_too_many_open_files(tmp_path, storage):
    out = reported(
        tmp_path / "run",
        storage,
        """
        open_writer()
        write(0, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        files = []
        try:
            while True:
                files.append(open(os.devnull))
        except OSError:
            pass
        reported(write, 2)
        for file in files:
            file.close()
        reported(write, 3)
        writer.close()
        """,
    )
    assert "WriterError step 2 could not be written" in out
    assert "too many open files" in out and "`ulimit -n`" in out and out.rstrip().endswith("nothing was reported")
    assert whole_steps(tmp_path / "run") == [0, 1, 3]


def test_a_read_only_folder(tmp_path):
    """As a user who may not write there; root may write anywhere."""
    folder = tmp_path / "run"
    for path in tmp_path.parents:
        if path.name.startswith(("pytest-", "popen-")):
            path.chmod(0o755)
    script = """
        Path(sys.argv[1]).mkdir()
        os.chmod(sys.argv[1], 0o555)
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        reported(open_writer)
        """
    out = reported(folder, "plain", script)
    assert out.startswith("UnwritableFolderError cannot make the run folder")
    assert "read-only" in out and "Make it writable, or give another folder" in out


def test_a_folder_that_becomes_read_only(tmp_path):
    for path in tmp_path.parents:
        if path.name.startswith(("pytest-", "popen-")):
            path.chmod(0o755)
    tmp_path.chmod(0o777)
    out = reported(
        tmp_path / "run",
        "plain",
        """
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        open_writer()
        write(0)
        os.chmod(Path(sys.argv[1]) / "steps", 0o555)
        reported(write, 1)
        os.chmod(sys.argv[1], 0o555)
        reported(writer.close)
        """,
    )
    first, second = out.splitlines()
    assert first.startswith("WriterError step 1 could not be written") and "the folder is read-only" in first
    assert second.startswith("WriterError the note that the run has ended could not be written")
    assert whole_steps(tmp_path / "run") == [0]


def test_an_error_in_what_follows_a_step_is_not_called_a_writing_error(tmp_path):
    def fail(step):
        raise OSError(28, "No space left on device", "tensorboard")

    loop = Loop(TORCH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(loop, tmp_path / "run", on_written=fail, on_error="warn")
    [reported] = [str(w.message) for w in caught if "padiff" in str(w.message)]
    assert "are whole, but what follows on a written step" in reported and "No space left" in reported
    assert whole_steps(tmp_path / "run")[0] == 0
    assert not padiff.open_run(tmp_path / "run").finished()  # it was given up


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (28, "disk is full"),
        (122, "quota"),
        (30, "read-only"),
        (13, "read-only"),
        (24, "too many open"),
        (23, "on this machine"),
        (116, "network drive"),
        (107, "gone"),
        (5, "reports an error"),
        (12, "memory ran out"),
        (27, "grew beyond"),
    ],
)
def test_each_error_has_words_of_its_own(tmp_path, number, what):
    assert what in explain_os_error(OSError(number, os.strerror(number)), tmp_path)[0]

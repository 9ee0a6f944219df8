"""Two recorders on one run folder, by mistake: reported, whichever comes first and whatever `existing` says."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from kit.records import toy_info, toy_steps

from padiff.dump import RunWriter, lock, open_run
from padiff.errors import RunFolderError, WriterError

from .children import run_child, started
from .killing import start, until_recording

EXISTING = ("error", "resume", "overwrite")


@pytest.fixture(params=["with locks", "without locks"])
def locking(request, monkeypatch) -> str:
    """A file system with locks, and one without."""
    if request.param == "without locks":

        def refuse(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def recorded(path: Path) -> list[int]:
    return open_run(path).numbers()


# Holds a run folder until it is ended.
HOLDER = """
import os, sys, time
from pathlib import Path
from hard.children import end_with_parent
from padiff.dump import RunWriter
from kit.records import toy_info
end_with_parent()
writer = RunWriter(Path(sys.argv[1]), toy_info())
"""


def holding(folder: Path, then: str):
    """Another process that holds a folder, and does something then."""
    return started([sys.executable, "-c", HOLDER + then, str(folder)])


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another process that records into a folder for as long as the tests last."""
    folder = tmp_path_factory.mktemp("other") / "run"
    with holding(folder, "print('recording', flush=True); time.sleep(600)") as process:
        until_recording(process)
        yield folder, process.pid


@pytest.mark.parametrize("existing", EXISTING)
def test_the_second_process_is_reported_and_changes_nothing(other, existing):
    folder, pid = other
    before = sorted(str(path) for path in folder.rglob("*"))
    reported = rf"is being recorded into: process {pid} writes rank 0 of it since \d\d:.*whatever `existing` says"
    with pytest.raises(RunFolderError, match=reported):
        RunWriter(folder, toy_info(), existing=existing)
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_the_other_way_round_too(tmp_path):
    writer = RunWriter(tmp_path / "run", toy_info())
    with start("numpy", tmp_path / "run", "--existing", "overwrite") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "recording" not in out
    assert f"process {os.getpid()} writes rank 0 of it" in err
    writer.add_step(toy_steps([0])[0])
    writer.close()
    assert recorded(tmp_path / "run") == [0]


@pytest.mark.parametrize("existing", EXISTING)
def test_two_recorders_of_one_process(tmp_path, existing, locking):
    writer = RunWriter(tmp_path / "run", toy_info())
    with pytest.raises(RunFolderError, match=r"another recorder of this process.*leave its `with`"):
        RunWriter(tmp_path / "run", toy_info(), existing=existing)
    writer.close()
    RunWriter(tmp_path / "run", toy_info(), existing="resume").close()


def test_each_rank_has_a_lock_of_its_own(tmp_path, locking):
    world = toy_info(world_size=2)
    writers = [RunWriter(tmp_path / "run", world, rank=rank) for rank in (0, 1)]
    with pytest.raises(RunFolderError, match=r"writes rank 1 of it"):
        RunWriter(tmp_path / "run", world, rank=1, existing="resume")
    for writer in writers:
        writer.close()
    assert not list((tmp_path / "run").glob(".*"))


def test_the_lock_goes_with_the_recorder(tmp_path, locking):
    for existing in ("error", "resume", "overwrite"):
        writer = RunWriter(tmp_path / "run", toy_info(), existing=existing)
        assert [entry.name for entry in (tmp_path / "run").glob(".*")] == [".rank_0.lock"]
        writer.close()
        assert not list((tmp_path / "run").glob(".*"))


def test_a_recorder_that_was_dropped_without_being_closed_frees_the_folder(tmp_path, locking):
    writer = RunWriter(tmp_path / "run", toy_info())
    cycle = [writer]
    cycle.append(cycle)
    del writer, cycle
    RunWriter(tmp_path / "run", toy_info(), existing="resume").close()


def test_a_refused_run_frees_the_folder(tmp_path, locking):
    RunWriter(tmp_path / "run", toy_info()).close()
    with pytest.raises(RunFolderError, match=r"holds a run already"):
        RunWriter(tmp_path / "run", toy_info())
    RunWriter(tmp_path / "run", toy_info(), existing="resume").close()


def hold_on(ready, end) -> None:
    ready.set()
    end.wait(60)


def test_a_forked_worker_does_not_keep_the_folder_locked(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    # The fork has let go of the lock when it prints.
    forking = "if not os.fork():\n    print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    with holding(tmp_path / "killed", forking) as process:
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        RunWriter(tmp_path / "killed", toy_info(), existing="resume").close()

    writer = RunWriter(tmp_path / "closed", toy_info())
    child = context.Process(target=hold_on, args=(ready, end))
    child.start()
    try:
        assert ready.wait(30)
        with pytest.raises(RunFolderError):  # the fork dropped its copy only
            RunWriter(tmp_path / "closed", toy_info(), existing="resume")
        writer.close()
        RunWriter(tmp_path / "closed", toy_info(), existing="resume").close()
    finally:
        end.set()
        child.join()


def test_a_recorder_whose_folder_another_one_took_over_is_reported(tmp_path):
    """Moved away, and another run made in its place: the first one's steps do not land in the second."""
    first = RunWriter(tmp_path / "run", toy_info())
    steps = toy_steps([0, 1])
    first.add_step(steps[0])
    first.flush()
    (tmp_path / "run").rename(tmp_path / "moved")
    second = RunWriter(tmp_path / "run", toy_info())
    first.add_step(steps[1])
    with pytest.raises(WriterError, match=r"step 1 could not be written.*moved or replaced"):
        first.close()
    second.close()
    assert recorded(tmp_path / "run") == [] and recorded(tmp_path / "moved") == [0]


def test_hidden_files_that_were_tidied_away_end_no_recording(tmp_path, locking):
    writer = RunWriter(tmp_path / "run", toy_info())
    (tmp_path / "run" / ".rank_0.lock").unlink()
    writer.add_step(toy_steps([0])[0])
    writer.flush()
    with pytest.raises(RunFolderError, match=r"is being recorded into"):
        RunWriter(tmp_path / "run", toy_info(), existing="resume")
    writer.close()
    assert recorded(tmp_path / "run") == [0]


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".rank_0.lock").symlink_to(victim)
    with pytest.raises(RunFolderError, match=r"cannot make the run folder"):
        RunWriter(tmp_path / "run", toy_info())
    assert victim.read_text() == "mine"


# -- file systems without locks: the content of the file counts -----------------------------------------------------


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


def owned(folder: Path, **changed) -> Path:
    """A folder whose lock says that somebody holds it."""
    RunWriter(folder, toy_info()).close()
    owner = {"pid": os.getpid(), "machine": lock.machine(), "started": lock.started(os.getpid()), "since": 0.0}
    (folder / ".rank_0.lock").write_text(json.dumps(owner | changed))
    return folder


def test_without_locks_a_dead_process_does_not_block(tmp_path, no_locks):
    with started([sys.executable, "-c", ""]) as dead:
        dead.wait()
    RunWriter(owned(tmp_path / "run", pid=dead.pid), toy_info(), existing="resume").close()


def test_without_locks_a_number_used_again_does_not_block(tmp_path, no_locks):
    RunWriter(owned(tmp_path / "run", pid=os.getppid(), started="1"), toy_info(), existing="resume").close()


def test_without_locks_a_living_process_blocks(tmp_path, no_locks):
    parent = os.getppid()
    folder = owned(tmp_path / "run", pid=parent, started=lock.started(parent))
    with pytest.raises(RunFolderError, match=rf"process {parent} writes rank 0"):
        RunWriter(folder, toy_info(), existing="overwrite")


def test_without_locks_a_process_elsewhere_blocks_while_it_shows_signs_of_life(tmp_path, no_locks):
    folder = owned(tmp_path / "run", machine="elsewhere")
    with pytest.raises(RunFolderError, match=r"another machine.*counts as ended after 90 seconds"):
        RunWriter(folder, toy_info(), existing="resume")
    long_ago = time.time() - 200
    os.utime(folder / ".rank_0.lock", (long_ago, long_ago))
    RunWriter(folder, toy_info(), existing="resume").close()


def test_without_locks_signs_of_life_are_given(tmp_path, no_locks, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)
    writer = RunWriter(tmp_path / "run", toy_info())
    path = tmp_path / "run" / ".rank_0.lock"
    os.utime(path, (0, 0))
    until = time.monotonic() + 20
    while path.stat().st_mtime < 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert path.stat().st_mtime > 1
    writer.close()


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b'{"pid": "x"}', b'{"pid": -1}', b"[" * 4000])
def test_a_lock_of_rubbish_blocks_nobody(tmp_path, locking, content):
    folder = owned(tmp_path / "run")
    (folder / ".rank_0.lock").write_bytes(content)
    os.utime(folder / ".rank_0.lock", (0, 0))
    RunWriter(folder, toy_info(), existing="resume").close()


def test_locks_travel_into_no_program_that_is_started(tmp_path):
    writer = RunWriter(tmp_path / "run", toy_info())
    look = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n != '3'])"
    done = run_child([sys.executable, "-c", look], close_fds=False)
    assert done.returncode == 0 and ".lock" not in done.stdout
    writer.close()
    shutil.rmtree(tmp_path / "run")

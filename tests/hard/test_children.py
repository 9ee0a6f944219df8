"""The tests' own child processes: they end, whatever becomes of the test; and those that are forks are like others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.forking import python_with_frameworks

import padiff

from .children import run_child, started
from .killing import ROOT

# Sleeps beside a child that sleeps too, for far longer than a test.
COUPLE = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(600)"

TELLING = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["ASKED"], sys.stdin.read(), os.getppid())
import kit, padiff
print(sys.path, kit.__file__, padiff.__file__, flush=True)
print("an error", file=sys.stderr)
end = sys.argv[1]
if end == "signal":
    os.kill(os.getpid(), 9)
if end == "error":
    raise ValueError(end)
sys.exit(int(end))
"""

# What `make test &` does to the tests: SIGINT is ignored, and stays so in what they start.
IGNORING = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from tests.hard.children import started
with started([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]) as process:
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    print("KeyboardInterrupt" in process.communicate(timeout=30)[1])
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""

# Starts one that follows it, and is then killed.
PARENT = """
import subprocess, sys
child = "from tests.hard.children import end_with_parent; end_with_parent(%s)\\nprint(1, flush=True)\\nwhile True: pass"
process = subprocess.run([sys.executable, "-c", child])
"""


def gone(pid: int, seconds: float = 20) -> bool:
    """Whether a process has ended, or does so soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # ended; nobody has asked how
            return True
        time.sleep(0.02)
    return False


def test_a_child_and_its_own_children_end_with_a_test_that_fails():
    with pytest.raises(ZeroDivisionError), started([sys.executable, "-c", COUPLE]) as process:
        grandchild = int(process.stdout.readline())
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert gone(grandchild)


def test_a_child_can_be_interrupted_where_the_tests_cannot():
    done = subprocess.run([sys.executable, "-c", IGNORING], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize(("seconds", "killed"), [(600, True), (0.5, False)])
def test_a_child_that_goes_on_for_ever_ends_with_tests_that_are_killed_and_after_its_time(seconds, killed):
    with started([sys.executable, "-c", PARENT % seconds], cwd=ROOT) as parent:
        assert parent.stdout.readline() == "1\n"
        (child,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
        if killed:
            parent.kill()
        assert gone(child)


@pytest.mark.parametrize(
    ("way", "end", "code"), [("-c", "0", 0), ("file", "7", 7), ("-m", "error", 1), ("-c", "signal", -signal.SIGKILL)]
)
def test_a_fork_is_as_a_fresh_interpreter(tmp_path, monkeypatch, way, end, code):
    (tmp_path / "telling.py").write_text(TELLING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASKED", "yes")
    asked = {"-c": ["-c", TELLING], "-m": ["-m", "telling"], "file": ["telling.py"]}[way]
    fresh = run_child([sys.executable, *asked, end, "b"])
    assert fresh.returncode == code
    for taken_down in (False, True) if way == "-m" else (False,):
        python = python_with_frameworks(taken_down)
        fork = run_child([*python, *asked, end, "b"])
        assert fork.returncode == code
        assert fork.stdout == fresh.stdout
        reported = [[lines[0], lines[-1]] for lines in (fork.stderr.splitlines(), fresh.stderr.splitlines())]
        assert reported[0] == reported[1] and reported[0][0] == "an error"


def test_a_fork_can_be_interrupted_and_ends_with_a_test_that_fails():
    with started([*python_with_frameworks(), "-c", COUPLE]) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.returncode == -signal.SIGINT
    with pytest.raises(ZeroDivisionError), started([*python_with_frameworks(), "-c", COUPLE]) as process:
        grandchild = int(process.stdout.readline())
        raise ZeroDivisionError
    assert gone(grandchild)


def test_a_fork_has_the_padiff_that_it_would_find_and_the_frameworks_that_it_may_have(tmp_path):
    (tmp_path / "padiff").mkdir()
    (tmp_path / "padiff" / "__init__.py").write_text("")
    telling = "import sys, padiff; print(padiff.__file__, {'torch', 'paddle'} - {*sys.modules})"
    another = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_child([*python_with_frameworks(), "-c", telling], env=another, cwd=tmp_path)
    assert done.stdout == f"{tmp_path}/padiff/__init__.py set()\n", done.stderr
    done = run_child([*python_with_frameworks(only="torch"), "-c", telling])
    assert done.stdout == f"{padiff.__file__} {{'paddle'}}\n", done.stderr

"""A trial of `padiff bisect` ends with it, also if it is killed."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from hard.children import started

pytestmark = pytest.mark.slow
CHILD = """
import os, sys
from pathlib import Path
from padiff_cli.bisect.trials import Setup, Trials
setup = Setup([sys.executable, "train.py"], Path.cwd(), sys.executable, os.environ)
Trials(Path("trials"), lambda state: setup).record("good", "good", 5)
"""


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def waited(condition, seconds: float = 90.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return bool(condition())


WAITING = "import os, time\nopen('new', 'w').write(str(os.getpid()))\nos.rename('new', 'number')\ntime.sleep(200)\n"


def test_an_interrupted_bisection_says_how_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WAITING)
    words = ("bisect", "--env", "A=1..2", "--", sys.executable, "train.py")
    with started([sys.executable, "-m", "padiff", *words]) as child:
        assert waited(Path("number").exists)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 130
        assert "the same command goes on in runs/bisect" in " ".join(out.split())
        number = int(Path("number").read_text())
        assert waited(lambda: not is_running(number), 20)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_trial_ends_with_a_bisection_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WAITING)
    with started([sys.executable, "-c", CHILD]) as child:
        assert waited(Path("number").exists)
        number = int(Path("number").read_text())
        assert is_running(number)
        child.kill()
        child.wait()
        assert waited(lambda: not is_running(number), 20)

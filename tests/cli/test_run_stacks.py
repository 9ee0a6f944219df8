"""Under `padiff run` a script's process is that of ``python SCRIPT``: stacks, flags, endings and exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# What a script sees of its process: one script.
SEEN = {
    "the stack": "import traceback; traceback.print_stack()",
    "the outer frames": "import inspect\ndef f(): print(*(frame[1:4] for frame in inspect.stack()))\nf()",
    "the depth": "import sys\nn, f = 0, sys._getframe()\nwhile f: n, f = n + 1, f.f_back\nprint(n)",
    "warnings": "import warnings\nfor level in 1, 2, 3, 9: warnings.warn('w', stacklevel=level)",
    "logging": "import logging as l\nl.basicConfig(format='%(pathname)s', level=10)\nl.info('', stacklevel=3)",
    "faulthandler": "import faulthandler; faulthandler.dump_traceback()",
    "arguments": "import sys; print(sys.argv, sys.path[0], sys.flags, sys.warnoptions, sys._xoptions)",
    "the main module": "print(__name__, __file__, __spec__, __package__, __builtins__, sorted(globals()))",
    "a class of main": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__)",
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nprint(A())",
    "atexit": "import atexit\natexit.register(print, 'first'); atexit.register(print, 'second'); print('main')",
    "threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "input": "import sys; print(sys.stdin.read(), sys.stdin.isatty())",
}
# How it ends.
ENDS = {
    "an exception": "def f(): return 1 / 0\nf()",
    "a chain": "try: 1 / 0\nexcept ZeroDivisionError as error: raise KeyError('x') from error",
    "a group": "raise ExceptionGroup('g', [ValueError(1)])" if sys.version_info >= (3, 11) else "raise ValueError",
    "a hook": "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_next)\n1 / 0",
    "a syntax error": "def f(:",
    "code 0": "import sys; sys.exit()",
    "an early exit": "import os; os._exit(7)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(1)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(1)",
    "a handler": "import signal, os, sys\nsignal.signal(15, lambda *a: sys.exit(0))\nos.kill(os.getpid(), 15)",
    "spawned": (
        "import multiprocessing as m\ndef f(q): q.put(__name__)\nif __name__ == '__main__':\n"
        "    c = m.get_context('spawn'); q = c.Queue(); p = c.Process(target=f, args=(q,)); p.start(); print(q.get())\n"
        "    p.join(); print(p.exitcode)"
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ended(*command: object, **environment: str):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
        capture_output=True,
        text=True,
        input="given",
        timeout=60,
    )
    lines = [
        re.sub("thread 0x[0-9a-f]+", "thread", line)
        for line in done.stderr.splitlines()
        if not line.startswith("padiff: ")
    ]
    return done.returncode, done.stdout, lines, done.stderr


@pytest.mark.parametrize("text", ["\n".join(SEEN.values()), *ENDS.values()], ids=["all that it sees", *ENDS])
def test_a_script_ends_and_sees_its_stack_as_under_python(text):
    Path("train.py").write_text(text)
    plain, run = ended("train.py", "--a", "b"), ended("-m", "padiff", "run", "train.py", "--a", "b")
    assert run[:3] == plain[:3]
    if plain[2][:1] == ["Traceback (most recent call last):"]:  # after which nothing is said
        assert run[3].splitlines() == plain[2]


def test_pythons_options_are_the_scripts():
    options = ["-W", "error::DeprecationWarning", "-X", "dev", "-O", "-u", "-b", "-B"]
    Path("train.py").write_text(SEEN["arguments"])
    assert ended(*options, "-m", "padiff", "run", "train.py")[:3] == ended(*options, "train.py")[:3]


def test_without_options_nothing_of_recording_is_imported_before_the_script():
    Path("train.py").write_text("")
    imported = ended("-X", "importtime", "-m", "padiff", "run", "train.py")[3]
    assert "padiff_cli.run.launch" in imported
    assert "padiff_hooks" not in imported and "padiff.recorder" not in imported


def test_a_warning_option_of_the_environment_is_not_doubled():
    Path("train.py").write_text(SEEN["arguments"])
    plain = ended("train.py", PYTHONWARNINGS="ignore,error::UserWarning")
    assert ended("-m", "padiff", "run", "train.py", PYTHONWARNINGS="ignore,error::UserWarning")[:3] == plain[:3]


@pytest.mark.parametrize("kind", ["module", "package", "folder"])
def test_modules_and_folders_run_as_under_python(kind):
    path = {"module": "train.py", "package": "train/__main__.py", "folder": "train/__main__.py"}[kind]
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(SEEN["the outer frames"] + "\n" + SEEN["arguments"])
    command = ["train"] if kind == "folder" else ["-m", "train"]
    plain, run = ended(*command, "x"), ended("-m", "padiff", "run", *command, "x")
    assert run[:3] == plain[:3]
    assert plain[0] == 0


@pytest.mark.parametrize("ending", ["'no data'", "3"])
def test_what_a_script_says_as_it_exits_comes_first(ending):
    Path("train.py").write_text(f"import sys; sys.exit({ending})")
    plain, run = ended("train.py"), ended("-m", "padiff", "run", "train.py")
    assert run[:3] == plain[:3]
    last = "padiff: train.py is not recorded: it imported neither torch nor paddle in this process"
    assert run[3].splitlines() == [*plain[2], last]


def test_one_padiff_run_inside_of_another():
    Path("train.py").write_text(SEEN["the stack"])
    run = ended("-m", "padiff", "run", "--", sys.executable, "-m", "padiff", "run", "train.py")
    assert run[:3] == ended("train.py")[:3]
    assert run[3].count("padiff: ") == 1


def test_a_script_that_is_killed_is_reported_as_killed():
    Path("train.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert ended("-m", "padiff", "run", "train.py")[0] == -signal.SIGKILL

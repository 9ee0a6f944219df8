"""Child processes that have the frameworks already: one process imports them, and forks for each child.

    run_child([*python_with_frameworks(), "-W", "ignore", "train.py"])

is ``run_child([sys.executable, "-W", "ignore", "train.py"])``, seconds sooner: arguments, folder, environment, pipes,
Ctrl-C and exit code are those of a fresh interpreter. What is not: torch, paddle and padiff are imported already, and
random numbers of Python and numpy begin alike in each. So a test of what an import does takes ``sys.executable``.

The process that forks imports, and computes nothing: there are no threads that a fork would lose. The processes of
pytest-xdist share it, and it ends with them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib.util
import marshal
import os
import shlex
import signal
import socket
import struct
import sys
import tempfile
import time
import types
import warnings
import weakref
from pathlib import Path

#: An optimizer of torch imports its compiler; Lightning imports the other two, and the plugin's tests start pytest.
IMPORTED = {
    "torch": ("torch", "torch._dynamo", "torch.utils.tensorboard", "torchmetrics", "pytest"),
    "paddle": ("paddle",),
}
#: Of padiff, what most forks import: where both frameworks are, and from where the tests have it.
OWN = ("padiff.recorder", "padiff.frameworks.torch", "padiff.frameworks.paddle", "padiff.compare.diagnose.first",
       "padiff_hooks.training", "padiff_cli.main", "padiff_cli.commands.compare", "padiff_cli.commands.run",
       "padiff_cli.run.hosts", "padiff_cli.run.processes", "padiff_cli.run.recording")  # fmt: skip
PACKAGES = ("padiff", "padiff_hooks", "padiff_cli")
#: A test may set another one.
PYTHON = sys.executable
#: Runs this file under a name that is no file's: runs keep lines of the files on the stack.
SERVE = "import sys; exec(compile(open(sys.argv.pop(1)).read(), '<forks>', 'exec'))"

#: Exit code where an import starts a thread, as paddle 3.0's does: a fork would lose it. Nothing is forked then.
THREADS = 3
_threaded: set[str] = set()


def python_with_frameworks(taken_down: bool = False, only: str = "", children: bool = False) -> list[str]:
    """The beginning of a command, in the place of ``sys.executable``.

    Args:
        only: the one framework that is imported, for what has to run without the other. Default: both are. Of torch
            alone, which takes seconds to import, paddle's modules are hidden.
        taken_down: whether all modules and objects are taken down at the end, which takes ten times as long as the
            fork: of the frameworks there are a million. For tests of how a process ends; what is registered with
            ``atexit`` is called without, too.
        children: whether the processes that it starts as ``sys.executable`` are forks, too.
    """
    hidden, only = ("paddle", "") if only == "torch" else ("", only)
    tests = str(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    address = f"padiff-tests-{tests}{only}"
    if address not in _threaded and not _listens(address):
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [PYTHON, "-c", SERVE, __file__, address, tests, *([only] if only else IMPORTED)]
        environment = {**os.environ, **threads, "PYTHONPATH": "", "PADIFF_TESTED": _place(sys.path)}
        pid = os.posix_spawn(PYTHON, command, environment, setsid=True)
        while not _listens(address):
            ended, code = os.waitpid(pid, os.WNOHANG) if pid else (0, 0)
            if code and os.waitstatus_to_exitcode(code) == THREADS:
                _threaded.add(address)
                break
            assert code == 0, "the process that forks has failed"
            pid = 0 if ended else pid
            time.sleep(0.05)
    if address in _threaded:
        return [PYTHON]
    options = [*(["--without", hidden] if hidden else []), *(["--taken-down"] if taken_down else [])]
    options += ["--executable", str(interpreter())] if children else []
    return [PYTHON, "-IS", str(Path(__file__).with_name("fork_start.py")), address, *options]


@functools.cache
def interpreter(apart: bool = False) -> Path:
    """The same as a program, for what takes one word only.

    Args:
        apart: whether each script has the one framework only that is in its name.
    """
    folder = tempfile.TemporaryDirectory(prefix="padiff-tests-", dir="/tmp")  # a test may set its own TMPDIR
    atexit.register(folder.cleanup)
    program = Path(folder.name, "python")
    scripts = [f'*{name}.py*) exec {shlex.join(python_with_frameworks(only=name))} "$@";;\n' for name in IMPORTED]
    cases = f'case "$*" in\n{"".join(scripts)}esac\n' if apart else ""
    command = python_with_frameworks()
    command += ["--executable", str(program)] if len(command) > 1 and not apart else []
    program.write_text(f'#!/bin/sh\n{cases}exec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    return program


def _listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(f"\0{address}") == 0


def serve(address: str, tests: str, *frameworks: str) -> None:
    """Import the frameworks, then fork for each that asks, until the tests end.

    Returns in the forks, when they have done what they were to do.
    """
    path = sys.path[1:]  # without this folder
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{address}")
    except OSError:  # another process of these tests was first
        return
    atexit.register(_end)  # what is registered first is called last
    gc.disable()  # imports make a million objects and no garbage
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules["pyarrow"] = None  # type: ignore[assignment]  # it starts threads, and pandas does without it
        for name in (name for framework in frameworks for name in IMPORTED[framework]):
            importlib.import_module(name)
        tested = os.environ.pop("PADIFF_TESTED")
        if len(frameworks) > 1 and tested:
            sys.path.insert(0, tested)
            for name in OWN:
                importlib.import_module(name)
            sys.path.remove(tested)
    del sys.modules["pyarrow"]
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(THREADS)
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()  # rather than in each fork, which would touch thousands of objects
    gc.collect()
    gc.freeze()
    gc.enable()
    listener.listen(64)
    waiting: dict[int, socket.socket] = {}
    while os.path.exists(f"/proc/{tests}"):
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with waiting.pop(ended[0]) as client, contextlib.suppress(OSError):
                    client.send(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "little", signed=True))
        listener.settimeout(0.02 if waiting else 1)
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        size, files, *_ = socket.recv_fds(client, 4, 250)
        if not size:  # somebody only looked
            client.close()
            continue
        request = marshal.loads(client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
        pid = os.fork()
        if not pid:
            for other in (listener, *waiting.values()):
                other.close()
            numbers, *asked = request
            _become(client, dict(zip(numbers, files)))
            _run(path, *asked)
            return
        client.send(pid.to_bytes(4, "little"))
        for file in files:
            os.close(file)
        waiting[pid] = client


def _place(path: list[str]) -> str:
    """Where padiff is found on a path; empty where it is not."""
    places = (os.path.abspath(place) for place in path)
    return next((place for place in places if os.path.exists(os.path.join(place, "padiff", "__init__.py"))), "")


def _hide(*packages: str) -> None:
    """Have these imported anew. What they were is kept, so that nothing of it is taken down."""
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    _hide.hidden = [*getattr(_hide, "hidden", ()), *(sys.modules.pop(name) for name in names)]


def _become(client: socket.socket, files: dict[int, int]) -> None:
    """Take the place of the process that a test started, with its files by their numbers."""
    os.setsid()
    moved = {}
    for number, file in [*files.items(), (-1, client.detach())]:  # out of the way of all numbers
        moved[number] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 500)
        os.close(file)
    client = socket.socket(fileno=moved.pop(-1))
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    # Anew: of those that were there Python remembers whether they could seek.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    # The fork, and all that it forks, are killed when the process that a test started for it is gone.
    fcntl.fcntl(client, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(client, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(client, fcntl.F_SETFL, fcntl.fcntl(client, fcntl.F_GETFL) | os.O_ASYNC)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pid, *_ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.getppid = lambda: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    _become.client = client  # it stays open for as long as the fork lives


class _Executed(BaseException):
    """A program replaces the process by Python: the fork begins anew, with its modules."""


def _execute(execv, program: str, words: list[str]) -> None:
    if program != sys.executable:
        execv(program, words)
    raise _Executed(*words)


def _run(path: list[str], args: list[str], folder: str, environment: dict[str, str]) -> None:
    """Do what ``python ARGS`` would; a program that becomes another Python, as ``padiff run`` does, goes on here."""
    execv, os.execv = os.execv, functools.partial(_execute, os.execv)
    try:
        _run_once(path, args, folder, environment)
        return
    except _Executed as executed:
        words = executed.args[1:]
    finally:
        os.execv = execv
    environment = dict(os.environ)
    sys.path[:] = [*dict.fromkeys([*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path])]
    while words[0][:2] in ("-B", "-X", "-W", "-u"):  # which this process has already
        words = words[2 if words[0] == "-X" else 1 :]
    _run(path, list(words), os.getcwd(), environment)


def _run_once(path: list[str], args: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    if "multiprocessing.process" in sys.modules:  # which looks for a script below the folder that it began in
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = folder
    if "padiff.system.lazily" in sys.modules:  # which is that of the import
        importlib.reload(sys.modules["padiff.system.lazily"])
    os.environ.clear()
    os.environ.update(environment)
    if args[0] == "--without":
        _, hidden, *args = args
        _hide(hidden, *PACKAGES)
    at_once = args[0] != "--taken-down"
    if at_once:
        # What the frameworks do at the end, for each of their operators, takes longer than the fork.
        weakref.finalize._registry = {}
        if "paddle.base.libpaddle" in sys.modules:
            atexit.unregister(sys.modules["paddle.base.libpaddle"].clear_kernel_factory)
    while args[0] in ("--taken-down", "--executable", "-u", "-B", "-I") or args[0].startswith("-W"):
        option = args.pop(0)
        if option == "--executable":
            sys.executable = args.pop(0)
            if "multiprocessing.spawn" in sys.modules:
                sys.modules["multiprocessing.spawn"].set_executable(sys.executable)
        elif option.startswith("-W"):
            warnings.simplefilter((option[2:] or args.pop(0)).partition(":")[0])
    main = types.ModuleType("__main__")
    kind, sys.argv = ("file", args) if args[0] not in ("-c", "-m") else (args[0], args[1:])
    first = os.path.dirname(os.path.abspath(sys.argv[0])) if kind == "file" else folder if kind == "-m" else ""
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *dict.fromkeys([*given, *path])]
    sys.path_importer_cache.clear()
    own = getattr(sys.modules.get("padiff"), "__file__", None)
    if own and _place(sys.path) != os.path.dirname(os.path.dirname(own)):
        _hide(*PACKAGES)
    if "PADIFF_RUN_PROCESSES" in environment:  # as Python does by itself when it starts
        importlib.import_module("padiff_cli.run.startup").begin()
    sys.modules["__main__"], _run.before = main, sys.modules["__main__"]
    if kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
    else:
        if kind == "-m":
            main.__spec__ = importlib.util.find_spec(sys.argv[0])
            if main.__spec__.submodule_search_locations is not None:
                main.__spec__ = importlib.util.find_spec(f"{sys.argv[0]}.__main__")
            main.__package__, sys.argv[0] = main.__spec__.parent, main.__spec__.origin
        main.__file__ = sys.argv[0]
        with open(main.__file__) as file:
            code = file.read()
    try:
        exec(compile(code, getattr(main, "__file__", "<string>"), "exec"), vars(main))
    except BaseException as error:
        _end.code = _code_of(error) if at_once else None
        raise
    _end.code = 0 if at_once else None


def _code_of(ended: BaseException) -> int | None:
    """The code that a process exits with; `None` where a signal ends it."""
    if isinstance(ended, KeyboardInterrupt):
        return None
    if isinstance(ended, SystemExit):
        return ended.code & 255 if isinstance(ended.code, int) else int(ended.code is not None)
    return 1


def _end() -> None:
    """End a fork at once, when all that was to be done at its end is done."""
    if _end.code is not None:
        with contextlib.suppress(OSError, ValueError):  # what can't be written is reported by the interpreter
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_end.code)


_end.code = None


if __name__ == "__main__":
    serve(*sys.argv[1:])

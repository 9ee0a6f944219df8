"""A `padiff run` and the processes below it: their options, how they begin to watch, who records into which folder."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from padiff.dump.store import AnyPath, as_local, is_remote, shown
from padiff.errors import UsageError
from padiff.system.terminal import printable
from padiff_cli.run.startup import VARIABLE

#: Program of ``python -c`` that calls padiff with its arguments behind the number of a process, with which it ends.
PADIFF_WITH_PARENT = (
    "import sys; sys.path[:1] = []; from padiff.system.process import end_with_parent; "
    "end_with_parent(int(sys.argv.pop(1))); from padiff_cli.main import main; sys.exit(main(sys.argv[1:]))"
)
# What launchers set: torchrun and accelerate, paddle.distributed.launch.
_RANKS = ("RANK", "PADDLE_TRAINER_ID")
_PTH = "padiff_processes.pth"
# Folders of claims: this machine's, which others may share the place with, and the number of the launch.
_MACHINE = f"{zlib.crc32((os.uname().nodename if hasattr(os, 'uname') else '').encode()):08x}"
_CLAIMS = re.compile(rf"padiff-run-{_MACHINE}-(\d+)-[0-9a-f]+")
# Of a run folder's options, those that are paths.
_PATHS = ("reference", "logdir")


@dataclass(frozen=True)
class Launch:
    """A `padiff run`, as the processes below it know it from their environment.

    Attributes:
        script: the script's or command's name, for messages.
        dir_path: the run folder.
        options: of the recording.
        is_command: `padiff run` became a command, and trains nothing itself.
        number: of the process that `padiff run` is.
        claims: a folder of this machine's; a file in it for each rank of each run folder.
    """

    script: str
    dir_path: str
    options: Mapping[str, Any]
    is_command: bool = False
    number: int = field(default_factory=os.getpid)
    claims: str = field(
        default_factory=lambda: os.path.join(
            tempfile.gettempdir(), f"padiff-run-{_MACHINE}-{os.getpid()}-{os.urandom(4).hex()}"
        )
    )

    @classmethod
    def from_json(cls, text: str) -> Launch:
        """Read what `export` wrote."""
        return cls(**json.loads(text))

    @classmethod
    def from_environment(cls) -> Launch:
        """Read the launch that this process is below of."""
        return cls.from_json(os.environ[VARIABLE].partition(" ")[2])

    def export(self) -> None:
        """Put the launch into the environment, from which processes below this one have it."""
        values = asdict(self)
        values["dir_path"] = _absolute(self.dir_path)
        values["options"] = {
            name: _absolute(value) if name in _PATHS else value for name, value in self.options.items()
        }
        os.environ[VARIABLE] = f"{self.number} {json.dumps(values)}"
        if not _is_installed():
            paths = [str(Path(__file__).with_name("path")), *filter(None, [os.environ.get("PYTHONPATH")])]
            if paths[0] not in paths[-1].split(os.pathsep)[: len(paths) - 1]:
                os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    # -- who records where ---------------------------------------------------------------------------------------

    def claim(self, name: str) -> bool:
        """Claim a name for this process. Return False if another process has it."""
        try:
            os.makedirs(self.claims, mode=0o700, exist_ok=True)
            os.close(os.open(os.path.join(self.claims, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # no room for claims: the locks of run folders are left
            return True
        return True

    def release(self, name: str) -> None:
        """Give up a claim of this process."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.claims, name))

    def claims_of(self, name: str) -> list[str]:
        """Return the claims that begin with a name."""
        with contextlib.suppress(OSError):
            return [claim for claim in os.listdir(self.claims) if claim.startswith(name)]
        return []


def delete_abandoned_claims() -> None:
    """Delete the claims of this user's launches on this machine that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(tempfile.gettempdir()):
            match = _CLAIMS.fullmatch(name)
            folder = os.path.join(tempfile.gettempdir(), name)
            with contextlib.suppress(OSError):
                if match is None or _is_alive(int(match[1])) or os.lstat(folder).st_uid != os.getuid():
                    continue
                for claim in os.listdir(folder):
                    os.unlink(os.path.join(folder, claim))
                os.rmdir(folder)


def _is_alive(number: int) -> bool:
    """Return True if a process of this number may be alive."""
    if not hasattr(os, "getuid"):
        return True  # Windows: a signal 0 would end it
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def launched_rank() -> int:
    """Which of its processes a launcher says that this one is; 0 where there is none."""
    for name in _RANKS:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


def check_free(dir_path: AnyPath, existing: str) -> None:
    """Refuse a folder that holds a run already, before the script begins.

    Raises:
        UsageError: it does, and ``existing`` does not say what to do with it.
    """
    # Other processes of the same launch begin later than the first may have made the folder.
    if existing == "error" and not launched_rank() and (dir_path / "run.json").exists():
        raise UsageError(
            f"{printable(shown(dir_path))} holds a run already: give another --dir, or --existing overwrite or resume"
        )


def find_command(words: Sequence[str]) -> str | None:
    """Return the program that a command line runs; None if its first word is a Python script.

    Raises:
        UsageError: there is neither a script nor a program of that name.
    """
    if not words:
        return None
    word = words[0]
    if os.path.isfile(word) and (word.endswith(".py") or not os.access(word, os.X_OK)):
        return None
    program = shutil.which(word) or shutil.which(word, path=sysconfig.get_path("scripts"))
    if program is None:
        raise UsageError(f"there is no script and no command {word}")
    return program


def become(program: str, words: Sequence[str]) -> NoReturn:
    """Replace this process by a program: signals, output and exit code are the program's.

    Raises:
        OSError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these, and a program inherits that.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execv(program, list(words))


def python_options() -> list[str]:
    """Return this interpreter's options for another one: ``-W``, ``-X`` and the like.

    Those that keep Python from its site packages, or from the environment, are left out: a script that is run without
    them finds what it imports.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    given = [f"-W{warning}" for warning in os.environ.get("PYTHONWARNINGS", "").split(",")]
    return [option for option in options if option not in ("-I", "-E", "-P", "-s", "-S", *given)]


def name_of(words: Sequence[str]) -> str:
    """Return what messages call a command: the script that it launches, or its program."""
    return Path(next((word for word in words if word.endswith(".py")), words[0])).name


def numbered(dir_path: str) -> Iterator[str]:
    """Yield the folders of runs that follow each other: ``DIR``, ``DIR-2``, ``DIR-3``, ..."""
    yield dir_path
    number = 2
    while True:
        yield f"{dir_path}-{number}"
        number += 1


def of_workers(dir_path: str) -> Iterator[str]:
    """Yield the folders of processes without a rank: ``DIR-worker-0``, ``DIR-worker-1``, ..."""
    number = 0
    while True:
        yield f"{dir_path}-worker-{number}"
        number += 1


def worker_folders(dir_path: AnyPath) -> list[Path]:
    """Return the folders of processes without a rank that are there."""
    folder = as_local(dir_path)
    if folder is None:
        return []
    return sorted(folder.parent.glob(f"{glob.escape(folder.name)}-worker-*"))


def _absolute(path: Any) -> str:
    return str(path) if is_remote(path) else os.path.abspath(path)


def _is_installed() -> bool:
    """Return True if Python reads the hook's ``.pth`` file as it starts."""
    places = [
        *getattr(site, "getsitepackages", list)(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]
    return any(os.path.exists(os.path.join(place, _PTH)) for place in places)

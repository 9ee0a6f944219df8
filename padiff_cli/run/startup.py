"""Start-up hook of ``padiff run``'s process and of those below: ``padiff_processes.pth`` and ``path/sitecustomize.py``.

Most processes below train nothing: launchers, data workers, resource trackers. So the hook imports nothing of padiff
until such a process makes an optimizer, or imports a trainer of a host. In the script's own process it waits for a
framework: layers that are called without an optimizer tell why nothing is recorded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from padiff_cli.after_import import AfterImport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

#: Number of the process that `padiff run` became or is, and a `Launch` as JSON.
VARIABLE = "PADIFF_RUN_PROCESSES"
#: Modules of hosts whose trainers make their optimizer while they train. `padiff_cli.run.hosts` knows more of them.
TRAINERS = (
    "transformers.trainer",
    "paddleformers.trainer.trainer",
    "paddlenlp.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
    "lightning.pytorch.trainer.trainer",
)


class contained:  # noqa: N801 - a `with` reads like a call; contextlib may not be imported yet
    """Report an error of padiff's own in one line, and go on: the process is the user's.

    Args:
        what: what follows from it.
    """

    def __init__(self, what: str = "this process is not recorded") -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            text = " ".join(str(error).split())
            print(f"padiff: {self._what}: {type(error).__name__}: {text}", file=sys.stderr)
        return isinstance(error, Exception)


class StartUp:
    """Waits for the first optimizer of a process, then has `padiff_cli.run.processes` record.

    Args:
        is_main: the process is the script that `padiff run` became; wait for the import of a framework.

    Attributes:
        is_fork: the process is a fork of the one that the hook was begun in.
    """

    def __init__(self, is_main: bool = False) -> None:
        self.is_fork, self._is_main = False, is_main
        self._folder = _folder()
        self._patches: list[Callable[[], None]] = []
        self._imports: AfterImport | None = None
        self._over = False
        at_once = dict.fromkeys(("torch", "paddle") if is_main else TRAINERS, lambda _: self._record())
        optimizers = {"torch.optim.optimizer": self._on_torch, "paddle.optimizer.optimizer": self._on_paddle}
        self._imports = AfterImport(at_once if is_main else {**at_once, **optimizers})
        if self._over:  # of what is imported already, the import hook has told
            self._imports.remove()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_fork)

    def stop(self) -> None:
        """Wait for nothing any more, and put everything back."""
        self._over = True
        if self._imports is not None:
            self._imports.remove()
        while self._patches:
            self._patches.pop()()

    def _in_fork(self) -> None:
        self.is_fork = True

    def _record(self) -> None:
        if self._over:
            return
        self.stop()
        with contained():
            import warnings

            with warnings.catch_warnings():  # of imports, which the script may have turned into errors
                warnings.simplefilter("ignore")
                from padiff.system.lazily import begin_in
                from padiff_cli.run.processes import record_process
            begin_in(self._folder)
            record_process(self._is_main and not self.is_fork, self.is_fork)

    def _on_torch(self, optimizers: ModuleType) -> None:
        cls = optimizers.Optimizer
        begin = cls.__init__

        # `functools` may not be imported yet, and torch reads the signature.
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self._record()
            cls.__init__(optimizer, *args, **kwargs)

        __init__.__wrapped__ = begin  # type: ignore[attr-defined]
        cls.__init__ = __init__
        self._patches.append(lambda: setattr(cls, "__init__", begin))

    def _on_paddle(self, optimizers: ModuleType) -> None:
        # Paddle's AdamW calls no `__init__` of this class.
        cls = optimizers.Optimizer

        def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._patches:
                return object.__new__(kind)
            self._record()
            return cls.__new__(kind, *args, **kwargs)

        # Not taken off: Python takes ``object``'s for a mistake, once there was another one.
        cls.__new__ = new
        self._patches.append(lambda: None)


_startup: StartUp | None = None


def begin() -> None:
    """Begin the hook in a process below `padiff run`; once, however often this is called."""
    global _startup
    if _startup is None:
        number, _, launch = os.environ[VARIABLE].partition(" ")
        if number != str(os.getpid()):
            _startup = StartUp()
            return
        # The script or the command that `padiff run` became.
        import atexit
        import json

        values = json.loads(launch)
        atexit.register(_end_launch, **values)
        _startup = StartUp(is_main=not values["is_command"])


def _end_launch(script: str, is_command: bool, number: int, claims: str, **_: Any) -> None:
    """End the recording of the process that `padiff run` became. Say so if nothing was recorded; forget the claims."""
    if os.getpid() != number:  # a fork
        return
    with contained():
        processes: Any = sys.modules.get("padiff_cli.run.processes")
        if processes is not None:
            processes.end_process()
        claimed = os.listdir(claims) if os.path.isdir(claims) else []
        # A failure is to be read, and nothing after it. To import then would lose the exit code of Ctrl-C.
        if not claimed and not hasattr(sys, "last_value") and (is_command or processes is None):
            from padiff.system.terminal import say

            why = (
                "no process made a step with an optimizer of torch or paddle"
                if is_command
                else "it imported neither torch nor paddle in this process"
            )
            say(f"{script} is not recorded: {why}")
        if os.path.isdir(claims):
            for claim in os.listdir(claims):
                os.unlink(os.path.join(claims, claim))
            os.rmdir(claims)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""

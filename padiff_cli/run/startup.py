"""Start-up hook of the processes below ``padiff run``: ``padiff_processes.pth`` and ``path/sitecustomize.py`` call it.

Most of these processes train nothing: launchers, data workers, resource trackers. So the hook imports nothing of padiff
until a process makes an optimizer, or imports a trainer of a host.
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

    Attributes:
        is_fork: the process is a fork of the one that the hook was begun in.
    """

    def __init__(self) -> None:
        self.is_fork = False
        self._patches: list[Callable[[], None]] = []
        trainers = dict.fromkeys(TRAINERS, lambda _: self._record())
        self._imports = AfterImport(
            {**trainers, "torch.optim.optimizer": self._on_torch, "paddle.optimizer.optimizer": self._on_paddle}
        )
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_fork)

    def end(self) -> None:
        """Wait for nothing any more, and put everything back."""
        self._imports.remove()
        while self._patches:
            self._patches.pop()()

    def _in_fork(self) -> None:
        self.is_fork = True

    def _record(self) -> None:
        self.end()
        with contained():
            import warnings

            with warnings.catch_warnings():  # of imports, which the script may have turned into errors
                warnings.simplefilter("ignore")
                from padiff_cli.run.processes import record_process
            record_process(self.is_fork)

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
        _startup = StartUp()
        number, _, launch = os.environ[VARIABLE].partition(" ")
        if number == str(os.getpid()):  # the command that `padiff run` became
            import atexit

            atexit.register(_end_launch, launch)


def end() -> None:
    """End the hook, where it was begun: the process is recorded by a `padiff run` of its own."""
    if _startup is not None:
        _startup.end()


def _end_launch(launch: str) -> None:
    with contained():
        from padiff_cli.run.launch import Launch

        Launch.from_json(launch).end()

"""What `padiff run` records of a script: one training, by whoever sees it first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from padiff.dump.local import shown
from padiff.dump.remote_path import AnyPath
from padiff.errors import UsageError
from padiff.records import printable
from padiff.system.switches import say
from padiff_hooks.training import TrainingRecorder

# What launchers set: torchrun and accelerate, paddle.distributed.launch.
_RANKS = ("RANK", "PADDLE_TRAINER_ID")


def launched_rank() -> int:
    """Which of its processes a launcher says that this one is; 0 where there is none."""
    for name in _RANKS:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


class Recording:
    """One recording of a script.

    Args:
        script: what it is called in messages.
        dir_path: the run folder.
        options: those of `padiff_hooks.options.TrainingOptions`.

    Attributes:
        attached: whether a training is recorded, or was.

    Raises:
        UsageError: an option can't be meant.
    """

    def __init__(self, script: str, dir_path: AnyPath, options: dict[str, Any]) -> None:
        # A full disk is to be heard of, and is no reason for a training of somebody else's to end.
        self.script, self.dir_path, self.options = script, dir_path, {"on_error": "warn", **options}
        self.attached = False
        self._said = False
        self._endings: list[Callable[[], None]] = []
        TrainingRecorder(dir_path, **self.options)  # whatever is wrong with the options is said before the script runs

    def take(self, what: str) -> None:
        """A training is seen, and will be recorded: say so."""
        self.attached = self._said = True
        every = self.options.get("every_n_steps", 1)
        self._say(
            f"recording {what}, {'every step' if every == 1 else f'every {every} steps'}, into {shown(self.dir_path)}"
        )

    def refuse(self, why: str) -> None:
        """Nothing (more) is recorded: say why, once. The script goes on."""
        if not self._said or self.attached:
            self._say(f"{self.script} is {'not recorded any more' if self.attached else 'not recorded'}: {why}")
        self._said = True

    def leave(self) -> None:
        """The script records by itself."""
        if not self._said:
            self._said = True
            self._say(f"{self.script} records by itself, which is left as it is")

    def say_of_nothing(self) -> None:
        """The script is over."""
        if self._said:
            return
        if any(name in sys.modules for name in ("torch", "paddle")):
            why = "it made no step with an optimizer of torch or paddle in this process"
        else:
            why = "it imported neither torch nor paddle in this process"
        self.refuse(why)

    def _say(self, text: str) -> None:
        if not launched_rank():
            say(text)


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

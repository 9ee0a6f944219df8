"""What `padiff run` records of a script: one training, by whoever sees it first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from padiff.dump.prepare import remove_without_steps
from padiff.dump.store import AnyPath, as_local, run_folder, shown
from padiff.system.terminal import say
from padiff_cli.run.launch import launched_rank
from padiff_hooks.training import TrainingRecorder


class Recording:
    """One recording of a script.

    Args:
        script: what it is called in messages.
        dir_path: the run folder.
        options: those of `padiff_hooks.options.TrainingOptions`.

    Attributes:
        attached: whether a training is recorded, or was.
        alone: whether the script records by itself.

    Raises:
        UsageError: an option can't be meant.
    """

    def __init__(self, script: str, dir_path: AnyPath, options: dict[str, Any]) -> None:
        # A full disk is to be heard of, and is no reason for a training of somebody else's to end.
        self.script, self.dir_path, self.options = script, dir_path, {"on_error": "warn", **options}
        self.attached = self.alone = False
        self._said = False
        self._number = 1
        self._overwrite = False
        self._endings: list[Callable[[], None]] = []
        TrainingRecorder(dir_path, **self.options)  # whatever is wrong with the options is said before the script runs

    def target(self) -> tuple[AnyPath, dict[str, Any]]:
        """Return the folder and the options of the training that begins: a second one has ``DIR-2``."""
        options = dict(self.options)
        if self._overwrite:
            options["existing"] = "overwrite"
        if self._number == 1:
            return self.dir_path, options
        behind = f"-{self._number}"
        options.pop("start_step", None)
        if options.get("name"):
            options["name"] += behind
        if options.get("reference") is not None:
            reference = f"{options['reference']}{behind}"
            if (run_folder(reference, "--reference") / "run.json").exists():
                options["reference"] = reference
            else:
                del options["reference"]
                options.pop("on_diff", None)
        return run_folder(f"{self.dir_path}{behind}", "--dir"), options

    def advance(self) -> None:
        """A training is over, and its run is whole: the next one goes to a folder of its own."""
        self._number += 1
        self._overwrite = False

    def overwrite(self) -> None:
        """No step was recorded of what began: the folder is free, unless an earlier run goes on in it."""
        self._overwrite = self.options.get("existing") != "resume"

    def may_try(self) -> bool:
        """Return True if what may be a training can be recorded on trial: no run goes on in the folder."""
        return self.options.get("existing") != "resume" and as_local(self.target()[0]) is not None

    def try_out(self) -> None:
        """What may be a training is recorded: `announce` or `undo` follows."""

    def undo(self) -> None:
        """What began was no training: remove its run, which has no step."""
        folder = as_local(self.target()[0])
        if folder is not None:
            remove_without_steps(folder)

    def announce(self, what: str) -> None:
        """A training is seen, and will be recorded: say so."""
        self.attached = self._said = True
        every = self.options.get("every_n_steps", 1)
        often, another = "every step" if every == 1 else f"every {every} steps", ""
        if self._number > 1:
            another = "another training, "
        self._say(f"recording {another}{what}, {often}, into {shown(self.target()[0])}")

    def add(self, text: str) -> None:
        """Say more of what is recorded."""
        self._say(text)

    def refuse(self, why: str) -> None:
        """Nothing (more) is recorded: say why, once. The script goes on."""
        if not self._said or self.attached:
            self._say(f"{self.script} is {'not recorded any more' if self.attached else 'not recorded'}: {why}")
        self._said = True

    def withdraw(self) -> None:
        """The script records by itself."""
        self.alone = True
        if not self._said:
            self._said = True
            self._say(f"{self.script} records by itself, which is left as it is")

    def say_of_nothing(self, learned: bool = False) -> None:
        """The script is over.

        Args:
            learned: whether layers were called in training, and no optimizer stepped.
        """
        if self._said:
            return
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]["ok"] and not learned:
            why = (
                "it made no step with an optimizer in this process; steps inside of a compiled function are not seen: "
                "set TORCH_COMPILE_DISABLE=1"
            )
        elif learned:
            why = (
                "it made no step with an optimizer of torch or paddle in this process. A loop without an optimizer "
                "is recorded from inside: with padiff.record(model, DIR) as rec, and rec.try_dump() after each update"
            )
        elif any(name in sys.modules for name in ("torch", "paddle")):
            why = "it made no step with an optimizer of torch or paddle in this process"
        else:
            why = "it imported neither torch nor paddle in this process"
        self.refuse(why)

    def _say(self, text: str) -> None:
        if not launched_rank():
            say(text)

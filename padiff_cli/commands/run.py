"""``padiff run [options] SCRIPT [args]``: records a script of which no line changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padiff.dump.store import AnyPath, absolute, run_folder
from padiff.errors import PadiffError, UsageError
from padiff.system.guard import Failure
from padiff.system.process import command_text
from padiff.system.terminal import printable, say
from padiff_cli.parser import Parser
from padiff_cli.run.launch import (
    Launch,
    become,
    check_free,
    delete_abandoned_claims,
    find_command,
    name_of,
    python_options,
    worker_folders,
)
from padiff_cli.run.startup import VARIABLE

MISUSE = 2

_DESCRIPTION = (
    "Run a training script as python does, or a command that launches it, and record what trains in it: transformers', "
    "PaddleFormers' or Lightning's Trainer, paddle.Model, or a plain loop; in the processes that it starts, too. "
    "Options stand before the script; each can be given by an environment variable instead. "
    "Exit code: the script's own; 2 where padiff can't begin."
)
# Options of a recording, by what they are called in `TrainingOptions`: option, type, what it is.
_OPTIONS: Mapping[str, tuple[str, Any, str]] = {
    "every_n_steps": ("every", int, "record every N-th step (default: 1)"),
    "detail": ("detail", str, "how much of each tensor: auto (default: 200 MB in full, then sketches), full, ..."),
    "full_every_n_steps": ("full-every", int, "where sketches are kept, full tensors every N-th step"),
    "replay_every_n_steps": ("replay-every", int, "keep a pack every N-th step, to do it again elsewhere"),
    "reference": ("reference", str, "a run to compare with while this one trains"),
    "on_diff": ("on-diff", str, "what a diff does: warn, stop, raise (default: warn)"),
    "logdir": ("logdir", str, "where scalars and diffs go for TensorBoard"),
    "name": ("name", str, "what reports call the run (default: the folder's name)"),
    "existing": ("existing", str, "a folder that holds a run already: error (default), overwrite or resume"),
    "start_step": ("start-step", int, "number of the first step (default: 0)"),
    "stop_after": ("stop-after", int, "end the training after N steps"),
    "max_bytes": ("max-bytes", float, "how large the run folder may become"),
}


def main(arguments: Sequence[str]) -> int:
    """Become the script's process, which records itself (`padiff_cli.run.startup`); return if padiff can't begin.

    So the script's stacks, flags, signals and exit code are those of ``python SCRIPT``.
    """
    parser = _fill(Parser(prog="padiff run", description=_DESCRIPTION))
    own, behind, is_separated = _split(arguments, parser)
    args = parser.parse_args(own)
    if args.module is None and not behind:
        parser.error("the following arguments are required: SCRIPT")
    script, rest = (args.module, behind) if args.module is not None else (behind[0], behind[1:])
    program, words = None, [*(["-m"] if args.module else []), script, *rest]
    try:
        program = find_command(behind) if args.module is None and is_separated else None
        if args.module is None and program is None and not _is_script(Path(script)):
            raise UsageError(f"there is no script {script}. A command stands after --: padiff run -- {script} ...")
        name = Path(script).name if program is None else name_of(behind)
        options = _options(args)
        folder = args.dir or os.environ.get("PADIFF_RUN_DIR") or _default_dir(name if program else script)
        place = absolute(run_folder(folder, "--dir"))
        for path in (place, *worker_folders(place)):
            check_free(path, options.get("existing", "error"))
        if options:
            _check(name, place, options)
        command = command_text(words) if program is None else ""
        if command:
            options["command"] = command
        delete_abandoned_claims()
        Launch(name, str(place), options, is_command=program is not None).export()
        if program is None:
            words = [*python_options(), *words]
    except (PadiffError, OSError) as error:
        return _refuse(error)
    except Exception as error:
        # An error of padiff's own does not keep the script from running.
        say(f"{printable(script)} is not recorded: an error of padiff's own, {Failure.from_error(error).text}")
        os.environ.pop(VARIABLE, None)
    try:
        become(program or sys.executable, words if program else [sys.executable, *words])
    except OSError as error:
        return _refuse(error)


def _refuse(error: Exception) -> int:
    print(f"padiff: {printable(str(error), lines=True)}", file=sys.stderr)
    return MISUSE


def _check(name: str, place: AnyPath, options: dict[str, Any]) -> None:
    """Make the options' folders absolute.

    Raises:
        UsageError: an option can't be meant, which is said before the script runs.
    """
    # Imported where needed: the script's process imports it anew.
    from padiff_cli.run.recording import Recording
    from padiff_hooks.options import make_folders_absolute

    make_folders_absolute(options)
    Recording(name, place, options)


def _is_script(path: Path) -> bool:
    """Return True for what Python runs by its name: a file, or a folder with a main module."""
    return path.is_file() or (path / "__main__.py").is_file()


def _fill(parser: Any) -> Any:
    parser.usage = "padiff run [options] (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]"
    parser.add_argument("--dir", metavar="RUN", help="the run folder (default: runs/NAME-OF-SCRIPT); PADIFF_RUN_DIR")
    for option, kind, text in _OPTIONS.values():
        letter = "N" if kind is int else "BYTES" if kind is float else option.upper().replace("-", "_")
        parser.add_argument(f"--{option}", type=kind, metavar=letter, help=f"{text}; {_variable(option)}")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    return parser


def _split(arguments: Sequence[str], parser: Any) -> tuple[list[str], list[str], bool]:
    """Our own arguments, and the script with its own: they begin with the first that is no option of ours.

    True if ``--`` separates them.
    """
    flags = ("-h", "--help")
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        here = arguments[place]
        if here.startswith("-m") and not here.startswith("--"):
            place += 2 if here == "-m" else 1
            break
        place += 1 if "=" in here or here in flags else 2
    behind = list(arguments[place:])
    is_separated = behind[:1] == ["--"] and not any(one.startswith("-m") for one in arguments[:place])
    return list(arguments[:place]), behind[1:] if is_separated else behind, is_separated


def _options(args: Any) -> dict[str, Any]:
    """The options that were given: on the command line, or by the environment.

    Raises:
        UsageError: a variable is not of its kind.
    """
    settings = {}
    for name, (option, kind, _) in _OPTIONS.items():
        value, variable = getattr(args, option.replace("-", "_")), _variable(option)
        if value is None and os.environ.get(variable):
            try:
                value = kind(os.environ[variable])
            except ValueError:
                raise UsageError(f"{variable} has to be a number, got {os.environ[variable]!r}") from None
        if value is not None:
            settings[name] = value
    return settings


def _variable(option: str) -> str:
    return f"PADIFF_RUN_{option.upper().replace('-', '_')}"


def _default_dir(script: str) -> Path:
    return Path("runs") / (Path(script).stem if script.endswith(".py") else Path(script).name)

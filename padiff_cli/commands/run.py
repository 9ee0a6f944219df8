"""``padiff run [options] SCRIPT [args]``: records a script of which no line changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padiff.dump.local import absolute, run_folder
from padiff.errors import PadiffError, UsageError
from padiff.records import printable
from padiff.system.guard import Failure
from padiff.system.start_folder import begin_here
from padiff.system.switches import say
from padiff_cli.parser import Parser
from padiff_cli.run import startup
from padiff_cli.run.launch import Launch, become, find_command, name_of, worker_folders
from padiff_cli.run.processes import ProcessWatch
from padiff_cli.run.recording import Recording, check_free
from padiff_cli.run.script import hide_launcher, run_module, run_script, show_as_python_does
from padiff_hooks.options import ON_DIFF, make_folders_absolute

FAILED, MISUSE = 1, 2

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
    "on_diff": ("on-diff", str, f"what a diff does: {', '.join(ON_DIFF)} (default: warn)"),
    "logdir": ("logdir", str, "where scalars and diffs go for TensorBoard"),
    "name": ("name", str, "what reports call the run (default: the folder's name)"),
    "existing": ("existing", str, "a folder that holds a run already: error (default), overwrite or resume"),
    "start_step": ("start-step", int, "number of the first step (default: 0)"),
    "max_bytes": ("max-bytes", float, "how large the run folder may become"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. What the script raises to end itself (`SystemExit`) goes on."""
    begin_here()
    parser = _fill(Parser(prog="padiff run", description=_DESCRIPTION))
    own, behind, is_separated = _split(arguments, parser)
    args = parser.parse_args(own)
    if args.module is None and not behind:
        parser.error("the following arguments are required: SCRIPT")
    script, rest = (args.module, behind) if args.module is not None else (behind[0], behind[1:])
    startup.end()  # of a padiff run above this one
    try:
        program = find_command(behind) if args.module is None and is_separated else None
        if args.module is None and program is None and not Path(script).is_file():
            raise UsageError(f"there is no script {script}. A command stands after --: padiff run -- {script} ...")
        name = Path(script).name if program is None else name_of(behind)
        options = _options(args)
        folder = args.dir or os.environ.get("PADIFF_RUN_DIR") or _default_dir(name if program else script)
        place = absolute(run_folder(folder, "--dir"))
        for path in (place, *worker_folders(place)):
            check_free(path, options.get("existing", "error"))
        make_folders_absolute(options)
        launch = Launch(name, str(place), options, is_command=program is not None)
        launch.export()
        if program is not None:
            Recording(name, place, options)
            become(program, behind)
        watch = _watch(launch)
    except (PadiffError, OSError) as error:
        print(f"padiff: {printable(str(error), lines=True)}", file=sys.stderr)
        return MISUSE
    try:
        return _record(watch, run_script if args.module is None else run_module, script, rest)
    finally:
        launch.end()


def _watch(launch: Launch) -> ProcessWatch | None:
    """Watch for the training of this process; None after an error of padiff's own, which does not keep the script from
    running.

    Raises:
        UsageError: an option is wrong.
    """
    try:
        return ProcessWatch(launch, is_main=True)
    except PadiffError:
        raise
    except Exception as error:
        text = Failure.from_error(error).text
        say(f"{launch.script} is not recorded: an error of padiff's own, {text}", alarming=True)
        return None


def _record(watch: ProcessWatch | None, run: Any, script: str, args: Sequence[str]) -> int:
    well = False  # a failure is to be read, and nothing after it
    end = watch.end if watch is not None else lambda failed: None
    try:
        run(script, args)
        well = True
        end(failed=False)
    except SystemExit as left:
        # The way scripts end that say how it went.
        well = left.code in (None, 0)
        if well:
            end(failed=False)
        raise
    except KeyboardInterrupt:
        hide_launcher()
        raise
    except Exception as error:
        end(failed=True)
        show_as_python_does(error)
        return FAILED
    finally:
        end(failed=True)  # nothing, where it has ended
        if well and watch is not None:
            watch.recording.say_of_nothing(watch.loop.learned and not watch.loop.stepped)
    return 0


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
    found = {}
    for name, (option, kind, _) in _OPTIONS.items():
        value, variable = getattr(args, option.replace("-", "_")), _variable(option)
        if value is None and os.environ.get(variable):
            try:
                value = kind(os.environ[variable])
            except ValueError:
                raise UsageError(f"{variable} has to be a number, got {os.environ[variable]!r}") from None
        if value is not None:
            found[name] = value
    return found


def _variable(option: str) -> str:
    return f"PADIFF_RUN_{option.upper().replace('-', '_')}"


def _default_dir(script: str) -> Path:
    return Path("runs") / (Path(script).stem if script.endswith(".py") else Path(script).name)

"""``padiff run [options] SCRIPT [args]``: records a script of which no line changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padiff.dump.local import run_folder
from padiff.errors import PadiffError, UsageError
from padiff.records import printable
from padiff_cli.parser import Parser
from padiff_cli.run.hosts import HostWatch
from padiff_cli.run.loop import LoopFinder
from padiff_cli.run.recording import Recording, check_free
from padiff_cli.run.script import hide_launcher, run_module, run_script, show_as_python_does
from padiff_hooks.options import ON_DIFF

FAILED, MISUSE = 1, 2

_DESCRIPTION = (
    "Run a training script as python does, and record what trains in it: transformers', PaddleFormers' or Lightning's "
    "Trainer, paddle.Model, or a plain loop. Options stand before the script; each can be given by an environment "
    "variable instead. Exit code: the script's own; 2 where padiff can't begin."
)
# Options of a recording, by what they are called in `TrainingOptions`: option, type, what it is.
_OPTIONS: Mapping[str, tuple[str, Any, str]] = {
    "every_n_steps": ("every", int, "record every N-th step (default: 1)"),
    "detail": ("detail", str, "how much of each tensor: auto (default: in full, up to 1 GB, then sketches), full, ..."),
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
    parser = _fill(Parser(prog="padiff run", description=_DESCRIPTION))
    own, behind = _split(arguments, parser)
    args = parser.parse_args(own)
    if args.module is None and not behind:
        parser.error("the following arguments are required: SCRIPT")
    script, rest = (args.module, behind) if args.module is not None else (behind[0], behind[1:])
    try:
        if args.module is None and not Path(script).is_file():
            raise UsageError(f"there is no script {script}")
        options = _options(args)
        folder = args.dir or os.environ.get("PADIFF_RUN_DIR") or _default_dir(script)
        check_free(run_folder(folder, "--dir"), options.get("existing", "error"))
        recording = Recording(Path(script).name, run_folder(folder, "--dir"), options)
    except (PadiffError, OSError) as error:
        print(f"padiff: {printable(str(error), lines=True)}", file=sys.stderr)
        return MISUSE
    return _record(recording, run_script if args.module is None else run_module, script, rest)


def _record(recording: Recording, run: Any, script: str, args: Sequence[str]) -> int:
    loop = LoopFinder(recording)
    hosts = HostWatch(recording, loop)
    well = False  # a failure is to be read, and nothing after it
    try:
        run(script, args)
        well = True
        loop.end()
    except SystemExit as left:
        # The way scripts end that say how it went.
        well = left.code in (None, 0)
        if well:
            loop.end()
        raise
    except KeyboardInterrupt:
        hide_launcher()
        raise
    except Exception as error:
        loop.fail()
        show_as_python_does(error)
        return FAILED
    finally:
        loop.fail()  # nothing, where it has ended
        hosts.remove()
        if well:
            recording.say_of_nothing(loop.learned and not loop.stepped)
    return 0


def _fill(parser: Any) -> Any:
    parser.usage = "padiff run [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.add_argument("--dir", metavar="RUN", help="the run folder (default: runs/NAME-OF-SCRIPT); PADIFF_RUN_DIR")
    for option, kind, text in _OPTIONS.values():
        letter = "N" if kind is int else "BYTES" if kind is float else option.upper().replace("-", "_")
        parser.add_argument(f"--{option}", type=kind, metavar=letter, help=f"{text}; {_variable(option)}")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    return parser


def _split(arguments: Sequence[str], parser: Any) -> tuple[list[str], list[str]]:
    """Our own arguments, and the script with its own: they begin with the first that is no option of ours."""
    flags = ("-h", "--help")
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        here = arguments[place]
        if here.startswith("-m") and not here.startswith("--"):
            place += 2 if here == "-m" else 1
            break
        place += 1 if "=" in here or here in flags else 2
    behind = list(arguments[place:])
    if arguments[place : place + 1] == ["--"] and not any(one.startswith("-m") for one in arguments[:place]):
        behind = behind[1:]
    return list(arguments[:place]), behind


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

"""The command line: ``padiff demo | run | show | compare | watch | replay | ... | doctor | atlas``.

Exit codes: 0 the runs match, 1 they differ, 2 misuse, or something can't be read or written, 3 cannot tell
(parameters that train have no record), 4 a drift from a golden run.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from padiff import __version__
from padiff.errors import PadiffError
from padiff.system.terminal import give_up_output, printable, show_anything, warn_of_older
from padiff_cli.parser import Parser, split_arguments

MISUSE, INTERRUPTED = 2, 130
#: Exit code with which `git bisect run` skips a commit.
SKIPPED = 125


class Command(NamedTuple):
    """A command: a line of help, and the module that adds its arguments (``add_arguments``) and runs it."""

    help: str
    module: str


# A module is imported only when its command runs: `padiff --help` imports none of them.
COMMANDS = {
    "demo": Command("train two real runs and compare them; nothing to prepare", "padiff_cli.commands.demo"),
    "run": Command("record a training script of which no line changes", "padiff_cli.commands.run"),
    "show": Command("what a run holds: layers, steps, sizes", "padiff_cli.commands.show"),
    "compare": Command("compare two runs", "padiff_cli.commands.compare"),
    "watch": Command("follow two growing runs and stream their diffs to TensorBoard", "padiff_cli.commands.watch"),
    "replay": Command(
        "do the packed steps of a run again with another model, each from where the run was",
        "padiff_cli.commands.replay",
    ),
    "calibrate": Command(
        "measure what rounding makes of each tensor of a run's packed steps, for compare to judge by",
        "padiff_cli.commands.calibrate",
    ),
    "resync": Command(
        "train on from a packed step with one thing at a time taken from the reference", "padiff_cli.commands.resync"
    ),
    "port-check": Command(
        "judge a port on two runs, check by check, for reviewers and CI", "padiff_cli.commands.port_check"
    ),
    "verify": Command("check a receipt of port-check again", "padiff_cli.commands.verify"),
    "fix": Command(
        "propose a patch of the candidate that makes the runs match, tried on a copy", "padiff_cli.commands.fix"
    ),
    "bisect": Command(
        "find the commit, version, keys or variables that make two trainings differ", "padiff_cli.commands.bisect"
    ),
    "golden": Command(
        "keep a few steps of a training, and sort a later run of it: equal, drift (rounding) or fault",
        "padiff_cli.commands.golden",
    ),
    "repro": Command("write the first diff as two small scripts that need no padiff", "padiff_cli.commands.repro"),
    "doctor": Command(
        "does recording change a training script, is a run folder whole; exit code 0 all is well, 1 something is "
        "wrong, 2 misuse",
        "padiff_cli.commands.doctor",
    ),
    "mcp": Command(
        "serve read-only tools on run folders to agents, by the Model Context Protocol", "padiff_cli.commands.mcp"
    ),
    "schema": Command("print the JSON Schema of what `compare --brief` writes", "padiff_cli.commands.schema"),
    "map": Command("print the found layer map as YAML, to edit and give back", "padiff_cli.commands.map"),
    "atlas": Command(
        "what the installed torch and paddle do differently when they are called alike, and how to call them",
        "padiff_cli.commands.atlas",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["run"]:
        # Its output, its exit code and its errors are the script's.
        code: int = importlib.import_module(COMMANDS["run"].module).main(words[1:])
        return code
    if words[:1] != ["compare"] or not any(word.startswith("--exit") for word in words):
        return _outcome(words)
    # For `git bisect run`, where 2 would mean a bad commit.
    try:
        code = _outcome(words)
    except SystemExit as error:
        code = MISUSE if error.code else 0
    return code if code in (0, 1, INTERRUPTED) else SKIPPED


def _outcome(words: Sequence[str]) -> int:
    """Run a command and return its exit code; print errors."""
    show_anything()
    try:
        code = _run(words)
        sys.stdout.flush()  # so that a full disk is an error here, not at the end of the interpreter
        return code
    except BrokenPipeError:  # the reader of the output closed the pipe
        give_up_output()
        return MISUSE
    except (PadiffError, OSError) as error:  # OSError: a full disk, or a name that is too long, for example
        give_up_output(error)
        print(f"padiff: {printable(str(error), lines=True)}", file=sys.stderr)
        return MISUSE
    except MemoryError:
        print(
            "padiff: out of memory; record less (detail, white_list), or compare on a larger machine", file=sys.stderr
        )
        return MISUSE
    except KeyboardInterrupt:
        print("padiff: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # never the exit code for runs that differ
        text = f"padiff: this should not have happened, please report it: {type(error).__name__}: {error}"
        print(f"{text}\n\npadiff {__version__}, python {sys.version.split()[0]}", file=sys.stderr)
        traceback.print_exc()
        return MISUSE


def _run(arguments: Sequence[str]) -> int:
    warn_of_older()
    words, script_arguments = split_arguments(arguments)
    args = _parser(words).parse_args(words)
    if script_arguments is not None:
        args.args = [*args.args, *script_arguments]
    from padiff_cli.log_folder import quiet_threads
    from padiff_hooks.outputs import console_for

    reports = [getattr(args, name, None) for name in ("json", "junit", "markdown", "html", "receipt")]
    brief = getattr(args, "brief", False)
    with quiet_threads():
        code: int = args.run(args, console_for(stderr=brief or "-" in reports))
    return code


def _parser(words: Sequence[str]) -> Any:
    parser = Parser(prog="padiff", description="Where do two training runs that should be equal part?")
    parser.add_argument("--version", action="version", version=f"padiff {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if words[:1] == [name]:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())

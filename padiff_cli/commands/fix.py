"""``padiff fix REFERENCE CANDIDATE -- COMMAND``: propose a patch of the candidate, tried on a copy."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from padiff.dump import open_run
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.records import Both
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import summary_line
from padiff.system.terminal import printable
from padiff_cli.arguments import add_layer_map, check_pair, policy_of
from padiff_cli.collecting import few_collections
from padiff_cli.fix.session import Outcome, Session
from padiff_cli.fix.workspace import Workspace
from padiff_hooks.outputs import check_out, write_out

MATCHES, LEFT = 0, 1
# A Python of PATH.
_PYTHON = re.compile(r"python[\d.]*")
_DESCRIPTION = (
    "Propose a patch that makes the candidate match the reference, and try it: edit a copy of this folder, run "
    "the copy under padiff run, compare again. Nothing in this folder changes without --apply. The script is your own "
    "code and runs as you. Exit code: 0 the runs match now, 1 faults are left, 2 misuse."
)


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    parser.usage = "padiff fix [options] REFERENCE CANDIDATE -- COMMAND [ARGS ...]"
    parser.add_argument("reference", metavar="REFERENCE", help="the run to trust")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run whose script is to be fixed")
    parser.add_argument("--apply", action="store_true", help="change the files of this folder as the patch says")
    parser.add_argument("--patch", metavar="FILE", help="write the patch, for patch -p1 in this folder; - the same")
    parser.add_argument("--json", metavar="OUT", help="write the result as JSON; - for standard output")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="longest time of all runs (default: %(default)g)",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATH", help="a path that is not copied; may be repeated"
    )
    parser.add_argument(
        "--check-with",
        metavar="COMMAND",
        help="how the reference is run: a patch that matches is also compared on three other seeds",
    )
    add_layer_map(parser)
    parser.set_defaults(run=_fix, args=[], atol=None, rtol=None, compare_mode=None)


@few_collections()
def _fix(args: argparse.Namespace, console: Console) -> int:
    command = list(args.args)
    if not command:
        raise UsageError(
            "how is the candidate run? Give its command after --: padiff fix RUN RUN -- python train_paddle.py"
        )
    if args.timeout <= 0:
        raise UsageError(f"--timeout is a number of seconds above 0, got {args.timeout:g}")
    outputs = [args.patch, args.json]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --patch and --json can go to standard output")
    check_pair(args)
    shown = Console(stderr=True) if "-" in outputs else console
    runs = Both(args.reference, args.candidate)
    recorded = str(open_run(args.candidate).info.recording.get("command", ""))
    if _PYTHON.fullmatch(command[0]) and recorded and not _PYTHON.fullmatch(recorded.partition(" ")[0]):
        # `padiff run SCRIPT` recorded the candidate: with this Python, which need not be the first one of PATH.
        command[0] = sys.executable
    workspace = Workspace(Path.cwd(), command, [Path(args.reference)], Path(args.candidate), args.skip)
    before = workspace.snapshot()

    def say(text: str) -> None:
        shown.print(Text(printable(text), style="dim"))

    say("the script runs in a copy of this folder, as you and with your rights")
    if command != args.args:
        say(f"{args.args[0]} is {sys.executable}, as when the candidate was recorded")
    with _ends_on_sigterm(), workspace:
        layer_map = GivenMap.from_value(args.layer_map)
        check = shlex.split(args.check_with or "")
        session = Session(runs, workspace, args.timeout, say, policy_of(args), layer_map, check)
        outcome = session.run()
    after = workspace.snapshot()
    touched = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if touched:
        outcome.notes.append(
            f"while fix ran, {len(touched)} file(s) of this folder changed, {printable(touched[0])} for one: the "
            "script writes there by an absolute path, or another program does"
        )
    _show(outcome, shown, runs, args.apply)
    if args.apply and outcome.patch:
        _apply(workspace.folder, outcome)
        shown.print(Text(f"applied to {len({each.file for each in outcome.accepted})} file(s) of this folder"))
    if args.patch:
        write_out(args.patch, outcome.patch)
    if args.json:
        write_out(args.json, json.dumps(_as_json(outcome, runs), indent=2))
    return MATCHES if outcome.passed else LEFT


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM, so that the script ends and its copy is deleted."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(outcome: Outcome, console: Console, runs: Both[str], applied: bool) -> None:
    """Print the patch, a proof for each proposal, and what is left."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in outcome.patch.splitlines():
        console.print(Text(printable(line), style=styles.get(line[:1], "")), soft_wrap=True)
    if outcome.patch:
        console.print()
    for each in outcome.accepted:
        console.print(Text(printable(f"{each.file}:{each.line}  {each.proposal.words}"), style="bold"), soft_wrap=True)
        console.print(Text(printable(f"  {each.proof}")), soft_wrap=True)
    if outcome.report is not None:
        left = diagnostic_of(outcome.report, runs)
        console.print(Text(f"{'now' if outcome.accepted else 'left'}: {summary_line(left)}"), soft_wrap=True)
    if outcome.seeds:
        text = f"{outcome.seeds - outcome.failed_seeds} of {outcome.seeds} other seeds match"
        console.print(Text(text), soft_wrap=True)
    for note in outcome.notes:
        console.print(Text(printable(f"note: {note}"), style="yellow"), soft_wrap=True)
    if outcome.patch and not applied:
        console.print(Text("nothing in this folder was changed: --apply changes it, --patch FILE writes the patch"))


def _as_json(outcome: Outcome, runs: Both[str]) -> dict[str, Any]:
    """Return the result as values of JSON."""
    report = outcome.report
    return {
        "schema_version": 1,
        "outcome": "match" if outcome.passed else "differ",
        "patch": outcome.patch,
        "fixes": [
            {"file": each.file, "line": each.line, "text": each.proposal.words, "proof": each.proof}
            for each in outcome.accepted
        ],
        "left": None if report is None or report.passed else summary_line(diagnostic_of(report, runs)),
        "dropped": outcome.dropped,
        "notes": outcome.notes,
        "runs": outcome.trials,
        "seeds": {"compared": outcome.seeds, "differ": outcome.failed_seeds},
    }


def _apply(folder: Path, outcome: Outcome) -> None:
    """Write the changed files into the working folder, all or none.

    Raises:
        UsageError: a file changed since it was read.
    """
    changed = outcome.before.changed_files(outcome.after)
    for file in changed:
        source = outcome.before.get(file)
        if source is None or (folder / file).read_bytes() != source.text.encode():
            raise UsageError(f"{printable(file)} has changed while fix ran: nothing was applied. Run fix again")
    written: list[tuple[str, Path]] = []
    try:
        for file, content in changed.items():
            path = Path(os.path.realpath(folder / file))
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            written.append((temporary, path))
            with os.fdopen(handle, "wb") as opened:
                opened.write(content)
            os.chmod(temporary, path.stat().st_mode & 0o7777)
        for temporary, path in written:
            os.replace(temporary, path)
    finally:
        for temporary, _ in written:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

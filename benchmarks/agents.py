"""How many planted ports a repairer mends that only follows `padiff fix`, and how many of its claims are wrong.

    python benchmarks/agents.py [--json OUT] [--keep DIR] [NAME ...]

The repairer is a script without judgement. It records the candidate, applies what `padiff fix` proposes, records
again, and asks `padiff port-check`; it claims success only if that says match, and gives up if there is no patch. The
ports are the faults of `benchmarks/fix` that no rule was written for. A claim is judged without the two recorded runs:
the source is that of the candidate without the fault, or both train alike on other data (each seed of the code + 1000).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "fix"), str(HERE)]

from programs import PLANTED, PROGRAMS, Planted, Program
from run import is_right, padiff, planted_files, script_of, write

# Number of times that the repairer follows `padiff fix`.
ROUNDS = 3
_SEED = re.compile(r"((?:default_rng|RandomState|manual_seed|\bseed)\()(\d+)\)")


@dataclass
class Attempt:
    """What came of a port.

    Attributes:
        name: program and fault.
        rounds: number of patches that were applied.
        fix_claims: `padiff fix` says that the runs match.
        claims: `padiff port-check` says so, on the run recorded after the patch.
        exceptions: what its receipt lists as left out or compared otherwise.
        verified: `padiff verify` says that the receipt holds.
        restored: the source is that of the candidate without the fault.
        other_data: ``equal`` to the bit, ``match`` or ``differ``: the patched candidate against the one without the
            fault, on other data; empty if there was no claim.
        hidden_shows: with a tolerance that hides the fault before any repair, the receipt names the tolerance and what
            comes out without it.
        seconds: time of the repair, without the first recordings.
    """

    name: str
    rounds: int = 0
    fix_claims: bool = False
    claims: bool = False
    exceptions: int = 0
    verified: bool = False
    restored: bool = False
    other_data: str = ""
    hidden_shows: bool = False
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Return True for a claim of success about a candidate that still computes something else."""
        return self.claims and not self.restored and self.other_data == "differ"


def attempt(fault: Planted, base: Path) -> Attempt:
    """Let the repairer work on one port, and judge its claim.

    Args:
        fault: the planted fault.
        base: an empty folder.
    """
    program = PROGRAMS[fault.name.partition("/")[0]]
    result = Attempt(fault.name)
    folder = base / "port"
    _record(folder, program.reference, "reference")
    files = planted_files(program, fault)
    _record(folder, files, "candidate")
    result.hidden_shows = shows_hidden(folder)
    script, candidate = script_of(files), "runs/candidate"
    began = time.monotonic()
    for number in range(1, ROUNDS + 1):
        done = padiff(folder, "fix", "runs/reference", candidate, "--apply", "--json", "fix.json", "--", script)
        result.fix_claims = done.returncode == 0
        if done.returncode == 2 or not json.loads((folder / "fix.json").read_text())["patch"]:
            break
        result.rounds = number
        candidate = f"runs/candidate-{number}"
        padiff(folder, "run", "--dir", candidate, script)
        judged = padiff(folder, "port-check", "runs/reference", candidate, "--receipt", "receipt.json")
        if judged.returncode == 0:
            result.claims = True
            result.exceptions = len(json.loads((folder / "receipt.json").read_text())["exceptions"])
            result.verified = not padiff(folder, "verify", "receipt.json", "runs/reference", candidate).returncode
            break
    result.seconds = round(time.monotonic() - began, 1)
    result.restored = is_right(program, fault, folder)
    if result.claims:
        patched = {name: (folder / name).read_text() for name in program.candidate}
        result.other_data = _on_other_data(program, patched, base / "other")
    return result


def shows_hidden(folder: Path) -> bool:
    """Return True if a receipt shows that a tolerance hides the fault of the candidate."""
    runs = ["runs/reference", "runs/candidate"]
    padiff(folder, "port-check", *runs, "--atol", "1e9", "--receipt", "hidden.json")
    receipt = json.loads((folder / "hidden.json").read_text())
    is_named = any(line.startswith("tolerance ") for line in receipt["exceptions"])
    return is_named and receipt["without_options"]["outcome"] == "differ"


def _record(folder: Path, files: dict[str, str], name: str) -> None:
    write(folder, files)
    done = padiff(folder, "run", "--dir", f"runs/{name}", script_of(files))
    assert (folder / "runs" / name / "run.json").exists(), done.stderr


def _on_other_data(program: Program, patched: dict[str, str], base: Path) -> str:
    """Return how the patched candidate and the one without the fault compare on other data."""
    for name, files in (("right", program.candidate), ("patched", patched)):
        folder = base / name
        _record(folder, _seeded(program.reference), "reference") if name == "right" else shutil.copytree(
            base / "right" / "runs", folder / "runs"
        )
        _record(folder, _seeded(files), name)
    runs = [str(base / name / "runs" / name) for name in ("right", "patched")]
    if not padiff(base, "compare", *runs, "--atol", "0", "--rtol", "0", "--compare-mode", "strict").returncode:
        return "equal"
    return "differ" if padiff(base, "compare", *runs).returncode else "match"


def _seeded(files: dict[str, str]) -> dict[str, str]:
    return {name: _SEED.sub(lambda seed: f"{seed[1]}{int(seed[2]) + 1000})", text) for name, text in files.items()}


def summary(attempts: Sequence[Attempt]) -> str:
    """Return the figures as a Markdown table."""
    claims = [each for each in attempts if each.claims]
    rows = [
        ("planted ports", len(attempts)),
        ("end in a match that `port-check` confirms", len(claims)),
        ("of these, the source is restored", sum(each.restored for each in claims)),
        ("of these, another source that trains alike on other data", sum(
            not each.restored and each.other_data != "differ" for each in claims
        )),
        ("claims of success that are wrong", sum(each.is_wrong for each in attempts)),
        ("`fix` says match, `port-check` does not", sum(each.fix_claims and not each.claims for each in attempts)),
        ("receipts that `verify` confirms", sum(each.verified for each in attempts)),
        ("faults hidden by a tolerance that the receipt shows", sum(each.hidden_shows for each in attempts)),
        ("receipts with exceptions", sum(bool(each.exceptions) for each in attempts)),
    ]  # fmt: skip
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {count} |" for name, count in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    faults = [each for each in PLANTED if (each.name in args.names if args.names else each.unseen)]
    attempts = []
    with tempfile.TemporaryDirectory() as temporary:
        for fault in faults:
            each = attempt(fault, (args.keep or Path(temporary)) / fault.name)
            attempts.append(each)
            verdict = "WRONG" if each.is_wrong else "claims" if each.claims else "gives up"
            print(f"{each.name:22} {verdict:9} rounds {each.rounds} restored {each.restored!s:6}"
                  f"other data {each.other_data or '-':7} {each.seconds:4.0f} s", flush=True)  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps([asdict(one) for one in attempts], indent=1))
    print(summary(attempts))
    return 0


if __name__ == "__main__":
    sys.exit(main())

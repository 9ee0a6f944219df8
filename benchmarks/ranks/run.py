"""Trains the programs on several processes with their faults, and prints what padiff says of each."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import STDOUT
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conditions.launching import environments
from hard.children import started

from benchmarks.ranks import judging, kit

#: Of a program's trainings together, on two cores that others use as well.
SECONDS = 600


def launch(command: Sequence[str], world: int) -> None:
    """Start processes as `torchrun` and `paddle.distributed.launch` do, and wait for them."""
    each_rank = [{**one, "LOCAL_RANK": one["RANK"], "OMP_NUM_THREADS": "1"} for one in environments(world)]
    command = [sys.executable, "-W", "ignore", *command]
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        # `started` ends what it started, whatever happens here.
        running = [stack.enter_context(started(command, env=env, stdout=log, stderr=STDOUT)) for env in each_rank]
        until = time.monotonic() + SECONDS
        while any(each.poll() is None for each in running) and not any(each.poll() for each in running):
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        codes = [each.poll() for each in running]
        if any(code != 0 for code in codes):
            log.seek(0)
            raise SystemExit(
                f"{' '.join(command[3:6])} ended with {codes}:\n{log.read().decode(errors='replace')[-6000:]}"
            )


def trained(
    name: str, base: Path, only: Sequence[str] | None = None, **options: Any
) -> tuple[kit.Program, dict[str, Path]]:
    """A program, and its run folders by the name of the fault or of the clean way."""
    program: kit.Program = kit.module(name).PROGRAM
    names = [*program.clean, *(fault.name for fault in program.faults if only is None or fault.name in only)]
    folders = {each: base / f"{number}" for number, each in enumerate(names)}
    jobs = json.dumps([(each, str(folder), options) for each, folder in folders.items()])
    launch(["-m", "benchmarks.ranks.worker", name, jobs], program.world)
    return program, folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true", help="the programs that were not looked at; counts only")
    parser.add_argument("--only", nargs="*", help="names of programs")
    parser.add_argument("--show", action="store_true", help="print what was said")
    parser.add_argument("--detail", choices=("full", "sketch"), default="full")
    parser.add_argument("--keep", type=Path, help="where the runs go (default: a temporary folder)")
    given = parser.parse_args()
    where = "held_out" if given.held_out else "seen"
    names = [path.stem for path in sorted((Path(__file__).parent / where).glob("[a-z]*.py"))]
    found, false = [], []
    with tempfile.TemporaryDirectory() as temporary:
        base = given.keep or Path(temporary)
        for name in names:
            if given.only and name not in given.only:
                continue
            program, folders = trained(f"{where}.{name}", base / name, detail=given.detail)
            found += list(judging.rows(program, folders))
            false += [(name, *alarm) for alarm in judging.alarms(program, folders)]
    print(f"{'program':20} {'fault':30} from   reported step rank place words")
    for row in found if not given.held_out or given.show else ():
        marks = [row.reported, row.step, row.rank, row.place, row.words]
        print(f"{row.program:20} {row.fault:30} {'folder' if row.alone else 'pair  '} "
              + " ".join(f"{'yes' if mark else '-':4}" for mark in marks))  # fmt: skip
        if given.show:
            print(f"    {row.text[:600]}")
    count = len(found)
    for name in ("reported", "step", "rank", "place", "words"):
        print(f"{name}: {sum(getattr(row, name) for row in found)}/{count}")
    alarms = [each for each in false if each[2]]
    print(f"alarms: {len(alarms)}/{len(false)} clean runs")
    for program_name, way, text in alarms:
        print(f"    {program_name}, {way or 'plain'}: {text[:600]}")


if __name__ == "__main__":
    main()

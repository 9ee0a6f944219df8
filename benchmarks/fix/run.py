"""How often `padiff fix` makes a planted fault match, how often its patch is right, and how long it takes.

    python benchmarks/fix/run.py [--unseen] [--places | --ports] [--clean] [--keep DIR] [NAME ...]

Each program is recorded as a user would, once for the reference and once for the candidate with its fault. A patch is
called right if the patched source is that of the candidate without the fault; other patches are printed, to be judged
by reading. `--places` takes the faults of `benchmarks/places.py`, `--ports` those of `ports.py`; `--clean` only
compares the programs without a fault; `--keep` keeps folders, and goes on with those there. All files of a program's
folder are compared before and after: `padiff fix` must not change one.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import places
from ports import PORT_FAULTS, PORTS
from programs import PLANTED, PROGRAMS, Planted, Program


def programs_of_places() -> tuple[dict[str, Program], list[Planted]]:
    """Return the programs and the faults of `benchmarks/places.py` in the form of this folder."""
    programs = {
        name: Program(places.PROGRAMS["files" if name == "files" else "torch"], files)
        for name, files in places.PROGRAMS.items()
    }
    return programs, [Planted(each.name, ((each.file, each.before, each.after),)) for each in places.FAULTS]


def padiff(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "padiff", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text.lstrip())


def planted_files(program: Program, fault: Planted) -> dict[str, str]:
    """Return the candidate's files with a fault."""
    files = dict(program.candidate)
    for file, before, after in fault.changes:
        assert before in files[file], (fault.name, before)
        files[file] = files[file].replace(before, after, 1)
    return files


def script_of(files: dict[str, str]) -> str:
    return next(name for name, text in files.items() if ".step()" in text or ".fit(" in text)


def is_right(program: Program, fault: Planted, folder: Path) -> bool:
    """Return True if the patched files are the files without the fault, by their syntax trees, or configs' values."""
    for name, text in program.candidate.items():
        read = (lambda code: ast.dump(ast.parse(code))) if name.endswith(".py") else yaml.safe_load
        if read((folder / name).read_text()) != read(text.lstrip()):
            return False
    return True


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file below a folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_clean(programs: dict[str, Program], base: Path) -> int:
    """Compare each program without a fault; return the number of those that do not match."""
    failed = 0
    for name, program in programs.items():
        folder = base / f"{name}-clean"
        write(folder, {**program.reference})
        padiff(folder, "run", "--dir", "runs/reference", script_of(program.reference))
        for file in program.reference:
            (folder / file).unlink()
        write(folder, program.candidate)
        done = padiff(folder, "run", "--dir", "runs/candidate", script_of(program.candidate))
        result = padiff(folder, "compare", "runs/reference", "runs/candidate")
        failed += result.returncode != 0
        print(f"{name:14} {result.returncode} {result.stdout[:900] if result.returncode else ''}", flush=True)
        if not (folder / "runs" / "candidate").exists():
            print(done.stderr[-600:], flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--unseen", action="store_true", help="only the faults that were kept aside")
    parser.add_argument("--places", action="store_true")
    parser.add_argument("--ports", action="store_true")
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    programs, faults = programs_of_places() if args.places else (PROGRAMS, PLANTED)
    programs, faults = (PORTS, PORT_FAULTS) if args.ports else (programs, faults)
    chosen = [each for each in faults if (each.name in args.names if args.names else each.unseen == args.unseen)]
    matches = right = patches = touched = 0
    seconds = []
    with tempfile.TemporaryDirectory() as temporary:
        base = args.keep or Path(temporary)
        if args.clean:
            return check_clean({name: programs[name] for name in args.names or programs}, base)
        for fault in chosen:
            name = fault.name.partition("/")[0]
            program = programs[name]
            reference = base / name / "reference"
            if not reference.exists():
                write(reference, program.reference)
                done = padiff(reference, "run", "--dir", "runs/reference", script_of(program.reference))
                assert not done.returncode, done.stderr
            folder = base / fault.name
            files = planted_files(program, fault)
            if not (folder / "runs" / "candidate").exists():
                shutil.rmtree(folder, ignore_errors=True)
                write(folder, files)
                shutil.copytree(reference / "runs", folder / "runs")
                padiff(folder, "run", "--dir", "runs/candidate", script_of(files))
            before, began = digests(folder), time.monotonic()
            words = ["fix", "runs/reference", "runs/candidate", "--json", "-", "--", script_of(files)]
            done = padiff(folder, *words)
            spent = time.monotonic() - began
            seconds.append(spent)
            touched += digests(folder) != before
            try:
                result = json.loads(done.stdout)
            except ValueError:
                print(f"{fault.name:22} failed: {done.stderr[-300:]}", flush=True)
                continue
            patched = Path(temporary, "patched", fault.name)
            shutil.copytree(folder, patched, ignore=shutil.ignore_patterns("runs"))
            if result["patch"]:
                subprocess.run(["patch", "-s", "-p1"], cwd=patched, input=result["patch"], text=True, check=True)
            is_same = is_right(program, fault, patched)
            matches += done.returncode == 0
            patches += bool(result["patch"])
            right += is_same
            verdict = "same" if is_same else "look" if result["patch"] else "-"
            marks = f"{'match' if not done.returncode else '-':6}{verdict:5}"
            print(
                f"{fault.name:22} {marks} {result['runs']:2} runs {spent:4.0f} s  {result['left'] or ''}"[:160],
                flush=True,
            )
            if not is_same:
                for line in [*result["patch"].splitlines()[2:], *result["notes"]]:
                    if line[:1] not in (" ", "@"):
                        print(f"    {line}", flush=True)
                for line in result["dropped"]:
                    print(f"    dropped: {line}"[:200], flush=True)
    slowest = max(seconds, default=0.0)
    print(f"{matches} of {len(chosen)} match, {right} of {patches} patches restore the source, {slowest:.0f} s at most")
    print(f"{touched} folders changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

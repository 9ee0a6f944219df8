"""Mutates run folders, byte- and structure-wise, and lets every reader loose on them, with bounded memory.

    python -m tests.hard.fuzzing FOLDER... --first 0 --count 100 [--memory 3000]

``FOLDER`` are run folders, each copied before it is mutated; the first of them is also what the mutated one is compared
with. Prints a line of JSON for each mutation that let anything but a `PadiffError` out, or took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from padiff.errors import PadiffError
from tests.kit.injecting import ESCAPES, EVIL, inject, strings_of

#: Seconds that all readers together may take with one mutated folder.
LONGEST = 60

Spot = tuple[Any, Any]


def _values(rng: random.Random) -> Any:
    """A value that nobody expects."""
    deep: Any = 1
    for _ in range(rng.choice((3, 50, 400))):
        deep = rng.choice(([deep], {"layers": [deep]}, {"path": deep}))
    numbers = [0, -1, 1, 2**31, 2**62, 2**63, 2**64, 10**40, 10**4000, -(2**63), 1e308, -0.5, 0.5]
    numbers += [float("inf"), float("nan")]
    texts = ["", "x", "\0", "../../../outside.npy", "/etc/passwd", "C:\\x", "é\ud800" * 9, "x" * 100_000, "(root)", "0"]
    texts += ["(loop)", "float32", "complex128", "bfloat16", "object", "V8", "forward", "#1", "[bold]x[/nope]"]
    lists = [[], [[]], [{}], [None], [0] * 70, [0, 2**40], [2**31, 2**31, 2**31], [1] * 30_000, ["x"] * 3]
    objects = [{}, {"x": 1}, {"records": [{}]}, {"path": "x", "type": "y", "kind": "z"}, {"name": "torch"}]
    return rng.choice([None, True, False, deep, *numbers, *texts, *lists, *objects])


def _spots(content: Any) -> list[Spot]:
    """Every place in a JSON value: its container and its key."""
    found: list[Spot] = []
    stack = [content]
    while stack:
        inner = stack.pop()
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner))) if isinstance(inner, list) else []
        for key in keys:
            found.append((inner, key))
            stack.append(inner[key])
    return found


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """Change a JSON text's structure in one to three places."""
    content = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        spots = _spots(content)
        if not spots:
            return text
        # Keys that are rare among thousands of records get their turn.
        wanted = rng.choice(sorted({str(key) for _, key in spots}))
        container, key = rng.choice([spot for spot in spots if str(spot[1]) == wanted] or spots)
        what = rng.random()
        if what < 0.5:
            container[key] = _values(rng)
        elif what < 0.65:
            del container[key]
        elif what < 0.8:
            other, place = rng.choice(spots)
            with contextlib.suppress(KeyError, IndexError):
                container[key] = json.loads(json.dumps(other[place]))
        elif what < 0.9 and isinstance(container, list):
            container[key:key] = [container[key]] * rng.choice((1, 2, 500))
        elif isinstance(container, dict):
            container[rng.choice(("x", "path", "layers", "records", "shape", "children"))] = _values(rng)
    return json.dumps(content).encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change a file's bytes: flipped, cut, doubled, stuffed."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(len(out) or 1) if rng.random() < 0.5 else min(rng.randrange(200), len(out))
        what = rng.randrange(7)
        if what == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(out):
            out[at] = rng.choice(b"\x00\xff0919[]{}(),\"'-e.")
        elif what == 2:
            del out[at:]
        elif what == 3:
            del out[at : at + rng.choice((1, 4, 64))]
        elif what == 4:
            out[at:at] = rng.choice((b"\x00" * 8, b"\xff" * 8, b"9" * 30, b"[" * 3000, b'{"a":' * 500, os.urandom(16)))
        elif what == 5:
            out[at:at] = out[at : at + 40]
        else:
            out += out[:64]
    return bytes(out)


BOMBS: dict[str, Callable[[], bytes]] = {
    "deep": lambda: b"[" * 1_000_000,
    "deep and whole": lambda: b'{"schema_version":1,"tree":' + b'{"layers":[' * 900 + b"]}" * 900 + b"}",
    "lists": lambda: b'{"schema_version":1,"tree":[' + b"[]," * 9_000_000 + b"0]}",
    "objects": lambda: b'{"schema_version":1,"tree":[' + b"{}," * 9_000_000 + b"0]}",
    "numbers": lambda: b'{"schema_version":1,"tree":[' + b"1," * 12_000_000 + b"0]}",
    "a long number": lambda: b'{"schema_version":' + b"9" * 3_000_000 + b"}",
    "a long text": lambda: b'{"schema_version":1,"name":"' + b"x" * 60_000_000 + b'"}',
    "a pickle": lambda: b"cos\nsystem\n(S'touch pwned'\ntR.",
    "a header of gigabytes": lambda: b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr': '<f4', ",
    "a header of exabytes": lambda: b"\xff" * 7 + b"\x7f" + b"{}",
    "nothing": lambda: b"",
}


def mutate_file(path: Path, outside: Path, rng: random.Random) -> str:
    """Put something else in a file's place. Returns what."""
    what = rng.choice(("bomb", "pipe", "link out", "device", "folder", "gone", "sparse", "loop", "other", "link in"))
    others = [p for p in path.parent.rglob("*") if p.is_file() and p != path]
    old = path.read_bytes()
    path.unlink()
    if what == "bomb":
        name = rng.choice(sorted(BOMBS))
        path.write_bytes(BOMBS[name]())
        return f"bomb: {name}"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link out":
        path.symlink_to(outside / ("secret.json" if path.suffix == ".json" else "secret.npy"))
    elif what == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/dev/stdin", "/proc/self/mem")))
    elif what == "folder":
        path.mkdir()
    elif what == "sparse":
        path.write_bytes(old)
        os.truncate(path, rng.choice((1 << 33, 1 << 40)))
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "other" and others:
        shutil.copyfile(rng.choice(others), path)
    elif what == "link in" and others:
        path.symlink_to(rng.choice(others))
    return what


def mutate_folder(run: Path, outside: Path, rng: random.Random) -> str:
    """Rename, link or remove folders. Returns what."""
    folders = [p for p in run.rglob("*") if p.is_dir()]
    folder = rng.choice(sorted(folders))
    what = rng.choice(("gone", "link out", "renamed", "file", "loop"))
    if what == "renamed":
        names = (
            "rank_7",
            "rank_99999999999999999999",
            "00000099",
            "9" * 200,
            "-1",
            "00000000",
            "rank_0",
            "x",
            "step_1",
        )
        target = folder.with_name(rng.choice(names))
        if not target.exists():
            folder.rename(target)
        return f"{folder.relative_to(run)} -> {target.name[:20]}"
    aside = outside / f"taken{rng.random()}"
    folder.rename(aside)
    if what == "link out":
        folder.symlink_to(aside)
    elif what == "loop":
        folder.symlink_to("..")
    elif what == "file":
        folder.write_text("x")
    return f"{folder.relative_to(run)}: {what}"


def mutate_strings(run: Path, rng: random.Random) -> str:
    """Replace one or two strings by code, or by anything, the same in all files of a run. Returns which."""
    texts = strings_of(run)
    changes = {
        rng.choice(texts): rng.choice((EVIL, *ESCAPES, "", "1", "nan", "x" * 5000))
        for _ in range(rng.choice((1, 1, 2)))
    }
    aside = run.with_name("before")
    shutil.rmtree(aside, ignore_errors=True)
    run.rename(aside)
    inject(aside, run, changes)
    return f"{changes}: strings"


def mutate(run: Path, outside: Path, rng: random.Random) -> list[str]:
    """Change a run folder in a few places. Returns what was done."""
    done = []
    if rng.random() < 0.3:
        return [mutate_strings(run, rng)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        files = sorted(p for p in run.rglob("*") if p.is_file() and not p.is_symlink())
        kinds = sorted({p.suffix for p in files})
        if not files or rng.random() < 0.06:
            with contextlib.suppress(OSError, IndexError):
                done.append(mutate_folder(run, outside, rng))
            continue
        kind = rng.choice(kinds)
        path = rng.choice([p for p in files if p.suffix == kind])
        name, how = str(path.relative_to(run)), rng.random()
        if how < 0.2:
            done.append(f"{name}: {mutate_file(path, outside, rng)}")
        elif how < 0.75 and kind in (".json", ".safetensors") and path.stat().st_size < 1 << 24:
            data = path.read_bytes()
            with contextlib.suppress(ValueError, RecursionError):
                if kind == ".json":
                    path.write_bytes(mutate_json(data, rng))
                else:
                    end = 8 + int.from_bytes(data[:8], "little")
                    header = mutate_json(data[8:end], rng)
                    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
                done.append(f"{name}: JSON")
        elif path.stat().st_size < 1 << 24:
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
            done.append(f"{name}: bytes")
    return done


def readings(good: Path, run: Path, logdir: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that reads run folders."""
    from padiff import compare_runs, open_run
    from padiff_cli.main import main

    def read_all() -> None:
        opened = open_run(run)
        for number in opened.numbers()[:5]:
            try:
                steps = opened.steps(number)
            except PadiffError:
                continue
            for step in steps:
                for record in step.records:
                    with contextlib.suppress(PadiffError):
                        record.value.sum()

    def cli(*arguments: str) -> None:
        err = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(arguments)
        if code not in (0, 1, 2) or (code == 2 and not err.getvalue().startswith("padiff: ")):
            raise AssertionError(f"exit code {code}: {err.getvalue()[:300]}")

    a, b = str(good), str(run)
    yield "read", read_all
    yield "show", lambda: cli("show", b)
    yield "compare", lambda: cli("compare", a, b)
    yield "compare the other way", lambda: compare_runs(run, good)
    yield "map", lambda: cli("map", a, b)
    yield "repro", lambda: cli("repro", a, b, "--out", str(logdir / "repro"), "--overwrite")
    yield "repro the other way", lambda: cli("repro", b, a, "--out", str(logdir / "repro"), "--overwrite")
    yield "doctor", lambda: cli("doctor", b)
    outputs = [f"--{kind}={logdir / kind}" for kind in ("html", "junit", "markdown", "json")]
    yield "outputs", lambda: cli("compare", b, a, *outputs)
    yield "watch", lambda: cli("watch", b, a, "--logdir", str(logdir), "--timeout", "0", "--interval", "0.01")


class TooLongError(Exception):
    """The readers took longer than `LONGEST`."""


def _ring(signum: int, frame: Any) -> None:
    raise TooLongError(f"after {LONGEST} seconds")


def fuzz(seed: int, sources: list[Path], work: Path) -> list[dict[str, Any]]:
    """One mutated copy of one of the folders, read by everything. Returns what went wrong."""
    rng = random.Random(seed)
    run, outside = work / "run", work / "outside"
    for folder in (run, outside, work / "tb"):
        shutil.rmtree(folder, ignore_errors=True)
    (work / "tb").mkdir()
    shutil.copytree(rng.choice(sources), run)
    outside.mkdir()
    for secret in ("secret.json", "secret.npy"):
        (outside / secret).write_bytes(rng.choice(sorted(sources[0].rglob(f"*{Path(secret).suffix}"))).read_bytes())
    done = mutate(run, outside, rng)
    wrong = []
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(LONGEST)
    try:
        for name, call in readings(sources[0], run, work / "tb"):
            try:
                call()
            except PadiffError:
                pass
            except TooLongError:
                wrong.append({"seed": seed, "done": done, "reader": name, "error": "it takes too long"})
                break
            except BaseException as error:
                where = traceback.format_exc().strip().splitlines()[-8:]
                wrong.append({"seed": seed, "done": done, "reader": name, "error": repr(error)[:200], "where": where})
    finally:
        signal.alarm(0)
    if Path("pwned").exists():
        wrong.append({"seed": seed, "done": done, "reader": "", "error": "something was executed"})
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--memory", type=int, default=3000, help="megabytes of address space")
    args = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    from padiff_cli import main as _  # noqa: F401  imported before memory is limited

    size = args.memory << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    folders = [folder.resolve() for folder in args.folders]
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for seed in range(args.first, args.first + args.count):
            for line in fuzz(seed, folders, Path(work)):
                print(json.dumps(line), flush=True)
    print(f"{args.count} mutations, at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB resident")


if __name__ == "__main__":
    sys.exit(main())

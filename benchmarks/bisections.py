"""Bisections of trainings with planted causes: how many culprits are named right, in how many runs, how fast.

python benchmarks/bisections.py [--held-out] [--only NUMBER ...] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from bisect_cases import HELD_OUT, SEEN, Case
from bisect_trainings import DEFAULTS, source

HERE = Path(__file__).resolve().parent

# Keys that a config holds and the training ignores.
IDLE = (
    "name",
    "log_every",
    "save_dir",
    "notes",
    "eval_every",
    "workers",
    "color",
    "host",
    "user",
    "tag",
    "port",
    "team",
)
# What has a planted bisection take longer than this fails.
LONGEST = 600.0


def settings_after(case: Case, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the constants of the code after so many changes."""
    settings, code = dict(DEFAULTS), {}
    for place, change in case.planted.items():
        for key, value in change.items() if place <= number else ():
            kind, _, name = key.rpartition(":")
            (code if kind else settings)[name] = value
    return settings, code


def commits(case: Case, folder: Path) -> tuple[list[str], list[str], Path]:
    """Make a repository; return the options, what has to be found, and the folder to call it from."""
    repo, hashes = folder / "repo", []
    repo.mkdir()

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=b", "-c", "user.email=b@b", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, cwd=repo, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    for number in range(case.count + 1):
        settings, code = settings_after(case, number)
        broken = "import not_there\n" if number in case.broken else ""
        (repo / "model.py").write_text(broken + source(case.net, code))
        lines = "\n".join(f"    {key!r}: {value!r}," for key, value in settings.items())
        (repo / "train.py").write_text(f"from model import train\n\nSETTINGS = {{\n{lines}\n}}\ntrain(SETTINGS)\n")
        (repo / "README").write_text(f"{number}\n")
        git("add", "-A")
        git("commit", "-q", "-m", f"change {number}")
        hashes.append(git("rev-parse", "HEAD"))
    return ["--good", hashes[0], "--bad", hashes[-1]], [hashes[number] for number in case.planted], repo


def versions(case: Case, folder: Path) -> tuple[list[str], list[str], Path]:
    """Make wheels of a package that trains, one for each version."""
    wheels = folder / "wheels"
    wheels.mkdir()
    for number in range(case.count + 1):
        settings, code = settings_after(case, number)
        broken = "import not_there\n" if number in case.broken else ""
        info = f"plantedtraining-1.{number}.dist-info"
        files = {
            "plantedtraining/__init__.py": f"{broken}{source(case.net, code)}\nSETTINGS = {settings!r}\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: plantedtraining\nVersion: 1.{number}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: b\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        with zipfile.ZipFile(wheels / f"plantedtraining-1.{number}-py3-none-any.whl", "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
    (folder / "train.py").write_text("from plantedtraining import SETTINGS, train\n\ntrain(SETTINGS)\n")
    os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    found = [f"plantedtraining==1.{number}" for number in case.planted]
    return ["--package", f"plantedtraining==1.0..1.{case.count}"], found, folder


def config(case: Case, folder: Path) -> tuple[list[str], list[str], Path]:
    """Write two configs that differ in so many keys."""
    keys, idle = [], iter(IDLE)
    for number in range(case.count):
        keys.append(next(iter(case.planted[number])) if number in case.planted else next(idle))
    bad = {key: value for change in case.planted.values() for key, value in change.items()}
    for side in ("good", "bad"):
        values = {
            key: DEFAULTS[key] if key in bad and side == "good" else bad.get(key, f"{side} {key}") for key in keys
        }
        rest = {key: value for key, value in DEFAULTS.items() if key not in bad}
        (folder / f"{side}.json").write_text(json.dumps({"train": values, "model": rest}, indent=1))
    head = "import json, sys\n\nfrom model import train\n\n"
    body = "content = json.load(open(sys.argv[1]))\ntrain({**content['model'], **content['train']})\n"
    (folder / "model.py").write_text(source(case.net))
    (folder / "train.py").write_text(head + body)
    return ["--config", "good.json", "bad.json"], [f"train.{key}" for key in bad], folder


def run(case: Case) -> dict[str, Any]:
    """Make a case, bisect it, and return what came of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options, expected, cwd = {"commits": commits, "versions": versions, "config": config}[case.kind](case, folder)
        words = ["train.py", "{config}"] if case.kind == "config" else ["train.py"]
        command = [sys.executable, "-m", "padiff", "bisect", "--dir", str(folder / "b"), "--json", str(folder / "out")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        began = time.monotonic()
        done = subprocess.run(
            [*command, *options, "--", sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True
        )
        seconds = time.monotonic() - began
        result = json.loads((folder / "out").read_text()) if (folder / "out").exists() else {}
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            os.environ.pop(name, None)
    is_right = sorted(result.get("culprits", ())) == sorted(expected) and done.returncode == 0 and seconds < LONGEST
    return {
        "kind": case.kind, "causes": len(expected), "right": is_right, "seconds": round(seconds, 1),
        "runs": result.get("runs"), "search_runs": result.get("search_runs"), "expected": expected,
        "found": result.get("culprits"), "trouble": result.get("trouble") or done.stderr.strip()[-300:],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--json")
    args = parser.parse_args()
    cases = [*SEEN, *HELD_OUT] if args.held_out else SEEN
    results = []
    for number, case in enumerate(cases):
        if args.only is None or number in args.only:
            result = run(case)
            results.append(result)
            verdict = "right" if result["right"] else f"WRONG {result['found']} {result['trouble']}"
            planted = "+".join(key for change in case.planted.values() for key in change)
            print(f"{number:2} {case.kind:8} {case.net:4} {case.count:2} {planted}: {verdict};", end=" ")
            print(f"{result['search_runs']} runs to the first culprit, {result['runs']} in all", end=", ")
            print(f"{result['seconds']} s", flush=True)
    two = [result for result in results if result["causes"] > 1]
    print(f"right: {sum(r['right'] for r in results)} of {len(results)}; with two causes: "
          f"{sum(r['right'] for r in two)} of {len(two)}; longest: {max(r['seconds'] for r in results)} s")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

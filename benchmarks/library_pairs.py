"""How many pairs of library models padiff aligns by itself, without a map.

torch's weights go to paddle by ``padiff.assign_weight``; then both models compute the same inputs. For a pair that
can't be equal, ``padiff.auto_diff`` has to say so.

    python benchmarks/library_pairs.py [--diff | --truth] [NAME ...]

A name may be a part of one. ``--diff`` asks ``auto_diff`` about pairs that can be equal, too (forward only): it should
pass them, and the verdict ``FALSE ALARM`` says that it does not. ``--truth`` carries the weights by the pairs' own maps
instead, without padiff: that shows what each pair can reach.

Besides padiff, torch 2.13.0 (CPU) and paddlepaddle 3.3.1 with numpy 2.4.6 it needs

    pip install --no-deps torchvision==0.28.0
    pip install timm==1.0.31 transformers==5.23.0
    pip install --no-deps paddlenlp==2.8.1 paddleformers==1.2.0 paddleclas==2.6.0
    pip install colorlog==6.12.0 colorama==0.4.6 requests six psutil scikit-learn scipy sentencepiece==0.2.3
    pip install opencv-python-headless==5.0.0.93
    pip install --no-deps datasets==5.2.0 pyarrow pandas python-dateutil pytz multiprocess dill xxhash seqeval jieba
    pip install --no-deps omegaconf==2.4.0 antlr4-python3-runtime==4.9.3

``library_zoo/shim.py`` stands in for the rest of what the three paddle libraries import.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import sys
import time
import traceback
import warnings

warnings.filterwarnings("ignore")

from library_zoo import shim

shim.install()

from library_zoo.pair import Pair, by_hand, error

import padiff

#: An output that is further off was not computed with the same weights. Rounding of deep models stays below.
LIMIT = 3e-5
_MODULES = ("vision", "classify", "language", "layers", "handwritten")


def pairs(named: list[str]) -> list[Pair]:
    """All pairs whose name has one of the given parts."""
    found: list[Pair] = []
    for name in _MODULES:
        try:
            found += importlib.import_module(f"library_zoo.{name}").PAIRS
        except ImportError as missing:
            print(f"library_zoo.{name} is left out: {missing}")
    return [pair for pair in found if not named or any(part in pair.name for part in named)]


def by_padiff(pair: Pair, diff: bool) -> tuple[bool, float, str]:
    """Whether the weights were transferred, the output's error, and what is to be told."""
    reference, candidate = pair.models()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        done = padiff.assign_weight(reference, candidate)
    note = "" if done else _reason(said.getvalue())
    off = error(*pair.run(reference, candidate)) if done else float("nan")
    if not pair.same or (diff and done):
        with contextlib.redirect_stdout(said):
            report = padiff.auto_diff(reference, candidate, pair.inputs(), atol=1e-6, rtol=1e-4, diff_phase="forward")
        note = f"passed={bool(report)}: {report.first_diff.message if report.first_diff else ''}"
    return done, off, note


def _reason(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    start = next((k for k, line in enumerate(lines) if line.startswith("Error occurred")), 0)
    end = next((k for k, line in enumerate(lines) if line.startswith("Base model")), len(lines))
    return " | ".join(lines[start + 1 : end])


def from_truth(pair: Pair) -> tuple[bool, float, str]:
    """The same by the pair's own map."""
    reference, candidate = pair.models()
    faults = by_hand(pair, reference, candidate)
    return not faults, error(*pair.run(reference, candidate)), "; ".join(faults)


def verdict(pair: Pair, done: bool, off: float, note: str, truth: bool) -> str:
    """``ok`` if a pair that can be equal is, and one that can't be is not (said to be)."""
    equal = done and off < LIMIT
    if pair.same:
        return "FALSE ALARM" if equal and note.startswith("passed=False") else "ok" if equal else "WRONG"
    return "WRONG" if (equal if truth else note.startswith("passed=True")) else "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--diff", action="store_true")
    parser.add_argument("--truth", action="store_true")
    options = parser.parse_args()
    counts: dict[tuple[bool, str], int] = {}
    print(f"{'pair':34} {'same':5} {'moved':5} {'error':>8} {'s':>5} verdict", flush=True)
    for pair in pairs(options.names):
        started = time.perf_counter()
        try:
            done, off, note = from_truth(pair) if options.truth else by_padiff(pair, options.diff)
            says = verdict(pair, done, off, note, options.truth)
        except Exception as failure:
            done, off, says = False, float("nan"), "ERROR"
            note = f"{type(failure).__name__}: {failure}"
            traceback.print_exc(file=sys.stderr)
        seconds = time.perf_counter() - started
        counts[pair.same, says] = counts.get((pair.same, says), 0) + 1
        answers = ["yes" if answer else "no" for answer in (pair.same, done)]
        row = f"{pair.name:34} {answers[0]:5} {answers[1]:5} {off:8.1e} {seconds:5.1f} {says}"
        print(f"{row}  {' '.join(note.split())[:150]}".rstrip(), flush=True)
        gc.collect()
    for same in (True, False):
        tally = ", ".join(f"{number} {says}" for (kind, says), number in sorted(counts.items()) if kind is same)
        print(f"{'can be equal' if same else 'can not be equal'}: {tally or 'none'}")


if __name__ == "__main__":
    main()

"""Collects the pairs of runs that tests and benchmarks compare, as a pytest plugin, and packs them for `test_golden`.

    PYTHONPATH=tests python -m pytest -p golden.collect --golden-pairs FOLDER tests
    PYTHONPATH=tests python -m golden.collect FOLDER

The first line keeps each pair that fits; the second packs them and writes what is expected of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from padiff.compare import NoisePolicy, RunComparison, Tolerance
from padiff.dump import RunWriter
from padiff.dump.storage import Storage
from padiff.records import STAGES, Run

from .lines import EXPECTED, PAIRS, lines_of, write_expected

#: Bytes of both runs beyond which a pair is not kept.
LARGEST = 400_000

_seen: list[tuple[Any, ...]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-pairs", help="folder for the pairs of runs that are compared")


@pytest.fixture(autouse=True)
def _collected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = request.config.getoption("--golden-pairs")
    made = RunComparison.__init__

    def begin(self: RunComparison, reference: Run, candidate: Run, layer_map: Any = None, *more: Any, **rest: Any):
        made(self, reference, candidate, layer_map, *more, **rest)
        _seen.append((reference, candidate, self._map, self._policy, sorted(self.stages)))

    monkeypatch.setattr(RunComparison, "__init__", begin)
    yield
    for number, one in enumerate(_seen):
        try:
            _keep(Path(folder), f"{request.node.nodeid}-{number}", *one)
        except Exception as error:
            print(f"not kept: {request.node.nodeid}: {type(error).__name__}: {error}", file=sys.stderr)
    _seen.clear()


def _keep(
    folder: Path, name: str, reference: Run, candidate: Run, layer_map: Any, policy: Any, stages: list[str]
) -> None:
    pairs = list(layer_map.pairs)
    if not isinstance(policy, (NoisePolicy, Tolerance)) or not _is_plain(pairs):
        return
    partial = folder / f".partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for side, run in (("reference", reference), ("candidate", candidate)):
        ranks: dict[int, RunWriter] = {}
        for number in run.numbers():
            for step in run.steps(number):
                if step.rank not in ranks:
                    packed = Storage(pack=True)
                    ranks[step.rank] = RunWriter(partial / side, run.info, rank=step.rank, storage=packed)
                ranks[step.rank].add_step(step)
        for writer in [*ranks.values()][::-1]:
            writer.close()
    size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    if not 0 < size <= LARGEST:
        return
    meta = {"layer_map": pairs, "policy": repr(policy), "stages": stages}
    (partial / "pair.json").write_text(json.dumps(meta))
    content = hashlib.sha256(meta["policy"].encode())
    for file in sorted(partial.rglob("*")):
        if file.is_file() and file.name not in ("finished.json",):
            content.update(re.sub(rb'"id": "[^"]*"', b"", file.read_bytes()))
    short = re.sub(r"[^A-Za-z0-9]+", "-", name.removeprefix("tests/"))[:110]
    target = folder / f"{short}-{content.hexdigest()[:12]}"
    if not target.exists() and not list(folder.glob(f"*-{content.hexdigest()[:12]}")):
        partial.rename(target)


def _is_plain(pairs: Any) -> bool:
    return pairs is None or isinstance(pairs, str) or (isinstance(pairs, (list, tuple)) and all(map(_is_plain, pairs)))


def main(folder: Path) -> None:
    """Pack what was collected, and write what is expected of it."""
    pairs = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    with tarfile.open(PAIRS, "w:xz", preset=9) as archive:
        for path in pairs:
            archive.add(path, path.name)
    write_expected({path.name: lines_of(path)[0] for path in pairs})
    print(f"{len(pairs)} pairs, {PAIRS.stat().st_size:,} bytes; expected {EXPECTED.stat().st_size:,} bytes")


if __name__ == "__main__":
    assert STAGES
    main(Path(sys.argv[1]))

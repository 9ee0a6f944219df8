"""Mutated run folders: readers answer with a `PadiffError` or a result, in bounded memory and time.

``PADIFF_FUZZ=20000`` makes that many mutations; every failure names the seed that repeats it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

import padiff

from . import fuzzing
from .children import run_child
from .killing import ROOT

COUNT = int(os.environ.get("PADIFF_FUZZ", "16"))
# Every way in which a run is stored.
STORED = {
    "plain": {},
    "packed": {"pack": True},
    "sketched": {"detail": "sketch"},
    "compressed": {"compression": "zlib"},
    "replayed": {"replay_every_n_steps": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    for name, options in STORED.items():
        torch.manual_seed(0)
        layers = torch.nn
        model = layers.Sequential(layers.Conv2d(1, 2, 3), layers.BatchNorm2d(2), layers.Flatten(), layers.Linear(72, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with padiff.record(model, folder / name, optimizer=optimizer, **options) as rec:
            for _ in range(2):
                loss = model(torch.randn(4, 1, 8, 8)).square().sum()
                rec.log_loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
    return [folder / name for name in STORED]


@pytest.mark.timeout(max(300, COUNT * 10))
def test_no_mutation_gets_the_better_of_a_reader(runs):
    done = run_child(
        [sys.executable, "-m", "tests.hard.fuzzing", *map(str, runs), "--count", str(COUNT)],
        timeout=max(280, COUNT * 10),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *failures, summary = done.stdout.splitlines()
    assert not failures, "\n".join(failures)[:4000]
    assert summary.startswith(f"{COUNT} mutations, at most ")


# Refusing takes some memory too: a text of 60 MB is read before it is known what it holds.
BOMBED = """
import resource, sys
from pathlib import Path
from tests.hard.fuzzing import BOMBS
from padiff import open_run
from padiff.errors import PadiffError

run, refused = Path(sys.argv[1]), 0
victims = [path for path in run.rglob("*") if path.suffix in (".json", ".safetensors", ".npy")]
for name, make in BOMBS.items():
    bomb = make()
    for victim in victims:
        kept = victim.read_bytes()
        victim.write_bytes(bomb)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            opened = open_run(run)
            [r.value for number in opened.numbers() for step in opened.steps(number) for r in step.records]
        except PadiffError:
            refused += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 400_000, f"{name} as {victim} took {grown} kB"
        victim.write_bytes(kept)
print(refused, len(victims) * len(BOMBS))
"""


@pytest.mark.parametrize("stored", ["plain", "packed"])
def test_bombs_are_refused_in_little_memory(runs, tmp_path, stored):
    """In the place of every JSON and packed file that a run holds, and of a few tensors."""
    run = tmp_path / stored
    shutil.copytree(runs[list(STORED).index(stored)], run)
    shutil.rmtree(run / "steps" / "00000001")
    (run / "finished.json").unlink()
    for structure in (run / "structures").glob("*.json"):  # of the step that is gone: nothing reads it
        if not any(structure.stem.encode() in step.read_bytes() for step in run.rglob("*.safetensors")):
            structure.unlink()
    for tensor in sorted((run / "steps").rglob("*.npy"))[3:]:
        tensor.rename(tensor.with_suffix(".gone"))
    done = run_child([sys.executable, "-c", BOMBED, str(run)], timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, total = map(int, done.stdout.split())
    assert refused == total >= 30


def test_the_mutations_change_something(runs, tmp_path):
    """Else the test above tests nothing: most mutated folders differ, and most kinds of mutation occur."""

    (tmp_path / "outside").mkdir()
    for name in ("secret.json", "secret.npy"):
        (tmp_path / "outside" / name).write_text("{}")
    done = []
    for seed in range(40):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(runs[seed % len(runs)], tmp_path / "run")
        done += fuzzing.mutate(tmp_path / "run", tmp_path / "outside", random.Random(seed))
    kinds = {text.split(": ")[-1] for text in done if "->" not in text}
    assert len(done) >= 40 and kinds >= {"JSON", "bytes"} and len(kinds) >= 7, kinds
    text = json.dumps({"a": [1, {"b": 2}]}).encode()
    assert len({fuzzing.mutate_json(text, random.Random(seed)) for seed in range(50)}) > 25

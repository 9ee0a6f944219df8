"""What 70 billion parameters over 64 processes take: a simulation of the recorded structures, without the tensors.

A Llama of the true depth (80 layers), but of small width, is recorded by the real recorder, as sketches. Its steps are
then written again, one for each process, with the shapes of the 70 B model: each parameter split along its first axis
(as FSDP2 splits it), each process with activations of its own. A sketch takes as many bytes whatever it is of, so
files, records and pairs are those that the real run would leave; only the values are not a 70 B model's.

Two such runs, of which the candidate has rounding noise, are then opened, aligned and compared, for several numbers of
processes, each in a process of its own, so that its memory is its own.

    python benchmarks/scale.py [--layers 80] [--ranks 1,2,4,8] [--steps 2] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import padiff
from padiff.align import align
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.records import PARAMETER_STAGES, Layer, Record, Sketched, Step
from padiff.records.recorded import SHARD, Part

# Lengths of the small model, each of which occurs for one reason only, and those of the 70 B model.
WORDS, WIDTH, INNER, KEYS, LENGTH = 96, 32, 56, 8, 12
LARGE = {WORDS: 128256, WIDTH: 8192, INNER: 28672, KEYS: 1024, LENGTH: 4096}


def recorded(folder: Path, layers: int, steps: int) -> Path:
    """A run of the small model, as the recorder writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    net = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    ids = torch.randint(WORDS, (1, LENGTH))
    with padiff.record(net, dir_path=folder, optimizer=optimizer, detail="sketch") as rec:
        for _ in range(steps):
            net(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return folder


def large(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(LARGE.get(n, n) for n in shape)


def of_large(layer: Layer) -> Layer:
    return replace(layer, parameters=tuple(replace(p, shape=large(p.shape)) for p in layer.parameters))


def of_rank(record: Record, order: int, rank: int, ranks: int, factors: np.ndarray) -> Record:
    """What one of the processes of the large run has in the place of a record of the small one."""
    shape, part = large(record.shape), None
    size = int(np.prod(shape))
    if not record.dtype.startswith("float"):
        factors = np.ones_like(factors)  # token ids are equal
    if isinstance(record.source, Sketched):
        row, turned = record.source.row * factors[order], record.source.transposed
    elif record.source.read().size == 1:
        return record  # the loss
    else:
        row, turned = np.full(68, factors[order]), False
    if record.stage in PARAMETER_STAGES and ranks > 1 and shape:
        own = shape[0] // ranks
        part, shape = Part(shape, (rank * own, *(0,) * (len(shape) - 1)), SHARD), (own, *shape[1:])
    return replace(record, shape=shape, source=Sketched(row, size, turned), part=part)


def simulated(small: Path, folder: Path, ranks: int, steps: int, noise: float) -> Path:
    run = open_run(small)
    info = replace(run.info, layers=tuple(map(of_large, run.info.layers)), world_size=ranks, name=folder.name)
    writer = RunWriter(folder, info, storage=Storage(pack=True))
    rng = np.random.default_rng(0)
    for number in range(steps):
        step: Step = run.steps(run.numbers()[-1])[0]
        for rank in range(ranks):
            factors = 1 + noise * rng.standard_normal(len(step.records))
            records = tuple(of_rank(r, k, rank, ranks, factors) for k, r in enumerate(step.records))
            writer.add_step(replace(step, number=number, rank=rank, records=records))
    writer.close()
    return folder


def seconds(call: Callable[[], object]) -> tuple[float, object]:
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def peak() -> float:
    """Most memory of this process, MB. (What `getrusage` says counts the process that started it.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(a: Path, b: Path) -> dict[str, float]:
    """Processor time and memory of one process."""
    opening, runs = seconds(lambda: [open_run(path) for path in (a, b)])
    first, _ = seconds(lambda: runs[0].steps(0))
    again, steps = seconds(lambda: runs[0].steps(1))
    aligning, _ = seconds(lambda: align(*(run.info for run in runs)))
    padiff.compare_runs(a, b, workers=1, steps=[0])  # imports what comparing needs
    one, _ = seconds(lambda: padiff.compare_runs(a, b, workers=1, steps=[0]))
    both, report = seconds(lambda: padiff.compare_runs(a, b, workers=1))
    files = [path for path in (a / "steps" / "00000001").rglob("*") if path.is_file()]
    return {
        "MB a step": sum(path.stat().st_size for path in files) / 1e6,
        "MB of structures": sum(p.stat().st_size for p in (a / "structures").glob("*")) / 1e6,
        "records a step": sum(len(step.records) for step in steps),
        "pairs a step": len(report.diffs) / 2,
        "open": opening,
        "read the first step": first,
        "read a step": again,
        "align": aligning,
        "compare the first step": one,
        "compare a step more": both - one,
        "peak MB": peak(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dir", help="where to write (default: the temporary folder)")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(*map(Path, args.measure))))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        small = recorded(Path(name) / "small", args.layers, 2)
        for ranks in map(int, args.ranks.split(",")):
            runs = [
                simulated(small, Path(name) / f"{side}{ranks}", ranks, args.steps, noise)
                for side, noise in (("a", 0.0), ("b", 1e-8))
            ]
            call = [sys.executable, __file__, "--measure", *map(str, runs)]
            found = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
            text = ", ".join(f"{what} {number:.4g}" for what, number in found.items())
            print(f"{ranks} processes: {text}", flush=True)


if __name__ == "__main__":
    main()

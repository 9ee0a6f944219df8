"""The folder of a golden run: a run folder of sketches, and its measured rounding noise."""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from padiff import __version__
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.dump import open_run
from padiff.dump.format import digest
from padiff.dump.medium import Explained, check_inside, read_json, write_json
from padiff.dump.pack import opened
from padiff.dump.read import FolderRun
from padiff.dump.safetensors import write_safetensors
from padiff.dump.storage import Storage
from padiff.dump.write import RunWriter
from padiff.errors import RunFolderError, UsageError
from padiff.records import LOOP, NO_TRACE, InMemory, Record, Sketched, Step, TensorSource, Trace, is_below
from padiff.replaying.calibrating import computed_in
from padiff.sketches.sketch import ROW, Sketch, sketch_of

#: Size of the move of each weight, in units in the last place: 16, as in measured floors, so that values cross kinks
#: (ReLU, maxima) as often as with larger noise.
UNITS = 16
#: Largest error of a drift, in multiples of the largest error in the moved runs. Chosen: the changes of
#: `benchmarks/goldens.py --seen` have at most half of this; a factor of 1.0001 is found by the norm all the same.
FACTOR = 8.0
#: Least limit, in units in the last place of the dtype that is computed in: for tensors that no weight moves. Chosen:
#: a transcendental function is right to 4 units in both frameworks' vector code, and is called a few times in a row.
LEAST = 16.0
#: The same of the norm and of the mean of many numbers: rounding cancels there, unless code rounds to one side. Chosen:
#: vector code is right to a unit, and is called a few times in a row.
LEAST_CANCELLED = 4.0
#: Units in the last place of a weight that an update may differ by: the decay, the product and the step each round.
ROUNDINGS = 3.0
#: Least limit of weights that a training starts from, and of buffers. Chosen: random draws are rounded two times.
LEAST_START = 4.0

# A running mean, and the variance that says what it is a mean of; the share of a batch in it by default.
_MEANS = {"running_mean": "running_var", "_mean": "_variance"}
_SHARE = 0.1


class Errors(NamedTuple):
    """Errors of a tensor between two runs, as shares of its root mean square.

    Attributes:
        l2: relative L2 error.
        size: share by which the norm is larger or smaller. Rounding cancels in it, a factor does not.
        mean: shift of the mean. Rounding cancels in it, a shift does not.
    """

    l2: float
    size: float
    mean: float

    def largest(self, other: Errors) -> Errors:
        """Return the larger one of each error."""
        return Errors(*map(max, self, other))


#: Errors of a tensor that did not change.
NOTHING = Errors(0.0, 0.0, 0.0)


def sketch_of_record(record: Record, transposed: bool = False) -> Sketch:
    """Return a record's sketch, of its values if these were recorded."""
    sketch = record.source.sketch
    return sketch_of(record.value, transposed) if sketch is None else sketch


def errors_between(before: Sketch, now: Sketch) -> Errors | None:
    """Return the errors of a tensor; `None` if a sketch does not tell."""
    if before.size != now.size or before.transposed != now.transposed or not before.size:
        return None
    norms = before.l2, now.l2
    if not all(map(math.isfinite, norms)) or before.nonfinite or now.nonfinite:
        return None
    if not norms[0]:
        return NOTHING if not norms[1] else None
    rms = norms[0] / math.sqrt(before.size)
    return Errors(
        float(np.linalg.norm(before.errors(now))) / norms[0],
        abs(norms[1] / norms[0] - 1),
        abs(now.mean - before.mean) / rms,
    )


def measured(base: Step, moved: Iterable[Step]) -> dict[str, Errors]:
    """Return the largest errors of each tensor of a step in the moved runs, by site."""
    sketches = {r.site: sketch_of_record(r) for r in base.records if coarse(r.dtype) in ROUNDING}
    noise: dict[str, Errors] = {}
    for step in moved:
        for record in step.records:
            before = sketches.get(record.site)
            if before is None:
                continue
            values = errors_between(before, sketch_of_record(record, before.transposed))
            if values is not None:
                noise[record.site] = values.largest(noise.get(record.site, NOTHING))
    for record in base.records:
        before = sketches.get(record.site)
        scale = None if before is None or record.site not in noise else _scale_of(record, before, sketches)
        if before is not None and scale is not None:
            noise[record.site] = noise[record.site].largest(_rounding_of(scale, before, record.dtype))
    return noise


def _scale_of(record: Record, sketch: Sketch, sketches: Mapping[str, Sketch]) -> float | None:
    """Return the L2 norm of the numbers whose rounding a tensor has although it is smaller; `None` if there is none.

    Moves by whole units keep the rounding of a weight that an update is added to, and moves of weights cancel in a
    mean, while the rounding of its terms does not.
    """
    if record.stage == "update":
        weight = sketches.get(record.site.replace("/update/", "/weight/"))
        return None if weight is None else ROUNDINGS / FACTOR * weight.l2
    if record.stage == "weight" and record.slot in _MEANS:
        variance = sketches.get(record.site.replace(record.slot, _MEANS[record.slot]))
        return None if variance is None else _SHARE * math.sqrt(max(variance.mean, 0.0) * sketch.size)
    return None


def _rounding_of(scale: float, sketch: Sketch, dtype: str) -> Errors:
    """Return the errors of a tensor by rounding numbers of a scale once, by a unit in the last place."""
    if not sketch.l2:
        return NOTHING
    error = 2 * ROUNDING[coarse(dtype)] * scale / sketch.l2
    # Of many numbers these errors cancel in the norm and in the mean.
    return Errors(error, *(error / math.sqrt(sketch.size),) * 2)


def limits_of(noise: Errors, dtype: str, is_start: bool, count: int) -> Errors:
    """Return the largest errors of a tensor that rounding explains.

    Args:
        noise: its errors in the moved runs.
        dtype: the coarsest dtype that the step computes in.
        is_start: the tensor is a weight that the training starts from, which the moved runs move themselves.
        count: its number of elements.
    """
    unit = 2 * ROUNDING[dtype]
    if is_start:
        return Errors(*(LEAST_START * unit,) * 3)
    cancelled = max(LEAST_CANCELLED, LEAST / math.sqrt(count))
    # The norm and the mean each take one direction of the same error. A single number of few runs may be small by
    # chance; that both are is much less likely.
    direction = max(noise.size, noise.mean)
    noise = Errors(noise.l2, direction, direction)
    return Errors(*(max(FACTOR * each, least * unit) for each, least in zip(noise, (LEAST, cancelled, cancelled))))


def limits_of_first(limits: Errors, dtype: str, count: int) -> Errors:
    """Return the limits of a tensor whose inputs are all equal to the bit, so that it inherits no error.

    Kernels that add in another order were measured at 15 units of L2, and a third of a unit of the norm and the mean.
    """
    least = max(LEAST_CANCELLED, LEAST / math.sqrt(count)) * 2 * ROUNDING[dtype]
    return Errors(limits.l2, min(limits.size, least), min(limits.mean, least))


def unit_of(noise: Errors, dtype: str) -> float:
    """Return one unit of a tensor's rounding noise: its relative L2 error for a move by one unit in the last place."""
    return max(noise.l2 / UNITS, ROUNDING[dtype])


def mark_of_record(record: Record) -> str:
    """Return a digest of a record's bits; of a sketch's, if its values were not recorded."""
    source = record.source
    array: Any = source.row if isinstance(source, Sketched) else record.value
    return digest(np.asarray(array))


def marks_of(step: Step) -> Mapping[str, str]:
    """Return the digests of a step's tensors by site."""
    return {record.site: mark_of_record(record) for record in step.records}


GOLDEN_FILE, NOISE_FILE, PROOF_FILE = "golden.json", "noise.safetensors", "proof.json"
SCHEMA_VERSION = 1
#: Bytes that a golden run may have. Chosen: dozens of goldens fit into a repository.
MOST_BYTES = 200_000
# Bytes up to which a tensor's values take no more room than its sketch.
_SMALL = 8 * ROW
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# The test of which tensors of a golden run stay.
_Choice = Callable[[Step, Record], bool]


@dataclass(frozen=True)
class Golden:
    """A golden run.

    Attributes:
        folder: its folder.
        run: its run.
        dtype: the coarsest dtype that the training computes in.
        noise: by step and site, the errors of the moved runs.
        marks: by step and site, the digests of its tensors.
        mark: the digest of all tensors, also of those that are left out.
        created, version: when it was recorded, and by which padiff.
        left_out: what is left out, in words; empty if nothing is.
        repeats: True if the training gave the same bits twice.
    """

    folder: Path
    run: FolderRun
    dtype: str
    noise: Mapping[int, Mapping[str, Errors]]
    marks: Mapping[int, Mapping[str, str]]
    mark: str
    created: str
    version: str
    left_out: str
    repeats: bool

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return self.folder.name

    @property
    def steps(self) -> list[int]:
        """Return the numbers of its steps."""
        return self.run.numbers()


def mark_of_run(steps: Sequence[Step]) -> str:
    """Return the digest of all tensors of a run's steps."""
    content = hashlib.sha256()
    for step in steps:
        for site, mark in sorted(marks_of(step).items()):
            content.update(f"{step.number} {site} {mark}\n".encode())
    return content.hexdigest()


def steps_of_run(folder: Path) -> list[Step]:
    """Return the steps of a run of one process.

    Raises:
        UsageError: it was recorded by several processes.
    """
    run = open_run(folder)
    if run.info.world_size > 1:
        raise UsageError(
            f"{folder}: a golden run is one of a single process, and {run.info.world_size} recorded this one. "
            "Check one of them, or compare whole runs with `padiff compare`"
        )
    return [run.steps(number)[0] for number in run.numbers()]


def write_golden(folder: Path, name: str, base: Path, again: Path, moved: Sequence[Path]) -> None:
    """Write a golden run, small enough, into a folder that does not exist.

    Args:
        name: name of the golden run.
        base: the run folder of the training.
        again: that of the same training, once more.
        moved: those of the training with weights moved by `UNITS` units in the last place.
    """
    steps = steps_of_run(base)
    others = [steps_of_run(run) for run in (again, *moved)]
    info = open_run(base).info
    noise = {step.number: measured(step, _same(step.number, others)) for step in steps}
    mark = mark_of_run(steps)
    content = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "padiff": __version__,
        "steps": [step.number for step in steps],
        "dtype": max((computed_in(step, info.environment) for step in steps), key=_coarseness),
        "mark": mark,
        "runs": len(moved),
        "repeats": mark_of_run(others[0]) == mark,
    }
    for what, keeps in _choices(steps):
        shutil.rmtree(folder, ignore_errors=True)
        small = [_small(step, keeps, is_whole=not what) for step in steps]
        writer = RunWriter(folder, replace(info, name=name), storage=Storage(pack=True))
        try:
            for step in small:
                writer.add_step(step)
        finally:
            writer.close()
        arrays: dict[str, np.ndarray] = {}
        for step in small:
            marks = marks_of(next(each for each in steps if each.number == step.number))
            sites = [record.site for record in step.records]
            errors = [noise[step.number].get(site, NOTHING) for site in sites]
            arrays[f"{step.number}/marks"] = np.array([int(marks[site], 16) for site in sites], np.uint64)
            arrays[f"{step.number}/errors"] = np.array(errors, np.float32).reshape(-1, 3)
        write_safetensors(folder / NOISE_FILE, arrays, {"schema_version": str(SCHEMA_VERSION)})
        write_json(folder / GOLDEN_FILE, {**content, "left_out": what})
        if size_of_folder(folder) <= MOST_BYTES:
            break


def size_of_folder(folder: Path) -> int:
    """Return the number of bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def is_golden(folder: Path) -> bool:
    """Return True for the folder of a golden run."""
    return (folder / GOLDEN_FILE).is_file()


def goldens_in(folder: Path) -> list[Path]:
    """Return the folders of the golden runs in a folder, or the folder itself if it is one.

    Raises:
        UsageError: there is none, or one has a name that no golden run can have.
    """
    if is_golden(folder):
        return [folder]
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    folders = [path for path in paths if is_golden(path) and not path.name.startswith(".")]
    if not folders:
        raise UsageError(
            f"{folder} holds no golden run. Record one: padiff golden record {folder / 'NAME'} -- python train.py"
        )
    for path in folders:
        check_name(path.name)
    return folders


def check_name(name: str) -> None:
    """Raise an error for a name that a golden run cannot have: names go into commands.

    Raises:
        UsageError: the name has other characters.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"golden: the name becomes a folder's: letters, digits, '_', '-' and '.', beginning with none of the "
            f"last two; got {name!r}"
        )


def read_golden(folder: Path) -> Golden:
    """Return the golden run of a folder. Its files are not trusted.

    Raises:
        RunFolderError: a file is missing or damaged.
    """
    path = folder / GOLDEN_FILE
    content = read_json(path, folder, SCHEMA_VERSION, "record the golden run again")
    run = open_run(folder)
    if not isinstance(run, FolderRun):
        raise RunFolderError(f"{folder} is damaged: it holds no run. Record the golden run again")
    noise: dict[int, dict[str, Errors]] = {}
    marks: dict[int, dict[str, str]] = {}
    with Explained(path):
        if content["dtype"] not in _DTYPES:
            raise ValueError(f"{content['dtype']!r} is no dtype of a training")
        texts = [str(content[name]) for name in ("mark", "created", "padiff", "left_out")]
    file = opened(check_inside(folder / NOISE_FILE, folder), deque())
    with Explained(folder / NOISE_FILE):
        _, places = file.header()
        for number in run.numbers():
            sites = [record.site for record in run.steps(number)[0].records]
            digests, errors = (file.array(places[f"{number}/{part}"]) for part in ("marks", "errors"))
            if digests.shape != (len(sites),) or errors.shape != (len(sites), 3) or not (errors >= 0).all():
                raise ValueError(f"step {number} has {len(sites)} tensors, and the noise of others")
            marks[number] = {site: f"{int(mark):016x}" for site, mark in zip(sites, digests.tolist())}
            noise[number] = {site: Errors(*row) for site, row in zip(sites, errors.tolist())}
    mark, created, version, left_out = texts
    return Golden(
        folder, run, content["dtype"], noise, marks, mark, created, version, left_out, content.get("repeats") is True
    )


_DTYPES = ("float64", "float32", "float16", "bfloat16")


def _coarseness(dtype: str) -> int:
    return _DTYPES.index(dtype)


def _same(number: int, runs: Sequence[Sequence[Step]]) -> Iterator[Step]:
    for run in runs:
        yield from (step for step in run if step.number == number)


def _choices(steps: Sequence[Step]) -> Iterator[tuple[str, _Choice]]:
    """Yield what is left out, in words, and the test of what stays; each leaves out more than the one before."""
    first = steps[0].number

    def has_children(step: Step, record: Record) -> bool:
        return any(is_below(other.layer, record.layer) for other in step.records)

    inner: dict[tuple[int, str], bool] = {}

    def is_leaf(step: Step, record: Record) -> bool:
        key = step.number, record.layer
        if key not in inner:
            inner[key] = has_children(step, record)
        return not inner[key]

    def without_backward(step: Step, record: Record) -> bool:
        return record.stage != "backward"

    def without_derived(step: Step, record: Record) -> bool:
        return record.stage != "backward" and not (
            record.stage in ("weight", "grad") and step.number != first and record.layer != LOOP
        )

    def leaves(step: Step, record: Record) -> bool:
        return without_derived(step, record) and (record.stage != "forward" or is_leaf(step, record))

    yield "", lambda step, record: True
    yield "calls of functions", lambda step, record: True
    yield "calls of functions, gradients of outputs", without_backward
    yield "calls of functions, gradients of outputs, later weights and gradients", without_derived
    text = "calls of functions, gradients of outputs, later weights and gradients, outputs of layers with layers inside"
    yield text, leaves
    places = {
        (step.number, record.site): place
        for step in steps
        for stage in ("weight", "forward", "grad", "update")
        for place, record in enumerate(
            [each for each in step.records if each.stage == stage and each.layer != LOOP and leaves(step, each)]
        )
    }
    for every in (2, 4, 8, 16, 32, 64, 128):
        yield f"{text}, and of what remains all but one tensor in {every}", _thinned(leaves, places, every)


def _thinned(leaves: _Choice, places: Mapping[tuple[int, str], int], every: int) -> _Choice:
    def is_kept(step: Step, record: Record) -> bool:
        place = places.get((step.number, record.site))
        return leaves(step, record) and (place is None or place % every == every - 1)

    return is_kept


def _small(step: Step, keeps: _Choice, is_whole: bool) -> Step:
    """Return a step with sketches in the place of large tensors."""
    sources: dict[Hashable, TensorSource] = {}

    def small(record: Record) -> Record:
        identity = record.source.identity
        if identity not in sources:
            value = None if record.source.sketched else record.value
            if value is not None and value.nbytes <= _SMALL:
                sources[identity] = InMemory(value)
            else:
                sketch = sketch_of_record(record)
                sources[identity] = Sketched(sketch.row(), sketch.size, sketch.transposed)
        return replace(record, source=sources[identity])

    records = tuple(small(record) for record in step.records if keeps(step, record))
    trace = NO_TRACE
    if is_whole:
        tensors = [
            replace(tensor, source=None if tensor.source is None else sources.get(tensor.source.identity))
            for tensor in step.trace.tensors
        ]
        trace = Trace(tensors, step.trace.calls, step.trace.functions)
    return replace(step, records=records, trace=trace)

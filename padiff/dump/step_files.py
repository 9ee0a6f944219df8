"""Dumps and unpacked steps, written and read: JSON trees, and one file per tensor."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import Any, TypeAlias

import numpy as np

from padiff.dump.deduplication import Deduplication, RankDedup, elsewhere
from padiff.dump.format import (
    FOLDERS,
    PARAMS_FILE,
    REPORT_FILE,
    SCHEMA_VERSION,
    SKETCHES_FILE,
    evaluations_from_json,
    evaluations_to_json,
    loop_layer,
    nodes_from_json,
    record_to_json,
    tree_to_json,
    write_npy,
)
from padiff.dump.medium import Explained, read_json, write_json
from padiff.dump.storage import Storage
from padiff.dump.store import AnyPath
from padiff.dump.stored_schema import MOST, NOWHERE, TracePlace, trace_from_json, trace_to_json
from padiff.dump.tensor_file import TensorFile
from padiff.dump.untrusted import as_int, plain, shape_of
from padiff.errors import RunFolderError
from padiff.records import (
    LOOP,
    NO_TRACE,
    PARAMETER_STAGES,
    STAGES,
    Record,
    RunInfo,
    Sketched,
    Step,
    TensorSource,
    Trace,
    settings_from_json,
)
from padiff.records.recorded import SHARD, Part
from padiff.records.sources import known_dtype
from padiff.records.step_schema import StoredRecords
from padiff.records.traces import regions_from_json, regions_to_json
from padiff.sketches.sketch import ROW
from padiff.system.frames import Frame

#: Storage of unpacked steps, without a size limit.
PLAIN = Storage()
#: Files of a step that are written in parallel: creating a file takes the kernel longer than writing its bytes.
FILES_AT_ONCE = 2

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")

# Largest number of bytes of code in ``run.json``.
_MOST_CODE = 200_000


def write_dump(
    folder: Path,
    info: RunInfo,
    step: Step,
    places: Mapping[str, tuple[str, str]] = FOLDERS,
    deduplication: Deduplication | None = None,
    final: Path | None = None,
    once: RankDedup | None = None,
) -> None:
    """Write one rank's records of one step: JSON trees and the tensors' files.

    Args:
        places: by stage, the JSON file and the folder of tensors; records of other stages are left out.
        deduplication: tensors that were written before, to link to.
        final: path of the folder once the step is complete.
        once: deduplication between ranks, of parameters, and of activations if layers are split.
    """
    files: dict[Hashable, str] = {}
    entries: dict[str, dict[str, list[dict[str, Any]]]] = {name: defaultdict(list) for name, _ in places.values()}
    for sub in {sub for _, sub in places.values()}:
        (folder / sub).mkdir(exist_ok=True)

    # Ranks that split layers see the same samples. Under data parallelism, no two ranks have equal activations.
    parts = (record.part for record in step.records)
    is_sharded = any(part is not None and part.kind == SHARD and part.share < 0 for part in parts)

    def write(record: Record, name: str) -> None:
        array = record.value
        if once is not None and (is_sharded or record.stage in PARAMETER_STAGES) and once.elsewhere(name, array):
            return
        if deduplication is None or not deduplication.link(record, array, folder / name, (final or folder) / name):
            write_npy(folder / name, array)

    def write_traced(source: TensorSource, name: str) -> None:
        array = source.read()
        if once is None or not is_sharded or not once.elsewhere(name, array):
            write_npy(folder / name, array)

    trace: dict[str, Any] = {}
    with ThreadPoolExecutor(FILES_AT_ONCE, "padiff-files") as pool:
        pending: list[Future[None]] = []

        def start(job: Callable[..., None], *args: Any) -> None:
            try:
                pending.append(pool.submit(job, *args))
            except RuntimeError:  # the interpreter is ending, and starts no new threads
                job(*args)

        for record in step.records:
            place = places.get("loss" if record.layer == LOOP else record.stage)
            if place is None:
                continue
            json_file, sub = place
            # Records that share an array (a layer's output that is its parent's too) share a file.
            name = files.get(record.source.identity)
            if name is None or not name.startswith(f"{sub}/"):
                name = f"{sub}/{_file_name(record)}"
                start(write, record, name)
                files[record.source.identity] = name
            entries[json_file][record.layer].append(record_to_json(record, name))
        if "forward" in places and step.trace.calls:
            sub = places["forward"][1]
            traced: list[TracePlace] = []
            rows: dict[Hashable, int] = {}
            sketches: list[np.ndarray] = []
            for number, tensor in enumerate(step.trace.tensors):
                source = tensor.source
                if source is None:
                    traced.append(NOWHERE)
                elif isinstance(source, Sketched):
                    row = rows.setdefault(source.identity, len(rows))
                    if row == len(sketches):
                        sketches.append(source.row)
                    traced.append(("turned" if source.transposed else "sketch", row))
                else:
                    name = files.get(source.identity)
                    if name is None or not name.startswith(f"{sub}/"):
                        name = files[source.identity] = f"{sub}/trace-{number:06d}.npy"
                        start(write_traced, source, name)
                    traced.append(("file", name))
            trace = trace_to_json(step.trace, traced)
            if sketches:
                trace["sketches"] = {"file": f"{sub}/{SKETCHES_FILE}", "rows": len(sketches)}
                write_npy(folder / sub / SKETCHES_FILE, np.stack(sketches))
        for writing in pending:
            writing.result()
    if once is not None:
        once.write(folder)
    for json_file, by_layer in entries.items():
        write_json(
            folder / json_file,
            {
                "schema_version": SCHEMA_VERSION,
                "step": step.number,
                "rank": step.rank,
                "loss_scale": step.loss_scale,
                "micro_batches": step.micro_batches,
                "notes": list(step.notes),
                **({"evaluations": evaluations_to_json(step.evaluations)} if step.evaluations else {}),
                **({"regions": regions_to_json(step.regions)} if step.regions else {}),
                **({"settings": dict(step.settings)} if step.settings else {}),
                "framework": {"name": info.framework, "version": info.framework_version},
                "name": info.name,
                "layer_map": list(info.layer_map),
                "loop": {**loop_layer(), "records": by_layer.get(LOOP, [])},
                **({"trace": trace} if trace and json_file == places["forward"][0] else {}),
                "tree": tree_to_json(info.layers, by_layer),
            },
        )


def run_to_json(info: RunInfo) -> dict[str, Any]:
    """Return the content of ``run.json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        **({"id": info.identity} if info.identity else {}),
        "framework": {"name": info.framework, "version": info.framework_version},
        "name": info.name,
        "world_size": info.world_size,
        "recording": dict(info.recording),
        **({"environment": dict(info.environment)} if info.environment else {}),
        **({"settings": dict(info.settings)} if info.settings else {}),
        **({"lines": _kept_lines(info.lines)} if info.lines else {}),
        **({"files": dict(info.files)} if info.files else {}),
        "layer_map": list(info.layer_map),
        "tree": tree_to_json(info.layers),
    }


def _kept_lines(lines: Mapping[str, Frame]) -> dict[str, list[Any]]:
    """Return lines of code for JSON, 200 kB at most: the first ones."""
    kept: dict[str, list[Any]] = {}
    room = _MOST_CODE
    for key, frame in lines.items():
        room -= len(key) + len(frame.file) + len(frame.code) + 20
        if room < 0:
            break
        kept[key] = list(frame)
    return kept


def _file_name(record: Record) -> str:
    # The order makes the name unique; the rest, cut off as file systems limit names to 255 bytes, is for readers.
    text = _UNSAFE.sub("_", f"{record.stage}-{record.layer}-{record.slot}-{record.call}")
    return f"{record.order:06d}-{text[:120]}.npy"


_Others = Mapping[str, tuple[AnyPath, str]]


# The JSON entry of a record: file, site (for messages), layer, stage, slot, dtype, shape, call, order, layer type,
# recomputed, part. A plain tuple, which the garbage collector stops tracking.
_Entry: TypeAlias = tuple[str, str, str, str, str, str, tuple[int, ...], int, int, str, bool, Part | None]
_ORDER = 8
# Content of each JSON file as far as it concerns records: path, layer tree, the loop's node.
_Said: TypeAlias = list[tuple[Path, Any, Any]]


class _Structure:
    """Identity of a step structure, as a weak key of caches: it does not keep the records alive.

    Attributes:
        facts: cached results computed from the records (`padiff.records.step_schema.StoredRecords.fact`).
    """

    def __init__(self) -> None:
        self.facts: dict[Any, Any] = {}


class _Known:
    """The parsed entries of a rank's latest step, reused for further steps with the same entries.

    Attributes:
        said: the content of the JSON files from which the entries were parsed.
        entries: the entry of each record, in recorded order.
        structure: identity of the structure; `None` if the run has too many structures.
    """

    __slots__ = ("entries", "said", "structure")

    def __init__(self, said: _Said, structure: _Structure | None) -> None:
        self.said, self.structure = said, structure
        entries: list[_Entry] = []
        for path, tree, loop in said:
            with Explained(path):
                for node in nodes_from_json(tree):
                    entries += _entries(str(node["path"]), str(node["type"]), node.get("records", ()))
                entries += _entries(LOOP, "", loop.get("records", ()))
        self.entries = sorted(entries, key=itemgetter(_ORDER))

    def is_of(self, said: _Said) -> bool:
        return [content[1:] for content in self.said] == [content[1:] for content in said]


class FileReader:
    """Reader of one run's unpacked steps; entries of successive steps with the same structure are parsed once."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._structures: Counter[str] = Counter()

    def read(
        self, folder: Path, files: Sequence[str] = (REPORT_FILE, PARAMS_FILE)
    ) -> tuple[Step, list[tuple[Path, Any]]]:
        """Return one rank's step, and path and content of the JSON files that it was read from.

        Raises:
            RunFolderError: none of the files exists, or one of them is damaged.
        """
        contents = [(folder / name, read_part(folder / name)) for name in files if (folder / name).exists()]
        if not contents:
            raise RunFolderError(f"{folder} holds neither {' nor '.join(files)}: it is no dump folder")
        others = elsewhere(folder)
        parsed = self._called(folder.name, contents)
        records = _records(folder, parsed.entries, others)
        path, content = contents[-1]
        with Explained(path):
            step = Step(
                number=as_int(content["step"]),
                # Tensors that another rank stores for one step may be stored differently for the next.
                records=tuple(records)
                if others or parsed.structure is None
                else StoredRecords(records, parsed.structure),
                rank=as_int(content.get("rank", 0)),
                loss_scale=_scale(content.get("loss_scale", 1.0)),
                micro_batches=as_int(content.get("micro_batches", 1)),
                notes=tuple(str(note) for note in content.get("notes", ())),
                settings=settings_from_json(plain(content.get("settings", {}))),
                trace=next((_trace(folder, others, *each) for each in contents if each[1].get("trace")), NO_TRACE),
                evaluations=evaluations_from_json(content.get("evaluations", ())),
                regions=regions_from_json(content.get("regions", ())),
            )
        return step, contents

    def _called(self, rank: str, contents: Sequence[tuple[Path, Any]]) -> _Known:
        trees = []
        for path, content in contents:
            with Explained(path):
                trees.append((path, content["tree"], content.get("loop", {})))
        parsed = self._known.get(rank)
        with Explained(path):
            if parsed is None or not parsed.is_of(trees):
                self._structures[rank] += 1
                # As many as a run of packed steps has structure files.
                structure = _Structure() if self._structures[rank] <= MOST else None
                parsed = self._known[rank] = _Known(trees, structure)
        return parsed


def read_part(path: AnyPath) -> Any:
    """Return the content of a JSON file of a run folder."""
    return read_json(path, path.parent, SCHEMA_VERSION, f"{path.parent} is no run folder, or a part of one")


def _trace(folder: Path, others: _Others, path: Path, content: Mapping[str, Any]) -> Trace:
    trace = content["trace"]
    table: list[np.ndarray] = []

    def source(kept_as: str, place: Any, dtype: str, shape: tuple[int, ...]) -> TensorSource:
        if kept_as == "file":
            where, file = others.get(str(place), (folder, str(place)))
            return TensorFile(where, file, dtype, shape, "trace")
        if kept_as not in ("sketch", "turned") or place < 0:
            raise ValueError(f"kept as {kept_as!r} at {place!r}")
        if not table:
            table_entry = trace["sketches"]
            rows = (as_int(table_entry["rows"]), ROW)
            table.append(
                np.array(TensorFile(folder, str(table_entry["file"]), "float64", rows, "sketches").read(), np.float64)
            )
        size = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
        return Sketched(table[0][place], size, kept_as == "turned")

    return trace_from_json(trace, source, path)


def _scale(value: Any) -> float:
    scale = float(value)
    if not 0 < scale < math.inf:
        raise ValueError(f"a loss scale of {scale}")
    return scale


def _entries(layer: str, layer_type: str, said: Iterable[dict[str, Any]]) -> Iterator[_Entry]:
    # Interned, as the same texts occur in every step of a long comparison.
    layer, layer_type = intern(layer), intern(layer_type)
    for entry in said:
        stage, slot, call = intern(str(entry["stage"])), intern(str(entry["slot"])), as_int(entry["call"])
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}")
        site = intern(f"{layer}/{stage}/{slot}")
        dtype, shape, order = known_dtype(entry["dtype"], site), _shape(tuple(entry["shape"])), as_int(entry["order"])
        file = intern(str(entry["file"]))
        part = Part.of_json(entry["part"], shape) if "part" in entry else None
        recomputed = bool(entry.get("recomputed"))
        yield file, site, layer, stage, slot, dtype, shape, call, order, layer_type, recomputed, part


def _records(folder: Path, entries: Iterable[_Entry], others: _Others) -> Iterator[Record]:
    for file, site, layer, stage, slot, dtype, shape, call, order, layer_type, recomputed, part in entries:
        where, name = others.get(file, (folder, file)) if others else (folder, file)
        source = TensorFile(where, name, dtype, shape, site)
        yield Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed, part)


_shape = lru_cache(maxsize=4096)(shape_of)

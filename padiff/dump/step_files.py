"""Writing of dumps and unpacked steps: JSON trees, and one file per tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.deduplication import Deduplication
from padiff.dump.files import write_npy
from padiff.dump.format import (
    FOLDERS,
    SCHEMA_VERSION,
    SKETCHES_FILE,
    evaluations_to_json,
    loop_layer,
    record_to_json,
    tree_to_json,
)
from padiff.dump.medium import write_json
from padiff.dump.rank_dedup import RankDedup
from padiff.dump.storage import Storage
from padiff.dump.traces import NOWHERE, Place, trace_to_json
from padiff.records import LOOP, PARAMETER_STAGES, Record, RunInfo, Sketched, Step, TensorSource
from padiff.records.parts import SHARD
from padiff.records.regions import regions_to_json
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
            traced: list[Place] = []
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

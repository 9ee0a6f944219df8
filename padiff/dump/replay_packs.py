"""Packs: the weights, optimizer states, batches, masks and seeds to replay a recorded step.

::

    packs/00000500/rank_0/
      pack.safetensors    all tensors
      pack.json           their descriptions

Tensors are named after their role: ``weight:encoder.0/bias``, ``optimizer.0:encoder.0/bias:first_moment``,
``batch.0:2``, ``mask:17``, ``seed:numpy``. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from padiff.dump.format import PACKS, step_folder
from padiff.dump.headers import Place
from padiff.dump.json_files import Explained, read_json
from padiff.dump.medium import check_inside, medium_of, size_of, write_json
from padiff.dump.names import rank_names
from padiff.dump.pack import PackedTensor, opened, plain_array
from padiff.dump.rank_dedup import REPLAY_FILE, RankDedup, elsewhere
from padiff.dump.remote_path import AnyPath
from padiff.dump.safetensors import ArrayFile, write_safetensors
from padiff.dump.untrusted import as_int, plain, shape_of
from padiff.errors import RunFolderError
from padiff.records import TensorSource
from padiff.records.pack import Batch, Drawn, Mask, Pack, Unkept
from padiff.records.parameter_states import OptimizerState

TENSORS_FILE = REPLAY_FILE
PACK_FILE = "pack.json"
SCHEMA_VERSION = 1

_NAME = re.compile(r"\d{8,}")
_DEEPEST = 16
# Bytes of a tensor's entries in the header and in the JSON file.
_PER_TENSOR = 700


# -- writing -------------------------------------------------------------------------------------------------------


def write_pack(folder: AnyPath, pack: Pack, once: RankDedup | None = None) -> None:
    """Write a rank's pack into an existing folder.

    Args:
        once: deduplication between ranks: tensors that another rank has written are left out.
    """
    tensors: dict[str, np.ndarray] = {}

    entries: dict[Hashable, dict[str, Any]] = {}

    def put(name: str, source: TensorSource) -> dict[str, Any]:
        entry = entries.get(source.identity)
        if entry is None:
            array = source.read()
            tensors[name] = plain_array(array)
            entry = {"tensor": name, "dtype": array.dtype.name, "shape": list(array.shape)}
            entries[source.identity] = entry
        return entry

    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "step": pack.step,
        "rank": pack.rank,
        "framework": {"name": pack.framework, "version": pack.framework_version},
        "loss_scale": pack.loss_scale,
        "weights": [
            {"layer": layer, "slot": slot, **put(f"weight:{layer}/{slot}", source)}
            for (layer, slot), source in pack.weights.items()
        ],
        "optimizers": [optimizer.plain() for optimizer in pack.optimizers],
        "batches": [_batch_to_json(number, batch, put) for number, batch in enumerate(pack.batches)],
        "masks": [
            {
                "layer": mask.layer,
                "batch": mask.batch,
                "function": mask.function,
                "rate": mask.rate,
                "of": list(mask.shape),
                **put(f"mask:{number}", mask.bits),
            }
            for number, mask in enumerate(pack.masks)
        ],
        "unseen": [{"layer": drawn.layer, "what": drawn.what} for drawn in pack.unseen],
        "seeds": {name: put(f"seed:{name}", source) for name, source in pack.seeds.items()},
        "notes": list(pack.notes),
    }
    for number, optimizer in enumerate(pack.optimizers):
        for name, values in optimizer.arrays().items():
            array, name = np.asarray(values), f"optimizer.{number}:{name}"
            tensors[name] = plain_array(array)
            if array.dtype.kind == "c":
                content.setdefault("complex", []).append(name)
    if once is not None:
        tensors = {name: array for name, array in tensors.items() if not once.elsewhere(name, array)}
        once.write(folder)
    write_safetensors(folder / TENSORS_FILE, tensors, {"schema_version": str(SCHEMA_VERSION)})
    write_json(folder / PACK_FILE, content)


def room_of(pack: Pack) -> int:
    """Return the size of a pack on disk in bytes, estimated on the high side."""
    entries = len(pack.weights) + len(pack.masks) + sum(1 for batch in pack.batches for _ in batch.sources)
    entries += sum(len(optimizer.arrays()) for optimizer in pack.optimizers)
    return pack.nbytes + _PER_TENSOR * (entries + 8)


def _batch_to_json(number: int, batch: Batch, put: Any) -> dict[str, Any]:
    names = iter(range(1 << 30))

    def nested(value: Any) -> Any:
        if isinstance(value, TensorSource):
            return put(f"batch.{number}:{next(names)}", value)
        if isinstance(value, Mapping):
            return {"dict": [[str(key), nested(inner)] for key, inner in value.items()]}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [nested(inner) for inner in value]}
        if isinstance(value, Unkept):
            return {"unkept": value.kind}
        if isinstance(value, float) and not math.isfinite(value):
            return {"number": repr(value)}  # JSON has no infinity or NaN
        return {"value": value}

    parts = {name: nested(getattr(batch, name)) for name in ("args", "kwargs", "labels", "whole")}
    return {**parts, "seen": batch.seen}


# -- reading -------------------------------------------------------------------------------------------------------


class Packs(Mapping[int, Pack]):
    """The packs of a run's first rank by step number; each is read on access.

    Args:
        run: the run folder.
    """

    def __init__(self, run: AnyPath) -> None:
        self._run = run
        self._recent: deque[ArrayFile] = deque()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(int(name) for name in self._names() if _NAME.fullmatch(name)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, step: object) -> bool:
        return step in list(self)

    def __getitem__(self, step: int) -> Pack:
        """Return a step's pack.

        Raises:
            KeyError: the step has no pack.
            RunFolderError: the pack is damaged.
        """
        return self.ranks(step)[0]

    def ranks(self, step: int) -> list[Pack]:
        """Return a step's packs of all ranks.

        Raises:
            KeyError: the step has no pack.
            RunFolderError: a pack is damaged.
        """
        if step not in self:
            raise KeyError(step)
        folder = self._run / PACKS / step_folder(step)
        names = rank_names(medium_of(folder).entries(folder))
        if not names:
            raise RunFolderError(f"{folder} holds no rank_N folder: the pack is damaged. Record it again")
        return [self._read(folder / name) for name in names]

    def size(self, step: int) -> int:
        """Return the size of a step's pack in bytes."""
        folder = self._run / PACKS / step_folder(step)
        return size_of(folder)

    def __repr__(self) -> str:
        return f"<Packs of {self._run}: steps {list(self)}>"

    def _names(self) -> list[str]:
        try:
            return medium_of(self._run).entries(self._run / PACKS)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise RunFolderError(f"{self._run / PACKS} must not be read by this user ({error.strerror})") from error

    def _read(self, folder: AnyPath) -> Pack:
        path = folder / PACK_FILE
        content = read_json(path, self._run, SCHEMA_VERSION, "copy the whole run folder, or record the step again")
        places = self._places(folder)
        others = elsewhere(folder)
        with Explained(path):
            other_places = {where: self._places(where) for where in {where for where, _ in others.values()}}
            places |= {name: other_places[where][tensor] for name, (where, tensor) in others.items()}
            return _pack(content, _Tensors(places, frozenset(map(str, content.get("complex", ())))))

    def _places(self, folder: AnyPath) -> dict[str, tuple[ArrayFile, Place]]:
        """Return file and position of the tensors in a rank's file, by name."""
        file = opened(check_inside(folder / TENSORS_FILE, self._run), self._recent)
        return {name: (file, place) for name, place in file.header()[1].items()}


class _Tensors(Mapping[str, np.ndarray]):
    """The tensors of a pack, in the rank's file or in another rank's.

    Args:
        places: file and position of each tensor.
        pairs: names of complex tensors of optimizers, which are stored as pairs of real numbers.
    """

    def __init__(self, places: Mapping[str, tuple[ArrayFile, Place]], pairs: frozenset[str]) -> None:
        self._places, self._pairs = places, pairs

    def source(self, entry: Mapping[str, Any]) -> PackedTensor:
        """Return the source of the tensor that a JSON entry describes.

        Raises:
            ValueError: the stored tensor has another dtype or shape.
        """
        (file, place), dtype, shape = self._places[entry["tensor"]], str(entry["dtype"]), shape_of(entry["shape"])
        source = PackedTensor(file, place, dtype, shape, place.dtype)
        stored = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        if place.shape != source.stored_shape or place.dtype.name != stored:
            raise ValueError(f"{entry['tensor']!r} is {place.dtype} {place.shape}, but {dtype} {shape} was recorded")
        return source

    def __getitem__(self, name: str) -> np.ndarray:
        file, place = self._places[name]
        array = file.array(place)
        if name not in self._pairs:
            return array
        return np.ascontiguousarray(array).view(np.result_type(array.dtype, np.complex64)).reshape(array.shape[:-1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Below(Mapping[str, np.ndarray]):
    """The tensors whose names begin with a prefix, by name without the prefix."""

    def __init__(self, tensors: _Tensors, prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[f"{self._prefix}{name}"]

    def __iter__(self) -> Iterator[str]:
        return (n.removeprefix(self._prefix) for n in self._tensors if n.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _pack(content: Mapping[str, Any], tensors: _Tensors) -> Pack:
    scale = float(content.get("loss_scale", 1.0))
    if not 0 < scale < math.inf:
        raise ValueError(f"a loss scale of {scale}")
    return Pack(
        step=as_int(content["step"]),
        rank=as_int(content.get("rank", 0)),
        framework=str(content["framework"]["name"]),
        framework_version=str(content["framework"]["version"]),
        loss_scale=scale,
        weights={(str(e["layer"]), str(e["slot"])): tensors.source(e) for e in content["weights"]},
        optimizers=tuple(
            OptimizerState.from_plain(each, _Below(tensors, f"optimizer.{number}:"))
            for number, each in enumerate(content["optimizers"])
        ),
        batches=tuple(_batch(each, tensors) for each in content["batches"]),
        masks=tuple(_mask(each, tensors) for each in content["masks"]),
        unseen=tuple(Drawn(str(e["layer"]), str(e["what"])) for e in content.get("unseen", ())),
        seeds={str(name): tensors.source(e) for name, e in content.get("seeds", {}).items()},
        notes=tuple(str(note) for note in content.get("notes", ())),
    )


def _mask(entry: Mapping[str, Any], tensors: _Tensors) -> Mask:
    shape, bits, rate = shape_of(entry["of"]), tensors.source(entry), float(entry["rate"])
    if bits.dtype != "uint8" or bits.shape != (math.ceil(math.prod(shape) / 8),) or not 0 <= rate <= 1:
        raise ValueError(f"a mask of {bits.dtype} {bits.shape}, at a rate of {rate}, for {shape}")
    return Mask(str(entry["layer"]), as_int(entry["batch"]), str(entry["function"]), rate, shape, bits)


def _batch(entry: Mapping[str, Any], tensors: _Tensors) -> Batch:
    args, kwargs, labels = (_nested(entry[name], tensors) for name in ("args", "kwargs", "labels"))
    if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not isinstance(labels, (tuple, type(None))):
        raise ValueError("a batch of another form")
    return Batch(args, kwargs, labels, _nested(entry.get("whole", {"value": None}), tensors), bool(entry["seen"]))


def _nested(entry: Any, tensors: _Tensors, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"values nested more than {_DEEPEST} deep")
    if "tensor" in entry:
        return tensors.source(entry)
    if "dict" in entry:
        return {str(key): _nested(inner, tensors, depth + 1) for key, inner in entry["dict"]}
    if "tuple" in entry or "list" in entry:
        kind = tuple if "tuple" in entry else list
        return kind(_nested(inner, tensors, depth + 1) for inner in entry["tuple" if kind is tuple else "list"])
    if "unkept" in entry:
        return Unkept(str(entry["unkept"]))
    if "number" in entry:
        return float(entry["number"])
    value = plain(entry["value"])
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise ValueError(f"{json.dumps(value)[:80]} is no plain value")
    return value

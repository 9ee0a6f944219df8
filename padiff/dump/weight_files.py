"""Files of weights, of packs to replay a step, and of measured floors, in the safetensors format; not trusted."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.deduplication import REPLAY_FILE, RankDedup, elsewhere
from padiff.dump.format import FLOORS, PACKS, RUN_FILE, STEPS, rank_names, step_folder
from padiff.dump.medium import Explained, check_inside, medium_of, read_json, read_text, size_of, write_json, write_part
from padiff.dump.pack import PackedTensor, opened, plain_array
from padiff.dump.safetensors import ArrayFile, Place, write_safetensors
from padiff.dump.store import AnyPath
from padiff.dump.untrusted import as_int, parse_json, plain, shape_of
from padiff.errors import RunFolderError, UsageError
from padiff.records import TensorSource
from padiff.records.recorded import Floor, Floors
from padiff.records.traces import Batch, Drawn, Mask, OptimizerState, Pack, Unkept
from padiff.system.terminal import first_few

_SUFFIX = ".safetensors"
_INDEX = re.compile(r".+\.safetensors\.index\.json")
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".pdparams", ".pdopt"})
# File names under which libraries save a model, the most usual first; a folder may hold other files beside it.
_MODELS = ("model", "diffusion_pytorch_model", "paddle_model", "pytorch_model")
#: The ``format`` entry of a file's metadata -> the framework's name.
FORMATS = {"pt": "torch", "pd": "paddle"}


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a file or folder of weights.

    Attributes:
        path: the file or folder.
        framework: the framework named in the files' metadata; empty: none, or several.
        tensors: tensors by dotted name, in the order of the files.
    """

    path: Path
    framework: str
    tensors: Mapping[str, TensorSource]


def holds_weights(path: Path) -> bool:
    """Return True if a path looks like files of weights, rather than a run folder."""
    if path.is_file():
        return True
    if not path.is_dir() or any((path / name).exists() for name in (RUN_FILE, STEPS, PACKS)):
        return False
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    return any(name.endswith(_SUFFIX) or _INDEX.fullmatch(name) or Path(name).suffix in _PICKLES for name in names)


def open_weights(path: Path) -> WeightFiles:
    """Open the weights of a safetensors file, or of a folder of such files.

    Raises:
        UsageError: the path is a pickle, or a folder that holds several models.
        RunFolderError: a file is missing or damaged.
    """
    files, index = ([path], None) if path.is_file() else _files(path)
    recent: deque[ArrayFile] = deque()
    tensors: dict[str, TensorSource] = {}
    formats: set[str] = set()
    for file in files:
        if file.suffix != _SUFFIX:
            raise _is_pickle(file)
        # A file named by the caller may be a link; a file of a folder must not lead out of it.
        opened = ArrayFile(check_inside(file, path) if path.is_dir() else file.resolve(), recent)
        about, places = opened.header()
        formats.add(FORMATS.get(about.get("format", ""), ""))
        for name, place in places.items():
            if index is not None and index.get(name) != file.name:
                continue
            tensors[name] = PackedTensor(opened, place, place.dtype.name, place.shape, place.dtype)
    missing = sorted(set(index or ()) - set(tensors))
    if missing:
        raise RunFolderError(
            f"{path}: the index names {first_few(missing, 1)}, which its files do not hold: copy the whole folder again"
        )
    if not tensors:
        raise RunFolderError(f"{path} holds no tensor")
    return WeightFiles(path, formats.pop() if len(formats) == 1 else "", tensors)


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the files of a folder, and its index: tensor name -> file name (`None` without an index)."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    indexes = _preferred([name for name in names if _INDEX.fullmatch(name)], ".safetensors.index.json")
    single = _preferred([name for name in names if name.endswith(_SUFFIX)], _SUFFIX)
    if len(indexes) == 1 and not (len(single) == 1 and Path(single[0]).stem in _MODELS):
        index = _index(folder / indexes[0])
        return [folder / name for name in dict.fromkeys(index.values())], index
    if len(single) == 1:
        return [folder / single[0]], None
    if single:
        raise UsageError(f"{folder} holds several files of weights ({', '.join(single[:4])}): give the path of one")
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    raise _is_pickle(folder / pickles[0])


def _preferred(names: list[str], ending: str) -> list[str]:
    """Return only the name that libraries use for a model if it is present, else all names."""
    usual = [f"{name}{ending}" for name in _MODELS if f"{name}{ending}" in names]
    return usual[:1] or names


def _index(path: Path) -> dict[str, str]:
    inside = check_inside(path, path.parent)
    try:
        content: Any = parse_json(read_text(inside))
        weight_map = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is damaged ({error!r}): copy it again") from error
    if any(Path(file).name != file for file in weight_map.values()):
        raise RunFolderError(f"{path} names files outside of its folder, which are not read")
    return weight_map


def _is_pickle(path: Path) -> UsageError:
    return UsageError(
        f"{path} is no safetensors file. A pickle (.bin, .pt, .pdparams) is not read, as reading it runs the code in "
        "it: load it where it comes from and save it with safetensors.torch.save_file or safetensors.paddle.save_file"
    )


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


FLOORS_FILE = "floors.json"
EXACT_FILE = "float64.safetensors"

_DTYPE = re.compile(r"[a-z]+\d+")


def write_floors(run: AnyPath, floors: Floors) -> None:
    """Write the floors of a step into a run folder; earlier floors of the step are replaced.

    Raises:
        OSError: the folder can't be written to.
    """
    (run / FLOORS).mkdir(exist_ok=True)

    def write(folder: AnyPath) -> None:
        arrays = {str(number): np.asarray(source.read()) for number, source in enumerate(floors.exact.values())}
        if arrays:
            write_safetensors(folder / EXACT_FILE, arrays, {"schema_version": str(SCHEMA_VERSION)})
        content = {
            "schema_version": SCHEMA_VERSION,
            "step": floors.step,
            "rank": floors.rank,
            "runs": floors.runs,
            "units": list(floors.units),
            "dtype": floors.dtype,
            "seed": floors.seed,
            "notes": list(floors.notes),
            "sites": [
                {"site": site, "error": floor.error, "norm": floor.norm, "size": floor.size}
                for site, floor in floors.sites.items()
            ],
            "float64": [
                {"site": site, "tensor": name, "shape": list(arrays[name].shape)}
                for site, name in zip(floors.exact, arrays)
            ],
        }
        write_json(folder / FLOORS_FILE, content)

    write_part(run / FLOORS / step_folder(floors.step), floors.rank, 1, write)


def read_floors(run: AnyPath, step: int) -> Floors | None:
    """Return the floors of a step of a run folder, or `None` if none were measured.

    Raises:
        RunFolderError: the files are damaged.
    """
    folder = run / FLOORS / step_folder(step) / "rank_0"
    path = folder / FLOORS_FILE
    if not path.exists():
        return None
    check_inside(folder, run)
    content = read_json(path, run, SCHEMA_VERSION, "measure the floors again")
    with Explained(path):
        return Floors(
            step=as_int(content["step"]),
            rank=as_int(content.get("rank", 0)),
            runs=as_int(content["runs"]),
            units=tuple(as_int(unit) for unit in content["units"]),
            dtype=_dtype(content["dtype"]),
            seed=as_int(content["seed"]),
            sites={str(each["site"]): _floor(each) for each in content["sites"]},
            exact=_exact(folder, run, content.get("float64", ())),
            notes=tuple(str(note) for note in content.get("notes", ())),
        )


def _dtype(name: Any) -> str:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype")
    return name


def _floor(entry: Mapping[str, Any]) -> Floor:
    error, norm = float(entry["error"]), float(entry["norm"])
    if not (0 <= error < math.inf and 0 <= norm < math.inf):
        raise ValueError(f"a floor of {error} for a norm of {norm}")
    return Floor(error, norm, as_int(entry["size"]))


def _exact(folder: AnyPath, run: AnyPath, entries: Any) -> dict[str, TensorSource]:
    if not entries:
        return {}
    file = opened(check_inside(folder / EXACT_FILE, run), deque())
    _, places = file.header()
    sources: dict[str, TensorSource] = {}
    for entry in entries:
        place = places[str(entry["tensor"])]
        if place.dtype != np.float64:
            raise ValueError(f"{entry['tensor']!r} is {place.dtype}, not float64")
        sources[str(entry["site"])] = PackedTensor(file, place, "float64", place.shape, place.dtype)
    return sources

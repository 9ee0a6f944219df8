"""The files of a run folder: names, JSON form of records, atomic writing."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from padiff.dump.untrusted import as_int, plain, shape_of
from padiff.errors import RunFolderError
from padiff.records import LOOP, ROOT, Evaluation, Layer, Parameter, Record
from padiff.records.sources import known_dtype

SCHEMA_VERSION = 1

RUN_FILE = "run.json"
FINISHED_FILE = "finished.json"
STEPS = "steps"
PACKS = "packs"
FLOORS = "floors"
REPORT_FILE = "report.json"
PARAMS_FILE = "params.json"
#: Sketches of the traced tensors that are not records; the file lies in the folder of the tensors.
SKETCHES_FILE = "sketches.npy"

#: By stage: the JSON file of its records, and the folder of their tensors.
FOLDERS = {
    "input": (REPORT_FILE, "tensors"),
    "forward": (REPORT_FILE, "tensors"),
    "loss": (REPORT_FILE, "tensors"),
    "backward": (REPORT_FILE, "tensors"),
    "weight": (PARAMS_FILE, "weights"),
    "grad": (PARAMS_FILE, "grads"),
    "update": (PARAMS_FILE, "updates"),
}

#: The same for ``dump_weights`` and ``dump_grads``. Their files differ from those of ``dump_params`` in one folder:
#: weights after the optimizer's step must not replace the weights before it.
ALONE = {"weight": ("weights.json", "weights_alone"), "grad": ("grads.json", "grads_alone")}

_FOREIGN = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def step_folder(number: int) -> str:
    """Return the name of a step's folder under ``steps/``."""
    return f"{number:08d}"


def to_storable(array: np.ndarray) -> np.ndarray:
    """Return the array in a dtype that numpy can store: a view as unsigned integers for bfloat16 and float8."""
    if array.dtype.name in _FOREIGN:
        return array.view(f"u{array.dtype.itemsize}")
    return array


def from_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Undo `to_storable`: view a stored array as the dtype of this name."""
    foreign = _FOREIGN.get(dtype)
    return array.view(foreign) if foreign is not None and array.dtype.kind == "u" else array


@lru_cache(maxsize=64)
def stored_dtype(dtype: str) -> np.dtype[Any] | None:
    """Return the numpy dtype in which values of the named dtype are stored, or `None` if the name is unknown."""
    foreign = _FOREIGN.get(dtype)
    try:
        stored = np.dtype(dtype if foreign is None else f"u{np.dtype(foreign).itemsize}")
    except TypeError:
        return None
    return stored if stored.kind in "biufc" else None


def fits_stored(array: np.ndarray, dtype: str) -> bool:
    """Return True unless the array stores bfloat16 or float8 as unsigned integers of a wrong width."""
    foreign = _FOREIGN.get(dtype)
    return foreign is None or array.dtype.kind != "u" or array.dtype.itemsize == np.dtype(foreign).itemsize


def tree_to_json(layers: Iterable[Layer], records: Mapping[str, list[dict[str, Any]]] | None = None) -> dict[str, Any]:
    """Return the layer tree as nested objects; ``records`` (by layer path) are added to the nodes of their layers."""
    root: dict[str, Any] | None = None
    above: list[dict[str, Any]] = []
    for layer in layers:
        node = _layer_to_json(layer)
        if records is not None:
            node["records"] = records.get(layer.path, [])
        # A shared layer counts as a child of each of its parents but stands in the tree once.
        while above and not _is_child(layer.path, above[-1]["path"]):
            above.pop()
        if above:
            above[-1].setdefault("layers", []).append(node)
        elif root is None:
            root = node
        else:
            raise ValueError(f"{layer.path} is not below {root['path']}")
        above.append(node)
    if root is None:
        raise ValueError("a tree has at least one layer")
    return root


def _is_child(path: str, above: str) -> bool:
    return above == ROOT or path.startswith(f"{above}.")


def tree_from_json(tree: Any) -> Iterator[tuple[Layer, list[dict[str, Any]]]]:
    """Yield each layer of `tree_to_json`'s tree with its records, depth first."""
    for node in nodes_from_json(tree):
        yield _layer_from_json(node), list(node.get("records", ()))


def nodes_from_json(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON nodes of `tree_to_json`'s tree, depth first."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.get("layers", ())))


def _layer_to_json(layer: Layer) -> dict[str, Any]:
    out: dict[str, Any] = {"path": layer.path, "type": layer.type, "kind": layer.kind}
    if layer.parameters:
        out["parameters"] = [
            {
                "slot": p.slot,
                # A tuple, not a list: the garbage collector would track a list, and with it this dictionary.
                "shape": p.shape,
                "dtype": p.dtype,
                "role": p.role,
                "trainable": p.trainable,
                **({"layout": p.layout} if p.layout else {}),
                **({"tied_to": p.tied_to} if p.tied_to else {}),
            }
            for p in layer.parameters
        ]
    if layer.settings:
        out["settings"] = dict(layer.settings)
    if layer.aliases:
        out["aliases"] = list(layer.aliases)
    if layer.children:
        out["children"] = layer.children
    if not layer.recorded:
        out["recorded"] = False
    return out


def _layer_from_json(node: Mapping[str, Any]) -> Layer:
    return Layer(
        path=str(node["path"]),
        type=str(node["type"]),
        kind=str(node["kind"]),
        parameters=tuple(
            Parameter(
                slot=str(p["slot"]),
                shape=shape_of(p["shape"]),
                dtype=known_dtype(p["dtype"], f"{node['path']}/{p['slot']}"),
                role=str(p.get("role", "parameter")),
                layout=str(p.get("layout", "")),
                trainable=bool(p.get("trainable", True)),
                tied_to=str(p.get("tied_to", "")),
            )
            for p in node.get("parameters", ())
        ),
        settings=dict(plain(node.get("settings", {}))),
        aliases=tuple(str(a) for a in node.get("aliases", ())),
        children=as_int(node.get("children", 0)),
        recorded=bool(node.get("recorded", True)),
    )


def record_to_json(record: Record, file: str) -> dict[str, Any]:
    """Return the JSON entry of a record whose tensor lies in ``file``."""
    return {
        "stage": record.stage,
        "slot": record.slot,
        "call": record.call,
        "order": record.order,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "file": file,
        **({"recomputed": True} if record.recomputed else {}),
        **({"part": record.part.to_json()} if record.part is not None else {}),
    }


def evaluations_to_json(evaluations: Iterable[Evaluation]) -> list[dict[str, Any]]:
    """Return the JSON entries of a step's calls in evaluation mode."""
    return [
        {"layer": each.layer, "mode": "eval", "calls": each.calls, "shapes": [list(shape) for shape in each.shapes]}
        for each in evaluations
    ]


def evaluations_from_json(entries: Iterable[Any]) -> tuple[Evaluation, ...]:
    """Undo `evaluations_to_json`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: an entry is malformed.
    """
    return tuple(
        [
            Evaluation(str(each["layer"]), as_int(each["calls"]), tuple([shape_of(shape) for shape in each["shapes"]]))
            for each in entries
        ]
    )


def loop_layer() -> dict[str, Any]:
    """Return the node that holds the scalars of the whole step (loss, learning rates), beside the layer tree."""
    return {"path": LOOP, "type": "", "kind": ""}


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside the given one; rename it to that path at the end, or remove it on error."""
    # The process id alone is not unique: ranks in one process or in containers write shared files at the same time.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write one tensor as ``.npy``, not atomically: the folder around the file is renamed once it is complete."""
    array = to_storable(array)
    array = np.ascontiguousarray(array).reshape(array.shape)  # `ascontiguousarray` turns a scalar into shape (1,)
    # Not np.save(path): it buffers through a Python file; unbuffered, the array's memory goes out in one write.
    with open(path, "wb", buffering=0) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        write_all(file, bytes_of(array))


def write_all(file: Any, data: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered file, whose `write` may accept only a part at a time."""
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the array's bytes in C order, without a copy if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest(array: np.ndarray, size: int = 8) -> str:
    """Return a hex digest that is equal for arrays of the same bits, dtype and shape.

    Args:
        size: size of the digest, in bytes.
    """
    content = blake2b(bytes_of(array), digest_size=size)
    content.update(repr((array.dtype.name, array.shape)).encode())
    return content.hexdigest()


# Run folders that a message names when the requested folder is missing.
_NAMED = 5


def neighbours_of(path: Path) -> str:
    """Return a sentence that names the run folders beside a missing path, the most similar first; may be empty."""
    try:
        runs = [entry.name for entry in path.parent.iterdir() if (entry / RUN_FILE).is_file()]
    except OSError:
        return ""
    if not runs:
        return ""
    close = difflib.get_close_matches(path.name, runs, n=_NAMED, cutoff=0.0)
    more = ", ..." if len(runs) > len(close) else ""
    return f". In {path.parent} there are the run folders {', '.join(close)}{more}"


def names_of(folder: Path) -> list[str]:
    """Return the names of a folder's entries; an empty list if the folder does not exist.

    Raises:
        RunFolderError: this user has no permission to read the folder, or the path is a file.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise RunFolderError(f"{folder} is a file; expected a folder: the run is damaged. Copy it again") from None
    except PermissionError as error:
        raise RunFolderError(
            f"{folder} must not be read by this user ({error.strerror}). Allow it (chmod -R +rX), or copy the run"
        ) from error


def ranks_of(folder: Path) -> list[Path]:
    """Return the folders of the ranks in a step's folder, by rank.

    Raises:
        RunFolderError: see `names_of`.
    """
    return [folder / name for name in rank_names(names_of(folder))]


def rank_names(names: Iterable[str]) -> list[str]:
    """Return those names that are folders of ranks (``rank_N``), sorted by rank."""
    return sorted((n for n in names if n.startswith("rank_") and n[5:].isdecimal()), key=lambda name: int(name[5:]))

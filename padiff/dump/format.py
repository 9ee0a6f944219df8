"""The file names of a run folder, and the JSON form of layer trees, records and evaluations.

::

    run.json                      schema version, framework, the layer tree, how it was recorded
    finished.json                 present once no further step will come
    steps/00000010/rank_0/
      report.json  tensors/*.npy                           input, forward, loss, backward (and learning rates)
      params.json  weights/*.npy grads/*.npy updates/*.npy weight, grad, update
packs/00000010/rank_0/        weights, batches and masks to replay a step (`padiff.dump.replay_packs`)
floors/00000010/rank_0/       the measured rounding error of a step (`padiff.dump.floor_files`)

``report.json`` and ``params.json`` each hold the layer tree, with the records of every layer at its node. Paths
of ``.npy`` files are relative to the JSON file. A dtype that numpy does not know (bfloat16) is stored as an
unsigned integer of the same width; the JSON names the true dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from padiff.dump.untrusted import as_int, plain, shape_of
from padiff.records import LOOP, ROOT, Evaluation, Layer, Parameter, Record
from padiff.records.dtypes import known_dtype

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

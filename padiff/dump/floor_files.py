"""Files of floors: the measured rounding error of each tensor of a step, and the step's tensors in float64.

::

    floors/00000500/rank_0/
      floors.json             how the floors were measured, and the floor of each tensor
      float64.safetensors     the tensors in float64, if the step was run in float64
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from padiff.dump.format import FLOORS, step_folder
from padiff.dump.json_files import Explained, read_json
from padiff.dump.medium import check_inside, write_json, write_part
from padiff.dump.pack import PackedTensor, opened
from padiff.dump.remote_path import AnyPath
from padiff.dump.safetensors import write_safetensors
from padiff.dump.untrusted import as_int
from padiff.records import TensorSource
from padiff.records.floors import Floor, Floors

FLOORS_FILE = "floors.json"
EXACT_FILE = "float64.safetensors"
SCHEMA_VERSION = 1

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

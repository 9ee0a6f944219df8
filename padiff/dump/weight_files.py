"""Weights in safetensors files, as model libraries save them: one file, or several with an index; not trusted.

A folder holds ``model.safetensors``, or ``model.safetensors.index.json`` whose ``weight_map`` maps tensor names to the
files beside it, or one other file ``*.safetensors``. Pickles are never read, as reading one can run any code.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padiff.dump.format import PACKS, RUN_FILE, STEPS
from padiff.dump.medium import check_inside, read_text
from padiff.dump.pack import PackedTensor
from padiff.dump.safetensors import ArrayFile
from padiff.dump.untrusted import parse_json
from padiff.errors import RunFolderError, UsageError
from padiff.records import TensorSource
from padiff.system.naming import first_few

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

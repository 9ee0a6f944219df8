"""Weights in safetensors files, as model libraries save them: one file, or several with an index. Nothing is trusted.

A folder holds ``model.safetensors``, or ``model.safetensors.index.json`` whose ``weight_map`` says which tensor lies in
which of the files beside it, or one other file ``*.safetensors``. Pickles are never read: to read one is to run what is
in it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padiff.dump.format import PACKS, RUN_FILE, STEPS
from padiff.dump.pack import PackedTensor
from padiff.dump.safetensors import ArrayFile
from padiff.dump.untrusted import check_inside, parse_json, read_text
from padiff.errors import RunFolderError, UsageError
from padiff.records import TensorSource
from padiff.system.naming import first_few

_SUFFIX = ".safetensors"
_INDEX = re.compile(r".+\.safetensors\.index\.json")
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".pdparams", ".pdopt"})
# The names under which libraries save a model, the most usual first; a folder may hold others beside it.
_MODELS = ("model", "diffusion_pytorch_model", "paddle_model", "pytorch_model")
#: The file's word for its framework -> the framework's name.
FORMATS = {"pt": "torch", "pd": "paddle"}


@dataclass(frozen=True)
class WeightFiles:
    """Tensors by their names.

    Attributes:
        path: the file, or the folder.
        framework: what the files say that they are of; empty: nothing.
        tensors: by dotted names, as the files order them.
    """

    path: Path
    framework: str
    tensors: Mapping[str, TensorSource]


def holds_weights(path: Path) -> bool:
    """Whether a path looks like weights in files, rather than a run folder."""
    if path.is_file():
        return True
    if not path.is_dir() or any((path / name).exists() for name in (RUN_FILE, STEPS, PACKS)):
        return False
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    return any(name.endswith(_SUFFIX) or _INDEX.fullmatch(name) or Path(name).suffix in _PICKLES for name in names)


def open_weights(path: Path) -> WeightFiles:
    """The weights of a safetensors file, or of a folder with them.

    Raises:
        UsageError: it is a pickle, or a folder that holds several models.
        RunFolderError: a file is missing or damaged.
    """
    files, wanted = ([path], None) if path.is_file() else _files(path)
    recent: deque[ArrayFile] = deque()
    found: dict[str, TensorSource] = {}
    formats: set[str] = set()
    for file in files:
        if file.suffix != _SUFFIX:
            raise _is_pickle(file)
        # A file that the caller names may be a link; one of a folder leads nowhere else.
        opened = ArrayFile(check_inside(file, path) if path.is_dir() else file.resolve(), recent)
        about, places = opened.header()
        formats.add(FORMATS.get(about.get("format", ""), ""))
        for name, place in places.items():
            if wanted is not None and wanted.get(name) != file.name:
                continue
            found[name] = PackedTensor(opened, place, place.dtype.name, place.shape, place.dtype)
    missing = sorted(set(wanted or ()) - set(found))
    if missing:
        raise RunFolderError(
            f"{path}: the index names {first_few(missing, 1)}, which its files do not hold: copy the whole folder again"
        )
    if not found:
        raise RunFolderError(f"{path} holds no tensor")
    return WeightFiles(path, formats.pop() if len(formats) == 1 else "", found)


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a folder, and which tensor is to be taken from which."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    indexes = _preferred([name for name in names if _INDEX.fullmatch(name)], ".safetensors.index.json")
    single = _preferred([name for name in names if name.endswith(_SUFFIX)], _SUFFIX)
    if len(indexes) == 1 and not (len(single) == 1 and Path(single[0]).stem in _MODELS):
        wanted = _index(folder / indexes[0])
        return [folder / name for name in dict.fromkeys(wanted.values())], wanted
    if len(single) == 1:
        return [folder / single[0]], None
    if single:
        raise UsageError(f"{folder} holds several files of weights ({', '.join(single[:4])}): give the path of one")
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    raise _is_pickle(folder / pickles[0])


def _preferred(names: list[str], ending: str) -> list[str]:
    """The one that is called as a model's is, else all of them."""
    usual = [f"{name}{ending}" for name in _MODELS if f"{name}{ending}" in names]
    return usual[:1] or names


def _index(path: Path) -> dict[str, str]:
    inside = check_inside(path, path.parent)
    try:
        content: Any = parse_json(read_text(inside))
        wanted = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is damaged ({error!r}): copy it again") from error
    if any(Path(file).name != file for file in wanted.values()):
        raise RunFolderError(f"{path} names files outside of its folder, which are not read")
    return wanted


def _is_pickle(path: Path) -> UsageError:
    return UsageError(
        f"{path} is no safetensors file. A pickle (.bin, .pt, .pdparams) is not read, as reading it runs the code in "
        "it: load it where it comes from and save it with safetensors.torch.save_file or safetensors.paddle.save_file"
    )

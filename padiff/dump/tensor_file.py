"""Tensors in ``.npy`` files, which are read on demand and not trusted."""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from padiff.dump.format import fits_stored, from_stored, stored_dtype
from padiff.dump.safetensors import shared
from padiff.dump.store import AnyPath, as_local, as_remote, local_only
from padiff.dump.untrusted import NO_LINK, open_plain, read_into
from padiff.errors import TensorFileError
from padiff.records import TensorSource
from padiff.system.process import check_free, new_memory

# Length in bytes of the header that numpy writes, except for arrays of many axes.
_USUAL = 128

# Arrays up to this size in bytes are read without checking the file's size first. Chosen: allocating this much in vain
# does no harm.
_LITTLE = 1 << 20


def read_plain(folder: str, file: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the array in ``folder/file``, or `None` if the file needs the full checks.

    That is so if the array has another dtype or shape, the file is not a regular one below the folder, or the path has
    a link.
    """
    descriptor = _opened(folder, file)
    if descriptor is None:
        return None
    count = math.prod(shape)
    size = count * dtype.itemsize
    head = np.empty(_USUAL, np.uint8)
    try:
        # Allocate only what the file can hold; for small arrays the check is not worth it.
        if size > _LITTLE:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _USUAL + size:
                return None
        memory = new_memory(size)
        read_into(descriptor, 0, head, memory)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if _header(head.tobytes()) != (dtype, shape, False, count):
        return None
    return memory.view(dtype).reshape(shape)


def _opened(folder: str, file: str) -> int | None:
    """Return a descriptor of ``folder/file``; `None` if the path leaves the folder, has a link or can't be opened."""
    folders = _folders(file)
    if folders is None:
        return None
    try:
        for inner in folders:
            if not stat.S_ISDIR(os.lstat(folder + inner).st_mode):
                return None
        return os.open(f"{folder}/{file}", NO_LINK)
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1 << 16)
def _folders(file: str) -> tuple[str, ...] | None:
    """Return the relative paths of a file's parent folders, outermost first; `None` if the path may lead elsewhere."""
    parts = file.split("/")
    if "\\" in file or not {"", ".", ".."}.isdisjoint(parts) or not hasattr(os, "O_NOFOLLOW"):
        return None
    return tuple(accumulate(f"/{part}" for part in parts[:-1]))


@lru_cache(maxsize=1024)
def _header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int] | None:
    """Return dtype, shape, order and number of elements of a header; cached, as most files of a run share a few."""
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return None
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # a malicious header can raise nearly any error
        return None
    if dtype.kind not in "biufc" or stream.tell() != len(data) or min(shape, default=0) < 0:
        return None
    return dtype, shape, fortran_order, math.prod(shape)


@dataclass(frozen=True, slots=True)
class TensorFile(TensorSource):
    """A tensor source: one ``.npy`` file, read on demand.

    Attributes:
        folder: the folder that the file must not leave.
        file: path of the file in it.
        dtype, shape: dtype and shape of the recorded tensor.
        site: name of the tensor in messages.
    """

    folder: AnyPath
    file: str
    dtype: str
    shape: tuple[int, ...]
    site: str

    @property
    def refetchable(self) -> bool:
        return True

    @property
    def identity(self) -> Hashable:
        return self.folder, self.file

    def read(self) -> np.ndarray:
        """Return the tensor.

        Raises:
            TensorFileError: the file is missing, truncated, pickled, outside of the folder, not of the recorded shape
                or dtype, or too large for the free memory.
        """
        stored = stored_dtype(self.dtype)
        folder = as_local(self.folder)
        if stored is not None and folder is not None:
            array = read_plain(str(folder), self.file, stored, self.shape)
            if array is not None:  # dtype and shape are checked
                return from_stored(array, self.dtype)
        array = self._read_thoroughly()
        if array.shape != self.shape:
            raise self._other(array.shape)
        if array.dtype.kind not in "biufc" or not fits_stored(array, self.dtype):
            raise self._error(f"holds {array.dtype}, but {self.dtype} was recorded", "the file was changed")
        return from_stored(array, self.dtype)

    def _read_thoroughly(self) -> np.ndarray:
        remote = as_remote(self.folder)
        path = self._inside(local_only(self.folder)) if remote is None else Path()

        def read() -> Any:
            with open_plain(path) if remote is None else io.BytesIO(shared.read(remote / self.file)) as file:
                shape = _check_header(file)
                if shape is not None and shape != self.shape:
                    raise self._other(shape)
                return np.load(file, allow_pickle=False)

        return self._loaded(read)

    def _loaded(self, read: Callable[[], Any]) -> np.ndarray:
        try:
            array = read()
        except FileNotFoundError:
            raise self._error("is missing", "copy the whole run folder, or record the run again") from None
        except TensorFileError:
            raise
        except Exception as error:  # a malicious header can raise nearly any error, MemoryError too
            if "pickle" in str(error).lower():
                raise self._error("holds pickled objects, which are never loaded", "record the run again") from error
            raise self._error(f"is damaged ({error})", "copy it again from where it was recorded") from error
        if not isinstance(array, np.ndarray):
            array.close()  # an .npz archive with the name of an .npy file
            raise self._other(type(array).__name__)
        return array

    def _inside(self, folder: Path) -> Path:
        if "\\" in self.file or PurePosixPath(self.file).is_absolute() or ".." in PurePosixPath(self.file).parts:
            raise self._error("leaves the run folder, and is not read", "do not use this run folder")
        path = folder / self.file
        root = folder.resolve()
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a null byte
            raise self._error(f"cannot be a path ({error})", "do not use this run folder") from error
        if root not in resolved.parents:
            raise self._error("leaves the run folder by a link, and is not read", "do not use this run folder")
        return resolved

    def _other(self, shape: object) -> TensorFileError:
        return self._error(f"has shape {shape}, but {self.shape} was recorded", "the file was changed")

    def _error(self, what: str, remedy: str) -> TensorFileError:
        return TensorFileError(f"{self.folder / self.file} (the tensor of {self.site}) {what}: {remedy}")


def _check_header(file: BinaryIO) -> tuple[int, ...] | None:
    """Return the shape of the array in an open ``.npy`` file, before its memory is allocated; `None` for other files.

    Raises:
        ValueError: the header is damaged, the file is shorter than the array, or the array exceeds the free memory.
    """
    start = file.read(12)
    file.seek(0)
    if start[:6] != b"\x93NUMPY":
        return None
    # For the later formats, numpy checks the claimed length of the header only after reading it.
    if start[6:7] > b"\x01" and int.from_bytes(start[8:], "little") > 1 << 20:
        raise ValueError("a header of that length is no tensor's")
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError("pickled objects")
    begin = file.tell()
    if size > file.seek(0, os.SEEK_END) - begin:
        raise ValueError("the file was cut off")
    check_free(size)
    file.seek(0)
    return shape

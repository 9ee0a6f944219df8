"""Atomic writing of files, and the bytes of arrays as files hold them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.format import to_storable


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

"""Writing files so that they are whole or absent, and the bytes of arrays as they go into them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.format import to_storable
from padiff.dump.remote_path import AnyPath, RemotePath


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """What to call a file while it is written; it gets its name at the end, and is removed if that is not reached."""
    # Not named by process alone: ranks in one process, or in containers, write what they share at the same time.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_text(path: AnyPath, text: str) -> None:
    """Write a text that is never seen half-written."""
    if isinstance(path, RemotePath):
        path.write_bytes(text.encode())
        return
    with aside(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: AnyPath, content: Any) -> None:
    """Write JSON that is never seen half-written."""
    write_text(path, json.dumps(content))


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write one tensor as ``.npy``, under its name at once: the folder around it is what is whole or absent."""
    array = to_storable(array)
    array = np.ascontiguousarray(array).reshape(array.shape)  # which makes a scalar a list of one
    # Not np.save(path): it buffers through a Python file; unbuffered, the array's memory goes out in one write.
    with open(path, "wb", buffering=0) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        write_all(file, bytes_of(array))


def write_all(file: Any, data: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take a part only at a time."""
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def bytes_of(array: np.ndarray) -> memoryview:
    """The array's bytes in the order of its elements, not copied where they lie like that."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest(array: np.ndarray, size: int = 8) -> str:
    """Equal for arrays that are the same to the bit, of one dtype and shape.

    Args:
        size: of the digest, in bytes.
    """
    content = blake2b(bytes_of(array), digest_size=size)
    content.update(repr((array.dtype.name, array.shape)).encode())
    return content.hexdigest()

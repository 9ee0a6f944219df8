"""Spools: files into which a step's tensors are written while they are recorded, without a copy in memory.

With a copy in memory first, tensors would be copied twice, and the kernel would have to clear memory for a whole step
page by page.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.files import bytes_of
from padiff.records import RunInfo, Storable, StreamedArray

#: Size in bytes of the smallest tensor that is written at once. Chosen: for smaller ones, a copy in memory takes less
#: time than a system call.
LEAST = 1 << 15
# Size in bytes of the sparse file while it is written; only written bytes take up space.
_MOST = 1 << 36
# Alignment of tensors in bytes, enough for each dtype.
_WIDE = 8
_PAGE = 4096
# Estimates, on the high side: header bytes per tensor, tensors per layer, tensors per parameter.
_PER_TENSOR, _OF_LAYER, _OF_PARAMETER = 100, 4, 3


class PreallocatedFiles:
    """Factory of the spools of one run's steps.

    Args:
        folder: a folder on the file system of the run.
        info: the run; its layers give an estimate of the header's size.

    Attributes:
        begin: bytes reserved for a file's header.
        useful: False once spools do not work: the system has none, or tensors are copied that are not stored, which
            would leave holes in the file.
    """

    def __init__(self, folder: Path, info: RunInfo) -> None:
        tensors = sum(_OF_LAYER + _OF_PARAMETER * len(layer.parameters) for layer in info.layers)
        self.begin = _PAGE
        self.reserve(_PER_TENSOR * tensors)
        self.useful = hasattr(os, "O_TMPFILE")
        self._folder = folder

    def reserve(self, header: int) -> None:
        """Reserve room for headers up to a quarter longer than this many bytes."""
        self.begin = max(self.begin, -(-(header + header // 4) // _PAGE) * _PAGE)

    def next(self) -> Spool | None:
        """Return a spool for a step, or `None` if the file system has no unnamed files."""
        if self.useful:
            try:
                return Spool(self._folder, self)
            except (OSError, ValueError, OverflowError):
                self.useful = False
        return None


class SpoolOfStep:
    """The spool of one step, created with the first tensor."""

    def __init__(self, run: PreallocatedFiles) -> None:
        self._run = run
        self._spool: Spool | None = None
        self._lock = threading.Lock()

    def keep(self, array: Storable) -> np.ndarray | None:
        """Write an array and return the written copy, or `None`; see `Spool.keep`."""
        with self._lock:
            if self._spool is None and self._run.useful:
                self._spool = self._run.next()
        return None if self._spool is None else self._spool.keep(array)


class Spool:
    """A file of one step that has no name until it is complete: if the process ends before, the kernel deletes it.

    Written tensors are arrays on a memory mapping of the file. That is safe: no other process can truncate a file
    without a name, and later only holders of the step read from the mapping.

    Attributes:
        begin, end: offset of the first tensor, and of the next one.
    """

    def __init__(self, folder: Path, run: PreallocatedFiles) -> None:
        self._descriptor = -1
        self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._descriptor, _MOST)
        self._map = mmap.mmap(self._descriptor, _MOST, mmap.MAP_SHARED, mmap.PROT_READ)
        self._address = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        self._run = run
        self.begin = self.end = run.begin
        self._starts: set[int] = set()
        self._lock = threading.Lock()

    def keep(self, array: Storable) -> np.ndarray | None:
        """Write an array, and return an array on the file's memory mapping.

        Return `None` if the array is too small or not contiguous, or the file or disk is full.
        """
        size, in_order = array.nbytes, isinstance(array, StreamedArray) or array.flags.c_contiguous
        if size < LEAST or size % _WIDE or not in_order:
            return None
        with self._lock:
            start = self.end
            if start + size > _MOST:
                return None
            self.end += size
            self._starts.add(start)
        place = start
        try:
            for piece in array.pieces() if isinstance(array, StreamedArray) else (array,):
                _write(self._descriptor, piece, place)
                place += piece.nbytes
        except OSError:  # for example a full disk, which is reported when the step is written
            return None
        view: np.ndarray = np.asarray(_Kept(self, start, self._address + start, size))
        return view.view(array.dtype).reshape(array.shape)

    def seal(self, path: Path, header: bytes, kept: Collection[int], more: Iterable[np.ndarray]) -> bool:
        """Write the header and the remaining tensors, and give the file its name.

        Args:
            path: the name.
            header: the JSON text of the header.
            kept: offsets of the stored tensors that were written before.
            more: tensors that were not written before.

        Returns:
            False if the file can't be used: it has unused tensors, the header is too long, or a link is impossible.

        Raises:
            OSError: a write failed, for example as the disk is full.
        """
        self._run.reserve(8 + len(header))
        if {*kept} != self._starts:
            self._run.useful = False
            return False
        if 8 + len(header) > self.begin:  # room for it is reserved from the next step on
            return False
        for array in more:
            _write(self._descriptor, array, self.end)
            self.end += array.nbytes
        os.ftruncate(self._descriptor, self.end)
        text = header.ljust(self.begin - 8)
        _write(self._descriptor, np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8), 0)
        try:
            numbers = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.link(str(self._descriptor), path, src_dir_fd=numbers, follow_symlinks=True)
            finally:
                os.close(numbers)
        except OSError:  # for example a container without /proc
            self._run.useful = False
            return False
        return True

    def start_of(self, array: Storable) -> int | None:
        """Return the offset of an array that `keep` returned, or `None` for other arrays."""
        tensor = _kept(array)
        if tensor is None or tensor.spool is not self or not isinstance(array, np.ndarray):
            return None
        begins = array.__array_interface__["data"][0] == tensor.address
        return tensor.start if begins and array.nbytes == tensor.size and array.flags.c_contiguous else None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class _Kept:
    """Memory of one written tensor, as the base of its arrays. No ndarray, as numpy replaces a view by its own base."""

    __slots__ = ("__array_interface__", "address", "size", "spool", "start")

    def __init__(self, spool: Spool, start: int, address: int, size: int) -> None:
        self.spool, self.start, self.address, self.size = spool, start, address, size
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "data": (address, True), "shape": (size,)}


def spool_of(arrays: Iterable[Storable]) -> Spool | None:
    """Return the spool that some of these arrays were written into, or `None`."""
    return next((tensor.spool for tensor in map(_kept, arrays) if tensor is not None), None)


def _kept(array: Storable) -> _Kept | None:
    """Return the written tensor that an array is a view of, or `None`."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, _Kept) else None


def _write(descriptor: int, array: np.ndarray, start: int) -> None:
    data = bytes_of(array)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)

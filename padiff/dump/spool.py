"""Tensors of a step go into its file while they are recorded: one copy, and no memory that would have to be found.

Copied into memory first, and from there into the file, a step's tensors go through the processor's memory twice; and
memory for a whole step is cleared by the kernel, page by page, before it is filled.
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
from padiff.records import RunInfo, Storable, Unread

#: Bytes of the smallest tensor that goes into the file at once. Chosen: below, a copy in memory takes less than a call
#: of the kernel does.
LEAST = 1 << 15
# Bytes that a file may have while it is written: it takes up only those that there are.
_MOST = 1 << 36
# What the starts of tensors are multiples of: wide enough for each dtype.
_WIDE = 8
_PAGE = 4096
# Bytes of a header for each tensor, and records of each layer and of each parameter: more than most have.
_PER_TENSOR, _OF_LAYER, _OF_PARAMETER = 100, 4, 3


class Spools:
    """The files that the steps of one run are recorded into.

    Args:
        folder: where they get their names, later.
        info: the run.

    Attributes:
        begin: bytes that are left for a file's header.
        useful: whether steps are to go on being recorded like that. Not where tensors are copied that are not stored
            after all: a file must have no holes.
    """

    def __init__(self, folder: Path, info: RunInfo) -> None:
        tensors = sum(_OF_LAYER + _OF_PARAMETER * len(layer.parameters) for layer in info.layers)
        self.begin = _PAGE
        self.leave(_PER_TENSOR * tensors)
        self.useful = hasattr(os, "O_TMPFILE")
        self._folder = folder

    def leave(self, header: int) -> None:
        """Leave room for headers somewhat longer than this."""
        self.begin = max(self.begin, -(-(header + header // 4) // _PAGE) * _PAGE)

    def next(self) -> Spool | None:
        """A file for a step; `None` where the file system has none without a name."""
        if self.useful:
            try:
                return Spool(self._folder, self)
            except (OSError, ValueError, OverflowError):
                self.useful = False
        return None


class SpoolOfStep:
    """A step's file, which comes to be with the first tensor that goes into it."""

    def __init__(self, run: Spools) -> None:
        self._run = run
        self._spool: Spool | None = None
        self._lock = threading.Lock()

    def keep(self, array: Storable) -> np.ndarray | None:
        """`Spool.keep`."""
        with self._lock:
            if self._spool is None and self._run.useful:
                self._spool = self._run.next()
        return None if self._spool is None else self._spool.keep(array)


class Spool:
    """A file of one step, which has no name until it is whole: whatever becomes of the process, nothing of it stays.

    What was written is seen as arrays, through a mapping: nobody else can make a file without a name shorter. Later,
    when it has one, only those who still hold the step read from there.

    Attributes:
        begin, end: where tensors begin in the file, and where the next one is to begin.
    """

    def __init__(self, folder: Path, run: Spools) -> None:
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
        """Write an array, and give what was written; `None`: it is too small, does not lie in order, or there is no
        room for it.
        """
        size, in_order = array.nbytes, isinstance(array, Unread) or array.flags.c_contiguous
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
            for piece in array.pieces() if isinstance(array, Unread) else (array,):
                _write(self._descriptor, piece, place)
                place += piece.nbytes
        except OSError:  # the disk is full, say: writing the step says so
            return None
        view: np.ndarray = np.asarray(_Kept(self, start, self._address + start, size))
        return view.view(array.dtype).reshape(array.shape)

    def finish(self, path: Path, header: bytes, kept: Collection[int], more: Iterable[np.ndarray]) -> bool:
        """Write the header and more tensors, and give the file its name. False: the file can't be used.

        Args:
            header: the JSON text.
            kept: where those begin that were written before.

        Raises:
            OSError: the disk is full, say.
        """
        self._run.leave(8 + len(header))
        if {*kept} != self._starts:
            self._run.useful = False
            return False
        if 8 + len(header) > self.begin:  # next time there will be room
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
        except OSError:  # a container without that folder, say
            self._run.useful = False
            return False
        return True

    def start_of(self, array: Storable) -> int | None:
        """Where an array begins that was written before; `None` of others."""
        kept = _kept(array)
        if kept is None or kept.spool is not self or not isinstance(array, np.ndarray):
            return None
        begins = array.__array_interface__["data"][0] == kept.address
        return kept.start if begins and array.nbytes == kept.size and array.flags.c_contiguous else None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class _Kept:
    """What was written of one tensor. It is no array: numpy looks through an array that is a view to what is below."""

    __slots__ = ("__array_interface__", "address", "size", "spool", "start")

    def __init__(self, spool: Spool, start: int, address: int, size: int) -> None:
        self.spool, self.start, self.address, self.size = spool, start, address, size
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "data": (address, True), "shape": (size,)}


def spool_of(arrays: Iterable[Storable]) -> Spool | None:
    """The file that some of these were written into before."""
    return next((kept.spool for kept in map(_kept, arrays) if kept is not None), None)


def _kept(array: Storable) -> _Kept | None:
    """What was written of the tensor that an array is a view of, if anything was."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, _Kept) else None


def _write(descriptor: int, array: np.ndarray, start: int) -> None:
    data = bytes_of(array)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)

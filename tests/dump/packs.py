"""Packed runs of a few tensors, and the files that they lie in."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from kit.records import info, plain, record, root, step, toy_info, toy_steps, write_run

from padiff.dump import open_run
from padiff.dump.pack import PACK_FILE
from padiff.dump.storage import Storage
from padiff.dump.stored_schema import STRUCTURES

PACKED, UNPACKED = Storage(pack=True), Storage()
LAYERS = (root(1), plain("fc", "linear"))
STORAGES = {
    "plain": PACKED,
    "zlib": Storage(pack=True, compression="zlib"),
    "zstd": Storage(pack=True, compression="zstd"),
}
REAL = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in f"bool {REAL} complex64 complex128".split()}


def values_of(name, shape, seed=0):
    data = np.random.default_rng(seed).normal(size=shape) * 10
    if name.startswith("complex"):
        data = data + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    if name.startswith("u"):
        data = np.abs(data)
    return np.asarray(data).astype(DTYPES[name])


def of_shapes(numbers, rank=0):
    """Steps whose tensors have another shape each."""
    return [
        step(n, [record("fc", "forward", "output.0", values_of("float32", (n + 1, 3), n))], rank=rank) for n in numbers
    ]


def bits(array):
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def written(folder, *records, storage=PACKED, layers=LAYERS):
    return write_run(folder, info(*layers), [step(0, records)], storage=storage)


def toy(folder, numbers=(0, 1, 2), storage=UNPACKED, **rest):
    return write_run(folder, toy_info(rest.get("paddle", False)), toy_steps(numbers, **rest), storage=storage)


def read_back(folder, number=0):
    (found,) = open_run(folder).steps(number)
    return found.records


def all_values(run):
    return [
        (r.site, r.order, bits(r.value)) for number in run.numbers() for one in run.steps(number) for r in one.records
    ]


def pack_of(folder, number=0):
    return folder / f"steps/{number:08d}/rank_0" / PACK_FILE


def structure_of(folder):
    (path,) = (folder / STRUCTURES).iterdir()
    return path

"""Small tensors of a packed step that are read together are what each is by itself."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kit.records import record

from padiff.dump import pack as module
from padiff.dump.pack import table_of
from padiff.dump.storage import Storage, compressed

from .packs import PACKED, read_back, values_of, written


def sources_of(tmp_path, arrays, storage=PACKED):
    records = [record("fc", "forward", f"output.{k}", array) for k, array in enumerate(arrays)]
    return [found.source for found in read_back(written(tmp_path, *records, storage=storage))]


@pytest.fixture
def reads(monkeypatch):
    """The bytes of each read of a tensor, or of several."""
    sizes, read = [], module.ArrayFile.array
    monkeypatch.setattr(
        module.ArrayFile, "array", lambda self, place, *rest: sizes.append(place.size) or read(self, place, *rest)
    )
    return sizes


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "bool"])
@pytest.mark.parametrize("others", [(), (3,), (50, 7)], ids=str)
def test_a_table_has_a_tensor_in_each_row(tmp_path, reads, dtype, others):
    arrays = [values_of(dtype, (4, 5)) if k % 2 else values_of("float32", others) for k in range(40)]
    sources = sources_of(tmp_path, arrays)[1::2][::-1]
    table = table_of(sources)
    assert len(reads) == 1 and table.dtype == dtype
    assert [row.tobytes() for row in table] == [source.read().tobytes() for source in sources]
    table[:] = 0  # it is a copy
    assert sources[0].read().any()


def test_one_row_is_enough(tmp_path):
    (source,) = sources_of(tmp_path, [values_of("float32", (7,))])
    np.testing.assert_array_equal(table_of([source]), source.read()[None])


def test_what_lies_far_apart_is_read_by_itself(tmp_path, reads):
    arrays = [values_of("float32", (8,) if k % 2 else (300, 300)) for k in range(8)]
    assert table_of(sources_of(tmp_path, arrays)[1::2]) is None and not reads


@pytest.mark.parametrize("storage", [Storage(pack=True, compression="zlib")], ids=["compressed"])
def test_what_is_compressed_is_read_by_itself(tmp_path, storage):
    assert table_of(sources_of(tmp_path, [values_of("float32", (8,))] * 2, storage)) is None


def test_what_is_complex_or_in_several_files_or_of_several_dtypes_is_read_by_itself(tmp_path):
    assert table_of(sources_of(tmp_path / "c", [values_of("complex64", (8,))])) is None
    one, other = (sources_of(tmp_path / name, [values_of("float32", (8,))])[0] for name in "ab")
    assert table_of([one, other]) is None
    assert table_of(sources_of(tmp_path / "d", [values_of("float32", (8,)), values_of("int32", (8,))])) is None


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_what_cannot_be_read_is_left_to_say_so_by_itself(tmp_path, change):
    sources = sources_of(tmp_path, [values_of("float32", (300,)) for _ in range(300)])
    path = sources[0].file.path
    sources[0].file.close()
    if change == "cut":
        os.truncate(path, path.stat().st_size - 1300)
    else:
        path.unlink()
    assert table_of(sources) is None


def test_compressed_bytes_are_not_taken_for_the_tensor_that_they_are_as_long_as(tmp_path):
    rng = np.random.default_rng(0)
    noise = (np.concatenate([rng.integers(0, 256, k, np.uint8), np.zeros(60 - k, np.uint8)]) for k in range(60))
    array = next(a for a in noise if compressed(a, "zlib").size == a.size)
    for compression in ("zlib", ""):
        storage, folder = Storage(pack=True, compression=compression), tmp_path / f"run-{compression}"
        read = read_back(written(folder, record("fc", "forward", "output.0", array), storage=storage))
        assert (read[0].value == array).all()

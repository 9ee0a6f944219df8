"""Files that were made to fill the memory, or to be waited for."""

import os
import resource
import subprocess
import sys
import zlib

import numpy as np
import pytest

from padiff.dump import storage
from padiff.dump.medium import read_text
from padiff.dump.untrusted import open_plain
from padiff.system import process

CODECS = ["zlib", pytest.param("zstd", marks=pytest.mark.skipif("not have_zstd()"))]


def have_zstd():
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "float16"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (4001, 3)])
def test_what_was_compressed_comes_back(codec, dtype, shape, monkeypatch):
    monkeypatch.setattr(storage, "_BLOCK", 1000)
    monkeypatch.setattr(storage, "_PART", 700)
    array = (np.random.default_rng(0).normal(size=shape) * 50).astype(dtype)
    packed = storage.compressed(array, codec)
    np.testing.assert_array_equal(storage.restored(packed, codec, array.dtype, array.shape), array, strict=True)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("claimed", "said"), [((99,), "more than 396 bytes, not 396"), ((101,), "to 400 bytes")])
def test_another_size_than_was_compressed_is_refused(codec, claimed, said):
    packed = storage.compressed(np.arange(100, dtype=np.float32), codec)
    if claimed == (101,):  # planes are read one by one: 400 bytes are three planes of 101, and a part of the fourth
        said = "it unpacks to 400 bytes, not 404"
    with pytest.raises(ValueError, match=said):
        storage.restored(packed, codec, np.dtype(np.float32), claimed)


def test_damaged_bytes_are_refused():
    packed = storage.compressed(np.arange(1000, dtype=np.float32), "zlib").copy()
    packed[20:40] = 7
    with pytest.raises(ValueError, match=r"it can't be unpacked|it unpacks to"):
        storage.restored(packed, "zlib", np.dtype(np.float32), (1000,))


def test_more_than_is_free_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(process, "available", lambda: 100_000_000)
    packed = np.frombuffer(zlib.compress(bytes(70_000_000)), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="has 70,000,000 bytes, with 100,000,000 of memory free"):
        storage.restored(packed, "zlib", np.dtype(np.uint8), (70_000_000,))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # kB


UNPACKING = """
import numpy as np, resource, zlib
from padiff.dump import storage as codecs
packed = np.frombuffer(zlib.compress(bytes(1 << 26)), np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codecs.restored(packed, "zlib", np.dtype(np.float32), (1 << 24,))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_unpacking_takes_little_more_than_the_tensor():
    took = int(subprocess.run([sys.executable, "-c", UNPACKING], capture_output=True, text=True, check=True).stdout)
    assert took < 1.3 * (1 << 16)  # kB; all planes at once took 3 times the tensor


def test_what_a_container_may_take_counts(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4096 kB\n")
    (tmp_path / "max").write_text("3000000\n")
    (tmp_path / "current").write_text("1000000\n")
    monkeypatch.setattr(process, "_SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(process, "_CONTAINER", (tmp_path / "max", tmp_path / "current"))
    assert process.available() == 2_000_000
    (tmp_path / "max").write_text("max\n")
    assert process.available() == 4096 * 1024
    (tmp_path / "meminfo").unlink()
    assert process.available() is None


@pytest.mark.timeout(20)
def test_what_was_opened_is_looked_at_and_not_what_had_the_name_before(tmp_path, monkeypatch):
    """A pipe that takes the file's name between a look and the opening would be waited for."""
    path = tmp_path / "run.json"
    path.write_text("{}")
    opened = os.open

    def swapped(name, *args, **kwargs):
        if os.fspath(name) == str(path) and not path.is_fifo():
            path.unlink()
            os.mkfifo(path)
        return opened(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapped)
    for read in (open_plain, read_text):
        with pytest.raises(ValueError, match="no plain file"):
            read(path)

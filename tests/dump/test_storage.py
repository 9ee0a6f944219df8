"""Codecs, and the options that say how a run is stored."""

from __future__ import annotations

import numpy as np
import pytest

from padiff.dump import storage
from padiff.dump.storage import Storage
from padiff.errors import UsageError


@pytest.mark.parametrize("name", storage.CODECS)
def test_never_more_is_unpacked_than_the_tensor_has(name):
    if name == "zstd":
        pytest.importorskip("zstandard")
    packed = storage.compressed(np.zeros(1 << 24, np.uint8), name)
    assert packed.nbytes < 1 << 18
    with pytest.raises(ValueError, match="more than 100 bytes"):
        storage.restored(packed, name, np.dtype(np.uint8), (100,))
    with pytest.raises(ValueError, match="unpack"):
        storage.restored(packed, name, np.dtype(np.float64), (1 << 24,))
    with pytest.raises(ValueError, match="unpack"):
        storage.restored(packed[: len(packed) // 2], name, np.dtype(np.uint8), (1 << 24,))
    with pytest.raises(ValueError, match="unpack"):
        storage.restored(np.frombuffer(b"nothing of this kind", np.uint8), name, np.dtype(np.uint8), (4,))


def test_unknown_and_missing_codecs(monkeypatch):
    with pytest.raises(UsageError, match=r"zlib, zstd.*'lz4'"):
        Storage(pack=True, compression="lz4")
    with pytest.raises(UsageError, match="pack=False"):
        Storage.from_options(False, "zlib", None, sketches=False)
    with pytest.raises(UsageError, match="pack=False"):
        Storage.from_options(False, "", None, sketches=True)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)  # as where it is not installed
    with pytest.raises(UsageError, match="pip install"):
        Storage(pack=True, compression="zstd")


@pytest.mark.parametrize("limit", [0, -1, True, "1G", float("nan")])
def test_a_limit_that_is_none(limit):
    with pytest.raises(UsageError, match="max_bytes"):
        Storage(max_bytes=limit)


def test_what_asks_for_packed_steps():
    assert Storage.from_options(None, "", None, sketches=True).pack
    assert Storage.from_options(None, "zlib", None, sketches=False).pack
    assert not Storage.from_options(None, "", None, sketches=False).pack
    assert Storage.from_options(True, "", None, sketches=False).pack

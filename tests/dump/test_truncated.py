"""Files that change under whoever has read from them: nobody's process ends, and what was read stays."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.records import info, plain, record, root, step, write_run

from padiff.dump.storage import Storage
from padiff.dump.tensor_file import TensorFile
from padiff.errors import TensorFileError
from padiff.system import process

# Larger than all that is read in another way for being small, and than the memory that measuring reads into.
COUNT = 5_000_000

READER = """
import os, sys
import numpy as np
from pathlib import Path
from padiff.dump import open_run
from padiff.errors import TensorFileError

run, file = Path(sys.argv[1]), Path(sys.argv[2])
(record,) = open_run(run).steps(0)[0].records
value = record.value
os.truncate(file, 4096)
assert float(np.sum(value, dtype=np.float64)) == 2.0 * value.size
try:
    record.value
except TensorFileError as error:
    print(error)
"""


@pytest.mark.parametrize("form", ["files", "packed", "compressed"])
def test_a_file_that_is_truncated_after_it_was_read_ends_no_process(form, tmp_path):
    storage = {"files": Storage(), "packed": Storage(pack=True), "compressed": Storage(pack=True, compression="zlib")}
    values = np.full(COUNT, 2, np.float32)
    run = write_run(
        tmp_path / "run",
        info(root(1), plain("fc", "linear")),
        [step(0, [record("fc", "forward", "output.0", values)])],
        storage=storage[form],
    )
    (file,) = [*run.glob("steps/*/rank_0/tensors/*.npy"), *run.glob("steps/*/rank_0/step.safetensors")]
    done = subprocess.run([sys.executable, "-c", READER, run, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # -7 is SIGBUS
    assert str(file) in done.stdout


@pytest.fixture
def claimed(tmp_path: Path) -> Path:
    """A file of a gigabyte of which all but the header is a hole."""
    path = tmp_path / "a.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 28,)})
        file.truncate(file.tell() + (1 << 30))
    return path


def peak_of(read) -> int:
    """By how many kilobytes the process grows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TensorFileError):
        read()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_file_larger_than_was_recorded_is_refused_before_memory_is_taken(claimed):
    source = TensorFile(claimed.parent, "a.npy", "float32", (16, 8), "fc/forward/output.0")
    with pytest.raises(TensorFileError, match=r"has shape \(268435456,\), but \(16, 8\) was recorded"):
        source.read()
    assert peak_of(source.read) < 10_000


def test_a_tensor_larger_than_the_memory_that_is_free_is_refused_before_it_is_taken(claimed, monkeypatch):
    monkeypatch.setattr(process, "available", lambda: 2 << 30)
    source = TensorFile(claimed.parent, "a.npy", "float32", (1 << 28,), "fc/forward/output.0")
    with pytest.raises(TensorFileError, match=r"1,073,741,824 bytes, with 2,147,483,648 of memory free"):
        source.read()
    assert peak_of(source.read) < 10_000


def test_a_header_that_claims_more_than_the_file_has(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((3000, 1000), np.float32))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(TensorFileError, match=r"is damaged \(the file was cut off\)"):
        TensorFile(tmp_path, "a.npy", "float32", (3000, 1000), "fc/forward/output.0").read()

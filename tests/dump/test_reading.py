"""Tensors of a run that are read without the full checks where these show nothing: the same values."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.dump.tensor_file import TensorFile
from padiff.errors import TensorFileError
from padiff.records import ROOT, InMemory, Layer, Record, RunInfo, Step

_RNG = np.random.default_rng(0)
_ARRAYS = {
    "float32": _RNG.normal(size=(7, 5)).astype(np.float32),
    "float64": _RNG.normal(size=11),
    "bfloat16": _RNG.normal(size=(3, 2)).astype(ml_dtypes.bfloat16),
    "complex64": (_RNG.normal(size=6) + 1j * _RNG.normal(size=6)).astype(np.complex64),
    "int64": np.array(-3),
    "bool": np.array([True, False]),
    "float16": np.zeros((0, 4), np.float16),
}


def _write(folder: Path, pack: bool, compression: str = "", steps: int = 1) -> Path:
    info = RunInfo("torch", "2", (Layer(ROOT, "Net", "net"),))
    writer = RunWriter(folder, info, storage=Storage(pack=pack, compression=compression))
    for number in range(steps):
        records = [
            Record(ROOT, "forward", f"output.{k}", InMemory(array), dtype, array.shape, order=k)
            for k, (dtype, array) in enumerate(_ARRAYS.items())
        ]
        writer.add_step(Step(number, tuple(records)))
    writer.close()
    return folder


def _fortran(path: Path) -> None:
    np.save(path, np.asfortranarray(_ARRAYS["float32"]))


def _other_shape(path: Path) -> None:
    np.save(path, _ARRAYS["float32"].reshape(5, 7))


def _other_dtype(path: Path) -> None:
    np.save(path, np.zeros((7, 5), np.int32))


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _headless(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def _gone(path: Path) -> None:
    path.unlink()


def _link_out(path: Path) -> None:
    outside = path.parents[3] / "outside.npy"
    path.rename(outside)
    path.symlink_to(outside)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [_fortran, _other_shape, _other_dtype, _cut_off, _headless, _gone, _link_out, _pipe],
    ids=lambda f: f.__name__,
)
def test_files_that_are_not_ordinary_are_read_or_refused_as_by_the_full_checks(tmp_path, damage, monkeypatch):
    folder = tmp_path / "runs" / "run" / "step"
    (folder / "tensors").mkdir(parents=True)
    source = TensorFile(folder, "tensors/a.npy", "float32", (7, 5), "a/forward/output.0")
    np.save(folder / "tensors/a.npy", _ARRAYS["float32"])
    assert source.read().tobytes() == _ARRAYS["float32"].tobytes()
    damage(folder / "tensors/a.npy")

    def outcome(read):
        try:
            return read().tolist()
        except TensorFileError as error:
            return str(error)

    quick = outcome(source.read)
    monkeypatch.setattr("padiff.dump.tensor_file.read_plain", lambda *_: None)
    assert quick == outcome(source.read)


def test_a_folder_that_a_link_leads_to_is_not_entered(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    np.save(tmp_path / "elsewhere" / "a.npy", _ARRAYS["float32"])
    (tmp_path / "run" / "tensors").symlink_to(tmp_path / "elsewhere")
    source = TensorFile(tmp_path / "run", "tensors/a.npy", "float32", (7, 5), "a/forward/output.0")
    with pytest.raises(TensorFileError, match="leaves the run folder by a link"):
        source.read()


def test_a_packed_step_that_is_cut_off_or_recorded_again_is_said_to_be(tmp_path):
    run = _write(tmp_path / "run", True)
    source = open_run(run).steps(0)[0].records[0].source
    (file,) = run.glob("steps/*/rank_0/step.safetensors")
    os.truncate(file, 300)
    with pytest.raises(TensorFileError, match="cut off"):
        source.read()
    # More steps than are held open: the first one is opened again.
    opened = open_run(_write(tmp_path / "again", True, steps=12))
    sources = [opened.steps(number)[0].records[0].source for number in range(12)]
    file = tmp_path / "again/steps/00000000/rank_0/step.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(TensorFileError, match="recorded again"):
        sources[0].read()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_few_files_are_open_however_many_steps_are_read(tmp_path):
    run = open_run(_write(tmp_path / "run", True, steps=30))
    before = len(os.listdir("/proc/self/fd"))
    kept = [run.steps(number)[0] for number in range(30)]
    for step in kept:
        for record in step.records:
            record.source.read()
    assert len(os.listdir("/proc/self/fd")) - before <= 16
    del kept, step, record, run
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_of_a_packed_tensor_opens_its_file_for_itself(tmp_path, copied):
    source = open_run(_write(tmp_path / "run", True)).steps(0)[0].records[0].source
    expected = source.read().copy()
    again = copied(source)
    np.testing.assert_array_equal(again.read(), expected)
    del again
    gc.collect()
    np.testing.assert_array_equal(source.read(), expected)

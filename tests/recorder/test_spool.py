"""Full tensors that are written into a packed step's file while the step is recorded."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import padiff
from padiff.dump import open_run
from padiff.dump.format import LEAST, PreallocatedFiles
from padiff.dump.safetensors import write_safetensors
from padiff.recorder.tensor_copy import Difference
from padiff.records import RunInfo, StreamedArray

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")

LARGE = LEAST // 4


@pytest.fixture
def spools(tmp_path):
    return PreallocatedFiles(tmp_path, RunInfo("torch", "2.0", ()))


def some(seed, size=LARGE, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def test_what_is_kept_is_in_the_file_with_what_comes_later(tmp_path, spools):
    spool = spools.next()
    given = {"0": some(0).reshape(64, -1), "1": some(1, LARGE, np.float64), "2": some(2, 3), "3": np.arange(5)}
    kept = {name: spool.keep(array.copy()) for name, array in given.items()}
    assert [name for name, array in kept.items() if array is None] == ["2", "3"]  # too small
    assert not os.listdir(tmp_path)  # whatever happens now
    mixed = {name: given[name] if array is None else array for name, array in kept.items()}
    for name, array in mixed.items():
        np.testing.assert_array_equal(array, given[name])
    write_safetensors(tmp_path / "a.safetensors", mixed, {"said": "yes"})
    found = load_file(tmp_path / "a.safetensors")
    assert {*found} == {*given}
    for name, array in given.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert spools.useful


def test_what_is_kept_does_not_follow_the_tensor_and_is_nobodys_to_change(spools):
    array = some(0)
    kept, expected = spools.next().keep(array), array.copy()
    array[:] = 0
    np.testing.assert_array_equal(kept, expected)
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


def test_what_does_not_lie_in_order_is_not_kept(spools):
    assert spools.next().keep(some(0, 4 * LARGE).reshape(2, -1).T) is None


def test_a_file_has_no_holes(tmp_path, spools):
    spool = spools.next()
    dropped, kept = spool.keep(some(0)), spool.keep(some(1))
    write_safetensors(tmp_path / "a.safetensors", {"0": kept}, {})
    assert (tmp_path / "a.safetensors").stat().st_size < 2 * dropped.nbytes
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["0"], some(1))
    assert not spools.useful and spools.next() is None


def test_a_header_that_is_longer_than_the_room_for_it(tmp_path, spools):
    about = {"long": "x" * 3 * spools.begin}
    for _ in range(2):
        spool = spools.next()
        write_safetensors(tmp_path / "a.safetensors", {"0": spool.keep(some(1))}, about)
        np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["0"], some(1))
        (tmp_path / "a.safetensors").unlink()
    assert spool.begin > len(about["long"])


def test_a_disk_that_is_full(spools, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    spool = spools.next()
    monkeypatch.setattr(os, "pwrite", full)
    assert spool.keep(some(0)) is None


@pytest.mark.parametrize("fails", ["open", "link"])
def test_a_file_system_that_has_no_files_without_a_name(tmp_path, monkeypatch, fails):
    real = getattr(os, fails)

    def refuse(path, *args, **options):
        if fails == "link" or args[0] & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, *args, **options)

    monkeypatch.setattr(os, fails, refuse)
    check_run(tmp_path, steps=2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_difference_is_worked_out_in_pieces(tmp_path, dtype):
    after, before = some(0, 200_001, dtype), some(1, 200_001, dtype)
    write_safetensors(tmp_path / "a.safetensors", {"0": Difference(after, before).to_store()}, {})
    expected = after.astype(np.float64) - before.astype(np.float64)
    np.testing.assert_allclose(load_file(tmp_path / "a.safetensors")["0"], expected, rtol=1e-6, atol=1e-9)


def test_a_difference_is_kept_in_pieces(tmp_path, spools):
    after, before = some(0, 200_000), some(1, 200_000)
    source = Difference(after, before)
    assert isinstance(source.to_store(), StreamedArray)
    kept = spools.next().keep(source.to_store())
    after[:] = 0  # what the optimizer makes of it next
    expected = some(0, 200_000).astype(np.float64) - before.astype(np.float64)
    np.testing.assert_array_equal(kept, expected.astype(np.float32))
    write_safetensors(tmp_path / "a.safetensors", {"0": replace(source, written=kept).to_store()}, {})
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["0"], expected.astype(np.float32))
    assert spools.useful


@pytest.mark.parametrize("pack", [True, False], ids=["in the loop", "on the writer's thread"])
def test_differences_that_are_no_numbers_raise_no_error(tmp_path, pack):
    model = torch.nn.Linear(128, 200)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model.weight[0, 0] = torch.inf
    recorder = padiff.record(model, tmp_path, optimizer=optimizer, detail="full", pack=pack)
    with np.errstate(all="raise"), recorder as rec:
        model(torch.randn(64, 128))[:, 1:].square().mean().backward()  # the infinite weight has a gradient of 0
        optimizer.step()
        rec.try_dump()
    (update,) = (r for r in open_run(tmp_path).steps(0)[0].records if (r.stage, r.slot) == ("update", "weight"))
    assert np.isnan(update.value[0, 0])


def check_run(folder, steps, times=1):
    """What a run that was recorded into a folder has is what one in memory has, to the bit."""
    found = []
    for place in (folder / "run", None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 200), torch.nn.ReLU(), torch.nn.Linear(200, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with padiff.record(model, place, optimizer=optimizer, detail="full", pack=place and True) as rec:
            for _ in range(steps):
                model(torch.randn(64, 128)).square().mean().backward()
                for _ in range(times):
                    optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
        found.append(rec.run if place is None else open_run(place))
    for number in range(steps):
        ours, expected = (run.steps(number)[0].records for run in found)
        assert [record.site for record in ours] == [record.site for record in expected]
        assert any(record.value.nbytes >= LEAST for record in expected)
        for one, other in zip(ours, expected):
            np.testing.assert_array_equal(one.value, other.value, str(one.site))
    return found[0]


@pytest.mark.parametrize("times", [1, 2], ids=["one step", "an optimizer that steps twice"])
def test_a_run_has_what_memory_keeps(tmp_path, times):
    check_run(tmp_path, 4, times)
    for path in (tmp_path / "run").glob("steps/*/rank_0/step.safetensors"):
        load_file(path)


def test_tensors_are_written_once(tmp_path, monkeypatch):
    written, real, loop = [], os.pwrite, threading.current_thread()
    late = []

    def count(descriptor, data, start):
        written.append(real(descriptor, data, start))
        if threading.current_thread() is not loop:
            late.append(written[-1])
        return written[-1]

    monkeypatch.setattr(os, "pwrite", count)
    run = check_run(tmp_path, 3)
    stored = sum(path.stat().st_size for path in run.path.glob("steps/*/rank_0/step.safetensors"))
    assert stored <= sum(written) < stored + LEAST  # the lock's file is written like that, too
    # The large ones are all written while the step goes on, what the optimizer did too.
    assert max(late) < LEAST

"""Memory that tensors are read into while they are measured."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from padiff.compare.measure import operands as module
from padiff.compare.measure.operands import Arrays, buffer_pool
from padiff.compare.measure.pairs import figures_of, measure_pair
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.records import ROOT, SAME, TRANSPOSED, UNSCALED, InMemory, Layer, Pair, Record, RunInfo, Step


def _run(folder, arrays, pack):
    writer = RunWriter(folder, RunInfo("torch", "2", (Layer(ROOT, "Net", "net"),)), storage=Storage(pack=pack))
    records = [
        Record(ROOT, "forward", f"output.{k}", InMemory(a), a.dtype.name, a.shape, order=k)
        for k, a in enumerate(arrays)
    ]
    writer.add_step(Step(0, tuple(records)))
    writer.close()
    return open_run(folder).steps(0)[0].records


@pytest.mark.parametrize("pack", [False, True], ids=["files", "packed"])
def test_pairs_that_are_read_into_one_room_have_the_figures_of_their_own_arrays(tmp_path, pack):
    rng = np.random.default_rng(0)
    shapes = [(300, 200), (40, 30), (200, 300), (5,), (300, 200)]
    given = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    others = [a + rng.normal(size=a.shape).astype(np.float32) for a in given]
    # The third one lies the other way round in the candidate.
    stored = [a.T.copy() if k == 2 else a for k, a in enumerate(others)]
    reference, candidate = _run(tmp_path / "a", given, pack), _run(tmp_path / "b", stored, pack)
    layouts = [TRANSPOSED if k == 2 else SAME for k in range(len(shapes))]
    diffs = [measure_pair(Pair(0, a, b, layout)) for a, b, layout in zip(reference, candidate, layouts)]
    for diff, a, b, layout, own in zip(diffs, given, others, layouts, stored):
        assert diff.figures == figures_of(Arrays(a, layout.apply(own, a.shape), UNSCALED))
        assert diff.figures.l2 == pytest.approx(float(np.linalg.norm((b.astype(float) - a).ravel())), rel=1e-7)


def test_a_room_is_used_again_and_grows_and_has_an_end(monkeypatch):
    monkeypatch.setattr(module, "_MOST_BUFFERS", 1 << 21)
    room = module._Buffers()
    first = room(1000, 0)
    assert first.size == 1000
    assert np.shares_memory(room(1 << 20, 0), first)
    larger = room((1 << 20) + 1, 0)
    assert larger.size == (1 << 20) + 1
    assert np.shares_memory(room(10, 0), larger)
    assert room(1 << 21, 0).size == 1 << 21
    assert room((1 << 21) + 1, 0) is None


@pytest.mark.parametrize("start", [0, 8, 128, 129, 3824, 4_000_264])
def test_memory_lies_a_little_behind_the_place_in_the_file_and_suits_all_dtypes(start):
    memory = module._Buffers()(1 << 20, start)
    address = memory.ctypes.data
    assert address % 16 == 0
    assert 256 < (address - start) % 4096 <= 272
    assert memory.size == 1 << 20


def test_each_side_of_each_thread_has_a_room_of_its_own():
    found = []
    threads = [threading.Thread(target=lambda: found.extend(room(64, 0) for room in buffer_pool())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found += [room(64, 0) for room in buffer_pool()]
    for k, one in enumerate(found):
        assert not any(np.shares_memory(one, other) for other in found[k + 1 :])

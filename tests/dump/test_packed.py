"""A step in one file: every dtype comes back, and others can read it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.records import info, plain, record, root, step, write_run

import padiff
from padiff.dump import open_run
from padiff.records import InMemory, Sketched
from padiff.sketches.sketch import sketch_of

from .packs import DTYPES, PACKED, STORAGES, bits, pack_of, read_back, values_of, written


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (5, 3), (70, 300)], ids=str)
def test_every_dtype_comes_back(tmp_path, storage, shape):
    given = {name: values_of(name, shape) for name in DTYPES}
    records = [record("fc", "forward", name, array) for name, array in given.items()]
    found = read_back(written(tmp_path, *records, storage=storage))
    assert [r.slot for r in found] == list(DTYPES)
    for back in found:
        assert back.dtype == back.slot
        assert bits(back.value) == bits(given[back.slot])


def test_layout_in_memory_does_not_matter(tmp_path, storage):
    base = values_of("float32", (40, 60))
    given = [base.T, base[::2, ::-1], np.broadcast_to(base[:1], (40, 60)), np.asfortranarray(base), base[:, 3]]
    records = [record("fc", "forward", f"output.{k}", array) for k, array in enumerate(given)]
    for back, array in zip(read_back(written(tmp_path, *records, storage=storage)), given):
        assert bits(back.value) == bits(np.ascontiguousarray(array))


def test_what_a_record_and_a_step_say_comes_back(tmp_path):
    given = step(
        7,
        [
            record(
                "fc", "forward", "output.0", values_of("float32", (2, 3)), call=2, layer_type="Linear", recomputed=True
            ),
            record("fc", "grad", "weight", values_of("bfloat16", (4,)), layer_type="Линейный"),
        ],
        rank=0,
        loss_scale=1024.5,
        micro_batches=3,
        notes=("one call in evaluation mode", "überdies"),
    )
    write_run(tmp_path, info(root(1), plain("fc", "linear")), [given], storage=PACKED)
    (found,) = open_run(tmp_path).steps(7)
    assert replace(found, records=()) == replace(given, records=())
    for back, one in zip(found.records, given.records):
        assert replace(back, source=one.source) == one


def test_sketches_come_back_between_full_tensors(tmp_path):
    matrix = values_of("float64", (90, 130))
    small, large = sketch_of(values_of("float32", (7,))), sketch_of(matrix, transposed=True)
    records = [
        replace(record("fc", "forward", "output.0", np.zeros(7)), source=Sketched(small.row(), 7)),
        record("fc", "forward", "output.1", matrix),
        replace(record("fc", "weight", "weight", matrix), source=Sketched(large.row(), matrix.size, True)),
    ]
    first, full, turned = read_back(written(tmp_path, *records))
    assert first.sketch.row().tobytes() == small.row().tobytes()
    assert (turned.sketch.transposed, turned.sketch.row().tobytes()) == (True, large.row().tobytes())
    assert full.sketch is None
    assert bits(full.value) == bits(matrix)
    with pytest.raises(padiff.errors.SketchOnlyError, match="detail='full'"):
        first.source.read()


def test_an_array_of_several_records_is_stored_once(tmp_path, storage):
    shared, equal = values_of("float32", (200, 100)), values_of("float32", (200, 100))
    source = InMemory(shared)
    records = [replace(record("fc", "forward", slot, shared), source=source) for slot in ("output.0", "output.1")] + [
        record("fc", "backward", "output.0", equal)
    ]
    once = written(tmp_path / "once", *records[:1], storage=storage)
    twice = written(tmp_path / "twice", *records[:2], storage=storage)
    thrice = written(tmp_path / "thrice", *records, storage=storage)
    sizes = [size_of_pack(folder) for folder in (once, twice, thrice)]
    assert sizes[1] < sizes[0] + 500
    assert sizes[2] > sizes[1] + 0.5 * (sizes[0] - 1000)  # equal values of another array are another tensor
    assert [bits(r.value) for r in read_back(thrice)] == [bits(shared)] * 3


def size_of_pack(folder):
    return pack_of(folder).stat().st_size


def test_compressed_is_smaller(tmp_path):
    rough = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
    zeros = np.where(rough > 0, rough, 0)
    sizes = [
        size_of_pack(written(tmp_path / name, record("fc", "forward", "output.0", zeros), storage=STORAGES[name]))
        for name in ("plain", "zlib")
    ]
    assert sizes[1] < 0.75 * sizes[0]
    assert sizes[0] == pytest.approx(zeros.nbytes, abs=1000)


def test_the_formats_own_library_reads_it(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    names = [name for name in DTYPES if "8" not in name or name in ("int8", "uint8")]
    given = {name: values_of(name, (3, 5)) for name in names if not name.startswith(("complex", "bfloat"))}
    folder = written(tmp_path, *(record("fc", "forward", name, array) for name, array in given.items()))
    loaded = library.load_file(pack_of(folder))
    assert {bits(array) for array in loaded.values()} == {bits(array) for array in given.values()}


def test_torch_reads_its_bfloat16(tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    values = values_of("bfloat16", (9, 4))
    complex_ones = values_of("complex64", (6, 5))
    folder = written(
        tmp_path, record("fc", "forward", "output.0", values), record("fc", "forward", "output.1", complex_ones)
    )
    loaded = library.load_file(pack_of(folder))
    assert loaded["0"].dtype == torch.bfloat16
    assert loaded["0"].float().numpy().tolist() == values.astype(np.float32).tolist()
    assert torch.view_as_complex(loaded["1"]).numpy().tolist() == complex_ones.tolist()

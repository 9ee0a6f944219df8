"""A step in one file: every dtype comes back, others can read it, and damage is told by the file's name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kit.records import info, linear, memory_run, plain, record, root, step, toy_info, toy_run, toy_steps, write_run

import padiff
from padiff.dump import RunWriter, codecs, open_run
from padiff.dump.pack import PACK_FILE
from padiff.dump.storage import Storage
from padiff.dump.structures import MOST, STRUCTURES
from padiff.errors import RunFolderError, TensorFileError, UsageError, WriterError
from padiff.records import InMemory, Sketched
from padiff.sketches.sketch import sketch_of

PACKED, UNPACKED = Storage(pack=True), Storage()
LAYERS = (root(1), plain("fc", "linear"))
STORAGES = {
    "plain": PACKED,
    "zlib": Storage(pack=True, compression="zlib"),
    "zstd": Storage(pack=True, compression="zstd"),
}

DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    ]
}


def test_a_packed_run_is_paired_as_the_same_run_in_memory_is(tmp_path):
    """One of its tensors lies in another layout there: what tells a tensor is not the file that it is in."""
    rng = np.random.default_rng(0)
    picture, other = rng.normal(size=(2, 3, 4, 4)), rng.normal(size=(2, 16, 3))

    def steps(last):
        picture_there = picture.transpose(0, 2, 3, 1) if last else picture
        seen = [("a", picture_there), ("b", other), ("c", other)]
        return [step(0, [record(layer, "forward", "output.0", values) for layer, values in seen])]

    layers = (root(3), *(plain(path, "relu") for path in "abc"))
    runs = [memory_run(info(*layers), *steps(last)) for last in (False, True)]
    folders = [write_run(tmp_path / f"{k}", info(*layers), steps(k), storage=PACKED) for k in (0, 1)]
    for report in (padiff.compare_runs(*runs), padiff.compare_runs(*folders)):
        assert report.passed and [str(d.pair.layout) for d in report.diffs] == ["axes 0,3,1,2", "", ""]


@pytest.fixture(params=STORAGES, ids=list(STORAGES))
def storage(request):
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    return STORAGES[request.param]


def values_of(name, shape, seed=0):
    data = np.random.default_rng(seed).normal(size=shape) * 10
    if name.startswith("complex"):
        data = data + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    if name.startswith("u"):
        data = np.abs(data)
    return np.asarray(data).astype(DTYPES[name])


def one_step(*records, number=0):
    return step(number, records)


def bits(array):
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def written(folder, *records, storage=PACKED, layers=LAYERS):
    return write_run(folder, info(*layers), [one_step(*records)], storage=storage)


def toy(folder, numbers=(0, 1, 2), storage=UNPACKED, **rest):
    return write_run(folder, toy_info(rest.get("paddle", False)), toy_steps(numbers, **rest), storage=storage)


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Runs of two steps by storage, to be copied before they are damaged."""
    return {
        name: toy(tmp_path_factory.mktemp(name) / "run", (0, 1), storage=STORAGES[name]) for name in ("plain", "zlib")
    }


def read_back(folder, number=0):
    (found,) = open_run(folder).steps(number)
    return found.records


# -- what comes back ---------------------------------------------------------------------------------------------------


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
    return (folder / "steps/00000000/rank_0" / PACK_FILE).stat().st_size


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
    loaded = library.load_file(folder / "steps/00000000/rank_0" / PACK_FILE)
    assert {bits(array) for array in loaded.values()} == {bits(array) for array in given.values()}


def test_torch_reads_its_bfloat16(tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    values = values_of("bfloat16", (9, 4))
    complex_ones = values_of("complex64", (6, 5))
    folder = written(
        tmp_path, record("fc", "forward", "output.0", values), record("fc", "forward", "output.1", complex_ones)
    )
    loaded = library.load_file(folder / "steps/00000000/rank_0" / PACK_FILE)
    assert loaded["0"].dtype == torch.bfloat16
    assert loaded["0"].float().numpy().tolist() == values.astype(np.float32).tolist()
    assert torch.view_as_complex(loaded["1"]).numpy().tolist() == complex_ones.tolist()


# -- folders -----------------------------------------------------------------------------------------------------------


def all_values(run):
    return [
        (r.site, r.order, bits(r.value)) for number in run.numbers() for one in run.steps(number) for r in one.records
    ]


def test_a_packed_run_is_the_same_run(tmp_path, storage):
    packed = open_run(toy(tmp_path / "packed", (0, 1, 4), storage=storage))
    plain_run = open_run(toy(tmp_path / "plain", (0, 1, 4)))
    assert packed.numbers() == [0, 1, 4]
    assert all_values(packed) == all_values(plain_run)
    assert padiff.compare_runs(plain_run, packed).coverage.complete
    assert len(list((tmp_path / "packed" / STRUCTURES).iterdir())) == 1
    assert not list((tmp_path / "packed").rglob("*.npy"))


def test_a_run_can_be_moved(tmp_path, storage):
    before = all_values(open_run(toy(tmp_path / "here", storage=storage)))
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert all_values(open_run(tmp_path / "there")) == before


def test_a_step_opened_alone(tmp_path):
    folder = toy(tmp_path / "torch", storage=PACKED)
    other = toy(tmp_path / "paddle", paddle=True, storage=PACKED)
    one = open_run(folder / "steps/00000001")
    assert one.numbers() == [1]
    report = padiff.compare_runs(folder / "steps/00000001", other / "steps/00000001")
    assert report.passed
    assert report.coverage.steps == (1,)
    assert padiff.check_report(
        str(folder / "steps/00000001/rank_0"), str(other / "steps/00000001/rank_0"), cfg={"atol": 1e-3}
    )


def test_a_step_taken_out_of_its_run_says_so(tmp_path):
    folder = toy(tmp_path / "torch", storage=PACKED)
    shutil.copytree(folder / "steps/00000001", tmp_path / "alone/deep/down/step")
    with pytest.raises(RunFolderError, match="in its run folder only"):
        open_run(tmp_path / "alone/deep/down/step")


def test_resume_replaces_and_adds(tmp_path, storage):
    folder = toy(tmp_path / "run", (0, 1), storage=storage)
    steps = toy_steps((1, 2), rate=0.3)
    write_run(folder, toy_info(), steps, storage=storage, existing="resume")
    found = open_run(folder)
    assert found.numbers() == [0, 1, 2]
    assert [bits(r.value) for r in found.steps(1)[0].records] == [bits(r.value) for r in steps[0].records]


def test_resume_may_store_otherwise(tmp_path):
    folder = toy(tmp_path / "run", (0,))
    write_run(folder, toy_info(), toy_steps((1,)), storage=STORAGES["zlib"], existing="resume")
    write_run(folder, toy_info(), toy_steps((2,)), storage=PACKED, existing="resume")
    assert all_values(open_run(folder)) == all_values(toy_run((0, 1, 2)))


def test_overwrite(tmp_path, storage):
    folder = toy(tmp_path / "run", (0, 1, 2), storage=storage)
    write_run(folder, toy_info(), toy_steps((5,)), storage=PACKED, existing="overwrite")
    assert open_run(folder).numbers() == [5]


def test_a_step_recorded_twice_is_an_error(tmp_path):
    writer = RunWriter(tmp_path / "run", toy_info(), storage=PACKED)
    (one,) = toy_steps((1,))
    writer.put(one)
    writer.flush()
    with pytest.raises(WriterError, match="step 1 stands in"):
        writer.put(one)
    writer.close()


def test_two_ranks(tmp_path):
    tree = toy_info(world_size=2)
    writers = [RunWriter(tmp_path / "run", tree, rank=0, storage=PACKED)]
    writers.append(RunWriter(tmp_path / "run", tree, rank=1, storage=PACKED, existing="resume"))
    for number in (0, 1):
        for rank, writer in enumerate(writers):
            (one,) = toy_steps((number,), rate=0.1 * (rank + 1))
            writer.put(replace(one, rank=rank))
            writer.flush()
            if not rank:
                assert open_run(tmp_path / "run").numbers() == list(range(number))  # not before all ranks are there
    for writer in reversed(writers):
        writer.close()
    for number in (0, 1):
        found = open_run(tmp_path / "run").steps(number)
        assert [one.rank for one in found] == [0, 1]
        for rank, one in enumerate(found):
            (expected,) = toy_steps((number,), rate=0.1 * (rank + 1))
            assert [bits(r.value) for r in one.records] == [bits(r.value) for r in expected.records]
    assert padiff.compare_runs(tmp_path / "run", tmp_path / "run").passed


def test_other_records_get_another_structure(tmp_path):
    one, two = toy_steps((0, 1))
    fewer = replace(two, records=two.records[:-1])
    folder = write_run(tmp_path, toy_info(), [one, fewer], storage=PACKED)
    assert len(list((folder / STRUCTURES).iterdir())) == 2
    assert [len(open_run(folder).steps(n)[0].records) for n in (0, 1)] == [len(one.records), len(two.records) - 1]


def of_shapes(numbers, rank=0):
    """Steps whose tensors have another shape each."""
    return [
        replace(one_step(record("fc", "forward", "output.0", values_of("float32", (n + 1, 3), n)), number=n), rank=rank)
        for n in numbers
    ]


def test_ever_other_structures_do_not_fill_the_folder(tmp_path, storage):
    steps = of_shapes(range(MOST + 10))
    folder = write_run(tmp_path, info(*LAYERS), steps, storage=storage)
    assert len(list((folder / STRUCTURES).iterdir())) == MOST
    for one in steps:
        (back,) = read_back(folder, one.number)
        assert bits(back.value) == bits(one.records[0].value)
        assert back.layer == "fc"


def test_a_structure_of_a_steps_own_is_used_again_after_resuming(tmp_path):
    count = MOST + 5
    folder = write_run(tmp_path, info(*LAYERS), of_shapes(range(count)), storage=PACKED)
    again = [replace(one, number=one.number + count) for one in of_shapes(range(count))]
    write_run(folder, info(*LAYERS), again, storage=STORAGES["zlib"], existing="resume")
    assert len(list((folder / STRUCTURES).iterdir())) == MOST
    for one in again:
        for number in (one.number - count, one.number):
            assert bits(read_back(folder, number)[0].value) == bits(one.records[0].value)


def test_each_of_two_ranks_may_have_structures_of_its_own(tmp_path):
    tree, count = info(*LAYERS, world_size=2), MOST + 5
    writers = [RunWriter(tmp_path / "run", tree, rank=0, storage=PACKED)]
    writers.append(RunWriter(tmp_path / "run", tree, rank=1, storage=PACKED, existing="resume"))
    given = [of_shapes(range(count)), [replace(s, number=s.number - 3) for s in of_shapes(range(3, count + 3), rank=1)]]
    for pair in zip(*given):
        for one, writer in zip(pair, writers):
            writer.put(one)
            writer.flush()
    for writer in reversed(writers):
        writer.close()
    assert len(list((tmp_path / "run" / STRUCTURES).iterdir())) == MOST
    for pair in zip(*given):
        found = open_run(tmp_path / "run").steps(pair[0].number)
        assert [bits(s.records[0].value) for s in found] == [bits(s.records[0].value) for s in pair]


# -- damage ------------------------------------------------------------------------------------------------------------


def pack_of(folder, number=0):
    return folder / f"steps/{number:08d}/rank_0" / PACK_FILE


def parts(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(path, header, body, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)


def edit(change):
    def damage(path):
        header, body = parts(path)
        put_together(path, change(header) or header, body)

    return damage


def tensor(**fields):
    return edit(lambda header: header["0"].update(fields))


def metadata(**fields):
    return edit(lambda header: header["__metadata__"].update(fields))


def cut(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "empty": cut(0),
    "seven bytes": cut(7),
    "within the header": cut(100),
    "within the tensors": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "header too long": lambda path: put_together(path, *parts(path), length=1 << 40),
    "header of no length": lambda path: put_together(path, b"", b""),
    "no json": lambda path: put_together(path, b"{" * 64, b""),
    "nested json": lambda path: put_together(path, b"[" * 200_000, b""),
    "no utf-8": lambda path: put_together(path, b"\xff\xfe" * 32, b""),
    "a list": edit(lambda header: [header]),
    "metadata is a text": edit(lambda header: {**header, "__metadata__": "text"}),
    "no metadata": edit(lambda header: header.pop("__metadata__") and header),
    "tensor gone": edit(lambda header: header.pop("0") and header),
    "entry is a number": edit(lambda header: {**header, "0": 3}),
    "beyond the end": edit(lambda header: header["0"]["data_offsets"].__setitem__(1, 1 << 50)),
    "before the beginning": tensor(data_offsets=[-256, 256]),
    "turned round": edit(lambda header: header["0"]["data_offsets"].reverse()),
    "offsets of no number": tensor(data_offsets=["a", "b"]),
    "one offset": tensor(data_offsets=[0]),
    "offset infinite": edit(lambda header: header["0"]["data_offsets"].__setitem__(1, float("inf"))),
    "larger shape": tensor(shape=[1000, 1000]),
    "other shape": edit(lambda header: header["0"]["shape"].reverse()),
    "negative shape": tensor(shape=[-16, -4]),
    "huge shape": tensor(shape=[1 << 62, 1 << 62]),
    "unknown dtype": tensor(dtype="F7"),
    "wider dtype": tensor(dtype="F64"),
    "other dtype of this width": tensor(dtype="I32"),
    "dtype is a list": tensor(dtype=[]),
    "no step": edit(lambda header: header["__metadata__"].pop("step") and header),
    "step of letters": metadata(step="two"),
    "notes of no json": metadata(notes="{"),
    "structure out of the folder": metadata(structure="../../../run"),
    "structure unknown": metadata(structure="0" * 16),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_told_by_its_name(tmp_path, toys, kind):
    folder = shutil.copytree(toys["plain"], tmp_path / "run")
    DAMAGE[kind](pack_of(folder))
    run = open_run(folder)
    named = "structures" if kind == "structure unknown" else "00000000"
    with pytest.raises(RunFolderError, match=named) as caught:
        for one in run.steps(0)[0].records:
            _ = one.value
    assert len(str(caught.value)) < 500
    assert len(run.steps(1)[0].records)  # the other steps are none the worse


def structure_of(folder):
    (path,) = (folder / STRUCTURES).iterdir()
    return path


def restructured(folder, change):
    """Another structure under a name of its own, which the step's file takes for its."""
    content = json.loads(structure_of(folder).read_text())
    change(content)
    text = json.dumps(content)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    (folder / STRUCTURES / f"{name}.json").write_text(text)
    metadata(structure=name)(pack_of(folder))


def entry(index, value):
    return lambda content: content["records"][0].__setitem__(index, value)


FORGED = {
    "no records": lambda content: content.pop("records"),
    "records are a number": lambda content: content.update(records=3),
    "fewer fields": lambda content: content["records"][0].pop(),
    "of the future": lambda content: content.update(schema_version=99),
    "unknown codec": lambda content: content.update(compression="lzma"),
    "stage": entry(1, "later"),
    "call": entry(3, "x"),
    "dtype": entry(5, "complexity"),
    "complex dtype": entry(5, "complex64"),
    "dtype is a number": entry(5, 7),
    "shape": entry(6, [3, 3]),
    "negative shape": entry(6, [-1]),
    "huge shape": entry(6, [1 << 40, 1 << 40]),
    "kept as": entry(8, "rumour"),
    "no such tensor": entry(9, ["999", "F32"]),
    "no such sketch": lambda content: content["records"][0].__setitem__(slice(8, 10), ["sketch", 10**9]),
    "sketch below zero": lambda content: content["records"][0].__setitem__(slice(8, 10), ["sketch", -1]),
    "sketch is a name": lambda content: content["records"][0].__setitem__(slice(8, 10), ["sketch", "0"]),
    "stored dtype": entry(9, ["0", "F64"]),
}


@pytest.mark.parametrize("storage", ["plain", "zlib"])
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_structure(tmp_path, toys, kind, storage):
    folder = shutil.copytree(toys[storage], tmp_path / "run")
    restructured(folder, FORGED[kind])
    with pytest.raises(RunFolderError, match=r"00000000|structures"):
        _ = [r.value for r in open_run(folder).steps(0)[0].records]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text()[:-20]),
        lambda path: path.write_text(path.read_text().replace("fc1", "fc2")),
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    ],
    ids=["missing", "empty", "cut", "edited", "no utf-8"],
)
def test_a_damaged_structure(tmp_path, toys, damage):
    folder = shutil.copytree(toys["plain"], tmp_path / "run")
    damage(structure_of(folder))
    with pytest.raises(RunFolderError, match=STRUCTURES):
        open_run(folder).steps(0)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run whose last step says itself what its records are called; to be copied before it is damaged."""
    folder = tmp_path_factory.mktemp("own") / "run"
    return write_run(folder, info(*LAYERS), of_shapes(range(MOST + 1)), storage=PACKED)


def own_structure(change):
    """Another structure of the step's own, behind its tensors."""

    def damage(path):
        header, body = parts(path)
        entry = header["structure"]
        start, end = entry["data_offsets"]
        data, fields = change(body[start:end])
        entry.update({"shape": [len(data)], "data_offsets": [len(body), len(body) + len(data)], **fields})
        put_together(path, header, body + data)

    return damage


def repacked(change):
    def damage(data):
        content = json.loads(zlib.decompress(data))
        change(content)
        return zlib.compress(json.dumps(content).encode()), {}

    return own_structure(damage)


OWN_DAMAGE = {
    "gone": edit(lambda header: header.pop("structure") and header),
    "cut off": own_structure(lambda data: (data[:-5], {})),
    "not packed": own_structure(lambda data: (zlib.decompress(data), {})),
    "empty": own_structure(lambda data: (b"", {})),
    "endless": own_structure(lambda data: (zlib.compress(b" " * (130 << 20)), {})),
    "no json": own_structure(lambda data: (zlib.compress(b"{" * 64), {})),
    "of another dtype": own_structure(lambda data: (data[:4], {"dtype": "F32", "shape": [1]})),
    "a matrix": own_structure(lambda data: (data[:4], {"shape": [2, 2]})),
    **{f"forged: {kind}": repacked(change) for kind, change in FORGED.items()},
}


@pytest.mark.parametrize("kind", OWN_DAMAGE)
def test_a_damaged_structure_of_a_steps_own(tmp_path, own, kind):
    folder = shutil.copytree(own, tmp_path / "run")
    OWN_DAMAGE[kind](pack_of(folder, MOST))
    with pytest.raises(RunFolderError, match=f"{MOST:08d}") as caught:
        _ = [r.value for r in open_run(folder).steps(MOST)[0].records]
    assert len(str(caught.value)) < 500
    assert len(open_run(folder).steps(0)[0].records)


def test_a_file_cut_off_after_it_was_opened(tmp_path, storage):
    given = [record("fc", "forward", f"output.{k}", values_of("float32", (300, 300), k)) for k in range(2)]
    folder = written(tmp_path, *given, storage=storage)
    found = read_back(folder)
    with open(pack_of(folder), "r+b") as file:
        file.truncate(pack_of(folder).stat().st_size // 2)
    with pytest.raises(TensorFileError, match=PACK_FILE):
        _ = [r.value for r in found]


def test_a_file_that_is_replaced_after_it_was_opened(tmp_path):
    """Resuming a run replaces steps: what was read from one stays that one's, and many steps are not kept open."""
    given = [record("fc", "forward", "output.0", np.full((300, 300), n, np.float32)) for n in range(40)]
    steps = [one_step(one, number=n) for n, one in enumerate(given)]
    folder = write_run(tmp_path, info(*LAYERS), steps, storage=PACKED)
    run = open_run(folder)
    found = [run.steps(n)[0].records[0] for n in run.numbers()]
    assert len(found) == 40
    for path in sorted(folder.glob("steps/*/*/step.safetensors"))[-2:]:
        path.unlink()
    assert found[-1].value[0, 0] == 39
    before = len(os.listdir("/proc/self/fd"))
    for n in range(38):
        assert found[n].value[0, 0] == n
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    with pytest.raises(TensorFileError, match=PACK_FILE):
        _ = found[-1].value
    write_run(folder, info(*LAYERS), [one_step(given[9], number=3)], storage=PACKED, existing="resume")
    with pytest.raises(TensorFileError, match=r"00000003.*recorded again"):
        _ = found[3].value


@pytest.mark.parametrize("name", ["zlib", "zstd"])
def test_bytes_that_are_not_those_of_the_tensor(tmp_path, name):
    if name == "zstd":
        pytest.importorskip("zstandard")
    folder = written(
        tmp_path, record("fc", "forward", "output.0", values_of("float32", (50, 50))), storage=STORAGES[name]
    )
    data = bytearray(pack_of(folder).read_bytes())
    data[-3000:-2990] = bytes(10)
    pack_of(folder).write_bytes(data)
    try:
        (back,) = read_back(folder)
        value = back.value
    except TensorFileError as error:
        assert PACK_FILE in str(error)  # noqa: PT017
    else:  # a codec without a checksum may unpack to something else, of the right size
        assert value.shape == (50, 50)


# -- codecs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", codecs.CODECS)
def test_never_more_is_unpacked_than_the_tensor_has(name):
    if name == "zstd":
        pytest.importorskip("zstandard")
    packed = codecs.compressed(np.zeros(1 << 24, np.uint8), name)
    assert packed.nbytes < 1 << 18
    with pytest.raises(ValueError, match="more than 100 bytes"):
        codecs.restored(packed, name, np.dtype(np.uint8), (100,))
    with pytest.raises(ValueError, match="unpack"):
        codecs.restored(packed, name, np.dtype(np.float64), (1 << 24,))
    with pytest.raises(ValueError, match="unpack"):
        codecs.restored(packed[: len(packed) // 2], name, np.dtype(np.uint8), (1 << 24,))
    with pytest.raises(ValueError, match="unpack"):
        codecs.restored(np.frombuffer(b"nothing of this kind", np.uint8), name, np.dtype(np.uint8), (4,))


def test_unknown_and_missing_codecs(monkeypatch):
    with pytest.raises(UsageError, match=r"zlib, zstd.*'lz4'"):
        Storage(pack=True, compression="lz4")
    with pytest.raises(UsageError, match="pack=False"):
        Storage.of(False, "zlib", None, sketches=False)
    with pytest.raises(UsageError, match="pack=False"):
        Storage.of(False, "", None, sketches=True)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)  # as where it is not installed
    with pytest.raises(UsageError, match="pip install"):
        Storage(pack=True, compression="zstd")


@pytest.mark.parametrize("limit", [0, -1, True, "1G", float("nan")])
def test_a_limit_that_is_none(limit):
    with pytest.raises(UsageError, match="max_bytes"):
        Storage(max_bytes=limit)


def test_what_asks_for_packed_steps():
    assert Storage.of(None, "", None, sketches=True).pack
    assert Storage.of(None, "zlib", None, sketches=False).pack
    assert not Storage.of(None, "", None, sketches=False).pack
    assert Storage.of(True, "", None, sketches=False).pack


def test_linear_layers_of_both_frameworks_lie_in_one_folder(tmp_path):
    """A structure's name is its content's: two models in two folders never share one by chance."""
    names = set()
    for paddle in (False, True):
        tree = info(root(1), linear("fc", 3, 4, paddle=paddle))
        shape = (3, 4) if paddle else (4, 3)
        folder = write_run(
            tmp_path / str(paddle), tree, [one_step(record("fc", "weight", "weight", np.ones(shape)))], storage=PACKED
        )
        names.add(structure_of(folder).name)
    assert len(names) == 2

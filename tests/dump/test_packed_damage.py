"""Packed steps that are damaged, forged, or changed while they are read: reported by the file's name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib

import numpy as np
import pytest
from kit.records import info, record, step, write_run

from padiff.dump import open_run
from padiff.dump.pack import PACK_FILE
from padiff.dump.stored_schema import MOST, STRUCTURES
from padiff.errors import RunFolderError, TensorFileError

from .packs import LAYERS, PACKED, STORAGES, of_shapes, pack_of, read_back, structure_of, toy, values_of, written


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Runs of two steps by storage, to be copied before they are damaged."""
    return {
        name: toy(tmp_path_factory.mktemp(name) / "run", (0, 1), storage=STORAGES[name]) for name in ("plain", "zlib")
    }


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
def test_a_damaged_file_is_reported_by_its_name(tmp_path, toys, kind):
    folder = shutil.copytree(toys["plain"], tmp_path / "run")
    DAMAGE[kind](pack_of(folder))
    run = open_run(folder)
    named = "structures" if kind == "structure unknown" else "00000000"
    with pytest.raises(RunFolderError, match=named) as caught:
        for one in run.steps(0)[0].records:
            _ = one.value
    assert len(str(caught.value)) < 500
    assert len(run.steps(1)[0].records)  # the other steps are none the worse


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
    "endless": own_structure(lambda data: (zlib.compress(b" " * (130 << 20), level=1), {})),
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
    steps = [step(n, [one]) for n, one in enumerate(given)]
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
    write_run(folder, info(*LAYERS), [step(3, [given[9]])], storage=PACKED, existing="resume")
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

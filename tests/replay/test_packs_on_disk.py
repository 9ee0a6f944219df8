"""Packs in files: what is written is read, lazily; what is damaged is refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from padiff.dump import open_run
from padiff.dump.storage import Storage
from padiff.dump.write import RunWriter
from padiff.errors import PadiffError, RunFolderError, WriterError
from padiff.records import InMemory, Layer, Record, RunInfo, Step
from padiff.records.traces import Batch, Drawn, Mask, OptimizerState, Pack, ParameterState, Rate, Unkept
from padiff_cli.main import main

INFO = RunInfo("torch", "2", (Layer("(root)", "Net", "net"),))


def kept(array: object) -> InMemory:
    return InMemory(np.asarray(array))


def a_pack(step: int = 3, rank: int = 0) -> Pack:
    dropped = np.arange(12).reshape(3, 4) % 3 != 0
    return Pack(
        step=step,
        framework="torch",
        framework_version="2.13",
        weights={
            ("fc", "weight"): kept(np.arange(6, dtype=np.float32).reshape(2, 3)),
            ("fc", "half"): kept(np.arange(3).astype(ml_dtypes.bfloat16)),
            ("fc", "spin"): kept(np.array([1 + 2j, 3j], np.complex64)),
            ("fc", "count"): kept(np.int64(7)),
            ("fc", "none"): kept(np.zeros((0, 4), np.float32)),
        },
        optimizers=(
            OptimizerState(
                "adamw",
                {"fc/weight": ParameterState({"first_moment": np.full((2, 3), 0.5, np.float32)}, {"steps": 3.0})},
                (Rate(0.01, ("fc/weight",)),),
            ),
        ),
        batches=(
            Batch(
                (kept([[1.0, 2.0]]), None, {"flag": True, "deep": (kept([True]), [float("inf"), "text"])}),
                {"mask": kept(np.array([1], np.uint8))},
                (kept([1]),),
                {"x": kept([4]), "odd": Unkept("a.B")},
            ),
            Batch(seen=False),
        ),
        masks=(Mask("drop", 1, "dropout", 0.25, (3, 4), kept(np.packbits(dropped))),),
        loss_scale=1024.0,
        unseen=(Drawn("rnn", "LSTM"),),
        seeds={"numpy": kept(np.arange(625, dtype=np.uint32))},
        rank=rank,
        notes=("a note",),
    )


def write(path: Path, *packs: Pack, info: RunInfo = INFO, **more: object) -> None:
    writer = RunWriter(path, info, rank=packs[0].rank, **more)  # type: ignore[arg-type]
    for pack in packs:
        record = Record("(root)", "forward", "output.0", kept(np.ones(8, np.float32)), "float32", (8,))
        writer.add_step(Step(pack.step, (record,), rank=pack.rank), pack)
    writer.close()


def values(value: object) -> object:
    """The same with arrays in the place of sources."""
    if hasattr(value, "read"):
        array = value.read()
        return (array.dtype.name, array.shape, array.tobytes())
    if isinstance(value, dict):
        return {key: values(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(values, value))
    return value


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "run", a_pack(3), a_pack(10))
    (tmp_path / "run").rename(tmp_path / "moved")
    run = open_run(tmp_path / "moved")
    assert list(run.packs) == [3, 10] and 3 in run.packs and 4 not in run.packs
    pack, expected = run.packs[3], a_pack(3)
    for name in ("step", "framework", "framework_version", "loss_scale", "unseen", "notes", "rank", "learning_rates"):
        assert getattr(pack, name) == getattr(expected, name)
    assert values(dict(pack.weights)) == values(dict(expected.weights))
    assert values(dict(pack.seeds)) == values(dict(expected.seeds))
    for one, other in zip(pack.batches, expected.batches, strict=True):
        for name in ("args", "kwargs", "labels", "whole", "seen"):
            assert values(getattr(one, name)) == values(getattr(other, name)), name
    state = pack.optimizers[0].parameters["fc/weight"]
    assert state.numbers == {"steps": 3.0} and (state.tensors["first_moment"] == 0.5).all()
    (mask,) = pack.masks
    assert (mask.kept() == (np.arange(12).reshape(3, 4) % 3 != 0)).all() and mask.rate == 0.25


def test_without_packs_there_are_none(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", INFO)
    writer.add_step(Step(0, ()))
    writer.close()
    assert not open_run(tmp_path / "run").packs and not (tmp_path / "run" / "packs").exists()


def test_ranks_write_a_pack_together(tmp_path: Path) -> None:
    info = RunInfo("torch", "2", INFO.layers, world_size=2)
    write(tmp_path / "run", a_pack(3, 0), info=info)
    assert not open_run(tmp_path / "run").packs  # absent until it is whole
    write(tmp_path / "run", a_pack(3, 1), info=info)
    assert [pack.rank for pack in open_run(tmp_path / "run").packs.ranks(3)] == [0, 1]


def test_recorded_again_the_old_pack_goes(tmp_path: Path) -> None:
    write(tmp_path / "run", a_pack(3))
    writer = RunWriter(tmp_path / "run", INFO, existing="resume")
    writer.add_step(Step(3, ()))
    writer.close()
    assert not open_run(tmp_path / "run").packs
    write(tmp_path / "run", a_pack(3), existing="overwrite")
    assert list(open_run(tmp_path / "run").packs) == [3]
    RunWriter(tmp_path / "run", INFO, existing="overwrite").close()
    assert not open_run(tmp_path / "run").packs


def test_a_limit_counts_packs_and_takes_them_with_their_steps(tmp_path: Path) -> None:
    write(tmp_path / "one", a_pack(0))
    size = sum(f.stat().st_size for f in (tmp_path / "one").rglob("*") if f.is_file())
    limit = 4 * size
    write(tmp_path / "run", *map(a_pack, range(12)), storage=Storage(max_bytes=limit))
    run = open_run(tmp_path / "run")
    assert run.numbers()[0] == 0 and run.numbers()[-1] == 11 and 2 <= len(run.numbers()) < 12
    assert list(run.packs) == run.numbers()
    assert sum(f.stat().st_size for f in (tmp_path / "run").rglob("*") if f.is_file()) <= limit
    with pytest.raises(WriterError, match="replay_every_n_steps"):
        write(tmp_path / "small", a_pack(0), storage=Storage(max_bytes=size // 2))


def damaged(path: Path, change: object) -> None:
    file = path / "packs" / "00000003" / "rank_0" / "pack.json"
    content = json.loads(file.read_text())
    change(content)  # type: ignore[operator]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(schema_version=99),
        lambda c: c["weights"][0].update(tensor="elsewhere"),
        lambda c: c["weights"][0].update(shape=[3, 3]),
        lambda c: c["weights"][0].update(dtype="float64"),
        lambda c: c["weights"][0].update(shape=[-1, 3]),
        lambda c: c["masks"][0].update(of=[300, 4]),
        lambda c: c["masks"][0].update(rate=float("nan")),
        lambda c: c["batches"][0].update(args={"value": 3}),
        lambda c: c["batches"][0]["args"].update(tuple=[{"value": {"x": 1}}]),
        lambda c: c.update(loss_scale=0),
        lambda c: c["optimizers"][0]["parameters"]["fc/weight"].update(tensors=["../x"]),
        lambda c: c["optimizers"][0]["rates"][0].update(value=float("inf")),
        lambda c: c.pop("weights"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: object) -> None:
    write(tmp_path / "run", a_pack(3))
    damaged(tmp_path / "run", change)
    with pytest.raises(RunFolderError, match=r"pack\.json"):
        open_run(tmp_path / "run").packs[3]


def test_damaged_files(tmp_path: Path) -> None:
    write(tmp_path / "run", a_pack(3))
    rank = tmp_path / "run" / "packs" / "00000003" / "rank_0"
    content = (rank / "pack.json").read_bytes()
    for text in (b"", b"[]", b"{", content[:100], b"\xff" * 50, b'{"schema_version": 1}'):
        (rank / "pack.json").write_bytes(text)
        with pytest.raises(RunFolderError):
            open_run(tmp_path / "run").packs[3]
    (rank / "pack.json").write_bytes(content)
    tensors = (rank / "pack.safetensors").read_bytes()
    for data in (b"", tensors[:200], tensors[:-1], b"\xff" * 400):
        (rank / "pack.safetensors").write_bytes(data)
        with pytest.raises(PadiffError):
            open_run(tmp_path / "run").packs[3]
    (rank / "pack.safetensors").unlink()
    with pytest.raises(RunFolderError, match="missing"):
        open_run(tmp_path / "run").packs[3]
    outside = tmp_path / "outside.json"
    outside.write_bytes(content)
    (rank / "pack.json").unlink()
    (rank / "pack.json").symlink_to(outside)
    with pytest.raises(RunFolderError, match="leaves"):
        open_run(tmp_path / "run").packs[3]


def test_show_and_doctor_know_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", a_pack(3))
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "replay packs of steps: 3" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "run")]) == 0
    tensors = tmp_path / "run" / "packs" / "00000003" / "rank_0" / "pack.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "run")]) == 1
    assert "the replay pack of step 3" in capsys.readouterr().out

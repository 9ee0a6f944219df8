"""What ranks hold alike is stored once, in whatever order they write; what differs is stored whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit.records import as_sketch, toy_info

from padiff.dump import RunWriter, open_run
from padiff.dump.deduplication import SAME_FILE
from padiff.dump.storage import Storage
from padiff.errors import PadiffError, RunFolderError
from padiff.records import InMemory, Operand, Record, Step, Trace, TracedCall, TracedTensor
from padiff.records.recorded import Part
from padiff.records.traces import Batch, OptimizerState, Pack, ParameterState, Rate

STORAGES = {"plain": Storage(), "packed": Storage(pack=True), "zlib": Storage(pack=True, compression="zlib")}
WORLD, ELEMENTS = 4, 5000


def values(number, rank, odd):
    """By stage and slot: weights, gradients and updates are equal, but for one rank's; outputs never are."""
    data = np.random.default_rng(number)
    found = {(stage, slot): data.normal(size=ELEMENTS) for stage in ("weight", "grad", "update") for slot in "ab"}
    if rank == odd:
        found["grad", "b"][17] += 1e-6
    found["forward", "output.0"] = np.random.default_rng((number, rank)).normal(size=30)
    return {key: value.astype(np.float32) for key, value in found.items()}


def step(number, rank, odd=None, sketched=()):
    records = []
    for (stage, slot), value in values(number, rank, odd).items():
        one = Record("fc1", stage, slot, InMemory(value), "float32", value.shape, order=len(records))
        records.append(as_sketch(one) if stage in sketched else one)
    return Step(number, tuple(records), rank=rank)


def record(path, order, storage, **given):
    """Ranks that write one after the other; returns when all have."""
    info = toy_info(world_size=WORLD)
    writers = {rank: RunWriter(path, info, rank=rank, storage=storage) for rank in range(WORLD)}
    for number in range(2):
        for rank in order:
            writers[rank].add_step(step(number, rank, **given))
            writers[rank].flush()
    for writer in writers.values():
        writer.close()
    return open_run(path)


def split_step(number, rank):
    """Of split layers: what goes in and what comes out is equal, what is in between is not; one is traced only."""
    data = np.random.default_rng(number)
    both, traced = (data.normal(size=ELEMENTS).astype(np.float32) for _ in range(2))
    own = np.random.default_rng((number, rank)).normal(size=ELEMENTS).astype(np.float32)
    part = Part((WORLD * ELEMENTS,), (rank * ELEMENTS,), "shard")
    records = [
        Record("fc1", "forward", "output.0", InMemory(both), "float32", both.shape, order=0),
        Record("fc1", "backward", "output.0", InMemory(own), "float32", own.shape, order=1),
        Record("fc1", "weight", "a", InMemory(own + 1), "float32", own.shape, order=2, part=part),
    ]
    tensors = tuple(TracedTensor(source, "float32", (ELEMENTS,)) for source in (records[0].source, InMemory(traced)))
    call = TracedCall("fc1", 0, "gelu", inputs=(Operand("x", 1),), outputs=(Operand("output.0", 0),))
    return Step(number, tuple(records), rank=rank, trace=Trace(tensors, (call,), functions=True)), (both, own, traced)


def pack_of(number, rank):
    """A replica of the weights and of the optimizer's state, and samples of each rank's own."""
    data = np.random.default_rng(number)
    weight, moment = (data.normal(size=ELEMENTS).astype(np.float32) for _ in range(2))
    x = np.random.default_rng((number, rank)).normal(size=100).astype(np.float32)
    state = ParameterState({"first_moment": moment}, {"steps": 3.0})
    return Pack(
        step=number,
        rank=rank,
        framework="torch",
        framework_version="2",
        weights={("fc1", "a"): InMemory(weight)},
        optimizers=(OptimizerState("adam", {"fc1/a": state}, (Rate(0.1, ("fc1/a",)),)),),
        batches=(Batch((InMemory(x), InMemory(np.arange(50))), {}, None),),
    ), (weight, moment, x)


def size_of(path, pattern):
    return sum(entry.stat().st_size for entry in path.glob(pattern) if entry.is_file())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("odd", [None, 0, 2])
@pytest.mark.parametrize("form", STORAGES)
def test_every_rank_reads_what_it_wrote_and_one_stores_it(order, odd, form, tmp_path):
    run = record(tmp_path / "run", order, STORAGES[form], odd=odd)
    for number in run.numbers():
        for own in run.steps(number):
            expected = values(number, own.rank, odd)
            assert len(own.records) == len(expected)
            for one in own.records:
                np.testing.assert_array_equal(one.value, expected[one.stage, one.slot], err_msg=one.site)
    if form != "zlib":
        bytes_of_one = 6 * ELEMENTS * 4
        more = 0 if odd is None else ELEMENTS * 4
        stored = size_of(tmp_path / "run", "steps/*/*/*.safetensors") + size_of(tmp_path / "run", "steps/*/*/*/*.npy")
        assert 2 * (bytes_of_one + more) < stored < 2 * (bytes_of_one + more) * 1.1
    assert not list((tmp_path / "run").glob("steps/*/*/digests.json"))
    # Equal by their place alone: who looks for ranks that part reads nothing of what they share.
    first, other = ({r.site: r.source.identity for r in own.records} for own in run.steps(0)[1:3])
    assert sum(first[site] == other[site] for site in first) == (6 if odd in (None, 0) else 5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_activations_that_partners_in_split_layers_hold_alike_are_stored_once(order, form, tmp_path):
    info = toy_info(world_size=WORLD)
    writers = {rank: RunWriter(tmp_path / "run", info, rank=rank, storage=STORAGES[form]) for rank in range(WORLD)}
    for rank in order:
        writers[rank].add_step(split_step(0, rank)[0])
        writers[rank].flush()
    for writer in writers.values():
        writer.close()
    for own in open_run(tmp_path / "run").steps(0):
        both, other, traced = split_step(0, own.rank)[1]
        for one, expected in zip(own.records, (both, other, other + 1)):
            np.testing.assert_array_equal(one.value, expected, err_msg=one.site)
        for tensor, expected in zip(own.trace.tensors, (both, traced)):
            np.testing.assert_array_equal(tensor.source.read(), expected)
    stored = size_of(tmp_path / "run", "steps/*/*/*.safetensors") + size_of(tmp_path / "run", "steps/*/*/*/*.npy")
    expected = (2 + 2 * WORLD) * ELEMENTS * 4
    assert expected < stored < expected * 1.1
    assert not list((tmp_path / "run").glob("steps/*/*/digests.json"))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_what_packs_hold_alike_is_stored_once(order, tmp_path):
    info = toy_info(world_size=WORLD)
    writers = {rank: RunWriter(tmp_path / "run", info, rank=rank) for rank in range(WORLD)}
    for rank in order:
        writers[rank].add_step(step(0, rank), pack_of(0, rank)[0])
        writers[rank].flush()
    for writer in writers.values():
        writer.close()
    found = open_run(tmp_path / "run").packs
    for pack in found.ranks(0):
        weight, moment, x = pack_of(0, pack.rank)[1]
        np.testing.assert_array_equal(pack.weights["fc1", "a"].read(), weight)
        np.testing.assert_array_equal(pack.optimizers[0].parameters["fc1/a"].tensors["first_moment"], moment)
        np.testing.assert_array_equal(pack.batches[0].args[0].read(), x)
        np.testing.assert_array_equal(pack.batches[0].args[1].read(), np.arange(50))
    expected = 2 * ELEMENTS * 4 + 50 * 8 + WORLD * 400
    assert expected < size_of(tmp_path / "run", "packs/*/*/*.safetensors") < expected * 1.1
    assert not list((tmp_path / "run").glob("packs/*/*/digests.json"))


@pytest.mark.parametrize("place", [[7, "x", ""], [0, "no such tensor", ""], [0, 3], "x"])
def test_a_pack_that_refers_elsewhere_is_refused(place, tmp_path):
    info = toy_info(world_size=2)
    writers = [RunWriter(tmp_path / "run", info, rank=rank) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.add_step(step(0, rank), pack_of(0, rank)[0])
        writer.flush()
    for writer in writers:
        writer.close()
    path = tmp_path / "run" / "packs" / "00000000" / "rank_1" / SAME_FILE
    content = json.loads(path.read_text())
    content["tensors"] = dict.fromkeys(content["tensors"], place)
    path.write_text(json.dumps(content))
    with pytest.raises(PadiffError):
        open_run(tmp_path / "run").packs.ranks(0)


def test_sketches_are_each_ranks_own(tmp_path):
    run = record(tmp_path / "run", (1, 0, 2, 3), STORAGES["packed"], sketched=("weight", "grad", "update"))
    for own in run.steps(1):
        expected = values(1, own.rank, None)
        for one in own.records:
            if one.sketch is not None:
                whole = Record(
                    "fc1", one.stage, one.slot, InMemory(expected[one.stage, one.slot]), "float32", one.shape
                )
                np.testing.assert_array_equal(one.sketch.projection, as_sketch(whole).sketch.projection)
    assert not list((tmp_path / "run").glob(f"steps/*/*/{SAME_FILE}"))


@pytest.mark.parametrize("place", [[7, "weights/x.npy", ""], [-1, "x", ""], [0, "../../run.json", ""], [0, 3], "x"])
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_file_that_refers_elsewhere_is_refused(place, form, tmp_path):
    run = record(tmp_path / "run", (0, 1, 2, 3), STORAGES[form])
    path = tmp_path / "run" / "steps" / "00000000" / "rank_2" / SAME_FILE
    content = json.loads(path.read_text())
    content["tensors"] = dict.fromkeys(content["tensors"], place)
    path.write_text(json.dumps(content))
    with pytest.raises(PadiffError):
        for one in run.steps(0)[2].records:
            _ = one.value


def test_a_rank_that_leads_out_of_the_step_by_a_link_is_refused(tmp_path):
    record(tmp_path / "run", (0, 1, 2, 3), STORAGES["plain"])
    folder = tmp_path / "run" / "steps" / "00000000"
    (folder / "rank_0").rename(tmp_path / "outside")
    (folder / "rank_0").symlink_to(tmp_path / "outside")
    with pytest.raises(RunFolderError, match="rank_0"):
        open_run(folder / "rank_1")


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_step_that_a_rank_ends_before_the_first_has_opened_the_folder_is_kept(form, tmp_path):
    info, path = toy_info(world_size=2), tmp_path / "run"
    early = RunWriter(path, info, rank=1, storage=STORAGES[form])
    early.add_step(step(0, 1))
    early.flush()
    late = RunWriter(path, info, storage=STORAGES[form])
    for number in range(2):
        late.add_step(step(number, 0))
        if number:
            early.add_step(step(number, 1))
    late.close()
    early.close()
    assert open_run(path).numbers() == [0, 1]


def test_what_a_killed_rank_left_is_neither_kept_nor_referred_to(tmp_path):
    info, path = toy_info(world_size=3), tmp_path / "run"
    before = RunWriter(path, info)
    before.add_step(step(0, 0, odd=0))
    before.close(finished=False)  # of three ranks one has written when all end
    early = RunWriter(path, info, rank=1, existing="resume")
    early.add_step(step(0, 1))
    early.flush()
    others = [RunWriter(path, info, rank=rank, existing="resume") for rank in (0, 2)]
    assert [entry.name for entry in (path / "steps").glob(".*/rank_*")] == ["rank_1"]
    for rank, writer in zip((0, 2), others):
        writer.add_step(step(0, rank))
        writer.close()
    early.close()
    for own in open_run(path).steps(0):
        for one in own.records:
            np.testing.assert_array_equal(one.value, values(0, own.rank, None)[one.stage, one.slot])

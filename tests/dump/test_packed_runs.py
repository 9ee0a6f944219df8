"""Runs of packed steps: the same runs as unpacked ones, resumed, moved, of several ranks; what they share."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from kit.records import info, linear, memory_run, plain, record, root, step, toy_info, toy_run, toy_steps, write_run

import padiff
from padiff.dump import RunWriter, open_run, stored_schema
from padiff.dump.stored_schema import MOST, STRUCTURES
from padiff.errors import RunFolderError, WriterError

from .packs import LAYERS, PACKED, STORAGES, all_values, bits, of_shapes, read_back, structure_of, toy


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
    writer.add_step(one)
    writer.flush()
    with pytest.raises(WriterError, match="step 1 stands in"):
        writer.add_step(one)
    writer.close()


def test_two_ranks(tmp_path):
    tree = toy_info(world_size=2)
    writers = [RunWriter(tmp_path / "run", tree, rank=0, storage=PACKED)]
    writers.append(RunWriter(tmp_path / "run", tree, rank=1, storage=PACKED, existing="resume"))
    for number in (0, 1):
        for rank, writer in enumerate(writers):
            (one,) = toy_steps((number,), rate=0.1 * (rank + 1))
            writer.add_step(replace(one, rank=rank))
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
            writer.add_step(one)
            writer.flush()
    for writer in reversed(writers):
        writer.close()
    assert len(list((tmp_path / "run" / STRUCTURES).iterdir())) == MOST + 1  # one more for the second process
    for pair in zip(*given):
        found = open_run(tmp_path / "run").steps(pair[0].number)
        assert [bits(s.records[0].value) for s in found] == [bits(s.records[0].value) for s in pair]


def test_linear_layers_of_both_frameworks_lie_in_one_folder(tmp_path):
    """A structure's name is its content's: two models in two folders never share one by chance."""
    names = set()
    for paddle in (False, True):
        tree = info(root(1), linear("fc", 3, 4, paddle=paddle))
        shape = (3, 4) if paddle else (4, 3)
        folder = write_run(
            tmp_path / str(paddle), tree, [step(0, [record("fc", "weight", "weight", np.ones(shape))])], storage=PACKED
        )
        names.add(structure_of(folder).name)
    assert len(names) == 2


def test_structures_of_many_processes_are_files_and_each_is_read_once(tmp_path, monkeypatch):
    count = MOST + 4
    writer = RunWriter(tmp_path / "run", info(*LAYERS, world_size=count), storage=PACKED)
    for number in (0, 1):
        for one in of_shapes(range(count)):
            writer.add_step(replace(one, number=number, rank=one.number))
    writer.close()
    assert len(list((tmp_path / "run" / STRUCTURES).iterdir())) == count
    read, whole = [], stored_schema._read
    monkeypatch.setattr(stored_schema, "_read", lambda path, run: read.append(path) or whole(path, run))
    run = open_run(tmp_path / "run")
    for number in (0, 1):
        assert [step.rank for step in run.steps(number)] == list(range(count))
    assert len(read) == len(set(read)) == count


def test_runs_whose_structures_have_the_same_content_share_them(tmp_path):
    """Two runs of one model, of two versions of a framework, say: it is read, and paired, once."""
    folders = [toy(tmp_path / side, storage=PACKED) for side in "ab"]
    other = write_run(tmp_path / "c", info(*LAYERS), of_shapes([0]), storage=PACKED)
    runs = [open_run(folder) for folder in (*folders, other)]
    a, b, c = (run.steps(0)[0].records.structure for run in runs)
    assert a is b is not c
    assert structure_of(folders[0]).name == structure_of(folders[1]).name

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kit.records import info, linear, norm, plain, record, root, step, toy_folder, toy_info, toy_steps, write_run

from padiff.dump import FolderRun, RunWriter, open_run
from padiff.dump.format import aside
from padiff.dump.medium import write_json
from padiff.errors import RunFolderError, UsageError, WriterError
from padiff.records import LOOP, ROOT, Record, Step, TensorSource

TREE = info(root(1), linear("a", 2, 2))


def one(number: int, **rest) -> Step:
    return step(number, [record("a", "forward", "output.0", [number, 1])], **rest)


def everything(records: tuple[Record, ...]) -> list[tuple]:
    return [(r.site, r.dtype, r.shape, r.order, r.layer_type, r.value.tolist()) for r in records]


def test_what_is_written_is_what_is_read(tmp_path):
    steps = toy_steps([0, 1])
    run = open_run(write_run(tmp_path / "run", toy_info(), steps))
    assert run.info == toy_info()
    assert run.name == "torch"
    assert run.numbers() == [0, 1]
    for written in steps:
        [read] = run.steps(written.number)
        # The type of a layer is its node's.
        kinds = {layer.path: layer.type for layer in toy_info().layers} | {LOOP: ""}
        expected = [(*entry[:4], kinds[entry[0].split("/")[0]], entry[5]) for entry in everything(written.records)]
        assert everything(read.records) == expected


def test_what_holds_for_a_step_comes_back(tmp_path):
    written = one(3, loss_scale=1024.0, micro_batches=4, notes=("a note",))
    [read] = open_run(write_run(tmp_path / "run", TREE, [written])).steps(3)
    assert (read.number, read.rank, read.loss_scale, read.micro_batches, read.notes) == (3, 0, 1024.0, 4, ("a note",))


def test_settings_aliases_roles_and_the_recorded_map_come_back(tmp_path):
    layers = (root(2), norm("bn", 3, eps=1e-5, momentum=0.1), plain("r", "relu", aliases=("s",), recorded=False))
    tree = info(*layers, name="n", layer_map=("bn",), recording={"every": 2})
    assert open_run(write_run(tmp_path / "run", tree, [])).info == tree


@pytest.mark.parametrize(
    "values",
    [
        np.asarray(2.5, np.float32),
        np.zeros((0, 3), np.float32),
        np.asarray([True, False]),
        np.asarray([2**62, -1], np.int64),
        np.asarray([1 + 2j], np.complex64),
        np.asarray([1.5, -2], np.float16),
        np.asarray([[1.0078125, -3e38]], ml_dtypes.bfloat16),
        np.asarray([0.5, 448], ml_dtypes.float8_e4m3fn),
        np.arange(6.0).reshape(2, 3).T,
        np.asarray([np.nan, np.inf]),
        np.arange(50_000, dtype=np.float32),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}",
)
def test_every_kind_of_tensor_survives_bit_by_bit(tmp_path, values):
    run = open_run(write_run(tmp_path / "run", TREE, [step(0, [record("a", "forward", "output.0", values)])]))
    [read] = run.steps(0)[0].records
    assert (read.dtype, read.value.dtype, read.value.shape) == (values.dtype.name, values.dtype, values.shape)
    assert read.value.tobytes() == values.tobytes()


def test_numpy_alone_reads_the_tensors(tmp_path):
    folder = toy_folder(tmp_path / "run", [0]) / "steps" / "00000000" / "rank_0"
    [weight] = [p for p in (folder / "weights").iterdir() if "fc1-weight" in p.name]
    assert np.array_equal(np.load(weight, allow_pickle=False), toy_steps([0])[0].records[1].value)


def test_stages_lie_where_the_design_says(tmp_path):
    folder = toy_folder(tmp_path / "run", [10]) / "steps" / "00000010" / "rank_0"
    report, params = (json.loads((folder / name).read_text()) for name in ("report.json", "params.json"))

    def stages(tree: dict) -> set[str]:
        own = {entry["stage"] for entry in tree["records"]}
        return own.union(*(stages(child) for child in tree.get("layers", ())))

    assert stages(report["tree"]) == {"input", "forward", "backward"}
    assert stages(params["tree"]) == {"weight", "grad", "update"}
    assert {entry["stage"] for entry in report["loop"]["records"]} == {"loss", "update"}
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"tensors", "weights", "grads", "updates"}
    assert [report["schema_version"], params["schema_version"]] == [1, 1]


def test_paths_inside_are_relative_and_a_moved_run_still_opens(tmp_path):
    first = toy_folder(tmp_path / "here" / "run", [0])
    second = tmp_path / "there" / "moved"
    second.parent.mkdir()
    shutil.move(first, second)
    for file in second.rglob("*.json"):
        assert str(tmp_path) not in file.read_text()
    [read] = open_run(second).steps(0)
    assert everything(read.records)[1][5] == toy_steps([0])[0].records[1].value.tolist()


def test_steps_are_sorted_as_numbers(tmp_path):
    numbers = [10, 2, 1, 100_000_000, 9]
    run = open_run(write_run(tmp_path / "run", TREE, [one(n) for n in numbers]))
    assert run.numbers() == [1, 2, 9, 10, 100_000_000]
    assert [run.steps(n)[0].records[0].value[0] for n in run.numbers()] == run.numbers()


def test_records_that_share_an_array_share_a_file(tmp_path):
    values = np.ones(3, np.float32)
    shared = [record(x, "forward", "output.0", values) for x in ("a", ROOT)]
    other = record("a", "backward", "output.0", values.copy())
    run = open_run(write_run(tmp_path / "run", TREE, [step(0, [*shared, other])]))
    assert len(list((tmp_path / "run").rglob("*.npy"))) == 2
    assert [r.value.tolist() for r in run.steps(0)[0].records] == [[1, 1, 1]] * 3


def test_an_array_shared_between_stages_lies_in_each_stages_folder(tmp_path):
    values = np.ones(3, np.float32)
    both = [record("a", stage, "weight", values) for stage in ("weight", "grad", "weight")]
    write_run(tmp_path / "run", TREE, [step(0, both)])
    assert sorted(p.parent.name for p in (tmp_path / "run").rglob("*.npy"))[0] == "grads"
    assert [r.value.sum() for r in open_run(tmp_path / "run").steps(0)[0].records] == [3, 3, 3]


def test_names_that_no_file_system_takes_are_written(tmp_path):
    slots = ["../../x", "a/b", "ü" * 300, "con:*?", "a/b"]
    written = step(0, [record("a", "forward", slot, [k]) for k, slot in enumerate(slots)])
    [read] = open_run(write_run(tmp_path / "run", TREE, [written])).steps(0)
    assert [(r.slot, r.value.tolist()) for r in read.records] == [(slot, [k]) for k, slot in enumerate(slots)]
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


# -- whole or absent ---------------------------------------------------------------------------------------------


class Gate(TensorSource):
    """A tensor source that waits until it is opened, and then gives values or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached, self.open, self.error = threading.Event(), threading.Event(), error

    def read(self) -> np.ndarray:
        self.reached.set()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        return np.zeros(1, np.float32)


def gated(number: int, gate: Gate) -> Step:
    late = Record("a", "forward", "output.1", gate, "float32", (1,), order=1)
    return Step(number, (one(number).records[0], late))


def test_a_step_that_is_being_written_is_not_seen(tmp_path):
    gate, writer = Gate(), RunWriter(tmp_path / "run", TREE)
    writer.add_step(gated(0, gate))
    assert gate.reached.wait(20)
    assert list((tmp_path / "run").rglob("*.npy"))  # its first tensor is there
    run = open_run(tmp_path / "run")
    assert run.numbers() == []
    gate.open.set()
    writer.flush()
    assert run.numbers() == [0]
    writer.close()


def test_what_a_killed_writer_left_is_ignored_and_removed_by_the_next(tmp_path):
    toy_folder(tmp_path / "run", [0, 1])
    steps = tmp_path / "run" / "steps"
    shutil.copytree(steps / "00000001", steps / ".00000002.partial")
    assert open_run(tmp_path / "run").numbers() == [0, 1]
    RunWriter(tmp_path / "run", toy_info(), existing="resume").close()
    assert sorted(p.name for p in steps.iterdir()) == ["00000000", "00000001"]


def test_what_a_killed_writer_left_beside_the_steps_is_removed_by_the_next(tmp_path):
    run = tmp_path / "run"
    toy_folder(run, [0])
    for folder in (run, run / "structures", run / "shared"):
        folder.mkdir(exist_ok=True)
        (folder / ".left.json.4711.partial").write_text("{")
        (folder / "kept.json").write_text("{}")
    RunWriter(run, toy_info(), existing="resume").close()
    assert not list(run.rglob("*.partial")) and len(list(run.rglob("kept.json"))) == 3


def test_a_file_that_cannot_take_its_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "taken" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_json(tmp_path / "taken", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_two_that_write_one_file_at_once_do_not_meet(tmp_path):
    path = tmp_path / "same.json"
    with aside(path) as one, aside(path) as other:
        one.write_text("first")
        other.write_text("second")
    assert [entry.name for entry in tmp_path.iterdir()] == ["same.json"]


def test_the_loop_waits_when_it_is_a_step_ahead_of_the_disk(tmp_path):
    gate, writer = Gate(), RunWriter(tmp_path / "run", TREE)
    writer.add_step(gated(0, gate))
    assert gate.reached.wait(20)
    put = []

    def training() -> None:
        for number in (1, 2, 3):
            writer.add_step(one(number))
            put.append(number)

    thread = threading.Thread(target=training)
    thread.start()
    thread.join(0.3)
    assert put == [1] and thread.is_alive()
    gate.open.set()
    thread.join(20)
    writer.close()
    assert open_run(tmp_path / "run").numbers() == [0, 1, 2, 3]


def test_an_error_of_the_disk_reaches_the_loop_and_earlier_steps_stay(tmp_path):
    gate, writer = Gate(OSError(28, "No space left on device")), RunWriter(tmp_path / "run", TREE)
    gate.open.set()
    writer.add_step(one(0))
    writer.add_step(gated(1, gate))
    with pytest.raises(WriterError, match=r"could not be written to .*run: .*No space left.*steps before it are whole"):
        writer.flush()
    writer.close(finished=False)
    run = open_run(tmp_path / "run")
    assert run.numbers() == [0]
    assert run.steps(0)[0].records[0].value.tolist() == [0, 1]
    assert not list((tmp_path / "run").rglob(".rank_*"))


def test_a_steps_folder_that_went_away_is_reported(tmp_path):
    writer = RunWriter(tmp_path / "run", TREE)
    shutil.rmtree(tmp_path / "run" / "steps")
    (tmp_path / "run" / "steps").write_text("a file")
    writer.add_step(one(0))
    with pytest.raises(WriterError, match=r"step 0 could not be written .*the run folder is gone, at least in part"):
        writer.close()


def test_a_step_is_not_written_twice_unasked(tmp_path):
    writer = RunWriter(tmp_path / "run", TREE)
    writer.add_step(one(0))
    writer.flush()
    with pytest.raises(WriterError, match=r"step 0 stands in .* already: two recorders write into one run folder"):
        writer.add_step(one(0))
    writer.close()


def test_the_run_says_when_it_has_ended(tmp_path):
    writer = RunWriter(tmp_path / "run", TREE)
    run = FolderRun(tmp_path / "run")
    assert not run.finished()
    writer.close()
    assert run.finished()
    assert json.loads((tmp_path / "run" / "finished.json").read_text()) == {"schema_version": 1}


def test_a_run_that_broke_off_does_not_say_that_it_ended(tmp_path):
    assert not FolderRun(write_run(tmp_path / "run", TREE, [one(0)], finished=False)).finished()


def test_each_written_step_is_announced_after_it_is_there(tmp_path):
    seen = []
    writer = RunWriter(tmp_path / "run", TREE, on_written=lambda s: seen.append((s.number, FolderRun(path).numbers())))
    path = writer.path
    writer.add_step(one(0))
    writer.add_step(one(5))
    writer.close()
    assert seen == [(0, [0]), (5, [0, 5])]


# -- a run that is there already ---------------------------------------------------------------------------------


def test_nothing_is_overwritten_unasked(tmp_path):
    write_run(tmp_path / "run", TREE, [one(0)])
    with pytest.raises(RunFolderError, match=r"holds a run already.*existing='resume'.*existing='overwrite'"):
        RunWriter(tmp_path / "run", TREE)
    assert open_run(tmp_path / "run").numbers() == [0]
    assert open_run(tmp_path / "run").finished()


def test_resume_keeps_steps_replaces_those_written_again_and_is_unfinished(tmp_path):
    write_run(tmp_path / "run", TREE, [one(0), one(1)])
    writer = RunWriter(tmp_path / "run", TREE, existing="resume")
    run = open_run(tmp_path / "run")
    assert not run.finished()
    writer.add_step(step(1, [record("a", "forward", "output.0", [77])]))
    writer.add_step(one(2))
    writer.close()
    assert run.numbers() == [0, 1, 2]
    assert [run.steps(n)[0].records[0].value[0] for n in (0, 1, 2)] == [0, 77, 2]
    assert sorted(p.name for p in (tmp_path / "run" / "steps").iterdir()) == [f"{n:08d}" for n in (0, 1, 2)]


def test_resume_refuses_another_model(tmp_path):
    write_run(tmp_path / "run", TREE, [one(0)])
    with pytest.raises(RunFolderError, match=r"holds the run of another model \(Net, 2 layers; now Net, 4 layers\)"):
        RunWriter(tmp_path / "run", toy_info(), existing="resume")
    assert open_run(tmp_path / "run").finished()


def test_overwrite_drops_the_old_steps(tmp_path):
    write_run(tmp_path / "run", TREE, [one(0), one(1)])
    run = open_run(write_run(tmp_path / "run", toy_info(), toy_steps([5]), existing="overwrite"))
    assert run.numbers() == [5] and run.info == toy_info()


def test_a_folder_of_steps_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "mine.txt").write_text("x")
    for existing in ("error", "overwrite"):
        with pytest.raises(RunFolderError, match=r"has a folder 'steps' but no run\.json"):
            RunWriter(tmp_path, TREE, existing=existing)
    assert (tmp_path / "steps" / "mine.txt").exists()


def test_a_folder_with_other_files_takes_a_run_beside_them(tmp_path):
    (tmp_path / "hparams.yaml").write_text("x")
    write_run(tmp_path, TREE, [one(0)])
    assert open_run(tmp_path).numbers() == [0] and (tmp_path / "hparams.yaml").exists()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match=r"cannot make the run folder .*file/run"):
        RunWriter(tmp_path / "file" / "run", TREE)


def test_an_unknown_wish_for_what_exists_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"existing is 'error', 'resume' or 'overwrite', got 'append'"):
        RunWriter(tmp_path / "run", TREE, existing="append")
    assert not (tmp_path / "run").exists()


# -- several ranks -----------------------------------------------------------------------------------------------


def rank_writers(path: Path) -> list[RunWriter]:
    tree = info(*TREE.layers, world_size=2)
    return [RunWriter(path, tree, rank=rank) for rank in (0, 1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_step_of_two_ranks_appears_when_both_have_written_it(tmp_path, order):
    writers = rank_writers(tmp_path / "run")
    run = FolderRun(tmp_path / "run")
    first, last = order
    for rank in order:
        assert run.numbers() == []
        writers[rank].add_step(one(4, rank=rank))
        writers[rank].flush()
    assert run.numbers() == [4]
    assert [s.rank for s in run.steps(4)] == [0, 1]
    writers[1].close()
    assert not run.finished()
    writers[0].close()
    assert run.finished() and first != last


def test_two_ranks_writing_at_once_lose_no_step(tmp_path):
    writers = rank_writers(tmp_path / "run")
    for number in range(20):
        for writer in writers:
            writer.add_step(one(number, rank=writers.index(writer)))
    for writer in writers:
        writer.close()
    run = FolderRun(tmp_path / "run")
    assert run.numbers() == list(range(20))
    assert all(len(run.steps(n)) == 2 for n in run.numbers())
    assert not list((tmp_path / "run" / "steps").glob(".*"))


def test_a_step_whose_replacement_was_cut_off_comes_back(tmp_path):
    write_run(tmp_path / "run", TREE, [one(0), one(1)])
    steps = tmp_path / "run" / "steps"
    (steps / "00000001").rename(steps / ".00000001.old")  # killed between the two renames
    (steps / ".00000002.partial").mkdir()
    RunWriter(tmp_path / "run", TREE, existing="resume").close()
    assert open_run(tmp_path / "run").numbers() == [0, 1]
    assert sorted(entry.name for entry in steps.iterdir()) == ["00000000", "00000001"]


@pytest.mark.slow
def test_ranks_that_write_at_the_same_time_lose_no_step(tmp_path):
    # Which of them comes last, and takes the step, is chance; the other one must not stumble over that.
    count, errors = 80, []
    writers = [RunWriter(tmp_path / "run", toy_info(world_size=2), rank=rank) for rank in range(2)]
    (one,) = toy_steps([0])

    def write(rank):
        try:
            for number in range(count):
                writers[rank].add_step(replace(one, number=number, rank=rank))
            writers[rank].flush()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for writer in reversed(writers):
        writer.close()
    run = open_run(tmp_path / "run")
    assert run.numbers() == list(range(count))
    assert all(len(run.steps(number)) == 2 for number in run.numbers())

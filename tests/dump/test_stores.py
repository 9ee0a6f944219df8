"""Runs in stores: recorded, read, compared and watched as those in folders are."""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hard.children import run_child

import padiff
from dump.stores import objects, s3_server
from padiff.dump import safetensors
from padiff.dump.lock import DEAD, StoreLock
from padiff.dump.remote_write import StoreWriter
from padiff.dump.storage import Storage
from padiff.dump.store import FsspecStore, RemotePath, run_folder
from padiff.errors import RunFolderError, TensorFileError, UsageError
from padiff.report_formats import to_json
from padiff_cli.doctor.run_check import check_run
from padiff_cli.main import main
from padiff_hooks.paired import PairedRuns
from padiff_hooks.training import TrainingRecorder

STEPS = 4
FAULT = 0.1


def steps_of(net, optimizer, steps=STEPS):
    """A training, seeded; yields its losses."""
    batches = torch.Generator().manual_seed(1)
    for step in range(steps):
        x, y = torch.randn(4, 8, generator=batches), torch.randint(0, 3, (4,), generator=batches)
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        yield step, loss.item()


def model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(64, 32), torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
    )
    net.forward = lambda x: net[3](net[2](net[1](x)))
    # A frozen one that is large enough to be written once for all steps.
    net[0].weight.requires_grad_(False)
    return net, torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01)


def train(path, fault=0.0, **options):
    net, optimizer = model()
    with padiff.record(net, path, optimizer=optimizer, **options) as rec:
        for step, _ in steps_of(net, optimizer):
            if fault and step == 2:
                net[1].weight.grad.mul_(1 + fault)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return path


@pytest.fixture(scope="module")
def bucket():
    with s3_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def places(bucket, tmp_path_factory):
    """A pair of runs that differ, in a folder and in each store."""
    bases = {"disk": str(tmp_path_factory.mktemp("disk")), "memory": "memory://test_stores", "s3": bucket}
    found = {}
    for name, base in bases.items():
        found[name] = (train(f"{base}/a/run"), train(f"{base}/b/run", FAULT))
    return found


@pytest.fixture(params=["memory", "s3"])
def place(request, bucket):
    """A place that is empty in each test."""
    base = bucket if request.param == "s3" else "memory:/"
    return f"{base}/{request.node.name.partition('[')[0]}/run"


def text_of(report):
    return json.dumps(to_json(report)), str(report)


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_the_report_is_that_from_disk_byte_for_byte(places, store):
    expected = text_of(padiff.compare_runs(*places["disk"]))
    assert text_of(padiff.compare_runs(*places[store])) == expected
    assert text_of(padiff.compare_runs(places["disk"][0], places[store][1])) == expected
    assert text_of(padiff.compare_runs(*places[store], workers=2)) == expected
    assert "step 2" in expected[1] and "1.1 times" in expected[0]


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_what_is_written_of_a_report_is_that_from_disk(places, store, tmp_path):
    written = {}
    for name in ("disk", store):
        outputs = {kind: tmp_path / f"{name}.{kind}" for kind in ("json", "markdown", "html", "junit")}
        flags = [text for kind, path in outputs.items() for text in (f"--{kind}", str(path))]
        assert main(["compare", *places[name], *flags]) == 1
        written[name] = [path.read_bytes() for path in outputs.values()]
    assert written[store] == written["disk"]


def test_a_step_of_a_rank_is_one_object(places):
    names = objects(places["s3"][0])
    assert [name for name in names if name.startswith("steps/")] == [
        f"steps/{step:08d}/rank_0/step.safetensors" for step in range(STEPS)
    ]
    assert sum(name.startswith("shared/") for name in names) == 1
    assert {"run.json", "finished.json"} <= set(names)
    assert not [name for name in names if "lock" in name or "partial" in name]


def test_paddle_records_into_a_store(bucket, tmp_path):
    paddle = pytest.importorskip("paddle")

    def trained(path):
        paddle.seed(0)
        net = paddle.nn.Linear(4, 3)
        optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
        with padiff.record(net, path, optimizer=optimizer) as rec:
            for step in range(3):
                net(paddle.to_tensor(np.full((2, 4), step, np.float32))).mean().backward()
                optimizer.step()
                optimizer.clear_grad()
                rec.try_dump()
        return path

    pairs = [(trained(f"{base}/a/run"), trained(f"{base}/b/run")) for base in (tmp_path, f"{bucket}/paddle")]
    disk, stored = (text_of(padiff.compare_runs(*map(str, pair))) for pair in pairs)
    assert stored == disk
    assert '"passed": true' in disk[0]


def test_a_step_that_is_missing_is_left_out(place):
    reference, candidate = train(f"{place}/a"), train(f"{place}/b")
    FsspecStore(candidate).delete("steps/00000001/rank_0/step.safetensors")
    assert padiff.open_run(candidate).numbers() == [0, 2, 3]
    report = padiff.compare_runs(reference, candidate)
    assert report.passed
    assert report.coverage.steps == (0, 2, 3)


def two_ranks(path, toy):
    info, step = toy
    writers = [StoreWriter(run_folder(path, "run"), info, rank=rank, storage=Storage(pack=True)) for rank in (0, 1)]
    for number in range(3):
        for rank, writer in enumerate(writers):
            writer.add_step(step(number, rank))
    for writer in reversed(writers):
        writer.close()


@pytest.fixture
def toy():
    from dataclasses import replace

    from kit.records import toy_info, toy_steps

    steps = toy_steps(range(3))
    return replace(toy_info(), world_size=2), lambda number, rank: replace(steps[number], rank=rank)


def test_a_step_is_whole_when_all_ranks_are_there(place, toy):
    two_ranks(place, toy)
    run = padiff.open_run(place)
    assert run.numbers() == [0, 1, 2]
    assert [step.rank for step in run.steps(1)] == [0, 1]
    FsspecStore(place).delete("steps/00000001/rank_1/step.safetensors")
    assert run.numbers() == [0, 2]
    with pytest.raises(RunFolderError, match=r"step 1 of .* is not whole: of 2 ranks 0 put theirs"):
        run.steps(1)
    health = check_run(padiff.open_run(place), run_folder(place, "run"))
    assert any("step 1 can't be read: of 2 ranks only 0 wrote it" in text for text in health.damaged)


def test_two_runs_are_watched_while_they_are_recorded(place):
    train(f"{place}/a")
    pairs = PairedRuns(f"{place}/a", f"{place}/b")
    assert list(pairs.poll()) == [] and not pairs.started.candidate
    net, optimizer = model()
    seen = []
    with padiff.record(net, f"{place}/b", optimizer=optimizer) as rec:
        for _ in steps_of(net, optimizer):
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
            rec.flush()
            seen.append([report.coverage.steps for report in pairs.poll()])
            assert not pairs.finished()
    assert seen == [[(step,)] for step in range(STEPS)]
    assert pairs.finished()


def test_the_commands_take_it(places, tmp_path, capsys):
    assert main(["doctor", places["s3"][0]]) == 0
    assert main(["show", places["s3"][0]]) == 0
    assert "This run is whole" in capsys.readouterr().out
    assert main(["watch", *places["s3"], "--logdir", str(tmp_path / "tb")]) == 1
    assert main(["compare", places["s3"][0], places["disk"][0]]) == 0


def test_a_damaged_object_is_named(place, capsys):
    train(place)
    store = FsspecStore(place)
    data = store.get("steps/00000002/rank_0/step.safetensors")
    store.write("steps/00000002/rank_0/step.safetensors", data[:-100])
    assert main(["doctor", place]) == 1
    assert "step 2" in capsys.readouterr().out.partition("damaged:")[2]


def test_a_callback_records_into_it_and_compares_with_it(place):
    train(f"{place}/a")
    net, optimizer = model()
    training = TrainingRecorder(f"{place}/b", reference=f"{place}/a")
    training.start(net, [optimizer])
    losses = steps_of(net, optimizer)

    def whole():
        for _ in range(STEPS):
            training.begin_batch()
            step, _ = next(losses)
            if step == 2:
                net[1].weight.grad.mul_(1 + FAULT)
            optimizer.step()
            training.end_batch()
            training.end_step()
            optimizer.zero_grad()
        training.finish()

    with pytest.warns(RuntimeWarning, match="step 2, grad: 1.weight"):
        whole()
    assert padiff.open_run(f"{place}/b").numbers() == list(range(STEPS))


def test_it_is_resumed_and_overwritten(place):
    train(place)
    with pytest.raises(RunFolderError, match="holds a run already"):
        train(place)
    identity = padiff.open_run(place).info.identity
    train(place, existing="resume", start_step=2)
    assert padiff.open_run(place).numbers() == [0, 1, 2, 3, 4, 5]
    assert padiff.open_run(place).info.identity == identity
    train(place, existing="overwrite", start_step=7)
    assert padiff.open_run(place).numbers() == [7, 8, 9, 10]
    assert padiff.open_run(place).info.identity != identity


def test_packs_are_read_and_trainings_start_from_it(place):
    train(place, replay_every_n_steps=2)
    run = padiff.open_run(place)
    assert list(run.packs) == [0, 2]
    other = model()[0]
    with torch.no_grad():
        other[1].weight.zero_()
    padiff.start_from(place, other)
    np.testing.assert_array_equal(other[1].weight.detach().numpy(), model()[0][1].weight.detach().numpy())
    assert len(list(padiff.batches(place, framework="torch"))) > 0


def test_max_bytes_holds(place):
    train(place, max_bytes=90_000, detail="full")
    there = FsspecStore(place).list()
    assert sum(there.values()) <= 90_000
    assert padiff.open_run(place).numbers()[0] == 0


# -- the lock ------------------------------------------------------------------------------------------------------


def test_a_second_recorder_is_refused(place):
    net, optimizer = model()
    refused = pytest.raises(RunFolderError, match="is being recorded into: another recorder of this process")
    with padiff.record(net, place, optimizer=optimizer), refused:
        train(place, existing="overwrite")
    train(place, existing="overwrite")


@pytest.mark.parametrize(("owner", "refused"), [("dead", False), ("elsewhere", True), ("elsewhere, dead", False)])
def test_the_lock_of_a_killed_process_is_taken_over(place, owner, refused):
    content = {"pid": 2**22 + 1, "started": "1", "id": "other", "since": time.time(), "alive": time.time()}
    if owner == "dead":
        from padiff.dump.lock import machine

        content["machine"] = machine()
    else:
        content["machine"] = "another"
    if owner.endswith("dead"):
        content["alive"] = time.time() - DEAD - 1
    place = f"{place}/{owner.replace(', ', '-')}"
    FsspecStore(place).write(".rank_0.lock", json.dumps(content).encode())
    if refused:
        with pytest.raises(RunFolderError, match=r"on another machine.*counts as ended after 90 seconds"):
            train(place)
    else:
        train(place)
        assert padiff.open_run(place).numbers() == list(range(STEPS))


def test_a_sign_of_life_under_way_does_not_put_a_released_lock_back(monkeypatch):
    monkeypatch.setattr("padiff.dump.lock.BEAT", 0.01)
    under_way = threading.Event()
    write = RemotePath.write_bytes

    def slow(path, content):
        under_way.set()
        time.sleep(0.3)
        write(path, content)

    monkeypatch.setattr(RemotePath, "write_bytes", slow)
    lock = StoreLock.acquire(run_folder("memory://released/run", "path"), 0)
    assert under_way.wait(10)
    lock.release()
    time.sleep(0.5)
    assert not objects("memory://released/run")


def test_an_object_is_put_only_where_there_is_none(place):
    store = FsspecStore(place)
    store.write("x", b"1", new=True)
    with pytest.raises(FileExistsError):
        store.write("x", b"2", new=True)
    assert store.get("x") == b"1"


# -- fetching ------------------------------------------------------------------------------------------------------


def names_of_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("padiff-fetch")]


def test_the_next_steps_are_fetched_ahead_and_bounded(place, monkeypatch):
    train(place)
    fetched = []
    get = FsspecStore.get
    monkeypatch.setattr(FsspecStore, "get", lambda self, key: fetched.append(key) or get(self, key))
    run = padiff.open_run(place)
    run.steps(0)
    until = time.monotonic() + 10
    while len(fetched) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(fetched) == [f"steps/{step:08d}/rank_0/step.safetensors" for step in range(3)]
    run.steps(1)
    run.steps(2)
    run.steps(3)
    assert len(fetched) == STEPS  # each once
    until = time.monotonic() + 10
    while names_of_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert names_of_threads() == []  # though the run is still held
    fetched.clear()
    monkeypatch.setattr(safetensors, "_AHEAD", 1)
    run = padiff.open_run(place)
    run.steps(0)
    time.sleep(0.1)
    assert fetched == ["steps/00000000/rank_0/step.safetensors"]


def test_a_tensor_of_an_object_that_was_let_go_is_read_by_its_range(place, monkeypatch):
    train(place, detail="full")
    run = padiff.open_run(place)
    run._fetching.keep = 1
    record = next(record for record in run.steps(0)[0].records if record.stage == "grad")
    expected = np.array(record.value)
    run.steps(1)
    ranges = []
    get_range = FsspecStore.get_range
    monkeypatch.setattr(FsspecStore, "get", None)
    monkeypatch.setattr(FsspecStore, "get_range", lambda *args: ranges.append(args[1:]) or get_range(*args))
    np.testing.assert_array_equal(record.source.read(), expected)
    assert [(key, end - start) for key, start, end in ranges] == [
        ("steps/00000000/rank_0/step.safetensors", expected.nbytes)
    ]
    monkeypatch.undo()
    time.sleep(1.1 if place.startswith("s3") else 0)
    store = FsspecStore(place)
    store.write("steps/00000000/rank_0/step.safetensors", store.get("steps/00000001/rank_0/step.safetensors"))
    with pytest.raises(TensorFileError, match="recorded again"):
        record.source.read()


# -- what is refused -----------------------------------------------------------------------------------------------


def test_steps_of_many_files_are_refused():
    with pytest.raises(UsageError, match=r"in a store a step is one object.*leave pack=False away"):
        padiff.record(model()[0], "memory://x/run", pack=False)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://", "memory://", "s3://bucket/a/../b"])
def test_a_place_has_to_be_named(url):
    with pytest.raises(UsageError, match="has to name a bucket and a place in it"):
        run_folder(url, "run")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"pip install 'padiff-hooks\[stores\]'"):
        padiff.open_run("s3://bucket/run")


def test_what_is_not_there_is_said(bucket, places):
    with pytest.raises(RunFolderError, match=r"there is no run s3://bucket/none: it has no run.json"):
        padiff.open_run(f"{bucket}/none")
    with pytest.raises(RunFolderError, match="Below it there are the runs run"):
        padiff.open_run(f"{bucket}/a")
    with pytest.raises(RunFolderError, match=f"give {places['s3'][0]}"):
        padiff.open_run(f"{places['s3'][0]}/steps/00000000")
    with pytest.raises(RunFolderError, match="bucket does not exist"):
        train("s3://no-such-bucket/run")


def test_file_systems_are_written_aside_and_renamed(tmp_path):
    store = FsspecStore(f"file://{tmp_path}/run")
    store.write("steps/1/x", b"one")
    store.write("steps/1/x", b"two")
    assert store.get("steps/1/x") == b"two"
    assert store.get_range("steps/1/x", 1, 10) == b"wo"
    assert store.list("steps") == {"steps/1/x": 3}
    with pytest.raises(FileExistsError):
        store.write("steps/1/x", b"three", new=True)
    store.delete("steps/1/x")
    store.delete("steps/1/x")
    assert store.list() == {}


AT_EXIT = """
import atexit
from padiff.dump.safetensors import Fetching
from padiff.dump.store import run_folder
from concurrent.futures import ThreadPoolExecutor
path = run_folder("memory://bucket/run", "dir_path") / "steps"
path.write_bytes(b"values")
def at_exit():
    fetching = Fetching()
    fetching.expect({path: 6})
    print(fetching.fetch(path))
atexit.register(at_exit)
"""


def test_objects_are_fetched_at_the_end_of_the_interpreter_which_starts_no_threads():
    done = run_child([sys.executable, "-c", AT_EXIT])
    assert "b'values'" in done.stdout and not done.stderr, done.stderr

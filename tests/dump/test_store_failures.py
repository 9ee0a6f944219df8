"""A store that fails or is slow costs records, and never the training."""

from __future__ import annotations

import json
import threading
import time
import warnings

import pytest
import torch

import padiff
from dump.stores import s3_server
from padiff.dump import remote_write, store
from padiff.dump.store import FsspecStore, StoreError
from padiff.errors import UnwritableFolderError

STEPS = 6


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Steps are tried again without long pauses."""
    monkeypatch.setattr(remote_write, "PAUSES", (0.01, 0.01))


@pytest.fixture
def place(request):
    return f"memory://failures/{request.node.name}"


def train(path=None, each=lambda step: None, **options):
    """A seeded training, recorded or not; its losses to the bit, and the parameters after it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(1)
    recorder = padiff.record(net, path, optimizer=optimizer, **options) if path is not None else None
    losses = []
    if recorder is not None:
        recorder.__enter__()
    for step in range(STEPS):
        x, y = torch.randn(4, 8, generator=batches), torch.randint(0, 3, (4,), generator=batches)
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if recorder is not None:
            recorder.try_dump()
        each(step)
    if recorder is not None:
        recorder.__exit__(None, None, None)
    return losses, [parameter.detach().clone() for parameter in net.parameters()]


@pytest.fixture(scope="module")
def plain():
    return train()


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1]))


class Failing:
    """Puts of some steps fail: each of the first so many times."""

    def __init__(self, monkeypatch, steps, times=10**6):
        self.steps, self.times, self.tried = {f"steps/{step:08d}/" for step in steps}, times, 0
        self._put = FsspecStore.write
        failing = self
        monkeypatch.setattr(FsspecStore, "write", lambda *args, **options: failing.put(*args, **options))

    def put(self, own, key, data, **options):
        if any(key.startswith(step) for step in self.steps):
            self.tried += 1
            if self.tried <= self.times:
                raise StoreError(f"{own.url}: 503 Slow Down")
        self._put(own, key, data, **options)


def finished(place):
    return json.loads(FsspecStore(place).get("finished.json"))


def test_steps_that_fail_are_left_out(place, plain, monkeypatch):
    failing = Failing(monkeypatch, [1, 3])
    with pytest.warns(RuntimeWarning, match=r"step 1 is not in memory://.*503 Slow Down.*The training goes on") as said:
        found = train(place, each=lambda step: time.sleep(0.1))
    assert_same(found, plain)
    assert len([w for w in said if "503" in str(w.message)]) == 1
    assert failing.tried == 2 * (1 + len(remote_write.PAUSES))
    assert padiff.open_run(place).numbers() == [0, 2, 4, 5]
    lost = finished(place)["lost"]
    assert (lost["steps"], lost["count"]) == ([1, 3], 2)
    assert "503 Slow Down" in lost["why"]


def test_a_store_that_recovers_loses_nothing(place, plain, monkeypatch):
    Failing(monkeypatch, [2], times=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(place)
    assert_same(found, plain)
    assert padiff.open_run(place).numbers() == list(range(STEPS))
    assert finished(place) == {"schema_version": 1}


def test_all_steps_fail(place, plain, monkeypatch):
    Failing(monkeypatch, range(STEPS))
    with pytest.warns(RuntimeWarning, match="step 0 is not in"):
        found = train(place)
    assert_same(found, plain)
    assert padiff.open_run(place).numbers() == []
    assert finished(place)["lost"]["count"] == STEPS


def test_a_store_that_does_not_answer_at_the_start_costs_records_only(place, plain, monkeypatch):
    def put(own, key, data, **options):
        raise StoreError("no route to host")

    monkeypatch.setattr(FsspecStore, "write", put)
    with pytest.warns(RuntimeWarning, match="nothing is recorded, the training goes on.*no route to host"):
        found = train(place)
    assert_same(found, plain)


def test_a_store_that_refuses_at_the_start_is_an_error_at_once(place, monkeypatch):
    def put(own, key, data, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(FsspecStore, "write", put)
    with pytest.raises(UnwritableFolderError, match="Access Denied"):
        train(place)


def test_a_slow_store_is_waited_for_once_and_then_steps_are_left_out(place, plain, monkeypatch):
    taken, patience = 0.4, 0.5
    put = FsspecStore.write

    def slow(own, key, data, **options):
        if key.startswith("steps/"):
            time.sleep(taken)
        put(own, key, data, **options)

    monkeypatch.setattr(FsspecStore, "write", slow)
    monkeypatch.setattr(remote_write, "PATIENCE", patience)
    begin, ends = time.monotonic(), []
    with pytest.warns(RuntimeWarning, match="takes steps more slowly than the training makes them"):
        found = train(place, each=lambda step: ends.append(time.monotonic()))
    assert_same(found, plain)
    # STEPS - 2 puts would be waited for without a limit.
    assert ends[-1] - begin < patience + 0.5 + 0.1 * STEPS
    there, lost = padiff.open_run(place).numbers(), finished(place)["lost"]["steps"]
    assert lost
    assert sorted(there + lost) == list(range(STEPS))


def test_a_store_that_hangs_ends_the_training_in_time(place, plain, monkeypatch):
    put, ended = FsspecStore.write, threading.Event()

    def hanging(own, key, data, **options):
        if key.startswith("steps/00000002"):
            ended.wait(10)
        put(own, key, data, **options)

    monkeypatch.setattr(FsspecStore, "write", hanging)
    monkeypatch.setattr(remote_write, "PATIENCE", 0.1)
    monkeypatch.setattr(remote_write, "CLOSING", 0.5)
    before, begin = set(threading.enumerate()), time.monotonic()
    with pytest.warns(RuntimeWarning, match="is not in"):
        found = train(place, each=lambda step: time.sleep(0.05))
    assert time.monotonic() - begin < 3
    assert_same(found, plain)
    # Its thread ends as soon as the store answers, though another step waited for it and nobody closes it again.
    ended.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "padiff-writer":
            thread.join(10)
            assert not thread.is_alive()


def test_a_lost_step_is_said_by_the_doctor(place, monkeypatch, capsys):
    from padiff_cli.main import main

    Failing(monkeypatch, [1])
    with pytest.warns(RuntimeWarning, match="step 1"):
        train(place)
    main(["doctor", place])
    assert "1 step could not be written into the store" in capsys.readouterr().out


def test_a_client_is_made_once_for_an_environment(place, monkeypatch):
    def client(at=place):
        return FsspecStore(at)._open()[0]

    first = client()
    assert client() is client(f"{place}/other") is first
    assert client("memory://another/run") is not first
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    second = client()
    assert second is not first and client() is second

    def refused(self, *args, **options):
        raise PermissionError

    monkeypatch.setattr(type(second), "cat_file", refused)
    with pytest.raises(PermissionError):
        FsspecStore(place).get("x")
    assert client() is not second


@pytest.mark.slow
def test_a_server_that_goes_away_costs_records_only(plain, monkeypatch):
    monkeypatch.setattr(store, "OPERATION", 1.0)
    monkeypatch.setattr(remote_write, "PAUSES", ())
    monkeypatch.setattr(remote_write, "CLOSING", 2.0)
    with s3_server() as (url, server):

        def stop(step):
            if step == 2:
                time.sleep(0.5)
                server.stop()

        with pytest.warns(RuntimeWarning, match="is not in s3://bucket/run"):
            found = train(f"{url}/run", each=stop)
    assert_same(found, plain)

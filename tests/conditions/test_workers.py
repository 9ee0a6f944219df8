"""DataLoader workers, forked and spawned, while a run is recorded into a folder."""

from __future__ import annotations

import multiprocessing.spawn
import os

import paddle
import pytest
import torch
from kit.forking import interpreter
from kit.frameworks import PADDLE, TORCH

import padiff

from .loops import Clipping
from .samples import Numbers
from .training import OPTIONS, assert_neutral, counts, train


class PaddleNumbers(Numbers, paddle.io.Dataset):
    pass


class Loading(Clipping):
    """Batches from two workers; the fault shuffles."""

    context: str | None = None

    def optimize(self):
        self.makers, self.writers = set(), set()
        self.batches = None
        return super().optimize()

    def loader(self):
        workers = 2 if self.context is not None else 0
        if self.kit.name == "torch":
            more = {"generator": torch.Generator().manual_seed(0)} if self.fault else {}
            return torch.utils.data.DataLoader(
                Numbers(), 6, self.fault, num_workers=workers, multiprocessing_context=self.context or None, **more
            )
        order = range(23, -1, -1) if self.fault else range(24)
        sampler = paddle.io.BatchSampler(sampler=list(order), batch_size=6)
        return paddle.io.DataLoader(
            PaddleNumbers(), batch_sampler=sampler, num_workers=workers, use_shared_memory=False
        )

    def batch(self, number, shape=(6, 4), classes=3):
        if self.batches is None:  # in the loop: the workers start while the recorder and its thread are there
            self.batches = iter(self.loader())
        x, y, about = next(self.batches)
        self.makers |= {int(pid) for pid in about[:, 0]}
        self.writers |= {int(count) for count in about[:, 1]}
        if number == self.steps - 1:
            assert next(self.batches, None) is None
        return x, y


class Forked(Loading):
    context = "fork"


class Spawned(Loading):
    context = "spawn"


# paddle.io starts its workers by fork only. A worker knows nothing of the detail: that two of them are spawned once is
# enough.
@pytest.mark.parametrize(
    ("kit", "way", "detail"),
    [(TORCH, Forked, "sketch"), (TORCH, Spawned, "full"), (PADDLE, Forked, "full"), (PADDLE, Forked, "sketch")],
    ids=["torch, fork", "torch, spawn", "paddle, fork", "paddle, fork, sketch"],
)
def test_with_workers_nothing_is_lost_and_nothing_travels(kit, way, detail, tmp_path, monkeypatch):
    if way is Spawned:  # they have torch already
        monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(interpreter()))
    plain, options = train(Loading(kit)), OPTIONS[detail]
    training = way(kit)
    recorded = train(training, tmp_path / "run", options)
    assert_neutral(plain, recorded)
    assert os.getpid() not in training.makers
    assert len(training.makers) == 2
    assert training.writers == {0}  # no writer's thread in a worker
    assert recorded.run.numbers() == [0, 1, 2, 3]
    assert recorded.run.finished()
    for number in recorded.run.numbers():
        assert sum(counts(recorded.run, number).values()) == 4 + 4 + 4 + 4 + 4 + 1 + 1 + 1
    # The workers did not keep the folder: it can be gone on with at once.
    again = train(Loading(kit), tmp_path / "run", options, existing="resume", start_step=4)
    assert again.run.numbers() == list(range(8))


@pytest.mark.parametrize(("kit", "detail"), [(TORCH, "full"), (PADDLE, "sketch")], ids=["torch", "paddle"])
def test_batches_in_another_order_are_found(kit, detail, tmp_path):
    options = OPTIONS[detail]
    train(Loading(TORCH), tmp_path / "right", options)
    train(Forked(kit), tmp_path / "same", options)
    train(Forked(kit, fault=True), tmp_path / "wrong", options)
    report = padiff.compare_runs(tmp_path / "right", tmp_path / "same")
    assert report.passed, report.first_diff.message
    first = padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "input"), first.message

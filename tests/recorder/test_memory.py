"""Nothing is kept longer than it has to be, and no thread stays. All without the garbage collector's help."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
import weakref

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import hook_count
from kit.nets import batch, mlp, one_step

import padiff
from padiff.errors import UsageError


@pytest.fixture(autouse=True)
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Payload:
    """Something that only the graph holds."""


class TorchKeep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, payload):
        ctx.payload = payload
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class PaddleKeep(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x, payload):
        ctx.payload = payload
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Watched:
    """A net that leaves a weak reference to a part of each graph, and to an activation."""

    def __new__(cls, kit):
        keep = TorchKeep if kit.name == "torch" else PaddleKeep

        class Net(kit.Net):
            def build(self):
                self.first, self.last, self.graphs, self.activations = kit.Linear(4, 8), kit.Linear(8, 3), [], []

            def forward(self, x):
                payload = Payload()
                self.graphs.append(weakref.ref(payload))
                y = self.first(x)
                self.activations.append(weakref.ref(y))
                return self.last(keep.apply(y, payload))

        return Net()


def alive(references):
    return sum(reference() is not None for reference in references)


def test_the_watching_itself_tells_a_living_graph_from_a_dead_one(kit):
    model = Watched(kit)
    output = model(batch(kit)[0])
    assert alive(model.graphs) == 1
    del output
    assert alive(model.graphs) == 0


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_a_recorded_steps_graph_dies_with_the_last_reference_to_it(kit, backward, with_optimizer):
    model = Watched(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    with padiff.record(model, optimizer=optimizer if with_optimizer else None) as rec:
        for _ in range(3):
            loss = kit.cross_entropy(model(x), y)
            if backward:
                loss.backward()
                optimizer.step()
                kit.zero(optimizer)
            del loss
            # At once: before the step ends, not only after it.
            assert alive(model.graphs) == 0
            assert alive(model.activations) == 0
            rec.try_dump()


def test_a_graph_that_outlives_the_recording_dies_afterwards_just_the_same(kit):
    model = Watched(kit)
    with padiff.record(model):
        output = model(batch(kit)[0])
    assert alive(model.graphs) == 1
    output.sum().backward()
    del output
    assert alive(model.graphs) == 0


def test_a_backward_after_the_end_of_its_step_is_harmless(kit):
    model = mlp(kit)
    x, _ = batch(kit)
    expected = kit.autograd(model(x).sum(), list(model.parameters()))
    with padiff.record(model) as rec:
        output = model(x)
        rec.try_dump()
        output.sum().backward()
    np.testing.assert_array_equal(kit.numpy(model[0].weight.grad), expected[0])
    assert [r for r in rec.run.steps(0)[0].records if r.stage == "backward"] == []


@pytest.mark.parametrize("stored", [True, False])
def test_what_was_recorded_may_go_while_recorder_and_run_stay(kit, tmp_path, stored):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    alive = [weakref.ref(each) for each in (model, model[0], *model.parameters(), optimizer)]
    with padiff.record(model, tmp_path / "run" if stored else None, optimizer=optimizer) as rec:
        for _ in range(2):
            one_step(kit, model, optimizer, *batch(kit), rec)
    shown, run = str(rec), rec.run or padiff.open_run(tmp_path / "run")
    del model, optimizer
    if kit.name == "paddle":
        gc.collect()  # a paddle layer refers to itself, recorded or not
    assert [each for each in alive if each() is not None] == []
    assert (str(rec), rec.step, rec.info.layers[1].path, run.numbers()) == (shown, 2, "0", [0, 1])
    assert not rec.try_dump() and not rec.due
    with pytest.raises(UsageError, match="this recorder is closed"):
        rec.open()


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_recorder_itself_dies_with_its_last_reference(kit, tmp_path, in_memory):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, None if in_memory else tmp_path / "run", optimizer=optimizer) as rec:
        one_step(kit, model, optimizer, *batch(kit), rec)
    reference = weakref.ref(rec)
    del rec
    assert reference() is None


def test_a_step_that_is_written_is_let_go(kit, tmp_path):
    model = mlp(kit, (64, 256, 3))
    optimizer = kit.sgd(model.parameters())
    arrays = []

    def look(step):
        arrays.extend(weakref.ref(r.value) for r in step.records if r.stage == "weight")
        arrays.extend(weakref.ref(r.source.array) for r in step.records if r.stage == "forward")

    with padiff.record(model, tmp_path / "run", optimizer=optimizer, on_written=look) as rec:
        for _ in range(3):
            one_step(kit, model, optimizer, *batch(kit, (6, 64)), rec)
        rec.flush()
        assert len(arrays) > 10
        assert alive(arrays) == 0


def numpy_memory():
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
    return sum(trace.size for trace in traces)


def test_sixteen_recorded_steps_take_no_more_memory_than_four(kit, tmp_path):
    model = mlp(kit, (64, 512, 3))
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit, (64, 64))
    taken = []
    with padiff.record(model, tmp_path / "run", optimizer=optimizer) as rec:
        tracemalloc.start()
        try:
            for _ in range(16):
                one_step(kit, model, optimizer, x, y, rec)
                rec.flush()
                taken.append(numpy_memory())
        finally:
            tracemalloc.stop()
    step_size = sum(r.value.nbytes for r in padiff.open_run(tmp_path / "run").steps(0)[0].records)
    assert step_size > 900_000
    assert max(taken[4:]) - taken[3] < 0.01 * step_size


@pytest.mark.parametrize("options", [{}, {"pack": True}, {"detail": "sketch"}], ids=["files", "packed", "sketch"])
def test_memory_that_is_used_again_holds_no_older_step(kit, tmp_path, options):
    """Tensors large enough for the pool; the disk lags behind, so that steps of several ages are under way."""

    def train(folder, **rest):
        kit.seed(3)
        model = kit.Sequential(kit.Linear(300, 200), kit.ReLU(), kit.Linear(200, 300))
        optimizer = kit.adam(model.parameters())
        with padiff.record(model, folder, optimizer=optimizer, **options, **rest) as recorder:
            for number in range(7):
                x = kit.tensor(np.random.default_rng(number).normal(size=(150, 300)))
                model(x).pow(2).mean().backward()
                optimizer.step()
                kit.zero(optimizer)
                recorder.try_dump()
        return recorder

    in_memory = train(None).run
    train(tmp_path / "run", on_written=lambda step: time.sleep(0.02 * (step.number % 3)))
    on_disk = padiff.open_run(tmp_path / "run")
    assert on_disk.numbers() == in_memory.numbers() == list(range(7))
    for number in range(7):
        for reference, candidate in zip(
            in_memory.steps(number)[0].records, on_disk.steps(number)[0].records, strict=True
        ):
            assert reference.site == candidate.site
            values = (r.value if r.sketch is None else r.sketch.row() for r in (reference, candidate))
            assert np.array_equal(*values), (number, reference.site)


@pytest.fixture
def threads():
    """Those of padiff that the test started: of other tests some may still wait for a store."""
    before = set(threading.enumerate())
    return lambda: [one for one in threading.enumerate() if one.name.startswith("padiff") and one not in before]


def test_the_writers_thread_ends_with_the_with(kit, tmp_path, threads):
    model = mlp(kit)
    with padiff.record(model, tmp_path / "run"):
        assert len(threads()) == 1
        model(batch(kit)[0])
    assert threads() == []


def test_the_writers_thread_ends_after_an_exception_too(kit, tmp_path, threads):
    with pytest.raises(KeyError), padiff.record(mlp(kit), tmp_path / "run"):
        raise KeyError
    assert threads() == []


def test_recording_in_memory_starts_no_thread(kit, threads):
    with padiff.record(mlp(kit)):
        assert threads() == []


def test_a_recorder_that_is_forgotten_without_being_closed_leaves_the_model_usable(kit):
    model = mlp(kit)
    recorder = padiff.record(model)
    recorder.open()
    del recorder
    with padiff.record(model) as rec:
        model(batch(kit)[0])
    assert rec.run.numbers() == [0]
    assert hook_count(kit, model) == 0

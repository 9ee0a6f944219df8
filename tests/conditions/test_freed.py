"""Tensors whose memory is gone, smaller than they are, or in other tensors: left out, and the training goes on."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks
from kit.frameworks import PADDLE, TORCH

import padiff
from padiff.frameworks.base import UncopiedError
from padiff.frameworks.torch import FRAMEWORK
from padiff.frameworks.torch.tensors import memory_of
from padiff.sketches.sketch import sketch_of

from .freed import KINDS, MADE, Elsewhere, Flat, part, without_memory
from .training import assert_neutral, counts, train

of_made = pytest.mark.parametrize("name", MADE)


@pytest.fixture(scope="module", autouse=True)
def survived(tmp_path_factory):
    """Reading memory that is gone ends a process: not this one."""
    command = [*python_with_frameworks(), "-m", "conditions.freed", str(tmp_path_factory.mktemp("freed"))]
    process = run_child(command)
    assert process.returncode == 0, f"after {process.stdout.splitlines()[-1:]}: {process.stderr[-1500:]}"
    assert len(process.stdout.splitlines()) == 2 * len(KINDS)


@of_made
def test_the_training_is_the_same_and_all_else_is_recorded(name, options, tmp_path):
    plain = train(KINDS[name](TORCH))
    with pytest.warns(RuntimeWarning, match="1 tensor") as reported:
        recorded = train(KINDS[name](TORCH), tmp_path / "run", options)
    assert len(reported) == 1
    assert_neutral(plain, recorded)
    for number in recorded.run.numbers():
        (step,) = recorded.run.steps(number)
        (note,) = step.notes
        assert f"1 tensor(s) of 1 layer(s) are not recorded (made): {MADE[name][1]}" in note
        assert counts(recorded.run, number) == {
            "input": 1, "weight": 4, "forward": 4, "loss": 1, "backward": 4, "grad": 4, "update": 4, "rate": 1
        }  # fmt: skip


@of_made
def test_there_is_no_view_of_such_memory_and_no_copy(name):
    tensor = MADE[name][0]()
    assert memory_of(tensor) is None
    assert FRAMEWORK.tensors.live(tensor) is None
    for copy in (FRAMEWORK.tensors.copy, FRAMEWORK.tensors.sample):
        with pytest.raises(UncopiedError, match=MADE[name][1]):
            copy(tensor)


def test_parameters_whose_memory_comes_and_goes(options, tmp_path):
    """Where it is known from the steps before; a step in which nothing steps looks at the parameters when it ends."""

    unrecorded = Flat(TORCH)
    plain = train(unrecorded)
    training = Flat(TORCH)
    recorded = train(training, tmp_path / "run", options)
    assert_neutral(plain, recorded)
    run, after = recorded.run, unrecorded.after
    for reference, candidate in zip(after, training.after):
        np.testing.assert_array_equal(candidate, reference)
    assert [counts(run, number).get("update", 0) for number in run.numbers()] == [0, 4] * 3
    for number in run.numbers()[1:]:
        (record,) = [r for r in run.steps(number)[0].records if r.site == "0/weight/weight"]
        before = after[number - 1][: 64 * 80]
        assert record.shape == (80, 64)
        if options:
            assert record.source.sketch.maximum <= before.max()
            assert record.source.sketch.l2 == pytest.approx(np.linalg.norm(before), rel=0.1)
        else:
            np.testing.assert_array_equal(record.value.reshape(-1), before)


def test_where_memory_is_says_whether_a_view_of_it_still_holds():
    def of(change):
        tensor = torch.zeros(64, 64)
        before = FRAMEWORK.tensors.memory(tensor)
        assert FRAMEWORK.tensors.memory(tensor) == before
        tensor += 1
        assert FRAMEWORK.tensors.memory(tensor) == before
        change(tensor)
        return FRAMEWORK.tensors.memory(tensor) == before

    assert of(lambda t: t.mul_(2))
    assert not of(without_memory)
    assert not of(lambda t: without_memory(t, 64))
    assert not of(lambda t: t.t_())
    assert not of(lambda t: t.resize_(32, 64))
    assert not of(lambda t: t.resize_(640, 64))
    assert not of(lambda t: t.set_(torch.zeros(64, 64)))
    assert not of(lambda t: setattr(t, "data", torch.zeros(64, 64)))


def test_memory_that_begins_where_the_old_one_did_and_is_shorter_is_other_memory():
    """The allocator gives out what it got back, most of the time."""
    for _ in range(20):
        tensor = torch.zeros(300, 400)
        before = FRAMEWORK.tensors.memory(tensor)
        without_memory(without_memory(tensor), 300 * 400 * 4 - 4096)
        assert FRAMEWORK.tensors.memory(tensor) != before
        assert FRAMEWORK.tensors.live(tensor) is None


def test_a_square_weight_that_is_transposed_in_place_is_sketched_as_it_is():
    model = torch.nn.Linear(64, 64, bias=False)
    with padiff.record(model, detail="sketch") as rec:
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            rec.try_dump()
            with torch.no_grad():
                model.weight.t_()
                model.weight.grad.t_()
    first, second = (next(r.source.sketch for r in rec.run.steps(n)[0].records if r.stage == "weight") for n in (0, 1))
    assert sketch_of(model.weight.detach().numpy()).projection.tolist() == first.projection.tolist()
    assert second.projection.tolist() == sketch_of(model.weight.detach().numpy().T).projection.tolist()


@pytest.mark.parametrize("make", [lambda: torch.ones(1).expand(60, 70), lambda: torch.ones(5)[:0], lambda: part()[::7]])
def test_what_has_all_of_its_memory_is_seen(make):
    tensor = make()
    np.testing.assert_array_equal(memory_of(tensor), tensor.clone().numpy())


def test_freed_and_foreign_parameters_are_left_out_and_described(options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 3))
    without_memory(model[1].weight)
    model[1].other = torch.nn.Parameter(Elsewhere(torch.ones(2, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with padiff.record(model, **options) as rec:
            model[0](torch.ones(2, 4)).sum().backward()
            rec.try_dump()
    (step,) = rec.run.steps(0)
    weights = {r.site for r in step.records if r.stage == "weight"}
    assert weights == {"0/weight/weight", "0/weight/bias", "1/weight/bias"}
    assert {note.split("): ")[-1] for note in step.notes} == {
        "tensors of the type Elsewhere have no memory of their own",
        "its memory was freed: 0 bytes are left of the 48 that it needs",
    }
    described = {p.slot: (p.shape, p.dtype, p.trainable) for p in rec.info.layers[2].parameters}
    assert described["weight"] == ((3, 4), "float32", True)
    assert described["other"] == ((2, 3), "float32", True)


class Whole:
    """While the model computes, a whole parameter stands in the place of the one that the optimizer has."""

    def __init__(self, layer):
        self.layer, self.own = layer, layer.weight
        layer.register_forward_pre_hook(self.put)

    def put(self, layer, args):
        layer.weight = torch.nn.Parameter(self.own.detach().clone())

    def take(self):
        self.own.grad, self.layer.weight = self.layer.weight.grad, self.own


def test_gradients_of_parameters_that_others_stood_in_for_are_named(options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    whole = Whole(model[0])
    model.register_forward_pre_hook(lambda model, args: whole.put(model[0], args))  # before the recorder looks
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with padiff.record(model, optimizer=sgd, **options) as rec:
            model(torch.ones(2, 4)).sum().backward()
            whole.take()
            sgd.step()
            rec.try_dump()
    (step,) = rec.run.steps(0)
    assert {r.site for r in step.records if r.stage == "grad"} == {"0/grad/bias"}
    (note,) = step.notes
    assert note.startswith("1 gradient(s) of 1 layer(s) are not recorded (0): the optimizer steps with another tensor")


def test_paddles_distributed_tensors(options, tmp_path):
    """Of each, the part that this process holds."""
    import paddle.distributed as dist

    mesh = dist.ProcessMesh([0], dim_names=["x"])
    model = PADDLE.Linear(200, 100)
    model.weight = dist.shard_tensor(model.weight, mesh, [dist.Shard(0)])
    model.bias = dist.shard_tensor(model.bias, mesh, [dist.Replicate()])
    sgd = PADDLE.sgd(model.parameters())

    def twice():
        with padiff.record(model, tmp_path / "run", optimizer=sgd, **options) as rec:
            for _ in range(2):
                x = dist.shard_tensor(PADDLE.tensor(np.ones((4, 200))), mesh, [dist.Replicate()])
                model(x).mean().backward()
                sgd.step()
                PADDLE.zero(sgd)
                rec.try_dump()

    twice()
    for number in (0, 1):
        (step,) = padiff.open_run(tmp_path / "run").steps(number)
        found = {r.site: r.part for r in step.records if r.stage in ("weight", "grad")}
        assert found.keys() == {f"(root)/{stage}/{slot}" for stage in ("weight", "grad") for slot in ("weight", "bias")}
        kinds = {"(root)/weight/weight": "shard", "(root)/weight/bias": "replica"}
        for site, kind in kinds.items():
            shape = (200, 100) if site.endswith("weight") else (100,)
            assert (found[site].kind, found[site].shape, found[site].offset) == (kind, shape, (0,) * len(shape))
        assert not step.notes
    shapes = {p.slot: (p.shape, p.trainable) for p in padiff.open_run(tmp_path / "run").info.layers[0].parameters}
    assert shapes == {"weight": ((200, 100), True), "bias": ((100,), True)}

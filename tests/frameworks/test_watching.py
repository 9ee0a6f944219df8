"""Whether tensors are what they were: said of the last time that it was noted, not of some time before."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import padiff
from padiff.frameworks import framework_of
from padiff.frameworks.torch import calls


def watched(kit):
    """More than are asked at a time, one of them large."""
    layers = [kit.Linear(100, 100), *(kit.Linear(3, 3) for _ in range(200))]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    watch = framework_of(layers[0]).tensors.watch(parameters)
    assert not watch.same()
    watch.note()
    assert watch.same()
    return watch, parameters


def test_a_tensor_with_other_values_is_the_same(kit):
    watch, parameters = watched(kit)
    framework_of(kit.ReLU()).tensors.write(parameters[5], np.full(parameters[5].shape, 7, np.float32))
    assert watch.same()


@pytest.mark.parametrize("place", [0, 3, 399])
@pytest.mark.parametrize("learning", [True, False])
def test_a_tensor_that_is_frozen_is_another_each_time(kit, place, learning):
    with contextlib.nullcontext() if learning else framework_of(kit.ReLU()).tensors.without_grad():
        _frozen(kit, place)


def _frozen(kit, place):
    watch, parameters = watched(kit)
    freezes = "stop_gradient" if kit.name == "paddle" else "requires_grad"
    for _ in range(3):
        setattr(parameters[place], freezes, not getattr(parameters[place], freezes))
        assert not watch.same()
        watch.note()
        assert watch.same()


CHANGES = {
    "turned": lambda p: p.t_(),
    "other memory": lambda p: setattr(p, "data", p.data.clone()),
    "other shape": lambda p: setattr(p, "data", p.data[:1]),
    "freed": lambda p: p.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 300])
def test_a_tensor_that_lies_otherwise_is_another_each_time(change, place):
    sizes = [100, *([3] * 400)]
    parameters = [torch.nn.Parameter(torch.zeros(size, size)) for size in sizes]
    watch = framework_of(torch.nn.ReLU()).tensors.watch(parameters)
    watch.note()
    with torch.no_grad():
        for _ in range(1 if change in ("freed", "other shape") else 3):
            CHANGES[change](parameters[place])
            assert not watch.same()
            watch.note()
            assert watch.same()


def test_what_only_looks_otherwise_is_the_same_in_both_places():
    parameters = [torch.nn.Parameter(torch.zeros(3, 3)) for _ in range(3)]
    watch = framework_of(torch.nn.ReLU()).tensors.watch(parameters)
    watch.note()
    with torch.autocast("cpu"):
        assert not watch.same()
        watch.note(unchanged=True)
        assert watch.same()
    assert watch.same()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "parameter",
    [
        lambda: torch.nn.parameter.UninitializedParameter(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.zeros(3, 3).to_sparse(),
        lambda: torch.zeros(3, device="meta"),
    ],
    ids=["lazy", "nested", "sparse", "meta"],
)
def test_tensors_of_every_kind_can_be_watched(parameter):
    watch = framework_of(torch.nn.ReLU()).tensors.watch([torch.zeros(3), parameter()])
    watch.note()
    watch.same()


def refuses(*tensors, **options):
    raise TypeError("of a version that asks otherwise")


@pytest.mark.parametrize("guards", [calls.TensorGuards, None, refuses], ids=["guards", "none", "others"])
@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_that_are_frozen_in_turn_are_recorded_as_they_are(autocast, guards, monkeypatch):
    monkeypatch.setattr(calls, "TensorGuards", guards)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(4)))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    with padiff.record(model, detail="sketch", optimizer=optimizer) as rec:
        for step in range(9):
            for k, parameter in enumerate(parameters.values()):
                parameter.requires_grad_(k % 3 != step % 3)
            expected.append({name for name, parameter in parameters.items() if parameter.requires_grad})
            optimizer.zero_grad()
            with torch.autocast("cpu", enabled=autocast):
                loss = model(torch.ones(2, 5)).float().square().mean()
            loss.backward()
            optimizer.step()
            rec.try_dump()
    for step, names in enumerate(expected):
        records = [r for r in rec.run.steps(step)[0].records if r.slot in ("weight", "bias")]
        for stage in ("grad", "update"):
            assert {f"{r.layer}.{r.slot}" for r in records if r.stage == stage} == names, (step, stage)

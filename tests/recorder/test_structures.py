"""Outputs of every shape and dtype."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kit.nets import mlp, recorded, sites

import padiff


@dataclass
class Answer:
    logits: Any
    extra: Any = None
    name: str = "answer"


class ModelOutput(OrderedDict):
    """As transformers has it: a mapping whose items are attributes too."""

    def __getattr__(self, name):
        return self[name]


def record_output(kit, make):
    """Record one forward of a layer that returns what `make` makes of a linear layer's output."""

    class Net(kit.Net):
        def build(self):
            self.fc = kit.Linear(2, 2)

        def forward(self, x):
            return make(self.fc(x))

    model = Net()
    with padiff.record(model) as rec:
        model(kit.tensor(np.ones((3, 2))))
    return rec


CASES = {
    "a tensor": (lambda y: y, ["output.0"]),
    "a tuple": (lambda y: (y, y + 1), ["output.0", "output.1"]),
    "a list": (lambda y: [y, y + 1, y + 2], ["output.0", "output.1", "output.2"]),
    "a dict": (lambda y: {"a": y, "b": y + 1}, ["output.a", "output.b"]),
    "a dataclass": (lambda y: Answer(y, y + 1), ["output.logits", "output.extra"]),
    "a dataclass with None": (lambda y: Answer(y), ["output.logits"]),
    "a ModelOutput": (lambda y: ModelOutput(loss=y.sum(), logits=y), ["output.loss", "output.logits"]),
    "None inside": (lambda y: (None, y, None), ["output.1"]),
    "things that are no tensors": (lambda y: (y, 3, "text", {"n": 1.5}, object()), ["output.0"]),
    "nested": (lambda y: {"a": [y, (y + 1, {"b": y + 2})]}, ["output.a.0", "output.a.1.0", "output.a.1.1.b"]),
    "an empty tuple": (lambda y: (), []),
    "None": (lambda y: None, []),
    "a number": (lambda y: 7, []),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_an_output_has_a_slot_of_its_own(kit, case):
    make, slots = CASES[case]
    rec = record_output(kit, make)
    assert sites(rec, "forward") == ["fc/forward/output.0", *(f"(root)/forward/{slot}" for slot in slots)]


def test_each_slot_holds_its_own_tensor(kit):
    values = recorded(record_output(kit, lambda y: {"a": y, "b": [y + 1, y * 2]}))
    base = values["fc/forward/output.0"]
    np.testing.assert_array_equal(values["(root)/forward/output.a"], base)
    np.testing.assert_array_equal(values["(root)/forward/output.b.0"], base + 1)
    np.testing.assert_array_equal(values["(root)/forward/output.b.1"], base * 2)


def test_each_outputs_gradient_is_its_own(kit):
    class Net(kit.Net):
        def build(self):
            self.fc = kit.Linear(2, 2)

        def forward(self, x):
            y = self.fc(x)
            return {"twice": y * 2, "thrice": y * 3}

    model = Net()
    with padiff.record(model) as rec:
        output = model(kit.tensor(np.ones((3, 2))))
        (output["twice"].sum() * 5 + output["thrice"].sum() * 7).backward()
    values = recorded(rec)
    assert (values["(root)/backward/output.twice"] == 5).all()
    assert (values["(root)/backward/output.thrice"] == 7).all()
    assert (values["fc/backward/output.0"] == 2 * 5 + 3 * 7).all()


def test_an_output_that_contains_itself_does_not_hang(kit):
    def make(y):
        loop = {"y": y}
        loop["self"] = loop
        return loop

    assert "(root)/forward/output.y" in sites(record_output(kit, make), "forward")


DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "int32": np.int32,
    "bool": np.bool_,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_keep_their_dtype_and_values_in_memory_and_in_a_folder(kit, tmp_path, dtype):
    class Cast(kit.Layer):
        def forward(self, x):
            return kit.cast(x, dtype)

    model, x = Cast(), kit.tensor([[-1.25, 0.0], [3.1415926, 1000.0]])
    with padiff.record(model, tmp_path / "run"):
        model(x)
    with padiff.record(model) as rec:
        model(x)
    expected = kit.numpy(kit.cast(x, dtype))
    assert expected.dtype == DTYPES[dtype]
    for run in (rec.run, padiff.open_run(tmp_path / "run")):
        (found,) = [r for r in run.steps(0)[0].records if r.stage == "forward"]
        assert found.dtype == dtype
        assert found.value.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(found.value, expected)


def test_a_model_in_float64_is_recorded_in_float64_at_every_stage(kit):
    model = mlp(kit)
    model.double() if kit.name == "torch" else model.to(dtype="float64")
    with padiff.record(model) as rec:
        (model(kit.tensor(np.ones((2, 4)), "float64")) ** 2).sum().backward()
    dtypes = {r.dtype for r in rec.run.steps(0)[0].records}
    assert dtypes == {"float64"}


def test_values_that_are_not_finite_are_kept(kit):
    class Net(kit.Layer):
        def forward(self, x):
            return x / 0.0

    model = Net()
    with padiff.record(model) as rec:
        model(kit.tensor([1.0, -1.0, 0.0]))
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], [np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 1, 2, 1, 2)], ids=str)
def test_any_shape_is_kept(kit, tmp_path, shape):
    class Net(kit.Layer):
        def forward(self, x):
            return x.reshape(list(shape))

    model, values = Net(), np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    with padiff.record(model, tmp_path / "run"):
        model(kit.tensor(values.reshape(-1)))
    (found,) = [r for r in padiff.open_run(tmp_path / "run").steps(0)[0].records if r.stage == "forward"]
    assert found.shape == found.value.shape == shape
    np.testing.assert_array_equal(found.value, values)


def test_a_view_that_is_not_contiguous_is_recorded_as_it_looks(kit):
    class Net(kit.Layer):
        def forward(self, x):
            return x.transpose(0, 1) if kit.name == "torch" else x.transpose([1, 0])

    model, x = Net(), np.arange(6.0).reshape(2, 3)
    with padiff.record(model) as rec:
        model(kit.tensor(x))
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], x.T)

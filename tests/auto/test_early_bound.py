"""The API level sees functions that were bound before the recording began, and leaves them as they were."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.frameworks.interception import Interception
from padiff.frameworks.paddle.hooks import FunctionHooks, _framework_calls
from padiff.frameworks.torch import FRAMEWORK as TORCH
from padiff.system.guard import RAISING

from .early_bound import CALLS, PaddleModel, TorchModel, paddle_softmax

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
F = paddle.nn.functional


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("PADIFF_API_CHECK", "ON")


def functions():
    """paddle's functions and methods with their code, by where they are; those in C with themselves."""
    found = {}
    for owner, name, _ in _framework_calls():
        function = getattr(owner, name)
        found[str(owner), name] = function, getattr(function, "__code__", None), vars(owner).get(name)
    return found


@pytest.fixture(autouse=True)
def restored():
    before = functions()
    yield
    after = functions()
    assert after.keys() == before.keys()
    for place, was in before.items():
        assert all(now is then for now, then in zip(after[place], was)), place


def record(make, x):
    model = make()
    with padiff.record(model) as rec:
        model(x)
    return rec.run


def called(run):
    (step,) = run.steps(0)
    return [r.slot.removesuffix("().0") for r in step.records if r.stage == "forward" and "()" in r.slot]


RUNS = {
    "torch": lambda: record(TorchModel, torch.tensor(X)),
    "paddle": lambda: record(PaddleModel, paddle.to_tensor(X)),
}


@pytest.mark.parametrize("name", RUNS)
def test_calls_are_seen_however_their_functions_were_bound(name):
    # The last line multiplies and adds, too.
    assert called(RUNS[name]()) == [*CALLS, "mul", "add"]


def test_they_are_paired_across_the_frameworks():
    report = padiff.compare_runs(RUNS["torch"](), RUNS["paddle"]())
    assert report.passed, report.first_diff.message
    slots = [diff.pair.anchor.slot for diff in report if diff.pair.stage == "forward" and diff.compared]
    assert slots == [f"{name}().0" for name in (*CALLS, "mul", "add")] + ["output.0"]


def test_what_is_computed_is_the_same_to_the_bit():
    model, layer = TorchModel(), PaddleModel()
    plain = model(torch.tensor(X)), layer(paddle.to_tensor(X)).numpy()
    with padiff.record(model), padiff.record(layer):
        recorded = model(torch.tensor(X)), layer(paddle.to_tensor(X)).numpy()
    assert torch.equal(plain[0], recorded[0])
    np.testing.assert_array_equal(plain[1], recorded[1])


def test_what_functions_call_themselves_is_not_seen():
    class Net(paddle.nn.Layer):
        def forward(self, x):
            return F.cosine_similarity(x, x) + paddle.sum(F.dice_loss(x.abs(), paddle.to_tensor([[0], [1], [2], [3]])))

    assert called(record(Net, paddle.to_tensor(X))) == ["abs", "sum", "add"]


def test_functions_are_the_same_while_they_are_listened_to():
    softmax, signature, source = F.softmax, inspect.signature(F.softmax), inspect.getsource(F.gelu)
    about = {name: getattr(F.gelu, name) for name in ("__defaults__", "__kwdefaults__", "__doc__", "__qualname__")}
    gelu = inspect.signature(F.gelu)
    with padiff.record(PaddleModel()):
        assert F.softmax is softmax is paddle_softmax
        assert inspect.signature(F.softmax) == signature
        assert inspect.signature(F.gelu) == gelu
        assert inspect.getsource(F.gelu) == source
        assert {name: getattr(F.gelu, name) for name in about} == about


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_listen_may_go_in_any_order(first):
    heard = [[], []]
    listening = [FunctionHooks(lambda name, output, own=own: own.append(name)) for own in heard]
    F.relu(paddle.to_tensor(X))
    listening.pop(first).remove()
    paddle_softmax(paddle.to_tensor(X)) + 1
    listening.pop().remove()
    F.relu(paddle.to_tensor(X))
    assert heard[first] == ["relu"]
    assert heard[1 - first] == ["relu", "softmax", "add"]


def test_what_somebody_else_puts_over_it_meanwhile_stays():
    def own(x, name=None):
        return "mine"

    before, heard = F.relu.__code__, []
    seeing = FunctionHooks(lambda name, output: heard.append(name))
    try:
        F.relu.__code__ = own.__code__
        seeing.remove()
        assert F.relu.__code__ is own.__code__
        assert F.relu(1) == "mine"
    finally:
        F.relu.__code__ = before
    assert not heard


def test_exceptions_and_other_threads():
    heard = []
    seeing = FunctionHooks(lambda name, output: heard.append(name))
    try:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            F.softmax("no tensor")
        thread = threading.Thread(target=lambda: F.relu(paddle.to_tensor(X)))
        thread.start()
        thread.join()
        assert heard == []
        F.relu(paddle.to_tensor(X))
        assert heard == ["relu"]
    finally:
        seeing.remove()


class Hearing:
    guard = RAISING

    def __init__(self):
        self.heard = []

    def enter(self, call):
        self.heard.append(call.caller.f_code.co_name)
        return True

    def exit(self, call, name, output, failed):
        self.heard.append((name, output, failed))


def closing_over(a, b):
    def function(x, /, y=2, *rest, z, w=4, **more):
        return a, b, x, y, rest, z, w, more

    return function


def taking_everything(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize("function", [closing_over(1, 2), taking_everything, lambda called, x=1: (called, x)])
def test_parameters_of_all_kinds_and_free_variables_arrive_as_they_do_else(function):
    module, hearing = types.SimpleNamespace(function=function), Hearing()
    code, signature = function.__code__, inspect.signature(function)
    calls = [((1,), {"z": 3}), ((1, 5, 6, 7), {"z": 3, "w": 1, "q": 0}), ((1, 2), {}), ((), {"x": 2, "called": 1})]

    def results():
        found = []
        for args, kwargs in calls:
            try:
                found.append(function(*args, **kwargs))
            except TypeError as error:
                found.append(str(error))
        return found

    expected = results()
    listening = Interception(module, "function", hearing, "name")
    assert inspect.signature(function) == signature
    assert results() == expected
    listening.remove()
    assert function.__code__ is code
    assert [each for each in hearing.heard if each != "results"] == [
        ("name", result, False) for result in expected if not isinstance(result, str)
    ]


def test_a_listener_gets_the_arguments_by_name_with_the_defaults():
    def around(*args, **kwargs):
        return plain(*args, **kwargs)

    def plain(x, y=2, *, z=3):
        return x

    found = []

    class Asking(Hearing):
        def enter(self, call):
            found.append(call.arguments())
            return False

    around = functools.wraps(plain)(around)
    for function in (plain, around, lambda x, y=2, *, z=3: x):
        listening = Interception(types.SimpleNamespace(function=function), "function", Asking(), "name")
        function(1)
        function(1, z=5)
        function(y=4, x=1)
        listening.remove()
        # What is called by what is listened to is heard, too.
        assert found[-3:] == [{"x": 1, "y": 2, "z": 3}, {"x": 1, "y": 2, "z": 5}, {"x": 1, "y": 4, "z": 3}]
    assert len(found) == 9


def test_a_function_is_given_the_same_code_each_time_it_is_listened_to():
    """Else whatever is compiled for a code object (torch.compile) would be compiled anew in each recorded step."""

    def function(x):
        return x

    module, before = types.SimpleNamespace(function=function), function.__code__
    codes = []
    for _ in range(3):
        listenings = [Interception(module, "function", Hearing(), "name") for _ in range(2)]
        codes.append(function.__code__)
        for listening in listenings:
            listening.remove()
        assert function.__code__ is before
    assert codes[0] is codes[1] is codes[2] is not before

    def another(x, y=0):
        return x + 1

    function.__code__ = another.__code__  # what is called later is what it is then
    listening = Interception(module, "function", Hearing(), "name")
    assert function(1, 0) == 2
    listening.remove()
    assert function.__code__ is another.__code__


def test_custom_operators_that_were_bound_before_are_seen(monkeypatch):
    def fused(x):
        return x * 2 + 1

    monkeypatch.setitem(sys.modules, "my_ops", types.ModuleType("my_ops"))
    sys.modules["my_ops"].fused = fused
    monkeypatch.setenv("PADDLE_THIRDPARTY_API", "my_ops.fused")

    class Net(paddle.nn.Layer):
        def forward(self, x):
            return fused(x)

    assert called(record(Net, paddle.to_tensor(X))) == ["fused"]


@pytest.mark.filterwarnings("ignore:In transformed code", "ignore:Tensor do not have 'place' interface")
def test_a_part_that_to_static_compiled_is_not_seen_inside_and_computes_the_same():
    paddle.seed(0)

    class Net(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Softmax())

        def forward(self, x):
            return paddle_softmax(self.inner(x), -1)

    model = Net()
    paddle.jit.to_static(model.inner, full_graph=True)
    plain = model(paddle.to_tensor(X)).numpy()
    again = Net()
    again.set_state_dict(model.state_dict())
    paddle.jit.to_static(again.inner, full_graph=True)
    with pytest.warns(RuntimeWarning, match="is recorded from outside"):
        rec = padiff.record(again)
    with rec:  # compiled while it is recorded
        recorded = again(paddle.to_tensor(X)).numpy()
    np.testing.assert_array_equal(recorded, plain)
    (step,) = rec.run.steps(0)
    assert [r.site for r in step.records if "()" in r.slot and r.stage == "forward"] == ["(root)/forward/softmax().0"]


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_to_static_as_it_is_by_default_compiles_the_functions_and_computes_the_same():
    def results(recorded):
        layer = PaddleModel()
        paddle.jit.to_static(layer, full_graph=False)
        x = paddle.to_tensor(X, stop_gradient=False)
        with padiff.record(layer) if recorded else contextlib.nullcontext() as rec:
            output = layer(x)
            output.sum().backward()
        return [output.numpy(), x.grad.numpy()], rec

    (plain, _), (recorded, rec) = results(False), results(True)
    for reference, candidate in zip(plain, recorded):
        np.testing.assert_array_equal(candidate, reference)
    (step,) = rec.run.steps(0)
    assert "(root)/forward/output.0" in [r.site for r in step.records]


def test_modes_that_were_entered_after_ours_stay():
    seeing = TORCH.hooks.on_functions(lambda name, output: None, ())
    with torch.device("meta"):
        seeing.remove()
        assert torch.zeros(1).is_meta
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch.zeros(1).is_cpu
    assert not torch.overrides._get_current_function_mode_stack()
    seeing.remove()

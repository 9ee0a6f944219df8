"""The trace of a step: what goes into layers, and which functions their code calls."""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import TORCH

import padiff
from padiff.dump.prepare import Zoom, ask
from padiff.errors import UsageError
from padiff.records import LOOP

RNG = np.random.default_rng(5)
X = RNG.normal(size=(6, 4)).astype(np.float32)


def net_of(kit, forward=None):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = kit.Linear(4, 4), kit.ReLU(), kit.Linear(4, 3)

        def forward(self, x):
            return forward(self, x) if forward is not None else self.last(self.act(self.first(x)) * 2 + x)

    return Net()


def recorded(kit, model, steps=1, x=X, folder=None, **options):
    """Steps of a training, in memory or in a folder."""
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            model(kit.tensor(x)).sum().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
            rec.flush()
    return rec.run if folder is None else padiff.open_run(folder)


def trace(run, number=0):
    return run.steps(number)[0].trace


def calls(run, number=0):
    """What the model called, in order: functions by name, layers by path."""
    found = [call for call in trace(run, number).calls if call.layer != LOOP]
    return [f"{call.function}()" if call.function else call.layer for call in found]


def in_loop(run, number=0):
    """What the loop called."""
    return [call.function for call in trace(run, number).calls if call.layer == LOOP]


def value(run, number, path, slot):
    """What went into a layer."""
    found = trace(run, number)
    (call,) = (c for c in found.calls if c.layer == path and not c.function)
    tensor = found.tensors[dict(call.inputs)[slot]]
    return tensor.source.read()


# -- layers --------------------------------------------------------------------------------------------------------


def test_what_goes_into_layers_that_compute_is_kept_in_every_due_step(kit):
    model = net_of(kit)
    run = recorded(kit, model, steps=3)
    for number in run.numbers():
        weights = {r.site: np.asarray(r.value, np.float64) for r in run.steps(number)[0].records if r.stage == "weight"}
        matrix = weights["first/weight/weight"]
        matrix = matrix.T if kit.name == "torch" else matrix
        expected = 2 * np.maximum(X @ matrix + weights["first/weight/bias"], 0) + X
        slot = "input.input"
        np.testing.assert_allclose(value(run, number, "first", slot), X)
        np.testing.assert_allclose(value(run, number, "last", slot), expected, rtol=1e-5, atol=1e-6)


def test_an_output_that_goes_into_another_layer_is_the_same_tensor(kit):
    run = recorded(kit, net_of(kit), steps=3)
    found = trace(run, 2)
    by_layer = {call.layer: call for call in found.calls}
    assert by_layer["act"].inputs[0].tensor == by_layer["first"].outputs[0].tensor
    # ... and is kept once.
    (record,) = (r for r in run.steps(2)[0].records if r.site == "first/forward/output.0")
    assert found.tensors[by_layer["first"].outputs[0].tensor].source.identity == record.source.identity
    assert by_layer["last"].inputs[0].tensor not in {o.tensor for call in found.calls for o in call.outputs}


def test_a_tensor_that_is_written_in_place_is_another_one(kit):
    def forward(net, x):
        y = net.first(x)
        return net.last(kit.relu_(y))

    run = recorded(kit, net_of(kit, forward), steps=2, functions=False)
    by_layer = {call.layer: call for call in trace(run).calls}
    assert by_layer["last"].inputs[0].tensor != by_layer["first"].outputs[0].tensor
    assert value(run, 0, "last", "input.input").min() == 0


def test_containers_are_looked_at_with_functions_only(kit):
    model = kit.Sequential(kit.Sequential(kit.Linear(4, 4), kit.ReLU()), kit.Linear(4, 3))
    run = recorded(kit, model, steps=3)
    assert calls(run, 0) == calls(run, 1) == ["0.0", "0.1", "0", "1", "(root)"]
    assert calls(run, 2) == ["0.0", "0.1", "1", "(root)"]


def test_nothing_is_looked_at_of_layers_of_which_nothing_is_kept(kit):
    run = recorded(kit, net_of(kit), detail={"*": "sketch", "forward": "nothing"})
    assert not trace(run).calls
    run = recorded(kit, net_of(kit), white_list=["last"])
    assert {call.layer for call in trace(run).calls} == {"last"}


def test_large_tensors_are_sketched_and_small_ones_whole_where_outputs_are_whole(kit):
    large = np.random.default_rng(0).normal(size=(2000, 4)).astype(np.float32)

    def kept(**options):
        run = recorded(kit, net_of(kit), x=large, **options)
        found = trace(run)
        (call,) = (c for c in found.calls if c.layer == "last" and not c.function)
        return "sketch" if found.tensors[call.inputs[0].tensor].source.sketched else "tensor"

    assert kept() == "sketch"
    assert kept(detail="sketch") == "sketch"
    small = recorded(kit, net_of(kit))
    assert not any(t.source.sketched for t in trace(small).tensors)
    assert not any(t.source.sketched for t in trace(recorded(kit, net_of(kit), detail="sketch")).tensors)
    usual = recorded(kit, net_of(kit), detail="sketch", functions=False)
    assert all(t.source.sketched for t in trace(usual).tensors)


def test_several_calls_and_several_inputs_are_reported_apart(kit):
    class Two(kit.Layer):
        def forward(self, a, b=None):
            return a + b if b is not None else a

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.two = kit.Linear(4, 4), Two()

        def forward(self, x):
            return self.two(self.one(x), b=x) + self.two(x)

    run = recorded(kit, Net())
    first, second = (c for c in trace(run).calls if c.layer == "two" and not c.function)
    assert [o.slot for o in first.inputs] == ["input.a", "input.b"]
    assert [o.slot for o in second.inputs] == ["input.a"]
    assert (first.call, second.call) == (0, 1)
    assert first.inputs[1].tensor == second.inputs[0].tensor


def test_a_record_is_of_the_output_as_it_is_given_out():
    """However it was written in between: torch does not count what is written to ``data``."""

    def forward(net, x):
        y = net.first(x) + 1
        y.data.mul_(3)
        return y

    run = recorded(TORCH, net_of(TORCH, forward))
    outputs = {r.layer: r.value for r in run.steps(0)[0].records if r.stage == "forward"}
    np.testing.assert_allclose(outputs["(root)"], 3 * (outputs["first"] + 1), rtol=1e-6)


# -- functions -----------------------------------------------------------------------------------------------------


def test_functions_are_traced_in_the_first_two_recorded_steps(kit):
    run = recorded(kit, net_of(kit), steps=6, every_n_steps=padiff.Schedule(every=2, first=1))
    assert run.numbers() == [1, 3, 5]
    assert calls(run, 1) == calls(run, 3) == ["first", "act", "mul()", "add()", "last", "(root)"]
    assert calls(run, 5) == ["first", "act", "last", "(root)"]
    assert [trace(run, number).functions for number in run.numbers()] == [True, True, False]


def test_of_sketched_steps_the_first_one_alone_has_functions(kit):
    run = recorded(kit, net_of(kit), steps=3, detail="sketch")
    assert [trace(run, number).functions for number in run.numbers()] == [True, False, False]


def test_their_tensors_are_those_of_the_layers_around_them(kit):
    found = trace(recorded(kit, net_of(kit)))
    by_name = {call.function or call.layer: call for call in found.calls}
    assert by_name["mul"].inputs[0].tensor == by_name["act"].outputs[0].tensor
    assert by_name["mul"].arguments == {"other": 2}
    assert [o.tensor for o in by_name["add"].inputs] == [
        by_name["mul"].outputs[0].tensor,
        by_name["first"].inputs[0].tensor,
    ]
    assert by_name["last"].inputs[0].tensor == by_name["add"].outputs[0].tensor
    assert (by_name["add"].layer, by_name["add"].nth) == ("(root)", 0)
    product, before = (found.tensors[by_name[name].outputs[0].tensor].source.read() for name in ("mul", "act"))
    np.testing.assert_allclose(product, 2 * before)


def test_functions_may_be_left_out(kit):
    run = recorded(kit, net_of(kit), functions=False)
    assert calls(run) == ["first", "act", "last", "(root)"]
    with pytest.raises(UsageError, match="functions is True or False, got 1"):
        padiff.record(net_of(kit), functions=1)


def test_lists_hold_for_functions(kit):
    run = recorded(kit, net_of(kit), black_list=[("(root)", "self")])
    assert not any(call.function for call in trace(run).calls)


def test_parameters_go_in_by_name(kit):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.inner = kit.Linear(4, 4)
            self.shift = kit.param(4)

        def forward(self, x):
            return self.inner(x) + self.shift

    (call,) = (c for c in trace(recorded(kit, Net())).calls if c.function and c.layer != LOOP)
    assert call.parameters == ("(root)/shift",)
    assert len(call.inputs) == 1


def test_what_the_framework_calls_itself_is_not_traced(kit):
    model = kit.Sequential(kit.Linear(4, 4), kit.GELU(), kit.LayerNorm(4))
    assert not any(call.function for call in trace(recorded(kit, model)).calls if call.layer != LOOP)


def test_the_same_function_called_again_is_counted_within_the_call(kit):
    class Twice(kit.Layer):
        def forward(self, x):
            return x + 1 + 2

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.linear, self.twice = kit.Linear(4, 4), Twice()

        def forward(self, x):
            return self.twice(self.twice(self.linear(x)))

    found = [c for c in trace(recorded(kit, Net())).calls if c.function and c.layer != LOOP]
    assert [(c.layer, c.call, c.nth, c.arguments["other"]) for c in found] == [
        ("twice", 0, 0, 1),
        ("twice", 0, 1, 2),
        ("twice", 1, 0, 1),
        ("twice", 1, 1, 2),
    ]


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_a_step_that_is_asked_for_has_them(kit, tmp_path, detail):
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    folder = tmp_path / "run"
    with padiff.record(model, folder, optimizer=optimizer, detail=detail) as rec:
        for number in range(6):
            model(kit.tensor(X)).sum().backward()
            optimizer.step()
            kit.zero(optimizer)
            if number == 1:
                rec.flush()
                assert ask(folder, Zoom(4, frozenset({"last"})))
            rec.try_dump()
    run = padiff.open_run(folder)
    assert [trace(run, number).functions for number in run.numbers()] == [
        True,
        detail == "full",
        False,
        False,
        True,
        False,
    ]


# -- the training stays as it is -----------------------------------------------------------------------------------


def trained(kit, make, steps=3, **options):
    """Losses and parameters of a training that is recorded, or not."""
    kit.seed(0)
    model = make()
    optimizer = kit.sgd(model.parameters(), 0.1)
    losses = []

    def step(rec=None):
        loss = model(kit.tensor(X)).square().mean()
        loss.backward()
        losses.append(kit.numpy(loss).copy())
        optimizer.step()
        kit.zero(optimizer)
        if rec is not None:
            rec.try_dump()

    if not options:
        for _ in range(steps):
            step()
        return losses, kit.state(model)
    options.pop("on", None)
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            step(rec)
    return losses, kit.state(model)


def assert_same(one, other):
    for a, b in zip(one[0], other[0]):
        np.testing.assert_array_equal(a, b)
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        np.testing.assert_array_equal(values, other[1][name])


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_losses_and_weights_are_the_same_to_the_bit(kit, detail):
    def forward(net, x):
        y = kit.softmax(net.first(x) * 0.5) @ kit.tensor(np.eye(4))
        y[:, 0] = 0.25
        return net.last(kit.gelu(y) + x.reshape([6, 2, 2]).reshape([6, 4]))

    def make():
        return net_of(kit, forward)

    assert_same(trained(kit, make), trained(kit, make, detail=detail))


def test_an_exception_in_a_function_leaves_nothing_behind(kit):
    def forward(net, x):
        try:
            x.reshape([5, 5])
        except Exception:
            x = x + 1
        return net.last(net.first(x))

    run = recorded(kit, net_of(kit, forward))
    assert calls(run) == ["add()", "first", "last", "(root)"]

    def failing(net, x):
        return net.last(net.first(x)).reshape([7, 7])

    before = heard(kit)
    with pytest.raises(Exception, match=r"reshape|shape|size"):
        recorded(kit, net_of(kit, failing))
    assert heard(kit) == before


def heard(kit):
    """What hearing would leave behind."""
    if kit.name == "torch":
        from torch.overrides import _get_current_function_mode_stack

        return list(_get_current_function_mode_stack())
    import paddle

    owners = (paddle, paddle.nn.functional, paddle.Tensor)
    return [
        (name, id(getattr(owner, name)), id(getattr(getattr(owner, name), "__code__", None)))
        for owner in owners
        for name in ("add", "softmax", "reshape", "__add__")
        if hasattr(owner, name)
    ]


def test_nothing_is_left_behind_in_steps_without_functions(kit):
    before, seen = heard(kit), []

    def forward(net, x):
        seen.append(heard(kit) == before)
        return net.last(net.first(x) + 1)

    recorded(kit, net_of(kit, forward), steps=4)
    assert seen == [False, False, True, True]
    assert heard(kit) == before


def test_other_threads_are_not_heard(kit):
    def forward(net, x):
        def beside():
            kit.tensor(X) + 1

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return net.last(net.first(x))

    assert calls(recorded(kit, net_of(kit, forward))) == ["first", "last", "(root)"]


def test_what_the_loop_computes_its_loss_by_is_traced_and_what_optimizers_do_is_not(kit):
    model = net_of(kit)
    optimizer = kit.adam(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(3):
            outputs = model(kit.tensor(X))
            loss = (outputs * 3).exp().mean()
            loss.backward()
            rec.log_loss(loss)
            loss * 2  # after the backward: no loss any more
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    assert calls(rec.run) == ["first", "act", "mul()", "add()", "last", "(root)"]
    assert in_loop(rec.run) == in_loop(rec.run, 1) == ["mul", "exp", "mean", "backward", "log_loss"]
    assert in_loop(rec.run, 2) == []
    found = [call for call in trace(rec.run).calls if call.layer == LOOP]
    # From what the model gives to where the backward begins.
    (output,) = (
        call.outputs[0].tensor for call in trace(rec.run).calls if (call.layer, call.function) == ("(root)", "")
    )
    assert found[0].inputs[0].tensor == output and found[0].arguments["other"] == 3
    assert {call.inputs[0].tensor for call in found[-2:]} == {found[2].outputs[0].tensor}
    mean = trace(rec.run).tensors[found[2].outputs[0].tensor].source.read()
    (logged,) = (r.value for r in rec.run.steps(0)[0].records if r.stage == "loss")
    np.testing.assert_allclose(mean, logged, rtol=1e-6)


@pytest.fixture
def hearing(kit):
    """A framework whose calls before the model's are heard: a torch that says when it compiles."""
    if kit is TORCH and importlib.util.find_spec("torch._dynamo.callback") is None:
        pytest.skip("this torch does not say when it compiles")
    return kit


@pytest.mark.usefixtures("hearing")
def test_what_the_loop_computes_before_its_call_is_traced_if_a_call_needs_it(kit):
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    before = heard(kit)
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(3):
            x = (kit.tensor(X) - 0.5) / 0.25
            wanted = kit.tensor(X[:, :3]) * 3
            (kit.tensor(X) + 1).sum()  # nothing comes of it
            ((model(x) - wanted) ** 2).mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    assert in_loop(rec.run) == in_loop(rec.run, 1) == ["sub", "div", "mul", "sub", "pow", "mean", "backward"]
    assert in_loop(rec.run, 2) == []
    found = trace(rec.run)
    ended = {call.function: call for call in found.calls if call.layer == LOOP and call.call}
    assert value(rec.run, 0, "first", "input.input") == pytest.approx((X - 0.5) / 0.25, rel=1e-6)
    multiplied = found.tensors[ended["mul"].outputs[0].tensor].source.read()
    assert multiplied == pytest.approx(X[:, :3] * 3, rel=1e-6) and ended["mul"].arguments["other"] == 3
    assert heard(kit) == before


@pytest.mark.usefixtures("hearing")
def test_calls_that_wait_for_the_model_keep_no_tensor_alive(kit):
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, optimizer=optimizer) as rec:
        doubled = kit.tensor(X) * 2
        alive = weakref.ref(doubled)
        x = doubled + 1
        del doubled
        gc.collect()
        assert alive() is None
        model(x).sum().backward()
        optimizer.step()
        rec.try_dump()
    assert in_loop(rec.run) == ["mul", "add", "sum", "backward"]


@pytest.mark.usefixtures("hearing")
def test_calls_that_wait_for_the_model_are_bounded(kit, monkeypatch):
    monkeypatch.setattr("padiff.recorder.tracer._MOST_WAITING", 10)
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, optimizer=optimizer) as rec:
        x = kit.tensor(X)
        for _ in range(25):
            x = x + 1
        model(x).sum().backward()
        optimizer.step()
        rec.try_dump()
    added = [call for call in trace(rec.run).calls if call.layer == LOOP and call.function == "add"]
    assert 0 < len(added) <= 10 and [call.nth for call in added] == [*range(len(added))]
    start = trace(rec.run).tensors[added[0].inputs[0].tensor].source.read()
    assert start == pytest.approx(X + 25 - len(added), rel=1e-5)


def test_workers_that_load_the_data_hear_nothing():
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, k):
            listening = len(torch.overrides._get_current_function_mode_stack())
            return torch.full((4,), float(k)) + 1, listening

    model = net_of(TORCH)
    optimizer = TORCH.sgd(model.parameters(), 0.1)
    loaded = []
    with padiff.record(model, optimizer=optimizer) as rec:
        for x, listening in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1):
            loaded.append((x[:, 0].tolist(), listening.tolist()))
            model(x).sum().backward()
            optimizer.step()
            rec.try_dump()
    assert loaded == [([1, 2, 3, 4], [0] * 4), ([5, 6, 7, 8], [0] * 4)]


def test_each_micro_batch_has_its_loss(kit):
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(2):
            (model(kit.tensor(X)).exp().mean() / 2).backward()
        optimizer.step()
        kit.zero(optimizer)
        rec.try_dump()
    assert in_loop(rec.run) == ["exp", "mean", "div", "backward"] * 2


def test_an_evaluation_and_an_optimizer_without_a_backward_are_not_heard(kit):
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    before = heard(kit)
    with padiff.record(model, optimizer=optimizer) as rec:
        model.eval()
        model(kit.tensor(X)).sum()
        model.train()
        model(kit.tensor(X)).sum().backward()
        model(kit.tensor(X))  # nothing comes of it
        optimizer.step()
        assert kit.name != "torch" or not heard(kit)
        kit.zero(optimizer)
        rec.try_dump()
    assert in_loop(rec.run) == ["sum", "backward"]
    assert heard(kit) == before


def test_torch_models_that_are_not_recorded_run_as_ever():
    """In evaluation mode torch's attention takes a path of its own, where nobody listens; losses are heard all the
    same, also those that are modules.
    """
    import torch

    seen = []

    class Teacher(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            seen.append(list(torch.overrides._get_current_function_mode_stack()))
            return self.layer(x)

    model, teacher = net_of(TORCH), Teacher().eval()
    optimizer, x = TORCH.sgd(model.parameters(), 0.1), TORCH.tensor(X)
    with padiff.record(model, optimizer=optimizer) as rec:
        outputs = model(x)
        outputs = outputs * 2
        with torch.no_grad():
            wanted = teacher(x)
        torch.nn.MSELoss()(outputs, wanted).backward()
        optimizer.step()
        rec.try_dump()
    assert seen == [[]]
    assert in_loop(rec.run) == ["mul", "mse_loss", "backward"]
    assert not torch.nn.modules.module._global_forward_pre_hooks and not heard(TORCH)


def test_attributes_that_transpose_are_traced(kit):
    def forward(net, x):
        y = net.first(x)
        return net.last((y @ y.T @ y.mT.mT) / 8)

    found = trace(recorded(kit, net_of(kit, forward), steps=1), 0)
    assert [c.function for c in found.calls if c.function in ("transpose", "matmul")] == [
        "transpose", "matmul", "transpose", "transpose", "matmul",
    ]  # fmt: skip


def test_gradients_that_a_loop_asks_for_are_traced(kit):
    """The call has a line, its result has values; neither changes the training nor keeps its graph alive."""
    model = net_of(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    grad = torch.autograd.grad if kit.name == "torch" else paddle.grad
    alive, slopes = [], []
    with padiff.record(model, optimizer=optimizer) as rec:
        x = kit.tensor(X)
        if kit.name == "torch":
            x.requires_grad_()
        else:
            x.stop_gradient = False
        value = model(x).sum()
        (slope,) = grad(value, [x], create_graph=True)
        slopes.append(kit.numpy(slope))
        alive += [weakref.ref(value), weakref.ref(slope)]
        (slope**2).sum().backward()
        del value, slope
        gc.collect()
        assert [each() for each in alive] == [None, None]
        optimizer.step()
        rec.try_dump()
        rec.flush()
    found = trace(rec.run)
    (call,) = (c for c in found.calls if c.function == "grad")
    assert call.layer == LOOP and call.stack[-1].file.endswith("test_traces.py")
    assert [slot.partition(".")[0] for slot, _ in call.inputs] == ["outputs", "inputs"]
    np.testing.assert_array_equal(found.tensors[call.outputs[0].tensor].source.read(), slopes[0])


@pytest.mark.parametrize("folder", [False, True])
def test_a_function_without_a_graph_cuts_off_gradients_of_tensors_that_train(kit, tmp_path, folder):
    framework = torch if kit is TORCH else paddle

    def forward(net, x):
        first = net.first(x)
        with framework.no_grad():
            data, target = x * 2, first * 3
        return net.last(data + target + first)

    run = recorded(kit, net_of(kit, forward), folder=tmp_path / "run" if folder else None)
    cut = [call.cut for call in trace(run).calls if call.function == "mul"]
    assert cut == [False, True]
    assert not any(call.cut for call in trace(run).calls if call.function != "mul")

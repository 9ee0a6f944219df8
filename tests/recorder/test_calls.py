"""Layers called often, never, in place, in evaluation; micro-batches; several backwards."""

from __future__ import annotations

import numpy as np
from kit.frameworks import hook_count
from kit.nets import batch, mlp, one_step, record_one, recorded, sites

import padiff


def test_a_layer_called_several_times_has_a_record_and_a_gradient_for_each_call(kit):
    class Net(kit.Net):
        def build(self):
            self.fc = kit.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(self.fc(x)))

    model, x = Net(), kit.tensor(np.ones((2, 3)))
    first = model.fc(x)
    second = model.fc(first)
    third = model.fc(second)
    expected = kit.autograd((third**2).sum(), [first, second, third])
    with padiff.record(model) as rec:
        (model(x) ** 2).sum().backward()
    values = recorded(rec)
    for mark, output, gradient in zip(("", "#1", "#2"), (first, second, third), expected):
        np.testing.assert_array_equal(values[f"fc/forward/output.0{mark}"], kit.numpy(output))
        np.testing.assert_allclose(values[f"fc/backward/output.0{mark}"], gradient, 1e-6)
    assert "fc/forward/output.0#3" not in values


class Shared:
    def __new__(cls, kit):
        class Net(kit.Net):
            def build(self):
                self.first = kit.Linear(3, 3)
                self.second = self.first

            def forward(self, x):
                return self.second(self.first(x))

        return Net()


def test_a_shared_layer_is_one_layer_with_two_paths(kit):
    model = Shared(kit)
    with padiff.record(model) as rec:
        model(kit.tensor(np.ones((2, 3))))
    layers = {layer.path: layer for layer in rec.info.layers}
    assert set(layers) == {"(root)", "first"}
    assert layers["first"].aliases == ("second",)
    assert sites(rec, "forward") == ["first/forward/output.0", "first/forward/output.0#1", "(root)/forward/output.0"]
    assert sites(rec, "weight") == ["first/weight/weight", "first/weight/bias"]


def test_a_shared_layer_can_be_named_by_either_path(kit):
    model = Shared(kit)
    for path in ("first", "second"):
        with padiff.record(model, white_list=[path]) as rec:
            model(kit.tensor(np.ones((2, 3))))
        assert sites(rec, "forward") == ["first/forward/output.0", "first/forward/output.0#1"]


def test_tied_parameters_are_recorded_once_and_said_to_be_tied(kit):
    class Net(kit.Net):
        def build(self):
            self.encode, self.decode = kit.Linear(3, 3), kit.Linear(3, 3)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(self.encode(x))

    model = Net()
    rec = record_one(kit, model, *batch(kit, (4, 3)))
    for stage in ("weight", "grad", "update"):
        found = [site for site in sites(rec, stage) if not site.startswith("(loop)")]
        assert sorted(found) == [f"decode/{stage}/bias", f"encode/{stage}/bias", f"encode/{stage}/weight"]
    tied = [p.tied_to for layer in rec.info.layers for p in layer.parameters if p.tied_to]
    assert tied == ["encode/weight"]


def test_before_an_in_place_layer_the_values_and_the_gradient_are_those_of_the_layer_itself(kit):
    class InPlace(kit.Layer):
        def forward(self, x):
            return kit.relu_(x)

    model = kit.Sequential(kit.Conv(1, 2, 3), InPlace())
    x = kit.tensor(np.random.default_rng(0).normal(size=(2, 1, 5, 5)))
    before = model[0](x)
    after = before * kit.cast(before > 0, "float32")  # a ReLU that is not in place
    (gradient,) = kit.autograd((after**2).sum(), [before])
    with padiff.record(model) as rec:
        (model(x) ** 2).sum().backward()
    values = recorded(rec)
    np.testing.assert_array_equal(values["0/forward/output.0"], kit.numpy(before))
    assert (values["0/forward/output.0"] < 0).any()
    np.testing.assert_array_equal(values["1/forward/output.0"], np.maximum(kit.numpy(before), 0))
    np.testing.assert_allclose(values["0/backward/output.0"], gradient, 1e-6)
    np.testing.assert_allclose(values["1/backward/output.0"], 2 * kit.numpy(after), 1e-6)


def test_a_residual_added_in_place_leaves_the_branch_as_it_was(kit):
    class Net(kit.Net):
        def build(self):
            self.a, self.b = kit.Linear(3, 3), kit.Linear(3, 3)

        def forward(self, x):
            y = self.a(x)
            z = self.b(y)
            z += y
            return z

    model, x = Net(), kit.tensor(np.ones((2, 3)))
    expected_b = kit.numpy(model.b(model.a(x)))
    with padiff.record(model) as rec:
        model(x).sum().backward()
    values = recorded(rec)
    np.testing.assert_array_equal(values["b/forward/output.0"], expected_b)
    np.testing.assert_allclose(values["b/backward/output.0"], np.ones((2, 3)))
    weight = kit.weight(model.b).astype(np.float64)
    np.testing.assert_allclose(values["a/backward/output.0"], 1 + np.ones((2, 3)) @ weight, 1e-5)


def test_layers_that_are_never_called_are_reported_as_uncalled(kit):
    class Net(kit.Net):
        def build(self):
            self.used, self.unused = kit.Linear(3, 3), kit.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    model = Net()
    runs = []
    for _ in range(2):
        with padiff.record(model) as rec:
            model(kit.tensor(np.ones((2, 3))))
        runs.append(rec.run)
    report = padiff.compare_runs(*runs)
    assert report.passed
    assert report.coverage.uncalled == ("reference: unused", "candidate: unused")


def test_accumulation_is_one_step_with_calls_of_its_own_and_the_accumulated_gradient(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    halves = [batch(kit, seed=k) for k in range(2)]
    losses = [kit.cross_entropy(model(x), y) for x, y in halves]
    expected = kit.autograd(losses[0] + losses[1], list(model.parameters()))
    with padiff.record(model, optimizer=optimizer) as rec:
        for x, y in halves:
            loss = kit.cross_entropy(model(x), y)
            loss.backward()
            rec.log_loss(loss)
        optimizer.step()
        kit.zero(optimizer)
        rec.try_dump()
    (step,) = rec.run.steps(0)
    assert step.micro_batches == 2
    values = recorded(rec)
    for k, mark in enumerate(("", "#1")):
        np.testing.assert_array_equal(values[f"(root)/input/input.input{mark}"], kit.numpy(halves[k][0]))
        assert f"0/backward/output.0{mark}" in values
        assert values[f"(loop)/loss/loss{mark}"] == float(kit.numpy(losses[k]))
    for site, gradient in zip(("0/grad/weight", "0/grad/bias", "2/grad/weight", "2/grad/bias"), expected):
        np.testing.assert_allclose(values[site], gradient, 1e-5, 1e-7)
    assert not [site for site in values if "/grad/" in site and "#" in site]


def test_a_second_backward_through_a_retained_graph_is_a_quantity_of_its_own(kit):
    model = kit.Linear(3, 2)
    with padiff.record(model) as rec:
        y = model(kit.tensor(np.ones((2, 3))))
        y.sum().backward(retain_graph=True)
        (y.sum() * 3).backward()
    values = recorded(rec)
    assert (values["(root)/backward/output.0"] == 1).all()
    assert (values["(root)/backward/output.0@1"] == 3).all()
    assert (values["(root)/grad/bias"] == 2 * 1 + 2 * 3).all()


def test_two_losses_that_meet_in_one_backward_give_one_gradient(kit):
    model = kit.Linear(3, 2)
    with padiff.record(model) as rec:
        y = model(kit.tensor(np.ones((2, 3))))
        (y.sum() + (y * 2).sum()).backward()
    assert sites(rec, "backward") == ["(root)/backward/output.0"]
    assert (recorded(rec)["(root)/backward/output.0"] == 3).all()


def test_evaluation_between_training_steps_is_not_recorded(kit):
    model = kit.Sequential(kit.Linear(4, 8), kit.Dropout(0.5), kit.Linear(8, 3))
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    with padiff.record(model, optimizer=optimizer) as rec:
        for seed in range(2):
            loss = kit.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            kit.zero(optimizer)
            model.eval()
            with kit.no_grad():
                model(batch(kit, seed=5 + seed)[0])
                model(batch(kit, seed=7 + seed)[0])
            model.train()
            rec.try_dump()
    for number in range(2):
        (step,) = rec.run.steps(number)
        assert step.micro_batches == 1
        assert sites(rec, "input", number) == ["(root)/input/input.input"]
        np.testing.assert_array_equal(recorded(rec, number)["(root)/input/input.input"], kit.numpy(x))
        assert step.notes == ("2 call(s) in evaluation mode within the step are not recorded",)


def test_evaluation_before_the_training_call_of_a_step_does_not_take_its_place(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    with padiff.record(model, optimizer=optimizer) as rec:
        model.eval()
        model(batch(kit, seed=5)[0])
        model.train()
        one_step(kit, model, optimizer, x, y, rec)
    values = recorded(rec)
    np.testing.assert_array_equal(values["(root)/input/input.input"], kit.numpy(x))
    assert "(root)/forward/output.0#1" not in values
    assert "0/backward/output.0" in values


def test_a_backward_through_an_evaluation_does_not_take_the_place_of_the_training_calls(kit):
    # Adversarial examples are made so: gradients of the input in eval mode, then the training call.
    model = kit.Linear(3, 2)
    x = kit.tensor(np.ones((2, 3)), grad=True)
    with padiff.record(model) as rec:
        model.eval()
        (model(x) * 5).sum().backward()
        model.train()
        model(x).sum().backward()
    assert sites(rec, "backward") == ["(root)/backward/output.0"]
    assert (recorded(rec)["(root)/backward/output.0"] == 1).all()


def test_a_lone_evaluation_without_gradients_is_recorded(kit):
    model = mlp(kit)
    model.eval()
    x, _ = batch(kit)
    with padiff.record(model) as rec, kit.no_grad():
        expected = kit.numpy(model(x))
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], expected)
    assert sites(rec, "backward") == []


def test_a_frozen_part_in_eval_mode_inside_a_model_that_trains_is_recorded(kit):
    model = kit.Sequential(kit.Linear(4, 4), kit.BatchNorm(1), kit.Linear(4, 3))
    model[1].eval()
    with padiff.record(model) as rec:
        x = model[0](kit.tensor(np.ones((2, 4)))).reshape([2, 1, 2, 2])
        model[2](model[1](x).reshape([2, 4]))
    assert sites(rec, "forward") == ["0/forward/output.0", "1/forward/output.0", "2/forward/output.0"]


def test_without_any_try_dump_leaving_the_with_ends_the_only_step(kit, tmp_path):
    model = mlp(kit)
    with padiff.record(model, tmp_path / "run") as rec:
        model(batch(kit)[0]).sum().backward()
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0]
    assert run.finished()
    assert rec.step == 1


def test_what_is_left_after_the_last_try_dump_is_no_step(kit):
    model = mlp(kit)
    with padiff.record(model) as rec:
        model(batch(kit)[0])
        rec.try_dump()
        model(batch(kit)[0])
    assert rec.run.numbers() == [0]


def test_a_with_in_which_nothing_happens_records_no_step(kit):
    with padiff.record(mlp(kit)) as rec:
        pass
    assert rec.run.numbers() == []


def test_try_dump_says_whether_the_step_was_written(kit):
    model = mlp(kit)
    with padiff.record(model, every_n_steps=2) as rec:
        reported = []
        for _ in range(4):
            model(batch(kit)[0])
            reported.append(rec.try_dump())
    assert reported == [True, False, True, False]


def test_hooks_that_are_put_on_twice_record_once(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        rec.attach()
        one_step(kit, model, optimizer, *batch(kit), rec)
    found = [site for stage in ("forward", "backward", "grad", "update") for site in sites(rec, stage)]
    assert len(found) == len(set(found)) == 4 + 4 + 4 + 5
    assert hook_count(kit, model, optimizer) == 0


def test_start_step_and_a_schedule_say_which_steps_are_recorded(kit):
    model = mlp(kit)
    with padiff.record(model, start_step=100, every_n_steps=padiff.Schedule(steps=[101, 104])) as rec:
        for _ in range(6):
            model(batch(kit)[0])
            rec.try_dump()
    assert rec.run.numbers() == [101, 104]


def test_a_process_that_never_imported_torchs_compiler_is_recorded(monkeypatch):
    import sys

    import torch

    for name in ("torch._dynamo.convert_frame", "torch._dynamo.eval_frame"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    net = torch.nn.Linear(3, 2)
    with padiff.record(net) as rec:
        net(torch.ones(2, 3)).sum().backward()
        assert rec.try_dump()
    assert rec.run.numbers() == [0]

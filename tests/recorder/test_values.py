"""What is recorded is what happened: against manual forwards, autograd, and closed forms in float64."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import batch, mlp, one_step, record_one, recorded, sites

import padiff


def close(actual, expected, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol, 1e-7)


def test_forward_outputs_are_those_of_a_manual_forward(kit):
    model = mlp(kit)
    x, y = batch(kit)
    w0, b0, w1, b1 = (kit.numpy(p).astype(np.float64) for p in model.parameters())
    if kit.name == "torch":
        w0, w1 = w0.T, w1.T
    values = recorded(record_one(kit, model, x, y))
    first = kit.numpy(x).astype(np.float64) @ w0 + b0
    close(values["0/forward/output.0"], first)
    close(values["1/forward/output.0"], np.maximum(first, 0))
    close(values["2/forward/output.0"], np.maximum(first, 0) @ w1 + b1)
    np.testing.assert_array_equal(values["(root)/forward/output.0"], values["2/forward/output.0"])


def test_activation_gradients_are_autograds(kit):
    model = mlp(kit)
    x, y = batch(kit)
    h0 = model[0](x)
    h1 = model[1](h0)
    h2 = model[2](h1)
    expected = kit.autograd(kit.cross_entropy(h2, y), [h0, h1, h2])
    values = recorded(record_one(kit, model, x, y))
    for path, gradient in zip("012", expected):
        close(values[f"{path}/backward/output.0"], gradient, 1e-6)
    close(values["(root)/backward/output.0"], expected[2], 1e-6)


def test_gradients_of_parameters_are_those_that_backward_left(kit):
    model = mlp(kit)
    x, y = batch(kit)
    expected = kit.autograd(kit.cross_entropy(model(x), y), list(model.parameters()))
    values = recorded(record_one(kit, model, x, y))
    for site, gradient in zip(("0/grad/weight", "0/grad/bias", "2/grad/weight", "2/grad/bias"), expected):
        np.testing.assert_array_equal(values[site], gradient)


def test_the_update_is_the_difference_of_the_parameters_and_sgds_closed_form(kit):
    model = mlp(kit)
    before = [kit.numpy(p) for p in model.parameters()]
    values = recorded(record_one(kit, model, *batch(kit)))
    after = [kit.numpy(p) for p in model.parameters()]
    for site, old, new in zip(("0/{}/weight", "0/{}/bias", "2/{}/weight", "2/{}/bias"), before, after):
        np.testing.assert_array_equal(values[site.format("update")], new - old)
        np.testing.assert_array_equal(values[site.format("weight")], old)
        close(values[site.format("update")], -0.1 * values[site.format("grad")].astype(np.float64), 1e-4)


def test_weights_are_those_before_each_step(kit):
    model = mlp(kit)
    optimizer = kit.adam(model.parameters())
    expected = []
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(3):
            expected.append(kit.numpy(model[0].weight))
            one_step(kit, model, optimizer, *batch(kit), rec)
    for number, weight in enumerate(expected):
        np.testing.assert_array_equal(recorded(rec, number)["0/weight/weight"], weight)


def test_learning_rate_and_loss_are_recorded(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters(), rate=0.125)
    with padiff.record(model, optimizer=optimizer) as rec:
        loss = one_step(kit, model, optimizer, *batch(kit), rec)
    values = recorded(rec)
    assert values["(loop)/update/learning_rate"] == 0.125
    assert values["(loop)/loss/loss"] == float(kit.numpy(loss))


def test_a_learning_rate_schedule_shows_step_by_step(kit):
    model = mlp(kit)
    if kit.name == "torch":
        optimizer = kit.sgd(model.parameters(), rate=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    else:
        schedule = paddle.optimizer.lr.StepDecay(0.5, 1, gamma=0.5)
        optimizer = paddle.optimizer.SGD(schedule, parameters=model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(3):
            one_step(kit, model, optimizer, *batch(kit), rec)
            schedule.step()
    rates = [float(recorded(rec, n)["(loop)/update/learning_rate"]) for n in range(3)]
    assert rates == [0.5, 0.25, 0.125]


def test_a_loss_can_be_a_number_or_a_tensor_and_is_kept_for_each_micro_batch(kit):
    model = mlp(kit)
    with padiff.record(model) as rec:
        model(batch(kit)[0])
        rec.log_loss(0.5)
        rec.log_loss(kit.tensor([0.25]))
        rec.try_dump()
    values = recorded(rec)
    assert values["(loop)/loss/loss"] == 0.5
    assert values["(loop)/loss/loss#1"] == 0.25


def clip(gradients, most):
    """Clipping by the global norm, in float64."""
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
    return [g * min(1.0, most / norm) for g in gradients]


def clipped_step(kit, model, x, y, most):
    if kit.name == "torch":
        optimizer = kit.sgd(model.parameters())
    else:
        clipping = paddle.nn.ClipGradByGlobalNorm(most)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=clipping)
    with padiff.record(model, optimizer=optimizer) as rec:
        kit.cross_entropy(model(x), y).backward()
        if kit.name == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        kit.zero(optimizer)
        rec.try_dump()
    return rec


GRADS = ("0/grad/weight", "0/grad/bias", "2/grad/weight", "2/grad/bias")


def test_the_gradient_is_the_one_consumed_after_clipping(kit):
    model = mlp(kit)
    x, y = batch(kit)
    plain = kit.autograd(kit.cross_entropy(model(x), y), list(model.parameters()))
    values = recorded(clipped_step(kit, model, x, y, 0.05))
    for site, gradient in zip(GRADS, clip(plain, 0.05)):
        close(values[site], gradient, 1e-4)
    total = np.sqrt(sum((values[site].astype(np.float64) ** 2).sum() for site in GRADS))
    assert total == pytest.approx(0.05, rel=1e-4)


def test_clipped_gradients_agree_across_the_frameworks():
    reference, candidate = mlp(TORCH), mlp(PADDLE)
    for p, q in zip(reference.parameters(), candidate.parameters()):
        q.set_value(p.detach().numpy().T.copy() if p.ndim == 2 else p.detach().numpy().copy())
    runs = [clipped_step(kit, model, *batch(kit), 0.05).run for kit, model in ((TORCH, reference), (PADDLE, candidate))]
    report = padiff.compare_runs(*runs)
    assert report.passed, report.first_diff.message
    assert sum(d.pair.stage == "grad" and d.compared for d in report.diffs) == 4 + 1  # and the norm before clipping


def test_inputs_are_recorded_as_the_model_received_them(kit):
    class Net(kit.Net):
        def build(self):
            self.fc = kit.Linear(4, 2)

        def forward(self, x, extra, *more, mask=None, nested=None):
            return self.fc(x + extra[0] + extra[1]["deep"] + more[0]) * mask + nested["a"]

    model = Net()
    parts = [kit.tensor(np.full((3, 4), k)) for k in range(4)]
    mask, nested = kit.tensor(np.ones((3, 2))), kit.tensor(np.zeros((3, 2)))
    with padiff.record(model) as rec:
        model(parts[0], [parts[1], {"deep": parts[2]}], parts[3], mask=mask, nested={"a": nested, "note": "text"})
    values = recorded(rec)
    names = ("x", "extra.0", "extra.1.deep", "2", "mask", "nested.a")
    assert sites(rec, "input") == [f"(root)/input/input.{name}" for name in names]
    for name, tensor in zip(names, (*parts, mask, nested)):
        np.testing.assert_array_equal(values[f"(root)/input/input.{name}"], kit.numpy(tensor))


def test_inputs_are_copied_before_forward_overwrites_them(kit):
    class Net(kit.Layer):
        def forward(self, x):
            return kit.relu_(x)

    x = kit.tensor([[-1.0, 2.0]])
    model = Net()
    with padiff.record(model) as rec:
        model(x)
    assert recorded(rec)["(root)/input/input.x"].tolist() == [[-1.0, 2.0]]
    assert recorded(rec)["(root)/forward/output.0"].tolist() == [[0.0, 2.0]]


def test_what_is_recorded_is_a_copy_that_later_writes_do_not_reach(kit):
    model = mlp(kit)
    x, _ = batch(kit)
    with padiff.record(model) as rec:
        output = model(x)
        expected = kit.numpy(output)
        with kit.no_grad():
            output.zero_()
            x.zero_()
    assert expected.any()
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], expected)
    assert recorded(rec)["(root)/input/input.input"].any()


def test_buffers_are_recorded_before_forward_changes_them(kit):
    model = kit.Sequential(kit.BatchNorm(2))
    names = ("running_mean", "running_var") if kit.name == "torch" else ("_mean", "_variance")
    x = kit.tensor(np.random.default_rng(0).normal(3, 1, size=(4, 2, 3, 3)))
    with padiff.record(model) as rec:
        for _ in range(2):
            model(x)
            rec.try_dump()
    assert recorded(rec, 0)[f"0/weight/{names[0]}"].tolist() == [0.0, 0.0]
    assert recorded(rec, 0)[f"0/weight/{names[1]}"].tolist() == [1.0, 1.0]
    mean = kit.numpy(x).astype(np.float64).mean((0, 2, 3))
    close(recorded(rec, 1)[f"0/weight/{names[0]}"], 0.1 * mean, 1e-5)


def test_the_order_of_the_records_is_the_order_of_events(kit):
    rec = record_one(kit, mlp(kit), *batch(kit))
    (step,) = rec.run.steps(0)
    assert [r.order for r in step.records] == list(range(len(step.records)))
    assert [s.split("/")[0] for s in sites(rec, "forward")] == ["0", "1", "2", "(root)"]
    layers = [s.split("/")[0] for s in sites(rec, "backward")]
    assert [layer for layer in layers if layer != "(root)"] == ["2", "1", "0"]


def test_what_a_folder_gives_back_is_what_memory_keeps(kit, tmp_path):
    model = mlp(kit)
    state = kit.state(model)
    in_memory = recorded(record_one(kit, model, *batch(kit)))
    kit.load(model, state)
    record_one(kit, model, *batch(kit), dir_path=tmp_path / "run")
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    on_disk = {r.site: r.value for r in step.records}
    assert on_disk.keys() == in_memory.keys()
    for site, value in in_memory.items():
        np.testing.assert_array_equal(on_disk[site], value, err_msg=site)

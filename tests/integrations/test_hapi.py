"""PaDiffCallback in paddle.Model.fit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import padiff
from padiff.errors import RunsDifferError, UsageError
from padiff_hapi import PaDiffCallback

from .hapi import Batches, Net, fit, hooks, values, weights
from .tensorboards import events


def gradients(batches, labels_from=None):
    """Gradients of the untrained net in numpy, summed over batches of 8 in order; in float64."""
    data = labels_from or Batches()
    total = None
    for k in batches:
        x, y = data.x[8 * k : 8 * k + 8].astype(np.float64), data.y[8 * k : 8 * k + 8, 0]
        w1, b1, w2, b2 = (w.astype(np.float64) for w in weights())
        before = x @ w1 + b1
        hidden = np.maximum(before, 0)
        logits = hidden @ w2 + b2
        softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        d_logits = (softmax - np.eye(3)[y]) / len(x)
        d_before = (d_logits @ w2.T) * (before > 0)
        found = [x.T @ d_before, d_before.sum(0), hidden.T @ d_logits, d_logits.sum(0)]
        total = found if total is None else [a + b for a, b in zip(total, found)]
    return dict(zip(("first/grad/weight", "first/grad/bias", "second/grad/weight", "second/grad/bias"), total))


def test_the_training_is_the_same_to_the_bit_with_and_without_the_callback(tmp_path):
    adam = lambda parameters: paddle.optimizer.Adam(0.01, parameters=parameters)  # noqa: E731
    _, plain = fit(None, optimizer=adam)
    _, recorded = fit(tmp_path / "run", optimizer=adam, options={"every_n_steps": 2})
    for p, q in zip(plain.network.parameters(), recorded.network.parameters()):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


def test_every_due_step_is_recorded_and_the_run_is_finished(tmp_path, capfd):
    fit(tmp_path / "run", options={"every_n_steps": 2}, epochs=2)
    assert "for all 6 recorded steps: full tensors" in capfd.readouterr().err
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 2, 4, 6, 8, 10]
    assert run.finished()


def test_weights_gradients_updates_and_the_rate_are_those_of_the_training(tmp_path):
    fit(tmp_path / "run")
    found = values(tmp_path / "run")
    for site, gradient in gradients([0]).items():
        np.testing.assert_allclose(found[site], gradient, 1e-4, 1e-7)
        np.testing.assert_allclose(found[site.replace("grad", "update")], -0.1 * gradient, 1e-3, 1e-7)
    np.testing.assert_array_equal(found["first/weight/weight"], weights()[0])
    np.testing.assert_array_equal(found["(root)/input/input.x"], Batches().x[:8])
    assert found["(loop)/update/learning_rate"] == pytest.approx(0.1)


def test_the_loss_is_recorded_in_every_step(tmp_path):
    losses = []

    class Listen(paddle.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            losses.append(logs["loss"][0])

    fit(tmp_path / "run", callbacks=[Listen()])
    assert [float(values(tmp_path / "run", n)["(loop)/loss/loss"]) for n in range(6)] == losses
    assert len(set(losses)) == 6


def test_accumulated_batches_are_one_step_with_several_micro_batches(tmp_path):
    fit(tmp_path / "run", accumulate_grad_batches=2)
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2]
    assert [run.steps(n)[0].micro_batches for n in run.numbers()] == [2, 2, 2]
    found = values(tmp_path / "run")
    for site, gradient in gradients([0, 1]).items():  # paddle adds up, it does not take the mean
        np.testing.assert_allclose(found[site], gradient, 1e-4, 1e-7)
    np.testing.assert_array_equal(found["(root)/input/input.x#1"], Batches().x[8:16])
    assert "(loop)/loss/loss#1" in found


def test_evaluation_in_between_is_not_recorded(tmp_path):
    fit(tmp_path / "run", eval_data=Batches(2, seed=9), eval_freq=1, epochs=2)
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == list(range(12))
    for number in run.numbers():
        (step,) = run.steps(number)
        (given,) = [r.value for r in step.records if r.stage == "input"]
        np.testing.assert_array_equal(given, Batches().x[8 * (number % 6) :][:8])


def test_the_gradient_is_the_one_consumed_after_grad_clip(tmp_path):
    def clipped(parameters):
        return paddle.optimizer.SGD(0.1, parameters=parameters, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.05))

    fit(tmp_path / "run", optimizer=clipped)
    found = values(tmp_path / "run")
    plain = gradients([0])
    norm = np.sqrt(sum((g**2).sum() for g in plain.values()))
    assert norm > 0.1
    for site, gradient in plain.items():
        np.testing.assert_allclose(found[site], gradient * 0.05 / norm, 1e-3, 1e-7)


def test_an_exception_in_the_network_leaves_nothing_behind_and_keeps_what_is_written(tmp_path):
    network = Net(fail_at=3)
    model = paddle.Model(network)
    model.prepare(paddle.optimizer.SGD(0.1, parameters=network.parameters()), paddle.nn.CrossEntropyLoss())
    with pytest.raises(ZeroDivisionError, match="in the network"):
        model.fit(Batches(), batch_size=8, shuffle=False, verbose=0, callbacks=[PaDiffCallback(tmp_path / "run")])
    assert hooks(model) == 0
    assert "train_batch" not in vars(model)
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2]
    assert not run.finished()


def test_after_fit_nothing_is_left_on_the_model_the_network_or_the_optimizer(tmp_path):
    _, model = fit(tmp_path / "run")
    assert hooks(model) == 0
    assert "train_batch" not in vars(model)
    assert not [name for name in vars(model.network) if "padiff" in name]


class Raising(paddle.callbacks.Callback):
    """Somebody else's callback that fails once, after the third batch; it comes before ours."""

    def on_train_batch_end(self, step, logs=None):
        if step == 2 and not self.model.network.fail_at:
            self.model.network.fail_at = -1
            raise KeyError("in a callback")


def test_an_exception_in_another_callback_leaves_no_hooks_and_the_same_callback_can_go_on(tmp_path):
    network = Net()
    model = paddle.Model(network)
    model.prepare(paddle.optimizer.SGD(0.1, parameters=network.parameters()), paddle.nn.CrossEntropyLoss())
    reference = PaDiffCallback(tmp_path / "run")
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [Raising(), reference]}
    with pytest.raises(KeyError, match="in a callback"):
        model.fit(Batches(), **options)
    assert hooks(model) == 0
    assert "train_batch" not in vars(model)
    model.fit(Batches(), **options)
    assert hooks(model) == 0
    assert padiff.open_run(tmp_path / "run").finished()
    assert padiff.open_run(tmp_path / "run").numbers() == list(range(8))


def test_num_iters_ends_the_training_as_it_does_without_the_callback(tmp_path):
    _, model = fit(tmp_path / "run", num_iters=4, epochs=2)
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3]
    assert padiff.open_run(tmp_path / "run").finished()
    _, plain = fit(None, num_iters=4, epochs=2)
    for p, q in zip(plain.network.parameters(), model.network.parameters()):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


def test_metrics_are_those_of_a_training_without_the_callback(tmp_path):
    seen = []

    class Listen(paddle.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            seen.append(logs["acc"])

    for folder in (None, tmp_path / "run"):
        fit(folder, prepare={"metrics": paddle.metric.Accuracy()}, callbacks=[Listen()])
    assert len(seen) == 12
    assert seen[:6] == seen[6:]
    assert "(loop)/loss/loss" in values(tmp_path / "run")


def test_a_second_fit_of_the_same_callback_goes_on_in_the_same_run(tmp_path):
    callback, model = fit(tmp_path / "run")
    model.fit(Batches(), epochs=1, shuffle=False, verbose=0, batch_size=8, callbacks=[callback])
    assert padiff.open_run(tmp_path / "run").numbers() == list(range(12))


def test_a_model_without_an_optimizer_is_reported(tmp_path):
    callback = PaDiffCallback(tmp_path / "run")
    model = paddle.Model(Net())
    model.prepare()
    callback.set_model(model)
    with pytest.raises(UsageError, match=r"no optimizer: call model.prepare\(optimizer, loss\)"):
        callback.on_train_begin()


# -- mixed precision -----------------------------------------------------------------------------------------------


@pytest.fixture
def scaling(monkeypatch):
    """Let paddle's own GradScaler scale on the CPU: it switches itself off there, though all of it works."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    fake = lambda: SimpleNamespace(_expected_place=place)  # noqa: E731
    monkeypatch.setattr(paddle.amp.grad_scaler, "_dygraph_tracer", fake)


AMP = {"level": "O1", "init_loss_scaling": 1024.0}

# paddle's autocast is off on the CPU, so what is left of AMP there is the scaling, and comparisons can be tight.
autocast_is_off = pytest.mark.filterwarnings("ignore:.*can only be enabled on CUDAPlace")


@autocast_is_off
def test_with_amp_gradients_are_unscaled_and_activation_gradients_say_their_scale(tmp_path, scaling):
    fit(tmp_path / "amp", prepare={"amp_configs": AMP})
    fit(tmp_path / "plain")
    (step,) = padiff.open_run(tmp_path / "amp").steps(0)
    assert step.loss_scale == 1024.0
    found, plain = values(tmp_path / "amp"), values(tmp_path / "plain")
    for site, gradient in gradients([0]).items():
        np.testing.assert_allclose(found[site], gradient, 1e-4, 1e-7)
    scaled, expected = (v["second/backward/output.0"] for v in (found, plain))
    np.testing.assert_allclose(scaled / 1024.0, expected, 1e-5, 1e-8)


@autocast_is_off
def test_a_run_with_amp_and_one_without_match(tmp_path, scaling):
    fit(tmp_path / "amp", prepare={"amp_configs": AMP}, options={"every_n_steps": 2})
    fit(tmp_path / "plain", options={"every_n_steps": 2})
    report = padiff.compare_runs(tmp_path / "plain", tmp_path / "amp")
    assert report.passed, report.first_diff.message
    assert report.coverage.complete


@autocast_is_off
def test_the_scale_of_each_step_is_the_one_it_was_scaled_with(tmp_path, scaling):
    amp = {"level": "O1", "init_loss_scaling": 512.0, "incr_every_n_steps": 1, "incr_ratio": 2.0}
    fit(tmp_path / "run", prepare={"amp_configs": amp})
    run = padiff.open_run(tmp_path / "run")
    assert [run.steps(n)[0].loss_scale for n in run.numbers()] == [512, 1024, 2048, 4096, 8192, 16384]


@autocast_is_off
def test_amp_as_it_is_on_the_cpu_is_recorded_and_neutral(tmp_path):
    _, plain = fit(None, prepare={"amp_configs": "O1"})
    _, model = fit(tmp_path / "run", prepare={"amp_configs": "O1"})
    assert padiff.open_run(tmp_path / "run").steps(0)[0].loss_scale == 1.0
    for p, q in zip(plain.network.parameters(), model.network.parameters()):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


# -- live ----------------------------------------------------------------------------------------------------------


def faster(parameters):
    return paddle.optimizer.SGD(0.2, parameters=parameters)


def test_stop_ends_the_training_in_the_middle_of_an_epoch(tmp_path):
    fit(tmp_path / "reference")
    with pytest.warns(RuntimeWarning, match=r"padiff: the runs differ\nDIFFER  step 0, update: "):
        callback, model = fit(
            tmp_path / "run", optimizer=faster, options={"reference": tmp_path / "reference", "on_diff": "stop"}
        )
    assert model.network.calls == 1
    assert padiff.open_run(tmp_path / "run").numbers() == [0]
    assert callback.first_report.first_diff.reference == "first"
    assert callback.first_diff is callback.first_report.first_diff and callback.first_report.coverage.steps == (0,)
    assert hooks(model) == 0


def test_a_model_that_was_stopped_can_be_trained_again(tmp_path):
    fit(tmp_path / "reference")
    options = {"reference": tmp_path / "reference", "on_diff": "stop"}
    with pytest.warns(RuntimeWarning, match="padiff: "):
        _, model = fit(tmp_path / "run", optimizer=faster, options=options)
    model.fit(Batches(), epochs=1, shuffle=False, verbose=0, batch_size=8)
    assert model.network.calls == 1 + 6


def test_raise_ends_the_training_with_the_report_and_leaves_no_hooks(tmp_path):
    fit(tmp_path / "reference")
    network = Net()
    options = {"reference": tmp_path / "reference", "on_diff": "raise"}
    with pytest.raises(RunsDifferError, match=r"learning rates differ: 0\.1 against 0\.2") as caught:
        fit(tmp_path / "run", network, optimizer=faster, options=options)
    assert caught.value.report.first_diff.step == 0
    assert not [layer for layer in network.sublayers(include_self=True) if layer._forward_post_hooks]


def test_diffs_and_both_runs_curves_go_to_the_logdir(tmp_path):
    fit(tmp_path / "reference")
    options = {"reference": tmp_path / "reference", "logdir": tmp_path / "tb"}
    with pytest.warns(RuntimeWarning, match="padiff: "):
        fit(tmp_path / "run", optimizer=faster, options=options)
    assert dict(events(tmp_path / "tb" / "diff")["update_rel_l2/000 first"])[0] == pytest.approx(1.0, rel=1e-3)
    for name, rate in (("reference", 0.1), ("candidate", 0.2)):
        assert [value for _, value in events(tmp_path / "tb" / name)["0_verdict/learning_rate"]] == pytest.approx(
            [rate] * 6
        )


def test_without_a_reference_the_runs_own_curves_go_to_the_logdir(tmp_path):
    fit(tmp_path / "run", options={"logdir": tmp_path / "tb", "every_n_steps": 3, "tags": "all"})
    own = events(tmp_path / "tb" / "run")
    assert [step for step, _ in own["0_verdict/loss"]] == [0, 3]
    expected = np.sqrt(sum((w.astype(np.float64) ** 2).sum() for w in weights()[:2]))
    assert dict(own["weight_l2/000 first"])[0] == pytest.approx(expected)


def test_warn_tells_the_first_diff_once_and_trains_on(tmp_path):
    fit(tmp_path / "reference")
    with pytest.warns(RuntimeWarning, match=r"padiff: the runs differ\nDIFFER  step ") as reported:
        _, model = fit(tmp_path / "run", optimizer=faster, options={"reference": tmp_path / "reference"})
    assert len([w for w in reported if str(w.message).startswith("padiff")]) == 1
    assert model.network.calls == 6

"""Recording changes nothing: the same training, to the bit, and nothing left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kit.frameworks import PADDLE, hook_count
from kit.nets import batch, cnn, mlp, one_step

import padiff


def train(kit, folder=None, steps=6, **options):
    """A seeded training; returns losses, the final state, and the random numbers that come next."""
    kit.seed(7)
    model = cnn(kit)
    optimizer = kit.adam(model.parameters())
    batches = [batch(kit, (8, 1, 6, 6), 5, seed=k) for k in range(steps)]
    if folder is None:
        losses = [kit.numpy(one_step(kit, model, optimizer, x, y)) for x, y in batches]
    else:
        with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
            losses = [kit.numpy(one_step(kit, model, optimizer, x, y, rec)) for x, y in batches]
    return np.array(losses), kit.state(model), kit.drawn()


@pytest.mark.parametrize("every", [1, 3])
def test_losses_parameters_and_buffers_are_equal_to_the_bit_with_and_without_recording(kit, tmp_path, every):
    losses, state, _ = train(kit)
    recorded_losses, recorded_state, _ = train(kit, tmp_path / "run", every_n_steps=every)
    np.testing.assert_array_equal(recorded_losses, losses)
    assert set(recorded_state) == set(state)
    for name, value in state.items():
        np.testing.assert_array_equal(recorded_state[name], value, err_msg=name)


def test_the_plain_training_changes_its_weights_and_depends_on_the_seed(kit):
    # Without this the test above would pass for a training that does nothing.
    losses, state, _ = train(kit)
    assert len(set(losses.tolist())) == 6
    kit.seed(7)
    assert any(not np.array_equal(value, state[name]) for name, value in kit.state(cnn(kit)).items())


def test_the_random_states_of_framework_numpy_and_python_are_untouched(kit, tmp_path):
    *_, drawn = train(kit)
    np.random.seed(3)
    random.seed(3)
    *_, recorded_drawn = train(kit, tmp_path / "run")
    np.testing.assert_array_equal(recorded_drawn, drawn)
    assert np.random.random() == np.random.RandomState(3).random_sample()
    assert random.random() == random.Random(3).random()


def test_recording_in_memory_and_without_the_optimizer_is_neutral_too(kit):
    _, state, _ = train(kit)
    kit.seed(7)
    model = cnn(kit)
    optimizer = kit.adam(model.parameters())
    with padiff.record(model) as rec:
        for k in range(6):
            one_step(kit, model, optimizer, *batch(kit, (8, 1, 6, 6), 5, seed=k), rec)
    for name, value in kit.state(model).items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)


def test_the_hooks_are_on_in_the_with_and_gone_after_it(kit):
    model = mlp(kit)
    optimizer = kit.adam(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        assert hook_count(kit, model, optimizer) > 0
        one_step(kit, model, optimizer, *batch(kit), rec)
    assert hook_count(kit, model, optimizer) == 0


def test_nothing_is_left_on_the_model_its_layers_or_the_optimizer(kit):
    model = mlp(kit)
    optimizer = kit.adam(model.parameters())
    before = [set(vars(layer)) for layer in kit.layers(model)], set(vars(optimizer))
    with padiff.record(model, optimizer=optimizer) as rec:
        one_step(kit, model, optimizer, *batch(kit), rec)
        one_step(kit, model, optimizer, *batch(kit), rec)
    assert [set(vars(layer)) for layer in kit.layers(model)] == before[0]
    # torch's optimizers set attributes of their own with the first step.
    assert not {name for name in set(vars(optimizer)) - before[1] if "padiff" in name}
    if kit.name == "paddle":
        assert set(vars(optimizer)) == before[1]


def test_on_a_step_that_is_not_due_there_are_no_hooks_at_all(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    counts = []
    with padiff.record(model, optimizer=optimizer, every_n_steps=3) as rec:
        for _ in range(7):
            counts.append(hook_count(kit, model, optimizer) > 0)
            one_step(kit, model, optimizer, *batch(kit), rec)
        # Step 7 is not due either.
        counts.append(hook_count(kit, model, optimizer) > 0)
    assert counts == [True, False, False, True, False, False, True, False]
    assert rec.run.numbers() == [0, 3, 6]


class Failing:
    def __new__(cls, kit, when):
        class Inner(kit.Layer):
            def forward(self, x):
                if when():
                    raise ZeroDivisionError("in forward")
                return x

        return kit.Sequential(kit.Linear(4, 4), Inner(), kit.Linear(4, 3))


def test_after_an_exception_in_forward_the_hooks_are_gone_and_the_exception_is_seen(kit, tmp_path):
    model = Failing(kit, lambda: True)
    optimizer = kit.sgd(model.parameters())
    with (
        pytest.raises(ZeroDivisionError, match="in forward"),
        padiff.record(model, tmp_path / "run", optimizer=optimizer) as rec,
    ):
        one_step(kit, model, optimizer, *batch(kit), rec)
    assert hook_count(kit, model, optimizer) == 0
    assert padiff.open_run(tmp_path / "run").numbers() == []


def test_an_exception_in_the_loop_takes_the_hooks_off_and_keeps_the_finished_steps(kit, tmp_path):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())

    def loop():
        with padiff.record(model, tmp_path / "run", optimizer=optimizer) as rec:
            one_step(kit, model, optimizer, *batch(kit), rec)
            model(batch(kit)[0])
            raise KeyError("in the loop")

    with pytest.raises(KeyError, match="in the loop"):
        loop()
    assert hook_count(kit, model, optimizer) == 0
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0]
    assert not run.finished()


def test_a_forward_that_failed_and_was_caught_leaves_the_rest_of_the_step_right(kit):
    fails = [True]
    model = Failing(kit, lambda: fails.pop() if fails else False)
    optimizer = kit.sgd(model.parameters())
    x, _ = batch(kit)
    with padiff.record(model, optimizer=optimizer) as rec:
        with pytest.raises(ZeroDivisionError):
            model(x)
        expected = kit.numpy(model(x))
    (step,) = rec.run.steps(0)
    outputs = [r.value for r in step.records if r.layer == "(root)" and r.stage == "forward"]
    assert len(outputs) == 1
    np.testing.assert_array_equal(outputs[0], expected)
    assert hook_count(kit, model, optimizer) == 0


def test_hooks_of_the_user_stay_and_still_fire(kit):
    model = mlp(kit)
    fired = []
    register = model.register_forward_hook if kit.name == "torch" else model.register_forward_post_hook
    register(lambda *_: fired.append(1))
    with padiff.record(model):
        model(batch(kit)[0])
    model(batch(kit)[0])
    assert len(fired) == 2
    assert hook_count(kit, model) == 1


def test_attributes_that_somebody_set_on_a_paddle_optimizer_before_are_there_again_after():
    kit = PADDLE
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    calls = []
    original = optimizer.step

    def own(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    optimizer.step = own
    with padiff.record(model, optimizer=optimizer) as rec:
        one_step(kit, model, optimizer, *batch(kit), rec)
    assert vars(optimizer)["step"] is own
    assert calls == [1]

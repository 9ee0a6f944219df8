"""Evaluation in a loop that trains: its calls are counted, with their shapes, and nothing else is kept of them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from kit.frameworks import is_before
from kit.nets import batch, cnn, mlp, recorded

import padiff
from padiff.records import LOOP, Evaluation
from padiff.records.report import step_text

PLACES = ("before", "after the backward", "after the step", "after try_dump")


def train(kit, evaluate=lambda model, step, place: None, steps=3, folder=None, optimizer_given=True, **options):
    """Train with a recorder; ``evaluate(model, step, place)`` is called at each place of the loop."""
    kit.seed(3)
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    options = {"optimizer": optimizer, **options} if optimizer_given else options
    with padiff.record(model, folder, **options) as rec:
        evaluate(model, 0, "before")
        for step in range(steps):
            x, y = batch(kit, seed=step)
            kit.cross_entropy(model(x), y).backward()
            evaluate(model, step, "after the backward")
            optimizer.step()
            kit.zero(optimizer)
            evaluate(model, step, "after the step")
            rec.try_dump()
            evaluate(model, step, "after try_dump")
    return rec


def validation(kit, place, calls=3, size=(5, 4), mode="no_grad"):
    def evaluate(model, step, here):
        if here != place:
            return
        model.eval()
        x, y = batch(kit, size, seed=9)
        for _ in range(calls):
            if mode == "no_grad":
                with kit.no_grad():
                    kit.cross_entropy(model(x), y)
            else:
                kit.cross_entropy(model(x), y)
        model.train()

    return evaluate


def assert_same_records(rec, other):
    assert rec.run.numbers() == other.run.numbers()
    for number in rec.run.numbers():
        values, expected = recorded(rec, number), recorded(other, number)
        assert list(values) == list(expected)
        for site, value in values.items():
            np.testing.assert_array_equal(value, expected[site], err_msg=site)
        (step,), (plain,) = rec.run.steps(number), other.run.steps(number)
        calls, expected_calls = ([c for c in each.trace.calls if c.layer != LOOP] for each in (step, plain))
        assert len(calls) == len(expected_calls)  # the loop's own are heard in training mode
        assert step.micro_batches == plain.micro_batches == 1


@pytest.mark.parametrize("mode", ["no_grad", "with gradients"])
@pytest.mark.parametrize("place", PLACES)
def test_records_are_those_of_a_training_without_evaluation(kit, place, mode):
    rec = train(kit, validation(kit, place, mode=mode))
    assert_same_records(rec, train(kit))
    of_steps = {number: rec.run.steps(number)[0] for number in rec.run.numbers()}
    where = {"before": [0], "after try_dump": [1, 2]}.get(place, [0, 1, 2])
    for number, step in of_steps.items():
        notes = ("3 call(s) in evaluation mode within the step are not recorded",) if number in where else ()
        assert step.notes == notes
        counted = mode == "no_grad" or place in ("after the backward", "after the step")
        # The inputs of calls that were recorded, and left out when a call in training mode came, are not known.
        shapes = ((5, 4),) if counted else ()
        assert step.evaluations == ((Evaluation("(root)", 3, shapes),) if number in where else ())


@pytest.mark.parametrize("place", PLACES)
def test_it_is_the_same_without_an_optimizer(kit, place):
    rec = train(kit, validation(kit, place), optimizer_given=False)
    assert_same_records(rec, train(kit, optimizer_given=False))


@pytest.mark.parametrize("given", [True, False])
def test_evaluation_spends_nothing_of_the_budget(kit, given, tmp_path):
    def evaluate(model, step, place):
        if place == "before" and not given:
            return  # nothing has trained yet: it is kept until something does
        validation(kit, "after try_dump")(model, step, place)

    sizes = []
    for call in (evaluate, lambda *_: None):
        rec = train(kit, call, folder=tmp_path / str(len(sizes)), optimizer_given=given)
        sizes.append(rec._levels.spent)
    assert sizes[0] == sizes[1] > 0


def test_what_is_dropped_of_a_first_step_gives_its_room_back(kit, monkeypatch):
    monkeypatch.setattr("padiff.recorder.session.FULL_BYTES", 8_000)
    rec = train(kit, validation(kit, "before", calls=50, size=(64, 4)), optimizer_given=False, steps=1)
    (step,) = rec.run.steps(0)
    assert not any(record.source.sketched for record in step.records)


@pytest.mark.parametrize("options", [{"detail": "full"}, {"detail": "sketch"}, {"pack": False}])
def test_counted_calls_are_in_the_folder(kit, options, tmp_path):
    train(kit, validation(kit, "after the step", calls=7), folder=tmp_path / "run", **options)
    (step,) = padiff.open_run(tmp_path / "run").steps(2)
    assert step.evaluations == (Evaluation("(root)", 7, ((5, 4),)),)
    assert "evaluation: 7 calls of (root), [5, 4]" in step_text(step)


def test_a_model_that_stays_in_evaluation_mode_trains_in_it(kit):
    def evaluate(model, step, place):
        if place == "after try_dump" and step == 0:
            model.eval()
            x, y = batch(kit, (5, 4), seed=9)
            with kit.no_grad():
                kit.cross_entropy(model(x), y)

    rec = train(kit, evaluate)
    assert_same_records(rec, train(kit))
    (step,) = rec.run.steps(1)
    assert step.settings["training"] is False
    assert step.evaluations == (Evaluation("(root)", 1, ((5, 4),)),)


def test_a_model_that_is_never_in_training_mode_trains(kit):
    def evaluate(model, step, place):
        if place == "before":
            model.eval()
        if place == "after try_dump":
            with kit.no_grad():
                model(batch(kit, (5, 4), seed=9)[0])

    rec = train(kit, evaluate)
    assert_same_records(rec, train(kit))
    assert rec.run.steps(2)[0].evaluations == (Evaluation("(root)", 1, ((5, 4),)),)


def test_calls_without_gradients_in_training_mode_are_part_of_the_step(kit):
    def rollout(model, step, place):
        if place == "after the backward":
            with kit.no_grad():
                model(batch(kit, (5, 4), seed=9)[0])

    rec = train(kit, rollout)
    assert "(root)/forward/output.0#1" in recorded(rec, 1) and not rec.run.steps(1)[0].evaluations


def test_inference_alone_is_recorded_call_by_call(kit):
    model = cnn(kit)
    model.eval()
    x = batch(kit, (2, 1, 6, 6))[0]
    with padiff.record(model) as rec, kit.no_grad():
        for _ in range(3):
            model(x)
            model(x)
            rec.try_dump()
    assert rec.run.numbers() == [0, 1, 2]
    assert all("5/forward/output.0#1" in recorded(rec, number) for number in range(3))


def test_inference_in_both_modes_is_recorded(kit):
    model = cnn(kit)
    x = batch(kit, (2, 1, 6, 6))[0]
    with padiff.record(model) as rec:
        model(x)
        rec.try_dump()
        model.eval()
        with kit.no_grad():
            model(x)
        rec.try_dump()
    assert rec.run.numbers() == [0, 1]


def test_a_step_of_evaluation_alone_is_not_recorded_and_said(kit):
    model = mlp(kit)
    with padiff.record(model, optimizer=kit.sgd(model.parameters())) as rec:
        model.eval()
        with kit.no_grad():
            model(batch(kit)[0])
        with pytest.warns(RuntimeWarning, match=r"step 0 is not recorded: .* evaluation mode without gradients"):
            assert rec.try_dump() is False
    assert rec.run.numbers() == []


def test_an_exception_within_an_evaluation_ends_it(kit):
    if kit.name == "paddle" and is_before(paddle, 3, 2):
        pytest.skip("this paddle calls no hook after an exception")

    def evaluate(model, step, place):
        if place == "after try_dump":
            model.eval()
            with kit.no_grad(), pytest.raises(Exception, match=r"."):
                model(kit.tensor(np.ones((2, 9))))
            model.train()

    rec = train(kit, evaluate)
    assert_same_records(rec, train(kit))


def test_a_layer_that_calls_itself_ends_its_evaluation_with_the_outermost_call(kit):
    class Tree(kit.Net):
        def build(self):
            self.fc = kit.Linear(3, 3)

        def forward(self, x, depth=2):
            return self.fc(self(x, depth - 1) if depth else x)

    model = Tree()
    optimizer = kit.sgd(model.parameters())
    x = kit.tensor(np.ones((2, 3)))
    with padiff.record(model, optimizer=optimizer) as rec:
        model.eval()
        with kit.no_grad():
            model(x)
            model(x)
        model.train()
        model(x).sum().backward()
        optimizer.step()
        rec.try_dump()
    (step,) = rec.run.steps(0)
    assert step.evaluations == (Evaluation("(root)", 2, ((2, 3),)),)
    assert [site for site in recorded(rec) if site.startswith("fc/forward")] == [
        f"fc/forward/output.0{mark}" for mark in ("", "#1", "#2")
    ]


class Two:
    """Two models in one, as a GAN's loop has them: the loop calls the parts."""

    def __new__(cls, kit):
        return kit.net(lambda self, x: x, left=kit.Linear(4, 4), right=kit.Linear(4, 3))


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_part_that_trains_is_evaluated_by_itself(kit, evaluated):
    model = Two(kit)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for step in range(3):
            x, y = batch(kit, seed=step)
            kit.cross_entropy(model.right(model.left(x)), y).backward()
            optimizer.step()
            kit.zero(optimizer)
            if evaluated:
                model.left.eval()
                with kit.no_grad():
                    model.left(x)
                model.left.train()
            rec.try_dump()
    assert "left/forward/output.0" in recorded(rec, 2) and "left/forward/output.0#1" not in recorded(rec, 2)
    assert rec.run.steps(2)[0].evaluations == ((Evaluation("left", 1, ((6, 4),)),) if evaluated else ())


def test_a_frozen_part_that_never_trains_is_part_of_the_step(kit):
    model = Two(kit)
    optimizer = kit.sgd(model.parameters())
    model.left.eval()
    with padiff.record(model, optimizer=optimizer) as rec:
        for step in range(3):
            x, y = batch(kit, seed=step)
            with kit.no_grad():
                features = model.left(x)
            kit.cross_entropy(model.right(features), y).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    assert all("left/forward/output.0" in recorded(rec, number) for number in range(3))


def test_torch_inference_mode_is_evaluation():
    from kit.frameworks import TorchKit

    torch = pytest.importorskip("torch")
    kit = TorchKit()

    def evaluate(model, step, place):
        if place == "after try_dump":
            model.eval()
            with torch.inference_mode():
                model(batch(kit, (5, 4), seed=9)[0])
            model.train()

    rec = train(kit, evaluate)
    assert_same_records(rec, train(kit))
    assert rec.run.steps(2)[0].evaluations == (Evaluation("(root)", 1, ((5, 4),)),)

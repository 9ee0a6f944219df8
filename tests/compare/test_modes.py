"""Calls that one side makes in evaluation mode where the other side trains."""

from __future__ import annotations

import numpy as np
import pytest

import padiff


def trained(kit, evaluate="", steps=4):
    """Train on two calls a step: a target, and the loss against it."""
    kit.seed(0)
    net = kit.Sequential(kit.Linear(6, 8), kit.batchnorm1d(8), kit.Linear(8, 2))
    rng = np.random.default_rng(1)
    state = kit.state(net)
    kit.load(net, {k: np.abs(rng.normal(size=np.shape(v))).astype("float32") for k, v in sorted(state.items())})
    optimizer = kit.sgd(net.parameters(), 0.05)

    def batch():
        return kit.tensor(rng.normal(size=(12, 6)).astype("float32"))

    validation = kit.tensor(np.random.default_rng(7).normal(size=(5, 6)).astype("float32"))
    seen = []
    with padiff.record(net, optimizer=optimizer) as rec:
        for step in range(steps):
            if evaluate == "before" or (evaluate == "forever" and step == 2):
                net.eval()
                net(validation)
                net.train() if evaluate == "before" else None
            a, b = batch(), batch()
            net.eval() if evaluate == "target" else None
            target = a[:, :2] if "seen" in evaluate else net(a).detach()
            net.train() if evaluate == "target" else None
            seen.append(b)
            if step == 2 and "seen" in evaluate:
                net.eval() if evaluate == "seen" else None
                for each in seen:
                    net(each)
                net.train()
            ((net(b) - target) ** 2).mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("swapped", [False, True])
def test_a_call_in_evaluation_mode_is_not_taken_for_another_batch(kit, swapped):
    runs, sides = [trained(kit), trained(kit, "target")], ["reference", "candidate"]
    first = padiff.compare_runs(*runs[:: -1 if swapped else 1]).first_diff
    assert (first.step, first.stage, first.reference) == (0, "forward", "1"), first.message
    training, evaluating = sides[:: -1 if swapped else 1]
    expected = f"the {evaluating} makes call 1 of the step in evaluation mode, the {training} in training mode"
    assert first.cause.kind == "mode" and expected in first.message
    assert "other batches" not in first.message


def test_a_model_that_stays_in_evaluation_mode_is_named_from_its_step_on(kit):
    first = padiff.compare_runs(trained(kit), trained(kit, "forever")).first_diff
    assert (first.step, first.stage, first.reference) == (2, "forward", "1"), first.message
    assert first.cause.kind == "mode" and "from step 2 on the candidate is in evaluation mode" in first.message
    assert "other batches" not in first.message


def test_a_validation_of_one_side_alone_is_no_difference(kit):
    assert padiff.compare_runs(trained(kit), trained(kit, "before")).passed
    assert padiff.compare_runs(trained(kit, "before"), trained(kit)).passed


def test_a_validation_in_training_mode_is_named_also_on_batches_of_the_training(kit):
    assert padiff.compare_runs(trained(kit, "seen"), trained(kit, "seen")).passed
    first = padiff.compare_runs(trained(kit, "seen"), trained(kit, "seen, without eval")).first_diff
    assert (first.step, first.stage, first.reference) == (3, "weight", "1"), first.message
    assert (first.cause.kind, first.cause.fix) == ("mode", "model.eval()"), first.message

"""Losses that users write with operators: what is other in them is computed from the calls that the loop made."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH
from kit.nets import learn

import padiff

ROWS, INPUTS, CLASSES, LENGTH = 12, 6, 5, 4
RNG = np.random.default_rng(11)
WEIGHTS = {
    "body": RNG.normal(size=(INPUTS, 8)).astype("float32"),
    "head": RNG.normal(size=(8, CLASSES)).astype("float32"),
}
X = RNG.normal(size=(ROWS, LENGTH, INPUTS)).astype("float32")
LABELS = RNG.integers(0, CLASSES, (ROWS, LENGTH))
MASK = (np.arange(LENGTH) < RNG.integers(1, LENGTH + 1, ROWS)[:, None]).astype("float32")
CLASS_WEIGHTS = np.array([1.0, 0.5, 2.0, 1.5, 0.8], "float32")


class Ops:
    """The calls that the losses are written with, in either framework."""

    def __init__(self, kit):
        self.name = kit.name
        if kit.name == "torch":
            import torch
            import torch.nn.functional as functional

            self.log_softmax = lambda z, axis=-1: torch.log_softmax(z, axis)
            self.one_hot = lambda y: functional.one_hot(y, CLASSES).float()
            self.picked = lambda logs, y: logs.gather(-1, y.unsqueeze(-1)).squeeze(-1)
            self.total = lambda x: x.sum(-1)
            self.roll = lambda x: torch.roll(x, 1, -1)
            self.tensor = torch.from_numpy
            self.logsumexp = lambda z: torch.logsumexp(z, -1)
            self.clean = functional.cross_entropy
        else:
            import paddle
            import paddle.nn.functional as functional

            self.log_softmax = lambda z, axis=-1: functional.log_softmax(z, axis)
            self.one_hot = lambda y: functional.one_hot(y, CLASSES)
            self.picked = lambda logs, y: paddle.take_along_axis(logs, y.unsqueeze(-1), -1).squeeze(-1)
            self.total = lambda x: x.sum(-1)
            self.roll = lambda x: paddle.roll(x, 1, -1)
            self.tensor = paddle.to_tensor
            self.logsumexp = lambda z: paddle.logsumexp(z, -1)
            self.clean = functional.cross_entropy


def of_one_hot(ops, z, y, mask, fault):
    """``-(targets * logs).sum(-1)``, its mean over what the mask keeps."""
    smoothing = {"no_smoothing": 0.0, "more_smoothing": 0.3}.get(fault, 0.1)
    targets = ops.one_hot(y) * (1 - smoothing) + smoothing / CLASSES
    if fault == "temperature":
        z = z / 4.0
    logs = ops.log_softmax(z, 1 if fault == "axis" else -1)
    rows = -ops.total(targets * logs)
    if fault == "class_weights":
        rows = rows * ops.tensor(CLASS_WEIGHTS)[y]
    if fault == "focal":
        rows = rows * (1 - (-rows).exp()) ** 2
    return _mean(ops, rows, mask, fault, z)


def of_picked(ops, z, y, mask, fault):
    """The log share of the label, picked."""
    if fault == "labels_shifted":
        y = ops.roll(y)
    logs = z - ops.logsumexp(z).unsqueeze(-1)
    if fault == "shares":
        logs = logs.exp()
    return _mean(ops, -ops.picked(logs, y), mask, fault, z)


def _mean(ops, rows, mask, fault, z):
    if fault == "mask_inverted":
        mask = 1 - mask
    if fault == "mask_shifted":
        mask = ops.roll(mask)
    if fault == "squared":
        rows = rows**2
    if fault == "of_all":
        return rows.mean()
    if fault == "over_all":
        return (rows * mask).mean()
    if fault == "summed":
        return (rows * mask).sum()
    if fault == "of_samples":
        return ((rows * mask).sum(-1) / mask.sum(-1)).mean()
    loss = (rows * mask).sum() / mask.sum()
    return loss + 0.05 * (ops.logsumexp(z) ** 2).mean() if fault == "z_loss" else loss


LOSSES = {"one_hot": of_one_hot, "picked": of_picked}


def recorded(kit, loss, fault, logged=True, mask=MASK, labels=LABELS, **options):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.body, self.act, self.head = kit.Linear(INPUTS, 8), kit.Tanh(), kit.Linear(8, CLASSES)

        def forward(self, x):
            return self.head(self.act(self.body(x)))

    model, ops = Net(), Ops(kit)
    for name, matrix in WEIGHTS.items():
        layer = getattr(model, name)
        kit.set_weight(layer, matrix.T)
        kit.set(layer.bias, np.zeros(matrix.shape[1], "float32"))
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for _ in range(2):
            made = LOSSES[loss](ops, model(kit.tensor(X)), ops.tensor(labels), ops.tensor(mask), fault)
            learn(kit, optimizer, made, rec, logged)
    return rec.run


@cache
def right(loss, logged=True, detail="full"):
    """The reference's run, which no comparison changes."""
    return recorded(TORCH, loss, "", logged, detail=detail)


# Which loss, the fault, the kind of the cause, words of it; where what differs is the candidate's, and the reference's.
FAULTS = [
    ("one_hot", "no_smoothing", "smoothing", "label smoothing"),
    ("one_hot", "more_smoothing", "smoothing", "label smoothing"),
    ("one_hot", "temperature", "temperature|scale_", "0.25|4"),
    ("one_hot", "axis", "softmax_axis", "axis 1 for the reference's"),
    ("one_hot", "class_weights", "loss_weight", "class weights 0: 1, 1: 0.5, 2: 2"),
    ("one_hot", "focal", "focal", "focal loss"),
    ("one_hot", "mask_inverted", "mask_inverted", "is inverted"),
    ("one_hot", "mask_shifted", "mask_shifted", "is shifted by one"),
    ("one_hot", "of_all", "mask_missing|mean_over_pads", "48 places"),
    ("one_hot", "over_all", "reduction", "48 places"),
    ("one_hot", "summed", "reduction", "the sum for the mean"),
    ("one_hot", "of_samples", "reduction", "each sequence's mean"),
    ("one_hot", "z_loss", "loss_term", "add|term"),
    ("picked", "labels_shifted", "labels", "shifted|other labels"),
    ("picked", "shares", "log_softmax_missing", "probabilities"),
    ("picked", "mask_inverted", "mask_inverted", "is inverted"),
    ("picked", "of_samples", "reduction", "each sequence's mean"),
    ("picked", "squared", "loss_power", "square"),
]


# Each fault in both frameworks, logged and not; in full and as sketches by turns.
CASES = [
    (*fault, kit, logged, ("full", "sketch")[(k + logged) % 2])
    for k, fault in enumerate(FAULTS)
    for kit, logged in ((TORCH, bool(k % 2)), (PADDLE, not k % 2))
]


@pytest.mark.parametrize(("loss", "fault", "kind", "words", "kit", "logged", "detail"), CASES)
def test_what_is_other_in_a_loss_is_named_and_proven(kit, loss, fault, kind, words, logged, detail):
    report = padiff.compare_runs(right(loss, logged, detail), recorded(kit, loss, fault, logged, detail=detail))
    found = report.first_diff
    assert found.stage == "loss"
    assert found.cause.proven, found.cause
    assert any(found.cause.kind.startswith(one) for one in kind.split("|")), found.cause
    assert any(word in found.cause.sentence for word in words.split("|")), found.cause


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_are_written_alike_match(kit, loss):
    assert padiff.compare_runs(right(loss), recorded(kit, loss, "")).passed


def test_two_losses_that_give_the_same_match(kit):
    one = recorded(TORCH, "one_hot", "no_smoothing")
    assert padiff.compare_runs(one, recorded(kit, "picked", "")).passed


def test_a_loss_that_differs_in_two_things_has_no_proven_cause(kit):
    labels = np.roll(LABELS, 2, 1)
    one = recorded(TORCH, "one_hot", "", labels=LABELS)
    other = recorded(kit, "one_hot", "of_samples", labels=labels)
    cause = padiff.compare_runs(one, other).first_diff.cause
    assert not cause.proven

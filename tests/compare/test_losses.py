"""Runs whose losses differ, and runs that only write them in different ways: torch against paddle."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import learn, mlp
from paddle.nn import functional as P  # noqa: N812
from torch.nn import functional as F  # noqa: N812

import padiff

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 4)).astype("float32")
LABELS = RNG.integers(0, 3, 16)
TARGET = RNG.standard_normal((16, 3)).astype("float32")
MATRICES = RNG.standard_normal((8, 4)), RNG.standard_normal((3, 8))
OTHER = np.where(np.arange(16) == 3, (LABELS + 1) % 3, LABELS)
IGNORED = np.where(np.arange(16) % 4 == 0, -100, LABELS)


def net(kit):
    model = mlp(kit)
    for layer, matrix in zip((model[0], model[2]), MATRICES):
        kit.set_weight(layer, matrix.astype("float32"))
        kit.set(layer.bias, np.zeros(len(matrix), "float32"))
    return model


def trained(kit, loss, steps=1, x=X, log=False, clip=None, model=None, **options):
    model = net(kit) if model is None else model
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            clips = None if clip is None else lambda: clip(model.parameters())
            learn(kit, optimizer, loss(model(kit.tensor(x))), rec, log, clips)
    return rec.run


def t(array):
    return torch.tensor(np.asarray(array))


def p(array):
    return paddle.to_tensor(np.asarray(array))


CE = lambda o: F.cross_entropy(o, t(LABELS))  # noqa: E731
PCE = lambda o: P.cross_entropy(o, p(LABELS))  # noqa: E731


def smoothed_by_hand(o):
    one_hot = np.eye(3, dtype="float32")[LABELS]
    return P.cross_entropy(o, p(0.9 * one_hot + np.float32(0.1 / 3)), soft_label=True)


def masked(labels, padding):
    """Labels of a number that a mask takes out again."""
    mask = (np.arange(16) % 4 != 0).astype("float32")
    return np.where(mask > 0, labels, padding), mask


def masked_in_torch(o):
    labels, mask = masked(LABELS, 0)
    return (F.cross_entropy(o, t(labels), reduction="none") * t(mask)).sum() / 12


def masked_in_paddle(o):
    labels, mask = masked(LABELS, (LABELS + 1) % 3)
    return (P.cross_entropy(o, p(labels), reduction="none").flatten() * p(mask)).sum() / 12


SAME = {
    "as it is": (CE, PCE),
    "labels in a column": (CE, lambda o: P.cross_entropy(o, p(LABELS[:, None]))),
    "with softmax": (CE, lambda o: P.softmax_with_cross_entropy(o, p(LABELS[:, None])).mean()),
    "a sum, divided": (CE, lambda o: P.cross_entropy(o, p(LABELS), reduction="sum") / 16),
    "logarithms": (lambda o: F.nll_loss(F.log_softmax(o, -1), t(LABELS)), PCE),
    "smoothed by hand": (lambda o: F.cross_entropy(o, t(LABELS), label_smoothing=0.1), smoothed_by_hand),
    "ignored by another number": (
        lambda o: F.cross_entropy(o, t(np.where(LABELS == 2, -100, LABELS))),
        lambda o: P.cross_entropy(o, p(LABELS), ignore_index=2),
    ),
    "padding that a mask takes out": (masked_in_torch, masked_in_paddle),
    "in rows and in places": (
        lambda o: F.cross_entropy(o.reshape(4, 4, 3).permute(0, 2, 1), t(LABELS.reshape(4, 4))),
        lambda o: P.cross_entropy(o.reshape([4, 4, 3]), p(LABELS.reshape(4, 4))),
    ),
    "arguments the other way round": (lambda o: F.mse_loss(t(TARGET), o), lambda o: paddle.nn.MSELoss()(o, p(TARGET))),
    "one of torch's functions by hand": (lambda o: F.mse_loss(o, t(TARGET)), lambda o: ((o - p(TARGET)) ** 2).mean()),
    "Huber": (lambda o: F.huber_loss(o, t(TARGET)), lambda o: paddle.nn.SmoothL1Loss()(o, p(TARGET))),
    "two losses in another order": (
        lambda o: F.mse_loss(o, t(TARGET)) + F.mse_loss(o, t(2 * TARGET)),
        lambda o: P.mse_loss(o, p(2 * TARGET)) + P.mse_loss(o, p(TARGET)),
    ),
    "two labels in another order": (
        lambda o: F.cross_entropy(o, t(LABELS)) + F.cross_entropy(2 * o, t(OTHER)),
        lambda o: P.cross_entropy(2 * o, p(OTHER)) + P.cross_entropy(o, p(LABELS)),
    ),
    "a mean of parts": (
        CE, lambda o: (P.cross_entropy(o[:8], p(LABELS[:8])) + P.cross_entropy(o[8:], p(LABELS[8:]))) / 2,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
@pytest.mark.parametrize("log", [False, True], ids=["", "logged"])
@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize(("reference", "candidate"), SAME.values(), ids=SAME)
def test_one_loss_is_written_in_many_ways(reference, candidate, detail, log):
    runs = (trained(kit, loss, 2, log=log, detail=detail) for kit, loss in ((TORCH, reference), (PADDLE, candidate)))
    report = padiff.compare_runs(*runs)
    assert report.passed, report.first_diff


WEIGHT = np.array([1.0, 2.0, 3.0], "float32")
#: Reference, candidate, slot of the first diff, kind of the cause, whether it is proven, what it says, the line.
FAULTS = {
    "other labels": (
        CE, lambda o: P.cross_entropy(o, p(OTHER)), "cross_entropy().input.labels", "labels", True,
        rf"1 of 16 differ, the first at \[3\], {LABELS[3]} against {OTHER[3]}", "",
    ),
    "other labels, in a column": (
        CE, lambda o: P.cross_entropy(o, p(OTHER[:, None])), "cross_entropy().input.labels", "labels", True, "", "",
    ),
    "labels in another order": (
        CE, lambda o: P.cross_entropy(o, p(LABELS[::-1].copy())), "cross_entropy().input.labels", "labels", True,
        "the same labels in another order", "",
    ),
    "labels that are shifted": (
        lambda o: F.cross_entropy(o, t(LABELS)), lambda o: P.cross_entropy(o, p(np.append(LABELS[1:], 0))),
        "cross_entropy().input.labels", "labels", True, "the label of the one after it", "",
    ),
    "labels of another function": (
        lambda o: F.nll_loss(F.log_softmax(o, -1), t(LABELS)), lambda o: P.cross_entropy(o, p(OTHER)),
        "nll_loss().input.labels", "labels", True, "1 of 16", "",
    ),
    "labels that one side ignores": (
        lambda o: F.cross_entropy(o, t(LABELS)), lambda o: P.cross_entropy(o, p(IGNORED)),
        "cross_entropy().input.labels", "labels", True, "ignored in the candidate only", "",
    ),
    "another target": (
        lambda o: F.mse_loss(o, t(TARGET)), lambda o: P.mse_loss(o, p(3 * TARGET)), "mse_loss().input.target", "labels",
        True, "targets that the loss is of are 3 times", "",
    ),
    "ignored rows": (
        lambda o: F.cross_entropy(o, t(IGNORED)), lambda o: P.cross_entropy(o, p(IGNORED)), "cross_entropy().0",
        "ignored_rows", True, "4 of 16 labels are ignored, and the reference's mean is over 12 rows",
        'paddle.nn.functional.cross_entropy(..., reduction="sum") / (labels != -100).sum()',
    ),
    "smoothing": (
        CE, lambda o: P.cross_entropy(o, p(LABELS), label_smoothing=0.1), "cross_entropy().0", "label_smoothing", True,
        "label_smoothing 0.0 against 0.1", "paddle.nn.functional.cross_entropy(..., label_smoothing=0.0)",
    ),
    "reduction": (
        CE, lambda o: P.cross_entropy(o, p(LABELS), reduction="sum"), "cross_entropy().0", "loss_reduction", True,
        "reduction mean against sum", "paddle.nn.functional.cross_entropy(..., reduction='mean')",
    ),
    "ignore_index": (
        lambda o: F.cross_entropy(o, t(LABELS), ignore_index=2), PCE, "cross_entropy().0", "ignore_index", True,
        "ignore_index 2 against -100", "paddle.nn.functional.cross_entropy(..., ignore_index=2)",
    ),
    "weights of classes": (
        lambda o: F.cross_entropy(o, t(LABELS), weight=t(WEIGHT)),
        lambda o: P.cross_entropy(o, p(LABELS), weight=p(WEIGHT[::-1].copy())),
        "cross_entropy().input.weight", "loss_weight", True, r"\[1.0, 2.0, 3.0\] against \[3.0, 2.0, 1.0\]",
        "paddle.nn.functional.cross_entropy(..., weight=paddle.to_tensor([1.0, 2.0, 3.0]))",
    ),
    "weights forgotten": (
        lambda o: F.cross_entropy(o, t(LABELS), weight=t(WEIGHT)), PCE, "cross_entropy().0", "loss_weight", True,
        r"weight \[1.0, 2.0, 3.0\] against not set",
        "paddle.nn.functional.cross_entropy(..., weight=paddle.to_tensor([1.0, 2.0, 3.0]))",
    ),
    "softmax twice": (
        CE, lambda o: P.cross_entropy(P.softmax(o), p(LABELS)), "cross_entropy().input.logits", "softmax_twice", True,
        "takes the softmax", "paddle.nn.functional.cross_entropy(logits, ...)",
    ),
    "a temperature": (
        CE, lambda o: P.cross_entropy(o / 2, p(LABELS)), "cross_entropy().input.logits", "temperature", True,
        "by 2 for its loss .a temperature., the candidate does", "",
    ),
    "Huber's for smooth L1": (
        lambda o: F.smooth_l1_loss(o, t(TARGET), beta=0.5), lambda o: P.smooth_l1_loss(o, p(TARGET), delta=0.5), "loss",
        "loss_function", True, "smooth_l1_loss against huber_loss",
        "paddle.nn.functional.smooth_l1_loss(..., is_huber=False, beta=0.5)".replace("beta", "delta"),
    ),
    "Huber's for smooth L1, in a sum": (
        lambda o: F.mse_loss(o, t(TARGET)) + 2 * F.smooth_l1_loss(o.tanh(), t(TARGET), beta=0.5),
        lambda o: P.mse_loss(o, p(TARGET)) + 2 * P.smooth_l1_loss(o.tanh(), p(TARGET), delta=0.5), "loss",
        "loss_function", True, "huber_loss for the reference's smooth_l1_loss",
        "paddle.nn.functional.smooth_l1_loss(..., is_huber=False)",
    ),
    "shapes that are broadcast": (
        lambda o: F.mse_loss(o[:, :1], t(TARGET[:, :1])), lambda o: P.mse_loss(o[:, :1], p(TARGET[:, 0])),
        "mse_loss().0", "loss_shapes", True, r"\(16, 1\) and target \(16,\) are broadcast", "give both the same shape",
    ),
    "delta": (
        lambda o: F.huber_loss(o, t(TARGET), delta=0.5), lambda o: P.smooth_l1_loss(o, p(TARGET)), "huber_loss().0",
        "loss_setting", True, "delta 0.5 against 1", "paddle.nn.functional.smooth_l1_loss(..., delta=0.5)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("log", [False, True], ids=["", "logged"])
@pytest.mark.parametrize(
    ("reference", "candidate", "slot", "kind", "proven", "says", "fix"), FAULTS.values(), ids=FAULTS
)
def test_what_is_wrong_with_a_loss_is_said(reference, candidate, slot, kind, proven, says, fix, log):
    report = padiff.compare_runs(trained(TORCH, reference, log=log), trained(PADDLE, candidate, log=log))
    first = report.first_diff
    assert (first.step, first.stage, first.slot) == (0, "loss", slot)
    assert (first.cause.kind, first.cause.proven, first.cause.fix) == (kind, proven, fix)
    assert re.search(says, str(first.cause)), first.cause


def test_smoothed_labels_are_ignored_by_one_framework_only():
    """Paddle's loss is the sum over all rows, divided by the number of logits, as numpy finds."""
    options = {"ignore_index": int(LABELS[0]), "label_smoothing": 0.1}
    report = padiff.compare_runs(
        trained(TORCH, lambda o: F.cross_entropy(o, t(LABELS), **options)),
        trained(PADDLE, lambda o: P.cross_entropy(o, p(LABELS), **options)),
    )
    cause = report.first_diff.cause
    assert (
        cause.kind == "ignored_rows"
        and not cause.proven
        and "where labels are smoothed, paddle ignores none" in str(cause)
    )
    assert cause.fix.startswith("keep = labels != ")


def test_the_other_way_round_and_in_one_framework():
    report = padiff.compare_runs(trained(PADDLE, PCE), trained(TORCH, lambda o: F.cross_entropy(o, t(OTHER))))
    assert (report.first_diff.slot, report.first_diff.cause.kind) == ("cross_entropy().input.labels", "labels")
    report = padiff.compare_runs(
        trained(PADDLE, lambda o: P.cross_entropy(o, p(IGNORED))),
        trained(TORCH, lambda o: F.cross_entropy(o, t(IGNORED))),
    )
    assert report.first_diff.cause.kind == "ignored_rows"
    assert 'torch.nn.functional.cross_entropy(..., reduction="sum") / labels.numel()' in report.first_diff.message
    report = padiff.compare_runs(trained(TORCH, CE), trained(TORCH, lambda o: F.cross_entropy(o, t(OTHER))))
    assert report.first_diff.cause.kind == "labels"


def test_a_label_that_is_another_number_is_named():
    def loss(functions, number):
        return lambda o: functions.binary_cross_entropy_with_logits(o, o.detach() * 0 + number)

    report = padiff.compare_runs(trained(TORCH, loss(F, 0.9)), trained(PADDLE, loss(P, 1.0)))
    cause = report.first_diff.cause
    assert (cause.kind, cause.proven) == ("label_value", True)
    assert cause.sentence.endswith("each that is not equal is 1 for the reference's 0.9")


def test_labels_are_found_with_sketches(tmp_path):
    trained(TORCH, CE, detail="sketch", dir_path=tmp_path / "torch")
    trained(PADDLE, lambda o: P.cross_entropy(o, p(OTHER)), detail="sketch", dir_path=tmp_path / "paddle")
    first = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle").first_diff
    assert (first.stage, first.slot, first.cause.kind) == ("loss", "cross_entropy().input.labels", "labels")


def test_one_label_of_many_is_found_in_bfloat16():
    """What it makes of the gradient is less than rounding may: the loss of a few rows in many."""
    x = RNG.standard_normal((64, 4)).astype("float32")
    labels = RNG.integers(0, 3, 64)
    other = np.where(np.arange(64) < 3, (labels + 1) % 3, labels)

    def run(given):
        model = net(TORCH)

        class Rounded(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, x):
                with torch.autocast("cpu", torch.bfloat16):
                    return self.inner(x)

        return trained(TORCH, lambda o: F.cross_entropy(o.float(), t(given)), x=x, model=Rounded())

    assert padiff.compare_runs(run(labels), run(labels)).passed
    first = padiff.compare_runs(run(labels), run(other)).first_diff
    assert (first.stage, first.slot) == ("loss", "cross_entropy().input.labels")


def test_the_second_micro_batch():
    def run(labels):
        calls = iter(labels)
        return trained_twice(lambda o: F.cross_entropy(o, t(next(calls))))

    def trained_twice(loss):
        model = net(TORCH)
        with padiff.record(model) as rec:
            for k in range(2):
                loss(model(t((k + 1) * X))).backward()
            rec.try_dump()
        return rec.run

    first = padiff.compare_runs(run([LABELS, LABELS]), run([LABELS, OTHER])).first_diff
    assert (first.stage, first.slot, first.diff.pair.anchor.call) == ("loss", "cross_entropy().input.labels", 1)


def test_a_fault_elsewhere_is_not_blamed_on_a_loss_that_is_written_in_another_way():
    """The weights' decay differs, and so does how labels are ignored, which comes to the same."""

    def run(kit, loss, decay):
        model = net(kit)
        optimizer = (
            torch.optim.SGD(model.parameters(), 0.1, weight_decay=decay)
            if kit is TORCH
            else paddle.optimizer.SGD(0.1, parameters=model.parameters(), weight_decay=decay)
        )
        with padiff.record(model, optimizer=optimizer) as rec:
            loss(model(kit.tensor(X))).backward()
            optimizer.step()
            rec.try_dump()
        return rec.run

    reference, candidate = SAME["ignored by another number"]
    first = padiff.compare_runs(run(TORCH, reference, 0.1), run(PADDLE, candidate, 0.2)).first_diff
    assert first.stage == "update"


def test_clipping_by_another_limit():
    def clipped(kit, loss, limit):
        utils = (torch if kit is TORCH else paddle).nn.utils
        return trained(kit, loss, clip=lambda parameters: utils.clip_grad_norm_(parameters, limit))

    assert padiff.compare_runs(clipped(TORCH, CE, 0.1), clipped(PADDLE, PCE, 0.1)).passed
    first = padiff.compare_runs(clipped(TORCH, CE, 0.1), clipped(PADDLE, PCE, 0.2)).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("grad", "clip_limit", True)
    assert "0.2" in str(first.cause) and "0.1" in str(first.cause)


def test_clipping_by_a_function_against_clipping_by_the_optimizer_is_no_diff():
    def of_paddle():
        model = net(PADDLE)
        clip = paddle.nn.ClipGradByGlobalNorm(0.1)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=clip)
        with padiff.record(model, optimizer=optimizer) as rec:
            PCE(model(PADDLE.tensor(X))).backward()
            optimizer.step()
            rec.try_dump()
        return rec.run

    def clip(parameters):
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    report = padiff.compare_runs(trained(TORCH, CE, clip=clip), of_paddle())
    assert report.passed, report.first_diff

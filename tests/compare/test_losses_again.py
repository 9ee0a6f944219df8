"""Losses computed again in float64: against torch, against paddle, and in closed form."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as paddle_functional
from torch.nn import functional as torch_functional

from padiff.compare.diagnose.computing.recorded_losses import loss_of, loss_settings

RNG = np.random.default_rng(0)
ROWS, CLASSES = 12, 5
LOGITS = RNG.standard_normal((ROWS, CLASSES))
LOGS = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
LABELS = RNG.integers(0, CLASSES, ROWS)
IGNORED = np.where(np.arange(ROWS) % 4 == 1, -100, LABELS)
WEIGHT = RNG.random(CLASSES) + 0.1
SOFT = RNG.random((ROWS, CLASSES))
SOFT /= SOFT.sum(-1, keepdims=True)
BINARY = RNG.random((ROWS, CLASSES))
REDUCTIONS = ("mean", "sum", "none")


def of_torch(function, *args, **kwargs):
    given = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
    return getattr(torch_functional, function)(*map(torch.tensor, args), **given).numpy().ravel()


def of_paddle(function, *args, **kwargs):
    given = {k: paddle.to_tensor(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
    return getattr(paddle_functional, function)(*map(paddle.to_tensor, args), **given).numpy().ravel()


def settings_of(options):
    return {name: value for name, value in options.items() if not isinstance(value, np.ndarray)}


def weights_of(options):
    return {name: value for name, value in options.items() if isinstance(value, np.ndarray)}


CROSS_ENTROPIES = {
    "plain": (LABELS, {}),
    "ignored": (IGNORED, {}),
    "another ignored": (LABELS, {"ignore_index": int(LABELS[0])}),
    "weighed": (LABELS, {"weight": WEIGHT}),
    "weighed, ignored": (IGNORED, {"weight": WEIGHT}),
    "weighed, another ignored": (LABELS, {"weight": WEIGHT, "ignore_index": int(LABELS[0])}),
    "smoothed": (LABELS, {"label_smoothing": 0.2}),
    "smoothed, weighed": (LABELS, {"label_smoothing": 0.2, "weight": WEIGHT}),
    "smoothed, another ignored": (LABELS, {"label_smoothing": 0.2, "ignore_index": int(LABELS[0])}),
    "smoothed, weighed, another ignored": (
        LABELS,
        {"label_smoothing": 0.2, "weight": WEIGHT, "ignore_index": int(LABELS[0])},
    ),
    "soft": (SOFT, {}),
    "soft, weighed": (SOFT, {"weight": WEIGHT}),
    "soft, smoothed": (SOFT, {"label_smoothing": 0.2}),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("labels", "options"), CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_cross_entropy(framework, labels, options, reduction):
    soft = labels.ndim == 2
    settings = {**settings_of(options), "reduction": reduction, "soft_label": soft}
    found = loss_of("cross_entropy", {"logits": LOGITS, "labels": labels, **weights_of(options)}, settings, framework)
    call = of_torch if framework == "torch" else of_paddle
    more = {"soft_label": soft} if framework == "paddle" else {}
    expected = call("cross_entropy", LOGITS, labels, reduction=reduction, **options, **more)
    # paddle smooths labels in float32, whatever the logits are.
    rough = 1e-7 if framework == "paddle" and "label_smoothing" in options else 1e-12
    np.testing.assert_allclose(found.ravel(), expected, rtol=rough)


def test_the_mean_over_ignored_rows_is_another_in_each_framework():
    """In closed form: equal logits, so each row's loss is log C; 3 of 12 rows are ignored."""
    inputs = {"logits": np.zeros((ROWS, CLASSES)), "labels": IGNORED}
    assert loss_of("cross_entropy", inputs, {}, "torch") == pytest.approx(math.log(CLASSES), rel=1e-12)
    assert loss_of("cross_entropy", inputs, {}, "paddle") == pytest.approx(math.log(CLASSES) * 9 / 12, rel=1e-12)
    more = {"ignore_index": 2, "label_smoothing": 0.3}
    labels = np.where(IGNORED < 0, 2, np.where(LABELS == 2, 3, LABELS))
    inputs = {"logits": np.zeros((ROWS, CLASSES)), "labels": labels}
    assert loss_of("cross_entropy", inputs, more, "torch") == pytest.approx(math.log(CLASSES), rel=1e-12)
    # Whatever the labels are, smoothed rows count, and so does each of their classes.
    assert loss_of("cross_entropy", inputs, more, "paddle") == pytest.approx(math.log(CLASSES) / CLASSES, rel=1e-12)


def test_places_with_classes_first_and_last():
    logits, labels = RNG.standard_normal((2, 4, 3, 5)), RNG.integers(0, 4, (2, 3, 5))
    found = loss_of("cross_entropy", {"logits": logits, "labels": labels}, {"axis": 1}, "torch")
    assert found == pytest.approx(of_torch("cross_entropy", logits, labels)[0], rel=1e-12)
    last = np.moveaxis(logits, 1, -1)
    for shape in (labels.shape, (*labels.shape, 1)):
        found = loss_of("cross_entropy", {"logits": last, "labels": labels.reshape(shape)}, {}, "paddle")
        assert found == pytest.approx(of_paddle("cross_entropy", last, labels.reshape(shape))[0], rel=1e-12)
    found = loss_of("cross_entropy", {"logits": logits, "labels": labels[:, None]}, {"axis": 1}, "paddle")
    assert found == pytest.approx(of_paddle("cross_entropy", logits, labels[:, None], axis=1)[0], rel=1e-12)
    soft = np.moveaxis(RNG.dirichlet(np.ones(4), (2, 3, 5)), -1, 1)
    found = loss_of("cross_entropy", {"logits": logits, "labels": soft}, {"axis": 1, "soft_label": True}, "torch")
    assert found == pytest.approx(of_torch("cross_entropy", logits, soft)[0], rel=1e-12)


def test_logits_as_the_model_gave_them_where_the_loss_got_rows_of_them():
    logits, labels = RNG.standard_normal((3, 4, CLASSES)), LABELS
    expected = of_torch("cross_entropy", logits.reshape(-1, CLASSES), labels)
    for view in (logits, logits.reshape(12, CLASSES, 1)):
        found = loss_of("cross_entropy", {"logits": view, "labels": labels}, {"axis": -1}, "torch")
        assert found == pytest.approx(expected[0], rel=1e-12)


def test_probabilities_in_the_place_of_logits():
    settings = {"use_softmax": False}
    found = loss_of("cross_entropy", {"probabilities": SOFT, "labels": LABELS}, settings, "paddle")
    assert found == pytest.approx(of_paddle("cross_entropy", SOFT, LABELS, use_softmax=False)[0], rel=1e-12)


# torch warns that the mean of a divergence will one day be another.
MEAN_OF_ALL = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
PAIR = {"prediction": LOGITS, "target": SOFT}
OTHERS = {
    "nll": ("nll_loss", {"log_probabilities": LOGS, "labels": LABELS}, {}, "both"),
    # Where a label is ignored, paddle 3.3.1 writes where it must not: the process crashes later, or waits for ever.
    "nll, ignored": ("nll_loss", {"log_probabilities": LOGS, "labels": IGNORED}, {}, "torch"),
    "nll, ignored, weighed": (
        "nll_loss",
        {"log_probabilities": LOGS, "labels": LABELS},
        {"weight": WEIGHT, "ignore_index": int(LABELS[0])},
        "torch",
    ),
    "binary": ("binary_cross_entropy", {"probabilities": BINARY, "labels": SOFT}, {"weight": WEIGHT}, "both"),
    "binary, sure": ("binary_cross_entropy", {"probabilities": BINARY.round(), "labels": SOFT}, {}, "both"),
    "binary with logits": ("binary_cross_entropy_with_logits", {"logits": 20 * LOGITS, "labels": SOFT}, {}, "both"),
    "binary with logits, weighed": (
        "binary_cross_entropy_with_logits",
        {"logits": LOGITS, "labels": SOFT},
        {"weight": WEIGHT, "pos_weight": 2 * WEIGHT},
        "both",
    ),
    "mse": ("mse_loss", PAIR, {}, "both"),
    "mse, weighed": ("mse_loss", PAIR, {"weight": BINARY}, "torch"),
    "l1": ("l1_loss", PAIR, {}, "both"),
    "l1, weighed": ("l1_loss", PAIR, {"weight": BINARY}, "torch"),
    "smooth l1": ("smooth_l1_loss", PAIR, {"beta": 0.5}, "torch"),
    "smooth l1, sharp": ("smooth_l1_loss", PAIR, {"beta": 0.0}, "torch"),
    "huber": ("huber_loss", PAIR, {"delta": 0.5}, "torch"),
    "huber, weighed": ("huber_loss", PAIR, {"delta": 0.5, "weight": BINARY}, "torch"),
    "kl": ("kl_div", {"log_probabilities": LOGS, "target": SOFT.round(1)}, {}, "both"),
    "kl, logarithms": ("kl_div", {"log_probabilities": LOGS, "target": np.log(SOFT)}, {"log_target": True}, "both"),
}


@MEAN_OF_ALL
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("function", "inputs", "options", "where"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_other_losses(function, inputs, options, where, reduction, dtype):
    def cast(some):
        return {k: v.astype(dtype) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v for k, v in some.items()}

    inputs, options = cast(inputs), cast(options)
    settings = {**settings_of(options), "reduction": reduction}
    for call, framework in ((of_torch, "torch"), (of_paddle, "paddle")):
        if where in (framework, "both"):
            found = loss_of(function, {**inputs, **weights_of(options)}, settings, framework)
            expected = call(function, *inputs.values(), reduction=reduction, **options)
            rough = 1e-12 if dtype == "float64" else 2e-6
            np.testing.assert_allclose(found.ravel(), expected, rtol=rough, atol=rough)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_paddle_calls_smooth_l1_is_hubers(reduction):
    expected = of_paddle("smooth_l1_loss", LOGITS, SOFT, delta=0.5, reduction=reduction)
    found = loss_of("huber_loss", PAIR, {"delta": 0.5, "reduction": reduction}, "paddle")
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-12)
    expected = of_paddle("smooth_l1_loss", LOGITS, SOFT, delta=0.5, is_huber=False, reduction=reduction)
    found = loss_of("smooth_l1_loss", PAIR, {"beta": 0.5, "reduction": reduction}, "paddle")
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-12)


def test_the_mean_over_a_batch():
    inputs = {"log_probabilities": LOGS, "target": SOFT}
    for call in (of_torch, of_paddle):
        expected = call("kl_div", LOGS, SOFT, reduction="batchmean")
        assert loss_of("kl_div", inputs, {"reduction": "batchmean"}, "torch") == pytest.approx(expected[0], rel=1e-12)


def test_shapes_that_are_broadcast():
    """A prediction of (12, 1) against a target of (12,) is a mean over 144 differences in both frameworks."""
    prediction, target = LOGITS[:, :1], SOFT[:, 0]
    found = loss_of("mse_loss", {"prediction": prediction, "target": target}, {}, "torch")
    assert found == pytest.approx(np.mean((prediction - target[None]) ** 2), rel=1e-12)
    assert found == pytest.approx(of_paddle("mse_loss", prediction, target)[0], rel=1e-12)


def test_what_is_not_known_is_none():
    assert loss_of("ctc_loss", {}, {}, "torch") is None
    assert loss_of("mse_loss", {"prediction": LOGITS}, {}, "torch") is None
    assert loss_of("mse_loss", PAIR, {"reduction": "median"}, "torch") is None
    assert loss_of("cross_entropy", {"logits": LOGITS, "labels": LABELS[:5]}, {}, "torch") is None
    assert loss_of("cross_entropy", {"logits": LOGITS, "labels": np.full(ROWS, 99)}, {}, "torch") is None


def test_what_the_losses_of_a_run_were_set_to():
    one = {"loss.function": "mse_loss", "loss.reduction": "sum", "clip.kind": "value"}
    assert loss_settings(one, "mse_loss") == [{"function": "mse_loss", "reduction": "sum"}]
    assert loss_settings(one, "l1_loss") == []
    several = {
        "loss.0.function": "mse_loss",
        "loss.0.reduction": "sum",
        "loss.1.function": "kl_div",
        "loss.1.reduction": "mean",
        "loss.2.function": "mse_loss",
        "loss.2.reduction": "mean",
    }
    assert [each["reduction"] for each in loss_settings(several, "mse_loss")] == ["sum", "mean"]

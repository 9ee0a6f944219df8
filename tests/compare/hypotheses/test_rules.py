"""The rules in numpy against torch's and paddle's own optimizers."""

from __future__ import annotations

import sys

import numpy as np
import paddle
import pytest
import torch

from padiff.compare.diagnose.hypotheses import rules
from padiff.compare.diagnose.hypotheses.rules import History, residual_of, residuals_of, updates

STEPS, SIZE, RATE = 5, 40, 0.01
OPTIM, PADDLE_OPTIM = torch.optim, paddle.optimizer


def gradients() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(STEPS, SIZE)) * 0.1


def by_torch(make) -> History:
    weight = torch.nn.Parameter(torch.tensor(np.random.default_rng(0).normal(size=SIZE)))
    optimizer, rows = make([weight]), []
    for gradient in gradients():
        before = weight.detach().numpy().copy()
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        rows.append((gradient, before, weight.detach().numpy() - before))
    return history(rows)


def by_paddle(make) -> History:
    start = np.random.default_rng(0).normal(size=SIZE)
    weight = paddle.create_parameter([SIZE], "float64")
    weight.set_value(start)
    optimizer, rows = make([weight]), []
    for gradient in gradients():
        before = weight.numpy().copy()
        (weight * paddle.to_tensor(gradient)).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        rows.append((gradient, before, weight.numpy() - before))
    return history(rows)


def history(rows) -> History:
    gradient, weight, update = (np.array(column) for column in zip(*rows))
    return History(gradient, weight, update, np.full(STEPS, RATE), (slice(0, SIZE),))


@pytest.mark.parametrize(
    ("rule", "settings", "made"),
    [
        (rules.SGD, {}, lambda: by_torch(lambda p: OPTIM.SGD(p, RATE))),
        (
            rules.SGD,
            {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2},
            lambda: by_torch(lambda p: OPTIM.SGD(p, RATE, 0.9, 0.2, 0.1)),
        ),
        (
            rules.SGD,
            {"momentum": 0.9, "nesterov": 1.0},
            lambda: by_torch(lambda p: OPTIM.SGD(p, RATE, 0.9, nesterov=True)),
        ),
        (
            rules.SGD,
            {"momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.1},
            lambda: by_paddle(lambda p: PADDLE_OPTIM.Momentum(RATE, 0.9, p, use_nesterov=True, weight_decay=0.1)),
        ),
        (rules.ADAM, {"weight_decay": 0.1}, lambda: by_torch(lambda p: OPTIM.Adam(p, RATE, weight_decay=0.1))),
        (
            rules.ADAM,
            {"weight_decay": 0.1, "decoupled": 1.0, "amsgrad": 1.0, "beta2": 0.9},
            lambda: by_torch(lambda p: OPTIM.AdamW(p, RATE, (0.9, 0.9), weight_decay=0.1, amsgrad=True)),
        ),
        (
            rules.ADAM,
            {"weight_decay": 0.1, "decoupled": 1.0, "eps": 1e-3},
            lambda: by_paddle(lambda p: PADDLE_OPTIM.AdamW(RATE, epsilon=1e-3, parameters=p, weight_decay=0.1)),
        ),
        (rules.ADAMAX, {}, lambda: by_torch(lambda p: OPTIM.Adamax(p, RATE))),
        (
            rules.ADAMAX,
            {"eps": 1e-3, "inside": 1.0},
            lambda: by_paddle(lambda p: PADDLE_OPTIM.Adamax(RATE, epsilon=1e-3, parameters=p)),
        ),
        (rules.NADAM, {}, lambda: by_torch(lambda p: OPTIM.NAdam(p, RATE))),
        (rules.NADAM, {}, lambda: by_paddle(lambda p: PADDLE_OPTIM.NAdam(RATE, parameters=p))),
        (rules.ADAGRAD, {"eps": 1e-10}, lambda: by_torch(lambda p: OPTIM.Adagrad(p, RATE))),
        (rules.ADAGRAD, {"eps": 1e-6}, lambda: by_paddle(lambda p: PADDLE_OPTIM.Adagrad(RATE, parameters=p))),
        (
            rules.RMSPROP,
            {"momentum": 0.5, "centered": 1.0},
            lambda: by_torch(lambda p: OPTIM.RMSprop(p, RATE, momentum=0.5, centered=True)),
        ),
        (
            rules.RMSPROP,
            {"alpha": 0.95, "eps": 1e-6, "inside": 1.0, "momentum": 0.5},
            lambda: by_paddle(lambda p: PADDLE_OPTIM.RMSProp(RATE, momentum=0.5, parameters=p)),
        ),
        (rules.RADAM, {}, lambda: by_torch(lambda p: OPTIM.RAdam(p, RATE))),
        (rules.RADAM, {"beta1": 0.8}, lambda: by_paddle(lambda p: PADDLE_OPTIM.RAdam(RATE, 0.8, parameters=p))),
        (rules.ADADELTA, {}, lambda: by_torch(lambda p: OPTIM.Adadelta(p, RATE))),
        (
            rules.ADADELTA,
            {"alpha": 0.95, "eps": 1e-6},
            lambda: by_paddle(lambda p: PADDLE_OPTIM.Adadelta(RATE, parameters=p)),
        ),
        (
            rules.LAMB,
            {"weight_decay": 0.01, "eps": 1e-6},
            lambda: by_paddle(lambda p: PADDLE_OPTIM.Lamb(RATE, 0.01, parameters=p)),
        ),
    ],
)  # fmt: skip
def test_a_rule_makes_the_updates_of_the_frameworks_optimizer(rule, settings, made):
    found = made()
    expected = found.updates
    reference = updates(rule, found, {**rule.defaults, **settings})
    # paddle keeps what it raises beta to in float32, whatever the parameter's type.
    assert np.linalg.norm(reference - expected) <= 4e-5 * np.linalg.norm(expected)
    # A fault in the rule itself would show.
    wrong = updates(rule, found, {**rule.defaults, **settings, "rate": 1.01})
    assert np.linalg.norm(wrong - expected) > 5e-3 * np.linalg.norm(expected)


def test_lion_by_hand():
    rate, one, two, decay = 0.1, 0.9, 0.5, 0.2
    gradient, weight = np.array([[1.0], [-2.0]]), np.array([[3.0], [3.0]])
    found = History(gradient, weight, gradient, np.array([rate, rate]))
    # First step: sign(0.1 * 1) = 1; kept 0.5. Second: sign(0.9 * 0.5 - 0.1 * 2) = sign(0.25) = 1.
    expected = [[-rate * (1 + decay * 3)], [-rate * (1 + decay * 3)]]
    settings = {"rate": 1.0, "beta1": one, "beta2": two, "weight_decay": decay}
    assert np.allclose(updates(rules.LION, found, settings), expected)


def test_a_lost_state_begins_anew():
    rng = np.random.default_rng(0)
    whole = History(rng.normal(size=(4, 3)), np.zeros((4, 3)), np.zeros((4, 3)), np.full(4, 0.1))
    settings = {**rules.SGD.defaults, "momentum": 0.9}
    g = whole.gradients
    expected = -0.1 * np.stack([g[0], 0.9 * g[0] + g[1], g[2], 0.9 * g[2] + g[3]])
    assert np.allclose(updates(rules.SGD, whole, {**settings, "lost": 2.0}), expected)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"weight_decay": 0.1}, lambda p: OPTIM.RAdam(p, RATE, weight_decay=0.1)),
        (
            {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "decoupled": 1.0},
            lambda p: OPTIM.RAdam(p, RATE, (0.8, 0.9), 1e-3, 0.1, decoupled_weight_decay=True),
        ),
    ],
)
def test_radam_adapts_after_its_first_steps(monkeypatch, settings, make):
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 9)
    made = by_torch(make)
    computed = updates(rules.RADAM, made, {**rules.RADAM.defaults, **settings})
    assert np.linalg.norm(computed - made.updates) <= 1e-9 * np.linalg.norm(made.updates)


@pytest.mark.parametrize("rule", [rules.ADAM, rules.RADAM], ids=lambda rule: rule.name)
def test_a_bias_that_is_corrected_in_place_adds_up(rule):
    one = History(np.ones((2, 1)), np.zeros((2, 1)), np.zeros((2, 1)), np.full(2, 0.1))
    settings = {**rule.defaults, "beta1": 0.5, "eps": 0.0}
    # All gradients are 1, and so are the corrected moments. Corrected in place, the first one is 1 when the second
    # step begins: (0.5 * 1 + 0.5 * 1) / (1 - 0.5 ** 2) = 4 / 3.
    assert np.allclose(updates(rule, one, settings), [[-0.1], [-0.1]])
    assert np.allclose(updates(rule, one, {**settings, "stored": 1.0}), [[-0.1], [-0.1 * 4 / 3]])


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("whole", [True, False])
def test_settings_side_by_side_leave_what_each_leaves_by_itself(rule, whole):
    rng = np.random.default_rng(2)
    given, weights, made, noise = (rng.normal(size=(STEPS, SIZE)) for _ in range(4))
    given[:, :5] = 0.0
    seen = History(given, weights, made, np.full(STEPS, RATE), (slice(0, 15), slice(15, SIZE)), whole)
    for form in (None, *rule.forms):
        start = {**rule.defaults, **({} if form is None else {form: 1.0 - rule.forms[form]})}
        several = [{**start, "rate": rate} for rate in (1.0, 2.0)]
        several += [{**start, name: value} for name, usual in rule.numbers.items() for value in usual]
        alone = [residual_of(rule, settings, seen, noise) for settings in several]
        assert residuals_of(rule, several, seen, noise) == pytest.approx(alone, rel=1e-12)
        assert len({*alone}) > 4

"""What an optimizer holds, carried from one framework to the other: the training goes on as it would have.

Expected is what the framework computes that the state comes from: the same gradients, without a break.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS

from padiff.errors import UsageError
from padiff.records.traces import MASTER_WEIGHT, MOMENTUM, SECOND_MOMENT, STEPS, OptimizerState, ParameterState

P, T = paddle.optimizer, torch.optim
SHAPES = ((3, 2), (4,))
SITES = ("first/weight", "second/bias")
BEFORE, AFTER = 5, 4
ZEROS = paddle.nn.initializer.Constant(0.0)
_random = np.random.RandomState(3)
START = [_random.randn(*shape).astype("float32") for shape in SHAPES]
GRADIENTS = [[_random.randn(*shape).astype("float32") for shape in SHAPES] for _ in range(BEFORE + AFTER)]

RULES = {
    "sgd": (lambda p: T.SGD(p, 0.1), lambda p: P.SGD(0.1, parameters=p)),
    "momentum": (lambda p: T.SGD(p, 0.1, momentum=0.9), lambda p: P.Momentum(0.1, 0.9, parameters=p)),
    "nesterov": (
        lambda p: T.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: P.Momentum(0.1, 0.9, parameters=p, use_nesterov=True, weight_decay=0.1),
    ),
    "adam": (lambda p: T.Adam(p, 0.1, betas=(0.8, 0.99)), lambda p: P.Adam(0.1, 0.8, 0.99, parameters=p)),
    "amsgrad": (
        lambda p: T.Adam(p, 0.1, betas=(0.8, 0.9), amsgrad=True),
        lambda p: P.Adam(0.1, 0.8, 0.9, parameters=p, amsgrad=True),
    ),
    "adamw": (
        lambda p: T.AdamW(p, 0.1, weight_decay=0.1),
        lambda p: P.AdamW(0.1, weight_decay=0.1, parameters=p),
    ),
    "adagrad": (
        lambda p: T.Adagrad(p, 0.1, initial_accumulator_value=0.1),
        lambda p: P.Adagrad(0.1, initial_accumulator_value=0.1, parameters=p),
    ),
    "adadelta": (lambda p: T.Adadelta(p, 0.5, rho=0.9), lambda p: P.Adadelta(0.5, rho=0.9, parameters=p)),
    "rmsprop": (
        lambda p: T.RMSprop(p, 0.01, alpha=0.9, eps=1e-12),
        lambda p: P.RMSProp(0.01, rho=0.9, epsilon=1e-12, parameters=p),
    ),
    "rmsprop with momentum, centered": (
        lambda p: T.RMSprop(p, 0.01, alpha=0.9, eps=1e-12, momentum=0.9, centered=True),
        lambda p: P.RMSProp(0.01, rho=0.9, epsilon=1e-12, momentum=0.9, centered=True, parameters=p),
    ),
    "adamax": (lambda p: T.Adamax(p, 0.1), lambda p: P.Adamax(0.1, parameters=p)),
    "nadam": (lambda p: T.NAdam(p, 0.1), lambda p: P.NAdam(0.1, parameters=p)),
    "radam": (lambda p: T.RAdam(p, 0.1), lambda p: P.RAdam(0.1, parameters=p)),
    "rprop": (
        lambda p: T.Rprop(p, 0.01, step_sizes=(1e-5, 1.0)),
        lambda p: P.Rprop(0.01, learning_rate_range=(1e-5, 1.0), parameters=p),
    ),
}
# What each stores in a value of zero on both sides: not the state's doing.
TOLERANCE = {"rmsprop with momentum, centered": 1e-4}
WITHOUT_STATE = {"sgd"}
BOTH_WAYS = [("torch", "paddle"), ("paddle", "torch"), ("torch", "torch"), ("paddle", "paddle")]


class Training:
    """Parameters under an optimizer, stepped with given gradients."""

    def __init__(self, framework, make, values=START, dtype="float32"):
        self.kit = KITS[framework]
        self.parameters = []
        for value in values:
            if framework == "torch":
                self.parameters.append(torch.nn.Parameter(torch.tensor(value).to(getattr(torch, dtype))))
            else:
                parameter = paddle.create_parameter(list(value.shape), dtype, default_initializer=ZEROS)
                parameter.set_value(paddle.to_tensor(value).astype(dtype))
                self.parameters.append(parameter)
        self.names = {id(parameter): site for parameter, site in zip(self.parameters, SITES)}
        self.optimizer = make(self.parameters)
        self.api = (framework_of := __import__(f"padiff.frameworks.{framework}", fromlist=["x"]).FRAMEWORK).optimizers
        self.tensors = framework_of.tensors

    def go(self, gradients):
        for step in gradients:
            self.optimizer.clear_grad() if self.kit.name == "paddle" else self.optimizer.zero_grad()
            for parameter, gradient in zip(self.parameters, step):
                if gradient is None:
                    continue
                tensor = self.kit.tensor(gradient, str(parameter.dtype).split(".")[-1])
                if self.kit.name == "torch":
                    parameter.grad = tensor
                else:
                    (parameter * tensor).sum().backward()
            self.optimizer.step()
        return self

    @property
    def state(self):
        return self.api.state(self.optimizer, self.names)

    def set(self, state):
        return self.api.set_state(self.optimizer, self.names, state)

    @property
    def values(self):
        return [self.kit.numpy(parameter) for parameter in self.parameters]


def gone_on(rule, source, target, mend=lambda state: state):
    """Values at the end of a training of the source's framework, and of one that went over to the other's."""
    make = dict(zip(("torch", "paddle"), RULES[rule]))
    first = Training(source, make[source]).go(GRADIENTS[:BEFORE])
    second = Training(target, make[target], first.values)
    second.set(mend(first.state))
    return first.go(GRADIENTS[BEFORE:]).values, second.go(GRADIENTS[BEFORE:]).values


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_training_goes_on_as_it_would_have(rule, source, target):
    expected, got = gone_on(rule, source, target)
    tolerance = TOLERANCE.get(rule, 2e-5) if source != target else 1e-6
    for one, other in zip(expected, got):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", sorted(set(RULES) - WITHOUT_STATE))
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS[:2])
def test_without_its_state_it_does_not(rule, source, target):
    expected, got = gone_on(rule, source, target, mend=lambda state: replace(state, parameters={}))
    apart = max(float(np.abs(one - other).max()) for one, other in zip(expected, got))
    assert apart > 10 * TOLERANCE.get(rule, 2e-5)


# -- counts of steps


@pytest.mark.parametrize("count", [1, 57, 2003])
def test_count_of_steps_is_reported_from_powers_of_the_betas(count):
    training = Training("paddle", RULES["adam"][1]).go([GRADIENTS[0]] * count)
    assert {state.numbers[STEPS] for state in training.state.parameters.values()} == {count}


def test_powers_are_what_paddle_has_to_the_last_digit():
    trained = Training("paddle", lambda p: P.Adam(0.1, parameters=p)).go([GRADIENTS[0]] * 1500)
    given = Training("paddle", lambda p: P.Adam(0.1, parameters=p))
    given.set(trained.state)
    for name in ("beta1_pow_acc", "beta2_pow_acc"):
        expected, got = (
            [float(tensor.numpy()[0]) for tensor in training.optimizer._accumulators[name].values()]
            for training in (trained, given)
        )
        assert got == expected


def test_powers_that_have_become_zero_tell_of_many_steps():
    training = Training("paddle", lambda p: P.Adamax(0.1, beta1=0.5, parameters=p)).go([GRADIENTS[0]] * 200)
    target = Training("torch", lambda p: T.Adamax(p, 0.1, betas=(0.5, 0.999)), training.values)
    target.set(training.state)
    for one, other in zip(training.go(GRADIENTS).values, target.go(GRADIENTS).values):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)


# -- learning rates


def grouped(framework, rates):
    if framework == "torch":
        return lambda p: T.Adam([{"params": [one], "lr": rate} for one, rate in zip(p, rates)])
    base = rates[0]
    groups = lambda p: [{"params": [one], "learning_rate": rate / base} for one, rate in zip(p, rates)]  # noqa: E731
    return lambda p: P.Adam(base, parameters=groups(p))


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.1, 0.02), (0.0, 0.0)])
def test_learning_rates_of_groups_are_carried(source, target, rates):
    first = Training(source, grouped(source, rates if any(rates) else (0.1, 0.1)))
    if not any(rates):
        first.go(GRADIENTS[:1])
        if source == "torch":
            for group in first.optimizer.param_groups:
                group["lr"] = 0.0
        else:
            first.optimizer.set_lr(0.0)
    first.go(GRADIENTS[:BEFORE])
    second = Training(target, grouped(target, (0.5, 0.5)), first.values)
    second.set(first.state)
    assert second.api.learning_rates(second.optimizer) == pytest.approx(rates, rel=1e-6)
    for one, other in zip(first.go(GRADIENTS).values, second.go(GRADIENTS).values):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)


def test_rate_of_a_schedule_is_that_of_the_next_step():
    first = Training("torch", lambda p: T.SGD(p, 0.025))
    schedule = paddle.optimizer.lr.StepDecay(1.0, 2)
    second = Training("paddle", lambda p: P.SGD(schedule, parameters=p))
    undo = second.set(first.state)
    for one, other in zip(first.go(GRADIENTS[:1]).values, second.go(GRADIENTS[:1]).values):
        np.testing.assert_allclose(other, one, rtol=1e-6)
    undo()
    assert second.optimizer.get_lr() == 1.0


def test_one_group_takes_no_two_rates():
    first = Training("torch", grouped("torch", (0.1, 0.02))).go(GRADIENTS[:1])
    second = Training("torch", lambda p: T.Adam(p, 0.7))
    with pytest.raises(UsageError, match=r"one learning rate, but its parameters were stepped at 0.02, 0.1"):
        second.set(first.state)
    assert not second.optimizer.state
    assert second.optimizer.param_groups[0]["lr"] == 0.7


def test_momentum_of_rmsprop_follows_the_rate():
    torch_make, paddle_make = RULES["rmsprop with momentum, centered"]
    first = Training("torch", torch_make).go(GRADIENTS[:BEFORE])
    first.optimizer.param_groups[0]["lr"] = 0.003
    second = Training("paddle", paddle_make, first.values)
    second.set(first.state)
    for one, other in zip(first.go(GRADIENTS[:1]).values, second.go(GRADIENTS[:1]).values):
        np.testing.assert_allclose(other, one, rtol=1e-4)


def test_momentum_of_rmsprop_cannot_be_known_at_a_rate_of_zero():
    training = Training("paddle", RULES["rmsprop with momentum, centered"][1]).go(GRADIENTS[:BEFORE])
    training.optimizer.set_lr(0.0)
    with pytest.raises(UsageError, match="can't be known at 0"):
        _ = training.state


# -- what is there, and what is not


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
@pytest.mark.parametrize("rule", ["momentum", "adam", "adagrad"])
def test_parameter_that_was_never_stepped_is_as_new(source, target, rule):
    make = dict(zip(("torch", "paddle"), RULES[rule]))
    first = Training(source, make[source]).go([[step[0], None] for step in GRADIENTS[:BEFORE]])
    assert [*first.state.parameters] == [SITES[0]]
    second = Training(target, make[target]).go(GRADIENTS[:2])
    for parameter, value in zip(second.parameters, first.values):
        second.tensors.write(parameter, value)
    second.set(first.state)
    for one, other in zip(first.go(GRADIENTS).values, second.go(GRADIENTS).values):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("framework", KITS)
def test_new_optimizer_holds_nothing(framework):
    state = Training(framework, dict(zip(KITS, RULES["adamw"]))[framework]).state
    assert (state.rule, dict(state.parameters)) == ("AdamW", {})
    assert [(rate.value, rate.parameters) for rate in state.rates] == [(0.1, SITES)]


@pytest.mark.parametrize("framework", KITS)
def test_reading_copies_and_changes_nothing(framework):
    make = dict(zip(KITS, RULES["adam"]))[framework]
    training, other = (Training(framework, make).go(GRADIENTS[:2]) for _ in range(2))
    kept = {name: array.copy() for name, array in training.state.arrays().items()}
    state = training.state
    training.go(GRADIENTS[2:])
    for name, array in state.arrays().items():
        np.testing.assert_array_equal(array, kept[name])
    other.go(GRADIENTS[2:])
    for one, two in zip(training.values, other.values):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("framework", KITS)
@pytest.mark.parametrize("stepped", [0, 3])
def test_undoing_puts_it_back_to_the_bit(framework, stepped):
    make = dict(zip(KITS, RULES["amsgrad"]))[framework]
    training, other = (Training(framework, make).go(GRADIENTS[:stepped]) for _ in range(2))
    given = Training(framework, make).go(GRADIENTS).state
    training.set(replace(given, rates=tuple(replace(rate, value=0.7) for rate in given.rates)))()
    assert json.dumps(training.state.plain()) == json.dumps(other.state.plain())
    for one, two in zip(training.go(GRADIENTS[3:]).values, other.go(GRADIENTS[3:]).values):
        np.testing.assert_array_equal(one, two)


def test_other_parameters_of_the_optimizer_stay():
    training = Training("torch", RULES["adam"][0]).go(GRADIENTS[:2])
    held = dict(training.optimizer.state[training.parameters[1]])
    training.names.pop(id(training.parameters[1]))
    given = Training("torch", RULES["adam"][0]).go(GRADIENTS).state
    training.set(given)
    assert training.optimizer.state[training.parameters[1]] == held
    assert float(training.optimizer.state[training.parameters[0]]["step"]) == len(GRADIENTS)


class Lion(torch.optim.Optimizer):
    """A rule that padiff does not know."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                held.setdefault("average", torch.zeros_like(parameter))
                held["turn"] = held.get("turn", 0) + 1
                parameter -= group["lr"] / held["turn"] * (held["average"] + parameter.grad).sign()
                held["average"].lerp_(parameter.grad, 0.1)


def test_rule_of_ones_own_goes_over_in_its_framework():
    first = Training("torch", Lion).go(GRADIENTS[:BEFORE])
    second = Training("torch", Lion, first.values)
    second.set(first.state)
    for one, other in zip(first.go(GRADIENTS).values, second.go(GRADIENTS).values):
        np.testing.assert_array_equal(one, other)


def test_master_weights_are_carried():
    # On the CPU paddle has the kernels for SGD with momentum only in part: what is made before a step is enough here.
    training = Training("paddle", lambda p: P.Momentum(0.1, 0.9, parameters=p, multi_precision=True), dtype="bfloat16")
    master = START[0] + np.float32(1e-4)
    state = ParameterState({MOMENTUM: START[0], MASTER_WEIGHT: master})
    undo = training.set(OptimizerState("SGD", {SITES[0]: state}, training.state.rates))
    held = training.state.parameters[SITES[0]].tensors
    np.testing.assert_array_equal(held[MASTER_WEIGHT], master)
    np.testing.assert_array_equal(held[MOMENTUM], START[0])
    undo()
    assert not training.state.parameters
    assert not training.optimizer._master_weights


# -- what does not fit

ADAM = Training("torch", RULES["adam"][0]).go(GRADIENTS[:2]).state
MISFITS = {
    "another rule": (RULES["momentum"], ADAM, "the state is that of Adam, the optimizer is SGD"),
    "a tensor that is missing": (RULES["amsgrad"], ADAM, "needs max second moment, which the state does not have"),
    "a tensor too many": (
        RULES["adam"],
        Training("torch", RULES["amsgrad"][0]).go(GRADIENTS[:2]).state,
        "has no place for max second moment",
    ),
    "another shape": (
        RULES["adam"],
        replace(ADAM, parameters={**ADAM.parameters, SITES[1]: replace(ADAM.parameters[SITES[1]], tensors={
            **ADAM.parameters[SITES[1]].tensors, SECOND_MOMENT: np.zeros((2, 2), "float32")})}),
        r"second/bias: second_moment is \[2, 2\], expected the parameter's shape, \[4\]",
    ),
    "no count": (
        RULES["adam"],
        replace(ADAM, parameters={SITES[0]: replace(ADAM.parameters[SITES[0]], numbers={})}),
        "first/weight: the state of Adam has no count of steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("framework", KITS)
@pytest.mark.parametrize("misfit", MISFITS)
def test_state_that_does_not_fit_changes_nothing(framework, misfit):
    makes, state, message = MISFITS[misfit]
    make = dict(zip(KITS, makes))[framework]
    training, other = (Training(framework, make).go(GRADIENTS[:3]) for _ in range(2))
    with pytest.raises(UsageError, match=message):
        training.set(state)
    for one, two in zip(training.go(GRADIENTS[3:]).values, other.go(GRADIENTS[3:]).values):
        np.testing.assert_array_equal(one, two)


# -- in files


def test_it_is_the_same_after_json():
    state = OptimizerState.from_plain(json.loads(json.dumps(ADAM.plain())), ADAM.arrays())
    assert state.plain() == ADAM.plain()
    for name, array in ADAM.arrays().items():
        np.testing.assert_array_equal(state.arrays()[name], array)


@pytest.mark.parametrize(
    "plain",
    [None, {}, {"rule": "Adam"}, {**ADAM.plain(), "rates": [{"value": "x", "parameters": []}]},
     {**ADAM.plain(), "parameters": [1]}, {**ADAM.plain(), "rates": [{"value": float("nan"), "parameters": []}]}],
)  # fmt: skip
def test_damaged_json_is_an_error(plain):
    with pytest.raises(UsageError, match="an optimizer's state is"):
        OptimizerState.from_plain(plain, ADAM.arrays())


def test_lost_tensor_is_an_error():
    arrays = ADAM.arrays()
    del arrays[f"{SITES[0]}:first_moment"]
    with pytest.raises(KeyError, match="first/weight:first_moment"):
        OptimizerState.from_plain(ADAM.plain(), arrays)


@pytest.mark.parametrize("name", RULES)
def test_settings_have_one_form_in_both_frameworks(name):
    trainings = [Training(framework, make) for framework, make in zip(("torch", "paddle"), RULES[name])]
    values = [each.api.settings(each.optimizer).groups[0].values for each in trainings]
    shared = values[0].keys() & values[1].keys()
    differing = {key for key in shared if values[0][key] != values[1][key]}
    assert shared and differing <= {"eps"}  # whose defaults differ in Adagrad

"""What two runs declare differently: said where it changes the result, and never else. Real trainings of both frameworks;
each is written in its framework's own words here.
"""

from __future__ import annotations

import ast
import json

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.dump import open_run
from padiff.records import settings_at
from padiff.report_formats import to_json, to_junit, to_markdown

STEPS = 3
X = np.random.RandomState(0).randn(8, 6, 5).astype("float32")
Y = np.random.RandomState(1).randn(8, 6, 3).astype("float32")
_WEIGHTS = np.random.RandomState(2)
W1, B1, W2, B2 = (_WEIGHTS.randn(*shape).astype("float32") * 0.5 for shape in ((7, 5), (7,), (3, 7), (3,)))


def torch_net(norm=False):
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7) if norm else torch.nn.Tanh())
    net.append(torch.nn.Linear(7, 3))
    with torch.no_grad():
        for parameter, value in zip((*net[0].parameters(), *net[2].parameters()), (W1, B1, W2, B2)):
            parameter.copy_(torch.tensor(value))
    return net


def paddle_net(norm=False, attr=None):
    first = paddle.nn.Linear(5, 7, bias_attr=attr)
    net = paddle.nn.Sequential(first, paddle.nn.BatchNorm1D(7) if norm else paddle.nn.Tanh(), paddle.nn.Linear(7, 3))
    for parameter, value in zip((*net[0].parameters(), *net[2].parameters()), (W1.T, B1, W2.T, B2)):
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(value)))
    return net


def trained(framework, make, *, net=None, each=None, steps=STEPS, first=0, **options):
    """A run of a training; ``make(net)`` gives its optimizer, ``each(step, net, optimizer)`` is called before a step."""
    tensor = torch.tensor if framework == "torch" else paddle.to_tensor
    net = (torch_net() if framework == "torch" else paddle_net()) if net is None else net
    optimizer = make(net)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    with padiff.record(net, optimizer=optimizer, start_step=first, **options) as rec:
        for step in range(first, first + steps):
            if each is not None:
                each(step, net, optimizer)
            loss = ((net(tensor(X[step])) - tensor(Y[step])) ** 2).mean()
            loss.backward()
            rec.log_loss(loss)
            for one in several:
                one.step()
            for one in several:
                one.zero_grad() if framework == "torch" else one.clear_grad()
            rec.try_dump()
    return rec.run


def optimizer_of(framework, kind, options):
    """``make`` for one optimizer over all parameters, in the framework's own words."""
    if framework == "torch":
        return lambda net: getattr(torch.optim, kind)(net.parameters(), **options)
    return lambda net: getattr(paddle.optimizer, kind)(parameters=net.parameters(), **options)


#: One rule in the words of both, set alike.
RULES = {
    "SGD": (("SGD", {"lr": 0.01}), ("SGD", {"learning_rate": 0.01})),
    "momentum": (
        ("SGD", {"lr": 0.01, "momentum": 0.9}),
        ("Momentum", {"learning_rate": 0.01, "momentum": 0.9}),
    ),
    "Adam": (
        ("Adam", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8}),
        ("Adam", {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
    ),
    "AdamW": (("AdamW", {"lr": 0.001}), ("AdamW", {"learning_rate": 0.001})),
    "Adamax": (("Adamax", {"lr": 0.001}), ("Adamax", {"learning_rate": 0.001})),
    "NAdam": (("NAdam", {"lr": 0.001}), ("NAdam", {"learning_rate": 0.001})),
    "RAdam": (("RAdam", {"lr": 0.001}), ("RAdam", {"learning_rate": 0.001})),
    "Adagrad": (("Adagrad", {"lr": 0.01, "eps": 1e-6}), ("Adagrad", {"learning_rate": 0.01, "epsilon": 1e-6})),
    "Adadelta": (
        ("Adadelta", {"lr": 0.1, "rho": 0.95, "eps": 1e-6}),
        ("Adadelta", {"learning_rate": 0.1, "rho": 0.95, "epsilon": 1e-6}),
    ),
    "RMSProp": (
        ("RMSprop", {"lr": 0.001, "alpha": 0.95, "eps": 1e-8}),
        ("RMSProp", {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-8}),
    ),
}

#: What is set otherwise: the rule, its common name, and how the candidate is set in the words of both; `None` where the
#: framework has no such option.
FAULTS = [
    ("AdamW", "beta1", {"betas": (0.95, 0.999)}, {"beta1": 0.95}),
    ("AdamW", "beta2", {"betas": (0.9, 0.99)}, {"beta2": 0.99}),
    ("AdamW", "eps", {"eps": 1e-7}, {"epsilon": 1e-7}),
    ("AdamW", "weight_decay", {"weight_decay": 0.02}, {"weight_decay": 0.02}),
    ("AdamW", "amsgrad", {"amsgrad": True}, {"amsgrad": True}),
    ("Adam", "beta2", {"betas": (0.9, 0.9991)}, {"beta2": 0.9991}),
    ("Adam", "weight_decay", {"weight_decay": 1e-6}, {"weight_decay": 1e-6}),
    ("Adamax", "beta2", {"betas": (0.9, 0.9995)}, {"beta2": 0.9995}),
    ("NAdam", "beta1", {"betas": (0.9001, 0.999)}, {"beta1": 0.9001}),
    ("NAdam", "momentum_decay", {"momentum_decay": 0.005}, {"momentum_decay": 0.005}),
    ("RAdam", "beta2", {"betas": (0.9, 0.9991)}, {"beta2": 0.9991}),
    ("RAdam", "eps", {"eps": 1e-7}, {"epsilon": 1e-7}),
    ("momentum", "momentum", {"momentum": 0.9001}, {"momentum": 0.9001}),
    ("momentum", "nesterov", {"nesterov": True}, {"use_nesterov": True}),
    ("momentum", "dampening", {"dampening": 1e-5}, None),
    ("momentum", "weight_decay", {"weight_decay": 1e-6}, {"weight_decay": 1e-6}),
    ("SGD", "weight_decay", {"weight_decay": 1e-6}, {"weight_decay": 1e-6}),
    ("SGD", "maximize", {"maximize": True}, None),
    ("Adagrad", "eps", {"eps": 1e-9}, {"epsilon": 1e-9}),
    ("Adagrad", "initial_accumulator_value", {"initial_accumulator_value": 1e-9}, {"initial_accumulator_value": 1e-9}),
    ("Adagrad", "lr_decay", {"lr_decay": 1e-5}, None),
    ("Adadelta", "rho", {"rho": 0.9501}, {"rho": 0.9501}),
    ("Adadelta", "eps", {"eps": 1.01e-6}, {"epsilon": 1.01e-6}),
    ("RMSProp", "alpha", {"alpha": 0.9501}, {"rho": 0.9501}),
    ("RMSProp", "centered", {"centered": True}, {"centered": True}),
    ("RMSProp", "momentum", {"momentum": 1e-4}, {"momentum": 1e-4}),
]
SIDES = [("torch", "paddle"), ("paddle", "torch"), ("torch", "torch"), ("paddle", "paddle")]


def parsed(fix):
    """Module, class and arguments of a line like ``torch.optim.AdamW(..., eps=1e-08)``."""
    call = ast.parse(fix, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant) and call.args[0].value is ...
    return ast.unparse(call.func), {word.arg: ast.literal_eval(word.value) for word in call.keywords}


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("rule, name, torch_fault, paddle_fault", FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_an_optimizer_that_is_off_by_a_setting_is_told_with_the_line_that_mends_it(
    rule, name, torch_fault, paddle_fault, sides
):
    words = dict(zip(("torch", "paddle"), RULES[rule]))
    fault = {"torch": torch_fault, "paddle": paddle_fault}[sides[1]]
    if fault is None:
        pytest.skip("the framework has no such option")
    reference = trained(sides[0], optimizer_of(sides[0], *words[sides[0]]))
    kind, options = words[sides[1]]
    report = padiff.compare_runs(reference, trained(sides[1], optimizer_of(sides[1], kind, {**options, **fault})))
    assert not report.passed and report.outcome == "differ"
    (found,) = [one for one in report.settings_differ if one.changes]
    assert (found.name, found.stage, found.kind, found.step) == (name, "update", "optimizer_setting", 0)
    first = report.first_diff
    assert (first.step, first.stage) == (0, "update") and first.cause.kind == "optimizer_setting"
    assert name in first.cause.sentence and first.cause.fix == found.fix and found.fix in first.message
    # What the line says is done, and nothing else: then the runs agree.
    function, mended = parsed(found.fix)
    module, _, named = function.rpartition(".")
    assert module == {"torch": "torch.optim", "paddle": "paddle.optimizer"}[sides[1]]
    again = trained(sides[1], optimizer_of(sides[1], named, {**options, **fault, **mended}))
    assert padiff.compare_runs(reference, again).passed


def grouped(net, **of_biases):
    biases = [p for p in net.parameters() if len(p.shape) == 1]
    others = [p for p in net.parameters() if len(p.shape) > 1]
    return [{"params": others}, {"params": biases, **of_biases}]


def no_decay(net):
    names = {p.name for p in net.parameters() if len(p.shape) > 1}
    return lambda name: name in names


#: Optimizers that compute the same, in the words of both.
ALIKE = {
    **{rule: tuple(optimizer_of(f, *w) for f, w in zip(("torch", "paddle"), words)) for rule, words in RULES.items()},
    "momentum of 0": (
        optimizer_of("torch", "SGD", {"lr": 0.01, "dampening": 0.5}),
        optimizer_of("paddle", "Momentum", {"learning_rate": 0.01, "momentum": 0.0, "use_nesterov": True}),
    ),
    "Adam and AdamW without decay": (
        optimizer_of("torch", "Adam", {"lr": 0.001}),
        optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "weight_decay": 0.0}),
    ),
    "AdamW without decay and Adam": (
        optimizer_of("torch", "AdamW", {"lr": 0.001, "weight_decay": 0}),
        optimizer_of("paddle", "Adam", {"learning_rate": 0.001}),
    ),
    "decoupled Adam": (
        optimizer_of("torch", "Adam", {"lr": 0.001, "weight_decay": 0.01, "decoupled_weight_decay": True}),
        optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "weight_decay": 0.01}),
    ),
    "coupled decay": (
        optimizer_of("torch", "Adam", {"lr": 0.001, "weight_decay": 0.01}),
        optimizer_of("paddle", "Adam", {"learning_rate": 0.001, "weight_decay": paddle.regularizer.L2Decay(0.01)}),
    ),
    "decay of 0": (
        optimizer_of("torch", "SGD", {"lr": 0.01}),
        optimizer_of("paddle", "SGD", {"learning_rate": 0.01, "weight_decay": paddle.regularizer.L2Decay(0.0)}),
    ),
    "momentum with decay": (
        optimizer_of("torch", "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}),
        optimizer_of("paddle", "Momentum", {"learning_rate": 0.01, "weight_decay": 0.01}),
    ),
    "how it is computed": (
        optimizer_of("torch", "AdamW", {"lr": 0.001, "foreach": True}),
        optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "lazy_mode": True}),
    ),
    "in float32": (
        optimizer_of("torch", "AdamW", {"lr": 0.001, "betas": (0.9, float(np.float32(0.999)))}),
        optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "beta2": paddle.to_tensor([0.999])}),
    ),
    "other groups": (
        lambda net: torch.optim.AdamW(grouped(net), lr=0.001),
        optimizer_of("paddle", "AdamW", {"learning_rate": 0.001}),
    ),
    "no decay of biases": (
        lambda net: torch.optim.AdamW(grouped(net, weight_decay=0.0), lr=0.001, weight_decay=0.1),
        lambda net: paddle.optimizer.AdamW(
            0.001, parameters=net.parameters(), weight_decay=0.1, apply_decay_param_fun=no_decay(net)
        ),
    ),
    "groups in both": (
        lambda net: torch.optim.AdamW(grouped(net, weight_decay=0.0, betas=(0.8, 0.99)), lr=0.001, weight_decay=0.1),
        lambda net: paddle.optimizer.AdamW(
            0.001, parameters=grouped(net, weight_decay=0.0, beta1=0.8, beta2=0.99), weight_decay=0.1
        ),
    ),
    "the coupled decay of groups": (
        lambda net: torch.optim.SGD(grouped(net, weight_decay=0.0), lr=0.01, momentum=0.9, weight_decay=0.1),
        lambda net: paddle.optimizer.Momentum(0.01, parameters=grouped(net, weight_decay=0.0), weight_decay=0.1),
    ),
    "a rate of biases": (
        lambda net: torch.optim.SGD(grouped(net, lr=0.001), lr=0.01),
        lambda net: paddle.optimizer.SGD(0.01, parameters=grouped(net, learning_rate=0.1)),
    ),
}


@pytest.mark.parametrize("swapped", [False, True], ids=["torch-paddle", "paddle-torch"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_set_otherwise_and_computes_the_same_is_no_difference(name, swapped):
    runs = [trained(framework, make) for framework, make in zip(("torch", "paddle"), ALIKE[name])]
    report = padiff.compare_runs(*(runs[::-1] if swapped else runs))
    assert report.passed, report.first_diff
    # The frameworks add epsilon in different places of two rules: said, and no diff.
    assert {one.name for one in report.settings_differ} <= {"place of epsilon"}
    assert bool(report.settings_differ) == (name in ("RMSProp", "Adamax"))


def test_another_rule_is_told_by_its_name():
    runs = [trained("torch", optimizer_of("torch", "Adam", {"lr": 0.001}))]
    runs.append(trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.001})))
    first = padiff.compare_runs(*runs).first_diff
    assert first.cause.sentence == "the optimizers are set differently: rule Adam against SGD"
    assert first.cause.fix.startswith("paddle.optimizer.Adam(")
    assert padiff.compare_runs(*runs[::-1]).first_diff.cause.fix == "torch.optim.SGD(...)"


def test_the_form_of_decay_is_told_with_its_value():
    runs = [trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001, "weight_decay": 1e-4}))]
    runs.append(trained("paddle", optimizer_of("paddle", "Adam", {"learning_rate": 0.001, "weight_decay": 1e-4})))
    first = padiff.compare_runs(*runs).first_diff
    said = "weight_decay 0.0001 (decoupled) against 0.0001 (coupled, as L2 of the gradient)"
    assert said in first.message and first.cause.fix == "paddle.optimizer.AdamW(..., weight_decay=0.0001)"
    assert padiff.compare_runs(*runs[::-1]).first_diff.cause.fix == "torch.optim.Adam(..., weight_decay=0.0001)"


def test_l1_decay_and_the_decay_of_a_parameter_itself_are_seen():
    plain = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01, "weight_decay": 1e-6}))
    lasso = {"learning_rate": 0.01, "weight_decay": paddle.regularizer.L1Decay(1e-6)}
    report = padiff.compare_runs(plain, trained("paddle", optimizer_of("paddle", "SGD", lasso)))
    assert "weight_decay 1e-06 (coupled, as L2 of the gradient) against 1e-06 (L1)" in report.first_diff.message
    attr = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(2e-6))
    own = trained(
        "paddle",
        optimizer_of("paddle", "SGD", {"learning_rate": 0.01, "weight_decay": 1e-6}),
        net=paddle_net(attr=attr),
    )
    report = padiff.compare_runs(plain, own)
    (found,) = report.settings_differ
    assert (found.name, *found.values) == ("weight_decay", 1e-6, 2e-6)
    assert found.parameters.candidate == ("0/bias",) == report.first_diff.parameters.candidate
    assert (report.first_diff.reference, report.first_diff.slot) == ("0", "weight_decay")
    assert found.fix == 'paddle.optimizer.SGD([{"params": [0.bias], "weight_decay": 1e-06}, ...])'


def test_the_rate_that_a_parameter_carries_itself_is_compared():
    attr = paddle.ParamAttr(learning_rate=0.1)
    slow = trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01}), net=paddle_net(attr=attr))
    fast = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}))
    report = padiff.compare_runs(fast, slow)
    (found,) = report.settings_differ
    assert (found.name, found.kind, found.values.reference) == ("lr", "learning_rate", 0.01)
    assert found.values.candidate == pytest.approx(0.001) and found.parameters.reference == ("0/bias",)
    assert (report.first_diff.slot, report.first_diff.cause.kind) == ("bias", "learning_rate")

    def make(net):
        rest = [p for p in net.parameters() if p is not net[0].bias]
        return torch.optim.SGD([{"params": rest}, {"params": [net[0].bias], "lr": 0.001}], lr=0.01)

    assert padiff.compare_runs(trained("torch", make), slow).passed


@pytest.mark.parametrize("schedule", ["StepDecay", "CosineAnnealingDecay"])
def test_the_rates_of_schedules_are_no_settings_that_change(schedule):
    options = {"StepDecay": (0.01, 1), "CosineAnnealingDecay": (0.01, 4)}[schedule]
    rates = {"StepDecay": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.1)}
    rates["CosineAnnealingDecay"] = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)
    made = []

    def torch_make(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        made.append(rates[schedule](optimizer))
        return optimizer

    def paddle_make(net):
        made.append(getattr(paddle.optimizer.lr, schedule)(*options))
        return paddle.optimizer.SGD(made[-1], parameters=net.parameters())

    runs = [
        trained(framework, make, each=lambda step, *_: made[-1].step() if step else None)
        for framework, make in (("torch", torch_make), ("paddle", paddle_make))
    ]
    assert padiff.compare_runs(*runs).passed
    assert runs[1].info.settings["optimizer.0.schedule"] == schedule
    for run in runs:
        assert all(not run.steps(number)[0].settings for number in run.numbers())


# -- several, and what comes later ----------------------------------------------------------------------------


def two(framework, second):
    def make(net):
        if framework == "torch":
            return [
                torch.optim.SGD(net[0].parameters(), lr=0.01),
                torch.optim.AdamW(net[2].parameters(), lr=0.001, betas=(0.9, second)),
            ]
        return [
            paddle.optimizer.SGD(0.01, parameters=net[0].parameters()),
            paddle.optimizer.AdamW(0.001, parameters=net[2].parameters(), beta2=second),
        ]

    return make


def test_of_several_optimizers_the_one_that_is_off_is_told():
    reference = trained("torch", two("torch", 0.999))
    assert padiff.compare_runs(reference, trained("paddle", two("paddle", 0.999))).passed
    report = padiff.compare_runs(reference, trained("paddle", two("paddle", 0.9991)))
    (found,) = report.settings_differ
    assert (found.name, found.about) == ("beta2", "AdamW") and found.parameters.reference == ("2/weight", "2/bias")


def test_a_group_that_is_added_later_is_told_of_the_step_that_shows_it():
    def make(net):
        return torch.optim.AdamW(net[0].parameters(), lr=0.001)

    def adding(decay):
        def each(step, net, optimizer):
            if step == 3:
                optimizer.add_param_group({"params": list(net[2].parameters()), "weight_decay": decay})

        return each

    runs = [trained("torch", make, each=adding(decay), steps=5) for decay in (1e-2, 1.001e-2)]
    report = padiff.compare_runs(*runs)
    (found,) = report.settings_differ
    assert (found.step, found.name, report.first_diff.step, report.first_diff.stage) == (3, "weight_decay", 3, "update")
    assert found.parameters.reference == ("2/weight", "2/bias")
    assert "from step 3 on" in report.first_diff.message
    assert [bool(runs[0].steps(number)[0].settings) for number in range(5)] == [False] * 3 + [True] * 2


def test_a_layer_that_is_put_into_evaluation_is_told_of_the_step_that_shows_it():
    def stop(at):
        def each(step, net, _):
            if step == at:
                net[1].eval()

        return each

    runs = [
        trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}), net=torch_net(True), each=stop(5), steps=5),
        trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01}), net=paddle_net(True), steps=5),
    ]
    assert padiff.compare_runs(*runs).passed
    runs[0] = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}), net=torch_net(True), each=stop(4), steps=5)
    report = padiff.compare_runs(*runs)
    (found,) = report.settings_differ
    assert (found.step, found.name, tuple(found.values)) == (4, "mode", ("eval", "train"))
    first = report.first_diff
    assert (first.step, first.stage, first.reference) == (4, "forward", "1") and first.cause.kind == "mode"
    assert first.cause.fix == "model.1.eval()"


def test_statistics_that_are_used_and_not_fed_are_one_with_evaluation():
    net = paddle_net(True)
    net[1]._use_global_stats = True
    runs = [
        trained(
            "torch",
            optimizer_of("torch", "SGD", {"lr": 0.01}),
            net=torch_net(True),
            each=lambda step, net, _: net[1].eval(),
        ),
        trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01}), net=net),
    ]
    report = padiff.compare_runs(*runs)
    assert report.passed and not report.settings_differ


def test_a_parameter_that_only_one_run_trains_is_told():
    net = paddle_net()
    net[0].bias.stop_gradient = True
    runs = [
        trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01})),
        trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01}), net=net),
    ]
    report = padiff.compare_runs(*runs)
    (found,) = report.settings_differ
    assert (found.kind, found.parameters.candidate) == ("trainable", ("0/bias",))
    assert report.first_diff.cause.kind == "trainable" and report.first_diff.slot == "bias"
    # Frozen there, and in no optimizer here, is one.
    runs[0] = trained(
        "torch", lambda net: torch.optim.SGD([p for p in net.parameters() if p is not net[0].bias], lr=0.01)
    )
    assert not padiff.compare_runs(*runs).settings_differ


def test_shared_parameters_are_told_from_those_that_are_twice():
    class Tied(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
            self.head = torch.nn.Linear(5, 3)
            self.other.load_state_dict(self.one.state_dict())
            if tied:
                self.other.weight = self.one.weight

        def forward(self, x):
            return self.head(self.other(torch.tanh(self.one(x))))

    make = optimizer_of("torch", "SGD", {"lr": 0.01})
    runs = [trained("torch", make, net=Tied(tied)) for tied in (True, False)]
    for some, said in ((runs, ("shared", "apart")), (runs[::-1], ("apart", "shared"))):
        report = padiff.compare_runs(*some)
        (found,) = report.settings_differ
        assert (found.kind, tuple(found.values)) == ("tied", said)
        assert report.first_diff.cause.kind == "tied"
    assert not padiff.compare_runs(runs[0], trained("torch", make, net=Tied(True))).settings_differ


# -- clipping and the loss ------------------------------------------------------------------------------------


def clipped(clip):
    return trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01, "grad_clip": clip}))


def test_limits_of_clipping_are_compared_before_they_act():
    wide = clipped(paddle.nn.ClipGradByGlobalNorm(1000.0))
    assert padiff.compare_runs(wide, clipped(paddle.nn.ClipGradByGlobalNorm(1000.0))).passed
    first = padiff.compare_runs(wide, clipped(paddle.nn.ClipGradByGlobalNorm(2000.0))).first_diff
    assert (first.step, first.stage, first.slot, first.cause.kind) == (0, "grad", "clip limit", "clipping")
    assert first.cause.fix == "paddle.optimizer.SGD(..., grad_clip=paddle.nn.ClipGradByGlobalNorm(1000.0))"
    first = padiff.compare_runs(wide, clipped(paddle.nn.ClipGradByValue(1000.0))).first_diff
    assert "clip by global norm 1000 against by value 1000" in first.message
    first = padiff.compare_runs(wide, clipped(paddle.nn.ClipGradByNorm(1000.0))).first_diff
    assert "clip by global norm 1000 against by tensor norm 1000" in first.message


def test_where_one_side_clips_and_the_other_is_not_known_nothing_is_said():
    free = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}))
    report = padiff.compare_runs(free, clipped(paddle.nn.ClipGradByGlobalNorm(1000.0)))
    assert report.passed and not report.settings_differ


# -- what a report makes of it --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def off():
    """A pair that is off by beta2 and epsilon, of which no tensor tells."""
    make = optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "beta2": 0.9991, "epsilon": 1.1e-8})
    return trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001})), trained("paddle", make)


def test_all_forms_of_a_report_tell_it(off):
    report = padiff.compare_runs(*off)
    assert not report.failed and report.outcome == "differ"
    said = "AdamW: beta2 0.999 against 0.9991, eps 1e-08 against 1.1e-08"
    fix = "paddle.optimizer.AdamW(..., beta2=0.999, epsilon=1e-08)"
    assert said in report.first_diff.message and report.first_diff.message.endswith(f"To mend it: {fix}")
    content = json.loads(json.dumps(to_json(report)))
    assert content["outcome"] == "differ" and content["first_diff"]["why"]["fix"] == fix
    assert [(one["name"], one["reference"], one["step"]) for one in content["settings_differ"]] == [
        ("beta2", 0.999, 0),
        ("eps", 1e-08, 0),
    ]
    for text in (str(report), to_markdown(report), to_junit(report)):
        assert "beta2 0.999 against 0.9991" in text
    assert 'failures="1"' in to_junit(report)


def test_a_fixed_tolerance_lists_it_and_passes(off):
    report = padiff.compare_runs(*off, policy=padiff.Tolerance(1e-3))
    assert report.passed and len(report.settings_differ) == 2
    assert "beta2 0.999 against 0.9991" in str(report)


def test_stages_that_are_not_asked_for_say_nothing(off):
    report = padiff.compare_runs(*off, stages=("weight", "forward"))
    assert report.passed and not report.settings_differ


def test_a_tensor_that_parts_before_is_the_first_diff(off):
    net = paddle_net()
    with paddle.no_grad():
        net[0].bias.add_(paddle.full([7], 0.1))
    make = optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "beta2": 0.9991})
    report = padiff.compare_runs(off[0], trained("paddle", make, net=net))
    assert (report.first_diff.step, report.first_diff.stage) == (0, "weight") and report.first_diff.diff is not None
    assert "beta2" not in report.first_diff.message and len(report.settings_differ) == 1


def test_a_tensor_that_parts_later_is_told_too(off):
    def each(step, net, _):
        if step == 2:
            with paddle.no_grad():
                net[0].bias.add_(paddle.full([7], 0.1))

    make = optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "beta2": 0.9991})
    report = padiff.compare_runs(off[0], trained("paddle", make, each=each))
    assert (report.first_diff.step, report.first_diff.stage) == (0, "update") and report.failed
    assert "The first tensor that parts: step 2, stage weight, layer 0" in report.first_diff.message
    assert 'name="(loop)"' in to_junit(report)


def test_a_class_of_ones_own_is_not_held_against_the_frameworks():
    class Own(torch.optim.AdamW):
        pass

    made = trained("torch", lambda net: Own(net.parameters(), lr=0.001))
    assert "." in made.info.settings["optimizer.0.rule"]
    for other in ("AdamW", "Adam"):
        plain = trained("torch", optimizer_of("torch", other, {"lr": 0.001, "weight_decay": 0.01}))
        assert not padiff.compare_runs(made, plain).settings_differ
    other = trained("torch", lambda net: Own(net.parameters(), lr=0.001, betas=(0.9, 0.9991)))
    assert [one.name for one in padiff.compare_runs(made, other).settings_differ] == ["beta2"]


# -- run folders ----------------------------------------------------------------------------------------------

FORMATS = {"plain": {"pack": False}, "packed": {"pack": True}, "sketched": {"detail": "sketch"}}


@pytest.mark.parametrize("form", FORMATS)
def test_both_formats_keep_it(form, tmp_path):
    def each(step, net, optimizer):
        if step == 1:
            optimizer.param_groups[0]["betas"] = (0.9, 0.9991)

    options = FORMATS[form]
    make = optimizer_of("torch", "AdamW", {"lr": 0.001})
    trained("torch", make, dir_path=tmp_path / "a", **options)
    trained("torch", make, dir_path=tmp_path / "b", each=each, **options)
    run = open_run(tmp_path / "b")
    assert [run.steps(number)[0].settings for number in range(3)] == [{}, *[{"optimizer.0.group.0.beta2": 0.9991}] * 2]
    report = padiff.compare_runs(tmp_path / "a", tmp_path / "b")
    assert (report.first_diff.step, report.first_diff.stage) == (1, "update")
    assert report.first_diff.cause.fix == "torch.optim.AdamW(..., betas=(0.9, 0.999))"
    # One step by itself is read with what its run says.
    one = open_run(tmp_path / "b" / "steps" / "00000001")
    assert settings_at(one.info.settings, one.steps(1)[0].settings)["optimizer.0.group.0.beta2"] == 0.9991


@pytest.mark.parametrize("form", FORMATS)
def test_a_folder_without_settings_is_read_as_before(form, tmp_path, off):
    make = optimizer_of("torch", "AdamW", {"lr": 0.001})
    trained("torch", make, dir_path=tmp_path / "a", **FORMATS[form])
    content = json.loads((tmp_path / "a" / "run.json").read_text())
    del content["settings"]
    (tmp_path / "a" / "run.json").write_text(json.dumps(content))
    report = padiff.compare_runs(tmp_path / "a", off[1])
    assert report.passed and not report.settings_differ


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_says_of_each_step_what_held_in_it(known, tmp_path):
    trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001}), dir_path=tmp_path / "a", steps=2)
    if not known:  # an older padiff began it
        content = json.loads((tmp_path / "a" / "run.json").read_text())
        del content["settings"]
        (tmp_path / "a" / "run.json").write_text(json.dumps(content))
    make = optimizer_of("torch", "AdamW", {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.0})
    trained("torch", make, dir_path=tmp_path / "a", existing="resume", first=2, steps=2)
    run = open_run(tmp_path / "a")
    now = [settings_at(run.info.settings, run.steps(number)[0].settings) for number in range(4)]
    betas = [one.get("optimizer.0.group.0.beta2") for one in now]
    assert betas == ([0.999, 0.999, 0.99, 0.99] if known else [None, None, 0.99, 0.99])
    assert [one.get("optimizer.0.rule") for one in now] == (["AdamW"] * 4 if known else [None, None, "AdamW", "AdamW"])


@pytest.mark.parametrize("wrong", [7, {"a": {"b": 1}}, {"a": [[1]]}, {"a": 10**30}, ["a"]])
@pytest.mark.parametrize("file", ["run.json", "steps/00000000/rank_0/params.json"])
def test_settings_that_are_none_are_refused_with_the_file(wrong, file, tmp_path):
    trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}), dir_path=tmp_path / "a", pack=False, steps=1)
    path = tmp_path / "a" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": wrong}))
    with pytest.raises(padiff.errors.RunFolderError, match="damaged"):
        open_run(tmp_path / "a").steps(0)


def test_what_is_named_like_settings_and_is_none_is_passed_over(tmp_path, off):
    make = optimizer_of("torch", "AdamW", {"lr": 0.001})
    trained("torch", make, dir_path=tmp_path / "a", steps=2)
    path = tmp_path / "a" / "run.json"
    content = json.loads(path.read_text())
    content["settings"] |= {
        "optimizer.0.group.0.parameters": [1, None],
        "optimizer.0.group.x.beta2": 3,
        "optimizer.99999999999999999999.rule": "SGD",
        "optimizer.0.rule": 7,
        "training": "often",
        "training.others": 4,
        "clip.kind": 3,
        "loss.function": [1],
    }
    path.write_text(json.dumps(content))
    assert padiff.compare_runs(tmp_path / "a", off[1]).passed
    assert padiff.compare_runs(off[1], tmp_path / "a").passed

"""Optimizers that are set otherwise: said where it changes the result, and never else."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache

import numpy as np
import paddle
import pytest
import torch
from kit.trainings import optimizer_of, paddle_net, trained

import padiff
from padiff.align.alignment import LayerPair
from padiff.compare.declared.layers import differing, optimizer_fix, parameter_test
from padiff.records import Layer

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
#: The name of a fault and its fix are in the candidate's words: each side is the candidate once,
#: with the other framework's reference for one fault, with its own for the next.
FAULTY = [(*fault, sides) for k, fault in enumerate(FAULTS) for sides in (SIDES[:2] if k % 3 else SIDES[2:])]


def parsed(fix):
    """Module, class and arguments of a line like ``torch.optim.AdamW(..., eps=1e-08)``."""
    call = ast.parse(fix, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant) and call.args[0].value is ...
    return ast.unparse(call.func), {word.arg: ast.literal_eval(word.value) for word in call.keywords}


@cache
def right(framework, rule):
    return trained(framework, optimizer_of(framework, *RULES[rule][framework == "paddle"]))


@pytest.mark.parametrize(
    ("rule", "name", "torch_fault", "paddle_fault", "sides"),
    FAULTY,
    ids=[f"{f[0]}-{f[1]}-{'-'.join(f[4])}" for f in FAULTY],
)
def test_an_optimizer_that_is_off_by_a_setting_is_reported_with_the_line_that_mends_it(
    rule, name, torch_fault, paddle_fault, sides
):
    words = dict(zip(("torch", "paddle"), RULES[rule]))
    fault = {"torch": torch_fault, "paddle": paddle_fault}[sides[1]]
    if fault is None:
        pytest.skip("the framework has no such option")
    reference = right(sides[0], rule)
    kind, options = words[sides[1]]
    report = padiff.compare_runs(reference, trained(sides[1], optimizer_of(sides[1], kind, {**options, **fault})))
    assert not report.passed and report.outcome == "differ"
    (found,) = [one for one in report.settings_differ if one.changes]
    assert (found.name, found.stage, found.kind, found.step) == (name, "update", "optimizer_setting", 0)
    first = report.first_diff
    assert (first.step, first.stage) == (0, "update")
    # What the tensors of this step show is computed, and proven; else what is declared is the cause.
    if not first.cause.proven:
        assert first.cause.kind == "optimizer_setting" and first.cause.fix == found.fix
        assert name.replace("weight_", "weight ") in first.cause.sentence
    assert first.cause.fix in first.message
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


@cache
def alike(name):
    return [trained(framework, make) for framework, make in zip(("torch", "paddle"), ALIKE[name])]


@pytest.mark.parametrize("swapped", [False, True], ids=["torch-paddle", "paddle-torch"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_set_otherwise_and_computes_the_same_is_no_difference(name, swapped):
    runs = alike(name)
    report = padiff.compare_runs(*(runs[::-1] if swapped else runs))
    assert report.passed, report.first_diff
    # The frameworks add epsilon in different places of two rules: said, and no diff.
    assert {one.name for one in report.settings_differ} <= {"place of epsilon"}
    assert bool(report.settings_differ) == (name in ("RMSProp", "Adamax"))


def test_another_rule_is_reported_by_its_name():
    runs = [trained("torch", optimizer_of("torch", "Adam", {"lr": 0.001}))]
    runs.append(trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.001})))
    first = padiff.compare_runs(*runs).first_diff
    assert "those of SGD, the reference's those of Adam" in first.cause.sentence and first.cause.proven
    assert first.cause.fix.startswith("paddle.optimizer.Adam(")
    assert padiff.compare_runs(*runs[::-1]).first_diff.cause.fix == "torch.optim.SGD(...)"


def test_the_form_of_decay_is_reported_with_its_value():
    runs = [trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001, "weight_decay": 1e-4}))]
    runs.append(trained("paddle", optimizer_of("paddle", "Adam", {"learning_rate": 0.001, "weight_decay": 1e-4})))
    first = padiff.compare_runs(*runs).first_diff
    said = "weight decay 0.0001 (decoupled) against 0.0001 (coupled, as L2 of the gradient)"
    assert said in first.message and first.cause.fix == "paddle.optimizer.AdamW(..., weight_decay=0.0001)"
    assert padiff.compare_runs(*runs[::-1]).first_diff.cause.fix == "torch.optim.Adam(..., weight_decay=0.0001)"


def test_l1_decay_and_the_decay_of_a_parameter_itself_are_seen():
    plain = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01, "weight_decay": 1e-6}))
    lasso = {"learning_rate": 0.01, "weight_decay": paddle.regularizer.L1Decay(1e-6)}
    report = padiff.compare_runs(plain, trained("paddle", optimizer_of("paddle", "SGD", lasso)))
    assert "weight decay 1e-06 (coupled, as L2 of the gradient) against 1e-06 (L1)" in report.first_diff.message
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
    # The optimizer's own decay is the reference's, and does not reach this parameter.
    assert found.fix == "bias_attr=paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(1e-06))"
    pasted = paddle_net(attr=eval(found.fix.removeprefix("bias_attr=")))
    settings = {"learning_rate": 0.01, "weight_decay": 1e-6}
    assert padiff.compare_runs(plain, trained("paddle", optimizer_of("paddle", "SGD", settings), net=pasted)).passed


def test_the_rate_that_a_parameter_carries_itself_is_compared():
    attr = paddle.ParamAttr(learning_rate=0.1)
    slow = trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01}), net=paddle_net(attr=attr))
    fast = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}))
    report = padiff.compare_runs(fast, slow)
    (found,) = report.settings_differ
    assert (found.name, found.kind, found.values.reference) == ("lr", "learning_rate", 0.01)
    assert found.values.candidate == pytest.approx(0.001) and found.parameters.reference == ("0/bias",)
    assert found.fix == "bias_attr=paddle.ParamAttr(learning_rate=1.0)"
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


def ordered(framework, slow_first):
    def make(net):
        rate = "lr" if framework == "torch" else "learning_rate"
        factor = 0.001 if framework == "torch" else 0.1  # a rate, and a share of one
        groups = grouped(net, **{rate: factor})
        groups = groups[::-1] if slow_first else groups
        return torch.optim.SGD(groups, lr=0.01) if framework == "torch" else paddle.optimizer.SGD(0.01, groups)

    return make


def test_groups_in_another_order_with_rates_of_their_own_are_no_difference():
    reference = trained("torch", ordered("torch", False))
    for framework in ("torch", "paddle"):
        report = padiff.compare_runs(reference, trained(framework, ordered(framework, True)))
        assert report.passed, report.first_diff
    # The rates in each other's places are one.
    wrong = trained("torch", lambda net: torch.optim.SGD(grouped(net, lr=0.01), lr=0.001))
    report = padiff.compare_runs(reference, wrong)
    assert {(one.name, one.parameters.reference) for one in report.settings_differ} == {
        ("lr", ("0/weight", "2/weight")),
        ("lr", ("0/bias", "2/bias")),
    }
    assert report.first_diff.cause.kind == "learning_rate"


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
def test_the_line_that_mends_a_rule_says_all_of_it(sides):
    words, others = (dict(zip(("torch", "paddle"), RULES[rule])) for rule in ("momentum", "Adam"))
    reference = trained(sides[0], optimizer_of(sides[0], *words[sides[0]]))
    report = padiff.compare_runs(reference, trained(sides[1], optimizer_of(sides[1], *others[sides[1]])))
    function, mended = parsed(next(one.fix for one in report.settings_differ if one.name == "rule"))
    kind, options = words[sides[1]]
    rate = next(iter(options))  # is a record of its own
    assert function.rpartition(".")[2] == kind and mended == {k: v for k, v in options.items() if k != rate}


def test_the_line_for_a_group_without_decay_says_so():
    reference = trained("torch", lambda net: torch.optim.AdamW(grouped(net, weight_decay=0.0), lr=0.001))
    report = padiff.compare_runs(reference, trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001})))
    (found,) = report.settings_differ
    assert found.fix.startswith("torch.optim.AdamW([{") and found.fix.endswith("n.endswith('bias')]}], ...)")
    pasted = eval(f"lambda candidate_model: {found.fix.replace(', ...)', ', lr=0.001)')}")
    assert padiff.compare_runs(reference, trained("torch", pasted)).passed


@pytest.mark.parametrize("rule", ["AdamW", "Momentum"])
def test_the_line_that_spares_parameters_of_paddle_from_decay_can_be_pasted(rule):
    classes = {"AdamW": (torch.optim.AdamW, {}), "Momentum": (torch.optim.SGD, {"momentum": 0.9})}
    kind, more = classes[rule]
    reference = trained("torch", lambda net: kind(grouped(net, weight_decay=0.0), lr=0.001, weight_decay=0.1, **more))
    settings = "learning_rate=0.001, weight_decay=0.1"
    plain = eval(f"lambda net: paddle.optimizer.{rule}({settings}, parameters=net.parameters())")
    (found,) = padiff.compare_runs(reference, trained("paddle", plain)).settings_differ
    rest = settings if "parameters=" in found.fix else f"{settings}, parameters=candidate_model.parameters()"
    pasted = eval(f"lambda candidate_model: {found.fix.replace('...', rest)}")
    assert padiff.compare_runs(reference, trained("paddle", pasted)).passed


def test_a_condition_on_names_holds_for_the_parameters_and_no_others():
    sites = ["0/bias", "blocks.0.norm/weight", "blocks.0.norm/bias", "blocks.1.norm/weight", "(root)/scale"]
    rest = ["0/weight", "blocks.0.fc/weight", "blocks.1.renorm/weight"]
    test = parameter_test(sites, [*rest[:2]])
    names = [site.removeprefix("(root)/").replace("/", ".") for site in (*sites, *rest)]
    assert [eval(test, {"n": n}) for n in names] == [True] * 5 + [False] * 2 + [True]
    assert [eval(parameter_test(sites, rest), {"n": n}) for n in names] == [True] * 5 + [False] * 3
    assert parameter_test(["norm/weight"], ["first.norm/weight"]) == ""


def test_the_line_names_parameters_of_the_model_itself_as_the_model_does():
    line = optimizer_fix(
        "torch", "AdamW", ["decay.decoupled"], {"decay.decoupled": 0.0}, ["(root)/scale", "inner/bias"]
    )
    assert line == """torch.optim.AdamW([{"params": ['scale', 'inner.bias'], "weight_decay": 0.0}, ...])"""


def test_a_padding_mode_says_nothing_of_a_layer_that_does_not_pad():
    def net(itself):
        torch.manual_seed(0)
        how = {"padding": 1, "padding_mode": "reflect"} if itself else {}
        convolution = torch.nn.Conv2d(2, 3, 3, **how)
        return convolution if itself else torch.nn.Sequential(torch.nn.ReflectionPad2d(1), convolution)

    def run(itself):
        model = torch.nn.Sequential(net(itself), torch.nn.Flatten(), torch.nn.LazyLinear(2))
        torch.manual_seed(1)
        model(torch.randn(2, 2, 5, 5))
        with padiff.record(model) as rec:
            model(torch.randn(2, 2, 5, 5)).square().mean().backward()
            rec.try_dump()
        return rec.run

    assert padiff.compare_runs(run(False), run(True)).outcome == "match"


def test_what_is_counted_in_a_mean_says_nothing_without_padding():
    image = torch.randn(1, 1, 7, 7)
    means = [torch.nn.AvgPool2d(2, ceil_mode=True, count_include_pad=counts)(image) for counts in (True, False)]
    assert torch.equal(*means)  # the windows at the end are smaller
    layers = [
        Layer("pool", "AvgPool2d", "avgpool2d", settings={"padding": 0, "ceil_mode": True, "count_include_pad": counts})
        for counts in (True, False)
    ]
    assert differing(LayerPair(*layers, "names")) == []
    padded = [replace(layer, settings={**layer.settings, "padding": [0, 1]}) for layer in layers]
    assert differing(LayerPair(*padded, "names")) == ["count_include_pad"]

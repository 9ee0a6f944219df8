"""What else two runs declare: several optimizers, what changes within a run, modes, parameters, clipping."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import paddle
import pytest
import torch
from kit.trainings import STEPS, X, Y, optimizer_of, paddle_net, torch_net, trained

import padiff
from padiff.report_formats import to_json, to_junit, to_markdown

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


def test_of_several_optimizers_the_one_that_is_off_is_reported():
    reference = trained("torch", two("torch", 0.999))
    assert padiff.compare_runs(reference, trained("paddle", two("paddle", 0.999))).passed
    report = padiff.compare_runs(reference, trained("paddle", two("paddle", 0.9991)))
    (found,) = report.settings_differ
    assert (found.name, found.about) == ("beta2", "AdamW") and found.parameters.reference == ("2/weight", "2/bias")


def test_a_group_that_is_added_later_is_reported_of_the_step_that_shows_it():
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


def test_a_layer_that_is_put_into_evaluation_is_reported_of_the_step_that_shows_it():
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


def test_a_parameter_that_only_one_run_trains_is_reported():
    net = paddle_net()
    net[0].bias.stop_gradient = True
    runs = [
        trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01})),
        trained("paddle", optimizer_of("paddle", "SGD", {"learning_rate": 0.01}), net=net),
    ]
    report = padiff.compare_runs(*runs)
    (found,) = report.settings_differ
    assert (found.kind, found.parameters.candidate) == ("trainable", ("0/bias",))
    assert report.first_diff.cause.kind in ("trainable", "frozen") and report.first_diff.slot == "bias"
    # Frozen there, and in no optimizer here, is one.
    runs[0] = trained(
        "torch", lambda net: torch.optim.SGD([p for p in net.parameters() if p is not net[0].bias], lr=0.01)
    )
    assert not padiff.compare_runs(*runs).settings_differ


def test_shared_parameters_are_reported_from_those_that_are_twice():
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
    for some, said in ((runs, ("one tensor", "two tensors")), (runs[::-1], ("two tensors", "one tensor"))):
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
    assert "clip by global norm 1000.0 against by value 1000.0" in first.message
    first = padiff.compare_runs(wide, clipped(paddle.nn.ClipGradByNorm(1000.0))).first_diff
    assert "clip by global norm 1000.0 against by tensor norm 1000.0" in first.message


def test_where_one_side_clips_and_the_other_is_not_known_nothing_is_said():
    free = trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}))
    unseen = {name: value for name, value in free.info.settings.items() if not name.startswith("clip.")}
    free.set_info(replace(free.info, settings=unseen))
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
    assert said in report.first_diff.message and report.first_diff.message.endswith(f"Fix: {fix}")
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


def test_a_tensor_that_parts_later_is_reported_too(off):
    def each(step, net, _):
        if step == 2:
            with paddle.no_grad():
                net[0].bias.add_(paddle.full([7], 0.1))

    make = optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "beta2": 0.9991})
    report = padiff.compare_runs(off[0], trained("paddle", make, each=each))
    assert (report.first_diff.step, report.first_diff.stage) == (0, "update") and report.failed
    assert "The first tensor that differs: step 2, stage weight, layer 0" in report.first_diff.message
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


# -- what is called -------------------------------------------------------------------------------------------


def classified(framework, clip=None, **options):
    """A run of a training by a loss function, which clips by a call in torch and by the optimizer in paddle."""
    labels = np.array([0, 1, 2, 0, 1, 2])
    if framework == "torch":
        net, F, tensor = torch_net(), torch.nn.functional, torch.tensor
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    else:
        net, F, tensor = paddle_net(), paddle.nn.functional, paddle.to_tensor
        clipping = None if clip is None else paddle.nn.ClipGradByGlobalNorm(clip)
        optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters(), grad_clip=clipping)
    with padiff.record(net, optimizer=optimizer) as rec:
        for step in range(3):
            F.cross_entropy(net(tensor(X[step])), tensor(labels), **options).backward()
            if framework == "torch" and clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad() if framework == "torch" else optimizer.clear_grad()
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("sides", [("torch", "paddle"), ("paddle", "torch")], ids="-".join)
def test_clipping_that_is_called_is_one_with_the_optimizers(sides):
    reference = classified(sides[0], 100.0)
    report = padiff.compare_runs(reference, classified(sides[1], 100.0))
    assert report.passed and not report.settings_differ
    report = padiff.compare_runs(reference, classified(sides[1], 50.0))
    assert (report.first_diff.stage, report.first_diff.slot) == ("grad", "clip limit")
    line = {
        "torch": "torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)",
        "paddle": "paddle.optimizer.SGD(..., grad_clip=paddle.nn.ClipGradByGlobalNorm(100.0))",
    }
    assert report.first_diff.cause.fix == line[sides[1]]
    # Whoever is not seen to clip may do so in code of its own: listed, and no diff until the gradients part.
    report = padiff.compare_runs(reference, classified(sides[1]))
    assert report.passed and [one.name for one in report.settings_differ] == ["clip"]
    report = padiff.compare_runs(reference, classified(sides[1], float("inf") if sides[1] == "torch" else None))
    assert report.passed and [one.values.candidate for one in report.settings_differ] == ["none"]
    first = padiff.compare_runs(classified(sides[0], 0.01), classified(sides[1])).first_diff
    assert (first.stage, first.cause.kind) == ("grad", "clipping") and first.diff is not None


@pytest.mark.parametrize("sides", [("torch", "paddle"), ("paddle", "torch")], ids="-".join)
def test_a_setting_of_the_loss_that_may_come_to_the_same_is_listed_and_named_where_the_loss_parts(sides):
    reference = classified(sides[0])
    report = padiff.compare_runs(reference, classified(sides[1], ignore_index=-1))
    (found,) = report.settings_differ
    assert report.passed and (found.name, *found.values) == ("ignore_index", -100, -1)
    assert found.fix == f"{sides[1]}.nn.functional.cross_entropy(..., ignore_index=-100)"
    report = padiff.compare_runs(reference, classified(sides[1], label_smoothing=0.1))
    assert report.first_diff.stage == "loss" and report.first_diff.diff is not None
    assert "label_smoothing=0.0" in report.first_diff.cause.fix


@pytest.mark.parametrize("sides", [("torch", "paddle"), ("paddle", "torch")], ids="-".join)
def test_other_functions_that_come_to_the_same_loss_are_no_diff(sides):
    report = padiff.compare_runs(
        trained(sides[0], optimizer_of(sides[0], "SGD", {RATE[sides[0]]: 0.01})), by_function(sides[1])
    )
    assert report.passed, report.first_diff


RATE = {"torch": "lr", "paddle": "learning_rate"}


def by_function(framework):
    """The training of `trained`, whose loss is a sum that is divided here."""
    net, module, tensor = (
        (torch_net(), torch.nn, torch.tensor) if framework == "torch" else (paddle_net(), paddle.nn, paddle.to_tensor)
    )
    optimizer = optimizer_of(framework, "SGD", {RATE[framework]: 0.01})(net)
    with padiff.record(net, optimizer=optimizer) as rec:
        for step in range(STEPS):
            loss = module.functional.mse_loss(net(tensor(X[step])), tensor(Y[step]), reduction="sum") / Y[step].size
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad() if framework == "torch" else optimizer.clear_grad()
            rec.try_dump()
    return rec.run

"""Single step: errors do not add up from layer to layer, so the layer at fault is named, and it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.nets import both, data, spoiled, tanh_mlp

import padiff

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def chain(kit, factor=1.0, at=1, forward_factor=1.0):
    """Four linear layers; what layer ``at`` gives is off by a factor, in forward or in backward alone."""

    class Net(kit.Net):
        def build(self):
            for index in range(4):
                setattr(self, f"fc{index}", Scaled(index))

        def forward(self, x):
            for index in range(4):
                x = getattr(self, f"fc{index}")(x)
            return x

    class Scaled(kit.Net):
        def build(self, index):
            self.index = index
            self.fc = kit.Linear(5, 5)

        def forward(self, x):
            if self.index == at:
                # Backward multiplies the gradient on its way to this layer's input.
                return self.fc(kit.scaled_gradient(x, factor)) * forward_factor
            return self.fc(x)

    return Net()


def failed(report, stage):
    return [d.pair.anchor.layer for d in report.failed if d.pair.stage == stage]


@pytest.mark.parametrize("phase", ["both", "forward", "backward"])
def test_equal_models_match_in_every_phase(every_pair, phase):
    report = padiff.auto_diff(
        chain(every_pair[0]),
        chain(every_pair[1]),
        both(every_pair, data(3, 5)),
        single_step=True,
        diff_phase=phase,
        **CLOSE,
    )
    assert report
    stages = {d.pair.stage for d in report}
    assert ("forward" in stages) is (phase != "backward")
    assert ("backward" in stages) is (phase != "forward")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_bias_off_by_50_is_found_at_that_very_layer_and_later_layers_pass(pair, index):
    base, raw = tanh_mlp(pair[0], (4, 6, 6, 3)), tanh_mlp(pair[1], (4, 6, 6, 3))
    padiff.assign_weight(base, raw)
    spoiled(pair[1], raw, index, 50.0)
    report = padiff.auto_diff(
        base, raw, both(pair, data(3, 4)), auto_init=False, single_step=True, diff_phase="forward", **CLOSE
    )
    assert not report
    assert failed(report, "forward") in ([f"fc{index}"], [f"fc{index}", "(root)"])
    found = next(d for d in report.failed if d.pair.stage == "forward")
    assert found.figures.max_abs == pytest.approx(50.0, rel=1e-4)
    # A single step puts the base's output in its place, so the layers behind it see what the base's saw.
    after = [d for d in report if d.pair.stage == "forward" and d.pair.anchor.layer == f"act{index}"]
    assert all(d.passed for d in after)


def test_without_single_step_the_same_fault_spreads_to_later_layers(pair):
    base, raw = tanh_mlp(pair[0]), tanh_mlp(pair[1])
    padiff.assign_weight(base, raw)
    spoiled(pair[1], raw, 0, 50.0)
    report = padiff.auto_diff(base, raw, both(pair, data(3, 4)), auto_init=False, diff_phase="forward", **CLOSE)
    assert set(failed(report, "forward")) >= {"fc0", "act0", "fc1", "fc2"}


@pytest.mark.parametrize("phase", ["both", "forward"])
def test_a_wrong_forward_in_the_middle_is_found_there_alone(pair, phase):
    base, raw = chain(pair[0]), chain(pair[1], forward_factor=1.5)
    report = padiff.auto_diff(base, raw, both(pair, data(3, 5)), single_step=True, diff_phase=phase, **CLOSE)
    assert failed(report, "forward") == ["fc1"]
    assert report.first_diff.reference == "fc1"


@pytest.mark.parametrize("phase", ["both", "backward"])
def test_a_gradient_times_7_in_the_middle_is_found_there_alone(pair, phase):
    base, raw = chain(pair[0]), chain(pair[1], factor=7.0, at=2)
    report = padiff.auto_diff(base, raw, both(pair, data(3, 5)), single_step=True, diff_phase=phase, **CLOSE)
    assert not report
    assert report.first_diff.stage == "backward"
    # What layer 2 hands back is the gradient that reaches layer 1's output.
    assert set(failed(report, "backward")) == {"fc1", "fc1.fc"}
    assert not failed(report, "grad")
    figures = report.failed[0].figures
    assert figures.candidate_l2 == pytest.approx(7 * figures.reference_l2, rel=1e-4)


def test_the_forward_phase_does_not_see_a_wrong_gradient(pair):
    base, raw = chain(pair[0]), chain(pair[1], factor=7.0)
    assert padiff.auto_diff(base, raw, both(pair, data(3, 5)), single_step=True, diff_phase="forward", **CLOSE)


def two_headed(kit, swap=1.0):
    """A layer with several outputs of one shape, which are used one by one."""

    class Heads(kit.Net):
        def build(self):
            self.left, self.right = kit.Linear(4, 4), kit.Linear(4, 4)

        def forward(self, x):
            return self.left(x), self.right(x) * swap

    class Net(kit.Net):
        def build(self):
            self.heads, self.last = Heads(), kit.Linear(4, 2)

        def forward(self, x):
            left, right = self.heads(x)
            return self.last(left - right * 2)

    return Net()


@pytest.mark.parametrize("phase", ["both", "forward", "backward"])
def test_several_outputs_each_get_their_own_values(pair, phase):
    report = padiff.auto_diff(
        two_headed(pair[0]), two_headed(pair[1]), both(pair, data(3, 4)), single_step=True, diff_phase=phase, **CLOSE
    )
    assert report


def test_a_fault_in_the_second_output_is_found_in_that_slot(pair):
    base, raw = two_headed(pair[0]), two_headed(pair[1], swap=1.5)
    report = padiff.auto_diff(base, raw, both(pair, data(3, 4)), single_step=True, diff_phase="forward", **CLOSE)
    assert [d.pair.anchor.site for d in report.failed] == ["heads/forward/output.1"]


def test_a_shared_layer_is_synchronised_call_by_call(pair):
    def net(kit):
        return kit.net(lambda net, x: net.fc(kit.nn.functional.relu(net.fc(x)) + net.fc(x * 2)), fc=kit.Linear(4, 4))

    for phase in ("forward", "backward"):
        report = padiff.auto_diff(
            net(pair[0]), net(pair[1]), both(pair, data(3, 4)), single_step=True, diff_phase=phase, **CLOSE
        )
        assert report
        calls = {d.pair.anchor.call for d in report if d.pair.anchor.layer == "fc" and d.pair.stage == phase}
        assert calls == {0, 1, 2}


def norm_net(kit):
    return kit.Sequential(kit.Conv(2, 3, 3), kit.BatchNorm(3), kit.ReLU())


@pytest.mark.parametrize("phase", ["both", "forward", "backward"])
def test_buffers_are_left_as_they_were(every_pair, phase):
    base, raw = norm_net(every_pair[0]), norm_net(every_pair[1])
    padiff.assign_weight(base, raw)
    before = [kit.state(model) for kit, model in zip(every_pair, (base, raw))]
    report = padiff.auto_diff(
        base, raw, both(every_pair, data(2, 2, 6, 6)), auto_init=False, single_step=True, diff_phase=phase, **CLOSE
    )
    assert report
    for kit, model, state in zip(every_pair, (base, raw), before):
        after = kit.state(model)
        assert all(state[name].tobytes() == after[name].tobytes() for name in state)


def dropping(kit, rate=0.5):
    return kit.Sequential(kit.Linear(40, 40), kit.ReLU(), kit.Dropout(rate), kit.Linear(40, 3))


@pytest.mark.parametrize("options", [{}, {"single_step": True}, {"single_step": True, "diff_phase": "backward"}])
def test_same_dropout_gives_both_models_one_mask(pair, options):
    report = padiff.auto_diff(
        dropping(pair[0]), dropping(pair[1]), both(pair, data(6, 40)), same_dropout=True, **options, **CLOSE
    )
    assert report


def test_dropout_without_it_is_named_as_the_likely_cause(pair):
    report = padiff.auto_diff(dropping(pair[0]), dropping(pair[1]), both(pair, data(6, 40)), **CLOSE)
    assert not report
    assert report.first_diff.reference == "2"
    assert "dropout" in report.first_diff.cause.sentence


def test_same_dropout_really_drops_and_does_not_hide_another_rate(pair):
    base, raw = dropping(pair[0], 0.5), dropping(pair[1], 0.25)
    report = padiff.auto_diff(base, raw, both(pair, data(6, 40)), same_dropout=True, **CLOSE)
    assert not report
    assert report.first_diff.reference == "2"
    value = report.failed[0].pair.reference.value
    assert 0.5 < (value == 0).mean() < 0.95  # half of it dropped, on top of what the ReLU zeroed
    kept = report.failed[0].pair.candidate.value[value != 0]
    # Of two matrix products that cancel nearly to zero, rounding is a large part: hence the absolute share.
    assert kept == pytest.approx(value[value != 0] * (1 / 0.75) / (1 / 0.5), rel=1e-5, abs=1e-6)


def called_in(proxy):
    """Functions that the model was seen to call, by the dump."""
    (step,) = padiff.open_run(Path(proxy.dump_path) / "auto_diff").steps(0)
    return [(call.layer, call.function) for call in step.trace.calls if call.function]


@pytest.mark.parametrize("phase", ["both", "forward", "backward"])
def test_what_is_put_in_is_no_call_of_the_model(pair, phase, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def net(kit):
        class Net(kit.Net):
            def build(self):
                self.first, self.last = kit.Linear(4, 4), kit.Linear(4, 3)

            def forward(self, x):
                return self.last(kit.relu(self.first(x)))

        return Net()

    proxies = [padiff.create_model(net(kit)) for kit in pair]
    assert padiff.auto_diff(*proxies, both(pair, data(5, 4)), single_step=True, diff_phase=phase, **CLOSE)
    assert [called_in(proxy) for proxy in proxies] == [[("(root)", "relu")]] * 2

"""``auto_diff``: verdicts, and where they point, for every pair of frameworks."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH, hook_count
from kit.nets import both, data, forward_of_tanh_mlp, spoiled, tanh_mlp

import padiff

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def pair_of_mlps(pair, **options):
    return tanh_mlp(pair[0], **options), tanh_mlp(pair[1], **options)


def test_two_models_that_are_equal_match_after_the_weights_were_copied(pair):
    base, raw = pair_of_mlps(pair)
    x = data(5, 4)
    report = padiff.auto_diff(base, raw, [{"x": t} for t in both(pair, x)], **CLOSE)
    assert report
    assert report.passed
    assert report == True  # noqa: E712
    expected = forward_of_tanh_mlp(pair[0], base, x)
    np.testing.assert_allclose(pair[1].float64(raw(pair[1].tensor(x))), expected, atol=1e-5)
    assert {d.pair.stage for d in report} == {"input", "weight", "forward", "loss", "backward", "grad"}
    assert report.coverage.complete
    for kit, model in zip(pair, (base, raw)):
        assert all(kit.grad(p) is None for p in model.parameters())
        assert hook_count(kit, model) == 0


@pytest.mark.parametrize("form", ["tensor", "tuple"])
def test_inputs_are_tensors_or_tuples_too(pair, form):
    base, raw = pair_of_mlps(pair)
    wrap = {"tensor": lambda t: t, "tuple": lambda t: (t,)}[form]
    report = padiff.auto_diff(base, raw, tuple(wrap(t) for t in both(pair, data(5, 4))), **CLOSE)
    assert report
    inputs = [d for d in report if d.pair.stage == "input"]
    assert [d.figures.max_abs for d in inputs] == [0.0]


def test_different_inputs_are_reported_as_such(pair):
    base, raw = pair_of_mlps(pair)
    report = padiff.auto_diff(base, raw, (pair[0].tensor(data(5, 4)), pair[1].tensor(data(5, 4, seed=2))), **CLOSE)
    assert not report
    assert report.first_diff.stage == "input"


def test_without_auto_init_the_weights_stay_and_their_difference_is_found(pair):
    base, raw = pair_of_mlps(pair)
    before = pair[1].state(raw)
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), auto_init=False, **CLOSE)
    assert not report
    assert report == False  # noqa: E712
    after = pair[1].state(raw)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def _shifted(kit, amount):
    """A linear layer whose output is off by a known amount."""

    class Shifted(kit.Net):
        def build(self):
            self.fc = kit.Linear(3, 3)

        def forward(self, x):
            return self.fc(x) + amount

    return Shifted()


@pytest.mark.parametrize(("atol", "passes"), [(0.6, True), (0.4, False)])
@pytest.mark.parametrize("mode", ["mean", "strict"])
def test_an_absolute_tolerance_is_what_it_says(pair, atol, passes, mode):
    base, raw = _shifted(pair[0], 0.0), _shifted(pair[1], 0.5)
    report = padiff.auto_diff(
        base, raw, both(pair, data(4, 3)), atol=atol, rtol=0, compare_mode=mode, diff_phase="forward"
    )
    assert report.passed is passes


@pytest.mark.parametrize(("rtol", "passes"), [(0.6, True), (0.4, False)])
def test_a_relative_tolerance_is_of_the_bases_values(pair, rtol, passes):
    class Scaled:
        def make(self, kit, factor):
            return kit.net(lambda net, x: net.fc(x) * factor, fc=kit.Linear(3, 3))

    base, raw = Scaled().make(pair[0], 1.0), Scaled().make(pair[1], 1.5)
    report = padiff.auto_diff(base, raw, both(pair, data(4, 3)), atol=1e-6, rtol=rtol, diff_phase="forward")
    assert report.passed is passes


def _permuting(kit, order):
    class Net(kit.Net):
        def build(self):
            self.fc = kit.Linear(4, 4)

        def forward(self, x):
            out = self.fc(x)
            return kit.nn.functional.linear(out, kit.tensor(np.eye(4, dtype="float32")[list(order)])) if order else out

    return Net()


def test_mean_is_the_mean_of_the_error_so_a_permuted_output_fails(pair):
    base, raw = _permuting(pair[0], (0, 1, 2, 3)), _permuting(pair[1], (2, 3, 0, 1))
    report = padiff.auto_diff(
        base, raw, both(pair, data(4, 4)), atol=1e-3, rtol=1e-3, compare_mode="mean", diff_phase="forward"
    )
    assert not report
    assert report.first_diff.reference == "(root)"


def test_mean_forgives_one_element_that_strict_does_not(pair):
    def spiked(kit, height):
        return kit.net(
            lambda net, x: net.fc(x) + kit.tensor(np.eye(1, 10, dtype="float32") * height), fc=kit.Linear(10, 10)
        )

    x = data(1, 10)
    verdicts = {
        mode: padiff.auto_diff(
            spiked(pair[0], 0), spiked(pair[1], 1.0), both(pair, x), atol=0.2, rtol=0, compare_mode=mode
        ).passed
        for mode in ("mean", "strict")
    }
    assert verdicts == {"mean": True, "strict": False}


def test_a_forward_phase_runs_no_backward(pair):
    base, raw = pair_of_mlps(pair)
    asked = {"runs": 0}

    def watched(kit, model):
        model.fc0.register_forward_post_hook(spy) if kit.name == "paddle" else model.fc0.register_forward_hook(spy)

    def spy(layer, args, output):
        output.register_hook(lambda gradient: asked.update(runs=asked["runs"] + 1))

    for kit, model in zip(pair, (base, raw)):
        watched(kit, model)
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), diff_phase="forward", **CLOSE)
    assert report
    assert asked["runs"] == 0
    assert {d.pair.stage for d in report} == {"input", "weight", "forward"}
    for kit, model in zip(pair, (base, raw)):
        assert all(kit.grad(p) is None for p in model.parameters())
    assert padiff.auto_diff(base, raw, both(pair, data(5, 4)), diff_phase="both", **CLOSE)
    assert asked["runs"] == 2


def test_backward_without_single_step_is_taken_as_both_and_reported(pair, capsys):
    base, raw = pair_of_mlps(pair)
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), diff_phase="backward", **CLOSE)
    assert "diff_phase='backward' holds with single_step=True only" in capsys.readouterr().out
    assert {"forward", "backward"} <= {d.pair.stage for d in report}


@pytest.mark.parametrize("options", [{}, {"single_step": True}, {"auto_init": False}])
def test_gradients_are_cleared_after_a_failure_too(pair, options):
    base, raw = pair_of_mlps(pair)
    padiff.assign_weight(base, raw)
    real = raw.forward
    raw.forward = lambda x: real(x) * 1.01
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), **CLOSE, **options)
    assert not report
    assert report.first_diff.reference == "(root)"
    for kit, model in zip(pair, (base, raw)):
        assert all(kit.grad(p) is None for p in model.parameters())
        assert hook_count(kit, model) == 0


def test_a_wrong_gradient_is_found_in_backward_though_forward_is_equal(pair):
    def net(kit, factor):
        return kit.net(
            lambda net, x: net.last(kit.scaled_gradient(net.first(x), factor)),
            first=kit.Linear(4, 4),
            last=kit.Linear(4, 2),
        )

    report = padiff.auto_diff(net(pair[0], 1.0), net(pair[1], 7.0), both(pair, data(5, 4)), **CLOSE)
    assert not report
    assert (report.first_diff.stage, report.first_diff.reference) == ("backward", "first")
    # The gradient is 7 times what it should be, so the largest difference is 6 times the reference's largest value.
    figures = report.failed[0].figures
    assert figures.candidate_l2 == pytest.approx(7 * figures.reference_l2, rel=1e-4)


def test_figures_are_those_of_numpy(pair):
    base, raw = pair_of_mlps(pair)
    padiff.assign_weight(base, raw)
    spoiled(pair[1], raw, 2, 0.25)
    x = data(5, 4)
    report = padiff.auto_diff(base, raw, both(pair, x), auto_init=False, diff_phase="forward", **CLOSE)
    output = next(d for d in report if d.pair.anchor.site == "fc2/forward/output.0")
    assert output.figures.max_abs == pytest.approx(0.25, rel=1e-4)
    norm = np.linalg.norm(forward_of_tanh_mlp(pair[0], base, x))
    assert output.figures.reference_l2 == pytest.approx(norm, rel=1e-5)


def test_true_is_never_answered_for_outputs_that_differ(every_pair, capsys):
    random = np.random.default_rng([len(every_pair[0].name), len(every_pair[1].name)])
    for case in range(4):
        widths = tuple(int(n) for n in random.integers(2, 7, size=random.integers(3, 6)))
        base, raw = pair_of_mlps(every_pair, widths=widths)
        padiff.assign_weight(base, raw)
        layer = getattr(raw, f"fc{random.integers(raw.count)}")
        fault = random.normal(size=tuple(layer.bias.shape)).astype("float32") * 10.0 ** random.integers(-3, 2)
        every_pair[1].set(layer.bias, every_pair[1].float64(layer.bias).astype("float32") + fault)
        x = data(3, widths[0], seed=case)
        worst = np.abs(forward_of_tanh_mlp(every_pair[0], base, x) - forward_of_tanh_mlp(every_pair[1], raw, x)).max()
        assert worst > 1e-5
        for mode in ("strict", "mean"):
            report = padiff.auto_diff(
                base,
                raw,
                both(every_pair, x),
                auto_init=False,
                atol=1e-6,
                rtol=0,
                compare_mode=mode,
                diff_phase="forward",
            )
            assert report.passed is False
    capsys.readouterr()


def test_weights_that_cannot_be_carried_over_give_a_false_report_and_both_trees(pair, capsys):
    base, raw = tanh_mlp(pair[0], (4, 8, 3)), tanh_mlp(pair[1], (4, 8, 8, 3))
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), **CLOSE)
    assert not report
    assert "could not be carried over" in report.first_diff.message
    printed = capsys.readouterr().out
    assert printed.count("<---  *** HERE ***") >= 1
    assert "Base model" in printed
    assert "Raw model" in printed
    assert "SUCCESS" not in printed


def test_two_threads_with_different_settings_do_not_touch_each_other():
    torch, paddle = TORCH, PADDLE
    results = {}

    def work(name, atol):
        padiff.set_dump_root_path(name)
        for _ in range(4):
            base, raw = _shifted(torch, 0.0), _shifted(paddle, 0.5)
            report = padiff.auto_diff(base, raw, both((torch, paddle), data(4, 3)), atol=atol, diff_phase="forward")
            results.setdefault(name, []).append(report.passed)
        results[f"{name} root"] = padiff.get_dump_root_path()

    tolerances = {"loose": 1.0, "tight": 0.1}
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, *each)) for each in tolerances.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["loose"] == [True] * 4
    assert results["tight"] == [False] * 4
    assert results["loose root"].endswith("loose")
    assert results["tight root"].endswith("tight")

"""``check_report / check_params / check_weights / check_grads`` on what the proxies wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit.nets import data, tanh_mlp

import padiff
from padiff import check_grads, check_params, check_report, check_weights, create_model

CFG = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def proxies_of(pair, **options):
    base, raw = (tanh_mlp(kit, **options) for kit in pair)
    padiff.assign_weight(base, raw)
    return create_model(base), create_model(raw)


def train(kit, proxy, x, scale=1.0):
    loss = proxy(kit.tensor(x)).mean() * scale
    proxy.backward(loss)
    return loss


def dumped(pair, x=None, spoil=None, scale=1.0):
    """One dump of each side, the second one spoiled."""
    x = data(5, 4) if x is None else x
    proxies = proxies_of(pair)
    if spoil is not None:
        spoil(pair[1], proxies[1].model)
    for side, kit, proxy in zip("ab", pair, proxies):
        train(kit, proxy, x, scale if side == "b" else 1.0)
        proxy.try_dump(1, side)
    return "a", "b"


def bias_off(kit, model):
    kit.set(model.fc1.bias, kit.float64(model.fc1.bias).astype("float32") + 1)


def test_equal_dumps_match_in_every_check(every_pair):
    a, b = dumped(every_pair)
    for check in (check_report, check_params, check_weights, check_grads):
        report = check(a, b, CFG)
        assert report
        assert report.coverage.complete


def test_each_check_looks_at_its_own_stages(pair):
    a, b = dumped(pair)
    stages = {check: {d.pair.stage for d in check(a, b)} for check in (check_report, check_params)}
    assert stages[check_report] == {"input", "forward", "loss", "backward"}
    assert stages[check_params] == {"weight", "grad"}
    assert {d.pair.stage for d in check_weights(a, b)} == {"weight"}
    assert {d.pair.stage for d in check_grads(a, b)} == {"grad"}


def test_a_bias_that_is_off_is_found_by_the_checks_that_see_it(pair):
    a, b = dumped(pair, spoil=bias_off)
    weights = check_weights(a, b, CFG)
    assert (weights.first_diff.reference, weights.first_diff.slot) == ("fc1", "bias")
    assert weights.first_diff.max_abs == pytest.approx(1.0)
    assert [d.pair.anchor.site for d in weights.failed] == ["fc1/weight/bias"]
    assert check_report(a, b, CFG).first_diff.reference == "fc1"
    assert not check_params(a, b, CFG)


def test_a_gradient_times_7_is_found(pair):
    a, b = dumped(pair, scale=7.0)
    assert check_weights(a, b, CFG)
    assert not check_grads(a, b, CFG)
    report = check_report(a, b, CFG)
    assert report.first_diff.stage in ("loss", "backward")
    gradients = [d for d in report.failed if d.pair.stage == "backward"]
    assert gradients
    for diff in gradients:
        assert diff.figures.candidate_l2 == pytest.approx(7 * diff.figures.reference_l2, rel=1e-4)


def test_the_defaults_are_the_documents(pair):
    a, b = dumped(pair, spoil=lambda kit, model: kit.set(model.fc2.bias, kit.float64(model.fc2.bias) + 5e-5))
    assert check_weights(a, b)
    assert not check_weights(a, b, {"atol": 1e-5})
    assert "0.0001" in check_weights(a, b).tolerance


def test_a_cfg_never_changes_a_later_calls_defaults(pair):
    a, b = dumped(pair, spoil=bias_off)
    cfg = {"atol": 10.0}
    assert check_weights(a, b, cfg)
    assert cfg == {"atol": 10.0}
    assert not check_weights(a, b)


def test_an_unknown_key_is_named_with_the_nearest(pair):
    a, b = dumped(pair)
    with pytest.raises(padiff.PadiffError, match=r"cfg: unknown key 'compare_mod'. Nearest: compare_mode"):
        check_report(a, b, {"compare_mod": "strict"})


def test_a_folder_that_is_no_dump_is_reported():
    Path("empty").mkdir()
    with pytest.raises(padiff.PadiffError, match="empty"):
        check_report("empty", "empty")
    with pytest.raises(padiff.PadiffError, match="nowhere"):
        check_report("nowhere", "nowhere")


def test_weights_after_the_optimizer_lie_beside_the_params_before_it(pair):
    proxies = proxies_of(pair)
    before, after = [], []
    for side, rate, kit, proxy in zip("ab", (0.1, 5.0), pair, proxies):
        train(kit, proxy, data(5, 4))
        proxy.dump_params(side)
        before.append(kit.weight(proxy.model.fc2))
        proxy.dump_grads(side)
        kit.sgd(proxy.model.parameters(), rate).step()
        proxy.dump_weights(side)
        after.append(kit.weight(proxy.model.fc2))
    # The optimizers differ: only the weights after the step show it.
    assert check_params("a", "b", CFG)
    assert check_grads("a", "b", CFG)
    report = check_weights("a", "b", CFG)
    assert not report
    worst = next(d for d in report.failed if d.pair.anchor.site == "fc2/weight/weight")
    assert worst.figures.max_abs == pytest.approx(abs(after[1] - after[0]).max(), rel=1e-4)
    assert abs(before[1] - before[0]).max() == 0


def series(pair, faulty_step=None, steps=12):
    proxies = proxies_of(pair)
    for step in range(steps):
        for kit, proxy in zip(pair, proxies):
            x = data(5, 4, seed=step)
            if step == faulty_step and proxy is proxies[1]:
                x = x + 1
            train(kit, proxy, x)
            proxy.try_dump()
            for parameter in proxy.model.parameters():
                parameter.grad = None if kit.name == "torch" else parameter.clear_gradient(False)
    return [proxy.dump_path for proxy in proxies]


def test_a_series_of_steps_is_compared_whole_and_in_the_order_of_its_numbers(pair):
    report = check_report(*series(pair), CFG)
    assert report
    assert report.coverage.steps == tuple(range(12))


def test_a_fault_in_a_late_step_is_found_in_that_step(pair):
    a, b = series(pair, faulty_step=10)
    report = check_report(a, b, CFG)
    assert (report.first_diff.step, report.first_diff.stage) == (10, "input")
    assert {d.pair.step for d in report.failed} == {10}
    assert check_weights(a, b, CFG)
    assert not check_grads(a, b, CFG)


def test_dumps_may_be_moved(pair):
    dumped(pair)
    Path("new").mkdir()
    for side in "ab":
        shutil.move(side, f"new/{side}")
    assert check_report("new/a", "new/b", CFG)
    assert check_params("new/a", "new/b", CFG)


def test_a_missing_tensor_is_an_error_not_a_match(pair):
    a, b = dumped(pair)
    victim = sorted(Path(b, "tensors").iterdir())[0]
    victim.unlink()
    with pytest.raises(padiff.PadiffError, match="tensors"):
        bool(check_report(a, b, CFG))


def branched(kit, order):
    """Two parallel layers that are called in one order or the other."""

    class Net(kit.Net):
        def build(self):
            if order == "ab":
                self.a, self.b = kit.Linear(4, 4), kit.Linear(4, 4)
            else:
                self.b, self.a = kit.Linear(4, 4), kit.Linear(4, 4)

        def forward(self, x):
            if order == "ab":
                return self.a(x) - self.b(x)
            b = self.b(x)
            return self.a(x) - b

    return Net()


def test_a_layer_map_reaches_the_comparison_in_the_users_order(pair):

    base, raw = branched(pair[0], "ab"), branched(pair[1], "ba")
    renamed = raw._modules if pair[1].name == "torch" else raw._sub_layers
    assert list(renamed) == ["b", "a"]
    for reference, candidate in ((base.a, raw.a), (base.b, raw.b)):
        padiff.assign_weight(reference, candidate)
    proxies = [create_model(base), create_model(raw)]
    proxies[0].set_layer_map([base.b, base.a])
    proxies[1].set_layer_map([raw.b, raw.a])
    for side, kit, proxy in zip("pq", pair, proxies):
        train(kit, proxy, data(5, 4))
        proxy.try_dump(1, side)
    assert check_report("p", "q", CFG)
    assert check_params("p", "q", CFG)
    # Turned round, the map pairs layers that do not answer to each other, and this is seen.
    proxies[1].set_layer_map([raw.a, raw.b])
    train(pair[1], proxies[1], data(5, 4))
    proxies[1].try_dump(1, "r")
    report = check_report("p", "r", CFG)
    assert {(d.pair.reference.layer, d.pair.candidate.layer) for d in report.failed} >= {("a", "b"), ("b", "a")}


def test_layer_maps_of_unequal_length_are_reported(pair):
    proxies = proxies_of(pair)
    proxies[0].set_layer_map([proxies[0].model.fc0])
    for side, kit, proxy in zip("ab", pair, proxies):
        train(kit, proxy, data(5, 4))
        proxy.try_dump(1, side)
    with pytest.raises(padiff.PadiffError, match="the reference's has 1 layers and the candidate's 0"):
        check_report("a", "b")

"""Mapped layers with equal interfaces and other insides: compared by what they give; the rest is named, no diff."""

from __future__ import annotations

import contextvars
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import both, data

import padiff
from padiff import auto_diff, check_grads, check_params, check_report, check_weights, create_model

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def own(kit, *shape):
    """A parameter of a layer's own."""
    if kit is TORCH:
        return kit.nn.Parameter(kit.tensor(data(*shape) * 0.3))
    return kit.nn.Layer().create_parameter(shape, default_initializer=kit.nn.initializer.Assign(data(*shape) * 0.3))


def joined(kit, *tensors):
    return torch.cat(tensors, -1) if kit is TORCH else paddle.concat(list(tensors), -1)


def net(kit, split):
    """``c`` multiplies by one matrix ``w``, or by its halves ``w1`` and ``w2``; both add a ``shift``."""

    class Inner(kit.Net):
        def build(self):
            if split:
                self.w1, self.w2 = own(kit, 4, 2), own(kit, 4, 2)
            else:
                self.w = own(kit, 4, 4)
            self.shift = own(kit, 4)

        def forward(self, x):
            return x @ (joined(kit, self.w1, self.w2) if split else self.w) + self.shift

    return kit.net(lambda net, x: net.b(net.c(net.a(x))), a=kit.Linear(4, 4), c=Inner(), b=kit.Linear(4, 2))


def aligned(pair, split=(False, True)):
    """Two such nets that compute the same, their mapped layers initialised by hand, as the documents say."""
    base, raw = (net(kit, how) for kit, how in zip(pair, split))
    matrix, shift = data(4, 4, seed=5), data(4, seed=6)
    for kit, model in zip(pair, (base, raw)):
        kit.set(model.c.shift, shift)
        if hasattr(model.c, "w"):
            kit.set(model.c.w, matrix)
        else:
            kit.set(model.c.w1, matrix[:, :2].copy())
            kit.set(model.c.w2, matrix[:, 2:].copy())
    return base, raw


def carried(base, raw):
    assert padiff.assign_weight(base.a, raw.a) and padiff.assign_weight(base.b, raw.b)
    return base, raw


def proxies(base, raw):
    found = create_model(base), create_model(raw)
    for proxy in found:
        proxy.set_layer_map([proxy.model.c])
    return found


# -- auto_diff ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "single", "halves_first"),
    [(how, single, (k + single) % 2) for k, how in enumerate(("layer_map", "layer_mapping", "set_layer_map"))
     for single in (0, 1)],
)  # fmt: skip
def test_auto_diff_compares_such_layers_as_wholes_and_names_what_is_inside(pair, how, single, halves_first, capsys):
    """Any two of the ways to say it, the ways to compare, and the order together."""
    split = (True, False) if halves_first else (False, True)
    options = {"single_step": True} if single else {}
    base, raw = carried(*aligned(pair, split))
    x = both(pair, data(5, 4))
    call = {"auto_init": False, **options, **CLOSE}

    def run():
        if how == "set_layer_map":
            return auto_diff(*proxies(base, raw), x, **call)
        return auto_diff(base_model=base, raw_model=raw, inputs=x, **call, **{how: {base.c: raw.c}})

    report = run()
    assert report, report.first_diff
    compared = {d.pair.anchor.site for d in report if d.compared}
    assert "c/forward/output.0" in compared
    assert not any(site.startswith(("c/weight", "c/grad")) for site in compared)
    assert {"a/weight/weight", "a/grad/weight"} <= compared
    # A gap, and named.
    sides = (report.coverage.reference_sites, report.coverage.candidate_sites)
    for sites, halves in zip(sides, split):
        assert ("c/weight/w1" in sites and "c/weight/w2" in sites) if halves else "c/weight/w" in sites
        assert "c/grad/shift" in sites
    assert not report.coverage.complete
    out = capsys.readouterr().out
    assert "Compared as a whole, not inside: `c` and `c` (parameters not compared: " in out
    assert "c/w1, c/w2, c/shift" in out
    # What it gives is compared all the same.
    wrong = raw.c.w if hasattr(raw.c, "w") else raw.c.w2
    pair[1].set(wrong, (pair[1].float64(wrong) * 1.1).astype("float32"))
    report = run()
    assert (report.first_diff.stage, report.first_diff.reference) == ("forward", "c")
    if options:
        # What follows runs on the base's output of the mapped layer.
        forward = [d.pair.anchor.site for d in report.failed if d.pair.stage == "forward"]
        assert forward == ["c/forward/output.0"]


def test_a_single_step_leaves_the_layers_inside_of_a_mapped_one_to_run_on_their_own(pair):
    """A fault in the first of two layers inside shows in what the mapped layer gives, and nowhere else."""

    def blocks(kit):
        class Inner(kit.Net):
            def build(self):
                self.one, self.two = kit.Linear(4, 4), kit.Linear(4, 4)

            def forward(self, x):
                return self.two(self.one(x))

        return kit.net(lambda net, x: net.b(net.c(x)), c=Inner(), b=kit.Linear(4, 2))

    base, raw = (blocks(kit) for kit in pair)
    assert padiff.assign_weight(base, raw)
    bias = raw.c.one.bias
    pair[1].set(bias, pair[1].float64(bias).astype("float32") + 1)
    call = {"auto_init": False, "single_step": True, "diff_phase": "forward", **CLOSE}
    x = both(pair, data(5, 4))

    def parted(report):
        return [d.pair.anchor.layer for d in report.failed if d.pair.stage == "forward"]

    assert parted(auto_diff(base, raw, x, layer_map={base.c: raw.c}, **call)) == ["c"]
    assert parted(auto_diff(base, raw, x, **call)) == ["c.one"]


def test_layers_of_a_map_that_hold_the_same_are_compared_inside_all_the_same(every_pair):
    base, raw = carried(*aligned(every_pair, (False, False)))
    x = both(every_pair, data(5, 4))
    call = {"auto_init": False, "layer_map": {base.c: raw.c}, **CLOSE}
    report = auto_diff(base, raw, x, **call)
    assert report
    assert {"c/weight/w", "c/grad/shift"} <= {d.pair.anchor.site for d in report if d.compared}
    every_pair[1].set(raw.c.shift, every_pair[1].float64(raw.c.shift).astype("float32") + 1)
    report = auto_diff(base, raw, x, **call)
    assert (report.first_diff.stage, report.first_diff.slot) == ("weight", "shift")


def test_a_missing_parameter_outside_of_the_map_is_still_a_diff(pair):
    base, raw = carried(*aligned(pair))
    x = both(pair, data(5, 4))
    report = auto_diff(base, raw, x, auto_init=False, layer_map={base.a: raw.a}, **CLOSE)
    assert not report
    assert report.first_diff.reference == "c"
    assert "missing on the" in report.first_diff.message or "shapes differ" in report.first_diff.message


# -- offline -----------------------------------------------------------------------------------------------------------


def dumps(pair, base, raw):
    for side, kit, proxy in zip("pq", pair, proxies(base, raw)):
        proxy.backward((proxy(kit.tensor(data(5, 4))) ** 2).mean())
        proxy.try_dump(1, side)
    return "p", "q"


@pytest.mark.parametrize("split", [(False, True), (True, False)], ids=["one matrix first", "two matrices first"])
def test_checks_on_dumps_leave_out_and_name_what_differs_inside(pair, split):
    folders = dumps(pair, *carried(*aligned(pair, split)))
    for check in (check_report, check_params, check_weights, check_grads):
        report = check(*folders, CLOSE)
        assert report, report.first_diff
    coverage = check_params(*folders, CLOSE).coverage
    for sites, halves in zip((coverage.reference_sites, coverage.candidate_sites), split):
        names = ("w1", "w2", "shift") if halves else ("w", "shift")
        assert set(sites) == {f"c/{stage}/{name}" for stage in ("weight", "grad") for name in names}
    assert not coverage.complete


def test_checks_on_dumps_see_what_such_layers_give(pair):
    base, raw = carried(*aligned(pair))
    pair[1].set(raw.c.w2, (pair[1].float64(raw.c.w2) * 1.1).astype("float32"))
    report = check_report(*dumps(pair, base, raw), CLOSE)
    assert (report.first_diff.stage, report.first_diff.reference) == ("forward", "c")


def test_a_mapped_layer_that_one_side_froze_is_still_reported(pair):
    base, raw = carried(*aligned(pair, (False, False)))
    if pair[1] is TORCH:
        raw.c.w.requires_grad_(False)
    else:
        raw.c.w.stop_gradient = True
    report = check_grads(*dumps(pair, base, raw), CLOSE)
    assert (report.first_diff.reference, report.first_diff.slot) == ("c", "w")


def test_the_dumps_of_auto_diff_agree_with_it(pair):
    base, raw = carried(*aligned(pair))
    models = proxies(base, raw)
    assert auto_diff(*models, both(pair, data(5, 4)), auto_init=False, **CLOSE)
    folders = [Path(model.dump_path) / "auto_diff" for model in models]
    assert check_report(*folders, CLOSE) and check_params(*folders, CLOSE)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["layer_map", "layer_mapping", "set_layer_map"])
def test_what_can_be_carried_over_is_and_the_mapped_layer_is_left_to_the_user(pair, how, capsys):
    base, raw = aligned(pair)  # c as the user initialised it, a and b at random
    before = pair[1].float64(raw.c.w1), pair[1].float64(raw.c.shift)
    x = both(pair, data(5, 4))
    if how == "set_layer_map":
        report = auto_diff(*proxies(base, raw), x, **CLOSE)
    else:
        report = auto_diff(base_model=base, raw_model=raw, inputs=x, **CLOSE, **{how: {base.c: raw.c}})
    assert report, report.first_diff
    np.testing.assert_array_equal(pair[1].weight(raw.a), pair[0].weight(base.a))
    np.testing.assert_array_equal(pair[1].weight(raw.b), pair[0].weight(base.b))
    np.testing.assert_array_equal(pair[1].float64(raw.c.w1), before[0])
    np.testing.assert_array_equal(pair[1].float64(raw.c.shift), before[1])
    out = capsys.readouterr().out
    assert "not carried over, the raw model's stays as it is: `c` to `c`. Initialise it yourself" in out
    assert "add_special_init" in out
    assert f"weights: {pair[0].name} Net -> {pair[1].name} Net (4 tensors, 0 buffers)" in out


def test_a_mapped_layer_that_nobody_initialised_is_where_the_models_part(pair):
    base, raw = net(pair[0], False), net(pair[1], True)
    for weight in (raw.c.w1, raw.c.w2):
        pair[1].set(weight, data(4, 2, seed=11))
    report = auto_diff(base, raw, both(pair, data(5, 4)), layer_map={base.c: raw.c}, **CLOSE)
    assert (report.first_diff.stage, report.first_diff.reference) == ("forward", "c")
    assert not [d for d in report.failed if d.pair.anchor.layer == "a" and d.pair.stage in ("weight", "forward")]


def test_what_does_not_fit_outside_of_the_map_still_carries_nothing_over(pair, capsys):
    base, raw = net(pair[0], False), net(pair[1], True)
    raw.b = pair[1].Linear(4, 3)
    before = pair[1].state(raw)
    assert not auto_diff(base, raw, both(pair, data(5, 4)), layer_map={base.c: raw.c}, **CLOSE)
    assert all(before[name].tobytes() == value.tobytes() for name, value in pair[1].state(raw).items())
    assert "partial=True" in capsys.readouterr().out


# -- rules of the user's own -------------------------------------------------------------------------------------------


class PO(TORCH.Net):
    def build(self):
        self.w = own(TORCH, 16)

    def forward(self, x):
        return x @ self.w.view(4, 4)


class TO(PADDLE.Net):
    def build(self):
        self.w = own(PADDLE, 2, 4, 2)

    def forward(self, x):
        return joined(PADDLE, x @ self.w[0], x @ self.w[1])


class Turned(PADDLE.Net):
    """A square matrix the other way round, which no shape tells."""

    def build(self):
        self.w = own(PADDLE, 4, 4)

    def forward(self, x):
        return x @ self.w.T


class Square(TORCH.Net):
    def build(self):
        self.w = own(TORCH, 4, 4)

    def forward(self, x):
        return x @ self.w


def within(kit, inner):
    return kit.net(lambda net, x: net.b(net.c(net.a(x))), a=kit.Linear(4, 4), c=inner, b=kit.Linear(4, 2))


def halves(base, raw):
    matrix = base.w.detach().numpy().reshape(4, 4)
    PADDLE.set(raw.w, np.stack([matrix[:, :2], matrix[:, 2:]]))


def turn(base, raw):
    PADDLE.set(raw.w, base.w.detach().numpy().T.copy())


@pytest.mark.parametrize("mapped", [True, False], ids=["with a map", "without a map"])
@pytest.mark.parametrize("auto_init", [True, False])
@pytest.mark.parametrize(
    ("reference", "candidate", "rule"), [(PO, TO, halves), (Square, Turned, turn)], ids=["other shapes", "turned"]
)
def test_a_rule_and_a_map_for_the_same_layers_go_together(reference, candidate, rule, mapped, auto_init):
    def work():
        padiff.add_special_init("torch", reference.__name__, "paddle", candidate.__name__, rule)
        base, raw = within(TORCH, reference()), within(PADDLE, candidate())
        if not auto_init:
            assert padiff.assign_weight(base, raw)
        call = {"layer_map": {raw.c: base.c}} if mapped else {}
        x = both((TORCH, PADDLE), data(5, 4))
        report = auto_diff(base, raw, x, auto_init=auto_init, **call, **CLOSE)
        assert report, report.first_diff
        assert "c/forward/output.0" in {d.pair.anchor.site for d in report if d.compared}
        PADDLE.set(raw.c.w, (raw.c.w * 1.1).numpy())
        report = auto_diff(base, raw, x, auto_init=False, **call, **CLOSE)
        assert (report.first_diff.stage, report.first_diff.reference) == ("forward", "c")

    contextvars.copy_context().run(work)

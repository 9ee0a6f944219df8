"""Causes in routers: what the values of both sides are functions of tells what they compute otherwise."""

from __future__ import annotations

from functools import cache

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS

import padiff
from padiff.compare import compare_runs

WIDTH, EXPERTS, TOKENS = 12, 6, 40
LIBRARY = {"torch": torch, "paddle": paddle}
RNG = np.random.default_rng(3)
X = RNG.normal(size=(TOKENS, WIDTH)).astype(np.float32)
BIAS = np.linspace(-0.2, 0.2, EXPERTS).astype(np.float32)


class Router:
    """A mixture of experts with a fault in its router. Each expert gets all rows, or its own in reverse order."""

    def __init__(self, kit, fault="", one_by_one=False, sigmoid=False):
        self.kit, self.fault, self.one_by_one, self.sigmoid = kit, fault, one_by_one, sigmoid
        kit.seed(0)
        random = np.random.default_rng(5)
        parts = {f"expert{k}": kit.Linear(WIDTH, WIDTH) for k in range(EXPERTS)}
        self.model = kit.net(
            lambda net, x: self.forward(net, x),
            router=kit.Linear(WIDTH, EXPERTS),
            **parts,
            last=kit.Linear(WIDTH, 4),
        )
        for name in ("router", *parts, "last"):
            layer = getattr(self.model, name)
            kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32) * 0.5)
            kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))

    def routed(self, scores):
        f, fault = LIBRARY[self.kit.name], self.fault
        softmax, sigmoid = f.nn.functional.softmax, f.nn.functional.sigmoid
        if fault == "temperature":
            scores = scores * 0.7
        if fault == "noise":
            scores = scores + self.kit.tensor(
                np.random.default_rng(1).normal(size=(TOKENS, EXPERTS)).astype("f") * 0.02
            )
        base = sigmoid(scores) if self.sigmoid != (fault == "other function") else softmax(scores, -1)
        if fault == "axis":
            base = softmax(scores, 0)
        chosen_by = base + self.kit.tensor(BIAS) if self.sigmoid and fault != "no bias" else base
        weights, places = f.topk(chosen_by, 3 if fault == "k" else 2, -1)
        if fault != "bias in the weights":
            weights = (base.gather(1, places)) if self.kit.name == "torch" else f.take_along_axis(base, places, 1)
        if fault != "not divided":
            weights = weights / weights.sum(-1).unsqueeze(-1)
        if fault == "scaled":
            weights = weights * 1.5
        if fault == "softmax of the chosen":
            weights = softmax(weights, -1)
        return base, weights, places

    def forward(self, net, x):
        f, kit = LIBRARY[self.kit.name], self.kit
        base, weights, places = self.routed(net.router(x))
        chosen = f.nn.functional.one_hot(places, EXPERTS)
        chosen = chosen.astype("float32") if kit.name == "paddle" else chosen.float()
        gates = (chosen * weights.unsqueeze(-1)).sum(1)
        if self.fault == "capacity":
            counts = f.cumsum((gates > 0).astype("float32") if kit.name == "paddle" else (gates > 0).float(), 0)
            gates = gates * ((counts <= 14).astype("float32") if kit.name == "paddle" else (counts <= 14).float())
        if self.fault == "exchanged":
            gates = (
                gates[:, [1, 0, 2, 3, 4, 5]]
                if kit.name == "torch"
                else f.index_select(gates, f.to_tensor([1, 0, 2, 3, 4, 5]), 1)
            )
        if self.one_by_one:
            total = x * 0.0
            for k in range(EXPERTS):
                rows = f.flip(f.nonzero(gates[:, k]).reshape([-1]), [0])
                gate = gates[:, k : k + 1]
                if kit.name == "torch":
                    total = total.index_add(0, rows, getattr(net, f"expert{k}")(x[rows]) * gate[rows])
                else:
                    part = getattr(net, f"expert{k}")(f.index_select(x, rows, 0)) * f.index_select(gate, rows, 0)
                    total = f.index_add(total, rows, 0, part)
        else:
            total = sum(getattr(net, f"expert{k}")(x) * gates[:, k : k + 1] for k in range(EXPERTS))
        shares = chosen[:, 0].mean(0) if self.fault == "counts first" else chosen.sum(1).mean(0)
        factor = 1 if self.fault == "no factor" else EXPERTS
        if self.fault == "masked":  # the last rows are padding
            mask = kit.tensor(np.arange(TOKENS) < 30)
            mask = (mask.astype("float32") if kit.name == "paddle" else mask.float()).unsqueeze(-1)
            mean = (base * mask).sum(0) / mask.sum()
            return net.last(total), ((chosen.sum(1) * mask).sum(0) / mask.sum() * mean).sum() * factor
        return net.last(total), (shares * base.mean(0)).sum() * factor

    def run(self, **options):
        optimizer = self.kit.sgd(self.model.parameters(), 0.01)
        with padiff.record(self.model, optimizer=optimizer, **options) as rec:
            for _ in range(2):
                output, auxiliary = self.model(self.kit.tensor(X))
                ((output**2).mean() + (0.1 if self.fault == "coefficient" else 0.01) * auxiliary).backward()
                optimizer.step()
                self.kit.zero(optimizer)
                rec.try_dump()
        return rec.run


@cache
def reference(kit, sigmoid):
    return Router(kit, sigmoid=sigmoid).run()


@cache
def compared(kit, fault, other=None, sigmoid=False):
    candidate = Router(other or kit, fault, one_by_one=True, sigmoid=sigmoid).run()
    return compare_runs(reference(kit, sigmoid), candidate)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_router_written_in_another_way_is_no_difference(kit, sigmoid):
    report = compared(kit, "", sigmoid=sigmoid)
    assert report.passed, str(report)


CAUSES = {
    "temperature": ("scale_added", "what `router` gives is not scaled by 0.7"),
    "noise": ("routing_noise", "adds noise of about 0.0"),
    "other function": ("activation", "uses a sigmoid for the reference's softmax"),
    "axis": ("routing_weights", "softmax over another axis"),
    "k": ("choice_count", "chooses 3 places of each row, the reference's 2"),
    "not divided": ("routing_weights", "are softmax of the chosen; the reference's are softmax of the chosen, divided"),
    "scaled": ("scale_added", "what div() in `(root)` gives is not scaled by 1.5"),
    "softmax of the chosen": ("softmax_added", "the second softmax() in `(root)` is left out"),
    "capacity": ("routing_capacity", "those beyond 14 rows for a place"),
    "exchanged": ("routing_places", "that choose places 0, 1 in topk() in the model: the two are exchanged"),
    "counts first": ("routing_auxiliary", "the shares of first choices"),
    "masked": ("routing_auxiliary", "the mean of softmax over 30 of 40 rows, times 6; the reference's is the shares"),
    "coefficient": ("loss_term_weight", "is 0.1 for the reference's 0.01"),
    "no factor": ("routing_auxiliary", "times the mean of softmax, times 6"),
}


@pytest.mark.parametrize("fault", CAUSES)
def test_a_fault_of_a_router_is_named(kit, fault):
    cause = compared(kit, fault).first_diff.cause
    kind, words = CAUSES[fault]
    assert cause.kind == kind and words in cause.sentence, str(cause)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no bias", "the reference adds a bias to the scores that it chooses by, the candidate does not"),
        ("bias in the weights", "sigmoid with the bias of the chosen"),
    ],
)
def test_a_bias_that_only_selects_is_told_from_one_in_the_weights(kit, fault, words):
    assert words in compared(kit, fault, sigmoid=True).first_diff.cause.sentence


def test_it_is_so_between_frameworks():
    assert compared(KITS["torch"], "", KITS["paddle"]).passed
    cause = compared(KITS["torch"], "not divided", KITS["paddle"]).first_diff.cause
    assert cause.kind == "routing_weights"


def test_weights_that_explain_each_row_are_proven(kit):
    assert compared(kit, "not divided").first_diff.cause.proven


def test_weights_that_explain_not_each_row_are_likely(kit):
    assert not compared(kit, "axis").first_diff.cause.proven


def test_a_hard_mask_is_no_dropout(kit):
    f = LIBRARY[kit.name]

    def run(seed):
        kit.seed(0)
        thresholds = np.random.default_rng(seed).normal(size=(TOKENS, 40)).astype(np.float32)

        def forward(net, x):
            h = net.first(x)
            kept = h > kit.tensor(thresholds)
            return net.last(h * (kept.astype("float32") if kit.name == "paddle" else kept.float()))

        model = kit.net(forward, first=kit.Linear(WIDTH, 40), last=kit.Linear(40, 2))
        random = np.random.default_rng(5)
        for layer in (model.first, model.last):
            kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32))
        optimizer = kit.sgd(model.parameters(), 0.01)
        with padiff.record(model, optimizer=optimizer) as rec:
            f.mean(model(kit.tensor(X)) ** 2).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
        return rec.run

    cause = compare_runs(run(0), run(1)).first_diff.cause
    assert cause.kind != "dropout", str(cause)


def keys(kit, flips=False, bag=False, swapped=False):
    """Record a memory of product keys: two choices make the scores of a third, whose places index a table."""
    f = LIBRARY[kit.name]
    kit.seed(0)
    parts = {"bag": kit.net(lambda net, ids, w: (net.table(ids) * w.unsqueeze(-1)).sum(1), table=kit.embedding(36, 8))}
    parts = parts if bag else {"bag": kit.net(lambda net, ids, w: net.table(ids), table=kit.embedding(36, 8))}
    moved = np.zeros((TOKENS, 6), np.float32)
    moved[[3, 17], :3] = 8.0 + 4e-6 * (not flips), 8.0 + 4e-6 * flips, 16.0
    first = np.zeros((TOKENS, 6), np.float32)
    first[[3, 17], 0] = 20.0

    def forward(net, x):
        h = net.first(x)
        (a, i), (b, j) = f.topk(h[:, :6] + kit.tensor(moved), 3, -1), f.topk(h[:, 6:] + kit.tensor(first), 3, -1)
        scores = (a.unsqueeze(2) + b.unsqueeze(1)).reshape([TOKENS, 9])
        ids = (i.unsqueeze(2) * 6 + j.unsqueeze(1)) if not swapped else (i.unsqueeze(2) + j.unsqueeze(1) * 6)
        w, best = f.topk(scores, 2, -1)
        ids = ids.reshape([TOKENS, 9])
        ids = ids.gather(1, best) if kit.name == "torch" else f.take_along_axis(ids, best, 1)
        w = f.nn.functional.softmax(w, -1)
        y = net.bag(ids, w)
        return net.last(y if bag else (y * w.unsqueeze(-1)).sum(1))

    model = kit.net(forward, first=kit.Linear(WIDTH, 12), last=kit.Linear(8, 3), **parts)
    random = np.random.default_rng(5)
    for layer in (model.first, model.bag.table, model.last):
        weight = random.normal(size=kit.weight(layer).shape).astype(np.float32)
        weight[1] = weight[0] if layer is model.first else weight[1]  # the first two scores nearly tie
        kit.set_weight(layer, weight)
    for layer in (model.first, model.last):
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(X)) ** 2).mean().backward()
    return rec.run


def test_choices_of_choices_leave_out_whole_rows(kit):
    reference = keys(kit)
    for candidate in (keys(kit, flips=True), keys(kit, flips=True, bag=True)):
        report = compare_runs(reference, candidate)
        assert report.passed and report.choices, str(report)
    assert not compare_runs(reference, keys(kit, flips=True, swapped=True)).passed


def noisy(kit, own_class, noise=0.0):
    """Record a router beside experts that get the same input without noise."""
    f = LIBRARY[kit.name]
    kit.seed(0)
    jitter = 1 + noise * np.random.default_rng(4).normal(size=(TOKENS, WIDTH)).astype(np.float32)

    router = kit.Linear(WIDTH, 4)
    if own_class:  # a class of the user's own may contain what the other side calls after it
        router.__class__ = type("Scorer", (type(router),), {})

    def forward(net, x):
        h = net.first(x)
        p = f.nn.functional.softmax(net.router(h * kit.tensor(jitter)), -1)
        parts = [net.a(h), net.b(h), net.c(h), net.d(h)]
        return net.last(sum(part * p[:, k : k + 1] for k, part in enumerate(parts)))

    experts = {name: kit.Linear(WIDTH, WIDTH) for name in "abcd"}
    model = kit.net(forward, first=kit.Linear(WIDTH, WIDTH), router=router, **experts, last=kit.Linear(WIDTH, 3))
    random = np.random.default_rng(5)
    for layer in (model.first, model.router, model.a, model.b, model.c, model.d, model.last):
        kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(X)) ** 2).mean().backward()
    return rec.run


def test_a_layer_beside_others_that_agree_ends_nowhere_else(kit):
    """The experts come later and agree, but they do not depend on the router."""
    reference = noisy(kit, False)
    assert compare_runs(reference, noisy(kit, True)).passed
    first = compare_runs(reference, noisy(kit, True, noise=0.1)).first_diff
    assert first.reference == "router", str(first)

"""Runs that choose otherwise: rows that flip by rounding are left out, and all else has to agree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS

import padiff
from padiff.align import align
from padiff.compare import compare_runs
from padiff.compare.choices import flips_of
from padiff.compare.judge.flipped_rows import split_rows, within_rounding
from padiff.records import Both

TOKENS, WIDTH, EXPERTS, CHOSEN = 64, 12, 6, 2
RNG = np.random.default_rng(11)
ROUTER = RNG.normal(size=(EXPERTS, WIDTH)).astype(np.float32)
ROUTER[1] = ROUTER[0]
X = RNG.normal(size=(4, TOKENS // 4, WIDTH)).astype(np.float32)
LIBRARY = {"torch": torch, "paddle": paddle}
AXIS = {"torch": "dim", "paddle": "axis"}
#: In these rows the candidate prefers the second of two experts that nearly tie.
FLIPPED = (3, 17)


def moved(first_leads):
    """What is added to the router's scores: in the rows `FLIPPED` expert 2 wins, and 0 and 1 nearly tie behind it."""
    scores = np.zeros((TOKENS, EXPERTS), np.float32)
    scores[list(FLIPPED), :3] = 6 + (1e-6 if first_leads else -1e-6), 6, 10
    return scores


class Program:
    """A mixture of experts between two linear layers; a fault is a change of one of its parts."""

    def __init__(self, kit, flips=False, dense=False, **faults):
        self.kit, self.flips, self.dense, self.faults = kit, flips, dense, faults
        kit.seed(0)
        experts = {f"expert{k}": kit.Linear(WIDTH, WIDTH) for k in range(EXPERTS)}
        self.model = kit.net(
            lambda net, x: self.forward(net, x),
            first=kit.Linear(WIDTH, WIDTH),
            router=kit.Linear(WIDTH, EXPERTS),
            **experts,
            last=kit.Linear(WIDTH, 5),
        )
        random = np.random.default_rng(5)
        for name in ("first", *experts, "last"):
            layer = getattr(self.model, name)
            kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32) * 0.3)
        for layer in (
            self.model.first,
            self.model.router,
            *(getattr(self.model, name) for name in experts),
            self.model.last,
        ):
            kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
        kit.set_weight(self.model.router, ROUTER)
        self.moved = kit.tensor(moved(not flips))

    def forward(self, net, x):
        f, faults = LIBRARY[self.kit.name], self.faults
        y = net.first(x).reshape([-1, WIDTH])
        scores = net.router(y) + self.moved
        if "scores" in faults:
            scores = scores + self.kit.tensor(faults["scores"])
        p = f.nn.functional.softmax(scores, -1)
        weights, places = f.topk(p, faults.get("k", CHOSEN), -1)
        weights = weights * faults.get("times", 1.0)
        chosen = f.nn.functional.one_hot(places, EXPERTS)
        chosen = chosen.astype("float32") if self.kit.name == "paddle" else chosen.float()
        gates = (chosen * weights.unsqueeze(-1)).sum(1)
        total = y
        for k in range(EXPERTS):
            expert = getattr(net, f"expert{k}")
            if self.dense:
                total = total + expert(y) * gates[:, k : k + 1]
            else:
                rows = f.nonzero(gates[:, k]).reshape([-1])
                part = expert(f.index_select(y, 0, rows) if self.kit.name == "torch" else f.index_select(y, rows, 0))
                part = part * (
                    f.index_select(gates[:, k : k + 1], 0, rows)
                    if self.kit.name == "torch"
                    else f.index_select(gates[:, k : k + 1], rows, 0)
                )
                total = (
                    total.index_add(0, rows, part) if self.kit.name == "torch" else f.index_add(total, rows, 0, part)
                )
        mixed = total.reshape([4, -1, WIDTH])
        mixed = mixed + mixed.mean(1).unsqueeze(1) * faults.get("mean", 1.0)
        return net.last(mixed) * faults.get("end", 1.0)

    def run(self, steps=3, **options):
        kit = self.kit
        optimizer = kit.sgd(self.model.parameters(), 0.01)
        with padiff.record(self.model, optimizer=optimizer, **options) as rec:
            for _ in range(steps):
                (self.model(kit.tensor(X)) ** 2).mean().backward()
                optimizer.step()
                kit.zero(optimizer)
                rec.try_dump()
        return rec.run


@cache
def reference_of(kit, detail):
    return Program(kit).run(detail=detail)


def compared(kit, other=None, dense=False, detail="full", **faults):
    candidate = Program(other or kit, flips=True, dense=dense, **faults).run(detail=detail)
    return compare_runs(reference_of(kit, detail), candidate)


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize("dense", [False, True])
def test_rows_that_flip_by_rounding_are_no_difference(kit, dense, detail):
    report = compared(kit, dense=dense, detail=detail)
    assert report.passed, str(report)
    first = report.choices[0]
    assert first.step == 0 and 1 <= first.flipped <= len(FLIPPED) and first.rows == TOKENS
    assert "choose otherwise" in report.text(120)


def test_so_are_they_between_frameworks():
    from kit.frameworks import KITS

    report = compared(KITS["torch"], KITS["paddle"])
    assert report.passed, str(report)
    assert report.choices


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize(
    "fault", [{"times": 1.1}, {"mean": 1.5}, {"end": 1.2}, {"k": 3}], ids=["weights", "mean", "end", "k"]
)
def test_a_fault_beside_flips_is_a_difference(kit, fault, detail):
    assert not compared(kit, detail=detail, **fault).passed


def test_a_small_fault_beside_flips_shows_in_the_other_rows(kit):
    report = compared(kit, times=1.001)
    assert not report.passed and report.first_diff.stage == "forward" and report.first_diff.step == 0


def test_another_number_of_places_is_named(kit):
    report = compared(kit, k=3)
    cause = report.first_diff.cause
    assert cause.kind == "choice_count" and "chooses 3 places of each row, the reference's 2" in str(cause)


def test_scores_that_move_further_than_rounding_excuse_nothing(kit):
    scores = np.zeros((TOKENS, EXPERTS), np.float32)
    scores[40, 2] = 3.0
    report = compared(kit, scores=scores)
    assert not report.passed and not any(each.step == 0 for each in report.choices)


def test_equal_scores_with_another_rule_for_ties_are_named(kit):
    f = LIBRARY[kit.name]
    scores = np.array(RNG.normal(size=(20, 5)), np.float32)
    scores[4, 1] = scores[4, 3] = 9.0

    def run(last):
        def forward(net, x):
            x = x * 1.0
            places = 4 - f.argmax(f.flip(x, [1]), 1) if last else f.argmax(x, 1)
            one = f.nn.functional.one_hot(places, 5)
            return net.last(one.astype("float32") if kit.name == "paddle" else one.float())

        kit.seed(0)
        model = kit.net(forward, last=kit.Linear(5, 5))
        kit.set_weight(model.last, np.arange(25).reshape(5, 5).astype(np.float32))
        with padiff.record(model) as rec:
            model(kit.tensor(scores)).sum().backward()
        return rec.run

    assert compare_runs(run(False), run(False)).passed
    assert not compare_runs(run(False), run(True)).passed


def test_a_router_that_returns_more_places_is_named_though_the_shapes_differ(kit):
    f = LIBRARY[kit.name]
    scores = RNG.normal(size=(12, 6)).astype(np.float32)

    def run(k):
        kit.seed(0)
        router = kit.net(lambda net, x: f.topk(net.score(x), k, -1), score=kit.Linear(6, 6))
        kit.set_weight(router.score, np.eye(6, dtype=np.float32))
        model = kit.net(lambda net, x: net.router(x)[0].sum(-1), router=router)
        with padiff.record(model) as rec:
            model(kit.tensor(scores)).sum().backward()
        return rec.run

    cause = compare_runs(run(2), run(3)).first_diff.cause
    assert cause.kind == "choice_count" and "chooses 3 places of each row, the reference's 2" in str(cause)


def test_what_is_not_judged_is_not_the_closest_to_its_limit(kit):
    report = compared(kit, detail="sketch")
    assert report.choices[0].unjudged
    assert "has to be 0" not in report.text(120)


@cache
def mined(kit, first_leads, largest=True, k=5, steps=1, **options):
    """Record a training on its hardest samples, of which two nearly tie in the first step."""
    kit.seed(0)
    f = LIBRARY[kit.name]
    model = kit.net(lambda net, x: net.a(x), a=kit.Linear(6, 1))
    kit.set_weight(model.a, np.ones((1, 6), np.float32))
    kit.set(model.a.bias, np.zeros(1, np.float32))
    optimizer = kit.sgd(model.parameters(), 0.01)
    x = np.random.default_rng(2).normal(size=(16, 6)).astype(np.float32)
    x[1] = x[0] + [1, -1, 0, 0, 0, 0]
    moved = np.zeros(16, np.float32)
    moved[:2] = (1e-4, 0.0) if first_leads else (0.0, 1e-4)
    moved[:2] += 60
    moved[2:6] = 80
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            outputs = model(kit.tensor(x)).reshape([-1])
            losses = (outputs - 3.0) ** 2 * 0.01 + kit.tensor(moved)
            values, _ = f.topk(losses, k, -1, largest)
            f.argmax(losses)
            values.mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


def test_choices_of_the_loop_are_followed_where_the_loss_is_made_of_them(kit):
    run = mined(kit, True, steps=3)
    for number in run.numbers():
        calls = [call for call in run.steps(number)[0].trace.calls if call.choice is not None]
        assert [(call.layer, call.function) for call in calls] == [("(loop)", "topk")]


def test_samples_that_nearly_tie_for_a_loss_are_no_difference(kit):
    report = compare_runs(mined(kit, True), mined(kit, False))
    assert report.passed, str(report)
    assert "the loop" in report.text(120)


@pytest.mark.parametrize("fault", [{"largest": False}, {"k": 7}], ids=str)
def test_other_samples_in_the_loss_are_a_difference(kit, fault):
    assert not compare_runs(mined(kit, True), mined(kit, True, **fault)).passed


def by_function(kit, choose, times=1.0):
    kit.seed(0)
    f = LIBRARY[kit.name]

    def forward(net, x):
        h = net.first(x)
        return net.last(h * times + choose(f, h) * 0.5)

    model = kit.net(forward, first=kit.Linear(WIDTH, 6), last=kit.Linear(6, 2))
    random = np.random.default_rng(5)
    for layer in (model.first, model.last):
        kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    optimizer = kit.sgd(model.parameters(), 0.01)
    with padiff.record(model, optimizer=optimizer) as rec:
        (model(kit.tensor(X)) ** 2).mean().backward()
        optimizer.step()
        kit.zero(optimizer)
        rec.try_dump()
    return rec.run


def test_another_function_that_chooses_is_named(kit):
    runs = by_function(kit, lambda f, h: f.round(h)), by_function(kit, lambda f, h: f.floor(h))
    assert "floor" in compare_runs(*runs).first_diff.cause.sentence


def test_another_function_that_chooses_the_same_is_no_cause(kit):
    def numbers(places):
        places = places.reshape([-1])
        return places.astype("float32") if kit.name == "paddle" else places.float()

    def best(f, h):
        return numbers(f.topk(h.detach(), 1, -1)[1])[:, None] * (h * 0 + 0.1)

    def first(f, h):
        return numbers(f.argmax(h.detach(), -1))[:, None] * (h * 0 + 0.1)

    def as_rows(run):
        return lambda f, h: run(f, h.reshape([-1, 6])).reshape(h.shape)

    runs = by_function(kit, as_rows(best)), by_function(kit, as_rows(first), times=1.01)
    cause = compare_runs(*runs).first_diff.cause
    assert cause is None or cause.kind != "choice_function", str(cause)


def test_masked_scores_have_no_noise(kit):
    """One side leaves groups out by minus infinity, the other by a large negative number."""
    f = LIBRARY[kit.name]
    left_out = np.zeros((TOKENS, EXPERTS), np.float32)
    left_out[:, 4:] = 1

    def masked(value):
        program = Program(kit, flips=value != -np.inf)
        route = program.moved

        def forward(net, x):
            h = net.first(x).reshape([-1, WIDTH])
            scores = net.router(h) + route
            mask = kit.tensor(left_out) > 0.5
            scores = scores.masked_fill(mask, value) if kit.name == "torch" else f.masked_fill(scores, mask, value)
            places = f.topk(scores, CHOSEN, -1)[1]
            one = f.nn.functional.one_hot(places, EXPERTS)
            one = one.astype("float32") if kit.name == "paddle" else one.float()
            return net.last(h * 1.0 + (one.sum(1) @ kit.tensor(ROUTER[::-1].copy())))

        program.forward = forward
        return program.run(steps=1)

    report = compare_runs(masked(-np.inf), masked(-1e4))
    assert report.passed and report.choices, str(report)


def test_thresholds_are_named_by_their_numbers(kit):
    def above(number, flipped=False):
        def mask(f, h):
            kept = ~(h <= number) if flipped and kit.name == "torch" else h > number
            return kept.astype("float32") if kit.name == "paddle" else kept.float()

        return mask

    assert compare_runs(by_function(kit, above(0.1)), by_function(kit, above(0.1, True))).passed
    cause = compare_runs(by_function(kit, above(0.1)), by_function(kit, above(0.4, True))).first_diff.cause
    if kit.name == "paddle":
        assert cause.proven and "the number is 0.4 for the reference's 0.1" in str(cause), str(cause)
    else:
        assert "le() in `the model` compares with 0.4, the reference's gt() with 0.1" in str(cause), str(cause)


@cache
def ranked(kit, by, k=2, largest=True, start=0):
    """Record a model that hands on the scores of its first places, found by topk or by sort."""
    kit.seed(0)
    f = LIBRARY[kit.name]

    def forward(net, x):
        h = net.first(x).reshape([-1, WIDTH])[:, :6]
        if by == "second":
            return net.last(f.topk(h, 2, -1)[0][..., 1].unsqueeze(-1))
        if by == "topk":
            return net.last(f.topk(h, k, -1, largest)[0].sum(-1).unsqueeze(-1))
        order = f.argsort(-h, -1) if by == "negated" else f.argsort(h, -1, descending=largest)
        order = order[:, start : start + k]
        best = h.gather(1, order) if kit.name == "torch" else f.take_along_axis(h, order, 1)
        return net.last(best.sum(-1).unsqueeze(-1))

    model = kit.net(forward, first=kit.Linear(WIDTH, WIDTH), last=kit.Linear(1, 2))
    random = np.random.default_rng(5)
    for layer in (model.first, model.last):
        kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(X)) ** 2).mean().backward()
    return rec.run


def test_a_ranking_of_all_places_is_the_choice_of_the_first_ones(kit):
    reference = ranked(kit, "topk")
    assert compare_runs(reference, ranked(kit, "sort")).passed
    cause = compare_runs(reference, ranked(kit, "sort", k=3)).first_diff.cause
    assert cause.kind == "choice_count" and "takes 3 places of each row of argsort()" in str(cause), str(cause)
    cause = compare_runs(reference, ranked(kit, "sort", largest=False)).first_diff.cause
    assert cause.kind == "choice_order" and "the least scores first" in str(cause), str(cause)


@cache
def with_scalars(kit, flips, over=1.0, count=1.0):
    """Record a router with two scalar outputs: one does not depend on what is chosen, one counts it."""
    program = Program(kit, flips=flips)
    f = LIBRARY[kit.name]

    def forward(net, x):
        h = net.first(x).reshape([-1, WIDTH])
        scores = net.router(h) + program.moved
        p = f.nn.functional.softmax(scores, -1)
        places = f.topk(p, CHOSEN, -1)[1]
        one = f.nn.functional.one_hot(places, EXPERTS)
        one = one.astype("float32") if kit.name == "paddle" else one.float()
        shares = one.sum(1).mean(0)
        return net.last(h * 1.0), (scores**2).mean() * over, (shares * p.mean(0)).sum() * count

    program.forward = forward
    optimizer = kit.sgd(program.model.parameters(), 0.01)
    with padiff.record(program.model, optimizer=optimizer) as rec:
        for _ in range(2):
            output, independent, counted = program.model(kit.tensor(X))
            ((output**2).mean() + independent + counted).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("fault", [{"over": 1.01}, {"count": 1.5}], ids=str)
def test_flips_excuse_no_scalar_that_they_do_not_reach_and_little_of_others(kit, fault):
    reference = with_scalars(kit, False)
    assert compare_runs(reference, with_scalars(kit, True)).passed
    first = compare_runs(reference, with_scalars(kit, True, **fault)).first_diff
    assert first is not None and (first.step, first.stage) == (0, "forward"), str(first)


@cache
def with_balance(kit, flips, count=1.0):
    """Record a mixture of experts; a small term that balances its load is kept beside, and added to the loss."""
    program = Program(kit, flips=flips, times=20.0)
    f, kept = LIBRARY[kit.name], []
    forward, label = program.forward, f.arange(TOKENS) % 5

    def with_term(net, x):
        p = f.nn.functional.softmax(net.router(net.first(x).reshape([-1, WIDTH])) + program.moved, -1)
        one = f.nn.functional.one_hot(f.argmax(p, -1), EXPERTS)
        one = one.astype("float32") if kit.name == "paddle" else one.float()
        kept[:] = [(one.mean(0) * p.mean(0)).sum() * (0.05 * count)]
        return forward(net, x)

    program.forward = with_term
    return trained(
        kit,
        program.model,
        lambda net: f.nn.functional.cross_entropy(net(kit.tensor(X)).reshape([-1, 5]), label) + kept[0],
        steps=1,
    )


def test_a_term_that_is_added_to_the_loss_shows_beside_flips(kit):
    """The loss of the function moves more than the fault moves the term."""
    reference = with_balance(kit, False)
    assert compare_runs(reference, with_balance(kit, True)).passed
    first = compare_runs(reference, with_balance(kit, True, count=0.5)).first_diff
    assert first is not None and (first.step, first.stage) == (0, "loss"), str(first)


@cache
def in_half_precision(flips, coefficient):
    """Record a router in bfloat16 whose loss adds a scalar in float32; where it flips, its scores are one unit apart.

    Only the gradient of the scalar is multiplied by the coefficient.
    """
    from kit.frameworks import KITS

    program = Program(KITS["torch"], flips=flips)
    scores = torch.zeros(TOKENS, EXPERTS)
    scores[list(FLIPPED), :3] = torch.tensor([6.0, 6.03125, 10.0] if flips else [6.03125, 6.0, 10.0])

    def forward(net, x):
        h = net.first(x).reshape([-1, WIDTH])
        p = (net.router(h * 0.01) + scores.to(h.dtype)).float().softmax(-1)
        one = torch.nn.functional.one_hot(p.topk(CHOSEN, -1)[1], EXPERTS).float()
        return net.last(h * 1.0), p, (one.sum(1).mean(0) * p.mean(0)).sum()

    program.forward = forward
    model = program.model.to(torch.bfloat16)
    with padiff.record(model) as rec:
        output, p, balance = model(torch.tensor(X).to(torch.bfloat16))
        balance = coefficient * balance + (1 - coefficient) * balance.detach()
        ((output.float() ** 2).mean() + (p**2).mean() + 0.001 * balance).backward()
        rec.try_dump()
    return rec.run


def test_scores_of_a_narrow_dtype_flip_within_its_rounding_though_the_gradient_is_wide():
    reference = in_half_precision(False, 1.0)
    report = compare_runs(reference, in_half_precision(True, 1.0))
    assert report.passed and report.choices, str(report)
    first = compare_runs(reference, in_half_precision(True, 1000.0)).first_diff
    assert first.stage == "backward" and not first.cause.kind.startswith("choice"), str(first)


@pytest.mark.parametrize("largest", [True, False])
def test_scores_farther_apart_than_the_sides_are_do_not_flip_by_rounding(largest):
    """Probabilities of a wide softmax are all alike: beside bfloat16's limits their differences are small."""

    class Pruned(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.key, self.middle = (torch.nn.Linear(16, 16) for _ in range(3))
            self.last, self.by = torch.nn.Linear(16, 4), by

        def forward(self, x):
            h = self.first(x).tanh()
            scores = (self.key(h).sum(-1) / 4).softmax(-1)
            places = self.by(scores).sort(-1)[0]
            kept = h.gather(1, places.unsqueeze(-1).expand(-1, -1, 16)) * scores.gather(1, places).unsqueeze(-1) * 10
            return self.last(self.middle(kept).relu().mean(1))

    def run(by):
        model = Pruned(by).bfloat16()
        x = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        with padiff.record(model, detail="sketch") as rec:
            model(x).pow(2).mean().backward()
        return rec.run

    reference = run(lambda scores: scores.topk(16, -1)[1])
    candidate = run(lambda scores: scores.argsort(-1, descending=largest)[:, :16])
    assert compare_runs(reference, candidate).passed == largest


def trained(kit, model, loss, steps=2, **options):
    """Record a training with plain gradient descent."""
    optimizer = kit.sgd(model.parameters(), 0.01)
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            loss(model).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


def filled(kit, model, *layers):
    """Give layers the same weights in each framework and each run."""
    random = np.random.default_rng(5)
    for layer in layers:
        kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32) * 0.5)
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    return model


def leads(first, shape, at, size=0.0):
    """What is added so that the first of two places leads, or the second, by less than rounding of their scores."""
    moved = np.zeros(shape, np.float32)
    moved[at[0]], moved[at[1]] = (size + 4e-6, size) if first else (size, size + 4e-6)
    return moved


@cache
def unpooled(kit, first=True, times=1.0, average=False):
    """Record a pooling with places, whose outputs an unpooling puts back; two elements of a window nearly tie."""
    f = LIBRARY[kit.name].nn.functional
    places = {"return_mask" if kit.name == "paddle" else "return_indices": True}
    moved = leads(first, (4, 1, 8, 8), ((0, 0, 2, 2), (0, 0, 3, 3)), 8.0)
    others, moved = kit.tensor((moved == 0).astype(np.float32)), kit.tensor(moved)

    def forward(net, x):
        h = net.first(x).reshape([4, 1, 8, 8])
        # The two elements hold one value each, whatever the weights are.
        values, at = f.max_pool2d(h * others + moved, 2, **places)
        if average:
            values = f.avg_pool2d(h, 2)
        spread = f.max_unpool2d(values * 1.0, at, 2)
        return net.last(spread.reshape([4, 8, 8]) * times)

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(8, 8), last=kit.Linear(8, 3))
    filled(kit, model, model.first, model.last)
    x = kit.tensor(np.random.default_rng(6).normal(size=(4, 8, 8)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_elements_of_a_window_that_nearly_tie_are_no_difference(kit):
    report = compare_runs(unpooled(kit), unpooled(kit, False))
    assert report.passed and report.choices[0].calls[0][0] == "max_pool2d", str(report)


@pytest.mark.parametrize("fault", [{"times": 1.01}, {"average": True}], ids=str)
def test_a_fault_behind_a_pooling_shows_beside_them(kit, fault):
    first = compare_runs(unpooled(kit), unpooled(kit, False, **fault)).first_diff
    assert first is not None and (first.step, first.stage) == (0, "forward"), str(first)


@cache
def largest_of_some(kit, first=True, times=1.0):
    """Record a model that takes the largest of four values, and not where it was."""
    f = LIBRARY[kit.name]
    moved = kit.tensor(leads(first, (16, 4, 6), ((3, 1, 2), (3, 2, 2)), 8.0))
    still = np.ones((16, 4, 6), np.float32)
    still[3, 1:3, 2] = 0
    still = kit.tensor(still)

    def forward(net, x):
        h = net.first(x).reshape([16, 4, 6])
        near = h - h.detach()  # zero, with the gradient of h
        return net.last(scaled(f.amax(h * still + near * (1 - still) + moved, 1)))

    def scaled(best):
        # A factor that has another gradient than value: outputs agree.
        return best * times + (best * (1 - times)).detach()

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(8, 24), last=kit.Linear(6, 3))
    filled(kit, model, model.first, model.last)
    x = kit.tensor(np.random.default_rng(6).normal(size=(16, 8)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_values_that_nearly_tie_send_their_gradient_elsewhere(kit):
    report = compare_runs(largest_of_some(kit), largest_of_some(kit, False))
    assert report.passed, str(report)
    first = compare_runs(largest_of_some(kit), largest_of_some(kit, False, times=1.2)).first_diff
    assert first is not None and first.stage == "backward", str(first)


@cache
def codebook(kit, first=True, decay=0.9, count=True, detail="full"):
    """Record a codebook that no optimizer updates: it follows the rows that choose its entries."""
    f = LIBRARY[kit.name]
    book = np.random.default_rng(7).normal(size=(8, 6)).astype(np.float32)
    book[1] = book[0]
    moved = kit.tensor(leads(first, (32, 8), ((slice(0, 3), 0), (slice(0, 3), 1)), 8.0))

    def forward(net, x):
        z, book = net.first(x), net.book
        scores = z @ (book.t() if kit.name == "torch" else book.transpose([1, 0])) * 0.1 + moved
        places = f.argmax(scores, 1)
        one = f.nn.functional.one_hot(places, 8)
        one = one.astype("float32") if kit.name == "paddle" else one.float()
        chosen = one @ book
        with f.no_grad():
            number = one.sum(0).unsqueeze(-1)
            total = (one.transpose([1, 0]) if kit.name == "paddle" else one.t()) @ z
            means = f.where(number > 0, total / number.clip(1.0 if count else 4.0), book)
            kit.set(net.book, kit.numpy(book * decay + means * (1 - decay)))
        return net.last(z + (chosen - z).detach())

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(6, 6), last=kit.Linear(6, 3))
    filled(kit, model, model.first, model.last)
    model.register_buffer("book", kit.tensor(book))
    x = kit.tensor(np.random.default_rng(6).normal(size=(32, 6)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=3, detail=detail)


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_a_codebook_follows_the_rows_that_chose_otherwise(kit, detail):
    reference = codebook(kit, detail=detail)
    report = compare_runs(reference, codebook(kit, False, detail=detail))
    assert report.passed and report.choices, str(report)
    for fault in ({"decay": 0.8}, {"count": False}):
        first = compare_runs(reference, codebook(kit, False, detail=detail, **fault)).first_diff
        assert first is not None and (first.step, first.stage, first.slot) == (1, "weight", "book"), str(first)


def queue(first=True, scale=1.0):
    """Record a queue whose nearest row is looked up, and which the outputs of a layer enter."""
    from kit.frameworks import KITS

    kit = KITS["torch"]
    moved = torch.tensor(leads(first, (8, 16), ((slice(0, 3), 0), (slice(0, 3), 1)), 8.0))

    def forward(net, x):
        z = net.first(x)
        nearest = net.queue[(z.detach() @ net.queue.t() * 0.1 + moved).argmax(1)].clone()
        with torch.no_grad():
            net.queue.copy_(torch.cat([z.detach() * scale, net.queue[:-8]]))
        return net.last(z) * nearest.sum(1, keepdim=True)

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(6, 6), last=kit.Linear(6, 3))
    filled(kit, model, model.first, model.last)
    rows = np.random.default_rng(7).normal(size=(16, 6)).astype(np.float32)
    rows[1] = rows[0]
    model.register_buffer("queue", torch.tensor(rows))
    x = torch.tensor(np.random.default_rng(6).normal(size=(8, 6)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=2, detail="sketch")


def test_a_buffer_whose_writes_no_choice_reaches_is_judged_as_always():
    reference = queue()
    assert compare_runs(reference, queue(False)).passed
    first = compare_runs(reference, queue(False, scale=1.2)).first_diff
    assert first is not None and (first.step, first.stage, first.slot) == (1, "weight", "queue"), str(first)


def averaged(kit, first=True, share=0.1):
    """Record a codebook that is made of averages of counts and sums, all of whose entries nearly tie with another."""
    f = LIBRARY[kit.name]
    rows = np.random.default_rng(7).normal(size=(4, 16)).astype(np.float32).repeat(2, 0)
    cells = [(slice(k, None, 8), k) for k in range(8)]
    moved = kit.tensor(leads(first, (32, 8), [cells[0], (cells[0][0], 1)], 8.0))

    def forward(net, x):
        z, book = net.first(x), net.book
        places = f.argmax(z @ (book.t() if kit.name == "torch" else book.transpose([1, 0])) * 0.1 + moved, 1)
        one = f.nn.functional.one_hot(places, 8)
        one = one.astype("float32") if kit.name == "paddle" else one.float()
        with f.no_grad():
            total = kit.numpy(one).T @ kit.numpy(z)
            counts = kit.numpy(net.counts) * (1 - share) + share * kit.numpy(one).sum(0)
            sums = kit.numpy(net.sums) * (1 - share) + share * total
            chosen = one @ book
            for buffer, values in ((net.counts, counts), (net.sums, sums), (net.book, sums / counts[:, None])):
                kit.set(buffer, values.astype(np.float32))
        return net.last(z + (chosen - z).detach())

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(6, 16), last=kit.Linear(16, 3))
    filled(kit, model, model.first, model.last)
    for name, values in (("book", rows), ("counts", np.ones(8, np.float32)), ("sums", rows)):
        model.register_buffer(name, kit.tensor(values))
    x = kit.tensor(np.random.default_rng(6).normal(size=(32, 6)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=3)


def test_the_share_of_an_average_shows_in_sums_whatever_is_chosen(kit):
    reference = averaged(kit)
    report = compare_runs(reference, averaged(kit, False))
    assert report.passed and report.choices, str(report)
    cause = compare_runs(reference, averaged(kit, False, share=0.02)).first_diff.cause
    assert cause.kind == "buffer_share" and "`sums` moves 0.2 times as far" in str(cause), str(cause)


def nearest(power, moved):
    """Record the nearest of entries, by a power of the distance."""
    from kit.frameworks import KITS

    kit = KITS["torch"]
    entries = torch.tensor(np.random.default_rng(3).normal(size=(8, 6)).astype(np.float32))
    places = lambda y: (torch.cdist(y, entries) ** power + moved).argmin(1)  # noqa: E731
    kit.seed(0)
    model = kit.net(
        lambda net, x: net.last(net.first(x) + entries[places(net.first.weight.sum() * 0 + x)]),
        first=kit.Linear(6, 6),
        last=kit.Linear(6, 3),
    )
    filled(kit, model, model.first, model.last)
    x = torch.tensor(np.random.default_rng(6).normal(size=(32, 6)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_few_entries_that_no_step_has_moved_do_not_tell_the_form_of_scores():
    preferred = torch.zeros(8)
    preferred[2] = -9.0
    runs = Both(nearest(1, torch.zeros(8)), nearest(2, preferred))
    alignment, infos = align(runs.reference.info, runs.candidate.info), runs.map(lambda run: run.info)
    steps = runs.map(lambda run: run.steps(0)[0])
    (flips,) = flips_of(steps, alignment, infos, {8: np.arange(8) != 3})
    assert flips.count and not flips.error.any()


def attention(kit, first=True, scale=1.0):
    """Record attention in which each query takes one key; two keys nearly tie for one query."""
    f = LIBRARY[kit.name]
    moved = kit.tensor(leads(first, (4, 12, 12), ((0, 3, 0), (0, 3, 1)), 8.0))

    def forward(net, x):
        keys = net.key(x)
        keys = keys.transpose(1, 2) if kit.name == "torch" else keys.transpose([0, 2, 1])
        scores = net.query(x) @ keys * 0.1 + moved
        places = f.topk(scores, 1, -1)[1]
        one = f.nn.functional.one_hot(places, 12)
        one = (one.astype("float32") if kit.name == "paddle" else one.float()).sum(-2)
        return net.last((f.nn.functional.softmax(scores * 0.1, -1) * one) @ net.value(x) * scale)

    kit.seed(0)
    layers = {name: kit.Linear(6, 6) for name in ("query", "key", "value")}
    model = kit.net(forward, **layers, last=kit.Linear(6, 3))
    filled(kit, model, *layers.values(), model.last)
    rows = np.random.default_rng(6).normal(size=(4, 12, 6)).astype(np.float32)
    rows[:, 1] = rows[:, 0]
    x = kit.tensor(rows)
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_gradients_of_keys_that_were_chosen_otherwise_are_left_out(kit):
    reference = attention(kit)
    report = compare_runs(reference, attention(kit, False))
    assert report.passed and report.choices, str(report)
    runs = Both(reference, attention(kit, False))
    alignment, infos = align(runs.reference.info, runs.candidate.info), runs.map(lambda run: run.info)
    (flips,) = flips_of(runs.map(lambda run: run.steps(0)[0]), alignment, infos)
    rows = Both(np.zeros((4, 12, 6)), np.zeros((4, 12, 6)))
    elements = Both(np.zeros((48, 12)), np.zeros((48, 12)))
    single = replace(flips, keys=None, tokens=None, picks=None, grid=(48, 12), rows=576, recorded=np.array([13]))
    single = replace(single, flipped=np.ones(1, np.bool_))
    for backward, expected in ((False, {13}), (True, {*range(12, 24)})):
        _, mask = split_rows(elements, [single], backward)
        assert {*np.flatnonzero(mask).tolist()} == expected
    for backward, expected in ((False, {3}), (True, {0, 1, 3})):
        _, mask = split_rows(rows, [flips], backward)
        assert {*np.flatnonzero(mask).tolist()} == expected


def cut(offset):
    """Record real numbers that are cut to whole ones, and these to integers."""
    from kit.frameworks import KITS

    kit = KITS["torch"]
    table = torch.tensor(np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32))
    kit.seed(0)
    model = kit.net(
        lambda net, x: net.last(net.first(x) + table[torch.floor(x[:, 0] + offset).long()]),
        first=kit.Linear(6, 6),
        last=kit.Linear(6, 3),
    )
    filled(kit, model, model.first, model.last)
    rows = np.random.default_rng(6).uniform(0.1, 3.9, size=(32, 6)).astype(np.float32)
    rows[:2, 0] = 2
    return trained(kit, model, lambda net: (net(torch.tensor(rows)) ** 2).mean(), steps=1)


def test_whole_numbers_are_no_choice_of_the_call_that_casts_them():
    report = compare_runs(cut(0.0), cut(-1e-6))
    assert report.passed and report.choices[0].flipped == 2, str(report)
    assert {function for function, _ in report.choices[0].calls} == {"floor"}


def drawn(temperature=1.0, offset=0.0):
    """Record places that are drawn from probabilities."""
    from kit.frameworks import KITS

    kit = KITS["torch"]
    table = torch.tensor(np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32))
    moved = torch.zeros(64, 5)
    moved[:, 0] = offset

    def forward(net, x):
        p = ((net.router(x) + moved) / temperature).softmax(-1)
        return net.last(x + table[torch.multinomial(p.detach(), 1)[:, 0]])

    kit.seed(0)
    model = kit.net(forward, router=kit.Linear(6, 5), last=kit.Linear(6, 3)).to(torch.bfloat16)
    x = torch.tensor(np.random.default_rng(6).normal(size=(64, 6)).astype(np.float32)).to(torch.bfloat16)
    table, moved = table.to(torch.bfloat16), moved.to(torch.bfloat16)
    torch.manual_seed(4)
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_draws_that_flip_by_rounding_are_told_from_draws_from_other_probabilities():
    reference = drawn()
    report = compare_runs(reference, drawn(offset=0.02))
    assert report.passed and report.choices and report.choices[0].flipped, str(report)
    assert {function for function, _ in report.choices[0].calls} == {"multinomial"}
    assert not compare_runs(reference, drawn(temperature=0.7)).passed


def test_the_part_of_a_ranking_that_the_code_takes_begins_where_the_other_sides_does(kit):
    reference = ranked(kit, "topk")
    cause = compare_runs(reference, ranked(kit, "sort", start=1)).first_diff.cause
    assert cause.kind == "choice_part" and "argsort() in `the model` from number 1 on" in str(cause), str(cause)
    cause = compare_runs(ranked(kit, "topk", k=1), ranked(kit, "second")).first_diff.cause
    assert cause.kind == "choice_part" and "topk() in `the model` from number 1 on" in str(cause), str(cause)


@cache
def best_of_each(kit, by, flips=False, times=1.0):
    """Record a table from which each row takes the entry of its best score, for three steps."""
    kit.seed(0)
    f, nearly = LIBRARY[kit.name], np.zeros((TOKENS, EXPERTS), np.float32)
    nearly[:, 0] = 1
    nearly[list(FLIPPED), :2] = 6 + (-1e-6 if flips else 1e-6), 6
    table, nearly = (kit.tensor(each) for each in (np.linspace(-1, 2, EXPERTS * WIDTH).reshape(EXPERTS, -1), nearly))
    table = table.astype("float32") if kit.name == "paddle" else table.float()

    def forward(net, x):
        y = net.first(x).reshape([-1, WIDTH])
        scores = net.router(y) + nearly
        best = f.argmax(scores, -1) if by == "argmax" else f.topk(scores, 2, -1)[1][:, 0]
        chosen = f.index_select(table, 0, best) if kit.name == "torch" else f.index_select(table, best, 0)
        return net.last(y + chosen) * times

    model = kit.net(
        forward, first=kit.Linear(WIDTH, WIDTH), router=kit.Linear(WIDTH, EXPERTS), last=kit.Linear(WIDTH, 3)
    )
    filled(kit, model, model.first, model.last)
    kit.set_weight(model.router, ROUTER * 0.1)
    kit.set(model.router.bias, np.zeros(EXPERTS, np.float32))
    return trained(kit, model, lambda net: (net(kit.tensor(X)) ** 2).mean(), steps=3)


def test_the_first_place_of_topk_is_the_choice_of_argmax_in_each_step(kit):
    reference = best_of_each(kit, "argmax")
    report = compare_runs(reference, best_of_each(kit, "topk", flips=True))
    assert report.passed, str(report)
    assert [(each.step, each.flipped) for each in report.choices][:2] == [(0, 2), (1, 2)]
    assert not compare_runs(reference, best_of_each(kit, "topk", flips=True, times=1.001)).passed


def test_topk_of_the_other_end_is_named(kit):
    cause = compare_runs(ranked(kit, "topk"), ranked(kit, "topk", largest=False)).first_diff.cause
    assert cause.kind == "choice_order" and "topk() in `the model` puts the least scores first" in str(cause), str(
        cause
    )


def test_the_other_side_of_a_threshold_is_no_rule_for_ties(kit):
    """Elements that are equal to the threshold flip, and so does all else: a tie explains the least of it."""

    def above(f, h, other=False):
        wide = f.concat([h] * 60, -1) if kit.name == "paddle" else f.cat([h] * 60, -1)
        middle = wide.sort(-1) if kit.name == "paddle" else wide.sort(-1).values
        middle = (middle[0] if isinstance(middle, tuple) else middle)[..., 100:101]
        kept = wide < middle if other else wide > middle
        return (wide * (kept.astype("float32") if kit.name == "paddle" else kept.float()))[..., :6]

    reference = by_function(kit, above)
    cause = compare_runs(reference, by_function(kit, lambda f, h: above(f, h, True))).first_diff.cause
    assert cause is None or cause.kind != "choice_ties", str(cause)


def test_a_comparison_that_is_negated_is_no_other_function(kit):
    def above(f, h, negated=False, times=1.0):
        kept = ~(h < 0.3) if negated else h >= 0.3
        return h * (kept.astype("float32") if kit.name == "paddle" else kept.float()) * times

    runs = by_function(kit, above), by_function(kit, lambda f, h: above(f, h, True, 1.5))
    cause = compare_runs(*runs).first_diff.cause
    assert cause is None or cause.kind != "choice_function", str(cause)


def test_one_rank_and_the_first_ones_are_not_one_choice(kit):
    """The least of the taken scores is a threshold for one side; the other side ranks."""

    def by_rank(f, h):
        kept = h >= f.kthvalue(h, 5, -1, True)[0]
        return h * (kept.astype("float32") if kit.name == "paddle" else kept.float())

    def by_topk(f, h):
        values, places = f.topk(h, 2, -1)
        zeros = h * 0
        return zeros.scatter(2, places, values) if kit.name == "torch" else f.put_along_axis(zeros, places, values, 2)

    report = compare_runs(by_function(kit, by_topk), by_function(kit, by_rank))
    assert report.passed, str(report)
    cause = compare_runs(by_function(kit, by_topk), by_function(kit, by_rank, times=1.01)).first_diff.cause
    assert cause is None or not cause.kind.startswith("choice"), str(cause)


def test_another_number_to_compare_with_is_no_rounding(kit):
    def above(number):
        return by_function(
            kit, lambda f, h: (h > number).astype("float32") if kit.name == "paddle" else (h > number).float()
        )

    def flips(number):
        runs = Both(above(0.1), above(number))
        steps = runs.map(lambda run: run.steps(0)[0])
        infos = runs.map(lambda run: run.info)
        return flips_of(steps, align(*infos), infos)

    assert flips(0.1) == []
    (found,) = flips(0.102)
    assert found.shift == pytest.approx(0.002) and not within_rounding(found, 0.1, [])
    assert all(within_rounding(each, 2e-5, []) for each in flips(0.1 + 1e-8))


def quantised(form, weight=False):
    """Record a quantiser of values halfway between two steps, or of a weight beside them, by a function or by hand."""
    from kit.frameworks import KITS

    kit = KITS["torch"]
    halves = (np.arange(64, dtype=np.float32).reshape(8, 8) - 31.5) * np.float32(0.04)

    def quantise(x):
        if form == "function":
            return torch.fake_quantize_per_tensor_affine(x, 0.04, 0, -128, 127)
        v = (x / 0.04).clamp(-128, 127)
        return (v + ((v.floor() if form == "floor" else v.round()) - v).detach()) * 0.04

    def forward(net, x):
        y = quantise(net.first(x) * 0 + x)
        return torch.nn.functional.linear(y, quantise(net.last.weight) if weight else net.last.weight)

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(8, 8), last=kit.Linear(8, 3))
    filled(kit, model, model.first, model.last)
    return trained(kit, model, lambda net: (net(torch.tensor(halves)) ** 2).mean(), steps=1)


@pytest.mark.parametrize("weight", [False, True])
def test_a_quantiser_multiplies_where_other_code_divides(weight):
    reference = quantised("function", weight)
    report = compare_runs(reference, quantised("round", weight))
    assert report.passed and report.choices, str(report)
    assert not compare_runs(reference, quantised("floor", weight)).passed


def parameter_cut(value):
    """Record a parameter that is compared with a number."""
    from kit.frameworks import KITS

    kit = KITS["torch"]
    kit.seed(0)
    model = kit.net(lambda net, x: net.first(x) @ (net.first.weight > value).float().t(), first=kit.Linear(6, 6))
    filled(kit, model, model.first)
    x = torch.tensor(np.random.default_rng(6).normal(size=(8, 6)).astype(np.float32))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_a_parameter_that_is_compared_with_another_number_is_named():
    cause = compare_runs(parameter_cut(0.1), parameter_cut(0.3)).first_diff.cause
    assert "0.3" in str(cause) and "0.1" in str(cause), str(cause)


@cache
def winners(kit, by, k=5, moved=0.0, ties=0):
    """Record a model that keeps the `k` largest values of each row, found by topk or by a comparison with a rank.

    Args:
        moved: added to one of two places of row 3 that nearly tie at the last place.
        ties: number of rows in which three places share the last score.
    """
    kit.seed(0)
    f = LIBRARY[kit.name]
    order = np.argsort(np.random.default_rng(8).normal(size=(24, 12)), 1)
    scores = np.zeros((24, 12), np.float32)
    np.put_along_axis(scores, order, np.linspace(1.2, -1.1, 12, dtype=np.float32)[None], axis=1)
    scores[3, order[3, 5]] = scores[3, order[3, 4]] + np.float32(1e-7 - moved)
    for row in range(8, 8 + ties):
        scores[row, order[row, [5, 6]]] = scores[row, order[row, 4]]

    def forward(net, x):
        h = net.first(x)
        if by == "topk":
            places = f.topk(h, k, -1)[1]
            one = f.nn.functional.one_hot(places, 12).sum(1)
            mask = one.astype("float32") if kit.name == "paddle" else one.float()
        elif by == "kthvalue":
            mask = h >= f.kthvalue(h, 12 - k + 1, -1, keepdim=True)[0]
        elif by == "ranks":
            mask = f.argsort(f.argsort(h, -1, descending=True), -1) < k
        elif by == "ranks from the end":
            mask = f.argsort(f.argsort(h, -1), -1) >= 12 - k
        else:
            ranked = f.sort(h, -1) if kit.name == "paddle" else f.sort(h, -1)[0]
            mask = ~(h < ranked[:, -k].unsqueeze(-1))
        return net.last(h * (mask.astype("float32") if kit.name == "paddle" else mask.float()))

    model = kit.net(forward, first=kit.Linear(12, 12), last=kit.Linear(12, 2))
    kit.set_weight(model.first, np.eye(12, dtype=np.float32))
    kit.set_weight(model.last, np.random.default_rng(9).normal(size=(2, 12)).astype(np.float32))
    for layer in (model.first, model.last):
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(scores)) ** 2).mean().backward()
    return rec.run


@pytest.mark.parametrize("by", ["kthvalue", "sort", "ranks", "ranks from the end"])
def test_a_mask_of_scores_at_least_that_of_a_rank_is_the_choice_of_the_first_ones(kit, by):
    report = compare_runs(winners(kit, "topk"), winners(kit, by, moved=2e-7))
    assert report.passed and report.choices[0].flipped == 1, report.text(120)
    cause = compare_runs(winners(kit, "topk"), winners(kit, by, k=4)).first_diff.cause
    assert cause.kind == "choice_count" and "the code takes 4 places of each row" in str(cause)


@pytest.mark.parametrize("by", ["ranks", "ranks from the end"])
def test_ranks_flip_only_where_the_code_compares_them(kit, by):
    assert not compare_runs(winners(kit, "ranks", k=7), winners(kit, by, k=7, moved=2e-7)).choices
    report = compare_runs(winners(kit, "ranks"), winners(kit, by, moved=2e-7))
    assert report.passed and report.choices[0].flipped == 1, report.text(120)


def test_a_mask_takes_all_places_that_share_the_score_of_a_rank(kit):
    report = compare_runs(winners(kit, "topk", ties=4), winners(kit, "kthvalue", ties=4))
    assert report.passed and report.choices[0].tied == 4
    assert "4 of these rows choose otherwise between scores that are equal to the bit: of these the candidate" in (
        " ".join(report.text(120).split())
    )
    cause = compare_runs(winners(kit, "topk", ties=14), winners(kit, "kthvalue", ties=14)).first_diff.cause
    assert cause.kind == "choice_ties" and "of these the candidate takes all" in str(cause)
    assert all(line is not None for line in cause.lines)


@cache
def with_codebook(kit, attached=False, near=0.0):
    """Record a codebook whose entries follow the rows that chose them.

    Args:
        attached: True if the commitment term moves the entries, too.
        near: added to an entry that is nearly as close to a row as another one.
    """
    kit.seed(0)
    f = LIBRARY[kit.name]
    random = np.random.default_rng(4)
    book = random.normal(size=(10, 6)).astype(np.float32)
    book[1] = book[0] * (1 + np.float32(1e-7))

    def forward(net, x):
        h = net.first(x)
        entries = net.book.weight if kit.name == "torch" else net.book.weight.t()
        distance = ((h.unsqueeze(1) - entries.unsqueeze(0)) ** 2).sum(-1)
        shift = np.zeros((1, 10), np.float32)
        shift[0, 0] = near
        places = f.argmin(distance + kit.tensor(shift), -1)
        chosen = entries[places]
        commitment = ((h - (chosen if attached else chosen.detach())) ** 2).mean()
        return net.last(h + (chosen - h).detach()), ((chosen - h.detach()) ** 2).mean() + 0.25 * commitment

    model = kit.net(forward, first=kit.Linear(6, 6), book=kit.Linear(6, 10), last=kit.Linear(6, 2))
    kit.set_weight(model.first, np.eye(6, dtype=np.float32))
    kit.set_weight(model.book, book)
    kit.set_weight(model.last, random.normal(size=(2, 6)).astype(np.float32))
    for layer in (model.first, model.last):
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    x = np.concatenate([book, book + 0.3 * random.normal(size=(10, 6)).astype(np.float32)])
    with padiff.record(model) as rec:
        output, loss = model(kit.tensor(x))
        (output.mean() + loss).backward()
    return rec.run


def test_entries_that_no_flipped_row_chose_have_gradients_that_differ_by_no_factor(kit):
    report = compare_runs(with_codebook(kit), with_codebook(kit, near=2e-6))
    assert report.passed and report.choices[0].flipped, report.text(120)
    report = compare_runs(with_codebook(kit), with_codebook(kit, attached=True, near=2e-6))
    assert not report.passed and report.first_diff.diff.pair.stage == "grad", report.text(120)


def between(kit, forward, x, **weights):
    """Record code between a layer that hands its input on and a linear layer.

    Args:
        forward: called with the net, the framework and the first layer's output; gives what the last layer gets.
        x: the input.
        weights: matrices, (out, in), of further linear layers without biases.
    """
    f = LIBRARY[kit.name]
    width = x.shape[-1]
    layers = {"first": np.eye(width), **weights, "last": np.random.default_rng(9).normal(size=(2, width))}
    built = {name: kit.Linear(matrix.shape[1], matrix.shape[0]) for name, matrix in layers.items()}
    model = kit.net(lambda net, value: net.last(forward(net, f, net.first(value))), **built)
    for name, matrix in layers.items():
        kit.set_weight(getattr(model, name), matrix.astype(np.float32))
        kit.set(getattr(model, name).bias, np.zeros(len(matrix), np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(x.astype(np.float32))) ** 2).mean().backward()
    return rec.run


def added(kit, total, places, values):
    f = LIBRARY[kit.name]
    return total.index_add(0, places, values) if kit.name == "torch" else f.index_add(total, places, 0, values)


@cache
def choosers(kit, apart=False, capacity=5, times=1.0):
    """Record experts that choose tokens, two of which nearly tie; `apart`: in a call of each expert, not in one."""
    random = np.random.default_rng(4)
    x, router = random.normal(size=(12, 6)), random.normal(size=(4, 6))
    x[1] = x[0] + (2e-7 if apart else -2e-7) * random.normal(size=6)

    def forward(net, f, y):
        p = f.nn.functional.softmax(net.router(y), -1)
        pairs = [f.topk(p[:, k], capacity, -1) for k in range(4)] if apart else list(zip(*f.topk(p.t(), capacity, -1)))
        total = y
        for k, (weights, places) in enumerate(pairs):
            total = added(kit, total, places, f.tanh(y[places] * (k + 1)) * weights.unsqueeze(-1) * times)
        return total

    return between(kit, forward, x, router=router)


@pytest.mark.parametrize("apart", [True, False])
def test_calls_for_a_row_each_are_one_call_for_all_rows(kit, apart):
    report = compare_runs(choosers(kit, not apart), choosers(kit, apart))
    assert report.passed and 0 < report.choices[0].flipped <= report.choices[0].rows == 4, str(report)
    assert not compare_runs(choosers(kit, not apart), choosers(kit, apart, times=1.01)).passed
    cause = compare_runs(choosers(kit, not apart), choosers(kit, apart, capacity=4)).first_diff.cause
    assert cause.kind == "choice_count" and "topk() in `the model` chooses 4 places of each row" in str(cause)


@cache
def clusters(kit, moved=0.0, share=0.5):
    """Record rows that choose the nearest of some centers, which are moved to their means, and choose again."""
    random = np.random.default_rng(6)
    centers = random.normal(size=(6, 8)) * 2
    x = centers[np.arange(40) % 6] + random.normal(size=(40, 8)) * 0.3
    x[0] = (centers[0] + centers[1]) / 2 + moved * (centers[0] - centers[1])

    def forward(net, f, y):
        means = kit.tensor(centers.astype(np.float32))
        for _ in range(2):
            apart = ((y.unsqueeze(1) - means.unsqueeze(0)) ** 2).sum(-1)
            one = f.nn.functional.one_hot(f.argmin(apart, -1), 6)
            one = one.astype("float32") if kit.name == "paddle" else one.float()
            means = means * (1 - share) + share * (one.t() @ y) / one.sum(0).unsqueeze(-1)
        return y + one @ means

    return between(kit, forward, x)


def test_means_of_the_rows_that_chose_otherwise_are_others_when_the_code_chooses_again(kit):
    report = compare_runs(clusters(kit, 1e-7), clusters(kit, -1e-7))
    assert report.passed and report.choices[0].flipped >= 1, str(report)
    assert not compare_runs(clusters(kit, 1e-7), clusters(kit, -1e-7, share=0.6)).passed


def test_the_best_value_beside_its_place_sends_its_gradient_to_any_that_share_it():
    """paddle's `max` shares the gradient among equal values, torch's gives all of it to the place that it returns."""
    x = np.random.default_rng(7).normal(size=(16, 5))
    x[3:9, :2] = 9.0
    weights = (np.arange(5)[:, None] / 5).astype(np.float32)

    def run(kit, times=1.0):
        def forward(net, f, y):
            best, place = y.max(-1) if kit.name == "torch" else (y.max(-1), f.argmax(y, -1))
            return y * 0.1 + (best * times).unsqueeze(-1) * kit.tensor(weights)[place]

        return between(kit, forward, x)

    reference = run(KITS["torch"])
    report = compare_runs(reference, run(KITS["paddle"]))
    assert report.passed and report.choices[0].flipped == 6, str(report)
    assert not compare_runs(reference, run(KITS["paddle"], times=1.001)).passed


def test_the_sign_of_a_value_is_a_comparison_with_zero(kit):
    x = np.random.default_rng(8).normal(size=(16, 6))

    def run(by_sign=False, least=0.0, times=1.0):
        def forward(net, f, y):
            if by_sign:
                return f.sign(y) * y.abs().mean(0)
            return f.where(y >= least, f.ones_like(y), -f.ones_like(y)) * y.abs().mean(0) * times

        return between(kit, forward, x)

    assert compare_runs(run(by_sign=True), run()).passed
    cause = compare_runs(run(by_sign=True), run(least=0.3)).first_diff.cause
    assert "ge() in `the model` compares with 0.3, the reference's sign() with 0" in str(cause), str(cause)
    cause = compare_runs(run(by_sign=True), run(times=1.5)).first_diff.cause
    assert cause is None or not cause.kind.startswith("choice"), str(cause)


def test_scores_that_are_ranked_along_another_axis_are_named(kit):
    x = np.random.default_rng(9).normal(size=(12, 6))

    def run(axis):
        def forward(net, f, y):
            mask = y >= f.topk(y, 3, axis)[0].min(axis, keepdim=True)[0 if kit.name == "torch" else slice(None)]
            return y * (mask.astype("float32") if kit.name == "paddle" else mask.float())

        return between(kit, forward, x)

    cause = compare_runs(run(-1), run(0)).first_diff.cause
    assert cause.kind == "choice_axis" and cause.fix == "axis 1", str(cause)
    assert "topk() in `the model` chooses along axis 0 of the scores, the reference's topk() along axis 1" in str(cause)


def test_equal_scores_in_most_rows_are_no_difference_of_functions_without_a_rule():
    torch_kit, paddle_kit = KITS["torch"], KITS["paddle"]
    x = np.random.default_rng(10).integers(-3, 4, size=(60, 16)) / 2.0
    x[:6] += np.arange(16) / 64.0

    def run(kit, chosen=5, times=1.0):
        def forward(net, f, y):
            if kit.name == "torch":
                places = y.argsort(dim=-1, descending=True, stable=True)[:, :chosen]
            else:
                places = f.topk(y, chosen, -1)[1]
            one = f.nn.functional.one_hot(places, 16).sum(1)
            return y * times * (one.astype("float32") if kit.name == "paddle" else one.float())

        return between(kit, forward, x)

    reference = run(torch_kit)
    report = compare_runs(reference, run(paddle_kit))
    assert report.passed and report.choices[0].tied > 30, str(report)
    assert f"{report.choices[0].tied} of these rows choose otherwise between scores that are equal to the bit" in (
        " ".join(report.text(120).split())
    )
    assert not compare_runs(reference, run(paddle_kit, times=1.001)).passed
    assert compare_runs(reference, run(paddle_kit, chosen=4)).first_diff.cause.kind == "choice_count"


def test_rows_of_chosen_tokens_are_found_in_all_tokens(kit):
    """One side computes a layer for the tokens that it chose, the other for all; a fault after it is placed there."""
    x = np.random.default_rng(11).normal(size=(3, 8, 6))
    up = np.random.default_rng(12).normal(size=(6, 6))

    def run(sparse=False, weighted=True):
        def forward(net, f, y):
            scores = y.sum(-1)
            weights, places = f.topk(scores, 4, -1)
            one = f.nn.functional.one_hot(places, 8)
            one = one.astype("float32") if kit.name == "paddle" else one.float()
            part = net.up(one @ y if sparse else y)
            if weighted:
                part = part * (weights if sparse else scores).unsqueeze(-1)
            if sparse:
                return y + one.mT @ part
            return y + part * one.sum(1).unsqueeze(-1)

        return between(kit, forward, x, up=up)

    assert compare_runs(run(sparse=True), run()).passed
    first = compare_runs(run(sparse=True), run(weighted=False)).first_diff
    assert first.diff.pair.anchor.layer != "up" and "shapes differ" not in str(first), str(first)


def test_other_places_to_choose_from_are_named(kit):
    x = np.random.default_rng(13).normal(size=(16, 6))

    def run(both=True):
        def forward(net, f, y):
            scores = (f.cat if kit.name == "torch" else f.concat)([y, -y], -1) if both else y
            return y + kit.tensor(np.arange(12, dtype=np.float32)[:, None])[f.argmax(scores, -1)]

        return between(kit, forward, x)

    cause = compare_runs(run(), run(both=False)).first_diff.cause
    assert cause.kind == "choice_among" and "among 6 places of each row for the reference's 12" in str(cause)


def test_a_mask_that_leaves_nothing_out_is_named_by_the_number_of_its_places(kit):
    """Of places whose scores are 0 none counts: to leave the candidate's mask out gives the reference's values."""
    x = np.random.default_rng(14).normal(size=(16, 12)) - 0.4

    def run(by_mask=False, chosen=10):
        def forward(net, f, y):
            y = f.nn.functional.relu(y)
            if by_mask:
                mask = y >= f.kthvalue(y, 12 - chosen + 1, -1, keepdim=True)[0]
                return y * (mask.astype("float32") if kit.name == "paddle" else mask.float())
            one = f.nn.functional.one_hot(f.topk(y, chosen, -1)[1], 12).sum(1)
            return y * (one.astype("float32") if kit.name == "paddle" else one.float())

        return between(kit, forward, x)

    assert compare_runs(run(), run(by_mask=True)).passed
    cause = compare_runs(run(), run(by_mask=True, chosen=2)).first_diff.cause
    assert cause.kind == "choice_count" and "the code takes 2 places of each row" in str(cause), str(cause)


def weights_quantised(kit, library, by, flips=False, at=3.0, passes_all=False, largest=3.0):
    """Record a linear layer whose weights are rounded to whole numbers, straight through.

    Some weights lie at a bound, or halfway between two numbers, up to a unit in the last place: beyond it if ``flips``.
    Others lie far beyond the bounds.
    """
    values = np.random.default_rng(8).uniform(-2.4, 2.4, (9, 9)).astype(np.float32)
    to = np.float32(np.inf if flips else -np.inf)
    values[0, :4] = np.nextafter(np.float32(at), to)
    values[2:4, 5] = 7, -8
    x = kit.tensor(np.random.default_rng(6).normal(size=(8, 4, 9)).astype(np.float32))

    def forward(net, x):
        w = net.first.weight if library is torch else net.first.weight.t()
        if by == "function":
            w = torch.fake_quantize_per_tensor_affine(w, 1.0, 0, -8, int(largest))
        else:
            inside = library.clip(w, -8.0, largest)
            passed = w if passes_all else inside
            w = passed + (inside.round() - passed).detach()
        return library.matmul(x, w.t())

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(9, 9))
    filled(kit, model, model.first)
    kit.set_weight(model.first, values)
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


def test_rounded_weights_of_the_other_layout_are_the_same_elements():
    kits = KITS["torch"], KITS["paddle"]
    report = compare_runs(
        weights_quantised(kits[0], torch, "hand", at=1.5), weights_quantised(kits[1], paddle, "hand", True, at=1.5)
    )
    assert report.passed and "round() of (root): 4 of 81 rows" in str(report), str(report)


@pytest.mark.parametrize("by", ["hand", "function"])
def test_elements_at_a_bound_pass_on_a_gradient_or_not(kit, by):
    library = LIBRARY[kit.name]
    reference = weights_quantised(KITS["torch"], torch, by)
    report = compare_runs(reference, weights_quantised(kit, library, "hand", flips=True))
    assert report.passed and report.choices, str(report)


@pytest.mark.parametrize("by", ["hand", "function"])
def test_elements_beyond_a_bound_pass_on_no_gradient(kit, by):
    library = LIBRARY[kit.name]
    reference = weights_quantised(KITS["torch"], torch, by)
    report = compare_runs(reference, weights_quantised(kit, library, "hand", flips=True, passes_all=True))
    assert not report.passed and "grad: first" in str(report), str(report)


@pytest.mark.parametrize("by", ["hand", "function"])
def test_another_bound_is_named(kit, by):
    library = LIBRARY[kit.name]
    reference = weights_quantised(KITS["torch"], torch, by)
    cause = compare_runs(reference, weights_quantised(kit, library, "hand", True, largest=2.0)).first_diff.cause
    assert "2" in str(cause) and "3" in str(cause), str(cause)


def test_the_largest_scores_are_the_least_of_their_negatives(kit):
    """Other code behind a ranking of negated scores is not taken for a ranking from the other end."""
    reference = ranked(kit, "topk")
    assert compare_runs(reference, ranked(kit, "negated")).passed
    cause = compare_runs(reference, ranked(kit, "negated", k=3)).first_diff.cause
    assert cause.kind == "choice_count", str(cause)


def largest_weights(kit, by, flips=False, k=200, passes_all=True):
    """Record a linear layer of which the largest weights count, straight through; two of them nearly tie at the end."""
    f = LIBRARY[kit.name]
    values = np.random.default_rng(8).permutation(400).astype(np.float32) / 400 + 0.1
    values *= np.random.default_rng(9).choice([-1, 1], 400)
    last, first = np.argsort(-np.abs(values))[199:201]
    values[first] = np.nextafter(values[last], np.sign(values[last]) * np.float32(2 if flips else 0))
    x = kit.tensor(np.random.default_rng(6).normal(size=(8, 4, 20)).astype(np.float32))

    def forward(net, x):
        w = net.first.weight
        size = w.detach().abs()
        if by == "topk":
            chosen = f.nn.functional.one_hot(f.topk(size.reshape([-1]), k, -1)[1], 400).sum(0).reshape([20, 20])
            mask = chosen.astype("float32") if kit.name == "paddle" else chosen.float()
        else:
            ranks = f.sort(size.reshape([-1]), -1, True)
            mask = size >= (ranks if kit.name == "paddle" else ranks[0])[k - 1]
            mask = mask.astype("float32") if kit.name == "paddle" else mask.float()
        return f.matmul(x, w + (w * mask - w).detach() if passes_all else w * mask)

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(20, 20))
    filled(kit, model, model.first)
    kit.set_weight(model.first, values.reshape(20, 20))
    return trained(kit, model, lambda net: (net(x) ** 2).mean(), steps=1)


@pytest.mark.parametrize("by", ["topk", "sort"])
def test_gradients_of_elements_that_are_chosen_are_judged_without_those_chosen_otherwise(kit, by):
    reference = largest_weights(kit, "topk")
    assert compare_runs(reference, largest_weights(kit, by, flips=True)).passed
    report = compare_runs(reference, largest_weights(kit, by, flips=True, passes_all=False))
    assert not report.passed and report.first_diff.stage == "grad", str(report)
    report = compare_runs(reference, largest_weights(kit, by, flips=True, k=150))
    assert report.first_diff.cause.kind == "choice_count" and "150" in str(report.first_diff.cause), str(report)


@cache
def held(kit, by, rank=12, flips=False):
    """Record tokens whose features are held to the one at a rank of all tokens, with which another one nearly ties."""
    x = np.random.default_rng(15).normal(size=(16, 6))
    order, columns = np.argsort(x, 0), np.arange(6)
    x[order[13], columns] = x[order[12], columns]
    leading = np.zeros((16, 6), np.float32)
    leading[order[13 if flips else 12], columns] = 4e-6

    def forward(net, f, y):
        y = y + kit.tensor(leading)
        if by == "kthvalue":
            return f.minimum(y, f.kthvalue(y, rank + 1, 0, keepdim=True)[0])
        ranks = f.sort(y, 0) if kit.name == "paddle" else f.sort(y, 0)[0]
        return f.where(y > ranks[rank], ranks[rank].expand_as(y), y)

    return between(kit, forward, x)


def test_a_value_at_a_rank_is_one_choice_whether_or_not_the_code_compares_with_it(kit):
    reference = held(kit, "kthvalue")
    report = compare_runs(reference, held(kit, "sort", flips=True))
    assert report.passed and report.choices, str(report)
    report = compare_runs(reference, held(kit, "sort", rank=10))
    cause = report.first_diff.cause
    assert cause.kind == "choice_part" and "that of rank 12" in cause.sentence and "rank 10" in cause.sentence, report


@cache
def ranks_of_losses(by, q=0.75, flips=False):
    """Record a term made of the errors of two tokens, at a quantile and at the median; two tokens nearly tie there."""
    kit = KITS["torch"]
    values = np.arange(1, 42, dtype=np.float32)
    for place in (20, 30):
        values[place + 1] = values[place] * (1 - 2e-7 if flips else 1 + 2e-7)
    rows = np.eye(41, dtype=np.float32) * values[:, None]

    def forward(net, x):
        errors = net.first(x).abs().sum(1)
        if by == "names":
            return net.last(net.first(x)).mean() + errors.quantile(q) + errors.median()
        ranks = errors.sort()[0]
        return net.last(net.first(x)).mean() + ranks[int(q * 40)] + ranks[20]

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(41, 41), last=kit.Linear(41, 3))
    filled(kit, model, model.first, model.last)
    kit.set_weight(model.first, np.eye(41, dtype=np.float32))
    return trained(kit, model, lambda net: net(torch.tensor(rows)), steps=1)


def test_one_call_may_rank_what_several_calls_take_one_rank_of():
    report = compare_runs(ranks_of_losses("names"), ranks_of_losses("sort", flips=True))
    assert report.passed and report.choices, str(report)
    report = compare_runs(ranks_of_losses("names"), ranks_of_losses("sort", q=0.5))
    assert "gives the score of rank 20 of each row" in str(report.first_diff.cause), str(report)


@cache
def restarted(kit, number=0.5, flips=False):
    """Record a codebook whose entries start again where few rows chose them: from the rows that lie farthest away."""
    f = LIBRARY[kit.name]
    random = np.random.default_rng(16)
    entries = random.normal(size=(8, 6)).astype(np.float32)
    entries[1], entries[7] = entries[0], entries[7] + 20
    x = (np.repeat(entries[[0, 2, 3, 4, 5, 6]], [1, 3, 3, 3, 3, 2], 0) + 0.3 * random.normal(size=(15, 6))).astype(
        "float32"
    )
    moved = kit.tensor(leads(not flips, (15, 8), ((0, 0), (0, 1))))
    book = kit.tensor(entries)

    def forward(net, x):
        z = net.first(x)
        distances = ((z.unsqueeze(1) - net.book) ** 2).sum(-1) - moved
        places = f.argmin(distances, -1)
        chosen = f.nn.functional.one_hot(places, 8)
        counts = (chosen.astype("float32") if kit.name == "paddle" else chosen.float()).sum(0)
        y = net.last(z + (net.book[places] - z).detach())
        order = f.argsort(distances.detach().min(-1) if kit.name == "paddle" else distances.detach().min(-1)[0])
        new = kit.numpy(net.book).copy()
        for k, place in enumerate(np.flatnonzero(kit.numpy(counts < number))):
            new[place] = kit.numpy(z)[kit.numpy(order)[::-1][k]]
        kit.set(net.book, new)
        return y

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(6, 6), last=kit.Linear(6, 3))
    model.register_buffer("book", book)
    filled(kit, model, model.first, model.last)
    kit.set_weight(model.first, np.eye(6, dtype=np.float32))
    return trained(kit, model, lambda net: (net(kit.tensor(x)) ** 2).mean())


def test_entries_that_start_again_hold_other_rows_where_rows_chose_otherwise(kit):
    reference = restarted(kit)
    report = compare_runs(reference, restarted(kit, flips=True))
    assert report.passed and report.choices, str(report)
    report = compare_runs(reference, restarted(kit, number=2.5))
    assert report.first_diff.stage == "weight", str(report)
    assert "lt() in `the model` compares with 2.5, the reference's lt() with 0.5" in str(report.first_diff.cause)


@cache
def of_pairs(number, one_by_one=False):
    """Record tokens of which those near a chosen one are left out, the nearest of all first."""
    rows = np.random.default_rng(17).normal(size=(12, 6))

    def forward(net, f, y):
        near = (y.unsqueeze(1) - y).abs().mean(-1)
        kept, above = [], None if one_by_one else near <= number
        for place in y.sum(1).argsort().tolist():
            alone = (near[place, each] > number if one_by_one else not above[place, each] for each in kept)
            if all(map(bool, alone)):
                kept.append(place)
        return y[kept].mean(0, keepdim=True).clamp(min=-1e9)

    return between(KITS["torch"], forward, rows)


def test_code_that_compares_elements_one_by_one_names_its_number_too():
    report = compare_runs(of_pairs(0.9, one_by_one=True), of_pairs(1.1))
    assert "le() in `the model` compares with 1.1, the reference's gt() with 0.9" in str(report.first_diff.cause)


def in_a_narrow_dtype(dtype, by="topk", fault=""):
    """Record a router between layers of one dtype, whose weights are put at the places of all experts."""
    kit = KITS["torch"]

    def forward(net, x):
        y = net.first(x)
        p = net.router(y).softmax(-1)
        if by == "topk":
            weights, places = p.topk(2, -1)
            gates = torch.zeros_like(p).scatter(-1, places, weights / weights.sum(-1, keepdim=True))
        else:
            gates = torch.where(p >= p.topk(2, -1)[0][:, 1:], p, torch.zeros_like(p))
            gates = gates if fault == "sum" else gates / gates.sum(-1, keepdim=True)
        return net.last(y * (0.8 if fault == "scale" else 1.0) + gates @ net.table.weight)

    kit.seed(0)
    model = kit.net(
        forward, first=kit.Linear(6, 6), router=kit.Linear(6, 5), table=kit.Linear(6, 5), last=kit.Linear(6, 3)
    )
    filled(kit, model, model.first, model.router, model.table, model.last)
    x = torch.tensor(np.random.default_rng(6).normal(size=(64, 6)).astype(np.float32))
    return trained(kit, model.to(dtype), lambda net: (net(x.to(dtype)).float() ** 2).mean(), steps=1)


def test_weights_that_are_rounded_once_are_no_drift():
    """A float32 model against itself in bfloat16: its first step has to agree as under autocast."""
    reference = in_a_narrow_dtype(torch.float32)
    report = compare_runs(reference, in_a_narrow_dtype(torch.bfloat16, "mask"), stages=("forward", "backward"))
    assert report.passed, str(report)
    report = compare_runs(reference, in_a_narrow_dtype(torch.bfloat16, "mask", "scale"))
    assert not report.passed and report.first_diff.stage == "forward", str(report)
    assert "are computed in bfloat16" not in str(report.first_diff.cause), str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_at_the_places_of_all_experts_are_read(dtype):
    report = compare_runs(in_a_narrow_dtype(torch.float32), in_a_narrow_dtype(dtype, "mask", "sum"))
    cause = report.first_diff.cause
    assert cause.kind == "routing_weights" and cause.fix == "divide the weights by their sum over the chosen", report


@cache
def grouped(kit, first=True, near=0.0):
    """Record rows that take the group with the largest sum of two scores; two of each group nearly tie in all rows."""
    random = np.random.default_rng(4)
    x, router = random.normal(size=(24, 6)), random.normal(size=(6, 6))
    router[[1, 4]] = router[[0, 3]]
    moved = kit.tensor(np.where(np.arange(6) % 3 == 1, 4e-6 if first else -4e-6, 0).astype(np.float32))

    def forward(net, f, y):
        s = f.nn.functional.sigmoid(net.router(y) + moved).reshape([24, 2, 3])
        taken = f.nn.functional.one_hot(f.argmax(f.topk(s, 2, -1)[0].sum(-1), -1), 2)
        taken = (taken.astype("float32") if kit.name == "paddle" else taken.float())[:, :1]
        return y * kit.tensor((1 + near * (np.arange(24) < 3)[:, None]).astype(np.float32)) + f.tanh(y) * taken

    return between(kit, forward, x, router=router)


def test_places_that_nobody_uses_excuse_no_output(kit):
    assert compare_runs(grouped(kit), grouped(kit, False)).passed
    first = compare_runs(grouped(kit), grouped(kit, False, near=0.02)).first_diff
    assert first is not None and first.stage == "forward", str(first)


@cache
def switched(kit, first=True, near=0.0):
    """Record rows of which most nearly tie between two unlike experts; a fault moves all of the others but one."""
    random = np.random.default_rng(5)
    x, router = random.normal(size=(40, 6)), random.normal(size=(2, 6))
    x[:24] -= np.outer(x[:24] @ (router[0] - router[1]), router[0] - router[1]) / ((router[0] - router[1]) ** 2).sum()
    x[:24] += (2e-7 if first else -2e-7) * (router[0] - router[1])
    moved = near * random.normal(size=(40, 6)) * (np.arange(40) != 39)[:, None]

    def forward(net, f, y):
        taken = f.nn.functional.one_hot(f.argmax(net.router(y), -1), 2)
        taken = taken.astype("float32") if kit.name == "paddle" else taken.float()
        return y * (1 + kit.tensor(moved.astype(np.float32))) + 2 * f.cos(9 * y) * taken[:, :1] - 3 * taken[:, 1:]

    return between(kit, forward, x, router=router)


def test_rows_that_others_take_along_move_as_far_as_these(kit):
    report = compare_runs(switched(kit), switched(kit, False))
    assert report.passed and report.choices[0].flipped > 12, str(report)
    assert not compare_runs(switched(kit), switched(kit, False, near=0.002)).passed


@cache
def assigned(kit, first=True, number=0.5, forced=0):
    """Record a loss of the places whose score reaches a number, which one nearly is; divided by their number."""
    f = LIBRARY[kit.name]
    scores = np.random.default_rng(3).uniform(size=(4, 40)).astype(np.float32)
    scores[2, 7] = 0.5 + (4e-8 if first else -4e-8)

    def loss(net):
        near = scores_of(net)
        mask = near >= number
        if forced:  # a comparison that only one side makes
            mask = mask & (kit.tensor(np.full((4, 40), forced, np.float32)) > 0)
        labels = mask.astype("float32") if kit.name == "paddle" else mask.float()
        terms = f.nn.functional.binary_cross_entropy_with_logits(net(x), labels, reduction="none")
        return (terms.sum(1) / labels.sum(1)).mean()

    def scores_of(net):
        y = net(x).detach()
        return y - y + kit.tensor(scores)

    kit.seed(0)
    model = kit.net(lambda net, value: net.last(net.first(value)), first=kit.Linear(8, 8), last=kit.Linear(8, 40))
    filled(kit, model, model.first, model.last)
    x = kit.tensor(np.random.default_rng(6).normal(size=(4, 8)).astype(np.float32))
    return trained(kit, model, loss)


@pytest.mark.parametrize("forced", [0, 1])
def test_targets_that_nearly_reach_a_threshold_are_no_difference(kit, forced):
    report = compare_runs(assigned(kit), assigned(kit, False, forced=forced))
    assert report.passed and ("ge", "(loop)") in report.choices[0].calls, str(report)


def test_another_threshold_of_targets_is_named(kit):
    first = compare_runs(assigned(kit), assigned(kit, False, number=0.6)).first_diff
    assert first.cause is not None and first.cause.kind == "choice_threshold", str(first)


@cache
def windows(kit, kernel=2, padding=0):
    """Record a pooling whose places an unpooling uses."""
    f = LIBRARY[kit.name].nn.functional
    places = {"return_mask" if kit.name == "paddle" else "return_indices": True}

    def forward(net, _, y):
        values, at = f.max_pool2d(y.reshape([2, 1, 8, 8]), kernel, 2, padding, **places)
        return f.max_unpool2d(values, at, 2).reshape([2, 8, 8])

    return between(kit, forward, np.random.default_rng(6).normal(size=(2, 8, 8)))


def test_other_windows_are_named_by_their_size(kit):
    cause = compare_runs(windows(kit), windows(kit, 3, 1)).first_diff.cause
    assert cause.kind == "call_arguments" and "kernel_size=2" in str(cause) and "kernel_size=3" in str(cause), cause


class Straight(torch.autograd.Function):
    """Rounding that hands gradients on."""

    @staticmethod
    def forward(ctx, values):
        return values.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def levels(kit, least=-8, largest=7):
    """Record a convolution of which both inputs are rounded between bounds; every third weight lies half way.

    The reference, in torch, rounds by a function of its own, and the candidate by a detached rest.
    """
    weight = np.random.default_rng(7).normal(size=36) * 0.2
    weight[::3] = (np.floor(weight[::3] / 0.05) + 0.5) * 0.05

    def rounded(f, x, step, *bounds):
        if kit.name == "torch":
            return Straight.apply((x / step).clamp(*bounds)) * step
        held = f.clip(x * (1 / step), *bounds)
        return (held + (f.round(held).detach() - held.detach())) * step

    def forward(net, f, y):
        w, step = net.quantised.weight, f.abs(y * 0).mean() + 0.05
        w = (w.t() if kit.name == "paddle" else w).reshape([4, 1, 3, 3])
        h, q = rounded(f, f.nn.functional.relu(y), step, 0, 40), rounded(f, w, step, least, largest)
        spread = f.nn.functional.conv2d(h.reshape([2, 1, 6, 6]), q, padding=1)
        return spread.mean(1)

    x = np.random.default_rng(6).normal(size=(2, 6, 6))
    return between(kit, forward, x, quantised=weight.reshape(6, 6))


def test_both_bounds_are_named_whatever_rounds_behind_them():
    reference = levels(KITS["torch"])
    assert compare_runs(reference, levels(KITS["paddle"])).passed
    cause = compare_runs(reference, levels(KITS["paddle"], -4, 3)).first_diff.cause
    assert cause.kind == "choice_threshold" and "within -4 and 3" in cause.sentence, cause


@cache
def halted(kit, from_the_end=False, least=0.04, times=1.0):
    """Record tokens that are handed on until their probabilities add up to 0.96; some do so up to rounding.

    Args:
        from_the_end: True to count what is left of 1.
    """
    x = np.random.default_rng(12).uniform(0.1, 0.6, size=(8, 6))
    x[1, :], x[4, :3] = 0.32, 0.32

    def forward(net, f, y):
        left, total, alive, out = f.ones_like(y), f.zeros_like(y), f.ones_like(y), f.zeros_like(y)
        for turn in range(3):
            p = y * (1 + 0.0 * turn)
            ends = (left - p <= least) if from_the_end else (total + p >= 0.96)
            ends = ends.astype("float32") if kit.name == "paddle" else ends.float()
            out = out + alive * ends * y * (turn + 1) * times
            left, total = (left - alive * (1 - ends) * p, total) if from_the_end else (left, total + alive * p)
            alive = alive * (1 - ends)
        return out

    return between(kit, forward, x)


def test_a_threshold_from_the_other_end_is_the_same_threshold(kit):
    report = compare_runs(halted(kit), halted(kit, True))
    assert report.passed, str(report)
    assert not compare_runs(halted(kit), halted(kit, True, times=1.01)).passed
    cause = compare_runs(halted(kit), halted(kit, True, least=0.1)).first_diff.cause
    text = "le() in `the model` compares with 0.1; with 0.04 it is the reference's ge()"
    assert text in str(cause) and cause.fix == "compare with 0.04", str(cause)


@cache
def pruned(kit, by_mask=False, count=3, times=1.0):
    """Record two rounds that leave out the best places of each sample; in two samples, two places nearly tie.

    Args:
        by_mask: True to sort a mask of the places that are left out, for their order.
    """
    x = np.random.default_rng(13).normal(size=(6, 12, 4))
    for sample, best in ((0, 5), (1, 2)):  # in the second round, and in the first
        x[sample, :best] += 9.0
        x[sample, 9] = x[sample, 7, ::-1] + (3e-6 if by_mask else -3e-6)
        x[sample, [7, 9]] += 5.0

    def forward(net, f, y):
        for _ in range(2):
            n, scores = y.shape[1], y.sum(-1)
            if by_mask:
                gone = f.nn.functional.one_hot(f.topk(scores, count, -1)[1], n).sum(1)
                gone = gone.astype("float32") if kit.name == "paddle" else gone.float()
                kept = f.argsort(gone, **{AXIS[kit.name]: -1}, stable=True)[:, : n - count]
            else:
                kept = f.sort(f.argsort(scores, -1, descending=True)[:, count:], -1)
                kept = kept[0] if kit.name == "torch" else kept
            kept = kept.unsqueeze(-1).expand([-1, -1, y.shape[2]])
            y = (f.gather(y, 1, kept) if kit.name == "torch" else f.take_along_axis(y, kept, 1)) * times
        return y

    return between(kit, forward, x)


def test_rankings_are_paired_by_their_scores_and_not_by_their_names(kit):
    report = compare_runs(pruned(kit), pruned(kit, True))
    assert report.passed and report.choices[0].flipped, str(report)
    assert not compare_runs(pruned(kit), pruned(kit, True, times=1.01)).passed
    cause = compare_runs(pruned(kit), pruned(kit, True, count=4)).first_diff.cause
    assert cause is None or cause.kind != "choice_order", str(cause)


@cache
def kinked(kit, rest=0.0, times=1.0):
    """Record a ReLU of sums, of which some are 0, or the rounding of 0."""
    x = np.random.default_rng(14).normal(size=(16, 6))
    x[::3, 1] = 0.0

    def forward(net, f, y):
        kept = f.round(y).detach() + f.relu(y + rest) if kit.name == "torch" else None
        kept = kept if kept is not None else f.round(y).detach() + f.nn.functional.relu(y + rest)
        return kept * times

    return between(kit, forward, x)


def test_the_gradient_of_a_sum_that_is_zero_up_to_rounding_passes_or_not(kit):
    report = compare_runs(kinked(kit), kinked(kit, 1e-7))
    assert report.passed and ("relu", "(root)") in report.choices[0].calls, str(report)
    assert not compare_runs(kinked(kit), kinked(kit, 1e-7, times=1.02)).passed
    assert not compare_runs(kinked(kit), kinked(kit, 1e-2)).passed


@cache
def by_sample(kit, apart=False, number=0.5, rest=0.0, times=1.0):
    """Record two thresholds, of each sample in a call of its own, or of all samples in one call."""
    x = np.random.default_rng(15).uniform(0.0, 1.0, size=(4, 10))
    x[1, 3] = 0.5

    def forward(net, f, y):
        def kept(values):
            above, below = values >= number, values < 0.3
            masks = [each.astype("float32") if kit.name == "paddle" else each.float() for each in (above, below)]
            return values * (masks[0] + 2 * masks[1])

        y = y + rest
        return (f.stack([kept(y[k]) for k in range(4)]) if apart else kept(y)) * times

    return between(kit, forward, x)


@pytest.mark.parametrize("apart", [True, False])
def test_thresholds_of_a_loop_over_samples_are_those_of_one_call(kit, apart):
    reference = by_sample(kit, not apart)
    report = compare_runs(reference, by_sample(kit, apart, rest=-3e-8))
    assert report.passed and report.choices[0].flipped == 1 and report.choices[0].rows == 40, str(report)
    assert not compare_runs(reference, by_sample(kit, apart, times=1.01)).passed
    assert not compare_runs(reference, by_sample(kit, apart, number=0.6)).passed


def test_as_many_places_from_the_other_end_are_named(kit):
    x = np.random.default_rng(16).normal(size=(30, 8))

    def run(by_mask, largest=False):
        def forward(net, f, y):
            scores = y.sum(-1)
            if by_mask:
                ranked = f.sort(scores.detach())
                taken = scores <= (ranked[0] if kit.name == "torch" else ranked)[11]
                taken = taken.astype("float32") if kit.name == "paddle" else taken.float()
            else:
                places = f.topk(scores, 12, -1, largest)[1]
                taken = f.nn.functional.one_hot(places, 30).sum(0)
                taken = taken.astype("float32") if kit.name == "paddle" else taken.float()
            return y * taken.unsqueeze(-1)

        return between(kit, forward, x)

    assert compare_runs(run(True), run(False)).passed
    cause = compare_runs(run(True), run(False, largest=True)).first_diff.cause
    text = "takes the 12 largest scores of each row of topk() in `the model`, the reference the least of sort()"
    assert cause.kind == "choice_part" and text in str(cause), str(cause)


def test_a_loss_that_is_divided_by_another_count_is_no_mean_over_the_samples(kit):
    """The counts are as far apart as a sum and a mean: the batch has as many samples."""
    x = np.random.default_rng(17).normal(size=(4, 6)).astype(np.float32)

    def run(count):
        def loss(net):
            total, terms = kit.tensor(np.full(count, 1.0, np.float32)).sum(), net(kit.tensor(x)) ** 2
            parts = terms.sum(), (terms * terms).sum()
            return parts[0] / total + parts[1] / total if count > 3 else (parts[0] + parts[1]) / total

        kit.seed(0)
        model = kit.net(lambda net, value: net.last(value), last=kit.Linear(6, 2))
        filled(kit, model, model.last)
        return trained(kit, model, loss, steps=1)

    cause = compare_runs(run(3), run(12)).first_diff.cause
    assert "the loop divides its loss by 12, the reference's by 3" in str(cause), str(cause)
    assert "samples" not in str(cause)


def spread(kit, first=True, border=1.0, times=1.0):
    """Record two convolutions of a plane whose elements are rounded; some of them lie half way, up to rounding."""
    f = LIBRARY[kit.name]
    moved = np.random.default_rng(2).normal(size=(2, 1, 12, 12)).astype(np.float32)
    moved[:, :, 5, 3] = 0.5 + (1e-6 if first else -1e-6)
    edge = np.ones((12, 12), np.float32)
    edge[0] = border

    def forward(net, x):
        h = f.round(x * 0 + kit.tensor(moved)) - 0.2
        return net.second(net.first(h) * kit.tensor(edge) * times).mean(-1).mean(-1)

    kit.seed(0)
    layers = {"first": kit.conv(1, 3, 3, padding=1), "second": kit.conv(3, 2, 3, padding=1)}
    model = kit.net(forward, **layers)
    random = np.random.default_rng(5)
    for layer in layers.values():
        kit.set(layer.weight, random.normal(size=kit.numpy(layer.weight).shape).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    return trained(kit, model, lambda net: abs(net(kit.tensor(moved))).mean(), steps=1)


def test_convolutions_hand_elements_on_to_those_around_them(kit):
    report = compare_runs(spread(kit), spread(kit, False))
    assert report.passed and report.choices, str(report)


@pytest.mark.parametrize("fault", [{"border": 1.1}, {"times": 1.1}], ids=str)
def test_a_fault_apart_from_these_elements_is_a_difference(kit, fault):
    first = compare_runs(spread(kit), spread(kit, False, **fault)).first_diff
    assert first is not None and first.stage == "forward"


def heads(kit, first=True, scale=0.5):
    """Record an attention of two heads in which each query keeps two keys."""
    f = LIBRARY[kit.name]
    moved = kit.tensor(leads(first, (4, 2, 12, 12), ((0, 1, 3, 0), (0, 1, 3, 1)), 8.0))

    def split(x):
        x = x.reshape([4, 12, 2, 3])
        return x.transpose(1, 2) if kit.name == "torch" else x.transpose([0, 2, 1, 3])

    def forward(net, x):
        keys = split(net.key(x))
        keys = keys.transpose(2, 3) if kit.name == "torch" else keys.transpose([0, 1, 3, 2])
        scores = (split(net.query(x)) @ keys + moved) * scale
        kept = scores >= f.topk(scores, 2, -1)[0][..., 1:]
        mixed = f.nn.functional.softmax(f.where(kept, scores, scores * 0 - 1e9), -1) @ split(net.value(x))
        mixed = mixed.transpose(1, 2) if kit.name == "torch" else mixed.transpose([0, 2, 1, 3])
        return net.last(mixed.reshape([4, 12, 6]))

    kit.seed(0)
    layers = {name: kit.Linear(6, 6) for name in ("query", "key", "value")}
    model = kit.net(forward, **layers, last=kit.Linear(6, 3))
    filled(kit, model, *layers.values(), model.last)
    rows = np.random.default_rng(6).normal(size=(4, 12, 6)).astype(np.float32)
    rows[:, 1] = rows[:, 0] + 1e-6
    return trained(kit, model, lambda net: (net(kit.tensor(rows)) ** 2).mean(), steps=1)


def test_the_token_of_a_query_is_that_of_all_heads(kit):
    assert compare_runs(heads(kit), heads(kit, False)).passed
    first = compare_runs(heads(kit), heads(kit, False, scale=0.6)).first_diff
    assert (first.stage, first.reference) == ("forward", "last")


def suppressed(kit, first=True):
    """Record a mask of the few tokens that come first in an order; it is 0 elsewhere."""
    f = LIBRARY[kit.name]
    scores = np.random.default_rng(4).normal(size=(4, 24)).astype(np.float32)
    scores[0, 4], scores[0, 9] = (6.0, 6.0 + 1e-6) if first else (6.0 + 1e-6, 6.0)

    def forward(net, x):
        h = net.first(x)
        order = f.argsort(h.reshape([4, 24]) * 0 + kit.tensor(scores), -1, descending=True)
        kept = f.nn.functional.one_hot(order[:, 0], 24) * 1.0
        return net.last(h), kept

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(1, 1), last=kit.Linear(1, 1))
    filled(kit, model, model.first, model.last)
    x = kit.tensor(np.random.default_rng(6).normal(size=(4, 24, 1)).astype(np.float32))

    def loss(net):
        total, kept = net(x)
        return ((total.reshape([4, 24]) * kept) ** 2).mean()

    return trained(kit, model, loss, steps=1, detail="sketch")


def test_the_share_of_a_sketched_mask_is_that_of_its_ones(kit):
    report = compare_runs(suppressed(kit), suppressed(kit, False))
    assert report.passed, str(report)


def twins(kit, squares=1e-8):
    """Record the nearest of points of which two lie on a sample, up to rounding that a root enlarges."""
    moved = np.random.default_rng(2).uniform(1, 2, size=(16, 6)).astype(np.float32)
    moved[3, :2] = squares, 1.5e-8

    def forward(net, f, h):
        places = f.argmin(f.sqrt(h * 0 + kit.tensor(moved)), -1)
        return h + f.nn.functional.one_hot(places, 6) * 1.0

    return between(kit, forward, np.random.default_rng(6).normal(size=(16, 6)))


def test_distances_near_zero_are_as_exact_as_their_squares(kit):
    report = compare_runs(twins(kit), twins(kit, 4e-8))
    assert report.passed and report.choices, str(report)
    assert not compare_runs(twins(kit), twins(kit, 4e-3)).passed


def sampled(kit, first=True, padding="border"):
    """Record the nearest elements of a picture at places of which one lies half way between two of them."""
    grid = np.random.default_rng(3).uniform(-1.5, 1.5, size=(2, 5, 5, 2)).astype(np.float32)
    grid[0, 2, 2] = 0.25 + (1e-6 if first else -1e-6), 0.1

    def forward(net, f, h):
        picture = f.moveaxis(h, -1, 1)
        places = kit.tensor(grid) + picture.mean() * 0
        options = {"mode": "nearest", "padding_mode": padding, "align_corners": True}
        return f.moveaxis(f.nn.functional.grid_sample(picture, places, **options), 1, -1)

    return between(kit, forward, np.random.default_rng(6).normal(size=(2, 5, 5, 4)))


def test_the_nearest_element_of_a_picture_is_a_choice(kit):
    report = compare_runs(sampled(kit), sampled(kit, False))
    assert report.passed and report.choices[0].calls[0][0] == "grid_sample", str(report)
    assert not compare_runs(sampled(kit), sampled(kit, False, "zeros")).passed


def best_sums(kit, by_parts=True, exchanged=False, k=2, function="softmax", second=False):
    """Record the best sums of two scores: of all pairs, or of the best ones of each part; two pairs nearly tie."""
    random = np.random.default_rng(8)
    x, table = random.normal(size=(16, 10)), random.normal(size=(25, 10)).astype(np.float32)
    x[3, 1] = x[3, 0] = x[3, :5].max() + 1
    moved = leads(not second, (16, 10), ((3, 0), (3, 1)))

    def forward(net, f, h):
        h = h + kit.tensor(moved)
        a, b = h[:, :5], h[:, 5:]
        if by_parts:
            (a, at), (b, other) = f.topk(a, 3, -1), f.topk(b, 3, -1)
            best, j = f.topk((a.unsqueeze(-1) + b.unsqueeze(-2)).reshape([16, 9]), k, -1)
            take = f.gather if kit.name == "torch" else f.take_along_axis
            at, other = (
                take(*((each, -1, k) if kit.name == "torch" else (each, k, -1)))
                for each, k in ((at, j // 3), (other, j % 3))
            )
            places = at * 5 + other
        else:
            pairs = a.unsqueeze(-2) + b.unsqueeze(-1) if exchanged else a.unsqueeze(-1) + b.unsqueeze(-2)
            best, places = f.topk(pairs.reshape([16, 25]), k, -1)
        weights = f.nn.functional.softmax(best, -1) if function == "softmax" else f.nn.functional.sigmoid(best)
        return (kit.tensor(table)[places] * weights.unsqueeze(-1)).sum(1)

    return between(kit, forward, x)


def test_the_best_of_two_parts_are_the_best_of_all_pairs(kit):
    report = compare_runs(best_sums(kit), best_sums(kit, by_parts=False, second=True))
    assert report.passed and report.choices[0].flipped == 1, str(report)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [({"exchanged": True}, "choice_places"), ({"k": 1}, "choice_count"), ({"function": "sigmoid"}, "activation")],
)
def test_faults_behind_a_choice_among_other_places_are_named(kit, fault, kind):
    first = compare_runs(best_sums(kit), best_sums(kit, by_parts=False, second=True, **fault)).first_diff
    assert first.cause.kind == kind, first


def matched(kit, place=1, scale=1.0, apart=1e-7, by_keys=False):
    """Record a classifier of places that code in numpy matches with one target: one of two rows that are equal."""
    f = LIBRARY[kit.name]
    random = np.random.default_rng(3)
    x = random.normal(size=(12, 6)).astype(np.float32)
    x[2] = x[1] + apart
    model = kit.net(lambda net, x: net.last(x), last=kit.Linear(6, 3))
    filled(kit, model, model.last)

    def loss(net):
        outputs, labels = net(kit.tensor(x)), np.zeros(12, np.int64)
        labels[5], labels[place] = 1, 2
        if by_keys:
            targets = f.zeros([12], dtype="int64" if kit.name == "paddle" else f.int64)
            targets[kit.tensor(np.array([5, place]), "int64")] = kit.tensor(np.array([1, 2]), "int64")
        return f.nn.functional.cross_entropy(outputs, targets if by_keys else kit.tensor(labels, "int64")) * scale

    return trained(kit, model, loss)


def test_rows_that_are_equal_within_rounding_may_have_each_others_labels(kit):
    report = compare_runs(matched(kit), matched(kit, 2))
    assert report.passed and report.choices[0].flipped == 2, str(report)
    assert "the code of the loop: " in str(report), str(report)
    assert not compare_runs(matched(kit), matched(kit, 2, scale=1.05)).passed


def test_labels_that_code_gives_to_other_rows_are_a_difference(kit):
    report = compare_runs(matched(KITS["torch"], by_keys=True), matched(kit, 3))
    assert report.first_diff.cause.kind == "matching" and not report.first_diff.cause.proven, str(report)
    assert not compare_runs(matched(kit, apart=1e-2), matched(kit, 2, apart=1e-2)).passed


def neighbours(kit, by_code=True, second=False, times=1.0):
    """Record means over the nearest points, found by a call or in numpy; two of them nearly tie for one point."""
    random = np.random.default_rng(7)
    distances = random.uniform(1, 2, size=(12, 12)).astype(np.float32)
    distances[4, :3] = 1e-3, *((0.5, 0.5 + 1e-6) if second else (0.5 + 1e-6, 0.5))

    def forward(net, f, h):
        places = kit.tensor(np.argsort(distances, axis=1, kind="stable")[:, :2], "int64")
        if not by_code:
            places = f.topk(kit.tensor(distances) + 0 * h.sum(), 2, -1, largest=False)[1]
        return h[places].mean(1) * times

    return between(kit, forward, random.normal(size=(12, 6)))


@pytest.mark.parametrize("turned", [False, True])
def test_what_a_call_chooses_is_what_code_chooses_that_no_call_shows(kit, turned):
    runs = neighbours(kit), neighbours(kit, by_code=False, second=True)
    report = compare_runs(*(runs[::-1] if turned else runs))
    assert report.passed and report.choices[0].flipped >= 1, str(report)
    assert not compare_runs(runs[0], neighbours(kit, by_code=False, second=True, times=1.01)).passed

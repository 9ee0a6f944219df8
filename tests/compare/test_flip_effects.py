"""Rows that flip excuse no more than they can change: equal rows change nothing, and what they do not reach agrees."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS

import padiff
from padiff.align import align
from padiff.compare import compare_runs
from padiff.compare.choices import Swaps, paired
from padiff.compare.judge.flip_effects import effect_of, unreached
from padiff.records import Both, Choice, Operand, Rule, Trace, TracedCall, TracedTensor

ROWS, PLACES, WIDTH = 3, 8, 6
LIBRARY = {"torch": torch, "paddle": paddle}
RNG = np.random.default_rng(3)
HALF = RNG.normal(size=(ROWS, PLACES // 2, WIDTH)).astype(np.float32)


def taken(kit, first=True, apart=0.0, moved=0, active=True, adds=False, detail="full"):
    """The best of each row's places, of which each holds what another one holds; the sides rank these differently.

    Args:
        apart: distance of the rows of the two halves.
        moved: places by which what is taken lies beside what is chosen.
        active: False to leave the activation out behind the layer that gets them.
        adds: True to add to the chosen place, and to use all places.
    """
    f, axis = LIBRARY[kit.name], {"torch": "dim", "paddle": "axis"}[kit.name]
    nearly = np.zeros((ROWS, PLACES), np.float32)
    nearly[:, : PLACES // 2] = 1e-5 if first else -1e-5

    def forward(net, x):
        y = net.first(x)
        scores = (y * y).sum(-1) + kit.tensor(nearly)
        places = f.topk(scores, 3, **{axis: -1})[1].unsqueeze(-1).expand([ROWS, 3, WIDTH])
        if adds:
            counts = f.zeros([ROWS, PLACES, WIDTH])
            ones = f.ones([ROWS, 3, WIDTH])
            counts = (
                counts.scatter_add(1, places, ones)
                if kit.name == "torch"
                else f.put_along_axis(counts, places, ones, 1, reduce="add")
            )
            y = y * (counts + 1) * kit.tensor(np.arange(1, 1 + PLACES, dtype=np.float32).reshape(1, -1, 1))
        else:
            y = f.roll(y, moved, 1)
            y = f.gather(y, 1, places) if kit.name == "torch" else f.take_along_axis(y, places, 1)
        hidden = net.middle(y)
        return net.last(f.nn.functional.relu(hidden) if active else hidden)

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(WIDTH, WIDTH), middle=kit.Linear(WIDTH, 5), last=kit.Linear(5, 2))
    random = np.random.default_rng(1)
    for name in ("first", "middle", "last"):
        layer = getattr(model, name)
        shape = kit.weight(layer).shape
        kit.set_weight(layer, random.normal(size=shape).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    x = np.concatenate([HALF, HALF + np.float32(apart)], axis=1)
    with padiff.record(model, detail=detail) as rec:
        (model(kit.tensor(x)) ** 2).mean().backward()
    return rec.run


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_rows_that_hold_the_same_may_be_taken_for_each_other(kit, detail):
    report = compare_runs(taken(kit, detail=detail), taken(kit, first=False, detail=detail))
    assert report.passed and report.choices[0].flipped, str(report)


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize(
    ("fault", "layer", "kind"), [({"active": False}, "last", "activation_missing"), ({"moved": 1}, "middle", None)]
)
def test_they_excuse_no_other_difference(kit, detail, fault, layer, kind):
    first = compare_runs(taken(kit, detail=detail), taken(kit, first=False, detail=detail, **fault)).first_diff
    assert first is not None and (first.stage, first.reference) == ("forward", layer), first
    assert kind is None or first.cause.kind == kind, first


def test_rows_that_count_as_what_chose_them_are_others_although_they_hold_the_same(kit):
    report = compare_runs(taken(kit, adds=True), taken(kit, first=False, adds=True))
    assert report.passed and report.choices[0].without, str(report)


def test_what_a_tensor_that_agrees_hands_on_agrees(kit):
    """The choices change a layer whose output agrees; the one behind that is not excused."""
    report = compare_runs(taken(kit), taken(kit, first=False, active=False))
    assert report.first_diff.diff.judgement.limit < 1e-3, report.first_diff


class Values:
    """Values of a traced tensor."""

    sketched = False

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)

    def read(self):
        return self.values


def traced(use="gather", table=None):
    """Build a trace: two rows choose among three places, and the code takes the rows of a table at these, or counts."""
    operand = Operand
    table = np.arange(18.0).reshape(2, 3, 3) if table is None else np.asarray(table)
    tensors = [
        TracedTensor(Values(table), "float32", table.shape),
        TracedTensor(None, "float32", (2, 3)),
        TracedTensor(None, "int64", (2, 1)),
        TracedTensor(None, "float32", (2, 3)),
        TracedTensor(None, "float32", (2, 2)),
        TracedTensor(None, "float32", (2, 2)),
    ]
    chosen = TracedCall(
        "", 0, "argmax", 0, (operand("x", 1),), (operand("output.0", 2),), choice=Choice(1, 2, 1, 1, 1, 2)
    )
    using = TracedCall("", 0, use, 0, (operand("x", 0), operand("index", 2)), (operand("output.0", 3),))
    layers = [
        TracedCall(name, 0, "", 0, (operand("input.0", k),), (operand("output.0", k + 1),))
        for name, k in (("a", 3), ("b", 4))
    ]
    return Trace(calls=(chosen, using, *layers), tensors=tensors, functions=True)


def flips_in(trace, other=1):
    """Build the flip of the second row, from place 0 to another one."""
    call = trace.calls[0]
    swaps = Swaps(np.array([1]), None, padiff.records.Both(np.array([0]), np.array([other])), (2,), 3)
    none = np.zeros(2)
    return padiff.compare.choices.Flips(
        padiff.records.Both(call, call), 0, (2,), 2, np.arange(2), np.array([False, True]), none > 0, none, none, none,
        1.0, padiff.records.Both(1, 1), "float32", swaps=swaps,
    )  # fmt: skip


def test_the_effect_is_the_distance_of_the_rows():
    table = np.zeros((2, 3, 3))
    table[1, 0], table[1, 1], table[0, 2] = (3, 0, 0), (3, 0, 0.5), (9, 0, 0)
    trace = traced(table=table)
    spread = np.sqrt(((table.reshape(6, 3) - table.reshape(6, 3).mean(0)) ** 2).sum() / 6)
    assert effect_of(flips_in(trace), trace, trace) == pytest.approx(0.5 / spread)
    assert effect_of(flips_in(trace, 2), trace, trace) == pytest.approx(3 / spread)


@pytest.mark.parametrize("use", ["scatter_add", "one_hot", "eq"])
def test_the_effect_is_not_known_of_places_that_are_counted(use):
    table = np.ones((2, 3, 3)) * np.arange(2)[:, None, None]
    trace = traced(table=table)
    assert effect_of(flips_in(trace), trace, trace) == 0
    trace = traced(use, table)
    assert effect_of(flips_in(trace), trace, trace) == 1
    assert effect_of(flips_in(trace), trace, None) == 1


def test_outputs_that_agree_hand_nothing_on():
    trace = traced()
    flips = [flips_in(trace)]
    assert unreached(trace, flips).outputs == frozenset()
    free = unreached(trace, flips, {("a", 0, "output.0")})
    assert free.outputs == {("a", 0, "output.0"), ("b", 0, "output.0")}
    assert free.gradients == {("a", 0, "output.0"), ("b", 0, "output.0")} and free.layers == {"b"} and free.losses


def test_tensors_whose_limits_let_nearly_all_pass_count_as_not_judged(kit):
    report = compare_runs(taken(kit, adds=True), taken(kit, first=False, adds=True))
    judged = [each.judgement for each in report.diffs if each.judgement is not None]
    judged = [each for each in judged if each.rule is Rule.CHOICES]
    counts = report.choices[0]
    assert counts.unjudged == sum(each.figure is None or each.limit >= 0.5 for each in judged)
    assert counts.without == len(judged) - counts.unjudged


def largest_of(kit, unused=False, moved=0.0, times=1.0):
    """Record the largest of each row's groups, beside a call that only one side makes; one group nearly ties."""
    f, axis = LIBRARY[kit.name], {"torch": "dim", "paddle": "axis"}[kit.name]
    x = np.random.default_rng(4).normal(size=(16, 4, WIDTH)).astype(np.float32)
    x[3, :2, 2] = 5, 5 + moved
    kit.seed(0)

    def forward(net, x):
        if unused:
            f.topk(x.sum(-1), 2, **{axis: -1})
            y = f.take_along_axis(x, f.argmax(x, 1).unsqueeze(1), 1) if kit.name == "paddle" else f.max(x, 1)[0]
        else:
            y = f.amax(x, **{axis: 1})
        return net.last(y.reshape([16, WIDTH]) * times)

    model = kit.net(forward, last=kit.Linear(WIDTH, 2))
    kit.set_weight(model.last, np.ones(kit.weight(model.last).shape, np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(x)) ** 2).mean().backward()
    return rec.run


def test_a_call_whose_places_nobody_uses_is_one_that_returns_values(kit):
    steps = Both(largest_of(kit), largest_of(kit, unused=True)).map(lambda run: run.steps(0)[0])
    infos = Both(largest_of(kit), largest_of(kit, unused=True)).map(lambda run: run.info)
    pairs = list(paired(steps.map(lambda step: step.trace), align(*infos)))
    assert [parts.map(lambda side: side[0].function in ("max", "amax", "argmax")) for _, parts in pairs] == [
        Both(True, True)
    ]


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_the_code_behind_rows_that_chose_otherwise_gives_what_the_candidate_recorded(kit, detail):
    """Counts at the chosen places make other rows; the activation behind them is computed with these."""
    runs = [taken(kit, first=first, adds=True, detail=detail) for first in (True, False)]
    assert compare_runs(*runs).passed
    fault = taken(kit, first=False, adds=True, active=False, detail=detail)
    first = compare_runs(runs[0], fault).first_diff
    assert first is not None and (first.stage, first.reference) == ("forward", "last"), first


def test_code_of_the_other_framework_gives_it_too():
    report = compare_runs(taken(KITS["torch"], adds=True), taken(KITS["paddle"], first=False, adds=True))
    assert report.passed, str(report)
    report = compare_runs(taken(KITS["torch"], adds=True), taken(KITS["paddle"], first=False, adds=True, active=False))
    assert report.first_diff.reference == "last", str(report)


def nearby(kit, by_code=False, within=1.2):
    """Record rows that are near to some rows, found by torch's calls, or in numpy (paddle)."""
    f = LIBRARY[kit.name]
    x = np.random.default_rng(9).normal(size=(2, 12, 3)).astype(np.float32)
    centres = np.array([[0, 5, 7, 2], [3, 1, 8, 4]])

    def forward(net, x):
        q = net.first(x)
        if by_code:
            values = kit.numpy(q)
            middle = np.take_along_axis(values, centres[..., None], 1)
            apart = np.linalg.norm(values[:, None] - middle[:, :, None], axis=-1)
            order = np.sort(np.where(apart <= within, np.arange(12), 12), axis=-1)[..., :3]
            starts = 12 * np.arange(2)[:, None]
            order = np.where(order == 12, order[..., :1], order) + starts[..., None]
            flat = q.reshape([-1, 3])
            middle = f.gather(flat, kit.tensor((centres + starts).reshape(-1), "int64")).reshape([2, 4, 1, 3])
            middle = middle.expand([2, 4, 3, 3])
            rows = f.gather(flat, kit.tensor(order.reshape(-1), "int64")).reshape([2, 4, 3, 3])
        else:
            chosen = f.stack([f.zeros(2, dtype=f.long) + f.tensor(centres[:, k]) for k in range(4)], 1)
            middle = q.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 3))
            apart = ((middle.detach().unsqueeze(2) - q.detach().unsqueeze(1)) ** 2).sum(-1)
            places = f.arange(12).expand(2, 4, 12).clone()
            places[apart > within**2] = 12
            places = f.sort(places, -1)[0][..., :3]
            places = f.where(places == 12, places[..., :1].expand_as(places), places)
            taken = q.unsqueeze(1).expand(-1, 4, -1, -1)
            rows = taken.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, 3))
            middle = middle.unsqueeze(2).expand_as(rows)
        return net.last((f.cat if kit.name == "torch" else f.concat)([rows - middle, middle], -1))

    kit.seed(0)
    model = kit.net(forward, first=kit.Linear(3, 3), last=kit.Linear(6, 2))
    for layer in (model.first, model.last):
        size = kit.weight(layer).shape
        kit.set_weight(layer, np.random.default_rng(2).normal(size=size).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    with padiff.record(model) as rec:
        (model(kit.tensor(x)) ** 2).mean().backward()
    return rec.run


def test_rows_at_places_that_code_finds_prove_no_other_call():
    reference = nearby(KITS["torch"])
    assert compare_runs(reference, nearby(KITS["paddle"], by_code=True)).passed
    first = compare_runs(reference, nearby(KITS["paddle"], by_code=True, within=0.8)).first_diff
    assert first.reference == "last" and not first.cause.proven, first

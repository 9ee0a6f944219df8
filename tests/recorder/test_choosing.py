"""Choices that the trace keeps: of top-k, argmax, sorting and thresholds, with the scores that made them."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.compare.choices import tables_of
from padiff.errors import RunFolderError
from padiff.recorder import calls
from tests.kit.frameworks import TORCH

SCORES = np.random.default_rng(3).normal(size=(5, 7, 9)).astype(np.float32)
LIBRARY = {"torch": torch, "paddle": paddle}


def recorded(kit, choose, scores=SCORES, steps=1, folder=None, **options):
    """A run of a model whose code calls ``choose`` on its scores."""

    def forward(net, x):
        picked = choose(x)
        return net.last(x) if isinstance(picked, tuple) else net.last(x) + 0 * kit_float(kit, picked)

    model = kit.net(forward, last=kit.Linear(9, 2))
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            model(kit.tensor(scores)).sum().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run if folder is None else padiff.open_run(folder)


def kit_float(kit, tensor):
    summed = tensor.astype("float32") if kit.name == "paddle" else tensor.float()
    return summed.sum()


def choice(run, number=0):
    """The only choice of a step: itself, and its scores, places and picked values."""
    trace = run.steps(number)[0].trace
    (call,) = [call for call in trace.calls if call.choice is not None]
    tables = tables_of(trace, call)
    return call.choice, tables.scores, tables.places, tables.picked


def rows(scores, axis):
    return np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis])


RANKINGS = {
    "topk": (lambda f, x: f.topk(x, 3), -1, 3, True),
    "topk of an axis": (lambda f, x: f.topk(x, 2, 1), 1, 2, True),
    "smallest": (lambda f, x: f.topk(x, 3, -1, False), -1, 3, False),
    "argmax": (lambda f, x: f.argmax(x, 1), 1, 1, True),
    "argmin": (lambda f, x: x.argmin(-1), -1, 1, False),
    "argsort": (lambda f, x: f.argsort(x, -1), -1, 9, False),
    "values only": (lambda f, x: f.amax(x, 1), 1, 1, True),
    "the least value": (lambda f, x: f.amin(x, -1), -1, 1, False),
}


@pytest.mark.parametrize("name", RANKINGS)
def test_the_best_places_of_each_row_and_their_scores_are_kept(kit, name):
    call, axis, chosen, largest = RANKINGS[name]
    kept, scores, places, picked = choice(recorded(kit, lambda x: call(LIBRARY[kit.name], x)))
    table = rows(SCORES, axis)
    order = np.argsort(-table if largest else table, axis=1)
    count = min(chosen + calls.BEYOND, table.shape[1])
    assert (kept.chosen, kept.rows, kept.every) == (chosen, len(table), 1)
    assert (places[:, :count] == order[:, :count]).all() and (picked == order[:, :chosen]).all()
    assert (scores[:, :count] == np.take_along_axis(table, order[:, :count], 1)).all()


@pytest.mark.parametrize("width", [24, 25])
def test_rows_that_are_short_beside_what_is_chosen_are_kept_whole(kit, width):
    scores = np.random.default_rng(5).normal(size=(6, width)).astype(np.float32)

    def forward(net, x):
        values, places = LIBRARY[kit.name].topk(x + 0, 2)
        return net.last(values) + 0 * kit_float(kit, places)

    model = kit.net(forward, last=kit.Linear(2, 2))
    with padiff.record(model, detail="sketch") as rec:
        for _ in range(2):
            model(kit.tensor(scores)).sum().backward()
            rec.try_dump()
    for number in (0, 1):
        kept, best, places, picked = choice(rec.run, number)
        order = np.argsort(-scores, axis=1)
        assert (kept.places == kept.scores) is (width == 24)
        assert (places == order[:, : width if width == 24 else 6]).all() and (picked == order[:, :2]).all()
        assert (best == np.take_along_axis(scores, places.astype(int), 1)).all()
        (call,) = [each for each in rec.run.steps(number)[0].trace.calls if each.choice is not None]
        assert (call.inputs[0].tensor == kept.scores) is (width == 24)
        assert kept.picked in {operand.tensor for operand in call.outputs}


@pytest.mark.parametrize(
    ("rank", "call"),
    [(6, lambda f, x: f.kthvalue(x, 7)), (4, lambda f, x: x.median(-1)), (2, lambda f, x: f.quantile(x, 0.25, -1))],
    ids=["kthvalue", "median", "quantile"],
)
def test_one_rank_is_kept_with_the_scores_around_it(kit, rank, call):
    kept, scores, places, picked = choice(recorded(kit, lambda x: call(LIBRARY[kit.name], x)))
    order = np.argsort(rows(SCORES, -1), axis=1)
    start = max(0, rank - calls.BEYOND)
    assert (kept.chosen, kept.rows) == (1, 35) and (picked[:, 0] == order[:, rank]).all()
    assert (places == order[:, start : rank + 1 + calls.BEYOND]).all()
    assert (scores == np.take_along_axis(rows(SCORES, -1), places.astype(int), 1)).all()


def pool(kit, x, name="max_pool2d", size=2):
    f = LIBRARY[kit.name].nn.functional
    return getattr(f, name)(x, size, **{"return_mask" if kit.name == "paddle" else "return_indices": True})


@pytest.mark.parametrize(("name", "size"), [("max_pool2d", 2), ("adaptive_max_pool2d", 3)])
@pytest.mark.parametrize("steps", [1, 2])
def test_pooling_that_returns_places_keeps_its_planes(kit, name, size, steps):
    images = np.random.default_rng(4).normal(size=(3, 2, 6, 6)).astype(np.float32)

    def pooled(x):
        return pool(kit, x.reshape([3, 2, 6, 6]), name, size)[1]

    run = recorded(kit, pooled, images.reshape(-1, 9), steps, detail="sketch")
    kept, scores, places, picked = choice(run, steps - 1)
    best = images.reshape(6, 3, 2, 3, 2).transpose(0, 1, 3, 2, 4).reshape(6, 9, 4).argmax(-1)
    window = np.arange(9)
    assert (kept.chosen, kept.rows) == (9, 6)
    assert (picked == (window // 3 * 2 + best // 2) * 6 + window % 3 * 2 + best % 2).all()
    assert (scores == np.take_along_axis(images.reshape(6, 36), places.astype(int), 1)).all()


def test_a_pooling_layer_that_returns_places_is_heard(kit):
    layers = LIBRARY[kit.name].nn
    pooling = (
        layers.MaxPool2D(2, return_mask=True) if kit.name == "paddle" else layers.MaxPool2d(2, return_indices=True)
    )
    model = kit.net(lambda net, x: net.last(net.pool(x)[0].reshape([5, -1])), pool=pooling, last=kit.Linear(6, 2))
    with padiff.record(model) as rec:
        model(kit.tensor(SCORES[:, :4, :6].reshape(5, 1, 4, 6))).sum().backward()
        rec.try_dump()
    assert choice(rec.run)[0].chosen == 6


@pytest.mark.parametrize("name", ["bucketize", "searchsorted"])
def test_bins_are_thresholds_at_the_nearest_boundary(kit, name):
    bounds = np.array([-1.0, 0.0, 0.5], np.float32)
    f = LIBRARY[kit.name]

    def bins(x):
        edges = kit.tensor(bounds)
        return f.bucketize(x, edges) if name == "bucketize" else f.searchsorted(edges, x)

    _, scores, places, picked = choice(recorded(kit, bins))
    values = SCORES.reshape(-1)[places[0]]
    apart = values[:, None] - bounds
    assert np.allclose(scores[0], apart[np.arange(len(values)), np.abs(apart).argmin(1)], atol=1e-6)
    assert (picked[0] == np.searchsorted(bounds, values)).all()


def test_equal_tensors_are_a_choice_and_a_mask_is_none(kit):
    f = LIBRARY[kit.name]
    run = recorded(kit, lambda x: x == x.roll(1, 1) if kit.name == "torch" else x == f.roll(x, 1, 1), SCORES.round(1))
    found = choice(run)
    assert found[0].chosen == 0 and (found[3][0].astype(bool) == (found[1][0] == 0)).all() and found[3][0].any()
    run = recorded(kit, lambda x: x == 0.0)
    assert not [call for call in run.steps(0)[0].trace.calls if call.choice is not None]


def test_sketched_steps_do_not_listen_for_values_alone(kit):
    run = recorded(kit, lambda x: LIBRARY[kit.name].amax(x, -1), steps=2, detail="sketch")
    assert choice(run)[0].chosen == 1
    assert not [call for call in run.steps(1)[0].trace.calls if call.function]


def test_a_threshold_keeps_the_elements_nearest_to_it(kit, monkeypatch):
    monkeypatch.setattr(calls, "NEAREST", 20)
    kept, scores, places, picked = choice(recorded(kit, lambda x: x > 0.25))
    above = SCORES.reshape(-1) - np.float32(0.25)
    nearest = np.argsort(np.abs(above))[:20]
    assert (kept.chosen, kept.rows) == (0, 1) and (places[0] == nearest).all()
    assert (scores[0] == above[nearest]).all() and (picked[0].astype(bool) == (above[nearest] > 0)).all()


def test_rounding_is_a_threshold_at_the_half(kit):
    _, scores, places, picked = choice(recorded(kit, lambda x: x.round()))
    expected = SCORES.reshape(-1)[places[0]]
    assert np.allclose(scores[0], expected - np.floor(expected) - 0.5, atol=1e-6)
    assert (picked[0] == np.round(expected)).all()


def test_later_steps_keep_choices_and_no_other_functions(kit):
    run = recorded(kit, lambda x: LIBRARY[kit.name].topk(x * 2, 2), steps=3, detail="sketch")
    for number in (1, 2):
        trace = run.steps(number)[0].trace
        assert not trace.functions and {call.function for call in trace.calls} <= {"", "topk"}
        assert choice(run, number)[0].chosen == 2


def test_rows_of_sketched_layers_are_evenly_spaced(kit, monkeypatch):
    monkeypatch.setattr(calls, "SKETCHED_ROWS", 10)
    kept, scores, *_ = choice(recorded(kit, lambda x: LIBRARY[kit.name].topk(x, 2), steps=2, detail="sketch"), 1)
    assert (kept.rows, kept.every, len(scores)) == (35, 4, 9)
    assert (scores[:, 0] == rows(SCORES, -1)[::4].max(axis=1)).all()


def test_what_chooses_nothing_by_real_scores_keeps_nothing(kit):
    run = recorded(
        kit,
        lambda x: (
            x.max(),
            x.sum(),
            LIBRARY[kit.name].argmax((x > 0).astype("int32") if kit.name == "paddle" else (x > 0).int(), -1),
        ),
    )
    found = [call for call in run.steps(0)[0].trace.calls if call.choice is not None]
    assert [call.function for call in found] == ["gt"]


def test_the_folder_keeps_choices_and_refuses_damaged_ones(kit, tmp_path):
    run = recorded(kit, lambda x: LIBRARY[kit.name].topk(x, 3), folder=tmp_path / "run")
    kept, scores, *_ = choice(run)
    assert kept.chosen == 3 and scores.shape == (35, 9)
    file = next((tmp_path / "run").rglob("report.json"))
    content = json.loads(file.read_text())
    for call in content["trace"]["calls"]:
        if "choice" in call:
            call["choice"] = list(replace_last(call["choice"]))
    file.write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match="a choice of a tensor that is not there"):
        _ = padiff.open_run(tmp_path / "run").steps(0)[0].trace.calls[0]


def replace_last(numbers):
    return (*numbers[:-1], 10**6)


DRAWS = {
    "one": (lambda x: torch.multinomial(x.softmax(-1)[0], 1), 1),
    "several": (lambda x: x.softmax(-1)[0].multinomial(3), 3),
    "one of several": (lambda x: torch.multinomial(x.softmax(-1)[0], 1, replacement=True), 1),
    "gumbel": (lambda x: torch.nn.functional.gumbel_softmax(x, 0.5, hard=True).long(), 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_keep_their_scores_and_stay_what_they_are(name):
    draw, count = DRAWS[name]
    states = []

    def seeded(x):
        torch.manual_seed(5)
        drawn = draw(x)
        states.append(torch.get_rng_state())
        return drawn

    drawn = seeded(torch.tensor(SCORES))
    trace = recorded(TORCH, seeded).steps(0)[0].trace
    assert torch.equal(*states)
    (call,) = [call for call in trace.calls if call.function in calls.DRAWS]
    kept = call.choice
    tables = tables_of(trace, call)
    scores, places, picked = tables.scores, tables.places, tables.picked
    assert kept.chosen == count and (places[:, :count] == picked).all()
    expected = drawn.argmax(-1).reshape(-1, 1) if name == "gumbel" else drawn
    assert (picked == expected.numpy()).all() and (np.diff(scores, axis=1) <= 0).all()


def test_draws_without_a_best_score_keep_none():
    run = recorded(TORCH, lambda x: torch.multinomial(x.softmax(-1)[0], 4, replacement=True))
    assert all(call.choice is None for call in run.steps(0)[0].trace.calls)


@pytest.mark.parametrize("channels", [False, True])
def test_quantisers_round_to_multiples_of_their_step(channels):
    steps, zeros = torch.full((7,), 0.1), torch.full((7,), 2, dtype=torch.int32)

    def quantise(x):
        if channels:
            return torch.fake_quantize_per_channel_affine(x, steps, zeros, 1, -8, 7)
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -8, 7)

    _, scores, places, picked = choice(recorded(TORCH, quantise))
    values = np.clip(SCORES.reshape(-1)[places[0]] / np.float32(0.1) + 2, -8, 7)
    assert np.allclose(scores[0], values - np.floor(values) - 0.5, atol=1e-5)
    assert np.allclose(picked[0], np.round(values))


BOUNDS = {
    "both": (lambda f, x: f.clip(x, -0.5, 1.0), lambda x: np.minimum(x + 0.5, 1 - x)),
    "largest": (lambda f, x: f.clip(x, max=1.0), lambda x: 1 - x),
    "hardtanh": (lambda f, x: f.nn.functional.hardtanh(x), lambda x: 1 - np.abs(x)),
    "relu6": (lambda f, x: f.nn.functional.relu6(x), lambda x: np.minimum(x, 6 - x)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_keep_how_far_the_elements_nearest_to_them_lie_inside(kit, name):
    call, inside = BOUNDS[name]
    kept, scores, places, picked = choice(recorded(kit, lambda x: call(LIBRARY[kit.name], x)))
    distances = inside(SCORES.astype(np.float64)).reshape(-1)
    np.testing.assert_allclose(scores[0], distances[places[0]], atol=1e-6)
    assert (kept.chosen, kept.rows) == (0, 0) and len(scores[0]) == SCORES.size
    assert (picked[0] == (scores[0] >= 0)).all()


@pytest.mark.parametrize("most", [1.0, 100.0])
def test_bounds_are_kept_in_later_steps_if_they_hold_something_back(kit, most):
    f = LIBRARY[kit.name]
    run = recorded(kit, lambda x: (f.clip(x, -most, most), f.topk(x, 3)), steps=2, detail="sketch")
    names = [[call.function for call in run.steps(k)[0].trace.calls if call.choice is not None] for k in (0, 1)]
    assert names[0] == ["clamp", "topk"] and ("clamp" in names[1]) is (most == 1.0)

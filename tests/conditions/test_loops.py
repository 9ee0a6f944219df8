"""What holds of every training, under each condition: recording is neutral and complete, and finds the mistake."""

from __future__ import annotations

from functools import cache

import pytest
from kit.frameworks import PADDLE, TORCH

import padiff

from .loops import Accumulation, Clipping, Evaluating, Frozen, Gan, Lengths, Skipping
from .training import OPTIONS, assert_neutral, counts, train

LOOPS = (Accumulation, Clipping, Gan, Frozen, Skipping, Lengths, Evaluating)


@pytest.fixture(params=LOOPS, ids=lambda loop: loop.__name__.lower())
def loop(request):
    return request.param


def test_the_training_is_the_same_to_the_bit_with_and_without_recording(kit, loop, tmp_path):
    plain = train(loop(kit))
    assert len(set(plain.losses)) == loop.steps  # it trains
    assert_neutral(plain, train(loop(kit), tmp_path / "every", OPTIONS["sketch"]))
    assert_neutral(plain, train(loop(kit), tmp_path / "second", OPTIONS["full"], every_n_steps=2))


def mlp_counts(calls=1, outputs=4, parameters=4, trained=4):
    """Of a chain of layers: what each call and each parameter brings."""
    return {
        "input": calls,
        "weight": parameters,
        "forward": calls * outputs,
        "loss": calls,
        "backward": calls * outputs,
        "grad": trained,
        "update": trained,
        "rate": 1,
    }


EXPECTED = {
    Accumulation: lambda number: mlp_counts(calls=3),
    Clipping: lambda number: mlp_counts(),
    # Called are the two parts, the second three times; two losses, two rates. The discriminator's outputs have
    # gradients in each of its calls.
    Gan: lambda number: {
        "input": 4,
        "weight": 8,
        "forward": 4 * 4,
        "loss": 2,
        "backward": 4 * 4,
        "grad": 8,
        "update": 8,
        "rate": 2,
    },
    # Up to the frozen layer's activation no output has a gradient, and its parameters have neither gradient nor update.
    Frozen: lambda number: {**mlp_counts(trained=2), "backward": 2},
    # Each block is three layers of two parameters; root and head are always there.
    Skipping: lambda number: {
        **mlp_counts(
            outputs=2 + 3 * sum(Skipping.KEPT[number]), parameters=8, trained=2 + 2 * sum(Skipping.KEPT[number])
        )
    },
    Lengths: lambda number: mlp_counts(parameters=5, trained=5),
    # Running mean and variance in both, and torch's counter of batches.
    Evaluating: lambda number: mlp_counts(outputs=5, parameters=8, trained=6),
}


@pytest.mark.parametrize("detail", OPTIONS)
def test_the_records_are_as_many_as_the_training_makes(kit, loop, detail, right):
    run = padiff.open_run(right(kit, loop, detail))
    assert run.numbers() == list(range(loop.steps))
    for number in run.numbers():
        expected = dict(EXPECTED[loop](number))
        if loop is Evaluating and kit.name == "torch":
            expected["weight"] += 1
        assert counts(run, number) == expected, number
        assert run.steps(number)[0].micro_batches == {Accumulation: 3, Gan: 3}.get(loop, 1)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The recorded training without a mistake, by framework, loop and level of detail."""

    @cache
    def folder(kit, loop, detail):
        made = tmp_path_factory.mktemp("right") / "run"
        train(loop(kit), made, OPTIONS[detail])
        return made

    return folder


@pytest.mark.parametrize("detail", OPTIONS)
def test_torch_and_paddle_match(loop, detail, right):
    report = padiff.compare_runs(right(TORCH, loop, detail), right(PADDLE, loop, detail))
    assert report.passed, report.first_diff.message
    assert not report.coverage.reference_layers
    assert not report.coverage.candidate_layers
    assert list(report.coverage.steps) == list(range(loop.steps))


#: Where the fault of each training shows first: step, stages, and layers of torch's.
FAULTS = {
    Accumulation: (2, {"loss", "forward", "grad", "backward", "input"}, ""),
    Clipping: (0, {"grad"}, ""),
    # The discriminator has stepped when it is called again.
    Gan: (0, {"forward", "update"}, "discriminator"),
    Frozen: (0, {"grad", "update"}, "0"),
    Skipping: (2, {"forward"}, ""),
    Lengths: (3, {"input"}, ""),
    Evaluating: (1, {"weight"}, "1"),
}


@pytest.mark.parametrize(("kit", "detail"), [(TORCH, "sketch"), (PADDLE, "full")], ids=["torch", "paddle"])
def test_the_mistake_that_people_make_under_the_condition_is_found(kit, loop, detail, right, tmp_path):
    train(loop(kit, fault=True), tmp_path / "wrong", OPTIONS[detail])
    report = padiff.compare_runs(right(TORCH, loop, detail), tmp_path / "wrong")
    assert not report.passed
    step, stages, layer = FAULTS[loop]
    first = report.first_diff
    assert first.step == step, first.message
    assert first.stage in stages, first.message
    assert (first.reference or first.candidate).startswith(layer), first.message

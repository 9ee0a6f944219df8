"""How far the reference's own training moved: against numpy, and what a report says of it."""

from __future__ import annotations

import numpy as np
import pytest
from kit.records import info, linear, memory_run, record, root, sketched_run, step

from padiff import compare_runs

TREE = info(root(2), linear("a", 3, 4), linear("b", 4, 2))
LOSS = "(loop)"


def run(moved: float, steps: int = 2):
    """A run whose weights move by a share of themselves in each step, and whose loss is halved."""
    rng = np.random.default_rng(0)
    weights = {"a": rng.normal(size=(4, 3)), "b": rng.normal(size=(2, 4))}
    recorded = []
    for number in range(steps):
        now = {layer: values * (1 + moved) ** number for layer, values in weights.items()}
        recorded.append(
            step(
                number,
                [
                    *(record(layer, "weight", "weight", values) for layer, values in now.items()),
                    record(LOSS, "loss", "loss", np.float64(2.0 / 2**number)),
                    *(record(layer, "update", "weight", values * moved) for layer, values in now.items()),
                ],
            )
        )
    return memory_run(TREE, *recorded)


@pytest.mark.parametrize(("moved", "steps"), [(0.1, 2), (0.1, 3), (0.5, 1), (1e-3, 2)])
def test_weights_move_as_numpy_says(moved, steps):
    found = compare_runs(run(moved, steps), run(moved, steps)).moved
    assert found.weights == pytest.approx((1 + moved) ** (steps - 1) - 1 if steps > 1 else moved, rel=1e-6)
    assert found.losses == (None if steps == 1 else (2.0, 2.0 / 2 ** (steps - 1)))
    assert found.enough and found.sentence.endswith("enough to show a fault")


@pytest.mark.parametrize("moved", [0.0, 1e-12])
def test_a_match_of_runs_that_stand_still_shows_little(moved):
    report = compare_runs(run(moved), run(moved))
    assert report.passed and not report.moved.enough
    assert "less than 10 times the" in str(report) and "the match shows little" in " ".join(str(report).split())


def test_sketches_show_it_too():
    sketched = [sketched_run(run(0.1), lambda record: record.layer != LOSS) for _ in range(2)]
    assert compare_runs(*sketched).moved.weights == pytest.approx(0.1, rel=0.2)


def test_nothing_is_said_without_updates_and_of_runs_that_differ():
    without = [
        memory_run(TREE, step(k, [record("a", "weight", "weight", np.ones((4, 3)) * (k + 1))])) for k in range(2)
    ]
    assert compare_runs(without[0], without[0]).moved is None
    assert compare_runs(run(0.1), run(0.2)).moved is None

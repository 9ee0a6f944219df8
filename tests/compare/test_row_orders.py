"""Rows in another order: compared row by row inside of what puts them back, and a difference elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import padiff
from padiff.compare import compare_runs

ROWS, WIDTH = 20, 6
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
ORDER = np.random.default_rng(1).permutation(ROWS)


def record(kit, order=None, back=True, times=1.0, part=None, repeated=False, **options):
    """Record a net that sorts its rows for two of its layers; ``part`` of the rows only, if given."""
    kit.seed(0)
    order = np.arange(ROWS) if order is None else order
    order = order if part is None else order[:part]

    def forward(net, x):
        y = net.first(x)
        inner = net.block(y[kit.tensor(order, "int64")])
        if back:
            inner = inner[kit.tensor(np.argsort(order), "int64")] if part is None else inner
        return net.last(inner)

    def block(net, x):
        return net.b(net.a(x)) * times

    inner = kit.net(block, a=kit.Linear(WIDTH, WIDTH), b=kit.Linear(WIDTH, WIDTH))
    net = kit.net(forward, first=kit.Linear(WIDTH, WIDTH), block=inner, last=kit.Linear(WIDTH, 2))
    random = np.random.default_rng(5)
    for layer in (net.first, inner.a, inner.b, net.last):
        kit.set_weight(layer, random.normal(size=kit.weight(layer).shape).astype(np.float32))
        kit.set(layer.bias, np.zeros(kit.numpy(layer.bias).shape, np.float32))
    optimizer = kit.sgd(net.parameters(), 0.01)
    data = np.repeat(X[: ROWS // 2], 2, axis=0) if repeated else X
    with padiff.record(net, optimizer=optimizer, **options) as rec:
        for _ in range(2):
            output = net(kit.tensor(data))
            (output * kit.tensor(np.arange(len(output) * 2, dtype=np.float32).reshape(-1, 2))).mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("repeated", [False, True], ids=["", "equal rows"])
def test_rows_that_are_put_back_are_no_difference(kit, repeated):
    report = compare_runs(record(kit, repeated=repeated), record(kit, ORDER, repeated=repeated))
    assert report.passed, str(report)
    assert any("rows in another order" in view for view in report.coverage.views)


def test_rows_that_stay_in_another_order_are_a_difference_where_they_were_moved(kit):
    first = compare_runs(record(kit), record(kit, ORDER, back=False)).first_diff
    assert first.reference.startswith("block") and first.diff.pair.stage == "forward"


def test_a_fault_among_moved_rows_is_a_difference(kit):
    first = compare_runs(record(kit), record(kit, ORDER, times=1.01)).first_diff
    assert first.diff.pair.stage == "forward" and first.reference.startswith("block")


def test_rows_that_are_left_out_are_a_difference(kit):
    assert not compare_runs(record(kit), record(kit, part=ROWS - 2)).passed

"""The first diff says from which lines of both sides' code it is called."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
from kit.frameworks import KITS

import padiff
from padiff.report_formats import to_json


def line_of(function, text: str) -> int:
    """The line of this file on which a function has a text."""
    lines, first = inspect.getsourcelines(function)
    [place] = [k for k, line in enumerate(lines) if text in line]
    return first + place


def forward(net, x):
    y = net.first(x)
    y = net.relu(y) * net.gain  # the product
    return net.second(y)  # the second layer


def recorded(kit, folder: Path, gain: float) -> Path:
    first, second = kit.Linear(4, 4), kit.Linear(4, 2)
    for layer in (first, second):
        kit.set_weight(layer, np.eye(4, dtype=np.float32)[: 4 if layer is first else 2])
        kit.set(layer.bias, np.zeros(4 if layer is first else 2, np.float32))
    net = kit.net(forward, first=first, second=second, relu=kit.ReLU())
    net.gain = gain
    with padiff.record(net, str(folder)) as rec:
        for _ in range(2):
            net(kit.tensor(np.arange(8, dtype=np.float32).reshape(2, 4))).sum().backward()  # the loop
            rec.try_dump()
    return folder


@pytest.mark.parametrize("kit", KITS.values(), ids=KITS)
def test_the_first_diff_says_where_it_is_called(kit, tmp_path):
    report = padiff.compare_runs(recorded(kit, tmp_path / "a", 2.0), recorded(kit, tmp_path / "b", 3.0))
    first = report.first_diff
    product = f"{Path(__file__).name}:{line_of(forward, '# the product')} forward"
    assert all(stack[0].endswith(product) for stack in first.stacks)
    assert str(report).count("called at ") == 2 and " in forward" in str(report)
    assert to_json(report)["first_diff"]["stacks"]["reference"] == list(first.stacks.reference)

"""A loss that one side keeps in fewer digits is rounded by that alone."""

from __future__ import annotations

import numpy as np
import pytest

import padiff

torch = pytest.importorskip("torch")


def run(folder, rounded, factor=1.0):
    """A net in bfloat16, whose outputs agree to the bit; its loss in float32, or rounded to bfloat16."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for number in range(12):
            data = np.random.default_rng(number)
            x = torch.tensor(data.normal(size=(7, 6)), dtype=torch.bfloat16)
            labels = torch.tensor(data.integers(0, 5, 7))
            loss = torch.nn.functional.cross_entropy(net(x).float(), labels)
            loss.backward()
            logged = loss.detach() * factor
            rec.log_loss(logged.to(torch.bfloat16) if rounded else logged)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return folder


def test_half_a_unit_in_the_last_place_of_the_coarser_side_passes_and_more_does_not(tmp_path):
    reference = run(tmp_path / "reference", rounded=False)
    report = padiff.compare_runs(reference, run(tmp_path / "rounded", rounded=True))
    assert report.passed, str(report)
    off = padiff.compare_runs(reference, run(tmp_path / "off", rounded=True, factor=1.02))
    assert off.first_diff is not None and (off.first_diff.step, off.first_diff.stage) == (0, "loss")

"""The verdict on a trial at the place of the first difference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import padiff
from padiff_cli.bisect.search import BAD, GOOD
from padiff_cli.bisect.verdict import compare, judge, place_of


def recorded(path, eps=1e-5, k=2):
    """Record a step whose code between two layers normalises with `eps`, and behind the second one takes `k` places."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 5)
            self.table, self.last = torch.nn.Parameter(torch.randn(5, 8)), torch.nn.Linear(8, 3)

        def forward(self, x):
            y = functional.layer_norm(self.first(x), (8,), eps=eps)
            weights, places = self.second(y).softmax(-1).topk(k, -1)
            return self.last((weights.unsqueeze(-1) * self.table[places]).sum(1))

    torch.manual_seed(0)
    model = Net()
    with padiff.record(model, path) as rec:
        (model(torch.randn(16, 6)) ** 2).mean().backward()
        rec.try_dump()
    return path


@pytest.mark.parametrize(("options", "verdict"), [({"k": 3}, GOOD), ({"eps": 1e-3}, BAD), ({}, GOOD)])
def test_a_call_between_layers_is_judged_by_the_tensor_that_differs_first(tmp_path, options, verdict):
    good, bad = recorded(tmp_path / "good"), recorded(tmp_path / "bad", eps=1e-3, k=3)
    place = place_of(compare(good, bad, 1))
    assert "layer_norm()" in place.where and place.recorded[0] == "second"
    trial = recorded(tmp_path / "trial", **options)
    answer, reason = judge(place, compare(good, trial, 1), bad, trial)
    assert answer == verdict, reason

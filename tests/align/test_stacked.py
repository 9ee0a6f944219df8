"""Experts whose matrices are stacked in one tensor, against experts in a list: paired, compared and carried over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import padiff
from padiff.compare import compare_runs

WIDTH, INNER, COUNT = 6, 10, 4


class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=bias)
        self.up = nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Listed(nn.Module):
    """Experts in a list."""

    def __init__(self, bias=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([Expert(bias) for _ in range(COUNT)])

    def forward(self, x):
        x = self.first(x)
        return sum(expert(x) for expert in self.experts)


class Stacked(nn.Module):
    """The same with one tensor for all experts, whose matrices are (out, in) or (in, out)."""

    def __init__(self, bias=False, transposed=False, fused=True):
        super().__init__()
        self.transposed, self.fused = transposed, fused
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Module()
        shape = lambda out, of: (COUNT, of, out) if transposed else (COUNT, out, of)  # noqa: E731
        parts = {"gate_up_proj": 2 * INNER} if fused else {"gate_proj": INNER, "up_proj": INNER}
        for name, rows in parts.items():
            setattr(self.experts, name, nn.Parameter(torch.randn(shape(rows, WIDTH))))
        self.experts.down_proj = nn.Parameter(torch.randn(shape(WIDTH, INNER)))
        if bias:
            for name, rows in (*parts.items(), ("down_proj", WIDTH)):
                setattr(self.experts, f"{name}_bias", nn.Parameter(torch.randn(COUNT, rows)))

    def product(self, x, name):
        weight = getattr(self.experts, name)
        y = x @ (weight if self.transposed else weight.transpose(1, 2))
        bias = getattr(self.experts, f"{name}_bias", None)
        return y if bias is None else y + bias[:, None]

    def forward(self, x):
        x = self.first(x)[None].expand(COUNT, -1, -1)
        if self.fused:
            gate, up = self.product(x, "gate_up_proj").chunk(2, -1)
        else:
            gate, up = self.product(x, "gate_proj"), self.product(x, "up_proj")
        return self.product(nn.functional.silu(gate) * up, "down_proj").sum(0)


FORMS = [{}, {"transposed": True}, {"fused": False}, {"bias": True}, {"bias": True, "transposed": True, "fused": False}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("back", [False, True], ids=["list to stack", "stack to list"])
def test_weights_are_carried_between_a_list_and_a_stack(form, back):
    torch.manual_seed(0)
    models = [Listed(form.get("bias", False)), Stacked(**form)]
    base, raw = models[::-1] if back else models
    assert padiff.assign_weight(base, raw)
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(base(x), raw(x))


def record(model, fault=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(2):
            (model(torch.randn(5, WIDTH)) ** 2).mean().backward()
            if fault is not None:
                fault(model)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def pair(**form):
    torch.manual_seed(0)
    listed, stacked = Listed(), Stacked(**form)
    assert padiff.assign_weight(listed, stacked)
    return listed, stacked


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_each_expert_is_compared(form):
    listed, stacked = pair(**form)
    report = compare_runs(record(listed), record(stacked))
    assert report.passed, str(report)
    sites = {diff.pair.anchor.site for diff in report.diffs if diff.compared}
    assert {f"experts.{k}.{name}/grad/weight" for k in range(COUNT) for name in ("gate", "up", "down")} <= sites
    assert not report.coverage.reference_parameters and not report.coverage.candidate_parameters


def test_another_expert_is_told_by_its_number():
    listed, stacked = pair()
    with torch.no_grad():
        stacked.experts.gate_up_proj[2, INNER + 1, 3] += 0.1
    first = compare_runs(record(listed), record(stacked)).first_diff
    assert (first.reference, first.diff.pair.stage) == ("experts.2.up", "weight")
    assert "2" in first.diff.pair.candidate.slot


def test_a_gradient_of_one_expert_that_is_scaled_is_a_difference():
    listed, stacked = pair()

    def fault(model):
        model.experts.down_proj.grad[1] *= 1.5

    first = compare_runs(record(listed), record(stacked, fault)).first_diff
    assert (first.reference, first.diff.pair.stage) == ("experts.1.down", "grad")


def test_two_stacks_are_compared_whole():
    torch.manual_seed(0)
    stacked = Stacked()
    other = Stacked()
    other.load_state_dict(stacked.state_dict())
    report = compare_runs(record(stacked), record(other))
    assert report.passed
    assert any(diff.pair.anchor.site == "experts/grad/gate_up_proj" for diff in report.diffs)


def test_a_convolution_over_one_axis_is_no_stack():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv1d(COUNT, COUNT, 3), nn.Linear(4, 4))
    twin = nn.Sequential(nn.Conv1d(COUNT, COUNT, 3), nn.Linear(4, 4))
    assert padiff.assign_weight(conv, twin)
    np.testing.assert_array_equal(conv[0].weight.detach().numpy(), twin[0].weight.detach().numpy())

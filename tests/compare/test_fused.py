"""Query, key and value in one tensor, of which a sketch was kept."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.report_formats import coverage_lines

WIDTH, BATCH, TOKENS = 48, 4, 6
TARGET = np.random.default_rng(1).normal(size=(BATCH, TOKENS, WIDTH)).astype(np.float32)
MIXES = [("sketch", "sketch"), ("full", "sketch"), ("sketch", "full"), ("full", "full")]


def torch_layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


def trained(model: torch.nn.Module, detail: str, fault=lambda model: None) -> padiff.Recorder:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rng = np.random.default_rng(0)
    fault(model)
    with padiff.record(model, optimizer=optimizer, detail=detail) as recorder:
        for _ in range(4):
            x = torch.tensor(rng.normal(size=(BATCH, TOKENS, WIDTH)).astype(np.float32))
            (model(x) * torch.tensor(TARGET)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.try_dump()
    return recorder


def other(rounded: torch.nn.Module) -> torch.nn.Module:
    """The same layer, whose second linear layer rounds elsewhere: Adam makes other updates of the key's bias."""

    class Wide(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x.double(), self.weight.double(), self.bias.double()).float()

    rounded.linear2.__class__ = Wide
    return rounded


@pytest.mark.parametrize("mix", MIXES)
def test_two_layers_that_have_them_in_one_are_compared(mix):
    runs = [trained(torch_layer(), mix[0]).run, trained(other(torch_layer()), mix[1]).run]
    report = padiff.compare_runs(*runs)
    assert report, report.first_diff
    if mix == ("sketch", "sketch"):
        assert report.coverage.complete
        assert "in_proj_bias[query, key, value]" in {d.pair.anchor.slot for d in report.diffs}


@pytest.mark.parametrize("stage", ["weight", "grad"])
def test_a_fault_in_one_of_them_is_found_in_the_sketch_of_all(stage):
    def more(model: torch.nn.Module) -> None:
        weight = model.self_attn.in_proj_weight
        if stage == "weight":
            weight.data[WIDTH : 2 * WIDTH] *= 1.01
        else:
            weight.register_hook(lambda gradient: gradient * 1.2)

    report = padiff.compare_runs(trained(torch_layer(), "sketch").run, trained(torch_layer(), "sketch", more).run)
    first = report.first_diff
    assert (first.step, first.stage, first.reference) == (0, stage, "self_attn")
    assert first.slot.startswith("in_proj_weight")


def test_against_three_layers_the_parts_of_a_sketch_are_listed_and_are_no_diff():
    model = torch_layer()
    twin = paddle.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0)
    twin.eval()
    padiff.assign_weight(model, twin)
    reference = trained(model, "sketch").run
    optimizer = paddle.optimizer.Adam(1e-3, parameters=twin.parameters())
    rng = np.random.default_rng(0)
    with padiff.record(twin, optimizer=optimizer, detail="sketch") as recorder:
        for _ in range(4):
            x = paddle.to_tensor(rng.normal(size=(BATCH, TOKENS, WIDTH)).astype(np.float32))
            (twin(x) * paddle.to_tensor(TARGET)).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            recorder.try_dump()
    report = padiff.compare_runs(reference, recorder.run)
    assert report, report.first_diff
    assert any("in_proj" in site for site in report.coverage.unmeasured)
    assert any("not compared" in line for line in coverage_lines(report))

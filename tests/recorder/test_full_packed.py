"""Full tensors of packed steps, and what the optimizer changed, which is subtracted while it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import padiff
from padiff.dump import open_run
from padiff.dump.safetensors import write_safetensors
from padiff.recorder.tensor_copy import Difference


def some(seed, size, dtype):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_difference_is_worked_out_in_pieces(tmp_path, dtype):
    after, before = some(0, 200_001, dtype), some(1, 200_001, dtype)
    write_safetensors(tmp_path / "a.safetensors", {"0": Difference(after, before).to_store()}, {})
    expected = after.astype(np.float64) - before.astype(np.float64)
    np.testing.assert_allclose(load_file(tmp_path / "a.safetensors")["0"], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("pack", [True, False])
def test_differences_that_are_no_numbers_raise_no_error(tmp_path, pack):
    model = torch.nn.Linear(128, 200)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model.weight[0, 0] = torch.inf
    recorder = padiff.record(model, tmp_path, optimizer=optimizer, detail="full", pack=pack)
    with np.errstate(all="raise"), recorder as rec:
        model(torch.randn(64, 128))[:, 1:].square().mean().backward()  # the infinite weight has a gradient of 0
        optimizer.step()
        rec.try_dump()
    (update,) = (r for r in open_run(tmp_path).steps(0)[0].records if (r.stage, r.slot) == ("update", "weight"))
    assert np.isnan(update.value[0, 0])


@pytest.mark.parametrize("times", [1, 2], ids=["one step", "an optimizer that steps twice"])
def test_a_run_has_what_memory_keeps(tmp_path, times):
    found = []
    for place in (tmp_path / "run", None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 200), torch.nn.ReLU(), torch.nn.Linear(200, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with padiff.record(model, place, optimizer=optimizer, detail="full", pack=place and True) as rec:
            for _ in range(4):
                model(torch.randn(64, 128)).square().mean().backward()
                for _ in range(times):
                    optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
        found.append(rec.run if place is None else open_run(place))
    for number in range(4):
        ours, expected = (run.steps(number)[0].records for run in found)
        assert [record.site for record in ours] == [record.site for record in expected]
        for one, other in zip(ours, expected):
            np.testing.assert_array_equal(one.value, other.value, str(one.site))
    for path in (tmp_path / "run").glob("steps/*/rank_0/step.safetensors"):
        load_file(path)

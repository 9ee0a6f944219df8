"""Weights that weight norm and spectral norm compute: torch's parametrizations, its older hooks, and paddle's hooks."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff
from padiff import compare_runs

tn, pn = torch.nn, paddle.nn
X = np.random.default_rng(0).normal(size=(2, 2, 7)).astype("float32")

NORMS = {
    "weight": (tn.utils.parametrizations.weight_norm, lambda layer: pn.utils.weight_norm(layer, dim=_outputs(layer))),
    "older weight": (tn.utils.weight_norm, lambda layer: pn.utils.weight_norm(layer, dim=_outputs(layer))),
    "spectral": (tn.utils.parametrizations.spectral_norm, pn.utils.spectral_norm),
    "older spectral": (tn.utils.spectral_norm, pn.utils.spectral_norm),
}


def _outputs(layer):
    return 1 if isinstance(layer, pn.Linear) else 0


def nets(name):
    """Return two nets of the same layers; only some of them are normalised, and all biases have one shape."""
    ours, theirs = NORMS[name]
    torch.manual_seed(1)
    paddle.seed(2)
    with torch.no_grad():
        first = tn.Sequential(
            ours(tn.Conv1d(2, 8, 3)), tn.ReLU(), ours(tn.Conv1d(8, 8, 3)), tn.ReLU(), tn.Conv1d(8, 8, 1), tn.Flatten(),
            ours(tn.Linear(24, 8)), tn.Linear(8, 3),
        )  # fmt: skip
    second = pn.Sequential(
        theirs(pn.Conv1D(2, 8, 3)), pn.ReLU(), theirs(pn.Conv1D(8, 8, 3)), pn.ReLU(), pn.Conv1D(8, 8, 1), pn.Flatten(),
        theirs(pn.Linear(24, 8)), pn.Linear(8, 3),
    )  # fmt: skip
    return first, second


@pytest.mark.filterwarnings("ignore:torch.nn.utils.weight_norm is deprecated")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("from_torch", [True, False])
def test_normalised_weights_are_carried_to_the_other_framework(name, from_torch):
    first, second = nets(name)
    # The iterations of spectral norm have converged, so that both frameworks' weights are those of the same vectors.
    for _ in range(50):
        first(torch.tensor(X)), second(paddle.to_tensor(X))
    assert padiff.assign_weight(first, second) if from_torch else padiff.assign_weight(second, first)
    first.eval(), second.eval()
    outputs = first(torch.tensor(X)).detach().numpy(), second(paddle.to_tensor(X)).numpy()
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


def trained(kit, net, optimizer):
    with padiff.record(net, optimizer=optimizer) as rec:
        for _ in range(3):
            net(kit.tensor(X)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad() if kit is TORCH else optimizer.clear_grad()
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("rate", [0.05, 0.06])
def test_trainings_of_normalised_weights_match_and_a_fault_is_found_in_them(rate, tmp_path):
    first, second = nets("weight")
    padiff.assign_weight(first, second)
    ours = trained(TORCH, first, torch.optim.SGD(first.parameters(), lr=0.05))
    theirs = trained(PADDLE, second, paddle.optimizer.SGD(rate, parameters=second.parameters()))
    report = compare_runs(ours, theirs)
    assert report.passed is (rate == 0.05)
    compared = {pair.anchor.site for pair in (diff.pair for diff in report.diffs)}
    assert {"0.parametrizations.weight/update/original0", "0/forward/output.0"} <= compared
    if not report.passed:
        assert report.first_diff.stage in ("update", "optimizer")

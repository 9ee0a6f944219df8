"""When a patch counts as progress, where several settings differ at one place."""

from __future__ import annotations

import pytest
import torch
from kit.trainings import optimizer_of, trained
from torch import nn

from padiff.compare import compare_runs
from padiff_cli.fix.session import _grows, _helps

pytestmark = pytest.mark.slow

RIGHT = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}


@pytest.fixture(scope="module")
def report_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def report(**settings):
        for name, values in (("reference", RIGHT), ("candidate", {**RIGHT, **settings})):
            trained("torch", optimizer_of("torch", "Adam", values), folder=str(folder / name), existing="overwrite")
        result = compare_runs(str(folder / "reference"), str(folder / "candidate"), workers=1)
        _ = result.failed, [diff.excess for diff in result.diffs if diff.figures is not None]
        return result

    return report


def test_one_of_two_settings_that_is_right_now_is_progress(report_of):
    before = report_of(lr=2e-2, betas=(0.9, 0.999))
    assert _helps(before, before.first_diff, report_of(lr=2e-2))
    assert _helps(before, before.first_diff, report_of(betas=(0.9, 0.999)))


@pytest.mark.parametrize("after", [{"lr": 3e-2, "betas": (0.9, 0.999)}, {"lr": 2e-2, "eps": 1e-3}])
def test_a_setting_that_is_wrong_otherwise_is_none(report_of, after):
    before = report_of(lr=2e-2, betas=(0.9, 0.999))
    assert not _helps(before, before.first_diff, report_of(**after))


def test_a_larger_error_at_the_place_of_a_fault_is_none(report_of):
    fault = report_of(lr=2e-2).first_diff
    assert _grows(fault, report_of(lr=3e-2))
    assert not _grows(fault, report_of(lr=1.5e-2)) and not _grows(fault, report_of())


class Ended(nn.Module):
    """Calls the last function itself, where the reference's part has it as a layer."""

    def __init__(self, parts):
        super().__init__()
        self.first, self.second = parts

    def forward(self, x):
        return torch.sigmoid(self.second(self.first(x)))


def _parts(activation, end=()):
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(5, 7), activation())
    return first, nn.Sequential(nn.Linear(7, 6), activation(), nn.Linear(6, 3), *end)


def test_layers_that_end_elsewhere_once_they_agree_are_no_loss(tmp_path):
    """The parts are compared as wholes only while their insides differ."""
    make = optimizer_of("torch", "SGD", {"lr": 0.1})
    nets = {
        "reference": nn.Sequential(*_parts(nn.SiLU, (nn.Sigmoid(),))),
        "before": Ended(_parts(nn.GELU)),
        "after": Ended(_parts(nn.SiLU)),
        "relu": Ended(_parts(nn.ReLU)),
    }
    for name, net in nets.items():
        trained("torch", make, net=net, folder=str(tmp_path / name))
    before, after, relu = (compare_runs(str(tmp_path / "reference"), str(tmp_path / name), workers=1)
                           for name in ("before", "after", "relu"))  # fmt: skip
    assert after.passed and after.coverage.cut_elsewhere and after.coverage.compared < before.coverage.compared
    assert _helps(before, before.first_diff, after)
    assert not _helps(before, before.first_diff, relu)

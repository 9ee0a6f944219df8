"""When a patch counts as progress, where several settings differ at one place."""

from __future__ import annotations

import pytest
from kit.trainings import optimizer_of, trained

from padiff.compare import compare_runs
from padiff_cli.fix.session import _helps

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

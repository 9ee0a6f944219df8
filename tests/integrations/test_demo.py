"""`padiff demo`, whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import padiff
import padiff_demo


def test_the_demo_passes_the_right_port_and_names_the_faulty_layer_on_both_sides(tmp_path):
    reported = io.StringIO()
    with pytest.warns(RuntimeWarning, match="is set differently"):
        assert padiff_demo.run(tmp_path / "demo", Console(file=reported, width=400)) == 0
    text = reported.getvalue()
    assert "layer net.stem.1 (BatchNorm2d) against bn1 (BatchNorm2D)" in text
    assert "step 8, stage weight" in text
    folder = tmp_path / "demo"
    assert padiff.compare_runs(folder / "torch", folder / "paddle").passed
    assert padiff.compare_runs(folder / "torch", folder / "paddle-fault").first_diff.candidate == "bn1"

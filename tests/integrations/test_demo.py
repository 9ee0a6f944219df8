"""`padiff demo`, whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import padiff
import padiff_demo


def test_the_demo_passes_the_right_port_and_names_the_faulty_layer_on_both_sides(tmp_path):
    reported = io.StringIO()
    shown = pytest.warns(RuntimeWarning, match="it shows now: step 8, weight: net.stem.1.running_mean against bn1")
    with pytest.warns(RuntimeWarning, match="set differently"), shown:
        assert padiff_demo.run(tmp_path / "demo", Console(file=reported, width=400)) == 0
    text = reported.getvalue()
    assert "DIFFER  step 8, weight: net.stem.1.running_mean against bn1" in text
    # The line of the demo that gives the layer's argument its value.
    assert "--> padiff_demo/demo.py:" in text and 'folder / "paddle-fault", momentum=0.1' in text
    folder = tmp_path / "demo"
    assert padiff.compare_runs(folder / "torch", folder / "paddle").passed
    assert padiff.compare_runs(folder / "torch", folder / "paddle-fault").first_diff.candidate == "bn1"

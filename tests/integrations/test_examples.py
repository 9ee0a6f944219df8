"""The examples run, and say what they promise."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_loops_of_ones_own_part_at_the_epsilon(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("own_loops", EXAMPLES / "own_loops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = module.main(tmp_path)
    first = report.first_diff
    assert (first.step, first.stage, first.reference, first.candidate) == (0, "forward", "1", "1")
    assert "eps 1e-05 against 0.001" in capsys.readouterr().out
    # Whoever tries an example tries it twice. Its first weights are drawn anew.
    again = module.main(tmp_path).first_diff
    assert (again.step, again.stage, again.reference) == (first.step, first.stage, first.reference)
    assert "eps 1e-05 against 0.001" in capsys.readouterr().out

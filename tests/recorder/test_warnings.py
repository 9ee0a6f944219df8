"""Warnings are lines on standard error, whatever the training does with those of Python."""

from __future__ import annotations

import pytest
from hard.children import run_script

START = {
    "torch": "import torch as fw; optimizer = fw.optim.SGD(model.parameters(), lr=0.1)",
    "paddle": "import paddle as fw; optimizer = fw.optimizer.SGD(0.1, parameters=model.parameters())",
}
FORGOTTEN = """
with padiff.record(model, "run", optimizer=optimizer):
    for _ in range(2):
        model(fw.ones([1, 2])).sum().backward()
        optimizer.step()
print("trained")
"""


@pytest.mark.parametrize("filters", ["default", "ignore", "error"])
@pytest.mark.parametrize("framework", START)
def test_no_filter_hides_a_warning_or_raises_it_in_the_training(framework, filters, tmp_path, monkeypatch):
    monkeypatch.setenv("PADIFF_QUIET", "1")
    imports, optimizer = START[framework].split("; ")
    script = tmp_path / "train.py"
    script.write_text(
        f"{imports}\nimport padiff, warnings\nwarnings.simplefilter({filters!r})\n"
        f"model = fw.nn.Linear(2, 2)\n{optimizer}\n{FORGOTTEN}"
    )
    done = run_script(tmp_path, script)
    assert done.stdout.splitlines()[-1] == "trained", done.stderr
    said = [line for line in done.stderr.splitlines() if "padiff" in line]
    assert said == [
        "padiff: try_dump() was never called, so 2 optimizer steps are recorded as one step. Call rec.try_dump() "
        "at the end of each step"
    ]

"""What a TensorBoard shows of a log folder by itself, without the tab."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path

import pytest

from padiff.records import Both
from padiff_hooks.stream import DiffStream
from page.reports import step_reports
from page.tensorboards import tensorboard

pytestmark = pytest.mark.slow

NAMES = Both("/runs/torch", "/runs/paddle")


def listed(address: str, plugin: str) -> dict:
    with urllib.request.urlopen(f"{address}data/plugin/{plugin}/tags") as answer:
        return json.loads(answer.read())


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    with contextlib.closing(DiffStream(tmp_path / "tb", NAMES)) as stream:
        for report in step_reports():
            stream.write(report)
    return tmp_path / "tb"


def test_a_cold_tensorboard_opens_with_the_verdict(tab, logs, tmp_path):
    (tmp_path / "installed").mkdir()
    with tensorboard(logs, tmp_path / "installed") as address:
        scalars = listed(address, "scalars")
        drawn = listed(address, "images")
        reported = listed(address, "text")
        tab.open(address, 1500, 1100)
        tab.wait("['forward_rel_l2', '/heat_map', '/loss'].every(one => document.body.innerText.includes(one))", 60)
        shown = tab.run("document.body.innerText")
    cards = {tag for tags in scalars.values() for tag in tags if tag.startswith("0_verdict/")}
    assert {"0_verdict/loss", "0_verdict/learning_rate", "0_verdict/times_allowed/forward"} <= cards
    assert drawn["diff"].keys() == {"0_verdict/heat_map"} and reported["diff"] == ["0_verdict/first_diff"]
    assert len(cards) + 2 <= 10
    layers = {tag for tag in scalars["diff"] if tag not in cards}
    assert "forward_rel_l2/000 fc1" in layers and all("_rel_l2/" in tag for tag in layers)
    groups = [shown.index(one) for one in ("0_verdict", "backward_rel_l2", "forward_rel_l2")]
    assert groups == sorted(groups)
    assert groups[0] < shown.index("/heat_map") < shown.index("/loss") < groups[1]

"""Lines whose figures are packed, as the page reads them: the same as `padiff_hooks.step_lines.read`."""

from __future__ import annotations

import contextlib
import json

import pytest

from padiff.records import Both
from padiff.report_formats import to_json
from padiff_hooks.step_lines import StepLines
from padiff_hooks.stream import DiffStream
from page.reports import STEP, step_reports
from page.tensorboards import tensorboard

pytestmark = pytest.mark.slow

READY = "window.padiff && padiff.heat.frames.length"
READ = """
(texts => {
  const store = new padiff.store.constructor(() => null);
  const packed = store.packed;
  return texts.map((text, k) => {
    const line = JSON.parse(text);
    store.addLine(line, k);
    const whole = packed.whole(line);
    const times = store.sites.map(site => site.times[k]);
    return [whole, times, store.sites.map(site => site.reference), store.passed[k]];
  });
})(%s)
"""


def lines(folded_after: int) -> list[str]:
    """The lines of six steps, as a log folder has them."""
    made = StepLines(folded_after=folded_after)
    return [json.dumps(made.line(report, to_json(report))) for report in step_reports()]


@pytest.mark.parametrize("folded_after", [1 << 40, 0], ids=["figures", "folded"])
def test_the_page_reads_what_python_reads(tab, file, folded_after):
    texts = lines(folded_after)
    assert all('"packed"' in text for text in texts)
    tab.open(file)
    tab.wait(READY)
    found = tab.run(READ % json.dumps(texts))
    reader = StepLines()
    for text, (whole, times, sites, passed), report in zip(texts, found, step_reports()):
        line = json.loads(text)
        reader.learn(line)
        expected = reader.whole(line)
        assert passed == report.passed and len(whole["diffs"]) == len(expected["diffs"]) == len(report.diffs)
        by_site = dict(zip(sites, times))
        for one, other, diff in zip(whole["diffs"], expected["diffs"], report.diffs):
            reason = one.pop("allowed_because", None)
            assert reason is None or folded_after == 0
            assert one.keys() == other.keys() and one["reference"] == other["reference"]
            for name in ("max_abs", "rel_l2", "times"):
                if isinstance(other.get(name), float):
                    assert one[name] == pytest.approx(other[name], rel=1e-3, abs=0)
            if other.get("judged"):
                assert one["judged"]["limit"] == pytest.approx(other["judged"]["limit"], rel=1e-3)
            if diff.judgement is not None:
                assert by_site[one["reference"]] == pytest.approx(diff.excess, rel=8e-3)
    assert [passed for *_, passed in found] == [number != STEP for number in range(6)]


def test_a_card_tells_the_figures_of_a_packed_row(tab, content, tmp_path):
    (tmp_path / "installed").mkdir()
    with contextlib.closing(DiffStream(tmp_path / "log", Both("/runs/torch", "/runs/paddle"))) as stream:
        for report in step_reports():
            stream.write(report)
    with tensorboard(tmp_path, tmp_path / "installed") as address:
        frame = "document.querySelector('iframe').contentWindow"
        tab.open(f"{address}#padiff", 1500, 1000)
        tab.wait(f"{frame}.padiff?.store.steps.length === 6", 60)
        pick = f"{frame}.padiff.store.sites.find(one => one.reference === 'fc1/grad/weight')"
        tab.run(f"{frame}.padiff.select({{ site: {pick}, column: 1 }})")
        tab.wait(f"{frame}.document.querySelector('#card .stats')")
        shown = tab.run(f"{frame}.document.querySelector('#card').innerText")
    [diff] = [one for one in content["steps"][1]["diffs"] if one["reference"] == "fc1/grad/weight"]
    assert "within its limit" in shown and f"{diff['l2']['reference']:.3g}"[:3] in shown
    assert diff["judged"]["allowed_because"][:20].lower() in shown.lower()

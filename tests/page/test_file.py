"""The page in one file, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.browser import Tab

from padiff.report_formats import page_words
from padiff_hooks.step_lines import page_lines
from padiff_page import page_parts
from page.conftest import written
from page.reports import CANDIDATE, EVIL, REFERENCE, STEP, STEPS, content_of, large

# In a browser.
pytestmark = pytest.mark.slow

READY = "window.padiff && padiff.heat.frames.length > 0 && document.querySelector('#verdict .stats') !== null"
# A minus as it is printed.
MINUS = "\u2212"
HEAT = "document.querySelector('.heat').getBoundingClientRect()"


def opened(tab: Tab, address: str, **options) -> Tab:
    tab.open(address, **options)
    tab.wait(READY)
    return tab


def text(tab: Tab, selector: str) -> str:
    return tab.run(f"document.querySelector({json.dumps(selector)}).innerText")


def cell(tab: Tab, layer: str, step: int) -> tuple[float, float]:
    """Where in the window a cell is; brought into view."""
    tab.run("document.querySelector('.heat').scrollIntoView({block: 'center'})")
    where = tab.run(
        f"(() => {{ const box = {HEAT}; const at = padiff.heat.spot(padiff.rowAt({json.dumps(layer)}), "
        f"padiff.store.columns.get({step})); return [box.left + at.x, box.top + at.y]; }})()"
    )
    return where[0], where[1]


def colour(tab: Tab, layer: str, step: int) -> list[int]:
    """The pixel in the middle of a cell."""
    return tab.run(
        f"(() => {{ const at = padiff.heat.spot(padiff.rowAt({json.dumps(layer)}), padiff.store.columns.get({step}));"
        "return [...padiff.heat.base.getContext('2d').getImageData(at.x, at.y, 1, 1).data].slice(0, 3); })()"
    )


def test_the_verdict_is_there_and_nothing_is_wrong(tab, file, content):
    opened(tab, file)
    first = content["first_diff"]
    verdict = text(tab, "#verdict")
    for reported in (f"Step {STEP}", "forward", "fc2", "head", first["slot"], first["why"]["sentence"][1:]):
        assert reported in verdict
    shown = next(d for d in content["steps"][STEP]["diffs"] if d["reference"] == REFERENCE)
    assert f"{shown['judged']['value']:.3g}" in verdict and f"{shown['max_abs']:.3g}" in verdict
    assert tab.troubles == []


def test_the_first_cell_that_is_beyond_is_where_the_json_says(tab, file):
    opened(tab, file)
    where = tab.run(
        "(({site, column}) => [site.reference, site.candidate, padiff.store.steps[column]])(padiff.store.firstCell())"
    )
    assert where == [REFERENCE, CANDIDATE, STEP]
    assert tab.run("padiff.heat.first.node.path") == "fc2" and tab.run("padiff.stage") == "forward"
    # Orange to red there, blue or green in the step before: it was drawn there, too.
    red, _, blue = colour(tab, "fc2", STEP)
    assert red > blue + 40
    red, _, blue = colour(tab, "fc2", STEP - 1)
    assert red <= blue
    red, _, blue = colour(tab, "fc1", STEP)
    assert red <= blue


def test_a_click_on_a_cell_opens_its_card(tab, file, content):
    opened(tab, file)
    tab.click(*cell(tab, "fc2", STEP))
    tab.wait("document.querySelector('#card .stats')")
    card = text(tab, "#card")
    shown = next(d for d in content["steps"][STEP]["diffs"] if d["reference"] == REFERENCE)
    excess = shown["judged"]["value"] / shown["judged"]["limit"]
    assert "fc2" in card and "head" in card and f"step {STEP}" in card and "first difference" in card
    said = text(tab, "#card .excess b").split()[0].replace(MINUS, "-")
    assert float(said) == pytest.approx(excess, rel=1e-2)
    assert shown["judged"]["allowed_because"][1:] in card
    assert f"first in step {STEP}" in card
    # Its picture: both distributions, and the elements that are furthest apart.
    assert tab.run("document.querySelectorAll('#card .area').length") == 2
    worst = content["first_diff"]["picture"]["worst"][0]
    assert f"[{', '.join(map(str, worst['index']))}]" in card
    tab.press("Escape")
    tab.wait("document.querySelector('#card').hidden")
    assert tab.troubles == []


def test_the_layer_under_the_pointer_lights_its_partner(tab, file):
    opened(tab, file)
    rows = {
        side: f"document.querySelector('.model.{side} .row[data-path=\"{path}\"]')"
        for side, path in (("reference", "fc1"), ("candidate", "body.0"))
    }
    for here, there in (("reference", "candidate"), ("candidate", "reference")):
        tab.run(f"{rows[here]}.scrollIntoView({{block: 'center'}})")
        x, y = tab.run(f"(b => [b.left + 60, b.top + b.height / 2])({rows[here]}.getBoundingClientRect())")
        tab.move(x, y)
        tab.wait(f"{rows[there]}.classList.contains('lit')")
        assert tab.run("document.querySelectorAll('.row.lit').length") == 2
        tab.move(2, 2)
        tab.wait("document.querySelectorAll('.row.lit').length === 0")
    # A row of the heat map lights both.
    tab.move(*cell(tab, "fc1", 1))
    tab.wait(f"{rows['candidate']}.classList.contains('lit') && {rows['reference']}.classList.contains('lit')")
    assert "fc1" in text(tab, ".tip")


def test_a_name_that_is_markup_is_shown_as_text(tab, tmp_path):
    opened(tab, written(content_of(evil=True), tmp_path))
    tab.run("padiff.foldAll(true); padiff.select(padiff.store.firstCell()); null")
    tab.wait("document.querySelector('#card .stats')")
    names = tab.run("[...document.querySelectorAll('.row code, .names b, .row .type')].map(one => one.textContent)")
    assert EVIL in names and f"torch {EVIL}" in names
    # The page's own two scripts, and none of the report.
    assert tab.run("document.querySelectorAll('script').length") == 2
    assert tab.run("[...document.querySelectorAll('script')].some(one => one.textContent.startsWith('alert'))") is False
    tab.run(f"padiff.search.input.value = {json.dumps(EVIL)}; padiff.search.input.dispatchEvent(new Event('input'))")
    assert EVIL in text(tab, ".results")
    assert tab.run("document.title").count(EVIL) == 2
    assert tab.troubles == []


def test_an_address_leads_to_a_cell_and_back_leads_away(tab, file):
    opened(tab, file)
    tab.click(*cell(tab, "fc2", STEP))
    tab.wait("location.hash.includes('step=3')")
    first = tab.run("location.href")
    tab.press("ArrowRight")
    tab.wait("location.hash.includes('step=4') && document.querySelector('#card .where').innerText.includes('step 4')")
    tab.run("history.back()")
    tab.wait("document.querySelector('#card .where').innerText.includes('step 3')")
    tab.run("history.back()")
    tab.wait("document.querySelector('#card').hidden")
    tab.open("about:blank")
    opened(tab, first)
    tab.wait("document.querySelector('#card .where')?.innerText.includes('step 3')")
    assert "fc2" in text(tab, "#card") and tab.troubles == []


def test_keys_move_open_and_close(tab, file):
    opened(tab, file)
    tab.press("/")
    assert tab.run("document.activeElement === padiff.search.input") is True
    tab.do("Input.insertText", text="fc1")
    tab.wait("!padiff.search.results.hidden")
    tab.press("Enter")
    tab.wait("document.querySelector('#card .layer')?.innerText.includes('fc1')")
    assert tab.run("padiff.cursor.node.path") == "fc1"
    tab.press("Escape")
    tab.wait("document.querySelector('#card').hidden")
    tab.press("ArrowDown")
    tab.press("ArrowRight")
    tab.press("Enter")
    tab.wait("!document.querySelector('#card').hidden && document.querySelector('#card .stats')")
    assert tab.run("padiff.cursor.node.path") == "act"
    assert tab.troubles == []


def test_a_stage_is_chosen_by_its_tile(tab, file, content):
    opened(tab, file)
    tiles = tab.run("[...document.querySelectorAll('.stages button')].map(one => one.dataset.stage)")
    assert tiles == ["input", "weight", "forward", "loss", "backward", "grad", "update", "all"]
    tab.run("document.querySelector('[data-stage=weight]').click()")
    assert tab.run("padiff.heat.stage") == "weight" and "stage=weight" in tab.run("location.hash")
    differ = sum(not diff["passed"] for step in content["steps"] for diff in step["diffs"])
    assert f"{differ} of" in text(tab, "[data-stage=all]")


def test_it_follows_the_light_and_asks_nobody_for_anything(tab, file):
    opened(tab, file)
    light = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.dark(True)
    tab.wait(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(light)}")
    assert tab.run("performance.getEntriesByType('resource').length") == 0
    assert tab.troubles == []


def test_clean_runs_say_so(tab, tmp_path):
    from kit.records import toy_run

    from padiff.compare import compare_runs
    from padiff.report_formats import to_json

    report = compare_runs(toy_run(range(STEPS)), toy_run(range(STEPS), paddle=True))
    opened(tab, written(json.loads(json.dumps(to_json(report))), tmp_path))
    assert "The runs match in 6 steps" in text(tab, "#verdict")
    assert f"{report.coverage.compared}" in text(tab, "#verdict") and tab.troubles == []


def test_json_of_before_the_page_is_read_as_well(tab, tmp_path):
    content = content_of()
    del content["models"]
    for name in ("site", "picture"):
        del content["first_diff"][name]
    for step in content["steps"]:
        for diff in step["diffs"]:
            for name in ("worst", "shape"):
                diff.pop(name, None)
    opened(tab, written(content, tmp_path))
    assert tab.run("padiff.heat.first.node.path") == "fc2"
    assert "fc2" in text(tab, "#verdict") and tab.troubles == []


def test_a_long_report_is_packed_and_shows_the_same(tab, tmp_path):
    content = content_of()
    whole, packed = tmp_path / "whole.html", tmp_path / "packed.html"
    whole.write_text("".join(page_parts(content, page_lines(content["steps"]))), encoding="utf-8")
    packed.write_text("".join(page_parts(content, page_lines(content["steps"], whole_bytes=0))), encoding="utf-8")
    seen = []
    for one in (whole, packed):
        opened(tab, one.as_uri())
        cells = tab.run("padiff.store.sites.map(one => [one.reference, one.firstBeyond, [...one.times].slice(0, 6)])")
        tab.run("padiff.select(padiff.store.firstCell())")
        tab.wait("document.querySelector('#card .stats')")
        seen.append((cells, text(tab, "#card"), text(tab, "#verdict")))
        assert tab.troubles == []
        tab.open("about:blank")
    assert seen[0][1:] == seen[1][1:]
    for (site, beyond, times), (other, too, rounded) in zip(seen[0][0], seen[1][0]):
        assert (site, beyond) == (other, too)
        assert rounded == pytest.approx(times, rel=8e-3, nan_ok=True)


def test_a_card_tells_where_both_sides_call_the_layer(tab, tmp_path):
    content = content_of()
    content["models"]["stacks"] = {
        "reference": {
            "frames": [
                {"file": "train.py", "line": 7, "function": "main", "code": "loss = model(x)"},
                {"file": "net.py", "line": 31, "function": "forward", "code": f"return self.fc2(x) # {EVIL}"},
            ],
            "layers": {"fc2": [0, 1]},
        },
        "candidate": {
            "frames": [{"file": "paddle_net.py", "line": 12, "function": "forward", "code": "out = self.head(a)"}],
            "layers": {"head": [0]},
        },
    }
    opened(tab, written(content, tmp_path))
    tab.run("padiff.select(padiff.store.firstCell())")
    tab.wait("document.querySelector('#card .stacks')")
    shown = text(tab, "#card .stacks").split("\n")
    assert shown == [
        "Where it is called",
        "reference",
        "train.py:7 main",
        "loss = model(x)",
        "net.py:31 forward",
        f"return self.fc2(x) # {EVIL}",
        "candidate",
        "paddle_net.py:12 forward",
        "out = self.head(a)",
    ]
    # Another layer, of which none was recorded.
    tab.run("padiff.select({ site: padiff.store.sites.find(one => one.layer === 'act'), column: 0 })")
    tab.wait("document.querySelector('#card .sides').innerText.includes('act')")
    assert not tab.run("Boolean(document.querySelector('#card .stacks'))") and tab.troubles == []


def test_faults_that_do_not_follow_are_marked_where_the_report_tells_them(tab, tmp_path):
    content = content_of()
    for step in content["steps"]:
        for diff in step["diffs"]:
            if not diff["passed"]:
                diff["standing"] = "follows"
    first = next(d for d in content["steps"][STEP]["diffs"] if d["reference"] == REFERENCE)
    other = next(d for d in content["steps"][STEP + 1]["diffs"] if d["reference"] == "fc1/grad/weight")
    first["standing"] = "first"
    other |= {"passed": False, "standing": "new"}
    content["independent"] = [{"message": f"A second fault {EVIL}", "step": STEP + 1, "stage": "grad"}]
    content["first_diff"]["recomputed"] = {"text": "The candidate is off."}
    opened(tab, written(content, tmp_path))
    verdict = text(tab, "#verdict")
    assert "differ" in verdict and f"A second fault {EVIL}" in verdict and "The candidate is off." in verdict
    assert tab.run("padiff.store.further.map(one => [one.node.path, one.stage, padiff.store.steps[one.column]])") == [
        ["fc1", "grad", STEP + 1]
    ]
    tab.run("padiff.select({site: padiff.store.sites.find(s => s.reference === 'fc1/grad/weight'), column: 4})")
    tab.wait("document.querySelector('#card .chip')?.innerText === 'another fault'")
    assert tab.troubles == []


def test_the_lines_of_code_are_shown_as_text_with_the_part_that_differs_marked(tab, tmp_path):
    content = content_of()
    code = f"self.norm = nn.LayerNorm(8, eps=1e-3)  # {EVIL}"
    span = [code.index("eps"), code.index(")")]
    line = {"file": "train.py", "line": 9, "code": code, "span": span}
    content["diagnostic"]["places"] = {"reference": {**line, "file": "before.py", "span": None}, "candidate": line}
    opened(tab, written(content, tmp_path))
    shown = tab.run("[...document.querySelectorAll('#verdict .lines > div')].map(one => one.innerText)")
    assert [one.split("\n")[0] for one in shown] == ["candidate train.py:9", "reference before.py:9"]
    assert all(one.endswith(code) for one in shown)
    assert tab.run("[...document.querySelectorAll('#verdict mark')].map(one => one.innerText)") == ["eps=1e-3"]
    # A diagnostic of another step says nothing of this one.
    content["diagnostic"]["step"] = STEP + 1
    opened(tab, written(content, tmp_path))
    assert tab.run("document.querySelectorAll('#verdict .lines').length") == 0 and tab.troubles == []


@pytest.mark.slow
def test_a_report_as_large_as_a_resnet_s_is_small_and_opens_soon(tab, tmp_path):
    address = written(large(1000, 20), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 5e6
    opened(tab, address)
    assert tab.run("padiff.store.sites.length") >= 1000 and tab.run("padiff.store.steps.length") == 20
    # Some tenths of a second on an idle machine; tests share theirs.
    assert tab.run("performance.now()") < 10_000


FRAMES = (Path(__file__).parent / "frames.js").read_text(encoding="utf-8")


@pytest.mark.slow
def test_three_thousand_layers_by_ten_thousand_steps_stay_fluid(tab, file):
    opened(tab, file)
    found = tab.run(FRAMES)
    assert found["cells"] == 30_000_000 and found["frames"] > 60
    assert found["median"] < 50, found
    # One frame in twenty may wait for the machine's other tests.
    assert found["most"] < 100, found


def test_a_report_in_chinese_has_chinese_labels_and_english_names(tab, tmp_path, content):
    head = {key: value for key, value in content.items() if key != "steps"}
    words = page_words(head, "zh")
    assert page_words(head, "en") == {} and words["Cause, proven"] == "原因，已证实"
    file = tmp_path / "zh.html"
    file.write_text("".join(page_parts({**head, "words": words}, content["steps"])), encoding="utf-8")
    opened(tab, file.as_uri())
    assert tab.run("document.documentElement.lang") == "zh"
    verdict = text(tab, "#verdict")
    assert verdict.startswith(f"不一致\nstep {STEP}，前向")
    assert "Open this tensor" not in verdict and "打开这个张量" in verdict
    assert content["first_diff"]["slot"] in verdict and "fc2" in verdict
    assert text(tab, "#heat h2") == "各层与各 step" and "Layers" not in text(tab, "#models")
    assert "覆盖" in text(tab, "body") and "Coverage" not in text(tab, "body")
    assert tab.troubles == []

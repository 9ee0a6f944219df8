from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kit.records import (
    PADDLE_LAYERS,
    TORCH_LAYERS,
    info,
    linear,
    memory_run,
    planted,
    record,
    root,
    step,
    toy_run,
    toy_steps,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from padiff.compare import RunComparison
from padiff.errors import UsageError
from padiff.records import LOOP, Both, Report
from padiff_hooks import stream as stream_module
from padiff_hooks.heat_picture import HeatPicture
from padiff_hooks.scalars import Tagging, own_scalars_of
from padiff_hooks.step_lines import Rows, read
from padiff_hooks.stream import DiffStream
from padiff_hooks.tags import Numbered

NAMES = Both("/runs/torch", "/runs/paddle")
KINDS = ("reference", "candidate", "diff")


def reports(numbers, **rest) -> list[Report]:
    comparison = RunComparison(toy_run(numbers), toy_run(numbers, paddle=True, **rest))
    return [comparison.compare(number) for number in numbers]


def written(logdir: Path, made: list[Report], names=NAMES, tags="layers") -> None:
    stream = DiffStream(logdir, names, tags=tags)
    for report in made:
        stream.write(report)
    stream.close()


def events(logdir: Path, run: str) -> EventAccumulator:
    return EventAccumulator(str(logdir / run), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def kind(found: EventAccumulator, tag: str) -> str:
    """The card that TensorBoard shows of a tag."""
    return found.SummaryMetadata(tag).plugin_data.plugin_name


def points(logdir: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard shows them."""
    found = events(logdir, run)
    return {
        tag: [(e.step, float(e.tensor_proto.float_val[0])) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
        if kind(found, tag) == "scalars"
    }


def texts(logdir: Path) -> dict[int, str]:
    """Step -> text of the first diff."""
    found = events(logdir, "diff")
    if "0_verdict/first_diff" not in found.Tags()["tensors"]:
        return {}
    assert kind(found, "0_verdict/first_diff") == "text"
    return {e.step: e.tensor_proto.string_val[0].decode() for e in found.Tensors("0_verdict/first_diff")}


def lines(logdir: Path) -> list[dict]:
    return [json.loads(line) for line in (logdir / "diffs.jsonl").read_text().splitlines()]


STAGES = ("weight", "forward", "loss", "backward", "grad", "update")
VERDICT = {*(f"0_verdict/times_allowed/{stage}" for stage in STAGES), "0_verdict/heat_map"}
OWN = {"0_verdict/loss", "0_verdict/learning_rate"}


def test_the_first_group_is_the_verdict_with_ten_cards_and_then_each_layer_has_one_metric_a_stage(tmp_path):
    written(tmp_path, reports([0, 1], plant=planted("body.0/forward/output.0", lambda v: v + 1, at=1)))
    found = {run: set(events(tmp_path, run).Tags()["tensors"]) for run in KINDS}
    assert found["reference"] == found["candidate"] == OWN
    verdict = {tag for tag in found["diff"] if tag.startswith("0_verdict/")}
    assert verdict == VERDICT | {"0_verdict/first_diff"} and len(verdict | OWN) == 10
    layers = found["diff"] - verdict
    # The reference's names, numbered as they were run; the input and the loop are no layers that are run.
    assert {tag for tag in layers if tag.startswith("forward")} == {
        f"forward_rel_l2/{name}" for name in ("000 fc1", "001 act", "002 fc2", "003 (root)")
    }
    assert {tag.partition("/")[0] for tag in layers} == {f"{stage}_rel_l2" for stage in ("input", *STAGES)}
    assert {"loss_rel_l2/loss", "backward_rel_l2/000 fc1", "input_rel_l2/003 (root)"} <= layers
    assert min(tag.partition("/")[0] for tag in found["diff"]) == "0_verdict"


def test_times_allowed_cross_one_where_it_is_a_fault(tmp_path):
    made = reports([0, 1, 2], plant=planted("body.0/forward/output.0", lambda v: v + 1, at=1))
    written(tmp_path, made)
    found = points(tmp_path, "diff")
    for stage in STAGES:
        failed = [number for number, value in found[f"0_verdict/times_allowed/{stage}"] if value > 1]
        assert failed == [
            report.coverage.steps[0] for report in made if any(d.pair.stage == stage for d in report.failed)
        ]
    [planted_diff] = [d for d in made[1].failed if d.pair.anchor.site == "fc1/forward/output.0"]
    judged = planted_diff.judgement
    assert dict(found["0_verdict/times_allowed/forward"])[1] == pytest.approx(judged.value / judged.limit, rel=1e-6)


def test_inputs_that_differ_have_a_card_and_no_crossing_is_lost(tmp_path):
    wrong = planted("(root)/input/input.x", lambda v: v + 1)
    written(tmp_path / "at once", reports([0, 1], plant=wrong))
    found = points(tmp_path / "at once", "diff")
    assert found["0_verdict/times_allowed/input"][0][1] > 1
    assert (
        len({tag for run in KINDS for tag in events(tmp_path / "at once", run).Tags()["tensors"] if "0_v" in tag}) == 10
    )
    written(tmp_path / "later", reports([0, 1], plant=planted("(root)/input/input.x", lambda v: v + 1, at=1)))
    found = points(tmp_path / "later", "diff")
    assert "0_verdict/times_allowed/input" not in found
    assert [value > 1 for _, value in found["0_verdict/times_allowed/weight"]] == [False, True]


def test_endless_and_unknown_figures_have_points_that_a_chart_can_show(tmp_path):
    def plant(seen, number):
        return np.full_like(seen.value, np.nan) if seen.site == "head/forward/output.0" else None

    written(tmp_path, reports([0], plant=plant))
    assert points(tmp_path, "diff")["0_verdict/times_allowed/forward"] == [(0, 1e6)]


def test_all_tags_are_norms_of_each_run_and_maxima_too(tmp_path):
    written(tmp_path, reports([0, 1]), tags="all")
    diff = points(tmp_path, "diff")
    expected = {"forward_rel_l2/000 fc1", "forward_max_abs/001 act", "grad_rel_l2/002 fc2", "loss_rel_l2/loss"}
    assert expected | {"worst/forward_rel_l2"} <= set(diff)
    assert not [tag for tag in diff if "body" in tag]  # layers bear the reference's names
    for run in ("reference", "candidate"):
        norms = {"forward_l2/000 fc1", "weight_l2/002 fc2", "update_l2/000 fc1"}
        assert OWN | norms <= set(points(tmp_path, run))
    assert set(points(tmp_path, "reference")) == set(points(tmp_path, "candidate"))


@pytest.mark.parametrize("tags", ["everything", "", None, ["all"], 1])
def test_tags_that_there_are_not_are_refused(tmp_path, tags):
    with pytest.raises(UsageError, match=r'one of "layers", "worst", "all"; got'):
        DiffStream(tmp_path / "tb", NAMES, tags=tags)
    assert not (tmp_path / "tb").exists()


def wide(layers: int, wrong: dict[int, list[int]], steps: int = 3) -> list[Report]:
    """Reports of a net of so many layers in a row, some of which are wrong from a step on."""
    names = [f"l{k}" for k in range(layers)]
    tree = info(root(layers), *(linear(name, 2, 2) for name in names))
    rng = np.random.default_rng(0)

    def steps_of(bad: dict[int, list[int]]):
        for number in range(steps):
            hit = {k for since, some in bad.items() if since <= number for k in some}
            values = rng.normal(size=(layers, 8)).astype(np.float32) if not bad else kept[number]
            kept[number] = values
            yield step(
                number,
                [record(name, "forward", "output.0", values[k] * (1 + (k in hit))) for k, name in enumerate(names)],
            )

    kept: dict[int, np.ndarray] = {}
    reference = memory_run(tree, *list(steps_of({})))
    comparison = RunComparison(reference, memory_run(tree, *list(steps_of(wrong or {steps: []}))))
    return [comparison.compare(number) for number in range(steps)]


def curves(logdir: Path) -> set[str]:
    return {tag for tag in points(logdir, "diff") if not tag.startswith("0_verdict/")}


def test_the_worst_tags_are_of_ten_layers_a_stage_and_those_that_go_wrong_later_are_among_them(tmp_path):
    made = wide(30, {1: [20, 21, 22]})
    written(tmp_path / "whole", made, tags="worst")
    found = curves(tmp_path / "whole")
    assert {f"forward_rel_l2/0{k} l{k}" for k in (20, 21, 22)} <= found and len(found) == 8
    many = wide(30, {1: list(range(10, 30))})
    written(tmp_path / "at once", many, tags="worst")
    # The first step's choice is known after a restart.
    written(tmp_path / "parts", many[:1], tags="worst")
    written(tmp_path / "parts", many, tags="worst")
    assert curves(tmp_path / "parts") == curves(tmp_path / "at once") and len(curves(tmp_path / "parts")) == 10
    written(tmp_path / "many", wide(30, {0: list(range(4, 28))}), tags="worst")
    assert len(curves(tmp_path / "many")) == 10


def test_the_heat_map_is_drawn_now_and_then_and_shows_where_it_parts(tmp_path):
    import io

    from PIL import Image

    made = reports(range(6), plant=planted("head/forward/output.0", lambda v: v + 1, at=4))
    written(tmp_path, made)
    found = events(tmp_path, "diff")
    assert kind(found, "0_verdict/heat_map") == "images"
    drawn = found.Tensors("0_verdict/heat_map")
    # After 1, 2 and 4 steps, when it parts, and at the end.
    assert [one.step for one in drawn] == [0, 1, 3, 4, 5]
    width, height, content = drawn[-1].tensor_proto.string_val
    image = np.asarray(Image.open(io.BytesIO(content)))
    assert image.shape == (int(height), int(width), 3)
    # One cell beyond its limit (reds), none in the picture before.
    reds = [len(reds_of(Image.open(io.BytesIO(one.tensor_proto.string_val[2])))) for one in drawn]
    assert reds[2] == 0 and reds[3] > 20


def reds_of(image) -> np.ndarray:
    """Places of pixels of cells that are beyond their limits: beside the names, above the legend."""
    pixels = np.asarray(image)[:-66, 200:].astype(int)
    return np.argwhere((pixels[..., 0] - pixels[..., 2] > 100) & (pixels[..., 0] > 100))


def test_values_are_those_of_the_runs(tmp_path):
    shifted = planted("body.0/forward/output.0", lambda v: v + 0.5, at=1)
    written(tmp_path, reports([0, 1], plant=shifted), tags="all")
    steps = toy_steps([0, 1])
    values = {r.site: r.value.astype(np.float64) for r in steps[1].records}
    reference, candidate, diff = (points(tmp_path, run) for run in KINDS)
    assert reference["0_verdict/loss"][1] == (1, pytest.approx(float(values["(loop)/loss/loss"]), rel=1e-6))
    out = values["fc1/forward/output.0"]
    assert reference["forward_l2/000 fc1"][1][1] == pytest.approx(np.linalg.norm(out), rel=1e-6)
    assert candidate["forward_l2/000 fc1"][1][1] == pytest.approx(np.linalg.norm(out + 0.5), rel=1e-5)
    both = math.hypot(np.linalg.norm(values["fc1/grad/weight"]), np.linalg.norm(values["fc1/grad/bias"]))
    assert reference["grad_l2/000 fc1"][1][1] == pytest.approx(both, rel=1e-6)
    assert diff["forward_max_abs/000 fc1"][1][1] == pytest.approx(0.5, rel=1e-5)
    expected = 0.5 * math.sqrt(out.size) / np.linalg.norm(out)
    assert diff["forward_rel_l2/000 fc1"][1][1] == pytest.approx(expected, rel=1e-5)
    assert diff["worst/forward_rel_l2"][1][1] == pytest.approx(expected, rel=1e-5)
    assert diff["forward_rel_l2/000 fc1"][0][1] < 1e-6


def test_the_first_diff_is_a_text_and_so_is_that_others_follow(tmp_path):
    def plant(seen, number):
        site = {1: "body.0/forward/output.0", 3: "head/forward/output.0"}.get(number)
        return seen.value + 1 if seen.site == site else None

    made = reports([0, 1, 2, 3], plant=plant)
    written(tmp_path, made)
    found = texts(tmp_path)
    assert set(found) == {1, 3}
    assert found[1].startswith("```text\nDIFFER  step 1, forward: fc1 against body.0\n") and found[1].endswith("\n```")
    # The last text tells what those before it said, too: TensorBoard keeps few of a tag.
    assert found[3] == f"{found[1]}\n\nfollows: 1 of 22 pairs differ in step 3, as in those after it."


@pytest.mark.parametrize("restarts", [False, True])
def test_a_setting_is_placed_where_the_first_tensor_shows_it(tmp_path, restarts):
    """As a comparison of both steps places it."""

    def with_momentum(layers, path, value):
        settings = {"type": "BatchNorm1d", "kind": "batchnorm1d", "settings": {"momentum": value}}
        return [replace(layer, **settings) if layer.path == path else layer for layer in layers]

    reference = memory_run(info(*with_momentum(TORCH_LAYERS, "act", 0.1)), *toy_steps(range(3)))
    layers = with_momentum(PADDLE_LAYERS, "body.1", 0.9)
    steps = toy_steps(range(3), paddle=True, plant=planted("body.1/forward/output.0", lambda v: v + 1, at=1))
    comparison = RunComparison(reference, memory_run(info(*layers, framework="paddle"), *steps))
    made = [comparison.compare(number) for number in range(3)]
    for some in [made[:1], made] if restarts else [made]:
        written(tmp_path, some)
    found = texts(tmp_path)
    assert list(found) == [0, 1]
    assert "DIFFER  step 0, forward: momentum of act against body.1\n" in found[0]
    assert "DIFFER  step 1, forward: act against body.1\n" in found[1].removeprefix(found[0])
    assert "follows:" not in found[1]


def test_what_follows_is_said_once_also_over_a_restart(tmp_path):
    sites = ("body.0/forward/output.0", "head/forward/output.0", "body.0/backward/output.0", "head/grad/weight")

    def plant(seen, number):
        return seen.value + 1 if number and seen.site == sites[number % 4] else None

    made = reports(range(8), plant=plant)
    written(tmp_path, made[:5])
    # A comparison that is begun anew has not seen the first diff.
    written(tmp_path, reports(range(8), plant=plant))
    found = texts(tmp_path)
    first, follows = found.values()
    assert first.startswith("```text\nDIFFER  step 1, ") and "follows: " not in first
    # What an earlier process said is read from its lines.
    assert follows.startswith(first)
    assert follows.split("\n\n")[-1].startswith("follows: ")
    written(tmp_path, [reports([9], plant=planted(sites[0], lambda v: v + 1, at=9))[0]])
    assert set(texts(tmp_path)) == set(found)
    found = list(read(tmp_path))
    assert [line["first_diff"]["standing"] for line in found[1:]] == ["first", *["follows"] * 7]
    assert {diff.get("standing") for diff in found[-1]["diffs"]} == {None, "follows"}


def test_a_second_fault_is_an_event_of_its_own(tmp_path):
    from compare.followups.programs import reference, trained

    wrong = trained("torch", "towers", "sgd", frozenset(["norm:eps", "reload"]))
    comparison = RunComparison(reference("towers"), wrong)
    made = [comparison.compare(number) for number in comparison.common()]
    written(tmp_path, made)
    [fault] = made[3].independent
    assert not made[0].independent and fault.step == 3
    assert f"new difference: {fault.message}" in texts(tmp_path)[3]
    [reported] = lines(tmp_path)[4]["independent"]
    assert reported["message"] == fault.message and "independent" not in lines(tmp_path)[1]


def test_a_diff_that_stays_where_it_is_is_reported_once_also_over_a_restart(tmp_path):
    def plant(seen, number):
        return seen.value + 1 if seen.site == "body.0/forward/output.0" and number else None

    made = reports(range(6), plant=plant)
    written(tmp_path, made[:3])
    written(tmp_path, made)
    assert set(texts(tmp_path)) == {1}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_report_has_the_words_of_the_page_in_chinese(tmp_path, language, monkeypatch):
    monkeypatch.setenv("PADIFF_LANG", language)
    written(tmp_path, reports(range(3), plant=planted("head/forward/output.0", lambda v: v + 1, at=1)))
    words = json.loads((tmp_path / "report.json").read_text()).get("words", {})
    assert words.get("Layers by steps", "") == ("" if language == "en" else "各层与各 step"), words


def test_there_is_a_line_for_each_step(tmp_path):
    written(tmp_path, reports([0, 2], plant=planted("body.0/forward/output.0", lambda v: v + 1, at=2)))
    head = lines(tmp_path)[0]
    zero, two = read(tmp_path)
    assert head == {
        "schema_version": 1,
        "reference": NAMES.reference,
        "candidate": NAMES.candidate,
        "recordings": ["", ""],
    }
    assert (zero["step"], zero["passed"], zero["first_diff"], zero["coverage"]) == (0, True, None, 1.0)
    assert (two["step"], two["passed"]) == (2, False)
    assert (two["first_diff"]["stage"], two["first_diff"]["candidate"]) == ("forward", "body.0")
    assert len(two["diffs"]) == 22
    [failed] = [d for d in two["diffs"] if not d["passed"]]
    assert failed["reference"] == "fc1/forward/output.0" and failed["max_abs"] == pytest.approx(1, rel=1e-4)


def test_a_restart_neither_doubles_nor_loses_points(tmp_path):
    made = reports(range(5))
    written(tmp_path, made[:3])
    written(tmp_path, made)
    for run in KINDS:
        found = points(tmp_path, run)
        assert found
        for tag, series in found.items():
            assert [number for number, _ in series] == [0, 1, 2, 3, 4], tag
    assert [line.get("step") for line in lines(tmp_path)] == [None, 0, 1, 2, 3, 4]


def test_a_step_written_twice_stands_once(tmp_path):
    [one] = reports([0])
    written(tmp_path, [one, one])
    assert len(points(tmp_path, "diff")["forward_rel_l2/000 fc1"]) == 1 and len(lines(tmp_path)) == 2


@pytest.mark.parametrize("again", range(2))
def test_a_process_killed_between_a_steps_events_and_its_line_shows_the_step_once(tmp_path, monkeypatch, again):
    made = reports(range(5))
    killed = DiffStream(tmp_path, NAMES)
    for report in made[:3]:
        killed.write(report)
    monkeypatch.setattr(killed, "_write_line", lambda content: None)
    killed.write(made[3])
    killed.close()
    assert len(points(tmp_path, "diff")["forward_rel_l2/000 fc1"]) == 4  # the events of step 3 are out
    written(tmp_path, made)
    for run in KINDS:
        for tag, series in points(tmp_path, run).items():
            assert [number for number, _ in series] == [0, 1, 2, 3, 4], tag


def test_many_restarts_within_a_second_are_read_in_their_order(tmp_path, monkeypatch):
    # TensorBoard sorts event files by name: within one second "10" would come before "9".
    made = reports(range(2))
    for _ in range(2):
        left = DiffStream(tmp_path, NAMES)
        monkeypatch.setattr(left, "_write_line", lambda content: None)
        left.write(made[0])
        left.close()
    written(tmp_path, made)
    assert [number for number, _ in points(tmp_path, "diff")["forward_rel_l2/000 fc1"]] == [0, 1]
    seconds = [file.name.split(".")[3] for file in (tmp_path / "diff").iterdir()]
    assert len(set(seconds)) == len(seconds)


def test_a_line_that_was_cut_off_is_repaired(tmp_path):
    made = reports(range(3))
    written(tmp_path, made[:2])
    path = tmp_path / "diffs.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    written(tmp_path, made)
    assert [line.get("step") for line in lines(tmp_path)] == [None, 0, 1, 2]
    assert [number for number, _ in points(tmp_path, "diff")["forward_rel_l2/000 fc1"]] == [0, 1, 2]


def test_a_first_line_that_was_cut_off_is_written_anew(tmp_path):
    tmp_path.joinpath("diffs.jsonl").write_text('{"schema_ver')
    written(tmp_path, reports([0]))
    assert lines(tmp_path)[0]["reference"] == NAMES.reference and lines(tmp_path)[1]["step"] == 0


def test_a_log_folder_of_other_runs_is_refused_and_left_as_it_was(tmp_path):
    written(tmp_path, reports([0]))
    before = sorted((p, p.stat().st_size) for p in tmp_path.rglob("*"))
    message = "holds the diffs of /runs/torch and /runs/paddle, not of /x and /y: give another log folder"
    with pytest.raises(UsageError, match=message):
        DiffStream(tmp_path, Both("/x", "/y"))
    assert sorted((p, p.stat().st_size) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", [b"{nonsense}\n", b"5\n", b"\xff\xfe\n", b'{"step": "x"}\n', b"\n"])
def test_a_damaged_line_in_the_middle_is_reported_with_its_number(tmp_path, damage):
    written(tmp_path, reports([0]))
    path = tmp_path / "diffs.jsonl"
    path.write_bytes(path.read_bytes() + damage + b'{"step": 1}\n')
    with pytest.raises(UsageError, match=r"diffs\.jsonl, line 3, is damaged .*: give another log folder"):
        DiffStream(tmp_path, NAMES)


def test_a_log_folder_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "tb").write_text("x")
    for path in (tmp_path / "tb", tmp_path / "tb" / "below"):
        with pytest.raises(UsageError, match=r"cannot make the log folder"):
            DiffStream(path, NAMES)


def test_a_logger_that_was_given_gets_the_verdict_and_stays_open(tmp_path):
    class Logger:
        def __init__(self) -> None:
            self.tags, self.closed = set(), False

        def scalar(self, tag: str, value: float, step: int) -> None:
            self.tags.add(tag)

        add_text = image = scalar

        def write_out(self) -> None: ...

        def close(self) -> None:
            self.closed = True

    logger = Logger()
    stream = DiffStream(tmp_path, NAMES, logger, tags="all")
    for report in reports([0, 1], plant=planted("body.0/forward/output.0", lambda v: v + 1, at=1)):
        stream.write(report)
    stream.close()
    assert logger.tags == VERDICT | {"0_verdict/first_diff"} and not logger.closed
    tags = set(points(tmp_path, "diff"))
    assert "forward_rel_l2/000 fc1" in tags and not [tag for tag in tags if tag.startswith("0_verdict/")]
    assert set(points(tmp_path, "reference")) >= OWN


def one_sided() -> Report:
    tree = info(root(1), linear("a", 2, 2))
    loop = [record(LOOP, "loss", "loss", np.asarray(v), call=k) for k, v in enumerate((1.0, 3.0))]
    reference = step(
        0, [record("a", "forward", "output.0", [3, 4]), record("a", "backward", "output.0", [5, 12]), *loop]
    )
    candidate = step(0, [record("a", "forward", "output.0", [3, 4]), record("b", "forward", "output.0", [6, 8])])
    return RunComparison(memory_run(tree, reference), memory_run(tree, candidate)).compare(0)


def test_what_one_side_lacks_is_in_the_others_curves_only():
    found = Tagging("all").scalars_of(one_sided())
    reference, candidate, layers = map(dict, (*found.own, found.layers))
    assert reference == {"0_verdict/loss": 2.0, "forward_l2/000 a": 5.0, "backward_l2/000 a": 13.0}
    assert candidate == {"forward_l2/000 a": 5.0, "forward_l2/001 b": 10.0}
    assert layers["forward_rel_l2/000 a"] == 0.0 and "backward_rel_l2/000 a" not in layers


def test_one_runs_own_scalars_are_its_loss_rates_and_norms():
    values = np.asarray([3 + 4j, 12])
    loop = [record(LOOP, "loss", "loss", np.asarray(v)) for v in (1.0, 2.0)]
    loop.append(record(LOOP, "update", "learning_rate", np.asarray(0.1)))
    one = step(0, [record("a", "forward", "output.0", values), record("a", "forward", "output.1", [84]), *loop])
    curves = {"0_verdict/loss": 1.5, "0_verdict/learning_rate": 0.1}
    assert dict(own_scalars_of(one)) == curves | {"forward_l2/000 a": 85.0}
    assert dict(own_scalars_of(one, "layers")) == curves


def test_nan_and_infinity_reach_tensorboard_and_the_lines_stay_json(tmp_path):
    def plant(seen, number):
        if seen.site == "(loop)/loss/loss":
            return np.asarray(np.nan, np.float32)
        return np.full_like(seen.value, np.inf) if seen.site == "head/forward/output.0" else None

    written(tmp_path, reports([0], plant=plant))
    assert math.isnan(points(tmp_path, "candidate")["0_verdict/loss"][0][1])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    for line in (tmp_path / "diffs.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_streaming_needs_no_framework_of_its_own():
    assert not {"torch", "paddle", "tensorflow"} & set(vars(stream_module))


def test_a_picture_of_many_steps_and_layers_is_folded_and_nothing_beyond_its_limit_is_lost():
    made = HeatPicture(numbered := Numbered())
    layers = [f"l{k}" for k in range(1500)]
    numbered.learn(("forward", layer) for layer in layers)
    sites = [("forward", f"{layer}/forward/output.0", f"{layer}/forward/output.0") for layer in layers]
    for number in range(700):
        times = np.full(1500, 1e-3)
        times[700] = 50 if number == 333 else 1e-3
        passed = times <= 1
        made.add(number, Rows(np.arange(1500), times, passed, np.zeros(1500, bool)), sites)
    made.first = ("forward", "l700", 333)
    pixels = made.draw()
    assert pixels.shape[0] < 380 and pixels.shape[1] == 640
    row, column = reds_of(pixels).mean(axis=0)
    assert row == pytest.approx(56 + 256 * 700 / 1500, abs=3) and column == pytest.approx(432 * 333 / 704, abs=12)


def test_names_of_stages_do_not_overlap_and_stay_in_the_picture():
    from PIL import Image, ImageChops

    stages = ["input", "weight", "forward", "loss", "backward", "grad", "update"]
    made = HeatPicture(numbered := Numbered())
    numbered.learn((stage, "a.layer.with.a.long.name") for stage in stages)
    layer = "a.layer.with.a.long.name"
    sites = [(stage, f"{layer}/{stage}/output.0", f"{layer}/{stage}/output.0") for stage in stages]
    times = np.full(7, 1e-3)
    made.add(0, Rows(np.arange(7), times, times <= 1, np.zeros(7, bool)), sites)
    picture = Image.fromarray(made.draw())
    white = Image.new("RGB", picture.size, (255, 255, 255))
    inked = np.asarray(ImageChops.difference(picture, white)).any(axis=2)
    # Each panel's name begins at its left edge, and no ink is in the gap before it: 7 panels of 62 and gaps of 8.
    assert not inked[:, -3:].any() and not inked[:52, :199].any()
    for row, names in ((slice(4, 27), stages[::2]), (slice(30, 52), stages[1::2])):
        columns = inked[row].any(axis=0)
        starts = [200 + stages.index(name) * 62 for name in names if name != "update"]
        assert all(not columns[start - 4 : start].any() and columns[start : start + 8].any() for start in starts)

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from kit.records import info, linear, memory_run, planted, record, root, step, toy_run, toy_steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from padiff.compare import RunComparison
from padiff.errors import UsageError
from padiff.records import LOOP, Both, Report
from padiff_hooks import stream as stream_module
from padiff_hooks.stream import DiffStream, own_scalars_of, scalars_of

NAMES = Both("/runs/torch", "/runs/paddle")
KINDS = ("reference", "candidate", "diff")


def reports(numbers, **rest) -> list[Report]:
    comparison = RunComparison(toy_run(numbers), toy_run(numbers, paddle=True, **rest))
    return [comparison.compare(number) for number in numbers]


def written(logdir: Path, made: list[Report], names=NAMES) -> None:
    stream = DiffStream(logdir, names)
    for report in made:
        stream.write(report)
    stream.close()


def events(logdir: Path, run: str) -> EventAccumulator:
    return EventAccumulator(str(logdir / run), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(logdir: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard shows them."""
    found = events(logdir, run)
    return {
        tag: [(e.step, float(e.tensor_proto.float_val[0])) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
        if not tag.startswith("first_diff/")
    }


def texts(logdir: Path) -> dict[str, tuple[int, str]]:
    found = events(logdir, "diff")
    tags = [tag for tag in found.Tags()["tensors"] if tag.startswith("first_diff/")]
    assert all(len(found.Tensors(tag)) == 1 for tag in tags)
    return {
        tag: (found.Tensors(tag)[0].step, found.Tensors(tag)[0].tensor_proto.string_val[0].decode()) for tag in tags
    }


def lines(logdir: Path) -> list[dict]:
    return [json.loads(line) for line in (logdir / "diffs.jsonl").read_text().splitlines()]


def test_tags_are_those_of_the_design(tmp_path):
    written(tmp_path, reports([0, 1]))
    diff = points(tmp_path, "diff")
    assert {"forward_rel_l2/fc1", "forward_max_abs/act", "grad_rel_l2/fc2", "loss_rel_l2/loss"} <= set(diff)
    assert not [tag for tag in diff if "body" in tag]  # layers bear the reference's names
    for run in ("reference", "candidate"):
        assert {"loss", "learning_rate", "forward_l2/fc1", "weight_l2/fc2", "update_l2/fc1"} <= set(
            points(tmp_path, run)
        )
    assert set(points(tmp_path, "reference")) == set(points(tmp_path, "candidate"))


def test_values_are_those_of_the_runs(tmp_path):
    shifted = planted("body.0/forward/output.0", lambda v: v + 0.5, at=1)
    written(tmp_path, reports([0, 1], plant=shifted))
    steps = toy_steps([0, 1])
    values = {r.site: r.value.astype(np.float64) for r in steps[1].records}
    reference, candidate, diff = (points(tmp_path, run) for run in KINDS)
    assert reference["loss"][1] == (1, pytest.approx(float(values["(loop)/loss/loss"]), rel=1e-6))
    out = values["fc1/forward/output.0"]
    assert reference["forward_l2/fc1"][1][1] == pytest.approx(np.linalg.norm(out), rel=1e-6)
    assert candidate["forward_l2/fc1"][1][1] == pytest.approx(np.linalg.norm(out + 0.5), rel=1e-5)
    both = math.hypot(np.linalg.norm(values["fc1/grad/weight"]), np.linalg.norm(values["fc1/grad/bias"]))
    assert reference["grad_l2/fc1"][1][1] == pytest.approx(both, rel=1e-6)
    assert diff["forward_max_abs/fc1"][1][1] == pytest.approx(0.5, rel=1e-5)
    expected = 0.5 * math.sqrt(out.size) / np.linalg.norm(out)
    assert diff["forward_rel_l2/fc1"][1][1] == pytest.approx(expected, rel=1e-5)
    assert diff["worst/forward_rel_l2"][1][1] == pytest.approx(expected, rel=1e-5)
    assert diff["forward_rel_l2/fc1"][0][1] < 1e-6


def test_the_first_diff_is_an_event_with_a_tag_of_its_own(tmp_path):
    def plant(seen, number):
        site = {1: "body.0/forward/output.0", 3: "head/forward/output.0"}.get(number)
        return seen.value + 1 if seen.site == site else None

    made = reports([0, 1, 2, 3], plant=plant)
    written(tmp_path, made)
    found = texts(tmp_path)
    assert set(found) == {"first_diff/step_00000001", "first_diff/step_00000003"}
    number, text = found["first_diff/step_00000001"]
    assert number == 1 and text.startswith("first here: ") and made[1].first_diff.message in text
    number, text = found["first_diff/step_00000003"]
    assert text == "follows: 1 of 22 pairs differ in this step, as in those after it."


def test_what_follows_is_said_once_also_over_a_restart(tmp_path):
    sites = ("body.0/forward/output.0", "head/forward/output.0", "body.0/backward/output.0", "head/grad/weight")

    def plant(seen, number):
        return seen.value + 1 if number and seen.site == sites[number % 4] else None

    made = reports(range(8), plant=plant)
    written(tmp_path, made[:5])
    # A comparison that is begun anew has not seen the first diff.
    written(tmp_path, reports(range(8), plant=plant))
    found = texts(tmp_path)
    assert [text.partition(":")[0] for _, text in found.values()] == ["first here", "follows"]
    written(tmp_path, [reports([9], plant=planted(sites[0], lambda v: v + 1, at=9))[0]])
    assert set(texts(tmp_path)) == set(found)
    standings = [line["first_diff"]["standing"] for line in lines(tmp_path)[2:]]
    assert standings == ["first", *["follows"] * 7]
    assert {diff.get("standing") for diff in lines(tmp_path)[-1]["diffs"]} == {None, "follows"}


def test_a_second_fault_is_an_event_of_its_own(tmp_path):
    from compare.aftermath.programs import reference, trained

    wrong = trained("torch", "towers", "sgd", frozenset(["norm:eps", "reload"]))
    comparison = RunComparison(reference("towers"), wrong)
    made = [comparison.compare(number) for number in comparison.common()]
    written(tmp_path, made)
    [fault] = made[3].independent
    assert not made[0].independent and fault.step == 3
    number, text = texts(tmp_path)["first_diff/step_00000003"]
    assert number == 3 and f"new here: **{fault.message}**" in text
    [told] = lines(tmp_path)[4]["independent"]
    assert told["message"] == fault.message and "independent" not in lines(tmp_path)[1]


def test_a_diff_that_stays_where_it_is_is_told_once_also_over_a_restart(tmp_path):
    def plant(seen, number):
        return seen.value + 1 if seen.site == "body.0/forward/output.0" and number else None

    made = reports(range(6), plant=plant)
    written(tmp_path, made[:3])
    written(tmp_path, made)
    assert set(texts(tmp_path)) == {"first_diff/step_00000001"}


def test_there_is_a_line_for_each_step(tmp_path):
    written(tmp_path, reports([0, 2], plant=planted("body.0/forward/output.0", lambda v: v + 1, at=2)))
    head, zero, two = lines(tmp_path)
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
    assert len(points(tmp_path, "diff")["forward_rel_l2/fc1"]) == 1 and len(lines(tmp_path)) == 2


@pytest.mark.parametrize("again", range(2))
def test_a_process_killed_between_a_steps_events_and_its_line_shows_the_step_once(tmp_path, monkeypatch, again):
    made = reports(range(5))
    killed = DiffStream(tmp_path, NAMES)
    for report in made[:3]:
        killed.write(report)
    monkeypatch.setattr(killed, "_write_line", lambda content: None)
    killed.write(made[3])
    killed.close()
    assert len(points(tmp_path, "diff")["forward_rel_l2/fc1"]) == 4  # the events of step 3 are out
    written(tmp_path, made)
    for run in KINDS:
        for tag, series in points(tmp_path, run).items():
            assert [number for number, _ in series] == [0, 1, 2, 3, 4], tag


def test_many_restarts_within_a_second_are_read_in_their_order(tmp_path, monkeypatch):
    # TensorBoard sorts event files by name: within one second "10" would come before "9".
    made = reports(range(2))
    for _ in range(4):
        left = DiffStream(tmp_path, NAMES)
        monkeypatch.setattr(left, "_write_line", lambda content: None)
        left.write(made[0])
        left.close()
    written(tmp_path, made)
    assert [number for number, _ in points(tmp_path, "diff")["forward_rel_l2/fc1"]] == [0, 1]
    seconds = [file.name.split(".")[3] for file in (tmp_path / "diff").iterdir()]
    assert len(set(seconds)) == len(seconds)


def test_a_line_that_was_cut_off_is_repaired(tmp_path):
    made = reports(range(3))
    written(tmp_path, made[:2])
    path = tmp_path / "diffs.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    written(tmp_path, made)
    assert [line.get("step") for line in lines(tmp_path)] == [None, 0, 1, 2]
    assert [number for number, _ in points(tmp_path, "diff")["forward_rel_l2/fc1"]] == [0, 1, 2]


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
def test_a_damaged_line_in_the_middle_is_told_with_its_number(tmp_path, damage):
    written(tmp_path, reports([0]))
    path = tmp_path / "diffs.jsonl"
    path.write_bytes(path.read_bytes() + damage + b'{"step": 1}\n')
    with pytest.raises(UsageError, match=r"diffs\.jsonl, line 3, is damaged .*: give another log folder"):
        DiffStream(tmp_path, NAMES)


def test_a_log_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "tb").write_text("x")
    for path in (tmp_path / "tb", tmp_path / "tb" / "below"):
        with pytest.raises(UsageError, match=r"cannot make the log folder"):
            DiffStream(path, NAMES)


def test_a_sink_that_was_given_gets_the_diffs_and_stays_open(tmp_path):
    class Sink:
        def __init__(self) -> None:
            self.scalars, self.closed = [], False

        def scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, step))

        def text(self, tag: str, text: str, step: int) -> None: ...

        def flush(self) -> None: ...

        def close(self) -> None:
            self.closed = True

    sink = Sink()
    stream = DiffStream(tmp_path, NAMES, diff=sink)
    stream.write(reports([0])[0])
    stream.close()
    assert ("forward_rel_l2/fc1", 0) in sink.scalars
    assert not (tmp_path / "diff").exists() and (tmp_path / "reference").exists()


def one_sided() -> Report:
    tree = info(root(1), linear("a", 2, 2))
    loop = [record(LOOP, "loss", "loss", np.asarray(v), call=k) for k, v in enumerate((1.0, 3.0))]
    ours = step(0, [record("a", "forward", "output.0", [3, 4]), record("a", "backward", "output.0", [5, 12]), *loop])
    theirs = step(0, [record("a", "forward", "output.0", [3, 4]), record("b", "forward", "output.0", [6, 8])])
    return RunComparison(memory_run(tree, ours), memory_run(tree, theirs)).compare(0)


def test_what_one_side_lacks_is_in_the_others_curves_only():
    scalars = {run: dict(found) for run, found in scalars_of(one_sided()).items()}
    assert scalars["reference"] == {"loss": 2.0, "forward_l2/a": 5.0, "backward_l2/a": 13.0}
    assert scalars["candidate"] == {"forward_l2/a": 5.0, "forward_l2/b": 10.0}
    assert scalars["diff"]["forward_rel_l2/a"] == 0.0 and "backward_rel_l2/a" not in scalars["diff"]


def test_one_runs_own_scalars_are_its_loss_rates_and_norms():
    values = np.asarray([3 + 4j, 12])
    loop = [record(LOOP, "loss", "loss", np.asarray(v)) for v in (1.0, 2.0)]
    loop.append(record(LOOP, "update", "learning_rate", np.asarray(0.1)))
    one = step(0, [record("a", "forward", "output.0", values), record("a", "forward", "output.1", [84]), *loop])
    assert dict(own_scalars_of(one)) == {"loss": 1.5, "learning_rate": 0.1, "forward_l2/a": 85.0}


def test_nan_and_infinity_reach_tensorboard_and_the_lines_stay_json(tmp_path):
    def plant(seen, number):
        if seen.site == "(loop)/loss/loss":
            return np.asarray(np.nan, np.float32)
        return np.full_like(seen.value, np.inf) if seen.site == "head/forward/output.0" else None

    written(tmp_path, reports([0], plant=plant))
    assert math.isnan(points(tmp_path, "candidate")["loss"][0][1])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    for line in (tmp_path / "diffs.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_streaming_needs_no_framework_of_its_own():
    assert not {"torch", "paddle", "tensorflow"} & set(vars(stream_module))

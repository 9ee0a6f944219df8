"""A log folder that outlives the recordings that it is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.records import planted, toy_folder
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from padiff.records import Both
from padiff_cli.main import main
from padiff_hooks.stream import DiffStream

from .test_identity import without_identity
from .test_stream import KINDS, NAMES, events, lines, points, reports, texts

FORWARD = "forward_rel_l2/000 fc1"
WRONG = planted("body.0/forward/output.0", lambda v: v + 1, at=1)
OLD, NEW = Both("r1", "c1"), Both("r1", "c2")


def written(logdir: Path, made: list, recordings: tuple[str, str]) -> DiffStream:
    stream = DiffStream(logdir, NAMES)
    stream.begin(recordings)
    for report in made:
        stream.write(report)
    stream.close()
    return stream


def judged(logdir: Path, name: str = "diffs.jsonl") -> list[tuple[int, bool]]:
    found = [json.loads(line) for line in (logdir / name).read_text().splitlines()]
    return [(line["step"], line["passed"]) for line in found if "step" in line]


def own_files(logdir: Path) -> list[Path]:
    return sorted(path for kind in KINDS for path in (logdir / kind).glob("events.*"))


def test_the_log_of_another_recording_begins_anew(tmp_path):
    assert written(tmp_path, reports([0, 1, 2], plant=WRONG), OLD).replaced == ""
    stream = written(tmp_path, reports([0, 1]), NEW)
    assert judged(tmp_path) == [(0, True), (1, True)] and not stream.differs
    assert judged(tmp_path, "diffs.before.jsonl") == [(0, True), (1, False), (2, True)]
    for run in KINDS:
        for tag, series in points(tmp_path, run).items():
            assert [number for number, _ in series] == [0, 1], tag
    assert max(value for _, value in points(tmp_path, "diff")[FORWARD]) < 1e-5
    assert texts(tmp_path) == {}
    assert stream.replaced == (
        f"/runs/paddle was recorded anew: the log folder {tmp_path} begins anew; its old lines are in "
        "diffs.before.jsonl"
    )


def test_the_log_of_the_same_recordings_goes_on(tmp_path):
    made = reports(range(4), plant=WRONG)
    written(tmp_path, made[:2], OLD)
    stream = written(tmp_path, made, OLD)
    assert judged(tmp_path) == [(0, True), (1, False), (2, True), (3, True)] and stream.differs
    assert [number for number, _ in points(tmp_path, "diff")[FORWARD]] == [0, 1, 2, 3]
    assert stream.replaced == "" and not (tmp_path / "diffs.before.jsonl").exists()


def test_a_stream_that_is_open_begins_anew(tmp_path):
    stream = DiffStream(tmp_path, NAMES)
    assert stream.begin(OLD) == set()
    for report in reports([0, 1, 2], plant=WRONG):
        stream.write(report)
    assert stream.differs and stream.begin(OLD) == {0, 1, 2}
    assert stream.begin(NEW) == set() and "was recorded anew" in stream.replaced and not stream.differs
    stream.write(reports([0])[0])
    stream.close()
    assert judged(tmp_path) == [(0, True)]
    assert [number for number, _ in points(tmp_path, "diff")[FORWARD]] == [0]


def test_a_tensorboard_that_has_read_the_old_points_shows_the_new_ones_only(tmp_path):
    written(tmp_path, reports(range(4), plant=WRONG), OLD)
    shown = EventAccumulator(str(tmp_path / "diff"), size_guidance={"tensors": 0}).Reload()
    assert len(shown.Tensors(FORWARD)) == 4
    written(tmp_path, reports([0, 1]), NEW)
    assert [event.step for event in shown.Reload().Tensors(FORWARD)] == [0, 1]


def test_files_that_are_not_padiffs_own_stay_as_they_are(tmp_path):
    candidate = EventFileWriter(str(tmp_path / "reference"))
    candidate.add_event(Event(wall_time=1.0, step=5, summary=scalar_pb("accuracy", 0.5)))
    candidate.close()
    (tmp_path / "notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    written(tmp_path, reports([0, 1], plant=WRONG), OLD)
    written(tmp_path, reports([0]), NEW)
    assert {p: p.read_bytes() for p in before} == before


def as_of_an_older_padiff(logdir: Path) -> None:
    """Neither recordings in the first line nor a name that tells whose the event files are."""
    head, *rest = lines(logdir)
    del head["recordings"]
    (logdir / "diffs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *rest)))
    for file in own_files(logdir):
        file.rename(file.with_name(file.name.removesuffix(".padiff")))


def test_the_log_of_an_older_padiff_goes_on_for_runs_of_an_older_padiff(tmp_path):
    made = reports(range(4))
    written(tmp_path, made[:2], Both("", ""))
    as_of_an_older_padiff(tmp_path)
    assert written(tmp_path, made, Both("", "")).replaced == ""
    assert [number for number, _ in points(tmp_path, "diff")[FORWARD]] == [0, 1, 2, 3]
    assert judged(tmp_path) == [(number, True) for number in range(4)]


def test_the_log_of_an_older_padiff_begins_anew_for_recordings_with_an_identity(tmp_path):
    written(tmp_path, reports(range(3), plant=WRONG), Both("", ""))
    as_of_an_older_padiff(tmp_path)
    assert "/runs/torch and /runs/paddle were recorded anew" in written(tmp_path, reports([0]), NEW).replaced
    assert judged(tmp_path) == [(0, True)]
    assert [number for number, _ in points(tmp_path, "diff")[FORWARD]] == [0]


def test_a_process_that_was_killed_while_it_began_anew_is_gone_on_from(tmp_path):
    written(tmp_path, reports(range(3), plant=WRONG), OLD)
    (tmp_path / "diffs.jsonl").rename(tmp_path / "diffs.before.jsonl")
    written(tmp_path, reports([0]), NEW)
    assert [number for number, _ in points(tmp_path, "diff")[FORWARD]] == [0] and texts(tmp_path) == {}


@pytest.mark.parametrize("command", ["compare", "watch"])
def test_a_candidate_that_was_mended_and_recorded_anew_gets_the_verdict_it_deserves(tmp_path, capsys, command):
    logdir, reference = tmp_path / "tb", toy_folder(tmp_path / "torch")
    candidate = toy_folder(tmp_path / "paddle", paddle=True, plant=WRONG)
    call = [command, str(reference), str(candidate), "--logdir", str(logdir)]
    assert main(call) == 1 and main(call) == 1
    assert "recorded anew" not in capsys.readouterr().out
    toy_folder(candidate, [0, 1], paddle=True, existing="overwrite")
    assert main(call) == 0
    reported = [line for line in capsys.readouterr().out.splitlines() if "recorded anew" in line]
    assert reported == [
        f"{candidate} was recorded anew: the log folder {logdir} begins anew; its old lines are in diffs.before.jsonl"
    ]
    assert judged(logdir) == [(0, True), (1, True)]
    assert [number for number, _ in points(logdir, "diff")[FORWARD]] == [0, 1]
    assert not [tag for tag in events(logdir, "diff").Tags()["tensors"] if tag == "0_verdict/first_diff"]
    assert main(call) == 0 and "recorded anew" not in capsys.readouterr().out


def test_runs_of_an_older_padiff_are_gone_on_with(tmp_path, capsys):
    runs = [without_identity(toy_folder(tmp_path / name)) for name in ("a", "b")]
    call = ["watch", *map(str, runs), "--logdir", str(tmp_path / "tb")]
    assert main(call) == 0 and main(call) == 0
    assert "recorded anew" not in capsys.readouterr().out
    assert judged(tmp_path / "tb") == [(number, True) for number in range(3)]

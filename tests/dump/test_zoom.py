"""Zooming in: both recorders take full tensors around a sketch that is beyond its limit."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import padiff
from padiff.dump.prepare import ZOOM_FILE, Requests, Zoom, ask
from padiff_hooks.paired import PairedRuns
from padiff_hooks.training import TrainingRecorder

STEPS = 12


def model_of(kit):
    return kit.Sequential(*[layer for _ in range(4) for layer in (kit.Linear(6, 6), kit.ReLU())], kit.Linear(6, 3))


def trained(kit, model, recorder, steps, rate=0.1, optimizer=None):
    """Train, and yield after each step; `recorder` is entered already."""
    for number in steps:
        rng = np.random.default_rng(number)
        loss = kit.cross_entropy(
            model(kit.tensor(rng.standard_normal((5, 6)))), kit.tensor(rng.integers(0, 3, 5), "int64")
        )
        loss.backward()
        recorder.log_loss(loss)
        optimizer.step()
        kit.zero(optimizer)
        recorder.try_dump()
        recorder.flush()
        yield number


def full_layers(run, number):
    return {r.layer for r in run.steps(number)[0].records if r.sketch is None and r.layer != "(loop)"}


def two_runs(kit, tmp_path, rates, options=({}, {})):
    """Two trainings side by side, compared after each step, the second one with another learning rate.

    With ``functions=False`` the first step is like the others: all of it is sketches.
    """
    first = model_of(kit)
    second = model_of(kit)
    kit.load(second, kit.state(first))
    models = (first, second)
    optimizers = [kit.sgd(model.parameters(), rate) for model, rate in zip(models, rates)]
    folders = [tmp_path / "a", tmp_path / "b"]
    options = [{"functions": False, **given} for given in options]
    pairs = PairedRuns(*folders)
    asked = []
    with (
        padiff.record(models[0], folders[0], optimizer=optimizers[0], detail="sketch", **options[0]) as one,
        padiff.record(models[1], folders[1], optimizer=optimizers[1], detail="sketch", **options[1]) as other,
    ):
        loops = [trained(kit, m, rec, range(STEPS), optimizer=o) for m, rec, o in zip(models, (one, other), optimizers)]
        for _ in zip(*loops, strict=True):
            for report in pairs.poll():
                assert report.coverage.sketched or not report.passed
                if pairs.asked is not None:
                    asked.append((report.coverage.steps[0], report.first_diff, pairs.asked))
    return [padiff.open_run(folder) for folder in folders], asked


def test_both_recorders_take_full_tensors_of_the_layers_around(kit, tmp_path):
    runs, asked = two_runs(kit, tmp_path, (0.1, 0.13))
    step, first, zoom = asked[0]
    assert (step, first.stage, first.reference) == (0, "update", "0")
    # The first layer and two that run after it; nothing before it, and nothing far away.
    assert {"0", "1", "2"} <= zoom.layers
    assert not {"4", "6", "8"} & zoom.layers
    for run in runs:
        assert full_layers(run, zoom.from_step) == zoom.layers
        assert all(not full_layers(run, n) for n in run.numbers() if n < zoom.from_step)
    # What they are compared by is then exact.
    report = padiff.compare_runs(*runs)
    exact = [d for d in report.diffs if d.pair.step == zoom.from_step and d.pair.anchor.layer == "0"]
    assert exact
    assert {d.figures.basis for d in exact} == {"tensors"}


def test_each_request_is_answered_once(kit, tmp_path):
    runs, asked = two_runs(kit, tmp_path, (0.1, 0.13))
    zoomed = [n for n in runs[0].numbers() if full_layers(runs[0], n)]
    assert zoomed == [zoom.from_step for _, _, zoom in asked if zoom.from_step < STEPS]
    assert len({first.stage + str(first.reference) for _, first, _ in asked}) == len(asked)


def test_runs_that_match_ask_for_nothing(kit, tmp_path):
    runs, asked = two_runs(kit, tmp_path, (0.1, 0.1))
    assert not asked
    assert not any(full_layers(run, n) for run in runs for n in run.numbers())
    assert not (tmp_path / "a" / ZOOM_FILE).exists()


def test_full_tensors_ask_for_nothing(kit, tmp_path):
    options = {"full_every_n_steps": 1}
    assert not two_runs(kit, tmp_path, (0.1, 0.13), (options, options))[1]


def hosted(kit, model, optimizer, training):
    """Train as a host of callbacks does."""
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        training.begin_batch()
        batch = kit.tensor(rng.standard_normal((5, 6))), kit.tensor(rng.integers(0, 3, 5), "int64")
        kit.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        kit.zero(optimizer)
        training.end_batch()
        training.end_step()
        training._recorder.flush()


def test_a_callback_asks_its_own_recorder(kit, tmp_path):
    model = model_of(kit)
    start = kit.state(model)
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, tmp_path / "a", optimizer=optimizer, detail="sketch", functions=False) as rec:
        list(trained(kit, model, rec, range(STEPS), optimizer=optimizer))
    finished = os.listdir(tmp_path / "a")
    kit.load(model, start)
    optimizer = kit.sgd(model.parameters(), 0.13)
    training = TrainingRecorder(tmp_path / "b", detail="sketch", functions=False, reference=tmp_path / "a")
    training.start(model, [optimizer])
    with pytest.warns(RuntimeWarning, match="step 0, update: 0.weight"):
        hosted(kit, model, optimizer, training)
    training.finish()
    run = padiff.open_run(tmp_path / "b")
    assert any("0" in full_layers(run, n) for n in run.numbers())
    assert sorted(os.listdir(tmp_path / "a")) == sorted(finished)  # a run that has ended is left alone


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema_version": 1}',
        b'{"schema_version": 9, "from_step": 0, "layers": ["0"]}',
        b"[" * 9999,
    ],
)
def test_a_request_that_cannot_be_read_is_none(tmp_path, content):
    requests = Requests(tmp_path)
    (tmp_path / ZOOM_FILE).write_bytes(content)
    assert requests.due(3) == frozenset()


def test_requests(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    assert ask(tmp_path, Zoom(2, frozenset({"0"})))
    requests = Requests(tmp_path)
    assert requests.due(5) == frozenset()  # meant for the recorder before
    assert ask(tmp_path, Zoom(7, frozenset({"1", "2"})))
    assert [requests.due(n) for n in (5, 6, 8, 9)] == [frozenset(), frozenset(), {"1", "2"}, frozenset()]
    (tmp_path / "finished.json").write_text("{}")
    before = (tmp_path / ZOOM_FILE).read_bytes()
    assert not ask(tmp_path, Zoom(9, frozenset({"1"})))
    assert (tmp_path / ZOOM_FILE).read_bytes() == before
    assert json.loads(before)["from_step"] == 7
    assert not ask(tmp_path / "nowhere", Zoom(9, frozenset()))


def test_show_says_how_much_is_kept_as_sketches(kit, tmp_path, capsys):
    from padiff_cli.main import main

    model = model_of(kit)
    optimizer = kit.sgd(model.parameters())
    options = {"detail": {"*": "sketch", "0": "full"}, "functions": False}
    with padiff.record(model, tmp_path / "run", optimizer=optimizer, **options) as rec:
        list(trained(kit, model, rec, range(1), optimizer=optimizer))
    assert main(["show", str(tmp_path / "run")]) == 0
    step = padiff.open_run(tmp_path / "run").steps(0)[0]
    count = sum(record.sketch is not None for record in step.records)
    assert f"; {count} of them as sketches" in capsys.readouterr().out

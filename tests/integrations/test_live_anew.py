"""Callbacks whose log folder, or whose reference, is of another recording than before."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from . import hapi
from .lit import Lit, fit
from .tensorboards import events, texts


def judged(logdir):
    found = [json.loads(line) for line in (logdir / "diffs.jsonl").read_text().splitlines()]
    return [(line["step"], line["passed"]) for line in found if "step" in line]


def test_lightning_shows_the_run_that_was_recorded_anew_only(tmp_path):
    fit(tmp_path / "reference")
    options = {"reference": tmp_path / "reference", "logdir": tmp_path / "tb"}
    with pytest.warns(RuntimeWarning, match=r"padiff: the runs differ\nDIFFER  step "):
        fit(tmp_path / "run", Lit(rate=0.2), options=options)
    with pytest.warns(RuntimeWarning, match=r"run was recorded anew: the log folder .*tb begins anew") as reported:
        callback, *_ = fit(tmp_path / "run", options={**options, "existing": "overwrite"})
    assert len([w for w in reported if str(w.message).startswith("padiff")]) == 1
    assert callback.first_report is None and judged(tmp_path / "tb") == [(number, True) for number in range(6)]
    assert [value for _, value in events(tmp_path / "tb" / "candidate")["0_verdict/learning_rate"]] == pytest.approx(
        [0.1] * 6
    )
    assert len(events(tmp_path / "tb" / "diff")["update_rel_l2/000 net.0"]) == 6 and not texts(tmp_path / "tb" / "diff")


def test_hapi_shows_the_run_that_was_recorded_anew_only(tmp_path):
    hapi.fit(tmp_path / "reference")
    options = {"reference": tmp_path / "reference", "logdir": tmp_path / "tb"}
    with pytest.warns(RuntimeWarning, match=r"padiff: the runs differ\nDIFFER  step "):
        hapi.fit(tmp_path / "run", hapi.Net(seed=1), options=options)
    with pytest.warns(RuntimeWarning, match=r"run was recorded anew: the log folder .*tb begins anew"):
        callback, _ = hapi.fit(tmp_path / "run", options={**options, "existing": "overwrite"})
    assert callback.first_report is None and judged(tmp_path / "tb") == [(number, True) for number in range(6)]
    assert max(value for _, value in events(tmp_path / "tb" / "diff")["weight_rel_l2/000 first"]) == 0


def test_a_reference_that_is_recorded_anew_meanwhile_is_compared_from_its_start(tmp_path):
    fit(tmp_path / "reference", Lit(rate=0.2))

    class Slow(Lit):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                fit(tmp_path / "reference", options={"existing": "overwrite"})

    options = {"reference": tmp_path / "reference", "logdir": tmp_path / "tb"}
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        callback, *_ = fit(tmp_path / "run", Slow(), options=options)
    messages = [str(w.message) for w in reported if str(w.message).startswith("padiff: ")]
    assert ["recorded again" in message for message in messages] == [False, True]
    assert messages[1].endswith("reference was recorded again; comparing starts again")
    assert callback.first_report is None and judged(tmp_path / "tb") == [(number, True) for number in range(6)]


def test_a_runs_own_curves_are_those_of_the_recording_that_is_there(tmp_path):
    options = {"logdir": tmp_path / "tb"}
    fit(tmp_path / "run", options=options)
    again = {**options, "existing": "overwrite", "start_step": 3}
    _, _, module = fit(tmp_path / "run", Lit(rate=0.2), options=again)
    own = events(tmp_path / "tb" / "run")
    assert [number for number, _ in own["0_verdict/loss"]] == list(range(3, 9))
    assert np.allclose([value for _, value in own["0_verdict/loss"]], [float(loss) for loss in module.losses])


def test_a_resume_shows_both_parts_once(tmp_path):
    fit(tmp_path / "reference")
    options = {"reference": tmp_path / "reference", "logdir": tmp_path / "tb"}
    fit(tmp_path / "run", options=options, max_steps=3)
    fit(tmp_path / "run", options={**options, "existing": "resume"})
    assert judged(tmp_path / "tb") == [(number, True) for number in range(6)]
    assert [number for number, _ in events(tmp_path / "tb" / "candidate")["0_verdict/loss"]] == list(range(6))

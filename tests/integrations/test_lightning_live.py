"""Lightning against a reference run while it trains, and its TensorBoardLogger."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

import padiff
from padiff.errors import RunsDifferError, UsageError

from .lit import Lit, fit, hooks, net
from .tensorboards import events, tags, texts


@pytest.fixture
def reference(tmp_path):
    fit(tmp_path / "reference")
    return tmp_path / "reference"


def other_weight():
    network = net()
    with torch.no_grad():
        network[2].weight[1, 3] += 0.5
    return network


def test_an_equal_run_says_nothing_and_writes_a_passing_line_for_each_step(tmp_path, reference):
    options = {"reference": reference, "on_diff": "raise", "logdir": tmp_path / "tb"}
    callback, *_ = fit(tmp_path / "run", options=options)
    assert callback.first_report is None
    lines = [json.loads(line) for line in (tmp_path / "tb" / "diffs.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [line["step"] for line in steps] == list(range(6))
    assert all(line["passed"] and line["coverage"] == 1.0 for line in steps)


def test_warn_tells_the_first_diff_once_and_trains_on(tmp_path, reference):
    with pytest.warns(RuntimeWarning, match=r"padiff: the runs differ\nDIFFER  step ") as reported:
        callback, trainer, _ = fit(tmp_path / "run", Lit(rate=0.2), options={"reference": reference})
    assert len([w for w in reported if str(w.message).startswith("padiff")]) == 1
    assert trainer.global_step == 6
    assert padiff.open_run(tmp_path / "run").numbers() == list(range(6))
    assert not callback.first_report.passed


def test_the_first_report_stays_the_first_and_is_found_by_its_diff(tmp_path, reference, capfd):
    """A report with a diff is false: `if callback.first_report` never held, and the first one became the latest."""
    with pytest.warns(RuntimeWarning, match=r"padiff: the runs differ\nDIFFER  step 0"):
        callback, *_ = fit(tmp_path / "run", Lit(rate=0.2), options={"reference": reference})
    assert callback.first_report.coverage.steps == (0,)
    assert callback.first_diff is callback.first_report.first_diff and callback.first_diff.step == 0
    err = capfd.readouterr().err
    place = "first at step 0, update: net.0.weight; 5 later steps follow from it"
    assert f"padiff: compared 6 steps with {reference}: they differ, {place}" in err


def test_a_match_is_said_in_one_line(tmp_path, reference, capfd):
    capfd.readouterr()
    callback, *_ = fit(tmp_path / "run", options={"reference": reference})
    assert callback.first_report is None and callback.first_diff is None
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("padiff")]
    assert len(said) == 3 and "for all 6 recorded steps" in said[0] and said[1].startswith("padiff: recorded 6 steps, ")
    assert said[2] == f"padiff: compared 6 steps with {reference}: they match, largest relative L2 0"


def test_stop_ends_the_training_at_the_step_that_differs(tmp_path, reference):
    with pytest.warns(RuntimeWarning, match="step 0, update: "):
        callback, trainer, module = fit(
            tmp_path / "run", Lit(rate=0.2), options={"reference": reference, "on_diff": "stop"}
        )
    assert trainer.global_step == 1
    assert padiff.open_run(tmp_path / "run").numbers() == [0]
    first = callback.first_report.first_diff
    assert (first.step, first.stage, first.reference) == (0, "update", "net.0")
    assert "learning rates differ: 0.1 against 0.2" in first.message
    assert hooks(module, *trainer.optimizers) == 0


def test_raise_ends_the_training_with_the_report(tmp_path, reference):
    module = Lit(other_weight())
    with pytest.raises(RunsDifferError, match=r"step 0, weight: net.2.weight") as caught:
        fit(tmp_path / "run", module, options={"reference": reference, "on_diff": "raise"})
    first = caught.value.report.first_diff
    assert (first.stage, first.reference, first.slot) == ("weight", "net.2", "weight")
    assert first.max_abs == pytest.approx(0.5)
    assert hooks(module) == 0
    assert padiff.open_run(tmp_path / "run").numbers() == [0]


def test_a_reference_that_is_never_there_is_reported_at_the_end(tmp_path):
    with pytest.warns(RuntimeWarning, match="compared nothing with the reference run .*it was never there"):
        fit(tmp_path / "run", options={"reference": tmp_path / "nowhere"})
    assert padiff.open_run(tmp_path / "run").numbers() == list(range(6))


def test_a_reference_that_can_not_be_read_does_not_end_the_training(tmp_path, reference):
    (reference / "run.json").write_text("no JSON")
    with pytest.warns(RuntimeWarning, match="can't compare with the reference run, recording goes on"):
        fit(tmp_path / "run", options={"reference": reference})
    assert padiff.open_run(tmp_path / "run").numbers() == list(range(6))


def test_a_run_is_not_compared_with_itself(tmp_path):
    with pytest.raises(UsageError, match="can't be compared with itself"):
        fit(tmp_path / "run", options={"reference": tmp_path / "run"})


def test_an_unknown_on_diff_is_reported(tmp_path):
    with pytest.raises(UsageError, match="on_diff is one of warn, stop, raise, got 'explode'"):
        fit(tmp_path / "run", options={"on_diff": "explode"})


VERDICT = {f"0_verdict/times_allowed/{stage}" for stage in ("weight", "forward", "loss", "backward", "grad", "update")}


@pytest.mark.parametrize("kind", ["layers", "all"])
def test_the_trainers_own_logger_gets_the_verdict_and_no_more_than_ten_tags(tmp_path, reference, kind):
    logger = TensorBoardLogger(tmp_path, name="logs", version=0)
    with pytest.warns(RuntimeWarning, match="padiff: "):
        fit(tmp_path / "run", Lit(rate=0.2), logger=logger, options={"reference": reference, "tags": kind})
    folder = Path(logger.log_dir)
    shown = tags(folder) - {"hp_metric"}
    assert shown == VERDICT | {"0_verdict/heat_map", "0_verdict/first_diff/text_summary"} and len(shown) <= 10
    assert dict(events(folder)["0_verdict/times_allowed/update"])[0] > 1
    assert dict(events(folder)["0_verdict/times_allowed/forward"])[0] <= 1
    assert "DIFFER  step 0, update: " in texts(folder)["0_verdict/first_diff/text_summary"]
    for name, rate in (("reference", 0.1), ("candidate", 0.2)):
        own = events(folder / name)
        assert [value for _, value in own["0_verdict/learning_rate"]] == pytest.approx([rate] * 6)
        assert len(own["0_verdict/loss"]) == 6
    diff = events(folder / "diff")
    assert dict(diff["update_rel_l2/000 net.0"])[0] == pytest.approx(1.0, rel=1e-3)
    assert dict(diff["forward_rel_l2/000 net.0"])[0] == 0.0
    assert ("update_max_abs/000 net.0" in diff) == (kind == "all")


def test_the_trainers_own_logger_is_left_alone_where_that_is_asked_for(tmp_path, reference):
    logger = TensorBoardLogger(tmp_path, name="logs", version=0)
    fit(tmp_path / "run", logger=logger, options={"reference": reference, "log_to_host": False})
    folder = Path(logger.log_dir)
    assert tags(folder) <= {"hp_metric"} and tags(folder / "diff") >= VERDICT
    logger = TensorBoardLogger(tmp_path, name="logs", version=1)
    fit(tmp_path / "alone", logger=logger, options={"log_to_host": False})
    assert tags(logger.log_dir) <= {"hp_metric"}
    assert tags(Path(logger.log_dir) / "alone") == {"0_verdict/loss", "0_verdict/learning_rate"}


@pytest.mark.parametrize(("wrong", "said"), [({"tags": "few"}, "got 'few'"), ({"log_to_host": "no"}, "got 'no'")])
def test_curves_that_there_are_not_are_reported_before_training(tmp_path, wrong, said):
    with pytest.raises(UsageError, match=said):
        fit(tmp_path / "run", options=wrong)
    assert not (tmp_path / "run").exists()


def test_without_a_reference_the_runs_own_curves_go_to_the_logger(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="logs", version=0)
    _, _, module = fit(tmp_path / "run", logger=logger, options={"every_n_steps": 2, "tags": "all"})
    own = events(logger.log_dir)
    assert [step for step, _ in own["0_verdict/loss"]] == [0, 2, 4]
    assert [value for _, value in own["0_verdict/loss"]] == pytest.approx([float(module.losses[k]) for k in (0, 2, 4)])
    # Ten tags at most are the logger's; norms lie beside.
    assert tags(logger.log_dir) - {"hp_metric"} == {"0_verdict/loss", "0_verdict/learning_rate"}
    norm = net()[0].weight.detach().double().square().sum() + net()[0].bias.detach().double().square().sum()
    norms = events(Path(logger.log_dir) / "run")
    assert dict(norms["weight_l2/000 net.0"])[0] == pytest.approx(float(norm.sqrt()))


def test_an_own_logdir_goes_before_the_loggers(tmp_path, reference):
    logger = TensorBoardLogger(tmp_path, name="logs", version=0)
    fit(tmp_path / "run", logger=logger, options={"reference": reference, "logdir": tmp_path / "tb"})
    assert "forward_rel_l2/000 net.0" in events(tmp_path / "tb" / "diff")
    assert tags(logger.log_dir) <= {"hp_metric"}


def test_a_reference_that_grows_beside_the_run_is_compared_when_its_steps_are_there(tmp_path):
    # The reference begins after the candidate's first three steps: nothing is lost, nothing is compared twice.
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        options = {"reference": tmp_path / "late", "logdir": tmp_path / "tb"}

        class Slow(Lit):
            def on_train_batch_start(self, batch, batch_idx):
                if batch_idx == 3:
                    fit(tmp_path / "late")

        callback, *_ = fit(tmp_path / "run", Slow(), options=options)
    lines = [json.loads(line) for line in (tmp_path / "tb" / "diffs.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(6))
    assert callback.first_report is None

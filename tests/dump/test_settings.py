"""Settings in run folders: in both formats, after a resume, of an older padiff, and damaged."""

from __future__ import annotations

import json

import pytest
from kit.trainings import optimizer_of, trained

import padiff
from padiff.dump import open_run
from padiff.errors import RunFolderError
from padiff.records import settings_at


@pytest.fixture(scope="module")
def off():
    """A pair that is off by beta2 and epsilon, of which no tensor tells."""
    make = optimizer_of("paddle", "AdamW", {"learning_rate": 0.001, "beta2": 0.9991, "epsilon": 1.1e-8})
    return trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001})), trained("paddle", make)


FORMATS = {"plain": {"pack": False}, "packed": {"pack": True}, "sketched": {"detail": "sketch"}}


@pytest.mark.parametrize("form", FORMATS)
def test_both_formats_keep_it(form, tmp_path):
    def each(step, net, optimizer):
        if step == 1:
            optimizer.param_groups[0]["betas"] = (0.9, 0.9991)

    options = FORMATS[form]
    make = optimizer_of("torch", "AdamW", {"lr": 0.001})
    trained("torch", make, folder=tmp_path / "a", **options)
    trained("torch", make, folder=tmp_path / "b", each=each, **options)
    run = open_run(tmp_path / "b")
    assert [run.steps(number)[0].settings for number in range(3)] == [{}, *[{"optimizer.0.group.0.beta2": 0.9991}] * 2]
    report = padiff.compare_runs(tmp_path / "a", tmp_path / "b")
    assert (report.first_diff.step, report.first_diff.stage) == (1, "update")
    assert report.first_diff.cause.fix == "torch.optim.AdamW(..., betas=(0.9, 0.999))"
    # One step by itself is read with what its run says.
    one = open_run(tmp_path / "b" / "steps" / "00000001")
    assert settings_at(one.info.settings, one.steps(1)[0].settings)["optimizer.0.group.0.beta2"] == 0.9991


@pytest.mark.parametrize("form", FORMATS)
def test_a_folder_without_settings_is_read_as_before(form, tmp_path, off):
    make = optimizer_of("torch", "AdamW", {"lr": 0.001})
    trained("torch", make, folder=tmp_path / "a", **FORMATS[form])
    content = json.loads((tmp_path / "a" / "run.json").read_text())
    del content["settings"]
    (tmp_path / "a" / "run.json").write_text(json.dumps(content))
    report = padiff.compare_runs(tmp_path / "a", off[1])
    assert report.passed and not report.settings_differ


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_says_of_each_step_what_held_in_it(known, tmp_path):
    trained("torch", optimizer_of("torch", "AdamW", {"lr": 0.001}), folder=tmp_path / "a", steps=2)
    if not known:  # an older padiff began it
        content = json.loads((tmp_path / "a" / "run.json").read_text())
        del content["settings"]
        (tmp_path / "a" / "run.json").write_text(json.dumps(content))
    make = optimizer_of("torch", "AdamW", {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.0})
    trained("torch", make, folder=tmp_path / "a", existing="resume", first=2, steps=2)
    run = open_run(tmp_path / "a")
    now = [settings_at(run.info.settings, run.steps(number)[0].settings) for number in range(4)]
    betas = [one.get("optimizer.0.group.0.beta2") for one in now]
    assert betas == ([0.999, 0.999, 0.99, 0.99] if known else [None, None, 0.99, 0.99])
    assert [one.get("optimizer.0.rule") for one in now] == (["AdamW"] * 4 if known else [None, None, "AdamW", "AdamW"])


@pytest.mark.parametrize("wrong", [7, {"a": {"b": 1}}, {"a": [[1]]}, {"a": 10**30}, ["a"]])
@pytest.mark.parametrize("file", ["run.json", "steps/00000000/rank_0/params.json"])
def test_settings_that_are_none_are_refused_with_the_file(wrong, file, tmp_path):
    trained("torch", optimizer_of("torch", "SGD", {"lr": 0.01}), folder=tmp_path / "a", pack=False, steps=1)
    path = tmp_path / "a" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": wrong}))
    with pytest.raises(RunFolderError, match="damaged"):
        open_run(tmp_path / "a").steps(0)


def test_what_is_named_like_settings_and_is_none_is_passed_over(tmp_path, off):
    make = optimizer_of("torch", "AdamW", {"lr": 0.001})
    trained("torch", make, folder=tmp_path / "a", steps=2)
    path = tmp_path / "a" / "run.json"
    content = json.loads(path.read_text())
    content["settings"] |= {
        "optimizer.0.group.0.parameters": [1, None],
        "optimizer.0.group.x.beta2": 3,
        "optimizer.99999999999999999999.rule": "SGD",
        "optimizer.0.rule": 7,
        "training": "often",
        "training.others": 4,
        "clip.kind": 3,
        "loss.function": [1],
    }
    path.write_text(json.dumps(content))
    assert padiff.compare_runs(tmp_path / "a", off[1]).passed
    assert padiff.compare_runs(off[1], tmp_path / "a").passed

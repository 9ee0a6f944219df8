"""Calls that can't be meant, copies of a model under recording, and folders that are there already."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import hook_count, is_before
from kit.nets import batch, mlp, one_step

import padiff
import padiff_hapi as hapi
import padiff_lightning as lightning
from padiff.errors import RunFolderError, UsageError, WriterError
from padiff.recorder.options import Identity, RecordOptions, Scope, Target
from padiff_hooks.training import TrainingRecorder

NO_MODELS = [None, 7, "model", lambda x: x, [torch.nn.Linear(1, 1)], torch.nn.Linear]


@pytest.mark.parametrize("model", NO_MODELS, ids=lambda model: type(model).__name__)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(UsageError, match=r"expected a torch.nn.Module or a paddle.nn.Layer, got \w+\.\w+"):
        padiff.record(model)


def test_a_paddle_model_is_refused_with_the_way_to_go_on():
    with pytest.raises(UsageError, match=r"A paddle.Model wraps the layer: give its .network, or use padiff_hapi"):
        padiff.record(paddle.Model(paddle.nn.Linear(2, 2)))


@pytest.mark.parametrize("every", [0, -1, 2.5, "3", True])
def test_an_impossible_every_n_steps_is_refused(kit, every):
    with pytest.raises(UsageError, match="every_n_steps has to be a whole number of at least 1, got"):
        padiff.record(mlp(kit), every_n_steps=every)


@pytest.mark.parametrize("start", [-1, 1.5, "0", True])
def test_an_impossible_start_step_is_refused(kit, start):
    with pytest.raises(UsageError, match="start_step has to be a whole number of at least 0"):
        padiff.record(mlp(kit), start_step=start)


def test_an_unknown_on_error_or_existing_is_refused(kit, tmp_path):
    with pytest.raises(UsageError, match="on_error is 'raise' or 'warn', got 'ignore'"):
        padiff.record(mlp(kit), on_error="ignore")
    rec = padiff.record(mlp(kit), tmp_path / "run", existing="append")
    with pytest.raises(UsageError, match="existing is 'error', 'resume' or 'overwrite', got 'append'"), rec:
        pass


@pytest.mark.parametrize("make", [padiff.record, TrainingRecorder, lightning.PaDiffCallback, hapi.PaDiffCallback])
def test_a_mistyped_option_is_refused_with_the_nearest_one(make):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'every_n_step'\. Nearest: every_n_steps"):
        make("run", every_n_step=2)


def test_each_option_that_is_typed_is_taken_and_no_other():
    taken = [field.name for kind in (Scope, Target, Identity) for field in dataclasses.fields(kind)]
    assert sorted(taken) == sorted({*RecordOptions.__annotations__, "dir_path"})


# -- two recorders ---------------------------------------------------------------------------------------------------


def test_two_recorders_on_one_model_are_refused_and_the_first_goes_on(kit):
    model = mlp(kit)
    x, _ = batch(kit)
    with padiff.record(model) as first:
        hooks = hook_count(kit, model)
        with pytest.raises(UsageError, match="another recorder is recording this model"), padiff.record(model):
            pass
        assert hook_count(kit, model) == hooks
        model(x)
    assert first.run.numbers() == [0]


def test_a_second_recorder_works_after_the_first_is_closed(kit):
    model = mlp(kit)
    for _ in range(2):
        with padiff.record(model) as rec:
            model(batch(kit)[0])
        assert rec.run.numbers() == [0]


def test_a_second_recorder_works_after_the_first_ended_by_an_exception(kit):
    model = mlp(kit)
    with pytest.raises(KeyError), padiff.record(model):
        raise KeyError
    with padiff.record(model) as rec:
        model(batch(kit)[0])
    assert rec.run.numbers() == [0]


def test_a_recorder_that_could_not_open_its_folder_leaves_the_model_free(kit, tmp_path):
    (tmp_path / "file").write_text("no folder")
    model = mlp(kit)
    with pytest.raises(RunFolderError), padiff.record(model, tmp_path / "file", on_error="raise"):
        pass
    assert hook_count(kit, model) == 0
    with padiff.record(model) as rec:
        model(batch(kit)[0])
    assert rec.run.numbers() == [0]


def test_a_recorder_is_used_once(kit):
    model = mlp(kit)
    with padiff.record(model) as rec, pytest.raises(UsageError, match="this recorder is open already"):
        rec.open()


def test_the_recorder_of_a_part_and_of_the_whole_do_not_see_each_other(kit):
    model = mlp(kit)
    with padiff.record(model) as whole, padiff.record(model[0]) as part:
        model(batch(kit)[0])
    assert whole.run.numbers() == part.run.numbers() == [0]
    assert hook_count(kit, model) == 0


# -- copies ----------------------------------------------------------------------------------------------------------


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_post_hooks")


def copies(model):
    if isinstance(model, paddle.nn.Layer) and is_before(paddle, 3, 2):
        pytest.skip("this paddle pickles no parameter")
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


def test_a_copy_made_while_the_model_is_recorded_is_a_model_like_any_other(kit):
    model = mlp(kit)
    x, _ = batch(kit)
    with padiff.record(model) as rec:
        twins = copies(model)
        expected = kit.numpy(model(x))
        for twin in twins:
            np.testing.assert_array_equal(kit.numpy(twin(x)), expected)
        rec.try_dump()
    (step,) = rec.run.steps(0)
    assert step.micro_batches == 1
    assert [r.site for r in step.records if r.stage == "input"] == ["(root)/input/input.input"]
    for twin in twins:
        assert not [name for name in vars(twin) if "padiff" in name]
        with padiff.record(twin) as again:
            twin(x)
        assert again.run.numbers() == [0]


def test_copies_have_no_hooks(kit):
    model = mlp(kit)
    with padiff.record(model) as rec:
        model(batch(kit)[0])
        twins = copies(model)
        saved = pickle.dumps(model)
    assert b"padiff" not in saved
    for twin in twins:
        dicts = (vars(layer).get(name) for layer in kit.layers(twin) for name in HOOKS)
        assert not any(dicts)
    assert rec.run.numbers() == [0]


def test_a_copy_that_is_called_inside_the_models_own_forward_does_not_disturb_the_recording(kit):
    # A momentum teacher: a copy of a part, made while it is recorded, and called beside it.
    class Net(kit.Net):
        def build(self):
            self.student = kit.Linear(4, 3)
            self.teacher = []

        def forward(self, x):
            if not self.teacher:
                self.teacher.append(copy.deepcopy(self.student))
            return self.student(self.teacher[0](x)[:, :1] + x)

    model = Net()
    with padiff.record(model) as rec:
        model(batch(kit)[0]).sum().backward()
    (step,) = rec.run.steps(0)
    forward = [r.site for r in step.records if r.stage == "forward"]
    assert forward == ["student/forward/output.0", "(root)/forward/output.0"]


def test_the_state_of_a_model_under_recording_has_no_more_names_than_else(kit):
    model = mlp(kit)
    before = list(model.state_dict())
    with padiff.record(model):
        assert list(model.state_dict()) == before


# -- folders ---------------------------------------------------------------------------------------------------------


def train(kit, folder, steps=2, **options):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for _ in range(steps):
            one_step(kit, model, optimizer, *batch(kit), rec)
    return padiff.open_run(folder)


def weight(run, number):
    return next(r.value for r in run.steps(number)[0].records if r.site == "0/weight/weight")


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_was(kit, tmp_path):
    before = weight(train(kit, tmp_path / "run"), 0)
    with pytest.raises(RunFolderError, match="holds a run"):
        train(kit, tmp_path / "run")
    np.testing.assert_array_equal(weight(padiff.open_run(tmp_path / "run"), 0), before)


def test_resume_goes_on_and_replaces_steps_that_are_recorded_again(kit, tmp_path):
    first = train(kit, tmp_path / "run", steps=3)
    kept, replaced = weight(first, 0), weight(first, 2)
    run = train(kit, tmp_path / "run", steps=3, existing="resume", start_step=2)
    assert run.numbers() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(weight(run, 0), kept)
    assert not np.array_equal(weight(run, 2), replaced)


def test_overwrite_leaves_only_the_new_run(kit, tmp_path):
    train(kit, tmp_path / "run", steps=4)
    assert train(kit, tmp_path / "run", steps=2, existing="overwrite").numbers() == [0, 1]


def test_overwrite_keeps_its_hands_off_what_is_no_run(kit, tmp_path):
    (tmp_path / "photos" / "steps").mkdir(parents=True)
    for name in ("cat.jpg", "steps/dance.jpg"):
        (tmp_path / "photos" / name).write_bytes(b"miaow")
    with pytest.raises(RunFolderError, match=r"it is no run folder. Give an empty one"):
        train(kit, tmp_path / "photos", existing="overwrite")
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"miaow"
    assert (tmp_path / "photos" / "steps" / "dance.jpg").read_bytes() == b"miaow"


def test_a_step_that_is_recorded_twice_is_reported(kit, tmp_path):
    model = mlp(kit)

    def twice():
        with padiff.record(model, tmp_path / "run", on_error="raise") as rec:
            for _ in range(2):
                rec.discard()
                rec.step = 0
                rec.attach()
                model(batch(kit)[0])
                rec.try_dump()
                rec.flush()

    with pytest.raises(WriterError, match=r"step 0 stands in .* already: two recorders write into one run folder"):
        twice()
    assert hook_count(kit, model) == 0

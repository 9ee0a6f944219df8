"""Trainings in torch and paddle kept as sketches: equal ones pass, faults are found where tensors show them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.records import sketched_run

import padiff
from padiff.frameworks import framework_of
from padiff.sketches.sketch import ELEMENTS, sample, sketch_of, sketch_of_sample

from .twins import FAULTS, paddle_run, torch_run

# In the first step, too.
SKETCHES = {"detail": "sketch", "functions": False}

MIXES = {
    "both sketched": (lambda r: True, lambda r: True),
    "reference sketched": (lambda r: True, lambda r: False),
    "candidate sketched": (lambda r: False, lambda r: True),
    "some of each": (lambda r: r.stage in ("forward", "weight"), lambda r: r.stage != "forward"),
}


def where(first):
    return (first.step, first.stage, first.reference, first.slot) if first is not None else None


@pytest.fixture(scope="module")
def torch_full():
    return torch_run()


def test_recorded_sketches_are_those_of_the_full_tensors():
    """What the other tests make from full tensors is what a recorder keeps; Linear lies the other way in paddle."""
    for run, sketched in ((torch_run(), torch_run(**SKETCHES)), (paddle_run(), paddle_run(**SKETCHES))):
        for number in (0, 3):
            (expected,), (found,) = sketched_run(run).steps(number), sketched.steps(number)
            assert len(expected.records) == len(found.records)
            for one, other in zip(expected.records, found.records):
                assert one.site == other.site
                if one.sketch is not None:
                    assert one.sketch.row().tobytes() == other.sketch.row().tobytes(), one.site
                    assert one.sketch.transposed == other.sketch.transposed


def test_both_frameworks_look_at_the_same_places():
    """In the first step inputs and weights are equal to the bit: so are their sketches."""
    (reference,), (candidate,) = torch_run(**SKETCHES).steps(0), paddle_run(**SKETCHES).steps(0)
    names = {"_mean": "running_mean", "_variance": "running_var"}
    sketches = {f"{r.layer}/{names.get(r.slot, r.slot)}": r for r in candidate.records if r.stage == "weight"}
    compared = 0
    for one in reference.records:
        if one.stage == "weight" and one.slot != "num_batches_tracked":
            other = sketches[f"{one.layer}/{one.slot}"]
            assert one.sketch.row().tobytes() == other.sketch.row().tobytes(), one.site
            assert other.sketch.transposed == (one.slot == "weight" and one.layer in "579")
            compared += 1
    assert compared == 12
    inputs = [next(r for r in step.records if r.stage == "input") for step in (reference, candidate)]
    assert inputs[0].sketch.row().tobytes() == inputs[1].sketch.row().tobytes()
    assert inputs[0].sketch.size > ELEMENTS


@pytest.mark.parametrize("mix", MIXES)
def test_equal_trainings_pass(mix, torch_full):
    report = padiff.compare_runs(*(sketched_run(run, of) for run, of in zip((torch_full, paddle_run()), MIXES[mix])))
    full = padiff.compare_runs(torch_full, paddle_run())
    assert full.passed, full.first_diff
    assert report.passed, report.first_diff
    assert report.coverage.compared == full.coverage.compared
    assert report.coverage.sketched > 100
    assert report.coverage.bounded == 0
    assert report.coverage.unmeasured == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_where_tensors_show_them(fault, torch_full):
    wrong = paddle_run(fault=fault)
    full = padiff.compare_runs(torch_full, wrong).first_diff
    assert full is not None
    for mix in list(MIXES)[FAULTS.index(fault) % 2 :: 2]:  # two of them for each, by turns
        found = padiff.compare_runs(*(sketched_run(run, of) for run, of in zip((torch_full, wrong), MIXES[mix])))
        assert where(found.first_diff) == where(full), mix


@pytest.mark.parametrize("seed", range(1, 3))
def test_no_false_alarms(seed):
    """Twenty steps that come apart by rounding alone."""
    report = padiff.compare_runs(torch_run(seed, 20, detail="sketch"), paddle_run(seed, 20, detail="sketch"))
    assert report.passed, report.first_diff
    assert report.coverage.unmeasured == ()
    assert len(report.coverage.steps) == 20


def test_full_steps_between_sketched_ones():
    reference = torch_run(detail="sketch", full_every_n_steps=3)
    candidate = paddle_run(detail="sketch", full_every_n_steps=2)
    report = padiff.compare_runs(reference, candidate)
    assert report.passed, report.first_diff
    compared = [d for d in report.diffs if d.compared and d.pair.anchor.layer != "(loop)"]
    bases = [{d.figures.basis for d in compared if d.pair.step == number} for number in range(6)]
    assert bases == [{"tensors"}] + [{"sketches"}] * 5  # of both sides there is all in the first step only


def test_a_first_diff_says_that_it_is_from_sketches():
    found = padiff.compare_runs(
        sketched_run(torch_run()), sketched_run(paddle_run(fault="a layer's output"))
    ).first_diff
    assert "from sketches" in found.message
    assert "9%" in found.message


# -- sketches of tensors, by framework ---------------------------------------------------------------------------------

NAMES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64", "complex128"]


def tensors(array, dtype):
    """The same tensor in both frameworks."""
    reference = torch.from_numpy(array).to(getattr(torch, dtype))
    candidate = paddle.to_tensor(array).astype(dtype)
    return reference, candidate


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (60, 50), (90, 110), (4, 8, 16, 30)], ids=str)
def test_samples_are_the_same_in_both_frameworks(dtype, shape):
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 20)
    if dtype.startswith("complex"):
        array = np.asarray(array + 1j)
    if dtype == "uint8":
        array = np.asarray(np.abs(array))
    reference, candidate = tensors(array, dtype)
    frameworks = framework_of(torch.nn.ReLU()), framework_of(paddle.nn.ReLU())
    for turned in (False, True) if len(shape) == 2 else (False,):
        whole = frameworks[0].tensors.copy(reference)
        rows = [sketch_of(whole, turned).row().tobytes()]
        for framework, tensor in zip(frameworks, (reference, candidate)):
            taken = framework.tensors.sample(tensor, turned)
            size = whole.size * (2 if dtype.startswith("complex") else 1)
            assert taken.shape == (min(size, ELEMENTS),)
            rows.append(sketch_of_sample(taken, size, turned).row().tobytes())
        assert rows[0] == rows[1] == rows[2]


def test_samples_of_views():
    array = np.random.default_rng(1).normal(size=(80, 120)).astype(np.float32)
    framework = framework_of(torch.nn.ReLU())
    tensor = torch.from_numpy(array.copy())
    for view, values in (
        (tensor.t(), array.T),
        (tensor[::2, 3:], array[::2, 3:]),
        (tensor.expand(3, 80, 120), np.broadcast_to(array, (3, 80, 120))),
        (tensor.requires_grad_(), array),
        (tensor.detach().to_sparse(), array),
        (torch.complex(tensor.detach(), tensor.detach()).conj(), array - 1j * array),
    ):
        assert (
            framework.tensors.sample(view).tolist() == sample(np.ascontiguousarray(values)).astype(np.float32).tolist()
        )
    candidate = paddle.to_tensor(array)
    framework = framework_of(paddle.nn.ReLU())
    for view, values in (
        (candidate.t(), array.T),
        (candidate[::2, 3:], array[::2, 3:]),
        (candidate.unsqueeze(0), array[None]),
    ):
        assert framework.tensors.sample(view).tolist() == sample(np.ascontiguousarray(values)).tolist()


def test_a_sample_is_a_copy():
    for make, framework in (
        (torch.ones, framework_of(torch.nn.ReLU())),
        (paddle.ones, framework_of(paddle.nn.ReLU())),
    ):
        for shape in ([5], [100, 100]):
            tensor = make(shape)
            taken = framework.tensors.sample(tensor)
            tensor.add_(make(shape))
            assert set(taken.tolist()) == {1.0}

"""Floors that are measured: clean pairs stay within them, and what the modelled limits hide is found by them."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.compare.judge.limits import FLOORS
from padiff.errors import RunFolderError, UsageError
from padiff.records import Grade, Rule
from padiff.replaying.step_runner import RUNS, Perturbation
from padiff.report_formats import to_json, to_markdown
from replay.resnets import PaddleResNet, TorchResNet, batch
from replay.trainings import SIDES, Paddle, Torch, replayed, train
from replay.vits import PaddleViT, TorchViT

STAGES = {"forward", "loss", "backward", "grad", "update"}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floors")
    for name, side in SIDES.items():
        train(side, folder / name, steps=4, packs=3)
    return folder


@pytest.fixture(scope="module")
def measured(references, tmp_path_factory):
    """A clean replay with floors and float64, each way."""
    folder = tmp_path_factory.mktemp("measured")
    found = {}
    for name, side in SIDES.items():
        source = references / ("paddle" if name == "torch" else "torch")
        found[name] = folder / name, replayed(side, source, folder / name, floors=True, float64=True)
    return found


def multiples(report, stage=None):
    return [d.floors for d in report.diffs if d.floors is not None and stage in (None, d.pair.stage)]


# -- what is measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_numbers_are_moved_by_one_unit_in_the_last_place(dtype):
    values = np.array([1.5, -3e-3, 7.0, 0.0, np.inf, np.nan, 250.0], dtype)
    moved = Perturbation(0, 1, np.dtype(dtype).name).moved(values, 3)
    assert moved.dtype == values.dtype
    for one, other in zip(values, moved):
        if not np.isfinite(one) or one == 0:
            assert one == other or np.isnan(other)
        else:
            up, down = np.nextafter(one, dtype(np.inf)), np.nextafter(one, dtype(-np.inf))
            assert other in (up, down)
    again = Perturbation(0, 1, np.dtype(dtype).name).moved(values, 3)
    np.testing.assert_array_equal(moved.astype(np.float64), again.astype(np.float64))
    large = np.random.RandomState(0).randn(4000).astype(dtype)
    signs = np.sign(Perturbation(0, 1, np.dtype(dtype).name).moved(large, 0).astype(float) - large.astype(float))
    assert abs(signs.mean()) < 0.1 and (signs != 0).all()
    assert (
        Perturbation(1, 1, np.dtype(dtype).name).moved(large, 0)
        != Perturbation(0, 1, np.dtype(dtype).name).moved(large, 0)
    ).any()


def test_what_is_computed_in_half_precision_is_moved_by_its_last_places():
    values = np.array([1.0, 3.0], np.float32)
    moved = Perturbation(0, 1, "bfloat16").moved(values, 0)
    assert (np.abs(moved - values) == [2.0**-7, 2.0**-6]).all() or (np.abs(moved - values) >= 2.0**-8).all()
    whole = np.arange(3)
    assert Perturbation(0, 1).moved(whole, 0) is whole


def test_the_floor_of_a_linear_layer_is_what_its_inputs_and_weights_make_of_it(tmp_path):
    """Expected: the root of the sum of squares of what each element's last place makes of an output."""
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 32, bias=False)
    with padiff.record(net, tmp_path / "a", replay_every_n_steps=1) as rec:
        x = torch.randn(16, 64)
        net(x).square().mean().backward()
        rec.try_dump()
    candidate = paddle.nn.Linear(64, 32, bias_attr=False)
    with padiff.replay(tmp_path / "a", candidate, tmp_path / "b", floors=40) as replay:
        for step in replay:
            candidate(*step.inputs).square().mean().backward()
    floors = padiff.open_run(tmp_path / "b").steps(0)[0].floors
    assert floors.runs == 40 and set(floors.units) == {1, 16}
    place = lambda array: np.spacing(np.abs(array)).astype(np.float64)  # noqa: E731
    a, w = x.numpy(), net.weight.detach().numpy()
    expected = np.sqrt(((place(a) ** 2) @ (w.T.astype(float) ** 2)) + ((a.astype(float) ** 2) @ (place(w).T ** 2)))
    found = floors.sites["(root)/forward/output.0"]
    # The largest of 40, of a norm over 512 outputs; and both runs round as they add up.
    assert 1.0 < found.error / np.linalg.norm(expected) < 2.0
    assert found.size == 512 and found.norm == pytest.approx(np.linalg.norm(a @ w.T), rel=1e-5)


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_a_clean_pair_stays_far_below_the_limit_in_every_stage(measured, name):
    _, report = measured[name]
    assert report.passed, str(report)
    assert {d.pair.stage for d in report.diffs if d.judgement and d.judgement.rule is Rule.MEASURED} == STAGES
    assert len(multiples(report)) > 180 and max(multiples(report)) < FLOORS / 10
    # Nor are they so large that everything would pass.
    assert all(np.median([m for m in multiples(report, stage) if m]) > 0.02 for stage in STAGES)
    grades = {diff.grade for diff in report.diffs if diff.grade is not None}
    assert grades == {Grade.EQUAL, Grade.NOISE}


def test_a_training_with_kinks_that_amplifies_rounding_matches(tmp_path):
    Torch.seed(1)
    net = TorchResNet()
    optimizer = Torch.momentum(net, 0.2)
    with padiff.record(net, tmp_path / "a", optimizer=optimizer, every_n_steps=5, replay_every_n_steps=5) as rec:
        for step in range(21):
            x, y = batch(step)
            Torch.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y)).backward()
            Torch.update(net, optimizer, clip=0)
            rec.try_dump()
    candidate = PaddleResNet()
    report = replayed_plainly(candidate, Paddle.momentum(candidate), tmp_path / "a", tmp_path / "b")
    assert report.passed, str(report)
    assert sum(d.judgement is not None and d.judgement.rule is Rule.MEASURED for d in report.diffs) > 100


def replayed_plainly(net, optimizer, reference, folder, **options):
    with padiff.replay(reference, net, folder, optimizer=optimizer, **{"floors": True, **options}) as replay:
        for step in replay:
            Paddle.cross_entropy(net(*step.inputs), *step.labels).backward()
            Paddle.update(net, optimizer)
    return replay.report


class _Written(torch.nn.Linear):
    """A linear layer whose bias is added in float32 under an autocast: what it gives does not show bfloat16."""

    def forward(self, x):
        return x @ self.weight.t() + self.bias


def test_under_an_autocast_numbers_are_moved_by_its_last_places(tmp_path):
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(kind(16, 32), torch.nn.Tanh(), kind(32, 4)) for kind in (torch.nn.Linear, _Written)]

    def trained(net, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(inputs).float().square().mean()
        loss.backward()

    with padiff.record(nets[0], tmp_path / "a", replay_every_n_steps=1) as rec:
        trained(nets[0], torch.randn(64, 16))
        rec.try_dump()
    with padiff.replay(tmp_path / "a", nets[1], tmp_path / "b", floors=True) as replay:
        for step in replay:
            trained(nets[1], *step.inputs)
    assert replay.report.passed, str(replay.report)
    floors = padiff.open_run(tmp_path / "b").steps(0)[0].floors
    assert floors.dtype == "bfloat16" and floors.sites["0/forward/output.0"].relative > 2**-9
    assert 0 < max(multiples(replay.report, "forward")) < FLOORS / 10


# -- what they find ------------------------------------------------------------------------------------------------


def test_a_gradient_that_the_modelled_limit_lets_pass_is_found(references, tmp_path):
    net = PaddleViT()
    noise = paddle.to_tensor(np.random.RandomState(5).randn(16, 48).astype("float32"))
    net.layers[0].attention.qkv.weight.register_hook(lambda gradient: gradient + 1e-3 * gradient.abs() * noise)
    report = replayed(Paddle, references / "torch", tmp_path / "c", net=net, floors=True)
    first = report.first_diff
    assert first is not None and first.stage == "grad" and first.candidate == "layers.0.attention.qkv", str(report)
    assert first.diff.judgement.rule is Rule.MEASURED and first.diff.grade is Grade.WRONG
    assert "times its floor" in first.message
    shutil.rmtree(tmp_path / "c" / "floors")
    assert padiff.compare_runs(references / "torch", tmp_path / "c").passed


def test_a_fault_of_the_forward_pass_is_found_where_it_is(references, tmp_path):
    net = PaddleViT()
    net.layers[0].ln2._epsilon = 2e-5
    report = replayed(Paddle, references / "torch", tmp_path / "c", net=net, floors=True)
    assert report.first_diff.candidate == "layers.0.ln2", str(report)
    assert any(diff.grade is Grade.WRONG and diff.floors > FLOORS for diff in report.diffs)


def test_dropout_that_is_not_fed_is_no_noise(references, tmp_path):
    """The runs that are moved draw what the step drew: a floor is what rounding makes, and not another mask."""

    class Dropping(PaddleViT):
        def forward(self, x):
            return paddle.nn.functional.dropout(super().forward(x), 0.2)

    net = Dropping()
    report = replayed(Paddle, references / "torch", tmp_path / "c", net=net, floors=4)
    assert not report.passed and max(m for m in multiples(report, "forward")) > FLOORS


# -- float64 -------------------------------------------------------------------------------------------------------


def test_float64_says_which_side_is_farther(measured, tmp_path):
    """Between two that round alike neither is far; of a reference in bfloat16 it is the reference, by far."""
    for name, (_, report) in measured.items():
        thirds = [d.figures.third for d in report.diffs if d.figures is not None and d.figures.third is not None]
        assert len(thirds) > 180 and {third.code for third in thirds} == {"candidate"}
        assert "float64 (candidate's code): of " in str(report), name
        grads = [max(d.figures.third.errors) for d in report.diffs if d.pair.stage == "grad" and d.floors]
        assert max(grads) < 1e-5
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).bfloat16()
    with padiff.record(net, tmp_path / "a", replay_every_n_steps=1) as rec:
        net(torch.randn(8, 8).bfloat16()).float().square().mean().backward()
        rec.try_dump()
    candidate = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 4))
    with padiff.replay(tmp_path / "a", candidate, tmp_path / "b", floors=True, float64=True) as replay:
        for step in replay:
            candidate(*(x.astype(candidate[0].weight.dtype) for x in step.inputs)).square().mean().backward()
    forward = [d for d in replay.report.diffs if d.pair.stage == "forward" and d.figures.third is not None]
    assert len(forward) == 4
    for diff in forward:
        third = diff.figures.third
        assert third.farther == "reference" and third.times > 1e3 and third.errors.candidate < 1e-6
        # What was measured in float32 is no floor of a step that one side computed in bfloat16.
        assert diff.floors is None and diff.judgement.rule is not Rule.MEASURED


def test_the_step_in_float64_is_that_of_a_model_in_float64(measured, references):
    """Expected: the same weights and batch in a new model of float64."""
    folder, _ = measured["torch"]
    exact = padiff.open_run(folder).steps(0)[0].floors.exact
    assert all(source.read().dtype == np.float64 for source in exact.values())
    net = TorchViT(drop=0.0)
    padiff.start_from(folder, net)
    patch = net.double().patch
    given = padiff.batches(references / "paddle", framework="torch")[0].inputs[0]
    expected = patch(given.double()).detach().numpy()
    np.testing.assert_allclose(exact["patch/forward/output.0"].read(), expected, rtol=1e-12)


# -- what stays as it is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_the_recorded_step_is_the_same_with_floors(measured, references, tmp_path, name):
    source = references / ("paddle" if name == "torch" else "torch")
    replayed(SIDES[name], source, tmp_path / "plain")
    for number in (0, 3):
        one, other = (padiff.open_run(run).steps(number)[0] for run in (tmp_path / "plain", measured[name][0]))
        assert [r.site for r in one.records] == [r.site for r in other.records] and one.floors is None
        assert all(np.array_equal(a.value, b.value) for a, b in zip(one.records, other.records))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_model_and_optimizer_are_given_back(references, tmp_path, name, exact):
    """Also where the loop fails in a step that is done once more."""
    side, source = SIDES[name], references / ("paddle" if name == "torch" else "torch")
    side.seed(4)
    net = side.ViT().train() or side.ViT()
    net.train()
    optimizer = side.adamw(net, 0.5)
    train(side, tmp_path / "own", steps=2, net=net, optimizer=lambda _: optimizer)
    before, state = side.values(net), repr(optimizer.state_dict())
    dtypes, default = [str(p.dtype) for p in net.parameters()], (torch.get_default_dtype(), paddle.get_default_dtype())
    with (
        pytest.raises(ZeroDivisionError),
        padiff.replay(source, net, tmp_path / "c", optimizer=optimizer, floors=2, float64=True) as replay,
    ):
        for step in replay:
            for micro in step.batches:
                (side.cross_entropy(net(*micro.inputs), *micro.labels) / 2).backward()
            if step.moved and (step.exact or not exact):
                assert exact == ("64" in str(next(iter(net.parameters())).dtype))
                raise ZeroDivisionError
            side.update(net, optimizer)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(before, side.values(net)))
    assert repr(optimizer.state_dict()) == state and [str(p.dtype) for p in net.parameters()] == dtypes
    assert (torch.get_default_dtype(), paddle.get_default_dtype()) == default
    assert padiff.open_run(tmp_path / "c").steps(0)[0].floors is None
    # And it trains on.
    train(side, tmp_path / "on", steps=1, net=net, optimizer=lambda _: optimizer)


def test_the_reference_is_not_written_to(measured, references):
    assert not list(references.rglob("floors"))
    assert len(list(measured["torch"][0].rglob("floors.json"))) == 2


def test_a_loop_that_is_left_has_no_floors(references, tmp_path):
    net = TorchViT().train()
    optimizer = Torch.adamw(net)
    with padiff.replay(references / "paddle", net, tmp_path / "c", optimizer=optimizer, floors=3) as replay:
        for step in replay:
            for micro in step.batches:
                (Torch.cross_entropy(net(*micro.inputs), *micro.labels) / 2).backward()
            Torch.update(net, optimizer)
            if step.moved:
                break
    assert replay.done == [0] and replay.report.passed
    assert padiff.open_run(tmp_path / "c").steps(0)[0].floors is None


# -- in files and reports ------------------------------------------------------------------------------------------


def test_compared_later_floors_are_used(measured, references, tmp_path):
    folder, report = measured["paddle"]
    shutil.copytree(folder, tmp_path / "moved")
    again = padiff.compare_runs(references / "torch", tmp_path / "moved", workers=1)
    assert [d.judgement.limit for d in again.diffs if d.judgement] == pytest.approx(
        [d.judgement.limit for d in report.diffs if d.judgement]
    )
    assert [d.floors for d in again.diffs] == [d.floors for d in report.diffs]
    fixed = padiff.compare_runs(references / "torch", tmp_path / "moved", policy=padiff.Tolerance(1e-3, 1e-3))
    assert not any(d.judgement.rule is Rule.MEASURED for d in fixed.diffs if d.judgement)


def test_a_report_says_multiples_and_grades(measured):
    _, report = measured["paddle"]
    lines = str(report).splitlines()
    assert any("have a measured floor" in line and " noise" in line for line in lines)
    assert any(line.startswith("largest in multiples of their floors: forward ") for line in lines)
    content = json.loads(json.dumps(to_json(report)))
    diffs = [diff for step in content["steps"] for diff in step["diffs"]]
    some = next(diff for diff in diffs if diff.get("floors") and diff["grade"] == "noise")
    assert some["floors"] == pytest.approx(some["rel_l2"] / some["floor"], rel=1e-6)
    assert {diff["grade"] for diff in diffs if "grade" in diff} == {"equal", "noise"}
    third = next(diff["float64"] for diff in diffs if "float64" in diff)
    assert third["code"] == "candidate" and third["farther"] in ("reference", "candidate", None)
    assert "measured floor" in to_markdown(report)


def test_damaged_floors_are_named(measured, tmp_path):
    shutil.copytree(measured["torch"][0], tmp_path / "c")
    path = tmp_path / "c" / "floors" / "00000003" / "rank_0" / "floors.json"
    content = json.loads(path.read_text())
    content["sites"][0]["error"] = -1
    path.write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=r"floors.json is damaged: ValueError: a floor of -1"):
        padiff.open_run(tmp_path / "c").steps(3)
    path.write_text("{")
    with pytest.raises(RunFolderError, match=r"floors.json is damaged"):
        padiff.open_run(tmp_path / "c").steps(3)


def test_floors_go_with_the_recording_that_they_are_of(references, tmp_path):
    replayed(Paddle, references / "torch", tmp_path / "c", floors=1, steps=[3])
    assert padiff.open_run(tmp_path / "c").steps(3)[0].floors.runs == 1
    replayed(Paddle, references / "torch", tmp_path / "c", steps=[3], existing="overwrite")
    assert padiff.open_run(tmp_path / "c").steps(3)[0].floors is None


@pytest.mark.parametrize("floors", [-1, 0.5, "many"])
def test_no_number_of_runs(references, tmp_path, floors):
    with pytest.raises(UsageError, match="floors is True, False or a number of runs"):
        padiff.replay(references / "torch", PaddleViT(), tmp_path / "c", floors=floors)


# -- calibrate -----------------------------------------------------------------------------------------------------


def calibrated(side, run, net=None, **options):
    side.seed(11)
    net = side.ViT() if net is None else net
    net.train()
    optimizer = side.adamw(net, 0.5)
    before = side.values(net)

    def step(step):
        for micro in step.batches:
            (side.cross_entropy(net(*micro.inputs), *micro.labels) / 2).backward()
        side.update(net, optimizer)

    found = padiff.calibrate(run, net, step, optimizer=optimizer, **options)
    assert all((one == other).all() for one, other in zip(before, side.values(net)))
    return found


def test_calibrate_writes_the_floors_of_a_run_into_it(references, tmp_path):
    shutil.copytree(references / "torch", tmp_path / "torch")
    found = calibrated(Torch, tmp_path / "torch")
    assert [floors.step for floors in found] == [0, 3] and all(floors.runs == RUNS for floors in found)
    assert found[0].exact and not found[0].notes
    replayed(Paddle, references / "torch", tmp_path / "c")
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "c")
    assert report.passed and {"reference"} == {
        d.figures.third.code for d in report.diffs if d.figures and d.figures.third
    }
    assert max(multiples(report)) < FLOORS / 10
    rules = [d.judgement.rule for d in report.diffs if d.judgement]
    assert rules.count(Rule.MEASURED) > 180


def test_floors_serve_a_plain_training_as_long_as_it_starts_equal(references, tmp_path):
    shutil.copytree(references / "torch", tmp_path / "torch")
    calibrated(Torch, tmp_path / "torch", float64=False)
    net = PaddleViT(drop=0.0)
    padiff.start_from(references / "torch", net)
    train(Paddle, tmp_path / "c", steps=4, net=net)
    diffs = padiff.compare_runs(tmp_path / "torch", tmp_path / "c").diffs
    rules = {step: {d.judgement.rule for d in diffs if d.judgement and d.pair.step == step} for step in (0, 3)}
    assert Rule.MEASURED in rules[0] and Rule.MEASURED not in rules[3]


def test_calibrate_refuses_another_framework_and_another_model(references, tmp_path):
    shutil.copytree(references / "torch", tmp_path / "torch")
    with pytest.raises(UsageError, match="was recorded with torch, and the model is of paddle"):
        calibrated(Paddle, tmp_path / "torch")
    with pytest.raises(UsageError, match="runs is a number of at least 1"):
        calibrated(Torch, tmp_path / "torch", runs=0)
    with pytest.raises(padiff.PadiffError):
        calibrated(Torch, tmp_path / "torch", net=torch.nn.Sequential(torch.nn.Linear(3, 3)))
    assert not (tmp_path / "torch" / "floors").exists()

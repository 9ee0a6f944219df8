"""Packed steps done again, with another framework or the same: clean pairs match, and whatever is not fed goes red."""

from __future__ import annotations

import paddle
import pytest
import torch

import padiff
from padiff.replaying.feeding import MaskFeeder
from padiff.replaying.session import Replay
from replay.trainings import SIDES, Paddle, Torch, replayed, train
from replay.vits import PaddleViT, TorchViT

BOTH_WAYS = [("torch", "paddle"), ("paddle", "torch"), ("torch", "torch"), ("paddle", "paddle")]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Each framework's run of a ViT with dropout, AdamW, clipping, accumulation and a schedule."""
    folder = tmp_path_factory.mktemp("references")
    for name, side in SIDES.items():
        train(side, folder / name, steps=7, packs=3)
    return folder


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_a_clean_pair_matches_with_dropout_on(references, tmp_path, source, target):
    report = replayed(SIDES[target], references / source, tmp_path / "candidate")
    assert report.passed, str(report)
    assert report.coverage.steps == (0, 3, 6)
    masks = padiff.open_run(references / source).packs[3].masks
    assert len(masks) == 2 * (1 + 4) and all(not mask.kept().all() for mask in masks)
    if source == target:
        worst = max(diff.figures.max_abs for diff in report.diffs if diff.pair.stage == "forward" and diff.figures)
        # Attention computes in another order where it is given a mask; some processors add in another one each time.
        assert worst < 1e-5


@pytest.mark.parametrize("target", ["torch", "paddle"])
def test_a_mask_that_is_not_fed_is_found_where_it_is(references, tmp_path, target, monkeypatch):
    source = "paddle" if target == "torch" else "torch"
    original = MaskFeeder.mask

    def third_alone(feeder, call, seen=[]):  # noqa: B006 - it counts
        kept = original(feeder, call)
        seen.append(1)
        return None if len(seen) == 4 else kept

    monkeypatch.setattr(MaskFeeder, "mask", third_alone)
    report = replayed(SIDES[target], references / source, tmp_path / "candidate")
    # The fourth call: what the first block's MLP drops between its layers, of the first micro-batch.
    assert not report.passed and report.first_diff.step == 0 and report.first_diff.stage == "forward"
    assert report.first_diff.candidate.startswith(("blocks.0.mlp", "layers.0.mlp"))


def test_a_dropped_state_goes_red(references, tmp_path):
    def forget(step, net, optimizer):
        if step.number:
            optimizer._accumulators.clear() if hasattr(optimizer, "_accumulators") else optimizer.state.clear()

    report = replayed(Torch, references / "paddle", tmp_path / "candidate", during=forget)
    assert report.first_diff.step == 3 and report.first_diff.stage == "update", str(report.first_diff)


@pytest.mark.parametrize("target", ["torch", "paddle"])
def test_a_wrong_rate_goes_red(references, tmp_path, target):
    side, source = SIDES[target], "paddle" if target == "torch" else "torch"
    wrong = lambda step, net, optimizer: side.rate(optimizer, 0.01 * 0.8**step.number * 1.02)  # noqa: E731
    report = replayed(side, references / source, tmp_path / "candidate", during=wrong)
    assert report.first_diff.step == 0 and report.first_diff.stage == "update", str(report.first_diff)


def test_another_dropout_rate_goes_red(references, tmp_path):
    report = replayed(Paddle, references / "torch", tmp_path / "candidate", net=PaddleViT(drop=0.12))
    assert report.first_diff.stage == "forward" and report.first_diff.step == 0
    assert "Dropout(p=0.12) in `pos_drop`" in str(report.first_diff.cause), str(report.first_diff)


def test_dropout_that_is_missing_goes_red_and_is_named(references, tmp_path, capfd):
    net = PaddleViT()
    net.pos_drop.p = 0
    report = replayed(Paddle, references / "torch", tmp_path / "candidate", net=net)
    assert report.first_diff.candidate == "pos_drop", str(report.first_diff)
    assert "the reference drops in drop (dropout); nothing here took that mask" in capfd.readouterr().err


def test_a_changed_weight_goes_red(references, tmp_path):
    def nudge(step, net, optimizer):
        if step.number == 3:
            with torch.no_grad():
                net.blocks[0].qkv.weight[0, 0] += 1e-3

    report = replayed(Torch, references / "paddle", tmp_path / "candidate", during=nudge)
    assert report.first_diff.step == 3 and report.first_diff.stage == "weight"
    assert report.first_diff.candidate == "blocks.0.qkv"


def test_one_of_the_batches_left_out_goes_red(references, tmp_path):
    side, net = Torch, TorchViT().train()
    optimizer = side.adamw(net)
    with padiff.replay(references / "paddle", net, tmp_path / "c", optimizer=optimizer, steps=[3]) as replay:
        for step in replay:
            batch = step.batches[0]
            (side.cross_entropy(net(*batch.inputs), *batch.labels) / 2).backward()
            side.update(net, optimizer)
    assert not replay.report.passed


def test_compared_later_a_replay_is_judged_alike(references, tmp_path):
    report = replayed(Paddle, references / "torch", tmp_path / "candidate")
    again = padiff.compare_runs(references / "torch", tmp_path / "candidate")
    limits = [[diff.judgement.limit for diff in one.diffs if diff.judgement] for one in (report, again)]
    assert limits[0] == pytest.approx(limits[1])
    with_drift = padiff.compare_runs(references / "torch", tmp_path / "candidate", alone=False)
    assert sum(limits[0]) < sum(diff.judgement.limit for diff in with_drift.diffs if diff.judgement)


def test_the_model_and_the_optimizer_are_given_back(references, tmp_path):
    for name, side in SIDES.items():
        source = references / ("paddle" if name == "torch" else "torch")
        side.seed(2)
        net = side.ViT().train()
        optimizer = side.adamw(net, 0.5)
        folder = tmp_path / name
        own = _trained(side, net, optimizer, folder / "own", None)
        before, state, random = side.values(net), _state(optimizer), side.drawn()
        side.seed(8)
        expected = side.drawn()
        side.seed(8)
        replayed_in(side, source, folder / "replayed", net, optimizer)
        assert (side.drawn() == expected).all()
        _same(before, side.values(net))
        assert repr(_state(optimizer)) == repr(state)
        assert own and random is not None


def test_they_are_given_back_after_an_error(references, tmp_path):
    for name, side in SIDES.items():
        net = side.ViT().train()
        optimizer = side.adamw(net, 0.5)
        _trained(side, net, optimizer, tmp_path / name / "own", None)
        before, state = side.values(net), _state(optimizer)
        replay = padiff.replay(references / "torch", net, tmp_path / name / "r", optimizer=optimizer)
        with pytest.raises(ZeroDivisionError), replay:
            for step in replay:
                side.cross_entropy(net(*step.batches[0].inputs), *step.batches[0].labels).backward()
                side.update(net, optimizer)
                if step.number:
                    raise ZeroDivisionError
        _same(before, side.values(net))
        assert repr(_state(optimizer)) == repr(state)
        assert not any(getattr(p, "grad", None) is not None for p in net.parameters())
        assert replay.done == [0] and not padiff.open_run(tmp_path / name / "r").finished()


def test_the_reference_is_not_written_to(references, tmp_path):
    def content():
        return {path: path.stat().st_mtime_ns for path in sorted((references / "torch").rglob("*"))}

    before = content()
    replayed(Paddle, references / "torch", tmp_path / "candidate")
    assert content() == before


def test_without_an_optimizer_forward_and_backward_are_done(references, tmp_path, capfd):
    net = PaddleViT()
    with padiff.replay(references / "torch", net, tmp_path / "c", steps=[3]) as replay:
        for step in replay:
            for batch in step.batches:
                (Paddle.cross_entropy(net(*batch.inputs), *batch.labels) / 2).backward()
    assert "no optimizer was given" in capfd.readouterr().err
    stages = {diff.pair.stage for diff in replay.report.diffs if diff.compared and diff.passed}
    assert {"forward", "backward"} <= stages and "update" not in stages


def test_a_step_that_is_left_is_not_recorded(references, tmp_path):
    net = TorchViT()
    optimizer = Torch.adamw(net)
    with padiff.replay(references / "paddle", net, tmp_path / "c", optimizer=optimizer) as replay:
        for step in replay:
            net(*step.batches[0].inputs)
            break
    assert not replay.done and not padiff.open_run(tmp_path / "c").numbers()
    with pytest.raises(padiff.PadiffError, match="nothing to compare"):
        _ = replay.report


def replayed_in(side, reference, folder, net, optimizer):
    with padiff.replay(reference, net, folder, optimizer=optimizer) as replay:
        assert isinstance(replay, Replay)
        for step in replay:
            for batch in step.batches:
                (side.cross_entropy(net(*batch.inputs), *batch.labels) / 2).backward()
            side.update(net, optimizer)
    return replay.report


def _trained(side, net, optimizer, folder, packs):
    return train(side, folder, steps=2, packs=packs, net=net, optimizer=lambda _: optimizer)


def _state(optimizer):
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.state_dict()
    return {
        name: value.numpy() if isinstance(value, paddle.Tensor) else value
        for name, value in optimizer.state_dict().items()
    }


def _same(one, other):
    assert len(one) == len(other) and all((a == b).all() for a, b in zip(one, other))


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_what_is_fed_stands_in_the_trace_as_what_was_called(references, tmp_path, name):
    """Not as what is computed in its place."""
    replayed(SIDES[name], references / name, tmp_path / "candidate")
    traces = [padiff.open_run(run).steps(3)[0].trace for run in (references / name, tmp_path / "candidate")]
    assert all(trace.functions for trace in traces)
    # The recorded loop makes its batch into tensors, which a replay hands over.
    calls = [[(c.layer, c.function) for c in trace.calls if c.layer != "(loop)"] for trace in traces]
    assert len(calls[0]) > 40 and calls[0] == calls[1]
    dropped = {"torch": "scaled_dot_product_attention", "paddle": "dropout"}[name]
    assert sum(function == dropped for _, function in calls[0]) >= 2

"""One thing at a time taken from the reference: the one that a fault was planted in keeps the runs together."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import padiff
from padiff.errors import UsageError
from padiff.replaying.resync_experiments import Resync, Resynced
from replay.trainings import ACCUMULATED, SIDES, Paddle, Torch, images, train

PACKED = padiff.Schedule(steps=range(2, 5))
BOTH_WAYS = [("torch", "paddle"), ("paddle", "torch")]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    for name, side in SIDES.items():
        train(side, folder / name, steps=5, packs=PACKED)
    return folder


def resynced(side, reference, before=None, within=None, after=None, net=None, **options):
    """The experiments, with what a loop does before, within (after backward) and after a step."""
    side.seed(11)
    net = side.ViT() if net is None else net
    net.train()
    optimizer = side.adamw(net, 0.5)
    kept, state = side.values(net), repr(optimizer.state_dict())

    def step(step):
        if before is not None:
            before(step, net, optimizer)
        for micro in step.batches:
            (side.cross_entropy(net(*micro.inputs), *micro.labels) / len(step.batches)).backward()
        if within is not None:
            within(step, net, optimizer)
        side.update(net, optimizer)
        if after is not None:
            after(step, net, optimizer)

    found = padiff.resync(reference, net, step, optimizer=optimizer, **{"steps": 2, **options})
    assert all((one == other).all() for one, other in zip(kept, side.values(net)))
    assert repr(optimizer.state_dict()) == state
    return found


def forgotten(optimizer):
    optimizer._accumulators.clear() if hasattr(optimizer, "_accumulators") else optimizer.state.clear()
    if hasattr(optimizer, "_already_create_accumulator"):
        optimizer._already_create_accumulator.clear()


# -- what the loop does itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_of_a_clean_pair_nothing_is_needed(references, source, target):
    found = resynced(SIDES[target], references / source, steps=3)
    begins = "Nothing has to be taken from the reference: from step 2 on, over 3 steps, the runs stay together"
    assert found.sentence.startswith(begins), found
    assert found.helping == () and len(found.single) == 5
    assert all(found.together(one) for one in (found.nothing, found.everything, *found.single)), str(found)


@pytest.mark.parametrize("target", ["torch", "paddle"])
def test_a_wrong_schedule(references, target):
    side, source = SIDES[target], "paddle" if target == "torch" else "torch"
    # The reference's falls by a fifth in each step.
    wrong = lambda step, net, optimizer: side.rate(optimizer, 0.01 * 0.8**2 * 0.9 ** (step.number - 2))  # noqa: E731
    found = resynced(side, references / source, before=wrong)
    assert found.helping == ("rate",), str(found)
    assert found.sentence.startswith("The learning rate keeps the runs together: taken from the reference from step 2")
    assert found.nothing.updates[0] < 1e-3 < 0.05 < found.nothing.updates[1]


def test_a_scheduler_of_the_loops_own(references):
    """What sets the rate after a step sets it for the next one: that is the loop's own, too."""
    wrong = lambda step, net, optimizer: Torch.rate(optimizer, 0.01 * 0.7 ** (step.number + 1))  # noqa: E731
    assert resynced(Torch, references / "paddle", after=wrong).helping == ("rate",)


@pytest.mark.parametrize("target", ["torch", "paddle"])
def test_a_state_that_is_lost(references, target):
    source = "paddle" if target == "torch" else "torch"
    lost = lambda step, net, optimizer: forgotten(optimizer) if step.number == 3 else None  # noqa: E731
    found = resynced(SIDES[target], references / source, before=lost)
    assert found.helping == ("state",), str(found)
    assert "The optimizer's state keeps the runs together" in found.sentence


def test_weights_that_are_written_to(references):
    def average(step, net, optimizer):
        if step.number == 3:
            for parameter in net.parameters():
                parameter.data.mul_(0.9)

    found = resynced(Torch, references / "paddle", after=average, steps=3)
    assert "weights" in found.helping and "rate" not in found.helping and "batch" not in found.helping, str(found)


def test_a_fault_of_the_model_is_none_of_these(references):
    found = resynced(Paddle, references / "torch", net=Paddle.ViT(drop=0.3))
    assert found.helping == () and "It is none of these" in found.sentence, str(found)


# -- what another run recorded -------------------------------------------------------------------------------------


def recorded(side, reference, folder, order=None, rate=0.8, forget=None, seed=3):
    """A training of the candidate's, from an equal start, with the reference's masks wherever it drops."""
    side.seed(seed)
    net = side.ViT(drop=0.0)
    net.train()
    optimizer = side.adamw(net)
    padiff.start_from(reference, net)
    with padiff.record(net, folder, optimizer=optimizer, replay_every_n_steps=PACKED) as rec:
        for step in range(5):
            if step == forget:
                forgotten(optimizer)
            for micro in range(ACCUMULATED):
                place = ACCUMULATED * step + micro
                x, y = images(place if order is None else order[place])
                (side.cross_entropy(net(side.tensor(x)), side.tensor(y)) / ACCUMULATED).backward()
            side.update(net, optimizer)
            side.rate(optimizer, 0.01 * rate ** (step + 1))
            rec.try_dump()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A reference without dropout."""
    folder = tmp_path_factory.mktemp("plain") / "torch"
    Torch.seed(3)
    train(Torch, folder, steps=5, packs=PACKED, net=Torch.ViT(drop=0.0))
    return folder


def against(plain, own, **options):
    return resynced(Paddle, plain, net=Paddle.ViT(drop=0.0), own=own, **options)


def test_two_clean_runs(plain, tmp_path):
    found = against(plain, recorded(Paddle, plain, tmp_path / "own"))
    assert "Nothing has to be taken from the reference" in found.sentence, str(found)


def test_shuffled_data(plain, tmp_path):
    order = [*range(4), *np.random.RandomState(0).permutation(range(4, 10))]
    found = against(plain, recorded(Paddle, plain, tmp_path / "own", order))
    assert found.helping == ("batch",), str(found)
    assert "The batch keeps the runs together" in found.sentence


def test_a_schedule_of_the_recorded_run(plain, tmp_path):
    found = against(plain, recorded(Paddle, plain, tmp_path / "own", rate=0.95))
    assert "rate" in found.sentence, str(found)


def test_a_resume_without_the_optimizers_state(plain, tmp_path):
    found = against(plain, recorded(Paddle, plain, tmp_path / "own", forget=2))
    assert found.helping == ("state",), str(found)


# -- misuse, and what is shown -------------------------------------------------------------------------------------


def test_packs_that_are_missing_are_named(references, tmp_path):
    with pytest.raises(UsageError, match=r"has no pack of step 5, and a resync from step 3 on needs .*range\(3, 7\)"):
        resynced(Torch, references / "paddle", step=3, steps=4)
    with pytest.raises(UsageError, match="takes the optimizer"):
        padiff.resync(references / "paddle", Torch.ViT(), lambda step: None, optimizer=None)
    with pytest.raises(UsageError, match="steps is a number of at least 1"):
        resynced(Torch, references / "paddle", steps=0)
    shutil.copytree(references / "torch", tmp_path / "own")
    shutil.rmtree(tmp_path / "own" / "packs" / "00000004")
    with pytest.raises(UsageError, match=r"own has no pack of step 4"):
        resynced(Torch, references / "paddle", own=tmp_path / "own", step=2, steps=3)


def test_after_an_error_all_is_given_back(references):
    net = Torch.ViT().train()
    optimizer = Torch.adamw(net, 0.5)
    before = Torch.values(net)

    def failing(step):
        Torch.cross_entropy(net(*step.batches[0].inputs), *step.batches[0].labels).backward()
        optimizer.step()
        if step.number == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        padiff.resync(references / "paddle", net, failing, optimizer=optimizer, steps=3)
    assert all((one == other).all() for one, other in zip(before, Torch.values(net)))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer._optimizer_step_pre_hooks and not net.patch._forward_hooks


def test_the_table_and_the_json():
    row = lambda taken, *apart: Resynced(taken, apart, tuple(0.1 * a for a in apart))  # noqa: E731
    found = Resync(
        7,
        2,
        row((), 0.1, 0.3),
        (row(("rate",), 1e-6, 2e-6), Resynced(("masks",), why="no")),
        row(("rate",), 1e-6, 1e-6),
    )
    lines = str(found).splitlines()
    assert lines[1].split() == ["nothing", "0.1", "0.3", "0.3", "0.03", "apart"]
    assert lines[2].split() == ["the", "learning", "rate", "1e-06", "2e-06", "2e-06", "2e-07", "together"]
    assert lines[-1].startswith("The learning rate keeps the runs together")
    plain = json.loads(json.dumps(found.plain()))
    assert plain["helping"] == ["rate"] and [one["together"] for one in plain["experiments"]] == [
        False,
        True,
        False,
        True,
    ]

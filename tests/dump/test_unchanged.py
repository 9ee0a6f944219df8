"""What does not change from step to step is stored once."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from kit.records import info, parameter, plain, record, root, step, write_run

import padiff
from padiff.dump import open_run

BYTES = 4 * 64 * 64
LAYOUTS = [{}, {"pack": True}, {"pack": True, "compression": "zlib"}]


def recorded(kit, folder, steps, changed=(), **options):
    """Train the second layer of two; the first one is frozen, and changed by hand before some steps."""
    model = kit.Sequential(kit.Linear(64, 64), kit.Linear(64, 2))
    frozen = model[0].weight
    kit.freeze(frozen)
    kit.freeze(model[0].bias)
    optimizer = kit.sgd(model[1].parameters())
    was = []
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for number in range(steps):
            if number in changed:
                state = kit.state(model)
                kit.load(model, {**state, "0.weight": state["0.weight"] + 1})
            was.append(kit.numpy(model[0].weight))
            model(kit.tensor(np.ones((3, 64)))).sum().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return was


def weights(folder):
    run = padiff.open_run(folder)
    return [next(r.value for r in run.steps(n)[0].records if r.site == "0/weight/weight") for n in run.numbers()]


def disk(folder):
    """Bytes of all files, one that has two names counted once."""
    found = {entry.stat().st_ino: entry.stat().st_size for entry in folder.rglob("*") if entry.is_file()}
    return sum(found.values())


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_frozen_weight_is_stored_once_or_twice_however_many_steps(kit, tmp_path, options):
    sizes = []
    for steps in (3, 9):
        was = recorded(kit, tmp_path / str(steps), steps, **options)
        for value, true in zip(weights(tmp_path / str(steps)), was, strict=True):
            np.testing.assert_array_equal(value, true)
        sizes.append(disk(tmp_path / str(steps)))
    # Six more steps, of which none holds the frozen weight again.
    assert sizes[1] - sizes[0] < 6 * BYTES


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_change_is_seen(kit, tmp_path, options):
    was = recorded(kit, tmp_path / "run", 8, changed=(3, 6), **options)
    for value, true in zip(weights(tmp_path / "run"), was, strict=True):
        np.testing.assert_array_equal(value, true)


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_step_that_others_share_with_can_go(kit, tmp_path, options):
    was = recorded(kit, tmp_path / "run", 6, **options)
    for number in (0, 1, 2):
        shutil.rmtree(tmp_path / "run" / "steps" / f"{number:08d}")
    for value, true in zip(weights(tmp_path / "run"), was[3:], strict=True):
        np.testing.assert_array_equal(value, true)


def test_a_moved_run_still_has_what_is_shared(kit, tmp_path):
    was = recorded(kit, tmp_path / "run", 4, pack=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    np.testing.assert_array_equal(weights(tmp_path / "copy")[3], was[3])


def test_what_is_shared_and_lost_is_reported(kit, tmp_path):
    recorded(kit, tmp_path / "run", 4, pack=True)
    for file in (tmp_path / "run" / "shared").iterdir():
        file.unlink()
    with pytest.raises(padiff.PadiffError, match="missing"):
        weights(tmp_path / "run")


def test_overwriting_leaves_nothing_of_what_was_shared(kit, tmp_path):
    recorded(kit, tmp_path / "run", 4, pack=True)
    before = {file.name for file in (tmp_path / "run" / "shared").iterdir()}
    kit.seed(1)
    recorded(kit, tmp_path / "run", 4, pack=True, existing="overwrite")
    after = {file.name for file in (tmp_path / "run" / "shared").iterdir()}
    assert after
    assert not before & after


def test_a_gradient_that_a_frozen_weight_came_to_have_is_not_taken_for_it(tmp_path):
    frozen = plain("fc", "linear", parameters=(parameter("weight", 64, 64, trainable=False),))
    weight, gradient = np.ones((64, 64), np.float32), np.zeros((64, 64), np.float32)
    steps = [
        step(n, [record("fc", "weight", "weight", weight), record("fc", "grad", "weight", gradient)]) for n in range(3)
    ]
    run = open_run(write_run(tmp_path / "run", info(root(1), frozen), steps))
    for number in run.numbers():
        values = {one.stage: one.value for one in run.steps(number)[0].records}
        assert (values["weight"] == 1).all() and (values["grad"] == 0).all()

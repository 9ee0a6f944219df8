"""The same samples in another order over a whole epoch, and an epoch that repeats the order of the first."""

from __future__ import annotations

import numpy as np
import pytest

import padiff


def trained(kit, order, data):
    kit.seed(0)
    net = kit.Linear(5, 2)
    rng = np.random.default_rng(3)
    kit.load(net, {k: rng.normal(size=np.shape(v)).astype("float32") for k, v in sorted(kit.state(net).items())})
    optimizer = kit.sgd(net.parameters(), 0.01)
    with padiff.record(net, optimizer=optimizer) as rec:
        for rows in order:
            (net(kit.tensor(data[rows])) ** 2).mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


def epoch(seed, batches, size=8):
    return list(np.random.default_rng(seed).permutation(batches * size).reshape(batches, size))


DATA = np.random.default_rng(0).normal(size=(320, 5)).astype("float32")


def test_another_shuffling_is_found_over_the_epoch(kit):
    first = padiff.compare_runs(trained(kit, epoch(1, 40), DATA), trained(kit, epoch(2, 40), DATA)).first_diff
    assert first.cause.kind == "batch_order" and first.cause.proven, first.cause.text
    assert "the same samples in another order, over the epoch: 8 of this batch's 8 samples" in first.cause.sentence


def test_a_part_of_the_samples_shows_another_shuffling(kit):
    runs = [trained(kit, epoch(seed, 40)[:20], DATA) for seed in (1, 2)]
    expected = np.isin(epoch(2, 40)[0], np.concatenate(epoch(1, 40)[:20])).sum()
    first = padiff.compare_runs(*runs).first_diff
    assert 2 <= expected < 8 and f": {expected} of this batch's 8 samples" in first.cause.sentence


def test_other_samples_are_no_shuffling(kit):
    other = np.random.default_rng(9).normal(size=DATA.shape).astype("float32")
    first = padiff.compare_runs(trained(kit, epoch(1, 20), DATA), trained(kit, epoch(1, 20), other)).first_diff
    assert first.cause.kind == "other_batch", first.cause.text


@pytest.mark.parametrize("batches", [3, 12])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_epoch_that_repeats_the_order_is_named(batches, swapped):
    from kit.frameworks import KITS

    kit = KITS["torch"]
    anew = trained(kit, epoch(1, batches) + epoch(2, batches), DATA)
    again = trained(kit, epoch(1, batches) + epoch(1, batches), DATA)
    runs = [anew, again][:: -1 if swapped else 1]
    first = padiff.compare_runs(*runs).first_diff
    side = "reference" if swapped else "candidate"
    assert first.step == batches and first.cause.kind == "epoch_repeated" and first.cause.proven
    assert f"from step {batches} on the {side}'s batches are those from step 0 on" in first.cause.sentence


def trained_on(kit, inputs):
    """A linear layer on one-hot vectors, or on ids that are made into such vectors."""
    kit.seed(0)
    net = kit.Linear(inputs.shape[-1], 2)
    kit.load(net, {k: np.full(np.shape(v), 0.1, "float32") for k, v in sorted(kit.state(net).items())})
    optimizer = kit.sgd(net.parameters(), 0.01)
    with padiff.record(net, optimizer=optimizer) as rec:
        (net(kit.tensor(inputs)) ** 2).mean().backward()
        optimizer.step()
        rec.try_dump()
    return rec.run


IDS = np.random.default_rng(5).integers(0, 12, (8, 6))


def test_words_that_are_numbered_otherwise(kit):
    table = np.roll(np.arange(12), 5)
    runs = [trained_on(kit, np.eye(12, dtype="float32")[ids]) for ids in (IDS, table[IDS])]
    first = padiff.compare_runs(*runs).first_diff
    assert first.cause.kind == "numbered_otherwise" and first.cause.proven, first.cause.text
    assert f"(0 -> {table[0]}, 1 -> {table[1]}, 2 -> {table[2]})" in first.cause.sentence
    assert f"{IDS.size - len(np.unique(IDS))} repeated ids" in first.cause.evidence


@pytest.mark.parametrize(
    "others", [IDS[::-1], np.where(IDS == 3, 4, IDS), np.random.default_rng(6).permuted(IDS, axis=1)]
)
def test_other_words_are_no_other_numbers(kit, others):
    runs = [trained_on(kit, np.eye(12, dtype="float32")[ids]) for ids in (IDS, others)]
    assert padiff.compare_runs(*runs).first_diff.cause.kind != "numbered_otherwise"


def test_few_words_numbered_otherwise_are_likely(kit):
    ids = np.array([[0, 1], [0, 2], [0, 3]])
    runs = [trained_on(kit, np.eye(7, dtype="float32")[side]) for side in (ids, np.roll(np.arange(7), 3)[ids])]
    first = padiff.compare_runs(*runs).first_diff
    assert first.cause.kind == "numbered_otherwise" and not first.cause.proven, first.cause.text

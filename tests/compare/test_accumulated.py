"""Two micro-batches for each optimizer step, their mean taken in many ways: one training."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

import padiff

RNG = np.random.default_rng(0)
BATCHES = [(RNG.random((2, 5, 4)).astype("float32"), RNG.integers(0, 3, (2, 5))) for _ in range(3)]


def of_each(model, batches):
    for x, y in batches:
        (cross_entropy(model(x), y) / 2).backward()


def of_the_gradients(model, batches):
    for x, y in batches:
        cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad /= 2


def of_sums(model, batches):
    for x, y in batches:
        (cross_entropy(model(x), y, reduction="sum") / 10).backward()


def by_hand(model, batches):
    for x, y in batches:
        (-log_softmax(model(x), -1)[torch.arange(5), y].sum() / 10).backward()


def together(model, batches):
    cross_entropy(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()


def not_taken(model, batches):
    for x, y in batches:
        cross_entropy(model(x), y).backward()


@cache
def trained(backwards):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with padiff.record(model, optimizer=optimizer) as rec:
        for xs, ys in BATCHES:
            backwards(model, [*zip(torch.tensor(xs), torch.tensor(ys))])
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


WAYS = [of_each, of_the_gradients, of_sums, by_hand, together]


@pytest.mark.parametrize(("first", "second"), itertools.permutations(WAYS, 2))
def test_ways_to_take_the_mean_are_no_difference(first, second):
    assert padiff.compare_runs(trained(first), trained(second)).passed


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_that_is_not_taken_is_found_beside_each_way(way):
    first = padiff.compare_runs(trained(way), trained(not_taken)).first_diff
    assert first is not None and (first.step, first.stage) in {(0, "loss"), (0, "backward"), (0, "grad")}

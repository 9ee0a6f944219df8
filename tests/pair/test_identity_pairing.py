"""Steps of two runs of one model: each record is paired with its like, where pairing from scratch does so."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from kit.records import as_sketch, info, linear, norm, parameter, plain, record, root, step, write_run

from padiff.align import align
from padiff.dump import open_run
from padiff.dump.storage import Storage
from padiff.pair.plans import PairPlans
from padiff.pair.steps import pair_steps
from padiff.records import LOOP, ROOT, Both

TREE = (root(3), linear("a", 4, 8), linear("b", 8, 2), plain("act", "relu"))
SLOTS = {"weight": ("weight", "bias"), "grad": ("weight", "bias"), "update": ("weight", "bias")}


def anything(seed, sketched=False, layers=("a", "b", "act", ROOT, LOOP)):
    """A step of whatever records a model may have, each called otherwise."""
    rng, records = random.Random(seed), []
    for layer in layers:
        for stage in ("input", "weight", "forward", "backward", "grad", "update", "loss"):
            others = ("output.0", "output.x") if layer == LOOP else ("output.0", "output.x", "softmax().0")
            slots = SLOTS.get(stage, others)
            for slot in () if stage in SLOTS and layer in (ROOT, "act") else slots:
                for call in range(rng.choice([0, 1, 1, 2])):
                    shape = rng.choice([(2, 3), (3, 3), (2, 3, 3), (4,), ()])
                    values = np.random.default_rng(len(records)).normal(size=shape).astype(np.float32)
                    records.append(record(layer, stage, slot, values, call=call))
    if LOOP in layers and rng.random() < 0.5:
        logits, loss = np.ones((2, 3), np.float32), np.ones((), np.float32)
        records += [record(LOOP, "loss", f"mse_loss().{role}", logits) for role in ("prediction", "target")]
        records += [record(LOOP, "loss", "mse_loss().0", loss), record(LOOP, "loss", "loss", loss, call=9)]
    rng.shuffle(records)
    return step(0, map(as_sketch, records) if sketched else records, loss_scale=2.0**seed)


TIED = replace(linear("b", 4, 8), parameters=(parameter("weight", 8, 4, layout="out_in", tied_to="a/weight"),))


HOMES = "a/weight", "c/weight"


def reported(pairs):
    return [
        (p.step, *(side and (side.site, side.order) for side in p.sides), p.layout, p.scales, p.optional) for p in pairs
    ]


def recorded(tmp_path, made, *infos):
    """A step as two runs of these models have it."""
    runs = [write_run(tmp_path / name, i, [made], storage=Storage(pack=True)) for name, i in zip("rc", infos)]
    return Both(*(open_run(run).steps(0)[0] for run in runs))


def paired(sides, alignment):
    """The pairs of a step of two runs, after they were seen to be those that pairing from scratch gives."""
    pairs, expected = PairPlans().pairs(*sides, alignment), pair_steps(*sides, alignment)
    assert reported(pairs) == reported(expected)
    return pairs


def paired_at_once(tmp_path, tree, made):
    """The same of two runs of one model, whose pairs have columns."""
    own = info(*tree)
    pairs = paired(recorded(tmp_path, made, own, own), align(own, own))
    sites = zip(pairs.sites.stages, pairs.sites.layers, pairs.sites.slots, pairs.sites.calls)
    assert list(sites) == [(p.stage, p.anchor.layer, p.anchor.slot, p.anchor.call) for p in pairs]
    assert pairs.sites.complete.all()
    return pairs


@pytest.mark.parametrize("sketched", [False, True], ids=["full", "sketches"])
@pytest.mark.parametrize("seed", range(12))
def test_each_is_paired_with_the_one_of_its_name(seed, sketched, tmp_path, counted):
    pairs = paired_at_once(tmp_path, TREE, anything(seed, sketched))
    assert not counted and all(p.complete and p.reference.site == p.candidate.site for p in pairs)


def test_where_the_optimizer_steps_several_times(tmp_path, counted):
    ones = np.ones(4, np.float32)
    stages = ("input", "forward", "backward", "grad", "update") * 3
    slots = {"grad": "bias", "update": "bias"}
    made = step(0, [record("a", s, slots.get(s, "output.0"), ones, call=k // 5) for k, s in enumerate(stages)])
    pairs = paired_at_once(tmp_path, TREE, made)
    assert not counted and [p.anchor.call for p in pairs] == sorted(p.anchor.call for p in pairs)


def test_tied_parameters(tmp_path, counted):
    made = step(0, [record("a", stage, "weight", np.ones((8, 4), np.float32)) for stage in ("weight", "grad")])
    tree = (root(2), linear("a", 4, 8), TIED)
    assert len(paired_at_once(tmp_path, tree, made)) == 2 and not counted


OTHERWISE = {
    "a layer of no tree": ((TREE, TREE), anything(1, layers=("a", "elsewhere")), None),
    "layers mapped crosswise": (
        ((root(2), linear("a", 4, 4), linear("b", 4, 4)),) * 2,
        anything(1, layers=("a", "b")),
        [("a", "b"), ("b", "a")],
    ),
    "a layer that the other side has not": ((TREE, TREE[:-1]), anything(1), None),
    "a parameter that the other side has not": (
        (TREE, (TREE[0], replace(TREE[1], parameters=TREE[1].parameters[:1]), *TREE[2:])),
        anything(1),
        None,
    ),
    "weights that are stored transposed": (
        ((root(1), linear("a", 4, 4)), (root(1), linear("a", 4, 4, paddle=True))),
        anything(1, layers=("a",)),
        None,
    ),
    "layers of other kinds": (
        ((root(1), plain("a", "conv1d")), (root(1), plain("a", "linear"))),
        step(0, [record("a", "forward", "output.0", np.ones((3, 3, 3), np.float32))]),
        None,
    ),
    "records that are called alike": (
        (TREE, TREE),
        step(0, [record("a", "forward", "output.0", np.full(2, k, np.float32)) for k in range(2)]),
        None,
    ),
    "a parameter of no tree": (
        (TREE, TREE),
        step(0, [record("a", "weight", slot, np.ones(2, np.float32)) for slot in ("gamma", "extra")]),
        None,
    ),
    "recorded as what is tied to another": (
        ((root(2), linear("a", 4, 8), TIED),) * 2,
        step(0, [record("b", "weight", "weight", np.ones((8, 4), np.float32))]),
        None,
    ),
    "calls of a loss that values tell": (
        (TREE, TREE),
        step(0, [record(LOOP, "loss", "mse_loss().0", np.full(3, k, np.float32), call=k) for k in range(2)]),
        None,
    ),
}


@pytest.mark.parametrize("why", OTHERWISE)
def test_else_they_are_paired_from_counted(why, tmp_path, counted):
    trees, made, layer_map = OTHERWISE[why]
    infos = [info(*layers) for layers in trees]
    paired(recorded(tmp_path, made, *infos), align(*infos, layer_map))
    assert counted


def test_buffers_too(tmp_path, counted):
    tree = (root(1), norm("n", 3))
    slots = ("weight", "bias", "running_mean", "running_var")
    made = step(0, [record("n", "weight", slot, np.ones(3, np.float32)) for slot in slots])
    assert len(paired_at_once(tmp_path, tree, made)) == 4 and not counted


@pytest.mark.parametrize("what", ["cut_elsewhere", "differ_inside"])
def test_by_an_alignment_that_sets_layers_apart_they_are_paired_from_counted(what, tmp_path, counted):
    tree = info(*TREE)
    apart = replace(align(tree, tree), **{what: frozenset({("a", "a")})})
    pairs = paired(recorded(tmp_path, anything(2), tree, tree), apart)
    assert counted and not all(p.complete for p in pairs)


def test_parameters_that_answer_crosswise_within_their_layers(tmp_path, counted):
    tree = info(root(1), replace(linear("a", 4, 4), parameters=(parameter("one", 4), parameter("two", 4))))
    made = step(0, [record("a", "weight", slot, np.ones(4, np.float32)) for slot in ("one", "two")])
    own = align(tree, tree)
    crosswise = zip(own.parameters, own.parameters[::-1])
    crossed = replace(own, parameters=tuple(replace(one, candidate=other.candidate) for one, other in crosswise))
    pairs = paired(recorded(tmp_path, made, tree, tree), crossed)
    assert [(p.reference.slot, p.candidate.slot) for p in pairs] == [("one", "two"), ("two", "one")] and counted


def test_parameters_that_are_tied_to_another_one_in_each_run(tmp_path, counted):
    layers = (root(3), linear("a", 4, 8), linear("c", 4, 8))
    infos = [info(*layers, replace(TIED, parameters=(replace(TIED.parameters[0], tied_to=to),))) for to in HOMES]
    made = step(
        0, [record(home[0], "weight", "weight", np.full((8, 4), k, np.float32)) for k, home in enumerate(HOMES)]
    )
    paired(recorded(tmp_path, made, *infos), align(*infos))
    assert counted

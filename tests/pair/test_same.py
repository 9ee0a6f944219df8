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
from padiff.pair import plans as module
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


@pytest.fixture
def scratch(monkeypatch):
    """How often steps were paired from scratch."""
    calls = []
    monkeypatch.setattr(module, "pair_steps", lambda *given: calls.append(1) or pair_steps(*given))
    return calls


def reported(pairs):
    return [
        (p.step, *(side and (side.site, side.order) for side in p.sides), p.layout, p.scales, p.optional) for p in pairs
    ]


def paired(tmp_path, trees, made, layer_map=None):
    """The pairs of a step of two runs, after they were seen to be those that pairing from scratch gives."""
    infos = Both(*(info(*layers) for layers in trees))
    runs = [write_run(tmp_path / name, i, [made], storage=Storage(pack=True)) for name, i in zip("rc", infos)]
    sides = Both(*(open_run(run).steps(0)[0] for run in runs))
    alignment = align(*infos, layer_map)
    pairs = PairPlans().pairs(*sides, alignment)
    expected = pair_steps(*sides, alignment)
    assert reported(pairs) == reported(expected)
    told = [side for p in expected for side in (p.stage, p.anchor.layer, p.anchor.slot, p.anchor.call)]
    columns = [pairs.sites.stages, pairs.sites.layers, pairs.sites.slots, pairs.sites.calls]
    assert [side for each in zip(*columns) for side in each] == told
    assert pairs.sites.complete.tolist() == [p.complete for p in expected]
    return pairs


@pytest.mark.parametrize("sketched", [False, True], ids=["full", "sketches"])
@pytest.mark.parametrize("seed", range(12))
def test_each_is_paired_with_the_one_of_its_name(seed, sketched, tmp_path, scratch):
    pairs = paired(tmp_path, (TREE, TREE), anything(seed, sketched))
    assert not scratch and all(p.complete and p.reference.site == p.candidate.site for p in pairs)


def test_where_the_optimizer_steps_several_times(tmp_path, scratch):
    ones = np.ones(4, np.float32)
    stages = ("input", "forward", "backward", "grad", "update") * 3
    slots = {"grad": "bias", "update": "bias"}
    made = step(0, [record("a", s, slots.get(s, "output.0"), ones, call=k // 5) for k, s in enumerate(stages)])
    pairs = paired(tmp_path, (TREE, TREE), made)
    assert not scratch and [p.anchor.call for p in pairs] == sorted(p.anchor.call for p in pairs)


def test_tied_parameters(tmp_path, scratch):
    made = step(0, [record("a", stage, "weight", np.ones((8, 4), np.float32)) for stage in ("weight", "grad")])
    tree = (root(2), linear("a", 4, 8), TIED)
    assert len(paired(tmp_path, (tree, tree), made)) == 2 and not scratch


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
def test_else_they_are_paired_from_scratch(why, tmp_path, scratch):
    trees, made, layer_map = OTHERWISE[why]
    infos = Both(*(info(*layers) for layers in trees))
    runs = [write_run(tmp_path / name, i, [made], storage=Storage(pack=True)) for name, i in zip("rc", infos)]
    sides = Both(*(open_run(run).steps(0)[0] for run in runs))
    alignment = align(*infos, layer_map)
    assert reported(PairPlans().pairs(*sides, alignment)) == reported(pair_steps(*sides, alignment))
    assert scratch


def test_buffers_too(tmp_path, scratch):
    tree = (root(1), norm("n", 3))
    slots = ("weight", "bias", "running_mean", "running_var")
    made = step(0, [record("n", "weight", slot, np.ones(3, np.float32)) for slot in slots])
    assert len(paired(tmp_path, (tree, tree), made)) == 4 and not scratch


@pytest.mark.parametrize("what", ["cut_elsewhere", "differ_inside"])
def test_by_an_alignment_that_sets_layers_apart_they_are_paired_from_scratch(what, tmp_path, scratch):
    made, tree = anything(2), info(*TREE)
    runs = [write_run(tmp_path / name, tree, [made], storage=Storage(pack=True)) for name in "rc"]
    sides = Both(*(open_run(run).steps(0)[0] for run in runs))
    apart = replace(align(tree, tree), **{what: frozenset({("a", "a")})})
    pairs = PairPlans().pairs(*sides, apart)
    assert reported(pairs) == reported(pair_steps(*sides, apart)) and scratch
    assert not all(p.complete for p in pairs)


def test_parameters_that_answer_crosswise_within_their_layers(tmp_path, scratch):
    tree = info(root(1), replace(linear("a", 4, 4), parameters=(parameter("one", 4), parameter("two", 4))))
    made = step(0, [record("a", "weight", slot, np.ones(4, np.float32)) for slot in ("one", "two")])
    runs = [write_run(tmp_path / name, tree, [made], storage=Storage(pack=True)) for name in "rc"]
    sides = Both(*(open_run(run).steps(0)[0] for run in runs))
    own = align(tree, tree)
    crosswise = zip(own.parameters, own.parameters[::-1])
    crossed = replace(own, parameters=tuple(replace(one, candidate=other.candidate) for one, other in crosswise))
    pairs = PairPlans().pairs(*sides, crossed)
    assert [(p.reference.slot, p.candidate.slot) for p in pairs] == [("one", "two"), ("two", "one")] and scratch

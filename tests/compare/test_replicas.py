"""Processes of one training are checked against each other: faults planted in one of them, and what is no fault."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import padiff
from padiff.compare.replicas import RankFault, check_replicas
from padiff.records import InMemory, Layer, Parameter, Record, RunInfo, Step
from padiff.records.recorded import Part
from padiff_cli.main import main
from padiff_hooks.live import LiveComparison

SITES = (("a", "weight"), ("a", "bias"), ("b", "weight"))
LR = 0.1


def layers():
    def parameters(path):
        return tuple(Parameter(slot, (4,), "float32") for layer, slot in SITES if layer == path)

    running = Parameter("running_mean", (4,), "float32", role="buffer", trainable=False)
    return (
        Layer("(root)", "Net", "custom"),
        Layer("a", "Linear", "linear", parameters=(*parameters("a"), running)),
        Layer("b", "Linear", "linear", parameters=parameters("b")),
    )


def info(ranks=2):
    return RunInfo(framework="torch", framework_version="2", layers=layers(), world_size=ranks)


def record(layer, stage, slot, value):
    array = np.asarray(value, np.float32)
    return Record(layer, stage, slot, InMemory(array), "float32", array.shape)


class Training:
    """SGD on ranks that share out a batch: the same gradient everywhere, unless a fault is planted."""

    def __init__(self, ranks=2):
        start = {site: np.random.default_rng(i).normal(size=4) for i, site in enumerate(SITES)}
        self.weights = [dict(start) for _ in range(ranks)]
        self.number = 0

    def step(self, change_gradient=None, change_update=None, write=None, same_batch=False):
        steps = []
        for rank, weights in enumerate(self.weights):
            data = np.random.default_rng(100 + self.number)
            gradients = {site: data.normal(size=4) for site in SITES}
            if change_gradient and rank:
                change_gradient(gradients)
            updates = {site: -LR * gradient for site, gradient in gradients.items()}
            if change_update and rank:
                change_update(updates)
            if write and rank:
                write(weights)
            x = np.random.default_rng((self.number, 0 if same_batch else rank)).normal(size=(2, 3))
            records = [record("(root)", "input", "input.x", x), record("a", "weight", "running_mean", x.mean())]
            for stage, values in (("weight", weights), ("grad", gradients), ("update", updates)):
                records += [record(layer, stage, slot, values[layer, slot]) for layer, slot in SITES]
            steps.append(Step(self.number, tuple(records), rank=rank))
            self.weights[rank] = {site: weights[site] + updates[site] for site in SITES}
        self.number += 1
        return steps


def findings(steps, ranks=2):
    return check_replicas(info(ranks), steps)


def test_equal_ranks_are_well():
    training = Training(3)
    assert findings([training.step() for _ in range(4)], 3) == []


def test_a_gradient_that_was_not_reduced_is_named_with_its_rank_and_first_step_and_what_follows_is_no_news():
    training = Training()

    def own(gradients):
        gradients["b", "weight"] = np.ones(4)

    found = findings([training.step(), training.step(change_gradient=own), training.step(change_gradient=own)])
    assert [(f.kind, f.step, f.ranks, f.sites) for f in found] == [(RankFault.NOT_REDUCED, 1, (0, 1), ("b/weight",))]
    assert "Rank 1's gradient of b/weight differs from rank 0's since step 1 (1 of 3)" in str(found[0])


def test_clipping_by_its_own_norm_is_one_factor():
    training = Training()

    def clip(gradients):
        for site in gradients:
            gradients[site] = 0.25 * gradients[site]

    (found,) = findings([training.step(change_gradient=clip)])
    assert found.kind is RankFault.OWN_FACTOR and "are 0.25 times rank 0's since step 0 (all of them)" in str(found)
    np.testing.assert_allclose(found.error, 0.75, rtol=1e-6)


def test_an_optimizer_with_values_of_its_own():
    training = Training()

    def another_rate(updates):
        for site in updates:
            updates[site] = 2 * updates[site]

    (found,) = findings([training.step(), training.step(change_update=another_rate), training.step()])
    assert (found.kind, found.step) == (RankFault.OWN_UPDATE, 1)


def test_a_weight_that_somebody_wrote():
    training = Training()

    def write(weights):
        weights["a", "bias"] = weights["a", "bias"] + np.float32(1e-3)

    (found,) = findings([training.step(), training.step(write=write), training.step()])
    assert (found.kind, found.step, found.sites) == (RankFault.WRITTEN, 1, ("a/bias",))


def test_a_model_that_is_spread_over_processes_is_no_fault_and_the_rest_of_it_is_still_checked():
    training = Training()
    training.weights[1]["a", "weight"] = np.zeros(4)

    def own(gradients):
        gradients["a", "weight"] = np.zeros(4)  # of its own part

    assert [f.kind for f in findings([training.step(change_gradient=own) for _ in range(3)])] == [RankFault.OTHER_START]

    def and_a_shared_one(gradients):
        own(gradients)
        gradients["b", "weight"] = np.ones(4)

    training = Training()
    training.weights[1]["a", "weight"] = np.zeros(4)
    found = findings([training.step(change_gradient=own), training.step(change_gradient=and_a_shared_one)])
    assert [(f.kind, f.kind.fault) for f in found] == [(RankFault.OTHER_START, False), (RankFault.NOT_REDUCED, True)]
    assert found[1].sites == ("b/weight",)


def test_the_same_batch_on_two_ranks_is_worth_knowing_but_no_fault():
    training = Training()
    (found,) = findings([training.step(same_batch=True), training.step(same_batch=True)])
    assert (found.kind, found.step, found.kind.fault) == (RankFault.SAME_BATCH, 0, False)


def test_where_most_ranks_agree_the_one_that_departs_is_named_whichever_its_number():
    training = Training(4)
    steps = [training.step(), training.step(), training.step()]

    def drifted(one):
        changed = [
            replace(r, source=InMemory(r.value + np.float32(1e-3))) if (r.layer, r.stage) == ("b", "update") else r
            for r in one.records
        ]
        return replace(one, records=tuple(changed)) if one.rank == 0 and one.number else one

    (found,) = findings([[drifted(one) for one in each] for each in steps], 4)
    assert (found.kind, found.step, found.ranks) == (RankFault.OWN_UPDATE, 1, (1, 0))
    assert str(found).startswith("Rank 0's update of b/weight differs from rank 1's since step 1 (1 of 3)")


def test_ranks_that_depart_alike_are_one_finding():
    training = Training(4)
    training.step()
    step = training.step()
    own = [
        replace(one, records=tuple(
            record(r.layer, r.stage, r.slot, r.value + one.rank) if (r.layer, r.stage) == ("b", "grad") else r
            for r in one.records
        ))
        for one in step
    ]  # fmt: skip
    (found,) = findings([own], 4)
    assert (found.kind, found.ranks) == (RankFault.NOT_REDUCED, (0, 1, 2, 3))
    assert "Ranks 1, 2 and 3's gradient of b/weight differs from rank 0's" in str(found)


@pytest.mark.parametrize("alike", [True, False])
def test_any_two_ranks_that_read_the_same_are_named(alike):
    training = Training(4)
    steps = training.step()
    batch = next(r for r in steps[1].records if r.stage == "input")
    if alike:
        steps[3] = replace(steps[3], records=(batch, *(r for r in steps[3].records if r.stage != "input")))
    assert [(f.kind, f.ranks) for f in findings([steps], 4)] == [(RankFault.SAME_BATCH, (1, 3))] * alike


def shards(change=None, share=None):
    """A step of four ranks on a mesh of two axes: ranks 0 and 2 hold one half, 1 and 3 the other."""
    whole = np.random.default_rng(0).normal(size=8)
    steps = []
    for rank in range(4):
        half = whole[4 * (rank % 2) :][:4].copy()
        if change == rank:
            half[1] += 1
        x = np.random.default_rng(0 if share is None else share[rank]).normal(size=(3, 3))
        records = [record("(root)", "input", "input.x", x)]
        for layer, slot in SITES:
            for stage, value in (("weight", whole[:4]), ("grad", half), ("update", half)):
                value = whole[4 * (rank % 2) :][:4] if stage == "weight" else value
                known = share is not None and stage == "weight"
                part = Part((8,), (4 * (rank % 2),), "shard", rank // 2, share[rank] if known else -1)
                records.append(replace(record(layer, stage, slot, value), part=part))
        steps.append(Step(0, tuple(records), rank=rank))
    return steps


@pytest.mark.parametrize("rank", range(4))
def test_replicas_of_a_shard_are_compared_within_their_group(rank):
    others = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    found = findings([shards(rank)], 4)
    assert [(f.kind, f.ranks) for f in found if f.kind.fault] == [(RankFault.NOT_REDUCED, others[rank])]


def test_ranks_that_gather_what_they_hold_read_each_their_own():
    assert findings([shards(share=range(4))], 4) == []
    same = shards(share=range(4))
    batch = same[0].records[0]
    same = [replace(one, records=(batch, *one.records[1:])) for one in same]
    assert [(f.kind, f.ranks) for f in findings([same], 4)] == [(RankFault.SAME_BATCH, (0, 1, 2, 3))]
    # Split layers: partners see the same samples, and those that hold the same do not.
    split = findings([shards()], 4)
    assert [(f.kind, f.ranks) for f in split] == [(RankFault.SAME_BATCH, (0, 2))]


def dropped(masks, relu=False, shape=(16, 16)):
    """What ranks record of a layer of dropout and of the one before it, given their masks' seeds."""
    layers = (Layer("(root)", "Net", "custom"), Layer("drop", "Dropout", "dropout", settings={"p": 0.25}))
    steps = []
    for rank, seed in enumerate(masks):
        x = np.random.default_rng(100 + rank).normal(size=shape)
        kept = np.random.default_rng(seed).random(shape) >= 0.25
        out = np.where(kept, np.maximum(x, 0) if relu else x, 0) / 0.75
        steps.append(Step(0, (record("a", "forward", "output.0", x), record("drop", "forward", "output.0", out)), rank))
    return RunInfo(framework="torch", framework_version="2", layers=layers, world_size=len(masks)), steps


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("before", [True, False], ids=["input recorded", "input not recorded"])
def test_ranks_that_drop_the_same_elements_are_named(relu, before):
    def found(masks):
        about, steps = dropped(masks, relu)
        steps = steps if before else [replace(one, records=one.records[1:]) for one in steps]
        return [(f.kind, f.ranks, f.sites) for f in check_replicas(about, [steps])]

    assert found([1, 2, 3]) == []
    expected = [] if relu and not before else [(RankFault.SAME_MASKS, (0, 2), ("drop",))]
    assert found([1, 2, 1]) == expected
    assert found([3, 1, 2, 1]) == [(kind, (1, 3), sites) for kind, _, sites in expected]


def test_equal_masks_of_equal_values_are_one_computation():
    about, steps = dropped([1, 1])
    assert check_replicas(about, [[steps[0], replace(steps[0], rank=1)]]) == []


@pytest.mark.parametrize("synchronised", [True, False])
def test_a_batch_norm_of_each_rank_is_found_by_what_it_gives_and_by_what_it_keeps(synchronised):
    weight, bias = np.array([2.0, 0.5, 1.0]), np.array([1.0, 0.0, -3.0])
    owned = tuple(Parameter(n, (3,), "float32") for n in ("weight", "bias"))
    running = Parameter("running_mean", (3,), "float32", role="buffer", trainable=False)
    layers = (Layer("(root)", "Net", "custom"), Layer("n", "BatchNorm2d", "batchnorm2d", (*owned, running)))
    about = RunInfo(framework="torch", framework_version="2", layers=layers, world_size=2)
    x = np.random.default_rng(3).normal(size=(8, 3, 4, 4))

    def step(number, with_outputs):
        steps = []
        for rank in range(2):
            own = x[4 * rank : 4 * rank + 4]
            seen = x if synchronised else own
            mean, deviation = (f((0, 2, 3))[:, None, None] for f in (seen.mean, seen.std))
            out = (own - mean) / deviation * weight[:, None, None] + bias[:, None, None]
            kept = number * mean[:, 0, 0]
            records = [
                record("n", "weight", slot, v)
                for slot, v in (("weight", weight), ("bias", bias), ("running_mean", kept))
            ]
            records += [record("n", "forward", "output.0", out)] if with_outputs else []
            steps.append(Step(number, tuple(records), rank=rank))
        return steps

    for with_outputs, first in ((True, 0), (False, 1)):
        found = check_replicas(about, [step(0, with_outputs), step(1, with_outputs)])
        expected = [] if synchronised else [(RankFault.OWN_STATISTICS, first, (0, 1), ("n",), False)]
        assert [(f.kind, f.step, f.ranks, f.sites, f.kind.fault) for f in found] == expected


def test_nan_in_all_ranks_is_equal():
    training = Training()

    def broken(gradients):
        gradients["a", "bias"] = np.full(4, np.nan)

    def broken_everywhere(one):
        kept = [r for r in one.records if r.stage != "grad"]
        grads = [record(layer, "grad", slot, np.full(4, np.nan)) for layer, slot in SITES]
        return Step(one.number, (*kept, *grads), one.rank)

    both = [broken_everywhere(one) for one in training.step()]
    assert findings([both]) == []
    assert [f.kind for f in findings([training.step(change_gradient=broken)])] == [RankFault.NOT_REDUCED]


def recorded_on_two(folder, detail="full", wrong=True):
    """Two recorders stand for two processes: what they record is real. Rank 1's gradient of step 1 may be wrong."""
    import torch

    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).state_dict()
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    for net in nets:
        net.load_state_dict(start)
    recorders = [
        padiff.record(net, folder, optimizer=optimizer, rank=rank, world_size=2, detail=detail)
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers))
    ]
    with recorders[0], recorders[1]:
        for number in range(3):
            for rank, net in enumerate(nets):
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
                net(x).square().sum().backward()
            for pair in zip(*(net.parameters() for net in nets)):  # the all-reduce
                mean = (pair[0].grad + pair[1].grad) / 2
                for parameter in pair:
                    parameter.grad = mean.clone()
            if number == 1 and wrong:
                nets[1][2].bias.grad += 1
            for optimizer, rec in zip(optimizers, recorders):
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_doctor_says_which_rank_parts_and_where(detail, tmp_path, capsys):
    recorded_on_two(tmp_path / "run", detail)
    assert main(["doctor", str(tmp_path / "run"), "--json", str(tmp_path / "health.json")]) == 1
    said = capsys.readouterr().out
    assert "ranks: Rank 1's gradient of 2/bias differs from rank 0's since step 1 (1 of 4)" in " ".join(said.split())
    (found,) = json.loads((tmp_path / "health.json").read_text())["ranks"]
    assert (found["kind"], found["step"], found["ranks"], found["sites"]) == ("not_reduced", 1, [0, 1], ["2/bias"])


@pytest.mark.parametrize("wrong", [True, False])
def test_who_follows_two_runs_says_so_once_though_both_are_alike(wrong, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    for name in ("a", "b"):
        recorded_on_two(tmp_path / name, wrong=wrong)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    assert main(["watch", *paths, "--logdir", str(tmp_path / "tb")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for path in paths:
        assert said.count(f"{path}: Rank 1's gradient of 2/bias differs from rank 0's since step 1 (1 of 4)") == wrong
    live = LiveComparison(*map(Path, paths), "warn", None, None)
    live.start(True, None, None)
    live.compare()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert live.say() is False
    assert sum("Rank 1's gradient of 2/bias differs" in str(one.message) for one in warned) == 2 * wrong

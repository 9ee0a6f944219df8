"""Parameters that are spread over processes (FSDP, tensor parallelism): recorded as the parts that they are."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from kit.forking import python_with_frameworks

import padiff
from padiff.pair.merge_ranks import merge_ranks

from . import sharded
from .launching import launch
from .training import OPTIONS

SITES = [f"{name}.{slot}" for name in sharded.LINEAR for slot in ("weight", "bias")]
WAYS = {**OPTIONS, "no optimizer": {"without_optimizer": True}}
#: Kinds whose gradients only the optimizer's step shows.
OUT_OF_SIGHT = frozenset({"fully_sharded", "half", "flattened", "original"})
#: By kind: what each process holds of ``1.up.weight`` (32, 16): offset, shape, which kind of part.
UP = {
    "fully_sharded": [((0, 0), (16, 16), "shard"), ((16, 0), (16, 16), "shard")],
    # The flat parameter of a block has 512 + 32 + 512 + 16 elements, and each process half of them.
    "flattened": [((0,), (512,), "shard"), None],
    "tensor_parallel": [((0, 0), (16, 16), "shard"), ((16, 0), (16, 16), "shard")],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs and what the trainings left on each rank, by kind and way; the way ``plain`` is not recorded."""
    base = tmp_path_factory.mktemp("sharded")
    names = [(kind, way) for kind in (*sharded.KINDS, "wrapped_later") for way in ("plain", *WAYS)]
    path = {name: base / "-".join(name).replace(" ", "_") for name in names}
    jobs = [
        (kind, "" if way == "plain" else str(path[kind, way]), WAYS.get(way, {}), f"{path[kind, way]}.result")
        for kind, way in names
    ]
    launch(sharded.__file__, json.dumps(jobs), python=python_with_frameworks(), seconds=240)
    return {
        name: (path[name], [dict(np.load(f"{path[name]}.result.{rank}.npz")) for rank in range(2)]) for name in names
    }


of_kinds = pytest.mark.parametrize("kind", sharded.KINDS)
of_ways = pytest.mark.parametrize("way", WAYS)


@of_kinds
@of_ways
def test_the_training_is_the_same_to_the_bit_on_every_rank(made, kind, way):
    for reference, candidate in zip(made[kind, "plain"][1], made[kind, way][1]):
        assert reference.keys() == candidate.keys()
        for name, value in reference.items():
            np.testing.assert_array_equal(candidate[name], value, err_msg=name)
    assert len(set(made[kind, way][1][0]["losses"].tolist())) == sharded.STEPS


@of_kinds
@of_ways
def test_all_is_recorded_under_the_names_of_the_model_itself(made, kind, way):
    run = padiff.open_run(made[kind, way][0])
    assert run.numbers() == list(range(sharded.STEPS))
    unheard = kind in OUT_OF_SIGHT and way == "no optimizer"
    for number in run.numbers():
        for step in run.steps(number):
            assert max(Counter(record.site for record in step.records).values()) == 1
        for step in merge_ranks(run.steps(number)):
            assert bool(step.notes) == unheard, step.notes
            assert all("give record() the optimizer" in note for note in step.notes)
            found = Counter(record.stage for record in step.records if record.layer != "(loop)")
            sites = Counter(
                f"{r.layer}.{r.slot}" for r in step.records if r.layer != "(loop)" and r.stage in ("weight", "grad")
            )
            if not step.rank or not step.spread:
                stages = 1 if unheard else 2
                assert sites == Counter(dict.fromkeys(SITES, stages))
                assert found["update"] == (0 if unheard else len(SITES))
            assert found["forward"] == found["backward"] == 9


@of_kinds
@of_ways
def test_the_layer_tree_has_whole_shapes(made, kind, way):
    run = padiff.open_run(made[kind, way][0])
    tree = {f"{layer.path}.{p.slot}": p for layer in run.info.layers for p in layer.parameters}
    whole = {f"{name}.{slot}": tuple(p.shape) for name, m in sharded.plain().named_modules()
             for slot, p in m.named_parameters(recurse=False)}  # fmt: skip
    assert {name: p.shape for name, p in tree.items()} == whole
    assert {p.dtype for p in tree.values()} == {"float32"} and all(p.trainable for p in tree.values())


@pytest.mark.parametrize("kind", UP)
def test_each_process_says_which_part_it_has(made, kind):
    weights = [p.detach().numpy() for p in sharded.plain().parameters()]
    for rank, step in enumerate(padiff.open_run(made[kind, "full"][0]).steps(0)):
        records = {r.site: r for r in step.records if r.stage == "weight"}
        record, expected = records.get("1.up/weight/weight"), UP[kind][rank]
        if expected is None:
            assert record is None
            continue
        assert (record.part.offset, record.shape, record.part.kind) == expected
        assert record.part.shape == (32, 16)
        offset, shape = expected[:2]
        whole = weights[2].reshape(-1) if len(shape) == 1 else weights[2]
        own = tuple(slice(start, start + length) for start, length in zip(offset, shape))
        np.testing.assert_array_equal(record.value, whole[own])


@pytest.mark.parametrize("way", OPTIONS)
@of_kinds
def test_parts_put_together_are_what_all_began_with(made, kind, way):
    whole = {f"{name}.{slot}": p.detach().numpy() for name, m in sharded.plain().named_modules()
             for slot, p in m.named_parameters(recurse=False)}  # fmt: skip
    first = merge_ranks(padiff.open_run(made[kind, way][0]).steps(0))[0]
    records = {f"{r.layer}.{r.slot}": r for r in first.records if r.stage == "weight"}
    for name, value in whole.items():
        np.testing.assert_array_equal(records[name].value, value, err_msg=name)


@of_kinds
def test_a_run_matches_itself(made, kind):
    folder = str(made[kind, "full"][0])
    report = padiff.compare_runs(folder, folder)
    assert report.outcome == "match" and report.coverage.complete
    assert not report.coverage.reference_unrecorded


def test_what_nobody_knows_the_parts_of_is_no_match(made):
    # Spread only after record() had looked at the model, by a wrapper that it can't reach.
    for way in WAYS:
        folder = str(made["wrapped_later", way][0])
        report = padiff.compare_runs(folder, folder)
        assert report.outcome == "cannot tell" and not report.passed
        assert report.coverage.reference_unrecorded == report.coverage.candidate_unrecorded == ("(root)/_flat_param",)
        assert "1 parameter(s) of 1 layer(s) are not recorded ((root)): they are spread" in report.coverage.left_out[0]
        assert "CANNOT TELL" in str(report)


@pytest.mark.parametrize("kind", ["tensor_parallel", "distributed_outputs"])
def test_what_a_collective_gives_is_recorded_as_it_arrived(made, kind):
    folder, results = made[kind, "full"]
    assert "AsyncCollectiveTensor" in results[0]["outputs"]
    for step in padiff.open_run(folder).steps(1):
        values = {r.site: r.value for r in step.records if r.stage == "forward"}
        below, down = values["0/forward/output.0"], values["1.down/forward/output.0"]
        np.testing.assert_array_equal(values["1/forward/output.0"], below + down)

"""Layers that are split over processes, in torch (``parallelize_module``) and in paddle (``shard_tensor``, fleet's
layers of model parallelism), and paddle's optimizer that is shared out (stage 1 of its sharding).

Paddle refuses group sharding (stages 2 and 3) on the CPU, and has no kernels there for ``Shard(0)`` of what is not
split by a matrix product.
"""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from kit.forking import python_with_frameworks

import padiff
from padiff.pair.merge_ranks import merge_ranks

from . import split
from .launching import launch

LAYOUTS = [("torch", "alone"), ("torch", "tensor"), ("paddle", "alone"), ("paddle", "data"), ("paddle", "tensor")]
LAYOUTS += [("paddle", "sharding"), ("paddle", "fleet")]
WAYS = {"full": {}, "sketch": {"detail": "sketch"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run folders by framework, layout, way, and whether one process multiplies its part of a gradient at last."""
    base = tmp_path_factory.mktemp("split")
    path = {
        (*layout, way, faulty): base / "-".join((*layout, way, str(faulty)))
        for layout in LAYOUTS
        for way in WAYS
        for faulty in (False, True)
    }
    for framework in ("torch", "paddle"):
        jobs = {1: [], 2: []}
        for (name, layout, way, faulty), folder in path.items():
            if name == framework:
                jobs[1 if layout == "alone" else 2].append((layout, str(folder), faulty, WAYS[way]))
        split.main(framework, json.dumps(jobs[1]))
        # paddle's processes may crash when they end if torch is loaded, too.
        python = python_with_frameworks(only="" if framework == "torch" else framework)
        launch(split.__file__, framework, json.dumps(jobs[2]), python=python)
    return path


@pytest.mark.parametrize(
    ("one", "other", "way"),
    [(*pair, "full") for pair in combinations(LAYOUTS, 2)] + [(*pair, "sketch") for pair in pairwise(LAYOUTS)],
)
def test_any_two_of_either_framework_match_with_all_parameters_compared(made, one, other, way):
    report = padiff.compare_runs(made[(*one, way, False)], made[(*other, way, False)])
    assert report.outcome == "match", report.first_diff and report.first_diff.message
    for stage in ("weight", "grad", "update"):
        sites = [diff.pair.anchor.site for diff in report.diffs if diff.compared and diff.pair.stage == stage]
        assert len([site for site in sites if not site.startswith("(loop)")]) == 6 * split.STEPS


@pytest.mark.parametrize(
    ("one", "other", "way"),
    [(one, other, way) for one, way in zip((LAYOUTS[0], LAYOUTS[-1]), WAYS) for other in LAYOUTS],
)
def test_a_gradient_that_one_process_multiplies_is_reported_with_its_parameter(made, one, other, way):
    first = padiff.compare_runs(made[(*one, way, False)], made[(*other, way, True)]).first_diff
    assert (first.step, first.stage, first.candidate, first.slot) == (split.STEPS - 1, "grad", "up", "bias")
    if way == "full":
        assert first.rank == (None if other[1] == "alone" else 1), first.message


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_each_process_says_which_part_it_has(made, framework):
    given = split.weights()
    for rank, step in enumerate(padiff.open_run(made[framework, "tensor", "full", False]).steps(0)):
        records = {f"{r.layer}.{r.slot}": r for r in step.records if r.stage == "weight"}
        whole = given["up.weight"] if framework == "torch" else given["up.weight"].T
        axis, half = (0 if framework == "torch" else 1), split.HIDDEN // 2
        up = records["up.weight"]
        assert (up.part.shape, up.part.kind, up.part.offset[axis]) == (whole.shape, "shard", half * rank)
        np.testing.assert_array_equal(up.value, np.split(whole, 2, axis=axis)[rank])
        down = records["down.bias"]
        assert (down.part.kind, down.part.offset, down.shape) == ("replica", (0,), (split.OUTPUTS,))


def test_layers_of_fleets_model_parallelism_say_their_shares(made):
    given, run = split.weights(), padiff.open_run(made["paddle", "fleet", "full", False])
    shapes = {f"{layer.path}.{p.slot}": p.shape for layer in run.info.layers for p in layer.parameters}
    assert shapes == {name: value.T.shape for name, value in given.items()}
    first, _ = merge_ranks(run.steps(0))
    for record in first.records:
        if record.stage == "weight":
            np.testing.assert_array_equal(record.value, given[f"{record.layer}.{record.slot}"].T)
    assert sum(record.stage == "weight" for record in first.records) == 6

"""Pairs of which at least one side is a sketch: what is measured, what can't be, and how it is judged."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from kit.records import (
    WAYS,
    as_sketch,
    info,
    kept,
    linear,
    memory_run,
    pair,
    planted,
    record,
    root,
    sketched_run,
    step,
    toy_run,
)

import padiff
from padiff.compare.measure.pairs import measure_pair
from padiff.records import Both, Figure, InMemory, Kind, Layout, Record, TensorSource
from padiff.report_formats import to_json, verdict
from padiff.sketches.sketch import BUCKETS, ELEMENTS, SPREAD

SIZES = {"exact": (6, 9), "whole": (40, 70), "sampled": (150, 200)}


def drawn(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def noisy(values, share, seed=1):
    return (values + share * drawn(values.shape, seed)).astype(values.dtype)


# -- one pair ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SIZES.values(), ids=list(SIZES))
def test_relative_error(shape, way):
    reference = drawn(shape)
    candidate = noisy(reference, 0.01)
    truth = measure_pair(pair(reference, candidate)).figures
    diff = measure_pair(kept(reference, candidate, way))
    found = diff.figures
    assert diff.passed
    assert found.basis == "sketches"
    exact = math.prod(shape) <= BUCKETS
    assert found.spread == (0 if exact else SPREAD)
    near = {"rel": 1e-5} if exact else {"rel": 4 * SPREAD}
    assert found.rel_l2 == pytest.approx(truth.rel_l2, **near)
    assert found.reference_l2 == pytest.approx(truth.reference_l2, rel=0.05)
    assert found.candidate_l2 == pytest.approx(truth.candidate_l2, rel=0.05)
    assert found.size == truth.size
    # A lower bound of the largest error, from estimates.
    assert 0 < found.max_abs <= truth.max_abs * (1 + 4 * SPREAD)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SIZES.values(), ids=list(SIZES))
def test_equal_tensors_have_no_error(shape, way):
    values = drawn(shape)
    figures = measure_pair(kept(values, values.copy(), way)).figures
    assert (figures.l2, figures.max_abs, figures.rel_l2) == (0, 0, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("turned", ["", "reference", "candidate", "reference candidate"])
@pytest.mark.parametrize("shape", SIZES.values(), ids=list(SIZES))
def test_transposed_matrices(shape, turned, way):
    """(out, in) against (in, out): aligned where one of the two was looked at transposed, else moments."""
    reference = drawn(shape)
    candidate = np.ascontiguousarray(noisy(reference, 0.01).T)
    diff = measure_pair(
        kept(reference, candidate, way, stage="weight", turned=turned, layout=Layout.from_text("transpose"))
    )
    truth = measure_pair(pair(reference, candidate, stage="weight", layout=Layout.from_text("transpose"))).figures
    assert truth.rel_l2 == pytest.approx(0.01, rel=0.3)
    if way == "both sketched" and turned != "candidate" and turned != "reference":
        assert diff.figures.basis == "moments"
        assert diff.figures.rel_l2 <= truth.rel_l2 * 1.001
    else:
        assert diff.figures.basis == "sketches"
        assert diff.figures.rel_l2 == pytest.approx(truth.rel_l2, rel=4 * SPREAD)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((2, 3, 4, 5), "axes 0,3,1,2"),
        ((4, 8, 10, 50), "axes 0,3,1,2"),
        ((4, 6, 50), "axes 1,0,2"),
        ((4, 8, 10, 50), "axes 0,2,3,1 then reshape"),
        ((30, 500), "reshape"),
    ],
    ids=str,
)
def test_other_layouts(shape, view, way):
    candidate = drawn(shape)
    reference_shape = {"reshape": (30, 20, 25), "axes 0,2,3,1 then reshape": (4, 500, 8)}.get(view)
    layout = Layout.from_text(view)

    apart = noisy(candidate, 0.01)
    reference = np.ascontiguousarray(layout.apply(apart, reference_shape or ()))
    truth = measure_pair(pair(reference, candidate, layout=layout)).figures
    found = measure_pair(kept(reference, candidate, way, layout=layout)).figures
    if way == "both sketched" and view != "reshape":
        assert found.basis == "moments"
        assert found.rel_l2 <= truth.rel_l2  # a lower bound
        off = measure_pair(kept(reference, (candidate * 3).astype(np.float32), way, layout=layout)).figures
        assert 0.4 < off.rel_l2 <= 2.01
    else:
        assert found.basis == "sketches"
        assert found.rel_l2 == pytest.approx(truth.rel_l2, rel=4 * SPREAD)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shapes", "stage"),
    [
        (((40, 70), (70, 40)), "weight"),
        (((40, 70), (40, 35, 2)), "forward"),
        (((40, 70), (40, 71)), "forward"),
        (((5,), (6,)), "grad"),
    ],
    ids=str,
)
def test_other_shapes_are_a_diff(shapes, stage, way):
    """As with tensors: values that would agree in a row are none the better for it."""
    reference, candidate = np.ones(shapes[0], np.float32), np.ones(shapes[1], np.float32)
    diff = measure_pair(kept(reference, candidate, way, stage=stage))
    assert diff.problem == measure_pair(pair(reference, candidate, stage=stage)).problem
    assert diff.problem.kind is Kind.SHAPES
    assert not diff.passed


@pytest.mark.parametrize(
    ("shapes", "stage"), [(((), (1,)), "loss"), (((1, 9), (9,)), "weight"), (((4, 5), (20,)), "grad")]
)
def test_shapes_that_hold_the_same(shapes, stage):
    values = drawn(shapes[0])
    diff = measure_pair(kept(values, values.reshape(shapes[1]), stage=stage))
    assert not diff.problem
    assert diff.figures.l2 == 0


@pytest.mark.parametrize("way", WAYS)
def test_loss_scales(way):
    reference = drawn((40, 70))
    scaled = (reference * 1024).astype(np.float32)
    both = measure_pair(kept(reference, scaled, way, stage="backward", scales=Both(1.0, 1024.0))).figures
    assert both.rel_l2 == 0
    assert both.candidate_l2 == pytest.approx(np.linalg.norm(reference), rel=1e-5)
    assert measure_pair(kept(reference, scaled, way, stage="backward")).figures.rel_l2 == pytest.approx(1023, rel=0.3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_on_one_side(way, bad):
    reference = drawn((40, 70))
    candidate = reference.copy()
    candidate[3, 5] = bad
    diff = measure_pair(kept(reference, candidate, way))
    assert not diff.passed
    assert str(diff.problem) == "1 of 2800 values are NaN or infinite on one side only"
    both = measure_pair(kept(candidate, candidate.copy(), way))
    assert both.passed
    assert both.figures.l2 == 0


def test_channels_of_different_size_in_another_layout():
    """Samples of the two layouts see other channels: what is chance is no diff."""
    for seed in range(20):
        sizes = np.exp(drawn((1, 64, 1, 1), seed))
        reference = np.maximum(drawn((4, 64, 16, 16), seed + 1) * sizes + 0.3 * sizes, 0)
        candidate = np.ascontiguousarray(reference.transpose(0, 2, 3, 1))
        (diff,) = judge(padiff.NoisePolicy(), kept(reference, candidate, layout=Layout.from_text("axes 0,3,1,2")))
        assert diff.passed, diff
        (off,) = judge(padiff.NoisePolicy(), kept(reference, 4 * candidate, layout=Layout.from_text("axes 0,3,1,2")))
        assert not off.passed


def test_masks_of_minus_infinity_in_another_layout():
    """Samples that lie elsewhere have another share of them by chance: that is no diff."""
    reference = drawn((8, 4, 60, 60))
    reference[..., np.triu_indices(60, 1)[0], np.triu_indices(60, 1)[1]] = -np.inf
    candidate = np.ascontiguousarray(reference.transpose(0, 2, 3, 1))
    assert measure_pair(kept(reference, candidate, layout=Layout.from_text("axes 0,3,1,2"))).passed
    finite = np.where(np.isfinite(reference), reference, 0)
    assert not measure_pair(kept(finite, candidate, layout=Layout.from_text("axes 0,3,1,2"))).passed


def test_complex_tensors():
    values = (drawn((50, 90)) + 1j * drawn((50, 90), 1)).astype(np.complex64)
    for way in WAYS:
        assert measure_pair(kept(values, values.copy(), way)).figures.l2 == 0
        found = measure_pair(kept(values, (values * np.exp(0.01j)).astype(np.complex64), way)).figures
        assert found.rel_l2 == pytest.approx(0.01, rel=4 * SPREAD)
    for way in WAYS:
        scalar = np.array(1 + 2j)
        assert measure_pair(kept(scalar, scalar, way)).figures.l2 == 0


def test_a_lone_sketch():
    lone = replace(kept(drawn((9, 9)), drawn((9, 9))), candidate=None)
    diff = measure_pair(lone)
    assert str(diff.problem) == "missing on the candidate"
    assert not diff.compared
    assert diff.figures.reference_l2 == pytest.approx(np.linalg.norm(drawn((9, 9))), rel=1e-5)
    assert diff.figures.candidate_l2 == 0


def test_one_side_that_has_it_once():
    """A position embedding, once against for every sample: a sketch of the whole can't be spread."""
    reference, candidate = drawn((1, 30, 50)), np.broadcast_to(drawn((1, 30, 50)), (4, 30, 50))
    diff = measure_pair(kept(reference, candidate, layout=Layout.from_text("broadcast")))
    assert not diff.compared
    assert diff.passed
    assert diff.problem


def test_a_part_of_a_sketch_is_not_measured():
    class Part(TensorSource):
        sketched = True

        def read(self):
            raise padiff.errors.SketchOnlyError("a part")

    whole = record("fc", "weight", "weight", drawn((20, 30)))
    part = replace(whole, source=Part())
    for one, other in ((part, whole), (whole, part), (part, as_sketch(whole)), (as_sketch(whole), part), (part, part)):
        diff = measure_pair(replace(pair(np.zeros(1), np.zeros(1)), reference=one, candidate=other))
        assert diff.problem
        assert not diff.compared
        assert diff.figures is None


# -- judged ------------------------------------------------------------------------------------------------------------


def judge(policy, *pairs):
    return policy.judge([measure_pair(p, policy.elementwise) for p in pairs])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["mean", "strict"])
@pytest.mark.parametrize("shape", SIZES.values(), ids=list(SIZES))
def test_a_fixed_tolerance(shape, mode, way):
    reference = drawn(shape)
    policy = padiff.Tolerance(1e-3, 0, mode)
    (equal,) = judge(policy, kept(reference, reference.copy(), way))
    (near,) = judge(policy, kept(reference, noisy(reference, 1e-5), way))
    (off,) = judge(policy, kept(reference, noisy(reference, 1e-2), way))
    assert (equal.passed, near.passed, off.passed) == (True, True, False)


@pytest.mark.parametrize("way", WAYS)
def test_an_estimate_is_reported_only_where_chance_does_not_explain_it(way):
    """An error at the limit fails half of the time by chance if the spread is not allowed for."""
    reference = drawn((60, 100))
    verdicts = {}
    for times in (0.95, 2.0):
        outcomes = []
        for seed in range(60):
            candidate = noisy(reference, 2e-5 * times, seed + 100)  # 2e-5: outputs in float32
            (diff,) = judge(padiff.NoisePolicy(), kept(reference, candidate, way))
            outcomes.append(diff.passed)
        verdicts[times] = np.mean(outcomes)
    assert verdicts[0.95] == 1
    assert verdicts[2.0] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(6, 9), (40, 70)], ids=str)
def test_integers_have_to_be_equal(shape, way):
    tokens = np.random.default_rng(0).integers(0, 50_000, shape)
    other = tokens.copy()
    other[-1, -1] += 1
    for policy in (padiff.NoisePolicy(), padiff.Tolerance(0, 0, "strict")):
        (same,) = judge(policy, kept(tokens, tokens.copy(), way, stage="input"))
        (off,) = judge(policy, kept(tokens, other, way, stage="input"))
        assert (same.passed, off.passed) == (True, False)


def test_a_few_elements_that_are_off_are_reported_from_all():
    """A gradient that is off in a few elements only (kinks): the median of the projection does not see them."""
    reference = drawn((40, 70))
    few = reference.copy()
    few[3, :4] += 1.0
    every = noisy(reference, np.linalg.norm(few - reference) / math.sqrt(reference.size))
    (kinks,) = judge(padiff.NoisePolicy(), kept(reference, few, stage="backward"))
    (wrong,) = judge(padiff.NoisePolicy(), kept(reference, every, stage="backward"))
    assert kinks.figures.rel_l2 == pytest.approx(wrong.figures.rel_l2, rel=0.6)
    assert kinks.judgement.figure is Figure.BULK
    assert (kinks.passed, wrong.passed) == (True, False)


# -- runs --------------------------------------------------------------------------------------------------------------

RUNS = {
    "both": (lambda r: True, lambda r: True),
    "reference": (lambda r: True, lambda r: False),
    "candidate": (lambda r: False, lambda r: True),
    "mixed": (lambda r: r.stage in ("forward", "weight"), lambda r: r.slot != "bias"),
}
FAULTS = {
    "output": planted("body.1/forward/output.0", lambda v: v * 1.01, 1),
    "loss": planted("(loop)/loss/loss", lambda v: v * 1.01, 1),
    "gradient": planted("head/grad/weight", lambda v: v * 1.2, 2),
    "update": planted("body.0/update/weight", lambda v: v * 1.05, 0),
    "weights not transposed": planted("body.0/weight/weight", lambda v: v.reshape(v.shape[::-1]).T, 0),
    "nan": planted("body.1/forward/output.0", lambda v: np.where(v > 1, np.nan, v), 1),
}


@pytest.mark.parametrize("kind", RUNS)
def test_clean_runs_pass(kind):
    reference, candidate = RUNS[kind]
    report = padiff.compare_runs(sketched_run(toy_run(), reference), sketched_run(toy_run(paddle=True), candidate))
    full = padiff.compare_runs(toy_run(), toy_run(paddle=True))
    assert full.passed
    assert report.passed, report.first_diff
    assert report.coverage.complete
    assert (report.coverage.compared, report.coverage.sketched > 0) == (full.coverage.compared, True)
    assert full.coverage.sketched == full.coverage.bounded == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_where_tensors_show_them(fault):
    right, wrong = toy_run(), toy_run(paddle=True, plant=FAULTS[fault])
    full = padiff.compare_runs(right, wrong).first_diff
    assert full is not None
    for kind in list(RUNS)[[*FAULTS].index(fault) % 2 :: 2]:  # half of them for each, by turns
        found = padiff.compare_runs(*(sketched_run(run, of) for run, of in zip((right, wrong), RUNS[kind]))).first_diff
        assert (found.step, found.stage, found.reference, found.slot) == (
            full.step,
            full.stage,
            full.reference,
            full.slot,
        ), kind


def large_run(paddle=False, change=lambda name, values: values):
    """One step of two linear layers with tensors that are sampled."""
    tree = info(root(2), linear("one", 100, 120, paddle=paddle), linear("two", 120, 90, paddle=paddle))
    data, records = np.random.default_rng(0), []
    for name, shape in (("one", (120, 100)), ("two", (90, 120))):
        for stage, slot, values in (
            ("weight", "weight", data.normal(size=shape)),
            ("forward", "output.0", data.normal(size=(300, shape[0]))),
            ("grad", "weight", data.normal(size=shape)),
        ):
            values = change(f"{name}/{stage}", values.astype(np.float32)).astype(np.float32)
            records.append(record(name, stage, slot, values.T if paddle and slot == "weight" else values))
    return memory_run(tree, step(0, sorted(records, key=lambda r: ("weight", "forward", "grad").index(r.stage))))


def test_what_a_verdict_says():
    wrong = large_run(True, lambda name, values: values * 1.02 if name == "two/forward" else values)
    report = padiff.compare_runs(sketched_run(large_run()), sketched_run(wrong))
    first = report.first_diff
    assert (first.stage, first.reference) == ("forward", "two")
    assert "from sketches" in first.message
    assert "9%" in first.message
    assert "2%" not in first.message.replace("9%", "")
    content = json.loads(json.dumps(to_json(report)))
    assert content["coverage"]["sketched"] == report.coverage.sketched == 6
    diffs = [d for one in content["steps"] for d in one["diffs"]]
    assert {d["basis"] for d in diffs if "basis" in d} == {"sketches"}
    clean = padiff.compare_runs(sketched_run(large_run()), sketched_run(large_run(True)))
    assert clean.passed
    assert "judged from sketches" in verdict(clean)
    assert "sketches" not in verdict(padiff.compare_runs(large_run(), large_run(True)))


def test_a_wrong_matrix_is_not_excused():
    """A square matrix that was carried over without being transposed has the same norms and means."""
    square = drawn((110, 110))

    def one(paddle, values):
        tree = info(root(1), linear("fc", 110, 110, paddle=paddle))
        return memory_run(
            tree, step(0, [record("fc", "weight", "weight", values), record("fc", "forward", "output.0", square)])
        )

    right = padiff.compare_runs(
        sketched_run(one(False, square)), sketched_run(one(True, np.ascontiguousarray(square.T)))
    )
    wrong = padiff.compare_runs(sketched_run(one(False, square)), sketched_run(one(True, square)))
    assert right.passed
    assert (wrong.first_diff.stage, wrong.first_diff.reference) == ("weight", "fc")


def fused(paddle_side):
    """A query-key-value matrix in one, against three: parts of a sketch can't be taken."""
    values = [drawn((40, 40), seed) for seed in range(3)]
    out = drawn((10, 40), 9)
    if paddle_side:
        names = ("q", "k", "v")
        tree = info(root(4), *(linear(name, 40, 40) for name in names), linear("out", 40, 40))
        records = [record(name, "weight", "weight", v) for name, v in zip(names, values)]
        records += [record(name, "forward", "output.0", drawn((10, 40), k)) for k, name in enumerate(names)]
    else:
        tree = info(root(2), linear("qkv", 40, 120), linear("out", 40, 40))
        records = [record("qkv", "weight", "weight", np.concatenate(values))]
        records += [
            record("qkv", "forward", "output.0", np.concatenate([drawn((10, 40), k) for k in range(3)], axis=1))
        ]
    records += [record("out", "weight", "weight", drawn((40, 40), 5)), record("out", "forward", "output.0", out)]
    return memory_run(tree, step(0, sorted(records, key=lambda r: r.stage != "weight")))


def test_parts_of_a_fused_matrix_are_listed_and_not_counted():
    full = padiff.compare_runs(fused(False), fused(True), layer_map={"qkv": ["q", "k", "v"]})
    report = padiff.compare_runs(
        sketched_run(fused(False)), sketched_run(fused(True)), layer_map={"qkv": ["q", "k", "v"]}
    )
    assert full.passed
    assert full.coverage.unmeasured == ()
    assert report.passed
    assert any(site.startswith("qkv/weight") for site in report.coverage.unmeasured), report.coverage
    assert report.coverage.compared < full.coverage.compared
    assert not report.coverage.complete
    assert not any(d.compared for d in report.diffs if d.pair.complete and d.figures is None)
    text = verdict(report) + json.dumps(to_json(report))
    assert "qkv/weight" in text


def test_nothing_but_what_is_not_measured_is_an_error():
    only = memory_run(
        info(root(1), linear("fc", 3, 4)), step(0, [as_sketch(record("fc", "weight", "weight", drawn((4, 3))))])
    )
    empty = memory_run(info(root(1), linear("fc", 3, 4)), step(0, ()))
    with pytest.raises(padiff.errors.NothingToCompareError):
        padiff.compare_runs(only, empty)


def test_a_sampled_tensor_shows_a_fault_in_one_layer_of_many(tmp_path):
    """What lies outside of the sample is not seen: that is what a sketch is; what is spread over the tensor is."""
    reference = drawn((200, 300))
    spread_out = reference * np.where(np.arange(300) % 50 == 0, 1.05, 1).astype(np.float32)
    assert reference.size > ELEMENTS
    (diff,) = judge(padiff.NoisePolicy(), kept(reference, spread_out))
    assert not diff.passed


def test_records_tell_what_they_are():
    full = record("fc", "forward", "output.0", drawn((3, 3)))
    assert isinstance(full, Record)
    assert isinstance(full.source, InMemory)
    assert full.sketch is None
    assert as_sketch(full).sketch.size == 9
    assert as_sketch(full).source.sketched and not full.source.sketched


@pytest.mark.parametrize("explained", [True, False])
def test_a_small_sketch_has_its_elements_so_an_update_may_be_another_where_its_gradient_is(explained):
    gradient = np.where(np.arange(32) % 2, 1.0, -1.0).astype(np.float32)
    gradient[5] = 1e-4
    other = gradient.copy()
    other[5] *= -1
    step = 1e-3 * np.sign(gradient)
    off = step.copy()
    off[5 if explained else 9] *= -1
    pairs = [kept(gradient, other, stage="grad"), kept(step, off, stage="update")]
    grad, update = judge(padiff.NoisePolicy(), *pairs)
    assert grad.passed and update.passed is explained

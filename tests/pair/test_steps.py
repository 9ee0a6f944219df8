from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from kit.records import info, linear, norm, parameter, plain, record, root, step, toy_info, toy_steps

from padiff.align import align
from padiff.pair.steps import pair_steps
from padiff.records import LOOP, ROOT, STAGES, TRANSPOSED, UNSCALED, Both, Layer, Pair, Step

TREE = info(root(2), linear("a", 4, 8), linear("b", 8, 2))


def pairs_of(reference: Step, candidate: Step, trees=(TREE, TREE), **rest) -> list[Pair]:
    return pair_steps(reference, candidate, align(*trees, **rest))


def sites(pairs: list[Pair]) -> list[tuple[str | None, str | None]]:
    return [(p.reference and p.reference.site, p.candidate and p.candidate.site) for p in pairs]


def random_step(seed: int) -> Step:
    rng = random.Random(seed)
    records = []
    for layer in (ROOT, "a", "b", "elsewhere", LOOP):
        for stage in STAGES:
            for slot in ("weight", "bias", "output.0", "output.x", "input.x"):
                for call in range(rng.choice([0, 0, 1, 2])):
                    values = np.zeros(rng.choice([(2,), (3, 2), ()]), np.float32)
                    records.append(record(layer, stage, slot, values, call=call))
    rng.shuffle(records)
    return step(0, records)


@pytest.mark.parametrize("seed", range(25))
def test_every_record_of_either_side_is_in_exactly_one_pair(seed):
    reference, candidate = random_step(seed), random_step(seed + 1000)
    pairs = pairs_of(reference, candidate)
    assert Counter(id(p.reference) for p in pairs if p.reference) == Counter(map(id, reference.records))
    assert Counter(id(p.candidate) for p in pairs if p.candidate) == Counter(map(id, candidate.records))


@pytest.mark.parametrize("seed", range(5))
def test_pairs_agree_in_stage_and_call(seed):
    for p in pairs_of(random_step(seed), random_step(seed + 1000)):
        if p.complete:
            assert (p.reference.stage, p.reference.call) == (p.candidate.stage, p.candidate.call)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_come_stage_by_stage(seed):
    sides = []
    for one in (random_step(seed), random_step(seed + 1000)):
        in_one_turn = sorted(one.records, key=lambda r: (r.stage == "update", r.stage == "backward"))
        sides.append(step(0, [replace(r, order=k) for k, r in enumerate(in_one_turn)]))
    places = [STAGES.index(p.stage) for p in pairs_of(*sides)]
    assert places == sorted(places)


def test_what_an_optimizer_did_comes_before_what_the_layers_then_compute():
    """A critic trained twice in one step; the loss is noted when the optimizer has stepped."""
    slots = {"forward": "output.0", "backward": "output.0", "grad": "weight", "update": "weight", "loss": "loss"}
    weight = np.zeros((8, 4), np.float32)
    records = [record("a", "weight", "weight", weight)]
    for call in range(2):
        for stage, slot in slots.items():
            records.append(record(LOOP if stage == "loss" else "a", stage, slot, weight, call=call))
    one = step(0, [replace(r, order=k) for k, r in enumerate(records)])
    found = [(p.stage, p.anchor.call) for p in pairs_of(one, one)]
    stages = ["forward", "loss", "backward", "grad", "update"]
    assert found == [("weight", 0), *((stage, 0) for stage in stages), *((stage, 1) for stage in stages)]


def test_what_comes_back_comes_before_what_the_layers_then_compute():
    """Gradients that are accumulated; weights that a loop moves between two calls; inputs that follow a gradient."""
    values = np.zeros((8, 4), np.float32)
    stages = ("forward", "backward") * 2 + ("grad", "update")
    slots = {"grad": "weight", "update": "weight"}
    records = [
        record("a", stage, slots.get(stage, "output.0"), values, call=k // 2 if k < 4 else 0)
        for k, stage in enumerate(stages)
    ]
    one = step(0, [replace(r, order=k) for k, r in enumerate(records)])
    assert [(p.stage, p.anchor.call) for p in pairs_of(one, one)] == [
        *((stage, call) for call in range(2) for stage in ("forward", "backward")),
        ("grad", 0),
        ("update", 0),
    ]


def test_within_a_stage_pairs_come_in_the_order_in_which_the_reference_ran():
    reference = step(0, [record(x, "forward", "output.0", [1]) for x in ("b", "a", ROOT)])
    candidate = step(0, [record(x, "forward", "output.0", [1]) for x in ("a", "b", ROOT)])
    assert [p.reference.layer for p in pairs_of(reference, candidate)] == ["b", "a", ROOT]


def test_parameters_come_in_the_order_in_which_their_layers_ran():
    # Defined a, b; run b, a.
    weights = [record(x, "weight", "bias", [1]) for x in ("a", "b")]
    reference = step(0, weights + [record(x, "forward", "output.0", [1]) for x in ("b", "a")])
    assert [p.anchor.layer for p in pairs_of(reference, reference) if p.stage == "weight"] == ["b", "a"]


def test_step_wide_scalars_come_after_the_layers_of_their_stage():
    reference = step(0, [record(LOOP, "update", "learning_rate", [1]), record("a", "update", "weight", [1])])
    assert [p.anchor.layer for p in pairs_of(reference, reference)] == ["a", LOOP]


def test_what_only_the_candidate_has_comes_last_in_its_stage():
    reference = step(0, [record("a", "forward", "output.0", [1]), record(LOOP, "loss", "loss", [1])])
    candidate = step(0, [record("zz", "forward", "output.0", [1]), record("a", "forward", "output.0", [1])])
    assert sites(pairs_of(reference, candidate)) == [
        ("a/forward/output.0", "a/forward/output.0"),
        (None, "zz/forward/output.0"),
        ("(loop)/loss/loss", None),
    ]


def test_calls_are_paired_by_their_number_and_a_surplus_call_is_not_lost():
    reference = step(0, [record("a", "forward", "output.0", [k], call=k) for k in range(2)])
    candidate = step(0, [record("a", "forward", "output.0", [k], call=k) for k in range(3)])
    assert sites(pairs_of(reference, candidate)) == [
        ("a/forward/output.0", "a/forward/output.0"),
        ("a/forward/output.0#1", "a/forward/output.0#1"),
        (None, "a/forward/output.0#2"),
    ]


def test_a_named_output_answers_to_a_numbered_one():
    reference = step(0, [record(ROOT, "forward", "output.logits", np.zeros((4, 2)))])
    candidate = step(0, [record(ROOT, "forward", "output.0", np.zeros((4, 2)))])
    assert sites(pairs_of(reference, candidate)) == [("(root)/forward/output.logits", "(root)/forward/output.0")]


def test_outputs_are_not_paired_by_place_where_their_number_differs():
    reference = step(0, [record(ROOT, "forward", f"output.{k}", [1, 2]) for k in ("logits", "hidden")])
    candidate = step(0, [record(ROOT, "forward", "output.0", [1, 2])])
    assert not any(p.complete for p in pairs_of(reference, candidate))


def test_outputs_are_not_paired_by_place_where_their_shapes_differ():
    reference = step(0, [record(ROOT, "forward", "output.logits", [1, 2])])
    candidate = step(0, [record(ROOT, "forward", "output.0", [1, 2, 3])])
    assert not any(p.complete for p in pairs_of(reference, candidate))


def test_several_outputs_of_other_names_each_get_their_own_partner():
    reference = step(0, [record(ROOT, "forward", f"output.{k}", [v, v]) for v, k in enumerate(("logits", "hidden"))])
    candidate = step(0, [record(ROOT, "forward", f"output.{k}", [v, v]) for v, k in enumerate((0, 1))])
    paired = pairs_of(reference, candidate)
    assert all(p.complete and p.reference.value[0] == p.candidate.value[0] for p in paired)


def test_inputs_of_models_that_do_not_answer_are_paired_by_place():
    reference = step(0, [record("lit", "input", "input.x", np.zeros((4, 2)))])
    candidate = step(0, [record("net", "input", "input.input", np.zeros((4, 2)))])
    assert sites(pairs_of(reference, candidate)) == [("lit/input/input.x", "net/input/input.input")]


def test_a_linear_layers_weight_is_transposed_only_between_the_two_layouts():
    for paddle, expected in ((True, "transpose"), (False, "")):
        trees = (info(root(1), linear("a", 8, 8)), info(root(1), linear("a", 8, 8, paddle=paddle)))
        one = step(0, [record("a", stage, "weight", np.zeros((8, 8))) for stage in ("weight", "grad", "update")])
        assert [str(p.layout) for p in pairs_of(one, one, trees)] == [expected] * 3


def test_a_bias_and_an_output_are_never_transposed():
    one, other = toy_steps([0])[0], toy_steps([0], paddle=True)[0]
    pairs = pairs_of(one, other, (toy_info(), toy_info(paddle=True)))
    transposed = {(p.reference.layer, p.reference.slot) for p in pairs if p.layout}
    assert transposed == {("fc1", "weight"), ("fc2", "weight")}


def test_running_statistics_are_paired_under_both_names():
    trees = info(root(1), norm("bn", 3)), info(root(1), norm("bn", 3, paddle=True))
    reference = step(0, [record("bn", "weight", slot, [1, 2, 3]) for slot in ("running_mean", "running_var")])
    candidate = step(0, [record("bn", "weight", slot, [1, 2, 3]) for slot in ("_variance", "_mean")])
    assert sites(pairs_of(reference, candidate, trees)) == [
        ("bn/weight/running_mean", "bn/weight/_mean"),
        ("bn/weight/running_var", "bn/weight/_variance"),
    ]


def test_only_gradients_of_activations_are_divided_by_the_loss_scales():
    records = [record("a", stage, "output.0", [1]) for stage in STAGES]
    reference, candidate = step(0, records, loss_scale=4.0), step(0, records, loss_scale=1024.0)
    scales = {p.stage: p.scales for p in pairs_of(reference, candidate)}
    assert scales.pop("backward") == Both(4.0, 1024.0)
    assert set(scales.values()) == {UNSCALED}


def tied_trees() -> tuple:
    embedding = Layer("emb", "Embedding", "embedding", (parameter("weight", 10, 4),))
    tied = parameter("weight", 10, 4, layout="out_in", tied_to="emb/weight")
    own = parameter("weight", 4, 10, layout="in_out")
    return (
        info(root(2), embedding, Layer("head", "Linear", "linear", (tied,))),
        info(root(2), embedding, Layer("head", "Linear", "linear", (own,))),
    )


@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_tied_on_one_side_is_compared_with_what_it_is_tied_to(turned):
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    tied = step(0, [record("emb", "weight", "weight", values)])
    untied = step(0, [record("emb", "weight", "weight", values), record("head", "weight", "weight", values.T)])
    trees, steps = tied_trees(), (tied, untied)
    if turned:
        trees, steps = trees[::-1], steps[::-1]
    pairs = pairs_of(*steps, trees)
    assert len(pairs) == 2 and all(p.complete for p in pairs)
    head = next(p for p in pairs if p.layout == TRANSPOSED)
    lone = head.reference if turned else head.candidate
    assert lone.layer == "head"


def test_a_layer_given_no_partner_keeps_its_records_alone():
    one = step(0, [record("a", "forward", "output.0", [1]), record("b", "forward", "output.0", [1])])
    assert sites(pairs_of(one, one, layer_map=[("a", None), (None, "a")])) == [
        ("a/forward/output.0", None),
        ("b/forward/output.0", "b/forward/output.0"),
        (None, "a/forward/output.0"),
    ]


def test_layers_outside_of_the_tree_are_not_lost():
    one = step(0, [record(plain("x", "y").path, "forward", "output.0", [1])])
    assert sites(pairs_of(one, step(0, []))) == [("x/forward/output.0", None)]
    assert sites(pairs_of(step(0, []), one)) == [(None, "x/forward/output.0")]


def test_calls_of_a_loss_are_paired_in_order_where_the_predictions_agree():
    # The labels of one call, 0.9 for 1, are by chance those of another call.
    def losses(*labels: float) -> Step:
        records = []
        for call, label in enumerate(labels):
            logits = np.arange(4, dtype=np.float32) + 10 * call
            for role, values in (("logits", logits), ("labels", np.full(4, label, np.float32))):
                records.append(record(LOOP, "loss", f"bce().input.{role}", values, call=call))
        return step(0, records)

    pairs = pairs_of(losses(0.9, 0.0, 1.0), losses(1.0, 0.0, 1.0))
    assert [(pair.reference.call, pair.candidate.call) for pair in pairs] == [(k, k) for k in (0, 0, 1, 1, 2, 2)]

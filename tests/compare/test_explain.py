from __future__ import annotations

import numpy as np
import pytest
from kit.records import info, linear, memory_run, norm, planted, record, root, step, toy_run

from padiff import compare_runs
from padiff.records import Layer

RNG = np.random.default_rng(11)


def cause_of(site: str, change, at: int = 0) -> str:
    report = compare_runs(toy_run(), toy_run(paddle=True, plant=planted(site, change, at)))
    assert report.first_diff.cause.text in report.first_diff.message
    return report.first_diff.cause.sentence


def shuffled(values: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(values.ravel()).reshape(values.shape)


def other(values: np.ndarray) -> np.ndarray:
    return values + np.random.default_rng(0).normal(size=values.shape)


@pytest.mark.parametrize(
    ("site", "change", "words"),
    [
        ("(root)/input/input.x", lambda v: v[::-1].copy(), "the candidate's input is the same samples in reverse"),
        ("(root)/input/input.x", lambda v: v * 255, "the candidate's input is 255 times the reference's (0 to 255"),
        ("(root)/input/input.x", other, "other batches"),
        (
            "body.0/weight/weight",
            other,
            "the runs start from different weights in fc1/weight, and from equal ones in 1 others",
        ),
        ("body.1/forward/output.0", lambda v: v * 2, "the candidate's output is 2 times the reference's"),
        ("body.1/forward/output.0", shuffled, "the same values in another order: another layout"),
        ("body.1/forward/output.0", other, "unknown; all inputs agree: the cause is inside this layer"),
        ("(loop)/loss/loss", lambda v: v * 32, "the loss is 32 times the reference's: another reduction"),
        ("head/backward/output.0", lambda v: v * 4, "gradients of outputs of fc2/output.0 are 4 times the reference's"),
        ("head/backward/output.0", other, "unknown; forward agrees here: the cause is in the backward of"),
        ("head/grad/weight", lambda v: v * 0.5, "gradients of fc2/weight are 0.5 times the reference's"),
        ("head/grad/weight", other, "unknown; gradients of outputs agree: the cause lies between"),
        ("head/update/weight", lambda v: v * 1.08, "the update is 1.08 times the reference's at the same gradient"),
        ("head/update/weight", other, "unknown; the gradients agree: the cause is in the optimizer"),
    ],
)
def test_the_likely_cause_of_a_fault(site, change, words):
    assert cause_of(site, change).startswith(words)


def test_a_constant_factor_is_no_cause_where_it_is_none():
    assert "times the reference" not in cause_of("body.1/forward/output.0", lambda v: v + 0.5)


def test_weights_that_differ_later_are_written():
    words = "between steps 1 and 2 only the candidate's loop writes `body.0`, besides its optimizer: 32 of 32 elements"
    assert cause_of("body.0/weight/weight", other, at=2) == words


def run(layer, *records, number: int = 0):
    return memory_run(info(root(1), layer), step(number, records))


def test_a_square_weight_that_was_not_transposed_is_reported():
    matrix = RNG.normal(size=(6, 6))
    reference = run(linear("fc", 6, 6), record("fc", "weight", "weight", matrix))
    # Copied as it is from (out, in) into (in, out).
    candidate = run(linear("fc", 6, 6, paddle=True), record("fc", "weight", "weight", matrix))
    assert "at the start transposed" in compare_runs(reference, candidate).first_diff.cause.sentence
    right = run(linear("fc", 6, 6, paddle=True), record("fc", "weight", "weight", matrix.T))
    assert compare_runs(reference, right).passed


def test_an_epsilon_that_differs_is_reported_with_both_values():
    values = RNG.normal(size=(4, 3))
    runs = [
        run(norm("bn", 3, eps=eps, momentum=0.1), record("bn", "forward", "output.0", values * scale))
        for eps, scale in ((1e-5, 1), (1e-3, 1.01))
    ]
    assert compare_runs(*runs).first_diff.cause.sentence == "the layers are set differently: eps 1e-05 against 0.001"


def test_a_momentum_that_differs_explains_running_statistics_but_no_output():
    def batchnorm(momentum: float, stage: str, slot: str, values: list[float]):
        return run(norm("bn", 2, momentum=momentum), record("bn", stage, slot, values), number=3)

    cause = compare_runs(
        batchnorm(0.1, "weight", "running_mean", [1, 2]), batchnorm(0.9, "weight", "running_mean", [9, 18])
    ).first_diff.cause
    assert cause.sentence == "the layers are set differently: momentum 0.1 against 0.9"
    assert "counted as torch does" in cause.evidence
    cause = compare_runs(
        batchnorm(0.1, "forward", "output.0", [1, 2]), batchnorm(0.9, "forward", "output.0", [1, 3])
    ).first_diff.cause.sentence
    assert "momentum" not in cause.replace("at this very place", "")


def test_learning_rates_that_differ_are_reported_with_both_values():
    first = compare_runs(toy_run([0], rate=0.1), toy_run([0], paddle=True, rate=0.2)).first_diff
    assert (first.stage, first.slot) == ("update", "weight")
    assert first.cause.sentence == "the learning rates differ: 0.1 against 0.2"


def test_weight_decay_is_reported():
    weights = {r.site: r.value for r in toy_run([0]).steps(0)[0].records if r.stage == "weight"}

    def plant(seen, number):
        if seen.stage != "update" or seen.slot != "weight":
            return None
        layer = {"body.0": "fc1", "head": "fc2"}[seen.layer]
        return (seen.value - 0.01 * weights[f"{layer}/weight/weight"].T).astype(np.float32)

    first = compare_runs(toy_run([0]), toy_run([0], paddle=True, plant=plant)).first_diff
    # 0.01 of the weight at a learning rate of 0.1.
    assert first.cause.sentence == "weight decay is 0.1 in the candidate for the reference's 0 (SGD)"
    assert first.cause.proven


def test_clipping_on_one_side_is_reported_by_one_ratio_of_all_gradients():
    def plant(seen, number):
        return seen.value * np.float32(0.25) if seen.stage == "grad" else None

    first = compare_runs(toy_run([0]), toy_run([0], paddle=True, plant=plant)).first_diff
    assert first.stage == "grad"
    assert "gradients are 0.25 times the reference's" in first.cause.sentence


def test_a_nan_on_one_side_is_reported():
    def nan(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values.flat[3] = np.nan
        return values

    first = compare_runs(toy_run(), toy_run(paddle=True, plant=planted("body.0/forward/output.0", nan))).first_diff
    assert first.cause.sentence.startswith("an overflow, a division by zero or a log of zero")
    assert "1 of 128 values are NaN or infinite on one side only" in first.message


def test_random_dropout_masks_are_reported():
    values = RNG.normal(size=(20, 20))
    reference, candidate = (values * (np.random.default_rng(k).random((20, 20)) > 0.5) * 2 for k in (1, 2))
    runs = [run(linear("x", 2, 2), record("x", "forward", "output.0", v)) for v in (reference, candidate)]
    assert compare_runs(*runs).first_diff.cause.sentence.startswith("dropout: each run draws its own random mask")


def test_shapes_that_differ_are_reported():
    runs = [run(linear("x", 2, n), record("x", "forward", "output.0", np.zeros((4, n)))) for n in (10, 12)]
    first = compare_runs(*runs).first_diff
    assert "shapes differ: (4, 10) against (4, 12)" in first.message and "other sizes" in first.cause.sentence


def test_a_gradient_that_is_missing_is_reported():
    both = [record("x", "grad", slot, [1, 2]) for slot in ("weight", "bias")]
    first = compare_runs(run(linear("x", 1, 2), *both), run(linear("x", 1, 2), both[0])).first_diff
    assert first.cause.sentence.startswith("x/bias requires a gradient on the candidate, and has none: its optimizer")


def test_the_message_says_how_far_beyond_what_is_allowed_and_where():
    values = np.asarray([[1.0, 2.0], [3.0, 4.0]])
    changed = values.copy()
    changed[1, 0] = 3.5
    runs = [
        run(linear("x", 2, 2), record("x", "forward", "output.0", v, layer_type="Linear")) for v in (values, changed)
    ]
    message = compare_runs(*runs).first_diff.message
    assert "layer x (Linear) against x (Linear), output.0" in message
    # Relative L2: 0.5 / sqrt(30) = 0.0913; the values were made float64, whose forward limit is 1e-10.
    assert "max |diff| 0.5, relative L2 0.0913, 913,000,000 times the rel_l2 allowed (1e-10)" in message
    assert "largest difference at [1, 0]: reference 3, candidate 3.5" in message


def test_a_call_is_named():
    def calls(last: float):
        return run(
            linear("x", 1, 1), *(record("x", "forward", "output.0", [v], call=k) for k, v in enumerate((1, last)))
        )

    assert "output.0 (call 1): max" in compare_runs(calls(1), calls(2)).first_diff.message


def test_complex_updates_are_explained_without_a_crash():
    weight = RNG.normal(size=9) + 1j * RNG.normal(size=9)
    update = RNG.normal(size=9) + 1j * RNG.normal(size=9)
    runs = [
        run(linear("x", 3, 3), record("x", "weight", "w", weight), record("x", "update", "w", values))
        for values in (update, update + 0.1 * weight)
    ]
    assert "weight decay" in compare_runs(*runs).first_diff.cause.sentence


# -- causes that the record itself refutes -------------------------------------------------------------------------


def dropouts(rates: tuple[float, float]):
    """Two dropout layers whose outputs are zero in other places: behind a ReLU here, a tanh there."""
    values = RNG.normal(size=(20, 10))
    sides = np.maximum(values, 0), np.where(RNG.random(values.shape) < 0.5, 0, values)
    runs = [
        run(plain("drop", "dropout", p=rate), record("drop", "forward", "output.0", side))
        for rate, side in zip(rates, sides)
    ]
    return compare_runs(*runs).first_diff.cause.sentence


def plain(path: str, kind: str, **settings):
    return Layer(path, kind.capitalize(), kind, settings=settings)


def test_dropout_that_drops_nothing_is_no_cause():
    assert dropouts((0.1, 0.1)).startswith("dropout: each run draws its own random mask")
    assert "dropout" not in dropouts((0.0, 0.0)) and "mask" not in dropouts((0.0, 0.0))


def test_what_is_set_differently_explains_shapes_that_differ():
    runs = [
        run(plain("pool", "maxpool2d", ceil_mode=ceil), record("pool", "forward", "output.0", np.ones((2, 3, n, n))))
        for ceil, n in ((False, 4), (True, 5))
    ]
    assert (
        compare_runs(*runs).first_diff.cause.sentence == "the layers are set differently: ceil_mode False against True"
    )
    same = [
        run(plain("pool", "maxpool2d", ceil_mode=False), record("pool", "forward", "output.0", np.ones((2, 3, n, n))))
        for n in (4, 5)
    ]
    assert compare_runs(*same).first_diff.cause.sentence == "the layers have other sizes, or the tensor another layout"


def rates_of(reference: list[float], candidate: list[float]) -> str:
    """The cause of an update that is twice the reference's, at learning rates of one or two parameter groups."""
    sides = []
    for rates, factor in ((reference, 1.0), (candidate, 2.0)):
        update = record("fc", "update", "weight", factor * np.ones((4, 4)))
        slots = [f"learning_rate.{k}" if k else "learning_rate" for k in range(len(rates))]
        scalars = [record("(loop)", "update", slot, np.asarray(rate)) for slot, rate in zip(slots, rates)]
        weight = record("fc", "weight", "weight", np.ones((4, 4)))
        sides.append(run(linear("fc", 4, 4), weight, update, *scalars))
    return compare_runs(*sides).first_diff.cause.sentence


def test_the_rate_of_one_parameter_group_is_a_learning_rate_too():
    differ = "the learning rates differ: {} against {} (by parameter group)"
    assert rates_of([0.1, 0.1], [0.1, 0.2]) == differ.format("0.1, 0.1", "0.1, 0.2")
    assert rates_of([0.1], [0.1, 0.2]) == differ.format("0.1", "0.1, 0.2")
    # One group here is two there, of the same rate: another way of writing.
    assert rates_of([0.1], [0.1, 0.1]).startswith("the update is 2 times the reference's at the same gradient and")

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kit.records import pair

from padiff.compare.measure.operands import Arrays
from padiff.compare.measure.pairs import figures_of, measure_pair
from padiff.records import UNSCALED, Both, Kind, Layout


def test_figures_of_three_numbers_are_those_worked_out_by_hand():
    # r = (3, 0, -4), c = (3.5, 0.25, -5): errors 0.5, 0.25, 1.
    figures = measure_pair(pair([3, 0, -4], [3.5, 0.25, -5])).figures
    assert figures.max_abs == 1.0
    assert figures.max_rel == 0.25  # 1 / 4; the zero is left out
    assert figures.mean_abs == pytest.approx(1.75 / 3)
    assert figures.mean_reference == pytest.approx(7 / 3)
    assert figures.l2 == pytest.approx((0.25 + 0.0625 + 1) ** 0.5)
    assert figures.reference_l2 == 5.0
    assert figures.rel_l2 == pytest.approx(1.3125**0.5 / 5)
    assert figures.index == (2,)
    assert tuple(figures.values) == (-4.0, -5.0)
    assert figures.size == 3


def test_max_rel_and_max_abs_may_be_at_different_places():
    figures = measure_pair(pair([100, 0.01], [101, 0.02])).figures
    assert figures.max_abs == pytest.approx(1)
    assert figures.max_rel == pytest.approx(1, rel=1e-5)
    assert figures.index == (0,)


def test_a_reference_of_zeros_has_an_infinite_relative_error():
    figures = measure_pair(pair([0, 0], [0, 2])).figures
    assert figures.rel_l2 == np.inf
    assert figures.max_rel == 0.0


def test_two_tensors_of_zeros_have_no_error():
    assert measure_pair(pair([0, 0], [0, 0])).figures.rel_l2 == 0.0


def test_the_candidates_norm_is_measured_too():
    assert measure_pair(pair([0, 0], [3, 4])).figures.candidate_l2 == 5.0


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20, 2**20 + 5])
def test_an_error_on_either_side_of_a_chunks_boundary_is_found_with_its_index(place):
    reference = np.zeros(2**20 + 7, np.float32)
    reference[::3] = 1.0
    candidate = reference.copy()
    candidate[place] += 2.0
    figures = measure_pair(pair(reference, candidate)).figures
    assert figures.index == (place,)
    assert tuple(figures.values) == (reference[place], candidate[place])
    assert (figures.max_abs, figures.l2) == (2.0, 2.0)
    assert figures.mean_abs == pytest.approx(2.0 / (2**20 + 7))


def test_sums_over_several_chunks_are_those_of_numpy():
    rng = np.random.default_rng(3)
    r, c = rng.normal(size=(2, 1300, 1000))
    figures = figures_of(Arrays(r, c, UNSCALED), elementwise=(0.5, 0.1))
    assert figures.l2 == pytest.approx(np.linalg.norm(c - r), rel=1e-12)
    assert figures.mean_abs == pytest.approx(np.abs(c - r).mean(), rel=1e-12)
    assert figures.max_rel == pytest.approx((np.abs(c - r) / np.abs(r)).max(), rel=1e-12)
    assert figures.mismatched == np.count_nonzero(~np.isclose(c, r, atol=0.5, rtol=0.1))
    assert figures.index == np.unravel_index(np.abs(c - r).argmax(), r.shape)


def test_the_same_nan_and_infinities_on_both_sides_are_equal():
    values = [np.nan, np.inf, -np.inf, 1.0]
    diff = measure_pair(pair(values, values))
    assert diff.passed and diff.problem is None
    assert diff.figures.nonfinite == 0
    assert diff.figures.max_abs == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_or_infinity_on_one_side_only_is_a_problem_whatever_the_tolerance(bad, side):
    sides = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    sides[side][1] = bad
    diff = measure_pair(pair(*sides))
    assert not diff.passed
    assert str(diff.problem) == "1 of 3 values are NaN or infinite on one side only"


def test_infinities_of_opposite_sign_are_a_problem():
    diff = measure_pair(pair([np.inf], [-np.inf]))
    assert diff.figures.nonfinite == 1 and not diff.passed


def test_the_other_figures_are_taken_where_both_sides_are_finite():
    figures = measure_pair(pair([np.nan, 3, 4], [7, 3, 6])).figures
    assert (figures.max_abs, figures.mean_abs, figures.reference_l2) == (2.0, 1.0, 5.0)
    assert figures.index == (2,)


def test_empty_tensors_are_equal():
    diff = measure_pair(pair(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)))
    assert diff.passed and diff.figures.size == 0


def test_empty_tensors_of_unequal_shapes_differ():
    assert measure_pair(pair(np.zeros((0, 3), np.float32), np.zeros((0, 4), np.float32))).problem.kind is Kind.SHAPES


def test_a_zero_dimensional_tensor_is_measured():
    figures = measure_pair(pair(np.float32(2).reshape(()), np.float32(2.5).reshape(()))).figures
    assert (figures.max_abs, figures.index, figures.size) == (0.5, (), 1)


def test_a_scalar_is_compared_with_a_vector_of_one():
    figures = measure_pair(pair(np.asarray(2.0), np.asarray([2.5]))).figures
    assert figures.max_abs == 0.5


def test_other_shapes_are_a_problem_and_nothing_is_broadcast():
    diff = measure_pair(pair(np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32)))
    assert not diff.passed and diff.figures is None
    assert str(diff.problem) == "shapes differ: (2, 3) against (1, 3)"


def test_int64_neighbours_beyond_what_float64_holds_still_differ():
    big = 2**53
    figures = measure_pair(pair(np.asarray([big], np.int64), np.asarray([big + 1], np.int64))).figures
    assert float(big) == float(big + 1)  # why it needs care
    assert figures.max_abs == 1.0


def test_equal_int64_beyond_what_float64_holds_are_equal():
    values = np.asarray([2**53 + 1, -(2**62) - 1], np.int64)
    assert measure_pair(pair(values, values.copy())).figures.max_abs == 0.0


def test_unsigned_integers_do_not_wrap_around():
    assert measure_pair(pair(np.asarray([3], np.uint8), np.asarray([5], np.uint8))).figures.max_abs == 2.0
    assert measure_pair(pair(np.asarray([5], np.uint8), np.asarray([3], np.uint8))).figures.max_abs == 2.0


def test_booleans_differ_by_one():
    figures = measure_pair(pair(np.asarray([True, False]), np.asarray([True, True]))).figures
    assert (figures.max_abs, figures.index) == (1.0, (1,))


def test_float16_is_measured_in_float64():
    figures = measure_pair(
        pair(np.asarray([60000, 60000], np.float16), np.asarray([-60000, 60000], np.float16))
    ).figures
    assert figures.max_abs == 2 * float(np.float16(60000))  # float16 ends at 65504


def test_bfloat16_is_measured_in_float64():
    r, c = (np.asarray([v, 2.0], ml_dtypes.bfloat16) for v in (1.0, 1.0078125))
    figures = measure_pair(pair(r, c)).figures
    assert figures.max_abs == 0.0078125
    assert tuple(figures.values) == (1.0, 1.0078125)


def test_float64_keeps_its_digits():
    assert measure_pair(pair(np.asarray([1.0]), np.asarray([1.0 + 2**-50]))).figures.max_abs == 2**-50


def test_complex_numbers_are_measured_by_their_modulus():
    r, c = np.asarray([3 + 4j, 0], np.complex64), np.asarray([0 + 0j, 1j], np.complex64)
    figures = measure_pair(pair(r, c)).figures
    assert (figures.max_abs, figures.max_rel, figures.reference_l2, figures.candidate_l2) == (5.0, 1.0, 5.0, 1.0)
    assert figures.l2 == pytest.approx(26**0.5)


def test_a_complex_number_turned_by_half_a_circle_differs():
    assert measure_pair(pair(np.asarray([1j]), np.asarray([-1j]))).figures.max_abs == 2.0


def test_a_transposed_pair_is_compared_in_the_references_layout():
    r = np.arange(6, dtype=np.float32).reshape(2, 3)
    c = r.T.copy()
    c[2, 1] += 1  # the reference's [1, 2]
    figures = measure_pair(pair(r, c, layout=Layout.from_text("transpose"))).figures
    assert (figures.max_abs, figures.index, tuple(figures.values)) == (1.0, (1, 2), (5.0, 6.0))


def test_a_square_matrix_is_not_compared_untransposed():
    r = np.asarray([[1, 2], [3, 4]], np.float32)
    assert measure_pair(pair(r, r.T.copy(), layout=Layout.from_text("transpose"))).figures.max_abs == 0.0
    assert measure_pair(pair(r, r.copy(), layout=Layout.from_text("transpose"))).figures.max_abs == 1.0


def test_each_side_is_divided_by_its_own_loss_scale():
    figures = measure_pair(pair([2, 4], [1024 * 1, 1024 * 3], scales=Both(2.0, 1024.0))).figures
    assert (figures.max_abs, figures.reference_l2) == (1.0, 5**0.5)
    assert tuple(figures.values) == (2.0, 3.0)


def test_a_missing_side_is_named_and_the_others_norm_measured():
    diff = measure_pair(pair([3, -4], None))
    assert str(diff.problem) == "missing on the candidate" and diff.passed
    assert (diff.figures.reference_l2, diff.figures.candidate_l2, diff.figures.size) == (5.0, 0.0, 2)
    diff = measure_pair(pair(None, [3, -4]))
    assert str(diff.problem) == "missing on the reference"
    assert (diff.figures.reference_l2, diff.figures.candidate_l2) == (0.0, 5.0)


def test_a_lone_scalar_keeps_its_value():
    assert measure_pair(pair(None, np.asarray(-0.5))).figures.values == Both(0.0, -0.5)


def test_an_elementwise_tolerance_counts_what_numpys_isclose_refuses():
    r, c = np.asarray([0.0, 1.0, 100.0, -100.0]), np.asarray([0.2, 1.05, 110.0, -110.2])
    assert (
        measure_pair(pair(r, c), elementwise=(0.1, 0.1)).figures.mismatched
        == (~np.isclose(c, r, atol=0.1, rtol=0.1)).sum()
    )
    assert measure_pair(pair(r, c), elementwise=(0.1, 0.1)).figures.mismatched == 2


def test_noncontiguous_arrays_are_measured_in_their_own_order():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = base.copy()
    other[2, 1] = 0
    figures = figures_of(Arrays(base[::-1, ::2].T, other[::-1, ::2].T, UNSCALED))
    assert figures.max_abs == 0.0  # column 1 is not in it
    assert figures_of(Arrays(base.T, other.T, UNSCALED)).index == (1, 2)


def test_the_tensors_are_left_as_they_were():
    r, c = np.asarray([1.0, np.nan]), np.asarray([2.0, 4.0])
    measure_pair(pair(r, c, scales=Both(2.0, 2.0)))
    assert r[0] == 1.0 and np.isnan(r[1]) and c.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("both", [True, False], ids=["on both sides", "on one side"])
def test_a_gradient_that_overflowed_is_measured_without_a_warning(both):
    # Half-precision gradients overflow; here in 2 of 64 samples, beside an ordinary error in all the others.
    reference = np.ones((64, 32), np.float32)
    candidate = reference * 1.5
    candidate[:2] = np.inf
    if both:
        reference[:2] = np.inf
    figures = measure_pair(pair(reference, candidate, stage="backward")).figures
    assert figures.nonfinite == (0 if both else 64)
    # 8 of the 64 samples may be left out; the infinite ones count as no error, so 54 of the 62 others remain.
    assert figures.bulk_l2 == pytest.approx(np.sqrt(54 * 32 * 0.25))

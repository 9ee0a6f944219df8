"""Layouts: taken where shapes leave one choice, and only then."""

from __future__ import annotations

import numpy as np
import pytest

from padiff.pair.joined_calls import layout_between, square_layout
from padiff.records import SAME, Layout

N, C, H, W = 2, 3, 5, 7


def layouts(*texts):
    return {Layout.from_text(text) for text in texts}


def picture():
    return np.random.default_rng(0).normal(size=(N, C, H, W))


def last(x):
    return np.moveaxis(x, 1, -1)


def places(x):
    """(N, H * W, C)."""
    return last(x).reshape(x.shape[0], -1, x.shape[1])


#: The reference's tensor and the candidate's, the same values in another layout.
UNIQUE = {
    "channels last": (picture(), last(picture())),
    "channels first": (last(picture()), picture()),
    "a picture and its places": (picture(), places(picture())),
    "places and their picture": (places(picture()), picture()),
    "a picture with its places in a row": (picture(), picture().reshape(N, C, H * W)),
    "places in a row and a picture": (picture().reshape(N, C, H * W), picture()),
    "a picture in one row": (picture(), picture().reshape(N, -1)),
    "one row and a picture": (picture().reshape(N, -1), picture()),
    "batch and sequence in one": (np.ones((2, 5, 8)), np.ones((10, 8))),
    "sequence first": (np.arange(30.0).reshape(2, 5, 3), np.arange(30.0).reshape(2, 5, 3).swapaxes(0, 1)),
    "features last in 3 axes": (np.arange(30.0).reshape(2, 5, 3), np.arange(30.0).reshape(2, 5, 3).swapaxes(1, 2)),
    "heads after the sequence": (picture(), picture().swapaxes(1, 2)),
    "a video, channels last": (np.arange(720.0).reshape(2, 3, 4, 5, 6), last(np.arange(720.0).reshape(2, 3, 4, 5, 6))),
    "an extent of one more": (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3, 1)),
    "an extent of one inside": (np.arange(6.0).reshape(2, 1, 3), np.arange(6.0).reshape(2, 3)),
}


@pytest.mark.parametrize(("reference", "candidate"), UNIQUE.values(), ids=UNIQUE)
def test_the_one_view_shows_the_candidate_as_the_reference(reference, candidate):
    view = layout_between(reference.shape, candidate.shape)
    assert view
    np.testing.assert_array_equal(view.apply(candidate, reference.shape), reference)


@pytest.mark.parametrize("shape", [(), (3,), (4, 4), (2, 3, 5), (2, 4, 4, 4)])
def test_equal_shapes_need_no_view(shape):
    assert layout_between(shape, shape) == SAME
    array = np.ones(shape)
    assert SAME.apply(array, shape) is array


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        # As many places as channels: either may be the other.
        ((2, 4, 4), (2, 4, 2, 2)),
        ((2, 4, 2, 2), (2, 4, 4)),
        # Channels last, or heads after the sequence.
        ((2, 4, 3, 4), (2, 3, 4, 4)),
        # Other values altogether.
        ((2, 3), (3, 2)),
        ((2, 3, 5), (2, 3, 6)),
        ((2, 3), (2, 4)),
        ((6,), (2, 3)),
        ((5, 4, 3, 2), (2, 3, 4, 5)),
    ],
)
def test_where_none_or_more_than_one_fits_no_view_is_taken(reference, candidate):
    assert layout_between(reference, candidate) == SAME


def test_a_view_of_square_pictures_is_the_one_the_others_need():
    assert square_layout((2, 4, 4, 4), layouts("axes 0,3,1,2")) == Layout.from_text("axes 0,3,1,2")
    assert square_layout((2, 4, 4), layouts("axes 0,2,1")) == Layout.from_text("axes 0,2,1")


def test_no_view_of_a_square_is_taken_that_leaves_its_shape():
    assert square_layout((2, 3, 4, 4), layouts("axes 0,3,1,2")) == Layout.from_text("")
    assert square_layout((2, 4, 4), layouts("axes 1,0,2")) == Layout.from_text("")


def test_no_view_of_a_square_is_taken_where_the_others_disagree():
    assert square_layout((2, 4, 4, 4), layouts("axes 0,3,1,2", "axes 0,2,3,1")) == Layout.from_text("")
    assert square_layout((2, 4, 4, 4), layouts("reshape")) == Layout.from_text("")
    assert square_layout((2, 4, 4, 4), layouts()) == Layout.from_text("")


def test_views_follow_one_after_the_other():
    x = picture()
    np.testing.assert_array_equal(Layout.from_text("axes 0,2,3,1 then reshape").apply(x, (N, H * W, C)), places(x))
    np.testing.assert_array_equal(Layout.from_text("transpose").apply(x[0, 0], (W, H)), x[0, 0].T)


def test_a_reshape_of_another_size_leaves_the_tensor_as_it_is():
    assert Layout.from_text("reshape").apply(np.ones((2, 3)), (7,)).shape == (2, 3)


def test_views_are_reported_in_words():
    assert Layout.from_text("axes 0,3,1,2").describe() == "channels last against first"
    assert Layout.from_text("axes 0,2,3,1 then reshape").describe() == "channels first against last, reshape"
    assert Layout.from_text("").describe() == ""


@pytest.mark.parametrize("text", ["", "transpose", "reshape", "broadcast", "axes 0,2,1 then reshape", "axes 1,0,2"])
def test_a_layout_s_text_is_read_as_that_layout(text):
    assert str(Layout.from_text(text)) == text and bool(Layout.from_text(text)) == bool(text)


@pytest.mark.parametrize(("reference", "candidate"), UNIQUE.values(), ids=UNIQUE)
def test_what_is_undone_is_what_was_there(reference, candidate):
    layout = layout_between(reference.shape, candidate.shape)
    assert layout.shape(candidate.shape, reference.shape) == reference.shape
    np.testing.assert_array_equal(layout.undo(reference, candidate.shape), candidate)

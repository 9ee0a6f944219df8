"""Sequences whose elements are made when somebody looks at them."""

from __future__ import annotations

import pytest

from padiff.records.both import ChainedSequence, LazySequence


class Numbers(LazySequence[int]):
    """Numbers from a first one on, and which of them were asked for."""

    def __init__(self, first, count):
        self.first, self.count, self.asked = first, count, []

    def _at(self, place):
        self.asked.append(place)
        return self.first + place

    def __len__(self):
        return self.count


LENGTHS = [(), (0,), (3,), (2, 0, 4), (0, 1, 0, 1, 5, 0)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_joined_sequences_are_as_one(lengths):
    parts = [Numbers(100 * k, length) for k, length in enumerate(lengths)]
    expected = [100 * k + place for k, length in enumerate(lengths) for place in range(length)]
    joined = ChainedSequence(parts)
    assert len(joined) == len(expected) and list(joined) == expected and joined == expected
    for place in range(-len(expected), len(expected)):
        assert joined[place] == expected[place]
    for cut in (slice(None), slice(1, -1), slice(None, None, 2), slice(None, None, -1)):
        assert list(joined[cut]) == expected[cut]
    for place in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            joined[place]


def test_joined_sequences_are_asked_for_what_is_looked_at_only():
    parts = [Numbers(0, 3), Numbers(10, 3)]
    joined = ChainedSequence(parts)
    assert len(joined) == 6 and joined[4] == 11
    assert [part.asked for part in parts] == [[], [1]]

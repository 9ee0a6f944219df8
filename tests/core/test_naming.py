"""A few of many names, in a sentence."""

import pytest

from padiff.system.terminal import first_few


@pytest.mark.parametrize(
    ("names", "text"),
    [([], ""), (["a"], "a"), ([1, 2], "1, 2"), (["a", "b", "c"], "a, b and 1 more"), (range(9), "0, 1 and 7 more")],
)
def test_the_first_names_and_how_many_more(names, text):
    assert first_few(names, 2) == text

"""Parts of tensors in files: what is no part is refused."""

from __future__ import annotations

import json

import pytest

from padiff.records.recorded import Part

PARTS = [
    (Part((4, 6), (2, 0), "shard"), (2, 6)),
    (Part((4, 6), (5,), "shard", 3), (19,)),
    (Part((), (), "replica"), ()),
    (Part((), (0,), "shard"), (1,)),
    (Part((7,), (3,), "partial", 1), (4,)),
    (Part((7,), (3,), "shard", 0, 2), (4,)),
]


@pytest.mark.parametrize(("part", "shape"), PARTS)
def test_a_part_is_read_as_it_was_written(part, shape):
    assert Part.of_json(json.loads(json.dumps(part.to_json())), shape) == part


GOOD = {"shape": [4, 6], "offset": [2, 0], "kind": "shard"}
BAD = {
    "an unknown kind": {"kind": "half"},
    "outside": {"offset": [3, 0]},
    "before the first": {"offset": [-1, 0]},
    "other axes": {"offset": [2]},
    "huge": {"shape": [1 << 62, 1 << 62]},
    "no numbers": {"shape": ["a", 6]},
    "no list": {"offset": None},
    "many axes": {"shape": [1] * 100},
    "a copy that is none": {"copy": "x"},
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_part_is_refused(bad):
    assert Part.of_json(GOOD, (2, 6)).offset == (2, 0)
    with pytest.raises((ValueError, TypeError)):
        Part.of_json({**GOOD, **BAD[bad]}, (2, 6))
    with pytest.raises(KeyError):
        Part.of_json({"shape": [4, 6], "kind": "shard"}, (2, 6))

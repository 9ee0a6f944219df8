"""What a file says of its arrays."""

from __future__ import annotations

import json
from collections import deque

import pytest

from padiff.dump.safetensors import ArrayFile, parse_header
from padiff.errors import RunFolderError

TENSORS = {
    "0": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "1": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
}


def file_of(text, body=28):
    text = text if isinstance(text, bytes) else text.encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def parsed(data):
    return parse_header(len(data), lambda start, size: data[start : start + size])


def header_of(about, tensors=TENSORS):
    return json.dumps({"__metadata__": about, **tensors})


def test_a_file_that_is_cut_off_is_told(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.write_bytes(file_of(header_of({})))
    cut.write_bytes(file_of(header_of({}), body=27))
    _, places = ArrayFile(whole, deque()).header()
    with pytest.raises(RunFolderError, match=r"cut is damaged \(tensor '1' does not lie inside of the file\)"):
        ArrayFile(cut, deque()).header()
    assert places["1"].size == 4


ABOUT = {"a": 'b, "c": {', "long": "x" * 10}
# The same content, written in other ways than ours.
WRITTEN = {
    "without spaces": json.dumps({"__metadata__": ABOUT, **TENSORS}, separators=(",", ":")),
    "many spaces": json.dumps({"__metadata__": ABOUT, **TENSORS}, indent=4),
    "spaces behind": header_of(ABOUT) + "   \n",
    "last": json.dumps({**TENSORS, "__metadata__": ABOUT}),
    "twice": header_of({"other": "one"})[:-1] + f', "__metadata__": {json.dumps(ABOUT)}}}',
    "of other letters": json.dumps({"__metadata__": {**ABOUT, "long": "层"}, **TENSORS}, ensure_ascii=False),
    "a quoted name": header_of({**ABOUT, "__metadata__": "text"}),
    "no metadata": json.dumps(TENSORS),
    "nothing else": json.dumps({"__metadata__": ABOUT}),
    "metadata of numbers": header_of({"step": 1}),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_header_says_what_its_json_says(how):
    about, places = parsed(file_of(WRITTEN[how], 0 if how == "nothing else" else 28))
    expected = json.loads(WRITTEN[how])
    assert about == {name: str(value) for name, value in expected.pop("__metadata__", {}).items()}
    assert list(places) == list(expected)
    begin = 8 + len(WRITTEN[how].encode())
    for name, entry in expected.items():
        start, end = entry["data_offsets"]
        assert (places[name].start, places[name].size) == (begin + start, end - start)
        assert places[name].shape == tuple(entry["shape"])


@pytest.mark.parametrize("behind", [" ", "x", "]", ', "0": {}}'])
def test_what_stands_behind_the_metadata_is_read(behind):
    with pytest.raises((ValueError, KeyError)):
        parsed(file_of('{"__metadata__": {}' + behind))

"""Layer maps from anybody: what PyYAML reads, and bounds for what was made to harm."""

import pytest
import yaml

from padiff.errors import UsageError
from padiff.model.given_map import DEEPEST, GivenMap, read_yaml


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "a: b\nc: [d, e]\n",
        "- [a, b]\n- [c, ~]\n",
        "pairs:\n  - {reference: a.0, candidate: b.0}\n  - reference: [q, k]\n    candidate: qkv\n",
        "pairs:\n",
        "? a\n: b\n",
        "1: yes\n2.5: 0x10\n'3': \"no\"\n!!str 4: !!int '5'\n",
        "a: |\n  two\n  lines\nb: >-\n  one\n  line\n",
        "a: 2020-01-01\nb: .inf\n",
        "{a: b, a: c}",
        "--- \na: b\n...\n",
    ],
)
def test_it_reads_what_pyyaml_reads(text):
    content, _ = read_yaml(text)
    assert content == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: b\n\nc: d\n", [1, 3]),
        ("# maps\n- [a, b]\n- [c, d]\n", [2, 3]),
        ("version: 1\npairs:\n  - {reference: a, candidate: b}\n\n  - {reference: c, candidate: d}\n", [3, 5]),
        ("pairs:\n  a: b\n  c:\n    d\n", [2, 3]),
        ("other:\n  - x\npairs:\n  - [a, b]\nmore:\n  - y\n", [4]),
    ],
)
def test_the_line_of_each_pair(text, lines):
    assert read_yaml(text)[1] == lines


def nested(levels):
    return "[" * levels + "]" * levels


ALIASES = "a: &a [x, x]\n" + "".join(f"{n}: &{n} [*{p}, *{p}, *{p}]\n" for p, n in zip("abcdefgh", "bcdefghi"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (nested(5000), r"line 1, column 9, can't be read: a layer map is nested at most 8 deep"),
        ("".join("  " * level + "a:\n" for level in range(3000)), "nested at most 8 deep"),
        (ALIASES, r"line 2, column 8, can't be read: a layer map has no aliases"),
        ("a: b\n---\nc: d\n", "one document, here begins a second"),
        ("? [a, b]\n: c\n? {d: e}\n: f\n", "a list or a mapping can't be a key"),
    ],
)
def test_what_is_more_than_a_map_is_refused_with_its_place(tmp_path, text, said):
    (tmp_path / "map.yaml").write_text(text)
    with pytest.raises(UsageError, match=said):
        GivenMap.read(tmp_path / "map.yaml")


def test_the_deepest_that_is_read():
    assert read_yaml(nested(DEEPEST))[0] == yaml.safe_load(nested(DEEPEST))


def test_more_events_than_any_map_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("padiff.model.given_map.MOST_EVENTS", 100)
    (tmp_path / "map.yaml").write_text("".join(f"a{i}: b{i}\n" for i in range(100)))
    with pytest.raises(UsageError, match="at most 100 names"):
        GivenMap.read(tmp_path / "map.yaml")

from __future__ import annotations

import pytest

from padiff import LayerMap
from padiff.errors import UsageError

PAIRS = (("a.b", "x"), ("c", None), (None, "y"))


@pytest.mark.parametrize(
    "value",
    [
        LayerMap(PAIRS),
        PAIRS,
        [list(pair) for pair in PAIRS],
        [{"reference": r, "candidate": c} for r, c in PAIRS],
        iter(PAIRS),
    ],
    ids=["a map", "tuples", "lists", "mappings", "an iterator"],
)
def test_every_form_of_a_map_is_taken(value):
    assert list(LayerMap.from_value(value)) == list(PAIRS)


def test_a_mapping_is_read_as_reference_to_candidate_in_its_order():
    assert list(LayerMap.from_value({"b": "x", "a": "y"})) == [("b", "x"), ("a", "y")]


def test_nothing_is_an_empty_map():
    assert len(LayerMap.from_value(None)) == 0


def test_a_yaml_file_is_read(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("pairs:\n  - {reference: a.b, candidate: x}\n  - {reference: c, candidate: null}\n")
    assert list(LayerMap.from_value(str(path))) == list(LayerMap.from_value(path)) == list(PAIRS[:2])
    path.write_text("a.b: x\nc: y\n")
    assert list(LayerMap.from_value(path)) == [("a.b", "x"), ("c", "y")]
    path.write_text("pairs:\n")
    assert len(LayerMap.from_value(path)) == 0


@pytest.mark.parametrize(
    "item",
    [
        "ab",
        ("a",),
        ("a", "b", "c"),
        (None, None),
        (1, "b"),
        {"reference": "a"},
        None,
        {"reference": 0, "candidate": "b"},
    ],
)
def test_an_item_that_is_no_pair_is_reported_with_what_to_do(item):
    with pytest.raises(UsageError, match=r"expected a pair of layer paths .* got .*`padiff map REFERENCE CANDIDATE`"):
        LayerMap.from_value([item])


def test_a_value_that_is_no_map_is_reported():
    with pytest.raises(UsageError, match=r"expected pairs of layer paths, a mapping or a YAML file, got 5"):
        LayerMap.from_value(5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"pairs: [{", "is no YAML"),
        (b"just text", "holds str; expected 'pairs:'"),
        (b"", "holds NoneType"),
        (b"pairs: 5", "holds int"),
        (b"\xff\xfe\xfa", "cannot read the layer map"),
        (b"!!python/object/apply:os.mkdir [pwned]", "is no YAML"),
    ],
)
def test_a_file_that_is_no_map_is_reported_by_name(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "map.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=rf"map\.yaml.*{message}|{message}.*map\.yaml"):
        LayerMap.from_value(tmp_path / "map.yaml")
    assert not (tmp_path / "pwned").exists()


def test_a_file_that_is_missing_is_reported(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the layer map .*no\.yaml"):
        LayerMap.from_value(tmp_path / "no.yaml")

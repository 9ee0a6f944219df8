"""Configs with some keys of the bad one: nothing else of them changes."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from padiff.errors import UsageError
from padiff_cli.bisect.config_files import ConfigPair

GOOD = """
# a comment
base: &base {lr: 1e-3, betas: [0.9, 0.999]}
optim:
  <<: *base
  name: adam
  empty:
  text: "yes"
layers: [{width: 8}, {width: 16}]
gone: 1
1: one
"2": two
"""
BAD = """
base: &base {lr: 1e-3, betas: [0.9, 0.98]}
optim:
  <<: *base
  name: sgd
  empty: 0x10
  text: yes
layers: [{width: 8}, {width: 32}]
1: one
"2": two
new: {a: {b: 2}}
"""


@pytest.fixture
def pair(tmp_path):
    def make(good, bad, suffix=".yaml", other=None):
        paths = [tmp_path / f"good{suffix}", tmp_path / f"bad{other or suffix}"]
        for path, text in zip(paths, (good, bad)):
            path.write_text(text)
        return ConfigPair(*map(str, paths))

    return make


def test_keys_of_yaml_are_found_at_each_level_and_the_text_of_others_stays(pair):
    configs = pair(GOOD, BAD)
    assert configs.keys == (
        "base.betas.1", "optim.<<.betas.1", "optim.name", "optim.empty", "optim.text", "layers.1.width", "gone", "new",
    )  # fmt: skip
    assert yaml.safe_load(configs.text_with(())) == yaml.safe_load(GOOD)
    assert yaml.safe_load(configs.text_with(configs.keys)) == yaml.safe_load(BAD)
    text = configs.text_with({"optim.name", "gone"})
    expected = yaml.safe_load(GOOD)
    expected["optim"]["name"] = "sgd"
    del expected["gone"]
    assert yaml.safe_load(text) == expected
    assert "lr: 1e-3" in text  # plain, which other readers take for a number
    assert '"yes"' in text
    assert configs.values_text("optim.name") == "optim.name: adam against sgd"
    assert configs.values_text("gone") == "gone: 1 against nothing"


def test_json_and_toml_are_written_in_their_format(pair):
    good, bad = {"a": {"b": 1, "c": [1, 2]}, "d": "x"}, {"a": {"b": 1.0, "c": [1, 3, 4]}, "e": None}
    configs = pair(json.dumps(good), json.dumps(bad), ".json")
    assert configs.keys == ("a.b", "a.c", "d", "e")
    assert json.loads(configs.text_with({"a.c", "e"})) == {"a": {"b": 1, "c": [1, 3, 4]}, "d": "x", "e": None}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_toml_survives_a_round_trip(pair):
    import tomllib

    text = (
        'a = 1\nb = "x\\"ü"\nd = 1979-05-27\nf = [1.5, true]\n'
        '["t.x"]\nk = {p = 1}\n[t.u]\nv = "w"\n[e]\n[[many]]\nz = 1\n'
    )
    configs = pair(text, text.replace("p = 1", "p = 2").replace('"w"', '"y"'), ".toml")
    assert configs.keys == ("t.x.k.p", "t.u.v")
    assert tomllib.loads(configs.text_with(())) == tomllib.loads(text)
    assert tomllib.loads(configs.text_with({"t.u.v"})) == tomllib.loads(text.replace('"w"', '"y"'))


def test_two_paths_that_read_alike_are_two_keys(pair):
    configs = pair('{"a.b": 1, "a": {"b": 1}}', '{"a.b": 2, "a": {"b": 3}}', ".json")
    assert len(configs.keys) == 2
    assert [json.loads(configs.text_with({key})) for key in configs.keys] == [
        {"a.b": 2, "a": {"b": 1}},
        {"a.b": 1, "a": {"b": 3}},
    ]


def test_the_key_that_a_cause_names_is_the_only_one_with_both_values(pair):
    configs = pair(
        '{"lr": 0.10, "decay": 0.1, "steps": 5, "act": "relu"}',
        '{"lr": 0.3, "decay": 0.3, "steps": 7, "act": "gelu"}',
        ".json",
    )
    assert configs.key_named_in("steps: 5.0 against 7.") == "steps"
    assert configs.key_named_in("the rates differ: 0.1 against 0.3; 3 times") is None  # either of two
    assert configs.key_named_in("Adam: decay 0.1 against 0.3") == "decay"
    assert configs.key_named_in("ReLU against GELU") == "act"
    assert configs.key_named_in("0.1 against 0.5") is None


@pytest.mark.parametrize(
    ("good", "bad", "suffix", "other", "words"),
    [
        ("a: 1", "a: 1", ".yaml", None, "hold the same"),
        ("a: 1", "- 1", ".yaml", None, "has to hold a mapping"),
        ("a: 1", "a: [", ".yaml", None, "cannot read"),
        ("a: 1", "{}", ".yaml", ".json", "two files of one format"),
        ("a: 1", "a: 2", ".txt", None, "two files of one format"),
        ("a: !!python/object/apply:os.system [ls]", "{[1]: 2}", ".yaml", None, "a key has to be a scalar"),
    ],
)
def test_what_is_no_pair_of_configs_is_refused(pair, good, bad, suffix, other, words):
    with pytest.raises(UsageError, match=words):
        pair(good, bad, suffix, other)

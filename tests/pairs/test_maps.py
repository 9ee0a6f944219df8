"""A found map written as YAML and read back: it gives the same again, and what a person changes in it wins."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import yaml

from padiff.align import align
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.model.tree import LiveModel
from padiff.weights.assign import carry_over
from padiff_cli.map_yaml import map_to_yaml

from . import PAIRS
from .copying import value

VARIED = (
    "resnet_stages",
    "inception_branches",
    "bert_packed",
    "encoder_torch_to_paddle",
    "vit_fused_to_nested",
    "vit_nested_to_fused_kv",
    "gpt2_conv1d",
    "neox_split_to_interleaved",
    "llama_fused_kv_and_gate_up",
    "t5_to_marian",
    "lstm_stack_to_two",
    "lstm_two_to_stack",
    "lstm_to_gates",
    "lstm_from_gates",
    "gru_to_cells",
    "towers",
    "shared_layer",
)


def named(*names):
    found = [pair for pair in PAIRS if pair.name in names]
    assert len(found) == len(names)
    return pytest.mark.parametrize("pair", found, ids=lambda pair: pair.name)


def infos(pair):
    return [LiveModel.from_model(model).info for model in pair.build()]


def read_back(text, tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return GivenMap.read(path)


def paths(alignment):
    return {(p.reference.path, p.candidate.path) for p in alignment.pairs}


@named(*VARIED)
def test_a_written_map_gives_the_same_again(pair, tmp_path):
    reference, candidate = infos(pair)
    found = align(reference, candidate)
    again = align(reference, candidate, read_back(map_to_yaml(found, "a", "b"), tmp_path))
    assert paths(again) == paths(found)
    assert set(again.parameters) == set(found.parameters)
    assert (again.reference_parameters, again.candidate_parameters) == (
        found.reference_parameters,
        found.candidate_parameters,
    )
    assert {p.reason for p in again.pairs} == {"given"}


@named(*VARIED)
def test_a_written_map_carries_the_same_weights(pair, tmp_path):
    alone, mapped = ([m.eval() or m for m in pair.build()] for _ in range(2))
    found = carry_over(*alone).alignment
    carry_over(*mapped, read_back(map_to_yaml(found, "a", "b"), tmp_path))
    for one, other in zip(alone[1].parameters(), mapped[1].parameters()):
        np.testing.assert_array_equal(other.detach().numpy(), one.detach().numpy())


@named("neox_interleaved_to_split")
def test_fused_layers_are_written_with_a_list_of_their_parts_in_order(pair):
    entries = yaml.safe_load(map_to_yaml(align(*infos(pair)), "a", "b"))["pairs"]
    several = {e["reference"]: e["candidate"] for e in entries if isinstance(e["candidate"], list)}
    assert several["layers.0.attention.query_key_value"] == [f"layers.0.attention.w{part}" for part in "qkv"]


@named("resnet_stages")
def test_a_pair_that_was_swapped_by_hand_wins(pair, tmp_path):
    reference, candidate = infos(pair)
    found = align(reference, candidate)
    partner = {p.reference.path: p.candidate.path for p in found.pairs}
    one, other = "layer1.0.conv1", "layer1.1.conv1"
    assert {one, other} <= partner.keys()
    data = yaml.safe_load(map_to_yaml(found, "a", "b"))
    for entry in data["pairs"]:
        if entry["reference"] in (one, other):
            entry["candidate"] = partner[other if entry["reference"] == one else one]
    edited = align(reference, candidate, read_back(yaml.safe_dump(data), tmp_path))
    assert {(one, partner[other]), (other, partner[one])} <= paths(edited)
    links = {(a.layer, b.layer) for p in edited.parameters for a in p.reference for b in p.candidate}
    assert {(one, partner[other]), (other, partner[one])} <= links
    assert (one, partner[one]) not in links


# -- lists of parts ----------------------------------------------------------------------------------------------


class Fused(torch.nn.Module):
    def __init__(self, rows=12):
        super().__init__()
        self.thing = torch.nn.Linear(4, rows)

    def forward(self, x):
        return self.thing(x)


class Apart(paddle.nn.Layer):
    """Parts whose names say nothing, defined in no order, and one that is none."""

    def __init__(self, rows=4):
        super().__init__()
        self.c, self.a, self.b = (paddle.nn.Linear(4, rows) for _ in range(3))

    def forward(self, x):
        return paddle.concat([self.a(x), self.b(x), self.c(x)], -1)


def run_both(fused, apart):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    return fused(torch.tensor(x)).detach().numpy(), apart(paddle.to_tensor(x)).numpy()


def test_a_list_names_the_parts_in_their_order():
    fused, apart = Fused(), Apart()
    carry_over(fused, apart, [("thing", ["a", "b", "c"])])
    np.testing.assert_allclose(*run_both(fused, apart), rtol=1e-5, atol=1e-6)
    matrix = fused.thing.weight.detach().numpy()
    np.testing.assert_array_equal(value(apart, "b", "weight"), matrix[4:8].T)
    carry_over(fused, apart, [("thing", ["b", "a", "c"])])
    np.testing.assert_array_equal(value(apart, "b", "weight"), matrix[:4].T)


def test_a_list_on_the_base_side_puts_the_parts_together():
    fused, apart = Fused(), Apart()
    carry_over(apart, fused, [(["a", "b", "c"], "thing")])
    np.testing.assert_allclose(*run_both(fused, apart), rtol=1e-5, atol=1e-6)


def test_layers_may_be_given_as_objects_in_a_list():
    fused, apart = Fused(), Apart()
    carry_over(fused, apart, [(fused.thing, [apart.a, apart.b, apart.c])])
    np.testing.assert_allclose(*run_both(fused, apart), rtol=1e-5, atol=1e-6)


@named("vit_fused_to_nested")
def test_a_list_wins_over_what_the_names_say(pair):
    reference, candidate = infos(pair)
    inside = "vit.encoder.layer.0.attention.attention."
    given = GivenMap([("blocks.0.attn.qkv", [f"{inside}{part}" for part in ("value", "key", "query")])])
    rows = {
        p.candidate[0].layer.removeprefix(inside): (p.reference[0].start, p.reference[0].stop)
        for p in align(reference, candidate, given).parameters
        if p.reference[0].layer == "blocks.0.attn.qkv" and p.reference[0].slot == "weight"
    }
    width = next(x for x in reference.layers if x.path == "blocks.0.attn.qkv").parameters[0].shape[0] // 3
    assert rows == {"value": (0, width), "key": (width, 2 * width), "query": (2 * width, 3 * width)}


@pytest.mark.parametrize(
    ("parts", "reported"),
    [
        (["a", "b"], r"the parts do not make up the whole: thing with 12 rows against a \+ b with 8 rows"),
        (["a", "a", "b"], r"the candidate's layer 'a' is given twice"),
        (["a", "b", "d"], r"the candidate has no layer 'd'"),
    ],
)
def test_a_list_that_does_not_make_up_the_whole_is_refused(parts, reported):
    fused, apart = Fused(), Apart()
    before = [p.numpy().copy() for p in apart.parameters()]
    with pytest.raises(UsageError, match=reported):
        carry_over(fused, apart, [("thing", parts)])
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, apart.parameters()))

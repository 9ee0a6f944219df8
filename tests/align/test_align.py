from __future__ import annotations

import re

import numpy as np
import pytest
from kit.records import info, linear, norm, parameter, plain, root

from padiff import LayerMap
from padiff.align import RuntimeEvidence, align, resolved
from padiff.errors import UsageError
from padiff.records import ROOT, Both, Layer, RunInfo


def found(reference: RunInfo, candidate: RunInfo, layer_map=None, called=((), ())) -> dict[str, str]:
    seen = Both(*called).map(lambda paths: RuntimeEvidence(order={path: k for k, path in enumerate(paths)}))
    pairs = align(reference, candidate, layer_map, seen).pairs
    return {p.reference.path: p.candidate.path for p in pairs}


def mlp(*names: str, paddle: bool = False) -> RunInfo:
    """Linear layers of 4 -> 8 -> 16 -> 32 ... by these names."""
    layers = [linear(name, 4 << k, 8 << k, paddle) for k, name in enumerate(names)]
    return info(root(len(names)), *layers)


def equal(*names: str) -> RunInfo:
    """Linear layers that only their names and places tell apart."""
    return info(root(len(names)), *(linear(name, 8, 8) for name in names))


def test_the_same_paths_answer_to_each_other():
    tree = mlp("a", "b", "c")
    assert found(tree, tree) == {ROOT: ROOT, "a": "a", "b": "b", "c": "c"}
    assert {p.reason for p in align(tree, tree).pairs} == {"path", "contents"}


def test_the_same_paths_win_over_another_order_of_definition():
    assert found(equal("a", "b", "c"), equal("c", "a", "b")) == {ROOT: ROOT, "a": "a", "b": "b", "c": "c"}


def test_other_names_in_the_same_order_answer_to_each_other():
    assert found(mlp("a", "b", "c"), mlp("x", "y", "z")) == {ROOT: ROOT, "a": "x", "b": "y", "c": "z"}


def test_layers_of_one_shape_under_other_names_are_paired_in_order():
    assert found(equal("a", "b", "c"), equal("x", "y", "z")) == {ROOT: ROOT, "a": "x", "b": "y", "c": "z"}


def test_another_nesting_is_seen_through():
    nested = info(
        root(2),
        plain("block", "sequential", 2),
        linear("block.0", 4, 8),
        plain("block.inner", "wrapper", 1),
        linear("block.inner.1", 8, 16),
        linear("head", 16, 32),
    )
    alignment = align(mlp("a", "b", "c"), nested)
    assert {p.reference.path: p.candidate.path for p in alignment.pairs} == {
        ROOT: ROOT,
        "a": "block.0",
        "b": "block.inner.1",
        "c": "head",
    }
    assert [layer.path for layer in alignment.candidate_only] == ["block", "block.inner"]


def test_containers_of_the_same_contents_answer_to_each_other():
    def tree(block: str, one: str, two: str) -> RunInfo:
        below = (linear(f"{block}.{one}", 4, 8), linear(f"{block}.{two}", 8, 16))
        return info(root(2), plain(block, "sequential", 2), *below, linear(f"{one}head", 16, 2))

    assert found(tree("enc", "a", "b"), tree("encoder", "x", "y"))["enc"] == "encoder"


def test_an_extra_layer_without_parameters_shifts_nothing():
    more = info(root(3), linear("a", 8, 8), plain("drop", "dropout"), linear("b", 8, 8))
    alignment = align(equal("a", "b"), more)
    assert {p.reference.path: p.candidate.path for p in alignment.pairs} == {ROOT: ROOT, "a": "a", "b": "b"}
    assert [layer.path for layer in alignment.candidate_only] == ["drop"]
    assert found(equal("p", "q"), more) == {ROOT: ROOT, "p": "a", "q": "b"}


def test_an_extra_layer_with_parameters_is_left_over_and_the_rest_is_paired():
    more = info(root(4), linear("a", 4, 8), norm("bn", 8), linear("b", 8, 16), linear("c", 16, 32))
    alignment = align(mlp("x", "y", "z"), more)
    pairs = {p.reference.path: p.candidate.path for p in alignment.pairs}
    assert pairs == {ROOT: ROOT, "x": "a", "y": "b", "z": "c"}
    assert [layer.path for layer in alignment.candidate_only] == ["bn"]


def test_activations_are_paired_by_kind():
    reference = info(root(2), linear("a", 4, 8), plain("act", "silu"))
    candidate = info(root(2), linear("x", 4, 8), plain("f", "swish"))
    assert found(reference, candidate)["act"] == "f"
    # A wrong activation is shown as one; something that does another job is no partner.
    assert found(reference, info(root(2), linear("x", 4, 8), plain("f", "relu")))["act"] == "f"
    assert "act" not in found(reference, info(root(2), linear("x", 4, 8), plain("f", "dropout")))


def test_an_activation_of_the_same_kind_is_preferred_to_another():
    reference = info(root(3), linear("a", 4, 8), plain("r", "relu"), plain("g", "gelu"))
    candidate = info(root(3), linear("x", 4, 8), plain("h", "gelu"))
    assert {path: partner for path, partner in found(reference, candidate).items() if path in "rg"} == {"g": "h"}


def test_the_two_layouts_of_a_linear_layer_answer_to_each_other():
    assert found(mlp("a", "b"), mlp("x", "y", paddle=True)) == {ROOT: ROOT, "a": "x", "b": "y"}


def test_paddles_names_of_running_statistics_answer_to_torchs():
    reference = info(root(3), linear("fc", 4, 8), norm("a", 8), norm("b", 16))
    candidate = info(root(3), norm("x", 8, paddle=True), linear("mid", 4, 8), norm("y", 16, paddle=True))
    assert found(reference, candidate)["b"] == "y"
    assert found(info(root(1), norm("a", 8)), info(root(1), norm("x", 8, paddle=True))) == {ROOT: ROOT, "a": "x"}


def test_layers_of_one_kind_and_other_sizes_are_paired_where_nothing_better_is():
    reference = info(root(2), linear("a", 4, 8), linear("b", 8, 10))
    candidate = info(root(2), linear("x", 4, 8), linear("y", 8, 12))
    assert found(reference, candidate) == {ROOT: ROOT, "a": "x", "b": "y"}


# -- given maps --------------------------------------------------------------------------------------------------


def test_a_given_map_wins_and_the_rest_is_found_around_it():
    pairs = align(equal("a", "b", "c"), equal("x", "y", "z"), {"b": "x"}).pairs
    by_path = {p.reference.path: (p.candidate.path, p.reason) for p in pairs}
    assert by_path["b"] == ("x", "given")
    assert {by_path["a"][0], by_path["c"][0]} == {"y", "z"}


def test_a_given_map_may_cross():
    assert found(equal("a", "b"), equal("a", "b"), [("a", "b"), ("b", "a")]) == {ROOT: ROOT, "a": "b", "b": "a"}


def test_a_given_map_may_name_containers():
    reference = info(
        root(2), plain("enc", "one", 1), linear("enc.a", 4, 8), plain("note", "thing", 1), linear("note.z", 3, 3)
    )
    candidate = info(root(2), plain("e", "two", 1), linear("e.x", 4, 8))
    assert found(reference, candidate, {"note": "e"})["note"] == "e"


def test_a_null_side_means_that_no_partner_is_sought():
    alignment = align(mlp("a", "b"), mlp("a", "b"), LayerMap((("a", None),)))
    assert "a" not in {p.reference.path for p in alignment.pairs}
    assert "a" in {layer.path for layer in alignment.reference_only}
    alignment = align(mlp("a", "b"), mlp("a", "b"), LayerMap(((None, "b"),)))
    assert "b" in {layer.path for layer in alignment.candidate_only}


def test_a_path_that_is_not_there_is_reported_with_the_nearest():
    with pytest.raises(UsageError, match=r"the reference has no layer 'encodr'\. Nearest: encoder"):
        align(mlp("encoder", "head"), mlp("a", "b"), {"encodr": "a"})
    with pytest.raises(UsageError, match=r"the candidate has no layer 'hed'\. Nearest: head"):
        align(mlp("a", "b"), mlp("encoder", "head"), {"a": "hed"})


def test_a_layer_object_is_refused_where_runs_are_compared():
    with pytest.raises(UsageError, match=r"layer map: .*object.* is no path: recorded runs know their layers by path"):
        align(mlp("a", "b"), mlp("a", "b"), {object(): "a"})


def test_a_path_given_twice_is_refused():
    with pytest.raises(UsageError, match=r"the candidate's layer 'x' is given twice; a layer has one partner"):
        align(mlp("a", "b"), mlp("x", "y"), {"a": "x", "b": "x"})
    with pytest.raises(UsageError, match=r"the reference's layer 'a' is given twice"):
        align(mlp("a", "b"), mlp("x", "y"), [("a", "x"), ("a", "y")])


def test_an_alias_names_the_same_layer_as_its_path():
    shared = info(root(2), linear("a", 4, 8, aliases=("tied",)), linear("b", 8, 16))
    assert found(shared, mlp("x", "y"), {"tied": "x"})["a"] == "x"
    with pytest.raises(UsageError, match=r"'tied' is given twice"):
        align(shared, mlp("x", "y"), [("a", "x"), ("tied", "y")])


def recorded_map(tree: RunInfo, *paths: str) -> RunInfo:
    return info(*tree.layers, layer_map=paths)


def test_the_maps_that_runs_were_recorded_with_answer_in_order():
    reference, candidate = recorded_map(equal("a", "b"), "a", "b"), recorded_map(equal("a", "b"), "b", "a")
    assert found(reference, candidate) == {ROOT: ROOT, "a": "b", "b": "a"}


def test_recorded_maps_of_unequal_length_are_refused():
    reference, candidate = recorded_map(equal("a", "b"), "a", "b"), recorded_map(equal("a", "b"), "b")
    with pytest.raises(UsageError, match=r"the reference's has 2 layers and the candidate's 1"):
        align(reference, candidate)


def test_a_given_pair_wins_over_the_recorded_maps():
    reference, candidate = recorded_map(equal("a", "b"), "a"), recorded_map(equal("a", "b"), "b")
    assert found(reference, candidate, {"a": "a", "b": "b"}) == {ROOT: ROOT, "a": "a", "b": "b"}


def test_a_given_pair_leaves_recorded_pairs_of_like_names_alone():
    # "b" is the candidate's in the given pair, and the reference's in the recorded one.
    reference, candidate = recorded_map(equal("a", "b", "c"), "b"), recorded_map(equal("a", "b", "c"), "c")
    assert found(reference, candidate, {"a": "b"}) == {ROOT: ROOT, "a": "b", "b": "c", "c": "a"}


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_recorded_map_that_names_an_unknown_layer_is_reported(side):
    trees = {"reference": recorded_map(equal("a", "b"), "a"), "candidate": recorded_map(equal("a", "b"), "b")}
    trees[side] = recorded_map(equal("a", "b"), "aa")
    with pytest.raises(UsageError, match=re.escape(f"the {side} has no layer 'aa'. Nearest: a")):
        align(trees["reference"], trees["candidate"])


# -- wrappers and shared layers ----------------------------------------------------------------------------------


def wrapped(tree: RunInfo) -> RunInfo:
    """The same model inside of a module that only holds it."""
    inner = [
        Layer(f"model.{x.path}" if x.path != ROOT else "model", x.type, x.kind, x.parameters, children=x.children)
        for x in tree.layers
    ]
    return info(plain(ROOT, "litmodule", 1), *inner)


def test_a_wrapper_that_was_never_called_is_not_paired_in_place_of_the_model():
    reference, candidate = wrapped(mlp("a", "b")), mlp("a", "b")
    pairs = found(reference, candidate, called=({"model", "model.a", "model.b"}, {ROOT, "a", "b"}))
    assert pairs == {"model": ROOT, "model.a": "a", "model.b": "b"}
    pairs = found(candidate, reference, called=({ROOT, "a", "b"}, {"model", "model.a", "model.b"}))
    assert pairs == {ROOT: "model", "a": "model.a", "b": "model.b"}


def test_two_wrappers_of_the_same_contents_are_paired_from_the_outside_in():
    tree = wrapped(mlp("a", "b"))
    assert found(tree, tree) == {ROOT: ROOT, "model": "model", "model.a": "model.a", "model.b": "model.b"}


def test_no_layer_is_lost_and_none_has_two_partners():
    reference = info(root(4), linear("a", 4, 8), plain("r", "relu"), linear("b", 8, 8), norm("n", 8), linear("c", 8, 3))
    candidate = info(
        root(4), plain("d", "dropout"), linear("x", 4, 8), norm("n", 8), linear("y", 8, 8), plain("t", "tanh")
    )
    alignment = align(reference, candidate)
    left = [p.reference.path for p in alignment.pairs] + [x.path for x in alignment.reference_only]
    right = [p.candidate.path for p in alignment.pairs] + [x.path for x in alignment.candidate_only]
    assert sorted(left) == sorted(x.path for x in reference.layers)
    assert sorted(right) == sorted(x.path for x in candidate.layers)


def test_a_parameter_of_the_model_itself_pairs_the_models():
    def tree(name: str) -> RunInfo:
        return info(Layer(ROOT, "Vit", "vit", (parameter("pos", 1, 9, 4),), children=1), linear(name, 4, 8))

    assert found(tree("a"), tree("b")) == {ROOT: ROOT, "a": "b"}


def test_a_hundred_and_fifty_blocks_under_other_names_are_paired_in_order():
    def tree(name: str, extra: bool) -> RunInfo:
        layers = [linear(f"{name}{k}", 8, 8) for k in range(150)]
        return info(root(150), *([linear("stem", 3, 8)] if extra else []), *layers)

    pairs = found(tree("layer", False), tree("block", True))
    assert pairs["layer0"] == "block0" and pairs["layer149"] == "block149"


@pytest.mark.parametrize(("same", "assumed"), [(True, []), (False, ["order of rows in Net.qkv of the reference"])])
def test_what_is_ambiguous_is_answered_by_its_own_weights_only(same, assumed):
    names, rng = ("q_proj", "k_proj", "v_proj"), np.random.default_rng(0)
    trees = Both(
        info(root(2), linear("qkv", 8, 24), linear("out", 8, 8)),
        info(root(4), *(linear(name, 8, 8) for name in names), linear("out", 8, 8)),
    )
    parts = {name: rng.normal(size=(8, 8)) for name in (*names, "out")}
    fused = np.concatenate([parts[name] for name in names]) if same else rng.normal(size=(24, 8))

    def seen(weights):
        return RuntimeEvidence(
            values=lambda path, slot: weights.get(path) if slot == "weight" else np.zeros(24 if path == "qkv" else 8)
        )

    shown = Both(seen({"qkv": fused, "out": parts["out"]}), seen(parts))
    alignment = resolved(align(*trees, None, shown), shown)
    assert [x.about for x in alignment.ambiguities if not x.answer] == assumed


def _gated(kind: str, order: str, shape: tuple[int, ...] = (2, 8)) -> tuple[RunInfo, RuntimeEvidence]:
    """A block of ``gate`` and ``up``, whose activation is called in between or behind both."""
    tree = info(root(3), linear("gate", 8, 8), linear("up", 8, 8), plain("act", kind), linear("down", 8, 8))
    called = order.split()
    return tree, RuntimeEvidence({path: k for k, path in enumerate(called)}, dict.fromkeys(called, shape))


@pytest.mark.parametrize(
    ("kind", "shape", "paired"),
    [("siluactivation", (2, 8), True), ("silu", (2, 8), True), ("silu", (2, 4), False), ("dropout", (2, 8), False)],
)
def test_leaves_at_one_path_and_of_like_kind_are_paired_whatever_was_called_before_them(kind, shape, paired):
    sides = _gated(kind, "gate act up down", shape), _gated("silu", "gate up act down")
    infos, seen = zip(*sides)
    pairs = {p.reference.path: p.candidate.path for p in align(*infos, None, Both(*seen)).pairs}
    assert pairs.get("act") == ("act" if paired else None)


@pytest.mark.parametrize("fused", [False, True])
def test_heads_of_a_list_are_rows_of_one_matrix_each_or_of_one_for_all(fused):
    blocks, names = ("blocks.0", "blocks.1"), ("key", "query", "value")
    heads = [linear(f"{b}.sa.heads.{k}.{name}", 8, 2) for b in blocks for k in range(4) for name in names]
    outs = [linear(f"{b}.sa.proj", 8, 8) for b in blocks]
    whole = ("c_attn",) if fused else ("q", "k", "v")
    made = [linear(f"{h}.attn.{name}", 8, 24 // len(whole), True) for h in ("h.0", "h.1") for name in whole]
    others = [linear(f"{h}.attn.o", 8, 8, True) for h in ("h.0", "h.1")]
    alignment = align(info(root(2), *heads, *outs), info(root(2), *made, *others))
    assert not alignment.reference_parameters and not alignment.candidate_parameters
    rows = {pair.reference[0].site: pair.candidate[0].site for pair in alignment.parameters}
    order = ("query", "key", "value")
    for k, name in ((0, "key"), (3, "query"), (2, "value")):
        start = 2 * k + (8 * order.index(name) if fused else 0)
        site = f"h.1.attn.{'c_attn' if fused else name[0]}/weight[{start}:{start + 2}]"
        assert rows[f"blocks.1.sa.heads.{k}.{name}/weight"] == site


def test_two_layers_that_are_added_are_one_matrix_side_by_side():
    apart = info(root(3), linear("enc", 8, 6, True), linear("dec", 4, 6, True), linear("v", 6, 1, True))
    whole = info(root(2), linear("attn", 12, 6), linear("v", 6, 1))
    for sides, swapped in ((Both(apart, whole), False), (Both(whole, apart), True)):
        alignment = align(*sides)
        assert not alignment.reference_parameters and not alignment.candidate_parameters
        pairs = [pair.swapped(swapped) for pair in alignment.parameters if "v/" not in pair.reference[0].site]
        sites = {tuple(part.layer for part in pair.reference): pair.candidate[0].site for pair in pairs}
        assert sites["enc", "dec"] == "attn/bias"
        assert (sites["enc",], sites["dec",]) == ("attn/weight[:, 0:8]", "attn/weight[:, 8:12]")

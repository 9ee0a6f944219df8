"""Where in the code a diff comes from: inside of a layer, or between layers, and which call it is."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

import padiff
from padiff.recorder import copying
from padiff.report_formats import to_json

from .blocks import BATCH, BLOCKS, FAULTS, LENGTH, START, WIDTH, WORDS, model_of, trained

LAST = f"blocks.{BLOCKS - 1}"
# Sketches keep small tensors of the first step whole; "large": as though all tensors were larger.
OPTIONS = {"full": {}, "sketch": {"detail": "sketch"}, "large": {"detail": "sketch"}}

# For each mistake: the layer whose input differs first, the last layer before it that agrees, the call.
PLACES = {
    "residual": (f"{LAST}.norm2", f"{LAST}.attn.wo", f"the first add() in `{LAST}`"),
    "last residual": ("norm", f"{LAST}.fc2", f"the second add() in `{LAST}`"),
    "scale": (f"{LAST}.attn.wo", f"{LAST}.attn.wv", f"div() in `{LAST}.attn`"),
    "factor": ("blocks.0.norm1", "emb", "mul() in `(root)`"),
    "axis": (f"{LAST}.attn.wo", f"{LAST}.attn.wv", f"softmax() in `{LAST}.attn`"),
    "mask": (f"{LAST}.attn.wo", f"{LAST}.attn.wv", ""),
    "gelu": (f"{LAST}.fc2", f"{LAST}.fc1", f"gelu() in `{LAST}`"),
    "activation": ("head", "mid", "relu() in `(root)`"),
}
CAUSES = {
    "residual": "only the reference calls add() there",
    "last residual": "only the reference calls add() there",
    "scale": {"flat": "scaled_dot_product_attention(is_causal=True, scale=0.25)", "port": "against mul(0.125), though"},
    "factor": "only the reference calls mul(4) there",
    "axis": {"flat": "softmax(dim=-1) against softmax(dim=1)", "port": "softmax(dim=-1) against softmax(axis=1)"},
    "mask": {"flat": "scaled_dot_product_attention(attn_mask)", "port": "masked_fill(value=-inf, mask) there, the"},
    "gelu": {"flat": "gelu() against GELU(approximate=tanh)", "port": "gelu() against gelu(approximate=True)"},
    "activation": "only the reference calls relu() there",
}


# The code of the candidate that is shown, where the values were recorded.
SHOWN = {"mask": {"flat": "attn_mask=more", "port": "where(away, "}}
# What the values prove, where they were recorded in full.
COMPUTED = {
    "residual": "the residual is missing: the first add() in `blocks.1` leaves out what `blocks.0` gives",
    "last residual": "the residual is missing: the second add() in `blocks.1`",
    "scale": "the scale of attention in div() in `blocks.1.attn` is",
    "factor": "mul() in `(root)` is left out: nothing is scaled by 4 there",
    "gelu": "tanh-form GELU for the reference's exact GELU",
    "activation": "has no activation, the reference ReLU",
}


def recorded(model, detail, functions):
    with pytest.MonkeyPatch.context() as patch:
        if detail == "large":
            patch.setattr(copying, "SMALL_ELEMENTS", 0)
        return trained(model, functions=functions, **OPTIONS[detail])


@functools.cache
def reference(detail, functions=True):
    return recorded(model_of("net"), detail, functions)


def report_of(name, fault, detail, functions=True):
    return padiff.compare_runs(reference(detail, functions), recorded(model_of(name, fault), detail, functions))


#: What a recording keeps shows in either framework alike.
KEPT = [(name, fault, detail) for name in ("flat", "port") for fault in FAULTS for detail in OPTIONS]
KEPT = [(name, fault, detail) for name, fault, detail in KEPT if name == "flat" or detail == "full"]
DETAILS = pytest.mark.parametrize("detail", OPTIONS)
NAMES = pytest.mark.parametrize("name", ["flat", "port"])


@NAMES
@DETAILS
@pytest.mark.parametrize("functions", [True, False], ids=["functions", "layers only"])
def test_what_is_written_differently_and_computes_the_same_matches(name, detail, functions):
    report = report_of(name, "", detail, functions)
    assert report.passed, report.first_diff.message
    # What a trace holds is no record that has to have a partner.
    assert not any("input." in site for site in (*report.coverage.reference_sites, *report.coverage.candidate_sites))


@pytest.mark.parametrize(("name", "fault", "detail"), KEPT)
def test_a_mistake_between_layers_is_placed_there_and_the_call_is_named(name, fault, detail):
    report = report_of(name, fault, detail)
    first = report.first_diff
    layer, last, call = PLACES[fault]
    if fault == "last residual" and name == "port":
        # There the block is a layer, too, whose output is the first to differ.
        assert (first.reference, first.slot, first.inside) == (LAST, "output.0", True)
    else:
        assert (first.reference, first.inside) == (layer, False)
        assert first.slot == first.diff.pair.reference.slot == "input.input"
    assert (first.step, first.stage) == (0, "forward")
    if name == "port" or fault not in ("scale", "axis", "mask"):
        assert first.last_agreeing == last
    if not (name == "flat" and fault == "scale"):
        assert first.call == call
    expected = CAUSES[fault] if isinstance(CAUSES[fault], str) else CAUSES[fault][name]
    if detail != "large" and fault in COMPUTED:
        assert COMPUTED[fault] in first.cause.sentence and first.cause.proven
    elif first.cause.kind == "code":
        assert SHOWN[fault][name] in first.cause.sentence and not first.cause.proven
    else:
        assert expected in first.cause.sentence
    assert not report.passed
    assert not first.diff.passed


@pytest.mark.parametrize(
    ("name", "fault", "detail"),
    [one for one in KEPT if one[2] == ("large" if one[0] == "flat" else "full")],
)
def test_without_functions_the_layers_around_it_are_named(name, fault, detail):
    first = report_of(name, fault, detail, functions=False).first_diff
    layer, last, _ = PLACES[fault]
    if fault == "last residual" and name == "port":
        assert (first.reference, first.slot) == (LAST, "output.0")
        assert f"in the code of `{LAST}` after `{last}`, the last layer that agrees." in first.message
    else:
        assert (first.reference, first.inside) == (layer, False)
        where = f"in the code between `{first.last_agreeing}`, the last layer that agrees, and `{layer}`."
        assert where in first.message
        if name == "port" or fault not in ("scale", "axis", "mask"):
            assert first.last_agreeing == last
    assert first.call == ""
    # An activation and its forms are computed from the values; what else it may be, they do not tell.
    assert first.cause.kind.startswith(("unknown", "activation", "norm_statistics", "output_"))
    assert not first.cause.proven or fault in ("gelu", "activation")


def test_the_diff_that_is_reported_is_that_of_what_goes_in():
    first = report_of("port", "factor", "full").first_diff
    embedded = START["emb.weight"][np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH))]
    missing, right = 3 * embedded, 4 * embedded + START["pos"]
    expected = np.linalg.norm(missing) / np.linalg.norm(right)
    assert first.diff.figures.rel_l2 == pytest.approx(expected, rel=1e-5)
    assert f"relative L2 {expected:.3g}," in first.message
    assert first.diff.judgement.limit < 1e-4


def test_reports_hold_the_place():
    found = to_json(report_of("port", "residual", "full"))["first_diff"]
    assert found["last_agreeing"] == f"{LAST}.attn.wo"
    assert found["inside"] is False
    assert found["call"] == f"the first add() in `{LAST}`"
    assert found["why"]["kind"] == "residual_missing"
    json.dumps(found)
    assert to_json(report_of("port", "", "full"))["first_diff"] is None


@DETAILS
def test_a_mistake_inside_of_a_layer_stays_there(detail):
    model = model_of("port")
    model.layers[BLOCKS - 1].linear1.register_forward_post_hook(lambda layer, given, output: output * 1.5)
    first = padiff.compare_runs(reference(detail), trained(model, **OPTIONS[detail])).first_diff
    assert (first.reference, first.slot, first.inside, first.call) == (f"{LAST}.fc1", "output.0", True, "")
    assert "It is inside of this layer, as its inputs agree." in first.message
    assert "output is 1.5 times the reference's" in first.cause.sentence


# -- what goes in by itself ----------------------------------------------------------------------------------------


def torch_run(forward, inputs=(), **layers):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, x):
            return forward(self, x)

    model = Model()
    with padiff.record(model, **dict(inputs)) as rec:
        x = torch.tensor(np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32))
        model(x).sum().backward()
        rec.try_dump()
    return rec.run


def first_of(one, other):
    return padiff.compare_runs(one, other).first_diff


def test_another_tensor_that_goes_in():
    def right(net, x):
        y = net.first(x)
        return net.last(torch.relu(y) * x)

    def wrong(net, x):
        y = net.first(x)
        return net.last(torch.relu(y) * y)

    first = first_of(torch_run(right), torch_run(wrong))
    assert (first.reference, first.inside, first.call) == ("last", False, "mul() in `(root)`")
    assert first.cause.kind == "call_input"


def test_a_mask_of_the_models_own_that_is_the_wrong_way_round():
    mask = torch.tensor(np.random.default_rng(1).random((BATCH, WIDTH)) < 0.5)

    def run(mask):
        return torch_run(lambda net, x: net.last(net.first(x).masked_fill(mask, 0.0)))

    first = first_of(run(mask), run(~mask))
    assert (first.reference, first.inside, first.call) == ("last", False, "masked_fill() in `(root)`")
    assert (first.cause.kind, first.cause.proven) == ("mask_inverted", True), first.cause.text


class Masked(torch.nn.Module):
    """Its mask is something that goes in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, mask=None):
        return x * self.weight if mask is None else torch.where(mask, x * self.weight, x)


def test_a_mask_that_goes_into_a_layer():
    mask = torch.tensor(np.random.default_rng(1).random((BATCH, WIDTH)) < 0.5)

    def run(mask):
        return torch_run(lambda net, x: net.last(net.masked(net.first(x), mask)), masked=Masked())

    first = first_of(run(mask), run(~mask))
    assert (first.reference, first.slot, first.inside) == ("masked", "input.mask", False)


def test_what_only_one_side_gives_a_layer_is_no_diff():
    mask = torch.ones(BATCH, WIDTH, dtype=torch.bool)

    def run(*more):
        return torch_run(lambda net, x: net.last(net.masked(net.first(x), *more)), masked=Masked())

    report = padiff.compare_runs(run(mask), run())
    assert report.passed, report.first_diff.message
    assert report.coverage.complete


def test_an_axis_of_a_reshape():
    def right(net, x):
        return net.last(net.first(x).view(BATCH, 4, 4).transpose(1, 2).reshape(BATCH, WIDTH))

    def wrong(net, x):
        return net.last(net.first(x).view(BATCH, 4, 4).reshape(BATCH, WIDTH))

    first = first_of(torch_run(right), torch_run(wrong))
    assert (first.reference, first.inside) == ("last", False)
    assert first.cause.sentence.startswith("in the candidate, transpose() in `(root)` is left out")
    assert (first.cause.kind, first.cause.proven) == ("axes_order", True)


def test_a_call_too_many():
    first = first_of(
        torch_run(lambda net, x: net.last(net.first(x))), torch_run(lambda net, x: net.last(net.first(x).tanh()))
    )
    assert (first.reference, first.inside) == ("last", False)
    assert first.call == "tanh() in `(root)` of the candidate"
    assert first.cause.sentence.startswith("the candidate uses tanh for the reference's no activation")


def test_one_function_for_another():
    first = first_of(
        torch_run(lambda net, x: net.last(torch.relu(net.first(x)))),
        torch_run(lambda net, x: net.last(torch.nn.functional.silu(net.first(x)))),
    )
    assert first.cause.sentence.startswith("the candidate uses SiLU for the reference's ReLU")
    assert first.call == "relu() in `(root)`"


def test_random_masks_are_dropout_wherever_they_are_drawn():
    def run(seed):
        def forward(net, x):
            torch.manual_seed(seed)
            return net.last(torch.nn.functional.dropout(net.first(x), 0.3))

        return torch_run(forward)

    first = first_of(run(1), run(2))
    assert (first.reference, first.inside) == ("last", False)
    assert first.cause.kind == "dropout"


def test_a_diff_in_the_first_layer_has_no_layer_before_it():
    def run(scale):
        return torch_run(lambda net, x: net.last(net.first(x * scale)))

    first = first_of(run(2.0), run(1.5))
    assert (first.reference, first.inside, first.last_agreeing) == ("first", False, "")
    assert "It is in the code before `first`, the first layer that is called: mul() in `(root)`." in first.message
    assert first.cause.sentence == "in the candidate, the number in mul() in `(root)` is 1.5 for the reference's 2"


def test_functions_on_one_side_only_are_not_looked_at():
    one = torch_run(lambda net, x: net.last(torch.relu(net.first(x))))
    other = torch_run(lambda net, x: net.last(net.first(x)), inputs={"functions": False})
    first = first_of(one, other)
    assert (first.reference, first.inside, first.call) == ("last", False, "")

"""The pairs as training runs: the same ones pass, with every parameter compared; faults and differences do not."""

from __future__ import annotations

from functools import cache

import paddle
import pytest
import torch
from kit.frameworks import TORCH, kit_of

import padiff
from padiff.compare import RunComparison

from . import DIFFERENT, PAIRS
from .copying import MismatchError, layer, tensors
from .test_found import at

RATE = 1e-3
#: Equal outputs, but two biases that are only ever added up learn twice as fast as one.
TWO_BIASES = {"lstm_to_gates", "lstm_to_one_bias", "lstm_from_gates", "lstm_from_one_bias"}
#: Equal outputs, but only one side ties the two.
HALF_TIED = {"gpt2_untied_but_equal"}
#: Equal outputs, but one side's normalisations are frozen: they get no gradients.
FROZEN = {"resnet_frozen_norm"}


def named(*names):
    return [pair for pair in (*PAIRS, *DIFFERENT) if pair.name in names]


both_ways = pytest.mark.parametrize("back", [False, True], ids=["there", "back"])


def same(*without):
    """Each pair one way, by turns: either side is the reference of half of them."""
    found = [(pair, bool(k % 2)) for k, pair in enumerate(PAIRS) if pair.name not in set().union(*without)]
    return pytest.mark.parametrize(("pair", "back"), found, ids=lambda one: getattr(one, "name", None))


def evaluated(model):
    """A model in eval mode; paddle can't go back through a recurrent layer in it, which drops nothing here."""
    model.eval()
    for each in kit_of(model).named_layers(model).values():
        if isinstance(each, paddle.nn.layer.rnn.RNNBase):
            each.train()
    return model


def transferred(pair):
    models = [model.eval() or model for model in pair.build()]
    pair.transfer(*models)
    for paths in pair.layers:
        _freeze_alike([at(model, path) for model, path in zip(models, paths)])
    return models


def _freeze_alike(layers):
    """Where one side keeps a buffer, the other's parameter is frozen: else the one learns and the other does not."""
    owned = [tensors(layer) for layer in layers]
    for name in owned[0].keys() & owned[1].keys():
        for one, other in ((0, 1), (1, 0)):
            if _is_parameter(layers[one], owned[one][name]) and not _is_parameter(layers[other], owned[other][name]):
                freeze(owned[one][name])


def _is_parameter(owner, tensor):
    return any(tensor is each for each in owner._parameters.values())


def freeze(parameter):
    if isinstance(parameter, torch.Tensor):
        parameter.requires_grad_(False)
    else:
        parameter.stop_gradient = True


def trained(model, args, steps=2):
    """A recorded run of plain SGD on the mean square of the outputs."""
    if kit_of(model) is TORCH:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    else:
        optimizer = paddle.optimizer.SGD(learning_rate=RATE, parameters=model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(steps):
            out = model(*args)
            (out * out).mean().backward()
            optimizer.step()
            optimizer.clear_grad() if hasattr(optimizer, "clear_grad") else optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def runs_of(pair, models):
    return [trained(evaluated(model), args) for model, args in zip(models, pair.inputs())]


@cache
def recorded(pair):
    """Both models after a transfer by hand, and their runs."""
    models = transferred(pair)
    return models, runs_of(pair, models)


@cache
def compared(pair, back):
    """Both models, the report of their runs and its alignment; the candidate first if back."""
    models, runs = (sides[::-1] if back else sides for sides in recorded(pair))
    made = []

    class Kept(RunComparison):
        """What `compare_runs` compares with; it keeps the alignment to itself."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("padiff.compare.runs.RunComparison", Kept)
        report = padiff.compare_runs(*runs)
    (comparison,) = made
    return models, report, comparison.alignment


@same()
def test_the_same_training_passes_and_all_that_has_a_partner_is_compared(pair, back):
    models, report, alignment = compared(pair, back)
    if pair.name not in TWO_BIASES | HALF_TIED:
        assert report.passed, report.first_diff.message
        assert report.coverage.steps == (0, 1)
        assert {d.pair.stage for d in report.diffs if d.compared} >= {"forward", "backward", "weight", "grad", "update"}
    sides = report.coverage.reference_parameters, report.coverage.candidate_parameters
    for sites, paths in zip(sides, pair.extra[:: -1 if back else 1]):
        assert {site.rpartition("/")[0] for site in sites} == set(paths)
    if pair.name in HALF_TIED:
        return
    # No layers are paired that do not answer to each other; every parameter that learns has its gradient compared.
    truth = {tuple(id(at(m, path)) for m, path in zip(models, entry[:: -1 if back else 1])) for entry in pair.layers}
    found = {(a.layer, b.layer) for p in alignment.parameters for a in p.reference for b in p.candidate}
    assert not [paths for paths in found if tuple(id(at(m, path)) for m, path in zip(models, paths)) not in truth]
    extra = {path for side in pair.extra for path in side}
    left = [p.rpartition("/")[0] for p in (*alignment.reference_parameters, *alignment.candidate_parameters)]
    assert set(left) == extra
    grads = [d.pair for d in report.diffs if d.pair.stage == "grad" and d.pair.step == 0]
    assert {p.anchor.layer for p in grads if not p.complete} <= extra


@both_ways
@pytest.mark.parametrize("pair", named(*TWO_BIASES), ids=lambda pair: pair.name)
def test_two_biases_that_are_added_up_learn_twice_as_fast_as_one(pair, back):
    _, report, _ = compared(pair, back)
    # Both get the gradient of the sum and move by it: so their sum moves by twice of it, and all is equal before.
    assert (report.first_diff.step, report.first_diff.stage) == (0, "update")
    assert "bias" in report.first_diff.slot
    failed = [d.pair for d in report.failed if d.pair.step == 0]
    assert failed
    assert all(p.stage == "update" and "bias" in p.anchor.slot for p in failed)


# -- faults ------------------------------------------------------------------------------------------------------

#: A layer of the candidate's that computes one percent too much.
FAULTS = {
    "resnet_stages": "stages.1.blocks.0.b_conv",
    "bert_flat_to_nested": "encoder.layer.1.attention.self.value",
    "vit_nested_to_fused": "blocks.0.attn.qkv",
    "llama_fused_kv_and_gate_up": "layers.1.feed_forward.gate_up_proj",
    "gpt2_conv1d": "layers.1.mlp.out",
    "lstm_torch_to_paddle": "lstm",
    "t5_to_marian": "decoder.layers.0.encoder_attn.k_proj",
    "neox_split_to_interleaved": "layers.0.attention.query_key_value",
}


def scaled(model, path):
    def changed(_, inputs, output):
        return (output[0] * 1.01, *output[1:]) if isinstance(output, tuple) else output * 1.01

    where = layer(model, path)
    where.register_forward_hook(changed) if kit_of(model) is TORCH else where.register_forward_post_hook(changed)


def order_of(run):
    found = {}
    for record in run.steps(0)[0].records:
        if record.stage == "forward":
            found.setdefault(record.layer, record.order)
    return found


def owners_in_order(pair, run):
    """The candidate's layers that own parameters, as they ran."""
    order = order_of(run)
    return sorted({path for _, path in pair.layers if path in order}, key=order.get)


@pytest.mark.parametrize("pair", named(*FAULTS), ids=lambda pair: pair.name)
def test_a_fault_is_found_where_it_is_or_in_the_layer_after_it(pair):
    models, path = transferred(pair), FAULTS[pair.name]
    scaled(models[1], path)
    runs = runs_of(pair, models)
    report = padiff.compare_runs(*runs)
    assert not report.passed
    assert (report.first_diff.step, report.first_diff.stage) == (0, "forward")
    ran = owners_in_order(pair, runs[1])
    place = ran.index(path)
    assert report.first_diff.candidate in ran[place : place + 2]
    # Nothing that ran before it is blamed; what it is inside of, of course, is.
    blamed = {d.pair.candidate.layer for d in report.failed if (d.pair.step, d.pair.stage) == (0, "forward")}
    assert not blamed & set(ran[:place])


# -- different models --------------------------------------------------------------------------------------------

different = pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: pair.name)


@pytest.mark.parametrize("pair", DIFFERENT[::2], ids=lambda pair: pair.name)  # of the runs below, all
def test_auto_diff_does_not_call_different_models_equal(pair):
    models = [model.eval() or model for model in pair.build()]
    report = padiff.auto_diff(*models, pair.inputs(), atol=1e-5, rtol=1e-4)
    assert not report.passed


@different
def test_runs_of_different_models_part_or_say_what_is_set_otherwise(pair):
    try:
        models = transferred(pair)
    except MismatchError:
        models = pair.build()
    report = padiff.compare_runs(*runs_of(pair, models))
    assert not report.passed or (
        pair.shows == "training" and any(pair.differs in note for note in report.coverage.notes)
    )


@pytest.mark.parametrize("pair", named("batchnorm_momentum"), ids=lambda pair: pair.name)
def test_what_shows_only_in_training_shows_in_training(pair):
    models = transferred(pair)
    runs = [trained(model.train() or model, args) for model, args in zip(models, pair.inputs())]
    report = padiff.compare_runs(*runs)
    assert not report.passed
    assert report.first_diff.slot == "running_mean"
    assert "momentum" in report.first_diff.message


@same(HALF_TIED, FROZEN, {pair.name for pair in PAIRS[::2]})  # what carries weights over is tried with all
def test_auto_diff_calls_the_same_models_equal(pair, back):
    turn = (lambda sides: tuple(reversed(sides))) if back else tuple
    extra = turn(pair.extra)
    left_out = [(path, None) for path in extra[0]] + [(None, path) for path in extra[1]]
    models = turn([evaluated(model) for model in pair.build()])
    # Float32 in two frameworks: ten times what the pairs' own truth allows.
    report = padiff.auto_diff(*models, turn(pair.inputs()), atol=1e-4, rtol=1e-3, layer_map=left_out or None)
    assert report.passed, report.first_diff.message

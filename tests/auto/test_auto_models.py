"""``auto_diff`` of models that are harder to follow: attention, recurrent layers, recomputation, in-place layers."""

from __future__ import annotations

from pathlib import Path

import paddle
import pytest
import torch
import torch.utils.checkpoint
from kit.frameworks import PADDLE, TORCH
from kit.nets import both, data
from paddle.distributed.fleet.utils import recompute

import padiff
from padiff import create_model

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}
PHASES = [{}, {"single_step": True}, {"single_step": True, "diff_phase": "backward"}]


def recurrent(kit, name):
    class Net(kit.Net):
        def build(self):
            if kit is TORCH:
                self.rnn = getattr(torch.nn, name)(4, 5, num_layers=2, bidirectional=True, batch_first=True)
            else:
                self.rnn = getattr(paddle.nn, name)(4, 5, num_layers=2, direction="bidirect")
            self.last = kit.Linear(10, 2)

        def forward(self, x):
            return self.last(self.rnn(x)[0])

    return Net()


@pytest.mark.parametrize("options", PHASES)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_recurrent_layers_match(pair, name, options):
    report = padiff.auto_diff(
        recurrent(pair[0], name), recurrent(pair[1], name), both(pair, data(2, 3, 4)), **options, **CLOSE
    )
    assert report
    if options.get("diff_phase") != "backward":
        sites = {d.pair.anchor.site for d in report if d.compared}
        assert {f"rnn/weight/weight_hh_l{k}{r}" for k in (0, 1) for r in ("", "_reverse")} <= sites


def test_a_wrong_recurrent_weight_is_found(pair):
    base, raw = (recurrent(kit, "LSTM") for kit in pair)
    padiff.assign_weight(base, raw)
    name, weight = next((n, p) for n, p in raw.named_parameters() if n.endswith("weight_hh_l1"))
    pair[1].set(weight, (pair[1].float64(weight) * 1.01).astype("float32"))
    report = padiff.auto_diff(base, raw, both(pair, data(2, 3, 4)), auto_init=False, **CLOSE)
    assert (report.first_diff.stage, report.first_diff.slot) == ("weight", "weight_hh_l1"), name


def transformer(kit):
    if kit is TORCH:
        return torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    return paddle.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0)


@pytest.mark.parametrize("options", PHASES)
def test_transformers_match_though_one_packs_its_projections(pair, options):
    inputs = [(kit.tensor(data(2, 4, 16)), kit.tensor(data(2, 3, 16, seed=2))) for kit in pair]
    report = padiff.auto_diff(transformer(pair[0]), transformer(pair[1]), inputs, **options, **CLOSE)
    assert report
    assert all(d.compared for d in report if d.pair.stage in ("weight", "grad"))


def attention(kit):
    class Net(kit.Net):
        def build(self):
            if kit is TORCH:
                self.attn = torch.nn.MultiheadAttention(16, 2, batch_first=True)
            else:
                self.attn = paddle.nn.MultiHeadAttention(16, 2)
            self.last = kit.Linear(16, 2)

        def forward(self, x):
            output = self.attn(x, x, x)
            return self.last(output[0] if kit is TORCH else output)

    return Net()


def test_proxies_with_a_mapped_attention_match_in_auto_diff_and_in_dumps(every_pair):
    proxies = [create_model(attention(kit)) for kit in every_pair]
    for place, proxy in zip(("base", "raw"), proxies):
        assert proxy.auto_layer_map(place) == ["attn"]
    assert padiff.auto_diff(*proxies, both(every_pair, data(2, 4, 16)), **CLOSE)
    folders = [Path(proxy.dump_path) / "auto_diff" for proxy in proxies]
    assert padiff.check_report(*folders, CLOSE)
    assert padiff.check_params(*folders, CLOSE)
    for side, kit, proxy in zip("ab", every_pair, proxies):
        proxy.backward((proxy(kit.tensor(data(2, 4, 16))) ** 2).mean())
        proxy.try_dump(side)
    for check in (padiff.check_report, padiff.check_weights, padiff.check_grads):
        assert check("a", "b", CLOSE)


def test_a_gradient_of_one_projection_that_is_off_is_named(pair):
    proxies = [create_model(attention(kit)) for kit in pair]
    padiff.assign_weight(*proxies)
    for side, kit, proxy in zip("ab", pair, proxies):
        proxy.backward((proxy(kit.tensor(data(2, 4, 16))) ** 2).mean())
        if side == "b":
            attn = proxy.model.attn
            if kit is TORCH:
                attn.in_proj_weight.grad[16:32] *= 2
            else:
                attn.k_proj.weight.grad.set_value(attn.k_proj.weight.grad * 2)
        proxy.try_dump(side)
    report = padiff.check_grads("a", "b", CLOSE)
    site = "attn/grad/in_proj_weight[k_proj]" if pair[0] is TORCH else "attn.k_proj/grad/weight"
    assert [d.pair.anchor.site for d in report.failed] == [site]
    figures = report.failed[0].figures
    assert figures.candidate_l2 == pytest.approx(2 * figures.reference_l2, rel=1e-4)


def recomputed(kit, on=True, reentrant=False):
    class Net(kit.Net):
        def build(self):
            self.a, self.drop, self.b = kit.Linear(4, 4), kit.Dropout(0.5), kit.Linear(4, 4)

        def inner(self, x):
            return self.drop(kit.Tanh()(self.a(x)))

        def forward(self, x):
            if not on:
                return self.b(self.inner(x))
            if kit is TORCH:
                return self.b(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant))
            return self.b(recompute(self.inner, x))

    return Net()


@pytest.mark.parametrize("options", PHASES)
def test_recomputation_with_dropout_matches_a_model_without_it(pair, options):
    inputs = [kit.tensor(data(6, 4), grad=True) for kit in pair]
    for base, raw in ((True, False), (False, True), (True, True)):
        report = padiff.auto_diff(
            recomputed(pair[0], base), recomputed(pair[1], raw), inputs, same_dropout=True, **options, **CLOSE
        )
        assert report, report.first_diff


def test_reentrant_checkpoints_match_too():
    inputs = [kit.tensor(data(6, 4), grad=True) for kit in (TORCH, PADDLE)]
    report = padiff.auto_diff(
        recomputed(TORCH, reentrant=True), recomputed(PADDLE, False), inputs, same_dropout=True, **CLOSE
    )
    assert report
    assert {"a", "drop", "b"} <= {d.pair.anchor.layer for d in report if d.pair.stage == "backward" and d.compared}


@pytest.mark.parametrize("options", PHASES)
def test_an_in_place_layer_is_followed(pair, options):
    def net(kit):
        act = torch.nn.ReLU(inplace=True) if kit is TORCH else paddle.nn.ReLU()
        return kit.Sequential(kit.Conv(2, 3, 3), kit.BatchNorm(3), act, kit.Conv(3, 2, 3))

    assert padiff.auto_diff(net(pair[0]), net(pair[1]), both(pair, data(2, 2, 8, 8)), **options, **CLOSE)


def test_a_layer_norm_over_several_axes_matches_though_paddle_keeps_one_row(pair):
    def net(kit):
        return kit.Sequential(kit.LayerNorm((3, 4)), kit.Linear(4, 2))

    assert padiff.auto_diff(net(pair[0]), net(pair[1]), both(pair, data(2, 3, 4)), **CLOSE)


def test_a_parameter_that_is_frozen_on_one_side_only_is_found(pair):
    base, raw = (kit.Sequential(kit.Linear(4, 4), kit.Linear(4, 2)) for kit in pair)
    weight = next(iter(raw.parameters()))
    if pair[1] is TORCH:
        weight.requires_grad_(False)
    else:
        weight.stop_gradient = True
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), **CLOSE)
    assert (report.first_diff.stage, report.first_diff.reference, report.first_diff.slot) == ("grad", "0", "weight")
    assert "frozen" in report.first_diff.cause.sentence


def test_dropout_inside_of_an_attention_is_reported(capsys):
    base = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    raw = paddle.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, attn_dropout=0.0)
    inputs = [kit.tensor(data(2, 4, 16)) for kit in (TORCH, PADDLE)]
    assert not padiff.auto_diff(base, raw, inputs, same_dropout=True, **CLOSE)
    assert "`self_attn` of the base model drop by a call of their own inside" in capsys.readouterr().out
    base.self_attn.dropout = 0.0
    assert padiff.auto_diff(base, raw, inputs, same_dropout=True, **CLOSE)


def test_layers_of_one_map_may_be_built_differently_inside(capsys, pair):
    def net(kit, apart):
        class Inner(kit.Net):
            def build(self):
                if apart:
                    self.left, self.right = kit.linear(4, 2, bias=False), kit.linear(4, 2, bias=False)
                else:
                    self.both = kit.linear(4, 4, bias=False)

            def forward(self, x):
                if not apart:
                    return self.both(x)
                cat = torch.cat if kit is TORCH else paddle.concat
                return cat([self.left(x), self.right(x)], -1)

        return kit.net(lambda net, x: net.last(net.inner(x)), inner=Inner(), last=kit.Linear(4, 2))

    base, raw = net(pair[0], False), net(pair[1], True)
    matrix = pair[0].weight(base.inner.both)
    pair[1].set_weight(raw.inner.left, matrix[:2])
    pair[1].set_weight(raw.inner.right, matrix[2:])
    padiff.assign_weight(base.last, raw.last)
    call = {"auto_init": False, "layer_map": {base.inner: raw.inner}, **CLOSE}
    assert padiff.auto_diff(base, raw, both(pair, data(5, 4)), **call)
    assert "Compared as a whole, not inside: `inner` and `inner`" in capsys.readouterr().out
    pair[1].set_weight(raw.inner.left, matrix[:2] * 1.1)
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), **call)
    assert (report.first_diff.stage, report.first_diff.reference) == ("forward", "inner")

"""Lists and layer maps of a proxy, and proxies in ``auto_diff``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.frameworks import KITS
from kit.nets import both, data, tanh_mlp

import padiff
from padiff import create_model

from .proxies import nested, sites, train

UsageError = padiff.PadiffError


ALL = ["(root)", "block", "block.inner", "block.inner.0", "block.inner.1", "block.last", "head"]
BELOW = ["block.inner", "block.inner.0", "block.inner.1", "block.last"]


def recorded(kit, proxy, stage="forward", file="report.json"):
    train(kit, proxy, data(5, 4))
    (proxy.dump_report if file == "report.json" else proxy.dump_params)("lists")
    return sorted({site.rsplit("/", 1)[0] for site in sites("lists", file).get(stage, [])})


@pytest.mark.parametrize(("mode", "listed"), [("self", ["block"]), ("sublayers", BELOW), ("all", ["block", *BELOW])])
def test_lists_have_three_modes(kit, mode, listed):
    proxy = create_model(nested(kit))
    proxy.update_black_list([proxy.model.block], mode)
    assert recorded(kit, proxy) == sorted(set(ALL) - set(listed))
    proxy = create_model(nested(kit))
    proxy.update_white_list([proxy.model.block], mode)
    assert recorded(kit, proxy) == sorted(listed)


def test_white_beats_black_and_the_default_mode_is_all(kit):
    proxy = create_model(nested(kit))
    proxy.update_black_list([proxy.model.block])
    proxy.update_white_list([proxy.model.block])
    assert recorded(kit, proxy) == sorted(["block", *BELOW])


def test_lists_filter_the_parameters_too(kit):
    proxy = create_model(nested(kit))
    proxy.update_black_list([proxy.model.block.inner], "all")
    assert recorded(kit, proxy, "weight", "params.json") == ["block.last", "head"]
    assert recorded(kit, proxy, "grad", "params.json") == ["block.last", "head"]


def test_lists_by_class(kit):
    proxy = create_model(nested(kit))
    proxy.update_black_list_with_class(kit.Linear, "self")
    assert not {"head", "block.last", "block.inner.0"} & set(recorded(kit, proxy))
    proxy = create_model(nested(kit))
    proxy.update_white_list_with_class([kit.Linear, kit.ReLU], mode="self")
    assert recorded(kit, proxy) == ["block.inner.0", "block.inner.1", "block.last", "head"]


def test_wrong_items_of_a_list_are_reported_at_once(kit):
    proxy = create_model(nested(kit))
    with pytest.raises(UsageError, match="unknown mode 'some'; the modes are self, sublayers, all"):
        proxy.update_black_list([proxy.model.block], "some")
    with pytest.raises(UsageError, match="is no layer of the model"):
        proxy.update_black_list([kit.Linear(1, 1)])
    proxy = create_model(nested(kit))
    with pytest.raises(UsageError, match=r"the pattern 'blok.\*' matches no layer .* Nearest: block"):
        proxy.update_white_list(["blok.*"])
    proxy = create_model(nested(kit))
    with pytest.raises(UsageError, match="expected a list of layers"):
        proxy.update_black_list("block")
    with pytest.raises(UsageError, match="leave no layer to record"):
        proxy.update_black_list([proxy.model])


def test_a_refused_list_changes_nothing(kit):
    proxy = create_model(nested(kit))
    for wrong in ([kit.Linear(1, 1)], [proxy.model]):
        with pytest.raises(UsageError):
            proxy.update_black_list(wrong)
    assert recorded(kit, proxy) == sorted(ALL)


def test_a_layer_map_hides_what_is_below_its_layers(kit):
    proxy = create_model(nested(kit))
    proxy.set_layer_map([proxy.model.block])
    assert recorded(kit, proxy) == ["(root)", "block", "head"]
    with pytest.raises(UsageError, match="set_layer_map takes a list of this model's layers, got dict"):
        proxy.set_layer_map({})


def test_auto_layer_map_finds_attention_and_recurrent_layers(kit, capsys):
    class Net(kit.Net):
        def build(self):
            attention = KITS[kit.name].nn
            make = attention.MultiheadAttention if kit.name == "torch" else attention.MultiHeadAttention
            self.first, self.attention, self.rnn = kit.Linear(4, 4), make(4, 2), attention.LSTM(4, 4)

    proxy = create_model(Net(), name="Simple")
    assert proxy.auto_layer_map("base") == ["attention", "rnn"]
    assert "auto_layer_map of Simple (base): attention, rnn" in capsys.readouterr().out
    with pytest.raises(UsageError, match="model_place is 'base' or 'raw', got 'left'"):
        proxy.auto_layer_map("left")


# -- proxies in auto_diff ------------------------------------------------------------------------------------------


def test_proxies_in_auto_diff_compare_what_their_lists_leave(pair):
    proxies = [create_model(nested(kit)) for kit in pair]
    for proxy in proxies:
        proxy.update_black_list([proxy.model.block], "sublayers")
    report = padiff.auto_diff(*proxies, both(pair, data(5, 4)), atol=1e-5)
    assert report
    assert {d.pair.anchor.layer for d in report if d.pair.stage == "forward"} == {"(root)", "block", "head"}


def test_auto_diff_leaves_dumps_that_agree_with_its_verdict(pair):
    proxies = [create_model(tanh_mlp(kit)) for kit in pair]
    x = both(pair, data(5, 4))
    cfg = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}
    report = padiff.auto_diff(*proxies, x, **cfg)
    folders = [Path(proxy.dump_path) / "auto_diff" for proxy in proxies]
    assert report
    assert padiff.check_report(*folders, cfg)
    assert padiff.check_params(*folders, cfg)
    kit, fc = pair[1], proxies[1].model.fc1
    kit.set(fc.bias, kit.float64(fc.bias).astype("float32") + 1)
    assert not padiff.auto_diff(*proxies, x, auto_init=False, **cfg)
    checked = padiff.check_report(*folders, cfg)
    assert checked.first_diff.reference == "fc1"
    assert padiff.check_params(*folders, cfg).first_diff.slot == "bias"


def test_the_dumps_of_an_auto_diff_show_weights_after_the_optimizer(pair):
    proxies = [create_model(tanh_mlp(kit)) for kit in pair]
    optimizers = [kit.sgd(p.model.parameters(), rate) for kit, p, rate in zip(pair, proxies, (0.5, 5.0))]
    assert not padiff.auto_diff(*proxies, both(pair, data(5, 4)), None, optimizers, atol=1e-5)
    folders = [Path(proxy.dump_path) / "auto_diff" for proxy in proxies]
    assert padiff.check_report(*folders)
    assert padiff.check_grads(*folders)
    assert not padiff.check_weights(*folders)


def test_the_dumps_of_a_single_step_are_those_that_were_compared(pair):
    proxies = [create_model(tanh_mlp(kit)) for kit in pair]
    padiff.assign_weight(*proxies)
    kit, fc = pair[1], proxies[1].model.fc0
    kit.set(fc.bias, kit.float64(fc.bias).astype("float32") + 1)
    assert not padiff.auto_diff(*proxies, both(pair, data(5, 4)), auto_init=False, single_step=True, atol=1e-5)
    checked = padiff.check_report(*(Path(proxy.dump_path) / "auto_diff" for proxy in proxies))
    assert [d.pair.anchor.site for d in checked.failed] == ["fc0/forward/output.0"]


def test_no_stale_dump_is_left_when_the_weights_could_not_be_carried_over(pair):
    base, raw, other = (
        create_model(tanh_mlp(pair[0])),
        create_model(tanh_mlp(pair[1])),
        create_model(tanh_mlp(pair[1], (4, 8, 3))),
    )
    assert padiff.auto_diff(base, raw, both(pair, data(5, 4)), atol=1e-4)
    assert (Path(base.dump_path) / "auto_diff" / "report.json").exists()
    assert not padiff.auto_diff(base, other, both(pair, data(5, 4)), atol=1e-4)
    assert not (Path(base.dump_path) / "auto_diff" / "report.json").exists()


def test_plain_models_leave_no_dump(pair, tmp_path):
    assert padiff.auto_diff(tanh_mlp(pair[0]), tanh_mlp(pair[1]), both(pair, data(5, 4)), atol=1e-4)
    assert list(tmp_path.rglob("*.json")) == []

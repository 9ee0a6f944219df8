"""White and black lists, and layer maps, on live models."""

from __future__ import annotations

import numpy as np
import pytest
from kit.nets import record_one

import padiff
from padiff.errors import SelectionError, UsageError

PARAMETERS = ("weight", "grad", "update")


def net(kit):
    """encoder (a Sequential of two blocks of two layers), head; 4 in, 3 out."""

    class Block(kit.Net):
        def build(self):
            self.fc, self.act = kit.Linear(4, 4), kit.ReLU()

        def forward(self, x):
            return self.act(self.fc(x))

    class Net(kit.Net):
        def build(self):
            self.encoder = kit.Sequential(Block(), Block())
            self.head = kit.Linear(4, 3)

        def forward(self, x):
            return self.head(self.encoder(x))

    model = Net()
    model.block_class = Block
    return model


ALL = {"(root)", "encoder", "encoder.0", "encoder.0.fc", "encoder.0.act", "head"} | {
    "encoder.1",
    "encoder.1.fc",
    "encoder.1.act",
}
BLOCKS = {"encoder.0", "encoder.1"}
INSIDE = {"encoder.0.fc", "encoder.0.act", "encoder.1.fc", "encoder.1.act"}


def layers(kit, model, **lists):
    """Layers with forward records, and layers with parameter records."""
    x, y = kit.tensor(np.ones((5, 4))), kit.tensor([0, 1, 2, 0, 1], "int64")
    rec = record_one(kit, model, x, y, **lists)
    run = rec.run if rec.run is not None else padiff.open_run(lists["dir_path"])
    (step,) = run.steps(0)
    named = [r for r in step.records if r.layer != "(loop)"]
    forward = {r.layer for r in named if r.stage == "forward"}
    owned = {r.layer for r in named if r.stage in PARAMETERS}
    assert {r.layer for r in named} == forward | owned
    return forward, owned


# What a list of one item means: by object, by class and by pattern.
MODES = [
    ("self", lambda m: m.encoder, {"encoder"}),
    ("sublayers", lambda m: m.encoder, BLOCKS | INSIDE),
    ("all", lambda m: m.encoder, {"encoder"} | BLOCKS | INSIDE),
    ("self", lambda m: m.block_class, BLOCKS),
    ("sublayers", lambda m: m.block_class, INSIDE),
    ("all", lambda m: m.block_class, BLOCKS | INSIDE),
    ("self", lambda m: "encoder.?", BLOCKS),
    ("sublayers", lambda m: "encoder.?", INSIDE),
    ("all", lambda m: "encoder.?", BLOCKS | INSIDE),
    ("self", lambda m: "encoder.*", BLOCKS | INSIDE),
]


@pytest.mark.parametrize(("mode", "item", "meant"), MODES)
def test_a_white_list_records_what_it_names_and_nothing_else(kit, mode, item, meant):
    model = net(kit)
    forward, owned = layers(kit, model, white_list=[(item(model), mode)])
    assert forward == meant
    assert owned == {path for path in meant if path.endswith(".fc")}


@pytest.mark.parametrize(("mode", "item", "meant"), MODES)
def test_a_black_list_records_all_but_what_it_names(kit, mode, item, meant):
    model = net(kit)
    forward, owned = layers(kit, model, black_list=[(item(model), mode)])
    assert forward == ALL - meant
    assert owned == {path for path in ALL - meant if path.endswith(("fc", "head"))}


def test_without_a_mode_an_item_means_all(kit):
    model = net(kit)
    assert layers(kit, model, white_list=[model.encoder]) == layers(kit, model, white_list=[(model.encoder, "all")])


def test_white_beats_black(kit):
    model = net(kit)
    forward, _ = layers(kit, model, white_list=["head"], black_list=["head", "encoder*"])
    assert forward == {"head"}


def test_an_empty_white_list_is_no_white_list(kit):
    forward, _ = layers(kit, net(kit), white_list=[], black_list=["encoder*"])
    assert forward == {"(root)", "head"}


def test_several_items_are_added_up(kit):
    model = net(kit)
    forward, _ = layers(kit, model, white_list=[model.head, (kit.ReLU, "self"), "encoder.0.fc"])
    assert forward == {"head", "encoder.0.act", "encoder.1.act", "encoder.0.fc"}


def test_lists_filter_the_parameters_of_a_folder_too(kit, tmp_path):
    layers(kit, net(kit), black_list=["encoder*"], dir_path=tmp_path / "run")
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    assert {r.layer for r in step.records if r.stage in PARAMETERS and r.layer != "(loop)"} == {"head"}
    recorded = {layer.path: layer.recorded for layer in padiff.open_run(tmp_path / "run").info.layers}
    assert recorded == {path: path in ("(root)", "head") for path in ALL}


def test_a_layer_map_hides_what_is_below_its_layers(kit):
    model = net(kit)
    forward, owned = layers(kit, model, layer_map=[model.encoder[0], "encoder.1"])
    assert forward == {"(root)", "encoder", "encoder.0", "encoder.1", "head"}
    assert owned == {"head"}


def test_a_layer_map_keeps_the_users_order(kit):
    model = net(kit)
    rec = padiff.record(model, layer_map=["head", model.encoder[1], model.encoder[0]])
    assert rec.info.layer_map == ("head", "encoder.1", "encoder.0")


@pytest.mark.parametrize("given", ["white_list", "black_list", "layer_map"])
def test_a_pattern_that_matches_nothing_is_reported_with_the_nearest_paths(kit, given):
    message = rf"{given}: the pattern 'encodr.0.\*' matches no layer of the model. Nearest: .*encoder\.0"
    with pytest.raises(SelectionError, match=message):
        padiff.record(net(kit), **{given: ["encodr.0.*"]})


def test_a_class_that_the_model_has_not_is_reported_with_those_it_has(kit):
    with pytest.raises(SelectionError, match=r"no layer of the class .*Dropout; it has Block, Linear, Net, ReLU"):
        padiff.record(net(kit), white_list=[kit.Dropout])


def test_a_layer_of_another_model_is_reported(kit):
    with pytest.raises(SelectionError, match=r"is no layer of the model. Give a layer object of this very model"):
        padiff.record(net(kit), black_list=[net(kit).head])


def test_an_unknown_mode_is_reported(kit):
    with pytest.raises(UsageError, match="unknown mode 'below'; the modes are self, sublayers, all"):
        padiff.record(net(kit), white_list=[("head", "below")])


def test_a_string_for_a_list_is_reported(kit):
    with pytest.raises(UsageError, match="white_list has to be a list of layers, classes or path patterns, got 'head'"):
        padiff.record(net(kit), white_list="head")


def test_lists_that_leave_nothing_are_reported(kit):
    with pytest.raises(UsageError, match="the white and black lists leave no layer to record"):
        padiff.record(net(kit), black_list=["*"])

"""Steps that are like the one before are recorded, and written, as if nothing had been known of them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from kit.nets import batch, one_step

import padiff
from padiff.dump.read import open_run
from padiff.frameworks import framework_of
from padiff.records import LazyRecords
from padiff.sketches.sketch import sample, sketch_of

# Steps of two structures, and back again; then the rate is another, and a layer is trained no more.
SIZES = (6, 6, 6, 4, 6, 6, 6, 6)


def net(kit):
    return kit.Sequential(
        kit.Conv(1, 4, 3, padding=1), kit.BatchNorm(4), kit.ReLU(), kit.Flatten(), kit.Linear(4 * 40 * 40, 5)
    )


def train(kit, folder=None, **options):
    kit.seed(3)
    model = net(kit)
    optimizer = kit.sgd(model.parameters(), 0.1)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for number, size in enumerate(SIZES):
            x, y = batch(kit, (size, 1, 40, 40), 5, seed=number)
            if number == 6:
                frozen = next(iter(model.parameters()))
                setattr(frozen, *(("stop_gradient", True) if kit.name == "paddle" else ("requires_grad", False)))
            if number == 7:  # its memory is another one
                weight = list(model.parameters())[-1]
                if kit.name == "torch":
                    weight.data = weight.data.clone() * 2
                else:
                    weight.set_value(weight * 2)
            one_step(kit, model, optimizer, x, y, rec)
    return open_run(folder) if folder is not None else rec.run


@pytest.fixture
def runs(kit, tmp_path):
    return {
        "full": train(kit),
        "memory": train(kit, detail="sketch"),
        "folder": train(kit, tmp_path / "run", detail="sketch"),
    }


def test_alike_as_they_are(runs):
    for number in range(len(SIZES)):
        full, memory, folder = (runs[name].steps(number)[0] for name in ("full", "memory", "folder"))
        assert isinstance(memory.records, LazyRecords)
        by_site = {record.site: record for record in full.records}
        assert [r.site for r in memory.records] == [r.site for r in folder.records] == list(by_site)
        for one, other in zip(memory.records, folder.records):
            whole = by_site[one.site]
            for each in (one, other):
                about = each.dtype, each.shape, each.order, each.layer_type, each.call
                assert about == (whole.dtype, whole.shape, whole.order, whole.layer_type, whole.call)
                if each.sketch is None:
                    np.testing.assert_array_equal(each.value, whole.value)
                else:
                    # numpy's own sketch of the values that were recorded in full
                    expected = sketch_of(whole.value, each.sketch.transposed)
                    assert each.sketch.row().tobytes() == expected.row().tobytes(), (number, each.site)
        # But for the line of this file that trains them.
        assert [replace(c, stack=()) for c in memory.trace.calls] == [replace(c, stack=()) for c in folder.trace.calls]
        # The second step has functions where it is recorded in full.
        if full.trace.functions == memory.trace.functions:
            assert [(c.layer, c.call, c.function) for c in full.trace.calls] == [
                (c.layer, c.call, c.function) for c in memory.trace.calls
            ]
        for one, other in zip(memory.trace.tensors, folder.trace.tensors):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if one.source is not None and one.source.sketch is not None:
                assert one.source.row.tobytes() == other.source.row.tobytes()


def test_what_is_alike_is_kept_once(runs):
    patterns = [runs["memory"].steps(number)[0].records.pattern for number in range(len(SIZES))]
    # The first step has the functions; the third follows a plan, so that samples have other numbers; the fourth is of
    # another size.
    assert patterns[4] is patterns[5]
    assert len({id(pattern) for pattern in patterns[:5]}) == 5
    structures = list((runs["folder"].path / "structures").glob("*.json"))
    # Of the first step (it has stacks, and small tensors whole), of those after it, of the fourth, of a frozen layer.
    assert len(structures) == 4


def test_records_that_are_alike_are_a_sequence(runs):
    records = runs["memory"].steps(2)[0].records
    again = pickle.loads(pickle.dumps(records))
    assert isinstance(again, tuple)
    assert records == tuple(records)
    assert records[-1].order == len(records) - 1
    assert [r.site for r in again] == [r.site for r in records]


VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[3:90],
    "turned": lambda t: t.t(),
    "strided": lambda t: t[::2],
    "one": lambda t: t[5:6, 7:8],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_cut_is_what_a_sketch_looks_at(kit, view, dtype, turned):
    framework = framework_of(kit.ReLU())
    tensor = VIEWS[view](kit.tensor(np.random.default_rng(0).normal(size=(100, 101)) * 50, dtype))
    expected = sample(framework.tensors.copy(tensor), turned)
    cut = framework.tensors.cut(tensor, turned)
    row = np.empty(cut.kind[0], cut.kind[1])
    cut.copy_to(row)
    np.testing.assert_array_equal(row, expected)
    assert (cut.dtype, cut.shape) == (dtype, tuple(tensor.shape))


def test_layers_that_are_watched_are_others_once_they_hold_or_own_something_else(kit):
    first, second = kit.Sequential(kit.Linear(3, 3), kit.ReLU()), kit.Sequential(kit.Linear(3, 3), kit.BatchNorm(3))
    layers = [first, second, *first.children(), *second.children()]
    watch = framework_of(kit.ReLU()).layers.watch(layers)
    assert not watch.same()
    watch.note()
    assert watch.same()
    setattr(first, "2", kit.ReLU())
    assert not watch.same()
    watch.note()
    delattr(first, "2")
    assert not watch.same()
    watch.note()
    linear, other = layers[2], layers[4]
    weight, bias = linear.weight, linear.bias
    for slot, before, after in (("weight", weight, other.weight), ("bias", bias, None)):
        setattr(linear, slot, after)
        assert not watch.same()
        setattr(linear, slot, before)
        assert watch.same()

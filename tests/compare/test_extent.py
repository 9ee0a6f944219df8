"""How far a first diff reaches: in its tensor, in its step, in the steps before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.records import info, linear, memory_run, norm, planted, record, root, step, toy_run

from padiff import compare_runs
from padiff.records import FirstDiff
from padiff.report_formats import to_json


def extent(site, change, at=0):
    found = compare_runs(toy_run(), toy_run(paddle=True, plant=planted(site, change, at))).first_diff
    assert found.extent.text in found.message
    return found.extent


def at(index, by=0.5):
    def change(values):
        changed = values.copy()
        changed[index] += by
        return changed

    return change


@pytest.mark.parametrize(
    ("site", "index", "text"),
    [
        ("body.0/forward/output.0", np.s_[3], "only in sample 3 of 16"),
        ("body.0/forward/output.0", np.s_[[3, 5]], "only in samples 3, 5 of 16"),
        ("body.0/forward/output.0", np.s_[:, 2], "only in index 2 of axis 1 of 8"),
        ("head/weight/weight", np.s_[5], "only in column 5 of 8"),  # paddle's row is torch's column
        ("body.0/grad/bias", np.s_[7], "only in element 7 of 8"),
        ("body.0/forward/output.0", np.s_[:], None),
        ("body.0/forward/output.0", np.s_[::2], None),  # half of it is not little
    ],
)
def test_the_part_that_differs(site, index, text):
    found = extent(site, at(index))
    assert (str(found.within) if found.within else None) == text


def test_a_few_elements_are_counted():
    found = extent("body.0/forward/output.0", at(([1, 4, 9, 12, 14, 15], [1, 2, 3, 4, 5, 6])))
    assert found.within is None  # 6 of 128 are more than a hundredth
    found = extent("body.0/forward/output.0", at((4, 2)))
    assert (found.within.what, found.within.count, found.within.size) == ("sample", 1, 16)


def where(sites, change, first=0):
    """A plant at several sites, from a step on."""

    def plant(seen, number):
        return change(seen.value).astype(np.float32) if number >= first and seen.site in sites else None

    return plant


def reach(sites, change=lambda v: v + 0.5, first=0):
    return compare_runs(toy_run(), toy_run(paddle=True, plant=where(sites, change, first))).first_diff.extent.text


OUTPUTS = [f"{layer}/forward/output.0" for layer in ("body.0", "body.1", "head", "(root)")]
UPDATES = [f"{layer}/update/{slot}" for layer in ("body.0", "head") for slot in ("weight", "bias")]


@pytest.mark.parametrize(
    ("sites", "text"),
    [
        (OUTPUTS[:1], "None of the 3 outputs after it differs."),
        (OUTPUTS, "All 3 outputs after it differ too."),
        (OUTPUTS[:1] + OUTPUTS[2:], "2 of the 3 outputs after it differ too."),
        (OUTPUTS[1:], "Both outputs after it differ too."),
        (OUTPUTS[2:], "The output after it differs too."),
        (OUTPUTS[2:3], "The output after it does not differ."),
        (UPDATES, "All 4 updates differ."),
        (UPDATES[:3], "3 of 4 updates differ."),
        (UPDATES[1::2], "2 of 4 updates differ: biases."),
        (UPDATES[::2], "2 of 4 updates differ: matrices."),
    ],
)
def test_what_differs_besides(sites, text):
    assert reach(sites) == text


def test_the_output_of_the_whole_model_alone_is_what_the_loss_takes_in_another_form():
    assert compare_runs(toy_run(), toy_run(paddle=True, plant=where(OUTPUTS[3:], lambda v: v + 0.5))).passed


def test_only_norms():
    def run(plant):
        layers = info(root(2), linear("fc", 4, 4), norm("bn", 4))
        owned = [(layer, slot) for layer in ("fc", "bn") for slot in ("weight", "bias")]
        ones = {site: np.ones((4, 4) if site == owned[0] else 4) for site in owned}
        found = [record(layer, "grad", slot, one) for (layer, slot), one in ones.items()]
        found += [record(layer, "update", slot, one + plant * (layer == "bn")) for (layer, slot), one in ones.items()]
        typed = [replace(r, layer_type={"fc": "Linear", "bn": "BatchNorm2d"}[r.layer]) for r in found]
        return memory_run(layers, step(0, typed))

    assert compare_runs(run(0), run(1)).first_diff.extent.text == "2 of 4 updates differ: norms."


def test_the_steps_before():
    # The toy run has noise of 1e-7 on each element of the other side.
    text = reach(UPDATES, first=2)
    assert text.startswith("All 4 updates differ. In the 2 steps compared before it agreed to ")
    assert 3e-8 < float(text.removesuffix(".").rpartition(" ")[2]) < 3e-7
    assert "In the step compared before it agreed to" in reach(UPDATES, first=1)
    same = compare_runs(toy_run(), toy_run(plant=where(["fc1/update/bias"], lambda v: v + 0.5, 2))).first_diff.extent
    assert (same.agreed, same.steps) == (0.0, 2) and same.text.endswith(
        "In the 2 steps compared before it agreed exactly."
    )


def test_it_is_in_json():
    found = to_json(compare_runs(toy_run(), toy_run(paddle=True, plant=where(UPDATES, lambda v: v + 0.5))))
    assert found["first_diff"]["extent"] == "All 4 updates differ."


def test_a_first_diff_that_no_tensor_shows_has_none():
    assert FirstDiff(0, "forward", "a", "b", statement="x").extent is None

"""What records of a step are called is known without any of them, and their values are not to be had that way."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from kit.records import as_sketch, info, linear, record, root, step, write_run

from padiff import compare_runs
from padiff.align import align
from padiff.dump import open_run
from padiff.dump.storage import Storage
from padiff.pair.plans import PairPlans
from padiff.records import Both, CompactDiffs
from padiff.records.pair_table import PairTable
from padiff.records.step_diffs import StepDiffs, empty_rows
from padiff.records.step_schema import StoredRecords, ValuesNotLoadedError, fact_of, without_values

TREE = info(root(1), linear("fc", 3, 2))
PACKED, FILES = Storage(pack=True), Storage()
STAGES = (("input", "input.x"), ("weight", "weight"), ("forward", "output.0"), ("grad", "weight"), ("update", "weight"))


def one(number: int, noise: float = 0.0, sketched: bool = False):
    """A step of a layer; its records in full or, but for the input, as sketches."""
    values = np.random.default_rng(number)
    records = [
        record("fc", *site, values.normal(size=(2, 3)) * (1 + noise), call=site[0] == "forward") for site in STAGES
    ]
    return step(number, [as_sketch(r) if sketched and r.stage != "input" else r for r in records])


def written(path, *steps, storage=PACKED):
    return open_run(write_run(path, TREE, steps, storage=storage))


@pytest.fixture
def made(monkeypatch):
    """The records and the pairs that were made because somebody looked at them."""
    found = []
    for cls in (StoredRecords, PairTable):

        def at(self, place, cls=cls, was=cls._at):
            if self._made[place] is None:
                found.append((cls.__name__, place))
            return was(self, place)

        monkeypatch.setattr(cls, "_at", at)
    return found


def test_they_are_called_as_they_are_and_none_is_made(tmp_path, made):
    (read,) = written(tmp_path / "run", one(0), one(1, sketched=True)).steps(1)
    names = without_values(read.records)
    assert not made and len(names) == len(read.records) == 5
    assert [replace(r, source=None) for r in names] == [replace(r, source=None) for r in read.records]
    assert len(made) == 4  # the input is kept in full, and read with the step


def test_their_values_are_not_to_be_had(tmp_path):
    (read,) = written(tmp_path / "run", one(0)).steps(0)
    (name, *_) = without_values(read.records)
    for ask in (lambda: name.value, lambda: name.source.sketched, lambda: name.source.identity):
        with pytest.raises(ValuesNotLoadedError):
            ask()


def test_steps_that_call_theirs_the_same_share_them_however_they_are_kept(tmp_path):
    run, other = written(tmp_path / "a", one(0), one(1, sketched=True)), written(tmp_path / "b", one(0, 1e-3))
    steps = [run.steps(0)[0], run.steps(1)[0], other.steps(0)[0]]
    assert len({id(without_values(each.records)) for each in steps}) == 1


def test_they_go_with_the_steps(tmp_path):
    run = written(tmp_path / "run", one(0))
    names = weakref.ref(without_values(run.steps(0)[0].records))
    gc.collect()
    assert names() is None and len(without_values(run.steps(0)[0].records)) == 5


def test_a_fact_is_found_of_what_they_are_called_and_once(tmp_path, made):
    run, asked = written(tmp_path / "run", one(0), one(1)), []

    def stages(records):
        asked.append(records)
        return [r.stage for r in records]

    found = [fact_of(run.steps(number)[0].records, stages) for number in (0, 1)]
    assert found == [[stage for stage, _ in STAGES]] * 2 and len(asked) == 1 and not made


def test_records_of_which_that_is_not_known_are_themselves(tmp_path):
    (read,) = written(tmp_path / "run", one(0), storage=FILES).steps(0)
    assert without_values(read.records) is read.records and without_values(list(read.records)) == list(read.records)


def test_runs_that_match_are_compared_without_an_object_for_each_record_of_later_steps(tmp_path, made, monkeypatch):
    monkeypatch.setattr("padiff.compare.coverage._UNFOLDED", 0)
    layers, values = 200, np.random.default_rng(0)
    tree = info(root(layers), *(linear(f"fc{k}", 3, 2) for k in range(layers)))
    tensors = {(k, stage): values.normal(size=(2, 3)).astype(np.float32) for k in range(layers) for stage, _ in STAGES}
    records = [record(f"fc{k}", *site, tensors[k, site[0]]) for site in STAGES for k in range(layers)]
    folders = [
        write_run(tmp_path / name, tree, [step(number, map(as_sketch, records)) for number in (0, 1)], storage=PACKED)
        for name in "ab"
    ]
    report = compare_runs(*folders, workers=1)
    assert report.passed and len(report.diffs) == 2 * layers * len(STAGES)
    # Pairing reads the records of the first step. Some few pairs are looked at: the worst, where judging begins, and 32
    # parameters of the reference in two steps, to see how far it moved.
    assert len([kind for kind, _ in made if kind == "PairTable"]) < 5
    paired = 2 * layers * len(STAGES)
    assert paired <= len([kind for kind, _ in made if kind == "StoredRecords"]) < paired + 10 + 2 * 32 * 2


def test_diffs_of_steps_whose_losses_are_scaled_are_folded_without_a_record(tmp_path, made):
    outputs = [record("fc", "backward", f"output.{k}", np.ones((2, 2))) for k in range(5)]
    runs = Both(*(written(tmp_path / f"x{scale}", step(0, outputs, loss_scale=scale)) for scale in (8.0, 16.0)))
    pairs = PairPlans().pairs(*runs.map(lambda run: run.steps(0)[0]), align(TREE, TREE))
    folded = CompactDiffs(runs)
    folded.add(StepDiffs(pairs, pairs.sites, empty_rows(5), {}, {}), Both(0, 0), 0)
    assert {place for _, place in made} <= {0}  # which says the step's number
    assert [diff.pair.scales for diff in folded] == [pair.scales for pair in pairs] == [Both(8.0, 16.0)] * 5

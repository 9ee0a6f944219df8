"""Activation recomputation: what holds of the training, and that the records say what was computed twice."""

from __future__ import annotations

import pytest
from paddle.distributed.fleet.utils import recompute
from torch.utils.checkpoint import checkpoint

import padiff

from .loops import Frozen
from .training import assert_neutral, counts, train


class Plain(Frozen):
    """Dropout inside of the block that others recompute."""

    def build(self):
        kit, call = self.kit, self.call

        return kit.net(
            lambda net, x: net.last(call(net.block, net.first(x))),
            first=kit.Linear(4, 8),
            last=kit.Linear(8, 3),
            block=kit.Sequential(kit.Linear(8, 8), kit.Dropout(0.5)),
        )

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def call(self, block, x):
        return block(x)


class Recomputed(Plain):
    """The fault draws another dropout mask when it recomputes."""

    reentrant = False

    def call(self, block, x):
        way = checkpoint if self.kit.name == "torch" else recompute
        return way(block, x, use_reentrant=self.reentrant, preserve_rng_state=not self.fault)


class Reentrant(Recomputed):
    reentrant = True


WAYS = pytest.mark.parametrize("way", [Recomputed, Reentrant], ids=["not reentrant", "reentrant"])


@WAYS
def test_the_training_is_the_same_to_the_bit_and_recorded_once(kit, way, level, tmp_path):
    recorded = train(way(kit), tmp_path / "run", level)
    assert_neutral(train(way(kit)), recorded)
    for number in recorded.run.numbers():
        assert counts(recorded.run, number) == {
            "input": 1,
            "weight": 6,
            "forward": 6,
            "loss": 1,
            "backward": 6,
            "grad": 6,
            "update": 6,
            "rate": 1,
        }


@WAYS
def test_it_matches_a_run_without_recomputation_but_for_another_dropout_mask(kit, way, level, tmp_path):
    train(Plain(kit), tmp_path / "plain", level)
    train(way(kit), tmp_path / "run", level)
    train(way(kit, fault=True), tmp_path / "wrong", level)
    report = padiff.compare_runs(tmp_path / "plain", tmp_path / "run")
    assert report.passed, report.first_diff.message
    first = padiff.compare_runs(tmp_path / "plain", tmp_path / "wrong").first_diff
    assert first.stage in ("backward", "grad"), first.message
    assert first.step == 0


@WAYS
def test_the_records_of_what_was_recomputed_say_so(kit, way, level, tmp_path):
    run = train(way(kit), tmp_path / "run", level).run
    (step,) = run.steps(0)
    reported = {record.layer for record in step.records if record.recomputed}
    assert reported == {"block", "block.0", "block.1"}
